"""`breakwater query`: runs SQL on the plane's records."""

from __future__ import annotations

import csv
import json
import re
import sys
import textwrap
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer

from breakwater.client import ApiClient, ApiRefusedError, UnexpectedResponseError
from breakwater.client.commands import SEE_DOCTOR, Api, api_command, api_errors
from breakwater.kernel.clickhouse.client import ResultSet
from breakwater.kernel.clickhouse.errors import AnalyticsUnavailableError
from breakwater.kernel.commands import connect, output
from breakwater.kernel.commands.errors import CliError, usage_error
from breakwater.kernel.commands.text_input import check_sendable, read_file, read_stdin
from breakwater.kernel.formats import csv_cell, no_formula
from breakwater.local.plane import CLICKHOUSE_VARIABLE
from breakwater.records.contract import LONGEST_S

DEFAULT_TABLE_ROWS = 1_000
"""Maximum number of rows in a table without --limit."""

TIMEOUT_S = 60.0
ANSWER_MARGIN_S = 10.0
"""Seconds to wait for a response after the statement's time limit, so that the server can report the timeout itself."""

_WITHOUT_ROWS = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/)*"
    r"(?:ALTER|ATTACH|CREATE|DELETE|DETACH|DROP|EXCHANGE|GRANT|INSERT|KILL|OPTIMIZE|RENAME|REVOKE|SET|SYSTEM|TRUNCATE"
    r"|UNDROP|UPDATE|USE)\b",
    re.IGNORECASE | re.DOTALL,
)
"""Matches statements that change something and return no rows."""


RowFormat = Literal["table", "json", "csv"]


@api_command
def query(
    api: Api,
    sql: Annotated[str | None, typer.Argument(help="ClickHouse statement; `-` reads it from stdin.")] = None,
    file: Annotated[Path | None, typer.Option("--file", metavar="FILE.sql", help="File with the statement.")] = None,
    form: Annotated[RowFormat, typer.Option("--format", help="A table, one JSON array of objects, or CSV.")] = "table",
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, help="Maximum number of rows.", show_default="1000 for a table, else all"),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0.1, help="Time limit of the statement in seconds.")
    ] = TIMEOUT_S,
    write: Annotated[bool, typer.Option("--write", help="Allow the statement to change data or tables.")] = False,
) -> None:
    """Run SQL on the recorded executions, attempts, transitions, events of budgets and guards, and alerts; only reads.

    The tables: executions, attempts, breaker_transitions, budget_events, guard_events, alerts. Use FINAL so that rows
    that were stored twice and are not yet merged count once. The views need none: executions_per_minute,
    attempts_per_minute, errors_per_minute, waste_per_minute, figures_per_minute, provider_health, spend_per_hour,
    retries_per_day, estimate_accuracy, breaker_openings, incidents, cost_and_usage (in the columns of FOCUS).
    docs/analytics.md has a query for each question. Money is Decimal in USD; times are UTC. What would change something
    is refused without --write.

    Asks ClickHouse; or the HTTP API with --url or --api-key, or if only BREAKWATER_URL is set. The API only reads.

    For example:

        breakwater query "SELECT model, outcome, count() FROM attempts FINAL GROUP BY ALL ORDER BY 3 DESC"

        breakwater query "SELECT agent, sum(total_cost) FROM executions FINAL GROUP BY agent" --format csv

        breakwater query "SELECT event, status, count(), avg(duration_ms) FROM incidents GROUP BY ALL"

        breakwater query "DESCRIBE TABLE executions"
    """
    statement = _statement(sql, file)
    has_no_rows = _WITHOUT_ROWS.match(statement) is not None
    if has_no_rows and not write:
        raise usage_error("this statement changes data, and `query` only reads", "Add --write to allow it.")
    form = "json" if api.as_json else form
    if limit is None and form == "table":
        limit = DEFAULT_TABLE_ROWS
    if write:
        api.plane.require_server(CLICKHOUSE_VARIABLE, "change data", api.url, api.api_key)
    if has_no_rows:
        limit_s = timeout + ANSWER_MARGIN_S
        url = api.plane.admin_clickhouse_url
        connect.ask_clickhouse(url, lambda analytics: analytics.execute(statement), answer_timeout_s=limit_s)
        output.json_document([]) if form == "json" else output.note("done")
        return
    if api.uses_http(CLICKHOUSE_VARIABLE):
        if timeout > LONGEST_S:
            raise usage_error(f"--timeout {timeout:g}: over the HTTP API at most {LONGEST_S:g}")
        with api_errors(unanswered=SEE_DOCTOR):
            is_cut = connect.run(_print_from_api(api, statement, form, limit, timeout))
    else:
        url = api.plane.admin_clickhouse_url if write else api.plane.clickhouse_url
        is_cut = connect.run(_print(url, statement, form, limit, timeout, write=write))
    if is_cut:
        options = "--limit N" if form != "table" else "--limit N or --format csv"
        output.note(f"only the first {limit:,} rows are shown; {options} for more")


