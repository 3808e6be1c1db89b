"""Setting a database up: once, twice, and by several at the same time."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from breakwater.kernel.clickhouse.client import Analytics, connect
from breakwater.kernel.clickhouse.table import Layout
from breakwater.records import migrations, rows, schema
from breakwater.records.migrations import MIGRATIONS, Migration, migrate, missing, retention, script
from tests.records import samples
from tests.server_sources import RunningServer


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


async def test_a_later_step_reaches_a_database_that_exists_and_keeps_its_rows(
    analytics: Analytics, monkeypatch: pytest.MonkeyPatch
) -> None:
    await analytics.insert(schema.EXECUTIONS, [rows.execution_row(samples.execution(), 1)])
    change = "ALTER TABLE executions ADD COLUMN IF NOT EXISTS region LowCardinality(String)"
    later = Migration(MIGRATIONS[-1].version + 1, "where it ran", (change,))
    monkeypatch.setattr(migrations, "migrations", lambda _: (*MIGRATIONS, later))
    assert await migrate(analytics) == (f"applied ClickHouse migration {later.version} (where it ran)",)
    assert await migrate(analytics) == ()
    # A sink of before it goes on storing its rows.
    await analytics.insert(schema.EXECUTIONS, [rows.execution_row(samples.execution("e2"), 2)])
    assert (await analytics.query("SELECT region, count() FROM executions GROUP BY region")).rows == (("", 2),)


ADDED = {
    21: {
        "executions": ("job_id", "task_key", "parent_job_id", "plan_key"),
        "attempts": ("job_id", "task_key"),
        "guard_events": ("task_key",),
        "plan_changes": ("plan_key", "job_id"),
    },
    22: {"executions": ("fallback_cost", "fell_back", "is_answered_by_model", "requested_model_cost")},
    24: {"executions": ("submitted_by", "prompt_preview", "output_preview")},
    25: {"executions": ("user", "team"), "attempts": ("user", "team")},
    26: {"budget_events": ("name", "within")},
    27: {"attempts": ("reserved_tokens",)},
    28: {"attempts": ("deployment", "provider_key")},
    29: {"attempts": ("caller",)},
    30: {"breaker_transitions": ("shadow", "refused")},
    31: {"budget_events": ("shadow", "refused")},
    32: {"executions": ("own_rules",)},
    33: {"executions": ("erased_at",), "attempts": ("erased_at",)},
    34: {"executions": ("task_counted_at",), "attempts": ("task_asked_at",)},
}
"""The columns that each version added."""


def added_since(version: int) -> set[str]:
    """The columns that later versions added, as `missing` describes them."""
    later = [tables for newer, tables in ADDED.items() if newer > version]
    return {f"column {table}.{name}" for tables in later for table in tables for name in tables[table]}


async def make_older(analytics: Analytics, version: int) -> None:
    """Takes from a database what versions after the given one added, and gives it other views than today's."""
    for table in schema.TABLES:
        added = [name for newer, tables in ADDED.items() if newer > version for name in tables.get(table.name, ())]
        drops = [f"DROP INDEX by_{name}" for name in table.indexes if name in added]
        if drops := [*drops, *(f"DROP COLUMN {name}" for name in added)]:
            await analytics.execute(f"ALTER TABLE {table.name} {', '.join(drops)}")
    if version < 21:
        index = "ADD INDEX by_plan_id plan_id TYPE bloom_filter(0.01) GRANULARITY 1"
        await analytics.execute(f"ALTER TABLE executions {index}")
    for name in migrations.VIEWS:
        await analytics.execute(f"CREATE OR REPLACE VIEW {name} AS SELECT 'of version {version}' AS view")
    await analytics.execute("DROP VIEW incidents")
    await analytics.execute(f"ALTER TABLE schema_migrations DELETE WHERE version > {version} SETTINGS mutations_sync=1")


