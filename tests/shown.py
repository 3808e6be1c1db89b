"""Tables that a test shows in the summary of the whole run, whether it passed or not: `show(title, columns, rows)`."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

Show = Callable[[str, Sequence[str], Sequence[Sequence[object]]], None]

_PROPERTY = "shown"


@pytest.fixture
def show(record_property: Callable[[str, object], None]) -> Show:
    """Shows a table at the end of the run. As a property of the report it also comes from an xdist worker."""

    def shown(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        table = Table(*columns, title=title, title_justify="left")
        for row in rows:
            table.add_row(*(str(cell) for cell in row))
        text = io.StringIO()
        Console(file=text, width=120).print(table)
        record_property(_PROPERTY, text.getvalue())

    return shown


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints what was shown."""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for name, text in report.user_properties:
                if name == _PROPERTY:
                    terminalreporter.write_line("")
                    terminalreporter.write(text)
