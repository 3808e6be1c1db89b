"""Decides what follows a failed attempt: wait and try again, go to the next model, or stop."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Self, cast, get_args

from pydantic import Field, field_validator, model_validator

from breakwater.calls.rules.classify import RETRYABLE_CLASSES, Classification
from breakwater.calls.rules.holds import MAX_HELD_S, after_hold_s, waits_for_hold
from breakwater.jobs.contract.execution import Attempt, Cause, ErrorKind, Reason
from breakwater.kernel.types import Message

RetryableKind = Literal["client", "quota", "rate_limit", "transient", "server", "timeout", "network", "worker_lost"]

BY_NATURE: tuple[int | str, ...] = ("rate_limit", "transient", "server", "timeout", "network", "worker_lost")
"""The kinds of failures that are retried by default, unless the provider says not to repeat the call."""

PAYMENT_REQUIRED = "PaymentRequired"
"""The name in `on` for a 402, whose error class is the same as that of any exhausted quota."""

_RECOVERED_FROM: frozenset[ErrorKind] = frozenset({"logic", "context_overflow", "orphan_tool_calls"})
"""Kinds of failures that a retry would only repeat: the request must change first."""
_RECOVERIES: frozenset[Cause] = frozenset(
    {"credential_refresh", "orphan_recovery", "output_limit", "parameter", "provider_state"}
)
"""Causes of attempts that change the request, or its credential, instead of retrying it."""
_RECOVERED_FROM_CLASSES = frozenset({"ContextOverflow", "OrphanToolCalls"})
_CLASS_NAME = re.compile(r"[A-Z][A-Za-z0-9]*")

LONG_WAIT_S = 10.0
"""Waits from this length on are handed to NATS, so that they hold no slot of the worker and survive a restart."""

LONG_WAIT_SLACK_S = 1.0
"""The seconds that must remain after a long wait, which ends a little late and leaves time for a call."""


class KindPolicy(Message):
    """Retries of failures of one kind. Settings that are left out are those of all kinds."""

    max: int | None = Field(
        default=None,
        ge=0,
        le=100,
        description="Retries after failures of this kind on one model, counted separately.",
    )
    backoff: Literal["constant", "exponential"] | None = None
    base_s: float | None = Field(default=None, ge=0, le=3600)
    max_delay_s: float | None = Field(default=None, ge=0, le=3600)


class RetryPolicy(Message):
    """Attempts on one model, and the delays between them."""

    max_attempts: int = Field(default=3, ge=1, le=100, description="Attempts on one model, including the first.")
    backoff: Literal["constant", "exponential"] = "exponential"
    base_s: float = Field(default=0.5, ge=0, le=3600, description="First delay; jitter of up to half of it is added.")
    max_delay_s: float = Field(
        default=5.0, ge=0, le=3600, description="Ceiling of an exponential delay, before jitter."
    )
    on: tuple[int | str, ...] = Field(
        default=BY_NATURE,
        description="Failures to retry, and no others: kinds (timeout, client), status codes (404) or error classes "
        "(NotFoundError). To retry some in addition to the default ones, list both.",
    )
    per_kind: dict[RetryableKind, KindPolicy] = Field(
        default_factory=dict, description="Other settings for one kind of failure: `rate_limit: {max: 5, base_s: 60}`."
    )

    @field_validator("on")
    @classmethod
    def _names_what_can_be_retried(cls, on: tuple[int | str, ...]) -> tuple[int | str, ...]:
        for name in on:
            _check_retryable(name)
        return on

    @model_validator(mode="before")
    @classmethod
    def _on_as_yaml_reads_it(cls, data: Any) -> Any:
        # YAML 1.1 reads a bare `on` as true, also as a key.
        if isinstance(data, dict) and True in data and "on" not in data:
            fields = cast(dict[Any, Any], data)
            return {"on" if key is True else key: value for key, value in fields.items()}
        return cast(Any, data)

    @model_validator(mode="after")
    def _ceiling_above_base(self) -> Self:
        if self.backoff == "exponential" and self.max_delay_s < self.base_s:
            raise ValueError("max_delay_s must not be below base_s; set both")
        for kind in self.per_kind:
            merged = self.for_kind(kind)
            if merged.backoff == "exponential" and merged.max_delay_s < merged.base_s:
                raise ValueError(f"per_kind.{kind}: max_delay_s must not be below base_s; set both")
        return self

    def for_kind(self, kind: ErrorKind) -> RetryPolicy:
        """Return the policy with the delays of a kind of failure.

        A kind's own base raises the ceiling that is set for all kinds: `rate_limit: {base_s: 60}` means 60 s.
        """
        override = self._own(kind)
        if override is None:
            return self
        base_s = self.base_s if override.base_s is None else override.base_s
        max_delay_s = self.max_delay_s if override.max_delay_s is None else override.max_delay_s
        if override.base_s is not None and override.max_delay_s is None:
            max_delay_s = max(max_delay_s, base_s)
        update = {"backoff": override.backoff or self.backoff, "base_s": base_s, "max_delay_s": max_delay_s}
        return self.model_copy(update=update)

    def max_retries(self, kind: ErrorKind) -> int | None:
        """Return the retries that a kind of failure has for itself; None if it shares `max_attempts` with others."""
        override = self._own(kind)
        return None if override is None else override.max

    def _own(self, kind: ErrorKind) -> KindPolicy | None:
        return self.per_kind.get(kind)  # pyright: ignore[reportArgumentType]  other kinds have no entry


class RetryBudgetRules(Message):
    """Limit on the whole fleet's retries of a model, so that retries do not amplify an outage."""

    ratio: float = Field(default=0.2, ge=0, le=10, description="Retries per first attempt, within the window.")
    floor: int = Field(default=10, ge=0, description="Retries within the window that are always allowed.")
    window_s: int = Field(default=60, ge=1, le=3600)


