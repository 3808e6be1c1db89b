"""Limits: the one idea behind budgets, rate limits and the limits of tasks and jobs.

A limit allows a scope an amount of a unit in a window, and says what happens beyond it. The config writes most limits
where they belong, such as `agents.writer.budget.daily_usd`; this module reads them all into one table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Protocol, get_args

from breakwater.kernel.types import MAX_COUNTED, ms_from_time, nano_from_usd, usd_from_nano
from breakwater.limits.contract import Enforcement, LimitAction, LimitSettings, LimitUnit, LimitWindow, Window
from breakwater.limits.rules.scopes import EACH, PLANE, Dimension, ScopePart, key_of, parse_scope, scope_of
from breakwater.limits.settings import Caps, GuardRules, RateLimit


@dataclass(frozen=True, slots=True)
class Limit:
    """An amount that a scope may use in a window.

    Attributes:
        id: the setting that it is written in: `agents.writer.budget.daily_usd`.
        parts: the parts of its scope.
        unit: what it counts. The requests of a task are its jobs; elsewhere they are calls.
        window: the time in which it counts; None for calls at the same time.
        amount: nano-dollars, tokens, requests, or calls at the same time.
        action: what happens to a call that does not fit.
        thresholds: the percentages at which people are told.
        counts_cached: True if input that a provider read from its cache counts towards a limit on tokens.
        until_ms: when it ends, in milliseconds since the epoch; None if it does not end.
    """

    id: str
    parts: tuple[ScopePart, ...]
    unit: LimitUnit
    window: LimitWindow | None
    amount: int
    action: LimitAction
    thresholds: tuple[int, ...] = ()
    counts_cached: bool = True
    until_ms: int | None = None

    def holds_at(self, moment_ms: int) -> bool:
        """Returns True if it has not ended at a moment."""
        return self.until_ms is None or moment_ms < self.until_ms

    @property
    def scope(self) -> str:
        """The calls that it counts: `plane`, `agent:writer`, `user:* within team:research`; `*` is each by itself."""
        return scope_of(self.parts)

    @property
    def key(self) -> str:
        """The key of its scope among the counters of a period; of several scopes, with `*` in place of a name."""
        return key_of(self.parts)

    @property
    def place(self) -> tuple[object, ...]:
        """The scope, the unit and the window: of two limits on the same, only one can count."""
        return tuple(sorted(self.parts)), self.unit, self.window

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of the parts of its scope."""
        return tuple(part.kind for part in self.parts)

    @property
    def in_words(self) -> str:
        """The limit as a part of a sentence: its setting, or `the limit 'acme'` if it is not in the config."""
        return self.id if self.id.startswith(OF_SETTINGS) else f"the limit {self.id!r}"

    @property
    def is_named(self) -> bool:
        """Returns True if it is of one scope."""
        return all(part.name != EACH for part in self.parts)

    @property
    def budget_dimension(self) -> Dimension | None:
        """The dimension that it is counted in; None if it is no budget: no limit on recorded spend."""
        return self.calendar_dimension if self.unit == "usd" else None

    @property
    def calendar_dimension(self) -> Dimension | None:
        """The dimension that it is counted in; None if it counts nothing that is recorded.

        Guards of tasks and jobs themselves count what those use in total.
        """
        window = None if self.window is None else CALENDAR.get(self.window)
        return None if window is None or {"task", "job"}.intersection(self.kinds) else Dimension(self.kinds, window)

    @property
    def is_rate(self) -> bool:
        """Returns True if it is on a sliding window, or on calls at the same time."""
        return self.window is None or self.window in SLIDING

    @property
    def enforcement(self) -> Enforcement:
        """The enforcement of a budget: `hard` if it refuses calls."""
        return "none" if self.action == "count" else "soft" if self.action == "alert" else "hard"


OF_SETTINGS = ("agents.", "budgets.", "models.")
"""The beginnings of ids of limits in the config."""

SOFT_PERCENT = 80
"""Share of a limit at which people are notified, once for each task."""

PERIODS: Mapping[str, LimitWindow] = {
    "daily": "day", "weekly": "week", "monthly": "month", "quarterly": "quarter", "total": "total"
}  # fmt: skip
"""The periods of a calendar, by the windows of budgets; a total is one that never ends."""

CALENDAR: Mapping[str, Window] = {PERIODS[window]: window for window in get_args(Window)}
"""The windows of a calendar, as budgets are named by them."""


