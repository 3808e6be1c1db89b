"""`breakwater cancel`: cancels jobs, whether they wait, are parked or run."""

from __future__ import annotations

import asyncio
from typing import Annotated
from urllib.parse import quote

import typer

from breakwater.client import ApiClient, ApiError, parse
from breakwater.client.commands import Api, api_command, api_errors
from breakwater.jobs.contract.submission import CancelledJob
from breakwater.kernel.commands import formats, output
from breakwater.kernel.commands.connect import run
from breakwater.kernel.commands.errors import ExitCode, usage_error
from breakwater.kernel.commands.output import Column
from breakwater.kernel.commands.text_input import check_sendable

DEFAULT_WAIT_S = 5.0
LONGEST_WAIT_S = 300.0
MAX_CONCURRENT_REQUESTS = 16


@api_command
def cancel(
    api: Api,
    jobs: Annotated[list[str], typer.Argument(metavar="ID…", help="Job ids; of other callers' jobs, execution ids.")],
    reason: Annotated[str | None, typer.Option("--reason", metavar="TEXT", help="Reason; it is recorded.")] = None,
    wait_s: Annotated[
        float, typer.Option("--wait-s", metavar="SECONDS", help="Seconds to wait for each job to end; 0: not at all.")
    ] = DEFAULT_WAIT_S,
) -> None:
    """Cancel jobs. A waiting or parked job makes no further call; a call in flight is aborted within a second.

    The job's record has the estimated cost of an aborted call. Exit code: 1 if a job had already ended, 5 if one has
    not ended yet: it will end when its turn comes in the queue.

    For example:

        breakwater cancel order-4711 --reason "the order was withdrawn"

        breakwater cancel order-4711 order-4712 --json | jq -r '.[].status'
    """
    if not 0 <= wait_s <= LONGEST_WAIT_S:
        raise usage_error(f"--wait-s {wait_s:g}: is not between 0 and {LONGEST_WAIT_S:g}")
    for job in jobs:
        check_sendable("ID", job)
    check_sendable("--reason", reason)
    ids = list(dict.fromkeys(jobs))
    with api_errors(unanswered=""):
        outcomes = run(_cancel(api.client(), ids, reason, wait_s))
    answered_jobs = [job for job, _ in outcomes if job is not None]
    if api.as_json:
        output.json_document([job.model_dump(mode="json") for job in answered_jobs])
    elif answered_jobs:
        columns: list[Column[CancelledJob]] = [
            Column("job", lambda job: job.job_id),
            Column("status", lambda job: output.state(job.status)),
            Column("cost", _cost, align_right=True),
            Column("", _remark, below=True),
        ]
        output.table(columns, answered_jobs)
    see = f"`breakwater executions {ids[0]}` shows whether it has ended; cancelling it again is safe."
    for _, error in outcomes:
        with api_errors(unanswered=see, unknown="`breakwater executions --since 1h` lists jobs that have ended."):
            if error is not None:
                raise error
    statuses = {job.status for job in answered_jobs}
    if statuses & {"succeeded", "dead_lettered"}:
        raise typer.Exit(ExitCode.FAILED)
    if "cancelling" in statuses and wait_s:
        raise typer.Exit(ExitCode.UNDECIDED)


async def _cancel(
    client: ApiClient, ids: list[str], reason: str | None, wait_s: float
) -> list[tuple[CancelledJob | None, ApiError | None]]:
    """Cancels jobs, several at a time. Returns for each, in their order, its outcome or the error of the request."""
    slots = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)
    body = {} if reason is None else {"reason": reason}

    async def cancel_job(job_id: str) -> tuple[CancelledJob | None, ApiError | None]:
        async with slots:
            try:
                response = await client.await_decision(
                    "POST", f"jobs/{quote(job_id, safe='')}/cancel", body, wait_s=wait_s
                )
                return parse(CancelledJob, response.document), None
            except ApiError as error:
                return None, error

    async with client:
        return list(await asyncio.gather(*map(cancel_job, ids)))


def _cost(job: CancelledJob) -> str:
    if job.total_cost is None:
        return ""
    return f"{formats.money(job.total_cost)}{' estimated' if job.cost_basis == 'estimated' else ''}"


def _remark(job: CancelledJob) -> str:
    if job.status == "cancelling":
        return "ends and makes no further call"
    return "" if job.status == "cancelled" else "had already ended"
