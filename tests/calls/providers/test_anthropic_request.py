from __future__ import annotations

import re
from typing import Any

import pytest

from breakwater.calls.providers.anthropic import dropped_params, request_body
from breakwater.calls.providers.base import CallError
from breakwater.calls.rules.classify import NotSent
from tests.calls.providers.kit import call
from tests.tables import each_row

MARK = {"type": "ephemeral"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "minLength": 1}}}
CLOSED = {
    "type": "object",
    "properties": {"a": {"type": "string"}},
    "required": [],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}}
NATIVE = {"name": "f", "description": "d", "input_schema": SCHEMA, "strict": True}


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def tool_call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": f"id-{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


def use(name: str, given: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"id-{name}", "name": name, "input": given}


def result(name: str, *content: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": f"id-{name}", **({"content": [*content]} if content else {})}


def user(*content: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [*content]}


def assistant(*content: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": [*content]}


@each_row(
    ("messages", "sent"),
    [
        ([{"role": "user", "content": "a"}], [user(text("a"))]),
        (
            [{"role": "user", "content": "a"}, {"role": "user", "content": [text("b"), text("")]}],
            [user(text("a"), text("b"))],
        ),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "b"}],
            [user(text("a"), text("b"))],
        ),
        (
            [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": None, "tool_calls": [tool_call("f", '{"x": 1}'), tool_call("g", "")]},
                {"role": "tool", "tool_call_id": "id-f", "content": "1"},
                {"role": "tool", "tool_call_id": "id-g", "content": [text("2"), text("3")]},
                {"role": "user", "content": "b"},
            ],
            [
                user(text("a")),
                assistant(use("f", {"x": 1}), use("g", {})),
                user(result("f", text("1")), result("g", text("2"), text("3")), text("b")),
            ],
        ),
        (
            [{"role": "assistant", "content": "so", "tool_calls": [tool_call("f", '{"x": ')]}],
            [assistant(text("so"), use("f", {}))],
        ),
        ([{"role": "assistant", "tool_calls": [tool_call("f", "[1]")]}], [assistant(use("f", {}))]),
        ([{"role": "assistant", "tool_calls": [tool_call("f", None)]}], [assistant(use("f", {}))]),
        ([{"role": "tool", "tool_call_id": "id-f", "content": ""}], [user(result("f"))]),
        (
            [
                {
                    "role": "assistant",
                    "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}],
                    "tool_calls": [tool_call("f", "{}")],
                }
            ],
            [assistant({"type": "thinking", "thinking": "hm", "signature": "s"}, use("f", {}))],
        ),
        ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}], [assistant(text("no"))]),
        (
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD", "detail": "low"}},
                        {"type": "image_url", "image_url": "https://x.invalid/a.png", "cache_control": MARK},
                        {"type": "document", "source": {"type": "url", "url": "https://x.invalid/a.pdf"}},
                        {
                            "type": "file",
                            "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBE"},
                        },
                    ],
                }
            ],
            [
                user(
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}},
                    {
                        "type": "image",
                        "source": {"type": "url", "url": "https://x.invalid/a.png"},
                        "cache_control": MARK,
                    },
                    {"type": "document", "source": {"type": "url", "url": "https://x.invalid/a.pdf"}},
                    {
                        "type": "document",
                        "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"},
                    },
                )
            ],
        ),
        (
            [{"role": "user", "content": [text("a", cache_control=MARK), text("b")]}],
            [user(text("a", cache_control=MARK), text("b"))],
        ),
        (
            [{"role": "user", "content": [text("a"), text("b")], "cache_control": MARK}],
            [user(text("a"), text("b", cache_control=MARK))],
        ),
        (
            [{"role": "tool", "tool_call_id": "id-f", "content": "1", "is_error": True}],
            [user({**result("f", text("1")), "is_error": True})],
        ),
        (
            [{"role": "tool", "tool_call_id": "id-f", "content": "1", "cache_control": MARK}],
            [user({**result("f", text("1")), "cache_control": MARK})],
        ),
    ],
)
def test_a_conversation_is_translated(messages: list[dict[str, Any]], sent: list[dict[str, Any]]) -> None:
    body = request_body(call(messages=messages))
    assert body["messages"] == sent
    assert "system" not in body


