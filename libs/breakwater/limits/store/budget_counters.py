"""The counters of all budgets: read as of one moment, filled from the record, repaired where they differ.

The figures that they are filled from or compared with are computed in `breakwater.records.reconciliation`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from secrets import token_hex
from typing import Any, NamedTuple, cast
from zoneinfo import ZoneInfo

from breakwater.kernel.redis.connection import (
    KEPT_SINCE,
    Argument,
    Redis,
    ScriptCommand,
    StateUnavailableError,
    read_hashes,
)
from breakwater.kernel.types import time_from_ms
from breakwater.limits.contract import LimitRaise, LimitUnit
from breakwater.limits.rules.budget import WINDOWS, Period, periods_since
from breakwater.limits.rules.ledger import FIGURES, AttemptSums, BudgetPlace, Ledger
from breakwater.limits.rules.limit import Limit
from breakwater.limits.rules.rate_limit import (
    MINUTES,
    NO_RATE_LIMITS,
    WINDOW_MS,
    WINDOW_UNITS,
    rate_limits_of,
)
from breakwater.limits.rules.scopes import BASE, ONLY_BASE, Dimension, Dimensions, dimension_of, parts_of, scope_of
from breakwater.limits.store.budgets import (
    BLOCK,
    FILLED,
    HELD,
    KEEP_MS,
    LUA,
    QUEUE,
    RESERVATIONS,
    SLICES,
    WAITERS,
    Reservation,
    block_key,
    keys_of_rate_limits,
    period_key,
    reservation,
)

KEEP = timedelta(milliseconds=KEEP_MS)
KEEP_COPIES_MS = 600_000
PART = 500
"""The most fields that are set or added to at once, which takes Redis about a millisecond."""
RESERVED: Mapping[str, str] = {"reserved": "spent", "reserved_tokens": "tokens", "reserved_calls": "calls"}
"""The fields of what is reserved, and the figures that they become."""
_FIELDS: Mapping[LimitUnit, tuple[str, str]] = {
    "usd": ("spent", "reserved"), "tokens": ("tokens", "reserved_tokens"), "requests": ("calls", "reserved_calls")
}  # fmt: skip
"""The fields of what is used and what is reserved, of each unit that is counted by the calendar."""
_FILLED = ("log", "zone", "upto", "alone", "repairs", "dimensions", "limits", "since")


@dataclass(frozen=True, slots=True)
class CounterSource:
    """The source of the counters: a log up to a sequence, counted in the days of a time zone."""

    log: str
    zone: str
    upto: int
    alone: bool
    """True if the counters contain nothing but events of this log."""
    repairs: str
    dimensions: Dimensions = ONLY_BASE
    """The dimensions that are counted."""
    limits: str = field(default="", compare=False)
    """The version of the limits that the plane keeps; empty if it is unknown."""
    since: str | None = field(default=None, compare=False)
    """The beginning of Redis' data for which they are right; None if an earlier version of the plane filled them."""


Announced = Mapping[str, Collection[str]]
"""The thresholds that were announced, each as `<key>@<limit in nano-dollars>@<percent>`, by the period's name."""


