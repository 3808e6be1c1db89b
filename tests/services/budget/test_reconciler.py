"""The counters after losses: of Redis, of ClickHouse, of the log. Nothing that is spent becomes free again by them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import nats
import pytest
import pytest_asyncio
from nats.aio.client import Client
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from breakwater.jobs.contract.execution import Attempt
from breakwater.kernel.clickhouse.client import Analytics, connect
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.lookup import Lookup, StoredMessage
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.nats.topology import Plan
from breakwater.kernel.process import background
from breakwater.kernel.redis.connection import KEPT_SINCE, Redis, StateUnavailableError
from breakwater.limits.contract import BudgetEvent
from breakwater.limits.metrics import BudgetMetrics
from breakwater.limits.rules.budget import TOTAL, LimitTable, Period, periods_at
from breakwater.limits.rules.scopes import CallNames, Dimensions, key_of, parse_scope
from breakwater.limits.settings import Caps
from breakwater.limits.store.budget_counters import BudgetCounters
from breakwater.limits.store.budgets import FILLED, Budgets, NotFilledError, Reserved, Settlement, period_key
from breakwater.records import schema
from breakwater.records.reconciliation import BudgetComparison, RecordedSpend, compare
from breakwater.records.rows import StoredRow, attempt_row
from breakwater.services.budget import reconciler as reconciler_module
from breakwater.services.budget.handlers import BudgetHandler
from breakwater.services.budget.reconciler import Reconciler
from breakwater.services.sink.closing import SpendCloser
from tests.helpers import FIRST, until
from tests.limits.limit_tables import limit, limit_table
from tests.records.samples import new_database
from tests.records.test_messages import attempt
from tests.servers import RunningServer

ZONE = ZoneInfo("Europe/Berlin")
PLAN = Plan(agents={"writer": 1})
CAPS = limit_table(None, {"writer": Caps.model_construct(daily_usd=10**9, enforcement="hard")})
NOWHERE = "http://127.0.0.1:1/nowhere"
"""Nothing listens there."""
COSTS = (1, 20, 300, 4_000, 50_000)


def now() -> datetime:
    return datetime.now(UTC)


def caps() -> LimitTable:
    return CAPS


@dataclass
class BudgetPlane:
    """All that has a part in counting spend, and what was spent so far."""

    nats_url: str
    client: Client
    redis: Redis
    analytics: Analytics
    budgets: Budgets
    counters: BudgetCounters
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    has_returned: bool = True
    answers_missed: int = 0

    async def have_returned(self, _since_ms: int) -> bool:
        if self.answers_missed:
            self.answers_missed -= 1
            raise StateUnavailableError("Redis did not answer: for the test")
        return self.has_returned

    def record(self, analytics: Analytics | None = None) -> RecordedSpend:
        return RecordedSpend(lambda: self.client, analytics or self.analytics, ZONE)

    def reconciler(
        self,
        *,
        analytics: Analytics | None = None,
        lookup: Lookup | None = None,
        of_caps: Callable[[], LimitTable] = caps,
    ) -> Reconciler:
        return Reconciler(
            of_caps,
            self.counters,
            self.record(analytics),
            Publisher(lambda: self.client, "budget"),
            lookup or self.lookup,
            BudgetMetrics(CollectorRegistry()),
            compare_every_s=lambda: 3600,
            have_returned=self.have_returned,
            grace_s=0,
        )

    @property
    def lookup(self) -> Lookup:
        return Lookup(lambda: self.client)

    @asynccontextmanager
    async def kept(
        self,
        reconciler: Reconciler,
        sweep: Callable[[str], Awaitable[None]] | None = None,
        settle_ended: Callable[[str], Awaitable[None]] | None = None,
    ) -> AsyncGenerator[None]:
        """While it looks after the counters."""

        async def nothing(_: str) -> None:
            """No lease has ended."""

        task = asyncio.create_task(reconciler.run(sweep or nothing, settle_ended))
        try:
            yield
        finally:
            await background.stop(task)

    async def fill(self) -> str:
        """Makes the counters of a plane that is new."""
        reconciler = self.reconciler()
        async with self.kept(reconciler):
            return await reconciler.await_source(False)

    async def publish_attempt(self, cost: int, **names: Any) -> int:
        """An attempt, on the log; gives its sequence."""
        name, at = f"j{len(self.attempts) + 1}", now()
        published = attempt(
            attempt_id=f"{name}:1",
            execution_id=name,
            job_id=name,
            agent="writer",
            cost=cost,
            cost_basis="billed",
            started_at=at,
            completed_at=at,
            **names,
        )
        self.attempts.append(published)
        subject = subjects.attempt("writer", name, 1)
        ack = await self.client.jetstream().publish(subject, published.json_bytes(), headers=FIRST)
        return ack.seq

    async def spend(self, *costs: int, stored: bool = True, **names: Any) -> None:
        """Attempts as the budget service and the sink handle them: counted, stored, and acknowledged."""
        log = (await self.lookup.facts(Stream.EVENTS)).identity
        rows: list[StoredRow] = []
        for cost in costs:
            sequence, published = await self.publish_attempt(cost, **names), self.attempts[-1]
            await self.budgets.settle([Settlement.of(sequence, published)], log)
            rows.append(attempt_row(published, sequence, now()))
        if stored:
            await self.analytics.insert(schema.ATTEMPTS, rows)
        for consumer in ("budget", "sink-events"):
            subscription = await self.client.jetstream().pull_subscribe_bind(consumer, "EVENTS")
            for message in await subscription.fetch(len(costs), timeout=60):
                await message.ack_sync()
            await subscription.unsubscribe()

    async def trim(self, kept: int) -> None:
        """The log loses its oldest events, as by its limits."""
        facts = await self.lookup.facts(Stream.EVENTS)
        await self.client.jetstream().purge_stream("EVENTS", seq=facts.last - kept + 1)

    async def new_log(self) -> None:
        """EVENTS is deleted, and made again."""
        await self.client.jetstream().delete_stream("EVENTS")
        await provision(self.nats_url, PLAN)

    async def change(self, add: int, key: str = "agent:writer") -> None:
        """A counter of the month is edited."""
        month = self.month
        await self.redis.client.hincrby(period_key("monthly", month.name), f"spent:{key}", add)

    @property
    def month(self) -> Period:
        return periods_at(now(), ZONE).month

    async def spent(self, key: str = "agent:writer") -> int:
        """Of the month."""
        return (await self.counters.used(self.month, key))[key]

    async def compared(self) -> BudgetComparison:
        return await compare(self.record(), self.counters, now())

    async def published(self) -> list[BudgetEvent]:
        found = [one async for one in Lookup(lambda: self.client).scan(Stream.EVENTS, "bw.budgets.>")]
        return [BudgetEvent.model_validate_json(one.data) for one in found]


@pytest_asyncio.fixture
async def plane(
    own_nats_server: RunningServer,
    redis: Redis,
    clickhouse_server: RunningServer,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncGenerator[BudgetPlane]:
    monkeypatch.setattr(reconciler_module, "CHECK_EVERY_S", 0.02)
    monkeypatch.setattr(reconciler_module, "SWEEP_EVERY_S", 0.02)
    await provision(own_nats_server.url, PLAN)
    client = await nats.connect(own_nats_server.url)
    async with new_database(clickhouse_server.url) as analytics:
        yield BudgetPlane(
            own_nats_server.url, client, redis, analytics, Budgets(redis, ZONE), BudgetCounters(redis, ZONE)
        )  # fmt: skip
    await client.close()


def events_of(logs: list[Any], name: str) -> list[Any]:
    return [entry for entry in logs if entry["event"] == name]


# ClickHouse loses rows


@pytest.mark.parametrize("since", [False, True])
async def test_a_clickhouse_that_was_emptied_takes_nothing_away_while_the_log_has_it(
    plane: BudgetPlane, since: bool
) -> None:
    await plane.fill()
    await plane.spend(*COSTS)
    await plane.analytics.execute("TRUNCATE TABLE attempts")
    # What it is given from then on must not make it seem to have all before.
    if since:
        await plane.spend(600_000)
    found = await plane.reconciler().reconcile()
    assert found is not None
    assert found.reconciliation().equal
    assert await plane.spent() == sum(COSTS) + (600_000 if since else 0)
    assert await plane.published() == []


async def test_counters_are_made_from_the_log_where_clickhouse_lacks_what_the_log_has(plane: BudgetPlane) -> None:
    await plane.fill()
    await plane.spend(*COSTS)
    await plane.analytics.execute("TRUNCATE TABLE attempts")
    await plane.spend(600_000)
    await plane.redis.client.flushall()
    with capture_logs() as logs:
        await plane.fill()
    assert await plane.spent() == sum(COSTS) + 600_000
    assert events_of(logs, "clickhouse_lacks_rows")


async def test_what_neither_the_log_nor_clickhouse_has_any_more_stays_spent_and_is_reported(plane: BudgetPlane) -> None:
    await plane.fill()
    await plane.spend(*COSTS)
    await plane.analytics.execute("TRUNCATE TABLE attempts")
    await plane.trim(2)
    with capture_logs() as logs:
        found = await plane.reconciler().reconcile()
    assert found is not None
    [warning] = events_of(logs, "budgets_not_repaired")
    day, month = periods_at(now(), ZONE).day.name, plane.month.name
    assert warning["budgets"] == sorted(
        f"{key} of {name}" for name in (day, month) for key in ("global", "agent:writer")
    )
    lost, left = sum(COSTS[:-2]), sum(COSTS[-2:])
    for shown in (found.reconciliation(), (await plane.compared()).reconciliation()):
        assert not shown.equal
        assert {(one.budget, one.counted, one.recorded, one.difference) for one in shown.budgets} == {
            (f"{key}/{window}", sum(COSTS), left, lost)
            for key in ("global", "agent:writer")
            for window in ("daily", "monthly")
        }
    assert await plane.spent() == await plane.spent("global") == sum(COSTS)
    assert await plane.published() == []


async def test_tokens_and_calls_without_a_cost_stay_counted_where_the_record_has_lost_them(plane: BudgetPlane) -> None:
    await plane.fill()
    await plane.spend(0, 0, 0, 0, input_tokens=50, output_tokens=10)
    await plane.analytics.execute("TRUNCATE TABLE attempts")
    await plane.trim(2)
    with capture_logs() as logs:
        await plane.reconciler().reconcile()
    assert events_of(logs, "budgets_not_repaired")
    assert await plane.counters.used(plane.month, "agent:writer", "tokens") == {"agent:writer": 240}
    assert await plane.counters.used(plane.month, "agent:writer", "requests") == {"agent:writer": 4}


async def test_what_clickhouse_has_of_a_log_that_was_trimmed_is_no_difference(plane: BudgetPlane) -> None:
    await plane.fill()
    await plane.spend(*COSTS)
    await plane.trim(2)
    found = await plane.reconciler().reconcile()
    assert found is not None
    assert found.reconciliation().equal


# Redis has another primary


async def test_what_another_primary_lacks_is_counted_again_before_a_call_is_made(plane: BudgetPlane) -> None:
    log = await plane.fill()
    await plane.spend(*COSTS)
    lost, published = await plane.publish_attempt(600_000), plane.attempts[-1]
    # Settled and acknowledged, but the replica had only received the reservation.
    counters = CAPS.counters(CallNames("writer"))
    command = plane.budgets.reserve_command(
        published.attempt_id, CallNames("writer"), 700_000, counters, now=now(), lease_ms=600_000
    )
    await plane.redis.run([command])
    for consumer in ("budget", "sink-events"):
        subscription = await plane.client.jetstream().pull_subscribe_bind(consumer, "EVENTS")
        [message] = await subscription.fetch(1, timeout=60)
        await message.ack_sync()
    await plane.redis.client.incr(KEPT_SINCE)
    plane.has_returned, plane.answers_missed = False, 2
    reconciler, publisher = plane.reconciler(), Publisher(lambda: plane.client, "budget")
    handler = BudgetHandler(
        *(caps, plane.budgets, plane.counters, publisher, plane.lookup, reconciler.await_source, BudgetMetrics())
    )
    with capture_logs() as logs:
        async with plane.kept(reconciler, settle_ended=handler.settle_ended):
            await until(lambda: events_of(logs, "budgets_behind"), "the service to notice")
            assert not await plane.budgets.has_counters(), "a worker may still hold something"
            plane.has_returned = True
            await until(plane.budgets.has_counters, "the counters to be confirmed")
    assert await plane.spent() == sum(COSTS) + 600_000
    compared = await plane.compared()
    assert (compared.reconciliation().equal, compared.snapshot.reservations) == (True, ())
    [total] = {
        settled.spent
        for settled in await plane.budgets.settle([Settlement.of(lost, published)], log)
        if settled.key == "agent:writer" and settled.period == plane.month
    }
    assert total == sum(COSTS) + 600_000, "an event that comes again counts once"
    assert len(events_of(logs, "budgets_confirmed")) == len(events_of(logs, "budgets_behind")) == 1


async def test_counters_that_are_lost_while_another_primarys_are_confirmed_are_filled(plane: BudgetPlane) -> None:
    await plane.fill()
    await plane.spend(*COSTS)
    sequence, published = await plane.publish_attempt(600_000), plane.attempts[-1]
    subscription = await plane.client.jetstream().pull_subscribe_bind("budget", "EVENTS")
    [message] = await subscription.fetch(1, timeout=60)
    await plane.redis.client.incr(KEPT_SINCE)
    reconciler, publisher = plane.reconciler(), Publisher(lambda: plane.client, "budget")
    handler = BudgetHandler(
        *(caps, plane.budgets, plane.counters, publisher, plane.lookup, reconciler.await_source, BudgetMetrics())
    )
    with capture_logs() as logs:
        async with plane.kept(reconciler, settle_ended=handler.settle_ended):
            await until(lambda: events_of(logs, "budgets_behind"), "the service to wait for that event")
            await plane.redis.client.delete(FILLED)
            await asyncio.wait_for(handler.settle([Settlement.of(sequence, published)]), 20)
            await message.ack_sync()
            await until(plane.budgets.has_counters, "the counters to be right")
    assert await plane.spent() == sum(COSTS) + 600_000


async def test_counters_that_an_earlier_version_has_filled_are_watched_from_then_on(plane: BudgetPlane) -> None:
    await plane.fill()
    await plane.redis.client.hdel(FILLED, "since")  # pyright: ignore[reportGeneralTypeIssues]
    async with plane.kept(plane.reconciler()):

        async def is_noted() -> bool:
            source = await plane.counters.source()
            return source is not None and source.since == await plane.redis.client.get(KEPT_SINCE)

        await until(is_noted, "the service to note since when they are right")
    await plane.redis.client.incr(KEPT_SINCE)
    assert not await plane.budgets.has_counters(), "another primary may lack something"


# Redis is wrong


@pytest.mark.parametrize("off", [7, -7])
async def test_of_a_young_plane_counters_are_repaired_in_both_directions_and_it_is_reported_once(
    plane: BudgetPlane, off: int
) -> None:
    await plane.fill()
    await plane.spend(*COSTS)
    await plane.change(off)
    for _ in range(2):
        await plane.reconciler().reconcile()
    assert await plane.spent() == sum(COSTS)
    [published] = await plane.published()
    assert (published.kind, published.previous, published.total) == ("repaired", sum(COSTS) + off, sum(COSTS))
    assert (await plane.compared()).reconciliation().equal


@pytest.mark.parametrize("trimmed", [False, True])
async def test_what_is_counted_too_low_is_repaired_wherever_the_record_of_it_is(
    plane: BudgetPlane, trimmed: bool
) -> None:
    await plane.fill()
    await plane.spend(*COSTS)
    if trimmed:
        await plane.trim(2)
    else:
        await plane.analytics.execute("TRUNCATE TABLE attempts")
    await plane.change(-300)
    await plane.reconciler().reconcile()
    assert await plane.spent() == sum(COSTS)


async def test_what_is_counted_too_high_where_only_clickhouse_could_tell_is_left(plane: BudgetPlane) -> None:
    await plane.fill()
    await plane.spend(*COSTS)
    await plane.trim(2)
    await plane.change(7)
    with capture_logs() as logs:
        await plane.reconciler().reconcile()
    assert await plane.spent() == sum(COSTS) + 7
    [warning, *_] = events_of(logs, "budgets_not_repaired")
    assert {budget.rpartition(" of ")[2] for budget in warning["budgets"]} == {plane.month.name}


async def test_what_is_counted_too_low_is_repaired_beside_what_is_counted_too_high(plane: BudgetPlane) -> None:
    await plane.fill()
    await plane.spend(*COSTS)
    await plane.trim(2)
    await plane.change(7)
    await plane.change(-300, "global")
    await plane.reconciler().reconcile()
    assert await plane.spent() == sum(COSTS) + 7
    assert await plane.spent("global") == sum(COSTS)


async def test_a_reservation_in_a_day_that_is_not_compared_is_no_leak(plane: BudgetPlane) -> None:
    await plane.fill()
    await plane.spend(*COSTS)
    tomorrow, counters = now() + timedelta(days=1), CAPS.counters(CallNames("writer"))
    command = plane.budgets.reserve_command(
        "n:1", CallNames("writer"), 9, counters, now=now(), lease_ms=60_000, at=tomorrow
    )
    assert isinstance(
        plane.budgets.read_reservation((await plane.redis.run([command]))[0], counters, 9, now=now()), Reserved
    )
    found = await plane.reconciler().reconcile()
    assert found is not None
    assert found.snapshot.held_amounts(charged=False)[tomorrow.astimezone(ZONE).date().isoformat(), "global"] == 9
    assert (found.leaks, found.repairs(), found.reconciliation().equal) == ({}, (), True)


# The log is lost


async def test_while_clickhouse_is_away_too_a_new_log_changes_no_counter_and_then_takes_none_away(
    plane: BudgetPlane,
) -> None:
    old = await plane.fill()
    await plane.spend(*COSTS[:3])
    await plane.spend(*COSTS[3:], stored=False)  # which the log alone had
    await plane.new_log()
    await plane.publish_attempt(600_000)  # counted by nobody yet
    before = await plane.counters.source()
    assert before is not None
    nowhere = connect(NOWHERE)
    try:
        with capture_logs() as logs:
            async with plane.kept(plane.reconciler(analytics=nowhere)):

                async def complains() -> bool:
                    return any("ClickHouse" in entry["error"] for entry in events_of(logs, "unavailable"))

                await until(complains)
    finally:
        await nowhere.close()
    assert await plane.counters.source() == before
    assert await plane.spent() == sum(COSTS)
    reconciler = plane.reconciler()
    async with plane.kept(reconciler):
        new = await reconciler.await_source(False)
    assert new != old
    # Nothing of the new log was counted in Redis before: it comes on top.
    assert await plane.spent() == sum(COSTS) + 600_000
    filled = await plane.counters.source()
    assert filled is not None
    assert (filled.log, filled.alone) == (new, False)


async def test_what_a_lost_log_alone_had_is_carried_over_and_no_comparison_takes_it_away(plane: BudgetPlane) -> None:
    await plane.fill()
    await plane.spend(*COSTS[:3])
    await plane.spend(*COSTS[3:], stored=False)
    await plane.new_log()
    new = await plane.fill()
    assert new == (await plane.lookup.facts(Stream.EVENTS)).identity
    assert await plane.spent() == sum(COSTS)
    with capture_logs() as logs:
        await plane.reconciler().reconcile()
    assert await plane.spent() == sum(COSTS)
    assert events_of(logs, "budgets_not_repaired")
    await plane.spend(600_000)
    await plane.reconciler().reconcile()
    assert await plane.spent() == sum(COSTS) + 600_000


async def test_without_clickhouse_lost_counters_are_made_from_a_log_that_has_all(plane: BudgetPlane) -> None:
    await plane.fill()
    await plane.spend(*COSTS, stored=False)
    await plane.redis.client.flushall()
    nowhere = connect(NOWHERE)
    try:
        reconciler = plane.reconciler(analytics=nowhere)
        async with plane.kept(reconciler):
            await reconciler.await_source(False)
    finally:
        await nowhere.close()
    assert await plane.spent() == sum(COSTS)


# Redis is lost while leases are swept


class Losing(Lookup):
    """Redis loses everything while the log is asked, the first time."""

    def __init__(self, plane: BudgetPlane) -> None:
        super().__init__(lambda: plane.client)
        self._redis = plane.redis
        self.lost = False

    async def next(self, stream: Stream, subject_filter: str, sequence: int) -> StoredMessage | None:
        if not self.lost:
            await self._redis.client.flushall()
            self.lost = True  # not before: who sees it takes counters that are there for new ones
        return await super().next(stream, subject_filter, sequence)


async def sweeper(plane: BudgetPlane, reconciler: Reconciler, lookup: Lookup) -> BudgetHandler:
    """A budget service, and a call whose lease has ended though the log reports it."""
    await plane.publish_attempt(40)
    publisher, counters = Publisher(lambda: plane.client, "budget"), CAPS.counters(CallNames("writer"))
    command = plane.budgets.reserve_command("j1:1", CallNames("writer"), 90, counters, now=now(), lease_ms=1)
    await plane.redis.run([command])

    async def lapsed() -> bool:
        return await plane.budgets.lapsed_attempts(now()) == ["j1:1"]

    await until(lapsed)
    return BudgetHandler(
        caps, plane.budgets, plane.counters, publisher, lookup, reconciler.await_source, BudgetMetrics()
    )


async def test_a_sweep_that_finds_the_counters_lost_waits_for_nobody(plane: BudgetPlane) -> None:
    log, lookup = await plane.fill(), Losing(plane)
    handler = await sweeper(plane, plane.reconciler(), lookup)
    async with asyncio.timeout(60):
        with pytest.raises(NotFilledError):
            await handler.charge_lapsed(log)
    assert lookup.lost


async def test_counters_that_are_lost_in_the_middle_of_a_sweep_are_made_again(plane: BudgetPlane) -> None:
    await plane.fill()
    lookup, reconciler = Losing(plane), plane.reconciler()
    handler = await sweeper(plane, reconciler, lookup)
    async with plane.kept(reconciler, handler.charge_lapsed):

        async def refilled() -> bool:
            # In this order: what was found before the loss is not what was made again.
            return lookup.lost and await plane.counters.source() is not None

        await until(refilled)
    assert await plane.spent() == 40


async def test_a_limit_on_a_new_kind_of_scope_counts_what_was_spent_before_it(plane: BudgetPlane) -> None:
    await plane.fill()
    await plane.spend(5, 7, submitted_by="bot", user="ann", team="research", cost_tags={"project": "web"})
    await plane.spend(11, submitted_by="other", user="bob", team="research")
    await plane.spend(100)
    users = key_of(parse_scope("user:* within team:research"))
    limits = (
        limit("key:*", "monthly", 1),
        limit(users, "quarterly", 1, "alert"),
        limit("tag:project=web", "weekly", 1),
    )
    limited = replace(CAPS, limits=(*CAPS.limits, *limits))
    periods = periods_at(now(), ZONE)
    reconciler = plane.reconciler(of_caps=lambda: limited)
    async with plane.kept(reconciler), asyncio.timeout(60):
        while (source := await plane.counters.source()) is None or source.dimensions != Dimensions(limited.dimensions):
            await asyncio.sleep(0.01)
    await plane.spend(2, submitted_by="bot", user="ann", team="research", cost_tags={"project": "web"})
    within = [key_of(parse_scope(f"user:{user} within team:research")) for user in ("ann", "bob")]
    expected = [("monthly", "key:bot", 14), ("monthly", "key:other", 11), ("weekly", "tag:project=web", 14)]
    for window, key, spent in (*expected, ("quarterly", within[0], 14), ("quarterly", within[1], 11)):
        assert await plane.counters.used(periods.of(window), key) == {key: spent}
    assert [event.kind for event in await plane.published()] == []
    comparison = await plane.compared()
    assert comparison.reconciliation().equal
    assert {budget.budget for budget in comparison.reconciliation().budgets} >= {
        "key:bot/monthly", "user:ann within team:research/quarterly", "tag:project=web/weekly"
    }  # fmt: skip
    # It may be lost again: then all of it comes back from the record.
    await plane.redis.client.flushall()
    async with plane.kept(reconciler):
        await reconciler.await_source(True)
    assert await plane.counters.used(periods.of("weekly"), "tag:project=web") == {"tag:project=web": 14}


async def test_a_total_counts_what_was_spent_ever_and_comes_back_after_a_loss(plane: BudgetPlane) -> None:
    await plane.fill()
    long_ago = now() - timedelta(days=200)
    names = {"submitted_by": "bot", "user": "ann", "cost_tags": {"project": "web"}}
    old = attempt(
        **names, attempt_id="old:1", execution_id="old", cost=90, cost_basis="billed", started_at=long_ago, model="m",
        input_tokens=3, output_tokens=1,
    )  # fmt: skip
    await plane.analytics.insert(schema.ATTEMPTS, [attempt_row(old, 1, long_ago)])
    closer = SpendCloser(plane.analytics, plane.lookup, ZONE, now)
    await plane.spend(5, 7, **names)
    assert await closer.close()
    assert not await closer.close()
    forgotten = "ALTER TABLE attempts DELETE WHERE attempt_id = 'old:1' SETTINGS mutations_sync = 2"
    await plane.analytics.execute(forgotten)
    scopes = ("key:*", "tag:project=web", "user:ann within key:bot")
    limits = [limit(key_of(parse_scope(scope)), "total", 1_000) for scope in scopes]
    limits += [limit("global", "total", 9, unit="requests"), limit("global", "total", 9, unit="tokens")]
    limited = replace(CAPS, limits=(*CAPS.limits, *limits))
    reconciler = plane.reconciler(of_caps=lambda: limited)
    async with plane.kept(reconciler), asyncio.timeout(60):
        while (source := await plane.counters.source()) is None or source.dimensions != Dimensions(limited.dimensions):
            await asyncio.sleep(0.01)
    await plane.spend(2, **names)
    keys = [key_of(parse_scope(scope)) for scope in ("key:bot", *scopes[1:], "plane")]

    async def used() -> list[dict[str, int]]:
        return [await plane.counters.used(TOTAL, key) for key in keys] + [
            await plane.counters.used(TOTAL, "global", unit) for unit in ("tokens", "requests")
        ]

    expected = [{key: 104} for key in keys] + [{"global": 4}, {"global": 4}]
    assert await used() == expected
    assert (await plane.compared()).reconciliation().equal
    await plane.redis.client.flushall()
    async with plane.kept(reconciler):
        await reconciler.await_source(True)
    assert await used() == expected
    [state] = [counters for counters in (await plane.compared()).snapshot.periods if counters.period == TOTAL]
    assert state.figures[keys[0]].spent == 104
    assert [event.kind for event in await plane.published()] == []


async def test_without_clickhouse_leases_lapse_although_a_new_limit_lacks_the_past(plane: BudgetPlane) -> None:
    await plane.fill()
    await plane.spend(*COSTS)
    await plane.trim(1)
    limited = replace(CAPS, limits=(*CAPS.limits, limit("key:*", "monthly", 1)))
    swept = asyncio.Event()

    async def sweep(_: str) -> None:
        source = await plane.counters.source()
        if source is not None and source.dimensions.pending:
            swept.set()

    nowhere = connect(NOWHERE)
    try:
        async with plane.kept(plane.reconciler(analytics=nowhere, of_caps=lambda: limited), sweep), asyncio.timeout(20):
            await swept.wait()
    finally:
        await nowhere.close()
    source = await plane.counters.source()
    assert source is not None
    assert source.dimensions == Dimensions(pending=limited.dimensions)
