"""Breakers: which are open and why, what each did, isolating and resetting them; and stopped tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from breakwater.analytics.events import MOST, Opening, OperatorAction, openings, operator_actions, transitions
from breakwater.analytics.window import TimeWindow
from breakwater.contracts.breakers import BreakerList, BreakerStatus, StoppedTask, StoppedTasks
from breakwater.contracts.types import ms_from_time
from services.console.charts import Series
from services.console.operator_actions import act, back_to, reason_of, submitted
from services.console.pages import PageContext, fetched
from services.console.sessions import session_of
from services.console.tables import TableColumn, table_of
from services.console.time_range import time_range_of

_ORDER = {"isolated": 0, "open": 1, "half_open": 2, "closed": 3}


@dataclass(frozen=True, slots=True)
class BreakerRow:
    """One breaker in the list."""

    status: BreakerStatus
    opening: Opening | None
    """The latest in the time range; None if there was none, or if that is unknown."""
    open_ms: int
    openings: int


COLUMNS: tuple[TableColumn[BreakerRow], ...] = (
    TableColumn("state", "State", lambda row: row.status.state, order=lambda row: _ORDER[row.status.state]),
    TableColumn("agent", "Agent and model", lambda row: row.status.agent),
    TableColumn("model", "", lambda row: row.status.model),
    TableColumn("reason", "Reason", lambda row: row.status.reason),
    TableColumn("health", "Health", lambda row: row.status.health),
    TableColumn("failures", ">Failures", lambda row: row.status.consecutive_failures, largest_first=True),
    TableColumn("total_failures", "", lambda row: row.status.total_failures),
    TableColumn("next_probe", "Next probe", lambda row: row.status.open_until),
    TableColumn("open_ms", ">Open in the range", lambda row: row.open_ms, largest_first=True),
    TableColumn("openings", "", lambda row: row.openings),
)
TASKS: tuple[TableColumn[StoppedTask], ...] = (
    TableColumn("task", "Task", lambda one: one.task_id),
    TableColumn("tenant", "", lambda one: one.tenant),
    TableColumn("agent", "Agent", lambda one: one.agent),
    TableColumn("since", "Since", lambda one: one.since, largest_first=True),
    TableColumn("reason", "Reason", lambda one: one.reason),
    TableColumn("execution", "By the execution", lambda one: one.execution_id),
)
ACTIONS: tuple[TableColumn[OperatorAction], ...] = (
    TableColumn("time", "Time", lambda one: one.at, largest_first=True),
    TableColumn("operator", "Operator", lambda one: one.by),
    TableColumn("action", "Action", lambda one: one.what),
    TableColumn("target", "Target", lambda one: one.task_id or f"{one.agent} on {one.model}"),
    TableColumn("reason", "Reason", lambda one: one.reason),
)


def routes(context: PageContext) -> list[Route]:
    """The routes of these pages."""

    async def show(request: Request) -> Response:
        api, now = session_of(request).api, context.now()
        time_range = time_range_of(request, now, context.zone)
        period = time_range.window
        known, opened, actions, stopped = await asyncio.gather(
            fetched(api.read(BreakerList, "breakers")),
            fetched(openings(context.analytics, period, now)),
            fetched(operator_actions(context.analytics, period)),
            fetched(api.read(StoppedTasks, "guards")),
        )
        rows = _rows(known.value.breakers if known.value else (), opened.value or ())
        return context.pages.render(
            request,
            "breakers.html",
            now=now,
            time_range=time_range,
            known=known,
            table=table_of(request, "breakers", "All breakers", COLUMNS, rows),
            rows=rows,
            opened=opened,
            actions=actions,
            acts=table_of(request, "actions", "Operator actions", ACTIONS, actions.value or ()),
            stopped=stopped,
            tasks=table_of(request, "tasks", "Stopped tasks", TASKS, stopped.value.stopped if stopped.value else ()),
            most=MOST,
        )

    async def show_one(request: Request) -> Response:
        now = context.now()
        time_range = time_range_of(request, now, context.zone, "7d")
        agent, model = request.query_params.get("agent", ""), request.query_params.get("model", "")
        period = time_range.window
        known, opened, changes = await asyncio.gather(
            fetched(session_of(request).api.read(BreakerList, "breakers")),
            fetched(openings(context.analytics, period, now, agent, model)),
            fetched(transitions(context.analytics, period, agent, model)),
        )
        listed = known.value.breakers if known.value else ()
        status = next((one for one in listed if (one.agent, one.model) == (agent, model)), None)
        if not agent or not model or (known.value and status is None and not changes.value and not changes.problem):
            text = f"There is no breaker of agent {agent!r} on model {model!r}, and none changed in this time range."
            return context.pages.plain(request, 404, "Breaker not found", text)
        return context.pages.render(
            request,
            "breaker.html",
            now=now,
            agent=agent,
            model=model,
            time_range=time_range,
            known=known,
            breaker=status,
            opened=opened,
            open_ms=sum(one.in_window_ms for one in opened.value or ()),
            moments=[period.at(bucket) for bucket in range(period.buckets)],
            step=timedelta(seconds=period.step_s),
            series=[Series("open", "bad", _open_per_step(opened.value or (), period, now), "bars")],
            executions={"model": model} | ({} if agent == "*" else {"agent": agent}),
            changes=changes,
            most=MOST,
        )

    async def reset(request: Request) -> Response:
        return await _change(request, "reset", "was reset")

    async def isolate(request: Request) -> Response:
        return await _change(request, "isolate", "was isolated")

    async def _change(request: Request, action: Literal["reset", "isolate"], outcome: str) -> Response:
        session, fields = await submitted(request)
        agent, model = fields.get("agent"), fields.get("model")
        body = {"agent": agent, "model": model, "reason": reason_of(fields)}
        which = f"The breaker of {'all agents' if agent == '*' else agent} on {model}"
        if (result := await act(session, dict[str, Any], f"breakers/{action}", body)) is not None:
            session.notify(f"{which} {outcome} already." if "unchanged" in result else f"{which} {outcome}.")
        if fields.get("from") == "one":
            return back_to("/breakers/one", {"agent": agent, "model": model})
        return back_to("/breakers")

    async def reset_task(request: Request) -> Response:
        session, fields = await submitted(request, approval=True)
        task = fields.get("task_id")
        body = {"task_id": task, "tenant": fields.get("tenant") or None, "reason": reason_of(fields)}
        if await act(session, dict[str, Any], "guards/reset", body) is not None:
            session.notify(f"The task {task} may continue: its counts are reset.")
        return back_to("/breakers")

    return [
        Route("/breakers", show, methods=["GET"]),
        # In the query, as the names of agents and models may contain slashes.
        Route("/breakers/one", show_one, methods=["GET"]),
        Route("/breakers/reset", reset, methods=["POST"]),
        Route("/breakers/isolate", isolate, methods=["POST"]),
        Route("/breakers/tasks/reset", reset_task, methods=["POST"]),
    ]


def _rows(breakers: Sequence[BreakerStatus], opened: Sequence[Opening]) -> list[BreakerRow]:
    """First those that let no call through, then those that were open longest."""
    by_key: dict[tuple[str, str], list[Opening]] = {}
    for one in opened:
        by_key.setdefault((one.agent, one.model), []).append(one)
    rows: list[BreakerRow] = []
    for status in breakers:
        its = by_key.get((status.agent, status.model), [])
        rows.append(BreakerRow(status, its[0] if its else None, sum(one.in_window_ms for one in its), len(its)))
    return sorted(rows, key=lambda row: (_ORDER[row.status.state], -row.open_ms, row.status.agent))


def _open_per_step(opened: Sequence[Opening], period: TimeWindow, now: datetime) -> Sequence[float]:
    """For how many milliseconds of each step one breaker was open."""
    step_ms, open_ms = period.step_s * 1000, [0] * period.buckets
    for one in opened:
        start = max(ms_from_time(one.opened_at), period.start_ms)
        end = min(ms_from_time(one.closed_at or now), period.end_ms)
        for bucket in range((start - period.start_ms) // step_ms, period.buckets):
            begins = period.start_ms + bucket * step_ms
            if begins >= end:
                break
            open_ms[bucket] += min(end, begins + step_ms) - max(start, begins)
    return open_ms
