from __future__ import annotations

import asyncio

import pytest
from redis.exceptions import ConnectionError as Away

from breakwater.calls.rules.holds import LONG_HOLD_S
from breakwater.calls.settings import RetryBudgetRules
from breakwater.kernel.redis.connection import Redis, StateUnavailableError
from breakwater.limits.store.deployments import PROBE, SLICES, Deployments

MODEL = "openai/gpt-4.1{mini}"


async def first_tries(redis: Redis, deployments: Deployments, count: int, model: str = MODEL) -> None:
    await redis.run([deployments.admit_command(model, first_try=True)] * count)


async def granted(deployments: Deployments, asks: int, name: str = "e", model: str = MODEL) -> int:
    return sum([await deployments.may_retry(model, f"{name}:{number}") for number in range(asks)])


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
    deployments = Deployments(redis, RetryBudgetRules(ratio=ratio, floor=floor, window_s=3600))
    await first_tries(redis, deployments, tries)
    assert await granted(deployments, 40) == retries


async def test_of_two_hundred_that_ask_at_once_the_floor_is_granted(redis: Redis) -> None:
    deployments = [Deployments(redis, RetryBudgetRules(floor=10, window_s=3600)) for _ in range(4)]
    asks = [deployments[number % 4].may_retry(MODEL, f"e{number}:2") for number in range(200)]
    assert sum(await asyncio.gather(*asks)) == 10


async def test_asking_again_for_the_same_attempt_gives_the_same_answer_and_counts_once(redis: Redis) -> None:
    deployments = Deployments(redis, RetryBudgetRules(ratio=0.2, floor=1, window_s=3600))
    answers = await asyncio.gather(*(deployments.may_retry(MODEL, "e:2") for _ in range(50)))
    assert answers == [True] * 50
    assert not await deployments.may_retry(MODEL, "f:2")
    await first_tries(redis, deployments, 100)
    assert not await deployments.may_retry(MODEL, "f:2")
    assert await granted(deployments, 40, "g") == 19


async def test_each_model_has_a_budget_of_its_own(redis: Redis) -> None:
    deployments = Deployments(redis, RetryBudgetRules(floor=2, window_s=3600))
    assert [await granted(deployments, 5, model=model) for model in ("a/b", "a.b", "a")] == [2, 2, 2]


async def test_a_retry_is_forgotten_when_its_window_is_over_and_not_before(redis: Redis) -> None:
    deployments = Deployments(redis, RetryBudgetRules(floor=3, window_s=1))
    first = await clock_ms(redis)
    assert await granted(deployments, 3) == 3
    last = asked = await clock_ms(redis)
    number = 0
    async with asyncio.timeout(60):
        while not await deployments.may_retry(MODEL, f"later:{(number := number + 1)}"):
            assert asked - last <= 1100, "it was remembered for longer than its window"
            asked = await clock_ms(redis)
    assert await clock_ms(redis) - first >= 1000


async def test_a_first_try_allows_nothing_when_its_window_is_over(redis: Redis) -> None:
    deployments = Deployments(redis, RetryBudgetRules(ratio=1, floor=0, window_s=1))
    await first_tries(redis, deployments, 1000)
    last = asked = await clock_ms(redis)
    number = 0
    async with asyncio.timeout(60):
        while await deployments.may_retry(MODEL, f"e:{(number := number + 1)}"):
            assert asked - last <= 1100, "it allowed something for longer than its window"
            await asyncio.sleep(0.02)
            asked = await clock_ms(redis)


async def test_memory_stays_the_same_as_time_passes_and_an_idle_model_leaves_nothing(redis: Redis) -> None:
    deployments = Deployments(redis, RetryBudgetRules(floor=1_000, window_s=1))
    begun, most, number = await clock_ms(redis), {"tried": 0, "retried": 0}, 0
    while await clock_ms(redis) - begun < 1600 or min(most.values()) <= SLICES // 2:
        await first_tries(redis, deployments, 5, "tried")
        await deployments.may_retry("retried", f"e:{(number := number + 1)}", "k")
        for model in most:
            most[model] = max(most[model], len(await slices_of(redis, deployments, model)))
    for model, slices in most.items():
        assert slices <= SLICES + 2
        for key in await slices_of(redis, deployments, model):
            assert await redis.client.hlen(key) <= 3
            assert -1 != await redis.client.pttl(key) <= 1050


