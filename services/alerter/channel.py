"""What a channel is, and how patiently an alert is sent to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol
from urllib.parse import urlsplit

import aiohttp

from breakwater.config import ConfigError
from breakwater.contracts.events import Alert
from breakwater.policy.classify import retry_after_s

_WORTH_RETRYING = frozenset({408, 425, 429})


class SendError(Exception):
    """An alert did not arrive, as far as we know. Its text names no secret."""

    def __init__(self, message: str, *, permanent: bool = False, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.permanent = permanent
        """Whether the receiver would say the same to the same alert again."""
        self.retry_after_s = retry_after_s


class Channel(Protocol):
    """One way to reach people."""

    @property
    def name(self) -> str:
        """As in the config, and in the name of its consumer."""
        ...

    @property
    def interval_s(self) -> float:
        """The least time between two sends; 0 where the receiver sets no limit."""
        ...

    async def open(self) -> None:
        """Makes ready to send."""
        ...

    async def send(self, alert: Alert) -> None:
        """Sends once.

        Raises:
            SendError: it did not arrive.
        """
        ...

    async def close(self) -> None:
        """Lets go of connections."""
        ...


@dataclass(frozen=True, slots=True)
class Schedule:
    """When a failed send is repeated."""

    first_s: float = 0.5
    max_s: float = 60.0
    max_retry_after_s: float = 3600.0
    tries: int = 12
    tries_if_permanent: int = 3
    """More than one, as a receiver that is being deployed may say 404 for a moment."""

    def backoff_s(self, deliveries: int) -> float:
        """The wait after delivery number `deliveries` (from 1): doubling, up to the ceiling."""
        return min(self.first_s * 2.0 ** min(deliveries - 1, 64), self.max_s)

    def retry_in_s(self, failure: SendError, deliveries: int) -> float | None:
        """How long to wait after a failure, or None when it is time to give up."""
        if deliveries >= (self.tries_if_permanent if failure.permanent else self.tries):
            return None
        return max(self.backoff_s(deliveries), self.pause_s(failure))

    def pause_s(self, failure: SendError) -> float:
        """How long the receiver asked not to be called at all."""
        return min(failure.retry_after_s or 0.0, self.max_retry_after_s)


FIVE_MINUTES = Schedule()
"""How long the built-in values go on."""


class Pace:
    """Turns to send, at least `interval_s` apart, in the order in which they were asked for."""

    def __init__(self, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._next_at = clock()
        self._queue = asyncio.Lock()

    async def turn(self) -> None:
        """Waits for the next turn."""
        async with self._queue:
            # Again after each sleep: a pause may have begun meanwhile.
            while (wait_s := self._next_at - self._clock()) > 0:  # noqa: ASYNC110  it waits for a time, not for an event
                await asyncio.sleep(wait_s)
            self._next_at = self._clock() + self._interval_s

    def pause(self, for_s: float) -> None:
        """Gives no turn for a while: the receiver asked for it."""
        self._next_at = max(self._next_at, self._clock() + for_s)


def check_answer(status: int, headers: Mapping[str, str], now: datetime, detail: str = "") -> None:
    """Takes any 2xx for a delivery.

    Raises:
        SendError: for everything else. Redirects are refusals too: they are not followed.
    """
    if 200 <= status < 300:
        return
    lowered = {name.lower(): value for name, value in headers.items()}
    raise SendError(
        f"the receiver answered {status} {detail}".rstrip(),
        permanent=status < 500 and status not in _WORTH_RETRYING,
        retry_after_s=retry_after_s(lowered, now),
    )


def no_answer(error: Exception) -> SendError:
    """Translates what HTTP clients raise. Their texts may hold the whole URL, which can be a secret."""
    if isinstance(error, TimeoutError):
        return SendError("no answer in time")
    if isinstance(error, aiohttp.ClientConnectorError):
        return SendError(str(error))  # host and port only
    return SendError(f"no usable answer ({type(error).__name__})")


def require_http_url(url: str, setting: str) -> str:
    """Checks a URL without showing it.

    Raises:
        ConfigError: it is not an http or https URL.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"{setting}: must be a URL that begins with https:// or http://")
    return url
