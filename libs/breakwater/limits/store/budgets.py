"""Spend and reservations: integer nano-dollars in Redis, changed by atomic scripts over all budgets of a call.

A period's counters are one hash (`bw:budget:daily:2026-11-21`). Its fields are the names of
`limits.rules.ledger.Figures` and `read_reservation`, each followed by the scope's key: `spent:global`,
`reserved:agent:<name>`, `calls:tenant:<name>`. Next to them are a cap that an operator raised (`cap:`, `raised:`) and
the thresholds that were announced (`announced:`). The holdings of callers under hard caps, each for an agent and a
tenant, are a hash apart: one that holds nothing has no field in it. Filling, comparing and repairing the counters is
in `limits.store.budget_counters`.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from breakwater.limits.rules.budget import WINDOWS, Counter, OverBudget, Period, Periods, period, periods_at, scope_keys
from breakwater.limits.rules.ledger import AttemptSums, charged_at, figures_of

KEEP_MS = 3 * 24 * 3_600_000
"""Counters outlive their period by the longest job and then some, so that late calls still find them."""

BLOCK = 65_536
"""Events of the log whose settlement is remembered in one bitmap, 8 KB."""

SETTLED_TOGETHER = 100
"""The most settlements of one script, during which Redis does nothing else."""

WAITS_MS = 1_000
"""Twice the longest time after which a call that waits for a budget asks again."""

RESERVATIONS = "bw:budget:reservations"
LEASES = "bw:budget:leases"
FILLED = "bw:budget:filled"
HELD = "bw:budget:held"

LUA = scripts_of(__file__)


class NotFilledError(BreakwaterError):
    """The counters do not match the log: they are lost, or not rebuilt yet. Try again once they are."""


@lru_cache(maxsize=64)
def period_key(window: Window, name: str) -> str:
    """The key of the counters of a period."""
    return f"bw:budget:{window}:{name}"


def block_key(log: str, block: int) -> str:
    """The key of the bitmap of settled events in a block."""
    return f"bw:budget:settled:{log}:{block}"


@dataclass(frozen=True, slots=True)
class Reserved:
    """The reservation was granted, or had been, at this moment of Redis' clock."""

    at: datetime


@dataclass(frozen=True, slots=True)
class PeriodChanged:
    """By Redis' clock, it is another day or month than the request assumed. Now it is known, so ask again."""


@dataclass(frozen=True, slots=True)
class CountersLost:
    """A hard cap can't be enforced, because the counters are lost until the budget service has rebuilt them."""


@dataclass(frozen=True, slots=True)
class TooManyTenants:
    """The sender of the job has named more tenants in this month than it may have budgets for."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """The amount that is held for an attempt, since a moment and in its periods."""

    attempt_id: str
    charged: bool
    """`amount` is counted as spent already: the call ended at that cost, or its lease ended at that estimate."""
    amount: int
    at: datetime
    day: str
    month: str
    agent: str
    tenant: str | None
    caller: str | None = None
    """The sender of the job, if a hard cap applies."""


@dataclass(frozen=True, slots=True)
class LiveReservation:
    """The reservation of a call under way, as its worker knows it: `amount` in nano-dollars, made `at`."""

    attempt_id: str
    agent: str
    tenant: str | None
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
    agent: str
    tenant: str | None
    figures: AttemptSums
    charged_at: datetime

    @classmethod
    def of(cls, sequence: int, attempt: Attempt) -> Settlement:
        """The settlement of an attempt that made a call, by its event's place in the log."""
        return cls(
            attempt.attempt_id, sequence, attempt.agent, attempt.tenant, figures_of(attempt), charged_at(attempt)
        )


@dataclass(frozen=True, slots=True)
class Totals:
    """The spend of one budget in one period."""

    period: Period
    key: str
    spent: int
    raised: tuple[int, int] | None
    """The cap that an operator set, and the config's cap that it raised."""
    agent: str
    """The agent of the settled call."""


