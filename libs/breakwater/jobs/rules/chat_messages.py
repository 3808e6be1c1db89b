"""Models' messages in the shape that OpenAI's clients know; finish reasons, and files in messages."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import orjson

from breakwater.kernel.formats import words

_THINKING = ("thinking", "reasoning")
THOUGHT = "reasoning_content"
"""The field in which makers of thinking models send the thinking, and that clients know."""

ORDER = "order"
"""The field of a choice with the order in which the model wrote the parts of its message, if it is not the default one.

It is a list of pairs: the name of a field, and the place in it where that part begins.
"""

OTHERS = "content_parts"
"""Parts of a content other than text and thinking."""


def fields(value: Any) -> Mapping[str, Any]:
    """Returns a JSON object; an empty one in place of any other value."""
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def objects(value: Any) -> list[dict[str, Any]]:
    """Returns the objects of a list. An object in place of the list counts as a list of one."""
    return [item for item in cast(list[Any], value if isinstance(value, list) else [value]) if isinstance(item, dict)]


def parts_of(content: Any) -> tuple[str, str, list[Any]]:
    """Returns the text, the thinking and the other parts of a content, which may be a text or a list of parts."""
    texts = list[str]()
    thinking = list[str]()
    other_parts = list[Any]()
    for part in cast(list[Any], content) if isinstance(content, list) else [content]:
        kind = cast(dict[str, Any], part).get("type") if isinstance(part, dict) else None
        if kind in _THINKING:
            thinking.append(_text_in(part))
        elif text := _text_in(part):
            texts.append(text)
        elif part and isinstance(part, dict) and "text" not in part:
            other_parts.append(part)
    return "".join(texts), "".join(thinking), other_parts


def thoughts_in(blocks: Any) -> str:
    """Returns the text of Anthropic's blocks of thinking, whose signatures are part of their author's state."""
    return "".join(str(block.get("thinking") or "") for block in objects(blocks or ()))


def _text_in(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, list):
        return "".join(map(_text_in, cast(list[Any], part)))
    if not isinstance(part, dict):
        return ""
    return next((text for name in ("text", *_THINKING) if (text := _text_in(cast(Any, part).get(name)))), "")


def encode_json(value: Any) -> bytes:
    """Encodes a value from a client or provider as JSON, even with numbers beyond 64 bits."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value).encode()


def arguments_text(arguments: Any) -> str:
    """Returns a tool call's arguments as a JSON text, as in OpenAI's format. llama.cpp and others send objects."""
    if isinstance(arguments, str):
        return arguments
    if arguments is None:
        return ""
    return encode_json(arguments).decode()


def call_id(reported: Any) -> str | None:
    """Returns the id of a tool call as text; None if there is none."""
    if isinstance(reported, int) and not isinstance(reported, bool):
        return str(reported)
    return reported if isinstance(reported, str) and reported else None


def generated_call_id(seed: str, choice: int, number: int) -> str:
    """Returns the id of a tool call that came without an id of its own. The same arguments give the same id.

    Args:
        seed: the id of the execution, so that no other call in a conversation has the same id.
        choice: the index of the choice.
        number: the number of the call in its message.
    """
    return f"call_{hashlib.md5(f'{seed}:{choice}:{number}'.encode(), usedforsecurity=False).hexdigest()[:24]}"


def normalize(message: Mapping[str, Any], seed: str, choice: int) -> dict[str, Any]:
    """Returns a whole message as clients get it: content and arguments are texts, and each call has an id of its own.

    Args:
        message: the message as the provider sent it.
        seed: the id of the execution, see `generated_call_id`.
        choice: the index of the choice.
    """
    readable = {"role": "assistant", "content": None, "refusal": None, **message}
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        text, thinking, other_parts = parts_of(content)
        readable["content"] = text or None
        readable |= {name: value for name, value in ((THOUGHT, thinking), (OTHERS, other_parts)) if value}
    if "tool_calls" in message:
        calls = objects(message["tool_calls"])
        ids = set[str]()
        readable["tool_calls"] = [
            _normalize_call(call, ids, seed, choice, number) for number, call in enumerate(calls)
        ] or None
    return readable


def _normalize_call(call: dict[str, Any], ids: set[str], seed: str, choice: int, number: int) -> dict[str, Any]:
    tool_call_id = call_id(call.get("id"))
    if tool_call_id is None or tool_call_id in ids:
        tool_call_id = generated_call_id(seed, choice, number)
    ids.add(tool_call_id)
    if call.get("custom") is not None:
        return {**call, "id": tool_call_id}
    function: Any = call.get("function")
    source = function if isinstance(function, dict) else call
    name = source.get("name")
    arguments = source.get("arguments")
    name_and_arguments = {"name": name if isinstance(name, str) else "", "arguments": arguments_text(arguments) or "{}"}
    return {
        **call,
        "id": tool_call_id,
        "type": "function",
        "function": {**(source if source is function else {}), **name_and_arguments},
    }


