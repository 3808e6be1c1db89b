"""When a task is stopped: it loops, burns money, fails over and over, or grows unsure of itself.

A task is the run of an agent that calls many times (`task_id`); each of its jobs is one iteration.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from breakwater.contracts.types import Message, Off
from breakwater.policy.price import UsdAmount


class ConfidenceRules(Message):
    """Answers that say how sure they are, as `agent_decision` does."""

    field: str = Field(default="confidence", min_length=1, description="Where an answer, a JSON object, says it.")
    answers: int = Field(default=3, ge=2, le=100, description="How many in a row.")
    floor: float | None = Field(default=None, ge=0, le=1, description="Trip when all of them are below this.")
    falling: bool = Field(default=True, description="Trip when each of them is below the one before.")

    @model_validator(mode="after")
    def _some_rule(self) -> Self:
        if self.floor is None and not self.falling:
            raise ValueError("set floor, or falling: true, or `confidence: off`")
        return self


class GuardRules(Message):
    """What one task may do before people must look at it. Each can be switched off with `off`."""

    max_iterations: Annotated[int | None, Off] = Field(default=10, ge=1, le=1_000_000, description="Jobs of one task.")
    max_tokens: Annotated[int | None, Off] = Field(
        default=200_000, ge=1, le=10_000_000_000, description="Input and output, over all its calls."
    )
    max_cost_usd: Annotated[UsdAmount | None, Off] = Field(
        default=10_000_000_000, description="Over all its calls; $10 where nothing is set."
    )
    consecutive_failures: Annotated[int | None, Off] = Field(
        default=3, ge=1, le=1000, description="Failed jobs in a row."
    )
    same_error: Annotated[int | None, Off] = Field(
        default=5, ge=1, le=1000, description="Jobs that failed with the same error, successes in between or not."
    )
    confidence: Annotated[ConfidenceRules | None, Off] = None
