"""Anthropic's Messages: as a chat, as their provider gets them, and the messages of results."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakwater.dialects.rules.forms import InvalidBodyError
from breakwater.dialects.rules.messages import (
    UNSIGNED,
    chat_form,
    for_chat,
    input_of,
    is_readable,
    message_of,
    native_body,
    readable,
)
from tests.anthropic_client import blocks_of
from tests.any_answers import JSON
from tests.helpers import more_examples
from tests.tables import each_row

HI: dict[str, Any] = {"role": "user", "content": "Hi"}
THOUGHT = {"type": "thinking", "thinking": "Hm", "signature": "sig"}
OURS = {"type": "thinking", "thinking": "Hm", "signature": UNSIGNED}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"a": 1}}
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def form(*messages: Any, **more: Any) -> Any:
    return chat_form({"max_tokens": 100, "messages": list(messages) or [HI], **more})


def said(*messages: Any, **more: Any) -> list[dict[str, Any]]:
    """The conversation as a provider of chat completions gets it."""
    found = form(*messages, **more)
    assert found.losses == ()
    return for_chat(found.messages, found.params)[0]


def params(**more: Any) -> dict[str, Any]:
    found = form(**more)
    assert found.losses == ()
    shown = for_chat(found.messages, found.params)[1]
    assert shown.pop("max_tokens") == 100
    return shown


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def result(**block: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "toolu_1", **block}


_CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "toolu_1", "type": "function", "function": {"name": "look", "arguments": '{"a":1}'}}],
}


@each_row(
    ("messages", "chat"),
    [
        ([HI], [HI]),
        ([user({"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}})], [HI]),
        (
            [HI, {"role": "system", "content": "Be brief.", "output_config": {"effort": "low"}}, HI],
            [HI, {"role": "system", "content": "Be brief."}, HI],
        ),
        (
            [
                user(
                    {"type": "text", "text": "See"},
                    PNG,
                    {"type": "image", "source": {"type": "url", "url": "https://x"}},
                )
            ],
            [
                user(
                    {"type": "text", "text": "See"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                    {"type": "image_url", "image_url": {"url": "https://x"}},
                )
            ],
        ),
        (
            [
                HI,
                {"role": "assistant", "content": [THOUGHT, {"type": "text", "text": "I look."}, CALL]},
                user(result(content="7")),
            ],
            [HI, {**_CALLED, "content": "I look."}, {"role": "tool", "tool_call_id": "toolu_1", "content": "7"}],
        ),
        (
            [
                HI,
                {"role": "assistant", "content": [CALL]},
                user(
                    result(is_error=True, content=[{"type": "text", "text": "none"}]), {"type": "text", "text": "So?"}
                ),
            ],
            [
                HI,
                _CALLED,
                {"role": "tool", "tool_call_id": "toolu_1", "content": "none"},
                {"role": "user", "content": "So?"},
            ],
        ),
        (
            [HI, {"role": "assistant", "content": [CALL]}, user(result(content=[PNG]))],
            [
                HI,
                _CALLED,
                {"role": "tool", "tool_call_id": "toolu_1", "content": ""},
                user(
                    {"type": "text", "text": "A file in the result of toolu_1:"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                ),
            ],
        ),
        ([HI, {"role": "assistant", "content": [THOUGHT]}, HI], [HI, HI]),
        (
            [
                user(
                    {
                        "type": "document",
                        "title": "T",
                        "source": {"type": "text", "media_type": "text/plain", "data": "D"},
                    },
                    {
                        "type": "document",
                        "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"},
                        "citations": {"enabled": False},
                    },
                )
            ],
            [
                user(
                    {"type": "text", "text": "T"},
                    {"type": "text", "text": "D"},
                    {
                        "type": "file",
                        "file": {"filename": "document.pdf", "file_data": "data:application/pdf;base64,JVBE"},
                    },
                )
            ],
        ),
    ],
)
def test_a_conversation_is_a_chat(messages: list[Any], chat: list[Any]) -> None:
    assert said(*messages) == chat


@pytest.mark.parametrize("system", ["Be brief.", [{"type": "text", "text": "Be brief."}]])
def test_the_system_prompt_is_the_first_message(system: Any) -> None:
    assert said(system=system) == [{"role": "system", "content": "Be brief."}, HI]


_PARAMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0.5, "top_p": 0.9, "top_k": 5}, {"temperature": 0.5, "top_p": 0.9, "top_k": 5}),
    ({"stop_sequences": ["END"]}, {"stop": ["END"]}),
    ({"stop_sequences": []}, {}),
    (
        {
            "tools": [
                {
                    "name": "look",
                    "description": "d",
                    "input_schema": SCHEMA,
                    "cache_control": {},
                    "defer_loading": True,
                    "eager_input_streaming": True,
                }
            ]
        },
        {"tools": [{"type": "function", "function": {"name": "look", "description": "d", "parameters": SCHEMA}}]},
    ),
    ({"tool_choice": {"type": "auto"}}, {"tool_choice": "auto"}),
    ({"tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
    ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
    (
        {"tool_choice": {"type": "tool", "name": "look"}},
        {"tool_choice": {"type": "function", "function": {"name": "look"}}},
    ),
    (
        {"tools": [{"name": "f"}], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
        },
    ),
    ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
            }
        },
    ),
    *(
        ({name: value}, {})
        for name, value in {
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "metadata": {"user_id": "u"},
            "service_tier": "standard_only",
            "speed": "standard",
            "cache_control": {"type": "ephemeral"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "mcp_servers": [],
            "container": None,
        }.items()
    ),
]


@each_row(("given_fields", "chat"), _PARAMS)
def test_params_are_those_of_a_chat(given_fields: dict[str, Any], chat: dict[str, Any]) -> None:
    assert params(**given_fields) == chat


_LOSSES: list[tuple[dict[str, Any], str, bool]] = [
    ({"tools": [{"name": "f"}, {"type": "web_search_20250305", "name": "web_search"}]}, "tools[1].type", True),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type", False),
    ({"tools": [{"name": "f", "input_examples": [{}]}]}, "tools[0].input_examples", True),
    ({"tool_choice": {"type": "new"}}, "tool_choice.type", False),
    ({"mcp_servers": [{"url": "https://x"}]}, "mcp_servers", True),
    ({"container": "c1"}, "container", True),
    ({"speed": "fast"}, "speed", True),
    ({"inference_geo": "us"}, "inference_geo", True),
    ({"new_field": 1}, "new_field", True),
    ({"output_config": {"task_budget": {}}}, "output_config.task_budget", False),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type", False),
    (
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "context_management.edits[0]",
        False,
    ),
    ({"messages": [HI, {"role": "assistant", "content": "{"}]}, "messages[1]", False),
    ({"messages": [{"role": "new", "content": "Hi"}]}, "messages[0].role", False),
    ({"messages": [user({"type": "search_result", "content": []})]}, "messages[0].content[0]", False),
    ({"messages": [user({"type": "new_block"})]}, "messages[0].content[0]", True),
    ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management.edits[0]", True),
    ({"messages": [user({"type": "container_upload", "file_id": "f"})]}, "messages[0].content[0]", True),
    (
        {"messages": [user({"type": "image", "source": {"type": "file", "file_id": "f"}})]},
        "messages[0].content[0]",
        False,
    ),
    (
        {"messages": [user({"type": "document", "source": {"type": "url", "url": "https://x"}})]},
        "messages[0].content[0].source.type",
        False,
    ),
    (
        {
            "messages": [
                user({"type": "document", "source": {"type": "text", "data": "D"}, "citations": {"enabled": True}})
            ]
        },
        "messages[0].content[0].citations",
        False,
    ),
    (
        {"messages": [user(result(content=[{"type": "tool_reference", "tool_name": "f"}]))]},
        "messages[0].content[0].content[0]",
        False,
    ),
    (
        {"messages": [HI, {"role": "assistant", "content": [{"type": "server_tool_use", "id": "s"}]}, HI]},
        "messages[1].content[0]",
        False,
    ),
]


def test_losses_are_in_the_order_of_the_body() -> None:
    unknown = [f"field_{number}" for number in range(9)]
    found = chat_form({"messages": [HI], **dict.fromkeys(unknown, 1)})
    assert [one.path for one in found.losses] == unknown


@each_row(("body", "path", "priced"), _LOSSES)
def test_what_a_chat_cannot_express_is_named(body: dict[str, Any], path: str, priced: bool) -> None:
    found = chat_form({"max_tokens": 100, "messages": [HI], **body})
    assert [one.path for one in found.losses] == [path]
    assert [one.path for one in found.unpriced] == ([path] if priced else [])


@each_row(
    ("body", "path"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi"]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [user("Hi")]}, "messages[0].content[0]"),
        ({"messages": [user(result(content=[1]))]}, "messages[0].content[0].content[0]"),
        *(({"messages": [HI], name: 5}, name) for name in ("system", "thinking", "tool_choice", "tools", "metadata")),
        *(({"messages": [HI], name: []}, name) for name in ("context_management", "output_config", "service_tier")),
        ({"messages": [HI], "tools": [5]}, "tools[0]"),
    ],
)
def test_a_body_that_is_no_conversation_is_refused(body: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidBodyError) as caught:
        chat_form(body)
    assert caught.value.problem.path == path


def test_the_chat_form_keeps_what_only_anthropic_reads() -> None:
    mark = {"type": "ephemeral", "ttl": "1h"}
    found = form(
        HI,
        {"role": "assistant", "content": [OURS, THOUGHT, {**CALL, "cache_control": mark}]},
        user(result(content="no", is_error=True)),
    )
    assert found.messages[1:] == [
        {**_CALLED, "thinking_blocks": [THOUGHT], "cache_control": mark},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "no", "is_error": True},
    ]


def test_the_body_of_a_native_call_is_the_clients() -> None:
    body: dict[str, Any] = {
        "messages": [HI],
        "max_tokens": 50,
        "new_field": [1],
        "thinking": {"type": "adaptive"},
        "system": "S",
    }
    sent = native_body(body, params={"top_k": 3, "stop": "X", "n": 1, "thinking": {}}, max_tokens=60, system_prompt="P")
    assert sent == {**body, "top_k": 3, "stop_sequences": ["X"]}
    assert sent["messages"] is body["messages"]
    lowered = native_body({"messages": [HI]}, params={"reasoning_effort": "low"}, max_tokens=60, system_prompt="P")
    assert lowered == {"messages": [HI], "max_tokens": 60, "system": "P", "output_config": {"effort": "low"}}


def test_thinking_that_anthropic_has_not_signed_is_no_part_of_a_native_call() -> None:
    turns: list[Any] = [
        HI,
        {"role": "assistant", "content": [OURS, CALL]},
        user(result(content="7")),
        {"role": "assistant", "content": [OURS]},
        HI,
        {"role": "assistant", "content": [THOUGHT, CALL]},
    ]
    sent: Any = native_body({"messages": turns}, params={}, max_tokens=1, system_prompt=None)
    assert sent["messages"] == [HI, {"role": "assistant", "content": [CALL]}, turns[2], HI, turns[5]]


# Answers

RESULT: dict[str, Any] = {
    "execution_id": "j1",
    "job_id": "j1",
    "agent": "a",
    "status": "succeeded",
    "completed_at": "2026-01-01T00:00:00.000Z",
    "attempts": [],
}


def message(**response: Any) -> dict[str, Any]:
    return message_of({**RESULT, "response": response})


def known(usage: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in usage.items() if value is not None}


def test_the_message_of_a_chat() -> None:
    call = {"id": "functions.look:0", "type": "function", "function": {"name": "look", "arguments": '{"a":1}'}}
    found = message(
        model="gpt",
        choices=[
            {
                "message": {"content": "Hi", "reasoning_content": "Hm", "tool_calls": [call]},
                "finish_reason": "tool_calls",
            }
        ],
        usage={"prompt_tokens": 10, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}},
    )
    assert blocks_of(found) == [
        OURS,
        {"type": "text", "text": "Hi"},
        {**CALL, "id": "call_" + found["content"][2]["id"][5:]},
    ]
    assert known(found["usage"]) == {"input_tokens": 6, "cache_read_input_tokens": 4, "output_tokens": 5}
    assert (found["id"], found["model"], found["stop_reason"]) == ("msg_j1", "gpt", "tool_use")


@each_row(
    ("reason", "stop"),
    [
        ("stop", "end_turn"),
        ("length", "max_tokens"),
        ("content_filter", "refusal"),
        ("tool_calls", "tool_use"),
        ("eos", "end_turn"),
        (None, "end_turn"),
        ("stop_sequence", "stop_sequence"),
        ("pause_turn", "pause_turn"),
        ("new", "end_turn"),
    ],
)
def test_the_stop_reason_is_one_that_sdks_know(reason: str | None, stop: str) -> None:
    assert message(content=[{"type": "text", "text": "Hi"}], stop_reason=reason)["stop_reason"] == stop


def test_a_message_of_anthropics_is_its_own() -> None:
    usage = {"input_tokens": 3, "output_tokens": 2, "cache_creation": {"ephemeral_1h_input_tokens": 1}, "speed": None}
    blocks = [THOUGHT, {"type": "redacted_thinking", "data": "x"}, {"type": "new_block", "x": 1}, CALL]
    found = message(
        id="msg_x",
        model="claude",
        content=blocks,
        stop_reason="tool_use",
        stop_sequence=None,
        usage=usage,
        container={"id": "c"},
    )
    assert {**found, "content": blocks_of(found), "usage": known(found["usage"])} == {
        "id": "msg_x",
        "type": "message",
        "role": "assistant",
        "model": "claude",
        "content": blocks,
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": known(usage),
        "stop_details": None,
        "container": {"id": "c"},
    }


def test_the_message_of_a_program() -> None:
    found = message_of({**RESULT, "output": {"a": 1}, "finish_reason": None})
    assert (blocks_of(found), found["model"]) == ([{"type": "text", "text": '{"a": 1}'}], "a")


@more_examples(3)
@given(
    st.dictionaries(
        st.sampled_from(["id", "model", "content", "stop_reason", "stop_sequence", "usage", "choices"]), JSON
    )
)
def test_any_answer_is_a_message_that_sdks_can_read(response: dict[str, Any]) -> None:
    found = message(**response)
    assert json.loads(json.dumps(found)) == found
    assert all(isinstance(block["type"], str) for block in found["content"])
    assert all(isinstance(found["usage"][name], int) for name in ("input_tokens", "output_tokens"))
    assert isinstance(found["model"], str)


@more_examples(3)
@given(JSON)
def test_any_body_is_a_chat_or_refused(body: Any) -> None:
    bodies: list[dict[str, Any]] = [
        {"messages": body},
        {"messages": [user(body)]},
        {"messages": [HI], "tools": body, "output_config": body},
    ]
    for one in bodies:
        try:
            found = chat_form(one)
        except InvalidBodyError:
            continue
        for_chat(found.messages, found.params)
        native_body(one, params={}, max_tokens=1, system_prompt=None)


@more_examples(3)
@given(st.text(st.sampled_from('{}[]":,\\ab1-e.n '), max_size=14))
def test_the_readable_part_of_arguments_is_the_longest(text: str) -> None:
    whole = readable(text)
    assert text.startswith(whole)
    assert is_readable(whole)
    assert not any(is_readable(text[:end]) for end in range(len(whole) + 1, len(text) + 1))
    assert isinstance(input_of(whole), dict)
