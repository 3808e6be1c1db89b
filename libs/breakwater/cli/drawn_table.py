"""Tables on a terminal: what does not fit goes below its row, or is left out, and that is said."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from breakwater.cli.output import GAP, Cell, Column, console, note, text_of, widths

_INDENT = 4


def draw(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], available: int) -> None:
    """Prints a table on a terminal of so many columns."""
    taken = widths(columns, rows)
    everything = range(len(columns))
    below = [index for index in everything if columns[index].below] if _total(taken) > available else []
    shown = _fitting(columns, taken, [index for index in everything if index not in below], available)
    if below:
        _with_lines_below(columns, rows, shown, below, _narrowed([taken[index] for index in shown], available))
    else:
        table = _table([columns[index] for index in shown])
        for row in rows:
            table.add_row(*(_drawn(row[index]) for index in shown))
        console().print(table)
    if len(shown) + len(below) < len(columns):
        left_out = ", ".join(columns[index].title for index in everything if index not in {*shown, *below})
        note(f"({left_out}: left out, the terminal is too narrow; --json has everything)")


def _with_lines_below(
    columns: Sequence[Column],
    rows: Sequence[Sequence[Cell]],
    shown: Sequence[int],
    below: Sequence[int],
    taken: Sequence[int],
) -> None:
    screen = console()
    beside = [columns[index] for index in shown]
    screen.print(_table(beside, taken))
    titles = max(len(columns[index].title) for index in below)
    for row in rows:
        # A table for each row, all of the same widths: rich knows no cell that goes over several columns.
        table = _table(beside, taken, header=False)
        table.add_row(*(_drawn(row[index]) for index in shown))
        screen.print(table)
        lines = Table.grid(padding=(0, GAP, 0, 0))
        lines.add_column(width=titles, style="dim")
        lines.add_column(overflow="fold")
        for index in below:
            if text_of(row[index]):
                lines.add_row(columns[index].title, _drawn(row[index]))
        if lines.row_count:
            screen.print(Padding(lines, (0, 0, 0, _INDENT)))


def _table(columns: Sequence[Column], taken: Iterable[int] | None = None, *, header: bool = True) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold dim", show_header=header)
    for column, width in zip(columns, taken or [None] * len(columns), strict=True):
        table.add_column(
            column.title if header else "", justify="right" if column.right else "left", overflow="fold", width=width
        )
    return table


def _drawn(cell: Cell) -> Text:
    return Text(cell) if isinstance(cell, str) else Text(*cell)


def _total(taken: Sequence[int]) -> int:
    return sum(taken) + GAP * (len(taken) - 1)


def _fitting(columns: Sequence[Column], taken: Sequence[int], shown: list[int], available: int) -> list[int]:
    while _total([taken[index] for index in shown]) > available:
        least = max(shown, key=lambda index: columns[index].drop)
        if columns[least].drop == 0:
            break
        shown.remove(least)
    return shown


def _narrowed(taken: list[int], available: int) -> list[int]:
    """Widths that fit: the widest columns give way, and are folded."""
    while _total(taken) > available and max(taken) > 1:
        taken[taken.index(max(taken))] -= 1
    return taken