class Budgets:
    """The budgets of the fleet. Periods are calendar days and months of `zone`."""

    def __init__(self, redis: Redis, zone: ZoneInfo) -> None:
        self._redis = redis
        self._zone = zone
        self._behind = timedelta(0)
        self._known: Periods | None = None

    def reserve_command(
        self,
        attempt_id: str,
        agent: str,
        tenant: str | None,
        amount: int,
        counters: Sequence[Counter],
        *,
        now: datetime,
        lease_ms: int | None,
        at: datetime | None = None,
        caller: str | None = None,
        most_tenants: int | None = None,
        waits_ms: int = WAITS_MS,
    ) -> ScriptCommand:
        """Holds an attempt's worst case against all its budgets; read its answer with `read_reservation`.

        Args:
            attempt_id: whose reservation it is. Asking again holds nothing more.
            agent: whose call it is.
            tenant: of the job.
            amount: nano-dollars.
            counters: from `CapTable.counters`: two for each scope, daily and monthly.
            now: by the caller's clock; Redis' clock decides the day and the month.
            lease_ms: of the reservation; None only asks, and holds nothing.
            at: the moment of a reservation that Redis has lost. Caps do not matter then.
            caller: sender of the job. All unknown ones are one.
            most_tenants: counters are kept of so many tenants in a month that the caller names; None: the tenant is
                known to exist, or there is none.
            waits_ms: a call that is kept out counts as waiting for so long, unless it asks again.
        """
        any_hard = any(counter.hard_limit is not None for counter in counters)
        periods = self._current(now) if at is None else periods_at(at, self._zone)
        day = periods.day
        month = periods.month
        arguments: list[Argument] = [
            *(
                attempt_id,
                amount,
                "" if lease_ms is None else lease_ms,
                "" if at is None else ms_from_time(at),
                day.name,
                month.name,
            ),
            *(day.start_ms, day.end_ms, month.start_ms, month.end_ms, day.end_ms + KEEP_MS, month.end_ms + KEEP_MS),
            # The caller, perhaps an unknown one, is needed only if its share counts.
            "\n".join((agent, tenant or "", caller or "") if any_hard else (agent, tenant or "")),
            "" if most_tenants is None else most_tenants,
            caller or "",
            waits_ms,
        ]
        for daily, monthly in zip(counters[::2], counters[1::2], strict=True):
            caps = (None, None) if at is not None else (daily.hard_limit, monthly.hard_limit)
            arguments += [daily.key, *("" if cap is None else cap for cap in caps)]
        keys = [RESERVATIONS, LEASES, FILLED, period_key("daily", day.name), period_key("monthly", month.name), HELD]
        return ScriptCommand(LUA["reserve"], keys, arguments)

    def read_reservation(
        self, answer: Sequence[Any], counters: Sequence[Counter], amount: int, *, now: datetime
    ) -> Reserved | OverBudget | PeriodChanged | CountersLost | TooManyTenants:
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
                return TooManyTenants()
            case _:
                _, scope, window, limit, spent, reserved, by_share = answer
                counter = counters[2 * (int(scope) - 1) + WINDOWS.index(window)]
                ends = self._current(now).of(counter.window).end_ms
                return OverBudget(counter, ends, int(limit), int(spent), int(reserved), amount, bool(by_share))

    def release_command(
        self, attempt_id: str, agent: str, tenant: str | None, at: datetime, cost: int | None = None
    ) -> ScriptCommand:
        """Ends the reservation of a call. The script answers nothing, and may be repeated.

        Args:
            attempt_id: whose reservation it is.
            agent: whose call it was.
            tenant: of the job.
            at: the moment of the reservation.
            cost: of the call, in nano-dollars, which is charged until its event settles it; None: it was never made.
        """
        periods = self._periods(at)
        keys = [RESERVATIONS, LEASES, *(period_key(window, periods.of(window).name) for window in WINDOWS), HELD]
        arguments = [attempt_id, periods.day.name, periods.month.name, "" if cost is None else cost]
        return ScriptCommand(LUA["release"], keys, [*arguments, *scope_keys(agent, tenant)])

    async def settle(self, settlements: Sequence[Settlement], log: str) -> list[list[Totals]]:
        """Replaces reservations by the costs of the calls, in one round trip. Each event counts once, ever.

        Args:
            settlements: from the events.
            log: the identity of the stream that their sequences belong to; a new one begins at 1 again.

        Returns:
            For each settlement the spend of its budgets afterwards, also when it had been counted before.

        Raises:
            NotFilledError: the counters are to be filled from this log first. Nothing is counted.
            StateUnavailableError: settle again.
        """
        places = [periods_at(settlement.charged_at, self._zone) for settlement in settlements]
        pairs = list(zip(settlements, places, strict=True))
        answers = await self._settle_parts(pairs, log)
        if elsewhere := [index for index, answer in enumerate(answers) if answer[0] == 2]:
            # A worker that died before it could say when it reserved: the reservation itself has the right periods.
            for index in elsewhere:
                places[index] = self._periods_of(*answers[index][1:])
            again = await self._settle_parts([(settlements[index], places[index]) for index in elsewhere], log)
            for index, answer in zip(elsewhere, again, strict=True):
                answers[index] = answer
        return [
            _totals(answer, *pair) for answer, pair in zip(answers, zip(settlements, places, strict=True), strict=True)
        ]

    async def _settle_parts(self, pairs: Sequence[tuple[Settlement, Periods]], log: str) -> list[Any]:
        parts = [pairs[begin : begin + SETTLED_TOGETHER] for begin in range(0, len(pairs), SETTLED_TOGETHER)]
        answers = await self._redis.run([self._settle_command(part, log) for part in parts])
        if [3] in answers:
            raise NotFilledError
        return [answer for answers_of_part in answers for answer in answers_of_part]

    def _settle_command(self, pairs: Sequence[tuple[Settlement, Periods]], log: str) -> ScriptCommand:
        blocks = list(dict.fromkeys(settlement.sequence // BLOCK for settlement, _ in pairs))
        periods = list(
            dict.fromkeys(budget_period for _, places in pairs for budget_period in (places.day, places.month))
        )
        keys = [
            *(RESERVATIONS, LEASES, FILLED, HELD),
            *(block_key(log, block) for block in blocks),
            *(period_key(budget_period.window, budget_period.name) for budget_period in periods),
        ]
        # Redis counts keys from 1.
        block_at = {block: 5 + index for index, block in enumerate(blocks)}
        period_at = {budget_period: 5 + len(blocks) + index for index, budget_period in enumerate(periods)}
        arguments: list[Argument] = [log, self._zone.key, 2 * KEEP_MS, len(pairs), len(blocks)]
        for budget_period in periods:
            arguments += [budget_period.name, budget_period.end_ms + KEEP_MS]
        for settlement, places in pairs:
            block, bit = divmod(settlement.sequence, BLOCK)
            figures = [(name, value) for name, value in settlement.figures.items() if value]
            scopes = scope_keys(settlement.agent, settlement.tenant)
            arguments += [
                *(settlement.attempt_id, settlement.sequence, block_at[block], bit),
                *(period_at[places.day], period_at[places.month], len(figures)),
                *(part for figure in figures for part in figure),
                *(len(scopes), *scopes),
            ]
        return ScriptCommand(LUA["settle"], keys, arguments)

    def _periods_of(self, day: str, month: str) -> Periods:
        """The periods with these names."""
        noons = (datetime.fromisoformat(f"{date}T12:00").replace(tzinfo=self._zone) for date in (day, f"{month}-15"))
        return Periods(*(period(window, noon, self._zone) for window, noon in zip(WINDOWS, noons, strict=True)))

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

        One that was charged before, and whose month is long over, is forgotten. Raises StateUnavailableError; may be
        repeated.
        """
        keys = [RESERVATIONS, LEASES, period_key("daily", lapsed.day), period_key("monthly", lapsed.month), HELD]
        forget_at = period("monthly", lapsed.at, self._zone).end_ms + KEEP_MS
        arguments = [lapsed.attempt_id, forget_at, *scope_keys(lapsed.agent, lapsed.tenant)]
        await self._redis.run([ScriptCommand(LUA["lapse"], keys, arguments)])

    async def forget_lease(self, attempt_id: str) -> None:
        """Removes an attempt's lease, because there is nothing left to charge. Raises StateUnavailableError."""
        await self._redis.client.zrem(LEASES, attempt_id)

    async def has_counters(self) -> bool:
        """Returns True if Redis has counters, of any log. Raises StateUnavailableError."""
        return bool(await cast(Any, self._redis.client.hexists(FILLED, "log")))

    def _current(self, now: datetime) -> Periods:
        self._known = self._periods(now + self._behind)
        return self._known

    def _periods(self, moment: datetime) -> Periods:
        """The day and the month of a moment, without calendar arithmetic for today."""
        current = self._known
        if current is not None and current.day.holds(ms_from_time(moment)):  # and so does its month
            return current
        return periods_at(moment, self._zone)


def reservation(attempt_id: str, text: str) -> Reservation:
    """Parses a reservation as Redis has it."""
    state, amount, at, day, month, owner = text.split("|", 5)
    agent, _, names = owner.partition("\n")
    tenant, _, caller = names.partition("\n")
    charged = state != "r"
    started_at = time_from_ms(int(at))
    return Reservation(attempt_id, charged, int(amount), started_at, day, month, agent, tenant or None, caller or None)


def raised_cap(text: str | None) -> tuple[int, int] | None:
    """Parses a raised cap as Redis has it: the new cap, and the config's cap that it raised."""
    to, _, over = (text or "").partition(":")
    return (int(to), int(over)) if over else None


def _totals(answer: Sequence[Any], settlement: Settlement, periods: Periods) -> list[Totals]:
    places: list[tuple[Period, str]] = [
        (budget_period, key)
        for budget_period in (periods.day, periods.month)
        for key in scope_keys(settlement.agent, settlement.tenant)
    ]
    return [
        Totals(budget_period, key, int(spent), raised_cap(cap), settlement.agent)
        for (budget_period, key), spent, cap in zip(places, answer[1::2], answer[2::2], strict=True)
    ]
