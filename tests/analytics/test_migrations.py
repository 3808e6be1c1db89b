"""Setting a database up: once, twice, and by several at the same time."""

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from breakwater.analytics import rows, schema
from breakwater.analytics.client import Analytics, connect
from breakwater.analytics.migrations import MIGRATIONS, migrate, missing, retention
from breakwater.analytics.queries import find_execution
from breakwater.analytics.schema import Table
from breakwater.analytics.table import Layout
from breakwater.analytics.views import VIEWS
from tests.analytics import samples
from tests.server_sources import RunningServer


@pytest.fixture
def analytics(brand_new_analytics: Analytics) -> Analytics:
    return brand_new_analytics


async def test_a_new_database_is_reported_and_a_second_run_does_nothing(clickhouse_server: RunningServer) -> None:
    analytics = connect(samples.new_database_url(clickhouse_server.url))
    done = await migrate(analytics)
    assert done[0] == f"created database {analytics.database}"
    assert done[1:] == (f"created the tables and views of ClickHouse, as of migration {len(MIGRATIONS)}",)
    assert await migrate(analytics) == ()
    await analytics.execute(f"DROP DATABASE {analytics.database}")
    await analytics.close()


async def test_several_at_once_end_in_one_whole_schema(clickhouse_server: RunningServer) -> None:
    url = samples.new_database_url(clickhouse_server.url)
    several = [connect(url) for _ in range(3)]
    await asyncio.gather(*(migrate(analytics) for analytics in several))
    first = several[0]
    recorded = await first.query("SELECT version, name FROM schema_migrations FINAL ORDER BY version")
    assert recorded.rows == tuple((migration.version, migration.name) for migration in MIGRATIONS)
    await first.insert(schema.EXECUTIONS, [rows.execution_row(samples.execution(), 1)])
    assert (await first.query("SELECT executions FROM executions_per_minute")).rows == ((1,),)
    await first.execute(f"DROP DATABASE {first.database}")
    for analytics in several:
        await analytics.close()


async def test_every_statement_can_run_again_without_losing_a_row(analytics: Analytics) -> None:
    await analytics.insert(schema.EXECUTIONS, [rows.execution_row(samples.execution(), 1)])
    await analytics.execute("TRUNCATE TABLE schema_migrations")
    assert len(await migrate(analytics)) == len(MIGRATIONS)
    assert (await analytics.query("SELECT count() FROM executions")).rows == ((1,),)


ADDED_BY_3 = {
    "executions": {"wasted_by_cause", "cached_from", "input"},
    "attempts": {"reasoning_tokens", "refused_by", "dropped_messages"},
}
ADDED_BY_4 = {
    "attempts": {"breaker_version"},
    "breaker_transitions": {
        *("scope", "by", "health", "total_failures", "unique_errors"),
        *("error_hash", "last_failure_at", "last_success_at"),
    },
}
ADDED_BY_5 = {
    "attempts": {"reserved", "reserved_at", "stored_at"},
    "budget_events": {"tenant", "previous_cost", "configured_cost", "by", "reason", "resets_at"},
}
ADDED_BY_7 = {"executions": {"calls_by_cause", "cost_by_cause"}}
ADDED_BY_6 = {
    "alerts": {
        *("incident_id", "key", "change", "status", "tenant", "count", "version", "opened_at", "last_at", "ends_at"),
        *("reminders", "acknowledged_by", "acknowledged_at", "resolved_by", "resolved_at", "reason"),
    },
}
NARROWER_BEFORE_5 = {"threshold_percent": "UInt32", "limit_cost": "Decimal(18, 9)"}


def before_3(table: Table) -> Table:
    return replace(without(before_4(table), ADDED_BY_3), find_by=table.find_by[:1])


def before_4(table: Table) -> Table:
    return without(before_5(table), ADDED_BY_4)


def before_5(table: Table) -> Table:
    old = without(before_6(table), ADDED_BY_5)
    narrower = NARROWER_BEFORE_5 if table is schema.BUDGET_EVENTS else {}
    return replace(old, columns={**old.columns, **narrower}, earlier={})


def before_6(table: Table) -> Table:
    return replace(without(before_7(table), ADDED_BY_6), earlier={})


def before_7(table: Table) -> Table:
    return replace(without(table, ADDED_BY_7), ranges={}, computed={})