SLIDING: frozenset[LimitWindow] = frozenset({"minute", "hour", "rolling day"})
"""The windows that slide: limits on them are rates, as are those on calls at the same time."""


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
    deployments: Mapping[str, tuple[str, RateLimit | None]] | None = None,
) -> tuple[Limit, ...]:
    """Returns all limits of a config, in the order of its sections.

    Args:
        total: the limits over all agents.
        tenants: the limits of tenants, by their names.
        agents: the agents, by their names.
        models: the rate limits of models, by their ids.
        further: the limits that the config writes as such.
        deployments: the setting and the rate limit of each deployment, by its id.

    Raises:
        ValueError: the scope of one of `further` is none.
    """
    limits: list[Limit] = []
    for model, rate_limit in models.items():
        limits += _of_rate_limit(f"models.{model}.rate_limit", (ScopePart("model", model),), rate_limit)
    for deployment, (setting, rate_limit) in (deployments or {}).items():
        parts = (ScopePart("deployment", deployment),)
        limits += _of_rate_limit(f"{setting}.{deployment}.limits", parts, rate_limit)
    for name, agent in agents.items():
        scope = ScopePart("agent", name)
        limits += limits_of_agent(name, agent.budget)
        limits += _of_rate_limit(f"agents.{name}.rate_limit", (scope,), agent.rate_limit)
        if agent.guard is not None:
            limits += _of_guard(f"agents.{name}.guard", (ScopePart("task", EACH), scope), agent.guard)
        if agent.max_cost_usd is not None:
            of_jobs = (ScopePart("job", EACH), scope)
            setting = f"agents.{name}.max_cost_usd"
            limits.append(Limit(setting, of_jobs, "usd", "total", agent.max_cost_usd, "cheaper_model"))
    limits += _of_caps("budgets.global", PLANE, total)
    for name, caps in tenants.items():
        limits += _of_caps(f"budgets.tenants.{name}", (ScopePart("tenant", name),), caps)
    for number, limit in enumerate(further):
        setting = f"budgets.limits.{number}.{limit.unit}"
        limits.append(limit_of(setting, limit))
    return tuple(limits)


def limit_of(limit_id: str, settings: LimitSettings) -> Limit:
    """Returns a limit that is written as such. Raises ValueError: its scope is none."""
    amount = (settings.unit, settings.per, settings.amount, settings.action)
    until_ms = None if settings.until is None else ms_from_time(settings.until)
    limit = Limit(limit_id, parse_scope(settings.scope), *amount, until_ms=until_ms)
    return limit if limit.is_rate or limit.unit != "usd" else replace(limit, thresholds=settings.alerts_at)


def amount_text(unit: LimitUnit, amount: int) -> str:
    """Returns an amount as it is on the wire: `20.000000000` dollars, `400000` tokens."""
    return usd_from_nano(amount) if unit == "usd" else str(amount)


def amount_of(unit: LimitUnit, text: str) -> int:
    """Returns an amount that is written in a unit. Raises ValueError: it is not whole, too fine or too large."""
    amount = nano_from_usd(text) if unit == "usd" else Decimal(text)
    if amount > MAX_COUNTED:
        raise ValueError("is too large: an amount is at most 9 million dollars, or 9 million billions of others")
    if amount != int(amount):
        raise ValueError(f"{unit} are whole numbers")
    return int(amount)


def default_id(scope: str, unit: LimitUnit, window: LimitWindow | None) -> str:
    """Returns the id of a limit whose maker chose none: `key:acme-bot.usd.month`."""
    return f"{scope}.{unit}" if window is None else f"{scope}.{unit}.{window}"


def enforcement_problem(settings: LimitSettings) -> str | None:
    """Returns why the plane can't enforce a limit, which is refused where it is made; None if it can."""
    if settings.per is None or settings.per in SLIDING:
        if settings.action in ("count", "alert"):
            return "a rate is not recorded, so it can raise no alert; use refuse, wait or cheaper_model"
        return None
    if settings.action == "wait" and settings.per == "total":
        return "a total never resets, so no call can wait for that; use refuse"
    if settings.action == "alert" and settings.unit != "usd":
        return "only limits of usd can alert; use refuse, count or cheaper_model"
    return None


def limits_of_agent(name: str, caps: Caps) -> Iterator[Limit]:
    """Yields the budgets of an agent."""
    return _of_caps(f"agents.{name}.budget", (ScopePart("agent", name),), caps)


def _of_caps(setting: str, scope: tuple[ScopePart, ...], caps: Caps) -> Iterator[Limit]:
    beyond_hard: LimitAction = "cheaper_model" if caps.on_exceeded == "cheaper_model" else "refuse"
    actions: Mapping[Enforcement, LimitAction] = {"none": "count", "soft": "alert", "hard": beyond_hard}
    action = actions[caps.enforcement]
    thresholds = tuple(sorted(caps.thresholds))
    if caps.daily_usd is not None:
        yield Limit(f"{setting}.daily_usd", scope, "usd", "day", caps.daily_usd, action, thresholds)
    if caps.monthly_usd is not None:
        yield Limit(f"{setting}.monthly_usd", scope, "usd", "month", caps.monthly_usd, action, thresholds)


def _of_rate_limit(setting: str, scope: tuple[ScopePart, ...], rate_limit: RateLimit | None) -> Iterator[Limit]:
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
            yield Limit(f"{setting}.{name}", scope, unit, window, amount, action, counts_cached=rate_limit.count_cached)


def limits_of_task(agent: str, rate_limit: RateLimit | None) -> tuple[Limit, ...]:
    """Returns the limits on the rate of each task of an agent, or of a job that brings stricter ones."""
    scope = (ScopePart("task", EACH), ScopePart("agent", agent))
    return tuple(_of_rate_limit(f"agents.{agent}.guard.rate_limit", scope, rate_limit))


def _of_guard(setting: str, scope: tuple[ScopePart, ...], guard: GuardRules) -> Iterator[Limit]:
    caps: Iterable[tuple[str, LimitUnit, int | None]] = (
        ("max_iterations", "requests", guard.max_iterations),
        ("max_tokens", "tokens", guard.max_tokens),
        ("max_cost_usd", "usd", guard.max_cost_usd),
    )
    for name, unit, amount in caps:
        if amount is not None:
            yield Limit(f"{setting}.{name}", scope, unit, "total", amount, "refuse", (SOFT_PERCENT, 100))
    yield from _of_rate_limit(f"{setting}.rate_limit", scope, guard.rate_limit)
