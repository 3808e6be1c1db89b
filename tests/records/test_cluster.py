"""The same schema on a replicated cluster. There is none here: the engine says that it can read every statement."""

from __future__ import annotations

import re

import pytest

from breakwater.kernel.clickhouse.client import Analytics, ResultSet, connect
from breakwater.kernel.clickhouse.errors import SchemaMismatchError
from breakwater.kernel.clickhouse.table import Layout, Table
from breakwater.records.migrations import MIGRATIONS, VIEWS, create_view, migrate, migrations, script
from breakwater.records.schema import ATTEMPTS, TABLES
from tests.records.samples import schema_of
from tests.tables import each_row

CLUSTER = Layout("main", {"attempts": 90})
PATH = "'/clickhouse/tables/{shard}/{database}/{table}', '{replica}'"


def in_words(statement: str) -> str:
    return " ".join(statement.split())


def every_statement() -> list[str]:
    """What `setup --print-sql` prints, one by one; comments hold statements, too."""
    text = "\n".join(line.removeprefix("-- ") if " ALTER " in line else line for line in script("bw", CLUSTER))
    lines = [line for line in text.splitlines() if not line.startswith("--")]
    return [statement for part in "\n".join(lines).split(";\n") if (statement := part.strip().rstrip(";"))]


async def test_the_engine_can_read_every_statement(analytics: Analytics) -> None:
    statements = every_statement()
    assert len(statements) > len(TABLES) + len(VIEWS)
    for statement in statements:
        if not statement.startswith("USE "):
            await analytics.query(f"EXPLAIN AST {statement}")


def test_every_statement_that_makes_or_changes_something_is_for_the_whole_cluster() -> None:
    changing = [one for one in every_statement() if re.match(r"CREATE|ALTER|DROP", one)]
    assert len(changing) > len(TABLES) + len(VIEWS)
    for statement in changing:
        head = in_words(statement).split("(")[0]
        assert re.match(
            r"(CREATE (DATABASE|TABLE) IF NOT EXISTS|CREATE OR REPLACE VIEW|ALTER TABLE) \S+ ON CLUSTER 'main'", head
        ), head


@each_row("table", TABLES, ids=lambda table: table.name)
def test_a_table_of_a_cluster_differs_in_its_engine_and_in_where_it_is_made(table: Table) -> None:
    plain, clustered = table.ddl(), table.ddl(Layout("main"))
    expected = plain.replace(f"EXISTS {table.name} (", f"EXISTS {table.name} ON CLUSTER 'main' (").replace(
        "ReplacingMergeTree(event_sequence)", f"ReplicatedReplacingMergeTree({PATH}, event_sequence)"
    )
    assert clustered == expected != plain


def test_views_and_migrations_differ_in_where_they_are_made_only() -> None:
    for name in VIEWS:
        assert create_view(name, CLUSTER).replace(" ON CLUSTER 'main'", "") == create_view(name)
    plain = [(one.version, one.name, len(one.statements)) for one in MIGRATIONS]
    assert [(one.version, one.name, len(one.statements)) for one in migrations(CLUSTER)] == plain


def test_retention_is_part_of_the_tables() -> None:
    assert "INTERVAL 90 DAY" in ATTEMPTS.ddl(CLUSTER)
    assert "INTERVAL 400 DAY" in ATTEMPTS.ddl()


async def test_the_printed_statements_make_what_setup_makes(analytics: Analytics) -> None:
    """By hand, on one server: afterwards nothing is left to be done, but for the retention that is a comment."""
    by_hand = connect("http://nobody@127.0.0.1:1/by_hand").database
    made_by_setup = await schema_of(analytics)
    for table in (*VIEWS, *(table.name for table in TABLES), "schema_migrations"):
        await analytics.execute(f"DROP TABLE {table}")
    text = "\n".join(script(by_hand, Layout()))
    for statement in re.sub(r"^--.*$", "", text, flags=re.MULTILINE).split(";\n"):
        if statement.strip() and "by_hand" not in statement:
            await analytics.execute(statement.rstrip(";\n"))
    assert await schema_of(analytics) == made_by_setup
    assert await migrate(analytics) == ()


class Replicated(Analytics):
    """Says that a table is replicated, and records the statements it is sent."""

    def __init__(self, engine: str) -> None:
        super().__init__({}, "bw", 1.0)
        self.engine = engine
        self.asked: list[str] = []
        self.reported: list[str] = []

    async def query(self, sql: str, *_: object) -> ResultSet:
        self.asked.append(sql)
        return ResultSet(("engine",), ((self.engine,),) if self.engine else ())

    async def execute(self, sql: str, *_: object) -> None:
        self.reported.append(sql)


async def test_a_replica_catches_up_before_money_is_counted() -> None:
    replica = Replicated("ReplicatedReplacingMergeTree")
    await replica.caught_up(ATTEMPTS)
    await replica.caught_up(ATTEMPTS)
    assert replica.reported == ["SYSTEM SYNC REPLICA `attempts` LIGHTWEIGHT"] * 2
    assert len(replica.asked) == 1


@pytest.mark.parametrize("engine", ["ReplacingMergeTree", "SharedReplacingMergeTree", ""])
async def test_what_is_not_replicated_has_nothing_to_catch_up_with(engine: str) -> None:
    single = Replicated(engine)
    await single.caught_up(ATTEMPTS)
    assert single.reported == []


async def test_catching_up_on_one_server_is_nothing(analytics: Analytics) -> None:
    await analytics.caught_up(ATTEMPTS)


async def test_tables_of_one_server_are_not_taken_for_those_of_a_cluster(analytics: Analytics) -> None:
    with pytest.raises(SchemaMismatchError, match=r"clickhouse.cluster is 'main', but table alerts .* INSERT INTO"):
        await migrate(analytics, CLUSTER)
    assert await migrate(analytics) == ()