def backoff_s(policy: RetryPolicy, retry: int, jitter: float) -> float:
    """Return the delay before a retry, in seconds.

    Args:
        policy: the agent's settings.
        retry: the number of earlier retries on this model.
        jitter: a random number in [0, 1), which adds up to half of the base.
    """
    if policy.backoff == "constant":
        delay = policy.base_s
    else:
        delay = min(policy.base_s * 2.0 ** min(retry, 64), policy.max_delay_s)
    return delay + jitter * policy.base_s / 2


@dataclass(frozen=True, slots=True)
class Retry:
    """Try the same model again after `delay_s` seconds."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class NextModel:
    """Go to the next model of the chain, without a wait.

    Attributes:
        exhausted: True if the failure was retryable, but had no retries left.
    """

    exhausted: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    """End the job: there is nothing left to try.

    Attributes:
        reason: the reason for the job's end.
        exhausted: True if the failure was retryable, but had no retries left.
    """

    reason: Reason
    exhausted: bool = False


AfterFailure = Retry | NextModel | Stop


def of_batch(attempts: Iterable[Attempt]) -> list[Attempt]:
    """Return the attempts of a job's current call: all attempts, unless its embeddings take several calls."""
    current: list[Attempt] = []
    for attempt in attempts:
        if attempt.cause == "batch":
            current.clear()
        current.append(attempt)
    return current


def failures_on(model: str, attempts: Iterable[Attempt]) -> Mapping[ErrorKind, int]:
    """Count the failed tries on a model, by kind, of a job that is not yet decided.

    Refusals do not count, because nothing was called. Nor do failures that were recovered from in another way than by
    a retry: by changing the request, or by reading the credential again. A success counts as `worker_lost`: if its
    answer had not been lost with its worker, the job would be decided.

    Args:
        model: the model, as the attempts name it.
        attempts: the job's attempts, in order.
    """
    of_job = of_batch(attempts)
    resolved = {
        before.attempt_id
        for before, after in pairwise(of_job)
        if after.cause in _RECOVERIES and after.model == before.model
    }
    failures: dict[ErrorKind, int] = {}
    for attempt in of_job:
        kind = _kind_of(attempt)
        if attempt.model != model or attempt.attempt_id in resolved or kind is None or kind in _RECOVERED_FROM:
            continue
        failures[kind] = failures.get(kind, 0) + 1
    return failures


def _kind_of(attempt: Attempt) -> ErrorKind | None:
    if attempt.short_circuited:
        return None
    match attempt.outcome:
        case "short_circuited" | "cancelled":
            return None
        case "success" | "worker_lost":
            return "worker_lost"
        case "error":
            return attempt.error.kind if attempt.error is not None else "server"


def is_retryable(verdict: Classification, policy: RetryPolicy) -> bool:
    """Return True if a failure is tried again on the same model: by default by its nature, else if `on` names it."""
    if verdict.kind in _RECOVERED_FROM:
        return False
    if policy.on == BY_NATURE:
        return verdict.retryable
    # A status code selects neither exhausted quotas nor failures that the provider says not to repeat.
    by_status = verdict.retryable or verdict.kind == "client"
    if verdict.kind in policy.on or (by_status and verdict.status_code in policy.on):
        return True
    names = {verdict.class_name.removesuffix("Error")}
    if verdict.kind == "quota" and verdict.status_code == 402:
        names.add(PAYMENT_REQUIRED)
    return any(isinstance(retried, str) and retried.removesuffix("Error") in names for retried in policy.on)


