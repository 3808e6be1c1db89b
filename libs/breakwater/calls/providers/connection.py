"""The connection to a provider: its proxy, and the certificates of both ends."""

from __future__ import annotations

import ssl
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import aiohttp

from breakwater.kernel.errors import ConfigError
from breakwater.kernel.security.tls import client_context, load_certificate

if TYPE_CHECKING:
    from breakwater.calls.providers.settings import HttpSettings, TlsFiles


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
    """The certificates of a provider's connections. New connections use the files as they are by then.

    Raises:
        ConfigError: a file is not usable.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self.context: ssl.SSLContext = client_context(files, "tls.")
        self._version = self._current_version()

    def _current_version(self) -> tuple[float, ...]:
        return tuple(file.stat().st_mtime for file in (self._files.cert, self._files.key) if file is not None)

    def reload_changed(self) -> None:
        """Reads our certificate again if its files have changed: such that last an hour are replaced in time.

        A file that is just being written, or gone, leaves the certificate as it is.
        """
        try:
            version = self._current_version()
            if version != self._version:
                load_certificate(self.context, self._files, "tls.")
                self._version = version
        except (OSError, ConfigError):
            return
