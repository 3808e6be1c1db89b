"""What an alerter does besides reporting events: tests of channels and second tries."""

from __future__ import annotations

from typing import Any

from breakwater.alerts.contract import ChannelTest
from breakwater.alerts.store.channels import AlerterBus
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import Stream
from tests.alerts.test_outbox import alert
from tests.helpers import until
from tests.server_sources import RunningServer
from tests.services.alerter.kit import Answer, Bus, Receiver, alerter, bus_of, config_of, opened
from tests.services.alerter.test_notifier import Recorder


def config_with(receiver: Receiver, **alerts: Any) -> Any:
    channel = {"webhook": {"url": receiver.url, "secret": {"env": "HOOK_SECRET"}}}
    return config_of(channels={"ops": channel}, allow_networks=["127.0.0.0/8"], **alerts)


async def ask_test(bus: Bus, channel: str) -> ChannelTest:
    answer = await bus.client.request(subjects.channel_test(channel), b"", timeout=30)
    return ChannelTest.model_validate_json(answer.data)


async def test_a_test_message_says_what_came_of_it(own_nats_server: RunningServer, receiver: Receiver) -> None:
    config = config_with(receiver)
    async with bus_of(own_nats_server.url, config) as bus, alerter(bus, config, processes=2):
        down = await ask_test(bus, "ops")
        assert (down.channel, down.delivered) == ("ops", False)
        assert down.error is not None
        await receiver.start()
        receiver.answers.append(Answer(403))
        refused = await ask_test(bus, "ops")
        assert (refused.delivered, refused.error) == (False, "the receiver answered 403")
        assert await ask_test(bus, "ops") == ChannelTest(channel="ops", delivered=True)
        unknown = await ask_test(bus, "öps.*")
        assert (unknown.channel, unknown.delivered) == ("öps.*", False)
        assert await bus.alerts() == []
    reported = receiver.seen[-1].verified()["data"]
    assert reported["title"] == "Test of channel ops"
    assert reported["payload"] == {"test": True}


async def test_a_receiver_that_was_gone_is_reported_again_once_a_test_has_reached_it(
    own_nats_server: RunningServer, receiver: Receiver
) -> None:
    await receiver.start()
    receiver.answers.append(Answer(410))
    config = config_with(receiver, on_events=["breaker_open"])
    async with bus_of(own_nats_server.url, config) as bus, alerter(bus, config):
        await bus.publish(opened(1))
        await bus.finished("ALERTS", "alerter-channel-ops", 1)
        await bus.publish(opened(1, model="other", transition_id="other"))
        await bus.finished("ALERTS", "alerter-channel-ops", 2)
        assert len(receiver.seen) == 1
        assert len(await bus.dead_letters()) == 2
        assert (await ask_test(bus, "ops")).delivered
        await bus.publish(opened(1, model="third", transition_id="third"))
        await until(lambda: len(receiver.seen) >= 3, "the alert after the test")
    assert receiver.seen[-1].verified()["data"]["model"] == "third"


async def test_what_was_given_up_is_sent_when_somebody_asks_for_it(
    own_nats_server: RunningServer, receiver: Receiver
) -> None:
    await receiver.start()
    config = config_with(receiver)
    async with bus_of(own_nats_server.url, config) as bus:
        publisher = Publisher(lambda: bus.client, "test")
        for channel, body in (("ops", alert("a").json_bytes()), ("unknown", b"{}"), ("ops", b"no alert")):
            number = len(body)
            await publisher.raw(subjects.alert_replay(channel, number), body, {"Breakwater-Channel": channel})
        async with alerter(bus, config):
            await bus.finished("ALERTER", "alerter-replays", 3)
    [seen] = receiver.seen
    assert seen.headers["webhook-id"] == "alert_a_1"


async def test_a_disabled_channel_is_known_by_its_receiver_and_not_by_its_name(own_nats_server: RunningServer) -> None:
    async with bus_of(own_nats_server.url, config_of()) as bus:
        memory = AlerterBus(lambda: bus.client, Publisher(lambda: bus.client, "alerter"))
        one, other = Recorder(fingerprint="one"), Recorder(fingerprint="other")
        assert not await memory.is_disabled(one)
        await memory.disable(one)
        assert await memory.is_disabled(one)
        assert not await memory.is_disabled(other)
        await memory.enable(other)
        assert not await memory.is_disabled(one)
        assert (await bus.client.jetstream().stream_info(Stream.ALERTER.value)).state.messages == 1
