"""Decides what follows a failed attempt: try again here or on another deployment, go to the next model, or stop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import get_args

from breakwater.calls.rules.classify import NO_CREDENTIAL, RETRYABLE_CLASSES, Classification, is_of_deployment
from breakwater.calls.rules.holds import MAX_HELD_S, after_hold_s, waits_for_hold
from breakwater.calls.settings import BY_NATURE, PAYMENT_REQUIRED, RECOVERED_FROM, RetryableKind, RetryPolicy
from breakwater.jobs.contract.error_kinds import ErrorKind
from breakwater.jobs.contract.execution import Attempt, Cause, ErrorInfo, Reason
from breakwater.kernel.immutable import immutable

_RECOVERIES: frozenset[Cause] = frozenset(
    {"credential_refresh", "orphan_recovery", "output_limit", "parameter", "provider_state"}
)
"""Causes of attempts that change the request, or its credential, instead of retrying it."""

LONG_WAIT_S = 10.0
"""Waits from this length on are handed to NATS, so that they hold no slot of the worker and survive a restart."""

LONG_WAIT_SLACK_S = 1.0
"""The seconds that must remain after a long wait, which ends a little late and leaves time for a call."""


RECHECK_S = 5.0
"""The longest time for which a deployment is spared: an operator or a probe of another worker may end the reason."""

LIMITED_S = 1.0
"""The time for which a deployment is spared after a rate limit without a time of its own."""


def backoff_s(policy: RetryPolicy, retry: int, jitter: float) -> float:
    """Returns the delay before a retry, in seconds.

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


@immutable()
class Retry:
    """The decision to try the same model again after `delay_s` seconds."""

    delay_s: float


@immutable()
class Redeploy:
    """The decision to call another deployment of the model, without a wait."""


@immutable()
class NextModel:
    """The decision to call the next model of the chain, without a wait.

    Attributes:
        exhausted: True if the failure was retryable, but had no retries left.
    """

    exhausted: bool = False


@immutable()
class Stop:
    """The decision to end the job, as nothing is left to try.

    Attributes:
        reason: the reason for the job's end.
        exhausted: True if the failure was retryable, but had no retries left.
    """

    reason: Reason
    exhausted: bool = False


AfterFailure = Retry | Redeploy | NextModel | Stop


def of_batch(attempts: Iterable[Attempt]) -> list[Attempt]:
    """Returns the attempts of a job's current call: all attempts, unless its embeddings take several calls."""
    current: list[Attempt] = []
    for attempt in attempts:
        if attempt.cause == "batch":
            current.clear()
        current.append(attempt)
    return current


def has_tried(attempts: Iterable[Attempt], model: str, deployment: str | None = None) -> bool:
    """Returns True if a job's current call has an attempt on a model, including a refused one.

    With a deployment, only attempts there count.
    """
    return any(
        attempt.model == model and (deployment is None or attempt.deployment == deployment)
        for attempt in of_batch(attempts)
    )


def cause_after(attempts: Sequence[Attempt], model: str, deployment: str | None) -> Cause:
    """Returns the cause of an attempt that no repair has prepared, on a deployment if the model lists some.

    One that the job has called before is retried there, even if another was called since: otherwise, deployments in
    turns would have no end of tries.

    Args:
        attempts: the job's earlier attempts, in order.
        model: the model of the attempt.
        deployment: its deployment.
    """
    if not attempts:
        return "first"
    if not has_tried(attempts, model):
        return "fallback"
    return "retry" if has_tried(attempts, model, deployment) else "redeployment"


def failures_on(model: str, attempts: Iterable[Attempt]) -> Mapping[ErrorKind, int]:
    """Counts the failed tries on a model, by kind, of a job that is not yet decided.

    Refusals do not count, because nothing was called. Nor do failures that were recovered from in another way than by
    a retry: by changing the request, by reading the credential again, or by calling another deployment after one that
    did no work. A success counts as `worker_lost`: if its
    answer had not been lost with its worker, the job would be decided.

    Args:
        model: the model, as the attempts name it.
        attempts: the job's attempts, in order.
    """
    of_job = of_batch(attempts)
    resolved = {
        before.attempt_id
        for before, after in pairwise(of_job)
        if after.model == before.model
        and (after.cause in _RECOVERIES or (after.cause == "redeployment" and did_no_work(before.error)))
    }
    failures: dict[ErrorKind, int] = {}
    for attempt in of_job:
        kind = _kind_of(attempt)
        if attempt.model != model or attempt.attempt_id in resolved or kind is None or kind in RECOVERED_FROM:
            continue
        failures[kind] = failures.get(kind, 0) + 1
    return failures


