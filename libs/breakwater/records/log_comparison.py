"""Progress of the comparison of ClickHouse with EVENTS, and the messages that ClickHouse lacks.

The progress is kept in ClickHouse itself: a database that is restored from a backup, or recreated, is compared again
from the state that it has then. All functions raise as `Analytics.query` and `Analytics.insert` do.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.clickhouse.table import TIME, TIME_OR_NULL, Table
from breakwater.records.schema import (
    ATTEMPTS,
    BREAKER_TRANSITIONS,
    BUDGET_EVENTS,
    EXECUTIONS,
    GUARD_EVENTS,
    LIMIT_EVENTS,
    PLAN_CHANGES,
)

LOG_COMPARISONS = Table(
    "log_comparisons",
    {
        "log": "String",
        "settled": "UInt64",
        "lost": "UInt64",
        "lost_at": TIME_OR_NULL,
        "at": TIME,
        "event_sequence": "UInt64",
    },
    order_by=("log",),
    time="at",
)
"""One row for each identity that EVENTS has had."""

MARGIN = timedelta(hours=6)
"""Longest time between an event and the storing of its message. An older one is taken for missing, and is then stored a
second time, which changes nothing and is not counted; rows of an earlier stream are not taken for those of this
stream."""

_TABLES = (ATTEMPTS, EXECUTIONS, BREAKER_TRANSITIONS, GUARD_EVENTS, BUDGET_EVENTS, PLAN_CHANGES, LIMIT_EVENTS)
_WITHIN = "event_sequence BETWEEN {first:UInt64} AND {last:UInt64}"
_SINCE = "{since:DateTime64(3, 'UTC')}"
_STORED = " UNION ALL ".join(
    f"SELECT event_sequence FROM {table.name} WHERE {table.time} >= {_SINCE} AND {_WITHIN}"  # noqa: S608  of constants
    for table in _TABLES
)
_MISSING = f"""
SELECT sequence FROM (SELECT arrayJoin(range({{first:UInt64}}, {{last:UInt64}} + 1)) AS sequence)
WHERE sequence NOT IN ({_STORED}) ORDER BY sequence LIMIT {{limit:UInt64}}"""  # noqa: S608  of constants


@dataclass(frozen=True, slots=True)
class LogComparison:
    """Progress of a stream's comparison.

    Attributes:
        settled: Compared up to this sequence twice, and so for good.
        upto: Compared up to this sequence once.
        lost: Messages that ClickHouse lacked though they were acknowledged as stored; they were stored again.
        lost_at: The latest time that this was found.
        at: The time of the latest comparison.
    """

    settled: int = 0
    upto: int = 0
    lost: int = 0
    lost_at: datetime | None = None
    at: datetime | None = None


async def last_comparison(analytics: Analytics, log: str) -> LogComparison:
    """The progress for the stream of an identity."""
    sql = (
        "SELECT settled, event_sequence AS upto, lost, lost_at, at FROM log_comparisons FINAL WHERE log = {log:String}"
    )
    return next(iter(await analytics.read(LogComparison, sql, {"log": log})), LogComparison())


async def save_comparison(analytics: Analytics, log: str, comparison: LogComparison) -> None:
    """Replaces the progress for the stream."""
    await analytics.insert(
        LOG_COMPARISONS,
        [(log, comparison.settled, comparison.lost, comparison.lost_at, comparison.at, comparison.upto)],
    )


async def missing_sequences(
    analytics: Analytics, first: int, last: int, *, since: datetime, limit: int
) -> tuple[int, ...]:
    """The sequences of EVENTS from `first` to `last` that no table has, in order, at most `limit`.

    Events from before `since` count as missing.
    """
    analytics = await analytics.caught_up(*_TABLES)
    parameters = {"first": first, "last": last, "since": since, "limit": limit}
    return tuple(int(row[0]) for row in (await analytics.query(_MISSING, parameters)).rows)
