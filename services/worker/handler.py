"""The handling of a delivered job, up to its one terminal record: parse, claim, attempt, conclude, acknowledge."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from time import monotonic

import structlog

from breakwater.calls.assignment import Assignment, Checkpoint, Deferred, JobEnd, Parameters
from breakwater.calls.providers.base import Answer
from breakwater.calls.span_attributes import execution_attributes
from breakwater.config import Agent
from breakwater.dialects.rules import params_of
from breakwater.dialects.rules.embeddings import inputs_of
from breakwater.jobs.contract.execution import ErrorInfo, Result
from breakwater.jobs.contract.job import Job
from breakwater.jobs.held_claims import ClaimLease, JobCancelledError
from breakwater.jobs.rules.ids import is_made_here, key_of
from breakwater.jobs.rules.runs import run_id, run_of
from breakwater.jobs.store.accepted import Accepted
from breakwater.jobs.store.executions import Claim, Claimed, ClaimLostError, Conflict, SavedProgress, Taken
from breakwater.jobs.store.records import decided
from breakwater.kernel.nats.delivery import Delivery, park
from breakwater.kernel.nats.errors import PublishRefusedError
from breakwater.kernel.nats.subjects import PROGRAM, Header
from breakwater.kernel.redis.connection import StateUnavailableError
from breakwater.kernel.security.encryption import DecryptionError, may_be_encrypted
from breakwater.kernel.telemetry import tracing
from breakwater.limits.rules.job_rules import JobRules
from breakwater.limits.rules.ledger import cost_tags
from breakwater.limits.settings import GuardRules
from services.worker import crashes
from services.worker.admission import gates_of
from services.worker.attempt_record import recorded_attempt
from services.worker.attempts import Attempts
from services.worker.conclude import answer_from_decision, cancelled, conclude, end_without_run, finish, refuse_id
from services.worker.context import WorkerContext
from services.worker.crashes import CrashedEachTimeError, Crashes
from services.worker.dependencies import Dependencies
from services.worker.dry_run import dry_run
from services.worker.embeddings_batches import EmbeddingsBatches
from services.worker.embeddings_cache import EmbeddingsCache
from services.worker.parsing import JobDelivery, read_job
from services.worker.plans import reach_stage
from services.worker.progress import ProgressReporter
from services.worker.response_cache import ResponseCache
from services.worker.spans import job_ended

AnyCache = ResponseCache | EmbeddingsCache


class JobHandler:
    """Handles the jobs of one agent."""

    def __init__(self, worker: WorkerContext, agent_name: str, agent: Agent) -> None:
        self._worker = worker
        self._agent_name = agent_name
        self._agent = agent
        self._crashes = Crashes(worker, agent_name, agent)
        self._gates = gates_of(worker)
        self._output_guard = worker.output_guards.get(agent_name)
        self._parameters = Parameters.of(agent, {}, self._output_guard)
        """The parameters of a job that sets none."""
        embedding_guard = None if agent.guard is None else agent.guard.for_embeddings()
        self._embedding_agent = agent.model_copy(update={"guard": embedding_guard})

    async def handle(self, delivery: Delivery) -> None:
        """Handles one delivery: acknowledges it once the record is stored, or returns it for redelivery."""
        worker = self._worker
        log = structlog.get_logger()
        received: JobDelivery | None = None
        # The number of deliveries includes waits, but nothing else reveals a message that always crashes its worker.
        suspect = delivery.deliveries > crashes.MAX_CRASHES
        try:
            worker.leases.deliveries.add(delivery)
            try:
                if suspect and await self._crashes.count(delivery) > crashes.MAX_CRASHES:
                    raise CrashedEachTimeError
                # The job is plain text from here on; its events are encrypted again.
                if may_be_encrypted(delivery.data):
                    delivery.data = worker.cipher.decrypt_document(delivery.data)
                received = read_job(
                    worker.config, self._agent_name, self._agent, delivery, worker.redactor, worker.cipher
                )
                await self._claim(received)
            finally:
                worker.leases.deliveries.discard(delivery)
            if suspect:
                await self._crashes.count(delivery, -1)
        except ClaimLostError:
            log.info("job_taken_over", agent=self._agent_name, sequence=delivery.sequence)
        except DecryptionError as error:
            try:
                await self._crashes.wait_for_key(delivery, error)
            except PublishRefusedError as refusal:
                await self._crashes.repeat_or_end(delivery, received, refusal)
        except asyncio.CancelledError:
            # The process stops: another worker may continue immediately.
            await delivery.retry_in(0)
            raise
        except Exception as error:
            place = {"sequence": delivery.sequence, "deliveries": delivery.deliveries}
            log.exception("job_handling_failed", agent=self._agent_name, **place)
            await self._crashes.repeat_or_end(delivery, received, error)

    async def _claim(self, received: JobDelivery) -> None:
        """Answers a job that is already decided; claims and runs any other."""
        worker = self._worker
        delivery = received.delivery
        maybe_seen = (
            delivery.deliveries > 1 or Header.UNIQUE_ID.value not in delivery.headers or worker.leases.may_be_late()
        )
        if maybe_seen and (decided_result := await self._find_result(received)) is not None:
            await answer_from_decision(worker, received, decided_result)
            return
        received = await self._with_references(received)
        claim = Claim.new(received.execution_id, worker.id)
        requested_at = monotonic()
        job = received.job
        ids = received.ids
        tenant = None if job is None else job.tenant
        # A job without a guard starts no task.
        task_key = ids.task_key or (ids.execution_id if self._agent.guard is None else None)
        # Children find their parent's run by its task, so Redis only needs a run that differs from it.
        stored_run_id = None if received.run_id == run_id(tenant, ids.own_task_key) else received.run_id
        claim_fields = {
            "tenant": tenant,
            "task_key": task_key,
            "task_id": None if ids.task_id == ids.task_key else ids.task_id,
            "owner": received.owner,
            "run_id": stored_run_id,
        }
        accepted_s = delivery.queued_at.timestamp()
        request_claim = partial(
            worker.executions.claim,
            claim,
            received.digest,
            **claim_fields,
            accepted_s=accepted_s,
            redelivered=not delivery.is_first,
            delivered_before=delivery.deliveries > 1,
        )

        async def restore(progress: SavedProgress, release: bool) -> bool:
            return await worker.executions.restore(claim, progress, received.digest, **claim_fields, release=release)

        match await worker.outages.retry_while_unavailable(request_claim):
            case Conflict():
                await refuse_id(worker, received)
                return
            case Taken(for_ms):
                # An earlier delivery with a live worker, or another message of the same job, holds the claim. Once the
                # job is decided, this message is answered from the record.
                await delivery.retry_in(min(0.25 * 2 ** min(delivery.deliveries, 5), 5.0, for_ms / 1000 + 0.05))
                return
            case Claimed(saved_text, cancels, has_children, incomplete):
                pass
        leases = worker.leases
        owner = received.owner
        with leases.renewing(claim, self._agent_name, requested_at, owner, tenant, restore) as lease:
            lease.has_children = has_children
            lease.progress = lambda: SavedProgress(saved_text)
            progress = ProgressReporter(worker, received)
            if delivery.is_first:
                await progress.queued()
            if cancels:
                lease.cancel.receive(cancels)
            try:
                # Look for the result again under the claim: another worker may just have decided the job.
                maybe_decided = maybe_seen or saved_text is not None or cancels
                if maybe_decided and (decided_result := await self._find_result(received)) is not None:
                    await answer_from_decision(worker, received, decided_result)
                elif job is None:
                    message = worker.redactor.text(received.problem)
                    user_message = "The request was not valid and was not run."
                    error = ErrorInfo(
                        kind="invalid", class_="InvalidJobError", message=message, user_message=user_message
                    )
                    await end_without_run(worker, received, "invalid", error)
                elif job.dry_run:
                    by_key = received.submitted_by is not None or received.owner is not None
                    coarse = by_key and Header.OPERATOR.value not in delivery.headers
                    assignment = self._assignment(received, job, claim, lease, None)
                    planned = await dry_run(worker, assignment, self._gates, coarse=coarse)
                    result = conclude(received, planned, worker.now(), worker.config_version, dry_run=True)
                    await finish(worker, received, result, claim)
                else:
                    await self._run(received, job, claim, lease, progress, saved_text, incomplete=incomplete)
            except BaseException:
                # Otherwise, the next claim would wait for the lease to expire.
                with suppress(StateUnavailableError):
                    await leases.release(claim)
                raise

    async def _with_references(self, received: JobDelivery) -> JobDelivery:
        """Adds to a job its parent's task if it names none, after having looked up jobs named by execution ids."""
        job = received.job
        ids = received.ids
        if job is None or (ids.parent is None and not ids.dependencies):
            return received
        worker = self._worker
        received = await self._with_execution_ids(received, job)
        ids = received.ids
        if ids.parent is None or ids.task_key is not None:
            return received
        others = "" if received.owner is None else key_of(received.scope, ids.parent)
        task = await worker.guards.task_of_parent(job, ids.parent, received.owner, self._guard_of, others=others)
        parent_run_id = task.run_id or run_id(job.tenant, task.key)
        ids = replace(ids, task_id=task.name or job.parent_execution_id, task_key=task.key)
        run = run_of(received.ids, job.tenant, run_of_parent=parent_run_id)
        return replace(received, ids=ids, run_id=run)

    def _guard_of(self, agent_name: str) -> GuardRules | None:
        agent = self._worker.config.agents.get(agent_name)
        return None if agent is None else agent.guard

    async def _with_execution_ids(self, received: JobDelivery, job: Job) -> JobDelivery:
        """Resolves references to the sender's jobs by execution ids. A job's own id may have the same form."""
        ids = received.ids
        written_ids = (job.parent_execution_id, *job.depends_on)
        if received.scope is None or not any(map(is_made_here, filter(None, written_ids))):
            return received
        resolved: list[str | None] = []
        for written_id, execution_id in zip(written_ids, (ids.parent, *ids.dependencies), strict=True):
            may_differ = written_id is not None and execution_id != written_id and is_made_here(written_id)
            is_of_sender = partial(self._is_of_sender, str(written_id), job.tenant, received)
            if may_differ and await self._worker.outages.retry_while_unavailable(is_of_sender):
                resolved.append(written_id)
            else:
                resolved.append(execution_id)
        parent, *dependencies = resolved
        return replace(received, ids=replace(ids, parent=parent, dependencies=tuple(filter(None, dependencies))))

    async def _is_of_sender(self, execution_id: str, tenant: str | None, received: JobDelivery) -> bool:
        """Returns True if an execution belongs to the owner of a job, or for a program of a tenant to the tenant."""
        # The note of an accepted job is deleted soon after the job ends, so look for a result first.
        referred = await decided(self._worker.lookup.as_stored(), execution_id)
        if referred is None:
            referred = await Accepted(self._worker.redis).status(execution_id, just_now=False)
            if referred is None or not referred.is_owner_known:
                return False
        if referred.tenant != tenant:
            return False
        is_of_tenants_program = received.owner is None and (received.scope or "").startswith(PROGRAM)
        return is_of_tenants_program or referred.owner == received.owner

    async def _run(
        self,
        received: JobDelivery,
        job: Job,
        claim: Claim,
        lease: ClaimLease,
        progress: ProgressReporter,
        saved_text: str | None,
        *,
        incomplete: bool,
    ) -> None:
        """Runs a claimed job in a slot of its agent.

        `saved_text` is the checkpoint of an earlier claim. `incomplete` is true if Redis may have lost one.
        """
        worker = self._worker
        delivery = received.delivery
        slots = self._worker.slots
        callers = {"key": received.submitted_by or received.owner or "", "tenant": job.tenant or ""}
        may_wait = saved_text is None and lease.cancel.cancellation is None
        if may_wait and not slots.has_room(self._agent_name, self._agent.concurrency, callers):
            due = worker.now() + timedelta(seconds=slots.retry_delay_s(self._agent_name, callers))
            await self._park(received, claim, lease, Deferred(due))
            return
        # No await since `has_room`: otherwise, concurrent jobs would all see the same free slot.
        with slots.taking(self._agent_name, callers):
            span = tracing.begin(
                f"invoke_agent {self._agent_name}",
                parent=delivery.headers.get(Header.TRACEPARENT.value),
                attributes=lambda: execution_attributes(
                    agent=self._agent_name, execution_id=claim.execution_id, task_id=received.ids.task_id
                ),
            )
            assignment = self._assignment(received, job, claim, lease, span.traceparent)
            checkpoint, resumed = await self._checkpoint(received, assignment, saved_text, incomplete=incomplete)
            result: Result | None = None
            worker.metrics.began(self._agent_name)
            try:
                result = await self._decide(received, assignment, checkpoint, lease, progress, resumed=resumed)
            finally:
                worker.metrics.ended(self._agent_name)
                error = None if result is None or result.error is None else result.error.class_
                span.end(
                    error=error, attributes={} if result is None else partial(job_ended, worker, assignment, result)
                )

    async def _checkpoint(
        self, received: JobDelivery, job: Assignment, saved_text: str | None, *, incomplete: bool
    ) -> tuple[Checkpoint, bool]:
        """Returns the checkpoint of a job that starts or resumes, and True if it may have made calls before."""
        worker = self._worker
        delivery = received.delivery
        if job.job.depends_on and (received.submitted_by is None or received.submitted_by.startswith(PROGRAM)):
            # A job over NATS is not in its plan yet, and may be parked before its dispatch.
            await reach_stage(worker, received, "pending")
        if saved_text is not None:
            return Checkpoint.model_validate_json(saved_text), True
        now = job.now()
        total_s = job.job.total_timeout_s or self._agent.total_timeout_s
        deadline = now + timedelta(seconds=total_s)
        checkpoint = Checkpoint(
            dispatched_at=now, deadline=deadline, config_version=worker.config_version, may_have_called=incomplete
        )
        resumed = not delivery.is_first
        if resumed and (job.job.depends_on or delivery.was_parked):
            # The job may have been parked before its first call, for a slot or for a dependency.
            resumed = await recorded_attempt(worker, received, 1) is not None
        return checkpoint, resumed

    def _assignment(
        self, received: JobDelivery, job: Job, claim: Claim, lease: ClaimLease, traceparent: str | None
    ) -> Assignment:
        rules = self._agent.rules_for(job)
        assert isinstance(rules, JobRules)  # `validate_job` has refused others
        agent = self._agent
        task_guard = rules.guard
        output_guard = self._output_guard
        if job.api == "embeddings" and job.api_request is not None:
            parameters = Parameters.of_embeddings(agent, job.api_request)
            output_guard = None
            agent = self._embedding_agent
            task_guard = task_guard and task_guard.for_embeddings()
        else:
            params = params_of(job)
            parameters = Parameters.of(agent, params, output_guard) if params else self._parameters
        settings_of_job = {"guard": task_guard, "retry": rules.retry}
        job_settings = {name: setting for name, setting in settings_of_job.items() if setting is not None}
        job_cost_tags: dict[str, str] = {}
        if job.metadata:
            keys = [key for key in self._worker.config.cost_tags if key in job.metadata]
            redacted = self._worker.redactor.json({key: job.metadata[key] for key in keys})
            job_cost_tags = cost_tags(keys, redacted) if isinstance(redacted, dict) else {}
        return Assignment(
            ids=received.ids,
            agent_name=self._agent_name,
            agent=agent.model_copy(update=job_settings) if job_settings else agent,
            breaker=rules.breaker,
            job=job,
            chain=self._agent.chain_for(job),
            claim=claim,
            lease=lease,
            traceparent=traceparent or tracing.new_traceparent(),
            trace_id=tracing.sampled_trace_id(traceparent),
            parameters=parameters,
            now=self._worker.steady_time(),
            output_guard=output_guard,
            owner=received.owner,
            submitted_by=received.submitted_by,
            # All operator keys and the NATS user `client` count as one caller.
            caller=received.owner or (received.submitted_by if job.tenant else None),
            cost_tags=job_cost_tags,
        )

    async def _decide(
        self,
        received: JobDelivery,
        job: Assignment,
        checkpoint: Checkpoint,
        lease: ClaimLease,
        progress: ProgressReporter,
        *,
        resumed: bool,
    ) -> Result | None:
        """Runs a job and decides it. Returns None for a job that was parked."""
        worker = self._worker
        retry = self._worker.outages.retry_while_unavailable
        rules = job.agent.cache
        kind = EmbeddingsCache if job.job.api == "embeddings" else ResponseCache
        cache = None if rules is None or job.job.skip_cache else kind(worker, job, rules)
        lease.on_renew = None if cache is None else cache.renew
        try:
            outcome: JobEnd | Deferred | None = None
            cached_from: str | None = None
            if job.job.depends_on and not resumed and lease.cancel.cancellation is None:
                outcome = await Dependencies(worker, received, job, progress).settle(checkpoint)
            if outcome is None:
                if job.job.plan_id is not None:
                    await reach_stage(worker, received, "running")
                outcome, cached_from = await self._find_answer(job, checkpoint, cache, lease, progress, resumed=resumed)
            if isinstance(outcome, Deferred):
                await self._park(received, job.claim, lease, outcome)
                return None
            # A worker that lost its claim during the call must not decide the job.
            await retry(partial(worker.leases.confirm, job.claim))
            result = conclude(
                received, outcome, job.now(), worker.config_version, cached_from=cached_from, trace_id=job.trace_id
            )
            # Count the job before it is decided: the task's next job may arrive as soon as this one is answered.
            if counted := job.ids.task_key is not None or lease.has_children:
                result = await retry(partial(worker.guards.count_job, job, result))
            if job.agent is not received.agent:
                received = replace(received, agent=job.agent)
            if cache is not None and cached_from is None:
                # Cache the answer before it is sent: an identical job may arrive right after that.
                await cache.keep(outcome, job.execution_id)
            result = await finish(worker, received, result, job.claim, counted=counted, progress=progress)
        finally:
            lease.on_renew = None
            if cache is not None:
                await cache.leave()
        worker.metrics.job(result, tracing.recorded_trace_id(job.traceparent))
        return result

    async def _find_answer(
        self,
        job: Assignment,
        checkpoint: Checkpoint,
        cache: AnyCache | None,
        lease: ClaimLease,
        progress: ProgressReporter,
        *,
        resumed: bool,
    ) -> tuple[JobEnd | Deferred, str | None]:
        """Finds a cached answer or calls models. Returns the outcome, and the execution that a cached one is from."""
        if lease.cancel.cancellation is not None and not resumed:
            return cancelled(checkpoint, lease.cancel.cancellation), None
        await progress.report("dispatched")
        # A job that has made calls must report them, so it takes no cached answer.
        if cache is not None and not resumed and not checkpoint.may_have_called:
            try:
                with lease.cancel.interruptible():
                    cached = await cache.find(checkpoint.deadline)
            except JobCancelledError as stop:
                return cancelled(checkpoint, stop.cancellation), None
            if cached is not None:
                answer = Answer(
                    cached.output,
                    response=cached.response,
                    finish_reason=cached.finish_reason,
                    choices=cached.choices,
                )
                return JobEnd(checkpoint, answer, chosen_model=cached.chosen_model), cached.execution_id
        model_job = cache.rest() if isinstance(cache, EmbeddingsCache) else job
        if model_job.job.api == "embeddings" and (size := self._batch_size(model_job)) is not None:
            outcome = await EmbeddingsBatches(self._worker, model_job, size, progress, self._gates).run(
                checkpoint, resumed=resumed
            )
        else:
            outcome = await Attempts(self._worker, model_job, checkpoint, progress, self._gates).run(resumed=resumed)
        if isinstance(cache, EmbeddingsCache) and isinstance(outcome, JobEnd):
            outcome = cache.whole(outcome)
        return outcome, None

    def _batch_size(self, job: Assignment) -> int | None:
        """Returns how many inputs one call of a job for embeddings may have; None if one call takes all of them."""
        assert job.job.api_request is not None
        size = self._worker.config.max_inputs(job.chain)
        return None if size is None or len(inputs_of(job.job.api_request.body)) <= size else size

    async def _park(self, received: JobDelivery, claim: Claim, lease: ClaimLease, deferred: Deferred) -> None:
        worker = self._worker
        agent = self._agent_name
        delivery = received.delivery
        ids = received.ids
        # The job returns as another message, which should not have to wait for the lease to expire.
        claim_state = await worker.outages.retry_while_unavailable(partial(worker.leases.release, claim))
        lease.cancel.receive(() if claim_state is None else claim_state.cancels)
        if lease.cancel.cancellation is not None:
            await delivery.retry_in(0)
            return
        try:
            names = {"agent": agent, "execution_id": ids.execution_id, "job_id": ids.job_id}
            await worker.outages.retry_while_unavailable(
                lambda: park(worker.publisher, delivery, **names, due=deferred.due)
            )
        except PublishRefusedError as error:
            # As a fallback, the job waits in JOBS, where it occupies a slot of the consumer.
            structlog.get_logger().warning("job_not_parked", execution_id=ids.execution_id, error=str(error))
            await delivery.retry_in(max(0.0, (deferred.due - worker.now()).total_seconds()))
        else:
            worker.metrics.parked(agent)
            if lease.cancel.cancellation is None and (deferred.over is None or not await deferred.over()):
                await worker.publisher.acknowledge(delivery.ack_subject)
            else:
                # The event that should wake the job may have come before the job was parked.
                await delivery.retry_in(0)

    async def _find_result(self, received: JobDelivery) -> Result | None:
        find = partial(decided, self._worker.lookup, received.execution_id, self._agent_name)
        return await self._worker.outages.retry_while_unavailable(find)
