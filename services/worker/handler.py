"""From a delivered job to its one terminal record: parse, claim, attempt, conclude, acknowledge."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from time import monotonic

import structlog
from pydantic import JsonValue, ValidationError
from pydantic_core import from_json

from breakwater import tracing
from breakwater.bus.delivery import Delivery, dead_letter, park, parked_execution
from breakwater.bus.errors import PublishRefused
from breakwater.bus.records import decided
from breakwater.config import Agent, NatsProgram, validate_job
from breakwater.contracts import subjects
from breakwater.contracts.execution import Attempt, ErrorInfo, Reason, Result
from breakwater.contracts.job import Job, ScopedJob
from breakwater.contracts.subjects import PROGRAM, Header, decode_token
from breakwater.contracts.types import is_full_id, is_identifier
from breakwater.contracts.validation import ambiguity, explain
from breakwater.encryption import Undecryptable, may_be_encrypted
from breakwater.errors import Unavailable
from breakwater.outage import StoppedWaiting
from breakwater.policy.job_rules import JobRules
from breakwater.policy.ledger import cost_tags
from breakwater.policy.ownership import (
    for_own_tenant,
    is_made,
    job_digest,
    longest_job,
    may_be_answered_at,
    outside,
    scope_in,
    scoped,
    shown,
    within,
)
from breakwater.policy.redact_scanner import NO_KEY_IN_ID, holds_key
from breakwater.state.accepted import Accepted
from breakwater.state.connection import StateUnavailable
from breakwater.state.executions import Claim, Claimed, ClaimLost, Conflict, Taken
from breakwater.state.plans import NotedJob
from services.worker.assignment import Assignment, Deferred, Finished, JobDelivery, Parameters
from services.worker.attempts import Attempts
from services.worker.call import recorded_attempt
from services.worker.cancelling import JobCancelled
from services.worker.checkpoint import Checkpoint
from services.worker.conclude import Conclusion, answer, cancelled, conclude, finish, refuse_id, reply_of
from services.worker.context import WorkerContext
from services.worker.dependencies import Dependencies
from services.worker.dry_run import dry_run
from services.worker.gates import ALL_GATES, gates_of
from services.worker.gates.task import count_job, task_of_parent
from services.worker.leases import HeldClaim
from services.worker.progress import ProgressReporter
from services.worker.response_cache import ResponseCache
from services.worker.spans import job_ended

KEY_WAIT, KEY_LOOK = timedelta(hours=1), timedelta(minutes=1)
"""How long a job waits for a key that is missing, and how often it is tried again."""

MAX_CRASHES = 10
"""How often a job may fail for a reason of ours, in whichever worker, before it is dead-lettered."""

MAX_HEADERS = 32 * 1024
"""So many characters of headers may a job have: they are carried along, and count where a message has a limit."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a message is not run.

    Attributes:
        why: in words.
        job: that it is, where only the config as it is now objects to it.
    """

    why: str
    job: Job | None = None


class CrashedEachTimeError(Exception):
    """A message whose worker ended before it had handled it, again and again."""


class JobHandler:
    """Handles the jobs of one agent."""

    def __init__(self, worker: WorkerContext, agent_name: str, agent: Agent) -> None:
        self._worker = worker
        self._agent_name = agent_name
        self._agent = agent
        self._gates = gates_of(worker, agent)
        self._output_guard = worker.output_guards.get(agent_name)
        self._parameters = Parameters.of(agent, {}, self._output_guard)
        """Of a job that brings none."""

    async def handle(self, delivery: Delivery) -> None:
        """Handles one delivery. Acknowledges it when the record stands, and gives it back otherwise."""
        held, log = self._worker.leases.deliveries, structlog.get_logger()
        asked: JobDelivery | None = None
        # Deliveries count waits, too. But a message that ends its worker each time shows in them alone.
        suspect = delivery.deliveries > MAX_CRASHES
        try:
            held.add(delivery)
            try:
                if suspect and await self._crashed(delivery) > MAX_CRASHES:
                    raise CrashedEachTimeError
                # From here on as it was asked; what is published of it is encrypted again.
                if may_be_encrypted(delivery.data):
                    delivery.data = self._worker.cipher.decrypt_document(delivery.data)
                parsed = self._parse(delivery)
                asked = self._asked(delivery, parsed)
                await self._handle(asked, asked.job or parsed)
            finally:
                held.discard(delivery)
            if suspect:
                await self._crashed(delivery, -1)
        except ClaimLost:
            log.info("job_taken_over", agent=self._agent_name, sequence=delivery.sequence)
        except Undecryptable as error:
            try:
                await self._wait_for_key(delivery, error)
            except PublishRefused as refusal:
                await self._release(delivery, asked, refusal)
        except asyncio.CancelledError:
            # The process stops: another worker may go on at once.
            await delivery.retry_in(0)
            raise
        except Exception as error:
            place = {"sequence": delivery.sequence, "deliveries": delivery.deliveries}
            log.exception("job_handling_failed", agent=self._agent_name, **place)
            await self._release(delivery, asked, error)

    async def _handle(self, asked: JobDelivery, parsed: Job | Refusal) -> None:
        delivery, execution_id = asked.delivery, execution_id_of(asked.delivery, asked.job)
        maybe_seen = (
            delivery.deliveries > 1
            or Header.UNIQUE_ID.value not in delivery.headers
            or self._worker.leases.may_be_late()
        )
        if maybe_seen and (known := await self._decided(execution_id)) is not None:
            await self._answer_known(asked, execution_id, known)
            return
        if isinstance(parsed, Job) and asked.owner is None and self._program(asked.submitted_by) is not None:
            parsed = await self._with_jobs_of_tenant(parsed)
            asked = replace(asked, job=parsed)
        if isinstance(parsed, Job) and parsed.parent_execution_id is not None:
            parsed = await self._with_task(parsed, parsed.parent_execution_id, asked.owner)
            asked = replace(asked, job=parsed)
        await self._run(asked, parsed, execution_id, maybe_seen=maybe_seen)

    async def _with_jobs_of_tenant(self, job: Job) -> Job:
        """A job of a tenant's program, which may name jobs of its tenant that came over HTTP, by their made ids."""
        named = {one for one in (job.parent_execution_id, *job.depends_on) if one is not None and is_made(shown(one))}
        of_tenant: dict[str, str] = {}
        for one in named:
            look = partial(Accepted(self._worker.redis).standing, shown(one), just_now=False)
            found = await self._worker.outages.retry_while_unavailable(look)
            if found is not None and found.agent is not None and found.tenant == job.tenant:
                of_tenant[one] = shown(one)
        return within(job, None, lambda one, _: of_tenant.get(one, one)) if of_tenant else job

    async def _with_task(self, job: Job, parent_id: str, owner: str | None) -> Job:
        """With the task of its parent, where it names none itself."""
        task_id = job.task_id or await task_of_parent(self._worker, job, parent_id, owner)
        return job.model_copy(update={"task_id": task_id})

    async def _run(self, asked: JobDelivery, parsed: Job | Refusal, execution_id: str, *, maybe_seen: bool) -> None:
        worker, delivery = self._worker, asked.delivery
        claim, asked_at = Claim.new(execution_id, worker.id), monotonic()
        tenant, task_id = (parsed.tenant, parsed.task_id) if isinstance(parsed, Job) else (None, None)
        # A job that no guard counts is the first of no task.
        task_id = task_id or (execution_id if self._agent.guard is None else None)
        whose = {"tenant": tenant, "task_id": task_id, "owner": asked.owner}
        accepted_s = delivery.queued_at.timestamp()
        ask = partial(worker.executions.claim, claim, asked.digest, **whose, accepted_s=accepted_s)
        match await worker.outages.retry_while_unavailable(ask):
            case Conflict():
                await self._refuse_id(asked, execution_id)
                return
            case Taken(for_ms):
                # By an earlier delivery whose worker lives, or another message of the same job. When they have decided
                # it, this one is answered from the record.
                await delivery.retry_in(min(0.25 * 2 ** min(delivery.deliveries, 5), 5.0, for_ms / 1000 + 0.05))
                return
            case Claimed(text, cancels, has_children):
                pass
        with worker.leases.keeping(claim, self._agent_name, asked_at, asked.owner, tenant) as held:
            held.has_children = has_children
            if cancels:
                held.cancel.receive(cancels)
            try:
                # Looked for again now that the claim is held: the job may have been decided just before.
                if (maybe_seen or text is not None or cancels) and (
                    known := await self._decided(execution_id)
                ) is not None:
                    await self._answer_known(asked, execution_id, known)
                elif isinstance(parsed, Refusal):
                    await self._refuse(asked, execution_id, parsed.why)
                elif parsed.dry_run:
                    job = self._assignment(asked, parsed, claim, None)
                    by_key = asked.submitted_by is not None or asked.owner is not None
                    coarse = by_key and Header.OPERATOR.value not in delivery.headers
                    planned = await dry_run(worker, job, coarse=coarse)
                    result = self._concluded(asked, execution_id, planned, worker.now(), dry_run=True)
                    await finish(worker, asked, result, claim)
                else:
                    await self._run_claimed(asked, parsed, claim, held, text)
            except BaseException:
                # Whoever has the job next need not wait for the end of the lease.
                with suppress(StateUnavailable):
                    await worker.executions.release(claim)
                raise

    async def _refuse(self, asked: JobDelivery, execution_id: str, why: str) -> None:
        text = "The request was not valid and was not run."
        message = self._worker.redactor.text(why)
        error = ErrorInfo(kind="invalid", class_="InvalidJobError", message=message, user_message=text)
        await self._dead_end(asked, execution_id, "invalid", error)

    async def _run_claimed(self, asked: JobDelivery, job: Job, claim: Claim, held: HeldClaim, text: str | None) -> None:
        worker, delivery, slots = self._worker, asked.delivery, self._worker.slots
        callers = {"key": asked.submitted_by or asked.owner or "", "tenant": job.tenant or ""}
        may_wait = text is None and held.cancel.cancellation is None
        if may_wait and not slots.has_room(self._agent_name, self._agent.concurrency, callers):
            due = worker.now() + timedelta(seconds=slots.turn_in(self._agent_name, callers))
            await self._defer(delivery, self._assignment(asked, job, claim, None), held, Deferred(due))
            return
        # Nothing is waited for between: jobs that come together would all find the same room.
        with slots.taking(self._agent_name, callers):
            await self._run_in_slot(asked, job, claim, held, text)

    async def _run_in_slot(self, asked: JobDelivery, job: Job, claim: Claim, held: HeldClaim, text: str | None) -> None:
        worker, delivery = self._worker, asked.delivery
        span = tracing.begin(
            f"invoke_agent {self._agent_name}",
            parent=delivery.headers.get(Header.TRACEPARENT.value),
            attributes=lambda: tracing.execution_attributes(
                agent=self._agent_name, execution_id=claim.execution_id, task_id=job.task_id
            ),
        )
        assignment = self._assignment(asked, job, claim, span.traceparent)
        checkpoint = None if text is None else Checkpoint.model_validate_json(text)
        if checkpoint is None:
            now, total_s = assignment.now(), job.total_timeout_s or self._agent.total_timeout_s
            deadline = now + timedelta(seconds=total_s)
            checkpoint = Checkpoint(dispatched_at=now, deadline=deadline, config_version=worker.config_version)
        if job.plan_id is not None and (asked.submitted_by is None or asked.submitted_by.startswith(PROGRAM)):
            # Of what came over NATS, the plan does not know yet.
            noted = {claim.execution_id: NotedJob(delivery.queued_at, self._agent_name, job.tenant, asked.owner)}
            await worker.outages.retry_while_unavailable(partial(worker.plans.accept, job.plan_id, noted))
        resumed = text is not None or not delivery.is_first
        if resumed and text is None and (job.depends_on or parked_execution(delivery.headers) is not None):
            # It may have slept for a slot, or for the jobs that it depends on, and have called nobody.
            resumed = await self._recorded(claim.execution_id, 1) is not None
        result: Result | None = None
        worker.metrics.began(self._agent_name)
        try:
            result = await self._execute(asked, assignment, checkpoint, held, resumed=resumed)
        finally:
            worker.metrics.ended(self._agent_name)
            error = None if result is None or result.error is None else result.error.class_
            span.end(error=error, attributes={} if result is None else partial(job_ended, worker, assignment, result))

    def _assignment(self, asked: JobDelivery, job: Job, claim: Claim, traceparent: str | None) -> Assignment:
        rules = self._agent.rules_for(job)
        assert isinstance(rules, JobRules)  # `validate_job` has refused others
        own = {name: one for name, one in (("guard", rules.guard), ("retry", rules.retry)) if one is not None}
        return Assignment(
            execution_id=claim.execution_id,
            agent_name=self._agent_name,
            agent=self._agent.model_copy(update=own) if own else self._agent,
            breaker=rules.breaker,
            job=job,
            chain=self._agent.chain_for(job),
            claim=claim,
            traceparent=traceparent or tracing.new_traceparent(),
            trace_id=tracing.sampled_trace_id(traceparent),
            parameters=Parameters.of(self._agent, job.params, self._output_guard) if job.params else self._parameters,
            now=self._worker.steady_time(),
            output_guard=self._output_guard,
            owner=asked.owner,
            submitted_by=asked.submitted_by,
            # The keys of operators are one, and NATS' `client` with them.
            caller=asked.owner or (asked.submitted_by if job.tenant else None),
            cost_tags=self._cost_tags(job) if job.metadata else {},
        )

    def _cost_tags(self, job: Job) -> dict[str, str]:
        keys = [key for key in self._worker.config.cost_tags if key in job.metadata]
        redacted = self._worker.redactor.json({key: job.metadata[key] for key in keys})
        return cost_tags(keys, redacted) if isinstance(redacted, dict) else {}

    async def _execute(
        self, asked: JobDelivery, job: Assignment, checkpoint: Checkpoint, held: HeldClaim, *, resumed: bool
    ) -> Result | None:
        """Runs a job and decides it. None where it was put to sleep."""
        worker = self._worker
        rules = job.agent.cache
        cache = None if rules is None or job.job.skip_cache else ResponseCache(worker, job, rules)
        held.on_renew = None if cache is None else cache.renew
        try:
            end, cached_from = None, None
            if job.job.depends_on and not resumed and held.cancel.cancellation is None:
                end = await Dependencies(worker, asked, job).settle(checkpoint)
            if end is None:
                end, cached_from = await self._attempt(job, checkpoint, cache, held, resumed=resumed)
            if isinstance(end, Deferred):
                await self._defer(asked.delivery, job, held, end)
                return None
            # Who has been superseded while it called decides nothing.
            await worker.outages.retry_while_unavailable(partial(worker.leases.confirm, job.claim))
            result = self._concluded(
                asked, job.execution_id, end, job.now(), cached_from=cached_from, trace_id=job.trace_id
            )
            # Before it is decided: the task's next job may come as soon as this one is answered.
            if counted := job.job.task_id is not None or held.has_children:
                again = worker.outages.retry_while_unavailable
                result = await again(partial(count_job, worker, job, result))
            if job.agent is not asked.agent:
                asked = replace(asked, agent=job.agent)
            if cache is not None and cached_from is None:
                # Before it is answered: the same question may come as soon as it is.
                await cache.keep(end, job.execution_id)
            result = await finish(worker, asked, result, job.claim, counted=counted)
        finally:
            held.on_renew = None
            if cache is not None:
                await cache.leave()
        worker.metrics.job(result, tracing.recorded_trace_id(job.traceparent))
        return result

    async def _attempt(
        self, job: Assignment, checkpoint: Checkpoint, cache: ResponseCache | None, held: HeldClaim, *, resumed: bool
    ) -> tuple[Finished | Deferred, str | None]:
        """Runs a job or finds a cached answer; returns how it ended, and the execution that such an answer is from."""
        if held.cancel.cancellation is not None and not resumed:
            return cancelled(checkpoint, held.cancel.cancellation), None
        progress = ProgressReporter(self._worker, self._agent_name, job.execution_id, job.job.parent_execution_id)
        await progress.report("dispatched")
        # A job that has called already must end with what it has called, and not as if it had cost nothing.
        if cache is not None and not resumed:
            try:
                with held.cancel.interruptible():
                    cached = await cache.find(checkpoint.deadline)
            except JobCancelled as stop:
                return cancelled(checkpoint, stop.cancellation), None
            if cached is not None:
                found = Finished(
                    checkpoint,
                    cached.output,
                    cached.chosen_model,
                    None,
                    None,
                    cached.response,
                    cached.finish_reason,
                    cached.choices,
                )
                return found, cached.execution_id
        brings_rules = job.breaker is not None or job.agent is not self._agent
        gates = ALL_GATES if brings_rules else self._gates
        return await Attempts(self._worker, job, checkpoint, progress, gates).run(resumed=resumed), None

    async def _defer(self, delivery: Delivery, job: Assignment, held: HeldClaim, sleeping: Deferred) -> None:
        worker, agent = self._worker, self._agent_name
        # Whoever wakes the job has another message of it, and must not wait for the end of a lease.
        kept = await worker.outages.retry_while_unavailable(partial(worker.executions.release, job.claim))
        held.cancel.receive(() if kept is None else kept.cancels)
        if held.cancel.cancellation is not None:
            await delivery.retry_in(0)
            return
        try:
            await worker.outages.retry_while_unavailable(
                lambda: park(worker.publisher, delivery, agent=agent, execution_id=job.execution_id, due=sleeping.due)
            )
        except PublishRefused as error:
            # There it would hold no slot; here it does, and waits as well.
            structlog.get_logger().warning("job_not_parked", execution_id=job.execution_id, error=str(error))
            await delivery.retry_in(max(0.0, (sleeping.due - job.now()).total_seconds()))
        else:
            worker.metrics.parked(agent)
            if held.cancel.cancellation is None and (sleeping.over is None or not await sleeping.over()):
                await worker.publisher.acknowledge(delivery.ack_subject)
            else:
                # Whoever wakes it may have looked before it slept.
                await delivery.retry_in(0)

    def _parse(self, delivery: Delivery) -> Job | Refusal:
        """The job, or the reason why it can't be run."""
        limit = self._worker.config.limits.max_body_bytes
        is_scoped = Header.SCOPED_IDS.value in delivery.headers
        if len(delivery.data) > longest_job(limit, scoped_ids=is_scoped):
            return Refusal(f"the job has {len(delivery.data)} bytes; at most {limit} are accepted")
        if sum(map(len, delivery.headers.values())) + sum(map(len, delivery.headers)) > MAX_HEADERS:
            return Refusal(f"the job's headers have more than {MAX_HEADERS} characters")
        try:
            form = ScopedJob if is_scoped else Job
            job = form.model_validate_json(delivery.data)
        except ValidationError as error:
            return Refusal(explain(error, Job, _parsed_json(delivery.data)))
        if (why := ambiguity(delivery.data)) is not None:
            return Refusal(f"the job is not JSON: {why}")
        if job.agent != self._agent_name:
            return Refusal(f"agent: {job.agent!r} was published on the subject of {self._agent_name!r}")
        if job.job_id is None and holds_key(delivery.headers.get(Header.MSG_ID.value, "")):
            return Refusal(f"{Header.MSG_ID.value}: {NO_KEY_IN_ID}")
        problem = validate_job(self._worker.config, job)
        return self._of_sender(delivery, job) if problem is None else Refusal(f"{problem.path}: {problem.message}", job)

    def _of_sender(self, delivery: Delivery, job: Job) -> Job | Refusal:
        """The job, where its sender may send it; what comes over HTTP was looked at there."""
        sender = _name_in(delivery, Header.SUBMITTED_BY)
        if job.reply_to is not None and not may_be_answered_at(job.reply_to, sender):
            return Refusal(f"reply_to: {job.reply_to!r} is not below the sender's own prefix")
        if sender is None or not sender.startswith(PROGRAM):
            return job
        program = self._program(sender)
        if program is None:
            # A key may have such a name, too.
            known = subjects.user_of_job(delivery.subject) is None
            return job if known else Refusal(f"the config has no program {sender.removeprefix(PROGRAM)!r}")
        job = for_own_tenant(program, job)
        if (wrong := outside(program, job.agent, job.tenant)) is None:
            return job
        return Refusal(f"{wrong[0]}: the NATS user {sender!r} submits {wrong[1]}", job)

    def _program(self, sender: str | None) -> NatsProgram | None:
        """The named program that has sent a job."""
        if sender is None or not sender.startswith(PROGRAM):
            return None
        return self._worker.config.programs.get(sender.removeprefix(PROGRAM))

    def _asked(self, delivery: Delivery, parsed: Job | Refusal) -> JobDelivery:
        owner, sender = _name_in(delivery, Header.OWNER), _name_in(delivery, Header.SUBMITTED_BY)
        if (program := self._program(sender)) is not None and program.tenants:
            owner = None  # it belongs to its tenant
        if isinstance(parsed, Job):
            digest = job_digest(parsed, owner)
            inside = within(parsed, _scope(delivery), scoped) if _has_chosen_ids(delivery) else parsed
            return JobDelivery(delivery, self._agent, inside, parsed.reply_to, owner, sender, digest)
        # Also one that is otherwise not valid is answered.
        subject = _field(delivery.data, "reply_to")
        may = subject is not None and subjects.is_reply_subject(subject) and may_be_answered_at(subject, sender)
        reply_to = subject if may else None
        digest = job_digest(parsed.job or delivery.data, owner)
        return JobDelivery(delivery, self._agent, None, reply_to, owner, sender, digest)

    async def _answer_known(self, asked: JobDelivery, execution_id: str, known: Result) -> None:
        """Answers from what was decided; but an id is one job, and it may be another one."""
        if known.agent == self._agent_name and known.job_digest in (None, asked.digest):
            await answer(self._worker, asked, known)
        else:
            await self._refuse_id(asked, execution_id)

    async def _refuse_id(self, asked: JobDelivery, execution_id: str) -> None:
        why = f"job_id: {shown(execution_id)!r} is already the id of another job; choose another id"
        error = ErrorInfo(kind="invalid", class_="IdConflictError", message=why, user_message=why)
        await refuse_id(self._worker, asked, self._ended(asked, execution_id, "invalid", error))

    async def _release(self, delivery: Delivery, asked: JobDelivery | None, error: Exception) -> None:
        crashes = await self._crashed(delivery)
        if crashes < MAX_CRASHES:
            await delivery.retry_in(min(2.0**crashes, 60.0))
            return
        info = ErrorInfo(kind="server", class_="InternalError", message=f"{type(error).__name__} in the worker")
        execution_id = None
        try:
            # Not parsed again: that may be what crashes.
            asked = asked or self._asked(delivery, Refusal(info.message))
            execution_id = execution_id_of(delivery, asked.job)
            await self._dead_end(asked, execution_id, "error", info)
        except (Unavailable, StoppedWaiting):
            raise
        except Exception:  # noqa: BLE001  whatever it is, the message is ended
            place = {"agent": self._agent_name, "sequence": delivery.sequence, "execution_id": execution_id}
            structlog.get_logger().exception("job_ended_without_a_record", **place)
            await self._bury(asked, delivery, info)

    async def _bury(self, asked: JobDelivery | None, delivery: Delivery, info: ErrorInfo) -> None:
        """Ends a message of which not even the end can be recorded. Whoever waits for it is answered."""
        worker, execution_id = self._worker, f"job-{delivery.sequence}-{int(delivery.published_at.timestamp())}"
        await worker.outages.retry_while_unavailable(
            lambda: dead_letter(
                worker.publisher,
                delivery,
                reason="error",
                error=info.message,
                agent=self._agent_name,
                at=worker.now(),
                withheld=not self._agent.persist_prompts,
                private=not self._agent.keeps_error_texts,
            )
        )
        if asked is not None and asked.reply_to is not None:
            bare = replace(asked, job=None)
            id_ = execution_id if asked.job is None else asked.job.job_id or execution_id
            await worker.publisher.send(asked.reply_to, reply_of(self._ended(bare, id_, "error", info)))
        await delivery.terminate()

    async def _crashed(self, delivery: Delivery, by: int = 1) -> int:
        message = f"{self._agent_name}/{delivery.sequence}/{int(delivery.published_at.timestamp())}"
        count = partial(self._worker.executions.crashed, message, by)
        return await self._worker.outages.retry_while_unavailable(count)

    async def _wait_for_key(self, delivery: Delivery, why: Undecryptable) -> None:
        """Has a job wait that a key is missing for. It holds no slot, and is dead-lettered in the end."""
        worker, execution_id = self._worker, execution_id_of(delivery, None)
        structlog.get_logger().error("job_not_decrypted", execution_id=execution_id, error=str(why))
        if worker.now() - delivery.queued_at > KEY_WAIT:
            text = "The request could not be read."
            error = ErrorInfo(kind="invalid", class_="UndecryptableJobError", message=str(why), user_message=text)
            # Not where its answer is there, and can't be read either.
            with suppress(Undecryptable):
                await self._dead_end(self._asked(delivery, Refusal(str(why))), execution_id, "invalid", error)
                return
        due = worker.now() + KEY_LOOK
        await worker.outages.retry_while_unavailable(
            partial(park, worker.publisher, delivery, agent=self._agent_name, execution_id=execution_id, due=due)
        )
        await worker.publisher.acknowledge(delivery.ack_subject)

    async def _dead_end(self, asked: JobDelivery, execution_id: str, reason: Reason, error: ErrorInfo) -> None:
        # A job that was refused at first has called nobody; one that comes again may have, and that stays its cost.
        again = not asked.delivery.is_first
        attempts: list[Attempt] = []
        while again and (attempt := await self._recorded(execution_id, len(attempts) + 1)) is not None:
            attempts.append(attempt)
        if asked.job is not None and attempts:
            # That of its parent perhaps, which the job does not name.
            asked = replace(asked, job=asked.job.model_copy(update={"task_id": attempts[0].task_id}))
        await finish(self._worker, asked, self._ended(asked, execution_id, reason, error, tuple(attempts)))

    async def _decided(self, execution_id: str) -> Result | None:
        look = partial(decided, self._worker.lookup, execution_id, self._agent_name)
        return await self._worker.outages.retry_while_unavailable(look)

    async def _recorded(self, execution_id: str, number: int) -> Attempt | None:
        return await recorded_attempt(self._worker, self._agent_name, execution_id, number)

    def _ended(
        self,
        asked: JobDelivery,
        execution_id: str,
        reason: Reason,
        error: ErrorInfo,
        attempts: tuple[Attempt, ...] = (),
    ) -> Result:
        """The result of a job that could not be run, or not to its end."""
        now = self._worker.now()
        checkpoint = Checkpoint(dispatched_at=now, deadline=now, attempts=attempts)
        return self._concluded(asked, execution_id, Finished(checkpoint, None, None, reason, error), now)

    def _concluded(
        self,
        asked: JobDelivery,
        execution_id: str,
        end: Finished,
        completed_at: datetime,
        *,
        cached_from: str | None = None,
        dry_run: bool = False,
        trace_id: str | None = None,
    ) -> Result:
        return conclude(
            Conclusion(
                execution_id=execution_id,
                agent_name=self._agent_name,
                job=asked.job or Job.model_construct(agent=self._agent_name, prompt=""),
                chain=self._agent.chain if asked.job is None else self._agent.chain_for(asked.job),
                queued_at=asked.delivery.queued_at,
                completed_at=completed_at,
                finished=end,
                on_error=self._agent.on_error,
                cached_from=cached_from,
                dry_run=dry_run,
                owner=asked.owner,
                digest=asked.digest,
                config_version=self._worker.config_version,
                trace_id=trace_id,
            )
        )


