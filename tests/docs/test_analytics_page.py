"""Every query of docs/analytics.md and docs/costs.md runs as it is there, on the real engine, and finds something."""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from breakwater.config import parse_config
from breakwater.jobs.contract.execution import Attempt, Execution
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.records import rows, schema
from breakwater.records.migrations import VIEWS
from breakwater.records.settings import RetentionDays
from tests.docs.markdown import ROOT, Block, blocks
from tests.docs.markdown import rows as table_rows
from tests.records import samples
from tests.server_sources import RunningServer

PAGE = ROOT / "docs" / "analytics.md"
QUERIES = [block for block in blocks(PAGE) if block.language == "sql" and not block.text.startswith("CREATE")]
COSTS = ROOT / "docs" / "costs.md"
OF_COSTS = [block for block in blocks(COSTS) if block.language == "sql"]
AGENT = "content-writer"


def a_job(identity: str, at: datetime) -> tuple[Execution, list[Attempt]]:
    """One that failed, was retried, refused, and fell back to a model that answered."""
    began = at - timedelta(seconds=9)
    names: dict[str, Any] = {"agent": AGENT, "tenant": "acme", "started_at": began}
    failed = {"outcome": "error", "error": samples.RATE_LIMITED}
    charged = {"reserved": 9_000_000, "reserved_at": at}
    streamed = {"first_token_ms": 300, "chunks": 20}
    attempts = [
        samples.attempt(identity, 1, **names, **failed, **charged),
        samples.attempt(identity, 2, **names, **failed, **charged, cause="retry"),
        samples.attempt(
            identity,
            3,
            **names,
            outcome="short_circuited",
            short_circuited=True,
            refused_by=f"agent:{AGENT}/daily",
            error=samples.RATE_LIMITED.model_copy(update={"kind": "budget_exceeded"}),
            cost=0,
            cause="retry",
        ),
        samples.attempt(identity, 4, **names, **charged, model="gpt-4.1-mini", cause="fallback", **streamed),
    ]
    record = samples.execution(
        identity,
        agent=AGENT,
        tenant="acme",
        completed_at=at,
        attempts=attempts,
        attempts_count=4,
        chosen_model="gpt-4.1-mini",
        requested_model_cost=500_000,
        total_cost=3_000_003,
        wasted_cost=2_000_002,
        wasted_by_cause={"retry": 1_000_001, "fallback": 1_000_001},
    )
    return record, attempts


async def seed(analytics: Analytics) -> None:
    """Stores jobs of now and yesterday.

    Whatever midnight comes between the seeds and the query, there are rows on both sides.
    """
    now = datetime.now(UTC)
    for identity, at in (("order-4711", now), ("order-4710", now - timedelta(days=1))):
        record, attempts = a_job(identity, at)
        lost = samples.execution(
            f"{identity}-lost", agent=AGENT, completed_at=at, status="dead_lettered", error=samples.RATE_LIMITED
        )
        stored = [rows.execution_row(one, number) for number, one in enumerate((record, lost))]
        await analytics.insert(schema.EXECUTIONS, stored)
        await analytics.insert(schema.ATTEMPTS, [samples.attempt_row(one, one.number) for one in attempts])
    opened, closed = (
        samples.transition(version, agent=AGENT, to_state=state, at=now - timedelta(hours=hours))
        for version, state, hours in ((1, "open", 3), (2, "closed", 2))
    )
    await analytics.insert(schema.BREAKER_TRANSITIONS, [rows.transition_row(opened, 1), rows.transition_row(closed, 2)])
    crossed = samples.budget_event(agent=AGENT, window="monthly", period=f"{now:%Y-%m}", limit="120", at=now)
    await analytics.insert(schema.BUDGET_EVENTS, [rows.budget_row(crossed, 1)])


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def seeded(clickhouse_server: RunningServer) -> AsyncGenerator[Analytics]:
    """A database for tests that only read: to create one takes 0.1 s."""
    async with samples.new_database(clickhouse_server.url) as database:
        await seed(database)
        yield database


@pytest_asyncio.fixture(loop_scope="package")
async def analytics(clickhouse_server: RunningServer) -> AsyncGenerator[Analytics]:
    async with samples.new_database(clickhouse_server.url) as found:
        yield found


async def test_every_query_runs_as_it_stands_there_and_finds_something(seeded: Analytics) -> None:
    assert len(QUERIES) > 15
    for page, block in (*((PAGE, one) for one in QUERIES), *((COSTS, one) for one in OF_COSTS)):
        found = await seeded.query(block.text)
        where = f"{page.name}, line {block.line}:\n{block.text}"
        assert len(found.rows) > 0, f"no row: {where}"
        assert any(value is not None for row in found.rows for value in row), f"nothing but NULL: {where}"


def asked(words: str) -> Block:
    (found,) = [block for block in QUERIES if words in block.text]
    return found


