"""Any answer in a stream of Anthropic's events: an SDK puts the stored message together of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from breakwater.calls.providers.anthropic_stream import MessageEvents
from breakwater.dialects.rules.chat_chunks import Assembly, Chunk
from breakwater.dialects.rules.messages import UNSIGNED, message_of
from breakwater.dialects.rules.messages_stream import MessageStream
from breakwater.jobs.rules.chat_messages import fields
from breakwater.prices.rules.usage import of_message
from tests.anthropic_client import accumulated, blocks_of
from tests.any_answers import JSON
from tests.helpers import more_examples
from tests.tables import each_row

RESULT: dict[str, Any] = {
    "execution_id": "j1",
    "job_id": "j1",
    "agent": "writer",
    "status": "succeeded",
    "completed_at": "2026-01-01T00:00:00.000Z",
    "attempts": [],
}
TEXTS = st.text(st.sampled_from('ab {}[]":,\\1n\n'), max_size=6)


def chunk(delta: dict[str, Any], reason: str | None = None) -> Chunk:
    return {"id": "c", "model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def of_chat(chunks: Sequence[Chunk]) -> tuple[list[Chunk], dict[str, Any]]:
    """The chunks as a worker publishes them, and the result."""
    answer = Assembly("j1")
    shown = [answer.add(one) for one in chunks]
    return shown, {**RESULT, "response": answer.completion()}


def of_events(events: Sequence[dict[str, Any]]) -> tuple[list[Chunk], dict[str, Any]]:
    """The same of a provider that speaks Messages."""
    reader, answer = MessageEvents(of_message, native=True), Assembly("j1")
    shown = [answer.add(one) for event in events for one in reader.read(event)]
    return shown, {**RESULT, "response": reader.answer()}


def streamed(chunks: Sequence[Chunk], result: dict[str, Any], batch: int = 1, until: int | None = None) -> Any:
    """What an SDK makes of a stream. `until`: so many chunks came, and the rest was missed."""
    stream = MessageStream("j1")
    seen = chunks[:until]
    events = [event for at in range(0, len(seen), batch) for event in stream.feed(seen[at : at + batch])]
    rest = stream.end(result)
    assert rest is not None, "another answer was begun"
    return accumulated(json.loads(json.dumps([*events, *rest])))


def call(index: int, arguments: str, **first: str) -> dict[str, Any]:
    named: dict[str, Any] = {"name": first["name"]} if "name" in first else {}
    own = {"id": first["id"], "type": "function"} if "id" in first else {}
    return {"tool_calls": [{"index": index, **own, "function": {**named, "arguments": arguments}}]}


THINKING: dict[str, Any] = {"type": "thinking", "thinking": "Well", "signature": UNSIGNED}


_CHATS: list[tuple[list[dict[str, Any]], list[dict[str, Any]], str]] = [
    ([{"content": "Hello"}, {"content": " you"}], [{"type": "text", "text": "Hello you"}], "end_turn"),
    (
        [{"reasoning_content": "We"}, {"reasoning_content": "ll"}, {"content": "Hi"}],
        [THINKING, {"type": "text", "text": "Hi"}],
        "end_turn",
    ),
    (
        [{"content": "Hi"}, call(0, "", id="call_1", name="f"), call(0, '{"a":'), call(0, "1}")],
        [{"type": "text", "text": "Hi"}, {"type": "tool_use", "id": "call_1", "name": "f", "input": {"a": 1}}],
        "tool_use",
    ),
    (
        [call(0, '{"a":', id="call_1", name="f"), call(1, "{}", id="call_2", name="g"), call(0, "1}")],
        [
            {"type": "tool_use", "id": "call_1", "name": "f", "input": {"a": 1}},
            {"type": "tool_use", "id": "call_2", "name": "g", "input": {}},
        ],
        "tool_use",
    ),
    (
        [call(0, "{}", id="call_1", name="f"), {"content": "after"}],
        [{"type": "tool_use", "id": "call_1", "name": "f", "input": {}}, {"type": "text", "text": "after"}],
        "tool_use",
    ),
    ([{"refusal": "No"}], [{"type": "text", "text": "No"}], "end_turn"),
]


@each_row(("deltas", "content", "reason"), _CHATS)
@each_row("batch", [1, 9])
def test_chunks_become_blocks_one_after_the_other(
    deltas: list[dict[str, Any]], content: list[dict[str, Any]], reason: str, batch: int
) -> None:
    chunks, result = of_chat([*map(chunk, deltas), chunk({}, "stop")])
    message = streamed(chunks, result, batch)
    assert (message["stop_reason"], message["id"], message["model"]) == (reason, "msg_j1", "m")
    assert blocks_of(message) == content


def test_texts_and_inputs_are_sent_while_they_come() -> None:
    stream = MessageStream("j1")
    first = stream.feed(
        [chunk({"role": "assistant", "content": ""}), chunk({"content": "Hel"}), chunk({"content": "lo"})]
    )
    assert [event["type"] for event in first] == ["message_start", "content_block_start", "content_block_delta"]
    assert first[-1]["delta"] == {"type": "text_delta", "text": "Hello"}, "pieces that came together are sent together"
    then = stream.feed([chunk(call(0, '{"a":', id="call_1", name="f")), chunk(call(0, ' "b'))])
    assert [event["type"] for event in then] == ["content_block_stop", "content_block_start", "content_block_delta"]
    assert then[-1]["delta"] == {"type": "input_json_delta", "partial_json": '{"a": "b'}


def test_an_answer_that_was_not_streamed_is_sent_whole() -> None:
    _, result = of_chat([chunk({"reasoning_content": "Well", "content": "Hi"}), chunk(call(0, "{}", id="1", name="f"))])
    assert streamed([], result) == message_of(result)


def test_no_message_is_ended_that_was_begun_as_another() -> None:
    chunks, _ = of_chat([chunk({"content": "One"})])
    _, other = of_chat([chunk({"content": "Two"}), chunk({}, "stop")])
    stream = MessageStream("j1")
    stream.feed(chunks)
    assert stream.end(other) is None


def test_a_continued_answer_is_one_text() -> None:
    native, _ = of_events(
        [
            {"type": "message_start", "message": {"model": "claude", "usage": {"input_tokens": 3, "output_tokens": 1}}},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "The ans"}},
        ]
    )
    more = [chunk({"content": "wer"}), chunk({}, "stop")]
    whole = {"choices": [{"index": 0, "message": {"content": "The answer"}, "finish_reason": "stop"}]}
    message = streamed([*native, *more], {**RESULT, "response": whole})
    assert blocks_of(message) == [{"type": "text", "text": "The answer"}]
    assert (message["model"], message["stop_reason"]) == ("claude", "end_turn")


def test_a_thought_that_another_model_goes_on_with_is_not_signed() -> None:
    native, _ = of_events(
        [
            {"type": "message_start", "message": {"model": "claude"}},
            {"type": "content_block_start", "index": 0, "content_block": _THOUGHT},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "Well"}},
        ]
    )
    more, result = of_chat([chunk({"reasoning_content": "Well"}), chunk({"reasoning_content": "Hm", "content": "Hi"})])
    message = streamed([*native, more[1]], result)
    assert message["content"] == message_of(result)["content"]
    assert message["content"][0]["signature"] == UNSIGNED


# Any chat


@st.composite
def deltas(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["content", "content", "reasoning_content", "reasoning", "refusal", "tool", "tool"]))
    if kind != "tool":
        return {kind: draw(TEXTS)}
    first = {"id": draw(st.sampled_from(["a", "b", "functions.f:0"])), "name": "f"} if draw(st.booleans()) else {}
    return call(
        draw(st.integers(0, 2)), draw(TEXTS | st.sampled_from(['{"a": 1}', '{"b', '": [', "]}", "{}"])), **first
    )


@more_examples(3)
@given(st.lists(deltas(), max_size=9), st.integers(1, 4), st.integers(0, 12), st.sampled_from(["stop", "length", "x"]))
def test_any_chat_is_the_same_message_streamed_and_stored(
    given_deltas: list[dict[str, Any]], batch: int, until: int, reason: str
) -> None:
    chunks, result = of_chat([*map(chunk, given_deltas), chunk({}, reason)])
    assert streamed(chunks, result, batch, until) == message_of(result)


# Any answer in Anthropic's dialect

_TEXT: dict[str, Any] = {"type": "text", "text": ""}
_THOUGHT: dict[str, Any] = {"type": "thinking", "thinking": "", "signature": ""}
_TOOL: dict[str, Any] = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
_SEARCH: dict[str, Any] = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}}
_SHORTER: dict[str, Any] = {"type": "compaction", "content": None}
_FOUND: dict[str, Any] = {
    "type": "web_search_tool_result",
    "tool_use_id": "s1",
    "content": [{"url": "https://example.com"}],
}


@st.composite
def blocks(draw: st.DrawFn, index: int) -> list[dict[str, Any]]:
    given_block: dict[str, Any] = draw(
        st.sampled_from([_TEXT, _THOUGHT, _TOOL, _SEARCH, _FOUND, {**_TEXT, "citations": []}, _TEXT, _SHORTER])
    )
    piece = draw(TEXTS)
    choices: dict[str, list[dict[str, Any]]] = {
        "text": [{"type": "text_delta", "text": piece}, {"type": "citations_delta", "citation": {"cited_text": piece}}],
        "thinking": [{"type": "thinking_delta", "thinking": piece}],
        "compaction": [{"type": "compaction_delta", "content": piece}],
        "tool_use": [{"type": "input_json_delta", "partial_json": text} for text in (piece, '{"a', '": 1', "}")],
    }
    choices["server_tool_use"] = choices["tool_use"]
    some = draw(st.lists(st.sampled_from(choices.get(given_block["type"], [{"type": "new_delta"}])), max_size=4))
    if given_block["type"] == "thinking":
        some.append({"type": "signature_delta", "signature": "s"})
    given_block = {**given_block, **({"id": f"t{index}"} if "id" in given_block else {})}
    some = [one for one in some if one["type"] != "new_delta"]
    return [
        {"type": "content_block_start", "index": index, "content_block": given_block},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in some),
        {"type": "content_block_stop", "index": index},
    ]


@st.composite
def answers(draw: st.DrawFn) -> list[dict[str, Any]]:
    count = draw(st.integers(0, 4))
    inner = [event for index in range(count) for event in draw(blocks(index))]
    reason = draw(st.sampled_from(["end_turn", "tool_use", "pause_turn", "refusal", "max_tokens", "new_reason"]))
    usage = {"input_tokens": 5, "cache_read_input_tokens": 2, "output_tokens": 1}
    return [
        {"type": "message_start", "message": {"id": "msg_x", "model": "claude", "content": [], "usage": usage}},
        *inner,
        {"type": "message_delta", "delta": {"stop_reason": reason}, "usage": {"output_tokens": 9}},
        {"type": "message_stop"},
    ]


@more_examples(3)
@given(answers(), st.integers(1, 4), st.integers(0, 30))
def test_any_answer_of_anthropics_is_the_same_message_streamed_and_stored(
    events: list[dict[str, Any]], batch: int, until: int
) -> None:
    chunks, result = of_events(events)
    assert streamed(chunks, result, batch, until) == message_of(result)


def test_blocks_that_a_gateway_mixes_are_sent_one_after_the_other() -> None:
    def block(index: int, *texts: str) -> list[dict[str, Any]]:
        deltas = [{"type": "input_json_delta", "partial_json": text} for text in texts]
        return [
            {"type": "content_block_start", "index": index, "content_block": {**_TOOL, "id": f"t{index}"}},
            *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
            {"type": "content_block_stop", "index": index},
        ]

    first, second = block(0, '{"a":', "1}"), block(1, '{"b":', "2}")
    mixed = [event for pair in zip(first, second, strict=True) for event in pair]
    message = {"type": "message_start", "message": {"id": "msg_x", "model": "claude"}}
    chunks, result = of_events([message, *mixed, second[1], {"type": "message_stop"}])
    assert streamed(chunks, result) == message_of(result)
    assert [block["input"] for block in message_of(result)["content"]] == [{"a": 1}, {"b": 2}]


def test_a_text_that_is_none_begins_no_block() -> None:
    chunks, result = of_events(
        [
            {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": True}},
            {"type": "message_start", "message": {"model": "claude"}},
            {"type": "content_block_start", "index": 0, "content_block": _TEXT},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hi"}},
            {"type": "content_block_stop", "index": 0},
            {"type": "content_block_start", "index": 1, "content_block": _FOUND},
            {"type": "content_block_stop", "index": 1},
        ]
    )
    assert streamed(chunks, result)["content"] == message_of(result)["content"]
    assert [block["type"] for block in message_of(result)["content"]] == ["text", "web_search_tool_result"]


@st.composite
def odd_answers(draw: st.DrawFn) -> list[Any]:
    """Such answers with arbitrary JSON in them, and events left out or said twice."""
    events: list[Any] = json.loads(json.dumps(draw(answers())))
    for _ in range(draw(st.integers(1, 3))):
        event: dict[str, Any] = draw(st.sampled_from(events))
        name: str = draw(st.sampled_from(sorted(event)))
        inner: Any = event[name]
        places: list[str] = sorted(fields(inner))
        if places and draw(st.booleans()):
            inner[draw(st.sampled_from(places))] = draw(JSON)
        elif name != "type":
            event[name] = draw(JSON)
    at = draw(st.integers(0, len(events)))
    events[at : at + draw(st.integers(0, 1))] = draw(st.lists(st.sampled_from(events), max_size=1))
    return events


def test_a_signature_that_comes_again_is_the_latest() -> None:
    signed = [{"type": "signature_delta", "signature": signature} for signature in ("s", "t")]
    thought = {"type": "thinking_delta", "thinking": "hm"}
    chunks, result = of_events(
        [
            {"type": "message_start", "message": {"model": "claude", "content": [], "usage": {"input_tokens": 1}}},
            {"type": "content_block_start", "index": 0, "content_block": _THOUGHT},
            *({"type": "content_block_delta", "index": 0, "delta": delta} for delta in (thought, *signed)),
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 9}},
        ]
    )
    assert streamed(chunks, result)["content"] == message_of(result)["content"]
    assert message_of(result)["content"][0]["signature"] == "t"


@more_examples(3)
@given(odd_answers(), st.integers(1, 4))
def test_an_odd_answer_is_one_that_an_sdk_can_read(events: list[dict[str, Any]], batch: int) -> None:
    chunks, result = of_events(events)
    stream = MessageStream("j1")
    sent = [event for at in range(0, len(chunks), batch) for event in stream.feed(chunks[at : at + batch])]
    rest = stream.end(result)
    assert rest is not None
    assert accumulated(json.loads(json.dumps([*sent, *rest])))["content"] == message_of(result)["content"]
    accumulated(json.loads(json.dumps(MessageStream("j1").end(result))))


@st.composite
def odd_chats(draw: st.DrawFn) -> list[Any]:
    """Chunks with arbitrary JSON in them."""
    given_chunks: list[Any] = json.loads(json.dumps([chunk(draw(deltas())) for _ in range(draw(st.integers(1, 5)))]))
    for one in given_chunks:
        choice = one["choices"][0]
        place: dict[str, Any] = draw(
            st.sampled_from([one, choice, choice["delta"], *choice["delta"].get("tool_calls", [])])
        )
        more = () if place is one else ("tool_calls", "content", "reasoning", "id")
        place[draw(st.sampled_from([*place, *more]))] = draw(JSON)
    return given_chunks


@more_examples(3)
@given(odd_chats(), st.integers(1, 4))
def test_an_odd_chat_is_the_same_message_streamed_and_stored(chunks: list[Any], batch: int) -> None:
    shown, result = of_chat(chunks)
    # A stream has begun before the model's name may change.
    assert {**streamed(shown, result, batch), "model": ""} == {**message_of(result), "model": ""}


def test_a_call_that_is_no_function_is_the_same_message() -> None:
    shown, result = of_chat([{"choices": [{"index": 0, "delta": {"tool_calls": {"custom": None}}}]}])
    assert streamed(shown, result) == message_of(result)


def test_the_first_event_estimates_the_input_of_a_provider_that_reports_it_at_the_end_only() -> None:
    [start, *_] = MessageStream("j1", lambda: 17).feed([chunk({"content": "Hi"})])
    assert (start["type"], start["message"]["usage"]["input_tokens"]) == ("message_start", 17)
    reported = {"type": "message_start", "message": {"id": "msg_1", "model": "m", "usage": {"input_tokens": 5}}}
    chunks, _ = of_events([reported, {"type": "content_block_start", "index": 0, "content_block": {"type": "text"}}])
    [start, *_] = MessageStream("j1", lambda: 17).feed(chunks)
    assert start["message"]["usage"]["input_tokens"] == 5
