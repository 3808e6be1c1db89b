from __future__ import annotations

import asyncio

import pytest

from breakwater.state.connection import Redis, StateUnavailable
from breakwater.state.executions import Claim, Claimed, Executions, Superseded, Taken


async def test_a_job_is_claimed_once_and_another_message_waits(redis: Redis) -> None:
    executions = Executions(redis)
    assert await executions.claim(Claim("j", 7, 1)) == Claimed(None)
    other = await executions.claim(Claim("j", 8, 1))
    assert isinstance(other, Taken)
    assert 50_000 < other.for_ms <= 60_000


async def test_of_many_messages_with_one_id_one_gets_the_job(redis: Redis) -> None:
    executions = Executions(redis)
    answers = await asyncio.gather(*(executions.claim(Claim("j", sequence, 1)) for sequence in range(1, 101)))
    assert sum(isinstance(answer, Claimed) for answer in answers) == 1


async def test_a_redelivery_takes_the_job_over_with_its_checkpoint_and_the_earlier_holder_is_fenced(
    redis: Redis,
) -> None:
    executions = Executions(redis)
    first, second = Claim("j", 7, 1), Claim("j", 7, 2)
    await executions.claim(first)
    assert await executions.checkpoint(first, "so far")
    assert await executions.claim(second) == Claimed("so far")
    assert not await executions.checkpoint(first, "too late")
    assert await executions.claim(first) == Superseded()
    await executions.finish(first)
    assert await executions.claim(Claim("j", 7, 3)) == Claimed("so far")


async def test_a_claim_whose_lease_has_ended_passes_to_another_message(redis: Redis) -> None:
    executions = Executions(redis)
    claim = Claim("j", 7, 1)
    await executions.claim(claim)
    await executions.checkpoint(claim, "so far", lease_ms=1)
    async with asyncio.timeout(60):
        while isinstance(answer := await executions.claim(Claim("j", 8, 1)), Taken):
            await asyncio.sleep(0.005)
    assert answer == Claimed("so far")


async def test_a_finished_job_stays_taken_for_a_moment_and_then_leaves_nothing_behind(redis: Redis) -> None:
    executions = Executions(redis)
    claim = Claim("j", 7, 1)
    await executions.claim(claim)
    await executions.finish(claim)
    assert isinstance(await executions.claim(Claim("j", 8, 1)), Taken)
    assert 0 < await redis.client.pttl(claim.key) <= 10_000


async def test_a_renewal_keeps_the_checkpoint(redis: Redis) -> None:
    executions = Executions(redis)
    claim = Claim("j", 7, 1)
    await executions.claim(claim)
    await executions.checkpoint(claim, "so far")
    assert await executions.checkpoint(claim, "")
    assert await executions.claim(Claim("j", 7, 2)) == Claimed("so far")


async def test_scripts_are_learned_again_by_a_server_that_forgot_them(redis: Redis) -> None:
    executions = Executions(redis)
    await executions.claim(Claim("a", 1, 1))
    await redis.client.script_flush()
    assert await executions.claim(Claim("b", 2, 1)) == Claimed(None)


async def test_a_redis_that_is_away_is_reported_as_such() -> None:
    away = Redis("redis://127.0.0.1:1/0")
    with pytest.raises(StateUnavailable, match="did not answer"):
        await Executions(away).claim(Claim("j", 1, 1))
    await away.close()
