"""Each question against a small set of rows whose answer was computed beforehand."""

from collections.abc import AsyncGenerator
from datetime import timedelta
from decimal import Decimal

import pytest
import pytest_asyncio

from breakwater.kernel.clickhouse.client import Analytics
from breakwater.records import figures, rows, schema, search
from breakwater.records.figures import AgentSummary
from tests.records.samples import NOON, RATE_LIMITED, attempt, attempt_row, execution, new_database
from tests.server_sources import RunningServer

DAY = timedelta(days=1)

ATTEMPTS = [
    # w1: failed, retried, succeeded
    attempt("w1", 1, cost=500, outcome="error", error=RATE_LIMITED),
    attempt("w1", 2, cost=1_500, cause="retry"),
    # w2: breaker open, then a fallback whose cost nobody knows
    attempt("w2", 1, outcome="short_circuited", short_circuited=True, cost=None, input_tokens=None, output_tokens=None),
    attempt("w2", 2, model="mini", cause="fallback", cost=None, cost_basis="unknown"),
    # w3: everything failed, and one of the failures is an estimate
    attempt("w3", 1, cost=0, outcome="error", error=RATE_LIMITED),
    attempt("w3", 2, cost=7, cost_basis="estimated", outcome="worker_lost", cause="retry", output_tokens=None),
    # another agent, yesterday
    attempt("t1", 1, agent="tagger", model="mini", cost=10, started_at=NOON - DAY, cached_tokens=5),
    # an agent that is in the middle of its first job
    attempt("n1", 1, agent="new", model="mini", cost=None, cost_basis="unknown", outcome="error"),
]

EXECUTIONS = [
    execution(
        "w1", duration_ms=2_000, total_cost=2_000, attempts_count=2, wasted_cost=500, wasted_by_cause={"retry": 500}
    ),
    execution(
        "w2",
        duration_ms=300,
        total_cost=None,
        cost_basis="unknown",
        chosen_model="mini",
        requested_model_cost=5,
        completed_at=NOON + timedelta(seconds=61),
    ),
    execution(
        "w3",
        duration_ms=9_000,
        total_cost=7,
        status="dead_lettered",
        reason="error",
        error=RATE_LIMITED,
        wasted_cost=7,
        wasted_by_cause={"failed": 3, "retry": 4},
    ),
    execution("dry", duration_ms=1, dry_run=True, wasted_by_cause={"retry": 1}),
    execution(
        "t1",
        agent="tagger",
        duration_ms=50,
        total_cost=10,
        completed_at=NOON - DAY,
        wasted_cost=10**18 - 1,
        wasted_by_cause={"self_correction": 10**18 - 1},
    ),
]


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def filled(clickhouse_server: RunningServer, connections: dict[str, Analytics]) -> AsyncGenerator[Analytics]:
    """Every row stored twice, as after a redelivery, and merges stopped so that both copies stay. To be read only."""
    async with new_database(clickhouse_server.url, connections=connections) as analytics:
        for table in ("executions", "attempts"):
            await analytics.execute(f"SYSTEM STOP MERGES {analytics.database}.{table}")
        for _ in range(2):
            await analytics.insert(schema.ATTEMPTS, [attempt_row(one, n) for n, one in enumerate(ATTEMPTS)])
            await analytics.insert(schema.EXECUTIONS, [rows.execution_row(one, n) for n, one in enumerate(EXECUTIONS)])
        copies = await analytics.query("SELECT count() FROM attempts")
        assert copies.rows == ((2 * len(ATTEMPTS),),)
        yield analytics


async def test_agents_are_summed_up(filled: Analytics) -> None:
    new, tagger, writer = await figures.agent_summaries(filled)
    assert writer == AgentSummary(
        agent="writer",
        executions=3,
        succeeded=2,
        p50_ms=2_000,
        p95_ms=9_000,
        attempts=6,
        retries=2,
        fallbacks=1,
        short_circuits=1,
        unknown_costs=1,
        spend=2_007,
        wasted=507,
        answered=2,
        fell_back=1,
    )
    assert (writer.fallback_share, writer.fallback_cost_factor) == (0.5, None)
    assert writer.success_rate == pytest.approx(2 / 3)
    assert tagger == AgentSummary("tagger", 1, 1, 50, 50, 1, 0, 0, 0, 0, 10, 0, answered=1)
    # Failed calls of unknown cost: neither the spend nor the waste is zero.
    assert new == AgentSummary("new", 0, 0, None, None, 1, 0, 0, 0, 1, None, None)
    assert new.success_rate is None


