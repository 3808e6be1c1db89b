"""The result of a job and its record, as values. Nothing here publishes them."""

from __future__ import annotations

from collections.abc import Generator
from datetime import datetime
from typing import cast

from pydantic import JsonValue

from breakwater.calls.assignment import Assignment, Checkpoint, JobEnd
from breakwater.calls.providers.base import Answer
from breakwater.calls.rules.unanswered import why_unanswered
from breakwater.calls.rules.user_message import user_message_for
from breakwater.dialects.rules.native_requests import conversation_of, input_of, params_of
from breakwater.jobs.contract.execution import Attempt, Cancellation, ErrorInfo, Execution, Reason, Result
from breakwater.jobs.rules.record import error_of, status_of, totals, without_figures
from breakwater.kernel.types import unchecked
from breakwater.redaction.rules.redact import Redactor
from breakwater.services.worker.context import WorkerContext

NO_ANSWER = Answer(None)
_NOT_RECORDED = Result.model_fields.keys() - Execution.model_fields.keys()


def cancelled(checkpoint: Checkpoint, cancellation: Cancellation, answer: Answer | None = None) -> JobEnd:
    """Builds the outcome of a cancelled job, with the published part of its answer."""
    return JobEnd(checkpoint, answer, "cancelled", error_of(cancellation), cancellation=cancellation)


def stopped(checkpoint: Checkpoint, reason: Reason) -> JobEnd:
    """Builds the outcome of a job that stops trying, for a reason, without an answer."""
    return JobEnd(checkpoint, None, *why_unanswered(checkpoint.attempts, reason))


def result_of(
    job: Assignment,
    end: JobEnd,
    completed_at: datetime,
    config_version: str,
    *,
    requested_model_cost: int | None = None,
    trace_id: str | None = None,
) -> Result:
    """Builds the result of a job. `trace_id` is that of its calls."""
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
    return _result(
        **job.names,
        api=job.job.api,
        status=status_of(end.reason),
        reason=end.reason,
        requested_model=job.chain[0],
        chosen_model=end.chosen_model,
        fallback_chain=job.chain,
        own_rules=tuple(job.job.own_rules),
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
        requested_model_cost=requested_model_cost,
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
        cache_hit=end.cached_from is not None,
        cached_from=end.cached_from,
        dry_run=end.dry_run,
        owner=job.owner,
        submitted_by=job.submitted_by,
        user=job.attribution.user,
        team=job.attribution.team,
        job_digest=job.digest,
        config_version=config_version,
        trace_id=trace_id,
        cancellation=end.cancellation,
        limits=end.limits,
        response=answer.response,
    )


_result = unchecked(Result)


def result_without_run(
    worker: WorkerContext, job: Assignment, reason: Reason, error: ErrorInfo, attempts: tuple[Attempt, ...] = ()
) -> Result:
    """Builds the result of a job that can't run, or can't run to its end."""
    now = worker.now()
    checkpoint = Checkpoint(dispatched_at=now, deadline=now, attempts=attempts)
    return result_of(job, JobEnd(checkpoint, None, reason, error), now, worker.config_version)


def shorter_results(result: Result) -> Generator[Result]:
    """Yields a result, then shorter ones in case the server refuses it as too large.

    The first of these only lacks the response, which is all that a job for embeddings asks for. The last one has no
    answer.
    """
    yield result
    if result.api != "embeddings":
        yield result.model_copy(update={"response": None})
    yield _without_answer(result)


def _without_answer(result: Result) -> Result:
    """Builds the substitute for a result that is too large to be published. The cost of its calls is wasted."""
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
            "requested_model_cost": None,
            "output": None,
            "finish_reason": None,
            "choices": (),
            "response": None,
            "metadata": {},
        }
    )


def records_of(job: Assignment, result: Result, redactor: Redactor) -> Generator[Execution]:
    """Yields the redacted record of a result, with the conversation if the agent keeps it, and then shorter ones.

    Placeholders may have made the first one too long for the server.
    """
    redact = redactor.json
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
    for name in _NOT_RECORDED:
        del fields[name]
    record = Execution.of_valid(fields)
    yield record
    shorter = record.model_copy(update={"messages": None, "input": None, "params": None})
    yield shorter
    yield shorter.model_copy(update={"output": None, "metadata": {}, "attempts": ()})
