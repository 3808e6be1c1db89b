"""Answers of a shape that no page of a provider's names, and that they send all the same: what each comes to."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web

from breakwater.calls.providers.base import Answer, CallError
from breakwater.calls.rules.classify import BrokenAnswer, EmptyAnswer, HttpFailure
from tests.calls.providers.kit import answering, perform, saying, settings
from tests.calls.providers.test_streams import Streamed
from tests.tables import each_row

USAGE: dict[str, Any] = {"prompt_tokens": 5, "completion_tokens": 7}
DONE = "[DONE]"
THOUGHT = [{"type": "thinking", "thinking": [{"type": "text", "text": "Well, "}]}]


def said(delta: dict[str, Any] | None = None, reason: Any = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta or {}, "finish_reason": reason}], **more}


def call_piece(index: int | None = 0, own: Any = None, name: Any = None, arguments: Any = "") -> dict[str, Any]:
    function = {"arguments": arguments, **({} if name is None else {"name": name})}
    given = {"index": index, "id": own, "type": None if own is None else "function", "function": function}
    return {name: value for name, value in given.items() if value is not None}


def calling(*calls: dict[str, Any]) -> dict[str, Any]:
    return said({"tool_calls": list(calls)})


def events_of(*events: Any, end: str = "\n\n") -> bytes:
    """Server-sent events; a text is one as it is."""
    return (
        "\n\n".join(one if isinstance(one, str) else f"data: {json.dumps(one)}" for one in events).encode()
        + end.encode()
    )


async def stream(kind: str, body: bytes, *, cut: bool = False) -> tuple[Answer | CallError, Streamed]:
    """What a stream comes to. `cut`: the connection breaks after it."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(body)
        if cut:
            assert request.transport is not None
            request.transport.close()
        return response

    asked = Streamed()
    async with answering(answer) as origin:
        try:
            return await perform(settings(kind, origin), asked.call), asked
        except CallError as failed:
            return failed, asked


async def whole(kind: str, body: Any) -> Answer | CallError:
    async with saying(body) as origin:
        try:
            return await perform(settings(kind, origin))
        except CallError as failed:
            return failed


def told_calls(asked: Streamed) -> list[tuple[str, str, str]]:
    """The tool calls that a client puts together, which adds texts to texts."""
    calls: dict[int, dict[str, str]] = {}
    for chunk in asked.chunks:
        for choice in chunk["choices"]:
            for piece in choice["delta"].get("tool_calls") or ():
                call = calls.setdefault(piece["index"], {"id": "", "name": "", "arguments": ""})
                call["id"] += piece.get("id") or ""
                call["name"] += piece["function"].get("name") or ""
                call["arguments"] += piece["function"].get("arguments") or ""
    return [(call["id"], call["name"], call["arguments"]) for _, call in sorted(calls.items())]


TWO = [("a", "f", '{"x":1}'), ("b", "g", '{"y":2}')]


@each_row(
    ("pieces", "calls"),
    [
        ([call_piece(0, "a", "f", '{"x":1}'), call_piece(0, "b", "g", '{"y":2}')], TWO),
        ([call_piece(None, "a", "f", '{"x":1}'), call_piece(None, "b", "g", '{"y":2}')], TWO),
        ([call_piece(0, "a", "f", '{"x"'), call_piece(0, None, None, ":1}"), call_piece(0, "b", "g", '{"y":2}')], TWO),
        (
            [call_piece(0, "a", "f"), call_piece(0, "b", "g"), call_piece(0, "a", None, '{"x":1}'),
             call_piece(0, "b", None, '{"y":2}')],
            TWO,
        ),
        ([call_piece(0, "a", "f", {"x": 1}), call_piece(0, "b", "g", {"y": 2})], TWO),
        ([call_piece(0, "a", "f", '{"x"'), call_piece(0, "a", "f", ":1}"), call_piece(1, "b", "g", '{"y":2}')], TWO),
        # One maker's second piece has another id, and no name.
        ([call_piece(0, "a", "f", '{"x"'), call_piece(0, "z", None, ":1}"), call_piece(1, "b", "g", '{"y":2}')], TWO),
        ([call_piece(0, 1, "f", "{}"), call_piece(0, 2, "f", "{}")], [("1", "f", "{}"), ("2", "f", "{}")]),
        ([{"index": 0, "id": "a", "name": "f", "arguments": {"x": 1}}], TWO[:1]),
        ([call_piece(0, "a", "f", '{"x"'), call_piece(0, None, "f", ":"), call_piece(0, "", "f", "1}")], TWO[:1]),
    ],
)  # fmt: skip
async def test_each_streamed_tool_call_is_one_with_its_id_and_name_once(pieces: Any, calls: Any) -> None:
    for events in ([calling(*pieces)], [calling(piece) for piece in pieces]):
        if len(events) == 1 and pieces[0].get("index") is None:
            continue  # where none has an index, its place in the list is one
        answer, asked = await stream("openai", events_of(*events, said(reason="tool_calls"), f"data: {DONE}"))
        assert told_calls(asked) == calls
        assert isinstance(answer, Answer)
        output: Any = answer.output
        kept = [(str(one["id"]), one["function"]["name"]) for one in output["tool_calls"]]
        assert kept == [(own, name) for own, name, _ in calls]


