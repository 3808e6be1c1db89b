from __future__ import annotations

import asyncio

import pytest
from redis.exceptions import ConnectionError as Away

from breakwater.policy.retry import RetryBudgetRules
from breakwater.state.connection import Redis, StateUnavailable
from breakwater.state.retry_budget import SLICES, RetryBudgets

MODEL = "openai/gpt-4.1{mini}"


async def first_tries(redis: Redis, budgets: RetryBudgets, count: int, model: str = MODEL) -> None:
    call = budgets.first_try_call(model)
    assert call is not None
    await redis.run([call] * count)


async def granted(budgets: RetryBudgets, asks: int, name: str = "e", model: str = MODEL) -> int:
    return sum([await budgets.may_retry(model, f"{name}:{number}") for number in range(asks)])


@pytest.mark.parametrize(
    ("ratio", "floor", "tries", "retries"),
    [
        (0.2, 10, 0, 10),
        (0.2, 10, 50, 10),
        (0.2, 10, 51, 11),
        (0.2, 10, 100, 20),
        (0.2, 0, 0, 0),
        (0.2, 0, 1, 1),
        (0.0, 0, 100, 0),
        (0.0, 3, 100, 3),
        (0.1, 0, 30, 3),
        (2.5, 0, 10, 25),
    ],
)
async def test_retries_are_granted_below_the_floor_and_below_the_ratio_of_first_tries(
    redis: Redis, ratio: float, floor: int, tries: int, retries: int
) -> None:
    budgets = RetryBudgets(redis, RetryBudgetRules(ratio=ratio, floor=floor, window_s=3600))
    await first_tries(redis, budgets, tries)
    assert await granted(budgets, 40) == retries


async def test_of_two_hundred_that_ask_at_once_the_floor_is_granted(redis: Redis) -> None:
    budgets = [RetryBudgets(redis, RetryBudgetRules(floor=10, window_s=3600)) for _ in range(4)]
    asks = [budgets[number % 4].may_retry(MODEL, f"e{number}:2") for number in range(200)]
    assert sum(await asyncio.gather(*asks)) == 10


async def test_asking_again_for_the_same_attempt_gives_the_same_answer_and_counts_once(redis: Redis) -> None:
    budgets = RetryBudgets(redis, RetryBudgetRules(ratio=0.2, floor=1, window_s=3600))
    answers = await asyncio.gather(*(budgets.may_retry(MODEL, "e:2") for _ in range(50)))
    assert answers == [True] * 50
    assert not await budgets.may_retry(MODEL, "f:2")
    await first_tries(redis, budgets, 100)
    assert not await budgets.may_retry(MODEL, "f:2")
    assert await granted(budgets, 40, "g") == 19


async def test_each_model_has_a_budget_of_its_own(redis: Redis) -> None:
    budgets = RetryBudgets(redis, RetryBudgetRules(floor=2, window_s=3600))
    assert [await granted(budgets, 5, model=model) for model in ("a/b", "a.b", "a")] == [2, 2, 2]


async def test_a_retry_is_forgotten_when_its_window_is_over_and_not_before(redis: Redis) -> None:
    budgets = RetryBudgets(redis, RetryBudgetRules(floor=3, window_s=1))
    first = await clock_ms(redis)
    assert await granted(budgets, 3) == 3
    last = asked = await clock_ms(redis)
    number = 0
    async with asyncio.timeout(60):
        while not await budgets.may_retry(MODEL, f"later:{(number := number + 1)}"):
            assert asked - last <= 1100, "it was remembered for longer than its window"
            asked = await clock_ms(redis)
    assert await clock_ms(redis) - first >= 1000


async def test_a_first_try_allows_nothing_when_its_window_is_over(redis: Redis) -> None:
    budgets = RetryBudgets(redis, RetryBudgetRules(ratio=1, floor=0, window_s=1))
    await first_tries(redis, budgets, 1000)
    last = asked = await clock_ms(redis)
    number = 0
    async with asyncio.timeout(60):
        while await budgets.may_retry(MODEL, f"e:{(number := number + 1)}"):
            assert asked - last <= 1100, "it allowed something for longer than its window"
            await asyncio.sleep(0.02)
            asked = await clock_ms(redis)


async def test_memory_stays_the_same_as_time_passes_and_an_idle_model_leaves_nothing(redis: Redis) -> None:
    budgets = RetryBudgets(redis, RetryBudgetRules(floor=1_000, window_s=1))
    begun, most, number = await clock_ms(redis), {"tried": 0, "retried": 0}, 0
    while await clock_ms(redis) - begun < 1600 or min(most.values()) <= SLICES // 2:
        await first_tries(redis, budgets, 5, "tried")
        await budgets.may_retry("retried", f"e:{(number := number + 1)}")
        for model in most:
            most[model] = max(most[model], await redis.client.hlen(key_of(budgets, model)))
    for model, fields in most.items():
        assert fields <= SLICES + 1
        left_ms = await redis.client.pttl(key_of(budgets, model))
        assert left_ms != -1  # it has no end
        assert left_ms <= 1050


def key_of(budgets: RetryBudgets, model: str) -> str:
    call = budgets.first_try_call(model)
    assert call is not None
    return call.keys[0]


async def test_without_rules_every_retry_is_granted_and_nothing_is_counted(redis: Redis) -> None:
    budgets = RetryBudgets(redis, None)
    assert budgets.first_try_call(MODEL) is None
    assert await budgets.may_retry(MODEL, "e:2")
    assert await redis.client.dbsize() == 0


async def test_a_redis_that_is_away_is_reported_as_such() -> None:
    away = Redis("redis://127.0.0.1:1/0")
    with pytest.raises(StateUnavailable, match="did not answer") as reported:
        await RetryBudgets(away, RetryBudgetRules()).may_retry(MODEL, "e:2")
    assert isinstance(reported.value.__cause__, Away)
    await away.close()


async def clock_ms(redis: Redis) -> int:
    seconds, microseconds = await redis.client.time()
    return seconds * 1000 + microseconds // 1000
