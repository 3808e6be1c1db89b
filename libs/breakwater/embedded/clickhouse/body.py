"""A request's body, decoded as it arrives, read by the event loop or by an engine thread."""

import asyncio
from collections.abc import Iterator

from aiohttp import ClientPayloadError, StreamReader

from breakwater.embedded.clickhouse.codec import Decoder
from breakwater.embedded.clickhouse.errors import CANNOT_DECOMPRESS, TOO_MANY_BYTES, ClickHouseError

MAX_BODY_BYTES = 4 << 30


class Body:
    """The bytes of a body after all its decoders; only one reader at a time."""

    def __init__(self, stream: StreamReader, decoders: list[Decoder], limit: int = MAX_BODY_BYTES) -> None:
        self._stream = stream
        self._decoders = decoders
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._pieces: Iterator[bytes] = iter(())
        self._given = 0
        self._ended = False

    async def read(self) -> bytes:
        """Give the next decoded bytes, empty at the end.

        Raises:
            ClickHouseError: not decodable, cut off, or over the limit.
        """
        while True:
            piece = self._next_piece()
            if piece or self._ended:
                return piece
            self._take(await self._receive())

    def read_on_thread(self) -> bytes:
        """Do what `read` does from a thread, where decoding then costs the event loop nothing."""
        while True:
            piece = self._next_piece()
            if piece or self._ended:
                return piece
            self._take(asyncio.run_coroutine_threadsafe(self._receive(), self._loop).result())

    async def _receive(self) -> bytes:
        try:
            return await self._stream.readany()
        except (ClientPayloadError, ConnectionError) as error:
            raise ClickHouseError.of(CANNOT_DECOMPRESS, f"the request body was cut off: {error}") from error

    def _next_piece(self) -> bytes:
        piece = next((piece for piece in self._pieces if piece), b"")
        self._given += len(piece)
        if self._given > self._limit:
            raise ClickHouseError.of(
                TOO_MANY_BYTES,
                f"the request body is larger than {self._limit} bytes when decoded: send it in several requests",
            )
        return piece

    def _take(self, received: bytes) -> None:
        if received:
            self._pieces = self._decoded(received, 0)
            return
        for decoder in self._decoders:
            decoder.end()
        self._ended = True

    def _decoded(self, data: bytes, step: int) -> Iterator[bytes]:
        if step == len(self._decoders):
            yield data
            return
        for piece in self._decoders[step].feed(data):
            yield from self._decoded(piece, step + 1)
