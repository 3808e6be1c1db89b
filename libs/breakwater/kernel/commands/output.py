"""Printing: one JSON document or JSON lines for programs, tables on a terminal, aligned columns in a pipe.

Rich draws the tables. On a narrow terminal a column without room goes below its row or is left out, with a note. Rich
alone, at 80 columns, draws an open breaker of `breakwater breakers` in 8 lines, its ids folded after 10 characters;
with its reason below it takes 2.
"""

from __future__ import annotations

import codecs
import io
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, is_dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

from breakwater.kernel.columns import Cell, Column, clock, tone_of
from breakwater.kernel.formats import visible

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

__all__ = ["Cell", "Column", "clock"]

Row = TypeVar("Row")

GAP = 2
INDENT = 4
_NEVER_FOLDED = 100_000
_LEAST_WIDTH = 16
"""A column may be folded to this width; with more columns than fit so, a row is a list."""

_STYLES = {"good": "green", "warn": "yellow", "bad": "red", "faint": "dim"}
"""The style of each tone; any other is a style of rich."""


def state(name: str, text: str | None = None) -> Cell:
    """The name of a state in its tone, or another text in that tone."""
    return (text or name, tone_of(name))


def json_document(value: Any) -> None:
    """Prints the one JSON document of a command."""
    write(json.dumps(value, default=plain, ensure_ascii=False, indent=2))


def json_line(value: Any) -> None:
    """Prints one line of a stream of JSON documents."""
    write(json.dumps(value, default=plain, ensure_ascii=False, separators=(",", ":")))


def write(text: str, *, end: str = "\n", stderr: bool = False) -> None:
    """Prints a line and flushes it, for the reader of a pipe. On a terminal it is made `visible`.

    JSON stays JSON, as its own escapes are the same.
    """
    stream = sys.stderr if stderr else sys.stdout
    stream.write((visible(text) if stream.isatty() else text) + end)
    stream.flush()


class _Screen(io.RawIOBase):
    """Bytes of text on their way to a terminal, made `visible`."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, data: Any, /) -> int:
        sys.stdout.write(visible(self._decoder.decode(bytes(data))))
        return len(data)

    def flush(self) -> None:
        sys.stdout.flush()


def binary() -> BinaryIO:
    """Stdout for a command that passes on bytes as they come."""
    return cast(BinaryIO, _Screen()) if sys.stdout.isatty() else sys.stdout.buffer


def note(text: str, style: str = "dim") -> None:
    """Prints something that is not part of the output, dimmed, to stderr."""
    if is_terminal(sys.stderr):
        console(stderr=True).print(visible(text), style=style, highlight=False, markup=False)
    else:
        write(text, stderr=True)


def styled(*cells: Cell) -> None:
    """Prints cells in one line, each in its style where there is a terminal."""
    if not is_terminal(sys.stdout):
        write("".join(text_of(cell) for cell in cells))
        return
    from rich.text import Text

    console().print(Text.assemble(*map(text, cells)), highlight=False, soft_wrap=True)


def facts(title: Sequence[Cell], columns: Iterable[Column[Row]], row: Row) -> None:
    """Prints a title if there is one, and below it a line for each fact about the row that is not empty."""
    if title:
        styled(*title)
    cells = [(column.title, cell) for column in columns if text_of(cell := _cell(column, row))]
    width = max([13, *(len(name) for name, _ in cells)]) + 1
    for name, cell in cells:
        styled((f"  {name:<{width}}", "dim"), cell)


def table(columns: Sequence[Column[Row]], rows: Iterable[Row], *, empty: str = "nothing", gap: int = GAP) -> None:
    """Prints a table, its columns `gap` apart; `empty` is a note for people in place of one without rows."""
    columns = sorted((column for column in columns if column.terminal), key=lambda column: column.below)
    cells = _cells(columns, rows)
    if not cells:
        note(empty)
        return
    needed, screen = _widths(columns, cells), terminal_width()
    if screen is None:
        _print_aligned(columns, cells, needed, gap)
        return
    shown, below = _places(columns, needed, screen, gap)
    widths = [needed[index] for index in shown]
    while _total(widths, gap) > screen and max(widths) > 1:  # the widest give way, and are folded
        widths[widths.index(max(widths))] -= 1
    in_row = [columns[index] for index in shown]
    # Rich knows no cell over several columns: with lines below, each row is a table of its own, all of the same widths.
    for number, group in enumerate([[row] for row in cells] if below else [cells]):
        drawn = _table(in_row, widths, gap, header=number == 0)
        for row in group:
            drawn.add_row(*(text(row[index]) for index in shown))
        draw(drawn)
        _draw_below([(columns[index].title, group[0][index]) for index in below])
    if left_out := [one.title for index, one in enumerate(columns) if index not in (*shown, *below)]:
        note(f"({', '.join(left_out)}: omitted, the terminal is too narrow; --json shows all columns)")


def records(columns: Sequence[Column[Row]], rows: Iterable[Row], *, empty: str = "nothing") -> None:
    """Prints a table, or each row as a list of its own where the terminal is too narrow for so many columns."""
    listed = list(rows)
    cells = _cells(columns, listed)
    screen = terminal_width()
    narrow = [min(width, _LEAST_WIDTH) for width in _widths(columns, cells)]
    if screen is None or _total(narrow, GAP) <= screen:
        table(columns, listed, empty=empty)
        return
    titles = max(len(column.title) for column in columns)
    for number, row in enumerate(cells, 1):
        styled((f"row {number}", "bold dim"))
        for column, cell in zip(columns, row, strict=True):
            styled((f"  {column.title:<{titles}}  ", "dim"), cell)


def draw(renderable: RenderableType) -> None:
    """Prints what rich draws; in a pipe whole, however wide it is, and without its styles."""
    if terminal_width() is not None:
        console().print(renderable, highlight=False)
        return
    from rich.console import Console

    page = Console(file=io.StringIO(), width=_NEVER_FOLDED, color_system=None)
    with page.capture() as captured:
        page.print(renderable, highlight=False)
    for line in captured.get().splitlines():
        write(line.rstrip())


def terminal_width() -> int | None:
    """Number of columns of the terminal; None if stdout is none."""
    return console().width if is_terminal(sys.stdout) else None


def is_terminal(stream: Any) -> bool:
    """True if a person is looking at the stream."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def console(*, stderr: bool = False) -> Console:
    """The terminal. Without colours where NO_COLOR is set."""
    from rich.console import Console

    return Console(stderr=stderr)


