"""What is delivered again, in other batches and after kills, changes no count and no sum: of tables and of views."""

import random
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from nats.js.api import ConsumerConfig
from prometheus_client import CollectorRegistry

from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.delivery import Delivery
from breakwater.kernel.nats.publisher import Publisher
from breakwater.records.metrics import SinkMetrics
from breakwater.records.rows import StoredRow
from breakwater.records.schema import TABLES
from breakwater.services.sink import records
from breakwater.services.sink.handlers import Sink
from tests.helpers import until
from tests.records import samples
from tests.services.sink.gate import gate
from tests.services.sink.plane import Plane, of_attempt, of_execution

JOBS = 70
KILLS = 3
CAUSES = ("first", "retry", "fallback")


@pytest.fixture
async def once(plane: Plane) -> AsyncGenerator[Analytics]:
    """Another database on the same server, for what is stored once and in order."""
    async with samples.new_database(plane.clickhouse_server.url) as found:
        yield found


def history() -> Iterator[tuple[str, bytes]]:
    """Jobs of a few agents over an hour, with failures, retries, fallbacks unknown costs; and what belongs to them."""
    for number in range(1, JOBS + 1):
        agent, job = f"agent-{number % 3}", f"job-{number}"
        began = samples.NOON + timedelta(seconds=3 * number)
        tries = tuple(
            samples.attempt(
                job,
                nth,
                agent=agent,
                model=f"model-{nth % 2}",
                started_at=began + timedelta(seconds=nth),
                duration_ms=100 + number,
                cost=None if number % 10 == 0 else number * nth + 1,
                cost_basis="unknown" if number % 10 == 0 else "billed",
                reserved=2 * number * nth + 2,
                reserved_at=began,
                cause=CAUSES[nth - 1],
                **({} if nth == number % 3 + 1 else {"outcome": "error", "error": samples.RATE_LIMITED}),
            )
            for nth in range(1, number % 3 + 2)
        )
        known = number % 10 != 0
        wasted = sum(one.cost or 0 for one in tries[:-1])
        yield from map(of_attempt, tries)
        yield of_execution(
            samples.execution(
                job,
                agent=agent,
                completed_at=began + timedelta(seconds=9),
                attempts=tries,
                attempts_count=len(tries),
                total_cost=sum(one.cost or 0 for one in tries) if known else None,
                wasted_cost=wasted if known else None,
                wasted_by_cause={"retry": wasted} if known and wasted else {},
                cost_basis="billed" if known else "unknown",
                cache_hit=number % 7 == 0,
                plan_id=f"plan-{number % 5}",
            )
        )
    yield subjects.breaker("writer", "gpt-4.1"), samples.transition(1).json_bytes()
    closed = samples.transition(2, from_state="open", to_state="closed", at=samples.NOON + timedelta(minutes=2))
    yield subjects.breaker("writer", "gpt-4.1"), closed.json_bytes()
    yield subjects.guard("writer"), samples.guard_event().json_bytes()
    for event in (samples.budget_event(), samples.full_budget_event(), samples.repair()):
        yield subjects.budget(event.scope, event.window), event.json_bytes()


def alerts() -> Iterator[tuple[str, bytes]]:
    for one in (samples.alert(), samples.full_alert()):
        yield subjects.alert(one.event), one.json_bytes()


async def figures(analytics: Analytics) -> dict[str, Any]:
    """Of each table its number of rows and its sums of money, with FINAL; of each view all that it shows."""
    found: dict[str, Any] = {}
    for table in TABLES:
        money = [name for name, kind in table.columns.items() if "Decimal" in kind and "Map" not in kind]
        sums = "".join(f", sum({name})" for name in money)
        found[table.name] = (await analytics.query(f"SELECT count(){sums} FROM {table.name} FINAL")).rows
    views = "SELECT name FROM system.tables WHERE database = currentDatabase() AND engine = 'View' ORDER BY name"
    for (view,) in (await analytics.query(views)).rows:
        found[view] = (await analytics.query(f"SELECT * FROM {view} ORDER BY ALL")).rows
    return found


async def deliveries(plane: Plane, stream: str) -> list[Delivery]:
    """Everything on a stream, as a consumer of its own gets it."""
    config = ConsumerConfig(ack_wait=3_600, max_ack_pending=-1)
    subscription = await plane.jetstream.pull_subscribe("bw.>", stream=stream, config=config)
    there = (await subscription.consumer_info()).num_pending
    got: list[Delivery] = []
    while len(got) < there:
        got += [Delivery(one) for one in await subscription.fetch(min(500, there - len(got)), timeout=60)]
    return got


