"""Requests of other APIs: their chat forms, and the bodies for providers of the same API.

Each API has a file of its own next to this one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from pydantic import JsonValue

from breakwater.dialects.rules import embeddings, messages, responses
from breakwater.dialects.rules.forms import ChatForm, Dialect
from breakwater.dialects.rules.provider_state import StateRepair
from breakwater.dialects.rules.tool_schemas import portable_params
from breakwater.jobs.contract.job import CallApi, Job, NativeRequest, RequestApi

DIALECTS: Mapping[RequestApi, Dialect] = {"embeddings": embeddings, "messages": messages, "responses": responses}


def chat_form(request: NativeRequest) -> ChatForm:
    """Returns the chat form of a request, which is computed once. Raises InvalidBodyError."""
    return request.derive(lambda native: DIALECTS[native.api].chat_form(native.body))


def conversation_of(job: Job) -> list[dict[str, JsonValue]]:
    """Returns the conversation of a job in OpenAI's chat format; empty for a job with `input`."""
    return job.chat_messages() if job.api_request is None else chat_form(job.api_request).messages


def params_of(job: Job) -> dict[str, JsonValue]:
    """Returns the params of a job, with the names that a chat has for them."""
    return job.params if job.api_request is None else chat_form(job.api_request).params


def input_of(job: Job) -> JsonValue:
    """Returns the input of a job as its record has it, before redaction; None for a conversation."""
    if job.api_request is None or job.api_request.api != "embeddings":
        return job.input
    return embeddings.recorded_input(job.api_request.body)


def for_chat(
    job: Job,
    conversation: Sequence[Mapping[str, JsonValue]],
    params: Mapping[str, JsonValue],
) -> tuple[Sequence[Mapping[str, JsonValue]], Mapping[str, JsonValue]]:
    """Returns the conversation and the params of a job for providers of chat completions, before `for_author`."""
    if job.api not in ("messages", "responses"):
        return conversation, params
    if job.api == "messages":
        conversation, params = messages.for_chat(conversation, params)
    return conversation, portable_params(params)


def repaired_body(
    api: CallApi, body: Mapping[str, JsonValue], repairs: Collection[StateRepair]
) -> Mapping[str, JsonValue]:
    """Returns the body for a provider of the same API that has refused the state in its conversation."""
    if api == "messages":
        return messages.repaired_body(body, repairs)
    return responses.repaired_body(body, repairs) if api == "responses" else body


def dropped_fields(request: NativeRequest) -> set[str]:
    """Returns the fields of a request that its chat form leaves out on purpose."""
    if request.api == "responses":
        return responses.dropped_fields(request.body)
    return messages.dropped_fields(request.body) if request.api == "messages" else set()
