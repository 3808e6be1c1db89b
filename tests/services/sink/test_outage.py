"""ClickHouse is away for long, and a sink is restarted meanwhile: that costs delay, and neither rows nor memory."""

import asyncio
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from nats.js.api import ConsumerConfig
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from breakwater.kernel.clickhouse.errors import AnalyticsUnavailableError
from breakwater.kernel.nats.delivery import Delivery
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.process import background
from breakwater.kernel.types import usd_from_nano
from breakwater.local.ports import free_port
from breakwater.records import schema
from breakwater.records.metrics import SinkMetrics
from breakwater.records.settings import ClickHouse
from breakwater.services.sink import expiry
from breakwater.services.sink.app import BATCH_SIZE
from breakwater.services.sink.expiry import TextExpiry
from breakwater.services.sink.handlers import Sink
from tests.helpers import until
from tests.records import samples
from tests.records.samples import NOON
from tests.services.sink.plane import Plane, of_attempt, of_execution

PARTS = 4
BACKLOG = PARTS * BATCH_SIZE
PROMPT = [{"role": "user", "content": "12345678" * 750}]
ALLOWED = 64 * 2**20
"""Three quarters of what the backlog takes as parsed messages, and more than two batches do."""


def backlog(count: int, name: str) -> Iterator[tuple[str, bytes]]:
    """Executions of 6 KB that cost 1, 2, 3, … nano-dollars."""
    # Written once: to make each of them takes longer than all that the sink does with it.
    subject, data = of_execution(samples.execution("SAMPLE", total_cost=1, messages=PROMPT))
    cost = usd_from_nano(1).encode()
    for number in range(1, count + 1):
        own, own_cost = f"{name}-{number}", usd_from_nano(number).encode()
        yield subject.replace("SAMPLE", own), data.replace(b"SAMPLE", own.encode()).replace(cost, own_cost)