async def store_once(analytics: Analytics, messages: Iterable[Delivery]) -> None:
    """Inserts what messages say, each table's in one insert, without the sink."""
    by_table: dict[str, list[StoredRow]] = {}
    for message in messages:
        table, row = records.read(
            message.subject, message.data, message.headers, message.sequence, message.published_at
        )
        by_table.setdefault(table.name, []).append(row)
    for table in TABLES:
        if table.name in by_table:
            await analytics.insert(table, by_table[table.name])


def in_batches(messages: Sequence[Delivery], dice: random.Random) -> Iterator[list[Delivery]]:
    """All of them in another order, in batches of one to a hundred."""
    left = dice.sample(messages, len(messages))
    while left:
        size = dice.choice((1, 7, 60, 100))
        yield left[:size]
        del left[:size]


async def keep_duplicates(plane: Plane) -> None:
    """From now on, no merge takes the older of two rows away: only FINAL and the views do."""
    for table in TABLES:
        await plane.analytics.execute(f"SYSTEM STOP MERGES {plane.analytics.database}.{table.name}")


async def physical_rows(plane: Plane) -> int:
    ((count,),) = await plane.rows("SELECT (SELECT count() FROM attempts) + (SELECT count() FROM executions)")
    return count


async def expected(plane: Plane, once: Analytics) -> dict[str, Any]:
    """What everything on the bus amounts to, stored once; compared with known figures where there are any."""
    await store_once(once, [*await deliveries(plane, "EVENTS"), *await deliveries(plane, "ALERTS")])
    right = await figures(once)
    known = [number for number in range(1, JOBS + 1) if number % 10]
    spent = sum(number * nth + 1 for number in known for nth in range(1, number % 3 + 2))
    assert right["executions"][0][:2] == (JOBS, Decimal(spent).scaleb(-9))
    assert right["attempts"][0][:2] == (sum(n % 3 + 1 for n in range(1, JOBS + 1)), Decimal(spent).scaleb(-9))
    assert sum(row[2] for row in right["executions_per_minute"]) == JOBS
    assert all(value for name, value in right.items() if name != "audit")
    return right


async def test_the_same_events_in_other_batches_and_in_another_order_change_no_figure(
    plane: Plane, once: Analytics
) -> None:
    await plane.publish([*history(), *alerts()])
    right = await expected(plane, once)
    await keep_duplicates(plane)
    async with plane.sink():
        await plane.until_done()
        await plane.until_done("sink-alerts", "ALERTS")
    assert await figures(plane.analytics) == right
    records = right["attempts"][0][0] + right["executions"][0][0]
    sink = Sink(
        plane.analytics,
        Publisher(lambda: plane.client, "sink"),
        lambda: datetime.now(UTC),
        SinkMetrics(CollectorRegistry()),
    )
    dice = random.Random(7)
    for stream in ("EVENTS", "ALERTS"):
        for batch in in_batches(await deliveries(plane, stream), dice):
            await sink.store(batch)
    assert await physical_rows(plane) == 2 * records
    assert await figures(plane.analytics) == right
    assert await plane.dead_letters() == []


@pytest.mark.chaos
async def test_kills_between_insert_and_acknowledgement_change_no_figure(
    plane: Plane, once: Analytics, tmp_path: Path
) -> None:
    # A short ack wait, so that what a killed sink held comes back within the test, between and behind other messages.
    config = (await plane.consumer()).config
    await plane.jetstream.add_consumer("EVENTS", config.evolve(ack_wait=1.0))
    await keep_duplicates(plane)
    everything = list(history())
    part = -(-len(everything) // KILLS)
    await plane.publish(alerts())
    async with gate(plane.settings.clickhouse_url.get_secret_value()) as (way, url):
        for kill in range(KILLS):
            await plane.publish(everything[kill * part : (kill + 1) * part])
            way.close()
            sink = plane.sink_process(tmp_path, clickhouse_url=url)
            await until(way.stored.is_set, f"an insert by sink {kill + 1}")
            before = await plane.consumer()
            await sink.kill()
            assert before.ack_floor.stream_seq == 0, "the sink acknowledged what it had not heard to be stored"
        way.open()
        sink = plane.sink_process(tmp_path, clickhouse_url=url)
        await plane.until_done()
        await plane.until_done("sink-alerts", "ALERTS")
        await sink.stop()
    right = await expected(plane, once)
    assert await physical_rows(plane) > right["attempts"][0][0] + right["executions"][0][0]
    assert await figures(plane.analytics) == right
    assert await plane.dead_letters() == []
