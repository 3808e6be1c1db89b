"""Recorded attempts as breakers count them."""

from __future__ import annotations

from breakwater.breakers.rules.breaker import Observation, caller_of, short_hash, task_of
from breakwater.jobs.contract.execution import Attempt


def observation_of(sequence: int, at_ms: int, attempt: Attempt) -> Observation:
    """An attempt as a breaker counts it. Its event has this sequence, and was stored at `at_ms` since the epoch."""
    failed: bool | None = None
    if attempt.outcome == "success":
        failed = False
    elif attempt.outcome == "error" and attempt.counts_for_breaker:
        failed = True
    error = (attempt.error.hash if attempt.error is not None else None) or ""
    limited = attempt.outcome == "error" and attempt.error is not None and attempt.error.kind == "rate_limit"
    version = attempt.breaker_version
    gave_up = attempt.short_circuited or is_cut_off(attempt)
    job = short_hash(attempt.execution_id) if failed or gave_up else ""
    caller = caller_of(attempt.caller, attempt.tenant)
    names = attempt.caller or "", attempt.tenant or ""
    task = task_of(attempt.tenant, attempt.task_key or attempt.execution_id) if failed else ""
    return Observation(
        sequence,
        attempt.attempt_id,
        at_ms,
        failed,
        error,
        version,
        limited,
        job,
        caller,
        names,
        task,
        attempt.tried_again,
        gave_up,
    )


def is_cut_off(attempt: Attempt) -> bool:
    """Returns True if the job's own deadline cut a call off, which by itself says nothing about the model."""
    return attempt.error is not None and attempt.error.kind == "timeout" and not attempt.counts_for_breaker
