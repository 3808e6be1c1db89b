"""The webhook channel against a receiver that checks signatures with the receiving side's own library."""

import asyncio
import base64
import re
from collections.abc import AsyncGenerator, Sequence
from datetime import UTC, datetime
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from standardwebhooks import Webhook, WebhookVerificationError

from breakwater.alerts.channels.channel import Link, SendError, SignedWebhook, envelope
from breakwater.alerts.channels.configured_channels import channels_of
from breakwater.alerts.contract import Alert, AlertDigest
from breakwater.kernel.errors import ConfigError
from tests.services.alerter.kit import AT, SECRET, Answer, Receiver, config_of
from tests.services.alerter.messages import alert, digest, held, resolved
from tests.tables import each_row

LOOPBACK = (ip_network("127.0.0.0/8"),)
OLD_SECRET = "whsec_" + base64.b64encode(b"the key of before, for the tests").decode()


def now() -> datetime:
    return datetime.now(UTC)


def channel_of(
    url: str, secrets: Sequence[str] = (SECRET,), timeout_s: float = 10.0, link: Link | None = None
) -> SignedWebhook:
    return SignedWebhook("hook", url, secrets, timeout_s, LOOPBACK, link, now)


@pytest.fixture
async def channel(receiver: Receiver) -> AsyncGenerator[SignedWebhook]:
    await receiver.start()
    one = channel_of(receiver.url)
    yield one
    await one.close()


async def refused(channel: SignedWebhook) -> SendError:
    with pytest.raises(SendError) as caught:
        await channel.send(alert())
    return caught.value


async def test_an_alert_is_signed_and_whole(receiver: Receiver, channel: SignedWebhook) -> None:
    assert (channel.updates, channel.interval_s) == (False, 0.0)
    await channel.send(alert())
    [seen] = receiver.seen
    assert seen.verified() == {
        "type": "breaker_open",
        "timestamp": "2026-11-21T10:00:00.000Z",
        "data": alert().model_dump(mode="json"),
    }
    assert Alert.model_validate(seen.json["data"]) == alert()
    assert seen.headers["webhook-id"] == alert().alert_id
    assert seen.headers["content-type"] == "application/json"


async def test_a_digest_is_signed_and_whole(receiver: Receiver, channel: SignedWebhook) -> None:
    reported = digest([held(1), held(2, event="agent_anomaly", severity="warning")])
    await channel.send(reported)
    [seen] = receiver.seen
    assert seen.verified()["type"] == "digest"
    assert AlertDigest.model_validate(seen.json["data"]) == reported
    assert seen.headers["webhook-id"] == "digest_1"


@pytest.mark.parametrize("message", [alert(), resolved(alert()), digest([held(1)])])
async def test_every_try_has_the_same_id_and_body(
    receiver: Receiver, channel: SignedWebhook, message: Alert | AlertDigest
) -> None:
    receiver.answers = [Answer(500), Answer(503)]
    for _ in range(2):
        with pytest.raises(SendError):
            await channel.send(message)
    await channel.send(type(message).model_validate_json(message.json_bytes()))
    assert len({seen.body for seen in receiver.seen}) == 1
    assert len({seen.headers["webhook-id"] for seen in receiver.seen}) == 1
    assert all(seen.verified() for seen in receiver.seen)


async def test_a_link_stands_beside_the_data_and_is_the_same_at_every_try(receiver: Receiver) -> None:
    await receiver.start()
    one = channel_of(receiver.url, link=lambda incident_id, at: f"https://bw.example/{incident_id}?{at.isoformat()}")
    await one.send(alert())
    await one.send(alert())
    await one.send(digest([held(1)]))
    await one.close()
    first, second, of_digest = (seen.verified() for seen in receiver.seen)
    assert first["link"] == second["link"] == f"https://bw.example/{alert().incident_id}?2026-11-21T10:00:00+00:00"
    assert "link" not in of_digest
    assert set(first) == {"type", "timestamp", "data", "link"}


async def test_while_keys_are_rotated_either_key_verifies(receiver: Receiver) -> None:
    await receiver.start()
    one = channel_of(receiver.url, secrets=(SECRET, OLD_SECRET))
    await one.send(alert())
    await one.close()
    [seen] = receiver.seen
    assert len(seen.headers["webhook-signature"].split(" ")) == 2
    for secret in (SECRET, OLD_SECRET):
        assert Webhook(secret).verify(seen.body, seen.headers)["type"] == "breaker_open"


