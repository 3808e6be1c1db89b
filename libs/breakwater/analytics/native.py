"""Rows as the body of an insert: the one place that uses internals of the driver, clickhouse-connect.

Its own `insert` serializes while it sends: a bad value is then found with half of the request sent, and each insert
takes a thread. `pyproject.toml` bounds the driver's version, and `tests/analytics/test_client.py` fails where a newer
one has moved what is used here.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from clickhouse_connect.datatypes.registry import get_from_name
from clickhouse_connect.driver import options
from clickhouse_connect.driver.binding import quote_identifier
from clickhouse_connect.driver.exceptions import ClickHouseError
from clickhouse_connect.driver.insert import InsertContext
from clickhouse_connect.driver.transform import NativeTransform

from breakwater.analytics.errors import RowsRejected
from breakwater.analytics.table import Table

# What the driver's serializer raises on a value of a wrong type or size; it documents none of it.
_BAD_VALUE = (TypeError, ValueError, ArithmeticError, AttributeError, struct.error, ClickHouseError)


def insert_body(table: Table, rows: Sequence[Sequence[object]]) -> bytes:
    """The whole insert, in ClickHouse's column format, compressed. Raises RowsRejected: a value fits no column."""
    # The driver would load pandas and numpy, where they are installed, only to see that rows are no data frame: most
    # of a second and 80 MB. What is set here already, it takes for looked up.
    for library in ("np", "pd", "pd_time_test"):
        options.__dict__.setdefault(library, None)
    problems: list[Exception] = []
    try:
        context = InsertContext(
            quote_identifier(table.name),
            list(table.columns),
            [get_from_name(kind) for kind in table.columns.values()],
            data=rows,
            compression="lz4",
        )
        body = b"".join(NativeTransform.build_insert(context, problems.append))
    except _BAD_VALUE as error:
        raise RowsRejected(f"{table.name}: {error}") from error
    if problems:
        problem = problems[0]
        raise RowsRejected(f"{table.name}.{context.column_name}: {problem}") from problem
    return body
