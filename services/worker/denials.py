"""Why a call is not made: in words for the people who look after the plane, and in others for models and end users.

What models and end users read names no limit and no figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from breakwater.contracts.execution import Attempt, ErrorInfo, Reason
from breakwater.contracts.types import format_time, time_from_ms
from breakwater.policy.alert_texts import money_text
from breakwater.policy.breaker_rules import BreakerRules
from breakwater.policy.caps import fits, spent_by
from breakwater.state.breakers import BreakerRefused
from breakwater.state.budgets import OverBudget
from breakwater.state.rate_limits import Limited, OverLimit
from services.worker.assignment import Assignment
from services.worker.plane import Plane

BY_EXECUTION = "execution"
"""Names the cap of the job itself, as what refused a call."""

REBUILDING_POLL_S = 0.5
"""How often at most it is asked again whether the budgets are rebuilt; up to as much again is added at random."""

POLL_S = 0.25
"""How often at most it is asked again whether fewer calls are under way; up to as much again is added at random."""


@dataclass(frozen=True, slots=True)
class Denial:
    """The call must not be made."""

    reason: Reason
    error: ErrorInfo
    refused_by: str | None = None
    """The budget or the limit that has no room, by its name."""
    refused_cap: int | None = None
    """The hard cap that is used up, in nano-dollars."""
    final: bool = False
    """No other model is to be tried."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The call may be asked for again after a while: there are too many just now."""

    delay_s: float
    denial: Denial
    """What it is refused with where there is no time to wait."""


TASK_STOPPED = Denial(
    "guard_tripped",
    # Read by models and end users, so it names no limit: they stand in the guard's event.
    ErrorInfo(kind="guard_tripped", class_="GuardTrippedError", message="the task is stopped until people look at it"),
)

TASK_CROWDED = Denial(
    "budget_exceeded",
    ErrorInfo(
        kind="budget_exceeded",
        class_="BudgetExceededError",
        message="other jobs of the task may use up what its guard lets it cost; no call was made",
        user_message="This task has no budget left while its other jobs are under way. Please try again after a while.",
    ),
    "task",
)


def over_own_cap(
    plane: Plane, job: Assignment, model: str, worst_case: int | None, attempts: Sequence[Attempt]
) -> Denial | None:
    """Why a job's own cap refuses a call. One worker runs a job at a time, so its attempts say what counts."""
    cap = job.agent.max_cost_usd
    if cap is None:
        return None
    if worst_case is None:
        return unpriced(plane, job, model, "max_cost_usd", BY_EXECUTION)
    spent = spent_by(attempts)
    if fits(worst_case, limit=cap, spent=spent):
        return None
    next_call = f"a call to {model} may cost up to {money_text(worst_case)}"
    return Denial(
        "budget_exceeded",
        ErrorInfo(
            kind="budget_exceeded",
            class_="BudgetExceededError",
            message=f"the job has cost {money_text(spent)}, and {next_call}; max_cost_usd is {money_text(cap)}",
            user_message="This request would cost more than one request may. Please make it shorter or simpler.",
        ),
        BY_EXECUTION,
    )


def breaker_open(plane: Plane, model: str, refused: BreakerRefused, rules: BreakerRules | None) -> Denial:
    """An open breaker refuses it; told with when it may be asked again."""
    user_message = "This agent is paused for now. Please try again later."
    if refused.until_ms == 0:
        state, wait_s = "forced open until somebody resets it", None
    else:
        wait_s, moment = refused.wait_ms / 1000, format_time(time_from_ms(refused.until_ms))
        if refused.probing and rules is not None and rules.cooldown_s < wait_s:
            # Long before its lease a probe ends, and with it the waiting, or another cool-down begins.
            wait_s, moment = rules.cooldown_s, format_time(plane.now() + timedelta(seconds=rules.cooldown_s))
        state = "half-open, and its one probe is under way" if refused.probing else f"open until {moment}"
        why = "temporarily unavailable because of recent failures"
        user_message = f"This agent is {why}. Please try again after {moment}."
    return Denial(
        "breaker_open",
        ErrorInfo(
            kind="breaker_open",
            class_="CircuitBreakerOpenError",
            message=f"the breaker for {model} is {state}; no call was made",
            retry_after_s=wait_s,
            user_message=user_message,
        ),
    )


