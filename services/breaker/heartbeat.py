"""Looking after the breakers: filling them where Redis has lost them, and telling workers that somebody does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from breakwater.bus.errors import BusError, BusUnavailable
from breakwater.bus.lookup import Lookup
from breakwater.contracts.subjects import Stream
from breakwater.outage import Outage, Outages
from breakwater.state.breakers import Breakers
from services.breaker.handlers import BreakerHandler
from services.breaker.rebuild import Rebuild

LOOK_EVERY_S = 1.0
LONG_LOOK_EVERY = 10
"""Every so many looks, what was saved and not published is published, and the breakers are compared with the log."""


class Heartbeat:
    """Looks after the breakers: fills them where Redis is empty, and tells workers that somebody is at work."""

    def __init__(self, handler: BreakerHandler, breakers: Breakers, rebuild: Rebuild, lookup: Lookup) -> None:
        self._handler = handler
        self._breakers = breakers
        self._rebuild = rebuild
        self._lookup = lookup
        self._outages = Outages()
        self._filling = Outage("filling breakers from EVENTS")
        self._publishing = Outage("publishing transitions")
        self._log: str | None = None
        self._looked = asyncio.Event()

    async def filled(self) -> None:
        """Waits until the breakers are what the log tells: no outcome is to meet an empty one before.

        Asked for each batch: one that met the breakers just lost could open one anew that somebody has isolated.
        """
        while self._log is None or await self._outages.retry_while_unavailable(self._breakers.filled_from) != self._log:
            self._looked.clear()
            await self._looked.wait()

    async def run(self) -> None:
        """Looks every second, until cancelled."""
        looks = 0
        while True:
            await self._tried(self._filling, self.look)
            if looks % LONG_LOOK_EVERY == 0:
                await self._tried(self._publishing, self._handler.publish_pending)
                # Redis may have come back with what it knew a moment before it died.
                await self._tried(self._filling, self._rebuild.recall_breakers)
                with suppress(BusUnavailable):  # told by whoever waits for it
                    self._log = await self._lookup.identity(Stream.EVENTS)
            looks += 1
            await asyncio.sleep(LOOK_EVERY_S)

    async def _tried(self, outage: Outage, work: Callable[[], Awaitable[object]]) -> None:
        """Does what may be repeated; what fails for other reasons than an outage is logged, and tried at the next look.

        Nobody is let at empty breakers in silence: as long as filling fails, workers find nobody at work, and say so.
        """
        await outage.survived(lambda: self._outages.retry_while_unavailable(work), expected=BusError)

    async def look(self) -> None:
        """Fills what is lost. Raises StateUnavailable, BusUnavailable; may be repeated."""
        known = await self._breakers.filled_from()
        if known is None or known != self._log:
            # Asked anew: another breaker service may have seen before us that the log is another.
            self._log = await self._lookup.identity(Stream.EVENTS)
            if known != self._log:
                await self._rebuild.fill(self._log, known)
        await self._breakers.beat()
        self._looked.set()
