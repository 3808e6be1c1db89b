"""Compares the findings of a replay under the unchanged policy with the record."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from breakwater.alerts.contract import Alert, AlertEvent
from breakwater.alerts.rules.alert_rules import EXPLAINING, began_with
from breakwater.alerts.rules.deployments import FAILURES
from breakwater.alerts.rules.signals import key_of
from breakwater.breakers.contract import BreakerTransition
from breakwater.kernel.types import ms_from_time
from breakwater.limits.contract import BudgetEvent, GuardEvent, GuardRule
from breakwater.limits.rules.guard import outcome_of
from breakwater.limits.settings import GuardRules
from breakwater.replay.rules.alerts import VERY_LATE_MS, is_replayed
from breakwater.replay.rules.breakers import LAG_MS
from breakwater.replay.rules.engine import (
    EDGE,
    LATE_ALERTER,
    OUTCOME_ORDER,
    RACE_MS,
    TASK_ORDER,
    WORKER_LOST,
    ReplayFindings,
)
from breakwater.replay.rules.history import Changes, RecordedJob, is_of_lost_worker

Subject = Literal["calls", "ends", "transitions", "thresholds", "trips", "alerts"]


@dataclass(slots=True)
class Identity:
    """The agreement of a replay and the record in one subject.

    Attributes:
        subject: what is compared.
        equal: how many decisions are equal.
        unequal: how many are not, by their cause.
        examples: some of those without a cause, in words.
    """

    subject: Subject
    equal: int = 0
    unequal: Counter[str] = field(default_factory=Counter[str])
    examples: list[str] = field(default_factory=list[str])


UNEXPLAINED = "unexplained"
"""The cause of a difference that has none."""

_OF_OTHERS: Mapping[str, Subject] = {
    EDGE: "transitions",
    OUTCOME_ORDER: "transitions",
    TASK_ORDER: "trips",
    LATE_ALERTER: "alerts",
}
"""The subjects in which these causes have decisions taken from the record; others are of calls."""

MAX_EXAMPLES = 10


def identity(jobs: Iterable[RecordedJob], changes: Changes, findings: ReplayFindings) -> dict[Subject, Identity]:
    """Compares a replay with the record, one decision after the other.

    Args:
        jobs: the recorded jobs.
        changes: what the services decided while they ran.
        findings: what the replay found under the policy of that time.
    """
    parts = {subject: Identity(subject) for subject in get_args(Subject)}
    jobs = list(jobs)
    calls = sum(len(job.attempts) for job in jobs)
    orders = _TaskOrders(jobs, changes.guards, findings.guards)
    of_others = {cause: times for cause, times in findings.races.items() if cause in _OF_OTHERS and times}
    parts["calls"].unequal.update({cause: times for cause, times in findings.races.items() if cause not in _OF_OTHERS})
    for difference in findings.differences:
        part = parts["ends" if difference.kind == "end" else "calls"]
        part.unequal[UNEXPLAINED] += 1
        if len(part.examples) < MAX_EXAMPLES:
            words = f"{difference.kind}: {difference.recorded!r}, replayed {difference.replayed!r}"
            part.examples.append(f"{difference.execution_id} {words}")
    parts["calls"].equal = calls - parts["calls"].unequal.total()
    parts["ends"].equal = findings.ends
    _compare(
        parts["transitions"],
        ((_of_transition(event), ms_from_time(event.at)) for event in changes.transitions if event.by is None),
        ((_of_transition(event), ms_from_time(event.at)) for event in findings.transitions if event.by is None),
    )
    _compare(parts["thresholds"], _of_budgets(changes.budgets), _of_budgets(findings.budgets))
    _compare(parts["trips"], _of_guards(changes.guards), _of_guards(findings.guards), orders.cause_of)
    causes = _AlertCauses(orders, changes.alerts, findings.alerts)
    _compare(parts["alerts"], _of_alerts(changes.alerts), _of_alerts(findings.alerts), causes.cause_of)
    for cause, times in of_others.items():
        part = parts[_OF_OTHERS[cause]]
        part.equal -= times
        part.unequal[cause] += times
    return parts


def share_of_unequal(parts: Iterable[Identity]) -> float:
    """Returns the share of decisions that are not equal."""
    unequal = equal = 0
    for part in parts:
        unequal += part.unequal.total()
        equal += part.equal
    return unequal / (equal + unequal) if equal + unequal else 0.0


_Moment = tuple[Hashable, int]
"""An event, and its time, in milliseconds since the epoch."""


def _unexplained(event: Hashable, at_ms: int) -> str:
    del event, at_ms
    return UNEXPLAINED


def _compare(
    part: Identity,
    recorded: Iterable[_Moment],
    replayed: Iterable[_Moment],
    cause_of: Callable[[Hashable, int], str] = _unexplained,
) -> None:
    times: dict[Hashable, list[int]] = {}
    for happened, at_ms in recorded:
        times.setdefault(happened, []).append(at_ms)
    for happened, at_ms in replayed:
        near = [other_ms for other_ms in times.get(happened, ()) if abs(other_ms - at_ms) <= LAG_MS]
        if near:
            times[happened].remove(near[0])
            part.equal += 1
        else:
            _note(part, f"only replayed: {happened}", cause_of(happened, at_ms))
    for happened, rest in times.items():
        for at_ms in rest:
            _note(part, f"only recorded: {happened}", cause_of(happened, at_ms))


def _note(part: Identity, example: str, cause: str) -> None:
    part.unequal[cause] += 1
    if cause == UNEXPLAINED and len(part.examples) < MAX_EXAMPLES:
        part.examples.append(example)


class _TaskOrders:
    """Tells which events of tasks depend on the order in which Redis had jobs of a task that ran at once."""

    def __init__(
        self, jobs: Iterable[RecordedJob], recorded: Sequence[GuardEvent], replayed: Sequence[GuardEvent]
    ) -> None:
        self._jobs: dict[_TaskKey, list[_TaskJob]] = {}
        self._lost_ms: dict[_TaskKey, int] = {}
        """When the first job of a task began whose worker was lost."""
        for job in jobs:
            record = job.record
            if record.task_key is not None:
                task = record.tenant, record.task_key
                of_task = _TaskJob.of(job)
                self._jobs.setdefault(task, []).append(of_task)
                if is_of_lost_worker(job):
                    self._lost_ms[task] = min(of_task.begins_ms, self._lost_ms.get(task, of_task.begins_ms))
        self._events = {moment: event for events in (recorded, replayed) for moment, event in _by_moment(events)}
        self._rules = {_rule_of(event) for event in recorded} & {_rule_of(event) for event in replayed}
        """The rules that both sides have."""
        self._resets = [event for event in recorded if event.kind == "reset"]
        self._of_incidents: dict[str, str] = {}
        """The causes of such events, by the keys of their incidents."""

    def cause_of(self, moment: Hashable, at_ms: int) -> str:
        """Returns the cause of an event that one side alone has."""
        event = self._events[moment, at_ms]
        cause = UNEXPLAINED
        if at_ms >= self._lost_ms.get((event.tenant, event.task_key), math.inf):
            cause = WORKER_LOST
        elif self._is_of_some_order(event, at_ms):
            cause = TASK_ORDER
        self._of_incidents |= {key_of(kind, event.tenant, event.task_key): cause for kind in _OF_TASKS}
        return cause

    def _is_of_some_order(self, event: GuardEvent, at_ms: int) -> bool:
        """Returns True if a rule that both sides have found figures that some order of jobs at once gives."""
        task = event.tenant, event.task_key
        resets = (ms_from_time(reset.at) for reset in self._resets if (reset.tenant, reset.task_key) == task)
        since_ms = max((reset_ms for reset_ms in resets if reset_ms <= at_ms), default=0)
        jobs = [job for job in self._jobs.get(task, ()) if since_ms <= job.begins_ms <= at_ms]
        causing_jobs = (job for job in jobs if job.execution_id == event.execution_id)
        decided_ms = min((job.decided_ms(event) for job in causing_jobs), default=at_ms)
        at_once = [job for job in jobs if job.ends_ms >= decided_ms]
        if _rule_of(event) not in self._rules or len(at_once) < 2:
            return False
        before = [job for job in jobs if job.ends_ms < decided_ms]
        bounds = (
            (event.iterations, sum(job.is_iteration for job in before), len(at_once)),
            (event.tokens, sum(job.tokens for job in before), sum(job.tokens for job in at_once)),
            (event.cost, sum(job.cost for job in before), sum(job.cost for job in at_once)),
            (event.total_failures, sum(job.failed for job in before), sum(job.failed for job in at_once)),
        )
        return all(least <= figure <= least + more for figure, least, more in bounds)

    def cause_of_incident(self, key: str) -> str | None:
        """Returns the cause of an alert on such an event by the key of its incident; None if it is on none."""
        return self._of_incidents.get(key)


_TaskKey = tuple[str | None, str]
"""The tenant and the key of a task."""


@dataclass(frozen=True, slots=True)
class _TaskJob:
    """A job's part in its task, and the times between which it has it, in milliseconds since the epoch."""

    execution_id: str
    begins_ms: int
    asked_ms: int
    """The earliest time of its last call."""
    counted_ms: int
    """The earliest time at which its task counts it."""
    ends_ms: int
    is_iteration: bool
    tokens: int
    cost: int
    failed: bool

    @classmethod
    def of(cls, job: RecordedJob) -> _TaskJob:
        record = job.record
        outcome = outcome_of(record, _ANY_RULES)
        calls = [logged.attempt for logged in job.attempts]
        is_timed = record.task_counted_at is not None and all(call.task_asked_at is not None for call in calls)
        margin_ms = 0 if is_timed else RACE_MS
        begins_ms = asked_ms = ms_from_time(record.dispatched_at)
        if is_timed and job.begins_ms - begins_ms <= RACE_MS:  # else a lost worker may have asked for it before
            begins_ms = job.begins_ms
            asked_ms = job.attempts[-1].asked_ms if job.attempts else begins_ms
        counted_ms = ms_from_time(record.task_counted_at or record.completed_at)
        times = begins_ms - margin_ms, asked_ms - margin_ms, counted_ms - margin_ms, counted_ms + margin_ms
        is_iteration = outcome.is_step and (outcome.called or outcome.failed is not None)
        figures = is_iteration, outcome.tokens, outcome.cost, outcome.failed is True
        return cls(record.execution_id, *times, *figures)

    def decided_ms(self, event: GuardEvent) -> int:
        """Returns the earliest time at which it may have caused an event."""
        return self.asked_ms if event.rule in _OF_CALLS else self.counted_ms


