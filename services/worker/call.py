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
from services.worker.leases import JobCancelledError
from services.worker.parsing import JobDelivery
from services.worker.spans import call_began, call_ended, operation_of
from services.worker.streaming import AttemptStream

MAX_ANSWER_BYTES = 4 * 1024 * 1024
"""As JSON. Result and record hold it next to the attempts, and the NATS servers take messages of up to 8 MB."""

MAX_RESPONSE_BYTES = 3 * 1024 * 1024
"""The size limit of a response as JSON, as the result contains it and the answer."""

MAX_NATIVE_BYTES = 6_000_000
"""The size limit of a response of another API than chat, with the output."""

MAX_EMBEDDINGS_BYTES = MAX_VECTOR_BYTES + 500_000
"""The size limit of a response with vectors, which the result of a job for embeddings consists of."""

MAX_PROBLEMS_TEXT = 2_000


@dataclass(frozen=True, slots=True)
class Ended:
    """A finished attempt, with what the next step depends on.

    Attributes:
        attempt: as it will be recorded.
        failure: what the failure means; None when it succeeded.
        output: the answer, checked against the agent's schema; of a program that failed, its `result`.
        credential: the reading of the key that the call was made with, where it failed.
        correction: the feedback for the model, where its answer did not satisfy the schema.
        response: the provider's own, where the job wants it.
        choices: all of them, where the call gave several.
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
    """Usage and cost of a call, as far as they are credible; the fields are those of its attempt."""

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

    `timeout_s` is for the answer; of one that is streamed, until it begins. `repairs` are those of the parameters.
    """
    started_at = job.now()
    if stream is not None:
        stream.called()  # after that: a call's first token does not come later than its end
    guard, target = job.output_guard, worker.targets.of(job.agent_name, flight.model)
    most, left_out = flight.max_tokens, flight.left_out
    if repairs.output_limit is not None:
        most = min(repairs.output_limit, most or repairs.output_limit)
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
    if most is not None:
        params = limited(params, most)
    speaks = worker.config.speaks(flight.provider, job.job.api)
    is_repaired = messages is not job.messages and messages != job.messages
    author = None if speaks or job.job.api_request is None else author_of(target.deployment)
    if stream is not None:
        stream.author = author
    body, sent_messages, sent_params = job.native_body(params, left_out) if speaks else None, messages, params
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
    sent, answer = False, None
    try:
        try:
            with worker.leases.claims[job.claim].cancel.interruptible():
                sent = True
                answer = await _performed(worker, job, flight, request)
            if stream is not None:
                answer, flight = await stream.whole(answer), stream.ended()
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
    # From any provider: a published answer must be readable for all that wait for it.
    response = answer.response if job.job.returns_response else None
    if any(map(is_too_deep, (answer.output, response, *(choice.output for choice in answer.choices)))):
        broken, reason = BrokenAnswer(f"the answer {TOO_DEEP}", storable=False), answer.finish_reason
        raise CallError(broken, maybe_billed=True, usage=answer.usage, cost=answer.cost, finish_reason=reason)
    return answer


def _unread(error: Exception, attempt_id: str) -> CallError:
    """The failure of a call whose answer could not be read here."""
    # The error's text may quote the answer.
    frames, name = "".join(format_tb(error.__traceback__)), type(error).__name__
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
    refused: Refused | None = None,
) -> Attempt:
    """Builds the record of an attempt that has just ended."""
    completed_at, usage = job.now(), spent.usage
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
        cost_basis=spent.cost_basis if refused is None else "none",
        reserved=None if flight.reserved_at is None else flight.reserved,
        reserved_at=flight.reserved_at,
        outcome=outcome,
        error=error if refused is None else refused.error,
        short_circuited=refused is not None,
        refused_by=refused and refused.refused_by,
        refused_cap=refused and refused.refused_cap,
        refused_reason=refused and refused.reason,
        ends_chain=refused is not None and refused.ends_chain,
        statistics=refused and refused.statistics,
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
        # Ours, if the acknowledgement of an earlier try was lost; otherwise another worker has taken the job over.
        found = await worker.lookup.winner(Stream.EVENTS, subject)
        if found.data != attempt.json_bytes():
            raise ClaimLostError(attempt.execution_id) from None
        return found.sequence
    return stored.sequence


async def recorded_attempt(worker: WorkerContext, job: Assignment | JobDelivery, number: int) -> Attempt | None:
    """Returns the record of an attempt, written by any worker."""
    subject = subjects.attempt(job.agent_name, job.execution_id, number)
    found = await worker.outages.retry_while_unavailable(lambda: worker.lookup.last(Stream.EVENTS, subject))
    return None if found is None else Attempt.model_validate_json(found.data)


