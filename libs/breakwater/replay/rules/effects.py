"""The effects of a policy on recorded jobs, counted as they end: what it would have refused, saved and cost."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from heapq import heappush, heappushpop
from itertools import accumulate, chain
from zoneinfo import ZoneInfo

from breakwater.alerts.contract import Alert
from breakwater.breakers.contract import BreakerTransition
from breakwater.jobs.contract.execution import Attempt, Reason
from breakwater.jobs.rules.record import totals
from breakwater.kernel.types import ms_from_time, time_from_ms
from breakwater.limits.contract import BudgetEvent, GuardEvent
from breakwater.limits.rules.budget import period
from breakwater.replay.rules.alerts import is_replayed
from breakwater.replay.rules.engine import ReplayedEvent, ReplayedJob
from breakwater.replay.rules.history import Changes

MOST_CHANGED = 10
"""The number of jobs that are named, those whose cost or end changes most."""

REFUSALS: frozenset[Reason | None] = frozenset({"breaker_open", "budget_exceeded", "guard_tripped", "rate_limited"})
"""The reasons of jobs that were refused."""

_Z = 1.96
"""Standard deviations on either side that hold 95 % of what chance may give."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure under the policy beside the recorded one.

    Attributes:
        before: as recorded.
        after: under the policy.
        low: the least that is likely (95 %), as some outcomes are drawn and some unknown.
        high: the most.
    """

    before: float
    after: float
    low: float
    high: float


@dataclass(slots=True)
class DaySpend:
    """Nano-dollars of a day: recorded and under the policy, in all and wasted."""

    before: int = 0
    after: int = 0
    wasted_before: int = 0
    wasted_after: int = 0


@dataclass(slots=True)
class Spread:
    """The spread of numbers, of which only what it needs is kept."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, number: float) -> None:
        """Adds a number."""
        self.count += 1
        self.total += number
        self.squares += number * number

    @property
    def variance(self) -> float:
        """The variance of their sum, if each may as well be any of the others."""
        return max(0.0, self.squares - self.total * self.total / self.count) if self.count else 0.0

    @property
    def mean(self) -> float:
        """Their mean."""
        return self.total / self.count if self.count else 0.0

    @property
    def deviation(self) -> float:
        """The standard deviation of one of them."""
        return math.sqrt(self.variance / self.count) if self.count else 0.0


@dataclass(slots=True)
class StepFigures:
    """Nano-dollars and refused jobs of a step of time: recorded and under the policy."""

    before: int = 0
    after: int = 0
    refused_before: int = 0
    refused_after: int = 0

    def add(self, step: StepFigures) -> None:
        """Adds the figures of another step."""
        self.before += step.before
        self.after += step.after
        self.refused_before += step.refused_before
        self.refused_after += step.refused_after


STEPS_S = (60, 300, 900, 1_800, 3_600, 7_200, 21_600, 86_400)
"""The lengths of steps of time in seconds; each divides the next."""

MOST_STEPS = 1_500
"""The most steps that a stretch of time is divided into, unless it is longer than so many days."""


def step_ms_of(length_ms: int, most_steps: int = MOST_STEPS) -> int:
    """Returns the length of the steps that a stretch of time is divided into, in milliseconds."""
    return 1_000 * next((step_s for step_s in STEPS_S if length_ms <= 1_000 * step_s * most_steps), STEPS_S[-1])


@dataclass(frozen=True, slots=True, order=True)
class ChangedJob:
    """A job that ends otherwise, or costs something else.

    Attributes:
        weight: how much it changes: a lost or won answer, then the nano-dollars.
        execution_id: the job.
        agent: its agent.
        before: its end as recorded: the model that answered, or the reason.
        after: the same under the policy.
        cost_before: its recorded cost, in nano-dollars.
        cost_after: its cost under the policy, in nano-dollars.
    """

    weight: tuple[int, int]
    execution_id: str
    agent: str
    before: str
    after: str
    cost_before: int
    cost_after: int


