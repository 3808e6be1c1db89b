"""ClickHouse's HTTP interface: one request, one statement of the engine."""

import asyncio
import json
import secrets
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from aiohttp import ClientPayloadError, StreamReader, web
from aiohttp.web_request import FileField

from breakwater.embedded.clickhouse.access import READER_LIMITS, Role
from breakwater.embedded.clickhouse.codec import BlockDecoder, BlockEncoder, Decoder, Encoder, decoder, encoder
from breakwater.embedded.clickhouse.engine import Context, Counts, Engine, ExternalTable, RowStream
from breakwater.embedded.clickhouse.errors import ClickHouseError, Code
from breakwater.embedded.clickhouse.request import QueryRequest, Users, given_credentials, read_query_request
from breakwater.embedded.clickhouse.sql import Command, Insert, ResultQuery, Statement, read_insert, read_statement

MAX_BODY_BYTES = 4 << 30

_LONGEST_SQL = 16 << 20  # a statement without inline data; the engine has its own, smaller max_query_size

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
    figures = {**asdict(counts), "total_rows_to_read": 0, "result_bytes": 0}
    return json.dumps({name: str(figure) for name, figure in figures.items()}, separators=(",", ":"))


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
        while chunk := await stream.read():
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


def _exception_block(text: str, tag: str) -> bytes:
    message = text.encode()[:_LONGEST_EXCEPTION] + b"\n"
    return b"\r\n__exception__\r\n%b\r\n%b%d %b\r\n__exception__\r\n" % (
        tag.encode(),
        message,
        len(message),
        tag.encode(),
    )


_LONGEST_ANSWER_S = READER_LIMITS["max_execution_time"] * 2  # waiting for its turn included
_PROOF_BYTES = 1024
_LARGEST_FORM = 64 << 20
_MOST_STATEMENTS = 1000
_IDENTITY = ("X-ClickHouse-Server-Display-Name", "X-ClickHouse-Query-Id", "X-ClickHouse-Timezone")


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
            raise ClickHouseError.of(Code.CANNOT_DECOMPRESS, f"the request body was cut off: {error}") from error

    def _next_piece(self) -> bytes:
        piece = next((piece for piece in self._pieces if piece), b"")
        self._given += len(piece)
        if self._given > self._limit:
            raise ClickHouseError.of(
                Code.TOO_MANY_BYTES,
                f"the request body is larger than {self._limit} bytes when decoded: send it in several requests",
            )
        return piece

    def _take(self, received: bytes) -> None:
        if received:
            self._pieces = self._decoded(received, 0)
            return
        for one in self._decoders:
            one.end()
        self._ended = True

    def _decoded(self, data: bytes, step: int) -> Iterator[bytes]:
        if step == len(self._decoders):
            yield data
            return
        for piece in self._decoders[step].feed(data):
            yield from self._decoded(piece, step + 1)


@dataclass(frozen=True, slots=True)
class _Session:
    statements: tuple[bytes, ...]
    expires_at: float


class QuerySessions:
    """All sessions of the process; times are seconds of a monotonic clock, given by the caller."""

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}

    def touch(self, session_id: str, timeout_s: float, now: float) -> tuple[bytes, ...] | None:
        """Give a session's statements and keep it alive.

        Returns:
            Its statements, or None for a session that is new or has expired; it exists from now on.
        """
        for known in [known for known, session in self._sessions.items() if session.expires_at < now]:
            del self._sessions[known]
        found = self._sessions.get(session_id)
        statements = found.statements if found is not None else ()
        self._sessions[session_id] = _Session(statements, now + timeout_s)
        return statements if found is not None else None

    def keep(self, session_id: str, statement: bytes, timeout_s: float, now: float) -> None:
        """Remember a statement that succeeded; said again, only the last place counts."""
        found = self._sessions.get(session_id)
        before = found.statements if found is not None else ()
        statements = (*(known for known in before if known != statement), statement)[-_MOST_STATEMENTS:]
        self._sessions[session_id] = _Session(statements, now + timeout_s)


