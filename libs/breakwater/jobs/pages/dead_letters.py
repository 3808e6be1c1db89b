"""The pages of dead letters, and replays and dismissals of one, some or all that match."""

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
    read_action,
    reason_of,
    whole_number,
)
from breakwater.identity.pages.rendering import HEADERS, NavigationLink, PageContext, PagePart, fetch_part
from breakwater.identity.pages.visits import NotFound, ReadModels, Visit, page
from breakwater.jobs.contract.dead_letters import (
    DeadLetterCount,
    DeadLetterDetails,
    DeadLetterDismissals,
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

PAGE_ROWS = 100
"""Maximum number of dead letters that are shown."""

MAX_GROUPED = 1_000
"""Maximum number of dead letters, the latest first, that are grouped by their error."""


@dataclass(frozen=True, slots=True)
class ErrorGroup:
    """Dead letters whose errors differ only by numbers and ids in the text."""

    hash: str
    latest: ListedDeadLetter
    count: int
    agents: tuple[str, ...]
    first_at: datetime
    replayable: int


GROUPS: tuple[Column[ErrorGroup], ...] = (
    Column("error", lambda group: group.latest.error, below=True),
    Column("reason", lambda group: group.latest.reason, "words"),
    Column("agents", lambda group: " ".join(group.agents)),
    Column("dead letters", lambda group: group.count, "count"),
    Column("can be replayed", lambda group: group.replayable, "count", name="replayable"),
    Column("first", lambda group: group.first_at, "time"),
    Column("latest", lambda group: group.latest.at, "time"),
)
FILTERS = ("agent", "error", "after", "left")
"""Parameters of the URL that a change of the page's filter replaces."""
CHECKBOXES: Column[ListedDeadLetter] = Column("", None, name="choice")
"""The column of checkboxes for users who may replay."""
ERROR_FIRST = tuple(sorted(COLUMNS, key=lambda column: column.key != "error"))
"""The columns on the page: what went wrong comes before its number."""

LINK = NavigationLink("/dead-letters", "Dead letters", "d")


def routes(context: PageContext) -> list[Route]:
    """The routes of these pages."""
    return [
        page(context, "/dead-letters", "dead_letters.html", view, dead_letter_list=_dead_letter_list),
        Route("/dead-letters/replay", replay, methods=["POST"]),
        Route("/dead-letters/dismiss", dismiss, methods=["POST"]),
        page(context, "/dead-letters/{dead_letter_id}", "dead_letter.html", view_dead_letter, dead_letter=_dead_letter),
    ]


def _dead_letter_list(visit: Visit, models: ReadModels) -> Awaitable[PagePart[DeadLetterList]]:
    query = {
        "reason": visit.get("reason"),
        "agent": visit.get("agent"),
        "since": _since(visit),
        "state": _state(visit),
        "limit": MAX_GROUPED,
    }
    return fetch_part(models.api.read(DeadLetterList, "dlq", query))


def view(visit: Visit, dead_letter_list: PagePart[DeadLetterList]) -> dict[str, Any]:
    """The values of the page: dead letters by error and one by one, with forms that replay them."""
    window = window_of(visit.address, "7d")
    error = visit.get("error")
    reason = visit.get("reason")
    agent = visit.get("agent")
    counts = dead_letter_list.value.counts if dead_letter_list.value else ()
    # The counts are not limited to the time range, so the total is an upper bound, for a progress bar.
    total = sum(count.count for count in counts if _is_of(count, reason, agent))
    dead_letters = dead_letter_list.value.dead_letters if dead_letter_list.value else ()
    groups = by_error(dead_letters)
    columns = (CHECKBOXES, *ERROR_FIRST) if visit.session.may_operate else ERROR_FIRST
    matching = [dead_letter for dead_letter in dead_letters if not error or error_identity(dead_letter.error) == error]
    return {
        "state": _state(visit) or "",
        "error": error,
        "group": next((group for group in groups if group.hash == error), None),
        "groups": PageTable(visit.address, "errors", "Errors", GROUPS, groups, filters=FILTERS, find_name="find"),
        "table": PageTable(
            visit.address,
            "list",
            "Dead letters",
            columns,
            matching,
            max_rows=PAGE_ROWS,
            filterable=False,
            find_name="find",
        ),
        "window": window,
        "windows": window_links(visit.address, window),
        "since": _since(visit),
        "reason": reason,
        "agent": agent,
        "tiles": _tiles(counts, agent),
        "agents": sorted({count.agent for count in counts} | ({agent} if agent else set())),
        "total": total,
        "replayable": _replayable(dead_letter_list.value, total),
        "after": visit.get("after"),
        "remaining": whole_number(visit.get("left")),
    }


async def _dead_letter(visit: Visit, models: ReadModels) -> DeadLetterDetails | ApiError:
    """Reads a dead letter. Returns the error of the HTTP API if it does not exist."""
    try:
        return await models.api.read(DeadLetterDetails, f"dlq/{segment(visit.path_params['dead_letter_id'])}")
    except ApiError as error:
        if error.status != 404:
            raise
        return error


def view_dead_letter(_: Visit, dead_letter: DeadLetterDetails | ApiError) -> dict[str, Any] | NotFound:
    """The values of the page of a dead letter."""
    if isinstance(dead_letter, ApiError):
        return NotFound("Dead letter not found", dead_letter.message)
    return {}


def _state(visit: Visit) -> str | None:
    """`dismissed` if the page lists those; None for the open ones."""
    return "dismissed" if visit.get("state") == "dismissed" else None


def _since(visit: Visit) -> str:
    return format_time(visit.now - WINDOWS[window_of(visit.address, "7d")])


async def replay(request: Request) -> Response:
    """POST: replays one dead letter, the ticked ones, or all that match the filters."""
    if "application/json" in request.headers.get("accept", ""):
        return await _replay_for_script(request)
    session, fields = await read_action(request)
    page, query = _origin(fields)
    if not fields.get("all") and not _chosen_numbers(fields):
        session.notify("Nothing is selected: tick the dead letters to replay.", "bad")
        return back_to("/dead-letters", query)
    replays = await act(session, DeadLetterReplays, "dlq/replay", _body(fields))
    if replays is None:
        return back_to(page, query)
    processed = len(replays.replayed) + replays.already + len(replays.skipped)
    remaining = max(whole_number(fields.get("total")) - processed, 0) if replays.continue_after else 0
    session.notify(_outcome(replays, remaining), "good" if replays.replayed or not replays.skipped else "bad")
    continuation = {"after": _cursor(replays), "left": str(remaining)} if query and replays.continue_after else {}
    return back_to(page, query | continuation)


async def dismiss(request: Request) -> Response:
    """POST: dismisses one dead letter, the ticked ones, or all that match the filters."""
    session, fields = await read_action(request)
    page, query = _origin(fields)
    if not fields.get("all") and not _chosen_numbers(fields):
        session.notify("Nothing is selected: tick the dead letters to dismiss.", "bad")
        return back_to("/dead-letters", query)
    # What was dismissed leaves the list, so those that are left are dismissed from its beginning.
    body = {name: value for name, value in _body(fields).items() if name not in ("after", "up_to")}
    dismissals = await act(session, DeadLetterDismissals, "dlq/dismiss", body)
    if dismissals is not None:
        count = len(dismissals.dismissed)
        parts = [f"{count:,} dead letter{'' if count == 1 else 's'} dismissed"]
        if dismissals.already:
            parts.append(f"{dismissals.already:,} had been dismissed before")
        if dismissals.skipped:
            parts.append(f"{len(dismissals.skipped):,} no longer exist")
        more = " There are more: dismiss those, too." if dismissals.continue_after else ""
        session.notify(f"{'; '.join(parts)}.{more}", "good" if count or not dismissals.skipped else "bad")
    return back_to(page, query)


def _origin(fields: Fields) -> tuple[str, dict[str, str]]:
    """The path and the filters of the page that sent a form."""
    if fields.get("from") == "one":
        return f"/dead-letters/{fields.get('dead_letter_id')}", {}
    return "/dead-letters", {name: fields.get(name) for name in ("reason", "agent", "window", "state")}


async def _replay_for_script(request: Request) -> Response:
    """Does the same for a script, which repeats the request until all are replayed. The response is JSON."""
    try:
        session, fields = await read_action(request)
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
    """Groups dead letters, which must be sorted latest first, by their errors; the most frequent errors come first."""
    groups: dict[str, list[ListedDeadLetter]] = {}
    for dead_letter in dead_letters:
        groups.setdefault(error_identity(dead_letter.error), []).append(dead_letter)
    error_groups = [
        ErrorGroup(
            hash,
            dead_letters_of_group[0],
            len(dead_letters_of_group),
            tuple(sorted({dead_letter.agent for dead_letter in dead_letters_of_group if dead_letter.agent})),
            dead_letters_of_group[-1].at,
            sum(dead_letter.replayable for dead_letter in dead_letters_of_group),
        )
        for hash, dead_letters_of_group in groups.items()  # noqa: A001
    ]
    return sorted(error_groups, key=lambda group: -group.count)


def _replayable(dead_letter_list: DeadLetterList | None, total: int) -> int:
    """Counts the dead letters that a replay of all would run; an upper bound if not all are listed."""
    if dead_letter_list is None:
        return 0
    replayable = sum(dead_letter.replayable for dead_letter in dead_letter_list.dead_letters)
    return max(total - len(dead_letter_list.dead_letters), 0) + replayable if dead_letter_list.more else replayable


def _tiles(counts: Sequence[DeadLetterCount], agent: str) -> list[tuple[str, int]]:
    """The number of all dead letters, with an empty name, then that of each reason, the most frequent first."""
    sums: Counter[str] = Counter()
    for count in counts:
        if _is_of(count, "", agent):
            sums[count.reason] += count.count
    return [("", sums.total()), *sorted(sums.items(), key=lambda item: (-item[1], item[0]))]


def _is_of(count: DeadLetterCount, reason: str, agent: str) -> bool:
    return reason in ("", count.reason) and agent in ("", count.agent)


def _chosen_numbers(fields: Fields) -> list[int]:
    return [number for value in fields.all("dead_letter_id") if (number := whole_number(value))]


def _body(fields: Fields) -> dict[str, Any]:
    """Builds the request for a replay of the ticked dead letters, or of all that match the page's filters."""
    body: dict[str, Any] = {"why": reason_of(fields, "why")}
    if not fields.get("all"):
        return body | {"dead_letters": _chosen_numbers(fields)}
    reason = fields.get("reason") or None
    agent = fields.get("agent") or None
    after, _, up_to = fields.get("after").partition("-")
    if whole_number(after) and whole_number(up_to):
        body |= {"after": whole_number(after), "up_to": whole_number(up_to)}
    body |= {"reason": reason, "agent": agent, "all": True if reason is None and agent is None else None}
    return body | {"since": _time(fields.get("since"))}


def _cursor(replays: DeadLetterReplays) -> str | None:
    """The position to continue from, in the form that pages send back; None at the end."""
    return None if replays.continue_after is None else f"{replays.continue_after}-{replays.up_to or 0}"


def _outcome(replays: DeadLetterReplays, remaining: int) -> str:
    """Describes the result of a replay."""
    replayed = len(replays.replayed)
    parts = [f"replayed as {replays.replayed[0].execution_id}" if replayed == 1 else f"{replayed:,} replayed"]
    if replays.already:
        parts.append(f"{replays.already:,} had been replayed before")
    if replays.skipped:
        first_skipped = replays.skipped[0]
        parts.append(
            f"{len(replays.skipped):,} can't be replayed, such as {first_skipped.dead_letter_id}: {first_skipped.why}"
        )
    text = "; ".join(parts)
    continuation = f" About {remaining:,} are left: continue below." if replays.continue_after else ""
    return f"{text[:1].upper()}{text[1:]}.{continuation}"


def _time(text: str) -> str | None:
    try:
        return format_time(datetime.fromisoformat(text))
    except (ValueError, OverflowError):
        return None