BLANK = " \n\t"
HI = {"role": "user", "content": "a"}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "s"}
ACCEPTED: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [
    # Texts without a visible character, wherever they are.
    (
        [HI, {"role": "assistant", "content": BLANK, "tool_calls": [tool_call("f", "{}")]},
         {"role": "tool", "tool_call_id": "id-f", "content": BLANK}],
        [user(text("a")), assistant(use("f", {})), user(result("f"))],
    ),
    ([{"role": "user", "content": [text(BLANK), text("a"), text("")]}], [user(text("a"))]),
    ([HI, {"role": "assistant", "content": BLANK}, {"role": "user", "content": "b"}], [user(text("a"), text("b"))]),
    ([{"role": "tool", "tool_call_id": "id-f", "content": [text(BLANK), text("1")]}], [user(result("f", text("1")))]),
    # A blank question is one: what the assistant said before it is not to be continued.
    ([HI, {"role": "assistant", "content": "b"}, {"role": "user", "content": BLANK}],
     [user(text("a")), assistant(text("b")), user(text("(empty message)"))]),
    ([{"role": "user", "content": ""}], [user(text("(empty message)"))]),
    # White space at the end of an answer that is to be continued.
    ([HI, {"role": "assistant", "content": "b: \n"}], [user(text("a")), assistant(text("b:"))]),
    ([HI, {"role": "assistant", "content": "b "}, HI], [user(text("a")), assistant(text("b ")), user(text("a"))]),
    # Thoughts that led to nothing.
    ([HI, {"role": "assistant", "content": "", "thinking_blocks": [THOUGHT]}, HI], [user(text("a")), user(text("a"))]),
    ([HI, {"role": "assistant", "content": BLANK, "thinking_blocks": [THOUGHT], "tool_calls": [tool_call("f", "{}")]}],
     [user(text("a")), assistant(THOUGHT, use("f", {}))]),
    # A system prompt that is the only message.
    ([{"role": "system", "content": "a"}], [user(text("a"))]),
]  # fmt: skip


def test_a_conversation_is_sent_as_anthropic_accepts_it(subtests: pytest.Subtests) -> None:
    for messages, turns in ACCEPTED:
        with subtests.test(repr(messages)):
            body = request_body(call(messages=messages))
            assert body["messages"] == turns
            assert "system" not in body
    blank = [{"role": "system", "content": BLANK}, {"role": "developer", "content": [text(BLANK), text("b")]}, HI]
    assert request_body(call(messages=blank))["system"] == [text("b")]


def test_ids_of_calls_fit_and_are_the_same_in_calls_and_results(subtests: pytest.Subtests) -> None:
    for own in ("call_1", "functions.add:0", "functions.add:0" * 20):
        with subtests.test(own):
            asked = {"id": own, "type": "function", "function": {"name": "add", "arguments": "{}"}}
            answered = {"role": "tool", "tool_call_id": own, "content": "7"}
            messages = [HI, {"role": "assistant", "tool_calls": [asked]}, answered]
            _, called, results = request_body(call(messages=messages))["messages"]
            sent = called["content"][0]["id"]
            assert re.fullmatch("[a-zA-Z0-9_-]{1,64}", sent)
            assert results["content"][0]["tool_use_id"] == sent
            assert (sent == own) is (own == "call_1")


