"""ClickHouse over HTTP: queries, statements, and inserts whose errors distinguish bad rows from an unwell server."""

from __future__ import annotations

import asyncio
import logging
import re
import struct
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from copy import copy
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import unquote, urlsplit

from aiohttp import ClientError
from clickhouse_connect.datatypes.registry import get_from_name
from clickhouse_connect.driver import options
from clickhouse_connect.driver.asyncclient import AsyncClient
from clickhouse_connect.driver.binding import quote_identifier
from clickhouse_connect.driver.exceptions import ClickHouseError, DataError, ProgrammingError
from clickhouse_connect.driver.insert import InsertContext
from clickhouse_connect.driver.query import QueryResult
from clickhouse_connect.driver.transform import NativeTransform
from pydantic import SecretStr

from breakwater.kernel.clickhouse.errors import AnalyticsUnavailableError, QueryError, RowsRejectedError
from breakwater.kernel.clickhouse.table import Table
from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.process import background
from breakwater.kernel.security.tls import tls_settings
from breakwater.kernel.server_urls import server_urls
from breakwater.kernel.types import format_time

T = TypeVar("T")

_TAIL = 32 * 1024
"""The server writes at most 16 KiB about an error."""

_MARKED = re.compile(rb"\r\n__exception__\r\n(\w+)\r\n(.*)\n\d+ \1\r\n__exception__\r\n\Z", re.DOTALL)
_PLAIN = re.compile(rb"(Code: \d+\. DB::Exception: [^\n]*\(version [^\n]*\))\n?\Z")
"""No row ends so: one of JSON ends with a brace, and a Parquet file with its mark."""


class BrokenOffError(BreakwaterError):
    """The server gave up; the text is its own, with `Code: N.` at its beginning."""


async def whole(chunks: AsyncIterable[bytes]) -> AsyncGenerator[bytes]:
    """Hands bytes on, the last ones only when it is known that the answer is whole.

    Raises:
        BrokenOffError: the server says what went wrong.
        AnalyticsUnavailableError: the connection broke.
    """
    unsent = b""
    try:
        async for chunk in chunks:
            unsent += chunk
            if len(unsent) > 2 * _TAIL:
                yield unsent[:-_TAIL]
                unsent = unsent[-_TAIL:]
    except ClientError as error:
        _complain(unsent)
        raise AnalyticsUnavailableError(
            f"ClickHouse aborted in the middle of its response: {str(error) or type(error).__name__}"
        ) from error
    _complain(unsent)
    yield unsent


def _complain(tail: bytes) -> None:
    if marked_error := _MARKED.search(tail):
        raise BrokenOffError(marked_error[2].decode(errors="replace"))
    if plain_error := _PLAIN.search(tail):
        raise BrokenOffError(plain_error[1].decode(errors="replace"))


DEFAULT_DATABASE = "breakwater"
CONNECT_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 100
ANSWER_TIMEOUT_S = 60.0
"""Longest silence of a statement. An insert of thousands of rows takes a fraction of a second."""

REFUSED_BY_DRIVER = 0
"""The code of a statement that never reached the server, such as one with a parameter missing."""

_INSERT_SETTINGS: dict[str, Any] = {
    # New servers buffer inserts by default, and answer before the rows are in a part.
    "async_insert": 0,
    # The status says what became of the whole insert, not only of its beginning.
    "wait_end_of_query": 1,
    # A batch after a long outage, or a replayed one, may span many months.
    "max_partitions_per_insert_block": 0,
    # On a replicated cluster most servers have the rows before they are acknowledged. On one server it means nothing.
    # Inserts of several sinks go on side by side; the other way, all but one at a time would be refused.
    "insert_quorum": "auto",
    "insert_quorum_parallel": 1,
    "insert_quorum_timeout": int(ANSWER_TIMEOUT_S * 1000 / 2),
    # Rows have a value for each column that is named. The embedded engine takes an eighth of its CPU to be ready for
    # others; columns that are not named get their defaults all the same.
    "input_format_defaults_for_omitted_fields": 0,
    # Rows that are sent again are stored again, and replace the first: those may be gone, where the quorum failed.
    "insert_deduplicate": 0,
}

