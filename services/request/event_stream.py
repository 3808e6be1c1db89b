"""Responses that are server-sent events: how many there may be, what they consist of, and what ends them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Send

from breakwater import background
from services.request.auth import caller_of, refusal
from services.request.problems import Problem

MAX_STREAMS = 200
MAX_OF_A_KEY = 50
"""So that no program can take all streams."""

KEEP_ALIVE_S = 15.0
"""Proxies close what is silent for a minute."""

SEND_TIMEOUT_S = 60.0
"""For a client to take anything at all."""

KEY_LOOK_S = 15.0
"""How often it is looked whether the key that opened a stream still would: it may be revoked meanwhile."""

FAREWELL_S = 1.0

_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}

Ending = asyncio.Future[str]
"""Why a stream is to end, once it is."""


class OpenStreams:
    """The streams of this process that are open."""

    def __init__(self) -> None:
        self._open: dict[Ending, str] = {}
        self._released = False

    @contextmanager
    def open(self, request: Request) -> Generator[Ending]:
        """A place for one more stream of the request's key while the block runs.

        Raises:
            Problem: 429, the key has its share; 503, all are taken.
        """
        key_id = caller_of(request).id
        if sum(holder == key_id for holder in self._open.values()) >= MAX_OF_A_KEY:
            message = f"this API key has {MAX_OF_A_KEY} streams open here, the most for a key; close one"
            raise Problem(429, "too_many_streams", message, headers={"Retry-After": "5"})
        if len(self._open) >= MAX_STREAMS:
            message = f"{MAX_STREAMS} streams are open here, which is the most; close one, or ask again later"
            raise Problem(503, "too_many_streams", message, headers={"Retry-After": "5"})
        ending: Ending = asyncio.get_running_loop().create_future()
        self._open[ending] = key_id
        try:
            if self._released:
                end(ending, "the service stops; connect again")
            yield ending
        finally:
            del self._open[ending]

    def release(self) -> None:
        """Ends all streams, now and from now on: the process stops."""
        self._released = True
        for ending in self._open:
            end(ending, "the service stops; connect again")


def end(ending: Ending, why: str) -> None:
    """Ends a stream, with a message for its reader."""
    if not ending.done():
        ending.set_result(why)


class EventStream(Response):
    """The headers of an event stream, whose length nobody knows. What it sends is its subclass's."""

    def __init__(self, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(headers={**_HEADERS, **(headers or {})})
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]

    async def begin(self, send: Send) -> None:
        """Sends the status and the headers."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})


class Sender:
    """Sends to a reader, and knows since when it was not."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.silent_until = 0.0
        """When a comment is due, on the monotonic clock."""

    async def send(self, data: bytes, *, more: bool = True) -> None:
        """Waits for a reader that is slow. Raises TimeoutError: it takes nothing at all."""
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await send_part(self._send, data, more=more)
        self.silent_until = time.monotonic() + KEEP_ALIVE_S


async def supervise(
    request: Request, ending: Ending, receive: Receive, send: Send, write: Callable[[Sender], Coroutine[Any, Any, None]]
) -> None:
    """Has a stream written until that is done, the reader goes away or is too slow, its key is revoked, or `ending`."""
    writing = asyncio.create_task(write(Sender(send)))
    left = asyncio.create_task(_disconnected(receive))
    watching = asyncio.create_task(_watch_key(request, ending))
    try:
        await asyncio.wait([writing, left, ending], return_when=asyncio.FIRST_COMPLETED)
        if writing.done():
            _look_at_end(writing, request)
        elif not left.done():
            # Between two events: what a server was given it has taken, and only waiting can be cancelled.
            await background.stop(writing)
            with suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL_S):
                    await send_part(send, comment(ending.result()), more=False)
    finally:
        await background.stop(writing, left, watching)


async def send_part(send: Send, data: bytes, *, more: bool = True) -> None:
    """Sends a part of the body. Waits for a client that is slow, for as long as the caller's timeout lets it."""
    await send({"type": "http.response.body", "body": data, "more_body": more})


def server_sent(event: str, data: bytes, event_id: object) -> bytes:
    """One event of a stream. `data`: JSON on one line."""
    return b"event: %b\ndata: %b\nid: %b\n\n" % (event.encode(), data, str(event_id).encode())


def comment(text: str) -> bytes:
    """What readers skip."""
    return f": {text}\n\n".encode()


def _look_at_end(writing: asyncio.Task[None], request: Request) -> None:
    try:
        writing.result()
    except TimeoutError:
        # It takes nothing, not even a farewell: its connection breaks off, and only the log says why.
        structlog.get_logger().warning("stream_cut", path=request.url.path, key_id=caller_of(request).id)


async def _watch_key(request: Request, ending: Ending) -> None:
    end(ending, await refusal(request, KEY_LOOK_S))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
