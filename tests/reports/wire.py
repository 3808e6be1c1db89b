"""Answers as makers put them on the wire, and a provider that gives each model its own."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from aiohttp import web

from tests.calls.providers.kit import answering

Dialect = Literal["openai", "anthropic"]
Body = dict[str, Any]
Event = Body | str
"""The JSON of one event, or lines as they stand in the stream."""

TEXT = "The ferry leaves at nine."
USED = {"prompt_tokens": 100, "completion_tokens": 50}
READ = {"input_tokens": 100, "output_tokens": 50}
DONE = "data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer.

    Attributes:
        body: JSON; bytes as they are; or a tuple, which is the events of a stream.
        status: HTTP's.
        headers: beside the content's type.
        cut: the connection breaks before the body's end.
    """

    body: Any
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    cut: bool = False

    def data(self) -> bytes:
        """As it goes over the wire."""
        match self.body:
            case bytes():
                return self.body
            case tuple():
                return b"".join(_event(one) for one in cast(tuple[Event, ...], self.body))
            case _:
                return json.dumps(self.body).encode()

    @property
    def content_type(self) -> str:
        """Of the body."""
        return "text/event-stream" if isinstance(self.body, tuple) else "application/json"


Answer = Reply | Callable[[Body], Reply]
"""A reply, or what makes one of the request's body."""


def _event(one: Event) -> bytes:
    if isinstance(one, str):
        return one.encode()
    name = f"event: {one['type']}\n" if isinstance(one.get("type"), str) and "choices" not in one else ""
    return f"{name}data: {json.dumps(one)}\n\n".encode()


# OpenAI's


def chat(
    content: Any = TEXT, usage: Any = USED, finish: Any = "stop", *, more: Body | None = None, **said: Any
) -> Reply:
    """A `chat.completion`; `said` is more of its message, `more` of itself."""
    message = {"role": "assistant", "content": content, **said}
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return Reply({**_head("chat.completion"), "choices": [choice], "usage": usage, **(more or {})})


def chunk(usage: Any = None, finish: Any = None, **delta: Any) -> Body:
    """One event of a stream."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {**_head("chat.completion.chunk"), "choices": [choice], **({} if usage is None else {"usage": usage})}


def used(usage: Any = USED, **more: Any) -> Body:
    """The last event of a stream, with its usage."""
    return {**_head("chat.completion.chunk"), "choices": [], "usage": usage, **more}


def stream(*events: Event, done: bool = True, cut: bool = False) -> Reply:
    """Events, and OpenAI's mark of the end."""
    return Reply((*events, *((DONE,) if done else ())), cut=cut)


def said(*texts: Any, finish: Any = "stop", usage: Any = USED, done: bool = True) -> Reply:
    """A streamed answer of these pieces of text; no usage where it is None."""
    pieces = [chunk(content=text) for text in texts or (TEXT[:9], TEXT[9:])]
    end = [] if finish is None else [chunk(finish=finish)]
    return stream(*pieces, *end, *([] if usage is None else [used(usage)]), done=done)


def calls(*deltas: Any, finish: Any = "tool_calls") -> Reply:
    """A streamed answer that calls tools: one chunk for each `tool_calls` of a delta."""
    return stream(*(chunk(tool_calls=delta) for delta in deltas), chunk(finish=finish), used())


def call(arguments: Any = '{"city": "Oslo"}', name: Any = "find", **more: Any) -> Body:
    """A tool call."""
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}, **more}


def _head(kind: str) -> Body:
    return {"id": "chatcmpl-1", "object": kind, "created": 1_750_000_000, "model": "m"}


# Anthropic's


def message(*content: Any, usage: Any = READ, stop: Any = "end_turn", **more: Any) -> Reply:
    """A message; a text stands for the block that holds it."""
    blocks = [_block(one) for one in content or (TEXT,)]
    return Reply({**_message(), "content": blocks, "stop_reason": stop, "usage": usage, **more})


