"""Compression of requests and responses: gzip, deflate, lz4 frames and zstd, in pieces.

lz4 and zstd come with the ClickHouse client this project depends on.
"""

import importlib
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Protocol, cast

from breakwater.embedded.clickhouse.errors import ClickHouseError, Code

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
                    Code.CANNOT_DECOMPRESS, f"the request body is not valid {self._coding}: {error}"
                ) from error
            data = b""
            if frame.eof:
                data, self._frame = frame.unused_data or b"", None
            if piece:
                yield piece

    def end(self) -> None:
        if self._frame is not None:
            raise ClickHouseError.of(Code.CANNOT_DECOMPRESS, f"the request body ends inside its {self._coding} data")


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


def decoder(content_encoding: str) -> Decoder | None:
    """Give the decoder of a request's Content-Encoding.

    Args:
        content_encoding: the header, empty for none.

    Returns:
        A decoder for one body; None where it is sent as it is.

    Raises:
        ClickHouseError: a coding that is not available here (HTTP 415).
    """
    coding = content_encoding.strip().lower()
    if coding in ("", "identity"):
        return None
    new_frame = _frame_decoder(coding)
    if new_frame is None:
        raise ClickHouseError.of(
            Code.UNKNOWN_COMPRESSION_METHOD,
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


_LZ4, _ZSTD, _PLAIN = 0x82, 0x90, 0x02
_LENGTHS = struct.Struct("<BII")
_CHECKSUM_BYTES = 16
_HEAD_BYTES = _CHECKSUM_BYTES + _LENGTHS.size
_BLOCK_BYTES = 1 << 20
_LARGEST_BLOCK = 1 << 30  # the server's own limit

_M = 0xFFFFFFFFFFFFFFFF
_K0, _K1, _K2, _K3 = 0xC3A5C85C97CB3127, 0xB492B66FBE98F273, 0x9AE16A3B2F90404F, 0xC949D7C7509E6557
_MUL = 0x9DDFEA08EB382D69


def _rotate(value: int, by: int) -> int:
    value &= _M
    return (value >> by | value << (64 - by)) & _M if by else value


def _mix(value: int) -> int:
    value &= _M
    return value ^ value >> 47


def _pair(low: int, high: int) -> int:
    first = _mix(((low ^ high) & _M) * _MUL)
    return _mix(((high ^ first) & _M) * _MUL) * _MUL & _M


def _word(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def _short(data: bytes) -> int:
    size = len(data)
    if size > 8:
        last = _word(data, size - 8)
        return _pair(_word(data, 0), _rotate(last + size, size)) ^ last
    if size >= 4:
        return _pair(size + (int.from_bytes(data[:4], "little") << 3), int.from_bytes(data[-4:], "little"))
    if size:
        low = data[0] + (data[size >> 1] << 8)
        return _mix(low * _K2 ^ (size + (data[-1] << 2)) * _K3) * _K2 & _M
    return _K2


def _weak(data: bytes, at: int, a: int, b: int) -> tuple[int, int]:
    w, x, y, z = struct.unpack_from("<4Q", data, at)
    a += w
    b = _rotate(b + a + z, 21)
    whole = a + x + y
    return (whole + z) & _M, (b + _rotate(whole, 44) + a) & _M


def _murmur(data: bytes, low: int, high: int) -> tuple[int, int]:
    size = len(data)
    a, b = low, high
    if size <= 16:
        a = _mix(a * _K1) * _K1 & _M
        c = (b * _K1 + _short(data)) & _M
        d = _mix(a + (_word(data, 0) if size >= 8 else c))
    else:
        c = _pair(_word(data, size - 8) + _K1, a)
        d = _pair(b + size, c + _word(data, size - 16))
        a = (a + d) & _M
        for at in range(0, size - 16, 16):
            a = (a ^ _mix(_word(data, at) * _K1) * _K1) * _K1 & _M
            b ^= a
            c = (c ^ _mix(_word(data, at + 8) * _K1) * _K1) * _K1 & _M
            d ^= c
    a, b = _pair(a, c), _pair(d, b)
    return a ^ b, _pair(b, a)


def _seeded(data: bytes, low: int, high: int) -> tuple[int, int]:
    size = len(data)
    if size < 128:
        return _murmur(data, low, high)
    x, y, z = low, high, size * _K1 & _M
    v0 = (_rotate(y ^ _K1, 49) * _K1 + _word(data, 0)) & _M
    v1 = (_rotate(v0, 42) * _K1 + _word(data, 8)) & _M
    w0 = (_rotate(y + z, 35) * _K1 + x) & _M
    w1 = _rotate(x + _word(data, 88), 53) * _K1 & _M
    looped = size // 128 * 128
    for at in range(0, looped, 64):
        x = (_rotate(x + y + v0 + _word(data, at + 16), 37) * _K1 & _M) ^ w1
        y = (_rotate(y + v1 + _word(data, at + 48), 42) * _K1 & _M) ^ v0
        z = _rotate(z ^ w0, 33)
        v0, v1 = _weak(data, at, v1 * _K1, x + w0)
        w0, w1 = _weak(data, at + 32, z + w1, y)
        z, x = x, z
    y = (y + _rotate(w0, 37) * _K0 + z) & _M
    x = (x + _rotate(v0 + z, 49) * _K0) & _M
    rest = size - looped
    for done in range(32, rest + 32, 32):
        at = size - done
        y = (_rotate(y - x, 42) * _K0 + v1) & _M
        w0 = (w0 + _word(data, at + 16)) & _M
        x = (_rotate(x, 49) * _K0 + w0) & _M
        w0 = (w0 + v0) & _M
        v0, v1 = _weak(data, at, v0, v1)
    x, y = _pair(x, v0), _pair(y, w0)
    return (_pair(x + v1, w1) + y) & _M, _pair(x + w1, y + v1)


def checksum(data: bytes) -> bytes:
    """Give ClickHouse's CityHash128 of some bytes, as a block carries it."""
    size = len(data)
    if size >= 16:
        low, high = _seeded(data[16:], _word(data, 0) ^ _K3, _word(data, 8))
    elif size >= 8:
        low, high = _seeded(b"", _word(data, 0) ^ (size * _K0 & _M), _word(data, size - 8) ^ _K1)
    else:
        low, high = _seeded(data, _K0, _K1)
    return struct.pack("<QQ", low, high)


class BlockEncoder:
    """Writes a response body as LZ4 blocks."""

    def compress(self, data: bytes) -> bytes:
        """Give the blocks of some bytes."""
        return b"".join(self._block(data[at : at + _BLOCK_BYTES]) for at in range(0, len(data), _BLOCK_BYTES))

    def flush(self) -> bytes:
        """Nothing is held back."""
        return b""

    @staticmethod
    def _block(data: bytes) -> bytes:
        packed = cast("bytes", importlib.import_module("lz4.block").compress(data, store_size=False))
        block = _LENGTHS.pack(_LZ4, _LENGTHS.size + len(packed), len(data)) + packed
        return checksum(block) + block


class BlockDecoder:
    """Reads a request body of blocks, each checked against its checksum."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Give the content of the blocks that are complete."""
        self._held += data
        while len(self._held) >= _HEAD_BYTES:
            method, packed, plain = _LENGTHS.unpack_from(self._held, _CHECKSUM_BYTES)
            if not _LENGTHS.size <= packed <= _LARGEST_BLOCK or plain > _LARGEST_BLOCK:
                raise ClickHouseError.of(Code.CANNOT_DECOMPRESS, "the request body is not made of ClickHouse blocks")
            end = _CHECKSUM_BYTES + packed
            if len(self._held) < end:
                return
            block = bytes(self._held[_CHECKSUM_BYTES:end])
            if checksum(block) != bytes(self._held[:_CHECKSUM_BYTES]):
                raise ClickHouseError.of(Code.CANNOT_DECOMPRESS, "Checksum doesn't match: corrupted data in a block")
            del self._held[:end]
            yield self._content(method, block[_LENGTHS.size :], plain)

    def end(self) -> None:
        """Check that no block is cut off."""
        if self._held:
            raise ClickHouseError.of(Code.CANNOT_DECOMPRESS, "the request body ends inside a compressed block")

    @staticmethod
    def _content(method: int, data: bytes, size: int) -> bytes:
        if method == _PLAIN:
            return data
        try:
            if method == _LZ4:
                return cast("bytes", importlib.import_module("lz4.block").decompress(data, uncompressed_size=size))
            if method == _ZSTD:
                return decompress_zstd(data)
        except Exception as error:  # every library has an exception class of its own
            raise ClickHouseError.of(Code.CANNOT_DECOMPRESS, f"a compressed block is damaged: {error}") from error
        raise ClickHouseError.of(Code.CANNOT_DECOMPRESS, f"compression method 0x{method:02x} is not available here")
