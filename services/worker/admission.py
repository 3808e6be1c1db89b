"""Before a call: guard, breaker, budget and rate limits admit it and the checkpoint is written, in one round trip.

What one of them grants and another one refuses is given back, in a second round trip.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from breakwater.contracts import subjects
from breakwater.contracts.execution import Attempt, ErrorInfo, Reason
from breakwater.contracts.types import format_time, time_from_ms
from breakwater.policy.alerts import money_text
from breakwater.policy.breaker_rules import BreakerKey, BreakerRules
from breakwater.policy.caps import fits, spent_by
from breakwater.policy.guard import Crowded
from breakwater.policy.transitions import half_opened
from breakwater.state.breakers import Admitted, Refused
from breakwater.state.budgets import Elsewhen, OverBudget, Reserved, Unfilled
from breakwater.state.connection import ScriptCall
from breakwater.state.rate_limits import Limited, OverLimit
from services.worker.assignment import Assignment
from services.worker.plane import Plane
from services.worker.task_guard import TaskGuard

BY_EXECUTION = "execution"
"""Names the cap of the job itself, as what refused a call."""

LEASE_MARGIN_S = 120.0
"""How much longer than its call a reservation or a probe is held: enough for a redelivery to record a lost attempt."""

REBUILDING_POLL_S = 0.5
"""How often at most it is asked again whether the budgets are rebuilt; up to as much again is added at random."""

POLL_S = 0.25
"""How often at most it is asked again whether fewer calls are under way; up to as much again is added at random."""

NO_BREAKER = Admitted(probe=False, version=0, became_half_open=False)


class ClaimLost(Exception):  # noqa: N818  not an error: another worker goes on
    """Another delivery of the job has taken over; this one must stop without a trace."""


@dataclass(frozen=True, slots=True)
class Question:
    """A call that is to be made."""

    attempt_id: str
    """What the reservation, the probe and the turn are held for."""
    model: str
    provider: str
    checkpoint: str
    """Saved in the same round trip: the call may be under way."""
    at_rest: Callable[[], str]
    """Gives the checkpoint for when it is refused: after a crash nobody must think that it was made."""
    worst_case: int | None
    """The most that it can cost in nano-dollars; None where its model has no price."""
    worst_tokens: int
    """The most tokens that it can use, input and output."""
    timeout_s: float
    first_try: bool
    """The first of its job on this model: it earns retries for the fleet."""
    attempts: Sequence[Attempt]
    """Of the job so far."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The call may be made."""

    probe: bool
    breaker_version: int | None
    reserved_at: datetime
    """By Redis' clock: its day and month are those of the call."""
    limits: tuple[Limited, ...]
    """Whose turn the call has: to be settled when it has ended."""


@dataclass(frozen=True, slots=True)
class Denial:
    """The call must not be made."""

    reason: Reason
    error: ErrorInfo
    refused_by: str | None = None
    """The budget or the limit that has no room, by its name."""
    final: bool = False
    """No other model is to be tried."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The call may be asked for again after a while: there are too many just now."""

    delay_s: float
    denial: Denial
    """What it is refused with where there is no time to wait."""


