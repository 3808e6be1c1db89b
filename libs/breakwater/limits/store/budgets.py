"""Spend and reservations: integer nano-dollars in Redis, changed by atomic scripts over all budgets of a call.

A period's counters are one hash (`bw:limits:daily:2026-11-21`). Its fields are the names of
`limits.rules.ledger.Figures` and `read_reservation`, each followed by the scope's key: `spent:global`,
`reserved:agent:<name>`, `calls:tenant:<name>`. Next to them are a cap that an operator raised (`cap:`, `raised:`) and
the thresholds that were announced (`announced:`). The holdings of callers under hard caps, each for an agent and a
tenant, are a hash apart: one that holds nothing has no field in it. Filling, comparing and repairing the counters is
in `limits.store.budget_counters`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, cast
from zoneinfo import ZoneInfo

from breakwater.jobs.contract.execution import Attempt
from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.redis.connection import Argument, Redis, ScriptCommand, scripts_of
from breakwater.kernel.types import ms_from_time, time_from_ms
from breakwater.limits.contract import Window
from breakwater.limits.rules.budget import (
    Counter,
    OverBudget,
    Period,
    Periods,
    period_named,
    periods_at,
)
from breakwater.limits.rules.ledger import AttemptSums, BudgetPlace, charged_at, figures_of
from breakwater.limits.rules.scopes import ONLY_BASE, CallNames, Dimensions

KEEP_MS = 3 * 24 * 3_600_000
"""Counters outlive their period by the longest job and then some, so that late calls still find them."""

BLOCK = 65_536
"""Events of the log whose settlement is remembered in one bitmap, 8 KB."""

SETTLED_TOGETHER = 100
"""The most settlements of one script, during which Redis does nothing else."""

WAITS_MS = 1_000
"""Twice the longest time after which a call that waits for a budget asks again."""

RESERVATIONS = "bw:limits:reservations"
LEASES = "bw:limits:leases"
FILLED = "bw:limits:filled"
HELD = "bw:limits:held"

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


def block_key(log: str, block: int) -> str:
    """The key of the bitmap of settled events in a block."""
    return f"bw:limits:settled:{log}:{block}"


@dataclass(frozen=True, slots=True)
class Reserved:
    """The reservation was granted, or had been, at this moment of Redis' clock."""

    at: datetime


@dataclass(frozen=True, slots=True)
class PeriodChanged:
    """By Redis' clock, it is another period than the request assumed. Now it is known, so ask again."""


@dataclass(frozen=True, slots=True)
class DimensionsChanged:
    """Calls count in other dimensions than the request assumed. Now they are known, so ask again."""


@dataclass(frozen=True, slots=True)
class CountersLost:
    """A hard cap can't be enforced, because the counters are lost until the budget service has rebuilt them."""


@dataclass(frozen=True, slots=True)
class TooManyNames:
    """The sender of the job has made up more names in this period than there may be budgets for."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """The amount that is held for an attempt, since a moment and in its places."""

    attempt_id: str
    charged: bool
    """`amount` is counted as spent already: the call ended at that cost, or its lease ended at that estimate."""
    amount: int
    at: datetime
    agent: str
    tenant: str | None
    caller: str | None
    """The sender of the job."""
    places: tuple[BudgetPlace, ...]
    """The scopes in the periods that it counts in."""


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Settlement:
    """The amounts that an attempt's event adds to its budgets."""

    attempt_id: str
    sequence: int
    names: CallNames
    figures: AttemptSums
    charged_at: datetime

    @classmethod
    def of(cls, sequence: int, attempt: Attempt) -> Settlement:
        """The settlement of an attempt that made a call, by its event's place in the log."""
        return cls(attempt.attempt_id, sequence, CallNames.of(attempt), figures_of(attempt), charged_at(attempt))


@dataclass(frozen=True, slots=True)
class Totals:
    """The spend of one budget in one period."""

    period: Period
    key: str
    spent: int
    raised: tuple[int, int] | None
    """The cap that an operator set, and the config's cap that it raised."""
    agent: str
    """The agent of the last settled call."""


