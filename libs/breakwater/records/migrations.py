"""Migrates a database to the current tables and views, for `breakwater setup`; services never create tables.

The views give figures that are right whatever was delivered twice, by the minute, the hour, the day and the opening.
Each is a file of `sql/views`, and a plain view over FINAL, not a table that a materialized view adds to: that one sees
every insert and not the rows that stay, so a batch that the bus delivers twice would count twice, in executions and in
dollars. Computing a view when it is asked costs a read of the asked time only, as minutes, hours and days follow from
the sorting key or an index.

The views' names are public: people's dashboards use them. Columns may be added. A sum is NULL where nothing of it is
known. Executions count in the minute in which they ended, without dry runs; attempts in the one in which they began.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from breakwater.kernel.clickhouse.client import Analytics, database_ddl, quote_name, without_comments
from breakwater.kernel.clickhouse.errors import SchemaMismatchError
from breakwater.kernel.clickhouse.table import PLAIN, Layout
from breakwater.records.log_comparison import LOG_COMPARISONS
from breakwater.records.schema import (
    ATTEMPTS,
    BREAKER_TRANSITIONS,
    BUDGET_EVENTS,
    CLOSED_SPEND,
    EXECUTIONS,
    GUARD_EVENTS,
    PLAN_CHANGES,
    TABLES,
)

VIEWS = {
    file.name.removesuffix(".sql"): without_comments(file.read_text("utf-8"))
    for file in sorted(Path(__file__).with_name("sql").joinpath("views").iterdir(), key=lambda file: file.name)
}
"""The SELECT of each view, by its name."""


def create_view(name: str, layout: Layout = PLAIN) -> str:
    """The statement that makes a view, or replaces it by this version."""
    return f"CREATE OR REPLACE VIEW {name}{layout.on_cluster} AS\n{VIEWS[name]}"


@dataclass(frozen=True, slots=True)
class Migration:
    """A migration. Its statements change nothing if they have run already, or run elsewhere at the same time."""

    version: int
    name: str
    statements: tuple[str, ...]


_INTERNAL = (LOG_COMPARISONS, CLOSED_SPEND)
"""Tables of the plane's own, which hold no messages."""

_FALLBACK_VIEWS = ("executions_per_minute", "figures_per_minute")
_DEPLOYMENT_VIEWS = ("cost_and_usage", "provider_health")


def migrations(layout: Layout) -> tuple[Migration, ...]:
    """All steps, in order, for a layout.

    They are never changed once released. A column that is added later is in `schema`, and in a step here
    (`ALTER TABLE … ADD COLUMN IF NOT EXISTS`) for the databases that exist. A column's type may only become wider: an
    older service goes on storing its rows. A view is made by the last step that changes it, as it may need the columns
    that come with that step.
    """
    tables = (table.ddl(layout) for table in TABLES)
    changed_later = {"plans", "breaker_openings", *_FALLBACK_VIEWS, *_DEPLOYMENT_VIEWS}
    views = (create_view(name, layout) for name in VIEWS if name not in changed_later)
    # The first release's. Those of development versions have lower numbers; from 16 on they lack what `missing` finds.
    return (
        Migration(20, "tables and views", (*tables, *views)),
        Migration(21, "opaque ids, and the callers' own", tuple(_opaque_ids(layout))),
        Migration(
            22,
            "shares and costs of fallbacks",
            (
                *(
                    EXECUTIONS.add_column(column, layout)
                    for column in ("requested_model_cost", "is_answered_by_model", "fell_back", "fallback_cost")
                ),
                *(create_view(name, layout) for name in _FALLBACK_VIEWS),
            ),
        ),
        Migration(23, "states of breakers", ()),  # its view is made by 30
        Migration(
            24,
            "submitters and previews of executions",
            tuple(
                EXECUTIONS.add_column(column, layout) for column in ("submitted_by", "prompt_preview", "output_preview")
            ),
        ),
        Migration(
            25,
            "users and teams",
            (*(table.add_column(column, layout) for table in (EXECUTIONS, ATTEMPTS) for column in ("user", "team")),),
        ),
        Migration(
            26,
            "scopes of budgets",
            tuple(BUDGET_EVENTS.add_column(column, layout) for column in ("name", "within")),
        ),
        Migration(27, "reserved tokens of attempts", (ATTEMPTS.add_column("reserved_tokens", layout),)),
        Migration(
            28,
            "deployments of models",
            (
                *(ATTEMPTS.add_column(column, layout) for column in ("deployment", "provider_key")),
                *(create_view(name, layout) for name in _DEPLOYMENT_VIEWS),
            ),
        ),
        Migration(29, "callers of attempts", (ATTEMPTS.add_column("caller", layout),)),
        Migration(
            30,
            "shadows of breakers",
            (
                *(BREAKER_TRANSITIONS.add_column(column, layout) for column in ("shadow", "refused")),
                create_view("breaker_openings", layout),
            ),
        ),
        Migration(
            31,
            "shadows of limits",
            tuple(BUDGET_EVENTS.add_column(column, layout) for column in ("shadow", "refused")),
        ),
        Migration(32, "own rules of jobs", (EXECUTIONS.add_column("own_rules", layout),)),
    )


