"""ClickHouse's HTTP interface: one request, one statement of the engine."""

import asyncio
import gzip
import secrets
import sys
import tempfile
import uuid
import zlib
from collections.abc import Iterator, Mapping
from importlib import import_module
from itertools import chain
from typing import BinaryIO, cast

from aiohttp import ClientPayloadError, web
from aiohttp.web_request import FileField

from breakwater.embedded.clickhouse.access import READER_LIMITS, Role
from breakwater.embedded.clickhouse.engine import Engine, RowStream, summary
from breakwater.embedded.clickhouse.errors import ClickHouseError, Code, unavailable
from breakwater.embedded.clickhouse.request import Ask, Users, authenticate, read_ask
from breakwater.embedded.clickhouse.sql import Statement, find_data, read_statement

MAX_BODY_BYTES = 4 << 30  # as received, and decoded

_LONGEST_SQL = 16 << 20  # a statement without inline data; the engine has its own, smaller max_query_size
_LARGEST_FORM = 64 << 20

EXCEPTION_TAG = "X-ClickHouse-Exception-Tag"
_HELD_IN_MEMORY = 16 << 20  # of a body, and of a result that wait_end_of_query holds: the rest goes to a file
_HELD_BACK = 1 << 20  # a failure within the first bytes still gets an HTTP status of its own
_PIECE = 1 << 20
_INLINE = 1 << 16  # compressing less than this costs less than a thread
_GZIP_LEVEL = 3  # a server's own
_EXCEPTION_LINGER_S = 3.0
_LONGEST_EXCEPTION = 15 << 10  # clients look for a block of at most 16 KiB
_LONGEST_ANSWER_S = READER_LIMITS["max_execution_time"] * 2  # waiting for its turn included
_IDENTITY = ("X-ClickHouse-Server-Display-Name", "X-ClickHouse-Query-Id", "X-ClickHouse-Timezone")

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


class _Packer:
    """Compresses an answer, off the event loop when it is worth it."""

    def __init__(self, compress: bool) -> None:
        self._gzip = zlib.compressobj(_GZIP_LEVEL, wbits=31) if compress else None

    async def pack(self, data: bytes) -> bytes:
        if self._gzip is None:
            return data
        if len(data) < _INLINE:
            return self._gzip.compress(data)
        return await asyncio.to_thread(self._gzip.compress, data)

    def end(self) -> bytes:
        return b"" if self._gzip is None else self._gzip.flush()


def _exception_block(text: str, tag: str) -> bytes:
    message = text.encode()[:_LONGEST_EXCEPTION] + b"\n"
    return b"\r\n__exception__\r\n%b\r\n%b%d %b\r\n__exception__\r\n" % (
        tag.encode(),
        message,
        len(message),
        tag.encode(),
    )


async def _receive(request: web.Request, received: BinaryIO) -> None:
    """Take a body to its end before anything is done with it: of one that is cut off, nothing is stored."""
    try:
        async for piece in request.content.iter_any():
            if received.tell() + len(piece) > MAX_BODY_BYTES:
                raise _too_large("request body", MAX_BODY_BYTES)
            received.write(piece)
    except (ClientPayloadError, ConnectionError) as error:
        raise ClickHouseError.of(Code.CANNOT_DECOMPRESS, f"the request body was cut off: {error}") from error
    received.seek(0)


def _decoded(received: BinaryIO, content_encoding: str) -> BinaryIO:
    match content_encoding.strip().lower():
        case "" | "identity":
            return received
        case "gzip":
            return cast("BinaryIO", gzip.GzipFile(fileobj=received, mode="rb"))
        case "lz4":  # the sink's
            return cast("BinaryIO", import_module("lz4.frame").LZ4FrameFile(received))
        case coding:
            raise unavailable(f"the Content-Encoding {coding} (send gzip or lz4)")


def _pieces(received: BinaryIO, content_encoding: str) -> Iterator[bytes]:
    try:
        body, size = _decoded(received, content_encoding), 0
        while piece := body.read(_PIECE):
            size += len(piece)
            if size > MAX_BODY_BYTES:
                raise _too_large("request body", MAX_BODY_BYTES)
            yield piece
    except (EOFError, OSError, RuntimeError, zlib.error) as error:  # of gzip and lz4
        raise ClickHouseError.of(Code.CANNOT_DECOMPRESS, f"the request body is damaged: {error}") from error


