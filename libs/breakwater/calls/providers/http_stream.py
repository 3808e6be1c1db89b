"""The body of a streamed answer: its events, the chunks that they mean, and how it may end before its time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

import aiohttp

from breakwater.calls.providers.base import (
    MAX_ANSWER_BYTES,
    AnswerTimeout,
    AnswerTooLargeError,
    Streaming,
    StreamReader,
    UnusableAnswerError,
)
from breakwater.calls.providers.failures import carries_error, error_in_answer, first_of, read_json
from breakwater.calls.providers.server_sent import EventReader, EventTooLargeError
from breakwater.calls.rules.classify import CallFailure
from breakwater.dialects.rules.chat_chunks import Assembly, Chunk
from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.json_values import TOO_DEEP
from breakwater.kernel.surrogates import EventJoiner, whole_text, whole_value
from breakwater.redaction.rules.redact import KnownSecrets

_LAST_BYTES_S = 0.05
"""Time for which the end of a body is awaited after its last event, so that the connection can be used again."""

GATHER_S = 0.1
"""The most time for which more of an answer is gathered. Ten messages a second look smooth; each costs a
turn of four processes, however little is in it."""

_ALIVE = frozenset({b"ping", b"keepalive", b"keep-alive", b"heartbeat"})
"""Names of events that say only that the stream is not over."""

_LIMIT_EVERY = 0.05
"""Part of the idle timeout after which the timeout is set again: setting it costs as much as parsing a chunk."""


class StreamBrokenError(BreakwaterError):
    """The stream itself says what went wrong."""

    def __init__(self, failure: CallFailure) -> None:
        super().__init__(str(failure))
        self.failure = failure


async def receive(
    response: aiohttp.ClientResponse,
    reader: StreamReader,
    streaming: Streaming,
    limit: AnswerTimeout,
    secrets: KnownSecrets,
) -> None:
    """Passes on a stream until its end.

    Args:
        response: whose body it is.
        reader: of the API's events.
        streaming: where the chunks go.
        limit: entered, with the time until the answer must have begun.
        secrets: which no event may say.

    Raises:
        StreamBrokenError: an error came as an event, or too much was said.
        UnusableAnswerError: an event can't be read, or the end is missing.
        TimeoutError: nothing came for too long.
        aiohttp.ClientError: the connection broke.
    """
    loop = asyncio.get_running_loop()
    events = EventReader()
    joiner = EventJoiner()
    answer = streaming.answer
    content = response.content
    ends_at = loop.time() + streaming.total_timeout_s
    limited_at = 0.0
    over = False
    while not (over or reader.done):
        over = content.at_eof()
        # The last event may lack the empty line that ends it.
        piece = b"\n\n" if over else await _piece(content)
        chunks = list[Chunk]()
        said = answer.length
        try:
            for chunk in _chunks(events, joiner, reader, piece, secrets, is_last=over):
                chunks.append(chunk)
        finally:
            # What came before an event that can't be used was said all the same.
            if chunks:
                await streaming.put(chunks)
        if answer.length > MAX_ANSWER_BYTES:
            raise AnswerTooLargeError(f"the answer is over {MAX_ANSWER_BYTES} bytes")
        # A model at work says so in events of its own API, while it thinks or a tool of its provider runs.
        if answer.length > said or any("event" in chunk for chunk in chunks):
            now = loop.time()
            part_s = streaming.idle_timeout_s * _LIMIT_EVERY
            if now - limited_at >= part_s:
                silent_until = now + streaming.idle_timeout_s + part_s
                limit.reschedule(min(ends_at, silent_until if answer.length else max(limit.ends_at, silent_until)))
                limited_at = now
            if not reader.done and answer.length > said:
                await _gather(response)
    _check_end(reader, answer)
    with suppress(TimeoutError, aiohttp.ClientError, OSError):
        async with asyncio.timeout(_LAST_BYTES_S):
            await content.read()


def is_of_events(body: bytes) -> bool:
    """True if a body is a stream, whatever its type says, as some servers stream unasked or name another type."""
    return body[:64].lstrip().startswith((b"data:", b"event:"))


def assembled(body: bytes, reader: StreamReader, answer: Assembly, secrets: KnownSecrets) -> None:
    """Reads a stream that is there as a whole. Raises StreamBrokenError, UnusableAnswerError."""
    for chunk in _chunks(EventReader(), EventJoiner(), reader, body + b"\n\n", secrets, is_last=True):
        answer.add(chunk)
    _check_end(reader, answer)


def _check_end(reader: StreamReader, answer: Assembly) -> None:
    if not reader.whole:
        raise UnusableAnswerError(f"the stream ended early, after {answer.chunks} chunks of content")


async def _gather(response: aiohttp.ClientResponse) -> None:
    """Lets more of an answer come, in the kernel's buffer: all of it then costs what one piece does."""
    transport = None if response.connection is None else response.connection.transport
    if transport is None or transport.is_closing():
        return
    transport.pause_reading()
    # All streams until the same moments: so their messages share turns and packets, too.
    await asyncio.sleep(GATHER_S - asyncio.get_running_loop().time() % GATHER_S)
    if not transport.is_closing():
        transport.resume_reading()


async def _piece(content: aiohttp.StreamReader) -> bytes:
    """The bytes that came. Raises aiohttp.ClientError once nothing is left of what came before the connection broke."""
    # aiohttp raises immediately, and would lose what it has received and not handed out yet.
    if content.exception() is not None and (rest := cast(Any, content)._read_nowait(-1)):
        return rest
    return await content.readany()


def _chunks(
    events: EventReader,
    joiner: EventJoiner,
    reader: StreamReader,
    piece: bytes,
    secrets: KnownSecrets,
    *,
    is_last: bool,
) -> Iterator[Chunk]:
    try:
        for name, data in events.feed(piece):
            if name in _ALIVE:
                continue
            if data == b"[DONE]":
                yield from _read_held(joiner, reader)
                yield from reader.read(None)
                continue
            is_error = name == b"error"
            event = secrets.hidden_in_read(data, _parsed(data, joiner, is_error=is_error))
            if is_error or carries_error(event):
                yield from _read_held(joiner, reader)
                raise StreamBrokenError(error_in_answer(whole_value(event)))
            if joiner.is_idle:
                yield from reader.read(event)
            else:
                for whole_event in joiner.put(event):
                    yield from reader.read(whole_event)
        if is_last:
            yield from _read_held(joiner, reader)
    except EventTooLargeError as error:
        raise AnswerTooLargeError(str(error)) from error


def _read_held(joiner: EventJoiner, reader: StreamReader) -> Iterator[Chunk]:
    for event in joiner.end():
        yield from reader.read(event)


def _parsed(data: bytes, joiner: EventJoiner, *, is_error: bool) -> dict[str, Any]:
    try:
        event: dict[str, Any] = first_of(read_json(data, joiner=joiner)) or {}
    except ValueError as error:
        if is_error:
            return {"error": data.decode(errors="replace")}
        kind = AnswerTooLargeError if str(error) == TOO_DEEP else UnusableAnswerError
        raise kind(f"an event of the stream {error}") from error
    if type(event) is not dict:
        if is_error:
            return {"error": whole_text(str(event))}
        raise UnusableAnswerError("an event of the stream is not a JSON object")
    return event
