"""Stops tasks that loop, burn money, fail over and over, or lose confidence in their answers.

A task is one run of an agent: all jobs with the same `task_id`, or a job with its children. Each job is one iteration.
A job that belongs to no other is its own task. Redis counts what a task uses and how its jobs end; this module judges
the counts: limits before each call, failures and confidence after each job. Every reason names figures and limits, so
it is only for operators, never for the model or the end user.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, TypedDict

from pydantic import JsonValue

from breakwater.breakers.rules.failure_statistics import without_threshold
from breakwater.jobs.contract.execution import FailureStatistics
from breakwater.kernel.formats import beyond, money, moneys, quantity
from breakwater.kernel.immutable import immutable
from breakwater.kernel.json_values import NoJsonError, find_json
from breakwater.limits.contract import GuardRule
from breakwater.limits.rules.budget import fits
from breakwater.limits.rules.limit import SOFT_PERCENT
from breakwater.limits.settings import ConfidenceRules, GuardRules

if TYPE_CHECKING:
    from breakwater.jobs.contract.execution import Execution, Reason


@immutable()
class Trip:
    """A rule that stops a task, and the reason with figures: `3 consecutive failures (threshold: 3)`."""

    rule: GuardRule
    reason: str


class TaskCounts(TypedDict):
    """The counts of a task in a `GuardEvent`; `cost` in nano-dollars."""

    iterations: int
    tokens: int
    cost: int
    consecutive_failures: int
    total_failures: int
    unique_errors: int


@immutable()
class Task:
    """The counts of a task.

    Attributes:
        iterations: the number of admitted jobs, running ones included.
        tokens: the input and output tokens of its concluded jobs.
        cost: the cost of its concluded jobs, in nano-dollars.
        consecutive_failures: the number of failed jobs since the last success.
        total_failures: the number of all failed jobs.
        errors: the number of jobs that failed with each error, by its hash of 8 hex digits; successes clear nothing.
        confidences: the confidence that its answers state, from 0 to 1, the newest last.
        read_ms: the time by Redis' clock at which a job asked or was counted, in milliseconds since the epoch: no two
            of a task are the same; 0 if none did.
    """

    iterations: int = 0
    tokens: int = 0
    cost: int = 0
    consecutive_failures: int = 0
    total_failures: int = 0
    errors: Mapping[str, int] = field(default_factory=dict[str, int])
    confidences: tuple[float, ...] = ()
    read_ms: int = field(default=0, compare=False)

    @property
    def counts(self) -> TaskCounts:
        """The counts for an event of its guard."""
        return {
            "iterations": self.iterations,
            "tokens": self.tokens,
            "cost": self.cost,
            "consecutive_failures": self.consecutive_failures,
            "total_failures": self.total_failures,
            "unique_errors": len(self.errors),
        }


@immutable()
class JobOutcome:
    """The usage and the end of a concluded job, over all its attempts.

    Attributes:
        tokens: input and output tokens.
        cost: the cost in nano-dollars.
        failed: True if it counts as a failure, False if as a success; None if as neither.
        called: True if any call was made. A job that was refused without a call is no iteration.
        error_hash: the hash of its error, 8 hex digits; it counts if the job failed.
        confidence: the confidence that its answer states, from 0 to 1; None if it states none.
        is_step: True if it is an iteration of its task.
    """

    tokens: int
    cost: int
    failed: bool | None
    called: bool
    error_hash: str | None
    confidence: float | None
    is_step: bool = True


_FAILURES: frozenset[Reason] = frozenset({"error", "timeout", "worker_lost"})
_REFUSALS: frozenset[Reason] = frozenset({"breaker_open", "budget_exceeded", "rate_limited"})
"""Reasons that do not count against a task unless it made a call: an outage must not stop the task for good."""


def outcome_of(record: Execution, rules: GuardRules) -> JobOutcome:
    """Returns what a concluded job adds to the counts of its task.

    A job for embeddings adds only its cost and its failure: it is no iteration, its tokens do not count, and its
    success does not end a series of failures.

    Args:
        record: the job's record or result.
        rules: the guard's rules.
    """
    embeds = record.api == "embeddings"
    called = [attempt for attempt in record.attempts if not attempt.short_circuited]
    failed_before = bool(called) and record.reason in _REFUSALS
    error = called[-1].error if failed_before else record.error
    succeeded = False if record.reason is None and not embeds else None
    return JobOutcome(
        tokens=0 if embeds else record.total_tokens,
        cost=record.total_cost or 0,
        failed=True if failed_before or record.reason in _FAILURES else succeeded,
        called=bool(called),
        error_hash=error.hash if error is not None else None,
        confidence=None if embeds else confidence_of(record.output, rules),
        is_step=not embeds,
    )


def before_call(
    task: Task,
    number: int,
    rules: GuardRules,
    *,
    tokens: int,
    cost: int,
    worst_case: int | None = None,
) -> Trip | None:
    """Returns why a job of the task must not call: a limit is reached, or the call might exceed it; None if it may.

    What other jobs of the task hold does not stop it, because they may cost less: the job waits.

    Args:
        task: the counts of the task's concluded jobs.
        number: the job's number among the task's iterations, from 1.
        rules: the guard's rules.
        tokens: the tokens of the job's earlier attempts.
        cost: the cost of the job's earlier attempts, in nano-dollars.
        worst_case: the most that the call can cost, in nano-dollars. None, for a model without a price, counts as
            zero: the default limit must not refuse such models.
    """
    used = task.tokens + tokens
    spent = task.cost + cost
    limit = rules.max_cost_usd
    if rules.max_iterations is not None and number > rules.max_iterations:
        return Trip("max_iterations", f"{quantity(number - 1, 'iteration')} (limit: {rules.max_iterations:,})")
    if rules.max_tokens is not None and used >= rules.max_tokens:
        return Trip("max_tokens", f"{quantity(used, 'token')} used (limit: {rules.max_tokens:,})")
    if limit is None:
        return None
    if spent >= limit:
        return Trip("max_cost", f"{money(spent)} spent (limit: {money(limit)})")
    worst = worst_case or 0
    if fits(worst, limit=limit, spent=spent):
        return None
    so_far, needed, cap = beyond(spent, worst, limit)
    return Trip("max_cost", f"{so_far} spent, and the next call may cost up to {needed} (limit: {cap})")


def with_job(task: Task, number: int, *, tokens: int, cost: int, has_called: bool) -> Task:
    """Returns a task that stops before a call of a job, with that job's usage. One that has not called is none."""
    iterations = task.iterations if has_called else number - 1
    return replace(task, iterations=iterations, tokens=task.tokens + tokens, cost=task.cost + cost)


