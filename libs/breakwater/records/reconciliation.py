"""The cost of calls by the record of attempts, which fills the budgets' counters and is compared with them.

The record is in two places: ClickHouse has it up to what the sink has stored for sure, EVENTS from there on. Both say
the same of every attempt, which is on the log once, so the sums are exact to the nano-dollar.

ClickHouse may have lost rows: restored from an old backup, or recreated. So some of what EVENTS still has is looked up
there first, and where any of it is missing, all that EVENTS has is read from EVENTS.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime
from zoneinfo import ZoneInfo

import structlog

from breakwater.jobs.contract.execution import Attempt
from breakwater.jobs.store.records import read_record
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.clickhouse.errors import AnalyticsUnavailableError, QueryError
from breakwater.kernel.nats.core import ClientGetter
from breakwater.kernel.nats.lookup import Facts, Lookup
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.types import ms_from_time
from breakwater.limits.contract import BudgetEvent, BudgetReconciliation, Reconciliation
from breakwater.limits.rules.budget import Period, scope_key, threshold
from breakwater.limits.rules.ledger import AttemptSums, BudgetPlace, Ledger, figures_of, places_of
from breakwater.limits.rules.scopes import ONLY_BASE, Dimensions, scope_text
from breakwater.limits.store.budget_counters import RESERVED, Announced, BudgetCounters, Repair, Snapshot
from breakwater.limits.store.budgets import NotFilledError
from breakwater.records.spend import budget_notes, spend, stored_attempts, stored_upto

ATTEMPTS = "bw.attempts.>"

SAMPLES = 16
"""The number of attempts that are looked up in ClickHouse before it counts as complete."""

SINK = "sink-events"
"""The durable consumer that stores events in ClickHouse: an event is read from there only after its acknowledgement."""

BUDGET = "budget"
"""The durable consumer that settles events in Redis: an event counts as settled only after its acknowledgement."""


@dataclass(frozen=True, slots=True)
class StoredSpend:
    """The part of the record that ClickHouse has.

    Attributes:
        log: what EVENTS is now.
        begins_at: when the first attempt that EVENTS has was stored; None where it has none.
        counted: events up to this one were counted in Redis, and acknowledged.
        upto: events up to this one are part of `figures`; the rest is to be read from the log.
        figures: by period and scope.
        events: the budget events of the log.
    """

    log: Facts
    begins_at: datetime | None
    counted: int
    upto: int
    figures: Ledger
    events: Sequence[BudgetEvent]

    def is_all_logged(self, period: Period, *, alone: bool) -> bool:
        """Returns True if EVENTS alone has all that was charged in a period, so that nothing depends on ClickHouse.

        `alone`: counters that were filled from this log were filled from nothing else.
        """
        if self.log.deleted:
            return False  # calls that were erased are in ClickHouse alone
        if self.log.first <= 1:
            return alone or ms_from_time(self.log.created) <= period.start_ms
        return self.begins_at is not None and ms_from_time(self.begins_at) <= period.start_ms


@dataclass(frozen=True, slots=True)
class LoggedSpend:
    """The part of the record that EVENTS has.

    Attributes:
        upto: the last event that was read.
        figures: by period and scope.
    """

    upto: int
    figures: Ledger


class RecordedSpend:
    """Reads the record of attempts, for the days and months of a time zone."""

    def __init__(self, connection: ClientGetter, analytics: Analytics, zone: ZoneInfo) -> None:
        self._lookup = Lookup(connection)
        self._analytics = analytics
        self._zone = zone

    async def stored_spend(
        self,
        periods: Sequence[Period],
        dimensions: Dimensions = ONLY_BASE,
        *,
        thorough: bool = False,
        lost_log: bool = False,
    ) -> StoredSpend:
        """The part in ClickHouse.

        Where ClickHouse can't be asked, and EVENTS still has all that was ever published to it, the part is empty.

        Args:
            periods: those of the counters.
            dimensions: those that are counted.
            thorough: ClickHouse is asked only for the part that EVENTS does not have any more.
            lost_log: there was another log before, so that EVENTS alone is not the whole record.

        Raises:
            AnalyticsUnavailableError, QueryError: ClickHouse can't be asked, and is needed.
            BusUnavailableError: NATS does not answer.
        """
        # Asked for first: the events that both consumers have acknowledged by now are in ClickHouse and Redis.
        acknowledged = [
            (await self._lookup.progress(Stream.EVENTS, consumer)).acknowledged for consumer in (SINK, BUDGET)
        ]
        log = await self._lookup.facts(Stream.EVENTS)
        first = await self._lookup.next(Stream.EVENTS, ATTEMPTS, max(log.first, 1))
        begins_at = None if first is None else first.stored_at
        try:
            upto = min(*acknowledged, await stored_upto(self._analytics, log_created=log.created))
            if thorough or not await self._has_all(log, upto):
                upto = min(upto, max(log.first - 1, 0))
            figures = await spend(self._analytics, periods, log_created=log.created, upto=upto, dimensions=dimensions)
            events = await budget_notes(self._analytics, periods)
        except (AnalyticsUnavailableError, QueryError):
            if log.first > 1 or log.deleted or lost_log:
                raise
            return StoredSpend(log, begins_at, acknowledged[1], 0, {}, ())
        return StoredSpend(log, begins_at, acknowledged[1], upto, figures, events)

    async def is_alone(self, stored: StoredSpend, periods: Sequence[Period]) -> bool:
        """Returns True if no part of the record is older than this log. Raises as `stored_spend` does."""
        if stored.log.first > 1:
            return False
        if not stored.figures:
            return True
        return not await spend(self._analytics, periods, log_created=stored.log.created, upto=0)

    async def _has_all(self, log: Facts, upto: int) -> bool:
        """Checks by a few samples that ClickHouse has all events of EVENTS up to a sequence."""
        first = max(log.first, 1)
        step = max((upto - first) // SAMPLES, 1)
        places = range(first, upto + 1, step)[: SAMPLES + 1]
        looks = [await self._lookup.next(Stream.EVENTS, ATTEMPTS, place) for place in places]
        attempts = [
            read_record(message, Attempt) for message in looks if message is not None and message.sequence <= upto
        ]
        ids = {attempt.attempt_id for attempt in attempts if attempt is not None}
        missing = len(ids) - await stored_attempts(self._analytics, sorted(ids)) if ids else 0
        if missing:
            structlog.get_logger().warning(
                "clickhouse_lacks_rows", missing=missing, of=len(ids), effect="all that EVENTS has is read from EVENTS"
            )
        return not missing

    async def logged_spend(
        self,
        stored: StoredSpend,
        periods: Sequence[Period],
        counts: Callable[[int], bool] = lambda _: True,
        *,
        dimensions: Dimensions = ONLY_BASE,
    ) -> LoggedSpend:
        """The part of EVENTS that ClickHouse lacks. Raises BusUnavailableError, also if a replica is behind.

        Args:
            stored: the other part.
            periods: those of the counters.
            counts: True for the sequence of an event that is to be counted.
            dimensions: those that are counted.
        """
        wanted = {period.name for period in periods}
        sums: dict[BudgetPlace, AttemptSums] = defaultdict(AttemptSums)
        upto = stored.upto
        log = await self._lookup.facts(Stream.EVENTS)
        if upto >= log.last or log.first > log.last:
            return LoggedSpend(upto, {})
        # A replica that is cut off lacks events, and their cost would count as never spent.
        scan = self._lookup.scan(Stream.EVENTS, ATTEMPTS, start=upto + 1, up_to=log.last, complete=True)
        async with aclosing(scan) as messages:
            async for message in messages:
                upto = message.sequence
                attempt = read_record(message, Attempt) if counts(message.sequence) else None
                if attempt is not None and not attempt.short_circuited:
                    figures = figures_of(attempt)
                    for place in places_of(attempt, self._zone, dimensions):
                        if place[0] in wanted:
                            sums[place] += figures
        return LoggedSpend(upto, dict(sums))

    async def announced(self, stored: StoredSpend, periods: Sequence[Period]) -> Announced:
        """The announced thresholds of budgets. Raises as `logged_spend`."""
        events = [*stored.events]
        async with aclosing(self._lookup.scan(Stream.EVENTS, "bw.budgets.>", complete=True)) as messages:
            async for message in messages:
                if (event := message.read(BudgetEvent)) is not None:
                    events.append(event)
        announced: dict[str, set[str]] = {period.name: set() for period in periods}
        for event in events:
            if event.threshold_percent is not None and event.period in announced:
                announced[event.period].add(threshold(scope_key(event), event.limit, event.threshold_percent))
        return announced


@dataclass(frozen=True, slots=True)
class BudgetComparison:
    """The counters and the record, as of one moment."""

    snapshot: Snapshot
    stored: StoredSpend
    logged: LoggedSpend
    at: datetime

    @property
    def recorded(self) -> Ledger:
        """The whole record, by period and scope."""
        return add_ledgers(self.stored.figures, self.logged.figures)

    @property
    def differences(self) -> Mapping[BudgetPlace, AttemptSums]:
        """The counters less the record, by period and scope."""
        counted = self.snapshot.settled
        recorded = self.recorded
        differences = {
            place: counted.get(place, AttemptSums()) - recorded.get(place, AttemptSums())
            for place in {*counted, *recorded}
        }
        return {place: difference for place, difference in sorted(differences.items()) if difference != AttemptSums()}

    @property
    def leaks(self) -> Ledger:
        """Amounts held by the counters beyond those of calls, by period and scope."""
        held_by_calls = self.snapshot.held_figures(charged=False)
        counted = self.snapshot.reserved_figures
        # A call may hold money in a period that began after the snapshot, which lacks that period.
        names = {counters.period.name for counters in self.snapshot.periods}
        places = {place for place in {*held_by_calls, *counted} if place[0] in names}
        nothing = AttemptSums()
        leaks = {place: counted.get(place, nothing) - held_by_calls.get(place, nothing) for place in places}
        return {place: leak for place, leak in sorted(leaks.items()) if leak != nothing}

    @property
    def doubtful(self) -> frozenset[BudgetPlace]:
        """Places where the counters have more than the record, which may have lost the difference.

        Nothing is subtracted there: a record that has lost rows would open a limit that is spent.
        """
        filled = self.snapshot.filled
        alone = filled is not None and filled.alone
        periods = {counters.period.name: counters.period for counters in self.snapshot.periods}
        return frozenset(
            place
            for place, difference in self.differences.items()
            if _has_more(difference) and not self.stored.is_all_logged(periods[place[0]], alone=alone)
        )

    @property
    def is_more_counted(self) -> bool:
        """Returns True if the counters have more than the record of anything that has limits."""
        return any(map(_has_more, self.differences.values()))

    def repairs(self) -> tuple[Repair, ...]:
        """The repairs that make the counters equal to the record, without the doubtful ones."""
        periods = {counters.period.name: counters.period for counters in self.snapshot.periods}
        doubtful = self.doubtful
        figures = [
            Repair(periods[place[0]], f"{figure}:{place[1]}", -value)
            for place, difference in self.differences.items()
            if place not in doubtful
            for figure, value in difference.items()
            if value
        ]
        leaks = [
            Repair(periods[name], f"{reserved}:{key}", -getattr(leak, figure))
            for (name, key), leak in self.leaks.items()
            for reserved, figure in RESERVED.items()
            if getattr(leak, figure)
        ]
        return (*figures, *leaks)

    def reconciliation(self) -> Reconciliation:
        """The report to users: the budgets of the current periods, and of earlier ones where they differ."""
        now = int(self.at.timestamp() * 1000)
        differences = self.differences
        recorded = self.recorded
        charged = self.snapshot.held_amounts(charged=True)
        stored = self.stored.figures
        logged = self.logged.figures
        budgets: list[BudgetReconciliation] = []
        for counters in self.snapshot.periods:
            name = counters.period.name
            current = counters.period.holds(now)
            places = {place for place in {*recorded, *self.snapshot.figures} if place[0] == name}
            for place in sorted(place for place in places if current or place in differences):
                counted = self.snapshot.figures.get(place, AttemptSums())
                budgets.append(
                    BudgetReconciliation(
                        budget=f"{scope_text(place[1])}/{counters.period.window}",
                        period=name,
                        counted=counted.spent,
                        recorded=recorded.get(place, AttemptSums()).spent,
                        stored=stored.get(place, AttemptSums()).spent,
                        logged=logged.get(place, AttemptSums()).spent,
                        unrecorded=charged.get(place, 0),
                        difference=differences.get(place, AttemptSums()).spent,
                        counted_calls=counted.calls,
                        recorded_calls=recorded.get(place, AttemptSums()).calls,
                    )
                )
        return Reconciliation(
            equal=not differences and not self.leaks,
            budgets=tuple(budgets),
            reserved=self._global_reservations(self.snapshot.reserved, now),
            held=self._global_reservations(self.snapshot.held_amounts(charged=False), now),
            at=self.at,
        )

    def _global_reservations(self, reserved: Mapping[BudgetPlace, int], now_ms: int) -> int:
        months = [counters.period for counters in self.snapshot.periods if counters.period.window == "monthly"]
        return sum(reserved.get((month.name, "global"), 0) for month in months if month.holds(now_ms))


async def compare(
    record: RecordedSpend, counters: BudgetCounters, now: datetime, *, thorough: bool = False
) -> BudgetComparison:
    """Compares the counters with the record, while calls go on.

    The counters are read as of one moment, with the events that they count; the record is the sum of the same events.

    Args:
        record: the costs of calls.
        counters: those of Redis.
        now: time that the current periods depend on.
        thorough: ClickHouse is asked only for the part that EVENTS does not have any more.

    Raises:
        NotFilledError: the counters are lost, or of another log.
        StateUnavailableError, BusUnavailableError: Redis or NATS does not answer.
        AnalyticsUnavailableError, QueryError: ClickHouse can't be asked, and is needed.
    """
    source = await counters.source()
    dimensions = ONLY_BASE if source is None else source.dimensions
    periods = counters.periods(now, dimensions)
    stored = await record.stored_spend(periods, dimensions, thorough=thorough)
    log = stored.log
    first = max(stored.upto, stored.counted, log.first - 1) + 1
    snapshot = await counters.snapshot(periods, log.identity, first, log.last)
    filled = snapshot.filled
    if filled is None or (filled.log, filled.zone) != (log.identity, counters.zone.key):
        raise NotFilledError
    if filled.dimensions != dimensions:
        return await compare(record, counters, now, thorough=thorough)  # they have just changed

    def counts(sequence: int) -> bool:
        return sequence <= stored.counted or snapshot.counts(sequence)

    logged = await record.logged_spend(stored, periods, counts, dimensions=dimensions)
    return BudgetComparison(snapshot, stored, logged, now)


def add_ledgers(first: Ledger, second: Ledger) -> dict[BudgetPlace, AttemptSums]:
    """Adds two ledgers."""
    return {place: first.get(place, AttemptSums()) + second.get(place, AttemptSums()) for place in {*first, *second}}


def at_least(first: Ledger, second: Ledger) -> dict[BudgetPlace, AttemptSums]:
    """Takes the larger of each figure of two ledgers."""
    places = {*first, *second}
    return {place: first.get(place, AttemptSums()).largest(second.get(place, AttemptSums())) for place in places}


def _has_more(difference: AttemptSums) -> bool:
    return any(getattr(difference, figure) > 0 for figure in RESERVED.values())
