"""`breakwater jobs`: lists the jobs that have not ended."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, get_args

import typer

from breakwater.client import ApiClient, ApiUnavailableError, parse
from breakwater.client.commands import SEE_DOCTOR, TIMEOUT_S, Api, api_command, api_errors
from breakwater.jobs.contract.current_jobs import CurrentJobList, JobState
from breakwater.jobs.views.current_jobs import COLUMNS, counts_text
from breakwater.kernel.columns import clock
from breakwater.kernel.commands import output
from breakwater.kernel.commands.connect import run
from breakwater.kernel.commands.errors import usage_error
from breakwater.kernel.commands.text_input import check_sendable

STATES: tuple[JobState, ...] = get_args(JobState)

PAGE = 200
"""The most jobs that one request lists."""

MAX_REQUESTS = 20
"""The most requests for one list: a filter that matches few of very many queued jobs takes several."""

WATCH_EVERY_S = 2.0

JobFilters = Mapping[str, str | None]
"""The filters of a list, by their parameters; None for those that are not used."""


@api_command
def jobs(
    api: Api,
    state: Annotated[
        str | None, typer.Option("--state", metavar="STATE", help="Filter by state: running, waiting, parked, queued.")
    ] = None,
    agent: Annotated[str | None, typer.Option("--agent", metavar="NAME", help="Filter by agent.")] = None,
    tenant: Annotated[str | None, typer.Option("--tenant", metavar="NAME", help="Filter by tenant.")] = None,
    key: Annotated[
        str | None, typer.Option("--key", metavar="NAME", help="Filter by the API key or NATS user that submitted it.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1_000, help="Maximum number of rows.")] = 50,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show the list again every two seconds, until Ctrl-C.")
    ] = False,
) -> None:
    """List the jobs that have not ended: what runs, what waits and for what, and what is queued.

    `running`: a worker calls a model for it. `waiting`: its worker waits for less than ten seconds, such as for a rate
    limit, or is gone, and another one takes the job when its claim has ended. `parked`: it waits for longer and holds
    no slot. `queued`: no worker has taken it yet.

    Jobs in progress come first, then parked ones, then queued ones; of each agent, the oldest first. Ended jobs are
    in `breakwater executions`. A key without the scope `read` lists the jobs whose results it may read.

    For example:

        breakwater jobs

        breakwater jobs --state running --agent content-writer --watch

        breakwater jobs --key batch --json | jq -r '.jobs[].execution_id' | xargs breakwater cancel
    """
    if state is not None and state not in STATES:
        raise usage_error(f"--state: {state!r} is not a state", f"States: {', '.join(STATES)}.")
    query: JobFilters = {"state": state, "agent": agent, "tenant": tenant, "key": key}
    for name, value in query.items():
        check_sendable(f"--{name}", value)
    with api_errors(unanswered=SEE_DOCTOR):
        run(_watch(api, query, limit) if watch else _show_once(api, query, limit))


async def _show_once(api: Api, query: JobFilters, limit: int) -> None:
    async with api.client() as client:
        document = await _read(client, query, limit)
    if api.as_json:
        output.json_document(document)
    else:
        _show(parse(CurrentJobList, document), query)


async def _watch(api: Api, query: JobFilters, limit: int) -> None:
    async with api.client() as client:
        with output.frames() as show_frame:
            document: dict[str, Any] | None = None
            while True:
                problem = ""
                try:
                    document = await _read(client, query, limit)
                except ApiUnavailableError as error:
                    if document is None:
                        raise
                    problem = f"{error.message}; this is the list as it was"
                if api.as_json:
                    output.json_line(document)
                else:
                    job_list = parse(CurrentJobList, document)
                    show_frame(lambda job_list=job_list, problem=problem: _show(job_list, query, problem, timed=True))
                await asyncio.sleep(WATCH_EVERY_S)


async def _read(client: ApiClient, query: JobFilters, limit: int) -> dict[str, Any]:
    """Reads up to `limit` jobs, in as many pages as that takes. Returns them as one page. Raises ApiError."""
    listed: list[Any] = []
    more: dict[str, str | int | None] = {"counts": "true"}
    first: dict[str, Any] = {}
    next_place: str | None = None
    for _ in range(MAX_REQUESTS):
        page_limit = min(PAGE, limit - len(listed))
        page: Any = await client.get("jobs", {**query, **more, "limit": page_limit}, timeout_s=TIMEOUT_S)
        parse(CurrentJobList, page)
        first = first or page
        listed += page["jobs"]
        next_place = page["next"]
        if next_place is None or len(listed) >= limit:
            break
        more = {"after": next_place}
    return {**first, "jobs": listed, "next": next_place}


def _show(job_list: CurrentJobList, query: JobFilters, problem: str = "", *, timed: bool = False) -> None:
    counts = None if job_list.counts is None else counts_text(job_list.counts)
    if timed:
        title = f"{clock(job_list.at)}  {counts or ''}".rstrip()
        output.print_styled((title, "bold"), (f"  {problem}".rstrip(), "red"))
    filtered = " that matches" if any(value is not None for value in query.values()) else ""
    output.table(COLUMNS, job_list.jobs, empty=f"no job{filtered} is running, waiting, parked or queued")
    if job_list.next is not None:
        output.note(f"(more than these {len(job_list.jobs):,}; see --limit, or filter by --agent or --state)")
    if counts is not None and not timed:
        output.note(f"({counts}{' in all' if filtered else ''})")
