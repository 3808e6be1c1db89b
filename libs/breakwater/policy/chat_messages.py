"""What models say, of whatever shape, in the one that OpenAI's clients know."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, cast

import orjson

_THINKING = ("thinking", "reasoning")
THOUGHT = "reasoning_content"
"""The field beside the content that makers of thinking models use, and that clients know."""

OTHERS = "content_parts"
"""What a content has beside text and thinking."""


def fields(value: Any) -> Mapping[str, Any]:
    """A JSON object; empty where there is something else."""
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def objects(value: Any) -> list[dict[str, Any]]:
    """The objects of a list, or the one that stands in its place."""
    return [one for one in cast(list[Any], value if isinstance(value, list) else [value]) if isinstance(one, dict)]


def parts_of(content: Any) -> tuple[str, str, list[Any]]:
    """The text of a content, its thinking, and its other parts: some makers' thinking models send a list of parts."""
    texts, thinking, others = list[str](), list[str](), list[Any]()
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


def arguments_text(arguments: Any) -> str:
    """A tool call's arguments as the JSON text that they are in OpenAI's format; llama.cpp and others send objects."""
    if isinstance(arguments, str):
        return arguments
    return "" if arguments is None else orjson.dumps(arguments).decode()


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
    shown, content = {"role": "assistant", "content": None, "refusal": None, **message}, message.get("content")
    if content is not None and not isinstance(content, str):
        text, thinking, others = parts_of(content)
        shown["content"] = text or None
        shown |= {name: value for name, value in ((THOUGHT, thinking), (OTHERS, others)) if value}
    if "tool_calls" in message:
        calls, ids = objects(message["tool_calls"]), set[str]()
        shown["tool_calls"] = [
            _normalized_call(call, ids, seed, choice, number) for number, call in enumerate(calls)
        ] or None
    return shown


def _normalized_call(call: dict[str, Any], ids: set[str], seed: str, choice: int, number: int) -> dict[str, Any]:
    own = call_id(call.get("id"))
    if own is None or own in ids:
        own = made_call_id(seed, choice, number)
    ids.add(own)
    if "custom" in call:
        return {**call, "id": own}
    function: Any = call.get("function")
    given = function if isinstance(function, dict) else call
    name, arguments = given.get("name"), given.get("arguments")
    named = {"name": name if isinstance(name, str) else "", "arguments": arguments_text(arguments) or "{}"}
    return {**call, "id": own, "type": "function", "function": {**(given if given is function else {}), **named}}
