"""Decompressing bodies (`Content-Encoding`), with a limit on the size of the result."""

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
        """True once the frame is over."""
        ...

    @property
    def needs_input(self) -> bool:
        """False while there is more output without more input."""
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


def codings_of(request: Request) -> list[str]:
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


async def decoded(body: bytes, coding: str, limit: int, too_large: str) -> bytes:
    """Undoes one coding of a body.

    Args:
        body: the encoded body; an empty one stays empty.
        coding: a name from `codings_of`.
        limit: the size limit of the result, in bytes. Nothing is decompressed beyond it.
        too_large: the message for a larger result.

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
                mismatch = "is not" if frames == 1 else "goes on after its end with what is not"
                raise _damaged(f"the body {mismatch} {coding}, which its Content-Encoding names") from None
            size += len(pieces[-1])
            if size > limit:
                raise RequestError(413, "body_too_large", too_large)
            if remaining or not decoder.needs_input:
                await asyncio.sleep(0)
        remaining = memoryview(body)[len(body) - len(remaining) - len(decoder.unused_data) :]
    return b"".join(pieces)


def _damaged(message: str) -> RequestError:
    return RequestError(400, "not_decompressed", message)