def spent_at_most(flight: InFlight) -> CallCost:
    """Estimates the cost of a call without any report: its input, and at most its reservation."""
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
    """Usage and cost of a call as they were reported; where its cost is missing, at most its reservation.

    `part` is the usage with estimates of its missing figures, by the received part of an answer.
    """
    target, reported = worker.targets.of(job.agent_name, flight.model), usage or part
    answered = None if reported is None else reported.model
    other = None if answered is None or answered == target.name else worker.targets.other(target, answered)
    price = partial(_priced, flight, usage, cost, maybe_billed=maybe_billed, part=part)
    if other is None or answered is None:
        spent = price(target.pricing, most=flight.reserved)
    else:
        spent = price(other.pricing or target.pricing, most=None if other.pricing else flight.reserved)
        name = other.known or worker.storable_word(job.agent, answered)
        worker.targets.log_other(target, name)
        spent = replace(spent, response_model=name)
        if other.pricing is None and cost is None:
            doubt = f"the model {name} answered, which has no price"
            basis: CostBasis = "estimated" if spent.cost_basis == "billed" else spent.cost_basis
            problem = "; ".join(filter(None, (spent.usage_problem, doubt)))
            spent = replace(spent, cost_basis=basis, usage_problem=problem)
    if spent.usage_problem is not None and reported is not None:
        for term in reported.terms:
            kept = worker.storable_word(job.agent, term)
            spent = replace(spent, usage_problem=(spent.usage_problem or "").replace(repr(term), repr(kept)))
    return spent


def _priced(
    flight: InFlight,
    usage: Usage | None,
    cost: int | None,
    pricing: Pricing | None,
    *,
    maybe_billed: bool,
    part: Usage | None,
    most: int | None = None,
) -> CallCost:
    """The same, at given prices. `most`: what an estimate is no more than."""
    problem = None if usage is None else usage.problem
    if cost is None and usage is not None and pricing is not None and (found := pricing.cost(usage)) is not None:
        if found.unknown is not None:
            return CallCost(None, "unknown", usage, problem or found.unknown)
        if found.nano <= MAX_COUNTED:
            problem = problem or found.doubt
            return CallCost(found.nano, "billed" if problem is None else "estimated", usage, problem)
        problem = "the reported usage exceeds what can be counted at the model's price"
    if cost is None:
        usage = part or usage
    if maybe_billed:
        usage = _with_estimates(flight, usage)
    if cost is not None:
        return CallCost(cost, "billed", usage, problem)
    if part is not None and pricing is not None and (found := pricing.cost(part)) is not None:
        estimate = found.nano if most is None else min(found.nano, most)
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
    used, part, embeds = credible(answer.usage), None, job.job.api == "embeddings"
    unread = used.output_tokens is None
    if flight.input_tokens is not None:
        if used.output_tokens == 0 and answer.output and not embeds:
            problem = "0 output tokens were reported for an answer that is not empty"
            used = replace(used, output_tokens=None, problem="; ".join(filter(None, (used.problem, problem))))
        if None in (used.input_tokens, used.output_tokens):
            part = _with_estimates(flight, used, worker.targets.of(job.agent_name, flight.model), _said(answer))
    # Without a word of its output a call costs what it may have cost at most: a model may think more than it says.
    spent = _spent(worker, job, flight, used, answer.cost, maybe_billed=True, part=None if unread else part)
    if spent.usage is not (usage := part or used):
        spent = replace(spent, usage=usage)

    reason = answer.finish_reason and worker.storable_word(job.agent, answer.finish_reason)
    attempt = partial(attempt_of, job, flight, started_at, spent=spent, finish_reason=reason)

    def refused(class_name: str, text: str, correction: Correction | None = None) -> Ended:
        kind = "client" if correction is None else "logic"
        failure = Classification(kind, class_name, text, None, retryable=False, counts_for_breaker=False)
        return Ended(attempt("error", error=failure.error_info()), failure, correction=correction)

    guard, output = job.output_guard, answer.output
    text = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
    if (size := len(text.encode())) > MAX_ANSWER_BYTES:
        return refused("AnswerTooLargeError", f"the answer has {size} bytes; at most {MAX_ANSWER_BYTES} can be stored")
    if (more := len(to_json(answer.choices))) > MAX_RESPONSE_BYTES:
        text = f"the answer's choices have {more} bytes; at most {MAX_RESPONSE_BYTES} can be stored"
        return refused("AnswerTooLargeError", text)
    if flight.max_tokens is not None and answer.finish_reason == "length":
        return refused(
            "OutputCutOffError",
            f"the answer was truncated at {flight.max_tokens} tokens, the reservation of its budgets",
        )
    checked = Valid(output) if guard is None else guard.check(output)
    if isinstance(checked, Invalid):
        # Redacted as a whole, and cut then: a part of a secret is not known for one.
        problems = worker.redactor.text("; ".join(checked.problems))[:MAX_PROBLEMS_TEXT]
        if not worker.keeps_error_texts(job.agent):
            problems = f"{len(checked.problems)} problems, whose texts are not kept for this agent"
        # Without the problems, which quote the answer.
        structlog.get_logger().warning(
            "output_validation_failed",
            agent=job.agent_name,
            model=flight.model,
            attempt_id=job.attempt_id(flight.number),
            problems=len(checked.problems),
        )
        correction = Correction(answer=text, problems=checked.problems)
        return refused("InvalidOutputError", f"the answer does not satisfy the output schema: {problems}", correction)
    response = answer.response if job.job.returns_response else None
    if response is not None and part is not None and job.agent.usage_estimates:
        response = with_estimated_usage(response, part)
    if embeds and (wrong := _wrong_embeddings(worker, job, flight, answer)) is not None:
        return refused(*wrong)
    if not embeds and response is not None:
        is_native = worker.config.speaks(flight.provider, job.job.api) and job.job.api != "chat"
        held, most = (size, MAX_NATIVE_BYTES) if is_native else (more, MAX_RESPONSE_BYTES)
        if (held := held + len(to_json(response))) > most:
            if is_native:  # with images and the like, of which the output has nothing
                return refused("AnswerTooLargeError", f"the answer has {held} bytes; at most {most} can be stored")
            response = None
    return Ended(attempt("success"), None, checked.value, response=response, choices=answer.choices)


