"""What a channel is: one way to notify people, by which one message is sent at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from http import HTTPStatus
from typing import Protocol

import aiohttp

from breakwater.contracts.alerts import Alert, AlertDigest
from breakwater.guarded_http import AddressRefused, Redirected, guarded_session
from breakwater.policy.addresses import Network
from breakwater.policy.classify import retry_after_s

_WORTH_RETRYING = frozenset({408, 425, 429})


class SendError(Exception):
    """A message did not arrive, as far as we know. Its text names no secret."""

    def __init__(
        self, message: str, *, permanent: bool = False, retry_after_s: float | None = None, disables: bool = False
    ) -> None:
        super().__init__(message)
        self.permanent = permanent
        """Whether the receiver would say the same to the same message again."""
        self.retry_after_s = retry_after_s
        self.disables = disables
        """Whether the receiver wants no more messages at all."""


class AlertSender(Protocol):
    """One way to notify people. Used by one sender at a time."""

    name: str
    """As in the config."""
    interval_s: float
    """The least time between two sends; 0 where the receiver sets no limit."""
    updates: bool
    """Whether it keeps an incident's message up to date, and so wants every change of it."""
    fingerprint: str
    """Identifies the receiver, as the config may name another one later; a hash that reveals no secret."""

    async def open(self) -> None:
        """Makes ready to send."""
        ...

    async def send(self, message: Alert | AlertDigest) -> None:
        """Sends once.

        Raises:
            SendError: it did not arrive.
        """
        ...

    async def close(self) -> None:
        """Lets go of connections."""
        ...


class HttpChannel:
    """What channels over HTTP share: a name, and a session that only connects where messages may go."""

    interval_s = 0.0
    updates = False

    def __init__(
        self, name: str, fingerprint: str, allowed: Sequence[Network], timeout_s: float, now: Callable[[], datetime]
    ) -> None:
        self.name, self.fingerprint = name, fingerprint
        self._allowed, self._timeout_s, self._now = allowed, timeout_s, now
        self._opened: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Opens the session."""
        self._opened = guarded_session(self._allowed, self._timeout_s)

    async def close(self) -> None:
        """Closes the session."""
        if self._opened is not None:
            await self._opened.close()

    @property
    def _session(self) -> aiohttp.ClientSession:
        assert self._opened is not None, "open() comes first"
        return self._opened


def check_answer(status: int, headers: Mapping[str, str], now: datetime, detail: str = "") -> None:
    """Takes any 2xx for a delivery.

    Raises:
        SendError: for everything else. Redirects are refusals too: they are not followed.
    """
    if 200 <= status < 300:
        return
    lowered = {name.lower(): value for name, value in headers.items()}
    hint = "; redirects are not followed: set the final URL" if 300 <= status < 400 else ""
    raise SendError(
        f"the receiver answered {status} {detail}".rstrip() + hint,
        permanent=status < 500 and status not in _WORTH_RETRYING,
        retry_after_s=retry_after_s(lowered, now),
        disables=status == HTTPStatus.GONE,
    )


def no_answer(error: Exception) -> SendError:
    """Translates what HTTP clients raise.

    It is raised `from None`: their own texts may hold the whole URL, which can be a secret, and causes are logged.
    """
    match error:
        case TimeoutError():
            return SendError("no answer in time")
        case aiohttp.ClientConnectorError(os_error=AddressRefused() as refused):
            return SendError(
                f"nothing is sent to {error.host}:{error.port}: its address {refused.address} is refused "
                f"({refused.why}); if it is meant, put its network into `alerts.allow_networks`",
                permanent=True,
            )
        case aiohttp.ClientConnectorError():
            return SendError(str(error))  # host and port only
        case Redirected():
            return SendError(
                f"the receiver answered {error.status}; redirects are not followed: set the final URL", permanent=True
            )
        case aiohttp.InvalidURL():
            return SendError("its URL is invalid; write its host as a name or a standard IP address", permanent=True)
        case _:
            return SendError(f"no usable answer ({type(error).__name__})")


def fingerprint(*of: str) -> str:
    """A hash of a receiver's address: 16 characters that reveal no secret."""
    return hashlib.sha256("\n".join(of).encode()).hexdigest()[:16]
