"""What the stored attempts add to budgets: to rebuild counters that were lost or are wrong, and to draw spend.

A call counts at the moment that it is charged at, in periods of the budgets' time zone. So the last point of a burn is
what Redis has counted, but for what the sink has yet to store.

The figures that counters are rebuilt from are those of `breakwater.policy.ledger`, over the part of the record that
ClickHouse has; the rest is read from EVENTS. Where the one ends and the other begins is a sequence of the stream as it
is now (the log). Rows of an earlier log, which was lost, count whatever their sequence says, as nothing else has them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

from breakwater.analytics.client import Analytics
from breakwater.analytics.rows import budget_of
from breakwater.analytics.schema import ATTEMPTS, BUDGET_EVENTS
from breakwater.analytics.window import SETTINGS, whole_sum
from breakwater.contracts.events import BudgetEvent
from breakwater.contracts.types import ms_from_time, time_from_ms
from breakwater.policy.budget import Period, period, scope_keys
from breakwater.policy.ledger import Figures, Place

MARGIN_MS = 2 * 24 * 3600 * 1000
"""How far apart the two times of an attempt may lie: `started_at`, by a worker's clock, which partitions the table, and
`reserved_at`, by Redis' clock, which says in which period it counts. A call begins as soon as it is admitted, and
clocks are not wrong by days; the bounds only keep old partitions from being read."""

_STARTED = """started_at >= fromUnixTimestamp64Milli({earliest_ms:Int64})
    AND started_at < fromUnixTimestamp64Milli({latest_ms:Int64})"""
_CHARGED = """ifNull(reserved_at, started_at) >= fromUnixTimestamp64Milli({start_ms:Int64})
    AND ifNull(reserved_at, started_at) < fromUnixTimestamp64Milli({end_ms:Int64})"""

# The figures have other names than the columns they are made of: ClickHouse would take a column for the sum.
SPEND = f"""
WITH outcome = 'success' AND cost_basis = 'billed' AND cost IS NOT NULL AND reserved IS NOT NULL AS comparable
SELECT
    agent,
    tenant,
    sum(cost) AS spent,
    count() AS calls,
    countIf(cost IS NULL) AS unpriced,
    countIf(comparable) AS gauged,
    sumIf(reserved, comparable) AS foreseen,
    sumIf(cost, comparable) AS measured,
    countIf(comparable AND cost > reserved) AS exceeded
FROM attempts FINAL
WHERE NOT short_circuited AND {_STARTED} AND {_CHARGED}
    AND (stored_at < fromUnixTimestamp64Milli({{log_created_ms:Int64}}) OR event_sequence <= {{upto:UInt64}})
GROUP BY agent, tenant
"""  # noqa: S608  of constants

# Without FINAL: of two rows with one key the later message stays, so the highest sequence is among those that stay.
STORED_UPTO = """
SELECT max(event_sequence)
FROM attempts
WHERE stored_at >= fromUnixTimestamp64Milli({log_created_ms:Int64})
"""

# By the executions first: there is an index of those.
STORED_ATTEMPTS = """
SELECT uniqExact(attempt_id)
FROM attempts
WHERE execution_id IN ({executions:Array(String)}) AND attempt_id IN ({attempts:Array(String)})
"""

BUDGET_NOTES = """
SELECT *
FROM budget_events FINAL
WHERE (window, period) IN (SELECT arrayJoin(arrayZip({windows:Array(String)}, {names:Array(String)})))
ORDER BY at, event_sequence
"""


async def spend(
    analytics: Analytics, periods: Sequence[Period], *, log_created: datetime, upto: int
) -> dict[Place, Figures]:
    """What the stored calls add to each budget in some periods: `policy.ledger.ledger` of them.

    Args:
        analytics: the database.
        periods: one query each; a call counts in all that hold the moment it is charged at.
        log_created: when EVENTS as it is now was made, by the NATS server's clock.
        upto: rows of that log with a higher sequence are left out, as those are read from the log itself.

    Returns:
        Figures by a period's name and a scope's key; nothing for a budget without a call.

    Raises as `Analytics.query` does.
    """
    sums: dict[Place, Figures] = defaultdict(Figures)
    await analytics.catch_up(ATTEMPTS)
    for one in periods:
        parameters = {
            **_within(one.start_ms, one.end_ms, MARGIN_MS),
            "log_created_ms": ms_from_time(log_created),
            "upto": upto,
        }
        for row in (await analytics.query(SPEND, parameters)).named():
            figures = _figures(row)
            for key in scope_keys(row["agent"], row["tenant"]):
                sums[one.name, key] += figures
    return dict(sums)


async def stored_upto(analytics: Analytics, *, log_created: datetime) -> int:
    """The highest sequence of EVENTS, as it is now, that an attempt is stored of; 0 for none.

    Attempts before it may be missing: batches are stored in no fixed order, and what is unstorable never is.

    Raises as `Analytics.query` does.
    """
    await analytics.catch_up(ATTEMPTS)
    found = await analytics.query(STORED_UPTO, {"log_created_ms": ms_from_time(log_created)})
    return found.rows[0][0]


async def stored_attempts(analytics: Analytics, attempt_ids: Sequence[str]) -> int:
    """How many of some attempts are stored. Raises as `Analytics.query` does."""
    executions = [attempt_id.rpartition(":")[0] for attempt_id in attempt_ids]
    found = await analytics.query(STORED_ATTEMPTS, {"executions": executions, "attempts": list(attempt_ids)})
    return found.rows[0][0]


async def budget_notes(analytics: Analytics, periods: Sequence[Period]) -> list[BudgetEvent]:
    """What happened to the budgets of some periods, the earliest first. Raises as `Analytics.query` does."""
    await analytics.catch_up(BUDGET_EVENTS)
    parameters = {"windows": [one.window for one in periods], "names": [one.name for one in periods]}
    return [budget_of(row) for row in (await analytics.query(BUDGET_NOTES, parameters)).named()]


def _figures(row: dict[str, Any]) -> Figures:
    return Figures(
        spent=whole_sum(row["spent"]),
        calls=row["calls"],
        unpriced=row["unpriced"],
        gauged=row["gauged"],
        foreseen=whole_sum(row["foreseen"]),
        measured=whole_sum(row["measured"]),
        exceeded=row["exceeded"],
    )


HOUR_MS = 3_600_000
_DRAWN_MARGIN_MS = HOUR_MS
"""The same for what is drawn and not made counters of: clocks are apart by seconds."""

# A condition that holds for every row costs, too: a month of all calls takes a third longer with one on the agent.
_OF = {
    "agent": "AND agent = {name:String}",
    "tenant": "AND tenant = {name:String}",
}


def _charged(what: str, by: str, scope: str = "global") -> str:
    """A sum over the calls that are charged in a period; on the agent in PREWHERE, as it is a part of the key."""
    return f"""