async def slices_of(redis: Redis, deployments: Deployments, model: str) -> list[str]:
    counts = deployments.admit_command(model, first_try=True).keys[1]
    return [key for key in map(str, await redis.client.keys(f"{counts}:*")) if ":answer:" not in key]


async def test_without_rules_every_retry_is_granted_and_nothing_is_counted(redis: Redis) -> None:
    deployments = Deployments(redis, None)
    assert await redis.run([deployments.admit_command(MODEL, first_try=True)]) == [0]
    assert await redis.run([deployments.take_back_command(MODEL, first_try=True)]) == [1]
    assert await deployments.may_retry(MODEL, "e:2")
    assert await redis.client.dbsize() == 0


async def test_a_held_deployment_admits_and_counts_nothing_until_the_hold_is_over(redis: Redis) -> None:
    deployments = Deployments(redis, RetryBudgetRules())
    ask, other = deployments.admit_command(MODEL, first_try=True), deployments.admit_command("other", first_try=False)
    begun = await clock_ms(redis)
    hold_ms, shorter_ms = 20_000, 10_000
    for ms in (hold_ms, shorter_ms):
        await redis.run([deployments.hold_command(MODEL, ms / 1000)])
    left_ms, free = await redis.run([ask, other])
    assert hold_ms - (await clock_ms(redis) - begun) <= left_ms <= hold_ms
    assert free == 0
    assert list(await deployments.held_until([MODEL, "other"])) == [MODEL]
    assert await slices_of(redis, deployments, MODEL) == []
    await redis.client.delete(hold_key(MODEL))
    begun = await clock_ms(redis)
    await redis.run([deployments.hold_command(MODEL, 0.2)])
    async with asyncio.timeout(60):
        while (await redis.run([ask]))[0]:
            await asyncio.sleep(0.01)
    assert await clock_ms(redis) - begun >= 199
    assert len(await slices_of(redis, deployments, MODEL)) == 1
    assert await deployments.held_until([MODEL]) == {}


def hold_key(name: str) -> str:
    [key] = Deployments.hold_command(name, 1).keys
    return key


async def test_a_first_try_is_taken_back_from_a_held_deployment_too_and_a_person_may_end_the_hold(
    redis: Redis,
) -> None:
    deployments = Deployments(redis, RetryBudgetRules())
    ask = deployments.admit_command(MODEL, first_try=True)
    back = deployments.take_back_command(MODEL, first_try=True)
    begun = await clock_ms(redis)
    # One after the other: scripts of one round trip that Redis does not know yet run after those that it knows.
    [_], _, [held_ms], _ = [await redis.run([call]) for call in (ask, deployments.hold_command(MODEL, 60), ask, back)]
    assert 60_000 - (await clock_ms(redis) - begun) <= held_ms <= 60_000
    # Time may have gone on to the next slice in between.
    slices = [await redis.client.hgetall(counts) for counts in await slices_of(redis, deployments, MODEL)]
    assert sum(int(counts["first_tries"]) for counts in slices) == 0
    assert await deployments.release(MODEL)
    assert await redis.run([ask]) == [0]
    assert not await deployments.release(MODEL)


