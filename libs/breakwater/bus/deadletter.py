"""Keeping what could not be handled: the original bytes, and why."""

from __future__ import annotations

import base64
from datetime import datetime

from breakwater.bus.delivery import Delivery
from breakwater.bus.publisher import Publisher, Stored
from breakwater.contracts import subjects
from breakwater.contracts.events import DeadLetter


async def dead_letter(
    publisher: Publisher,
    delivery: Delivery,
    *,
    reason: str,
    error: str,
    agent: str | None,
    at: datetime,
    execution_id: str | None = None,
    consumer: str | None = None,
) -> Stored:
    """Stores a message on DLQ. Its id is that of the original, so that a repeated call stores it once.

    `consumer` is for streams on which several give up for reasons of their own: each then has its own dead letter.

    Raises:
        BusUnavailable: not stored for sure; the original must not be acknowledged.
        PublishRefused: the stream does not take it.
    """
    dead_letter = DeadLetter(
        reason=reason,
        agent=agent,
        error=error,
        stream=delivery.stream,
        subject=delivery.subject,
        sequence=delivery.sequence,
        headers=dict(delivery.headers),
        payload_base64=base64.b64encode(delivery.data).decode(),
        execution_id=execution_id,
        at=at,
    )
    subject = subjects.dead_letter(reason, agent or "unknown")
    original = f"dlq/{delivery.stream}/{delivery.sequence}"
    return await publisher.event(subject, dead_letter, id=f"{original}/{consumer}" if consumer else original, at=at)
