from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest
from pydantic import JsonValue

from breakwater.calls.store.cache import MAX_ANSWER_BYTES, AnswerCache, CachedAnswer, Follower, Leader
from breakwater.kernel.redis.connection import Redis, StateUnavailableError

KEY = "5f1d"
LEASE_MS = 30_000
AT = datetime(2026, 11, 21, 10, 0, 0, 123_000, tzinfo=UTC)


def answer(output: JsonValue = "42", execution_id: str = "e1") -> CachedAnswer:
    return CachedAnswer(execution_id, "openai/gpt-4.1", output, AT)


@pytest.mark.parametrize(
    "output", ["text with \N{SNOWMAN}", None, 0, False, [], {"a": [1, 2.5, None, {"b": "\x00"}]}, 2**70, ""]
)
async def test_an_answer_comes_back_as_it_was(redis: Redis, output: JsonValue) -> None:
    cache = AnswerCache(redis)
    assert await cache.put(KEY, answer(output), 60, None)
    kept = await cache.get(KEY)
    assert kept is not None
    assert kept == answer(output)
    assert type(kept.output) is type(output)
    assert await cache.ask(KEY, None, LEASE_MS) == kept
    assert await cache.ask(KEY, "e2", LEASE_MS) == kept
    assert 30_000 < await redis.client.pttl(f"bw:cache:{KEY}") <= 60_000


async def test_an_answer_without_a_model_comes_back_so(redis: Redis) -> None:
    cache = AnswerCache(redis)
    await cache.put(KEY, CachedAnswer("e1", None, {}, AT), 60, None)
    assert (await cache.get(KEY)) == CachedAnswer("e1", None, {}, AT)


async def test_a_question_that_nobody_answered_has_no_answer_and_leaves_nothing(redis: Redis) -> None:
    cache = AnswerCache(redis)
    assert await cache.get(KEY) is None
    assert await cache.ask(KEY, None, LEASE_MS) is None
    assert await redis.client.dbsize() == 0


async def test_an_answer_is_forgotten_when_its_time_is_over(redis: Redis) -> None:
    cache = AnswerCache(redis)
    await cache.put(KEY, answer(), 1, None)
    async with asyncio.timeout(60):
        while await cache.get(KEY) is not None:
            await asyncio.sleep(0.02)


async def test_of_fifty_that_ask_at_once_one_leads_and_all_get_its_answer(redis: Redis) -> None:
    caches = [AnswerCache(redis) for _ in range(5)]
    holders = [f"e{number}" for number in range(50)]
    asked = await asyncio.gather(*(caches[n % 5].ask(KEY, holder, LEASE_MS) for n, holder in enumerate(holders)))
    [leader] = [holder for holder, reported in zip(holders, asked, strict=True) if reported == Leader()]
    followers = [reported for reported in asked if isinstance(reported, Follower)]
    assert len(followers) == 49
    assert all(0 < reported.for_ms <= LEASE_MS for reported in followers)
    await caches[0].put(KEY, answer(execution_id=leader), 60, leader)
    again = await asyncio.gather(*(caches[n % 5].ask(KEY, holder, LEASE_MS) for n, holder in enumerate(holders)))
    assert again == [answer(execution_id=leader)] * 50
    assert await redis.client.exists(f"bw:flight:{KEY}") == 0


async def test_a_leader_that_asks_again_leads_on_and_renews_its_lease(redis: Redis) -> None:
    cache = AnswerCache(redis)
    assert await cache.ask(KEY, "e1", 1_000) == Leader()
    assert await cache.ask(KEY, "e1", LEASE_MS) == Leader()
    reported = await cache.ask(KEY, "e2", LEASE_MS)
    assert isinstance(reported, Follower)
    assert reported.for_ms > 1_000


async def test_when_a_leader_dies_its_lease_ends_and_one_of_the_followers_leads(redis: Redis) -> None:
    cache = AnswerCache(redis)
    begun = asyncio.get_running_loop().time()
    assert await cache.ask(KEY, "dead", 200) == Leader()

    async def follow(holder: str) -> bool:
        for _ in range(60):
            if await cache.ask(KEY, holder, LEASE_MS) == Leader():
                return True
            await asyncio.sleep(0.01)
        return False

    led = await asyncio.gather(*(follow(f"e{number}") for number in range(20)))
    assert led.count(True) == 1
    assert asyncio.get_running_loop().time() - begun >= 0.2


async def test_a_leader_that_failed_lets_the_next_one_lead(redis: Redis) -> None:
    cache = AnswerCache(redis)
    await cache.ask(KEY, "e1", LEASE_MS)
    await cache.leave(KEY, "e1")
    await cache.leave(KEY, "e1")
    assert await cache.ask(KEY, "e2", LEASE_MS) == Leader()


async def test_only_the_leader_can_let_go(redis: Redis) -> None:
    cache = AnswerCache(redis)
    await cache.ask(KEY, "e1", LEASE_MS)
    await cache.leave(KEY, "e2")
    assert isinstance(await cache.ask(KEY, "e2", LEASE_MS), Follower)


async def test_a_leader_whose_lease_ended_still_gives_its_answer_and_leaves_the_new_one_alone(redis: Redis) -> None:
    cache = AnswerCache(redis)
    await cache.ask(KEY, "new", LEASE_MS)
    assert await cache.put(KEY, answer(execution_id="late"), 60, "late")
    assert await redis.client.get(f"bw:flight:{KEY}") == "new"
    assert await cache.ask(KEY, "e3", LEASE_MS) == answer(execution_id="late")


async def test_an_answer_that_is_too_large_is_not_kept_and_the_next_one_leads(redis: Redis) -> None:
    cache = AnswerCache(redis)
    await cache.ask(KEY, "e1", LEASE_MS)
    assert not await cache.put(KEY, answer("ü" * (MAX_ANSWER_BYTES // 2)), 60, "e1")
    assert await cache.get(KEY) is None
    assert await cache.ask(KEY, "e2", LEASE_MS) == Leader()
    assert not await cache.put(KEY, answer("x" * MAX_ANSWER_BYTES), 60, None)


async def test_what_another_version_kept_is_as_good_as_nothing(redis: Redis) -> None:
    cache = AnswerCache(redis)
    await redis.client.set(f"bw:cache:{KEY}", '{"unknown": 1}')
    assert await cache.get(KEY) is None
    assert await cache.ask(KEY, None, LEASE_MS) is None
    assert await cache.ask(KEY, "e1", LEASE_MS) == Leader()
    assert await cache.put(KEY, answer(), 60, "e1")
    assert await cache.get(KEY) == answer()


async def test_questions_do_not_meet(redis: Redis) -> None:
    cache = AnswerCache(redis)
    await cache.put("a", answer("a"), 60, None)
    assert await cache.get("b") is None
    assert await cache.ask("b", "e1", LEASE_MS) == Leader()
    assert await cache.ask("c", "e2", LEASE_MS) == Leader()


async def test_a_redis_that_is_away_is_reported_as_such() -> None:
    away = Redis("redis://127.0.0.1:1/0")
    cache = AnswerCache(away)
    for asked in (cache.get(KEY), cache.ask(KEY, "e1", 1), cache.put(KEY, answer(), 1, "e1"), cache.leave(KEY, "e1")):
        with pytest.raises(StateUnavailableError, match="did not answer"):
            await asked
    await away.close()
