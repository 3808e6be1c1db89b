"""The end of a call: an answer that is used or refused, a failure, or a cancellation, each with its attempt."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from typing import cast

import structlog
from pydantic import JsonValue
from pydantic_core import to_json

from breakwater.calls.assignment import Assignment, InFlight
from breakwater.calls.providers.base import Answer, CallError
from breakwater.calls.rules.classify import (
    UNSUPPORTED,
    Classification,
    HttpFailure,
    NotSent,
    ProgramFailure,
    classify,
    without_text,
)
from breakwater.calls.rules.output import Invalid
from breakwater.calls.rules.repairs import Correction
from breakwater.dialects.rules.embeddings import MAX_VECTOR_BYTES, dimensions_of, form_refused
from breakwater.jobs.contract.execution import Attempt, Cancellation
from breakwater.jobs.rules.record import error_of
from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.immutable import changed, immutable
from breakwater.kernel.json_values import is_too_deep
from breakwater.prices.rules.usage import Usage, credible, with_estimated_usage
from breakwater.services.worker.attempt_record import attempt_of
from breakwater.services.worker.call_cost import CallCost, cost_of, generated_messages, with_estimates
from breakwater.services.worker.context import WorkerContext

MAX_ANSWER_BYTES = 4 * 1024 * 1024
"""The size limit of an answer as JSON.

The result and the record contain it and the attempts, and the NATS servers take messages of up to 8 MB.
"""

MAX_RESPONSE_BYTES = 3 * 1024 * 1024
"""The size limit of a response as JSON: the result contains the response and the answer."""

MAX_NATIVE_BYTES = 6_000_000
"""The size limit of the response and the output together, for APIs other than chat."""

MAX_EMBEDDINGS_BYTES = MAX_VECTOR_BYTES + 500_000
"""The size limit of a response with vectors; the result of a job for embeddings has little else."""

MAX_PROBLEMS_TEXT = 2_000


@immutable()
class CallEnd:
    """The end of a call: its attempt, and what the next step depends on.

    Attributes:
        attempt: as it will be recorded.
        failure: the classified failure; None if the attempt succeeded.
        answer: the answer with its output as the agent's schema wants it, and with the response if the job wants it; if
            a program failed, its `result`.
        credential: identifies the read of the key that a failed call was made with.
        correction: the feedback for the model if its answer did not satisfy the schema.
        lowered: the call's output limit was lower than the job's.
    """

    attempt: Attempt
    failure: Classification | None
    answer: Answer | None = None
    credential: int | None = None
    correction: Correction | None = None
    lowered: bool = False


class _RefusedAnswerError(BreakwaterError):
    """An answer can't be used or stored. `correction` is set if the model may correct it."""

    def __init__(self, class_name: str, text: str, correction: Correction | None = None) -> None:
        super().__init__(text)
        kind = "client" if correction is None else "logic"
        self.failure = Classification(kind, class_name, text, None, retryable=False, counts_for_breaker=False)
        self.correction = correction


def answered(worker: WorkerContext, job: Assignment, flight: InFlight, started_at: datetime, answer: Answer) -> CallEnd:
    """Ends an attempt with an answer, which may be refused. The returned attempt is not recorded yet."""
    spent, part = _cost_of_answer(worker, job, flight, answer)
    reason = answer.finish_reason and worker.storable_word(job.agent, answer.finish_reason)
    lowered = flight.max_tokens is not None
    try:
        text = answer.output if isinstance(answer.output, str) else json.dumps(answer.output, ensure_ascii=False)
        output_bytes = len(text.encode())
        choices_bytes = len(to_json(answer.choices))
        _check_size(output_bytes, choices_bytes)
        _check_not_cut_off(flight, answer)
        output = _checked_output(worker, job, flight, answer.output, text)
        response = answer.response if job.job.returns_response else None
        if response is not None and part is not None and job.agent.usage_estimates:
            response = with_estimated_usage(response, part)
        if job.job.api == "embeddings":
            _check_embeddings(worker, job, flight, answer)
        elif response is not None:
            response = _storable_response(worker, job, flight, response, output_bytes, choices_bytes)
    except _RefusedAnswerError as refused:
        error = refused.failure.error_info()
        attempt = attempt_of(job, flight, started_at, "error", spent=spent, finish_reason=reason, error=error)
        return CallEnd(attempt, refused.failure, correction=refused.correction, lowered=lowered)
    attempt = attempt_of(job, flight, started_at, "success", spent=spent, finish_reason=reason)
    if output is not answer.output or response is not answer.response or reason != answer.finish_reason:
        answer = changed(answer, output=output, response=response, finish_reason=reason)
    return CallEnd(attempt, None, answer, lowered=lowered)