@dataclass(frozen=True, slots=True)
class _Form:
    fields: tuple[tuple[str, str], ...]
    tables: tuple[ExternalTable, ...]


class Face:
    """Answers requests with an engine."""

    def __init__(self, engine: Engine, users: Users, spool: Path) -> None:
        self._engine = engine
        self._users = users
        self._spool = spool
        self._sessions = QuerySessions()

    async def ok(self, request: web.Request) -> web.StreamResponse:
        """Say that the process answers, without authentication, as a server does."""
        return web.Response(text="Ok.\n", headers=self._headers(request.query.get("query_id", "")))

    async def statement(self, request: web.Request) -> web.StreamResponse:
        """Run what a request asks for."""
        if request.method != "POST" and "query" not in request.query:
            return await self.ok(request)
        headers = self._headers(request.query.get("query_id") or str(uuid.uuid4()))
        try:
            role = self._users.role_of(*given_credentials(request.headers, request.query))
            form = await _read_form(request)
            described = frozenset(f"{table.name}_{part}" for table in form.tables for part in ("structure", "format"))
            ask = read_query_request((*request.query.items(), *form.fields), request.headers, described)
            headers = self._headers(ask.query_id)
            return await self._run(request, role, ask, form, headers)
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
        self, request: web.Request, role: Role, ask: QueryRequest, form: _Form, headers: dict[str, str]
    ) -> web.StreamResponse:
        context = self._context(request, role, ask, form)
        body = _body(request, ask) if not form.fields and not form.tables else None
        statement, text = await _read_text(ask.query, body)
        if context.readonly and _inserts(statement):
            # The engine refuses to write a table then, but not INSERT INTO FUNCTION file(…).
            raise ClickHouseError.of(
                Code.READONLY,
                "Cannot execute query in readonly mode. For queries over HTTP, method GET implies readonly."
                " You should use method POST for modifying queries.",
            )
        if isinstance(statement, Insert):
            given = iter((text[statement.data_at :],))

            def read() -> bytes:
                return next(given, b"") or (body.read_on_thread() if body is not None else b"")

            headers["X-ClickHouse-Summary"] = summary(await self._engine.insert(statement, read, context))
            return web.Response(headers=headers)
        if isinstance(statement, ResultQuery):
            stream = self._engine.rows(statement, ask.default_format, context)
            try:
                format_name = statement.format or ask.default_format
                headers["X-ClickHouse-Format"] = format_name
                headers["Content-Type"] = content_type(format_name)
                headers[EXCEPTION_TAG] = secrets.token_hex(8)
                # The engine looks at no clock while it waits for a client that takes nothing.
                sending = send_rows(request, ask, stream, headers, self._spool, self._engine.version)
                return await asyncio.wait_for(sending, _LONGEST_ANSWER_S if role is Role.READER else None)
            except TimeoutError:
                if request.transport is not None:
                    request.transport.abort()
                return web.Response(status=499)
            finally:
                stream.close()
        answer, counts = await self._engine.command(statement, ask.default_format, context)
        if statement.keyword in (b"SET", b"USE") and ask.session_id:
            self._sessions.keep(f"{role} {ask.session_id}", statement.text, ask.session_timeout_s, time.monotonic())
        headers["X-ClickHouse-Summary"] = summary(counts)
        if answer:
            headers["X-ClickHouse-Format"] = ask.default_format
            headers["Content-Type"] = content_type(ask.default_format)
        return web.Response(body=answer, headers=headers)

    def _context(self, request: web.Request, role: Role, ask: QueryRequest, form: _Form) -> Context:
        session: tuple[bytes, ...] = ()
        if ask.session_id:
            known = self._sessions.touch(f"{role} {ask.session_id}", ask.session_timeout_s, time.monotonic())
            if known is None and ask.session_check:
                raise ClickHouseError.of(Code.SESSION_NOT_FOUND, f"Session {ask.session_id} not found")
            session = known or ()
        return Context(
            role=role,
            database=ask.database,
            settings=ask.settings,
            parameters=ask.parameters,
            readonly=request.method != "POST",
            session=session,
            external=form.tables,
        )

    def _headers(self, query_id: str) -> dict[str, str]:
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


