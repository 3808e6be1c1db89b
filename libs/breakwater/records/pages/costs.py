"""The page of a month's costs by agent, tenant, model, provider, key, user, team or tag, and its CSV."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlencode
from zoneinfo import ZoneInfo

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from breakwater.health.pages import tiles
from breakwater.health.pages.overall_health import MUCH_WASTED
from breakwater.health.pages.tiles import Colour, Tile
from breakwater.identity.pages.rendering import (
    API_CLICKHOUSE_S,
    HEADERS,
    PART_TIMEOUT_S,
    NavigationLink,
    PageContext,
    PagePart,
)
from breakwater.identity.pages.sessions import session_of
from breakwater.identity.pages.visits import ReadModels, Visit, page, visit_of
from breakwater.kernel.columns import Column, columns_of_part
from breakwater.kernel.formats import money, quantity
from breakwater.kernel.pages import charts, words
from breakwater.kernel.pages.charts import Series
from breakwater.kernel.pages.tables import csv_headers
from breakwater.kernel.pages.time_range import between
from breakwater.kernel.pages.words import segment
from breakwater.limits.rules.budget import period
from breakwater.records.contract import CostLine, Costs
from breakwater.records.rules.costs import month_before
from breakwater.records.spend import SpendHistory, spend_history
from breakwater.records.views.costs import BY, cap_parts, cap_text, columns, tone

_EXECUTION_FILTERS = ("tenant", "model", "user", "team")
"""Groupings that the page of executions filters by."""
MAX_ROWS = 200
"""Maximum number of lines on the page; the CSV has all."""


@dataclass(frozen=True, slots=True)
class CostsSelection:
    """The month and the grouping that a URL selects."""

    month: str
    """The month as the URL has it; empty for the present one."""
    by: str
    tag: str

    @property
    def parameters(self) -> dict[str, str]:
        """The selection as parameters of the HTTP API, and of URLs of this page."""
        parameters = {"month": self.month, "by": self.by, "tag": self.tag}
        return {name: value for name, value in parameters.items() if value}


@dataclass(frozen=True, slots=True)
class CostRow:
    """A line of the table."""

    line: CostLine
    href: str | None
    total_spend: int
    """The spend of all lines, in nano-dollars."""

    @property
    def bar(self) -> Markup:
        """A bar of the line's share of the total spend, and of the wasted part."""
        spend = self.line.spend or 0
        wasted = self.line.wasted or 0
        label = f"{words.percent(spend / self.total_spend if self.total_spend else 0)} of the spend"
        parts = [("bad", wasted), ("plain", spend - wasted)]
        return charts.share(parts, label, full_value=self.total_spend or 1.0)

    @property
    def change(self) -> str:
        """The change against the previous month: of the forecast while the month has not ended."""
        return change(self.line)

    @property
    def used(self) -> float | None:
        """The share of the limit that is spent; None without a limit."""
        return None if not self.line.cap else (self.line.spend or 0) / self.line.cap


LINK = NavigationLink("/costs", "Costs", "c")


def routes(context: PageContext) -> list[Route]:
    """The routes of this page."""

    async def download(request: Request) -> Response:
        selection = _selection(visit_of(context, request))
        text = await session_of(request).api.text("costs.csv", selection.parameters, timeout_s=PART_TIMEOUT_S)
        month = selection.month or _months(context.now(), context.zone)["this month"]
        name = f"costs-{segment(month)}-by-{selection.by}"
        return Response(text, headers={**HEADERS, **csv_headers(name)}, media_type="text/csv")

    return [page(context, "/costs", "costs.html", view, costs=_costs), Route("/costs.csv", download, methods=["GET"])]


def _costs(visit: Visit, models: ReadModels) -> Awaitable[PagePart[tuple[Costs, SpendHistory | None]]]:
    async def read() -> tuple[Costs, SpendHistory | None]:
        query = _selection(visit).parameters | {"limit": MAX_ROWS}
        costs = await models.api.read(Costs, "costs", query, timeout_s=API_CLICKHOUSE_S)
        end = max(min(costs.ends_at, visit.now), costs.starts_at)
        return costs, await spend_history(
            models.analytics, costs.starts_at, end, costs.by, tag=costs.tag, most=len(charts.COLOURS)
        )

    return visit.part(read(), slow=True)


def chart_of(history: SpendHistory, by: str, group_title: str) -> Markup:
    """Draws the spend over time, stacked by name; the names with the lowest spend share a series."""
    window = history.window
    series: list[Series] = []
    for colour, (name, values) in zip(charts.COLOURS, history.spend.items(), strict=False):
        filters = {by: name} if name is not None and by in ("agent", *_EXECUTION_FILTERS) else {}
        series.append(Series(f"no {group_title}" if name is None else name, colour, values, "bars", filters))
    if history.other_names:
        series.append(Series(quantity(history.other_names, "other"), charts.COLOURS[-1], history.others, "bars"))
    moments = [window.at(index) for index in range(window.buckets)]
    return charts.over_time("Spend", moments, series, charts.MONEY, step=timedelta(seconds=window.step_s), zooms=False)


