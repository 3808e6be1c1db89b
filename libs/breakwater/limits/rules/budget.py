"""Budgets: their calendar periods, the thresholds that a spend reaches, and the arithmetic of every limit.

A call's worst case is reserved before the call, and replaced by its cost when it has ended. Each reservation must fit
under the limit together with what is spent and reserved already, so concurrent calls can't exceed a limit together. The
scripts in Redis apply the same rule.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime, time, timedelta
from functools import cached_property, lru_cache
from itertools import chain, islice, product
from typing import Any, Literal, TypeVar, get_args
from zoneinfo import ZoneInfo

from breakwater.kernel.formats import hint
from breakwater.kernel.immutable import immutable
from breakwater.kernel.types import ms_from_time, time_from_ms
from breakwater.limits.contract import (
    BudgetEvent,
    BudgetScope,
    Enforcement,
    LimitAction,
    LimitRaise,
    LimitSettings,
    LimitUnit,
    LimitWindow,
    Window,
)
from breakwater.limits.rules.limit import PERIODS, Limit, amount_of, enforcement_problem, limit_of
from breakwater.limits.rules.limit_index import KNOWN_BEFORE_CALLS, LimitIndex, PlaneLimit, PlaneLimits
from breakwater.limits.rules.rate_limit import NO_RATE_LIMITS, RateLimits, rate_limits_of
from breakwater.limits.rules.scopes import (
    BASE,
    EACH,
    MAX_DIMENSIONS,
    ONLY_BASE,
    CallNames,
    Dimension,
    Dimensions,
    ScopePart,
    key_of,
    key_of_call,
    may_be_made_up,
    parse_scope,
    parts_of,
    patterns_of,
    scope_text,
)
from breakwater.limits.settings import OTHERS

WINDOWS: tuple[Window, ...] = get_args(Window)
"""The windows, the shortest first."""


@dataclass(frozen=True, slots=True)
class Period:
    """A calendar day, week, month or quarter, or the total, which never ends.

    Attributes:
        window: its kind.
        name: `2026-11-21`, `2026-W47`, `2026-11`, `2026-Q4` or `total`.
        start_ms: its first moment, in milliseconds since the epoch.
        end_ms: the first moment after it, in milliseconds since the epoch.
    """

    window: Window
    name: str
    start_ms: int
    end_ms: int

    @property
    def resets_at(self) -> datetime | None:
        """Its end; None if it never ends."""
        return None if self == TOTAL else time_from_ms(self.end_ms)

    def holds(self, moment_ms: int) -> bool:
        """Returns True if a moment lies in the period."""
        return self.start_ms <= moment_ms < self.end_ms


TOTAL = Period("total", "total", 0, 7_258_118_400_000)
"""The period that never ends: until the year 2200, which ClickHouse can store."""


@dataclass(frozen=True, slots=True)
class Periods:
    """The periods of one moment, one for each window."""

    all: tuple[Period, ...]
    """In the order of `WINDOWS`."""

    def of(self, window: Window) -> Period:
        """Returns a period by its window."""
        return self.all[WINDOWS.index(window)]

    @property
    def day(self) -> Period:
        """The day, in which all others change."""
        return self.all[0]

    @property
    def month(self) -> Period:
        """The month."""
        return self.of("monthly")


def period(window: Window, moment: datetime, zone: ZoneInfo) -> Period:
    """Returns a time zone's calendar period that a moment lies in. Days may have 23 or 25 hours."""
    return periods_at(moment, zone).of(window)


def periods_at(moment: datetime, zone: ZoneInfo) -> Periods:
    """Returns the periods of a moment."""
    return _periods_of_day(moment.astimezone(zone).date(), zone)


