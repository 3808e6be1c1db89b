"""The webhook channel against a receiver that checks signatures with the receiving side's own library."""

import base64
import re
from pathlib import Path
from typing import Any

import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from breakwater.config import ConfigError
from breakwater.contracts.events import Alert
from breakwater.policy.alerts import alert_for
from breakwater.settings import Settings
from services.alerter.app import build
from tests.server_sources import RunningServer
from tests.services.alerter.kit import Answer, Receiver, alerter, bus_of, config_of, crossed, opened, until


def webhook(receiver: Receiver, **more: Any) -> dict[str, Any]:
    return {"url": receiver.url, "secret": {"env": "HOOK_SECRET"}, **more}


async def test_an_alert_outlasts_a_receiver_that_is_down_and_then_fails(
    own_nats_server: RunningServer, receiver: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(webhook=webhook(receiver))
    receiver.answers = [Answer(500), Answer(503)]
    async with bus_of(own_nats_server.url, config) as bus, alerter(bus, config):
        await bus.publish(opened())
        # Delivered again: so the first try was made, and nobody was there.
        await bus.delivered("ALERTS", "alerter-webhook", times=2)
        await receiver.start()
        await bus.finished("ALERTS", "alerter-webhook", 1)
        [alert] = await bus.alerts()
        assert await bus.letters() == []
    assert [seen.headers["webhook-id"] for seen in receiver.seen] == [alert.alert_id] * 3
    assert len({seen.body for seen in receiver.seen}) == 1
    assert receiver.seen[-1].verified() == {
        "type": "breaker_open",
        "timestamp": "2026-11-21T10:00:00.000Z",
        "data": alert.model_dump(mode="json"),
    }
    assert receiver.seen[-1].headers["content-type"] == "application/json"
    logged = "".join(capsys.readouterr())
    said = [line for line in logged.splitlines() if "alert channel webhook" in line]
    assert ["unavailable " in said[0], "available_again " in said[1]] == [True, True]
    assert len(said) == 2


async def test_a_signature_made_with_another_secret_is_found_out(
    own_nats_server: RunningServer, receiver: Receiver
) -> None:
    config = config_of(webhook=webhook(await receiver.start()))
    async with bus_of(own_nats_server.url, config) as bus, alerter(bus, config):
        await bus.publish(opened())
        [seen] = await until("the alert", lambda: receiver.seen)
    stranger = Webhook(base64.b64encode(b"a stranger's key, long enough").decode())
    with pytest.raises(WebhookVerificationError):
        stranger.verify(seen.body, seen.headers)


async def test_retry_after_is_honoured(own_nats_server: RunningServer, receiver: Receiver) -> None:
    config = config_of(webhook=webhook(await receiver.start()))
    receiver.answers = [Answer(429, headers={"Retry-After": "2"})]
    async with bus_of(own_nats_server.url, config) as bus, alerter(bus, config):
        await bus.publish(opened())
        await bus.finished("ALERTS", "alerter-webhook", 1)
    refused, taken = receiver.seen
    assert taken.at - refused.at >= 1.95
    assert taken.headers["webhook-id"] == refused.headers["webhook-id"]


@pytest.mark.parametrize("status", [404, 410, 302])
async def test_a_refusal_that_stays_ends_in_a_dead_letter_with_the_whole_alert(
    own_nats_server: RunningServer, receiver: Receiver, status: int
) -> None:
    config = config_of(webhook=webhook(await receiver.start()))
    receiver.always = Answer(status, headers={"Location": f"{receiver.url}/elsewhere"})
    async with bus_of(own_nats_server.url, config) as bus, alerter(bus, config):
        await bus.publish(opened())
        await bus.finished("ALERTS", "alerter-webhook", 1)
        [alert] = await bus.alerts()
        [letter] = await bus.letters()
        subject = (await bus.client.jetstream().get_msg("DLQ", 1)).subject
    assert len(receiver.seen) == 3
    assert (letter.reason, letter.agent, letter.stream) == ("undeliverable", "writer", "ALERTS")
    assert letter.error == f"webhook: the receiver answered {status} (delivery 3)"
    assert Alert.model_validate_json(base64.b64decode(letter.payload_base64)) == alert
    assert subject == "bw.dlq.undeliverable.writer"


async def test_a_refused_alert_does_not_hold_up_the_next(own_nats_server: RunningServer, receiver: Receiver) -> None:
    config = config_of(webhook=webhook(await receiver.start()))
    receiver.answers = [Answer(400)]
    async with bus_of(own_nats_server.url, config) as bus, alerter(bus, config):
        await bus.publish(opened())
        await until("the refused alert", lambda: receiver.seen)
        await bus.publish(crossed())
        await bus.finished("ALERTS", "alerter-webhook", 2)
    assert [seen.verified()["type"] for seen in receiver.seen] == ["breaker_open", "budget_soft_cap", "breaker_open"]


async def test_three_alerters_send_each_alert_once(own_nats_server: RunningServer, receiver: Receiver) -> None:
    config = config_of(webhook=webhook(await receiver.start()))
    async with bus_of(own_nats_server.url, config) as bus, alerter(bus, config, processes=3):
        await bus.publish(*(opened(version) for version in range(1, 101)))
        await bus.finished("ALERTS", "alerter-webhook", 100)
    assert len(receiver.seen) == len({seen.headers["webhook-id"] for seen in receiver.seen}) == 100


async def test_an_unreadable_alert_is_kept_and_holds_nothing_up(
    own_nats_server: RunningServer, receiver: Receiver
) -> None:
    config = config_of(webhook=webhook(await receiver.start()))
    async with bus_of(own_nats_server.url, config) as bus, alerter(bus, config):
        await bus.client.jetstream().publish("bw.alerts.breaker_open", b"[]")
        alert = alert_for(opened(), {"breaker_open"})
        assert alert is not None
        await bus.publish_alert(alert)
        await bus.finished("ALERTS", "alerter-webhook", 2)
        [letter] = await bus.letters()
    assert (letter.reason, letter.sequence) == ("unreadable", 1)
    assert len(receiver.seen) == 1


@pytest.mark.parametrize("secret", ["whsec_", "whsec_not base64!", "c2VjcmV0IHdpdGhvdXQgcHJlZml4"])
def test_a_secret_that_can_sign_nothing_is_refused_without_being_shown(
    monkeypatch: pytest.MonkeyPatch, receiver: Receiver, secret: str
) -> None:
    monkeypatch.setenv("HOOK_SECRET", secret)
    with pytest.raises(ConfigError, match=re.escape("alerts.webhook.secret: must be whsec_")) as caught:
        build(Settings(), config_of(webhook=webhook(receiver)))
    assert secret == "whsec_" or secret not in str(caught.value)


def test_a_secret_that_is_missing_is_named_by_its_setting(tmp_path: Path, receiver: Receiver) -> None:
    config = config_of(webhook=webhook(receiver) | {"secret": {"file": str(tmp_path / "absent")}})
    with pytest.raises(ConfigError, match=r"alerts\.webhook\.secret: the secret file .*absent"):
        build(Settings(), config)
