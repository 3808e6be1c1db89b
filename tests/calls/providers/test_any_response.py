"""Responses as no provider should send them: good ones, with arbitrary JSON in any of their places."""

from __future__ import annotations

import copy
import json
from typing import Any, cast

import orjson
import pytest
from hypothesis import example, given, note, reject
from hypothesis import strategies as st

from breakwater.calls.providers.base import UnusableAnswerError
from breakwater.calls.providers.failures import carries_error, read_json
from breakwater.calls.providers.openai import ChatCompletions
from breakwater.calls.providers.responses import ResponsesWire
from breakwater.dialects.rules.chat_chunks import Assembly
from breakwater.dialects.rules.responses_answer import response_of
from breakwater.dialects.rules.responses_stream import ContradictionError, ResponseEvents
from tests.any_answers import JSON, places, put
from tests.dialects.test_responses_stream import ASKED, accumulated, by_sdk, result

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # types of the SDK are not enforced
WIRE = ResponsesWire(ChatCompletions("http://x/v1"))
_OUTPUT: list[dict[str, Any]] = [
    {
        "id": "rs_1",
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "Well"}],
        "encrypted_content": "x",
    },
    {"id": "ws_1", "type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "q"}},
    {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [
            {"type": "output_text", "text": "Hi you", "annotations": [], "logprobs": []},
            {"type": "refusal", "refusal": "No"},
        ],
    },
    {"id": "fc_1", "type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", "status": "completed"},
    {"id": "ct_1", "type": "custom_tool_call", "call_id": "c2", "name": "g", "input": "x", "status": "completed"},
]
_RESPONSE: dict[str, Any] = {
    "id": "resp_9",
    "object": "response",
    "created_at": 5,
    "status": "completed",
    "model": "m",
    "output": _OUTPUT,
    "usage": {"input_tokens": 9, "output_tokens": 2, "total_tokens": 11, "input_tokens_details": {"cached_tokens": 1}},
    "incomplete_details": None,
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
}


def _about(index: int, kind: str, **more: Any) -> dict[str, Any]:
    place = {"item_id": _OUTPUT[index]["id"], "output_index": index}
    return {"type": f"response.{kind}", **place, **more}


def _added(index: int, **empty: Any) -> dict[str, Any]:
    item = {**_OUTPUT[index], "status": "in_progress", **empty}
    return {"type": "response.output_item.added", "output_index": index, "item": item}


def _done(index: int) -> dict[str, Any]:
    return {"type": "response.output_item.done", "output_index": index, "item": _OUTPUT[index]}


_EVENTS: list[dict[str, Any]] = [
    {"type": "response.created", "response": {**_RESPONSE, "status": "in_progress", "output": [], "usage": None}},
    _added(0, summary=[]),
    _about(0, "reasoning_summary_part.added", summary_index=0, part={"type": "summary_text", "text": ""}),
    _about(0, "reasoning_summary_text.delta", summary_index=0, delta="Well"),
    _about(0, "reasoning_summary_text.done", summary_index=0, text="Well"),
    _about(0, "reasoning_summary_part.done", summary_index=0, part={"type": "summary_text", "text": "Well"}),
    _done(0),
    _added(1),
    _about(1, "web_search_call.searching"),
    _done(1),
    _added(2, content=[]),
    _about(2, "content_part.added", content_index=0, part={"type": "output_text", "text": ""}),
    _about(2, "output_text.delta", content_index=0, delta="Hi ", logprobs=[]),
    _about(2, "output_text.delta", content_index=0, delta="you"),
    _about(2, "output_text.done", content_index=0, text="Hi you", logprobs=[]),
    _about(2, "content_part.done", content_index=0, part=_OUTPUT[2]["content"][0]),
    _about(2, "content_part.added", content_index=1, part={"type": "refusal", "refusal": ""}),
    _about(2, "refusal.delta", content_index=1, delta="No"),
    _about(2, "refusal.done", content_index=1, refusal="No"),
    _about(2, "content_part.done", content_index=1, part=_OUTPUT[2]["content"][1]),
    _done(2),
    _added(3, arguments=""),
    _about(3, "function_call_arguments.delta", delta="{}"),
    _about(3, "function_call_arguments.done", arguments="{}"),
    _done(3),
    _added(4, input=""),
    _about(4, "custom_tool_call_input.delta", delta="x"),
    _about(4, "custom_tool_call_input.done", input="x"),
    _done(4),
    {"type": "response.completed", "response": _RESPONSE},
]


