"""One call to a provider, its attempt, and the record of the attempt in the log.

The log accepts one message for the subject of each attempt: the first write wins.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from traceback import format_tb
from typing import cast

import structlog
from pydantic import JsonValue
from pydantic_core import to_json

from breakwater.calls.assignment import Assignment, InFlight
from breakwater.calls.gate import Refused
from breakwater.calls.providers.base import Answer, Call, CallError, refused
from breakwater.calls.rules.classify import (
    UNSUPPORTED,
    BrokenAnswer,
    Classification,
    HttpFailure,
    NotSent,
    ProgramFailure,
    classify,
    without_text,
)
from breakwater.calls.rules.output import Invalid, Valid
from breakwater.calls.rules.parameters import field_of
from breakwater.calls.rules.repairs import Correction, JsonMessage, Repairs
from breakwater.calls.targets import Target
from breakwater.dialects.rules import repaired_body
from breakwater.dialects.rules.embeddings import MAX_VECTOR_BYTES, dimensions_of, form_refused
from breakwater.dialects.rules.provider_state import AUTHOR, author_of, for_author
from breakwater.jobs.contract.execution import Attempt, Cancellation, Choice, CostBasis, ErrorInfo, Outcome
from breakwater.jobs.held_claims import JobCancelledError
from breakwater.jobs.rules.chat_messages import fields
from breakwater.jobs.rules.record import error_of
from breakwater.jobs.store.executions import ClaimLostError
from breakwater.kernel.errors import UnavailableError
from breakwater.kernel.json_values import TOO_DEEP, is_too_deep
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.errors import AlreadyDecidedError
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.telemetry import tracing
from breakwater.kernel.types import MAX_COUNTED
from breakwater.prices.price_list import Pricing
from breakwater.prices.rules.price import estimate_input_tokens, limited, size_of_messages
from breakwater.prices.rules.usage import Usage, credible, with_estimated_usage
from services.worker.context import WorkerContext
from services.worker.parsing import JobDelivery
from services.worker.spans import call_began, call_ended, operation_of
from services.worker.streaming import AttemptStream

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


@dataclass(frozen=True, slots=True)
class Ended:
    """A finished attempt, with what the next step depends on.

    Attributes:
        attempt: as it will be recorded.
        failure: the classified failure; None if the attempt succeeded.
        output: the answer, checked against the agent's schema; if a program failed, its `result`.
        credential: identifies the read of the key that a failed call was made with.
        correction: the feedback for the model if its answer did not satisfy the schema.
        response: the provider's response if the job wants it.
        choices: all choices if the call gave several.
        lowered: the call's output limit was lower than the job's.
    """

    attempt: Attempt
    failure: Classification | None
    output: JsonValue = None
    credential: int | None = None
    correction: Correction | None = None
    response: dict[str, JsonValue] | None = None
    choices: tuple[Choice, ...] = ()
    lowered: bool = False


@dataclass(frozen=True, slots=True)
class CallCost:
    """The usage and cost of a call as far as they are credible. The fields are those of its attempt."""

    cost: int | None = 0
    cost_basis: CostBasis = "billed"
    usage: Usage | None = None
    usage_problem: str | None = None
    response_model: str | None = None


NO_COST = CallCost()


async def call(
    worker: WorkerContext,
    job: Assignment,
    flight: InFlight,
    messages: Sequence[JsonMessage],
    timeout_s: float,
    repairs: Repairs,
    stream: AttemptStream | None = None,
) -> Ended:
    """Makes one call. The returned attempt is not recorded yet.

    `timeout_s` is the time limit of the answer, or of the beginning of a streamed one. `repairs` change the parameters.
    """
    started_at = job.now()
    if stream is not None:
        stream.called()  # after `started_at`: otherwise the first token could seem to arrive after the call's end
    guard = job.output_guard
    target = worker.targets.of(job.agent_name, flight.model)
    max_tokens = flight.max_tokens
    left_out = flight.left_out
    if repairs.output_limit is not None:
        max_tokens = min(repairs.output_limit, max_tokens or repairs.output_limit)
    state_repairs = {*repairs.state, *worker.state_repairs.get(flight.model, ())}
    if "thinking" in state_repairs:
        left_out = (*left_out, "thinking")
    native = guard is not None and guard.rules.native and "response_format" not in left_out
    span = tracing.begin(
        f"{operation_of(job)} {target.name}",
        parent=job.traceparent,
        kind="client",
        attributes=lambda: call_began(worker, job, flight, target.name, streaming=stream is not None),
    )
    params = job.params_without(left_out)
    if max_tokens is not None:
        params = limited(params, max_tokens)
    speaks = worker.config.speaks(flight.provider, job.job.api)
    is_repaired = messages is not job.messages and messages != job.messages
    author = None if speaks or job.job.api_request is None else author_of(target.deployment)
    if stream is not None:
        stream.author = author
    body = job.native_body(params, left_out) if speaks else None
    sent_messages = messages
    sent_params = params
    if not speaks:
        sent_messages, sent_params = job.chat_request(messages, params)
    if author is not None or state_repairs or (is_repaired and body is not None):
        sent_messages = for_author(sent_messages, author or "", state_repairs)
    if state_repairs and body is not None:
        body = repaired_body(job.job.api, body, state_repairs)
    request = Call(
        job.attempt_id(flight.number),
        target.name,
        sent_messages,
        sent_params,
        timeout_s,
        span.traceparent,
        agent=job.agent_name,
        execution_id=job.execution_id,
        tenant=job.job.tenant,
        task_id=job.job.task_id,
        input=job.job.input,
        output_schema=guard.schema if guard is not None and native else None,
        strict_output=guard is not None and guard.rules.strict and guard.fits_strict_mode,
        streaming=None if stream is None else stream.streaming,
        left_out=left_out,
        api=job.job.api if speaks else "chat",
        native=body,
        headers=dict(job.job.api_request.headers) if job.job.api_request else {},
        repaired=is_repaired,
    )
    sent = False
    answer = None
    try:
        try:
            with job.lease.cancel.interruptible():
                sent = True
                answer = await _performed(worker, job, flight, request)
            if stream is not None:
                answer = await stream.whole(answer)
                flight = stream.ended()
            if author is not None and answer.response is not None:
                answer = replace(answer, response={**answer.response, AUTHOR: author})
            ended = answered(worker, job, flight, started_at, answer)
        except CallError as failed:
            flight = flight if stream is None else stream.ended()
            part = _part(flight, target, stream, failed.usage)
            ended = _failed(worker, job, flight, started_at, failed, timeout_s, part)
        except JobCancelledError as cancelled:
            flight = flight if stream is None else stream.ended()
            part = _part(flight, target, stream, None)
            ended = _aborted(worker, job, flight, started_at, cancelled.cancellation, part, sent=sent)
        except (ClaimLostError, UnavailableError):
            raise
        except Exception as error:  # noqa: BLE001  any error is the end of an attempt
            flight = flight if stream is None else stream.ended()
            unread = _unread(error, request.attempt_id)
            ended = _failed(worker, job, flight, started_at, unread, timeout_s, None)
    except BaseException as error:
        # The worker stops or has a bug: there is no attempt to record.
        span.end(error=type(error).__name__)
        raise
    span.end(
        error=ended.failure.class_name if ended.failure is not None else None,
        attributes=lambda: call_ended(worker, job, messages, ended.attempt, answer),
    )
    return ended if flight.max_tokens is None else replace(ended, lowered=True)


async def _performed(worker: WorkerContext, job: Assignment, flight: InFlight, request: Call) -> Answer:
    """Returns a provider's answer, which may be empty if the agent allows that. Raises CallError."""
    try:
        losses = job.losses if request.native is None else ()
        if (loss := next((loss for loss in losses if field_of(loss.path) not in flight.left_out), None)) is not None:
            raise refused(loss.message, loss.path)
        answer = await worker.providers[flight.provider].perform(request)
    except CallError as failed:
        if job.agent.on_empty_answer == "fail" or classify(failed.failure, job.now()).class_name != "EmptyAnswerError":
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
    return Attempt(
        attempt_id=job.attempt_id(flight.number),
        execution_id=job.execution_id,
        agent=job.agent_name,
        tenant=job.job.tenant,
        task_id=job.job.task_id,
        submitted_by=job.submitted_by,
        caller=job.caller,
        cost_tags=dict(job.cost_tags),
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
        usage_problem=spent.usage_problem,
        response_model=spent.response_model,
        finish_reason=finish_reason,
        first_token_ms=flight.first_token_ms,
        chunks=flight.chunks,
        cost=spent.cost,
        cost_basis=spent.cost_basis if refusal is None else "none",
        reserved=None if flight.reserved_at is None else flight.reserved,
        reserved_at=flight.reserved_at,
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


async def recorded_attempt(worker: WorkerContext, job: Assignment | JobDelivery, number: int) -> Attempt | None:
    """Returns the record of an attempt, written by any worker."""
    subject = subjects.attempt(job.agent_name, job.execution_id, number)
    event = await worker.outages.retry_while_unavailable(lambda: worker.lookup.last(Stream.EVENTS, subject))
    return None if event is None else Attempt.model_validate_json(event.data)


def spent_at_most(flight: InFlight) -> CallCost:
    """Estimates the cost of a call about which nothing is reported: its reservation, and its estimated input."""
    basis: CostBasis = "unknown" if flight.reserved is None else "estimated"
    return CallCost(flight.reserved, basis, _with_estimates(flight, None))


def _spent(
    worker: WorkerContext,
    job: Assignment,
    flight: InFlight,
    usage: Usage | None,
    cost: int | None,
    *,
    maybe_billed: bool,
    part: Usage | None = None,
) -> CallCost:
    """Returns the reported usage and cost of a call. A missing cost is estimated, at most as its reservation.

    `part` is the usage with its missing figures estimated from the received part of the answer.
    """
    target = worker.targets.of(job.agent_name, flight.model)
    reported = usage or part
    answering_model = None if reported is None else reported.model
    other_model = (
        None
        if answering_model is None or answering_model == target.name
        else worker.targets.other(target, answering_model)
    )
    price = partial(_priced, flight, usage, cost, maybe_billed=maybe_billed, part=part)
    if other_model is None or answering_model is None:
        spent = price(target.pricing, max_estimate=flight.reserved)
    else:
        spent = price(
            other_model.pricing or target.pricing, max_estimate=None if other_model.pricing else flight.reserved
        )
        name = other_model.known_name or worker.storable_word(job.agent, answering_model)
        worker.targets.log_other(target, name)
        spent = replace(spent, response_model=name)
        if other_model.pricing is None and cost is None:
            doubt = f"the model {name} answered, which has no price"
            basis: CostBasis = "estimated" if spent.cost_basis == "billed" else spent.cost_basis
            problem = "; ".join(filter(None, (spent.usage_problem, doubt)))
            spent = replace(spent, cost_basis=basis, usage_problem=problem)
    if spent.usage_problem is not None and reported is not None:
        for term in reported.terms:
            storable_term = worker.storable_word(job.agent, term)
            spent = replace(spent, usage_problem=(spent.usage_problem or "").replace(repr(term), repr(storable_term)))
    return spent


def _priced(
    flight: InFlight,
    usage: Usage | None,
    cost: int | None,
    pricing: Pricing | None,
    *,
    maybe_billed: bool,
    part: Usage | None,
    max_estimate: int | None = None,
) -> CallCost:
    """Returns the usage and cost of a call at the given prices. An estimate is at most `max_estimate`."""
    problem = None if usage is None else usage.problem
    usage_cost = pricing.cost(usage) if cost is None and usage is not None and pricing is not None else None
    if usage_cost is not None:
        if usage_cost.unknown is not None:
            return CallCost(None, "unknown", usage, problem or usage_cost.unknown)
        if usage_cost.nano <= MAX_COUNTED:
            problem = problem or usage_cost.doubt
            return CallCost(usage_cost.nano, "billed" if problem is None else "estimated", usage, problem)
        problem = "the reported usage exceeds what can be counted at the model's price"
    if cost is None:
        usage = part or usage
    if maybe_billed:
        usage = _with_estimates(flight, usage)
    if cost is not None:
        return CallCost(cost, "billed", usage, problem)
    part_cost = pricing.cost(part) if part is not None and pricing is not None else None
    if part_cost is not None:
        estimate = part_cost.nano if max_estimate is None else min(part_cost.nano, max_estimate)
        return CallCost(estimate, "estimated", part, problem)
    return replace(spent_at_most(flight) if maybe_billed else NO_COST, usage=usage, usage_problem=problem)


def answered(
    worker: WorkerContext,
    job: Assignment,
    flight: InFlight,
    started_at: datetime,
    answer: Answer,
) -> Ended:
    """Ends an attempt with an answer, which may be refused. The returned attempt is not recorded yet."""
    used = credible(answer.usage)
    part = None
    embeds = job.job.api == "embeddings"
    unread = used.output_tokens is None
    if flight.input_tokens is not None:
        if used.output_tokens == 0 and answer.output and not embeds:
            problem = "0 output tokens were reported for an answer that is not empty"
            used = replace(used, output_tokens=None, problem="; ".join(filter(None, (used.problem, problem))))
        if None in (used.input_tokens, used.output_tokens):
            part = _with_estimates(
                flight, used, worker.targets.of(job.agent_name, flight.model), _generated_messages(answer)
            )
    # Without reported output tokens, the call counts with its highest possible cost: a model may think more than it
    # writes.
    spent = _spent(worker, job, flight, used, answer.cost, maybe_billed=True, part=None if unread else part)
    if spent.usage is not (usage := part or used):
        spent = replace(spent, usage=usage)

    reason = answer.finish_reason and worker.storable_word(job.agent, answer.finish_reason)
    attempt = partial(attempt_of, job, flight, started_at, spent=spent, finish_reason=reason)

    def refusal(class_name: str, text: str, correction: Correction | None = None) -> Ended:
        kind = "client" if correction is None else "logic"
        failure = Classification(kind, class_name, text, None, retryable=False, counts_for_breaker=False)
        return Ended(attempt("error", error=failure.error_info()), failure, correction=correction)

    guard = job.output_guard
    output = answer.output
    text = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
    if (output_bytes := len(text.encode())) > MAX_ANSWER_BYTES:
        return refusal(
            "AnswerTooLargeError", f"the answer has {output_bytes} bytes; at most {MAX_ANSWER_BYTES} can be stored"
        )
    if (choices_bytes := len(to_json(answer.choices))) > MAX_RESPONSE_BYTES:
        text = f"the answer's choices have {choices_bytes} bytes; at most {MAX_RESPONSE_BYTES} can be stored"
        return refusal("AnswerTooLargeError", text)
    if flight.max_tokens is not None and answer.finish_reason == "length":
        return refusal(
            "OutputCutOffError",
            f"the answer was truncated at {flight.max_tokens} tokens, the reservation of its budgets",
        )
    checked = Valid(output) if guard is None else guard.check(output)
    if isinstance(checked, Invalid):
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
        return refusal("InvalidOutputError", f"the answer does not satisfy the output schema: {problems}", correction)
    response = answer.response if job.job.returns_response else None
    if response is not None and part is not None and job.agent.usage_estimates:
        response = with_estimated_usage(response, part)
    if embeds and (wrong := _wrong_embeddings(worker, job, flight, answer)) is not None:
        return refusal(*wrong)
    if not embeds and response is not None:
        is_native = worker.config.speaks(flight.provider, job.job.api) and job.job.api != "chat"
        stored_bytes = len(to_json(response)) + (output_bytes if is_native else choices_bytes)
        max_bytes = MAX_NATIVE_BYTES if is_native else MAX_RESPONSE_BYTES
        if stored_bytes > max_bytes:
            if is_native:  # it may have images and the like, which the output lacks
                text = f"the answer has {stored_bytes} bytes; at most {max_bytes} can be stored"
                return refusal("AnswerTooLargeError", text)
            response = None
    return Ended(attempt("success"), None, checked.value, response=response, choices=answer.choices)


def _wrong_embeddings(
    worker: WorkerContext, job: Assignment, flight: InFlight, answer: Answer
) -> tuple[str, str] | None:
    """Returns the class and the text of the error if embeddings must not be used or can't be stored."""
    dimensions = cast(dict[str, int], answer.output)["dimensions"]
    declared = worker.config.dimensions(flight.model)
    expected = dimensions_of(job.parameters.values, declared)
    if expected not in {None, dimensions}:
        expectation = (
            "the request asks for"
            if job.parameters.values.get("dimensions")
            else f"models.{flight.model}.dimensions is"
        )
        return "WrongDimensionsError", f"the vectors have {dimensions} dimensions, and {expectation} {expected}"
    if (size := len(to_json(answer.response))) > MAX_EMBEDDINGS_BYTES:
        text = (
            f"the answer has {size} bytes; at most {MAX_EMBEDDINGS_BYTES} can be stored: send fewer inputs in a request"
        )
        return "AnswerTooLargeError", text
    return None


def _generated_messages(answer: Answer) -> list[JsonValue | JsonMessage]:
    """Returns everything that a model generated: its output, and its thoughts if it shows them."""
    response = answer.response or {}
    choices = response.get("choices")
    content = response.get("content")
    if isinstance(choices, list):
        return [dict(fields(fields(choice).get("message"))) for choice in choices]
    return [{"content": answer.output if content is None else content}]


def _part(flight: InFlight, target: Target, stream: AttemptStream | None, reported: Usage | None) -> Usage | None:
    """Estimates the usage of an answer that broke off from its received part; None if nothing was received.

    If more output tokens were reported than estimated, the reported number counts.
    """
    if stream is None or not stream.begun:
        return None
    generated = stream.streaming.answer.messages().values()
    reported_usage = credible(reported or Usage(None, None))
    part = _with_estimates(flight, replace(reported_usage, output_tokens=None), target, generated)
    return replace(part, output_tokens=max(part.output_tokens or 0, reported_usage.output_tokens or 0) or None)


def _with_estimates(
    flight: InFlight,
    usage: Usage | None,
    target: Target | None = None,
    generated: Iterable[JsonValue | JsonMessage] = (),
) -> Usage:
    """Fills the missing figures of a call's reported usage with estimates.

    There are none for a program, whose input and output need not be tokens of a model.

    Args:
        flight: the attempt, with its input tokens as estimated before the call.
        usage: the reported usage.
        target: the model, if a part of an answer was received.
        generated: everything received of the answer.
    """
    usage = usage or Usage(None, None)
    if flight.input_tokens is None:
        return usage
    if usage.input_tokens is None:
        usage = replace(usage, input_tokens=flight.input_tokens)
    if usage.output_tokens is None and target is not None:
        size = size_of_messages(
            message if isinstance(message, Mapping) else {"content": message} for message in generated
        )
        usage = replace(usage, output_tokens=estimate_input_tokens(size, target.token_rules))
    return usage


def _aborted(
    worker: WorkerContext,
    job: Assignment,
    flight: InFlight,
    started_at: datetime,
    cancellation: Cancellation,
    part: Usage | None,
    *,
    sent: bool,
) -> Ended:
    """Ends an attempt whose call was aborted by the job's cancellation. The provider may bill it all the same."""
    spent = _spent(worker, job, flight, None, None, maybe_billed=sent, part=part)
    error = error_of(cancellation)
    attempt = attempt_of(job, flight, started_at, "cancelled", spent=spent, error=error)
    failure = Classification(error.kind, error.class_, error.message, None, retryable=False, counts_for_breaker=False)
    return Ended(attempt, failure)


def _failed(
    worker: WorkerContext,
    job: Assignment,
    flight: InFlight,
    started_at: datetime,
    failed: CallError,
    timeout_s: float,
    part: Usage | None,
) -> Ended:
    failure = classify(failed.failure, job.now())
    if job.job.api == "embeddings" and failure.kind == "client":
        refused_form = form_refused(job.parameters.values, failure.status_code, failure.param, failure.message)
        failure = replace(failure, class_name=UNSUPPORTED, param="encoding_format") if refused_form else failure
    counted = failure.counts_for_breaker or (
        job.agent.breaker_counts_rate_limits
        if failure.kind == "rate_limit"
        else job.agent.breaker_counts_auth_errors and failure.status_code in {401, 402, 403}
    )
    if failure.kind == "timeout" and timeout_s < job.agent.timeout_s:
        counted = False  # the job's own deadline cut the call short, which says nothing about the model
    of_model = flight.input_tokens is not None
    broke_off = of_model and part is not None and failed.finish_reason is None  # the report is incomplete
    used = None if failed.usage is None or broke_off else credible(failed.usage)
    spent = _spent(worker, job, flight, used, failed.cost, maybe_billed=failed.maybe_billed, part=part)
    # Errors are identified by their stored text, so two errors that differ only in a secret are the same.
    stored_message: str | None = None
    if worker.keeps_error_texts(job.agent):
        stored_failure = replace(failure, message=worker.redactor.text(failure.message))
        # The texts of other failures, as of the network, are ours or the system's.
        stored_message = (
            stored_failure.message if isinstance(failed.failure, HttpFailure | ProgramFailure | NotSent) else None
        )
    else:
        stored_failure = without_text(failure, failed.failure)
        failure = replace(failure, class_name=stored_failure.class_name)
    error = stored_failure.error_info(
        stored_message, (flight.model, worker.targets.of(job.agent_name, flight.model).name)
    )
    attempt = attempt_of(
        job,
        flight,
        started_at,
        "error",
        spent=spent,
        finish_reason=failed.finish_reason and worker.storable_word(job.agent, failed.finish_reason),
        error=error,
        counted=counted,
    )
    response = _readable_response(failed.response, flight)
    return Ended(
        attempt,
        failure,
        (response or {}).get("result"),
        credential=failed.credential,
        response=response if job.job.returns_response else None,
    )


def _readable_response(response: dict[str, JsonValue] | None, flight: InFlight) -> dict[str, JsonValue] | None:
    """Returns the response of a failed program, if it fits into a result and every reader can parse it."""
    if response is None or (not is_too_deep(response) and len(to_json(response)) <= MAX_RESPONSE_BYTES):
        return response
    structlog.get_logger().warning("failed_response_omitted", model=flight.model, limit=MAX_RESPONSE_BYTES)
    return None
