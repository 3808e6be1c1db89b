"""Maintains the breakers: fills an empty Redis from the event log, and shows workers that the service is alive.

Redis is a view that can be lost. A breaker's state is in its latest transition, and its counts are in the latest
attempts. Stopped tasks are in the guards' events, and the usage of the others is in the records of their jobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import structlog

from breakwater.breakers.contract import BreakerTransition
from breakwater.breakers.rules.breaker import BreakerKey
from breakwater.breakers.rules.transitions import breaker_after
from breakwater.breakers.store import Breakers, LoadedBreaker, Saving
from breakwater.config import Config
from breakwater.health.store import Healths
from breakwater.jobs.contract.execution import Attempt, Execution
from breakwater.jobs.store.records import read_record
from breakwater.jobs.store.task_keys import TaskKey
from breakwater.kernel.nats.core import ClientGetter
from breakwater.kernel.nats.errors import BusError, BusUnavailableError
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.process import background
from breakwater.kernel.process.outage import Outage, Outages
from breakwater.kernel.types import ms_from_time
from breakwater.limits.contract import GuardEvent
from breakwater.limits.rules.guard import Trip, outcome_of
from breakwater.limits.store.tasks import Tasks, TripRecord
from breakwater.services.breaker.handlers import BreakerHandler

HEALTH_FROM_S = 600.0
"""The least time span of attempts that is read back for an agent's health."""

TASKS_FROM_S = 3600.0
"""The time span of records that is read back for the usage of running tasks."""

CHECK_EVERY_S = 1.0
BEAT_EVERY = 3
"""The number of checks between two reports that it is alive; a report is valid for `ALIVE_MS`. It also reports after
filling."""

LONG_LOOK_EVERY = 10
"""The number of checks after which it advances the breakers and compares them with the log."""

BATCH = 500


