"""Bodies that their client has compressed (`Content-Encoding`), with the size limit on what comes out."""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import Callable, Mapping
from typing import Protocol

from starlette.requests import Request

from breakwater.kernel.http.problems import RequestError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MAX_CODINGS = 2
"""Of one body, one around the other."""

MAX_FRAMES = 1_000
"""Of one body, one after the other. An empty one takes as long to read as a few thousand bytes."""

_PIECE = 65_536
"""Bytes in and out at a time: the event loop runs between two pieces, and no memory is taken beyond the limit."""

_ZSTD_WINDOW_LOG = 23
"""8 MB, the most that RFC 9659 lets a client demand of a server's memory."""


class _Decoder(Protocol):
    """A decompressor of one frame, as Python's modules have it."""

    @property
    def eof(self) -> bool:
        """True once the frame is over."""
        ...

    @property
    def needs_input(self) -> bool:
        """False while more comes out without more input."""
        ...

    @property
    def unused_data(self) -> bytes:
        """The input after the frame."""
        ...

    def decompress(self, data: bytes | memoryview, max_length: int) -> bytes:
        """The next bytes."""
        ...


class _Zlib:
    """zlib's decompressor in the form of the newer ones."""

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
    """Also without the header of zlib, which some clients leave out."""
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


def codings_of(request: Request) -> list[str]:
    """The codings of a body in the order in which they are undone. Raises RequestError: 415 for an unknown one."""
    if "content-encoding" not in request.headers:
        return []
    listed = ",".join(request.headers.getlist("content-encoding")).split(",")
    codings = [name for one in listed if (name := one.strip().lower()) not in {"", "identity"}]
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


async def decoded(body: bytes, coding: str, limit: int, too_large: str) -> bytes:
    """A body without a coding.

    Args:
        body: as it came; an empty one stays empty.
        coding: one of `codings_of`.
        limit: of the result, in bytes. No more are decompressed.
        too_large: the message for a larger one.

    Raises:
        RequestError: 400 for a body that is damaged, incomplete, or something else; 413 for one that is too large.
    """
    remaining = memoryview(body)
    pieces = list[bytes]()
    size = 0
    frames = 0
    while remaining:
        frames += 1
        if frames > MAX_FRAMES:
            raise _damaged(f"the body has more than {MAX_FRAMES:,} frames of {coding}; compress it as one")
        decoder = _CODINGS[coding](remaining)
        while not decoder.eof:
            if decoder.needs_input and not remaining:
                raise _damaged(f"the body ends in the middle of its {coding} data")
            part = remaining[: _PIECE if decoder.needs_input else 0]
            remaining = remaining[len(part) :]
            try:
                pieces.append(decoder.decompress(part, _PIECE))
            except (zlib.error, zstd.ZstdError):
                after = "is not" if frames == 1 else "goes on after its end with what is not"
                raise _damaged(f"the body {after} {coding}, which its Content-Encoding names") from None
            size += len(pieces[-1])
            if size > limit:
                raise RequestError(413, "body_too_large", too_large)
            if remaining or not decoder.needs_input:
                await asyncio.sleep(0)
        remaining = memoryview(body)[len(body) - len(remaining) - len(decoder.unused_data) :]
    return b"".join(pieces)


def _damaged(message: str) -> RequestError:
    return RequestError(400, "not_decompressed", message)
