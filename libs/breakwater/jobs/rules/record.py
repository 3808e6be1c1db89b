"""The record of a job: sums over its attempts, why it has no answer, who cancelled it, and its steps of progress."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Literal, cast

from breakwater.calls.rules.classify import NOT_SENT, REFUSED_REQUEST_CLASSES, WORKER_LOST
from breakwater.jobs.contract.execution import (
    Attempt,
    Cancellation,
    CostBasis,
    ErrorInfo,
    Notification,
    PendingCancel,
    Progress,
    Reason,
    Status,
    Waste,
)


@dataclass(frozen=True, slots=True)
class ExecutionTotals:
    """Sums over the attempts of an execution; costs in nano-dollars, None where nothing of it is known."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int
    total_cost: int | None
    wasted_cost: int | None
    cost_basis: CostBasis
    wasted_by_cause: dict[Waste, int]
    """The known part of `wasted_cost`."""


def status_of(reason: Reason | None) -> Status:
    """A job's status, by the reason why it has no answer; None where it has one."""
    return "succeeded" if reason is None else "cancelled" if reason == "cancelled" else "dead_lettered"


def why_unanswered(attempts: Sequence[Attempt], stop: Reason) -> tuple[Reason, ErrorInfo]:
    """Reason why a job ends without an answer, and its error: those of its last attempt, call or refusal.

    But a retry that is refused because of the failures before it says no more than they do: by the breaker of a model
    that the job has called itself, or by the retry budget. The reason is the failure then. And what a fallback can't
    take says nothing of the model that was asked for: see `explaining`.

    Args:
        attempts: of the job, in order.
        stop: why nothing more is tried.
    """
    attempts = explaining(attempts)
    last = attempts[-1] if attempts else None
    if last is not None and is_overflow(last):
        return "error", cast(ErrorInfo, last.error)
    reason = (last.refused_reason if last is not None and stop == "error" else None) or stop
    if last is not None and last.short_circuited and reason in {"error", "breaker_open"}:
        calls_of_it = [one for one in attempts if one.model == last.model and not one.short_circuited]
        if calls_of_it:
            last = calls_of_it[-1]
            reason = "error"
    if last is not None and reason == "error" and last.outcome in {"success", "worker_lost"}:
        # A success here is one whose answer was lost when its worker crashed.
        return "worker_lost", WORKER_LOST.error_info()
    if last is None or last.error is None:
        if reason == "error":
            what = "the model that this job was using is no longer in the config"
            return reason, ErrorInfo(kind="invalid", class_="ConfigChangedError", message=what)
        what = "the job's total timeout expired before it could make a call"
        return reason, ErrorInfo(kind="timeout", class_="TotalTimeoutError", message=what)
    # Worth retrying as soon as the first of its models is.
    refusals = [one.error for one in attempts if one.refused_reason == reason == "breaker_open"]
    waits = [error for error in refusals if error is not None and error.retry_after_s is not None]
    return reason, min(waits, key=lambda error: error.retry_after_s or 0.0, default=last.error)


_OF_MODELS: frozenset[Reason | None] = frozenset({None, "error", "breaker_open", "rate_limited"})
"""Reasons that end the calls of one model; all others end the job."""


def explaining(attempts: Sequence[Attempt]) -> Sequence[Attempt]:
    """The attempts up to the one whose error explains why no model answered.

    A context overflow explains it before all failures of later models: its caller can shorten the conversation for the
    model that was asked for. Otherwise the last model's failure does, unless that is a refusal of how the request is
    written, and an earlier model failed for another reason. If all refused it, the first refusal is of the request as
    its caller wrote it.

    Args:
        attempts: of a job without an answer, in order.
    """
    ends: dict[str, int] = {}
    for index, attempt in enumerate(attempts):
        if not attempt.short_circuited or attempt.model not in ends or attempts[ends[attempt.model]].short_circuited:
            ends[attempt.model] = index
    for model, end in ends.items():
        if is_overflow(attempts[end]) and all(after.refused_reason in _OF_MODELS for after in attempts[end + 1 :]):
            whole = (index for index in range(end, -1, -1) if attempts[index].model == model)
            whole = (index for index in whole if is_overflow(attempts[index]) and not attempts[index].dropped_messages)
            return attempts[: next(whole, end) + 1]
    last_of = {attempt.model: index for index, attempt in enumerate(attempts)}
    sent = [model for model, end in ends.items() if not _is_of_class(attempts[end], {NOT_SENT})] or list(ends)
    answerable = [model for model in sent if not _is_of_class(attempts[ends[model]], REFUSED_REQUEST_CLASSES)]
    explains = max(map(last_of.__getitem__, answerable), default=last_of[sent[0]] if sent else -1)
    return attempts[: explains + 1]


