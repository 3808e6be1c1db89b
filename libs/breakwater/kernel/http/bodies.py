"""Reading bodies and decompressing them (`Content-Encoding`), with limits on their size and time."""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import Callable, Mapping
from typing import Protocol

from starlette.requests import ClientDisconnect, Request

from breakwater.kernel.http.problems import BODY_IS_READ, RequestError
from breakwater.kernel.http.server import OPEN_BODY_BYTES, OPEN_BODY_S
from breakwater.kernel.process.byte_budget import ByteBudget, NoRoomError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

READ_TIMEOUT_S = 30.0
WAIT_TIMEOUT_S = 30.0
"""The longest wait of a large body until other large bodies have left memory."""

BUDGETED_FROM = 4_000_000
"""The size from which a body counts towards the process's budget for large bodies."""

HOLD = "breakwater.hold_bytes"
"""The entry of a request's scope through which its body takes a part of that budget."""

MAX_BYTES = 16_384
"""The size limit of a body that is not a job."""

_A_JOB = (
    "a job may have at most {limit:,} bytes (limits.max_body_bytes in Breakwater's config); "
    "keep large inputs elsewhere and send a reference to them"
)

NO_ROOM = (
    "other large bodies take all the room in memory (limits.bodies_in_memory_bytes), and none became free in time; "
    "send it again"
)

A_REQUEST = "the maximum size of this request is {limit:,} bytes"

MAX_CODINGS = 2
"""The most nested codings of one body."""

MAX_FRAMES = 1_000
"""The most consecutive frames of one body. Even an empty frame takes as long to read as a few thousand bytes."""

_PIECE = 65_536
"""Bytes read and written at a time. The event loop runs between two pieces, and memory stays within the limit."""

_ZSTD_WINDOW_LOG = 23
"""8 MB, the most that RFC 9659 lets a client demand of a server's memory."""


class _Decoder(Protocol):
    """A decompressor of one frame, with the interface of Python's newer modules."""

    @property
    def eof(self) -> bool:
        """Returns True once the frame is over."""
        ...

    @property
    def needs_input(self) -> bool:
        """Returns False while there is more output without more input."""
        ...

    @property
    def unused_data(self) -> bytes:
        """The input after the frame."""
        ...

    def decompress(self, data: bytes | memoryview, max_length: int) -> bytes:
        """The next bytes."""
        ...


class _Zlib:
    """zlib's decompressor with the interface of the newer modules."""

    def __init__(self, window_bits: int) -> None:
        self._decoder = zlib.decompressobj(window_bits)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._decoder.eof

    @property
    def unused_data(self) -> bytes:
        return self._decoder.unused_data

    def decompress(self, data: bytes | memoryview, max_length: int) -> bytes:
        piece = self._decoder.decompress(data if self.needs_input else self._decoder.unconsumed_tail, max_length)
        self.needs_input = len(piece) < max_length
        return piece


def _gzip(_: memoryview) -> _Decoder:
    return _Zlib(16 + zlib.MAX_WBITS)


def _deflate(start: memoryview) -> _Decoder:
    """Returns a decoder of zlib data, also without zlib's header, which some clients leave out."""
    has_header = len(start) > 1 and start[0] & 0x0F == zlib.DEFLATED and (start[0] << 8 | start[1]) % 31 == 0
    return _Zlib(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)


def _zstd(_: memoryview) -> _Decoder:
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _ZSTD_WINDOW_LOG})


_CODINGS: Mapping[str, Callable[[memoryview], _Decoder]] = {
    "gzip": _gzip,
    "x-gzip": _gzip,
    "zstd": _zstd,
    "deflate": _deflate,
}
_ACCEPTED = {"Accept-Encoding": "gzip, zstd, deflate"}


async def read_open_body(request: Request) -> bytes:
    """Reads the body of a request without a key, with stricter limits of size and time. Raises as `read_body` does."""
    return await read_body(request, OPEN_BODY_BYTES, A_REQUEST, within_s=OPEN_BODY_S)


async def read_body(request: Request, limit: int, too_large: str = _A_JOB, within_s: float = READ_TIMEOUT_S) -> bytes:
    """Reads and decompresses a body of at most `limit` bytes.

    A larger body is not read to its end: the rest is dropped after the error was sent (`ErrorResponse`). A large one
    first waits for room in memory, which it takes until its request has been answered.

    Args:
        request: the request.
        limit: the size limit of the decompressed body, in bytes.
        too_large: the message for a larger body, with `{limit}` for the limit.
        within_s: the time limit, in seconds.

    Raises:
        RequestError: 413, the body is too large, by its Content-Length or while it is read or decompressed; 408, it did
            not arrive in time; 415 or 400, it can't be decompressed; 503, no room in memory became free.
        ClientDisconnect: the client is gone.
    """
    codings = _codings_of(request)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise RequestError(413, "body_too_large", too_large.format(limit=limit))
    room = _Room(request, limit)
    if declared.isdecimal() and int(declared) > BUDGETED_FROM:
        await room.take(limit if codings else int(declared))
    try:
        async with asyncio.timeout(within_s) as room.reading:
            body = await _read(request, limit, too_large, room)
            for coding in codings:
                body = await _decode(body, coding, limit, too_large.format(limit=limit), room)
            return body
    except TimeoutError:
        request.scope[BODY_IS_READ] = True
        raise RequestError(
            408, "body_timeout", f"the body did not arrive within {within_s:g} s", headers={"Connection": "close"}
        ) from None