@st.composite
def _odd(draw: st.DrawFn, good: Any) -> Any:
    """The same with another value in up to three of its places."""
    value = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, 3))):
        value = put(value, draw(st.sampled_from(places(value))), draw(JSON))
    try:
        return read_json(json.dumps(value).encode())
    except ValueError:
        reject()  # nested too deep: no reader is given that


def _read(events: list[Any]) -> tuple[list[Any], dict[str, Any], Assembly]:
    """The chunks of a stream up to an error in it, and the answer, which is then not whole."""
    answer = Assembly("job-1")
    reader, chunks = WIRE.stream_reader(answer), list[Any]()
    for event in events:
        if not isinstance(event, dict) or carries_error(one := cast(dict[str, Any], event)):
            break
        chunks += [answer.add(chunk) for chunk in reader.read(one)]
    return chunks, reader.answer() if reader.whole else {}, answer


def _succeeded(answer: dict[str, Any]) -> dict[str, Any] | None:
    """The result with an answer, as it is stored; None for one that no worker accepts."""
    if carries_error(answer):
        return None
    WIRE.usage(answer)
    try:
        choice = WIRE.choices(answer)[0]
    except UnusableAnswerError:
        return None
    stored: Any = {"response": answer, "output": choice.output, "finish_reason": choice.finish_reason}
    return orjson.loads(orjson.dumps(result(**stored)))


def test_a_good_stream_is_passed_on_as_it_came() -> None:
    chunks, answer, _ = _read(_EVENTS)
    encoder = ResponseEvents(ASKED)
    events = encoder.begin()
    for chunk in chunks:
        events += encoder.add(chunk)
    whole = _succeeded(answer)
    assert whole is not None
    events += encoder.end(whole)

    named = [{name: value for name, value in event.items() if name != "sequence_number"} for event in events]
    passed = [event for event in _EVENTS if event["type"] not in ("response.created", "response.completed")]
    assert [event["type"] for event in named[2:-1]] == [event["type"] for event in passed]
    assert accumulated(events) == events[-1]["response"]["output"]
    assert by_sdk(events).output_text == "Hi you"


@given(_odd(_EVENTS))
@example(put(copy.deepcopy(_EVENTS), (-1, "response", "usage", "output_tokens"), 2**64 - 1))  # with the input: 65 bits
def test_any_stream_has_events_that_the_sdk_reads(given_events: Any) -> None:
    chunks, answer, _ = _read(cast(list[Any], given_events) if isinstance(given_events, list) else [])
    encoder = ResponseEvents(ASKED)
    events = encoder.begin()
    for chunk in orjson.loads(orjson.dumps(chunks)):
        events += encoder.add(chunk)
    whole = _succeeded(answer)
    try:
        events += encoder.end(whole or result({}, status="dead_lettered", reason="error", error={"message": "x"}))
    except ContradictionError:
        events += encoder.error("unavailable", "x")
    note(str([event["type"] for event in events]))

    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    if events[-1]["type"] != "error":
        assert by_sdk(events).id == "resp_job-1"


@given(_odd(_RESPONSE))
@example({**_RESPONSE, "output": [{**_OUTPUT[3], "arguments": None}]})
@example({**_RESPONSE, "output": [{**_OUTPUT[2], "content": [{"type": "newer_text", "text": "Hi you"}]}]})
@example({**_RESPONSE, "output": [{**_OUTPUT[3], "arguments": "", "status": "in_progress"}]})
def test_any_response_becomes_one_that_the_sdk_reads(answer: Any) -> None:
    whole = _succeeded(cast(dict[str, Any], answer)) if isinstance(answer, dict) else None
    if whole is None:
        return
    found = response_of(ASKED, whole)
    encoder = ResponseEvents(ASKED)
    events = [*encoder.begin(), *encoder.end(whole)]

    assert events[-1]["response"] == found
    assert accumulated(events) == found["output"]
    assert isinstance(by_sdk(events).output_text, str)
    for item in found["output"]:
        assert isinstance(item["id"], str)
        if item.get("type") == "function_call":
            assert isinstance(item["arguments"], str)
            assert isinstance(item["call_id"], str)
