"""`breakwater executions export`: writes records to a file for other programs."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, BinaryIO
from urllib.parse import urlencode

import aiohttp
import typer

from breakwater.client.commands import SEE_DOCTOR, Api, api_command, api_errors
from breakwater.jobs.contract.execution import Status
from breakwater.kernel.commands import connect, formats, output
from breakwater.kernel.commands.errors import CliError, replacing_file, unreachable, usage_error
from breakwater.local.plane import CLICKHOUSE_VARIABLE
from breakwater.records.contract import EXPORTED_ROWS, ExportedRecords, ExportFormat, ExportQuery
from breakwater.records.rows import EXPORT_SETTINGS, export_statement, exported_rows

MAX_SILENCE_S = 120.0
"""Longest wait in seconds for the next bytes, because a server that hangs looks like one that works."""

PROGRESS_EVERY_S = 10.0
LEAST_PARQUET_BYTES = 12
STDOUT = Path("-")
MAX_NAMED_AGENTS = 10
"""Maximum number of agents that a note names if the chosen agent has no records."""


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """The summary of an export."""

    rows: int
    """The number of rows. For Parquet, those stored when the export began; more may be stored while it runs."""
    bytes: int
    file: str | None
    """The file; None if there were no rows, or they went to stdout."""


@api_command
def export(
    api: Api,
    form: Annotated[ExportFormat, typer.Option("--format", help="Parquet, or one line of JSON per record.")],
    kind: Annotated[ExportedRecords, typer.Option("--what", help="Kind of records.")] = "executions",
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
) -> None:
    """Write executions or attempts to a file, each once, in no particular order, without a limit.

    Money is exact: a decimal string in USD in JSON lines, Decimal(18, 9) in Parquet. Times are UTC, in JSON lines as
    RFC 3339. Messages, input, output and metadata are JSON values in JSON lines, and text with JSON in Parquet. The
    file appears only when it is complete. With --json a summary is printed.

    Reads ClickHouse; or the HTTP API with --url or --api-key, or if only BREAKWATER_URL is set.

    For example:

        breakwater executions export --format parquet --since 7d

        breakwater executions export --format jsonl --agent content-writer --output - | jq .total_cost

        breakwater executions export --format parquet --what attempts --since 2026-11-01 --until 2026-12-01
    """
    target = file or Path(f"{kind}.{form}")
    if status is not None and kind != "executions":
        raise usage_error("--status applies only to executions", "Attempts have an `outcome`.")
    if target == STDOUT:
        if api.as_json:
            raise usage_error("--json prints a summary on stdout, where the rows would go", _OTHER_FILE)
        if form == "parquet" and output.is_terminal(sys.stdout):
            raise usage_error("Parquet is a binary format", _OTHER_FILE)
    elif target.exists() and not force:
        raise usage_error(f"{target} already exists", f"{_OTHER_FILE} Or add --force.")
    begin, end = _range(since, until)
    query = ExportQuery(format=form, records=kind, since=begin, until=end, agent=agent, status=status)
    with api_errors(unanswered=SEE_DOCTOR):
        exported = connect.run(_export(api, query, target))
    if api.as_json:
        output.json_document(exported)
    elif exported.rows:
        destination = "stdout" if exported.file is None else exported.file
        output.note(f"{formats.quantity(exported.rows, kind[:-1])} in {destination}, {size(exported.bytes)}")
    else:
        of_agent = "" if agent is None else f" of agent {agent!r}"
        output.note(f"no {kind}{of_agent} to export; {'nothing' if target == STDOUT else 'no file'} is written")
        if agent is not None and not api.uses_http(CLICKHOUSE_VARIABLE):
            rows, parameters = exported_rows(kind, since=begin, until=end, agent=None, status=status)
            output.note(f"(the other filters match {_agents(api.plane.clickhouse_url, rows, parameters)})")


_OTHER_FILE = "Name another file with --output."


def _range(since: str | None, until: str | None) -> tuple[datetime | None, datetime]:
    now = datetime.now(UTC)
    begin = None if since is None else formats.since(since, now)
    end = now if until is None else formats.since(until, now, "--until")
    if begin is not None and begin >= end:
        end_text = "now" if until is None else f"--until {until}"
        raise usage_error(
            f"--since {since} must be before {end_text}",
            "--since is the earlier time: --since 2h --until 1h.",
        )
    return begin, end


def _agents(url: str, rows: str, parameters: dict[str, object]) -> str:
    """Lists the agents that have rows, those with the most first."""
    sql = f"SELECT agent FROM {rows} GROUP BY agent ORDER BY count() DESC, agent LIMIT {MAX_NAMED_AGENTS + 1}"  # noqa: S608  of `exported_rows`
    result = connect.ask_clickhouse(
        url, lambda analytics: analytics.query(sql, parameters), answer_timeout_s=MAX_SILENCE_S
    )
    names = [str(name) for (name,) in result.rows]
    suffix = " and others" if len(names) > MAX_NAMED_AGENTS else ""
    return f"agents {', '.join(names[:MAX_NAMED_AGENTS])}{suffix}" if names else "no agent"


async def _export(api: Api, query: ExportQuery, target: Path) -> ExportedFile:
    progress = ExportProgress(query.records, query.format)
    is_remote = api.uses_http(CLICKHOUSE_VARIABLE)
    source = _from_api(api, query) if is_remote else _from_clickhouse(api.plane.clickhouse_url, query)
    async with source as (progress.total, chunks):
        if not progress.total:
            return ExportedFile(0, 0, None)
        async with connect.progress(progress.describe, lines_every_s=PROGRESS_EVERY_S):
            if target == STDOUT:
                await _to_stdout(chunks, progress)
                return ExportedFile(progress.rows, progress.bytes, None)
            with replacing_file(target) as file:
                await _copy(chunks, file, progress)
                if not progress.is_complete:
                    raise unreachable(f"ClickHouse aborted in the middle of its response; {target} was not written")
        return ExportedFile(progress.rows, progress.bytes, str(target))


@asynccontextmanager
async def _from_clickhouse(url: str, query: ExportQuery) -> AsyncGenerator[tuple[int, AsyncGenerator[bytes]]]:
    """Yields the expected number of rows, and the bytes of the file."""
    assert query.until is not None
    rows, parameters = exported_rows(
        query.records, since=query.since, until=query.until, agent=query.agent, status=query.status
    )
    async with connect.analytics(url, answer_timeout_s=MAX_SILENCE_S) as analytics:
        # Uses the longest time limit that the user may set, because an export of years exceeds the reader's default.
        limit_sql = "SELECT ifNull(max, '0') FROM system.settings WHERE name = 'max_execution_time'"
        ((longest_s,),) = (await analytics.query(limit_sql)).rows
        settings = await connect.read_only_settings(
            analytics, {**EXPORT_SETTINGS[query.format], "max_execution_time": int(longest_s)}
        )
        if not settings:
            raise CliError(
                "read_only_user",
                "this ClickHouse user may not change settings, which an export requires",
                "Use a user with `readonly = 2`.",
            )
        ((total,),) = (await analytics.query(f"SELECT count() FROM {rows}", parameters)).rows  # noqa: S608  parameters hold what people give
        yield total, analytics.raw_stream(export_statement(query.records, query.format, rows), parameters, settings)


@asynccontextmanager
async def _from_api(api: Api, query: ExportQuery) -> AsyncGenerator[tuple[int, AsyncGenerator[bytes]]]:
    """Does what `_from_clickhouse` does, over the HTTP API."""
    path = f"export?{urlencode(query.model_dump(mode='json', exclude_none=True))}"
    async with api.client() as client, client.open_response(path, begins_within_s=MAX_SILENCE_S) as response:
        yield int(response.headers[EXPORTED_ROWS]), _chunks(response.content)


async def _chunks(content: aiohttp.StreamReader) -> AsyncGenerator[bytes]:
    while chunk := await content.readany():
        yield chunk


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
        # Without this, Python would print an error when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise CliError("not_written", "stdout was closed before the end") from None


@dataclass(slots=True)
class ExportProgress:
    """The progress of an export: the rows and bytes that have arrived."""

    kind: ExportedRecords
    form: ExportFormat
    total: int = 0
    """Expected number of rows."""
    bytes: int = 0
    _lines: int = 0
    _end: bytes = b""

    @property
    def rows(self) -> int:
        """The number of rows that have arrived; for Parquet, the expected number."""
        return self._lines if self.form == "jsonl" else self.total

    @property
    def is_complete(self) -> bool:
        """Returns True if the bytes end like a complete file: with a whole line, or Parquet's mark after its footer."""
        if self.form == "jsonl":
            return self._end.endswith(b"}\n")
        return self._end == b"PAR1" and self.bytes >= LEAST_PARQUET_BYTES

    def add(self, chunk: bytes) -> None:
        """Counts written bytes."""
        self.bytes += len(chunk)
        self._end = (self._end + chunk[-4:])[-4:]
        self._lines += chunk.count(b"\n") if self.form == "jsonl" else 0

    def describe(self) -> str:
        """Describes the progress in one line."""
        total = formats.quantity(self.total, self.kind[:-1])
        return f"{f'{self._lines:,} of' if self.form == 'jsonl' else 'exporting'} {total}, {size(self.bytes)}"


def size(count: int) -> str:
    """Writes a number of bytes for people: `1,234 bytes`, `5.6 MB`."""
    return f"{count:,} bytes" if count < 10_000 else f"{count / 1e6:,.1f} MB"
