"""The body of a streamed answer: its events, their chunks, its time limit, and the ways in which it may break off."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
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
from breakwater.calls.providers.event_stream import EVENT_STREAM, EventStreamReader
from breakwater.calls.providers.exchange import Exchange
from breakwater.calls.providers.failures import carries_error, error_in_answer, first_of, read_json
from breakwater.calls.providers.server_sent import EventReader, EventTooLargeError
from breakwater.calls.rules.classify import CallFailure
from breakwater.dialects.rules.chat_chunks import Assembly, Chunk
from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.json_values import TOO_DEEP
from breakwater.kernel.surrogates import EventJoiner, whole_text, whole_value
from breakwater.redaction.rules.redact import KnownSecrets

_LAST_BYTES_S = 0.05
"""Time to wait for the end of a body after its last event, so that the connection can be used again."""

GATHER_S = 0.1
"""The longest time for which pieces of an answer are gathered. Ten messages a second look smooth, and each message
costs work in four processes, however short it is."""

_ALIVE = frozenset({b"ping", b"keepalive", b"keep-alive", b"heartbeat"})
"""Names of events that only keep the connection alive."""

_EXTEND_EVERY = 0.05
"""Part of the idle timeout after which the limit is extended again: extending costs as much as parsing a chunk."""


class StreamBrokenError(BreakwaterError):
    """An event of the stream says that the call has failed."""

    def __init__(self, failure: CallFailure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class _IdleLimit:
    """Extends the time limit of a stream whenever something arrives, up to the total timeout."""

    def __init__(self, limit: AnswerTimeout, streaming: Streaming, ends_at: float) -> None:
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._idle_s = streaming.idle_timeout_s
        self._every_s = streaming.idle_timeout_s * _EXTEND_EVERY
        self._ends_at = ends_at
        self._extended_at = 0.0

    def extend(self, *, has_begun: bool) -> None:
        """Restarts the idle timeout. Until the answer has begun, this never shortens the time to its beginning."""
        now = self._loop.time()
        if now - self._extended_at < self._every_s:
            return
        idle_until = now + self._idle_s + self._every_s
        if not has_begun:
            idle_until = max(self._limit.ends_at, idle_until)
        self._limit.reschedule(min(self._ends_at, idle_until))
        self._extended_at = now


async def receive(
    response: Exchange,
    reader: StreamReader,
    streaming: Streaming,
    limit: AnswerTimeout,
    ends_at: float,
    secrets: KnownSecrets,
) -> None:
    """Passes on a stream until its end.

    Args:
        response: the response, whose body is the stream.
        reader: reads the API's events.
        streaming: where the chunks go, and the idle timeout.
        limit: the entered timeout, set to the time by which the answer must have begun.
        ends_at: the time by which all of it must have arrived, on the loop's clock, in seconds.
        secrets: the secrets to hide in events.

    Raises:
        StreamBrokenError: an event reports an error.
        UnusableAnswerError: an event can't be read, the end is missing, or the answer is too large.
        TimeoutError: nothing has arrived for too long.
        aiohttp.ClientError: the connection broke.
    """
    events = EventStreamReader() if response.content_type == EVENT_STREAM else EventReader()
    joiner = EventJoiner()
    answer = streaming.answer
    content = response.content
    idle_limit = _IdleLimit(limit, streaming, ends_at)
    at_end = False
    while not (at_end or reader.ended):
        at_end = content.at_eof()
        piece = b"" if at_end else await _read_piece(content)
        chunks = list[Chunk]()
        length_before = answer.length
        try:
            for chunk in _chunks(events, joiner, reader, piece, secrets, is_last=at_end):
                chunks.append(chunk)
        finally:
            # The chunks before an unusable event are part of the answer, too.
            if chunks:
                await streaming.put(chunks)
        if answer.length > MAX_ANSWER_BYTES:
            raise AnswerTooLargeError(f"the answer is over {MAX_ANSWER_BYTES} bytes")
        has_grown = answer.length > length_before
        # Events of the API without content show that a model thinks, or that a tool of its provider runs.
        if has_grown or any("event" in chunk for chunk in chunks):
            idle_limit.extend(has_begun=answer.length > 0)
        if has_grown and not reader.ended:
            await _gather(response)
    _check_end(reader, answer)
    with suppress(TimeoutError, aiohttp.ClientError, OSError):
        async with asyncio.timeout(_LAST_BYTES_S):
            await content.read()


def is_stream(response: Exchange) -> bool:
    """Returns True for an answer that is streamed, by its content type."""
    return response.content_type in ("text/event-stream", EVENT_STREAM)


def is_of_events(body: bytes) -> bool:
    """Returns True if a body is a stream: some servers stream unasked, or with another content type."""
    return body[:64].lstrip().startswith((b"data:", b"event:"))


def assemble(body: bytes, reader: StreamReader, answer: Assembly, secrets: KnownSecrets) -> None:
    """Reads a stream whose whole body has arrived. Raises StreamBrokenError, UnusableAnswerError."""
    for chunk in _chunks(EventReader(), EventJoiner(), reader, body, secrets, is_last=True):
        answer.add(chunk)
    _check_end(reader, answer)


def _check_end(reader: StreamReader, answer: Assembly) -> None:
    if not reader.whole:
        raise UnusableAnswerError(f"the stream ended early, after {answer.chunks} chunks of content")


async def _gather(response: Exchange) -> None:
    """Pauses reading while pieces of an answer collect in the kernel's buffer, and then cost as much as one."""
    transport = response.transport
    if transport is None or transport.is_closing():
        return
    transport.pause_reading()
    # All streams pause until the same moments, so that their messages share turns of the loop, and packets.
    await asyncio.sleep(GATHER_S - asyncio.get_running_loop().time() % GATHER_S)
    if not transport.is_closing():
        transport.resume_reading()


async def _read_piece(content: aiohttp.StreamReader) -> bytes:
    """Reads the bytes that have arrived. Raises aiohttp.ClientError: the connection broke, and all was read."""
    if content.exception() is not None:
        # aiohttp raises immediately, and would lose what it has received and not handed out yet.
        buffered: bytes = cast(Any, content)._read_nowait(-1)
        if buffered:
            return buffered
    return await content.readany()


def _chunks(
    events: EventReader | EventStreamReader,
    joiner: EventJoiner,
    reader: StreamReader,
    piece: bytes,
    secrets: KnownSecrets,
    *,
    is_last: bool,
) -> Iterator[Chunk]:
    try:
        for name, data in chain(events.feed(piece), events.end()) if is_last else events.feed(piece):
            if name in _ALIVE:
                continue
            if data == b"[DONE]":
                yield from _read_held(joiner, reader)
                yield from reader.read(None)
                continue
            is_error = name == b"error"
            event = secrets.hide_in_parsed(data, _parse_event(data, joiner, is_error=is_error))
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


def _parse_event(data: bytes, joiner: EventJoiner, *, is_error: bool) -> dict[str, Any]:
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
