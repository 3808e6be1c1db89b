from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from redis.exceptions import ResponseError

from breakwater.policy.budget import Caps, Counter, counters
from breakwater.state.budgets import Budgets, OverBudget, Settlement
from breakwater.state.connection import Redis
from tests.servers import RunningServer

ZONE = ZoneInfo("UTC")


def now() -> datetime:
    return datetime.now(UTC)


def capped(daily_nano: int, agent: str = "a") -> tuple[Counter, ...]:
    return counters(agent, Caps(), Caps.model_construct(daily_usd=daily_nano, enforcement="hard", soft_at_percent=()))


async def reserve(
    redis: Redis, attempt: str, amount: int, held_against: tuple[Counter, ...], lease_ms: int = 60_000
) -> OverBudget | None:
    budgets = Budgets(redis, ZONE)
    call = budgets.reserve_call(attempt, "a", amount, held_against, now=now(), lease_ms=lease_ms)
    [answer] = await redis.run([call])
    return Budgets.reserved(answer, held_against)


def settlement(attempt: str, sequence: int, cost: int | None, started_at: datetime | None = None) -> Settlement:
    return Settlement(attempt, sequence, "a", cost, started_at or now())


async def books(redis: Redis) -> dict[str, int]:
    return await Budgets(redis, ZONE).counters("daily", now())


async def test_a_thousand_reservations_at_once_on_a_cap_for_a_hundred_grant_a_hundred(redis: Redis) -> None:
    held = capped(100 * 7)
    answers = await asyncio.gather(*(reserve(redis, f"j{number}:1", 7, held) for number in range(1000)))
    assert answers.count(None) == 100
    assert (await books(redis))["reserved:global"] == 700


async def test_asking_again_for_a_reservation_gives_the_same_and_holds_it_once(redis: Redis) -> None:
    held = capped(10)
    assert [await reserve(redis, "j:1", 7, held) for _ in range(3)] == [None] * 3
    assert (await books(redis))["reserved:global"] == 7


async def test_a_refusal_names_the_budget_its_figures_and_its_end_and_holds_nothing(redis: Redis) -> None:
    held = capped(10)
    await reserve(redis, "j:1", 7, held)
    refused = await reserve(redis, "k:1", 4, held)
    assert refused is not None
    assert (refused.counter.key, refused.counter.window) == ("global", "daily")
    assert (refused.limit, refused.spent, refused.reserved) == (10, 0, 7)
    midnight = (now() + timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0)
    assert refused.resets_at_ms == int(midnight.timestamp() * 1000)
    found = await books(redis)
    assert found["reserved:agent:a"] == 7


async def test_settling_replaces_the_reservation_by_the_cost_in_all_budgets_once(redis: Redis) -> None:
    budgets = Budgets(redis, ZONE)
    await reserve(redis, "j:1", 7, capped(10))
    for _ in range(3):
        [totals] = await budgets.settle([settlement("j:1", 5, 4)], "log")
        assert {(total.window, total.key): total.spent for total in totals} == {
            ("daily", "global"): 4,
            ("daily", "agent:a"): 4,
            ("monthly", "global"): 4,
            ("monthly", "agent:a"): 4,
        }
    found = await books(redis)
    assert (found["reserved:global"], found["spent:global"], found["calls:global"]) == (0, 4, 1)
    assert await budgets.reservations(["j:1"]) == [None]


async def test_a_released_reservation_leaves_no_trace(redis: Redis) -> None:
    held = capped(10)
    await reserve(redis, "j:1", 7, held)
    await redis.run([Budgets(redis, ZONE).release_call("j:1", held, now=now())])
    assert (await books(redis))["reserved:global"] == 0
    assert await Budgets(redis, ZONE).lapsed(now() + timedelta(days=1)) == []


async def test_a_cost_without_a_reservation_is_counted_in_the_period_of_its_start(redis: Redis) -> None:
    budgets = Budgets(redis, ZONE)
    yesterday = now() - timedelta(days=1)
    await budgets.settle([settlement("j:1", 5, 4, yesterday)], "log")
    assert "spent:global" not in await books(redis)
    assert (await budgets.counters("daily", yesterday))["spent:global"] == 4


async def test_an_unknown_cost_is_counted_as_unpriced_and_not_as_zero(redis: Redis) -> None:
    await Budgets(redis, ZONE).settle([settlement("j:1", 5, None)], "log")
    found = await books(redis)
    assert found["unpriced:global"] == 1
    assert "spent:global" not in found


async def test_a_lapsed_reservation_is_charged_at_its_estimate_and_corrected_by_a_late_event(redis: Redis) -> None:
    budgets = Budgets(redis, ZONE)
    await reserve(redis, "j:1", 7, capped(10), lease_ms=1)
    assert await budgets.lapsed(now() + timedelta(seconds=1)) == ["j:1"]
    [reservation] = await budgets.reservations(["j:1"])
    assert reservation is not None
    for _ in range(2):
        await budgets.charge_estimate(reservation)
    found = await books(redis)
    assert (found["reserved:global"], found["spent:global"]) == (0, 7)
    assert await budgets.lapsed(now() + timedelta(seconds=1)) == []
    await budgets.settle([settlement("j:1", 5, 4)], "log")
    assert (await books(redis))["spent:global"] == 4


