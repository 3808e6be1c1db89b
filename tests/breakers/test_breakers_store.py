from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from breakwater.breakers.rules.breaker import (
    Breaker,
    BreakerKey,
    CountedFailure,
    Slice,
    consecutive_failures,
    isolate,
    reset,
)
from breakwater.breakers.settings import BreakerRules
from breakwater.breakers.store import (
    ALIVE_MS,
    KEEP_MS,
    UNSAVED,
    BreakerAdmitted,
    BreakerRefused,
    Breakers,
    LoadedBreaker,
    Saving,
)
from breakwater.jobs.contract.execution import FailureStatistics
from breakwater.kernel.redis.connection import KEPT_SINCE, Redis, ScriptCommand, StateUnavailableError

KEY = BreakerKey("an agent", "org/model:1.5")
OTHER = BreakerKey("*", "provider/*")
OPEN = Breaker(
    state="open", failures=(CountedFailure(3, 1000, "a3f1b2c4"),), last_success=2, open_until_ms=1, version=1
)
FULL = Breaker(
    state="half_open",
    failures=tuple(
        CountedFailure(
            number,
            10 * number,
            f"{number:08x}",
            f"{number % 9:08x}",
            "k1a2b3c4d t0badc0de",
            "5eed0001" if number % 3 else "",
            tried_again=number % 2 == 0,
        )
        for number in range(1, 1001)
    ),
    count="attempts",
    waits=True,
    forgotten=3,
    last_success=1,
    open_until_ms=1_795_000_000_000,
    openings=4,
    probe="job/1:2",
    probe_until_ms=1_795_000_100_000,
    version=9,
    closed_at=2,
    total_failures=5000,
    errors_seen=tuple(f"{number:08x}" for number in range(100)),
    slices=tuple(Slice(2_991_666_666 + number, 10, 3, "k1a2b3c4d t0badc0de") for number in range(100)),
    counted=tuple(range(1, 1001)),
    last_failure_ms=1_794_999_999_999,
    last_success_ms=1_794_999_999_990,
    changed_ms=1_795_000_000_001,
    reason="3 jobs in a row failed (threshold: 3), “so”",
    callers=(("k1a2b3c4d", 1_795_000_000_002), ("k5eed0002", 1_795_000_000_000), ("t0badc0de", 1_795_000_000_002)),
    alone="k1a2b3c4d t0badc0de",
    alone_name="key app and tenant “é”",
    closed_for="k5eed0002",
    closed_version=7,
    task="5eed0001",
    successes=(("k1a2b3c4d", 7), ("t0badc0de", 8)),
    counts_from=8,
    probed_by="k5eed0002 t0badc0de",
)


async def admit(
    redis: Redis, attempt: str, lease_ms: int | None = 60_000, caller: str = ""
) -> BreakerAdmitted | BreakerRefused:
    [answer] = await redis.run([Breakers.admit_command(KEY, attempt, lease_ms, caller)])
    return Breakers.read_admission(answer)


async def save(redis: Redis, before: LoadedBreaker, after: Breaker, unpublished: str | None = None) -> bool:
    [saved] = await Breakers(redis).save([Saving(KEY, before, after, unpublished)])
    return saved


async def load(redis: Redis) -> LoadedBreaker:
    [loaded] = await Breakers(redis).load([KEY])
    return loaded


async def put(redis: Redis, breaker: Breaker) -> None:
    assert await save(redis, await load(redis), breaker)


async def release(redis: Redis, attempt: str) -> None:
    await redis.run([Breakers.return_probe_command(KEY, attempt)])


async def test_a_breaker_that_nobody_knows_is_closed(redis: Redis) -> None:
    assert await admit(redis, "a:1") == BreakerAdmitted(probe=False, version=0, became_half_open=False)


@pytest.mark.parametrize("breaker", [Breaker(), OPEN, FULL])
async def test_what_is_saved_comes_back(redis: Redis, breaker: Breaker) -> None:
    assert (await load(redis)).breaker == Breaker()
    await put(redis, breaker)
    assert (await load(redis)).breaker == breaker