def plain(value: Any) -> Any:
    """Values for `json`: times as RFC 3339 in UTC, decimals as strings, dataclasses and messages as objects."""
    if isinstance(value, datetime):
        from breakwater.kernel.types import format_time

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


def _cells(columns: Sequence[Column[Row]], rows: Iterable[Row]) -> list[list[Cell]]:
    return [[_cell(column, row) for column in columns] for row in rows]


def _cell(column: Column[Row], row: Row) -> Cell:
    """Content of a cell, made `visible`."""
    cell = column.cell(row)
    return visible(cell) if isinstance(cell, str) else (visible(cell[0]), cell[1])


def _widths(columns: Sequence[Column[Any]], rows: Sequence[Sequence[Cell]]) -> list[int]:
    """Width that each column needs, for its title too."""
    from rich.cells import cell_len

    return [
        max(cell_len(column.title), *(cell_len(text_of(row[index])) for row in rows), 0)
        for index, column in enumerate(columns)
    ]


def _total(widths: Sequence[int], gap: int) -> int:
    return sum(widths) + gap * (len(widths) - 1)


def _print_aligned(
    columns: Sequence[Column[Any]], rows: Sequence[Sequence[Cell]], widths: Sequence[int], gap: int
) -> None:
    """Prints a table without rich, which takes thirty times as long: a pipe may get very many rows."""
    for row in ([column.title for column in columns], *rows):
        padded = (
            text_of(cell).rjust(width) if column.is_right_aligned else text_of(cell).ljust(width)
            for cell, column, width in zip(row, columns, widths, strict=True)
        )
        write((" " * gap).join(padded).rstrip())


def _places(
    columns: Sequence[Column[Any]], needed: Sequence[int], available: int, gap: int
) -> tuple[list[int], list[int]]:
    """Indexes of the columns in the row, and of those below it; the others have no room."""
    shown = list(range(len(columns)))
    if _total(needed, gap) <= available:
        return shown, []
    below = [index for index in shown if columns[index].below]
    shown = [index for index in shown if index not in below]
    while _total([needed[index] for index in shown], gap) > available:
        least = max(shown, key=lambda index: columns[index].drop)
        if columns[least].drop == 0:
            break
        shown.remove(least)
    return shown, below


def _table(columns: Sequence[Column[Any]], widths: Sequence[int], gap: int, *, header: bool) -> Table:
    from rich.table import Table

    drawn = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold dim", show_header=header)
    for column, width in zip(columns, widths, strict=True):
        drawn.add_column(
            column.title, justify="right" if column.is_right_aligned else "left", overflow="fold", width=width
        )
    return drawn


def _draw_below(named: Sequence[tuple[str, Cell]]) -> None:
    from rich.padding import Padding
    from rich.table import Table

    if not any(text_of(cell) for _, cell in named):
        return
    lines = Table.grid(padding=(0, GAP, 0, 0))
    lines.add_column(width=max(len(title) for title, _ in named), style="dim")
    lines.add_column(overflow="fold")
    for title, cell in named:
        if text_of(cell):
            lines.add_row(title, text(cell))
    draw(Padding(lines, (0, 0, 0, INDENT)))


def text(cell: Cell) -> Text:
    """A cell as rich draws it."""
    from rich.text import Text

    return Text(visible(cell)) if isinstance(cell, str) else Text(visible(cell[0]), _STYLES.get(cell[1], cell[1]))