def view(visit: Visit, costs: PagePart[tuple[Costs, SpendHistory | None]]) -> dict[str, Any]:
    """The values of the page."""
    month_costs, history = costs.value if costs.value else (None, None)
    selection = _selection(visit)
    months = _months(visit.now, visit.zone)
    group_title = BY.get(selection.by, selection.tag)
    month = selection.month or months["this month"]
    is_over = month < months["this month"]
    labels = ("Spend", "Limit used" if is_over else "Forecast", "On failed calls", "Month before")
    row_columns: list[Column[CostRow]] = []
    if month_costs is not None:
        row_columns = columns_of_part(columns(month_costs), lambda row: row.line)
    return {
        "selection": selection,
        "costs": replace(costs, value=month_costs),
        "chart": None if history is None else chart_of(history, selection.by, group_title),
        "tiles": tiles.pending(labels) if month_costs is None else tiles_of(month_costs, visit.now),
        "columns": row_columns,
        "rows": [] if month_costs is None else _rows(month_costs),
        "heading": group_title,
        "is_over": is_over,
        "full_page_query": selection.parameters | {"whole": "1"},
        "tabs": _tabs(selection, () if month_costs is None else month_costs.cost_tags),
        "months": [
            (name, f"/costs?{urlencode(selection.parameters | {'month': candidate})}", candidate == month)
            for name, candidate in months.items()
        ],
        "month": month,
        "download": f"/costs.csv?{urlencode(selection.parameters)}",
        "tone": tone,
        "cap_parts": cap_parts,
    }


def tiles_of(costs: Costs, now: datetime) -> list[Tile]:
    """Makes the tiles of a month's totals."""
    total = costs.total
    budget = f"/budgets/{segment('global/monthly')}"
    calls = quantity(total.calls, "call")
    if total.calls_of_unknown_cost:
        calls = f"at least: {total.calls_of_unknown_cost:,} of {calls} of unknown cost"
    share = total.wasted / total.spend if total.wasted is not None and total.spend else None
    waste = f"/?{urlencode(between(costs.starts_at, costs.ends_at))}#waste"
    of_spend = "nothing was spent" if total.spend == 0 else f"{words.percent(share)} of spend"
    waste_colour: Colour = "warn" if share is not None and share >= MUCH_WASTED else ""
    return [
        Tile("Spend", words.money(total.spend), calls, budget),
        _forecast_tile(costs, now, budget),
        Tile("On failed calls", words.money(total.wasted), of_spend, waste, waste_colour),
        Tile(costs.previous_month, words.money(total.previous), _comparison(total), budget),
    ]


def change(line: CostLine) -> str:
    """The change against the previous month, such as `+12 %`: of the forecast while the month has not ended."""
    spend = line.spend if line.forecast is None else line.forecast
    if not line.previous or spend is None:
        return ""
    share = (spend - line.previous) / line.previous
    return f"{'+' if share >= 0 else '−'}{words.percent(abs(share))}"


def _comparison(total: CostLine) -> str:
    change_text = change(total)
    if not change_text:
        return "the month before"
    return f"change: {change_text}" if total.forecast is None else f"forecast: {change_text}"


def _forecast_tile(costs: Costs, now: datetime, href: str) -> Tile:
    total = costs.total
    cap = f"limit: {cap_text(total)}" if cap_text(total) else "no limit"
    if costs.ends_at <= now:
        used = "–" if not total.cap else words.percent((total.spend or 0) / total.cap)
        return Tile("Limit used", used, cap, href, tone(total))
    if total.forecast is None:
        return Tile("Forecast", "unknown", "too early in the month, or nothing was spent", href)
    next_month = "unknown" if total.next_month is None else money(total.next_month)
    return Tile("Forecast", words.money(total.forecast), f"next month: {next_month}; {cap}", href, tone(total))


def _rows(costs: Costs) -> list[CostRow]:
    """Makes the rows of a month's lines, and the total as the last one."""
    total_spend = costs.total.spend or 0
    time_range = between(costs.starts_at, costs.ends_at)

    def href(name: str | None) -> str | None:
        if name is None:
            return None
        if costs.by == "agent":
            return f"/agents/{segment(name)}?{urlencode(time_range)}"
        return f"/executions?{urlencode({costs.by: name} | time_range)}" if costs.by in _EXECUTION_FILTERS else None

    rows = [CostRow(line, href(line.name), total_spend) for line in costs.lines]
    return [*rows, CostRow(costs.total, None, total_spend)] if rows else []


def _selection(visit: Visit) -> CostsSelection:
    by = visit.get("by")
    tag = visit.get("tag") if by == "tag" else ""
    return CostsSelection(visit.get("month"), "tag" if tag else by if by in BY else "agent", tag)


def _months(now: datetime, zone: ZoneInfo) -> dict[str, str]:
    this_month = period("monthly", now, zone)
    return {"this month": this_month.name, "last month": month_before(this_month, zone).name}


def _tabs(selection: CostsSelection, tags: tuple[str, ...]) -> list[tuple[str, str, bool]]:
    month = {"month": selection.month} if selection.month else {}
    tabs = [
        (title[:1].upper() + title[1:], f"/costs?{urlencode(month | {'by': by})}", selection.by == by)
        for by, title in BY.items()
    ]
    for tag in dict.fromkeys((*tags, *((selection.tag,) if selection.tag else ()))):
        tabs.append((tag, f"/costs?{urlencode(month | {'by': 'tag', 'tag': tag})}", selection.tag == tag))
    return tabs
