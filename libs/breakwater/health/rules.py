"""The health of agents and models, breaker transitions as events, and failure statistics for results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from breakwater.breakers.contract import BreakerState, BreakerTransition, Health
from breakwater.breakers.rules import (
    Breaker,
    BreakerChange,
    BreakerKey,
    BreakerRules,
    consecutive_failures,
    errors_within,
    is_open_for_one,
)
from breakwater.jobs.contract.execution import Attempt, ErrorKind, FailureStatistics
from breakwater.kernel.types import ms_from_time, time_from_ms
from breakwater.limits.contract import GuardRule
from breakwater.limits.rules.budget import NEVER_FITS
from breakwater.limits.rules.guard import Task, Trip

_SAYS_NOTHING: frozenset[ErrorKind] = frozenset({"logic", "context_overflow", "orphan_tool_calls", "rate_limit"})
"""Kinds of errors that say nothing about health: the request was wrong and is repaired, or the model was busy."""

NONE_SUCCEEDS = 10
"""The number of consecutive failures that make a model unhealthy."""

LAST_CALLS = 20
"""The number of calls whose outcome is remembered."""
SOME_FAIL = 0.2
"""The share of failures among the remembered calls that the reason mentions."""
NEARLY_ALL_FAIL = 0.8
"""The share of failures among `LAST_CALLS` that makes a model unhealthy."""


def failed(attempt: Attempt) -> bool | None:
    """Return True if a call speaks against its model's health; None if it says nothing about it.

    More failures count than for a breaker: a refused key or a call that no cap has room for opens no breaker, but
    makes every call fail.
    """
    if attempt.outcome == "success":
        return False
    if attempt.outcome == "short_circuited":
        return True if attempt.error and attempt.error.class_ in NEVER_FITS else None
    if attempt.outcome == "cancelled" or (attempt.error and attempt.error.kind in _SAYS_NOTHING):
        return None
    return True


def out_of_budget(attempt: Attempt) -> bool:
    """Return True if an exhausted budget of the agent, or of all agents, refused a call.

    That speaks against the health of the agent, not of a model. The caps of a tenant, a task or a job say nothing
    about the agent's other jobs.
    """
    error = attempt.error
    spent = error is not None and error.class_ == "BudgetExceededError" and attempt.outcome == "short_circuited"
    return spent and (attempt.refused_by or "").startswith(("agent:", "global/"))


class Verdict(NamedTuple):
    """A health, and the reason for it in a few words."""

    health: Health
    health_reason: str


UNCALLED = Verdict("healthy", "no calls yet")


@dataclass(frozen=True, slots=True)
class CallHealth:
    """The latest calls of an agent, to one model or to all.

    Attributes:
        consecutive_failures: the number of failures since the latest success.
        last_failure_ms: the time of the latest failure since then, in milliseconds since the epoch.
        last_success_ms: the time of the latest success, in milliseconds since the epoch.
        last_calls: the number of calls whose outcome is remembered, at most `LAST_CALLS`.
        last_failures: the number of them that failed.
    """

    consecutive_failures: int = 0
    last_failure_ms: int | None = None
    last_success_ms: int | None = None
    last_calls: int = 0
    last_failures: int = 0


def open_for(breaker: Breaker) -> str | None:
    """Return the only caller that a breaker is open for, in words; None if it is not open for one caller."""
    # The caller's name is lost if Redis has been emptied since.
    return (breaker.alone_name or "one caller") if is_open_for_one(breaker) else None


def health_of_model(
    breaker: BreakerState | None, calls: CallHealth, until_ms: int | None = None, only_for: str | None = None
) -> Verdict:
    """Return an agent's health on one model: `unhealthy` while its breaker refuses calls, or nearly all calls fail.

    Args:
        breaker: the state of the breaker; None without one.
        calls: the latest calls to this model.
        until_ms: the end of the breaker's cool-down, in milliseconds since the epoch; None if it is over.
        only_for: the only caller that the breaker is open for (see `open_for`); others are served.
    """
    if only_for is not None:
        return Verdict("degraded", f"breaker open for {only_for} alone")
    match breaker:
        case None | "closed":
            return _of_calls(calls)
        case "isolated":
            return Verdict("unhealthy", "breaker isolated until an operator resets it")
        case "open" if until_ms:
            return Verdict("unhealthy", f"breaker open until {time_from_ms(until_ms):%H:%M:%S} UTC")
        case "open":
            return Verdict("unhealthy", "breaker open, and the next call probes it")
        case "half_open":
            return Verdict("unhealthy", "breaker half-open until a probe succeeds")


def health_of_agent(models: Mapping[str, Verdict], calls: CallHealth, *, affordable: bool = True) -> Verdict:
    """Return the health of an agent over its models: `unhealthy` if none of them serves.

    It is `degraded` if its last call failed, or one of its models is unhealthy. A success on any model makes up for
    the last failure: a failed model that is no longer called must not mark a working agent for weeks.

    Args:
        models: the health on each model.
        calls: the latest calls to all models together.
        affordable: False if a hard cap is too small for any call.
    """
    if not affordable:
        return Verdict("unhealthy", "no call fits under a hard cap")
    models_verdict = combined(models)
    failed = "failed" if models_verdict.health != "healthy" else "failed or were refused"
    calls_verdict = _of_calls(calls, failed)
    some_down = any(model.health == "unhealthy" for model in models.values())
    if calls.consecutive_failures >= NONE_SUCCEEDS or not (calls.consecutive_failures or some_down):
        return calls_verdict
    if models_verdict.health != "healthy":
        return models_verdict
    # The calls of a failing model and those of its successful fallback, together, are no worse than degraded.
    is_healthy = calls_verdict.health == "healthy"
    return calls_verdict if is_healthy else Verdict("degraded", calls_verdict.health_reason)


def combined(parts: Mapping[str, Verdict]) -> Verdict:
    """Return the health of several agents or models: `unhealthy` if all are, `degraded` if any is not healthy."""
    for health in ("unhealthy", "degraded"):
        for name, part in parts.items():
            if part.health == health:
                is_down = all(verdict.health == "unhealthy" for verdict in parts.values())
                reason = part.health_reason if len(parts) == 1 else f"{name}: {part.health_reason}"
                return Verdict("unhealthy" if is_down else "degraded", reason)
    called = [verdict for verdict in parts.values() if verdict != UNCALLED]
    if not called:
        return UNCALLED
    return called[0] if len(parts) == 1 else Verdict("healthy", "healthy for all agents")


def _of_calls(calls: CallHealth, failed: str = "failed") -> Verdict:
    consecutive = calls.consecutive_failures
    remembered = calls.last_calls
    failures = calls.last_failures
    if consecutive >= NONE_SUCCEEDS:
        return Verdict("unhealthy", f"{consecutive:,} calls {failed} in a row")
    some_fail = failures > max(consecutive, 1) and failures >= remembered * SOME_FAIL
    if consecutive and some_fail:
        is_down = failures >= LAST_CALLS * NEARLY_ALL_FAIL
        return Verdict("unhealthy" if is_down else "degraded", f"{failures} of the last {remembered} calls {failed}")
    if consecutive:
        phrase = f"the last call {failed.replace('were', 'was')}"
        return Verdict("degraded", phrase if consecutive == 1 else f"{consecutive} calls {failed} in a row")
    if calls.last_success_ms is None:
        return UNCALLED
    if remembered <= 1:  # 0 if an earlier version recorded that call
        return Verdict("healthy", "the last call succeeded")
    if some_fail:
        return Verdict("healthy", f"the last call succeeded; {failures} of the last {remembered} did not")
    return Verdict("healthy", f"{remembered - failures} of the last {remembered} calls succeeded")


_WITHOUT_FIGURES: Mapping[GuardRule, str] = {
    # The amount that was used when a cap stopped the task would reveal the cap.
    "max_iterations": "the task has reached its limit of iterations",
    "max_tokens": "the task has used all its tokens",
    "max_cost": "the task's money is used up, or too little for another call",
    "confidence_drift": "the answers were less and less sure, or not sure enough",
}


def of_task(task: Task, trip: Trip) -> FailureStatistics:
    """Return the statistics of a task that is stopped."""
    return FailureStatistics(
        consecutive_failures=task.consecutive_failures,
        total_failures=task.total_failures,
        unique_errors=len(task.errors),
        reason=_WITHOUT_FIGURES.get(trip.rule) or _without_threshold(trip.reason),
    )


def of_breaker(reason: str, *, consecutive_failures: int, total_failures: int, unique_errors: int) -> FailureStatistics:
    """Return the statistics of a breaker that refuses calls; `reason` is the stored reason for its opening."""
    # Readers of results must not see who isolated the breaker and why.
    isolated = reason.startswith("isolated by ")
    return FailureStatistics(
        consecutive_failures=consecutive_failures,
        total_failures=total_failures,
        unique_errors=unique_errors,
        reason="isolated by an operator" if isolated else _without_threshold(reason),
    )


def _without_threshold(reason: str) -> str:
    return reason.partition(" (threshold: ")[0]


def transition(key: BreakerKey, change: BreakerChange, rules: BreakerRules, now_ms: int) -> BreakerTransition:
    """Return the event of a transition that was decided at `now_ms` (milliseconds since the epoch)."""
    after = change.after
    # The event of a reset has the counts from before it, which are forgotten from then on.
    figures = after if after.total_failures else change.before
    return BreakerTransition(
        transition_id=f"{key.name}#{after.version}@{now_ms}",
        scope=rules.scope,
        agent=key.agent,
        model=key.model,
        from_state=change.before.state,
        to_state=after.state,
        rule=change.rule,
        reason=change.reason,
        by=change.by,
        health=health_of_model(after.state, CallHealth(consecutive_failures(after)), only_for=open_for(after)).health,
        consecutive_failures=change.consecutive_failures,
        total_failures=figures.total_failures,
        unique_errors=len(figures.errors_seen),
        errors=change.errors,
        error_hash=change.error_hash,
        alone=after.alone or None,
        open_for=open_for(after),
        within_s=rules.within_s,
        cooldown_s=(after.open_until_ms - now_ms) / 1000 if after.state == "open" else rules.cooldown_s,
        open_until=time_from_ms(after.open_until_ms) if after.state == "open" else None,
        last_failure_at=time_from_ms(after.last_failure_ms) if after.last_failure_ms else None,
        last_success_at=time_from_ms(after.last_success_ms) if after.last_success_ms else None,
        version=after.version,
        at=time_from_ms(now_ms),
    )


def half_opened(key: BreakerKey, half_open: Breaker, rules: BreakerRules, now_ms: int) -> BreakerTransition:
    """Return the event of a breaker that admitted a probe. Its id does not depend on the publisher."""
    before = replace(half_open, state="open", probe=None, probe_until_ms=0, version=half_open.version - 1)
    consecutive = consecutive_failures(before)
    errors = errors_within(before, rules, now_ms)
    cause = "the failed probe was another caller's" if half_open.probed_by else "the cool-down has ended"
    change = BreakerChange(before, half_open, None, f"{cause}; one probe is admitted", consecutive, errors)
    event = transition(key, change, rules, now_ms)
    return event.model_copy(update={"transition_id": f"{key.name}#{half_open.version}@{half_open.open_until_ms}"})


def recalled(latest: BreakerTransition, sequence: int) -> Breaker:
    """Rebuild a lost breaker from its latest transition, which is at `sequence` in the event log.

    The transition does not say who holds the probe of a half-open breaker: it is rebuilt as open and due for a probe.
    """
    half_open = latest.to_state == "half_open"
    was_reset = latest.to_state == "closed" and latest.by is not None
    return Breaker(
        state="open" if half_open else latest.to_state,
        open_until_ms=0 if latest.open_until is None else ms_from_time(latest.open_until),
        openings=1 if half_open or latest.to_state == "open" else 0,
        version=latest.version,
        changed_ms=ms_from_time(latest.at),
        reason=latest.reason,
        alone=latest.alone or "",
        alone_name=latest.open_for or "",
        counts_from=latest.version,
        closed_at=sequence,
        total_failures=0 if was_reset else latest.total_failures,
        last_failure_ms=0 if latest.last_failure_at is None else ms_from_time(latest.last_failure_at),
        last_success_ms=0 if latest.last_success_at is None else ms_from_time(latest.last_success_at),
    )
