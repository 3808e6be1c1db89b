"""The budgets of a replay: its counters, on the clock of the events.

Only limits of calendar periods are counted. Windows, slots, queues and the shares of callers are left to the record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from zoneinfo import ZoneInfo

from breakwater.jobs.contract.execution import Attempt
from breakwater.kernel.types import time_from_ms
from breakwater.limits.contract import BudgetEvent, LimitEvent, LimitUnit
from breakwater.limits.rules.budget import (
    Counter,
    LimitTable,
    OverBudget,
    Period,
    Periods,
    budget_event,
    fits,
    periods_at,
    reached_thresholds,
    scope_key,
)
from breakwater.limits.rules.ledger import figures_of
from breakwater.limits.rules.scopes import CallNames
from breakwater.replay.rules.limits import MAX_CACHED, ReplayedLimits

CountedPlace = tuple[str, str, LimitUnit]
"""A period's name, a scope's key, and the unit that is counted there."""


@dataclass(slots=True)
class Sum:
    """The sum that counts towards a limit in a period, in its unit.

    Attributes:
        used: what calls have used.
        reserved: what calls in flight reserve.
        changed_ms: the time of the latest change, in milliseconds since the epoch.
    """

    used: int = 0
    reserved: int = 0
    changed_ms: int = 0


@dataclass(frozen=True, slots=True)
class _Hold:
    counter: Counter
    period: Period
    amount: int


class ReplayedCounters:
    """The counters of all limits of a replay."""

    def __init__(
        self,
        limits: LimitTable,
        zone: ZoneInfo,
        publish: Callable[[BudgetEvent], None],
        used_before: Mapping[CountedPlace, int] | None = None,
        before: LimitTable | None = None,
        changes: Sequence[LimitEvent] = (),
    ) -> None:
        """Makes the counters of some limits.

        Args:
            limits: the limits.
            zone: the time zone of their periods.
            publish: is called with each event.
            used_before: what earlier calls have used in the first periods.
            before: the limits that the calls were recorded under; None if they are the same.
            changes: the changes of other limits, which `change` is then called with.
        """
        self._limits = ReplayedLimits(limits, changes)
        self._zone = zone
        self._publish = publish
        self._limits_before = ReplayedLimits(before or limits, changes)
        self._diverged: set[str] = set()
        """The keys of limits that count other calls than they did."""
        self._changed: dict[CallNames, bool] = {}
        self._used_before = used_before or {}
        self._sums = {place: Sum(used) for place, used in self._used_before.items()}
        self._holds: dict[str, tuple[_Hold, ...]] = {}
        self._announced: set[tuple[CountedPlace, int, int]] = set()
        self._raised: dict[CountedPlace, int] = {}
        self._periods: Periods | None = None
        """The periods of the latest day."""

    @property
    def sums(self) -> Mapping[CountedPlace, Sum]:
        """The sums by limit."""
        return self._sums

    def reserve(self, call: Attempt, now_ms: int, *, is_forced: bool = False) -> OverBudget | None:
        """Reserves the worst case of a call in all its limits, or in none.

        Args:
            call: the call, with its worst case; an unknown one counts as nothing.
            now_ms: the current time, in milliseconds since the epoch.
            is_forced: True to reserve it in any case.

        Returns:
            The refusal of a limit that has no room for it, if one has none; a spent one before one that calls in flight
            fill.
        """
        if self._limits.has_changed_by(now_ms) | self._limits_before.has_changed_by(now_ms):
            self._changed.clear()
        periods = self._periods_at(now_ms)
        worst: Mapping[LimitUnit, int] = {"usd": call.reserved or 0, "tokens": call.reserved_tokens or 0, "requests": 1}
        holds = tuple(
            _Hold(counter, periods.of(counter.window), worst[counter.unit]) for counter in self._limits_of(call)
        )
        filled: OverBudget | None = None
        for hold in () if is_forced else holds:
            place = _place(hold)
            limit = self._raised.get(place, hold.counter.hard_limit) if hold.counter.enforcement == "hard" else None
            counted = self._sums.get(place) or Sum()
            if limit is None or fits(hold.amount, limit=limit, spent=counted.used + counted.reserved):
                continue
            resets_at = hold.period.resets_at
            over = OverBudget(hold.counter, resets_at, limit, counted.used, counted.reserved, hold.amount)
            if not over.by_reservations:
                return over
            filled = filled or over
        if filled is not None:
            return filled
        self.release(call.attempt_id)
        self._holds[call.attempt_id] = holds
        for hold in holds:
            self._sums.setdefault(_place(hold), Sum()).reserved += hold.amount
        return None

    def release(self, attempt_id: str) -> None:
        """Gives up what a call has reserved that was not made."""
        for hold in self._holds.pop(attempt_id, ()):
            self._sums[_place(hold)].reserved -= hold.amount

    def settle(self, attempt: Attempt, now_ms: int) -> None:
        """Replaces the reservation of a call by what it used, and announces the thresholds that this reaches."""
        holds = self._holds.pop(attempt.attempt_id, ())
        if not holds:
            return
        figures = figures_of(attempt)
        for hold in holds:
            counted = self._sums[_place(hold)]
            counted.reserved -= hold.amount
            counted.used += figures.used(hold.counter.unit)
            counted.changed_ms = now_ms
            self._announce(hold, attempt, now_ms)

    def announce_refusal(self, attempt: Attempt, now_ms: int) -> None:
        """Announces a limit that has refused a call as reached, although the spend stays below it."""
        if attempt.refused_by is None or attempt.refused_cap is None:
            return
        periods = self._periods_at(now_ms)
        for counter in self._limits_of(attempt):
            if counter.name == attempt.refused_by:
                self._announce(_Hold(counter, periods.of(counter.window), 0), attempt, now_ms, refused=True)

    def changes_near(self, call: Attempt, now_ms: int, within_ms: int) -> bool:
        """Returns True if a call has ended within some time that counts in a hard limit of this one."""
        periods = self._periods_at(now_ms)
        holds = (_Hold(counter, periods.of(counter.window), 0) for counter in self._hard_limits_of(call))
        sums = (self._sums.get(_place(hold)) for hold in holds)
        return any(counted is not None and now_ms - counted.changed_ms <= within_ms for counted in sums)

    def is_as_it_was(self, call: Attempt) -> bool:
        """Returns True if the limits of a call are those of the record, and have counted the same calls."""
        names = CallNames.of(call)
        is_changed = self._changed.get(names)
        if is_changed is None:
            if len(self._changed) >= MAX_CACHED:
                self._changed.clear()
            hard = {counter for counter in self._limits_before.of(names) if counter.enforcement == "hard"}
            is_changed = self._changed[names] = hard != set(self._hard_limits_of(call))
        return not is_changed and self._diverged.isdisjoint(counter.key for counter in self._hard_limits_of(call))

    def diverge(self, call: Attempt) -> None:
        """Notes that a call counts, or does not, otherwise than in the record."""
        self._diverged.update(counter.key for counter in self._hard_limits_of(call))

    def act(self, event: BudgetEvent) -> None:
        """Repeats what an operator did to a limit: a raise, or the end of one."""
        place = event.period, scope_key(event), "usd"
        if event.kind == "raised" and event.limit is not None:
            self._raised[place] = event.limit
        elif event.kind == "raise_ended":
            self._raised.pop(place, None)

    def change(self, event: LimitEvent) -> None:
        """Repeats what a person did to a limit that the plane keeps, or to the raise of a limit."""
        self._limits.change(event)
        self._limits_before.change(event)
        self._changed.clear()

    def _periods_at(self, now_ms: int) -> Periods:
        if self._periods is None or not self._periods.day.holds(now_ms):
            self._periods = periods_at(time_from_ms(now_ms), self._zone)
        return self._periods

    def _limits_of(self, call: Attempt) -> Sequence[Counter]:
        return self._limits.of(CallNames.of(call))

    def _hard_limits_of(self, call: Attempt) -> Iterable[Counter]:
        return (counter for counter in self._limits_of(call) if counter.enforcement == "hard")

    def _announce(self, hold: _Hold, attempt: Attempt, now_ms: int, *, refused: bool = False) -> None:
        counter = hold.counter
        place = _place(hold)
        limit = self._raised.get(place, counter.effective)
        if limit is None or counter.unit != "usd":
            return
        counted = self._sums.get(place) or Sum()
        refused = refused and attempt.refused_cap == limit
        announced = reached_thresholds(counter, limit, self._used_before.get(place, 0))
        for percent in reached_thresholds(counter, limit, counted.used, refused=refused):
            if percent in announced or (place, limit, percent) in self._announced:
                continue
            self._announced.add((place, limit, percent))
            self._publish(
                budget_event(
                    counter,
                    hold.period,
                    f"{percent}/{limit}",
                    attempt.agent,
                    kind="hard_cap" if percent == 100 and counter.enforcement == "hard" else "soft_cap",
                    threshold_percent=percent,
                    limit=limit,
                    total=counted.used,
                    reserved=counted.reserved,
                    at=time_from_ms(now_ms),
                )
            )


def _place(hold: _Hold) -> CountedPlace:
    return hold.period.name, hold.counter.key, hold.counter.unit


def spend(sums: Mapping[CountedPlace, Sum]) -> Iterable[tuple[CountedPlace, int]]:
    """Yields what was spent by place, in nano-dollars."""
    return ((place, counted.used) for place, counted in sums.items() if place[2] == "usd")
