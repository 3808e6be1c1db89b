"""How the spend of a budget grows through its period, and what was spent lately.

Calls count by the moment that they are charged at, in periods of the budgets' time zone, as `spend.py` counts them; so
the last point of a burn is what Redis has counted, but for what the sink has yet to store.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from zoneinfo import ZoneInfo

from breakwater.analytics.client import Analytics
from breakwater.analytics.window import SETTINGS, whole_sum
from breakwater.contracts.types import ms_from_time, time_from_ms
from breakwater.policy.budget import scope_keys
from breakwater.policy.periods import Period, period

HOUR_MS = 3_600_000
_MARGIN_MS = HOUR_MS
"""How far `started_at`, which sorts the table, may lie from the moment that a call is charged at. A call begins as soon
as it is admitted, and the clocks of workers and of Redis are apart by seconds. What is summed here is drawn;
`spend.py`, from which counters are made again, takes days."""

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
PREWHERE started_at >= fromUnixTimestamp64Milli({{earliest_ms:Int64}})
    AND started_at < fromUnixTimestamp64Milli({{latest_ms:Int64}})
    {_OF["agent"] if scope == "agent" else ""}
WHERE NOT short_circuited
    AND ifNull(reserved_at, started_at) >= fromUnixTimestamp64Milli({{start_ms:Int64}})
    AND ifNull(reserved_at, started_at) < fromUnixTimestamp64Milli({{end_ms:Int64}})
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
    """Calls whose cost nobody knows: the sums are lower bounds where there are any."""

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
    parameters = {**_within(of.start_ms, of.end_ms, name), "steps": marks[:-1]}
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
    parameters = _within(ms_from_time(since), ms_from_time(until))
    sums: dict[str, int] = defaultdict(int)
    for row in (await analytics.query(SPENT_SINCE, parameters)).named():
        for key in scope_keys(row["agent"], row["tenant"]):
            sums[key] += whole_sum(row["spend"])
    return dict(sums)


def _within(start_ms: int, end_ms: int, name: str = "") -> dict[str, object]:
    return {
        "start_ms": start_ms,
        "end_ms": end_ms,
        "earliest_ms": max(start_ms - _MARGIN_MS, 0),
        "latest_ms": end_ms + _MARGIN_MS,
        "name": name,
    }


def _marks(of: Period, zone: ZoneInfo) -> list[int]:
    """Where the steps of a period begin, in ms since the epoch, and its end."""
    if of.window == "daily":
        return [*range(of.start_ms, of.end_ms, HOUR_MS), of.end_ms]
    marks = [of.start_ms]
    while marks[-1] < of.end_ms:
        marks.append(period("daily", time_from_ms(marks[-1]), zone).end_ms)
    return marks
