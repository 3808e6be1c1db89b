"""ClickHouse's HTTP interface: one request, one statement of the engine."""

import asyncio
import base64
import binascii
import gzip
import hmac
import logging
import re
import secrets
import tempfile
import uuid
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from typing import BinaryIO, cast

from aiohttp import ClientPayloadError, web
from aiohttp.web_request import FileField

from breakwater.local.clickhouse.access import READER_LIMITS, EngineRole
from breakwater.local.clickhouse.engine import Engine, RowStream, summary
from breakwater.local.clickhouse.sessions import QueryOptions
from breakwater.local.clickhouse.statements import ClickHouseError, ErrorCode, Statement, find_data, read_statement

Users = Mapping[str, tuple[str, EngineRole]]
"""Password and role of each user."""

MAX_BODY_BYTES = 4 << 30  # as received, and decoded
_LARGEST_FORM = 64 << 20
_LONGEST_SQL = 16 << 20  # a statement without inline data; the engine has its own, smaller max_query_size

_EXCEPTION_TAG = "X-ClickHouse-Exception-Tag"
_HELD_IN_MEMORY = 16 << 20  # of a body, and of a result that wait_end_of_query holds: the rest goes to a file
_HELD_BACK = 1 << 20  # a failure within the first bytes still gets an HTTP status of its own
_PIECE = 1 << 20
_INLINE = 1 << 16  # compressing less than this costs less than a thread
_GZIP_LEVEL = 3  # a server's own
_EXCEPTION_LINGER_S = 3.0
_LONGEST_EXCEPTION = 15 << 10  # clients look for a block of at most 16 KiB
_LONGEST_ANSWER_S = READER_LIMITS["max_execution_time"] * 2  # waiting for its turn included

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_TRUE = ("1", "true", "on")
# Parameters of the transport; everything else in the URL is a setting, and the engine judges it.
_NOT_SETTINGS = frozenset(
    {
        "buffer_size", "client_protocol_version", "close_session", "compress", "database", "decompress",
        "default_format", "enable_http_compression", "http_zlib_compression_level", "password", "query", "query_id",
        "quota_key", "role", "session_check", "session_id", "session_timeout", "stacktrace", "user",
        "wait_end_of_query",
    }
)  # fmt: skip
_UNAVAILABLE = {
    "compress": "ClickHouse's own compression (ask for gzip by Accept-Encoding)",
    "decompress": "ClickHouse's own compression (send gzip, and a Content-Encoding)",
    "session_check": "a session",
}
_CONTENT_TYPES = (  # by the beginning of a format's name; the longest that fits comes first
    (("JSONEachRow", "JSONCompactEachRow", "JSONStringsEachRow"), "application/x-ndjson; charset=UTF-8"),
    (("JSON",), "application/json; charset=UTF-8"),
    (("CSVWithNames",), "text/csv; charset=UTF-8; header=present"),
    (("CSV",), "text/csv; charset=UTF-8; header=absent"),
    (("TabSeparated", "TSV"), "text/tab-separated-values; charset=UTF-8"),
    (("Arrow", "Native", "Parquet", "RowBinary"), "application/octet-stream"),
)


def authenticate(users: Users, request: web.Request) -> EngineRole:
    """Returns the role of a request's user, whose password may come by header, Basic authentication or URL.

    Raises:
        ClickHouseError: AUTHENTICATION_FAILED, the same for a wrong user and a wrong password.
    """
    headers = request.headers
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    if "X-ClickHouse-User" in headers or "X-ClickHouse-Key" in headers:
        name = headers.get("X-ClickHouse-User", "default")
        password = headers.get("X-ClickHouse-Key", "")
    elif scheme.lower() == "basic":
        try:
            name, _, password = base64.b64decode(token, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError) as error:
            problem = "the Authorization header is not valid Basic"
            raise ClickHouseError.of(ErrorCode.AUTHENTICATION_FAILED, problem) from error
    else:
        name = request.query.get("user", "default")
        password = request.query.get("password", "")
    authenticated_role: EngineRole | None = None
    for user, (user_password, role) in users.items():  # compared in constant time
        same_name = hmac.compare_digest(user.encode(), name.encode(errors="surrogateescape"))
        same_password = hmac.compare_digest(user_password.encode(), password.encode(errors="surrogateescape"))
        if same_name and same_password:
            authenticated_role = role
    if authenticated_role is None:
        raise ClickHouseError.of(
            ErrorCode.AUTHENTICATION_FAILED,
            f"{name}: Authentication failed: password is incorrect, or there is no user with such name.",
        )
    return authenticated_role


