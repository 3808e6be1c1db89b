"""Turns events into signals that open, repeat or resolve incidents, and words their texts.

A breaker's incident begins when it opens, by a rule or an operator, and ends when it closes; everything in between
(half-open, a failed probe, an operator who isolates it) belongs to the same incident. While the breaker only waits for
a call to try it, the incident is just information, and it ends if no call comes. A task's incident begins when its
guard stops it, and ends when an operator resets it. A budget's incident is one threshold in one period. An agent's jobs
that end without an answer are one incident, however many they are, until none do any more.

The texts are for operators: reasons have their figures and limits. They contain no prompt and no answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeGuard

from pydantic import BaseModel, JsonValue

from breakwater.alerts.contract import Alert, AlertEvent, Severity
from breakwater.alerts.rules.alert_rules import UNDELIVERABLE
from breakwater.breakers.contract import BreakerTransition
from breakwater.breakers.rules.breaker import BreakerKey
from breakwater.breakers.rules.refusals import breaker_open
from breakwater.calls.rules.refusals import command, for_operators
from breakwater.jobs.contract.execution import Attempt, ErrorInfo, Execution
from breakwater.kernel.formats import moment, money, moneys, percent, quantity, sentence
from breakwater.kernel.nats.contract import DeadLetter
from breakwater.kernel.nats.subjects import Header, encode_token
from breakwater.kernel.types import format_time, is_identifier
from breakwater.limits.contract import BudgetEvent, Enforcement, GuardEvent
from breakwater.limits.rules.budget import NEVER_FITS, scope_key
from breakwater.limits.rules.rate_limit import HELD
from breakwater.limits.rules.refusals import raise_command, task_near_cap, task_stopped
from breakwater.limits.rules.scopes import scope_in_words, scope_text

UNTRIED = timedelta(hours=1)
"""The time after which the incident of a breaker ends that waits for a call."""

STORAGE_LAPSE = timedelta(minutes=15)
"""The time after which the incident of a server ends that nobody reports any more."""

_CONSEQUENCE: dict[tuple[AlertEvent, Enforcement], str] = {
    ("budget_soft_cap", "hard"): "Calls that could exceed the limit will be refused.",
    ("budget_hard_cap", "hard"): "Calls that do not fit are refused until the period ends or the limit is raised.",
}
_NOT_ENFORCED = "The limit is not enforced: calls continue."

_CHANGES_IN_TEXT = 5

MOST_UNITS = 100
"""The models or deployments whose times a merged signal keeps: the latest ones, as any name may be asked for."""

MEASURES_OF_JOBS = frozenset({"execution_cost", "execution_duration", "reported_usage", "finish_reason"})
"""The measures of anomalies that the ends of single jobs show."""

_ALERTED_BY_OTHERS = frozenset(
    {"breaker_open", "budget_exceeded", "guard_tripped", "rate_limited", "dependency_failed"}
)
"""Reasons for ends without an answer that open no incident: their cause has one of its own, or is intended."""


@dataclass(frozen=True, slots=True)
class _SignalFields:
    key: str
    event: AlertEvent
    """The event of the incident's next alert."""
    title: str
    text: str
    source_id: str
    at: datetime
    payload: dict[str, JsonValue] = field(default_factory=dict[str, JsonValue])


