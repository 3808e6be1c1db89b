from __future__ import annotations

from typing import Any, get_args

from breakwater.breakers.rules.failure_statistics import breaker_statistics
from breakwater.limits.contract import GuardRule
from breakwater.limits.rules.guard import Task, Trip, task_statistics
from tests.tables import each_row

TASK = Task(iterations=9, consecutive_failures=3, total_failures=5, errors={"a3f1b2c4": 4, "0badc0de": 1})

TRIPS: dict[GuardRule, tuple[str, str]] = {
    "max_iterations": ("10 iterations (limit: 10)", "the task has reached its limit of iterations"),
    "max_tokens": ("200,000 tokens used (limit: 200,000)", "the task has used all its tokens"),
    "max_cost": (
        "$9.80 spent, and the next call may cost up to $0.40 (limit: $10.00)",
        "the task's money is used up, or too little for another call",
    ),
    "confidence_drift": (
        "confidence below 0.3 in 3 answers: 0.2, 0.1, 0.1",
        "the answers were less and less sure, or not sure enough",
    ),
    "consecutive_failures": ("3 consecutive failures (threshold: 3)", "3 consecutive failures"),
    "same_error": ("Same error repeated 5 times (threshold: 5)", "Same error repeated 5 times"),
}


def test_each_rule_of_a_guard_has_its_words_for_models_and_end_users() -> None:
    assert set(TRIPS) == set(get_args(GuardRule))
    for rule, (for_operators, expected) in TRIPS.items():
        statistics = task_statistics(TASK, Trip(rule, for_operators))
        assert statistics.model_dump() == {
            "consecutive_failures": 3,
            "total_failures": 5,
            "unique_errors": 2,
            "reason": expected,
        }
        assert not any(word in statistics.reason for word in ("(limit", "threshold", "$", "200,000"))


@each_row(
    ("stored", "reason"),
    [
        ("3 jobs in a row failed (threshold: 3), of 2 callers", "3 jobs in a row failed"),
        ("50% of 20 calls failed within 60 s (threshold: 50% of at least 10)", "50% of 20 calls failed within 60 s"),
        ("the half-open probe failed", "the half-open probe failed"),
        ("isolated by ada: the bill (threshold: 9)", "isolated by an operator"),
    ],
)
def test_why_a_breaker_opened_is_said_without_its_threshold_and_without_its_operator(stored: str, reason: str) -> None:
    counts: dict[str, Any] = {"consecutive_failures": 3, "total_failures": 5, "unique_errors": 1}
    statistics = breaker_statistics(stored, **counts)
    assert statistics.model_dump() == {**counts, "reason": reason}
    assert statistics.in_words() == f"{reason} (5 failures in all, 1 different error)"


def test_where_nothing_failed_that_is_said() -> None:
    statistics = task_statistics(Task(), Trip("max_iterations", "x"))
    assert statistics.in_words() == "the task has reached its limit of iterations (no failures)"
