"""From a delivered job to its one terminal record: parse, claim, run, conclude, acknowledge."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from datetime import timedelta

import structlog
from pydantic import ValidationError

from breakwater import background, tracing
from breakwater.bus.delivery import Delivery, heartbeat
from breakwater.bus.errors import PublishRefused
from breakwater.bus.parking import park, parked_execution, queued_at
from breakwater.bus.publisher import new_traceparent
from breakwater.config import Agent, objection
from breakwater.contracts.execution import Attempt, ErrorInfo, Reason, Result
from breakwater.contracts.job import Job
from breakwater.contracts.subjects import Header
from breakwater.contracts.validation import explain
from breakwater.state.executions import Claim, Claimed, Superseded, Taken
from services.worker.admission import ClaimLost
from services.worker.answers import Answers, answers_for
from services.worker.assignment import Assignment, Finished, Sleeping
from services.worker.attempt_log import recorded_attempts
from services.worker.checkpoint import Checkpoint
from services.worker.conclude import Ask, Conclusion, answer, conclude, decided, finish, refuse_id
from services.worker.dry_run import dry_run
from services.worker.identity import execution_id_of, parsed_json, reply_to_of
from services.worker.notices import Notices
from services.worker.plane import Plane
from services.worker.run import Run
from services.worker.task_guard import guard_of

ROOM_FOR_ID = 1024
"""`request` accepts a body of up to the limit, and then puts the job's id in."""

MAX_CRASHES = 10
"""How often a job may fail for a reason of ours, before it is dead-lettered."""


