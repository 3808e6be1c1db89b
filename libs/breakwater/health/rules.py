"""Health of agents and models, transitions of breakers as events, and figures of failures for results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from breakwater.breakers.rules import (
    Breaker,
    BreakerChange,
    BreakerKey,
    BreakerRules,
    consecutive_failures,
    errors_within,
    is_open_for_one,
)
from breakwater.jobs.contract.events import BreakerState, BreakerTransition, GuardRule, Health
from breakwater.jobs.contract.execution import Attempt, ErrorKind, FailureStatistics
from breakwater.kernel.types import ms_from_time, time_from_ms
from breakwater.limits.rules.budget import NEVER_FITS
from breakwater.limits.rules.guard import Task, Trip

_SAYS_NOTHING: frozenset[ErrorKind] = frozenset({"logic", "context_overflow", "orphan_tool_calls", "rate_limit"})
"""Kinds that say nothing of health: a message was wrong and is mended or sent back, or the model was busy."""

NONE_SUCCEEDS = 10
"""Failures in a row that make a model unhealthy."""

LAST_CALLS = 20
"""Calls whose outcome is remembered."""
SOME_FAIL = 0.2
NEARLY_ALL_FAIL = 0.8
"""Shares of failures: of the calls that are remembered, worth a word, and of `LAST_CALLS`, which make it unhealthy."""


def failed(attempt: Attempt) -> bool | None:
    """True if a call speaks against its model's health; None where it says nothing of it.

    Wider than what a breaker counts: a refused key opens no breaker, and yet no call succeeds; nor does one that a cap
    never has room for.
    """
    if attempt.outcome == "success":
        return False
    if attempt.outcome == "short_circuited":
        return True if attempt.error and attempt.error.class_ in NEVER_FITS else None
    if attempt.outcome == "cancelled" or (attempt.error and attempt.error.kind in _SAYS_NOTHING):
        return None
    return True


def out_of_budget(attempt: Attempt) -> bool:
    """True if an exhausted budget of the agent, or of all agents, refused a call: that speaks against the agent alone.

    The caps of a tenant, a task or a job say nothing of others' jobs.
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
    """The latest calls of an agent, of one model or of all together. Times are in ms since the epoch.

    A success clears the time of the latest failure, as it does the count.
    """

    consecutive_failures: int = 0
    last_failure_ms: int | None = None
    last_success_ms: int | None = None
    last_calls: int = 0
    """Calls whose outcome is remembered: `LAST_CALLS` at most."""
    last_failures: int = 0
    """Those of them that failed."""


def open_for(breaker: Breaker) -> str | None:
    """The caller that a breaker is open for while it lets calls of others pass, in words."""
    # Its name is not known where Redis was emptied meanwhile.
    return (breaker.alone_name or "one caller") if is_open_for_one(breaker) else None