_READ_SETTINGS: dict[str, Any] = {
    # Rows are replaced within their partition only: `schema` says why. Reading with FINAL takes half as long so.
    "do_not_merge_across_partitions_select_final": 1,
    # Skipping granules under FINAL is right: what has an index is the same in all versions of a row.
    "use_skip_indexes_if_final": 1,
}

_ALL_SETTINGS = "SELECT name, value, readonly FROM system.settings LIMIT 10000"

SETTINGS_IN_USE = (
    *(*_INSERT_SETTINGS, *_READ_SETTINGS),
    # The driver's own.
    *("cancel_http_readonly_queries_on_client_close", "cast_string_to_dynamic_use_inference", "date_time_input_format"),
    *("enable_http_compression", "http_headers_progress_interval_ms", "send_progress_in_http_headers"),
)
"""The settings whose values and rights the driver is to know."""

# ClickHouse's codes for a value that does not fit. Anything else is the server's or the schema's trouble: an unknown
# table, a full disk, a wrong password. That passes or is mended, and no row may be given up for it.
_ABOUT_THE_ROWS = frozenset(
    {
        6,  # CANNOT_PARSE_TEXT
        26,  # CANNOT_PARSE_QUOTED_STRING
        27,  # CANNOT_PARSE_INPUT_ASSERTION_FAILED
        38,  # CANNOT_PARSE_DATE
        41,  # CANNOT_PARSE_DATETIME
        69,  # ARGUMENT_OUT_OF_BOUND
        72,  # CANNOT_PARSE_NUMBER
        117,  # INCORRECT_DATA
        128,  # TOO_LARGE_ARRAY_SIZE
        131,  # TOO_LARGE_STRING_SIZE
        321,  # VALUE_IS_OUT_OF_RANGE_OF_DATA_TYPE
        349,  # CANNOT_INSERT_NULL_IN_ORDINARY_COLUMN
        407,  # DECIMAL_OVERFLOW
        469,  # VIOLATED_CONSTRAINT
        691,  # UNKNOWN_ELEMENT_OF_ENUM
    }
)

# Codes of a server that is there and can't serve now: the same statement works later.
_PASSING = frozenset(
    {
        159,  # TIMEOUT_EXCEEDED
        202,  # TOO_MANY_SIMULTANEOUS_QUERIES
        203,  # NO_FREE_CONNECTION
        209,  # SOCKET_TIMEOUT
        210,  # NETWORK_ERROR
        242,  # TABLE_IS_READ_ONLY
        999,  # KEEPER_EXCEPTION
    }
)

_CODE = re.compile(r"Code: (\d+)\.")
_ADDED_BY_DRIVER = re.compile(r"\s*\(for url [^)]*\)\s*$")
_GRAMMAR = re.compile(r" Expected one of: .*(?=\(SYNTAX_ERROR\))", re.DOTALL)
_VERSION = re.compile(r"\s*\(version (?:[^()]|\([^()]*\))*\)\s*$")


