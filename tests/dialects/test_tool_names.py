"""Names of tools that are too long for providers: short on the way there, long again on the way back."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from breakwater.dialects.rules.tool_names import MAX_TOOL_NAME, long_names, shorten_names, with_long_names

LONG = "mcp__a_server_with_a_very_long_name__" + "find_ship_" * 5
NAMES = st.text(st.sampled_from("ab_"), min_size=1, max_size=100)


def call(name: str) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": "{}"}}


def request(*names: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call(name) for name in names]}]
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in names]
    return messages, {"tools": tools, "tool_choice": {"type": "function", "function": {"name": names[0]}}}


def test_a_request_without_long_names_has_none() -> None:
    assert long_names(*request("find_ship", "a" * MAX_TOOL_NAME)) == {}


@given(st.lists(NAMES, min_size=1, max_size=5, unique=True))
def test_each_name_is_short_distinct_and_comes_back(names: list[str]) -> None:
    messages, params = request(*names)
    by_short_name = long_names(messages, params)
    sent_messages, sent_params = shorten_names(messages, params, by_short_name)
    sent = [tool["function"]["name"] for tool in sent_params["tools"]]
    assert max(map(len, sent)) <= MAX_TOOL_NAME
    assert len(set(sent)) == len(names)
    assert sent_params["tool_choice"]["function"]["name"] == sent[0]
    assert [one["function"]["name"] for one in sent_messages[1]["tool_calls"]] == sent
    answers = (
        {"choices": [{"index": 0, "delta": {"tool_calls": [call(sent[0])]}}]},
        {"choices": [{"index": 0, "message": {"role": "assistant", "tool_calls": [call(sent[0])]}}]},
        {"content": [{"type": "tool_use", "id": "a", "name": sent[0], "input": {}}]},
        {"role": "assistant", "tool_calls": [call(sent[0])]},
    )
    for answer in answers:
        assert names[0] in str(with_long_names(answer, by_short_name))
        assert len(names[0]) <= MAX_TOOL_NAME or sent[0] not in str(with_long_names(answer, by_short_name))


def test_an_answer_that_calls_no_tool_is_left_as_it_is() -> None:
    names = long_names(*request(LONG))
    for answer in ("text", None, {"choices": [{"index": 0, "delta": {"content": "hi"}}], "usage": None}):
        assert with_long_names(answer, names) == answer
