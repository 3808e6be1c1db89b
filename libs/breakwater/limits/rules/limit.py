"""Limits: the one idea behind budgets, rate limits and the caps of tasks and jobs.

A limit allows a scope an amount of a unit in a window, and says what happens beyond it. The config writes most limits
where they belong, such as `agents.writer.budget.daily_usd`; this module reads them all into one table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from breakwater.limits.contract import Enforcement
from breakwater.limits.rules.guard import SOFT_PERCENT
from breakwater.limits.settings import Caps, GuardRules, LimitSettings, RateLimit

LimitUnit = Literal["usd", "tokens", "requests", "concurrent"]
LimitWindow = Literal["minute", "hour", "rolling day", "day", "week", "month", "quarter", "total"]
"""The windows of minutes and hours slide, and so does a `rolling day`; the longer ones are those of a calendar."""

LimitAction = Literal["count", "alert", "refuse", "wait", "cheaper_model"]
"""The effect on a call beyond the amount: none, people are told, the job ends, it waits, or its next model is tried."""


@dataclass(frozen=True, slots=True)
class Limit:
    """An amount that a scope may use in a window.

    Attributes:
        id: the setting that it is written in: `agents.writer.budget.daily_usd`.
        scope: whose calls it counts: `plane`, `agent:writer`, `user:* within team:research`; `*` is each by itself.
        unit: what it counts. The requests of a task are its jobs; elsewhere they are calls.
        window: the time in which it counts; None for calls at the same time.
        amount: nano-dollars, tokens, requests, or calls at the same time.
        action: what happens to a call that does not fit.
        thresholds: the percentages at which people are told.
    """

    id: str
    scope: str
    unit: LimitUnit
    window: LimitWindow | None
    amount: int
    action: LimitAction
    thresholds: tuple[int, ...] = ()


class LimitedAgent(Protocol):
    """The settings of an agent that are limits."""

    @property
    def budget(self) -> Caps: ...  # noqa: D102
    @property
    def rate_limit(self) -> RateLimit | None: ...  # noqa: D102
    @property
    def guard(self) -> GuardRules | None: ...  # noqa: D102
    @property
    def max_cost_usd(self) -> int | None: ...  # noqa: D102


def limits_of(
    total: Caps,
    tenants: Mapping[str, Caps],
    agents: Mapping[str, LimitedAgent],
    models: Mapping[str, RateLimit | None],
    further: Sequence[LimitSettings],
) -> tuple[Limit, ...]:
    """Returns all limits of a config, in the order of its sections.

    Args:
        total: the caps over all agents.
        tenants: the caps of tenants, by their names.
        agents: the agents, by their names.
        models: the rate limits of models, by their ids.
        further: the limits that the config writes as such.
    """
    limits: list[Limit] = []
    for model, rate_limit in models.items():
        limits += _of_rate_limit(f"models.{model}.rate_limit", f"model:{model}", rate_limit)
    for name, agent in agents.items():
        scope = f"agent:{name}"
        limits += _of_caps(f"agents.{name}.budget", scope, agent.budget)
        limits += _of_rate_limit(f"agents.{name}.rate_limit", scope, agent.rate_limit)
        if agent.guard is not None:
            limits += _of_guard(f"agents.{name}.guard", f"task:* within {scope}", agent.guard)
        if agent.max_cost_usd is not None:
            setting = f"agents.{name}.max_cost_usd"
            limits.append(Limit(setting, f"job:* within {scope}", "usd", "total", agent.max_cost_usd, "cheaper_model"))
    limits += _of_caps("budgets.global", "plane", total)
    for name, caps in tenants.items():
        limits += _of_caps(f"budgets.tenants.{name}", f"tenant:{name}", caps)
    for number, limit in enumerate(further):
        place = (f"budgets.limits.{number}.usd", limit.scope)
        limits.append(Limit(*place, "usd", limit.per, limit.usd, limit.action, limit.alerts_at))
    return tuple(limits)


def _of_caps(setting: str, scope: str, caps: Caps) -> Iterator[Limit]:
    beyond_hard: LimitAction = "cheaper_model" if caps.on_exceeded == "cheaper_model" else "refuse"
    actions: Mapping[Enforcement, LimitAction] = {"none": "count", "soft": "alert", "hard": beyond_hard}
    action = actions[caps.enforcement]
    thresholds = tuple(sorted(caps.thresholds))
    if caps.daily_usd is not None:
        yield Limit(f"{setting}.daily_usd", scope, "usd", "day", caps.daily_usd, action, thresholds)
    if caps.monthly_usd is not None:
        yield Limit(f"{setting}.monthly_usd", scope, "usd", "month", caps.monthly_usd, action, thresholds)


def _of_rate_limit(setting: str, scope: str, rate_limit: RateLimit | None) -> Iterator[Limit]:
    if rate_limit is None:
        return
    action: LimitAction = "wait" if rate_limit.on_exceeded == "wait" else "cheaper_model"
    longer: LimitWindow = "hour" if rate_limit.per == "hour" else "rolling day"
    amounts: Iterable[tuple[str, LimitUnit, LimitWindow | None, int | None]] = (
        ("requests_per_minute", "requests", "minute", rate_limit.requests_per_minute),
        ("tokens_per_minute", "tokens", "minute", rate_limit.tokens_per_minute),
        ("concurrent_calls", "concurrent", None, rate_limit.concurrent_calls),
        ("requests", "requests", longer, rate_limit.requests),
        ("tokens", "tokens", longer, rate_limit.tokens),
    )
    for name, unit, window, amount in amounts:
        if amount is not None:
            yield Limit(f"{setting}.{name}", scope, unit, window, amount, action)


def _of_guard(setting: str, scope: str, guard: GuardRules) -> Iterator[Limit]:
    caps: Iterable[tuple[str, LimitUnit, int | None]] = (
        ("max_iterations", "requests", guard.max_iterations),
        ("max_tokens", "tokens", guard.max_tokens),
        ("max_cost_usd", "usd", guard.max_cost_usd),
    )
    for name, unit, amount in caps:
        if amount is not None:
            yield Limit(f"{setting}.{name}", scope, unit, "total", amount, "refuse", (SOFT_PERCENT, 100))
    yield from _of_rate_limit(f"{setting}.rate_limit", scope, guard.rate_limit)
