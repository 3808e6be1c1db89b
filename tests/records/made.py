"""A small made-up history, as rows in a database and as records to compute with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache

from bench.history import History
from breakwater.jobs.contract.execution import Attempt, Execution
from breakwater.kernel.clickhouse.client import Analytics, connect
from breakwater.kernel.time_window import TimeWindow
from breakwater.records import rows, schema
from breakwater.records.migrations import migrate
from breakwater.records.rows import StoredRow
from tests.records.samples import new_database_url

END = datetime(2026, 11, 21, 12, tzinfo=UTC)
SMALL = History(500, days=3, end=END, batch=200)
SOME = TimeWindow(END - timedelta(days=2), END - timedelta(hours=12), 3_600)
"""A window that leaves some out at both ends."""


@dataclass(frozen=True, slots=True)
class Made:
    """The rows of a history by table, and the records that they are of."""

    rows: dict[str, list[StoredRow]]
    executions: tuple[Execution, ...]
    attempts: tuple[Attempt, ...]

    def ended(self, window: TimeWindow, agent: str | None = None) -> list[Execution]:
        """The executions that count in a window."""
        return [
            one
            for one in self.executions
            if window.start <= one.completed_at < window.end and not one.dry_run and agent in (None, one.agent)
        ]

    def called(self, window: TimeWindow, agent: str | None = None) -> list[Attempt]:
        """The attempts that count in a window, refused ones included."""
        return [
            one for one in self.attempts if window.start <= one.started_at < window.end and agent in (None, one.agent)
        ]


@cache
def made(history: History = SMALL) -> Made:
    """The history, once."""
    found: dict[str, list[StoredRow]] = {table.name: [] for table in schema.TABLES}
    for table, batch in history.batches():
        found[table.name] += batch
    attempts = [rows.attempt_of(**dict(zip(schema.ATTEMPTS.columns, row, strict=True))) for row in found["attempts"]]
    of: dict[str, list[Attempt]] = {}
    for one in attempts:
        of.setdefault(one.execution_id, []).append(one)
    executions = [
        rows.execution_of(**named, attempts=of.get(named["execution_id"], ()))
        for named in (dict(zip(schema.EXECUTIONS.columns, row, strict=True)) for row in found["executions"])
    ]
    return Made(found, tuple(executions), tuple(attempts))


async def stored_twice(analytics: Analytics, history: Made) -> None:
    """Every row stored twice, in other batches, and merges stopped so that both copies stay."""
    for table in schema.TABLES:
        await analytics.execute(f"SYSTEM STOP MERGES {analytics.database}.{table.name}")
        given = history.rows[table.name]
        for size in (len(given) // 3 + 1, len(given) // 2 + 1):
            for first in range(0, len(given), size):
                await analytics.insert(table, given[first : first + size])


@cache
def filled_database(server_url: str) -> str:
    """Returns the URL of a database with the small history, every row of it twice, which tests only read."""
    url = new_database_url(server_url)

    async def fill() -> None:
        async with connected(url) as analytics:
            await migrate(analytics)
            await stored_twice(analytics, made())

    asyncio.run(fill())
    return url


@asynccontextmanager
async def connected(url: str) -> AsyncGenerator[Analytics]:
    """A connection, closed afterwards."""
    analytics = connect(url)
    try:
        yield analytics
    finally:
        await analytics.close()


def known(amounts: Iterable[int | None]) -> int | None:
    """A sum that is None where it would hide something."""
    parts = list(amounts)
    total = sum(one or 0 for one in parts)
    return total if total or None not in parts else None


def quantile(values: Sequence[int], level: float) -> int | None:
    """Between the two values that are nearest, by how far it is from each."""
    if not values:
        return None
    ordered, place = sorted(values), level * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return round(ordered[low] + (ordered[high] - ordered[low]) * (place - low))