async def test_workers_of_the_version_before_can_read_failures_beside_newer_ones(redis: Redis) -> None:
    await put(redis, FULL)
    name = f"bw:breaker:{KEY.name}"
    stored = json.loads(await redis.client.hget(name, "failures") or "")
    assert {len(one) for one in stored} == {5}
    without_tasks = [[*one[:3], one[3].split()[0], one[4]] for one in stored]
    await redis.client.hset(name, "failures", json.dumps(without_tasks))
    failures = (await load(redis)).breaker.failures
    assert failures == tuple(replace(one, task="", tried_again=False) for one in FULL.failures)


async def test_an_open_breaker_refuses_until_its_cooldown_is_over(redis: Redis) -> None:
    until = (await load(redis)).now_ms + 50_000
    await put(redis, replace(OPEN, open_until_ms=until))
    answer = await admit(redis, "a:1")
    assert isinstance(answer, BreakerRefused)
    assert answer.until_ms == until
    assert 0 < answer.wait_ms <= 50_000


async def test_half_open_lets_exactly_one_of_a_whole_fleet_probe(redis: Redis) -> None:
    await put(redis, OPEN)
    answers = await asyncio.gather(*(admit(redis, f"a{number}:1") for number in range(200)))
    probes = [answer for answer in answers if isinstance(answer, BreakerAdmitted)]
    assert probes == [BreakerAdmitted(probe=True, version=2, became_half_open=True)]
    assert (await load(redis)).breaker.state == "half_open"


async def test_a_probe_whose_lease_has_ended_passes_on(redis: Redis) -> None:
    await put(redis, OPEN)
    assert isinstance(await admit(redis, "dead:1", lease_ms=1), BreakerAdmitted)
    async with asyncio.timeout(60):
        while isinstance(answer := await admit(redis, "next:1"), BreakerRefused):
            await asyncio.sleep(0.005)
    assert answer == BreakerAdmitted(probe=True, version=2, became_half_open=False)


async def test_a_probe_that_is_given_back_may_be_taken_at_once_but_only_by_its_holder(redis: Redis) -> None:
    await put(redis, OPEN)
    await admit(redis, "one:1")
    await release(redis, "other:1")
    assert isinstance(await admit(redis, "two:1"), BreakerRefused)
    await release(redis, "one:1")
    assert isinstance(await admit(redis, "two:1"), BreakerAdmitted)


async def test_asking_again_for_the_probe_gives_it_again_and_reports_the_change_again(redis: Redis) -> None:
    await put(redis, OPEN)
    first = await admit(redis, "one:1")
    half_open = (await load(redis)).breaker
    assert await admit(redis, "one:1") == first == BreakerAdmitted(probe=True, version=2, became_half_open=True)
    again = (await load(redis)).breaker
    assert (again.version, again.changed_ms) == (2, half_open.changed_ms)
    await release(redis, "one:1")
    assert await admit(redis, "two:1") == BreakerAdmitted(probe=True, version=2, became_half_open=False)


async def test_the_wait_that_is_reported_ends_with_the_lease_of_the_probe(redis: Redis) -> None:
    await put(redis, OPEN)
    await admit(redis, "one:1", lease_ms=40_000)
    refused = await admit(redis, "two:1")
    assert isinstance(refused, BreakerRefused)
    assert refused.until_ms == (await load(redis)).breaker.probe_until_ms
    assert 0 < refused.wait_ms <= 40_000


async def test_one_that_was_forced_open_admits_nobody_until_it_is_reset(redis: Redis) -> None:
    for state in (Breaker(), OPEN, FULL):
        forced, _ = isolate(state, by="ops", why="", rules=BreakerRules(), now_ms=1)
        await put(redis, forced)
        isolated = FailureStatistics(
            consecutive_failures=consecutive_failures(forced),
            total_failures=forced.total_failures,
            unique_errors=len(forced.errors_seen),
            reason="isolated by an operator",
        )
        refused = BreakerRefused(0, 0, probing=False, statistics=isolated, reason="isolated by ops")
        assert await admit(redis, "one:1") == await admit(redis, "job/1:2") == refused
        assert (await load(redis)).breaker == forced
        after, _ = reset(forced, by="ops", why="", rules=BreakerRules(), now_ms=1)
        await put(redis, after)
        assert await admit(redis, "one:1") == BreakerAdmitted(False, after.version, became_half_open=False)


