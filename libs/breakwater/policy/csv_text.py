"""Tables as CSV (RFC 4180), for spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What a spreadsheet takes for the beginning of a formula, and would carry out."""


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[str | int | None]]) -> str:
    """A heading and rows; None is an empty cell.

    Texts that a spreadsheet would take for a formula get an apostrophe in front, as programs choose names of tenants
    and tags. Numbers, and amounts as `usd_from_nano` writes them, stay as they are.
    """
    written = io.StringIO()
    writer = csv.writer(written)
    writer.writerow(columns)
    writer.writerows([_cell(value) for value in row] for row in rows)
    return written.getvalue()


def _cell(value: str | int | None) -> str | int:
    if not isinstance(value, str):
        return "" if value is None else value
    return f"'{value}" if value.startswith(_FORMULA) and not _is_number(value) else value


def _is_number(text: str) -> bool:
    return text.lstrip("-").replace(".", "", 1).isdecimal() and not text.startswith("--")
