"""Before a call: the breaker admits, the budget reserves and the checkpoint is written, in one round trip to Redis."""

from __future__ import annotations

from dataclasses import dataclass

from breakwater.config import Agent
from breakwater.contracts import subjects
from breakwater.contracts.events import BreakerTransition
from breakwater.contracts.execution import ErrorInfo, Reason
from breakwater.contracts.types import format_time, time_from_ms
from breakwater.state.breakers import Admitted, BreakerKey, Refused
from breakwater.state.budgets import OverBudget
from breakwater.state.executions import Holder
from services.worker.plane import Plane

LEASE_MARGIN_S = 120.0
"""How much longer than its call a reservation or a probe is held: enough for a redelivery to record a lost attempt."""


class ClaimLost(Exception):  # noqa: N818  not an error: another worker goes on
    """Another delivery of the job has taken over; this one must stop without a trace."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The call may be made."""

    probe: bool


@dataclass(frozen=True, slots=True)
class Denial:
    """The call must not be made."""

    reason: Reason
    error: ErrorInfo
    refused_by: str | None = None
    """The budget that has no room, by its name."""


async def admit(
    plane: Plane,
    *,
    holder: Holder,
    checkpoint: str,
    attempt_id: str,
    agent_name: str,
    agent: Agent,
    model: str,
    worst_case: int | None,
    timeout_s: float,
    first_try: bool,
) -> Grant | Denial:
    """Asks whether an attempt may call.

    Args:
        plane: of this process.
        holder: who holds the job.
        checkpoint: saved in the same round trip.
        attempt_id: what the reservation and the probe are held for.
        agent_name: who calls.
        agent: its settings.
        model: to call.
        worst_case: the most that the call can cost in nano-dollars; None where its model has no price.
        timeout_s: how long the call may take.
        first_try: it is the first of its job on this model, and earns retries for the fleet.

    Raises:
        ClaimLost: the job is no longer ours.
        StateUnavailable: ask again.
    """
    counters = plane.counters(agent_name, agent)
    if worst_case is None and any(counter.hard_limit is not None for counter in counters):
        return _unpriced(plane, agent, model)
    now = plane.now()
    lease_ms = round((timeout_s + LEASE_MARGIN_S) * 1000)
    key = BreakerKey(agent_name, model)
    calls = [
        plane.executions.checkpoint_call(holder, checkpoint, lease_ms=lease_ms),
        plane.budgets.reserve_call(attempt_id, agent_name, worst_case or 0, counters, now=now, lease_ms=lease_ms),
    ]
    if agent.breaker is not None:
        calls.append(plane.breakers.admit_call(key, attempt_id, lease_ms))
    if first_try and (earns := plane.retry_budgets.first_try_call(model)) is not None:
        calls.append(earns)
    ours, reserved, *rest = await plane.redis.run(calls)
    breaker = rest[:1] if agent.breaker is not None else []
    over = plane.budgets.reserved(reserved, counters)
    admission = plane.breakers.admission(breaker[0]) if breaker else Admitted(False, 0, False)
    if isinstance(admission, Admitted) and admission.became_half_open:
        await _tell_half_open(plane, agent_name, agent, model, admission.version)
    granted = over is None and isinstance(admission, Admitted)
    if not ours:
        # Nothing is given back: whoever has taken the job over may hold it for the same attempt.
        raise ClaimLost(holder.execution_id)
    if not granted:
        if first_try and (taken_back := plane.retry_budgets.first_try_call(model, -1)) is not None:
            await plane.redis.run([taken_back])
        if over is None:
            await plane.budgets.release(attempt_id, counters, now=now)
        if isinstance(admission, Admitted) and admission.probe:
            await plane.breakers.return_probe(key, attempt_id)
    if isinstance(admission, Refused):
        return _breaker_open(model, admission)
    return Grant(admission.probe) if over is None else _over_budget(over)


def _breaker_open(model: str, refused: Refused) -> Denial:
    until = format_time(time_from_ms(refused.until_ms))
    return Denial(
        "breaker_open",
        ErrorInfo(
            kind="breaker_open",
            class_="CircuitBreakerOpenError",
            message=f"the breaker for {model} is open until {until}; no call was made",
            user_message="This agent is temporarily unavailable because of recent failures. Please try again later.",
        ),
    )


def _over_budget(over: OverBudget) -> Denial:
    resets = format_time(time_from_ms(over.resets_at_ms))
    who = "all agents" if over.counter.agent is None else f"agent {over.counter.agent}"
    return Denial(
        "budget_exceeded",
        ErrorInfo(
            kind="budget_exceeded",
            class_="BudgetExceededError",
            message=f"the {over.counter.window} budget of {who} has no room for this call; it resets at {resets}",
            user_message=f"This agent has used up its budget for now. It can be used again after {resets}.",
        ),
        over.counter.name,
    )


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


def _unpriced(plane: Plane, agent: Agent, model: str) -> Denial:
    provider = plane.config.provider_name(agent, model)
    local = plane.config.is_local(provider)
    setting = f"providers.{provider}.cost_per_call_usd" if local else f"models.{model}.price"
    return Denial(
        "budget_exceeded",
        ErrorInfo(
            kind="budget_exceeded",
            class_="UnpricedModelError",
            message=f"{model} has no price, so a hard budget cannot hold it; set {setting}",
            user_message="This agent's model has no price set, so its budget can't be held. Please tell its owner.",
        ),
    )


async def _tell_half_open(plane: Plane, agent_name: str, agent: Agent, model: str, version: int) -> None:
    assert agent.breaker is not None
    at = plane.now()
    transition = BreakerTransition(
        transition_id=f"{BreakerKey(agent_name, model).name}#{version}",
        agent=agent_name,
        model=model,
        from_state="open",
        to_state="half_open",
        reason="the cool-down is over; one probe may call",
        consecutive_failures=0,
        errors=0,
        cooldown_s=agent.breaker.cooldown_s,
        version=version,
        at=at,
    )
    subject = subjects.breaker(agent_name, model)
    await plane.patience.nats(lambda: plane.publisher.event(subject, transition, id=transition.transition_id, at=at))
