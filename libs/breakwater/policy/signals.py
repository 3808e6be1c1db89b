"""What an event says of an incident: that it begins or goes on, or that it is over; and in which words.

A breaker's incident begins when it opens, by a rule or by hand, and ends when it closes; what happens in between
(half-open, a probe that fails, a person who isolates it) is the same incident and says nothing new. A task's incident
begins when its guard stops it, and ends when a person resets it. A budget's incident is one threshold in one period. An
agent's jobs that end without an answer are one incident, however many they are, until no more do.

The texts are for the people who look after the plane: reasons have their figures and limits. No prompt and no answer
stands in them.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, replace
from datetime import datetime

from pydantic import JsonValue

from breakwater.contracts.alerts import AlertEvent
from breakwater.contracts.events import BreakerTransition, BudgetEvent, DeadLetter, Enforcement, GuardEvent
from breakwater.contracts.execution import Execution
from breakwater.contracts.subjects import Header, encode_token
from breakwater.contracts.types import format_time, is_identifier, usd_from_nano
from breakwater.policy.alert_rules import UNDELIVERABLE
from breakwater.policy.alert_texts import moment, money_text, sentence

_CONSEQUENCE: dict[tuple[AlertEvent, Enforcement], str] = {
    ("budget_soft_cap", "hard"): "Calls that might pass the cap will be refused.",
    ("budget_hard_cap", "hard"): "Calls that do not fit are refused until the period ends or the cap is raised.",
}
_NOT_ENFORCED = "The cap is not enforced: calls go on."

_ALERTED_BY_OTHERS = frozenset({"breaker_open", "budget_exceeded", "guard_tripped", "rate_limited"})
"""Why jobs end without an answer that are no news: what caused it is an incident of its own, or meant."""


@dataclass(frozen=True, slots=True)
class _Signal:
    key: str
    event: AlertEvent
    """What the next alert of the incident is called."""
    title: str
    text: str
    source_id: str
    at: datetime
    payload: dict[str, JsonValue] = field(default_factory=dict[str, JsonValue])


@dataclass(frozen=True, slots=True)
class Firing(_Signal):
    """Something happened that people must know: it opens an incident, or repeats the one that is open."""

    agent: str | None = None
    model: str | None = None
    tenant: str | None = None
    times: int = 1
    """How often it happened."""
    ends_at: datetime | None = None
    """When it is over by itself."""
    fades: bool = False
    """Whether it is over when it has not happened again for the quiet time."""

    def after(self, before: Firing) -> Firing:
        """This and an earlier signal of the same incident as one."""
        return replace(self, times=self.times + before.times)


@dataclass(frozen=True, slots=True)
class Resolved(_Signal):
    """The opposite of what began an incident."""

    by: str | None = None
    """The person who ended it, where one did."""
    reason: str | None = None
    above: int | None = None
    """Where a cap was raised: the key is that of all its incidents, and over are those of higher percentages."""

    def ends(self, key: str) -> bool:
        """Whether it is the end of an incident with this key."""
        if self.above is None:
            return key == self.key
        begin, _, percent = key.rpartition("/")
        return begin == self.key and int(percent) > self.above


Signal = Firing | Resolved


def key_of(event: AlertEvent, *names: str | None) -> str:
    """What an incident is of; at most one is open at a time. A name that is missing is an empty token."""
    return "/".join([event, *("" if name is None else encode_token(name) for name in names)])


def signals_of(event: BreakerTransition | GuardEvent | BudgetEvent) -> tuple[Signal, ...]:
    """What an event says of incidents; nothing, where it says nothing new."""
    match event:
        case BreakerTransition():
            return _of_breaker(event)
        case GuardEvent():
            return _of_guard(event)
        case BudgetEvent():
            return _of_budget(event)


def _of_breaker(event: BreakerTransition) -> tuple[Signal, ...]:
    key = key_of("breaker_open", event.agent, event.model)
    payload: dict[str, JsonValue] = {
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
    }
    whose = f"{_agents(event)} on {_models(event)}"
    if event.from_state == "closed" and event.to_state in {"open", "isolated"}:
        return (
            Firing(
                key=key,
                event="breaker_open",
                title=f"Breaker open: {whose}",
                text=_opened(event),
                source_id=event.transition_id,
                at=event.at,
                payload=payload,
                agent=event.agent,
                model=event.model,
            ),
        )
    if event.from_state != "closed" and event.to_state == "closed":
        return (
            Resolved(
                key=key,
                event="breaker_closed",
                title=f"Breaker closed: {whose}",
                text=_closed(event),
                source_id=event.transition_id,
                at=event.at,
                payload=payload,
                by=event.by,
                reason=event.reason,
            ),
        )
    return ()


def _opened(event: BreakerTransition) -> str:
    shared = event.scope != "agent_model"
    if event.to_state == "isolated":
        reset = command("breakers", "reset", event.agent, event.model)
        until, advice = " It stays so until somebody resets it.", f"`{reset}` once calls may go on"
    else:
        until = "" if event.open_until is None else f" One probe call is let through after {moment(event.open_until)}."
        failed = "the agents' latest failed attempts" if shared else "the agent's latest failed attempts"
        advice = f"look at {failed} and at the provider's status page"
    return (
        f"{sentence(event.reason)} Since {moment(event.at)} no call of {_callers(event)} goes to {_models(event)}; "
        f"{'their' if shared else 'its'} jobs use the fallback models, or fail where there are none.{until} "
        f"To do: {advice}."
    )


def _closed(event: BreakerTransition) -> str:
    return (
        f"{sentence(event.reason)} Since {moment(event.at)} calls of {_callers(event)} go to {_models(event)} again. "
        "Nothing to do."
    )


def _agents(event: BreakerTransition) -> str:
    return event.agent if event.scope == "agent_model" else "all agents"


def _callers(event: BreakerTransition) -> str:
    # An agent may have a breaker of its own, or none, while others share one.
    return event.agent if event.scope == "agent_model" else "the agents that share this breaker"


def _models(event: BreakerTransition) -> str:
    return f"provider {event.model.removesuffix('/*')}" if event.scope == "provider" else event.model


def _of_guard(event: GuardEvent) -> tuple[Signal, ...]:
    # Not of the agent: several may work on one task, and who resets it may not know of any.
    key = key_of("guard_tripped", event.tenant, event.task_id)
    payload: dict[str, JsonValue] = {
        "agent": event.agent,
        "task_id": event.task_id,
        "tenant": event.tenant,
        "execution_id": event.execution_id,
        "rule": event.rule,
        "reason": event.reason,
        "iterations": event.iterations,
        "tokens": event.tokens,
        "cost": usd_from_nano(event.cost),
        "timestamp": format_time(event.at),
    }
    if event.kind == "reset":
        return (
            Resolved(
                key=key,
                event="guard_tripped",
                title=f"Task may go on: {event.task_id}",
                text=f"{sentence(event.reason)} What it has used is counted from zero again. Nothing to do.",
                source_id=event.event_id,
                at=event.at,
                payload=payload,
                by=event.by,
                reason=event.reason,
            ),
        )
    return (
        Firing(
            key=key,
            event="guard_tripped",
            title=f"Task stopped: {event.task_id} of {event.agent}",
            text=_stopped(event),
            source_id=event.event_id,
            at=event.at,
            payload=payload,
            agent=event.agent,
            tenant=event.tenant,
        ),
    )


def _stopped(event: GuardEvent) -> str:
    tenant = "" if event.tenant is None else f" of tenant {event.tenant}"
    reset = command("guards", "reset", event.task_id, tenant=event.tenant)
    iterations = f"{event.iterations:,} iteration{'' if event.iterations == 1 else 's'}"
    return (
        f"{sentence(event.reason)} Since {moment(event.at)} task {event.task_id}{tenant} makes no calls, "
        f"and its jobs fail; so far {iterations}, {event.tokens:,} tokens, {money_text(event.cost)}. "
        f"To do: look at the task's last executions; `{reset}` lets it go on."
    )


def command(group: str, action: str | None, *names: str, **options: str | None) -> str:
    """A command of ours, for a text. `action` is None where the group itself is the command."""
    # People paste it into a shell, and programs choose names: each is quoted, and none is read as an option.
    given = [f"--{option}={value}" for option, value in options.items() if value is not None]
    end = ["--"] if any(name.startswith("-") for name in names) else []
    return shlex.join(["breakwater", group, *([] if action is None else [action]), *given, *end, *names])


def _of_budget(event: BudgetEvent) -> tuple[Signal, ...]:
    name = {"global": None, "agent": event.agent, "tenant": event.tenant}[event.scope]
    place = (event.scope, name, event.window, event.period)
    who = _whose(event)
    payload: dict[str, JsonValue] = {
        "scope": event.scope,
        "limit": None if event.limit is None else usd_from_nano(event.limit),
        "total": usd_from_nano(event.total),
        "window": event.window,
        "agent": event.agent,
        "tenant": event.tenant,
        "period": event.period,
        "threshold_percent": event.threshold_percent,
        "enforcement": event.enforcement,
        "resets_at": None if event.resets_at is None else format_time(event.resets_at),
        "timestamp": format_time(event.at),
    }
    if event.kind == "raised" and event.limit:
        kinds: tuple[AlertEvent, ...] = ("budget_hard_cap", "budget_soft_cap")
        return tuple(
            Resolved(
                key=key_of(kind, *place),
                event=kind,
                title=f"Cap raised: {who}, {event.window}",
                text=f"{sentence(event.reason or 'raised')} {money_text(event.total)} of {money_text(event.limit)} are "
                "spent. Nothing to do.",
                source_id=event.event_id,
                at=event.at,
                payload=payload,
                by=event.by,
                reason=event.reason,
                above=event.total * 100 // event.limit,
            )
            for kind in kinds
        )
    if event.kind not in {"soft_cap", "hard_cap"} or event.limit is None:
        return ()
    kind: AlertEvent = "budget_hard_cap" if event.kind == "hard_cap" else "budget_soft_cap"
    what = f"Budget at {event.threshold_percent} %"
    if event.threshold_percent == 100:
        # A hard cap refuses what does not fit before it is spent.
        what = "Budget refuses calls" if kind == "budget_hard_cap" and event.total < event.limit else "Budget used up"
    return (
        Firing(
            key=key_of(kind, *place, str(event.threshold_percent)),
            event=kind,
            title=f"{what}: {who}, {event.window}",
            text=_spent(event, kind, who, event.limit),
            source_id=event.event_id,
            at=event.at,
            payload=payload,
            agent=event.agent if event.scope == "agent" else None,
            tenant=event.tenant,
            ends_at=event.resets_at,
        ),
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
        f"as of {moment(event.at)}. {consequence} To do: {advice}."
    )


def of_execution(execution: Execution, costly: int | None, long_ms: int | None) -> tuple[Firing, ...]:
    """What the end of a job says: that it got no answer, or that it cost or took more than is usual.

    Args:
        execution: its record.
        costly: nano-dollars, beyond which it is told; None for never.
        long_ms: milliseconds, beyond which it is told; None for never.
    """
    if execution.dry_run:
        return ()
    found: list[Firing] = []
    if execution.status == "dead_lettered" and execution.reason not in _ALERTED_BY_OTHERS:
        found.append(_failed(execution))
    if costly is not None and (execution.total_cost or 0) > costly:
        spent = money_text(execution.total_cost or 0)
        found.append(_unusual(execution, "execution_cost", f"cost {spent}, more than {money_text(costly)}"))
    if long_ms is not None and execution.duration_ms > long_ms:
        took = f"took {execution.duration_ms / 1000:,.1f} s, more than {long_ms / 1000:,.1f} s"
        found.append(_unusual(execution, "execution_duration", took))
    return tuple(found)


def _failed(execution: Execution) -> Firing:
    reason = execution.reason or "error"
    tried = execution.attempts_count > 1 and reason in {"error", "timeout"}
    event: AlertEvent = "retries_exhausted" if tried else "job_dead_lettered"
    error = execution.error
    kind = "" if error is None else f" ({error.kind}{'' if error.status_code is None else f' {error.status_code}'})"
    what = (
        f"no answer after {execution.attempts_count} attempts" if tried else f"ended without an answer: {reason}"
    ) + kind
    cost = "" if execution.total_cost is None else f" They cost {money_text(execution.total_cost)}."
    return Firing(
        key=key_of(event, execution.agent, reason),
        event=event,
        title=f"{'Retries exhausted' if tried else 'Jobs fail'}: {execution.agent} ({reason})",
        text=f"Job {execution.execution_id} of {execution.agent}: {what}.{cost if tried else ''} "
        f"To do: `{command('executions', None, execution.execution_id)}` tells what was tried.",
        source_id=execution.execution_id,
        at=execution.completed_at,
        payload=_figures(execution) | {"reason": reason, "error_kind": None if error is None else error.kind},
        agent=execution.agent,
        model=execution.requested_model,
        fades=True,
    )


def _unusual(execution: Execution, measure: str, what: str) -> Firing:
    return Firing(
        key=key_of("agent_anomaly", execution.agent, measure),
        event="agent_anomaly",
        title=f"Unusual execution: {execution.agent} ({measure.removeprefix('execution_')})",
        text=f"Job {execution.execution_id} of {execution.agent} {what}. "
        f"To do: `{command('executions', None, execution.execution_id)}` tells what it did.",
        source_id=f"{execution.execution_id}/{measure}",
        at=execution.completed_at,
        payload=_figures(execution) | {"measure": measure},
        agent=execution.agent,
        model=execution.requested_model,
        fades=True,
    )


def _figures(execution: Execution) -> dict[str, JsonValue]:
    return {
        "agent": execution.agent,
        "tenant": execution.tenant,
        "execution_id": execution.execution_id,
        "attempts_count": execution.attempts_count,
        "total_cost": None if execution.total_cost is None else usd_from_nano(execution.total_cost),
        "duration_ms": execution.duration_ms,
        "timestamp": format_time(execution.completed_at),
    }


def of_dead_letter(dead_letter: DeadLetter, source_id: str) -> tuple[Firing, ...]:
    """What a dead letter says that belongs to no execution: a job that can't be read, a row that no table takes.

    `source_id`: its `ce-id`.
    """
    if dead_letter.execution_id is not None and dead_letter.stream == "JOBS":
        return ()  # its record tells
    channel = dead_letter.headers.get(Header.CHANNEL)
    if channel is not None:
        return _unheard(dead_letter, source_id, channel)
    agent = dead_letter.agent if dead_letter.agent != "unknown" and is_identifier(dead_letter.agent or "") else None
    return (
        Firing(
            key=key_of("job_dead_lettered", agent, dead_letter.reason),
            event="job_dead_lettered",
            title=f"Dead letters: {dead_letter.reason}" + (f" ({agent})" if agent else ""),
            text=f"A message on {dead_letter.subject} could not be handled, and is kept: {sentence(dead_letter.error)} "
            f"To do: see what sends it; it stands on `bw.dlq.{encode_token(dead_letter.reason)}.>`.",
            source_id=source_id,
            at=dead_letter.at,
            payload={
                "agent": agent,
                "reason": dead_letter.reason,
                "stream": dead_letter.stream,
                "subject": dead_letter.subject,
                "sequence": dead_letter.sequence,
                "timestamp": format_time(dead_letter.at),
            },
            agent=agent,
            fades=True,
        ),
    )


def _unheard(dead_letter: DeadLetter, source_id: str, channel: str) -> tuple[Firing, ...]:
    if dead_letter.headers.get(Header.INCIDENT, "").startswith(UNDELIVERABLE):
        # That a channel is dead did not reach another dead one: they would tell each other for ever.
        return ()
    key = f"{UNDELIVERABLE}{encode_token(channel)}"
    test, replay = command("alerts", "test", channel), command("alerts", "replay", channel=channel)
    return (
        Firing(
            key=key,
            event="job_dead_lettered",
            title=f"Alerts do not arrive: channel {channel}",
            text=f"{sentence(dead_letter.error)} What did not arrive is kept. To do: mend the channel and see with "
            f"`{test}` that it works; `{replay}` then sends what is kept.",
            source_id=source_id,
            at=dead_letter.at,
            payload={
                "channel": channel,
                "reason": dead_letter.reason,
                "sequence": dead_letter.sequence,
                "timestamp": format_time(dead_letter.at),
            },
        ),
    )


def channel_works(channel: str, source_id: str, at: datetime) -> Resolved:
    """What a message that arrived says of its channel."""
    return Resolved(
        key=f"{UNDELIVERABLE}{encode_token(channel)}",
        event="job_dead_lettered",
        title=f"Alerts arrive again: channel {channel}",
        text=f"A message has arrived. To do: `{command('alerts', 'replay', channel=channel)}` sends what is kept.",
        source_id=source_id,
        at=at,
        payload={"channel": channel},
        reason="a message has arrived",
    )
