"""Runs: the executions that belong together, as the calls of one agent loop do."""

from __future__ import annotations

from breakwater.jobs.contract.job import Job


def run_of(job: Job, execution_id: str, *, trace_id: str | None = None, run_of_parent: str | None = None) -> str:
    """The id of a job's run, which its record keeps.

    The first of these that the job has: its task, its session, the run of its parent, its trace; else it is a run of
    its own. So a child is in the run of its parent unless it names a task or a session.

    Args:
        job: with the ids as the plane calls them, and its own task.
        execution_id: of the job.
        trace_id: of the W3C trace context that came with it, scoped to its owner.
        run_of_parent: of the execution that it names as its parent.
    """
    named = job.task_id or job.session_id
    if named is None and run_of_parent is not None:
        return run_of_parent
    return run_id(job.tenant, named or trace_id or execution_id)


def run_id(tenant: str | None, name: str) -> str:
    """The id of a tenant's run: two tenants may have tasks, and sessions, of one name."""
    return name if tenant is None else f"{tenant}/{name}"
