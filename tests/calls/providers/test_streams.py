"""Streamed answers of the HTTP providers: the chunks, the answer that they come to, and how streams end too early."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest
from aiohttp import web

from breakwater.calls.providers.base import Answer, Call, CallError, Streaming
from breakwater.calls.providers.exchange import Exchange
from breakwater.calls.providers.python import PythonProvider, Reply
from breakwater.calls.providers.registry import ProcessSettings
from breakwater.calls.rules.classify import BrokenAnswer, HttpFailure, TransportFailure, classify
from breakwater.dialects.rules.chat_chunks import Chunk
from breakwater.local.provider import SimulatedProvider
from breakwater.prices.rules.usage import Usage
from tests.calls.providers.kit import KEY, KINDS, answering, call, perform, settings
from tests.flow.kit import model
from tests.helpers import until
from tests.tables import each_row

ANSWER = "".join(f"{number:03d} " for number in range(60))
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("look", "move")
]


class Streamed:
    """A call whose chunks are kept."""

    def __init__(self, idle_timeout_s: float = 5.0, total_timeout_s: float = 30.0, **more: Any) -> None:
        self.chunks: list[Chunk] = []
        self.streaming = Streaming(self._take, idle_timeout_s, total_timeout_s)
        self.call: Call = call(**more, streaming=self.streaming)

    async def _take(self, chunks: Sequence[Chunk]) -> None:
        self.chunks += chunks

    @property
    def text(self) -> str:
        return "".join(choice["delta"].get("content") or "" for chunk in self.chunks for choice in chunk["choices"])


def scripted(*faults: dict[str, Any], **behaviour: Any) -> SimulatedProvider:
    return SimulatedProvider({"api_keys": [KEY], "models": {"m": model(*faults, **{"answer": ANSWER, **behaviour})}})


async def streamed(kind: str, sim: SimulatedProvider, asked: Streamed) -> Answer:
    return await perform(settings(kind, sim.url.removesuffix("/v1")), asked.call)


async def broken(kind: str, sim: SimulatedProvider, asked: Streamed) -> CallError:
    with pytest.raises(CallError) as caught:
        await streamed(kind, sim, asked)
    return caught.value


@pytest.mark.parametrize("kind", KINDS)
async def test_a_stream_comes_to_the_answer_that_would_have_come_whole(kind: str) -> None:
    async with scripted() as sim:
        asked = Streamed()
        answer = await streamed(kind, sim, asked)
        whole = await perform(settings(kind, sim.url.removesuffix("/v1")))
        assert [one.delivered for one in sim.ledger.calls] == [True, True]
    assert (answer.output, answer.usage) == (whole.output, whole.usage) == (ANSWER, Usage(120, 40, 0, **_written(kind)))
    assert asked.text == ANSWER
    assert asked.streaming.answer.chunks == 60
    assert asked.chunks[-1]["usage"]["completion_tokens"] == 40
    assert [one["choices"][0]["finish_reason"] for one in asked.chunks if one["choices"]][-2:] == [None, "stop"]
    assert answer.response is not None
    assert whole.response is not None
    unlike = {"id", "created", "choices", "usage", "system_fingerprint"}
    assert {name for name in answer.response if answer.response[name] != whole.response.get(name)} <= unlike


def _written(kind: str) -> dict[str, int]:
    return {"cache_write_tokens": 0} if kind == "anthropic" else {}


@pytest.mark.parametrize("kind", KINDS)
async def test_tool_calls_are_put_together(kind: str) -> None:
    calls = [{"name": name, "arguments": {"for": "a long time, or longer"}} for name in ("look", "move")]
    async with scripted(tool_calls=calls, answer=None) as sim:
        asked = Streamed(params={"max_tokens": 100, "tools": TOOLS})
        answer = await streamed(kind, sim, asked)
    assert isinstance(answer.output, dict)
    named: Any = answer.output["tool_calls"]
    assert [one["function"] for one in named] == [
        {"name": name, "arguments": '{"for":"a long time, or longer"}'} for name in ("look", "move")
    ]
    assert asked.streaming.answer.messages()[0]["tool_calls"] == named
    assert asked.streaming.answer.finish_reason(0) == "tool_calls"


async def test_all_choices_are_put_together() -> None:
    async with scripted() as sim:
        answer = await streamed("openai", sim, Streamed(params={"n": 3}))
    assert answer.response is not None
    choices: Any = answer.response["choices"]
    assert [(one["index"], one["message"]["content"]) for one in choices] == [(n, ANSWER) for n in range(3)]


@each_row("kind", KINDS)
@each_row(
    ("fault", "text", "failure"),
    [
        ({"stream": "cut", "after_chunks": 40}, ANSWER[:160], TransportFailure("network", "TruncatedAnswerError", "…")),
        ({"stream": "cut", "after_chunks": 0}, "", TransportFailure("network", "TruncatedAnswerError", "…")),
        ({"stream": "no_end", "after_chunks": 40}, ANSWER[:160], BrokenAnswer("the stream ended early, after 40")),
        ({"stream": "malformed", "after_chunks": 40}, ANSWER[:160], BrokenAnswer("an event of the stream is not")),
        ({"kind": "empty_body"}, "", BrokenAnswer("the stream ended early, after 0")),
        (
            {"stream": "error", "after_chunks": 40, "error": {"type": "overloaded_error", "message": "too much"}},
            ANSWER[:160],
            HttpFailure(529, "too much", None, "overloaded_error"),
        ),
    ],
)
async def test_a_stream_that_breaks_is_a_failed_call(kind: str, fault: Any, text: str, failure: Any) -> None:
    async with scripted(fault) as sim:
        asked = Streamed()
        failed = await broken(kind, sim, asked)
    assert asked.text == text
    assert failed.maybe_billed
    assert type(failed.failure) is type(failure)
    if isinstance(failure, TransportFailure):
        assert isinstance(failed.failure, TransportFailure)
        assert failed.failure.class_name == failure.class_name
    else:
        assert failed.failure.message.startswith(failure.message)
    # Anthropic says at the start what the input was.
    begun = kind == "anthropic" and "kind" not in fault
    assert failed.usage == (Usage(120, None, 0, 0) if begun else None)


@pytest.mark.parametrize("fault", [{"stream": "cut", "after_chunks": 40}, {"kind": "truncated"}])
async def test_what_came_of_a_broken_answer_is_freed_with_the_failure(fault: Any) -> None:
    async with scripted(fault) as sim:
        gc.collect()
        gc.disable()  # services rarely look for cycles
        try:
            with suppress(CallError):
                asked = Streamed().call if "stream" in fault else call()
                await perform(settings("openai", sim.url.removesuffix("/v1")), asked)
            kept = [one for one in gc.get_objects() if isinstance(one, Exchange)]
        finally:
            gc.enable()
        assert sim.ledger.totals.calls == 1
    assert kept == []


@pytest.mark.parametrize("kind", KINDS)
async def test_the_mark_of_the_end_may_be_missing(kind: str) -> None:
    async with scripted({"stream": "no_end"}) as sim:
        assert (await streamed(kind, sim, Streamed())).output == ANSWER


@each_row("kind", KINDS)
@each_row(("after_chunks", "maybe_billed"), [(0, False), (1, True)])
async def test_an_error_in_a_stream_is_billed_only_where_some_of_an_answer_came_before_it(
    kind: str, after_chunks: int, maybe_billed: bool
) -> None:
    throttled = {"type": "invalid_request_error", "message": "Too many requests, please wait before trying again."}
    async with scripted({"stream": "error", "after_chunks": after_chunks, "error": throttled}) as sim:
        failed = await broken(kind, sim, Streamed())
    assert isinstance(failed.failure, HttpFailure)
    assert classify(failed.failure, datetime.now(UTC)).kind == "rate_limit"
    assert failed.maybe_billed == maybe_billed


@pytest.mark.parametrize("kind", KINDS)
async def test_an_error_before_the_stream_is_that_error(kind: str) -> None:
    async with scripted({"status": 429, "retry_after_s": 7}) as sim:
        asked = Streamed()
        failed = await broken(kind, sim, asked)
    assert isinstance(failed.failure, HttpFailure)
    assert (failed.failure.status, failed.maybe_billed, asked.chunks) == (429, False, [])


@pytest.mark.parametrize(
    ("before", "after", "words"), [(0.15, 9.0, "no answer within 0.15 s"), (9.0, 0.15, "the answer stalled")]
)
async def test_a_silent_stream_is_given_up(before: float, after: float, words: str) -> None:
    fault = {"stream": "stall", "after_chunks": 0 if before < after else 40}
    async with scripted(fault) as sim:
        began = time.monotonic()
        failed = await broken("openai", sim, Streamed(after, timeout_s=before))
        assert time.monotonic() - began < 5
        await until(lambda: sim.ledger.calls[0].delivered is False)
        assert sim.ledger.calls[0].output_tokens == (0 if before < after else 27)
    assert isinstance(failed.failure, TransportFailure)
    assert failed.failure.kind == "timeout"
    assert failed.failure.message.startswith(words)


async def test_a_stream_may_take_longer_than_its_beginning_may() -> None:
    async with scripted(stream={"tokens_per_s": 60, "tokens_per_chunk": 6}) as sim:
        assert (await streamed("openai", sim, Streamed(idle_timeout_s=0.6, timeout_s=0.6))).output == ANSWER
        failed = await broken("openai", sim, Streamed(total_timeout_s=0.6))
    assert isinstance(failed.failure, TransportFailure)
    assert failed.failure.class_name == "StreamStalledError"


async def test_the_wait_for_the_beginning_of_a_stream_is_part_of_its_total_time() -> None:
    async def late(request: web.BaseRequest) -> web.StreamResponse:
        await asyncio.sleep(1.5)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(b'data: {"choices": [{"index": 0, "delta": {"content": "x"}}]}\n\n')
            await asyncio.sleep(0.1)

    began = time.monotonic()
    async with answering(late) as origin:
        with pytest.raises(CallError) as caught:
            await perform(settings("openai", origin), Streamed(total_timeout_s=2.0).call)
        assert time.monotonic() - began < 3
    assert isinstance(caught.value.failure, TransportFailure)
    assert caught.value.failure.class_name == "StreamStalledError"


async def test_a_call_that_is_cancelled_is_ended_at_the_provider() -> None:
    async with scripted({"stream": "stall", "after_chunks": 30}) as sim:
        asked = Streamed(idle_timeout_s=60)
        task = asyncio.create_task(streamed("openai", sim, asked))
        await until(lambda: asked.streaming.answer.chunks == 30)
        task.cancel()
        await until(lambda: sim.ledger.calls[0].delivered is not None, timeout_s=1)
        assert sim.ledger.calls[0].output_tokens == 20


async def test_a_server_that_does_not_stream_answers_whole() -> None:
    async def whole(_: web.BaseRequest) -> web.StreamResponse:
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": "whole"}}]})

    async with answering(whole) as origin:
        asked = Streamed()
        assert (await perform(settings("openai", origin), asked.call)).output == "whole"
    assert asked.chunks == []


async def test_events_may_be_split_and_ended_anyhow() -> None:
    async def halves(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for piece in (
            b": a comment\r\n\r\nevent: x\r\nda",
            'ta: {"choices":[{"index":0,"delta":{"content":"grü'.encode()[:-1],
            'grü"}}]}\r'.encode()[3:],
            b'\n\r\ndata:{"choices":[{"index":0,"delta":{},\ndata: "finish_reason":"stop"}]}\n',
            b"\ndata: [DONE]\n\n",
        ):
            await response.write(piece)
            await asyncio.sleep(0.01)
        return response

    async with answering(halves) as origin:
        asked = Streamed()
        assert (await perform(settings("openai", origin), asked.call)).output == "grü"
    assert len(asked.chunks) == 2


async def counted(request: dict[str, Any]) -> AsyncIterator[Any]:
    assert "stream" in request
    for word in ("one ", "two ", "three"):
        yield word
        await asyncio.sleep(0.01)
    yield Reply(None, usage={"input_tokens": 3, "output_tokens": 4})


async def endless(request: dict[str, Any]) -> AsyncIterator[str]:
    del request
    yield "one "
    await asyncio.sleep(60)


async def wrong(request: dict[str, Any]) -> AsyncIterator[Any]:
    del request
    yield "one "
    yield 2


async def test_a_callable_that_yields_streams_and_answers_whole_where_that_is_wanted() -> None:
    provider, asked = PythonProvider("a:b", counted, cost_per_call=None), Streamed()
    answer = await provider.perform(asked.call)
    assert (answer.output, answer.usage) == ("one two three", Usage(3, 4))
    assert (asked.text, len(asked.chunks)) == ("one two three", 3)
    assert await provider.perform(call()) == answer


@pytest.mark.parametrize(("function", "words"), [(endless, "stalled for 0.1 s"), (wrong, "something other than texts")])
async def test_what_a_callable_has_yielded_before_it_fails_is_out(function: Any, words: str) -> None:
    provider, asked = PythonProvider("a:b", function, cost_per_call=None), Streamed(idle_timeout_s=0.1)
    with pytest.raises(CallError, match=words):
        await provider.perform(asked.call)
    assert asked.text == "one "
    await provider.close()


@each_row(
    ("script", "text", "words"),
    [
        ("""echo '{"delta": "one "}'; sleep 60""", "one ", "stalled for 0.3 s.*the program was killed"),
        ("""echo '{"delta": "one "}'; exit 3""", "one ", "exited with 3"),
        ("""echo '{"delta": "one "}'""", "one ", "printed no response after its answer"),
        ("""echo '{"delta": 1}'""", "", "not a valid response"),
    ],
)
async def test_what_a_program_has_printed_before_it_fails_is_out(script: str, text: str, words: str) -> None:
    provider, asked = ProcessSettings(command=("sh", "-c", f"cat > /dev/null; {script}")).open(), Streamed(0.3)
    try:
        with pytest.raises(CallError, match=words):
            await provider.perform(asked.call)
    finally:
        await provider.close()
    assert asked.text == text