@dataclass(frozen=True, slots=True)
class StatementRequest:
    """A request for a statement, without its body.

    Attributes:
        query: the SQL, or its beginning, from the URL.
        options: the conditions that the statement runs under.
        default_format: for statements that name none.
        in_session: it names a session. Some clients always do, so this alone is not refused.
        gzip: compresses the response.
        wait_for_end: holds the answer until the statement has ended.
    """

    query: str
    options: QueryOptions
    default_format: str
    in_session: bool
    gzip: bool
    wait_for_end: bool

    @classmethod
    def of(cls, role: EngineRole, request: web.Request, form: Mapping[str, str]) -> "StatementRequest":
        """Reads the parameters of the URL and of a form, and the headers; of several with one name the last counts.

        Raises:
            ClickHouseError: a parameter can't be the name of a setting, or asks for a feature that is not here.
        """
        params = {**request.query, **form}
        headers = request.headers
        for name, feature in _UNAVAILABLE.items():
            if params.get(name, "") in _TRUE:
                raise ClickHouseError.unavailable(feature)
        default_format = params.get("default_format") or headers.get("X-ClickHouse-Format") or "TabSeparated"
        if _NAME.fullmatch(default_format) is None:
            raise ClickHouseError.of(ErrorCode.BAD_ARGUMENTS, f"{default_format!r} is not the name of a format.")
        settings: dict[str, str] = {}
        parameters: dict[str, str] = {}
        for name, value in params.items():
            if not name or name in _NOT_SETTINGS:
                continue
            if _NAME.fullmatch(name) is None:
                raise ClickHouseError.of(ErrorCode.UNKNOWN_SETTING, f"Unknown setting '{name}'.")
            if name.startswith("param_"):
                parameters[name.removeprefix("param_")] = value
            else:
                settings[name] = value
        database = params.get("database") or headers.get("X-ClickHouse-Database", "")
        codings = [coding.partition(";") for coding in headers.get("Accept-Encoding", "").lower().split(",")]
        takes_gzip = any(
            name.strip() == "gzip" and weight.strip() not in ("q=0", "q=0.0") for name, _, weight in codings
        )
        return cls(
            query=params.get("query", ""),
            options=QueryOptions(role, request.method != "POST", database, settings, parameters),
            default_format=default_format,
            in_session=bool(params.get("session_id")),
            gzip=takes_gzip and params.get("enable_http_compression", "1") in _TRUE,
            wait_for_end=params.get("wait_end_of_query", "") in _TRUE,
        )

    def read_statement(self, engine: Engine, pieces: Iterator[bytes]) -> tuple[Statement, Iterator[bytes]]:
        """Joins the URL's SQL and the body as a server does; the part that follows an INSERT is its data."""
        text = self.query.encode()
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
        statement = read_statement(canonical, self.default_format, in_session=self.in_session, has_data=data_at > 0)
        return statement, chain((text[data_at:],), pieces)


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
    """Reads a body to its end before anything is done with it, so that nothing is stored of one that is cut off."""
    try:
        async for piece in request.content.iter_any():
            if received.tell() + len(piece) > MAX_BODY_BYTES:
                raise _too_large("request body", MAX_BODY_BYTES)
            received.write(piece)
    except (ClientPayloadError, ConnectionError) as error:
        raise ClickHouseError.of(ErrorCode.CANNOT_DECOMPRESS, f"the request body was cut off: {error}") from error
    received.seek(0)


