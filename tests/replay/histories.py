"""Small made-up histories: jobs of some days, as a policy would have had them live."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from breakwater.config import parse_config
from breakwater.jobs.contract.execution import Attempt, ErrorInfo, Execution
from breakwater.jobs.rules.record import status_of, totals
from breakwater.kernel.types import time_from_ms
from breakwater.limits.contract import LimitEvent
from breakwater.replay.policy import policy_of
from breakwater.replay.rules.engine import Replay, ReplayedJob
from breakwater.replay.rules.history import Changes, LoggedAttempt, Policy, RecordedDays, RecordedJob, in_order
from breakwater.replay.rules.world import World

FIRST_DAY = datetime(2026, 11, 2, tzinfo=UTC)

OVERLOADED = ErrorInfo(
    kind="server", class_="InternalServerError", message="overloaded", status_code=500, retryable=True, hash="1a2b3c4d"
)


@dataclass(frozen=True, slots=True)
class Model:
    """A model that answers by chance.

    Attributes:
        name: its id.
        usd: the cost of an answer; failures cost nothing.
        fails: the share of its calls that fail at a time.
        median_s: the median of the durations of its answers, in seconds.
        hangs: the share of its calls that have no answer for two minutes.
    """

    name: str
    usd: float
    fails: Callable[[datetime], float] = lambda _: 0.0
    median_s: float = 1.0
    hangs: float = 0.0

    def call(self, job: Execution, at: datetime, chance: random.Random) -> Attempt:
        """Returns a call of a job."""
        is_failed = chance.random() < self.fails(at)
        duration_s = 120.0 if chance.random() < self.hangs else self.median_s * chance.lognormvariate(0.0, 0.5)
        duration_ms = 200 if is_failed else round(duration_s * 1000)
        cost = round(self.usd * 10**9)
        return Attempt(
            attempt_id=f"{job.execution_id}-{self.name}-{at:%H%M%S}",
            execution_id=job.execution_id,
            job_id=job.job_id,
            agent=job.agent,
            tenant=job.tenant,
            task_key=job.task_key,
            number=1,
            model=self.name,
            provider="p",
            started_at=at,
            reserved_at=at,
            completed_at=at + timedelta(milliseconds=duration_ms),
            duration_ms=duration_ms,
            outcome="error" if is_failed else "success",
            cause="first",
            error=OVERLOADED if is_failed else None,
            counts_for_breaker=is_failed,
            cost=0 if is_failed else cost,
            cost_basis="billed",
            reserved=2 * cost,
        )


def jobs_at(
    agent: str, times: Iterable[datetime], task_of: Callable[[int], str | None] = lambda _: None
) -> Iterator[Execution]:
    """Yields the jobs of an agent that begin at some times; `task_of` names the task of each by its number."""
    for number, at in enumerate(times):
        yield Execution(
            execution_id=f"{agent}-{number}",
            job_id=f"job-{agent}-{number}",
            agent=agent,
            status="succeeded",
            task_key=task_of(number),
            queued_at=at,
            dispatched_at=at,
            completed_at=at,
            duration_ms=0,
        )


def every(minutes: float, days: int = 10, hours: float = 8) -> list[datetime]:
    """Returns times of working days that are so many minutes apart."""
    steps = round(hours * 60 / minutes)
    starts = (FIRST_DAY + timedelta(days=day, hours=9) for day in range(days))
    return [start + timedelta(minutes=minutes * step) for start in starts for step in range(steps)]


class LiveModels(World):
    """Models that answer whenever they are called."""

    def __init__(self, models: Iterable[Model], job: Execution) -> None:
        """Takes the models, and any job."""
        super().__init__()
        self._models = {model.name: model for model in models}
        self._job = job

    def draw(self, model: str, agent: str, at_ms: int, seed: str, waited_ms: int | None = None) -> Attempt:  # noqa: ARG002
        """Calls a model."""
        return self._models[model].call(self._job, time_from_ms(at_ms), random.Random(seed))


def lived(
    text: str,
    jobs: Iterable[Execution],
    models: Iterable[Model],
    limits: Sequence[LimitEvent] = (),
    *,
    answers_at_once: bool = False,
) -> RecordedDays:
    """Returns the record that jobs would have under a config, with models that answer by chance, the same each time.

    `limits` are set by API. With `answers_at_once`, a retry meets a model as it is then; else, as half a minute later.
    """
    chance = random.Random(7)
    policy = policy_of(parse_config(text))
    by_name = {model.name: model for model in models}
    jobs = list(jobs)
    starts: list[RecordedJob] = []
    pool: list[Attempt] = []
    for job in jobs:
        chain = policy.agents[job.agent].chain
        calls = [by_name[name].call(job, job.queued_at, chance) for name in chain]
        # What another try would have got.
        pool += [by_name[name].call(job, job.queued_at + timedelta(seconds=30), chance) for name in chain]
        starts.append(RecordedJob(job.model_copy(update={"fallback_chain": chain}), _logged(calls[:1])))
        pool += calls
    ended: list[ReplayedJob] = []
    world = LiveModels(by_name.values(), jobs[0]) if answers_at_once else World(pool)
    replay = Replay(policy, _without_time_limits(policy), Changes(limits=limits), world, on_end=ended.append)
    replay.run(in_order(starts))
    findings = replay.finish()
    changes = Changes(findings.transitions, findings.budgets, findings.guards, findings.alerts, limits)
    return RecordedDays(in_order(map(_recorded, ended)), changes)


def _without_time_limits(policy: Policy) -> Policy:
    agents = {name: replace(agent, timeout_s=3600.0) for name, agent in policy.agents.items()}
    return replace(policy, agents=agents)


def _logged(attempts: Iterable[Attempt]) -> tuple[LoggedAttempt, ...]:
    return tuple(
        LoggedAttempt.of(round(attempt.completed_at.timestamp() * 1000), attempt.completed_at, attempt)
        for attempt in attempts
    )


def _recorded(run: ReplayedJob) -> RecordedJob:
    record = run.job.record
    attempts = [attempt.model_copy(update={"number": number}) for number, attempt in enumerate(run.attempts, 1)]
    sums = totals(attempts, answered=run.reason is None)
    completed_at = max([time_from_ms(run.ended_ms), *(attempt.completed_at for attempt in attempts)])
    ended = record.model_copy(
        update={
            "status": status_of(run.reason),
            "reason": run.reason,
            "error": run.error,
            "chosen_model": run.chosen_model,
            "attempts": tuple(attempts),
            "attempts_count": len(attempts),
            "total_cost": sums.total_cost,
            "wasted_cost": sums.wasted_cost,
            "completed_at": completed_at,
            "duration_ms": round((completed_at - record.queued_at).total_seconds() * 1000),
        }
    )
    return RecordedJob(ended, _logged(attempts))
