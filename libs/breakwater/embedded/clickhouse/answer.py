"""Sending a result: held back first, then streamed, compressed as asked.

A statement that fails while its result is held back gets an error status. After that the answer ends in ClickHouse's
exception block and without the end of its chunks, so that half a result cannot be taken for a whole one.
"""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web

from breakwater.embedded.clickhouse.blocks import BlockEncoder
from breakwater.embedded.clickhouse.codec import Encoder, encoder
from breakwater.embedded.clickhouse.engine import Counts, RowStream
from breakwater.embedded.clickhouse.errors import ClickHouseError
from breakwater.embedded.clickhouse.request import QueryRequest

EXCEPTION_TAG = "X-ClickHouse-Exception-Tag"
_HELD_IN_MEMORY = 16 << 20  # wait_end_of_query holds all of a result: the rest goes to a file
_PIECE = 1 << 18
_INLINE = 1 << 16  # compressing less than this costs less than a thread
_EXCEPTION_LINGER_S = 3.0
_LONGEST_EXCEPTION = 15 << 10  # clients look for a block of at most 16 KiB

_CONTENT_TYPES = (  # by the beginning of a format's name; the longest that fits comes first
    ("JSONEachRow", "application/x-ndjson; charset=UTF-8"),
    ("JSONCompactEachRow", "application/x-ndjson; charset=UTF-8"),
    ("JSONStringsEachRow", "application/x-ndjson; charset=UTF-8"),
    ("JSON", "application/json; charset=UTF-8"),
    ("CSVWithNames", "text/csv; charset=UTF-8; header=present"),
    ("CSV", "text/csv; charset=UTF-8; header=absent"),
    ("TabSeparated", "text/tab-separated-values; charset=UTF-8"),
    ("TSV", "text/tab-separated-values; charset=UTF-8"),
    ("XML", "application/xml; charset=UTF-8"),
    ("Markdown", "text/markdown; charset=UTF-8"),
    ("ArrowStream", "application/vnd.apache.arrow.stream"),
    ("Arrow", "application/vnd.apache.arrow.file"),
    ("Parquet", "application/vnd.apache.parquet"),
    ("Native", "application/octet-stream"),
    ("RowBinary", "application/octet-stream"),
)


def content_type(format_name: str) -> str:
    """Give the media type a server sends with a format."""
    return next((kind for start, kind in _CONTENT_TYPES if format_name.startswith(start)), "text/plain; charset=UTF-8")


def summary(counts: Counts) -> str:
    """Write X-ClickHouse-Summary: a JSON object of strings."""
    return json.dumps(
        {
            "read_rows": str(counts.read_rows),
            "read_bytes": str(counts.read_bytes),
            "written_rows": str(counts.written_rows),
            "written_bytes": str(counts.written_bytes),
            "total_rows_to_read": "0",
            "result_rows": str(counts.result_rows),
            "result_bytes": "0",
            "elapsed_ns": str(counts.elapsed_ns),
        },
        separators=(",", ":"),
    )


class _Packer:
    """Compresses an answer, off the event loop when it is worth it."""

    def __init__(self, ask: QueryRequest) -> None:
        self._encoder: Encoder | None = None
        if ask.native_out:
            self._encoder = BlockEncoder()
        elif ask.coding is not None:
            self._encoder = encoder(ask.coding, ask.compression_level)

    async def pack(self, data: bytes) -> bytes:
        if self._encoder is None:
            return data
        if len(data) < _INLINE:
            return self._encoder.compress(data)
        return await asyncio.to_thread(self._encoder.compress, data)

    def end(self) -> bytes:
        return b"" if self._encoder is None else self._encoder.flush()


async def send_rows(
    request: web.Request, ask: QueryRequest, stream: RowStream, headers: dict[str, str], directory: Path, version: str
) -> web.StreamResponse:
    """Send a result.

    Args:
        request: to answer.
        ask: how it wants its answer.
        stream: the result; the caller closes it.
        headers: of the answer, with the exception tag.
        directory: where a large result waits when the client wants it whole.
        version: the engine's, for the text of an error.

    Returns:
        The answer, sent or to be sent by aiohttp.

    Raises:
        ClickHouseError: the statement failed and nothing was sent yet.
    """
    with tempfile.SpooledTemporaryFile(_HELD_IN_MEMORY, dir=str(directory)) as held:
        size, ended = 0, False
        while ask.whole or size < max(ask.buffer_bytes, 1):
            chunk = await stream.read()
            if not chunk:
                ended = True
                break
            held.write(chunk)
            size += len(chunk)
        if ended:
            headers["X-ClickHouse-Summary"] = summary(await stream.outcome())
        if request.method == "HEAD" or (ended and not size):
            return web.Response(headers=headers)
        if ask.coding is not None:
            headers["Content-Encoding"] = ask.coding
        held.seek(0)
        packer = _Packer(ask)
        if ended and size <= _PIECE:
            return web.Response(body=await packer.pack(held.read()) + packer.end(), headers=headers)
        headers.setdefault("X-ClickHouse-Summary", summary(Counts()))
        answer = web.StreamResponse(headers=headers)
        await answer.prepare(request)
        while piece := held.read(_PIECE):
            await answer.write(await packer.pack(piece))
    if not ended:
        async for chunk in _rest(stream):
            await answer.write(await packer.pack(chunk))
        try:
            await stream.outcome()
        except ClickHouseError as error:
            block = _exception_block(f"{error.text} (version {version})", headers[EXCEPTION_TAG])
            await answer.write(await packer.pack(block) + packer.end())
            # Some clients drop what they have received once the connection breaks: they get time to read the block.
            await asyncio.sleep(_EXCEPTION_LINGER_S)
            if request.transport is not None:
                request.transport.close()
            return answer
    await answer.write(packer.end())
    await answer.write_eof()
    return answer


async def _rest(stream: RowStream) -> AsyncIterator[bytes]:
    while chunk := await stream.read():
        yield chunk


def _exception_block(text: str, tag: str) -> bytes:
    message = text.encode()[:_LONGEST_EXCEPTION] + b"\n"
    return b"\r\n__exception__\r\n%b\r\n%b%d %b\r\n__exception__\r\n" % (
        tag.encode(),
        message,
        len(message),
        tag.encode(),
    )