def _pieces(received: BinaryIO, content_encoding: str) -> Iterator[bytes]:
    """Reads a body that was received, and decodes it."""
    body = received
    match content_encoding.strip().lower():
        case "" | "identity":
            pass
        case "gzip":
            body = cast("BinaryIO", gzip.GzipFile(fileobj=received, mode="rb"))
        case "lz4":  # the sink's
            body = cast("BinaryIO", import_module("lz4.frame").LZ4FrameFile(received))
        case coding:
            raise ClickHouseError.unavailable(f"the Content-Encoding {coding} (send gzip or lz4)")
    size = 0
    try:
        while piece := body.read(_PIECE):
            size += len(piece)
            if size > MAX_BODY_BYTES:
                raise _too_large("request body", MAX_BODY_BYTES)
            yield piece
    except (EOFError, OSError, RuntimeError, zlib.error) as error:  # of gzip and lz4
        raise ClickHouseError.of(ErrorCode.CANNOT_DECOMPRESS, f"the request body is damaged: {error}") from error


def _too_large(subject: str, limit: int) -> ClickHouseError:
    return ClickHouseError.of(ErrorCode.TOO_MANY_BYTES, f"the {subject} is larger than {limit} bytes")


async def _read_form(request: web.Request) -> dict[str, str]:
    """Reads the fields of a form: parameters that are too long for a URL."""
    try:
        fields = await request.post()
    except web.HTTPRequestEntityTooLarge as error:
        raise _too_large("form", _LARGEST_FORM) from error
    except ValueError as error:
        raise ClickHouseError.of(ErrorCode.BAD_ARGUMENTS, f"the form cannot be read: {error}") from error
    if any(isinstance(field, FileField) for field in fields.values()):
        raise ClickHouseError.unavailable("an external table")
    return {name: field if isinstance(field, str) else cast("bytes", field).decode() for name, field in fields.items()}


