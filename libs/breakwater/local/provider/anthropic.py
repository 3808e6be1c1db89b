"""Anthropic's Messages on the wire: reading a request, writing answers and errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal, Self

import orjson
from aiohttp import web
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from breakwater.local.provider.behaviour import ChatRequest, ScriptedAnswer
from breakwater.local.provider.openai import OpenAI, RequestRefusedError, StreamEvent, pieces_of, seal, unseal
from breakwater.local.provider.script import ErrorText, Pace, Part, ScriptedHostedCall

_DELTA = ("stop_reason", "stop_sequence", "stop_details", "container")
_ONLY_AT_START = ("cache_creation", "service_tier", "inference_geo")
_DIRECT = {"caller": {"type": "direct"}}
_REFUSED = {"type": "refusal", "category": None, "explanation": None}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


class _ContentBlock(BaseModel):
    type: Literal[
        "text",
        "image",
        "document",
        "search_result",
        "tool_use",
        "tool_result",
        "thinking",
        "redacted_thinking",
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "mcp_tool_use",
        "mcp_tool_result",
        "container_upload",
    ]
    text: Annotated[str, Field(min_length=1)] | None = None
    id: str | None = None
    tool_use_id: str | None = None
    content: Any = None
    thinking: str = ""
    signature: str | None = None
    data: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuses a thought that was changed. One that was left out is in its signature."""
        if self.type == "thinking" and (
            (thought := unseal(self.signature)) is None or self.thinking not in ("", thought)
        ):
            raise ValueError("Invalid `signature` in `thinking` block")
        if self.type == "redacted_thinking" and unseal(self.data) is None:
            raise ValueError("Invalid `data` in `redacted_thinking` block")
        return self


def _blocks(content: object) -> object:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class _AnthropicMessage(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[_ContentBlock], BeforeValidator(_blocks), Field(min_length=1)]

    def as_openai(self) -> Iterator[dict[str, Any]]:
        """Yields it as messages in OpenAI's format, where each result of a tool is a message of its own."""
        for block in self.content:
            if block.type == "tool_result":
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.content}
        texts = [{"text": block.text} for block in self.content if block.type == "text"]
        calls = [{"id": block.id} for block in self.content if block.type == "tool_use"]
        if texts or calls:
            yield {"role": self.role, "content": texts, "tool_calls": calls}


class _OutputConfig(BaseModel):
    format: dict[str, Any] | None = None


class _Tool(BaseModel):
    type: str | None = None
    name: str = ""
    input_schema: dict[str, Any] | None = None


class _Choice(BaseModel):
    type: str = "auto"
    name: str | None = None


