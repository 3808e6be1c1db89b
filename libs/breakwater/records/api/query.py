"""`/api/v1/query`: statements of people that only read, as ClickHouse's user `analyst`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from breakwater.identity.event_stream import OpenStreams
from breakwater.identity.operations import CLICKHOUSE_UNAVAILABLE, operation
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.http.bodies import A_REQUEST, read_body
from breakwater.kernel.http.parsing import read_command
from breakwater.kernel.http.problems import RequestError
from breakwater.records.api.streamed_rows import MAX_AT_ONCE, StreamedRows
from breakwater.records.contract import MAX_STATEMENT, QueryRequest

MAX_ANSWER_BYTES = 256 << 20
MAX_ROW_BYTES = 32 << 20

_FORMAT = "JSONCompactEachRowWithNamesAndTypes"
_LINES_BEFORE_ROWS = 2

_SETTINGS = {
    "cancel_http_readonly_queries_on_client_close": 1,
    "date_time_output_format": "iso",
    "output_format_decimal_trailing_zeros": 1,
    "output_format_json_escape_forward_slashes": 0,
    "output_format_json_quote_64bit_integers": 0,
    "output_format_json_quote_decimals": 1,
    "output_format_json_validate_utf8": 1,
}

_READS_ONLY = 2
"""The level of `readonly` at which settings may change and data may not."""


@dataclass(slots=True)
class Analyst:
    """ClickHouse's user for statements of people.

    Args:
        analytics: the database, as that user; None if the process has no such user.
        running: the statements that run.
    """

    analytics: Analytics | None
    running: OpenStreams = field(default_factory=lambda: OpenStreams(MAX_AT_ONCE, "statements"))
    _checked: bool = False

    async def connect(self) -> Analytics:
        """Returns the database. Raises RequestError: 501, there is no user that only reads."""
        if self.analytics is None:
            raise _no_analyst("`request` has no BREAKWATER_CLICKHOUSE_ANALYST_URL")
        if not self._checked:
            level = int((await self.analytics.query("SELECT getSetting('readonly')")).rows[0][0])
            if level != _READS_ONLY:
                raise _no_analyst(
                    f"the user of BREAKWATER_CLICKHOUSE_ANALYST_URL has `readonly = {level}`, and must have 2"
                )
            self._checked = True
        return self.analytics


@dataclass(frozen=True, slots=True)
class QueryRoutes:
    """Statements that people write."""

    analyst: Analyst

    @operation(
        "POST",
        "/api/v1/query",
        tag="query",
        summary="Run a statement that reads the record",
        description="It runs as ClickHouse's user `analyst`, who can read Breakwater's tables but `audit`, and nothing "
        "else, within that user's limits of time, memory and rows. Texts are as they are stored: redacted, or "
        "encrypted. The response is JSON in lines: the names of the columns, their types, and each row; then "
        '`{"rows": 2, "more": false}`, or `{"error": …}` with what stopped it. Decimals are strings, so that they stay '
        "exact, and times are in RFC 3339. A client that leaves stops its statement. Nothing is recorded in the audit "
        "log, as for other reads.",
        body=QueryRequest,
        results={200: ("The rows, as they are found.", str)},
        content_type="application/x-ndjson",
        errors={
            422: "The request is invalid (`invalid_request`); ClickHouse refuses the statement, and the message says "
            "why and where in it (`query_failed`); or it took too long (`query_timeout`).",
            501: "This plane runs no statements, as it has no user of ClickHouse for them (`no_analyst`).",
            503: f"{CLICKHOUSE_UNAVAILABLE} Or this process already runs {MAX_AT_ONCE} statements "
            "(`too_many_statements`).",
        },
    )
    async def run_query(self, request: Request) -> Response:
        """Streams the rows. Raises RequestError: the request is invalid."""
        body = await read_body(request, 2 * MAX_STATEMENT, A_REQUEST)
        query = read_command(body, QueryRequest)
        return StreamedRows(
            request,
            self.analyst.running,
            lambda: _rows(self.analyst, query),
            content_type="application/x-ndjson",
            limit_s=query.timeout_s,
            last_piece=lambda problem: _line({"error": {"code": problem.code, "message": problem.message}}),
        )


async def _rows(analyst: Analyst, query: QueryRequest) -> AsyncGenerator[bytes]:
    """Yields whole lines up to the limit of rows, and the last line.

    The server's `max_result_rows` would also apply to subqueries and change their results.
    """
    analytics = await analyst.connect()
    settings = {**_SETTINGS, "max_execution_time": query.timeout_s}
    # On a line of its own, because the statement may end in a comment.
    sql = f"{query.statement.rstrip().rstrip(';')}\nFORMAT {_FORMAT}"
    lines = LineBuffer(None if query.limit is None else query.limit + _LINES_BEFORE_ROWS)
    async with aclosing(analytics.raw_stream(sql, settings=settings)) as chunks:
        async for chunk in chunks:
            if whole_lines := lines.add(chunk):
                yield whole_lines
            if lines.cut:
                break
    yield _line({"rows": max(0, lines.count - _LINES_BEFORE_ROWS), "more": lines.cut})


class LineBuffer:
    """Puts chunks together to whole lines, up to a number of lines and of bytes.

    Args:
        limit: the most lines; None for no limit.
    """

    def __init__(self, limit: int | None) -> None:
        self.count = 0
        self.cut = False
        """True once there was more than the limit."""
        self._limit = limit
        self._incomplete = bytearray()
        self._bytes = 0

    def add(self, chunk: bytes) -> bytes:
        """Returns the lines that the chunk completes. Raises RequestError: the answer or a row is too large."""
        if self._limit is not None and self.count >= self._limit:
            self.cut = self.cut or bool(chunk)
            return b""
        end = chunk.rfind(b"\n") + 1
        lines = bytes(self._incomplete) + chunk[:end] if end else b""
        if end:
            self._incomplete.clear()
        self._incomplete += chunk[end:]
        if self._limit is not None:
            lines = self._within_limit(lines)
        self.count += lines.count(b"\n")
        self._bytes += len(lines)
        if self._bytes > MAX_ANSWER_BYTES or len(self._incomplete) > MAX_ROW_BYTES:
            raise RequestError(
                422,
                "answer_too_large",
                f"the answer has more than {MAX_ANSWER_BYTES >> 20} MB, or a row more than {MAX_ROW_BYTES >> 20} MB; "
                "ask for less, or ask ClickHouse itself",
            )
        return lines

    def _within_limit(self, lines: bytes) -> bytes:
        assert self._limit is not None
        remaining = self._limit - self.count
        if lines.count(b"\n") <= remaining:
            self.cut = bool(self._incomplete) and lines.count(b"\n") == remaining
            return lines
        self.cut = True
        end = 0
        for _ in range(remaining):
            end = lines.index(b"\n", end) + 1
        return lines[:end]


def _line(document: object) -> bytes:
    return to_json(document) + b"\n"


def _no_analyst(problem: str) -> RequestError:
    message = f"this plane runs no statements: {problem}; deploy/clickhouse/users.xml has such a user, `analyst`"
    return RequestError(501, "no_analyst", message)
