"""Spend and reservations: integer nano-dollars in Redis, changed by atomic scripts over all budgets of a call.

A period's counters are one hash (`bw:{budget}:daily:2026-11-21`) with the fields `spent:`, `reserved:`, `calls:` and
`unpriced:` followed by the budget's key (`global`, `agent:<name>`). All keys share one hash slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, cast
from zoneinfo import ZoneInfo

from breakwater.contracts.events import Window
from breakwater.contracts.subjects import decode_token, encode_token
from breakwater.contracts.types import ms_from_time
from breakwater.policy.budget import Counter, Period, current_and_next, period
from breakwater.state.connection import Redis, Script, ScriptCall, translated

KEEP_MS = 3 * 24 * 3_600_000
"""Counters outlive their period by the longest job and then some, so that late calls still find them."""

BLOCK = 65_536
"""Events of the log whose settlement is remembered in one bitmap, 8 KB."""

_RESERVATIONS = "bw:{budget}:reservations"
_LEASES = "bw:{budget}:leases"

_RESERVE = Script.named("budget_reserve")
_RELEASE = Script.named("budget_release")
_SETTLE = Script.named("budget_settle")
_LAPSE = Script.named("budget_lapse")


def _period_key(window: Window, name: str) -> str:
    return f"bw:{{budget}}:{window}:{name}"


@dataclass(frozen=True, slots=True)
class OverBudget:
    """The reservation was refused: by which budget, and when its period ends (ms since the epoch)."""

    counter: Counter
    resets_at_ms: int
    limit: int
    spent: int
    reserved: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """What is held for an attempt, and in which periods."""

    attempt_id: str
    charged: bool
    """Its lease ended, and it was charged at the estimate."""
    amount: int
    day: str
    month: str
    agent: str


@dataclass(frozen=True, slots=True)
class Settlement:
    """What an attempt's event says: it made a call, which cost so much (nano-dollars; None = unknown)."""

    attempt_id: str
    sequence: int
    agent: str
    cost: int | None
    started_at: datetime


@dataclass(frozen=True, slots=True)
class Totals:
    """The spend of one budget in one period, after a settlement."""

    window: Window
    period: str
    key: str
    spent: int


