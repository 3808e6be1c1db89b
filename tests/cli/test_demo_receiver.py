from __future__ import annotations

from datetime import UTC, datetime

import aiohttp
from standardwebhooks import Webhook

from breakwater.alerts.channels.channel import envelope
from breakwater.alerts.contract import Alert
from breakwater.local.demo.report import DeliveredAlerts
from breakwater.local.demo.run import alert_receiver

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OTHER = "whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
AT = datetime(2026, 11, 21, tzinfo=UTC)
ALERT = Alert(
    alert_id="alert_1_1",
    incident_id="inc_1",
    key="breaker_open/writer/gpt-4o",
    change="opened",
    status="firing",
    event="breaker_open",
    severity="critical",
    agent="writer",
    title="Breaker open: writer on gpt-4o",
    text="…",
    payload={},
    count=1,
    version=1,
    opened_at=AT,
    last_at=AT,
    source_id="writer/gpt-4o#1",
    at=AT,
)
CLOSED = ALERT.model_copy(
    update={"alert_id": "alert_1_2", "change": "resolved", "status": "resolved", "event": "breaker_closed"}
)


async def deliver(url: str, alert: Alert, secret: str = SECRET) -> int:
    body, now = envelope(alert, None).decode(), datetime.now(UTC)
    headers = {
        "webhook-id": alert.alert_id,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": Webhook(secret).sign(alert.alert_id, now, body),
    }
    async with aiohttp.ClientSession() as session, session.post(url, data=body, headers=headers) as response:
        return response.status


async def test_changes_of_an_incident_are_received_and_a_message_that_comes_again_counts_once() -> None:
    delivered = DeliveredAlerts()
    async with alert_receiver(SECRET, delivered) as url:
        for alert in (ALERT, ALERT, CLOSED):
            assert await deliver(url, alert) == 204
    assert delivered == DeliveredAlerts([ALERT, CLOSED], repeated=1, refused=0)


async def test_an_alert_that_somebody_else_signed_is_refused_and_counted() -> None:
    delivered = DeliveredAlerts()
    async with alert_receiver(SECRET, delivered) as url:
        assert await deliver(url, ALERT, OTHER) == 401
        assert delivered.alerts == []
        assert await deliver(url, ALERT) == 204
    assert (len(delivered.alerts), delivered.refused) == (1, 1)
