"""Streams of the simulated provider: what is sent in both dialects, at which pace, how it breaks, and what it costs."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
import pytest
from openai import APIError

from breakwater.local.provider import SimulatedProvider
from breakwater.local.provider.script import ScriptError
from tests.helpers import until
from tests.openai_client import openai_client
from tests.tables import each_row

from .provider_kit import COST_NANO, MODEL, chat, script

ANSWER = "".join(f"{number:03d} " for number in range(60))
"""60 tokens."""
VERSION = {"anthropic-version": "2023-06-01"}


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


async def events(session: aiohttp.ClientSession, sim: SimulatedProvider, dialect: str, **more: Any) -> list[str]:
    """The events of a stream, of Anthropic's the data alone; `broken` stands for the end of one that was cut."""
    path = "messages" if dialect == "anthropic" else "chat/completions"
    body = {**chat(stream=True, **more), "max_tokens": 100}
    found = b""
    async with session.post(f"{sim.url}/{path}", json=body, headers=VERSION) as response:
        assert response.headers["content-type"] == "text/event-stream"
        try:
            async for data in response.content.iter_any():
                found += data
        except aiohttp.ClientPayloadError:
            found += b"data: broken"
    return [line.removeprefix("data: ") for line in found.decode().splitlines() if line.startswith("data: ")]


def text_of(dialect: str, sent: list[str]) -> str:
    """The text that the events which are JSON come to."""
    said = ""
    for event in sent:
        try:
            parsed = orjson.loads(event)
        except orjson.JSONDecodeError:
            continue
        if dialect == "anthropic":
            said += parsed.get("delta", {}).get("text", "")
        elif parsed.get("choices"):
            said += parsed["choices"][0]["delta"].get("content") or ""
    return said


def sdk(sim: SimulatedProvider) -> Any:
    return openai_client(sim.url, "any", max_retries=0)


async def test_openais_client_reads_a_stream_with_its_usage() -> None:
    async with SimulatedProvider(script(answer=ANSWER)) as sim:
        chunks = [
            chunk
            async for chunk in await sdk(sim).chat.completions.create(
                **chat(stream=True, n=2, stream_options={"include_usage": True})
            )
        ]
        [call] = sim.ledger.calls
    for index in (0, 1):
        deltas = [choice.delta for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(delta.content or "" for delta in deltas) == ANSWER
        assert len(deltas) == 62
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None] == [80]
    assert len({chunk.id for chunk in chunks}) == 1
    assert (call.billed, call.delivered, call.output_tokens) == (True, True, 80)


async def test_tool_calls_come_in_pieces() -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("find", "move")]
    calls = [{"name": name, "arguments": {"query": "a long one"}} for name in ("find", "move")]
    async with (
        SimulatedProvider(script(tool_calls=calls)) as sim,
        sdk(sim).chat.completions.stream(**chat(tools=tools)) as stream,
    ):
        message = (await stream.get_final_completion()).choices[0].message
    assert message.content is None
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
        (name, '{"query":"a long one"}') for name in ("find", "move")
    ]


async def test_anthropics_events_are_those_of_its_messages(session: aiohttp.ClientSession) -> None:
    async with SimulatedProvider(script(answer=ANSWER)) as sim:
        sent = [orjson.loads(event) for event in await events(session, sim, "anthropic")]
    kinds = list(dict.fromkeys(event["type"] for event in sent))
    assert kinds == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert sent[0]["message"]["usage"]["input_tokens"] == 100
    assert sent[-2]["delta"] == {
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
    }
    assert (sent[-2]["usage"]["input_tokens"], sent[-2]["usage"]["output_tokens"]) == (100, 40)


async def test_the_pace_is_that_of_the_script(session: aiohttp.ClientSession) -> None:
    pace = {"tokens_per_s": 300, "tokens_per_chunk": 6}
    async with SimulatedProvider(script(answer=ANSWER, stream=pace)) as sim:
        began = time.monotonic()
        sent = await events(session, sim, "openai")
    assert text_of("openai", sent) == ANSWER
    assert len(sent) == 1 + 10 + 1 + 1
    assert 0.19 < time.monotonic() - began < 2