async def test_what_an_agent_wasted_yesterday_and_on_what_is_one_query(seeded: Analytics) -> None:
    found = await seeded.query(asked("minute >= yesterday() AND minute < today()").text)
    assert [(cause, str(usd), jobs) for cause, usd, jobs in found.rows] == [
        (cause, "0.001000001", 1) for cause, *_ in sorted(found.rows)
    ]
    assert {cause for cause, *_ in found.rows} == {"retry", "fallback"}


async def test_the_share_and_the_cost_of_fallbacks_are_those_of_the_records(seeded: Analytics) -> None:
    (row,) = (await seeded.query(asked("AS times_the_cost").text)).named_rows()
    assert row == {"agent": AGENT, "percent_on_fallbacks": 100, "times_the_cost": pytest.approx(2.000002)}


async def test_jobs_that_were_cancelled_did_not_fail(analytics: Analytics) -> None:
    await seed(analytics)
    lines = [
        samples.execution(f"c{n}", agent=AGENT, completed_at=datetime.now(UTC), status="cancelled") for n in (1, 2)
    ]
    await analytics.insert(schema.EXECUTIONS, [rows.execution_row(one, 9) for one in lines])
    (row,) = (await analytics.query(asked("AS succeeded_percent").text)).named_rows()
    assert (row["jobs"], row["failed"], row["succeeded_percent"]) == (4, 1, 50.0)


async def test_what_is_said_of_estimates_are_columns_of_their_query(seeded: Analytics) -> None:
    query = asked("FROM estimate_accuracy")
    above = PAGE.read_text().splitlines()[query.line - 4 : query.line - 1]
    named = re.findall(r"`(\w+)`", " ".join(above))
    assert len(named) == 2
    assert set(named) <= set((await seeded.query(query.text)).columns)


async def test_the_forecast_goes_on_as_the_month_began(analytics: Analytics) -> None:
    """On the 11th, after ten days of 12 dollars: 360 in the 30 days of November, and the cap of 120 is reached now."""
    text = asked("cap_reached_at").text.replace("now(zone)", "toDateTime('2026-11-11 00:00:00', zone)")
    text = text.replace("now()", "toDateTime('2026-11-11 00:00:00', zone)")
    for day in range(10):
        at = datetime(2026, 11, 1 + day, 12, tzinfo=UTC)
        tried = samples.attempt(f"e{day}", agent=AGENT, cost=12 * 10**9, started_at=at)
        await analytics.insert(schema.ATTEMPTS, [samples.attempt_row(tried, day)])
    (row,) = (await analytics.query(text)).named_rows()
    assert (row["spent"], row["left_over"], row["forecast"]) == (120, 0, 360.0)
    assert abs(row["cap_reached_at"] - datetime(2026, 11, 11, tzinfo=UTC)) <= timedelta(seconds=1)
    (row,) = (await analytics.query(text.replace("WITH 120 AS cap", "WITH 1000 AS cap"))).named_rows()
    assert (row["left_over"], row["cap_reached_at"]) == (880, None)


async def test_statements_for_administrators_are_ones_that_clickhouse_can_read(seeded: Analytics) -> None:
    (block,) = [block for block in blocks(PAGE) if block.text.startswith("CREATE USER")]
    for statement in block.text.split(";\n"):
        await seeded.query(f"EXPLAIN AST {statement}")


async def test_the_export_is_a_parquet_file(seeded: Analytics, clickhouse_server: RunningServer, tmp_path: Any) -> None:
    (block,) = [block for block in blocks(PAGE) if block.text.startswith("curl")]
    at = urlsplit(clickhouse_server.url)
    text = block.text.replace("reader", at.username or "").replace("PASSWORD", at.password or "")
    text = text.replace("PORT", str(at.port)).replace("127.0.0.1", at.hostname or "")
    text = text.replace("database=breakwater", f"database={seeded.database}")
    ran = await asyncio.to_thread(
        subprocess.run, ["sh", "-eu"], input=text, cwd=tmp_path, text=True, capture_output=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    exported = (tmp_path / "executions.parquet").read_bytes()
    assert exported[:4] == exported[-4:] == b"PAR1"


def test_all_tables_and_views_are_named_with_their_time() -> None:
    tables = {name.strip("`"): time.strip("`") for name, _, time in table_rows(PAGE, "table")}
    assert tables == {table.name: table.time for table in schema.TABLES}
    assert {name.strip("`") for name, *_ in table_rows(PAGE, "view")} == VIEWS.keys()


async def test_a_view_has_the_columns_that_it_is_said_to_have(seeded: Analytics) -> None:
    for view, by, reports in table_rows(PAGE, "view"):
        found = await seeded.query(f"DESCRIBE TABLE {view.strip('`')}")
        named = re.findall(r"`(\w+)`", f"{by} {reports}")
        assert set(named) <= {row[0] for row in found.rows}, view


def test_the_settings_are_the_defaults() -> None:
    (shown,) = [block.text for block in blocks(PAGE) if "retention_days" in block.text]
    config = parse_config("providers: {p: {base_url: 'http://x'}}\nagents: {a: {model: m}}\n" + shown)
    assert config.clickhouse.retention_days == RetentionDays()
    assert all(str(days) in shown for days in RetentionDays().model_dump().values())
