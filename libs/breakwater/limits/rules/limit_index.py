"""Limits as calls look them up: those of a config, and those that the plane keeps, which change one by one."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from breakwater.kernel.types import ms_from_time
from breakwater.limits.contract import LimitRaise, LimitRecord, LimitUnit
from breakwater.limits.rules.limit import Limit, amount_of, limit_of
from breakwater.limits.rules.scopes import Dimension, ScopePart, key_from_text

KNOWN_BEFORE_CALLS = frozenset({"global", "agent", "tenant", "model", "deployment", "provider"})
"""The kinds of names that a job can count under, as far as the job itself tells."""

_FOR_EVER = float("inf")


class LimitIndex:
    """Limits by what they count. Of two on the same place, the first one counts."""

    def __init__(self, limits: Iterable[Limit] = ()) -> None:
        """Takes the first limits."""
        self.by_place: dict[tuple[object, ...], Limit] = {}
        self.budgets: defaultdict[tuple[Dimension, LimitUnit], dict[str, Limit]] = defaultdict(dict)
        """The limits by the calendar, by the keys of their scopes, in which `*` stands for each name that has none
        itself."""
        self.rates: defaultdict[tuple[str, ...], dict[str, tuple[Limit, ...]]] = defaultdict(dict)
        """The limits on rates but those of tasks, by the kinds and the keys of their scopes."""
        self.hard_scopes: defaultdict[Dimension, Counter[tuple[ScopePart, ...]]] = defaultdict(Counter)
        """The scopes of hard limits by their dimension, without the parts that are unknown before a call, and their
        numbers."""
        for limit in limits:
            self.add(limit)

    def add(self, limit: Limit) -> None:
        """Adds a limit, unless there is one in its place."""
        if self.by_place.setdefault(limit.place, limit) is not limit:
            return
        dimension = limit.calendar_dimension
        if dimension is not None:
            self.budgets[dimension, limit.unit][limit.key] = limit
            if limit.enforcement == "hard":
                self.hard_scopes[dimension][_known_parts(limit)] += 1
        elif limit.is_rate and "task" not in (kinds := limit.kinds):
            self.rates[kinds][limit.key] = (*self.rates[kinds].get(limit.key, ()), limit)

    def remove(self, limit: Limit) -> None:
        """Removes a limit that was added, if it is the one in its place."""
        if self.by_place.get(limit.place) is not limit:
            return
        del self.by_place[limit.place]
        dimension = limit.calendar_dimension
        if dimension is not None:
            place = dimension, limit.unit
            del self.budgets[place][limit.key]
            if not self.budgets[place]:
                del self.budgets[place]
            if limit.enforcement == "hard":
                self.hard_scopes[dimension] -= Counter((_known_parts(limit),))
                if not self.hard_scopes[dimension]:
                    del self.hard_scopes[dimension]
        elif limit.is_rate:
            of_kinds = self.rates[limit.kinds]
            of_kinds[limit.key] = tuple(rate for rate in of_kinds[limit.key] if rate is not limit)
            if not of_kinds[limit.key]:
                del of_kinds[limit.key]
            if not of_kinds:
                del self.rates[limit.kinds]


def _known_parts(limit: Limit) -> tuple[ScopePart, ...]:
    return tuple(part for part in limit.parts if part.kind in KNOWN_BEFORE_CALLS)


@dataclass(frozen=True, slots=True)
class PlaneLimit:
    """A limit that the plane keeps, or the raises of one of the config. Its record stays JSON, which takes less memory.

    Attributes:
        limit: None if it is in the config.
        raises: those that had not ended when the record was made.
        document: the record; empty in a process that neither changes nor lists limits.
        unreadable_scope: the scope of a limit whose record is not readable here; empty if it is.
    """

    limit: Limit | None
    raises: tuple[LimitRaise, ...]
    document: bytes
    unreadable_scope: tuple[ScopePart, ...] = ()

    @classmethod
    def of(cls, record: LimitRecord, document: bytes) -> PlaneLimit:
        """Makes it of a record, and of the same as JSON. Raises ValueError: its scope is none."""
        limit = None if record.limit is None else limit_of(record.id, record.limit)
        return cls(limit, record.raises, document)

    @property
    def record(self) -> LimitRecord | None:
        """Its record, parsed anew; None if it is not readable."""
        return None if self.unreadable_scope else LimitRecord.model_validate_json(self.document)


class PlaneLimits(LimitIndex):
    """The limits that the plane keeps and that hold now, with the raises of all limits."""

    def __init__(self) -> None:
        super().__init__()
        self.limits: dict[str, Limit] = {}
        """Those that hold, by their ids."""
        self.unreadable: dict[str, tuple[ScopePart, ...]] = {}
        """The scopes of those that may hold, but are not readable here, by their ids."""
        self.now_ms = 0
        """The moment until which limits and raises have ended, in milliseconds since the epoch."""
        self._raises: dict[str, tuple[LimitRaise, ...]] = {}
        """Those of the limits' records, by the ids of the limits; some may have ended."""
        self._ends: list[tuple[int, str]] = []
        """A heap of the ends of limits and raises."""

    @property
    def next_end_ms(self) -> float:
        """The next moment at which a limit or a raise ends, in milliseconds since the epoch."""
        return self._ends[0][0] if self._ends else _FOR_EVER

    def change(self, changed: Mapping[str, PlaneLimit | None], now_ms: int) -> None:
        """Replaces limits by their ids; None if they are gone."""
        self.now_ms = now_ms
        # All are removed first: a new limit may be where an old one was.
        for limit_id in changed:
            if (before := self.limits.pop(limit_id, None)) is not None:
                self.remove(before)
            self._raises.pop(limit_id, None)
            self.unreadable.pop(limit_id, None)
        for limit_id, plane_limit in changed.items():
            if plane_limit is None:
                continue
            if plane_limit.unreadable_scope:
                self.unreadable[limit_id] = plane_limit.unreadable_scope
            limit = plane_limit.limit
            if limit is not None and limit.holds_at(now_ms):
                self.limits[limit_id] = limit
                self.add(limit)
                if limit.until_ms is not None:
                    heapq.heappush(self._ends, (limit.until_ms, limit_id))
            if plane_limit.raises:
                self._raises[limit_id] = plane_limit.raises
            for limit_raise in plane_limit.raises:
                if (until_ms := ms_from_time(limit_raise.until)) > now_ms:
                    heapq.heappush(self._ends, (until_ms, limit_id))

    def end(self, states: Mapping[str, PlaneLimit], now_ms: int) -> None:
        """Lets end what ends until now."""
        ended: set[str] = set()
        while self._ends and self._ends[0][0] <= now_ms:
            ended.add(heapq.heappop(self._ends)[1])
        self.change({limit_id: states.get(limit_id) for limit_id in ended}, now_ms)

    @property
    def raised_keys(self) -> Iterator[str]:
        """The keys of scopes that limits are raised for, or were."""
        of_limits = chain(*self._raises.values())
        return (key_from_text(limit_raise.scope) for limit_raise in of_limits if limit_raise.scope is not None)

    def raise_of(self, limit: Limit, key: str, until_ms: int | None = None) -> LimitRaise | None:
        """Returns the raise of a limit for a scope; None if there is none, or the limit has changed since.

        The amount of a raise is larger than that of its limit.

        Args:
            limit: the limit. Another one of the config may have its id since, which is the place in a list.
            key: the scope's key.
            until_ms: a moment until which the raise lasts, in milliseconds since the epoch; by default now.
        """
        lasts_until_ms = self.now_ms if until_ms is None else until_ms
        for limit_raise in self._raises.get(limit.id, ()):
            lasts = ms_from_time(limit_raise.until) > lasts_until_ms
            is_of_scope = limit_raise.scope is None or key_from_text(limit_raise.scope) == key
            if lasts and is_of_scope and amount_of(limit.unit, limit_raise.configured) == limit.amount:
                return limit_raise
        return None
