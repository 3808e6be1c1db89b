"""The sink between a real bus and a real ClickHouse: everything arrives, once, and nothing is in the way for long."""

import asyncio
import base64
import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path

import pytest
import structlog
from faststream.nats import TestNatsBroker
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from breakwater.alerts import storage_watch
from breakwater.alerts.contract import IncidentStatus
from breakwater.alerts.storage_watch import StorageWatch
from breakwater.alerts.store.incidents import IncidentLog
from breakwater.config import parse_config
from breakwater.jobs.contract.execution import Attempt
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.delivery import Delivery
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import Stream
from breakwater.records import schema
from breakwater.records.metrics import SinkMetrics
from breakwater.records.rows import budget_of
from breakwater.redaction.rules.redact import Redactor
from breakwater.redaction.settings import RedactionRules
from breakwater.services.sink import app as sink_app
from breakwater.services.sink.app import build
from breakwater.services.sink.handlers import Sink
from tests.helpers import deliver, until
from tests.records import samples
from tests.services.sink.plane import CONFIG, Plane, of_attempt, of_execution


def attempts(count: int, prefix: str = "e") -> list[Attempt]:
    """Attempts whose costs are 1, 2, 3, … nano-dollars; every tenth is unknown."""
    return [
        samples.attempt(
            f"{prefix}{n}",
            cost=None if n % 10 == 0 else n,
            cost_basis="unknown" if n % 10 == 0 else "billed",
        )
        for n in range(1, count + 1)
    ]


def known_nano(count: int) -> int:
    return sum(n for n in range(1, count + 1) if n % 10)


async def totals_of(plane: Plane) -> tuple[int, int, int]:
    """Rows, rows of unknown cost, and nano-dollars, as ClickHouse sums them up."""
    ((count, unknown, cost),) = await plane.rows("SELECT count(), countIf(cost IS NULL), sum(cost) FROM attempts FINAL")
    return count, unknown, int((cost or 0) * 10**9)


async def test_every_kind_of_event_arrives_in_its_table(plane: Plane) -> None:
    async with TestNatsBroker(build(plane.settings, parse_config(CONFIG)).broker) as broker:
        for stream, (subject, body) in [
            (Stream.EVENTS, of_attempt(samples.full_attempt())),
            (Stream.EVENTS, of_execution(samples.full_execution())),
            (Stream.EVENTS, (subjects.breaker("writer", "gpt-4.1"), samples.transition().json_bytes())),
            (Stream.EVENTS, (subjects.guard("writer"), samples.guard_event().json_bytes())),
            (Stream.EVENTS, (subjects.budget("agent", "daily"), samples.budget_event().json_bytes())),
            (Stream.EVENTS, (subjects.plan("p"), samples.plan_change().json_bytes())),
            (Stream.EVENTS, (subjects.limit("raised"), samples.limit_event().json_bytes())),
            (Stream.ALERTS, (subjects.alert("breaker_open"), samples.alert().json_bytes())),
            (Stream.AUDIT, (subjects.audit("raise_cap"), samples.audit_event().json_bytes())),
        ]:
            await deliver(broker, stream, subject, body)
    for table in schema.TABLES:
        assert await plane.rows(f"SELECT count() FROM {table.name} FINAL") == ((1,),), table.name
    assert await plane.rows("SELECT cost FROM attempts") == ((Decimal("123456789.123456789"),),)
    assert await plane.rows("SELECT total_cost FROM executions") == ((Decimal("999999999.999999999"),),)
    assert await plane.dead_letters() == []


async def test_a_stopped_task_and_a_shared_breaker_are_stored_whole(plane: Plane) -> None:
    stop, isolated = samples.guard_event(), samples.full_transition()
    reset = samples.full_guard_event().model_copy(update={"at": stop.at + timedelta(minutes=5)})
    await plane.publish(
        [
            *((subjects.guard("writer"), event.json_bytes()) for event in (stop, reset, stop)),
            (subjects.breaker("*", "openai/*"), isolated.json_bytes()),
        ]
    )
    async with plane.sink():
        await plane.until_done()
    stored = "SELECT * EXCEPT (event_sequence) REPLACE (toInt64(cost * 1000000000) AS cost) FROM guard_events FINAL"
    rows = await plane.analytics.query(f"{stored} ORDER BY at")
    assert list(rows.named_rows()) == [stop.model_dump(), reset.model_dump()]
    rows = await plane.analytics.query("SELECT * EXCEPT (event_sequence) FROM breaker_transitions FINAL")
    assert list(rows.named_rows()) == [isolated.model_dump(exclude={"alone", "open_for", "waits"})]
    assert await plane.dead_letters() == []


