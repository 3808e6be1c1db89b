"""Waiting for what is away, for as long as it takes, or until the service is told to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from breakwater.analytics.errors import AnalyticsUnavailable, RowsRejected
from breakwater.bus.errors import BusUnavailable, PublishRefused
from breakwater.telemetry import Outage

FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 5.0


class StoppingError(Exception):
    """The service was told to stop while something was away."""


class Waiting:
    """Repeats what failed because one thing is away. That is over when nothing that is in work fails because of it."""

    def __init__(self, what: str, tell: Callable[[str, bool], None]) -> None:
        """Waits for nothing yet.

        Args:
            what: its name in the log.
            tell: called with the name after every try, and with whether it is away.
        """
        self._what = what
        self._tell = tell
        self._outage = Outage(what)
        self._failing = 0
        self._stopping = asyncio.Event()
        tell(what, False)

    def stop(self) -> None:
        """Waits no more. What works at the first try is still done."""
        self._stopping.set()

    async def patiently(self, operation: Callable[[], Awaitable[None]]) -> None:
        """Repeats an operation until the other side is there. Whatever else it raises is an answer, and is passed on.

        Raises:
            StoppingError: `stop` was called while it was away.
        """
        failing = answered = False
        delay_s = FIRST_DELAY_S
        try:
            while not await self._tried(operation):
                self._failing += not failing
                failing = True
                await self._pause(delay_s)
                delay_s = min(delay_s * 2, LONGEST_DELAY_S)
        except (RowsRejected, PublishRefused):
            answered = True
            raise
        else:
            answered = True
        finally:
            self._failing -= failing
            if answered and not self._failing:
                self._outage.worked()
                self._tell(self._what, False)

    async def _tried(self, operation: Callable[[], Awaitable[None]]) -> bool:
        """Tries once; False where the other side is away."""
        try:
            await operation()
        except (AnalyticsUnavailable, BusUnavailable) as error:
            self._outage.failed(error)
            self._tell(self._what, True)
            return False
        return True

    async def _pause(self, delay_s: float) -> None:
        try:
            await asyncio.wait_for(self._stopping.wait(), delay_s)
        except TimeoutError:
            return
        raise StoppingError
