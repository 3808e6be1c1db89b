"""Dead letters: what was given up and why, one of them whole, and having jobs run again: one, some, or all alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from breakwater.contracts.api import DeadLetterCount, DeadLetterDetails, DeadLetterList, DeadLetterReplays
from breakwater.contracts.types import format_time
from services.console.auth import NotAllowed, acting
from services.console.door import DoorError, SignedOut
from services.console.forms import Fields, FormError
from services.console.operator_actions import back, whole, why
from services.console.pages import HEADERS, PageContext, fetched
from services.console.sessions import Session, session_of
from services.console.time_range import WINDOWS, window_links, window_of
from services.console.words import segment

PAGE = 100
UNKNOWN = "unknown"
"""Stands for the agent where it can't be told."""


@dataclass(frozen=True, slots=True)
class Tile:
    """How many dead letters there are of a reason, of the agent that is asked for."""

    reason: str
    """Empty for all of them."""
    count: int


def routes(context: PageContext) -> list[Route]:
    """The addresses of these pages."""

    async def show(request: Request) -> Response:
        session, window = session_of(request), window_of(request, "7d")
        reason, agent = request.query_params.get("reason", ""), request.query_params.get("agent", "").strip()
        since = context.now() - WINDOWS[window]
        wanted = {"reason": reason, "agent": agent, "since": format_time(since), "limit": PAGE}
        known = await fetched(context.api.read(DeadLetterList, session.key, "dlq", wanted))
        counts = known.value.counts if known.value else ()
        # What is counted is of all times, so this is the most that a bar may have to show.
        total = sum(one.count for one in counts if _is_of(one, reason, agent))
        return context.pages.render(
            request,
            "dead_letters.html",
            window=window,
            windows=window_links(request, window),
            since=format_time(since),
            reason=reason,
            agent=agent,
            known=known,
            tiles=_tiles(counts, agent),
            agents=sorted({one.agent for one in counts} | ({agent} if agent else set())),
            total=total,
            replayable=_replayable(known.value, total),
            after=request.query_params.get("after", ""),
            left=whole(request.query_params.get("left", "")),
        )

    async def show_one(request: Request) -> Response:
        session, number = session_of(request), request.path_params["dead_letter_id"]
        try:
            dead_letter = await context.api.read(DeadLetterDetails, session.key, f"dlq/{segment(number)}")
        except DoorError as error:
            if error.status == 404:
                return context.pages.plain(request, 404, "There is no such dead letter", error.message)
            raise
        return context.pages.render(request, "dead_letter.html", dead_letter=dead_letter)

    async def replay(request: Request) -> Response:
        if "application/json" in request.headers.get("accept", ""):
            return await _replay_for_script(request)
        session, fields = await acting(request)
        one = fields.get("from") == "one"
        here = {name: fields.get(name) for name in ("reason", "agent", "window")}
        if not _says_which(fields):
            session.notify("Nothing was chosen: tick the dead letters that shall be replayed.", "bad")
            return back("/dead-letters", here)
        try:
            outcome = await _replay(session, fields)
        except SignedOut:
            raise
        except DoorError as error:
            session.notify(f"This was not done: {error.message}", "bad")
            return back(
                f"/dead-letters/{fields.get('dead_letter_id')}" if one else "/dead-letters", {} if one else here
            )
        left = max(whole(fields.get("total")) - _looked_at(outcome), 0) if outcome.continue_after else 0
        session.notify(_told(outcome, left), "good" if outcome.replayed or not outcome.skipped else "bad")
        if one:
            return back(f"/dead-letters/{fields.get('dead_letter_id')}")
        more = {"after": _cursor(outcome), "left": str(left)} if outcome.continue_after else {}
        return back("/dead-letters", here | more)

    async def _replay_for_script(request: Request) -> Response:
        """The same for a page that stays open and asks again until there are no more: answers as JSON."""
        try:
            session, fields = await acting(request)
            outcome = await _replay(session, fields)
        except (DoorError, NotAllowed, FormError) as error:
            status = error.status if isinstance(error, DoorError) else 403 if isinstance(error, NotAllowed) else 422
            return JSONResponse({"message": str(error).rstrip(".")}, status, HEADERS)
        told = {
            "replayed": len(outcome.replayed),
            "already": outcome.already,
            "skipped": len(outcome.skipped),
            "continue_after": _cursor(outcome),
        }
        return JSONResponse(told, headers=HEADERS)

    async def _replay(session: Session, fields: Fields) -> DeadLetterReplays:
        return DeadLetterReplays.model_validate(await context.api.post(session.key, "dlq/replay", _wanted(fields)))

    return [
        Route("/dead-letters", show, methods=["GET"]),
        Route("/dead-letters/replay", replay, methods=["POST"]),
        Route("/dead-letters/{dead_letter_id}", show_one, methods=["GET"]),
    ]