async def test_each_change_of_an_incident_is_stored_whole_and_the_newest_is_the_incident(plane: Plane) -> None:
    opened, resolved = samples.alert(), samples.full_alert()
    again = opened.model_copy(update={"alert_id": "alert_i1_2", "change": "repeated", "version": 2, "count": 2})
    await plane.publish((subjects.alert(one.event), one.json_bytes()) for one in (opened, again, resolved, opened))
    async with plane.sink():
        await plane.until_done("sink-alerts", "ALERTS")
    stored = await plane.analytics.query("SELECT * EXCEPT (payload, event_sequence) FROM alerts FINAL ORDER BY version")
    kept = [one.model_dump(exclude={"payload", "remind_at", "last_event_id"}) for one in (opened, again, resolved)]
    assert list(stored.named_rows()) == kept
    assert await plane.rows("SELECT incident_id, version, count FROM incidents ORDER BY version") == (
        ("inc_i1", 2, 2),
        ("inc_i2", 9, 2**40),
    )
    assert await plane.dead_letters() == []


async def test_an_attempt_is_stored_with_the_time_of_its_message_however_late_it_is_read(plane: Plane) -> None:
    await plane.publish([of_attempt(samples.attempt())])
    message = await plane.jetstream.get_last_msg("EVENTS", "bw.attempts.>")
    assert message.time is not None
    async with plane.sink():
        await plane.until_done()
    ((stored_at, sequence),) = await plane.rows("SELECT stored_at, event_sequence FROM attempts FINAL")
    # The column has milliseconds, and the client reads the server's nanoseconds through a float.
    assert abs(stored_at - message.time) <= timedelta(milliseconds=1)
    assert sequence == message.seq


async def test_raises_and_repairs_of_budgets_are_stored_whole(plane: Plane) -> None:
    events = [samples.full_budget_event(), samples.repair(), samples.budget_event()]
    await plane.publish((subjects.budget(event.scope, event.window), event.json_bytes()) for event in events)
    async with plane.sink():
        await plane.until_done()
    found = await plane.analytics.read(budget_of, "SELECT * FROM budget_events FINAL ORDER BY event_sequence")
    assert list(found) == events
    assert await plane.dead_letters() == []


async def test_batches_that_are_delivered_again_change_no_count_and_no_sum(plane: Plane) -> None:
    await plane.publish(of_attempt(attempt) for attempt in attempts(300))
    await plane.analytics.execute(f"SYSTEM STOP MERGES {plane.analytics.database}.attempts")
    async with plane.sink():
        await plane.until_done()
    first = await totals_of(plane)
    consumer = (await plane.consumer()).config
    await plane.jetstream.delete_consumer("EVENTS", "sink-events")
    await plane.jetstream.add_consumer("EVENTS", consumer)
    async with plane.sink():
        await plane.until_done()
    assert await plane.rows("SELECT count() FROM attempts") == ((600,),)
    assert await totals_of(plane) == first == (300, 30, known_nano(300))


async def test_a_sink_that_is_killed_again_and_again_loses_and_doubles_nothing(plane: Plane, tmp_path: Path) -> None:
    # A short ack wait, so that what a killed sink held comes back within the test.
    consumer = (await plane.consumer()).config
    await plane.jetstream.add_consumer("EVENTS", consumer.evolve(ack_wait=1.0))
    everything = attempts(3_000)
    for part in range(3):
        await plane.publish(of_attempt(attempt) for attempt in everything[part * 1_000 : (part + 1) * 1_000])
        stored_before = (await totals_of(plane))[0]
        sink = plane.sink_process(tmp_path)
        await plane.until_delivered()
        if part:  # the first is killed while it gathers a batch, the others when a batch is stored and not acknowledged

            async def stores(before: int = stored_before) -> bool:
                return (await totals_of(plane))[0] > before

            await until(stores, "rows arrive")
        await sink.kill()
    async with plane.sink():
        await plane.until_done()
    assert await totals_of(plane) == (3_000, 300, known_nano(3_000))


