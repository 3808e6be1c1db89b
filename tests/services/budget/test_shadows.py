"""Limits that are only tried, in the budget service: what they would have done is recorded, and nothing changes."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime

import pytest
from prometheus_client import CollectorRegistry

from breakwater.config import LiveConfig, parse_config
from breakwater.config.servers import bus_plan
from breakwater.jobs.contract.execution import Attempt
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.lookup import Lookup, StoredMessage
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.nats.pull import Pull
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.process import background
from breakwater.kernel.redis.connection import Redis
from breakwater.limits.metrics import BudgetMetrics
from breakwater.limits.rules.budget import periods_at
from breakwater.limits.store.budget_counters import BudgetCounters
from breakwater.limits.store.budgets import Budgets
from breakwater.records import schema
from breakwater.replay.store import shadow_limits_in
from breakwater.replay.tried_limits import TriedLimitReader
from breakwater.services.budget.handlers import BudgetHandler
from breakwater.services.budget.shadows import LimitShadows
from breakwater.services.sink import records
from tests.helpers import nats_client, until
from tests.records.samples import attempt
from tests.servers import RunningServer
from tests.services.failing_publisher import FailingPublisher

LOG = "log"
USD = 10**9
CONFIG = parse_config(
    json.dumps(
        {
            "providers": {"sim": {"base_url": "http://127.0.0.1:9/v1"}},
            "agents": {"writer": {"model": "sim/m", "budget": {"daily_usd": 1000, "enforcement": "hard"}}},
            "shadow": {
                "limits": [
                    {"scope": "agent:writer", "usd": 10, "per": "month"},
                    {"scope": "team:*", "usd": 2, "per": "day"},
                ]
            },
        }
    )
)


async def test_tried_limits_see_all_calls_and_refuse_none(
    own_nats_server: RunningServer, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    await provision(own_nats_server.url, bus_plan(CONFIG))
    zone = CONFIG.budgets.zone
    counters = BudgetCounters(redis, zone)
    await counters.fill(None, LOG, 0, counters.periods(datetime.now(UTC)), {}, {})

    async def filled(_: bool) -> str:
        return LOG

    async with nats_client(own_nats_server.url) as client:
        publisher, lookup = FailingPublisher(lambda: client, "tests"), Lookup(lambda: client)
        shadows = shadow_limits_in(redis)
        limit_shadows = LimitShadows(lambda: CONFIG.shadow_limits, shadows, publisher, zone)
        handler = BudgetHandler(
            LiveConfig(CONFIG).limits,
            Budgets(redis, zone),
            counters,
            publisher,
            lookup,
            filled,
            BudgetMetrics(CollectorRegistry()),
            limit_shadows,
        )
        attempts = Pull(lambda: client, Stream.EVENTS, "budget")
        now = datetime.now(UTC)

        async def handle(first: int, *usd: int) -> None:
            for number, cost in enumerate(usd, first):
                tried = attempt(f"job-{number}", agent="writer", model="sim/m", provider="sim", started_at=now)
                amounts = {"cost": cost * USD, "reserved": cost * USD, "reserved_at": now, "team": "ops"}
                tried = Attempt.model_validate(tried.model_dump() | amounts)
                subject = subjects.attempt("writer", tried.execution_id, 1)
                await publisher.event(subject, tried, id=tried.attempt_id, at=tried.completed_at, once=True)
            batch = [delivery for _ in usd for delivery in await attempts.fetch(1, 30, 0, batch=1)]
            await handler.handle(batch)

        async def stored_events() -> list[StoredMessage]:
            return [message async for message in lookup.scan(Stream.EVENTS, "bw.shadow-budgets.>")]

        async def reached() -> list[tuple[str, int, int]]:
            events = [json.loads(message.data) for message in await stored_events()]
            return sorted((event["scope"], event["threshold_percent"], event["refused"]) for event in events)

        async def reports(event: tuple[str, int, int]) -> bool:
            return event in await reached()

        await handle(1, 1, 4)  # in one batch
        await handle(3, 6)
        await handle(4, 2)
        assert await reached() == [("agent", 50, 0), ("agent", 100, 1), ("team", 50, 0), ("team", 100, 1)]
        # The last of a burst is reported although no call follows.
        monkeypatch.setattr("breakwater.services.budget.shadows.REPORT_EVERY_MS", 0)
        reporting = asyncio.create_task(limit_shadows.run())
        await until(lambda: reports(("team", 100, 3)))
        monkeypatch.undo()
        await handle(5, 4)
        await background.stop(reporting)
        assert ("team", 100, 4) in await reached()
        stored = await stored_events()
        assert all(json.loads(message.data)["shadow"] for message in stored)
        assert [message async for message in lookup.scan(Stream.EVENTS, "bw.budgets.>")] == []
        for message in stored:
            table, row = records.read(message.subject, message.data, {}, message.sequence, message.stored_at)
            assert table is schema.BUDGET_EVENTS
            values = dict(zip(table.columns, row, strict=True))
            assert (values["shadow"], values["refused"]) == (True, json.loads(message.data)["refused"])
        [monthly, daily] = await TriedLimitReader(lambda: CONFIG, shadows, lambda: now).listed(lambda _: True)
        assert (monthly.used, monthly.remaining, monthly.refused) == ("7.000000000", "3.000000000", 2)
        assert (daily.scope, daily.used, daily.refused) == ("team:*", None, None)
        [(spent, _)] = await counters.use([(periods_at(now, zone).day, "agent:writer", "usd")])
        assert spent == 17 * USD, "the real counters know nothing of it"
        await attempts.close()
