"""Before a call: guard, breaker, budget and rate limits admit it and the checkpoint is written, in one round trip.

What one of them grants and another one refuses is given back, in a second round trip.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from breakwater.contracts import subjects
from breakwater.contracts.execution import Attempt
from breakwater.policy.breaker_rules import BreakerKey
from breakwater.policy.guard import TaskBudgetHeld
from breakwater.policy.transitions import half_opened
from breakwater.state.breakers import BreakerAdmitted, BreakerRefused
from breakwater.state.budgets import CountersLost, OverBudget, PeriodChanged, Reserved
from breakwater.state.connection import ScriptCall
from breakwater.state.rate_limits import Limited
from services.worker.assignment import Assignment
from services.worker.denials import (
    POLL_S,
    REBUILDING,
    REBUILDING_POLL_S,
    TASK_CROWDED,
    TASK_STOPPED,
    Denial,
    Wait,
    breaker_open,
    held_to_limit,
    over_budget,
    over_own_cap,
    unpriced,
)
from services.worker.plane import Plane
from services.worker.task_guard import TaskGuard

LEASE_MARGIN_S = 120.0
"""How much longer than its call a reservation or a probe is held: enough for a redelivery to record a lost attempt."""

NO_BREAKER = BreakerAdmitted(probe=False, version=0, became_half_open=False)


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


async def admit(plane: Plane, job: Assignment, guard: TaskGuard | None, question: Question) -> Grant | Denial | Wait:
    """Asks whether an attempt may call.

    Raises:
        ClaimLost: the job is no longer ours.
        StateUnavailable: ask again.
    """
    if (denial := over_own_cap(plane, job, question.model, question.worst_case, question.attempts)) is not None:
        return denial
    agent_name, tenant = job.agent_name, job.job.tenant
    counters = plane.caps().counters(agent_name, tenant)
    if question.worst_case is None and any(counter.hard_limit is not None for counter in counters):
        return unpriced(plane, job, question.model)
    rules = job.agent.breaker
    key = None if rules is None else BreakerKey.of(rules.scope, job.agent_name, question.model, question.provider)
    limits = plane.limits(job.agent_name, job.agent, question.model)
    earns = plane.retry_budgets.first_try_call(question.model) if question.first_try else None
    attempt_id, lease_ms, now = question.attempt_id, lease_ms_of(question.timeout_s), plane.now()
    amount = question.worst_case or 0
    answers = await _ask(
        plane,
        ours=plane.executions.checkpoint_call(job.claim, question.checkpoint, lease_ms=lease_ms),
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
    half_opened_now = isinstance(breaker, BreakerAdmitted) and breaker.became_half_open
    if not answers["ours"]:
        # Nothing is given back: whoever has taken the job over may hold it for the same attempt.
        if key is not None and half_opened_now:
            await _tell_half_open(plane, job, key)
        raise ClaimLost(job.execution_id)
    judged = None if guard is None else guard.judge(answers["task"], question.attempts, question.worst_case)
    stopped = None if isinstance(judged, TaskBudgetHeld) else judged
    refused: Denial | Wait | None = None
    if stopped is not None:
        refused = TASK_STOPPED
    elif isinstance(breaker, BreakerRefused):
        refused = breaker_open(plane, question.model, breaker, rules)
    elif isinstance(reserved, OverBudget):
        refused = over_budget(plane, reserved, question.model)
    elif isinstance(reserved, CountersLost):
        refused = Wait(REBUILDING_POLL_S * (1 + plane.jitter()), REBUILDING)
    elif isinstance(reserved, PeriodChanged):
        refused = Wait(0.0, REBUILDING)  # midnight: the day is known now, so ask at once
    elif isinstance(judged, TaskBudgetHeld):
        refused = Wait(POLL_S * (1 + plane.jitter()), TASK_CROWDED)
    elif over_limit is not None:
        refused = await held_to_limit(plane, over_limit, limits)
    if refused is not None:
        back = [plane.executions.checkpoint_call(job.claim, question.at_rest(), lease_ms=lease_ms)]
        if guard is not None:
            back.append(guard.let_go(question.attempts))
        if isinstance(reserved, Reserved):
            back.append(plane.budgets.release_call(attempt_id, agent_name, tenant, reserved.at))
        if key is not None and isinstance(breaker, BreakerAdmitted) and breaker.probe:
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
        isinstance(breaker, BreakerAdmitted) and breaker.probe,
        breaker.version if key is not None and isinstance(breaker, BreakerAdmitted) else None,
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


async def _tell_half_open(plane: Plane, job: Assignment, key: BreakerKey) -> None:
    assert job.agent.breaker is not None
    [loaded] = await plane.breakers.load([key])
    if loaded.breaker.state != "half_open":
        return  # somebody forced it open or reset it meanwhile, which has been told
    told = half_opened(key, loaded.breaker, job.agent.breaker, loaded.now_ms)
    subject = subjects.breaker(key.agent, key.model)
    await plane.outages.retry_while_unavailable(
        lambda: plane.publisher.event(subject, told, id=told.transition_id, at=told.at)
    )
