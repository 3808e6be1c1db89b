"""Errors of calls that limits, guards of tasks and retry budgets refused."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from breakwater.breakers.settings import GUARD_PRESETS
from breakwater.calls.rules.refusals import command, refusal
from breakwater.jobs.contract.execution import ErrorInfo
from breakwater.kernel.formats import beyond, moment, money, moneys
from breakwater.limits.contract import GuardRule
from breakwater.limits.rules.budget import MAX_MADE_UP_SCOPES, Counter, OverBudget, fits
from breakwater.limits.rules.limit import PERIODS, SOFT_PERCENT, Limit
from breakwater.limits.rules.rate_limit import HELD, OverRate
from breakwater.limits.rules.scopes import key_from_text, parts_of, scope_in_words, scope_of

RETRY_HELD_S = 5.0
"""The advised wait for calls in flight to end, or for lost counters."""

_TOO_MANY = "This agent is receiving too many requests right now. Please try again later."


# Limits by the calendar

REBUILDING = refusal(
    "budget_exceeded",
    "BudgetsRebuildingError",
    "the counters of limits were lost and are being rebuilt; until then no call is made under a hard limit",
    to_do="wait a few seconds; if it lasts, `breakwater doctor` shows what holds the rebuild up",
    retry_after_s=RETRY_HELD_S,
    user_message="This agent's limits cannot be checked right now. Please try again in a minute.",
)


def unreadable_limit(limit_id: str) -> ErrorInfo:
    """Builds the error of a call that a limit may hold for whose record this version of the plane can't read."""
    return refusal(
        "budget_exceeded",
        "LimitUnreadableError",
        f"the limit {limit_id!r} is not readable by this version of the plane; until it is, calls in its scope wait",
        to_do="update all services to one version, or set or delete the limit again",
        retry_after_s=RETRY_HELD_S,
        user_message="This agent's limits cannot be checked right now. Please try again in a minute.",
    )


TOO_MANY_NAMES = refusal(
    "budget_exceeded",
    "TooManyTenantsError",
    "the sender of this job has named too many tenants, users, teams or tags, and one of this job is new",
    figures=f"a sender may have {MAX_MADE_UP_SCOPES:,} scopes with such names in a period, and as many sliding "
    "windows; names that a limit names do not count",
    to_do="list the names in budgets.tenants or budgets.limits, or fix the program that makes them up",
    user_message="This agent does not accept requests for more customers at present. Please contact its owner.",
)


def over_budget(over: OverBudget, model: str, wait_s: float | None) -> ErrorInfo:
    """Builds the error of a call that a hard limit has no room for.

    The period ends in `wait_s` seconds; None if it never does.
    """
    counter = over.counter
    limit = _limit(over.counter)
    if over.limit == 0:
        return refusal(
            "budget_exceeded",
            "BudgetExceededError",
            f"{limit} admits no call that costs anything",
            figures="it is $0.00",
            to_do=f"raise the limit: {raise_cap(counter)}",
            user_message="This agent may not spend anything at present. Please contact its owner.",
        )
    amount, cap, remaining, reserved = _amounts(
        counter, over.amount, over.limit, max(0, over.limit - over.spent - over.reserved), over.reserved
    )
    is_money = counter.unit == "usd"
    verb = "cost" if is_money else "use"
    worst = f"a call to {model} may {verb} up to {amount}"
    if over.amount > over.limit:
        return refusal(
            "budget_exceeded",
            # The cap of a tenant, a key or a user does not make this agent unhealthy.
            "CallOverCapError" if counter.is_of_agent else "BudgetExceededError",
            f"a call to {model} may {verb} more than the whole of {limit}; no such call ever fits",
            figures=f"{worst}, and the limit is {cap}",
            to_do=f"lower `max_tokens`, or raise the limit: {raise_cap(counter)}",
            user_message=f"This request would {verb} more than this agent may{' spend' if is_money else ''}. "
            "Please make it shorter.",
        )
    reservations = f" ({reserved} {'is' if is_money else 'are'} reserved by calls in flight)" if over.reserved else ""
    resets = None if over.resets_at is None else moment(over.resets_at)
    return refusal(
        "budget_exceeded",
        "BudgetExceededError",
        f"{limit} has no room for a call to {model}; it {f'resets at {resets}' if resets else 'never resets'}",
        figures=f"it has {remaining} of {cap} left{reservations}, and {worst}",
        to_do=f"lower `max_tokens`{',' if resets else ' or'} raise the limit ({raise_cap(counter)})"
        f"{', or wait until it resets' if resets else ''}",
        retry_after_s=wait_s,
        user_message=f"This agent has reached its limit for now. It can be used again after {resets}."
        if resets
        else "This agent has reached its limit. Please contact its owner.",
    )


