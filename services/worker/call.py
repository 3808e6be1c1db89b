"""One call to a provider, from its request to the attempt that is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from traceback import format_tb

import structlog

from breakwater.calls.assignment import Assignment, InFlight
from breakwater.calls.providers.base import Answer, Call, CallError, refusal_of
from breakwater.calls.rules.classify import BrokenAnswer, classify
from breakwater.calls.rules.parameters import field_of
from breakwater.calls.rules.repairs import JsonMessage, Repairs
from breakwater.calls.targets import Target
from breakwater.dialects.rules.provider_state import AUTHOR
from breakwater.jobs.held_claims import JobCancelledError
from breakwater.jobs.store.executions import ClaimLostError
from breakwater.kernel.errors import UnavailableError
from breakwater.kernel.json_values import TOO_DEEP, is_too_deep
from breakwater.kernel.telemetry import tracing
from breakwater.prices.rules.usage import Usage
from breakwater.services.worker.call_cost import usage_of_part
from breakwater.services.worker.call_end import CallEnd, aborted, answered, failed
from breakwater.services.worker.call_request import author_of_answer, call_request
from breakwater.services.worker.context import WorkerContext
from breakwater.services.worker.spans import call_began, call_ended, operation_of
from breakwater.services.worker.streaming import AttemptStream


async def call(
    worker: WorkerContext,
    job: Assignment,
    flight: InFlight,
    messages: Sequence[JsonMessage],
    timeout_s: float,
    repairs: Repairs,
    stream: AttemptStream | None = None,
) -> CallEnd:
    """Makes one call. The returned attempt is not recorded yet.

    `timeout_s` is the time limit of the answer, or of the beginning of a streamed one. `repairs` change the parameters.
    """
    attempt_call = _AttemptCall(worker, job, flight, stream)
    target = attempt_call.target
    span = tracing.begin(
        f"{operation_of(job)} {target.name}",
        parent=job.traceparent,
        kind="client",
        attributes=lambda: call_began(worker, job, flight, target.name, streaming=stream is not None),
    )
    request = call_request(
        worker,
        job,
        flight,
        messages,
        timeout_s,
        repairs,
        target=target,
        author=attempt_call.author,
        traceparent=span.traceparent,
        streaming=None if stream is None else stream.receiver(),
    )
    try:
        ended = await attempt_call.make(request)
    except BaseException as error:
        # The worker stops or has a bug: there is no attempt to record.
        span.end(error=type(error).__name__)
        raise
    span.end(
        error=ended.failure.class_name if ended.failure is not None else None,
        attributes=lambda: call_ended(worker, job, messages, ended.attempt, attempt_call.answer),
    )
    return ended


class _AttemptCall:
    """The call of one attempt.

    Attributes:
        target: the called model.
        author: the signature of its answer; see `author_of_answer`.
        answer: the answer, complete if it was streamed; None before it arrives, and if the call fails.
    """

    def __init__(self, worker: WorkerContext, job: Assignment, flight: InFlight, stream: AttemptStream | None) -> None:
        self._worker = worker
        self._job = job
        self._flight = flight
        self.target = worker.targets.of(job.agent_name, flight.model, flight.deployment)
        self.author = author_of_answer(job, self.target)
        self._stream = stream
        self._started_at = job.now()
        if stream is not None:
            stream.author = self.author
            stream.called()  # after `started_at`: otherwise the first token could seem to arrive after the call's end
        self.answer: Answer | None = None

    async def make(self, request: Call) -> CallEnd:
        """Makes the call. Raises ClaimLostError, UnavailableError: there is no attempt to record."""
        sent = False
        try:
            with self._job.lease.cancel.interruptible():
                sent = True
                self.answer = await _performed(self._worker, self._job, self._flight, self.target, request)
            if self._stream is not None:
                self.answer = await self._stream.whole(self.answer)
            if self.author is not None and self.answer.response is not None:
                self.answer = replace(self.answer, response={**self.answer.response, AUTHOR: self.author})
            return answered(self._worker, self._job, self._flight_at_end(), self._started_at, self.answer)
        except CallError as error:
            flight = self._flight_at_end()
            return self._failed(flight, error, request.timeout_s, self._usage_of_part(flight, error.usage))
        except JobCancelledError as stop:
            flight = self._flight_at_end()
            part = self._usage_of_part(flight, None)
            return aborted(self._worker, self._job, flight, self._started_at, stop.cancellation, part, sent=sent)
        except (ClaimLostError, UnavailableError):
            raise
        except Exception as error:  # noqa: BLE001  any error is the end of an attempt
            return self._failed(self._flight_at_end(), _unread(error, request.attempt_id), request.timeout_s, None)

    def _flight_at_end(self) -> InFlight:
        """Returns the attempt with the number of chunks that it has received."""
        return self._flight if self._stream is None else self._stream.ended()

    def _failed(self, flight: InFlight, error: CallError, timeout_s: float, part: Usage | None) -> CallEnd:
        return failed(self._worker, self._job, flight, self._started_at, error, timeout_s, part)

    def _usage_of_part(self, flight: InFlight, reported: Usage | None) -> Usage | None:
        """Estimates the usage of an answer that broke off; None if nothing was received."""
        if self._stream is None or not self._stream.begun:
            return None
        generated = self._stream.answer.messages().values()
        return usage_of_part(flight, self.target, generated, reported)


async def _performed(worker: WorkerContext, job: Assignment, flight: InFlight, target: Target, request: Call) -> Answer:
    """Returns a provider's answer, which may be empty if the agent allows that. Raises CallError."""
    try:
        losses = job.losses if request.native is None else ()
        if (loss := next((loss for loss in losses if field_of(loss.path) not in flight.left_out), None)) is not None:
            raise refusal_of(loss.message, loss.path)
        answer = await worker.providers[target.connection].perform(request)
    except CallError as failed:
        class_name = classify(failed.failure, job.now()).class_name
        may_be_empty = class_name == "EmptyAnswerError" and (job.agent.on_empty_answer != "fail" or job.is_probe)
        # A model that has spent the few tokens of a probe on thinking is well.
        if not may_be_empty and not (job.is_probe and class_name == "OutputLimitError"):
            raise
        return Answer("", failed.usage or Usage(None, None), finish_reason=failed.finish_reason)
    # Checked for every provider: all who wait for a published answer must be able to read it.
    response = answer.response if job.job.returns_response else None
    if any(map(is_too_deep, (answer.output, response, *(choice.output for choice in answer.choices)))):
        broken = BrokenAnswer(f"the answer {TOO_DEEP}", storable=False)
        reason = answer.finish_reason
        raise CallError(broken, maybe_billed=True, usage=answer.usage, cost=answer.cost, finish_reason=reason)
    return answer


def _unread(error: Exception, attempt_id: str) -> CallError:
    """Describes the failure of a call whose answer the worker could not read."""
    # The error's text may quote the answer.
    frames = "".join(format_tb(error.__traceback__))
    name = type(error).__name__
    structlog.get_logger().error("answer_not_read", attempt_id=attempt_id, error=name, traceback=frames)
    text = f"the answer could not be read: {name} in the worker; see its log"
    return CallError(BrokenAnswer(text), maybe_billed=True)
