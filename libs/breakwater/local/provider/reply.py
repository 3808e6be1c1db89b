"""The bytes that are sent for a decision, and their times: a body, a stream, or something broken."""

from __future__ import annotations

import codecs
from dataclasses import dataclass

import orjson

from breakwater.local.provider.behaviour import Decision, ScriptedAnswer
from breakwater.local.provider.openai import OpenAI, StreamEvent
from breakwater.local.provider.script import Fault, Pace, StreamFault

STALL_S = 30.0
JSON = {"Content-Type": "application/json"}
EVENTS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
_IN_STREAM: dict[str | None, StreamFault] = {
    "malformed_json": "malformed",
    "empty_body": "no_end",
    "error_in_200": "error",
}
"""Faults of a body, each with the fault at the beginning of a stream that corresponds to it."""
_IN_MIDDLE: dict[str | None, StreamFault] = {"truncated": "cut", "failed": "error"}
"""Faults of a body, each with the fault in the middle of a stream that corresponds to it."""


@dataclass(frozen=True, slots=True)
class WireReply:
    """An answer as it is sent.

    Attributes:
        status: the HTTP status; None resets the connection instead.
        headers: of the answer.
        steps: the time to wait before each event, and the event.
        length: of the body; None for a stream.
        chunks: number of chunks of content in the whole answer, if it is a stream.
        breaks: the connection is closed in the middle of the body.
        complete: all of the answer is sent, and nothing else.
    """

    status: int | None
    headers: dict[str, str]
    steps: list[tuple[float, StreamEvent]]
    length: int | None = None
    chunks: int = 0
    breaks: bool = False
    complete: bool = True


def reply_to(decision: Decision, dialect: OpenAI, request_id: str) -> WireReply:
    """Returns the answer for a decision over an interface, with the request's id."""
    status = decision.status
    answer = decision.answer
    if status is None:
        return WireReply(None, {}, [], complete=False)
    if answer is None or status >= 300:
        error = dialect.error(status, decision.error)
        if dialect.id_in_error:
            error = error | {"request_id": request_id}
        reply = _body_reply(status, orjson.dumps(error))
        reply.headers.update(dialect.error_headers(status, decision.rule.retry_after_s) | decision.rule.headers)
    else:
        reply = _answer_reply(status, decision, answer, dialect)
        reply.headers.update(decision.headers)
    reply.headers.setdefault(dialect.id_header, request_id)
    return reply


def _answer_reply(status: int, decision: Decision, answer: ScriptedAnswer, dialect: OpenAI) -> WireReply:
    if status == 200 and decision.pace is not None and not answer.request.embeds:
        return _stream_reply(answer, decision.pace, decision.rule, dialect)
    body = orjson.dumps(dialect.response_body(answer))
    half = body[: len(body) // 2]
    match decision.rule.kind:
        case "empty_body":
            return _body_reply(status, b"")
        case "error_in_200":
            return _body_reply(status, orjson.dumps(dialect.error(500, decision.error)))
        case "failed":
            return _body_reply(status, orjson.dumps(dialect.failure_body(answer, decision.error)))
        case "byte_order_mark":
            return _body_reply(status, codecs.BOM_UTF8 + body)
        case "malformed_json":
            return _body_reply(status, half)
        case "truncated":
            return WireReply(status, {**JSON}, [(0.0, StreamEvent(half))], len(body), breaks=True, complete=False)
        case _:
            return _body_reply(status, body)


def _body_reply(status: int, body: bytes) -> WireReply:
    return WireReply(status, {**JSON}, [(0.0, StreamEvent(body))], len(body))


def _stream_reply(answer: ScriptedAnswer, pace: Pace, rule: Fault, dialect: OpenAI) -> WireReply:
    events = dialect.stream(answer, pace)
    chunks = sum(event.content for event in events)
    fault = rule.stream
    after_chunks = rule.after_chunks
    if rule.kind in _IN_STREAM:
        fault = _IN_STREAM[rule.kind]
        after_chunks = 0
    elif rule.kind in _IN_MIDDLE:
        fault = _IN_MIDDLE[rule.kind]
        after_chunks = chunks // 2
    at = 0 if rule.kind == "empty_body" else _event_index(events, fault, after_chunks)
    wait_s = 0.0 if pace.tokens_per_s is None else pace.tokens_per_chunk / pace.tokens_per_s
    steps = [(wait_s if event.content else 0.0, event) for event in events]
    match fault:
        case "stall":
            steps[at] = (steps[at][0] + (rule.stall_s or STALL_S), events[at])
        case "malformed":
            data = events[at].data
            steps[at] = (steps[at][0], StreamEvent(data[: len(data) // 2].rstrip() + b"\n\n"))
        case "error":
            failed = rule.kind == "failed"
            error = dialect.failure_body(answer, rule.error) if failed else dialect.error(500, rule.error)
            steps[at:] = [(0.0, dialect.failure(error, at))]
        case "cut" | "no_end":
            del steps[at:]
        case None:
            pass
    return WireReply(200, {**EVENTS}, steps, chunks=chunks, breaks=fault == "cut", complete=fault in (None, "stall"))


def _event_index(events: list[StreamEvent], fault: StreamFault | None, after_chunks: int | None) -> int:
    """Returns the index of the event that a fault hits, or comes before."""
    if after_chunks is None and fault == "no_end":
        return len(events) - 1
    contents = [number for number, event in enumerate(events) if event.content]
    if after_chunks is not None and after_chunks < len(contents):
        return contents[after_chunks]
    return next(number for number, event in enumerate(events) if event.ends)