def budget_held(over: OverBudget, model: str) -> ErrorInfo:
    """Builds the error of a call for which reservations of other calls leave no room, and which can't wait for them."""
    limit = _limit(over.counter)
    amounts = (over.limit - over.spent, over.limit, over.reserved, over.amount)
    remaining, cap, reserved, amount = _amounts(over.counter, *amounts)
    verb = "cost" if over.counter.unit == "usd" else "use"
    reason = "calls in flight hold what is left of it"
    state = "is held by requests that are still running"
    if over.by_share:
        reason = "a caller holds at most half of what is left of it while others hold some of it or wait for it"
        state = "is shared with other requests at the moment"
    return refusal(
        "budget_exceeded",
        "BudgetHeldError",
        f"{limit} is not spent, but {reason}",
        figures=f"it has {remaining} of {cap} left, {reserved} of it held by calls in flight, "
        f"and a call to {model} may {verb} up to {amount}",
        to_do=f"try again, lower `max_tokens`, or raise the limit ({raise_cap(over.counter)})",
        retry_after_s=RETRY_HELD_S,
        user_message=f"What is left of this agent's limit {state}. Please try again soon.",
    )


def over_own_cap(agent: str, model: str, worst_case: int, spent: int, cap: int) -> ErrorInfo:
    """Builds the error of a call that the job's own limit has no room for. Amounts are in nano-dollars."""
    never_fits = not fits(worst_case, limit=cap, spent=0)
    setting = f"agents.{agent}.max_cost_usd"
    so_far, worst, limit = beyond(spent, worst_case, cap)
    return refusal(
        "budget_exceeded",
        "CallOverCapError" if never_fits else "BudgetExceededError",
        f"a call to {model} does not fit under the job's own limit (max_cost_usd)",
        figures=f"the job has cost {so_far}, a call to {model} may cost up to {worst}, and {setting} is {limit}",
        to_do=f"lower `max_tokens`, or raise {setting}",
        user_message="This request would cost too much for a single one. Please make it shorter or simpler.",
    )


def unpriced_model(model: str, cap: str, setting: str) -> ErrorInfo:
    """Builds the error of a call that can't be limited, because its model has no price."""
    return refusal(
        "budget_exceeded",
        "UnpricedModelError",
        f"{model} has no price, so {cap} cannot be enforced; set {setting}",
        user_message="This agent's limit on spend can't be enforced, as its model has no price. Please ask its owner.",
    )


def raise_cap(counter: Counter) -> str:
    """Returns the setting that raises a limit and the command, in words."""
    time = "some time" if counter.window == "total" else f"this {PERIODS[counter.window]}"
    return f"{counter.setting}, or for {time} `{raise_command(counter.name)}`"


def raise_command(budget: str) -> str:
    """Returns the command that raises the limit of a budget, by its name."""
    scope, _, window = budget.rpartition("/")
    unit = "usd"
    if window not in PERIODS:
        unit = window
        scope, _, window = scope.rpartition("/")
    place = f"{shlex.quote(scope_of(parts_of(key_from_text(scope))))} --per {PERIODS[window]}"
    until = " --until WHEN" if window == "total" else ""
    return f"breakwater limits raise {place} --to {unit.upper()}{until} --reason WHY"


