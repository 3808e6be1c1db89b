from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web

from breakwater.calls.providers.base import Answer, Streaming
from breakwater.calls.providers.openai import ChatCompletions
from breakwater.calls.providers.registry import OpenAISettings
from breakwater.calls.rules.classify import BrokenAnswer, EmptyAnswer, HttpFailure
from breakwater.kernel.security.secret_refs import SecretRef
from breakwater.local.provider import SimulatedProvider
from breakwater.prices.rules.usage import Usage
from tests.calls.providers.kit import KEY, answering, call, failure, perform, saying, settings
from tests.flow.kit import USAGE, model
from tests.tables import each_row

TOOL = {"type": "function", "function": {"name": "look_up"}}
SCHEMA = {"type": "object", "properties": {"answer": {"type": "string"}}}


async def answer(params: dict[str, Any] | None = None, name: str = "m", **behaviour: Any) -> Answer:
    async with SimulatedProvider({"api_keys": [KEY], "models": {"m": model(**behaviour)}}) as sim:
        asked = call(model=name, params={"max_tokens": 100, **(params or {})})
        return await perform(settings("openai", sim.url.removesuffix("/v1")), asked)


async def test_an_answer_is_its_text_and_its_usage() -> None:
    answered = await answer(answer="hello back", usage={**USAGE, "cached_tokens": 20})
    assert (answered.output, answered.usage) == ("hello back", Usage(120, 40, 20))
    assert answered.response is not None
    assert answered.response["choices"][0]["message"]["content"] == "hello back"


async def test_an_answer_that_calls_tools_is_the_whole_message() -> None:
    answered = await answer({"tools": [TOOL]}, tool_calls=[{"name": "look_up", "arguments": {"id": 7}}])
    assert isinstance(answered.output, dict)
    [tool_call] = answered.output["tool_calls"]
    assert tool_call["function"] == {"name": "look_up", "arguments": '{"id":7}'}


async def test_usage_that_is_not_reported_is_unknown() -> None:
    assert (await answer(usage={**USAGE, "report": False})).usage == Usage(None, None)


@each_row(
    ("reported", "usage"),
    [
        ({"prompt_tokens": 5, "completion_tokens": 7}, Usage(5, 7)),
        ({"prompt_tokens": 5}, Usage(5, None)),
        (
            {
                "prompt_tokens": 5,
                "completion_tokens": 7,
                "prompt_tokens_details": {"cached_tokens": 3},
                "completion_tokens_details": {"reasoning_tokens": 6},
            },
            Usage(5, 7, cached_tokens=3, reasoning_tokens=6),
        ),
        ({"prompt_tokens": 5.0, "completion_tokens": 10**30}, Usage(5, 10**18)),
        (
            {"prompt_tokens": -5, "completion_tokens": 0.5},
            Usage(None, 1, problem="prompt_tokens is no number of tokens"),
        ),
        (
            {"prompt_tokens": 5, "completion_tokens": 0, "prompt_tokens_details": None},
            Usage(5, 0),
        ),
    ],
)
async def test_tokens_are_counted_as_they_are_reported(reported: dict[str, Any], usage: Usage) -> None:
    async with saying({"choices": [{"message": {"content": "hi"}}], "usage": reported}) as origin:
        assert (await perform(settings("openai", origin))).usage == usage


