"""The steps of a job's progress that an attempt is: the same whether they are received live or read from the record."""

from __future__ import annotations

from collections.abc import Mapping

from breakwater.contracts.execution import Attempt, ErrorInfo, Notification, Progress, Reason

_REFUSALS: Mapping[Reason | None, Notification] = {
    "breaker_open": "agent.breaker.open",
    "budget_exceeded": "agent.budget.exceeded",
}


def steps_of(attempt: Attempt, parent_execution_id: str | None = None) -> tuple[Progress, ...]:
    """How an attempt ended; before that, of one that a breaker or a budget refused, the refusal by its own name.

    What a cap is, and what is spent of it, is for operators, who find it in the attempt's `error.figures`.
    """
    success = attempt.outcome == "success"
    ended = Progress.model_validate(
        {
            "execution_id": attempt.execution_id,
            "agent": attempt.agent,
            "parent_execution_id": parent_execution_id,
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