def after_failure(
    verdict: Classification,
    *,
    policy: RetryPolicy,
    failures: Mapping[ErrorKind, int],
    is_last_model: bool,
    remaining_s: float,
    jitter: float,
    busy: bool = False,
) -> AfterFailure:
    """Decide what follows a failed attempt.

    A busy model that answers other jobs uses up no tries of a job that has no other model: the job waits for it.

    Args:
        verdict: the classification of the failure.
        policy: the agent's retry settings.
        failures: the failed tries on this model by kind, this one included; see `failures_on`.
        is_last_model: True if the chain ends with this model.
        remaining_s: the remainder of the job's total timeout.
        jitter: a random number in [0, 1).
        busy: True if the failure is a rate limit of a model that has answered other jobs meanwhile.
    """
    if remaining_s <= 0:
        return Stop("timeout")
    if not is_retryable(verdict, policy):
        return Stop("error") if is_last_model else NextModel()
    retries, allowed = _retries(verdict.kind, policy, failures)
    waits_on = busy and is_last_model and policy.max_attempts > 1 and policy.max_retries(verdict.kind) is None
    if retries >= allowed and not waits_on:
        return Stop("error", exhausted=True) if is_last_model else NextModel(exhausted=True)
    provider_wait_s = verdict.retry_after_s or 0.0
    if verdict.kind == "rate_limit" and not is_last_model and not waits_for_hold(provider_wait_s):
        return NextModel()
    delay = max(backoff_s(policy.for_kind(verdict.kind), retries, jitter), after_hold_s(provider_wait_s, jitter))
    if delay + (LONG_WAIT_SLACK_S if delay >= LONG_WAIT_S else 0.0) < remaining_s:
        return Retry(delay)
    # The wait does not fit into the remaining time, but another model may answer now.
    return Stop("timeout") if is_last_model else NextModel()


def hold_s(named_s: float | None, policy: RetryPolicy, failures: Mapping[ErrorKind, int]) -> float:
    """Return for how many seconds the fleet holds a model that has answered with a rate limit.

    Args:
        named_s: the seconds that the provider asks for; None to use the job's back-off, up to `MAX_HELD_S`.
        policy: the agent's retry settings.
        failures: the job's failed tries on this model by kind, this one included.
    """
    if named_s is not None:
        return named_s
    retries, _ = _retries("rate_limit", policy, failures)
    return min(backoff_s(policy.for_kind("rate_limit"), retries, 0.0), MAX_HELD_S)


def _retries(kind: ErrorKind, policy: RetryPolicy, failures: Mapping[ErrorKind, int]) -> tuple[int, int]:
    """Return how many retries a kind of failure has had on this model, and how many it may have."""
    separate_limit = policy.max_retries(kind)
    if separate_limit is not None:
        return max(failures.get(kind, 0) - 1, 0), separate_limit
    shared = sum(count for failed_kind, count in failures.items() if policy.max_retries(failed_kind) is None)
    return max(shared - 1, 0), policy.max_attempts - 1


def is_known(name: str) -> bool:
    """Return True if a name in `on` is a kind or class of failures. Python callables may raise other classes."""
    stem = name.removesuffix("Error")
    return name in get_args(RetryableKind) or stem == PAYMENT_REQUIRED or f"{stem}Error" in RETRYABLE_CLASSES


def _check_retryable(name: int | str) -> None:
    """Raise ValueError if `on` may not contain a name."""
    if isinstance(name, int):
        if not 400 <= name <= 599:
            raise ValueError(f"{name} is not the status code of an error (400 to 599)")
        return
    if name in _RECOVERED_FROM or name.removesuffix("Error") in _RECOVERED_FROM_CLASSES:
        raise ValueError(
            f"{name} can't be retried, as the same call would fail again; it has a recovery of its own "
            "(output.max_corrections, on_context_overflow, and pruning of orphaned tool calls)"
        )
    if name in get_args(RetryableKind):
        return
    if name in get_args(ErrorKind):
        raise ValueError(f"{name} can't be retried: no call was made")
    if not _CLASS_NAME.fullmatch(name):
        kinds = ", ".join(get_args(RetryableKind))
        hint = "; write a status code without quotes" if name.strip().isdecimal() else ""
        raise ValueError(
            f"{name[:100]!r} is no status code (404), no kind ({kinds}) and no error class (NotFoundError){hint}"
        )
