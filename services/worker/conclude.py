"""The end of a job: one result, one record, one acknowledgement, whatever crashes in between.

The order makes it so. The result decides: its subject takes one message. The record is made from the result that
stands there, so whoever comes second, or comes back after a crash, writes the same. Then whoever waits for the job is
answered and woken, and its task let go of what it held. Only then is the job acknowledged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Literal, cast

import structlog
from pydantic import JsonValue

from breakwater.bus.delivery import dead_letter
from breakwater.bus.errors import AlreadyDecided, BusUnavailable, PublishRefused, TooLarge
from breakwater.bus.records import is_result_of
from breakwater.contracts import subjects
from breakwater.contracts.execution import Cancellation, ErrorInfo, Execution, Reason, Result
from breakwater.contracts.job import Job
from breakwater.contracts.subjects import Stream
from breakwater.policy.ownership import document_as_chosen
from breakwater.policy.record import error_of, status_of, totals, why_unanswered, without_figures
from breakwater.policy.user_message import user_message_for
from breakwater.state.executions import Claim
from breakwater.state.tasks import TaskKey
from services.worker.assignment import Finished, JobDelivery
from services.worker.checkpoint import Checkpoint
from services.worker.context import WorkerContext
from services.worker.dependencies import wake
from services.worker.gates.task import count_ended
from services.worker.progress import ProgressReporter


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
    """The execution whose answer was reused from the cache."""
    dry_run: bool = False
    owner: str | None = None
    digest: str | None = None
    config_version: str | None = None
    trace_id: str | None = None


def conclude(end: Conclusion) -> Result:
    """Sums a job up. Pure."""
    finished, job = end.finished, end.job
    attempts = finished.checkpoint.attempts
    sums = totals(attempts, answered=finished.reason is None)
    error, output = finished.error, finished.output
    if error is not None:
        error = error.model_copy(update={"user_message": user_message_for(error), "figures": None})
        if end.on_error == "message" and output is None:
            output = error.user_message
    started = next((attempt.started_at for attempt in attempts if not attempt.short_circuited), None)
    return Result(
        job_id=end.execution_id,
        execution_id=end.execution_id,
        agent=end.agent_name,
        tenant=job.tenant,
        task_id=job.task_id,
        parent_execution_id=job.parent_execution_id,
        plan_id=job.plan_id,
        status=status_of(finished.reason),
        reason=finished.reason,
        requested_model=end.chain[0],
        chosen_model=finished.chosen_model,
        fallback_chain=end.chain,
        attempts=tuple(map(without_figures, attempts)),
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
        statistics=attempts[-1].statistics if attempts and finished.reason not in {None, "cancelled"} else None,
        finish_reason=finished.finish_reason,
        choices=finished.choices,
        error=error,
        metadata=job.metadata,
        queued_at=end.queued_at,
        dispatched_at=finished.checkpoint.dispatched_at,
        started_at=started,
        completed_at=end.completed_at,
        duration_ms=max(0, round((end.completed_at - end.queued_at).total_seconds() * 1000)),
        cache_hit=end.cached_from is not None,
        cached_from=end.cached_from,
        dry_run=end.dry_run,
        owner=end.owner,
        job_digest=end.digest,
        config_version=end.config_version,
        trace_id=end.trace_id,
        cancellation=finished.cancellation,
        response=finished.response,
    )


def cancelled(at: Checkpoint, cancellation: Cancellation, output: JsonValue = None) -> Finished:
    """The outcome of a cancelled job, with what was published of its answer. Pure."""
    return Finished(at, output, None, "cancelled", error_of(cancellation), cancellation=cancellation)


def stopped(at: Checkpoint, reason: Reason) -> Finished:
    """The outcome of a job without an answer; `reason`: why nothing more is tried. Pure."""
    return Finished(at, None, None, *why_unanswered(at.attempts, reason))


def without_answer(result: Result) -> Result:
    """What stands in place of a result that is too large to be published. What its calls cost is wasted. Pure."""
    message = "the answer and the job's metadata are together too large for a result (8 MB)"
    error = ErrorInfo(kind="invalid", class_="ResultTooLargeError", message=message)
    sums = totals(result.attempts, answered=False)
    return result.model_copy(
        update={
            "status": "dead_lettered",
            "reason": "invalid",
            "error": error.model_copy(update={"user_message": user_message_for(error)}),
            "wasted_cost": sums.wasted_cost,
            "wasted_by_cause": sums.wasted_by_cause,
            "output": None,
            "finish_reason": None,
            "choices": (),
            "response": None,
            "metadata": {},
        }
    )


async def refuse_id(worker: WorkerContext, asked: JobDelivery, refusal: Result) -> None:
    """Refuses a job whose id another execution has: dead-lettered and answered, but not recorded under that id."""
    await _keep_dead_letter(worker, asked, refusal)
    if asked.reply_to is not None:
        await worker.publisher.send(asked.reply_to, reply_of(refusal))
    await worker.publisher.acknowledge(asked.delivery.ack_subject)


async def finish(
    worker: WorkerContext, asked: JobDelivery, result: Result, held: Claim | None = None, *, counted: bool = False
) -> Result:
    """Decides a job, and answers it; returns the result that stands.

    Args:
        worker: this one.
        asked: the job.
        result: what it is to end with.
        held: the claim that it was run under.
        counted: its task knows of its end already.
    """
    if result.status == "dead_lettered":
        await _keep_dead_letter(worker, asked, result)
    for one in _ever_shorter(result):
        if one.status == "dead_lettered" != result.status:
            await _keep_dead_letter(worker, asked, one)
        with suppress(TooLarge):
            standing = await worker.outages.retry_while_unavailable(partial(_decide, worker, asked, one))
            break
    else:
        raise TooLarge(f"{result.execution_id}: not even the shortest result is taken")
    await answer(worker, asked, standing, held, counted=counted)
    return standing


def _ever_shorter(result: Result) -> Iterator[Result]:
    """A result, and what stands in its place where it is too large."""
    yield result
    yield result.model_copy(update={"response": None})
    yield without_answer(result)


async def _keep_dead_letter(worker: WorkerContext, asked: JobDelivery, result: Result) -> None:
    await worker.outages.retry_while_unavailable(
        lambda: dead_letter(
            worker.publisher,
            asked.delivery,
            reason=result.reason or "error",
            error=result.error.message if result.error else "",
            agent=result.agent,
            at=result.completed_at,
            execution_id=result.execution_id,
            withheld=not asked.agent.persist_prompts,
            private=not asked.agent.keeps_error_texts,
        )
    )


async def answer(
    worker: WorkerContext, asked: JobDelivery, result: Result, held: Claim | None = None, *, counted: bool = False
) -> None:
    """Makes sure that the record is stored, answers the callers that wait, lets go of the job, and acknowledges it.

    Whoever comes back after a crash does all of it again.
    """
    await worker.outages.retry_while_unavailable(partial(_record, worker, asked, result))
    if asked.reply_to is not None:
        await worker.publisher.send(asked.reply_to, reply_of(result))
    progress = ProgressReporter(worker, result.agent, result.execution_id, result.parent_execution_id)
    await progress.report(result.status, at=result.completed_at)
    claim = held or Claim(result.execution_id, "")
    ended = await worker.outages.retry_while_unavailable(partial(worker.executions.finish, claim))
    if ended.waiting:
        await wake(worker, ended.waiting)
    if ended.task_id is not None and not counted:
        key = TaskKey(ended.tenant or result.tenant, ended.task_id)
        await worker.outages.retry_while_unavailable(partial(count_ended, worker, key, result, asked.agent))
    if not await worker.publisher.acknowledge(asked.delivery.ack_subject):
        structlog.get_logger().info("ack_unconfirmed", execution_id=result.execution_id)


def reply_of(result: Result) -> bytes:
    """A result with its ids as whoever asked for it chose them."""
    return document_as_chosen(result.json_bytes())


async def _decide(worker: WorkerContext, asked: JobDelivery, result: Result) -> Result:
    """Publishes the result and returns the one that is stored: this one, or that of another worker that was first."""
    subject = subjects.result(result.job_id)
    try:
        private = not asked.agent.keeps_error_texts
        await worker.publisher.event(
            subject, result, id=result.job_id, at=result.completed_at, once=True, private=private
        )
    except AlreadyDecided:
        found = await worker.lookup.last(Stream.RESULTS, subject)
        if found is None:
            raise BusUnavailable(f"{subject} is decided, but the replica that was asked lags") from None
        if is_result_of(found.data, result.execution_id):
            return Result.model_validate_json(found.data)
    return result


async def _record(worker: WorkerContext, asked: JobDelivery, result: Result) -> None:
    record = redacted(worker, asked, result)
    subject = subjects.execution(record.agent, record.execution_id)
    # Placeholders may make it longer than the bus takes. A record without its texts is better than none.
    shorter = record.model_copy(update={"messages": None, "input": None, "params": None})
    shortest = shorter.model_copy(update={"output": None, "metadata": {}, "attempts": ()})
    for one in (record, shorter, shortest):
        try:
            await worker.publisher.event(subject, one, id=one.execution_id, at=one.completed_at, once=True)
        except AlreadyDecided:
            return  # by ourselves before a crash, or by another worker from the same result
        except PublishRefused as error:
            if one is shortest:
                # The job is decided: it is not to come again for what nothing takes.
                structlog.get_logger().error("record_refused", execution_id=one.execution_id, error=str(error))
        else:
            return


def redacted(worker: WorkerContext, asked: JobDelivery, result: Result) -> Execution:
    """The record of a result: with the conversation if it may be kept, and nothing in it that is secret."""
    redact = worker.redactor.json
    messages: JsonValue = None
    given: JsonValue = None
    params: JsonValue = None
    if asked.agent.persist_prompts and asked.job is not None:
        messages = redact(cast(JsonValue, asked.job.chat_messages()))
        given = None if asked.job.input is None else redact(asked.job.input)
        params = redact(asked.job.params) if asked.job.params else {}
    fields = vars(result) | {
        "output": redact(result.output) if asked.agent.persist_responses else None,
        "messages": messages,
        "input": given,
        "params": params,
        "metadata": redact(result.metadata) if result.metadata else {},
        "encrypted": None,  # of a result that was read back with its texts left out
    }
    return Execution.model_validate(fields)
