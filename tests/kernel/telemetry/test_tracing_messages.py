"""Conversations and answers as the semantic conventions have them."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from breakwater.kernel.telemetry.tracing.messages import (
    fit,
    input_messages,
    last_text,
    output_message,
    system_instructions,
    text_message,
)
from tests.tables import each_row

CALL: Any = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Kiel"}'}}
ASKED = {"type": "tool_call", "id": "c1", "name": "weather", "arguments": {"city": "Kiel"}}


@each_row(
    ("message", "parts"),
    [
        ({"role": "user", "content": "a"}, [{"type": "text", "content": "a"}]),
        ({"role": "user", "content": [{"type": "text", "text": "a"}]}, [{"type": "text", "content": "a"}]),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, [ASKED]),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "no JSON"}}]},
            [{"type": "tool_call", "id": None, "name": "f", "arguments": "no JSON"}],
        ),
        (
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            [{"type": "tool_call_response", "id": "c1", "response": "rain"}],
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x.example.com/a.png"}}]},
            [{"type": "uri", "modality": "image", "uri": "https://x.example.com/a.png"}],
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]},
            [{"type": "blob", "modality": "image", "mime_type": "image/png", "content": ""}],
        ),
        (
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}]},
            [{"type": "blob", "modality": "audio", "mime_type": "audio/wav", "content": ""}],
        ),
        (
            {"role": "user", "content": [{"type": "file", "file": {"file_id": "f1"}}]},
            [{"type": "file", "modality": "document", "file_id": "f1"}],
        ),
        ({"role": "user", "content": [{"type": "new", "x": 1}, "odd"]}, [{"type": "new"}]),
        ({"role": "user", "content": 7, "tool_calls": ["odd"]}, []),
    ],
)
def test_a_message_has_the_parts_of_the_conventions(message: dict[str, Any], parts: list[dict[str, Any]]) -> None:
    assert input_messages([message]) == [{"role": message["role"], "parts": parts}]


def test_answers_of_any_form_are_messages_with_a_reason() -> None:
    said: Any = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    text = {"role": "assistant", "parts": [{"type": "text", "content": "a"}]}
    assert output_message("a", "stop") == text | {"finish_reason": "stop"}
    assert output_message(said, None) == {"role": "assistant", "parts": [ASKED], "finish_reason": ""}
    assert output_message({"n": 1}, None)["parts"] == [{"type": "text", "content": '{"n":1}'}]


def test_instructions_are_the_texts_of_system_messages() -> None:
    image = {"type": "image_url", "image_url": {"url": "https://x.example.com/a.png"}}
    system: list[dict[str, Any]] = [{"content": "a"}, {"content": [{"type": "text", "text": "b"}, image]}]
    assert system_instructions(system) == [{"type": "text", "content": "a"}, {"type": "text", "content": "b"}]


def test_the_longest_texts_are_cut_first_and_the_oldest_messages_left_out_then() -> None:
    cut = json.loads(fit(input_messages([{"content": "short"}, {"content": "x" * 1000}]), 300) or "")
    assert [one["parts"][0]["content"] for one in cut] == ["short", "x" * 149 + "…"]
    many = [text_message(str(number)) for number in range(100)]
    left = json.loads(fit(many, 500) or "")
    assert left == many[-len(left) :]
    assert 1 < len(left) < 10
    assert fit([text_message("x" * 100)], 20) is None


@given(st.lists(st.text(max_size=500), min_size=1, max_size=20), st.integers(256, 4096))
def test_no_more_bytes_than_the_limit_are_said(values: list[str], limit: int) -> None:
    messages = [text_message(values[0])] + [output_message(value, "stop") for value in values]
    said = fit(messages, limit)
    assert said is None or (len(said.encode()) <= limit and json.loads(said))
    assert len(last_text(messages, limit).encode()) <= limit


def test_the_text_of_a_message_is_plain_and_that_of_a_tool_call_is_json() -> None:
    assert last_text(input_messages([{"content": "old"}, {"content": "é" * 10}]), 5) == "éé"
    assert json.loads(last_text([output_message({"role": "assistant", "tool_calls": [CALL]}, None)], 500)) == [ASKED]
