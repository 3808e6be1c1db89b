"""`breakwater executions export`: records as a file for other programs."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from breakwater.jobs.contract.execution import Status
from breakwater.kernel.commands import connect, formats, output
from breakwater.kernel.commands.errors import CliError, replacing_file, unreachable, usage_error
from breakwater.local.plane import DataOption, JsonOption, PlaneLocation
from breakwater.records.rows import EXPORT_SETTINGS, ExportedRecords, ExportFormat, export_statement, exported_rows

SILENCE_S = 120.0
"""Longest silence, before the first byte or between two. A server that hangs looks like one that works."""

REPORTED_EVERY_S = 10.0
LEAST_PARQUET_BYTES = 12
STDOUT = Path("-")
MAX_NAMED = 10
"""Number of agents that are named where the one that was asked for has nothing."""


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """The summary of an export."""

    rows: int
    """Of Parquet those that were there when the export began; rows may be stored while it runs."""
    bytes: int
    file: str | None
    """None where there were no rows, or they went to stdout."""


def export(
    form: Annotated[ExportFormat, typer.Option("--format", help="Parquet, or one line of JSON per record.")],
    what: Annotated[ExportedRecords, typer.Option("--what", help="Kind of records.")] = "executions",
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="AGO", help="Ended (attempts: started) since: 2h, 7d, or a time."),
    ] = None,
    until: Annotated[
        str | None, typer.Option("--until", metavar="AGO", help="And before: 1d, or a time.", show_default="now")
    ] = None,
    agent: Annotated[str | None, typer.Option("--agent", help="Filter by agent.")] = None,
    status: Annotated[Status | None, typer.Option("--status", help="Filter executions by status.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--output", metavar="FILE", help="Output file; `-` means stdout.", show_default="executions.parquet, …"
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write executions or attempts to a file, each once, in no particular order, without a limit.

    Money is exact: a decimal string in USD in JSON lines, Decimal(18, 9) in Parquet. Times are UTC, in JSON lines as
    RFC 3339. Messages, input, output and metadata are JSON values in JSON lines, and text with JSON in Parquet. The
    file appears only when it is complete. With --json a summary is printed.

    For example:

        breakwater executions export --format parquet --since 7d

        breakwater executions export --format jsonl --agent content-writer --output - | jq .total_cost

        breakwater executions export --format parquet --what attempts --since 2026-11-01 --until 2026-12-01
    """
    target = file or Path(f"{what}.{form}")
    for wrong, message, remedy in (
        (
            status is not None and what != "executions",
            "--status applies only to executions",
            "Attempts have an `outcome`.",
        ),
        (as_json and target == STDOUT, "--json prints a summary on stdout, where the rows would go", _NAME),
        (
            form == "parquet" and target == STDOUT and output.is_terminal(sys.stdout),
            "Parquet is a binary format",
            _NAME,
        ),
        (target != STDOUT and target.exists() and not force, f"{target} already exists", f"{_NAME} Or add --force."),
    ):
        if wrong:
            raise usage_error(message, remedy)
    begin, end = _range(since, until)
    rows, parameters = exported_rows(what, since=begin, until=end, agent=agent, status=status)
    url = PlaneLocation(data).clickhouse_url
    exported = connect.run(_export(url, ExportProgress(what, form), rows, parameters, target))
    if as_json:
        output.json_document(exported)
    elif exported.rows:
        place = "stdout" if exported.file is None else exported.file
        output.note(f"{formats.counted(exported.rows, what[:-1])} in {place}, {size(exported.bytes)}")
    else:
        of_it = "" if agent is None else f" of agent {agent!r}"
        output.note(f"no {what}{of_it} to export; {'nothing' if target == STDOUT else 'no file'} is written")
        if agent is not None:
            others = exported_rows(what, since=begin, until=end, agent=None, status=status)
            output.note(f"(the other filters match {_agents(url, *others)})")


_NAME = "Name another file with --output."


def _range(since: str | None, until: str | None) -> tuple[datetime | None, datetime]:
    now = datetime.now(UTC)
    begin = None if since is None else formats.since(since, now)
    end = now if until is None else formats.since(until, now, "--until")
    if begin is not None and begin >= end:
        last = "now" if until is None else f"--until {until}"
        raise usage_error(
            f"--since {since} must be before {last}",
            "--since is the earlier time: --since 2h --until 1h.",
        )
    return begin, end


