"""The record of an attempt in the log, which accepts one message for the subject of each: the first write wins."""

from __future__ import annotations

from datetime import datetime

from breakwater.calls.assignment import Assignment, InFlight
from breakwater.calls.gate import Refused
from breakwater.jobs.contract.execution import Attempt, ErrorInfo, Outcome
from breakwater.jobs.store.executions import ClaimLostError
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.errors import AlreadyDecidedError
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.types import unchecked
from breakwater.services.worker.call_cost import NO_COST, CallCost
from breakwater.services.worker.context import WorkerContext


def attempt_of(
    job: Assignment,
    flight: InFlight,
    started_at: datetime,
    outcome: Outcome,
    *,
    spent: CallCost = NO_COST,
    finish_reason: str | None = None,
    error: ErrorInfo | None = None,
    counted: bool = False,
    refusal: Refused | None = None,
) -> Attempt:
    """Builds the record of an attempt that has just ended."""
    completed_at = job.now()
    usage = spent.usage
    return _attempt(
        attempt_id=job.attempt_id(flight.number),
        execution_id=job.execution_id,
        job_id=job.ids.job_id,
        agent=job.agent_name,
        tenant=job.job.tenant,
        task_id=job.ids.task_id,
        task_key=job.ids.task_key,
        submitted_by=job.submitted_by,
        user=job.attribution.user,
        team=job.attribution.team,
        caller=job.caller,
        cost_tags=dict(job.cost_tags),
        number=flight.number,
        model=flight.model,
        provider=flight.provider,
        deployment=flight.deployment,
        provider_key=flight.provider_key,
        started_at=started_at,
        completed_at=completed_at,
        duration_ms=max(0, round((completed_at - started_at).total_seconds() * 1000)),
        input_tokens=usage.input_tokens if usage else None,
        output_tokens=usage.output_tokens if usage else None,
        cached_tokens=usage.cached_tokens if usage else None,
        reasoning_tokens=usage.reasoning_tokens if usage else None,
        usage_problem=spent.usage_problem,
        response_model=spent.response_model,
        finish_reason=finish_reason,
        first_token_ms=flight.first_token_ms,
        chunks=flight.chunks,
        cost=spent.cost,
        cost_basis=spent.cost_basis if refusal is None else "none",
        reserved=None if flight.reserved_at is None and refusal is None else flight.reserved,
        reserved_tokens=None if flight.input_tokens is None else flight.reserved_tokens,
        reserved_at=flight.reserved_at,
        task_asked_at=flight.task_asked_at,
        outcome=outcome,
        error=error if refusal is None else refusal.error,
        short_circuited=refusal is not None,
        refused_by=refusal and refusal.refused_by,
        refused_cap=refusal and refusal.refused_cap,
        refused_reason=refusal and refusal.reason,
        ends_chain=refusal is not None and refusal.ends_chain,
        statistics=refusal and refusal.statistics,
        counts_for_breaker=counted,
        breaker_version=flight.breaker_version,
        cause=flight.cause,
        backoff_ms=flight.backoff_ms,
        dropped_messages=flight.dropped_messages,
        dropped_params=flight.dropped_params,
    )


_attempt = unchecked(Attempt)


async def record(worker: WorkerContext, job: Assignment, attempt: Attempt) -> int:
    """Records an attempt in the log, and returns the sequence of the event.

    Raises:
        ClaimLostError: another worker recorded this attempt first.
        BusUnavailableError: record it again.
    """
    subject = subjects.attempt(attempt.agent, attempt.execution_id, attempt.number)
    try:
        stored = await worker.publisher.event(
            subject, attempt, id=attempt.attempt_id, at=attempt.completed_at, once=True, traceparent=job.traceparent
        )
    except AlreadyDecidedError:
        # It is our own record if the acknowledgement of an earlier try was lost. Otherwise, another worker has taken
        # over the job.
        recorded_event = await worker.lookup.winner(Stream.EVENTS, subject)
        if recorded_event.data != attempt.json_bytes():
            raise ClaimLostError(attempt.execution_id) from None
        return recorded_event.sequence
    return stored.sequence


async def recorded_attempt(worker: WorkerContext, job: Assignment, number: int) -> Attempt | None:
    """Returns the record of an attempt, written by any worker."""
    subject = subjects.attempt(job.agent_name, job.execution_id, number)
    event = await worker.outages.retry_while_unavailable(lambda: worker.lookup.last(Stream.EVENTS, subject))
    return None if event is None else Attempt.model_validate_json(event.data)
