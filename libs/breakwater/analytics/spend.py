"""What the stored attempts add to budgets, so that counters which were lost or are wrong can be made again.

The sums are those of `breakwater.policy.ledger`, over the part of the record that ClickHouse has; the rest is read from
EVENTS. Where the one ends and the other begins is a sequence of the stream as it is now (the log). Rows of an earlier
log, which was lost, count whatever their sequence says, as nothing else tells of them any more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any

from breakwater.analytics.client import Analytics
from breakwater.analytics.rows import budget_of
from breakwater.analytics.schema import ATTEMPTS, BUDGET_EVENTS
from breakwater.contracts.events import BudgetEvent
from breakwater.contracts.types import NANO_PER_USD, ms_from_time
from breakwater.policy.budget import scope_keys
from breakwater.policy.ledger import Figures, Place
from breakwater.policy.periods import Period

_MARGIN_MS = 2 * 24 * 3600 * 1000
"""How far apart the two times of an attempt may lie: `started_at`, by a worker's clock, which partitions the table, and
`reserved_at`, by Redis' clock, which says in which period it counts. A call begins as soon as it is admitted, and
clocks are not wrong by days; the bounds only keep old partitions from being read."""

# The figures have other names than the columns they are made of: ClickHouse would take a column for the sum.
SPEND = """
WITH outcome = 'success' AND cost_basis = 'billed' AND cost IS NOT NULL AND reserved IS NOT NULL AS tells
SELECT
    agent,
    tenant,
    sum(cost) AS spent,
    count() AS calls,
    countIf(cost IS NULL) AS unpriced,
    countIf(tells) AS gauged,
    sumIf(reserved, tells) AS foreseen,
    sumIf(cost, tells) AS measured,
    countIf(tells AND cost > reserved) AS exceeded
FROM attempts FINAL
WHERE NOT short_circuited
    AND started_at >= fromUnixTimestamp64Milli({earliest_ms:Int64})
    AND started_at < fromUnixTimestamp64Milli({latest_ms:Int64})
    AND ifNull(reserved_at, started_at) >= fromUnixTimestamp64Milli({start_ms:Int64})
    AND ifNull(reserved_at, started_at) < fromUnixTimestamp64Milli({end_ms:Int64})
    AND (stored_at < fromUnixTimestamp64Milli({log_created_ms:Int64}) OR event_sequence <= {upto:UInt64})
GROUP BY agent, tenant
"""

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
        upto: rows of that log with a higher sequence are left out, as the log itself tells of them.

    Returns:
        Figures by a period's name and a scope's key; nothing for a budget without a call.

    Raises as `Analytics.query` does.
    """
    sums: dict[Place, Figures] = defaultdict(Figures)
    await analytics.catch_up(ATTEMPTS)
    for period in periods:
        parameters = {
            "start_ms": period.start_ms,
            "end_ms": period.end_ms,
            "earliest_ms": max(period.start_ms - _MARGIN_MS, 0),
            "latest_ms": period.end_ms + _MARGIN_MS,
            "log_created_ms": ms_from_time(log_created),
            "upto": upto,
        }
        for row in (await analytics.query(SPEND, parameters)).named():
            figures = _figures(row)
            for key in scope_keys(row["agent"], row["tenant"]):
                sums[period.name, key] += figures
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
        spent=_nano(row["spent"]),
        calls=row["calls"],
        unpriced=row["unpriced"],
        gauged=row["gauged"],
        foreseen=_nano(row["foreseen"]),
        measured=_nano(row["measured"]),
        exceeded=row["exceeded"],
    )


def _nano(total: Decimal | None) -> int:
    # A sum is a Decimal(38, 9), and may be more than `nano_from_usd` allows a single amount to be. The product is exact
    # up to the 28 digits that Decimal keeps: below 10^19 dollars.
    return 0 if total is None else int(total * NANO_PER_USD)