@dataclass(frozen=True, slots=True)
class CapReached:
    """A limit in a period, and when its spend has reached it: as recorded and under the policy; None if it has not."""

    budget: str
    period: str
    before: datetime | None
    after: datetime | None


@dataclass(slots=True)
class Effects:
    """The effects on the jobs that have been added, of one agent or of all.

    Attributes:
        zone: the time zone of days.
        agent: the only agent whose jobs count; None for all.
        step_ms: the length of the steps of time, in milliseconds.
        jobs: how many jobs count.
        unknown: those of them that history can't tell the end of.
        left_out: jobs that do not count, as history can't tell their end.
        drawn: those of them with a call whose outcome is drawn.
        refused_jobs: jobs that are refused, recorded and under the policy.
        newly_refused: jobs that are refused, and were not.
        refused_no_more: jobs that were refused, and are not.
        lost: jobs that had an answer, and have none.
        won: jobs that had none, and have one.
        changed_model: jobs that another model answers.
        sooner: jobs that end sooner.
        diverging: those of them whose rules, or the calls that these have met, are not those of the record.
        chanced: those of them whose course chance decides: with drawn calls, several attempts, or an open breaker.
        chanced_ends: how many of these are refused, have an answer, or neither.
        calls: the calls of models, recorded and under the policy.
        days: the spend of each day.
        steps: the spend and refusals of each step, by its beginning in milliseconds since the epoch.
        own_rules: jobs that brought rules of their own.
        unpriced: calls whose cost is unknown under the policy, by model.
        sizeless: refused calls without what they would have reserved, as earlier versions recorded them.
        leaves_out_unknown: True if jobs do not count whose end history can't tell.
        events: the counted events of the replay.
    """

    zone: ZoneInfo
    agent: str | None = None
    step_ms: int = 1_000 * STEPS_S[-1]
    jobs: int = 0
    unknown: int = 0
    left_out: int = 0
    drawn: int = 0
    refused_jobs: list[int] = field(default_factory=lambda: [0, 0])
    newly_refused: int = 0
    refused_no_more: int = 0
    lost: int = 0
    won: int = 0
    changed_model: int = 0
    sooner: int = 0
    diverging: int = 0
    chanced: int = 0
    chanced_ends: Counter[str] = field(default_factory=Counter[str])
    calls: list[int] = field(default_factory=lambda: [0, 0])
    days: dict[str, DaySpend] = field(default_factory=dict[str, DaySpend])
    steps: dict[int, StepFigures] = field(default_factory=dict[int, StepFigures])
    unpriced: Counter[str] = field(default_factory=Counter[str])
    sizeless: int = 0
    own_rules: int = 0
    leaves_out_unknown: bool = False
    events: EventCounts = field(default_factory=lambda: EventCounts())
    _latest_day: range = range(0)
    """The day of the latest job, in milliseconds since the epoch."""
    _latest_spend: DaySpend = field(default_factory=lambda: DaySpend())
    _durations_before: Counter[int] = field(default_factory=Counter[int])
    _durations_after: Counter[int] = field(default_factory=Counter[int])
    """The numbers of jobs by their milliseconds."""
    _durations_chanced: Counter[int] = field(default_factory=Counter[int])
    """Those of the jobs whose course chance decides."""
    _most_changed: list[ChangedJob] = field(default_factory=list[ChangedJob])
    _drawn_costs: dict[str, Spread] = field(default_factory=dict[str, "Spread"])
    """The costs of drawn calls, by model."""
    _chanced_costs: Spread = field(default_factory=lambda: Spread())
    """The costs of jobs whose course chance decides, without drawn calls."""
    _refused_at_once: Counter[tuple[str, str, int | None]] = field(
        default_factory=Counter[tuple[str, str, "int | None"]]
    )
    """The jobs that a breaker refuses in a version of it, by agent and model: chance opens it for all or none."""
    _own_ms: Spread = field(default_factory=lambda: Spread())
    """The time that the plane itself has taken for jobs, in milliseconds."""
    _unknown_cost: int = 0
    """The recorded nano-dollars of the jobs that history can't tell the end of."""
    _recorded_calls: Counter[str] = field(default_factory=Counter[str])
    """The recorded calls of each model, of all agents."""

    def add(self, run: ReplayedJob) -> None:
        """Counts a job that has ended."""
        record = run.job.record
        calls = 0
        for logged in run.job.attempts:
            if not logged.attempt.short_circuited:
                calls += 1
                self._recorded_calls[logged.attempt.model] += 1
        if self.agent not in (None, record.agent):
            return
        if run.unknown and self.leaves_out_unknown:
            self.left_out += 1
            return
        self.jobs += 1
        self.own_rules += bool(record.own_rules)
        cost = record.total_cost or 0
        wasted = record.wasted_cost or 0
        begun_ms = ms_from_time(record.dispatched_at)
        day = self._day_of(begun_ms)
        day.before += cost
        day.wasted_before += wasted
        self.calls[0] += calls
        self.refused_jobs[0] += record.reason in REFUSALS
        _count(self._durations_before, record.duration_ms)
        step = self._step_of(begun_ms)
        step.before += cost
        step.refused_before += record.reason in REFUSALS
        step.refused_after += run.reason in REFUSALS and not run.unknown
        if run.diverges:
            self._add_chance(run, cost)
        if record.reason == "budget_exceeded":
            self.sizeless += sum(_is_sizeless(logged.attempt) for logged in run.job.attempts)
        if record.cost_basis == "unknown" or not run.follows:
            unpriced = (attempt for attempt in run.attempts if attempt.cost is None and not attempt.short_circuited)
            self.unpriced.update(attempt.model for attempt in unpriced)
        if run.follows:
            step.after += cost
            day.after += cost
            day.wasted_after += wasted
            self.calls[1] += calls
            self.refused_jobs[1] += record.reason in REFUSALS
            _count(self._durations_after, record.duration_ms)
            return
        self._add_changed(run, day, step, cost)

    def add_event(self, event: ReplayedEvent) -> None:
        """Counts an event of the replay."""
        self.events.add(event, self.agent)

    def _add_changed(self, run: ReplayedJob, day: DaySpend, step: StepFigures, cost: int) -> None:
        record = run.job.record
        sums = totals(run.attempts, answered=run.reason is None)
        cost_after = sums.total_cost or 0
        day.after += cost_after
        step.after += cost_after
        day.wasted_after += sums.wasted_cost or 0
        self.calls[1] += sum(not attempt.short_circuited for attempt in run.attempts)
        duration_ms = run.duration_ms
        _count(self._durations_after, duration_ms)
        self.unknown += run.unknown
        if run.drawn:
            self.drawn += 1
        if run.unknown:
            self._unknown_cost += cost
            return
        self.refused_jobs[1] += run.reason in REFUSALS
        had_answer = record.reason is None
        has_answer = run.reason is None
        self.newly_refused += run.reason in REFUSALS and record.reason not in REFUSALS
        self.refused_no_more += run.reason not in REFUSALS and record.reason in REFUSALS
        self.lost += had_answer and not has_answer
        self.won += has_answer and not had_answer
        self.changed_model += had_answer and has_answer and run.chosen_model != record.chosen_model
        self.sooner += duration_ms < record.duration_ms
        changed = ChangedJob(
            (int(had_answer != has_answer), abs(cost_after - cost)),
            record.execution_id,
            record.agent,
            record.chosen_model or record.reason or "answered",
            run.chosen_model or run.reason or "answered",
            cost,
            cost_after,
        )
        if changed.before == changed.after and cost == cost_after:
            return
        if len(self._most_changed) < MOST_CHANGED:
            heappush(self._most_changed, changed)
        else:
            heappushpop(self._most_changed, changed)

    def _add_chance(self, run: ReplayedJob, cost: int) -> None:
        self.diverging += 1
        in_attempts_ms = sum(logged.attempt.duration_ms + logged.attempt.backoff_ms for logged in run.job.attempts)
        self._own_ms.add(run.job.record.duration_ms - in_attempts_ms)
        attempts = run.attempts
        if not attempts:  # history can't tell what its first call gets
            return
        is_by_chance = run.drawn or len(attempts) > 1 or attempts[-1].refused_reason == "breaker_open"
        if not is_by_chance:
            return
        self.chanced += 1
        _count(self._durations_chanced, run.duration_ms)
        end = "refused" if run.reason in REFUSALS else "failed" if run.reason is not None else "answered"
        self.chanced_ends[end] += 1
        for attempt in attempts[-run.drawn :] if run.drawn else ():
            self._drawn_costs.setdefault(attempt.model, Spread()).add(attempt.cost or 0)
        if not run.drawn:
            self._chanced_costs.add(cost)
        if run.reason == "breaker_open":
            self._refused_at_once[run.job.record.agent, attempts[-1].model, run.version] += 1

    def _day_of(self, begun_ms: int) -> DaySpend:
        if begun_ms not in self._latest_day:
            of_day = period("daily", time_from_ms(begun_ms), self.zone)
            self._latest_day = range(of_day.start_ms, of_day.end_ms)
            self._latest_spend = self.days.setdefault(of_day.name, DaySpend())
        return self._latest_spend

    def _step_of(self, begun_ms: int) -> StepFigures:
        start_ms = begun_ms - begun_ms % self.step_ms
        step = self.steps.get(start_ms)
        if step is None:
            step = self.steps[start_ms] = StepFigures()
        return step

    @property
    def most_changed(self) -> list[ChangedJob]:
        """The jobs that change most."""
        return sorted(self._most_changed, reverse=True)

    @property
    def spend(self) -> Estimate:
        """The cost of all jobs, in nano-dollars. Of a job with an unknown end, its calls so far count."""
        before = sum(day.before for day in self.days.values())
        after = sum(day.after for day in self.days.values())
        variance = self._chanced_costs.variance
        for model, costs in self._drawn_costs.items():
            # The draws vary, so does what would have been, and the calls drawn from are themselves a few of many.
            variance += costs.variance * (2 + costs.count / max(1, self._recorded_calls[model]))
        typical = after / self.jobs if self.jobs else 0.0
        margin = _Z * math.sqrt(variance + self._squares_at_once * typical * typical)
        unknown = max(self._unknown_cost, self.unknown * typical)
        return Estimate(before, after, max(0.0, after - margin), after + margin + unknown)

    @property
    def waste(self) -> Estimate:
        """The cost of calls that gave no answer, in nano-dollars."""
        before = sum(day.wasted_before for day in self.days.values())
        after = sum(day.wasted_after for day in self.days.values())
        spread = self.spend.after - self.spend.low
        return Estimate(before, after, max(0.0, after - spread), after + spread)

    @property
    def refused(self) -> Estimate:
        """The jobs that are refused."""
        before, after = self.refused_jobs
        return replace(self.of_jobs(after, "refused"), before=before)

    @property
    def _squares_at_once(self) -> int:
        """The variance of the jobs that breakers refuse, if an opening may as well not have been, or been twice."""
        return sum(jobs * jobs for jobs in self._refused_at_once.values())

    def of_jobs(self, after: int, *ends: str) -> Estimate:
        """Returns a number of jobs with its interval.

        Args:
            after: the number under the policy.
            ends: the ends of such jobs in `chanced_ends`.
        """
        number = sum(self.chanced_ends[end] for end in ends)
        low, high = _likely(number, self.chanced)
        at_once = _Z * math.sqrt(self._squares_at_once)
        least = max(0.0, math.floor(after - math.hypot(number - low, at_once)))
        return Estimate(0, after, least, math.ceil(after + math.hypot(high - number, at_once)) + self.unknown)

    def duration_ms(self, share: float) -> Estimate:
        """Returns the duration that a share of the jobs does not exceed, in milliseconds.

        Its interval is that of the number of jobs that end by then: chance decides the course of some, and the time
        that the plane itself takes, whether others near it do. On a faster or a slower machine, that time may be none
        or twice what it was, for all of them.
        """
        after = self._durations_after
        place = share * after.total()
        [planned] = _at(after, place)
        ended_by_then = _jobs_within(self._durations_chanced, 0, planned)
        # Of few jobs, all or none may have ended by then: two more of each keep their share off the ends.
        ended_share = (ended_by_then + 2) / (self.chanced + 4)
        own_ms = self._own_ms.deviation
        near = min(max(0, self.diverging - self.chanced), _jobs_within(after, planned - own_ms, planned + own_ms))
        variance = self._variance_of_draws * ended_share * (1 - ended_share) + self._squares_at_once + near / 2
        spread = _Z * math.sqrt(variance) + self.unknown
        [before] = _at(self._durations_before, share * self._durations_before.total())
        low, high = _at(after, place - spread, place + spread)
        return Estimate(before, planned, max(0.0, low - self._own_ms.mean), high + self._own_ms.mean)

    @property
    def _variance_of_draws(self) -> float:
        """The variance of jobs whose course chance decides, in such jobs, as draws have it and as it would have been.

        The calls that are drawn from are themselves a few of many.
        """
        drawn = sum(
            costs.count * costs.count / max(1, self._recorded_calls[model])
            for model, costs in self._drawn_costs.items()
        )
        return 2 * self.chanced + drawn


