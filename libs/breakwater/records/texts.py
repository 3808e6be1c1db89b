"""The texts of jobs in `executions` and `attempts`, which may be emptied before their rows expire. Sums stay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.clickhouse.table import PLAIN, Layout, Table
from breakwater.kernel.errors import BreakwaterError
from breakwater.records.schema import ATTEMPTS, EXECUTIONS
from breakwater.records.settings import TextDays

ERASED = "erased"
"""Stands in place of texts that may not be missing."""

ERROR_MESSAGE = f"if(error_message IS NULL, NULL, '{ERASED}')"

LONG_S = 3600
"""The seconds for which a change of rows may take."""


class UnfinishedChangeError(BreakwaterError):
    """ClickHouse does not end a change of rows."""


TEXTS = ("output", "messages", "input", "params", "prompt_preview", "output_preview", "encrypted", "error_user_message")
"""The columns with texts of an execution that become NULL."""


def emptying(columns: Iterable[str], changes: Mapping[str, str], condition: str, then: str, partition: str = "") -> str:
    """Returns the clauses of an ALTER TABLE that make columns NULL, and change others.

    ClickHouse keeps the bytes of a value under a NULL that takes its place. So columns are first emptied; each part of
    the table is replaced once, when both is done.

    Args:
        columns: become NULL.
        changes: further columns, and their new values in SQL.
        condition: of the rows.
        then: a condition of the same rows, after that.
        partition: the id of the only partition that is changed; by default, all are.
    """
    within = f" IN PARTITION ID '{partition}'" if partition else ""
    first = {**dict.fromkeys(columns, "''"), **changes}
    emptied = ", ".join(f"{column} = {value}" for column, value in first.items())
    nulled = ", ".join(f"{column} = nullIf({column}, '')" for column in columns)
    return f"UPDATE {emptied}{within} WHERE {condition}, UPDATE {nulled}{within} WHERE {then}"


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
    """Begins to empty the texts that are older than the rules allow, at most once a day for each of them.

    Returns:
        The number of executions and attempts with such texts, but for a table whose earlier change has not ended.

    Raises:
        UnfinishedChangeError: an earlier change fails, or has not ended for `LONG_S`.
        AnalyticsUnavailableError, QueryError: repeat it.
    """
    if unfinished := await unfinished_changes(analytics):
        raise UnfinishedChangeError(unfinished[0])
    return sum([await _expire(analytics, texts, rules, now, layout) for texts in _EXPIRING])


async def unfinished_changes(analytics: Analytics) -> list[str]:
    """The changes of rows that fail, or have not ended for `LONG_S`, in words. Raises as `Analytics.query` does."""
    sql = (
        "SELECT table, mutation_id, create_time, latest_fail_reason FROM system.mutations"
        " WHERE database = {database:String} AND NOT is_done"
        " AND (latest_fail_reason != '' OR create_time < now() - {long_s:UInt32}) ORDER BY create_time"
    )
    rows = (await analytics.query(sql, {"database": analytics.database, "long_s": LONG_S})).rows
    return [
        f"{mutation_id} of {table}, begun at {begun:%Y-%m-%d %H:%M}, has not ended: {reason or 'it is still running'}"
        for table, mutation_id, begun, reason in rows
    ]


async def _expire(analytics: Analytics, texts: _Texts, rules: TextDays, now: datetime, layout: Layout) -> int:
    name = texts.table.name
    parameters: dict[str, object] = {}
    # By days: whatever is changed, ClickHouse rewrites the files that have it.
    today = now.replace(hour=0, minute=0, second=0, microsecond=0)
    old = " OR ".join(_conditions(texts.table.time, rules, today, parameters))
    if not old:
        return 0
    condition = f"({old}) AND ({texts.there})"
    counted = f"SELECT _partition_id, count() FROM {name} WHERE {condition} GROUP BY 1"  # noqa: S608  of constants and parameters
    partitions = (await analytics.query(counted, parameters)).rows
    unfinished = (
        "SELECT count() FROM system.mutations"
        " WHERE database = {database:String} AND table = {table:String} AND NOT is_done"
    )
    if (await analytics.query(unfinished, {"database": analytics.database, "table": name})).rows[0][0]:
        return 0
    emptied = " OR ".join(f"{column} = ''" for column in texts.columns)
    for partition, _ in partitions:
        clauses = emptying(texts.columns, texts.changes, condition, f"({old}) AND ({emptied})", partition)
        await analytics.execute(f"ALTER TABLE {name}{layout.on_cluster} {clauses}", parameters)
    return sum(count for _, count in partitions)


def _conditions(time: str, rules: TextDays, today: datetime, parameters: dict[str, object]) -> Iterator[str]:
    """Yields the conditions of old texts in SQL, and adds their parameters."""
    named = (
        *(((), days) for days in (rules.all,) if days is not None),
        *((("agent", name), days) for name, days in rules.agents.items()),
        *((("ifNull(tenant, '')", name), days) for name, days in rules.tenants.items()),
    )
    for number, (scope, days) in enumerate(named):
        parameters[f"before{number}"] = today - timedelta(days=days)
        condition = f"{time} < {{before{number}:DateTime64(3, 'UTC')}}"
        if scope:
            parameters[f"name{number}"] = scope[1]
            condition = f"{scope[0]} = {{name{number}:String}} AND {condition}"
        yield f"({condition})"
