"""How the plane did in a window of time: in all, step by step, and by agent.

Its breakdowns are in `breakdown` (errors, providers) and `costs` (waste, retries, who spent what).

Executions count by when they ended, calls by when they began; dry runs are left out. What was spent is the cost of
calls. What was wasted is counted by executions, as only their end says what each call was good for: the causes of
`waste` add up to it. Money is in nano-dollars, None where nothing of it is known.

Everything is read with FINAL. What leaves much out stands in PREWHERE, which is applied before rows are replaced: that
is right, as all versions of a row are the same message, stored twice. So is replacing within a partition only.
Quantiles are those of a random sample of 8,192 where there are more: exact ones of a million take twice as long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from breakwater.analytics.client import Analytics, ResultSet
from breakwater.analytics.window import CALLED, ENDED, SETTINGS, Window, known_sum, within

SPARKS = 24
"""Points of an agent's small chart."""

# An execution's waste is the known part of it too. With a call of unknown cost, that call was wasted where there is no
# answer, or where the answer's cost is known: it is what the total has besides the waste.
_UNKNOWN_WASTE = "wasted_cost IS NULL OR cost_basis = 'unknown' AND (status != 'succeeded' OR total_cost > wasted_cost)"
_OF_EXECUTIONS = f"""
    count() AS executions,
    countIf(status = 'succeeded') AS succeeded,
    countIf(status = 'dead_lettered') AS dead_lettered,
    countIf(cache_hit) AS cache_hits,
    quantiles(0.5, 0.95)(duration_ms) AS times,
    sum(wasted_cost) AS wasted,
    countIf({_UNKNOWN_WASTE}) AS unknown_waste
"""
_OF_ATTEMPTS = """
    countIf(NOT short_circuited) AS calls,
    countIf(NOT short_circuited AND outcome != 'success') AS failed_calls,
    countIf(cause = 'retry') AS retries,
    countIf(cause = 'fallback') AS fallbacks,
    countIf(short_circuited) AS short_circuits,
    sum(cost) AS spend,
    countIf(NOT short_circuited AND cost IS NULL) AS unknown_costs
"""
EXECUTIONS_IN_ALL = f"SELECT {_OF_EXECUTIONS}FROM executions FINAL{ENDED}{SETTINGS}"
ATTEMPTS_IN_ALL = f"SELECT {_OF_ATTEMPTS}{CALLED}{SETTINGS}"
ATTEMPTS_BY_AGENT = f"SELECT agent, {_OF_ATTEMPTS}{CALLED} GROUP BY agent{SETTINGS}"

_BUCKET = "intDiv(toUnixTimestamp64Milli({time}) - {{start_ms:Int64}}, {{step_ms:Int64}}) AS bucket"
_EXECUTIONS_BUCKET, _ATTEMPTS_BUCKET = _BUCKET.format(time="completed_at"), _BUCKET.format(time="started_at")
EXECUTIONS_BY_BUCKET = (
    f"SELECT {_EXECUTIONS_BUCKET}, {_OF_EXECUTIONS}FROM executions FINAL{ENDED} GROUP BY bucket{SETTINGS}"
)
SPEND_BY_BUCKET = f"""
SELECT {_ATTEMPTS_BUCKET}, sum(cost) AS spend, countIf(NOT short_circuited AND cost IS NULL) AS unknown_costs
{CALLED} GROUP BY bucket{SETTINGS}"""
EXECUTIONS_BY_AGENT = f"""
SELECT
    agent,
    intDiv((toUnixTimestamp64Milli(completed_at) - {{start_ms:Int64}}) * {SPARKS},
        {{end_ms:Int64}} - {{start_ms:Int64}}) AS spark,
    grouping(spark) AS in_all,
    {_OF_EXECUTIONS}
FROM executions FINAL{ENDED} GROUP BY GROUPING SETS ((agent), (agent, spark)){SETTINGS}"""  # noqa: S608  of constants
"""Each agent in all, and once more for each point of its small chart: in one reading."""


@dataclass(frozen=True, slots=True)
class WindowTotals:
    """All that happened in a window."""

    executions: int
    succeeded: int
    dead_lettered: int
    """Neither of the two are those that were cancelled."""
    calls: int
    """Attempts that called a model."""
    failed_calls: int
    retries: int
    fallbacks: int
    short_circuits: int
    """Attempts that were refused before they called."""
    cache_hits: int
    p50_ms: int | None
    """From an execution's queueing to its end; None without executions, as `p95_ms`."""
    p95_ms: int | None
    spend: int | None
    wasted: int | None
    unknown_costs: int
    """Calls whose cost is unknown; `spend` is a lower bound where there are any."""
    unknown_waste: int
    """Executions that wasted an unknown amount; `wasted` is a lower bound where there are any."""

    @property
    def decided(self) -> int:
        """Executions that succeeded or failed."""
        return self.succeeded + self.dead_lettered

    @property
    def success_rate(self) -> float | None:
        """Of those that succeeded or failed, from 0 to 1; None without any."""
        return self.succeeded / self.decided if self.decided else None


