"""Recorded jobs as a replay takes them, and the policy under which it replays them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import NamedTuple
from zoneinfo import ZoneInfo

from breakwater.alerts.contract import Alert
from breakwater.alerts.settings import Alerts
from breakwater.breakers.contract import BreakerTransition
from breakwater.breakers.rules.breaker import BreakerKey
from breakwater.breakers.settings import BreakerRules
from breakwater.calls.settings import RetryPolicy
from breakwater.jobs.contract.execution import Attempt, Execution
from breakwater.kernel.immutable import computed_once, immutable
from breakwater.kernel.types import ms_from_time
from breakwater.limits.contract import BudgetEvent, GuardEvent, LimitEvent
from breakwater.limits.rules.budget import LimitTable
from breakwater.limits.settings import GuardRules
from breakwater.replay.rules.counters import CountedPlace
from breakwater.replay.rules.prices import Prices


class LoggedAttempt(NamedTuple):
    """A recorded attempt.

    Attributes:
        sequence: its sequence number in the event log.
        at_ms: the time at which the log stored it, in milliseconds since the epoch.
        asked_ms: the time at which its call was admitted or refused, in milliseconds since the epoch: of an admission
            by Redis' clock, of a refusal by its worker's, unless the job's task tells it.
        attempt: the record.
    """

    sequence: int
    at_ms: int
    asked_ms: int
    attempt: Attempt

    @classmethod
    def of(cls, sequence: int, stored_at: datetime, attempt: Attempt) -> LoggedAttempt:
        """Returns an attempt that the log has at a place and since a time."""
        asked_at = attempt.task_asked_at
        if asked_at is None:
            asked_at = attempt.completed_at if attempt.short_circuited else attempt.reserved_at or attempt.started_at
        return cls(sequence, ms_from_time(stored_at), ms_from_time(asked_at), attempt)


@immutable(slots=False)
class RecordedJob:
    """A job that has ended.

    Attributes:
        record: its record.
        attempts: its attempts, in order.
        entered_ms: a time at which it was in its task, in milliseconds since the epoch; None if no event of its guard
            tells one.
    """

    record: Execution
    attempts: tuple[LoggedAttempt, ...]
    entered_ms: int | None = None

    @computed_once
    def begins_ms(self) -> int:
        """The time at which it first asks for a call, in milliseconds since the epoch; without any, of its start.

        It may wait for room from then on, until it is admitted or refused.
        """
        if not self.attempts:
            return ms_from_time(self.record.dispatched_at)
        first = self.attempts[0]
        begins_ms = first.asked_ms - first.attempt.backoff_ms
        return begins_ms if self.entered_ms is None else min(begins_ms, self.entered_ms)


@dataclass(frozen=True, slots=True)
class Changes:
    """The decisions of the services while the jobs ran, each in the order of its stream."""

    transitions: Sequence[BreakerTransition] = ()
    budgets: Sequence[BudgetEvent] = ()
    guards: Sequence[GuardEvent] = ()
    alerts: Sequence[Alert] = ()
    limits: Sequence[LimitEvent] = ()
    """Changes of limits that the plane keeps, and raises of limits, from before the jobs, too."""
    earlier_transitions: Sequence[BreakerTransition] = ()
    """The latest transition of each breaker before the jobs."""


@dataclass(frozen=True, slots=True)
class RecordedDays:
    """Days of the record without a gap.

    Attributes:
        jobs: their jobs, in the order in which they began.
        changes: what the services decided then.
        used_before: what earlier calls have used in the periods in which they begin.
    """

    jobs: Sequence[RecordedJob]
    changes: Changes = field(default_factory=Changes)
    used_before: Mapping[CountedPlace, int] = field(default_factory=dict[CountedPlace, int])


@dataclass(frozen=True, slots=True)
class AgentPolicy:
    """The settings of an agent that decide what its jobs do.

    Attributes:
        chain: the models to try, in order.
        retry: the rules for further tries.
        breaker: the rules of its breakers; None if they are switched off.
        guard: the limits of its tasks; None if they are switched off.
        timeout_s: the time limit of an attempt.
        total_timeout_s: the time limit of a job.
        max_cost: the most that a job may cost, in nano-dollars; None without such a limit.
    """

    chain: tuple[str, ...]
    retry: RetryPolicy
    breaker: BreakerRules | None
    guard: GuardRules | None
    timeout_s: float
    total_timeout_s: float
    max_cost: int | None


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings of a config that decide what jobs do.

    Attributes:
        agents: the agents, by name.
        breakers: the rules of the breakers of the agents' models.
        limits: the limits on spend and rates.
        zone: the time zone of budgets.
        alerts: the settings of alerts.
        prices: the prices of the agents' models.
        amounts: the amounts of limits that the plane keeps, by their ids, if they are not those of the record.
    """

    agents: Mapping[str, AgentPolicy]
    breakers: Mapping[BreakerKey, BreakerRules]
    limits: LimitTable
    zone: ZoneInfo
    alerts: Alerts
    prices: Prices
    amounts: Mapping[str, int] = field(default_factory=dict[str, int])


def is_of_lost_worker(job: RecordedJob) -> bool:
    """Returns True if a worker of a job was lost: in a call, or after its task had counted the job."""
    has_asked = any(logged.attempt.task_asked_at is not None for logged in job.attempts)
    was_counted_before = has_asked and job.record.task_counted_at is None
    return was_counted_before or any(logged.attempt.outcome == "worker_lost" for logged in job.attempts)


def in_order(jobs: Iterable[RecordedJob], guards: Iterable[GuardEvent] = ()) -> list[RecordedJob]:
    """Returns jobs in the order in which they began.

    A worker that dies leaves its job to another, which asks later. An event of `guards` says when a job was in its task
    already, and when the call had asked that stopped it.
    """
    by_job: dict[str, list[GuardEvent]] = defaultdict(list)
    for event in guards:
        if event.execution_id is not None and event.kind != "reset":
            by_job[event.execution_id].append(event)
    asked = (
        _as_its_guard_saw(job, events) if (events := by_job.get(job.record.execution_id)) is not None else job
        for job in jobs
    )
    return sorted(asked, key=lambda job: (job.begins_ms, job.attempts[0].sequence if job.attempts else 0))


def _as_its_guard_saw(job: RecordedJob, events: Iterable[GuardEvent]) -> RecordedJob:
    """Returns a job that enters its task, and whose call stops it, no later than its guard's events say."""
    if not job.attempts:
        return job
    *earlier, last = job.attempts
    dispatched_ms = ms_from_time(job.record.dispatched_at)
    since_ms = dispatched_ms if not earlier else ms_from_time(earlier[-1].attempt.completed_at)
    entered_ms = job.attempts[0].asked_ms
    for event in events:
        at_ms = ms_from_time(event.at)
        if event.kind == "tripped" and last.attempt.refused_reason == "guard_tripped" and at_ms >= since_ms:
            last = last._replace(asked_ms=min(last.asked_ms, at_ms))
        if at_ms >= dispatched_ms:
            entered_ms = min(entered_ms, at_ms)
    return replace(job, attempts=(*earlier, last), entered_ms=entered_ms)
