"""`breakwater executions export`: records as a file for other programs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from breakwater.cli import connect, formats, output, parquet
from breakwater.cli.connect import run
from breakwater.cli.errors import CliError, unreachable, wrong_usage
from breakwater.cli.plane import DataOption, JsonOption, Plane

ANSWER_TIMEOUT_S = 600.0
"""Before its first row a server may have to read and merge much."""

STDOUT = Path("-")
_AGAIN = "\r\x1b[K"
"""Begins the terminal's line again."""

_TOLD_EVERY_S = {True: 0.2, False: 10.0}
"""Progress, on a terminal and elsewhere."""


class What(StrEnum):
    """Which records."""

    EXECUTIONS = "executions"
    ATTEMPTS = "attempts"


class Form(StrEnum):
    """As what they are written."""

    PARQUET = "parquet"
    JSONL = "jsonl"


class Status(StrEnum):
    """How an execution can end."""

    SUCCEEDED = "succeeded"
    DEAD_LETTERED = "dead_lettered"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Written:
    """What was exported."""

    rows: int
    bytes: int
    file: str | None
    """None where there were no rows, or they went to stdout."""


def export(
    form: Annotated[Form, typer.Option("--format", help="Parquet, or a line of JSON for each record.")],
    what: Annotated[What, typer.Option("--what", help="Which records.")] = What.EXECUTIONS,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="AGO", help="That ended (attempts: began) since: 2h, 7d, a time."),
    ] = None,
    until: Annotated[
        str | None, typer.Option("--until", metavar="AGO", help="And before: 1d, a time.", show_default="now")
    ] = None,
    agent: Annotated[str | None, typer.Option("--agent", help="Of this agent only.")] = None,
    status: Annotated[Status | None, typer.Option("--status", help="Executions that ended so.")] = None,
    file: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="Where to; `-` is stdout.", show_default="executions.parquet, …"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write executions or attempts to a file, each once and in no fixed order, without limit.

    Money is exact: a decimal string in USD in JSON lines, Decimal(18, 9) in Parquet. Times are UTC, in JSON lines as
    RFC 3339. Messages, input, output and metadata are JSON values in JSON lines, and text that holds JSON in Parquet.
    The file appears when it is whole; what breaks off leaves none. With --json a summary is printed.

    For example:

        breakwater executions export --format parquet --since 7d

        breakwater executions export --format jsonl --agent content-writer --output - | jq .total_cost

        breakwater executions export --format parquet --what attempts --since 2026-11-01 --until 2026-12-01
    """
    if status is not None and what is not What.EXECUTIONS:
        raise wrong_usage("--status is of executions", "Leave it away; attempts have an `outcome` in the file.")
    target = file or Path(f"{what}.{form}")
    if target == STDOUT and as_json:
        raise wrong_usage("--json prints a summary on stdout, where the rows would go", "Name a file with --output.")
    if target == STDOUT and form is Form.PARQUET and output.is_terminal(sys.stdout):
        raise wrong_usage("Parquet is nothing for a terminal", "Name a file with --output.")
    if target != STDOUT and target.exists() and not force:
        raise wrong_usage(f"{target} is there already", "Name another one with --output, or replace it with --force.")
    from breakwater.analytics.exports import where

    now = datetime.now(UTC)
    rows, parameters = where(
        what.value,
        since=None if since is None else formats.since(since, now),
        until=now if until is None else formats.since(until, now, "--until"),
        agent=agent,
        status=None if status is None else status.value,
    )
    written = run(_export(_Wanted(Plane(data).clickhouse_url, what, form, rows, parameters, target)))
    if as_json:
        output.json_document(written)
    elif not written.rows:
        output.note(f"no {what} to export; {'nothing' if target == STDOUT else 'no file'} is written")
    else:
        place = "stdout" if written.file is None else written.file
        output.note(f"{formats.counted(written.rows, what.value[:-1])} in {place}, {_size(written.bytes)}")


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What is asked for, and where."""

    url: str
    what: What
    form: Form
    rows: str
    parameters: dict[str, object]
    target: Path