def events(*inner: Event, start: Any = None, delta: Any = None, stop: Any = "end_turn", end: bool = True) -> Reply:
    """A streamed message around the events of its blocks.

    Args:
        inner: between `message_start` and `message_delta`.
        start: usage of the one.
        delta: usage of the other.
        stop: the reason.
        end: it has a `message_stop`.
    """
    return Reply(
        (
            started(start),
            *inner,
            {
                "type": "message_delta",
                "delta": {"stop_reason": stop},
                "usage": {"output_tokens": 50} if delta is None else delta,
            },
            *(({"type": "message_stop"},) if end else ()),
        )
    )


def started(usage: Any = None) -> Body:
    """The first event of a message."""
    usage = {"input_tokens": 100, "output_tokens": 1} if usage is None else usage
    return {"type": "message_start", "message": {**_message(), "content": [], "stop_reason": None, "usage": usage}}


def block(content: Any = TEXT, index: Any = 0, pieces: Sequence[Any] | None = None) -> tuple[Event, ...]:
    """The events of one block: of a text, or of another one with the deltas of it."""
    start = _block("" if isinstance(content, str) else content)
    deltas = [{"type": "text_delta", "text": content}] if pieces is None else pieces
    return (
        {"type": "content_block_start", "index": index, "content_block": start},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": index},
    )


def tool(input: Any = None, name: Any = "find", **more: Any) -> Body:  # noqa: A002  Anthropic's word
    """A block that calls a tool."""
    return {"type": "tool_use", "id": "toolu_1", "name": name, "input": {} if input is None else input, **more}


def partial(text: Any) -> Body:
    """A piece of a tool's input."""
    return {"type": "input_json_delta", "partial_json": text}


def _message() -> Body:
    return {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_sequence": None}


def _block(content: Any) -> Any:
    return {"type": "text", "text": content} if isinstance(content, str) else content


# Errors


def fails(status: int, text: str, headers: Mapping[str, str] | None = None, **error: Any) -> Reply:
    """An error by its status, worded as OpenAI does."""
    return Reply({"error": {"message": text, **error}}, status, headers or {})


def refuses(status: int, kind: str, text: str, headers: Mapping[str, str] | None = None) -> Reply:
    """The same, as Anthropic does."""
    return Reply({"type": "error", "error": {"type": kind, "message": text}}, status, headers or {})


def unless(is_refused: Callable[[Body], Any], refusal: Reply, good: Reply) -> Callable[[Body], Reply]:
    """A model that takes some requests, and refuses others."""
    return lambda body: refusal if is_refused(body) else good


@dataclass(slots=True)
class Provider:
    """What each model answers, and what it was asked.

    Attributes:
        origin: of its URL.
        answers: by the model's name, one for each call; the last stands for all that follow.
        asked: the bodies of requests, by the model's name.
    """

    origin: str
    answers: Mapping[str, Sequence[Answer]]
    asked: dict[str, list[Body]]


@asynccontextmanager
async def providing(answers: Mapping[str, Sequence[Answer]]) -> AsyncGenerator[Provider]:
    """Serves both dialects."""
    asked: dict[str, list[Body]] = {}

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        body: Body = json.loads(await request.read())
        requests = asked.setdefault(body["model"], [])
        requests.append(body)
        scripted = answers[body["model"]]
        chosen = scripted[min(len(requests), len(scripted)) - 1]
        reply = chosen if isinstance(chosen, Reply) else chosen(body)
        response = web.StreamResponse(
            status=reply.status, headers={**reply.headers, "Content-Type": reply.content_type}
        )
        await response.prepare(request)
        await response.write(reply.data())
        if reply.cut and request.transport is not None:
            request.transport.close()
        else:
            await response.write_eof()
        return response

    async with answering(answer) as origin:
        yield Provider(origin, answers, asked)
