"""Dead letters: all of them, one in detail, and replaying jobs: one, some, or all alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from breakwater.calls.rules.classify import error_identity
from breakwater.client import ApiError
from breakwater.identity.pages.operator_actions import (
    Fields,
    FormError,
    act,
    back_to,
    reason_of,
    submitted,
    whole_number,
)
from breakwater.identity.pages.pages import HEADERS, Fetched, PageContext, fetched
from breakwater.identity.pages.visits import NotFound, ReadModels, Visit, page
from breakwater.jobs.contract.dead_letters import (
    DeadLetterCount,
    DeadLetterDetails,
    DeadLetterList,
    DeadLetterReplays,
    ListedDeadLetter,
)
from breakwater.jobs.views.dead_letters import COLUMNS
from breakwater.kernel.columns import Column
from breakwater.kernel.pages.tables import PageTable
from breakwater.kernel.pages.time_range import WINDOWS, window_links, window_of
from breakwater.kernel.pages.words import segment
from breakwater.kernel.types import format_time

PAGE = 100
"""Dead letters that are shown."""

GROUPED = 1_000
"""The latest dead letters that are grouped by their error."""


@dataclass(frozen=True, slots=True)
class ErrorGroup:
    """Dead letters of the same error, but for numbers and ids in its text."""

    hash: str
    latest: ListedDeadLetter
    count: int
    agents: tuple[str, ...]
    first_at: datetime
    replayable: int


GROUPS: tuple[Column[ErrorGroup], ...] = (
    Column("error", lambda one: one.latest.error, below=True),
    Column("reason", lambda one: one.latest.reason, "words"),
    Column("agents", lambda one: " ".join(one.agents)),
    Column("dead letters", lambda one: one.count, "count"),
    Column("can be replayed", lambda one: one.replayable, "count", name="replayable"),
    Column("first", lambda one: one.first_at, "time"),
    Column("latest", lambda one: one.latest.at, "time"),
)
FILTERS = ("agent", "error", "after", "left")
"""Parameters that another filter of the page replaces."""
CHOICE: Column[ListedDeadLetter] = Column("", None, name="choice")
"""Checkboxes for those who may replay."""


def routes(context: PageContext) -> list[Route]:
    """The routes of these pages."""
    return [
        page(context, "/dead-letters", "dead_letters.html", view, known=_known),
        Route("/dead-letters/replay", replay, methods=["POST"]),
        page(context, "/dead-letters/{dead_letter_id}", "dead_letter.html", view_one, dead_letter=_one),
    ]


def _known(visit: Visit, models: ReadModels) -> Awaitable[Fetched[DeadLetterList]]:
    query = {"reason": visit.get("reason"), "agent": visit.get("agent"), "since": _since(visit), "limit": GROUPED}
    return fetched(models.api.read(DeadLetterList, "dlq", query))


def view(visit: Visit, known: Fetched[DeadLetterList]) -> dict[str, Any]:
    """Dead letters by their errors, and one by one, with forms that replay them."""
    window, error = window_of(visit.address, "7d"), visit.get("error")
    reason, agent = visit.get("reason"), visit.get("agent")
    counts = known.value.counts if known.value else ()
    # The counts are of all times, so this is an upper bound, for a progress bar.
    total = sum(one.count for one in counts if _is_of(one, reason, agent))
    listed = known.value.dead_letters if known.value else ()
    groups = by_error(listed)
    columns = (CHOICE, *COLUMNS) if visit.session.may_operate else COLUMNS
    alike = [one for one in listed if not error or error_identity(one.error) == error]
    return {
        "error": error,
        "group": next((one for one in groups if one.hash == error), None),
        "groups": PageTable(visit.address, "errors", "Errors", GROUPS, groups, filters=FILTERS, find_name="find"),
        "table": PageTable(
            visit.address, "list", "Dead letters", columns, alike, most=PAGE, filterable=False, find_name="find"
        ),
        "window": window,
        "windows": window_links(visit.address, window),
        "since": _since(visit),
        "reason": reason,
        "agent": agent,
        "tiles": _tiles(counts, agent),
        "agents": sorted({one.agent for one in counts} | ({agent} if agent else set())),
        "total": total,
        "replayable": _replayable(known.value, total),
        "after": visit.get("after"),
        "left": whole_number(visit.get("left")),
    }


async def _one(visit: Visit, models: ReadModels) -> DeadLetterDetails | ApiError:
    """One dead letter; the error of the HTTP API if there is none."""
    try:
        return await models.api.read(DeadLetterDetails, f"dlq/{segment(visit.path_params['dead_letter_id'])}")
    except ApiError as error:
        if error.status != 404:
            raise
        return error


def view_one(_: Visit, dead_letter: DeadLetterDetails | ApiError) -> dict[str, Any] | NotFound:
    """The page of one dead letter."""
    if isinstance(dead_letter, ApiError):
        return NotFound("Dead letter not found", dead_letter.message)
    return {}


def _since(visit: Visit) -> str:
    return format_time(visit.now - WINDOWS[window_of(visit.address, "7d")])


async def replay(request: Request) -> Response:
    """POST: replays one dead letter, those that are ticked, or all that match the filters."""
    if "application/json" in request.headers.get("accept", ""):
        return await _replay_for_script(request)
    session, fields = await submitted(request)
    here = {name: fields.get(name) for name in ("reason", "agent", "window")}
    page, query = "/dead-letters", here
    if fields.get("from") == "one":
        page, query = f"/dead-letters/{fields.get('dead_letter_id')}", {}
    if not fields.get("all") and not _chosen(fields):
        session.notify("Nothing is selected: tick the dead letters to replay.", "bad")
        return back_to("/dead-letters", here)
    replays = await act(session, DeadLetterReplays, "dlq/replay", _body(fields))
    if replays is None:
        return back_to(page, query)
    looked_at = len(replays.replayed) + replays.already + len(replays.skipped)
    left = max(whole_number(fields.get("total")) - looked_at, 0) if replays.continue_after else 0
    session.notify(_outcome(replays, left), "good" if replays.replayed or not replays.skipped else "bad")
    more = {"after": _cursor(replays), "left": str(left)} if query and replays.continue_after else {}
    return back_to(page, query | more)


async def _replay_for_script(request: Request) -> Response:
    """The same for a script, which repeats it until there are no more: the response is JSON."""
    try:
        session, fields = await submitted(request)
        replays = await session.api.act(DeadLetterReplays, "dlq/replay", _body(fields))
    except (ApiError, FormError) as error:
        return JSONResponse({"message": str(error).rstrip(".")}, error.status, HEADERS)
    result = {
        "replayed": len(replays.replayed),
        "already": replays.already,
        "skipped": len(replays.skipped),
        "continue_after": _cursor(replays),
    }
    return JSONResponse(result, headers=HEADERS)


def by_error(dead_letters: Iterable[ListedDeadLetter]) -> list[ErrorGroup]:
    """Dead letters grouped by their errors, the most frequent first. They come with the latest first."""
    groups: dict[str, list[ListedDeadLetter]] = {}
    for one in dead_letters:
        groups.setdefault(error_identity(one.error), []).append(one)
    found = [
        ErrorGroup(
            hash,
            its[0],
            len(its),
            tuple(sorted({one.agent for one in its if one.agent})),
            its[-1].at,
            sum(one.replayable for one in its),
        )
        for hash, its in groups.items()  # noqa: A001
    ]
    return sorted(found, key=lambda one: -one.count)


def _replayable(listed: DeadLetterList | None, total: int) -> int:
    """Dead letters that a replay of all would run; an upper bound if not all are listed."""
    if listed is None:
        return 0
    able = sum(one.replayable for one in listed.dead_letters)
    return max(total - len(listed.dead_letters), 0) + able if listed.more else able


def _tiles(counts: Sequence[DeadLetterCount], agent: str) -> list[tuple[str, int]]:
    """The number of all dead letters, under an empty name, then of each reason, the most frequent first."""
    sums: Counter[str] = Counter()
    for one in counts:
        if _is_of(one, "", agent):
            sums[one.reason] += one.count
    return [("", sums.total()), *sorted(sums.items(), key=lambda item: (-item[1], item[0]))]


def _is_of(count: DeadLetterCount, reason: str, agent: str) -> bool:
    return reason in ("", count.reason) and agent in ("", count.agent)


def _chosen(fields: Fields) -> list[int]:
    return [number for one in fields.all("dead_letter_id") if (number := whole_number(one))]


def _body(fields: Fields) -> dict[str, Any]:
    """Request for a replay of the dead letters that are ticked, or of all that match the page's filters."""
    body: dict[str, Any] = {"why": reason_of(fields, "why")}
    if not fields.get("all"):
        return body | {"dead_letters": _chosen(fields)}
    reason, agent = fields.get("reason") or None, fields.get("agent") or None
    after, _, up_to = fields.get("after").partition("-")
    if whole_number(after) and whole_number(up_to):
        body |= {"after": whole_number(after), "up_to": whole_number(up_to)}
    body |= {"reason": reason, "agent": agent, "all": True if reason is None and agent is None else None}
    return body | {"since": _time(fields.get("since"))}


def _cursor(replays: DeadLetterReplays) -> str | None:
    """The place to continue, as the pages send it back; None at the end."""
    return None if replays.continue_after is None else f"{replays.continue_after}-{replays.up_to or 0}"


def _outcome(replays: DeadLetterReplays, left: int) -> str:
    """The result of a replay, in words."""
    done = len(replays.replayed)
    parts = [f"replayed as {replays.replayed[0].execution_id}" if done == 1 else f"{done:,} replayed"]
    if replays.already:
        parts.append(f"{replays.already:,} had been replayed before")
    if replays.skipped:
        first = replays.skipped[0]
        parts.append(f"{len(replays.skipped):,} can't be replayed, such as {first.dead_letter_id}: {first.why}")
    text = "; ".join(parts)
    more = f" About {left:,} are left: continue below." if replays.continue_after else ""
    return f"{text[:1].upper()}{text[1:]}.{more}"


def _time(text: str) -> str | None:
    try:
        return format_time(datetime.fromisoformat(text))
    except (ValueError, OverflowError):
        return None
