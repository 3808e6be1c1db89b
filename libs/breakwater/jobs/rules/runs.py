"""Runs: the executions that belong together, as the calls of one agent loop do."""

from __future__ import annotations

from breakwater.jobs.rules.ids import JobIds


def run_of(ids: JobIds, tenant: str | None, *, trace_id: str | None = None, run_of_parent: str | None = None) -> str:
    """Returns the id of a job's run, which its record keeps.

    The run is the first of these that the job has: its task, its session, the run of its parent, its trace. A job with
    none of them is its own run. So a child is in its parent's run unless it names a task or a session.

    Args:
        ids: the ids of the job.
        tenant: of the job.
        trace_id: the trace of the W3C trace context that came with the job, hashed with the scope of its owner.
        run_of_parent: the run of the execution that the job names as its parent.
    """
    group = ids.task_key or ids.session_key
    if group is None and run_of_parent is not None:
        return run_of_parent
    return run_id(tenant, group or trace_id or ids.execution_id)


def run_id(tenant: str | None, name: str) -> str:
    """Returns the id of a tenant's run. Different tenants may give tasks and sessions the same name."""
    return name if tenant is None else f"{tenant}/{name}"