SILENT = {"role": "assistant", "content": None}
CALLED = {**SILENT, "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}


@each_row(
    "message",
    [
        CALLED,
        {**CALLED, "content": "I look."},
        {**SILENT, "refusal": "I can't."},
        {**SILENT, "audio": {"id": "a1", "data": "UklG"}},
        {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "assistant", "content": [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": "x"}]},
    ],
)
async def test_a_message_that_says_more_than_a_text_is_returned_whole(message: dict[str, Any]) -> None:
    async with saying({"choices": [{"message": message, "finish_reason": "stop"}]}) as origin:
        assert (await perform(settings("openai", origin))).output == message


@each_row(
    ("message", "reason"),
    [
        (SILENT, "stop"),
        (SILENT, None),
        ({**SILENT, "tool_calls": [], "refusal": None, "reasoning_content": "Well,"}, "stop"),
        ({**SILENT, "content": ""}, "content_filter"),
        ({**SILENT, "content": ""}, "length"),
        ({**SILENT, "content": []}, "stop"),
        ({**SILENT, "content": ""}, "stop"),
        ({**SILENT, "content": [{"type": "thinking", "thinking": "Well,"}, {"type": "text", "text": ""}]}, "stop"),
    ],
)
async def test_a_message_that_says_nothing_is_a_failure_with_its_usage(
    message: dict[str, Any], reason: str | None
) -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 7}
    async with saying({"choices": [{"message": message, "finish_reason": reason}], "usage": usage}) as origin:
        failed = await failure(settings("openai", origin))
    assert isinstance(failed.failure, EmptyAnswer)
    assert (failed.failure.finish_reason, failed.finish_reason, failed.usage) == (reason, reason, Usage(5, 7))


async def test_an_answer_that_the_provider_broke_off_is_a_broken_one() -> None:
    async with saying({"choices": [{"message": {"content": "Once upon"}, "finish_reason": "error"}]}) as origin:
        failed = await failure(settings("openai", origin))
    assert failed.failure == BrokenAnswer("the provider aborted the answer (finish_reason: error)")
    assert (failed.finish_reason, failed.maybe_billed) == ("error", True)


async def test_of_several_choices_the_output_is_the_first_that_says_something() -> None:
    reasons = {"content_filter": None, "error": "half a", "length": "third", "stop": "fourth"}
    choices = [
        {"index": index, "message": {**SILENT, "content": text}, "finish_reason": reason}
        for index, (reason, text) in enumerate(reasons.items())
    ]
    async with saying({"choices": choices}) as origin:
        answered = await perform(settings("openai", origin))
    assert (answered.output, answered.finish_reason) == ("third", "length")
    assert {choice.finish_reason: choice.output for choice in answered.choices} == reasons


@pytest.mark.parametrize(
    ("params", "strict", "sent"),
    [
        ({}, True, {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}),
        ({}, False, {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": False}}),
        ({"response_format": {"type": "json_object"}}, True, {"type": "json_object"}),
    ],
)
def test_a_schema_is_the_format_where_the_params_set_none(
    params: dict[str, Any], strict: bool, sent: dict[str, Any]
) -> None:
    body = ChatCompletions("http://x").body(call(params=params, output_schema=SCHEMA, strict_output=strict))
    assert body["response_format"] == sent


def test_no_schema_is_no_format() -> None:
    assert "response_format" not in ChatCompletions("http://x").body(call())


def test_the_output_limit_has_the_name_that_the_server_knows() -> None:
    limited = call(params={"max_tokens": 7})
    assert ChatCompletions("http://x/v1").body(limited)["max_tokens"] == 7
    asked = ChatCompletions("https://api.openai.com/v1").body(limited)
    assert asked["max_completion_tokens"] == 7
    assert "max_tokens" not in asked
    both = ChatCompletions("https://api.openai.com/v1").body(call(params={"max_tokens": 7, "max_completion_tokens": 9}))
    assert (both["max_completion_tokens"], "max_tokens" in both) == (9, False)


@each_row(
    ("left_out", "params", "sent"),
    [
        (("max_tokens",), {"max_tokens": 7}, {"max_completion_tokens": 7}),
        (("max_completion_tokens",), {"max_completion_tokens": 7}, {"max_tokens": 7}),
        (("max_tokens", "max_completion_tokens"), {"max_tokens": 7}, {"max_tokens": 7}),
        (("max_tokens",), {"max_completion_tokens": 7}, {"max_completion_tokens": 7}),
        (("stream_options",), {"max_tokens": 7}, {"max_tokens": 7}),
    ],
)
def test_what_a_model_was_found_not_to_know_is_not_sent(
    left_out: tuple[str, ...], params: dict[str, Any], sent: dict[str, Any]
) -> None:
    async def take(_: object) -> None:
        pass

    for streaming in (None, Streaming(take, 1, 1)):
        body = ChatCompletions("http://x/v1").body(call(params=params, left_out=left_out, streaming=streaming))
        options = {"stream_options": {"include_usage": True}} if "stream_options" not in left_out else {}
        more = {} if streaming is None else {"stream": True, **options}
        assert {name: value for name, value in body.items() if name not in ("model", "messages")} == {**sent, **more}


async def test_a_call_is_sent_with_its_key_and_its_params() -> None:
    seen: list[tuple[str, str | None, Any]] = []

    async def note(request: web.BaseRequest) -> web.StreamResponse:
        seen.append((request.path, request.headers.get("Authorization"), json.loads(await request.read())))
        return web.json_response({"choices": [{"message": {"content": "hi"}}]})

    async with answering(note) as origin:
        await perform(settings("openai", origin))
        await perform(OpenAISettings(base_url=f"{origin}/v1/"))
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 100}
    assert seen == [("/v1/chat/completions", f"Bearer {KEY}", body), ("/v1/chat/completions", None, body)]


async def test_a_wrong_key_is_refused_and_shows_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WRONG_KEY", "sk-wrong-987654321")
    async with SimulatedProvider({"api_keys": ["right"], "models": {"m": model()}}) as sim:
        chosen = OpenAISettings(base_url=sim.url, api_key=SecretRef(env="WRONG_KEY"))
        failed = await failure(chosen)
    assert isinstance(failed.failure, HttpFailure)
    assert failed.failure.status == 401
    assert "sk-wrong" not in f"{failed} {failed!r} {chosen!r}"


LONG_NAME = "mcp__a_server_with_a_very_long_name__" + "find_ship_" * 5


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
async def test_a_tool_with_a_long_name_is_sent_with_a_short_one_and_called_by_its_own(kind: str, subtests: Any) -> None:
    tools = [{"type": "function", "function": {"name": LONG_NAME, "parameters": {"type": "object"}}}]
    scripted = model(stream={"tokens_per_s": 1000})
    asked: dict[str, Any] = {"max_tokens": 100, "tools": tools, "tool_choice": "required"}
    async with SimulatedProvider({"api_keys": [KEY], "models": {"m": scripted}}) as sim:
        for streams in (False, True):
            with subtests.test(streams=streams):
                chunks: list[Any] = []

                async def take(taken: Any, chunks: list[Any] = chunks) -> None:
                    chunks += taken

                streaming = Streaming(take, 5.0, 30.0) if streams else None
                answered = await perform(
                    settings(kind, sim.url.removesuffix("/v1")), call(params=asked, streaming=streaming)
                )
                assert isinstance(answered.output, dict)
                [tool_call] = answered.output["tool_calls"]
                assert tool_call["function"]["name"] == LONG_NAME
                assert LONG_NAME in str(answered.response)
                names = {
                    piece["function"]["name"]
                    for chunk in chunks
                    for choice in chunk["choices"]
                    for piece in choice["delta"].get("tool_calls") or ()
                    if piece["function"].get("name")
                }
                assert names == ({LONG_NAME} if streams else set())


async def test_no_name_of_a_tool_is_sent_that_is_too_long() -> None:
    seen: list[dict[str, Any]] = []

    async def note(request: web.BaseRequest) -> web.Response:
        seen.append(await request.json())
        return web.json_response({"choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}]})

    async with answering(note) as origin:
        tools = [{"type": "function", "function": {"name": LONG_NAME}}]
        await perform(settings("openai", origin), call(params={"tools": tools}))
    [tool] = seen[0]["tools"]
    assert len(tool["function"]["name"]) == 64
