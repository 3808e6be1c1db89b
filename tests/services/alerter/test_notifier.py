"""Alerts on their way to a channel: in order, each once, whatever the receiver and the bus do."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from breakwater.alerts.channels.channel import AlertSender, SendError
from breakwater.alerts.contract import Alert, AlertChange, AlertDigest
from breakwater.alerts.metrics import AlerterMetrics
from breakwater.alerts.rules import outbox
from breakwater.alerts.rules.incidents import IncidentRules
from breakwater.alerts.rules.outbox import ChannelMessage, ChannelRules, message_id
from breakwater.alerts.rules.signals import of_dead_letter
from breakwater.alerts.settings import Route
from breakwater.alerts.store.channels import AlerterBus, SentMessages
from breakwater.alerts.store.incidents import IncidentLog
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.contract import DeadLetter
from breakwater.kernel.nats.delivery import Delivery
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.pull import Pull
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.nats.topology import ACK_WAIT_S, alert_consumer
from breakwater.kernel.process import background
from breakwater.redaction.rules.redact import Redactor
from breakwater.redaction.settings import RedactionRules
from breakwater.services.alerter import notifier as notifier_module
from breakwater.services.alerter.channel_queue import Schedule
from breakwater.services.alerter.clock import SYSTEM_CLOCK
from breakwater.services.alerter.incident_recorder import IncidentRecorder
from breakwater.services.alerter.notifier import Notifier
from tests.alerts.test_outbox import alert
from tests.helpers import until
from tests.server_sources import RunningServer
from tests.services.alerter.kit import Bus, bus_of, config_of

CONFIG = config_of(channels={"ops": {"webhook": {"url": "http://127.0.0.1:1/", "secret": {"env": "HOOK_SECRET"}}}})
DURABLE = alert_consumer("ops")
AT_ONCE = Schedule(first_s=0.01, max_s=0.05, give_up_s=0.5)


class Recorder(AlertSender):
    """A channel that keeps what it is sent, and fails as configured."""

    def __init__(self, *failures: SendError | None, updates: bool = False, fingerprint: str = "one") -> None:
        super().__init__("ops", fingerprint)
        self.updates = updates
        self.failures = list(failures)
        self.always: SendError | None = None
        self.tried: list[str] = []
        self.tried_at: list[float] = []
        self.sent: list[ChannelMessage] = []

    async def send(self, message: ChannelMessage) -> None:
        self.tried.append(message_id(message))
        self.tried_at.append(asyncio.get_running_loop().time())
        failure = self.failures.pop(0) if self.failures else self.always
        if failure is not None:
            raise failure
        self.sent.append(message)

    @property
    def ids(self) -> list[str]:
        return [message_id(message) for message in self.sent]


def alerter_bus_of(bus: Bus) -> AlerterBus:
    return AlerterBus(lambda: bus.client, Publisher(lambda: bus.client, "alerter"))


@asynccontextmanager
async def delivering(
    bus: Bus,
    channel: Recorder,
    *,
    schedule: Schedule = AT_ONCE,
    quiet_s: float = 0.0,
    max_waiting: int = 1000,
    **route: Any,
) -> AsyncGenerator[Notifier]:
    alerter_bus = alerter_bus_of(bus)
    log = IncidentLog(lambda: bus.client, alerter_bus.publisher, Redactor.compile(RedactionRules()))
    notifier = Notifier(
        channel,
        ChannelRules(Route.model_validate({"rate_limit": "off"} | route), quiet_s, every_change=channel.updates),
        alerter_bus,
        IncidentRecorder(log, IncidentRules(CONFIG.alerts.on_events, 600, (), CONFIG.alerts.reminders)),
        AlerterMetrics(CollectorRegistry()).of(channel.name),
        SYSTEM_CLOCK,
        max_waiting=max_waiting,
        schedule=schedule,
    )
    task = asyncio.create_task(notifier.run())
    try:
        yield notifier
    finally:
        await background.stop(task)


@pytest.fixture
async def bus(own_nats_server: RunningServer) -> AsyncGenerator[Bus]:
    async with bus_of(own_nats_server.url, CONFIG) as one:
        yield one


def of(incident: str, *changes: AlertChange, **more: Any) -> list[Alert]:
    return [
        alert(incident, change, version, at=datetime.now(UTC), **more)
        for version, change in enumerate(changes, start=1)
    ]


async def publish(bus: Bus, *alerts: Alert) -> None:
    for one in alerts:
        await bus.publish_alert(one)


async def test_alerts_arrive_in_order_and_are_acknowledged(bus: Bus) -> None:
    channel = Recorder()
    await publish(bus, *(alert(f"i{number}") for number in range(20)))
    async with delivering(bus, channel):
        await bus.finished("ALERTS", DURABLE, 20)
    assert channel.ids == [f"alert_i{number}_1" for number in range(20)]


async def test_what_fails_is_tried_again_with_the_same_id_and_what_comes_later_of_it_waits(bus: Bus) -> None:
    channel = Recorder(*(SendError("503") for _ in range(4)))
    first, second = of("a", "opened", "acknowledged")
    async with delivering(bus, channel):
        await publish(bus, first)
        await until(lambda: channel.tried)
        await publish(bus, second)
        await bus.finished("ALERTS", DURABLE, 2)
    assert channel.tried == ["alert_a_1"] * 5 + ["alert_a_2"]


async def test_a_receiver_that_asks_to_wait_is_left_alone_so_long(bus: Bus) -> None:
    channel = Recorder(SendError("429", retry_after_s=1.0))
    async with delivering(bus, channel):
        await publish(bus, alert("a"), alert("b"))
        await bus.finished("ALERTS", DURABLE, 2)
    refused_at, next_at, *_ = channel.tried_at
    assert next_at - refused_at >= 0.99
    assert sorted(channel.ids) == ["alert_a_1", "alert_b_1"]


async def test_a_message_that_is_refused_holds_up_no_other_and_becomes_a_dead_letter(bus: Bus) -> None:
    channel = Recorder(*(SendError("the receiver answered 400", permanent=True) for _ in range(4)))
    async with delivering(bus, channel, schedule=Schedule(first_s=0.2, max_s=0.2)):
        await publish(bus, alert("bad"))
        await until(lambda: channel.tried)
        channel.failures.insert(0, None)  # type: ignore[arg-type]
        await publish(bus, alert("good"))
        await bus.finished("ALERTS", DURABLE, 2)
    assert channel.ids == ["alert_good_1"]
    [dead_letter] = await bus.dead_letters()
    assert (dead_letter.reason, dead_letter.stream, dead_letter.sequence) == ("undeliverable", "ALERTS", 1)
    assert dead_letter.headers["Breakwater-Channel"] == "ops"
    assert dead_letter.error == "ops: the receiver answered 400 (tried 4 times)"
    assert Alert.model_validate_json(base64.b64decode(dead_letter.payload_base64)).alert_id == "alert_bad_1"


async def test_a_receiver_that_is_away_for_too_long_gets_its_alerts_as_dead_letters_and_the_next_one_when_it_is_back(
    bus: Bus,
) -> None:
    channel = Recorder()
    channel.always = SendError("no answer in time")
    async with delivering(bus, channel):
        await publish(bus, alert("a"))
        await bus.finished("ALERTS", DURABLE, 1)
        channel.always = None
        await publish(bus, alert("b"))
        await bus.finished("ALERTS", DURABLE, 2)
    assert channel.ids == ["alert_b_1"]
    assert [dead_letter.sequence for dead_letter in await bus.dead_letters()] == [1]


async def test_a_receiver_that_is_gone_is_called_no_more_also_by_the_next_process(bus: Bus) -> None:
    channel = Recorder(SendError("the receiver answered 410", permanent=True, disables=True))
    async with delivering(bus, channel):
        await publish(bus, alert("a"), alert("b"))
        await bus.finished("ALERTS", DURABLE, 2)
    assert channel.tried == ["alert_a_1"]
    later = Recorder()
    async with delivering(bus, later):
        await publish(bus, alert("c"))
        await bus.finished("ALERTS", DURABLE, 3)
    assert later.tried == []
    dead_letters = await bus.dead_letters()
    assert sorted(base64.b64decode(one.payload_base64)[:30] for one in dead_letters) == sorted(
        alert(name).json_bytes()[:30] for name in "abc"
    )
    # Another receiver has not said so.
    other = Recorder()
    other.fingerprint = "two"
    async with delivering(bus, other):
        await publish(bus, alert("d"))
        await bus.finished("ALERTS", DURABLE, 4)
    assert other.ids == ["alert_d_1"]


async def test_what_was_given_up_is_tried_once_more_when_somebody_asks(bus: Bus) -> None:
    channel = Recorder()
    await bus.client.jetstream().publish("bw.alerter.replays.ops.1", alert("a").json_bytes())
    pull = Pull(lambda: bus.client, Stream.ALERTER, "alerter-replays")
    [delivery] = await pull.fetch(10, 5.0)
    async with delivering(bus, channel) as notifier:
        notifier.replay(delivery, alert("a"))
        await bus.finished("ALERTER", "alerter-replays", 1)
    await pull.close()
    assert channel.ids == ["alert_a_1"]


async def test_a_flood_is_a_few_messages_and_a_digest_that_misses_nothing(bus: Bus) -> None:
    channel = Recorder()
    await publish(bus, *(alert(f"i{number}") for number in range(50)))
    async with delivering(bus, channel, rate_limit={"messages": 5, "within_s": 600}):
        await bus.finished("ALERTS", DURABLE, 50)
    assert len(channel.sent) == 5
    *single, digest = channel.sent
    assert isinstance(digest, AlertDigest)
    heard = [one.incident_id for one in single if isinstance(one, Alert)]
    assert sorted(heard + [one.incident_id for one in digest.alerts]) == sorted(f"inc_i{n}" for n in range(50))


async def test_what_is_held_back_stays_with_who_holds_it_and_goes_to_the_next_one(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier_module, "HEARTBEAT_S", 0.1)
    resolved = alert("a", "resolved", 2, at=datetime.now(UTC))
    await publish(bus, resolved)
    first = Recorder()
    async with delivering(bus, first, quiet_s=600) as notifier:
        await until(lambda: notifier.held == 1)
        assert first.tried == []
    info = await bus.client.jetstream().consumer_info("ALERTS", DURABLE)
    assert info.num_ack_pending == 1
    stopped = asyncio.get_running_loop().time()
    async with delivering(bus, second := Recorder(), quiet_s=0.0):
        await bus.finished("ALERTS", DURABLE, 1)
    assert second.ids == ["alert_a_2"]
    assert asyncio.get_running_loop().time() - stopped < ACK_WAIT_S / 2


async def test_an_alert_that_is_delivered_twice_is_reported_once(bus: Bus) -> None:
    channel = Recorder()
    async with delivering(bus, channel):
        await publish(bus, alert("a"))
        await bus.finished("ALERTS", DURABLE, 1)
        # As if the server had not heard of the acknowledgement.
        await bus.delivered_again("ALERTS", DURABLE)
        await bus.finished("ALERTS", DURABLE, 1)
    assert channel.ids == ["alert_a_1"]


async def test_a_channel_that_updates_hears_the_changes_of_what_it_has_posted(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "UPDATE_EVERY", timedelta(seconds=0.2))
    channel = Recorder(updates=True)
    await SentMessages(alerter_bus_of(bus), "ops").put("inc_a", "1700000000.000100")
    await publish(bus, *of("a", "opened"))
    async with delivering(bus, channel, quiet_s=600):
        await bus.finished("ALERTS", DURABLE, 1)
        for one in of("a", "opened", "repeated", "resolved")[1:]:
            await publish(bus, one)
            await until(lambda one=one: one.alert_id in channel.ids)
        await bus.finished("ALERTS", DURABLE, 3)
    assert channel.ids == ["alert_a_1", "alert_a_2", "alert_a_3"]


async def test_what_is_no_alert_is_passed_over(bus: Bus) -> None:
    channel = Recorder()
    await bus.client.jetstream().publish("bw.alerts.breaker_open", b"no alert")
    await publish(bus, alert("a"))
    async with delivering(bus, channel):
        await bus.finished("ALERTS", DURABLE, 2)
    assert channel.ids == ["alert_a_1"]


async def test_a_bus_that_comes_back_is_gone_on_with(bus: Bus, own_nats_server: RunningServer) -> None:
    channel = Recorder()
    async with delivering(bus, channel, schedule=Schedule()):
        await publish(bus, alert("a"))
        await bus.finished("ALERTS", DURABLE, 1)
        own_nats_server.kill()
        await asyncio.sleep(0.5)
        await own_nats_server.restart_async()
        await until(lambda: bus.client.is_connected)
        await publish(bus, alert("b"))
        await until(lambda: len(channel.sent) >= 2)
    assert channel.ids == ["alert_a_1", "alert_b_1"]


def test_the_wait_grows_to_its_ceiling() -> None:
    waits = [Schedule().backoff_s(failures) for failures in range(1, 12)]
    assert waits == [0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60, 60]
    assert Schedule().backoff_s(10**6) == 60
    assert Schedule().pause_s(SendError("429", retry_after_s=1e9)) == timedelta(hours=1).total_seconds()


async def again(bus: Bus, *alerts: Alert) -> list[Delivery]:
    """Alerts that somebody wants to be tried once more."""
    publisher = Publisher(lambda: bus.client, "test")
    for number, one in enumerate(alerts, start=1):
        await publisher.raw(subjects.alert_replay("ops", number), one.json_bytes(), {"Breakwater-Channel": "ops"})
    pull = Pull(lambda: bus.client, Stream.ALERTER, "alerter-replays")
    deliveries: list[Delivery] = []
    while len(deliveries) < len(alerts):
        deliveries += await pull.fetch(100, 5.0)
    await pull.close()
    return deliveries


async def test_second_tries_wait_for_the_rate_limit_and_for_what_nobody_has_heard_yet(bus: Bus) -> None:
    channel = Recorder()
    old = [alert(f"old{number}") for number in range(8)]
    deliveries = await again(bus, *old)
    async with delivering(bus, channel, rate_limit={"messages": 4, "within_s": 3600}) as notifier:
        for delivery, one in zip(deliveries, old, strict=True):
            notifier.replay(delivery, one)
        await until(lambda: len(channel.sent) == 4)
        assert notifier.held == 0  # they take no room from what is new
    assert len(channel.sent) == 4
    async with delivering(bus, fresh := Recorder(), rate_limit={"messages": 2, "within_s": 3600}) as notifier:
        await publish(bus, alert("new"))
        await until(lambda: notifier.held or fresh.sent)
        notifier.replay(deliveries[0], old[0])
        await until(lambda: len(fresh.sent) == 2)
    assert fresh.ids == ["alert_new_1", "alert_old0_1"]


async def test_a_second_try_reports_an_incident_as_it_is_now(bus: Bus) -> None:
    channel = Recorder()
    newer = alert("a", "resolved", 3, at=datetime.now(UTC))
    [delivery] = await again(bus, alert("a"))
    await publish(bus, newer)
    async with delivering(bus, channel, quiet_s=600) as notifier:
        await notifier._incidents.log.catch_up()
        notifier.replay(delivery, alert("a"))
        await until(lambda: channel.sent)
    assert channel.ids == ["alert_a_3"]


async def test_a_second_try_reaches_a_receiver_that_was_gone_and_ends_that(bus: Bus) -> None:
    disabling = Recorder(SendError("the receiver answered 410", permanent=True, disables=True))
    async with delivering(bus, disabling):
        await publish(bus, alert("a"))
        await bus.finished("ALERTS", DURABLE, 1)
    [delivery] = await again(bus, alert("a"))
    back = Recorder()
    async with delivering(bus, back) as notifier:
        notifier.replay(delivery, alert("a"))
        await until(lambda: back.sent)
        await publish(bus, alert("b"))
        await until(lambda: len(back.sent) == 2)
    assert back.ids == ["alert_a_1", "alert_b_1"]


async def test_what_nobody_foresaw_of_one_message_holds_up_no_other(bus: Bus) -> None:
    class Odd(Recorder):
        async def send(self, message: ChannelMessage) -> None:
            if message_id(message) == "alert_odd_1":
                raise RecursionError("nobody foresaw this")
            await super().send(message)

    channel = Odd()
    await publish(bus, alert("odd"), alert("good"))
    async with delivering(bus, channel):
        await bus.finished("ALERTS", DURABLE, 2)
    assert channel.ids == ["alert_good_1"]
    [dead_letter] = await bus.dead_letters()
    assert "it can't be sent (RecursionError)" in dead_letter.error


async def test_a_channel_whose_alerts_did_not_arrive_is_an_incident_until_one_arrives(bus: Bus) -> None:
    log = IncidentLog(lambda: bus.client, Publisher(lambda: bus.client, "test"), Redactor.compile(RedactionRules()))
    rules = IncidentRules(CONFIG.alerts.on_events, 600, (), CONFIG.alerts.reminders)
    dead_letter = DeadLetter.model_validate(
        {
            "reason": "undeliverable",
            "error": "ops: no answer in time",
            "stream": "ALERTS",
            "subject": "bw.alerts.breaker_open",
            "sequence": 1,
            "headers": {"Breakwater-Channel": "ops"},
            "payload_base64": "",
            "at": datetime.now(UTC),
        }
    )
    [raised] = of_dead_letter(dead_letter, "dlq/1")
    await log.apply(raised, rules)
    channel = Recorder()
    async with delivering(bus, channel) as notifier:
        await notifier._incidents.log.catch_up()
        await publish(bus, alert("a"))
        await bus.reported("resolved")
    last = (await bus.alerts())[-1]
    assert (last.key, last.title) == (raised.key, "Alerts are delivered again: channel ops")


async def test_a_stream_that_was_made_again_begins_again_at_one_and_loses_no_alert(bus: Bus) -> None:
    channel = Recorder()
    async with delivering(bus, channel):
        await publish(bus, *(alert(f"old{number}") for number in range(5)))
        await bus.finished("ALERTS", DURABLE, 5)
        await bus.client.jetstream().delete_stream("ALERTS")
        async with bus_of(bus.url, CONFIG):
            await publish(bus, *(alert(f"new{number}") for number in range(7)))
            await bus.finished("ALERTS", DURABLE, 7)
    assert channel.ids[5:] == [f"alert_new{number}_1" for number in range(7)]


async def test_what_is_being_sent_arrives_before_the_process_stops_and_is_not_sent_again(bus: Bus) -> None:
    class Slow(Recorder):
        async def send(self, message: ChannelMessage) -> None:
            self.tried.append(message_id(message))
            await asyncio.sleep(1.5)
            self.sent.append(message)

    channel = Slow()
    async with delivering(bus, channel):
        await publish(bus, alert("a"))
        await until(lambda: channel.tried)
    assert channel.ids == ["alert_a_1"]
    await bus.finished("ALERTS", DURABLE, 1)