class Budgets:
    """The budgets of the fleet. Periods are those of the calendar of `zone`."""

    def __init__(self, redis: Redis, zone: ZoneInfo) -> None:
        self._redis = redis
        self._zone = zone
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
        at: datetime | None = None,
        caller: str | None = None,
        most_names: int | None = None,
        waits_ms: int = WAITS_MS,
        is_incomplete: bool = False,
    ) -> ScriptCommand:
        """Holds an attempt's worst case against all its budgets; read its answer with `read_reservation`.

        Args:
            attempt_id: whose reservation it is. Asking again holds nothing more.
            names: those that the call counts under.
            amount: nano-dollars.
            counters: from `LimitTable.counters`, in the present `dimensions`.
            now: by the caller's clock; Redis' clock decides the periods.
            lease_ms: of the reservation; None only asks, and holds nothing.
            at: the moment of a reservation that Redis has lost. Caps do not matter then.
            caller: sender of the job. All unknown ones are one.
            most_names: counters are kept of so many scopes in a period whose names the caller makes up; None: the call
                has no such name.
            waits_ms: a call that is kept out counts as waiting for so long, unless it asks again.
            is_incomplete: a hard cap applies in a dimension that is not counted yet, or not wholly.
        """
        current = self._current(now) if at is None else periods_at(at, self._zone)
        windows = {counter.window for counter in counters}
        periods = [budget_period for budget_period in current.all if budget_period.window in windows]
        numbers = {budget_period.window: number for number, budget_period in enumerate(periods, 1)}
        arguments: list[Argument] = [
            *(attempt_id, amount, "" if lease_ms is None else lease_ms, "" if at is None else ms_from_time(at)),
            *(names.agent, names.tenant or "", caller or ""),
            *("" if most_names is None else most_names, caller or "", waits_ms),
            *(self.dimensions.text, int(is_incomplete and at is None)),
        ]
        for budget_period in periods:
            ends_ms = budget_period.end_ms
            arguments += [budget_period.name, budget_period.start_ms, ends_ms, ends_ms + KEEP_MS]
        shared: set[str] = set()
        for counter in counters:
            flags = counter.flags
            if "y" in flags and counter.key not in shared:
                shared.add(counter.key)
                flags += "h"
            cap = None if at is not None else counter.hard_limit
            arguments += [numbers[counter.window], counter.key, flags, "" if cap is None else cap]
        keys = [RESERVATIONS, LEASES, FILLED, HELD, *map(key_of, periods)]
        return ScriptCommand(LUA["reserve"], keys, arguments)

    def read_reservation(
        self, answer: Sequence[Any], counters: Sequence[Counter], amount: int, *, now: datetime
    ) -> Reserved | OverBudget | PeriodChanged | DimensionsChanged | CountersLost | TooManyNames:
        """Reads the answer to `reserve_command`, asked with the same arguments."""
        match answer[0]:
            case 1:
                return Reserved(time_from_ms(int(answer[1])))
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
            case _:
                _, number, limit, spent, reserved, by_share = answer
                counter = counters[int(number) - 1]
                ends = self._current(now).of(counter.window).end_ms
                return OverBudget(counter, ends, int(limit), int(spent), int(reserved), amount, bool(by_share))

    def release_command(self, attempt_id: str, at: datetime, cost: int | None = None) -> ScriptCommand:
        """Ends the reservation of a call. The script answers nothing, and may be repeated.

        Args:
            attempt_id: whose reservation it is.
            at: the moment of the reservation.
            cost: of the call, in nano-dollars, which is charged until its event settles it; None: it was never made.
        """
        periods = periods_at(at, self._zone).all
        keys = [RESERVATIONS, LEASES, HELD, *map(key_of, periods)]
        arguments = [attempt_id, "" if cost is None else cost, *(one.name for one in periods)]
        return ScriptCommand(LUA["release"], keys, arguments)

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
            (settlements[begin : begin + SETTLED_TOGETHER], frozenset[Period]())
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
            again: list[tuple[Sequence[Settlement], frozenset[Period]]] = []
            for batch, (settled, counted) in zip(batches, answers, strict=True):
                totals |= batch.totals(counted)
                elsewhere = [index for index, answer in enumerate(settled) if isinstance(answer, str)]
                if elsewhere:
                    # They are reserved in periods that their events do not name.
                    names = {name for index in elsewhere for name in settled[index].split("\n")}
                    more = frozenset(period_named(name, self._zone) for name in names)
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
        names = dict.fromkeys(name for name, _ in lapsed.places)
        periods = [period_named(name, self._zone) for name in names]
        keys = [RESERVATIONS, LEASES, HELD, *map(key_of, periods)]
        # Until then, the comparison with the record knows that nothing else accounts for the charge.
        forget_at = max(held_in.end_ms for held_in in periods) + KEEP_MS
        await self._redis.run([ScriptCommand(LUA["lapse"], keys, [lapsed.attempt_id, forget_at, *names])])

    async def forget_lease(self, attempt_id: str) -> None:
        """Removes an attempt's lease, because there is nothing left to charge. Raises StateUnavailableError."""
        await self._redis.client.zrem(LEASES, attempt_id)

    async def has_counters(self) -> bool:
        """Returns True if Redis has counters, of any log. Raises StateUnavailableError."""
        return bool(await cast(Any, self._redis.client.hexists(FILLED, "log")))

    def _current(self, now: datetime) -> Periods:
        return periods_at(now + self._behind, self._zone)


