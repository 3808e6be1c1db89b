"""Printing of results: JSON for programs, tables on a terminal, aligned columns in a pipe.

Rich draws the tables. On a narrow terminal, a column without room goes below its row or is omitted, with a note. Rich
alone would fold all columns: at 80 columns, an open breaker of `breakwater breakers` would take 8 lines instead of 2.
"""

from __future__ import annotations

import codecs
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, is_dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

from breakwater.kernel.columns import Cell, Column, clock, short_id, tone_of
from breakwater.kernel.formats import visible

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

__all__ = ["Cell", "Column", "clock"]

Row = TypeVar("Row")

GAP = 2
INDENT = 4
_UNFOLDED_WIDTH = 100_000
_LEAST_WIDTH = 16
"""The least width to which a column is folded. If the columns don't fit even so, each row becomes a list."""

_STYLES = {"good": "green", "warn": "yellow", "bad": "red", "faint": "dim"}
"""The style of each tone; any other tone is a style of rich."""


def state(name: str, text: str | None = None) -> Cell:
    """A cell with the name of a state, or another text, in the state's tone."""
    return (text or name, tone_of(name))


def json_document(value: Any) -> None:
    """Prints a command's result as one JSON document."""
    write(json.dumps(value, default=plain, ensure_ascii=False, indent=2))


def json_line(value: Any) -> None:
    """Prints a JSON document as one line of a stream."""
    write(json.dumps(value, default=plain, ensure_ascii=False, separators=(",", ":")))


def write(text: str, *, end: str = "\n", stderr: bool = False) -> None:
    """Prints a line, and flushes it for readers of a pipe. On a terminal it escapes control characters (`visible`).

    JSON stays valid, because the escapes are those of JSON.
    """
    stream = sys.stderr if stderr else sys.stdout
    stream.write((visible(text) if stream.isatty() else text) + end)
    stream.flush()


