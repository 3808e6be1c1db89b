"""Sessions of the engine: a role, a database and settings, under which one statement runs at a time.

Making a session takes a quarter of the CPU of a small statement. So it stays open for later statements under the same
conditions, unless one failed in it, or can have changed it or dropped its database.
"""

import re
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from breakwater.local.clickhouse.access import MAX_EXECUTION_S, READER_LIMITS, EngineRole
from breakwater.local.clickhouse.statements import ClickHouseError, Statement

_KEEP_SESSIONS = re.compile(
    r"(?:ALTER|CREATE (?:OR REPLACE )?(?:DATABASE|TABLE|VIEW)|DELETE|INSERT|OPTIMIZE|SYSTEM|TRUNCATE|UPDATE)\b"
)
"""The beginnings of statements without a result that change nothing of a session, nor drop its database."""

_MOST_IDLE = 16


@dataclass(frozen=True, slots=True)
class QueryOptions:
    """The conditions that a statement runs under.

    Attributes:
        readonly: refuses writes, as GET does.
        database: the current one; empty for `default`.
        settings: by name, in the order they came; the engine judges them.
        parameters: values of `{name:Type}`, in the engine's escaped text form.
    """

    role: EngineRole
    readonly: bool
    database: str
    settings: dict[str, str]
    parameters: dict[str, str]


class Handle(Protocol):
    """The part of chdb's Connection that is used here; the last handle that is closed stops the engine."""

    def query(self, query: bytes, format: str, params: dict[str, str] | None = None) -> Any:  # noqa: A002
        """Runs a statement and returns chdb's result. Raises RuntimeError."""

    def close(self) -> None:
        """Ends the session."""


class SessionPool:
    """Sessions that are open and run no statement now.

    Args:
        connect: opens a handle of the engine.
    """

    def __init__(self, connect: Callable[[], Handle]) -> None:
        self._connect = connect
        self._idle: list[tuple[tuple[str, ...], Handle]] = []  # with the statements that prepared it
        self._changes = 0  # statements after which no session is used again
        self._lock = threading.Lock()

    @contextmanager
    def lend(self, statement: Statement, options: QueryOptions) -> Generator[Handle]:
        """Lends a session to one statement. Raises ClickHouseError: preparing or using it failed."""
        keeps_sessions = statement.has_result or _KEEP_SESSIONS.match(statement.before) is not None
        preparation = tuple(_preparation(options))
        handle, changes = self._take(preparation)
        unchanged = False
        try:
            is_new = handle is None
            handle = handle or self._connect()
            for sql in preparation if is_new else ():
                handle.query(as_bytes(sql), "TabSeparated")
            yield handle
            unchanged = keeps_sessions
        except RuntimeError as error:  # chdb has no class of its own
            raise ClickHouseError.from_engine(str(error)) from error
        finally:
            if not keeps_sessions:
                self.close()
            if handle is not None and not (unchanged and self._give_back(preparation, handle, changes)):
                handle.close()

    def close(self) -> None:
        """Closes all sessions that run no statement, and the others as soon as theirs has ended."""
        with self._lock:
            self._changes += 1
            closing = [handle for _, handle in self._idle]
            self._idle.clear()
        for handle in closing:
            handle.close()

    def _take(self, preparation: tuple[str, ...]) -> tuple[Handle | None, int]:
        """Returns an idle session if there is one that was prepared so, and the number of changes until now."""
        with self._lock:
            for number, (prepared_by, handle) in enumerate(self._idle):
                if prepared_by == preparation:
                    del self._idle[number]
                    return handle, self._changes
            return None, self._changes

    def _give_back(self, preparation: tuple[str, ...], handle: Handle, changes: int) -> bool:
        """Keeps a session for other statements. Returns False if it can't be used again."""
        with self._lock:
            if changes != self._changes:
                return False
            self._idle.append((preparation, handle))
            longest_idle = self._idle.pop(0)[1] if len(self._idle) > _MOST_IDLE else None
        if longest_idle is not None:
            longest_idle.close()
        return True


def _preparation(options: QueryOptions) -> Iterator[str]:
    """The statements that give a session its role, database and settings."""
    yield f"SET ROLE {options.role}"
    if options.role.only_reads:
        # chdb takes the constraints of the profile, and not its values.
        limits = {name: str(limit) for name, limit in READER_LIMITS.items()}
        # readonly 2: settings may change, this one and the data may not.
        yield _set({"profile": "reader", **limits, "max_execution_time": str(MAX_EXECUTION_S), "readonly": "2"})
    if options.database:
        yield f"USE {escape(options.database, '`')}"
    if options.readonly and not options.role.only_reads:  # as a server sets it for GET
        yield _set({"readonly": "2"})
    if options.settings:
        yield _set(options.settings)


def _set(settings: Mapping[str, str]) -> str:
    return "SET " + ", ".join(f"{name} = {escape(value)}" for name, value in settings.items())


def escape(text: str, quote: str = "'") -> str:
    """Returns a text as a SQL literal, or with backticks as an identifier."""
    return quote + text.replace("\\", "\\\\").replace(quote, "\\" + quote) + quote


def as_bytes(sql: str) -> bytes:
    """Returns a statement in the engine's form; a literal of it may hold any bytes."""
    return sql.encode(errors="surrogateescape")