@dataclass(frozen=True, slots=True)
class Bucket:
    """One step of a window."""

    at: datetime
    """When it begins."""
    succeeded: int
    failed: int
    """Executions that were dead-lettered."""
    p50_ms: int | None
    p95_ms: int | None
    spend: int | None
    wasted: int | None


@dataclass(frozen=True, slots=True)
class Spark:
    """A point of a small chart: one of 24 equal parts of the window."""

    executions: int
    failed: int


@dataclass(frozen=True, slots=True)
class AgentLine:
    """One agent in a list."""

    agent: str
    totals: WindowTotals
    sparks: tuple[Spark, ...]
    """24, the earliest first."""


async def totals(analytics: Analytics, window: Window, *, agent: str | None = None) -> WindowTotals:
    """All that happened, or what happened to one agent. Raises as `Analytics.query` does."""
    executions, attempts = await _both(analytics, EXECUTIONS_IN_ALL, ATTEMPTS_IN_ALL, within(window, agent))
    return _totals(next(executions.named()), next(attempts.named()))


async def history(analytics: Analytics, window: Window, *, agent: str | None = None) -> tuple[Bucket, ...]:
    """What happened in each step of the window, the empty ones included. Raises as `Analytics.query` does."""
    executions, attempts = await _both(analytics, EXECUTIONS_BY_BUCKET, SPEND_BY_BUCKET, within(window, agent))
    ended = {row["bucket"]: row for row in executions.named()}
    spent = {row["bucket"]: row for row in attempts.named()}
    return tuple(_bucket(window.at(n), ended.get(n, {}), spent.get(n, {})) for n in range(window.buckets))


async def agents(analytics: Analytics, window: Window) -> tuple[AgentLine, ...]:
    """Every agent that did something in the window, by name. Raises as `Analytics.query` does."""
    parameters = within(window, None)
    executions, attempts = await _both(analytics, EXECUTIONS_BY_AGENT, ATTEMPTS_BY_AGENT, parameters)
    rows = list(executions.named())
    ended, called = _by_agent(row for row in rows if row["in_all"]), _by_agent(attempts.named())
    sparks = {
        (row["agent"], row["spark"]): Spark(row["executions"], row["dead_lettered"])
        for row in rows
        if not row["in_all"]
    }
    return tuple(
        AgentLine(
            agent,
            _totals(ended.get(agent, {}), called.get(agent, {})),
            tuple(sparks.get((agent, place), Spark(0, 0)) for place in range(SPARKS)),
        )
        for agent in sorted(ended.keys() | called.keys())
    )


async def _both(
    analytics: Analytics, of_executions: str, of_attempts: str, parameters: dict[str, object]
) -> tuple[ResultSet, ResultSet]:
    return await asyncio.gather(analytics.query(of_executions, parameters), analytics.query(of_attempts, parameters))


def _by_agent(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["agent"]: row for row in rows}


def _totals(executions: dict[str, Any], attempts: dict[str, Any]) -> WindowTotals:
    return WindowTotals(
        executions=executions.get("executions", 0),
        succeeded=executions.get("succeeded", 0),
        dead_lettered=executions.get("dead_lettered", 0),
        calls=attempts.get("calls", 0),
        failed_calls=attempts.get("failed_calls", 0),
        retries=attempts.get("retries", 0),
        fallbacks=attempts.get("fallbacks", 0),
        short_circuits=attempts.get("short_circuits", 0),
        cache_hits=executions.get("cache_hits", 0),
        p50_ms=_ms(executions, 0),
        p95_ms=_ms(executions, 1),
        spend=known_sum(attempts.get("spend"), attempts.get("unknown_costs", 0)),
        wasted=known_sum(executions.get("wasted"), executions.get("unknown_waste", 0)),
        unknown_costs=attempts.get("unknown_costs", 0),
        unknown_waste=executions.get("unknown_waste", 0),
    )


def _bucket(at: datetime, executions: dict[str, Any], attempts: dict[str, Any]) -> Bucket:
    return Bucket(
        at=at,
        succeeded=executions.get("succeeded", 0),
        failed=executions.get("dead_lettered", 0),
        p50_ms=_ms(executions, 0),
        p95_ms=_ms(executions, 1),
        spend=known_sum(attempts.get("spend"), attempts.get("unknown_costs", 0)),
        wasted=known_sum(executions.get("wasted"), executions.get("unknown_waste", 0)),
    )


def _ms(executions: dict[str, Any], place: int) -> int | None:
    # Over no rows at all a quantile is NaN.
    return round(executions["times"][place]) if executions.get("executions") else None
