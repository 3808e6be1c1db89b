"""A long and plausible history of a plane, from a seed: for benchmarks, for screenshots, for trying things.

    python -m bench.history --executions 20000 --days 30 --clickhouse-url http://user:password@127.0.0.1:8123/trial

Twelve agents on six models of three providers work for thirty tenants, more by day and on weekdays. A provider is down
for an hour now and then. The sums of an execution are those of its attempts. The same seed and end give the same rows.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from bench.history_events import Events
from bench.history_fleet import AGENTS, BY_HOUR, BY_WEEKDAY, NIGHT, TENANT_WEIGHTS, TENANTS
from bench.history_jobs import Job, Jobs, outages
from breakwater.kernel.clickhouse.client import Analytics, connect
from breakwater.kernel.clickhouse.table import Table
from breakwater.kernel.types import ms_from_time
from breakwater.records import schema
from breakwater.records.migrations import migrate
from breakwater.records.rows import StoredRow

HOUR_MS = 3_600_000
LONGEST_MS = 10 * 60_000
"""Nothing is queued so shortly before the end, that what was queued before it is over by then, or nearly all of it."""
REMEMBERED = 400

Batch = tuple[Table, list[StoredRow]]


@dataclass(frozen=True, slots=True)
class History:
    """What to make."""

    executions: int
    days: int
    end: datetime
    seed: int = 7
    batch: int = 20_000
    """Executions that come together; their attempts follow."""
    failing: float | None = None
    """The share of calls that fail on an ordinary day; None for that of each agent, which is about half."""

    def batches(self) -> Iterator[Batch]:
        """The rows of all tables, in the order of time, as a sink would insert them."""
        rng = random.Random(self.seed)
        end_ms = ms_from_time(self.end)
        start_ms = end_ms - self.days * 24 * HOUR_MS
        down = outages(rng, start_ms, end_ms)
        jobs = Jobs(rng, down, self.failing)
        events = Events(rng, jobs.next_sequence, self.executions / self.days)
        coming = sorted((start, end, provider) for provider, spans in down.items() for start, end in spans)
        people = _People(rng)
        executions, attempts = list[StoredRow](), list[StoredRow]()
        for queued_ms in _queued(rng, self.executions, start_ms, end_ms - LONGEST_MS):
            while coming and coming[0][0] <= queued_ms:
                start, over, provider = coming.pop(0)
                events.outage(provider, start, over)
            job = people.job(queued_ms)
            done = jobs.run(job, people.latest(job.agent.name))
            people.heard(job.agent.name, done.execution_id)
            events.job(job, done)
            executions.append(done.execution)
            attempts.extend(done.attempts)
            if len(executions) == self.batch:
                yield schema.EXECUTIONS, executions
                yield schema.ATTEMPTS, attempts
                yield from events.take()
                executions, attempts = [], []
        if executions:
            yield schema.EXECUTIONS, executions
            yield schema.ATTEMPTS, attempts
        yield from events.take()


@dataclass(slots=True)
class _People:
    """Who asks what."""

    rng: random.Random
    ids: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    tasks: int = 0

    def job(self, queued_ms: int) -> Job:
        rng = self.rng
        night = queued_ms // HOUR_MS % 24 in NIGHT
        agent = rng.choices(AGENTS, cum_weights=_SHARES[night])[0]
        tenant = rng.choices(TENANTS, cum_weights=_TENANT_SHARES)[0] if rng.random() < 0.9 else None
        task = None
        if rng.random() < 0.35:
            # Some twenty tasks are under way at any time, and each takes some twenty jobs.
            self.tasks += 1
            task = f"task-{self.tasks // 20 + rng.randint(0, 20)}"
        parents = self.ids.get(rng.choice(AGENTS).name)
        parent = rng.choice(parents) if parents and rng.random() < 0.05 else None
        return Job(agent, tenant, task, parent, queued_ms)

    def latest(self, agent: str) -> str | None:
        """The one whose answer may be used again."""
        return next(reversed(self.ids.get(agent, [])), None)

    def heard(self, agent: str, execution_id: str) -> None:
        known = self.ids.setdefault(agent, [])
        known.append(execution_id)
        if len(known) > 2 * REMEMBERED:
            del known[:REMEMBERED]


def _queued(rng: random.Random, count: int, start_ms: int, end_ms: int) -> Iterator[int]:
    """When jobs are queued, in order: `count` of them, by the hour of the day and the day of the week, in UTC."""
    hours = [(at, min(at + HOUR_MS, end_ms)) for at in range(start_ms, end_ms, HOUR_MS)]
    weights = [_busy(at) * (until - at) * rng.uniform(0.85, 1.15) for at, until in hours]
    whole, passed, given = sum(weights), 0.0, 0
    for (at, until), weight in zip(hours, weights, strict=True):
        passed += weight
        upto = round(count * passed / whole)
        yield from sorted(rng.randrange(at, until) for _ in range(upto - given))
        given = upto


def _busy(at_ms: int) -> float:
    # 1970 began on a Thursday.
    return BY_HOUR[at_ms // HOUR_MS % 24] * BY_WEEKDAY[(at_ms // (24 * HOUR_MS) + 3) % 7]


def _running_sum(weights: Sequence[float]) -> list[float]:
    sums = list[float]()
    for weight in weights:
        sums.append(weight + (sums[-1] if sums else 0.0))
    return sums


_SHARES = {
    night: _running_sum([one.share * ((8.0 if night else 0.05) if one.at_night else 1.0) for one in AGENTS])
    for night in (False, True)
}
_TENANT_SHARES = _running_sum(TENANT_WEIGHTS)


async def load(analytics: Analytics, history: History, *, shown: bool = True) -> dict[str, int]:
    """Creates the tables and inserts a history.

    Returns:
        How many rows each table got.
    """
    await migrate(analytics)
    counts: dict[str, int] = {table.name: 0 for table in schema.TABLES}
    began = time.monotonic()
    for table, rows in history.batches():
        await analytics.insert(table, rows)
        counts[table.name] += len(rows)
        if shown:
            done, rate = counts["executions"], sum(counts.values()) / (time.monotonic() - began)
            print(f"\r{done:,} of {history.executions:,} executions, {rate:,.0f} rows/s", end="", file=sys.stderr)
    if shown:
        print(file=sys.stderr)
    return counts


async def main(history: History, url: str) -> None:
    analytics = connect(url)
    try:
        await analytics.create_database()
        counts = await load(analytics, history)
    finally:
        await analytics.close()
    for table, count in counts.items():
        print(f"{table:>20}: {count:,} rows")


def _arguments() -> tuple[History, str]:
    parser = argparse.ArgumentParser(prog="python -m bench.history", description="Loads a made-up history.")
    parser.add_argument("--executions", type=int, default=20_000)
    parser.add_argument("--days", type=int, default=30, help="how far it goes back")
    parser.add_argument("--end", type=datetime.fromisoformat, help="where it ends, such as 2026-11-22; now by default")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument(
        "--failing", type=float, help="the share of calls that fail, such as 0.05; about half by default"
    )
    parser.add_argument("--clickhouse-url", required=True, help="http://user:password@host:8123/database")
    given = parser.parse_args()
    end: datetime = given.end or datetime.now(UTC)
    end = end.replace(tzinfo=UTC) if end.tzinfo is None else end
    history = History(given.executions, given.days, end, given.seed, failing=given.failing)
    return history, given.clickhouse_url


if __name__ == "__main__":
    asyncio.run(main(*_arguments()))
