"""What a result says of failures where a guard or a breaker has stopped something.

Models and end users read it: it has figures of what happened, and none of what is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping

from breakwater.contracts.events import GuardRule
from breakwater.contracts.execution import FailureStatistics
from breakwater.policy.guard import Task, Trip

_WITHOUT_FIGURES: Mapping[GuardRule, str] = {
    # How much was used when a cap stopped it says what the cap is.
    "max_iterations": "the task has run as often as it may",
    "max_tokens": "the task has used all its tokens",
    "max_cost": "the task's money is used up, or too little for another call",
    "confidence_drift": "the answers were less and less sure, or not sure enough",
}


def of_task(task: Task, trip: Trip) -> FailureStatistics:
    """Of a task that is stopped."""
    return FailureStatistics(
        consecutive_failures=task.consecutive_failures,
        total_failures=task.total_failures,
        unique_errors=len(task.errors),
        reason=_WITHOUT_FIGURES.get(trip.rule) or _without_threshold(trip.reason),
    )


def of_breaker(reason: str, *, consecutive_failures: int, total_failures: int, unique_errors: int) -> FailureStatistics:
    """Of a breaker that refuses calls; `reason` is why it opened, as it is stored."""
    # What operators write, and who they are, is not for those who read results.
    isolated = reason.startswith("isolated by ")
    return FailureStatistics(
        consecutive_failures=consecutive_failures,
        total_failures=total_failures,
        unique_errors=unique_errors,
        reason="isolated by an operator" if isolated else _without_threshold(reason),
    )


def _without_threshold(reason: str) -> str:
    return reason.partition(" (threshold: ")[0]
