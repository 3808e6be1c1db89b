"""Midnight in Berlin, on days of 23 and 25 hours and at a month's end: both windows to the nano-dollar."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from typing import get_args
from zoneinfo import ZoneInfo

import pytest

from breakwater.kernel.redis.connection import Redis
from breakwater.kernel.types import ms_from_time, time_from_ms
from breakwater.limits.contract import Window
from breakwater.limits.rules.budget import Period, Periods, periods_since
from breakwater.limits.rules.ledger import AttemptSums, BudgetPlace, ledger
from breakwater.limits.rules.scopes import CallNames
from breakwater.limits.store import budget_counters, budgets
from breakwater.limits.store.budget_counters import BudgetCounters
from breakwater.limits.store.budgets import Budgets, OverBudget, PeriodChanged, Reserved, Settlement
from tests.limits.test_budgets_store import LOG, against, caps, redis_time, settlement
from tests.records.test_messages import attempt

ALL: tuple[Window, ...] = get_args(Window)
BERLIN = ZoneInfo("Europe/Berlin")
KEYS = ("global", "agent:a", "tenant:t")

MOMENTS = [
    # The clocks go forward: 23 hours.
    ("2026-03-28T22:59:59.999Z", "2026-03-28", "2026-03"),
    ("2026-03-28T23:00:00.000Z", "2026-03-29", "2026-03"),
    ("2026-03-29T00:59:59.999Z", "2026-03-29", "2026-03"),  # 01:59:59.999 there, and then
    ("2026-03-29T01:00:00.000Z", "2026-03-29", "2026-03"),  # 03:00
    ("2026-03-29T21:59:59.999Z", "2026-03-29", "2026-03"),
    ("2026-03-29T22:00:00.000Z", "2026-03-30", "2026-03"),
    ("2026-03-31T21:59:59.999Z", "2026-03-31", "2026-03"),
    ("2026-03-31T22:00:00.000Z", "2026-04-01", "2026-04"),
    # They go back: 25 hours.
    ("2026-10-24T21:59:59.999Z", "2026-10-24", "2026-10"),
    ("2026-10-24T22:00:00.000Z", "2026-10-25", "2026-10"),
    ("2026-10-25T00:30:00.000Z", "2026-10-25", "2026-10"),  # 02:30 there, and
    ("2026-10-25T01:30:00.000Z", "2026-10-25", "2026-10"),  # 02:30 again
    ("2026-10-25T22:59:59.999Z", "2026-10-25", "2026-10"),
    ("2026-10-25T23:00:00.000Z", "2026-10-26", "2026-10"),
    ("2026-10-31T22:59:59.999Z", "2026-10-31", "2026-10"),
    ("2026-10-31T23:00:00.000Z", "2026-11-01", "2026-11"),
]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those days are over, and Redis would let their counters go at once."""
    for module in (budgets, budget_counters):
        monkeypatch.setattr(module, "KEEP_MS", 100 * 365 * 24 * 3_600_000)


async def sums(redis: Redis) -> tuple[dict[BudgetPlace, int], dict[BudgetPlace, AttemptSums]]:
    """What is held, and what was spent, wherever there is any."""
    first, last = (datetime.fromisoformat(moment) for moment, _, _ in (MOMENTS[0], MOMENTS[-1]))
    periods = periods_since(first - timedelta(days=2), last + timedelta(days=2), BERLIN)
    found = await BudgetCounters(redis, BERLIN).snapshot(periods)
    none = AttemptSums()
    return (
        {place: held for place, held in found.reserved.items() if held},
        {place: figures for place, figures in found.figures.items() if figures != none},
    )


def expected(amounts: list[int]) -> dict[BudgetPlace, int]:
    found: dict[BudgetPlace, int] = defaultdict(int)
    for amount, (_, *names) in zip(amounts, MOMENTS, strict=True):
        for name in names:
            for key in KEYS:
                found[name, key] += amount
    return dict(found)


