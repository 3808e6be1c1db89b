"""What the doctor prints, and what it knows of a plane that was started in another shell."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from breakwater.cli import doctor
from breakwater.cli.doctor import Finding
from breakwater.kernel.commands.errors import ExitCode
from breakwater.local.plane import PlaneLocation
from tests.cli.conftest import Run

CONFIG = """
providers: {a: {base_url: "http://127.0.0.1:9/v1", api_key: {env: KEY_OF_ANOTHER_SHELL}}}
agents: {writer: {model: a/large}}
"""
OK, WARN = Finding("nats", "ok", "answers"), Finding("redis", "warn", "is slow", "Look at it.")


@pytest.fixture
def finds(run: Run, monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """What the checks of the servers find."""
    found = [OK]

    async def findings(*_: object) -> Sequence[Finding]:
        return found

    monkeypatch.setattr(doctor, "all_findings", findings)
    Path("breakwater.yaml").write_text(CONFIG)
    monkeypatch.setenv("KEY_OF_ANOTHER_SHELL", "x")
    return found


def test_what_is_ok_is_only_counted(run: Run, finds: list[Finding]) -> None:
    ran = run("doctor")
    assert (ran.code, ran.out.splitlines()) == (ExitCode.OK, ["3 ok; --verbose lists all"])
    assert "ok    nats    answers" in run("doctor", "--verbose").out
    finds.append(WARN)
    assert [line.split() for line in run("doctor").out.splitlines()] == [
        ["warn", "redis", "is", "slow"],
        ["Look", "at", "it."],
        ["3", "ok,", "1", "warn;", "--verbose", "lists", "all"],
    ]


def test_a_secret_that_only_the_shell_of_up_has_is_no_problem_while_that_runs(
    run: Run, finds: list[Finding], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KEY_OF_ANOTHER_SHELL")
    assert "KEY_OF_ANOTHER_SHELL" in run("doctor").out
    monkeypatch.setattr(PlaneLocation, "runs_with", lambda _, config: config == Path("breakwater.yaml"))
    assert run("doctor").out.startswith("2 ok")


async def test_a_clickhouse_that_is_silent_is_named_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    names = ("clickhouse", "calls")
    monkeypatch.setattr(doctor, "CHECKS", [one for one in doctor.CHECKS if one[0] in names])
    monkeypatch.setattr("breakwater.cli.doctor_checks.ANSWER_TIMEOUT_S", 0.2)
    async with await asyncio.start_server(silent, "127.0.0.1") as server:
        port = server.sockets[0].getsockname()[1]
        monkeypatch.setenv("BREAKWATER_CLICKHOUSE_URL", f"http://127.0.0.1:{port}/breakwater")
        [found] = await doctor.all_findings(PlaneLocation(None), None)
    assert (found.area, found.verdict) == ("clickhouse", "fail")
    assert found.text.startswith("ClickHouse does not answer")
