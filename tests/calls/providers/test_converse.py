"""Converse's requests and answers, each checked by the service's model that AWS ships, and its binary streams."""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from breakwater.calls.providers.anthropic import request_body
from breakwater.calls.providers.base import CallError, UnusableAnswerError
from breakwater.calls.providers.bedrock import Converse
from breakwater.calls.providers.converse import ConverseEvents, converse_request, message_of
from breakwater.calls.providers.event_stream import EventStreamReader
from breakwater.calls.providers.server_sent import MAX_EVENT_BYTES, EventTooLargeError
from breakwater.calls.rules.classify import NotSent
from breakwater.dialects.rules.chat_chunks import Assembly
from breakwater.kernel.json_values import is_too_deep
from breakwater.prices.rules.usage import Usage, of_message
from tests.any_answers import JSON, places, put
from tests.bedrock import MODEL, converse_frames, corrupt, frame, invoke_frames, problems, said, stream_of, valid
from tests.calls.providers.kit import call
from tests.tables import each_row

NOVA = "eu.amazon.nova-pro-v1:0"
CLAUDE = "eu.anthropic.claude-sonnet-4-5-20250929-v1:0"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
LOOK_UP = {
    "type": "function",
    "function": {"name": "look_up", "description": "d", "parameters": {"type": "object", "properties": {"id": {}}}},
}
CALLED = {"id": "t-1", "type": "function", "function": {"name": "look_up", "arguments": '{"id": 7}'}}
ASKED: dict[str, Any] = {"role": "user", "content": "What is 7?"}
LOOP = [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALLED]}]


def translated(model: str = NOVA, *, betas: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """The request for a chat, which the service's model allows."""
    request = converse_request(request_body(call(model=model, **more)), model, betas)
    wrong = problems({**request, "modelId": model}, MODEL.operation_model("Converse").input_shape)
    assert not wrong, wrong
    return request


def refused(model: str = NOVA, **more: Any) -> NotSent:
    with pytest.raises(CallError) as caught:
        translated(model, **more)
    assert isinstance(caught.value.failure, NotSent)
    return caught.value.failure


def native(**fields: Any) -> dict[str, Any]:
    """The request for a request of Messages."""
    request = converse_request({"max_tokens": 9, "messages": [], **fields}, NOVA)
    wrong = problems({**request, "modelId": NOVA}, MODEL.operation_model("Converse").input_shape)
    assert not wrong, wrong
    return request


def test_a_chat_becomes_a_conversation_with_a_system_prompt_and_limits() -> None:
    messages = [{"role": "system", "content": "Be brief."}, ASKED, {"role": "assistant", "content": "Seven."}, ASKED]
    params = {"max_completion_tokens": 50, "temperature": 0.5, "top_p": 0.9, "stop": "END", "top_k": 5}
    assert translated(messages=messages, params=params) == {
        "system": [{"text": "Be brief."}],
        "messages": [
            {"role": "user", "content": [{"text": "What is 7?"}]},
            {"role": "assistant", "content": [{"text": "Seven."}]},
            {"role": "user", "content": [{"text": "What is 7?"}]},
        ],
        "inferenceConfig": {"maxTokens": 50, "temperature": 0.5, "topP": 0.9, "stopSequences": ["END"]},
        "additionalModelRequestFields": {"top_k": 5},
    }


def test_tools_their_calls_and_their_results_are_blocks() -> None:
    answer = {"role": "tool", "tool_call_id": "t-1", "content": "seven"}
    request = translated(messages=[*LOOP, answer], params={"tools": [LOOK_UP], "tool_choice": "required"})
    assert request["messages"][1:] == [
        {
            "role": "assistant",
            "content": [{"toolUse": {"toolUseId": "t-1", "name": "look_up", "input": {"id": 7}}}],
        },
        {"role": "user", "content": [{"toolResult": {"toolUseId": "t-1", "content": [{"text": "seven"}]}}]},
    ]
    schema = {"type": "object", "properties": {"id": {}}}
    assert request["toolConfig"] == {
        "tools": [{"toolSpec": {"name": "look_up", "description": "d", "inputSchema": {"json": schema}}}],
        "toolChoice": {"any": {}},
    }


@each_row(
    ("choice", "translated_choice"),
    [
        ("auto", {"auto": {}}),
        ("required", {"any": {}}),
        ({"type": "function", "function": {"name": "look_up"}}, {"tool": {"name": "look_up"}}),
    ],
)
def test_a_choice_of_tools_is_kept(choice: Any, translated_choice: Any) -> None:
    request = translated(params={"tools": [LOOK_UP], "tool_choice": choice})
    assert request["toolConfig"]["toolChoice"] == translated_choice


def test_no_tool_is_offered_if_none_may_be_called_unless_the_conversation_needs_them() -> None:
    params = {"tools": [LOOK_UP], "tool_choice": "none"}
    assert "toolConfig" not in translated(params=params)
    answered = [*LOOP, {"role": "tool", "tool_call_id": "t-1", "content": "7"}]
    assert refused(messages=answered, params=params).param == "tool_choice"


def test_only_claude_can_be_told_to_call_one_tool_at_a_time() -> None:
    params = {"tools": [LOOK_UP], "parallel_tool_calls": False}
    assert translated(CLAUDE, params=params)["additionalModelRequestFields"] == {
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}
    }
    assert refused(params=params).param == "parallel_tool_calls"


