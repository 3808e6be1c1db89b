from __future__ import annotations

from datetime import UTC, datetime

import aiohttp
from standardwebhooks import Webhook

from breakwater.cli.demo.receiver import Receiver
from breakwater.contracts.events import Alert
from services.alerter.webhook import WebhookSender, envelope

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OTHER = "whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
ALERT = Alert(
    alert_id="alert_1",
    event="breaker_open",
    severity="critical",
    agent="writer",
    title="Breaker open: writer on gpt-4o",
    text="…",
    payload={},
    source_id="writer/gpt-4o#1",
    at=datetime(2026, 11, 21, tzinfo=UTC),
)


async def post(receiver: Receiver, secret: str) -> int:
    body, now = envelope(ALERT).decode(), datetime.now(UTC)
    headers = {
        "webhook-id": ALERT.alert_id,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": Webhook(secret).sign(ALERT.alert_id, now, body),
    }
    async with aiohttp.ClientSession() as session, session.post(receiver.url, data=body, headers=headers) as response:
        return response.status


async def test_what_the_alerter_sends_is_received_and_an_alert_that_comes_again_counts_once() -> None:
    async with Receiver(SECRET) as receiver:
        sender = WebhookSender(receiver.url, SECRET, 5, lambda: datetime.now(UTC))
        await sender.open()
        await sender.send(ALERT)
        await sender.send(ALERT)
        await sender.close()
    assert [(alert.alert_id, alert.event, alert.title) for alert in receiver.alerts] == [
        ("alert_1", "breaker_open", "Breaker open: writer on gpt-4o")
    ]
    assert (receiver.repeated, receiver.refused) == (1, 0)


async def test_an_alert_that_somebody_else_signed_is_refused_and_counted() -> None:
    async with Receiver(SECRET) as receiver:
        assert await post(receiver, OTHER) == 401
        assert receiver.alerts == ()
        assert await post(receiver, SECRET) == 204
    assert (len(receiver.alerts), receiver.refused) == (1, 1)
