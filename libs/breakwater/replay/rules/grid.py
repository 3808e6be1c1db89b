"""The settings that may serve an agent better: those that the record shows at work, with a few values around each."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from itertools import chain
from statistics import fmean
from typing import NamedTuple
from zoneinfo import ZoneInfo

from breakwater.breakers.contract import BreakerTransition
from breakwater.breakers.rules.breaker import ALL
from breakwater.breakers.settings import MAX_KEPT
from breakwater.jobs.contract.execution import Attempt
from breakwater.limits.contract import GuardEvent, LimitWindow
from breakwater.limits.rules.budget import LimitTable
from breakwater.limits.rules.limit import OF_SETTINGS, Limit
from breakwater.limits.rules.scopes import CallNames, Dimensions
from breakwater.replay.rules.days import JobsOf
from breakwater.replay.rules.history import AgentPolicy, Policy, RecordedJob

SettingValue = int | float | list[str]


class Setting(NamedTuple):
    """A setting of the config.

    Attributes:
        path: the names of the sections around it, and its own.
        agent: the agent that it is for; None for all.
        value: its value.
        limit: the limit whose amount it is; None if it is none.
    """

    path: tuple[str, ...]
    agent: str | None
    value: SettingValue
    limit: Limit | None = None

    @property
    def name(self) -> str:
        """The path as people write it."""
        return ".".join(self.path)

    @property
    def is_of_plane(self) -> bool:
        """True if it is a limit that the plane keeps, which is not in the config; its path is the limit's id."""
        return self.limit is not None and not self.limit.id.startswith(OF_SETTINGS)

    @property
    def jobs(self) -> JobsOf:
        """The jobs that it is judged by: those that a limit counts, or those of its agent."""
        is_of_agent = self.limit is None or self.limit.kinds in {("agent",), ("global",)}
        return JobsOf(self.agent) if is_of_agent or self.limit is None else JobsOf(limit=self.limit.id)


class Trials(NamedTuple):
    """A setting, and other values to try for it, the nearest first."""

    setting: Setting
    values: Sequence[SettingValue]


@dataclass(slots=True)
class Signs:
    """Signs in the record of an agent that one of its settings is at work.

    Attributes:
        days: the days of its jobs.
        cost: what they have cost, in nano-dollars.
        jobs: the number of its jobs.
        calls: the number of its calls.
        failed: those that failed.
        fell_back: those of other models than its first.
        timed_out: those that the time limit ended.
        answers_ms: the durations of answers that no stream gave, in milliseconds.
        tasks: its tasks.
        stopped: the tasks that its guard stopped, by the rule.
        openings: how often its breakers opened, by the rule.
    """

    days: set[date] = field(default_factory=set[date])
    cost: int = 0
    jobs: int = 0
    calls: int = 0
    failed: list[Attempt] = field(default_factory=list[Attempt])
    fell_back: int = 0
    timed_out: int = 0
    answers_ms: list[int] = field(default_factory=list[int])
    tasks: set[tuple[str | None, str]] = field(default_factory=set[tuple[str | None, str]])
    stopped: Counter[str] = field(default_factory=Counter[str])
    openings: Counter[str] = field(default_factory=Counter[str])

    def add(self, job: RecordedJob, agent: AgentPolicy, zone: ZoneInfo) -> None:
        """Notes the signs of a job; days are those of a time zone."""
        record = job.record
        self.days.add(record.dispatched_at.astimezone(zone).date())
        self.jobs += 1
        self.cost += record.total_cost or 0
        self.tasks.add((record.tenant, record.task_key or record.execution_id))
        for _, _, _, attempt in job.attempts:
            if attempt.short_circuited:
                continue
            self.calls += 1
            self.fell_back += attempt.model != agent.chain[0]
            if attempt.outcome == "success" and attempt.first_token_ms is None:
                self.answers_ms.append(attempt.duration_ms)
            elif attempt.error is not None:
                self.failed.append(attempt)
                self.timed_out += attempt.error.kind == "timeout"


