"""Messages to store: the plain ones, and ones with every field filled."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

from breakwater.alerts.contract import Alert
from breakwater.breakers.contract import BreakerTransition
from breakwater.identity.contract import AuditEvent
from breakwater.jobs.contract.execution import Attempt, ErrorInfo, Execution, FailureStatistics
from breakwater.jobs.contract.plans import PlanChange
from breakwater.kernel.clickhouse.client import Analytics, connect
from breakwater.kernel.clickhouse.errors import QueryError
from breakwater.limits.contract import BudgetEvent, GuardEvent, LimitEvent
from breakwater.records import rows
from breakwater.records.migrations import migrate
from breakwater.records.schema import CLOSED_SPEND, TABLES
from tests.server_sources import RunningServer

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)

RATE_LIMITED = ErrorInfo(
    kind="rate_limit",
    class_="RateLimitError",
    message="slow down: “zu viele Anfragen”",
    status_code=429,
    retryable=True,
    hash="1a2b3c4d",
    user_message="The model is busy.",
)


_emptied: dict[str, list[tuple[str, object, object]]] = {}
"""Databases to be used again, by server, with the marks and the statements of their schema: a new one takes 0.3 s."""

_MARKED_AFTER = timedelta(seconds=2)
"""Marks tell changes of a schema apart by the second that they were made in."""


@asynccontextmanager
async def new_database(
    server_url: str, *, brand_new: bool = False, connections: dict[str, Analytics] | None = None
) -> AsyncGenerator[Analytics]:
    """A database of its own on a shared server, with the tables, all empty.

    Args:
        server_url: the server.
        brand_new: never used before, nor again: for tests of how rows lie on the disk.
        connections: by the URLs of databases, kept open for other tests in the same event loop. To connect takes 20 ms
            of CPU.
    """
    emptied = [] if brand_new else _emptied.setdefault(server_url, [])
    url, marks, statements = emptied.pop() if emptied else (new_database_url(server_url), None, None)
    analytics = (connections or {}).pop(url, None) or connect(url)
    if statements is None:
        await migrate(analytics)
        if not brand_new:
            statements = await _statements(analytics)
    kept = False
    try:
        yield analytics
    finally:
        marks_now = None if brand_new else await empty(analytics)
        # Statements are compared only where something was changed, as ClickHouse takes 15 ms to write them all.
        unchanged = marks is not None and marks_now == marks
        if not brand_new and (unchanged or await _statements(analytics) == statements):
            emptied.append((url, marks_now, statements))
            kept = connections is not None
        else:
            await analytics.execute(f"DROP DATABASE IF EXISTS {analytics.database}")
        if kept and connections is not None:
            connections[url] = analytics
        else:
            await analytics.close()


async def empty(analytics: Analytics) -> object:
    """Deletes all rows that events have made.

    Returns:
        Marks of the schema, which change when a table or a view is made, altered or dropped; None where that happened
        just now, as the next change might leave the same marks.
    """
    sql = """
        SELECT name, total_rows, uuid, metadata_modification_time AS altered_at, now() AS asked_at
        FROM system.tables
        WHERE database = {database:String}
    """
    tables = list((await analytics.query(sql, {"database": analytics.database})).named_rows())
    filled = {table["name"] for table in tables if table["total_rows"]}
    # Most tests fill one table or two.
    for table in (*TABLES, CLOSED_SPEND):
        if table.name in filled:
            await analytics.execute(f"TRUNCATE TABLE {table.name}")
    if any(table["asked_at"] - table["altered_at"] < _MARKED_AFTER for table in tables):
        return None
    return {(table["name"], table["uuid"], table["altered_at"]) for table in tables}


async def _statements(analytics: Analytics) -> object:
    """Returns the statements of the tables and views of a database, and the migrations that it has had."""
    sql = """
        SELECT name, create_table_query,
            (SELECT groupBitXor(cityHash64(version, name)) FROM schema_migrations FINAL) AS migrations
        FROM system.tables
        WHERE database = {database:String}
    """
    try:
        return set((await analytics.query(sql, {"database": analytics.database})).rows)
    except QueryError:
        return None  # without the table of migrations


async def schema_of(analytics: Analytics) -> dict[str, object]:
    """Returns the columns and indexes of all tables, and the views' statements without the database's name."""
    queries = {
        "columns": "SELECT table, name, type, default_expression, compression_codec FROM system.columns"
        " WHERE database = {database:String} ORDER BY table, position",
        "indexes": "SELECT table, name, expr, type_full, granularity FROM system.data_skipping_indices"
        " WHERE database = {database:String} ORDER BY table, name",
        "views": "SELECT name, replaceAll(as_select, {database:String}, '') FROM system.tables"
        " WHERE database = {database:String} AND engine = 'View' ORDER BY name",
    }
    database = {"database": analytics.database}
    return {kind: (await analytics.query(query, database)).rows for kind, query in queries.items()}


def url_of(analytics: Analytics, server: RunningServer) -> str:
    """Returns the URL of a database on a shared server, for services that connect to it themselves."""
    return f"{server.url.rstrip('/')}/{analytics.database}"


def new_database_url(server_url: str) -> str:
    return f"{server_url.rstrip('/')}/test_{uuid4().hex}"


def attempt(execution_id: str = "e1", number: int = 1, **fields: Any) -> Attempt:
    started_at = fields.pop("started_at", NOON)
    duration_ms = fields.pop("duration_ms", 800)
    return Attempt.model_validate(
        {
            "attempt_id": f"{execution_id}:{number}",
            "execution_id": execution_id,
            "job_id": execution_id,
            "agent": "writer",
            "number": number,
            "model": "gpt-4.1",
            "provider": "openai",
            "started_at": started_at,
            "completed_at": started_at + timedelta(milliseconds=duration_ms),
            "duration_ms": duration_ms,
            "input_tokens": 100,
            "output_tokens": 20,
            "cost": 1_000_001,
            "cost_basis": "billed",
            "outcome": "success",
            "cause": "first",
            **keys_of(fields),
            **fields,
        }
    )


def attempt_row(tried: Attempt, sequence: int) -> rows.StoredRow:
    """A row whose message was stored just when the attempt was over."""
    return rows.attempt_row(tried, sequence, tried.completed_at)


def execution(execution_id: str = "e1", **fields: Any) -> Execution:
    completed_at = fields.pop("completed_at", NOON)
    duration_ms = fields.pop("duration_ms", 1000)
    queued_at = completed_at - timedelta(milliseconds=duration_ms)
    return Execution.model_validate(
        {
            "execution_id": execution_id,
            "job_id": execution_id,
            "agent": "writer",
            "status": "succeeded",
            "requested_model": "gpt-4.1",
            "chosen_model": "gpt-4.1",
            "attempts_count": 1,
            "total_cost": 1_000_001,
            "wasted_cost": 0,
            "cost_basis": "billed",
            "output": "done",
            "run_id": execution_id,
            "queued_at": queued_at,
            "dispatched_at": queued_at,
            "started_at": queued_at,
            "completed_at": completed_at,
            "duration_ms": duration_ms,
            **keys_of(fields),
            **fields,
        }
    )


def keys_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a task and a plan that an operator named."""
    names = {"task_id": "task_key", "plan_id": "plan_key", "parent_execution_id": "parent_job_id"}
    return {key: fields[name] for name, key in names.items() if name in fields}