def is_overflow(attempt: Attempt) -> bool:
    """True if the conversation did not fit into the model's context."""
    return attempt.error is not None and attempt.error.kind == "context_overflow"


def _is_of_class(attempt: Attempt, classes: Collection[str]) -> bool:
    return attempt.error is not None and attempt.error.kind == "client" and attempt.error.class_ in classes


def totals(attempts: Iterable[Attempt], *, answered: bool) -> ExecutionTotals:
    """Adds up tokens and costs.

    The basis is the weakest of its parts: one attempt of unknown cost makes the total `unknown` (a lower bound), one
    estimated attempt makes it `estimated`. Attempts that made no call cost nothing, and alone make it `none`.

    Args:
        attempts: of one execution, in order.
        answered: whether the last of them gave the answer; everything else was wasted.
    """
    of_job = list(attempts)
    called = [attempt for attempt in of_job if not attempt.short_circuited]
    # Only the last one can have given the answer: a success before it is one whose answer was lost with its worker, or
    # is a part of the answer.
    parts = {id(before) for before, after in pairwise(of_job) if after.cause == "batch"}
    useful = {*parts, *map(id, called[-1:])} if answered else set[int]()
    return ExecutionTotals(
        sum(attempt.input_tokens or 0 for attempt in called),
        sum(attempt.output_tokens or 0 for attempt in called),
        sum(attempt.cached_tokens or 0 for attempt in called),
        sum_of_known(attempt.cost for attempt in called),
        sum_of_known(attempt.cost for attempt in called if id(attempt) not in useful),
        weakest_basis(attempt.cost_basis for attempt in called),
        _wasted_by_cause(called, useful, parts),
    )


def _wasted_by_cause(called: Sequence[Attempt], useful: Collection[int], parts: Collection[int]) -> dict[Waste, int]:
    wasted: dict[Waste, int] = {}
    for attempt, following in zip_longest(called, called[1:]):
        if id(attempt) not in useful and attempt.cost:
            cause = "failed" if id(attempt) in parts else _why_wasted(attempt, following)
            wasted[cause] = wasted.get(cause, 0) + attempt.cost
    return wasted


def _why_wasted(attempt: Attempt, following: Attempt | None) -> Waste:
    """The cause that made an attempt useless, or else what was done about its failure."""
    if attempt.outcome in {"worker_lost", "success"}:
        return "worker_lost"  # a success that is not the answer is one whose answer was lost with its worker
    if attempt.outcome == "cancelled":
        return "cancelled"
    if following is not None and following.cause == "output_limit":
        return "retry"
    if attempt.error is not None and attempt.error.kind == "logic":
        return "self_correction"
    if following is None:
        return "failed"
    return "retry" if following.model == attempt.model else "fallback"


def sum_of_known(costs: Iterable[int | None]) -> int | None:
    """The sum of what is known of costs; None where a part is not known, and nothing else has cost anything."""
    parts = list(costs)
    known = sum(cost for cost in parts if cost is not None)
    # Never 0 for what may have cost something.
    return known if known or None not in parts else None


def weakest_basis(parts: Iterable[CostBasis | None]) -> CostBasis:
    """Basis of a sum of costs; `none` where no part of it is of a call."""
    bases = set(parts)
    if "unknown" in bases:
        return "unknown"
    return "estimated" if "estimated" in bases else "billed" if "billed" in bases else "none"