def near_cap(task: Task, number: int, rules: GuardRules, *, tokens: int, cost: int) -> Trip | None:
    """Returns a limit that the task has used by 80 % or more, but not exhausted, so that operators can act in time.

    The arguments are those of `before_call`.
    """
    used_tokens = task.tokens + tokens
    spent = task.cost + cost
    if _is_near(number, rules.max_iterations):
        return Trip("max_iterations", f"{quantity(number, 'iteration')} (limit: {rules.max_iterations:,})")
    if _is_near(used_tokens, rules.max_tokens):
        return Trip("max_tokens", f"{quantity(used_tokens, 'token')} used (limit: {rules.max_tokens:,})")
    if rules.max_cost_usd is not None and _is_near(spent, rules.max_cost_usd):
        spent_text, limit = moneys(spent, rules.max_cost_usd)
        return Trip("max_cost", f"{spent_text} spent (limit: {limit})")
    return None


def _is_near(used: int, limit: int | None) -> bool:
    return limit is not None and limit * SOFT_PERCENT <= used * 100 < limit * 100


def after_job(task: Task, rules: GuardRules) -> Trip | None:
    """Returns the rule that stops a task once one of its jobs has been concluded and counted; None if none does.

    Limits are not checked here: a task that reached them with its last job needs no operator.
    """
    consecutive = task.consecutive_failures
    repeats = max(task.errors.values(), default=0)
    if rules.consecutive_failures is not None and consecutive >= rules.consecutive_failures:
        reason = f"{quantity(consecutive, 'consecutive failure')} (threshold: {rules.consecutive_failures:,})"
        return Trip("consecutive_failures", reason)
    if rules.same_error is not None and repeats >= rules.same_error:
        reason = f"Same error repeated {quantity(repeats, 'time')} (threshold: {rules.same_error:,})"
        return Trip("same_error", reason)
    return None if rules.confidence is None else _drift(task.confidences, rules.confidence)


def confidence_of(output: JsonValue, rules: GuardRules) -> float | None:
    """Returns the confidence that an answer states, from 0 to 1; None if it states none, or an invalid one.

    Args:
        output: an object, or a text that is only the JSON of one, in a fenced block or not.
        rules: the guard's rules, which name the field.
    """
    if rules.confidence is None:
        return None
    if isinstance(output, str):
        try:
            output = find_json(output, strict=True)
        except NoJsonError:
            return None
    confidence = output.get(rules.confidence.field) if isinstance(output, dict) else None
    if isinstance(confidence, bool) or not isinstance(confidence, int | float) or not 0 <= confidence <= 1:
        return None
    return float(confidence)


def _drift(confidences: tuple[float, ...], rules: ConfidenceRules) -> Trip | None:
    last = confidences[-rules.answers :]
    if len(last) < rules.answers:
        return None
    if rules.floor is not None and max(last) < rules.floor:
        return Trip("confidence_drift", f"confidence below {rules.floor:g} in {len(last)} answers: {_in_words(last)}")
    if rules.falling and all(later < earlier for earlier, later in pairwise(last)):
        return Trip("confidence_drift", f"confidence fell through {len(last)} answers: {_in_words(last)}")
    return None


def _in_words(confidences: tuple[float, ...]) -> str:
    newest = ", ".join(f"{confidence:g}" for confidence in confidences[-10:])
    return newest if len(confidences) <= 10 else f"..., {newest}"


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
