"""Budgets: the calendar periods they are of, the thresholds that a new total reaches, and the arithmetic of every cap.

The worst case of a call is reserved before it is made, and replaced by what it cost when it has ended. As it is asked
for against what was spent and what is reserved for others, calls at the same time can't pass a cap together. The
scripts on Redis apply the same rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal
from zoneinfo import ZoneInfo

from pydantic import Field, field_validator

from breakwater.contracts.events import BudgetEvent, Enforcement, Scope, Window
from breakwater.contracts.execution import Attempt
from breakwater.contracts.types import Message, UsdAmount, ms_from_time, time_from_ms

WINDOWS: tuple[Window, Window] = ("daily", "monthly")


@dataclass(frozen=True, slots=True)
class Period:
    """A calendar day or month: its name (`2026-11-21`, `2026-11`), and from when to when in ms since the epoch."""

    window: Window
    name: str
    start_ms: int
    end_ms: int
    """The first moment that is no longer part of it."""

    def holds(self, moment_ms: int) -> bool:
        """True if a moment lies in it."""
        return self.start_ms <= moment_ms < self.end_ms


@dataclass(frozen=True, slots=True)
class Periods:
    """The day and the month of one moment."""

    day: Period
    month: Period

    def of(self, window: Window) -> Period:
        """The one of a window."""
        return self.day if window == "daily" else self.month


def period(window: Window, moment: datetime, zone: ZoneInfo) -> Period:
    """The calendar period of a time zone in which a moment lies. Days of 23 and 25 hours are handled by the zone."""
    # Wall-clock arithmetic: it begins and ends at midnight there, whatever the offset is by then.
    midnight = moment.astimezone(zone).replace(hour=0, minute=0, second=0, microsecond=0, fold=0)
    if window == "daily":
        name, first, following = f"{midnight:%Y-%m-%d}", midnight, midnight + timedelta(days=1)
    else:
        first = midnight.replace(day=1)
        name, following = f"{first:%Y-%m}", (first + timedelta(days=32)).replace(day=1)
    return Period(window, name, ms_from_time(first), ms_from_time(following))


def periods_at(moment: datetime, zone: ZoneInfo) -> Periods:
    """The day and the month of a moment."""
    return Periods(period("daily", moment, zone), period("monthly", moment, zone))


def periods_since(earliest: datetime, now: datetime, zone: ZoneInfo) -> tuple[Period, ...]:
    """Days and months that have any moment from `earliest` to `now` in them, the days first, in their order."""
    found: list[Period] = []
    for window in WINDOWS:
        current = period(window, earliest, zone)
        last = period(window, now, zone)
        while current.start_ms < last.start_ms:
            found.append(current)
            current = period(window, time_from_ms(current.end_ms), zone)
        found.append(last)
    return tuple(found)


OTHERS = "*"
"""Among the tenants of the config: every one that is not named there, each by itself."""


class Caps(Message):
    """The caps of one scope. Without caps the spend is tracked only."""

    daily_usd: UsdAmount | None = Field(default=None, description="Spend allowed in a calendar day.")
    monthly_usd: UsdAmount | None = Field(default=None, description="Spend allowed in a calendar month.")
    enforcement: Enforcement = Field(
        default="soft",
        description="none: track, and alert at `soft_at_percent` if that is set; soft: alert at the thresholds; "
        "hard: also refuse calls that could exceed the cap.",
    )
    soft_at_percent: tuple[int, ...] = Field(
        default=(50, 80, 100), description="Thresholds that raise an alert. A hard cap raises one at 100, too."
    )
    on_exceeded: Literal["cheaper_model", "fail"] = Field(
        default="cheaper_model",
        description="If a hard cap has no room for a call: try the next model of the chain, or end the job.",
    )

    @field_validator("soft_at_percent")
    @classmethod
    def _percentages(cls, percents: tuple[int, ...]) -> tuple[int, ...]:
        if any(not 1 <= percent <= 100 for percent in percents):
            raise ValueError("thresholds are percentages from 1 to 100")
        return tuple(sorted(set(percents)))

    @property
    def is_hard(self) -> bool:
        """True if a cap must hold."""
        return self.enforcement == "hard" and (self.daily_usd, self.monthly_usd) != (None, None)

    @property
    def thresholds(self) -> frozenset[int]:
        """The percentages that raise an alert. Spend that is only tracked raises those that are asked for."""
        if self.enforcement == "none" and "soft_at_percent" not in self.model_fields_set:
            return frozenset()
        return frozenset((*self.soft_at_percent, 100) if self.enforcement == "hard" else self.soft_at_percent)

    def limit(self, window: Window) -> int | None:
        """The cap of a window in nano-dollars."""
        return self.daily_usd if window == "daily" else self.monthly_usd


@dataclass(frozen=True, slots=True)
class Counter:
    """One budget that a call is held against."""

    scope: Scope
    of: str | None
    """The agent or the tenant; None for scope `global`."""
    window: Window
    caps: Caps
    key: str = field(init=False)
    """The scope's name among the counters of a period: `global`, `agent:<name>` or `tenant:<name>`."""
    hard_limit: int | None = field(init=False)
    """The cap where it must hold, in nano-dollars."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", self.scope if self.of is None else f"{self.scope}:{self.of}")
        object.__setattr__(self, "hard_limit", self.limit if self.caps.enforcement == "hard" else None)

    @property
    def name(self) -> str:
        """The budget's name: its scope's, and its window's."""
        return f"{self.key}/{self.window}"

    @property
    def setting(self) -> str:
        """The path of its cap in the config: `agents.writer.budget.daily_usd`."""
        scope = {"agent": f"agents.{self.of}.budget", "tenant": f"budgets.tenants.{self.of}"}
        return f"{scope.get(self.scope, 'budgets.global')}.{self.window}_usd"

    @property
    def limit(self) -> int | None:
        """Nano-dollars; None where there is no cap."""
        return self.caps.limit(self.window)

    @property
    def agent(self) -> str | None:
        """The agent, for scope `agent`."""
        return self.of if self.scope == "agent" else None

    @property
    def tenant(self) -> str | None:
        """The tenant, for scope `tenant`."""
        return self.of if self.scope == "tenant" else None