def execution_id_of(delivery: Delivery, job: Job | None) -> str:
    """What the job is called: by its own id, else that of its message, else one that is made of where it is stored.

    The same every time. None for a job gives the same, if it is valid and no dry run.
    """
    if (parked := parked_execution(delivery.headers)) is not None:
        return parked
    header, own = delivery.headers.get(Header.MSG_ID.value, ""), None if job is None else job.job_id
    is_chosen = _has_chosen_ids(delivery)
    fits = is_identifier if is_chosen else is_full_id
    if job is None and (field := _field(delivery.data, "job_id", fits)) is not None and not holds_key(field):
        own = field
    if own is not None and not is_chosen:
        return own
    chosen = own or (header if _may_be_id(header) else None)
    made = f"job-{delivery.sequence}-{int(delivery.published_at.timestamp())}"
    if job is not None and job.dry_run and chosen is not None and subjects.user_of_job(delivery.subject) is not None:
        # It takes no id: nothing is decided for the job that comes with the same one.
        return f"{chosen}@{made}"
    return scoped(chosen or made, _scope(delivery))


def _has_chosen_ids(delivery: Delivery) -> bool:
    """Whether the ids of a job are as they were chosen, as it did not come by `request`."""
    if Header.SCOPED_IDS.value in delivery.headers:
        return False
    sender = _name_in(delivery, Header.SUBMITTED_BY)
    return sender is None or sender.startswith(PROGRAM)


def _scope(delivery: Delivery) -> str | None:
    """Whose names the ids are of a job that came over NATS: those of a program with a user of its own."""
    owner = _name_in(delivery, Header.OWNER)
    return scope_in(owner, None) if owner is not None and owner.startswith(PROGRAM) else None


def _name_in(delivery: Delivery, header: Header) -> str | None:
    """The name of an API key in a header of a job; None where there is none."""
    token = delivery.headers.get(header.value)
    if token is None:
        return None
    try:
        name = decode_token(token)
    except UnicodeDecodeError:
        return None
    return name if is_identifier(name) else None


def _may_be_id(text: str) -> bool:
    return is_identifier(text) and not holds_key(text)


def _field(data: bytes, name: str, fits: Callable[[str], bool] = is_identifier) -> str | None:
    """A text field of a job that is otherwise not valid."""
    body = _parsed_json(data)
    value = body.get(name) if isinstance(body, Mapping) else None
    return value if isinstance(value, str) and fits(value) else None


def _parsed_json(data: bytes) -> JsonValue:
    """The body as JSON; None where it is none."""
    try:
        return from_json(data)
    except ValueError:
        return None
