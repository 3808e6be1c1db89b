"""The failure statistics of a stopped task, for results."""

from __future__ import annotations

from collections.abc import Mapping

from breakwater.breakers.rules.failure_statistics import without_threshold
from breakwater.jobs.contract.execution import FailureStatistics
from breakwater.limits.contract import GuardRule
from breakwater.limits.rules.guard import Task, Trip

_WITHOUT_FIGURES: Mapping[GuardRule, str] = {
    # The amount that was used when a cap stopped the task would reveal the cap.
    "max_iterations": "the task has reached its limit of iterations",
    "max_tokens": "the task has used all its tokens",
    "max_cost": "the task's money is used up, or too little for another call",
    "confidence_drift": "the answers were less and less sure, or not sure enough",
}


def task_statistics(task: Task, trip: Trip) -> FailureStatistics:
    """Returns the statistics of a task that is stopped."""
    return FailureStatistics(
        consecutive_failures=task.consecutive_failures,
        total_failures=task.total_failures,
        unique_errors=len(task.errors),
        reason=_WITHOUT_FIGURES.get(trip.rule) or without_threshold(trip.reason),
    )