@dataclass(frozen=True, slots=True)
class ResultSet:
    """The answer to a query."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def named_rows(self) -> Iterator[dict[str, Any]]:
        """The rows, each with the names of its columns."""
        return (dict(zip(self.columns, row, strict=True)) for row in self.rows)


class Driver(AsyncClient):
    """clickhouse-connect's client, which reads the settings in use when it connects, and not all 1,400 of the server.

    A setting that it does not know is sent as it is, for the server to judge.
    """

    async def _execute_operation(self, operation: Any) -> object:
        """Overridden to ask for less. `tests/test_vendor_internals.py` fails where a newer driver asks otherwise."""
        if operation.text == _ALL_SETTINGS:
            operation = replace(
                operation, text=_ALL_SETTINGS.replace("LIMIT 10000", f"WHERE name IN {SETTINGS_IN_USE}")
            )
        return await super()._execute_operation(operation)


class Analytics:
    """One ClickHouse database. Connects when first used, and stays usable while its servers come and go."""

    def __init__(self, addresses: Sequence[Mapping[str, Any]], database: str, answer_timeout_s: float) -> None:
        """Takes the addresses of servers that have the same tables: one is used until it does not answer."""
        self.database = database
        self._addresses = addresses
        self._number = 0
        """Of the address that is in use."""
        self._is_on_one_server = False
        self._answer_timeout_s = answer_timeout_s
        self._connecting: dict[int, asyncio.Task[AsyncClient]] = {}
        """The drivers by the numbers of their addresses."""
        self._replicated: dict[str, bool] = {}

    async def insert(self, table: Table, rows: Sequence[Sequence[object]]) -> None:
        """Stores rows in one insert; they are in the table when it returns.

        Args:
            table: where.
            rows: values in the order of the table's columns.

        Raises:
            RowsRejectedError: one of the rows can't be stored, whatever is done.
            AnalyticsUnavailableError: try again later with the same rows; which of them are stored is not known.
        """
        if not rows:
            return
        body = insert_body(table, rows)
        try:
            await self._ask(
                lambda client: client.raw_insert(insert_block=body, compression="lz4", settings=_INSERT_SETTINGS)
            )
        except QueryError as error:
            if error.code in _ABOUT_THE_ROWS:
                raise RowsRejectedError(f"{table.name}: {error.message}") from error
            raise AnalyticsUnavailableError(f"ClickHouse refuses rows for {table.name}: {error.message}") from error

    async def insert_blocks(self, table: str, columns: Sequence[str], blocks: AsyncIterable[bytes]) -> None:
        """Stores rows that were read in ClickHouse's own format (`FORMAT Native`).

        Args:
            table: where.
            columns: those that the rows have; others get their defaults.
            blocks: the bytes, which are sent as they come.

        Raises:
            QueryError: ClickHouse refuses them.
            AnalyticsUnavailableError: try again later with the same rows; which of them are stored is not known.
            Exception: what `blocks` raises.
        """
        problems: list[Exception] = []

        async def body() -> AsyncGenerator[bytes]:
            try:
                async for block in blocks:
                    yield block
            except Exception as error:
                problems.append(error)
                raise

        settings = {**_INSERT_SETTINGS, "input_format_defaults_for_omitted_fields": 1}
        try:
            async with self._connected() as client:
                await client.raw_insert(quote_name(table), columns, body(), settings, "Native")
        except AnalyticsUnavailableError:
            if problems:  # aiohttp only breaks the connection
                raise problems[0] from None
            raise

    async def query(self, sql: str, parameters: Mapping[str, object] | None = None) -> ResultSet:
        """Runs a statement that gives rows.

        Args:
            sql: with placeholders such as `{agent:String}`.
            parameters: their values; times are aware.

        Raises:
            QueryError: ClickHouse refuses it.
            AnalyticsUnavailableError: no answer.
        """
        bound = _bind_times(parameters)
        result = await self._ask(lambda client: client.query(sql, parameters=bound, settings=_READ_SETTINGS))
        return ResultSet(tuple(result.column_names), tuple(tuple(row) for row in result.result_rows))

    async def read(
        self, kind: Callable[..., T], sql: str, parameters: Mapping[str, object] | None = None
    ) -> tuple[T, ...]:
        """Runs a statement that gives rows, and makes each a dataclass (or a dict) with the columns for its fields.

        Amounts are in nano-dollars, arrays are tuples. Raises as `query` does.
        """
        result = await self.query(sql, parameters)
        return tuple(kind(**dict(zip(result.columns, map(_plain, row), strict=True))) for row in result.rows)

    async def stream(self, sql: str, settings: Mapping[str, object] | None = None) -> AsyncGenerator[ResultSet]:
        """Runs a statement that gives rows, and hands them out as they come, in blocks.

        Closed before its end, it stops the statement. A caller that may leave early closes it with
        `contextlib.aclosing`.

        Args:
            sql: without placeholders.
            settings: ClickHouse's, for this statement only.

        Yields:
            The columns, without rows; then the rows. Nothing for a statement that has no result.

        Raises:
            QueryError: ClickHouse refuses it, which it may do after the first rows.
            AnalyticsUnavailableError: no answer, or only a part of one.
        """
        async with (
            self._connected() as client,
            await client.query_row_block_stream(sql, settings=dict(settings or {})) as blocks,
        ):
            columns = tuple(cast(QueryResult, blocks.source).column_names)
            yield ResultSet(columns, ())
            async for block in blocks:
                yield ResultSet(columns, tuple(tuple(row) for row in cast(Sequence[Sequence[Any]], block)))

    async def raw_stream(
        self, sql: str, parameters: Mapping[str, object] | None = None, settings: Mapping[str, object] | None = None
    ) -> AsyncGenerator[bytes]:
        """Runs a statement that names its `FORMAT`, and hands out what ClickHouse writes, as it comes.

        Closed before its end, it stops the statement. A caller that may leave early closes it with
        `contextlib.aclosing`.

        Args:
            sql: with placeholders such as `{agent:String}`.
            parameters: their values.
            settings: ClickHouse's, for this statement only.

        Yields:
            Bytes. Only who gets to the end without an error has all of them.

        Raises:
            QueryError: ClickHouse refuses it, which it may do after much of the answer.
            AnalyticsUnavailableError: no answer, or only a part of one.
        """
        async with self._connected() as client:
            answer = await client.raw_stream(sql, parameters=_bind_times(parameters), settings=dict(settings or {}))
            async with (
                answer as chunks,
                aclosing(whole(cast(AsyncIterable[bytes], chunks))) as checked,
            ):
                async for chunk in checked:
                    yield chunk

    async def execute(self, sql: str, parameters: Mapping[str, object] | None = None) -> None:
        """Runs a statement for its effect. Raises as `query` does."""
        async with self._connected() as client:
            await client.command(sql, parameters=_bind_times(parameters))

    async def caught_up(self, *tables: Table) -> Analytics:
        """Returns this database on one server, once that has every row of some tables that another one took.

        What the sink acknowledged is on most servers of a cluster, and the one that is asked may not be of them. Before
        money is counted, what it lacks must come. Without replicas nothing is waited for. Where a balancer sends each
        request to another server, this helps the one that got it only.

        Returns:
            A view that asks no other server, as that may lack rows, and raises AnalyticsUnavailableError instead.

        Raises:
            QueryError: the user may not `SYSTEM SYNC REPLICA`.
            AnalyticsUnavailableError: no answer, or the others are not reached.
        """
        view = copy(self)  # with the same drivers
        view._is_on_one_server = True
        for table in tables:
            if table.name not in self._replicated:
                engine = "SELECT engine FROM system.tables WHERE database = {database:String} AND name = {table:String}"
                result = await view.query(engine, {"database": self.database, "table": table.name})
                if not result.rows:
                    continue
                self._replicated[table.name] = str(result.rows[0][0]).startswith("Replicated")
            if self._replicated[table.name]:
                await view.execute(f"SYSTEM SYNC REPLICA {quote_name(table.name)} LIGHTWEIGHT")
        return view

    async def create_database(self, on_cluster: str = "") -> bool:
        """Creates the database where it is missing; returns whether it was. Raises as `query` does.

        Args:
            on_cluster: `Layout.on_cluster`, for every server of a cluster.
        """
        # Asked first: a user who may not create databases can still work in one that is there.
        if await self.has_database():
            return False
        async with self._connected() as client:
            await client.command(database_ddl(self.database, on_cluster), use_database=False)
        return True

    async def has_database(self) -> bool:
        """Returns True if the database is there. Raises as `query` does."""
        async with self._connected() as client:
            count = await client.command(
                "SELECT count() FROM system.databases WHERE name = {name:String}",
                parameters={"name": self.database},
                use_database=False,
            )
        return bool(count)

    async def ping(self) -> None:
        """Checks that the server answers, lets us in, and has the database. Raises as `query` does."""
        await self.query("SELECT 1")

    async def close(self) -> None:
        """Ends the connections. Used again, it connects again."""
        connecting = tuple(self._connecting.values())
        self._connecting.clear()
        for task in connecting:
            await background.stop(task)
            if not _has_failed(task):
                await task.result().close()

    async def _ask(self, ask: Callable[[AsyncClient], Awaitable[T]]) -> T:
        """Asks the server in use, and where it does not answer, the others. Raises as `query` does.

        What is asked may be done by several servers.
        """
        for _ in () if self._is_on_one_server else self._addresses[1:]:
            with suppress(AnalyticsUnavailableError):
                async with self._connected() as client:
                    return await ask(client)
        async with self._connected() as client:
            return await ask(client)

    @asynccontextmanager
    async def _connected(self) -> AsyncGenerator[AsyncClient]:
        """The driver, connected, with its errors as ours. If its server does not answer, the next one is used."""
        number = self._number
        try:
            # One attempt for all who wait: a server that hangs would else be waited for by one after the other.
            if number not in self._connecting or _has_failed(self._connecting[number]):
                self._connecting[number] = asyncio.create_task(self._connect(self._addresses[number]))
                # Retrieved even where no caller waits any more: asyncio would log an exception never retrieved.
                self._connecting[number].add_done_callback(_has_failed)
            client = await asyncio.shield(self._connecting[number])
            with _translated_errors():
                yield client
        except AnalyticsUnavailableError:
            if self._number == number and not self._is_on_one_server:
                self._number = (number + 1) % len(self._addresses)
            raise

    async def _connect(self, address: Mapping[str, Any]) -> AsyncClient:
        # Whatever the driver logs it also raises, and an outage would be logged once for every try.
        logging.getLogger("clickhouse_connect").setLevel(logging.CRITICAL)
        with _translated_errors():
            client = Driver(
                **address,
                compress="lz4",
                connect_timeout=CONNECT_TIMEOUT_S,
                send_receive_timeout=self._answer_timeout_s,
                query_retries=0,
                tz_mode="aware",
                show_clickhouse_errors=True,
                client_name="breakwater",
                # A page asks a dozen questions in parallel, and several people may look at pages.
                connector_limit=MAX_CONNECTIONS,
                connector_limit_per_host=MAX_CONNECTIONS,
                autogenerate_session_id=False,
            )
            await client.__aenter__()
        # Named only now, because the driver's first questions would fail in a database that setup has yet to create.
        client.database = self.database
        return client


def connect(url: SecretStr | str, *, answer_timeout_s: float = ANSWER_TIMEOUT_S) -> Analytics:
    """The database of a URL: `http://user:password@host:8123/database`; `https` for TLS. Connects to nothing yet.

    Args:
        url: as above; `host:8123,host:8123` names several servers of a replicated cluster.
        answer_timeout_s: longest silence of a statement.

    Raises:
        ValueError: the URL has another form. The text does not repeat it, as it may hold a password.
    """
    text = url.get_secret_value() if isinstance(url, SecretStr) else url
    try:
        servers = [urlsplit(server) for server in server_urls(text)]
        ports = [server.port for server in servers]
    except ValueError:
        raise _not_an_address() from None
    parts = servers[0]
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise _not_an_address()
    address: dict[str, Any] = {
        "interface": parts.scheme,
        "username": unquote(parts.username or "default"),
        "password": unquote(parts.password or ""),
    }
    if parts.scheme == "https":
        tls = tls_settings()
        address |= {
            "ca_cert": None if tls.ca is None else str(tls.ca),
            "client_cert": None if tls.cert is None else str(tls.cert),
            "client_cert_key": None if tls.key is None else str(tls.key),
            # A certificate proves that we may connect; who we are, user and password say.
            "tls_mode": "strict",
        }
    default_port = 8443 if parts.scheme == "https" else 8123
    addresses = [
        {**address, "host": server.hostname, "port": port or default_port}
        for server, port in zip(servers, ports, strict=True)
    ]
    return Analytics(addresses, unquote(parts.path.strip("/")) or DEFAULT_DATABASE, answer_timeout_s)


def database_ddl(database: str, on_cluster: str = "") -> str:
    """The statement that creates a database where it is missing."""
    return f"CREATE DATABASE IF NOT EXISTS {quote_name(database)}{on_cluster}"


def quote_name(name: str) -> str:
    """The name of a database or a table, as SQL has it."""
    return quote_identifier(name)


def statements(module: str) -> Mapping[str, str]:
    """Returns the statements of a module's file in `sql/`, each by the name in the line above it: `-- name: spend`."""
    path = Path(module)
    text = path.with_name("sql").joinpath(f"{path.stem}.sql").read_text("utf-8")
    parts = (part.partition("\n") for part in text.split("-- name: ")[1:])
    return {name: without_comments(sql) for name, _, sql in parts}