async def _export(wanted: _Wanted) -> Written:
    from breakwater.analytics.exports import SETTINGS, statement

    async with connect.analytics(wanted.url, answer_timeout_s=ANSWER_TIMEOUT_S) as analytics:
        already = int((await analytics.query("SELECT getSetting('readonly')")).rows[0][0])
        if already == 1:
            raise CliError(
                "read_only_user",
                "this user of ClickHouse may set nothing, and what an export looks like is set",
                "Take a user with `readonly = 2`.",
            )
        counted = f"SELECT count() FROM {wanted.rows}"  # noqa: S608  parameters hold what people give
        ((total,),) = (await analytics.query(counted, wanted.parameters)).rows
        if not total:
            return Written(0, 0, None)
        settings = {
            **SETTINGS[wanted.form.value],
            # Left early, the statement ends. Only for those that read.
            "cancel_http_readonly_queries_on_client_close": 1,
            **({} if already else {"readonly": 2}),
        }
        sql = statement(wanted.what.value, wanted.form.value, wanted.rows)
        progress = _Progress(wanted, total)
        chunks = analytics.raw_stream(sql, wanted.parameters, settings)
        if wanted.target == STDOUT:
            await _to_stdout(chunks, progress)
            return Written(progress.rows if wanted.form is Form.JSONL else total, progress.bytes, None)
        with _replacing(wanted.target) as file:
            await _copy(chunks, file, progress)
            rows = parquet.rows_in(file) if wanted.form is Form.PARQUET else progress.whole_rows
            if rows is None:
                raise unreachable(f"ClickHouse broke off in the middle of its answer; {wanted.target} is not written")
        return Written(rows, progress.bytes, str(wanted.target))


async def _copy(chunks: AsyncGenerator[bytes], file: BinaryIO, progress: _Progress) -> None:
    async with aclosing(chunks):
        async for chunk in chunks:
            file.write(chunk)
            progress.on(chunk)
    progress.over()


async def _to_stdout(chunks: AsyncGenerator[bytes], progress: _Progress) -> None:
    try:
        await _copy(chunks, sys.stdout.buffer, progress)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        # Else Python would try once more to write what is left, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise CliError("not_written", "whoever read stdout went away before the end") from None


@contextmanager
def _replacing(target: Path) -> Generator[BinaryIO]:
    """A file beside the target that takes its place when the block is over, and is gone where that fails."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with temporary.open("w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:
        raise CliError("not_written", f"{target} can't be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


class _Progress:
    """Counts what came, and tells of it on stderr."""

    def __init__(self, wanted: _Wanted, total: int) -> None:
        self.rows = 0
        self.bytes = 0
        self._of = formats.counted(total, wanted.what.value[:-1])
        self._counts = wanted.form is Form.JSONL
        self._last = b""
        self._drawn = output.is_terminal(sys.stderr)
        self._every_s = _TOLD_EVERY_S[self._drawn]
        self._next = time.monotonic()

    @property
    def whole_rows(self) -> int | None:
        """The lines of JSON; None where the last one is not whole."""
        return self.rows if self._last == b"}\n" else None

    def on(self, chunk: bytes) -> None:
        """Bytes were written."""
        self.bytes += len(chunk)
        if self._counts:
            self.rows += chunk.count(b"\n")
            self._last = (self._last + chunk[-2:])[-2:]
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every_s
            text = f"{self.rows:,} of {self._of}" if self._counts else f"exporting {self._of}"
            sys.stderr.write(
                f"{_AGAIN}{text}, {_size(self.bytes)}" if self._drawn else f"{text}, {_size(self.bytes)}\n"
            )
            sys.stderr.flush()

    def over(self) -> None:
        """No more will come."""
        if self._drawn:
            sys.stderr.write(_AGAIN)


def _size(count: int) -> str:
    return f"{count:,} bytes" if count < 10_000 else f"{count / 1e6:,.1f} MB"
