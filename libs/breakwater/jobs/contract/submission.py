"""Submitting and cancelling jobs, and plans of jobs, over HTTP."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from breakwater.jobs.contract.execution import Attempt, Cancellation, CostBasis, Reason, Status
from breakwater.jobs.contract.job import Job
from breakwater.jobs.contract.plans import PlanChange, PlanState
from breakwater.kernel.http.contract import ReasonText
from breakwater.kernel.types import Count, Event, Identifier, Message, ModelId, Money, Timestamp


class SubmitQuery(Message):
    """The wait for the result of a job."""

    wait_s: Annotated[float, Field(gt=0, le=300)] | None = Field(
        default=None,
        description="Seconds to wait for the result. If it arrives in time, the response is 200 with the result.",
    )


class AcceptedJob(Event):
    """A job that is stored, and will be decided even if processes crash."""

    job_id: Identifier
    execution_id: Identifier = Field(description="Id of its execution inside the plane.")
    status: Literal["accepted"] = "accepted"
    duplicate: bool = Field(
        default=False,
        description="True if a job with this id was already queued in the last ten minutes; it was not queued again.",
    )


class UndecidedJob(Event):
    """A job that was accepted and has not ended yet."""

    job_id: Identifier
    execution_id: Identifier = Field(description="Id of its execution inside the plane.")
    status: Literal["accepted"] = "accepted"
    attempts: tuple[Attempt, ...] = Field(description="Attempts that have ended, in order.")


class CancelRequest(Message):
    """The reason for cancelling a job."""

    reason: ReasonText | None = Field(default=None, description="Reason for the record; stored redacted.")


class CallableAgent(Event):
    """An agent that the sender may call."""

    agent: Identifier
    subject: str = Field(description="Where jobs for it are published.")
    model: ModelId | None


class CallableAgents(Event):
    """The agents that the sender may call."""

    agents: tuple[CallableAgent, ...]


class CancelledJob(Event):
    """The state of a job after a request to cancel it."""

    job_id: Identifier
    execution_id: Identifier = Field(description="Id of its execution inside the plane.")
    status: Literal["cancelling"] | Status = Field(
        description="`cancelling`: it will end as `cancelled` and make no further call, unless its "
        "answer is just being stored. Otherwise the job's final status; if that is not "
        "`cancelled`, the job had ended before."
    )
    reason: Reason | None = None
    completed_at: Timestamp | None = None
    total_cost: Money | None = None
    cost_basis: CostBasis | None = None
    cancellation: Cancellation | None = Field(default=None, description="Who cancelled it first, and why.")


PlanJobStatus = Literal["pending", "running"] | Status
"""A job is `pending` until a model is called for it, also while it waits for the jobs that it depends on."""

MAX_PLANNED = 1_000


class PlanRequest(Message):
    """A plan to submit, with all its jobs, or with none yet."""

    plan_id: Identifier | None = Field(default=None, description="Id of the plan; generated if absent.")
    jobs: Annotated[list[Job], Field(max_length=MAX_PLANNED)] = Field(
        default_factory=list[Job],
        description="Jobs in any order. A job without `job_id` gets `<plan_id>.<number>`, from 1. A plan "
        "without jobs is a draft.",
    )


class AcceptedPlan(Event):
    """A plan that was accepted, with all its jobs, or with none yet."""

    plan_id: Identifier
    plan_key: Identifier = Field(description="The plan as the plane knows it.")
    job_ids: tuple[Identifier, ...] = Field(description="In the order of the request.")


class PlanQuery(Message):
    """A limit of plans."""

    limit: Annotated[int, Field(ge=1, le=200, description="The most to list; the newest are listed.")] = 50


class PlanJob(Event):
    """A job of a plan."""

    job_id: Identifier
    execution_id: Identifier = Field(description="Id of its execution inside the plane.")
    agent: Identifier
    status: PlanJobStatus
    depends_on: tuple[Identifier, ...] = Field(
        default=(), description="Executions that it waits for. Known for 72 hours after the plan's last change."
    )
    reason: Reason | None = None
    total_cost: Money | None = Field(default=None, description="Null while unknown.")
    wasted_cost: Money | None = None
    cost_basis: CostBasis | None = None
    queued_at: Timestamp
    completed_at: Timestamp | None = None


class PlanStatus(Event):
    """A plan. Its state follows from its jobs; dry runs do not count."""

    plan_id: Identifier
    plan_key: Identifier = Field(description="The plan as the plane knows it, unique among all callers.")
    state: PlanState = Field(
        description="`draft`: no job accepted; `pending`: none started; `running`: some have not ended; "
        "`succeeded`: all succeeded; `partial`: all ended, some succeeded; `failed`: none "
        "succeeded, or the plan was refused."
    )
    refusal: str | None = Field(default=None, description="Why the plan was refused, if none of its jobs was accepted.")
    jobs_by_status: dict[PlanJobStatus, Count]
    total_cost: Money | None = Field(
        default=None, description="Cost of the jobs that have ended; null if no part of it is known."
    )
    wasted_cost: Money | None = Field(default=None, description="Cost of all attempts that did not produce a result.")
    cost_basis: CostBasis
    first_queued_at: Timestamp | None = None
    last_completed_at: Timestamp | None = None
    changes: tuple[PlanChange, ...] = Field(
        default=(), description="Recorded changes of the state, the oldest first; each is here within seconds."
    )
    jobs: tuple[PlanJob, ...] = Field(default=(), description="Ordered by id; absent in lists.")


class PlanList(Event):
    """The newest plans, by the job that was queued or ended last."""

    plans: tuple[PlanStatus, ...]
