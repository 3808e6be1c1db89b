"""The outcome of a replay day by day, and the comparison of two.

A day is the unit of evidence: jobs of a day share its outages and its load, so a thousand of them may tell as little as
one. Two policies are compared on the same days, and the intervals are of the mean difference of a day.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Literal, NamedTuple
from zoneinfo import ZoneInfo

from breakwater.jobs.rules.record import totals
from breakwater.kernel.types import ms_from_time
from breakwater.replay.rules.effects import Estimate
from breakwater.replay.rules.engine import ReplayedJob

LOST = 0.001
"""The share of jobs that may lose their answers, at most, for a change to count as harmless."""

WON = 0.005
"""The share of jobs that must win an answer for a change to be worth its while."""

SAVED = 0.01
"""The share of the spend that must be saved."""

FASTER = 0.05
"""The share of the 95th percentile of durations that must be saved."""

DEARER = 1.05
"""The most that an answer may cost under a change that wins answers, as a multiple of what it cost before."""


@dataclass(slots=True)
class Day:
    """The jobs of a day under a policy.

    Attributes:
        jobs: how many there are.
        answered: those that have an answer.
        unknown: those that history can't tell the end of.
        cost: what they cost, in nano-dollars.
        durations_ms: their durations, in milliseconds.
    """

    jobs: int = 0
    answered: int = 0
    unknown: int = 0
    cost: int = 0
    durations_ms: array[int] = field(default_factory=lambda: array("q"))

    @property
    def p95_ms(self) -> float:
        """The duration that 95 % of its jobs don't exceed, in milliseconds."""
        ordered = sorted(self.durations_ms)
        return float(ordered[math.ceil(0.95 * len(ordered)) - 1]) if ordered else 0.0

    def add(self, other: Day) -> None:
        """Adds the jobs of another agent."""
        self.jobs += other.jobs
        self.answered += other.answered
        self.unknown += other.unknown
        self.cost += other.cost
        self.durations_ms.extend(other.durations_ms)


class JobsOf(NamedTuple):
    """Some jobs: those that count in a limit, by its id; or those of an agent; or all."""

    agent: str | None = None
    limit: str | None = None


ALL_JOBS = JobsOf()


class DailyOutcome:
    """The outcome of a replay: the days of each agent, and of the jobs that count in each of some limits."""

    def __init__(self, zone: ZoneInfo, limits_of: Mapping[str, Collection[str]] = MappingProxyType({})) -> None:
        """Takes the time zone of days, and the limits that jobs count in, by the ids of the executions."""
        self._zone = zone
        self._limits_of = limits_of
        self._of_agents: dict[str, dict[str, Day]] = defaultdict(dict)
        self._of_limits: dict[str, dict[str, Day]] = defaultdict(dict)

    def add(self, run: ReplayedJob) -> None:
        """Counts a job that has ended."""
        record = run.job.record
        name = f"{record.dispatched_at.astimezone(self._zone):%Y-%m-%d}"
        self._add(run, self._of_agents[record.agent].setdefault(name, Day()))
        for limit in self._limits_of.get(record.execution_id, ()):
            self._add(run, self._of_limits[limit].setdefault(name, Day()))

    @staticmethod
    def _add(run: ReplayedJob, day: Day) -> None:
        record = run.job.record
        day.jobs += 1
        day.unknown += run.unknown
        if run.follows:
            day.answered += record.reason is None
            day.cost += record.total_cost or 0
            day.durations_ms.append(record.duration_ms)
            return
        is_answered = run.reason is None and not run.unknown
        day.answered += is_answered
        day.cost += totals(run.attempts, answered=is_answered).total_cost or 0
        day.durations_ms.append(max(0, run.ended_ms - ms_from_time(record.queued_at)))

    def days(self, jobs: JobsOf) -> dict[str, Day]:
        """Returns the days of some jobs, by name and in order."""
        if jobs.limit is not None:
            return dict(sorted(self._of_limits[jobs.limit].items()))
        if jobs.agent is not None:
            return dict(sorted(self._of_agents[jobs.agent].items()))
        together: dict[str, Day] = defaultdict(Day)
        for of_agent in self._of_agents.values():
            for name, day in of_agent.items():
                together[name].add(day)
        return dict(sorted(together.items()))