def _likely(number: int, jobs: int) -> tuple[float, float]:
    """Returns how many of some jobs are likely (95 %) to end in a way in which a number of them did: Wilson's interval.

    Unlike the usual one, it says what none of a few jobs leaves possible.
    """
    if not jobs:
        return float(number), float(number)
    square = _Z * _Z
    centre = (number + square / 2) / (jobs + square)
    margin = _Z / (jobs + square) * math.sqrt(number * (jobs - number) / jobs + square / 4)
    return min(float(number), jobs * (centre - margin)), max(float(number), jobs * (centre + margin))


def _is_sizeless(attempt: Attempt) -> bool:
    return attempt.refused_reason == "budget_exceeded" and attempt.reserved is None


def _jobs_within(durations_ms: Counter[int], least_ms: float, most_ms: float) -> int:
    return sum(jobs for duration_ms, jobs in durations_ms.items() if least_ms <= duration_ms <= most_ms)


def _count(counts: Counter[int], number: int) -> None:
    """As `counts[number] += 1`, which takes five times as long for a number that is new."""
    counts[number] = counts.get(number, 0) + 1


def _at(counts: Mapping[int, int], *places: float) -> list[float]:
    """Returns the numbers at some places, from 1, of all counted numbers in order; 0 if there are none."""
    if not counts:
        return [0.0 for _ in places]
    numbers = sorted(counts)
    last_places = list(accumulate(counts[number] for number in numbers))
    within = (min(last_places[-1], max(1, math.ceil(place))) for place in places)
    return [float(numbers[bisect_left(last_places, place)]) for place in within]


