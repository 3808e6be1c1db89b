"""Which thresholds of a budget are announced: by what is spent, and by what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast
from zoneinfo import ZoneInfo

import pytest
from prometheus_client import CollectorRegistry

from breakwater.jobs.contract.execution import Attempt
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.delivery import Delivery
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.redis.connection import Redis
from breakwater.limits.contract import BudgetEvent
from breakwater.limits.metrics import BudgetMetrics
from breakwater.limits.rules.budget import LimitTable, periods_at
from breakwater.limits.rules.limit import Limit
from breakwater.limits.settings import Caps
from breakwater.limits.store.budget_counters import BudgetCounters
from breakwater.limits.store.budgets import Budgets
from breakwater.services.budget.handlers import BudgetHandler
from tests.helpers import FIRST
from tests.limits.limit_tables import limit as budget_limit
from tests.limits.limit_tables import limit_table, with_raise
from tests.records.test_messages import attempt

ZONE = ZoneInfo("UTC")
LOG = "log"
USD = 10**9


class Heard:
    """A publisher that keeps what it is given."""

    def __init__(self) -> None:
        self.events: list[BudgetEvent] = []

    async def event(self, subject: str, event: BudgetEvent, *, id: str, at: datetime) -> None:  # noqa: A002
        assert subject == subjects.budget(event.scope, event.window)
        assert (id, at) == (event.event_id, event.at)
        self.events.append(event)


class Connection:
    """A connection that is away, and keeps the subjects on which is published."""

    is_connected = False

    def __init__(self) -> None:
        self.subjects: list[str] = []

    async def publish(self, subject: str) -> None:
        self.subjects.append(subject)


class Delivered:
    """A delivery of an attempt, without a server."""

    def __init__(self, client: Connection, sequence: int, sent: Attempt) -> None:
        self.client, self.ack_subject = client, f"ack.{sequence}"
        self.sequence, self.data = sequence, sent.json_bytes()
        self.subject, self.headers = subjects.attempt(sent.agent, sent.execution_id, sent.number), FIRST

    async def in_progress(self) -> None:
        """Nobody waits for it."""


class Service:
    """A budget handler whose counters are there."""

    def __init__(self, redis: Redis, caps: Callable[[], Caps], limits: Sequence[Limit] = ()) -> None:
        self.counters, self._heard, self._sequence = BudgetCounters(redis, ZONE), Heard(), 0

        async def filled(_: bool) -> str:
            return LOG

        async def fresh() -> None:
            assert await self.counters.fill(None, LOG, 0, self.counters.periods(datetime.now(UTC)), {}, {})

        self.start = fresh
        self._raise: tuple[Limit, int, dict[str, Any]] | None = None

        def table() -> LimitTable:
            table = limit_table(None, {"writer": caps()}, {}, limits)
            if self._raise is None:
                return table
            of_limit, amount, fields = self._raise
            return with_raise(table, of_limit, amount, **fields)

        self._handler = BudgetHandler(
            table,
            Budgets(redis, ZONE),
            self.counters,
            cast(Publisher, self._heard),
            cast(Lookup, None),
            filled,
            BudgetMetrics(CollectorRegistry()),
        )

    async def handle(self, attempts: Sequence[Attempt]) -> None:
        client = Connection()
        batch = [Delivered(client, self._sequence + number, one) for number, one in enumerate(attempts, start=1)]
        self._sequence += len(batch)
        await self._handler.handle(cast(list[Delivery], batch))
        assert client.subjects == [one.ack_subject for one in batch]

    async def spends(self, nano: int, at: datetime | None = None) -> list[int]:
        """A call that costs so much; returns what is announced of it."""
        return await self._reported([self._attempt(cost=nano, cost_basis="billed", reserved_at=at)])

    async def refuses(self, cap: int | None, times: int = 1, by: str = "agent:writer/daily", **names: Any) -> list[int]:
        """The cap refuses calls, which made none; returns what is announced of them."""
        refused: dict[str, Any] = {
            "outcome": "short_circuited",
            "short_circuited": True,
            "cost": 0,
            "cost_basis": "billed",
        }
        refused |= {"refused_by": by, "refused_cap": cap}
        return await self._reported([self._attempt(**refused, **names) for _ in range(times)])

    async def _reported(self, attempts: Sequence[Attempt]) -> list[int]:
        before = len(self._heard.events)
        await self.handle(attempts)
        return [event.threshold_percent or 0 for event in self._heard.events[before:]]

    def _attempt(self, **fields: Any) -> Attempt:
        now, name = datetime.now(UTC), f"j{self._sequence + 1}"
        ids = {"attempt_id": f"{name}:1", "execution_id": name, "job_id": name, "agent": "writer"}
        return attempt(**ids, started_at=now, completed_at=now, **fields)

    @property
    def last(self) -> BudgetEvent:
        return self._heard.events[-1]

    def raise_to(self, limit: int, configured: int, **fields: Any) -> None:
        of_writer = budget_limit("agent:writer", "daily", configured)
        self._raise = replace(of_writer, id="agents.writer.budget.daily_usd"), limit, fields


def hard(limit: int) -> Caps:
    return Caps.model_construct(daily_usd=limit, enforcement="hard")


async def started(redis: Redis, caps: Callable[[], Caps] = lambda: hard(10 * USD)) -> Service:
    service = Service(redis, caps)
    await service.start()
    return service


async def test_a_call_that_never_fits_reports_nothing_and_silences_nothing(redis: Redis) -> None:
    service = await started(redis)
    assert await service.refuses(None) == []
    assert [await service.spends(nano * USD) for nano in (6, 3, 1)] == [[50], [80], [100]]


async def test_a_cap_that_refuses_is_reported_once_and_the_thresholds_below_it_when_they_are_spent(
    redis: Redis,
) -> None:
    service = await started(redis)
    assert await service.refuses(10 * USD, times=3) == [100]
    assert (service.last.kind, service.last.limit, service.last.total) == ("hard_cap", 10 * USD, 0)
    assert await service.refuses(10 * USD) == []
    assert [await service.spends(nano * USD) for nano in (4, 1, 3, 2)] == [[], [50], [80], []]


@pytest.mark.parametrize("by", ["a person", "the config"])
async def test_a_refusal_by_a_cap_that_was_raised_since_reports_nothing(redis: Redis, by: str) -> None:
    limit = 10 * USD
    service = await started(redis, lambda: hard(limit))
    assert await service.spends(10 * USD) == [50, 80, 100]
    if by == "a person":
        service.raise_to(100 * USD, limit)
    else:
        limit = 100 * USD
    assert await service.refuses(10 * USD) == []
    assert [await service.spends(nano * USD) for nano in (39, 1, 30, 20)] == [[], [50], [80], [100]]
    assert await service.refuses(100 * USD) == []


async def test_a_limit_that_refuses_is_reported_by_a_service_that_has_settled_nothing_yet(redis: Redis) -> None:
    by_key = budget_limit("key:*", "weekly", 10 * USD, thresholds=(100,))
    service = Service(redis, lambda: hard(10 * USD), [by_key])
    await service.start()
    assert await service.refuses(10 * USD, by="key:bot/weekly", submitted_by="bot") == [100]


async def test_a_refusal_by_a_raised_cap_reports_that_one(redis: Redis) -> None:
    service = await started(redis)
    service.raise_to(20 * USD, 10 * USD)
    assert await service.refuses(20 * USD) == [100]
    assert service.last.limit == 20 * USD


@pytest.mark.parametrize("is_raised", [True, False])
async def test_of_a_day_that_is_over_the_limit_counts_as_it_was_raised_then(redis: Redis, is_raised: bool) -> None:
    service = await started(redis)
    today = datetime.fromtimestamp(periods_at(datetime.now(UTC), ZONE).day.start_ms / 1000, UTC)
    yesterday = {"at": today - timedelta(hours=9), "until": today}
    this_morning = {"at": today, "until": today + timedelta(days=1)}
    service.raise_to(20 * USD, 10 * USD, **(yesterday if is_raised else this_morning))
    late = today - timedelta(minutes=1)
    assert await service.spends(11 * USD, at=late) == ([50] if is_raised else [50, 80, 100])
    assert service.last.limit == (20 if is_raised else 10) * USD


async def test_a_cap_of_nothing_reports_that_it_refuses(redis: Redis) -> None:
    service = await started(redis, lambda: hard(0))
    assert await service.spends(USD) == []
    assert await service.refuses(0) == [100]
    assert (service.last.kind, service.last.limit, service.last.total) == ("hard_cap", 0, USD)
    assert await service.refuses(0) == []
