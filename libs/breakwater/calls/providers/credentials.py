"""The credentials of providers: keys, and tokens that end and are fetched again before they do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from breakwater.kernel.errors import BreakwaterError, ConfigError
from breakwater.kernel.security.secret_refs import SecretRef

RENEW_BEFORE_S = 180.0
"""The time before its end at which a token is renewed. Google's and Azure's metadata servers give a new one from five
minutes before the end on, and the same one until then."""

RETRY_S = 5.0
"""The least time between two fetches of which the first failed, or gave a token that was refused, too."""

ValueT = TypeVar("ValueT")


class CredentialError(BreakwaterError):
    """There is no usable credential. The message says where it was looked for, and contains no secret.

    Attributes:
        retry_after_s: the seconds until it is looked for again; None if it may be at once.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Issued(Generic[ValueT]):
    """A credential as its source has given it. It has no secret in its repr.

    Attributes:
        value: the credential.
        secrets: the texts in it that no answer, error or log may contain.
        renew_at: the Unix time from which on another one is fetched, in seconds; None for one that is only fetched
            again after a refusal.
        ends_at: the Unix time from which on it is not used, in seconds; None if it has no known end.
    """

    value: ValueT
    secrets: Collection[str] = ()
    renew_at: float | None = None
    ends_at: float | None = None

    def __repr__(self) -> str:
        return f"Issued({type(self.value).__name__}, ends_at={self.ends_at})"


def renewal_time(ends_at: float, now: float) -> float:
    """Returns the Unix time at which to renew what ends at `ends_at`: half its time for what ends soon."""
    return max(now + (ends_at - now) / 2, ends_at - RENEW_BEFORE_S)


class CredentialSource(Protocol[ValueT]):
    """The origin of a credential. Its `str()` names the place, for people."""

    def fetch(self) -> Issued[ValueT]:
        """Fetches the credential, in a thread: it may block.

        Raises:
            ConfigError: there is none, or it can't be used; the message says where it was looked for.
        """
        ...


