"""Events become alerts: once, whatever the number of processes and of deliveries."""

import asyncio
import base64

from breakwater.contracts.events import BreakerTransition
from tests.server_sources import RunningServer
from tests.services.alerter.kit import alerter, bus_of, config_of, crossed, opened


async def test_three_alerters_make_one_alert_of_each_event(own_nats_server: RunningServer) -> None:
    config = config_of()
    async with bus_of(own_nats_server.url, config) as bus:
        events = [opened(version) for version in range(1, 41)]
        async with alerter(bus, config, processes=3):
            await asyncio.gather(*(bus.publish(event) for event in events))
            # The same events stored twice, as a breaker service that lost its PubAck after the window would.
            await asyncio.gather(*(bus.publish(event, suffix="-again") for event in events))
            await bus.finished("EVENTS", "alerter", 80)
        alerts = await bus.alerts()
    assert sorted(alert.source_id for alert in alerts) == sorted(event.transition_id for event in events)


async def test_an_event_that_is_delivered_again_makes_no_second_alert(own_nats_server: RunningServer) -> None:
    config = config_of()
    async with bus_of(own_nats_server.url, config) as bus:
        await bus.publish(opened())
        jetstream = bus.client.jetstream()
        # A process that took the event, and died before it acknowledged.
        lost = await jetstream.pull_subscribe_bind("alerter", "EVENTS")
        [taken] = await lost.fetch(1, timeout=5)
        await taken.nak()
        async with alerter(bus, config):
            await bus.finished("EVENTS", "alerter", 1)
        # And one that died after it published, before it acknowledged: the consumer starts over.
        await jetstream.delete_consumer("EVENTS", "alerter")
        async with bus_of(own_nats_server.url, config), alerter(bus, config):
            await bus.finished("EVENTS", "alerter", 1)
        assert len(await bus.alerts()) == 1


async def test_a_flapping_breaker_is_one_incident_until_it_closes(own_nats_server: RunningServer) -> None:
    config = config_of()
    flaps: list[BreakerTransition] = [opened(1)]
    for version in range(2, 12, 2):
        flaps.append(opened(version, from_state="open", to_state="half_open", reason="the cool-down is over"))
        flaps.append(opened(version + 1, from_state="half_open", reason="the half-open probe failed"))
    flaps.append(opened(12, from_state="open", to_state="half_open", reason="the cool-down is over"))
    flaps.append(opened(13, from_state="half_open", to_state="closed", reason="the half-open probe succeeded"))
    flaps.append(opened(14))
    async with bus_of(own_nats_server.url, config) as bus:
        await bus.publish(*flaps)
        async with alerter(bus, config):
            await bus.finished("EVENTS", "alerter", len(flaps))
        alerts = await bus.alerts()
    assert [(alert.event, alert.source_id) for alert in alerts] == [
        ("breaker_open", "writer/gpt-4.1#7.1"),
        ("breaker_closed", "writer/gpt-4.1#7.13"),
        ("breaker_open", "writer/gpt-4.1#7.14"),
    ]


async def test_budget_crossings_become_alerts_with_their_spend(own_nats_server: RunningServer) -> None:
    config = config_of()
    async with bus_of(own_nats_server.url, config) as bus:
        await bus.publish(crossed(80), crossed(100, total="5.25"))
        async with alerter(bus, config):
            await bus.finished("EVENTS", "alerter", 2)
        soft, hard = await bus.alerts()
        stored = await bus.client.jetstream().get_msg("ALERTS", 1)
    assert (soft.event, soft.severity, soft.agent) == ("budget_soft_cap", "warning", None)
    assert "$4.00 of $5.00 (80 %)" in soft.text
    assert (hard.event, hard.severity) == ("budget_hard_cap", "critical")
    assert "$5.25 of $5.00 (105 %)" in hard.text
    assert stored.subject == "bw.alerts.budget_soft_cap"
    assert stored.headers is not None
    assert stored.headers["Nats-Msg-Id"] == stored.headers["ce-id"] == soft.alert_id


async def test_events_that_nobody_asked_for_are_done_with_quietly(own_nats_server: RunningServer) -> None:
    config = config_of(on_events=["budget_hard_cap"])
    async with bus_of(own_nats_server.url, config) as bus:
        await bus.publish(opened(), crossed(80), crossed(100))
        async with alerter(bus, config):
            await bus.finished("EVENTS", "alerter", 3)
        assert [alert.event for alert in await bus.alerts()] == ["budget_hard_cap"]


async def test_an_unreadable_event_is_kept_and_holds_nothing_up(own_nats_server: RunningServer) -> None:
    config = config_of()
    async with bus_of(own_nats_server.url, config) as bus:
        await bus.client.jetstream().publish("bw.breakers.writer.gpt", b"{no json: sk-secret")
        await bus.client.jetstream().publish("bw.budgets.global.daily", b'{"kind": "sk-secret"}')
        await bus.publish(opened())
        async with alerter(bus, config):
            await bus.finished("EVENTS", "alerter", 3)
        first, second = await bus.letters()
        assert len(await bus.alerts()) == 1
    assert (first.reason, first.stream, first.sequence) == ("unreadable", "EVENTS", 1)
    assert base64.b64decode(first.payload_base64) == b"{no json: sk-secret"
    assert second.subject == "bw.budgets.global.daily"
    assert "event_id: Field required" in second.error
    assert "sk-secret" not in first.error + second.error


async def test_an_alert_waits_for_a_server_that_is_away(own_nats_server: RunningServer) -> None:
    config = config_of()
    async with bus_of(own_nats_server.url, config) as bus, alerter(bus, config):
        own_nats_server.kill()
        await own_nats_server.restart_async()
        async with bus_of(own_nats_server.url, config) as again:
            await again.publish(opened())
            await again.finished("EVENTS", "alerter", 1)
            assert len(await again.alerts()) == 1
