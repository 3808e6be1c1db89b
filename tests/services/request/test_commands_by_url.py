"""Commands that know the HTTP API alone, by URL and key: they print what they print with the addresses of servers."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import pytest_asyncio

from breakwater.config import parse_config
from breakwater.identity.api_keys import create_key
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.nats.provision import provision
from breakwater.local.commands.setup import bus_plan
from breakwater.records import rows, schema
from tests.commands import run_command
from tests.records import samples
from tests.records.samples import NOON, attempt, attempt_row, execution
from tests.server_sources import RunningServer
from tests.services.request.conftest import CONFIG, HttpApi, running, settings_for
from tests.tables import each_row

ENDED = [
    execution("root", total_cost=1_000, completed_at=NOON + timedelta(seconds=9), duration_ms=9_000, run_id="research"),
    execution("a/b", parent_execution_id="root", total_cost=0, cache_hit=True, run_id="research", output="hallå"),
    execution(
        "failed",
        agent="tagger",
        parent_execution_id="a/b",
        status="dead_lettered",
        reason="timeout",
        total_cost=None,
        cost_basis="unknown",
        chosen_model=None,
        run_id="research",
        queued_at=NOON - timedelta(seconds=5),
    ),
    execution(
        "egg", parent_execution_id="hen", attempts=(attempt("egg", outcome="error", error=samples.RATE_LIMITED),)
    ),
    *(execution(f"old-{number:04}", completed_at=NOON - timedelta(minutes=number + 1)) for number in range(1_100)),
]


@dataclass(frozen=True, slots=True)
class TwoWays:
    """A plane that commands reach by its servers or by its HTTP API."""

    api: HttpApi
    analytics: Analytics
    key: str
    clickhouse_url: str
    empty_directory: Path

    async def run(self, variables: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
        return await asyncio.to_thread(run_command, *arguments, environment=variables, directory=self.empty_directory)

    async def by_url(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return await self.run({"BREAKWATER_URL": self.api.url, "BREAKWATER_API_KEY": self.key}, *arguments)

    async def by_server(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return await self.run({"BREAKWATER_CLICKHOUSE_URL": self.clickhouse_url}, *arguments)


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def plane(
    module_nats_server: RunningServer,
    redis_server: RunningServer,
    clickhouse_server: RunningServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncGenerator[TwoWays]:
    directory = tmp_path_factory.mktemp("commands")
    config = parse_config(CONFIG)
    await provision(module_nats_server.url, bus_plan(config))
    settings = settings_for(module_nats_server.url, redis_server.url, directory)
    key = create_key(settings.api_keys_file, "tests")
    async with samples.new_database(clickhouse_server.url) as analytics:
        await analytics.insert(schema.EXECUTIONS, [rows.execution_row(record, 1) for record in ENDED])
        await analytics.insert(schema.ATTEMPTS, [attempt_row(one, 1) for record in ENDED for one in record.attempts])
        url = f"{clickhouse_server.url.rstrip('/')}/{analytics.database}"
        with_database = type(settings).model_validate(settings.model_dump() | {"clickhouse_url": url})
        async with running(with_database, config, key) as api:
            yield TwoWays(api, analytics, key, url, tmp_path_factory.mktemp("empty"))


LISTS = [
    (),
    ("--limit", "1104"),
    ("--status", "dead_lettered"),
    ("--agent", "nobody"),
    ("--since", "2026-11-21T12:00:00Z", "--plan", "p"),
    ("--runs",),
    ("--runs", "--agent", "tagger"),
    ("--run", "research"),
    ("root",),
    ("egg",),
    ("a/b",),
    ("failed", "--tree"),
    ("hen", "--tree"),
]


@each_row("arguments", LISTS)
async def test_executions_by_url_and_key_alone_print_what_they_print_from_clickhouse(
    plane: TwoWays, arguments: tuple[str, ...]
) -> None:
    for form in ((), ("--json",)):
        by_server = await plane.by_server("executions", *arguments, *form)
        by_url = await plane.by_url("executions", *arguments, *form)
        assert by_server.returncode == 0, by_server.stderr
        assert (by_url.stdout, by_url.stderr, by_url.returncode) == (by_server.stdout, by_server.stderr, 0)


@each_row("arguments", [("--run", "nobody"), ("nobody", "--tree"), ("nobody",)])
async def test_an_unknown_execution_by_url_is_refused_as_it_is_from_clickhouse(
    plane: TwoWays, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr("breakwater.records.commands.executions.RECORD_TIMEOUT_S", 0)
    by_server = await plane.by_server("executions", *arguments)
    by_url = await plane.by_url("executions", *arguments)
    assert (by_url.stdout, by_url.stderr, by_url.returncode) == ("", by_server.stderr, 1)
