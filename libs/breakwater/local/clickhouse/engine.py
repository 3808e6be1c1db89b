"""The chdb engine: one data directory, and the threads that statements run on.

Results leave through a pipe (`INTO OUTFILE`): the engine writes any format as its server would, memory stays flat, and
a slow reader slows the engine instead of filling a buffer. The data of an INSERT is read from a file: chdb's streaming
insert reports no failure of its commit, as on a full disk.
"""

import asyncio
import fcntl
import json
import os
import re
import secrets
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryFile
from types import ModuleType
from typing import Any, TypeVar, cast
from urllib.parse import quote

from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.process.files import write_private
from breakwater.local.clickhouse.access import READER_SLOTS, EngineRole, check, check_names, source_functions, users_xml
from breakwater.local.clickhouse.sessions import Handle, QueryOptions, SessionPool, as_bytes, escape
from breakwater.local.clickhouse.statements import ClickHouseError, Statement
from breakwater.local.process import until_readable

T = TypeVar("T")

_PIPE_BYTES = 1 << 20
_READ_BYTES = 1 << 18
_KILL_AGAIN_S = 0.02
_READERS = 24  # results that are produced at the same time
_WRITERS = 8  # inserts and commands that run at the same time
_FILES = "_files"  # chdb's own default database shows every file as a table: it gets this name, and is dropped
_LOOKS = "background_processing_pool_task_sleep_seconds_when_no_work"
_CONFIG = f"""<clickhouse>
    <memory_worker_period_ms>1000</memory_worker_period_ms>
    <load_marks_threadpool_pool_size>8</load_marks_threadpool_pool_size>
    <{_LOOKS}_multiplier>2</{_LOOKS}_multiplier>
    <{_LOOKS}_max>60</{_LOOKS}_max>
    <merge_tree>
        <concurrent_part_removal_threshold>1000000</concurrent_part_removal_threshold>
        <cleanup_delay_period>5</cleanup_delay_period>
        <max_cleanup_delay_period>60</max_cleanup_delay_period>
        <cleanup_thread_preferred_points_per_iteration>50</cleanup_thread_preferred_points_per_iteration>
        <min_free_disk_bytes_to_perform_insert>268435456</min_free_disk_bytes_to_perform_insert>
    </merge_tree>
    <storage_configuration>
        <disks><default><keep_free_space_bytes>134217728</keep_free_space_bytes></default></disks>
    </storage_configuration>
</clickhouse>
"""
"""Memory is measured once a second; the default of twenty times is half of the work of an idle engine. A table looks
for parts to merge 0.1 s after an insert, and then after twice as long each time, up to a minute; by default it would
look fifty times in the first minute, and take up to ten. Inserts are refused, and merges not begun, before the disk is
full: a part whose file was not written to its end can't be read.

Threads are few, as the engine keeps each that it ever began, with memory and three open files: chdb heeds no
`max_thread_pool_free_size`. It would begin 50 for the first parts that have a file for each column, and 128 to remove
more than a hundred parts. Here one removes them, about fifty at a time and within a minute after they were merged; by
default they stay for up to five minutes, and take more of the disk than what they were merged to."""

_SERVER_SETTINGS = f"default_database={_FILES}"
_CHECKED_AS = "'/dev/fd/0'"  # takes the place of the pipe or file in a text that is checked
_LONGEST_CACHED = 1 << 14
_FIGURES = {
    "read_rows": "storage_rows_read",
    "read_bytes": "storage_bytes_read",
    "written_rows": "rows_written",
    "written_bytes": "bytes_written",
    "result_rows": "rows_read",
}
"""Figures of X-ClickHouse-Summary, with their methods of chdb's result."""
_PARSED_WITHIN = re.compile(r": In scope SELECT formatQuery.*(?= \([A-Z_]+\)\s*$)", re.DOTALL)


def summary(result: Any = None) -> str:
    """Returns X-ClickHouse-Summary, a JSON object of strings: the figures of chdb's result, or zeros without one."""
    figures = {name: 0 if result is None else int(getattr(result, method)()) for name, method in _FIGURES.items()}
    figures |= {"total_rows_to_read": 0, "result_bytes": 0}
    figures["elapsed_ns"] = 0 if result is None else int(result.elapsed() * 1e9)
    return json.dumps({name: str(figure) for name, figure in figures.items()}, separators=(",", ":"))


class DataDirectoryError(BreakwaterError):
    """The data directory cannot be opened."""