def signs_of(
    jobs: Iterable[RecordedJob],
    policy: Policy,
    transitions: Iterable[BreakerTransition],
    guards: Iterable[GuardEvent],
) -> dict[str, Signs]:
    """Returns the signs in the record, by agent."""
    signs: dict[str, Signs] = defaultdict(Signs)
    for job in jobs:
        if (agent := policy.agents.get(job.record.agent)) is not None:
            signs[job.record.agent].add(job, agent, policy.zone)
    for event in transitions:
        if event.to_state == "open" and event.rule not in (None, "probe_failed"):
            for name in signs if event.agent == ALL else signs.keys() & {event.agent}:
                signs[name].openings[event.rule or ""] += 1
    for event in guards:
        if event.kind == "tripped" and event.rule is not None and event.agent in signs:
            signs[event.agent].stopped[event.rule] += 1
    return dict(signs)


FEW_TASKS = 0.05
"""The share of tasks that a guard may stop while it does what it is for: to stop those that run away."""

CUT_OFF = 0.1
"""The share of calls that a time limit must end for it to be taken to cut off answers."""

_COUNTS = (1, 2, 3, 5, 8, 13, 20, 35, 60, 100)
_COOLDOWNS = (0.5, 2, 0.25, 4)
_GUARD_FIELDS = {
    "max_iterations": "max_iterations",
    "max_tokens": "max_tokens",
    "max_cost": "max_cost_usd",
    "consecutive_failures": "consecutive_failures",
    "same_error": "same_error",
}
"""The settings of guards, by the rules that stop tasks."""

_DELAYS_S = (0.1, 0.5, 2, 10, 60)
"""The first delays before a retry that are tried."""

DAYS_OF: Mapping[LimitWindow | None, int] = {"day": 1, "week": 7, "month": 31, "quarter": 92}
"""The windows of limits that are tried, with their days at most."""

DEMAND = 0.9
"""The share of days whose use a limit of a day has room for. In longer windows, a day that uses more counts as these: a
runaway day is no reason for a larger limit."""

ROOM = 1.1
"""The room above that, as a multiple."""


def trials_of(name: str, agent: AgentPolicy, signs: Signs) -> Iterator[Trials]:
    """Yields the settings of an agent that are at work, each with the values to try."""
    tries = chain(_of_time(agent, signs), _of_guard(agent, signs), _of_breaker(agent, signs), _of_retries(agent, signs))
    for path, value, alternatives in tries:
        setting = Setting(("agents", name, *path), name, value)
        yield Trials(setting, [tried for tried in dict.fromkeys(alternatives) if tried != value])
    fallbacks = list(agent.chain[1:])
    if len(fallbacks) > 1 and signs.fell_back:
        orders = [[model, *(behind for behind in fallbacks if behind != model)] for model in fallbacks[1:]]
        yield Trials(Setting(("agents", name, "fallback_models"), name, fallbacks), orders)


_Tries = Iterator[tuple[tuple[str, ...], int | float, Sequence[int | float]]]


def _of_time(agent: AgentPolicy, signs: Signs) -> _Tries:
    if not signs.timed_out or not signs.answers_ms or is_cut_off(agent, signs):
        return
    # Calls that hang: twice as long as almost all answers take is enough.
    enough_s = round_up(2 * _quantile(signs.answers_ms, 0.99) / 1000)
    if enough_s <= 0.75 * agent.timeout_s:
        yield ("timeout_s",), agent.timeout_s, (enough_s,)


def _of_guard(agent: AgentPolicy, signs: Signs) -> _Tries:
    if agent.guard is None:
        return
    for rule, count in signs.stopped.items():
        field_name = _GUARD_FIELDS.get(rule)
        limit = None if field_name is None else getattr(agent.guard, field_name)
        if field_name is None or limit is None or count <= FEW_TASKS * len(signs.tasks):
            continue
        value = limit / 10**9 if rule == "max_cost" else limit
        yield ("guard", field_name), plain(value), [plain(value * factor) for factor in (2, 4, 8)]


def _of_breaker(agent: AgentPolicy, signs: Signs) -> _Tries:
    rules = agent.breaker
    if rules is None or not signs.openings:
        return
    for rule in ("consecutive_failures", "same_error", "errors"):
        limit: int | None = getattr(rules, rule)
        if limit is not None and signs.openings[rule]:
            above = [count for count in (*_COUNTS, MAX_KEPT) if count > limit][:3]
            below = [count for count in _COUNTS if count < limit][-1:]
            yield ("breaker", rule), limit, [*above[:1], *below, *above[1:]]
    if rules.failure_rate is not None and signs.openings["failure_rate"]:
        rates = (min(1.0, round_off(rules.failure_rate * 1.5)), round_off(rules.failure_rate / 2))
        yield ("breaker", "failure_rate"), rules.failure_rate, rates
    cooldowns = [round_off(rules.cooldown_s * factor) for factor in _COOLDOWNS]
    yield ("breaker", "cooldown_s"), plain(rules.cooldown_s), cooldowns