def test_images_and_documents_go_as_their_bytes_or_from_s3_and_from_no_other_url() -> None:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    pdf = {"type": "file", "file": {"file_data": "data:application/pdf;base64,JVBERi0xLjQK"}}
    stored = {"type": "image_url", "image_url": {"url": "s3://bucket/ship.JPG"}}
    content = [{"type": "text", "text": "See."}, image, pdf, pdf, stored]
    assert translated(messages=[{"role": "user", "content": content}])["messages"][0]["content"] == [
        {"text": "See."},
        {"image": {"format": "png", "source": {"bytes": PIXEL}}},
        {"document": {"format": "pdf", "name": "document", "source": {"bytes": "JVBERi0xLjQK"}}},
        {"document": {"format": "pdf", "name": "document (2)", "source": {"bytes": "JVBERi0xLjQK"}}},
        {"image": {"format": "jpeg", "source": {"s3Location": {"uri": "s3://bucket/ship.JPG"}}}},
    ]
    linked = {"type": "image_url", "image_url": {"url": "https://ships.example/ship.png"}}
    assert "loads no image from a URL" in refused(messages=[{"role": "user", "content": [linked]}]).message


def test_documents_of_messages_keep_title_context_and_citations() -> None:
    text = {"type": "text", "media_type": "text/plain", "data": "Ships sail."}
    document = {"type": "document", "source": text, "title": "Ships & co.\n  1", "context": "old"}
    found = {
        "type": "search_result",
        "source": "https://x",
        "title": "X",
        "content": [{"type": "text", "text": "y"}],
        "citations": {"enabled": True},
    }
    content = [{**document, "citations": {"enabled": True}}, found]
    assert native(messages=[{"role": "user", "content": content}])["messages"][0]["content"] == [
        {
            "document": {
                "format": "txt",
                "name": "Ships - co- 1",
                "source": {"text": "Ships sail."},
                "context": "old",
                "citations": {"enabled": True},
            }
        },
        {
            "searchResult": {
                "source": "https://x",
                "title": "X",
                "content": [{"text": "y"}],
                "citations": {"enabled": True},
            }
        },
    ]


