"""The places in which providers put an error of an answer that has begun with 200: their words are never lost."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import orjson
import pytest

from breakwater.calls.providers.base import Call, CallError
from breakwater.calls.rules.classify import classify
from tests.calls.providers.kit import call, perform, saying, settings
from tests.calls.providers.test_responses import native as native_response
from tests.calls.providers.test_streams import Streamed

LIMIT = {"code": "rate_limit_exceeded", "type": "tokens", "message": "Rate limit reached for m: try again in 7s."}
WORDS = LIMIT["message"]
FAILED = {"type": "response.failed", "sequence_number": 3}
RESPONSE = {"id": "resp_1", "object": "response", "status": "failed", "output": []}
OVERLOADED = {"type": "rate_limit_error", "message": WORDS}

OF_RESPONSES: dict[str, Any] = {
    "in the response": FAILED | {"response": RESPONSE | {"error": LIMIT}},
    "beside a response without one": FAILED | {"response": RESPONSE, "error": LIMIT},
    "beside a response with null": FAILED | {"response": RESPONSE | {"error": None}, "error": LIMIT},
    "beside a response with empty fields": FAILED
    | {"response": RESPONSE | {"error": {"code": None, "message": ""}}, "error": LIMIT},
    "without a response": FAILED | {"error": LIMIT},
    "at the top of the event": FAILED | LIMIT | {"type": "response.failed"},
    "at the top, beside a response": FAILED | {"response": RESPONSE} | LIMIT | {"type": "response.failed"},
    "in the details of the status": FAILED
    | {"response": RESPONSE | {"status_details": {"type": "failed", "error": LIMIT}}},
    "in an error event": {"type": "error", "sequence_number": 3} | {"error": LIMIT},
    "at the top of an error event": LIMIT | {"type": "error"},
    "in the response of an error event": {"type": "error", "response": RESPONSE | {"error": LIMIT}},
    "in a response that is called completed": {
        "type": "response.completed",
        "response": RESPONSE | {"error": LIMIT},
    },
    "in the details of one that is called completed": {
        "type": "response.completed",
        "response": RESPONSE | {"status_details": {"error": LIMIT}},
    },
    "in one that is called incomplete": {
        "type": "response.incomplete",
        "response": RESPONSE | {"status": "incomplete", "error": LIMIT},
    },
}
OF_MESSAGES: dict[str, Any] = {
    "as Anthropic writes it": {"type": "error", "error": OVERLOADED, "request_id": "req_1"},
    "at the top": {"type": "rate_limit_error", "message": WORDS},
    "an error in an error": {"type": "error", "error": {"type": "error", "error": OVERLOADED}},
    "a text": {"type": "error", "error": WORDS},
    "a plain text": WORDS.encode(),
    "a text in JSON": orjson.dumps(WORDS),
    "a list": [{"error": OVERLOADED}],
}
OF_CHATS: dict[str, Any] = {
    "under error": {"error": LIMIT},
    "with its words beside it": {"error": {"code": 429}, "message": WORDS},
    "at the top": {"code": 429, "message": WORDS},
    "with Baidu's names": {"error_code": 429, "error_msg": WORDS},
    "beside a choice": {"choices": [{"index": 0, "delta": {}, "finish_reason": "error"}], "error": LIMIT},
}


def _asked(api: str, *, is_streamed: bool) -> Call:
    more: dict[str, Any] = {}
    match api:
        case "responses":
            more = native_response()
        case "messages":
            body = {"max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
            more = {"api": "messages", "native": body}
        case _:
            pass
    return Streamed(**more).call if is_streamed else call(**more)


def _cases() -> Iterator[tuple[str, str, Any]]:
    for api, cases in (("responses", OF_RESPONSES), ("messages", OF_MESSAGES), ("chat", OF_CHATS)):
        for place, event in cases.items():
            yield api, place, event


async def _failure(api: str, body: bytes, *, is_streamed: bool) -> tuple[str, str]:
    headers = {"Content-Type": "text/event-stream" if is_streamed else "application/json"}
    more: dict[str, Any] = {"api": "responses"} if api == "responses" else {}
    async with saying(body, **headers) as origin:
        chosen = settings("anthropic" if api == "messages" else "openai", origin, **more)
        with pytest.raises(CallError) as caught:
            await perform(chosen, _asked(api, is_streamed=is_streamed))
    verdict = classify(caught.value.failure, datetime.now(UTC))
    return verdict.kind, verdict.message


async def test_the_error_of_a_stream_is_taken_from_any_place(subtests: pytest.Subtests) -> None:
    for api, place, event in _cases():
        data = event if isinstance(event, bytes) else orjson.dumps(event)
        is_named = api == "messages" or (isinstance(event, dict) and event.get("type") == "error")
        body = (b"event: error\n" if is_named else b"") + b"data: " + data + b"\n\n"
        with subtests.test(f"{api}: {place}"):
            kind, message = await _failure(api, body, is_streamed=True)
            assert kind == "rate_limit"
            assert WORDS in message


async def test_the_error_of_a_whole_answer_is_taken_from_any_place(subtests: pytest.Subtests) -> None:
    whole: dict[str, tuple[str, Any]] = {
        "a failed response": ("responses", RESPONSE | {"error": LIMIT}),
        "a failed response with details": ("responses", RESPONSE | {"status_details": {"error": LIMIT}}),
        "an error beside a choice": (
            "chat",
            {"choices": [{"index": 0, "message": {"content": "half"}, "finish_reason": "error", "error": LIMIT}]},
        ),
        "a chat's own": ("chat", {"error": {"code": 429}, "message": WORDS}),
        "Anthropic's": ("messages", OF_MESSAGES["as Anthropic writes it"]),
        "an error in an error": ("messages", OF_MESSAGES["an error in an error"]),
    }
    for name, (api, body) in whole.items():
        with subtests.test(name):
            kind, message = await _failure(api, orjson.dumps(body), is_streamed=False)
            assert kind == "rate_limit"
            assert WORDS in message


async def test_fields_of_an_error_with_nothing_in_them_are_no_error() -> None:
    response = RESPONSE | {
        "status": "completed",
        "error": {"code": None, "message": None},
        "output": [{"type": "message", "content": [{"type": "output_text", "text": "ferry"}]}],
    }
    body = b"data: " + orjson.dumps({"type": "response.completed", "response": response}) + b"\n\n"
    async with saying(body, **{"Content-Type": "text/event-stream"}) as origin:
        answer = await perform(settings("openai", origin, api="responses"), _asked("responses", is_streamed=True))
    assert answer.output == "ferry"
