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

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from breakwater.kernel.clickhouse.client import Analytics, database_ddl, quote_name, without_comments
from breakwater.kernel.clickhouse.errors import SchemaMismatchError
from breakwater.kernel.clickhouse.table import PLAIN, Layout
from breakwater.records.log_comparison import LOG_COMPARISONS
from breakwater.records.schema import CLOSED_SPEND, EXECUTIONS, PLAN_CHANGES, TABLES

VIEWS = {
    file.name.removesuffix(".sql"): without_comments(file.read_text("utf-8"))
    for file in sorted(Path(__file__).with_name("sql").joinpath("views").iterdir(), key=lambda file: file.name)
}
"""The SELECT of each view, by its name."""


def create_view(name: str, layout: Layout = PLAIN) -> str:
    """The statement that makes a view, or replaces it by this version."""
    return f"CREATE OR REPLACE VIEW {name}{layout.on_cluster} AS\n{VIEWS[name].strip()}\nCOMMENT '{_comment(name)}'"


def _comment(view: str) -> str:
    """Tells a view of this version from others: ClickHouse stores a SELECT in words of its own."""
    return f"Breakwater {hashlib.sha256(VIEWS[view].encode()).hexdigest()[:16]}"


@dataclass(frozen=True, slots=True)
class Migration:
    """A version of the schema, by which older programs notice a newer database.

    Its statements do what is more than adding a table, a column, an index or a view, which follow from `schema`. They
    change nothing if they have run already, or run elsewhere at the same time; on large tables, they only begin what
    ClickHouse does in the background, part by part, and continues after a restart.
    """

    version: int
    name: str
    statements: tuple[str, ...] = ()


_INTERNAL = (LOG_COMPARISONS, CLOSED_SPEND)
"""Tables of the plane's own, which hold no messages."""


def migrations(layout: Layout) -> tuple[Migration, ...]:
    """All versions, in order, for a layout.

    A change of `schema` or of a view gets a new one. A column's type may only become wider: an older service goes on
    storing its rows.
    """
    # The first of a release. Those of development versions have lower numbers.
    return (
        Migration(20, "tables and views"),
        Migration(21, "opaque ids, and the callers' own", tuple(_opaque_ids(layout))),
        Migration(22, "shares and costs of fallbacks"),
        Migration(23, "states of breakers"),
        Migration(24, "submitters and previews of executions"),
        Migration(25, "users and teams"),
        Migration(26, "scopes of budgets"),
        Migration(27, "reserved tokens of attempts"),
        Migration(28, "deployments of models"),
        Migration(29, "callers of attempts"),
        Migration(30, "shadows of breakers"),
        Migration(31, "shadows of limits"),
        Migration(32, "own rules of jobs"),
        Migration(33, "erasure"),
        Migration(34, "times of tasks"),
    )


def _opaque_ids(layout: Layout) -> Iterator[str]:
    """Builds the new ids' indexes for all rows, and drops the one that is no longer used."""
    yield from (table.build_index(id_, layout) for table, id_ in ((EXECUTIONS, "job_id"), (EXECUTIONS, "plan_key")))
    yield PLAN_CHANGES.build_index("plan_key", layout)
    yield f"ALTER TABLE {EXECUTIONS.name}{layout.on_cluster} DROP INDEX IF EXISTS by_plan_id"


MIGRATIONS = migrations(PLAIN)
"""The versions on one server."""


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
    """A part of the schema that a database lacks: it is of an earlier version, or the part was dropped."""

    description: str
    statement: str
    """The statement that creates it, without its rows."""


async def missing(analytics: Analytics, layout: Layout = PLAIN) -> tuple[MissingObject, ...]:
    """Returns the tables, columns, indexes and views that the database lacks, in the order in which to create them.

    A view of a later version is not missing. Raises as `Analytics.query` does.
    """
    existing_columns = await _existing_columns(analytics)
    existing_indexes = await _existing_indexes(analytics)
    lacking: list[MissingObject] = []
    for table in (*TABLES, *_INTERNAL):
        if table.name not in existing_columns:
            lacking.append(MissingObject(f"table {table.name}", table.ddl(layout)))
            continue
        lacking += [
            MissingObject(f"column {table.name}.{column}", table.alter(layout, table.add_column(column)))
            for column in (*table.columns, *table.computed)
            if column not in existing_columns[table.name]
        ]
        lacking += [
            MissingObject(f"index {table.name}.by_{name}", table.alter(layout, table.add_index(name)))
            for name in table.indexes
            if f"by_{name}" not in existing_indexes.get(table.name, ())
        ]
    comments = "SELECT name, comment FROM system.tables WHERE database = {database:String} AND engine = 'View'"
    views = dict((await analytics.query(comments, {"database": analytics.database})).rows)
    newest = (await analytics.query("SELECT max(version) FROM schema_migrations")).rows[0][0]
    if newest > MIGRATIONS[-1].version:
        views = {name: _comment(name) for name in views if name in VIEWS}
    lacking += [
        MissingObject(
            f"view {name}" if name not in views else f"this version of view {name}", create_view(name, layout)
        )
        for name in VIEWS
        if views.get(name) != _comment(name)
    ]
    return tuple(lacking)


