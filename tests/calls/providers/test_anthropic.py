"""Anthropic's Messages, against the simulated provider's own reading of that interface."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from breakwater.calls.providers.base import Answer, Call
from breakwater.calls.providers.registry import AnthropicSettings
from breakwater.calls.rules.classify import EmptyAnswer, HttpFailure, NotSent
from breakwater.local.provider import SimulatedProvider
from breakwater.prices.rules.usage import Usage
from tests.calls.providers.kit import KEY, answering, call, failure, perform, saying, settings
from tests.flow.kit import USAGE, model
from tests.tables import each_row

TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "d", "parameters": {"type": "object", "properties": {"id": {}}}},
}
ARGUMENTS = {"id": 7, "deep": {"a": [1, None]}}


async def ask(asked: Call | None = None, **behaviour: Any) -> Answer:
    script = {"api_keys": [KEY], "models": {"anthropic/claude-x": model(**behaviour)}}
    async with SimulatedProvider(script) as sim:
        return await perform(settings("anthropic", sim.url.removesuffix("/v1")), asked or call(model="claude-x"))


async def test_an_answer_is_its_text_and_cached_tokens_are_a_part_of_the_input() -> None:
    answer = await ask(answer="hello back", usage={**USAGE, "cached_tokens": 20})
    assert answer.output == "hello back"
    assert answer.usage == Usage(120, 40, cached_tokens=20, cache_write_tokens=0)
    assert answer.response is not None
    assert answer.response["content"] == [{"type": "text", "text": "hello back", "citations": None}]


async def test_an_agent_sees_tools_in_one_format_and_gives_their_results_in_it() -> None:
    offered = {"params": {"max_tokens": 100, "tools": [TOOL]}, "model": "claude-x"}
    question: Mapping[str, Any] = {"role": "user", "content": "What is 7?"}
    calls = {"tool_calls": [{"name": "look_up", "arguments": ARGUMENTS}, {"name": "look_up"}]}
    first = await ask(call(messages=[question], **offered), answer="{prompt}", **calls)
    message: Any = first.output
    assert isinstance(message, dict)
    assert (message["role"], message["content"]) == ("assistant", None)
    one, other = message["tool_calls"]
    assert (one["type"], one["function"]["name"], json.loads(one["function"]["arguments"])) == (
        "function",
        "look_up",
        ARGUMENTS,
    )
    assert other["function"]["arguments"] == "{}"
    assert one["id"] != other["id"]

    results = [{"role": "tool", "tool_call_id": made["id"], "content": "seven"} for made in (one, other)]
    second = await ask(call(messages=[question, message, *results], **offered), answer="{prompt}", **calls)
    assert second.output == "What is 7?", "the last message is a tool's result, so the model answers"


async def test_a_tool_call_without_a_result_is_refused_in_anthropics_words() -> None:
    made = {"id": "toolu_1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [made]}]
    script = {"models": {"m": model({"when": "orphan_tool_calls", "status": 400})}}
    async with SimulatedProvider(script) as sim:
        failed = await failure(settings("anthropic", sim.url.removesuffix("/v1")), call(messages=messages))
    assert isinstance(failed.failure, HttpFailure)
    assert (failed.failure.status, failed.failure.type) == (400, "invalid_request_error")
    assert "`tool_use` ids were found without `tool_result` blocks" in failed.failure.message
    assert "toolu_1" in failed.failure.message


async def test_a_json_answer_is_asked_for_natively() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    answer = await ask(call(model="claude-x", output_schema=schema), answer="no", answer_json={"a": 1})
    assert answer.output == '{"a":1}'


@each_row(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (529, "overloaded_error"),
    ],
)
async def test_an_error_has_anthropics_type(status: int, kind: str) -> None:
    async with SimulatedProvider({"models": {"m": model({"status": status})}}) as sim:
        failed = await failure(settings("anthropic", sim.url.removesuffix("/v1")))
    assert isinstance(failed.failure, HttpFailure)
    assert (failed.failure.status, failed.failure.type) == (status, kind)


async def test_the_headers_are_anthropics() -> None:
    seen: list[Any] = []

    async def note(request: web.BaseRequest) -> web.StreamResponse:
        names = ("x-api-key", "anthropic-version", "Authorization", "anthropic-beta")
        seen.append((request.path, *(request.headers.get(name) for name in names)))
        return web.json_response({"content": [{"type": "text", "text": "hi"}]})

    async with answering(note) as origin:
        await perform(settings("anthropic", origin, headers={"anthropic-beta": "x-1"}))
        await perform(settings("anthropic", origin, api_key=None, version="2030-01-01"))
    assert seen == [
        ("/v1/messages", KEY, "2023-06-01", None, "x-1"),
        ("/v1/messages", None, "2030-01-01", None, None),
    ]


TEXT = {"type": "text", "text": "let me see. "}
USE = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "s"}
CALLED = {"id": "toolu_1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}


@each_row(
    ("content", "output"),
    [
        ([TEXT, {"type": "text", "text": "done"}], "let me see. done"),
        ([THOUGHT, TEXT], "let me see. "),
        ([{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}, TEXT], "let me see. "),
        ([TEXT, USE], {"role": "assistant", "content": "let me see. ", "tool_calls": [CALLED]}),
        (
            [THOUGHT, USE],
            {"role": "assistant", "content": None, "tool_calls": [CALLED], "thinking_blocks": [THOUGHT]},
        ),
    ],
)
async def test_blocks_become_a_text_or_a_message(content: list[Any], output: Any) -> None:
    async with saying({"type": "message", "content": content, "stop_reason": "end_turn"}) as origin:
        assert (await perform(settings("anthropic", origin))).output == output


@each_row(
    ("reported", "usage"),
    [
        (
            {
                "input_tokens": 10,
                "cache_creation_input_tokens": 200,
                "cache_read_input_tokens": 3000,
                "output_tokens": 7,
                "output_tokens_details": {"thinking_tokens": 5},
            },
            Usage(3210, 7, cached_tokens=3000, cache_write_tokens=200, reasoning_tokens=5),
        ),
        ({"input_tokens": 10, "output_tokens": 7}, Usage(10, 7)),
        ({"output_tokens": 7, "cache_read_input_tokens": 3}, Usage(None, 7, cached_tokens=3)),
        ({"input_tokens": 10, "cache_read_input_tokens": None, "output_tokens": 7}, Usage(10, 7)),
    ],
)
async def test_tokens_from_and_to_the_cache_are_a_part_of_the_input(reported: dict[str, Any], usage: Usage) -> None:
    async with saying({"content": [{"type": "text", "text": "hi"}], "usage": reported}) as origin:
        assert (await perform(settings("anthropic", origin))).usage == usage


async def test_a_refusal_with_a_text_is_an_answer_and_one_without_is_a_failure() -> None:
    refusal = {"stop_reason": "refusal", "usage": {"input_tokens": 9, "output_tokens": 1}}
    async with saying({"content": [{"type": "text", "text": "I can't."}], **refusal}) as origin:
        assert (await perform(settings("anthropic", origin))).output == "I can't."
    async with saying({"content": [], **refusal}) as origin:
        failed = await failure(settings("anthropic", origin))
    assert isinstance(failed.failure, EmptyAnswer)
    assert (failed.failure.finish_reason, failed.finish_reason) == ("content_filter", "content_filter")
    assert (failed.maybe_billed, failed.usage) == (True, Usage(9, 1))


async def test_what_anthropic_does_not_know_is_refused_without_a_call() -> None:
    async with SimulatedProvider({"models": {"m": model()}}) as sim:
        asked = call(params={"max_tokens": 1, "frequency_penalty": 0.5})
        failed = await failure(settings("anthropic", sim.url.removesuffix("/v1")), asked)
        assert sim.ledger.totals.calls == 0
    text = "the param 'frequency_penalty' is not supported by Anthropic"
    assert (failed.failure, failed.maybe_billed) == (NotSent(text, "frequency_penalty"), False)


def test_only_the_kind_has_to_be_given() -> None:
    assert AnthropicSettings(kind="anthropic").base_url == "https://api.anthropic.com/v1"