SELECT {what}
FROM attempts FINAL
PREWHERE {_STARTED} {_OF["agent"] if scope == "agent" else ""}
WHERE NOT short_circuited AND {_CHARGED}
    {_OF["tenant"] if scope == "tenant" else ""}
GROUP BY {by}{SETTINGS}"""  # noqa: S608  of constants


_BY_STEP = (
    "roundDown(toUnixTimestamp64Milli(ifNull(reserved_at, started_at)), {steps:Array(Int64)}) AS step, "
    "sum(attempts.cost) AS spend, countIf(attempts.cost IS NULL) AS unknown_costs"
)
BURN = {scope: _charged(_BY_STEP, "step", scope) for scope in ("global", "agent", "tenant")}
"""By the kind of scope."""
SPENT_SINCE = _charged("agent, tenant, sum(attempts.cost) AS spend", "agent, tenant")


@dataclass(frozen=True, slots=True)
class Burn:
    """The spend of one budget through one period."""

    points: tuple[tuple[datetime, int], ...]
    """A moment and what was spent by then, in nano-dollars: at the period's beginning, after each hour of a day or each
    day of a month, and now."""
    unknown_costs: int
    """Calls whose cost is unknown: the sums are lower bounds where there are any."""

    @property
    def spent(self) -> int:
        """All of it, in nano-dollars."""
        return self.points[-1][1]


async def burn(analytics: Analytics, of: Period, key: str, zone: ZoneInfo, now: datetime) -> Burn:
    """How the spend of a budget has grown.

    Args:
        analytics: the database.
        of: the period.
        key: the budget's scope: `global`, `agent:<name>` or `tenant:<name>`.
        zone: of the budgets: where the days of a month begin.
        now: where the last point stands, unless the period is over.

    Raises as `Analytics.query` does.
    """
    marks, (scope, _, name) = _marks(of, zone), key.partition(":")
    end_ms = min(max(ms_from_time(now), of.start_ms), of.end_ms)
    parameters = {**_within(of.start_ms, of.end_ms, _DRAWN_MARGIN_MS), "name": name, "steps": marks[:-1]}
    rows = {row["step"]: row for row in (await analytics.query(BURN[scope], parameters)).named()}
    points, spent = [(time_from_ms(of.start_ms), 0)], 0
    for start, end in pairwise(marks):
        if start >= end_ms and start not in rows:
            break
        spent += whole_sum(rows[start]["spend"]) if start in rows else 0
        points.append((time_from_ms(min(end, end_ms)), spent))
    return Burn(tuple(points), sum(row["unknown_costs"] for row in rows.values()))


async def spent_since(analytics: Analytics, since: datetime, until: datetime) -> dict[str, int]:
    """What was spent from a moment to just before another, in nano-dollars by the keys of scopes that spent anything.

    Raises as `Analytics.query` does.
    """
    parameters = _within(ms_from_time(since), ms_from_time(until), _DRAWN_MARGIN_MS)
    sums: dict[str, int] = defaultdict(int)
    for row in (await analytics.query(SPENT_SINCE, parameters)).named():
        for key in scope_keys(row["agent"], row["tenant"]):
            sums[key] += whole_sum(row["spend"])
    return dict(sums)


def _within(start_ms: int, end_ms: int, margin_ms: int) -> dict[str, object]:
    return {
        "start_ms": start_ms,
        "end_ms": end_ms,
        "earliest_ms": max(start_ms - margin_ms, 0),
        "latest_ms": end_ms + margin_ms,
    }


def _marks(of: Period, zone: ZoneInfo) -> list[int]:
    """Where the steps of a period begin, in ms since the epoch, and its end."""
    if of.window == "daily":
        return [*range(of.start_ms, of.end_ms, HOUR_MS), of.end_ms]
    marks = [of.start_ms]
    while marks[-1] < of.end_ms:
        marks.append(period("daily", time_from_ms(marks[-1]), zone).end_ms)
    return marks
