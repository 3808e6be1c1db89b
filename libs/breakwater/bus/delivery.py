"""A message as handlers see it, the rules of acknowledging it, and keeping it where it can't be handled."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import datetime

import nats.errors
from nats.aio.msg import Msg

from breakwater.bus.publisher import Publisher, Stored
from breakwater.bus.topology import ACK_WAIT_S
from breakwater.contracts import subjects
from breakwater.contracts.events import DeadLetter

ACK_TIMEOUT_S = 5.0


class Delivery:
    """One delivery of one stored message."""

    __slots__ = (
        "_message",
        "data",
        "deliveries",
        "headers",
        "published_at",
        "sequence",
        "stream",
        "subject",
        "waiting",
    )

    def __init__(self, message: Msg) -> None:
        metadata = message.metadata
        self._message = message
        self.subject: str = message.subject
        self.data: bytes = message.data
        self.headers: Mapping[str, str] = message.headers or {}
        self.stream: str = metadata.stream
        self.sequence: int = metadata.sequence.stream
        self.deliveries: int = metadata.num_delivered or 1
        """1 for the first delivery."""
        self.published_at: datetime = metadata.timestamp
        self.waiting: int = metadata.num_pending or 0
        """How many messages stood behind this one for its consumer, delivered to nobody, when it was sent."""

    async def ack(self) -> None:
        """Acknowledges without waiting for the server: for work that may be done twice."""
        await self._message.ack()

    async def ack_sync(self) -> bool:
        """Acknowledges and waits for the server's confirmation.

        Returns:
            False when none came: the message will be delivered again, and the handler must know what to do then.
        """
        try:
            await self._message.ack_sync(timeout=ACK_TIMEOUT_S)  # pyright: ignore[reportArgumentType]  # takes floats
        except (TimeoutError, nats.errors.Error):
            return False
        return True

    async def retry_in(self, delay_s: float) -> None:
        """Gives the message back, to be delivered again after `delay_s`; it holds no slot of this process meanwhile."""
        await self._message.nak(delay=delay_s)

    async def in_progress(self) -> None:
        """Tells the server that the work goes on, which restarts its ack wait."""
        await self._message.in_progress()


async def still_held(deliveries: Iterable[Delivery]) -> None:
    """Tells the server once that these messages are worked on. What is told is lost with the connection."""
    for delivery in deliveries:
        # That costs at most a redelivery, which handlers expect.
        with suppress(nats.errors.Error):
            await delivery.in_progress()


@asynccontextmanager
async def heartbeat(deliveries: Iterable[Delivery], every_s: float = ACK_WAIT_S / 3) -> AsyncGenerator[None]:
    """Keeps messages from being delivered to somebody else while the block runs."""
    held = tuple(deliveries)

    async def beat() -> None:
        while True:
            await asyncio.sleep(every_s)
            await still_held(held)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


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
