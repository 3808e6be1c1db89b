"""The handling of a delivered job, up to its one terminal record: parse, claim, attempt, conclude, acknowledge."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from time import monotonic

import structlog

from breakwater.calls.assignment import Assignment, Checkpoint, Deferred, JobEnd
from breakwater.calls.span_attributes import execution_attributes
from breakwater.config import Agent
from breakwater.jobs.contract.current_jobs import JobWait
from breakwater.jobs.contract.execution import ErrorInfo, Result
from breakwater.jobs.rules.runs import run_id
from breakwater.jobs.store.executions import Claimed, ClaimLostError, Conflict, MaybeHeld, SavedProgress, Taken
from breakwater.jobs.store.records import stored_result
from breakwater.kernel.nats.delivery import Delivery, park
from breakwater.kernel.nats.errors import PublishRefusedError
from breakwater.kernel.nats.subjects import PROGRAM, Header
from breakwater.kernel.redis.connection import StateUnavailableError
from breakwater.kernel.security.encryption import DecryptionError, may_be_encrypted
from breakwater.kernel.telemetry import tracing
from breakwater.services.worker import crashes
from breakwater.services.worker.admission import gates_of
from breakwater.services.worker.answer_sources import cache_for, find_answer
from breakwater.services.worker.attempt_record import recorded_attempt
from breakwater.services.worker.call_cost import cost_on_requested_model
from breakwater.services.worker.conclude import answer_from_decision, end_without_run, finish, refuse_id
from breakwater.services.worker.context import WorkerContext
from breakwater.services.worker.crashes import CrashedEachTimeError, Crashes
from breakwater.services.worker.dependencies import Dependencies
from breakwater.services.worker.dry_run import dry_run
from breakwater.services.worker.held_jobs import EarlierMessages
from breakwater.services.worker.large_jobs import LargeJobs
from breakwater.services.worker.parsing import JobReader
from breakwater.services.worker.plans import reach_stage
from breakwater.services.worker.progress import ProgressReporter
from breakwater.services.worker.references import with_references
from breakwater.services.worker.results import result_of
from breakwater.services.worker.spans import job_ended

FULL_DELAY_S = 0.5
"""The wait of a job without a slot in JOBS, if PARKED is full."""

LONG_QUEUE = 1_000
"""With so many jobs in the queue of an agent that has several callers, further jobs of the same key wait on PARKED,
even if the key is alone now: those in the queue are taken out of another caller's way in about a second."""

HELD_DELAY_S = 0.25
"""The time between two looks whether an earlier message of a job that no worker has begun is still held."""


