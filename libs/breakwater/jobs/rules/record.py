"""The record of a job: sums over its attempts, who cancelled it, and its steps of progress."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Any, Literal

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
from breakwater.kernel.immutable import immutable


@immutable()
class ExecutionTotals:
    """Sums over the attempts of an execution. Costs are in nano-dollars, and None if nothing is known of them.

    `wasted_by_cause` has the known part of `wasted_cost`.
    """

    input_tokens: int
    output_tokens: int
    cached_tokens: int
    total_cost: int | None
    wasted_cost: int | None
    cost_basis: CostBasis
    wasted_by_cause: dict[Waste, int]


def status_of(reason: Reason | None) -> Status:
    """Returns a job's status, by the reason why it has no answer; None means that it has one."""
    if reason is None:
        return "succeeded"
    return "cancelled" if reason == "cancelled" else "dead_lettered"


def totals(attempts: Iterable[Attempt], *, answered: bool) -> ExecutionTotals:
    """Adds up tokens and costs.

    The basis is the weakest of its parts: one attempt of unknown cost makes the total `unknown` (a lower bound), one
    estimated attempt makes it `estimated`. Attempts without a call cost nothing; if there are no others, it is `none`.

    Args:
        attempts: the attempts of one execution, in order.
        answered: True if the last of them gave the answer; all others were wasted.
    """
    of_job = list(attempts)
    called = [attempt for attempt in of_job if not attempt.short_circuited]
    # Only the last attempt can have given the answer. An earlier success lost its answer with its worker, or gave a
    # part of the answer.
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


def spent_by(attempts: Iterable[Attempt]) -> int:
    """Returns the cost of a job's attempts, in nano-dollars. An unknown cost counts as its reservation."""
    return sum((attempt.reserved or 0) if attempt.cost is None else attempt.cost for attempt in attempts)


def tokens_of(attempts: Iterable[Attempt]) -> int:
    """Returns the input and output tokens of a job's attempts, as far as they are known."""
    return sum((attempt.input_tokens or 0) + (attempt.output_tokens or 0) for attempt in attempts)


def _wasted_by_cause(called: Sequence[Attempt], useful: Collection[int], parts: Collection[int]) -> dict[Waste, int]:
    wasted: dict[Waste, int] = {}
    for attempt, following in zip_longest(called, called[1:]):
        if id(attempt) not in useful and attempt.cost:
            cause = "failed" if id(attempt) in parts else _why_wasted(attempt, following)
            wasted[cause] = wasted.get(cause, 0) + attempt.cost
    return wasted


def _why_wasted(attempt: Attempt, following: Attempt | None) -> Waste:
    """Returns the cause that made an attempt useless, or else the step that followed its failure."""
    if attempt.outcome in {"worker_lost", "success"}:
        return "worker_lost"  # a success that is not the answer has lost it with its worker
    if attempt.outcome == "cancelled":
        return "cancelled"
    if following is not None and following.cause == "output_limit":
        return "retry"
    if attempt.error is not None and attempt.error.kind == "logic":
        return "self_correction"
    if following is None:
        return "failed"
    if following.cause == "redeployment":
        return "redeployment"
    return "retry" if following.model == attempt.model else "fallback"


def sum_of_known(costs: Iterable[int | None]) -> int | None:
    """Returns the sum of the known costs; None if it would be zero and a cost is unknown."""
    parts = list(costs)
    total = sum(cost for cost in parts if cost is not None)
    # Never 0 for calls that may have cost something.
    return total if total or None not in parts else None


def weakest_basis(parts: Iterable[CostBasis | None]) -> CostBasis:
    """Returns the basis of a sum of costs: the weakest one of its parts; `none` if no part is the cost of a call."""
    bases = set(parts)
    if "unknown" in bases:
        return "unknown"
    if "estimated" in bases:
        return "estimated"
    return "billed" if "billed" in bases else "none"


def without_figures(attempt: Attempt) -> Attempt:
    """Returns the attempt as programs may see it, without limits and figures, which are for operators."""
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
    """Returns the first cancellation by a caller who may cancel the job; None if there is none.

    Args:
        cancels: the cancellations of one job, in any order.
        agent: the job's agent.
        owner: the key or the named program that the job belongs to.
        tenant: the job's tenant.
    """
    valid = [
        cancel.cancellation
        for cancel in cancels
        if (not cancel.agents or agent in cancel.agents)
        and (not cancel.tenants or tenant in cancel.tenants)
        and cancel.owner in (None, owner)
    ]
    return min(valid, key=lambda cancellation: cancellation.at, default=None)


def ends_with_client(on_disconnect: Literal["finish", "cancel"] | None, *, has_key: bool) -> bool:
    """Returns True if the job of a stream is cancelled when its client disconnects.

    Args:
        on_disconnect: the agent's setting.
        has_key: True if the client sent an idempotency key, with which it can fetch the answer later.
    """
    return not has_key if on_disconnect is None else on_disconnect == "cancel"


def error_of(cancellation: Cancellation) -> ErrorInfo:
    """Returns the error of a cancelled job and of its aborted call."""
    name = "" if cancellation.name is None else f" {cancellation.name!r}"
    why = f": {cancellation.reason}" if cancellation.reason else ""
    message = f"cancelled by {_WHO[cancellation.by]}{name}{why}"
    return ErrorInfo(kind="cancelled", class_="JobCancelledError", message=message)


_REFUSALS: Mapping[Reason | None, Notification] = {
    "breaker_open": "agent.breaker.open",
    "budget_exceeded": "agent.budget.exceeded",
}


PROGRESS_IDS = (
    "job_id",
    "tenant",
    "task_id",
    "task_key",
    "parent_execution_id",
    "parent_job_id",
    "plan_id",
    "plan_key",
    "run_id",
)
"""The fields of a step that name what its execution belongs to."""


ATTEMPT_IDS = ("job_id", "tenant", "task_id", "task_key")
"""Those of them that an attempt has."""


def steps_of(attempt: Attempt, belongs_to: Mapping[str, str | None] | None = None) -> tuple[Progress, ...]:
    """Returns the progress steps of an attempt.

    Args:
        attempt: the recorded attempt.
        belongs_to: the `PROGRESS_IDS` of its execution; None to use the attempt's own.
    """
    ids = belongs_to or {name: getattr(attempt, name) for name in ATTEMPT_IDS}
    names = {"execution_id": attempt.execution_id, "agent": attempt.agent, **ids}
    return tuple(Progress.model_validate({**names, **step}) for step in step_fields(attempt))


def step_fields(attempt: Attempt) -> tuple[dict[str, Any], ...]:
    """Returns the steps of an attempt without the names of its job: its end, after its refusal by a breaker or budget.

    Limits and what is spent of them are left out: operators find them in the attempt's `error.figures`.
    """
    success = attempt.outcome == "success"
    ended = {
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
    refusal = _REFUSALS.get(attempt.refused_reason)
    if refusal is None:
        return (ended,)
    of_budget = refusal == "agent.budget.exceeded"
    more = {"event": refusal, "scope": attempt.refused_by, "enforcement": "hard" if of_budget else None}
    return {**ended, **more}, ended


def error_details(error: ErrorInfo | None) -> dict[str, Any]:
    """Returns the fields of a step that describe an error."""
    if error is None:
        return {}
    return {
        "error_type": error.class_.removesuffix("Error"),
        "error_class": error.class_,
        "error_message": error.message,
        "status_code": error.status_code,
        "retryable": error.retryable,
    }
