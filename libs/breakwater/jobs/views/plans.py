"""Columns of plans and of their jobs."""

from __future__ import annotations

from breakwater.jobs.contract.plans import PlanChange
from breakwater.jobs.contract.submission import PlanJob, PlanStatus
from breakwater.kernel.columns import Column, humanize
from breakwater.kernel.formats import money


def jobs(plan: PlanStatus) -> str:
    """Counts the jobs of a plan by status: `2 succeeded, 1 dead lettered`."""
    counts = plan.jobs_by_status.items()
    return ", ".join(f"{count:,} {humanize(status)}" for status, count in counts) or "none"


COLUMNS: tuple[Column[PlanStatus], ...] = (
    Column("plan", lambda plan: plan.plan_id, "id"),
    Column("state", lambda plan: plan.state, "state"),
    Column("jobs", lambda plan: sum(plan.jobs_by_status.values()), "count", display=jobs, drop=2),
    Column("cost", lambda plan: plan.total_cost, "usd"),
    Column("wasted", lambda plan: plan.wasted_cost, "usd", drop=1),
    Column("cost_basis", lambda plan: plan.cost_basis, terminal=False, page=False),
    Column("queued", lambda plan: plan.first_queued_at, "time", drop=3),
    Column("ended", lambda plan: plan.last_completed_at, "time", drop=4),
)
FACTS: tuple[Column[PlanStatus], ...] = (
    Column("state", lambda plan: plan.state, "state"),
    Column("refused", lambda plan: plan.refusal),
    Column("jobs", jobs),
    Column("cost", lambda plan: money(plan.total_cost) + (basis(plan.cost_basis) if plan.last_completed_at else "")),
    Column("wasted", lambda plan: plan.wasted_cost, "usd"),
    Column("queued", lambda plan: plan.first_queued_at, "time"),
    Column("ended", lambda plan: plan.last_completed_at, "time"),
)
CHANGES: tuple[Column[PlanChange], ...] = (
    Column("at", lambda change: change.at, "time"),
    Column("state", lambda change: change.to_state, "state"),
    Column("reason", lambda change: change.reason),
    Column("trace", lambda change: change.correlation_id, "id", drop=1),
)
JOBS: tuple[Column[PlanJob], ...] = (
    Column("job", lambda job: job.job_id, "id"),
    Column("agent", lambda job: job.agent, "agent"),
    Column("status", lambda job: job.status, "state"),
    Column("reason", lambda job: job.reason, drop=1),
    Column("cost", lambda job: job.total_cost if job.completed_at else "", "usd"),
)


def basis(cost_basis: str) -> str:
    """A remark such as ` (estimated)` for a cost that no provider billed; empty for a billed one."""
    return "" if cost_basis == "billed" else f" ({'no call was made' if cost_basis == 'none' else cost_basis})"
