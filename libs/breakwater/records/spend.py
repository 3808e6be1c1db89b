"""Spend of calls as budgets count it: to rebuild lost or wrong counters, to draw spend, to report a month's costs.

A call counts at the moment that it is charged at, in periods of the budgets' time zone. So the last point of a burn,
and the sums of a month, are what Redis has counted to the nano-dollar, but for what the sink has yet to store.

The figures that counters are rebuilt from are those of `limits.rules.ledger`, over the part of the record that
ClickHouse has; the rest is read from EVENTS. Where the one ends and the other begins is a sequence of the stream as it
is now (the log). Rows of an earlier log, which was lost, count whatever their sequence says, as nothing else has them.

Statements: `spend.sql`. All functions raise as `Analytics.query` does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

from breakwater.kernel.clickhouse.client import Analytics, statements
from breakwater.kernel.time_window import TimeWindow
from breakwater.kernel.types import ms_from_time, time_from_ms
from breakwater.limits.contract import BudgetEvent
from breakwater.limits.rules.budget import TOTAL, Period, period, recent_from
from breakwater.limits.rules.ledger import FIGURES, AttemptSums, BudgetPlace
from breakwater.limits.rules.scopes import BASE, ONLY_BASE, CallNames, Dimension, Dimensions, parts_of
from breakwater.limits.store.budget_counters import KEEP
from breakwater.records.contract import CostsBy
from breakwater.records.rows import budget_of
from breakwater.records.rules.costs import CostSums
from breakwater.records.schema import ATTEMPTS, BUDGET_EVENTS, CLOSED_SPEND

SQL = statements(__file__)

HOUR_MS = 3_600_000
_MARGIN_MS = 2 * 24 * HOUR_MS
"""Largest distance of an attempt's two times: `started_at`, by a worker's clock, which partitions the table, and
`reserved_at`, by Redis' clock, which gives the period that it counts in. A call begins as soon as it is admitted, and
clocks are not wrong by days; the bounds only keep old partitions from being read."""
_DRAWN_MARGIN_MS = HOUR_MS
"""The same distance for charts, which may be slightly wrong: in practice, clocks differ by seconds."""


async def spend(
    analytics: Analytics,
    periods: Sequence[Period],
    *,
    log_created: datetime,
    upto: int,
    dimensions: Dimensions = ONLY_BASE,
) -> dict[BudgetPlace, AttemptSums]:
    """The sums of the stored calls for each budget in some periods: `limits.rules.ledger.ledger` of them.

    Args:
        analytics: the database.
        periods: one query each; a call counts in all that hold the moment it is charged at.
        dimensions: those that are counted.
        log_created: when EVENTS as it is now was made, by the NATS server's clock.
        upto: rows of that log with a higher sequence are left out, as those are read from the log itself.

    Returns:
        AttemptSums by a period's name and a scope's key; nothing for a budget without a call.
    """
    sums: dict[BudgetPlace, AttemptSums] = defaultdict(AttemptSums)
    analytics = await analytics.caught_up(ATTEMPTS, CLOSED_SPEND)
    for budget_period in periods:
        counted = [dimension for dimension in dimensions.all if dimension.window == budget_period.window]
        grouping = _Grouping.by(counted)
        start_ms, rows = budget_period.start_ms, ()
        if budget_period == TOTAL:
            start_ms = await _closed_until(analytics)
            parameters = {**grouping.parameters, "closed_until": time_from_ms(start_ms)}
            rows = await analytics.read(dict[str, Any], SQL["closed_spend"] % grouping.columns, parameters)
        parameters = {
            **_within(start_ms, budget_period.end_ms, _MARGIN_MS),
            **grouping.parameters,
            "log_created": log_created,
            "upto": upto,
        }
        rows += await analytics.read(dict[str, Any], SQL["spend"] % grouping.columns, parameters)
        for row in rows:
            names = grouping.names(row)
            figures = AttemptSums(**{figure: row[figure] or 0 for figure in FIGURES})
            for dimension in counted:
                if (key := dimension.key(names)) is not None:
                    sums[budget_period.name, key] += figures
    return dict(sums)


async def _closed_until(analytics: Analytics) -> int:
    """The moment before which all calls are in `closed_spend`, in ms since the epoch; 0 for none."""
    [(until,)] = (await analytics.query(SQL["closed_until"])).rows
    return 0 if until is None else ms_from_time(until)


async def close_spend(analytics: Analytics, zone: ZoneInfo, logged_since: datetime) -> bool:
    """Stores the sums over the calls of months of which EVENTS has none any more, so that they are final.

    Several processes may do it at once: they store the same, as each closes month after month.

    Args:
        analytics: the database.
        zone: the budgets' time zone, whose months are closed.
        logged_since: when the first call that EVENTS has was stored.

    Returns:
        False if no further month is over for so long.
    """
    analytics = await analytics.caught_up(ATTEMPTS, CLOSED_SPEND)
    start_ms = await _closed_until(analytics)
    # A call is stored some time after the moment that it is charged at.
    final_until_ms = period("monthly", logged_since - KEEP, zone).start_ms
    closed = False
    while start_ms < final_until_ms:
        unclosed = _within(start_ms, final_until_ms, _MARGIN_MS)
        first: datetime | None = (await analytics.query(SQL["first_charged"], unclosed)).rows[0][0]
        if first is None:
            break
        end_ms = period("monthly", first, zone).end_ms
        # Whatever is stored is of an EVENTS from before that time.
        parameters = {**_within(start_ms, end_ms, _MARGIN_MS), "log_created": time_from_ms(TOTAL.end_ms), "upto": 0}
        await analytics.execute(SQL["close_spend"] % (SQL["spend"] % SQL["names_of_closed"]), parameters)
        closed = True
        start_ms = end_ms  # also if nothing was stored, as the two times of its calls are further apart than the margin
    return closed


@dataclass(frozen=True, slots=True)
class _Grouping:
    """The columns that calls are grouped by, so that each row says in which scopes they count."""

    kinds: tuple[str, ...]

    @classmethod
    def by(cls, dimensions: Iterable[Dimension]) -> _Grouping:
        """The names that some dimensions need."""
        kinds = {kind for dimension in dimensions for kind in dimension.kinds}
        return cls(tuple(sorted(kinds - {"global"})))

    @property
    def _expressions(self) -> list[str]:
        return [
            _NAMES["tag" if kind.startswith(_TAG) else kind].replace("{tag:", f"{{tag{number}:")
            for number, kind in enumerate(self.kinds)
        ]

    @property
    def columns(self) -> str:
        """The columns of a SELECT, `name0` and so on."""
        columns = (f"{expression} AS name{number}" for number, expression in enumerate(self._expressions))
        return ", ".join(("0 AS no_name", *columns))

    @property
    def condition(self) -> str:
        """The condition that each column has its value, the parameters `value0` and so on."""
        parts = (f"AND {expression} = {{value{number}:String}}" for number, expression in enumerate(self._expressions))
        return " ".join(parts)

    @property
    def parameters(self) -> dict[str, object]:
        """The parameters of the columns."""
        return {
            f"tag{number}": kind.removeprefix(_TAG) for number, kind in enumerate(self.kinds) if kind.startswith(_TAG)
        }

    def names(self, row: Mapping[str, Any]) -> CallNames:
        """The names that the calls of a row count under."""
        names = {kind: row[f"name{number}"] for number, kind in enumerate(self.kinds)}
        tags = {kind.removeprefix(_TAG): names.pop(kind) for kind in self.kinds if kind.startswith(_TAG)}
        known_tags = tuple((tag, value) for tag, value in tags.items() if value is not None)
        return CallNames(**{"agent": "", **names}, tags=known_tags)


async def stored_upto(analytics: Analytics, *, log_created: datetime) -> int:
    """The highest sequence of EVENTS, as it is now, that an attempt is stored of; 0 for none.

    Attempts before it may be missing: batches are stored in no fixed order, and what is unstorable never is.
    """
    analytics = await analytics.caught_up(ATTEMPTS)
    return (await analytics.query(SQL["stored_upto"], {"log_created": log_created})).rows[0][0]


async def stored_attempts(analytics: Analytics, attempt_ids: Sequence[str]) -> int:
    """The number of these attempts that are stored."""
    executions = [attempt_id.rpartition(":")[0] for attempt_id in attempt_ids]
    result = await analytics.query(SQL["stored_attempts"], {"executions": executions, "attempts": list(attempt_ids)})
    return result.rows[0][0]


async def budget_notes(analytics: Analytics, periods: Sequence[Period]) -> tuple[BudgetEvent, ...]:
    """The budget events of some periods, the earliest first."""
    analytics = await analytics.caught_up(BUDGET_EVENTS)
    parameters = {
        "windows": [budget_period.window for budget_period in periods],
        "names": [budget_period.name for budget_period in periods],
    }
    return await analytics.read(budget_of, SQL["budget_notes"], parameters)


@dataclass(frozen=True, slots=True)
class Burn:
    """The spend of one budget through one period."""

    points: tuple[tuple[datetime, int], ...]
    """A moment and what was spent by then, in nano-dollars: at the period's beginning, after each hour of a day or each
    day of a month, and now."""
    unknown_costs: int
    """The number of calls of unknown cost; with any, the sums are lower bounds."""

    @property
    def spent(self) -> int:
        """The whole spend, in nano-dollars."""
        return self.points[-1][1]


async def burn(analytics: Analytics, budget_period: Period, key: str, zone: ZoneInfo, now: datetime) -> Burn:
    """The growth of a budget's spend.

    Args:
        analytics: the database.
        budget_period: the day or the month.
        key: the budget's scope: `global`, `agent:<name>`, …
        zone: the budgets' time zone, which decides when the days of a month begin.
        now: time of the last point, unless the period is over.
    """
    marks = _marks(budget_period, zone)
    parts = [part for part in parts_of(key) if part.name]
    grouping = _Grouping(tuple(part.kind for part in parts))
    end_ms = min(max(ms_from_time(now), budget_period.start_ms), budget_period.end_ms)
    parameters = {
        **_within(budget_period.start_ms, budget_period.end_ms, _DRAWN_MARGIN_MS),
        **grouping.parameters,
        **{f"value{number}": part.name for number, part in enumerate(parts)},
        "steps": marks[:-1],
    }
    steps = await analytics.read(dict[str, Any], SQL["burn"] % grouping.condition, parameters)
    rows = {row["step"]: row for row in steps}
    points = [(time_from_ms(budget_period.start_ms), 0)]
    spent = 0
    for start, end in pairwise(marks):
        if start >= end_ms and start not in rows:
            break
        spent += (rows[start]["spend"] or 0) if start in rows else 0
        points.append((time_from_ms(min(end, end_ms)), spent))
    return Burn(tuple(points), sum(row["unknown_costs"] for row in rows.values()))


async def spent_since(
    analytics: Analytics, since: datetime, until: datetime, dimensions: Iterable[Dimension] = BASE
) -> dict[str, int]:
    """The spend from a moment to just before another, in nano-dollars by the keys of scopes that spent anything."""
    counted = {dimension.kinds: dimension for dimension in dimensions}.values()
    grouping = _Grouping.by(counted)
    parameters = {**_within(ms_from_time(since), ms_from_time(until), _DRAWN_MARGIN_MS), **grouping.parameters}
    sums: dict[str, int] = defaultdict(int)
    for row in await analytics.read(dict[str, Any], SQL["spent_since"] % grouping.columns, parameters):
        names = grouping.names(row)
        for dimension in counted:
            if (key := dimension.key(names)) is not None:
                sums[key] += row["spend"] or 0
    return dict(sums)


@dataclass(frozen=True, slots=True)
class SpendHistory:
    """The spend in the steps of a window from the first call on, in nano-dollars."""

    window: TimeWindow
    spend: dict[str | None, list[int]]
    """By name, the highest first; None for no name."""
    others: list[int]
    """Of all other names together."""
    other_names: int


async def spend_history(
    analytics: Analytics, start: datetime, end: datetime, by: CostsBy, *, tag: str | None, most: int
) -> SpendHistory | None:
    """The spend from a moment to just before another; None without a call.

    Args:
        analytics: the database.
        start: the first moment.
        end: the moment after the last.
        by: the kind of name.
        tag: the tag, for `tag`.
        most: the most names, of which the last one gives way to the others if there are more.
    """
    margins = _within(ms_from_time(start), ms_from_time(end), _DRAWN_MARGIN_MS)
    parameters = {**margins, "tag": tag or "", "most": most}
    first: datetime | None = (await analytics.query(SQL["first_charged"], parameters)).rows[0][0]
    if first is None:
        return None
    window = TimeWindow.last(max(end - first, timedelta(minutes=1)), end)
    parameters |= {"start_ms": window.start_ms, "step_ms": window.step_s * 1000}
    spent: dict[str | None, list[int]] = defaultdict(lambda: [0] * window.buckets)
    others = [0] * window.buckets
    all_names = 0
    for row in await analytics.read(dict[str, Any], SQL["spend_history"] % _NAMES[by], parameters):
        steps = others if row["is_other"] else spent[row["name"]]
        steps[row["step"]] = row["spend"] or 0
        all_names = row["all_names"]
    highest_first = dict(sorted(spent.items(), key=lambda entry: -sum(entry[1])))
    return SpendHistory(window, highest_first, others, all_names - len(spent))


_TAG = "tag:"
_NAMES = {
    "agent": "agent",
    "tenant": "tenant",
    "model": "model",
    "provider": "provider",
    "deployment": "deployment",
    "key": "submitted_by",
    "user": "user",
    "team": "team",
    "tag": "nullIf(cost_tags[{tag:String}], '')",
}


async def month_costs(
    analytics: Analytics, month: Period, before: Period, by: CostsBy, *, tag: str | None, now_ms: int
) -> dict[str | None, CostSums]:
    """The sums of a month, by names.

    Args:
        analytics: the database.
        month: the month in question.
        before: the month before it.
        by: the kind of name.
        tag: the tag, for `tag`.
        now_ms: in ms since the epoch; the recent part of the month depends on it.

    Returns:
        None among the names is for calls without one.
    """
    parameters = {
        **_within(month.start_ms, month.end_ms, _MARGIN_MS),
        "earliest": time_from_ms(before.start_ms - _MARGIN_MS),
        "previous": time_from_ms(before.start_ms),
        "recent": time_from_ms(recent_from(month, min(now_ms, month.end_ms))),
        "tag": tag or "",
    }
    rows = await analytics.read(dict[str, Any], SQL["month"] % _NAMES[by], parameters)
    return {row.pop("name"): CostSums(**{name: value or 0 for name, value in row.items()}) for row in rows}


def _within(start_ms: int, end_ms: int, margin_ms: int) -> dict[str, object]:
    return {
        "start": time_from_ms(start_ms),
        "end": time_from_ms(end_ms),
        "earliest": time_from_ms(max(start_ms - margin_ms, 0)),
        "latest": time_from_ms(end_ms + margin_ms),
    }


def _marks(budget_period: Period, zone: ZoneInfo) -> list[int]:
    """The beginnings of the steps of a period, in ms since the epoch, and its end."""
    if budget_period.window == "daily":
        return [*range(budget_period.start_ms, budget_period.end_ms, HOUR_MS), budget_period.end_ms]
    marks = [budget_period.start_ms]
    while marks[-1] < budget_period.end_ms:
        marks.append(period("daily", time_from_ms(marks[-1]), zone).end_ms)
    return marks