def without(table: Table, added: Mapping[str, set[str]]) -> Table:
    names = added.get(table.name, set())
    assert names <= table.columns.keys()
    return replace(table, columns={name: kind for name, kind in table.columns.items() if name not in names})


async def put_back(
    analytics: Analytics, table: Table, old: Table, row: rows.Row, ddl: Callable[[str], str] = str
) -> None:
    """Makes a table as it was, with a row as it was."""
    await analytics.execute(f"DROP TABLE {table.name}")
    await analytics.execute(ddl(old.ddl()))
    values = dict(zip(table.columns, row, strict=True))
    await analytics.insert(old, [[values[name] for name in old.columns]])


def columns_of(table: Table) -> list[tuple[str, str]]:
    return [*table.columns.items(), *((name, kind) for name, (kind, _) in table.computed.items())]


async def forget_from(analytics: Analytics, version: int) -> None:
    await analytics.execute(
        f"ALTER TABLE schema_migrations DELETE WHERE version >= {version} SETTINGS mutations_sync = 1"
    )


async def test_a_database_of_version_2_gets_the_columns_and_keeps_its_rows(clickhouse_server: RunningServer) -> None:
    analytics = connect(samples.new_database_url(clickhouse_server.url))
    await migrate(analytics)
    record = samples.execution(parent_execution_id="e0", attempts=(samples.attempt(cached_tokens=5, backoff_ms=9),))
    stored = (
        (schema.EXECUTIONS, rows.execution_row(record, 1)),
        (schema.ATTEMPTS, samples.attempt_row(record.attempts[0], 2)),
    )
    for table, row in stored:
        await put_back(analytics, table, before_3(table), row)
    await forget_from(analytics, 3)

    assert await migrate(analytics) == tuple(
        f"applied ClickHouse migration {one.version} ({one.name})" for one in MIGRATIONS[2:]
    )
    assert await migrate(analytics) == ()
    assert await find_execution(analytics, "e1") == record
    for table, _ in stored:
        found = await analytics.query(f"DESCRIBE TABLE {table.name}")
        assert [(row[0], row[1]) for row in found.rows] == columns_of(table)
    indices = await analytics.query(
        "SELECT name, type_full, granularity FROM system.data_skipping_indices"
        " WHERE database = {database:String} AND table = 'executions' ORDER BY name",
        {"database": analytics.database},
    )
    kind = "bloom_filter(0.01)"
    assert indices.rows == (
        ("by_completed_at", "minmax", 1),
        ("by_execution_id", kind, 1),
        ("by_parent_execution_id", kind, 1),
    )

    await analytics.insert(schema.EXECUTIONS, [rows.execution_row(samples.full_execution(), 3)])
    await analytics.insert(schema.ATTEMPTS, [samples.attempt_row(samples.full_attempt(), 4)])
    assert await find_execution(analytics, "e-full") == samples.full_execution()
    await analytics.execute(f"DROP DATABASE {analytics.database}")
    await analytics.close()


async def test_a_database_of_version_3_gets_the_guards_and_keeps_its_rows(clickhouse_server: RunningServer) -> None:
    analytics = connect(samples.new_database_url(clickhouse_server.url))
    await migrate(analytics)
    transition, attempt = samples.transition(), samples.full_attempt()
    stored = (
        (schema.BREAKER_TRANSITIONS, rows.transition_row(transition, 1)),
        (schema.ATTEMPTS, samples.attempt_row(attempt, 2)),
    )
    for table, row in stored:
        await put_back(analytics, table, before_4(table), row)
    await analytics.execute("DROP TABLE guard_events")
    await forget_from(analytics, 4)

    assert await migrate(analytics) == tuple(
        f"applied ClickHouse migration {one.version} ({one.name})" for one in MIGRATIONS[3:]
    )
    assert await migrate(analytics) == ()
    for table in schema.TABLES:
        found = await analytics.query(f"DESCRIBE TABLE {table.name}")
        assert [(row[0], row[1]) for row in found.rows] == columns_of(table)
    # What was not reported then is unknown now; only the scope is known, as there was but one.
    unknown = dict.fromkeys(ADDED_BY_4["breaker_transitions"], None)
    earlier = {**transition.model_dump(), **unknown, "scope": "agent_model", "event_sequence": 1}
    assert list((await analytics.query("SELECT * FROM breaker_transitions")).named()) == [earlier]
    kept = await analytics.query("SELECT breaker_version, error_hash FROM attempts")
    assert kept.rows == ((None, "1a2b3c4d"),)

    await analytics.insert(schema.BREAKER_TRANSITIONS, [rows.transition_row(samples.full_transition(), 3)])
    await analytics.insert(schema.GUARD_EVENTS, [rows.guard_row(samples.full_guard_event(), 4)])
    shared = await analytics.query("SELECT scope FROM breaker_transitions WHERE to_state = 'isolated'")
    assert shared.rows == (("provider",),)
    await analytics.execute(f"DROP DATABASE {analytics.database}")
    await analytics.close()


