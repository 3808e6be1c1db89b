"""Reservations: what a call may use at most, held by one atomic script over all its limits, and what it has used.

A period's counters are one hash (`bw:limits:daily:2026-11-21`). Its fields are the names of
`limits.rules.ledger.Figures` and `read_reservation`, each followed by the scope's key: `spent:global`,
`reserved:agent:<name>`, `calls:tenant:<name>`. Next to them are the thresholds that were announced (`announced:`). The
holdings of callers under hard limits, each for an agent and a tenant, are a hash apart: one that holds nothing has no
field in it. Filling, comparing and repairing the counters is in `limits.store.budget_counters`.

Limits on a rate are counted by Redis' clock, in slices of 1 % of the window with running sums, in one hash for each
scope and window: at most 410 small fields, however much is called. A call counts for at least the whole window and at
most a slice longer, so no window, wherever it is laid, ever holds more than the limit. Calls at the same time are a
sorted set of leases: those of a worker that died end by themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Literal, cast
from zoneinfo import ZoneInfo

from breakwater.jobs.contract.execution import Attempt
from breakwater.jobs.rules.turns import NOBODYS, CallerTurn
from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.immutable import immutable
from breakwater.kernel.redis.connection import KEPT_SINCE, Argument, Redis, ScriptCommand, scripts_of
from breakwater.kernel.types import ms_from_time, time_from_ms
from breakwater.limits.contract import LimitUnit, Window
from breakwater.limits.rules.budget import (
    Counter,
    OverBudget,
    Period,
    Periods,
    period_named,
    periods_at,
)
from breakwater.limits.rules.caller_limits import WindowState
from breakwater.limits.rules.ledger import AttemptSums, BudgetPlace, charged_at, figures_of, tokens_used
from breakwater.limits.rules.rate_limit import (
    MINUTES,
    NO_RATE_LIMITS,
    WINDOW_MS,
    OverRate,
    RateLimits,
    RateSlots,
    RateWindow,
    WindowUnit,
)
from breakwater.limits.rules.scopes import ONLY_BASE, CallNames, Dimensions

KEEP_MS = 3 * 24 * 3_600_000
"""Counters outlive their period by the longest job and then some, so that late calls still find them."""

BLOCK = 65_536
"""Events of the log whose settlement is remembered in one bitmap, 8 KB."""

SETTLED_TOGETHER = 100
"""The most settlements of one script, during which Redis does nothing else."""

SLICES = 100
"""The slices of a window, as the scripts have it."""

WAITS_MS = 1_000
"""Twice the longest time after which a call that waits for a budget asks again."""

RESERVATIONS = "bw:limits:reservations"
LEASES = "bw:limits:leases"
FILLED = "bw:limits:filled"
HELD = "bw:limits:held"
_WINDOWS = "bw:limits:window:"
_LETTERS: Mapping[LimitUnit, str] = {"requests": "r", "tokens": "t", "usd": "u"}
_UNITS: Mapping[str, WindowUnit] = {"r": "requests", "t": "tokens", "u": "usd"}
_SLOTS = "bw:limits:slots:"
_NAMES = "bw:limits:names:"
QUEUE = "bw:limits:queue:"
WAITERS = "bw:limits:waiters:"

LUA = scripts_of(__file__)


class NotFilledError(BreakwaterError):
    """The counters do not match the log: they are lost, or not rebuilt yet. Try again once they are."""


@lru_cache(maxsize=64)
def period_key(window: Window, name: str) -> str:
    """The key of the counters of a period."""
    return f"bw:limits:{window}:{name}"


def key_of(counted: Period) -> str:
    """The key of the counters of a period."""
    return period_key(counted.window, counted.name)


def window_key(window: RateWindow) -> str:
    """The key of the counts of a window."""
    return f"{_WINDOWS}{window.window.removeprefix('rolling ')}:{window.key}"


def slots_key(slots: RateSlots) -> str:
    """The key of the calls of a scope at the same time."""
    return f"{_SLOTS}{slots.key}"


def keys_of_rate_limits(rates: RateLimits) -> list[str]:
    """The keys of windows and slots."""
    return [*map(window_key, rates.windows), *map(slots_key, rates.slots)]


def block_key(log: str, block: int) -> str:
    """The key of the bitmap of settled events in a block."""
    return f"bw:limits:settled:{log}:{block}"


@immutable()
class Reserved:
    """The reservation was granted, or had been, at this moment of Redis' clock."""

    at: datetime
    windows: tuple[WindowState, ...] = ()
    """Its windows; none if it had been granted before."""


