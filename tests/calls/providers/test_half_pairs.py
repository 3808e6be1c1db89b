"""Half of a surrogate pair in any place of an answer, from each kind of provider: the answer is read all the same."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from breakwater.calls.providers.base import Answer, CallError
from breakwater.calls.providers.python import NonRetryableError, PythonProvider
from breakwater.calls.providers.registry import ProcessSettings
from breakwater.calls.rules.classify import ProgramFailure
from tests.calls.providers.kit import KINDS, call, local_call, perform, saying, settings
from tests.calls.providers.test_responses import native as native_response
from tests.calls.providers.test_streams import Streamed

HIGH, LOW, FACE, ALONE = "\ud83d", "\ude00", "\U0001f600", "\ufffd"
SAID = [f"ok {HIGH}", f"{LOW} and ", HIGH, LOW, f" cut {HIGH}"]
MEANT = f"ok {FACE} and {FACE} cut {ALONE}"
MESSAGES: dict[str, Any] = {
    "api": "messages",
    "native": {"max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]},
}
SSE = {"Content-Type": "text/event-stream"}


def events_of(*events: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)


def of_chat() -> bytes:
    chunks = [{"choices": [{"index": 0, "delta": {"content": text}}]} for text in SAID]
    thoughts = [{"choices": [{"index": 0, "delta": {"reasoning_content": text}}]} for text in (HIGH, LOW)]
    return events_of(*thoughts, *chunks, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})


def of_messages() -> bytes:
    block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    deltas = [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}} for text in SAID
    ]
    return events_of(
        {"type": "message_start", "message": {"id": "m", "role": "assistant", "content": [], "usage": {}}},
        block,
        *deltas,
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 3}},
        {"type": "message_stop"},
    )


def of_responses() -> bytes:
    place = {"output_index": 0, "content_index": 0, "item_id": "msg_1"}
    whole = "".join(SAID).replace(HIGH + LOW, FACE)
    item = {"type": "message", "id": "msg_1", "content": [{"type": "output_text", "text": whole}]}
    return events_of(
        {"type": "response.created", "response": {"id": "r", "status": "in_progress", "output": []}},
        {"type": "response.output_item.added", "output_index": 0, "item": {**item, "content": []}},
        *({"type": "response.output_text.delta", **place, "delta": text} for text in SAID),
        {"type": "response.output_text.done", **place, "text": whole},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": {"id": "r", "status": "completed", "output": [item]}},
    )


def check(answer: Answer) -> None:
    assert answer.output == MEANT
    orjson.dumps(answer.response)


async def test_a_stream_says_each_pair_as_one_character(subtests: pytest.Subtests) -> None:
    cases = [
        ("openai", "chat", of_chat(), {}, {}),
        ("azure", "chat", of_chat(), {}, {}),
        ("anthropic", "chat", of_messages(), {}, {}),
        ("anthropic", "messages", of_messages(), {}, MESSAGES),
        ("openai", "responses", of_responses(), {"api": "responses"}, native_response()),
    ]
    for kind, api, body, more, asked in cases:
        with subtests.test(kind, api=api):
            streamed = Streamed(**asked)
            async with saying(body, **SSE) as origin:
                check(await perform(settings(kind, origin, **more), streamed.call))
            assert streamed.text == MEANT
            orjson.dumps(streamed.chunks)
        with subtests.test(kind, api=api, streamed="unasked"):
            async with saying(body, **SSE) as origin:
                check(await perform(settings(kind, origin, **more), call(**asked)))


async def test_a_whole_answer_is_read(subtests: pytest.Subtests) -> None:
    text = "".join(SAID)
    chat = {"choices": [{"index": 0, "message": {"content": text, HIGH: [LOW]}, "finish_reason": "length"}]}
    message = {"type": "message", "content": [{"type": "text", "text": text}], "stop_reason": "max_tokens"}
    item = {"type": "message", "content": [{"type": "output_text", "text": text}]}
    cases: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
        ("openai", chat, {}, {}),
        ("azure", chat, {}, {}),
        ("anthropic", message, {}, {}),
        ("anthropic", message, {}, MESSAGES),
        ("openai", {"output": [item], "status": "completed"}, {"api": "responses"}, native_response()),
    ]
    for kind, body, more, asked in cases:
        for document in (
            json.dumps(body).encode(),
            json.dumps(body, ensure_ascii=False).encode(errors="surrogatepass"),
        ):
            with subtests.test(kind, api=asked.get("api"), document=document[:20]):
                async with saying(document, **{"Content-Type": "application/json"}) as origin:
                    check(await perform(settings(kind, origin, **more), call(**asked)))


async def test_the_error_of_a_provider_is_read(subtests: pytest.Subtests) -> None:
    body = json.dumps({"error": {"type": "rate_limit_error", "message": f"slow down {HIGH}"}}).encode()
    for kind in KINDS:
        for status, headers in ((429, {}), (200, {}), (200, SSE)):
            document = b"event: error\ndata: " + body + b"\n\n" if headers else body
            with subtests.test(kind, status=status, headers=headers), pytest.raises(CallError) as caught:
                async with saying(document, status, **headers) as origin:
                    await perform(settings(kind, origin), Streamed().call if headers else call())
            assert getattr(caught.value.failure, "message", "") == f"slow down {ALONE}"
            assert getattr(caught.value.failure, "status", 0) == 429


async def test_a_callable_may_return_and_yield_halves() -> None:
    async def answer(_: Any) -> Any:
        return {"text": "".join(SAID), HIGH: [LOW]}

    async def write(_: Any) -> AsyncIterator[str]:
        for text in SAID:
            yield text

    async def fail(_: Any) -> Any:
        raise ValueError(f"no file caf\udce9 {HIGH}")

    async def refuse(_: Any) -> Any:
        raise NonRetryableError(f"no file {HIGH}")

    async def ask(function: Any, asked: Any = None) -> Answer:
        provider = PythonProvider("a:b", function, cost_per_call=None)
        try:
            return await provider.perform(asked or local_call())
        finally:
            await provider.close()

    assert (await ask(answer)).output == {"text": MEANT, ALONE: [ALONE]}
    assert (await ask(write)).output == MEANT
    streamed = Streamed(execution_id="j", input={"question": "why"})
    assert (await ask(write, streamed.call)).output == streamed.text == MEANT
    for function in (fail, refuse):
        with pytest.raises(CallError) as caught:
            await ask(function)
        assert isinstance(caught.value.failure, ProgramFailure)
        caught.value.failure.message.encode()


async def test_a_program_may_print_halves() -> None:
    lines = [json.dumps({"delta": text}) for text in SAID]
    result = json.dumps({"status": "success", "code": 0, "result": {"text": "".join(SAID), HIGH: 1}})
    failed = json.dumps({"status": "error", "code": 500, "error": f"broke {HIGH}"})

    async def ask(*printed: str, asked: Any = None) -> Answer:
        provider = ProcessSettings(command=("printf", "%s\\n", *printed)).open()
        try:
            return await provider.perform(asked or local_call())
        finally:
            await provider.close()

    assert (await ask(result)).output == {"text": MEANT, ALONE: 1}
    end = json.dumps({"status": "success", "code": 0})
    streamed = Streamed(execution_id="j", input={"question": "why"})
    assert (await ask(*lines, end, asked=streamed.call)).output == streamed.text == MEANT
    assert (await ask(*lines, end)).output == MEANT
    with pytest.raises(CallError) as caught:
        await ask(failed)
    assert getattr(caught.value.failure, "message", "") == f"broke {ALONE}"
