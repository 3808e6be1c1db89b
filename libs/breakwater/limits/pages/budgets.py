"""The pages of spend by period: what is spent, reserved and free, forecasts, and raising limits."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from breakwater.client import ApiClient, ApiError, ApiKeyRefusedError
from breakwater.identity.pages.operator_actions import back_to, read_action, reason_of
from breakwater.identity.pages.rendering import (
    API_CLICKHOUSE_S,
    CLICKHOUSE_AWAY,
    PageContext,
    PagePart,
    fetch_part,
)
from breakwater.identity.pages.visits import NotFound, ReadModels, Visit, page, render_page
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.columns import Column, columns_of_part
from breakwater.kernel.formats import money
from breakwater.kernel.pages import charts
from breakwater.kernel.pages.tables import PageTable
from breakwater.kernel.pages.words import segment
from breakwater.kernel.types import ms_from_time, nano_from_usd, time_from_ms
from breakwater.limits.contract import BudgetList, BudgetStatus, Reconciliation, Window
from breakwater.limits.rules.budget import WINDOWS, Forecast, Period, forecast, periods_at, recent_from
from breakwater.limits.rules.limit import PERIODS
from breakwater.limits.rules.scopes import Dimension, dimension_of, key_from_text
from breakwater.limits.views import COLUMNS as BUDGETS
from breakwater.limits.views import RECONCILIATION, no_cap_text, owner_of, tone, used_share
from breakwater.records.spend import Burn, burn, spent_since

MAX_CHARTS = 2
"""Maximum number of charts on the page of all budgets: of those nearest to their limits."""

CONFIRM_FROM = 10
"""A raise to more than this many times the limit must be confirmed, because a digit too many is easily typed."""

MAX_ROWS = 200
"""Maximum number of rows of a table: budgets nearest to their limits first, then those with the highest spend."""

_RecentSpend = dict[Window, dict[str, int]]
"""Recent spend in nano-dollars, by window and scope."""

_TABLES = {
    "daily": "Today", "weekly": "This week", "monthly": "This month", "quarterly": "This quarter", "total": "In total"
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """A budget and its forecast."""

    status: BudgetStatus
    forecast: Forecast | None
    outlook: str
    tone: str
    """`bad` if the limit is reached; `warn` if it is near, or will be reached; otherwise empty."""

    @property
    def title(self) -> str:
        """The title of the budget: `the plane, daily`, `content-writer, monthly`, `tenant acme, daily`."""
        return f"{self.owner}, {self.status.window}"

    @property
    def owner(self) -> str:
        """The owner of the budget: `the plane`, `content-writer`, `tenant acme`."""
        return owner_of(self.status)

    @property
    def bar(self) -> Markup | None:
        """A bar of the spent and reserved amounts as a share of the limit; None without a limit."""
        spent = self.status.spent
        reserved = self.status.reserved
        limit = self.status.limit
        if limit is None or self.used is None:
            return None
        colour = tone(self.status) or "good"
        label = f"{money(spent)} spent and {money(reserved)} reserved of {money(limit)}"
        parts = [(colour, float(spent)), ("second", float(reserved))] if limit else [(colour, 1.0)]
        return charts.share(parts, label, full_value=float(limit) or 1.0)

    @property
    def used(self) -> float | None:
        """The share of the limit that is spent or reserved; None without a limit."""
        return used_share(self.status)


_BUDGETS: list[Column[BudgetRow]] = columns_of_part(BUDGETS, lambda row: row.status)
COLUMNS: tuple[Column[BudgetRow], ...] = (
    Column("budget", lambda row: row.status.budget, order=lambda row: row.title.casefold()),
    *_BUDGETS[1:],
    Column("outlook", lambda row: row.outlook, below=True),
)


@dataclass(frozen=True, slots=True)
class BudgetChart:
    """A budget with its chart."""

    row: BudgetRow
    picture: PagePart[Markup]
    unknown_costs: int


@dataclass(frozen=True, slots=True)
class RaiseRejected:
    """A rejected form for raising a limit, which is shown again as it was filled in."""

    limit_usd: str
    reason: str
    problem: str
    confirm: str = ""
    """The statement to confirm; empty if a confirmation would not help."""
    confirmed: str = ""
    """The value of the checkbox. It contains the amount, because a confirmation is valid for one amount only."""


LINK = None
"""The page of limits leads here."""


def routes(context: PageContext) -> list[Route]:
    """The routes of these pages."""

    async def show_budget(request: Request, rejected: RaiseRejected | None = None) -> Response:
        view_with_form = partial(view_budget, rejected=rejected)
        return await render_page(context, request, "budget.html", view_with_form, figures=_figures)

    async def raise_cap(request: Request) -> Response:
        session, fields = await read_action(request, approval=True)
        name = request.path_params["name"]
        typed_limit = fields.get("limit_usd")
        reason = reason_of(fields) or ""
        limit_usd = typed_limit.strip().removeprefix("$").strip()
        budget_list = await fetch_part(_read_budgets(session.api, name))
        budgets = budget_list.value.budgets if budget_list.value else ()
        status = next((budget for budget in budgets if budget.budget == name), None)
        if budget_list.value and status is None:
            return await show_budget(request)
        rejected = _check_form(typed_limit, limit_usd, reason, status, fields.get("confirmed"), budget_list.problem)
        if rejected is not None:
            return await show_budget(request, rejected)
        try:
            body = {"budget": name, "limit_usd": limit_usd, "reason": reason}
            result: dict[str, Any] = await session.api.post("budgets/raise", body)
        except ApiKeyRefusedError:
            raise
        except ApiError as error:
            return await show_budget(request, RaiseRejected(typed_limit, reason, error.message))
        limit = money(nano_from_usd(limit_usd))
        if "unchanged" in result:
            session.notify(f"The limit of {name} was already {limit}.")
        else:
            session.notify(f"The limit of {name} is {limit} until its period ends.")
        return back_to(f"/budgets/{segment(name)}")

    return [
        page(context, "/budgets", "budgets.html", view, figures=_figures),
        page(
            context,
            "/budgets/reconciliation",
            "budget_reconciliation.html",
            view_comparison,
            compared=lambda _, models: fetch_part(
                models.api.read(Reconciliation, "budgets/reconciliation", timeout_s=API_CLICKHOUSE_S)
            ),
        ),
        Route("/budgets/{name:path}", show_budget, methods=["GET"]),
        # The URL is the same, so that a rejected form is shown on the page of its budget.
        Route("/budgets/{name:path}", raise_cap, methods=["POST"]),
    ]


class BudgetFigures(NamedTuple):
    """The budgets, their forecasts, and charts of some of them."""

    budget_list: PagePart[BudgetList]
    recent: PagePart[_RecentSpend]
    rows: list[BudgetRow]
    charts: list[BudgetChart]

    def no_cap_text(self, budget: BudgetStatus) -> str:
        """Describes a budget without a limit."""
        return no_cap_text(budget, self.budget_list.value.budgets if self.budget_list.value else ())


async def _figures(visit: Visit, models: ReadModels) -> BudgetFigures:
    """Reads the budgets, those nearest to their limits first, with charts of these or of the budget in the path."""
    name = visit.path_params.get("name")
    budget_list = await fetch_part(_read_budgets(models.api, name))
    budgets = budget_list.value.budgets if budget_list.value else ()
    recent = await fetch_part(_recent_spend(models.analytics, visit, budgets))
    periods = periods_at(visit.now, visit.zone)
    rows = [
        budget_row(
            status,
            periods.of(status.window),
            None if recent.value is None else recent.value.get(status.window, {}).get(_scope(status), 0),
            visit.now,
        )
        for status in budgets
    ]
    rows.sort(key=lambda row: (-1.0 if row.used is None else row.used, row.status.spent), reverse=True)
    if name:
        charted = [row for row in rows if row.status.budget == name and row.status.resets_at]
    else:
        charted = [row for row in rows if row.bar and row.status.resets_at][:MAX_CHARTS]
    if recent.problem == CLICKHOUSE_AWAY:
        # Does not wait for ClickHouse again.
        charts = [BudgetChart(row, PagePart(None, recent.problem), 0) for row in charted]
    else:
        charts = await asyncio.gather(*(_chart(models, visit, row) for row in charted))
    return BudgetFigures(budget_list, recent, rows, charts)


def view(visit: Visit, figures: BudgetFigures) -> dict[str, Any]:
    """The values of the page of all budgets."""

    def table(name: str, label: str, window: Window | None, *, capped: bool) -> PageTable[BudgetRow]:
        rows = [row for row in figures.rows if capped == (row.used is not None)]
        if window is not None:
            rows = [row for row in rows if row.status.window == window]
        # There may be thousands of tenants.
        return PageTable(visit.address, name, label, COLUMNS, rows, max_rows=MAX_ROWS)

    return {
        "budget_list": figures.budget_list,
        "no_cap_text": figures.no_cap_text,
        "recent": figures.recent,
        **{PERIODS[window]: table(PERIODS[window], _TABLES[window], window, capped=True) for window in WINDOWS},
        "uncapped": table("uncapped", "Without a limit", None, capped=False),
        "count": len(figures.rows),
        "budget_charts": figures.charts,
    }


def view_budget(
    visit: Visit, figures: BudgetFigures, rejected: RaiseRejected | None = None
) -> dict[str, Any] | NotFound:
    """The values of the page of a budget."""
    name = visit.path_params["name"]
    row = next((row for row in figures.rows if row.status.budget == name), None)
    if figures.budget_list.value and row is None:
        text = f"There is no budget {name!r}, or nothing was spent from it in this period. /budgets lists all."
        return NotFound("Budget not found", text)
    return {
        "status": 200 if rejected is None else 422,
        "rejected": rejected,
        "budget_list": figures.budget_list,
        "no_cap_text": figures.no_cap_text,
        "recent": figures.recent,
        "name": name,
        "row": row,
        "budget_chart": figures.charts[0] if figures.charts else None,
    }


def view_comparison(visit: Visit, compared: PagePart[Reconciliation]) -> dict[str, Any]:
    """The values of the page of the comparison."""
    budgets = compared.value.budgets if compared.value else ()
    table = PageTable(visit.address, "list", "Reconciliation", RECONCILIATION, budgets)
    return {"table": table}


def budget_row(status: BudgetStatus, period: Period, recent: int | None, now: datetime) -> BudgetRow:
    """Adds a forecast to a budget.

    Args:
        status: the state of the budget.
        period: the current period of the budget's window.
        recent: recent spend in nano-dollars; None if it is unknown, and then there is no forecast.
        now: the present time.
    """
    expected = None
    is_hard = status.enforcement == "hard"
    now_ms = ms_from_time(now)
    # The counters may still be those of the period that has just ended. A reached hard cap allows no more spend.
    if recent is not None and status.period == period.name and not (is_hard and status.reached):
        expected = forecast(period, now_ms, spent=status.spent, recent=recent, limit=status.limit, hard=is_hard)
    will_be_reached = status.limit is not None and expected is not None and expected.reaches_ms is not None
    return BudgetRow(
        status,
        expected,
        outlook(status, expected, recent is not None, now_ms),
        tone(status) or ("warn" if will_be_reached else ""),
    )


def outlook(status: BudgetStatus, expected: Forecast | None, is_recent_known: bool, now_ms: int) -> str:
    """Describes a forecast.

    Args:
        status: the state of the budget.
        expected: the forecast; None if there is none.
        is_recent_known: True if recent spend is known.
        now_ms: the present time, in milliseconds since 1970.
    """
    period_name = PERIODS[status.window]
    limit = status.limit
    if limit is not None and status.reached:
        return "Limit reached" if limit else "Limit is zero"
    if not status.spent:
        return "Nothing spent yet"
    if status.resets_at is None:
        return "Never resets"
    if expected is None:
        return (
            f"Too early in the {period_name} to forecast" if is_recent_known else "Unknown: ClickHouse is unavailable"
        )
    if expected.reaches_ms is not None:
        return f"Forecast: limit reached {_in_about(expected.reaches_ms - now_ms)}"
    of_cap = "" if limit is None else f" of {money(limit)}"
    return f"Forecast: {money(expected.total)}{of_cap}"


def _in_about(wait_ms: int) -> str:
    """Describes a future time roughly, because an exact forecast would change with every look."""
    hours = wait_ms / 3_600_000
    if hours < 1:
        return "within an hour"
    number, unit = (round(hours), "hour") if hours < 36 else (round(hours / 24), "day")
    return f"in about {number} {unit}" + ("s" if number > 1 else "")


def _check_form(
    typed_limit: str, limit_usd: str, reason: str, status: BudgetStatus | None, confirmed: str, problem: str | None
) -> RaiseRejected | None:
    """Checks a form for raising a limit. Returns the rejected form with its problem; None if the form is accepted."""
    try:
        limit = nano_of(limit_usd)
    except ValueError as error:
        return RaiseRejected(typed_limit, reason, str(error))
    if not reason:
        return RaiseRejected(typed_limit, reason, "a raise needs a reason, for the record")
    if problem:
        return RaiseRejected(typed_limit, reason, f"the current limit is unknown: {problem}")
    current_cap = status.limit if status else None
    if current_cap is not None and limit > current_cap * CONFIRM_FROM and confirmed != str(limit):
        confirm = f"raise it to {money(limit)}, more than ten times the limit of {money(current_cap)}"
        problem_text = "this is more than ten times the limit; confirm it below"
        return RaiseRejected(typed_limit, reason, problem_text, confirm, str(limit))
    return None


def nano_of(limit_usd: str) -> int:
    """Parses an amount in USD. Returns nano-dollars. Raises ValueError if it is invalid or ambiguous."""
    if "," in limit_usd:
        # A comma is the decimal separator in half of the world, and the thousands separator in the other half.
        raise ValueError(
            f"{limit_usd!r} contains a comma: write 2.50, with a decimal point and no thousands separators"
        )
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?|\.[0-9]+", limit_usd):
        raise ValueError(f"{limit_usd!r} is not an amount in USD: write 2.50, with a decimal point")
    return nano_from_usd(limit_usd)


async def _read_budgets(api: ApiClient, name: str | None) -> BudgetList:
    """Reads all budgets, or those of the scope of one."""
    query = {"scope": None if name is None else name.rpartition("/")[0]}
    budget_list = await api.read(BudgetList, "budgets", query)
    budgets = [*budget_list.budgets]
    while budget_list.continue_after is not None:
        budget_list = await api.read(BudgetList, "budgets", {**query, "after": budget_list.continue_after})
        budgets += budget_list.budgets
    return budget_list.model_copy(update={"budgets": tuple(budgets)})


async def _recent_spend(analytics: Analytics, visit: Visit, budgets: Iterable[BudgetStatus]) -> _RecentSpend:
    """Reads the recent spend of each scope, on which the forecasts of budgets are based."""
    periods = periods_at(visit.now, visit.zone)
    dimensions: dict[Window, set[Dimension]] = defaultdict(set)
    for status in budgets:
        if status.resets_at is not None:
            dimensions[status.window].add(dimension_of(_scope(status), status.window))
    since = {window: recent_from(periods.of(window), ms_from_time(visit.now)) for window in dimensions}
    sums = await asyncio.gather(
        *(
            spent_since(analytics, time_from_ms(since[window]), visit.now, counted)
            for window, counted in dimensions.items()
        )
    )
    return dict(zip(dimensions, sums, strict=True))


async def _chart(models: ReadModels, visit: Visit, row: BudgetRow) -> BudgetChart:
    status = row.status
    period = periods_at(visit.now, visit.zone).of(status.window)
    fetched_burn = await fetch_part(burn(models.analytics, period, _scope(status), visit.zone, visit.now))
    if fetched_burn.value is None:
        return BudgetChart(row, PagePart(None, fetched_burn.problem), 0)
    return BudgetChart(
        row, PagePart(_picture(row, period, fetched_burn.value, visit.now)), fetched_burn.value.unknown_costs
    )


def _picture(row: BudgetRow, period: Period, spend: Burn, now: datetime) -> Markup:
    """Draws the spend in the period, and the limit."""
    status = row.status
    points = list(spend.points)
    if status.period == period.name and points[-1][0] <= now:
        # The counters in Redis are a little ahead of the stored records.
        points[-1] = (points[-1][0], max(points[-1][1], status.spent))
    return charts.burn(
        f"Spend: {row.title}, {status.period}",
        points,
        start=time_from_ms(period.start_ms),
        end=time_from_ms(period.end_ms),
        cap=status.limit,
        forecast=_forecast_line(row.forecast, status.limit, time_from_ms(period.end_ms)),
        executions={name: value for name, value in (("agent", status.agent), ("tenant", status.tenant)) if value},
    )


def _forecast_line(expected: Forecast | None, limit: int | None, end: datetime) -> list[tuple[datetime, int]]:
    """The points of a forecast: where it reaches the limit, if it does, and the period's end."""
    if expected is None:
        return []
    line = [(end, expected.total)]
    if expected.reaches_ms is not None and limit is not None:
        line.insert(0, (time_from_ms(expected.reaches_ms), limit))
    return line


def _scope(status: BudgetStatus) -> str:
    """The key of a budget's scope: the budget's name without its window."""
    return key_from_text(status.budget.rpartition("/")[0])
