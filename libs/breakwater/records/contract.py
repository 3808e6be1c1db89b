"""Requests for the record as a whole: statements."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from breakwater.kernel.types import Message

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
