"""Filling an empty Redis from the event log, and saying that the breakers are looked after.

Redis is a view that can be lost. What a breaker was at is told by its latest transition, what it had counted since by
the attempts of the last while, and which tasks are stopped by the guards' events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TypeVar

import structlog
from pydantic import BaseModel, ValidationError

from breakwater.bus.errors import BusError
from breakwater.bus.lookup import Connection, Found, Lookup
from breakwater.bus.scan import last_of_each, scan
from breakwater.config import Config
from breakwater.contracts.events import BreakerTransition, GuardEvent
from breakwater.contracts.execution import Attempt
from breakwater.contracts.subjects import Stream
from breakwater.contracts.types import ms_from_time
from breakwater.patience import Patience
from breakwater.policy.breaker import BreakerKey
from breakwater.policy.guard import Trip
from breakwater.policy.transitions import recalled
from breakwater.state.breakers import Breakers, Loaded, Saving
from breakwater.state.health import Healths
from breakwater.state.tasks import TaskKey, Tasks, Tripped
from breakwater.telemetry import Outage
from services.breaker.handlers import BreakerHandler

Event = TypeVar("Event", bound=BaseModel)

LOOK_EVERY_S = 1.0
LONG_LOOK_EVERY = 10
"""Every so many looks, it is also asked whether the log is the same, and what was saved and not published is published."""

HEALTH_FROM_S = 600.0
"""How far back an agent's health is read, at least."""

BATCH = 500


class Attendance:
    """Looks after the breakers: fills them where Redis is empty, and tells workers that somebody is at work."""

    def __init__(
        self,
        config: Config,
        handler: BreakerHandler,
        breakers: Breakers,
        healths: Healths,
        tasks: Tasks,
        connection: Connection,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._config = config
        self._handler = handler
        self._breakers = breakers
        self._healths = healths
        self._tasks = tasks
        self._connection = connection
        self._lookup = Lookup(connection)
        self._now = now
        self._patience = Patience()
        self._failing = Outage("filling breakers from EVENTS")
        self._log: str | None = None
        self._looked = asyncio.Event()

    async def filled(self) -> None:
        """Waits until the breakers are what the log tells: no outcome is to meet an empty one before.

        Asked for each batch: one that met the breakers just lost could open one anew that somebody has forced open.
        """
        while self._log is None or await self._patience.redis(self._breakers.filled_from) != self._log:
            self._looked.clear()
            await self._looked.wait()

    async def run(self) -> None:
        """Looks every second, until cancelled."""
        looks = 0
        while True:
            try:
                if looks % LONG_LOOK_EVERY == 0:
                    self._log = await self._patience.nats(lambda: self._lookup.identity(Stream.EVENTS))
                    await self._patience.both(self._handler.publish_pending)
                await self._patience.both(self.look)
            except BusError as error:
                # Refused, not away: a right is missing. Nobody is let at empty breakers in silence.
                self._failing.failed(error)
            except Exception as error:
                # Whatever it is, workers are not told that somebody is at work, and say so.
                if not self._failing.lasting:
                    structlog.get_logger().exception("breakers_not_looked_after")
                self._failing.failed(error)
            else:
                self._failing.worked()
            looks += 1
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self) -> None:
        """Fills what is lost. Raises StateUnavailable, BusUnavailable; may be repeated."""
        log = self._log or await self._lookup.identity(Stream.EVENTS)
        known = await self._breakers.filled_from()
        if known != log:
            await self._fill(log, known)
        await self._breakers.attend()
        self._log = log
        self._looked.set()

    async def _fill(self, log: str, known: str | None) -> None:
        logger = structlog.get_logger()
        if known is not None:
            logger.warning("log_replaced", what="EVENTS", effect="breakers keep their state and count anew")
            await self._forget_sequences()
        breakers = await self._recall_breakers()
        tasks = await self._recall_tasks()
        if breakers or tasks:
            # Not for the first start of a plane, where there is nothing to be lost.
            logger.warning("breakers_lost", effect="calls were not held back", remedy="filling them from EVENTS")
        attempts = await self._replay()
        await self._breakers.mark_filled(log)
        logger.info("breakers_filled", breakers=breakers, stopped_tasks=tasks, attempts=attempts)

    async def _forget_sequences(self) -> None:
        for key, found in await self._breakers.all():
            loaded = found
            while not await self._breakers.save([Saving(key, loaded, without_sequences(loaded.breaker), loaded.unpublished)]):
                [loaded] = await self._breakers.load([key])
        await self._healths.forget(list(self._config.agents))

    async def _recall_breakers(self) -> int:
        told = await last_of_each(self._connection, Stream.EVENTS, "bw.breakers.>")
        latest: dict[BreakerKey, tuple[BreakerTransition, int]] = {}
        for found in told:
            if (event := _read(found, BreakerTransition)) is not None:
                latest[BreakerKey(event.agent, event.model)] = event, found.sequence
        keys = list(latest)
        return sum([await self._recall(key, *latest[key], loaded) for key, loaded in await self._load(keys)])

    async def _load(self, keys: list[BreakerKey]) -> list[tuple[BreakerKey, Loaded]]:
        return list(zip(keys, await self._breakers.load(keys) if keys else [], strict=True))

    async def _recall(self, key: BreakerKey, told: BreakerTransition, sequence: int, loaded: Loaded) -> bool:
        while loaded.breaker.version < told.version:
            [saved] = await self._breakers.save([Saving(key, loaded, recalled(told, sequence), None)])
            if saved:
                return True
            [loaded] = await self._breakers.load([key])
        return False

    async def _recall_tasks(self) -> int:
        latest: dict[TaskKey, GuardEvent] = {}
        async with aclosing(scan(self._connection, Stream.EVENTS, "bw.guards.>")) as stored:
            async for found in stored:
                if (event := _read(found, GuardEvent)) is not None:
                    latest[TaskKey(event.tenant, event.task_id)] = event
        tripped = {key: event for key, event in latest.items() if event.kind == "tripped" and event.rule is not None}
        for key, event in tripped.items():
            assert event.rule is not None
            trip = Trip(event.rule, event.reason)
            stopped = Tripped(trip, event.agent, event.execution_id or "", ms_from_time(event.at), told=True)
            await self._tasks.restore(key, stopped)
        return len(tripped)

    async def _replay(self) -> int:
        rules = [agent.breaker for agent in self._config.agents.values() if agent.breaker is not None]
        window_s = max([HEALTH_FROM_S, *(rule.within_s for rule in rules)])
        since = self._now() - timedelta(seconds=window_s)
        batch: list[tuple[int, int, Attempt]] = []
        count = 0
        async with aclosing(scan(self._connection, Stream.EVENTS, "bw.attempts.>", start=since)) as stored:
            async for found in stored:
                if (attempt := _read(found, Attempt)) is not None:
                    batch.append((found.sequence, ms_from_time(found.stored_at), attempt))
                    count += 1
                if len(batch) == BATCH:
                    await self._handler.apply(self._handler.sorted(batch))
                    batch = []
        await self._handler.apply(self._handler.sorted(batch))
        return count


def _read(found: Found, model: type[Event]) -> Event | None:
    try:
        return model.model_validate_json(found.data)
    except ValidationError:
        structlog.get_logger().warning("event_unreadable", sequence=found.sequence, subject=found.subject)
        return None