_SYNONYMS = {
    "stop": "end_turn stop_sequence eos eos_token complete",
    "length": "max_tokens max_output_tokens model_length model_context_window_exceeded token_limit error_limit",
    "tool_calls": "tool_use tool_call function_call",
    "content_filter": "refusal safety image_safety recitation blocklist prohibited_content image_prohibited_content "
    "image_recitation model_armor sensitive spii content_filtered guardrail_intervened error_toxic",
}
_STANDARD = {word: standard for standard, words in _SYNONYMS.items() for word in words.split()}
_WORD = re.compile(r"[a-z][a-z0-9_.-]{0,63}")

INTERRUPTED = words(
    """
    error abort timeout cancelled time_limit network_error insufficient_system_resource malformed_function_call
    malformed_response unexpected_tool_call too_many_tool_calls missing_thought_signature function_call_filter
    malformed_model_output malformed_tool_use
    """
)
"""Reasons of unusable answers: the provider failed while the model was writing, or the model wrote no valid call.

They come from Mistral, OpenRouter, Cohere, vLLM, SGLang, watsonx, Zhipu, DeepSeek, Gemini and Bedrock.
"""
OPENAI_REASONS = frozenset({"stop", "length", "tool_calls", "content_filter", "function_call"})
"""Reasons that clients of chat completions know."""
KNOWN_REASONS = INTERRUPTED | _STANDARD.keys() | _SYNONYMS.keys() | {"pause_turn", "compaction"}


def finish_reason(reported: Any) -> str | None:
    """Returns why a model stopped: `stop`, `length`, `tool_calls` or `content_filter`; else the provider's own word.

    Args:
        reported: the provider's value. Gemini adds a detail (`content_filter: RECITATION`), and gateways write the
            names of enumerations (`FinishReason.STOP`) and hyphens (`tool-calls`).

    Returns:
        The reason; None if the provider gives none, or something that is not a word.
    """
    if not is_end(reported):
        return None
    word = str(reported).partition(":")[0].strip().rpartition(".")[2].lower().replace("-", "_")
    return _STANDARD.get(word, word) if _WORD.fullmatch(word) else None


def known_reason(reported: Any, *, called: bool) -> str | None:
    """Returns a finish reason that clients of chat completions know; None while the model goes on.

    Args:
        reported: the provider's value.
        called: the answer calls tools.
    """
    if not is_end(reported):
        return None
    if reported in OPENAI_REASONS:
        return str(reported)
    word = finish_reason(reported)
    return word if word in OPENAI_REASONS else "tool_calls" if called else "stop"


def is_end(reported: Any) -> bool:
    """Returns True if a finish reason says that the model has stopped. Some write "" or "null" while it goes on."""
    return isinstance(reported, str) and reported.strip().lower() not in {"", "null", "none"}


IMAGES = frozenset({"image_url", "input_image", "image", "computer_screenshot"})
SOUND_AND_FILM = frozenset({"input_audio", "audio_url", "audio", "input_video", "video_url", "video"})
DOCUMENTS = frozenset({"input_file", "file", "document"})
FILES = IMAGES | SOUND_AND_FILM | DOCUMENTS
"""The types of parts that are files."""

_PAYLOADS = ("source", "image_url", "file", *SOUND_AND_FILM)
_DATA = ("data", "file_data", "url", "file_url")
_MEDIA_TYPE = ("media_type", "mime_type", "mimeType")
_LINKS = ("http:", "https:", "gs:", "s3:", "file:")


@dataclass(frozen=True, slots=True)
class FileContent:
    """The content of a file part, or its location.

    Attributes:
        media_type: the media type, such as `image/png`; empty if it is unknown.
        data: the file, mostly in base64; None if the part only refers to it.
        url: the URL of the file; None if the part contains it, or names it by an id.
        field: the field of the payload that has the data; None if the part only refers to the file.
    """

    media_type: str
    data: str | None
    url: str | None
    field: str | None = None

    @property
    def size(self) -> int:
        """The size of the data in bytes, if it is base64."""
        data = self.data or ""
        return (len(data) - data[-2:].count("=")) * 3 // 4


def payload_of(part: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """Returns the field of a part that has its file, and its value; None and the part itself without such a field."""
    name = next((name for name in _PAYLOADS if part.get(name) is not None), None)
    payload = part if name is None else part[name]
    return name, cast(Mapping[str, Any], payload) if isinstance(payload, Mapping) else {"url": payload}


def content_of(payload: Mapping[str, Any]) -> FileContent:
    """Returns the file content of a part's payload."""
    name = next((name for name in _DATA if isinstance(payload.get(name), str)), None)
    data = None if name is None else str(payload[name])
    media_type = next(
        (reported_type for name in _MEDIA_TYPE if isinstance(reported_type := payload.get(name), str)), ""
    )
    if data is None or data.startswith(_LINKS):
        return FileContent(media_type, None, data)
    if data.startswith("data:"):
        media_type = data[5:200].partition(",")[0]
        data = data[5 + len(media_type) + 1 :]
    return FileContent(media_type, data, None, name)
