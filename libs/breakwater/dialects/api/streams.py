"""An answer as server-sent events: the worker's chunks, and any missed rest from the result."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, ClassVar, Protocol

import orjson
from starlette.types import Receive, Scope, Send

from breakwater.dialects.rules.chat_completions import with_error_as_answer
from breakwater.kernel.http import event_stream
from breakwater.kernel.http.event_stream import EventStream, send_part

MAX_UNSENT = 1_000
"""Messages that a client may be behind. Beyond, it gets the rest with the result."""

_LIMIT_EVERY_S = 5.0
"""Interval at which the limit of sending is moved on."""


class ChunkInbox:
    """The messages of a job's answer, as they come. Never waits.

    Attributes:
        whole: none was missed. After a gap, no more are taken: they can't be sent.
    """

    def __init__(self) -> None:
        self.whole = True
        self._messages: deque[dict[str, Any]] = deque()
        self._next = 1
        self._stirred = asyncio.Event()

    def put(self, data: bytes) -> None:
        """Takes a received message."""
        message: dict[str, Any] = orjson.loads(data)
        if self.whole and (message["number"] != self._next or len(self._messages) >= MAX_UNSENT):
            self.whole = False
        if self.whole:
            self._next += 1
            self._messages.append(message)
            self._stirred.set()

    @property
    def first(self) -> Mapping[str, Any] | None:
        """The next message."""
        return self._messages[0] if self._messages else None

    def take(self) -> list[dict[str, Any]]:
        """The chunks that have come since the last time."""
        chunks = [chunk for message in self._messages for chunk in message["chunks"]]
        self._messages.clear()
        return chunks

    async def wait_nonempty(self, deciding: asyncio.Task[bytes | None], timeout_s: float | None = None) -> None:
        """Waits until there is a message, the job is decided, or the time is up."""
        self._stirred.clear()
        if self._messages or deciding.done():
            return
        deciding.add_done_callback(self._wake)
        # `asyncio.timeout` costs as much as all else that is done for a message.
        timer = None if timeout_s is None else asyncio.get_running_loop().call_later(timeout_s, self._stirred.set)
        try:
            await self._stirred.wait()
        finally:
            deciding.remove_done_callback(self._wake)
            if timer is not None:
                timer.cancel()

    def _wake(self, _: asyncio.Task[bytes | None]) -> None:
        self._stirred.set()


class Encoder(Protocol):
    """The events of one answer in the words of one API. It keeps in mind what was sent."""

    keep_alive: ClassVar[bytes]
    """Sent while nothing comes."""

    def events(self, chunks: Iterable[dict[str, Any]]) -> bytes:
        """The events that a job's chunks mean, in their order."""
        ...

    def end(
        self, result: dict[str, Any] | None, *, whole: bool, error: Callable[[dict[str, Any] | None], bytes]
    ) -> bytes:
        """The last events.

        Args:
            result: of the job; None if the process stops.
            whole: no chunk was missed.
            error: the JSON of an error response: for a result without an answer, or for None.
        """
        ...


class EncodedStream(EventStream):
    """The response to one request. If its answer has not begun yet, the client is pinged first."""

    def __init__(
        self,
        inbox: ChunkInbox,
        deciding: asyncio.Task[bytes | None],
        *,
        headers: Mapping[str, str],
        encoder: Encoder,
        error: Callable[[dict[str, Any] | None], bytes],
        ended: Callable[[bool, bool], Awaitable[None]],
    ) -> None:
        """Prepares it.

        Args:
            inbox: the received messages.
            deciding: gives the result; None if the client has left, or the process stops.
            headers: of the response.
            encoder: of the API.
            error: makes the body of an error from a result, or from None: the process stops.
            ended: called at the end with two flags: all was sent; the client takes nothing any more. Closes everything
                that is open for the stream.
        """
        super().__init__(headers)
        self._inbox = inbox
        self._deciding = deciding
        self._encoder = encoder
        self._error = error
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream until the answer is whole, it has failed, the client leaves, or the process stops."""
        del scope, receive
        whole = stuck = False
        try:
            await self.begin(send)
            async with asyncio.timeout(event_stream.SEND_TIMEOUT_S) as limit:
                whole = await self._write(send, limit)
        except TimeoutError:
            stuck = True
        finally:
            await self._ended(whole, stuck)

    async def _write(self, send: Send, limit: asyncio.Timeout) -> bool:
        """Sends all of it. `limit`: entered; a timeout of its own for each message would cost more than the sending."""
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
                # What a model is asked not to show has no events.
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
        found = deciding.result()
        result = None if found is None else orjson.loads(found)
        if result is not None and not has_begun:
            # Behind a part of an answer, an error is one.
            result = with_error_as_answer(result)
        last = self._encoder.end(result, whole=inbox.whole, error=self._error)
        await send_part(send, last, more=False)
        return found is not None