@dataclass(frozen=True, slots=True)
class CountedChange:
    """The number of times that something happened: as recorded, and under the policy."""

    name: str
    before: int
    after: int


@dataclass(slots=True)
class EventCounts:
    """The events of breakers, tasks, limits and incidents, as a report counts them.

    Attributes:
        openings: how often breakers opened.
        stops: how many tasks were stopped.
        thresholds: how many thresholds of limits were reached.
        incidents: how often each incident was opened, by its key.
        titles: the title of each at its first opening.
        reached: when each limit was first reached, by its name and the period.
    """

    openings: int = 0
    stops: int = 0
    thresholds: int = 0
    incidents: Counter[str] = field(default_factory=Counter[str])
    titles: dict[str, str] = field(default_factory=dict[str, str])
    reached: dict[tuple[str, str], datetime] = field(default_factory=dict[tuple[str, str], datetime])

    @classmethod
    def of(cls, changes: Changes, agent: str | None = None) -> EventCounts:
        """Counts the recorded events that concern an agent, or all of them."""
        counts = cls()
        for event in chain[ReplayedEvent](changes.transitions, changes.guards, changes.budgets, changes.alerts):
            counts.add(event, agent)
        return counts

    def add(self, event: ReplayedEvent, agent: str | None) -> None:
        """Counts an event, if it concerns an agent; None for any."""
        match event:
            case BudgetEvent():
                if _may_refuse(event, agent):
                    self._add_threshold(event)
            case _ if agent not in (None, event.agent):
                pass
            case BreakerTransition():
                is_opening = event.to_state == "open" and event.from_state != "open"
                self.openings += is_opening and event.rule != "probe_failed"
            case GuardEvent():
                self.stops += event.kind == "tripped"
            case Alert():
                if event.change in {"opened", "reopened"} and is_replayed(event):
                    self.incidents[event.key] += 1
                    self.titles.setdefault(event.key, event.title)

    def _add_threshold(self, event: BudgetEvent) -> None:
        self.thresholds += event.kind in {"soft_cap", "hard_cap"}
        if event.threshold_percent == 100:
            budget = event.event_id.partition(f"/{event.period}/")[0]
            self.reached.setdefault((budget, event.period), event.at)


