"""How long an answer is waited for."""

from __future__ import annotations

import asyncio
from types import TracebackType

STALL_S = 1.0
"""A limit that is noticed so late is noticed after a stall, of this process or of its machine."""

READ_S = 1.0
"""How long what came during a stall is then read."""


class Limit:
    """A limit of time as `asyncio.timeout` sets it; but an answer that came during a stall is no late one.

    After a stall the time is over before anything is read, though the answer may have come long ago: it would be
    paid for, and asked for again.
    """

    def __init__(self, limit_s: float) -> None:
        """Takes the seconds from its entry on."""
        self._limit_s, self._timeout = limit_s, asyncio.timeout(None)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Limit:
        await self._timeout.__aenter__()
        self.reschedule(self._loop.time() + self._limit_s)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Raises TimeoutError where the time was over."""
        self._stop()
        return await self._timeout.__aexit__(kind, error, traceback)

    def reschedule(self, when: float) -> None:
        """Sets another end, by the loop's clock."""
        self._stop()
        self._timeout.reschedule(None)
        self._timer = self._loop.call_at(when, self._over, when)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _over(self, when: float) -> None:
        now = self._loop.time()
        self._timeout.reschedule(now + READ_S if now - when > STALL_S else now)