def _too_large(what: str, limit: int) -> ClickHouseError:
    return ClickHouseError.of(Code.TOO_MANY_BYTES, f"the {what} is larger than {limit} bytes")


def _read_statement(engine: Engine, ask: Ask, pieces: Iterator[bytes]) -> tuple[Statement, Iterator[bytes]]:
    """Join the URL's SQL and the body as a server does; what follows an INSERT is its data."""
    text = ask.query.encode()
    between = b"\n" if text else b""
    for piece in pieces:
        text += between + piece
        between = b""
        if len(text) > _LONGEST_SQL:
            break
    data_at = find_data(text)
    if len(text) > _LONGEST_SQL and not data_at:
        raise _too_large("statement", _LONGEST_SQL)
    canonical = engine.canonical(text[: data_at or None].decode(errors="surrogateescape"))
    statement = read_statement(canonical, ask.default_format, in_session=ask.in_session, has_data=data_at > 0)
    return statement, chain((text[data_at:],), pieces)


class RequestHandler:
    """Answers requests with an engine."""

    def __init__(self, engine: Engine, users: Users) -> None:
        self._engine = engine
        self._users = users

    async def ok(self, request: web.Request) -> web.StreamResponse:
        """Say that the process answers, without authentication, as a server does."""
        return web.Response(text="Ok.\n", headers=self._headers(request))

    async def statement(self, request: web.Request) -> web.StreamResponse:
        """Run what a request asks for."""
        if request.method != "POST" and "query" not in request.query:
            return await self.ok(request)
        headers = self._headers(request)
        try:
            role = authenticate(self._users, request.headers, request.query)
            fields = await _form_fields(request)
            ask = read_ask(role, request.method, (*request.query.items(), *fields), request.headers)
            with tempfile.SpooledTemporaryFile(_HELD_IN_MEMORY, dir=str(self._engine.temporary)) as received:
                if not fields:
                    await _receive(request, cast("BinaryIO", received))
                return await self._run(request, ask, cast("BinaryIO", received), headers)
        except ClickHouseError as error:
            return self._refusal(error, headers)
        except ConnectionError:  # the client disconnected in the middle of its answer, and reads no other
            return web.Response(status=499)
        except Exception as error:  # noqa: BLE001  # the edge: a fault of ours is an answer too, and is logged
            _log_failure(headers["X-ClickHouse-Query-Id"])
            return self._refusal(
                ClickHouseError.of(Code.UNKNOWN_EXCEPTION, f"{type(error).__name__}: {error}"), headers
            )

    async def _run(
        self, request: web.Request, ask: Ask, received: BinaryIO, headers: dict[str, str]
    ) -> web.StreamResponse:
        pieces = _pieces(received, request.headers.get("Content-Encoding", ""))
        statement, data = await asyncio.to_thread(_read_statement, self._engine, ask, pieces)
        if ask.readonly and statement.keyword == "INSERT":
            # The engine refuses to write a table then, but not INSERT INTO FUNCTION null(…).
            raise ClickHouseError.of(
                Code.READONLY,
                "Cannot execute query in readonly mode. For queries over HTTP, method GET implies readonly."
                " You should use method POST for modifying queries.",
            )
        if not statement.has_result:
            answer, headers["X-ClickHouse-Summary"] = await self._engine.execute(statement, ask, data)
            if answer:
                headers |= {"X-ClickHouse-Format": statement.format, "Content-Type": content_type(statement.format)}
            return web.Response(body=answer, headers=headers)
        headers |= {"X-ClickHouse-Format": statement.format, "Content-Type": content_type(statement.format)}
        headers[EXCEPTION_TAG] = secrets.token_hex(8)
        stream = self._engine.rows(statement, ask)
        try:
            # The engine looks at no clock while it waits for a client that takes nothing.
            sending = self._send_rows(request, ask, stream, headers)
            return await asyncio.wait_for(sending, _LONGEST_ANSWER_S if ask.role is Role.READER else None)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=499)
        finally:
            stream.close()

    async def _send_rows(
        self, request: web.Request, ask: Ask, stream: RowStream, headers: dict[str, str]
    ) -> web.StreamResponse:
        """Send a result, which the caller closes. Raises ClickHouseError: it failed, and nothing was sent yet."""
        with tempfile.SpooledTemporaryFile(_HELD_IN_MEMORY, dir=str(self._engine.temporary)) as held:
            size, ended = 0, False
            while ask.whole or size < _HELD_BACK:
                chunk = await stream.read()
                if not chunk:
                    ended = True
                    break
                held.write(chunk)
                size += len(chunk)
            if ended:
                headers["X-ClickHouse-Summary"] = await stream.outcome()
            if request.method == "HEAD" or (ended and not size):
                return web.Response(headers=headers)
            if ask.gzip:
                headers["Content-Encoding"] = "gzip"
            held.seek(0)
            packer = _Packer(ask.gzip)
            if ended and size <= _PIECE:
                return web.Response(body=await packer.pack(held.read()) + packer.end(), headers=headers)
            headers.setdefault("X-ClickHouse-Summary", summary(None))
            answer = web.StreamResponse(headers=headers)
            await answer.prepare(request)
            while piece := held.read(_PIECE):
                await answer.write(await packer.pack(piece))
        if not ended:
            while chunk := await stream.read():
                await answer.write(await packer.pack(chunk))
            try:
                await stream.outcome()
            except ClickHouseError as error:
                block = _exception_block(f"{error.text} (version {self._engine.version})", headers[EXCEPTION_TAG])
                await answer.write(await packer.pack(block) + packer.end())
                # Some clients drop what they have received once the connection breaks: they get time to read the block.
                await asyncio.sleep(_EXCEPTION_LINGER_S)
                if request.transport is not None:
                    request.transport.close()
                return answer
        await answer.write(packer.end())
        await answer.write_eof()
        return answer

    def _headers(self, request: web.Request) -> dict[str, str]:
        query_id = request.query.get("query_id") or request.headers.get("X-ClickHouse-Query-Id") or str(uuid.uuid4())
        return {
            "Content-Type": "text/plain; charset=UTF-8",
            "X-ClickHouse-Server-Display-Name": self._engine.host,
            "X-ClickHouse-Query-Id": "".join(sign for sign in query_id if sign.isprintable() and sign.isascii()),
            "X-ClickHouse-Timezone": self._engine.timezone,
        }

    def _refusal(self, error: ClickHouseError, headers: Mapping[str, str]) -> web.Response:
        kept = {name: value for name, value in headers.items() if name in _IDENTITY}
        return web.Response(
            status=error.status,
            text=f"{error.text} (version {self._engine.version})\n",
            headers={**kept, "X-ClickHouse-Exception-Code": str(error.code)},
        )


