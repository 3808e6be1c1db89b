"""Errors of ClickHouse.

AnalyticsError
├── AnalyticsUnavailable   no answer, or an answer that is not about these rows: try again later
├── RowsRejected           one of these rows can never be stored; the others can
├── QueryFailed            ClickHouse refused a statement, with its code and its own words
├── WrongLayout            tables that are there are laid out otherwise than they should be, and can't be changed
└── Unstorable             a message that no row can be made of: found before anything is sent
"""

from __future__ import annotations

from breakwater.errors import Unavailable


class AnalyticsError(Exception):
    """Root of what this room raises."""


class AnalyticsUnavailable(AnalyticsError, Unavailable):  # noqa: N818  a state of the world, named as people say it
    """ClickHouse does not answer, or can't take anything now. The rows may or may not have been stored."""

    server = "clickhouse"


class RowsRejected(AnalyticsError):  # noqa: N818
    """A value of at least one row does not fit its column. None of the rows is stored for sure."""


class QueryFailed(AnalyticsError):  # noqa: N818
    """ClickHouse refused a statement.

    Attributes:
        code: ClickHouse's error code, such as 60 for UNKNOWN_TABLE.
        message: its text, without the server's address and version.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class WrongLayout(AnalyticsError):  # noqa: N818
    """Tables are there, and on one server, where they should be replicated. Their engine can't be changed."""


class Unstorable(AnalyticsError):  # noqa: N818
    """A message holds what no column can: an amount or a time out of range."""
