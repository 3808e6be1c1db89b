"""The run of one job: attempts along the chain of models, until one succeeds or nothing is left to try."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import datetime, timedelta

from breakwater.contracts.execution import Attempt, Cause, ErrorInfo, Reason
from breakwater.policy.classify import Classification
from breakwater.policy.input_size import InputSize
from breakwater.policy.retry import LONG_WAIT_S, LONG_WAIT_SLACK_S, NextModel, Retry, Stop, after_failure, failures_on
from breakwater.state.rate_limits import Limited
from services.worker.admission import ClaimLost, Grant, Question, admit, lease_ms_of
from services.worker.assignment import Assignment, Finished, Sleeping
from services.worker.attempt_log import AttemptLog
from services.worker.call import Caller, Ended, cost_of_failure
from services.worker.checkpoint import Checkpoint, InFlight
from services.worker.denials import BY_EXECUTION, POLL_S, Denial, Wait, retry_budget_spent
from services.worker.holdings import Holding
from services.worker.notices import Notices
from services.worker.plane import Plane
from services.worker.repairs import Correction, Message, Repairs
from services.worker.task_guard import guard_of

WORKER_LOST = Classification(
    "worker_lost", "WorkerLostError", "the worker was lost while the call was under way", None, True, False
)


@dataclass(frozen=True, slots=True)
class Again:
    """Ask the same model again, at once: what was wrong has been mended. Not counted as a try."""

    cause: Cause
    repairs: Repairs


@dataclass(frozen=True, slots=True)
class Hold:
    """Ask for the same call again after a while: a rate limit has no room. Not counted as a try, nor recorded."""

    delay_s: float


Step = Retry | NextModel | Stop | Again | Hold


class Run:
    """One job on one worker. What must survive a crash is in its checkpoint; the rest is derived."""

    def __init__(
        self, plane: Plane, job: Assignment, checkpoint: Checkpoint, notices: Notices, *, resumed: bool
    ) -> None:
        self._plane = plane
        self._job = job
        self._at = checkpoint
        self._log = AttemptLog(plane, job)
        self._caller = Caller(plane, job, self._log)
        self._tell = notices
        self._guard = guard_of(plane, job.agent_name, job.agent, job.job, job.execution_id)
        self._resumed = resumed

    async def go(self) -> Finished | Sleeping:
        """Runs until the job is decided, or must wait for long.

        Raises:
            ClaimLost: another worker has the job.
        """
        if self._at.model is not None and self._at.model not in self._job.chain:
            return self._stopped("error")  # the config no longer has it: what was called stays in the record
        if (waits := await self._rest_of_wait()) is not None:
            return waits
        step: Finished | Step | None = await self._resume()
        while True:
            if step is None:
                step = await self._attempt()
            match step:
                case Finished():
                    return step
                case Stop():
                    return self._stopped(step.reason)
                case NextModel():
                    self._move_on()
                case Again(cause, repairs):
                    self._at = self._at.model_copy(update={"cause": cause, "repairs": repairs})
                case Retry(delay_s) | Hold(delay_s):
                    if (waits := await self._wait(delay_s)) is not None:
                        return waits
            step = None

    # One attempt

    async def _attempt(self) -> Finished | Step:
        plane, job, at = self._plane, self._job, self._at
        remaining_s = self._remaining_s()
        if remaining_s <= 0:
            return Stop("timeout")
        messages, dropped = at.repairs.applied(job.messages)
        flight = self._prepare(dropped)
        timeout_s = min(job.agent.timeout_s, remaining_s)
        text = at.model_copy(update={"in_flight": flight, "model": flight.model}).model_dump_json(exclude_defaults=True)
        question = Question(
            attempt_id=f"{job.execution_id}:{flight.number}",
            model=flight.model,
            provider=flight.provider,
            checkpoint=text,
            at_rest=lambda: at.model_dump_json(exclude_defaults=True),
            worst_case=flight.reserved,
            worst_tokens=plane.input_tokens(job.agent, flight.model, self._input_size()) + job.max_output_tokens,
            timeout_s=timeout_s,
            first_try=not self._tried(flight.model),
            attempts=at.attempts,
        )
        asked = plane.now()
        answer = await plane.outages.retry_while_unavailable(lambda: admit(plane, job, self._guard, question))
        self._extend_deadline(plane.now() - asked)
        match answer:
            case Denial():
                return await self._refused(flight, answer)
            case Wait():
                return await self._hold(flight, answer)
            case Grant():
                return await self._call(flight, messages, timeout_s, answer)

    async def _call(self, flight: InFlight, messages: list[Message], timeout_s: float, grant: Grant) -> Finished | Step:
        granted = {"breaker_version": grant.breaker_version, "reserved_at": grant.reserved_at}
        flight = flight.model_copy(update=granted | ({"cause": "probe"} if grant.probe else {}))
        await self._tell.attempt_starts(flight.number, flight.model)
        timeout_s = max(0.001, min(timeout_s, self._remaining_s()))
        with self._plane.holdings.during(self._holding(flight, grant.reserved_at, timeout_s)):
            ended = await self._caller.call(flight, messages, timeout_s)
            await self._keep(ended.attempt)
        await self._settle(ended.attempt, grant.limits)
        if ended.verdict is None:
            return Finished(self._at, ended.output, flight.model, None, None)
        return await self._after(ended.attempt, ended.verdict, ended)

    def _holding(self, flight: InFlight, at: datetime, timeout_s: float) -> Holding:
        job = self._job
        until = self._plane.now() + timedelta(milliseconds=lease_ms_of(timeout_s))
        attempt_id = f"{job.execution_id}:{flight.number}"
        return Holding(attempt_id, job.agent_name, job.job.tenant, flight.reserved or 0, at, until)

    async def _settle(self, attempt: Attempt, limits: tuple[Limited, ...]) -> None:
        """Frees a call's turn, and counts what it used instead of its worst case."""
        if limits:
            rate_limits, used = self._plane.rate_limits, _tokens_used(attempt)
            asked = self._plane.now()
            await self._plane.outages.retry_while_unavailable(
                lambda: rate_limits.settle(attempt.attempt_id, limits, used)
            )
            self._extend_deadline(self._plane.now() - asked)

    async def _refused(self, flight: InFlight, denial: Denial) -> Step:
        await self._short_circuit(flight, denial)
        if denial.final or denial.reason == "guard_tripped" or self._is_last_model():
            return Stop(denial.reason)
        return NextModel()

    async def _hold(self, flight: InFlight, wait: Wait) -> Step:
        slack_s = LONG_WAIT_SLACK_S if wait.delay_s >= LONG_WAIT_S else 0.0
        if wait.delay_s + slack_s >= self._remaining_s():
            return await self._refused(flight, wait.denial)
        if wait.delay_s >= POLL_S * 2:
            await self._tell.waits(wait.delay_s)
        return Hold(wait.delay_s)

    def _prepare(self, dropped: int) -> InFlight:
        plane, job, at = self._plane, self._job, self._at
        model = job.chain[at.model_index]
        return InFlight(
            number=len(at.attempts) + 1,
            model=model,
            provider=plane.config.provider_name(job.agent, model) or "",
            cause=self._cause(model),
            started_at=plane.now(),
            backoff_ms=at.backoff_ms,
            reserved=plane.worst_case(job.agent, model, self._input_size(), job.max_output_tokens),
            dropped_messages=dropped,
        )

    def _input_size(self) -> InputSize:
        return self._job.input_size + self._at.repairs.correction_size

    def _cause(self, model: str) -> Cause:
        if self._at.cause is not None:
            return self._at.cause
        if not self._at.attempts:
            return "first"
        return "retry" if self._tried(model) else "fallback"

    def _tried(self, model: str) -> bool:
        return any(attempt.model == model for attempt in self._at.attempts)

    async def _short_circuit(self, flight: InFlight, denial: Denial) -> None:
        attempt = self._log.describe(
            flight,
            self._plane.now(),
            "short_circuited",
            cost=0,
            basis="billed",
            error=denial.error,
            refused_by=denial.refused_by,
            refused_cap=denial.refused_cap,
        )
        await self._keep(attempt)

    async def _keep(self, attempt: Attempt) -> None:
        """Records an attempt in the log, and then here. Raises ClaimLost."""
        asked = self._plane.now()
        await self._log.keep(attempt)
        self._extend_deadline(self._plane.now() - asked)
        self._plane.metrics.attempt(attempt)
        self._take(attempt)
        await self._tell.attempt_ended(attempt)

    def _take(self, attempt: Attempt) -> None:
        self._at = self._at.model_copy(
            update={
                "attempts": (*self._at.attempts, attempt),
                "in_flight": None,
                "cause": None,
                "backoff_ms": 0,
                "resume_at": None,
            }
        )

    # After a failed attempt

    async def _after(self, attempt: Attempt, verdict: Classification, ended: Ended | None) -> Step:
        """What follows a failed attempt: a repair, a retry, the next model, or the end.

        Args:
            attempt: the failed one, already taken in.
            verdict: what its failure means.
            ended: what is known of the call itself; None where it was made by a worker that is lost.
        """
        mended = await self._mend(attempt, verdict, ended)
        if mended is not None:
            return mended
        step = after_failure(
            verdict,
            policy=self._job.agent.retry,
            failures=failures_on(attempt.model, self._at.attempts),
            is_last_model=self._is_last_model(),
            remaining_s=self._remaining_s(),
            jitter=self._plane.jitter(),
        )
        if isinstance(step, Retry):
            return await self._within_retry_budget(attempt, step)
        if step.exhausted or verdict.kind == "logic":
            await self._tell.retries_exhausted(attempt, "no tries are left on this model")
        elif not verdict.retryable:
            await self._tell.request_failed(attempt)
        return step

    async def _mend(self, attempt: Attempt, verdict: Classification, ended: Ended | None) -> Again | None:
        agent, messages, repairs = self._job.agent, self._job.messages, self._at.repairs
        if verdict.kind == "orphan_tool_calls" and (pruned := repairs.prune(messages)) is not None:
            await self._tell.repaired("orphan_tool_calls_pruned", attempt, pruned[1])
            return Again("orphan_recovery", pruned[0])
        if verdict.kind == "context_overflow" and agent.on_context_overflow == "trim":
            shorter = repairs.shorten(messages, verdict.message)
            if shorter is not None:
                await self._tell.repaired("context_trimmed", attempt, shorter[1])
                return Again("context_trim", shorter[0])
        if verdict.kind == "logic" and agent.output is not None:
            correction = ended.correction if ended is not None else None
            again = repairs.correct(correction or Correction(answer=None), agent.output.max_corrections)
            return None if again is None else Again("self_correction", again)
        if verdict.status_code == 401 and not repairs.credential_refreshed:
            used = ended.credential if ended is not None else None
            if await self._refreshed(attempt.provider, used):
                return Again("credential_refresh", repairs.model_copy(update={"credential_refreshed": True}))
        return None

    async def _refreshed(self, provider: str, used: int | None) -> bool:
        """Whether the key has changed, as far as that can be told in the time that is left."""
        known = self._plane.providers.get(provider)
        if known is None:
            return False
        # Not cancelled with the wait: others may be waiting for the same reading of the key.
        reading = asyncio.ensure_future(known.refresh_credential(used))
        done, _ = await asyncio.wait({reading}, timeout=max(0.0, self._remaining_s()))
        return reading.result() if done else False

    async def _within_retry_budget(self, attempt: Attempt, step: Retry) -> Step:
        plane, job = self._plane, self._job
        retry_id = f"{job.execution_id}:{attempt.number + 1}"
        asked = plane.now()
        granted = await plane.outages.retry_while_unavailable(
            lambda: plane.retry_budgets.may_retry(attempt.model, retry_id)
        )
        self._extend_deadline(plane.now() - asked)
        if granted:
            await self._tell.retries(attempt, step.delay_s, long=step.delay_s >= LONG_WAIT_S)
            return step
        await self._tell.retries_exhausted(attempt, "the fleet's retry budget for this model is spent")
        await self._short_circuit(self._prepare(attempt.dropped_messages), retry_budget_spent(attempt.model))
        return Stop("error") if self._is_last_model() else NextModel()

    # Between attempts

    def _is_last_model(self) -> bool:
        return self._at.model_index + 1 >= len(self._job.chain)

    def _move_on(self) -> None:
        self._go_to(self._at.model_index + 1)

    def _go_to(self, index: int) -> None:
        update = {"model_index": index, "model": None, "repairs": self._at.repairs.for_next_model()}
        self._at = self._at.model_copy(update=update)

    def _remaining_s(self) -> float:
        return (self._at.deadline - self._plane.now()).total_seconds()

    def _extend_deadline(self, waited: timedelta) -> None:
        # What an outage of ours cost is not the job's to pay; a round trip is not worth an update.
        if waited > timedelta(seconds=1):
            self._at = self._at.model_copy(update={"deadline": self._at.deadline + waited})

    async def _wait(self, delay_s: float) -> Sleeping | None:
        due = self._plane.now() + timedelta(seconds=delay_s)
        model = self._job.chain[self._at.model_index]
        waited_ms = self._at.backoff_ms + round(delay_s * 1000)
        update = {"backoff_ms": waited_ms, "resume_at": due, "model": model}
        self._at = self._at.model_copy(update=update)
        if delay_s < LONG_WAIT_S:
            await asyncio.sleep(delay_s)
            return None
        text = self._at.model_dump_json(exclude_defaults=True)
        kept = await self._plane.outages.retry_while_unavailable(
            lambda: self._plane.executions.checkpoint(self._job.claim, text)
        )
        if not kept:
            raise ClaimLost(self._job.execution_id)
        await self._let_go()
        return Sleeping(due)

    async def _let_go(self) -> None:
        """Leaves the task's cost cap to its other jobs while this one sleeps."""
        guard = self._guard
        if guard is not None:
            await self._plane.outages.retry_while_unavailable(
                lambda: self._plane.redis.run([guard.let_go(self._at.attempts)])
            )

    async def _rest_of_wait(self) -> Sleeping | None:
        """A job that was delivered before its wait is over, as after a crash while it was put to sleep."""
        due = self._at.resume_at
        if due is None:
            return None
        rest_s = (due - self._plane.now()).total_seconds()
        if rest_s >= LONG_WAIT_S:
            await self._tell.waits(rest_s)
            return Sleeping(due)
        if rest_s > 0:
            await asyncio.sleep(rest_s)
        return None

    async def _resume(self) -> Step | None:
        """After a crash: takes in what was recorded, and records what was lost. None: go on as the checkpoint says.

        Only what follows the last recorded attempt is still to be decided. What followed the others stands in the log.
        """
        if not self._resumed:
            return None
        last: Attempt | None = None
        while (recorded := await self._log.find(len(self._at.attempts) + 1)) is not None:
            self._take_recorded(recorded)
            last = recorded
        flight = self._at.in_flight
        if flight is not None and flight.number == len(self._at.attempts) + 1:
            cost, basis = cost_of_failure(flight, maybe_billed=True)
            flight = flight.model_copy(update={"reserved_at": await self._reserved_at(flight)})
            lost = self._log.describe(
                flight, flight.started_at, "worker_lost", cost=cost, basis=basis, error=WORKER_LOST.error_info()
            )
            limits = self._plane.limits(self._job.agent_name, self._job.agent, flight.model)
            await self._keep(lost)
            await self._settle(lost, limits)
            return await self._after(lost, WORKER_LOST, None)
        return None if last is None else await self._after_recorded(last)

    async def _reserved_at(self, flight: InFlight) -> datetime | None:
        """When a lost call was reserved, which its checkpoint could not say yet."""
        attempt_id = f"{self._job.execution_id}:{flight.number}"
        budgets = self._plane.budgets
        [held] = await self._plane.outages.retry_while_unavailable(lambda: budgets.reservations([attempt_id]))
        return None if held is None else held.at

    def _take_recorded(self, attempt: Attempt) -> None:
        """An attempt that stands in the log and not in the checkpoint, which lags by one or was lost with Redis."""
        if attempt.model in self._job.chain:
            index = self._job.chain.index(attempt.model)
            if index != self._at.model_index:
                self._go_to(index)
        if attempt.cause != self._at.cause:
            # Decided after the checkpoint was saved; else the repair stands in it.
            repairs = self._at.repairs.replayed(attempt.cause, self._job.messages, self._at.attempts)
            self._at = self._at.model_copy(update={"repairs": repairs})
        self._take(attempt)

    async def _after_recorded(self, attempt: Attempt) -> Step:
        error = attempt.error
        if attempt.short_circuited:
            reason = _reason_of_refusal(error)
            ends = reason == "guard_tripped" or self._ends_chain(attempt.refused_by) or self._is_last_model()
            return Stop(reason) if ends else NextModel()
        if error is None:
            # A success without a result: the worker died between the two, and the answer died with it.
            return await self._after(attempt, WORKER_LOST, None)
        waited_s = (self._plane.now() - attempt.completed_at).total_seconds()
        asked_s = None if error.retry_after_s is None else max(0.0, error.retry_after_s - waited_s)
        verdict = Classification(
            error.kind, error.class_, error.message, error.status_code, error.retryable, False, asked_s
        )
        return await self._after(attempt, verdict, None)

    def _ends_chain(self, refused_by: str | None) -> bool:
        """Whether what refused a call is a budget that ends the job."""
        caps = self._plane.caps()
        counters = caps.counters(self._job.agent_name, self._job.job.tenant)
        return any(one.name == refused_by and one.caps.on_exceeded == "fail" for one in counters)

    # The end

    def _stopped(self, reason: Reason) -> Finished:
        attempts = self._at.attempts
        called = [attempt for attempt in attempts if not attempt.short_circuited]
        over_own_cap = bool(attempts) and attempts[-1].refused_by == BY_EXECUTION
        if reason in {"breaker_open", "budget_exceeded", "rate_limited"} and called and not over_own_cap:
            # Some model was called and failed: that is why the job failed, not the refusal of the last one.
            reason = "error"
        last = called[-1] if called and reason == "error" else attempts[-1] if attempts else None
        error = last.error if last is not None else None
        if reason == "breaker_open" and error is not None:
            # Worth asking again as soon as the first of its models is.
            waits = [one.error for one in attempts if one.error is not None and one.error.retry_after_s is not None]
            error = min(waits, key=lambda one: one.retry_after_s or 0.0, default=error)
        if reason == "error" and last is not None and last.outcome in {"success", "worker_lost"}:
            # A success here is one whose answer died with its worker.
            reason, error = "worker_lost", WORKER_LOST.error_info()
        if error is None and reason == "error":
            error = ErrorInfo(
                kind="invalid",
                class_="ConfigChangedError",
                message="the config no longer has the model that this job was at",
            )
        if error is None:
            error = ErrorInfo(
                kind="timeout",
                class_="TotalTimeoutError",
                message="the job's total timeout passed before it could call",
            )
        return Finished(self._at, None, None, reason, error)


def _tokens_used(attempt: Attempt) -> int | None:
    """What a call used; None where that is not known."""
    if attempt.input_tokens is None and attempt.output_tokens is None:
        return 0 if attempt.cost_basis == "billed" and not attempt.cost else None
    return (attempt.input_tokens or 0) + (attempt.output_tokens or 0)


def _reason_of_refusal(error: ErrorInfo | None) -> Reason:
    match error.kind if error is not None else None:
        case "budget_exceeded":
            return "budget_exceeded"
        case "retry_budget":
            return "error"
        case "guard_tripped":
            return "guard_tripped"
        case "rate_limit":
            return "rate_limited"
        case _:
            return "breaker_open"