@each_row("missing", [None, "", {"a": 1}, False])
async def test_a_call_without_an_id_is_given_one_and_the_record_keeps_what_came(missing: Any) -> None:
    pieces = [
        {**call_piece(0, None, "f", {"x": 1}), "id": missing},
        {**call_piece(0, None, "f", {"x": 2}), "id": missing},
    ]
    answer, asked = await stream("openai", events_of(*map(calling, pieces), said(reason="stop")))
    first, second = told_calls(asked)
    assert (first[1:], second[1:]) == (("f", '{"x":1}'), ("f", '{"x":2}'))
    assert first[0].startswith("call_")
    assert first[0] != second[0]
    assert isinstance(answer, Answer)
    output: Any = answer.output
    assert [(one.get("id"), one["function"]["arguments"]) for one in output["tool_calls"]] == [
        (missing, {"x": number}) for number in (1, 2)
    ]


async def test_blocks_of_one_index_are_two_calls() -> None:
    def use(own: str, name: str, *parts: Any, given: Any = None) -> list[dict[str, Any]]:
        block = {"type": "tool_use", "id": own, "name": name, "input": given or {}}
        deltas = [{"type": "input_json_delta", "partial_json": part} for part in parts]
        return [
            {"type": "content_block_start", "index": 0, "content_block": block},
            *({"type": "content_block_delta", "index": 0, "delta": delta} for delta in deltas),
            {"type": "content_block_stop", "index": 0},
        ]

    uses = [*use("a", "f", '{"x"', ":1}"), *use("b", "g", {"y": 2}), *use("c", "h", given={"z": 3}), *use("d", "now")]
    answer, asked = await stream("anthropic", events_of(*uses, {"type": "message_stop"}))
    calls = [*TWO, ("c", "h", '{"z":3}'), ("d", "now", "{}")]
    assert told_calls(asked) == calls
    assert isinstance(answer, Answer)
    output: Any = answer.output
    functions = [(one["id"], one["function"]["name"], one["function"]["arguments"]) for one in output["tool_calls"]]
    assert functions == calls


@pytest.mark.parametrize(
    "content", [THOUGHT, [*THOUGHT, {"type": "text", "text": "It "}], {"type": "text", "text": "It "}]
)
async def test_thinking_stands_apart_and_text_is_kept(content: Any) -> None:
    text = "It is." if "It " in json.dumps(content) else "is."
    answer, asked = await stream("openai", events_of(said({"content": content}), said({"content": "is."}, "stop")))
    assert isinstance(answer, Answer)
    assert (answer.output, asked.text) == (text, text)
    thought = "".join(one["choices"][0]["delta"].get("reasoning_content", "") for one in asked.chunks)
    assert thought == ("Well, " if "Well" in json.dumps(content) else "")
    if isinstance(content, list):
        message = {"content": [*content, {"type": "text", "text": "is."}]}
        answer = await whole("openai", {"choices": [{"message": message, "finish_reason": "stop"}]})
        assert isinstance(answer, Answer)
        assert answer.output == text


PASSED_OVER = [
    "data:",
    "data: ",
    "data",
    "data: null",
    "data: {}",
    ": a comment",
    "event: ping\ndata: now",
    "event: ping",
    "id: 7\nretry: 10\nx-field: y\nbare",
    {"type": "ping"},
    {"id": "a1"},
    {"choices": None},
    {"choices": []},
]


@each_row("event", PASSED_OVER)
@each_row("kind", ["openai", "anthropic"])
async def test_what_means_nothing_is_passed_over(kind: str, event: Any) -> None:
    if kind == "openai":
        events = [said({"content": "hi"}), event, said({"content": " there"}, "stop"), f"data: {DONE}"]
    else:
        delta = {"type": "content_block_delta", "index": 0}
        events: list[Any] = [
            {**delta, "delta": {"type": "text_delta", "text": "hi"}},
            event,
            {**delta, "delta": {"type": "text_delta", "text": " there"}},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
        ]
    answer, asked = await stream(kind, events_of(*events))
    assert isinstance(answer, Answer)
    assert (answer.output, asked.text) == ("hi there", "hi there")


@pytest.mark.parametrize("more", [{}, {"choices": None}, {"choices": []}])
async def test_usage_counts_in_an_event_without_choices(more: dict[str, Any]) -> None:
    answer, asked = await stream("openai", events_of(said({"content": "hi"}, "stop"), {**more, "usage": USAGE}))
    assert isinstance(answer, Answer)
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (5, 7)
    assert asked.chunks[-1] == {"choices": [], "usage": USAGE}


