"""Attributes of the worker's spans. Called only where a span is recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from pydantic import JsonValue

from breakwater.calls.assignment import Assignment, InFlight
from breakwater.calls.providers.base import Answer
from breakwater.calls.providers.settings import HttpSettings
from breakwater.calls.rules.repairs import JsonMessage
from breakwater.calls.span_attributes import (
    attempt_attributes,
    outcome_attributes,
    provider_attributes,
    request_attributes,
    result_attributes,
)
from breakwater.dialects.rules.provider_words import known_or_hash, short_digest
from breakwater.jobs.contract.execution import Attempt, Result
from breakwater.kernel.telemetry import tracing
from breakwater.kernel.telemetry.tracing.messages import (
    JsonObject,
    fit,
    input_messages,
    last_text,
    output_message,
    system_instructions,
    text_message,
)
from breakwater.services.worker.context import WorkerContext


def call_began(
    worker: WorkerContext, job: Assignment, flight: InFlight, name: str, *, streaming: bool
) -> tracing.SpanAttributes:
    """Returns the attributes of a call that is about to be made. The provider knows the model by `name`."""
    serving = worker.config.providers[flight.provider]
    base_url = serving.base_url if isinstance(serving, HttpSettings) else None
    return {
        **attempt_attributes(
            job.parameters.values,
            agent=job.agent_name,
            model=flight.model,
            name=name,
            execution_id=job.execution_id,
            task_id=job.ids.task_id,
            number=flight.number,
            cause=flight.cause,
            streaming=streaming,
            operation=operation_of(job),
        ),
        **provider_attributes(serving.kind, base_url, flight.provider),
        **_request_attributes(worker, job),
    }


def operation_of(job: Assignment) -> str:
    """Returns the name of a call's operation in the semantic conventions."""
    return "embeddings" if job.job.api == "embeddings" else "chat"


def call_ended(
    worker: WorkerContext, job: Assignment, messages: Sequence[JsonMessage], attempt: Attempt, answer: Answer | None
) -> tracing.SpanAttributes:
    """Returns the attributes of a call that has ended."""
    choices = () if answer is None else answer.choices
    reasons = tuple(choice.finish_reason or "error" for choice in choices)
    response = answer.response if answer is not None else None
    if response is not None and not worker.keeps_error_texts(job.agent):
        # A provider may write anything there.
        model = attempt.response_model or worker.targets.of(job.agent_name, attempt.model, attempt.deployment).name
        response = {"id": short_digest(str(response.get("id") or "")), "model": model}
        reasons = tuple(map(known_or_hash, reasons))
    attributes = {**outcome_attributes(attempt, response, reasons)}
    if not worker.config.tracing.capture_content or job.job.api == "embeddings":
        return attributes  # embeddings have no messages to show
    if not job.agent.persist_responses:
        # Omit the messages that the plane has added to the conversation, as they quote answers.
        job_messages = job.messages
        messages = [message for message in messages if message in job_messages]
    name = worker.targets.of(job.agent_name, attempt.model, attempt.deployment).name
    system_apart = worker.config.providers[attempt.provider].api_kind(name) in ("anthropic", "bedrock")
    content = _conversation(worker, job, messages, system_apart=system_apart)
    if answer is not None:
        outputs = [(choice.output, choice.finish_reason) for choice in choices] or [
            (answer.output, answer.finish_reason)
        ]
        content |= _answers(worker, job, outputs)
    return attributes | _bounded(worker, content)


def job_ended(worker: WorkerContext, job: Assignment, result: Result) -> tracing.SpanAttributes:
    """Returns the attributes of a job that is decided."""
    attributes = {**result_attributes(result), **_request_attributes(worker, job)}
    if not worker.config.tracing.capture_content or job.job.api == "embeddings":
        return attributes
    content = _conversation(worker, job, job.messages, system_apart=True)
    if result.output is not None:
        content |= _answers(worker, job, [(result.output, result.finish_reason)])
    # Phoenix lists these two for traces and sessions. Calls lack them, as Langfuse would show them there instead of
    # the messages.
    for value, name in (("input.value", "gen_ai.input.messages"), ("output.value", "gen_ai.output.messages")):
        if name in content:
            attributes[value] = last_text(content[name], worker.config.tracing.max_content_bytes)
    return attributes | _bounded(worker, content)


def _request_attributes(worker: WorkerContext, job: Assignment) -> tracing.SpanAttributes:
    params = job.parameters.values
    guard = job.output_guard
    stops = params.get("stop", params.get("stop_sequences"))
    may_quote = job.agent.persist_prompts and not worker.cipher.on
    return request_attributes(
        params,
        worker.redactor.json(stops) if may_quote else None,
        json_schema=guard is not None and guard.rules.native,
    )


def _conversation(
    worker: WorkerContext, job: Assignment, messages: Sequence[JsonMessage], *, system_apart: bool
) -> dict[str, list[JsonObject]]:
    if not job.agent.persist_prompts or worker.cipher.on:
        return {}
    if job.job.input is not None:
        return {"gen_ai.input.messages": [text_message(worker.redactor.json(job.job.input))]}
    redacted = cast(list[JsonObject], worker.redactor.json(cast(JsonValue, list(messages))))
    instructions = [message for message in redacted if system_apart and message.get("role") in {"system", "developer"}]
    conversation = [
        message for message in redacted if not system_apart or message.get("role") not in {"system", "developer"}
    ]
    content = {
        "gen_ai.system_instructions": system_instructions(instructions),
        "gen_ai.input.messages": input_messages(conversation),
    }
    return {name: messages for name, messages in content.items() if messages}


def _answers(
    worker: WorkerContext, job: Assignment, outputs: Sequence[tuple[JsonValue, str | None]]
) -> dict[str, list[JsonObject]]:
    if not job.agent.persist_responses or worker.cipher.on:
        return {}
    redact = worker.redactor.json
    return {"gen_ai.output.messages": [output_message(redact(output), reason) for output, reason in outputs]}


def _bounded(worker: WorkerContext, content: Mapping[str, Sequence[JsonObject]]) -> tracing.SpanAttributes:
    limit = worker.config.tracing.max_content_bytes
    texts = {name: fit(messages, limit) for name, messages in content.items()}
    return {name: text for name, text in texts.items() if text is not None}