def without_comments(sql: str) -> str:
    """SQL without the lines that are comments."""
    return re.sub(r"^--.*\n", "", sql, flags=re.MULTILINE).strip()


# Raised by the driver's serializer on a value of a wrong type or size; it documents none of it.
_BAD_VALUE = (TypeError, ValueError, ArithmeticError, AttributeError, struct.error, ClickHouseError)


def insert_body(table: Table, rows: Sequence[Sequence[object]]) -> bytes:
    """The whole insert, in ClickHouse's column format, compressed.

    Uses internals of the driver, whose own `insert` serializes while it sends: a bad value is then found with half of
    the request sent, and each insert takes a thread. `pyproject.toml` bounds the driver's version, and
    `tests/records/test_client.py` fails where a newer one has moved what is used here.

    Raises:
        RowsRejectedError: a value fits no column.
    """
    # The driver would load pandas and numpy, where they are installed, only to see that rows are no data frame: most
    # of a second and 80 MB. What is set here already, it takes for looked up.
    for library in ("np", "pd", "pd_time_test"):
        options.__dict__.setdefault(library, None)
    problems: list[Exception] = []
    try:
        context = InsertContext(
            quote_name(table.name),
            list(table.columns),
            [get_from_name(kind) for kind in table.columns.values()],
            data=rows,
            compression="lz4",
        )
        body = b"".join(NativeTransform.build_insert(context, problems.append))
    except _BAD_VALUE as error:
        raise RowsRejectedError(f"{table.name}: {error}") from error
    if problems:
        problem = problems[0]
        raise RowsRejectedError(f"{table.name}.{context.column_name}: {problem}") from problem
    vars(context).clear()  # it refers to itself: the rows would stay until a collection of garbage
    return body


