"""Decides the state of a plan, and whether a job of it may start, by the states of its jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Literal

from breakwater.jobs.contract.plans import PlanChange, PlanState
from breakwater.jobs.contract.submission import PlanJob, PlanJobStatus, PlanStatus
from breakwater.jobs.rules.record import sum_of_known, weakest_basis

Dependency = Literal["succeeded", "dead_lettered", "cancelled", "undecided", "unknown"]
"""The state of a job that another one depends on. `unknown`: the owner has no job with this id yet."""


def plan_state(jobs: Collection[PlanJobStatus], *, refused: bool = False) -> PlanState:
    """Returns the state of a plan.

    Args:
        jobs: the states of its accepted jobs.
        refused: True if the plan was refused as a whole, and has not been sent again since.
    """
    if not jobs:
        return "failed" if refused else "draft"
    if "pending" in jobs or "running" in jobs:
        return "pending" if all(job == "pending" for job in jobs) else "running"
    if "succeeded" not in jobs:
        return "failed"
    return "succeeded" if all(job == "succeeded" for job in jobs) else "partial"


def state_by_stages(stages: Iterable[int], *, refused: bool = False) -> PlanState:
    """Returns the state of a plan by how many jobs are pending, running, succeeded, and ended otherwise."""
    statuses: tuple[PlanJobStatus, ...] = ("pending", "running", "succeeded", "dead_lettered")
    return plan_state([status for status, count in zip(statuses, stages, strict=True) if count], refused=refused)


def dependency_failure(jobs: Mapping[str, Dependency], waited_s: float, at_most_s: float) -> str | None:
    """Returns the reason why a job can never start; None while it may.

    Args:
        jobs: the states of the jobs that it depends on, by id.
        waited_s: the seconds since it was accepted.
        at_most_s: the seconds that it waits for unknown jobs.
    """
    for job_id, state in jobs.items():
        if state in ("dead_lettered", "cancelled"):
            return f"the job {job_id!r}, which this one depends on, ended {state}"
    for job_id, state in jobs.items():
        if state == "unknown" and waited_s >= at_most_s:
            return f"the job {job_id!r}, which this one depends on, did not come within {at_most_s:g} s"
    return None


def look_again_in(waited_s: float) -> float:
    """Returns the seconds until a waiting job checks again whether it may start, in case nothing has woken it."""
    return min(max(waited_s / 2, 1.0), 30.0)


def plan_of(
    plan_id: str,
    jobs: Collection[PlanJob],
    refusal: str | None = None,
    changes: Collection[PlanChange] = (),
    *,
    plan_key: str,
    with_jobs: bool = False,
) -> PlanStatus:
    """Returns the status of a plan, from its jobs.

    Args:
        plan_id: the plan's id, as its caller chose it.
        jobs: its accepted jobs.
        refusal: the reason why it was refused as a whole; None if it was not.
        changes: its recorded changes.
        plan_key: the plan, as the plane knows it.
        with_jobs: True to list the jobs.
    """
    ended = [job for job in jobs if job.completed_at is not None]
    return PlanStatus(
        plan_id=plan_id,
        plan_key=plan_key,
        state=plan_state([job.status for job in jobs], refused=refusal is not None),
        refusal=refusal,
        jobs_by_status=dict(Counter(job.status for job in jobs)),
        total_cost=sum_of_known(job.total_cost for job in ended),
        wasted_cost=sum_of_known(job.wasted_cost for job in ended),
        cost_basis=weakest_basis(job.cost_basis for job in ended),
        first_queued_at=min((job.queued_at for job in jobs), default=None),
        last_completed_at=max((job.completed_at for job in ended if job.completed_at is not None), default=None),
        changes=tuple(sorted(changes, key=lambda change: change.version)),
        jobs=tuple(sorted(jobs, key=lambda job: job.job_id)) if with_jobs else (),
    )


def circle_among(depends_on: Mapping[str, Collection[str]]) -> tuple[str, ...]:
    """Returns jobs that depend on one another in a circle, with the first one again at the end; empty for no circle."""
    try:
        TopologicalSorter(depends_on).prepare()
    except CycleError as error:
        return tuple(reversed(error.args[1]))
    return ()
