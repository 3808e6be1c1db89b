"""Finds settings that would have served better: chosen on some days of the record, and judged on the others.

One setting of one agent after the other is tried with a few values. Days are dealt in turns: on the even ones the best
value is chosen, and it is suggested only if the odd ones, which had no say in it, agree. The next setting is tried on
top of what is suggested so far.

A choice needs only the agent's own jobs; the jobs of all that decide about each other are replayed to judge it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from itertools import chain
from typing import cast, get_args

from breakwater.jobs.contract.execution import Attempt
from breakwater.kernel.formats import percent, quantity
from breakwater.kernel.types import ms_from_time
from breakwater.limits.rules.ledger import charged_at, figures_of
from breakwater.limits.rules.limit import Limit
from breakwater.limits.rules.scopes import CallNames, key_of_call
from breakwater.replay.rules.days import (
    ALL_JOBS,
    DailyEffect,
    DailyOutcome,
    JobsOf,
    Merit,
    daily_effect,
    gain_of,
    merit_of,
)
from breakwater.replay.rules.engine import Replay, ReplayedJob
from breakwater.replay.rules.grid import (
    DAYS_OF,
    Setting,
    SettingValue,
    Signs,
    Trials,
    caps_of,
    is_cut_off,
    plain,
    room_for,
    round_off,
    round_up,
    signs_of,
    spent_limits,
    trials_of,
)
from breakwater.replay.rules.history import Policy, RecordedDays, RecordedJob
from breakwater.replay.rules.limits import with_all_limits, with_latest_limits
from breakwater.replay.rules.world import World

LEAST_DAYS = 8
"""The number of days with jobs that an agent needs: half of them choose, half judge."""

NEARLY_BEST = 0.9
"""The share of the best gain that is enough for a value that is nearer to the present one."""

MOST_UNKNOWN = 0.01
"""The share of jobs whose end history can't tell, above which it can't judge a change."""

CHEAPER = 0.9
"""The most that a fallback may cost of the price of another for its name to be worth a trial in life."""

DAY_MS = 86_400_000
"""The most time between a call that was never made and those from which its answer is drawn, for each day of the window
of a limit: one that is reached at noon leaves no call of the afternoon."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A value that would have served better.

    Attributes:
        setting: the setting as it is.
        value: the suggested value.
        merit: what it is better for.
        effect: its effect on the days that did not choose it, on top of the suggestions before.
    """

    setting: Setting
    value: SettingValue
    merit: Merit
    effect: DailyEffect


@dataclass(frozen=True, slots=True)
class Experiment:
    """A setting that may be at fault, but of which history can't tell what another value would do.

    Attributes:
        setting: the setting as it is.
        value: a value to try.
        reason: why history can't tell, in words.
    """

    setting: Setting
    value: SettingValue
    reason: str


@dataclass(slots=True)
class Suggestions:
    """The result of a search.

    Attributes:
        suggestions: the settings that would have served better, in the order in which they build on each other.
        experiments: the settings that history can't judge.
        few_days: the agents with too few days of jobs to judge by, and their days.
        replays: the number of replays so far.
        most_replays: the number that the search may still come to, these included.
        is_complete: True if nothing was left untried.
    """

    suggestions: list[Suggestion] = field(default_factory=list[Suggestion])
    experiments: list[Experiment] = field(default_factory=list[Experiment])
    few_days: dict[str, int] = field(default_factory=dict[str, int])
    replays: int = 0
    most_replays: int = 0
    is_complete: bool = True


PolicyWith = Callable[[Mapping[tuple[str, ...], SettingValue]], Policy | None]
"""Returns the policy of the config with other values of some settings; None if the config allows no such values."""


class Search:
    """A search for better settings. It runs once."""

    def __init__(
        self,
        history: Sequence[RecordedDays],
        policy: Policy,
        policy_with: PolicyWith,
        *,
        agent: str | None = None,
        prices: Mapping[str, int] | None = None,
        has_whole_days: bool = True,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> None:
        """Prepares a search.

        Args:
            history: the recorded days.
            policy: the policy that their jobs ran under.
            policy_with: makes the policies to try.
            agent: the only agent whose settings are tried; None for all.
            prices: the nano-dollars that a thousand tokens, half of them output, cost of each model that has a price.
            has_whole_days: False if only a part of each day is in the history: then limits are not tried.
            goes_on: is asked before each replay, and returns False to end the search.
        """
        self.result = Suggestions()
        self._history = history
        self._before = policy
        self._policy_with = policy_with
        self._goes_on = goes_on
        self._agent = agent
        self._prices = prices or {}
        self._has_whole_days = has_whole_days
        jobs = [job for part in history for job in part.jobs]
        self._calls = [logged.attempt for job in jobs for logged in job.attempts]
        self._world = World(self._calls, within_ms=DAY_MS, compares_delays=True)
        self._signs = signs_of(
            jobs,
            policy,
            chain.from_iterable(part.changes.transitions for part in history),
            chain.from_iterable(part.changes.guards for part in history),
        )
        guarded = {name for name, signs in self._signs.items() if signs.stopped}
        changes = [event for part in history for event in part.changes.limits]
        self._caps = list(caps_of(spent_limits(jobs, with_latest_limits(policy.limits, changes))))
        self._limits_of = _limits_of(jobs, [cap.limit for cap in self._caps if cap.jobs.limit is not None])
        limits = with_all_limits(policy.limits, changes)
        self._groups = groups_of(replace(policy, limits=limits), jobs, guarded)
        self._values: dict[tuple[str, ...], tuple[Setting, SettingValue]] = {}
        """The settings that are suggested so far with their values, by their paths."""
        self._present = policy
        """The policy with these."""
        self._alone: dict[frozenset[str], DailyOutcome] = {}
        """The outcomes of agents by themselves under that policy."""

    def run(self) -> Suggestions:
        """Tries one setting after the other. Returns what it has found, which is in `result` meanwhile."""
        result = self.result
        plans = [(group, trials) for group in self._groups if (trials := list(self._trials(group)))]
        for group, trials in plans:
            settings = [trial.setting for trial in trials] if len(group) > 1 else []
            result.most_replays += 1 + len(settings) + len({setting.agent for setting in settings} - {None})
            result.most_replays += sum(len(trial.values) or 2 for trial in trials)
        for group, trials in plans:
            base = self._replay(self._before, group)
            for trial in trials:
                if base is None or not result.is_complete:
                    return result
                before = base
                world = self._world
                if (limit := trial.setting.limit) is not None and (days := DAYS_OF.get(limit.window, 1)) > 1:
                    self._world = World(self._calls, within_ms=days * DAY_MS, compares_delays=True)
                base = self._try(trial, base, group)
                if base is before:
                    self._world = world
        return result

    def _trials(self, group: frozenset[str]) -> Iterator[Trials]:
        """Yields what is to be tried of the agents of a group, the dearest first; limits on spend without values."""
        agents = self._before.agents
        wanted = group if self._agent is None else group & {self._agent}
        for name in sorted(wanted, key=lambda name: (-self._signs[name].cost, name)):
            signs = self._signs[name]
            if len(signs.days) < LEAST_DAYS:
                self.result.few_days[name] = len(signs.days)
                continue
            if is_cut_off(agents[name], signs):
                # Whatever else is tried for it would be judged by calls that were cut off.
                self.result.experiments.append(_cut_off(name, agents[name].timeout_s, signs))
                continue
            for trial in trials_of(name, agents[name], signs):
                if trial.setting.path[-1] != "base_s":
                    yield trial
                elif delays := [delay for delay in trial.values if self._tells(signs, delay)]:
                    yield Trials(trial.setting, delays)
        for cap in self._caps if self._has_whole_days else ():
            is_wanted = self._agent is None if cap.agent is None else cap.agent in wanted
            # What a longer window has left depends on all of its days.
            is_recorded = len(self._history) == 1 or (cap.limit is not None and cap.limit.window == "day")
            if is_wanted and is_recorded and cap.agent not in self.result.few_days:
                yield Trials(cap, ())

    def _tells(self, signs: Signs, delay: SettingValue) -> bool:
        """Returns True if the record has calls about a delay in seconds after almost all failures of an agent."""
        delay_ms = round(float(cast(float, delay)) * 1000)
        unknown = 0
        for failed in signs.failed:
            at_ms = ms_from_time(failed.completed_at) + delay_ms
            unknown += self._world.draw(failed.model, failed.agent, at_ms, failed.attempt_id, delay_ms) is None
        return unknown <= MOST_UNKNOWN * signs.jobs

    def _with(self, setting: Setting, value: SettingValue) -> Policy | None:
        """Returns the policy with a value on top of those that are suggested; None if the config does not allow it."""
        values = {**self._values, setting.path: (setting, value)}.values()
        policy = self._policy_with({tried.path: value for tried, value in values if not tried.is_of_plane})
        amounts = {tried.name: _amount(tried, value) for tried, value in values if tried.is_of_plane}
        return None if policy is None else replace(policy, amounts=amounts)

    def _try(self, trial: Trials, base: DailyOutcome, group: frozenset[str]) -> DailyOutcome:
        """Tries the values of a setting. Returns the outcome with the one that it suggests, or the same if none."""
        setting = trial.setting
        days = list(base.days(setting.jobs))
        deciding = days[::2]
        judging = days[1::2]
        scope = group if setting.agent is None else frozenset({setting.agent})
        alone = base if scope == group else self._alone.get(scope) or self._replay(self._present, scope)
        if alone is None:
            return base
        self._alone[scope] = alone
        outcomes: dict[int, tuple[Policy, DailyOutcome]] = {}
        effects: dict[int, DailyEffect] = {}
        values = trial.values or self._demand(setting, deciding, base, scope)
        for number, value in enumerate(values):
            policy = self._with(setting, value)
            outcome = None if policy is None else self._replay(policy, scope)
            if policy is None or outcome is None:
                continue
            unknown = _unknown(outcome, setting.jobs) - _unknown(alone, setting.jobs)
            if unknown > MOST_UNKNOWN * sum(day.jobs for day in alone.days(setting.jobs).values()):
                self._note_unknown(setting, value, unknown)
                continue
            outcomes[number] = policy, outcome
            effects[number] = daily_effect(alone, outcome, setting.jobs, deciding)
        if not self.result.is_complete or (number := best_of(effects)) is None:
            return base
        policy, outcome = outcomes[number]
        judged = outcome if scope == group else self._replay(policy, group)
        if judged is None:
            return base
        effect = daily_effect(base, judged, setting.jobs, judging)
        merit = merit_of(effect)
        if merit is None or merit != merit_of(effects[number]):
            return base
        self._present = policy
        self._values[setting.path] = setting, values[number]
        self._alone[scope] = outcome
        self.result.suggestions.append(Suggestion(setting, values[number], merit, effect))
        return judged

    def _note_unknown(self, setting: Setting, value: SettingValue, unknown: int) -> None:
        """Notes a value whose effect is unknown, if there is a reason to try it: the first of its models is cheaper."""
        if not isinstance(setting.value, list) or not isinstance(value, list):
            return
        price = self._prices.get(value[0])
        price_before = self._prices.get(setting.value[0])
        if price is not None and price_before is not None and price <= CHEAPER * price_before:
            share = percent(price / price_before)
            jobs = quantity(unknown, "job")
            reason = f"{value[0]} has {share} of the price of {setting.value[0]}, but {jobs} would call it unrecorded"
            self.result.experiments.append(Experiment(setting, value, reason))

    def _demand(
        self, setting: Setting, days: Sequence[str], base: DailyOutcome, scope: frozenset[str]
    ) -> Sequence[SettingValue]:
        """Returns the amount of a limit that has room for what some days would use, if it is above the present one."""
        limit = setting.limit
        value = setting.value
        if limit is None or limit.window is None or isinstance(value, list):
            return ()
        uses: dict[str, int] = defaultdict(int)

        def add(run: ReplayedJob) -> None:
            for attempt in run.attempts:
                if _counts_in(limit, attempt):
                    uses[f"{charged_at(attempt).astimezone(self._before.zone):%Y-%m-%d}"] += figures_of(attempt).used(
                        limit.unit
                    )

        policy = self._with(setting, max(1, plain(value * 100)))
        if policy is None or self._replay(policy, scope, add) is None:
            return ()
        dates = [date.fromisoformat(day) for day in base.days(ALL_JOBS)]
        busy = len(base.days(setting.jobs)) / ((dates[-1] - dates[0]).days + 1)
        room = room_for(limit.window, [uses[day] for day in days], busy)
        enough = round_up(room / 10**9 if limit.unit == "usd" else math.ceil(room)) if room else 0
        return (enough,) if enough > value else ()

    def _replay(
        self, policy: Policy, group: frozenset[str], on_end: Callable[[ReplayedJob], None] = lambda _: None
    ) -> DailyOutcome | None:
        """Replays the jobs of some agents under a policy; None if there is no time."""
        if not self._goes_on():
            self.result.is_complete = False
            return None
        outcome = DailyOutcome(policy.zone, self._limits_of)

        def add(run: ReplayedJob) -> None:
            outcome.add(run)
            on_end(run)

        for part in self._history:
            jobs = [job for job in part.jobs if job.record.agent in group]
            used_before = dict(part.used_before)
            replay = Replay(policy, self._before, part.changes, self._world, on_end=add, used_before=used_before)
            replay.run(jobs)
            replay.finish()
        self.result.replays += 1
        return outcome


def best_of(effects: Mapping[int, DailyEffect]) -> int | None:
    """Returns the first of the numbered effects that is nearly as good as the best; None if none is better."""
    merits = {number: merit for number, effect in effects.items() if (merit := merit_of(effect)) is not None}
    for best_merit in get_args(Merit):
        gains = {number: gain_of(effects[number], best_merit) for number in merits if merits[number] == best_merit}
        if gains:
            return next(number for number, gain in gains.items() if gain >= NEARLY_BEST * max(gains.values()))
    return None


def groups_of(policy: Policy, jobs: Sequence[RecordedJob], guarded: Collection[str]) -> list[frozenset[str]]:
    """Returns the agents of jobs in groups, such that no job's fate depends on a job of another group.

    Agents belong together that share breakers, a limit that refuses calls, or tasks that a guard may stop.

    Args:
        policy: the policy that the jobs ran under, with all limits that the plane ever kept.
        jobs: the jobs.
        guarded: the agents of which a guard has stopped tasks.
    """
    group_of = {name: {name} for name in dict.fromkeys(job.record.agent for job in jobs) if name in policy.agents}

    def join(names: Iterable[str]) -> None:
        together = set[str]().union(*(group_of[name] for name in names))
        group_of.update(dict.fromkeys(together, together))

    limits = (*policy.limits.limits, *policy.limits.plane_limits.limits.values())
    if any(limit.enforcement == "hard" and "agent" not in limit.kinds for limit in limits if limit.calendar_dimension):
        join(list(group_of))
    breakers = {name: policy.agents[name].breaker for name in group_of}
    join([name for name, rules in breakers.items() if rules is not None and rules.scope != "agent_model"])
    of_tasks: dict[tuple[str | None, str], set[str]] = defaultdict(set)
    for job in jobs:
        if job.record.task_key is not None and job.record.agent in group_of:
            of_tasks[job.record.tenant, job.record.task_key].add(job.record.agent)
    for names in set(map(frozenset, of_tasks.values())):
        if not names.isdisjoint(guarded):
            join(names)
    return list(dict.fromkeys(map(frozenset, group_of.values())))


def _limits_of(jobs: Iterable[RecordedJob], limits: Iterable[Limit | None]) -> dict[str, list[str]]:
    """Returns the ids of the limits that the calls of jobs count in, by the ids of the executions."""
    limits_of: dict[str, list[str]] = defaultdict(list)
    for limit in limits:
        for job in jobs:
            if limit is not None and any(_counts_in(limit, logged.attempt) for logged in job.attempts):
                limits_of[job.record.execution_id].append(limit.id)
    return limits_of


def _counts_in(limit: Limit, attempt: Attempt) -> bool:
    return key_of_call(limit.kinds, CallNames.of(attempt)) == limit.key


def _amount(setting: Setting, value: SettingValue) -> int:
    """Returns a value of a limit in nano-dollars, tokens or requests."""
    is_money = setting.limit is not None and setting.limit.unit == "usd"
    return round(cast(float, value) * 10**9) if is_money else int(cast(float, value))


def _unknown(outcome: DailyOutcome, jobs: JobsOf) -> int:
    return sum(day.unknown for day in outcome.days(jobs).values())


def _cut_off(name: str, timeout_s: float, signs: Signs) -> Experiment:
    share = percent(signs.timed_out / signs.calls)
    reason = f"{share} of its calls end at this limit, and answers come close to it: no longer one is recorded"
    return Experiment(Setting(("agents", name, "timeout_s"), name, plain(timeout_s)), round_off(2 * timeout_s), reason)