def _opaque_ids(layout: Layout) -> Iterator[str]:
    """Adds the columns of both kinds of ids and their indexes, and tells plans apart by the opaque one."""
    added = (
        (EXECUTIONS, ("job_id", "task_key", "parent_job_id", "plan_key")),
        (ATTEMPTS, ("job_id", "task_key")),
        (GUARD_EVENTS, ("task_key",)),
        (PLAN_CHANGES, ("plan_key", "job_id")),
    )
    for table, columns in added:
        yield from (table.add_column(column, layout) for column in columns)
        for column in columns:
            if column in table.find_by:
                yield from table.add_index(column, layout)
    yield f"ALTER TABLE {EXECUTIONS.name}{layout.on_cluster} DROP INDEX IF EXISTS by_plan_id"
    yield create_view("plans", layout)


MIGRATIONS = migrations(PLAIN)
"""The steps on one server."""


def _record(layout: Layout) -> str:
    # No transaction and no lock: ClickHouse has neither. Two programs that run together both apply the same statements,
    # which is harmless, and both record it, of which one row stays.
    return (
        f"CREATE TABLE IF NOT EXISTS schema_migrations{layout.on_cluster} (\n  version UInt32,\n  name String,\n"
        f"  applied_at DateTime64(3, 'UTC') DEFAULT now64(3, 'UTC')\n"
        f") ENGINE = {layout.engine('applied_at')} ORDER BY version"
    )


@dataclass(frozen=True, slots=True)
class MissingObject:
    """A part of the schema that a database lacks, though the migrations ran: it was dropped."""

    description: str
    statement: str
    """The statement that creates it again, without its rows."""


async def missing(analytics: Analytics, layout: Layout = PLAIN) -> tuple[MissingObject, ...]:
    """Returns the tables, columns and views that the database lacks. Raises as `Analytics.query` does."""
    existing_columns = await _existing_columns(analytics)
    lacking: list[MissingObject] = []
    for table in (*TABLES, *_INTERNAL):
        if table.name not in existing_columns:
            lacking.append(MissingObject(f"table {table.name}", table.ddl(layout)))
            continue
        lacking += [
            MissingObject(f"column {table.name}.{column}", table.add_column(column, layout))
            for column in (*table.columns, *table.computed)
            if column not in existing_columns[table.name]
        ]
    lacking += [
        MissingObject(f"view {name}", create_view(name, layout)) for name in VIEWS if name not in existing_columns
    ]
    return tuple(lacking)


async def _existing_columns(analytics: Analytics) -> dict[str, set[str]]:
    """Returns the columns of every table and view in the database."""
    columns: dict[str, set[str]] = {}
    sql = "SELECT table, name FROM system.columns WHERE database = {database:String}"
    for table, column in (await analytics.query(sql, {"database": analytics.database})).rows:
        columns.setdefault(table, set()).add(column)
    return columns


_KEPT = re.compile(r"\bTTL .*?\btoIntervalDay\((\d+)\)")


async def retention(analytics: Analytics) -> dict[str, int | None]:
    """The days for which each table keeps its rows; None if they are unlimited, or another rule is set.

    Raises as `Analytics.query` does.
    """
    # Without the views, whose text takes ClickHouse most of the time.
    engines = (
        "SELECT name, engine_full FROM system.tables WHERE database = {database:String} AND engine LIKE '%MergeTree'"
    )
    rows = dict((await analytics.query(engines, {"database": analytics.database})).rows)
    ttl_matches = {table.name: _KEPT.search(rows[table.name]) for table in TABLES if table.name in rows}
    return {name: None if days is None else int(days[1]) for name, days in ttl_matches.items()}


