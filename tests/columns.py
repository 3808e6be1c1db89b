"""What the columns of a view show of a row, as a terminal and a page get it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from breakwater.kernel.columns import Column


def texts(columns: Iterable[Column[Any]], row: Any) -> dict[str, str]:
    """The text of each cell that is not empty, by the column's title."""
    cells = {column.title: column.cell(row) for column in columns}
    found = {title: cell if isinstance(cell, str) else cell[0] for title, cell in cells.items()}
    return {title: text for title, text in found.items() if text}


def tones(columns: Iterable[Column[Any]], row: Any) -> dict[str, str]:
    """The tone of each cell that has one, by the column's title."""
    cells = {column.title: column.cell(row) for column in columns}
    return {title: cell[1] for title, cell in cells.items() if not isinstance(cell, str) and cell[1]}
