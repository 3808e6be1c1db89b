"""What is held for the jobs under way is kept by one task for all of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from time import monotonic
from typing import Any, cast

import pytest

from breakwater.jobs.held_claims import CancelSignal, ClaimLease
from breakwater.jobs.rules.workers import LIVENESS
from breakwater.jobs.store.executions import Claim, ClaimLostError, Executions, Taken
from breakwater.kernel.process import background
from breakwater.kernel.process.outage import Outages
from breakwater.kernel.redis.connection import Redis, StateUnavailableError
from breakwater.services.worker import leases
from breakwater.services.worker.leases import BUFFERED_S, STALL_S, Leases
from tests.helpers import until
from tests.servers import RunningServer


class CountedDelivery:
    """In place of a delivery: how often it was kept from being delivered again."""

    def __init__(self) -> None:
        self.kept = 0

    async def in_progress(self) -> None:
        self.kept += 1


OFTEN = replace(LIVENESS, renew_every_s=0.01)


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "ACK_WAIT_S", 0.03)


async def test_claims_are_renewed_while_their_jobs_run(redis_server: RunningServer) -> None:
    redis = Redis(redis_server.url)
    await redis.client.flushall()
    executions = Executions(redis, liveness=OFTEN)
    held = Leases(executions, Outages())
    claims, renewed = [Claim.new(name) for name in ("one", "two", "ended")], 0

    async def renew() -> None:
        nonlocal renewed
        renewed += 1

    for claim in claims:
        await executions.claim(claim)
        await redis.client.hset(claim.key, "lease_until", 1)
    held.claims |= {claims[0]: ClaimLease(CancelSignal("a"), 0.0), claims[1]: ClaimLease(CancelSignal("a"), 0.0, renew)}
    running = asyncio.create_task(held.run())
    try:
        await until(lambda: renewed > 1)
        for claim, is_renewed in zip(claims, (True, True, False), strict=True):
            other = await executions.claim(Claim.new(claim.execution_id))
            assert isinstance(other, Taken)
            assert (other.for_ms > LIVENESS.grace_ms) == is_renewed
        assert held.claims[claims[0]].lease_valid_until > monotonic()
    finally:
        await background.stop(running)
        await redis.close()


async def test_an_unexpected_error_ends_the_renewal_of_no_other_job(redis_server: RunningServer) -> None:
    redis = Redis(redis_server.url)
    await redis.client.flushall()
    executions, failures = Executions(redis, liveness=OFTEN), 0
    held, mine, other = Leases(executions, Outages()), Claim.new("mine"), Claim.new("mine")

    async def fail() -> None:
        nonlocal failures
        failures += 1
        raise ValueError("no error of Redis")

    await executions.claim(mine)
    held.claims[mine] = ClaimLease(CancelSignal("a"), 0.0, fail)
    running = asyncio.create_task(held.run())
    try:
        await until(lambda: failures > 1)
        await redis.client.hset(mine.key, "lease_until", 1)
        before = failures
        await until(lambda: failures > before + 1)
        taken = await executions.claim(other)
        assert isinstance(taken, Taken)
        assert taken.for_ms > LIVENESS.grace_ms
    finally:
        await background.stop(running)
        await redis.close()


async def test_deliveries_are_kept_also_while_redis_does_not_answer() -> None:
    class UnavailableError:
        liveness = OFTEN

        async def renew(self, *_: object) -> None:
            raise StateUnavailableError("no")

    executions: Any = UnavailableError()
    held, delivery, ended = Leases(executions, Outages()), CountedDelivery(), CountedDelivery()
    deliveries: Any = held.deliveries
    deliveries.add(delivery)
    running = asyncio.create_task(held.run())
    try:
        await until(lambda: delivery.kept > 3)
        deliveries.discard(delivery)
        kept = delivery.kept
        deliveries.add(ended)
        await until(lambda: ended.kept > 3)
        assert delivery.kept <= kept + 1
    finally:
        await background.stop(running)


class Clock:
    """A monotonic clock that stands until it is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_a_claim_is_asked_about_only_after_a_standstill_and_one_that_was_taken_over_is_lost(
    redis_server: RunningServer,
) -> None:
    redis, clock = Redis(redis_server.url), Clock()
    await redis.client.flushall()
    executions, mine, other = Executions(redis, liveness=OFTEN), Claim.new("j"), Claim.new("j")
    held = Leases(executions, Outages(), clock)
    await executions.claim(mine)
    with held.renewing(mine, ClaimLease(CancelSignal("a")), clock.now):
        await redis.client.hset(mine.key, "token", other.token)
        await held.confirm(mine)  # not asked: so soon nobody can have taken it
        clock.now += LIVENESS.claim_lease_s
        with pytest.raises(ClaimLostError):
            await held.confirm(mine)
        await redis.client.hset(mine.key, "token", mine.token)
        await held.confirm(mine)
        await redis.client.hset(mine.key, "token", other.token)
        await held.confirm(mine)  # for it was confirmed just now
    assert not held.claims
    await redis.close()


async def test_after_a_standstill_deliveries_may_be_late_for_a_while() -> None:
    clock = Clock()
    held = Leases(Executions(cast(Redis, None)), Outages(), clock)  # Redis is not asked

    async def pass_seconds(count: float) -> None:
        for _ in range(round(count)):
            clock.now += 1
            await held._tick()

    await pass_seconds(10)
    assert not held.may_be_late()
    clock.now += STALL_S + 1
    assert held.may_be_late(), "before the clock is looked at again"
    await held._tick()
    await pass_seconds(BUFFERED_S - 1)
    assert held.may_be_late()
    await pass_seconds(2)
    assert not held.may_be_late()