def text(value: Any) -> str:
    """Writes a value for a cell of a table or a CSV file; empty for NULL."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value
    if isinstance(value, list | dict | tuple):
        return json.dumps(value, default=output.plain, ensure_ascii=False)
    return str(output.plain(value) if isinstance(value, datetime | Decimal) else value)


async def _print(
    url: str, statement: str, form: RowFormat, limit: int | None, timeout_s: float, *, write: bool
) -> bool:
    """Prints the rows of a statement as they come. Returns True if there are more than the limit."""
    async with connect.analytics(url, answer_timeout_s=timeout_s + ANSWER_MARGIN_S) as analytics:
        time_limit: dict[str, object] = {"max_execution_time": timeout_s}
        settings = time_limit if write else await connect.read_only_settings(analytics, time_limit)
        blocks = _LimitedBlocks(analytics.stream(statement, settings), limit)
        try:
            await _PRINT[form](blocks)
        except AnalyticsUnavailableError as error:
            if "TIMEOUT_EXCEEDED" not in str(error):
                raise
            raise _query_error(
                "query_timeout", f"the statement took longer than {timeout_s:g} s and was stopped"
            ) from error
    return blocks.cut


async def _print_from_api(api: Api, statement: str, form: RowFormat, limit: int | None, timeout_s: float) -> bool:
    """Does what `_print` does, over the HTTP API."""
    async with api.client() as client:
        blocks = _LimitedBlocks(_blocks_from_api(client, statement, limit, timeout_s), limit)
        try:
            await _PRINT[form](blocks)
        except ApiRefusedError as error:
            if not error.code.startswith("query_"):
                raise
            raise _query_error(error.code, error.message) from error
    return blocks.cut


async def _blocks_from_api(
    client: ApiClient, statement: str, limit: int | None, timeout_s: float
) -> AsyncGenerator[ResultSet]:
    """Yields rows as `Analytics.stream` does; one row more than the limit if there are more."""
    body = {"statement": statement, "timeout_s": timeout_s, **({} if limit is None else {"limit": limit + 1})}
    begins_within_s = timeout_s + ANSWER_MARGIN_S
    async with client.open_stream("query", body, begins_within_s=begins_within_s) as content:
        columns: tuple[str, ...] | None = None
        conversions: list[_Conversion] | None = None
        incomplete_line = b""
        while data := await content.readany():
            *lines, incomplete_line = (incomplete_line + data).split(b"\n")
            rows: list[tuple[Any, ...]] = []
            for line in lines:
                document = json.loads(line)
                if isinstance(document, dict):
                    if rows:
                        yield ResultSet(columns or (), tuple(rows))
                    _check_end(cast("dict[str, Any]", document))
                    return
                if columns is None:
                    columns = tuple(document)
                elif conversions is None:
                    conversions = [_conversion(kind) for kind in document]
                else:
                    rows.append(tuple(convert(value) for convert, value in zip(conversions, document, strict=True)))
            if rows:
                yield ResultSet(columns or (), tuple(rows))
        raise UnexpectedResponseError(200, f"{client.url} broke off in the middle of its response")


def _check_end(end: dict[str, Any]) -> None:
    """Raises the error that stopped a statement, if one did."""
    if (error := end.get("error")) is not None:
        raise ApiRefusedError(422, error["code"], error["message"])


_Conversion = Callable[[Any], Any]


def _conversion(kind: str) -> _Conversion:
    """Returns what makes a value of a column from JSON; values inside of lists and maps stay as they are."""
    while wrapped := re.fullmatch(r"(?:Nullable|LowCardinality)\((.*)\)", kind):
        kind = wrapped[1]
    convert: _Conversion | None = None
    if kind.startswith("Decimal"):
        convert = Decimal
    elif kind.startswith("DateTime"):
        convert = datetime.fromisoformat
    elif kind.startswith(("Float", "BFloat")):
        convert = float
    return lambda value: value if value is None or convert is None else convert(value)


def _query_error(code: str, message: str) -> CliError:
    return CliError(code, message, "Raise the limit with --timeout SECONDS." if code == "query_timeout" else "")


class _LimitedBlocks:
    """Blocks of rows up to a limit, after which the statement is abandoned.

    The server's `max_result_rows` would also apply to subqueries and change their results.
    """

    def __init__(self, blocks: AsyncGenerator[ResultSet], limit: int | None) -> None:
        self._blocks = blocks
        self._limit = limit
        self.cut = False

    async def __aiter__(self) -> AsyncGenerator[ResultSet]:
        remaining = self._limit
        async with aclosing(self._blocks) as blocks:
            async for block in blocks:
                if remaining is None or len(block.rows) <= remaining:
                    yield block
                    remaining = None if remaining is None else remaining - len(block.rows)
                    continue
                self.cut = True
                yield ResultSet(block.columns, block.rows[:remaining])
                return


async def _print_table(blocks: _LimitedBlocks) -> None:
    columns: tuple[str, ...] = ()
    rows: list[tuple[Any, ...]] = []
    async for block in blocks:
        columns = block.columns
        rows += block.rows
    output.records(
        [
            output.Column(name, lambda row, index=index: text(row[index]), align_right=_is_number(rows, index))
            for index, name in enumerate(columns)
        ],
        rows,
        empty="no rows",
    )


async def _print_csv(blocks: _LimitedBlocks) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    escape = output.visible if sys.stdout.isatty() else str
    has_header = False
    async for block in blocks:
        if block.columns and not has_header:
            writer.writerow(no_formula(escape(name)) for name in block.columns)
            has_header = True
        writer.writerows([csv_cell(escape(text(value))) for value in row] for row in block.rows)
    sys.stdout.flush()


async def _print_json(blocks: _LimitedBlocks) -> None:
    separator = "[\n"
    async for block in blocks:
        for row in block.rows:
            row_by_column = dict(zip(block.columns, row, strict=True))
            document = json.dumps(row_by_column, default=output.plain, ensure_ascii=False, indent=2)
            output.write(separator + textwrap.indent(document, "  "), end="")
            separator = ",\n"
    output.write("[]" if separator == "[\n" else "\n]")


_PRINT = {"table": _print_table, "csv": _print_csv, "json": _print_json}


def _statement(sql: str | None, file: Path | None) -> str:
    if (sql is None) == (file is None):
        raise usage_error(
            "give the statement as an argument or with --file",
            'Try `breakwater query "SELECT count() FROM executions"`.',
        )
    sql_text = read_file(file) if file is not None else read_stdin() if sql == "-" else sql or ""
    # ClickHouse's HTTP interface takes one statement, without a semicolon.
    statement = sql_text.strip().rstrip(";").rstrip()
    if not statement:
        raise usage_error("the statement is empty")
    check_sendable("the statement", statement)
    return statement


def _is_number(rows: Sequence[Sequence[Any]], column: int) -> bool:
    values = [row[column] for row in rows if row[column] is not None]
    return bool(values) and all(isinstance(value, int | float | Decimal) for value in values)