@lru_cache(maxsize=256)
def _periods_of_day(day: date, zone: ZoneInfo) -> Periods:
    # Wall-clock arithmetic: a period begins and ends at local midnight, whatever the UTC offset is by then.
    midnight = datetime.combine(day, time(), zone)
    week = midnight - timedelta(days=midnight.weekday())
    month = midnight.replace(day=1)
    quarter = month.replace(month=day.month - (day.month - 1) % 3)
    bounds: Mapping[Window, tuple[str, datetime, datetime]] = {
        "daily": (f"{day:%Y-%m-%d}", midnight, midnight + timedelta(days=1)),
        "weekly": (f"{day:%G-W%V}", week, week + timedelta(days=7)),
        "monthly": (f"{day:%Y-%m}", month, (month + timedelta(days=32)).replace(day=1)),
        "quarterly": (f"{day:%Y}-Q{quarter.month // 3 + 1}", quarter, (quarter + timedelta(days=95)).replace(day=1)),
    }
    return Periods(
        (
            *(
                Period(window, name, ms_from_time(start), ms_from_time(end))
                for window, (name, start, end) in bounds.items()
            ),
            TOTAL,
        )
    )


def period_named(name: str, zone: ZoneInfo) -> Period:
    """Returns the period with a name."""
    if name == TOTAL.name:
        return TOTAL
    year, _, rest = name.partition("-")
    window: Window = "daily"
    noon = datetime(int(year), 1, 1, 12, tzinfo=zone)
    if rest.startswith("W"):
        window = "weekly"
        noon = datetime.fromisocalendar(int(year), int(rest[1:]), 4).replace(hour=12, tzinfo=zone)
    elif rest.startswith("Q"):
        window = "quarterly"
        noon = noon.replace(month=3 * int(rest[1:]) - 1)
    else:
        month, dash, day = rest.partition("-")
        window = "daily" if dash else "monthly"
        noon = noon.replace(month=int(month), day=int(day or 15))
    return period(window, noon, zone)


