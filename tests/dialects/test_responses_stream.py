"""Responses, streamed and whole: the same message, whatever chunks it came in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai._models import construct_type_unchecked
from openai._types import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent

from breakwater.dialects.rules.chat_chunks import Assembly
from breakwater.dialects.rules.responses_answer import EchoedRequest, output_of, response_of
from breakwater.dialects.rules.responses_stream import ContradictionError, ResponseEvent, ResponseEvents, event_bytes
from tests.tables import each_row

ASKED = EchoedRequest(job_id="job-1", created_at=1_790_000_000, model="writer", body={"input": "Hi"})
_USED = {"outcome": "success", "input_tokens": 5, "output_tokens": 7, "cached_tokens": 1, "reasoning_tokens": None}


def result(response: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """A result of a job, as JSON."""
    known = {
        "execution_id": "job-1",
        "job_id": "job-1",
        "agent": "writer",
        "requested_model": "m",
        "chosen_model": "m",
    }
    ended = {"status": "succeeded", "completed_at": "2026-11-27T03:00:00.000Z", "attempts": [_USED]}
    return {**known, **ended, "output": None, "response": response, **more}


def chunk(delta: dict[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
    """A chunk of a chat."""
    return {"id": "a1", "model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": reason, **more}]}


def call(index: int, text: str, **more: Any) -> dict[str, Any]:
    """A chunk with a piece of a tool call."""
    return chunk({"tool_calls": [{"index": index, **more, "function": {"arguments": text}}]})


def begun(index: int, name: str = "look_up", text: str = "") -> dict[str, Any]:
    """A chunk that begins a tool call."""
    function = {"name": name, "arguments": text}
    return chunk({"tool_calls": [{"index": index, "id": f"c{index}", "type": "function", "function": function}]})


def custom(index: int, text: str) -> dict[str, Any]:
    """A chunk with a piece of a call of a custom tool."""
    said = {"index": index, "id": f"k{index}", "type": "custom", "custom": {"name": "sql", "input": text}}
    return chunk({"tool_calls": [said]})


def ended(chunks: list[dict[str, Any]], reason: str | None) -> list[dict[str, Any]]:
    """The chunks with the reason why the answer ended, if it is said."""
    return [*chunks, *([] if reason is None else [chunk({}, reason)])]


def accumulated(events: Iterable[ResponseEvent]) -> list[dict[str, Any]]:
    """The output that a client puts together from the deltas and the ends of their parts, by index alone."""
    items: dict[int, dict[str, Any]] = {}
    texts: dict[tuple[Any, ...], str] = {}
    for event in events:
        kind, index = str(event["type"]), event.get("output_index", -1)
        place = (index, event.get("content_index"), event.get("summary_index"))
        if kind == "response.output_item.added":
            assert index == len(items)
            items[index] = orjson.loads(orjson.dumps(event["item"]))
        elif kind.endswith(".delta"):
            assert items[index]["id"] == event["item_id"]
            texts[place] = texts.get(place, "") + event["delta"]
        elif kind.endswith(".done") and kind.rpartition(".")[0].rpartition(".")[2] not in ("output_item",):
            said = next((event[name] for name in ("text", "refusal", "arguments", "input") if name in event), None)
            if said is not None:
                assert said == texts.get(place, "")
        elif kind == "response.content_part.added":
            assert len(items[index].setdefault("content", [])) == event["content_index"]
            items[index]["content"].append(event["part"])
        if kind == "response.output_item.done":
            done = event["item"]
            textual = done["type"] in ("message", "reasoning")
            for number, part in enumerate((done.get("content") or []) if textual else []):
                if part["type"] in ("output_text", "refusal", "reasoning_text"):
                    assert part.get("text", part.get("refusal")) == texts.get((index, number, None), "")
                else:  # of a type that a newer version of the API has: it comes whole
                    assert part == items[index]["content"][number]
            if done["type"] == "function_call":
                assert done["arguments"] == texts.get((index, None, None), "")
            items[index] = done
    return [items[index] for index in sorted(items)]


def by_sdk(events: Iterable[ResponseEvent]) -> Response:
    """The response that OpenAI's SDK accumulates."""
    state = ResponseStreamState[None](input_tools=omit, text_format=omit)
    last, of_event = cast(Any, None), cast(Any, ResponseStreamEvent)
    for event in events:
        typed: Any = construct_type_unchecked(type_=of_event, value=orjson.loads(orjson.dumps(event)))
        last = cast(Any, state.handle_event(typed)[-1])
    return last.response


