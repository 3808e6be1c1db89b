"""A provider's key: where it is found, which reading of it is in use, and reading it anew when it was refused."""

from __future__ import annotations

import asyncio

import structlog

from breakwater.errors import ConfigError
from breakwater.secret_refs import SecretRef


class Credential:
    """A key, or that there is none.

    Args:
        ref: where it is found; None for a provider that needs none.

    Attributes:
        value: the key. It stands in no log, no error and no repr.
        version: 1 for the first reading; each one that brought another value counts one up.

    Raises:
        ConfigError: it can't be read, or can't be sent in an HTTP header.
    """

    def __init__(self, ref: SecretRef | None) -> None:
        self._ref = ref
        self.value: str | None = None if ref is None else _read(ref)
        self.version = 1
        self._lock = asyncio.Lock()
        self._reads = 0
        self._unreadable = False

    def __repr__(self) -> str:
        return f"Credential({self._ref!r}, version={self.version})"

    async def refresh(self, used: int | None) -> bool:
        """Reads the source again, once for all callers that wait for it at the same time.

        Args:
            used: the version that was refused; None for the one in use now.

        Returns:
            Whether there is a newer version than that one. A source that can't be read keeps the value as it is.
        """
        if self._ref is None:
            return False
        refused, reads = self.version if used is None else used, self._reads
        if self.version <= refused:
            async with self._lock:
                if self._reads == reads:
                    await self._read_again(self._ref)
        return self.version > refused

    async def _read_again(self, ref: SecretRef) -> None:
        log = structlog.get_logger()
        try:
            value = await asyncio.to_thread(_read, ref)
        except ConfigError as error:
            if not self._unreadable:
                log.warning("credential_unreadable", error=str(error))
            self._unreadable = True
        else:
            if self._unreadable:
                log.info("credential_readable")
            self._unreadable = False
            if value != self.value:
                self.value = value
                self.version += 1
                log.info("credential_changed", version=self.version)
        self._reads += 1


def _read(ref: SecretRef) -> str:
    value = ref.read()
    if not (value.isascii() and value.isprintable()):
        raise ConfigError(f"{_source(ref)} holds line breaks or other characters that no HTTP header can carry")
    return value


def _source(ref: SecretRef) -> str:
    if ref.env is not None:
        return f"the environment variable {ref.env}"
    return f"the secret file {ref.file}" if ref.file is not None else "the output of the secret command"