class RowStream:
    """The result of a statement, read as the engine makes it. Close it, read to the end or not."""

    def __init__(self, read_fd: int, outcome: "Future[str]", cancel: Callable[[], None]) -> None:
        self._fd = read_fd
        self._outcome = outcome
        self._cancel = cancel

    async def read(self) -> bytes:
        """Returns the next bytes; empty at the end, after a failure too."""
        while True:
            try:
                return os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                await until_readable(self._fd)

    async def outcome(self) -> str:
        """Waits for the statement's end, and returns its summary.

        Raises:
            ClickHouseError: it failed, before or after some of its result was read.
        """
        return await asyncio.wrap_future(self._outcome)

    def close(self) -> None:
        """Stops the statement if it still runs, and closes the pipe."""
        if self._outcome.done():
            os.close(self._fd)
        else:
            self._cancel()  # closes the pipe, too, when the statement has ended


class Engine:
    """chdb on one data directory, which is made when missing. A process has one.

    Raises:
        DataDirectoryError: the directory cannot be written, or another process uses it.
    """

    def __init__(self, data: Path) -> None:
        path = data.resolve()
        if "?" in str(path):
            raise DataDirectoryError(f"the data directory {path} has a '?' in its name, which the engine cannot open")
        try:
            path.mkdir(parents=True, exist_ok=True)
            _make_default_database(path)
            access = _access(path)
        except OSError as error:
            raise DataDirectoryError(f"cannot use the data directory {path}: {error.strerror}") from error
        # chdb imports pyarrow, and with it numpy, for an output format that is never used here: half of the start
        # time and 40 MB. It runs without.
        sys.modules.setdefault("pyarrow", cast("ModuleType", None))
        from chdb.state.sqlitelike import connect  # 200 MB that only this process needs

        open_handle = cast("Callable[[str], Handle]", connect)
        self._connect = partial(open_handle, str(path))
        self._sessions = SessionPool(self._connect)
        self.temporary = path / "tmp"  # the engine's own, and on the same disk
        try:
            # The engine lives as long as one handle is open, and takes its server settings from the first one.
            self._keeper = open_handle(f"{path}?{_SERVER_SETTINGS}{access}")
            self._parser = self._connect()
        except RuntimeError as error:
            raise DataDirectoryError(f"the engine cannot open the data directory {path}: {error}") from error
        self._keeper.query(f"DROP DATABASE {_FILES}".encode(), "TabSeparated")
        facts = self._keeper.query(b"SELECT version(), timezone(), hostName()", "TabSeparated").bytes()
        self.version, self.timezone, self.host = facts.decode().strip().split("\t")
        table_functions = self._keeper.query(b"SELECT name FROM system.table_functions", "TabSeparated").bytes()
        self._sources = source_functions(table_functions.decode().split())
        self._parser.query(b"SET max_query_size = 1000000000", "TabSeparated")
        self._parser_lock = threading.Lock()
        self._cached = lru_cache(1024)(self._parse)
        self._checked = lru_cache(1024)(self._check)
        # Reads and writes have threads of their own: slow SELECTs, however many, never hold up an insert.
        self._readers = ThreadPoolExecutor(_READERS, "clickhouse-read")
        # chdb sees one user, so it can't limit what all readers' statements take together; their number is limited.
        self._limited = ThreadPoolExecutor(READER_SLOTS, "clickhouse-limited")
        self._writers = ThreadPoolExecutor(_WRITERS, "clickhouse-write")
        self._cancels = ThreadPoolExecutor(_READERS, "clickhouse-cancel")  # one for each, as one may end slowly
        self._running: set[Future[Any]] = set()

    def canonical(self, sql: str) -> str:
        """Returns a statement as the engine parses and writes it: without comments, and with straight quotes only.

        Raises:
            ClickHouseError: it is no statement, or more than one.
        """
        return (self._cached if len(sql) < _LONGEST_CACHED else self._parse)(sql)

    def _parse(self, sql: str) -> str:
        try:
            with self._parser_lock:
                parsed = self._parser.query(as_bytes(f"SELECT formatQuery({escape(sql)})"), "RawBLOB").bytes()
        except RuntimeError as error:
            syntax_error = ClickHouseError.from_engine(str(error))
            raise ClickHouseError(syntax_error.code, _PARSED_WITHIN.sub("", syntax_error.text)) from error
        return parsed.decode(errors="surrogateescape")

    def _check(self, sql: str, role: EngineRole, file: str | None) -> None:
        check(self.canonical(sql), role, self._sources, file)

    def _run(self, statement: Statement, options: QueryOptions, file: str) -> Any:
        """Runs a statement with the literal of its file, if the role may. Raises ClickHouseError."""
        checked = statement.text(_CHECKED_AS)
        check_once = self._checked if len(checked) < _LONGEST_CACHED else self._check
        check_once(checked, options.role, _CHECKED_AS if statement.after else None)
        check_names(checked, options.role, options.database, options.parameters)
        with self._sessions.lend(statement, options) as handle:
            return handle.query(as_bytes(statement.text(file)), statement.format, params=options.parameters)

    def rows(self, statement: Statement, options: QueryOptions) -> RowStream:
        """Starts a statement that has a result, and returns that as a stream."""
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            with suppress(PermissionError):  # above the system's limit for users: the default size works too
                fcntl.fcntl(read_fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        mark = secrets.token_hex(8)

        def run() -> str:
            try:
                return summary(self._run(statement, options, f"'/dev/fd/{write_fd}' /* statement {mark} */"))
            finally:
                os.close(write_fd)

        started = self._submit(self._limited if options.role.only_reads else self._readers, run)

        def cancel() -> None:
            if started.cancel():
                os.close(write_fd)
                os.close(read_fd)
            else:
                self._cancels.submit(self._end, mark, started, read_fd)

        return RowStream(read_fd, started, cancel)

    def _end(self, mark: str, running: "Future[str]", read_fd: int) -> None:
        """Ends a statement whose reader has left, and then closes its pipe.

        KILL QUERY does not find a statement that is still being parsed, so it is repeated until the statement has
        ended. The pipe stays open until then: without a reader, the statement would wait for one for ever.
        """
        # The mark is cut in two: a KILL whose own text held it would find itself.
        kill = f"KILL QUERY WHERE position(query, concat('statement ', '{mark}')) > 0 ASYNC".encode()
        try:
            while not running.done():
                with closing(self._connect()) as handle:
                    handle.query(kill, "TabSeparated")
                with suppress(BlockingIOError):
                    os.read(read_fd, _PIPE_BYTES)
                wait([running], timeout=_KILL_AGAIN_S)
        finally:
            os.close(read_fd)

    async def execute(self, statement: Statement, options: QueryOptions, data: Iterator[bytes]) -> tuple[bytes, str]:
        """Runs an INSERT or a command, whose result is short if there is one.

        Args:
            statement: from `read_statement`.
            options: of the request.
            data: for an INSERT; read on a thread, so it may block and raise.

        Returns:
            The answer, mostly empty, and the summary.

        Raises:
            ClickHouseError: it failed. Blocks that were already written stay, as in a server.
        """

        def run() -> tuple[bytes, str]:
            with TemporaryFile(dir=self.temporary) as file:
                file.writelines(data if statement.after else ())
                file.seek(0)
                result = self._run(statement, options, f"'/dev/fd/{file.fileno()}'")
                return result.bytes() or b"", summary(result)

        return await asyncio.wrap_future(self._submit(self._writers, run))

    def _submit(self, pool: ThreadPoolExecutor, run: Callable[[], T]) -> "Future[T]":
        started = pool.submit(run)
        self._running.add(started)
        started.add_done_callback(self._running.discard)
        return started

    def close(self, grace_s: float) -> bool:
        """Stops the engine, once running statements have ended or `grace_s` is over.

        Returns:
            False if a statement still runs, which only the end of the process stops.
        """
        running = wait(set(self._running), timeout=grace_s).not_done
        for pool in (self._readers, self._limited, self._writers, self._cancels):
            pool.shutdown(wait=not running, cancel_futures=True)
        self._sessions.close()
        self._parser.close()
        self._keeper.close()
        return not running


def _make_default_database(data: Path) -> None:
    """Creates the database `default` as on a server: a session begins in it, so no session can create it."""
    metadata = data / "metadata"
    if not any((metadata / name).is_symlink() or (metadata / name).exists() for name in ("default", "default.sql")):
        metadata.mkdir(mode=0o700, exist_ok=True)
        write_private(metadata / "default.sql", f"ATTACH DATABASE _ UUID '{uuid.uuid4()}'\nENGINE = Atomic\n")


def _access(data: Path) -> str:
    """Writes the engine's configuration, and returns its files as arguments of the first handle."""
    folder = data / "access"
    folder.mkdir(mode=0o700, exist_ok=True)
    write_private(folder / "config.xml", _CONFIG)
    write_private(folder / "users.xml", users_xml())
    return f"&config-file={quote(str(folder / 'config.xml'))}&users_config={quote(str(folder / 'users.xml'))}"
