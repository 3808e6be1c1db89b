"""Anthropic's Messages on the wire: reading a request, writing answers and errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import orjson

from breakwater.embedded.provider.script import ErrorText, Pace
from breakwater.embedded.provider.wire import (
    REQUESTS_PER_MINUTE,
    ChatRequest,
    Decision,
    RequestRefusedError,
    StreamEvent,
    pieces_of,
    read_object,
    summarise,
    unlisted_error,
)

_PARAMS = frozenset(
    {
        "cache_control", "container", "inference_geo", "max_tokens", "messages", "metadata", "model", "output_config",
        "service_tier", "stop_sequences", "stream", "system", "temperature", "thinking", "tool_choice", "tools",
        "top_k", "top_p",
    }
)  # fmt: skip
_BLOCKS = frozenset({"text", "image", "document", "tool_use", "tool_result", "thinking", "redacted_thinking"})
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_STANDARD = {
    400: ErrorText(type="invalid_request_error", message="The request is invalid."),
    401: ErrorText(type="authentication_error", message="invalid x-api-key"),
    402: ErrorText(type="billing_error", message="Your credit balance is too low to access the Anthropic API."),
    403: ErrorText(type="permission_error", message="Your API key does not have permission to use this model."),
    404: ErrorText(type="not_found_error", message="Not found."),
    413: ErrorText(type="request_too_large", message="Request exceeds the maximum size"),
    429: ErrorText(type="rate_limit_error", message="This request would exceed your rate limit."),
    500: ErrorText(type="api_error", message="Internal server error"),
    504: ErrorText(type="timeout_error", message="The request timed out."),
    529: ErrorText(type="overloaded_error", message="Overloaded"),
}


def unknown_model(model: str) -> ErrorText:
    """The body of the 404 for a model that the script does not have."""
    return ErrorText(type="not_found_error", message=f"model: {model}")


def read_request(body: bytes, model: str | None = None) -> ChatRequest:
    """Reads the body of `POST /v1/messages`.

    The conversation is brought into OpenAI's format: what a scripted model says of it is the same over both interfaces.

    Raises:
        RequestRefusedError: it lacks something, or has what the interface does not know.
    """
    fields = read_object(body)
    model = model or fields.get("model")
    if not isinstance(model, str) or not model:
        raise RequestRefusedError("model: Field required")
    if unknown := sorted(fields.keys() - _PARAMS):
        raise RequestRefusedError(f"{unknown[0]}: Extra inputs are not permitted", model=model)
    limit = fields.get("max_tokens")
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise RequestRefusedError("max_tokens: Field required, a whole number of at least 1", model=model)
    output: Any = fields.get("output_config") or {}
    asked = summarise(
        model,
        [{"role": "system", "content": fields.get("system")}, *_messages(fields, model)],
        max_tokens=limit,
        wants_json=bool(output.get("format")),
        schema=_schema(output.get("format")),
        has_tools=bool(fields.get("tools")),
    )
    # Usage is always a part of a stream here.
    asked = replace(asked, stream=bool(fields.get("stream")), stream_usage=True)
    return replace(asked, orphan_error=_orphan_tool_calls(asked.orphans)) if asked.orphans else asked


def _schema(output_format: Any) -> Mapping[str, Any] | None:
    schema: Any = output_format.get("schema") if isinstance(output_format, dict) else None
    return cast("dict[str, Any]", schema) if isinstance(schema, dict) else None


def _messages(fields: dict[str, Any], model: str) -> Iterable[dict[str, Any]]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestRefusedError("messages: at least one message is required", model=model)
    for index, message in enumerate(cast("list[Any]", messages)):
        if not isinstance(message, dict) or cast("dict[str, Any]", message).get("role") not in ("user", "assistant"):
            raise RequestRefusedError(f"messages.{index}.role: must be 'user' or 'assistant'", model=model)
        said = cast("dict[str, Any]", message)
        blocks = _blocks(said.get("content"), f"messages.{index}.content", model)
        texts = [block for block in blocks if block["type"] == "text"]
        calls = [{"id": block.get("id")} for block in blocks if block["type"] == "tool_use"]
        for block in blocks:
            if block["type"] == "tool_result":
                yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content")}
        if texts or calls or not blocks:
            yield {"role": said["role"], "content": texts, "tool_calls": calls}


def _blocks(content: Any, path: str, model: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list) or not content:
        raise RequestRefusedError(f"{path}: must be a text or a list of blocks", model=model)
    for index, block in enumerate(cast("list[Any]", content)):
        kind = cast("dict[str, Any]", block).get("type") if isinstance(block, dict) else None
        if kind not in _BLOCKS:
            raise RequestRefusedError(
                f"{path}.{index}: Input tag {kind!r} is not one of the expected tags", model=model
            )
        if kind == "text" and not block.get("text"):
            raise RequestRefusedError("messages: text content blocks must be non-empty", model=model)
    return cast("list[dict[str, Any]]", content)


def _orphan_tool_calls(orphans: tuple[str, ...]) -> ErrorText:
    return ErrorText(
        type="invalid_request_error",
        message=f"`tool_use` ids were found without `tool_result` blocks immediately after: {', '.join(orphans)}. "
        "Each `tool_use` block must have a corresponding `tool_result` block in the next message.",
    )


def write_completion(decision: Decision, model: str) -> bytes:
    """A `message` object."""
    return orjson.dumps(_message(decision, model))


def _message(decision: Decision, model: str) -> dict[str, Any]:
    suffix = decision.completion_id[-16:]
    blocks: list[dict[str, Any]] = [{"type": "text", "text": decision.content}] if decision.content else []
    for index, call in enumerate(decision.tool_calls):
        blocks.append({"type": "tool_use", "id": f"toolu_{suffix}_{index}", "name": call.name, "input": call.arguments})
    answer: dict[str, Any] = {
        "id": f"msg_{suffix}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": blocks if decision.broken != "no_choices" else [],
        "stop_reason": _STOP_REASONS.get(decision.finish_reason, decision.finish_reason),
        "stop_sequence": None,
    }
    if (usage := decision.shown_usage) is not None:
        # Here the cached tokens are not a part of the input.
        answer["usage"] = {
            "input_tokens": usage.input_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.output_tokens,
        }
    return answer


def write_stream(decision: Decision, model: str, pace: Pace) -> list[StreamEvent]:
    """The events of a streamed answer, from `message_start` to `message_stop`."""
    whole = _message(decision, model)
    usage = whole.pop("usage", None)
    begun = {} if usage is None else {"usage": {**usage, "output_tokens": 1}}
    message = {**whole, "content": [], "stop_reason": None, **begun}
    events = [_event("message_start", message=message), _event("ping")]
    for index, block in enumerate(whole["content"]):
        is_text = block["type"] == "text"
        first, said = (
            ({"text": ""}, block["text"]) if is_text else ({"input": {}}, orjson.dumps(block["input"]).decode())
        )
        events.append(_event("content_block_start", index=index, content_block={**block, **first}))
        kind, field = ("text_delta", "text") if is_text else ("input_json_delta", "partial_json")
        for piece in pieces_of(said, pace):
            events.append(_event("content_block_delta", content=True, index=index, delta={"type": kind, field: piece}))
        events.append(_event("content_block_stop", index=index))
    fields: dict[str, Any] = {"delta": {"stop_reason": whole["stop_reason"], "stop_sequence": None}}
    if usage is not None:
        fields["usage"] = {"output_tokens": usage["output_tokens"]}
    return [*events, _event("message_delta", ends=True, **fields), _event("message_stop", ends=True)]


def _event(kind: str, *, content: bool = False, ends: bool = False, **fields: Any) -> StreamEvent:
    data = b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))
    return StreamEvent(data, content=content, ends=ends)


def write_error_event(error: bytes) -> bytes:
    """An error in the middle of a stream."""
    return b"event: error\ndata: %b\n\n" % error


def write_error(status: int, custom: ErrorText | None) -> bytes:
    """An error body; what `custom` leaves out is what the status says by default. There are no codes here."""
    standard = _STANDARD.get(status) or unlisted_error(status, "api_error")
    custom = custom or standard
    message = custom.message if custom.message is not None else standard.message
    return orjson.dumps({"type": "error", "error": {"type": custom.type or standard.type, "message": message}})


def error_headers(status: int, retry_after_s: float | None) -> dict[str, str]:
    """`retry-after` where the script gives one, and the `anthropic-ratelimit-*` family on 429."""
    headers = {} if retry_after_s is None else {"retry-after": f"{retry_after_s:.10g}"}
    if status == 429:
        reset = datetime.now(UTC) + timedelta(seconds=60 if retry_after_s is None else retry_after_s)
        headers["anthropic-ratelimit-requests-limit"] = str(REQUESTS_PER_MINUTE)
        headers["anthropic-ratelimit-requests-remaining"] = "0"
        headers["anthropic-ratelimit-requests-reset"] = reset.isoformat(timespec="seconds").replace("+00:00", "Z")
    return headers