async def test_everything_arrives_when_clickhouse_was_away_which_is_said_once_and_an_incident_until_it_is_back(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_app, "StorageWatch", partial(StorageWatch, patience_s=0.0))
    monkeypatch.setattr(storage_watch, "LOOK_EVERY_S", 0.1)
    incidents = IncidentLog(
        lambda: plane.client, Publisher(lambda: plane.client, "test"), Redactor.compile(RedactionRules())
    )

    async def status(wanted: IncidentStatus) -> bool:
        return [alert.status for alert in (await incidents.catch_up()).all()] == [wanted]

    structlog.reset_defaults()
    with capture_logs() as log:
        async with plane.sink():
            await plane.publish(of_attempt(attempt) for attempt in attempts(100, "before"))
            await plane.until_done()
            async with plane.clickhouse_away():
                await plane.publish(of_attempt(attempt) for attempt in attempts(100, "during"))
                await plane.until_delivered()
                await until(_said(log, "unavailable"), "the outage is logged")
                await until(lambda: status("firing"), "the incident")
            await plane.until_done()
            await until(lambda: status("resolved"), "its end")
    assert await totals_of(plane) == (200, 20, 2 * known_nano(100))
    assert [line["event"] for line in log if line.get("what") == "clickhouse"] == ["unavailable", "available_again"]
    assert await plane.dead_letters() == []
    [alert] = incidents.incidents.all()
    assert (alert.key, alert.severity) == ("storage_failing/clickhouse", "warning")


async def test_missing_tables_are_no_fault_of_the_rows(plane: Plane) -> None:
    await plane.analytics.execute("DROP TABLE attempts")
    structlog.reset_defaults()
    with capture_logs() as log:
        async with plane.sink():
            await plane.publish(of_attempt(attempt) for attempt in attempts(20))
            await until(_said(log, "unavailable"), "the missing table is logged")
            await plane.analytics.execute(schema.ATTEMPTS.ddl())
            await plane.until_done()
    assert await totals_of(plane) == (20, 2, known_nano(20))
    assert await plane.dead_letters() == []


async def test_poison_is_set_aside_whole_and_holds_up_nobody(plane: Plane) -> None:
    good = attempts(500)
    fields = json.loads(of_attempt(samples.attempt("poison"))[1])

    def altered(number: int, **more: object) -> bytes:
        return json.dumps({**fields, "attempt_id": f"poison:{number}", "number": number, **more}).encode()

    poison = {
        2**40: altered(2**40),  # fits the contract and not the column
        2: altered(2, cost="1000000000.0"),
        3: altered(3, started_at="9999-01-01T00:00:00.000Z"),
        4: b'{"attempt_id": ',
    }
    messages = [of_attempt(attempt) for attempt in good]
    for position, (number, bad) in zip((0, 17, 400, 503), poison.items(), strict=True):
        messages.insert(position, (subjects.attempt("writer", "poison", number), bad))
    messages.append(("bw.guards.writer", b'{"kind": "not known here"}'))
    await plane.publish(messages)
    async with plane.sink():
        await plane.until_done()
    assert await totals_of(plane) == (500, 50, known_nano(500))
    dead_letters = await plane.dead_letters()
    kept = {base64.b64decode(dead_letter["payload_base64"]) for dead_letter in dead_letters}
    assert kept == {*poison.values(), b'{"kind": "not known here"}'}
    assert len(dead_letters) == len(kept)
    assert {(dead_letter["on"], dead_letter["reason"]) for dead_letter in dead_letters} == {
        ("bw.dlq.unstorable.writer", "unstorable")
    }
    by_subject = {dead_letter["subject"]: dead_letter for dead_letter in dead_letters}
    for number in poison:
        letter = by_subject[subjects.attempt("writer", "poison", number)]
        assert (letter["execution_id"], letter["stream"]) == ("poison", "EVENTS")
    assert "is not a GuardEvent" in by_subject["bw.guards.writer"]["error"]


async def test_a_forged_record_changes_no_row_and_is_a_dead_letter(plane: Plane) -> None:
    attempt, record = samples.attempt("e1"), samples.execution("e1")
    dearer = attempt.model_copy(update={"cost": 900_000_000})
    await plane.publish([of_attempt(attempt), of_execution(record)])
    own, elsewhere = of_attempt(attempt)[0], of_attempt(samples.attempt("e2"))[0]
    await plane.jetstream.publish(own, dearer.json_bytes())
    await plane.publish([(elsewhere, dearer.json_bytes())])
    async with plane.sink():
        await plane.until_done()
    assert await plane.rows("SELECT attempt_id, toInt64(cost * 1000000000) FROM attempts FINAL") == (
        ("e1:1", attempt.cost),
    )
    reasons = sorted((dead_letter["subject"], dead_letter["error"]) for dead_letter in await plane.dead_letters())
    assert reasons == [
        (own, "it was published without requiring to be the first message on its subject"),
        (elsewhere, f"it belongs on {own}"),
    ]