@dataclass(frozen=True, slots=True)
class PeriodCounters:
    """The counters of one period, by the scope's key."""

    period: Period
    figures: Mapping[str, AttemptSums]
    reserved_figures: Mapping[str, AttemptSums]
    """The reserved part of each figure that has limits: of `spent`, `tokens` and `calls`."""
    announced: frozenset[str]
    """The thresholds that were announced, as in `Announced`."""

    @property
    def reserved(self) -> Mapping[str, int]:
        """The reserved amounts of money, in nano-dollars."""
        return {key: sums.spent for key, sums in self.reserved_figures.items()}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All counters as of one moment, and which events of the log are counted in them."""

    filled: CounterSource | None
    periods: tuple[PeriodCounters, ...]
    reservations: tuple[Reservation, ...]
    _blocks: Mapping[int, bytes]

    def counts(self, sequence: int) -> bool:
        """Returns True if an event of the log is counted; it must lie in the range that was asked for."""
        if self.filled is not None and sequence <= self.filled.upto:
            return True
        block, bit = divmod(sequence, BLOCK)
        bits = self._blocks.get(block, b"")
        return bit // 8 < len(bits) and bool(bits[bit // 8] >> (7 - bit % 8) & 1)

    @property
    def figures(self) -> Ledger:
        """The figures of all budgets, by period and scope."""
        return {
            (counters.period.name, key): sums for counters in self.periods for key, sums in counters.figures.items()
        }

    @property
    def settled(self) -> Ledger:
        """The figures without the charges for calls that left no record."""
        charged = self.held_figures(charged=True)
        return {place: sums - charged.get(place, AttemptSums()) for place, sums in self.figures.items()}

    @property
    def reserved_figures(self) -> Ledger:
        """The reserved figures according to the counters, by period and scope."""
        return {
            (counters.period.name, key): sums
            for counters in self.periods
            for key, sums in counters.reserved_figures.items()
        }

    @property
    def reserved(self) -> Mapping[BudgetPlace, int]:
        """The money reserved according to the counters, in nano-dollars by period and scope."""
        return {place: sums.spent for place, sums in self.reserved_figures.items()}

    def held_figures(self, *, charged: bool) -> Ledger:
        """The figures that the reservations hold, or were charged when their leases ended without a settlement."""
        sums: dict[BudgetPlace, AttemptSums] = defaultdict(AttemptSums)
        for held_call in self.reservations:
            if held_call.charged == charged:
                for place, unit in held_call.counters:
                    sums[place] += held_call.figures(unit)
        return dict(sums)

    def held_amounts(self, *, charged: bool) -> Mapping[BudgetPlace, int]:
        """The money in `held_figures`, in nano-dollars."""
        return {place: sums.spent for place, sums in self.held_figures(charged=charged).items()}


class StoredRaise(NamedTuple):
    """A raise of a limit, as an earlier version of the plane stored it next to the counters of a period."""

    period: Period
    key: str
    limit_raise: LimitRaise


@dataclass(frozen=True, slots=True)
class Repair:
    """An amount to add to a counter; negative if the counter has too much."""

    period: Period
    field: str
    """Such as `spent:global`."""
    add: int


@dataclass(frozen=True, slots=True)
class QueuedCall:
    """A call that waits for a rate: since when, of which key, for which tenant."""

    since_ms: int
    key: str | None
    tenant: str | None

    @classmethod
    def parse(cls, text: str) -> QueuedCall:
        """Parses the text of a waiting call, as the scripts describe it."""
        times, key, tenant = text.split("\n")
        return cls(int(times.split("|")[1]), key or None, tenant or None)


def _rate_key(limit: Limit, key: str) -> str:
    return keys_of_rate_limits(rate_limits_of(key, [limit]))[0]


class BudgetCounters:
    """Reads, fills and repairs the counters. All methods raise StateUnavailableError, and may then be called again."""

    def __init__(self, redis: Redis, zone: ZoneInfo) -> None:
        self._redis = redis
        self._zone = zone

    @property
    def zone(self) -> ZoneInfo:
        """The time zone of the days and months."""
        return self._zone

    def periods(self, now: datetime, dimensions: Dimensions = ONLY_BASE) -> tuple[Period, ...]:
        """The current periods of all windows, and the earlier ones whose calls may still be settled."""
        counted = {dimension.window for dimension in dimensions.all}
        return periods_since(now - KEEP, now, self._zone, [window for window in WINDOWS if window in counted])

    async def run_id(self) -> str:
        """The id of this run of Redis, as `Redis.run_id` returns it."""
        return await self._redis.run_id()

    async def kept_since(self) -> str:
        """The beginning of Redis' data, after which it has lost nothing; empty if it is unknown yet."""
        return str(await self._redis.command("GET", KEPT_SINCE) or "")

    async def confirm(self, since: str) -> None:
        """Says that the counters are right for the data of Redis that began then."""
        await self._redis.run([ScriptCommand(LUA["confirm"], [FILLED, KEPT_SINCE], [since])])

    async def source(self) -> CounterSource | None:
        """The source of the counters; None if they are lost."""
        return _read_source(dict(zip(_FILLED, await self._redis.command("HMGET", FILLED, *_FILLED), strict=True)))

    async def read(self, periods: Sequence[Period]) -> Snapshot:
        """The counters of some periods, read in parts: calls go on meanwhile, and may be in some counters only.

        This takes nothing else's time in Redis, so it is for all that shows counters and does not compare them.
        """
        hashes = [FILLED, RESERVATIONS, *(period_key(period.window, period.name) for period in periods)]
        filled, reservations, *counted = await read_hashes(self._redis.client, hashes)
        return _snapshot(filled, reservations, periods, counted, {})

    async def snapshot(self, periods: Sequence[Period], log: str = "", first: int = 1, last: int = 0) -> Snapshot:
        """The counters of some periods as of one moment.

        Redis copies them in one go, which takes a millisecond for each thousand scopes of a period.

        Args:
            periods: the days and months to read.
            log: the log of the events that `Snapshot.counts` will be asked about.
            first: the sequence of the first of those events.
            last: the sequence of the last one. Events of the next minute may be asked about as well.
        """
        # One block more, even if it has no events yet: some may come, and be counted, before it is read.
        blocks = range(first // BLOCK, max(first, last) // BLOCK + 2) if log else range(0)
        hashes = [RESERVATIONS, *(period_key(period.window, period.name) for period in periods)]
        name = token_hex(8)
        copies = [f"bw:limits:copy:{name}:{number}" for number in range(len(hashes))]
        pairs = [key for pair in zip(hashes, copies, strict=True) for key in pair]
        keys = [FILLED, *(block_key(log, block) for block in blocks), *pairs]
        [answer] = await self._redis.run([ScriptCommand(LUA["snapshot"], keys, [len(blocks), KEEP_COPIES_MS])])
        filled, copied, *bits = answer
        reservations, *counted = await read_hashes(self._redis.client, copies)
        if await self._redis.client.unlink(*copies) < copied:
            raise StateUnavailableError("the copy of the budgets' counters was not read in time")
        blocks_read = {block: bytes.fromhex(part) for block, part in zip(blocks, bits, strict=True)}
        return _snapshot(dict(zip(_FILLED, filled, strict=True)), reservations, periods, counted, blocks_read)

    async def fill(
        self,
        source: CounterSource | None,
        log: str,
        upto: int,
        periods: Sequence[Period],
        figures: Ledger,
        announced: Announced,
        *,
        alone: bool = True,
        dimensions: Dimensions = ONLY_BASE,
        since: str = "",
    ) -> bool:
        """Sets the counters to the figures of the record. Reservations of calls under way stay.

        Args:
            source: their source so far.
            log: the identity of the log.
            upto: the last event that is counted in `figures`; those after it are settled as they come.
            periods: the periods to set; the others stay.
            figures: the sums by period and scope.
            announced: the announced thresholds.
            alone: nothing of `figures` is from elsewhere than this log.
            dimensions: those that `figures` are of.
            since: the beginning of Redis' data when the filling began; empty if it was unknown.

        Returns:
            True if it was done; another process may have filled them since `source` was read.
        """
        before = ("", "") if source is None else (source.log, source.zone)
        arguments: list[Argument] = [log, self._zone.key, upto, int(alone), *before, dimensions.text, since]
        fields: dict[str, list[Argument]] = {
            period.name: [part for name in announced.get(period.name, ()) for part in (f"announced:{name}", 1)]
            for period in periods
        }
        for (name, key), sums in figures.items():
            if name in fields:
                fields[name] += [part for figure, value in sums.items() for part in (f"{figure}:{key}", value)]
        keys, staged = [FILLED, RESERVATIONS, HELD, KEPT_SINCE], f"bw:limits:figures:{token_hex(8)}"
        for period in periods:
            keys += [period_key(period.window, period.name), f"{staged}:{period.name}"]
            arguments += [period.end_ms + KEEP_MS, len(fields[period.name]) // 2]
            await self._store(f"{staged}:{period.name}", fields[period.name])
        [was_filled] = await self._redis.run([ScriptCommand(LUA["fill"], keys, arguments)])
        if was_filled != 1 and periods:
            await self._redis.client.unlink(*(f"{staged}:{period.name}" for period in periods))
        if was_filled == 2:
            raise StateUnavailableError("the figures of the budgets' counters were lost before they were complete")
        return bool(was_filled)

    async def _store(self, key: str, fields: Sequence[Argument]) -> None:
        """Stores a hash in parts: Redis answers others in between."""
        for first in range(0, len(fields), 2 * PART):
            async with self._redis.client.pipeline(transaction=False) as pipe:
                pipe.hset(key, items=list(fields[first : first + 2 * PART]))
                pipe.pexpire(key, KEEP_COPIES_MS)
                await pipe.execute()

    async def repair(self, source: CounterSource, repairs: Sequence[Repair], upto: int) -> bool:
        """Adds missing amounts to counters, which then count all events of the log up to `upto`.

        It is done in parts, so that Redis answers others in between. If not all are done, the next comparison finds
        what is still missing.

        Returns:
            True if it was done; another process may have filled or repaired them since `source` was read.
        """
        periods = list(dict.fromkeys(repair.period for repair in repairs))
        keys = [FILLED, *(period_key(period.window, period.name) for period in periods)]
        number = source.repairs
        for first in range(0, len(repairs), PART):
            arguments: list[Argument] = [source.log, source.zone, number, upto]
            for repair in repairs[first : first + PART]:
                place = periods.index(repair.period) + 1, repair.period.end_ms + KEEP_MS
                arguments += [*place, repair.field, repair.add]
            [number] = await self._redis.run([ScriptCommand(LUA["repair"], keys, arguments)])
            if not number:
                return False
        return True

    async def count(self, source: CounterSource, dimensions: Dimensions) -> bool:
        """Counts calls in other dimensions from now on. Returns False if they have changed since `source` was read."""
        arguments = [source.log, source.dimensions.text, dimensions.text]
        [was_set] = await self._redis.run([ScriptCommand(LUA["count"], [FILLED], arguments)])
        return bool(was_set)

    async def stored_raises(self, periods: Sequence[Period]) -> list[StoredRaise]:
        """The raises of limits that an earlier version of the plane stored next to the counters."""
        raises: list[StoredRaise] = []
        for period in periods:
            client = cast(Any, self._redis.client)
            fields = client.hscan_iter(period_key(period.window, period.name), match="raised:*", count=PART)
            async for name, document in cast(AsyncIterator[tuple[str, str]], fields):
                key = name.partition(":")[2]
                raised = json.loads(document)
                of_period = {"scope": scope_of(parts_of(key)), "until": time_from_ms(period.end_ms)}
                raises.append(StoredRaise(period, key, LimitRaise(amount=raised["limit"], **raised | of_period)))
        return raises

    async def forget_stored_raise(self, stored: StoredRaise) -> None:
        """Removes a raise that LIMITS has now, or that has ended."""
        place = period_key(stored.period.window, stored.period.name)
        await cast(Any, self._redis.client.hdel(place, f"cap:{stored.key}", f"raised:{stored.key}"))

    async def note_limits(self, version: str, contradicted: str = "") -> None:
        """Lets no call be admitted from now on whose worker knows an older version of the limits that the plane keeps.

        Raises StateUnavailableError; may be repeated.

        Args:
            version: that of their stream.
            contradicted: the version in Redis, if it is that of a stream that was recreated or restored.
        """
        await self._redis.run([ScriptCommand(LUA["note_limits"], [FILLED], [version, contradicted])])

    async def use(self, places: Sequence[tuple[Period, str, LimitUnit]]) -> list[tuple[int, int] | None]:
        """The use and the reservations of scopes in periods; None for those that are not counted, or not wholly."""
        by_period: defaultdict[Period, list[str]] = defaultdict(list)
        for period, key, unit in places:
            by_period[period] += [f"{name}:{key}" for name in _FIELDS[unit]]
        async with self._redis.client.pipeline(transaction=False) as pipe:
            pipe.hgetall(FILLED)
            for period, fields in by_period.items():
                pipe.hmget(period_key(period.window, period.name), fields)
            filled, *values = await pipe.execute()
        source = _read_source(filled)
        counted = frozenset[Dimension]() if source is None else source.dimensions.complete.union(BASE)
        amounts = {
            (period, name): int(value or 0)
            for (period, fields), answers in zip(by_period.items(), values, strict=True)
            for name, value in zip(fields, answers, strict=True)
        }
        uses: list[tuple[int, int] | None] = []
        for period, key, unit in places:
            used, reserved = (amounts[period, f"{name}:{key}"] for name in _FIELDS[unit])
            uses.append((used, reserved) if dimension_of(key, period.window) in counted else None)
        return uses

    async def use_of_rates(self, scopes: Sequence[tuple[Limit, str]]) -> list[int]:
        """The use of limits on rates, each by a scope: the worst case of calls under way, and what others used."""
        if not scopes:
            return []
        rates = sum((rate_limits_of(key, [limit]) for limit, key in scopes), NO_RATE_LIMITS)
        slice_ms = [MINUTES[window.window] * WINDOW_MS // SLICES for window in rates.windows]
        [answer] = await self._redis.run([ScriptCommand(LUA["use_of_rates"], keys_of_rate_limits(rates), slice_ms)])
        figures = iter(map(int, answer))
        of_windows = iter([dict(zip(WINDOW_UNITS, figures, strict=False)) for _ in rates.windows])
        of_slots = figures  # those that are left
        return [next(of_slots) if limit.unit == "concurrent" else next(of_windows)[limit.unit] for limit, _ in scopes]

    async def queues_of_rates(self, scopes: Sequence[tuple[Limit, str]]) -> list[int]:
        """The numbers of calls that wait for limits on rates, each by a scope."""
        async with self._redis.client.pipeline(transaction=False) as pipe:
            for limit, key in scopes:
                pipe.zcard(QUEUE + _rate_key(limit, key))
            return await pipe.execute()

    async def queue_of_rate(self, limit: Limit, key: str, most: int) -> tuple[QueuedCall, ...]:
        """The first calls that wait for a limit on a rate, by a scope."""
        client: Any = self._redis.client
        name = _rate_key(limit, key)
        attempts: list[str] = await client.zrange(QUEUE + name, 0, most - 1)
        texts: list[str | None] = (
            await client.hmget(WAITERS + name, [f"a{attempt}" for attempt in attempts]) if attempts else []
        )
        # One that has left meanwhile has no text.
        return tuple(QueuedCall.parse(text) for text in texts if text)

    async def used(self, period: Period, key: str | None, unit: LimitUnit = "usd") -> dict[str, int]:
        """The use in a period: of one scope, or of all that have used anything."""
        place = period_key(period.window, period.name)
        prefix = f"{_FIELDS[unit][0]}:"
        if key is not None:
            return {key: int(await cast(Any, self._redis.client.hget(place, f"{prefix}{key}")) or 0)}
        [fields] = await read_hashes(self._redis.client, [place])
        return {name.removeprefix(prefix): int(value) for name, value in fields.items() if name.startswith(prefix)}

    async def announcements(self, period: Period, key: str, thresholds: Sequence[str]) -> tuple[int, list[bool]]:
        """The amount a scope's calls hold, and whether each threshold (`<key>@<limit>@<percent>`) was announced."""
        fields = [f"reserved:{key}", *(f"announced:{threshold}" for threshold in thresholds)]
        reserved, *announced = await cast(Any, self._redis.client.hmget(period_key(period.window, period.name), fields))
        return int(reserved or 0), [mark is not None for mark in announced]

    async def announce(self, period: Period, threshold: str) -> None:
        """Records that a threshold has been announced."""
        place = period_key(period.window, period.name)
        async with self._redis.client.pipeline(transaction=True) as pipe:
            pipe.hset(place, f"announced:{threshold}", "1")
            pipe.pexpireat(place, period.end_ms + KEEP_MS)
            await pipe.execute()


def _snapshot(
    filled: Mapping[str, str | None],
    reservations: Mapping[str, str],
    periods: Sequence[Period],
    counted: Sequence[Mapping[str, str]],
    blocks: Mapping[int, bytes],
) -> Snapshot:
    return Snapshot(
        _read_source(filled),
        tuple(_period_counters(period, fields) for period, fields in zip(periods, counted, strict=True)),
        tuple(reservation(attempt_id, text) for attempt_id, text in reservations.items()),
        blocks,
    )


def _read_source(fields: Mapping[str, str | None]) -> CounterSource | None:
    log, zone, upto, alone, repairs, dimensions, limits, since = (fields.get(name) for name in _FILLED)
    if log is None:
        return None
    counted = Dimensions.parse(dimensions or "")
    filled = (log, cast(str, zone), int(cast(str, upto)))
    return CounterSource(*filled, alone == "1", cast(str, repairs), counted, limits or "", since)


def _period_counters(period: Period, fields: Mapping[str, str]) -> PeriodCounters:
    figures: dict[str, dict[str, int]] = defaultdict(dict)
    reserved: dict[str, dict[str, int]] = defaultdict(dict)
    announced: set[str] = set()
    for name, value in fields.items():
        kind, _, key = name.partition(":")
        if kind in FIGURES:
            figures[key][kind] = int(value)
        elif kind in RESERVED:
            reserved[key][RESERVED[kind]] = int(value)
        elif kind == "announced":
            announced.add(key)
    sums = {key: AttemptSums(**values) for key, values in figures.items()}
    reserved_sums = {key: AttemptSums(**values) for key, values in reserved.items()}
    return PeriodCounters(period, sums, reserved_sums, frozenset(announced))
