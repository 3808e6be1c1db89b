"""The end of a job: one result, one record, one acknowledgement, whatever crashes in between.

The order guarantees that. The result decides: its subject accepts one message. The record is made from the stored
result, so that a second worker, or the same one after a crash, writes the same. Then the worker answers callers,
wakes dependent jobs and counts the job in its task. Only then does it acknowledge the job.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import cast

import structlog
from pydantic import JsonValue

from breakwater.calls.assignment import Assignment, Checkpoint, JobEnd
from breakwater.calls.providers.base import Answer
from breakwater.calls.rules.unanswered import why_unanswered
from breakwater.calls.rules.user_message import user_message_for
from breakwater.dialects.rules import conversation_of, input_of, params_of
from breakwater.jobs.contract.execution import Attempt, Cancellation, ErrorInfo, Execution, Reason, Result
from breakwater.jobs.rules.record import error_of, status_of, totals, without_figures
from breakwater.jobs.rules.runs import run_id, run_of
from breakwater.jobs.store.executions import Claim
from breakwater.jobs.store.records import is_result_of
from breakwater.jobs.store.task_keys import TaskKey
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.delivery import dead_letter
from breakwater.kernel.nats.errors import AlreadyDecidedError, MessageTooLargeError, PublishRefusedError
from breakwater.kernel.nats.subjects import Stream
from services.worker.attempt_record import recorded_attempt
from services.worker.context import WorkerContext
from services.worker.dependencies import wake
from services.worker.plans import reach_stage
from services.worker.progress import ProgressReporter

NO_ANSWER = Answer(None)


def conclude(
    job: Assignment,
    end: JobEnd,
    completed_at: datetime,
    config_version: str,
    *,
    cached_from: str | None = None,
    dry_run: bool = False,
    trace_id: str | None = None,
) -> Result:
    """Builds the result of a job. Pure. `cached_from` is the execution whose answer was reused."""
    ids = job.ids
    chain = job.chain
    # The clock of NATS may be ahead of this worker's, but no step of a job may precede its queueing.
    queued_at = min(job.delivery.queued_at, end.checkpoint.dispatched_at)
    attempts = end.checkpoint.attempts
    sums = totals(attempts, answered=end.reason is None)
    error = end.error
    answer = end.answer or NO_ANSWER
    output = answer.output
    if error is not None:
        error = error.model_copy(update={"user_message": user_message_for(error), "figures": None})
        if job.agent.on_error == "message" and output is None:
            output = error.user_message
    started = next((attempt.started_at for attempt in attempts if not attempt.short_circuited), None)
    return Result(
        job_id=ids.job_id,
        execution_id=ids.execution_id,
        agent=job.agent_name,
        api=job.job.api,
        tenant=job.job.tenant,
        task_id=ids.task_id,
        task_key=ids.task_key,
        parent_execution_id=ids.parent,
        parent_job_id=job.job.parent_execution_id,
        plan_id=job.job.plan_id,
        plan_key=ids.plan_key,
        run_id=job.run_id,
        status=status_of(end.reason),
        reason=end.reason,
        requested_model=chain[0],
        chosen_model=end.chosen_model,
        fallback_chain=chain,
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
        statistics=attempts[-1].statistics if attempts and end.reason not in {None, "cancelled"} else None,
        finish_reason=answer.finish_reason,
        choices=answer.choices,
        error=error,
        metadata=job.job.metadata,
        queued_at=queued_at,
        dispatched_at=end.checkpoint.dispatched_at,
        started_at=started,
        completed_at=completed_at,
        duration_ms=max(0, round((completed_at - queued_at).total_seconds() * 1000)),
        cache_hit=cached_from is not None,
        cached_from=cached_from,
        dry_run=dry_run,
        owner=job.owner,
        job_digest=job.digest,
        config_version=config_version,
        trace_id=trace_id,
        cancellation=end.cancellation,
        response=answer.response,
    )


def cancelled(checkpoint: Checkpoint, cancellation: Cancellation, answer: Answer | None = None) -> JobEnd:
    """Builds the outcome of a cancelled job, with the published part of its answer. Pure."""
    return JobEnd(checkpoint, answer, "cancelled", error_of(cancellation), cancellation=cancellation)


def stopped(checkpoint: Checkpoint, reason: Reason) -> JobEnd:
    """Builds the outcome of a job that stops trying, for a reason, without an answer. Pure."""
    return JobEnd(checkpoint, None, *why_unanswered(checkpoint.attempts, reason))


def without_answer(result: Result) -> Result:
    """Builds the substitute for a result that is too large to be published. The cost of its calls is wasted. Pure."""
    message = "the answer and the job's metadata together exceed the size limit of a result (8 MB)"
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


async def end_without_run(worker: WorkerContext, job: Assignment, reason: Reason, error: ErrorInfo) -> None:
    """Decides a job that can't run, or can't run to its end."""
    attempts: list[Attempt] = []
    if not job.delivery.is_first:
        # An earlier delivery may have made calls, whose cost the job keeps.
        while (attempt := await recorded_attempt(worker, job, len(attempts) + 1)) is not None:
            attempts.append(attempt)
    if attempts and not job.problem:
        # The job may belong to its parent's task without naming it.
        first = attempts[0]
        tenant = job.job.tenant
        task = None if first.task_key is None else run_id(tenant, first.task_key)
        run = job.run_id if task is None else run_of(job.ids, tenant, run_of_parent=task)
        ids = replace(job.ids, task_id=first.task_id, task_key=first.task_key)
        job = replace(job, ids=ids, run_id=run)
    await finish(worker, job, result_without_run(worker, job, reason, error, tuple(attempts)))


def result_without_run(
    worker: WorkerContext, job: Assignment, reason: Reason, error: ErrorInfo, attempts: tuple[Attempt, ...] = ()
) -> Result:
    """Builds the result of a job that can't run, or can't run to its end."""
    now = worker.now()
    checkpoint = Checkpoint(dispatched_at=now, deadline=now, attempts=attempts)
    return conclude(job, JobEnd(checkpoint, None, reason, error), now, worker.config_version)


async def answer_from_decision(worker: WorkerContext, job: Assignment, decided: Result) -> None:
    """Answers from an earlier decision, or refuses another job with the same id."""
    if decided.agent == job.agent_name and decided.job_digest in (None, job.digest):
        await answer(worker, job, decided)
    else:
        await refuse_id(worker, job)


async def refuse_id(worker: WorkerContext, job: Assignment) -> None:
    """Refuses a job whose id belongs to another execution: dead-letters and answers it, but records nothing."""
    message = f"job_id: {job.ids.job_id!r} is already the id of another job; choose another id"
    error = ErrorInfo(kind="invalid", class_="IdConflictError", message=message, user_message=message)
    refusal = result_without_run(worker, job, "invalid", error)
    await _keep_dead_letter(worker, job, refusal)
    if job.job.reply_to is not None:
        await worker.publisher.send(job.job.reply_to, refusal.json_bytes())
    await worker.publisher.acknowledge(job.delivery.ack_subject)


async def finish(
    worker: WorkerContext,
    job: Assignment,
    result: Result,
    *,
    counted: bool = False,
    progress: ProgressReporter | None = None,
) -> Result:
    """Decides a job and answers it. Returns the result that counts, which may be another worker's.

    `progress` has reported the steps of the job. With `counted`, its end is already counted in its task.
    """
    if result.status == "dead_lettered":
        await _keep_dead_letter(worker, job, result)
    is_embeddings = job.job.api == "embeddings"
    for candidate in _shortened(result, may_omit_response=not is_embeddings):
        loses_answer = candidate.status == "dead_lettered" and result.status != "dead_lettered"
        if loses_answer:
            await _keep_dead_letter(worker, job, candidate)
        with suppress(MessageTooLargeError):
            decided = await _decide(worker, job, candidate)
            await answer(worker, job, decided, counted=counted, progress=progress)
            return decided
    raise MessageTooLargeError(f"{result.execution_id}: even the shortest result was refused")


def _shortened(result: Result, *, may_omit_response: bool) -> Generator[Result]:
    """Yields a result, then shorter ones in case the server refuses it as too large.

    With `may_omit_response`, the first of these only lacks the response. The last one has no answer.
    """
    yield result
    if may_omit_response:
        yield result.model_copy(update={"response": None})
    yield without_answer(result)


async def _keep_dead_letter(worker: WorkerContext, job: Assignment, result: Result) -> None:
    await worker.outages.retry_while_unavailable(
        lambda: dead_letter(
            worker.publisher,
            job.delivery,
            reason=result.reason or "error",
            error=result.error.message if result.error else "",
            agent=result.agent,
            at=result.completed_at,
            execution_id=result.execution_id,
            job_id=result.job_id,
            withheld=not job.agent.persist_prompts,
            private=not job.agent.keeps_error_texts,
        )
    )


async def answer(
    worker: WorkerContext,
    job: Assignment,
    result: Result,
    *,
    counted: bool = False,
    progress: ProgressReporter | None = None,
) -> None:
    """Stores the record, answers waiting callers, releases the claim, and acknowledges the delivery.

    A crash repeats all of it.
    """
    is_recorded_now = await _record(worker, job, result)
    if result.plan_id is not None:
        await reach_stage(worker, job, result.status, result.reason)
    if job.job.reply_to is not None:
        await worker.publisher.send(job.job.reply_to, result.json_bytes())
    if is_recorded_now:
        # Only the worker that stores the record reports it, so that the last step is reported once.
        progress = progress or ProgressReporter(worker, job)
        await progress.report(result.status, at=result.completed_at)
    # Without a claim of this handling, that of any other ends.
    claim = job.claim if job.claim in worker.leases.claims else Claim(job.execution_id, "")
    if job.job.keep_chunks:
        worker.room.finish_soon(result.execution_id)
    ended = await worker.outages.retry_while_unavailable(partial(worker.executions.finish, claim))
    if ended.waiting:
        await wake(worker, ended.waiting)
    if ended.task_key is not None and not counted:
        key = TaskKey(ended.tenant or result.tenant, ended.task_key)
        await worker.outages.retry_while_unavailable(partial(worker.guards.count_ended, key, result, job.agent.guard))
    if not await worker.publisher.acknowledge(job.delivery.ack_subject):
        structlog.get_logger().info("ack_unconfirmed", execution_id=result.execution_id)


async def _decide(worker: WorkerContext, job: Assignment, result: Result) -> Result:
    """Publishes the result. Returns the stored one, which is another worker's if that worker was first."""
    subject = subjects.result(result.execution_id)
    private = not job.agent.keeps_error_texts
    publish = partial(
        worker.publisher.event,
        subject,
        result,
        id=result.execution_id,
        at=result.completed_at,
        once=True,
        private=private,
    )
    try:
        await worker.outages.retry_while_unavailable(publish)
    except AlreadyDecidedError:
        winner = await worker.outages.retry_while_unavailable(partial(worker.lookup.winner, Stream.RESULTS, subject))
        if is_result_of(winner.data, result.execution_id):
            return Result.model_validate_json(winner.data)
    return result