@dataclass(frozen=True, slots=True)
class PeriodChanged:
    """By Redis' clock, it is another period than the request assumed. Now it is known, so ask again."""


@dataclass(frozen=True, slots=True)
class DimensionsChanged:
    """Calls count in other dimensions than the request assumed. Now they are known, so ask again."""


@dataclass(frozen=True, slots=True)
class LimitsChanged:
    """Newer limits are in force than the request was made under, or it is unknown which: read on, and ask again."""

    version: str
    """The version that is in force; empty if it is unknown."""


@dataclass(frozen=True, slots=True)
class HeldOtherwise:
    """The attempt holds other amounts or in other places, for another model perhaps: give that up, and ask again."""

    keys: tuple[str, ...]
    """The keys of its places."""


@dataclass(frozen=True, slots=True)
class CountersLost:
    """A hard limit can't be enforced, because the counters are lost until the budget service has rebuilt them."""


@dataclass(frozen=True, slots=True)
class TooManyNames:
    """The sender of the job has made up more names in this period than there may be limits for."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """The amount that is held for an attempt, since a moment and in its places."""

    attempt_id: str
    charged: bool
    """`amount` is counted as spent already: the call ended at that cost, or its lease ended at that estimate."""
    amount: int
    tokens: int
    at: datetime
    agent: str
    tenant: str | None
    caller: str | None
    """The sender of the job."""
    counters: tuple[tuple[BudgetPlace, WindowUnit], ...]
    """The scopes in the periods that it counts in, and what it counts there."""
    keys: tuple[str, ...]
    """The keys of all its places."""

    @property
    def places(self) -> tuple[BudgetPlace, ...]:
        """The scopes in the periods whose money it counts in."""
        return tuple(place for place, unit in self.counters if unit == "usd")

    def figures(self, unit: WindowUnit) -> AttemptSums:
        """The figures that it holds, or is charged, in a counter."""
        if unit == "usd":
            return AttemptSums(spent=self.amount)
        return AttemptSums(tokens=self.tokens) if unit == "tokens" else AttemptSums(calls=1)


@immutable()
class LiveReservation:
    """The reservation of a call under way, as its worker knows it: `amount` in nano-dollars, made `at`."""

    attempt_id: str
    names: CallNames
    amount: int
    at: datetime
    until: datetime
    """The latest end of its lease."""
    caller: str | None = None
    """The sender of the job."""
    tokens: int = 0
    slots: tuple[RateSlots, ...] = ()
    has_ended: bool = False
    """True if its call has ended: it is missing once the call's event is settled."""


@immutable()
class Settlement:
    """The amounts that an attempt's event adds to its budgets."""

    attempt_id: str
    sequence: int
    names: CallNames
    figures: AttemptSums
    charged_at: datetime
    tokens: UsedTokens = field(default_factory=lambda: UNKNOWN_TOKENS)

    @classmethod
    def of(cls, sequence: int, attempt: Attempt) -> Settlement:
        """The settlement of an attempt that made a call, by its event's place in the log."""
        names = CallNames.of(attempt)
        return cls(
            attempt.attempt_id, sequence, names, figures_of(attempt), charged_at(attempt), UsedTokens.of(attempt)
        )


