"""The page of configs: those that were applied, and what another one would have done with recorded jobs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping
from contextlib import aclosing
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import aiohttp
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from breakwater.client import ApiError
from breakwater.identity.pages.operator_actions import Fields, read_action
from breakwater.identity.pages.rendering import HEADERS, NavigationLink, PageContext, PagePart, fetch_part
from breakwater.identity.pages.sessions import Session
from breakwater.identity.pages.visits import ReadModels, Visit, render_page
from breakwater.kernel.columns import Column
from breakwater.kernel.http.server import wait_for_disconnect
from breakwater.kernel.pages import charts
from breakwater.kernel.pages.charts import COUNT, MONEY, Series, Unit
from breakwater.kernel.pages.tables import PageTable
from breakwater.kernel.pages.time_range import WINDOWS
from breakwater.kernel.process import background
from breakwater.kernel.time_window import TimeWindow
from breakwater.kernel.types import format_time
from breakwater.records.events import ConfigChange, config_changes
from breakwater.replay.contract import MAX_CONFIG, ConfigPlan, ConfigPlanLine
from breakwater.replay.rules.renames import renames_of
from breakwater.replay.views import (
    ALERTS,
    DAYS,
    JOBS,
    LIMITS,
    SHOWN_ALERTS,
    changed_limits,
    headline,
    limits_title,
    line_columns,
    lines_of,
)

_MINUTE = "%b %d %H:%M"
HISTORY_WINDOW = timedelta(days=30)
"""The time for which the HTTP API keeps configs."""

MAX_LIMITS = 50
"""The most limits that are listed."""

_FIELDS = ("config", "version", "window", "agent", "renames", "unknown")

HISTORY: tuple[Column[ConfigChange], ...] = (
    Column("applied", lambda change: change.at, "time"),
    Column("version", lambda change: change.version, "id"),
    Column("by", lambda change: change.by),
)

LINK = NavigationLink("/config", "Config", "f")


def routes(context: PageContext) -> list[Route]:
    """The routes of this page."""

    async def show(request: Request) -> Response:
        return await render_page(context, request, "config.html", view, history=_history)

    async def plan(request: Request) -> Response:
        session, fields = await read_action(request, limit=4 * MAX_CONFIG)
        if "application/json" in request.headers.get("accept", ""):
            pieces = _pieces(context, session, fields)
            return StreamingResponse(pieces, media_type="application/x-ndjson", headers=dict(HEADERS))
        planning = asyncio.create_task(_result(context, session, fields))
        leaving = asyncio.create_task(wait_for_disconnect(request.receive))
        try:
            await asyncio.wait([planning, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not planning.done():
                return Response(status_code=499)
            page_view = partial(view, fields=dict(fields.items()), result=planning.result())
            return await render_page(context, request, "config.html", page_view, history=_history)
        finally:
            await background.stop(planning, leaving)

    return [
        Route("/config", show, methods=["GET"]),
        # The URL is the same, so that the form is shown again beside the result.
        Route("/config", plan, methods=["POST"]),
    ]


def _history(visit: Visit, models: ReadModels) -> Awaitable[PagePart[tuple[ConfigChange, ...]]]:
    return fetch_part(config_changes(models.analytics, TimeWindow.last(HISTORY_WINDOW, visit.now)))


def view(
    visit: Visit,
    history: PagePart[tuple[ConfigChange, ...]],
    fields: Mapping[str, str] | None = None,
    result: Markup | None = None,
) -> dict[str, Any]:
    """The values of the page: the form, the applied configs, and the result if there is one."""
    applied = tuple(reversed(history.value or ()))
    chosen = {name: visit.get(name) for name in _FIELDS} if fields is None else fields
    return {
        "fields": {name: chosen.get(name, "") for name in _FIELDS},
        "windows": tuple(WINDOWS),
        "versions": list({change.version: change for change in applied}.values()),
        "table": PageTable(visit.address, "history", "Applied configs", HISTORY, applied),
        "result": result,
    }


async def _result(context: PageContext, session: Session, fields: Fields) -> Markup:
    """Returns the result of a plan, once it is complete."""
    html = ""
    async with aclosing(_pieces(context, session, fields)) as pieces:
        async for piece in pieces:
            html = json.loads(piece).get("html", html)
    return Markup(html)  # noqa: S704  ours


async def _pieces(context: PageContext, session: Session, fields: Fields) -> AsyncGenerator[bytes]:
    """Yields lines of JSON: the progress, and at the end the HTML of the result."""
    window = fields.get("window")
    now = context.now()
    request: dict[str, Any] = {
        "config": fields.get("config") or None,
        "version": None if fields.get("config") else fields.get("version") or None,
        "since": format_time(now - WINDOWS.get(window, WINDOWS["24h"])),
        "until": format_time(now),
        "agent": fields.get("agent").strip() or None,
        "unknown": "exclude" if fields.get("unknown") == "exclude" else "count",
    }
    try:
        request["renames"] = renames_of(filter(str.strip, fields.get("renames").split(",")))
    except ValueError as error:
        yield _piece(html=context.pages.fragment("config_plan.html", problem=f"Renamed agents: {error}"))
        return
    if request["config"] is None and request["version"] is None:
        yield _piece(html=context.pages.fragment("config_plan.html", problem=NO_CONFIG))
        return
    try:
        async with session.api.open_stream("config/plan", request) as content, aclosing(_lines(content)) as lines:
            async for line in lines:
                if line.report is not None:
                    html = context.pages.fragment("config_plan.html", problem=None, **view_plan(line.report))
                    yield _piece(html=html)
                elif line.error is not None:
                    yield _piece(html=context.pages.fragment("config_plan.html", problem=line.error.message))
                else:
                    yield _piece(progress=line.progress, jobs=line.jobs)
    except ApiError as error:
        yield _piece(html=context.pages.fragment("config_plan.html", problem=PROBLEMS.get(error.code, error.message)))


NO_CONFIG = "Paste a config, or choose a version."

PROBLEMS: Mapping[str, str] = {
    "too_many_config_plans": "Another config is being tried here now, and one is at a time: try again once it is done.",
}
"""Texts of errors that are clearer here than those of the HTTP API."""


def _piece(**values: object) -> bytes:
    return json.dumps(values).encode() + b"\n"


async def _lines(content: aiohttp.StreamReader) -> AsyncGenerator[ConfigPlanLine]:
    """Yields the lines of a response; a report is longer than aiohttp lets a line be."""
    incomplete = bytearray()
    async for chunk in content.iter_any():
        *ends, unfinished = chunk.split(b"\n")
        for end in ends:
            incomplete += end
            yield ConfigPlanLine.model_validate_json(bytes(incomplete))
            incomplete.clear()
        incomplete += unfinished


def view_plan(report: ConfigPlan) -> dict[str, Any]:
    """The values of the result."""
    lines = lines_of(report)
    return {
        "report": report,
        # A number stays on the line of its sign.
        "headline": headline(report).replace(" %", "\N{NO-BREAK SPACE}%"),
        "bounds": f"from {report.since:{_MINUTE}} to {report.until:{_MINUTE}} UTC",
        "lines": lines,
        "line_columns": line_columns(lines),
        "limits": changed_limits(report)[:MAX_LIMITS],
        "limits_title": limits_title(report),
        "limit_columns": LIMITS,
        "alerts": report.alerts[:SHOWN_ALERTS],
        "alert_columns": ALERTS,
        "days": report.days,
        "day_columns": DAYS,
        "job_columns": JOBS,
        "charts_of_plan": _charts(report),
    }


def _charts(report: ConfigPlan) -> list[Markup]:
    """Draws spend and refusals, each summed up, as recorded and under the changed config."""
    step = timedelta(seconds=report.step_s)
    moments = _moments(report, step)
    steps = {line.at: line for line in report.over_time}
    planned = [steps.get(at) for at in moments]

    def chart(label: str, unit: Unit, recorded: Iterable[float], changed: Iterable[float]) -> Markup:
        series = [
            Series("recorded", "plain", _sums(recorded)),
            Series("planned", "second", _sums(changed), "between"),
        ]
        executions = {} if report.agent is None else {"agent": report.agent}
        return charts.over_time(
            label, moments, series, unit, step=step, executions=executions, zooms=False, note=SHADED
        )

    return [
        chart(
            "Spend, summed up",
            MONEY,
            (line.spend if line else 0 for line in planned),
            (line.planned_spend if line else 0 for line in planned),
        ),
        chart(
            "Refused jobs, summed up",
            COUNT,
            (line.refused if line else 0 for line in planned),
            (line.planned_refused if line else 0 for line in planned),
        ),
    ]


SHADED = "The difference is shaded: red where the changed config has more, green where it has less."


def _moments(report: ConfigPlan, step: timedelta) -> list[datetime]:
    """Returns the beginnings of all steps from the one before the first jobs to the last ones."""
    if not report.over_time:
        return []
    first = report.over_time[0].at
    last = report.over_time[-1].at
    return [first + index * step for index in range(-1, (last - first) // step + 1)]


def _sums(values: Iterable[float]) -> list[float]:
    total = 0.0
    return [total := total + value for value in values]
