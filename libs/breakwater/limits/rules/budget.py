"""Budgets: their calendar periods, the thresholds that a spend reaches, and the arithmetic of every cap.

A call's worst case is reserved before the call, and replaced by its cost when it has ended. Each reservation must fit
under the cap together with what is spent and reserved already, so concurrent calls can't exceed a cap together. The
scripts in Redis apply the same rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

from breakwater.kernel.types import ms_from_time, time_from_ms
from breakwater.limits.contract import BudgetEvent, BudgetScope, Window
from breakwater.limits.settings import OTHERS, Caps

if TYPE_CHECKING:
    from breakwater.jobs.contract.execution import Attempt

WINDOWS: tuple[Window, Window] = ("daily", "monthly")


@dataclass(frozen=True, slots=True)
class CallNames:
    """The names that a call counts under."""

    agent: str
    tenant: str | None = None

    @classmethod
    def of(cls, attempt: Attempt) -> CallNames:
        """Returns the names of a recorded call."""
        return cls(attempt.agent, attempt.tenant)


@dataclass(frozen=True, slots=True)
class Period:
    """A calendar day or month.

    Attributes:
        window: `daily` or `monthly`.
        name: `2026-11-21` or `2026-11`.
        start_ms: its first moment, in milliseconds since the epoch.
        end_ms: the first moment after it, in milliseconds since the epoch.
    """

    window: Window
    name: str
    start_ms: int
    end_ms: int

    def holds(self, moment_ms: int) -> bool:
        """Returns True if a moment lies in the period."""
        return self.start_ms <= moment_ms < self.end_ms


@dataclass(frozen=True, slots=True)
class Periods:
    """The periods of one moment, one for each window."""

    day: Period
    month: Period

    def of(self, window: Window) -> Period:
        """Returns the day or the month, by its window."""
        return self.day if window == "daily" else self.month

    @property
    def all(self) -> tuple[Period, ...]:
        """All of them, the shortest first."""
        return self.day, self.month


def period(window: Window, moment: datetime, zone: ZoneInfo) -> Period:
    """Returns a time zone's calendar period that a moment lies in. Days may have 23 or 25 hours."""
    # Wall-clock arithmetic: a period begins and ends at local midnight, whatever the UTC offset is by then.
    midnight = moment.astimezone(zone).replace(hour=0, minute=0, second=0, microsecond=0, fold=0)
    if window == "daily":
        name = f"{midnight:%Y-%m-%d}"
        start = midnight
        end = midnight + timedelta(days=1)
    else:
        start = midnight.replace(day=1)
        name = f"{start:%Y-%m}"
        end = (start + timedelta(days=32)).replace(day=1)
    return Period(window, name, ms_from_time(start), ms_from_time(end))


def periods_at(moment: datetime, zone: ZoneInfo) -> Periods:
    """Returns the day and the month of a moment."""
    return Periods(period("daily", moment, zone), period("monthly", moment, zone))


def period_named(name: str, zone: ZoneInfo) -> Period:
    """Returns the period with a name."""
    is_month = len(name) == len("2026-11")
    noon = datetime.fromisoformat(f"{name}-15T12:00" if is_month else f"{name}T12:00").replace(tzinfo=zone)
    return period("monthly" if is_month else "daily", noon, zone)


def periods_since(earliest: datetime, now: datetime, zone: ZoneInfo) -> tuple[Period, ...]:
    """Returns the days from that of `earliest` to that of `now`, then the months, in chronological order."""
    periods: list[Period] = []
    for window in WINDOWS:
        current = period(window, earliest, zone)
        last = period(window, now, zone)
        while current.start_ms < last.start_ms:
            periods.append(current)
            current = period(window, time_from_ms(current.end_ms), zone)
        periods.append(last)
    return tuple(periods)