async def run_script(analytics: Analytics) -> None:
    """Runs what `breakwater setup --print-sql` prints for the database."""
    lines = [line for line in script(analytics.database, Layout()) if not line.startswith("--")]
    for statement in "\n".join(lines).removesuffix(";").split(";\n"):
        if not statement.startswith("USE "):
            await analytics.execute(statement)


VERSIONS = [
    # The others are like these.
    pytest.param(migration.version, marks=[] if migration.version == 20 else pytest.mark.chaos)
    for migration in MIGRATIONS[:-1]
]


@pytest.mark.parametrize("version", VERSIONS)
async def test_the_printed_statements_bring_any_earlier_version_to_this_one_and_keep_its_rows(
    version: int, clickhouse_server: RunningServer
) -> None:
    async with (
        samples.new_database(clickhouse_server.url) as new,
        samples.new_database(clickhouse_server.url, brand_new=True) as older,
    ):
        await make_older(older, version)
        old_row = "INSERT INTO executions (execution_id, agent, plan_id, completed_at) VALUES ('e0', 'a', 'p', now())"
        await older.execute(old_row)
        lacking = {one.description for one in await missing(older)}
        assert {"view incidents", "this version of view plans", *added_since(version)} <= lacking
        await run_script(older)
        assert await samples.schema_of(older) == await samples.schema_of(new)
        assert await migrate(older) == ()
        stored = await older.query("SELECT execution_id, job_id, plan_key, team FROM executions")
        assert stored.rows == (("e0", "e0", "p", None),)


async def test_a_database_of_an_earlier_version_becomes_like_a_new_one_and_loses_no_row(
    analytics: Analytics, clickhouse_server: RunningServer
) -> None:
    await make_older(analytics, 20)
    await analytics.execute(
        "INSERT INTO executions (execution_id, agent, plan_id, completed_at) VALUES ('e0', 'a', 'report-47', now())"
    )
    columns = added_since(20)
    indexes = {"index executions.by_job_id", "index executions.by_plan_key", "index plan_changes.by_plan_key"}
    views = {"view incidents", *(f"this version of view {name}" for name in migrations.VIEWS if name != "incidents")}
    changes = await migrate(analytics)
    assert sorted(changes) == sorted(
        (
            *(f"created {absent} in ClickHouse: it was missing" for absent in columns | indexes | views),
            *(f"applied ClickHouse migration {one.version} ({one.name})" for one in MIGRATIONS[1:]),
        )
    )
    assert await migrate(analytics) == ()

    plans = [samples.execution(key, plan_id="report-47", plan_key=key) for key in ("k1", "k2")]
    await analytics.insert(schema.EXECUTIONS, [rows.execution_row(one, n) for n, one in enumerate(plans)])
    found = await analytics.query("SELECT plan_key, plan_id, jobs FROM plans ORDER BY plan_key")
    assert found.rows == (("k1", "report-47", 1), ("k2", "report-47", 1), ("report-47", "report-47", 1))

    async with samples.new_database(clickhouse_server.url) as new:
        assert await samples.schema_of(analytics) == await samples.schema_of(new)


class KilledError(Exception):
    pass


