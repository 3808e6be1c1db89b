from __future__ import annotations

from typing import Any

import pytest

from breakwater.dialects.rules.chat_chunks import Assembly


@pytest.mark.parametrize(
    ("pieces", "whole"),
    [
        ([{"audio": {"id": "a", "data": "AAAA"}}] * 3, {"audio": {"id": "a", "data": "AAAAAAAAAAAA"}}),
        ([{"audio": {"transcript": "ha"}}] * 2, {"audio": {"transcript": "haha"}}),
        ([{"function_call": {"name": "f", "arguments": "1"}}] * 2, {"function_call": {"name": "f", "arguments": "11"}}),
    ],
)
def test_of_equal_pieces_that_are_no_text_of_the_answer_none_is_lost(
    pieces: list[dict[str, Any]], whole: dict[str, Any]
) -> None:
    answer = Assembly()
    for piece in pieces:
        answer.add({"choices": [{"index": 0, "delta": piece}]})
    assert {name: answer.messages()[0][name] for name in whole} == whole


def test_the_input_of_a_custom_tool_keeps_equal_pieces() -> None:
    answer = Assembly()
    for piece in ({"id": "c", "type": "custom", "custom": {"name": "run", "input": "a"}}, {"custom": {"input": "a"}}):
        answer.add({"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, **piece}]}}]})
    assert answer.messages()[0]["tool_calls"][0]["custom"] == {"name": "run", "input": "aa"}


def test_a_call_with_null_as_its_custom_tool_is_that_of_a_function() -> None:
    answer = Assembly("j1")
    function = {"name": "f", "arguments": "{}"}
    call = {"index": 0, "id": "c1", "type": "function", "function": function, "custom": None}
    answer.add({"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]})
    assert answer.messages()[0]["tool_calls"] == [{"id": "c1", "type": "function", "function": function}]


def test_clients_get_the_role_once_as_openai_s_sdk_joins_roles() -> None:
    answer = Assembly()
    deltas = [{"role": "assistant", "content": text} for text in ("At ", "sea.")]
    sent = [answer.add({"choices": [{"index": index, "delta": delta}]}) for delta in deltas for index in (0, 1)]
    assert [chunk["choices"][0]["delta"] for chunk in sent] == [deltas[0], deltas[0], *[{"content": "sea."}] * 2]