@dataclass(frozen=True, slots=True)
class Counter:
    """One budget that calls count towards.

    Attributes:
        scope: `global`, `agent` or `tenant`.
        scope_name: the agent or the tenant; None for scope `global`.
        window: `daily` or `monthly`.
        caps: the scope's caps.
        key: the scope's key among the counters of a period: `global`, `agent:<name>` or `tenant:<name>`.
        hard_limit: the cap in nano-dollars if it refuses calls, else None.
    """

    scope: BudgetScope
    scope_name: str | None
    window: Window
    caps: Caps
    key: str = field(init=False)
    hard_limit: int | None = field(init=False)

    def __post_init__(self) -> None:
        key = self.scope if self.scope_name is None else f"{self.scope}:{self.scope_name}"
        object.__setattr__(self, "key", key)
        object.__setattr__(self, "hard_limit", self.limit if self.caps.enforcement == "hard" else None)

    @property
    def hard_limits(self) -> tuple[int | None, int | None, int | None]:
        """The limits that refuse calls, in nano-dollars, tokens and requests."""
        return self.hard_limit, None, None

    @property
    def flags(self) -> str:
        """The flags of its place in the script that reserves."""
        made_up = "n" if self.scope == "tenant" and self.window == "monthly" else ""
        # Of a tenant's own budget, all of its callers together have no share.
        shares = "y" if self.scope == "tenant" else "xy"
        return made_up if self.hard_limit is None else made_up + shares

    @property
    def name(self) -> str:
        """The budget's name: its scope's key and its window, such as `agent:writer/daily`."""
        return f"{self.key}/{self.window}"

    @property
    def setting(self) -> str:
        """The path of its cap in the config: `agents.writer.budget.daily_usd`."""
        scope = {"agent": f"agents.{self.scope_name}.budget", "tenant": f"budgets.tenants.{self.scope_name}"}
        return f"{scope.get(self.scope, 'budgets.global')}.{self.window}_usd"

    @property
    def limit(self) -> int | None:
        """The cap in nano-dollars; None if there is none."""
        return self.caps.limit(self.window)

    @property
    def agent(self) -> str | None:
        """The agent, for scope `agent`."""
        return self.scope_name if self.scope == "agent" else None

    @property
    def tenant(self) -> str | None:
        """The tenant, for scope `tenant`."""
        return self.scope_name if self.scope == "tenant" else None


_UNCAPPED = Caps(enforcement="none")


@dataclass(frozen=True)
class CapTable:
    """All caps of a config."""

    total: Caps
    agents: Mapping[str, Caps]
    tenants: Mapping[str, Caps]
    _cached: dict[CallNames, tuple[Counter, ...]] = field(
        default_factory=dict[CallNames, "tuple[Counter, ...]"], compare=False, repr=False
    )

    def counters(self, names: CallNames) -> tuple[Counter, ...]:
        """Returns the budgets that a call counts towards, daily and monthly: global, of its agent and of its tenant."""
        counters = self._cached.get(names)
        if counters is None:
            counters = tuple(counter for key in scope_keys(names) for counter in self.counters_of(key))
            if len(self._cached) < MAX_CACHED:  # programs choose the names of tenants
                self._cached[names] = counters
        return counters

    def counters_of(self, key: str) -> tuple[Counter, Counter]:
        """Returns the daily and the monthly budget of a scope, by its key. A scope not in the config has no caps."""
        scope, _, name = key.partition(":")
        if scope == "agent":
            caps = self.agents.get(name, _UNCAPPED)
        elif scope == "tenant":
            caps = self.tenants.get(name) or self.tenants.get(OTHERS, _UNCAPPED)
        else:
            scope = "global"
            caps = self.total
        daily, monthly = (Counter(scope, name or None, window, caps) for window in WINDOWS)
        return daily, monthly

    def counter(self, key: str, window: Window) -> Counter:
        """Returns one budget, by its scope's key and its window."""
        daily, monthly = self.counters_of(key)
        return daily if window == "daily" else monthly

    def keys(self, more: Iterable[str] = ()) -> tuple[str, ...]:
        """Returns the keys of all scopes in the config, global first, and then those in `more`, each once."""
        agents = (f"agent:{name}" for name in self.agents)
        tenants = (f"tenant:{name}" for name in self.tenants if name != OTHERS)
        return tuple(dict.fromkeys(("global", *agents, *tenants, *sorted(more))))

    @property
    def any_hard(self) -> bool:
        """Returns True if any cap refuses calls."""
        return any(caps.is_hard for caps in (self.total, *self.agents.values(), *self.tenants.values()))


