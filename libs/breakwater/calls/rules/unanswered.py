"""Decides which of its attempts explains that a job has no answer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import cast

from breakwater.calls.rules.classify import NOT_SENT, REFUSED_REQUEST_CLASSES, WORKER_LOST
from breakwater.jobs.contract.execution import Attempt, ErrorInfo, Reason


def why_unanswered(attempts: Sequence[Attempt], stop: Reason) -> tuple[Reason, ErrorInfo]:
    """Returns the reason why a job ends without an answer, and its error: those of its last attempt, call or refusal.

    There are three exceptions. Of several refusals for one reason, the one that ends first counts, with the wait from
    the end of the last attempt. If a retry was refused because of the failures before it, by the retry budget or by the
    breaker of a model that the job has called, the failure is the reason. And the refusal of a request by a fallback
    model does not explain the failure of the requested one: see `_explaining_attempts`.

    Args:
        attempts: the job's attempts, in order.
        stop: the reason why nothing more is tried.
    """
    attempts = _explaining_attempts(attempts)
    last = attempts[-1] if attempts else None
    if last is not None and _is_overflow(last):
        return "error", cast(ErrorInfo, last.error)
    reason = (last.refused_reason if last is not None and stop == "error" else None) or stop
    if last is not None and last.short_circuited and reason in {"error", "breaker_open"}:
        calls = [attempt for attempt in attempts if attempt.model == last.model and not attempt.short_circuited]
        if calls:
            last = calls[-1]
            reason = "error"
    if last is not None and reason == "error" and last.outcome in {"success", "worker_lost"}:
        # A success here is one whose answer was lost when its worker crashed.
        return "worker_lost", WORKER_LOST.error_info()
    if last is None or last.error is None:
        message = "the job's total timeout expired before it could make a call"
        return reason, ErrorInfo(kind="timeout", class_="TotalTimeoutError", message=message)
    # A refused job is worth repeating as soon as the first of its models admits calls.
    refusals = [
        (attempt.completed_at + timedelta(seconds=attempt.error.retry_after_s), attempt.error)
        for attempt in attempts
        if attempt.refused_reason == reason and attempt.error is not None and attempt.error.retry_after_s is not None
    ]
    if not refusals:
        return reason, last.error
    admitted_at, error = min(refusals, key=lambda refusal: refusal[0])
    wait_s = max(0.0, (admitted_at - attempts[-1].completed_at).total_seconds())
    return reason, error.model_copy(update={"retry_after_s": wait_s})


_OF_MODELS: frozenset[Reason | None] = frozenset({None, "error", "breaker_open", "rate_limited"})
"""Reasons that end the calls of one model; all others end the job."""


def _explaining_attempts(attempts: Sequence[Attempt]) -> Sequence[Attempt]:
    """Returns the attempts up to the one whose error explains why no model answered.

    A context overflow takes precedence over failures of later models, because the caller can shorten the conversation
    for the requested model. Otherwise the last model's failure explains it, unless that model refused the form of the
    request and an earlier one failed for another reason. If all models refused it, the first refusal counts: it is
    about the request as the caller wrote it.

    Args:
        attempts: the attempts of a job without an answer, in order.
    """
    ends: dict[str, int] = {}
    for index, attempt in enumerate(attempts):
        if not attempt.short_circuited or attempt.model not in ends or attempts[ends[attempt.model]].short_circuited:
            ends[attempt.model] = index
    for model, end in ends.items():
        if _is_overflow(attempts[end]) and all(after.refused_reason in _OF_MODELS for after in attempts[end + 1 :]):
            # The last overflow of the whole conversation, before messages were dropped from it.
            overflows = (
                index
                for index in range(end, -1, -1)
                if attempts[index].model == model
                and _is_overflow(attempts[index])
                and not attempts[index].dropped_messages
            )
            return attempts[: next(overflows, end) + 1]
    last_of = {attempt.model: index for index, attempt in enumerate(attempts)}
    sent = [model for model, end in ends.items() if not _is_of_class(attempts[end], {NOT_SENT})] or list(ends)
    answerable = [model for model in sent if not _is_of_class(attempts[ends[model]], REFUSED_REQUEST_CLASSES)]
    explains = max(map(last_of.__getitem__, answerable), default=last_of[sent[0]] if sent else -1)
    return attempts[: explains + 1]


def _is_overflow(attempt: Attempt) -> bool:
    """Returns True if the conversation did not fit into the model's context."""
    return attempt.error is not None and attempt.error.kind == "context_overflow"


def _is_of_class(attempt: Attempt, classes: Collection[str]) -> bool:
    return attempt.error is not None and attempt.error.kind == "client" and attempt.error.class_ in classes