def full_attempt(execution_id: str = "e-full", number: int = 1) -> Attempt:
    return attempt(
        execution_id,
        number,
        agent="support/tier 1",
        tenant="acme",
        task_id="task-7",
        task_key="task-7",
        submitted_by="finance key",
        user="ada@example.com",
        team="Data “Science”",
        cost_tags={"team": "growth", "it's": "“a”, {b}: \\'c'"},
        model="anthropic/claude-sonnet-4.5:thinking",
        started_at=NOON + timedelta(milliseconds=1),
        cached_tokens=64,
        reasoning_tokens=7,
        usage_problem="1e+15 output tokens were reported",
        first_token_ms=321,
        chunks=500,
        finish_reason="length",
        cost=123_456_789_123_456_789,
        cost_basis="estimated",
        reserved=123_456_789_123_456_790,
        reserved_tokens=40_096,
        reserved_at=NOON - timedelta(milliseconds=3),
        task_asked_at=NOON - timedelta(milliseconds=4),
        outcome="error",
        error=RATE_LIMITED,
        refused_by="agent:support/tier 1/daily",
        counts_for_breaker=True,
        breaker_version=2**40,
        cause="retry",
        backoff_ms=512,
        dropped_messages=3,
        dropped_params=("temperature", "top_p"),
    )