async def a_database_of_version_4(url: str) -> Analytics:
    """With an attempt, and an event of a budget, as they were stored then."""
    analytics = connect(url)
    await migrate(analytics)
    stored = (
        (schema.ATTEMPTS, samples.attempt_row(samples.full_attempt(), 2)),
        (schema.BUDGET_EVENTS, rows.budget_row(samples.budget_event(), 3)),
    )
    for table, row in stored:
        await put_back(analytics, table, before_5(table), row)
    await forget_from(analytics, 5)
    return analytics


async def test_a_database_of_version_4_gets_the_columns_of_money_and_keeps_its_rows(
    clickhouse_server: RunningServer,
) -> None:
    analytics = await a_database_of_version_4(samples.new_database_url(clickhouse_server.url))
    assert await migrate(analytics) == tuple(
        f"applied ClickHouse migration {one.version} ({one.name})" for one in MIGRATIONS[4:]
    )
    assert await migrate(analytics) == ()
    for table in schema.TABLES:
        found = await analytics.query(f"DESCRIBE TABLE {table.name}")
        assert [(row[0], row[1]) for row in found.rows] == columns_of(table)
    tried, crossed = samples.full_attempt(), samples.budget_event()
    # Worked out while it is read, and then written by a merge.
    for _ in range(2):
        ((stored_at,),) = (await analytics.query("SELECT stored_at FROM attempts")).rows
        assert stored_at == tried.completed_at
        await analytics.execute("OPTIMIZE TABLE attempts FINAL")
    assert list(map(rows.attempt_of, (await analytics.query("SELECT * FROM attempts")).named())) == [
        tried.model_copy(update={"reserved": None, "reserved_at": None})
    ]
    assert list(map(rows.budget_of, (await analytics.query("SELECT * FROM budget_events")).named())) == [crossed]

    later = [samples.full_budget_event(), samples.repair()]
    await analytics.insert(schema.BUDGET_EVENTS, [rows.budget_row(event, 9) for event in later])
    found = await analytics.query("SELECT * FROM budget_events WHERE event_sequence = 9 ORDER BY at DESC")
    assert list(map(rows.budget_of, found.named())) == later
    await analytics.execute(f"DROP DATABASE {analytics.database}")
    await analytics.close()


async def test_several_at_once_bring_version_4_up_to_date(clickhouse_server: RunningServer) -> None:
    url = samples.new_database_url(clickhouse_server.url)
    first = await a_database_of_version_4(url)
    several = [connect(url) for _ in range(3)]
    await asyncio.gather(*(migrate(analytics) for analytics in several))
    for table in schema.TABLES:
        found = await first.query(f"DESCRIBE TABLE {table.name}")
        assert [(row[0], row[1]) for row in found.rows] == columns_of(table)
    kept = await first.query("SELECT * FROM budget_events")
    assert list(map(rows.budget_of, kept.named())) == [samples.budget_event()]
    await first.execute(f"DROP DATABASE {first.database}")
    for analytics in (first, *several):
        await analytics.close()


async def test_a_service_of_version_4_goes_on_storing_its_rows(analytics: Analytics) -> None:
    values = dict(zip(schema.BUDGET_EVENTS.columns, rows.budget_row(samples.budget_event(), 3), strict=True))
    old = before_5(schema.BUDGET_EVENTS)
    await analytics.insert(old, [[values[name] for name in old.columns]])
    kept = await analytics.query("SELECT * FROM budget_events")
    assert list(map(rows.budget_of, kept.named())) == [samples.budget_event()]