class _VisibleStdout(io.RawIOBase):
    """A binary stdout for terminals, which makes text `visible`."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, data: Any, /) -> int:
        sys.stdout.write(visible(self._decoder.decode(bytes(data))))
        return len(data)

    def flush(self) -> None:
        sys.stdout.flush()


def binary() -> BinaryIO:
    """Returns stdout as a stream of bytes; on a terminal it makes them `visible`."""
    return cast(BinaryIO, _VisibleStdout()) if sys.stdout.isatty() else sys.stdout.buffer


class _FrameText(io.StringIO):
    """The text of one frame, written as for the terminal."""

    def isatty(self) -> bool:
        return True


@contextmanager
def frames() -> Generator[Callable[[Callable[[], None]], None]]:
    """Shows what a function prints in place of what it printed before, while the block runs.

    On a terminal it has a screen of its own, which is gone at the end, and a frame is cut at the terminal's height.
    In a pipe, the frames follow one another.
    """
    if not is_terminal(sys.stdout):
        yield lambda show: show()
        return
    terminal = sys.stdout

    def show_frame(show: Callable[[], None]) -> None:
        frame = _FrameText()
        with redirect_stdout(frame), redirect_stderr(frame):
            show()
        lines = frame.getvalue().splitlines()[: shutil.get_terminal_size().lines - 1]
        terminal.write("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J")
        terminal.flush()

    terminal.write("\x1b[?1049h\x1b[?25l")
    try:
        yield show_frame
    finally:
        terminal.write("\x1b[?25h\x1b[?1049l")
        terminal.flush()


def note(text: str, style: str = "dim") -> None:
    """Prints a remark that is not part of the output, dimmed, on stderr."""
    if is_terminal(sys.stderr):
        console(stderr=True).print(visible(text), style=style, highlight=False, markup=False)
    else:
        write(text, stderr=True)


def print_styled(*cells: Cell) -> None:
    """Prints cells in one line; on a terminal, each in its style."""
    if not is_terminal(sys.stdout):
        write("".join(text_of(cell) for cell in cells))
        return
    from rich.text import Text

    console().print(Text.assemble(*map(text, cells)), highlight=False, soft_wrap=True)


def facts(title: Sequence[Cell], columns: Iterable[Column[Row]], row: Row) -> None:
    """Prints the title if it is not empty, and a line for each column whose cell of the row is not empty."""
    if title:
        print_styled(*title)
    cells = [(column.title, cell) for column in columns if text_of(cell := _cell(column, row))]
    width = max([13, *(len(name) for name, _ in cells)]) + 1
    for name, cell in cells:
        print_styled((f"  {name:<{width}}", "dim"), cell)


def table(
    columns: Sequence[Column[Row]],
    rows: Iterable[Row],
    *,
    empty: str = "nothing",
    gap: int = GAP,
    width_in_pipe: int | None = None,
) -> None:
    """Prints a table.

    Args:
        columns: the columns; those that terminals lack are omitted.
        rows: the rows.
        empty: note that replaces a table without rows.
        gap: characters between columns.
        width_in_pipe: the width where stdout is no terminal; None for as much as the rows need.
    """
    columns = sorted((column for column in columns if column.terminal), key=lambda column: column.below)
    cells = _cells(columns, rows)
    if not cells:
        note(empty)
        return
    needed_widths = _widths(columns, cells)
    available = terminal_width() or width_in_pipe
    if available is None:
        _print_aligned(columns, cells, needed_widths, gap)
        return
    shortened: list[str] = []
    if _total(needed_widths, gap) > available and any(column.shortens for column in columns):
        short_cells = [[_shorten(column, cell) for column, cell in zip(columns, row, strict=True)] for row in cells]
        short_widths = _widths(columns, short_cells)
        shortened = [
            column.title
            for column, width, needed in zip(columns, short_widths, needed_widths, strict=True)
            if width < needed
        ]
        cells, needed_widths = short_cells, short_widths
    in_row, below = _places(columns, needed_widths, available, gap)
    widths = [needed_widths[index] for index in in_row]
    while _total(widths, gap) > available and max(widths) > 1:  # folds the widest columns
        widths[widths.index(max(widths))] -= 1
    # Rich has no cells that span columns. So if there are lines below rows, each row is a table with the same widths.
    for number, group in enumerate([[row] for row in cells] if below else [cells]):
        rich_table = _rich_table([columns[index] for index in in_row], widths, gap, header=number == 0)
        for row in group:
            rich_table.add_row(*(text(row[index]) for index in in_row))
        draw(rich_table, width_in_pipe)
        _draw_below([(columns[index].title, group[0][index]) for index in below], width_in_pipe)
    omitted = [column.title for index, column in enumerate(columns) if index not in (*in_row, *below)]
    losses = [
        f"{', '.join(titles)}: {loss}" for titles, loss in ((shortened, "shortened"), (omitted, "omitted")) if titles
    ]
    if losses:
        note(f"({'; '.join(losses)}, as the terminal is too narrow; --json shows all)")


def records(columns: Sequence[Column[Row]], rows: Iterable[Row], *, empty: str = "nothing") -> None:
    """Prints a table; if the terminal is too narrow for the columns, each row as a list."""
    rows = list(rows)
    cells = _cells(columns, rows)
    available = terminal_width()
    least_widths = [min(width, _LEAST_WIDTH) for width in _widths(columns, cells)]
    if available is None or _total(least_widths, GAP) <= available:
        table(columns, rows, empty=empty)
        return
    title_width = max(len(column.title) for column in columns)
    for number, row in enumerate(cells, 1):
        print_styled((f"row {number}", "bold dim"))
        for column, cell in zip(columns, row, strict=True):
            print_styled((f"  {column.title:<{title_width}}  ", "dim"), cell)


def draw(renderable: RenderableType, width_in_pipe: int | None = None) -> None:
    """Prints a renderable of rich. In a pipe it has no styles, and is folded only if it has a width there."""
    if terminal_width() is not None:
        console().print(renderable, highlight=False)
        return
    from rich.console import Console

    page = Console(file=io.StringIO(), width=width_in_pipe or _UNFOLDED_WIDTH, color_system=None)
    with page.capture() as captured:
        page.print(renderable, highlight=False)
    for line in captured.get().splitlines():
        write(line.rstrip())


def terminal_width() -> int | None:
    """The width of the terminal in characters; None if stdout is no terminal."""
    return console().width if is_terminal(sys.stdout) else None


def is_terminal(stream: Any) -> bool:
    """Returns whether the stream is a terminal that can do more than print lines."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def console(*, stderr: bool = False) -> Console:
    """Returns rich's console for stdout or stderr; without colours if NO_COLOR is set."""
    from rich.console import Console

    return Console(stderr=stderr)