def test_marks_of_a_cache_become_cache_points_behind_what_they_mark() -> None:
    mark = {"type": "ephemeral", "ttl": "1h"}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Long.", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "Hi", "cache_control": mark},
    ]
    tool = {**LOOK_UP, "cache_control": mark}
    request = translated(messages=messages, params={"tools": [tool]})
    point = {"cachePoint": {"type": "default", "ttl": "1h"}}
    assert request["system"] == [{"text": "Long."}, {"cachePoint": {"type": "default"}}]
    assert request["messages"][0]["content"] == [{"text": "Hi"}, point]
    assert request["toolConfig"]["tools"][1:] == [point]
    automatic = translated(params={"cache_control": {"type": "ephemeral"}})
    assert automatic["messages"][-1]["content"][-1] == {"cachePoint": {"type": "default"}}


def test_thinking_goes_back_as_it_came() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"}
    hidden = {"type": "redacted_thinking", "data": "aGlkZGVu"}
    turn = {"role": "assistant", "content": None, "thinking_blocks": [thought, hidden], "tool_calls": [CALLED]}
    messages = [ASKED, turn, {"role": "tool", "tool_call_id": "t-1", "content": "7", "is_error": True}]
    budget = {"type": "enabled", "budget_tokens": 2000}
    request = translated(
        CLAUDE,
        betas=("interleaved-thinking-2025-05-14",),
        messages=messages,
        params={"tools": [LOOK_UP], "thinking": budget},
    )
    assert request["messages"][1]["content"][:2] == [
        {"reasoningContent": {"reasoningText": {"text": "Hm.", "signature": "c2ln"}}},
        {"reasoningContent": {"redactedContent": "aGlkZGVu"}},
    ]
    assert request["messages"][2]["content"][0]["toolResult"]["status"] == "error"
    assert request["additionalModelRequestFields"] == {
        "thinking": budget,
        "anthropic_beta": ["interleaved-thinking-2025-05-14"],
    }


def test_a_schema_and_an_effort_are_for_the_output() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    request = translated(output_schema=schema, params={"reasoning_effort": "low"})
    structure = request["outputConfig"]["textFormat"]["structure"]["jsonSchema"]
    assert request["outputConfig"]["effort"] == "low"
    assert json.loads(structure["schema"])["properties"] == {"a": {"type": "integer"}}


def test_converses_own_fields_are_params_and_tools_of_claudes_go_to_it_alone() -> None:
    guardrail = {"guardrailIdentifier": "abc1", "guardrailVersion": "1", "trace": "enabled"}
    own_fields = {
        "guardrailConfig": guardrail,
        "performanceConfig": {"latency": "optimized"},
        "requestMetadata": {"team": "ships"},
        "additionalModelRequestFields": {"reasoningConfig": {"type": "enabled"}},
        "service_tier": "priority",
    }
    request = translated(params=own_fields)
    assert request["guardrailConfig"] == guardrail
    assert request["serviceTier"] == {"type": "priority"}
    assert request["additionalModelRequestFields"] == {"reasoningConfig": {"type": "enabled"}}
    shell = {"type": "bash_20250124", "name": "bash"}
    assert translated(CLAUDE, params={"tools": [shell]})["additionalModelRequestFields"] == {"tools": [shell]}
    assert refused(params={"tools": [shell]}).param == "tools"


# Answers

THOUGHT = {"reasoningContent": {"reasoningText": {"text": "Think hard.", "signature": "c2lnbmF0dXJl"}}}
HIDDEN = {"reasoningContent": {"redactedContent": "aGlkZGVu"}}
USE = {"toolUse": {"toolUseId": "tooluse_1", "name": "look_up", "input": {"id": 7}}}
CACHED = {
    "cacheReadInputTokens": 100,
    "cacheWriteInputTokens": 30,
    "cacheDetails": [{"ttl": "1h", "inputTokens": 10}, {"ttl": "5m", "inputTokens": 20}],
}


def read(answer: dict[str, Any]) -> tuple[dict[str, Any], Assembly]:
    """An answer as a stream of it is assembled, and the chat of its chunks."""
    reader = ConverseEvents()
    assembly = Assembly()
    frames = EventStreamReader()
    for _, data in frames.feed(b"".join(converse_frames(stream_of(answer)))):
        for chunk in reader.read(json.loads(data)):
            assembly.add(chunk)
    assert reader.ended
    assert reader.whole
    return reader.answer(), assembly


