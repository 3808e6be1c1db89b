"""The record of attempts in the log, where each subject takes one message: whoever writes first is right."""

from __future__ import annotations

from datetime import datetime

from breakwater.bus.errors import AlreadyDecided, BusUnavailable
from breakwater.contracts import subjects
from breakwater.contracts.execution import Attempt, CostBasis, ErrorInfo, Outcome
from breakwater.contracts.subjects import Stream
from breakwater.policy.price import Usage
from services.worker.admission import ClaimLost
from services.worker.assignment import Assignment
from services.worker.checkpoint import InFlight
from services.worker.plane import Plane


class AttemptLog:
    """Records the attempts of one job."""

    def __init__(self, plane: Plane, job: Assignment) -> None:
        self._plane = plane
        self._job = job

    def describe(
        self,
        flight: InFlight,
        started_at: datetime,
        outcome: Outcome,
        *,
        cost: int | None,
        basis: CostBasis,
        usage: Usage | None = None,
        error: ErrorInfo | None = None,
        counted: bool = False,
        refused_by: str | None = None,
        refused_cap: int | None = None,
    ) -> Attempt:
        """An attempt that has just ended, as it will be recorded."""
        completed_at = self._plane.now()
        return Attempt(
            attempt_id=f"{self._job.execution_id}:{flight.number}",
            execution_id=self._job.execution_id,
            agent=self._job.agent_name,
            tenant=self._job.job.tenant,
            task_id=self._job.job.task_id,
            number=flight.number,
            model=flight.model,
            provider=flight.provider,
            started_at=started_at,
            completed_at=completed_at,
            duration_ms=max(0, round((completed_at - started_at).total_seconds() * 1000)),
            input_tokens=usage.input_tokens if usage else None,
            output_tokens=usage.output_tokens if usage else None,
            cached_tokens=usage.cached_tokens if usage else None,
            reasoning_tokens=usage.reasoning_tokens if usage else None,
            cost=cost,
            cost_basis=basis,
            reserved=None if flight.reserved_at is None else flight.reserved,
            reserved_at=flight.reserved_at,
            outcome=outcome,
            error=error,
            short_circuited=outcome == "short_circuited",
            refused_by=refused_by,
            refused_cap=refused_cap,
            counts_for_breaker=counted,
            breaker_version=flight.breaker_version,
            cause=flight.cause,
            backoff_ms=flight.backoff_ms,
            dropped_messages=flight.dropped_messages,
        )

    async def keep(self, attempt: Attempt) -> None:
        """Records an attempt, however long NATS is away.

        Raises:
            ClaimLost: another worker recorded this attempt first.
        """
        subject = subjects.attempt(attempt.agent, attempt.execution_id, attempt.number)

        async def publish() -> None:
            try:
                await self._plane.publisher.event(
                    subject,
                    attempt,
                    id=attempt.attempt_id,
                    at=attempt.completed_at,
                    once=True,
                    traceparent=self._job.traceparent,
                )
            except AlreadyDecided:
                # Ours, if the acknowledgement of an earlier try was lost; else somebody has taken the job over.
                found = await self._plane.lookup.last(Stream.EVENTS, subject)
                if found is None:
                    raise BusUnavailable(f"{subject} is recorded, but the replica that was asked lags") from None
                if found.data != attempt.json_bytes():
                    raise ClaimLost(attempt.execution_id) from None

        await self._plane.outages.retry_while_unavailable(publish)

    async def find(self, number: int) -> Attempt | None:
        """What is recorded of an attempt, by whomever."""
        return await _find(self._plane, self._job.agent_name, self._job.execution_id, number)


async def recorded_attempts(plane: Plane, agent: str, execution_id: str) -> tuple[Attempt, ...]:
    """All that is recorded of a job, in order."""
    found: list[Attempt] = []
    while (attempt := await _find(plane, agent, execution_id, len(found) + 1)) is not None:
        found.append(attempt)
    return tuple(found)


async def _find(plane: Plane, agent: str, execution_id: str, number: int) -> Attempt | None:
    subject = subjects.attempt(agent, execution_id, number)
    found = await plane.outages.retry_while_unavailable(lambda: plane.lookup.last(Stream.EVENTS, subject))
    return None if found is None else Attempt.model_validate_json(found.data)
