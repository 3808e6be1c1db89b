"""The tables of ClickHouse, copied and restored over HTTP in ClickHouse's own format, in parts of bounded size."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from datetime import datetime

from breakwater.kernel.clickhouse.client import Analytics, quote_name
from breakwater.kernel.clickhouse.table import Table
from breakwater.records.log_comparison import LOG_COMPARISONS
from breakwater.records.schema import CLOSED_SPEND, TABLES

PART_BYTES = 256 * 1024**2
"""The size of a part, uncompressed, if its rows are as large as the table's are on average."""

COPIED = (LOG_COMPARISONS, CLOSED_SPEND, *TABLES)
"""The comparison with EVENTS first: what it takes for stored must be in what is copied after it."""

_PARTS = """
SELECT min(minute), max(minute) + INTERVAL 1 MINUTE, sum(rows)
FROM (
    SELECT minute, rows, intDiv(sum(rows) OVER (ORDER BY minute) - rows, {{limit:UInt64}}) AS part
    FROM (SELECT toStartOfMinute({time}) AS minute, count() AS rows FROM {table} GROUP BY minute)
)
GROUP BY part ORDER BY part"""
_SIZES = """
SELECT sum(rows), sum(data_uncompressed_bytes) FROM system.parts
WHERE database = {database:String} AND table = {table:String} AND active"""
_COLUMNS = """
SELECT name FROM system.columns
WHERE database = {database:String} AND table = {table:String} AND default_kind NOT IN ('ALIAS', 'MATERIALIZED')
ORDER BY position"""
_READ_SETTINGS = {"do_not_merge_across_partitions_select_final": 1, "max_execution_time": 0, "max_threads": 2}


@dataclass(frozen=True, slots=True)
class TablePart:
    """A span of time of a table's rows, and about how many there are."""

    begin: datetime
    end: datetime
    rows: int


async def stored_columns(analytics: Analytics, table: Table) -> tuple[str, ...]:
    """The columns of a table that are stored; none if there is no such table. Raises as `Analytics.query` does."""
    rows = (await analytics.query(_COLUMNS, {"database": analytics.database, "table": table.name})).rows
    return tuple(str(row[0]) for row in rows)


async def count_rows(analytics: Analytics, table: Table) -> int:
    """The rows of a table, without those that were replaced; 0 if there is none. Raises as `Analytics.query` does."""
    if not await stored_columns(analytics, table):
        return 0
    return int((await analytics.query(f"SELECT count() FROM {quote_name(table.name)} FINAL")).rows[0][0])  # noqa: S608


async def plan_parts(analytics: Analytics, table: Table, part_bytes: int = PART_BYTES) -> tuple[TablePart, ...]:
    """Divides a table into spans of whole minutes. Raises as `Analytics.query` does."""
    ((rows, size),) = (await analytics.query(_SIZES, {"database": analytics.database, "table": table.name})).rows
    if not rows:
        return ()
    limit = max(part_bytes * int(rows) // max(int(size), 1), 1)
    sql = _PARTS.format(time=table.time, table=quote_name(table.name))
    return tuple(TablePart(*row) for row in (await analytics.query(sql, {"limit": limit})).rows)


def copy_part(analytics: Analytics, table: Table, columns: Sequence[str], part: TablePart) -> AsyncGenerator[bytes]:
    """Yields a part's rows in ClickHouse's own format. Raises as `Analytics.query` does."""
    names = ", ".join(map(quote_name, columns))
    where = f"{table.time} >= {{begin:DateTime64(3, 'UTC')}} AND {table.time} < {{end:DateTime64(3, 'UTC')}}"
    sql = f"SELECT {names} FROM {quote_name(table.name)} FINAL WHERE {where} FORMAT Native"  # noqa: S608  of our schema
    return analytics.raw_stream(sql, {"begin": part.begin, "end": part.end}, _READ_SETTINGS)