def _agents(url: str, rows: str, parameters: dict[str, object]) -> str:
    """The agents that have rows, those with the most first."""
    sql = f"SELECT agent FROM {rows} GROUP BY agent ORDER BY count() DESC, agent LIMIT {MAX_NAMED + 1}"  # noqa: S608  of `exported_rows`
    found = connect.ask_clickhouse(url, lambda analytics: analytics.query(sql, parameters), answer_timeout_s=SILENCE_S)
    names = [str(name) for (name,) in found.rows]
    more = " and others" if len(names) > MAX_NAMED else ""
    return f"agents {', '.join(names[:MAX_NAMED])}{more}" if names else "no agent"


async def _export(
    url: str, progress: ExportProgress, rows: str, parameters: dict[str, object], target: Path
) -> ExportedFile:
    async with connect.analytics(url, answer_timeout_s=SILENCE_S) as analytics:
        # As long as this user may: a reader's statements are limited, and an export of years takes longer.
        longest = "SELECT ifNull(max, '0') FROM system.settings WHERE name = 'max_execution_time'"
        ((longest_s,),) = (await analytics.query(longest)).rows
        settings = await connect.read_only_settings(
            analytics, {**EXPORT_SETTINGS[progress.form], "max_execution_time": int(longest_s)}
        )
        if not settings:
            raise CliError(
                "read_only_user",
                "this ClickHouse user may not change settings, which an export requires",
                "Use a user with `readonly = 2`.",
            )
        ((progress.total,),) = (await analytics.query(f"SELECT count() FROM {rows}", parameters)).rows  # noqa: S608  parameters hold what people give
        if not progress.total:
            return ExportedFile(0, 0, None)
        chunks = analytics.raw_stream(export_statement(progress.what, progress.form, rows), parameters, settings)
        async with connect.progress(progress.words, lines_every_s=REPORTED_EVERY_S):
            if target == STDOUT:
                await _to_stdout(chunks, progress)
                return ExportedFile(progress.rows, progress.bytes, None)
            with replacing_file(target) as file:
                await _copy(chunks, file, progress)
                if not progress.whole:
                    raise unreachable(f"ClickHouse aborted in the middle of its response; {target} was not written")
        return ExportedFile(progress.rows, progress.bytes, str(target))


async def _copy(chunks: AsyncGenerator[bytes], file: BinaryIO, progress: ExportProgress) -> None:
    async with aclosing(chunks):
        async for chunk in chunks:
            file.write(chunk)
            progress.add(chunk)


async def _to_stdout(chunks: AsyncGenerator[bytes], progress: ExportProgress) -> None:
    try:
        await _copy(chunks, output.binary(), progress)
        sys.stdout.flush()
    except BrokenPipeError:
        # Else Python would try once more to write what is left, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise CliError("not_written", "stdout was closed before the end") from None


@dataclass(slots=True)
class ExportProgress:
    """Count of the rows and bytes that came."""

    what: ExportedRecords
    form: ExportFormat
    total: int = 0
    """Number of rows that are expected."""
    bytes: int = 0
    _lines: int = 0
    _end: bytes = b""

    @property
    def rows(self) -> int:
        """Number of rows that have come: in JSON lines as counted, in Parquet as expected."""
        return self._lines if self.form == "jsonl" else self.total

    @property
    def whole(self) -> bool:
        """True if the end is that of a whole file: a whole line, or Parquet's mark behind its footer."""
        if self.form == "jsonl":
            return self._end.endswith(b"}\n")
        return self._end == b"PAR1" and self.bytes >= LEAST_PARQUET_BYTES

    def add(self, chunk: bytes) -> None:
        """Counts bytes that were written."""
        self.bytes += len(chunk)
        self._end = (self._end + chunk[-4:])[-4:]
        self._lines += chunk.count(b"\n") if self.form == "jsonl" else 0

    def words(self) -> str:
        """The progress in a line."""
        of_it = formats.counted(self.total, self.what[:-1])
        return f"{f'{self._lines:,} of' if self.form == 'jsonl' else 'exporting'} {of_it}, {size(self.bytes)}"


def size(count: int) -> str:
    """Bytes as people read them."""
    return f"{count:,} bytes" if count < 10_000 else f"{count / 1e6:,.1f} MB"