@each_row("dialect", ["openai", "anthropic"])
@each_row(
    ("fault", "text", "last", "billed"),
    [
        ({"stream": "cut", "after_chunks": 40}, ANSWER[:160], "broken", 27),
        ({"stream": "cut", "after_chunks": 0}, "", "broken", 0),
        ({"stream": "no_end", "after_chunks": 40}, ANSWER[:160], "039", 27),
        ({"stream": "no_end"}, ANSWER, "stop", 40),
        ({"stream": "error", "after_chunks": 40}, ANSWER[:160], "overloaded", 27),
        ({"stream": "malformed", "after_chunks": 40}, ANSWER[:160] + ANSWER[164:], "", 40),
        ({"stream": "stall", "after_chunks": 40, "stall_s": 0.05}, ANSWER, "", 40),
        ({"kind": "truncated", "billed": True}, ANSWER[:120], "broken", 20),
        ({"kind": "error_in_200"}, "", "error", 0),
        ({"kind": "empty_body"}, "", "", 0),
    ],
)
async def test_a_stream_breaks_as_the_script_says(
    session: aiohttp.ClientSession, dialect: str, fault: dict[str, Any], text: str, last: str, billed: int
) -> None:
    named = {"error": {"message": "overloaded"}} if fault.get("stream") == "error" else {}
    async with SimulatedProvider(script({**fault, **named}, answer=ANSWER)) as sim:
        sent = await events(session, sim, dialect)
        await until(lambda: sim.ledger.calls[0].delivered is not None)
        [call] = sim.ledger.calls
    assert text_of(dialect, sent) == text
    if dialect == "openai" and last:
        assert last in sent[-1]
    whole = fault.get("stream") == "stall"
    assert (call.delivered, call.output_tokens, call.fault) == (whole, billed, call.fault)


async def test_an_error_in_a_stream_is_one_for_openais_client() -> None:
    fault = {"stream": "error", "after_chunks": 2, "error": {"message": "overloaded"}}
    async with SimulatedProvider(script(fault, answer=ANSWER)) as sim:
        stream = await sdk(sim).chat.completions.create(**chat(stream=True))
        said = [(await anext(stream)).choices[0].delta.content for _ in range(3)]
        with pytest.raises(APIError, match="overloaded"):
            await anext(stream)
    assert said == ["", ANSWER[:4], ANSWER[4:8]]


async def test_a_fault_of_streams_leaves_other_answers_whole(session: aiohttp.ClientSession) -> None:
    async with (
        SimulatedProvider(script({"stream": "cut"}, answer=ANSWER)) as sim,
        session.post(f"{sim.url}/chat/completions", json=chat()) as response,
    ):
        assert (await response.json())["choices"][0]["message"]["content"] == ANSWER
        assert sim.ledger.totals.cost_nano == COST_NANO


async def test_a_client_that_leaves_ends_the_stream_and_pays_what_was_sent(session: aiohttp.ClientSession) -> None:
    async with SimulatedProvider(script({"stream": "stall", "after_chunks": 30}, answer=ANSWER)) as sim:
        async with session.post(f"{sim.url}/chat/completions", json=chat(stream=True)) as response:
            received = b""
            while received.count(b"data: ") < 31:
                received += await response.content.readany()
            response.close()
        await until(lambda: sim.ledger.calls[0].delivered is not None)
        [call] = sim.ledger.calls
    assert (call.delivered, call.billed, call.output_tokens) == (False, True, 20)


def test_what_only_streams_have_needs_a_fault_of_streams() -> None:
    with pytest.raises(ScriptError, match="need stream"):
        SimulatedProvider({"models": {MODEL: {"price": {}, "faults": [{"status": 500, "after_chunks": 3}]}}})