MAX_CACHED = 10_000

MAX_TENANTS = 20_000
"""The number of tenants unknown to the config that one caller may use in a month. The budgets of further ones are not
counted."""

NEVER_FITS = frozenset({"CallOverCapError", "UnpricedModelError"})
"""The error classes of refusals that waiting does not end: the cap has no room for the call, whatever was spent."""


def scope_keys(names: CallNames) -> tuple[str, ...]:
    """Returns the keys of the scopes whose budgets a call counts towards."""
    keys = ("global", f"agent:{names.agent}")
    return keys if names.tenant is None else (*keys, f"tenant:{names.tenant}")


def scope_key(event: BudgetEvent) -> str:
    """Returns the key of an event's scope: `global`, `agent:<name>` or `tenant:<name>`."""
    name = {"global": None, "agent": event.agent, "tenant": event.tenant}[event.scope]
    return event.scope if name is None else f"{event.scope}:{name}"


def effective_limit(limit: int | None, raised: tuple[int, int] | None) -> int | None:
    """Returns the effective cap, in nano-dollars.

    Args:
        limit: the config's cap.
        raised: the cap that an operator raised it to, and the config's cap at that time. A change of the config's cap
            ends the raise.
    """
    if limit is None or raised is None or raised[1] != limit:
        return limit
    return max(limit, raised[0])


def reached_thresholds(counter: Counter, limit: int | None, spent: int, *, refused: bool = False) -> tuple[int, ...]:
    """Returns the thresholds (percent, ascending) that a spend has reached.

    Args:
        counter: the budget.
        limit: its effective cap, in nano-dollars.
        spent: the spend, in nano-dollars.
        refused: True if the cap has refused a call. The cap is reached then, though a hard cap keeps the spend below
            it.
    """
    percents = counter.caps.thresholds
    if limit is None or not percents:
        return ()
    if limit == 0:  # every percentage of zero is reached from the start
        return (100,) if refused else ()
    # In hundredths of the limit, so that no threshold is rounded.
    by_spend = {percent for percent in percents if spent * 100 >= limit * percent}
    return tuple(sorted({*by_spend, 100} if refused else by_spend))


def threshold(key: str, limit: int | None, percent: int) -> str:
    """Returns the name under which a threshold is announced once. A cap that changes in mid-period has new ones."""
    return f"{key}@{limit}@{percent}"


OWN_CAP = "execution"
"""The name of a job's own cap (`max_cost_usd`), when it refuses a call."""


def fits(amount: int, *, limit: int | None, spent: int, reserved: int = 0) -> bool:
    """Returns True if an amount may be reserved under a cap; it may reach the cap exactly. All are in nano-dollars.

    Args:
        amount: the most that the call can cost.
        limit: the cap; None if there is none.
        spent: the spend so far.
        reserved: the amounts reserved for other calls.
    """
    return limit is None or spent + reserved + amount <= limit


def spent_by(attempts: Iterable[Attempt]) -> int:
    """Returns the cost of a job's attempts, in nano-dollars. An unknown cost counts as its reservation."""
    return sum((attempt.reserved or 0) if attempt.cost is None else attempt.cost for attempt in attempts)