async def test_agents_are_summed_up_since_a_time(filled: Analytics) -> None:
    assert [summary.agent for summary in await figures.agent_summaries(filled, since=NOON)] == ["new", "writer"]
    assert await figures.agent_summaries(filled, since=NOON + DAY) == ()


async def test_quantiles_are_exact(analytics: Analytics) -> None:
    durations = [100 * n for n in range(1, 101)]
    records = [execution(f"e{n}", duration_ms=duration) for n, duration in enumerate(durations)]
    await analytics.insert(schema.EXECUTIONS, [rows.execution_row(record, 1) for record in records])
    (summary,) = await figures.agent_summaries(analytics)
    assert (summary.p50_ms, summary.p95_ms) == (5_100, 9_600)


async def test_the_latest_executions_come_first_and_can_be_filtered(filled: Analytics) -> None:
    async def ids(**filters: object) -> list[str]:
        page = await search.search(filled, search.Filters(**filters))  # type: ignore[arg-type]
        return [line.execution_id for line in page.lines]

    assert await ids() == ["w2", "w3", "w1", "dry", "t1"]
    assert [line.execution_id for line in (await search.search(filled, search.Filters(), limit=1)).lines] == ["w2"]
    assert await ids(agent="tagger") == ["t1"]
    assert await ids(status="dead_lettered") == ["w3"]
    assert await ids(agent="writer", status="succeeded", since=NOON + timedelta(milliseconds=1)) == ["w2"]
    assert await ids(agent="nobody") == []


async def test_a_line_of_the_list_reports_cost_and_error(filled: Analytics) -> None:
    (line,) = (await search.search(filled, search.Filters(status="dead_lettered"))).lines
    assert (line.total_cost, line.cost_basis, line.reason, line.duration_ms) == (7, "billed", "error", 9_000)
    assert (line.error_message, line.completed_at) == (RATE_LIMITED.message, NOON)


async def test_one_execution_comes_with_its_attempts_in_order(filled: Analytics) -> None:
    found = await search.find_execution(filled, "w1")
    assert found is not None
    assert [(one.number, one.cost, one.outcome) for one in found.attempts] == [(1, 500, "error"), (2, 1_500, "success")]
    assert found.attempts[0].error == RATE_LIMITED


async def test_minutes_count_each_execution_once(filled: Analytics) -> None:
    found = await filled.query(
        "SELECT agent, minute, executions, succeeded, dead_lettered, attempts, cost, executions_of_unknown_cost"
        " FROM executions_per_minute ORDER BY agent, minute"
    )
    assert found.rows == (
        ("tagger", NOON - DAY, 1, 1, 0, 1, Decimal(10).scaleb(-9), 0),
        ("writer", NOON, 2, 1, 1, 3, Decimal(2_007).scaleb(-9), 0),
        ("writer", NOON + timedelta(minutes=1), 1, 1, 0, 1, None, 1),
    )


async def test_a_later_message_with_the_same_key_replaces_the_earlier_one(analytics: Analytics) -> None:
    later = rows.execution_row(execution("e1", output="later"), 8)
    earlier = rows.execution_row(execution("e1", output="earlier"), 7)
    await analytics.insert(schema.EXECUTIONS, [later])
    await analytics.insert(schema.EXECUTIONS, [earlier])
    found = await search.find_execution(analytics, "e1")
    assert found is not None
    assert found.output == "later"


async def test_a_job_id_that_ran_again_cost_again(analytics: Analytics) -> None:
    for day in (0, 40):
        at = NOON + day * DAY
        await analytics.insert(schema.EXECUTIONS, [rows.execution_row(execution("e1", completed_at=at), day)])
        await analytics.insert(schema.ATTEMPTS, [attempt_row(attempt("e1", started_at=at, cost=3), day)])
    (summary,) = await figures.agent_summaries(analytics)
    assert (summary.spend, summary.attempts) == (6, 2)
    found = await search.find_execution(analytics, "e1")
    assert found is not None
    assert found.completed_at == NOON + 40 * DAY