class JobHandler:
    """Handles the jobs of one agent."""

    def __init__(self, worker: WorkerContext, agent_name: str, agent: Agent) -> None:
        self._worker = worker
        self._agent_name = agent_name
        self._agent = agent
        self._reader = JobReader(worker, agent_name, agent)
        self._large_jobs = LargeJobs(worker, self._reader)
        self._crashes = Crashes(worker, agent_name, agent, self._reader)
        self.earlier_messages = EarlierMessages(worker, agent_name)
        self._gates = gates_of(worker)

    async def handle(self, delivery: Delivery) -> None:
        """Handles one delivery: acknowledges it once the record is stored, or returns it for redelivery."""
        worker = self._worker
        job: Assignment | None = None
        # The number of deliveries includes waits, but nothing else reveals a message that always crashes its worker.
        suspect = delivery.deliveries > crashes.MAX_CRASHES
        try:
            worker.leases.deliveries.add(delivery)
            try:
                if suspect and await self._crashes.count(delivery) > crashes.MAX_CRASHES:
                    raise CrashedEachTimeError
                if delivery.body is None:
                    # The job is plain text from here on; its events are encrypted again.
                    if may_be_encrypted(delivery.data):
                        delivery.data = worker.cipher.decrypt_document(delivery.data)
                    job = self._reader.read(delivery)
                    await self._answer_or_run(job)
                else:
                    async with worker.bodies.budget.taking(delivery.body.job_bytes):
                        job = await self._large_jobs.read(delivery, delivery.body)
                        if job is not None:
                            await self._answer_or_run(job)
            finally:
                worker.leases.deliveries.discard(delivery)
            if suspect:
                await self._crashes.count(delivery, -1)
        except ClaimLostError:
            structlog.get_logger().info("job_taken_over", agent=self._agent_name, sequence=delivery.sequence)
        except DecryptionError as error:
            await self._crashes.repeat_or_end(delivery, job, error)
        except asyncio.CancelledError:
            # The process stops: another worker may continue immediately.
            await delivery.retry_in(0)
            raise
        except Exception as error:
            place = {"sequence": delivery.sequence, "deliveries": delivery.deliveries}
            log = structlog.get_logger()
            log.exception("job_handling_failed", agent=self._agent_name, **place)
            await self._crashes.repeat_or_end(delivery, job, error)

    async def _answer_or_run(self, job: Assignment) -> None:
        """Answers a job that is already decided; claims and runs any other."""
        worker = self._worker
        delivery = job.delivery
        slots = worker.slots[self._agent_name]
        had_turn = slots.arrived(job.execution_id) or delivery.turn is not None
        if delivery.is_unstarted and not (job.problem or job.job.dry_run):
            if delivery.waiting > LONG_QUEUE and slots.is_shared(worker.slots.clock()):
                await worker.turns.announce(self._agent_name, job.turn.of_key)
            # Before all else: what waits behind it in the queue may be another caller's.
            # Some worker had a free slot for one whose turn it is, and may have another one's job in its place.
            if not had_turn and (slots.waiting.has(job.turn) or not self._has_room(job)):
                await self._wait_for_turn(job)
                return
            # No await since then: otherwise, concurrent jobs would all see the same free slot.
            with worker.slots.taking(self._agent_name, job.turn):
                await self._claim_and_run(job, has_slot=True)
        else:
            await self._claim_and_run(job, has_slot=False)

    def _has_room(self, job: Assignment) -> bool:
        return self._worker.slots.has_room(self._agent_name, self._agent.concurrency, job.turn)

    async def _claim_and_run(self, job: Assignment, *, has_slot: bool) -> None:
        worker = self._worker
        delivery = job.delivery
        maybe_seen = delivery.deliveries > 1 or not delivery.is_only_message or worker.leases.may_be_late()
        # One that comes back from its wait for a slot is hardly ever decided, and looked for again under the claim.
        is_back = delivery.is_unstarted and delivery.turn is not None
        if maybe_seen and not is_back and (decided_result := await self._find_result(job)) is not None:
            await answer_from_decision(worker, job, decided_result)
            return
        job = await with_references(worker, job)
        requested_at = monotonic()
        match await self._request_claim(job):
            case Conflict():
                await refuse_id(worker, job)
            case Taken(for_ms):
                # An earlier delivery with a live worker, or another message of the same job, holds the claim. Once the
                # job is decided, this message is answered from the record.
                await delivery.retry_in(min(0.25 * 2 ** min(delivery.deliveries, 5), 5.0, for_ms / 1000 + 0.05))
            case Claimed() as claimed:
                with worker.leases.renewing(job.claim, job.lease, requested_at):
                    await self._run_claimed(job, claimed, maybe_seen=maybe_seen, has_slot=has_slot)

    async def _request_claim(self, job: Assignment) -> Claimed | Taken | Conflict:
        """Claims a job, unless an earlier message of it is held: Redis may have lost the claim of its holder."""
        worker = self._worker
        retry = worker.outages.retry_while_unavailable
        delivery = job.delivery
        ids = job.ids
        tenant = job.job.tenant
        # A job without a guard starts no task.
        task_key = ids.task_key or (ids.execution_id if self._agent.guard is None else None)
        # Children find their parent's run by its task, so Redis only needs a run that differs from it.
        stored_run_id = None if job.run_id == run_id(tenant, ids.own_task_key) else job.run_id
        for_children = {
            "tenant": tenant,
            "task_key": task_key,
            "task_id": None if ids.task_id == ids.task_key else ids.task_id,
            "owner": job.owner,
            "run_id": stored_run_id,
        }
        job.lease.restore = partial(worker.executions.restore, job.claim, digest=job.digest, **for_children)
        request_claim = partial(
            worker.executions.claim,
            job.claim,
            job.digest,
            **for_children,
            accepted_s=delivery.queued_at.timestamp(),
            redelivered=not delivery.is_unstarted,
            delivered_before=delivery.deliveries > 1,
        )
        checked_since_ms = None if delivery.is_only_message else self.earlier_messages.checked_since_ms(job)
        while True:
            claimed = await retry(partial(request_claim, checked_since_ms=checked_since_ms))
            if not isinstance(claimed, MaybeHeld):
                return claimed
            if not await retry(partial(self.earlier_messages.has_of, job, claimed.kept_since_ms)):
                checked_since_ms = claimed.kept_since_ms
            elif delivery.is_unstarted:
                # Not returned to the queue: its next delivery would look like that of a job that a worker has begun.
                await asyncio.sleep(HELD_DELAY_S)
            else:
                return Taken(worker.executions.liveness.grace_ms)

    async def _run_claimed(self, job: Assignment, claimed: Claimed, *, maybe_seen: bool, has_slot: bool) -> None:
        worker = self._worker
        job.lease.has_children = claimed.has_children
        job.lease.progress = lambda: SavedProgress(claimed.checkpoint)
        if claimed.cancels:
            job.lease.cancel.receive(claimed.cancels)
        progress = ProgressReporter(worker, job)
        if job.delivery.is_unstarted:
            await progress.queued()
        try:
            # Look for the result again under the claim: another worker may just have decided the job.
            maybe_decided = maybe_seen or claimed.checkpoint is not None or claimed.cancels
            if maybe_decided and (decided_result := await self._find_result(job)) is not None:
                await answer_from_decision(worker, job, decided_result)
            elif job.problem:
                message = worker.redactor.text(job.problem)
                user_message = "The request was not valid and was not run."
                error = ErrorInfo(kind="invalid", class_="InvalidJobError", message=message, user_message=user_message)
                await end_without_run(worker, job, "invalid", error)
            elif job.job.dry_run:
                plan = await dry_run(worker, job, self._gates)
                await finish(worker, job, result_of(job, plan, worker.now(), worker.config_version))
            elif has_slot:
                await self._run(job, claimed, progress)
            elif claimed.checkpoint is None and job.lease.cancel.cancellation is None and not self._has_room(job):
                if await self._release(job):
                    await self._wait_for_turn(job)
            else:
                with worker.slots.taking(self._agent_name, job.turn):
                    await self._run(job, claimed, progress)
        except BaseException:
            # Otherwise, the next claim would wait for the lease to expire.
            with suppress(StateUnavailableError):
                await worker.leases.release(job.claim)
            raise

    async def _run(self, job: Assignment, claimed: Claimed, progress: ProgressReporter) -> None:
        """Runs a claimed job."""
        worker = self._worker
        span = tracing.begin(
            f"invoke_agent {self._agent_name}",
            parent=job.delivery.headers.get(Header.TRACEPARENT),
            attributes=lambda: execution_attributes(
                agent=self._agent_name, execution_id=job.execution_id, task_id=job.ids.task_id
            ),
        )
        if span.traceparent is not None and span.traceparent != job.traceparent:
            trace_id = tracing.sampled_trace_id(span.traceparent)
            job = replace(job, traceparent=span.traceparent, trace_id=trace_id)
        checkpoint, resumed = await self._checkpoint(job, claimed)
        result: Result | None = None
        worker.metrics.begin_job(self._agent_name)
        try:
            result = await self._decide(job, checkpoint, progress, resumed=resumed)
        finally:
            worker.metrics.end_job(self._agent_name)
            error = None if result is None or result.error is None else result.error.class_
            span.end(error=error, attributes={} if result is None else partial(job_ended, worker, job, result))

    async def _checkpoint(self, job: Assignment, claimed: Claimed) -> tuple[Checkpoint, bool]:
        """Returns the checkpoint of a job that starts or resumes, and True if it may have made calls before."""
        worker = self._worker
        delivery = job.delivery
        if job.job.depends_on and (job.submitted_by is None or job.submitted_by.startswith(PROGRAM)):
            # A job over NATS is not in its plan yet, and may be parked before its dispatch.
            await reach_stage(worker, job, "pending")
        if claimed.checkpoint is not None:
            return Checkpoint.model_validate_json(claimed.checkpoint), True
        now = job.now()
        checkpoint = Checkpoint(
            dispatched_at=now,
            deadline=now + timedelta(seconds=job.job.total_timeout_s or self._agent.total_timeout_s),
            config_version=worker.config_version,
            may_have_called=claimed.incomplete,
        )
        resumed = not delivery.is_first
        if resumed and (job.job.depends_on or delivery.was_parked):
            # The job may have been parked before its first call, for a slot or for a dependency.
            resumed = await recorded_attempt(worker, job, 1) is not None
        return checkpoint, resumed

    async def _decide(
        self, job: Assignment, checkpoint: Checkpoint, progress: ProgressReporter, *, resumed: bool
    ) -> Result | None:
        """Runs a job and decides it. Returns None for a job that was parked."""
        worker = self._worker
        lease = job.lease
        retry = worker.outages.retry_while_unavailable
        cache = cache_for(worker, job)
        lease.on_renew = None if cache is None else cache.renew
        try:
            outcome: JobEnd | Deferred | None = None
            if job.job.depends_on and not resumed and lease.cancel.cancellation is None:
                outcome = await Dependencies(worker, job, progress).settle(checkpoint)
            if outcome is None:
                if job.job.plan_id is not None:
                    await reach_stage(worker, job, "running")
                outcome = await find_answer(worker, job, checkpoint, cache, progress, self._gates, resumed=resumed)
            if isinstance(outcome, Deferred):
                await self._park(job, outcome)
                return None
            # A worker that lost its claim during the call must not decide the job.
            await retry(partial(worker.leases.confirm, job.claim))
            result = result_of(
                job,
                outcome,
                job.now(),
                worker.config_version,
                requested_model_cost=cost_on_requested_model(worker, job, outcome),
                trace_id=job.trace_id,
            )
            # Count the job before it is decided: the task's next job may arrive as soon as this one is answered.
            if counted := job.ids.task_key is not None or lease.has_children:
                result = await retry(partial(worker.guards.count_job, job, result))
            if cache is not None and outcome.cached_from is None:
                # Cache the answer before it is sent: an identical job may arrive right after that.
                await cache.keep(outcome, job.execution_id)
            result = await finish(worker, job, result, counted=counted, progress=progress)
        finally:
            lease.on_renew = None
            if cache is not None:
                await cache.leave()
        worker.metrics.count_job(result, tracing.recorded_trace_id(job.traceparent))
        return result

    async def _release(self, job: Assignment, wait: JobWait | None = None) -> bool:
        """Releases the claim on a job that is to be parked. Returns False if it is to be cancelled instead."""
        # It returns as another message, which should not have to wait for the lease to expire.
        claim_state = await self._worker.outages.retry_while_unavailable(
            partial(self._worker.leases.release, job.claim, wait)
        )
        cancel = job.lease.cancel
        cancel.receive(() if claim_state is None else claim_state.cancels)
        if cancel.cancellation is not None:
            await job.delivery.retry_in(0)
        return cancel.cancellation is None

    async def _wait_for_turn(self, job: Assignment) -> None:
        """Parks a job without a claim, whose caller has its share of the slots, until its turn."""
        worker = self._worker
        await worker.turns.announce(self._agent_name, job.turn)
        if not await self._store_parked(job, worker.now(), turn=job.turn.text):
            return
        with suppress(StateUnavailableError):  # else it is cancelled when its turn comes
            # Whoever cancels it from now on finds it on PARKED.
            job.lease.cancel.receive(await worker.executions.cancels_of(job.execution_id))
        if job.lease.cancel.cancellation is None:
            await worker.publisher.acknowledge(job.delivery.ack_subject)
        else:
            await job.delivery.retry_in(0)

    async def _park(self, job: Assignment, deferred: Deferred) -> None:
        if not await self._release(job, deferred.wait) or not await self._store_parked(job, deferred.due):
            return
        delivery = job.delivery
        if job.lease.cancel.cancellation is None and (deferred.over is None or not await deferred.over()):
            await self._worker.publisher.acknowledge(delivery.ack_subject)
        else:
            # The event that should wake the job may have come before the job was parked.
            await delivery.retry_in(0)

    async def _store_parked(self, job: Assignment, due: datetime, *, turn: str | None = None) -> bool:
        worker = self._worker
        delivery = job.delivery
        names = {"agent": self._agent_name, "execution_id": job.ids.execution_id, "job_id": job.ids.job_id}
        try:
            await worker.outages.retry_while_unavailable(
                lambda: park(worker.publisher, delivery, **names, due=due, turn=turn)
            )
        except PublishRefusedError as error:
            # As a fallback, the job waits in JOBS, where it occupies a slot of the consumer.
            structlog.get_logger().warning("job_not_parked", execution_id=job.ids.execution_id, error=str(error))
            least_s = 0.0 if turn is None else FULL_DELAY_S
            await delivery.retry_in(max(least_s, (due - worker.now()).total_seconds()))
            return False
        worker.metrics.count_parked_job(self._agent_name)
        return True

    async def _find_result(self, job: Assignment) -> Result | None:
        find = partial(stored_result, self._worker.lookup, job.execution_id, self._agent_name)
        return await self._worker.outages.retry_while_unavailable(find)
