"""The limits of a replay: those of a config, and those that the plane keeps, which were set by API and changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from breakwater.kernel.types import ms_from_time
from breakwater.limits.contract import LimitEvent
from breakwater.limits.rules.budget import Counter, LimitTable
from breakwater.limits.rules.limit import limit_of
from breakwater.limits.rules.limit_index import PlaneLimit, PlaneLimits
from breakwater.limits.rules.scopes import CallNames, Dimensions

NO_AMOUNTS: Mapping[str, int] = MappingProxyType({})

MAX_CACHED = 10_000
"""The most callers whose limits are remembered."""


def with_all_limits(limits: LimitTable, events: Iterable[LimitEvent]) -> LimitTable:
    """Returns a table with all limits that the plane ever kept: what counts towards one, counts before it is set."""
    plane_limits = PlaneLimits()
    for event in events:
        if event.after is not None and event.kind in {"created", "changed"}:
            limit = replace(limit_of(f"{event.limit_id} {event.event_id}", event.after), until_ms=None)
            plane_limits.change({limit.id: PlaneLimit(limit, (), b"")}, 0)
    return replace(limits, plane_limits=plane_limits)


def with_latest_limits(limits: LimitTable, events: Iterable[LimitEvent]) -> LimitTable:
    """Returns a table with the limits that the plane keeps after some changes."""
    states = {event.limit_id: event.after for event in events if event.kind in {"created", "changed", "deleted"}}
    latest = {name: limit_of(name, settings) for name, settings in states.items() if settings is not None}
    plane_limits = PlaneLimits()
    plane_limits.change({name: PlaneLimit(limit, (), b"") for name, limit in latest.items()}, 0)
    return replace(limits, plane_limits=plane_limits)


class ReplayedLimits:
    """The limits as they change while jobs are replayed."""

    def __init__(
        self, limits: LimitTable, events: Iterable[LimitEvent] = (), amounts: Mapping[str, int] = NO_AMOUNTS
    ) -> None:
        """Takes the limits of a config, and the changes of others, which hold once they are made.

        `amounts` has other amounts than these changes of the limits with some ids.
        """
        self._amounts = amounts
        self._counted = with_all_limits(limits, events)
        self._dimensions = Dimensions(self._counted.dimensions)
        self.kinds = self._dimensions.kinds
        """The kinds of names on which the limits of a call depend."""
        self._states: dict[str, PlaneLimit] = {}
        self._present = replace(limits, plane_limits=PlaneLimits())
        self._of_callers: dict[CallNames, tuple[Counter, ...]] = {}

    def of(self, names: CallNames) -> tuple[Counter, ...]:
        """Returns the limits that a call counts in, also those that do not hold yet, or no more."""
        counters = self._of_callers.get(names)
        if counters is None:
            if len(self._of_callers) >= MAX_CACHED:
                self._of_callers.clear()
            counted = self._counted.counters(names, self._dimensions)
            counters = self._of_callers[names] = tuple(
                self._present.counter(counter.key, counter.window, counter.unit)
                for counter in counted
                if counter.effective is not None
            )
        return counters

    def change(self, event: LimitEvent) -> None:
        """Repeats what a person did to a limit, or to the raise of one."""
        before = self._states.get(event.limit_id)
        limit = None if before is None else before.limit
        raises = () if before is None else before.raises
        raised = event.raised
        if raised is not None:
            raises = tuple(earlier for earlier in raises if earlier.scope != raised.scope)
            raises = (*raises, raised) if event.kind == "raised" else raises
        else:
            limit = None if event.after is None else limit_of(event.limit_id, event.after)
            if limit is not None and limit.id in self._amounts:
                limit = replace(limit, amount=self._amounts[limit.id])
        state = self._states[event.limit_id] = PlaneLimit(limit, raises, b"")
        self._present.plane_limits.change({event.limit_id: state}, ms_from_time(event.at))
        self._take(replace(self._present))

    def has_changed_by(self, now_ms: int) -> bool:
        """Lets end what ends until a time, in milliseconds since the epoch. Returns True if anything did."""
        if self._present.next_end_ms > now_ms:
            return False
        self._take(self._present.at(now_ms, self._states))
        return True

    def _take(self, limits: LimitTable) -> None:
        self._present = limits
        self._of_callers.clear()
