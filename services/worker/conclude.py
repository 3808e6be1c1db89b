"""The end of a job: one result, one record, one acknowledgement, whatever crashes in between.

The order makes it so. The result decides: its subject takes one message. The record is made from the result that
stands there, so whoever comes second, or comes back after a crash, writes the same. Only then is the job acknowledged.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, cast

import structlog
from pydantic import JsonValue

from breakwater.bus.deadletter import dead_letter
from breakwater.bus.delivery import Delivery
from breakwater.bus.errors import AlreadyDecided, BusUnavailable, PublishRefused
from breakwater.config import Agent
from breakwater.contracts import subjects
from breakwater.contracts.execution import Execution, Result
from breakwater.contracts.job import Job
from breakwater.contracts.subjects import Stream
from breakwater.policy.record import totals
from breakwater.policy.user_message import user_message_for
from services.worker.assignment import Finished
from services.worker.notices import Notices
from services.worker.plane import Plane


@dataclass(frozen=True, slots=True)
class Ask:
    """A delivered job as far as it could be read: who asked for it, and where the answer goes."""

    delivery: Delivery
    agent: Agent
    job: Job | None
    reply_to: str | None


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What is known of a job that has ended."""

    execution_id: str
    agent_name: str
    job: Job
    chain: tuple[str, ...]
    queued_at: datetime
    completed_at: datetime
    finished: Finished
    on_error: Literal["fail", "message"]
    cached_from: str | None = None
    """The execution whose answer was given again."""


def conclude(end: Conclusion) -> Result:
    """Sums a job up. Pure."""
    finished, job = end.finished, end.job
    attempts = finished.checkpoint.attempts
    sums = totals(attempts, answered=finished.reason is None)
    error, output = finished.error, finished.output
    if error is not None:
        error = error.model_copy(update={"user_message": user_message_for(error)})
        if end.on_error == "message":
            output = error.user_message
    started = next((attempt.started_at for attempt in attempts if not attempt.short_circuited), None)
    return Result(
        job_id=end.execution_id,
        execution_id=end.execution_id,
        agent=end.agent_name,
        tenant=job.tenant,
        task_id=job.task_id,
        parent_execution_id=job.parent_execution_id,
        status="succeeded" if finished.reason is None else "dead_lettered",
        reason=finished.reason,
        requested_model=end.chain[0],
        chosen_model=finished.chosen_model,
        fallback_chain=end.chain,
        attempts=attempts,
        attempts_count=len(attempts),
        input_tokens=sums.input_tokens,
        output_tokens=sums.output_tokens,
        cached_tokens=sums.cached_tokens,
        total_tokens=sums.input_tokens + sums.output_tokens,
        total_cost=sums.total_cost,
        wasted_cost=sums.wasted_cost,
        wasted_by_cause=sums.wasted_by_cause,
        cost_basis=sums.cost_basis,
        output=output,
        error=error,
        metadata=job.metadata,
        queued_at=end.queued_at,
        dispatched_at=finished.checkpoint.dispatched_at,
        started_at=started,
        completed_at=end.completed_at,
        duration_ms=max(0, round((end.completed_at - end.queued_at).total_seconds() * 1000)),
        cache_hit=end.cached_from is not None,
        cached_from=end.cached_from,
    )


async def decided(plane: Plane, agent_name: str, execution_id: str) -> Result | None:
    """What stands of a job that was decided before: its result, or its record when the result has aged out."""
    result = await plane.outages.retry_while_unavailable(
        lambda: plane.lookup.last(Stream.RESULTS, subjects.result(execution_id))
    )
    if result is not None:
        return Result.model_validate_json(result.data)
    subject = subjects.execution(agent_name, execution_id)
    record = await plane.outages.retry_while_unavailable(lambda: plane.lookup.last(Stream.EVENTS, subject))
    if record is None:
        return None
    execution = Execution.model_validate_json(record.data)
    return Result(job_id=execution_id, **_fields(execution))


async def refuse_id(plane: Plane, ask: Ask, refusal: Result) -> None:
    """Refuses a job whose id belongs to another one: kept and told to who asked, with no record under that id."""
    await _keep_dead_letter(plane, ask, refusal)
    if ask.reply_to is not None:
        await plane.publisher.transient(ask.reply_to, refusal)
    await ask.delivery.ack_sync()


async def finish(plane: Plane, ask: Ask, result: Result) -> None:
    """Decides a job, and answers it."""
    if result.status == "dead_lettered":
        await _keep_dead_letter(plane, ask, result)
    standing = await _decide(plane, result)
    await answer(plane, ask, standing)


async def _keep_dead_letter(plane: Plane, ask: Ask, result: Result) -> None:
    await plane.outages.retry_while_unavailable(
        lambda: dead_letter(
            plane.publisher,
            ask.delivery,
            reason=result.reason or "error",
            error=result.error.message if result.error else "",
            agent=result.agent,
            at=result.completed_at,
            execution_id=result.execution_id,
        )
    )


async def answer(plane: Plane, ask: Ask, result: Result) -> None:
    """Makes sure that the record stands, tells who waits, and acknowledges the job."""
    await plane.outages.retry_while_unavailable(lambda: _record(plane, ask, result))
    if ask.reply_to is not None:
        await plane.publisher.transient(ask.reply_to, result)
    await Notices(plane, result.agent, result.execution_id, result.parent_execution_id).ended(result)
    if not await ask.delivery.ack_sync():
        structlog.get_logger().info("ack_unconfirmed", execution_id=result.execution_id)


async def _decide(plane: Plane, result: Result) -> Result:
    """Publishes the result, and returns the one that stands: this one, or that of whoever was first."""
    subject = subjects.result(result.job_id)

    async def publish() -> Result:
        try:
            await plane.publisher.event(subject, result, id=result.job_id, at=result.completed_at, once=True)
        except AlreadyDecided:
            found = await plane.lookup.last(Stream.RESULTS, subject)
            if found is None:
                raise BusUnavailable(f"{subject} is decided, but the replica that was asked lags") from None
            return Result.model_validate_json(found.data)
        return result

    return await plane.outages.retry_while_unavailable(publish)


async def _record(plane: Plane, ask: Ask, result: Result) -> None:
    record = redacted(plane, ask, result)
    subject = subjects.execution(record.agent, record.execution_id)
    # Placeholders may make it longer than the bus takes. A record without its texts is better than none.
    shorter = record.model_copy(update={"messages": None, "input": None})
    shortest = shorter.model_copy(update={"output": None, "metadata": {}})
    for one in (record, shorter, shortest):
        try:
            await plane.publisher.event(subject, one, id=one.execution_id, at=one.completed_at, once=True)
        except AlreadyDecided:
            return  # by ourselves before a crash, or by another worker from the same result
        except PublishRefused:
            if one is shortest:
                raise
        else:
            return


def redacted(plane: Plane, ask: Ask, result: Result) -> Execution:
    """The record of a result: with the conversation if it may be kept, and nothing in it that is secret."""
    redact = plane.redactor.json
    messages: JsonValue = None
    given: JsonValue = None
    if ask.agent.persist_prompts and ask.job is not None:
        messages = redact(cast(JsonValue, ask.job.chat_messages()))
        given = redact(ask.job.input)
    fields = _fields(result) | {
        "output": redact(result.output) if ask.agent.persist_responses else None,
        "messages": messages,
        "input": given,
        "metadata": redact(result.metadata),
    }
    return Execution.model_validate(fields)


def _fields(execution: Execution) -> dict[str, Any]:
    return {name: getattr(execution, name) for name in Execution.model_fields}