@dataclass(frozen=True, slots=True)
class Firing(_SignalFields):
    """A problem that operators must know of: it opens an incident, or repeats the open one.

    Attributes:
        agent: the agent that it concerns.
        model: the model that it concerns.
        tenant: the tenant that it concerns.
        times: the number of times that it occurred.
        began_at: the first of these times; None if it is `at`.
        earlier: the `unit_times` of the earlier ones, if it occurred several times.
        ends_at: the time at which it ends by itself.
        fades: True if it ends when it has not recurred for the quiet time.
        done_by: the person who caused it, if it is over immediately: channels are notified, and nothing is left to do.
        severity: the severity; None for that of its key. What stops one caller only is a warning.
        continues: the incident that it may only continue: one that is not resolved, or one of a breaker that waited for
            a call, unless a person resolved it. None if it may also open one.
    """

    agent: str | None = None
    model: str | None = None
    tenant: str | None = None
    times: int = 1
    began_at: datetime | None = None
    earlier: dict[str, tuple[datetime, datetime]] = field(default_factory=dict[str, tuple[datetime, datetime]])
    ends_at: datetime | None = None
    fades: bool = False
    done_by: str | None = None
    severity: Severity | None = None
    continues: Literal["unresolved", "waiting"] | None = None

    def after(self, before: Firing) -> Firing:
        """Merges this signal with an earlier one of the same incident."""
        began_at = min(before.began_at or before.at, self.at)
        earlier = dict([*before.unit_times().items()][-MOST_UNITS:])
        return replace(self, times=self.times + before.times, began_at=began_at, earlier=earlier)

    def unit_times(self) -> dict[str, tuple[datetime, datetime]]:
        """Returns when it occurred first and last, by model or deployment of it; an empty name stands for none."""
        deployments = self.payload.get("deployments")
        times = dict(self.earlier)
        for unit in map(str, deployments) if isinstance(deployments, list) else (self.model or "",):
            first, _ = times.get(unit, (self.at, self.at))
            times[unit] = first, self.at
        return times


@dataclass(frozen=True, slots=True)
class Resolved(_SignalFields):
    """The end of an incident.

    Attributes:
        by: the person who ended it, if one did.
        reason: the reason for its end.
        above: the spent percentage of a raised cap: all incidents of thresholds above it end. `key` then is the part
            that their keys have in common.
    """

    by: str | None = None
    reason: str | None = None
    above: int | None = None

    def ends(self, key: str) -> bool:
        """Returns True if this ends the incident with a key."""
        if self.above is None:
            return key == self.key
        begin, _, percent = key.rpartition("/")
        return begin == self.key and int(percent) > self.above


Signal = Firing | Resolved


def ends_several(signal: Signal) -> TypeGuard[Resolved]:
    """Returns True for a raised cap, which ends the incidents of several thresholds."""
    return isinstance(signal, Resolved) and signal.above is not None


@lru_cache(maxsize=4096)  # each job asks for those of its deployments
@lru_cache(maxsize=4096)
def key_of(event: AlertEvent, *names: str | None) -> str:
    """Returns the key of an incident, of which at most one is open. A missing name becomes an empty token."""
    return "/".join([event, *("" if name is None else encode_token(name) for name in names)])


def signals_of(event: BreakerTransition | GuardEvent | BudgetEvent) -> tuple[Signal, ...]:
    """Returns the signals of an event; empty if it changes no incident."""
    match event:
        case BreakerTransition():
            return _of_breaker(event)
        case GuardEvent():
            return _of_guard(event)
        case BudgetEvent():
            return _of_budget(event)


def _figures(event: BaseModel, *fields: str, **renamed: str) -> dict[str, JsonValue]:
    """Returns fields of an event as on the wire; `renamed` maps names in an alert to names in the event."""
    written = event.model_dump(mode="json", include={*fields, *renamed.values()})
    return {field: written[field] for field in fields} | {name: written[field] for name, field in renamed.items()}