def _replayable(listed: DeadLetterList | None, total: int) -> int:
    """How many dead letters a replay of all would run; an upper bound where there are more than are listed."""
    if listed is None:
        return 0
    able = sum(one.replayable for one in listed.dead_letters)
    return max(total - len(listed.dead_letters), 0) + able if listed.more else able


def _tiles(counts: Sequence[DeadLetterCount], agent: str) -> list[Tile]:
    """All of them, then each reason, the most first."""
    sums: dict[str, int] = {}
    for one in counts:
        if _is_of(one, "", agent):
            sums[one.reason] = sums.get(one.reason, 0) + one.count
    by_reason = sorted(sums.items(), key=lambda item: (-item[1], item[0]))
    return [Tile("", sum(sums.values())), *(Tile(*item) for item in by_reason)]


def _is_of(count: DeadLetterCount, reason: str, agent: str) -> bool:
    return reason in ("", count.reason) and agent in ("", count.agent)


def _says_which(fields: Fields) -> bool:
    return bool(fields.get("all")) or any(whole(one) for one in fields.all("dead_letter_id"))


def _wanted(fields: Fields) -> dict[str, Any]:
    """What the interface is asked to replay: the dead letters that are ticked, or all that the page is filtered by."""
    body: dict[str, Any] = {"why": why(fields.get("why"))}
    if not fields.get("all"):
        return body | {"dead_letters": [number for one in fields.all("dead_letter_id") if (number := whole(one))]}
    reason, agent = fields.get("reason") or None, fields.get("agent") or None
    after, _, up_to = fields.get("after").partition("-")
    if whole(after) and whole(up_to):
        body |= {"after": whole(after), "up_to": whole(up_to)}
    body |= {"reason": reason, "agent": agent, "all": True if reason is None and agent is None else None}
    return body | {"since": _moment(fields.get("since"))}


def _cursor(outcome: DeadLetterReplays) -> str | None:
    """Where to go on, as the pages hand it back; None where that was all."""
    return None if outcome.continue_after is None else f"{outcome.continue_after}-{outcome.up_to or 0}"


def _looked_at(outcome: DeadLetterReplays) -> int:
    return len(outcome.replayed) + outcome.already + len(outcome.skipped)


def _told(outcome: DeadLetterReplays, left: int) -> str:
    """What came of a replay, in words."""
    done = len(outcome.replayed)
    parts = [f"replayed as {outcome.replayed[0].execution_id}" if done == 1 else f"{done:,} replayed"]
    if outcome.already:
        parts.append(f"{outcome.already:,} {'was' if outcome.already == 1 else 'were'} before")
    if outcome.skipped:
        first = outcome.skipped[0]
        parts.append(f"{len(outcome.skipped):,} can't be, such as dead letter {first.dead_letter_id}: {first.why}")
    text = "; ".join(parts)
    more = f" About {left:,} are left: go on below." if outcome.continue_after else ""
    return f"{text[:1].upper()}{text[1:]}.{more}"


def _moment(text: str) -> str | None:
    try:
        return format_time(datetime.fromisoformat(text))
    except (ValueError, OverflowError):
        return None
