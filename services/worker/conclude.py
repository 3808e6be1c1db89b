"""The end of a job: one result, one record, one acknowledgement, whatever crashes in between.

The order guarantees that. The result decides: its subject accepts one message. The record is made from the stored
result, so that a second worker, or the same one after a crash, writes the same. Then the worker answers callers,
wakes dependent jobs and counts the job in its task. Only then does it acknowledge the job.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial

import structlog

from breakwater.calls.assignment import Assignment
from breakwater.jobs.contract.execution import Attempt, ErrorInfo, Reason, Result
from breakwater.jobs.rules.runs import run_id, run_of
from breakwater.jobs.store.executions import Claim
from breakwater.jobs.store.records import is_result_of
from breakwater.jobs.store.task_keys import TaskKey
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.delivery import dead_letter
from breakwater.kernel.nats.errors import AlreadyDecidedError, MessageTooLargeError, PublishRefusedError
from breakwater.kernel.nats.subjects import Stream
from breakwater.services.worker.attempt_record import recorded_attempt
from breakwater.services.worker.context import WorkerContext
from breakwater.services.worker.dependencies import wake
from breakwater.services.worker.plans import reach_stage
from breakwater.services.worker.progress import ProgressReporter
from breakwater.services.worker.results import records_of, result_without_run, shorter_results


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
    result = result_without_run(worker, job, reason, error, tuple(attempts))
    await finish(worker, job, result)


async def answer_from_decision(worker: WorkerContext, job: Assignment, decided: Result) -> None:
    """Answers from an earlier decision, or refuses another job with the same id."""
    # A body that is gone, as its job has ended, can't be compared.
    is_same_job = job.delivery.body_is_lost or decided.job_digest in (None, job.digest)
    if decided.agent == job.agent_name and is_same_job:
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
    has_dead_letter = False
    for candidate in shorter_results(result):
        # Nobody wants to see or repeat a probe that failed: the breaker has counted it.
        if candidate.status == "dead_lettered" and not has_dead_letter and not job.is_probe:
            await _keep_dead_letter(worker, job, candidate)
            has_dead_letter = True
        with suppress(MessageTooLargeError):
            decided = await _decide(worker, job, candidate)
            await answer(worker, job, decided, counted=counted, progress=progress)
            return decided
    raise MessageTooLargeError(f"{result.execution_id}: even the shortest result was refused")


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

    A crash repeats all of it, except that a large body may be gone then: nothing that comes before needs it again.
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
    if job.delivery.body is not None:
        await worker.bodies.remove(job.delivery.body, result)
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
    subject = subjects.execution(result.agent, result.execution_id)
    publish = partial(worker.publisher.event, subject, id=result.execution_id, at=result.completed_at, once=True)
    refusal: PublishRefusedError | None = None
    for record in records_of(job, result, worker.redactor):
        try:
            await worker.outages.retry_while_unavailable(partial(publish, record))
        except AlreadyDecidedError:
            return False  # this worker before a crash, or another one, has recorded the same result
        except PublishRefusedError as error:
            refusal = error
        else:
            return True
    # The job is decided. Delivering it again would not help: the server refuses every form of the record.
    structlog.get_logger().error("record_refused", execution_id=result.execution_id, error=str(refusal))
    return True
