"""One call to a provider, and the attempt that comes of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import datetime

from pydantic import JsonValue

from breakwater import tracing
from breakwater.contracts.execution import Attempt, CostBasis, ErrorInfo
from breakwater.policy.classify import Classification, classify
from breakwater.policy.output import Invalid, Valid
from breakwater.policy.price import Usage
from breakwater.providers.base import Answer, Call, CallFailed
from services.worker.assignment import Assignment
from services.worker.attempt_log import AttemptLog
from services.worker.checkpoint import InFlight
from services.worker.plane import Plane
from services.worker.repairs import Correction, Message

MAX_ANSWER_BYTES = 4 * 1024 * 1024
"""As JSON. Result and record hold it beside the attempts, and the NATS servers take messages of up to 8 MB."""

MAX_PROBLEMS_TEXT = 2_000


@dataclass(frozen=True, slots=True)
class Ended:
    """An attempt that has ended, and what is needed to decide what follows.

    Attributes:
        attempt: as it will be recorded.
        verdict: what the failure means; None when it succeeded.
        output: the answer, checked against the agent's schema.
        credential: the reading of the key that the call was made with, where it failed.
        correction: what to tell the model, where its answer did not satisfy the schema.
    """

    attempt: Attempt
    verdict: Classification | None
    output: JsonValue = None
    credential: int | None = None
    correction: Correction | None = None


class Caller:
    """Makes the calls of one job."""

    def __init__(self, plane: Plane, job: Assignment, log: AttemptLog) -> None:
        self._plane = plane
        self._job = job
        self._log = log

    async def call(self, flight: InFlight, messages: list[Message], timeout_s: float) -> Ended:
        """Calls once. What it returns is not yet recorded."""
        plane, job = self._plane, self._job
        started_at = plane.now()
        span = tracing.begin(
            f"chat {flight.model}",
            parent=job.traceparent,
            kind="client",
            attributes=tracing.attempt_attributes(
                agent=job.agent_name,
                provider=flight.provider,
                model=flight.model,
                execution_id=job.execution_id,
                number=flight.number,
                cause=flight.cause,
            ),
        )
        name = plane.config.name_at_provider(flight.provider, flight.model)
        attempt_id = f"{job.execution_id}:{flight.number}"
        call = Call(
            attempt_id,
            name,
            messages,
            job.params,
            timeout_s,
            span.traceparent,
            agent=job.agent_name,
            execution_id=job.execution_id,
            tenant=job.job.tenant,
            task_id=job.job.task_id,
            input=job.job.input,
            output_schema=job.output_guard.schema
            if job.output_guard is not None and job.output_guard.rules.native
            else None,
            strict_output=job.output_guard is not None
            and job.output_guard.rules.strict
            and job.output_guard.fits_strict_mode,
        )
        try:
            try:
                answer = await plane.providers[flight.provider].perform(call)
            except CallFailed as failed:
                ended = self._failed(flight, started_at, failed, timeout_s)
            else:
                ended = self._answered(flight, started_at, answer)
        except BaseException as error:
            # The worker stops, or has a fault: there will be no attempt to tell of.
            span.end(error=type(error).__name__)
            raise
        span.end(
            error=ended.verdict.class_name if ended.verdict is not None else None,
            attributes=tracing.outcome_attributes(ended.attempt),
        )
        return ended

    def _answered(self, flight: InFlight, started_at: datetime, answer: Answer) -> Ended:
        cost, basis = self._cost_of(flight, answer.usage, answer.cost)
        guard = self._job.output_guard
        if (size := len(_text(answer.output).encode())) > MAX_ANSWER_BYTES:
            text = f"the answer has {size} bytes; at most {MAX_ANSWER_BYTES} can be stored"
            verdict = Classification(
                "client", "AnswerTooLargeError", text, None, retryable=False, counts_for_breaker=False
            )
            attempt = self._log.describe(
                flight, started_at, "error", cost=cost, basis=basis, usage=answer.usage, error=verdict.error_info()
            )
            return Ended(attempt, verdict)
        checked = Valid(answer.output) if guard is None else guard.check(answer.output)
        if isinstance(checked, Invalid):
            # Redacted as a whole, and cut then: a part of a secret is not known for one.
            text = self._plane.redactor.text("; ".join(checked.problems))[:MAX_PROBLEMS_TEXT]
            text = f"the answer does not satisfy the output schema: {text}"
            verdict = Classification(
                "logic", "InvalidOutputError", text, None, retryable=False, counts_for_breaker=False
            )
            attempt = self._log.describe(
                flight, started_at, "error", cost=cost, basis=basis, usage=answer.usage, error=verdict.error_info()
            )
            correction = Correction(answer=_text(answer.output), problems=checked.problems)
            return Ended(attempt, verdict, correction=correction)
        attempt = self._log.describe(flight, started_at, "success", cost=cost, basis=basis, usage=answer.usage)
        return Ended(attempt, None, checked.value)

    def _failed(self, flight: InFlight, started_at: datetime, failed: CallFailed, timeout_s: float) -> Ended:
        agent = self._job.agent
        verdict = classify(failed.failure, self._plane.now())
        counted = verdict.counts_for_breaker or (
            agent.breaker_counts_auth_errors and verdict.status_code in {401, 402, 403}
        )
        if verdict.kind == "timeout" and timeout_s < agent.timeout_s:
            counted = False  # the job's own deadline cut it short, which says nothing of the model
        cost, basis = cost_of_failure(flight, maybe_billed=failed.maybe_billed)
        told = failed.cost
        if told is None and failed.usage is not None:
            told = self._plane.cost(flight.provider, flight.model, failed.usage)
        if told is not None:
            cost, basis = told, "billed"
        attempt = self._log.describe(
            flight,
            started_at,
            "error",
            cost=cost,
            basis=basis,
            usage=failed.usage,
            error=self._told(verdict),
            counted=counted,
        )
        return Ended(attempt, verdict, credential=failed.credential)

    def _told(self, verdict: Classification) -> ErrorInfo:
        """The error as it may be told, with the identity of what is told: a secret must not tell errors apart."""
        return replace(verdict, message=self._plane.redactor.text(verdict.message)).error_info()

    def _cost_of(self, flight: InFlight, usage: Usage, reported: int | None) -> tuple[int | None, CostBasis]:
        cost = reported if reported is not None else self._plane.cost(flight.provider, flight.model, usage)
        if cost is not None:
            return cost, "billed"
        # Priced, but the provider did not say how much was used: what was held for the call is the bound.
        return flight.reserved, "unknown" if flight.reserved is None else "estimated"


def cost_of_failure(flight: InFlight, *, maybe_billed: bool) -> tuple[int | None, CostBasis]:
    """What a call without an answer cost: nothing, or at most what was held for it."""
    if not maybe_billed:
        return 0, "billed"
    return flight.reserved, "unknown" if flight.reserved is None else "estimated"


def _text(output: JsonValue) -> str:
    return output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
