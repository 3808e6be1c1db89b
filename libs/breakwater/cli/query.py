"""`breakwater query`: SQL on what the plane has recorded."""

from __future__ import annotations

import csv
import re
import sys
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from breakwater.cli import connect, output
from breakwater.cli.connect import run
from breakwater.cli.errors import wrong_usage
from breakwater.cli.plane import DataOption, JsonOption, Plane

if TYPE_CHECKING:
    from breakwater.analytics.client import Table

_FOR_ITS_EFFECT = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/)*"
    r"(?:ALTER|ATTACH|CREATE|DELETE|DETACH|DROP|EXCHANGE|GRANT|INSERT|KILL|OPTIMIZE|RENAME|REVOKE|SET|SYSTEM|TRUNCATE"
    r"|UNDROP|UPDATE|USE)\b",
    re.IGNORECASE | re.DOTALL,
)
"""Statements that give no rows."""


class Format(StrEnum):
    """How rows are printed."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


def query(
    sql: Annotated[str | None, typer.Argument(help="A statement for ClickHouse; `-` reads it from stdin.")] = None,
    file: Annotated[Path | None, typer.Option("--file", metavar="FILE.sql", help="The statement is here.")] = None,
    form: Annotated[
        Format, typer.Option("--format", help="A table, one JSON array of objects, or CSV.")
    ] = Format.TABLE,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run SQL on the recorded executions, attempts, transitions, budget events and alerts.

    The tables: executions, attempts, breaker_transitions, budget_events, alerts. Use FINAL to count a row once that
    was stored twice and not yet merged. Money is Decimal in USD; times are UTC.

    For example:

        breakwater query "SELECT model, outcome, count() FROM attempts FINAL GROUP BY ALL ORDER BY 3 DESC"

        breakwater query "SELECT agent, sum(total_cost) FROM executions FINAL GROUP BY agent" --format csv

        breakwater query "DESCRIBE TABLE executions"
    """
    statement = _statement(sql, file)
    answer = run(_run(Plane(data).clickhouse_url, statement))
    if answer is None:
        output.json_document([]) if as_json or form is Format.JSON else output.note("done")
    elif as_json or form is Format.JSON:
        output.json_document([dict(zip(answer.columns, row, strict=True)) for row in answer.rows])
    elif form is Format.CSV:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(answer.columns)
        writer.writerows([text(value) for value in row] for row in answer.rows)
    else:
        numbers = [_is_number(answer, index) for index in range(len(answer.columns))]
        output.records(
            [output.Column(name, right=right) for name, right in zip(answer.columns, numbers, strict=True)],
            [[text(value) for value in row] for row in answer.rows],
            empty="no rows",
        )


def text(value: Any) -> str:
    """A value as it stands in a table or a CSV file; empty for NULL."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value
    if isinstance(value, list | dict | tuple):
        import json

        return json.dumps(value, default=output.plain, ensure_ascii=False)
    plain = output.plain(value) if isinstance(value, datetime | Decimal) else value
    return str(plain)


async def _run(url: str, statement: str) -> Table | None:
    async with connect.analytics(url) as analytics:
        if not _FOR_ITS_EFFECT.match(statement):
            return await analytics.query(statement)
        await analytics.execute(statement)
        return None


def _statement(sql: str | None, file: Path | None) -> str:
    if (sql is None) == (file is None):
        raise wrong_usage(
            "give the statement as an argument or with --file",
            'Try `breakwater query "SELECT count() FROM executions"`.',
        )
    if file is not None:
        try:
            statement = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise wrong_usage(f"{file}: can't be read: {getattr(error, 'strerror', None) or error}") from error
    else:
        statement = sys.stdin.read() if sql == "-" else sql or ""
    # ClickHouse's HTTP interface takes one statement, and no end mark.
    statement = statement.strip().rstrip(";").rstrip()
    if not statement:
        raise wrong_usage("the statement is empty")
    return statement


def _is_number(answer: Table, column: int) -> bool:
    values = [row[column] for row in answer.rows if row[column] is not None]
    return bool(values) and all(isinstance(value, int | float | Decimal) for value in values)