@each_row(
    ("kind", "events", "end", "output"),
    [
        ("openai", [said({"content": "hi"}, ""), f"data: {DONE}"], "\n\n", "hi"),
        ("openai", [said({"content": "hi"}), f"data: {DONE}"], "\n\n", "hi"),
        ("openai", [said({"content": "hi"}), f"data:{DONE} "], "\n", "hi"),
        ("openai", [said({"content": "hi"}), f"data: {DONE}"], "", "hi"),
        ("openai", [said({"content": "hi"}, "stop")], "", "hi"),
        ("openai", [said({"content": "hi"}, "stop"), 'data: {"choices": [{"del'], "", "hi"),
        ("openai", [{"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}], "\n\n", "hi"),
        ("openai", [said({"content": "hi"}, "")], "\n\n", None),
        ("openai", [said({"content": "hi"}, "null")], "\n\n", None),
        ("openai", [said({"content": "hi"}, 7)], "\n\n", None),
        ("openai", [said({"content": "hi"})], "\n\n", None),
        ("anthropic", [{"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hi"}},
                       {"type": "message_stop"}], "\n\n", "hi"),
        ("anthropic", [{"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hi"}},
                       {"type": "message_delta", "delta": {"stop_reason": ""}}], "\n\n", None),
    ],
)  # fmt: skip
async def test_a_stream_is_whole_by_its_mark_or_by_its_reason(
    kind: str, events: Any, end: str, output: str | None
) -> None:
    # An event that is not ended may go on where the connection breaks.
    for cut in [False, True] if end == "\n\n" else [False]:
        answer, asked = await stream(kind, events_of(*events, end=end), cut=cut)
        assert asked.text == "hi"
        if output is not None:
            assert isinstance(answer, Answer)
            assert answer.output == output
        else:
            assert isinstance(answer, CallError)
            assert answer.maybe_billed


NO_GOOD = (
    *("malformed_function_call", "MALFORMED_FUNCTION_CALL", "function_call_filter: MALFORMED_FUNCTION_CALL", "error"),
    *("FinishReason.ERROR", "malformed-tool-use", "network_error"),
)


@each_row("word", NO_GOOD)
async def test_a_reason_that_an_answer_is_no_good_for_fails_it_and_no_client_is_told_an_end(word: str) -> None:
    text = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hi"}}
    streams = {
        "openai": [said({"content": "hi"}), said({}, word), f"data: {DONE}"],
        "anthropic": [text, {"type": "message_delta", "delta": {"stop_reason": word}}, {"type": "message_stop"}],
    }
    bodies = {
        "openai": {"choices": [{"message": {"content": "hi"}, "finish_reason": word}]},
        "anthropic": {"content": [{"type": "text", "text": "hi"}], "stop_reason": word},
    }
    for kind, events in streams.items():
        failed, asked = await stream(kind, events_of(*events))
        told = [choice["finish_reason"] for chunk in asked.chunks for choice in chunk["choices"]]
        assert not any(told)
        for one in (failed, await whole(kind, bodies[kind])):
            assert isinstance(one, CallError)
            assert isinstance(one.failure, BrokenAnswer)


@pytest.mark.parametrize(
    ("kind", "body", "events"),
    [
        ("openai", {"choices": [{"message": {"content": ""}, "finish_reason": "stop"}]},
         [said({"content": ""}, "stop")]),
        ("anthropic", {"content": [], "stop_reason": "end_turn"},
         [{"type": "message_delta", "delta": {"stop_reason": "end_turn"}}]),
        ("anthropic", {"content": [{"type": "text", "text": ""}], "stop_reason": "end_turn"},
         [{"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
          {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}]),
    ],
)  # fmt: skip
async def test_an_empty_text_is_no_answer(kind: str, body: Any, events: Any) -> None:
    streamed, _ = await stream(kind, events_of(*events))
    for failed in (streamed, await whole(kind, body)):
        assert isinstance(failed, CallError)
        assert isinstance(failed.failure, EmptyAnswer)
        assert failed.finish_reason == "stop"


@each_row("depth", [160, 250, 900, 100_000])
@each_row("kind", ["openai", "anthropic"])
async def test_what_is_nested_too_deeply_is_a_broken_answer(kind: str, depth: int) -> None:
    deep = "[" * depth + "]" * depth
    streamed, _ = await stream(kind, f'data: {{"choices": [], "x": {deep}}}\n\n'.encode())
    for failed in (streamed, await whole(kind, f'{{"choices": [], "x": {deep}}}'.encode())):
        assert isinstance(failed, CallError)
        assert isinstance(failed.failure, BrokenAnswer)
        assert "nested deeper" in failed.failure.message or "not JSON" in failed.failure.message


async def test_an_event_named_error_is_one() -> None:
    body = events_of(
        said({"content": "hi"}), 'event: error\ndata: {"message": "too much", "code": 529}', f"data: {DONE}"
    )
    failed, _ = await stream("openai", body)
    assert isinstance(failed, CallError)
    assert failed.failure == HttpFailure(529, "too much", "529")