def _of_breaker(event: BreakerTransition) -> tuple[Signal, ...]:
    key = key_of("breaker_open", event.agent, event.model)
    counts = ("errors", "consecutive_failures", "total_failures", "unique_errors")
    fields = ("agent", "reason", "open_for", "open_until", "waits", *counts)
    renamed = {"model_id": "model", "within": "within_s", "cooldown": "cooldown_s", "timestamp": "at"}
    origin = (event.transition_id, event.at, _figures(event, *fields, "scope", "by", **renamed))
    affected = f"{event.agent if event.scope == 'agent_model' else 'all agents'} on {_models(event)}"
    affected += "" if event.open_for is None else f", for {event.open_for}"
    firing: dict[str, Any] = {"agent": event.agent, "model": event.model}
    if event.waits:
        ends_at = event.at + UNTRIED
        title = f"Breaker half-open: {affected}"
        text = _wait_text(event, ends_at)
        lowered: dict[str, Any] = {"severity": "info", "ends_at": ends_at, "times": 0, "continues": "unresolved"}
        return (Firing(key, "breaker_open", title, text, *origin, **firing, **lowered),)
    # A breaker that was open for one caller may open for all.
    is_new = event.from_state == "closed" or event.from_state == event.to_state == "open"
    tried_in_vain = event.from_state == "half_open"
    if (is_new or tried_in_vain) and event.to_state in {"open", "isolated"}:
        title = f"Breaker open: {affected}"
        firing["continues"] = None if is_new else "waiting"
        firing["severity"] = None if event.open_for is None else "warning"
        return (Firing(key, "breaker_open", title, _open_text(event), *origin, **firing),)
    if event.from_state != "closed" and event.to_state == "closed":
        title = f"Breaker closed: {affected}"
        return (Resolved(key, "breaker_closed", title, _close_text(event), *origin, by=event.by, reason=event.reason),)
    return ()


def _open_text(event: BreakerTransition) -> str:
    shared = event.scope != "agent_model"
    state = None if event.to_state == "isolated" else "open"
    until = ""
    if state is not None and event.open_until is not None:
        state = f"open until {moment(event.open_until)}"
        until = " After the cool-down, one probe call is admitted."
    refused = breaker_open(BreakerKey(event.agent, event.model), event.reason, state=state)
    jobs = f"{'their' if shared else 'its'} jobs"
    if event.open_for is not None:
        jobs += f" for {event.open_for}, and no others,"
    return (
        f"{_opening(for_operators(refused))} Since {moment(event.at)} {jobs} use other deployments or models, or fail "
        f"if there are none.{until}"
    )


def _wait_text(event: BreakerTransition, ends_at: datetime) -> str:
    reset = command("breakers", "reset", event.agent, event.model)
    return (
        f"{sentence(event.reason)} If a call of {_callers(event)} to {_models(event)} succeeds, the breaker closes; if "
        f"it fails, it opens again. Nothing to do; `{reset}` admits all calls now. The incident ends at "
        f"{moment(ends_at)} if none comes."
    )


def _close_text(event: BreakerTransition) -> str:
    return (
        f"{sentence(event.reason)} Since {moment(event.at)} calls of {_callers(event)} go to {_models(event)} again. "
        "Nothing to do."
    )


def _callers(event: BreakerTransition) -> str:
    # A shared breaker does not concern agents that have their own, or none.
    return event.agent if event.scope == "agent_model" else "the agents that share this breaker"


def _models(event: BreakerTransition) -> str:
    return f"provider {event.model.removesuffix('/*')}" if event.scope == "provider" else event.model


def _of_guard(event: GuardEvent) -> tuple[Signal, ...]:
    # The key has no agent: several agents may work on one task, and its reset names none.
    key = key_of("guard_tripped", event.tenant, event.task_key)
    ids = ("agent", "task_id", "task_key", "tenant", "execution_id")
    figures = _figures(event, *ids, "rule", "reason", "iterations", "tokens", "cost", timestamp="at")
    origin = (event.event_id, event.at, figures)
    near_key = key_of("guard_soft_cap", event.tenant, event.task_key)
    if event.kind == "reset":
        title = f"Task reset: {event.task_id}"
        text = f"{sentence(event.reason)} Its usage counts from zero again. Nothing to do."
        return (
            Resolved(key, "guard_tripped", title, text, *origin, by=event.by, reason=event.reason),
            Resolved(near_key, "guard_soft_cap", title, text, *origin, by=event.by, reason=event.reason),
        )
    if event.kind == "soft_cap" and event.rule is not None:
        owner: dict[str, Any] = {"agent": event.agent, "tenant": event.tenant}
        title = f"Task near its limit: {event.task_id} of {event.agent}"
        text = task_near_cap(event.rule, event.reason, task_id=event.task_id, **owner)
        return (Firing(near_key, "guard_soft_cap", title, text, *origin, fades=True, **owner),)
    title = f"Task stopped: {event.task_id} of {event.agent}"
    return (Firing(key, "guard_tripped", title, _stop_text(event), *origin, agent=event.agent, tenant=event.tenant),)