class BodyHold:
    """The part of the budget for large bodies that one request has taken, until it has been answered."""

    __slots__ = ("_budget", "_taken")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._taken = 0

    async def take(self, size: int) -> None:
        """Takes `size` bytes more. Raises NoRoomError: it has some, and would have to wait."""
        self._taken += await self._budget.take(size, holding=self._taken)

    def release(self) -> None:
        """Gives all of it back."""
        if self._taken:
            self._budget.give_back(self._taken)
            self._taken = 0


def release_room(request: Request) -> None:
    """Gives back the room in memory of a request's body, of which nothing is left."""
    hold: BodyHold | None = request.scope.get(HOLD)
    if hold is not None:
        hold.release()


class _Room:
    """The room in memory that one body takes."""

    def __init__(self, request: Request, limit: int) -> None:
        self._hold: BodyHold | None = request.scope.get(HOLD)
        self.reading: asyncio.Timeout | None = None
        """The time limit of the client, while the body is read."""
        self._taken = limit <= BUDGETED_FROM

    def lacks(self, size: int) -> bool:
        """Returns True if a body of `size` bytes has to take room first."""
        return not self._taken and size > BUDGETED_FROM

    async def take(self, size: int) -> None:
        """Takes room for `size` bytes. The time of waiting is not the client's.

        Raises RequestError: 503, none became free.
        """
        self._taken = True
        if self._hold is None:
            return
        loop = asyncio.get_running_loop()
        begun = loop.time()
        deadline = None if self.reading is None else self.reading.when()
        if self.reading is not None:
            self.reading.reschedule(None)
        try:
            async with asyncio.timeout(WAIT_TIMEOUT_S):
                await self._hold.take(size)
        except (TimeoutError, NoRoomError):
            raise RequestError(503, "busy", NO_ROOM, headers={"Connection": "close"}, retry_after_s=5.0) from None
        if self.reading is not None and deadline is not None:
            self.reading.reschedule(deadline + loop.time() - begun)


async def take_room(request: Request, size: int) -> None:
    """Takes room in memory for what a request has the process read, until the request has been answered.

    Args:
        request: the request.
        size: the size of what is read, in bytes. Less than a large body is free.

    Raises:
        RequestError: 503, no room became free.
    """
    if size > BUDGETED_FROM:
        await _Room(request, size).take(size)


async def _read(request: Request, limit: int, too_large: str, room: _Room) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        has_more: bool = message.get("more_body", False)
        if not has_more:
            request.scope[BODY_IS_READ] = True
        if size > limit:
            raise RequestError(413, "body_too_large", too_large.format(limit=limit))
        if room.lacks(size):
            await room.take(limit)
        chunks.append(chunk)
        if not has_more:
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _codings_of(request: Request) -> list[str]:
    """Returns the codings of a body in the order in which to undo them. Raises RequestError: 415, one is unknown."""
    if "content-encoding" not in request.headers:
        return []
    listed = ",".join(request.headers.getlist("content-encoding")).split(",")
    names = [name.strip().lower() for name in listed]
    codings = [name for name in names if name not in {"", "identity"}]
    unknown = next((name for name in codings if name not in _CODINGS), None)
    if unknown is not None:
        message = (
            f"Content-Encoding {unknown[:50]!r} is not supported: compress the body with gzip, zstd or deflate, or not"
        )
        raise RequestError(415, "unsupported_encoding", message, headers=_ACCEPTED)
    if len(codings) > MAX_CODINGS:
        message = f"Content-Encoding names {len(codings)} codings of one body; at most {MAX_CODINGS} are supported"
        raise RequestError(415, "unsupported_encoding", message, headers=_ACCEPTED)
    return codings[::-1]


async def _decode(body: bytes, coding: str, limit: int, too_large: str, room: _Room) -> bytes:
    """Undoes one coding of a body.

    Args:
        body: the encoded body; an empty one stays empty.
        coding: a name from `_codings_of`.
        limit: the size limit of the result, in bytes. Nothing is decompressed beyond it.
        too_large: the message for a larger result.
        room: the room in memory that the body takes.

    Raises:
        RequestError: 400, the body is damaged, incomplete, or of another coding; 413, the result is too large.
    """
    remaining = memoryview(body)
    pieces = list[bytes]()
    size = 0
    frames = 0
    while remaining:
        frames += 1
        if frames > MAX_FRAMES:
            raise _damaged_body(f"the body has more than {MAX_FRAMES:,} frames of {coding}; compress it as one")
        decoder = _CODINGS[coding](remaining)
        while not decoder.eof:
            if decoder.needs_input and not remaining:
                raise _damaged_body(f"the body ends in the middle of its {coding} data")
            part = remaining[: _PIECE if decoder.needs_input else 0]
            remaining = remaining[len(part) :]
            try:
                pieces.append(decoder.decompress(part, _PIECE))
            except (zlib.error, zstd.ZstdError):
                mismatch = "is not" if frames == 1 else "goes on after its end with what is not"
                raise _damaged_body(f"the body {mismatch} {coding}, which its Content-Encoding names") from None
            size += len(pieces[-1])
            if size > limit:
                raise RequestError(413, "body_too_large", too_large)
            if room.lacks(size):
                await room.take(limit)
            if remaining or not decoder.needs_input:
                await asyncio.sleep(0)
        remaining = memoryview(body)[len(body) - len(remaining) - len(decoder.unused_data) :]
    return b"".join(pieces)


def _damaged_body(message: str) -> RequestError:
    return RequestError(400, "not_decompressed", message)