@dataclass(frozen=True, slots=True)
class OverBudget:
    """A refused reservation.

    Attributes:
        counter: the budget that refused it.
        resets_at_ms: the end of the budget's period, in milliseconds since the epoch.
        limit: the cap, in nano-dollars.
        spent: the spend so far.
        reserved: the amounts reserved for calls in flight.
        amount: the refused amount.
        by_share: True if the budget has room, but not for such a share of one caller or tenant while others use it.
    """

    counter: Counter
    resets_at_ms: int
    limit: int
    spent: int
    reserved: int
    amount: int
    by_share: bool = False

    @property
    def by_reservations(self) -> bool:
        """Returns True if only calls in flight leave no room; they mostly cost less than they reserve."""
        return fits(self.amount, limit=self.limit, spent=self.spent)


RECENT_PARTS = 8
"""Recent spend is that of the last eighth of a period: three hours of a day, nearly four days of a month."""

MIN_ELAPSED_PARTS = 24
"""A forecast needs a twenty-fourth of the period to be over: an hour of a day, thirty hours of a month."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """The forecast of a period at its present pace.

    Attributes:
        total: nano-dollars at the period's end; at least what is spent, and at most a hard cap.
        reaches_ms: the time at which the cap is reached, in milliseconds since the epoch; None if it is not reached
            within the period, or has been reached already.
    """

    total: int
    reaches_ms: int | None


def recent_from(period: Period, now_ms: int) -> int:
    """Returns the beginning of recent spend, in milliseconds since the epoch: at the earliest the period's start."""
    return max(period.start_ms, now_ms - (period.end_ms - period.start_ms) // RECENT_PARTS)


def forecast(
    period: Period, now_ms: int, *, spent: int, recent: int, limit: int | None, hard: bool = False
) -> Forecast | None:
    """Extrapolates a period's spend to its end, at the mean of its overall and its recent pace.

    Args:
        period: the budget's period.
        now_ms: the current time, in milliseconds since the epoch.
        spent: the period's spend so far, in nano-dollars.
        recent: the part of it since `recent_from`; a figure above `spent` counts as `spent`.
        limit: the cap in nano-dollars; None if there is none.
        hard: True if the cap refuses calls.

    Returns:
        None if too little is known: the period has just begun or is over, or nothing was spent.
    """
    remaining_ms = period.end_ms - now_ms
    growth = _growth(period, now_ms, spent, recent, remaining_ms)
    if growth is None:
        return None
    reaches_ms = None
    if limit is not None and spent < limit <= spent + growth:
        reaches_ms = now_ms + remaining_ms * (limit - spent) // growth
    total = spent + growth
    return Forecast(min(total, max(limit, spent)) if hard and limit is not None else total, reaches_ms)


def next_forecast(
    period: Period, following: Period, now_ms: int, *, spent: int, recent: int, hard_cap: int | None
) -> int | None:
    """Extrapolates a period's spend to the whole of the following period, at the pace of `forecast`.

    Args:
        period: the budget's present period.
        following: the period after it.
        now_ms: the current time, in milliseconds since the epoch.
        spent: the present period's spend so far, in nano-dollars.
        recent: the part of it since `recent_from`.
        hard_cap: the cap in nano-dollars that refuses calls in the following period; None if there is none.

    Returns:
        Nano-dollars; None if too little is known for a forecast.
    """
    total = _growth(period, now_ms, spent, recent, following.end_ms - following.start_ms)
    return total if total is None or hard_cap is None else min(total, hard_cap)


def _growth(period: Period, now_ms: int, spent: int, recent: int, over_ms: int) -> int | None:
    """Returns the spend over some time at the mean of a period's overall and its recent pace; None if it is unknown."""
    length_ms = period.end_ms - period.start_ms
    elapsed_ms = now_ms - period.start_ms
    if spent <= 0 or not period.holds(now_ms) or elapsed_ms * MIN_ELAPSED_PARTS < length_ms:
        return None
    recent_ms = now_ms - recent_from(period, now_ms)
    recent = min(max(recent, 0), spent)
    # Half of each pace over the time, in one division, so that nothing is rounded twice.
    return over_ms * (spent * recent_ms + recent * elapsed_ms) // (2 * elapsed_ms * recent_ms)
