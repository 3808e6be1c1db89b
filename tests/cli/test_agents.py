"""`breakwater agents`, against a stub of the HTTP interface."""

from __future__ import annotations

import io
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from breakwater.cli.main import main
from breakwater.kernel.commands.errors import ExitCode
from breakwater.kernel.commands.formats import clock
from breakwater.kernel.types import format_time
from tests.api_documents import health, model
from tests.cli.api_stub import Stub
from tests.cli.conftest import Run, in_thread

NOW = datetime.now(UTC)
LATER = NOW + timedelta(hours=2)


LARGE = model("a/large", "open", "unhealthy") | {"circuit_open_until": format_time(LATER)}
AGENTS = [health("writer", "degraded", LARGE, model("a/small")) | {"told_in_a_later_version": True}, health("tool")]

CONFIG = """
providers: {a: {base_url: "http://127.0.0.1:9/v1"}}
agents: {writer: {model: a/large}}
"""


@pytest.fixture
def stub(stub: Stub) -> Stub:
    stub.answers["GET agents"] = (200, AGENTS)
    return stub


async def test_a_narrow_terminal_shows_what_matters_in_colour(
    run: Run, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    for name, value in {"TERM": "xterm", "COLUMNS": "70"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", screen)
        assert await in_thread(lambda *arguments: main(arguments), "agents") == ExitCode.OK  # pyright: ignore[reportArgumentType]  # as `run`, with this screen
    lines = screen.getvalue().splitlines()
    assert "last success" not in lines[0]
    assert "open until" in lines[0]
    assert "\x1b[31munhealthy\x1b[0m  \x1b[31mopen" in lines[3]
    assert clock(LATER, NOW) in lines[3]
    assert "it is unhealthy" in lines[4]


async def test_a_field_of_a_later_version_is_passed_on_as_json(run: Run, stub: Stub) -> None:
    assert (await in_thread(run, "agents", "--json")).json == AGENTS


async def test_figures_that_nobody_knows_are_said_to_be_missing(
    run: Run, stub: Stub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BREAKWATER_CLICKHOUSE_URL", "http://127.0.0.1:9/breakwater")
    monkeypatch.setenv("BREAKWATER_REDIS_URL", "redis://127.0.0.1:9/0")
    (tmp_path / "breakwater.yaml").write_text(CONFIG)
    ran = await in_thread(run, "agents", "--since", "1h")
    assert ran.code == ExitCode.UNREACHABLE
    assert "ClickHouse does not answer" in ran.err
    assert "Redis" in ran.err
    assert ran.out.splitlines()[1].split()[:2] == ["writer", "degraded"]


@pytest.mark.parametrize("answer", [(200, "<html>"), (200, {"agents": []}), (200, [{"agent_id": "x"}]), (502, "bad")])
async def test_something_else_that_listens_there_is_distinguished_from_a_plane(
    run: Run, stub: Stub, answer: tuple[int, Any]
) -> None:
    stub.answers["GET agents"] = answer
    ran = await in_thread(run, "agents")
    assert ran.code == ExitCode.FAILED
    assert "check the URL" in ran.err


async def test_a_service_that_is_down_is_reported_with_its_address_and_what_to_do(run: Run, stub: Stub) -> None:
    ran = await in_thread(run, "agents", "--url", "http://127.0.0.1:9")
    assert ran.code == ExitCode.UNREACHABLE
    assert "no server at http://127.0.0.1:9" in ran.err
    assert "breakwater doctor" in ran.err
    stub.answers["GET agents"] = (200, None)
    ran = await in_thread(run, "agents")
    assert ran.code == ExitCode.UNREACHABLE
    assert "no response from" in ran.err