def _cost_of_answer(
    worker: WorkerContext, job: Assignment, flight: InFlight, answer: Answer
) -> tuple[CallCost, Usage | None]:
    """Returns the cost of an answer, and its usage with estimates in place of missing figures, if any are missing."""
    used = credible(answer.usage)
    part = None
    unread = used.output_tokens is None
    if flight.input_tokens is not None:
        if used.output_tokens == 0 and answer.output and job.job.api != "embeddings":
            problem = "0 output tokens were reported for an answer that is not empty"
            used = replace(used, output_tokens=None, problem="; ".join(filter(None, (used.problem, problem))))
        if None in (used.input_tokens, used.output_tokens):
            target = worker.targets.of(job.agent_name, flight.model, flight.deployment)
            part = with_estimates(flight, used, target, generated_messages(answer))
    # Without reported output tokens, the call counts with its highest possible cost: a model may think more than it
    # writes.
    spent = cost_of(worker, job, flight, used, answer.cost, maybe_billed=True, part=None if unread else part)
    usage = part or used
    return spent if spent.usage is usage else replace(spent, usage=usage), part


def _check_size(output_bytes: int, choices_bytes: int) -> None:
    if output_bytes > MAX_ANSWER_BYTES:
        text = f"the answer has {output_bytes} bytes; at most {MAX_ANSWER_BYTES} can be stored"
        raise _RefusedAnswerError("AnswerTooLargeError", text)
    if choices_bytes > MAX_RESPONSE_BYTES:
        text = f"the answer's choices have {choices_bytes} bytes; at most {MAX_RESPONSE_BYTES} can be stored"
        raise _RefusedAnswerError("AnswerTooLargeError", text)


def _check_not_cut_off(flight: InFlight, answer: Answer) -> None:
    if flight.max_tokens is not None and answer.finish_reason == "length":
        text = f"the answer was truncated at {flight.max_tokens} tokens, the reservation of its limits"
        raise _RefusedAnswerError("OutputCutOffError", text)


def _checked_output(
    worker: WorkerContext, job: Assignment, flight: InFlight, output: JsonValue, text: str
) -> JsonValue:
    """Returns the output as the agent's schema wants it. Raises _RefusedAnswerError."""
    if job.output_guard is None:
        return output
    checked = job.output_guard.check(output)
    if not isinstance(checked, Invalid):
        return checked.value
    # Redacted before it is cut: the redactor would not recognize a part of a secret.
    problems = worker.redactor.text("; ".join(checked.problems))[:MAX_PROBLEMS_TEXT]
    if not worker.keeps_error_texts(job.agent):
        problems = f"{len(checked.problems)} problems, whose texts are not kept for this agent"
    # Only the number of problems is logged: their texts quote the answer.
    structlog.get_logger().warning(
        "output_validation_failed",
        agent=job.agent_name,
        model=flight.model,
        attempt_id=job.attempt_id(flight.number),
        problems=len(checked.problems),
    )
    correction = Correction(answer=text, problems=checked.problems)
    problem = f"the answer does not satisfy the output schema: {problems}"
    raise _RefusedAnswerError("InvalidOutputError", problem, correction)


def _storable_response(
    worker: WorkerContext,
    job: Assignment,
    flight: InFlight,
    response: dict[str, JsonValue],
    output_bytes: int,
    choices_bytes: int,
) -> dict[str, JsonValue] | None:
    """Returns the response if it can be stored with the answer; None if the answer does without it."""
    target = worker.targets.of(job.agent_name, flight.model, flight.deployment)
    if job.job.api == "chat" or job.job.api not in target.apis:
        return response if len(to_json(response)) + choices_bytes <= MAX_RESPONSE_BYTES else None
    # It may have images and the like, which the output lacks.
    stored_bytes = len(to_json(response)) + output_bytes
    if stored_bytes > MAX_NATIVE_BYTES:
        text = f"the answer has {stored_bytes} bytes; at most {MAX_NATIVE_BYTES} can be stored"
        raise _RefusedAnswerError("AnswerTooLargeError", text)
    return response


def _check_embeddings(worker: WorkerContext, job: Assignment, flight: InFlight, answer: Answer) -> None:
    """Raises _RefusedAnswerError if embeddings must not be used or can't be stored."""
    dimensions = cast(dict[str, int], answer.output)["dimensions"]
    values = job.parameters.values
    expected = dimensions_of(values, worker.config.dimensions(flight.model))
    if expected not in {None, dimensions}:
        setting = f"models.{flight.model}.dimensions is"
        expectation = "the request asks for" if values.get("dimensions") else setting
        text = f"the vectors have {dimensions} dimensions, and {expectation} {expected}"
        raise _RefusedAnswerError("WrongDimensionsError", text)
    if (size := len(to_json(answer.response))) > MAX_EMBEDDINGS_BYTES:
        most = f"at most {MAX_EMBEDDINGS_BYTES} can be stored"
        raise _RefusedAnswerError(
            "AnswerTooLargeError", f"the answer has {size} bytes; {most}: send fewer inputs in a request"
        )


