"""Shadows of breakers in the services: what they would have done is recorded, and nothing else changes."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from breakwater.breakers.api import shadow_statuses
from breakwater.breakers.metrics import BreakerMetrics
from breakwater.breakers.rules.breaker import BreakerKey
from breakwater.breakers.store import Breakers, shadows_in
from breakwater.config import parse_config
from breakwater.config.servers import bus_plan
from breakwater.health.store import Healths
from breakwater.jobs.contract.execution import Attempt
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.pull import Pull
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.redis.connection import Redis
from breakwater.kernel.telemetry.metrics import CollectorRegistry
from breakwater.records.metrics import SinkMetrics
from breakwater.services.breaker.handlers import BreakerHandler
from breakwater.services.sink.handlers import Sink
from tests.helpers import nats_client
from tests.records.samples import attempt, new_database
from tests.servers import RunningServer
from tests.services.failing_publisher import FailingPublisher

AGENT = {"model": "sim/m", "breaker": {"consecutive_failures": 3}}
CONFIG = parse_config(
    json.dumps(
        {
            "providers": {"sim": {"base_url": "http://127.0.0.1:9/v1"}},
            "agents": {"writer": {**AGENT, "shadow": {"breaker": {"consecutive_failures": 1}}}, "plain": AGENT},
        }
    )
)
KEY = BreakerKey("writer", "sim/m")


async def is_log(_: str | None) -> bool:
    return True


@dataclass(frozen=True)
class Bus:
    """The bus, with a breaker service's handler that reads it."""

    handler: BreakerHandler
    publisher: Publisher
    lookup: Lookup
    attempts: Pull
    records: Pull

    async def attempted(self, agent: str, number: int, outcome: str, begins_s: float, **more: Any) -> None:
        """Publishes an attempt, and has the breaker service take it into account."""
        begins = datetime.now(UTC) + timedelta(seconds=begins_s)
        tried = attempt(f"{agent}-{number}", agent=agent, model="sim/m", provider="sim", started_at=begins)
        more = {"outcome": outcome, "counts_for_breaker": outcome == "error", "reserved_at": begins, **more}
        tried = Attempt.model_validate(tried.model_dump() | more)
        subject = subjects.attempt(agent, tried.execution_id, 1)
        await self.publisher.event(subject, tried, id=tried.attempt_id, at=tried.completed_at, once=True)
        await self.handler.handle(await self.attempts.fetch(1, 30, 0, batch=1), is_log)

    async def transitions(self, kind: str) -> list[tuple[str, str, bool, int | None]]:
        events = [json.loads(message.data) async for message in self.lookup.scan(Stream.EVENTS, f"bw.{kind}.>")]
        return [(event["agent"], event["to_state"], event["shadow"], event["refused"]) for event in events]


@pytest.fixture
async def bus(own_nats_server: RunningServer, redis: Redis) -> AsyncGenerator[Bus]:
    await provision(own_nats_server.url, bus_plan(CONFIG))
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(nats_client(own_nats_server.url))
        publisher = FailingPublisher(lambda: client, "tests")
        metrics = BreakerMetrics(CollectorRegistry())
        pulls = [Pull(lambda: client, Stream.EVENTS, name) for name in ("breaker", "sink-events")]
        for pull in pulls:
            stack.push_async_callback(pull.close)
        handler = BreakerHandler(CONFIG, Breakers(redis), shadows_in(redis), Healths(redis), publisher, metrics)
        yield Bus(handler, publisher, Lookup(lambda: client), *pulls)


async def test_a_shadow_opens_beside_a_breaker_that_stays_closed_and_is_recorded_apart(
    bus: Bus, redis: Redis, clickhouse_server: RunningServer
) -> None:
    for agent in ("writer", "plain"):
        await bus.attempted(agent, 1, "error", -60)
        await bus.attempted(agent, 2, "success", -60)  # was in flight
        await bus.attempted(agent, 3, "success", 0)
        await bus.attempted(agent, 4, "short_circuited", 0, short_circuited=True)
        await bus.attempted(agent, 5, "success", 600)  # after the cool-down: the probe
    assert await bus.transitions("breakers") == []
    expected = [("writer", "open", True, 0), ("writer", "half_open", True, 1), ("writer", "closed", True, 0)]
    assert await bus.transitions("shadow-breakers") == expected
    assert await redis.client.keys("bw:shadow*") == [f"bw:shadow-breaker:{KEY.name}"]
    [status] = await shadow_statuses(CONFIG, shadows_in(redis))
    assert (status.agent, status.state, status.refused, status.version) == ("writer", "closed", 1, 3)
    async with new_database(clickhouse_server.url) as analytics:
        sink = Sink(analytics, bus.publisher, lambda: datetime.now(UTC), SinkMetrics())
        stored = 0
        while stored < 13:
            batch = await bus.records.fetch(100, 30, 0, batch=100)
            await sink.store(batch)
            stored += len(batch)
        columns = "agent, to_state, shadow, refused"
        rows = await analytics.query(f"SELECT {columns} FROM breaker_transitions FINAL ORDER BY version")
        assert [tuple(row) for row in rows.rows] == expected
        assert (await analytics.query("SELECT count() FROM breaker_openings")).rows[0][0] == 0
    await bus.handler.forget_shadows()
    [status] = await shadow_statuses(CONFIG, shadows_in(redis))
    assert (status.state, status.refused, status.version) == ("closed", 0, 0)