@dataclass(frozen=True, slots=True)
class DailyEffect:
    """The effect of a change on a mean day.

    Attributes:
        days: the number of days.
        jobs: the jobs of a day.
        answered: those with an answer.
        spend: what they cost, in nano-dollars.
        p95_ms: the 95th percentile of their durations, in milliseconds.
        harms_others: True if other jobs lose answers.
    """

    days: int
    jobs: float
    answered: Estimate
    spend: Estimate
    p95_ms: Estimate
    harms_others: bool


Merit = Literal["answers", "spend", "time"]


def daily_effect(before: DailyOutcome, after: DailyOutcome, jobs: JobsOf, names: Collection[str]) -> DailyEffect:
    """Returns the effect of a change on some jobs, on some days.

    Args:
        before: the outcome without the change.
        after: the outcome with it.
        jobs: the jobs.
        names: the days.
    """
    days_before = [day for name, day in before.days(jobs).items() if name in names]
    days_after = [day for name, day in after.days(jobs).items() if name in names]
    count = sum(day.jobs for day in days_before)
    all_before, all_after = (
        [day for name, day in outcome.days(ALL_JOBS).items() if name in names] for outcome in (before, after)
    )
    other_jobs = sum(day.jobs for day in all_before) - count
    others_lose = _answered(all_before) - _answered(days_before) - (_answered(all_after) - _answered(days_after))
    return DailyEffect(
        len(days_before),
        count / max(1, len(days_before)),
        difference([day.answered for day in days_before], [day.answered for day in days_after]),
        difference([day.cost for day in days_before], [day.cost for day in days_after]),
        difference([day.p95_ms for day in days_before], [day.p95_ms for day in days_after]),
        others_lose > LOST * other_jobs,
    )


def _answered(days: Sequence[Day]) -> int:
    return sum(day.answered for day in days)


def merit_of(effect: DailyEffect) -> Merit | None:
    """Returns the merit of a change that is sure to serve better; None if it is not.

    It must win answers at the price of others, or lose none and save money or time, and not cost more of the other.
    """
    answered = effect.answered
    spend = effect.spend
    p95_ms = effect.p95_ms
    if effect.harms_others or answered.low < answered.before - LOST * effect.jobs:
        return None
    if answered.low > answered.before and answered.after - answered.before >= WON * effect.jobs:
        was = spend.before / answered.before if answered.before else math.inf
        return "answers" if spend.after <= DEARER * was * answered.after else None
    if _is_less(spend, SAVED) and not _is_more(p95_ms, FASTER):
        return "spend"
    return "time" if _is_less(p95_ms, FASTER) and not _is_more(spend, SAVED) else None


def _is_less(figure: Estimate, share: float) -> bool:
    """Returns True if a figure is sure to be less than before, and by a share that matters."""
    return figure.high < figure.before and figure.after <= figure.before * (1 - share)


def _is_more(figure: Estimate, share: float) -> bool:
    """Returns True if a figure is sure to be more than before, and by a share that matters."""
    return figure.low > figure.before and figure.after > figure.before * (1 + share)


def gain_of(effect: DailyEffect, merit: Merit) -> float:
    """Returns how much better a day is: answers, nano-dollars or milliseconds."""
    match merit:
        case "answers":
            return effect.answered.after - effect.answered.before
        case "spend":
            return effect.spend.before - effect.spend.after
        case "time":
            return effect.p95_ms.before - effect.p95_ms.after


def difference(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """Returns the means of two figures of the same days, and the interval of 95 % of their difference."""
    if not before:
        return Estimate(0.0, 0.0, 0.0, 0.0)
    differences = [new - old for old, new in zip(before, after, strict=True)]
    mean = fmean(before)
    change = fmean(differences)
    margin = math.inf
    if len(differences) > 1:
        margin = _t(len(differences) - 1) * stdev(differences) / math.sqrt(len(differences))
    return Estimate(mean, mean + change, mean + change - margin, mean + change + margin)


def _t(freedom: int) -> float:
    """Returns how many standard errors on either side hold 95 % of Student's distribution; within 1 % from 3 on."""
    z = 1.959964
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))
