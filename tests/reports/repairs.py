"""What is mended and asked again at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.reports.case import ASK, COST, Case, Check, bad
from tests.reports.wire import (
    TEXT,
    Body,
    Reply,
    block,
    chat,
    events,
    fails,
    message,
    refuses,
    said,
    unless,
)


def cases() -> Iterator[Case]:
    """All of them."""
    yield from _parameters()
    yield from _sampled()
    yield from _lowered()


def _parameters() -> Iterator[Case]:
    row = "parameters that we add ourselves are left out where they are refused, and that is remembered"
    unsupported = (
        "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
    )
    renamed = unless(
        lambda body: "max_tokens" in body,
        fails(400, unsupported, type="invalid_request_error", param="max_tokens", code="unsupported_parameter"),
        chat(),
    )
    mended = {"fallback": 0, "status": "succeeded", "output": TEXT, "text": TEXT}
    limit = {"max_tokens": 300}
    asked = Check("max_completion_tokens 300 last", lambda bodies: bodies[-1].get("max_completion_tokens") == 300)
    yield Case(row, "renamed", [renamed], {**mended, "calls": 2, "asked": asked}, params=limit)
    yield Case(row, "renamed-remembered", [renamed], {**mended, "calls": 3}, params=limit, times=2)
    streamed = unless(lambda body: "max_tokens" in body, fails(400, unsupported, param="max_tokens"), said())
    yield Case(row, "renamed-streamed", [streamed], {**mended, "calls": 2}, params=limit, stream=True)
    detail = [
        {
            "type": "extra_forbidden",
            "loc": ["body", "stream_options"],
            "msg": "Extra inputs are not permitted",
            "input": {"include_usage": True},
        }
    ]
    for name, refusal in (
        ("fastapi", Reply({"detail": detail}, 422)),
        ("mistral", Reply({"object": "error", "message": {"detail": detail}, "type": "invalid_request_error"}, 422)),
        (
            "unknown",
            fails(400, "Unknown parameter: 'stream_options'.", param="stream_options", code="unknown_parameter"),
        ),
        ("unrecognized", fails(400, "Unrecognized request argument supplied: stream_options")),
        ("words", fails(400, "Additional properties are not allowed ('stream_options' was unexpected)")),
    ):
        answer = unless(lambda body: "stream_options" in body, refusal, said())
        yield Case(row, f"stream-options-{name}", [answer], {**mended, "calls": 2}, stream=True)
    yield Case(row, "stream-options-remembered", [answer], {**mended, "calls": 3}, stream=True, times=2)
    own = fails(
        400,
        "Unsupported parameter: 'temperature' is not supported with this model.",
        param="temperature",
        code="unsupported_parameter",
    )
    schema = {"type": "object", "properties": {"leaves": {"type": "string"}}, "required": ["leaves"]}
    told, text = fails(400, "This model does not support response_format."), '{"leaves": "nine"}'
    answer = unless(lambda body: "response_format" in body, told, chat(text))
    ours = {**mended, "calls": 2, "output": None, "text": text}
    yield Case(row, "response-format", [answer], ours, agent={"output": {"schema": schema}})
    yield Case(row, "not-ours", [own], bad(1, "client"), params={"temperature": 1})


def _sampled() -> Iterator[Case]:
    row = "a tool call that the model got wrong is sampled again once"
    failed = fails(400, "Failed to call a function. See 'failed_generation'.", code="tool_use_failed")
    once = {"calls": 2, "fallback": 0, "status": "succeeded", "output": TEXT, "text": TEXT, "total": COST}
    yield Case(row, "sampled-once", [failed, chat()], once)
    yield Case(row, "sampled-once-streamed", [failed, said()], once, stream=True)


def _lowered() -> Iterator[Case]:
    row = "overflow by the output limit: the limit is lowered once before turns are dropped"
    room = 1192
    large = Check("too large", lambda body: (body.get("max_completion_tokens") or body["max_tokens"]) > room)
    turns = Check("no turn dropped", lambda bodies: len({len(body["messages"]) for body in bodies}) == 1)
    lowered: Body = {"calls": 2, "fallback": 0, "status": "succeeded", "output": TEXT, "asked": turns}
    more: dict[str, Any] = {"params": {"max_tokens": 4000}, "messages": _turns()}
    for name, text in _TOO_MUCH.items():
        answer = unless(large, fails(400, text), chat())
        yield Case(row, f"lowered-{name}", [answer], lowered, **more)
        yield Case(row, f"lowered-{name}-trim", [answer], lowered, agent={"on_context_overflow": "trim"}, **more)
    text = _TOO_MUCH["anthropic"]
    answer = unless(large, refuses(400, "invalid_request_error", text), message())
    yield Case(row, "lowered-native", [answer], lowered, "anthropic", **more)
    answer = unless(large, refuses(400, "invalid_request_error", text), events(*block()))
    yield Case(row, "lowered-native-streamed", [answer], lowered, "anthropic", stream=True, **more)


_TOO_MUCH = {
    "openai": "This model's maximum context length is 8192 tokens. However, you requested 11000 tokens (7000 in the "
    "messages, 4000 in the completion). Please reduce the length of the messages or completion.",
    "vllm": "'max_tokens' or 'max_completion_tokens' is too large: 4000. This model's maximum context length is 8192 "
    "tokens and your request has 7000 input tokens (4000 > 8192 - 7000).",
    "anthropic": "input length and `max_tokens` exceed context limit: 7000 + 4000 > 8192, decrease input length or "
    "`max_tokens` and try again",
}


def _turns() -> list[Body]:
    return [
        {"role": role, "content": f"turn {number}"} for number in range(4) for role in ("user", "assistant")
    ] + list(ASK)