class Rebuild:
    """Fills breakers, health and tasks. All of this may be repeated, even by several processes concurrently."""

    def __init__(
        self,
        config: Config,
        handler: BreakerHandler,
        breakers: Breakers,
        healths: Healths,
        tasks: Tasks,
        connection: ClientGetter,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.config = config
        self._handler = handler
        self._breakers = breakers
        self._healths = healths
        self._tasks = tasks
        self._lookup = Lookup(connection)
        self._now = now

    async def fill(self, log: str, filled_from: str | None) -> None:
        """Fills Redis from a log.

        Args:
            log: the log's identity.
            filled_from: the identity of the log from which Redis was filled; None if Redis is empty.

        Raises:
            StateUnavailableError, BusUnavailableError: fill again. Also if Redis was emptied, or if the log was read
                from a replica that is behind.
        """
        logger = structlog.get_logger()
        filling = await self._breakers.begin_filling()
        if filled_from is not None:
            logger.warning(
                "log_replaced", what="EVENTS", effect="breakers keep their state, and their counts start over"
            )
            await self._forget_sequences()
        breakers = await self.recall_breakers()
        guards = await self._latest_of_guards()
        tasks = await self._recall_trips(guards)
        if breakers or tasks:
            # Not at a plane's first start, when nothing can have been lost.
            logger.warning(
                "breakers_lost", effect="calls were not blocked meanwhile", remedy="filling them from EVENTS"
            )
        attempts = await self._replay(filling)
        jobs = await self._recall_usage(guards)
        await self._breakers.mark_filled(log, filling)
        logger.info("breakers_filled", breakers=breakers, stopped_tasks=tasks, attempts=attempts, jobs_of_tasks=jobs)

    async def _forget_sequences(self) -> None:
        for key, stored in await self._breakers.all():
            loaded = stored
            saved = False
            while not saved:
                fresh = replace(
                    loaded.breaker, failures=(), forgotten=0, last_success=0, successes=(), closed_at=0, counted=()
                )
                [saved] = await self._breakers.save([Saving(key, loaded, fresh, loaded.unpublished)])
                if not saved:
                    [loaded] = await self._breakers.load([key])
        await self._healths.forget(list(self.config.agents))
        await self._handler.forget_shadows()

    async def recall_breakers(self) -> int:
        """Updates breakers that lag behind the log to their latest transition. Returns their number."""
        transitions = await self._lookup.last_of_each(Stream.EVENTS, "bw.breakers.>", complete=True)
        latest: dict[BreakerKey, tuple[BreakerTransition, int]] = {}
        for message in transitions:
            if (event := message.read(BreakerTransition)) is not None:
                latest[BreakerKey(event.agent, event.model)] = event, message.sequence
        breakers = await self._breakers.load(list(latest)) if latest else []
        pairs = zip(latest.items(), breakers, strict=True)
        return sum([await self._recall(key, *newest, loaded) for (key, newest), loaded in pairs])

    async def _recall(self, key: BreakerKey, latest: BreakerTransition, sequence: int, loaded: LoadedBreaker) -> bool:
        # A breaker that is isolated, or has an unpublished transition, is the latest decision, whatever its version.
        while loaded.breaker.version < latest.version and not (
            loaded.unpublished or loaded.breaker.state == "isolated"
        ):
            [saved] = await self._breakers.save([Saving(key, loaded, breaker_after(latest, sequence), None)])
            if saved:
                return True
            [loaded] = await self._breakers.load([key])
        return False

    async def _latest_of_guards(self) -> dict[TaskKey, GuardEvent]:
        latest: dict[TaskKey, GuardEvent] = {}
        async with aclosing(self._lookup.scan(Stream.EVENTS, "bw.guards.>", complete=True)) as stored:
            async for message in stored:
                if (event := message.read(GuardEvent)) is not None and event.kind != "soft_cap":
                    latest[TaskKey(event.tenant, event.task_key)] = event
        return latest

    async def _recall_trips(self, guards: Mapping[TaskKey, GuardEvent]) -> int:
        count = 0
        for key, event in guards.items():
            if event.kind == "tripped" and event.rule is not None:
                trip = Trip(event.rule, event.reason)
                at_ms = ms_from_time(event.at)
                stopped = TripRecord(
                    trip, event.agent, event.execution_id or "", at_ms, published=True, task_id=event.task_id
                )
                await self._tasks.restore(key, stopped)
                count += 1
        return count

    async def _recall_usage(self, guards: Mapping[TaskKey, GuardEvent]) -> int:
        """Counts the latest jobs of tasks again. Jobs that were counted meanwhile still count once."""
        if all(agent.guard is None for agent in self.config.agents.values()):
            return 0
        since = self._now() - timedelta(seconds=TASKS_FROM_S)
        count = 0
        async with aclosing(self._lookup.scan(Stream.EVENTS, "bw.executions.>", start=since, complete=True)) as stored:
            async for message in stored:
                # Records hold whole conversations, and few belong to a task: do not parse the others.
                if b'"task_key":"' in message.data and (record := read_record(message, Execution)) is not None:
                    count += await self._recount(record, guards)
        return count

    async def _recount(self, record: Execution, guards: Mapping[TaskKey, GuardEvent]) -> bool:
        agent = self.config.agents.get(record.agent)
        if agent is None or agent.guard is None or record.task_key is None or record.dry_run:
            return False
        key = TaskKey(record.tenant, record.task_key)
        last = guards.get(key)
        if last is not None and last.kind == "reset" and record.completed_at <= last.at:
            return False
        await self._tasks.record(key, record.execution_id, outcome_of(record, agent.guard))
        return True

    async def _replay(self, filling: str) -> int:
        async def is_recalled(_: str | None) -> bool:
            # Applied to breakers that were lost once more, outcomes would begin them anew, at version 1.
            await self._breakers.require_filling(filling)
            return True

        rules = [agent.breaker for agent in self.config.agents.values() if agent.breaker is not None]
        window_s = max([HEALTH_FROM_S, *(rule.within_s for rule in rules)])
        since = self._now() - timedelta(seconds=window_s)
        batch: list[tuple[int, int, Attempt]] = []
        count = 0
        async with aclosing(self._lookup.scan(Stream.EVENTS, "bw.attempts.>", start=since, complete=True)) as stored:
            async for message in stored:
                if (attempt := read_record(message, Attempt)) is not None:
                    batch.append((message.sequence, ms_from_time(message.stored_at), attempt))
                    count += 1
                if len(batch) == BATCH:
                    await self._handler.apply(self._handler.batch_of(batch), is_recalled)
                    batch = []
        await self._handler.apply(self._handler.batch_of(batch), is_recalled)
        return count


class Heartbeat:
    """Fills the breakers if Redis is empty, and signals the workers that a breaker service is alive."""

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
        self._looks_to_beat = 0

    async def is_log(self, filled_from: str | None) -> bool:
        """Returns True if the breakers are derived from the log; otherwise False, after a check has filled them.

        Called for each batch: applied to breakers that were just lost, an outcome could change one that an operator has
        isolated.

        Args:
            filled_from: the log from which they are derived; None if they are lost.
        """
        if filled_from is not None and filled_from == self._log:
            return True
        self._looked.clear()
        await self._looked.wait()
        return False

    async def run(self) -> None:
        """Checks every second, until cancelled."""
        looks = 0
        while True:
            await self._try(self._filling, self.look)
            if looks % LONG_LOOK_EVERY == 0:
                await self._try(self._publishing, self._handler.advance)
                # Redis may have restarted with data from a moment before it died.
                await self._try(self._filling, self._rebuild.recall_breakers)
                with suppress(BusUnavailableError):  # logged by the caller that waits for it
                    self._log = (await self._lookup.facts(Stream.EVENTS)).identity
            looks += 1
            await asyncio.sleep(background.aligned_delay(CHECK_EVERY_S))

    async def _try(self, outage: Outage, work: Callable[[], Awaitable[object]]) -> None:
        """Does repeatable work. A failure other than an outage is logged, and the next check tries again.

        While filling fails, there is no heartbeat, and workers log that no breaker service is alive.
        """
        await outage.run_logged(lambda: self._outages.retry_while_unavailable(work), expected=BusError)

    async def look(self) -> None:
        """Fills lost breakers. Raises StateUnavailableError, BusUnavailableError; may be repeated."""
        filled_from = await self._breakers.filled_from()
        if filled_from is None or filled_from != self._log:
            # Read it again: another breaker service may have noticed before us that the log was replaced.
            self._log = (await self._lookup.facts(Stream.EVENTS)).identity
            if filled_from != self._log:
                await self._rebuild.fill(self._log, filled_from)
            self._looks_to_beat = 0
        if self._looks_to_beat == 0:
            await self._breakers.beat()
            self._looks_to_beat = BEAT_EVERY
        self._looks_to_beat -= 1
        self._looked.set()