class Credential(Generic[ValueT]):
    """The credential of a provider, which may need none.

    It is fetched in a thread, once for all calls that wait for it at the same time, and renewed while calls still use
    the one before. It appears in no log, no error and no repr.

    Args:
        source: where the credential comes from; None for a provider that needs none.
        issued: the credential if it has been fetched.
        clock: returns the Unix time, in seconds.

    Attributes:
        version: 1 for the first value, and one more for each new value.
    """

    def __init__(
        self,
        source: CredentialSource[ValueT] | None,
        issued: Issued[ValueT] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._source = source
        self._issued = issued
        self._clock = clock
        self.version = 1 if issued is not None or source is None else 0
        self._fetching: asyncio.Task[None] | None = None
        self._problem: str | None = None
        self._retry_at = 0.0
        self._replaced_at = -RETRY_S
        """When a refused token was last fetched again."""

    def __str__(self) -> str:
        return str(self._source)

    def __repr__(self) -> str:
        return f"Credential({self._source}, version={self.version})"

    @property
    def value(self) -> ValueT | None:
        """The latest value, whether it has ended or not; None if there is none."""
        return None if self._issued is None else self._issued.value

    @property
    def secrets(self) -> Collection[str]:
        """The secrets of the latest value."""
        return () if self._issued is None else self._issued.secrets

    @property
    def is_fresh(self) -> bool:
        """True if the value can be used now, and is not to be renewed yet; also if none is needed."""
        issued = self._issued
        if issued is None:
            return self._source is None
        return issued.renew_at is None or self._clock() < issued.renew_at

    async def current(self) -> ValueT | None:
        """Returns the value to use now; None for a provider that needs none. Waits only if there is no valid one.

        Raises:
            CredentialError: there is none, as its source gives none.
        """
        if self.is_fresh:
            return self.value
        now = self._clock()
        issued = self._issued
        may_fetch = self._fetching is not None or now >= self._retry_at
        if issued is not None and (issued.ends_at is None or now < issued.ends_at):
            if may_fetch:
                self._fetch()
            return issued.value
        if may_fetch:
            await asyncio.shield(self._fetch())
            issued = self._issued
        if issued is None or (issued.ends_at is not None and self._clock() >= issued.ends_at):
            pause_s = self._retry_at - self._clock()
            raise CredentialError(self._problem or f"{self._source} has ended", pause_s if pause_s > 0 else None)
        return issued.value

    async def refresh(self, used: int | None) -> bool:
        """Fetches the credential again, once for all callers that wait for it at the same time.

        A token that ends is not fetched again and again while a provider refuses each one, as with a wrong clock, and a
        command that fails is not run again and again: all refused calls would do so, and sources have limits.

        Args:
            used: the version that was refused; None for the current one.

        Returns:
            True if there is a newer version. If the source gives none, the value stays as it is.
        """
        if self._source is None:
            return False
        refused = self.version if used is None else used
        if self.version <= refused and (self._fetching is not None or used is None or self._may_replace()):
            await asyncio.shield(self._fetch())
        return self.version > refused

    async def close(self) -> None:
        """Ends a fetch that is under way."""
        if self._fetching is not None:
            self._fetching.cancel()

    def _may_replace(self) -> bool:
        """Returns True if a refused value may be fetched again now, and notes that it is."""
        now = self._clock()
        if self._issued is not None and self._issued.renew_at is not None and now < self._replaced_at + RETRY_S:
            return False
        if now < self._retry_at:
            return False
        self._replaced_at = now
        return True

    def _fetch(self) -> asyncio.Task[None]:
        if self._fetching is None:
            self._fetching = asyncio.create_task(self._fetch_once())
            self._fetching.add_done_callback(self._note_end)
        return self._fetching

    def _note_end(self, _: asyncio.Task[None]) -> None:
        self._fetching = None

    async def _fetch_once(self) -> None:
        assert self._source is not None
        import structlog  # as in child.py

        log = structlog.get_logger()
        try:
            issued = await asyncio.to_thread(_fetch_valid, self._source, self._clock)
        except ConfigError as error:
            if self._problem is None:
                log.warning("credential_unreadable", error=str(error))
            self._problem = str(error)
            if not _is_at_hand(self._source):
                self._retry_at = self._clock() + RETRY_S
            return
        if self._problem is not None:
            log.info("credential_readable")
        self._problem = None
        self._retry_at = 0.0
        is_new = self._issued is None or issued.value != self._issued.value
        self._issued = issued
        if is_new:
            self.version += 1
            if self.version > 1:
                log.info("credential_changed", source=str(self._source), version=self.version)


def _fetch_valid(source: CredentialSource[ValueT], clock: Callable[[], float]) -> Issued[ValueT]:
    try:
        issued = source.fetch()
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  botocore raises RuntimeError, and google-auth AttributeError
        # Its text may quote the credential.
        raise ConfigError(f"{source} gives no credential: {type(error).__name__}") from None
    if issued.ends_at is not None and issued.ends_at <= clock():
        raise ConfigError(f"{source} gives a credential that has already ended: check the clock")
    return issued


def sendable(value: str, source: object) -> str:
    """Returns a text that can be sent in an HTTP header. Raises ConfigError."""
    if not (value.isascii() and value.isprintable()):
        raise ConfigError(f"{source} contains line breaks or other characters that are not allowed in an HTTP header")
    return value


@dataclass(frozen=True, slots=True)
class SecretSource:
    """A secret of the config.

    Attributes:
        ref: where it is read from.
        every_s: the time after which it is read again, in seconds; None for one that is only read after a refusal.
    """

    ref: SecretRef
    every_s: float | None = None

    def __str__(self) -> str:
        if self.ref.env is not None:
            return f"the environment variable {self.ref.env}"
        return f"the secret file {self.ref.file}" if self.ref.file is not None else "the output of the secret command"

    def fetch(self) -> Issued[str]:
        """Reads the secret. Raises ConfigError."""
        value = sendable(self.ref.read(), self)
        return Issued(value, (value,), None if self.every_s is None else time.time() + self.every_s)


def _is_at_hand(source: CredentialSource[Any]) -> bool:
    """Returns True for a variable or a file, which may be read as often as calls are refused."""
    return isinstance(source, SecretSource) and source.ref.command is None


def read_now(ref: SecretRef | None) -> Credential[str]:
    """Returns a credential that is read now; without a reference, one for a provider that needs none.

    Raises:
        ConfigError: it can't be read, or can't be sent in an HTTP header.
    """
    return Credential[str](None) if ref is None else Credential(source := SecretSource(ref), source.fetch())