def periods_since(
    earliest: datetime, now: datetime, zone: ZoneInfo, windows: Iterable[Window] = ("daily", "monthly")
) -> tuple[Period, ...]:
    """Returns the days from that of `earliest` to that of `now`, then the longer periods, in chronological order."""
    periods: list[Period] = []
    for window in windows:
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
        window: of its periods.
        key: the scope's key among the counters of a period: `global`, `agent:<name>`, …
        cap: its limit; None if its spend is only counted.
        is_named: True if the config or a limit names its scope.
        raised: the raise of its limit.
        unit: what it counts.
        effective: the limit, in nano-dollars, tokens or requests, as it was raised; None if there is none.
        hard_limit: the same if it refuses calls, else None.
        flags: the flags of its place in the script that reserves.
    """

    window: Window
    key: str
    cap: Limit | None = None
    is_named: bool = False
    raised: LimitRaise | None = None
    unit: LimitUnit = "usd"
    effective: int | None = field(init=False)
    hard_limit: int | None = field(init=False)
    flags: str = field(init=False)

    def __post_init__(self) -> None:
        effective = self.limit if self.raised is None else amount_of(self.unit, self.raised.amount)
        object.__setattr__(self, "effective", effective)
        object.__setattr__(self, "hard_limit", effective if self.enforcement == "hard" else None)
        if self.unit != "usd":
            object.__setattr__(self, "flags", "")
            return
        kinds = {part.kind for part in self.parts}
        is_made_up = not self.is_named and may_be_made_up(self.parts)
        # A tenant is also counted by month, which bounds its days.
        flags = "n" if is_made_up and (self.window != "daily" or kinds != {"tenant"}) else ""
        if self.hard_limit is not None and not kinds & {"key", "user"}:
            # Of a tenant's own budget, all of its callers together have no share; a key and a user are one caller.
            flags += "y" if "tenant" in kinds else "xy"
        object.__setattr__(self, "flags", flags)

    def __hash__(self) -> int:
        return hash((self.key, self.window))  # a call's counters are a key of caches

    @property
    def parts(self) -> tuple[ScopePart, ...]:
        """The parts of its scope."""
        return parts_of(self.key)

    @property
    def scope(self) -> BudgetScope:
        """The kind of its scope."""
        kind = self.parts[0].kind.partition(":")[0]
        return next(scope for scope in SCOPES if scope == kind)

    @property
    def scope_name(self) -> str | None:
        """The name in its scope: the agent, the tenant, …; None for scope `global`."""
        return self.parts[0].name or None

    @property
    def name(self) -> str:
        """The budget's name: its scope, its window, and its unit if that is not money, such as `agent:writer/daily`."""
        name = f"{scope_text(self.key)}/{self.window}"
        return name if self.unit == "usd" else f"{name}/{self.unit}"

    @property
    def setting(self) -> str | None:
        """The path of its limit in the config: `agents.writer.budget.daily_usd`; None if it has none.

        Of a limit that the plane keeps, the limit in words.
        """
        return None if self.cap is None else self.cap.in_words

    @property
    def limit(self) -> int | None:
        """The limit, in nano-dollars, tokens or requests; None if there is none."""
        return None if self.cap is None else self.cap.amount

    @property
    def enforcement(self) -> Enforcement:
        """The enforcement of its limit."""
        return "none" if self.cap is None else self.cap.enforcement

    def kind_at(self, percent: int) -> Literal["soft_cap", "hard_cap"]:
        """Returns the kind of the event that a share of its limit, in percent, is used."""
        return "hard_cap" if percent == 100 and self.enforcement == "hard" else "soft_cap"

    @property
    def thresholds(self) -> tuple[int, ...]:
        """The percentages that raise an alert."""
        return () if self.cap is None else self.cap.thresholds

    @property
    def agent(self) -> str | None:
        """The agent, for scope `agent`."""
        return self.scope_name if self.scope == "agent" else None

    @property
    def tenant(self) -> str | None:
        """The tenant, for scope `tenant`."""
        return self.scope_name if self.scope == "tenant" else None

    @property
    def is_of_agent(self) -> bool:
        """Returns True if it holds for all calls of an agent, or of all agents."""
        return self.scope in ("global", "agent") and self.within is None

    @property
    def other_name(self) -> str | None:
        """The name in any other scope; of a tag with its value, `project=web`."""
        if self.scope in ("global", "agent", "tenant"):
            return None
        return str(self.parts[0]).partition(":")[2]

    @property
    def within(self) -> str | None:
        """The second part of the scope, as people write it."""
        return str(self.parts[1]) if len(self.parts) > 1 else None


SCOPES: tuple[BudgetScope, ...] = get_args(BudgetScope)

UNITS: tuple[LimitUnit, ...] = get_args(LimitUnit)

OTHER_TENANTS = f"budgets.tenants.{OTHERS}."
"""The beginning of the ids of limits that only count for tenants that the config does not name."""


def _wait(counter: Counter) -> int:
    """Returns a number that is larger for a shorter wait for a spent budget's next period; 0 if no call waits."""
    waits = counter.cap is not None and counter.cap.action == "wait"
    return len(WINDOWS) - WINDOWS.index(counter.window) if waits else 0