_ANY_RULES = GuardRules()
_OF_CALLS: frozenset[GuardRule | None] = frozenset({"max_iterations", "max_tokens", "max_cost"})
"""The rules that a call asks about; others are those of a job's end."""


def _rule_of(event: GuardEvent) -> Hashable:
    """Returns the rule of an event, with its limit, which stands in brackets."""
    return event.agent, event.kind, event.rule, event.reason.rpartition("(")[2]


class _AlertCauses:
    """Tells which alerts depend on when the alerter came to them."""

    def __init__(self, orders: _TaskOrders, recorded: Iterable[Alert], replayed: Iterable[Alert]) -> None:
        self._orders = orders
        alerts = [*recorded, *replayed]
        self._explaining = [ms_from_time(alert.at) for alert in alerts if began_with(alert) in EXPLAINING]
        """When incidents changed that may explain others."""
        self._times: dict[Hashable, list[int]] = {}
        for moment, at_ms in _of_alerts(alerts):
            self._times.setdefault(moment, []).append(at_ms)

    def cause_of(self, alert: Hashable, at_ms: int) -> str:
        """Returns the cause of an alert that one side alone has."""
        others = [other_ms for other_ms in self._times[alert] if abs(other_ms - at_ms) > LAG_MS]
        match alert:
            case (str(key), _, _) if (cause := self._orders.cause_of_incident(key)) is not None:
                return cause
            case (str(), "resolved", "warning") if _are_near(others, at_ms):
                # By the passing of time, which a busy alerter notices late: the other side has it later, or earlier.
                return LATE_ALERTER
            case (str(key), "opened" | "repeated" | "resolved", _) if key.partition("/")[0] in FAILURES:
                return LATE_ALERTER if _are_near(self._explaining, at_ms) else UNEXPLAINED
            case _:
                return UNEXPLAINED