def did_no_work(failure: ErrorInfo | Classification | None) -> bool:
    """Returns True if a deployment refused a call for a reason of its own: its limit, its key, or its models."""
    if failure is None:
        return False
    name = failure.class_ if isinstance(failure, ErrorInfo) else failure.class_name
    of_account = failure.kind == "client" and is_of_deployment(name, failure.status_code)
    return of_account or failure.kind in {"rate_limit", "quota"} or name == NO_CREDENTIAL


def spared_s(attempt: Attempt, earlier: Iterable[Attempt]) -> float:
    """Returns the seconds for which other deployments are called after one has refused a call; 0 if it has not.

    If two refuse a job in the same way, that is taken for the fault of its request, and only the first is left alone.

    Args:
        attempt: the job's attempt.
        earlier: the attempts before.
    """
    failure = attempt.error
    if failure is None or not did_no_work(failure):
        return 0.0
    elsewhere = (before.error for before in earlier if before.deployment != attempt.deployment)
    if failure.kind == "client" and any(error is not None and error.class_ == failure.class_ for error in elsewhere):
        return 0.0
    default_s = LIMITED_S if failure.kind == "rate_limit" else RECHECK_S
    return min(RECHECK_S, default_s if failure.retry_after_s is None else failure.retry_after_s)


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
    """Returns True if a failure is tried again on the same model: by default by its nature, else if `on` names it."""
    if verdict.kind in RECOVERED_FROM:
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
    elsewhere: bool = False,
) -> AfterFailure:
    """Decides what follows a failed attempt.

    A busy model that answers other jobs uses up no tries of a job that has no other model: the job waits for it.
    Another deployment is called first. One that did no work cost no try; the others share the model's attempts.

    Args:
        verdict: the classification of the failure.
        policy: the agent's retry settings.
        failures: the failed tries on this model by kind, this one included; see `failures_on`.
        is_last_model: True if the chain ends with this model.
        remaining_s: the remainder of the job's total timeout.
        jitter: a random number in [0, 1).
        busy: True if the failure is a rate limit of a model that has answered other jobs meanwhile.
        elsewhere: True if the model has another deployment that the job has not called, and that may be called.
    """
    if remaining_s <= 0:
        return Stop("timeout")
    if elsewhere and (did_no_work(verdict) or _has_retries(verdict, policy, failures)):
        return Redeploy()
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


def _has_retries(verdict: Classification, policy: RetryPolicy, failures: Mapping[ErrorKind, int]) -> bool:
    retries, allowed = _retries(verdict.kind, policy, failures)
    return is_retryable(verdict, policy) and verdict.kind != "worker_lost" and retries < allowed


def hold_s(named_s: float | None, policy: RetryPolicy, failures: Mapping[ErrorKind, int]) -> float:
    """Returns for how many seconds the fleet holds a model that has answered with a rate limit.

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
    """Returns how many retries a kind of failure has had on this model, and how many it may have."""
    separate_limit = policy.max_retries(kind)
    if separate_limit is not None:
        return max(failures.get(kind, 0) - 1, 0), separate_limit
    shared = sum(count for failed_kind, count in failures.items() if policy.max_retries(failed_kind) is None)
    return max(shared - 1, 0), policy.max_attempts - 1


def is_known(name: str) -> bool:
    """Returns True if a name in `on` is a kind or class of failures. Python callables may raise other classes."""
    stem = name.removesuffix("Error")
    return name in get_args(RetryableKind) or stem == PAYMENT_REQUIRED or f"{stem}Error" in RETRYABLE_CLASSES
