"""Printing: one JSON document or JSON lines for programs, tables on a terminal, aligned columns in a pipe."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from rich.console import Console

Cell = str | tuple[str, str]
"""Text, or text and its style."""

GAP = 2
_LEAST_WIDTH = 16
"""A column may be folded to this width; with more columns than fit so, a row is a list."""

STYLES = {
    "ok": "green",
    "closed": "green",
    "success": "green",
    "succeeded": "green",
    "warn": "yellow",
    "half_open": "yellow",
    "retried": "yellow",
    "waiting": "yellow",
    "soft_cap": "yellow",
    "warning": "yellow",
    "short_circuited": "magenta",
    "worker_lost": "magenta",
    "cancelled": "magenta",
    "healthy": "green",
    "degraded": "yellow",
    "unhealthy": "red",
    "error": "red",
    "fail": "red",
    "open": "red",
    "firing": "red",
    "isolated": "red",
    "dead_lettered": "red",
    "hard_cap": "red",
    "critical": "red",
    "pending": "red",
    "acknowledged": "yellow",
    "resolved": "green",
}
"""The colour of a state's name, the same in every command."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. Of those that do not fit, the ones of the highest `drop` go first; 0 stays.

    Where not all fit, what is `below` gets a line of its own under the row instead, and is never left out.
    """

    title: str
    right: bool = False
    drop: int = 0
    below: bool = False


def state(name: str, text: str | None = None) -> Cell:
    """The name of a state in its colour, or another text in that colour."""
    return (text or name, STYLES.get(name, ""))


def json_document(value: Any) -> None:
    """Prints the one JSON document of a command."""
    write(json.dumps(value, default=plain, ensure_ascii=False, indent=2))


def json_line(value: Any) -> None:
    """Prints one line of a stream of JSON documents."""
    write(json.dumps(value, default=plain, ensure_ascii=False, separators=(",", ":")))


def write(text: str) -> None:
    """Prints a line at once: whoever reads a pipe sees it when it happens."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def note(text: str, style: str = "dim") -> None:
    """Prints something that is no part of the answer, dimmed, to stderr."""
    if is_terminal(sys.stderr):
        console(stderr=True).print(text, style=style, highlight=False, markup=False)
    else:
        sys.stderr.write(text + "\n")


def styled(*cells: Cell) -> None:
    """Prints cells in one line, each in its style where there is a terminal."""
    if not is_terminal(sys.stdout):
        write("".join(text_of(cell) for cell in cells))
        return
    from rich.text import Text

    line = Text.assemble(*cells)
    console().print(line, highlight=False, soft_wrap=True)


def table(columns: Sequence[Column], rows: Iterable[Sequence[Cell]], *, empty: str = "nothing") -> None:
    """Prints a table; `empty` is what is said to people instead of one without rows."""
    listed = [list(row) for row in rows]
    if not listed:
        note(empty)
    elif (screen := terminal_width()) is not None:
        from breakwater.cli import drawn_table

        drawn_table.draw(columns, listed, screen)
    else:
        _plain_table(columns, listed)


def records(columns: Sequence[Column], rows: Iterable[Sequence[Cell]], *, empty: str = "nothing") -> None:
    """Prints a table, or each row as a list of its own where the terminal is too narrow for so many columns."""
    listed = [list(row) for row in rows]
    screen = terminal_width()
    narrow = [min(width, _LEAST_WIDTH) for width in widths(columns, listed)] if listed else []
    if screen is None or sum(narrow) + GAP * len(narrow) <= screen:
        table(columns, listed, empty=empty)
        return
    titles = max(len(column.title) for column in columns)
    for number, row in enumerate(listed, 1):
        styled((f"row {number}", "bold dim"))
        for column, cell in zip(columns, row, strict=True):
            styled((f"  {column.title:<{titles}}  ", "dim"), cell)


def terminal_width() -> int | None:
    """How many columns the terminal has; None where stdout is none."""
    return console().width if is_terminal(sys.stdout) else None


def is_terminal(stream: Any) -> bool:
    """Whether a person looks at it."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def console(*, stderr: bool = False) -> Console:
    """The terminal. Without colours where NO_COLOR is set."""
    from rich.console import Console

    return Console(stderr=stderr)


def plain(value: Any) -> Any:
    """What `json` can't write by itself: times as RFC 3339 in UTC, decimals as strings, our own values as objects."""
    if isinstance(value, datetime):
        from breakwater.contracts.types import format_time

        return format_time(value)
    if isinstance(value, date):
        return value.isoformat()
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if (dump := getattr(value, "model_dump", None)) is not None:
        return dump(mode="json")
    if isinstance(value, set | frozenset | tuple):
        return list(cast(Iterable[Any], value))
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return str(value) if not isinstance(value, Decimal) else f"{value:f}"


def text_of(cell: Cell) -> str:
    """A cell without its style."""
    return cell if isinstance(cell, str) else cell[0]


def widths(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> list[int]:
    """What each column takes, its title included."""
    from rich.cells import cell_len

    return [
        max(cell_len(column.title), *(cell_len(text_of(row[index])) for row in rows))
        for index, column in enumerate(columns)
    ]


def _plain_table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> None:
    taken = widths(columns, rows)
    for cells in ([column.title for column in columns], *rows):
        line = (
            text_of(cell).rjust(width) if column.right else text_of(cell).ljust(width)
            for cell, column, width in zip(cells, columns, taken, strict=True)
        )
        write((" " * GAP).join(line).rstrip())
