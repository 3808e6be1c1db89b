"""Runs: the executions that belong together, as the calls of one agent loop do."""

from __future__ import annotations

from breakwater.jobs.contract.job import Job


def run_of(job: Job, execution_id: str, *, trace_id: str | None = None, run_of_parent: str | None = None) -> str:
    """Return the id of a job's run, which its record keeps.

    The run is the first of these that the job has: its task, its session, the run of its parent, its trace. A job with
    none of them is its own run. So a child is in its parent's run unless it names a task or a session.

    Args:
        job: the job, with scoped ids and its own task.
        execution_id: the job's execution.
        trace_id: the trace of the W3C trace context that came with the job, scoped to its owner.
        run_of_parent: the run of the execution that the job names as its parent.
    """
    group = job.task_id or job.session_id
    if group is None and run_of_parent is not None:
        return run_of_parent
    return run_id(job.tenant, group or trace_id or execution_id)


def run_id(tenant: str | None, name: str) -> str:
    """Return the id of a tenant's run. Different tenants may give tasks and sessions the same name."""
    return name if tenant is None else f"{tenant}/{name}"