class _Body(BaseModel):
    """All fields of the interface; like the real one, it refuses any other."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    model: Annotated[str, Field(min_length=1)]
    max_tokens: Annotated[int, Field(strict=True, ge=1)]
    messages: Annotated[list[_AnthropicMessage], Field(min_length=1)]
    system: Any = None
    stream: bool | None = None
    tools: list[_Tool] | None = None
    output_config: _OutputConfig = _OutputConfig()
    cache_control: Any = None
    container: Any = None
    context_management: Any = None
    inference_geo: Any = None
    mcp_servers: Any = None
    metadata: Any = None
    service_tier: Any = None
    stop_sequences: list[str] | None = None
    temperature: Any = None
    thinking: dict[str, Any] | None = None
    tool_choice: _Choice = _Choice()
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
    id_in_error = True
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
        schema = body.output_config.format
        return _MessagesRequest.model_validate(
            {
                "model": body.model,
                "messages": [{"role": "system", "content": body.system}, *messages],
                "max_tokens": body.max_tokens,
                "stream": body.stream,
                "stream_options": {"include_usage": True} if body.stream else None,
                "tools": [_tool(tool) for tool in body.tools or ()],
                "tool_choice": _choice(body.tool_choice),
                "stop": body.stop_sequences or None,
                "thinks": (body.thinking or {}).get("type", "disabled") != "disabled",
                "searches": any(
                    str(tool.type).startswith("web_search") and tool.name == body.tool_choice.name
                    for tool in body.tools or ()
                ),
                "body": content,
                "response_format": schema and {"type": "json_schema", "json_schema": schema},
            }
        )

    def unknown_model(self, model: str) -> ErrorText:
        """Returns the error for a model that the script does not have."""
        return ErrorText(type="not_found_error", message=f"model: {model}")

    def error(self, status: int, scripted: ErrorText | None = None) -> dict[str, Any]:
        """Returns the body of an error, which has no code here."""
        return {"type": "error", "error": self.error_text(status, scripted).model_dump(include={"type", "message"})}

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

    def response_body(self, answer: ScriptedAnswer) -> dict[str, Any]:
        """Returns an answer as a `message` object."""
        calls = iter(range(len(answer.tool_calls)))
        blocks = [block for place, part in enumerate(answer.parts) for block in _blocks_of(answer, place, part, calls)]
        stop_reason = _STOP_REASONS.get(answer.finish_reason, answer.finish_reason)
        if answer.finish_reason == "stop" and answer.stopped_by is not None:
            stop_reason = "stop_sequence"
        if answer.finish_reason == "stop" and any(part.type == "refusal" for part in answer.parts):
            stop_reason = "refusal"
        message: dict[str, Any] = {
            "id": f"msg_{answer.number}",
            "type": "message",
            "role": "assistant",
            "model": answer.model,
            "content": blocks if answer.choices else [],
            "stop_reason": stop_reason,
            "stop_sequence": answer.stopped_by if stop_reason == "stop_sequence" else None,
            "stop_details": _REFUSED if stop_reason == "refusal" else None,
            "container": None,
        }
        if (usage := answer.shown_usage) is not None:
            # Here the cached tokens, and those that are written to a cache, are not a part of the input.
            five_minutes = usage.cache_write_tokens
            hour = usage.cache_write_1h_tokens
            searches = sum(call.tool == "web_search" for call in answer.hosted_calls)
            message["usage"] = {
                "input_tokens": usage.input_tokens - usage.cached_tokens - five_minutes - hour,
                "cache_creation_input_tokens": five_minutes + hour,
                "cache_read_input_tokens": usage.cached_tokens,
                "cache_creation": {"ephemeral_5m_input_tokens": five_minutes, "ephemeral_1h_input_tokens": hour},
                "output_tokens": usage.output_tokens,
                "output_tokens_details": {"thinking_tokens": thought} if (thought := usage.reasoning_tokens) else None,
                "server_tool_use": {"web_search_requests": searches, "web_fetch_requests": 0} if searches else None,
                "service_tier": "standard",
                "inference_geo": None,
            }
        return message

    def stream(self, answer: ScriptedAnswer, pace: Pace) -> list[StreamEvent]:
        """Returns an answer as the events of a stream, from `message_start` to `message_stop`."""

        def event(kind: str, *, content: bool = False, ends: bool = False, **fields: Any) -> StreamEvent:
            return StreamEvent(self.event({"type": kind, **fields}), content, ends)

        message = self.response_body(answer)
        usage = message.get("usage")
        usage_at_start = {} if usage is None else {"usage": {**usage, "output_tokens": 1}}
        events = [event("message_start", message={**message, "content": [], "stop_reason": None, **usage_at_start})]
        events.append(event("ping"))
        for index, block in enumerate(message["content"]):
            empty_fields, deltas = _deltas_of(block, pace)
            events.append(event("content_block_start", index=index, content_block={**block, **empty_fields}))
            events += (event("content_block_delta", content=True, index=index, delta=delta) for delta in deltas)
            events.append(event("content_block_stop", index=index))
        last: dict[str, Any] = {"delta": {name: message[name] for name in _DELTA}}
        if usage is not None:
            last["usage"] = {name: usage[name] for name in usage if name not in _ONLY_AT_START}
        return [*events, event("message_delta", ends=True, **last), event("message_stop", ends=True)]


class CountTokens(Anthropic):
    """The count of a request's tokens, which needs no output limit."""

    def parse(self, content: Any) -> ChatRequest:
        """Reads a body. Raises ValidationError."""
        return super().parse({"max_tokens": 1, **content} if isinstance(content, dict) else content)


