"""Costs of a month, by agent, tenant, model, provider, key or tag, with the month before and the caps; and as CSV."""

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
from breakwater.identity.pages.pages import API_CLICKHOUSE_S, HEADERS, PART_TIMEOUT_S, Fetched, PageContext
from breakwater.identity.pages.sessions import session_of
from breakwater.identity.pages.visits import ReadModels, Visit, page, visit_of
from breakwater.kernel.columns import Column, lifted
from breakwater.kernel.formats import counted
from breakwater.kernel.pages import charts, words
from breakwater.kernel.pages.charts import Series
from breakwater.kernel.pages.tables import csv_headers
from breakwater.kernel.pages.time_range import between
from breakwater.kernel.pages.words import segment
from breakwater.limits.contract import CostLine, Costs
from breakwater.limits.rules.budget import period
from breakwater.records.rules.costs import month_before
from breakwater.records.spend import SpendHistory, spend_history
from breakwater.records.views.costs import BY, cap_text, columns, tone

MOST = 200
"""Lines on the page; the CSV has all."""


@dataclass(frozen=True, slots=True)
class CostsAsked:
    """The month and the groups that an address asks for."""

    month: str
    """As it is given; empty for this one."""
    by: str
    tag: str

    @property
    def parameters(self) -> dict[str, str]:
        """The same for the HTTP API, and for URLs of this page."""
        given = {"month": self.month, "by": self.by, "tag": self.tag}
        return {name: value for name, value in given.items() if value}


@dataclass(frozen=True, slots=True)
class CostRow:
    """A line of the table."""

    line: CostLine
    href: str | None
    whole: int
    """Spend of all lines."""

    @property
    def bar(self) -> Markup:
        """Its share of the spend, and the wasted part of it."""
        spend, wasted = self.line.spend or 0, self.line.wasted or 0
        label = f"{words.percent(spend / self.whole if self.whole else 0)} of the spend"
        return charts.share([("bad", wasted), ("plain", spend - wasted)], label, of=self.whole or 1.0)

    @property
    def change(self) -> str:
        """Against the month before; as it is expected to end, if it has not ended."""
        return change(self.line)

    @property
    def used(self) -> float | None:
        """The share of the cap that is spent."""
        return None if not self.line.cap else (self.line.spend or 0) / self.line.cap


def routes(context: PageContext) -> list[Route]:
    """The routes of this page."""

    async def download(request: Request) -> Response:
        asked = _asked(visit_of(context, request))
        text = await session_of(request).api.text("costs.csv", asked.parameters, timeout_s=PART_TIMEOUT_S)
        month = asked.month or _months(context.now(), context.zone)["this month"]
        name = f"costs-{segment(month)}-by-{asked.by}"
        return Response(text, headers={**HEADERS, **csv_headers(name)}, media_type="text/csv")

    return [page(context, "/costs", "costs.html", view, costs=_costs), Route("/costs.csv", download, methods=["GET"])]


def _costs(visit: Visit, models: ReadModels) -> Awaitable[Fetched[tuple[Costs, SpendHistory | None]]]:
    async def read() -> tuple[Costs, SpendHistory | None]:
        query = _asked(visit).parameters | {"limit": MOST}
        costs = await models.api.read(Costs, "costs", query, timeout_s=API_CLICKHOUSE_S)
        end = max(min(costs.ends_at, visit.now), costs.starts_at)
        return costs, await spend_history(models.analytics, costs.starts_at, end, costs.by, tag=costs.tag)

    return visit.part(read(), slow=True)


def chart_of(history: SpendHistory, by: str, what: str) -> Markup:
    """The spend over time, stacked by names; the names with the lowest spend are one series."""
    window, spent = history
    most = len(charts.COLOURS) - (len(spent) > len(charts.COLOURS))
    series = list[Series]()
    for colour, (name, values) in zip(charts.COLOURS[:most], spent.items(), strict=False):
        filters = {by: name} if name is not None and by in ("agent", "tenant", "model") else {}
        series.append(Series(f"no {what}" if name is None else name, colour, values, "bars", filters))
    if rest := list(spent.values())[most:]:
        sums = [sum(step) for step in zip(*rest, strict=True)]
        series.append(Series(counted(len(rest), "other"), charts.COLOURS[-1], sums, "bars"))
    moments = [window.at(place) for place in range(window.buckets)]
    return charts.over_time("Spend", moments, series, charts.MONEY, step=timedelta(seconds=window.step_s), zooms=False)


