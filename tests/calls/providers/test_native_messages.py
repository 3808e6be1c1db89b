"""Requests that are written for Anthropic's Messages go out as they are, and the events of their answers are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from aiohttp import web

from breakwater.calls.providers.base import Answer, Call, Streaming
from breakwater.dialects.rules.chat_chunks import Chunk
from tests.calls.providers.kit import answering, call, perform, saying, settings

BODY: dict[str, Any] = {
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        }
    ],
    "max_tokens": 50,
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "new_field": {"a": [1, None]},
}
SEARCH = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}}
MESSAGE: dict[str, Any] = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "claude",
    "content": [SEARCH],
    "stop_reason": "pause_turn",
    "usage": {"input_tokens": 1, "output_tokens": 2},
}


def native(body: dict[str, Any] = BODY, **more: Any) -> Call:
    return call(api="messages", native=body, **more)


async def sent_for(asked: Call) -> tuple[dict[str, Any], dict[str, str]]:
    """The body and the headers of a call."""
    seen: list[Any] = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        seen.extend((await request.json(), dict(request.headers)))
        return web.json_response(MESSAGE)

    async with answering(answer) as origin:
        await perform(settings("anthropic", origin, headers={"anthropic-beta": "mine"}), asked)
    return seen[0], seen[1]


async def test_a_body_goes_out_as_it_is() -> None:
    body, headers = await sent_for(native(headers={"anthropic-beta": "one,two"}))
    assert body == {**BODY, "model": "m"}
    assert headers["anthropic-beta"] == "mine, one,two"


async def test_of_a_repaired_call_the_conversation_is_another_one() -> None:
    thought = {"type": "thinking", "thinking": "Hm", "signature": "s"}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi", "cache_control": {"type": "ephemeral"}},
        {
            "role": "assistant",
            "content": None,
            "thinking_blocks": [thought],
            "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "none", "is_error": True},
    ]
    body, _ = await sent_for(native({**BODY, "system": "Old"}, messages=messages, repaired=True))
    assert body == {
        **BODY,
        "model": "m",
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": [thought, {"type": "tool_use", "id": "t1", "name": "f", "input": {}}]},
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [{"type": "text", "text": "none"}],
                        "is_error": True,
                    }
                ],
            },
        ],
    }


async def test_the_agents_schema_is_asked_for_in_anthropics_words() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    body, _ = await sent_for(native({**BODY, "output_config": {"effort": "low"}}, output_schema=schema))
    closed = {**schema, "additionalProperties": False}
    assert body["output_config"] == {"effort": "low", "format": {"type": "json_schema", "schema": closed}}


async def test_an_answer_of_the_providers_own_tools_is_one() -> None:
    async with saying(MESSAGE) as origin:
        answer = await perform(settings("anthropic", origin), native())
    assert answer.output == {"role": "assistant", "content": None, "content_parts": [SEARCH]}
    assert answer.response == MESSAGE


async def test_a_thought_without_a_text_is_an_answer() -> None:
    thought = {"type": "thinking", "thinking": "Hm", "signature": "s"}
    async with saying({**MESSAGE, "content": [thought], "stop_reason": "max_tokens"}) as origin:
        answer = await perform(settings("anthropic", origin), native())
    assert (answer.finish_reason, answer.output) == (
        "length",
        {"role": "assistant", "content": None, "content_parts": [thought]},
    )


async def streamed(*events: dict[str, Any]) -> tuple[Answer, list[Chunk]]:
    chunks: list[Chunk] = []

    async def take(given: Sequence[Chunk]) -> None:
        chunks.extend(given)

    body = b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event)) for event in events)
    async with saying(body, 200, **{"Content-Type": "text/event-stream"}) as origin:
        answer = await perform(settings("anthropic", origin), native(streaming=Streaming(take, 5.0, 30.0)))
    return answer, chunks


async def test_the_events_of_a_stream_are_kept() -> None:
    cited = {"type": "web_search_result_location", "url": "https://example.com"}
    answer, chunks = await streamed(
        {"type": "message_start", "message": {**MESSAGE, "content": [], "stop_reason": None}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "Hm"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "s"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {**SEARCH, "input": {}}},
        {
            "type": "content_block_delta",
            "index": 1,
            "delta": {"type": "input_json_delta", "partial_json": '{"query":"x"}'},
        },
        {"type": "content_block_stop", "index": 1},
        {"type": "content_block_start", "index": 2, "content_block": {"type": "text", "text": "", "citations": []}},
        {"type": "content_block_delta", "index": 2, "delta": {"type": "text_delta", "text": "Hi"}},
        {"type": "content_block_delta", "index": 2, "delta": {"type": "citations_delta", "citation": cited}},
        {"type": "content_block_stop", "index": 2},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 7}},
        {"type": "message_stop"},
    )
    assert answer.output == "Hi"
    assert answer.response is not None
    assert answer.response["content"] == [
        {"type": "thinking", "thinking": "Hm", "signature": "s"},
        {**SEARCH, "partial_json": '{"query":"x"}'},
        {"type": "text", "text": "Hi", "citations": [cited]},
    ]
    kinds = [chunk["event"]["type"] for chunk in chunks if "event" in chunk]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert {"reasoning_content": "Hm"} in deltas, "thinking counts as content: a long thought is no silence"
    assert {"content": "Hi"} in deltas
