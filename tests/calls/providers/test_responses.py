"""Responses spoken natively: bodies as they came, answers whole and streamed, and the events that their clients see."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import orjson
import pytest
from aiohttp import web

from breakwater.calls.providers.base import Answer, Call, CallError
from breakwater.calls.providers.openai import ChatCompletions
from breakwater.calls.providers.registry import OpenAISettings
from breakwater.calls.providers.responses import (
    ResponsesWire,
    _ResponseReader,  # pyright: ignore[reportPrivateUsage]
)
from breakwater.calls.rules.classify import BrokenAnswer, HttpFailure, classify
from breakwater.dialects.rules.chat_chunks import Assembly
from breakwater.dialects.rules.native_requests import chat_form
from breakwater.dialects.rules.responses_answer import EchoedRequest, output_of
from breakwater.dialects.rules.responses_stream import ResponseEvents
from breakwater.jobs.contract.job import NativeRequest
from breakwater.local.provider import SimulatedProvider
from tests.calls.providers.kit import KEY, answering, call, perform, settings
from tests.calls.providers.test_streams import Streamed
from tests.dialects.test_responses_stream import accumulated, by_sdk, result
from tests.flow.kit import model
from tests.tables import each_row

FIND = {"type": "function", "name": "find_ship", "parameters": {"type": "object"}, "strict": False}
PATCH = {"type": "custom", "name": "apply_patch"}
ALL: list[dict[str, Any]] = [
    {"type": "thinking", "text": "Which ship?"},
    {"type": "hosted", "query": "ferries"},
    {"type": "text", "text": "It is the ferry.", "cites": ["https://example.org/a"]},
    {"type": "tool_call", "name": "find_ship", "arguments": {"name": "ferry"}},
    {"type": "tool_call", "name": "apply_patch", "input": "*** Begin Patch"},
]
BODY: dict[str, Any] = {
    "input": "hello",
    "tools": [FIND, PATCH],
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "max_output_tokens": 500,
}
ASKED = EchoedRequest(job_id="job-1", created_at=1_790_000_000, model="writer", body=BODY)


def native(**more: Any) -> dict[str, Any]:
    """What a call of a provider that speaks Responses has in addition."""
    return {"api": "responses", "native": BODY, **more}


def scripted(*faults: dict[str, Any], **behaviour: Any) -> SimulatedProvider:
    """A provider that answers with a turn of all kinds of parts."""
    more = {"turns": [ALL], "usage": {"input_tokens": 120, "output_tokens": 40, "cached_tokens": 20}, **behaviour}
    return SimulatedProvider({"api_keys": [KEY], "models": {"m": model(*faults, **more)}})


async def asked(sim: SimulatedProvider, called: Call) -> Answer:
    """The answer to a call."""
    return await perform(settings("openai", sim.url.removesuffix("/v1"), api="responses"), called)


def whole(answer: Answer) -> dict[str, Any]:
    """The result of a job with an answer, as JSON."""
    response = orjson.loads(orjson.dumps(answer.response))
    return result(response, output=answer.output, finish_reason=answer.finish_reason)


def test_a_provider_speaks_responses_if_the_config_says_so() -> None:
    assert OpenAISettings(base_url="http://x/v1").apis_of("m") == ("chat", "embeddings")
    assert OpenAISettings(base_url="http://x/v1", api="responses").apis_of("m") == ("chat", "embeddings", "responses")


async def test_the_body_goes_out_as_it_came() -> None:
    async with scripted() as sim:
        answer = await asked(sim, call(**native()))
        [seen] = sim.ledger.calls

    assert (seen.cost_nano is not None, answer.finish_reason) == (True, "tool_calls")
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.cached_tokens) == (120, 40, 20)
    output: Any = answer.output
    assert output["content"] == "It is the ferry."
    assert [one["type"] for one in output["tool_calls"]] == ["function", "custom"]
    assert [item["type"] for item in output_of("job-1", whole(answer))] == [
        "reasoning",
        "web_search_call",
        "message",
        "function_call",
        "custom_tool_call",
    ]


async def test_a_chat_goes_to_chat_completions_all_the_same() -> None:
    async with SimulatedProvider({"api_keys": [KEY], "models": {"m": model(answer="Hi")}}) as sim:
        answer = await asked(sim, call())

    assert (answer.output, (answer.response or {})["object"]) == ("Hi", "chat.completion")


async def test_a_stream_gives_chunks_of_a_chat_and_its_events_the_same_items() -> None:
    async with scripted() as sim:
        streamed = Streamed(**native())
        answer = await asked(sim, streamed.call)

    assert streamed.text == "It is the ferry."
    message = streamed.streaming.answer.messages()[0]
    assert message["tool_calls"][0]["function"] == {"name": "find_ship", "arguments": '{"name":"ferry"}'}
    encoder, ended = ResponseEvents(ASKED), whole(answer)
    events = encoder.begin()
    for one in streamed.chunks:
        events += encoder.add(orjson.loads(orjson.dumps(one)))
    events += encoder.end(ended)

    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert accumulated(events) == output_of("job-1", ended) == events[-1]["response"]["output"]
    assert {event["response"]["id"] for event in events if "response" in event} == {"resp_job-1"}
    assert "response.web_search_call.searching" in {event["type"] for event in events}
    response = by_sdk(events)
    assert (response.output_text, response.usage and response.usage.total_tokens) == ("It is the ferry.", 160)


async def test_missed_chunks_are_made_up_for_by_the_result() -> None:
    async with scripted() as sim:
        streamed = Streamed(**native())
        answer = await asked(sim, streamed.call)
    ended = whole(answer)

    for kept in range(len(streamed.chunks)):
        encoder = ResponseEvents(ASKED)
        events = encoder.begin()
        for one in streamed.chunks[:kept]:
            events += encoder.add(one)
        events += encoder.end(ended, complete=False)

        assert accumulated(events) == output_of("job-1", ended)


async def test_a_continued_answer_goes_on_in_the_item_that_the_provider_began() -> None:
    async with scripted(turns=[[{"type": "text", "text": "It is the ferry."}]]) as sim:
        streamed = Streamed(**native(native={"input": "hello"}))
        await asked(sim, streamed.call)
    begun, assembly = list(streamed.chunks[:5]), Assembly("job-1")
    rest = {"choices": [{"index": 0, "delta": {"content": "!"}, "finish_reason": "stop"}]}
    encoder = ResponseEvents(ASKED)
    events = encoder.begin()
    for one in [*begun, rest]:
        assembly.add(one)
        events += encoder.add(one)
    events += encoder.end(result(assembly.completion()))

    [item] = accumulated(events)
    assert item["content"][0]["text"].endswith("!")
    assert events[-1]["response"]["output"] == [item]
    assert [event["type"] for event in events].count("response.output_item.added") == 1


@each_row(
    ("fault", "kind"),
    [
        ({"kind": "failed", "error": {"code": "rate_limit_exceeded", "message": "full"}}, "rate_limit"),
        ({"kind": "failed", "error": {"code": "server_error", "message": "broke"}}, "server"),
        ({"stream": "error", "after_chunks": 3, "error": {"message": "broke"}}, "server"),
        ({"stream": "cut", "after_chunks": 3}, "network"),
        ({"stream": "no_end"}, "server"),
    ],
)
async def test_a_broken_stream_is_the_failure_that_it_is(fault: dict[str, Any], kind: str) -> None:
    async with scripted(fault, turns=[[{"type": "text", "text": "It is the ferry, I think."}]]) as sim:
        with pytest.raises(CallError) as caught:
            await asked(sim, Streamed(**native()).call)

    assert classify(caught.value.failure, datetime.now(UTC)).kind == kind


def test_a_stream_ends_with_a_response_whatever_its_object_says(subtests: pytest.Subtests) -> None:
    for written in (None, "chat.completion", 7):
        with subtests.test(written):
            reader = _ResponseReader(Assembly())
            [chunk] = reader.read({"type": "response.completed", "response": {"object": written, "output": [{}]}})
            assert (chunk["object"], reader.answer()["object"]) == ("chat.completion.chunk", "response")


async def test_a_whole_response_that_failed_is_a_failure() -> None:
    async with scripted({"kind": "failed", "error": {"code": "rate_limit_exceeded", "message": "full"}}) as sim:
        with pytest.raises(CallError) as caught:
            await asked(sim, call(**native()))

    assert isinstance(caught.value.failure, HttpFailure)
    assert caught.value.failure.status == 429


@pytest.mark.parametrize(
    "answer",
    [
        {"object": "response", "status": "completed", "output": None},
        {"object": "response", "status": "cancelled", "output": []},
        {"object": "response", "status": "completed"},
    ],
)
async def test_a_response_without_an_answer_is_broken(answer: dict[str, Any]) -> None:
    async def say(_: web.BaseRequest) -> web.Response:
        return web.json_response(answer)

    async with answering(say) as origin:
        with pytest.raises(CallError) as caught:
            await perform(settings("openai", origin, api="responses"), call(**native()))

    assert isinstance(caught.value.failure, BrokenAnswer)


@pytest.mark.parametrize(("status", "said"), [("completed", False), ("incomplete", True)])
def test_thoughts_alone_are_an_answer_where_the_limit_ended_it(status: str, said: bool) -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": []}
    answer = {"object": "response", "status": status, "output": [thought]}
    [choice] = ResponsesWire(ChatCompletions("http://x/v1")).choices(answer)

    assert (choice.output is not None) is said


def body_of(**more: Any) -> dict[str, Any]:
    """The body that goes out for a call."""
    return dict(ResponsesWire(ChatCompletions("http://x/v1")).body(call(**native(**more))))


def test_a_repaired_call_keeps_its_body_but_for_the_conversation() -> None:
    given = [{"role": "user", "content": "hello"}, {"type": "reasoning", "id": "rs_1", "summary": []}]
    body: dict[str, Any] = {**BODY, "input": given, "instructions": "Be brief."}
    before = chat_form(NativeRequest(api="responses", body=body)).messages
    added = [{"role": "assistant", "content": "It is"}, {"role": "user", "content": "Go on."}]
    as_items = [{"type": "message", **message} for message in added]

    assert body_of(native=body)["input"] == given
    assert body_of(native=body, repaired=True, messages=[*before, *added])["input"] == [*given, *as_items]
    trimmed = body_of(native=body, repaired=True, messages=[before[0], *added])
    assert trimmed["input"] == [{"type": "message", "role": "system", "content": "Be brief."}, *as_items]
    assert (trimmed["instructions"], trimmed["tools"]) == (None, [FIND, PATCH])


def test_a_system_prompt_of_the_agent_is_no_part_of_the_items() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    more = {"role": "assistant", "content": "It is"}

    assert body_of(repaired=True, messages=[*messages, more])["input"] == [
        {"role": "user", "content": "hello"},
        {"type": "message", **more},
    ]


def test_calls_and_their_results_become_items() -> None:
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": "x"}}],
        },
        {
            "role": "assistant",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
    ]

    assert body_of(repaired=True, messages=messages)["input"] == [
        {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_text", "text": "See"},
                {"type": "input_image", "image_url": "x", "detail": "auto"},
            ],
        },
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "7"},
    ]


def test_the_schema_of_an_agent_is_the_format_of_a_body_without_one() -> None:
    schema = {"type": "object"}
    answer = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}

    assert body_of(output_schema=schema, strict_output=True)["text"] == {"format": answer}
    own = {"format": {"type": "text"}}
    assert body_of(output_schema=schema, native={**BODY, "text": own})["text"] == own


async def test_a_tool_of_the_provider_that_runs_for_long_is_no_silence() -> None:
    item = {"type": "web_search_call", "id": "ws_1", "status": "in_progress"}
    searching = {"type": "response.web_search_call.searching", "output_index": 0, "item_id": "ws_1"}
    said = {"type": "response.output_text.delta", "output_index": 1, "content_index": 0, "delta": "Hi"}
    ended = {"type": "response.completed", "response": {"object": "response", "status": "completed", "output": []}}

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        begun = {"type": "response.output_item.added", "output_index": 0, "item": item}
        for event in (begun, *[searching] * 8, said, ended):
            await response.write(b"data: %b\n\n" % orjson.dumps(event))
            await asyncio.sleep(0.1)
        return response

    async with answering(answer) as origin:
        streamed = Streamed(**native(), idle_timeout_s=0.5, timeout_s=0.5)
        await perform(settings("openai", origin, api="responses"), streamed.call)
    assert streamed.text == "Hi"
