"""Heartbeats of workers, against the real Redis."""

from __future__ import annotations

from breakwater.jobs.rules.workers import LIVENESS
from breakwater.jobs.store.executions import Claim, Claimed, Executions, Taken
from breakwater.jobs.store.workers import FORGET_MS, Workers
from breakwater.kernel.redis.connection import Redis

KEY = "bw:workers"


async def silent_for(redis: Redis, worker: str, ms: int) -> None:
    """Makes a heartbeat older, instead of waiting."""
    at, _, heard_on = str(await redis.client.hget(KEY, worker)).partition(" ")
    await redis.client.hset(KEY, worker, f"{int(at) - ms} {heard_on}")


async def test_a_heartbeat_names_the_others_that_are_late_until_they_are_heard_again_or_forgotten(redis: Redis) -> None:
    workers = Workers(redis)
    assert await workers.beat("a", "nats-1") == (1, [])
    assert await workers.beat("b", "") == (2, [])
    await silent_for(redis, "a", LIVENESS.late_ms + 1)
    running, [late] = await workers.beat("b", "nats-2")
    assert running == 1
    assert (late.id, late.heard_on) == ("a", "nats-1")
    assert LIVENESS.late_s < late.silent_s < LIVENESS.late_s + 1
    assert await workers.running() == {"b": "nats-2"}
    assert await workers.beat("a", "nats-1") == (2, []), "nobody is late for itself"
    assert await workers.beat("b", "nats-2") == (2, [])
    await workers.forget("a")
    assert await workers.running() == {"b": "nats-2"}
    await silent_for(redis, "b", FORGET_MS + 1)
    assert await workers.beat("a", "nats-1") == (1, [])
    assert await workers.running() == {"a": "nats-1"}


async def test_only_the_claims_of_a_dead_worker_are_ended_and_it_gets_none_back(redis: Redis) -> None:
    executions = Executions(redis)
    dead, longer, alive = Claim.new("e1", "w-1"), Claim.new("e2", "w-12"), Claim.new("e3", "w-2")
    for claim in (dead, longer, alive):
        await executions.claim(claim)
        await executions.checkpoint(claim, '{"so": "far"}')
    assert await executions.free("w-1", ["e1", "e2", "e3", "e4"]) == ["freed", "held", "held", "unclaimed"]
    assert await executions.checkpoint(dead, "") is None, "a worker that was not dead after all has lost it"
    assert await executions.claim(Claim.new("e1", "w-2")) == Claimed('{"so": "far"}')
    assert await executions.free("w-1", ["e1"]) == ["held"]
    assert isinstance(await executions.claim(Claim.new("e2", "w-2")), Taken)
