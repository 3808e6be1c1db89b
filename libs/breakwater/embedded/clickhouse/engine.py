"""The chdb engine: one data directory, and the threads that statements run on.

Results leave through a pipe (`INTO OUTFILE`): the engine writes any format as its server would, memory stays flat, and
a slow reader slows the engine instead of filling a buffer.
"""

import asyncio
import fcntl
import os
import re
import secrets
import sys
import threading
import uuid
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Protocol, cast
from urllib.parse import quote

from breakwater.embedded.clickhouse.access import (
    MAX_EXECUTION_S,
    READER_LIMITS,
    READER_SLOTS,
    Role,
    check,
    source_functions,
    users_xml,
)
from breakwater.embedded.clickhouse.errors import ClickHouseError
from breakwater.embedded.clickhouse.sql import Command, Insert, ResultQuery
from breakwater.embedded.process import until_readable
from breakwater.files import write_private

_PIPE_BYTES = 1 << 20
_READ_BYTES = 1 << 18
_KILL_AGAIN_S = 0.02
_READERS = 24  # how many results may be produced at once
_WRITERS = 8  # how many inserts and commands may run at once
# A server keeps up to a thousand idle threads; here each is memory and three open files.
_FILES = "_files"  # chdb's own default database shows every file as a table: it gets this name, and is dropped
_CONFIG = """<clickhouse>
    <memory_worker_period_ms>1000</memory_worker_period_ms>
    <merge_tree>
        <min_free_disk_bytes_to_perform_insert>268435456</min_free_disk_bytes_to_perform_insert>
    </merge_tree>
    <storage_configuration>
        <disks><default><keep_free_space_bytes>134217728</keep_free_space_bytes></default></disks>
    </storage_configuration>
</clickhouse>
"""
"""Its memory is measured once a second: twenty times, as by default, is half of what it does when nothing is asked.
Inserts are refused, and merges not begun, while there is still some space: a part whose file could not be written to
its end can't be read again."""

_SERVER_SETTINGS = f"max_thread_pool_free_size=32&default_database={_FILES}"
_CHECKED_AS = "'/dev/fd/0'"  # the way out in a text that is checked, where its number is not known yet
_WAY_OUT = re.compile(r"\s*(?:INTO )?OUTFILE '/dev/fd/\d+' APPEND /\* statement \w* \*/ FORMAT \w+")
_LONGEST_REMEMBERED = 1 << 14
_PARSED_WITHIN = re.compile(r": In scope SELECT formatQuery.*(?= \([A-Z_]+\)\s*$)", re.DOTALL)


class _Result(Protocol):
    """What chdb says about a statement that ran."""

    def bytes(self) -> bytes: ...
    def elapsed(self) -> float: ...
    def rows_read(self) -> int: ...
    def rows_written(self) -> int: ...
    def bytes_written(self) -> int: ...
    def storage_rows_read(self) -> int: ...
    def storage_bytes_read(self) -> int: ...


class _Inserter(Protocol):
    """An insert that takes its data piece by piece."""

    def append(self, data: bytes) -> None: ...
    def finish(self) -> object: ...