async def _form_fields(request: web.Request) -> tuple[tuple[str, str], ...]:
    if request.content_type != "multipart/form-data":
        return ()
    try:
        parts = await request.post()
    except web.HTTPRequestEntityTooLarge as error:
        raise _too_large("form", _LARGEST_FORM) from error
    except ValueError as error:
        raise ClickHouseError.of(Code.BAD_ARGUMENTS, f"the form cannot be read: {error}") from error
    fields: list[tuple[str, str]] = []
    for name, part in parts.items():
        if isinstance(part, FileField):
            part.file.close()
            raise unavailable("an external table")
        fields.append((name, part.decode() if isinstance(part, bytes | bytearray) else part))
    return tuple(fields)


def _log_failure(query_id: str) -> None:
    import structlog  # it brings rich with it: a fifth of the start time, for a line that should never be written

    # To stderr: stdout says when the process is ready, and may not be read after that.
    structlog.wrap_logger(structlog.WriteLogger(sys.stderr)).exception("clickhouse_request_failed", query_id=query_id)


def application(engine: Engine, users: Users) -> web.Application:
    """Make the web application.

    Args:
        engine: open.
        users: who may send statements.

    Returns:
        An application; serve it without aiohttp's own decompression of requests, and with handler cancellation.
    """
    handler = RequestHandler(engine, users)
    app = web.Application(client_max_size=_LARGEST_FORM)
    app.router.add_get("/ping", handler.ok)
    app.router.add_get("/replicas_status", handler.ok)
    for path in ("/", "/query"):
        app.router.add_get(path, handler.statement)
        app.router.add_post(path, handler.statement)
    return app