@dataclass(frozen=True)
class LimitTable:
    """All limits.

    Attributes:
        limits: the limits. Of two on one scope in one window, the first one counts.
        agents: the agents of the config.
        tenants: the tenants that the config names, for which `budgets.tenants["*"]` does not count.
        plane_limits: the limits that the plane keeps, and the raises. They may change: who changes them takes another
            table. A limit of the config in the same place counts instead.
        version: of `plane_limits`, as Redis has it; empty if the plane keeps none.
    """

    limits: tuple[Limit, ...] = ()
    agents: tuple[str, ...] = ()
    tenants: tuple[str, ...] = ()
    plane_limits: PlaneLimits = field(default_factory=PlaneLimits, compare=False, repr=False)
    version: str = ""
    # Not of the constructor: a table that is copied with other limits must not inherit their counters.
    _cached: dict[tuple[object, ...], tuple[Counter, ...]] = field(
        default_factory=dict[tuple[object, ...], "tuple[Counter, ...]"], init=False, compare=False, repr=False
    )
    _counters: dict[tuple[str, Window, LimitUnit], Counter] = field(
        default_factory=dict[tuple[str, Window, LimitUnit], Counter], init=False, compare=False, repr=False
    )
    _cached_rates: dict[tuple[str | None, ...], RateLimits] = field(
        default_factory=dict[tuple["str | None", ...], RateLimits], init=False, compare=False, repr=False
    )

    def rate_limits(self, names: CallNames) -> RateLimits:
        """Returns the windows and slots that a call counts in, but those of its task."""
        if not self.kinds_of_rates:
            return NO_RATE_LIMITS
        limited_names = tuple(map(names.of_kind, self._names_of_rates))
        rates = self._cached_rates.get(limited_names)
        if rates is None:
            rates = NO_RATE_LIMITS
            for kinds in self.kinds_of_rates:
                if (key := key_of_call(kinds, names)) is not None:
                    rates += rate_limits_of(key, self._rates_on(kinds, key))
            _cache(self._cached_rates, limited_names, rates)
        return rates

    def _rates_on(self, kinds: tuple[str, ...], key: str) -> Iterator[Limit]:
        """Yields the limits on rates that count for a scope, as they are raised, the most particular first."""
        for pattern in map(key_of, patterns_of(parts_of(key))):
            for index in self._indexes:
                for limit in index.rates[kinds].get(pattern, ()) if kinds in index.rates else ():
                    limit_raise = self.plane_limits.raise_of(limit, key)
                    amount = None if limit_raise is None else amount_of(limit.unit, limit_raise.amount)
                    yield limit if amount is None else replace(limit, amount=amount)

    @cached_property
    def kinds_of_rates(self) -> tuple[tuple[str, ...], ...]:
        """The kinds of the scopes of limits on rates."""
        return tuple(dict.fromkeys(chain(*(index.rates for index in self._indexes))))

    @cached_property
    def _names_of_rates(self) -> tuple[str, ...]:
        """The kinds of names that matter to limits on rates."""
        return tuple(sorted(set(chain(*self.kinds_of_rates))))

    def counters(self, names: CallNames, dimensions: Dimensions = ONLY_BASE) -> tuple[Counter, ...]:
        """Returns the budgets that a call counts towards, in the dimensions that are counted: first those of money.

        Of several that are spent, the first decides. So those for whose next period calls wait are last, the longest
        first: no call waits, to be refused after that, or to wait again.
        """
        counted_names = (dimensions, *map(names.of_kind, dimensions.kinds))
        counters = self._cached.get(counted_names)
        if counters is None:
            keys = dimensions.keys(names)
            further = (self.counter(key, window, unit) for unit in self._further_units for window, key in keys)
            all_counters = (
                *(self.counter(key, window) for window, key in keys),
                *(counter for counter in further if counter.cap is not None),
            )
            counters = tuple(sorted(all_counters, key=_wait))
            _cache(self._cached, counted_names, counters)
        return counters

    def counters_of(self, key: str) -> tuple[Counter, Counter]:
        """Returns the daily and the monthly budget of a scope, by its key. A scope not in the config has no limits."""
        return self.counter(key, "daily"), self.counter(key, "monthly")

    def counter(self, key: str, window: Window, unit: LimitUnit = "usd") -> Counter:
        """Returns one budget, by its scope's key, its window and its unit."""
        counter = self._counters.get((key, window, unit))
        if counter is None:
            parts = parts_of(key)
            cap = self.limit_that_counts(parts, unit, PERIODS[window])
            is_named = key in self._named_keys or (cap is not None and cap.is_named)
            counter = Counter(window, key, cap, is_named, cap and self.plane_limits.raise_of(cap, key), unit)
            _cache(self._counters, (key, window, unit), counter)
        return counter

    def amount_in(self, counter: Counter, counted: Period) -> int | None:
        """Returns the amount of a budget's limit in a period: as it is raised now or, if that is over, at its end."""
        limit = counter.cap
        if limit is None or self.plane_limits.now_ms < counted.end_ms:
            return counter.effective
        limit_raise = self.plane_limits.raise_of(limit, counter.key, counted.end_ms - 1)
        is_raised = limit_raise is not None and ms_from_time(limit_raise.at) < counted.end_ms
        return amount_of(limit.unit, limit_raise.amount) if limit_raise is not None and is_raised else limit.amount

    def limit_like(self, limit: Limit) -> Limit | None:
        """Returns the limit on the same unit in the same window of exactly the same scope."""
        same = (index.by_place.get(limit.place) for index in self._indexes)
        return next((limit for limit in same if limit is not None), None)

    def limit_that_counts(
        self, parts: tuple[ScopePart, ...], unit: LimitUnit, window: LimitWindow | None
    ) -> Limit | None:
        """Returns the limit that counts for a scope: its own or, without one, that on each name of its kind."""
        is_named_tenant = parts[0].kind == "tenant" and parts[0].name in self.tenants
        places = ((tuple(sorted(pattern)), unit, window) for pattern in patterns_of(parts))
        limits = (index.by_place.get(place) for place in places for index in self._indexes)
        return next(
            (
                limit
                for limit in limits
                if limit is not None and not (is_named_tenant and limit.id.startswith(OTHER_TENANTS))
            ),
            None,
        )

    @cached_property
    def _indexes(self) -> tuple[LimitIndex, LimitIndex]:
        """The limits of the config, and then those that the plane keeps."""
        return LimitIndex(self.limits), self.plane_limits

    @cached_property
    def _further_units(self) -> tuple[LimitUnit, ...]:
        """The units of budgets, but for money."""
        units = {unit for _, unit in chain(*(index.budgets for index in self._indexes))}
        return tuple(unit for unit in UNITS if unit in units and unit != "usd")

    def _is_hard(self, key: str, window: Window) -> bool:
        """Returns True if a budget of a scope in a window refuses calls, whatever its unit."""
        units: tuple[LimitUnit, ...] = ("usd", *self._further_units)
        return any(self.counter(key, window, unit).hard_limit is not None for unit in units)

    @cached_property
    def _named_keys(self) -> frozenset[str]:
        """The keys of the scopes that the config names, whether they have limits or not."""
        agents = (f"agent:{name}" for name in self.agents)
        tenants = (f"tenant:{name}" for name in self.tenants)
        return frozenset(("global", *agents, *tenants))

    def is_incomplete(self, names: CallNames, dimensions: Dimensions) -> bool:
        """Returns True if a hard limit applies to a call in a dimension that is not counted, or lacks the past."""
        uncounted = (dimension for dimension in self.dimensions if dimension not in dimensions.complete)
        keys = ((dimension, dimension.key(names)) for dimension in uncounted)
        return any(key is not None and self._is_hard(key, dimension.window) for dimension, key in keys)

    def unreadable_limit(self, names: CallNames) -> str | None:
        """Returns the id of a limit that may hold for a call, but is not readable here; None if there is none."""
        for limit_id, parts in self.plane_limits.unreadable.items():
            own_names = [(part.name, names.of_kind(part.kind)) for part in parts]
            if all(own_name is not None and name in (own_name, EACH) for name, own_name in own_names):
                return limit_id
        return None

    def keys(self, more: Iterable[str] = ()) -> tuple[str, ...]:
        """Returns the keys of the scopes that the config or a limit names, global first, and then those in `more`.

        They are a line of a metric each: of the limits that the plane keeps, only so many count.
        """
        agents = (f"agent:{name}" for name in self.agents)
        tenants = (f"tenant:{name}" for name in self.tenants)
        limits = chain(self.limits, islice(self.plane_limits.limits.values(), MAX_NAMED_LIMITS))
        limited = (limit.key for limit in limits if limit.budget_dimension is not None and limit.is_named)
        return tuple(dict.fromkeys(("global", *agents, *tenants, *limited, *sorted(more))))

    def with_removed_agents(self, earlier: LimitTable) -> LimitTable:
        """Returns a table that also has the limits of the agents that only an earlier one has."""
        agents = tuple(name for name in earlier.agents if name not in self.agents)
        scopes = {(ScopePart("agent", name),) for name in agents}
        limits = (limit for limit in earlier.limits if limit.parts in scopes)
        return replace(self, limits=(*self.limits, *limits), agents=(*self.agents, *agents))

    @cached_property
    def next_end_ms(self) -> float:
        """The next moment at which a limit or a raise ends, in milliseconds since the epoch."""
        ends = (limit.until_ms for limit in self.limits if limit.until_ms is not None)
        return min((self.plane_limits.next_end_ms, *ends))

    def at(self, now_ms: int, states: Mapping[str, PlaneLimit]) -> LimitTable:
        """Returns the table of a moment, given the limits that the plane keeps."""
        self.plane_limits.end(states, now_ms)
        return replace(self, limits=tuple(limit for limit in self.limits if limit.holds_at(now_ms)))

    @cached_property
    def dimensions(self) -> frozenset[Dimension]:
        """The dimensions of the budgets beside those that are always counted."""
        budgets = chain(*(index.budgets for index in self._indexes))
        return frozenset(dimension for dimension, _ in budgets).difference(BASE)

    def may_refuse(self, names: Mapping[str, Collection[str]]) -> bool:
        """Returns True if a hard limit may apply to a job's calls.

        Args:
            names: the names that they can count under, of each kind of `KNOWN_BEFORE_CALLS`.
        """
        for dimension, scopes in chain(*(index.hard_scopes.items() for index in self._indexes)):
            if KNOWN_BEFORE_CALLS.issuperset(dimension.kinds):
                scopes_of_job = product(*([ScopePart(kind, name) for name in names[kind]] for kind in dimension.kinds))
                if any(self._is_hard(key_of(parts), dimension.window) for parts in scopes_of_job):
                    return True
            else:
                # By the names of the job, as there may be many scopes.
                kinds = (kind for kind in dimension.kinds if kind in KNOWN_BEFORE_CALLS and names[kind])
                choices = ([ScopePart(kind, name) for name in (*names[kind], EACH)] for kind in kinds)
                if any(known_parts in scopes for known_parts in product(*choices)):
                    return True
        return False

    @cached_property
    def any_hard(self) -> bool:
        """Returns True if any budget refuses calls."""
        return any(index.hard_scopes for index in self._indexes)


