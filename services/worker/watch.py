"""Says so when nobody looks after the breakers: then models that fail are called on and on."""

from __future__ import annotations

import asyncio

from breakwater.metrics import WorkerMetrics
from breakwater.outage import Outage
from breakwater.state.breakers import ALIVE_MS, Breakers
from breakwater.state.connection import StateUnavailable

LOOK_EVERY_S = ALIVE_MS / 5000

MISSING = (
    "no breaker service is at work, or it has not read the event log yet: models that fail are called all the same; "
    "start one with `python -m services breaker`, or look at its log"
)


class Watch:
    """Watches for one worker."""

    def __init__(self, breakers: Breakers, metrics: WorkerMetrics, grace_s: float = ALIVE_MS / 1000) -> None:
        """Takes how long a breaker service may take to begin, as all begin together."""
        self._breakers = breakers
        self._metrics = metrics
        self._grace_s = grace_s
        self._outage = Outage("breakers")

    async def run(self, every_s: float = LOOK_EVERY_S) -> None:
        """Looks until cancelled."""
        loop = asyncio.get_running_loop()
        patient_until = loop.time() + self._grace_s
        while True:
            try:
                alive = await self._breakers.alive()
            except StateUnavailable:
                alive = None  # told by whoever waits for Redis
                # A breaker service may notice later than we do that it is back.
                patient_until = loop.time() + self._grace_s
            if alive:
                patient_until = 0.0
                self._outage.worked()
            elif alive is False and loop.time() >= patient_until:
                self._outage.failed(MISSING)
            if alive is not None:
                self._metrics.breaker_service_alive(alive)
            await asyncio.sleep(every_s)