def test_thinking_is_left_out_where_a_turn_of_tools_began_without(subtests: pytest.Subtests) -> None:
    enabled = {"type": "enabled", "budget_tokens": 1024}
    edits = {"edits": [{"type": "clear_thinking_20251015"}, {"type": "clear_tool_uses_20250919"}]}
    block = {"type": "thinking", "thinking": "Hm", "signature": "s"}
    asked = {"role": "assistant", "content": None, "tool_calls": [tool_call("f", "{}")]}
    answered = {"role": "tool", "tool_call_id": "id-f", "content": "7"}
    thought = {**asked, "thinking_blocks": [block]}
    for name, messages, thinking, stays in (
        ("a client that lost it", [HI, asked, answered], enabled, False),
        ("one that sends it back", [HI, thought, answered], enabled, True),
        ("an earlier question", [HI, asked, answered, {"role": "assistant", "content": "7"}, HI], enabled, True),
        ("adaptive thinking needs none", [HI, asked, answered], {"type": "adaptive"}, True),
    ):
        with subtests.test(name):
            params = {"thinking": thinking, "context_management": edits, "max_tokens": 2000}
            body = request_body(call(messages=messages, params=params))
            assert ("thinking" in body) is stays
            assert len(body["context_management"]["edits"]) == (2 if stays else 1)


def test_a_tool_without_parameters_has_a_schema() -> None:
    for parameters in ({}, {"parameters": None}, {"parameters": {}}, {"parameters": {"type": "object"}}):
        tool = {"type": "function", "function": {"name": "f", **parameters}}
        sent = request_body(call(messages=[HI], params={"tools": [tool]}))
        assert sent["tools"] == [{"name": "f", "input_schema": {"type": "object", "properties": {}}}]


def test_system_and_developer_messages_become_the_system_prompt_in_order() -> None:
    messages = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "hi"},
        {"role": "developer", "content": [text("b")], "cache_control": MARK},
    ]
    body = request_body(call(messages=messages, params={"max_tokens": 1, "system": "first"}))
    assert body["system"] == [text("first"), text("a"), text("b", cache_control=MARK)]
    assert body["messages"] == [user(text("hi"))]


@each_row(
    ("params", "sent"),
    [
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_completion_tokens": 6, "max_tokens": None}, {"max_tokens": 6}),
        ({}, {"max_tokens": 4096}),
        ({"temperature": 0.5, "top_p": 0.9, "top_k": 3}, {"temperature": 0.5, "top_p": 0.9, "top_k": 3}),
        ({"thinking": {"type": "adaptive"}}, {"thinking": {"type": "adaptive"}}),
        ({"stop": "END"}, {"stop_sequences": ["END"]}),
        ({"stop": ["a", "b"]}, {"stop_sequences": ["a", "b"]}),
        ({"user": "u1"}, {"metadata": {"user_id": "u1"}}),
        ({"metadata": {"user_id": "u2"}, "user": "u1"}, {"metadata": {"user_id": "u2"}}),
        ({"n": 1, "logprobs": False, "frequency_penalty": 0.0, "seed": None}, {}),
        ({"tools": [TOOL]}, {"tools": [NATIVE]}),
        ({"tools": []}, {}),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}, "cache_control": MARK}]},
            {"tools": [{"name": "f", "input_schema": {"type": "object", "properties": {}}, "cache_control": MARK}]},
        ),
        (
            {"tools": [NATIVE, {"type": "web_search_20250305", "name": "web_search"}]},
            {"tools": [NATIVE, {"type": "web_search_20250305", "name": "web_search"}]},
        ),
        ({"tools": [NATIVE], "tool_choice": "auto"}, {"tools": [NATIVE], "tool_choice": {"type": "auto"}}),
        ({"tools": [NATIVE], "tool_choice": "none"}, {"tools": [NATIVE], "tool_choice": {"type": "none"}}),
        ({"tools": [NATIVE], "tool_choice": "required"}, {"tools": [NATIVE], "tool_choice": {"type": "any"}}),
        (
            {"tools": [NATIVE], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            {"tools": [NATIVE], "tool_choice": {"type": "tool", "name": "f"}},
        ),
        (
            {"tools": [NATIVE], "tool_choice": {"type": "any"}, "parallel_tool_calls": True},
            {"tools": [NATIVE], "tool_choice": {"type": "any"}},
        ),
        (
            {"tools": [NATIVE], "parallel_tool_calls": False},
            {"tools": [NATIVE], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        ),
        (
            {"tools": [NATIVE], "tool_choice": "required", "parallel_tool_calls": False},
            {"tools": [NATIVE], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        ),
        (
            {"tools": [NATIVE], "tool_choice": "none", "parallel_tool_calls": False},
            {"tools": [NATIVE], "tool_choice": {"type": "none"}},
        ),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, {}),
        ({"response_format": {"type": "text"}}, {}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        ),
        ({"reasoning_effort": "low"}, {"output_config": {"effort": "low"}}),
        ({"output_config": {"effort": "max"}, "reasoning_effort": "low"}, {"output_config": {"effort": "max"}}),
        ({"of_tomorrow": 1}, {"of_tomorrow": 1}),
    ],
)
def test_params_are_translated_or_passed_on(params: dict[str, Any], sent: dict[str, Any]) -> None:
    body = request_body(call(params=params))
    assert body.pop("messages") == [user(text("hello"))]
    assert body.pop("model") == "m"
    assert body == {"max_tokens": 4096, **sent}


