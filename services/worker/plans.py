"""A job's part in the state of its plan."""

from __future__ import annotations

from functools import partial

from breakwater.calls.assignment import Assignment
from breakwater.jobs.contract.execution import Reason
from breakwater.jobs.plan_changes import PlanName, PlanSource
from breakwater.jobs.store.plans import NotedJob, Stage
from breakwater.kernel.nats.subjects import Header
from breakwater.kernel.telemetry import tracing
from breakwater.services.worker.context import WorkerContext


async def reach_stage(worker: WorkerContext, job: Assignment, stage: Stage, reason: Reason | None = None) -> None:
    """Records that a job of a plan has reached a stage. Repeating it is safe.

    `reason` says why the job ended without an answer.
    """
    ids = job.ids
    plan_id = job.job.plan_id
    tenant = job.job.tenant
    if plan_id is None or ids.plan_key is None or job.job.dry_run:
        return
    plan_job = NotedJob(job.delivery.queued_at, job.agent_name, tenant, job.owner, ids.job_id, ids.dependencies)
    stage_words = {"pending": "was accepted", "running": "was dispatched"}
    reason_text = "" if reason is None else f": {reason}"
    description = f"the job {ids.job_id!r} {stage_words.get(stage, f'ended {stage}{reason_text}')}"
    trace_id = tracing.trace_id_of(job.delivery.headers.get(Header.TRACEPARENT.value))
    plan = PlanName(ids.plan_key, plan_id)
    source = PlanSource(tenant, job.owner, trace_id, ids.execution_id, ids.job_id)
    change = partial(worker.plans.change, plan, stage, {ids.execution_id: plan_job}, description, source)
    await worker.outages.retry_while_unavailable(change)
