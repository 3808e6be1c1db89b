"""One chdb handle, prepared for one statement.

A handle costs 0.2 ms and carries all that a request may set (settings, database, temporary tables, readonly, which
cannot be undone), so every request gets its own and nothing leaks from one to the next.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from breakwater.embedded.clickhouse.errors import ClickHouseError


class _Result(Protocol):
    """What chdb says about a statement that ran."""

    def bytes(self) -> bytes: ...
    def elapsed(self) -> float: ...
    def rows_read(self) -> int: ...
    def rows_written(self) -> int: ...
    def bytes_written(self) -> int: ...
    def storage_rows_read(self) -> int: ...
    def storage_bytes_read(self) -> int: ...


class _Written(Protocol):
    """What a streaming insert wrote."""

    rows_written: int
    bytes_written: int
    elapsed: float


class _Inserter(Protocol):
    """An insert that takes its data piece by piece."""

    def append(self, data: bytes) -> None: ...
    def finish(self) -> _Written: ...
    def cancel(self) -> None: ...


class Handle(Protocol):
    """The part of chdb's Connection that is used here."""

    def query(self, query: bytes, format: str, params: dict[str, str] | None = None) -> _Result:  # noqa: A002
        """Run one statement to its end."""
        ...

    def send_insert(self, query: str, format: str) -> _Inserter:  # noqa: A002
        """Begin an INSERT whose data follows."""
        ...

    def close(self) -> None:
        """Release the handle; the last one stops the engine."""
        ...


@dataclass(frozen=True, slots=True)
class ExternalTable:
    """Data that came with a query, to be read as a table of that name."""

    name: str
    structure: str
    format: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Context:
    """What a statement runs under.

    Attributes:
        database: the current database, empty for `default`.
        settings: names and values, applied with SET and checked by the engine.
        parameters: values of `{name:Type}`, in the engine's escaped text form, without `param_`.
        readonly: refuse writes, as GET does.
        session: SET and USE statements of the session, run first.
        external: temporary tables to fill before the statement runs.
    """

    database: str = ""
    settings: tuple[tuple[str, str], ...] = ()
    parameters: tuple[tuple[str, str], ...] = ()
    readonly: bool = False
    session: tuple[bytes, ...] = ()
    external: tuple[ExternalTable, ...] = ()


@dataclass(frozen=True, slots=True)
class Counts:
    """What a statement read and wrote."""

    read_rows: int = 0
    read_bytes: int = 0
    written_rows: int = 0
    written_bytes: int = 0
    result_rows: int = 0
    elapsed_ns: int = 0


def quoted(text: str) -> str:
    """Write a text as a SQL string literal."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _identifier(name: str) -> str:
    return "`" + name.replace("\\", "\\\\").replace("`", "\\`") + "`"


def counts_of(result: _Result) -> Counts:
    """Read what a statement read and wrote."""
    return Counts(
        read_rows=result.storage_rows_read(),
        read_bytes=result.storage_bytes_read(),
        written_rows=result.rows_written(),
        written_bytes=result.bytes_written(),
        result_rows=result.rows_read(),
        elapsed_ns=int(result.elapsed() * 1e9),
    )


@contextmanager
def prepared(connect: Callable[[], Handle], context: Context) -> Generator[Handle]:
    """Open a handle for one statement, and close it after.

    Args:
        connect: opens a handle of the engine.
        context: what the statement runs under.

    Yields:
        The handle.

    Raises:
        ClickHouseError: preparing it, or what ran on it, failed.
    """
    try:
        handle = connect()
    except RuntimeError as error:
        raise ClickHouseError.from_engine(str(error)) from error
    try:
        _prepare(handle, context)
        yield handle
    except RuntimeError as error:  # chdb's own errors are RuntimeErrors too
        raise ClickHouseError.from_engine(str(error)) from error
    finally:
        handle.close()


def _prepare(handle: Handle, context: Context) -> None:
    def run(sql: str) -> None:
        handle.query(sql.encode(), "TabSeparated")

    def set_(*settings: tuple[str, str]) -> None:
        run("SET " + ", ".join(f"{name} = {quoted(value)}" for name, value in settings))

    own = ("implicit_select", "0")  # on in chdb, off in a server: `1 + 1` is a syntax error
    if not (context.readonly or context.session or context.database or context.external):
        set_(own, *context.settings)
        return
    set_(own)
    for statement in context.session:
        handle.query(statement, "TabSeparated")
    if context.database:
        run(f"USE {_identifier(context.database)}")
    for table in context.external:
        run(f"CREATE TEMPORARY TABLE {_identifier(table.name)} ({table.structure})")
        inserter = handle.send_insert(f"INSERT INTO {_identifier(table.name)}", table.format)
        inserter.append(table.data)
        inserter.finish()
    if context.readonly:  # 2, as a server sets it for GET: settings may change, this one and the data may not
        set_(("readonly", "2"))
    if context.settings:
        set_(*context.settings)