def _of_retries(agent: AgentPolicy, signs: Signs) -> _Tries:
    attempts = agent.retry.max_attempts
    if signs.failed and attempts > 1:
        base_s = agent.retry.base_s
        longer = [delay_s for delay_s in _DELAYS_S if delay_s > base_s]
        shorter = [delay_s for delay_s in reversed(_DELAYS_S) if delay_s < base_s]
        yield ("retry", "base_s"), plain(base_s), [*longer[:1], *shorter[:2], *longer[1:3]]
    if signs.failed:
        yield ("retry", "max_attempts"), attempts, [attempts + 1, max(1, attempts - 1), attempts + 2]


def is_cut_off(agent: AgentPolicy, signs: Signs) -> bool:
    """Returns True if the time limit ends calls that would have been answered, as many answers come close to it."""
    if signs.timed_out < CUT_OFF * signs.calls:
        return False
    near = sum(answer_ms > agent.timeout_s * 500 for answer_ms in signs.answers_ms)
    return near >= CUT_OFF * max(1, len(signs.answers_ms))


def spent_limits(jobs: Iterable[RecordedJob], limits: LimitTable) -> list[Limit]:
    """Returns the limits that have refused calls, of those that hold."""
    dimensions = Dimensions(limits.dimensions)
    spent: dict[str, Limit] = {}
    for job in jobs:
        for *_, attempt in job.attempts:
            if attempt.refused_reason != "budget_exceeded":
                continue
            for counter in limits.counters(CallNames.of(attempt), dimensions):
                if counter.name == attempt.refused_by and counter.cap is not None:
                    spent[counter.cap.id] = counter.cap
    return list(spent.values())


def caps_of(limits: Iterable[Limit]) -> Iterator[Setting]:
    """Yields the amounts of hard limits on one scope by day, week, month or quarter, as settings.

    A limit on each name by itself is left out: what one of them needs is no reason to give all of them more. So is one
    that ends by itself.
    """
    for limit in limits:
        if limit.window not in DAYS_OF or limit.enforcement != "hard" or not limit.is_named or limit.until_ms:
            continue
        agent = next((part.name for part in limit.parts if part.kind == "agent"), None)
        amount = limit.amount / 10**9 if limit.unit == "usd" else limit.amount
        yield Setting(_path_of(limit), agent, plain(amount), limit)


def _path_of(limit: Limit) -> tuple[str, ...]:
    """Returns the place of a limit in the config; its id if it is not there."""
    if not limit.id.startswith(OF_SETTINGS):
        return (limit.id,)
    section, _, setting = limit.id.rpartition(".")
    name = limit.parts[0].name  # may have dots
    if section.startswith("agents."):
        return "agents", name, "budget", setting
    if section.startswith("budgets.tenants."):
        return "budgets", "tenants", name, setting
    return (*section.split("."), setting)


def room_for(window: LimitWindow, uses: Sequence[int], busy: float) -> float:
    """Returns the amount of a limit that has room for the use to come.

    Args:
        window: the window of the limit.
        uses: what was used on each of some days, in the unit of the limit.
        busy: the share of days on which anything is used.
    """
    ordered = sorted(uses)
    usual = ordered[math.ceil(DEMAND * len(ordered)) - 1] if ordered else 0
    if window == "day":
        return ROOM * usual
    return ROOM * fmean(min(use, usual) for use in ordered or [0]) * busy * DAYS_OF[window]


def round_off(value: float) -> int | float:
    """Returns a value with two significant digits."""
    return plain(float(f"{value:.1e}"))


def round_up(value: float) -> int | float:
    """Returns the least value with two significant digits that is not smaller."""
    near = float(f"{value:.1e}")
    step = 10.0 ** (math.floor(math.log10(near)) - 1)
    return plain(near if near >= value else float(f"{near + step:.1e}"))


def plain(value: float) -> int | float:
    """Returns a value as people write it: a whole number without a point."""
    return int(value) if float(value).is_integer() else value


def _quantile(values: Sequence[int], share: float) -> int:
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
