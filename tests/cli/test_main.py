"""What holds for every command: help, exit codes, errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from breakwater import __version__
from breakwater.cli.main import COMMANDS, every_command, main
from breakwater.kernel.commands.errors import ExitCode
from breakwater.local.datadir import DataDir, Endpoints
from tests.cli.conftest import Run
from tests.tables import each_row

LIVE = [
    ["submit", "writer", "hi"],
    ["submit", "writer", "hi", "--via", "nats"],
    ["tail"],
    ["query", "SELECT 1"],
    ["executions"],
    ["executions", "x"],
    ["agents"],
    ["breakers"],
    ["breakers", "reset", "writer", "m"],
    ["guards", "list"],
    ["budgets"],
    ["budgets", "reconcile"],
    ["budgets", "raise", "global/daily", "50", "--reason", "x"],
    ["alerts"],
    ["alerts", "show", "inc_3f9a1c07"],
    ["alerts", "resolve", "inc_3f9a1c07"],
    ["alerts", "test", "ops"],
    ["alerts", "undelivered"],
    ["alerts", "replay"],
]


def commands() -> list[list[str]]:
    found: list[list[str]] = []
    for name, command in every_command().commands.items():
        found += [[name], *([name, inner] for inner in getattr(command, "commands", {}))]
    return found


@each_row("command", commands(), ids=" ".join)
def test_help_of_every_command_has_a_purpose_and_examples(run: Run, command: list[str]) -> None:
    ran = run(*command, "--help")
    assert ran.code == ExitCode.OK
    assert "Usage: breakwater" in ran.out
    if command not in (["backup"], ["keys"], ["config"], ["encryption"]):
        assert f"breakwater {' '.join(command)}" in ran.out.split("xample", 1)[1]


def test_each_command_is_listed_with_its_purpose(run: Run) -> None:
    shown = run("--help").out
    for listed in COMMANDS.values():
        assert all(f"│ {name} " in shown for name in listed)


def test_help_documents_the_exit_codes(run: Run) -> None:
    text = " ".join(run("--help").out.split())
    for number in ("0 ok", "1 failed", "2 wrong usage", "3 the job was", "4 the plane", "5 the job was accepted"):
        assert number in text


@each_row("option", ["--version", "-V"])
def test_the_version_is_that_of_the_package(run: Run, option: str) -> None:
    assert run(option).out == f"breakwater {__version__}\n"


def test_help_loads_none_of_the_heavy_libraries() -> None:
    heavy = ("aiohttp", "asyncio", "clickhouse_connect", "fastapi", "faststream", "nats", "pydantic", "redis", "yaml")
    code = (
        "import sys\nfrom breakwater.cli.main import main\nmain(['--help'])\n"
        f"sys.stderr.write(' '.join(name for name in {heavy!r} if name in sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(ran.stderr.split()) <= {"asyncio"}


@each_row("command", LIVE, ids=" ".join)
def test_without_a_plane_it_says_what_was_looked_for_and_how_to_start_one(run: Run, command: list[str]) -> None:
    ran = run(*command)
    assert ran.code == ExitCode.UNREACHABLE
    assert "no plane is running in .breakwater" in ran.err
    assert "BREAKWATER_" in ran.err
    assert "breakwater up" in ran.err
    assert ran.out == ""


def test_of_a_plane_that_starts_it_says_so(run: Run) -> None:
    data = DataDir(Path(".breakwater"))
    data.create()
    with data.lock():
        ran = run("agents")
    assert ran.code == ExitCode.UNREACHABLE
    assert "the plane of .breakwater is starting or stopping" in ran.err


def test_errors_are_json_on_stderr_when_asked_for(run: Run) -> None:
    ran = run("executions", "--json")
    assert ran.code == ExitCode.UNREACHABLE
    assert json.loads(ran.err)["exit_code"] == 4
    assert ran.error["code"] == "not_running"
    assert ran.out == ""


@each_row("arguments", [["--nope"], ["nope"], ["tail", "--nope"], ["executions", "--limit", "x"]])
def test_wrong_usage_is_code_2_and_names_the_help(run: Run, arguments: list[str]) -> None:
    ran = run(*arguments)
    assert ran.code == ExitCode.USAGE
    assert ran.err.startswith("error: ")
    assert "--help" in ran.err
    as_json = run(*arguments, "--json")
    assert as_json.code == ExitCode.USAGE
    assert as_json.error["code"] == "usage"


@each_row(
    ("arguments", "said"),
    [
        (["submit", "w", "hi", "--via", "ftp"], "'--via': 'ftp' is not one of 'http', 'nats'."),
        (["query", "x", "--format", "nope"], "'--format': 'nope' is not one of 'table', 'json', 'csv'."),
        (["submit", "w", "hi", "--wait-s", "abc"], "'--wait-s': Input should be a valid number"),
        (["executions", "--limit", "abc"], "'--limit': Input should be a valid integer"),
        (["up", "--workers", "0"], "'--workers': Input should be greater than or equal to 1\n"),
    ],
)
def test_a_wrong_option_is_reported_with_its_name(run: Run, arguments: list[str], said: str) -> None:
    ran = run(*arguments)
    assert ran.code == ExitCode.USAGE
    assert said in ran.err


def test_a_statement_that_changes_something_needs_to_be_meant(run: Run) -> None:
    ran = run("query", "/* ! */ DROP TABLE executions")
    assert ran.code == ExitCode.USAGE
    assert "--write" in ran.err
    assert run("query", "DROP TABLE executions", "--write").code == ExitCode.UNREACHABLE


def test_a_stack_that_was_killed_is_distinguished_from_one_that_runs(run: Run, tmp_path: Path) -> None:
    data = DataDir(tmp_path / "data")
    data.create()
    data.write_endpoints(endpoints(tmp_path))
    ran = run("executions", "--data", str(data.path))
    assert ran.code == ExitCode.UNREACHABLE
    assert "has ended (it was process 4711)" in ran.err
    with data.lock():
        ran = run("executions", "--data", str(data.path))
    assert "ClickHouse does not answer" in ran.err
    assert ran.code == ExitCode.UNREACHABLE


def test_data_given_explicitly_wins_over_the_environment(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BREAKWATER_CLICKHOUSE_URL", "not an address")
    assert "URL must look like" in run("executions").err
    assert "no plane is running in elsewhere" in run("executions", "--data", "elsewhere").err


def test_an_unexpected_error_keeps_its_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr("breakwater.cli.main.app", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["keys", "list"])


def test_a_reader_that_goes_away_ends_the_command_without_a_word(tmp_path: Path) -> None:
    arguments = ["keys", "list", "--json"]
    code = f"import sys; from breakwater.cli.main import main; sys.exit(main({arguments}))"
    environment = {**os.environ, "BREAKWATER_API_KEYS_FILE": str(tmp_path / "keys.json")}
    writer = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert writer.stdout is not None
    assert writer.stderr is not None
    writer.stdout.close()
    assert writer.stderr.read() == ""
    assert writer.wait(60) == 1
    writer.stderr.close()


def endpoints(directory: Path) -> Endpoints:
    return Endpoints(
        request_url="http://127.0.0.1:9",
        console_url="http://127.0.0.1:9",
        nats_url="nats://client:x@127.0.0.1:9",
        redis_url="redis://127.0.0.1:9/0",
        clickhouse_url="http://127.0.0.1:9/breakwater",
        api_key_file=directory / "key",
        config_file=directory / "breakwater.yaml",
        data_dir=directory,
        pid=4711,
        started_at=datetime.now(UTC),
    )


@each_row("group", ["agents", "alerts", "breakers", "budgets", "dlq", "guards", "plans"])
def test_the_help_of_a_group_has_the_options_of_its_list(run: Run, group: str) -> None:
    options = set(re.findall(r"(?<=\s)--[a-z-]+", run(group, "list", "--help").out.partition("Options")[2]))
    assert {"--data", "--json"} <= options
    assert options <= set(re.findall(r"(?<=\s)--[a-z-]+", run(group, "--help").out.partition("Options")[2]))


@each_row(
    "arguments",
    [
        ("submit", "my agent", "x"),
        ("submit", "a", "x", "--tenant", "Acme Corp"),
        ("submit", "a", "x", "--task-id", "run 1"),
        ("submit", "a", "x", "--depends-on", "job 1"),
        ("keys", "create", "my key"),
        ("keys", "create", "k", "--scope", "submit", "--agent", "my agent"),
    ],
)
def test_an_identifier_with_a_space_is_refused(run: Run, arguments: tuple[str, ...]) -> None:
    ran = run(*arguments)
    assert (ran.code, "contains a space" in ran.err) == (ExitCode.USAGE, True)


def test_what_only_developers_need_is_the_last_group_of_the_help(run: Run) -> None:
    groups = re.findall(r"─ (\w+) ─+╮", run("--help").out)
    assert groups[-1] == "Developers"
    assert set(COMMANDS["Developers"]) == {"contract", "setup"}