async def migrate(analytics: Analytics, layout: Layout = PLAIN) -> tuple[str, ...]:
    """Creates the database and every missing object in it, new or dropped, and sets the retention.

    Returns:
        The changes, a line each; empty when everything was there.

    Raises:
        AnalyticsUnavailableError: ClickHouse does not answer.
        QueryError: it refuses, as when the user may not create tables.
        SchemaMismatchError: the tables are not replicated, and the layout is that of a cluster. Nothing was changed.
    """
    await _refuse_single(analytics, layout)
    changes: list[str] = []
    if await analytics.create_database(layout.on_cluster):
        changes.append(f"created database {analytics.database}")
    await analytics.execute(_record(layout))
    for table in _INTERNAL:
        await analytics.execute(table.ddl(layout))
    applied = {row[0] for row in (await analytics.query("SELECT DISTINCT version FROM schema_migrations")).rows}
    is_empty = not applied and await _is_empty(analytics, layout)
    if applied:
        # Before the steps: a view of theirs may need a column that the table of an earlier version lacks.
        changes += await _create_missing(analytics, layout, "column ")
    elif is_empty:
        for statement in _current_schema(layout):
            await analytics.execute(statement)
    unapplied = tuple(step for step in migrations(layout) if step.version not in applied)
    if is_empty:
        await analytics.execute(_mark_applied(*unapplied))
    else:
        for step in unapplied:
            for statement in step.statements:
                await analytics.execute(statement)
            await analytics.execute(_mark_applied(step))
    changes += [f"applied ClickHouse migration {step.version} ({step.name})" for step in unapplied]
    changes += await _create_missing(analytics, layout)
    days_kept = await retention(analytics)
    for table in TABLES:
        before = days_kept[table.name]
        days = table.days(layout)
        if before != days:
            await analytics.execute(table.modify_ttl(layout))
            was = "something else" if before is None else _days(before)
            changes.append(f"ClickHouse now keeps rows of {table.name} for {_days(days)} (before: {was})")
    return tuple(changes)


async def _is_empty(analytics: Analytics, layout: Layout) -> bool:
    """Returns True if the database has no table of ours, so that `_current_schema` is all that it needs.

    Of a cluster only the server that answers could be asked, and others may have the tables of an earlier version.
    """
    if layout.cluster is not None:
        return False
    existing_columns = await _existing_columns(analytics)
    return not any(table.name in existing_columns for table in TABLES)


def _current_schema(layout: Layout) -> Iterator[str]:
    """The statements that create tables and views as all migrations leave them, for a quarter of their CPU."""
    yield from (table.ddl(layout) for table in TABLES)
    yield from (create_view(name, layout) for name in VIEWS)


async def _create_missing(analytics: Analytics, layout: Layout, kind: str = "") -> list[str]:
    """Creates the objects that the database lacks, all or those of one kind. Returns the changes."""
    changes: list[str] = []
    for absent in await missing(analytics, layout):
        if not absent.description.startswith(kind):
            continue
        if absent.description.startswith("table "):
            # The rows that EVENTS still has are then stored again.
            await analytics.execute(f"TRUNCATE TABLE {LOG_COMPARISONS.name}{layout.on_cluster}")
        await analytics.execute(absent.statement)
        changes.append(f"created {absent.description} in ClickHouse: it was missing")
    return changes


async def _refuse_single(analytics: Analytics, layout: Layout) -> None:
    """Refuses a single server's layout on a cluster's database: only some servers would have the tables."""
    if layout.cluster is None or not await analytics.has_database():
        return
    single = (
        "SELECT name FROM system.tables WHERE database = {database:String} AND engine = 'ReplacingMergeTree'"
        " AND name IN {tables:Array(String)} ORDER BY name"
    )
    tables = [*(table.name for table in TABLES), "schema_migrations"]
    unreplicated = (await analytics.query(single, {"database": analytics.database, "tables": tables})).rows
    if unreplicated:
        raise SchemaMismatchError(
            f"clickhouse.cluster is {layout.cluster!r}, but table {unreplicated[0][0]} of "
            f"database {analytics.database} exists on one server only, "
            "and a table's engine can't be changed. Either name a new database in "
            "BREAKWATER_CLICKHOUSE_URL and copy the rows with INSERT INTO … SELECT, or remove "
            "clickhouse.cluster"
        )


def script(database: str, layout: Layout) -> Iterator[str]:
    """All that `migrate` may run, for administrators who apply it themselves: lines of SQL.

    It brings a new database to this version, and one of an earlier version. The statements for a changed retention are
    comments.
    """
    yield f"{database_ddl(database, layout.on_cluster)};"
    yield f"USE {quote_name(database)};"
    yield f"{_record(layout)};"
    yield from (f"{table.ddl(layout)};" for table in _INTERNAL)
    for migration in migrations(layout):
        yield f"-- {migration.version}: {migration.name}"
        yield from (f"{statement.strip()};" for statement in migration.statements)
        yield f"{_mark_applied(migration)};"
    yield "-- Only after clickhouse.retention_days was changed:"
    yield from (f"-- {table.modify_ttl(layout)};" for table in TABLES)


def _days(count: int) -> str:
    return "1 day" if count == 1 else f"{count} days"


def _mark_applied(*applied: Migration) -> str:
    names = (migration.name.replace("'", "''") for migration in applied)
    rows = (f"SELECT {migration.version}, '{name}'" for migration, name in zip(applied, names, strict=True))
    return f"INSERT INTO schema_migrations (version, name) {' UNION ALL '.join(rows)}"
