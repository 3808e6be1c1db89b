from __future__ import annotations

import asyncio
from dataclasses import replace

from breakwater.policy.breaker import Breaker, BreakerKey, Failure
from breakwater.state.breakers import Admitted, Breakers, Loaded, Refused, Saving
from breakwater.state.connection import Redis

KEY = BreakerKey("an agent", "org/model:1.5")
OPEN = Breaker(state="open", failures=(Failure(3, 1000),), last_success=2, open_until_ms=1, version=1)


async def admit(redis: Redis, attempt: str, lease_ms: int = 60_000) -> Admitted | Refused:
    [answer] = await redis.run([Breakers.admit_call(KEY, attempt, lease_ms)])
    return Breakers.admission(answer)


async def save(redis: Redis, before: Loaded, after: Breaker, unpublished: str | None = None) -> bool:
    [saved] = await Breakers(redis).save([Saving(KEY, before, after, unpublished)])
    return saved


async def put(redis: Redis, breaker: Breaker) -> None:
    [before] = await Breakers(redis).load([KEY])
    assert await save(redis, before, breaker)


async def give_back(redis: Redis, attempt: str) -> None:
    await redis.run([Breakers.return_probe_call(KEY, attempt)])


async def test_a_breaker_that_nobody_knows_is_closed(redis: Redis) -> None:
    assert await admit(redis, "a:1") == Admitted(probe=False, version=0, became_half_open=False)


async def test_what_is_saved_comes_back(redis: Redis) -> None:
    await put(redis, OPEN)
    [loaded] = await Breakers(redis).load([KEY])
    assert loaded.breaker == OPEN


async def test_an_open_breaker_refuses_until_its_cooldown_is_over(redis: Redis) -> None:
    [loaded] = await Breakers(redis).load([KEY])
    until = loaded.now_ms + 50_000
    await put(redis, replace(OPEN, open_until_ms=until))
    answer = await admit(redis, "a:1")
    assert isinstance(answer, Refused)
    assert answer.until_ms == until
    assert 0 < answer.wait_ms <= 50_000


async def test_half_open_lets_exactly_one_of_a_whole_fleet_probe(redis: Redis) -> None:
    await put(redis, OPEN)
    answers = await asyncio.gather(*(admit(redis, f"a{number}:1") for number in range(200)))
    probes = [answer for answer in answers if isinstance(answer, Admitted)]
    assert probes == [Admitted(probe=True, version=2, became_half_open=True)]
    [loaded] = await Breakers(redis).load([KEY])
    assert loaded.breaker.state == "half_open"


async def test_a_probe_whose_lease_has_ended_passes_on(redis: Redis) -> None:
    await put(redis, OPEN)
    assert isinstance(await admit(redis, "dead:1", lease_ms=1), Admitted)
    async with asyncio.timeout(5):
        while isinstance(answer := await admit(redis, "next:1"), Refused):
            await asyncio.sleep(0.005)
    assert answer == Admitted(probe=True, version=2, became_half_open=False)


async def test_a_probe_that_is_given_back_may_be_taken_at_once_but_only_by_its_holder(redis: Redis) -> None:
    await put(redis, OPEN)
    await admit(redis, "one:1")
    await give_back(redis, "other:1")
    assert isinstance(await admit(redis, "two:1"), Refused)
    await give_back(redis, "one:1")
    assert isinstance(await admit(redis, "two:1"), Admitted)


async def test_asking_again_for_the_probe_gives_it_again(redis: Redis) -> None:
    await put(redis, OPEN)
    await admit(redis, "one:1")
    assert isinstance(await admit(redis, "one:1"), Admitted)


async def test_a_save_after_somebody_elses_is_refused(redis: Redis) -> None:
    breakers = Breakers(redis)
    [before] = await breakers.load([KEY])
    assert await save(redis, before, OPEN)
    assert not await save(redis, before, Breaker())
    [now] = await breakers.load([KEY])
    await admit(redis, "probe:1")
    assert not await save(redis, now, Breaker())


async def test_a_transition_is_kept_until_it_is_published(redis: Redis) -> None:
    breakers = Breakers(redis)
    [before] = await breakers.load([KEY])
    await save(redis, before, OPEN, '["transition"]')
    [loaded] = await breakers.load([KEY])
    assert loaded.unpublished == '["transition"]'
    await breakers.mark_published(KEY, '["another"]')
    [loaded] = await breakers.load([KEY])
    assert loaded.unpublished is not None
    await breakers.mark_published(KEY, '["transition"]')
    [loaded] = await breakers.load([KEY])
    assert loaded.unpublished is None
