"""Plans: the state of one, and whether a job of it may start.

Both follow from the states of the jobs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Literal

from breakwater.jobs.contract.events import PlanChange, PlanState
from breakwater.jobs.contract.submission import PlanJob, PlanJobStatus, PlanStatus
from breakwater.jobs.rules.record import sum_of_known, weakest_basis

Dependency = Literal["succeeded", "dead_lettered", "cancelled", "undecided", "unknown"]
"""State of a job that another one depends on. `unknown`: none of the same owner is known."""


def plan_state(jobs: Collection[PlanJobStatus], *, refused: bool = False) -> PlanState:
    """The state of a plan.

    Args:
        jobs: the states of its jobs that were accepted.
        refused: whether the plan was refused as a whole, and not sent again since.
    """
    if not jobs:
        return "failed" if refused else "draft"
    if "pending" in jobs or "running" in jobs:
        return "pending" if all(job == "pending" for job in jobs) else "running"
    if "succeeded" not in jobs:
        return "failed"
    return "succeeded" if all(job == "succeeded" for job in jobs) else "partial"


def state_by_stages(stages: Iterable[int], *, refused: bool = False) -> PlanState:
    """The state of a plan by the numbers of its jobs that are pending, running, succeeded, and ended otherwise."""
    named: tuple[PlanJobStatus, ...] = ("pending", "running", "succeeded", "dead_lettered")
    return plan_state([status for status, count in zip(named, stages, strict=True) if count], refused=refused)


def dependency_failure(jobs: Mapping[str, Dependency], waited_s: float, at_most_s: float) -> str | None:
    """Reason why a job can't start any more, in words; None while it may.

    Args:
        jobs: those that it depends on, by id.
        waited_s: since it was accepted.
        at_most_s: how long it waits for jobs that are not known.
    """
    for job_id, state in jobs.items():
        if state in ("dead_lettered", "cancelled"):
            return f"the job {job_id!r}, which this one depends on, ended {state}"
    for job_id, state in jobs.items():
        if state == "unknown" and waited_s >= at_most_s:
            return f"the job {job_id!r}, which this one depends on, did not come within {at_most_s:g} s"
    return None


def look_again_in(waited_s: float) -> float:
    """Seconds that a job waits before it looks by itself whether it may start. It is woken when it may."""
    return min(max(waited_s / 2, 1.0), 30.0)


def plan_of(
    plan_id: str,
    jobs: Collection[PlanJob],
    refusal: str | None = None,
    changes: Collection[PlanChange] = (),
    *,
    with_jobs: bool = False,
) -> PlanStatus:
    """A plan as its jobs make it.

    Args:
        plan_id: its id.
        jobs: those that were accepted.
        refusal: why it was refused as a whole, if it was.
        changes: those that are recorded.
        with_jobs: whether they are listed.
    """
    ended = [job for job in jobs if job.completed_at is not None]
    return PlanStatus(
        plan_id=plan_id,
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
    """Jobs that depend on one another in a circle, the first one again at the end; none where there is no circle."""
    try:
        TopologicalSorter(depends_on).prepare()
    except CycleError as error:
        return tuple(reversed(error.args[1]))
    return ()