@pytest.mark.parametrize("version", [20, pytest.param(None, marks=pytest.mark.chaos)])
async def test_a_setup_that_was_killed_in_the_middle_is_completed_by_the_next(
    version: int | None, clickhouse_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a new database and of an older one, at every fifteenth statement."""
    async with samples.new_database(clickhouse_server.url) as new:
        whole = await samples.schema_of(new)
    async with samples.new_database(clickhouse_server.url, brand_new=True) as analytics:
        if version is None:
            await analytics.execute(f"DROP DATABASE {analytics.database}")
        else:
            await make_older(analytics, version)
        execute = Analytics.execute
        left = 15

        async def until_killed(self: Analytics, *arguments: Any) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                left = 15
                raise KilledError
            await execute(self, *arguments)

        kills = 0
        with monkeypatch.context() as patched:
            patched.setattr(Analytics, "execute", until_killed)
            while True:
                try:
                    await migrate(analytics)
                except KilledError:
                    kills += 1
                    assert kills < 15
                else:
                    break
        assert kills >= 3
        assert await samples.schema_of(analytics) == whole
        recorded = await analytics.query("SELECT version FROM schema_migrations FINAL ORDER BY version")
        assert [row[0] for row in recorded.rows] == [migration.version for migration in MIGRATIONS]
        assert await migrate(analytics) == ()


async def test_views_of_a_later_version_are_left_alone(analytics: Analytics) -> None:
    await analytics.execute("CREATE OR REPLACE VIEW plans AS SELECT 1 AS later COMMENT 'Breakwater of a later version'")
    assert [one.description for one in await missing(analytics)] == ["this version of view plans"]
    await analytics.execute("INSERT INTO schema_migrations (version, name) SELECT 10000, 'later'")
    assert await missing(analytics) == ()
    assert await migrate(analytics) == ()


async def test_changed_retention_is_applied_and_reported_once(analytics: Analytics) -> None:
    await analytics.insert(schema.ATTEMPTS, [samples.attempt_row(samples.full_attempt(), 1)])
    shorter = Layout(retention_days={"attempts": 90, "alerts": 1})
    assert await migrate(analytics, shorter) == (
        "ClickHouse now keeps rows of attempts for 90 days (before: 400 days)",
        "ClickHouse now keeps rows of alerts for 1 day (before: 400 days)",
    )
    assert await migrate(analytics, shorter) == ()
    kept = await retention(analytics)
    assert kept == {table.name: {"attempts": 90, "alerts": 1}.get(table.name, 400) for table in schema.TABLES}
    assert (await analytics.query("SELECT count() FROM attempts")).rows == ((1,),)

    await analytics.execute("ALTER TABLE guard_events REMOVE TTL")
    assert (await retention(analytics))["guard_events"] is None
    assert await migrate(analytics) == (
        "ClickHouse now keeps rows of attempts for 400 days (before: 90 days)",
        "ClickHouse now keeps rows of guard_events for 400 days (before: something else)",
        "ClickHouse now keeps rows of alerts for 400 days (before: 1 day)",
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
    await migrate(analytics)


async def test_what_somebody_took_away_is_made_again(analytics: Analytics) -> None:
    assert await missing(analytics) == ()
    await analytics.execute("DROP VIEW executions_per_minute")
    await analytics.execute("DROP VIEW incidents")
    await analytics.execute("DROP TABLE attempts")
    await analytics.execute("ALTER TABLE executions DROP COLUMN trace_id")
    gone = ("column executions.trace_id", "table attempts", "view executions_per_minute", "view incidents")
    assert tuple(one.description for one in await missing(analytics)) == gone
    done = await migrate(analytics)
    assert done == tuple(f"created {what} in ClickHouse: it was missing" for what in gone)
    assert await migrate(analytics) == ()
    found = await analytics.query(
        "SELECT name FROM system.columns WHERE database = {database:String} AND table = 'executions' ORDER BY position",
        {"database": analytics.database},
    )
    assert [row[0] for row in found.rows] == [*schema.EXECUTIONS.columns, *schema.EXECUTIONS.computed]


async def test_an_index_that_somebody_dropped_is_missing_and_made_again(analytics: Analytics) -> None:
    await analytics.execute("ALTER TABLE attempts DROP INDEX by_charged_at, DROP INDEX by_execution_id")
    gone = ("index attempts.by_execution_id", "index attempts.by_charged_at")
    assert tuple(one.description for one in await missing(analytics)) == gone
    assert await migrate(analytics) == tuple(f"created {what} in ClickHouse: it was missing" for what in gone)
    assert await missing(analytics) == ()


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


def test_the_natural_key_is_part_of_every_sorting_key() -> None:
    natural = (
        "execution_id",
        "attempt_id",
        "transition_id",
        "event_id",
        "event_id",
        "change_id",
        "event_id",
        "alert_id",
        "audit_id",
    )
    assert tuple(table.order_by[-1] for table in schema.TABLES) == natural