async def test_the_settlement_of_free_and_of_unpriced_reservations_works_too(redis: Redis) -> None:
    budgets = Budgets(redis, ZONE)
    for attempt, sequence in (("j:1", 1), ("k:1", 2)):
        await reserve(redis, attempt, 0, capped(10), lease_ms=1)
        if attempt == "k:1":
            [reservation] = await budgets.reservations([attempt])
            assert reservation is not None
            await budgets.charge_estimate(reservation)
        await budgets.settle([settlement(attempt, sequence, 3)], "log")
    assert (await books(redis))["spent:global"] == 6
    await reserve(redis, "l:1", 0, capped(10))
    await redis.run([budgets.release_call("l:1", capped(10), now=now())])


async def test_memory_of_settled_events_stays_small(redis: Redis) -> None:
    budgets = Budgets(redis, ZONE)
    await budgets.settle([settlement(f"j{number}:1", number, 1) for number in range(1, 2001)], "log")
    assert (await books(redis))["spent:global"] == 2000
    assert len(await redis.client.keys("*")) <= 4
    assert await redis.client.memory_usage("bw:{budget}:settled:log:0") < 10_000


class Money(RuleBasedStateMachine):
    """Any mix of reserving, settling, releasing and lapsing, each repeated at will, against a model in Python."""

    redis: Redis
    runner: asyncio.Runner
    CAP = 100

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, int] = {}
        self.charged: dict[str, int] = {}
        self.spent = 0
        self.settled: dict[str, int] = {}
        self.sequences: dict[str, int] = {}
        self.run(self.redis.client.flushall())

    def run(self, work: Any) -> Any:
        return self.runner.run(work)

    @rule(name=st.sampled_from("abcdef"), amount=st.integers(0, 60))
    def reserve(self, name: str, amount: int) -> None:
        attempt = f"{name}:1"
        refused = self.run(reserve(self.redis, attempt, amount, capped(self.CAP), lease_ms=1))
        if attempt in self.held or attempt in self.charged:
            assert refused is None
            return
        fits = self.spent + sum(self.held.values()) + sum(self.charged.values()) + amount <= self.CAP
        assert (refused is None) == fits
        if fits:
            self.held[attempt] = amount

    @rule(name=st.sampled_from("abcdef"), cost=st.integers(0, 60))
    def settle(self, name: str, cost: int) -> None:
        attempt = f"{name}:1"
        sequence = self.sequences.setdefault(attempt, len(self.sequences) + 1)
        self.run(Budgets(self.redis, ZONE).settle([settlement(attempt, sequence, cost)], "log"))
        if attempt not in self.settled:
            self.settled[attempt] = cost
            self.spent += cost
        self.held.pop(attempt, None)
        self.charged.pop(attempt, None)

    @rule(name=st.sampled_from("abcdef"))
    def release(self, name: str) -> None:
        self.run(self.redis.run([Budgets(self.redis, ZONE).release_call(f"{name}:1", capped(self.CAP), now=now())]))
        self.held.pop(f"{name}:1", None)

    @rule(name=st.sampled_from("abcdef"))
    def lapse(self, name: str) -> None:
        budgets = Budgets(self.redis, ZONE)
        [reservation] = self.run(budgets.reservations([f"{name}:1"]))
        if reservation is None:
            return
        self.run(budgets.charge_estimate(reservation))
        if f"{name}:1" in self.held:
            self.charged[f"{name}:1"] = self.held.pop(f"{name}:1")

    @invariant()
    def the_books_are_right(self) -> None:
        found = self.run(books(self.redis))
        assert found.get("reserved:global", 0) == sum(self.held.values())
        assert found.get("spent:global", 0) == self.spent + sum(self.charged.values())
        assert found.get("reserved:agent:a", 0) == sum(self.held.values())


def test_money_stays_right_whatever_happens_in_whatever_order(redis_server: RunningServer) -> None:
    with asyncio.Runner() as runner:
        Money.runner = runner
        Money.redis = Redis(redis_server.url)
        run_state_machine_as_test(
            Money,
            settings=settings(
                max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
            ),
        )
        runner.run(Money.redis.close())


async def test_a_new_log_begins_to_count_anew(redis: Redis) -> None:
    budgets = Budgets(redis, ZONE)
    await budgets.settle([settlement("j:1", 1, 4)], "log of yesterday")
    await budgets.settle([settlement("k:1", 1, 5)], "log of today")
    assert (await books(redis))["spent:global"] == 9


async def test_a_reservation_under_an_attempt_that_was_counted_already_is_void(redis: Redis) -> None:
    budgets = Budgets(redis, ZONE)
    await reserve(redis, "j:1", 7, capped(100))
    await budgets.settle([settlement("j:1", 5, 4)], "log")
    for lapse in (False, True):
        await reserve(redis, "j:1", 9, capped(100), lease_ms=1)
        if lapse:
            [reservation] = await budgets.reservations(["j:1"])
            assert reservation is not None
            await budgets.charge_estimate(reservation)
        await budgets.settle([settlement("j:1", 5, 4)], "log")
        found = await books(redis)
        assert (found["reserved:global"], found["spent:global"]) == (0, 4)
        assert await budgets.lapsed(now() + timedelta(days=1)) == []


async def test_a_mistake_of_ours_is_not_taken_for_an_outage(redis: Redis) -> None:
    with pytest.raises(ResponseError, match="not an integer"):
        await reserve(redis, "j:1", 10**30, counters("a", Caps(), Caps()))
