"""The connection to a provider: its proxy, and the certificates of both ends."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import aiohttp

from breakwater.kernel.errors import ConfigError
from breakwater.kernel.security.tls import client_context

if TYPE_CHECKING:
    from breakwater.calls.providers.settings import HttpSettings, TlsFiles


LOOK_EVERY_S = 1.0
"""The least time between two looks at the files of certificates, which may be on a slow disk."""


@dataclass(frozen=True, slots=True)
class Proxy:
    """The proxy of a provider's connections, which may have none.

    Attributes:
        url: its URL; None for direct connections.
        headers: the headers for it alone, with user and password.
        secrets: the texts in it that no error may contain.
    """

    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    secrets: Collection[str] = ()

    @classmethod
    def of(cls, settings: HttpSettings) -> Proxy:
        """Reads the proxy of a provider. Raises ConfigError: its credential can't be read, or is no `user:password`."""
        if settings.proxy_auth is None:
            return cls(settings.proxy)
        user, colon, password = settings.proxy_auth.read().partition(":")
        if not colon or not password:
            raise ConfigError("proxy_auth must hold user:password")
        credential = aiohttp.encode_basic_auth(user, password)
        return cls(settings.proxy, {"Proxy-Authorization": credential}, (password, credential))


class Certificates:
    """The certificates of a provider's connections, whose files are looked at once a second while there are calls.

    Args:
        files: the files, which may change.

    Attributes:
        context: the context of new connections.

    Raises:
        ConfigError: a file is not usable.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._version = self._current_version()
        self.context: ssl.SSLContext = client_context(files, "tls.")
        self._look_at = 0.0

    def _current_version(self) -> tuple[float, ...]:
        files = (self._files.ca, self._files.cert, self._files.key)
        return tuple(file.stat().st_mtime for file in files if file is not None and file.exists())

    async def reload_changed(self) -> None:
        """Reads the certificates again if a file has changed: such that last an hour are replaced in time.

        A file that is just being written, or gone, or does not fit the other one yet, leaves them as they are.
        """
        now = asyncio.get_running_loop().time()
        if now >= self._look_at:
            self._look_at = now + LOOK_EVERY_S
            await asyncio.to_thread(self._reload)

    def _reload(self) -> None:
        try:
            version = self._current_version()
            if version != self._version:
                # Another context, as one whose key does not fit its certificate would be of no use any more.
                self.context = client_context(self._files, "tls.")
                self._version = version
        except (OSError, ConfigError):
            return