def reservation(attempt_id: str, text: str) -> Reservation:
    """Parses a reservation as Redis has it."""
    header, agent, tenant, caller, *lines = text.split("\n")
    state, amount, at = header.split("|")
    places = (line.split("\t") for line in lines)
    return Reservation(
        attempt_id,
        charged=state != "r",
        amount=int(amount),
        at=time_from_ms(int(at)),
        agent=agent,
        tenant=tenant or None,
        caller=caller or None,
        places=tuple((name, key) for name, key, _ in places),
    )


def raised_cap(text: str | None) -> tuple[int, int] | None:
    """Parses a raised cap as Redis has it: the new cap, and the config's cap that it raised."""
    to, _, over = (text or "").partition(":")
    return (int(to), int(over)) if over else None


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
        more: Collection[Period],
    ) -> _SettledBatch:
        """A batch. `more` are further periods that its reservations are in."""
        used_blocks = dict.fromkeys(settlement.sequence // BLOCK for settlement in settlements)
        blocks = {block: number for number, block in enumerate(used_blocks, 5)}  # Redis counts keys from 1
        places: dict[tuple[Period, str], int] = {}
        agents: dict[tuple[Period, str], str] = {}
        entries: list[Argument] = []
        for settlement in settlements:
            block, bit = divmod(settlement.sequence, BLOCK)
            figures = [(name, value) for name, value in settlement.figures.items() if value]
            at = periods_at(settlement.charged_at, zone)
            counted = [(at.of(window), key) for window, key in dimensions.keys(settlement.names)]
            agents |= dict.fromkeys(counted, settlement.names.agent)
            entries += [
                *(settlement.attempt_id, settlement.sequence, blocks[block], bit),
                *(len(figures), *(part for figure in figures for part in figure)),
                *(len(counted), *(places.setdefault(place, len(places) + 1) for place in counted)),
            ]
        periods = list(dict.fromkeys((*(budget_period for budget_period, _ in places), *more)))
        arguments: list[Argument] = [
            *(log, zone.key, 2 * KEEP_MS, len(settlements), len(blocks), len(places), dimensions.text)
        ]
        for budget_period in periods:
            arguments += [budget_period.name, budget_period.end_ms + KEEP_MS]
        for budget_period, key in places:
            arguments += [periods.index(budget_period) + 1, key]
        keys = [
            *(RESERVATIONS, LEASES, FILLED, HELD),
            *(block_key(log, block) for block in blocks),
            *map(key_of, periods),
        ]
        command = ScriptCommand(LUA["settle"], keys, [*arguments, *entries])
        return cls(settlements, command, list(places), [agents[place] for place in places])

    def totals(self, counted: Sequence[str]) -> dict[BudgetPlace, Totals]:
        """Reads the totals that the script returned."""
        return {
            (budget_period.name, key): Totals(budget_period, key, int(spent), raised_cap(cap), agent)
            for (budget_period, key), agent, spent, cap in zip(
                self.places, self.agents, counted[::2], counted[1::2], strict=True
            )
        }
