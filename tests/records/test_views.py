"""Every view gives what Python computes from the same messages, though they are stored twice, in other batches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, get_args

import pytest
import pytest_asyncio

from breakwater.breakers.contract import BreakerTransition
from breakwater.jobs.contract.error_kinds import ErrorKind
from breakwater.jobs.contract.execution import Attempt, Cause, ErrorInfo, Execution, Waste
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.clickhouse.table import Table
from breakwater.records import rows, schema
from breakwater.records.migrations import VIEWS
from tests.records import samples, view_figures
from tests.records.view_figures import Figures
from tests.tables import each_row

MIDNIGHT = datetime.fromisoformat("2026-11-01T00:00:00Z")
MS = timedelta(milliseconds=1)


class Messages:
    """Some of every kind, around minutes, hours, midnight and the end of a month."""

    def __init__(self, seed: int, count: int) -> None:
        self._picked = random.Random(seed)
        self.executions = [self._execution(f"e{number}") for number in range(count)]
        self.attempts = [tried for one in self.executions for tried in one.attempts]

    def _moment(self) -> datetime:
        around = MIDNIGHT + timedelta(minutes=self._picked.randrange(-3, 3), hours=self._picked.choice((0, 0, 0, -1)))
        return around - MS * self._picked.choice((0, 1, self._picked.randrange(60_000)))

    def _money(self) -> int | None:
        return self._picked.choice((None, 0, 1, 10**17 - 1, self._picked.randrange(10**9)))

    def _attempt(self, execution_id: str, number: int, agent: str, tenant: str | None) -> Attempt:
        picked, moment = self._picked, self._moment()
        outcome = picked.choice(("success", "success", "error", "error", "short_circuited", "worker_lost"))
        kind = picked.choice(get_args(ErrorKind))
        error = ErrorInfo(kind=kind, class_="AnyError", message=f"{kind}, attempt {number} of {execution_id}")
        tokens = [picked.choice((None, 0, picked.randrange(2**40))) for _ in range(3)]
        submitted_by = picked.choice((None, "finance key"))
        deployment, key = picked.choice(((None, None), ("openai/m", None), ("openai/m#A", "A")))
        return samples.attempt(
            execution_id,
            number,
            agent=agent,
            tenant=tenant,
            submitted_by=submitted_by,
            user=picked.choice((None, "ada")),
            team=picked.choice((None, "search")),
            cost_tags={} if submitted_by is None else {"team": "growth", "project": agent},
            model=picked.choice(("gpt-4.1", "mini")),
            provider=picked.choice(("openai", "proxy")),
            deployment=deployment,
            provider_key=key,
            started_at=moment,
            duration_ms=picked.choice((0, picked.randrange(30_000))),
            outcome=outcome,
            short_circuited=outcome == "short_circuited",
            error=None if outcome == "success" else picked.choice((error, error, error, None)),
            cost=self._money(),
            cost_basis=picked.choice(("billed", "billed", "estimated", "unknown")),
            reserved=self._money(),
            reserved_at=picked.choice((None, moment, moment - MS, moment + timedelta(minutes=59))),
            input_tokens=tokens[0],
            output_tokens=tokens[1],
            cached_tokens=tokens[2],
            cause=picked.choice(get_args(Cause)),
            first_token_ms=picked.choice((None, 0, picked.randrange(20_000))),
            chunks=picked.choice((None, 1, 2, 500)),
        )

    def _execution(self, execution_id: str) -> Execution:
        picked = self._picked
        agent, tenant = picked.choice(("writer", "support/tier 1")), picked.choice((None, "acme"))
        attempts = [self._attempt(execution_id, n, agent, tenant) for n in range(1, picked.randrange(1, 5))]
        causes = picked.sample(get_args(Waste), picked.randrange(3))
        return samples.execution(
            execution_id,
            agent=agent,
            tenant=tenant,
            attempts=attempts,
            attempts_count=len(attempts),
            status=picked.choice(("succeeded", "succeeded", "dead_lettered", "cancelled")),
            chosen_model=picked.choice(("gpt-4.1", "mini", None)),
            requested_model_cost=picked.choice((None, 0, picked.randrange(10**6))),
            total_cost=self._money(),
            wasted_cost=self._money(),
            wasted_by_cause={cause: self._money() or 0 for cause in causes},
            cost_basis=picked.choice(("billed", "estimated", "unknown")),
            total_tokens=picked.randrange(2**40),
            completed_at=self._moment(),
            duration_ms=picked.randrange(10**6),
            cache_hit=picked.random() < 0.2,
            dry_run=picked.random() < 0.2,
        )


async def store_twice(analytics: Analytics, table: Table, everything: Sequence[rows.StoredRow], seed: int = 1) -> None:
    """As after a redelivery: the second time in other batches, and in another order."""
    picked = random.Random(seed)
    await analytics.execute(f"SYSTEM STOP MERGES {analytics.database}.{table.name}")
    for size in (len(everything) // 3 + 1, len(everything) // 2 + 2):
        for first in range(0, len(everything), size):
            await analytics.insert(table, everything[first : first + size])
        everything = picked.sample(everything, len(everything))
    (stored,) = (await analytics.query(f"SELECT count(), uniqExact(event_sequence) FROM {table.name}")).rows
    assert stored[0] > stored[1] == len(everything)


@pytest.fixture(scope="module")
def messages() -> Messages:
    return Messages(7, 400)


@pytest_asyncio.fixture(loop_scope="package")
async def filled(analytics: Analytics, messages: Messages) -> Analytics:
    attempts = [samples.attempt_row(one, number) for number, one in enumerate(messages.attempts)]
    await store_twice(analytics, schema.ATTEMPTS, attempts)
    executions = [rows.execution_row(one, number) for number, one in enumerate(messages.executions)]
    await store_twice(analytics, schema.EXECUTIONS, executions)
    return analytics


async def figures_of(analytics: Analytics, view: str, keys: int, where: str = "") -> Figures:
    """What a view reports, by the columns that it groups by."""
    found = await analytics.query(f"SELECT * FROM {view} {where}")
    figures: Figures = {}
    for row in found.rows:
        assert row[:keys] not in figures, f"{view} has two rows for {row[:keys]}"
        figures[row[:keys]] = dict(zip(found.columns[keys:], row[keys:], strict=True))
    return figures


async def merged(analytics: Analytics, *tables: str) -> Analytics:
    for table in tables:
        await analytics.execute(f"SYSTEM START MERGES {analytics.database}.{table}")
        await analytics.execute(f"OPTIMIZE TABLE {table} FINAL")
        (stored,) = (await analytics.query(f"SELECT count() = uniqExact(event_sequence) FROM {table}")).rows
        assert stored == (1,)
    return analytics


def same(found: Figures, expected: Figures) -> None:
    assert found.keys() == expected.keys()
    for key, figures in expected.items():
        assert found[key] == {name: pytest.approx(v) if isinstance(v, float) else v for name, v in figures.items()}, key


OF_EXECUTIONS: dict[str, tuple[int, str, Callable[[Iterable[Execution]], Figures]]] = {
    "executions_per_minute": (2, "minute", view_figures.executions_per_minute),
    "waste_per_minute": (3, "minute", view_figures.waste_per_minute),
    "retries_per_day": (2, "day", view_figures.retries_per_day),
}
OF_ATTEMPTS: dict[str, tuple[int, str, Callable[[Iterable[Attempt]], Figures]]] = {
    "attempts_per_minute": (4, "minute", view_figures.attempts_per_minute),
    "errors_per_minute": (5, "minute", view_figures.errors_per_minute),
    "provider_health": (4, "minute", view_figures.provider_health),
    "estimate_accuracy": (3, "day", view_figures.estimate_accuracy),
    "spend_per_hour": (4, "hour", view_figures.spend_per_hour),
    "cost_and_usage": (10, "ChargePeriodStart", view_figures.cost_and_usage),
}


async def test_views_tell_what_the_messages_say_however_often_they_are_stored(
    filled: Analytics, messages: Messages
) -> None:
    expected: dict[str, tuple[int, Figures]] = {}
    for name, (keys, _, work_out) in OF_EXECUTIONS.items():
        expected[name] = (keys, work_out(messages.executions))
    for name, (keys, _, of_attempts) in OF_ATTEMPTS.items():
        expected[name] = (keys, of_attempts(messages.attempts))
    for name, (keys, figures) in expected.items():
        assert len(figures) > 3, name
        same(await figures_of(filled, name, keys), figures)
    await merged(filled, "executions", "attempts")
    for name, (keys, figures) in expected.items():
        same(await figures_of(filled, name, keys), figures)


TIMES = {name: time for name, (_, time, _) in (OF_EXECUTIONS | OF_ATTEMPTS).items()}


@each_row("view", TIMES)
async def test_a_condition_on_the_time_gives_the_rows_that_it_is_true_of(filled: Analytics, view: str) -> None:
    keys, time = {name: (keys, time) for name, (keys, time, _) in (OF_EXECUTIONS | OF_ATTEMPTS).items()}[view]
    everything = await figures_of(filled, view, keys)
    later = await figures_of(filled, view, keys, f"WHERE {time} >= {since(view, '2026-11-01')}")
    edge: Any = MIDNIGHT.date() if time == "day" else MIDNIGHT
    at = list(filled_columns(view)).index(time)
    assert later == {key: figures for key, figures in everything.items() if key[at] >= edge}
    assert 0 < len(later) < len(everything)


def since(view: str, day: str) -> str:
    """A moment as SQL. Spelled as a text it would be right, too, but `spend_per_hour` would read everything."""
    return f"toDate('{day}')" if TIMES[view] == "day" else f"toDateTime('{day} 00:00:00', 'UTC')"


def filled_columns(view: str) -> tuple[str, ...]:
    """What a view groups by, in the order of its columns."""
    return {"executions_per_minute": ("agent", "minute")}.get(view, (TIMES[view],))


async def test_a_condition_on_the_time_reads_that_time_only(brand_new_analytics: Analytics) -> None:
    """Of months that are past, nothing is read."""
    analytics = brand_new_analytics
    tried: list[Sequence[object]] = []
    ended: list[Sequence[object]] = []
    for days in range(0, 60, 2):
        at = samples.NOON - timedelta(days=days)
        attempt = samples.attempt(f"e{days}", reserved=1, reserved_at=at, started_at=at)
        tried.append(samples.attempt_row(attempt, days))
        ended.append(rows.execution_row(samples.execution(f"e{days}", completed_at=at), days))
    await analytics.insert(schema.ATTEMPTS, tried)
    await analytics.insert(schema.EXECUTIONS, ended)
    for table in ("executions", "attempts"):
        await analytics.execute(f"OPTIMIZE TABLE {table} FINAL")
    for view, time in TIMES.items():
        everything = await granules(analytics, f"SELECT * FROM {view}")
        some_days = await granules(analytics, f"SELECT * FROM {view} WHERE {time} >= {since(view, '2026-11-20')}")
        assert (view, everything) == (view, 3)  # a part for each month
        assert (view, some_days) == (view, 1)


async def granules(analytics: Analytics, sql: str) -> int:
    return sum(row["marks"] for row in (await analytics.query(f"EXPLAIN ESTIMATE {sql}")).named_rows())


async def test_a_plan_is_one_row_with_its_cost_and_waste_however_often_its_jobs_are_stored(
    analytics: Analytics,
) -> None:
    costs = {"total_cost": 30, "wasted_cost": 10, "total_tokens": 5}
    jobs = [
        samples.execution("a", plan_id="p", **costs),
        samples.execution("b", plan_id="p", status="dead_lettered", cost_basis="estimated", **costs),
        samples.execution(
            "c", plan_id="p", status="cancelled", total_cost=None, cost_basis="unknown", attempts_count=0
        ),
        samples.execution("dry", plan_id="p", dry_run=True),
        samples.execution("d", plan_id="q", completed_at=MIDNIGHT, **costs),
        samples.execution("alone"),
    ]
    await store_twice(analytics, schema.EXECUTIONS, [rows.execution_row(one, n) for n, one in enumerate(jobs)])
    found = await figures_of(analytics, "plans", 3)
    assert found.keys() == {("p", "p", "partial"), ("q", "q", "succeeded")}
    assert found["p", "p", "partial"] == {
        "jobs": 3,
        "succeeded": 1,
        "dead_lettered": 1,
        "cancelled": 1,
        "attempts": 2,
        "tokens": 10,
        "cost": view_figures.usd(60),
        "wasted_cost": view_figures.usd(20),
        "jobs_of_unknown_cost": 1,
        "jobs_of_estimated_cost": 1,
        "first_queued_at": jobs[0].queued_at,
        "last_completed_at": jobs[0].completed_at,
    }


Story = list[tuple[str, str, str | None]]
"""Of a breaker: what it became, why, and by which rule."""


def some_story(picked: random.Random) -> Story:
    story: Story = []
    for number in range(picked.randrange(1, 12)):
        state = picked.choice(("closed", "open", "half_open", "isolated"))
        story.append((state, f"reason {number}", picked.choice((None, "errors", "probe_failed"))))
    return story


def openings(figures_of: Sequence[BreakerTransition]) -> list[tuple[Any, ...]]:
    """By walking along."""
    found: list[tuple[Any, ...]] = []
    opened: BreakerTransition | None = None
    for one in figures_of:
        if one.to_state != "closed":
            opened = opened or one
        elif opened is not None:
            found.append((one.agent, one.model, one.scope, opened.rule, opened.reason, opened.at, one.at))
            opened = None
    if opened is not None:
        found.append((opened.agent, opened.model, opened.scope, opened.rule, opened.reason, opened.at, None))
    return found


async def test_breaker_openings_are_those_that_one_finds_by_walking_along(analytics: Analytics) -> None:
    picked = random.Random(11)
    everything: list[BreakerTransition] = []
    expected: list[tuple[Any, ...]] = []
    for number in range(150):
        at, before, reported_of = samples.NOON, "closed", []
        for version, (state, reason, rule) in enumerate(some_story(picked), 1):
            # Some within one millisecond: their order is that of their versions.
            at += MS * picked.choice((0, 1, picked.randrange(10**7)))
            fields = {"from_state": before, "to_state": state, "reason": reason, "rule": rule, "at": at}
            name = f"breaker {number}"
            reported_of.append(samples.transition(version, transition_id=f"{name}#{version}", agent=name, **fields))
            before = state
        everything += reported_of
        expected += openings(reported_of)
    assert len(expected) > 100
    await store_twice(
        analytics,
        schema.BREAKER_TRANSITIONS,
        [rows.transition_row(one, number) for number, one in enumerate(everything)],
    )
    columns = "agent, model, scope, rule, reason, opened_at, closed_at"
    for _ in range(2):
        found = await analytics.query(f"SELECT {columns} FROM breaker_openings")
        assert sorted(found.rows, key=str) == sorted(expected, key=str)
        lasted = await analytics.query(
            "SELECT countIf(open_ms != dateDiff('millisecond', opened_at, closed_at)), countIf(closed_at IS NULL),"
            " minIf(open_ms, closed_at IS NULL) >= dateDiff('millisecond', max(opened_at), now64(3)) - 10000000"
            " FROM breaker_openings"
        )
        assert lasted.rows == ((0, sum(one[-1] is None for one in expected), 1),)
        await merged(analytics, "breaker_transitions")


async def test_what_a_breaker_does_until_it_closes_is_one_opening(analytics: Analytics) -> None:
    def after(seconds: int, version: int, state: str, reason: str, **fields: Any) -> rows.StoredRow:
        at = samples.NOON + timedelta(seconds=seconds)
        changed = samples.transition(version, to_state=state, reason=reason, at=at, **{"rule": None, **fields})
        return rows.transition_row(changed, version)

    await analytics.insert(
        schema.BREAKER_TRANSITIONS,
        [
            after(0, 1, "open", "3 failures in a row", rule="consecutive_failures"),
            after(60, 2, "half_open", "the cool-down is over"),
            after(61, 3, "open", "the probe failed", rule="probe_failed"),
            after(70, 4, "isolated", "by ops", by="ops"),
            after(100, 5, "closed", "reset by ops", by="ops"),
            after(200, 6, "isolated", "for the night", by="ops"),
            after(300, 7, "closed", "reset by ops", by="ops"),
            after(400, 8, "open", "5 errors", rule="errors"),
            after(460, 9, "half_open", "it waits for a call to try it"),
        ],
    )
    found = await analytics.query(
        "SELECT rule, reason, dateDiff('second', opened_at, closed_at), state FROM breaker_openings ORDER BY opened_at"
    )
    assert found.rows == (
        ("consecutive_failures", "3 failures in a row", 100, "closed"),
        (None, "for the night", 100, "closed"),
        ("errors", "5 errors", None, "half_open"),
    )


def test_every_view_is_tested() -> None:
    tested_elsewhere = {"figures_per_minute"}  # in test_anomalies.py
    assert VIEWS.keys() == TIMES.keys() | {"incidents", "breaker_openings", "plans"} | tested_elsewhere


async def test_a_condition_on_the_minute_skips_what_lies_within_the_same_month(analytics: Analytics) -> None:
    """The sorting key begins with the hour, which ClickHouse can't derive from a minute; an index can."""
    ddl = schema.ATTEMPTS.ddl().replace("attempts", "fine", 1).replace("SETTINGS ", "SETTINGS index_granularity = 16, ")
    await analytics.execute(ddl)
    many = Table("fine", schema.ATTEMPTS.columns, order_by=("attempt_id",), time="started_at")
    rows_of_a_week = [
        samples.attempt_row(samples.attempt(f"e{number}", started_at=samples.NOON - timedelta(minutes=10 * number)), 1)
        for number in range(1_000)
    ]
    await analytics.insert(many, rows_of_a_week)
    by_minute = "SELECT toStartOfMinute(started_at) AS minute, count() FROM fine FINAL"
    asked = f"{by_minute} WHERE minute >= toDateTime('2026-11-21 00:00:00', 'UTC') GROUP BY minute"
    everything, half_a_day = await granules(analytics, f"{by_minute} GROUP BY minute"), await granules(analytics, asked)
    assert everything > 50
    assert half_a_day < everything / 5
