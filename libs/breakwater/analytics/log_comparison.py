"""How far ClickHouse was compared with EVENTS, and which messages it lacks.

How far stands in ClickHouse itself: a database that is restored from a backup, or recreated, is compared again from
where it stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from breakwater.analytics.client import Analytics
from breakwater.analytics.schema import ATTEMPTS, BREAKER_TRANSITIONS, BUDGET_EVENTS, EXECUTIONS, GUARD_EVENTS
from breakwater.analytics.table import TIME, TIME_OR_NULL, Table

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
"""A row for each stream that EVENTS has been."""

MARGIN = timedelta(hours=6)
"""How long before its message was stored something may have happened. What is older is taken for missing, and is then
stored a second time, which changes nothing and is not counted; rows of an earlier stream are not taken for those of
this one."""

_TABLES = (ATTEMPTS, EXECUTIONS, BREAKER_TRANSITIONS, GUARD_EVENTS, BUDGET_EVENTS)
_WITHIN = "event_sequence BETWEEN {first:UInt64} AND {last:UInt64}"
_SINCE = "{since:DateTime64(3, 'UTC')}"
_STORED = " UNION ALL ".join(
    f"SELECT event_sequence FROM {one.name} WHERE {one.time} >= {_SINCE} AND {_WITHIN}"  # noqa: S608  of constants
    for one in _TABLES
)
_MISSING = f"""
SELECT sequence FROM (SELECT arrayJoin(range({{first:UInt64}}, {{last:UInt64}} + 1)) AS sequence)
WHERE sequence NOT IN ({_STORED}) ORDER BY sequence LIMIT {{most:UInt64}}"""  # noqa: S608  of constants


@dataclass(frozen=True, slots=True)
class LogComparison:
    """How far a stream was compared.

    Attributes:
        settled: Up to this sequence twice, and so for good.
        upto: Up to this sequence once.
        lost: How many messages ClickHouse lacked that were acknowledged as stored; they were stored again.
        lost_at: When that was found last.
        at: When it was compared last.
    """

    settled: int = 0
    upto: int = 0
    lost: int = 0
    lost_at: datetime | None = None
    at: datetime | None = None


async def last_comparison(analytics: Analytics, log: str) -> LogComparison:
    """How far the stream of an identity was compared. Raises as `Analytics.query` does."""
    asked = (
        "SELECT settled, event_sequence AS upto, lost, lost_at, at FROM log_comparisons FINAL WHERE log = {log:String}"
    )
    return next(iter(await analytics.read(LogComparison, asked, {"log": log})), LogComparison())


async def save_comparison(analytics: Analytics, log: str, one: LogComparison) -> None:
    """Replaces how far the stream was compared. Raises as `Analytics.insert` does."""
    await analytics.insert(LOG_COMPARISONS, [(log, one.settled, one.lost, one.lost_at, one.at, one.upto)])


async def missing_sequences(
    analytics: Analytics, first: int, last: int, *, since: datetime, most: int
) -> tuple[int, ...]:
    """Which sequences of EVENTS no table has, in order.

    Args:
        analytics: the database.
        first: the first one that is looked for.
        last: the last one.
        since: what happened before is taken for missing.
        most: how many to name at most.

    Raises as `Analytics.query` does.
    """
    for table in _TABLES:
        await analytics.catch_up(table)
    parameters = {"first": first, "last": last, "since": since, "most": most}
    return tuple(int(row[0]) for row in (await analytics.query(_MISSING, parameters)).rows)
