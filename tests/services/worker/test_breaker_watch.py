"""Whether a worker says that nobody looks after the breakers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest_asyncio
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs
from structlog.typing import EventDict

from breakwater.breakers.gate import BreakerWatch
from breakwater.breakers.store import Breakers
from breakwater.jobs.metrics import WorkerMetrics
from breakwater.kernel.process import background
from breakwater.kernel.redis.connection import Redis
from tests.helpers import until
from tests.servers import RunningServer

EVERY_S = 0.01
LOOKS_S = 0.3
"""Many looks; for what must not happen."""


@pytest_asyncio.fixture
async def redis(own_redis_server: RunningServer) -> AsyncGenerator[Redis]:
    connection = Redis(own_redis_server.url)
    yield connection
    await connection.close()


@asynccontextmanager
async def watching(redis: Redis, grace_s: float, registry: CollectorRegistry) -> AsyncGenerator[list[EventDict]]:
    with capture_logs() as logs:
        watch = asyncio.create_task(BreakerWatch(Breakers(redis), WorkerMetrics([], registry), grace_s).run(EVERY_S))
        try:
            yield logs
            assert not watch.done()
        finally:
            await background.stop(watch)


async def gone(redis: Redis) -> None:
    """As when a breaker service has been silent for long."""
    await redis.client.flushall()


async def test_that_nobody_looks_after_the_breakers_is_reported_once_and_so_is_that_somebody_does(redis: Redis) -> None:
    registry = CollectorRegistry()
    async with watching(redis, 0.0, registry) as logs:
        await until(lambda: _reported(logs, 1), what="a warning")
        assert (logs[0]["event"], logs[0]["what"], logs[0]["log_level"]) == ("unavailable", "breakers", "warning")
        assert "python -m breakwater.services breaker" in logs[0]["error"]
        assert registry.get_sample_value("breakwater_breaker_service_alive") == 0
        await asyncio.sleep(LOOKS_S)
        await Breakers(redis).beat()
        await until(lambda: _reported(logs, 2), what="the all-clear")
        assert (logs[1]["event"], logs[1]["what"]) == ("available_again", "breakers")
        assert registry.get_sample_value("breakwater_breaker_service_alive") == 1
        await gone(redis)
        await until(lambda: _reported(logs, 3), what="a second warning")
        assert logs[2]["event"] == "unavailable"


async def test_a_breaker_service_may_take_its_time_to_begin(redis: Redis) -> None:
    async with watching(redis, 60.0, CollectorRegistry()) as logs:
        await asyncio.sleep(LOOKS_S)
        assert logs == []
        await Breakers(redis).beat()
        await asyncio.sleep(LOOKS_S)
        assert logs == []
        # It has begun, so there is nothing to be patient with.
        await gone(redis)
        await until(lambda: _reported(logs, 1), what="a warning")


async def test_while_redis_is_away_nothing_is_said_and_a_breaker_service_may_come_back_after_us(
    redis: Redis, own_redis_server: RunningServer
) -> None:
    async with watching(redis, 60.0, CollectorRegistry()) as logs:
        await Breakers(redis).beat()
        await asyncio.sleep(LOOKS_S)
        for key in await redis.client.keys():
            await redis.client.pexpire(key, 1_000)
        own_redis_server.kill()
        await asyncio.sleep(1 + LOOKS_S)  # in which the last sign of life of the breaker service runs out
        await own_redis_server.restart_async()
        await asyncio.sleep(LOOKS_S)
        assert logs == []


async def _reported(logs: list[EventDict], number: int) -> bool:
    return len(logs) >= number
