"""The texts of jobs in `executions`, which may be emptied before their rows expire. Money, tokens and times stay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta

from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.clickhouse.table import PLAIN, Layout
from breakwater.records.schema import EXECUTIONS
from breakwater.records.settings import TextDays

ERASED = "erased"
"""Stands in place of texts that may not be missing."""

ERROR_MESSAGE = f"if(error_message IS NULL, NULL, '{ERASED}')"

TEXTS = ("output", "messages", "input", "params", "prompt_preview", "output_preview", "encrypted", "error_user_message")
"""The columns with texts of an execution that become NULL."""


def emptying(columns: Iterable[str], changes: Mapping[str, str], condition: str, then: str) -> str:
    """Returns the clauses of an ALTER TABLE that make columns NULL, and change others.

    ClickHouse keeps the bytes of a value under a NULL that takes its place. So columns are first emptied; each part of
    the table is replaced once, when both is done.

    Args:
        columns: become NULL.
        changes: further columns, and their new values in SQL.
        condition: of the rows.
        then: a condition of the same rows, after that.
    """
    first = {**dict.fromkeys(columns, "''"), **changes}
    emptied = ", ".join(f"{column} = {value}" for column, value in first.items())
    nulled = ", ".join(f"{column} = nullIf({column}, '')" for column in columns)
    return f"UPDATE {emptied} WHERE {condition}, UPDATE {nulled} WHERE {then}"


_HAS_TEXTS = " OR ".join(
    (
        *(f"{column} IS NOT NULL" for column in TEXTS),
        "metadata != '{}'",
        f"ifNull(error_message, '{ERASED}') != '{ERASED}'",
    )
)


async def expire_texts(analytics: Analytics, rules: TextDays, now: datetime, layout: Layout = PLAIN) -> int:
    """Begins to empty the texts that are older than the rules allow. Raises as `Analytics.query` does.

    Returns:
        The number of executions with such texts; 0 while an earlier change of the table has not ended.
    """
    parameters: dict[str, object] = {}
    old = " OR ".join(_conditions(rules, now, parameters))
    if not old:
        return 0
    condition = f"({old}) AND ({_HAS_TEXTS})"
    counted = f"SELECT count() FROM {EXECUTIONS.name} WHERE {condition}"  # noqa: S608  of constants and parameters
    count = int((await analytics.query(counted, parameters)).rows[0][0])
    if not count:
        return 0
    unfinished = (
        "SELECT count() FROM system.mutations"
        " WHERE database = {database:String} AND table = {table:String} AND NOT is_done"
    )
    where = {"database": analytics.database, "table": EXECUTIONS.name}
    if (await analytics.query(unfinished, where)).rows[0][0]:
        return 0
    changes = {"error_message": ERROR_MESSAGE, "metadata": "'{}'"}
    clauses = emptying(TEXTS, changes, condition, old)
    await analytics.execute(f"ALTER TABLE {EXECUTIONS.name}{layout.on_cluster} {clauses}", parameters)
    return count


def _conditions(rules: TextDays, now: datetime, parameters: dict[str, object]) -> Iterator[str]:
    """Yields the conditions of old texts in SQL, and adds their parameters."""
    named = (
        *(((), days) for days in (rules.all,) if days is not None),
        *((("agent", name), days) for name, days in rules.agents.items()),
        *((("ifNull(tenant, '')", name), days) for name, days in rules.tenants.items()),
    )
    for number, (scope, days) in enumerate(named):
        parameters[f"before{number}"] = now - timedelta(days=days)
        condition = f"{EXECUTIONS.time} < {{before{number}:DateTime64(3, 'UTC')}}"
        if scope:
            parameters[f"name{number}"] = scope[1]
            condition = f"{scope[0]} = {{name{number}:String}} AND {condition}"
        yield f"({condition})"
