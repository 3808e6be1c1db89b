"""Which events people must know of, and in which words. One incident makes one alert.

A breaker's incident begins when it opens, by a rule or by hand, and ends when it closes; what happens in between
(half-open, a probe that fails, a person who isolates it) is the same incident and says nothing new. A task's incident
begins when its guard stops it. A budget's incident is one threshold in one period.

The texts are for the people who look after the plane: reasons have their figures and limits.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Collection
from datetime import UTC, datetime
from decimal import ROUND_DOWN, Decimal

from breakwater.contracts.events import (
    Alert,
    AlertEvent,
    BreakerTransition,
    BudgetEvent,
    Enforcement,
    GuardEvent,
    Severity,
)
from breakwater.contracts.types import NANO_PER_USD, format_time, usd_from_nano

_SEVERITY: dict[AlertEvent, Severity] = {
    "breaker_open": "critical",
    "breaker_closed": "info",
    "budget_soft_cap": "warning",
    "budget_hard_cap": "critical",
    "guard_tripped": "critical",
}
_CONSEQUENCE: dict[tuple[AlertEvent, Enforcement], str] = {
    ("budget_soft_cap", "hard"): "Calls that might pass the cap will be refused.",
    ("budget_hard_cap", "hard"): "Calls that do not fit are refused until the period ends or the cap is raised.",
}
_NOT_ENFORCED = "The cap is not enforced: calls go on."


def alert_for(event: BreakerTransition | GuardEvent | BudgetEvent, on_events: Collection[AlertEvent]) -> Alert | None:
    """The alert that an event calls for.

    Args:
        event: what happened.
        on_events: the kinds of alert that people want.

    Returns:
        None where the event says nothing new, or nothing that people want to be told. The same event always makes
        the same alert, with the same `alert_id`.
    """
    match event:
        case BreakerTransition():
            alert = _of_breaker(event)
        case GuardEvent():
            alert = _of_guard(event)
        case BudgetEvent():
            alert = _of_budget(event)
    return alert if alert is not None and alert.event in on_events else None


def alert_id(event: AlertEvent, source_id: str) -> str:
    """The identity of an alert: stable for the event that caused it, and plain ASCII without dots.

    The ids of events hold names in any script; this one goes into HTTP headers and signatures.
    """
    return "alert_" + hashlib.sha256(f"{event}\n{source_id}".encode()).hexdigest()[:32]


def _of_breaker(event: BreakerTransition) -> Alert | None:
    if event.from_state == "closed" and event.to_state in {"open", "isolated"}:
        kind, title, text = "breaker_open", "Breaker open", _opened(event)
    elif event.from_state != "closed" and event.to_state == "closed":
        kind, title, text = "breaker_closed", "Breaker closed", _closed(event)
    else:
        return None
    return Alert(
        alert_id=alert_id(kind, event.transition_id),
        event=kind,
        severity=_SEVERITY[kind],
        agent=event.agent,
        model=event.model,
        title=f"{title}: {_agents(event)} on {_models(event)}",
        text=text,
        payload={
            "agent": event.agent,
            "model_id": event.model,
            "errors": event.errors,
            "within": event.within_s,
            "cooldown": event.cooldown_s,
            "timestamp": format_time(event.at),
            "reason": event.reason,
            "consecutive_failures": event.consecutive_failures,
            "total_failures": event.total_failures,
            "unique_errors": event.unique_errors,
            "open_until": None if event.open_until is None else format_time(event.open_until),
            "scope": event.scope,
            "by": event.by,
        },
        source_id=event.transition_id,
        at=event.at,
    )


def _opened(event: BreakerTransition) -> str:
    shared = event.scope != "agent_model"
    if event.to_state == "isolated":
        command = _command("breakers", "reset", event.agent, event.model)
        until, advice = " It stays so until somebody resets it.", f"`{command}` once calls may go on"
    else:
        until = "" if event.open_until is None else f" One probe call is let through after {_moment(event.open_until)}."
        failed = "the agents' latest failed attempts" if shared else "the agent's latest failed attempts"
        advice = f"look at {failed} and at the provider's status page"
    return (
        f"{_sentence(event.reason)} Since {_moment(event.at)} no call of {_callers(event)} goes to {_models(event)}; "
        f"{'their' if shared else 'its'} jobs use the fallback models, or fail where there are none.{until} "
        f"To do: {advice}."
    )


def _closed(event: BreakerTransition) -> str:
    return (
        f"{_sentence(event.reason)} Since {_moment(event.at)} calls of {_callers(event)} go to {_models(event)} again. "
        "Nothing to do."
    )


def _agents(event: BreakerTransition) -> str:
    return event.agent if event.scope == "agent_model" else "all agents"


def _callers(event: BreakerTransition) -> str:
    # An agent may have a breaker of its own, or none, while others share one.
    return event.agent if event.scope == "agent_model" else "the agents that share this breaker"


def _models(event: BreakerTransition) -> str:
    return f"provider {event.model.removesuffix('/*')}" if event.scope == "provider" else event.model


def _of_guard(event: GuardEvent) -> Alert | None:
    if event.kind != "tripped":
        return None
    return Alert(
        alert_id=alert_id("guard_tripped", event.event_id),
        event="guard_tripped",
        severity=_SEVERITY["guard_tripped"],
        agent=event.agent,
        title=f"Task stopped: {event.task_id} of {event.agent}",
        text=_stopped(event),
        payload={
            "agent": event.agent,
            "task_id": event.task_id,
            "tenant": event.tenant,
            "execution_id": event.execution_id,
            "rule": event.rule,
            "reason": event.reason,
            "iterations": event.iterations,
            "tokens": event.tokens,
            "cost": usd_from_nano(event.cost),
            "status": "pending",
            "timestamp": format_time(event.at),
        },
        source_id=event.event_id,
        at=event.at,
    )


def _stopped(event: GuardEvent) -> str:
    tenant = "" if event.tenant is None else f" of tenant {event.tenant}"
    reset = _command("guards", "reset", event.task_id, tenant=event.tenant)
    iterations = f"{event.iterations:,} iteration{'' if event.iterations == 1 else 's'}"
    return (
        f"{_sentence(event.reason)} Since {_moment(event.at)} task {event.task_id}{tenant} makes no calls, "
        f"and its jobs fail; so far {iterations}, {event.tokens:,} tokens, {money_text(event.cost)}. "
        f"To do: look at the task's last executions; `{reset}` lets it go on."
    )


def _command(group: str, action: str, *names: str, **options: str | None) -> str:
    # People paste it into a shell, and programs choose names: each is quoted, and none is read as an option.
    given = [f"--{option}={value}" for option, value in options.items() if value is not None]
    end = ["--"] if any(name.startswith("-") for name in names) else []
    return shlex.join(["breakwater", group, action, *given, *end, *names])


def _of_budget(event: BudgetEvent) -> Alert | None:
    if event.kind not in {"soft_cap", "hard_cap"} or event.limit is None:
        return None
    kind: AlertEvent = "budget_hard_cap" if event.kind == "hard_cap" else "budget_soft_cap"
    who = _whose(event)
    what = f"Budget at {event.threshold_percent} %"
    if event.threshold_percent == 100:
        # A hard cap refuses what does not fit before it is spent.
        what = "Budget refuses calls" if kind == "budget_hard_cap" and event.total < event.limit else "Budget used up"
    return Alert(
        alert_id=alert_id(kind, event.event_id),
        event=kind,
        severity=_SEVERITY[kind],
        agent=event.agent if event.scope == "agent" else None,
        title=f"{what}: {who}, {event.window}",
        text=_spent(event, kind, who, event.limit),
        payload={
            "scope": event.scope,
            "limit": usd_from_nano(event.limit),
            "total": usd_from_nano(event.total),
            "window": event.window,
            "agent": event.agent,
            "tenant": event.tenant,
            "period": event.period,
            "threshold_percent": event.threshold_percent,
            "enforcement": event.enforcement,
            "resets_at": None if event.resets_at is None else format_time(event.resets_at),
            "timestamp": format_time(event.at),
        },
        source_id=event.event_id,
        at=event.at,
    )


def _whose(event: BudgetEvent) -> str:
    match event.scope:
        case "global":
            return "all agents"
        case "tenant":
            return f"tenant {event.tenant}"
        case "agent":
            return str(event.agent)


def _spent(event: BudgetEvent, kind: AlertEvent, who: str, limit: int) -> str:
    share = f" ({event.total * 100 // limit} %)" if limit else ""
    consequence = _CONSEQUENCE.get((kind, event.enforcement), _NOT_ENFORCED)
    advice = "check whether this is expected"
    if kind == "budget_hard_cap":
        names = {"global": "global", "agent": f"agent:{event.agent}", "tenant": f"tenant:{event.tenant}"}
        budget = f"{names[event.scope]}/{event.window}"
        advice = (
            f"find what spends, or raise the cap: `breakwater budgets raise {shlex.quote(budget)} USD --reason WHY`"
        )
    last = "" if event.agent is None or event.scope == "agent" else f", last by agent {event.agent}"
    return (
        f"{money_text(event.total)} of {money_text(limit)}{share} spent by {who} in {event.period}{last}, "
        f"as of {_moment(event.at)}. {consequence} To do: {advice}."
    )


def money_text(nano: int) -> str:
    """Nano-dollars for people: cents from one dollar up, below it two figures that count: `$4.00`, `$0.0015`.

    Cut off, not rounded: a text never shows more than was spent.
    """
    amount = Decimal(nano) / NANO_PER_USD
    places = 2 if nano == 0 or abs(amount) >= 1 else min(9, max(2, 1 - amount.adjusted()))
    shown = f"{abs(amount).quantize(Decimal(1).scaleb(-places), ROUND_DOWN):,f}"
    whole, _, decimals = shown.partition(".")
    return f"{'-' if nano < 0 else ''}${whole}.{decimals.rstrip('0').ljust(2, '0')}"


def _moment(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:].rstrip('.')}."
