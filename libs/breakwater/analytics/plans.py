"""Plans, as far as their jobs have ended."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from breakwater.analytics.client import Analytics
from breakwater.analytics.rows import in_nano
from breakwater.contracts.api import PlanJob

_IDS_AT_ONCE = 200

# Skipping granules under FINAL is right: all versions of a row are of the same plan.
_JOBS = """
SELECT
    plan_id, execution_id AS job_id, agent, status, reason, total_cost, wasted_cost, cost_basis, queued_at, completed_at
FROM executions FINAL
WHERE plan_id IN {plans:Array(String)} AND NOT dry_run
ORDER BY completed_at
SETTINGS use_skip_indexes_if_final = 1
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
        rows = await analytics.query(_JOBS, {"plans": list(plan_ids[start : start + _IDS_AT_ONCE])})
        for row in rows.named():
            found[row["plan_id"]].append(PlanJob.model_validate(in_nano(row, "total_cost", "wasted_cost")))
    return found


async def newest_plans(analytics: Analytics, limit: int) -> dict[str, datetime]:
    """The plans of which a job ended last, within 30 days, and when. Raises as `Analytics.query` does."""
    return dict((await analytics.query(_NEWEST, {"limit": limit})).rows)