def settings_problems(
    settings: LimitSettings, tags: Collection[str], known_names: Mapping[str, Collection[str]]
) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with a limit, each with its field; the field is empty for the whole.

    Args:
        settings: the limit.
        tags: the config's cost tags.
        known_names: the names of the kinds whose names the config knows, such as `agent`.
    """
    try:
        parts = parse_scope(settings.scope)
    except ValueError as error:
        yield "scope", str(error)
        return
    if (problem := enforcement_problem(settings)) is not None:
        yield "", problem
    for kind, name in parts:
        tag = kind.removeprefix("tag:")
        if tag != kind and tag not in tags:
            yield "scope", f"{tag!r} is none of cost_tags{hint(tag, tags)}"
        if name == EACH:
            continue
        if EACH in name:
            yield "scope", f"{name!r}: names have no wildcards; `*` alone is each name"
        elif kind in known_names and name not in known_names[kind]:
            yield "scope", f"no {kind} {name!r} is configured{hint(name, known_names[kind])}"


def limit_problems(
    limits: Sequence[LimitSettings],
    tags: Collection[str],
    known_names: Mapping[str, Collection[str]],
    base: LimitTable,
    path_of_all: str = "budgets.limits",
) -> Iterator[str]:
    """Yields what is wrong with the limits of a config, each with its path.

    Args:
        limits: the limits.
        tags: the config's cost tags.
        known_names: the names of the kinds whose names the config knows, such as `agent`.
        base: the limits that the config writes elsewhere.
        path_of_all: where they are written.
    """
    first: dict[tuple[object, ...], int] = {}
    combinations: set[tuple[object, ...]] = set()
    for number, settings in enumerate(limits):
        path = f"{path_of_all}.{number}"
        problems = list(settings_problems(settings, tags, known_names))
        yield from (f"{path}.{field}: {text}" if field else f"{path}: {text}" for field, text in problems)
        if problems:
            continue
        limit = limit_of(path, settings)
        earlier = base.limit_like(limit)
        if limit.place in first:
            number_of_first = first[limit.place]
            yield f"{path}: {path_of_all}.{number_of_first} limits the same scope in the same window; keep one of them"
        elif earlier is not None:
            yield f"{path}: {earlier.id} limits the same scope in the same window; keep one of them"
        first.setdefault(limit.place, number)
        combinations.add((limit.kinds, limit.window))
    if len(combinations) > MAX_DIMENSIONS:
        yield (
            f"{path_of_all}: are of {len(combinations)} combinations of kinds of scopes and windows; a call would "
            f"count in each of them, so at most {MAX_DIMENSIONS} are allowed"
        )


MAX_NAMED_LIMITS = 1_000
"""The most limits that the plane keeps whose budgets are metrics, and are listed before anything was spent."""

MAX_CACHED = 10_000


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def _cache(cache: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Caches a value. A full cache begins anew, as programs choose the names, and those of today are not the last."""
    if len(cache) >= MAX_CACHED:
        cache.clear()
    cache[key] = value


