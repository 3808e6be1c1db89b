"""Columns of jobs that have not ended."""

from __future__ import annotations

from breakwater.jobs.contract.current_jobs import CurrentJob, CurrentJobCounts, JobWait
from breakwater.kernel.columns import Cell, Column, clock, elapsed, humanize, time_until, tone_of


def wait_text(job: CurrentJob) -> str:
    """Says what a job waits for, and for how long."""
    wait = job.wait
    if wait is None:
        return ""
    until = "" if wait.until is None else f" ({time_until(wait.until)})"
    return f"{humanize(wait.kind)}: {wait.message}{until}{place_text(wait)}"


def place_text(wait: JobWait) -> str:
    """Says how many calls wait before a job, since when it waits, and what makes room; empty if it has no place."""
    if wait.ahead is None:
        return ""
    number = "first in the queue" if not wait.ahead else f"{wait.ahead:,} before it in the queue"
    since = "" if wait.since is None else f" since {clock(wait.since)}"
    frees = "" if wait.frees is None else f"; room comes with {wait.frees}"
    return f"; {number}{since}{frees}"


def _state(job: CurrentJob) -> Cell:
    return ("cancelling", "warn") if job.cancelling else (job.state, tone_of(job.state))


COLUMNS: tuple[Column[CurrentJob], ...] = (
    Column("job", lambda job: job.execution_id, "execution", display=lambda job: job.job_id, sortable=False),
    Column("state", lambda job: job.state, "state", display=_state, sortable=False),
    Column("agent", lambda job: job.agent, "agent", sortable=False),
    Column("key", lambda job: job.submitted_by, name="submitted_by", drop=3, sortable=False),
    Column("tenant", lambda job: job.tenant, drop=4, page=False),
    Column(
        "age",
        lambda job: job.age_ms,
        "duration",
        display=lambda job: elapsed(job.age_ms / 1000),
        name="age_ms",
        sortable=False,
    ),
    Column("attempt", lambda job: job.attempt, "number", drop=2, page=False),
    Column("model", lambda job: job.model, drop=1, sortable=False),
    Column("waits for", lambda job: job.wait and job.wait.kind, display=wait_text, name="wait", below=True, page=False),
    Column("prompt", lambda job: job.prompt, below=True, sortable=False),
)


def counts_text(counts: CurrentJobCounts) -> str:
    """Says how many jobs are in each state."""
    in_progress = f"{counts.in_progress:,} running or waiting"
    if counts.running is not None and counts.waiting is not None:
        in_progress = f"{counts.running:,} running, {counts.waiting:,} waiting"
    return f"{in_progress}, {counts.parked:,} parked, {counts.queued:,} queued"
