"""What may be set for an agent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, JsonValue, field_validator

from breakwater.contracts.job import Job
from breakwater.contracts.types import Identifier, Message, ModelId, Off, UsdAmount
from breakwater.contracts.validation import FieldError
from breakwater.policy.breaker_rules import BreakerRules
from breakwater.policy.budget import Caps
from breakwater.policy.guard import GuardRules
from breakwater.policy.output import OutputRules
from breakwater.policy.price import MAX_OUTPUT_TOKENS, OUTPUT_LIMITS
from breakwater.policy.rate_limit import RateLimit
from breakwater.policy.retry import RetryPolicy

RESERVED_PARAMS = {
    "model": "has a place of its own in a job",
    "messages": "have a place of their own in a job",
    "stream": "is not supported: an answer comes whole",
    "stream_options": "are not supported: an answer comes whole",
}


def params_objection(params: Mapping[str, JsonValue]) -> FieldError | None:
    """Why params can't go to a provider as they are; None where they can.

    What a call is admitted, priced and limited by must be what is sent.
    """
    for name in params:
        if name in RESERVED_PARAMS:
            return FieldError(name, RESERVED_PARAMS[name])
    for name, most in (*((limit, MAX_OUTPUT_TOKENS) for limit in OUTPUT_LIMITS), ("n", 128)):
        value = params.get(name, 1)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            return FieldError(name, f"must be a whole number from 1 to {most}")
    return None


class CacheRules(Message):
    """Caching of answers to identical jobs. Errors are never cached."""

    ttl_s: int = Field(ge=1, le=30 * 86_400, description="How long an answer stays cached.")
    share_concurrent: bool = Field(
        default=False, description="Identical jobs at the same time wait for the first one's answer and share it."
    )


class AgentDefaults(Message):
    """Settings that an agent may leave out. The values here are the built-in ones."""

    provider: Identifier | None = None
    model: ModelId | None = Field(default=None, description="`provider/model`, or any id with a provider set.")
    fallback_models: tuple[ModelId, ...] = ()
    allowed_models: tuple[ModelId, ...] = Field(
        default=(), description="Models that a job may request besides the agent's own; `*` allows any."
    )
    system_prompt: str | None = None
    params: dict[str, JsonValue] = Field(default_factory=dict, description="Default params; those of the job win.")
    max_tokens: int = Field(
        default=4096, ge=1, le=MAX_OUTPUT_TOKENS, description="Output limit where neither job nor params set one."
    )
    retry: RetryPolicy = RetryPolicy()
    timeout_s: float = Field(default=30.0, gt=0, le=3600, description="Time limit of one attempt.")
    total_timeout_s: float = Field(default=300.0, gt=0, le=86_400, description="Time limit of a job, waits included.")
    on_context_overflow: Literal["next_model", "trim"] = Field(
        default="next_model", description="trim: drop the oldest turns and ask the same model again, at once."
    )
    on_error: Literal["fail", "message"] = Field(
        default="fail", description="message: a failed job's output is a message that a parent agent can read."
    )
    output: Annotated[OutputRules | None, Off] = Field(
        default=None, description="The JSON schema that answers must satisfy, or `off`."
    )
    cache: Annotated[CacheRules | None, Off] = Field(default=None, description="Rules, or `off`.")
    concurrency: int = Field(
        default=16, ge=1, le=10_000, description="How many jobs of this agent run at once, across the fleet."
    )
    breaker: Annotated[BreakerRules | None, Off] = Field(default=BreakerRules(), description="Rules, or `off`.")
    refuse_when_open: bool = Field(
        default=False,
        description="Refuse jobs over HTTP at once (503 `agent_unavailable`) while all models' breakers are open.",
    )
    guard: Annotated[GuardRules | None, Off] = Field(
        default=GuardRules(), description="Caps on each task (`task_id`), or `off`."
    )
    rate_limit: Annotated[RateLimit | None, Off] = Field(default=None, description="Limits of the agent, or `off`.")
    budget: Caps = Caps()
    max_cost_usd: Annotated[UsdAmount | None, Off] = Field(
        default=None,
        description="The most that one job may cost over all its attempts; a call that could exceed it is not made.",
    )
    breaker_counts_auth_errors: bool = Field(
        default=False, description="Whether 401, 402 and 403 count as failures of the model."
    )
    persist_prompts: bool = True
    persist_responses: bool = True

    @field_validator("breaker", "guard", mode="before")
    @classmethod
    def _not_off_by_mistake(cls, value: object) -> object:
        if value is None:
            # As YAML reads a key whose lines are all commented out.
            raise ValueError("is empty; give settings, write `off`, or leave it out")
        return value

    @field_validator("params")
    @classmethod
    def _params_that_can_be_sent(cls, params: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if (problem := params_objection(params)) is not None:
            raise ValueError(f"{problem.path} {problem.message}")
        return params


class Agent(AgentDefaults):
    """One agent: a name that programs call, and how its calls are made."""

    @property
    def chain(self) -> tuple[ModelId, ...]:
        """The models to try, in order, each once."""
        own = (self.model,) if self.model is not None else ()
        return tuple(dict.fromkeys((*own, *self.fallback_models)))

    def chain_for(self, job: Job) -> tuple[ModelId, ...]:
        """The models to try for a job: its own wishes over the agent's, in order, each once."""
        first = job.model or self.model
        fallbacks = self.fallback_models if job.fallback_models is None else tuple(job.fallback_models)
        return tuple(dict.fromkeys(model for model in (first, *fallbacks) if model is not None))
