from __future__ import annotations

import json
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest
import redis.asyncio as aioredis
from faststream.nats import TestNatsBroker
from nats.js.errors import APIError
from pydantic import SecretStr

from breakwater.config import parse_config
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.process.settings import Settings
from breakwater.kernel.redis.connection import Redis
from breakwater.kernel.types import format_time, usd_from_nano
from breakwater.limits.store.budget_counters import BudgetCounters
from breakwater.services.budget.app import build
from breakwater.services.budget.reconciler import Reconciler
from tests.flow.fixtures import StartPlane
from tests.flow.kit import Plane, model
from tests.helpers import FIRST, ZONE, all_acknowledged, deliver, until
from tests.servers import RunningServer

AGENTS = {"writer": {"model": "sim/m", "budget": {"daily_usd": 1, "enforcement": "soft", "soft_at_percent": [50, 80]}}}

BUDGET: dict[str, Any] = {"services": ("budget",), "budgets": {"timezone": ZONE.key}}


def attempt(name: str, nano: int | None, *, outcome: str = "success") -> bytes:
    now = format_time(datetime.now(UTC))
    fields: dict[str, Any] = {
        "attempt_id": f"{name}:1", "execution_id": name, "job_id": name, "agent": "writer", "number": 1,
        "model": "sim/m", "provider": "sim", "started_at": now, "completed_at": now,
        "duration_ms": 0, "outcome": outcome,
        "cause": "first", "cost": None if nano is None else usd_from_nano(nano), "cost_basis": "billed",
        "short_circuited": outcome == "short_circuited",
    }  # fmt: skip
    return json.dumps(fields).encode()


async def publish_attempt(plane: Plane, name: str, nano: int | None, *, outcome: str = "success") -> None:
    subject = subjects.attempt("writer", name, 1)
    await plane.jetstream.publish(subject, attempt(name, nano, outcome=outcome), headers=FIRST)


async def reported(plane: Plane) -> list[tuple[str, int, str]]:
    found = await plane.messages("EVENTS", "bw.budgets.>")
    return [(event["kind"], event["threshold_percent"], event["total"]) for event in found]


async def handled(plane: Plane) -> bool:
    return await all_acknowledged(plane.jetstream, "EVENTS", "budget")


async def field(plane: Plane | str, name: str) -> int:
    url = plane if isinstance(plane, str) else plane.environment["BREAKWATER_REDIS_URL"]
    client = aioredis.Redis.from_url(url, decode_responses=True)
    [key] = [key async for key in client.scan_iter("bw:limits:daily:*")]
    value = await client.hget(key, name)
    await client.aclose()
    return int(value or 0)


async def test_each_threshold_is_reported_once_and_a_jump_reports_all_it_passes(start_plane: StartPlane) -> None:
    async with start_plane({"sim/m": model()}, AGENTS, **BUDGET) as plane:
        await publish_attempt(plane, "a", 490_000_000)
        await until(lambda: handled(plane), what="the first settlement")
        assert await reported(plane) == []
        await publish_attempt(plane, "b", 20_000_000)
        await until(lambda: reported(plane), what="the first threshold")
        await publish_attempt(plane, "c", 600_000_000)
        await publish_attempt(plane, "d", 600_000_000)

        async def all_reported() -> bool:
            return len(await reported(plane)) >= 2

        await until(all_reported, what="all thresholds")
        await until(lambda: handled(plane), what="all settlements")
        assert [(kind, percent) for kind, percent, _ in await reported(plane)] == [
            ("soft_cap", 50),
            ("soft_cap", 80),
        ]
        assert (await reported(plane))[0][2] == "0.510000000"
        assert await field(plane, "spent:agent:writer") == 1_710_000_000


@pytest.mark.long(about_s=5)
async def test_two_thousand_replays_of_an_attempt_move_no_budget(start_plane: StartPlane) -> None:
    async with start_plane({"sim/m": model()}, AGENTS, **BUDGET) as plane:
        await publish_attempt(plane, "a", 1_500_000)
        own = subjects.attempt("writer", "a", 1)
        again, dearer = attempt("a", 1_500_000), attempt("a", 900_000_000)
        for number in range(500):
            other = subjects.attempt("writer", f"b{number}", 1)
            with suppress(APIError):  # the server itself refuses a second message on the subject
                await plane.jetstream.publish(own, dearer, headers=FIRST)
            for subject, data, headers in ((own, again, None), (own, dearer, {}), (other, again, FIRST)):
                await plane.jetstream.publish(subject, data, headers=headers)
        await until(lambda: handled(plane), what="all settlements")
        assert await field(plane, "spent:global") == 1_500_000
        assert await reported(plane) == []
        # Rebuilt from the log, too.
        redis = aioredis.Redis.from_url(plane.environment["BREAKWATER_REDIS_URL"])
        await redis.flushdb()
        await redis.aclose()
        await publish_attempt(plane, "c", 2_000_000)
        await until(lambda: handled(plane), what="the settlement after the loss")
        assert await field(plane, "spent:global") == 3_500_000


async def test_events_that_are_delivered_again_are_paid_once_by_any_number_of_services(start_plane: StartPlane) -> None:
    async with start_plane({"sim/m": model()}, AGENTS, services=()) as plane:
        for number in range(100):
            await publish_attempt(plane, f"j{number}", 7_000_000)
        subscription = await plane.jetstream.pull_subscribe_bind("budget", "EVENTS")
        for delivery in await subscription.fetch(100, timeout=60):
            await delivery.nak()
        for name in ("budget", "budget-2"):
            plane.start("budget", name)
        await until(lambda: handled(plane), what="all settlements")
        assert await field(plane, "spent:global") == 700_000_000
        assert await field(plane, "calls:global") == 100
        assert [percent for _, percent, _ in await reported(plane)] == [50]


async def test_an_attempt_that_made_no_call_costs_nothing_and_an_unknown_cost_is_no_zero(
    own_redis_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"providers": {"sim": {"base_url": "http://x"}}, "agents": AGENTS, "budgets": {"timezone": ZONE.key}}
    redis = Redis(own_redis_server.url)
    counters = BudgetCounters(redis, ZONE)
    assert await counters.fill(None, "log", 0, counters.periods(datetime.now(UTC)), {}, {})
    await redis.close()

    async def filled(*_: object) -> str:
        return "log"

    monkeypatch.setattr(Reconciler, "await_source", filled)
    service = build(Settings(redis_url=SecretStr(own_redis_server.url)), parse_config(json.dumps(config)))
    async with TestNatsBroker(service.broker) as broker:
        for number, (name, nano, outcome) in enumerate((("refused", 0, "short_circuited"), ("unknown", None, "error"))):
            subject, body = subjects.attempt("writer", name, 1), attempt(name, nano, outcome=outcome)
            await deliver(broker, Stream.EVENTS, subject, body, sequence=number + 1)
    assert await field(own_redis_server.url, "calls:global") == 1
    assert await field(own_redis_server.url, "unpriced:agent:writer") == 1