async def test_what_hears_nothing_for_a_week_is_forgotten_but_not_what_was_forced_open(redis: Redis) -> None:
    forced, _ = isolate(OPEN, by="ops", why="", rules=BreakerRules(), now_ms=1)
    after, _ = reset(forced, by="ops", why="", rules=BreakerRules(), now_ms=1)
    for breaker, kept in ((OPEN, True), (forced, False), (after, True)):
        await put(redis, breaker)
        left_ms = await redis.client.pttl(f"bw:breaker:{KEY.name}")
        assert (KEEP_MS - 60_000 < left_ms <= KEEP_MS) if kept else left_ms == -1


async def test_a_save_after_somebody_elses_is_refused(redis: Redis) -> None:
    breakers = Breakers(redis)
    [before] = await breakers.load([KEY])
    assert await save(redis, before, OPEN)
    assert not await save(redis, before, Breaker())
    now = await load(redis)
    await admit(redis, "probe:1")
    assert not await save(redis, now, Breaker())
    now = await load(redis)
    await release(redis, "probe:1")
    assert not await save(redis, now, Breaker())
    now = await load(redis)
    await release(redis, "nobody:1")
    assert await save(redis, now, OPEN)


async def test_of_many_saves_each_stands_or_falls_by_itself(redis: Redis) -> None:
    breakers = Breakers(redis)
    mine, other = await breakers.load([KEY, OTHER])
    assert await save(redis, mine, OPEN)
    assert await breakers.save([Saving(KEY, mine, FULL, None), Saving(OTHER, other, FULL, None)]) == [False, True]
    assert [loaded.breaker for loaded in await breakers.load([KEY, OTHER])] == [OPEN, FULL]
    assert await breakers.save([]) == []


async def test_every_breaker_is_listed_also_after_a_crash_and_none_that_is_forgotten(redis: Redis) -> None:
    breakers = Breakers(redis)
    assert await breakers.all() == []
    await put(redis, OPEN)
    [other] = await breakers.load([OTHER])
    await breakers.save([Saving(OTHER, other, FULL, None)])
    assert [(key, loaded.breaker) for key, loaded in await breakers.all()] == [(OTHER, FULL), (KEY, OPEN)]
    await redis.client.delete("bw:breakers")  # who saved it first died too early
    await put(redis, OPEN)
    assert [key for key, _ in await breakers.all()] == [KEY]
    await redis.client.delete(f"bw:breaker:{KEY.name}")
    assert await breakers.all() == []
    assert await redis.client.exists("bw:breakers") == 0


async def test_breakers_are_filled_and_their_service_alive_once_it_says_so(redis: Redis) -> None:
    breakers = Breakers(redis)
    assert (await breakers.filled_from(), await breakers.alive()) == (None, False)
    await breakers.mark_filled("log 1")
    await breakers.beat()
    assert (await breakers.filled_from(), await breakers.alive()) == ("log 1", True)
    assert 0 < await redis.client.pttl("bw:breakers:alive") <= ALIVE_MS


async def test_a_decision_on_a_breaker_that_redis_has_lost_is_not_saved(redis: Redis) -> None:
    breakers = Breakers(redis)
    await breakers.mark_filled("log")
    before = await load(redis)
    assert await save(redis, before, FULL)
    for load_again in (False, True):
        before = await load(redis) if load_again else replace(before, revision=UNSAVED)
        await redis.client.flushall()
        assert not await save(redis, before, OPEN)
        await breakers.mark_filled("log")
        assert not await save(redis, before, OPEN)
    assert (await load(redis)).revision == UNSAVED
    assert await save(redis, await load(redis), OPEN)


async def test_breakers_that_are_lost_while_they_are_read_count_as_lost(redis: Redis) -> None:
    run = redis.run

    async def emptied_within(commands: Sequence[ScriptCommand]) -> list[Any]:
        first = await run(commands[:1])
        await redis.client.flushall()
        return first + await run(commands[1:])

    await Breakers(redis).mark_filled("log")
    with patch.object(redis, "run", emptied_within):
        log, _ = await Breakers(redis).load_with_log([KEY])
    assert log is None


