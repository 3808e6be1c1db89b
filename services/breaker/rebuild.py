"""Looking after the breakers: filling an empty Redis from the event log, and showing workers that the service is alive.

Redis is a view that can be lost. The state of a breaker is in its latest transition, and its counts in the latest
attempts; stopped tasks are in the guards' events, and the use of the others in the records of their jobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import structlog

from breakwater.breakers.contract import BreakerTransition
from breakwater.breakers.rules import BreakerKey
from breakwater.breakers.store import Breakers, Loaded, Saving
from breakwater.config import Config
from breakwater.health.rules import recalled
from breakwater.health.store import Healths
from breakwater.jobs.contract.execution import Attempt, Execution
from breakwater.jobs.store.records import read_record
from breakwater.kernel.nats.errors import BusError, BusUnavailableError
from breakwater.kernel.nats.lookup import ClientGetter, Lookup
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.process import background
from breakwater.kernel.process.outage import Outage, Outages
from breakwater.kernel.types import ms_from_time
from breakwater.limits.contract import GuardEvent
from breakwater.limits.rules.guard import Trip, outcome_of
from breakwater.limits.store.tasks import TaskKey, Tasks, Tripped
from services.breaker.handlers import BreakerHandler

HEALTH_FROM_S = 600.0
"""The least time for which attempts are read back for an agent's health."""

TASKS_FROM_S = 3600.0
"""The time for which records are read back for the use of running tasks."""

CHECK_EVERY_S = 1.0
BEAT_EVERY = 3
"""Looks until it reports again that it is alive, which it also does after filling; valid for `ALIVE_MS`."""

LONG_LOOK_EVERY = 10
"""Looks until it publishes pending transitions, and compares the breakers with the log, again."""

BATCH = 500


class Rebuild:
    """Fills breakers, health and tasks. All of it may be repeated, also by several concurrently."""

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
        self.config, self._handler = config, handler
        self._breakers, self._healths, self._tasks = breakers, healths, tasks
        self._lookup, self._now = Lookup(connection), now

    async def fill(self, log: str, known: str | None) -> None:
        """Fills Redis from a log.

        Args:
            log: the log's identity.
            known: the identity of the log from which Redis was filled; None if Redis is empty.

        Raises:
            StateUnavailableError, BusUnavailableError: fill again. Also if Redis was emptied, or if the log was read
                from a replica that is behind.
        """
        logger, filling = structlog.get_logger(), await self._breakers.begin_filling()
        if known is not None:
            logger.warning(
                "log_replaced", what="EVENTS", effect="breakers keep their state, and their counts start over"
            )
            await self._forget_sequences()
        breakers = await self.recall_breakers()
        guards = await self._latest_of_guards()
        tasks = await self._recall_trips(guards)
        if breakers or tasks:
            # Not at the first start of a plane, when nothing can be lost.
            logger.warning(
                "breakers_lost", effect="calls were not blocked meanwhile", remedy="filling them from EVENTS"
            )
        attempts = await self._replay()
        jobs = await self._recall_usage(guards)
        await self._breakers.mark_filled(log, filling)
        logger.info("breakers_filled", breakers=breakers, stopped_tasks=tasks, attempts=attempts, jobs_of_tasks=jobs)

    async def _forget_sequences(self) -> None:
        for key, found in await self._breakers.all():
            loaded, saved = found, False
            while not saved:
                fresh = replace(
                    loaded.breaker, failures=(), forgotten=0, last_success=0, successes=(), closed_at=0, counted=()
                )
                [saved] = await self._breakers.save([Saving(key, loaded, fresh, loaded.unpublished)])
                if not saved:
                    [loaded] = await self._breakers.load([key])
        await self._healths.forget(list(self.config.agents))

    async def recall_breakers(self) -> int:
        """Brings breakers that are behind the log to the state of their latest transition; returns their number."""
        transitions = await self._lookup.last_of_each(Stream.EVENTS, "bw.breakers.>", whole=True)
        latest: dict[BreakerKey, tuple[BreakerTransition, int]] = {}
        for found in transitions:
            if (event := found.read(BreakerTransition)) is not None:
                latest[BreakerKey(event.agent, event.model)] = event, found.sequence
        breakers = await self._breakers.load(list(latest)) if latest else []
        found = zip(latest.items(), breakers, strict=True)
        return sum([await self._recall(key, *newest, loaded) for (key, newest), loaded in found])

    async def _recall(self, key: BreakerKey, latest: BreakerTransition, sequence: int, loaded: Loaded) -> bool:
        # One that is isolated, or not published yet, is the latest decision, whatever its version.
        while loaded.breaker.version < latest.version and not (
            loaded.unpublished or loaded.breaker.state == "isolated"
        ):
            [saved] = await self._breakers.save([Saving(key, loaded, recalled(latest, sequence), None)])
            if saved:
                return True
            [loaded] = await self._breakers.load([key])
        return False

    async def _latest_of_guards(self) -> dict[TaskKey, GuardEvent]:
        latest: dict[TaskKey, GuardEvent] = {}
        async with aclosing(self._lookup.scan(Stream.EVENTS, "bw.guards.>", whole=True)) as stored:
            async for found in stored:
                if (event := found.read(GuardEvent)) is not None and event.kind != "soft_cap":
                    latest[TaskKey(event.tenant, event.task_id)] = event
        return latest

    async def _recall_trips(self, guards: Mapping[TaskKey, GuardEvent]) -> int:
        count = 0
        for key, event in guards.items():
            if event.kind == "tripped" and event.rule is not None:
                trip = Trip(event.rule, event.reason)
                stopped = Tripped(trip, event.agent, event.execution_id or "", ms_from_time(event.at), published=True)
                await self._tasks.restore(key, stopped)
                count += 1
        return count

    async def _recall_usage(self, guards: Mapping[TaskKey, GuardEvent]) -> int:
        """Counts the latest jobs of tasks again; those that were counted meanwhile stay counted once."""
        if all(agent.guard is None for agent in self.config.agents.values()):
            return 0
        since = self._now() - timedelta(seconds=TASKS_FROM_S)
        count = 0
        async with aclosing(self._lookup.scan(Stream.EVENTS, "bw.executions.>", start=since, whole=True)) as stored:
            async for found in stored:
                # Records hold conversations, and few belong to a task: most need not be parsed.
                if b'"task_id":"' in found.data and (record := read_record(found, Execution)) is not None:
                    count += await self._recount(record, guards)
        return count

    async def _recount(self, record: Execution, guards: Mapping[TaskKey, GuardEvent]) -> bool:
        agent = self.config.agents.get(record.agent)
        if agent is None or agent.guard is None or record.task_id is None or record.dry_run:
            return False
        key = TaskKey(record.tenant, record.task_id)
        last = guards.get(key)
        if last is not None and last.kind == "reset" and record.completed_at <= last.at:
            return False
        await self._tasks.record(key, record.execution_id, outcome_of(record, agent.guard))
        return True

    async def _replay(self) -> int:
        rules = [agent.breaker for agent in self.config.agents.values() if agent.breaker is not None]
        window_s = max([HEALTH_FROM_S, *(rule.within_s for rule in rules)])
        since = self._now() - timedelta(seconds=window_s)
        batch: list[tuple[int, int, Attempt]] = []
        count = 0
        async with aclosing(self._lookup.scan(Stream.EVENTS, "bw.attempts.>", start=since, whole=True)) as stored:
            async for found in stored:
                if (attempt := read_record(found, Attempt)) is not None:
                    batch.append((found.sequence, ms_from_time(found.stored_at), attempt))
                    count += 1
                if len(batch) == BATCH:
                    await self._handler.apply(self._handler.sorted(batch))
                    batch = []
        await self._handler.apply(self._handler.sorted(batch))
        return count


