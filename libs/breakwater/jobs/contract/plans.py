"""The events of plans: every change of a plan's state."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from breakwater.kernel.types import Count, Event, Identifier, Timestamp

PlanState = Literal["draft", "pending", "running", "succeeded", "failed", "partial"]


class PlanChange(Event):
    """A plan changed its state. `version` grows with each change of the plan or its jobs."""

    change_id: str = Field(description="Unique: `<plan_key>#<version>`.")
    plan_id: Identifier = Field(description="Plan, as the caller named it.")
    plan_key: Identifier = Field(description="The same plan as the plane knows it.")
    from_state: PlanState | None = Field(default=None, description="Null for a new plan.")
    to_state: PlanState
    reason: str = Field(description="Reason in words: why it was refused, or the job that changed it.")
    execution_id: Identifier | None = Field(default=None, description="Job that changed it; null for a request.")
    job_id: Identifier | None = Field(default=None, description="Id of that job, as its caller chose it.")
    tenant: Identifier | None = None
    owner: Identifier | None = Field(
        default=None, description="Name of the API key that sent the request, or that the job belongs to."
    )
    correlation_id: str | None = Field(default=None, description="W3C trace id of the request or the job.")
    version: Count
    at: Timestamp
