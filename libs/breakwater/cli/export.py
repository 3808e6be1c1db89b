"""`breakwater executions export`: records as a file for other programs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from breakwater.cli import connect, formats, output
from breakwater.cli.connect import run
from breakwater.cli.errors import CliError, unreachable, written, wrong_usage
from breakwater.cli.plane import DataOption, JsonOption, PlaneLocation

SILENCE_S = 120.0
"""How long nothing may come, before the first byte or between two. A server that hangs looks like one that works."""

_AGAIN = "\r\x1b[K"
"""Begins the terminal's line again."""

_REPORTED_EVERY_S = {True: 0.2, False: 10.0}
"""ExportProgress, on a terminal and elsewhere."""

_LEAST_PARQUET_BYTES = 12

STDOUT = Path("-")
MAX_NAMED = 10
"""How many agents are named where the one that was asked for has nothing."""


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
    """Of Parquet those that were there when the export began; rows may be stored while it runs."""
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
        raise wrong_usage("--status is of executions", "Leave it out; attempts have an `outcome` in the file.")
    target = file or Path(f"{what}.{form}")
    if target == STDOUT and as_json:
        raise wrong_usage("--json prints a summary on stdout, where the rows would go", "Name a file with --output.")
    if target == STDOUT and form is Form.PARQUET and output.is_terminal(sys.stdout):
        raise wrong_usage("Parquet is not for a terminal", "Name a file with --output.")
    if target != STDOUT and target.exists() and not force:
        raise wrong_usage(f"{target} exists already", "Name another one with --output, or replace it with --force.")
    from breakwater.analytics.rows import exported_rows

    begin, end = _range(since, until)
    ended = None if status is None else status.value
    rows, parameters = exported_rows(what.value, since=begin, until=end, agent=agent, status=ended)
    url = PlaneLocation(data).clickhouse_url
    written = run(_export(_Wanted(url, what, form, rows, parameters, target)))
    if as_json:
        output.json_document(written)
    elif not written.rows:
        of_it = "" if agent is None else f" of agent {agent!r}"
        output.note(f"no {what}{of_it} to export; {'nothing' if target == STDOUT else 'no file'} is written")
        if agent is not None:
            others = exported_rows(what.value, since=begin, until=end, agent=None, status=ended)
            output.note(f"(what else you asked for fits {_agents(url, *others)})")
    else:
        place = "stdout" if written.file is None else written.file
        output.note(f"{formats.counted(written.rows, what.value[:-1])} in {place}, {size(written.bytes)}")


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What is asked for, and where."""

    url: str
    what: What
    form: Form
    rows: str
    parameters: dict[str, object]
    target: Path


def _range(since: str | None, until: str | None) -> tuple[datetime | None, datetime]:
    now = datetime.now(UTC)
    begin = None if since is None else formats.since(since, now)
    end = now if until is None else formats.since(until, now, "--until")
    if begin is not None and begin >= end:
        last = "now" if until is None else f"--until {until}"
        raise wrong_usage(
            f"--since {since} is not before {last}, so no time lies between",
            "--since is the earlier one: --since 2h --until 1h.",
        )
    return begin, end


def _agents(url: str, rows: str, parameters: dict[str, object]) -> str:
    """The agents that have rows, those with the most first."""
    sql = f"SELECT agent FROM {rows} GROUP BY agent ORDER BY count() DESC, agent LIMIT {MAX_NAMED + 1}"  # noqa: S608  of `exported_rows`
    found = connect.asked(url, lambda analytics: analytics.query(sql, parameters), answer_timeout_s=SILENCE_S)
    names = [str(name) for (name,) in found.rows]
    more = " and others" if len(names) > MAX_NAMED else ""
    return f"agents {', '.join(names[:MAX_NAMED])}{more}" if names else "no agent"


async def _export(wanted: _Wanted) -> Written:
    from breakwater.analytics.rows import EXPORT_SETTINGS, export_statement

    async with connect.analytics(wanted.url, answer_timeout_s=SILENCE_S) as analytics:
        # As long as this user may: a reader's statements are limited, and an export of years takes longer.
        rights = (
            "SELECT getSetting('readonly'), ifNull(max, '0') FROM system.settings WHERE name = 'max_execution_time'"
        )
        already, longest_s = map(int, (await analytics.query(rights)).rows[0])
        if already == 1:
            raise CliError(
                "read_only_user",
                "this user of ClickHouse may not change settings, which an export needs",
                "Take a user with `readonly = 2`.",
            )
        counted = f"SELECT count() FROM {wanted.rows}"  # noqa: S608  parameters hold what people give
        ((total,),) = (await analytics.query(counted, wanted.parameters)).rows
        if not total:
            return Written(0, 0, None)
        settings = {
            **EXPORT_SETTINGS[wanted.form.value],
            # Left early, the statement ends. Only for those that read.
            "cancel_http_readonly_queries_on_client_close": 1,
            "max_execution_time": longest_s,
            **({} if already else {"readonly": 2}),
        }
        sql = export_statement(wanted.what.value, wanted.form.value, wanted.rows)
        progress = ExportProgress(wanted.what, wanted.form, total)
        chunks = analytics.raw_stream(sql, wanted.parameters, settings)
        if wanted.target == STDOUT:
            await _to_stdout(chunks, progress)
            return Written(progress.rows, progress.bytes, None)
        with written(wanted.target) as file:
            await _copy(chunks, file, progress)
            if not progress.whole:
                raise unreachable(f"ClickHouse broke off in the middle of its answer; {wanted.target} is not written")
        return Written(progress.rows, progress.bytes, str(wanted.target))


async def _copy(chunks: AsyncGenerator[bytes], file: BinaryIO, progress: ExportProgress) -> None:
    async with aclosing(chunks):
        async for chunk in chunks:
            file.write(chunk)
            progress.on(chunk)
    progress.over()


async def _to_stdout(chunks: AsyncGenerator[bytes], progress: ExportProgress) -> None:
    try:
        await _copy(chunks, output.binary(), progress)
        sys.stdout.flush()
    except BrokenPipeError:
        # Else Python would try once more to write what is left, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise CliError("not_written", "stdout was closed before the end") from None


class ExportProgress:
    """Counts what came, and reports it on stderr."""

    def __init__(self, what: What, form: Form, total: int) -> None:
        """Begins; `total` is how many rows are expected."""
        self.bytes = 0
        self._lines = 0
        self._total = total
        self._of = formats.counted(total, what.value[:-1])
        self._form = form
        self._last = b""
        self._drawn = output.is_terminal(sys.stderr)
        self._every_s = _REPORTED_EVERY_S[self._drawn]
        self._next = time.monotonic()

    @property
    def rows(self) -> int:
        """How many rows have come: in JSON lines as counted, in Parquet as expected."""
        return self._lines if self._form is Form.JSONL else self._total

    @property
    def whole(self) -> bool:
        """Whether what came ends as a whole file does: with a whole line, or with Parquet's mark behind its footer."""
        if self._form is Form.JSONL:
            return self._last.endswith(b"}\n")
        return self._last == b"PAR1" and self.bytes >= _LEAST_PARQUET_BYTES

    def on(self, chunk: bytes) -> None:
        """Bytes were written."""
        self.bytes += len(chunk)
        self._last = (self._last + chunk[-4:])[-4:]
        counts = self._form is Form.JSONL
        self._lines += chunk.count(b"\n") if counts else 0
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every_s
            text = f"{self._lines:,} of {self._of}" if counts else f"exporting {self._of}"
            sys.stderr.write(f"{_AGAIN}{text}, {size(self.bytes)}" if self._drawn else f"{text}, {size(self.bytes)}\n")
            sys.stderr.flush()

    def over(self) -> None:
        """No more will come."""
        if self._drawn:
            sys.stderr.write(_AGAIN)


def size(count: int) -> str:
    """Bytes as people read them."""
    return f"{count:,} bytes" if count < 10_000 else f"{count / 1e6:,.1f} MB"
