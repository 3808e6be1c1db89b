"""Commands that know the HTTP API alone, by URL and key: they print what they print with the addresses of servers."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from breakwater.client.commands import Api
from breakwater.config import parse_config
from breakwater.config.servers import bus_plan
from breakwater.identity.api_keys import create_key
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.commands import output
from breakwater.kernel.commands.errors import ExitCode
from breakwater.kernel.nats.provision import provision
from breakwater.local.ports import free_port
from breakwater.records import rows, schema
from breakwater.records.commands import record_source, tail
from tests.commands import run_command
from tests.helpers import until
from tests.records import samples
from tests.records.samples import NOON, attempt, attempt_row, execution
from tests.server_sources import RunningServer
from tests.services.request.conftest import CONFIG, HttpApi, publish_alert, running, settings_for
from tests.services.request.test_events import attempted, one_of_each
from tests.tables import each_row

IN_PAGE = 50
"""Executions in a page, which are fewer than the API has."""
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
    *(
        execution(f"old-{number:04}", completed_at=NOON - timedelta(minutes=number + 1))
        for number in range(IN_PAGE + 10)
    ),
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
        nats_url = self.api.settings.nats_url.get_secret_value()
        variables = {"BREAKWATER_CLICKHOUSE_URL": self.clickhouse_url, "BREAKWATER_NATS_URL": nats_url}
        return await self.run(variables, *arguments)


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
    ("--limit", str(IN_PAGE + 14), "--json"),
    ("--status", "dead_lettered"),
    ("--agent", "nobody"),
    ("--since", "2026-11-21T12:00:00Z", "--plan", "p"),
    ("--runs", "--json"),
    ("--run", "research"),
    ("egg",),
    ("a/b", "--json"),
    ("failed", "--tree", "--json"),
    ("hen", "--tree"),
]
"""Each kind of list as JSON, which has every field; the table is printed from the same records."""


@each_row("arguments", LISTS)
async def test_executions_by_url_and_key_alone_print_what_they_print_from_clickhouse(
    plane: TwoWays, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    largest_page = await plane.api.ask("GET", f"/api/v1/executions?limit={record_source.MOST_IN_PAGE}")
    assert largest_page.status == 200, largest_page.body
    monkeypatch.setattr(record_source, "MOST_IN_PAGE", IN_PAGE)
    by_server = await plane.by_server("executions", *arguments)
    by_url = await plane.by_url("executions", *arguments)
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


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def stored_events(plane: TwoWays) -> None:
    await publish_alert(plane.api, "guard_tripped/acme/t1")
    await one_of_each(plane.api)
    for number in range(250):
        await attempted(plane.api, f"many-{number}", message="slow down" if number % 2 else "")
    await publish_alert(plane.api, "guard_tripped/acme/t2")


LATER = "2030-01-01T00:00:00Z"


@pytest.mark.usefixtures("stored_events")
@each_row("options", [(), ("--agent", "writer"), ("--events", "executions,alerts"), ("--since", LATER)])
async def test_tail_by_url_and_key_alone_prints_what_it_prints_from_nats(
    plane: TwoWays, options: tuple[str, ...]
) -> None:
    command = ("tail", "--since", "1h", "--no-follow", *options)
    by_server, by_url = await plane.by_server(*command), await plane.by_url(*command)
    assert by_server.returncode == 0, by_server.stderr
    assert (by_url.stdout, by_url.stderr, by_url.returncode) == (by_server.stdout, "", 0)
    expected, printed = [
        [json.loads(line) for line in (await way(*command, "--json")).stdout.splitlines()]
        for way in (plane.by_server, plane.by_url)
    ]
    assert options or len(expected) > 250
    for event, sent in zip(expected, printed, strict=True):
        if event["type"] != "breakwater.Execution":
            assert sent == event
        else:
            assert sent | {"data": None} == event | {"data": None}
            assert {"output", "messages"}.isdisjoint(sent["data"])


async def test_tail_by_url_refuses_progress_and_names_the_missing_variable(plane: TwoWays) -> None:
    ran = await plane.by_url("tail", "--events", "progress")
    assert ran.returncode == ExitCode.USAGE
    assert "Set BREAKWATER_NATS_URL" in ran.stderr
    ran = await plane.by_url("tail", "--events", "progress,guards", "--since", LATER, "--no-follow")
    assert (ran.returncode, ran.stderr) == (0, "the HTTP API has no progress; BREAKWATER_NATS_URL shows it\n")


async def test_tail_by_url_shows_new_events_and_goes_on_where_a_broken_connection_ended(
    plane: TwoWays, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, notes, places = list[str](), list[str](), list[str | None]()

    def show(*cells: output.Cell) -> None:
        shown.append("".join(map(output.text_of, cells)))

    monkeypatch.setattr(output, "print_styled", show)
    monkeypatch.setattr(output, "note", notes.append)
    monkeypatch.setattr(tail, "RECONNECT_S", 0.01)
    upstream = plane.api

    async def cut_off(request: web.Request) -> web.StreamResponse:
        """Passes on the live stream, and breaks the first connection after its first event."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        passed_on = request.headers.keys() & {"Authorization", "Last-Event-ID"}
        headers = {name: request.headers[name] for name in passed_on}
        async with upstream.http.get(upstream.url + request.path_qs, headers=headers) as source:
            places.append(request.headers.get("Last-Event-ID"))
            async for chunk in source.content.iter_any():
                await response.write(chunk)
                if len(places) == 1 and b"event: attempts" in chunk:
                    assert request.transport is not None
                    request.transport.abort()
                    break
        return response

    app = web.Application()
    app.router.add_get("/api/v1/events", cut_off)
    async with TestServer(app) as server:
        api = Api(str(server.make_url("/")), plane.key, None, as_json=False)
        tailing = asyncio.create_task(tail.tail_api(api, None, ["attempts"], None, follow=True))
        await until(lambda: len(places) == 1)
        await attempted(upstream, "live-1")
        await until(lambda: len(shown) == 1)
        await attempted(upstream, "live-2")
        await until(lambda: len(shown) == 2)
        tailing.cancel()
    assert notes == ["waiting for events; Ctrl-C ends", "connection lost", "connected again"]
    assert places[0] is None
    assert places[1] is not None


async def test_figures_of_agents_come_without_what_does_not_answer(plane: TwoWays) -> None:
    path = "/api/v1/agents/figures?since=2026-11-01T00:00:00Z"
    whole = (await plane.api.ask("GET", path)).json
    figures = {agent["agent"]: agent for agent in whole["agents"]}
    assert (figures["tagger"]["executions"], figures["tagger"]["success_rate"]) == (1, 0.0)
    assert (whole["missing"], whole["spent_today"] is None) == ([], False)
    fields = plane.api.settings.model_dump() | {"clickhouse_url": f"http://127.0.0.1:{free_port()}/breakwater"}
    settings = type(plane.api.settings).model_validate(fields | {"http_port": free_port()})
    async with running(settings, parse_config(CONFIG), plane.key) as api:
        part = (await api.ask("GET", path)).json
    assert (part["agents"], part["spent_today"] is None) == (None, False)
    assert [reason.partition(":")[0] for reason in part["missing"]] == ["ClickHouse does not answer"]
