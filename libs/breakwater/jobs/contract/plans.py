"""Events of the plane: breaker transitions, task guards, budget crossings, dead letters."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from breakwater.kernel.types import Count, Event, FullId, Identifier, Timestamp

PlanState = Literal["draft", "pending", "running", "succeeded", "failed", "partial"]


class PlanChange(Event):
    """A plan changed its state. `version` grows with each change of the plan or its jobs."""

    change_id: str = Field(description="Unique: `<plan_id>#<version>`.")
    plan_id: FullId
    from_state: PlanState | None = Field(default=None, description="Null for a new plan.")
    to_state: PlanState
    reason: str = Field(description="Reason in words: why it was refused, or the job that changed it.")
    execution_id: FullId | None = Field(default=None, description="Job that changed it; null for a request.")
    tenant: Identifier | None = None
    owner: Identifier | None = Field(
        default=None, description="Name of the API key that sent the request, or that the job belongs to."
    )
    correlation_id: str | None = Field(default=None, description="W3C trace id of the request or the job.")
    version: Count
    at: Timestamp