def full_execution(execution_id: str = "e-full") -> Execution:
    return execution(
        execution_id,
        agent="support/tier 1",
        tenant="acme",
        task_id="task-7",
        task_key="task-7",
        parent_execution_id="e-parent",
        plan_id="report-47",
        run_id="acme/task-7",
        submitted_by="checkout",
        user="ada@example.com",
        team="Data “Science”",
        status="dead_lettered",
        reason="error",
        chosen_model="gpt-4.1-mini",
        fallback_chain=("gpt-4.1-mini", "claude"),
        own_rules=("guard", "retry"),
        attempts=(full_attempt(execution_id),),
        attempts_count=3,
        input_tokens=2**40,
        output_tokens=2,
        cached_tokens=3,
        total_tokens=2**40 + 2,
        total_cost=999_999_999_999_999_999,
        wasted_cost=999_999_999_999_999_999,
        wasted_by_cause={"retry": 999_999_999_999_999_998, "worker_lost": 1, "fallback": 0},
        output={"text": 'fünf\n\t"quoted" 🙂 \u0000', "list": [1, 2.5, None, True, 10**30]},
        finish_reason="tool_calls",
        error=RATE_LIMITED,
        statistics=FailureStatistics(
            consecutive_failures=3, total_failures=5, unique_errors=2, reason="Same error repeated 5 times"
        ),
        messages=[{"role": "user", "content": "Grüße"}, {"role": "assistant", "content": None}],
        input={"order": "Grüße", "lines": [1, 2.5]},
        params={"temperature": 0.2, "stop": ["\n"], "tools": []},
        trace_id="0af7651916cd43dd8448eb211c80319c",
        metadata={"ticket": 4711, "deep": {"er": []}},
        completed_at=NOON + timedelta(milliseconds=999),
        task_counted_at=NOON + timedelta(milliseconds=1_001),
        cache_hit=True,
        cached_from="e-before",
        dry_run=True,
    )


def bare_execution(execution_id: str = "e-bare") -> Execution:
    return Execution(
        execution_id=execution_id,
        job_id=execution_id,
        agent="writer",
        run_id=execution_id,
        status="cancelled",
        queued_at=NOON,
        dispatched_at=NOON,
        completed_at=NOON,
        duration_ms=0,
    )


def transition(version: int = 1, **fields: Any) -> BreakerTransition:
    return BreakerTransition.model_validate(
        {
            "transition_id": f"writer/gpt-4.1#e.{version}",
            "agent": "writer",
            "model": "gpt-4.1",
            "from_state": "closed",
            "to_state": "open",
            "rule": "consecutive_failures",
            "reason": "3 jobs in a row failed (threshold: 3)",
            "consecutive_failures": 3,
            "errors": 3,
            "within_s": 60.5,
            "cooldown_s": 60,
            "open_until": NOON + timedelta(seconds=60),
            "version": version,
            "at": NOON,
            **fields,
        }
    )


def full_transition(version: int = 2) -> BreakerTransition:
    """One that fills every field, as the first sample leaves open what only some transitions have."""
    return transition(
        version,
        transition_id=f"%2A/openai%2F%2A#{version}@1",
        scope="provider",
        agent="*",
        model="openai/*",
        to_state="isolated",
        rule="same_error",
        by="ops: Zoë",
        health="unhealthy",
        total_failures=2**40,
        unique_errors=100,
        error_hash="1a2b3c4d",
        last_failure_at=NOON - timedelta(milliseconds=1),
        last_success_at=NOON - timedelta(days=1),
    )


def audit_event(audit_id: str = "a1", **fields: Any) -> AuditEvent:
    return AuditEvent.model_validate(
        {
            "audit_id": audit_id,
            "action": "raise_cap",
            "outcome": "done",
            "by": "ops: Zoë",
            "actor": "key",
            "actor_id": "0123456789ab",
            "details": {"budget": "agent:writer/daily", "limit_usd": "50.000000000"},
            "reason": "launch day",
            "at": NOON,
            **fields,
        }
    )


def guard_event(event_id: str = "/task-7@1", **fields: Any) -> GuardEvent:
    return GuardEvent.model_validate(
        {
            "event_id": event_id,
            "kind": "tripped",
            "agent": "writer",
            "task_id": "task-7",
            "task_key": "task-7",
            "rule": "max_cost",
            "reason": "$1.00 spent (limit: $1.00)",
            "iterations": 4,
            "tokens": 2**40,
            "cost": "1.000000001",
            "consecutive_failures": 1,
            "total_failures": 2,
            "unique_errors": 2,
            "at": NOON,
            **fields,
        }
    )


