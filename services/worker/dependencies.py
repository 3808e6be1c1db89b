"""Jobs that start only when others have succeeded (`depends_on`). While they wait, they hold no slot."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from functools import partial

import structlog

from breakwater.calls.assignment import Assignment, Checkpoint, Deferred, JobEnd
from breakwater.jobs.contract.current_jobs import JobWait
from breakwater.jobs.contract.execution import ErrorInfo
from breakwater.jobs.rules.plans import Dependency, dependency_failure, look_again_in
from breakwater.jobs.store.accepted import AcceptedJobs, JobStatus
from breakwater.jobs.store.records import stored_result
from breakwater.kernel.nats.delivery import wake_early
from breakwater.kernel.nats.errors import BusUnavailableError, PublishRefusedError
from breakwater.kernel.redis.connection import StateUnavailableError
from breakwater.redaction.rules.redact import cut
from breakwater.services.worker.context import WorkerContext
from breakwater.services.worker.progress import ProgressReporter

MAX_NAMES = 300
"""The most characters of the names of jobs that one waits for, for those who look at it."""


class Dependencies:
    """The dependencies of one job."""

    def __init__(self, worker: WorkerContext, job: Assignment, progress: ProgressReporter) -> None:
        self._worker = worker
        self._job = job
        self._progress = progress
        self._tenant_and_owner = (job.job.tenant, job.owner)
        self._written_ids = dict(zip(job.ids.dependencies, job.job.depends_on, strict=True))
        """The ids by which the job names the executions that it depends on."""
        self._retry = worker.outages.retry_while_unavailable

    async def settle(self, checkpoint: Checkpoint) -> JobEnd | Deferred | None:
        """Ends the job without a call, or defers it; returns None if it may start."""
        statuses = await self._look()
        open_ids = [execution_id for execution_id, status in statuses.items() if status != "succeeded"]
        if not open_ids:
            return None
        worker = self._worker
        job = self._job
        waited_s = (worker.now() - job.delivery.queued_at).total_seconds()
        max_wait_s = job.job.total_timeout_s or job.agent.total_timeout_s
        problem = dependency_failure(
            {self._written_ids[execution_id]: status for execution_id, status in statuses.items()}, waited_s, max_wait_s
        )
        if problem is None:
            # From now on, the end of each dependency wakes this job.
            wait_ms = round(max(max_wait_s - waited_s, 1.0) * 1000)
            unknown_waits = {open_id: wait_ms for open_id in open_ids if statuses[open_id] == "unknown"}
            known_ids = [open_id for open_id in open_ids if open_id not in unknown_waits]
            owner = job.caller or job.job.tenant or ""
            register = partial(
                worker.executions.wait_for, known_ids, job.execution_id, unknown=unknown_waits, owner=owner
            )
            await self._retry(register)
            problem = await self._deadlock(open_ids)
        if problem is not None:
            error = ErrorInfo(kind="dependency_failed", class_="DependencyFailedError", message=problem)
            return JobEnd(checkpoint, None, "dependency_failed", error)
        open_names = ", ".join(self._written_ids[execution_id] for execution_id in open_ids)
        await self._progress.report("waiting", detail=f"depends on {open_names}")
        delay_s = look_again_in(waited_s)
        if "unknown" in statuses.values():
            delay_s = min(delay_s, max(max_wait_s - waited_s, 0.1))
        now = worker.now()
        due = now + timedelta(seconds=delay_s)
        wait = JobWait(kind="dependency", message=f"it depends on {cut(open_names, MAX_NAMES)}", since=now, until=due)
        return Deferred(due, self.have_changed, wait)

    async def have_changed(self) -> bool:
        """Returns True if a dependency has ended meanwhile, perhaps before this job was registered to be woken."""
        statuses = await self._look()
        distinct_statuses = set(statuses.values())
        return distinct_statuses == {"succeeded"} or not distinct_statuses.isdisjoint({"dead_lettered", "cancelled"})

    async def _look(self) -> dict[str, Dependency]:
        ids = self._job.ids.dependencies
        statuses = await asyncio.gather(*(self._retry(partial(self._status, execution_id)) for execution_id in ids))
        return dict(zip(ids, statuses, strict=True))

    async def _status(self, execution_id: str) -> Dependency:
        result = await stored_result(self._worker.lookup.as_stored(), execution_id)
        if result is not None:
            # The outcome of another owner's job is not disclosed.
            return result.status if self._is_ours(result.tenant, result.owner) and not result.dry_run else "unknown"
        status = await AcceptedJobs(self._worker.redis).status(execution_id, just_now=False)
        return "undecided" if status is not None and self._is_visible(execution_id, status) else "unknown"

    def _is_visible(self, execution_id: str, status: JobStatus) -> bool:
        if status.is_owner_known:
            return self._is_ours(status.tenant, status.owner)
        # Of a job that Redis has lost, only its id is known. A hash was made with the scope of this job.
        is_hashed = self._written_ids[execution_id] != execution_id
        return is_hashed or status.owner == self._job.owner

    def _is_ours(self, tenant: str | None, owner: str | None) -> bool:
        return (tenant, owner) == self._tenant_and_owner

    async def _deadlock(self, open_ids: list[str]) -> str | None:
        """Describes a deadlock: a dependency waits for this job, directly or through others. None if there is none."""
        executions = self._worker.executions
        own_id = self._job.execution_id
        visited = {own_id}
        level = {own_id}
        while level:
            level = await self._retry(partial(executions.waiting_for, level)) - visited
            waiting_ids = sorted(level.intersection(open_ids))
            if waiting_ids or own_id in open_ids:
                first_id = waiting_ids[0] if waiting_ids else own_id
                name = self._written_ids[first_id]
                return f"the job {name!r}, which this one depends on, depends on this one in turn"
            visited |= level
        return None


async def wake(worker: WorkerContext, waiting: tuple[str, ...]) -> None:
    """Returns jobs to their queues that waited for a job that has ended."""
    parked: dict[str, int] = {}
    outcomes = await asyncio.gather(
        *(wake_early(worker.publisher, worker.lookup, execution_id) for execution_id in waiting), return_exceptions=True
    )
    for execution_id, outcome in zip(waiting, outcomes, strict=True):
        if isinstance(outcome, int):
            parked[execution_id] = outcome
        elif isinstance(outcome, BusUnavailableError | PublishRefusedError):
            # Waiting jobs also look again by themselves.
            structlog.get_logger().info("waiting_jobs_not_woken", error=str(outcome))
        elif isinstance(outcome, BaseException):
            raise outcome
    if parked:
        with suppress(StateUnavailableError):  # until they run, they may be listed as parked and as queued
            await worker.executions.note_woken(parked)
