"""Anthropic's Messages on the wire: reading a request, writing answers and errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

import orjson
from aiohttp import web
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from breakwater.embedded.provider.behaviour import ChatRequest, ScriptedAnswer
from breakwater.embedded.provider.openai import (
    OpenAI,
    RequestRefusedError,
    StreamEvent,
    pieces_of,
)
from breakwater.embedded.provider.script import ErrorText, Pace

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


class _ContentBlock(BaseModel):
    type: Literal["text", "image", "document", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: Annotated[str, Field(min_length=1)] | None = None
    id: str | None = None
    tool_use_id: str | None = None
    content: Any = None


def _blocks(content: object) -> object:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class _AnthropicMessage(BaseModel):
    role: Literal["user", "assistant"]
    content: Annotated[list[_ContentBlock], BeforeValidator(_blocks), Field(min_length=1)]

    def as_openai(self) -> Iterator[dict[str, Any]]:
        """Yields the same as messages in OpenAI's format, where each result of a tool is a message."""
        for block in self.content:
            if block.type == "tool_result":
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.content}
        texts = [{"text": block.text} for block in self.content if block.type == "text"]
        calls = [{"id": block.id} for block in self.content if block.type == "tool_use"]
        if texts or calls:
            yield {"role": self.role, "content": texts, "tool_calls": calls}


class _OutputConfig(BaseModel):
    format: dict[str, Any] | None = None