def plan_change(change_id: str = "p#1", **fields: Any) -> PlanChange:
    change = {"change_id": change_id, "plan_id": "p", "plan_key": "p", "from_state": "running"}
    change |= {"to_state": "failed", "at": NOON}
    return PlanChange.model_validate({**change, "reason": "the job 'j' ended", "version": 1, **fields})


def limit_event() -> LimitEvent:
    raised = {"amount": "40", "configured": "20", "until": NOON, "by": "ops", "reason": "launch", "at": NOON}
    change = {"kind": "raised", "limit_id": "key:bot.usd.month", "scope": "key:bot", "by": "ops", "reason": "launch"}
    return LimitEvent.model_validate({**change, "event_id": "1", "raised": raised, "at": NOON})


def full_guard_event() -> GuardEvent:
    return guard_event(
        "acme/task-7@2",
        kind="reset",
        tenant="acme",
        execution_id="e1",
        reason="reset by ops: the loop is mended",
        by="ops",
    )


def budget_event(event_id: str = "agent:writer:daily:2026-11-21:80", **fields: Any) -> BudgetEvent:
    return BudgetEvent.model_validate(
        {
            "event_id": event_id,
            "kind": "soft_cap",
            "scope": "agent",
            "agent": "writer",
            "window": "daily",
            "period": "2026-11-21",
            "threshold_percent": 80,
            "limit": "10",
            "total": "8.000000001",
            "enforcement": "soft",
            "at": NOON,
            **fields,
        }
    )


def full_budget_event() -> BudgetEvent:
    """A raise, which fills what a crossing leaves open."""
    return budget_event(
        "tenant:acme:monthly:2026-11:raised:1",
        kind="raised",
        scope="tenant",
        tenant="acme",
        window="monthly",
        period="2026-11",
        limit="999999999.999999999",
        previous="10.000000001",
        configured="10.000000001",
        enforcement="hard",
        by="ops: Zoë",
        reason="the launch",
        resets_at=datetime(2026, 11, 30, 23, tzinfo=UTC),
        at=NOON + timedelta(milliseconds=1),
    )


def repair() -> BudgetEvent:
    """A repair of a budget that has no cap."""
    return budget_event(
        "global:daily:2026-11-21:repaired:1",
        kind="repaired",
        scope="global",
        agent=None,
        threshold_percent=None,
        limit=None,
        previous="9.5",
        enforcement="none",
        reason="the counter was lost",
    )


def alert(alert_id: str = "alert_i1_1", **fields: Any) -> Alert:
    """An incident that was just opened."""
    return Alert.model_validate(
        {
            "alert_id": alert_id,
            "incident_id": "inc_i1",
            "key": "breaker_open/writer/gpt-4%2E1",
            "change": "opened",
            "status": "firing",
            "event": "breaker_open",
            "severity": "critical",
            "first_event": fields.get("event", "breaker_open"),
            "highest_severity": "critical",
            "agent": "writer",
            "model": "gpt-4.1",
            "title": "writer is stopped",
            "text": "gpt-4.1 failed 3 times in a row.",
            "payload": {"failures": 3},
            "count": 1,
            "version": 1,
            "opened_at": NOON,
            "last_at": NOON,
            "source_id": "writer/gpt-4.1#e.1",
            "at": NOON,
            **fields,
        }
    )


def full_alert() -> Alert:
    """One that fills every field, which no single incident does."""
    return alert(
        "alert_i2_9",
        incident_id="inc_i2",
        key="guard_tripped/acme/task-7",
        change="resolved",
        status="resolved",
        event="guard_tripped",
        tenant="acme",
        title="Task stopped: „task-7“",
        payload={"cost": "1.000000001", "deep": [{"er": None}]},
        count=2**40,
        version=9,
        last_at=NOON + timedelta(minutes=1),
        ends_at=NOON + timedelta(days=1),
        reminders=3,
        acknowledged_by="ops: Zoë",
        acknowledged_at=NOON + timedelta(minutes=2),
        resolved_by="ops",
        resolved_at=NOON + timedelta(minutes=3, milliseconds=7),
        reason="the loop is mended",
        at=NOON + timedelta(minutes=3, milliseconds=7),
    )
