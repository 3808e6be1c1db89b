"""The state of a plan, and when a job of it may start."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from breakwater.jobs.contract.submission import PlanJob, PlanJobStatus, PlanState
from breakwater.jobs.rules.plans import circle_among, dependency_failure, look_again_in, plan_of, plan_state
from tests.tables import each_row

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


@each_row(
    ("jobs", "state"),
    [
        ("", "draft"),
        ("pending pending", "pending"),
        ("pending running", "running"),
        ("pending succeeded", "running"),
        ("pending dead_lettered", "running"),
        ("running", "running"),
        ("succeeded succeeded", "succeeded"),
        ("dead_lettered cancelled", "failed"),
        ("cancelled", "failed"),
        ("succeeded dead_lettered", "partial"),
        ("succeeded cancelled", "partial"),
    ],
)
def test_a_plans_state_follows_from_its_jobs(jobs: Any, state: PlanState) -> None:
    assert plan_state(jobs.split()) == state
    # What was refused before its jobs were accepted after all is forgotten.
    assert plan_state(jobs.split(), refused=True) == ("failed" if state == "draft" else state)


@each_row(
    ("jobs", "waited_s", "why"),
    [
        ({"a": "succeeded", "b": "undecided"}, 1e6, None),
        ({"a": "unknown"}, 9.9, None),
        ({"a": "unknown"}, 10, "the job 'a', which this one depends on, did not come within 10 s"),
        ({"a": "undecided", "b": "cancelled"}, 0, "the job 'b', which this one depends on, ended cancelled"),
        ({"a": "unknown", "b": "dead_lettered"}, 10, "the job 'b', which this one depends on, ended dead_lettered"),
    ],
)
def test_a_job_can_not_start_once_one_of_its_dependencies_can_not_succeed(
    jobs: Any, waited_s: float, why: str | None
) -> None:
    assert dependency_failure(jobs, waited_s, 10) == why


@given(st.floats(0, 1e7))
def test_a_job_looks_again_by_itself_after_1_to_30_seconds(waited_s: float) -> None:
    assert 1 <= look_again_in(waited_s) <= 30


def job(job_id: str, status: PlanJobStatus, **fields: Any) -> PlanJob:
    ended = {} if status in ("pending", "running") else {"completed_at": NOON, "cost_basis": "billed"}
    return PlanJob.model_validate(
        {
            "job_id": job_id,
            "execution_id": job_id,
            "agent": "writer",
            "status": status,
            "queued_at": NOON,
            **ended,
            **fields,
        }
    )


def test_a_plan_sums_up_what_its_jobs_cost_and_wasted() -> None:
    jobs = [
        job("b", "succeeded", total_cost=5, wasted_cost=2, completed_at=NOON + timedelta(seconds=9)),
        job("a", "dead_lettered", total_cost=3, wasted_cost=3, cost_basis="estimated"),
        job("c", "running", queued_at=NOON - timedelta(seconds=1)),
    ]
    plan = plan_of("p", jobs, plan_key="k", with_jobs=True)
    assert (plan.state, plan.total_cost, plan.wasted_cost, plan.cost_basis) == ("running", 8, 5, "estimated")
    assert plan.jobs_by_status == {"succeeded": 1, "dead_lettered": 1, "running": 1}
    assert (plan.first_queued_at, plan.last_completed_at) == (NOON - timedelta(seconds=1), NOON + timedelta(seconds=9))
    assert [one.job_id for one in plan.jobs] == ["a", "b", "c"]
    unknown = plan_of("p", [job("a", "succeeded", total_cost=None, wasted_cost=0, cost_basis="unknown")], plan_key="k")
    assert (unknown.total_cost, unknown.cost_basis, unknown.jobs) == (None, "unknown", ())
    refused = plan_of("p", [], "the agent is down", plan_key="k")
    assert (refused.state, refused.refusal, refused.total_cost) == ("failed", "the agent is down", 0)


def test_a_circle_of_jobs_is_found_before_any_is_accepted() -> None:
    assert circle_among({"a": ["b"], "b": ["c"], "c": ["x"]}) == ()
    found = circle_among({"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a"]})
    assert found[0] == found[-1]
    assert "->".join(found) in ("a->b->c->a", "b->c->a->b", "c->a->b->c")