async def _read_form(request: web.Request) -> _Form:
    if request.content_type != "multipart/form-data":
        return _Form((), ())
    try:
        parts = await request.post()
    except web.HTTPRequestEntityTooLarge as error:
        raise ClickHouseError.of(Code.TOO_MANY_BYTES, f"a form is larger than {_LARGEST_FORM} bytes") from error
    except ValueError as error:
        raise ClickHouseError.of(Code.BAD_ARGUMENTS, f"the form cannot be read: {error}") from error
    fields: list[tuple[str, str]] = []
    tables: list[ExternalTable] = []
    for name, part in parts.items():
        if isinstance(part, FileField):
            structure = request.query.get(f"{name}_structure")
            if not structure:
                raise ClickHouseError.of(
                    Code.BAD_ARGUMENTS,
                    f"the external table {name!r} needs its columns in the parameter {name}_structure",
                )
            with part.file as file:
                tables.append(
                    ExternalTable(name, structure, request.query.get(f"{name}_format", "TabSeparated"), file.read())
                )
        else:
            fields.append((name, part.decode() if isinstance(part, bytes | bytearray) else part))
    return _Form(tuple(fields), tuple(tables))


def _inserts(statement: Statement) -> bool:
    return isinstance(statement, Insert) or (isinstance(statement, Command) and statement.keyword == b"INSERT")


def _body(request: web.Request, ask: QueryRequest) -> Body:
    coding = decoder(request.headers.get("Content-Encoding", ""))
    decoders: list[Decoder] = [] if coding is None else [coding]
    if ask.native_in:
        decoders.append(BlockDecoder())
    return Body(request.content, decoders)


async def _read_text(query: str, body: Body | None) -> tuple[Statement, bytes]:
    """Join the URL's SQL and the body as a server does, and stop reading where an INSERT's data begins."""
    text = query.encode()
    if body is None:
        return read_statement(text), text
    if text:
        text += b"\n"
    insert = read_insert(text)
    if insert is not None:
        return insert, text
    while piece := await body.read():
        text += piece
        insert = read_insert(text)
        # A piece may end in the middle of the format's name: only what comes well after it proves it whole.
        if insert is not None and len(text) - insert.data_at >= _PROOF_BYTES:
            return insert, text
        if insert is None and len(text) > _LONGEST_SQL:
            raise ClickHouseError.of(Code.TOO_MANY_BYTES, f"a statement is larger than {_LONGEST_SQL} bytes")
    return read_statement(text), text


def _log_failure(query_id: str) -> None:
    import structlog  # it brings rich with it: a fifth of the start time, for a line that should never be written

    # To stderr: stdout says when the process is ready, and may not be read after that.
    structlog.wrap_logger(structlog.WriteLogger(sys.stderr)).exception("clickhouse_request_failed", query_id=query_id)


async def _no_such_path(request: web.Request) -> web.StreamResponse:
    return web.Response(
        status=404, text=f"There is no handle {request.path}\n\nUse / or /ping for health checks, / for queries.\n"
    )


def application(engine: Engine, users: Users, spool: Path) -> web.Application:
    """Make the web application.

    Args:
        engine: open.
        users: who may send statements.
        spool: an existing directory for large results that are held back.

    Returns:
        An application; serve it without aiohttp's own decompression of requests, and with handler cancellation.
    """
    face = Face(engine, users, spool)
    app = web.Application(client_max_size=_LARGEST_FORM)
    app.router.add_get("/ping", face.ok)
    app.router.add_get("/replicas_status", face.ok)
    for path in ("/", "/query"):
        app.router.add_get(path, face.statement)
        app.router.add_post(path, face.statement)
    app.router.add_route("*", "/{path:.*}", _no_such_path)
    return app
