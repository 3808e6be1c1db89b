"""From a delivered job to its one terminal record: parse, claim, run, conclude, acknowledge."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from datetime import timedelta

import structlog
from pydantic import JsonValue, ValidationError
from pydantic_core import from_json

from breakwater.bus.delivery import Delivery, heartbeat
from breakwater.bus.publisher import new_traceparent
from breakwater.config import Agent, objection
from breakwater.contracts import subjects
from breakwater.contracts.execution import ErrorInfo, Progress, Result
from breakwater.contracts.job import Job
from breakwater.contracts.subjects import Header
from breakwater.contracts.types import is_identifier
from breakwater.contracts.validation import explain
from breakwater.state.executions import Claimed, Holder, Superseded, Taken
from services.worker.admission import ClaimLost
from services.worker.assignment import Assignment, Sleeping
from services.worker.checkpoint import Checkpoint
from services.worker.conclude import Ask, Conclusion, answer, conclude, decided, finish, refuse_id
from services.worker.dry_run import dry_run
from services.worker.plane import Plane
from services.worker.run import Run

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
        ask = Ask(delivery, self._agent, job, _reply_to(delivery, job))
        execution_id = _execution_id(delivery, job)
        maybe_seen = delivery.deliveries > 1 or Header.UNIQUE_ID.value not in delivery.headers
        if maybe_seen and (known := await decided(plane, self._agent_name, execution_id)) is not None:
            await self._answer_known(ask, execution_id, known)
        elif isinstance(parsed, str):
            await self._refuse(ask, execution_id, parsed)
        elif parsed.dry_run:
            await dry_run(plane, ask, parsed, execution_id, self._agent_name, _chain(parsed, self._agent))
        else:
            await self._run(ask, parsed, execution_id)

    async def _run(self, ask: Ask, job: Job, execution_id: str) -> None:
        plane, delivery = self._plane, ask.delivery
        holder = Holder(execution_id, delivery.sequence, delivery.deliveries)
        match await plane.patience.redis(lambda: plane.executions.claim(holder)):
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
        assignment = Assignment(
            execution_id=execution_id,
            agent_name=self._agent_name,
            agent=self._agent,
            job=job,
            chain=_chain(job, self._agent),
            holder=holder,
            body_bytes=len(delivery.data),
            deliveries=delivery.deliveries,
            traceparent=delivery.headers.get(Header.TRACEPARENT.value) or new_traceparent(),
        )
        async with AsyncExitStack() as stack:
            stack.push_async_callback(_stop_renewing, asyncio.create_task(self._renew(holder)))
            await self._tell_dispatched(execution_id)
            outcome = await Run(plane, assignment, checkpoint, resumed=text is not None).go()
        if isinstance(outcome, Sleeping):
            await delivery.retry_in(outcome.delay_s)
            return
        result = conclude(
            Conclusion(
                execution_id=execution_id,
                agent_name=self._agent_name,
                job=job,
                chain=assignment.chain,
                queued_at=delivery.published_at,
                completed_at=plane.now(),
                finished=outcome,
            )
        )
        await finish(plane, ask, result)
        await plane.patience.redis(lambda: plane.executions.finish(holder))

    async def _renew(self, holder: Holder) -> None:
        """Keeps the claim while the job runs; the delivery's own heartbeat only keeps the message."""
        while True:
            await asyncio.sleep(20)
            await self._plane.patience.redis(lambda: self._plane.executions.checkpoint(holder, ""))

    def _parse(self, delivery: Delivery) -> Job | str:
        """The job, or in words why it can't be run."""
        limit = self._plane.config.limits.max_body_bytes
        if len(delivery.data) > limit + ROOM_FOR_ID:
            return f"the job has {len(delivery.data)} bytes; at most {limit} are accepted"
        try:
            job = Job.model_validate_json(delivery.data)
        except ValidationError as error:
            return explain(error, Job, _json(delivery.data))
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
        await refuse_id(self._plane, ask, self._nothing_done(ask, execution_id, "invalid", error))

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
        ask = Ask(delivery, self._agent, None, _reply_to(delivery, None))
        await self._dead_end(ask, _execution_id(delivery, None), "error", info)
        del self._crashes[delivery.sequence]

    async def _dead_end(self, ask: Ask, execution_id: str, reason: str, error: ErrorInfo) -> None:
        await finish(self._plane, ask, self._nothing_done(ask, execution_id, reason, error))

    def _nothing_done(self, ask: Ask, execution_id: str, reason: str, error: ErrorInfo) -> Result:
        now = self._plane.now()
        return Result.model_validate(
            {
                "job_id": execution_id,
                "execution_id": execution_id,
                "agent": self._agent_name,
                "status": "dead_lettered",
                "reason": reason,
                "error": error,
                "total_cost": 0,
                "wasted_cost": 0,
                "cost_basis": "billed",
                "queued_at": ask.delivery.published_at,
                "dispatched_at": now,
                "completed_at": now,
                "duration_ms": 0,
            }
        )

    async def _tell_dispatched(self, execution_id: str) -> None:
        step = Progress(execution_id=execution_id, agent=self._agent_name, state="dispatched", at=self._plane.now())
        await self._plane.publisher.transient(subjects.progress(self._agent_name, execution_id), step)


async def _stop_renewing(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _chain(job: Job, agent: Agent) -> tuple[str, ...]:
    """The models to try: the job's own wishes over the agent's, each once."""
    first = job.model or agent.model
    fallbacks = agent.fallback_models if job.fallback_models is None else tuple(job.fallback_models)
    return tuple(dict.fromkeys(model for model in (first, *fallbacks) if model is not None))


def _execution_id(delivery: Delivery, job: Job | None) -> str:
    """The job's id: its own, else that of its message, else made from where it is stored, the same every time."""
    if job is not None and job.job_id is not None:
        return job.job_id
    if job is None and (own := _field(delivery.data, "job_id")) is not None:
        return own
    header = delivery.headers.get(Header.MSG_ID.value, "")
    made = f"job-{delivery.sequence}-{int(delivery.published_at.timestamp())}"
    return header if is_identifier(header) else made


def _reply_to(delivery: Delivery, job: Job | None) -> str | None:
    """Where the answer goes, also that to a job which is otherwise not valid."""
    if job is not None:
        return job.reply_to
    subject = _field(delivery.data, "reply_to")
    return subject if subject is not None and subjects.is_reply_subject(subject) else None


def _field(data: bytes, name: str) -> str | None:
    """A text field of a job that is otherwise not valid."""
    body = _json(data)
    value = body.get(name) if isinstance(body, Mapping) else None
    return value if isinstance(value, str) and is_identifier(value) else None


def _json(data: bytes) -> JsonValue:
    try:
        return from_json(data)
    except ValueError:
        return None
