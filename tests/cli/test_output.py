"""Formats and tables."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from operator import itemgetter
from pathlib import Path

import pytest

from breakwater.kernel.commands import formats, output
from breakwater.kernel.commands.errors import CliError, show
from breakwater.kernel.commands.output import Column
from tests.cli.conftest import Terminal
from tests.tables import each_row

NOW = datetime(2026, 11, 21, 10, 0, tzinfo=UTC)


@each_row(
    ("ms", "text"),
    [
        (None, ""),
        (0, "0 ms"),
        (999, "999 ms"),
        (1_200, "1.2 s"),
        (59_949, "59.9 s"),
        (59_950, "1 min 00 s"),
        (125_000, "2 min 05 s"),
        (12_000_000, "3 h 20 min"),
    ],
)
def test_durations(ms: int | None, text: str) -> None:
    assert formats.duration(ms) == text


@each_row(
    ("text", "ago"),
    [("90s", 90), ("10m", 600), ("2h", 7200), ("1.5h", 5400), ("7d", 604_800), ("2026-11-21T09:00:00Z", 3600)],
)
def test_since_takes_durations_and_times(text: str, ago: int) -> None:
    assert formats.since(text, NOW) == NOW - timedelta(seconds=ago)


@each_row("text", ["", "10", "soon", "-5m", "10y", "0001-01-01", "9999999d"])
def test_since_says_how_it_is_written(text: str) -> None:
    with pytest.raises(CliError, match="neither a duration nor a time") as caught:
        formats.since(text, NOW)
    assert "2h" in caught.value.remedy


def test_a_time_ahead_is_read_in_the_terminals_time_zone(
    monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        for text, moment in {
            "90s": NOW + timedelta(seconds=90),
            "7d": NOW + timedelta(days=7),
            "18:00": datetime(2026, 11, 21, 17, 0, tzinfo=UTC),
            "9:30": datetime(2026, 11, 22, 8, 30, tzinfo=UTC),
            "tomorrow": datetime(2026, 11, 21, 23, 0, tzinfo=UTC),
            "2026-12-01": datetime(2026, 11, 30, 23, 0, tzinfo=UTC),
            "2026-12-01T08:00": datetime(2026, 12, 1, 7, 0, tzinfo=UTC),
            "2026-11-21T10:00Z": NOW,
        }.items():
            with subtests.test(text):
                assert formats.ahead(text, NOW, "--until") == moment
        for text in ("", "soon", "25:00", "18", "99999999999d", "2026-13-01", "0001-01-01"):
            with subtests.test(text), pytest.raises(CliError, match="is no time ahead") as caught:
                formats.ahead(text, NOW, "--until")
            assert "tomorrow" in caught.value.remedy
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_table_in_a_pipe_is_aligned_and_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    columns = [
        Column("name", itemgetter(0)),
        Column("count", itemgetter(1), align_right=True),
        Column("why", itemgetter(2), drop=1),
    ]
    output.table(columns, [("a", "1", ("x" * 200, "red")), ("écrivain", "1000", "")])
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["name      count  why", f"a             1  {'x' * 200}", "écrivain   1000"]


def test_an_empty_table_leaves_stdout_to_programs(capsys: pytest.CaptureFixture[str]) -> None:
    output.table([Column("name", str)], [], empty="no agents")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "no agents\n"


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


Show = Callable[[Callable[[], None]], str]


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Show:
    """Gives what a terminal of 40 columns shows."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def show(draw: Callable[[], None]) -> str:
        screen = Screen()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", screen)
            patch.setattr(sys, "stderr", screen)
            draw()
        return screen.getvalue()

    return show


COLUMNS = [
    Column("agent", itemgetter(0)),
    Column("cost", itemgetter(1), drop=1),
    Column("error", itemgetter(2), drop=2),
]
ROW = ("content-writer", "$0.000042", ("an error that takes its room", "red"))


def test_a_narrow_terminal_gets_the_columns_that_matter_and_names_the_rest(on_terminal: Show) -> None:
    shown = on_terminal(lambda: output.table(COLUMNS, [ROW]))
    assert "content-writer" in shown
    assert "$0.000042" in shown
    assert "an error" not in shown
    assert "error: omitted" in shown


HOSTILE = "a\x1b]0;title\x07b\x9b2Jc\u202ed\re\x7f"
VISIBLE = "a\\u001b]0;title\\u0007b\\u009b2Jc\\u202ed\\u000de\\u007f"


@pytest.mark.parametrize(
    "draw",
    [
        lambda: output.write(HOSTILE),
        lambda: output.note(HOSTILE),
        lambda: output.print_styled(HOSTILE, (HOSTILE, "red")),
        lambda: output.table([Column("name", str)], [HOSTILE]),
        lambda: output.records([Column("name", str), Column("other", str, below=True)], [HOSTILE]),
        lambda: output.facts([HOSTILE], [Column("name", str)], HOSTILE),
        lambda: show(CliError("failed", HOSTILE, HOSTILE), as_json=False),
    ],
)
def test_what_a_terminal_would_obey_is_shown(on_terminal: Show, draw: Callable[[], None]) -> None:
    shown = re.sub(r"\x1b\[[0-9;]*m", "", on_terminal(draw))  # the styles are ours
    assert VISIBLE in re.sub(r"\s", "", shown)  # a table folds it
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", shown)


def test_a_document_on_a_terminal_is_still_that_document(on_terminal: Show) -> None:
    shown = on_terminal(lambda: output.json_document({"answer": HOSTILE}))
    assert json.loads(shown) == {"answer": HOSTILE}
    assert "\x9b" not in shown