def _stop_text(event: GuardEvent) -> str:
    assert event.rule is not None
    refused = task_stopped(
        event.rule,
        event.reason,
        agent=event.agent,
        task_id=event.task_id,
        task_key=event.task_key,
        tenant=event.tenant,
        execution_id=event.execution_id,
    )
    used = f"{quantity(event.iterations, 'iteration')}, {event.tokens:,} tokens, {money(event.cost)}"
    return f"{_opening(for_operators(refused))} Stopped at {moment(event.at)} after {used}."


def _of_budget(event: BudgetEvent) -> tuple[Signal, ...]:
    scope = scope_text(scope_key(event))
    name = scope.partition(":")[2] or None
    place = (event.scope, name, event.window, event.period)
    is_agent = event.scope == "agent" and event.within is None
    owner = str(event.agent) if is_agent else scope_in_words(scope_key(event))
    fields = ("scope", "limit", "total", "reserved", "window", "agent", "tenant", "period", "enforcement", "resets_at")
    fields += () if event.name is None else ("name",)
    fields += () if event.within is None else ("within",)
    figures = _figures(event, *fields, "threshold_percent", timestamp="at")
    origin = (event.event_id, event.at, figures)
    if event.kind == "raised" and event.limit:
        title = f"Limit raised: {owner}, {event.window}"
        spent, limit = moneys(event.total, event.limit)
        text = f"{sentence(event.reason or 'raised')} {spent} of {limit} is spent. Nothing to do."
        above = event.total * 100 // event.limit
        kinds: tuple[AlertEvent, ...] = ("budget_hard_cap", "budget_soft_cap")
        return tuple(
            Resolved(key_of(kind, *place), kind, title, text, *origin, by=event.by, reason=event.reason, above=above)
            for kind in kinds
        )
    if event.kind not in {"soft_cap", "hard_cap"} or event.limit is None:
        return ()
    kind: AlertEvent = "budget_hard_cap" if event.kind == "hard_cap" else "budget_soft_cap"
    state = f"Limit at {event.threshold_percent} %"
    if event.threshold_percent == 100:
        # A hard cap refuses calls that do not fit before it is spent.
        state = "Limit refuses calls" if kind == "budget_hard_cap" and event.total < event.limit else "Limit used up"
    key = key_of(kind, *place, str(event.threshold_percent))
    title = f"{state}: {owner}, {event.window}"
    text = _spend_text(event, kind, owner, event.limit)
    agent = event.agent if event.scope == "agent" else None
    owners: dict[str, Any] = {"agent": agent, "tenant": event.tenant}
    # As for a breaker: what stops one tenant, key or user stops nobody else.
    severity: Severity | None = None if event.scope in ("global", "agent") else "warning"
    return (Firing(key, kind, title, text, *origin, **owners, ends_at=event.resets_at, severity=severity),)


def _spend_text(event: BudgetEvent, kind: AlertEvent, owner: str, limit: int) -> str:
    share = f" ({percent(event.total / limit)})" if limit else ""
    spent, cap = moneys(event.total, limit)
    consequence = _CONSEQUENCE.get((kind, event.enforcement), _NOT_ENFORCED)
    advice = "check whether this is expected"
    if kind == "budget_hard_cap":
        budget = f"{scope_text(scope_key(event))}/{event.window}"
        advice = f"find what spends, or raise the limit: `{raise_command(budget)}`"
    reservations = ""
    if event.reserved is not None:
        free = money(max(0, limit - event.total - event.reserved))
        reservations = f" {money(event.reserved)} is held by calls in flight, and {free} is free."
    last = "" if event.agent is None or event.scope == "agent" else f", last by agent {event.agent}"
    total = f"{spent} of {cap}{share} spent by {owner} in {event.period}{last}, as of {moment(event.at)}.{reservations}"
    if event.refusal is not None:
        return f"{_opening(event.refusal)} {total}"
    return f"{total} {consequence} To do: {advice}."