async def test_a_transition_is_kept_until_it_is_published(redis: Redis) -> None:
    breakers = Breakers(redis)
    await save(redis, await load(redis), OPEN, '["transition"]')
    before = await load(redis)
    assert before.unpublished == '["transition"]'
    await breakers.mark_published(KEY, '["another"]')
    assert (await load(redis)).unpublished is not None
    await breakers.mark_published(KEY, '["transition"]')
    assert (await load(redis)).unpublished is None
    assert await save(redis, before, FULL)  # it is the same breaker still


async def test_nothing_is_left_of_a_note_upon_a_breaker_that_is_forgotten(redis: Redis) -> None:
    await Breakers(redis).mark_published(KEY, '["transition"]')
    await release(redis, "one:1")
    assert await admit(redis, "one:1") == BreakerAdmitted(probe=False, version=0, became_half_open=False)
    assert await redis.client.dbsize() == 0


async def test_a_redis_that_is_away_is_reported_as_such() -> None:
    away = Redis("redis://127.0.0.1:1/0")
    breakers = Breakers(away)
    saving = Saving(KEY, LoadedBreaker(Breaker(), "0", 0, None), OPEN, None)
    for work in (
        lambda: breakers.load([KEY]),
        lambda: breakers.save([saving]),
        breakers.all,
        breakers.filled_from,
        breakers.beat,
        breakers.alive,
        lambda: breakers.mark_filled("log"),
        lambda: breakers.mark_published(KEY, "x"),
    ):
        with pytest.raises(StateUnavailableError, match="did not answer"):
            await work()
    await away.close()


async def test_what_is_open_for_one_caller_lets_calls_of_others_pass_even_while_that_one_probes(redis: Redis) -> None:
    later = (await load(redis)).now_ms + 50_000
    passes = BreakerAdmitted(probe=False, version=1, became_half_open=False)
    for state in (
        replace(OPEN, alone="kA t", open_until_ms=later),
        replace(OPEN, alone="kA t", state="half_open", probe="p:1", probe_until_ms=later),
    ):
        await put(redis, state)
        for of_the_same in ("kA t", ""):
            assert isinstance(await admit(redis, "a:1", caller=of_the_same), BreakerRefused)
        for of_others in ("kB t", "kA u", "kB u"):
            assert await admit(redis, "b:1", caller=of_others) == passes
        assert (await load(redis)).breaker == state
    await put(redis, replace(OPEN, alone="kA", open_until_ms=later))
    assert isinstance(await admit(redis, "a:2", caller="kA t2"), BreakerRefused)
    assert await admit(redis, "b:2", caller="kB t2") == passes
    # Once the cool-down is over, a call of that caller is the probe.
    await put(redis, replace(OPEN, alone="kA", open_until_ms=1))
    assert await admit(redis, "b:3", caller="kB t2") == passes
    assert await admit(redis, "a:3", caller="kA t2") == BreakerAdmitted(True, 2, became_half_open=True)
    assert (await load(redis)).breaker.counts_from == 0, "outcomes of others still count"


async def test_a_task_with_a_breaker_of_its_own_is_not_stopped_by_what_it_has_opened_itself(redis: Redis) -> None:
    later = (await load(redis)).now_ms + 50_000
    await put(redis, replace(OPEN, task="0badc0de", open_until_ms=later))

    async def asked(task: str) -> BreakerAdmitted | BreakerRefused:
        [answer] = await redis.run([Breakers.admit_command(KEY, "t:1", 1000, "kA t", task)])
        return Breakers.read_admission(answer)

    assert await asked("0badc0de") == BreakerAdmitted(probe=False, version=1, became_half_open=False)
    for other in ("", "deadbeef"):
        assert isinstance(await asked(other), BreakerRefused)
    await put(redis, replace(OPEN, state="isolated", task="0badc0de"))
    assert isinstance(await asked("0badc0de"), BreakerRefused)


