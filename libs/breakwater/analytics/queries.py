"""What `breakwater agents` and `breakwater executions` read, and the console's page of an execution.

Everything is read with FINAL: a row that was stored twice and not yet merged counts once. Money comes back as integer
nano-dollars, None where nothing of it is known. Dry runs are left out of the figures, as they did no work.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from breakwater.analytics.client import Analytics
from breakwater.analytics.rows import attempt_of, execution_of, nano_or_none
from breakwater.contracts.execution import Execution
from breakwater.contracts.types import ms_from_time

EXECUTIONS_BY_AGENT = """
SELECT
    agent,
    count() AS executions,
    countIf(status = 'succeeded') AS succeeded,
    quantileExact(0.5)(duration_ms) AS p50_ms,
    quantileExact(0.95)(duration_ms) AS p95_ms
FROM executions FINAL
WHERE NOT dry_run AND completed_at >= fromUnixTimestamp64Milli({since_ms:Int64})
GROUP BY agent
"""

ATTEMPTS_BY_AGENT = """
SELECT
    agent,
    count() AS attempts,
    countIf(cause = 'retry') AS retries,
    countIf(cause = 'fallback') AS fallbacks,
    countIf(short_circuited) AS short_circuits,
    countIf(NOT short_circuited) AS calls,
    countIf(NOT short_circuited AND outcome != 'success') AS failed_calls,
    countIf(NOT short_circuited AND cost IS NULL) AS unknown_costs,
    sum(cost) AS spend,
    sumIf(cost, outcome != 'success') AS wasted
FROM attempts FINAL
WHERE started_at >= fromUnixTimestamp64Milli({since_ms:Int64})
GROUP BY agent
"""

# Skipping granules under FINAL is right here: the id is in the sorting key, so every version of a row has the same one.
ONE_EXECUTION = """
SELECT * EXCEPT (event_sequence)
FROM executions FINAL
WHERE execution_id = {execution_id:String}
ORDER BY completed_at DESC
LIMIT 1
SETTINGS use_skip_indexes_if_final = 1
"""

ITS_ATTEMPTS = """
SELECT * EXCEPT (event_sequence)
FROM attempts FINAL
WHERE execution_id = {execution_id:String}
ORDER BY started_at, number
SETTINGS use_skip_indexes_if_final = 1
"""


@dataclass(frozen=True, slots=True)
class AgentSummary:
    """How an agent did. Attempts count by when they began, executions by when they ended."""

    agent: str
    executions: int
    succeeded: int
    p50_ms: int | None
    """None without executions, as `p95_ms`."""
    p95_ms: int | None
    attempts: int
    """Refused admissions included."""
    retries: int
    fallbacks: int
    short_circuits: int
    unknown_costs: int
    """Calls whose cost is unknown; `spend` is a lower bound where there are any."""
    spend: int | None
    wasted: int | None
    """What calls that did not succeed cost; 0 where all did."""

    @property
    def success_rate(self) -> float | None:
        """From 0 to 1; None without executions."""
        return self.succeeded / self.executions if self.executions else None


async def agent_summaries(analytics: Analytics, *, since: datetime | None = None) -> tuple[AgentSummary, ...]:
    """Every agent that ran since a time, by name. Raises as `Analytics.query` does."""
    parameters = {"since_ms": _since_ms(since)}
    executions = {row["agent"]: row for row in (await analytics.query(EXECUTIONS_BY_AGENT, parameters)).named()}
    attempts = {row["agent"]: row for row in (await analytics.query(ATTEMPTS_BY_AGENT, parameters)).named()}
    return tuple(
        _summary(agent, executions.get(agent, {}), attempts.get(agent, {}))
        for agent in sorted(executions.keys() | attempts.keys())
    )


async def find_execution(analytics: Analytics, execution_id: str) -> Execution | None:
    """The record of an execution with its attempts, or None. Raises as `Analytics.query` does.

    An id that was used again after the bus forgot it has more than one record: this is the last one, with the attempts
    of all of them.
    """
    parameters = {"execution_id": execution_id}
    rows = (await analytics.query(ONE_EXECUTION, parameters)).named()
    record = next(iter(rows), None)
    if record is None:
        return None
    attempts = (await analytics.query(ITS_ATTEMPTS, parameters)).named()
    return execution_of(record, (attempt_of(row) for row in attempts))


def _summary(agent: str, executions: dict[str, Any], attempts: dict[str, Any]) -> AgentSummary:
    return AgentSummary(
        agent=agent,
        executions=executions.get("executions", 0),
        succeeded=executions.get("succeeded", 0),
        p50_ms=executions.get("p50_ms"),
        p95_ms=executions.get("p95_ms"),
        attempts=attempts.get("attempts", 0),
        retries=attempts.get("retries", 0),
        fallbacks=attempts.get("fallbacks", 0),
        short_circuits=attempts.get("short_circuits", 0),
        unknown_costs=attempts.get("unknown_costs", 0),
        spend=nano_or_none(attempts["spend"]) if attempts.get("calls") else 0,
        wasted=nano_or_none(attempts["wasted"]) if attempts.get("failed_calls") else 0,
    )


def _since_ms(since: datetime | None) -> int:
    return 0 if since is None else ms_from_time(since)
