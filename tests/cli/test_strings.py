"""`breakwater contract --strings` prints what people read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from breakwater.cli.strings import ShownString, strings
from tests.cli.conftest import Run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found() -> list[ShownString]:
    return strings()


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("breakwater/cli/contract.py", "Write nothing; list what is out of date, and exit with code 1."),  # an option
        ("breakwater/cli/contract.py", "wrote {…}"),  # a message with a value
        ("services/console/templates/sign_in.html", "Sign in"),  # a page
        ("breakwater/contracts/alerts.py", "Shared by all changes of an incident. Plain ASCII."),  # a field
    ],
)
def test_it_finds_options_messages_pages_and_fields(found: list[ShownString], path: str, text: str) -> None:
    assert text in {one.text for one in found if one.path == path}


def test_each_is_where_it_says(found: list[ShownString]) -> None:
    roots = {"breakwater": ROOT / "libs" / "breakwater", "services": ROOT / "services"}
    for one in found[::50]:
        room, _, path = one.path.partition("/")
        lines = (roots[room] / path).read_text().splitlines()
        first = re.split(r"[{\"'\\]", one.text)[0].split()
        assert not first or first[0] in "\n".join(lines[one.line - 1 : one.line + 40]), one


def test_a_command_prints_them(run: Run) -> None:
    printed = run("contract", "--strings").out
    assert "breakwater/cli/contract.py" in printed
    assert len(printed.splitlines()) > 2_000