def _tool(tool: _Tool) -> dict[str, Any]:
    function = {"name": tool.name, "parameters": tool.input_schema or {}}
    return {"type": "function" if tool.input_schema is not None else tool.type or "", "function": function}


def _choice(choice: _Choice) -> Any:
    function = {"type": "function", "function": {"name": choice.name}}
    return {"any": "required", "tool": function}.get(choice.type)


def _blocks_of(answer: ScriptedAnswer, place: int, part: Part, calls: Iterator[int]) -> list[dict[str, Any]]:
    """Returns the blocks of a part of an answer."""
    match part.type:
        case "text":
            # There are no empty blocks of text here.
            cites = [
                {"type": "web_search_result_location", "url": url, **_PAGE, "cited_text": ""} for url in part.cites
            ]
            return [{"type": "text", "text": part.text, "citations": cites or None}] if part.text else []
        case "refusal":
            return [{"type": "text", "text": part.text, "citations": None}]
        case "thinking":
            if part.redacted:
                return [{"type": "redacted_thinking", "data": seal(part.text)}]
            displayed = (answer.request.body.get("thinking") or {}).get("display") != "omitted"
            return [{"type": "thinking", "thinking": part.text if displayed else "", "signature": seal(part.text)}]
        case "tool_call":
            tool_id = f"toolu_{answer.number}_{next(calls)}"
            tool_input = part.arguments if part.input is None else {"input": part.input}
            return [{"type": "tool_use", "id": tool_id, "name": part.name, "input": tool_input, **_DIRECT}]
        case "hosted":
            return _search(f"srvtoolu_{answer.number}_{place}", part) if part.blocks is None else list(part.blocks)


_PAGE = {"title": "Simulated page", "encrypted_index": seal("page")}


def _search(tool_id: str, part: ScriptedHostedCall) -> list[dict[str, Any]]:
    page = {"type": "web_search_result", "url": "https://example.org/", "title": _PAGE["title"], "page_age": None}
    result = [{**page, "encrypted_content": _PAGE["encrypted_index"]}]
    return [
        {"type": "server_tool_use", "id": tool_id, "name": "web_search", "input": {"query": part.query}, **_DIRECT},
        {"type": "web_search_tool_result", "tool_use_id": tool_id, "content": result, **_DIRECT},
    ]


def _deltas_of(block: dict[str, Any], pace: Pace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the fields that a block lacks at its start, and the deltas that fill them."""
    match block:
        case {"type": "text", "text": text}:
            citations = block["citations"] or ()
            cited = [{"type": "citations_delta", "citation": citation} for citation in citations]
            texts = [{"type": "text_delta", "text": piece} for piece in pieces_of(text, pace)]
            return {"text": "", **({"citations": []} if citations else {})}, [*cited, *texts]
        case {"type": "thinking", "thinking": text, "signature": seal}:
            thoughts = [{"type": "thinking_delta", "thinking": piece} for piece in pieces_of(text, pace)]
            return {"thinking": "", "signature": ""}, [*thoughts, {"type": "signature_delta", "signature": seal}]
        case {"type": "tool_use" | "server_tool_use" | "mcp_tool_use", "input": tool_input}:
            pieces = pieces_of(orjson.dumps(tool_input).decode(), pace)
            return {"input": {}}, [{"type": "input_json_delta", "partial_json": piece} for piece in pieces]
        case _:
            return {}, []