def view(visit: Visit, costs: Fetched[tuple[Costs, SpendHistory | None]]) -> dict[str, Any]:
    """The page of a month."""
    known, history = costs.value or (None, None)
    asked, months = _asked(visit), _months(visit.now, visit.zone)
    what = BY.get(asked.by, asked.tag)
    month, over = asked.month or months["this month"], bool(asked.month) and asked.month < months["this month"]
    labels = ("Spend", "Cap used" if over else "Forecast", "On failed calls", "Month before")
    lines: list[Column[CostRow]] = [] if known is None else lifted(columns(known), lambda row: row.line)
    return {
        "asked": asked,
        "costs": replace(costs, value=known),
        "chart": None if history is None else chart_of(history, asked.by, what),
        "tiles": tiles.pending(labels) if known is None else tiles_of(known, visit.now),
        "columns": lines,
        "rows": [] if known is None else _rows(known),
        "heading": what,
        "over": over,
        "whole": asked.parameters | {"whole": "1"},
        "tabs": _tabs(asked, () if known is None else known.cost_tags),
        "months": [
            (name, f"/costs?{urlencode(asked.parameters | {'month': each})}", each == month)
            for name, each in months.items()
        ],
        "month": month,
        "download": f"/costs.csv?{urlencode(asked.parameters)}",
        "tone": tone,
    }


def tiles_of(costs: Costs, now: datetime) -> list[Tile]:
    """The month as a whole."""
    total, budget = costs.total, f"/budgets/{segment('global/monthly')}"
    calls = counted(total.calls, "call")
    if total.calls_of_unknown_cost:
        calls = f"at least: {total.calls_of_unknown_cost:,} of {calls} of unknown cost"
    share = total.wasted / total.spend if total.wasted is not None and total.spend else None
    waste = f"/?{urlencode(between(costs.starts_at, costs.ends_at))}#waste"
    of_spend = "nothing was spent" if total.spend == 0 else f"{words.percent(share)} of spend"
    much: Colour = "warn" if share is not None and share >= MUCH_WASTED else ""
    return [
        Tile("Spend", words.money(total.spend), calls, budget),
        _expected(costs, now, budget),
        Tile("On failed calls", words.money(total.wasted), of_spend, waste, much),
        Tile(costs.previous_month, words.money(total.previous), _compared(total), budget),
    ]


def change(line: CostLine) -> str:
    """`+12 %`, `−3.5 %`: the spend, or where the month has not ended its forecast, against the month before."""
    spend = line.spend if line.forecast is None else line.forecast
    if not line.previous or spend is None:
        return ""
    share = (spend - line.previous) / line.previous
    return f"{'+' if share >= 0 else '−'}{words.percent(abs(share))}"


def _compared(total: CostLine) -> str:
    text = change(total)
    if not text:
        return "the month before"
    return f"change: {text}" if total.forecast is None else f"forecast: {text}"


def _expected(costs: Costs, now: datetime, href: str) -> Tile:
    total = costs.total
    cap = f"cap: {cap_text(total)}" if cap_text(total) else "no cap"
    if costs.ends_at <= now:
        used = "–" if not total.cap else words.percent((total.spend or 0) / total.cap)
        return Tile("Cap used", used, cap, href, tone(total))
    if total.forecast is None:
        return Tile("Forecast", "–", "too early in the month", href)
    return Tile("Forecast", words.money(total.forecast), cap, href, tone(total))


def _rows(costs: Costs) -> list[CostRow]:
    """Its lines, and the total at the end."""
    whole = costs.total.spend or 0
    time = between(costs.starts_at, costs.ends_at)

    def href(name: str | None) -> str | None:
        if name is None:
            return None
        if costs.by == "agent":
            return f"/agents/{segment(name)}?{urlencode(time)}"
        return f"/executions?{urlencode({costs.by: name} | time)}" if costs.by in ("tenant", "model") else None

    rows = [CostRow(line, href(line.name), whole) for line in costs.lines]
    return [*rows, CostRow(costs.total, None, whole)] if rows else []


def _asked(visit: Visit) -> CostsAsked:
    by = visit.get("by")
    tag = visit.get("tag") if by == "tag" else ""
    return CostsAsked(visit.get("month"), "tag" if tag else by if by in BY else "agent", tag)


def _months(now: datetime, zone: ZoneInfo) -> dict[str, str]:
    this = period("monthly", now, zone)
    return {"this month": this.name, "last month": month_before(this, zone).name}


def _tabs(asked: CostsAsked, tags: tuple[str, ...]) -> list[tuple[str, str, bool]]:
    month = {"month": asked.month} if asked.month else {}
    tabs = [
        (title[:1].upper() + title[1:], f"/costs?{urlencode(month | {'by': by})}", asked.by == by)
        for by, title in BY.items()
    ]
    for tag in dict.fromkeys((*tags, *((asked.tag,) if asked.tag else ()))):
        tabs.append((tag, f"/costs?{urlencode(month | {'by': 'tag', 'tag': tag})}", asked.tag == tag))
    return tabs
