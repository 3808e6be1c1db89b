"""Budgets: how much of each is spent, held and left, where it is going, and raising a cap."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from breakwater.analytics.burn import Burn, burn, spent_since
from breakwater.contracts.events import BudgetBooks, BudgetStatus, Window
from breakwater.contracts.types import Event, ms_from_time, nano_from_usd, time_from_ms
from breakwater.policy.forecast import recent_from
from breakwater.policy.periods import WINDOWS, Period, periods_at
from services.console.auth import acting, session_of
from services.console.budget_words import Line, chart, line, title
from services.console.by_hand import back, done, why
from services.console.plane import Found, Plane, found
from services.console.words import segment, short_money

CHARTS = 2
"""How many budgets are drawn on the page of all: those nearest to their caps."""

MOST = 200
"""How many budgets are listed: those that are nearest to their caps, and then those of which most is spent."""


class _Budgets(Event):
    """What the interface tells of budgets."""

    filled: bool
    budgets: tuple[BudgetStatus, ...]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A budget with its chart."""

    line: Line
    picture: Found[Markup]
    unknown_costs: int


def routes(plane: Plane) -> list[Route]:
    """The addresses of these pages."""

    async def show(request: Request) -> Response:
        session, now = session_of(request), plane.now()
        known, recent = await asyncio.gather(
            found(plane.door.read(_Budgets, session.key, "budgets")), found(_recent(plane, now))
        )
        lines = _lines(plane, known.value.budgets if known.value else (), recent, now)
        nearest = sorted(lines, key=_nearness, reverse=True)
        # There may be thousands of tenants: those that matter, in the order in which they came.
        shown = set(map(id, nearest[:MOST]))
        return plane.pages.render(
            request,
            "budgets.html",
            session=session,
            known=known,
            recent=recent,
            lines=[one for one in lines if id(one) in shown],
            count=len(lines),
            title=title,
            drawn=await asyncio.gather(*(_drawn(plane, one, now) for one in nearest[:CHARTS] if one.used is not None)),
        )

    async def show_one(request: Request) -> Response:
        session, now, name = session_of(request), plane.now(), request.path_params["name"]
        known, recent = await asyncio.gather(
            found(plane.door.read(_Budgets, session.key, "budgets")), found(_recent(plane, now))
        )
        lines = _lines(plane, known.value.budgets if known.value else (), recent, now)
        one = next((one for one in lines if one.status.budget == name), None)
        if known.value and one is None:
            text = f"No budget is named {name!r}, or nothing was spent of it in its present period. /budgets lists all."
            return plane.pages.plain(request, 404, "There is no such budget", text, session=session)
        return plane.pages.render(
            request,
            "budget.html",
            session=session,
            known=known,
            recent=recent,
            name=name,
            one=one,
            title=title,
            drawn=None if one is None else await _drawn(plane, one, now),
        )

    async def books(request: Request) -> Response:
        session = session_of(request)
        compared = await found(plane.door.read(BudgetBooks, session.key, "budgets/books"))
        return plane.pages.render(request, "budget_books.html", session=session, compared=compared)

    async def raise_cap(request: Request) -> Response:
        session, fields = await acting(request)
        name, wanted = fields.get("budget"), fields.get("limit_usd").strip().removeprefix("$").replace(",", "")
        address = f"/budgets/{segment(name)}" if name else "/budgets"
        try:
            limit = nano_from_usd(wanted)
        except ValueError as error:
            session.tell(f"This was not done: {error}.", "bad")
            return back(address)
        body = {"budget": name, "limit_usd": wanted, "reason": why(fields.get("reason")) or ""}
        told = f"The cap of {name} is {short_money(limit)} until its period ends."
        asked = plane.door.post(session.key, "budgets/raise", body)
        await done(session, asked, told, f"The cap of {name} is {short_money(limit)} already.")
        return back(address)

    return [
        Route("/budgets", show, methods=["GET"]),
        Route("/budgets/books", books, methods=["GET"]),
        Route("/budgets/raise", raise_cap, methods=["POST"]),
        Route("/budgets/{name:path}", show_one, methods=["GET"]),
    ]


async def _recent(plane: Plane, now: datetime) -> dict[Window, dict[str, int]]:
    """What each scope has spent lately, as forecasts of its day and its month take it."""
    periods = periods_at(now, plane.zone)
    since = {window: recent_from(periods.of(window), ms_from_time(now)) for window in WINDOWS}
    sums = await asyncio.gather(*(spent_since(plane.analytics, time_from_ms(since[one]), now) for one in WINDOWS))
    return dict(zip(WINDOWS, sums, strict=True))


def _lines(
    plane: Plane, budgets: Sequence[BudgetStatus], recent: Found[dict[Window, dict[str, int]]], now: datetime
) -> list[Line]:
    periods = periods_at(now, plane.zone)
    return [
        line(
            one,
            periods.of(one.window),
            None if recent.value is None else recent.value[one.window].get(_scope(one), 0),
            now,
            plane.zone,
        )
        for one in budgets
    ]


async def _drawn(plane: Plane, one: Line, now: datetime) -> Drawn:
    of = periods_at(now, plane.zone).of(one.status.window)
    burnt = await found(burn(plane.analytics, of, _scope(one.status), plane.zone, now))
    if burnt.value is None:
        return Drawn(one, Found(None, burnt.trouble), 0)
    return Drawn(one, Found(_picture(one, of, burnt.value, now)), burnt.value.unknown_costs)


def _picture(one: Line, of: Period, burnt: Burn, now: datetime) -> Markup:
    return chart(one.status, of, burnt, one.forecast, now)


def _nearness(one: Line) -> tuple[float, int]:
    return (-1.0 if one.used is None else one.used, one.status.spent)


def _scope(status: BudgetStatus) -> str:
    """The scope's key: the budget's name without its window."""
    return status.budget.rpartition("/")[0]