class Callers:
    """Calls of several callers on one deployment."""

    def __init__(self, redis: Redis) -> None:
        self.redis, self.deployments = redis, Deployments(redis, RetryBudgetRules())

    async def ask(self, caller: str, attempt_id: str = "", *, lease_ms: int | None = 60_000) -> int:
        asked = self.deployments.admit_command(
            MODEL, first_try=False, caller=caller, attempt_id=attempt_id or f"{caller}:1", lease_ms=lease_ms
        )
        [answer] = await self.redis.run([asked])
        return int(answer)

    async def limited(self, caller: str, hold_s: float, attempt_id: str = "") -> None:
        await self.redis.run([self.deployments.hold_command(MODEL, hold_s, caller, attempt_id or f"{caller}:1")])

    async def ended(self, attempt_id: str, *, succeeded: bool) -> None:
        await self.redis.run([self.deployments.settle_command(MODEL, attempt_id, succeeded=succeeded)])


async def test_a_long_hold_is_probed_by_one_call_of_another_caller_whose_success_ends_it_for_all_but_who_was_limited(
    redis: Redis,
) -> None:
    calls = Callers(redis)
    await calls.limited("a", 3500)
    assert await calls.ask("b", lease_ms=None) == PROBE  # a dry run takes none
    assert await calls.ask("b") == PROBE
    assert await calls.ask("b") == PROBE, "asked again, as the answer was lost"
    for caller, most_ms in (("a", 3_500_000), ("c", 1000)):
        wait_ms = await calls.ask(caller)
        assert isinstance(wait_ms, int)
        assert most_ms - 60_000 < wait_ms <= most_ms
    await calls.ended("c:1", succeeded=True)  # it held no probe
    assert await calls.ask("c") != PROBE
    await calls.ended("b:1", succeeded=True)
    assert (await calls.ask("b"), await calls.ask("c", "c:2")) == (0, 0)
    assert await calls.deployments.held_until([MODEL]) == {}
    assert await calls.ask("a", "a:2") != 0
    # That calls of it that were under way are limited again does not concern the others.
    await calls.limited("a", 3500, "a:3")
    assert await calls.ask("b", "b:2") == 0
    await calls.deployments.release(MODEL)
    assert await calls.ask("a", "a:2") == 0


async def test_a_probe_that_is_limited_too_extends_the_hold_and_the_next_one_comes_later(redis: Redis) -> None:
    calls = Callers(redis)
    await calls.limited("a", 100)
    assert await calls.ask("b") == PROBE
    await calls.limited("b", 3500)
    for caller, least_ms, most_ms in (
        ("a", 39_000, 100_000),
        ("b", 3_400_000, 3_500_000),
        ("c", 1, LONG_HOLD_S * 1000),
    ):
        wait_ms = await calls.ask(caller, f"{caller}:2")
        assert isinstance(wait_ms, int)
        assert least_ms < wait_ms <= most_ms
    [until_ms] = (await calls.deployments.held_until([MODEL])).values()
    assert until_ms > await clock_ms(redis) + 3_400_000
    await redis.client.hset(hold_key(MODEL), "probe_at_ms", "1")  # that time has passed
    assert await calls.ask("c", "c:2") == PROBE


async def test_a_probe_that_says_nothing_of_the_limit_or_is_never_made_lets_the_next_one_pass(redis: Redis) -> None:
    calls = Callers(redis)
    await calls.limited("a", 100)
    assert await calls.ask("b") == PROBE
    await calls.ended("b:1", succeeded=False)
    assert await calls.ask("c") == PROBE
    await redis.run([calls.deployments.take_back_command(MODEL, first_try=False, attempt_id="c:1")])
    # One whose worker has died, too.
    assert await calls.ask("d", lease_ms=1) == PROBE
    async with asyncio.timeout(60):
        while await calls.ask("b", "b:2") != PROBE:
            await asyncio.sleep(0.01)


async def test_a_hold_of_a_worker_of_the_version_before_stops_no_newer_one(redis: Redis) -> None:
    await redis.client.set("bw:hold:openai%2Fgpt-4%2E1%7Bmini%7D", "", px=60_000)
    deployments = Deployments(redis, None)
    assert await redis.run([deployments.admit_command(MODEL, first_try=True)]) == [0]
    await redis.run([deployments.hold_command(MODEL, 5)])
    assert 0 < (await redis.run([deployments.admit_command(MODEL, first_try=True)]))[0] <= 5000


