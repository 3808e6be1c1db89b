"""What the doctor prints, and what it knows of a plane that was started in another shell."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from breakwater.cli import doctor
from breakwater.cli.doctor import Finding
from breakwater.kernel.commands.errors import ExitCode
from breakwater.local.plane import PlaneLocation
from tests.cli.api_stub import KEY, serving
from tests.cli.conftest import Run

CONFIG = """
providers: {a: {base_url: "http://127.0.0.1:9/v1", api_key: {env: KEY_OF_ANOTHER_SHELL}}}
agents: {writer: {model: a/large}}
"""
LAPTOP = {"id": "0", "name": "laptop", "scopes": ["submit"]}
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


async def test_with_the_address_of_the_http_api_and_a_key_alone_it_skips_what_it_cannot_reach_and_says_so(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving() as stub:
        stub.sessions.add("")  # whether it is ready may be asked without a key
        stub.answers |= {"GET /readyz": (200, {"status": "ready"}), "GET key": (200, LAPTOP)}
        monkeypatch.setenv("BREAKWATER_URL", stub.url)
        monkeypatch.setenv("BREAKWATER_API_KEY", KEY)
        ran = await asyncio.to_thread(run, "doctor")
        listed = await asyncio.to_thread(run, "doctor", "--json")
    assert (ran.code, ran.out.splitlines()) == (
        ExitCode.OK,
        [
            "2 ok, 8 skip; --verbose lists all",
            "Skipped: config, nats, redis, jobs, clickhouse, record, calls, encryption. BREAKWATER_URL leads to the "
            "HTTP API alone. Run this on the machine of the plane to check all.",
        ],
    )
    assert json.loads(listed.out)["verdict"] == "ok"
    monkeypatch.setenv("BREAKWATER_REDIS_URL", "redis://127.0.0.1:1/0")
    findings = await doctor.all_findings(PlaneLocation(None), None)
    assert {finding.area: finding.verdict for finding in findings}["redis"] == "fail", "it is asked for"
    monkeypatch.setenv("BREAKWATER_CONFIG", "missing.yaml")
    assert "missing.yaml" in (await asyncio.to_thread(run, "doctor")).out


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