def _without_parsed(value: Any) -> Any:
    """An item of the SDK's without what it reads from a text itself."""
    if isinstance(value, list):
        return [_without_parsed(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {name: _without_parsed(one) for name, one in value.items() if not name.startswith("parsed")}


def streamed(chunks: Sequence[Mapping[str, Any]], whole: Mapping[str, Any] | None = None) -> list[ResponseEvent]:
    """All events of an answer that came in chunks. `whole`: its result, if it is not what the chunks come to."""
    assembly, encoder = Assembly("job-1"), ResponseEvents(ASKED)
    events = encoder.begin()
    for one in chunks:
        events += encoder.add(assembly.add(one))
    return events + encoder.end(result(assembly.completion()) if whole is None else whole)


def types_of(events: Iterable[ResponseEvent]) -> list[str]:
    """The types of events, without the part that all have."""
    return [event["type"].removeprefix("response.") for event in events]


_ONE_TEXT = [
    "created",
    "in_progress",
    "output_item.added",
    "content_part.added",
    "output_text.delta",
    "output_text.delta",
    "output_text.done",
    "content_part.done",
    "output_item.done",
    "completed",
]


def test_a_text_has_the_events_of_the_specification_in_order() -> None:
    events = streamed(
        [chunk({"role": "assistant", "content": ""}), chunk({"content": "Hi "}), chunk({"content": "you"}, "stop")]
    )

    assert types_of(events) == _ONE_TEXT
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"]["id"] == events[0]["response"]["id"] == "resp_job-1"
    assert events[-1]["response"]["usage"]["input_tokens_details"]["cached_tokens"] == 1
    assert by_sdk(events).output_text == "Hi you"


def test_reasoning_a_text_and_parallel_calls_become_items() -> None:
    events = streamed(
        [
            chunk({"reasoning_content": "Well"}),
            chunk({"content": "Let me see."}),
            begun(0),
            call(0, '{"id":'),
            begun(1, "look_down", "{}"),
            call(0, "1}"),
            chunk({}, "tool_calls"),
        ]
    )

    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert [item.get("call_id") for item in output] == [None, None, "c0", "c1"]
    assert output[2]["arguments"] == '{"id":1}'
    assert accumulated(events) == output
    assert by_sdk(events).model_dump(mode="json")["output"][0]["content"] == [
        {"text": "Well", "type": "reasoning_text"}
    ]


def test_one_event_is_named_after_its_type() -> None:
    assert event_bytes({"type": "response.created", "sequence_number": 0}) == (
        b'event: response.created\ndata: {"type":"response.created","sequence_number":0}\n\n'
    )


def test_a_call_without_arguments_has_an_empty_object() -> None:
    events = streamed([begun(0), chunk({}, "tool_calls")])

    assert accumulated(events) == output_of(
        "job-1",
        result(
            {
                "choices": [
                    {
                        "message": {
                            "tool_calls": [
                                {"id": "c0", "type": "function", "function": {"name": "look_up", "arguments": ""}}
                            ]
                        },
                        "finish_reason": "tool_calls",
                    }
                ]
            }
        ),
    )
    assert events[-1]["response"]["output"][0]["arguments"] == "{}"


def test_what_was_missed_comes_with_the_result() -> None:
    assembly, encoder = Assembly("job-1"), ResponseEvents(ASKED)
    chunks = [chunk({"reasoning_content": "Well"}), chunk({"content": "Hi "}), chunk({"content": "you"}, "stop")]
    shown = list(map(assembly.add, chunks))

    events = [*encoder.begin(), *encoder.add(shown[0]), *encoder.add(shown[1])]
    events += encoder.end(result(assembly.completion()), complete=False)

    assert accumulated(events) == events[-1]["response"]["output"] == output_of("job-1", result(assembly.completion()))


def test_an_answer_that_came_whole_is_streamed_in_the_order_of_its_output() -> None:
    message = {"content": "Hi", "reasoning_content": "Well", "refusal": None}
    whole = result({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    events = streamed([], whole)

    assert accumulated(events) == output_of("job-1", whole)
    assert [item["type"] for item in output_of("job-1", whole)] == ["reasoning", "message"]


def test_another_answer_than_the_one_begun_is_a_contradiction() -> None:
    encoder = ResponseEvents(ASKED)
    encoder.begin()
    encoder.add(chunk({"content": "No"}))

    with pytest.raises(ContradictionError):
        encoder.end(result({"choices": [{"index": 0, "message": {"content": "Yes"}, "finish_reason": "stop"}]}))


@each_row(
    ("reason", "status", "why"),
    [
        ("stop", "completed", None),
        ("tool_calls", "completed", None),
        ("length", "incomplete", "max_output_tokens"),
        ("content_filter", "incomplete", "content_filter"),
    ],
)
def test_why_an_answer_ended_is_the_status(reason: str, status: str, why: str | None) -> None:
    events = streamed([chunk({"content": "Hi"}, reason)])

    response = events[-1]["response"]
    assert events[-1]["type"] == f"response.{status}"
    assert (response["status"], (response["incomplete_details"] or {}).get("reason")) == (status, why)


def test_a_failure_after_some_of_the_answer_keeps_it() -> None:
    encoder = ResponseEvents(ASKED)
    events = [*encoder.begin(), *encoder.add(chunk({"content": "Hi"}))]
    error = {"kind": "server", "class": "X", "message": "it broke"}
    events += encoder.end(result({}, status="dead_lettered", reason="error", error=error))

    response = events[-1]["response"]
    assert (events[-1]["type"], response["status"]) == ("response.failed", "failed")
    assert response["error"] == {"code": "server_error", "message": "it broke"}
    assert response["output"][0]["content"][0]["text"] == "Hi"
    assert response["output"][0]["status"] == "incomplete"


_TEXT = st.text(alphabet="ab{}\u00e9 ", min_size=0, max_size=4)
_SAID = st.one_of(
    st.fixed_dictionaries({"content": _TEXT}),
    st.fixed_dictionaries({"refusal": _TEXT}),
    st.fixed_dictionaries({"reasoning_content": _TEXT}),
    st.fixed_dictionaries({"reasoning": _TEXT}),
    st.fixed_dictionaries({"reasoning": _TEXT, "reasoning_content": _TEXT}),
    st.fixed_dictionaries({"reasoning_content": _TEXT, "content": _TEXT, "refusal": _TEXT}),
    st.just({"content": None, "role": "assistant"}),
    _TEXT.map(lambda text: {"content": [{"type": "thinking", "thinking": text}, {"type": "text", "text": text}]}),
).map(chunk)
_CALLED = st.one_of(
    st.builds(begun, st.integers(0, 2), st.sampled_from(["look_up", "look_down"]), _TEXT),
    st.builds(call, st.integers(0, 2), _TEXT),
    st.builds(call, st.integers(0, 2), _TEXT, id=st.sampled_from(["c0", "c1"])),
    st.builds(custom, st.integers(3, 4), _TEXT),
)
CHUNKS: st.SearchStrategy[list[dict[str, Any]]] = st.builds(
    ended,
    st.lists(st.one_of(_SAID, _CALLED), max_size=12),
    st.sampled_from(["stop", "length", "tool_calls", "content_filter", None]),
)


@given(CHUNKS)
def test_any_chunks_make_the_same_output_streamed_and_stored(chunks: list[dict[str, Any]]) -> None:
    assembly = Assembly("job-1")
    shown = list(map(assembly.add, chunks))
    # As it is stored: through JSON.
    whole = orjson.loads(orjson.dumps(result(assembly.completion())))
    if not whole["response"]["choices"]:
        return
    stored = response_of(ASKED, whole)
    encoder = ResponseEvents(ASKED)
    events = encoder.begin()
    for one in shown:
        events += encoder.add(orjson.loads(orjson.dumps(one)))
    events += encoder.end(whole)

    assert events[-1]["response"] == stored
    assert accumulated(events) == stored["output"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [_without_parsed(item.to_dict()) for item in by_sdk(events).output] == stored["output"]


@given(CHUNKS, st.data())
def test_a_stream_read_again_has_the_same_events_from_any_chunk_on(
    chunks: list[dict[str, Any]], data: st.DataObject
) -> None:
    assembly = Assembly("job-1")
    shown = list(map(assembly.add, chunks))
    missed = data.draw(st.integers(0, len(shown)))
    once, again = ResponseEvents(ASKED), ResponseEvents(ASKED)
    first = once.begin()
    for one in shown:
        first += once.add(one)
    second = again.begin()
    for one in shown[:missed]:
        second += again.add(one)

    assert second == first[: len(second)]


def test_an_error_has_the_fields_of_openai_and_of_open_responses() -> None:
    encoder = ResponseEvents(ASKED)
    encoder.begin()
    [event] = encoder.error("server_error", "it broke")
    named = {"code": "server_error", "message": "it broke", "param": None}
    assert event == {"type": "error", **named, "error": {"type": "server_error", **named}, "sequence_number": 2}


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@each_row(("kind", "place"), [("content", 0), ("content", 1), ("summary", 0)])
def test_a_part_of_a_newer_type_comes_with_its_item(kind: str, place: int) -> None:
    text = {"type": "summary_text", "text": "Hi"}
    if kind == "content":
        text = {"type": "output_text", "text": "Hi", "annotations": [], "logprobs": []}
    parts: list[dict[str, Any]] = [text]
    parts.insert(place, {"type": "hologram", "shape": "cube"})
    item_type = "message" if kind == "content" else "reasoning"
    item = {"id": "i1", "type": item_type, "role": "assistant", "status": "completed", kind: parts}
    answer = {"id": "resp_1", "object": "response", "status": "completed", "model": "m", "output": [item]}

    encoder = ResponseEvents(ASKED)
    events = [*encoder.begin(), *encoder.end(result(answer))]

    assert events[-1]["response"]["output"][0][kind] == parts
    assert by_sdk(events).id == "resp_job-1"