async def _existing_columns(analytics: Analytics) -> dict[str, set[str]]:
    """Returns the columns of every table and view in the database."""
    columns: dict[str, set[str]] = {}
    sql = "SELECT table, name FROM system.columns WHERE database = {database:String}"
    for table, column in (await analytics.query(sql, {"database": analytics.database})).rows:
        columns.setdefault(table, set()).add(column)
    return columns


async def _existing_indexes(analytics: Analytics) -> dict[str, set[str]]:
    """Returns the indexes of every table in the database."""
    # By the statements, as `system.data_skipping_indices` is not for readers; without the views, whose text takes long.
    sql = (
        "SELECT name, extractAll(create_table_query, 'INDEX (by_[a-z_]+)') FROM system.tables"
        " WHERE database = {database:String} AND engine LIKE '%MergeTree'"
    )
    rows = (await analytics.query(sql, {"database": analytics.database})).rows
    return {table: set(indexes) for table, indexes in rows}


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
    unapplied = tuple(step for step in migrations(layout) if step.version not in applied)
    is_new = not applied and await _is_empty(analytics)
    if not is_new:
        changes += await _create_missing(analytics, layout)
    # Of a cluster only the server that answers was asked; others may have the tables of an earlier version.
    is_cluster = layout.cluster is not None
    if unapplied and (is_new or is_cluster):
        for statement in _schema(layout, is_new=not is_cluster):
            await analytics.execute(statement)
    if is_new and not is_cluster:
        await analytics.execute(_mark_applied(*unapplied))
    else:
        for step in unapplied:
            for statement in step.statements:
                await analytics.execute(statement)
            await analytics.execute(_mark_applied(step))
    changes += [f"applied ClickHouse migration {step.version} ({step.name})" for step in unapplied]
    days_kept = await retention(analytics)
    for table in TABLES:
        before = days_kept[table.name]
        days = table.days(layout)
        if before != days:
            await analytics.execute(table.modify_ttl(layout))
            was = "something else" if before is None else _days(before)
            changes.append(f"ClickHouse now keeps rows of {table.name} for {_days(days)} (before: {was})")
    return tuple(changes)


async def _is_empty(analytics: Analytics) -> bool:
    """Returns True if the database has no table of ours but the internal ones."""
    existing = await _existing_columns(analytics)
    return not any(table.name in existing for table in TABLES)


def _schema(layout: Layout, *, is_new: bool) -> Iterator[str]:
    """The statements that create every table, column, index and view, if the database is not new only what it lacks."""
    yield from (table.ddl(layout) for table in (*TABLES, *_INTERNAL))
    if not is_new:
        # In the order of the columns, whatever version added them: each is placed after the one before it.
        for table in (*TABLES, *_INTERNAL):
            columns = (table.add_column(column) for column in (*table.columns, *table.computed))
            yield table.alter(layout, *columns, *map(table.add_index, table.indexes))
    yield from (create_view(name, layout) for name in VIEWS)


async def _create_missing(analytics: Analytics, layout: Layout) -> list[str]:
    """Creates the objects that the database lacks. Returns the changes."""
    changes: list[str] = []
    for absent in await missing(analytics, layout):
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
    yield from (f"{statement};" for statement in _schema(layout, is_new=False))
    for migration in migrations(layout):
        yield f"-- {migration.version}: {migration.name}"
        yield from (f"{statement};" for statement in migration.statements)
        yield f"{_mark_applied(migration)};"
    yield "-- Only after clickhouse.retention_days was changed:"
    yield from (f"-- {table.modify_ttl(layout)};" for table in TABLES)


def _days(count: int) -> str:
    return "1 day" if count == 1 else f"{count} days"


def _mark_applied(*applied: Migration) -> str:
    names = (migration.name.replace("'", "''") for migration in applied)
    rows = (f"SELECT {migration.version}, '{name}'" for migration, name in zip(applied, names, strict=True))
    return f"INSERT INTO schema_migrations (version, name) {' UNION ALL '.join(rows)}"
