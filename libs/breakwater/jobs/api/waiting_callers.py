"""Notices between `request` and the workers about callers, so that no flood stands in another caller's way.

Workers say whose jobs wait for a slot: further jobs of those callers go straight to where they wait (PARKED), and not
into the queue that all callers share. `request` says who begins to call an agent, because that caller's first job may
stand behind a long queue: workers then begin to make room. Both are hints on core NATS; lost ones cost time alone.
"""

from __future__ import annotations

import asyncio
from time import monotonic

import orjson
import structlog

from breakwater.jobs.rules.turns import CallerTurn
from breakwater.kernel.nats.core import ClientGetter, core_subscription
from breakwater.kernel.nats.errors import BusUnavailableError
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import NEW_CALLERS, WAITING_CALLERS
from breakwater.kernel.process.outage import Outage

WAITS_FOR_S = 1.5
"""A caller counts as waiting for so long after a worker has said so."""

SAY_EVERY_S = 20.0
"""A caller that goes on calling is announced again after so long; workers remember callers for longer."""

MAX_CALLERS = 10_000
RETRY_S = 1.0


class WaitingCallers:
    """The callers with jobs that wait for their turn, as a process of `request` knows them."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._until: dict[tuple[str, str], float] = {}
        self._announced: dict[tuple[str, CallerTurn], float] = {}

    def has(self, agent: str, turn: CallerTurn) -> bool:
        """Returns True if jobs of a caller wait for a slot of an agent."""
        if not self._until:
            return False
        now = monotonic()
        return any(self._until.get((agent, caller.text), 0.0) > now for caller in (turn, turn.of_key))

    async def announce(self, agent: str, turn: CallerTurn) -> None:
        """Says that a caller calls an agent, unless that was said a moment ago."""
        now = monotonic()
        if self._announced.get((agent, turn), 0.0) > now:
            return
        if len(self._announced) >= MAX_CALLERS:
            self._announced.clear()
        self._announced[agent, turn] = now + SAY_EVERY_S
        try:
            await self._publisher.send(NEW_CALLERS, orjson.dumps((agent, turn.text)))
        except BusUnavailableError as error:
            structlog.get_logger().debug("caller_not_announced", agent=agent, error=str(error))

    async def follow(self, connection: ClientGetter) -> None:
        """Hears the workers until it is cancelled."""

        async def follow() -> None:
            async with core_subscription(connection, WAITING_CALLERS, self._hear):
                await asyncio.Event().wait()

        await Outage("waiting callers").retry_until_available(follow, on=BusUnavailableError, retry_s=RETRY_S)

    def _hear(self, data: bytes) -> None:
        until = monotonic() + WAITS_FOR_S
        if len(self._until) >= MAX_CALLERS:
            self._until.clear()
        self._until |= dict.fromkeys(map(tuple, orjson.loads(data)), until)