_UNCAPPED = Caps(enforcement="none")


@dataclass(frozen=True)
class CapTable:
    """All caps of a config."""

    total: Caps
    agents: Mapping[str, Caps]
    tenants: Mapping[str, Caps]
    _known: dict[tuple[str, str | None], tuple[Counter, ...]] = field(
        default_factory=dict[tuple[str, "str | None"], "tuple[Counter, ...]"], compare=False, repr=False
    )

    def counters(self, agent: str, tenant: str | None) -> tuple[Counter, ...]:
        """The budgets that a call is held against: global, the agent's and the tenant's, each daily and monthly."""
        known = self._known.get((agent, tenant))
        if known is None:
            known = tuple(counter for key in scope_keys(agent, tenant) for counter in self.counters_of(key))
            if len(self._known) < MAX_KNOWN:  # programs choose the names of tenants
                self._known[agent, tenant] = known
        return known

    def counters_of(self, key: str) -> tuple[Counter, Counter]:
        """The daily and the monthly budget of a scope, by its key. Whatever the config does not know has no caps."""
        scope, _, name = key.partition(":")
        if scope == "agent":
            caps = self.agents.get(name, _UNCAPPED)
        elif scope == "tenant":
            caps = self.tenants.get(name) or self.tenants.get(OTHERS, _UNCAPPED)
        else:
            scope, caps = "global", self.total
        daily, monthly = (Counter(scope, name or None, window, caps) for window in WINDOWS)
        return daily, monthly

    def counter(self, key: str, window: Window) -> Counter:
        """One budget, by its scope's key."""
        daily, monthly = self.counters_of(key)
        return daily if window == "daily" else monthly

    def keys(self, more: Iterable[str] = ()) -> tuple[str, ...]:
        """The keys of all scopes that the config names, and of those that are given, each once: global first."""
        named = (f"tenant:{name}" for name in self.tenants if name != OTHERS)
        return tuple(dict.fromkeys(("global", *(f"agent:{name}" for name in self.agents), *named, *sorted(more))))

    @property
    def any_hard(self) -> bool:
        """True if any cap must hold."""
        every = (self.total, *self.agents.values(), *self.tenants.values())
        return any(caps.is_hard for caps in every)


MAX_KNOWN = 10_000

MAX_TENANTS = 20_000
"""Number of tenants in a month that the config does not name, and one caller does, whose budgets are counted."""

NEVER_FITS = frozenset({"CallOverCapError", "UnpricedModelError"})
"""The classes of refusals that no day and no month ends: a call that a cap has no room for, whatever was spent."""


def scope_keys(agent: str, tenant: str | None) -> tuple[str, ...]:
    """The scopes whose budgets a call is held against, by their keys."""
    return ("global", f"agent:{agent}") if tenant is None else ("global", f"agent:{agent}", f"tenant:{tenant}")


def scope_key(event: BudgetEvent) -> str:
    """The key of the scope that an event is about: `global`, `agent:<name>`, `tenant:<name>`."""
    name = {"global": None, "agent": event.agent, "tenant": event.tenant}[event.scope]
    return event.scope if name is None else f"{event.scope}:{name}"


