"""The run of one job: attempts along the chain of models, until one succeeds or nothing is left to try."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta

from breakwater.contracts import subjects
from breakwater.contracts.execution import Attempt, Cause, CostBasis, ErrorInfo, Progress, Reason
from breakwater.policy.classify import Verdict, classify
from breakwater.policy.retry import NextModel, Retry, Stop, after_failure
from breakwater.providers.base import Answer, Call, CallFailed
from services.worker.admission import ClaimLost, Denial, admit
from services.worker.assignment import Assignment, Finished, Sleeping
from services.worker.attempt_log import AttemptLog
from services.worker.checkpoint import Checkpoint, InFlight
from services.worker.plane import Plane

LONG_WAIT_S = 10.0
"""A longer wait is given to the bus, so that it holds no slot here and survives a restart."""

WORKER_LOST = Verdict(
    "worker_lost", "WorkerLostError", "the worker was lost while the call was under way", None, True, False
)


class Run:
    """One job on one worker. What must survive a crash is in its checkpoint; the rest is derived."""

    def __init__(self, plane: Plane, job: Assignment, checkpoint: Checkpoint, *, resumed: bool) -> None:
        self._plane = plane
        self._job = job
        self._at = checkpoint
        self._log = AttemptLog(plane, job)
        self._resumed = resumed

    async def go(self) -> Finished | Sleeping:
        """Runs until the job is decided, or must wait for long.

        Raises:
            ClaimLost: another worker has the job.
        """
        step = await self._resume()
        while True:
            if step is None:
                step = await self._attempt()
            match step:
                case Finished():
                    return step
                case Stop(reason):
                    return self._stopped(reason)
                case NextModel():
                    self._move_on()
                case Retry(delay_s):
                    waited = await self._wait(delay_s)
                    if waited is not None:
                        return waited
            step = None

    # One attempt

    async def _attempt(self) -> Finished | Retry | NextModel | Stop:
        plane, job, at = self._plane, self._job, self._at
        remaining_s = (at.deadline - plane.now()).total_seconds()
        if remaining_s <= 0:
            return Stop("timeout")
        model = job.chain[at.model_index]
        timeout_s = min(job.agent.timeout_s, remaining_s)
        worst_case = plane.prices.worst_case(model, job.input_bytes, job.max_output_tokens)
        flight = InFlight(
            number=len(at.attempts) + 1,
            model=model,
            provider=plane.config.provider_name(job.agent, model) or "",
            cause=self._cause(),
            started_at=plane.now(),
            backoff_ms=at.backoff_ms,
            reserved=worst_case,
        )
        text = at.model_copy(update={"in_flight": flight}).model_dump_json(exclude_defaults=True)
        attempt_id = f"{job.execution_id}:{flight.number}"
        asked = plane.now()
        grant = await plane.patience.redis(
            lambda: admit(
                plane,
                holder=job.holder,
                checkpoint=text,
                attempt_id=attempt_id,
                agent_name=job.agent_name,
                agent=job.agent,
                model=model,
                worst_case=worst_case,
                timeout_s=timeout_s,
            )
        )
        self._extend_deadline(plane.now() - asked)
        if isinstance(grant, Denial):
            return await self._short_circuit(flight, grant)
        if grant.probe:
            flight = flight.model_copy(update={"cause": "probe"})
        await self._progress("in_progress", model=model, attempt=flight.number)
        started_at = plane.now()
        try:
            answer = await plane.providers[flight.provider].perform(
                Call(attempt_id, model, job.messages, job.params, timeout_s, job.traceparent)
            )
        except CallFailed as failed:
            return await self._failed(flight, started_at, failed, timeout_s)
        return await self._succeeded(flight, started_at, answer)

    def _cause(self) -> Cause:
        if not self._at.attempts:
            return "first"
        return "retry" if self._at.tries else "fallback"

    async def _succeeded(self, flight: InFlight, started_at: datetime, answer: Answer) -> Finished:
        cost = self._plane.prices.cost(flight.model, answer.usage)
        basis: CostBasis = "billed"
        if cost is None:
            # Priced, but the provider did not say how much was used: what was held for the call is the bound.
            cost, basis = flight.reserved, "unknown" if flight.reserved is None else "estimated"
        attempt = self._log.describe(flight, started_at, "success", cost=cost, basis=basis, usage=answer.usage)
        await self._keep(attempt)
        return Finished(self._at, answer.output, flight.model, None, None)

    async def _failed(
        self, flight: InFlight, started_at: datetime, failed: CallFailed, timeout_s: float
    ) -> Retry | NextModel | Stop:
        verdict = classify(failed.failure, self._plane.now())
        cost, basis = self._cost_of_failure(flight, maybe_billed=failed.maybe_billed)
        counted = verdict.counts_for_breaker or (
            self._job.agent.breaker_counts_auth_errors and verdict.status_code in {401, 402, 403}
        )
        if verdict.kind == "timeout" and timeout_s < self._job.agent.timeout_s:
            counted = False  # the job's own deadline cut it short, which says nothing of the model
        info = verdict.error_info()
        info = info.model_copy(update={"message": self._plane.redactor.text(info.message)})
        attempt = self._log.describe(flight, started_at, "error", cost=cost, basis=basis, error=info, counted=counted)
        await self._keep(attempt)
        return self._next_step(verdict)

    @staticmethod
    def _cost_of_failure(flight: InFlight, *, maybe_billed: bool) -> tuple[int | None, CostBasis]:
        if not maybe_billed:
            return 0, "billed"
        return flight.reserved, "unknown" if flight.reserved is None else "estimated"

    async def _short_circuit(self, flight: InFlight, denial: Denial) -> NextModel | Stop:
        attempt = self._log.describe(
            flight,
            self._plane.now(),
            "short_circuited",
            cost=0,
            basis="billed",
            error=denial.error,
            refused_by=denial.refused_by,
        )
        await self._keep(attempt)
        return Stop(denial.reason) if self._is_last_model() else NextModel()

    def _next_step(self, verdict: Verdict) -> Retry | NextModel | Stop:
        return after_failure(
            verdict,
            policy=self._job.agent.retry,
            tries=self._at.tries,
            is_last_model=self._is_last_model(),
            remaining_s=(self._at.deadline - self._plane.now()).total_seconds(),
            jitter=self._plane.jitter(),
        )

    async def _keep(self, attempt: Attempt) -> None:
        """Records an attempt in the log, and then here. Raises ClaimLost."""
        asked = self._plane.now()
        await self._log.keep(attempt)
        self._extend_deadline(self._plane.now() - asked)
        self._take(attempt)

    def _take(self, attempt: Attempt) -> None:
        self._at = self._at.model_copy(
            update={
                "attempts": (*self._at.attempts, attempt),
                "tries": self._at.tries + 1,
                "in_flight": None,
                "backoff_ms": 0,
            }
        )

    # Between attempts

    def _is_last_model(self) -> bool:
        return self._at.model_index + 1 >= len(self._job.chain)

    def _move_on(self) -> None:
        self._at = self._at.model_copy(update={"model_index": self._at.model_index + 1, "tries": 0})

    def _extend_deadline(self, waited: timedelta) -> None:
        # What an outage of ours cost is not the job's to pay; a round trip is not worth an update.
        if waited > timedelta(seconds=1):
            self._at = self._at.model_copy(update={"deadline": self._at.deadline + waited})

    async def _wait(self, delay_s: float) -> Sleeping | None:
        self._at = self._at.model_copy(update={"backoff_ms": round(delay_s * 1000)})
        if delay_s < LONG_WAIT_S:
            await self._progress("retried", detail=f"trying again in {delay_s:.1f} s")
            await asyncio.sleep(delay_s)
            return None
        text = self._at.model_dump_json(exclude_defaults=True)
        lease_ms = round(delay_s * 1000) + 60_000
        kept = await self._plane.patience.redis(
            lambda: self._plane.executions.checkpoint(self._job.holder, text, lease_ms=lease_ms)
        )
        if not kept:
            raise ClaimLost(self._job.execution_id)
        await self._progress("waiting", detail=f"trying again in {delay_s:.0f} s")
        return Sleeping(delay_s)

    async def _resume(self) -> Retry | NextModel | Stop | None:
        """After a crash: takes in what was recorded, and records what was lost. None: go on as the checkpoint says."""
        if self._job.deliveries == 1 and not self._resumed:
            return None
        step: Retry | NextModel | Stop | None = None
        while (recorded := await self._log.find(len(self._at.attempts) + 1)) is not None:
            step = self._take_recorded(recorded)
        flight = self._at.in_flight
        if flight is None or flight.number != len(self._at.attempts) + 1:
            return step
        cost, basis = self._cost_of_failure(flight, maybe_billed=True)
        lost = self._log.describe(
            flight, flight.started_at, "worker_lost", cost=cost, basis=basis, error=WORKER_LOST.error_info()
        )
        await self._keep(lost)
        return self._next_step(WORKER_LOST)

    def _take_recorded(self, attempt: Attempt) -> Retry | NextModel | Stop:
        """An attempt that stands in the log and not in the checkpoint, which lags by one or was lost with Redis."""
        if attempt.model in self._job.chain:
            index = self._job.chain.index(attempt.model)
            if index != self._at.model_index:
                self._at = self._at.model_copy(update={"model_index": index, "tries": 0})
        self._take(attempt)
        if attempt.short_circuited:
            reason: Reason = "breaker_open"
            if attempt.error is not None and attempt.error.kind == "budget_exceeded":
                reason = "budget_exceeded"
            return Stop(reason) if self._is_last_model() else NextModel()
        error = attempt.error
        retryable = error is None or error.retryable
        # A success without a result: the worker died between the two, and the answer died with it.
        return self._next_step(
            WORKER_LOST
            if error is None
            else Verdict(error.kind, error.class_, error.message, error.status_code, retryable, False)
        )

    # The end

    def _stopped(self, reason: Reason) -> Finished:
        attempts = self._at.attempts
        called = [attempt for attempt in attempts if not attempt.short_circuited]
        if reason in {"breaker_open", "budget_exceeded"} and called:
            # Some model was called and failed: that is why the job failed, not the refusal of the last one.
            reason = "error"
        last = called[-1] if called and reason == "error" else attempts[-1] if attempts else None
        error = last.error if last is not None else None
        if reason == "error" and last is not None and last.outcome in {"success", "worker_lost"}:
            # A success here is one whose answer died with its worker.
            reason, error = "worker_lost", WORKER_LOST.error_info()
        if error is None:
            error = ErrorInfo(
                kind="timeout",
                class_="TotalTimeoutError",
                message="the job's total timeout passed before it could call",
            )
        return Finished(self._at, None, None, reason, error)

    async def _progress(self, state: str, **details: object) -> None:
        job = self._job
        step = Progress.model_validate(
            {
                "execution_id": job.execution_id,
                "agent": job.agent_name,
                "state": state,
                "at": self._plane.now(),
                **details,
            }
        )
        await self._plane.publisher.transient(subjects.progress(job.agent_name, job.execution_id), step)
