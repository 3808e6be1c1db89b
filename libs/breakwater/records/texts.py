"""The texts of jobs in `executions` and `attempts`, which may be emptied before their rows expire. Sums stay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.clickhouse.table import PLAIN, Layout, Table
from breakwater.records.schema import ATTEMPTS, EXECUTIONS
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


_HAS_ERROR = f"ifNull(error_message, '{ERASED}') != '{ERASED}'"
_HAS_TEXTS = " OR ".join((*(f"{column} IS NOT NULL" for column in TEXTS), "metadata != '{}'", _HAS_ERROR))


@dataclass(frozen=True, slots=True)
class _Texts:
    """The texts of a table."""

    table: Table
    columns: Sequence[str]
    """Those that become NULL."""
    changes: Mapping[str, str]
    there: str
    """The condition of rows with texts."""


_EXPIRING = (
    _Texts(EXECUTIONS, TEXTS, {"error_message": ERROR_MESSAGE, "metadata": "'{}'"}, _HAS_TEXTS),
    _Texts(
        ATTEMPTS,
        ("error_user_message",),
        {"error_message": ERROR_MESSAGE},
        f"error_user_message IS NOT NULL OR {_HAS_ERROR}",
    ),
)


async def expire_texts(analytics: Analytics, rules: TextDays, now: datetime, layout: Layout = PLAIN) -> int:
    """Begins to empty the texts that are older than the rules allow. Raises as `Analytics.query` does.

    Returns:
        The number of executions and attempts with such texts, but for a table whose earlier change has not ended.
    """
    return sum([await _expire(analytics, texts, rules, now, layout) for texts in _EXPIRING])


async def _expire(analytics: Analytics, texts: _Texts, rules: TextDays, now: datetime, layout: Layout) -> int:
    name = texts.table.name
    parameters: dict[str, object] = {}
    old = " OR ".join(_conditions(texts.table.time, rules, now, parameters))
    if not old:
        return 0
    condition = f"({old}) AND ({texts.there})"
    counted = f"SELECT count() FROM {name} WHERE {condition}"  # noqa: S608  of constants and parameters
    count = int((await analytics.query(counted, parameters)).rows[0][0])
    if not count:
        return 0
    unfinished = (
        "SELECT count() FROM system.mutations"
        " WHERE database = {database:String} AND table = {table:String} AND NOT is_done"
    )
    if (await analytics.query(unfinished, {"database": analytics.database, "table": name})).rows[0][0]:
        return 0
    clauses = emptying(texts.columns, texts.changes, condition, old)
    await analytics.execute(f"ALTER TABLE {name}{layout.on_cluster} {clauses}", parameters)
    return count


def _conditions(time: str, rules: TextDays, now: datetime, parameters: dict[str, object]) -> Iterator[str]:
    """Yields the conditions of old texts in SQL, and adds their parameters."""
    named = (
        *(((), days) for days in (rules.all,) if days is not None),
        *((("agent", name), days) for name, days in rules.agents.items()),
        *((("ifNull(tenant, '')", name), days) for name, days in rules.tenants.items()),
    )
    for number, (scope, days) in enumerate(named):
        parameters[f"before{number}"] = now - timedelta(days=days)
        condition = f"{time} < {{before{number}:DateTime64(3, 'UTC')}}"
        if scope:
            parameters[f"name{number}"] = scope[1]
            condition = f"{scope[0]} = {{name{number}:String}} AND {condition}"
        yield f"({condition})"
