"""When an answer is one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.reports.case import COST, OSLO, ROME, SOME, Case, among, bad, each, good, tools, ways, without
from tests.reports.wire import (
    DONE,
    READ,
    TEXT,
    USED,
    Event,
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
    used,
)


def cases() -> Iterator[Case]:
    """All of them."""
    yield from _calls()
    yield from _parts()
    yield from _ends()
    yield from _events()
    yield from _empty()
    yield from _reasons()


def _calls() -> Iterator[Case]:
    row = "parallel tool calls are as many as their ids"
    both = tools(OSLO, ROME, finish="tool_calls")
    one, two = call(index=0), call('{"city": "Rome"}', "book", id="call_2", index=0)
    rest = {"index": 0, "function": {"arguments": 'y": "Oslo"}'}}
    for name, reply in (
        ("same-index", calls([one], [two])),
        ("same-index-at-once", calls([one, two])),
        ("no-index", calls([without(one, "index")], [without(two, "index")])),
        ("no-index-at-once", calls([without(one, "index"), without(two, "index")])),
        ("null-index", calls([{**one, "index": None}], [{**two, "index": None}])),
        ("same-index-in-pieces", calls([{**call('{"cit'), "index": 0}], [rest], [two])),
        ("own-index", calls([one], [{**two, "index": 1}])),
        ("index-of-bool", calls([{**one, "index": False}], [{**two, "index": True}])),
    ):
        yield Case(row, f"calls-{name}", [reply], both, stream=True)
    code = '{"code": "if (a) {b()}{c()}"}'
    cut = code.index("}{") + 1
    pieces = calls(*([{**call(piece), "index": 0}] for piece in (code[:cut], code[cut:])))
    yield Case(row, "calls-named-again", [pieces], tools(("find", code), finish="tool_calls"), stream=True)
    twice = calls(*([{**call(), "index": 0, "id": "find"}] for _ in range(2)))
    yield Case(row, "calls-same-id-and-name", [twice], tools(OSLO, OSLO, finish="tool_calls"), stream=True)
    first, second = block(tool(), 0, [partial(OSLO[1])]), block(tool(name="book", id="toolu_2"), 0, [partial(ROME[1])])
    yield Case(row, "calls-same-index-anthropic", [events(*first, *second, stop="tool_use")], both, "anthropic", True)
    plain = chat(None, finish="tool_calls", tool_calls=[one, two])
    yield Case(row, "calls-plain", [plain], both)


def _parts() -> Iterator[Case]:
    row = "content as parts: the text is kept, thinking apart"
    thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}
    parts = [thinking, {"type": "text", "text": TEXT}]
    for name, reply in (
        ("thinking", said([thinking], TEXT)),
        ("thinking-closed", said([{**thinking, "closed": True}], TEXT[:9], TEXT[9:])),
        ("text-parts", said([{"type": "text", "text": TEXT[:9]}], [{"type": "text", "text": TEXT[9:]}])),
        ("text-then-parts", said(TEXT[:9], [{"type": "text", "text": TEXT[9:]}])),
        ("both-at-once", said(parts)),
    ):
        yield Case(row, f"parts-{name}", [reply], good(), stream=True)
    yield Case(row, "parts-plain", [chat(parts)], good())
    yield Case(row, "parts-plain-text", [chat([{"type": "text", "text": TEXT}])], good())
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    yield from each(
        row,
        "parts",
        good(),
        anthropic=message(thought, TEXT),
        anthropic_streamed=events(*block(thought, 0, [{"type": "thinking_delta", "thinking": "Hm."}]), *block(index=1)),
    )


def _ends() -> Iterator[Case]:
    row = "an end without a reason: a break without [DONE], and success with it"
    half = {"calls": 1, "fallback": 0, "status": "dead_lettered", "kind": "server", "basis": "estimated", "cost": SOME}
    half |= {"text": TEXT, "counted": True, "foreign": None}
    for name, finish in (("empty", ""), ("null", None)):
        reply = stream(chunk(content=TEXT), chunk(finish=finish), done=False)
        yield Case(row, f"end-{name}", [reply], half, stream=True)
        reply = stream(chunk(content=TEXT), chunk(finish=finish), used())
        yield Case(row, f"end-{name}-done", [reply], good(), stream=True)
    yield Case(row, "end-none-done", [said(finish=None)], good(), stream=True)
    yield Case(
        row, "end-none-done-no-usage", [said(finish=None, usage=None)], good(basis="estimated", cost=SOME), stream=True
    )
    yield Case(row, "end-none", [said(finish=None, usage=None, done=False)], half, stream=True)
    yield Case(row, "end-reason-no-done", [said(done=False)], good(finish="stop"), stream=True)
    yield Case(row, "end-none-tools", [calls([call()], finish=None)], tools(OSLO), stream=True)
    yield Case(row, "end-none-nothing", [stream(chunk(role="assistant"))], bad(2, "server", cost=SOME), stream=True)
    for name, stop, end, expected in (
        ("end-anthropic-empty", "", False, half | {"basis": SOME}),
        ("end-anthropic-null", None, False, half | {"basis": SOME}),
        ("end-anthropic-stop", None, True, good()),
        ("end-anthropic-empty-stop", "", True, good()),
        ("end-anthropic-reason", "end_turn", False, good()),
    ):
        yield Case(row, name, [events(*block(), stop=stop, end=end)], expected, "anthropic", stream=True)
    bare = Reply((started(), *block(), {"type": "message_stop"}))
    yield Case(row, "end-anthropic-no-delta", [bare], good(cost=SOME, basis="estimated"), "anthropic", stream=True)


def _events() -> Iterator[Case]:
    row = "what means nothing in a stream is passed over, and usage in it counts"
    first, last = chunk(content=TEXT[:9]), (chunk(content=TEXT[9:]), chunk(finish="stop"))
    no_choices = {"id": "chatcmpl-1", "object": "chat.completion.chunk"}
    odd: Sequence[tuple[str, Event]] = (
        ("no-choices", no_choices),
        ("null-choices", {**no_choices, "choices": None}),
        ("empty-data", "data:\n\n"),
        ("empty-data-blank", "data: \n\n"),
        ("ping", 'event: ping\ndata: {"type": "ping"}\n\n'),
        ("ping-text", "event: ping\ndata: 2026-11-25\n\n"),
        ("comment", ": OPENROUTER PROCESSING\n\n"),
        ("fields", "id: 7\nretry: 3000\nx-unknown: y\n\n"),
        ("event-name", "event: keepalive\n\n"),
        ("filters", {**no_choices, "choices": [], "prompt_filter_results": [{"prompt_index": 0}]}),
        ("empty-object", {}),
        ("error-blank", {**no_choices, "choices": [{"index": 0, "delta": {}}], "error": {"message": "", "code": None}}),
        ("error-null", {**no_choices, "choices": [], "error": None}),
        ("null-delta", {**no_choices, "choices": [{"index": 0, "delta": None, "finish_reason": None}]}),
        ("null", "data: null\n\n"),
    )
    for name, event in odd:
        yield Case(row, f"event-{name}", [stream(first, event, *last, used())], good(), stream=True)
        yield Case(row, f"event-{name}-first", [stream(event, first, *last, used())], good(), stream=True)
    for name, event in (
        ("no-choices", {**no_choices, "usage": USED}),
        ("null-choices", {**no_choices, "choices": None, "usage": USED}),
        ("timing", {**no_choices, "usage": USED, "x_groq": {"id": "req_1"}}),
    ):
        yield Case(row, f"event-usage-{name}", [stream(first, *last, event)], good(tokens=(100, 50, None)), stream=True)
        yield Case(row, f"event-usage-{name}-no-done", [stream(first, *last, event, done=False)], good(), stream=True)
    lines = stream(first, *last, used()).data()
    for name, data in (
        ("crlf", lines.replace(b"\n", b"\r\n")),
        ("cr", lines.replace(b"\n", b"\r")),
        ("mark", b"\xef\xbb\xbf" + lines),
        ("no-blank", lines.replace(b"data: ", b"data:")),
        ("unended", lines.rstrip()),
    ):
        yield Case(row, f"event-{name}", [Reply((data.decode(),))], good(), stream=True)
    # A server that streams unasked, or whose stream has another type.
    for streamed in (False, True):
        name = f"event-as-json{'-streamed' if streamed else ''}"
        yield Case(row, name, [Reply(lines)], good(), stream=streamed)
        messages = [Reply(events(*block()).data())]
        yield Case(row, f"{name}-anthropic", messages, good(), "anthropic", stream=streamed)
    limit = b'data: {"error": {"message": "Rate limit reached for requests", "code": "rate_limit_exceeded"}}\n\n'
    yield Case(row, "event-as-json-error", [Reply(limit)], bad(2, "rate_limit", counted=False))
    blank = {"message": "", "type": "", "param": "", "code": None}
    yield Case(row, "event-error-blank-plain", [chat(more={"error": blank})], good())
    for name, event in odd[2:9]:
        start, *rest = events(*block()).body
        assert isinstance(start, dict)
        yield Case(row, f"event-{name}-anthropic", [Reply((start, event, *rest))], good(), "anthropic", stream=True)
    for name, event in (("unknown", {"type": "content_block_note", "index": 0}), ("no-type", {"note": 1})):
        yield Case(row, f"event-{name}-anthropic", [events(event, *block(), event)], good(), "anthropic", stream=True)
    done = Reply((*events(*block()).body, DONE))
    yield Case(row, "event-done-anthropic", [done], good(), "anthropic", stream=True)


def _empty() -> Iterator[Case]:
    row = "an empty answer is an error"
    empty = bad(2, "server", cost=COST, **{"class": "EmptyAnswerError"})
    yield from each(
        row,
        "empty",
        empty,
        plain=chat(""),
        streamed=said(""),
        anthropic=message("", usage=READ),
        anthropic_streamed=events(*block("")),
    )
    yield Case(row, "empty-null", [chat(None)], empty)
    yield Case(row, "empty-parts", [chat([])], empty)
    yield Case(row, "empty-text-part", [chat([{"type": "text", "text": ""}])], empty)
    yield Case(row, "empty-no-tools", [chat("", tool_calls=[])], empty)
    yield Case(row, "empty-refusal-null", [chat("", refusal=None)], empty)
    yield Case(
        row,
        "empty-role",
        [stream(chunk(role="assistant", content=""), chunk(finish="stop"), used())],
        empty,
        stream=True,
    )
    yield Case(row, "empty-anthropic-no-blocks", [Reply({**message().body, "content": []})], empty, "anthropic")  # type: ignore[dict-item]
    yield Case(row, "empty-anthropic-streamed-none", [events()], empty, "anthropic", stream=True)
    yield Case(
        row, "empty-then-text", [chat(""), chat()], {"calls": 2, "fallback": 0, "output": TEXT, "total": 2 * COST}
    )
    yield Case(row, "empty-with-call", [chat("", finish="tool_calls", tool_calls=[call()])], tools(OSLO))
    yield Case(row, "empty-thought", [chat("", reasoning_content="Hm.")], empty)
    thought = stream(chunk(reasoning_content="Hm."), chunk(finish="stop"), used())
    yield Case(row, "empty-thought-streamed", [thought], {"class": "EmptyAnswerError", "cost": COST}, stream=True)
    allowed = good("", kind=None) | {"text": among(None, "")}
    for way, reply, how in ways({"plain": chat(""), "streamed": said(""), "anthropic": message("")}):
        yield Case(row, f"empty-allowed-{way}", [reply], allowed, agent={"on_empty_answer": "accept"}, **how)
    filtered = bad(1, "client", cost=COST, **{"class": "ContentFilteredError"})
    yield Case(row, "empty-filtered", [chat("", finish="content_filter")], filtered)
    yield Case(
        row, "empty-length", [chat("", finish="length")], bad(1, "client", cost=COST, **{"class": "OutputLimitError"})
    )


def _reasons() -> Iterator[Case]:
    row = "a finish reason that says the answer is no good"
    for word in (
        "malformed_function_call",
        "MALFORMED_FUNCTION_CALL",
        "function_call_filter: MALFORMED_FUNCTION_CALL",
        "error",
        "unexpected_tool_call",
        "malformed_tool_use",
        "malformed_model_output",
        "time_limit",
    ):
        name, again = word.lower().replace("_", "-").replace(": ", "-"), bad(2, "server", cost=SOME)
        name += "-upper" if word.isupper() else ""
        streamed = stream(chunk(role="assistant", content=""), chunk(finish=word), used())
        yield from each(row, f"finish-{name}", again, plain=chat("", finish=word), streamed=streamed)
        yield Case(row, f"finish-{name}-text", [chat("I will", finish=word)], again)
    yield Case(
        row, "finish-error-anthropic", [message("I will", stop="error")], bad(2, "server", cost=SOME), "anthropic"
    )
    inside = {"index": 0, "error": {"code": 502, "message": "Provider disconnected"}, "finish_reason": "error"}
    again = {"calls": 2, "fallback": 1, "kind": "server", "counted": True}
    yield Case(row, "finish-error-inside", [Reply({"choices": [{**inside, "message": {"content": ""}}]})], again)
    beside = {**inside, "delta": {"content": ""}}
    yield Case(row, "finish-error-inside-streamed", [stream({"choices": [beside]})], again, stream=True)
    for word in ("stop", "end_turn", "STOP", "eos", "COMPLETE"):
        yield Case(row, f"finish-{word}", [chat(finish=word)], good(finish="stop"))
