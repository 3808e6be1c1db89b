"""Attributes of the worker's spans. Called only where a span is recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from pydantic import JsonValue

from breakwater.calls.assignment import Assignment, InFlight
from breakwater.calls.providers.base import Answer, HttpSettings
from breakwater.calls.rules.provider_words import hashed, known_or_hash
from breakwater.calls.rules.repairs import JsonMessage
from breakwater.jobs.contract.execution import Attempt, Result
from breakwater.kernel.telemetry import tracing
from breakwater.kernel.telemetry.tracing.messages import (
    JsonObject,
    fitted,
    input_messages,
    last_text,
    output_message,
    system_instructions,
    text_message,
)
from services.worker.context import WorkerContext


def call_began(
    worker: WorkerContext, job: Assignment, flight: InFlight, name: str, *, streaming: bool
) -> tracing.SpanAttributes:
    """Of a call that is about to be made. `name`: of the model, as the provider knows it."""
    serving = worker.config.providers[flight.provider]
    base_url = serving.base_url if isinstance(serving, HttpSettings) else None
    return {
        **tracing.attempt_attributes(
            job.parameters.values,
            agent=job.agent_name,
            model=flight.model,
            name=name,
            execution_id=job.execution_id,
            task_id=job.job.task_id,
            number=flight.number,
            cause=flight.cause,
            streaming=streaming,
            operation=operation_of(job),
        ),
        **tracing.provider_attributes(serving.kind, base_url, flight.provider),
        **_asked(worker, job),
    }


def operation_of(job: Assignment) -> str:
    """The name of a call's operation, in the words of the conventions."""
    return "embeddings" if job.job.api == "embeddings" else "chat"


def call_ended(
    worker: WorkerContext, job: Assignment, messages: Sequence[JsonMessage], attempt: Attempt, answer: Answer | None
) -> tracing.SpanAttributes:
    """Of a call that has ended."""
    several = () if answer is None else answer.choices
    reasons = tuple(choice.finish_reason or "error" for choice in several)
    response = answer.response if answer is not None else None
    if response is not None and not worker.keeps_error_texts(job.agent):
        # A provider may write anything there.
        model = attempt.response_model or worker.targets.of(job.agent_name, attempt.model).name
        response = {"id": hashed(str(response.get("id") or "")), "model": model}
        reasons = tuple(map(known_or_hash, reasons))
    said = {**tracing.outcome_attributes(attempt, response, reasons)}
    if not worker.config.tracing.capture_content or job.job.api == "embeddings":
        return said  # of vectors, there are no messages to show
    if not job.agent.persist_responses:
        # Messages that the plane has added to the conversation quote answers.
        own = job.messages
        messages = [message for message in messages if message in own]
    apart = worker.config.providers[attempt.provider].kind == "anthropic"
    content = _conversation(worker, job, messages, system_apart=apart)
    if answer is not None:
        outputs = [(one.output, one.finish_reason) for one in several] or [(answer.output, answer.finish_reason)]
        content |= _answers(worker, job, outputs)
    return said | _bounded(worker, content)


def job_ended(worker: WorkerContext, job: Assignment, result: Result) -> tracing.SpanAttributes:
    """Of a job that is decided."""
    said = {**tracing.result_attributes(result), **_asked(worker, job)}
    if not worker.config.tracing.capture_content or job.job.api == "embeddings":
        return said
    content = _conversation(worker, job, job.messages, system_apart=True)
    if result.output is not None:
        content |= _answers(worker, job, [(result.output, result.finish_reason)])
    # Phoenix lists these of traces and sessions. Not on calls, where Langfuse would show it in place of the messages.
    for value, name in (("input.value", "gen_ai.input.messages"), ("output.value", "gen_ai.output.messages")):
        if name in content:
            said[value] = last_text(content[name], worker.config.tracing.max_content_bytes)
    return said | _bounded(worker, content)


def _asked(worker: WorkerContext, job: Assignment) -> tracing.SpanAttributes:
    params, guard = job.parameters.values, job.output_guard
    stops = params.get("stop", params.get("stop_sequences"))
    may_say = job.agent.persist_prompts and not worker.cipher.on
    return tracing.request_attributes(
        params,
        worker.redactor.json(stops) if may_say else None,
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
    instructions = [one for one in redacted if system_apart and one.get("role") in {"system", "developer"}]
    conversation = [one for one in redacted if not system_apart or one.get("role") not in {"system", "developer"}]
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
    texts = {name: fitted(messages, limit) for name, messages in content.items()}
    return {name: text for name, text in texts.items() if text is not None}