def test_a_pipe_gets_an_answer_as_it_is_and_a_terminal_its_lines(
    capsys: pytest.CaptureFixture[str], on_terminal: Show
) -> None:
    output.write(HOSTILE)
    assert capsys.readouterr().out == HOSTILE + "\n"
    lines = "one\r\n\ttwo 👩\u200d🚀"
    assert on_terminal(lambda: output.write(lines)) == lines + "\n"


def test_bytes_that_are_passed_on_are_shown_on_a_terminal_and_as_they_are_in_a_pipe(
    capsysbinary: pytest.CaptureFixture[bytes], on_terminal: Show
) -> None:
    text = f"écrit {HOSTILE}\n".encode()

    def pass_on() -> None:
        out = output.binary()
        for at in range(len(text)):  # a server's answer comes in pieces, which may end within a letter
            out.write(text[at : at + 1])

    assert on_terminal(pass_on) == f"écrit {VISIBLE}\n"
    pass_on()
    assert capsysbinary.readouterr().out == text


def test_one_module_writes_to_the_terminal() -> None:
    """A command that wrote by itself would pass on text of models and tenants."""
    folder = Path(output.__file__).parent
    writes = re.compile(r"(stdout|stderr)\.(write|buffer)")
    writing = {path.name for path in folder.rglob("*.py") if writes.search(path.read_text())}
    assert writing == {"output.py"}


def test_no_color_is_honoured(on_terminal: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[31m" in on_terminal(lambda: output.print_styled(("failed", "red")))
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[31m" not in on_terminal(lambda: output.print_styled(("failed", "red")))


def test_more_columns_than_fit_make_a_list_of_each_row(on_terminal: Show) -> None:
    columns, row = [Column(f"column_{n}", itemgetter(n)) for n in range(9)], [f"value {n}" for n in range(9)]
    lines = on_terminal(lambda: output.records(columns, [row])).splitlines()
    assert len(lines) == 10
    assert "column_8" in lines[9]
    assert "value 8" in lines[9]


def test_on_a_narrow_terminal_a_long_reason_goes_below_its_row(
    capsys: pytest.CaptureFixture[str], terminal: Terminal
) -> None:
    terminal(40)
    columns = [
        Column("agent", itemgetter(0)),
        Column("since", itemgetter(1), drop=1),
        Column("why", itemgetter(2), below=True),
    ]
    rows = [("writer", "10:00:00", "an error that takes more room than there is"), ("reader", "10:00:01", "")]
    output.table(columns, rows)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "agent   since",
        "writer  10:00:00",
        "    why  an error that takes more room",
        "         than there is",
        "reader  10:00:01",
    ]
    terminal(80)
    output.table(columns, rows)
    assert capsys.readouterr().out.splitlines()[1].rstrip() == f"writer  10:00:00  {rows[0][2]}"


def test_a_narrow_terminal_shortens_ids_before_it_omits_anything(
    capsys: pytest.CaptureFixture[str], terminal: Terminal
) -> None:
    columns = [
        Column("ended", itemgetter(0), drop=1),
        Column("id", itemgetter(1), shortens=True),
        Column("reason", itemgetter(2), below=True),
    ]
    rows = [("10:00:00", "job-of-a-very-long-name-0017", "timeout"), ("10:00:01", ("short", "red"), "")]
    terminal(40)
    output.table(columns, rows)
    shown = capsys.readouterr()
    assert [line.rstrip() for line in shown.out.splitlines()] == [
        "ended     id               reason",
        "10:00:00  job-of-a…e-0017  timeout",
        "10:00:01  short",
    ]
    assert shown.err == "(id: shortened, as the terminal is too narrow; --json shows all)\n"
    terminal(60)
    output.table(columns, rows)
    assert "job-of-a-very-long-name-0017" in capsys.readouterr().out


def test_columns_that_do_not_fit_at_all_are_folded(capsys: pytest.CaptureFixture[str], terminal: Terminal) -> None:
    terminal(20)
    columns = [
        Column("agent", itemgetter(0)),
        Column("model", itemgetter(1)),
        Column("why", itemgetter(2), below=True),
    ]
    output.table(columns, [("writer", "a-model-of-a-long-name", "x")])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == ["agent   model", "writer  a-model-of-a", "        -long-name", "    why  x"]


def test_facts_keep_a_space_between_a_long_title_and_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    columns = [Column("model", itemgetter(0)), Column("requested model", itemgetter(0))]
    output.facts((), columns, ["gpt-4o"])
    assert capsys.readouterr().out == "  model           gpt-4o\n  requested model gpt-4o\n"


def test_json_has_times_as_rfc_3339_and_money_as_decimal_strings(capsys: pytest.CaptureFixture[str]) -> None:
    output.json_line({"at": NOW, "cost": Decimal("0.000042000"), "many": (1, 2), "text": "é"})
    assert capsys.readouterr().out == (
        '{"at":"2026-11-21T10:00:00.000Z","cost":"0.000042000","many":[1,2],"text":"é"}\n'
    )


def test_the_program_is_named_as_another_shell_finds_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = tmp_path / "it's" / "bin" / "breakwater"
    own.parent.mkdir(parents=True)
    own.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(own.with_name("python")))
    monkeypatch.setenv("PATH", str(own.parent))
    assert formats.breakwater_command() == "breakwater"
    monkeypatch.setenv("PATH", "/nowhere")
    assert formats.breakwater_command() == shlex.quote(str(own))
    monkeypatch.chdir(own.parents[1])
    assert formats.breakwater_command() == "bin/breakwater"