async def test_the_sink_starts_before_clickhouse_and_stops_without_it(plane: Plane, tmp_path: Path) -> None:
    async with plane.clickhouse_away():
        await plane.publish(of_attempt(attempt) for attempt in attempts(50))
        sink = plane.sink_process(tmp_path)
        # The comparison with EVENTS may notice first, and logs an outage of its own.
        said = await sink.until_logged("unavailable", what="clickhouse")
        assert said["service"] == "sink"
        assert await sink.stop() == 0
    assert "batch_left_for_redelivery" in sink.log.read_text()
    assert (await plane.consumer()).num_ack_pending == 50


async def test_a_sink_that_is_stopped_finishes_its_batch(plane: Plane, tmp_path: Path) -> None:
    sink = plane.sink_process(tmp_path)
    await plane.publish(of_attempt(attempt) for attempt in attempts(3_000))

    async def begun() -> bool:
        return (await plane.consumer()).delivered.stream_seq > 0

    await until(begun, "the sink has been given messages", brief=True)
    assert await sink.stop() == 0
    assert "batch" not in sink.log.read_text()
    consumer = await plane.consumer()
    ((stored,),) = await plane.rows("SELECT count() FROM attempts")
    assert stored >= consumer.ack_floor.stream_seq


async def test_the_sink_goes_on_after_the_bus_was_killed(plane: Plane) -> None:
    # A short ack wait: an acknowledgement that dies with the bus would hold its message up for the long one.
    consumer = (await plane.consumer()).config
    await plane.jetstream.add_consumer("EVENTS", consumer.evolve(ack_wait=3.0))
    async with plane.sink():
        await plane.publish(of_attempt(attempt) for attempt in attempts(50, "before"))
        await plane.until_done()
        plane.nats_server.kill()
        await plane.nats_server.restart_async()
        await until(_connected(plane), "the test's own connection is back")
        await plane.publish(of_attempt(attempt) for attempt in attempts(50, "after"))
        await plane.until_done()
    assert (await totals_of(plane))[0] == 100


async def test_a_dead_letter_waits_for_the_bus(plane: Plane) -> None:
    await plane.publish([("bw.guards.writer", b"unknown"), of_attempt(samples.attempt())])
    subscription = await plane.jetstream.pull_subscribe_bind("sink-events", "EVENTS")
    batch = [Delivery(message) for message in await subscription.fetch(2, timeout=60)]
    sink = Sink(
        plane.analytics,
        Publisher(lambda: plane.client, "sink"),
        lambda: datetime.now(UTC),
        SinkMetrics(CollectorRegistry()),
    )
    structlog.reset_defaults()
    with capture_logs() as log:
        plane.nats_server.kill()
        storing = asyncio.create_task(sink.store(batch))
        await until(_said(log, "unavailable"), "the outage is logged")
        await plane.nats_server.restart_async()
        await asyncio.wait_for(storing, 60)
    assert [line["event"] for line in log] == ["unavailable", "available_again", "unstorable"]
    assert [base64.b64decode(dead_letter["payload_base64"]) for dead_letter in await plane.dead_letters()] == [
        b"unknown"
    ]
    assert (await totals_of(plane))[0] == 1


async def test_what_is_too_large_for_a_dead_letter_is_kept_by_reference(plane: Plane) -> None:
    # In base64 it is larger than the server's largest message.
    await plane.publish([("bw.guards.writer", b"x" * 7 * 1024 * 1024), of_attempt(samples.attempt())])
    async with plane.sink():

        async def nothing_is_left() -> bool:
            consumer = await plane.consumer()
            return (consumer.num_pending, consumer.num_ack_pending) == (0, 0)

        await until(nothing_is_left, "both messages are acknowledged")
    assert (await totals_of(plane))[0] == 1
    [dead_letter] = await plane.dead_letters()
    assert (dead_letter["payload_base64"], dead_letter["omitted_bytes"]) == ("", 7 * 1024 * 1024)


def _said(log: list[dict[str, object]], event: str):
    async def found() -> bool:
        return any(line["event"] == event for line in log)

    return found


def _connected(plane: Plane):
    async def found() -> bool:
        return plane.client.is_connected

    return found