class _Body(BaseModel):
    """All fields of the interface; as the real one, it refuses any other."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    model: Annotated[str, Field(min_length=1)]
    max_tokens: Annotated[int, Field(strict=True, ge=1)]
    messages: Annotated[list[_AnthropicMessage], Field(min_length=1)]
    system: Any = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    output_config: _OutputConfig = _OutputConfig()
    cache_control: Any = None
    container: Any = None
    inference_geo: Any = None
    metadata: Any = None
    service_tier: Any = None
    stop_sequences: Any = None
    temperature: Any = None
    thinking: Any = None
    tool_choice: Any = None
    top_k: Any = None
    top_p: Any = None


class _MessagesRequest(ChatRequest):
    @property
    def orphan_error(self) -> ErrorText:
        return ErrorText(
            type="invalid_request_error",
            message="`tool_use` ids were found without `tool_result` blocks immediately after: "
            f"{', '.join(self.orphans)}. Each `tool_use` block must have a corresponding `tool_result` block in the "
            "next message.",
        )


class Anthropic(OpenAI):
    """Anthropic's interface. A scripted model's part in a conversation is the same over both."""

    id_header = "request-id"
    key_header = "x-api-key"
    server_error = "api_error"
    errors: Mapping[int, ErrorText] = {
        status: ErrorText(type=kind, message=message)
        for status, kind, message in (
            (400, "invalid_request_error", "The request is invalid."),
            (401, "authentication_error", "invalid x-api-key"),
            (402, "billing_error", "Your credit balance is too low to access the Anthropic API."),
            (403, "permission_error", "Your API key does not have permission to use this model."),
            (404, "not_found_error", "Not found."),
            (429, "rate_limit_error", "This request would exceed your rate limit."),
            (500, "api_error", "Internal server error"),
            (504, "timeout_error", "The request timed out."),
            (529, "overloaded_error", "Overloaded"),
        )
    }

    def require(self, request: web.BaseRequest) -> None:
        """Requires the version of the interface, a header."""
        if "anthropic-version" not in request.headers:
            raise RequestRefusedError(400, ErrorText(message="anthropic-version: header is required"))

    def parse(self, content: Any) -> ChatRequest:
        """Reads a body, and brings it into OpenAI's format. Raises ValidationError."""
        body = _Body.model_validate(content)
        messages = [turn for message in body.messages for turn in message.as_openai()]
        asked = body.output_config.format
        return _MessagesRequest.model_validate(
            {
                "model": body.model,
                "messages": [{"role": "system", "content": body.system}, *messages],
                "max_tokens": body.max_tokens,
                "stream": body.stream,
                "stream_options": {"include_usage": True} if body.stream else None,
                "tools": body.tools,
                "response_format": asked and {"type": "json_schema", "json_schema": asked},
            }
        )

    def unknown_model(self, model: str) -> ErrorText:
        """Returns the error for a model that the script does not have."""
        return ErrorText(type="not_found_error", message=f"model: {model}")

    def error(self, status: int, given: ErrorText | None = None) -> dict[str, Any]:
        """Returns the body of an error, which has no code here."""
        return {"type": "error", "error": self.error_text(status, given).model_dump(include={"type", "message"})}

    def error_headers(self, status: int, retry_after_s: float | None) -> dict[str, str]:
        """Returns `retry-after` where the script has one, and the `anthropic-ratelimit-*` family on 429."""
        headers = {} if retry_after_s is None else {"retry-after": f"{retry_after_s:.10g}"}
        if status == 429:
            reset = datetime.now(UTC) + timedelta(seconds=60 if retry_after_s is None else retry_after_s)
            headers["anthropic-ratelimit-requests-remaining"] = "0"
            headers["anthropic-ratelimit-requests-reset"] = reset.isoformat(timespec="seconds").replace("+00:00", "Z")
        return headers

    def event(self, document: Mapping[str, Any]) -> bytes:
        """Returns an event of a stream, named after the document's type."""
        return b"event: %b\ndata: %b\n\n" % (str(document["type"]).encode(), orjson.dumps(document))

    def whole(self, answer: ScriptedAnswer) -> dict[str, Any]:
        """Returns an answer as a `message` object."""
        blocks: list[dict[str, Any]] = [{"type": "text", "text": answer.content}] if answer.content else []
        for index, call in enumerate(answer.tool_calls):
            tool_id = f"toolu_{answer.number}_{index}"
            blocks.append({"type": "tool_use", "id": tool_id, "name": call.name, "input": call.arguments})
        message: dict[str, Any] = {
            "id": f"msg_{answer.number}",
            "type": "message",
            "role": "assistant",
            "model": answer.model,
            "content": blocks if answer.choices else [],
            "stop_reason": _STOP_REASONS.get(answer.finish_reason, answer.finish_reason),
            "stop_sequence": None,
        }
        if (usage := answer.shown_usage) is not None:
            # Here the cached tokens are not a part of the input.
            message["usage"] = {
                "input_tokens": usage.input_tokens - usage.cached_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": usage.cached_tokens,
                "output_tokens": usage.output_tokens,
            }
        return message

    def stream(self, answer: ScriptedAnswer, pace: Pace) -> list[StreamEvent]:
        """Returns an answer as the events of a stream, from `message_start` to `message_stop`."""

        def event(kind: str, *, content: bool = False, ends: bool = False, **fields: Any) -> StreamEvent:
            return StreamEvent(self.event({"type": kind, **fields}), content, ends)

        message = self.whole(answer)
        usage = message.get("usage")
        begun = {} if usage is None else {"usage": {**usage, "output_tokens": 1}}
        events = [event("message_start", message={**message, "content": [], "stop_reason": None, **begun})]
        events.append(event("ping"))
        for index, block in enumerate(message["content"]):
            if block["type"] == "text":
                first, said, kind, field = {"text": ""}, block["text"], "text_delta", "text"
            else:
                first, said = {"input": {}}, orjson.dumps(block["input"]).decode()
                kind, field = "input_json_delta", "partial_json"
            events.append(event("content_block_start", index=index, content_block={**block, **first}))
            for piece in pieces_of(said, pace):
                delta = {"type": kind, field: piece}
                events.append(event("content_block_delta", content=True, index=index, delta=delta))
            events.append(event("content_block_stop", index=index))
        ended: dict[str, Any] = {"delta": {"stop_reason": message["stop_reason"], "stop_sequence": None}}
        if usage is not None:
            ended["usage"] = {"output_tokens": usage["output_tokens"]}
        return [*events, event("message_delta", ends=True, **ended), event("message_stop", ends=True)]