async def test_a_short_hold_is_one_for_all_callers(redis: Redis) -> None:
    calls = Callers(redis)
    await calls.limited("a", LONG_HOLD_S)
    for caller in ("a", "b"):
        assert await calls.ask(caller) not in {0, PROBE}


async def test_of_those_who_were_limited_only_they_who_still_wait_are_remembered(redis: Redis) -> None:
    calls = Callers(redis)
    for number in range(20):
        await calls.limited(f"a{number}", 100)
    fields = await redis.client.hkeys(hold_key(MODEL))
    assert len([field for field in fields if field.startswith("limited:")]) == 20
    await redis.client.hset(hold_key(MODEL), mapping={f"limited:a{number}": 1 for number in range(20)})
    await calls.limited("b", 50)
    assert {field for field in await redis.client.hkeys(hold_key(MODEL)) if field.startswith("limited:")} == {
        "limited:b"
    }
    assert 50_000 < await redis.client.pttl(hold_key(MODEL)) <= 100_000


async def test_a_redis_that_is_away_is_reported_as_such() -> None:
    away = Redis("redis://127.0.0.1:1/0")
    with pytest.raises(StateUnavailableError, match="did not answer") as reported:
        await Deployments(away, RetryBudgetRules()).may_retry(MODEL, "e:2")
    assert isinstance(reported.value.__cause__, Away)
    await away.close()


async def clock_ms(redis: Redis) -> int:
    seconds, microseconds = await redis.client.time()
    return seconds * 1000 + microseconds // 1000


async def test_what_one_caller_has_used_up_leaves_some_retries_to_the_others(redis: Redis) -> None:
    deployments = Deployments(redis, RetryBudgetRules(floor=10))

    async def granted(caller: str, times: int) -> int:
        name = f"{caller}{times}"
        return sum([await deployments.may_retry("sim/shared", f"{name}:{n}", caller) for n in range(times)])

    assert await granted("k1 t1", 30) == 10
    assert await granted("", 2) == 0
    assert await granted("k2 t2", 3) == 3
    assert await granted("k3 t3", 30) == 2
    assert await granted("k2 t2", 20) == 0


async def test_a_key_that_makes_up_tenants_leaves_some_retries_to_other_keys(redis: Redis) -> None:
    deployments = Deployments(redis, RetryBudgetRules(floor=12))

    async def granted(key: str, times: int) -> int:
        callers = [f"{key} t{n}" for n in range(times)]
        return sum([await deployments.may_retry("sim/shared", f"{one}:1", one) for one in callers])

    assert await granted("k1", 40) == 15
    assert await granted("k2", 40) == 3
    # A first try cleans old fields away, and reads them all.
    await redis.run([deployments.admit_command("sim/shared", first_try=True)])


async def test_a_deployment_is_spared_for_its_time_by_calls_that_can_go_elsewhere(redis: Redis) -> None:
    deployments = Deployments(redis, RetryBudgetRules())

    async def asked(*, spares: bool) -> int:
        [answer] = await redis.run([deployments.admit_command(MODEL, first_try=True, caller="a", spares=spares)])
        return int(answer)

    await redis.run([deployments.settle_command(MODEL, "a:1", succeeded=False, spare_s=60)])
    assert 59_000 < await asked(spares=True) <= 60_000
    assert await asked(spares=False) == 0
    assert await deployments.held_until([MODEL]) == {}, "it is no hold"
    await redis.run([deployments.hold_command(MODEL, 90, "b", "b:1")])
    assert await asked(spares=False) == PROBE
    assert await asked(spares=True) > 50_000, "no call probes it that can go elsewhere"
    assert await deployments.release(MODEL)
    assert await asked(spares=True) == 0
    await redis.run([deployments.settle_command(MODEL, "a:2", succeeded=False, spare_s=0.05)])
    await asyncio.sleep(0.1)
    assert await asked(spares=True) == 0