async def test_the_success_of_a_caller_is_noted_where_it_has_failed(redis: Redis) -> None:
    failure = CountedFailure(3, 1, "e", "j", "kA tA")
    await put(redis, Breaker(failures=(failure,), version=2, counts_from=2))
    await redis.run(
        [Breakers.succeeded_command(KEY, 2, sequence, caller) for sequence, caller in ((5, "kA tB"), (4, "kA"))]
    )
    assert (await load(redis)).breaker.successes == (("kA", 5),)
    # One that was admitted before the latest transition for all says nothing, and one before that for one does.
    await put(redis, Breaker(state="open", alone="kB", failures=(failure,), version=4, counts_from=2))
    for version, caller, successes in ((1, "kA", ()), (4, "kB", ()), (3, "kA", (("kA", 9),))):
        await redis.run([Breakers.succeeded_command(KEY, version, 9, caller)])
        assert (await load(redis)).breaker.successes == successes


async def test_whose_probe_has_failed_lets_another_probe_at_once_and_clears_that_once_the_cooldown_is_over(
    redis: Redis,
) -> None:
    later = (await load(redis)).now_ms + 50_000
    await put(redis, replace(OPEN, probed_by="kA t", open_until_ms=later))
    assert isinstance(await admit(redis, "a:1", caller="kA t"), BreakerRefused)
    assert await admit(redis, "b:1", lease_ms=None, caller="kB t") == BreakerAdmitted(True, 1, became_half_open=False)
    assert await admit(redis, "b:1", caller="kB t") == BreakerAdmitted(True, 2, became_half_open=True)
    assert (await load(redis)).breaker.probed_by == "kA t"
    await put(redis, replace(OPEN, probed_by="kA t"))
    assert await admit(redis, "a:2", caller="kA t") == BreakerAdmitted(True, 2, became_half_open=True)
    assert (await load(redis)).breaker.probed_by == ""


async def test_a_success_says_who_called_until_two_are_known(redis: Redis) -> None:
    def names(loaded: LoadedBreaker) -> list[str]:
        return [name for name, _ in loaded.breaker.callers]

    async def succeeded(sequence: int, caller: str) -> list[str]:
        await redis.run([Breakers.succeeded_command(KEY, 0, sequence, caller)])
        return names(await load(redis))

    assert await succeeded(1, "k1 ta") == ["k1", "ta"]
    first = await load(redis)
    [(_, at_ms), _] = first.breaker.callers
    assert first.now_ms - 60_000 < at_ms <= first.now_ms
    assert 0 < await redis.client.pttl(f"bw:breaker:{KEY.name}") <= KEEP_MS
    assert await succeeded(2, "k1 ta") == ["k1", "ta"]
    assert (await load(redis)).revision == first.revision
    assert await succeeded(3, "k1 tb") == ["k1", "ta", "tb"]
    assert await succeeded(4, "k2 tc") == ["k1", "ta", "tb", "k2"]
    await put(redis, replace(OPEN, version=0))
    assert await succeeded(5, "k1 ta") == []  # it is open: nothing counts


async def test_breakers_that_are_lost_while_they_are_filled_are_not_marked_as_filled(redis: Redis) -> None:
    breakers = Breakers(redis)
    filling = await breakers.begin_filling()
    assert await breakers.begin_filling() == filling  # another service, which fills the same
    await redis.client.flushall()
    with pytest.raises(StateUnavailableError, match="emptied"):
        await breakers.mark_filled("log", filling)
    other = await breakers.begin_filling()
    with pytest.raises(StateUnavailableError, match="emptied"):
        await breakers.mark_filled("log", filling)
    assert await breakers.filled_from() is None
    await breakers.mark_filled("log", other)
    assert await breakers.filled_from() == "log"


async def test_breakers_are_filled_again_when_another_primary_may_lag(redis: Redis) -> None:
    breakers = Breakers(redis)
    await breakers.mark_filled("log")
    await redis.client.incr(KEPT_SINCE)
    assert await breakers.filled_from() is None
    assert (await breakers.load_with_log([]))[0] is None
    filling = await breakers.begin_filling()
    await redis.client.incr(KEPT_SINCE)
    with pytest.raises(StateUnavailableError):
        await breakers.mark_filled("log", filling)
    await breakers.mark_filled("log")
    assert await breakers.filled_from() == "log"
