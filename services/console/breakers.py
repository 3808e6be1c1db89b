"""Breakers: which are open and why, what each one did, and forcing them open or resetting them; and stopped tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from breakwater.analytics.transitions import MOST, Opening, openings, operator_actions, transitions
from breakwater.analytics.window import Window
from breakwater.contracts.api import BreakerStatus, StoppedTask
from breakwater.contracts.types import Event, ms_from_time
from services.console.auth import acting
from services.console.charts import Series, nice_seconds
from services.console.live import Breakers
from services.console.operator_actions import back, done, why
from services.console.pages import PageContext, fetched
from services.console.sessions import session_of
from services.console.time_range import WINDOWS, window_links, window_of
from services.console.words import duration

_ORDER = {"isolated": 0, "open": 1, "half_open": 2, "closed": 3}


class _Stopped(Event):
    """What the interface tells of stopped tasks."""

    stopped: tuple[StoppedTask, ...]


@dataclass(frozen=True, slots=True)
class Line:
    """One breaker in the list."""

    status: BreakerStatus
    opening: Opening | None
    """Its latest opening in the window; None where that is not known, or there was none."""
    open_ms: int
    openings: int


def routes(context: PageContext) -> list[Route]:
    """The addresses of these pages."""

    async def show(request: Request) -> Response:
        session, window, now = session_of(request), window_of(request), context.now()
        period = Window.last(WINDOWS[window], now)
        known, opened, acts, stopped = await asyncio.gather(
            fetched(context.api.read(Breakers, session.key, "breakers")),
            fetched(openings(context.analytics, period, now)),
            fetched(operator_actions(context.analytics, period)),
            fetched(context.api.read(_Stopped, session.key, "guards")),
        )
        return context.pages.render(
            request,
            "breakers.html",
            now=now,
            window=window,
            windows=window_links(request, window),
            known=known,
            lines=_lines(known.value.breakers if known.value else (), opened.value or ()),
            opened=opened,
            acts=acts,
            stopped=stopped,
            most=MOST,
        )

    async def show_one(request: Request) -> Response:
        session, window, now = session_of(request), window_of(request, "7d"), context.now()
        agent, model = request.query_params.get("agent", ""), request.query_params.get("model", "")
        period = Window.last(WINDOWS[window], now)
        known, opened, changes = await asyncio.gather(
            fetched(context.api.read(Breakers, session.key, "breakers")),
            fetched(openings(context.analytics, period, now, agent, model)),
            fetched(transitions(context.analytics, period, agent, model)),
        )
        listed = known.value.breakers if known.value else ()
        status = next((one for one in listed if (one.agent, one.model) == (agent, model)), None)
        if not agent or not model or (known.value and status is None and not changes.value and not changes.problem):
            text = f"No breaker is known of agent {agent!r} on model {model!r}, and none changed in this window."
            return context.pages.plain(request, 404, "There is no such breaker", text)
        return context.pages.render(
            request,
            "breaker.html",
            now=now,
            agent=agent,
            model=model,
            window=window,
            windows=window_links(request, window),
            known=known,
            breaker=status,
            opened=opened,
            open_ms=sum(one.in_window_ms for one in opened.value or ()),
            moments=[period.at(bucket) for bucket in range(period.buckets)],
            step=timedelta(seconds=period.step_s),
            series=[Series("open", "bad", _open_per_step(opened.value or (), period, now))],
            duration_s=_lasting,
            nice=nice_seconds,
            changes=changes,
            most=MOST,
        )

    async def reset(request: Request) -> Response:
        return await _act(request, "reset", "was reset")

    async def isolate(request: Request) -> Response:
        return await _act(request, "isolate", "was isolated")

    async def _act(request: Request, action: Literal["reset", "isolate"], outcome: str) -> Response:
        session, fields = await acting(request)
        agent, model = fields.get("agent"), fields.get("model")
        body = {"agent": agent, "model": model, "reason": why(fields.get("reason"))}
        whose = f"The breaker of {'all agents' if agent == '*' else agent} on {model}"
        await done(
            session,
            context.api.post(session.key, f"breakers/{action}", body),
            f"{whose} {outcome}, as asked.",
            f"{whose} was so already: nothing was changed.",
        )
        if fields.get("from") == "one":
            return back("/breakers/one", {"agent": agent, "model": model})
        return back("/breakers")

    async def reset_task(request: Request) -> Response:
        session, fields = await acting(request)
        task = fields.get("task_id")
        body = {"task_id": task, "tenant": fields.get("tenant") or None, "reason": why(fields.get("reason"))}
        told = f"The task {task} may go on: its counts are forgotten."
        await done(session, context.api.post(session.key, "guards/reset", body), told, told)
        return back("/breakers")

    return [
        Route("/breakers", show, methods=["GET"]),
        # By its query, as the names of agents and models may hold slashes.
        Route("/breakers/one", show_one, methods=["GET"]),
        Route("/breakers/reset", reset, methods=["POST"]),
        Route("/breakers/isolate", isolate, methods=["POST"]),
        Route("/breakers/tasks/reset", reset_task, methods=["POST"]),
    ]


def _lines(breakers: Sequence[BreakerStatus], opened: Sequence[Opening]) -> list[Line]:
    """Those that let no call through first, then those that were open longest."""
    by_key: dict[tuple[str, str], list[Opening]] = {}
    for one in opened:
        by_key.setdefault((one.agent, one.model), []).append(one)
    lines: list[Line] = []
    for status in breakers:
        its = by_key.get((status.agent, status.model), [])
        lines.append(Line(status, its[0] if its else None, sum(one.in_window_ms for one in its), len(its)))
    return sorted(lines, key=lambda line: (_ORDER[line.status.state], -line.open_ms, line.status.agent))


def _open_per_step(opened: Sequence[Opening], period: Window, now: datetime) -> list[float]:
    """How many seconds of each step of a window one breaker was open."""
    step_ms, open_ms = period.step_s * 1000, [0] * period.buckets
    for one in opened:
        start = max(ms_from_time(one.opened_at), period.start_ms)
        end = min(ms_from_time(one.closed_at or now), period.end_ms)
        for bucket in range((start - period.start_ms) // step_ms, period.buckets):
            begins = period.start_ms + bucket * step_ms
            if begins >= end:
                break
            open_ms[bucket] += min(end, begins + step_ms) - max(start, begins)
    return [ms / 1000 for ms in open_ms]


def _lasting(seconds: float) -> str:
    """A length of time with no digit lost and none too many: `30 s`, `2 min 30 s`, `6 h`."""
    text = duration(seconds * 1000)
    return text.removesuffix(" 00 s").removesuffix(" 00 min").replace(".0 s", " s")
