r"""Halves of surrogate pairs: joined where the other half follows, replaced where it does not.

In these tests `\ud83d\ude00` is the pair of a face, and each half of it is written by itself.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakwater.kernel.json_values import parse_json
from breakwater.kernel.surrogates import (
    EventJoiner,
    TextJoiner,
    read_halves,
    read_whole,
    whole_escapes,
    whole_json,
    whole_text,
    whole_value,
)

HIGH, LOW, FACE, ALONE = "\ud83d", "\ude00", "\U0001f600", "\ufffd"
HALVES = st.lists(st.sampled_from([HIGH, LOW, "\\", '"', "u", "d83d", "é", "x", "\n", FACE]), max_size=12).map("".join)
"""Texts with halves, and with what looks like them."""


def expected(text: str) -> str:
    """What a text should become, said in another way."""
    made, rest = "", text
    while rest:
        is_pair = "\ud800" <= rest[0] <= "\udbff" and "\udc00" <= rest[1:2] <= "\udfff"
        taken = rest[: 2 if is_pair else 1]
        rest = rest[len(taken) :]
        is_half = not is_pair and "\ud800" <= taken <= "\udfff"
        made += json.loads(json.dumps(taken)) if is_pair else ALONE if is_half else taken
    return made


@given(HALVES)
def test_a_text_becomes_whole(text: str) -> None:
    assert whole_text(text) == expected(text)
    whole_text(text).encode()


@given(st.recursive(HALVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(HALVES, inner, max_size=3)))
def test_any_document_with_halves_is_read_as_with_whole_texts(value: Any) -> None:
    document = json.dumps(value).encode()
    assert read_whole(orjson.loads, document) == whole_value(value)
    assert whole_value(read_halves(document)) == whole_value(value)
    orjson.dumps(read_whole(orjson.loads, document))


@given(HALVES)
def test_a_document_in_which_halves_are_bytes_is_read_too(text: str) -> None:
    document = json.dumps(text, ensure_ascii=False).encode(errors="surrogatepass")
    assert read_whole(orjson.loads, document) == whole_text(text)


@given(st.text() | HALVES)
def test_a_document_without_halves_stays_byte_for_byte(text: str) -> None:
    for document in (json.dumps(whole_text(text)).encode(), orjson.dumps(whole_text(text))):
        assert whole_json(document) is None


def test_what_only_looks_like_a_half_is_left_alone(subtests: pytest.Subtests) -> None:
    cases = {
        rb'"\\ud83d"': None,
        rb'"\\\\ud83d"': None,
        rb'"\\\ud83d"': '"\\\\\ufffd"'.encode(),
        rb'"\ud83d\ude00"': None,
        rb'"\uD83D\uDE00\uDE00"': '"\\uD83D\\uDE00\ufffd"'.encode(),
        rb'"\u4f60\n\ud7ff"': None,
        rb'{"\ud83d": "\ude00"}': '{"\ufffd": "\ufffd"}'.encode(),
        b'"\xed\x9f\xbf"': None,
        b'"\xed\xa0\xbd\xed\xb8\x80\xed\xa0\xbd"': '"\U0001f600\ufffd"'.encode(),
    }
    for document, mended in cases.items():
        with subtests.test(document=document):
            assert whole_json(document) == mended


def test_a_document_that_is_wrong_in_another_way_stays_wrong() -> None:
    for document in (rb'{"a": "\ud83d"', rb'{"a": "\ud83d", }', b"\xff", b"", rb'"\ud8"'):
        with pytest.raises(ValueError, match=r"\w"):
            read_whole(orjson.loads, document)
        with pytest.raises(ValueError, match=r"\w"):
            read_halves(document)


def test_the_arguments_of_a_call_may_have_half_of_a_pair() -> None:
    assert parse_json(r'{"a": "ok \ud83d", "b\ude00": ["\ud83d\ude00"]}') == {"a": f"ok {ALONE}", f"b{ALONE}": [FACE]}


@given(HALVES, st.data())
def test_escapes_in_pieces_come_to_what_they_are_as_a_whole(text: str, data: st.DataObject) -> None:
    document, sent = json.dumps({"a": text}), ""
    for end in sorted(data.draw(st.lists(st.integers(0, len(document)), max_size=6))):
        said = whole_escapes(document[:end], is_last=False)
        assert said.startswith(sent), "what was sent can't be taken back"
        sent = said
    whole = whole_escapes(document)
    assert whole.startswith(sent)
    assert orjson.loads(whole) == {"a": whole_text(text)}
    assert whole_escapes(json.dumps({"a": whole_text(text)})) == json.dumps({"a": whole_text(text)})


@given(HALVES, st.data())
def test_a_text_in_pieces_comes_to_what_it_is_as_a_whole(text: str, data: st.DataObject) -> None:
    joiner, places = TextJoiner(), [0, *sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6))), len(text)]
    pieces = [joiner.put(text[begin:end]) for begin, end in pairwise(places)]
    assert "".join([*pieces, joiner.end()]) == whole_text(text)
    "".join(pieces).encode()


def _chat(index: int = 0, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": delta, "finish_reason": None}]}


def _call(number: int, text: str) -> dict[str, Any]:
    return _chat(tool_calls=[{"index": number, "function": {"arguments": text}}])


def _block(index: int, name: str, text: str) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": {"type": f"{name}_delta", name: text}}


def _item(index: int, text: str, kind: str = "output_text") -> dict[str, Any]:
    return {"type": f"response.{kind}.delta", "output_index": index, "content_index": 0, "delta": text}


END = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
STOP = {"type": "content_block_stop", "index": 0}
DONE = {"type": "response.output_text.done", "output_index": 0, "content_index": 0, "text": f"ok {HIGH}"}

STREAMS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "a content": (
        [_chat(content=f"ok {HIGH}"), _chat(content=f"{LOW} end")],
        [_chat(content="ok "), _chat(content=f"{FACE} end")],
    ),
    "each half by itself": (
        [_chat(content=HIGH), _chat(content=LOW), END],
        [_chat(content=""), _chat(content=FACE), END],
    ),
    "two faces over three chunks": (
        [_chat(content=HIGH), _chat(content=LOW + HIGH), _chat(content=LOW)],
        [_chat(content=""), _chat(content=FACE), _chat(content=FACE)],
    ),
    "a half that stays alone": (
        [_chat(content=f"ok {HIGH}"), _chat(content="end"), END],
        [_chat(content=f"ok {ALONE}"), _chat(content="end"), END],
    ),
    "a half before the end": ([_chat(content=f"ok {HIGH}"), END], [_chat(content=f"ok {ALONE}"), END]),
    "a half that is the end": ([_chat(content=f"ok {HIGH}")], [_chat(content=f"ok {ALONE}")]),
    "a second half alone": ([_chat(content=f"{LOW}x")], [_chat(content=f"{ALONE}x")]),
    "a half in the middle": ([_chat(content=f"a{HIGH}b{HIGH}{LOW}")], [_chat(content=f"a{ALONE}b{FACE}")]),
    "a thought": (
        [_chat(reasoning_content=HIGH), _chat(reasoning_content=LOW)],
        [_chat(reasoning_content=""), _chat(reasoning_content=FACE)],
    ),
    "another field of the same choice": (
        [_chat(reasoning_content=HIGH), _chat(content=LOW)],
        [_chat(reasoning_content=ALONE), _chat(content=ALONE)],
    ),
    "two choices": (
        [_chat(content=HIGH), _chat(1, content=HIGH), _chat(content=LOW), _chat(1, content="x")],
        [_chat(content=""), _chat(content=FACE), _chat(1, content=ALONE), _chat(1, content="x")],
    ),
    "the arguments of a call": (
        [_call(0, f'{{"a": "{HIGH}'), _call(0, f'{LOW}"}}')],
        [_call(0, '{"a": "'), _call(0, f'{FACE}"}}')],
    ),
    "another call": ([_call(0, HIGH), _call(1, LOW)], [_call(0, ALONE), _call(1, ALONE)]),
    "usage after a half": (
        [_chat(content=HIGH), {"choices": [], "usage": {"prompt_tokens": 1}}],
        [_chat(content=ALONE), {"choices": [], "usage": {"prompt_tokens": 1}}],
    ),
    "a block of text": (
        [_block(0, "text", f"ok {HIGH}"), _block(0, "text", LOW), STOP],
        [_block(0, "text", "ok "), _block(0, "text", FACE), STOP],
    ),
    "thinking, and its end": (
        [_block(0, "thinking", HIGH), STOP],
        [_block(0, "thinking", ALONE), STOP],
    ),
    "the input of a tool": (
        [_block(1, "partial_json", HIGH), _block(1, "partial_json", LOW)],
        [_block(1, "partial_json", ""), _block(1, "partial_json", FACE)],
    ),
    "two blocks": (
        [_block(0, "text", HIGH), _block(1, "text", "x"), _block(0, "text", LOW)],
        [_block(1, "text", "x"), _block(0, "text", ""), _block(0, "text", FACE)],
    ),
    "an item": ([_item(0, HIGH), _item(0, LOW)], [_item(0, ""), _item(0, FACE)]),
    "an item, and its end": ([_item(0, f"ok {HIGH}"), DONE], [_item(0, f"ok {ALONE}"), DONE | {"text": f"ok {ALONE}"}]),
    "two kinds of an item": (
        [_item(0, HIGH, "reasoning_text"), _item(0, LOW)],
        [_item(0, ALONE, "reasoning_text"), _item(0, ALONE)],
    ),
    "the arguments of an item": (
        [_item(0, HIGH, "function_call_arguments"), _item(0, LOW, "function_call_arguments")],
        [_item(0, "", "function_call_arguments"), _item(0, FACE, "function_call_arguments")],
    ),
    "names": ([{f"x{HIGH}": {LOW: HIGH}}], [{f"x{ALONE}": {ALONE: ALONE}}]),
}


def _joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    joiner, passed = EventJoiner(), list[dict[str, Any]]()
    for event in events:
        document = json.dumps(event).encode()
        read = orjson.loads(document) if whole_json(document) is None else joiner.read(document)
        passed += [read] if joiner.is_idle else joiner.put(read)
    return [*passed, *joiner.end()]


def test_halves_are_joined_over_events_per_choice_block_and_item(subtests: pytest.Subtests) -> None:
    for name, (events, passed) in STREAMS.items():
        with subtests.test(name):
            assert _joined(events) == passed


@given(HALVES, st.data())
def test_a_stream_of_any_text_in_any_pieces_says_that_text(text: str, data: st.DataObject) -> None:
    places = [0, *sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6))), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(places)]
    # No pair is split by `json.dumps`, which writes a half as it is.
    said = "".join(event["choices"][0]["delta"]["content"] for event in _joined([_chat(content=one) for one in pieces]))
    assert said == whole_text(text)


def test_a_joiner_that_has_seen_no_half_is_idle() -> None:
    joiner = EventJoiner()
    assert joiner.is_idle
    event = joiner.read(json.dumps(_chat(content=f"ok {HIGH}")).encode())
    assert not joiner.is_idle
    assert list(joiner.put(event)) == []
    assert not joiner.is_idle
    assert list(joiner.put(_chat(content="end"))) == [_chat(content=f"ok {ALONE}"), _chat(content="end")]
    assert joiner.is_idle


def test_numbers_are_those_of_the_usual_codec() -> None:
    document = rb'{"a": "\ud83d", "b": 123456789012345678901234567890, "c": 1.5, "d": 7}'
    assert read_halves(document) == {**orjson.loads(document.replace(rb"\ud83d", b"")), "a": HIGH}
