"""`breakwater agents`, against a stub of the HTTP interface."""

from __future__ import annotations

import io
import re
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from breakwater.breakers.views import open_until
from breakwater.cli.main import main
from breakwater.kernel.commands.errors import ExitCode
from breakwater.kernel.commands.formats import clock
from breakwater.kernel.types import format_time
from tests.cli.api_stub import Stub, problem
from tests.cli.conftest import Run, in_thread

NOW = datetime.now(UTC)
FAILED, SUCCEEDED, LATER = NOW - timedelta(minutes=3), NOW - timedelta(seconds=5), NOW + timedelta(hours=2)


def health(model: str, health: str, breaker: str | None, fails: int = 0, **more: Any) -> dict[str, Any]:
    given = {"model": model, "health": health, "health_reason": f"it is {health}", "breaker": breaker}
    return given | {"consecutive_failures": fails, **more}


AGENTS: list[dict[str, Any]] = [
    {
        "agent_id": "writer",
        "health": "degraded",
        "health_reason": "a/large: it is unhealthy",
        "consecutive_failures": 0,
        "last_failure_at": format_time(FAILED),
        "last_success_at": format_time(SUCCEEDED),
        "circuit_open_until": None,
        "models": [
            health("a/large", "unhealthy", "open", 3, circuit_open_until=format_time(LATER)),
            health("a/small", "healthy", "closed", last_success_at=format_time(SUCCEEDED)),
        ],
        "told_in_a_later_version": True,
    },
    {
        "agent_id": "tool",
        "health": "healthy",
        "health_reason": "no calls yet",
        "consecutive_failures": 0,
        "models": [health("local/tool", "healthy", None), health("b/x", "unhealthy", "isolated")],
    },
]

CONFIG = """
providers: {a: {base_url: "http://127.0.0.1:9/v1"}}
agents: {writer: {model: a/large}}
"""


@pytest.fixture
def stub(stub: Stub) -> Stub:
    stub.answers["GET agents"] = (200, AGENTS)
    return stub


async def test_every_agent_and_each_of_its_models_has_a_row(run: Run, stub: Stub) -> None:
    ran = await in_thread(run, "agents")
    assert (ran.code, ran.err) == (ExitCode.OK, "")
    header, writer, large, small, tool, off, isolated = ran.out.splitlines()
    titles = ["agent, models", "health", "breaker", "fails", "last failure", "last success", "open until", "reason"]
    assert re.split(r"  +", header) == titles
    assert writer.split() == [
        "writer",
        "degraded",
        "0",
        *clock(FAILED, NOW).split(),
        *clock(SUCCEEDED, NOW).split(),
        *["a/large:", "it", "is", "unhealthy"],
    ]
    assert large.split()[:4] == ["a/large", "unhealthy", "open", "3"]
    assert clock(LATER, NOW) in large
    assert small.split()[:4] == ["a/small", "healthy", "closed", "0"]
    assert tool.split() == ["tool", "healthy", "0", "no", "calls", "yet"]
    assert off.split() == ["local/tool", "healthy", "off", "0", "it", "is", "healthy"]
    assert isolated.split() == ["b/x", "unhealthy", "isolated", "0", "until", "reset", "it", "is", "unhealthy"]


async def test_json_is_the_interfaces_own_array(run: Run, stub: Stub) -> None:
    assert (await in_thread(run, "agents", "--json")).json == AGENTS


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


@pytest.mark.parametrize(
    ("state", "until", "text"),
    [
        ("closed", None, ""),
        (None, None, ""),
        ("isolated", None, "until reset"),
        ("half_open", LATER, "a call probes it"),
        ("open", NOW, "next call probes it"),
        # Named, for the workers of the test runner must find the same tests whatever second they start in.
        pytest.param(
            "open",
            NOW + timedelta(seconds=65),
            "{until}, 1 min 05 s",
            id="open for 65 seconds",
        ),
    ],
)
def test_when_a_call_may_pass_again_is_said_in_words(state: Any, until: datetime | None, text: str) -> None:
    assert open_until(state, until, NOW) == text.format(until=clock(until, NOW))


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


async def test_what_the_interface_refuses_is_reported_in_its_words(run: Run, stub: Stub) -> None:
    ran = await in_thread(run, "agents", "--api-key", "bw_no_no", "--json")
    assert (ran.code, ran.error["code"]) == (ExitCode.FAILED, "unauthorized")
    stub.answers["GET agents"] = (503, problem("unavailable", "the state cannot be read now: Redis is away"))
    ran = await in_thread(run, "agents")
    assert (ran.code, ran.out) == (ExitCode.UNREACHABLE, "")
    assert "Redis is away" in ran.err


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