@each_row(
    "answer",
    [
        said({"text": "Seven ships."}),
        said(THOUGHT, HIDDEN, {"text": "Let me see."}, USE, stop="tool_use"),
        said({"text": "cut o"}, stop="max_tokens", usage=CACHED),
        said({"text": "Not that."}, stop="guardrail_intervened"),
        {**said({"text": "x"}), "trace": {"guardrail": {"actionReason": "no"}}, "serviceTier": {"type": "priority"}},
    ],
)
def test_a_streamed_answer_is_recorded_as_a_whole_one(answer: dict[str, Any]) -> None:
    message = message_of(valid(answer, "Converse"))
    streamed, assembly = read(answer)
    for block in streamed["content"]:
        block.pop("partial_json", None)
    assert streamed == message
    assert assembly.messages()[0]["content"] == "".join(
        block["text"] for block in message["content"] if block["type"] == "text"
    )


def test_thinking_and_calls_are_blocks_of_messages() -> None:
    message = message_of(said(THOUGHT, HIDDEN, USE, stop="tool_use"))
    assert message["content"] == [
        {"type": "thinking", "thinking": "Think hard.", "signature": "c2lnbmF0dXJl"},
        {"type": "redacted_thinking", "data": "aGlkZGVu"},
        {"type": "tool_use", "id": "tooluse_1", "name": "look_up", "input": {"id": 7}},
    ]
    assert message["stop_reason"] == "tool_use"


def test_tokens_from_and_to_a_cache_are_a_part_of_the_input() -> None:
    usage = of_message(message_of(said({"text": "x"}, usage=CACHED)))
    assert usage == Usage(150, 9, cached_tokens=100, cache_write_tokens=30, parts={"cache_write_1h": 10})


def test_the_tier_that_served_a_call_is_one_of_its_terms() -> None:
    usage = of_message(message_of({**said({"text": "x"}), "serviceTier": {"type": "priority"}}))
    assert usage is not None
    assert usage.terms == ("priority",)


def test_citations_get_the_form_of_messages() -> None:
    page = {"documentPage": {"documentIndex": 0, "start": 1, "end": 2}}
    citation = {"title": "Ships", "sourceContent": [{"text": "Ships sail."}], "location": page}
    block = {"citationsContent": {"content": [{"text": "They sail."}], "citations": [citation]}}
    answer = valid(said(block), "Converse")
    cited = {
        "type": "page_location",
        "cited_text": "Ships sail.",
        "document_title": "Ships",
        "document_index": 0,
        "start_page_number": 1,
        "end_page_number": 2,
    }
    assert message_of(answer)["content"] == [{"type": "text", "text": "They sail.", "citations": [cited]}]
    events: list[Any] = [
        ("messageStart", {"role": "assistant"}),
        ("contentBlockDelta", {"delta": {"text": "They sail."}, "contentBlockIndex": 0}),
        ("contentBlockDelta", {"delta": {"citation": citation}, "contentBlockIndex": 0}),
        ("contentBlockStop", {"contentBlockIndex": 0}),
        ("messageStop", {"stopReason": "end_turn"}),
    ]
    reader = ConverseEvents()
    for _, data in EventStreamReader().feed(b"".join(converse_frames(events))):
        list(reader.read(json.loads(data)))
    assert reader.answer()["content"] == message_of(answer)["content"]
    assert reader.whole
    assert not reader.ended


ANSWERED = [
    valid(said(THOUGHT, HIDDEN, {"text": "Let me see."}, USE, stop="tool_use", usage=CACHED), "Converse"),
    valid({**said({"text": "x"}), "serviceTier": {"type": "flex"}, "trace": {}}, "Converse"),
]


