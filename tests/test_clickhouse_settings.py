"""What the config says of ClickHouse, and what `breakwater setup` makes of it."""

from __future__ import annotations

import pytest

from breakwater.config import parse_config
from breakwater.config.servers import layout, statements
from breakwater.kernel.clickhouse.table import RETENTION_DAYS
from breakwater.kernel.errors import ConfigError
from breakwater.records.schema import TABLES
from breakwater.records.settings import RetentionDays
from tests.tables import each_row

PLAIN = "providers: {p: {base_url: 'http://x'}}\nagents: {a: {model: m}}\n"


def test_every_table_has_its_retention_and_keeps_rows_for_400_days_unless_configured() -> None:
    assert RetentionDays().model_dump() == {table.name: RETENTION_DAYS for table in TABLES}
    assert layout(parse_config(PLAIN)).cluster is None


def test_what_is_set_is_what_the_tables_are_made_with() -> None:
    config = parse_config(PLAIN + "clickhouse: {cluster: '{cluster}', retention_days: {executions: 30, attempts: 100}}")
    made = layout(config)
    assert made.cluster == "{cluster}"
    days = {table.name: table.days(made) for table in TABLES}
    assert days == {**{table.name: 400 for table in TABLES}, "executions": 30, "attempts": 100}


@each_row(
    ("settings", "words"),
    [
        ("retention_days: {attempts: 99}", "clickhouse.retention_days.attempts: must be at least 100 days, not 99"),
        ("retention_days: {budget_events: 1}", "clickhouse.retention_days.budget_events: must be at least 100 days"),
        ("retention_days: {attempts: 61}", "if Redis loses its counters, the budgets of this quarter are rebuilt"),
        ("retention_days: {executions: 0}", "executions: should be greater than or equal to 1 (found 0)"),
        ("retention_days: {alerts: 1.5}", "alerts: should be a valid integer"),
        ("retention_days: {alert: 5}", "alert: is not a known setting; did you mean 'alerts'?"),
        ("retention: {}", "clickhouse.retention: is not a known setting"),
        ('cluster: "a\' SYNC"', "clickhouse.cluster: String should match pattern"),
    ],
)
def test_a_mistake_is_named_with_what_is_right(settings: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(PLAIN + f"clickhouse: {{{settings}}}")
    assert words in str(caught.value)


def test_the_printed_statements_are_for_the_database_of_the_address_and_hold_no_password() -> None:
    config = parse_config(PLAIN + "clickhouse: {cluster: main, retention_days: {guard_events: 7}}")
    text = "\n".join(statements("http://breakwater:hidden@127.0.0.1:8123/plane", config))
    assert text.startswith("CREATE DATABASE IF NOT EXISTS `plane` ON CLUSTER 'main';\nUSE `plane`;\n")
    assert "TTL toDateTime(at) + INTERVAL 7 DAY" in text
    assert "hidden" not in text