def health_of_model(
    breaker: BreakerState | None, calls: CallHealth, until_ms: int | None = None, only_for: str | None = None
) -> Verdict:
    """Health of an agent on one model: `unhealthy` while its breaker refuses calls, or nearly all calls fail.

    Args:
        breaker: state of the breaker; None without one.
        calls: the latest calls of this model.
        until_ms: end of the breaker's cool-down, in ms since the epoch; None if it is over.
        only_for: the one caller that it is open for (`open_for`): others are served.
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
    """Health of an agent over its models: `unhealthy` if none of them serves.

    It is `degraded` if its last call failed, or one of its models is unhealthy. A success ends the former, on whatever
    model: a failed model without further calls must not mark an agent for weeks whose calls succeed.

    Args:
        models: the health on each model.
        calls: the latest calls of all models together.
        affordable: False if a hard cap is too small for any call.
    """
    if not affordable:
        return Verdict("unhealthy", "no call fits under a hard cap")
    of_models = combined(models)
    failed = "failed" if of_models.health != "healthy" else "failed or were refused"
    of_calls = _of_calls(calls, failed)
    some_down = any(model.health == "unhealthy" for model in models.values())
    if calls.consecutive_failures >= NONE_SUCCEEDS or not (calls.consecutive_failures or some_down):
        return of_calls
    if of_models.health != "healthy":
        return of_models
    # The calls of a failing model and those of its successful fallback, together, are no worse than degraded.
    return of_calls if of_calls.health == "healthy" else Verdict("degraded", of_calls.health_reason)


def combined(parts: Mapping[str, Verdict]) -> Verdict:
    """Health of several agents or models, by name: `unhealthy` if all are, `degraded` if any is not healthy."""
    for health in ("unhealthy", "degraded"):
        for name, part in parts.items():
            if part.health == health:
                is_down = all(one.health == "unhealthy" for one in parts.values())
                reason = part.health_reason if len(parts) == 1 else f"{name}: {part.health_reason}"
                return Verdict("unhealthy" if is_down else "degraded", reason)
    called = [one for one in parts.values() if one != UNCALLED]
    if not called:
        return UNCALLED
    return called[0] if len(parts) == 1 else Verdict("healthy", "healthy for all agents")


def _of_calls(calls: CallHealth, failed: str = "failed") -> Verdict:
    in_a_row = calls.consecutive_failures
    known = calls.last_calls
    failures = calls.last_failures
    if in_a_row >= NONE_SUCCEEDS:
        return Verdict("unhealthy", f"{in_a_row:,} calls {failed} in a row")
    some_fail = failures > max(in_a_row, 1) and failures >= known * SOME_FAIL
    if in_a_row and some_fail:
        is_down = failures >= LAST_CALLS * NEARLY_ALL_FAIL
        return Verdict("unhealthy" if is_down else "degraded", f"{failures} of the last {known} calls {failed}")
    if in_a_row:
        last = f"the last call {failed.replace('were', 'was')}"
        return Verdict("degraded", last if in_a_row == 1 else f"{in_a_row} calls {failed} in a row")
    if calls.last_success_ms is None:
        return UNCALLED
    if known <= 1:  # 0: an earlier version noted that call
        return Verdict("healthy", "the last call succeeded")
    if some_fail:
        return Verdict("healthy", f"the last call succeeded; {failures} of the last {known} did not")
    return Verdict("healthy", f"{known - failures} of the last {known} calls succeeded")


_WITHOUT_FIGURES: Mapping[GuardRule, str] = {
    # How much was used when a cap stopped it says what the cap is.
    "max_iterations": "the task has reached its limit of iterations",
    "max_tokens": "the task has used all its tokens",
    "max_cost": "the task's money is used up, or too little for another call",
    "confidence_drift": "the answers were less and less sure, or not sure enough",
}


def of_task(task: Task, trip: Trip) -> FailureStatistics:
    """Figures of a task that is stopped."""
    return FailureStatistics(
        consecutive_failures=task.consecutive_failures,
        total_failures=task.total_failures,
        unique_errors=len(task.errors),
        reason=_WITHOUT_FIGURES.get(trip.rule) or _without_threshold(trip.reason),
    )


def of_breaker(reason: str, *, consecutive_failures: int, total_failures: int, unique_errors: int) -> FailureStatistics:
    """Figures of a breaker that refuses calls; `reason` is why it opened, as it is stored."""
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


def transition(key: BreakerKey, change: BreakerChange, rules: BreakerRules, now_ms: int) -> BreakerTransition:
    """The event of a change that was decided at `now_ms` (ms since the epoch)."""
    after = change.after
    # What was counted before a reset is published with it; from then on it is forgotten.
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
    """The event of a breaker that let a probe pass. Its id, made from the end of the cool-down, is stable."""
    before = replace(half_open, state="open", probe=None, probe_until_ms=0, version=half_open.version - 1)
    in_a_row = consecutive_failures(before)
    errors = errors_within(before, rules, now_ms)
    why = "the failed probe was another caller's" if half_open.probed_by else "the cool-down has ended"
    change = BreakerChange(before, half_open, None, f"{why}; one probe is admitted", in_a_row, errors)
    event = transition(key, change, rules, now_ms)
    return event.model_copy(update={"transition_id": f"{key.name}#{half_open.version}@{half_open.open_until_ms}"})


def recalled(latest: BreakerTransition, sequence: int) -> Breaker:
    """A breaker as its latest transition, at `sequence` of the event log, left it; for one that is known no more.

    Who holds the probe of a half-open one is not in it, nor when its lease ends: it is open and due for a probe.
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