@given(st.sampled_from(ANSWERED), st.data())
def test_any_json_in_an_answer_is_a_message_or_refused(answer: dict[str, Any], data: st.DataObject) -> None:
    odd = put(copy.deepcopy(answer), data.draw(st.sampled_from(places(answer)[1:])), data.draw(JSON))
    assume(not is_too_deep(odd))  # such bodies are refused when they are read
    wire = Converse("https://bedrock.example", "v")
    with suppress(UnusableAnswerError):
        wire.usage(odd)
        message = wire.readable(odd, call())
        assert wire.usage(message) == wire.usage(odd)
        wire.choices(message)


@given(st.sampled_from(ANSWERED), st.data())
def test_any_json_in_a_stream_is_chunks_of_a_message(answer: dict[str, Any], data: st.DataObject) -> None:
    events: list[Any] = copy.deepcopy([{kind: value} for kind, value in stream_of(answer)])
    events = put(events, data.draw(st.sampled_from(places(events)[1:])), data.draw(JSON))
    reader = ConverseEvents()
    assembly = Assembly()
    for event in events:
        for chunk in reader.read(event if isinstance(event, dict) else {}):
            assembly.add(chunk)
    of_message(reader.answer())


# Frames


@given(st.lists(st.integers(1, 40), max_size=40), st.binary(max_size=30))
def test_frames_are_read_however_they_are_cut(sizes: list[int], rest: bytes) -> None:
    body = b"".join(converse_frames(stream_of(said({"text": "Seven ships."}))))
    whole = list(EventStreamReader().feed(body))
    reader = EventStreamReader()
    events = list[tuple[bytes, bytes]]()
    for size in sizes:
        events += reader.feed(body[:size])
        body = body[size:]
    events += reader.feed(body)
    assert events == whole
    assert list(reader.end()) == []


def test_a_corrupt_frame_is_refused_after_the_events_before_it() -> None:
    first, second, *_ = converse_frames(stream_of(said({"text": "Seven ships."})))
    reader = EventStreamReader()
    events = list[tuple[bytes, bytes]]()
    with pytest.raises(UnusableAnswerError, match=r"corrupt \(ChecksumMismatch"):
        events.extend(reader.feed(first + corrupt(second)))
    assert len(events) == 1


@given(st.binary(max_size=200), st.integers(0, 100))
def test_any_bytes_are_events_or_refused(noise: bytes, kept: int) -> None:
    body = frame("messageStart", {"role": "assistant"})[:kept] + noise
    with suppress(UnusableAnswerError, EventTooLargeError):
        list(EventStreamReader().feed(body))


def test_a_frame_that_is_too_large_is_refused_before_it_is_whole() -> None:
    reader = EventStreamReader()
    large = frame("messageStart", b" " * (MAX_EVENT_BYTES + 1000))
    with pytest.raises(EventTooLargeError):
        list(reader.feed(large[: MAX_EVENT_BYTES + 10]))


def test_a_frame_without_a_type_is_refused_and_an_exception_without_one_is_still_one() -> None:
    with pytest.raises(UnusableAnswerError, match="has no type"):
        list(EventStreamReader().feed(frame(None, {"delta": {"text": "x"}})))
    [(name, data)] = EventStreamReader().feed(frame(None, {"message": "no"}, message_type="exception"))
    assert (name, json.loads(data)) == (b"error", {"error": {"type": "", "message": "no"}})


def test_a_chunk_is_an_event_of_the_models_own_api() -> None:
    [frame_of_ping] = invoke_frames([{"type": "ping"}])
    assert [json.loads(data) for _, data in EventStreamReader().feed(frame_of_ping)] == [{"type": "ping"}]


def test_an_exception_is_an_event_with_an_error() -> None:
    [thrown] = converse_frames([("throttlingException", {"message": "Too many tokens"})])
    [(name, data)] = EventStreamReader().feed(thrown)
    assert name == b"error"
    assert json.loads(data) == {"error": {"type": "ThrottlingException", "message": "Too many tokens"}}