def scrape(port: int) -> dict[tuple[str, ...], float]:
    """What a sink reports of itself, by name and label values."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {
            (sample.name.removeprefix("breakwater_sink_"), *sample.labels.values()): sample.value
            for family in families
            for sample in family.samples
        }


@pytest.mark.chaos
async def test_a_long_outage_with_a_restart_costs_neither_rows_nor_memory(plane: Plane, tmp_path: Path) -> None:
    # A short ack wait, so that what the first sink held comes back within the test.
    config: ConsumerConfig = (await plane.consumer()).config
    await plane.jetstream.add_consumer("EVENTS", config.evolve(ack_wait=2.0))
    port = free_port()
    sink = plane.sink_process(tmp_path, metrics_port=port)
    await plane.publish(backlog(2 * BATCH_SIZE, "before"))
    await plane.until_done()
    before = psutil.Process(sink.pid).memory_info().rss

    async def reported_away() -> bool:
        try:
            scraped = await asyncio.to_thread(scrape, port)
        except urllib.error.URLError:
            return False  # it does not listen yet
        return scraped.get(("unavailable", "clickhouse")) == 1

    async with plane.clickhouse_away():
        for part in range(PARTS):
            await plane.publish(backlog(BATCH_SIZE, f"during-{part}"))
        await until(reported_away, "the outage is in the metrics")
        scraped = await asyncio.to_thread(scrape, port)
        assert scraped["lag_seconds", "EVENTS"] > 0
        held = await plane.consumer()
        assert held.num_pending >= BACKLOG - 2 * BATCH_SIZE, "it takes no more than it works on"
        assert held.num_ack_pending <= 2 * BATCH_SIZE
        assert psutil.Process(sink.pid).memory_info().rss < before + ALLOWED
        assert await sink.stop() == 0
        port = free_port()
        sink = plane.sink_process(tmp_path, metrics_port=port)
        await until(reported_away, "the second sink is at work, too")
    await plane.until_done()
    assert psutil.Process(sink.pid).memory_info().rss < before + ALLOWED
    scraped = await asyncio.to_thread(scrape, port)
    assert scraped["unavailable", "clickhouse"] == 0
    assert scraped["rows_total", "executions"] >= BACKLOG
    assert scraped["insert_duration_seconds_count", "executions"] >= BACKLOG / BATCH_SIZE
    await sink.stop()
    assert await plane.rows("SELECT count(), toInt64(sum(total_cost) * 1000000000) FROM executions FINAL") == (
        (BACKLOG + 2 * BATCH_SIZE, PARTS * BATCH_SIZE * (BATCH_SIZE + 1) // 2 + BATCH_SIZE * (2 * BATCH_SIZE + 1)),
    )
    assert await plane.dead_letters() == []


async def test_what_is_stored_what_waits_and_how_late_it_is_are_reported(plane: Plane) -> None:
    await plane.publish([*(of_attempt(samples.attempt(f"e{n}")) for n in range(24)), ("bw.guards.writer", b"unknown")])
    subscription = await plane.jetstream.pull_subscribe_bind("sink-events", "EVENTS")
    registry = CollectorRegistry()

    async def all_pending() -> bool:
        return (await plane.consumer()).num_pending == 25

    # The server counts what waits for a consumer a moment after it has stored it.
    await until(all_pending, "the consumer knows of all messages")

    async def store(count: int) -> None:
        batch = [Delivery(message) for message in await subscription.fetch(count, timeout=60)]
        late = batch[0].published_at + timedelta(seconds=90)
        sink = Sink(plane.analytics, Publisher(lambda: plane.client, "sink"), lambda: late, SinkMetrics(registry))
        await sink.store(batch)

    def scraped(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"breakwater_sink_{name}", labels)

    await store(10)
    assert scraped("rows_total", table=schema.ATTEMPTS.name) == 10
    assert scraped("waiting_messages", stream="EVENTS") == 15
    assert scraped("lag_seconds", stream="EVENTS") == 90
    assert scraped("dead_letters_total", stream="EVENTS") == 0
    await store(15)
    assert scraped("rows_total", table=schema.ATTEMPTS.name) == 24
    assert scraped("waiting_messages", stream="EVENTS") == 0
    assert scraped("dead_letters_total", stream="EVENTS") == 1
    assert scraped("batches_total", stream="EVENTS") == 2
    assert scraped("insert_duration_seconds_count", table=schema.ATTEMPTS.name) == 2
    assert scraped("unavailable", what="clickhouse") == 0
    assert scraped("unavailable", what="nats") == 0


async def test_what_one_table_takes_is_stored_while_another_is_missing_and_the_outage_lasts(plane: Plane) -> None:
    await plane.analytics.execute("DROP TABLE attempts")
    await plane.publish([of_attempt(samples.attempt()), of_execution(samples.execution())])
    subscription = await plane.jetstream.pull_subscribe_bind("sink-events", "EVENTS")
    registry = CollectorRegistry()
    batch = [Delivery(message) for message in await subscription.fetch(2, timeout=60)]
    now = batch[0].published_at
    sink = Sink(plane.analytics, Publisher(lambda: plane.client, "sink"), lambda: now, SinkMetrics(registry))
    storing = asyncio.create_task(sink.store(batch))

    async def one_is_stored() -> bool:
        return registry.get_sample_value("breakwater_sink_rows_total", {"table": "executions"}) == 1

    async def away() -> bool:
        return registry.get_sample_value("breakwater_sink_unavailable", {"what": "clickhouse"}) == 1

    await until(one_is_stored, "the table that is there has its row")
    await until(away, "the outage to be reported")
    assert (await plane.consumer()).num_ack_pending == 2
    await plane.analytics.execute(schema.ATTEMPTS.ddl())
    await asyncio.wait_for(storing, 60)
    assert registry.get_sample_value("breakwater_sink_unavailable", {"what": "clickhouse"}) == 0
    assert await plane.rows("SELECT count() FROM attempts") == ((1,),)


async def test_old_texts_are_emptied_soon_after_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiry, "AGAIN_S", 0.01, raising=False)
    registry = CollectorRegistry()
    reported = list[float | None]()

    class Flaky(TextExpiry):
        async def expire(self) -> None:
            reported.append(registry.get_sample_value("breakwater_sink_unavailable", {"what": expiry.WORK}))
            if len(reported) == 1:
                raise AnalyticsUnavailableError("ClickHouse restarts")

    work = Flaky(cast(Any, None), ClickHouse, lambda: NOON, SinkMetrics(registry))
    running = asyncio.create_task(work.run())

    async def is_over() -> bool:
        return registry.get_sample_value("breakwater_sink_unavailable", {"what": expiry.WORK}) == 0

    await until(is_over, "the end of the outage", timeout_s=10)
    assert reported[1:] == [1], "then it waits an hour"
    await background.stop(running)
