"""Names of tools that are too long for providers: they are shortened in a request, and restored in its answer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pydantic import JsonValue

from breakwater.jobs.rules.chat_messages import fields, objects

MAX_TOOL_NAME = 64
"""The most characters of a tool's name at OpenAI. MCP servers prefix the names of their tools, and exceed it."""
_DIGEST = 12


def long_names(messages: Iterable[Mapping[str, JsonValue]], params: Mapping[str, JsonValue]) -> dict[str, str]:
    """Returns the names in a request that are too long, by their short forms.

    Args:
        messages: the conversation, in OpenAI's chat format.
        params: the params of the same call.
    """
    tools = objects(params["tools"]) if params.get("tools") else []
    for message in messages:
        if message.get("tool_calls"):
            tools += objects(message["tool_calls"])
    if not tools:
        return {}
    names = (_holder_of_name(tool).get("name") for tool in tools)
    return {_short(name): name for name in names if isinstance(name, str) and len(name) > MAX_TOOL_NAME}


def shorten_names(
    messages: Sequence[Mapping[str, JsonValue]], params: Mapping[str, JsonValue], names: Mapping[str, str]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns the messages and the params with short names. `names` comes from `long_names`."""
    short_of = {name: short for short, name in names.items()}
    calling = [_with_calls(message, short_of.get) for message in messages]
    renamed: dict[str, Any] = dict(params)
    if "tools" in renamed:
        renamed["tools"] = [_rename(tool, short_of.get) for tool in objects(renamed["tools"] or ())]
    if isinstance(renamed.get("tool_choice"), dict):
        renamed["tool_choice"] = _rename(renamed["tool_choice"], short_of.get)
    return calling, renamed


def with_long_names(answer: Any, names: Mapping[str, str]) -> Any:
    """Returns a chunk, an answer or an assistant's message with the names that the client knows.

    Args:
        answer: the answer in OpenAI's chat format or in Anthropic's; anything else is returned as it is.
        names: the long names by their short forms, from `long_names`.
    """
    if not isinstance(answer, dict):
        return answer
    renamed: dict[str, Any] = _with_calls(fields(answer), names.get)
    if isinstance(renamed.get("choices"), list):
        renamed["choices"] = [
            {**choice, **{part: _with_calls(fields(choice[part]), names.get) for part in _PARTS if choice.get(part)}}
            for choice in objects(renamed["choices"])
        ]
    if isinstance(renamed.get("content"), list):
        renamed["content"] = [
            _rename(block, names.get) if fields(block).get("type") == "tool_use" else block
            for block in renamed["content"]
        ]
    return renamed


_PARTS = ("delta", "message")
"""The fields of a choice that may call tools."""


def _short(name: str) -> str:
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:_DIGEST]
    return f"{name[: MAX_TOOL_NAME - _DIGEST - 1]}_{digest}"


def _holder_of_name(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the object that has the name of a tool, a call, or a tool choice."""
    return next((inner for kind in ("function", "custom") if (inner := fields(tool.get(kind)))), tool)


def _rename(tool: Mapping[str, Any], name_of: Callable[[Any], str | None]) -> dict[str, Any]:
    holder = _holder_of_name(tool)
    name = holder.get("name")
    new_name = name_of(name) if isinstance(name, str) else None
    if new_name is None:
        return dict(tool)
    if holder is tool:
        return {**tool, "name": new_name}
    kind = "function" if holder is tool.get("function") else "custom"
    return {**tool, kind: {**holder, "name": new_name}}


def _with_calls(message: Mapping[str, Any], name_of: Callable[[Any], str | None]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return dict(message)
    return {**message, "tool_calls": [_rename(call, name_of) for call in objects(message["tool_calls"])]}