def without_figures(attempt: Attempt) -> Attempt:
    """The attempt as programs see it: caps, and what is left of them, are for operators."""
    if not attempt.short_circuited or attempt.error is None:
        return attempt
    return attempt.model_copy(update={"refused_cap": None, "error": attempt.error.model_copy(update={"figures": None})})


_WHO = {
    "api_key": "the API key",
    "person": "the user",
    "program": "the NATS user",
    "client_disconnect": "the client's disconnect",
}


def cancelled_by(
    cancels: Iterable[PendingCancel], agent: str, owner: str | None = None, tenant: str | None = None
) -> Cancellation | None:
    """The first cancellation that a caller who may cancel the job asked for; None where there is none.

    Args:
        cancels: for one job, in any cancel.
        agent: of the job.
        owner: the key or the named program that it belongs to.
        tenant: of the job.
    """
    valid = [
        cancel.cancellation
        for cancel in cancels
        if (not cancel.agents or agent in cancel.agents)
        and (not cancel.tenants or tenant in cancel.tenants)
        and cancel.owner in (None, owner)
    ]
    return min(valid, key=lambda one: one.at, default=None)


def ends_with_client(on_disconnect: Literal["finish", "cancel"] | None, *, has_key: bool) -> bool:
    """True if the job of a stream is cancelled when its client leaves.

    Args:
        on_disconnect: the agent's setting.
        has_key: the client has given an idempotency key, and can ask for the answer again.
    """
    return not has_key if on_disconnect is None else on_disconnect == "cancel"


def error_of(cancellation: Cancellation) -> ErrorInfo:
    """The error of a cancelled job, and of its call that was aborted."""
    name = "" if cancellation.name is None else f" {cancellation.name!r}"
    why = f": {cancellation.reason}" if cancellation.reason else ""
    message = f"cancelled by {_WHO[cancellation.by]}{name}{why}"
    return ErrorInfo(kind="cancelled", class_="JobCancelledError", message=message)


_REFUSALS: Mapping[Reason | None, Notification] = {
    "breaker_open": "agent.breaker.open",
    "budget_exceeded": "agent.budget.exceeded",
}


PROGRESS_IDS = ("tenant", "task_id", "parent_execution_id", "plan_id", "run_id")
"""The fields of a step that say what its execution belongs to."""


def steps_of(attempt: Attempt, belongs_to: Mapping[str, str | None] | None = None) -> tuple[Progress, ...]:
    """Steps of an attempt: its end, and before it, if a breaker or a budget refused it, the refusal by its own name.

    What a cap is, and what is spent of it, is for operators, who find it in the attempt's `error.figures`.

    Args:
        attempt: recorded.
        belongs_to: `PROGRESS_IDS` of its execution; None: those that the attempt has.
    """
    success = attempt.outcome == "success"
    ended = Progress.model_validate(
        {
            "execution_id": attempt.execution_id,
            "agent": attempt.agent,
            **(belongs_to or {"tenant": attempt.tenant, "task_id": attempt.task_id}),
            "state": "in_progress",
            "event": "agent.attempt.finish" if success else "agent.attempt.error",
            "at": attempt.completed_at,
            "attempt": attempt.number,
            "model": attempt.model,
            "duration_ms": attempt.duration_ms,
            "input_tokens": attempt.input_tokens,
            "output_tokens": attempt.output_tokens,
            "success": success,
            **error_details(attempt.error),
        }
    )
    refusal = _REFUSALS.get(attempt.refused_reason)
    if refusal is None:
        return (ended,)
    of_budget = refusal == "agent.budget.exceeded"
    more = {"event": refusal, "scope": attempt.refused_by, "enforcement": "hard" if of_budget else None}
    return ended.model_copy(update=more), ended


def error_details(error: ErrorInfo | None) -> dict[str, object]:
    """The fields of a step that say what went wrong."""
    if error is None:
        return {}
    return {
        "error_type": error.class_.removesuffix("Error"),
        "error_class": error.class_,
        "error_message": error.message,
        "status_code": error.status_code,
        "retryable": error.retryable,
    }
