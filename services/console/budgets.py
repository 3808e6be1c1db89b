"""Budgets: how much of each is spent, held and left, where it is going, and raising a cap."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from breakwater.analytics.burn import Burn, burn, spent_since
from breakwater.contracts.api import BudgetStatus
from breakwater.contracts.events import Reconciliation, Window
from breakwater.contracts.types import ms_from_time, nano_from_usd, time_from_ms
from breakwater.policy.forecast import recent_from
from breakwater.policy.periods import WINDOWS, Period, periods_at
from services.console.auth import acting
from services.console.budget_words import Line, chart, line, title
from services.console.door import DoorError, SignedOut
from services.console.live import Budgets
from services.console.operator_actions import back, why
from services.console.pages import Fetched, PageContext, fetched
from services.console.sessions import session_of
from services.console.words import segment, short_money

CHARTS = 2
"""How many budgets are drawn on the page of all: those nearest to their caps."""

FAR = 10
"""A cap of more than so many times the present one is asked for twice: a digit too many is easily typed."""

MOST = 200
"""How many budgets are listed: those that are nearest to their caps, and then those of which most is spent."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A budget with its chart."""

    line: Line
    picture: Fetched[Markup]
    unknown_costs: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A form that raises a cap and was not accepted, to be shown again as it was filled in."""

    limit_usd: str
    reason: str
    problem: str
    doubt: str = ""
    """What somebody has to confirm; empty where that would not help."""
    sure: str = ""
    """What the form sends where it is confirmed: it holds for one amount only."""


def routes(context: PageContext) -> list[Route]:
    """The addresses of these pages."""

    async def show(request: Request) -> Response:
        session, now = session_of(request), context.now()
        known, recent = await asyncio.gather(
            fetched(context.api.read(Budgets, session.key, "budgets")), fetched(_recent(context, now))
        )
        lines = _lines(context, known.value.budgets if known.value else (), recent, now)
        nearest = sorted(lines, key=_nearness, reverse=True)
        # There may be thousands of tenants: those that matter, in the order in which they came.
        shown = set(map(id, nearest[:MOST]))
        return context.pages.render(
            request,
            "budgets.html",
            known=known,
            recent=recent,
            lines=[one for one in lines if id(one) in shown],
            count=len(lines),
            title=title,
            drawn=await asyncio.gather(
                *(_drawn(context, one, now) for one in nearest[:CHARTS] if one.used is not None)
            ),
        )

    async def show_one(request: Request, refused: Refused | None = None) -> Response:
        session, now, name = session_of(request), context.now(), request.path_params["name"]
        known, recent = await asyncio.gather(
            fetched(context.api.read(Budgets, session.key, "budgets")), fetched(_recent(context, now))
        )
        lines = _lines(context, known.value.budgets if known.value else (), recent, now)
        one = next((one for one in lines if one.status.budget == name), None)
        if known.value and one is None:
            text = f"No budget is named {name!r}, or nothing was spent of it in its present period. /budgets lists all."
            return context.pages.plain(request, 404, "There is no such budget", text)
        return context.pages.render(
            request,
            "budget.html",
            status=200 if refused is None else 422,
            refused=refused,
            known=known,
            recent=recent,
            name=name,
            one=one,
            title=title,
            drawn=None if one is None else await _drawn(context, one, now),
        )

    async def reconciliation(request: Request) -> Response:
        session = session_of(request)
        compared = await fetched(context.api.read(Reconciliation, session.key, "budgets/reconciliation"))
        return context.pages.render(request, "budget_reconciliation.html", compared=compared)

    async def raise_cap(request: Request) -> Response:
        session, fields = await acting(request)
        name, sure = request.path_params["name"], fields.get("sure")
        wanted, reason = fields.get("limit_usd").strip().removeprefix("$").strip(), why(fields.get("reason")) or ""
        known = await fetched(context.api.read(Budgets, session.key, "budgets"))
        status = next((one for one in known.value.budgets if one.budget == name), None) if known.value else None
        if known.value and status is None:
            return await show_one(request)
        present = status.limit if status else None
        refused = _refused(fields.get("limit_usd"), wanted, reason, present, sure, known.problem)
        if refused is not None:
            return await show_one(request, refused)
        try:
            body = {"budget": name, "limit_usd": wanted, "reason": reason}
            answer = await context.api.post(session.key, "budgets/raise", body)
        except SignedOut:
            raise
        except DoorError as error:
            return await show_one(request, Refused(fields.get("limit_usd"), reason, error.message))
        limit = short_money(nano_from_usd(wanted))
        if "unchanged" in answer:
            session.notify(f"The cap of {name} was {limit} already.")
        else:
            session.notify(f"The cap of {name} was raised to {limit} until its period ends.")
        return back(f"/budgets/{segment(name)}")

    return [
        Route("/budgets", show, methods=["GET"]),
        Route("/budgets/reconciliation", reconciliation, methods=["GET"]),
        Route("/budgets/{name:path}", show_one, methods=["GET"]),
        # At the same address, so that the page which shows the form again is that of the budget.
        Route("/budgets/{name:path}", raise_cap, methods=["POST"]),
    ]


def _refused(
    given: str, wanted: str, reason: str, present: int | None, sure: str, problem: str | None
) -> Refused | None:
    """Why a cap is not raised to what was wanted; None where nothing speaks against it."""
    try:
        limit = _nano(wanted)
    except ValueError as error:
        return Refused(given, reason, str(error))
    if not reason:
        return Refused(given, reason, "a raise needs a reason, for the record")
    if problem:
        return Refused(given, reason, f"the present cap is not known: {problem}")
    if present is not None and limit > present * FAR and sure != str(limit):
        doubt = f"{short_money(limit)} is meant: more than ten times the cap of {short_money(present)}"
        return Refused(
            given, reason, "this is more than ten times the cap; say below that it is meant", doubt, str(limit)
        )
    return None


def _nano(wanted: str) -> int:
    """An amount as people write it, in nano-dollars. Raises ValueError: it could be meant otherwise, or is none."""
    if "," in wanted:
        # It parts the cents in half of the world, and the thousands in the other.
        raise ValueError(f"{wanted!r} has a comma: write 2.50, dollars with a point and nothing between the thousands")
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?|\.[0-9]+", wanted):
        raise ValueError(f"{wanted!r} is not an amount in USD: write 2.50, dollars with a point")
    return nano_from_usd(wanted)


async def _recent(context: PageContext, now: datetime) -> dict[Window, dict[str, int]]:
    """What each scope has spent lately, as forecasts of its day and its month take it."""
    periods = periods_at(now, context.zone)
    since = {window: recent_from(periods.of(window), ms_from_time(now)) for window in WINDOWS}
    sums = await asyncio.gather(*(spent_since(context.analytics, time_from_ms(since[one]), now) for one in WINDOWS))
    return dict(zip(WINDOWS, sums, strict=True))


def _lines(
    context: PageContext, budgets: Sequence[BudgetStatus], recent: Fetched[dict[Window, dict[str, int]]], now: datetime
) -> list[Line]:
    periods = periods_at(now, context.zone)
    return [
        line(
            one,
            periods.of(one.window),
            None if recent.value is None else recent.value[one.window].get(_scope(one), 0),
            now,
            context.zone,
        )
        for one in budgets
    ]


async def _drawn(context: PageContext, one: Line, now: datetime) -> Drawn:
    of = periods_at(now, context.zone).of(one.status.window)
    burnt = await fetched(burn(context.analytics, of, _scope(one.status), context.zone, now))
    if burnt.value is None:
        return Drawn(one, Fetched(None, burnt.problem), 0)
    return Drawn(one, Fetched(_picture(one, of, burnt.value, now)), burnt.value.unknown_costs)


def _picture(one: Line, of: Period, burnt: Burn, now: datetime) -> Markup:
    return chart(one.status, of, burnt, one.forecast, now)


def _nearness(one: Line) -> tuple[float, int]:
    return (-1.0 if one.used is None else one.used, one.status.spent)


def _scope(status: BudgetStatus) -> str:
    """The scope's key: the budget's name without its window."""
    return status.budget.rpartition("/")[0]
