"""The executions that a job names: the one that it is part of, and those that it depends on."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from breakwater.calls.assignment import Assignment
from breakwater.jobs.rules.ids import is_made_here, key_of
from breakwater.jobs.rules.runs import run_id, run_of
from breakwater.jobs.store.accepted import AcceptedJobs
from breakwater.jobs.store.records import stored_result
from breakwater.kernel.nats.subjects import PROGRAM
from breakwater.limits.settings import GuardRules
from breakwater.services.worker.context import WorkerContext


async def with_references(worker: WorkerContext, job: Assignment) -> Assignment:
    """Looks up the executions that a job names, and adds its parent's task if it names none."""
    if job.ids.parent is None and not job.ids.dependencies:
        return job
    return await _with_parents_task(worker, await _with_execution_ids(worker, job))


async def _with_execution_ids(worker: WorkerContext, job: Assignment) -> Assignment:
    """Resolves references to the sender's jobs by execution ids. A job's own id may have the same form."""
    ids = job.ids
    written_ids = (job.job.parent_execution_id, *job.job.depends_on)
    if job.scope is None or not any(map(is_made_here, filter(None, written_ids))):
        return job
    resolved: list[str | None] = []
    for written_id, execution_id in zip(written_ids, (ids.parent, *ids.dependencies), strict=True):
        may_differ = written_id is not None and execution_id != written_id and is_made_here(written_id)
        is_of_sender = partial(_is_of_sender, worker, str(written_id), job)
        if may_differ and await worker.outages.retry_while_unavailable(is_of_sender):
            resolved.append(written_id)
        else:
            resolved.append(execution_id)
    parent, *dependencies = resolved
    return replace(job, ids=replace(ids, parent=parent, dependencies=tuple(filter(None, dependencies))))


async def _is_of_sender(worker: WorkerContext, execution_id: str, job: Assignment) -> bool:
    """Returns True if an execution belongs to the owner of a job, or for a program of a tenant to the tenant."""
    # The note of an accepted job is deleted soon after the job ends, so look for a result first.
    referred = await stored_result(worker.lookup.as_stored(), execution_id)
    if referred is None:
        referred = await AcceptedJobs(worker.redis).status(execution_id, just_now=False)
        if referred is None or not referred.is_owner_known:
            return False
    if referred.tenant != job.job.tenant:
        return False
    is_of_tenants_program = job.owner is None and (job.scope or "").startswith(PROGRAM)
    return is_of_tenants_program or referred.owner == job.owner


async def _with_parents_task(worker: WorkerContext, job: Assignment) -> Assignment:
    ids = job.ids
    if ids.parent is None or ids.task_key is not None:
        return job

    def guard_of(agent_name: str) -> GuardRules | None:
        agent = worker.config.agents.get(agent_name)
        return None if agent is None else agent.guard

    tenant = job.job.tenant
    others = "" if job.owner is None else key_of(job.scope, ids.parent)
    task = await worker.guards.task_of_parent(job.job, ids.parent, job.owner, guard_of, others=others)
    run = run_of(ids, tenant, run_of_parent=task.run_id or run_id(tenant, task.key))
    task_id = task.name or job.job.parent_execution_id
    return replace(job, ids=replace(ids, task_id=task_id, task_key=task.key), run_id=run)
