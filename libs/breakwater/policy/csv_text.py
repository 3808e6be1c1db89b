"""Tables as CSV (RFC 4180), for spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""What a spreadsheet takes for the beginning of a formula, and would carry out; also in full width, as in Japanese."""


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[str | int | None]]) -> str:
    """A heading and rows; None is an empty cell.

    Texts that a spreadsheet would take for a formula get an apostrophe in front, as programs choose names of tenants
    and tags. Numbers, and amounts as `usd_from_nano` writes them, stay as they are.
    """
    return csv_lines([columns, *([csv_cell(value) for value in row] for row in rows)])


def csv_lines(rows: Iterable[Sequence[str | int]]) -> str:
    """Rows of cells that are written as they are."""
    written = io.StringIO()
    csv.writer(written).writerows(rows)
    return written.getvalue()


def no_formula(text: str) -> str:
    """A text that a spreadsheet takes for no formula: one that begins like one gets an apostrophe in front."""
    return f"'{text}" if text.startswith(_FORMULA) else text


def csv_cell(value: str | int | None) -> str | int:
    """A cell as `csv_text` writes it."""
    if not isinstance(value, str):
        return "" if value is None else value
    return value if _is_number(value) else no_formula(value)


def _is_number(text: str) -> bool:
    return text.lstrip("-").replace(".", "", 1).isdecimal() and not text.startswith("--")
