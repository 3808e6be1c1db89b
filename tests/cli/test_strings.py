"""`python -m tests.cli.strings` prints what people read, and none of it reads like a translation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from breakwater.cli.main import COMMANDS, every_command
from tests.cli.strings import ShownString, print_all, strings
from tests.tables import each_row

ROOT = Path(__file__).parents[2]


INSTEAD = {
    r"Only (?:those|alerts|jobs) (?:of|with|that)": "Filter by …",
    r"ended so": "the status",
    r"[Tt]he most (?:bytes|lines|rows|jobs|alerts|that)": "Maximum …",
    r"\bso much of it\b|no other (?:one )?begins so": "a unique prefix",
    r"[Hh]eld back": "blocked, delayed",
    r"[Hh]alf took": "Median",
    r"Happened (?:once|\d)": "1 occurrence",
    r"people are (?:notified|told)": "alert only",
    r"at this pace": "Forecast",
    r"\ball else\b|what else\b": "all other …",
    r"\bmend": "fix",
    r"nothing like": "the rule itself",
    r"\} without a call\b": "overhead",
    r"Choose all": "Select all",
    r"Spent budgets": "Exhausted budgets",
    r"[Ii]n whose name": "on behalf of",
    r"\bfor ever\b": "forever",
    r"\banew\b|\bbeside\b|\bat once\b|\b(?:no|any|some)body\b|\bwhoever\b|\btold\b": "plain words",
}

pytestmark = pytest.mark.long(about_s=6, together=True)


@pytest.fixture(scope="module")
def found() -> list[ShownString]:
    return strings()


@each_row(
    ("path", "text"),
    [
        (
            "breakwater/cli/commands/contract.py",
            "Write nothing; list what is out of date, and exit with code 1.",
        ),  # an option
        ("breakwater/cli/commands/contract.py", "wrote {…}"),  # a message with a value
        ("breakwater/identity/templates/sign_in.html", "Sign in"),  # a page
        ("breakwater/alerts/contract.py", "Shared by all changes of an incident. Plain ASCII."),  # a field
    ],
)
def test_it_finds_options_messages_pages_and_fields(found: list[ShownString], path: str, text: str) -> None:
    assert text in {one.text for one in found if one.path == path}


def test_it_finds_the_help_of_every_command(found: list[ShownString]) -> None:
    shown = {one.text for one in found}

    def commands(group: Any) -> Iterator[Any]:
        for one in group.commands.values():
            yield from commands(one) if hasattr(one, "commands") else [one]

    helps = [" ".join(one.callback.__doc__.split()) for one in commands(every_command())]
    assert len(helps) > 40
    assert not [text for text in helps if text not in shown]


def test_each_is_where_it_says(found: list[ShownString]) -> None:
    roots = {"breakwater": ROOT / "libs" / "breakwater", "services": ROOT / "services"}
    for one in found[::50]:
        room, _, path = one.path.partition("/")
        lines = (roots[room] / path).read_text().splitlines()
        first = re.split(r"[{\"'\\]", one.text)[0].split()
        assert not first or first[0] in "\n".join(lines[one.line - 1 : one.line + 40]), one


def test_they_are_printed(found: list[ShownString], capsys: pytest.CaptureFixture[str]) -> None:
    print_all(found)
    printed = capsys.readouterr().out.splitlines()
    assert printed == [f"{shown.path}:{shown.line}: {shown.text}" for shown in found]
    assert len(printed) > 2_000


def test_no_string_reads_like_a_translation(found: list[ShownString]) -> None:
    faults = [
        f"{one.path}:{one.line}: {one.text!r}: instead of {match[0]!r} say: {say}"
        for one in found
        for pattern, say in INSTEAD.items()
        if (match := re.search(pattern, one.text))
    ]
    assert not faults, "\n".join(faults)


NAMES_OF_DLQ = re.compile(r"breakwater\s+dlq\b|\balso `dlq|/api/v1/dlq\b|\bbw\.dlq\.|\b[Tt]he stream DLQ\b")
"""The command, the paths of the HTTP API, the subjects, and the stream."""


def test_dead_letters_have_no_other_name_and_dlq_is_only_that_of_their_command_and_their_stream(
    found: list[ShownString],
) -> None:
    faults = [one for one in found if re.search("dlq", NAMES_OF_DLQ.sub("", one.text), re.IGNORECASE)]
    documents = (ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md"))
    texts = {path.name: NAMES_OF_DLQ.sub("", path.read_text()) for path in documents}
    # Lists of streams have the bare name.
    faults_of_documents = {
        name: re.findall(r"\bdlq\b|\b(?:[Tt]he|an?|your) DLQ\b", text) for name, text in texts.items()
    }

    assert faults == []
    assert {name: words for name, words in faults_of_documents.items() if words} == {}
    assert COMMANDS["Look"]["dlq"][1].startswith("Dead letters: ")
