"""Requests for responses as chats and as native bodies, and results as Response objects."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from openai.types.responses import Response

from breakwater.dialects.rules.forms import InvalidBodyError
from breakwater.dialects.rules.native_requests import DIALECTS, chat_form, dropped_fields
from breakwater.dialects.rules.responses import size_of
from breakwater.dialects.rules.responses_answer import (
    EchoedRequest,
    item_id,
    job_id_of,
    normalized_item,
    pending_response,
    response_of,
)
from breakwater.jobs.contract.job import NativeRequest
from breakwater.kernel.formats import words
from breakwater.prices.rules.price import GENERIC, LINKED_FILE_TOKENS, estimate_input_tokens
from tests.any_answers import JSON
from tests.dialects.test_responses_stream import ASKED, result
from tests.helpers import more_examples
from tests.tables import each_row


def form(**body: Any) -> Any:
    """The chat form of a body."""
    return chat_form(NativeRequest(api="responses", body={"input": "Hi", **body}))


_FUNCTION = {"type": "function", "name": "look_up", "parameters": {"type": "object"}}
_AS_CHAT = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
_SCHEMA = {"name": "answer", "schema": {"type": "object"}, "strict": True}


@each_row(
    ("body", "params"),
    [
        (
            {"temperature": 0.1, "top_p": None, "user": "u", "metadata": {"a": "b"}},
            {"temperature": 0.1, "user": "u", "metadata": {"a": "b"}},
        ),
        ({"max_output_tokens": 50}, {"max_tokens": 50}),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
        ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, {"verbosity": "low"}),
        (
            {"text": {"format": {"type": "json_schema", **_SCHEMA}}},
            {"response_format": {"type": "json_schema", "json_schema": _SCHEMA}},
        ),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        ({"tools": [_FUNCTION], "parallel_tool_calls": False}, {"tools": [_AS_CHAT], "parallel_tool_calls": False}),
        ({"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}, {}),
        (
            {"tools": [_FUNCTION], "tool_choice": {"type": "function", "name": "look_up"}},
            {"tools": [_AS_CHAT], "tool_choice": {"type": "function", "function": {"name": "look_up"}}},
        ),
        (
            {
                "tools": [_FUNCTION, {**_FUNCTION, "name": "x"}],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "function", "name": "look_up"}],
                },
            },
            {"tools": [_AS_CHAT], "tool_choice": "required"},
        ),
        (
            {
                "tools": [
                    {
                        "type": "custom",
                        "name": "sql",
                        "format": {"type": "grammar", "syntax": "lark", "definition": "x"},
                    }
                ]
            },
            {
                "tools": [
                    {
                        "type": "custom",
                        "custom": {
                            "name": "sql",
                            "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "x"}},
                        },
                    }
                ]
            },
        ),
        ({"include": ["reasoning.encrypted_content"], "store": False, "truncation": "disabled"}, {}),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 2}, {"top_logprobs": 2, "logprobs": True}),
        ({"service_tier": "auto"}, {}),
        (
            {"service_tier": "flex", "prompt_cache_key": "k", "safety_identifier": "s"},
            {"service_tier": "flex", "prompt_cache_key": "k", "safety_identifier": "s"},
        ),
    ],
)
def test_settings_become_params_of_a_chat(body: dict[str, Any], params: dict[str, Any]) -> None:
    found = form(**body)

    assert (found.params, found.losses, found.unpriced) == (params, (), ())


_CALL = {
    "type": "function_call",
    "call_id": "c1",
    "name": "look_up",
    "arguments": "{}",
    "id": "fc_1",
    "status": "completed",
}
_CALLED = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
_RESULT = {"type": "function_call_output", "call_id": "c1", "output": "7"}
_PNG = "data:image/png;base64,AA=="


_TURNS: list[tuple[Any, list[dict[str, Any]]]] = [
    ("Hi", [{"role": "user", "content": "Hi"}]),
    ([{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Hi"}]),
    (
        [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be"}]}],
        [{"role": "system", "content": "Be"}],
    ),
    (
        [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "See"},
                    {"type": "input_image", "image_url": _PNG, "detail": "low"},
                ],
            }
        ],
        [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "See"},
                    {"type": "image_url", "image_url": {"url": _PNG, "detail": "low"}},
                ],
            }
        ],
    ),
    (
        [
            {
                "role": "user",
                "content": [
                    {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,AA=="}
                ],
            }
        ],
        [
            {
                "role": "user",
                "content": [
                    {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,AA=="}}
                ],
            }
        ],
    ),
    (
        [
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Well", "annotations": []}],
            },
            _CALL,
            {**_CALL, "call_id": "c2"},
            _RESULT,
            {**_RESULT, "call_id": "c2", "output": [{"type": "input_text", "text": "8"}]},
        ],
        [
            {"role": "assistant", "content": "Well", "tool_calls": [_CALLED, {**_CALLED, "id": "c2"}]},
            {"role": "tool", "tool_call_id": "c1", "content": "7"},
            {"role": "tool", "tool_call_id": "c2", "content": "8"},
        ],
    ),
    (
        [_CALL, {"role": "assistant", "content": "Wait"}, _RESULT],
        [
            {"role": "assistant", "content": "Wait", "tool_calls": [_CALLED]},
            {"role": "tool", "tool_call_id": "c1", "content": "7"},
        ],
    ),
    (
        [
            {"type": "custom_tool_call", "call_id": "c1", "name": "sql", "input": "select"},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": "1"},
        ],
        [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "type": "custom", "custom": {"name": "sql", "input": "select"}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "1"},
        ],
    ),
    (
        # A chat takes files from its user only, and after all results.
        [
            _CALL,
            {**_CALL, "call_id": "c2"},
            {**_RESULT, "output": [{"type": "input_text", "text": "7"}, {"type": "input_image", "image_url": _PNG}]},
            {**_RESULT, "call_id": "c2", "output": []},
            {"role": "user", "content": []},
            {"role": "user", "content": "And?"},
        ],
        [
            {"role": "assistant", "content": None, "tool_calls": [_CALLED, {**_CALLED, "id": "c2"}]},
            {"role": "tool", "tool_call_id": "c1", "content": "7"},
            {"role": "tool", "tool_call_id": "c2", "content": ""},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "A file in the result of c1:"},
                    {"type": "image_url", "image_url": {"url": _PNG}},
                ],
            },
            {"role": "user", "content": "And?"},
        ],
    ),
    (
        [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No"}]}],
        [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No"}]}],
    ),
]


@each_row(("given", "messages"), _TURNS)
def test_items_become_messages(given: Any, messages: list[dict[str, Any]]) -> None:
    found = form(input=given)

    assert (found.messages, found.losses) == (messages, ())


def test_instructions_come_first() -> None:
    assert form(instructions="Be brief.").messages[0] == {"role": "system", "content": "Be brief."}


@each_row(
    ("body", "path"),
    [
        ({"tools": [_FUNCTION, {"type": "web_search"}]}, "tools[1].type"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type"),
        ({"tools": [{**_FUNCTION, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [_FUNCTION], "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        (
            {
                "tools": [_FUNCTION],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]},
            },
            "tool_choice.tools",
        ),
        ({"include": ["web_search_call.results"]}, "include[0]"),
        ({"truncation": "auto"}, "truncation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"tone": "dry"}}, "text.tone"),
        ({"reasoning": {"mode": "x"}}, "reasoning.mode"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": "Hi"}, {"type": "web_search_call", "id": "ws_1"}]}, "input[1].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "https://x"}]}]},
            "input[0].content[0].file_url",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[0].content[0].file_id",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_video"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "critic", "content": "Hi"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "name": "x", "arguments": "{}"}]}, "input[0].call_id"),
    ],
)
def test_a_field_that_no_chat_has_is_a_loss_with_its_name(body: dict[str, Any], path: str) -> None:
    assert [loss.path for loss in form(**body).losses] == [path]


@each_row(
    ("body", "path"),
    [
        ({"input": 5}, "input"),
        ({"input": None}, "input"),
        ({"input": ["Hi"]}, "input[0]"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": ["Hi"]}]}, "input[0].content[0]"),
        ({"tools": {}}, "tools"),
        ({"tools": ["x"]}, "tools[0]"),
        ({"include": "x"}, "include"),
        ({"reasoning": "high"}, "reasoning"),
        ({"text": []}, "text"),
        ({"instructions": {}}, "instructions"),
        ({"tool_choice": []}, "tool_choice"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
    ],
)
def test_a_body_that_is_none_names_the_field(body: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidBodyError) as raised:
        form(**body)

    assert raised.value.problem.path == path


@more_examples(3)
@given(JSON)
def test_any_body_is_a_chat_or_refused(value: Any) -> None:
    tool = {"type": "function", "name": "f"}
    bodies: list[dict[str, Any]] = [
        {"input": value},
        {"input": [value, {"role": value, "content": value}, {"type": value}]},
        {"input": [{"type": "function_call", "name": value, "arguments": value, "call_id": value}]},
        {"input": "Hi", "tools": [tool, {"type": value, "name": value}]},
        {"input": "Hi", "tools": [tool], "tool_choice": {"type": "allowed_tools", "tools": [{"type": value}]}},
        {"input": "Hi", **dict.fromkeys(("instructions", "include", "reasoning", "text", "tool_choice"), value)},
    ]
    for body in bodies:
        native(body, "Be brief.", reasoning_effort="low", verbosity="low", tools=[])
        with suppress(InvalidBodyError):
            found = DIALECTS["responses"].chat_form(body)
            assert json.loads(json.dumps([found.messages, found.params])) == [found.messages, found.params]


@each_row(
    ("body", "paths"),
    [
        ({"tools": [{"type": "web_search"}]}, ["tools[0].type"]),
        ({"frequency": 1}, ["frequency"]),
        ({"tools": [{"type": "apply_patch"}, {"type": "local_shell"}, {"type": "shell"}]}, ["tools[2].type"]),
        ({"truncation": "auto"}, []),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, []),
    ],
)
def test_what_may_cost_more_than_tokens_is_named(body: dict[str, Any], paths: list[str]) -> None:
    assert [one.path for one in form(**body).unpriced] == paths


def test_fields_that_a_chat_goes_without_are_named() -> None:
    body: dict[str, Any] = {
        "input": "Hi",
        "store": False,
        "max_tool_calls": 2,
        "reasoning": {"summary": "auto", "effort": "low"},
    }

    assert dropped_fields(NativeRequest(api="responses", body=body)) == {"max_tool_calls", "reasoning.summary"}
    assert dropped_fields(NativeRequest(api="responses", body={"input": "Hi"})) == set()


@each_row(
    ("item", "size"),
    [
        ({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "a" * 9_000}]}, 9_000),
        ({"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "a" * 9_000}, 9_000),
        ({"type": "file_search_call", "results": [{"text": "a" * 9_000}]}, 9_000),
        ({"type": "additional_tools", "tools": [{"type": "namespace", "description": "a" * 9_000}]}, 9_000),
        ({"type": "item_reference", "id": "msg_1"}, LINKED_FILE_TOKENS),
        ({"role": "user", "content": [{"type": "input_file", "file_url": "https://a.example"}]}, LINKED_FILE_TOKENS),
    ],
)
def test_what_a_native_call_sends_in_addition_to_a_chat_counts_in_estimates(item: dict[str, Any], size: int) -> None:
    assert 2 * estimate_input_tokens(size_of({"input": [item]}), GENERIC) > size


def native(body: dict[str, Any], prompt: str | None = None, **params: Any) -> dict[str, Any]:
    """The native body of a request."""
    return dict(DIALECTS["responses"].native_body(body, params=params, max_tokens=100, system_prompt=prompt))


def test_a_native_body_is_as_it_came_with_the_output_limit() -> None:
    body = {"input": "Hi", "tools": [{"type": "web_search"}], "never_heard_of": 1, "max_output_tokens": 500}

    assert native(body) == {**body, "max_output_tokens": 100}


def test_an_agents_params_and_prompt_are_for_what_the_body_lacks() -> None:
    params = {
        "temperature": 0.3,
        "max_tokens": 9,
        "reasoning_effort": "low",
        "verbosity": "low",
        "response_format": {"type": "json_schema", "json_schema": _SCHEMA},
        "tools": [_AS_CHAT],
        "tool_choice": {"type": "function", "function": {"name": "look_up"}},
    }

    found = native({"input": "Hi", "temperature": 0.9, "reasoning": {"effort": "high"}}, "Be brief.", **params)

    assert found == {
        "input": "Hi",
        "instructions": "Be brief.",
        "temperature": 0.9,
        "max_output_tokens": 100,
        "reasoning": {"effort": "high"},
        "text": {"verbosity": "low", "format": {"type": "json_schema", **_SCHEMA}},
        "tools": [{**_FUNCTION, "parameters": {"type": "object", "properties": {}}}],
        "tool_choice": {"type": "function", "name": "look_up"},
    }
    assert "instructions" not in native({"input": [{"role": "developer", "content": "x"}]}, "Be brief.")


def test_reasoning_of_another_dialect_does_not_go_to_a_provider() -> None:
    own = {"type": "reasoning", "id": item_id("job-1", "rs", 0), "summary": []}
    theirs = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}

    assert native({"input": [own, theirs]})["input"] == [theirs]


_REQUIRED = words(
    """
    id object created_at completed_at status incomplete_details model previous_response_id instructions output error
    tools tool_choice truncation parallel_tool_calls text top_p presence_penalty frequency_penalty top_logprobs
    temperature reasoning user usage max_output_tokens max_tool_calls store background service_tier metadata
    safety_identifier prompt_cache_key
    """
)
"""Fields that the Open Responses specification requires."""


def test_a_pending_response_has_every_required_field_and_repeats_the_request() -> None:
    body = {
        "instructions": "Be brief.",
        "tools": [_FUNCTION],
        "temperature": 0.2,
        "text": {"verbosity": "low"},
        "metadata": {"a": "b"},
    }
    asked = EchoedRequest(
        job_id="job-1", created_at=7, model="writer", body=body, background=True, previous_response_id="resp_0"
    )

    found = pending_response(asked, "queued")

    assert found.keys() >= _REQUIRED
    assert (found["status"], found["background"], found["previous_response_id"]) == ("queued", True, "resp_0")
    assert (found["temperature"], found["metadata"], found["instructions"]) == (0.2, {"a": "b"}, "Be brief.")
    assert found["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert Response.model_validate(found).tools[0].type == "function"
    assert job_id_of(found["id"]) == "job-1"
    assert job_id_of("chatcmpl-1") is None


_NATIVE: dict[str, Any] = {
    "id": "resp_9",
    "object": "response",
    "created_at": 5,
    "status": "completed",
    "model": "gpt-9",
    "output": [
        {"id": "rs_1", "type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"id": "ws_1", "type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"id": "fc_1", "type": "function_call", "call_id": 7, "name": "look_up", "arguments": {"id": 1}},
        {"type": "message", "content": [{"type": "output_text", "text": "Hi", "annotations": None}]},
    ],
    "usage": {"input_tokens": 9, "output_tokens": 2, "total_tokens": 11, "input_tokens_details": None},
    "service_tier": "default",
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}


def test_a_native_response_is_as_it_came_with_our_id_and_readable() -> None:
    found = response_of(ASKED, result(_NATIVE))

    assert found.keys() >= _REQUIRED
    assert (found["id"], found["model"], found["created_at"]) == ("resp_job-1", "gpt-9", 5)
    reasoning, search, call, message = found["output"]
    assert (reasoning, search) == (_NATIVE["output"][0], _NATIVE["output"][1])
    assert (call["call_id"], call["arguments"]) == ("7", '{"id":1}')
    assert message["role"] == "assistant"
    assert message["content"][0] == {"type": "output_text", "text": "Hi", "annotations": [], "logprobs": []}
    assert found["usage"]["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
    assert Response.model_validate(found).output_text == "Hi"


def test_blocks_of_anthropic_become_items_in_their_order() -> None:
    content = [
        {"type": "thinking", "thinking": "Hm. ", "signature": "s"},
        {"type": "text", "text": "Let "},
        {"type": "tool_use", "id": "t1", "name": "look_up", "input": {}},
        {"type": "thinking", "thinking": "Ah.", "signature": "s"},
        {"type": "text", "text": "me see"},
    ]
    called = [{"id": "t1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}]
    said = {"role": "assistant", "content": "Let me see", "tool_calls": called}

    output = response_of(ASKED, result({"content": content}, output=said, finish_reason="tool_calls"))["output"]

    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "reasoning", "message"]
    assert [item["content"][0]["text"] for item in output if "content" in item] == ["Hm. ", "Let ", "Ah.", "me see"]


def test_unknown_usage_is_null() -> None:
    whole = {"choices": [{"index": 0, "message": {"content": "Hi"}, "finish_reason": "stop"}]}
    attempts = [{"outcome": "success", "input_tokens": None, "output_tokens": None}]

    assert response_of(ASKED, result(whole, attempts=attempts))["usage"] is None
    native = {"object": "response", "output": [], "usage": {"input_tokens": 1e300, "output_tokens": 2}}
    assert response_of(ASKED, result(native, attempts=attempts))["usage"] is None, "no call has used that"


@each_row(
    ("ended", "status", "code"),
    [
        ({"status": "cancelled", "reason": "cancelled"}, "cancelled", None),
        ({"status": "dead_lettered", "reason": "budget_exceeded"}, "failed", "rate_limit_exceeded"),
        ({"status": "dead_lettered", "reason": "invalid"}, "failed", "invalid_prompt"),
        ({"status": "dead_lettered", "reason": "timeout"}, "failed", "server_error"),
    ],
)
def test_a_job_without_an_answer_is_a_response_that_says_why(
    ended: dict[str, Any], status: str, code: str | None
) -> None:
    found = response_of(ASKED, result({}, error={"kind": "x", "message": "so"}, **ended))

    assert (found["status"], (found["error"] or {}).get("code")) == (status, code)


def test_a_part_of_a_newer_api_stays_and_a_misplaced_one_goes() -> None:
    newer, misplaced = {"type": "output_film", "url": "https://example.com/1"}, {"type": "summary_text", "text": "s"}
    item = normalized_item({"type": "message", "content": [newer, misplaced]}, "job", 0)
    assert item["content"] == [newer]