class Heartbeat:
    """Fills the breakers if Redis is empty, and signals the workers that a breaker service is alive."""

    def __init__(self, handler: BreakerHandler, breakers: Breakers, rebuild: Rebuild, lookup: Lookup) -> None:
        self._handler, self._breakers, self._rebuild, self._lookup = handler, breakers, rebuild, lookup
        self._outages = Outages()
        self._filling = Outage("filling breakers from EVENTS")
        self._publishing = Outage("publishing transitions")
        self._log: str | None = None
        self._looked = asyncio.Event()
        self._looks_to_beat = 0

    async def is_log(self, known: str | None) -> bool:
        """True if breakers are derived from the log; otherwise False after the next look, which fills them.

        Called for each batch: an outcome on breakers that were just lost could open one that an operator has isolated.

        Args:
            known: the log from which they are derived; None if they are lost.
        """
        if known is not None and known == self._log:
            return True
        self._looked.clear()
        await self._looked.wait()
        return False

    async def run(self) -> None:
        """Looks every second, until cancelled."""
        looks = 0
        while True:
            await self._tried(self._filling, self.look)
            if looks % LONG_LOOK_EVERY == 0:
                await self._tried(self._publishing, self._handler.publish_pending)
                # Redis may have restarted with data from a moment before it died.
                await self._tried(self._filling, self._rebuild.recall_breakers)
                with suppress(BusUnavailableError):  # logged by the caller that waits for it
                    self._log = (await self._lookup.facts(Stream.EVENTS)).identity
            looks += 1
            await asyncio.sleep(background.aligned_delay(CHECK_EVERY_S))

    async def _tried(self, outage: Outage, work: Callable[[], Awaitable[object]]) -> None:
        """Does repeatable work; a failure other than an outage is logged, and the next look tries again.

        While filling fails there is no heartbeat, so workers log that no breaker service is alive.
        """
        await outage.run_logged(lambda: self._outages.retry_while_unavailable(work), expected=BusError)

    async def look(self) -> None:
        """Fills lost breakers. Raises StateUnavailableError, BusUnavailableError; may be repeated."""
        known = await self._breakers.filled_from()
        if known is None or known != self._log:
            # Read again: another breaker service may have seen before us that the log is another.
            self._log = (await self._lookup.facts(Stream.EVENTS)).identity
            if known != self._log:
                await self._rebuild.fill(self._log, known)
            self._looks_to_beat = 0
        if self._looks_to_beat == 0:
            await self._breakers.beat()
            self._looks_to_beat = BEAT_EVERY
        self._looks_to_beat -= 1
        self._looked.set()
