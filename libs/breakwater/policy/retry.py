"""What to do after a failed attempt: wait and try again, go to the next model, or stop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from breakwater.contracts.execution import Reason
from breakwater.contracts.types import Message
from breakwater.policy.classify import Verdict

RetryableKind = Literal["client", "rate_limit", "server", "timeout", "network", "worker_lost"]


class KindPolicy(Message):
    """How failures of one kind are retried; what is left out is as for all kinds."""

    max: int | None = Field(
        default=None,
        ge=0,
        le=100,
        description="Retries after failures of this kind on one model, counted apart.",
    )
    backoff: Literal["constant", "exponential"] | None = None
    base_s: float | None = Field(default=None, ge=0, le=3600)
    max_delay_s: float | None = Field(default=None, ge=0, le=3600)


class RetryPolicy(Message):
    """How often and how patiently one model is tried."""

    max_attempts: int = Field(default=3, ge=1, le=100, description="Tries on one model, the first included.")
    backoff: Literal["constant", "exponential"] = "exponential"
    base_s: float = Field(default=0.5, ge=0, le=3600, description="First delay; jitter of up to half of it is added.")
    max_delay_s: float = Field(
        default=5.0, ge=0, le=3600, description="Ceiling of an exponential delay, before jitter."
    )
    on: tuple[int | str, ...] = Field(
        default=(),
        description="What is retried beside rate limits, server errors, timeouts and network errors: "
        "status codes (404), kinds (client) or error classes (NotFoundError).",
    )
    per_kind: dict[RetryableKind, KindPolicy] = Field(
        default_factory=dict, description="Other settings for one kind of failure: `rate_limit: {max: 5, base_s: 60}`."
    )

    @model_validator(mode="after")
    def _ceiling_above_base(self) -> Self:
        if self.backoff == "exponential" and self.max_delay_s < self.base_s:
            raise ValueError(f"max_delay_s ({self.max_delay_s}) must not be below base_s ({self.base_s})")
        return self


class RetryBudgetRules(Message):
    """How many retries of a model the whole fleet may make, so that an outage is not multiplied."""

    ratio: float = Field(default=0.2, ge=0, le=10, description="Retries for each first try, within the window.")
    floor: int = Field(default=10, ge=0, description="Retries within the window that are always allowed.")
    window_s: int = Field(default=60, ge=1, le=3600)


def backoff_s(policy: RetryPolicy, retry: int, jitter: float) -> float:
    """The delay before retry number `retry` (from 0), in seconds.

    Args:
        policy: the agent's settings.
        retry: how many retries went before on this model.
        jitter: a random number in [0, 1); it adds up to half of the base.
    """
    if policy.backoff == "constant":
        delay = policy.base_s
    else:
        delay = min(policy.base_s * 2.0 ** min(retry, 64), policy.max_delay_s)
    return delay + jitter * policy.base_s / 2


@dataclass(frozen=True, slots=True)
class Retry:
    """Try the same model again after `delay_s`."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class NextModel:
    """Go to the next model of the chain, at once."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Nothing is left to try."""

    reason: Reason


Step = Retry | NextModel | Stop


def after_failure(
    verdict: Verdict, *, policy: RetryPolicy, tries: int, is_last_model: bool, remaining_s: float, jitter: float
) -> Step:
    """Decides what follows a failed attempt.

    Args:
        verdict: what the failure means.
        policy: the agent's retry settings.
        tries: attempts made on this model so far, the failed one included (at least 1).
        is_last_model: whether the chain ends here.
        remaining_s: what is left of the job's total timeout.
        jitter: a random number in [0, 1).
    """
    if remaining_s <= 0:
        return Stop("timeout")
    if verdict.retryable and tries < policy.max_attempts:
        delay = max(backoff_s(policy, tries - 1, jitter), verdict.retry_after_s or 0.0)
        if delay < remaining_s:
            return Retry(delay)
        # A wait that can't fit is no reason to sit it out: another model may answer now.
        return Stop("timeout") if is_last_model else NextModel()
    if is_last_model:
        return Stop("error")
    return NextModel()