@each_row(
    ("params", "schema", "config"),
    [
        ({}, SCHEMA, {"format": {"type": "json_schema", "schema": CLOSED}}),
        (
            {"output_config": {"effort": "low"}},
            SCHEMA,
            {"effort": "low", "format": {"type": "json_schema", "schema": CLOSED}},
        ),
        ({"output_config": {"format": {"type": "theirs"}}}, SCHEMA, {"format": {"type": "theirs"}}),
        ({"response_format": {"type": "text"}}, SCHEMA, None),
        ({}, {"type": "object"}, None),
    ],
)
def test_the_schema_of_an_answer_is_sent_where_it_can_be_held_to(
    params: dict[str, Any], schema: dict[str, Any], config: dict[str, Any] | None
) -> None:
    assert request_body(call(params=params, output_schema=schema)).get("output_config") == config


def test_what_says_nothing_of_the_question_is_left_out_and_named() -> None:
    params: dict[str, Any] = {
        "seed": 0,
        "store": True,
        "prompt_cache_key": "a",
        "metadata": {"app": "s", "user_id": "u"},
    }
    body = request_body(call(params=params))
    assert body["metadata"] == {"user_id": "u"}
    assert not {"seed", "store", "prompt_cache_key"} & body.keys()
    assert dropped_params(params) == ["metadata", "prompt_cache_key", "seed", "store"]
    assert dropped_params({"store": False, "seed": None, "metadata": {"user_id": "u"}, "top_k": 3}) == []


@each_row(
    ("params", "words"),
    [
        ({"n": 2}, "'n'"),
        ({"frequency_penalty": 0.1}, "'frequency_penalty'"),
        ({"logprobs": True}, "'logprobs'"),
        ({"verbosity": "low"}, "'verbosity'"),
        ({"logit_bias": {"5": 1}}, "'logit_bias'"),
        ({"response_format": {"type": "json_object"}}, "'json_object'"),
        ({"response_format": "json"}, "response_format"),
        ({"tools": [NATIVE], "tool_choice": {"type": "allowed_tools"}}, "'tool_choice'"),
        ({"tools": [NATIVE], "tool_choice": "sometimes"}, "'tool_choice'"),
    ],
)
def test_what_has_no_counterpart_is_refused_and_not_left_out(params: dict[str, Any], words: str) -> None:
    refused(call(params=params), words)


@each_row(
    ("message", "words"),
    [
        ({"role": "function", "name": "f", "content": "1"}, "'function'"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "'input_audio'"),
        ({"role": "user", "content": [{"type": "file", "file": {}}]}, "'file'"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/svg,<svg>"}}]}, "base64"),
    ],
)
def test_a_message_that_has_no_counterpart_is_refused(message: dict[str, Any], words: str) -> None:
    refused(call(messages=[message]), words)


def refused(asked: Any, words: str) -> None:
    with pytest.raises(CallError) as caught:
        request_body(asked)
    failed = caught.value
    assert isinstance(failed.failure, NotSent)
    assert words in failed.failure.message
    assert "supported by Anthropic" in failed.failure.message or "for Anthropic" in failed.failure.message
    assert not failed.maybe_billed