async def test_a_database_of_version_5_gets_incidents_and_keeps_its_alerts(clickhouse_server: RunningServer) -> None:
    analytics = connect(samples.new_database_url(clickhouse_server.url))
    await migrate(analytics)
    reported = samples.alert("alert_old", at=samples.NOON)
    await put_back(analytics, schema.ALERTS, before_6(schema.ALERTS), rows.alert_row(reported, 1))
    await analytics.execute("DROP VIEW incidents")
    await forget_from(analytics, 6)

    assert await migrate(analytics) == tuple(
        f"applied ClickHouse migration {one.version} ({one.name})" for one in MIGRATIONS[5:]
    )
    assert await migrate(analytics) == ()
    found = await analytics.query("DESCRIBE TABLE alerts")
    assert [(row[0], row[1]) for row in found.rows] == columns_of(schema.ALERTS)
    earlier = {
        **reported.model_dump(exclude={"remind_at", "last_event_id"}),
        "payload": '{"failures":3}',
        "event_sequence": 1,
        "incident_id": "alert_old",
        "key": "",
    }
    # Worked out while it is read, and then written by a merge.
    for _ in range(2):
        assert list((await analytics.query("SELECT * FROM alerts")).named()) == [earlier]
        await analytics.execute("OPTIMIZE TABLE alerts FINAL")

    later = samples.full_alert()
    await analytics.insert(schema.ALERTS, [rows.alert_row(later, 2)])
    # Whether the incident of the old one is over is unknown.
    assert (await analytics.query("SELECT incident_id FROM incidents")).rows == ((later.incident_id,),)
    await analytics.execute(f"DROP DATABASE {analytics.database}")
    await analytics.close()


async def test_a_sink_of_version_5_goes_on_storing_its_alerts(analytics: Analytics) -> None:
    values = dict(zip(schema.ALERTS.columns, rows.alert_row(samples.alert("alert_old"), 3), strict=True))
    old = before_6(schema.ALERTS)
    await analytics.insert(old, [[values[name] for name in old.columns]])
    kept = await analytics.query("SELECT incident_id, change, status, count, version, opened_at FROM alerts FINAL")
    assert kept.rows == (("alert_old", "opened", "firing", 1, 1, samples.NOON),)


async def test_incidents_of_version_7_that_were_open_are_firing(analytics: Analytics) -> None:
    for name, status in (("one", "open"), ("two", "pending"), ("three", "resolved")):
        row = dict(zip(schema.ALERTS.columns, rows.alert_row(samples.alert(name), 1), strict=True))
        await analytics.insert(schema.ALERTS, [[*(row | {"status": status}).values()]])
    await forget_from(analytics, 8)
    for _ in range(2):
        await migrate(analytics)
        await forget_from(analytics, 8)
    found = await analytics.query("SELECT alert_id, status FROM alerts FINAL ORDER BY alert_id")
    assert found.rows == (("one", "firing"), ("three", "resolved"), ("two", "pending"))


VIEWS_OF_7 = tuple(sorted(VIEWS.keys() - {"executions_per_minute", "incidents", "cost_and_usage"}))


async def described(analytics: Analytics) -> dict[str, str]:
    """How the server itself would make each table and view."""
    found = await analytics.query(
        "SELECT name, replaceAll(create_table_query, database, '') FROM system.tables"
        " WHERE database = {database:String} AND name != 'schema_migrations'",
        {"database": analytics.database},
    )
    reported: dict[str, str] = {}
    for name, ddl in found.rows:
        head, word, settings = ddl.partition(" SETTINGS ")
        reported[name] = head + word + ", ".join(sorted(settings.split(", ")))  # in whatever order they were given
    return reported


