"""Statements that write rows as a file. Pure; ClickHouse does the writing.

Every row once (FINAL), in no fixed order: putting millions of them into one would take the server's memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Literal

from breakwater.analytics.rows import JSON_COLUMNS
from breakwater.analytics.schema import ATTEMPTS, EXECUTIONS, Table

_JSONL_SETTINGS: Mapping[str, object] = {
    # As on the wire: a decimal string in USD with nine places, and times as RFC 3339 in UTC.
    "output_format_json_quote_decimals": 1,
    "output_format_decimal_trailing_zeros": 1,
    "date_time_output_format": "iso",
    "output_format_json_quote_64bit_integers": 0,
    "output_format_json_escape_forward_slashes": 0,
    # Numbers that JSON has no word for become null.
    "output_format_json_quote_denormals": 0,
}

_PARQUET_SETTINGS: Mapping[str, object] = {
    "output_format_parquet_compression_method": "zstd",
    "output_format_parquet_string_as_string": 1,
    # As many columns as there are would be held for a million rows each.
    "output_format_parquet_row_group_size": 100_000,
}


What = Literal["executions", "attempts"]
Form = Literal["parquet", "jsonl"]

_TABLES: Mapping[What, Table] = {"executions": EXECUTIONS, "attempts": ATTEMPTS}
"""A table's `time` is when an execution ended, and when an attempt began."""

SETTINGS: Mapping[Form, Mapping[str, object]] = {"parquet": _PARQUET_SETTINGS, "jsonl": _JSONL_SETTINGS}


def where(
    what: What, *, since: datetime | None, until: datetime, agent: str | None, status: str | None
) -> tuple[str, dict[str, object]]:
    """The rows meant, as SQL behind FROM, and its parameters. The begin is included, the end is not."""
    table = _TABLES[what]
    conditions = {
        "until": f"{table.time} < {{until:DateTime64(3, 'UTC')}}",
        "since": f"{table.time} >= {{since:DateTime64(3, 'UTC')}}",
        "agent": "agent = {agent:String}",
        "status": "status = {status:String}",
    }
    given: dict[str, object] = {"until": until, "since": since, "agent": agent, "status": status}
    parameters = {name: value for name, value in given.items() if value is not None}
    return f"{table.name} FINAL WHERE {' AND '.join(conditions[name] for name in parameters)}", parameters


def statement(what: What, form: Form, rows: str) -> str:
    """Writes rows.

    Args:
        what: the records.
        form: as what.
        rows: of `where`.
    """
    columns = _TABLES[what].columns
    if form == "parquet":
        return f"SELECT {', '.join(columns)} FROM {rows} FORMAT Parquet"  # noqa: S608  made of constants
    # Put together here and not by JSONEachRow: what is JSON already would become a string that holds JSON.
    members = ", ',', ".join(f"'\"{name}\":', {_json(name)}" for name in columns)
    return f"SELECT concat('{{', {members}, '}}') FROM {rows} FORMAT TSVRaw"  # noqa: S608


def _json(column: str) -> str:
    written = f"ifNull(toJSONString({column}), 'null')"
    # Text that others have put there, and that is none, must not break the line.
    return f"if(isValidJSON({column}), {column}, {written})" if column in JSON_COLUMNS else written