async def test_a_signature_made_with_another_secret_or_over_another_body_is_found_out(
    receiver: Receiver, channel: SignedWebhook
) -> None:
    await channel.send(alert())
    [seen] = receiver.seen
    stranger = Webhook(base64.b64encode(b"a stranger's key, long enough").decode())
    with pytest.raises(WebhookVerificationError):
        stranger.verify(seen.body, seen.headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(SECRET).verify(seen.body.replace(b"writer", b"reader"), seen.headers)


@pytest.mark.parametrize(
    ("status", "permanent", "disables"),
    [(400, True, False), (404, True, False), (410, True, True), (302, True, False), (500, False, False)],
)
async def test_a_refusal_says_whether_another_try_is_worth_it(
    receiver: Receiver, channel: SignedWebhook, status: int, permanent: bool, disables: bool
) -> None:
    receiver.always = Answer(status, headers={"Location": f"{receiver.url}/elsewhere"})
    failure = await refused(channel)
    assert (failure.permanent, failure.disables) == (permanent, disables)
    assert f"the receiver answered {status}" in str(failure)
    assert len(receiver.seen) == 1


async def test_retry_after_is_passed_on(receiver: Receiver, channel: SignedWebhook) -> None:
    receiver.always = Answer(429, headers={"Retry-After": "17"})
    failure = await refused(channel)
    assert (failure.permanent, failure.retry_after_s) == (False, 17.0)


async def test_a_receiver_that_is_down_is_no_refusal(receiver: Receiver) -> None:
    one = channel_of(receiver.url)
    failure = await refused(one)
    await one.close()
    assert not failure.permanent
    assert "/hook" not in str(failure)


@pytest.mark.parametrize("drips", ["headers", "silence"])
async def test_a_receiver_that_drips_its_answer_is_not_waited_for(drips: str) -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n")
        try:
            while drips == "headers":
                writer.write(b"x-drop: 1\r\n")
                await writer.drain()
                await asyncio.sleep(0.02)
            await asyncio.sleep(30)
        finally:
            writer.close()

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    one = channel_of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", timeout_s=0.3)
    async with asyncio.timeout(10):
        failure = await refused(one)
    await one.close()
    server.close()
    assert str(failure) == "no answer in time"
    assert not failure.permanent


async def test_the_body_of_an_answer_is_not_waited_for() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 1000)
            await asyncio.sleep(0.02)

    app = web.Application()
    app.router.add_post("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    one = channel_of(f"http://127.0.0.1:{runner.addresses[0][1]}/")
    async with asyncio.timeout(5):
        await one.send(alert())
    await one.close()
    await runner.cleanup()


def settings_of(**more: Any) -> dict[str, Any]:
    return {"hook": {"webhook": {"url": "https://hooks.example/x", "secret": {"env": "HOOK_SECRET"}, **more}}}


def test_the_config_makes_the_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLD_SECRET", OLD_SECRET)
    config = config_of(channels=settings_of(previous_secret={"env": "OLD_SECRET"}))
    [one] = channels_of(config.alerts, sent_messages=_none, now=now)
    assert one.name == "hook"
    assert isinstance(one, SignedWebhook)


@each_row("place", ["secret", "previous_secret"])
@each_row("secret", ["whsec_", "whsec_not base64!", "whsec_\N{SNOWMAN}", "c2VjcmV0IHdpdGhvdXQgcHJlZml4", "whsec_====="])
def test_a_secret_that_can_sign_nothing_is_refused_without_being_shown(
    monkeypatch: pytest.MonkeyPatch, place: str, secret: str
) -> None:
    monkeypatch.setenv("BAD_SECRET", secret)
    config = config_of(channels=settings_of(**{place: {"env": "BAD_SECRET"}}))
    with pytest.raises(ConfigError, match=re.escape(f"alerts.channels.hook.webhook.{place}: must be whsec_")) as caught:
        channels_of(config.alerts, sent_messages=_none, now=now)
    assert secret == "whsec_" or secret not in str(caught.value)


def test_a_secret_that_is_missing_is_named_by_its_setting(tmp_path: Path) -> None:
    config = config_of(channels=settings_of(secret={"file": str(tmp_path / "absent")}))
    with pytest.raises(ConfigError, match=r"alerts\.channels\.hook\.webhook\.secret: the secret file .*absent"):
        channels_of(config.alerts, sent_messages=_none, now=now)


def test_links_need_a_secret_of_some_length(monkeypatch: pytest.MonkeyPatch) -> None:
    links = {"base_url": "https://bw.example", "secret": {"env": "LINK_SECRET"}}
    config = config_of(channels=settings_of(), links=links)
    monkeypatch.setenv("LINK_SECRET", "short")
    with pytest.raises(ConfigError, match=r"alerts\.links\.secret: it has 5 characters, but needs at least 32"):
        channels_of(config.alerts, sent_messages=_none, now=now)
    monkeypatch.setenv("LINK_SECRET", "x" * 32)
    assert len(channels_of(config.alerts, sent_messages=_none, now=now)) == 1


def test_a_fingerprint_distinguishes_urls_and_not_keys() -> None:
    one = channel_of("https://a.example/")
    assert one.fingerprint == channel_of("https://a.example/", secrets=(OLD_SECRET,)).fingerprint
    assert one.fingerprint != channel_of("https://b.example/").fingerprint


def test_the_envelope_of_an_alert_does_not_depend_on_the_clock() -> None:
    assert envelope(alert(), None) == envelope(alert(), None)
    assert envelope(alert(at=AT), None) == envelope(alert(), None)


def _none(name: str) -> Any:
    raise AssertionError("a webhook remembers no messages")