class RequestHandler:
    """Answers requests with an engine."""

    def __init__(self, engine: Engine, users: Users) -> None:
        self._engine = engine
        self._users = users

    async def ok(self, request: web.Request) -> web.StreamResponse:
        """Says that the process answers, without authentication, as a server does."""
        return web.Response(text="Ok.\n", headers=self._headers(request))

    async def statement(self, request: web.Request) -> web.StreamResponse:
        """Runs a request's statement."""
        if request.method != "POST" and "query" not in request.query:
            return await self.ok(request)
        identity = self._headers(request)
        try:
            role = authenticate(self._users, request)
            form = await _read_form(request) if request.content_type == "multipart/form-data" else {}
            statement_request = StatementRequest.of(role, request, form)
            with tempfile.SpooledTemporaryFile(_HELD_IN_MEMORY, dir=str(self._engine.temporary)) as received:
                if not form:
                    await _receive(request, cast("BinaryIO", received))
                return await self._run(request, statement_request, cast("BinaryIO", received), dict(identity))
        except ClickHouseError as error:
            return self._refusal(error, identity)
        except ConnectionError:  # the client disconnected in the middle of its answer, and reads no other
            return web.Response(status=499)
        except Exception as error:  # the edge: a fault of ours is an answer too, and is logged
            logging.getLogger(__name__).exception("request %s failed", identity["X-ClickHouse-Query-Id"])
            message = f"{type(error).__name__}: {error}"
            return self._refusal(ClickHouseError.of(ErrorCode.UNKNOWN_EXCEPTION, message), identity)

    async def _run(
        self, request: web.Request, statement_request: StatementRequest, received: BinaryIO, headers: dict[str, str]
    ) -> web.StreamResponse:
        pieces = _pieces(received, request.headers.get("Content-Encoding", ""))
        statement, data = await asyncio.to_thread(statement_request.read_statement, self._engine, pieces)
        if statement_request.options.readonly and statement.keyword == "INSERT":
            # The engine refuses to write a table then, but not INSERT INTO FUNCTION null(…).
            raise ClickHouseError.of(
                ErrorCode.READONLY,
                "Cannot execute query in readonly mode. For queries over HTTP, method GET implies readonly."
                " You should use method POST for modifying queries.",
            )
        kinds = (kind for starts, kind in _CONTENT_TYPES if statement.format.startswith(starts))
        described = {
            "X-ClickHouse-Format": statement.format,
            "Content-Type": next(kinds, "text/plain; charset=UTF-8"),
        }
        if not statement.has_result:
            answer, headers["X-ClickHouse-Summary"] = await self._engine.execute(
                statement, statement_request.options, data
            )
            return web.Response(body=answer, headers=headers | described if answer else headers)
        headers |= {**described, _EXCEPTION_TAG: secrets.token_hex(8)}
        stream = self._engine.rows(statement, statement_request.options)
        try:
            # The engine looks at no clock while it waits for a client that takes nothing.
            longest_s = _LONGEST_ANSWER_S if statement_request.options.role.only_reads else None
            return await asyncio.wait_for(self._send_rows(request, statement_request, stream, headers), longest_s)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=499)
        finally:
            stream.close()

    async def _send_rows(
        self, request: web.Request, statement_request: StatementRequest, stream: RowStream, headers: dict[str, str]
    ) -> web.StreamResponse:
        """Sends a result, which the caller closes. Raises ClickHouseError: it failed, and nothing was sent yet."""
        with tempfile.SpooledTemporaryFile(_HELD_IN_MEMORY, dir=str(self._engine.temporary)) as buffer:
            size = 0
            ended = False
            while statement_request.wait_for_end or size < _HELD_BACK:
                chunk = await stream.read()
                if not chunk:
                    ended = True
                    break
                buffer.write(chunk)
                size += len(chunk)
            if ended:
                headers["X-ClickHouse-Summary"] = await stream.outcome()
            if request.method == "HEAD" or (ended and not size):
                return web.Response(headers=headers)
            if statement_request.gzip:
                headers["Content-Encoding"] = "gzip"
            buffer.seek(0)
            packer = _Packer(statement_request.gzip)
            if ended and size <= _PIECE:
                return web.Response(body=await packer.pack(buffer.read()) + packer.end(), headers=headers)
            headers.setdefault("X-ClickHouse-Summary", summary())
            answer = web.StreamResponse(headers=headers)
            await answer.prepare(request)
            while piece := buffer.read(_PIECE):
                await answer.write(await packer.pack(piece))
        if not ended:
            while chunk := await stream.read():
                await answer.write(await packer.pack(chunk))
            try:
                await stream.outcome()
            except ClickHouseError as error:
                block = _exception_block(f"{error.text} (version {self._engine.version})", headers[_EXCEPTION_TAG])
                await answer.write(await packer.pack(block) + packer.end())
                # Some clients drop received data once the connection breaks: they get time to read the block.
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

    def _refusal(self, error: ClickHouseError, identity: Mapping[str, str]) -> web.Response:
        text = f"{error.text} (version {self._engine.version})\n"
        headers = {**identity, "X-ClickHouse-Exception-Code": str(error.code)}
        return web.Response(status=error.status, body=text.encode(), headers=headers)


def application(engine: Engine, users: Users) -> web.Application:
    """Makes the web application; serve it without aiohttp's own decompression of requests."""
    handler = RequestHandler(engine, users)
    app = web.Application(client_max_size=_LARGEST_FORM)
    app.router.add_get("/ping", handler.ok)
    app.router.add_get("/replicas_status", handler.ok)
    for path in ("/", "/query"):
        app.router.add_get(path, handler.statement)
        app.router.add_post(path, handler.statement)
    return app
