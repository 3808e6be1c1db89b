"""Plans of changed configs over the HTTP API: on a record in ClickHouse, in a process of their own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import pytest
import pytest_asyncio
from pydantic import SecretStr

from breakwater.config import parse_config
from breakwater.config.store import Configs
from breakwater.kernel.redis.connection import Redis
from breakwater.kernel.types import format_time
from breakwater.records import rows, schema
from breakwater.replay.api import Planner
from breakwater.replay.child import NICENESS
from tests.helpers import until
from tests.records.samples import NOON, attempt, attempt_row, execution, new_database, url_of
from tests.server_sources import RunningServer
from tests.services.request.conftest import CONFIG, Answer, HttpApi, SharedApis

JOBS = 6
CHANGED = CONFIG.replace("writer: {}", "writer: {budget: {daily_usd: 0.0035, enforcement: hard}}").replace(
    "agents:", "models: {m: {price: {input_usd_per_mtok: 1, output_usd_per_mtok: 1}}}\nagents:"
)


@dataclass(frozen=True, slots=True)
class Planned:
    """An HTTP API whose record has six jobs of the agent `writer`, which cost $0.001 each."""

    api: HttpApi
    redis: Redis
    planner: Planner

    async def ask(self, **fields: Any) -> Answer:
        body = {"since": format_time(NOON - timedelta(hours=1)), "until": format_time(NOON + timedelta(hours=1))}
        return await self.api.act("config/plan", **{**body, **fields})

    async def lines(self, **fields: Any) -> list[Any]:
        answer = await self.ask(**fields)
        assert answer.status == 200, answer.body
        return [json.loads(line) for line in answer.body.splitlines()]


@pytest_asyncio.fixture(loop_scope="package")
async def planned(
    shared_apis: SharedApis, redis: Redis, redis_server: RunningServer, clickhouse_server: RunningServer
) -> AsyncGenerator[Planned]:
    shared = await shared_apis.get(CONFIG, redis_server.url)
    planner = shared.service._needs.planner
    async with new_database(clickhouse_server.url) as analytics, shared.visit() as api:
        planner.clickhouse_url = SecretStr(url_of(analytics, clickhouse_server))
        begins = [NOON + timedelta(minutes=number) for number in range(JOBS)]
        stored = [
            execution(
                f"j{number}",
                requested_model="m",
                chosen_model="m",
                fallback_chain=("m",),
                completed_at=at + timedelta(seconds=1),
                attempts=(attempt(f"j{number}", model="m", started_at=at, reserved_at=at, reserved=1_000_001),),
            )
            for number, at in enumerate(begins)
        ]
        await analytics.insert(schema.EXECUTIONS, [rows.execution_row(record, 1) for record in stored])
        await analytics.insert(schema.ATTEMPTS, [attempt_row(one, 1) for record in stored for one in record.attempts])
        yield Planned(api, redis, planner)


async def test_the_report_says_what_the_changed_config_would_have_done(planned: Planned) -> None:
    version = parse_config(CHANGED).version
    await Configs(planned.redis).save({version: CHANGED}, agents=["writer"], retired={})
    first, *_, last = await planned.lines(version=version)
    assert first == {"progress": 0.0, "jobs": 0}
    report = last["report"]
    assert (report["jobs"], report["newly_refused"]["after"]) == (JOBS, 3)
    assert report["summary"][:2] == [
        "3 more of 6 jobs would have been refused",
        "spend −50 % ($0.00600 → $0.00300)",
    ]
    assert sum(step["planned_refused"] for step in report["over_time"]) == 3
    assert {job["after"] for job in report["most_changed"]} == {"budget_exceeded"}


async def test_what_is_wrong_with_a_request_or_a_config_is_said_with_its_place(planned: Planned) -> None:
    wrong = await planned.ask(config="agents:\n  writer: {modle: m}\n")
    assert (wrong.status, wrong.code) == (422, "invalid_config")
    assert "agents.writer.modle: is not a known setting; did you mean 'model'? (line 2)" in wrong.message
    assert (await planned.ask(config=CHANGED, version="v")).code == "invalid_request"
    assert (await planned.ask(config=CHANGED, until=format_time(NOON - timedelta(days=1)))).code == "invalid_request"
    assert (await planned.ask(version="gone")).code == "unknown_version"
    renamed = await planned.ask(config=CHANGED, renames={"writer": "wirter"})
    assert (renamed.status, renamed.code) == (422, "unknown_agent")
    assert "has no agent 'wirter'; did you mean 'writer'?" in renamed.message


async def test_jobs_of_a_renamed_agent_are_those_of_its_new_name(planned: Planned) -> None:
    config = CHANGED.replace("writer:", "author:")
    for agent in (None, "writer", "author"):
        *_, last = await planned.lines(config=config, renames={"writer": "author"}, agent=agent)
        assert (last["report"]["jobs"], last["report"]["newly_refused"]["after"]) == (JOBS, 3)
    *_, last = await planned.lines(config=config, unknown="exclude")
    assert (last["report"]["jobs"], last["report"]["left_out"]) == (0, JOBS)


async def test_one_plan_runs_at_a_time_and_ends_with_its_reader(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A server that accepts connections and says nothing: the plan waits for it.
    silent = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    monkeypatch.setattr(planned.planner, "clickhouse_url", SecretStr(f"http://127.0.0.1:{port}/breakwater"))
    monkeypatch.setenv("BREAKWATER_REDIS_URL", "redis://:secret@127.0.0.1")
    reading = asyncio.create_task(planned.ask(config=CHANGED))

    def plans() -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if "breakwater.replay.child" in child.cmdline()]

    async def one_runs() -> bool:
        return len(plans()) == 1

    async def none_runs() -> bool:
        return not plans()

    async def gives_way() -> bool:  # also where these tests do
        return process.nice() == min(19, psutil.Process().nice() + NICENESS)

    await until(one_runs)
    [process] = plans()
    assert (await planned.ask(config=CHANGED)).code == "too_many_config_plans"
    assert not [name for name in process.environ() if name.startswith("BREAKWATER_")]
    await until(gives_way)
    reading.cancel()
    await until(none_runs)
    silent.close()
