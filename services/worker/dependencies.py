"""Jobs that start only when others have succeeded (`depends_on`). While they wait, they hold no slot."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from functools import partial

import structlog

from breakwater.calls.assignment import Assignment, Checkpoint, Deferred, Finished
from breakwater.jobs.contract.execution import ErrorInfo
from breakwater.jobs.rules.ownership import shown
from breakwater.jobs.rules.plans import Dependency, dependency_failure, look_again_in
from breakwater.jobs.store.accepted import Accepted
from breakwater.jobs.store.records import decided
from breakwater.kernel.nats.delivery import wake_early
from breakwater.kernel.nats.errors import BusUnavailableError, PublishRefusedError
from services.worker.context import WorkerContext
from services.worker.parsing import JobDelivery
from services.worker.progress import ProgressReporter


class Dependencies:
    """The dependencies of one job."""

    def __init__(
        self, worker: WorkerContext, received: JobDelivery, job: Assignment, progress: ProgressReporter
    ) -> None:
        self._worker = worker
        self._received = received
        self._job = job
        self._progress = progress
        self._whose = (job.job.tenant, received.owner)
        self._again = worker.outages.retry_while_unavailable

    async def settle(self, at: Checkpoint) -> Finished | Deferred | None:
        """The end of the job without a call, or its next wait; None where it may start."""
        found = await self._look()
        open_ones = [job_id for job_id, status in found.items() if status != "succeeded"]
        if not open_ones:
            return None
        worker, job = self._worker, self._job
        waited_s = (worker.now() - self._received.delivery.queued_at).total_seconds()
        at_most_s = job.job.total_timeout_s or job.agent.total_timeout_s
        why = dependency_failure({shown(one): status for one, status in found.items()}, waited_s, at_most_s)
        if why is None:
            # The end of each of them wakes this job from now on.
            wait_ms = round(max(at_most_s - waited_s, 1.0) * 1000)
            unknown = {one: wait_ms for one in open_ones if found[one] == "unknown"}
            known = [one for one in open_ones if one not in unknown]
            owner = self._received.owner or job.caller or job.job.tenant or ""
            note = partial(worker.executions.wait_for, known, job.execution_id, unknown=unknown, owner=owner)
            await self._again(note)
            why = await self._circle(open_ones)
        if why is not None:
            error = ErrorInfo(kind="dependency_failed", class_="DependencyFailedError", message=why)
            return Finished(at, None, None, "dependency_failed", error)
        await self._progress.report("waiting", detail=f"depends on {', '.join(map(shown, open_ones))}")
        delay_s = look_again_in(waited_s)
        if "unknown" in found.values():
            delay_s = min(delay_s, max(at_most_s - waited_s, 0.1))
        return Deferred(worker.now() + timedelta(seconds=delay_s), self.have_changed)

    async def have_changed(self) -> bool:
        """True if one of them has ended since: its worker may have looked for this job before it slept."""
        found = await self._look()
        values = set(found.values())
        return values == {"succeeded"} or not values.isdisjoint({"dead_lettered", "cancelled"})

    async def _look(self) -> dict[str, Dependency]:
        ids = self._job.job.depends_on
        found = await asyncio.gather(*(self._again(partial(self._status, job_id)) for job_id in ids))
        return dict(zip(ids, found, strict=True))

    async def _status(self, job_id: str) -> Dependency:
        found = await decided(self._worker.lookup.as_stored(), job_id)
        if found is not None:
            # The outcome of another owner's job is not shown.
            return found.status if self._is_ours(found.tenant, found.owner) and not found.dry_run else "unknown"
        status = await Accepted(self._worker.redis).status(job_id, just_now=False)
        known = status is not None and self._is_ours(
            # Of one that came over NATS nothing is known but that it is under way; and whose it is, if its id says so.
            self._job.job.tenant if status.agent is None else status.tenant,
            self._received.owner if status.agent is None and "@" in job_id else status.owner,
        )
        return "undecided" if known else "unknown"

    def _is_ours(self, tenant: str | None, owner: str | None) -> bool:
        return (tenant, owner) == self._whose

    async def _circle(self, open_ones: list[str]) -> str | None:
        """Reason for a wait without an end: a dependency waits for this job, through others perhaps."""
        executions, own = self._worker.executions, self._job.execution_id
        seen, level = {own}, {own}
        while level:
            level = await self._again(partial(executions.waiting_for, level)) - seen
            if (both := sorted(level.intersection(open_ones))) or own in open_ones:
                return f"the job {shown((both or [own])[0])!r}, which this one depends on, depends on this one in turn"
            seen |= level
        return None


async def wake(worker: WorkerContext, waiting: tuple[str, ...]) -> None:
    """Puts jobs back into their queues that waited for one that has ended."""
    for one in await asyncio.gather(
        *(wake_early(worker.publisher, worker.lookup, job_id) for job_id in waiting), return_exceptions=True
    ):
        if isinstance(one, BusUnavailableError | PublishRefusedError):
            # They look again by themselves.
            structlog.get_logger().info("waiting_jobs_not_woken", error=str(one))
        elif isinstance(one, BaseException):
            raise one