MAX_MADE_UP_SCOPES = 20_000
"""The number of scopes with tenants, users, teams or tags that no limit names and that one caller may use in a period,
and the number of sliding windows of such scopes at the same time. Calls in further ones are refused. A name makes one
scope for each combination of kinds that is limited: `user:*` and `user:* within model:*` make four for a user of three
models."""

NEVER_FITS = frozenset({"CallOverCapError", "UnpricedModelError"})
"""The error classes of refusals that waiting does not end: the limit has no room for the call, whatever was spent."""


def budget_event(
    counter: Counter, counted: Period, id_end: str, agent: str | None = None, **fields: Any
) -> BudgetEvent:
    """Returns an event of a budget in a period.

    Args:
        counter: the budget's.
        counted: the period.
        id_end: the end of the event's id, unique for the budget and the period.
        agent: the agent that has caused it; only for a budget of several agents.
        fields: the event's other fields.
    """
    of_budget: dict[str, Any] = {
        "event_id": f"{counter.name}/{counted.name}/{id_end}",
        "scope": counter.scope,
        "agent": counter.agent or agent,
        "tenant": counter.tenant,
        "name": counter.other_name,
        "within": counter.within,
        "window": counted.window,
        "period": counted.name,
        "enforcement": counter.enforcement,
        "resets_at": counted.resets_at,
    }
    return BudgetEvent(**of_budget | fields)