def aborted(
    worker: WorkerContext,
    job: Assignment,
    flight: InFlight,
    started_at: datetime,
    cancellation: Cancellation,
    part: Usage | None,
    *,
    sent: bool,
) -> CallEnd:
    """Ends an attempt whose call was aborted by the job's cancellation. The provider may bill it all the same."""
    spent = cost_of(worker, job, flight, None, None, maybe_billed=sent, part=part)
    error = error_of(cancellation)
    attempt = attempt_of(job, flight, started_at, "cancelled", spent=spent, error=error)
    failure = Classification(error.kind, error.class_, error.message, None, retryable=False, counts_for_breaker=False)
    return CallEnd(attempt, failure, lowered=flight.max_tokens is not None)


def failed(
    worker: WorkerContext,
    job: Assignment,
    flight: InFlight,
    started_at: datetime,
    error: CallError,
    timeout_s: float,
    part: Usage | None,
) -> CallEnd:
    """Ends an attempt whose call gave no usable answer."""
    failure = _failure_of(job, error)
    # The report of an answer that broke off is incomplete.
    broke_off = flight.input_tokens is not None and part is not None and error.finish_reason is None
    used = None if error.usage is None or broke_off else credible(error.usage)
    failure, stored_failure, stored_message = _storable_failure(worker, job, failure, error)
    own_names = (flight.model, worker.targets.of(job.agent_name, flight.model, flight.deployment).name)
    attempt = attempt_of(
        job,
        flight,
        started_at,
        "error",
        spent=cost_of(worker, job, flight, used, error.cost, maybe_billed=error.maybe_billed, part=part),
        finish_reason=error.finish_reason and worker.storable_word(job.agent, error.finish_reason),
        error=stored_failure.error_info(stored_message, own_names),
        counted=_counts_for_breaker(job, failure, timeout_s),
    )
    response = _readable_response(error.response, flight)
    answer = None
    if response is not None:
        answer = Answer(response.get("result"), response=response if job.job.returns_response else None)
    return CallEnd(attempt, failure, answer, credential=error.credential, lowered=flight.max_tokens is not None)


def _failure_of(job: Assignment, error: CallError) -> Classification:
    failure = classify(error.failure, job.now())
    if job.job.api != "embeddings" or failure.kind != "client":
        return failure
    refused_form = form_refused(job.parameters.values, failure.status_code, failure.param, failure.message)
    return replace(failure, class_name=UNSUPPORTED, param="encoding_format") if refused_form else failure


def _counts_for_breaker(job: Assignment, failure: Classification, timeout_s: float) -> bool:
    if failure.kind == "timeout" and timeout_s < job.agent.timeout_s:
        return False  # the job's own deadline cut the call short, which says nothing about the model
    if failure.counts_for_breaker:
        return True
    if failure.kind == "rate_limit":
        return job.agent.breaker_counts_rate_limits
    return job.agent.breaker_counts_auth_errors and failure.status_code in {401, 402, 403}


def _storable_failure(
    worker: WorkerContext, job: Assignment, failure: Classification, error: CallError
) -> tuple[Classification, Classification, str | None]:
    """Returns a failure as the job goes on with it, the failure as it is stored, and the provider's own message.

    Errors are identified by their stored text, so two errors that differ only in a secret are the same.
    """
    if not worker.keeps_error_texts(job.agent):
        stored_failure = without_text(failure, error.failure)
        return replace(failure, class_name=stored_failure.class_name), stored_failure, None
    stored_failure = replace(failure, message=worker.redactor.text(failure.message))
    # The texts of other failures, as of the network, are ours or the system's.
    is_providers = isinstance(error.failure, HttpFailure | ProgramFailure | NotSent)
    return failure, stored_failure, stored_failure.message if is_providers else None


def _readable_response(response: dict[str, JsonValue] | None, flight: InFlight) -> dict[str, JsonValue] | None:
    """Returns the response of a failed program, if it fits into a result and every reader can parse it."""
    if response is None or (not is_too_deep(response) and len(to_json(response)) <= MAX_RESPONSE_BYTES):
        return response
    structlog.get_logger().warning("failed_response_omitted", model=flight.model, limit=MAX_RESPONSE_BYTES)
    return None
