"""Compares ClickHouse with EVENTS by sequence, and stores missing messages again.

Acknowledged messages must be in a table, whatever has happened to a server since. Each sequence is compared twice, a
check apart. By the second check, the operating system has written its memory to disk, so that the check finds what a
power cut in between has lost. After that, a sequence is never compared again: rows that are deleted from ClickHouse
stay deleted, and messages that fit no table, and are on DLQ, are not retried for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, suppress
from datetime import datetime
from functools import partial
from itertools import groupby
from typing import cast

import structlog

from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.clickhouse.errors import AnalyticsUnavailableError, QueryError, UnstorableError
from breakwater.kernel.clickhouse.table import Table
from breakwater.kernel.nats.core import ClientGetter
from breakwater.kernel.nats.errors import BusError, BusUnavailableError
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.process import background
from breakwater.kernel.process.outage import Outage
from breakwater.records.log_comparison import MARGIN, LogComparison, last_comparison, missing_sequences, save_comparison
from breakwater.records.metrics import SinkMetrics
from breakwater.records.rows import StoredRow
from breakwater.services.sink import records
from breakwater.services.sink.handlers import insert_but_rejected

CHECK_EVERY_S = 60.0
"""Longer than a message waits for its redelivery, and than an operating system keeps written data in memory."""

SPAN = 1_000_000
"""Sequences that are compared in one query."""

MOST = 1_000
"""The most missing messages that are stored again together."""

CONSUMER = "sink-events"
EVENTS = "bw.>"


class LogComparer:
    """Compares while the sink stores. Of several sinks, the first to check does it."""

    def __init__(
        self, analytics: Analytics, connection: ClientGetter, now: Callable[[], datetime], metrics: SinkMetrics
    ) -> None:
        self._analytics = analytics
        self._now = now
        self._metrics = metrics
        self._lookup = Lookup(connection)
        self._delivered = 0
        self._is_first = True
        self._settled = ("", 0)

    async def begin(self) -> None:
        """Notes which messages were delivered before this sink started. Call it before the sink reads any."""
        with suppress(BusUnavailableError):  # the first check then compares nothing, but the next one does
            self._delivered = (await self._lookup.progress(Stream.EVENTS, CONSUMER)).delivered

    async def run(self) -> None:
        """Checks immediately, and then every minute, until cancelled."""
        outage = Outage("comparing EVENTS with ClickHouse")
        while True:
            await outage.run_logged(self.check, expected=(BusError, AnalyticsUnavailableError, QueryError))
            await asyncio.sleep(background.aligned_delay(CHECK_EVERY_S))

    async def check(self) -> None:
        """Compares the messages that had been delivered by the previous check: they are stored by now.

        The first check compares what was delivered before this sink started: messages of a sink that has died are then
        stored immediately, and not only when they are redelivered.

        Raises:
            BusUnavailableError, AnalyticsUnavailableError, QueryError: check again.
        """
        progress = await self._lookup.progress(Stream.EVENTS, CONSUMER)
        log = await self._lookup.facts(Stream.EVENTS)
        is_first = self._is_first
        self._is_first = False
        upto = self._delivered
        self._delivered = progress.delivered
        if upto <= (self._settled[1] if self._settled[0] == log.identity else 0):
            return
        comparison = await last_comparison(self._analytics, log.identity)
        now = self._now()
        is_due = comparison.at is None or (now - comparison.at).total_seconds() >= CHECK_EVERY_S / 2
        if comparison.settled < upto and (is_due or is_first):
            lost = await self._compare(max(comparison.settled + 1, log.first), upto, progress.acknowledged)
            comparison = LogComparison(
                settled=min(comparison.upto, upto) if is_due else comparison.settled,
                upto=max(comparison.upto, upto),
                lost=comparison.lost + lost,
                lost_at=now if lost else comparison.lost_at,
                at=now,
            )
            await save_comparison(self._analytics, log.identity, comparison)
        self._settled = (log.identity, comparison.settled)

    async def _compare(self, first: int, last: int, acknowledged: int) -> int:
        """Stores missing messages again. Returns how many of them had been acknowledged as stored."""
        lost = 0
        while first <= last and (head := await self._lookup.next(Stream.EVENTS, EVENTS, first)) is not None:
            end = min(first + SPAN - 1, last)
            since = head.stored_at - MARGIN
            missing = await missing_sequences(self._analytics, first, end, since=since, limit=MOST)
            stored = await self._store_again(missing)
            lost += sum(sequence <= acknowledged and happened_at >= since for sequence, happened_at in stored)
            first = missing[-1] + 1 if len(missing) == MOST else end + 1
        if lost:
            self._metrics.count_lost_events(lost)
            structlog.get_logger().warning("clickhouse_lacked_rows", rows=lost, what_happens="they are stored again")
        return lost

    async def _store_again(self, sequences: Sequence[int]) -> list[tuple[int, datetime]]:
        """Stores messages, except those that fit no table. Returns the stored ones, and when each happened."""
        rows: dict[str, tuple[Table, list[tuple[int, StoredRow]]]] = {}
        for first, last in _runs(sequences):
            async with aclosing(self._lookup.scan(Stream.EVENTS, EVENTS, start=first, up_to=last)) as messages:
                async for message in messages:
                    with suppress(UnstorableError):
                        table, row = records.read(
                            message.subject, message.data, message.headers, message.sequence, message.stored_at
                        )
                        rows.setdefault(table.name, (table, []))[1].append((message.sequence, row))
        stored: list[tuple[int, datetime]] = []
        for table, numbered in rows.values():
            time = tuple(table.columns).index(table.time)
            insert = partial(self._insert, table)
            rejected = {sequence for (sequence, _), _ in await insert_but_rejected(insert, numbered)}
            stored += [(sequence, cast(datetime, row[time])) for sequence, row in numbered if sequence not in rejected]
        return stored

    async def _insert(self, table: Table, numbered: Sequence[tuple[int, StoredRow]]) -> None:
        await self._analytics.insert(table, [row for _, row in numbered])


def _runs(sequences: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yields the first and the last sequence of each run without a gap."""
    for _, group in groupby(enumerate(sequences), key=lambda item: item[1] - item[0]):
        run = [sequence for _, sequence in group]
        yield run[0], run[-1]