@immutable()
class UsedTokens:
    """The tokens that a call used; None if they are unknown."""

    all: int | None
    uncached: int | None
    """Without input that the provider read from its cache."""
    refused: bool = False
    """True if the provider's own rate limit refused the call."""

    @classmethod
    def of(cls, attempt: Attempt) -> UsedTokens:
        """The tokens of a recorded call."""
        tokens = tokens_used(attempt)
        uncached = None if tokens is None else max(0, tokens - (attempt.cached_tokens or 0))
        return cls(tokens, uncached, refused=attempt.error is not None and attempt.error.kind == "rate_limit")

    @property
    def arguments(self) -> tuple[Argument, Argument, Argument]:
        """The arguments of a script."""
        return "" if self.all is None else self.all, "" if self.uncached is None else self.uncached, int(self.refused)


UNKNOWN_TOKENS = UsedTokens(None, None)


@dataclass(frozen=True, slots=True)
class Totals:
    """The spend of one budget in one period."""

    period: Period
    key: str
    spent: int
    agent: str
    """The agent of the last settled call."""


class Budgets:
    """The limits of the fleet. Periods are those of the calendar of `zone`."""

    def __init__(self, redis: Redis, zone: ZoneInfo, window_ms: int = WINDOW_MS) -> None:
        """Takes the length of a minute: a multiple of `SLICES`, and the same for all that share a Redis."""
        self._redis = redis
        self._zone = zone
        self._slice_ms = {window: minutes * window_ms // SLICES for window, minutes in MINUTES.items()}
        self._behind = timedelta(0)
        self.dimensions = ONLY_BASE
        """The dimensions that are counted, as far as it is known here; a script that knows others says so."""

    def reserve_command(
        self,
        attempt_id: str,
        names: CallNames,
        amount: int,
        counters: Sequence[Counter],
        *,
        now: datetime,
        lease_ms: int | None,
        tokens: int = 0,
        rates: RateLimits = NO_RATE_LIMITS,
        at: datetime | None = None,
        caller: str | None = None,
        most_names: int = 0,
        waits_ms: int = WAITS_MS,
        turn: CallerTurn = NOBODYS,
        can_wait_ms: int | None = None,
        is_incomplete: bool = False,
        version: str = "",
    ) -> ScriptCommand:
        """Holds an attempt's worst case against all its limits; read its answer with `read_reservation`.

        Args:
            attempt_id: whose reservation it is. Asking again holds nothing more.
            names: those that the call counts under.
            amount: nano-dollars.
            counters: from `LimitTable.counters`, in the present `dimensions`.
            now: by the caller's clock; Redis' clock decides the periods.
            lease_ms: of the reservation; None only asks, and holds nothing.
            tokens: input and output.
            rates: from `LimitTable.rates`, and those of the task.
            at: the moment of a reservation that Redis has lost. Limits do not matter then.
            caller: sender of the job. All unknown ones are one.
            most_names: counters are kept of so many scopes in a period whose names the caller makes up, and windows of
                so many at the same time; 0: any number.
            turn: whose place it is in the queue of a rate.
            can_wait_ms: a call that would have to wait for as long takes no place there; None: it can wait for ever.
            waits_ms: a call that is kept out counts as waiting for so long, unless it asks again.
            is_incomplete: a hard limit applies in a dimension that is not counted yet, or not wholly.
            version: of the limits that the plane keeps, as they are in `counters` and `rates`.
        """
        current = self._current(now) if at is None else periods_at(at, self._zone)
        parts = _counter_parts(tuple(counters), current.day.start_ms, self._zone, has_caps=at is None)
        may_be_made_up = parts.may_be_made_up
        of_rates: list[Argument] = []
        for window in rates.windows:
            may_be_made_up = may_be_made_up or "m" in window.flags
            maxima = ("" if maximum is None else maximum for maximum in window.maxima)
            of_rates += [self._slice_ms[window.window], window.flags, window.refuses, *maxima]
        for slots in rates.slots:
            most_calls = "" if at is not None else slots.limit.amount
            of_rates += [most_calls, "c" if slots.limit.action != "wait" else ""]
        of_rates += [turn.key, turn.tenant, turn.share, "" if can_wait_ms is None else can_wait_ms]
        arguments: list[Argument] = [
            *(attempt_id, amount, tokens, "" if lease_ms is None else lease_ms, "" if at is None else ms_from_time(at)),
            *(names.agent, names.tenant or "", caller or "", (may_be_made_up and most_names) or "", waits_ms),
            *(self.dimensions.text, int(is_incomplete and at is None), parts.lines),
            *(len(parts.keys), len(counters), len(rates.windows), version),
        ]
        rate_keys = keys_of_rate_limits(rates)
        keys = [
            *(RESERVATIONS, LEASES, FILLED, HELD, f"{_NAMES}{caller or ''}", KEPT_SINCE),
            *(*parts.keys, *rate_keys, *_keys_of_queues(rate_keys)),
        ]
        return ScriptCommand(LUA["reserve"], keys, [*arguments, *parts.arguments, *of_rates])

    def read_reservation(
        self,
        answer: Sequence[Any],
        counters: Sequence[Counter],
        amount: int,
        *,
        now: datetime,
        tokens: int = 0,
        rates: RateLimits = NO_RATE_LIMITS,
    ) -> (
        Reserved
        | OverBudget
        | OverRate
        | PeriodChanged
        | DimensionsChanged
        | LimitsChanged
        | HeldOtherwise
        | CountersLost
        | TooManyNames
    ):
        """Reads the answer to `reserve_command`, asked with the same arguments."""
        match answer[0]:
            case 1:
                return Reserved(time_from_ms(int(answer[1])), _window_states(rates, answer[2:]))
            case 6:
                _, number, unit, wait_ms, ask_again_ms, ahead, *figures = answer
                window = rates.windows[int(number) - 1]
                limit = window.limits[_UNITS[unit]]
                states = _window_states(rates, figures)
                return OverRate(
                    window.key, limit, None if wait_ms < 0 else int(wait_ms), int(ask_again_ms), int(ahead), states
                )
            case 7:
                _, number, wait_ms, ask_again_ms, ahead, *figures = answer
                slots = rates.slots[int(number) - 1]
                states = _window_states(rates, figures)
                return OverRate(slots.key, slots.limit, int(wait_ms), int(ask_again_ms), int(ahead), states)
            case 2:
                self._behind = time_from_ms(int(answer[1])) - now
                return PeriodChanged()
            case 3:
                return CountersLost()
            case 4:
                return TooManyNames()
            case 5:
                self.dimensions = Dimensions.parse(answer[1])
                return DimensionsChanged()
            case 8:
                return LimitsChanged(answer[1])
            case 9:
                return HeldOtherwise(tuple(answer[1].split("\n")) if answer[1] else ())
            case _:
                _, number, limit, spent, reserved, by_share = answer
                counter = counters[int(number) - 1]
                ends = self._current(now).of(counter.window).resets_at
                asked_amount = amount if counter.unit == "usd" else tokens if counter.unit == "tokens" else 1
                return OverBudget(counter, ends, int(limit), int(spent), int(reserved), asked_amount, bool(by_share))

    def release_command(
        self,
        attempt_id: str,
        at: datetime,
        cost: int | None = None,
        *,
        tokens: UsedTokens = UNKNOWN_TOKENS,
        rates: RateLimits = NO_RATE_LIMITS,
    ) -> ScriptCommand:
        """Ends the reservation of a call. The script answers nothing, and may be repeated.

        It does nothing if the reservation has further places: then the event of the call settles it.

        Args:
            attempt_id: whose reservation it is.
            at: the moment of the reservation.
            cost: of the call, in nano-dollars, which is charged until its event settles it; None: it was never made.
            tokens: those that the call used; unknown ones leave the worst case.
            rates: the windows and slots of the reservation.
        """
        periods = periods_at(at, self._zone).all
        keys = [RESERVATIONS, LEASES, HELD, *map(key_of, periods), *keys_of_rate_limits(rates)]
        return ScriptCommand(LUA["release"], keys, [attempt_id, "" if cost is None else cost, *tokens.arguments])

    def give_up_command(self, attempt_id: str, held: HeldOtherwise) -> ScriptCommand:
        """Ends a reservation whose call was never made, in all its places. The script answers nothing."""
        keys = [RESERVATIONS, LEASES, HELD, *held.keys]
        return ScriptCommand(LUA["release"], keys, [attempt_id, "", *UNKNOWN_TOKENS.arguments])

    def withdraw_command(self, attempt_id: str, rates: RateLimits) -> ScriptCommand:
        """Takes a call that is not to be made out of the queues of its rates. The script answers nothing."""
        return ScriptCommand(LUA["withdraw"], _keys_of_queues(keys_of_rate_limits(rates)), [attempt_id])

    async def settle(self, settlements: Sequence[Settlement], log: str) -> list[Totals]:
        """Replaces reservations by the costs of the calls, in one round trip. Each event counts once, ever.

        Args:
            settlements: from the events.
            log: the identity of the stream that their sequences belong to; a new one begins at 1 again.

        Returns:
            The spend of all their budgets afterwards, also when they had been counted before.

        Raises:
            NotFilledError: the counters are to be filled from this log first. Nothing is counted.
            StateUnavailableError: settle again.
        """
        totals: dict[BudgetPlace, Totals] = {}
        parts = [
            (settlements[begin : begin + SETTLED_TOGETHER], frozenset[str]())
            for begin in range(0, len(settlements), SETTLED_TOGETHER)
        ]
        while parts:
            batches = [_SettledBatch.of(part, self._zone, log, self.dimensions, more) for part, more in parts]
            answers = await self._redis.run([batch.command for batch in batches])
            if [3] in answers:
                raise NotFilledError
            changed = next((answer[1] for answer in answers if answer[0] == 5), None)
            if changed is not None:
                self.dimensions = Dimensions.parse(changed)
                continue
            again: list[tuple[Sequence[Settlement], frozenset[str]]] = []
            for batch, (settled, counted) in zip(batches, answers, strict=True):
                totals |= batch.totals(counted)
                elsewhere = [index for index, answer in enumerate(settled) if isinstance(answer, str)]
                if elsewhere:
                    # They are reserved in places that their events do not name.
                    more = frozenset(key for index in elsewhere for key in settled[index].split("\n"))
                    again.append(([batch.settlements[index] for index in elsewhere], more))
            parts = again
        return list(totals.values())

    async def reservations(self, attempt_ids: Sequence[str]) -> list[Reservation | None]:
        """The reservations of attempts. Raises StateUnavailableError."""
        if not attempt_ids:
            return []
        texts = cast(list[str | None], await self._redis.client.hmget(RESERVATIONS, list(attempt_ids)))
        return [
            None if text is None else reservation(name, text) for name, text in zip(attempt_ids, texts, strict=True)
        ]

    async def lapsed_attempts(self, now: datetime, limit: int = 500) -> list[str]:
        """Attempts whose reservation's lease has ended without a settlement. Raises StateUnavailableError."""
        attempt_ids = await self._redis.client.zrangebyscore(LEASES, 0, ms_from_time(now), start=0, num=limit)
        return cast(list[str], attempt_ids)

    async def charge_estimate(self, lapsed: Reservation) -> None:
        """Charges a lapsed reservation at its amount. Its event, if it still comes, corrects that.

        One that was charged before, and whose periods are long over, is forgotten. Raises StateUnavailableError; may
        be repeated.
        """
        keys = [RESERVATIONS, LEASES, HELD, *lapsed.keys]
        # Until then, the comparison with the record knows that nothing else accounts for the charge.
        forget_at = max(period_named(name, self._zone).end_ms for name, _ in lapsed.places) + KEEP_MS
        await self._redis.run([ScriptCommand(LUA["lapse"], keys, [lapsed.attempt_id, forget_at])])

    async def forget_lease(self, attempt_id: str) -> None:
        """Removes an attempt's lease, because there is nothing left to charge. Raises StateUnavailableError."""
        await self._redis.client.zrem(LEASES, attempt_id)

    async def has_counters(self) -> bool:
        """Returns True if Redis has counters, of any log, which lack nothing. Raises StateUnavailableError."""
        (log, since), kept_since = await asyncio.gather(
            self._redis.command("HMGET", FILLED, "log", "since"), self._redis.command("GET", KEPT_SINCE)
        )
        return log is not None and since in {None, kept_since}

    def _current(self, now: datetime) -> Periods:
        return periods_at(now + self._behind, self._zone)


def reservation(attempt_id: str, text: str) -> Reservation:
    """Parses a reservation as Redis has it."""
    header, agent, tenant, caller, *lines = text.split("\n")
    state, amount, tokens, at = header.split("|")
    by_key = [line[1:].split("\t") for line in lines]
    return Reservation(
        attempt_id,
        charged=state != "r",
        amount=int(amount),
        tokens=int(tokens),
        at=time_from_ms(int(at)),
        agent=agent,
        tenant=tenant or None,
        caller=caller or None,
        counters=tuple(
            ((key.rpartition(":")[2], scope), _UNITS[flags[0]])
            for line, (key, *counters) in zip(lines, by_key, strict=True)
            if line[0] == "c"
            for scope, flags in zip(counters[::2], counters[1::2], strict=True)
        ),
        keys=tuple(key for key, *_ in by_key),
    )


@dataclass(frozen=True, slots=True)
class _CounterParts:
    """The parts of a command that reserves that depend on its counters and their periods alone."""

    keys: tuple[str, ...]
    """The keys of the periods."""
    lines: str
    """The counters as the reservation has them."""
    arguments: tuple[Argument, ...]
    may_be_made_up: bool
    """True if the sender of the job may have made up a name that has a counter."""


@lru_cache(maxsize=4096)
def _counter_parts(counters: tuple[Counter, ...], day_ms: int, zone: ZoneInfo, *, has_caps: bool) -> _CounterParts:
    """Returns the parts for the periods of a day, by its first moment."""
    windows = {counter.window for counter in counters}
    all_periods = periods_at(time_from_ms(day_ms), zone).all
    periods = [budget_period for budget_period in all_periods if budget_period.window in windows]
    numbers = {budget_period.window: number for number, budget_period in enumerate(periods, 1)}
    lines = {budget_period.window: f"\nc{key_of(budget_period)}" for budget_period in periods}
    arguments: list[Argument] = []
    for budget_period in periods:
        arguments += [budget_period.start_ms, budget_period.end_ms, budget_period.end_ms + KEEP_MS]
    shared = {counter.key for counter in counters if "y" in counter.flags}
    for counter in counters:
        # Once for a scope: in the first of its periods.
        kept_flags = _LETTERS[counter.unit] + ("h" if counter.key in shared else "")
        shared.discard(counter.key)
        lines[counter.window] += f"\t{counter.key}\t{kept_flags}"
        cap = counter.hard_limit if has_caps else None
        flags = f"{numbers[counter.window]}{kept_flags}{counter.flags}"
        arguments += [counter.key, flags, "" if cap is None else cap]
    may_be_made_up = any("n" in counter.flags for counter in counters)
    return _CounterParts(tuple(map(key_of, periods)), "".join(lines.values()), tuple(arguments), may_be_made_up)


def _keys_of_queues(rate_keys: Sequence[str]) -> list[str]:
    # Before the scope, as callers may make its name up: the user `ann:queue` is not the queue of `ann`.
    return [f"{part}{key}" for part in (QUEUE, WAITERS) for key in rate_keys]


def _window_states(rates: RateLimits, figures: Sequence[int]) -> tuple[WindowState, ...]:
    """Returns the limited windows, by the figures of each: requests, tokens, and the time until it counts none."""
    states: list[WindowState] = []
    for window, requests, tokens, empty_in_ms in zip(
        rates.windows, figures[::3], figures[1::3], figures[2::3], strict=False
    ):
        counts: tuple[tuple[Literal["requests", "tokens"], int], ...] = (("requests", requests), ("tokens", tokens))
        for unit, count in counts:
            if (limit := window.limits.get(unit)) is not None:
                states.append(WindowState(window.key, unit, limit.amount, limit.amount - count, empty_in_ms))
    return tuple(states)


@dataclass(slots=True)
class _Group:
    """Calls of a batch with the same names, in the same periods: they count in the same places."""

    number: int
    names: CallNames
    at: Periods
    last: int = 0
    """The place of its last call in the batch."""
    places: list[int] = field(default_factory=list[int])
    """The numbers of its places."""


@dataclass(frozen=True, slots=True)
class _SettledBatch:
    """Settlements of one script, and the places that it returns the totals of."""

    settlements: Sequence[Settlement]
    command: ScriptCommand
    places: Sequence[tuple[Period, str]]
    agents: Sequence[str]
    """The agent of the last call of each place."""

    @classmethod
    def of(
        cls,
        settlements: Sequence[Settlement],
        zone: ZoneInfo,
        log: str,
        dimensions: Dimensions,
        more: Collection[str],
    ) -> _SettledBatch:
        """A batch. `more` are further keys of its reservations."""
        used_blocks = dict.fromkeys(settlement.sequence // BLOCK for settlement in settlements)
        blocks = {block: number for number, block in enumerate(used_blocks, 5)}  # Redis counts keys from 1
        groups: dict[tuple[CallNames, int], _Group] = {}
        entries: list[Argument] = []
        for settlement in settlements:
            block, bit = divmod(settlement.sequence, BLOCK)
            figures = [(name, value) for name, value in settlement.figures.items() if value]
            at = periods_at(settlement.charged_at, zone)
            place = settlement.names, at.day.start_ms
            group = groups.get(place)
            if group is None:
                group = groups[place] = _Group(len(groups) + 1, settlement.names, at)
            group.last = len(entries)
            entries += [
                *(settlement.attempt_id, settlement.sequence, blocks[block], bit, *settlement.tokens.arguments),
                *(group.number, len(figures)),
                *(part for figure in figures for part in figure),
            ]
        numbers: dict[BudgetPlace, int] = {}
        places: list[tuple[Period, str]] = []
        of_groups: list[Argument] = [len(groups)]
        agents: dict[int, str] = {}
        for group in sorted(groups.values(), key=lambda group: group.last):
            for window, key in dimensions.keys(group.names):
                counted_period = group.at.of(window)
                number = numbers.setdefault((counted_period.name, key), len(places) + 1)
                if number > len(places):
                    places.append((counted_period, key))
                group.places.append(number)
            agents |= dict.fromkeys(group.places, group.names.agent)
        for group in groups.values():
            of_groups += [len(group.places), *group.places]
        of_rates = [key for key in more if key.startswith((_WINDOWS, _SLOTS))]
        elsewhere = (period_named(key.rpartition(":")[2], zone) for key in more if key not in of_rates)
        by_name = {budget_period.name: budget_period for budget_period, _ in places}
        periods = list((by_name | {budget_period.name: budget_period for budget_period in elsewhere}).values())
        arguments: list[Argument] = [
            *(log, zone.key, 2 * KEEP_MS, len(settlements), len(blocks), len(places), dimensions.text, len(periods))
        ]
        for budget_period in periods:
            arguments.append(budget_period.end_ms + KEEP_MS)
        numbers_of_periods = {budget_period.name: number for number, budget_period in enumerate(periods, 1)}
        for budget_period, key in places:
            arguments += [numbers_of_periods[budget_period.name], key]
        keys = [
            *(RESERVATIONS, LEASES, FILLED, HELD),
            *(block_key(log, block) for block in blocks),
            *map(key_of, periods),
            *of_rates,
        ]
        command = ScriptCommand(LUA["settle"], keys, [*arguments, *of_groups, *entries])
        return cls(settlements, command, places, [agents[number] for number in numbers.values()])

    def totals(self, counted: Sequence[str]) -> dict[BudgetPlace, Totals]:
        """Reads the totals that the script returned."""
        return {
            (budget_period.name, key): Totals(budget_period, key, int(spent), agent)
            for (budget_period, key), agent, spent in zip(self.places, self.agents, counted, strict=True)
        }