def effective_limit(limit: int | None, raised: tuple[int, int] | None) -> int | None:
    """The cap that holds, in nano-dollars.

    Args:
        limit: the config's.
        raised: what a person raised it to, and the config's at that time: another one ends the raise.
    """
    if limit is None or raised is None or raised[1] != limit:
        return limit
    return max(limit, raised[0])


def reached(counter: Counter, limit: int | None, spent: int, *, refused: bool = False) -> tuple[int, ...]:
    """The thresholds (percent, ascending) that a spend in nano-dollars has reached.

    Args:
        counter: the budget.
        limit: its cap as it holds now, in nano-dollars: the config's, or what a person raised it to.
        spent: nano-dollars.
        refused: the cap has refused a call: it is reached, though the spend stays below it, as a hard cap sees to.
    """
    percents = counter.caps.thresholds
    if limit is None or not percents:
        return ()
    if limit == 0:  # any share of nothing is reached from the first
        return (100,) if refused else ()
    # In hundredths of the limit, so that no threshold is rounded.
    by_spend = {percent for percent in percents if spent * 100 >= limit * percent}
    return tuple(sorted({*by_spend, 100} if refused else by_spend))


def threshold(key: str, limit: int | None, percent: int) -> str:
    """The name of a threshold among those that were announced. A cap that is changed in mid-period has its own."""
    return f"{key}@{limit}@{percent}"


OWN_CAP = "execution"
"""The name of a job's own cap (`max_cost_usd`), as what refused a call."""


def fits(amount: int, *, limit: int | None, spent: int, reserved: int = 0) -> bool:
    """True if an amount may be held under a cap. To reach it is to be within it.

    Args:
        amount: the most that a call can cost.
        limit: the cap; None where there is none.
        spent: what counts against it already.
        reserved: what is held for other calls.
    """
    return limit is None or spent + reserved + amount <= limit


def spent_by(attempts: Iterable[Attempt]) -> int:
    """Cost of a job's attempts so far. One whose cost is unknown counts as what was held for it."""
    return sum((attempt.reserved or 0) if attempt.cost is None else attempt.cost for attempt in attempts)


@dataclass(frozen=True, slots=True)
class OverBudget:
    """The reservation was refused: by which budget, and when its period ends (ms since the epoch)."""

    counter: Counter
    resets_at_ms: int
    limit: int
    spent: int
    reserved: int
    amount: int
    by_share: bool = False
    """It has room, but not for as much of one caller or tenant while others use it."""

    @property
    def by_reservations(self) -> bool:
        """True if only calls in flight leave it no room: they mostly cost less than they hold."""
        return fits(self.amount, limit=self.limit, spent=self.spent)


RECENT_PARTS = 8
"""The last part is an eighth of the period: three hours of a day, nearly four days of a month."""

LEAST_PARTS = 24
"""There is no forecast before this part of a period is over: an hour of a day, thirty hours of a month."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Outlook of a period at its present pace."""

    total: int
    """Nano-dollars at its end; at least what is spent, and no more than a hard cap lets be spent."""
    reaches_ms: int | None
    """Time at which its cap is reached, in ms since the epoch; None where that is not within the period, or is past."""


def recent_from(period: Period, now_ms: int) -> int:
    """Beginning of recent spend, in ms since the epoch: not before the period began."""
    return max(period.start_ms, now_ms - (period.end_ms - period.start_ms) // RECENT_PARTS)


def forecast(
    period: Period, now_ms: int, *, spent: int, recent: int, limit: int | None, hard: bool = False
) -> Forecast | None:
    """Follows the pace of a period to its end.

    Args:
        period: the budget's.
        now_ms: a moment of it, in ms since the epoch.
        spent: nano-dollars in the period so far.
        recent: what of it was spent since `recent_from`; never taken for more than `spent`.
        limit: the cap in nano-dollars; None where there is none.
        hard: it refuses what is beyond it.

    Returns:
        None where too little is known: the period has just begun, is over, or nothing was spent.
    """
    length, elapsed = period.end_ms - period.start_ms, now_ms - period.start_ms
    if spent <= 0 or not period.holds(now_ms) or elapsed * LEAST_PARTS < length:
        return None
    left, lately = period.end_ms - now_ms, now_ms - recent_from(period, now_ms)
    recent = min(max(recent, 0), spent)
    # Half of each pace over the time that is left, in one division, so that nothing is rounded twice.
    more = left * (spent * lately + recent * elapsed) // (2 * elapsed * lately)
    reaches_ms = None
    if limit is not None and spent < limit <= spent + more:
        reaches_ms = now_ms + left * (limit - spent) // more
    total = spent + more
    return Forecast(min(total, max(limit, spent)) if hard and limit is not None else total, reaches_ms)