REBUILDING = Denial(
    "budget_exceeded",
    ErrorInfo(
        kind="budget_exceeded",
        class_="BudgetsRebuildingError",
        message="the budgets' counters are lost and being rebuilt; until then no call is made under a hard cap",
        user_message="This agent's budget can't be checked just now. Please try again in a minute.",
    ),
)


def over_budget(plane: Plane, over: OverBudget, model: str) -> Denial:
    """A hard cap has no room for it; told with when its period ends."""
    counter, resets = over.counter, format_time(time_from_ms(over.resets_at_ms))
    who = "all agents" if counter.of is None else f"{counter.scope} {counter.of}"
    what = f"the {counter.window} budget of {who}"
    worst = f"a call to {model} may cost up to {money_text(over.amount)}"
    left = max(0, over.limit - over.spent - over.reserved)
    held = f" ({money_text(over.reserved)} of it is held by calls under way)" if over.reserved else ""
    if over.limit == 0:
        message = f"{what} is $0.00: no call is made that costs anything"
        user_message, wait_s = "This agent may not spend anything at present. Please tell its owner.", None
    elif over.amount > over.limit:
        message = f"{worst}, and {what} is {money_text(over.limit)} in all; no such call ever fits"
        user_message, wait_s = "This request would cost more than this agent may spend. Please make it shorter.", None
    else:
        message = (
            f"{what} has {money_text(left)} of {money_text(over.limit)} left{held}, and {worst}; it resets at {resets}"
        )
        user_message = f"This agent has used up its budget for now. It can be used again after {resets}."
        wait_s = max(0.0, over.resets_at_ms / 1000 - plane.now().timestamp())
    return Denial(
        "budget_exceeded",
        ErrorInfo(
            kind="budget_exceeded",
            class_="BudgetExceededError",
            message=message,
            retry_after_s=wait_s,
            user_message=user_message,
        ),
        counter.name,
        refused_cap=over.limit if over.amount <= over.limit or not over.limit else None,
        final=counter.caps.on_exceeded == "fail",
    )


async def held_to_limit(plane: Plane, over: OverLimit, limits: Sequence[Limited]) -> Denial | Wait:
    """A rate limit has no room for it now. Raises StateUnavailable."""
    kind, _, who = over.name.partition(":")
    what = over.what.replace("_", " ")
    wait_s = None if over.wait_ms is None else over.wait_ms / 1000
    denial = Denial(
        "rate_limited",
        ErrorInfo(
            kind="rate_limit",
            class_="RateLimitExceededError",
            message=f"the limit of {kind} {who} on {what} has no room for this call; no call was made",
            retry_after_s=wait_s,
            user_message="This agent is asked for too much just now. Please try again after a while.",
        ),
        over.name,
    )
    limited = next(limited for limited in limits if limited.name == over.name)
    if limited.rule.on_exceeded == "fail" or wait_s is None:
        return denial
    # A call under way mostly ends long before its lease, and with fewer tokens than it may use.
    soon = over.what == "concurrent_calls"
    if over.what == "tokens_per_minute":
        [usage] = await plane.rate_limits.usage([limited])
        soon = usage.concurrent_calls > 0
    # Not all at once when their time has come.
    return Wait((min(wait_s, POLL_S) if soon else wait_s) + POLL_S * plane.jitter(), denial)


def retry_budget_spent(model: str) -> Denial:
    """What a retry is refused with when the fleet has made too many of them."""
    return Denial(
        "error",
        ErrorInfo(
            kind="retry_budget",
            class_="RetryBudgetExceededError",
            message=f"too many calls to {model} are retries already; this one was not made",
            user_message="This agent is temporarily unavailable because of recent failures. Please try again later.",
        ),
    )


def unpriced(
    plane: Plane, job: Assignment, model: str, cap: str = "a hard budget", refused_by: str | None = None
) -> Denial:
    """A model without a price is not called under a cap: it is not known to be free."""
    provider = plane.config.provider_name(job.agent, model)
    local = plane.config.is_local(provider)
    setting = f"providers.{provider}.cost_per_call_usd" if local else f"models.{model}.price"
    return Denial(
        "budget_exceeded",
        ErrorInfo(
            kind="budget_exceeded",
            class_="UnpricedModelError",
            message=f"{model} has no price, so {cap} cannot hold it; set {setting}",
            user_message="This agent's model has no price set, so its budget can't be held. Please tell its owner.",
        ),
        refused_by,
    )