def _may_refuse(event: BudgetEvent, agent: str | None) -> bool:
    """Returns True unless the limit is another agent's own: one that agents share may refuse any of them."""
    is_shared = event.scope != "agent" and not (event.within or "").startswith("agent:")
    return agent in (None, event.agent) or is_shared


def changes_of(before: EventCounts, after: EventCounts) -> list[CountedChange]:
    """Returns how often breakers opened, tasks were stopped, thresholds were reached and incidents opened."""
    return [
        CountedChange("breaker openings", before.openings, after.openings),
        CountedChange("tasks stopped", before.stops, after.stops),
        CountedChange("thresholds of limits", before.thresholds, after.thresholds),
        CountedChange("incidents", before.incidents.total(), after.incidents.total()),
    ]


@dataclass(frozen=True, slots=True)
class ChangedAlert:
    """Incidents with one title that open more or less often than they did.

    Attributes:
        key: the key of the first.
        title: the title of its first opening.
        before: how often it was opened.
        after: how often it would have been.
    """

    key: str
    title: str
    before: int
    after: int


def alerts_of(before: EventCounts, after: EventCounts) -> list[ChangedAlert]:
    """Returns the incidents that open more or less often, those with the largest difference first.

    Those with the same title are one: an incident of a limit has a key for each period.
    """
    together: dict[str, ChangedAlert] = {}
    for key, title in {**after.titles, **before.titles}.items():
        alert = together.get(title) or ChangedAlert(key, title, 0, 0)
        counts = {"before": alert.before + before.incidents[key], "after": alert.after + after.incidents[key]}
        together[title] = replace(alert, **counts)
    differing = (alert for alert in together.values() if alert.before != alert.after)
    return sorted(differing, key=lambda alert: (-abs(alert.after - alert.before), alert.key))


def cap_times(before: EventCounts, after: EventCounts) -> list[CapReached]:
    """Returns the limits that were reached, or would have been, with the times, by period."""
    places = sorted({**before.reached, **after.reached})
    return [CapReached(*place, before.reached.get(place), after.reached.get(place)) for place in places]