def scope_key(event: BudgetEvent) -> str:
    """Returns the key of an event's scope, such as `global` or `agent:<name>`."""
    name = event.agent if event.scope == "agent" else event.tenant if event.scope == "tenant" else event.name
    key = event.scope if event.scope == "global" else f"{event.scope}:{name}"
    return key if event.within is None else key_of((*parts_of(key), *parts_of(event.within)))


def reached_thresholds(counter: Counter, limit: int | None, spent: int, *, refused: bool = False) -> tuple[int, ...]:
    """Returns the thresholds (percent, ascending) that a spend has reached.

    Args:
        counter: the budget.
        limit: its effective limit, in nano-dollars.
        spent: the spend, in nano-dollars.
        refused: True if the limit has refused a call. It is reached then, though a hard limit keeps the spend below it.
    """
    percents = counter.thresholds
    if limit is None or not percents:
        return ()
    if limit == 0:  # every percentage of zero is reached from the start
        return (100,) if refused else ()
    # In hundredths of the limit, so that no threshold is rounded.
    by_spend = {percent for percent in percents if spent * 100 >= limit * percent}
    return tuple(sorted({*by_spend, 100} if refused else by_spend))


def threshold(key: str, limit: int | None, percent: int) -> str:
    """Returns the name under which a threshold is announced once. A limit that changes in mid-period has new ones."""
    return f"{key}@{limit}@{percent}"


