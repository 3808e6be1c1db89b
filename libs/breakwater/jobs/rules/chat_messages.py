"""Models' messages, of whatever shape, in the one that OpenAI's clients know; finish reasons, and files in messages."""

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
"""The field in addition to the content that makers of thinking models use, and that clients know."""

ORDER = "order"
"""The field of a choice that says in which order the parts of its message were said, where that is not the default one.

A list of pairs: the name of a field, and where in it what was said then begins.
"""

OTHERS = "content_parts"
"""Parts of a content other than text and thinking."""


def fields(value: Any) -> Mapping[str, Any]:
    """A JSON object; empty where there is something else."""
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def objects(value: Any) -> list[dict[str, Any]]:
    """The objects of a list, or the one in its place."""
    return [one for one in cast(list[Any], value if isinstance(value, list) else [value]) if isinstance(one, dict)]


def parts_of(content: Any) -> tuple[str, str, list[Any]]:
    """The text of a content, its thinking, and its other parts: some makers' thinking models send a list of parts."""
    texts = list[str]()
    thinking = list[str]()
    others = list[Any]()
    for part in cast(list[Any], content) if isinstance(content, list) else [content]:
        kind = cast(dict[str, Any], part).get("type") if isinstance(part, dict) else None
        if kind in _THINKING:
            thinking.append(_text_in(part))
        elif text := _text_in(part):
            texts.append(text)
        elif part and isinstance(part, dict) and "text" not in part:
            others.append(part)
    return "".join(texts), "".join(thinking), others


def _text_in(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, list):
        return "".join(map(_text_in, cast(list[Any], part)))
    if not isinstance(part, dict):
        return ""
    return next((text for name in ("text", *_THINKING) if (text := _text_in(cast(Any, part).get(name)))), "")


def encoded(value: Any) -> bytes:
    """JSON of what a client or a provider said: numbers beyond 64 bits are JSON, too."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value).encode()


def arguments_text(arguments: Any) -> str:
    """A tool call's arguments as the JSON text that they are in OpenAI's format; llama.cpp and others send objects."""
    if isinstance(arguments, str):
        return arguments
    if arguments is None:
        return ""
    return encoded(arguments).decode()


def call_id(given: Any) -> str | None:
    """The id of a tool call as text; None for none."""
    if isinstance(given, int) and not isinstance(given, bool):
        return str(given)
    return given if isinstance(given, str) and given else None


def made_call_id(seed: str, choice: int, number: int) -> str:
    """The id of a tool call that came without one of its own: the same wherever it is asked for.

    Args:
        seed: the id of the execution, so that it is no other call's in a conversation.
        choice: the index of its choice.
        number: of the call in its message.
    """
    return f"call_{hashlib.md5(f'{seed}:{choice}:{number}'.encode(), usedforsecurity=False).hexdigest()[:24]}"


def normalized(message: Mapping[str, Any], seed: str, choice: int) -> dict[str, Any]:
    """A whole message as a client is sent it: content is a text, arguments are texts, each call has an id of its own.

    Args:
        message: as it came.
        seed: see `made_call_id`.
        choice: the same.
    """
    shown = {"role": "assistant", "content": None, "refusal": None, **message}
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        text, thinking, others = parts_of(content)
        shown["content"] = text or None
        shown |= {name: value for name, value in ((THOUGHT, thinking), (OTHERS, others)) if value}
    if "tool_calls" in message:
        calls = objects(message["tool_calls"])
        ids = set[str]()
        shown["tool_calls"] = [
            _normalized_call(call, ids, seed, choice, number) for number, call in enumerate(calls)
        ] or None
    return shown


def _normalized_call(call: dict[str, Any], ids: set[str], seed: str, choice: int, number: int) -> dict[str, Any]:
    own = call_id(call.get("id"))
    if own is None or own in ids:
        own = made_call_id(seed, choice, number)
    ids.add(own)
    if call.get("custom") is not None:
        return {**call, "id": own}
    function: Any = call.get("function")
    given = function if isinstance(function, dict) else call
    name = given.get("name")
    arguments = given.get("arguments")
    named = {"name": name if isinstance(name, str) else "", "arguments": arguments_text(arguments) or "{}"}
    return {**call, "id": own, "type": "function", "function": {**(given if given is function else {}), **named}}


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
"""Reasons of answers that are no good: the provider failed while the model was writing, or it wrote no valid call.

