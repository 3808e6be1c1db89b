"""What calls cost by the record of attempts, to make the budgets' counters from and to compare them with.

The record is in two places: ClickHouse has it up to what the sink has stored for sure, EVENTS from there on. Both say
the same of every attempt, which is on the log once, so the sums are exact to the nano-dollar.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar
from zoneinfo import ZoneInfo

import structlog
from pydantic import BaseModel, ValidationError

from breakwater.analytics.client import Analytics
from breakwater.analytics.errors import AnalyticsUnavailable, QueryFailed
from breakwater.analytics.spend import budget_notes, spend, stored_upto
from breakwater.bus.lookup import Connection, Facts, Found, Lookup
from breakwater.bus.scan import scan
from breakwater.contracts.events import BudgetBook, BudgetEvent, CapRaise
from breakwater.contracts.events import BudgetBooks as SideBySide
from breakwater.contracts.execution import Attempt
from breakwater.contracts.subjects import Stream
from breakwater.policy.ledger import Figures, Ledger, Place, figures_of, places_of
from breakwater.policy.periods import Period
from breakwater.state.budget_books import BudgetBooks, Notes, Repair, Snapshot
from breakwater.state.budgets import NotFilled

Event = TypeVar("Event", bound=BaseModel)

SINK, BUDGET = "sink-events", "budget"
"""The durable consumers that have to be done with an event before it is read from ClickHouse."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What ClickHouse has of the record.

    Attributes:
        log: what EVENTS is now.
        upto: events up to this one are part of `figures`; the rest is to be read from the log.
        figures: by period and scope.
        events: what was told of budgets.
    """

    log: Facts
    upto: int
    figures: Ledger
    events: Sequence[BudgetEvent]


@dataclass(frozen=True, slots=True)
class Logged:
    """What EVENTS has of the record.

    Attributes:
        upto: the last event that was read.
        figures: by period and scope.
    """

    upto: int
    figures: Ledger


class Record:
    """Reads the record of attempts, for the days and months of a time zone."""

    def __init__(self, connection: Connection, analytics: Analytics, zone: ZoneInfo) -> None:
        self._connection = connection
        self._lookup = Lookup(connection)
        self._analytics = analytics
        self._zone = zone

    async def stored(self, periods: Sequence[Period]) -> Stored:
        """The part in ClickHouse.

        Where ClickHouse can't be asked, and EVENTS still has all that was ever published to it, the part is empty.

        Raises:
            AnalyticsUnavailable, QueryFailed: ClickHouse can't be asked, and is needed.
            BusUnavailable: NATS does not answer.
        """
        # Asked for first: what the two are done with by now, ClickHouse and Redis have.
        done = [await self._lookup.acknowledged(Stream.EVENTS, consumer) for consumer in (SINK, BUDGET)]
        log = await self._lookup.facts(Stream.EVENTS)
        try:
            upto = min(*done, await stored_upto(self._analytics, log_created=log.created))
            figures = await spend(self._analytics, periods, log_created=log.created, upto=upto)
            return Stored(log, upto, figures, await budget_notes(self._analytics, periods))
        except (AnalyticsUnavailable, QueryFailed):
            if log.first > 1:
                raise
            return Stored(log, 0, {}, ())

    async def logged(
        self, stored: Stored, periods: Sequence[Period], counts: Callable[[int], bool] = lambda _: True
    ) -> Logged:
        """The part in EVENTS that ClickHouse was not asked for. Raises BusUnavailable.

        Args:
            stored: the other part.
            periods: which.
            counts: says of an event, by its sequence, whether it is to be counted.
        """
        wanted = {period.name for period in periods}
        sums: dict[Place, Figures] = defaultdict(Figures)
        upto = stored.upto
        async with aclosing(scan(self._connection, Stream.EVENTS, "bw.attempts.>", start=upto + 1)) as found:
            async for message in found:
                upto = message.sequence
                attempt = _read(message, Attempt) if counts(message.sequence) else None
                if attempt is not None and not attempt.short_circuited:
                    added = figures_of(attempt)
                    for place in places_of(attempt, self._zone):
                        if place[0] in wanted:
                            sums[place] += added
        return Logged(upto, dict(sums))

    async def notes(self, stored: Stored, periods: Sequence[Period]) -> dict[str, Notes]:
        """What was told of budgets, and which caps people raised, by the period's name. Raises BusUnavailable."""
        events = {event.event_id: event for event in stored.events}
        async with aclosing(scan(self._connection, Stream.EVENTS, "bw.budgets.>")) as found:
            async for message in found:
                if (event := _read(message, BudgetEvent)) is not None:
                    events[event.event_id] = event
        wanted = {period.name for period in periods}
        return _notes(event for event in events.values() if event.period in wanted)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The counters beside the record, as of one moment."""

    snapshot: Snapshot
    recorded: Ledger
    stored: Ledger
    logged: Ledger
    at: datetime

    @property
    def differences(self) -> Mapping[Place, Figures]:
        """What the counters have too much of, or too little, by period and scope."""
        charged = self.snapshot.held(charged=True)
        places = {*self.snapshot.figures, *self.recorded}
        differences = {
            place: self.snapshot.figures.get(place, Figures())
            - Figures(spent=charged.get(place, 0))
            - self.recorded.get(place, Figures())
            for place in places
        }
        return {place: one for place, one in sorted(differences.items()) if one != Figures()}

    @property
    def leaks(self) -> Mapping[Place, int]:
        """What the counters say is held beyond what calls hold, in nano-dollars, by period and scope."""
        held, counted = self.snapshot.held(charged=False), self.snapshot.reserved
        leaks = {place: counted.get(place, 0) - held.get(place, 0) for place in {*held, *counted}}
        return {place: leak for place, leak in sorted(leaks.items()) if leak}

    def repairs(self) -> tuple[Repair, ...]:
        """What makes the counters equal to the record."""
        periods = {book.period.name: book.period for book in self.snapshot.periods}
        figures = [
            Repair(periods[name], f"{figure}:{key}", -value)
            for (name, key), one in self.differences.items()
            for figure, value in one.items()
            if value
        ]
        leaks = [Repair(periods[name], f"reserved:{key}", -leak) for (name, key), leak in self.leaks.items()]
        return (*figures, *leaks)

    def side_by_side(self) -> SideBySide:
        """The books for people: of the current periods, and of earlier ones where they differ."""
        now = int(self.at.timestamp() * 1000)
        differences, charged = self.differences, self.snapshot.held(charged=True)
        books: list[BudgetBook] = []
        for book in self.snapshot.periods:
            name = book.period.name
            current = book.period.holds(now)
            places = {place for place in {*self.recorded, *self.snapshot.figures} if place[0] == name}
            for place in sorted(place for place in places if current or place in differences):
                counted = self.snapshot.figures.get(place, Figures())
                recorded = self.recorded.get(place, Figures())
                books.append(
                    BudgetBook(
                        budget=f"{place[1]}/{book.period.window}",
                        period=name,
                        counted=counted.spent,
                        recorded=recorded.spent,
                        stored=self.stored.get(place, Figures()).spent,
                        logged=self.logged.get(place, Figures()).spent,
                        unrecorded=charged.get(place, 0),
                        difference=differences.get(place, Figures()).spent,
                        counted_calls=counted.calls,
                        recorded_calls=recorded.calls,
                    )
                )
        return SideBySide(
            equal=not differences and not self.leaks,
            books=tuple(books),
            reserved=self._reserved_globally(self.snapshot.reserved, now),
            held=self._reserved_globally(self.snapshot.held(charged=False), now),
            at=self.at,
        )

    def _reserved_globally(self, reserved: Mapping[Place, int], now_ms: int) -> int:
        months = [book.period for book in self.snapshot.periods if book.period.window == "monthly"]
        return sum(reserved.get((month.name, "global"), 0) for month in months if month.holds(now_ms))


async def compare(record: Record, counters: BudgetBooks, now: datetime) -> Comparison:
    """Puts the counters beside the record. Nothing stands still for it.

    The counters are read as of one moment, with which events they count; of those the record is summed up.

    Raises:
        NotFilled: the counters are lost, or of another log.
        StateUnavailable, BusUnavailable: Redis or NATS does not answer.
        AnalyticsUnavailable, QueryFailed: ClickHouse can't be asked, and is needed.
    """
    periods = counters.periods(now)
    stored = await record.stored(periods)
    log = stored.log
    snapshot = await counters.snapshot(periods, log.identity, stored.upto + 1, log.last)
    filled = snapshot.filled
    if filled is None or (filled.log, filled.zone) != (log.identity, counters.zone.key):
        raise NotFilled
    logged = await record.logged(stored, periods, snapshot.counts)
    recorded = {
        place: stored.figures.get(place, Figures()) + logged.figures.get(place, Figures())
        for place in {*stored.figures, *logged.figures}
    }
    return Comparison(snapshot, recorded, stored.figures, logged.figures, now)


def key_of(event: BudgetEvent) -> str:
    """The key of the scope that an event is about: `global`, `agent:<name>`, `tenant:<name>`."""
    name = {"global": None, "agent": event.agent, "tenant": event.tenant}[event.scope]
    return event.scope if name is None else f"{event.scope}:{name}"


def _notes(events: Iterable[BudgetEvent]) -> dict[str, Notes]:
    raises: dict[str, dict[str, CapRaise]] = defaultdict(dict)
    announced: dict[str, dict[str, int]] = defaultdict(dict)
    for event in sorted(events, key=lambda event: event.at):
        key = key_of(event)
        if event.kind == "raised" and event.limit is not None:
            raises[event.period][key] = CapRaise(
                limit=event.limit, by=event.by or "", reason=event.reason or "", at=event.at
            )
        elif event.kind == "raise_ended":
            raises[event.period].pop(key, None)
        elif event.threshold_percent is not None:
            told, budget = announced[event.period], f"{key}@{event.limit}"
            told[budget] = max(told.get(budget, 0), event.threshold_percent)
    return {name: Notes(raises.get(name, {}), announced.get(name, {})) for name in {*raises, *announced}}


def _read(message: Found, model: type[Event]) -> Event | None:
    try:
        return model.model_validate_json(message.data)
    except ValidationError:
        structlog.get_logger().warning("event_unreadable", sequence=message.sequence, subject=message.subject)
        return None
