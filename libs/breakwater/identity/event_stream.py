"""Responses that are server-sent events: how many may be open, how they are written, and how they end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from typing import Any

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from breakwater.identity.auth import caller_of, wait_until_refused, why_refused
from breakwater.kernel.http.problems import RequestError, not_read
from breakwater.kernel.http.server import wait_for_disconnect
from breakwater.kernel.nats.errors import BusError
from breakwater.kernel.process import background
from breakwater.kernel.redis.connection import StateUnavailableError

MAX_STREAMS = 200
MAX_OF_A_KEY = 50
"""The most streams of one key, so that no program can take all of them."""

KEEP_ALIVE_S = 15.0
"""Interval of comments on a silent stream: proxies close a connection that is silent for a minute."""

EARLY_S = 0.005
"""Time by which a timer may fire early: uvloop's timers count whole milliseconds."""

SEND_TIMEOUT_S = 60.0
"""Time limit for a client to receive anything at all."""

KEY_LOOK_S = 15.0
"""Interval at which the key that opened a stream is checked: it may be revoked meanwhile."""

FAREWELL_S = 1.0

_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}

Ending = asyncio.Future[str]
"""The reason why a stream is to end."""


class OpenStreams:
    """The streams of this process that are open."""

    def __init__(self, limit: int | None = None, noun: str = "streams") -> None:
        """Sets a limit of open streams, all of which one key may have; None for the default limits."""
        self._limit = limit
        self._noun = noun
        self._code = f"too_many_{noun.replace(' ', '_')}"
        self._open: dict[Ending, str] = {}
        self._released = False

    @contextmanager
    def open(self, request: Request) -> Generator[Ending]:
        """Counts one more stream of the request's key while the block runs.

        Raises:
            RequestError: 429, the key has its share; 503, all streams are taken.
        """
        key_id = caller_of(request).id
        limit = self._limit or MAX_STREAMS
        key_limit = self._limit or MAX_OF_A_KEY
        if len(self._open) >= limit:
            message = f"no more {self._noun} may be open here than {limit}; close one, or ask again later"
            raise RequestError(503, self._code, message, retry_after_s=5.0)
        if sum(holder == key_id for holder in self._open.values()) >= key_limit:
            message = f"this API key has {key_limit} {self._noun} open here, the most for a key; close one"
            raise RequestError(429, self._code, message, retry_after_s=5.0)
        ending: Ending = asyncio.get_running_loop().create_future()
        self._open[ending] = key_id
        try:
            if self._released:
                end(ending, "the service stops; connect again")
            yield ending
        finally:
            del self._open[ending]

    def release(self) -> None:
        """Ends all streams, now and from now on, because the process stops."""
        self._released = True
        for ending in self._open:
            end(ending, "the service stops; connect again")


def end(ending: Ending, why: str) -> None:
    """Ends a stream, with a message for its reader."""
    if not ending.done():
        ending.set_result(why)


class EventStream(Response):
    """The headers of an event stream, without a length. A subclass sends the events."""

    def __init__(self, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(headers={**_HEADERS, **(headers or {})})
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]

    async def begin(self, send: Send) -> None:
        """Sends the status and the headers."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})


class StreamSilence:
    """The time for which nothing was sent on a stream. A comment must end it before a proxy closes the stream."""

    def __init__(self) -> None:
        self._comment_at = 0.0

    def end(self) -> None:
        """Notes that something was sent."""
        self._comment_at = time.monotonic() + KEEP_ALIVE_S

    def comment_due_s(self) -> float:
        """Seconds until a comment is due: 0 once a timer for it may have fired, and before the first `end`."""
        due_s = self._comment_at - time.monotonic()
        return due_s if due_s > EARLY_S else 0.0


class Sender:
    """Sends to a reader, and knows when a comment is due."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.silence = StreamSilence()

    async def begin(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Sends the status and the headers."""
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, data: bytes, *, more: bool = True) -> None:
        """Sends data and waits for a slow reader. Raises TimeoutError: the reader takes nothing at all."""
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await send_part(self._send, data, more=more)
        self.silence.end()

    async def send_due_comment(self) -> None:
        """Sends a comment if it is due."""
        if not self.silence.comment_due_s():
            await self.send(comment("still here"))


class FollowedStream(EventStream):
    """The stream of one reader. Problems before it has begun become error responses."""

    def __init__(self, streams: OpenStreams, request: Request) -> None:
        super().__init__()
        self._streams = streams
        self._request = request

    def open_source(self, ending: Ending) -> AbstractAsyncContextManager[Callable[[Sender], Coroutine[Any, Any, None]]]:
        """Opens the source of the stream, and yields the function that writes the events to a sender."""
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream until it is done, its reader leaves or is too slow, its key is revoked, or it is ended."""
        with self._streams.open(self._request) as ending:
            try:
                async with self.open_source(ending) as write:
                    await self.begin(send)
                    if scope["method"] == "HEAD":
                        await send_part(send, b"", more=False)
                    else:
                        await self._send(write(Sender(send)), ending, receive, send)
            except (BusError, StateUnavailableError) as error:
                raise not_read(error) from error

    async def _send(self, write: Coroutine[Any, Any, None], ending: Ending, receive: Receive, send: Send) -> None:
        async def watch_key() -> None:
            end(ending, await wait_until_refused(self._request, KEY_LOOK_S))

        writing = asyncio.create_task(write)
        leaving = asyncio.create_task(wait_for_disconnect(receive))
        watching = asyncio.create_task(watch_key())
        try:
            await asyncio.wait([writing, leaving, ending], return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                try:
                    writing.result()
                except TimeoutError:
                    # The reader takes nothing, not even a farewell: its connection breaks, and only the log says why.
                    key_id = caller_of(self._request).id
                    structlog.get_logger().warning("stream_cut", path=self._request.url.path, key_id=key_id)
            elif (reason := ending.result() if ending.done() else why_refused(self._request)) is not None:
                # This ends the stream between two events, as only waiting can be cancelled.
                await background.stop(writing)
                with suppress(TimeoutError):
                    async with asyncio.timeout(FAREWELL_S):
                        await send_part(send, comment(reason), more=False)
        finally:
            await background.stop(writing, leaving, watching)


async def send_part(send: Send, data: bytes, *, more: bool = True) -> None:
    """Sends a part of the body. Waits for a slow client; the caller sets the time limit."""
    await send({"type": "http.response.body", "body": data, "more_body": more})


def server_sent(event: str, data: bytes, event_id: object) -> bytes:
    """Formats one event of a stream. `data` is JSON on one line."""
    return b"event: %b\ndata: %b\nid: %b\n\n" % (event.encode(), data, str(event_id).encode())


def comment(text: str) -> bytes:
    """Formats a comment, which readers skip."""
    return f": {text}\n\n".encode()
