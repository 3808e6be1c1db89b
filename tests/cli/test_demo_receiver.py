from __future__ import annotations

from datetime import UTC, datetime

import aiohttp
from standardwebhooks import Webhook

from breakwater.cli.demo.receiver import Receiver
from breakwater.contracts.alerts import Alert, AlertDigest, HeldBack
from services.alerter.webhook import envelope

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
DIGEST = AlertDigest(
    digest_id="digest_1",
    why="rate_limit",
    severity="critical",
    held_from=AT,
    held_until=AT,
    counts={"guard_tripped": 1, "breaker_closed": 1},
    alerts=tuple(
        HeldBack(
            alert_id=f"alert_{number}_1",
            incident_id=f"inc_{number}",
            key="breaker_open/writer/gpt",
            event="guard_tripped",
            severity="critical",
            status="pending",
            title="Task stopped",
            count=1,
            opened_at=AT,
        )
        for number in (2, 3)
    ),
    at=AT,
)


async def deliver(receiver: Receiver, message: Alert | AlertDigest, secret: str = SECRET) -> int:
    body, now = envelope(message, None).decode(), datetime.now(UTC)
    message_id = message.digest_id if isinstance(message, AlertDigest) else message.alert_id
    headers = {
        "webhook-id": message_id,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": Webhook(secret).sign(message_id, now, body),
    }
    async with aiohttp.ClientSession() as session, session.post(receiver.url, data=body, headers=headers) as response:
        return response.status


async def test_changes_of_an_incident_are_received_and_a_message_that_comes_again_counts_once() -> None:
    async with Receiver(SECRET) as receiver:
        for alert in (ALERT, ALERT, CLOSED):
            assert await deliver(receiver, alert) == 204
    assert [(alert.alert_id, alert.incident_id, alert.event, alert.status) for alert in receiver.alerts] == [
        ("alert_1_1", "inc_1", "breaker_open", "firing"),
        ("alert_1_2", "inc_1", "breaker_closed", "resolved"),
    ]
    assert receiver.alerts[0].title == "Breaker open: writer on gpt-4o"
    assert (receiver.repeated, receiver.refused) == (1, 0)


async def test_a_digest_lists_each_of_its_incidents() -> None:
    async with Receiver(SECRET) as receiver:
        for _ in range(2):
            assert await deliver(receiver, DIGEST) == 204
    assert [(alert.alert_id, alert.incident_id, alert.status) for alert in receiver.alerts] == [
        ("alert_2_1", "inc_2", "pending"),
        ("alert_3_1", "inc_3", "pending"),
    ]
    assert receiver.repeated == 1


async def test_an_alert_that_somebody_else_signed_is_refused_and_counted() -> None:
    async with Receiver(SECRET) as receiver:
        assert await deliver(receiver, ALERT, OTHER) == 401
        assert receiver.alerts == ()
        assert await deliver(receiver, ALERT) == 204
    assert (len(receiver.alerts), receiver.refused) == (1, 1)
