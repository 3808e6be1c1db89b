"""An answer as server-sent events: the worker's chunks, and from the result the rest that was missed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, ClassVar, Protocol

import orjson
from starlette.types import Receive, Scope, Send

from breakwater.dialects.rules.chat_completions import with_error_as_answer
from breakwater.identity import event_stream
from breakwater.identity.event_stream import EventStream, send_part

MAX_UNSENT = 1_000
"""The most messages that a client may be behind. Beyond that, it gets the rest with the result."""

_LIMIT_EVERY_S = 5.0
"""Interval at which the time limit of sending is extended."""


class ChunkInbox:
    """The received messages of a job's answer. Putting one never waits.

    Attributes:
        is_complete: True while no message was missed. After a gap, no more are taken, as they can't be sent.
    """

    def __init__(self) -> None:
        self.is_complete = True
        self._messages: deque[dict[str, Any]] = deque()
        self._next = 1
        self._changed = asyncio.Event()

    def put(self, data: bytes) -> None:
        """Adds a received message."""
        message: dict[str, Any] = orjson.loads(data)
        if not self.is_complete:
            return
        if message["number"] == self._next and len(self._messages) < MAX_UNSENT:
            self._next += 1
            self._messages.append(message)
            self._changed.set()
        else:
            self.is_complete = False

    @property
    def first(self) -> Mapping[str, Any] | None:
        """The next message; None if there is none."""
        return self._messages[0] if self._messages else None

    def take(self) -> list[dict[str, Any]]:
        """Returns the chunks that have come since the last call."""
        if len(self._messages) == 1:
            return self._messages.popleft()["chunks"]
        chunks = [chunk for message in self._messages for chunk in message["chunks"]]
        self._messages.clear()
        return chunks

    async def wait_nonempty(self, deciding: asyncio.Future[bytes | None], timeout_s: float | None = None) -> None:
        """Waits until there is a message, the job is decided, or the time is up."""
        self._changed.clear()
        if self._messages or deciding.done():
            return
        deciding.add_done_callback(self._wake)
        # `asyncio.timeout` would cost as much as everything else that is done for a message.
        timer = None if timeout_s is None else asyncio.get_running_loop().call_later(timeout_s, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            deciding.remove_done_callback(self._wake)
            if timer is not None:
                timer.cancel()

    def _wake(self, _: asyncio.Future[bytes | None]) -> None:
        self._changed.set()


class Encoder(Protocol):
    """Writes the events of one answer as one API has them. It remembers what was sent."""

    keep_alive: ClassVar[bytes]
    """Sent while no chunks come."""

    def events(self, chunks: Iterable[dict[str, Any]]) -> bytes:
        """Writes the events of a job's chunks, in order."""
        ...

    def end(
        self, result: dict[str, Any] | None, *, complete: bool, error: Callable[[dict[str, Any] | None], bytes]
    ) -> bytes:
        """Writes the last events.

        Args:
            result: the job's result; None if the process stops.
            complete: no chunk was missed.
            error: returns the JSON of an error response, for a result without an answer or for None.
        """
        ...


class EncodedStream(EventStream):
    """The response to one request. If its answer has not begun yet, the client is pinged first."""

    def __init__(
        self,
        inbox: ChunkInbox,
        deciding: asyncio.Future[bytes | None],
        *,
        headers: Mapping[str, str],
        encoder: Encoder,
        result: dict[str, Any] | None = None,
        error: Callable[[dict[str, Any] | None], bytes],
        close: Callable[[bool, bool], Awaitable[None]],
    ) -> None:
        """Prepares the response.

        Args:
            inbox: the received messages.
            deciding: returns the result; None if the client has left, or the process stops.
            headers: the headers of the response.
            encoder: writes the API's events.
            result: the result, if the job was decided before; else None.
            error: returns the body of an error, for a result or, if the process stops, for None.
            close: closes everything that is open for the stream. It takes two flags: all was sent; the client takes
                nothing any more.
        """
        super().__init__(headers)
        self._inbox = inbox
        self._deciding = deciding
        self._encoder = encoder
        self._result = result
        self._error = error
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream until the answer is whole, it has failed, the client leaves, or the process stops."""
        del scope, receive
        all_sent = stuck = False
        try:
            await self.begin(send)
            async with asyncio.timeout(event_stream.SEND_TIMEOUT_S) as limit:
                all_sent = await self._write(send, limit)
        except TimeoutError:
            stuck = True
        finally:
            await self._close(all_sent, stuck)

    async def _write(self, send: Send, limit: asyncio.Timeout) -> bool:
        """Sends the whole answer. Returns True if all was sent.

        Args:
            send: the ASGI function.
            limit: the entered timeout, which is extended as data is sent: a timeout for each message would cost more
                than sending it.
        """
        inbox = self._inbox
        deciding = self._deciding
        loop = asyncio.get_running_loop()
        limited_at = loop.time()
        has_begun = False
        silence = event_stream.StreamSilence()
        if inbox.first is not None or deciding.done():
            silence.end()
        while True:
            if (now := loop.time()) - limited_at > _LIMIT_EVERY_S:
                limit.reschedule(now + event_stream.SEND_TIMEOUT_S)
                limited_at = now
            if chunks := inbox.take():
                has_begun = True
                # Chunks that the client has not asked for have no events.
                if events := self._encoder.events(chunks):
                    await send_part(send, events)
                    silence.end()
            elif deciding.done():
                break
            elif due_s := silence.comment_due_s():
                await inbox.wait_nonempty(deciding, due_s)
            else:
                await send_part(send, self._encoder.keep_alive)
                silence.end()
        document = deciding.result()
        result = self._result
        if result is None and document is not None:
            result = orjson.loads(document)
        if result is not None and not has_begun:
            # Only before an answer has begun can an error take its place.
            result = with_error_as_answer(result)
        last = self._encoder.end(result, complete=inbox.is_complete, error=self._error)
        await send_part(send, last, more=False)
        return document is not None
