"""Requests with anything in any of their places: a chat, or a refusal that names the place."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from breakwater.dialects.rules.forms import Dialect, InvalidBodyError
from breakwater.dialects.rules.messages import message_of
from breakwater.dialects.rules.native_requests import DIALECTS
from breakwater.dialects.rules.responses_answer import EchoedRequest
from breakwater.dialects.rules.responses_stream import ResponseEvents, event_bytes
from breakwater.jobs.rules.chat_messages import encode_json

ODD: list[Any] = [None, 0, -1, 1.5, True, "", "x", [], {}, [[]], [{}], {"a": {"b": []}}, {"type": {}}, [1, "a", None]]
TEXT = {"type": "input_text", "text": "a"}
RESPONSES: dict[str, Any] = {
    "input": [
        {"type": "message", "role": "user", "content": [TEXT, {"type": "input_image", "image_url": "data:,"}]},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_file", "filename": "a", "file_data": "data:,"}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "c"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [TEXT]},
        {"type": "custom_tool_call", "call_id": "c2", "name": "g", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "y"},
    ],
    "instructions": "d",
    "tools": [
        {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True},
        {"type": "custom", "name": "g", "format": {"type": "grammar", "syntax": "lark", "definition": "start: A"}},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "h", "parameters": {}}]},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "text": {"format": {"type": "json_schema", "name": "s", "schema": {}, "strict": True}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
    "max_output_tokens": 100,
}
MESSAGES: dict[str, Any] = {
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "user",
            "content": [
                {"type": "image", "source": {"type": "base64", "media_type": "image/gif", "data": "AA=="}},
                {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}, "title": "t"},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "b", "signature": "c"},
                {"type": "text", "text": "d", "citations": None},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {}, "caller": {"type": "direct"}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "e"}]}],
        },
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}, {"type": "web_search_20250305", "name": "web_search"}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "output_config": {"format": {"type": "json_schema", "schema": {}}, "effort": "low"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "stop_sequences": ["x"],
    "metadata": {"user_id": "u"},
    "max_tokens": 100,
}
EMBEDDINGS: dict[str, Any] = {"input": ["a", "b"], "dimensions": 8, "encoding_format": "float", "user": "u"}
BODIES = {"responses": RESPONSES, "messages": MESSAGES, "embeddings": EMBEDDINGS}


def places(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if place:
        yield place
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*place, key))


def changed(body: dict[str, Any], place: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    result: Any = copy.deepcopy(body)
    holder = result
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = copy.deepcopy(value)
    return result


def refusal(dialect: Dialect, body: dict[str, Any]) -> str | None:
    try:
        dialect.chat_form(body)
    except InvalidBodyError as refused:
        return str(refused)
    return None


@pytest.mark.parametrize("api", BODIES)
def test_anything_in_any_place_is_a_chat_or_refused(api: Any) -> None:
    dialect = DIALECTS[api]
    dialect.chat_form(BODIES[api])
    for place in places(BODIES[api]):
        for odd in ODD:
            body = changed(BODIES[api], place, odd)
            if (refused := refusal(dialect, body)) is not None:
                assert str(place[0]) in refused
            else:
                dialect.native_body(body, params={"temperature": 1}, max_tokens=10, system_prompt="Be brief.")


@pytest.mark.parametrize(
    ("api", "body", "path"),
    [
        ("responses", {"input": []}, "input"),
        ("responses", {"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ("messages", {"messages": [{"role": "user", "content": []}]}, "messages"),
    ],
)
def test_a_conversation_without_content_is_no_chat(api: Any, body: dict[str, Any], path: str) -> None:
    form = DIALECTS[api].chat_form(body)
    assert form.messages == []
    assert form.losses[-1].path == path


def test_numbers_beyond_64_bits_are_repeated_and_passed_on() -> None:
    asked = EchoedRequest(job_id="j", created_at=0, model="m", body={"input": "a", "metadata": {"n": 10**30}})
    [event, *_] = ResponseEvents(asked).begin()
    assert json.loads(event_bytes(event).split(b"data: ")[1])["response"]["metadata"] == {"n": 10**30}
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "f", "arguments": '{"n": 1000000000000000000000000000000}'},
    }
    completion = {"choices": [{"index": 0, "message": {"tool_calls": [call]}, "finish_reason": "tool_calls"}]}
    message = message_of(
        {"execution_id": "j", "job_id": "j", "status": "succeeded", "response": completion, "attempts": []}
    )
    assert json.loads(encode_json(message))["content"][0]["input"] == {"n": 10**30}
