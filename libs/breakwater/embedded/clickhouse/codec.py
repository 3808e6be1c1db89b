"""Compression of requests and responses: gzip, deflate, lz4 frames and zstd, in pieces.

lz4 and zstd come with the ClickHouse client this project depends on.
"""

import importlib
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Protocol, cast

from breakwater.embedded.clickhouse.errors import CANNOT_DECOMPRESS, UNKNOWN_COMPRESSION_METHOD, ClickHouseError

_PIECE = 4 << 20  # decoded bytes handed on at once: what a small, very repetitive body can make us hold


class Encoder(Protocol):
    """Compresses one response body."""

    def compress(self, data: bytes, /) -> bytes:
        """Take some bytes; give what is ready."""
        ...

    def flush(self) -> bytes:
        """Give the rest and the trailer."""
        ...


class Decoder(Protocol):
    """Decompresses one request body."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Give the decoded pieces of one received chunk."""
        ...

    def end(self) -> None:
        """Check that the body was whole.

        Raises:
            ClickHouseError: it ended too early.
        """
        ...


class _Frame(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes | None: ...
    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


class _ZlibFrame:
    def __init__(self, wbits: int) -> None:
        self._frame = zlib.decompressobj(wbits)
        self._holds_output = False

    @property
    def eof(self) -> bool:
        return self._frame.eof

    @property
    def needs_input(self) -> bool:
        return not (self._frame.unconsumed_tail or self._holds_output)

    @property
    def unused_data(self) -> bytes:
        return self._frame.unused_data

    def decompress(self, data: bytes, max_length: int = -1) -> bytes:
        piece = self._frame.decompress(self._frame.unconsumed_tail + data, max(max_length, 0))
        self._holds_output = len(piece) == max_length
        return piece


class _FrameDecoder:
    """Decodes a sequence of frames: clients may send one for each block."""

    def __init__(self, new_frame: Callable[[], _Frame], coding: str) -> None:
        self._new_frame = new_frame
        self._coding = coding
        self._frame: _Frame | None = None

    def feed(self, data: bytes) -> Iterator[bytes]:
        while data or not (self._frame is None or self._frame.needs_input):
            frame = self._frame = self._frame or self._new_frame()
            try:
                piece = frame.decompress(data, _PIECE)
            except Exception as error:  # every library has an exception class of its own
                raise ClickHouseError.of(
                    CANNOT_DECOMPRESS, f"the request body is not valid {self._coding}: {error}"
                ) from error
            data = b""
            if frame.eof:
                data, self._frame = frame.unused_data or b"", None
            if piece:
                yield piece

    def end(self) -> None:
        if self._frame is not None:
            raise ClickHouseError.of(CANNOT_DECOMPRESS, f"the request body ends inside its {self._coding} data")


class PlainDecoder:
    """Hands a body on as it is."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Give the chunk itself."""
        yield data

    def end(self) -> None:
        """Nothing can be missing."""


class _Lz4Encoder:
    def __init__(self) -> None:
        self._frame = importlib.import_module("lz4.frame").LZ4FrameCompressor()
        self._begun = False

    def compress(self, data: bytes) -> bytes:
        start = b"" if self._begun else cast("bytes", self._frame.begin())
        self._begun = True
        return start + cast("bytes", self._frame.compress(data))

    def flush(self) -> bytes:
        return self.compress(b"") + cast("bytes", self._frame.flush())


def _zstd() -> object:
    return importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")


def _attribute(module: object, name: str) -> Callable[[], object]:
    return cast("Callable[[], object]", getattr(module, name))


def _frame_decoder(coding: str) -> Callable[[], _Frame] | None:
    if coding in ("gzip", "x-gzip"):
        return lambda: _ZlibFrame(31)
    if coding == "deflate":
        return lambda: _ZlibFrame(15)
    if coding == "lz4":
        new = _attribute(importlib.import_module("lz4.frame"), "LZ4FrameDecompressor")
    elif coding == "zstd":
        new = _attribute(_zstd(), "ZstdDecompressor")
    else:
        return None
    return lambda: cast("_Frame", new())


def decompress_zstd(data: bytes) -> bytes:
    """Decompress one whole zstd frame."""
    return cast("Callable[[bytes], bytes]", _attribute(_zstd(), "decompress"))(data)


def decoder(content_encoding: str) -> Decoder:
    """Give the decoder of a request's Content-Encoding.

    Args:
        content_encoding: the header, empty for none.

    Returns:
        A decoder for one body.

    Raises:
        ClickHouseError: a coding that is not available here (HTTP 415).
    """
    coding = content_encoding.strip().lower()
    if coding in ("", "identity"):
        return PlainDecoder()
    new_frame = _frame_decoder(coding)
    if new_frame is None:
        raise ClickHouseError.of(
            UNKNOWN_COMPRESSION_METHOD,
            f"Content-Encoding {coding!r} is not available here; use gzip, deflate, lz4 or zstd",
        )
    return _FrameDecoder(new_frame, coding)


def choose_coding(accept_encoding: str) -> str | None:
    """Pick a response's coding as ClickHouse does: its own order, not the client's weights.

    Args:
        accept_encoding: the request's header.

    Returns:
        lz4, gzip, deflate, zstd, or None to send it plain.
    """
    accepted = {
        name.strip().lower()
        for name, _, weight in (part.partition(";") for part in accept_encoding.split(","))
        if weight.replace(" ", "") not in ("q=0", "q=0.0")
    }
    return next((coding for coding in ("lz4", "gzip", "deflate", "zstd") if coding in accepted), None)


def encoder(coding: str, level: int) -> Encoder:
    """Give the encoder of a coding from `choose_coding`; `level` is for gzip and deflate."""
    if coding == "lz4":
        return _Lz4Encoder()
    if coding == "zstd":
        return cast("Encoder", _attribute(_zstd(), "ZstdCompressor")())
    return zlib.compressobj(level, zlib.DEFLATED, 31 if coding == "gzip" else 15)
