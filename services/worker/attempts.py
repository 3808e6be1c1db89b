"""The loop over the attempts of one job along its chain of models."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import TypeVar

from breakwater.breakers.rules.breaker import caller_of
from breakwater.calls.assignment import Assignment, Checkpoint, Deferred, InFlight, JobEnd
from breakwater.calls.gate import Admission, AskAgain, Gate, Refused, WaitForCapacity
from breakwater.calls.providers.base import Answer
from breakwater.calls.rules.classify import WORKER_LOST, classification_of, is_of_key
from breakwater.calls.rules.parameters import RefusedParams, refused_params
from breakwater.calls.rules.refusals import model_removed, outside_region
from breakwater.calls.rules.repairs import NO_REPAIRS, JsonMessage, Repaired
from breakwater.calls.rules.retry import (
    LONG_WAIT_S,
    LONG_WAIT_SLACK_S,
    NextModel,
    Redeploy,
    Retry,
    Stop,
    after_failure,
    did_no_work,
    failures_on,
    is_retryable,
    of_batch,
)
from breakwater.calls.rules.waits import POLL_S
from breakwater.calls.targets import Target
from breakwater.dialects.rules.params import KNOWN_PARAMS
from breakwater.dialects.rules.provider_state import is_of_model
from breakwater.jobs.contract.current_jobs import JobWait, WaitKind
from breakwater.jobs.contract.execution import Attempt, CallerLimits, ErrorInfo, Reason
from breakwater.jobs.held_claims import JobCancelledError
from breakwater.jobs.store.executions import ClaimLostError, SavedProgress
from breakwater.kernel.redis.connection import StateUnavailableError
from breakwater.kernel.telemetry import tracing
from breakwater.limits.rules.rate_limit import HELD
from breakwater.limits.rules.refusals import retry_budget_spent
from breakwater.prices.rules.price import (
    OUTPUT_LIMITS,
    max_tokens_of,
)
from breakwater.services.worker.admission import Gates, admit
from breakwater.services.worker.attempt_record import attempt_of, record
from breakwater.services.worker.call import call
from breakwater.services.worker.call_cost import spent_at_most
from breakwater.services.worker.call_end import CallEnd, answered
from breakwater.services.worker.context import WorkerContext
from breakwater.services.worker.next_call import admission_for, is_bounded, params_key, worst_tokens
from breakwater.services.worker.progress import ProgressReporter
from breakwater.services.worker.recovery import lost_attempt, recover
from breakwater.services.worker.results import cancelled, stopped
from breakwater.services.worker.streaming import AnswerStream, AttemptStream, continuing

LOST_ANSWER = ErrorInfo(
    kind="worker_lost",
    class_="AnswerLostError",
    message="the worker was lost while the call was in flight, and the stored part of the answer is gone: it was "
    "deleted from RESPONSES, or that stream was full (limits.responses_max_bytes), or Redis was emptied. So the answer "
    "can't be continued, and the model is not asked again",
    user_message="The answer was interrupted, and its first part is gone. Please send the request again.",
)

MIN_EXTENSION_S = 1.0
"""The shortest wait for unavailable servers that extends a job's deadline."""

NOTED_WAIT_S = 1.0
"""The shortest wait in a slot that others can see."""

NextStep = Retry | Redeploy | NextModel | Stop | Repaired

Returned = TypeVar("Returned")


@dataclass(frozen=True, slots=True)
class StepDecision:
    """The step after a failed attempt, which is decided before the attempt is recorded.

    Attributes:
        step: the step.
        exhausted: the reason in words for which the model is not tried again although the failure is retryable.
        busy: True if the model has answered other jobs meanwhile.
        refused_params: the parameters that a repair leaves out.
        partial: the published part of an answer, which the next try continues.
    """

    step: NextStep
    exhausted: str | None = None
    busy: bool = False
    refused_params: RefusedParams | None = None
    partial: str | None = None