def _not_an_address() -> ValueError:
    return ValueError("the ClickHouse URL must look like http://user:password@host:8123/database")


def _bind_times(parameters: Mapping[str, object] | None) -> dict[str, Any]:
    """Returns parameters with times in the form of `DateTime64(3, 'UTC')`."""
    return {
        name: format_time(value)[:-1].replace("T", " ") if isinstance(value, datetime) else value
        for name, value in (parameters or {}).items()
    }


def _plain(value: Any) -> Any:
    """A value of a row: every Decimal of these tables is an amount in USD."""
    if isinstance(value, Decimal):
        return int(value.scaleb(9))
    return tuple(cast("list[Any]", value)) if isinstance(value, list) else value


def _has_failed(connecting: asyncio.Task[AsyncClient]) -> bool:
    return connecting.done() and (connecting.cancelled() or connecting.exception() is not None)


@contextmanager
def _translated_errors() -> Generator[None]:
    """The driver's errors as ours."""
    try:
        yield
    except (ClickHouseError, BrokenOffError) as error:
        text = _VERSION.sub("", _ADDED_BY_DRIVER.sub("", str(error)))
        # Without the hundred kinds of statement that ClickHouse knows, which it lists after a typing error.
        message = _GRAMMAR.sub(" ", text.partition("DB::Exception: ")[2] or text)
        code: int | None = getattr(error, "code", None)
        if isinstance(error, BrokenOffError) and (numbered := _CODE.match(text)):
            code = int(numbered[1])
        if isinstance(error, ProgrammingError | DataError) and code is None:
            raise QueryError(REFUSED_BY_DRIVER, message) from error
        if code is None or code in _PASSING:
            raise AnalyticsUnavailableError(f"ClickHouse does not answer: {message}") from error
        raise QueryError(code, message) from error
    except (TimeoutError, OSError) as error:
        raise AnalyticsUnavailableError(f"ClickHouse does not answer: {str(error) or type(error).__name__}") from error