They are words of Mistral, OpenRouter, Cohere, vLLM, SGLang, watsonx, Zhipu, DeepSeek, Gemini and Bedrock.
"""
OPENAI_REASONS = frozenset({"stop", "length", "tool_calls", "content_filter", "function_call"})
"""Reasons that clients of chat completions know."""
KNOWN_REASONS = INTERRUPTED | _STANDARD.keys() | _SYNONYMS.keys() | {"pause_turn", "compaction"}


def finish_reason(given: Any) -> str | None:
    """Reason why a model stopped: `stop`, `length`, `tool_calls` or `content_filter`; else the provider's own word.

    Args:
        given: what the provider says. Gemini adds a detail: `content_filter: RECITATION`, and gateways write the names
            of enumerations (`FinishReason.STOP`) and hyphens (`tool-calls`).

    Returns:
        None where it says nothing, or no word.
    """
    if not is_end(given):
        return None
    word = str(given).partition(":")[0].strip().rpartition(".")[2].lower().replace("-", "_")
    return _STANDARD.get(word, word) if _WORD.fullmatch(word) else None


def known_reason(given: Any, *, called: bool) -> str | None:
    """A finish reason as clients of chat completions know it; None where the model goes on. `called`: tools were."""
    if not is_end(given):
        return None
    if given in OPENAI_REASONS:
        return str(given)
    word = finish_reason(given)
    return word if word in OPENAI_REASONS else "tool_calls" if called else "stop"


def is_end(given: Any) -> bool:
    """True if a finish reason says that the model has stopped: some write "" or "null" where it goes on."""
    return isinstance(given, str) and given.strip().lower() not in {"", "null", "none"}


IMAGES = frozenset({"image_url", "input_image", "image", "computer_screenshot"})
SOUND_AND_FILM = frozenset({"input_audio", "audio_url", "audio", "input_video", "video_url", "video"})
DOCUMENTS = frozenset({"input_file", "file", "document"})
FILES = IMAGES | SOUND_AND_FILM | DOCUMENTS
"""Types of parts that are files."""

_PAYLOADS = ("source", "image_url", "file", *SOUND_AND_FILM)
_DATA = ("data", "file_data", "url", "file_url")
_MEDIA_TYPE = ("media_type", "mime_type", "mimeType")
_LINKS = ("http:", "https:", "gs:", "s3:", "file:")


@dataclass(frozen=True, slots=True)
class FileContent:
    """Content of such a part, or its place.

    Attributes:
        media_type: such as `image/png`; empty if it is not said.
        data: the file, mostly base64; None for one that is only named.
        url: where it is; None if it is sent along, or is named by an id.
        field: of the payload that has the data; None for a file that is only named.
    """

    media_type: str
    data: str | None
    url: str | None
    field: str | None = None

    @property
    def size(self) -> int:
        """Bytes of what is sent along, if it is base64."""
        data = self.data or ""
        return (len(data) - data[-2:].count("=")) * 3 // 4


def payload_of(part: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """The field of a part that holds its file, and what that says; None and the part itself without such a field."""
    name = next((name for name in _PAYLOADS if part.get(name) is not None), None)
    payload = part if name is None else part[name]
    return name, cast(Mapping[str, Any], payload) if isinstance(payload, Mapping) else {"url": payload}


def content_of(payload: Mapping[str, Any]) -> FileContent:
    """The content of a part's payload."""
    name = next((name for name in _DATA if isinstance(payload.get(name), str)), None)
    data = None if name is None else str(payload[name])
    media_type = next((found for name in _MEDIA_TYPE if isinstance(found := payload.get(name), str)), "")
    if data is None or data.startswith(_LINKS):
        return FileContent(media_type, None, data)
    if data.startswith("data:"):
        media_type = data[5:200].partition(",")[0]
        data = data[5 + len(media_type) + 1 :]
    return FileContent(media_type, data, None, name)
