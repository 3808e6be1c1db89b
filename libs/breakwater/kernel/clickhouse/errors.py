"""Errors of ClickHouse.

AnalyticsError
├── AnalyticsUnavailableError   no answer, or an answer that is not about these rows: try again later
├── RowsRejectedError           one of these rows can never be stored; the others can
├── QueryError            ClickHouse refused a statement, with its code and its own words
├── SchemaMismatchError         existing tables have another layout, and can't be changed
└── UnstorableError             a message that no row can be made of: found before anything is sent
"""

from __future__ import annotations

from breakwater.kernel.errors import BreakwaterError, UnavailableError


class AnalyticsError(BreakwaterError):
    """Root of what this room raises."""


class AnalyticsUnavailableError(AnalyticsError, UnavailableError):
    """ClickHouse does not answer, or can't take anything now. The rows may or may not have been stored."""

    server = "clickhouse"


class RowsRejectedError(AnalyticsError):
    """A value of at least one row does not fit its column. None of the rows is stored for sure."""


class QueryError(AnalyticsError):
    """ClickHouse refused a statement.

    Attributes:
        code: ClickHouse's error code, such as 60 for UNKNOWN_TABLE.
        message: its text, without the server's address and version.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class SchemaMismatchError(AnalyticsError):
    """Tables are there, and on one server, where they should be replicated. Their engine can't be changed."""


class UnstorableError(AnalyticsError):
    """A message holds what no column can: an amount or a time out of range."""
