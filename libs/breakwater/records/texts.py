"""The texts of jobs in `executions`, which may be emptied before their rows expire. Money, tokens and times stay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta

from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.clickhouse.table import PLAIN, Layout
from breakwater.records.schema import EXECUTIONS
from breakwater.records.settings import TextDays

ERASED = "erased"
"""Stands in place of texts that may not be missing."""

ERRORS: Mapping[str, str] = {
    "error_message": f"if(error_message IS NULL, NULL, '{ERASED}')",
    "error_user_message": "NULL",
}
"""The new values of the columns with texts of an error, in SQL."""

_TEXTS = ("output", "messages", "input", "params", "prompt_preview", "output_preview", "encrypted")

TEXTS: Mapping[str, str] = {**dict.fromkeys(_TEXTS, "NULL"), **ERRORS, "metadata": "'{}'"}
"""The new values of all columns with texts of an execution, in SQL."""

_HAS_TEXTS = " OR ".join(
    (
        *(f"{column} IS NOT NULL" for column in _TEXTS),
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
    assignments = ", ".join(f"{column} = {value}" for column, value in TEXTS.items())
    changed = f"ALTER TABLE {EXECUTIONS.name}{layout.on_cluster} UPDATE {assignments} WHERE {condition}"
    await analytics.execute(changed, parameters)
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