async def test_a_database_of_version_6_becomes_like_a_new_one_and_keeps_its_rows(
    analytics: Analytics, clickhouse_server: RunningServer
) -> None:
    old = connect(samples.new_database_url(clickhouse_server.url))
    await migrate(old)
    ended, tried = samples.full_execution(), samples.full_attempt()
    stored: dict[str, rows.Row] = {
        "executions": rows.execution_row(ended, 1),
        "attempts": samples.attempt_row(tried, 2),
        "breaker_transitions": rows.transition_row(samples.transition(), 3),
        "guard_events": rows.guard_row(samples.full_guard_event(), 4),
        "budget_events": rows.budget_row(samples.full_budget_event(), 5),
        "alerts": rows.alert_row(samples.full_alert(), 6),
    }
    await old.execute("DROP TABLE audit")
    for table in schema.TABLES[:-1]:
        await put_back(old, table, before_7(table), stored[table.name], of_then)
    for view in VIEWS_OF_7:
        await old.execute(f"DROP VIEW {view}")
    await old.execute("CREATE OR REPLACE VIEW executions_per_minute AS SELECT 1 AS executions")
    await forget_from(old, 7)
    assert await described(old) != await described(analytics)

    assert await migrate(old) == tuple(
        f"applied ClickHouse migration {one.version} ({one.name})" for one in MIGRATIONS[6:]
    )
    assert await migrate(old) == ()
    assert await described(old) == await described(analytics)
    # No row is rewritten for it, whatever the tables hold; of alerts the status was, by a later step.
    rewritten = (
        "SELECT count() FROM system.mutations "
        "WHERE database = {database:String} AND table NOT IN ('schema_migrations', 'alerts')"
    )
    assert (await old.query(rewritten, {"database": old.database})).rows == ((0,),)
    for _ in range(2):
        # What it called, and why, is not known of what was stored then; everything else is as it was.
        assert await find_execution(old, "e-full") == ended
        by_cause = await old.query("SELECT calls_by_cause, cost_by_cause FROM executions FINAL")
        assert by_cause.rows == (({}, {}),)
        for name in stored:
            assert (await old.query(f"SELECT count() FROM {name} FINAL")).rows == ((1,),), name
            await old.execute(f"OPTIMIZE TABLE {name} FINAL")
    await old.insert(schema.EXECUTIONS, [rows.execution_row(ended, 7)])
    by_cause = await old.query("SELECT calls_by_cause FROM executions FINAL")
    assert by_cause.rows == (({"retry": 1},),)
    await old.execute(f"DROP DATABASE {old.database}")
    await old.close()


async def test_a_database_of_version_12_gets_the_rate_of_streamed_answers(
    analytics: Analytics, clickhouse_server: RunningServer
) -> None:
    old = connect(samples.new_database_url(clickhouse_server.url))
    await migrate(old)
    streamed = samples.attempt(first_token_ms=300, duration_ms=800, output_tokens=21, chunks=20)
    await put_back(old, schema.ATTEMPTS, replace(schema.ATTEMPTS, computed={}), samples.attempt_row(streamed, 1))
    await old.execute("CREATE OR REPLACE VIEW attempts_per_minute AS SELECT 1 AS calls")
    await forget_from(old, 13)
    assert await migrate(old) == tuple(
        f"applied ClickHouse migration {one.version} ({one.name})" for one in MIGRATIONS[12:]
    )
    assert await described(old) == await described(analytics)
    assert (await old.query("SELECT tokens_per_s FROM attempts FINAL")).rows == ((streamed.tokens_per_s,),) == ((40,),)
    await old.execute(f"DROP DATABASE {old.database}")
    await old.close()


def of_then(ddl: str) -> str:
    """The statement as version 6 had it: long texts compressed, all else as the server does it by default."""
    ddl = ddl.replace(", materialize_ttl_recalculate_only = 1", "")
    without_codecs = re.sub(r" CODEC\((?:[^()]|\([^()]*\))*\)", "", ddl)
    long_texts = "output|messages|input|metadata|error_message|error_user_message|text|payload"
    return re.sub(rf"^(  (?:{long_texts}) .*?)(,?)$", r"\1 CODEC(ZSTD(1))\2", without_codecs, flags=re.MULTILINE)


async def test_a_sink_of_version_6_goes_on_storing_its_executions(analytics: Analytics) -> None:
    values = dict(zip(schema.EXECUTIONS.columns, rows.execution_row(samples.full_execution(), 3), strict=True))
    old = before_7(schema.EXECUTIONS)
    await analytics.insert(old, [[values[name] for name in old.columns]])
    kept = await analytics.query("SELECT attempts_count, calls_by_cause FROM executions FINAL")
    assert kept.rows == ((3, {}),)


async def test_changed_retention_is_applied_and_reported_once(analytics: Analytics) -> None:
    await analytics.insert(schema.ATTEMPTS, [samples.attempt_row(samples.full_attempt(), 1)])
    shorter = Layout(retention_days={"attempts": 90, "alerts": 1})
    assert await migrate(analytics, shorter) == (
        "ClickHouse keeps rows of attempts for 90 days now (it was 400 days)",
        "ClickHouse keeps rows of alerts for 1 day now (it was 400 days)",
    )
    assert await migrate(analytics, shorter) == ()
    kept = await retention(analytics)
    assert kept == {table.name: {"attempts": 90, "alerts": 1}.get(table.name, 400) for table in schema.TABLES}
    assert (await analytics.query("SELECT count() FROM attempts")).rows == ((1,),)

    await analytics.execute("ALTER TABLE guard_events REMOVE TTL")
    assert (await retention(analytics))["guard_events"] is None
    assert await migrate(analytics) == (
        "ClickHouse keeps rows of attempts for 400 days now (it was 90 days)",
        "ClickHouse keeps rows of guard_events for 400 days now (it was something else)",
        "ClickHouse keeps rows of alerts for 400 days now (it was 1 day)",
    )