async def hold(redis: Redis, attempt_id: str, amount: int, at: datetime) -> None:
    command = Budgets(redis, BERLIN).reserve_command(
        attempt_id, CallNames("a", "t"), amount, against(), now=datetime.now(UTC), lease_ms=60_000, at=at
    )
    assert await redis.run([command]) == [[1, str(ms_from_time(at))]]


@pytest.mark.usefixtures("kept")
async def test_what_is_held_before_midnight_and_settled_after_it_counts_before(redis: Redis) -> None:
    assert await BudgetCounters(redis, BERLIN).fill(None, LOG, 0, (), {}, {})
    held, costs = [3**step for step in range(len(MOMENTS))], [2**step for step in range(len(MOMENTS))]
    attempts = [
        attempt(attempt_id=f"j{step}:1", tenant="t", cost=cost, reserved=amount, reserved_at=moment)
        for step, (amount, cost, (moment, _, _)) in enumerate(zip(held, costs, MOMENTS, strict=True))
    ]
    for one, amount in zip(attempts, held, strict=True):
        assert one.reserved_at is not None
        await hold(redis, one.attempt_id, amount, one.reserved_at)
    assert await sums(redis) == (expected(held), {})
    # All of them are reported after the last midnight, the latest first.
    events = [Settlement.of(sequence, one) for sequence, one in enumerate(attempts, 1)]
    await Budgets(redis, BERLIN).settle(events[::-1], LOG)
    reserved, figures = await sums(redis)
    assert reserved == {}
    assert figures == ledger(attempts, BERLIN)
    assert {place: one.spent for place, one in figures.items()} == expected(costs)


@pytest.mark.usefixtures("kept")
async def test_what_is_released_after_midnight_is_given_back_where_it_was_held(redis: Redis) -> None:
    moments = [datetime.fromisoformat(moment) for moment, _, _ in MOMENTS]
    for step, moment in enumerate(moments):
        await hold(redis, f"j{step}:1", 3**step, moment)
    releases = [
        Budgets(redis, BERLIN).release_command(f"j{step}:1", moment) for step, moment in enumerate(moments) if step % 2
    ]
    await redis.run(releases)
    reserved, _ = await sums(redis)
    kept = expected([0 if step % 2 else 3**step for step in range(len(MOMENTS))])
    assert reserved == {place: held for place, held in kept.items() if held}


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(
    "midnight", ["2026-03-28T23:00Z", "2026-03-29T22:00Z", "2026-10-25T23:00Z", "2026-10-31T23:00Z"]
)
async def test_a_call_whose_worker_saw_another_day_counts_in_the_day_of_its_record(redis: Redis, midnight: str) -> None:
    assert await BudgetCounters(redis, BERLIN).fill(None, LOG, 0, (), {}, {})
    after = datetime.fromisoformat(midnight)
    before = after - timedelta(milliseconds=1)
    for attempt_id, reserved_at in (("j:1", before), ("k:1", after)):
        await hold(redis, attempt_id, 100, reserved_at)
    events = [settlement("j:1", 1, 3, at=after), settlement("k:1", 2, 40, at=before)]
    for _ in range(2):
        await Budgets(redis, BERLIN).settle(events, LOG)
    reserved, figures = await sums(redis)
    assert reserved == {}
    one, other = (
        ledger([attempt(tenant="t", cost=cost, started_at=at)], BERLIN) for cost, at in ((3, after), (40, before))
    )
    assert figures == {
        place: one.get(place, AttemptSums()) + other.get(place, AttemptSums()) for place in {*one, *other}
    }  # fmt: skip