async def _record(worker: WorkerContext, job: Assignment, result: Result) -> bool:
    """Publishes the record. Returns False if the log already has it."""
    record = redacted(worker, job, result)
    subject = subjects.execution(record.agent, record.execution_id)
    publish = partial(worker.publisher.event, subject, id=record.execution_id, at=record.completed_at, once=True)
    refusal: PublishRefusedError | None = None
    for shortened in _without_texts(record):
        try:
            await worker.outages.retry_while_unavailable(partial(publish, shortened))
        except AlreadyDecidedError:
            return False  # this worker before a crash, or another one, has recorded the same result
        except PublishRefusedError as error:
            refusal = error
        else:
            return True
    # The job is decided. Delivering it again would not help: the server refuses every form of the record.
    structlog.get_logger().error("record_refused", execution_id=record.execution_id, error=str(refusal))
    return True


def _without_texts(record: Execution) -> Generator[Execution]:
    """Yields a record, then shorter ones in case placeholders have made it too long for the server."""
    yield record
    shorter = record.model_copy(update={"messages": None, "input": None, "params": None})
    yield shorter
    yield shorter.model_copy(update={"output": None, "metadata": {}, "attempts": ()})


def redacted(worker: WorkerContext, job: Assignment, result: Result) -> Execution:
    """Builds the redacted record of a result, with the conversation if the agent keeps it."""
    redact = worker.redactor.json
    messages: JsonValue = None
    redacted_input: JsonValue = None
    params: JsonValue = None
    if job.agent.persist_prompts and not job.problem:
        messages = redact(cast(JsonValue, conversation_of(job.job)))
        job_input = input_of(job.job)
        redacted_input = None if job_input is None else redact(job_input)
        job_params = params_of(job.job)
        params = redact(job_params) if job_params else {}
    fields = vars(result) | {
        "output": redact(result.output) if job.agent.persist_responses else None,
        "messages": messages,
        "input": redacted_input,
        "params": params,
        "metadata": redact(result.metadata) if result.metadata else {},
        "encrypted": None,  # set in a result that was read back without its texts
    }
    return Execution.model_validate(fields)