async def admit(plane: Plane, job: Assignment, guard: TaskGuard | None, question: Question) -> Grant | Denial | Wait:
    """Asks whether an attempt may call.

    Raises:
        ClaimLost: the job is no longer ours.
        StateUnavailable: ask again.
    """
    if (over_own_cap := _over_own_cap(plane, job, question)) is not None:
        return over_own_cap
    agent_name, tenant = job.agent_name, job.job.tenant
    counters = plane.caps().counters(agent_name, tenant)
    if question.worst_case is None and any(counter.hard_limit is not None for counter in counters):
        return _unpriced(plane, job, question.model)
    rules = job.agent.breaker
    key = None if rules is None else BreakerKey.of(rules.scope, job.agent_name, question.model, question.provider)
    limits = plane.limits(job.agent_name, job.agent, question.model)
    earns = plane.retry_budgets.first_try_call(question.model) if question.first_try else None
    attempt_id, lease_ms, now = question.attempt_id, lease_ms_of(question.timeout_s), plane.now()
    amount = question.worst_case or 0
    answers = await _ask(
        plane,
        ours=plane.executions.checkpoint_call(job.holder, question.checkpoint, lease_ms=lease_ms),
        reserved=plane.budgets.reserve_call(
            attempt_id, agent_name, tenant, amount, counters, now=now, lease_ms=lease_ms
        ),
        breaker=None if key is None else plane.breakers.admit_call(key, attempt_id, lease_ms),
        turn=plane.rate_limits.admit_call(attempt_id, limits, question.worst_tokens, lease_ms) if limits else None,
        task=None if guard is None else guard.ask(question.attempts, question.worst_case),
        earned=earns,
    )
    reserved = plane.budgets.reserved(answers["reserved"], counters, amount, now=now)
    breaker = NO_BREAKER if key is None else plane.breakers.admission(answers["breaker"])
    over_limit = plane.rate_limits.admitted(answers["turn"], limits) if limits else None
    half_opened_now = isinstance(breaker, Admitted) and breaker.became_half_open
    if not answers["ours"]:
        # Nothing is given back: whoever has taken the job over may hold it for the same attempt.
        if key is not None and half_opened_now:
            await _tell_half_open(plane, job, key)
        raise ClaimLost(job.execution_id)
    judged = None if guard is None else guard.judge(answers["task"], question.attempts, question.worst_case)
    stopped = None if isinstance(judged, Crowded) else judged
    refused: Denial | Wait | None = None
    if stopped is not None:
        refused = TASK_STOPPED
    elif isinstance(breaker, Refused):
        refused = _breaker_open(plane, question.model, breaker, rules)
    elif isinstance(reserved, OverBudget):
        refused = _over_budget(plane, reserved, question.model)
    elif isinstance(reserved, Unfilled):
        refused = Wait(REBUILDING_POLL_S * (1 + plane.jitter()), REBUILDING)
    elif isinstance(reserved, Elsewhen):
        refused = Wait(0.0, REBUILDING)  # midnight: the day is known now, so ask at once
    elif isinstance(judged, Crowded):
        refused = Wait(POLL_S * (1 + plane.jitter()), TASK_CROWDED)
    elif over_limit is not None:
        refused = await _over_limit(plane, over_limit, limits)
    if refused is not None:
        back = [plane.executions.checkpoint_call(job.holder, question.at_rest(), lease_ms=lease_ms)]
        if guard is not None:
            back.append(guard.let_go(question.attempts))
        if isinstance(reserved, Reserved):
            back.append(plane.budgets.release_call(attempt_id, agent_name, tenant, reserved.at))
        if key is not None and isinstance(breaker, Admitted) and breaker.probe:
            back.append(plane.breakers.return_probe_call(key, attempt_id))
        if limits and over_limit is None:
            back.append(plane.rate_limits.release_call(attempt_id, limits))
        if earns is not None and (taken_back := plane.retry_budgets.first_try_call(question.model, -1)) is not None:
            back.append(taken_back)
        await plane.redis.run(back)
    # Told only now: it may take as long as NATS is away, and a call that is not made must hold nothing meanwhile.
    if key is not None and half_opened_now:
        await _tell_half_open(plane, job, key)
    if guard is not None and stopped is not None:
        await guard.stop(stopped)
    if refused is not None:
        return refused
    assert isinstance(reserved, Reserved)
    if plane.now() - now > timedelta(seconds=LEASE_MARGIN_S / 2):
        # What was granted may have lapsed while it was told, and somebody else be probing.
        return await admit(plane, job, guard, question)
    return Grant(
        isinstance(breaker, Admitted) and breaker.probe,
        breaker.version if key is not None and isinstance(breaker, Admitted) else None,
        reserved.at,
        limits,
    )


def lease_ms_of(timeout_s: float) -> int:
    """How long what a call holds is held, by how long the call may take."""
    return round((timeout_s + LEASE_MARGIN_S) * 1000)


async def _ask(plane: Plane, **calls: ScriptCall | None) -> dict[str, Any]:
    """Runs those of the calls that there are, in one round trip, and gives their answers by name."""
    asked = {name: call for name, call in calls.items() if call is not None}
    return dict(zip(asked, await plane.redis.run(list(asked.values())), strict=True))


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


def _over_own_cap(plane: Plane, job: Assignment, question: Question) -> Denial | None:
    """Why a job's own cap refuses a call. One worker runs a job at a time, so its attempts say what counts."""
    cap = job.agent.max_cost_usd
    if cap is None:
        return None
    if question.worst_case is None:
        return _unpriced(plane, job, question.model, "max_cost_usd", BY_EXECUTION)
    spent = spent_by(question.attempts)
    if fits(question.worst_case, limit=cap, spent=spent):
        return None
    next_call = f"a call to {question.model} may cost up to {money_text(question.worst_case)}"
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


def _breaker_open(plane: Plane, model: str, refused: Refused, rules: BreakerRules | None) -> Denial:
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


def _over_budget(plane: Plane, over: OverBudget, model: str) -> Denial:
    counter, resets = over.counter, format_time(time_from_ms(over.resets_at_ms))
    who = "all agents" if counter.of is None else f"{counter.scope} {counter.of}"
    what = f"the {counter.window} budget of {who}"
    worst = f"a call to {model} may cost up to {money_text(over.amount)}"
    left = max(0, over.limit - over.spent - over.reserved)
    if over.amount > over.limit:
        message = f"{worst}, and {what} is {money_text(over.limit)} in all; no such call ever fits"
        user_message, wait_s = "This request would cost more than this agent may spend. Please make it shorter.", None
    else:
        message = f"{what} has {money_text(left)} of {money_text(over.limit)} left, and {worst}; it resets at {resets}"
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
        final=counter.caps.on_exceeded == "fail",
    )


async def _over_limit(plane: Plane, over: OverLimit, limits: Sequence[Limited]) -> Denial | Wait:
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


def _unpriced(
    plane: Plane, job: Assignment, model: str, cap: str = "a hard budget", refused_by: str | None = None
) -> Denial:
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


async def _tell_half_open(plane: Plane, job: Assignment, key: BreakerKey) -> None:
    assert job.agent.breaker is not None
    [loaded] = await plane.breakers.load([key])
    if loaded.breaker.state != "half_open":
        return  # somebody forced it open or reset it meanwhile, which has been told
    told = half_opened(key, loaded.breaker, job.agent.breaker, loaded.now_ms)
    subject = subjects.breaker(key.agent, key.model)
    await plane.patience.nats(lambda: plane.publisher.event(subject, told, id=told.transition_id, at=told.at))
