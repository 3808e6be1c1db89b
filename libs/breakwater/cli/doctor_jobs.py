"""The doctor's check of accepted jobs: each is decided, in progress, or waits; none has vanished."""

from __future__ import annotations

from contextlib import aclosing
from datetime import UTC, datetime, timedelta

from nats.aio.client import Client

from breakwater.bus.lookup import last_on, scan
from breakwater.cli import connect
from breakwater.cli.doctor_findings import Finding, Findings, check
from breakwater.cli.plane import PlaneLocation
from breakwater.config import Config
from breakwater.contracts import subjects
from breakwater.contracts.subjects import Header, Stream
from breakwater.state.accepted import RememberedJob, lately_accepted, unclaimed
from breakwater.state.connection import Redis

MAX_JOBS = 20_000
"""How many jobs are looked at, of the last day."""

MAX_WAITING = 20_000
"""How many messages of JOBS are read to find what waits there."""

SETTLING = timedelta(seconds=30)
"""A job may be on its way from one place to the next."""

_NAMED = 5


@check
async def job_findings(plane: PlaneLocation, _config: Config | None = None) -> Findings:
    """Whether jobs that were accepted over HTTP within a day are somewhere."""
    async with connect.bus(plane.admin_nats_url) as client, connect.state(plane.redis_url) as redis:
        yield await _finding(client, redis)


async def _finding(client: Client, redis: Redis) -> Finding:
    before = datetime.now(UTC) - SETTLING
    jobs, left_out = await lately_accepted(redis, before, MAX_JOBS)
    count = f"{len(jobs):,}" if not left_out else f"{len(jobs):,} (of {len(jobs) + left_out:,}, chosen at random)"
    # Twice, as a job moves on while it is looked for: what is nowhere both times has vanished.
    lost = jobs
    for _ in range(2):
        undecided = await _undecided(client, lost)
        lost = await unclaimed(redis, undecided)
        if lost:
            waiting = await _waiting(client)
            if waiting is None:
                text = f"more than {MAX_WAITING:,} jobs wait, too many to see whether accepted ones are missing"
                return Finding("jobs", "warn", text, "Run this again once fewer wait.")
            lost = [job for job in lost if job.execution_id not in waiting]
    if not lost:
        return Finding("jobs", "ok", f"all of {count} accepted jobs are decided, in progress, or waiting")
    names = ", ".join(job.execution_id for job in lost[:_NAMED]) + (", …" if len(lost) > _NAMED else "")
    text = f"{len(lost):,} of {count} accepted jobs have vanished: they have no result, and don't wait: {names}"
    return Finding("jobs", "fail", text, "Was a stream deleted or purged? Submit them again, with the same job ids.")


async def _undecided(client: Client, jobs: list[RememberedJob]) -> list[RememberedJob]:
    """The jobs that have neither a record nor a result."""
    by_record = {subjects.execution(job.agent, job.execution_id): job for job in jobs}
    async for found in last_on(lambda: client, Stream.EVENTS, list(by_record)):
        by_record.pop(found.subject, None)
    by_result = {subjects.result(job.execution_id): job for job in by_record.values()}
    async for found in last_on(lambda: client, Stream.RESULTS, list(by_result)):
        by_result.pop(found.subject, None)
    return list(by_result.values())


async def _waiting(client: Client) -> set[str] | None:
    """The id of each job in JOBS and PARKED, as `request` writes it; None where there are too many."""
    waiting: set[str] = set()
    for stream, subject in ((Stream.JOBS, "bw.jobs.*"), (Stream.PARKED, "bw.parked.>")):
        # Those of programs on NATS have another subject, and were accepted there.
        async with aclosing(scan(lambda: client, stream, subject)) as stored:
            async for found in stored:
                if len(waiting) == MAX_WAITING:
                    return None
                token = found.headers.get(Header.EXECUTION_ID.value)
                token = token or found.headers.get(Header.MSG_ID.value, "").rpartition("/")[2]
                waiting.add(subjects.decode_token(token))
    return waiting