def plain(value: Any) -> Any:
    """Converts a value for `json`: times to RFC 3339 in UTC, decimals to strings, dataclasses to objects."""
    if isinstance(value, datetime):
        from breakwater.kernel.types import format_time

        return format_time(value)
    if isinstance(value, date):
        return value.isoformat()
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    model_dump = getattr(value, "model_dump", None)
    if model_dump is not None:
        return model_dump(mode="json")
    if isinstance(value, set | frozenset | tuple):
        return list(cast(Iterable[Any], value))
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return str(value) if not isinstance(value, Decimal) else f"{value:f}"


def text_of(cell: Cell) -> str:
    """The text of a cell, without its style."""
    return cell if isinstance(cell, str) else cell[0]


def _cells(columns: Sequence[Column[Row]], rows: Iterable[Row]) -> list[list[Cell]]:
    return [[_cell(column, row) for column in columns] for row in rows]


def _cell(column: Column[Row], row: Row) -> Cell:
    """Renders a cell, and makes it `visible`."""
    cell = column.cell(row)
    return visible(cell) if isinstance(cell, str) else (visible(cell[0]), cell[1])


def _shorten(column: Column[Any], cell: Cell) -> Cell:
    if not column.shortens:
        return cell
    return short_id(cell) if isinstance(cell, str) else (short_id(cell[0]), cell[1])


def _widths(columns: Sequence[Column[Any]], rows: Sequence[Sequence[Cell]]) -> list[int]:
    """The width that each column needs for its cells and its title, in characters."""
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
    """Prints a table without rich, which takes thirty times as long, because a pipe may get very many rows."""
    for row in ([column.title for column in columns], *rows):
        padded = (
            text_of(cell).rjust(width) if column.is_right_aligned else text_of(cell).ljust(width)
            for cell, column, width in zip(row, columns, widths, strict=True)
        )
        write((" " * gap).join(padded).rstrip())


def _places(
    columns: Sequence[Column[Any]], needed_widths: Sequence[int], available: int, gap: int
) -> tuple[list[int], list[int]]:
    """Chooses which columns are printed. Returns the indexes of those in the row, and of those below it."""
    in_row = list(range(len(columns)))
    if _total(needed_widths, gap) <= available:
        return in_row, []
    below = [index for index in in_row if columns[index].below]
    in_row = [index for index in in_row if index not in below]
    while _total([needed_widths[index] for index in in_row], gap) > available:
        least_important = max(in_row, key=lambda index: columns[index].drop)
        if columns[least_important].drop == 0:
            break
        in_row.remove(least_important)
    return in_row, below


def _rich_table(columns: Sequence[Column[Any]], widths: Sequence[int], gap: int, *, header: bool) -> Table:
    from rich.table import Table

    rich_table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold dim", show_header=header)
    for column, width in zip(columns, widths, strict=True):
        rich_table.add_column(
            column.title, justify="right" if column.is_right_aligned else "left", overflow="fold", width=width
        )
    return rich_table


def _draw_below(titled_cells: Sequence[tuple[str, Cell]], width_in_pipe: int | None) -> None:
    from rich.padding import Padding
    from rich.table import Table

    if not any(text_of(cell) for _, cell in titled_cells):
        return
    lines = Table.grid(padding=(0, GAP, 0, 0))
    lines.add_column(width=max(len(title) for title, _ in titled_cells), style="dim")
    lines.add_column(overflow="fold")
    for title, cell in titled_cells:
        if text_of(cell):
            lines.add_row(title, text(cell))
    draw(Padding(lines, (0, 0, 0, INDENT)), width_in_pipe)


def text(cell: Cell) -> Text:
    """Turns a cell into a text of rich."""
    from rich.text import Text

    return Text(visible(cell)) if isinstance(cell, str) else Text(visible(cell[0]), _STYLES.get(cell[1], cell[1]))