class _Handle(Protocol):
    """The part of chdb's Connection that is used here; the last handle that is closed stops the engine."""

    def query(self, query: bytes, format: str, params: dict[str, str] | None = None) -> _Result: ...  # noqa: A002
    def send_insert(self, query: str, format: str) -> _Inserter: ...  # noqa: A002
    def close(self) -> None: ...


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
        role: whose statement it is.
        database: the current database, empty for `default`.
        settings: names and values, applied with SET and checked by the engine.
        parameters: values of `{name:Type}`, in the engine's escaped text form, without `param_`.
        readonly: refuse writes, as GET does.
        session: SET and USE statements of the session, run first.
        external: temporary tables to fill before the statement runs.
    """

    role: Role | None = None
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


def _prepare(handle: _Handle, context: Context) -> None:
    def run(sql: str) -> None:
        handle.query(sql.encode(), "TabSeparated")

    def set_(*settings: tuple[str, str]) -> None:
        run("SET " + ", ".join(f"{name} = {quoted(value)}" for name, value in settings))

    if context.role is not None:
        run(f"SET ROLE {context.role}")
    if context.role is Role.READER:
        # Of the profile chdb takes the constraints, and not the values.
        # 2: settings may change, this one and the data may not
        limits = {**READER_LIMITS, "max_execution_time": MAX_EXECUTION_S, "readonly": 2}
        set_(("profile", "reader"), *((name, str(value)) for name, value in limits.items()))
    for statement in context.session:
        handle.query(statement, "TabSeparated")
    if context.database:
        run(f"USE {_identifier(context.database)}")
    for table in context.external:
        run(f"CREATE TEMPORARY TABLE {_identifier(table.name)} ({table.structure})")
        inserter = handle.send_insert(f"INSERT INTO {_identifier(table.name)}", table.format)
        inserter.append(table.data)
        inserter.finish()
    if context.readonly and context.role is not Role.READER:  # as a server sets it for GET
        set_(("readonly", "2"))
    if context.settings:
        set_(*context.settings)


class DataDirectoryError(Exception):
    """The data directory cannot be opened; the text says why and what to do."""


class RowStream:
    """The result of a statement, read as the engine makes it. Close it, read to the end or not."""

    def __init__(self, read_fd: int, outcome: "Future[Counts]", cancel: Callable[[], None]) -> None:
        self._fd = read_fd
        self._outcome = outcome
        self._cancel = cancel

    async def read(self) -> bytes:
        """Give the next bytes; empty at the end, whether the statement succeeded or not."""
        while True:
            try:
                return os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                await until_readable(self._fd)

    async def outcome(self) -> Counts:
        """Wait for the statement's end.

        Returns:
            What it read.

        Raises:
            ClickHouseError: it failed, before or after some of its result was read.
        """
        return await asyncio.wrap_future(self._outcome)

    def close(self) -> None:
        """Stop the statement if it still runs, and release the pipe."""
        if self._outcome.done():
            os.close(self._fd)
        else:
            self._cancel()  # closes the pipe, too, when the statement has ended


class Engine:
    """chdb on one data directory. Open one a process."""

    def __init__(self, data: Path, connect: Callable[[str], _Handle]) -> None:
        self._path = str(data)
        self._connect = connect
        # Reads and writes have threads of their own: slow SELECTs, however many, never hold up an insert.
        self._readers = ThreadPoolExecutor(_READERS, "clickhouse-read")
        # To chdb all are one user, so it can't limit what the statements of readers take together; their number does.
        self._limited = ThreadPoolExecutor(READER_SLOTS, "clickhouse-limited")
        self._writers = ThreadPoolExecutor(_WRITERS, "clickhouse-write")
        self._cancels = ThreadPoolExecutor(_READERS, "clickhouse-cancel")  # one for each, as one may end slowly
        self._running: set[Future[Counts]] = set()
        # The engine lives as long as one handle is open, and takes its server settings from the first one.
        self._keeper = connect(f"{self._path}?{_SERVER_SETTINGS}{_access(data)}")
        self._keeper.query(f"DROP DATABASE {_FILES}".encode(), "TabSeparated")
        facts = self._keeper.query(b"SELECT version(), timezone(), hostName()", "TabSeparated").bytes().decode()
        self.version, self.timezone, self.host = facts.strip().split("\t")
        known = self._keeper.query(b"SELECT name FROM system.table_functions", "TabSeparated").bytes().decode()
        self._sources = source_functions(known.split())
        self._parser = connect(self._path)
        self._parser.query(b"SET max_query_size = 1000000000", "TabSeparated")
        self._parser_lock = threading.Lock()
        self._checked = lru_cache(1024)(self._parse_and_check)

    @classmethod
    def open(cls, data: Path) -> "Engine":
        """Start the engine.

        Args:
            data: its directory; made when missing.

        Returns:
            The running engine.

        Raises:
            DataDirectoryError: it cannot be written, or another process uses it.
        """
        path = data.resolve()
        if "?" in str(path):
            raise DataDirectoryError(f"the data directory {path} has a '?' in its name, which the engine cannot open")
        try:
            path.mkdir(parents=True, exist_ok=True)
            _refuse_if_in_use(path)
            _make_default_database(path)
        except OSError as error:
            raise DataDirectoryError(f"cannot use the data directory {path}: {error.strerror}") from error
        # chdb imports pyarrow, and with it numpy, for an output it offers Python callers and we never ask for:
        # half of the start time and 40 MB. It runs without.
        sys.modules.setdefault("pyarrow", cast("ModuleType", None))
        from chdb.state.sqlitelike import connect  # 200 MB that only this process needs

        try:
            return cls(path, cast("Callable[[str], _Handle]", connect))
        except RuntimeError as error:
            raise DataDirectoryError(f"the engine cannot open the data directory {path}: {error}") from error

    @contextmanager
    def _prepared(self, context: Context) -> Generator[_Handle]:
        """A handle for one statement, closed after it. Raises ClickHouseError: preparing or using it failed."""
        try:
            handle = self._connect(self._path)
        except RuntimeError as error:
            raise ClickHouseError.from_engine(str(error)) from error
        try:
            _prepare(handle, context)
            yield handle
        except RuntimeError as error:  # chdb's own errors are RuntimeErrors too
            raise ClickHouseError.from_engine(str(error)) from error
        finally:
            handle.close()

    def _check(self, sql: bytes, role: Role | None, way_out: str | None = None) -> None:
        """Have the engine parse a statement, and refuse what the role may not do. Raises ClickHouseError."""
        if role is not None:
            (self._checked if len(sql) < _LONGEST_REMEMBERED else self._parse_and_check)(sql, role, way_out)

    def _parse_and_check(self, sql: bytes, role: Role, way_out: str | None) -> None:
        literal = sql.replace(b"\\", b"\\\\").replace(b"'", b"\\'")
        try:
            with self._parser_lock:
                parsed = self._parser.query(b"SELECT formatQuery('" + literal + b"')", "RawBLOB").bytes()
        except RuntimeError as error:
            refused = ClickHouseError.from_engine(str(error))
            raise ClickHouseError(refused.code, _PARSED_WITHIN.sub("", refused.text)) from error
        check(parsed.decode(errors="replace"), role, self._sources, way_out)

    def rows(self, statement: ResultQuery, default_format: str, context: Context) -> RowStream:
        """Start a statement that has a result.

        Args:
            statement: from `read_statement`.
            default_format: used when the statement names none.
            context: what it runs under.

        Returns:
            Its result as a stream.
        """
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            with suppress(PermissionError):  # above the system's limit for users: the default size works too
                fcntl.fcntl(read_fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        mark = secrets.token_hex(8)

        def with_way_out(file: str) -> bytes:
            way = f"\nINTO OUTFILE {file} APPEND /* statement {mark} */ FORMAT {statement.format or default_format}"
            return statement.before + way.encode() + statement.after

        def run() -> Counts:
            try:
                self._check(with_way_out(_CHECKED_AS).replace(mark.encode(), b""), context.role, _CHECKED_AS)
                with self._prepared(context) as handle:
                    sql = with_way_out(f"'/dev/fd/{write_fd}'")
                    return counts_of(handle.query(sql, "TabSeparated", params=dict(context.parameters)))
            except ClickHouseError as error:
                raise ClickHouseError(error.code, _WAY_OUT.sub("", error.text)) from error
            finally:
                os.close(write_fd)

        started = self._submit(self._limited if context.role is Role.READER else self._readers, run)

        def cancel() -> None:
            if started.cancel():
                os.close(write_fd)
                os.close(read_fd)
            else:
                self._cancels.submit(self._end, mark, started, read_fd)

        return RowStream(read_fd, started, cancel)

    def _end(self, mark: str, running: "Future[Counts]", read_fd: int) -> None:
        """End a statement whose reader has left, and close its pipe then.

        A statement that is still being parsed is not found, so it is killed until it has ended; and it would wait for
        ever for a reader to open the pipe, or to empty it, if the pipe were closed before.
        """
        try:
            while not running.done():
                self._kill(mark)
                with suppress(BlockingIOError):
                    os.read(read_fd, _PIPE_BYTES)
                wait([running], timeout=_KILL_AGAIN_S)
        finally:
            os.close(read_fd)

    def _kill(self, mark: str) -> None:
        # The mark is cut in two: a KILL whose own text held it would find itself.
        kill = f"KILL QUERY WHERE position(query, concat('statement ', '{mark}')) > 0 ASYNC".encode()
        with self._prepared(Context()) as handle:
            handle.query(kill, "TabSeparated")

    async def command(self, statement: Command, output_format: str, context: Context) -> tuple[bytes, Counts]:
        """Run a statement that is neither a query nor an insert with data.

        Args:
            statement: from `read_statement`.
            output_format: for the few commands that answer something.
            context: what it runs under.

        Returns:
            Its answer, mostly empty, and what it wrote.

        Raises:
            ClickHouseError: it failed.
        """
        answer = b""

        def run() -> Counts:
            nonlocal answer
            self._check(statement.text, context.role)
            with self._prepared(context) as handle:
                result = handle.query(statement.text, output_format, params=dict(context.parameters))
                answer = result.bytes() or b""
                return counts_of(result)

        counts = await asyncio.wrap_future(self._submit(self._writers, run))
        return answer, counts

    async def insert(self, statement: Insert, read: Callable[[], bytes], context: Context) -> Counts:
        """Insert data piece by piece.

        Args:
            statement: from `read_insert`.
            read: gives the next bytes, empty at the end; called on a thread, may block and raise.
            context: what it runs under.

        Returns:
            What was written.

        Raises:
            ClickHouseError: it failed. Blocks that were already written stay, as in a server.
        """

        # Through a pipe, as results leave: chdb's streaming insert reports no failure of its commit, as on a full disk.
        def run() -> Counts:
            self._check(statement.target + statement.settings + b" FORMAT Native", context.role)
            with self._prepared(context) as handle:
                read_fd, write_fd = os.pipe()
                if hasattr(fcntl, "F_SETPIPE_SZ"):
                    with suppress(PermissionError):
                        fcntl.fcntl(write_fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
                mark = secrets.token_hex(8)
                feeding = threading.Thread(target=feed, args=(write_fd, mark), name="clickhouse-feed")
                feeding.start()
                way_in = f" FROM INFILE '/dev/fd/{read_fd}' /* statement {mark} */ ".encode()
                sql = statement.target + way_in + statement.settings + f" FORMAT {statement.format}".encode()
                try:
                    return counts_of(handle.query(sql, "TabSeparated", params=dict(context.parameters)))
                except RuntimeError:
                    if unread:  # why it was stopped
                        raise unread[0] from None
                    raise
                finally:
                    os.close(read_fd)  # ends the feeding of a statement that failed
                    feeding.join()

        unread: list[BaseException] = []

        def feed(write_fd: int, mark: str) -> None:
            try:
                while piece := read():
                    while piece := piece[os.write(write_fd, piece) :]:
                        pass
            except BrokenPipeError:
                pass  # the statement has failed, and says why
            except BaseException as error:  # noqa: BLE001  raised by the statement
                unread.append(error)
                self._kill(mark)
            finally:
                os.close(write_fd)

        return await asyncio.wrap_future(self._submit(self._writers, run))

    def _submit(self, pool: ThreadPoolExecutor, run: Callable[[], Counts]) -> "Future[Counts]":
        started = pool.submit(run)
        self._running.add(started)
        started.add_done_callback(self._running.discard)
        return started

    def close(self, grace_s: float) -> bool:
        """Stop the engine.

        Args:
            grace_s: how long to wait for running statements.

        Returns:
            Whether all of them ended; if not, only leaving the process stops them.
        """
        still = wait(set(self._running), timeout=grace_s).not_done
        for pool in (self._readers, self._limited, self._writers, self._cancels):
            pool.shutdown(wait=not still, cancel_futures=True)
        self._parser.close()
        self._keeper.close()
        return not still


def _make_default_database(data: Path) -> None:
    """Let there be a database `default` as on a server: a session begins in it, so no session can create it."""
    metadata = data / "metadata"
    if not any((metadata / name).is_symlink() or (metadata / name).exists() for name in ("default", "default.sql")):
        metadata.mkdir(mode=0o700, exist_ok=True)
        write_private(metadata / "default.sql", f"ATTACH DATABASE _ UUID '{uuid.uuid4()}'\nENGINE = Atomic\n")


def _access(data: Path) -> str:
    """Write what the engine knows of users, and give it as arguments of its first handle."""
    folder = data / "access"
    folder.mkdir(mode=0o700, exist_ok=True)
    write_private(folder / "config.xml", _CONFIG)
    write_private(folder / "users.xml", users_xml())
    return f"&config-file={quote(str(folder / 'config.xml'))}&users_config={quote(str(folder / 'users.xml'))}"


def _refuse_if_in_use(data: Path) -> None:
    status = data / "status"
    if not status.exists():
        return
    with status.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = file.readline().decode(errors="replace").strip() or "another process"
            raise DataDirectoryError(
                f"the data directory {data} is in use ({owner}): stop that process or name another directory"
            ) from error
