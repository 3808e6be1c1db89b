"""Keeps the counters right: rebuilds them if Redis has lost them, compares them with the record, and repairs them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial

import structlog

from breakwater.kernel.clickhouse.errors import AnalyticsUnavailableError, QueryError
from breakwater.kernel.formats import money
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.errors import BusError
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.process import background
from breakwater.kernel.process.outage import Outage, Outages
from breakwater.limits.contract import Window
from breakwater.limits.metrics import BudgetMetrics
from breakwater.limits.rules.budget import LimitTable, budget_event
from breakwater.limits.rules.ledger import AttemptSums, BudgetPlace
from breakwater.limits.rules.scopes import Dimensions, dimension_of
from breakwater.limits.store.budget_counters import BudgetCounters, CounterSource
from breakwater.limits.store.budgets import NotFilledError
from breakwater.records.reconciliation import BUDGET, BudgetComparison, RecordedSpend, add_ledgers, at_least, compare

CHECK_EVERY_S = 1.0
LONG_LOOK_EVERY = 5
"""The number of checks after which it checks again whether the log was replaced or Redis restarted."""

GRACE_S = 3.0
"""The time that workers get to restore the reservations of calls in progress: they check every second."""

SWEEP_EVERY_S = 15.0

RETURN_S = 10.0
"""The longest time for which workers are waited for that have not found another primary of Redis yet."""


class Reconciler:
    """Maintains the counters. Any number of these may run: each filling and each repair happens once."""

    def __init__(
        self,
        limits: Callable[[], LimitTable],
        counters: BudgetCounters,
        record: RecordedSpend,
        publisher: Publisher,
        lookup: Lookup,
        metrics: BudgetMetrics,
        *,
        compare_every_s: Callable[[], float],
        have_returned: Callable[[int], Awaitable[bool]],
        grace_s: float = GRACE_S,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Takes `have_returned`: True if Redis has heard all workers since a time (ms); it raises UnavailableError."""
        self._limits = limits
        self._counters = counters
        self._record = record
        self._publisher = publisher
        self._lookup = lookup
        self._metrics = metrics
        self._compare_every_s = compare_every_s
        self._have_returned = have_returned
        self._grace_s = grace_s
        self._now = now
        self._outages = Outages()
        self._filling = Outage("rebuilding the counters of limits")
        self._sweeping = Outage("charging what lost workers held")
        self._comparing = Outage("comparing the budgets with the record")
        self._completing = Outage("counting what was spent before limits were made")
        self._log: str | None = None
        self._source: CounterSource | None = None
        """The source at the latest check, until something is done about it."""
        self._run: str | None = None
        self._restarted = False
        self._behind_since: str | None = None
        """The beginning of Redis' data for which the log says that counters are behind."""
        self._looked = asyncio.Event()
        self._settle_ended: Callable[[str], Awaitable[None]] = _nothing

    async def await_source(self, lost: bool) -> str:
        """Waits until the counters are derived from the log, and returns the log's identity.

        Args:
            lost: True if the caller has found them lost: they are then checked again.
        """
        if lost:
            self._looked.clear()
        while self._log is None or not self._looked.is_set():
            await self._looked.wait()
        return self._log

    async def run(
        self, sweep: Callable[[str], Awaitable[None]], settle_ended: Callable[[str], Awaitable[None]] | None = None
    ) -> None:
        """Checks every second, completes what limits count, and compares at an interval, until cancelled.

        Args:
            sweep: charges the calls of lost workers, given the log's identity; called at an interval while the counters
                are filled.
            settle_ended: ends the reservations of calls that the log has; called with the log's identity when Redis has
                another primary.
        """
        self._settle_ended = settle_ended or _nothing
        await background.run_together(self._keep_filled(sweep), self._keep_complete(), self._keep_right())

    async def _keep_filled(self, sweep: Callable[[str], Awaitable[None]]) -> None:
        loop = asyncio.get_running_loop()
        sweep_at = loop.time()
        looks = 0
        while True:
            if await self._try(self._filling, self._look) and self._log is not None:
                if loop.time() >= sweep_at:
                    await self._try(self._sweeping, partial(sweep, self._log))
                    sweep_at = loop.time() + SWEEP_EVERY_S - CHECK_EVERY_S / 2  # the check that is nearest to it
                if looks % LONG_LOOK_EVERY == 0:
                    await self._try(self._filling, self._look_at_log)
            looks += 1
            await asyncio.sleep(background.aligned_delay(CHECK_EVERY_S))

    async def _keep_complete(self) -> None:
        """Completes new dimensions in a separate task, which needs ClickHouse: filling and sweeping do not wait."""
        while True:
            if self._looked.is_set():
                await self._try(self._completing, self._count_dimensions)
            await asyncio.sleep(background.aligned_delay(CHECK_EVERY_S))

    async def _keep_right(self) -> None:
        """Compares in a separate task: that may take long, and lost counters must not wait for it."""
        loop = asyncio.get_running_loop()
        compare_at = loop.time()
        while True:
            await asyncio.sleep(background.aligned_delay(CHECK_EVERY_S * (LONG_LOOK_EVERY if self._run else 1)))
            if self._looked.is_set() and await self._try(self._comparing, self._note_restart):
                if self._restarted:
                    compare_at = loop.time()  # Redis may have restarted with older data
                if loop.time() >= compare_at and await self._try(self._comparing, self.reconcile):
                    compare_at = loop.time() + self._compare_every_s() - CHECK_EVERY_S * LONG_LOOK_EVERY / 2
                    self._restarted = False

    async def reconcile(self) -> BudgetComparison | None:
        """Compares the counters with the record, and repairs what differs.

        Returns:
            The comparison; None where the counters were lost meanwhile.

        Raises:
            StateUnavailableError, BusUnavailableError, AnalyticsUnavailableError, QueryError: nothing was repaired.
        """
        try:
            comparison = await compare(self._record, self._counters, self._now())
            if comparison.is_more_counted:
                # Read EVENTS, too, before anything is subtracted: ClickHouse may lack a part of it.
                comparison = await compare(self._record, self._counters, self._now(), thorough=True)
        except NotFilledError:
            return None
        repairs = comparison.repairs()
        filled = comparison.snapshot.filled
        doubtful = comparison.doubtful
        upto = max(comparison.stored.upto, comparison.stored.counted)
        if repairs and filled is not None and await self._counters.repair(filled, repairs, upto):
            windows: dict[str, Window] = {
                counters.period.name: counters.period.window for counters in comparison.snapshot.periods
            }
            for place in {**comparison.differences, **comparison.leaks}:
                name, key = place
                # A dimension that is counted since a moment ago lacks the past: that is no fault to tell of.
                is_new = dimension_of(key, windows[name]) in filled.dimensions.pending
                if not is_new and (place not in doubtful or place in comparison.leaks):
                    await self._publish_repair(comparison, place)
        if doubtful:
            structlog.get_logger().warning(
                "budgets_not_repaired",
                budgets=sorted(f"{key} of {name}" for name, key in doubtful),
                why="Redis has counted more than the record has, which may have lost rows",
                remedy="restore ClickHouse; `breakwater budgets reconcile` shows the difference",
            )
        self._metrics.set_compared_at(self._now())
        return comparison

    async def _try(self, outage: Outage, work: Callable[[], Awaitable[object]]) -> bool:
        """Does repeatable work. After a failure other than an outage, the next check tries again."""
        retried = partial(self._outages.retry_while_unavailable, work, unless=AnalyticsUnavailableError)
        expected = (BusError, AnalyticsUnavailableError, QueryError)
        try:
            return await outage.run_logged(retried, expected=expected, unless=NotFilledError)
        except NotFilledError:
            return False  # the counters were lost since the check: the next one notices

    async def _note_restart(self) -> None:
        run = await self._counters.run_id()
        self._restarted = self._restarted or run != self._run
        self._run = run

    async def _look_at_log(self) -> None:
        self._log = (await self._lookup.facts(Stream.EVENTS)).identity

    async def _look(self) -> None:
        filled = await self._counters.source()
        if self._log is None or not self._is_ours(filled):
            # Read it again: another budget service may have noticed before us that the log was replaced.
            await self._look_at_log()
            if not self._is_ours(filled):
                self._metrics.set_complete(yes=False)
                await self._fill(filled)
                filled = await self._counters.source()
        if filled is not None and self._is_ours(filled):
            self._source = filled
            self._looked.set()
            since = await self._counters.kept_since()
            if filled.since is None:
                # An earlier version has filled them. Without this, nothing would tell when another primary comes.
                await self._counters.confirm(since)
            elif filled.since != since:
                await self._confirm(since)
            self._metrics.set_complete(yes=True)
            # Redis may have restarted with older data.
            if (version := self._limits().version) and filled.limits != version:
                await self._counters.note_limits(version)

    async def _confirm(self, since: str) -> None:
        """Repairs counters that may lack what Redis had acknowledged last. No call is made under a hard limit before.

        What was settled and acknowledged before it was lost is in the log; what was reserved, the workers restore.

        Raises:
            StateUnavailableError, BusUnavailableError, AnalyticsUnavailableError, QueryError: confirm them again.
        """
        begun = self._now()
        self._metrics.set_complete(yes=False)
        if since != self._behind_since:  # each try after an outage comes by here again
            self._behind_since = since
            effect = "no call is made under a hard limit until they are compared" if self._limits().any_hard else "none"
            structlog.get_logger().warning("budgets_behind", why="Redis has another primary", effect=effect)
        delivered = (await self._lookup.progress(Stream.EVENTS, BUDGET)).delivered

        async def have_returned() -> bool:
            return await self._have_returned(int(since or 0))

        async def is_acknowledged() -> bool:
            # Who finds the counters lost meanwhile acknowledges nothing until the next check has filled them.
            is_lost = not self._looked.is_set()
            return is_lost or (await self._lookup.progress(Stream.EVENTS, BUDGET)).acknowledged >= delivered

        with suppress(TimeoutError):
            await asyncio.wait_for(_until(have_returned), RETURN_S)
        await asyncio.sleep(self._grace_s)
        # Beyond the first event that is not acknowledged, a comparison can't tell which were settled and lost.
        await _until(is_acknowledged)
        comparison = await self.reconcile()
        while comparison is not None and comparison.repairs():  # another repair may have come between
            comparison = await self.reconcile()
        if comparison is not None:
            await self._settle_ended(comparison.stored.log.identity)
            await self._counters.confirm(since)
            took_s = round((self._now() - begun).total_seconds(), 3)
            structlog.get_logger().info("budgets_confirmed", upto=comparison.logged.upto, took_s=took_s)

    async def _count_dimensions(self) -> None:
        """Counts calls in the dimensions that limits need, and completes those that lack the past.

        Dimensions of former limits are counted until there are too many: another service may still need them.
        """
        source = self._source
        if source is None or not self._is_ours(source):
            return
        needed = self._limits().dimensions
        counted = source.dimensions.including(needed)
        if counted == source.dimensions and not counted.pending:
            return
        self._source = None
        if counted != source.dimensions and not await self._counters.count(source, counted):
            return  # another budget service did; the next check looks again
        if counted.pending and await self.reconcile() is not None:
            complete = await self._counters.source()
            if complete is not None and complete.dimensions == counted:
                await self._counters.count(complete, Dimensions(counted.complete | counted.pending))

    def _is_ours(self, filled: CounterSource | None) -> bool:
        return filled is not None and (filled.log, filled.zone) == (self._log, self._counters.zone.key)

    async def _fill(self, previous: CounterSource | None) -> None:
        logger = structlog.get_logger()
        dimensions = Dimensions(self._limits().dimensions)
        periods = self._counters.periods(self._now(), dimensions)
        begun = self._now()
        since = await self._counters.kept_since()
        is_first_start = (await self._lookup.facts(Stream.EVENTS)).last == 0
        if not is_first_start and not self._filling.lasting:
            why = "they are lost" if previous is None else "the log or the time zone is another"
            effect = "no call is made under a hard limit until they are rebuilt" if self._limits().any_hard else "none"
            logger.warning("budgets_rebuilding", why=why, effect=effect)
        # If the log was lost with events that ClickHouse had not stored yet, Redis has counted them.
        lost_log = previous is not None and previous.zone == self._counters.zone.key
        stored = await self._record.stored_spend(periods, dimensions, thorough=lost_log, lost_log=lost_log)
        if not is_first_start or stored.figures:
            await asyncio.sleep(self._grace_s)
        # Whatever is stored from now on is read from the log.
        logged = await self._record.logged_spend(stored, periods, dimensions=dimensions)
        announced = await self._record.announced(stored, periods)
        earlier = stored.figures
        if lost_log:
            earlier = at_least(earlier, (await self._counters.snapshot(periods)).settled)
        figures = add_ledgers(earlier, logged.figures)
        log = stored.log.identity
        alone = previous is None and await self._record.is_alone(stored, periods)
        filled = await self._counters.fill(
            *(previous, log, logged.upto, periods, figures, announced), alone=alone, dimensions=dimensions, since=since
        )
        if filled:
            took_s = (self._now() - begun).total_seconds()
            logger.info("budgets_filled", stored_upto=stored.upto, logged_upto=logged.upto, took_s=round(took_s, 3))
        self._log = log

    async def _publish_repair(self, comparison: BudgetComparison, place: BudgetPlace) -> None:
        name, key = place
        counters = next(counters for counters in comparison.snapshot.periods if counters.period.name == name)
        counter = self._limits().counter(key, counters.period.window)
        was = counters.figures.get(key, AttemptSums())
        wrong = comparison.differences.get(place, AttemptSums())
        reasons = [f"{figure} was {value:+,} off" for figure, value in wrong.items() if value and figure != "spent"]
        if wrong.spent:
            reasons.insert(0, _off(wrong.spent, "counted"))
        leak = comparison.leaks.get(place, AttemptSums())
        if leak.spent:
            reasons.append(_off(leak.spent, "held"))
        reasons += [
            f"{figure} held were {value:+,} off" for figure, value in leak.items() if value and figure != "spent"
        ]
        event = budget_event(
            counter,
            counters.period,
            f"repaired/{int(comparison.at.timestamp() * 1000)}",
            kind="repaired",
            limit=counter.limit,
            total=was.spent - wrong.spent,
            previous=was.spent,
            reason="; ".join(reasons),
            at=comparison.at,
        )
        structlog.get_logger().warning("budget_repaired", budget=counter.name, period=name, reason=event.reason)
        self._metrics.count_repair()
        subject = subjects.budget(counter.scope, counter.window)
        await self._outages.retry_while_unavailable(
            lambda: self._publisher.event(subject, event, id=event.event_id, at=event.at)
        )


async def _nothing(_log: str) -> None:
    """There are no reservations to end."""


async def _until(is_so: Callable[[], Awaitable[bool]]) -> None:
    while True:
        if await is_so():
            return
        await asyncio.sleep(CHECK_EVERY_S / 5)


def _off(nano: int, state: str) -> str:
    return f"{money(abs(nano))} too {'much' if nano > 0 else 'little'} was {state}"
