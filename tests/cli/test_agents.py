"""`breakwater agents`, against a stub of the HTTP interface."""

from __future__ import annotations

import pytest

from breakwater.kernel.commands.errors import ExitCode
from tests.api_documents import health
from tests.cli.api_stub import Stub
from tests.cli.conftest import Run, in_thread

AGENTS = [health("writer", "degraded") | {"told_in_a_later_version": True}, health("tool")]


@pytest.fixture
def stub(stub: Stub) -> Stub:
    stub.answers["GET agents"] = (200, AGENTS)
    return stub


async def test_a_field_of_a_later_version_is_passed_on_as_json(run: Run, stub: Stub) -> None:
    assert (await in_thread(run, "agents", "--json")).json == AGENTS


async def test_figures_that_nobody_knows_are_said_to_be_missing(run: Run, stub: Stub) -> None:
    missing = ["ClickHouse does not answer", "Redis does not answer"]
    stub.answers["GET agents/figures"] = (200, {"agents": None, "spent_today": None, "missing": missing})
    ran = await in_thread(run, "agents", "--since", "1h")
    assert ran.code == ExitCode.UNREACHABLE
    assert "ClickHouse does not answer" in ran.err
    assert "Redis" in ran.err
    assert ran.out.splitlines()[1].split()[:2] == ["writer", "degraded"]


async def test_a_service_that_is_down_is_reported_with_its_address_and_what_to_do(run: Run, stub: Stub) -> None:
    ran = await in_thread(run, "agents", "--url", "http://127.0.0.1:9")
    assert ran.code == ExitCode.UNREACHABLE
    assert "no server at http://127.0.0.1:9" in ran.err
    assert "breakwater doctor" in ran.err