OWN_CAP = "execution"
"""The name of a job's own limit (`max_cost_usd`), when it refuses a call."""


def fits(amount: int, *, limit: int | None, spent: int) -> bool:
    """Returns True if a limit has room for an amount, which may reach it exactly. All are in nano-dollars.

    Args:
        amount: the most that the call can cost.
        limit: the limit; None if there is none.
        spent: the spend so far.
    """
    return limit is None or spent + amount <= limit


@immutable()
class OverBudget:
    """A refused reservation.

    Attributes:
        counter: the budget that refused it.
        resets_at: the end of the budget's period; None if it never ends.
        limit: the limit, in nano-dollars, tokens or requests, as the other amounts.
        spent: what was used so far.
        reserved: the amounts reserved for calls in flight.
        amount: the refused amount.
        by_share: True if the budget has room, but not for such a share of one caller or tenant while others use it.
    """

    counter: Counter
    resets_at: datetime | None
    limit: int
    spent: int
    reserved: int
    amount: int
    by_share: bool = False

    @property
    def by_reservations(self) -> bool:
        """Returns True if only calls in flight leave no room; they mostly cost less than they reserve."""
        return fits(self.amount, limit=self.limit, spent=self.spent)

    @property
    def cap(self) -> int | None:
        """The limit, in nano-dollars, as its refusal names it; None if it is too small for any such call."""
        return self.limit if self.counter.unit == "usd" and (self.amount <= self.limit or not self.limit) else None

    def does(self, action: LimitAction) -> bool:
        """Returns True if the config says that its limit does this with a call."""
        return self.counter.cap is not None and self.counter.cap.action == action


RECENT_PARTS = 8
"""Recent spend is that of the last eighth of a period: three hours of a day, nearly four days of a month."""

MIN_ELAPSED_PARTS = 24
"""A forecast needs a twenty-fourth of the period to be over: an hour of a day, thirty hours of a month."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """The forecast of a period at its present pace.

    Attributes:
        total: nano-dollars at the period's end; at least what is spent, and at most a hard limit.
        reaches_ms: the time at which the limit is reached, in milliseconds since the epoch; None if it is not reached
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
        limit: the limit in nano-dollars; None if there is none.
        hard: True if the limit refuses calls.

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
        hard_cap: the limit in nano-dollars that refuses calls in the following period; None if there is none.

    Returns:
        Nano-dollars; None if too little is known for a forecast.
    """
    total = _growth(period, now_ms, spent, recent, following.end_ms - following.start_ms)
    return total if total is None or hard_cap is None else min(total, hard_cap)


def _growth(period: Period, now_ms: int, spent: int, recent: int, over_ms: int) -> int | None:
    """Returns the spend over some time at the mean of a period's overall and its recent pace; None if it is unknown."""
    length_ms = period.end_ms - period.start_ms
    elapsed_ms = now_ms - period.start_ms
    if spent <= 0 or period == TOTAL or not period.holds(now_ms) or elapsed_ms * MIN_ELAPSED_PARTS < length_ms:
        return None
    recent_ms = now_ms - recent_from(period, now_ms)
    recent = min(max(recent, 0), spent)
    # Half of each pace over the time, in one division, so that nothing is rounded twice.
    return over_ms * (spent * recent_ms + recent * elapsed_ms) // (2 * elapsed_ms * recent_ms)
