"""Odd shapes of what came: no crash, and what a client is given is well-formed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tests.reports.case import (
    OSLO,
    ROME,
    SOME,
    Case,
    Check,
    among,
    each,
    tools,
    ways,
    without,
)
from tests.reports.wire import (
    TEXT,
    Body,
    Reply,
    block,
    call,
    calls,
    chat,
    chunk,
    events,
    message,
    partial,
    said,
    started,
    stream,
    tool,
)

ODD: Sequence[tuple[str, Any]] = (
    ("object", {"a": {"b": [1]}}),
    ("list", [1, None, {"a": 1}]),
    ("number", -1e308),
)


def _in_each_place() -> Iterator[tuple[str, str, str, Reply]]:
    """An odd value in each place of what comes, in both dialects: each value in a third of the places."""
    for kind in ("delta", "call", "answer", "anthropic"):
        replies = [[(name, place, reply) for place, reply in _at(kind, odd)] for name, odd in ODD]
        for number, same_place in enumerate(zip(*replies, strict=True)):
            yield kind, *same_place[number % len(ODD)]


def _at(kind: str, odd: Any) -> Iterator[tuple[str, Reply]]:
    match kind:
        case "delta":
            for name in ("content", "role", "tool_calls", "refusal", "reasoning_content", "function_call"):
                yield f"streamed-{name}", stream(chunk(content="a"), chunk(**{name: odd}), chunk(finish="stop"))
        case "call":
            for name in ("id", "index", "type", "function"):
                yield f"streamed-call-{name}", calls([{**call(), "index": 0, name: odd}])
            yield "streamed-name", calls([{**call(name=odd), "index": 0}])
            yield "streamed-arguments", calls([{**call(odd), "index": 0}])
            yield "name", chat(None, finish="tool_calls", tool_calls=[call(name=odd)])
            yield "calls", chat(None, finish="tool_calls", tool_calls=odd)
        case "answer":
            for name in ("choices", "usage", "model", "created", "object"):
                yield name, chat(more={name: odd})
                yield f"streamed-{name}", stream(chunk(content="a") | {name: odd}, chunk(finish="stop"))
            yield "message", Reply({"choices": [{"index": 0, "message": odd, "finish_reason": "stop"}]})
            yield "finish", chat(finish=odd)
            yield "streamed-finish", said(finish=odd)
            yield "streamed-choice", stream({"choices": [odd]}, chunk(content="a"), chunk(finish="stop"))
            yield "streamed-delta", stream({"choices": [{"index": odd, "delta": odd}]}, chunk(finish="stop"))
            yield "tokens", chat(usage={"prompt_tokens": odd, "completion_tokens": odd, "prompt_tokens_details": odd})
        case _:
            for name in ("content", "usage", "stop_reason", "model", "id"):
                yield f"anthropic-{name}", message(**{"usage" if name == "usage" else "x": odd, name: odd})
            for name in ("type", "text"):
                yield f"anthropic-block-{name}", message({"type": "text", "text": TEXT, name: odd})
            for name in ("id", "name", "input"):
                yield f"anthropic-tool-{name}", message(tool() | {name: odd})
                yield f"anthropic-streamed-tool-{name}", events(*block(tool() | {name: odd}, pieces=()))
            yield "anthropic-streamed-block", events({"type": "content_block_start", "index": 0, "content_block": odd})
            yield "anthropic-streamed-index", events(*block(index=odd))
            yield "anthropic-streamed-delta", events(*block(pieces=[odd]))
            yield "anthropic-streamed-text", events(*block(pieces=[{"type": "text_delta", "text": odd}]))
            yield "anthropic-streamed-json", events(*block(tool(), pieces=[partial(odd)]))
            yield "anthropic-streamed-start", events(*block(), start=odd)
            yield "anthropic-streamed-used", events(*block(), delta=odd)
            yield "anthropic-streamed-stop", events(*block(), stop=odd)
            yield "anthropic-streamed-message", events({"type": "message_start", "message": odd}, *block())


def cases() -> Iterator[Case]:
    """All of them."""
    yield from _crashes()
    yield from _given()
    yield from _foreign()


def _crashes() -> Iterator[Case]:
    row = "nothing crashes the handler"
    for kind, name, place, reply in _in_each_place():
        how: dict[str, Any] = {"dialect": "anthropic" if kind == "anthropic" else "openai"}
        status = Check("an end", lambda found: found in {"succeeded", "dead_lettered"})
        expected: Body = {"lost": False, "status": status, "malformed": [], "foreign": None}
        yield Case(row, f"odd-{name}-{place}", [reply], expected, stream="streamed" in place, **how)
    asked = tools(OSLO, finish="tool_calls")
    yield Case(row, "arguments-object-streamed", [calls([{**call({"city": "Oslo"}), "index": 0}])], asked, stream=True)
    yield Case(row, "arguments-object", [chat(None, finish="tool_calls", tool_calls=[call({"city": "Oslo"})])], asked)
    for name, given in (("null", None), ("empty", "")):
        plain = chat(None, finish="tool_calls", tool_calls=[call(given)])
        none: Body = {"status": "succeeded", "lost": False, "malformed": [], "calls": 1}
        yield from each(row, f"arguments-{name}", none, plain=plain, streamed=calls([{**call(given), "index": 0}]))


def _given() -> Iterator[Case]:
    row = "tool calls on /v1: texts, ids and indexes, and names once"
    one = tools(OSLO)
    plain = call()
    for name, given in (
        ("no-id", without(plain, "id")),
        ("null-id", {**plain, "id": None}),
        ("empty-id", {**plain, "id": ""}),
        ("number-id", {**plain, "id": 7}),
        ("no-type", without(plain, "type")),
        ("object", call({"city": "Oslo"})),
        ("index-text", {**plain, "index": "0"}),
    ):
        answer = chat(None, finish="tool_calls", tool_calls=[given])
        yield from each(row, f"given-{name}", one, plain=answer, streamed=calls([{"index": 0, **given}]))
    kept = Check("an object", lambda found: [one["arguments"] for one in found] == [{"city": "Oslo"}])
    yield Case(
        row,
        "given-object-kept",
        [chat(None, finish="tool_calls", tool_calls=[call({"city": "Oslo"})])],
        {**one, "kept": kept},
    )
    pieces = [[{**call('{"city"', index=0)}], [{**call(': "Oslo"}', index=0)}]]
    yield Case(row, "given-repeated", [calls(*pieces)], one, stream=True)
    named = [[call('{"city"', index=0)], [{"index": 0, "function": {"name": "find", "arguments": ': "Oslo"}'}}]]
    yield Case(row, "given-name-repeated", [calls(*named)], one, stream=True)
    empty = [[call('{"city"', index=0)], [{"index": 0, "id": "", "function": {"name": "", "arguments": ': "Oslo"}'}}]]
    yield Case(row, "given-name-empty", [calls(*empty)], one, stream=True)
    null = [
        [call('{"city"', index=0)],
        [{"index": 0, "id": None, "function": {"name": None, "arguments": ': "Oslo"}'}}],
    ]
    yield Case(row, "given-name-null", [calls(*null)], one, stream=True)
    yield Case(row, "given-no-index", [calls([call()])], one, stream=True)
    two = tools(OSLO, ROME)
    nameless = [without(call(), "id"), without(call(ROME[1], "book"), "id")]
    yield Case(row, "given-two-without-ids", [chat(None, finish="tool_calls", tool_calls=nameless)], two)
    same = [call(), call(ROME[1], "book")]
    yield Case(row, "given-two-with-one-id", [chat(None, finish="tool_calls", tool_calls=same)], two)
    for name, given in (("no-id", without(tool({"city": "Oslo"}), "id")), ("input-text", tool('{"city": "Oslo"}'))):
        yield Case(row, f"given-anthropic-{name}", [message(given, stop="tool_use")], one, "anthropic")
    streamed = events(*block(tool({"city": "Oslo"}), pieces=()), stop="tool_use")
    yield Case(row, "given-anthropic-at-start", [streamed], one, "anthropic", stream=True)


def _foreign() -> Iterator[Case]:
    row = "no words of others' exceptions reach a client"
    ended = {"status": "dead_lettered", "foreign": None, "calls": 2, "http": among(502, 504)}
    cut = Reply(chat().data()[:80], headers={"Content-Length": "400"}, cut=True)
    for name, reply in (
        ("cut", cut),
        ("cut-at-once", Reply(b"", headers={"Content-Length": "400"}, cut=True)),
        ("no-json", Reply(b"<html>ok</html>")),
        ("half-json", Reply(chat().data()[:80])),
        ("bytes", Reply(b"\xff\xfe\x00\x01")),
        ("list", Reply(b"[1, 2]")),
        ("nothing", Reply(b"")),
        ("deep", Reply(b"[" * 300 + b"]" * 300)),
    ):
        # An answer that can't be stored is not asked for again.
        expected = {**ended, "calls": 1} if name == "deep" else ended
        yield Case(row, f"foreign-{name}", [reply], expected, fallback=False)
        yield Case(row, f"foreign-{name}-anthropic", [reply], expected, "anthropic", fallback=False)
    half = {"status": "dead_lettered", "foreign": None, "calls": 1, "text": "The ferry ", "cost": SOME}
    for way, reply, how in ways(
        {
            "streamed": stream(chunk(content="The ferry "), cut=True, done=False),
            "streamed-json": stream(chunk(content="The ferry "), "data: {no json\n\n"),
            "streamed-anthropic": Reply((started(), *block("The ferry ")[:2]), cut=True),
            "streamed-anthropic-json": Reply((started(), *block("The ferry ")[:2], "data: {no json\n\n")),
        }
    ):
        yield Case(row, f"foreign-{way}", [reply], half, fallback=False, **how)
