"""Conversations and answers in the form of OpenTelemetry's conventions for GenAI, as JSON of bounded length.

The input is already redacted as a whole, because redaction would not recognise a part of a secret.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import cast

from pydantic import JsonValue
from pydantic_core import from_json

from breakwater.kernel.surrogates import whole_escapes

JsonObject = dict[str, JsonValue]

_SHORTEST = 32
"""The length to which texts are truncated before whole messages are left out."""

_ELLIPSIS = "…"


def input_messages(messages: Sequence[Mapping[str, JsonValue]]) -> list[JsonObject]:
    """Converts a conversation from OpenAI's chat format to `gen_ai.input.messages`."""
    return [_message(str(message.get("role", "user")), _parts(message)) for message in messages]


def system_instructions(messages: Sequence[Mapping[str, JsonValue]]) -> list[JsonObject]:
    """Returns the texts of system messages, as `gen_ai.system_instructions`."""
    return [part for message in messages for part in _content(message.get("content")) if part["type"] == "text"]


def text_message(value: JsonValue, role: str = "user") -> JsonObject:
    """Converts a text or any other JSON to a message."""
    return _message(role, [_text(value if isinstance(value, str) else _json(value))])


def output_message(output: JsonValue, finish_reason: str | None) -> JsonObject:
    """Converts an answer (a text, an assistant's message in OpenAI's format, or JSON) to `gen_ai.output.messages`.

    The conventions have deprecated `finish_reason` here, but Phoenix shows no message without it; empty means unknown.
    """
    if isinstance(output, dict) and output.get("role") == "assistant":
        (message,) = input_messages([output])
    else:
        message = text_message(output, "assistant")
    return message | {"finish_reason": finish_reason or ""}


def last_text(messages: Sequence[JsonObject], limit: int) -> str:
    """Returns the content of the last message as plain text of bounded length, or as JSON if it has no text."""
    parts = cast(list[JsonObject], messages[-1]["parts"])
    texts = [str(part["content"]) for part in parts if part["type"] == "text"]
    text = "\n".join(texts) if texts else _json(parts)
    return text.encode(errors="replace")[:limit].decode(errors="ignore")


def fit(messages: Sequence[JsonObject], limit: int) -> str | None:
    """Returns messages or parts as JSON of at most `limit` bytes; None if none fits.

    The longest texts are truncated first. If that is not enough, the oldest messages are left out.
    """
    longest = limit
    fitting = list(messages)
    while len(data := _json(fitting).encode(errors="replace")) > limit and longest > _SHORTEST:
        longest //= 2
        fitting = [cast(JsonObject, _cut(message, longest)) for message in fitting]
    while fitting and len(data) > limit:
        del fitting[: (len(fitting) + 1) // 2]
        data = _json(fitting).encode(errors="replace")
    return data.decode() if fitting else None


def _message(role: str, parts: list[JsonObject]) -> JsonObject:
    return {"role": role, "parts": cast(JsonValue, parts)}


def _parts(message: Mapping[str, JsonValue]) -> list[JsonObject]:
    content = message.get("content")
    if message.get("role") == "tool":
        return [{"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content}]
    calls = message.get("tool_calls")
    tool_calls = [_tool_call(call) for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return [*_content(content), *tool_calls]


def _content(content: JsonValue) -> list[JsonObject]:
    if content is None or content == "":
        return []
    if isinstance(content, str):
        return [_text(content)]
    return [_block(block) for block in content if isinstance(block, dict)] if isinstance(content, list) else []


def _block(block: Mapping[str, JsonValue]) -> JsonObject:
    kind = block.get("type")
    within = block.get(kind) if isinstance(kind, str) else None
    match kind, within:
        case "text", str():
            return _text(within)
        case "image_url", {"url": str(url)} if url.startswith("data:"):
            return _blob("image", url.removeprefix("data:").partition(";")[0])
        case "image_url", {"url": str(url)}:
            return {"type": "uri", "modality": "image", "uri": url}
        case "input_audio", {"format": str(form)}:
            return _blob("audio", f"audio/{form}")
        case "file", {"file_id": str(file_id)}:
            return {"type": "file", "modality": "document", "file_id": file_id}
        case _:
            return {"type": str(kind)}


def _text(text: str) -> JsonObject:
    return {"type": "text", "content": text}


def _blob(modality: str, mime_type: str) -> JsonObject:
    # The conventions require a content, but binary data would be long and useless in a span.
    return {"type": "blob", "modality": modality, "mime_type": mime_type, "content": ""}


def _tool_call(call: Mapping[str, JsonValue]) -> JsonObject:
    called = call.get("function")
    function = called if isinstance(called, dict) else {}
    return {
        "type": "tool_call",
        "id": call.get("id"),
        "name": str(function.get("name", "")),
        "arguments": _arguments(function.get("arguments")),
    }


def _arguments(arguments: JsonValue) -> JsonValue:
    try:
        return from_json(whole_escapes(arguments)) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments  # a model may write what is no JSON


def _cut(value: JsonValue, longest: int) -> JsonValue:
    match value:
        case str():
            return value if len(value) <= longest else value[: longest - 1] + _ELLIPSIS
        case dict():
            return {name: _cut(inner, longest) for name, inner in value.items()}
        case list():
            return [_cut(inner, longest) for inner in value]
        case _:
            return value


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
