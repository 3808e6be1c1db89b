"""Stores what happened: parse, insert, and only then acknowledge.

A message that is delivered twice makes the same row, which replaces the first. One that can't be stored goes to DLQ and
holds up nobody. While ClickHouse or the bus is away the batch is held, and nothing is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime

import structlog

from breakwater.analytics.client import Analytics
from breakwater.analytics.errors import AnalyticsUnavailable, RowsRejected, Unstorable
from breakwater.analytics.rows import Row
from breakwater.analytics.schema import Table
from breakwater.bus.deadletter import dead_letter
from breakwater.bus.delivery import Delivery, heartbeat
from breakwater.bus.errors import BusUnavailable, PublishRefused
from breakwater.bus.publisher import Publisher
from breakwater.telemetry import Outage
from services.sink import records

FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 5.0
REFUSED_DELAY_S = 300.0
"""How long a message waits that neither ClickHouse nor DLQ takes; it stays on its stream meanwhile."""


class _StoppingError(Exception):
    """The service was told to stop while something was away."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """A row and the message it came with."""

    delivery: Delivery
    row: Row


class Sink:
    """Handles batches of messages. Batches of several streams may be in work at once."""

    def __init__(self, analytics: Analytics, publisher: Publisher, now: Callable[[], datetime]) -> None:
        self._analytics = analytics
        self._publisher = publisher
        self._now = now
        self._clickhouse = Outage("clickhouse")
        self._dead_letters = Outage("dead letters")
        self._stopping = asyncio.Event()

    async def store(self, deliveries: list[Delivery]) -> None:
        """Stores a batch and acknowledges it; on `stop` during an outage, leaves it to be delivered again."""
        try:
            async with heartbeat(deliveries):
                await self._store(deliveries)
        except _StoppingError:
            structlog.get_logger().info("batch_left_for_redelivery", messages=len(deliveries))

    async def stop(self) -> None:
        """Gives up waiting for what is away. Work that needs no waiting is finished."""
        self._stopping.set()

    async def _store(self, deliveries: list[Delivery]) -> None:
        waiting: dict[str, tuple[Table, list[_Pending]]] = {}
        refused: list[Delivery] = []
        for delivery in deliveries:
            try:
                table, row = records.read(delivery.subject, delivery.data, delivery.sequence, delivery.published_at)
            except Unstorable as error:
                if not await self._set_aside(delivery, str(error)):
                    refused.append(delivery)
            else:
                waiting.setdefault(table.name, (table, []))[1].append(_Pending(delivery, row))
        for table, pending in waiting.values():
            refused += await self._insert(table, pending)
        for delivery in deliveries:
            if delivery in refused:
                await delivery.retry_in(REFUSED_DELAY_S)
            else:
                # Unconfirmed: an acknowledgement that is lost costs a redelivery, which replaces the same row.
                await delivery.ack()

    async def _insert(self, table: Table, pending: list[_Pending]) -> list[Delivery]:
        """Stores rows in one insert; where that fails because of some of them, halves until these are found.

        Returns:
            The messages that could be kept nowhere.
        """
        try:
            await self._patiently(
                self._clickhouse, lambda: self._analytics.insert(table, [item.row for item in pending])
            )
        except RowsRejected as error:
            if len(pending) == 1:
                delivery = pending[0].delivery
                return [] if await self._set_aside(delivery, str(error)) else [delivery]
            half = len(pending) // 2
            return await self._insert(table, pending[:half]) + await self._insert(table, pending[half:])
        return []

    async def _set_aside(self, delivery: Delivery, error: str) -> bool:
        """Keeps a message that no table takes on DLQ; False where that is refused."""
        log = structlog.get_logger().bind(subject=delivery.subject, sequence=delivery.sequence)

        async def publish() -> None:
            await dead_letter(
                self._publisher,
                delivery,
                reason="unstorable",
                error=error,
                agent=records.agent_of(delivery.subject),
                execution_id=records.execution_of(delivery.subject),
                at=self._now(),
            )

        try:
            await self._patiently(self._dead_letters, publish)
        except PublishRefused:
            log.exception("dead_letter_refused", error=error, tried_again_in_s=REFUSED_DELAY_S)
            return False
        log.warning("unstorable", error=error)
        return True

    async def _patiently(self, outage: Outage, operation: Callable[[], Awaitable[None]]) -> None:
        """Repeats an operation until the other side is there. Whatever else it raises is an answer, and is passed on.

        Raises:
            _StoppingError: `stop` was called while it was away.
        """
        delay_s = FIRST_DELAY_S
        while True:
            try:
                await operation()
            except (AnalyticsUnavailable, BusUnavailable) as error:
                outage.failed(error)
            except (RowsRejected, PublishRefused):
                outage.worked()
                raise
            else:
                outage.worked()
                return
            try:
                await asyncio.wait_for(self._stopping.wait(), delay_s)
            except TimeoutError:
                delay_s = min(delay_s * 2, LONGEST_DELAY_S)
            else:
                raise _StoppingError