class Attempts:
    """Runs one job on one worker. The checkpoint holds what must survive a crash; the rest is derived from it."""

    def __init__(
        self,
        worker: WorkerContext,
        job: Assignment,
        checkpoint: Checkpoint,
        progress: ProgressReporter,
        gates: Gates,
    ) -> None:
        self._worker = worker
        self._job = job
        self._checkpoint = checkpoint
        self._progress = progress
        self._gates = gates
        self._cancel = job.lease.cancel
        self._flight: InFlight | None = None
        """The attempt whose call is in progress."""
        self._waited: dict[Reason, float] = {}
        self._waits_for: tuple[InFlight, WaitForCapacity] | None = None
        self._waits_since = self._noted_until = job.now()
        """The begin of the job's wait, and the end of what others see of it."""
        self._last_call: CallEnd | None = None
        self._limits: CallerLimits | None = None
        self._redeploys: CallEnd | None = None
        """The failed call that another deployment is to make up for."""
        # An answer that must satisfy an output schema is not streamed.
        self._stream = AnswerStream(worker, job) if job.job.stream and job.output_guard is None else None
        job.lease.progress = self._progress_to_save

    async def run(self, *, resumed: bool) -> JobEnd | Deferred:
        """Runs until the job is finished, or must wait for so long that it is parked.

        Raises:
            ClaimLostError: another worker has the job.
        """
        try:
            end = await self._run(resumed=resumed)
        except JobCancelledError as stop:
            end = cancelled(self._checkpoint, stop.cancellation, self._partial_answer())
        finally:
            if self._stream is not None:
                self._stream.count()
        if not isinstance(end, JobEnd) or end.limits is self._limits:
            return end
        return replace(end, limits=self._limits)

    async def _run(self, *, resumed: bool) -> JobEnd | Deferred:
        checkpoint = self._checkpoint = self._checkpoint.on_chain(self._job.chain)
        is_cancelled = self._cancel.cancellation is not None
        if checkpoint.model is not None and checkpoint.model not in self._job.chain:
            return await self._without_model(checkpoint.model, resumed=resumed)
        if (
            checkpoint.resume_at is not None
            and not is_cancelled
            and (deferred := await self._rest_of_wait(checkpoint.resume_at)) is not None
        ):
            return deferred
        step: JobEnd | NextStep | None = await self._resume() if resumed or checkpoint.may_have_called else None
        while True:
            match step or await self._attempt():
                case None:
                    pass
                case JobEnd() as end:
                    return end
                case Stop(reason):
                    return self._without_answer(reason)
                case NextModel():
                    self._checkpoint = self._checkpoint.at_model(self._checkpoint.model_index + 1)
                case Repaired(cause, repairs):
                    self._checkpoint = self._checkpoint.repaired(cause, repairs)
                case Redeploy():
                    pass
                case Retry(delay_s):
                    if (deferred := await self._wait(delay_s)) is not None:
                        return deferred
            step = None
            self._cancel.check()

    def _progress_to_save(self) -> SavedProgress:
        text, messages = ("", 0) if self._stream is None else self._stream.saved_part
        return SavedProgress(self._with_flight().text(), text, messages)

    def _with_flight(self) -> Checkpoint:
        flight = self._flight
        if flight is None:
            return self._checkpoint
        return self._checkpoint.model_copy(update={"in_flight": flight, "model": flight.model})

    def _without_answer(self, reason: Reason) -> JobEnd:
        """Returns the outcome of a failed job: with the published part of an answer, or a failed program's result."""
        end = stopped(self._checkpoint, reason)
        answer = self._partial_answer()
        if answer is not None or self._last_call is None or self._job.agent.on_error == "message":
            return replace(end, answer=answer)
        return replace(end, answer=self._last_call.answer)

    def _partial_answer(self) -> Answer | None:
        output = None if self._stream is None else self._stream.partial_output()
        return None if output is None else Answer(output)

    # One attempt

    async def _attempt(self) -> JobEnd | NextStep | None:
        remaining_s = self._remaining_s()
        if remaining_s <= 0:
            # The job waited longer than planned, so it ends with the refusal that made it wait.
            if self._waits_for is None:
                return Stop("timeout")
            flight, wait = self._waits_for
            return await self._refused(flight, wait.refused, is_over=True)
        messages: Sequence[JsonMessage] = self._job.messages
        dropped = 0
        if self._checkpoint.repairs is not None:
            messages, dropped = self._checkpoint.repairs.apply_to(messages)
        if self._checkpoint.partial:
            messages = [*messages, *continuing(self._checkpoint.partial)]
        timeout_s = min(self._job.agent.timeout_s, remaining_s)
        # A stream may last until the job's deadline.
        lease_s = timeout_s if self._stream is None else remaining_s
        prepare = partial(
            admission_for,
            *(self._worker, self._job, self._checkpoint),
            timeout_s=timeout_s,
            dropped=dropped,
            lease_s=lease_s,
            waited=self._waited,
        )
        targets = self._targets()
        if self._checkpoint.may_have_called:
            return await self._unrecorded_call(prepare(targets[0]).flight)
        redeployed, self._redeploys = self._redeploys, None
        if redeployed is not None:
            targets = [target for target in targets if not self._checkpoint.tried(target.model, target.listed)]
        admission, verdict = await self._ask(prepare, targets)
        waits = isinstance(verdict, WaitForCapacity) and redeployed is not None and self._needs_other(redeployed)
        if (
            redeployed is not None
            and not waits
            and (admission is None or isinstance(verdict, Refused | WaitForCapacity))
        ):
            # The others may not be called after all.
            return await self._carry_out(redeployed, await self._decide(redeployed, may_redeploy=False))
        assert admission is not None
        match verdict:
            case Refused() as refused:
                return await self._refused(admission.flight, refused)
            case WaitForCapacity() as wait:
                self._redeploys = redeployed
                return await self._wait_for_capacity(admission.flight, wait)
            case AskAgain():
                self._redeploys = redeployed
                return Retry(0.0)
            case None:
                return await self._call(admission, messages)

    def _targets(self) -> Sequence[Target]:
        """Returns the deployments of the current model in the order in which the next call asks them."""
        worker = self._worker
        job = self._job
        model = job.chain[self._checkpoint.model_index]
        targets = worker.targets.all_of(job.agent_name, model)
        if len(targets) == 1:
            return targets
        targets = job.may_use(targets) or targets
        tokens = worst_tokens(worker, job, self._checkpoint, targets[0])
        policy = worker.targets.policy_of(job.agent_name, model)
        return worker.balancer.order_for(job, self._checkpoint, targets, policy, tokens)

    async def _ask(
        self, prepare: Callable[..., Admission], targets: Sequence[Target]
    ) -> tuple[Admission | None, Refused | WaitForCapacity | AskAgain | None]:
        """Asks for the admission of a call, on each deployment until one may be called.

        Returns:
            The admission, and the verdict on it. If all deployments refuse, the one that may be called first; without
            any deployment, None.
        """
        may_call = self._worker.balancer.may_call
        refusals: list[tuple[Admission, Refused | WaitForCapacity]] = []
        for number, target in enumerate(targets, 1):
            later_targets = targets[number:]
            has_alternatives = any(may_call(self._job.agent_name, later) for later in later_targets)
            admission = prepare(target, has_alternatives=has_alternatives)
            verdict = await self._ask_on(admission)
            if not isinstance(verdict, Refused | WaitForCapacity):
                return admission, verdict
            if not (target.has_others and _refusal_in(verdict).of_deployment):
                return admission, verdict
            refusals.append((admission, verdict))
        refusals.sort(key=lambda refusal: _wait_s(refusal[1]))
        for number, (admission, verdict) in enumerate(refusals):
            if admission.has_alternatives and kind_of_wait(_refusal_in(verdict)) == "hold":
                # Perhaps it was to be spared, as others seemed to be free.
                asked_alone = prepare(admission.target, has_alternatives=False)
                answer = await self._ask_on(asked_alone)
                if not isinstance(answer, Refused | WaitForCapacity) or kind_of_wait(_refusal_in(answer)) != "hold":
                    return asked_alone, answer  # it may have a place in the queue of a limit now: that one is kept
                refusals[number] = asked_alone, answer
        return min(refusals, key=lambda refusal: _wait_s(refusal[1]), default=(None, None))

    async def _ask_on(self, admission: Admission) -> Refused | WaitForCapacity | AskAgain | None:
        """Asks the gates of one deployment."""
        worker = self._worker
        target = admission.target
        if not self._job.may_use([target]):
            return Refused("error", outside_region(target.model, self._job.residency))
        verdict = await self._extending_deadline(partial(admit, worker, admission, self._gates))
        self._limits = admission.limits or self._limits
        if target.has_others and not isinstance(verdict, AskAgain):
            if verdict is None:
                policy = worker.targets.policy_of(self._job.agent_name, target.model)
                worker.balancer.note_call(self._job, target, admission.flight.reserved_tokens, policy)
            elif _refusal_in(verdict).of_deployment:
                worker.balancer.note_refusal(self._job.agent_name, target, verdict)
        return verdict

    async def _call(self, admission: Admission, messages: Sequence[JsonMessage]) -> JobEnd | NextStep:
        flight = self._flight = admission.flight
        await self._progress.report("in_progress", "agent.attempt.start", attempt=flight.number, model=flight.model)
        timeout_s = max(0.001, min(admission.timeout_s, self._remaining_s()))
        # The process may have stalled since the admission.
        await self._extending_deadline(partial(self._worker.leases.confirm, self._job.claim))
        stream = None
        if self._stream is not None:
            self._stream.limits = admission.limits
            stream = AttemptStream(
                self._stream,
                flight,
                self._answer_begins,
                idle_timeout_s=self._job.agent.stream_idle_timeout_s,
                total_timeout_s=max(0.001, self._remaining_s()),
            )
        with admission.under_way():
            repairs = self._checkpoint.repairs or NO_REPAIRS
            ended = await call(self._worker, self._job, flight, messages, timeout_s, repairs, stream)
            decision = None if ended.failure is None else await self._decide(ended)
            if decision is not None and isinstance(decision.step, Retry | Repaired):
                ended = replace(ended, attempt=ended.attempt.model_copy(update={"tried_again": True}))
            await self._record(ended.attempt, admission.gates)
        self._last_call = ended
        if ended.attempt.outcome == "cancelled":
            self._cancel.check()
        return self._answered(ended) if decision is None else await self._carry_out(ended, decision)

    def _answered(self, ended: CallEnd) -> JobEnd:
        """Returns the outcome of a job that its last recorded attempt has answered."""
        return JobEnd(self._checkpoint, ended.answer, chosen_model=ended.attempt.model, limits=self._limits)

    async def _answer_begins(self, flight: InFlight) -> None:
        """Saves that a part of the answer is about to be published. Raises ClaimLostError, JobCancelledError."""
        self._flight = flight
        await self._extending_deadline(partial(self._save, self._with_flight().text()))
        self._cancel.check()

    async def _save(self, text: str, wait: JobWait | None = None) -> None:
        claim_state = await self._worker.executions.checkpoint(self._job.claim, text, wait)
        if claim_state is None:
            raise ClaimLostError(self._job.execution_id)
        self._cancel.receive(claim_state.cancels)
        self._job.lease.has_children |= claim_state.has_children

    async def _refused(self, flight: InFlight, refused: Refused, *, is_over: bool = False) -> NextStep:
        """Records a refusal. With `is_over`, the job has used up its time and tries no other model."""
        await self._record(attempt_of(self._job, flight, self._job.now(), "short_circuited", refusal=refused))
        ends = refused.ends_chain or is_over or self._checkpoint.is_last_of(self._job.chain)
        return Stop(refused.reason) if ends else NextModel()

    async def _wait_for_capacity(self, flight: InFlight, wait: WaitForCapacity) -> NextStep:
        slack_s = LONG_WAIT_SLACK_S if wait.delay_s >= LONG_WAIT_S else 0.0
        if wait.delay_s + slack_s >= self._remaining_s():
            return await self._refused(flight, wait.refused, is_over=wait.refused.reason in self._waited)
        if wait.delay_s >= POLL_S * 2:
            await self._progress.report("waiting", detail=f"trying again in {wait.delay_s:.0f} s")
        reason = wait.refused.reason
        self._waited[reason] = self._waited.get(reason, 0.0) + wait.delay_s
        if self._waits_for is None or self._waits_for[1].refused.reason != reason:
            self._waits_since = self._job.now()
        self._waits_for = flight, wait
        return Retry(wait.delay_s)

    async def _record(self, attempt: Attempt, gates: Iterable[Gate] = ()) -> None:
        """Records an attempt in the log, then in the checkpoint. Raises ClaimLostError.

        `gates` admitted the call. On return, Redis has the effect of a failure on the breaker; the cost follows
        with the next round trip.
        """
        worker = self._worker
        job = self._job
        settlements = [(gate.must_settle, gate.settle(attempt)) for gate in gates if gate.settles]
        settling = worker.outcomes.settle(
            [(must_settle, script) for must_settle, script in settlements if script is not None]
        )
        sequence = await self._extending_deadline(partial(record, worker, job, attempt))
        target = worker.targets.of(job.agent_name, attempt.model, attempt.deployment)
        has_failed = any(earlier.tried_again and earlier.unit == attempt.unit for earlier in self._checkpoint.attempts)
        await worker.outcomes.record(settling, job, target, attempt, sequence, has_failed=has_failed)
        if target.has_others and not attempt.short_circuited:
            worker.balancer.note_end(target, attempt, self._checkpoint.attempts)
        self._worker.metrics.count_attempt(attempt, tracing.recorded_trace_id(self._job.traceparent))
        self._checkpoint = self._checkpoint.after(attempt)
        self._flight = None
        self._waited.clear()
        self._waits_for = None
        await self._progress.attempt_ended(attempt)

    # After a failed attempt

    async def _decide(self, ended: CallEnd, *, may_redeploy: bool = True) -> StepDecision:
        """Returns the step after a failed attempt: a repair, a retry, another deployment or model, or the end.

        It has no effect, as the attempt may not be recorded yet.
        """
        attempt = ended.attempt
        failure = ended.failure
        assert failure is not None
        published = None
        is_published = attempt.first_token_ms is not None
        if self._stream is not None:
            is_published = self._stream.is_published(attempt)
        if is_published:
            # A part of the answer is published: another try can only continue it.
            published = self._stream.text if self._stream is not None and self._stream.continues else None
            if published is None:
                return StepDecision(Stop("error"), "the answer was interrupted after a part of it was published")
        refused_params = self._refused_params(ended)
        if (repaired := await self._repaired(ended, refused_params)) is not None:
            return StepDecision(repaired, refused_params=refused_params, partial=published)
        recorded = self._checkpoint.attempts
        attempts = recorded if len(recorded) >= attempt.number else (*recorded, attempt)
        busy = failure.kind == "rate_limit" and self._answers_others(attempts)
        step = after_failure(
            failure,
            policy=self._job.agent.retry,
            failures=failures_on(attempt.model, attempts),
            is_last_model=self._checkpoint.is_last_of(self._job.chain),
            remaining_s=self._remaining_s(),
            jitter=self._worker.jitter(),
            busy=busy,
            elsewhere=may_redeploy and self._has_other(ended, attempts),
        )
        is_exhausted = not isinstance(step, Retry | Redeploy) and (step.exhausted or failure.kind == "logic")
        why = "no attempts are left on this model" if is_exhausted else None
        return StepDecision(step, why, busy, partial=published)

    async def _carry_out(self, ended: CallEnd, decision: StepDecision) -> NextStep:
        """Reports a decision about a recorded attempt, and returns its step."""
        attempt = ended.attempt
        failure = ended.failure
        step = decision.step
        assert failure is not None
        if decision.partial is not None:
            self._checkpoint = self._checkpoint.model_copy(update={"partial": decision.partial})
        if decision.exhausted is not None:
            await self._progress.failed("llm_retry_exhausted", attempt, detail=decision.exhausted)
        elif isinstance(step, Repaired):
            await self._note_repair(ended, step, decision.refused_params)
        elif isinstance(step, Redeploy):
            self._redeploys = ended
            await self._progress.failed("llm_retry_attempt", attempt, "retried", detail="on another deployment")
        elif isinstance(step, Retry):
            return await self._within_retry_budget(attempt, step, busy=decision.busy)
        elif not failure.retryable:
            await self._progress.failed("llm_request_failed", attempt)
        return step

    async def _repaired(self, ended: CallEnd, refused: RefusedParams | None) -> Repaired | None:
        agent = self._job.agent
        repairs = self._checkpoint.repairs or NO_REPAIRS
        failure = ended.failure
        assert failure is not None
        native = self._is_native(ended.attempt)
        repaired = repairs.after(
            failure,
            self._job.messages,
            ended.correction,
            may_trim=agent.on_context_overflow == "trim",
            max_corrections=0 if agent.output is None else agent.output.max_corrections,
            lowered=ended.lowered,
            refused_params=() if refused is None else refused.names,
            may_ask_for_less_than=max_tokens_of(self._job.parameters.values, agent.max_tokens)
            if not self._job.own_params.intersection(OUTPUT_LIMITS) or (self._job.job.api == "messages" and not native)
            else None,
        )
        if repaired is not None:
            return repaired
        if is_of_key(failure) and not repairs.credential_refreshed and await self._has_new_key(ended):
            return Repaired("credential_refresh", repairs.model_copy(update={"credential_refreshed": True}))
        return None

    async def _note_repair(self, ended: CallEnd, repaired: Repaired, refused: RefusedParams | None) -> None:
        """Reports a repair, and remembers what the model would refuse from other jobs, too."""
        attempt = ended.attempt
        failure = ended.failure
        assert failure is not None
        if repaired.cause == "parameter" and refused is not None and refused.lasting:
            key = params_key(self._job, self._target_of(attempt))
            self._worker.left_out.setdefault(key, set()).update(refused.names)
        if repaired.cause == "provider_state" and is_of_model(failure.class_name):
            self._worker.state_repairs.setdefault(attempt.unit, set()).add(repaired.repairs.state[-1])
        if repaired.event is not None:
            attempt_details = {"attempt": attempt.number, "model": attempt.model}
            await self._progress.report("retried", repaired.event, **attempt_details, count=repaired.count)

    def _refused_params(self, ended: CallEnd) -> RefusedParams | None:
        """Returns the parameters that caused a refusal and that the next attempt may leave out."""
        job = self._job
        failure = ended.failure
        if failure is None:
            return None
        left_out = {*ended.attempt.dropped_params, *(self._checkpoint.repairs or NO_REPAIRS).left_out}
        added = job.added_params
        _, _, api = params_key(job, self._target_of(ended.attempt))
        is_last_limit = api == "responses" or bool(left_out.intersection(OUTPUT_LIMITS))
        if api == "messages" or (is_last_limit and is_bounded(self._worker, job)):
            # Anthropic requires a limit, and so does a cap.
            added = added.difference(OUTPUT_LIMITS)
        return refused_params(failure, added - left_out, self._droppable_params() - left_out, job.own_params)

    def _droppable_params(self) -> frozenset[str]:
        """Returns the job's own parameters that a call may omit.

        The record names omitted parameters, so a parameter with a name that must not be stored is never omitted.
        """
        job = self._job
        redactor = self._worker.redactor
        if job.agent.on_unsupported_param == "fail":
            return frozenset()
        keeps_texts = self._worker.keeps_error_texts(job.agent)
        return frozenset(
            name for name in job.own_params if name in KNOWN_PARAMS or (keeps_texts and redactor.text(name) == name)
        )

    def _is_native(self, attempt: Attempt) -> bool:
        api = self._job.job.api
        return api != "chat" and api in self._target_of(attempt).apis

    async def _has_new_key(self, ended: CallEnd) -> bool:
        """Returns True if the provider's key is found to have changed before the job's deadline."""
        provider = self._worker.providers.get(self._target_of(ended.attempt).connection)
        if provider is None:
            return False
        # Not cancelled when the wait ends: other jobs may share this read of the key.
        reading = asyncio.ensure_future(provider.refresh_credential(ended.credential))
        finished_reads, _ = await asyncio.wait({reading}, timeout=max(0.0, self._remaining_s()))
        return reading.result() if finished_reads else False

    def _target_of(self, attempt: Attempt) -> Target:
        return self._worker.targets.of(self._job.agent_name, attempt.model, attempt.deployment)

    def _needs_other(self, ended: CallEnd) -> bool:
        """Returns True if a deployment would refuse the job again, as its key: the job waits for another."""
        failure = ended.failure
        return failure is not None and did_no_work(failure) and not is_retryable(failure, self._job.agent.retry)

    def _has_other(self, ended: CallEnd, attempts: Sequence[Attempt]) -> bool:
        """Returns True if the current model has a deployment that the job has not tried, and that may be called."""
        job = self._job
        targets = self._worker.targets.all_of(job.agent_name, attempts[-1].model)
        if len(targets) == 1:
            return False
        tried = {attempt.deployment for attempt in of_batch(attempts) if attempt.model == attempts[-1].model}
        others = [target for target in job.may_use(targets) if target.listed not in tried]
        if self._needs_other(ended):
            return bool(others)
        return any(self._worker.balancer.may_call(job.agent_name, target) for target in others)

    def _answers_others(self, attempts: Sequence[Attempt]) -> bool:
        """Returns True if the last deployment answered another job of this worker after this job first called it."""
        last = attempts[-1]
        answered_at = self._worker.outcomes.answered.get(self._target_of(last).deployment)
        called_at = min(attempt.started_at for attempt in attempts if attempt.unit == last.unit)
        return answered_at is not None and answered_at > called_at

    async def _within_retry_budget(self, attempt: Attempt, step: Retry, *, busy: bool) -> NextStep:
        worker = self._worker
        retry_id = self._job.attempt_id(attempt.number + 1)
        target = self._target_of(attempt)
        # Retries on a busy model need no budget: the hold on the model limits all calls to it.
        caller = caller_of(self._job.caller, self._job.job.tenant)
        if busy or await self._extending_deadline(
            lambda: worker.deployments.may_retry(target.deployment, retry_id, caller)
        ):
            state = "waiting" if step.delay_s >= LONG_WAIT_S else "retried"
            delay = {"delay_ms": round(step.delay_s * 1000), "detail": f"trying again in {step.delay_s:.1f} s"}
            await self._progress.failed("llm_retry_attempt", attempt, state, **delay)
            return step
        why = "the fleet's retry budget for this model is spent"
        await self._progress.failed("llm_retry_exhausted", attempt, detail=why)
        admission = admission_for(worker, self._job, self._checkpoint, target, 0.0, attempt.dropped_messages)
        return await self._refused(admission.flight, Refused("error", retry_budget_spent(attempt.model)))

    # Between attempts

    def _remaining_s(self) -> float:
        return (self._checkpoint.deadline - self._job.now()).total_seconds()

    async def _extending_deadline(self, work: Callable[[], Awaitable[Returned]]) -> Returned:
        """Retries idempotent work while a server is unavailable, and extends the job's deadline by that time."""
        worker = self._worker
        began = worker.clock()
        value = await worker.outages.retry_while_unavailable(work)
        if (waited_s := worker.clock() - began) > MIN_EXTENSION_S:
            self._checkpoint = self._checkpoint.extended(timedelta(seconds=waited_s))
        return value

    async def _wait(self, delay_s: float) -> Deferred | None:
        worker = self._worker
        job = self._job
        due = job.now() + timedelta(seconds=delay_s)
        self._checkpoint = self._checkpoint.waiting(job.chain[self._checkpoint.model_index], delay_s, due)
        if delay_s < LONG_WAIT_S:
            await self._note_wait(due)
            with self._cancel.interruptible():
                await worker.sleep(delay_s)
            return None
        await worker.outages.retry_while_unavailable(partial(self._save, self._checkpoint.text()))
        if (release := worker.guards.release_hold(job, self._checkpoint)) is not None:
            await worker.outages.retry_while_unavailable(lambda: worker.redis.run([release]))
        return Deferred(due, wait=self._wait_until(due))

    async def _note_wait(self, due: datetime) -> None:
        """Notes what the job waits for, if it waits for more than a moment. A note that is lost changes nothing."""
        now = self._job.now()
        waited_s = 0.0 if self._waits_for is None else self._waited[self._waits_for[1].refused.reason]
        if max(waited_s, (due - now).total_seconds()) < NOTED_WAIT_S or now < self._noted_until:
            return
        # A call that polls for capacity is noted once for several polls; its next call shows that the wait is over.
        self._noted_until = max(due, now + timedelta(seconds=NOTED_WAIT_S))
        with suppress(StateUnavailableError):
            await self._save("", self._wait_until(self._noted_until + timedelta(seconds=NOTED_WAIT_S)))

    def _wait_until(self, due: datetime) -> JobWait:
        now = self._job.now()
        if self._waits_for is not None:
            _, wait = self._waits_for
            return JobWait(
                kind=kind_of_wait(wait.refused),
                message=wait.refused.error.message,
                since=self._waits_since,
                until=due,
                ahead=wait.ahead,
                frees=wait.frees,
            )
        last = self._checkpoint.attempts[-1]
        failure = "" if last.error is None else f" ({last.error.class_})"
        message = f"a call of {last.model} failed{failure}, and is repeated"
        return JobWait(kind="back_off", message=message, since=now, until=due)

    async def _rest_of_wait(self, due: datetime) -> Deferred | None:
        """Waits for what remains of a delay if the job came back early, as after a crash during its parking."""
        rest_s = (due - self._job.now()).total_seconds()
        if rest_s >= LONG_WAIT_S:
            await self._progress.report("waiting", detail=f"trying again in {rest_s:.0f} s")
            return Deferred(due)
        if rest_s > 0:
            with self._cancel.interruptible():
                await self._worker.sleep(rest_s)
        return None

    def _lost_answer(self) -> JobEnd:
        """Ends a job whose published part of an answer can't be continued, as another call would cost money again."""
        return JobEnd(self._checkpoint, None, "worker_lost", LOST_ANSWER)

    async def _resume(self) -> JobEnd | NextStep | None:
        """Resumes after a crash. Returns None to continue from the checkpoint."""
        recovered = await recover(self._worker, self._job, self._checkpoint)
        self._checkpoint = recovered.checkpoint
        if self._stream is not None and self._stream.continues:
            model = self._job.chain[self._checkpoint.model_index]
            begun = [attempt.first_token_ms for attempt in self._checkpoint.attempts]
            begun += [] if recovered.lost is None else [recovered.lost[0].first_token_ms]
            published = any(first_token_ms is not None for first_token_ms in begun)
            next_number = len(self._checkpoint.attempts) + 1
            await self._stream.resume(self._checkpoint.partial, next_number, model, published=published)
        if recovered.lost is not None:
            return await self._lost_call(*recovered.lost)
        self._cancel.check()
        last = recovered.last
        stored_answer = self._stored_answer()
        if self._stream is not None and self._stream.is_lost and (last is None or last.outcome != "cancelled"):
            return self._lost_answer()
        if last is None:
            return None
        if last.outcome == "success" and stored_answer is not None:
            # The worker died after it recorded the attempt and before it stored the result.
            response = stored_answer.response if self._job.job.include_response else None
            answer = replace(stored_answer, response=response, finish_reason=last.finish_reason)
            return JobEnd(self._checkpoint, answer, chosen_model=last.model)
        if last.outcome == "cancelled":
            # Redis has lost the cancel request, but the log shows the cancelled attempt.
            return JobEnd(self._checkpoint, None, "cancelled", last.error)
        if last.short_circuited:
            ends = last.ends_chain or self._checkpoint.is_last_of(self._job.chain)
            return Stop(last.refused_reason or "error") if ends else NextModel()
        cut_off = last.error is not None and last.error.class_ == "OutputCutOffError"
        ended = CallEnd(last, classification_of(last, self._job.now()), lowered=cut_off)
        return await self._carry_out(ended, await self._decide(ended))

    def _stored_answer(self) -> Answer | None:
        """Returns the answer of an earlier worker, if the log has all of it."""
        return self._stream.whole_answer if self._stream is not None and self._stream.continues else None

    async def _unrecorded_call(self, flight: InFlight) -> JobEnd | NextStep | None:
        """Records the call that an earlier handling may have made, of which Redis has lost the checkpoint.

        Its id is that of the next call: without a record, two calls would have one, and the first would cost nothing.
        """
        self._checkpoint = self._checkpoint.model_copy(update={"may_have_called": False})
        if self._stream is not None:
            self._stream.lose_part()
        return await self._lost_call(flight, lost_attempt(self._job, flight, spent_at_most(flight)))

    async def _lost_call(self, flight: InFlight, attempt: Attempt) -> JobEnd | NextStep | None:
        """Records a call whose worker died. Returns None to continue from the checkpoint."""
        ended = CallEnd(attempt, WORKER_LOST)
        stored_answer = self._stored_answer()
        if stored_answer is not None:
            # The worker died after the last chunk and before it recorded the attempt.
            assert self._stream is not None
            flight = flight.model_copy(update={"chunks": self._stream.answer.chunks})
            ended = answered(self._worker, self._job, flight, flight.started_at, stored_answer)
            attempt = ended.attempt
        try:
            await self._record_lost(flight, attempt)
        except ClaimLostError:
            # The worker that made the call has recorded it after all. It stops, as it has lost the claim.
            return await self._resume()
        self._cancel.check()
        if self._stream is not None and self._stream.is_lost:
            return self._lost_answer()
        if ended.failure is None:
            return self._answered(ended)
        return await self._carry_out(ended, await self._decide(ended))

    async def _record_lost(self, flight: InFlight, attempt: Attempt) -> None:
        """Records the attempt of a call whose worker died. Raises ClaimLostError: that worker has recorded it."""
        target = self._worker.targets.of(self._job.agent_name, flight.model, flight.deployment)
        admission = Admission(self._job, target, self._checkpoint, flight, 0.0, attempt.attempt_id, None)
        await self._record(attempt, [gate(admission=admission) for gate in self._gates])

    async def _without_model(self, model: str, *, resumed: bool) -> JobEnd:
        """Ends a job whose model is not in its chain any more, and records the call of it that was under way."""
        if resumed or self._checkpoint.may_have_called:
            recovered = await recover(self._worker, self._job, self._checkpoint)
            self._checkpoint = recovered.checkpoint
            if recovered.lost is not None:
                try:
                    await self._record_lost(*recovered.lost)
                except ClaimLostError:
                    return await self._without_model(model, resumed=resumed)
        return JobEnd(self._checkpoint, None, "error", model_removed(model))


def _refusal_in(verdict: Refused | WaitForCapacity) -> Refused:
    return verdict.refused if isinstance(verdict, WaitForCapacity) else verdict


def _wait_s(verdict: Refused | WaitForCapacity) -> float:
    """Returns the seconds until a refused call may be asked for again; an end that is not known comes last."""
    return verdict.delay_s if isinstance(verdict, WaitForCapacity) else math.inf


_WAIT_KINDS: Mapping[Reason, WaitKind] = {
    "rate_limited": "rate_limit",
    "budget_exceeded": "budget",
    "breaker_open": "probe",
}


def kind_of_wait(refused: Refused) -> WaitKind:
    """Returns what a job waits for, by the refusal that it would get. A new gate may wait for any reason."""
    return "hold" if refused.error.class_ == HELD else _WAIT_KINDS.get(refused.reason, "gate")
