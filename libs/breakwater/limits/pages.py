"""Budgets: the spent, reserved and free part of each, the forecast, and raising a cap."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from breakwater.client import ApiError, ApiKeyRefusedError
from breakwater.identity.pages.operator_actions import back_to, reason_of, submitted
from breakwater.identity.pages.pages import API_CLICKHOUSE_S, CLICKHOUSE_AWAY, Fetched, PageContext, fetched
from breakwater.identity.pages.visits import NotFound, ReadModels, Visit, page, shown
from breakwater.jobs.contract.events import Reconciliation, Window
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.columns import Column, lifted
from breakwater.kernel.formats import money
from breakwater.kernel.pages import charts
from breakwater.kernel.pages.tables import PageTable
from breakwater.kernel.pages.words import segment
from breakwater.kernel.types import ms_from_time, nano_from_usd, time_from_ms
from breakwater.limits.contract import BudgetList, BudgetStatus
from breakwater.limits.rules.budget import WINDOWS, Forecast, Period, forecast, periods_at, recent_from
from breakwater.limits.views import COLUMNS as BUDGETS
from breakwater.limits.views import RECONCILIATION, no_cap_text, tone, used_share
from breakwater.records.spend import Burn, burn, spent_since

CHARTS = 2
"""Budgets that are drawn on the page of all: those nearest to their caps."""

CONFIRM_FROM = 10
"""Raising a cap to more than this many times its value must be confirmed: a digit too many is easily typed."""

MOST = 200
"""Budgets of a table that are shown: those nearest to their caps first, then those with the highest spend."""

_Recent = dict[Window, dict[str, int]]
"""Recent spend in nano-dollars, by window and scope."""

_LENGTH = {"daily": "day", "monthly": "month"}


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """A budget and its forecast."""

    status: BudgetStatus
    forecast: Forecast | None
    outlook: str
    tone: str
    """`bad` if the cap is reached; `warn` if it is near, or will be reached; otherwise empty."""

    @property
    def title(self) -> str:
        """`Global, daily`, `content-writer, monthly`, `tenant acme, daily`."""
        return f"{self.whose}, {self.status.window}"

    @property
    def whose(self) -> str:
        """`Global`, `content-writer`, `tenant acme`."""
        names = {"global": "Global", "agent": self.status.agent, "tenant": f"tenant {self.status.tenant}"}
        return names[self.status.scope] or ""

    @property
    def bar(self) -> Markup | None:
        """Spent and reserved amounts as a part of the cap; None without a cap."""
        spent, reserved, limit = self.status.spent, self.status.reserved, self.status.limit
        if limit is None or self.used is None:
            return None
        colour = tone(self.status) or "good"
        label = f"{money(spent)} spent and {money(reserved)} reserved of {money(limit)}"
        parts = [(colour, float(spent)), ("second", float(reserved))] if limit else [(colour, 1.0)]
        return charts.share(parts, label, of=float(limit) or 1.0)

    @property
    def used(self) -> float | None:
        """The share of the cap that is spent or reserved; None without a cap."""
        return used_share(self.status)


_BUDGETS: list[Column[BudgetRow]] = lifted(BUDGETS, lambda row: row.status)
COLUMNS: tuple[Column[BudgetRow], ...] = (
    Column("budget", lambda row: row.status.budget, order=lambda row: row.title.casefold()),
    *_BUDGETS[1:],
    Column("outlook", lambda one: one.outlook, below=True),
)


@dataclass(frozen=True, slots=True)
class BudgetChart:
    """A budget with its chart."""

    row: BudgetRow
    picture: Fetched[Markup]
    unknown_costs: int


@dataclass(frozen=True, slots=True)
class RaiseRejected:
    """A form to raise a cap that was not accepted, shown again as it was filled in."""

    limit_usd: str
    reason: str
    problem: str
    confirm: str = ""
    """The statement that must be confirmed; empty if that would not help."""
    confirmed: str = ""
    """The value of the checkbox: a confirmation is valid for one amount only."""


def routes(context: PageContext) -> list[Route]:
    """The routes of these pages."""

    async def one(request: Request, rejected: RaiseRejected | None = None) -> Response:
        return await shown(context, request, "budget.html", partial(view_one, rejected=rejected), figures=_figures)

    async def raise_cap(request: Request) -> Response:
        session, fields = await submitted(request, approval=True)
        name, given, reason = request.path_params["name"], fields.get("limit_usd"), reason_of(fields) or ""
        wanted = given.strip().removeprefix("$").strip()
        known = await fetched(session.api.read(BudgetList, "budgets"))
        status = next((each for each in known.value.budgets if each.budget == name), None) if known.value else None
        if known.value and status is None:
            return await one(request)
        rejected = _rejected(given, wanted, reason, status, fields.get("confirmed"), known.problem)
        if rejected is not None:
            return await one(request, rejected)
        try:
            body = {"budget": name, "limit_usd": wanted, "reason": reason}
            result: dict[str, Any] = await session.api.post("budgets/raise", body)
        except ApiKeyRefusedError:
            raise
        except ApiError as error:
            return await one(request, RaiseRejected(given, reason, error.message))
        limit = money(nano_from_usd(wanted))
        if "unchanged" in result:
            session.notify(f"The cap of {name} was already {limit}.")
        else:
            session.notify(f"The cap of {name} is {limit} until its period ends.")
        return back_to(f"/budgets/{segment(name)}")

    return [
        page(context, "/budgets", "budgets.html", view, figures=_figures),
        page(
            context,
            "/budgets/reconciliation",
            "budget_reconciliation.html",
            view_comparison,
            compared=lambda _, models: fetched(
                models.api.read(Reconciliation, "budgets/reconciliation", timeout_s=API_CLICKHOUSE_S)
            ),
        ),
        Route("/budgets/{name:path}", one, methods=["GET"]),
        # At the same URL, so that a rejected form is shown on the page of its budget.
        Route("/budgets/{name:path}", raise_cap, methods=["POST"]),
    ]


class BudgetFigures(NamedTuple):
    """The budgets, their forecasts, and charts of some of them."""

    known: Fetched[BudgetList]
    recent: Fetched[_Recent]
    rows: list[BudgetRow]
    charts: list[BudgetChart]

    def without_cap(self, budget: BudgetStatus) -> str:
        """Words for one that has no cap."""
        return no_cap_text(budget, self.known.value.budgets if self.known.value else ())


async def _figures(visit: Visit, models: ReadModels) -> BudgetFigures:
    """The budgets, those nearest to their caps first, with charts of these, or of the one that the path names."""
    name = visit.path_params.get("name")
    known, recent = await asyncio.gather(
        fetched(models.api.read(BudgetList, "budgets")), fetched(_recent(models.analytics, visit))
    )
    periods = periods_at(visit.now, visit.zone)
    rows = [
        budget_row(
            one,
            periods.of(one.window),
            None if recent.value is None else recent.value[one.window].get(_scope(one), 0),
            visit.now,
        )
        for one in (known.value.budgets if known.value else ())
    ]
    rows.sort(key=lambda one: (-1.0 if one.used is None else one.used, one.status.spent), reverse=True)
    drawn = [one for one in rows if one.status.budget == name] if name else [one for one in rows if one.bar][:CHARTS]
    if recent.problem == CLICKHOUSE_AWAY:
        # Not waited for once more.
        charts = [BudgetChart(one, Fetched(None, recent.problem), 0) for one in drawn]
    else:
        charts = await asyncio.gather(*(_chart(models, visit, one) for one in drawn))
    return BudgetFigures(known, recent, rows, charts)


def view(visit: Visit, figures: BudgetFigures) -> dict[str, Any]:
    """The page of all budgets."""

    def table(name: str, label: str, of: Window | None, *, capped: bool) -> PageTable[BudgetRow]:
        kept = [one for one in figures.rows if capped == (one.used is not None) and of in (None, one.status.window)]
        # There may be thousands of tenants.
        return PageTable(visit.address, name, label, COLUMNS, kept, most=MOST)

    return {
        "known": figures.known,
        "without_cap": figures.without_cap,
        "recent": figures.recent,
        "day": table("day", "Today", "daily", capped=True),
        "month": table("month", "This month", "monthly", capped=True),
        "uncapped": table("uncapped", "Without a cap", None, capped=False),
        "count": len(figures.rows),
        "drawn": figures.charts,
    }


def view_one(visit: Visit, figures: BudgetFigures, rejected: RaiseRejected | None = None) -> dict[str, Any] | NotFound:
    """The page of one budget."""
    name = visit.path_params["name"]
    one = next((one for one in figures.rows if one.status.budget == name), None)
    if figures.known.value and one is None:
        text = f"There is no budget {name!r}, or nothing was spent from it in this period. /budgets lists all."
        return NotFound("Budget not found", text)
    return {
        "status": 200 if rejected is None else 422,
        "rejected": rejected,
        "known": figures.known,
        "without_cap": figures.without_cap,
        "recent": figures.recent,
        "name": name,
        "one": one,
        "drawn": figures.charts[0] if figures.charts else None,
    }


def view_comparison(visit: Visit, compared: Fetched[Reconciliation]) -> dict[str, Any]:
    """The page of the comparison."""
    budgets = compared.value.budgets if compared.value else ()
    table = PageTable(visit.address, "list", "Reconciliation", RECONCILIATION, budgets)
    return {"table": table}


def budget_row(status: BudgetStatus, period: Period, recent: int | None, now: datetime) -> BudgetRow:
    """A budget with its forecast.

    Args:
        status: as it is now.
        period: the present one of its window.
        recent: recent spend, in nano-dollars; None if unknown, and then there is no forecast.
        now: the time.
    """
    expected = None
    # The counters may still be those of the period that has just ended.
    hard, now_ms = status.enforcement == "hard", ms_from_time(now)
    # Under a hard cap that is reached, nothing more is to come.
    if recent is not None and status.period == period.name and not (hard and status.reached):
        expected = forecast(period, now_ms, spent=status.spent, recent=recent, limit=status.limit, hard=hard)
    will_be = status.limit is not None and expected is not None and expected.reaches_ms is not None
    return BudgetRow(
        status,
        expected,
        outlook(status, expected, recent is not None, now_ms),
        tone(status) or ("warn" if will_be else ""),
    )


def outlook(status: BudgetStatus, expected: Forecast | None, known: bool, now_ms: int) -> str:
    """A forecast in words. `known`: True if recent spend is known."""
    length, limit = _LENGTH[status.window], status.limit
    if limit is not None and status.reached:
        return "Cap reached" if limit else "Cap is zero"
    if not status.spent:
        return "Nothing spent yet"
    if expected is None:
        return f"Too early in the {length} to forecast" if known else "Unknown: ClickHouse is unavailable"
    if expected.reaches_ms is not None:
        return f"Forecast: cap reached {_in_about(expected.reaches_ms - now_ms)}"
    of = "" if limit is None else f" of {money(limit)}"
    return f"Forecast: {money(expected.total)}{of}"


def _in_about(wait_ms: int) -> str:
    """A time to come, as vague as a pace is: an hour of the clock would be another one at every look."""
    hours = wait_ms / 3_600_000
    if hours < 1:
        return "within an hour"
    number, unit = (round(hours), "hour") if hours < 36 else (round(hours / 24), "day")
    return f"in about {number} {unit}" + ("s" if number > 1 else "")


def _rejected(
    given: str, wanted: str, reason: str, status: BudgetStatus | None, confirmed: str, problem: str | None
) -> RaiseRejected | None:
    """Reason against raising a cap; None if there is none."""
    try:
        limit = _nano(wanted)
    except ValueError as error:
        return RaiseRejected(given, reason, str(error))
    if not reason:
        return RaiseRejected(given, reason, "a raise needs a reason, for the record")
    if problem:
        return RaiseRejected(given, reason, f"the current cap is unknown: {problem}")
    present = status.limit if status else None
    if present is not None and limit > present * CONFIRM_FROM and confirmed != str(limit):
        confirm = f"raise it to {money(limit)}, more than ten times the cap of {money(present)}"
        asks = "this is more than ten times the cap; confirm it below"
        return RaiseRejected(given, reason, asks, confirm, str(limit))
    return None


def _nano(wanted: str) -> int:
    """An amount as people write it, in nano-dollars. Raises ValueError: it is invalid or ambiguous."""
    if "," in wanted:
        # A decimal separator in half of the world, and a thousands separator in the other.
        raise ValueError(f"{wanted!r} contains a comma: write 2.50, with a decimal point and no thousands separators")
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?|\.[0-9]+", wanted):
        raise ValueError(f"{wanted!r} is not an amount in USD: write 2.50, with a decimal point")
    return nano_from_usd(wanted)


async def _recent(analytics: Analytics, visit: Visit) -> _Recent:
    """The recent spend of each scope, from which the day and the month are forecast."""
    periods = periods_at(visit.now, visit.zone)
    since = {window: recent_from(periods.of(window), ms_from_time(visit.now)) for window in WINDOWS}
    sums = await asyncio.gather(*(spent_since(analytics, time_from_ms(since[one]), visit.now) for one in WINDOWS))
    return dict(zip(WINDOWS, sums, strict=True))


async def _chart(models: ReadModels, visit: Visit, row: BudgetRow) -> BudgetChart:
    status = row.status
    period = periods_at(visit.now, visit.zone).of(status.window)
    burnt = await fetched(burn(models.analytics, period, _scope(status), visit.zone, visit.now))
    if burnt.value is None:
        return BudgetChart(row, Fetched(None, burnt.problem), 0)
    return BudgetChart(row, Fetched(_picture(row, period, burnt.value, visit.now)), burnt.value.unknown_costs)


def _picture(row: BudgetRow, period: Period, burnt: Burn, now: datetime) -> Markup:
    """The spend through the period against its cap."""
    status, points = row.status, list(burnt.points)
    if status.period == period.name and points[-1][0] <= now:
        # Redis' counters are a little ahead of what is stored.
        points[-1] = (points[-1][0], max(points[-1][1], status.spent))
    return charts.burn(
        f"Spend: {row.title}, {status.period}",
        points,
        start=time_from_ms(period.start_ms),
        end=time_from_ms(period.end_ms),
        cap=status.limit,
        forecast=_ahead(row.forecast, status.limit, time_from_ms(period.end_ms)),
        executions={name: one for name, one in (("agent", status.agent), ("tenant", status.tenant)) if one},
    )


def _ahead(expected: Forecast | None, limit: int | None, end: datetime) -> list[tuple[datetime, int]]:
    """A forecast as a line: up to the cap, and on to the period's end; under a hard cap, level from there."""
    if expected is None:
        return []
    line = [(end, expected.total)]
    if expected.reaches_ms is not None and limit is not None:
        line.insert(0, (time_from_ms(expected.reaches_ms), limit))
    return line


def _scope(status: BudgetStatus) -> str:
    """The scope's key: the budget's name without its window."""
    return status.budget.rpartition("/")[0]
