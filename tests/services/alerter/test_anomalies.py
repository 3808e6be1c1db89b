"""The leading alerter asks ClickHouse for anomalies; where it gets no answer, or may ask none, people are told."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

from breakwater.alerts.rules.anomaly import Baseline, Minute, Place, signals, unwatched_signals
from breakwater.alerts.rules.incidents import IncidentRules
from breakwater.alerts.rules.signals import Firing
from breakwater.alerts.store.incidents import IncidentLog
from breakwater.config import Config
from breakwater.kernel.clickhouse.client import Analytics, connect
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.process import background
from breakwater.local.ports import free_port
from breakwater.records import schema
from breakwater.records.anomalies import GRACE
from breakwater.records.rows import execution_row
from breakwater.redaction.rules.redact import Redactor
from breakwater.redaction.settings import RedactionRules
from breakwater.services.alerter.anomalies import MAX_FAILURES, AnomalyWatch
from breakwater.services.alerter.incident_recorder import IncidentRecorder
from tests.helpers import until
from tests.records.samples import NOON, execution, new_database
from tests.server_sources import RunningServer
from tests.services.alerter.kit import Bus, alerter, bus_of, config_of

MINUTE = timedelta(minutes=1)


def recorder_of(bus: Bus, config: Config) -> IncidentRecorder:
    log = IncidentLog(lambda: bus.client, Publisher(lambda: bus.client, "test"), Redactor.compile(RedactionRules()))
    return IncidentRecorder(log, IncidentRules(config.alerts.on_events, 600, (), config.alerts.reminders))


async def store_calls(analytics: Analytics, first: int, last: int, duration_ms: int) -> None:
    """Stores a call in each of the minutes that begin so long after noon."""
    calls = [
        execution(f"e{number}", duration_ms=duration_ms, completed_at=NOON + number * MINUTE, status="succeeded")
        for number in range(first, last)
    ]
    await analytics.insert(schema.EXECUTIONS, [execution_row(call, number) for number, call in enumerate(calls)])


async def test_agents_are_watched_while_clickhouse_answers_and_one_incident_says_when_they_are_not(
    own_nats_server: RunningServer, clickhouse_server: RunningServer
) -> None:
    config = config_of(anomalies={"minimum_calls": 1})
    now = NOON + 43.5 * MINUTE
    async with bus_of(own_nats_server.url, config) as bus, new_database(clickhouse_server.url) as analytics:
        watch = AnomalyWatch(
            analytics, config.alerts, recorder_of(bus, config), Lookup(lambda: bus.client), lambda: now
        )
        away = connect(f"http://127.0.0.1:{free_port()}/breakwater")
        await store_calls(analytics, 0, 40, duration_ms=1000)
        await store_calls(analytics, 40, 43, duration_ms=9000)
        for _ in range(MAX_FAILURES - 1):
            await watch.ask(away)
        assert await bus.alerts() == []
        for _ in range(MAX_FAILURES):
            await watch.ask(away)
        [blind] = await bus.alerts()
        assert (blind.key, blind.change, blind.agent) == ("agent_anomaly//unwatched", "opened", "*")
        assert blind.text.startswith("ClickHouse does not answer: ")
        for _ in range(2):
            await watch.ask(analytics)
        await store_calls(analytics, 43, 46, duration_ms=1000)
        now += 3 * MINUTE
        await watch.ask(analytics)
        await away.close()
        changes = [(alert.key, alert.change) for alert in await bus.alerts()]
    assert changes == [
        ("agent_anomaly//unwatched", "opened"),
        ("agent_anomaly//unwatched", "resolved"),
        ("agent_anomaly/writer/latency", "opened"),
        ("agent_anomaly/writer/latency", "resolved"),
    ]


async def test_while_nothing_happens_clickhouse_only_has_to_answer(own_nats_server: RunningServer) -> None:
    config = config_of()
    away = connect(f"http://127.0.0.1:{free_port()}/breakwater")
    async with bus_of(own_nats_server.url, config) as bus:
        incidents, lookup = recorder_of(bus, config), Lookup(lambda: bus.client)
        watch = AnomalyWatch(away, config.alerts, incidents, lookup, lambda: NOON)
        jetstream = bus.client.jetstream()
        stored = await jetstream.pull_subscribe_bind("sink-events", "EVENTS")
        # A minute is over when it is asked for the second time.
        assert [await watch.is_unchanged() for _ in range(4)] == [False, False, True, True]
        await jetstream.publish("bw.attempts.writer.e.1", b"{}")
        assert [await watch.is_unchanged() for _ in range(3)] == [False, False, False], "it is not stored yet"
        [message] = await stored.fetch(1)
        await message.ack_sync()
        assert [await watch.is_unchanged() for _ in range(3)] == [False, False, True]
        for _ in range(MAX_FAILURES):
            await watch.ask(away, again=False)
        assert [alert.key for alert in await bus.alerts()] == ["agent_anomaly//unwatched"]
        assert [await watch.is_unchanged() for _ in range(3)] == [False, False, False]
        following = AnomalyWatch(away, config.alerts, incidents, lookup, lambda: NOON)
        assert [await following.is_unchanged() for _ in range(3)] == [False, False, False], "its incident is open"
    await away.close()


async def test_each_minute_is_asked_about_once_it_is_recorded_and_not_again_while_nothing_happens(
    own_nats_server: RunningServer, clickhouse_server: RunningServer
) -> None:
    config = config_of(anomalies={"minimum_calls": 1})
    # Each next question is due in 50 ms, as this clock stands still.
    now = NOON + 44 * MINUTE + GRACE - timedelta(milliseconds=50)
    async with bus_of(own_nats_server.url, config) as bus, new_database(clickhouse_server.url) as analytics:
        lookup = Lookup(lambda: bus.client)
        watch = AnomalyWatch(analytics, config.alerts, recorder_of(bus, config), lookup, lambda: now)
        await store_calls(analytics, 0, 40, duration_ms=1000)
        running = asyncio.create_task(watch.run())
        try:
            await until(lambda: watch._unchanged > 1, "nothing to happen")
            await store_calls(analytics, 40, 43, duration_ms=9000)
            unchanged = watch._unchanged
            await until(lambda: watch._unchanged > unchanged + 2, "further minutes")
            assert await bus.alerts() == [], "ClickHouse only had to answer"
            await bus.client.jetstream().publish("bw.attempts.writer.e.1", b"{}")
            [anomaly] = await until(bus.alerts, "the anomaly", timeout_s=20)
        finally:
            await background.stop(running)
    assert (anomaly.key, anomaly.change) == ("agent_anomaly/writer/latency", "opened")


async def test_a_database_that_lacks_the_view_is_no_answer_either(
    own_nats_server: RunningServer, clickhouse_server: RunningServer
) -> None:
    config = config_of()
    nothing = connect(f"{clickhouse_server.url.rstrip('/')}/system")
    async with bus_of(own_nats_server.url, config) as bus:
        watch = AnomalyWatch(nothing, config.alerts, recorder_of(bus, config), Lookup(lambda: bus.client), lambda: NOON)
        for _ in range(MAX_FAILURES):
            await watch.ask(nothing)
        [blind] = await bus.alerts()
    await nothing.close()
    assert blind.text.startswith("ClickHouse refuses the query: ")
    assert "figures_per_minute" in blind.text


async def test_an_alerter_without_clickhouse_leaves_no_anomaly_open(own_nats_server: RunningServer) -> None:
    config = config_of()
    now = datetime.now(UTC)
    place: Place = ("writer", "latency")
    minutes = [Minute(now - number * MINUTE, 9000, 100) for number in range(1, 4)]
    anomaly = signals({place: minutes}, {place: Baseline(1000, 100)}, (), config.alerts.anomalies, now)
    key = "agent_anomaly/writer/execution_cost"
    costly = Firing(key, "agent_anomaly", "Unusual", "It is.", "e1", now, fades=True)
    async with bus_of(own_nats_server.url, config) as bus:
        incidents = recorder_of(bus, config)
        for signal in (*anomaly, *unwatched_signals("ClickHouse does not answer", (), now), costly):
            await incidents.apply(signal)
        async with alerter(bus, config):
            await bus.reported("resolved", times=2)
        ended = [alert for alert in await bus.alerts() if alert.change == "resolved"]
    assert [alert.key for alert in ended] == ["agent_anomaly/writer/latency", "agent_anomaly//unwatched"]
    assert {alert.reason for alert in ended} == {"BREAKWATER_CLICKHOUSE_URL is not set"}