async def test_what_is_older_than_a_shorter_retention_goes(analytics: Analytics) -> None:
    """By months in the great tables, and by rows in the small ones."""
    now = datetime.now(UTC)
    ages = {"new": 1, "old": 200}
    for name, days in ages.items():
        moment = now - timedelta(days=days)
        await analytics.insert(schema.ATTEMPTS, [samples.attempt_row(samples.attempt(name, started_at=moment), 1)])
        await analytics.insert(schema.GUARD_EVENTS, [rows.guard_row(samples.guard_event(name, at=moment), 1)])
    await migrate(analytics, Layout(retention_days={"attempts": 62, "guard_events": 62}))

    async def left() -> tuple[object, ...]:
        for table in ("attempts", "guard_events"):
            await analytics.execute(f"OPTIMIZE TABLE {table} FINAL")
        attempts = await analytics.query("SELECT groupArray(execution_id) FROM attempts")
        guards = await analytics.query("SELECT groupArray(event_id) FROM guard_events")
        return attempts.rows[0][0], guards.rows[0][0]

    async with asyncio.timeout(60):
        while await left() != (["new"], ["new"]):
            await asyncio.sleep(0.2)


async def test_what_somebody_took_away_is_made_again(analytics: Analytics) -> None:
    assert await missing(analytics) == ()
    await analytics.execute("DROP VIEW executions_per_minute")
    await analytics.execute("DROP VIEW incidents")
    await analytics.execute("DROP TABLE attempts")
    await analytics.execute("ALTER TABLE executions DROP COLUMN cache_hit")
    gone = ("column executions.cache_hit", "table attempts", "view executions_per_minute", "view incidents")
    assert tuple(one.what for one in await missing(analytics)) == gone
    done = await migrate(analytics)
    assert done == tuple(f"created {what} again in ClickHouse: it was missing" for what in gone)
    assert await migrate(analytics) == ()
    found = await analytics.query(
        "SELECT name FROM system.columns WHERE database = {database:String} AND table = 'executions' ORDER BY position",
        {"database": analytics.database},
    )
    assert [row[0] for row in found.rows] == [*schema.EXECUTIONS.columns, *schema.EXECUTIONS.computed]


async def test_the_columns_of_every_table_are_those_that_inserts_name(analytics: Analytics) -> None:
    for table in schema.TABLES:
        found = await analytics.query(
            "SELECT name, type FROM system.columns WHERE database = {database:String} AND table = {table:String}"
            " AND default_kind != 'ALIAS' ORDER BY position",
            {"database": analytics.database, "table": table.name},
        )
        assert dict(found.rows) == dict(table.columns), table.name
        assert [name for name, _ in found.rows] == list(table.columns), table.name


async def test_every_column_of_the_great_tables_is_compressed_by_a_chosen_codec(analytics: Analytics) -> None:
    found = await analytics.query(
        "SELECT table, name FROM system.columns WHERE database = {database:String} AND compression_codec = ''"
        " AND default_kind != 'ALIAS'"
        " AND table IN (SELECT name FROM system.tables WHERE database = {database:String} AND engine LIKE '%Tree')",
        {"database": analytics.database},
    )
    assert {table for table, _ in found.rows} == {"schema_migrations"}


async def test_every_table_forgets_rows_by_their_age(analytics: Analytics) -> None:
    found = await analytics.query(
        "SELECT name, engine_full FROM system.tables WHERE database = {database:String} AND engine LIKE '%MergeTree'",
        {"database": analytics.database},
    )
    engines = dict(found.rows)
    for table in schema.TABLES:
        assert f"TTL toDateTime({table.time}) + toIntervalDay(400)" in engines[table.name]


async def test_the_natural_key_is_part_of_every_sorting_key(analytics: Analytics) -> None:
    natural = ("execution_id", "attempt_id", "transition_id", "event_id", "event_id", "alert_id", "audit_id")
    assert tuple(table.order_by[-1] for table in schema.TABLES) == natural
