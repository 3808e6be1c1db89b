"""How full the streams are that have a limit in bytes, for Prometheus and the log: before one is, not after."""

from __future__ import annotations

import asyncio

import structlog

from breakwater.bus.errors import BusError
from breakwater.bus.lookup import Lookup
from breakwater.bus.topology import NEARLY_FULL, WHEN_FULL
from breakwater.contracts.subjects import Stream
from breakwater.metrics import StreamMetrics
from breakwater.outage import Outage

LOOK_EVERY_S = 30.0
WATCHED = (Stream.JOBS, Stream.EVENTS, Stream.RESULTS, Stream.DLQ, Stream.ALERTS)


class StreamFill:
    """Looks at the streams now and then."""

    def __init__(self, lookup: Lookup, metrics: StreamMetrics) -> None:
        self._lookup = lookup
        self._metrics = metrics
        self._warned: set[Stream] = set()
        self._outage = Outage("the streams' sizes")

    async def run(self) -> None:
        """Looks again and again until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self._outage.run_logged(self.look, expected=BusError)

    async def look(self) -> None:
        """Publishes how full each stream is, and logs when one begins or ends to be nearly full. Raises BusError."""
        for stream in WATCHED:
            facts = await self._lookup.facts(stream)
            used = facts.bytes / facts.max_bytes if facts.max_bytes > 0 else 0.0
            self._metrics.used(stream, used)
            log = structlog.get_logger().bind(stream=stream.value, used=round(used, 2))
            # The oldest alerts go, at any time once their stream has been filled: that needs nobody.
            if used >= NEARLY_FULL and stream is not Stream.ALERTS and stream not in self._warned:
                self._warned.add(stream)
                log.warning("stream_nearly_full", when_full=WHEN_FULL[stream])
            elif used < NEARLY_FULL and stream in self._warned:
                self._warned.discard(stream)
                log.info("stream_has_room_again")