def _wrong_embeddings(
    worker: WorkerContext, job: Assignment, flight: InFlight, answer: Answer
) -> tuple[str, str] | None:
    """Returns the class and the text of the error of embeddings that must not be used, or can't be stored."""
    found, declared = cast(dict[str, int], answer.output)["dimensions"], worker.config.dimensions(flight.model)
    expected = dimensions_of(job.parameters.values, declared)
    if expected not in {None, found}:
        by = (
            "the request asks for"
            if job.parameters.values.get("dimensions")
            else f"models.{flight.model}.dimensions is"
        )
        return "WrongDimensionsError", f"the vectors have {found} dimensions, and {by} {expected}"
    if (size := len(to_json(answer.response))) > MAX_EMBEDDINGS_BYTES:
        text = (
            f"the answer has {size} bytes; at most {MAX_EMBEDDINGS_BYTES} can be stored: send fewer inputs in a request"
        )
        return "AnswerTooLargeError", text
    return None


def _said(answer: Answer) -> list[JsonValue | JsonMessage]:
    """All that a model said and showed of its thoughts."""
    response = answer.response or {}
    choices, content = response.get("choices"), response.get("content")
    if isinstance(choices, list):
        return [dict(fields(fields(choice).get("message"))) for choice in choices]
    return [{"content": answer.output if content is None else content}]


def _part(flight: InFlight, target: Target, stream: AttemptStream | None, reported: Usage | None) -> Usage | None:
    """Usage of an answer that broke off, by the received part; None where nothing was received.

    The usage that was reported so far counts where it is more.
    """
    if stream is None or not stream.begun:
        return None
    said, so_far = stream.streaming.answer.messages().values(), credible(reported or Usage(None, None))
    part = _with_estimates(flight, replace(so_far, output_tokens=None), target, said)
    return replace(part, output_tokens=max(part.output_tokens or 0, so_far.output_tokens or 0) or None)


def _with_estimates(
    flight: InFlight,
    usage: Usage | None,
    target: Target | None = None,
    said: Iterable[JsonValue | JsonMessage] = (),
) -> Usage:
    """Usage of a call: as it was reported, and estimates of missing figures.

    A program is no model: its input and output need not have been tokens of one.

    Args:
        flight: whose input was estimated before it was sent.
        usage: as it was reported.
        target: the model, where something has come of an answer.
        said: all that came of it.
    """
    usage = usage or Usage(None, None)
    if flight.input_tokens is None:
        return usage
    if usage.input_tokens is None:
        usage = replace(usage, input_tokens=flight.input_tokens)
    if usage.output_tokens is None and target is not None:
        size = size_of_messages(one if isinstance(one, Mapping) else {"content": one} for one in said)
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
    """A call that was aborted as its job was cancelled. It may be billed all the same."""
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
        counted = False  # the job's own deadline cut it short, which says nothing of the model
    of_model = flight.input_tokens is not None
    broke_off = of_model and part is not None and failed.finish_reason is None  # what was reported is not all yet
    used = None if failed.usage is None or broke_off else credible(failed.usage)
    spent = _spent(worker, job, flight, used, failed.cost, maybe_billed=failed.maybe_billed, part=part)
    # The identity of the error is that of what is kept of it: two errors that differ in a secret are the same.
    said: str | None = None
    if worker.keeps_error_texts(job.agent):
        kept = replace(failure, message=worker.redactor.text(failure.message))
        # Of the network and of answers the words are ours, or the system's.
        said = kept.message if isinstance(failed.failure, HttpFailure | ProgramFailure | NotSent) else None
    else:
        kept = without_text(failure, failed.failure)
        failure = replace(failure, class_name=kept.class_name)
    error = kept.error_info(said, (flight.model, worker.targets.of(job.agent_name, flight.model).name))
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
    """Returns what a failed program has answered, if a result can hold it and all readers can parse it."""
    if response is None or (not is_too_deep(response) and len(to_json(response)) <= MAX_RESPONSE_BYTES):
        return response
    structlog.get_logger().warning("failed_response_omitted", model=flight.model, limit=MAX_RESPONSE_BYTES)
    return None