def _opening(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def of_quotas(
    execution: Execution,
    newest: Callable[[str], Alert | None],
    traffic_in_words: Callable[[str, str], str | None],
) -> tuple[Signal, ...]:
    """Returns the signals of a job's calls about provider accounts: a quota is exhausted, or available again.

    Args:
        execution: the job's record.
        newest: a function that returns the newest alert of the latest incident with a key.
        traffic_in_words: a function that says where the traffic of a provider's failing model goes; None if unknown.
    """
    signals: dict[str, Signal] = {}
    for attempt in execution.attempts:
        error = attempt.error
        if attempt.outcome != "success" and (error is None or error.kind != "quota"):
            continue
        account = attempt.provider if attempt.provider_key is None else f"{attempt.provider}#{attempt.provider_key}"
        key = key_of("quota_exhausted", account)
        if error is not None and error.kind == "quota":
            signals[key] = _quota_exhausted(key, attempt, error, traffic_in_words)
        elif (
            attempt.outcome == "success"
            and (latest := newest(key)) is not None
            and latest.status != "resolved"
            # Each model may have its own quota.
            and latest.payload.get("model_id") == attempt.model
            # A call that began before the refusal does not prove that the quota is available again.
            and latest.last_at < attempt.started_at
        ):
            text = f"{attempt.model} has answered a call of {attempt.agent}. Nothing to do."
            source = f"{attempt.attempt_id}/served"
            cause = "a call was answered"
            title = f"Quota available: {attempt.provider}"
            signals[key] = Resolved(
                key, "quota_exhausted", title, text, source, attempt.completed_at, latest.payload, reason=cause
            )
    return tuple(signals.values())


def _quota_exhausted(
    key: str, attempt: Attempt, error: ErrorInfo, traffic_in_words: Callable[[str, str], str | None]
) -> Firing:
    at = attempt.completed_at
    ends_at = None if error.retry_after_s is None else at + timedelta(seconds=error.retry_after_s)
    resets = "It does not say when that changes." if ends_at is None else f"It resets at {moment(ends_at)}."
    traffic = traffic_in_words(attempt.provider, attempt.unit)
    jobs = "Jobs go on to their next model, or fail if there is none."
    figures = _figures(attempt, "agent", "provider", "execution_id", model_id="model", timestamp="completed_at")
    return Firing(
        key=key,
        event="quota_exhausted",
        title=f"Quota exhausted: {attempt.provider}",
        text=f"{attempt.provider} answers calls of {attempt.unit} that the account or its quota is used up"
        f"{'' if error.status_code is None else f' (HTTP {error.status_code})'}. {resets} "
        f"{jobs if traffic is None else sentence(traffic)} "
        "To do: check the account's billing and limits at the provider.",
        source_id=f"{attempt.attempt_id}/quota",
        at=at,
        payload=figures | {"resets_at": None if ends_at is None else format_time(ends_at)},
        agent="*",  # all agents share the account
        model=attempt.model,
        ends_at=ends_at,
    )


def of_execution(execution: Execution, costly: int | None, long_ms: int | None) -> tuple[Firing, ...]:
    """Returns the signals of a job's end: it has no answer, or its cost or duration is above the limit.

    A cancelled job has none, because a person has looked at it.

    Args:
        execution: the job's record.
        costly: the cost in nano-dollars above which a job is reported; None for never.
        long_ms: the duration in milliseconds above which a job is reported; None for never.
    """
    if execution.dry_run or execution.status == "cancelled":
        return ()
    signals: list[Firing] = []
    error = execution.error
    spent = error is not None and error.kind == "quota"
    news = error is not None and (error.class_ in NEVER_FITS or error.class_ == HELD)
    if execution.status == "dead_lettered" and not spent and (news or execution.reason not in _ALERTED_BY_OTHERS):
        signals.append(_failure_of(execution))
    if costly is not None and (execution.total_cost or 0) > costly:
        cost, limit = moneys(execution.total_cost or 0, costly)
        signals.append(_unusual(execution, "execution_cost", f" cost {cost}, more than {limit}"))
    if long_ms is not None and execution.duration_ms > long_ms:
        duration = f" took {execution.duration_ms / 1000:,.1f} s, more than {long_ms / 1000:,.1f} s"
        signals.append(_unusual(execution, "execution_duration", duration))
    for attempt in execution.attempts:
        if attempt.usage_problem is not None:
            text = f": {attempt.usage_problem}, so its cost is estimated, and the provider's bill may differ"
            signals.append(_unusual(execution, "reported_usage", text))
            break
    return tuple(signals)


def cut_off(execution: Execution, cut: int, answers: int) -> Firing:
    """Signals that `cut` of an agent's latest answers were truncated, this execution's included."""
    details = (
        f" was truncated by its output limit, as were {cut} of the agent's last {answers} answers: raise the agent's "
        "`max_tokens`, or ask for less"
    )
    return _unusual(execution, "finish_reason", details, title="Truncated answers")


def _failure_of(execution: Execution) -> Firing:
    reason = execution.reason or "error"
    tried = execution.attempts_count > 1 and reason in {"error", "timeout"}
    error = execution.error
    kind = "" if error is None else f" ({error.kind}{'' if error.status_code is None else f' {error.status_code}'})"
    figures: dict[str, JsonValue] = {"reason": reason, "error_kind": None if error is None else error.kind}
    if not tried:
        details = f": ended without an answer: {reason}{kind}."
        if error is not None and error.class_ in NEVER_FITS:
            details = f": {error.message}."
        return _of_job(execution, "job_dead_lettered", reason, "Jobs fail", details, "was tried", figures)
    cost = "" if execution.total_cost is None else f" They cost {money(execution.total_cost)}."
    details = f": no answer after {execution.attempts_count} attempts{kind}.{cost}"
    return _of_job(execution, "retries_exhausted", reason, "Retries exhausted", details, "was tried", figures)


def _unusual(execution: Execution, measure: str, details: str, title: str = "Unusual execution") -> Firing:
    figures: dict[str, JsonValue] = {"measure": measure}
    signal = _of_job(execution, "agent_anomaly", measure, title, f"{details}.", "it did", figures)
    return replace(signal, source_id=f"{execution.execution_id}/{measure}")


def _of_job(
    execution: Execution,
    event: AlertEvent,
    kind: str,
    title: str,
    details: str,
    question: str,
    figures: dict[str, JsonValue],
) -> Firing:
    fields = ("agent", "tenant", "execution_id", "attempts_count", "total_cost", "duration_ms")
    return Firing(
        key=key_of(event, execution.agent, kind),
        event=event,
        title=f"{title}: {execution.agent} ({kind.removeprefix('execution_')})",
        text=f"Job {execution.job_id} of {execution.agent}{details} "
        f"To do: `{command('executions', None, execution.execution_id)}` shows what {question}.",
        source_id=execution.execution_id,
        at=execution.completed_at,
        payload=_figures(execution, *fields, timestamp="completed_at") | figures | _deployments(execution),
        agent=execution.agent,
        model=execution.requested_model,
        fades=True,
    )


def _deployments(execution: Execution) -> dict[str, JsonValue]:
    """Returns the deployments of the requested model that a job tried or was refused; empty if it lists none."""
    of_model = (attempt for attempt in execution.attempts if attempt.model == execution.requested_model)
    names = dict.fromkeys(attempt.deployment for attempt in of_model if attempt.deployment is not None)
    return {"deployments": list(names)} if names else {}


def of_dead_letter(dead_letter: DeadLetter, source_id: str) -> tuple[Firing, ...]:
    """Returns the signal of a dead letter without an execution: an unreadable job, or a row that no table accepts.

    `source_id` is the dead letter's `ce-id`.
    """
    if dead_letter.execution_id is not None and dead_letter.stream == "JOBS":
        return ()  # reported by its record
    channel = dead_letter.headers.get(Header.CHANNEL)
    if channel is not None:
        return _undeliverable(dead_letter, source_id, channel)
    agent = _agent_of(dead_letter)
    key = key_of("job_dead_lettered", agent, dead_letter.reason)
    title = f"Dead letters: {dead_letter.reason}" + (f" ({agent})" if agent else "")
    text = (
        f"A message on {dead_letter.subject} could not be handled and is kept: {sentence(dead_letter.error)} "
        f"To do: find what sends it; `breakwater dlq list --reason {dead_letter.reason}` lists it."
    )
    figures = _figures(dead_letter, "reason", "stream", "subject", "sequence", timestamp="at") | {"agent": agent}
    origin = (source_id, dead_letter.at, figures)
    return (Firing(key, "job_dead_lettered", title, text, *origin, agent=agent, fades=True),)


def dead_letter_keys(dead_letter: DeadLetter) -> tuple[str, ...]:
    """Returns the keys of the incidents that a dead letter of a job or an event may belong to."""
    agent = _agent_of(dead_letter)
    return tuple(key_of(event, agent, dead_letter.reason) for event in ("retries_exhausted", "job_dead_lettered"))


def dead_letters_looked_after(incident: Alert, by: str, why: str | None, at: datetime) -> Resolved:
    """Signals that a person has replayed or dismissed all dead letters of an incident."""
    return Resolved(
        key=incident.key,
        event=incident.event,
        title=incident.title,
        text="All of its dead letters were replayed or dismissed. Nothing to do.",
        source_id=f"{incident.incident_id}/looked-after/{at:%Y-%m-%dT%H:%M:%S.%f}",
        at=at,
        payload=incident.payload,
        by=by,
        reason=why or "its dead letters were replayed or dismissed",
    )


def _agent_of(dead_letter: DeadLetter) -> str | None:
    return dead_letter.agent if dead_letter.agent != "unknown" and is_identifier(dead_letter.agent or "") else None


def _undeliverable(dead_letter: DeadLetter, source_id: str, channel: str) -> tuple[Firing, ...]:
    if dead_letter.headers.get(Header.INCIDENT, "").startswith(UNDELIVERABLE):
        # Two channels that both fail would otherwise report each other's undelivered alerts forever.
        return ()
    test = command("alerts", "test", channel)
    replay = command("alerts", "replay", channel=channel)
    key = f"{UNDELIVERABLE}{encode_token(channel)}"
    title = f"Alerts are not delivered: channel {channel}"
    text = (
        f"{sentence(dead_letter.error)} Undelivered alerts are kept. To do: fix the channel and check with "
        f"`{test}` that it works; `{replay}` then sends what is kept."
    )
    figures = _figures(dead_letter, "reason", "sequence", timestamp="at") | {"channel": channel}
    return (Firing(key, "job_dead_lettered", title, text, source_id, dead_letter.at, figures),)


def config_applied(version: str, before: str, by: str, changes: tuple[str, ...], at: datetime) -> Firing:
    """Signals that another config was applied, with its changes."""
    listed = [
        *changes[:_CHANGES_IN_TEXT],
        *([f"and {more} more"] if (more := len(changes) - _CHANGES_IN_TEXT) > 0 else []),
    ]
    return Firing(
        key=key_of("config_applied", version, f"{at:%Y-%m-%dT%H:%M:%S.%f}"),
        event="config_applied",
        title=f"Config applied: version {version}",
        text=f"{by} applied version {version} in place of {before}: {'; '.join(listed)}. Nothing to do.",
        source_id=f"config/{version}/{at:%Y-%m-%dT%H:%M:%S.%f}",
        at=at,
        payload={"version": version, "before": before, "by": by, "changes": list(changes)},
        done_by=by,
    )


def consumer_deleted(stream: str, consumer: str, at: datetime) -> Firing:
    """Signals that a NATS consumer is gone. It fades, in case the reporting worker dies before the consumer is back."""
    return Firing(
        key=key_of("consumer_deleted", stream, consumer),
        event="consumer_deleted",
        title=f"Consumer deleted: {consumer} of {stream}",
        text=f"The consumer {consumer} of the stream {stream} was deleted. Its messages wait until a worker has "
        "created it again, within seconds. To do: find out who deleted it.",
        source_id=f"{stream}/{consumer}/deleted/{at:%Y-%m-%dT%H:%M:%S}",
        at=at,
        payload={"stream": stream, "consumer": consumer},
        fades=True,
    )


StorageServer = Literal["nats", "redis", "clickhouse"]
"""A server that the plane stores in."""


class _Storage(NamedTuple):
    """The words about a server, and the severity of its failure."""

    name: str
    consequence: str
    advice: str
    severity: Severity | None = None


_STORAGE: Mapping[StorageServer, _Storage] = {
    "nats": _Storage(
        "NATS",
        "No job is accepted and none ends until it does. No accepted job is lost.",
        "free disk space on its server, and then restart it, which `breakwater up` does by itself",
    ),
    "redis": _Storage(
        "Redis",
        "No call is made until it does. Jobs wait, and none is lost.",
        "`breakwater doctor` names the cause and the remedy",
    ),
    "clickhouse": _Storage(
        "ClickHouse",
        "Calls go on. Executions, costs and the console's history are out of date until it does; nothing is lost while "
        "EVENTS keeps them.",
        "see whether it runs and has free disk space; `breakwater doctor` names the cause",
        "warning",
    ),
}


def storage_failing(server: StorageServer, error: str, remedy: str | None, at: datetime) -> Firing:
    """Signals that the plane can't store in one of its servers.

    The incident ends by itself if that is not signalled again, as its process may end before the server stores.
    """
    storage = _STORAGE[server]
    advice = f"To do: {storage.advice}." if remedy is None else f"To do: {remedy}"
    return Firing(
        key=key_of("storage_failing", server),
        event="storage_failing",
        title=f"The plane can't store: {storage.name}",
        text=f"{sentence(error)} {storage.consequence} {advice}",
        source_id=f"{server}/fails/{at:%Y-%m-%dT%H:%M:%S.%f}",
        at=at,
        payload={"server": server, "error": error, "timestamp": format_time(at)},
        severity=storage.severity,
        ends_at=at + STORAGE_LAPSE,
    )


def storage_recovered(server: StorageServer, at: datetime) -> Resolved:
    """Signals that a server stores again."""
    return Resolved(
        key=key_of("storage_failing", server),
        event="storage_failing",
        title=f"The plane stores again: {_STORAGE[server].name}",
        text="What waited is stored now. Nothing to do.",
        source_id=f"{server}/stores/{at:%Y-%m-%dT%H:%M:%S.%f}",
        at=at,
        payload={"server": server, "timestamp": format_time(at)},
        reason="it stores again",
    )


def consumer_restored(stream: str, consumer: str, at: datetime) -> Resolved:
    """Signals that a deleted consumer is back."""
    return Resolved(
        key=key_of("consumer_deleted", stream, consumer),
        event="consumer_deleted",
        title=f"Consumer restored: {consumer} of {stream}",
        text="A worker created it again where it was. No message is lost; some may be delivered a second time.",
        source_id=f"{stream}/{consumer}/restored/{at:%Y-%m-%dT%H:%M:%S}",
        at=at,
        payload={"stream": stream, "consumer": consumer},
        reason="it was created again",
    )


def channel_works(channel: str, source_id: str, at: datetime) -> Resolved:
    """Signals that a channel delivers again, because a message arrived."""
    return Resolved(
        key=f"{UNDELIVERABLE}{encode_token(channel)}",
        event="job_dead_lettered",
        title=f"Alerts are delivered again: channel {channel}",
        text=f"A message was delivered. To do: `{command('alerts', 'replay', channel=channel)}` sends what is kept.",
        source_id=source_id,
        at=at,
        payload={"channel": channel},
        reason="a message was delivered",
    )
