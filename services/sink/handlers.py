"""Stores messages: parses, inserts, and only then acknowledges.

A message that is delivered twice makes the same row, which replaces the first. One that can't be stored goes to DLQ and
blocks no other message. While ClickHouse or the bus is away the batch is held, and nothing is dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from functools import partial
from typing import TypeVar

import structlog

from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.clickhouse.errors import RowsRejectedError, UnstorableError
from breakwater.kernel.clickhouse.table import Table
from breakwater.kernel.nats.delivery import Delivery, acknowledge, dead_letter, heartbeat
from breakwater.kernel.nats.errors import EventStreamFullError
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.process.outage import Outage, Outages, StoppedWaitingError
from breakwater.records.metrics import SinkMetrics
from breakwater.records.rows import StoredRow
from breakwater.services.sink import records

REFUSED_DELAY_S = 300.0
"""The redelivery delay of a message that both ClickHouse and DLQ refuse."""


RowT = TypeVar("RowT")


_Pending = tuple[Delivery, StoredRow]
"""A message and its row."""


class Sink:
    """Handles batches of messages. Batches of several streams may be in progress at the same time."""

    def __init__(
        self, analytics: Analytics, publisher: Publisher, now: Callable[[], datetime], metrics: SinkMetrics
    ) -> None:
        self._analytics = analytics
        self._publisher = publisher
        self._now = now
        self._metrics = metrics
        self._held: dict[str, datetime] = {}
        self._outages = Outages(self._report)
        for server in ("clickhouse", "nats"):
            metrics.set_unavailable(server, yes=False)

    async def store(self, deliveries: Sequence[Delivery]) -> None:
        """Stores a batch of one stream and acknowledges it; on `stop` during an outage, leaves it for redelivery."""
        stream = deliveries[0].stream
        self._held[stream] = min(delivery.published_at for delivery in deliveries)
        self._metrics.begin_batch(stream, deliveries[-1].waiting)
        self._report_lag()
        try:
            async with heartbeat(deliveries):
                await self._store(deliveries)
        except StoppedWaitingError:
            structlog.get_logger().info("batch_left_for_redelivery", messages=len(deliveries))
        else:
            self._metrics.end_batch(stream)
        finally:
            self._report_lag()
            del self._held[stream]

    @property
    def clickhouse_outage(self) -> Outage | None:
        """Returns the outage of ClickHouse; None if it never had one."""
        return self._outages.of("clickhouse")

    async def stop(self) -> None:
        """Stops waiting for unavailable servers. Work that needs no waiting still completes."""
        self._outages.stop()

    async def _store(self, deliveries: Sequence[Delivery]) -> None:
        waiting: dict[str, tuple[Table, list[_Pending]]] = {}
        refused: list[Delivery] = []
        for delivery in deliveries:
            try:
                table, row = records.read(
                    delivery.subject, delivery.data, delivery.headers, delivery.sequence, delivery.published_at
                )
            except UnstorableError as error:
                if not await self._dead_letter(delivery, str(error)):
                    refused.append(delivery)
            else:
                waiting.setdefault(table.name, (table, []))[1].append((delivery, row))
        # Concurrently: while the server works on one insert, the next one is prepared here.
        inserts = (self._insert(table, pending) for table, pending in waiting.values())
        for outcome in await asyncio.gather(*inserts, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
            refused += outcome
        for delivery in refused:
            await delivery.retry_in(REFUSED_DELAY_S)
        # Without confirmation: a lost acknowledgement costs a redelivery, which replaces the same row.
        await acknowledge([delivery for delivery in deliveries if delivery not in refused])

    async def _insert(self, table: Table, pending: list[_Pending]) -> list[Delivery]:
        """Stores rows in one insert. If ClickHouse rejects some, halves the insert until it has found them.

        Returns:
            The messages that could not be stored anywhere, not even on DLQ.
        """

        async def insert(part: Sequence[_Pending]) -> None:
            began = time.monotonic()
            await self._analytics.insert(table, [row for _, row in part])
            self._metrics.count_rows(table.name, len(part), time.monotonic() - began)

        rejected = await insert_but_rejected(
            lambda part: self._outages.retry_while_unavailable(partial(insert, part)), pending
        )
        return [delivery for (delivery, _), error in rejected if not await self._dead_letter(delivery, str(error))]

    async def _dead_letter(self, delivery: Delivery, error: str) -> bool:
        """Stores a message that no table accepts on DLQ; returns False if DLQ refuses it."""
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
            await self._outages.retry_while_unavailable(publish, unless=EventStreamFullError)
        except EventStreamFullError:
            log.exception("dead_letter_refused", error=error, tried_again_in_s=REFUSED_DELAY_S)
            return False
        self._metrics.count_dead_letter(delivery.stream)
        log.warning("unstorable", error=error)
        return True

    def _report(self, server: str, unavailable: bool) -> None:
        self._metrics.set_unavailable(server, yes=unavailable)
        self._report_lag()

    def _report_lag(self) -> None:
        now = self._now()
        for stream, oldest in self._held.items():
            self._metrics.set_lag(stream, (now - oldest).total_seconds())


async def insert_but_rejected(
    insert: Callable[[Sequence[RowT]], Awaitable[None]], rows: Sequence[RowT]
) -> list[tuple[RowT, RowsRejectedError]]:
    """Inserts rows together, and by halves if one of them can't be stored. Returns those, with their errors."""
    try:
        await insert(rows)
    except RowsRejectedError as error:
        if len(rows) == 1:
            return [(rows[0], error)]
        half = len(rows) // 2
        return await insert_but_rejected(insert, rows[:half]) + await insert_but_rejected(insert, rows[half:])
    return []
