"""How long the console's queries take over a million executions, just loaded: p50 and p95 of 20 runs each.

    python -m bench.console [executions] [--clickhouse-url URL]

Loads the history of `bench.history` into a new embedded engine in a temporary directory, and prints how long that
takes and what it takes on the disk. Nothing is merged on purpose, as `OPTIMIZE` would: that is the worst case. Then it
runs `CASES` one after another, over the last hour, day, week and month. With a URL, nothing is loaded: what is there is
asked. Ends with 1 where a p95 is 300 ms or more.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from bench.console_cases import CASES, Case, Moment
from bench.history import History, load
from breakwater.kernel.clickhouse.client import Analytics, connect
from breakwater.kernel.time_window import TimeWindow
from breakwater.records.search import Cursor, Page
from tests.server_sources import embedded_servers

RUNS = 20
LIMIT_MS = 300.0
DAYS = 30
END = datetime(2026, 11, 22, 12, tzinfo=UTC)
WINDOWS = {"1 h": timedelta(hours=1), "24 h": timedelta(days=1), "7 d": timedelta(days=7), "30 d": timedelta(days=30)}

_STORED = """
SELECT table, sum(rows) AS rows, sum(bytes_on_disk) AS bytes, count() AS parts
FROM system.parts
WHERE active AND database = {database:String}
GROUP BY table
ORDER BY bytes DESC
"""
_NTH = """
SELECT completed_at, execution_id
FROM executions FINAL
ORDER BY completed_at DESC, execution_id DESC
LIMIT 1 OFFSET {skipped:UInt64}
"""


@dataclass(frozen=True, slots=True)
class Timed:
    """A case over a window."""

    name: str
    window: str
    times_ms: tuple[float, ...]
    rows: int

    def quantile(self, level: float) -> float:
        """The smallest time that so many of all do not exceed."""
        return sorted(self.times_ms)[math.ceil(level * len(self.times_ms)) - 1]

    def line(self) -> str:
        """As a line of the table."""
        mark = "" if self.quantile(0.95) < LIMIT_MS else "  <- too slow"
        return (
            f"{self.name:<34}{self.window:>6}{self.quantile(0.5):>9.1f}{self.quantile(0.95):>9.1f}{self.rows:>7}{mark}"
        )


async def loaded(analytics: Analytics, executions: int) -> None:
    """Loads the history and reports how long that took."""
    began = time.monotonic()
    counts = await load(analytics, History(executions, DAYS, END))
    took = time.monotonic() - began
    print(f"Loaded {sum(counts.values()):,} rows in {took:.0f} s: {sum(counts.values()) / took:,.0f} rows/s")


async def stored(analytics: Analytics) -> None:
    """Tells what the tables take on the disk."""
    executions = (await analytics.query("SELECT count() FROM executions FINAL")).rows[0][0]
    found = await analytics.query(_STORED, {"database": analytics.database})
    for table, rows, size, parts in found.rows:
        print(f"{table:>20}: {rows:>10,} rows in {parts} parts, {size / executions:7.1f} bytes an execution")
    print(f"{'total':>20}: {sum(row[2] for row in found.rows) / executions:.1f} bytes an execution on the disk\n")


async def measured(analytics: Analytics, cases: Sequence[Case]) -> list[Timed]:
    """Runs all cases, one after another."""
    count, now = (await analytics.query("SELECT count(), max(completed_at) FROM executions FINAL")).rows[0]
    middle, last = [await _nth(analytics, count // 2), await _nth(analytics, max(0, count - 30))]
    print(f"{'query':<34}{'window':>6}{'p50 ms':>9}{'p95 ms':>9}{'rows':>7}")
    results = list[Timed]()
    for case in cases:
        for name, span in WINDOWS.items() if case.every_window else [("", timedelta(days=DAYS))]:
            moment = Moment(TimeWindow.last(span, now), middle, last, middle.execution_id)
            results.append(await _timed(analytics, case, name, moment))
            print(results[-1].line(), flush=True)
    return results


async def _nth(analytics: Analytics, skipped: int) -> Cursor:
    return Cursor(*(await analytics.query(_NTH, {"skipped": skipped})).rows[0])


async def _timed(analytics: Analytics, case: Case, window: str, moment: Moment) -> Timed:
    times, result = list[float](), None
    for _ in range(RUNS):
        began = time.perf_counter()
        result = await case.run(analytics, moment)
        times.append((time.perf_counter() - began) * 1000)
    return Timed(case.name, window, tuple(times), _rows(result))


def _rows(result: Any) -> int:
    if isinstance(result, Page):
        return len(result.lines)
    return len(result) if isinstance(result, tuple) else 1


async def main(executions: int, url: str | None) -> bool:
    with embedded_servers() as (servers, _):
        analytics = connect(url or f"{servers.clickhouse().url}/bench")
        try:
            if url is None:
                await loaded(analytics, executions)
            await stored(analytics)
            results = await measured(analytics, CASES)
        finally:
            await analytics.close()
    slow = [one for one in results if one.quantile(0.95) >= LIMIT_MS]
    print(f"\nload average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"every p95 is below {LIMIT_MS:.0f} ms: {'no, ' + str(len(slow)) + ' are not' if slow else 'yes'}")
    return not slow


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.console")
    parser.add_argument("executions", type=int, nargs="?", default=1_000_000)
    parser.add_argument("--clickhouse-url", help="of a database that holds a history already")
    given = parser.parse_args()
    sys.exit(0 if asyncio.run(main(given.executions, given.clickhouse_url)) else 1)