def _limit(counter: Counter) -> str:
    unit = "spend" if counter.unit == "usd" else counter.unit
    period = "in total" if counter.window == "total" else f"per {PERIODS[counter.window]}"
    return f"the limit of {scope_in_words(counter.key)} on {unit} {period}"


def _amounts(counter: Counter, *amounts: int) -> Sequence[str]:
    """Returns amounts of a budget with their unit."""
    if counter.unit == "usd":
        return moneys(*amounts)
    return [f"{amount:,} {counter.unit.removesuffix('s') if amount == 1 else counter.unit}" for amount in amounts]


# Tasks

_TASK_RULES: dict[GuardRule, str] = {
    "max_iterations": "it has reached its limit of iterations",
    "max_tokens": "it has used all its tokens",
    "max_cost": "its money is used up, or too little for another call",
    "consecutive_failures": "its jobs fail one after the other",
    "same_error": "its jobs fail with the same error",
    "confidence_drift": "its answers are less and less sure, or not sure enough",
}


_AGENT_RUN = f" (`preset: agent-run` allows {GUARD_PRESETS['agent-run']['max_iterations']})"


def task_stopped(
    rule: GuardRule,
    reason: str,
    *,
    agent: str,
    task_id: str,
    task_key: str,
    tenant: str | None,
    execution_id: str | None,
) -> ErrorInfo:
    """Builds the error of a call whose task was stopped by a guard.

    Args:
        rule: the rule that tripped.
        reason: the reason, with figures.
        agent: the agent of the job that tripped the guard.
        task_id: the task, as its caller named it.
        task_key: the task, as the plane knows it.
        tenant: the task's tenant.
        execution_id: the job that tripped the guard; its id is also the task's key if the job names no task.
    """
    of_tenant = "" if tenant is None else f" of tenant {tenant}"
    setting = _guard_setting(agent, rule)
    reset = command("guards", "reset", task_key, tenant=tenant)
    if task_key == execution_id:
        message = f"the guard of agent {agent} admits no further call of this job ({rule}: {_TASK_RULES[rule]})"
        to_do = f"make the job smaller, or raise {setting}, and replay its dead letter; `{reset}` resolves the alert"
    else:
        message = (
            f"task {task_id}{of_tenant} is stopped by the guard of agent {agent} ({rule}: {_TASK_RULES[rule]}) "
            "until an operator resets it; other work needs another task_id"
        )
        to_do = f"look at its last executions; `{reset}` resumes it, and {setting} sets the limit"
        if rule == "max_iterations":
            to_do += _AGENT_RUN
    return refusal("guard_tripped", "GuardTrippedError", message, figures=reason, to_do=to_do)


def task_near_cap(rule: GuardRule, reason: str, *, agent: str, task_id: str, tenant: str | None) -> str:
    """Says, for operators, that a task has used 80 % of a limit of its guard. Arguments as in `task_stopped`."""
    of_tenant = "" if tenant is None else f" of tenant {tenant}"
    return (
        f"Task {task_id}{of_tenant} has used at least {SOFT_PERCENT} % of {rule} of the guard of agent {agent}: "
        f"{reason}. At the limit its jobs are refused. To do: check whether it loops; if it needs more, raise "
        f"{_guard_setting(agent, rule)}{_AGENT_RUN if rule == 'max_iterations' else ''}."
    )


def task_budget_held(agent: str, *, used: int = 0, worst_case: int = 0, cap: int | None = None) -> ErrorInfo:
    """Builds the error of a call for which other jobs hold the rest of the task's cost limit, and which can't wait.

    Args:
        agent: the job's agent.
        used: nano-dollars that the task has spent, or that its other jobs reserve.
        worst_case: the most that the call may cost, in nano-dollars.
        cap: the task's limit, in nano-dollars; None if it is not known yet.
    """
    figures = ""
    if cap is not None:
        spent, worst, limit = beyond(used, worst_case, cap)
        figures = f"{spent} of {limit} is spent or held, and the call may cost up to {worst}"
    return refusal(
        "budget_exceeded",
        "BudgetHeldError",
        "other jobs of the task hold what is left of its cost limit",
        figures=figures,
        to_do=f"try again when they have ended, lower `max_tokens`, or raise {_guard_setting(agent, 'max_cost')}",
        retry_after_s=RETRY_HELD_S,
        user_message="This task has nothing left to spend while its other jobs are running. Please try again later.",
    )