class Budgets:
    """The budgets of the fleet. Times are calendar periods of `zone`."""

    def __init__(self, redis: Redis, zone: ZoneInfo) -> None:
        self._redis = redis
        self._zone = zone
        self._periods: tuple[tuple[Period, Period], tuple[Period, Period]] | None = None

    def _current(self, now: datetime) -> tuple[tuple[Period, Period], tuple[Period, Period]]:
        # Calendar arithmetic once a day, not once a call.
        known = self._periods
        if known is None or ms_from_time(now) >= known[0][0].end_ms:
            known = (current_and_next("daily", now, self._zone), current_and_next("monthly", now, self._zone))
            self._periods = known
        return known

    def reserve_call(
        self, attempt_id: str, agent: str, amount: int, counters: Sequence[Counter], *, now: datetime, lease_ms: int
    ) -> ScriptCall:
        """Holds an attempt's worst case (nano-dollars) against all its budgets; read its answer with `reserved`."""
        (day, next_day), (month, next_month) = self._current(now)
        budgets = [
            part
            for counter in counters
            for part in (counter.window, counter.key, "" if counter.hard_limit is None else str(counter.hard_limit))
        ]
        keys = [
            _RESERVATIONS,
            _LEASES,
            _period_key("daily", day.name),
            _period_key("daily", next_day.name),
            _period_key("monthly", month.name),
            _period_key("monthly", next_month.name),
        ]
        names = [day.name, next_day.name, month.name, next_month.name]
        ends = [day.end_ms, next_day.end_ms, month.end_ms, next_month.end_ms]
        return ScriptCall(
            _RESERVE, keys, [attempt_id, amount, lease_ms, *names, *ends, KEEP_MS, encode_token(agent), *budgets]
        )

    @staticmethod
    def reserved(answer: Sequence[Any], counters: Sequence[Counter]) -> OverBudget | None:
        """Reads the answer to `reserve_call`: None when it was granted."""
        if answer[0] == 1:
            return None
        _, index, resets_at_ms, limit, spent, reserved = answer
        return OverBudget(counters[int(index) - 1], int(resets_at_ms), int(limit), int(spent), int(reserved))

    def release_call(self, attempt_id: str, counters: Sequence[Counter], *, now: datetime) -> ScriptCall:
        """Gives a reservation back whose call was never made; answers nothing."""
        (day, next_day), (month, next_month) = self._current(now)
        names = [day.name, next_day.name, month.name, next_month.name]
        keys = [
            _RESERVATIONS,
            _LEASES,
            *(_period_key("daily", name) for name in names[:2]),
            *(_period_key("monthly", name) for name in names[2:]),
        ]
        return ScriptCall(_RELEASE, keys, [attempt_id, *names, *_budget_keys(counters)])

    async def settle(self, settlements: Sequence[Settlement], log: str) -> list[list[Totals]]:
        """Replaces reservations by what the calls cost, in two round trips. Each event counts once, ever.

        Args:
            settlements: what the events say.
            log: the identity of the stream that their sequences belong to; a new one begins at 1 again.

        Returns:
            For each settlement the spend of its budgets afterwards, also when it had been counted before.

        Raises:
            StateUnavailable: settle again.
        """
        reservations = await self.reservations([settlement.attempt_id for settlement in settlements])
        calls: list[ScriptCall] = []
        places: list[tuple[Period, Period, list[str]]] = []
        for settlement, reservation in zip(settlements, reservations, strict=True):
            day, month = self._periods_of(settlement, reservation)
            budget_keys = ["global", f"agent:{settlement.agent}"]
            block, bit = divmod(settlement.sequence, BLOCK)
            keys = [
                _RESERVATIONS,
                _LEASES,
                f"bw:{{budget}}:settled:{log}:{block}",
                _period_key("daily", day.name),
                _period_key("monthly", month.name),
            ]
            cost = "" if settlement.cost is None else str(settlement.cost)
            arguments = [settlement.attempt_id, bit, cost, KEEP_MS, day.end_ms, month.end_ms, 2 * KEEP_MS, *budget_keys]
            calls.append(ScriptCall(_SETTLE, keys, arguments))
            places.append((day, month, budget_keys))
        answers = await self._redis.run(calls) if calls else []
        return [_totals(answer, *place) for answer, place in zip(answers, places, strict=True)]

    def _periods_of(self, settlement: Settlement, reservation: Reservation | None) -> tuple[Period, Period]:
        """A call belongs to the periods of its reservation, even if it ended in the next ones."""
        day = period("daily", settlement.started_at, self._zone)
        month = period("monthly", settlement.started_at, self._zone)
        if reservation is None or (reservation.day, reservation.month) == (day.name, month.name):
            return day, month
        # Reserved across midnight by Redis' clock: the neighbouring period by the attempt's own.
        later = settlement.started_at + timedelta(hours=1)
        earlier = settlement.started_at - timedelta(hours=1)
        days = {p.name: p for p in (period("daily", moment, self._zone) for moment in (earlier, later))}
        months = {p.name: p for p in (period("monthly", moment, self._zone) for moment in (earlier, later))}
        return days.get(reservation.day, day), months.get(reservation.month, month)

    async def reservations(self, attempt_ids: Sequence[str]) -> list[Reservation | None]:
        """What is held for attempts. Raises StateUnavailable."""
        if not attempt_ids:
            return []
        async with translated():
            held = cast(list[str | None], await self._redis.client.hmget(_RESERVATIONS, list(attempt_ids)))
        return [
            None if text is None else _reservation(name, text) for name, text in zip(attempt_ids, held, strict=True)
        ]

    async def lapsed(self, now: datetime, limit: int = 500) -> list[str]:
        """Attempts whose reservation's lease has ended without a settlement. Raises StateUnavailable."""
        async with translated():
            found = await self._redis.client.zrangebyscore(_LEASES, 0, ms_from_time(now), start=0, num=limit)
        return cast(list[str], found)

    async def charge_estimate(self, reservation: Reservation) -> None:
        """Charges a lapsed reservation at its amount. Its event, if it still comes, corrects that."""
        keys = [
            _RESERVATIONS,
            _LEASES,
            _period_key("daily", reservation.day),
            _period_key("monthly", reservation.month),
        ]
        arguments = [reservation.attempt_id, "global", f"agent:{reservation.agent}"]
        await self._redis.run([ScriptCall(_LAPSE, keys, arguments)])

    async def forget_lease(self, attempt_id: str) -> None:
        """Takes an attempt off the list of leases: there is nothing to charge any more."""
        async with translated():
            await self._redis.client.zrem(_LEASES, attempt_id)

    async def announced(self, window: Window, period_name: str, budget: str) -> int:
        """The highest threshold (percent) of a budget that has been published in a period. Raises StateUnavailable."""
        async with translated():
            percent = await self._redis.client.hget(_period_key(window, period_name), f"announced:{budget}")
        return int(percent or 0)

    async def announce(self, window: Window, period_name: str, budget: str, percent: int) -> None:
        """Notes that a threshold has been published. Raises StateUnavailable."""
        async with translated():
            await self._redis.client.hset(_period_key(window, period_name), f"announced:{budget}", str(percent))

    async def totals(self, agent: str, moment: datetime) -> list[Totals]:
        """The spend of an agent's budgets in the periods of a moment. Raises StateUnavailable."""
        day, month = period("daily", moment, self._zone), period("monthly", moment, self._zone)
        keys = ["global", f"agent:{agent}"]
        fields = [f"spent:{key}" for key in keys]
        async with translated():
            held = [
                await self._redis.client.hmget(_period_key(place.window, place.name), fields) for place in (day, month)
            ]
        spent = [int(value or 0) for values in held for value in values]
        return _totals([1, *spent], day, month, keys)

    async def counters(self, window: Window, now: datetime) -> dict[str, int]:
        """All counters of the current period, by field: `spent:global`, `reserved:agent:x`, `calls:global`."""
        name = period(window, now, self._zone).name
        async with translated():
            held = cast(dict[str, str], await self._redis.client.hgetall(_period_key(window, name)))
        return {field: int(value) for field, value in held.items()}


def _budget_keys(counters: Sequence[Counter]) -> list[str]:
    return list(dict.fromkeys(counter.key for counter in counters))


def _reservation(attempt_id: str, text: str) -> Reservation:
    state, amount, day, month, agent = text.split("|")
    return Reservation(attempt_id, state == "e", int(amount), day, month, decode_token(agent))


def _totals(answer: Sequence[Any], day: Period, month: Period, keys: Sequence[str]) -> list[Totals]:
    spent = [int(value) for value in answer[1:]]
    places = [(period_, key) for period_ in (day, month) for key in keys]
    return [
        Totals(period_.window, period_.name, key, value) for (period_, key), value in zip(places, spent, strict=True)
    ]