def _are_near(times_ms: Iterable[int], at_ms: int) -> bool:
    return any(abs(other_ms - at_ms) <= VERY_LATE_MS for other_ms in times_ms)


_OF_TASKS: tuple[AlertEvent, ...] = ("guard_tripped", "guard_soft_cap")


def _of_transition(event: BreakerTransition) -> Hashable:
    counts = event.consecutive_failures, event.total_failures, event.unique_errors, event.errors, event.error_hash
    states = event.from_state, event.to_state, event.waits, event.rule, event.reason
    return event.agent, event.model, event.version, *states, *counts, event.open_for


def _of_budgets(events: Iterable[BudgetEvent]) -> Iterable[_Moment]:
    reached = (event for event in events if event.kind in {"soft_cap", "hard_cap"})
    return (((event.event_id, event.kind, event.limit), ms_from_time(event.at)) for event in reached)


def _of_guards(events: Iterable[GuardEvent]) -> Iterable[_Moment]:
    return (moment for moment, event in _by_moment(events) if event.kind != "reset")


def _by_moment(events: Iterable[GuardEvent]) -> Iterable[tuple[_Moment, GuardEvent]]:
    """Yields events of guards after what they say, and when."""
    for event in events:
        names = event.tenant, event.task_key, event.kind, event.rule, event.reason, event.agent
        yield (names, ms_from_time(event.at)), event


def _of_alerts(alerts: Iterable[Alert]) -> Iterable[_Moment]:
    replayed = (alert for alert in alerts if is_replayed(alert))
    return (((alert.key, alert.change, alert.severity), ms_from_time(alert.at)) for alert in replayed)
