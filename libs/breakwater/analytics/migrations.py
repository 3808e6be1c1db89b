"""Brings a database to what the schema says. Run by `breakwater setup`; services never create tables."""

from __future__ import annotations

from dataclasses import dataclass

from breakwater.analytics.client import Analytics
from breakwater.analytics.schema import (
    ALERTS,
    ATTEMPTS,
    BREAKER_TRANSITIONS,
    BUDGET_EVENTS,
    EXECUTIONS,
    EXECUTIONS_PER_MINUTE,
    GUARD_EVENTS,
    INCIDENTS,
    TABLES,
    VIEWS,
)


@dataclass(frozen=True, slots=True)
class Migration:
    """One step. Its statements change nothing where they ran already, or run at the same time elsewhere."""

    version: int
    name: str
    statements: tuple[str, ...]


MIGRATIONS = (
    Migration(1, "tables", tuple(table.ddl() for table in TABLES)),
    Migration(2, "executions per minute", (EXECUTIONS_PER_MINUTE,)),
    Migration(
        3,
        "causes of waste, cache, what calls left out, and trees",
        (
            EXECUTIONS.add_column("wasted_by_cause"),
            EXECUTIONS.add_column("cached_from"),
            EXECUTIONS.add_column("input"),
            EXECUTIONS.add_index("parent_execution_id"),
            ATTEMPTS.add_column("reasoning_tokens"),
            ATTEMPTS.add_column("refused_by"),
            ATTEMPTS.add_column("dropped_messages"),
        ),
    ),
    Migration(
        4,
        "guards, and breakers that are shared, isolated or reset",
        (
            GUARD_EVENTS.ddl(),
            BREAKER_TRANSITIONS.add_column("scope"),
            BREAKER_TRANSITIONS.add_column("by"),
            BREAKER_TRANSITIONS.add_column("health"),
            BREAKER_TRANSITIONS.add_column("total_failures"),
            BREAKER_TRANSITIONS.add_column("unique_errors"),
            BREAKER_TRANSITIONS.add_column("error_hash"),
            BREAKER_TRANSITIONS.add_column("last_failure_at"),
            BREAKER_TRANSITIONS.add_column("last_success_at"),
            ATTEMPTS.add_column("breaker_version"),
        ),
    ),
    Migration(
        5,
        "money: what was held for calls, tenants' budgets, raised caps and repairs",
        (
            ATTEMPTS.add_column("reserved"),
            ATTEMPTS.add_column("reserved_at"),
            ATTEMPTS.add_column("stored_at"),
            BUDGET_EVENTS.add_column("tenant"),
            BUDGET_EVENTS.modify_column("threshold_percent"),
            BUDGET_EVENTS.modify_column("limit_cost"),
            BUDGET_EVENTS.add_column("previous_cost"),
            BUDGET_EVENTS.add_column("configured_cost"),
            BUDGET_EVENTS.add_column("by"),
            BUDGET_EVENTS.add_column("reason"),
            BUDGET_EVENTS.add_column("resets_at"),
        ),
    ),
    Migration(
        6,
        "incidents",
        (
            ALERTS.add_column("incident_id"),
            ALERTS.add_column("key"),
            ALERTS.add_column("change"),
            ALERTS.add_column("status"),
            ALERTS.add_column("tenant"),
            ALERTS.add_column("count"),
            ALERTS.add_column("version"),
            ALERTS.add_column("opened_at"),
            ALERTS.add_column("last_at"),
            ALERTS.add_column("ends_at"),
            ALERTS.add_column("reminders"),
            ALERTS.add_column("acknowledged_by"),
            ALERTS.add_column("acknowledged_at"),
            ALERTS.add_column("resolved_by"),
            ALERTS.add_column("resolved_at"),
            ALERTS.add_column("reason"),
            INCIDENTS,
        ),
    ),
)
"""In order, never changed once released. A column that is added later stands in `schema` for new databases, and in a
migration here (`ALTER TABLE … ADD COLUMN IF NOT EXISTS`) for those that exist. A column's type may only become wider:
an older service goes on storing its rows."""

# No transaction and no lock: ClickHouse has neither. Two programs at once both apply the same statements, which is
# harmless, and both record it, of which one row stays.
_RECORD = """
CREATE TABLE IF NOT EXISTS schema_migrations (
    version UInt32,
    name String,
    applied_at DateTime64(3, 'UTC') DEFAULT now64(3, 'UTC')
) ENGINE = ReplacingMergeTree(applied_at) ORDER BY version
"""


@dataclass(frozen=True, slots=True)
class Missing:
    """What of the schema a database lacks, though the migrations ran: somebody took it away."""

    what: str
    statement: str
    """Brings it back, without the rows."""


async def missing(analytics: Analytics) -> tuple[Missing, ...]:
    """Tables, columns and views of the schema that are not there. Raises as `Analytics.query` does."""
    found: dict[str, set[str]] = {}
    columns = "SELECT table, name FROM system.columns WHERE database = {database:String}"
    for table, column in (await analytics.query(columns, {"database": analytics.database})).rows:
        found.setdefault(table, set()).add(column)
    lacking: list[Missing] = []
    for table in TABLES:
        if table.name not in found:
            lacking.append(Missing(f"table {table.name}", table.ddl()))
            continue
        lacking += [
            Missing(f"column {table.name}.{column}", table.add_column(column))
            for column in table.columns
            if column not in found[table.name]
        ]
    lacking += [Missing(f"view {name}", statement) for name, statement in VIEWS.items() if name not in found]
    return tuple(lacking)


async def migrate(analytics: Analytics) -> tuple[str, ...]:
    """Creates the database and what is missing in it: what no migration made yet, and what was taken away since.

    Returns:
        What was done, a line each; empty when everything was there.

    Raises:
        AnalyticsUnavailable: ClickHouse does not answer.
        QueryFailed: it refuses, as when the user may not create tables.
    """
    done: list[str] = []
    if await analytics.create_database():
        done.append(f"created database {analytics.database}")
    await analytics.execute(_RECORD)
    applied = {row[0] for row in (await analytics.query("SELECT DISTINCT version FROM schema_migrations")).rows}
    for migration in MIGRATIONS:
        if migration.version in applied:
            continue
        for statement in migration.statements:
            await analytics.execute(statement)
        await analytics.execute(
            "INSERT INTO schema_migrations (version, name) SELECT {version:UInt32}, {name:String}",
            {"version": migration.version, "name": migration.name},
        )
        done.append(f"applied ClickHouse migration {migration.version} ({migration.name})")
    for gone in await missing(analytics):
        await analytics.execute(gone.statement)
        done.append(f"created {gone.what} again in ClickHouse: it was missing")
    return tuple(done)
