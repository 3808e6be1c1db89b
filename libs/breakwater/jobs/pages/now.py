"""The page of the jobs that have not ended, and their cancellation: one, or all that are selected."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, get_args

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from breakwater.client import ApiError, ApiKeyRefusedError
from breakwater.identity.pages.operator_actions import back_to, read_action, reason_of
from breakwater.identity.pages.rendering import NavigationLink, PageContext, PagePart, fetch_part
from breakwater.identity.pages.sessions import Session
from breakwater.identity.pages.visits import ReadModels, Visit, page
from breakwater.jobs.contract.current_jobs import CurrentJob, CurrentJobCounts, CurrentJobList, JobState
from breakwater.jobs.contract.submission import CancelledJob
from breakwater.jobs.views.current_jobs import COLUMNS, place_text
from breakwater.kernel.columns import Column, humanize
from breakwater.kernel.formats import quantity
from breakwater.kernel.pages.tables import PageTable
from breakwater.kernel.pages.words import segment

PAGE_ROWS = 100

REFRESH_S = 3

MAX_CONCURRENT_REQUESTS = 16

MAX_NAMED = 3
"""Maximum number of jobs that a notice names."""

FILTERS = ("state", "agent", "tenant", "key")

CHECKBOXES: Column[CurrentJob] = Column("", None, name="choice")
"""The column of checkboxes for users who may cancel."""

LINK = NavigationLink("/now", "Now", "n")


def routes(context: PageContext) -> list[Route]:
    """The routes of this page."""
    return [
        page(context, "/now", "now.html", view, job_list=_job_list),
        Route("/now/cancel", cancel, methods=["POST"]),
    ]


def _job_list(visit: Visit, models: ReadModels) -> Awaitable[PagePart[CurrentJobList]]:
    query = {name: visit.get(name) for name in (*FILTERS, "after")} | {"limit": PAGE_ROWS, "counts": "true"}
    return fetch_part(models.api.read(CurrentJobList, "jobs", query))


def view(visit: Visit, job_list: PagePart[CurrentJobList]) -> dict[str, Any]:
    """The values of the page: the jobs, their number in each state, and a form that cancels some of them."""
    jobs = job_list.value.jobs if job_list.value else ()
    columns = (CHECKBOXES, *COLUMNS) if visit.session.may_operate else COLUMNS
    next_place = job_list.value.next if job_list.value else None
    return {
        "table": PageTable(visit.address, "list", "Jobs that have not ended", columns, jobs, filterable=False),
        "tiles": _tiles(visit, job_list.value.counts if job_list.value else None),
        "filters": {name: visit.get(name) for name in FILTERS},
        "is_filtered": any(map(visit.get, FILTERS)),
        "first_page": visit.address.link(after="") if visit.get("after") else None,
        "next_page": None if next_place is None else visit.address.link(after=next_place),
        "place_text": place_text,
        "refresh_s": REFRESH_S,
    }


def _tiles(visit: Visit, counts: CurrentJobCounts | None) -> list[tuple[str, str, str]]:
    """The link, the name and the number of each state, after those of all of them."""
    numbers: dict[str, int | None] = dict.fromkeys(("", *get_args(JobState)))
    if counts is not None:
        numbers = {
            "": counts.in_progress + counts.parked + counts.queued,
            "running": counts.running,
            "waiting": counts.waiting,
            "parked": counts.parked,
            "queued": counts.queued,
        }
    return [
        (visit.address.link(state=state, after=""), state, "–" if number is None else f"{number:,}")
        for state, number in numbers.items()
    ]


async def cancel(request: Request) -> Response:
    """POST: cancels one job, or the selected ones, and says which could not be cancelled."""
    session, fields = await read_action(request)
    only = fields.get("only")
    execution_ids = list(dict.fromkeys([only] if only else fields.all("execution_id")))
    query = {name: fields.get(name) for name in FILTERS}
    if not execution_ids:
        session.notify("Nothing is selected: tick the jobs to cancel.", "bad")
        return back_to("/now", query)
    outcomes = await _cancel_all(session, execution_ids, reason_of(fields))
    session.notify(_outcome(outcomes), "bad" if any(problem for _, problem in outcomes) else "good")
    return back_to("/now", query)


async def _cancel_all(
    session: Session, execution_ids: Sequence[str], reason: str | None
) -> list[tuple[str, str | None]]:
    """Cancels jobs, several at a time. Returns each with the reason why it could not be cancelled, or None."""
    slots = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)

    async def cancel_job(execution_id: str) -> tuple[str, str | None]:
        async with slots:
            try:
                path = f"jobs/{segment(execution_id)}/cancel"
                job = await session.api.act(CancelledJob, path, {"reason": reason})
            except ApiKeyRefusedError:
                raise
            except ApiError as error:
                return execution_id, error.message
        ended = job.status not in ("cancelling", "cancelled")
        return job.job_id, f"had already ended: {humanize(job.status)}" if ended else None

    return list(await asyncio.gather(*map(cancel_job, execution_ids)))


def _outcome(outcomes: Sequence[tuple[str, str | None]]) -> str:
    """Says how many jobs are cancelled, and which are not, and why."""
    problems = [(job, problem) for job, problem in outcomes if problem is not None]
    cancelled = len(outcomes) - len(problems)
    verb = "is" if cancelled == 1 else "are"
    sentences = [f"{quantity(cancelled, 'job')} {verb} being cancelled, and will make no further call."]
    if problems:
        named = "; ".join(f"{job}: {problem}" for job, problem in problems[:MAX_NAMED])
        unnamed_count = len(problems) - MAX_NAMED
        more = f"; and {unnamed_count:,} more" if unnamed_count > 0 else ""
        sentences.append(f"{len(problems):,} could not be cancelled: {named}{more}.")
        if not cancelled:
            del sentences[0]
    return " ".join(sentences)