class JobHandler:
    """Handles the jobs of one agent."""

    def __init__(self, plane: Plane, agent_name: str, agent: Agent) -> None:
        self._plane = plane
        self._agent_name = agent_name
        self._agent = agent
        self._crashes: dict[int, int] = {}
        """How often each job has crashed its handler here. Deliveries would count waits, too."""

    async def handle(self, delivery: Delivery) -> None:
        """Handles one delivery. Acknowledges it when the record stands, and gives it back otherwise."""
        log = structlog.get_logger().bind(agent=self._agent_name, sequence=delivery.sequence)
        try:
            async with heartbeat([delivery]):
                await self._handle(delivery)
            self._crashes.pop(delivery.sequence, None)
        except ClaimLost:
            log.info("job_taken_over")
        except asyncio.CancelledError:
            # The process stops: somebody else may go on at once.
            await delivery.retry_in(0)
            raise
        except Exception as error:
            log.exception("job_handling_failed", deliveries=delivery.deliveries)
            await self._give_back(delivery, error)

    async def _handle(self, delivery: Delivery) -> None:
        plane = self._plane
        parsed = self._parse(delivery)
        job = parsed if isinstance(parsed, Job) else None
        ask = Ask(delivery, self._agent, job, reply_to_of(delivery, job))
        execution_id = execution_id_of(delivery, job)
        maybe_seen = delivery.deliveries > 1 or Header.UNIQUE_ID.value not in delivery.headers
        if maybe_seen and (known := await decided(plane, self._agent_name, execution_id)) is not None:
            await self._answer_known(ask, execution_id, known)
        elif isinstance(parsed, str):
            await self._refuse(ask, execution_id, parsed)
        elif parsed.dry_run:
            await dry_run(plane, ask, self._assignment(parsed, Claim(execution_id, 0, 0), None))
        else:
            await self._run(ask, parsed, execution_id)

    async def _run(self, ask: Ask, job: Job, execution_id: str) -> None:
        plane, delivery = self._plane, ask.delivery
        claim = Claim(execution_id, delivery.sequence, delivery.deliveries)
        match await plane.outages.retry_while_unavailable(lambda: plane.executions.claim(claim)):
            case Taken():
                # The same job id under another message: it will be answered from the record of the first.
                await delivery.retry_in(min(0.25 * 2 ** min(delivery.deliveries, 5), 5.0))
                return
            case Superseded():
                return
            case Claimed(text):
                checkpoint = None if text is None else Checkpoint.model_validate_json(text)
        if checkpoint is None and Header.UNIQUE_ID.value not in delivery.headers:
            # Looked for again, now that nobody else can be at it: it may have been decided just before the claim.
            known = await decided(plane, self._agent_name, execution_id)
            if known is not None:
                await self._answer_known(ask, execution_id, known)
                return
        now = plane.now()
        if checkpoint is None:
            total_s = job.total_timeout_s or self._agent.total_timeout_s
            checkpoint = Checkpoint(dispatched_at=now, deadline=now + timedelta(seconds=total_s))
        traceparent = delivery.headers.get(Header.TRACEPARENT.value)
        span = tracing.begin(
            f"invoke_agent {self._agent_name}",
            parent=traceparent,
            kind="consumer",
            attributes=tracing.execution_attributes(agent=self._agent_name, execution_id=execution_id),
        )
        assignment = self._assignment(job, claim, span.traceparent)
        resumed = text is not None or delivery.deliveries > 1 or parked_execution(delivery.headers) is not None
        result: Result | None = None
        plane.metrics.began(self._agent_name)
        try:
            result = await self._execute(ask, assignment, checkpoint, resumed=resumed)
        finally:
            plane.metrics.ended(self._agent_name)
            error = None if result is None or result.error is None else result.error.class_
            span.end(error=error, attributes={} if result is None else tracing.result_attributes(result))

    def _assignment(self, job: Job, claim: Claim, traceparent: str | None) -> Assignment:
        return Assignment(
            execution_id=claim.execution_id,
            agent_name=self._agent_name,
            agent=self._agent,
            job=job,
            chain=self._agent.chain_for(job),
            claim=claim,
            traceparent=traceparent or new_traceparent(),
            output_guard=self._plane.output_guards.get(self._agent_name),
        )

    async def _execute(
        self, ask: Ask, assignment: Assignment, checkpoint: Checkpoint, *, resumed: bool
    ) -> Result | None:
        """Runs a job and decides it. None where it was put to sleep."""
        plane, delivery = self._plane, ask.delivery
        answers = answers_for(plane, assignment)
        try:
            outcome, cached_from = await self._perform(assignment, checkpoint, answers, resumed=resumed)
            if isinstance(outcome, Sleeping):
                await self._put_to_sleep(delivery, assignment.claim, outcome)
                return None
            result = conclude(
                Conclusion(
                    execution_id=assignment.execution_id,
                    agent_name=self._agent_name,
                    job=assignment.job,
                    chain=assignment.chain,
                    queued_at=queued_at(delivery.headers, delivery.published_at),
                    completed_at=plane.now(),
                    finished=outcome,
                    on_error=self._agent.on_error,
                    cached_from=cached_from,
                )
            )
            guard = guard_of(plane, self._agent_name, self._agent, assignment.job, assignment.execution_id)
            if guard is not None:
                # Before it is decided: the task's next job may come as soon as this one is answered.
                output = outcome.output
                await plane.outages.retry_while_unavailable(lambda: guard.record(result, output))
            await finish(plane, ask, result)
            if answers is not None and cached_from is None:
                await answers.keep(outcome, assignment.execution_id)
        finally:
            if answers is not None:
                await answers.leave()
        plane.metrics.job(result)
        await plane.outages.retry_while_unavailable(lambda: plane.executions.finish(assignment.claim))
        return result

    async def _perform(
        self, job: Assignment, checkpoint: Checkpoint, answers: Answers | None, *, resumed: bool
    ) -> tuple[Finished | Sleeping, str | None]:
        """Runs a job, or finds its answer; says whose it was in that case."""
        notices = Notices(self._plane, self._agent_name, job.execution_id, job.job.parent_execution_id)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(background.stop, asyncio.create_task(self._renew(job.claim, answers)))
            await notices.dispatched()
            # A job that has called already must end with what it has called, and not as if it had cost nothing.
            if answers is not None and not resumed:
                cached = await answers.find(checkpoint.deadline)
                if cached is not None:
                    return Finished(checkpoint, cached.output, cached.chosen_model, None, None), cached.execution_id
            return await Run(self._plane, job, checkpoint, notices, resumed=resumed).go(), None

    async def _put_to_sleep(self, delivery: Delivery, claim: Claim, sleeping: Sleeping) -> None:
        plane, agent = self._plane, self._agent_name
        # Whoever wakes the job has another message of it, and must not wait for the end of a lease.
        await plane.outages.retry_while_unavailable(lambda: plane.executions.checkpoint(claim, "", lease_ms=0))
        try:
            await plane.outages.retry_while_unavailable(
                lambda: park(plane.publisher, delivery, agent=agent, execution_id=claim.execution_id, due=sleeping.due)
            )
        except PublishRefused as error:
            # There it would hold no slot; here it does, and waits as well.
            structlog.get_logger().warning("job_not_parked", execution_id=claim.execution_id, error=str(error))
            await delivery.retry_in(max(0.0, (sleeping.due - plane.now()).total_seconds()))
        else:
            await delivery.ack_sync()

    async def _renew(self, claim: Claim, answers: Answers | None) -> None:
        """Keeps the claim while the job runs; the delivery's own heartbeat only keeps the message."""
        while True:
            await asyncio.sleep(20)
            await self._plane.outages.retry_while_unavailable(lambda: self._plane.executions.checkpoint(claim, ""))
            if answers is not None:
                await answers.renew()

    def _parse(self, delivery: Delivery) -> Job | str:
        """The job, or in words why it can't be run."""
        limit = self._plane.config.limits.max_body_bytes
        if len(delivery.data) > limit + ROOM_FOR_ID:
            return f"the job has {len(delivery.data)} bytes; at most {limit} are accepted"
        try:
            job = Job.model_validate_json(delivery.data)
        except ValidationError as error:
            return explain(error, Job, parsed_json(delivery.data))
        if job.agent != self._agent_name:
            return f"agent: {job.agent!r} was published on the subject of {self._agent_name!r}"
        problem = objection(self._plane.config, job)
        return job if problem is None else f"{problem.path}: {problem.message}"

    async def _answer_known(self, ask: Ask, execution_id: str, known: Result) -> None:
        """Answers from what was decided; but an id is one execution, and it may be that of another agent."""
        if known.agent == self._agent_name:
            await answer(self._plane, ask, known)
            return
        why = f"job_id: {execution_id!r} is already the id of an execution of another agent"
        error = ErrorInfo(kind="invalid", class_="InvalidJobError", message=why, user_message=why)
        await refuse_id(self._plane, ask, self._ended(ask, execution_id, "invalid", error))

    async def _refuse(self, ask: Ask, execution_id: str, why: str) -> None:
        error = ErrorInfo(
            kind="invalid",
            class_="InvalidJobError",
            message=self._plane.redactor.text(why),
            user_message="The request was not valid and was not run.",
        )
        await self._dead_end(ask, execution_id, "invalid", error)

    async def _give_back(self, delivery: Delivery, error: Exception) -> None:
        crashes = self._crashes[delivery.sequence] = self._crashes.get(delivery.sequence, 0) + 1
        if crashes < MAX_CRASHES:
            await delivery.retry_in(min(2.0**crashes, 60.0))
            return
        info = ErrorInfo(kind="server", class_="InternalError", message=f"{type(error).__name__} in the worker")
        parsed = self._parse(delivery)
        job = parsed if isinstance(parsed, Job) else None
        ask = Ask(delivery, self._agent, job, reply_to_of(delivery, job))
        await self._dead_end(ask, execution_id_of(delivery, job), "error", info)
        del self._crashes[delivery.sequence]

    async def _dead_end(self, ask: Ask, execution_id: str, reason: Reason, error: ErrorInfo) -> None:
        # A job that was refused at first has called nobody; one that comes again may have, and that stays its cost.
        again = ask.delivery.deliveries > 1 or parked_execution(ask.delivery.headers) is not None
        attempts = await recorded_attempts(self._plane, self._agent_name, execution_id) if again else ()
        result = self._ended(ask, execution_id, reason, error, attempts)
        guard = None if ask.job is None else guard_of(self._plane, self._agent_name, self._agent, ask.job, execution_id)
        if guard is not None and attempts:
            # What it holds of its task's cap would be held for as long as the task lives.
            await self._plane.outages.retry_while_unavailable(lambda: guard.record(result, None))
        await finish(self._plane, ask, result)

    def _ended(
        self, ask: Ask, execution_id: str, reason: Reason, error: ErrorInfo, attempts: tuple[Attempt, ...] = ()
    ) -> Result:
        """The result of a job that could not be run, or not to its end."""
        now = self._plane.now()
        checkpoint = Checkpoint(dispatched_at=now, deadline=now, attempts=attempts)
        return conclude(
            Conclusion(
                execution_id=execution_id,
                agent_name=self._agent_name,
                job=ask.job or Job(agent=self._agent_name, prompt=""),
                chain=self._agent.chain if ask.job is None else self._agent.chain_for(ask.job),
                queued_at=queued_at(ask.delivery.headers, ask.delivery.published_at),
                completed_at=now,
                finished=Finished(checkpoint, None, None, reason, error),
                on_error=self._agent.on_error,
            )
        )
