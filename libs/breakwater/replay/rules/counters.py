"""The budgets of a replay: its counters, on the clock of the events.

Only limits of calendar periods are counted. Windows, slots, queues and the shares of callers are left to the record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from zoneinfo import ZoneInfo

from breakwater.jobs.contract.execution import Attempt
from breakwater.kernel.types import ms_from_time, time_from_ms
from breakwater.limits.contract import BudgetEvent, LimitEvent, LimitUnit
from breakwater.limits.rules.budget import (
    Counter,
    LimitTable,
    OverBudget,
    Period,
    budget_event,
    fits,
    periods_at,
    reached_thresholds,
    scope_key,
)
from breakwater.limits.rules.ledger import figures_of
from breakwater.limits.rules.scopes import CallNames
from breakwater.replay.rules.limits import MAX_CACHED, NO_AMOUNTS, ReplayedLimits

ANNOUNCED_MS = 2_000
"""The most time from the moment at which a threshold is reached to its recorded event, or before it."""

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


@dataclass(slots=True, eq=False)
class _Limit:
    """A limit in a period.

    Attributes:
        counter: what counts towards it.
        period: the period.
        sum: the sum there.
        awaited: the least spend, in hundredths of nano-dollars, that may reach a threshold which is not announced.
    """

    counter: Counter
    period: Period
    sum: Sum
    awaited: float = 0

    @property
    def place(self) -> CountedPlace:
        """The place of the sum."""
        return self.period.name, self.counter.key, self.counter.unit


_Holds = Sequence[tuple[_Limit, int]]
"""The amounts that a call reserves, by limit."""


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
        amounts: Mapping[str, int] = NO_AMOUNTS,
        recorded: Iterable[BudgetEvent] = (),
    ) -> None:
        """Makes the counters of some limits.

        Args:
            limits: the limits.
            zone: the time zone of their periods.
            publish: is called with each event.
            used_before: what earlier calls have used in the first periods.
            before: the limits that the calls were recorded under; None if they are the same.
            changes: the changes of other limits, which `change` is then called with.
            amounts: other amounts than these have of the limits with some ids; none of the recorded calls had them.
            recorded: the recorded events: a threshold that is reached at about the same moment has their time.
        """
        self._recorded_at = {event.event_id: event.at for event in recorded}
        self._limits = ReplayedLimits(limits, changes, amounts)
        self._zone = zone
        self._publish = publish
        self._limits_before = ReplayedLimits(before or limits, changes)
        self._names_of = _names_getter({*self._limits.kinds, *self._limits_before.kinds})
        self._limited: dict[Hashable, tuple[_Limit, ...]] = {}
        """The limits of calls by their names, as they are now, in the periods of the latest day."""
        self._diverged: set[str] = set()
        """The keys of limits that count other calls than they did."""
        self._compared: dict[Hashable, tuple[bool, tuple[str, ...]]] = {}
        """By the names of calls: True if their hard limits are those of the record, and the keys of these limits."""
        self._used_before = used_before or {}
        self._sums = {place: Sum(used) for place, used in self._used_before.items()}
        self._holds: dict[str, _Holds] = {}
        self._announced: set[tuple[CountedPlace, int, int]] = set()
        self._raised: dict[CountedPlace, int] = {}
        self._periods = periods_at(time_from_ms(0), zone)
        self._day = range(0)
        """The latest day, in milliseconds since the epoch."""

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
            self._forget()
        holds: list[tuple[_Limit, int]] = []
        filled: OverBudget | None = None
        for limited in self._limits_of(call, now_ms):
            counter = limited.counter
            unit = counter.unit
            amount = (call.reserved if unit == "usd" else call.reserved_tokens if unit == "tokens" else 1) or 0
            holds.append((limited, amount))
            if is_forced or counter.enforcement != "hard":
                continue
            counted = limited.sum
            limit = self._raised.get(limited.place, counter.hard_limit) if self._raised else counter.hard_limit
            if limit is None or fits(amount, limit=limit, spent=counted.used + counted.reserved):
                continue
            over = OverBudget(counter, limited.period.resets_at, limit, counted.used, counted.reserved, amount)
            if not over.by_reservations:
                return over
            filled = filled or over
        if filled is not None:
            return filled
        self.release(call.attempt_id)
        self._holds[call.attempt_id] = holds
        for limited, amount in holds:
            limited.sum.reserved += amount
        return None

    def release(self, attempt_id: str) -> None:
        """Gives up what a call has reserved that was not made."""
        for limited, amount in self._holds.pop(attempt_id, ()):
            limited.sum.reserved -= amount

    def settle(self, attempt: Attempt, now_ms: int) -> None:
        """Replaces the reservation of a call by what it used, and announces the thresholds that this reaches."""
        for limited, amount in self._holds.pop(attempt.attempt_id, ()):
            unit = limited.counter.unit
            counted = limited.sum
            counted.reserved -= amount
            counted.used += (attempt.cost or 0) if unit == "usd" else figures_of(attempt).used(unit)
            counted.changed_ms = now_ms
            if unit == "usd" and counted.used * 100 >= limited.awaited:
                self._announce(limited, attempt, now_ms)

    def announce_refusal(self, attempt: Attempt, now_ms: int) -> None:
        """Announces a limit that has refused a call as reached, although the spend stays below it."""
        if attempt.refused_by is None or attempt.refused_cap is None:
            return
        for limited in self._limits_of(attempt, now_ms):
            if limited.counter.name == attempt.refused_by:
                self._announce(limited, attempt, now_ms, refused=True)

    def changes_near(self, call: Attempt, now_ms: int, within_ms: int) -> bool:
        """Returns True if a call has ended within some time that counts in a hard limit of this one."""
        limits = (limited for limited in self._limits_of(call, now_ms) if limited.counter.enforcement == "hard")
        return any(now_ms - limited.sum.changed_ms <= within_ms for limited in limits)

    def is_as_it_was(self, call: Attempt) -> bool:
        """Returns True if the limits of a call are those of the record, and have counted the same calls."""
        is_same, keys = self._comparison_of(call)
        return is_same and self._diverged.isdisjoint(keys)

    def diverge(self, call: Attempt) -> None:
        """Notes that a call counts, or does not, otherwise than in the record."""
        self._diverged.update(self._comparison_of(call)[1])

    def act(self, event: BudgetEvent) -> None:
        """Repeats what an operator did to a limit: a raise, or the end of one."""
        place = event.period, scope_key(event), "usd"
        if event.kind == "raised" and event.limit is not None:
            self._raised[place] = event.limit
        elif event.kind == "raise_ended":
            self._raised.pop(place, None)
        for limits in self._limited.values():
            for limited in limits:
                limited.awaited = 0

    def change(self, event: LimitEvent) -> None:
        """Repeats what a person did to a limit that the plane keeps, or to the raise of a limit."""
        self._limits.change(event)
        self._limits_before.change(event)
        self._forget()

    def _forget(self) -> None:
        self._compared.clear()
        self._limited.clear()

    def _limits_of(self, call: Attempt, now_ms: int) -> Sequence[_Limit]:
        """Returns the limits of a call in the periods of a moment; none of an earlier day is asked for again."""
        if now_ms not in self._day:
            self._periods = periods_at(time_from_ms(now_ms), self._zone)
            self._day = range(self._periods.day.start_ms, self._periods.day.end_ms)
            self._limited.clear()
        names = self._names_of(call)
        limits = self._limited.get(names)
        if limits is None:
            if len(self._limited) >= MAX_CACHED:
                self._limited.clear()
            limits = self._limited[names] = tuple(map(self._limit, self._limits.of(CallNames.of(call))))
        return limits

    def _limit(self, counter: Counter) -> _Limit:
        period = self._periods.of(counter.window)
        return _Limit(counter, period, self._sums.setdefault((period.name, counter.key, counter.unit), Sum()))

    def _comparison_of(self, call: Attempt) -> tuple[bool, tuple[str, ...]]:
        names = self._names_of(call)
        comparison = self._compared.get(names)
        if comparison is None:
            if len(self._compared) >= MAX_CACHED:
                self._compared.clear()
            call_names = CallNames.of(call)
            hard_limits = [*_hard(self._limits.of(call_names))]
            is_same = {*_hard(self._limits_before.of(call_names))} == {*hard_limits}
            comparison = self._compared[names] = is_same, tuple([counter.key for counter in hard_limits])
        return comparison

    def _announce(self, limited: _Limit, attempt: Attempt, now_ms: int, *, refused: bool = False) -> None:
        counter = limited.counter
        place = limited.place
        limit = self._raised.get(place, counter.effective)
        if limit is None or counter.unit != "usd":
            return
        counted = limited.sum
        refused = refused and attempt.refused_cap == limit
        announced = reached_thresholds(counter, limit, self._used_before.get(place, 0))
        reached = reached_thresholds(counter, limit, counted.used, refused=refused)
        to_come = [percent for percent in counter.thresholds if percent not in reached]
        limited.awaited = limit * min(to_come) if to_come and limit else math.inf
        for percent in reached:
            if percent in announced or (place, limit, percent) in self._announced:
                continue
            self._announced.add((place, limit, percent))
            event = budget_event(
                counter,
                limited.period,
                f"{percent}/{limit}",
                attempt.agent,
                kind=counter.kind_at(percent),
                threshold_percent=percent,
                limit=limit,
                total=counted.used,
                reserved=counted.reserved,
                at=time_from_ms(now_ms),
            )
            recorded_at = self._recorded_at.get(event.event_id)
            if recorded_at is not None and abs(ms_from_time(recorded_at) - now_ms) <= ANNOUNCED_MS:
                event = event.model_copy(update={"at": recorded_at})
            self._publish(event)


def _hard(counters: Iterable[Counter]) -> Iterable[Counter]:
    return (counter for counter in counters if counter.enforcement == "hard")


def _names_getter(kinds: Collection[str]) -> Callable[[Attempt], Hashable]:
    """Returns a function that returns those names of a call on which its limits depend."""
    fields = sorted({"submitted_by" if kind == "key" else kind.partition(":")[0] for kind in kinds} - {"global", "tag"})
    names_of = attrgetter("agent", *fields)
    if not any(kind.startswith("tag:") for kind in kinds):
        return names_of
    return lambda call: (names_of(call), *call.cost_tags.items())