async def test_a_day_and_a_month_that_end_while_calls_are_made_have_each_what_is_theirs(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Redis' own clock. No time zone has its midnight just now, so the calendar is made up; all else is real."""
    began = ms_from_time(await redis_time(redis))
    midnight, room, hour_ms = began + 3_000, 40, 3_600_000
    names = {"daily": ("the last day", "the first day"), "monthly": ("the old month", "the new month")}
    old, new = (
        Periods(tuple(Period(window, names.get(window, (window, window))[which], start, end) for window in ALL))
        for which, (start, end) in enumerate(((began - hour_ms, midnight), (midnight, midnight + hour_ms)))
    )

    def calendar(moment: datetime, _: ZoneInfo) -> Periods:
        return old if old.day.holds(ms_from_time(moment)) else new

    monkeypatch.setattr(budgets, "periods_at", calendar)
    all_counters = BudgetCounters(redis, BERLIN)
    periods = (old.day, old.month, new.day, new.month)
    assert await all_counters.fill(None, LOG, 0, periods, {}, {})
    counters = against(caps(daily=room), of_tenant=caps(monthly=room))
    granted: dict[str, int] = {}
    refused: list[OverBudget] = []

    async def worker(name: str, behind: timedelta) -> int:
        """Asks until the new day's cap is reached, by a clock that is slow; returns how often the answer said so."""
        one, elsewhen, number = Budgets(redis, BERLIN), 0, 0
        while not (refused and refused[-1].resets_at == new.day.resets_at):
            now = datetime.now(UTC) - behind
            attempt_id = f"{name}{number}:1"
            command = one.reserve_command(attempt_id, CallNames("a", "t"), 1, counters, now=now, lease_ms=60_000)
            # Sent twice, as if the first answer were lost.
            answers = [
                one.read_reservation(answer, counters, 1, now=now) for answer in await redis.run([command, command])
            ]
            elsewhen += PeriodChanged() in answers
            refused.extend(answer for answer in answers if isinstance(answer, OverBudget))
            granted.update((attempt_id, ms_from_time(answer.at)) for answer in answers if isinstance(answer, Reserved))
            number += 1
            await asyncio.sleep(0.002)
        return elsewhen

    async with asyncio.timeout(60):
        workers = (worker(f"w{minutes}-", timedelta(minutes=minutes)) for minutes in (5, 10, 20))
        reported = await asyncio.gather(*workers)
    assert reported == [1, 1, 1]
    by_day = {one.name: [name for name, at in granted.items() if one.holds(at)] for one in (old.day, new.day)}
    assert {name: len(attempts) for name, attempts in by_day.items()} == {"the last day": room, "the first day": room}
    assert {over.resets_at for over in refused} == {old.day.resets_at, new.day.resets_at}
    held = (await all_counters.snapshot(periods)).reservations
    assert {one.attempt_id: tuple(dict.fromkeys(name for name, _ in one.places)) for one in held} == {
        **dict.fromkeys(by_day["the last day"], ("the last day", "the old month")),
        **dict.fromkeys(by_day["the first day"], ("the first day", "the new month")),
    }
    snapshot = await all_counters.snapshot(periods)
    assert snapshot.reserved == {(one.name, key): room for one in periods for key in KEYS}
    # All are settled after midnight; each at a price of its own, so that none can stand for another.
    costs = {attempt_id: 2**place for place, attempt_id in enumerate(sorted(granted))}
    for start in range(0, len(costs), 20):
        batch = list(costs.items())[start : start + 20]
        await Budgets(redis, BERLIN).settle(
            [
                settlement(attempt_id, start + place, 1 + cost % 1_000_003, at=time_from_ms(granted[attempt_id]))
                for place, (attempt_id, cost) in enumerate(batch, 1)
            ],
            LOG,
        )
    snapshot = await all_counters.snapshot(periods)
    assert not any(snapshot.reserved.values())
    for day, month in ((old.day.name, old.month.name), (new.day.name, new.month.name)):
        spent = sum(1 + costs[attempt_id] % 1_000_003 for attempt_id in by_day[day])
        for name in (day, month):
            for key in KEYS:
                assert snapshot.figures[name, key] == AttemptSums(spent=spent, calls=room)