def _guard_setting(agent: str, rule: GuardRule) -> str:
    name = {"max_cost": "max_cost_usd", "confidence_drift": "confidence"}.get(rule, rule)
    return f"agents.{agent}.guard.{name}"


# Retries


def retry_budget_spent(model: str) -> ErrorInfo:
    """Builds the error of a retry that the fleet's retry budget has no room for."""
    return refusal(
        "retry_budget",
        "RetryBudgetExceededError",
        f"too many calls to {model} are retries already, so this one is not repeated",
        to_do=f"find why calls to it fail: `{command('executions', None, since='1h')}`",
        user_message="This agent is temporarily unavailable because of recent failures. Please try again later.",
    )


# Limits on rates


def over_rate_limit(over: OverRate, owner: str) -> ErrorInfo:
    """Builds the error of a call that a limit on a rate has no room for.

    Args:
        over: the refusal.
        owner: the scope of the limit as a part of a sentence, such as `agent writer`.
    """
    limit = over.limit
    quantity = "dollars" if limit.unit == "usd" else limit.unit
    measure = "concurrent calls" if limit.window is None else f"{quantity} per {limit.window.removeprefix('rolling ')}"
    amount = money(limit.amount) if limit.unit == "usd" else f"{limit.amount:,}"
    wait_s = None if over.wait_ms is None else over.wait_ms / 1000
    if wait_s is not None and limit.unit == "concurrent":
        wait_s = min(wait_s, RETRY_HELD_S)  # a call mostly ends long before its lease
    later = "; the call alone is above it" if wait_s is None else f"; try again in {wait_s:.0f} s"
    of_limit = ((state.remaining, state.scope, state.unit, state.limit) for state in over.windows)
    remaining = next(
        (remaining for remaining, *place in of_limit if place == [over.key, limit.unit, limit.amount]), None
    )
    return refusal(
        "rate_limit",
        "RateLimitExceededError",
        f"the limit of {owner} on {measure} has no room for this call{later}",
        figures=f"it is {amount} {measure}"
        + ("" if remaining is None else f", of which {max(0, remaining):,} are left"),
        to_do=f"{'lower `max_tokens`' if wait_s is None else 'wait'}, or raise {limit.in_words}{_for_some_time(over)}",
        retry_after_s=wait_s,
        user_message=_TOO_MANY,
    )


def _for_some_time(over: OverRate) -> str:
    """Returns the command that raises a limit on a rate, in words; empty for one on tasks, which has none."""
    if "task" in over.limit.kinds:
        return ""
    scope = "" if over.limit.is_named else f" --scope {shlex.quote(scope_of(parts_of(over.key)))}"
    place = f"{shlex.quote(over.limit.id)}{scope}"
    return f", or for some time `breakwater limits raise {place} --to AMOUNT --until WHEN --reason WHY`"


def frees_rate(limit: Limit) -> str:
    """Returns the event that makes room under a limit on a rate, in words."""
    if limit.window is None:
        return "the end of a call in progress"
    window = limit.window.removeprefix("rolling ")
    if limit.unit == "requests":
        return f"each call that began a {window} ago"
    return f"each call that began a {window} ago, or ends with less than it has reserved"


def model_held(agent: str, model: str, rest_s: float) -> ErrorInfo:
    """Builds the error of a call to a model that a provider's rate limit holds for the whole fleet."""
    reset = command("breakers", "reset", agent, model)
    return refusal(
        "rate_limit",
        HELD,
        f"{model} is held until its provider's rate limit is over",
        figures=f"that is in {rest_s:.0f} s",
        to_do=f"wait, or ask the provider for a higher limit; `{reset}` ends the hold",
        retry_after_s=rest_s,
        user_message=_TOO_MANY,
    )
