"""Plans, as far as their jobs have ended."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from breakwater.analytics.client import Analytics
from breakwater.contracts.submission import PlanJob

_IDS_AT_ONCE = 200

_JOBS = """
SELECT
    plan_id, execution_id AS job_id, agent, status, reason, total_cost, wasted_cost, cost_basis, queued_at, completed_at
FROM executions FINAL
WHERE plan_id IN {plans:Array(String)} AND NOT dry_run
ORDER BY completed_at
"""

_NEWEST = """
SELECT assumeNotNull(plan_id), max(executions.completed_at) AS ended
FROM executions FINAL
PREWHERE completed_at >= now() - INTERVAL 30 DAY
WHERE plan_id IS NOT NULL AND NOT dry_run
GROUP BY plan_id
ORDER BY ended DESC
LIMIT {limit:UInt32}
"""


async def ended_jobs(analytics: Analytics, plan_ids: Sequence[str]) -> dict[str, list[PlanJob]]:
    """The jobs of some plans that have ended, by plan. Raises as `Analytics.query` does."""
    found: dict[str, list[PlanJob]] = {plan_id: [] for plan_id in plan_ids}
    for start in range(0, len(plan_ids), _IDS_AT_ONCE):
        for row in (await analytics.query(_JOBS, {"plans": list(plan_ids[start : start + _IDS_AT_ONCE])})).named():
            found[row["plan_id"]].append(PlanJob.model_validate(row))
    return found


async def newest_plans(analytics: Analytics, limit: int) -> dict[str, datetime]:
    """The plans of which a job ended last, within 30 days, and when. Raises as `Analytics.query` does."""
    return dict((await analytics.query(_NEWEST, {"limit": limit})).rows)
