"""What is held for the jobs under way is kept by one task for all of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from breakwater import background
from breakwater.outage import Outages
from breakwater.state.connection import Redis, StateUnavailable
from breakwater.state.executions import Claim, Executions, Taken
from services.worker import leases
from services.worker.leases import Leases
from tests.helpers import until
from tests.servers import RunningServer


class CountedDelivery:
    """In place of a delivery: how often it was kept from being delivered again."""

    def __init__(self) -> None:
        self.kept = 0

    async def in_progress(self) -> None:
        self.kept += 1


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "ACK_WAIT_S", 0.03)
    monkeypatch.setattr(leases, "RENEW_EVERY_S", 0.01)


async def test_claims_are_renewed_while_their_jobs_run(redis_server: RunningServer) -> None:
    redis = Redis(redis_server.url)
    await redis.client.flushall()
    executions = Executions(redis)
    held = Leases(executions, Outages())
    claims, renewed = [Claim("one", 1, 1), Claim("two", 2, 1), Claim("ended", 3, 1)], 0

    async def renew() -> None:
        nonlocal renewed
        renewed += 1

    for claim in claims:
        await executions.claim(claim)
        await executions.checkpoint(claim, "", lease_ms=1)
    held.claims |= {claims[0]: None, claims[1]: renew}
    running = asyncio.create_task(held.run())
    try:
        await until(lambda: renewed > 1)
        for name in ("one", "two"):
            other = await executions.claim(Claim(name, 9, 1))
            assert isinstance(other, Taken)
            assert other.for_ms > 10_000
        assert not isinstance(await executions.claim(Claim("ended", 9, 1)), Taken)
    finally:
        await background.stop(running)
        await redis.close()


async def test_an_unexpected_error_ends_the_renewal_of_no_other_job(redis_server: RunningServer) -> None:
    redis = Redis(redis_server.url)
    await redis.client.flushall()
    executions, failures = Executions(redis), 0
    held, mine, other = Leases(executions, Outages()), Claim("mine", 1, 1), Claim("mine", 9, 1)

    async def fail() -> None:
        nonlocal failures
        failures += 1
        raise ValueError("no error of Redis")

    await executions.claim(mine)
    held.claims[mine] = fail
    running = asyncio.create_task(held.run())
    try:
        await until(lambda: failures > 1)
        await executions.checkpoint(mine, "", lease_ms=1)
        before = failures
        await until(lambda: failures > before + 1)
        taken = await executions.claim(other)
        assert isinstance(taken, Taken)
        assert taken.for_ms > 10_000
    finally:
        await background.stop(running)
        await redis.close()


async def test_deliveries_are_kept_also_while_redis_does_not_answer() -> None:
    class Unavailable:
        async def renew(self, *_: object) -> None:
            raise StateUnavailable("no")

    executions: Any = Unavailable()
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
