"""Requests for the record as a whole: statements and exports."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from breakwater.jobs.contract.execution import Status
from breakwater.kernel.http.contract import Moment
from breakwater.kernel.types import Identifier, Message

MAX_STATEMENT = 200_000
LONGEST_S = 600.0
"""Limit of ClickHouse's user `reader` for a statement that asks for so much."""


class QueryRequest(Message):
    """A statement that only reads."""

    statement: Annotated[str, StringConstraints(min_length=1, max_length=MAX_STATEMENT)] = Field(
        description="One statement of ClickHouse's SQL, without FORMAT."
    )
    limit: int | None = Field(default=None, ge=1, description="Maximum number of rows; by default all.")
    timeout_s: float = Field(default=60.0, gt=0, le=LONGEST_S, description="Time limit of the statement.")


ExportedRecords = Literal["executions", "attempts"]
ExportFormat = Literal["parquet", "jsonl"]

EXPORTED_ROWS = "Breakwater-Rows"
"""The header with the number of exported rows."""


class ExportQuery(Message):
    """A selection of records to export."""

    format: ExportFormat = Field(description="Parquet, or one line of JSON per record.")
    what: ExportedRecords = Field(default="executions", description="Kind of records.")
    since: Moment | None = Field(
        default=None, description="Earliest end, of attempts earliest begin (inclusive): a time in RFC 3339."
    )
    until: Moment | None = Field(default=None, description="And latest (exclusive); default: now.")
    agent: Identifier | None = Field(default=None, description="Filter by agent.")
    status: Status | None = Field(default=None, description="Filter executions by status.")
