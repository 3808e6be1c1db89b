"""The texts of old executions are emptied, by agent and tenant, and the rows stay."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import timedelta

import pytest

from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.clickhouse.errors import QueryError
from breakwater.records.rows import attempt_row, execution_row
from breakwater.records.schema import ATTEMPTS, EXECUTIONS
from breakwater.records.search import find_execution
from breakwater.records.settings import TextDays
from breakwater.records.texts import UnfinishedChangeError, expire_texts, unfinished_changes
from tests.helpers import until
from tests.records import samples
from tests.records.samples import NOON

DAYS = TextDays.model_validate({"all": 60, "agents": {"brief": 2}, "tenants": {"acme": 9, "o'brien": 1}})

EXPECTED = [
    # Agent, tenant, days ago, and True if its texts are gone.
    ("writer", None, 59, False),
    ("writer", None, 61, True),
    ("brief", None, 1, False),
    ("brief", None, 3, True),
    ("writer", "acme", 8, False),
    ("writer", "acme", 10, True),
    ("brief", "acme", 3, True),
    ("writer", "o'brien", 2, True),
]


async def test_texts_are_kept_for_the_fewest_days_that_apply(analytics: Analytics) -> None:
    records = [
        samples.full_execution(f"e{number}").model_copy(
            update={"agent": agent, "tenant": tenant, "completed_at": NOON - timedelta(days=days)}
        )
        for number, (agent, tenant, days, _) in enumerate(EXPECTED)
    ]
    await analytics.insert(EXECUTIONS, [execution_row(record, number) for number, record in enumerate(records)])
    assert await expire_texts(analytics, TextDays(), NOON) == 0
    assert await expire_texts(analytics, DAYS, NOON) == sum(gone for *_, gone in EXPECTED)

    async def gone() -> list[bool] | None:
        stored = [await find_execution(analytics, record.execution_id) for record in records]
        empty = [
            record is not None and (record.messages, record.output, record.metadata) == (None, None, {})
            for record in stored
        ]
        return empty if sum(empty) else None

    assert await until(gone, "the texts to go") == [gone for *_, gone in EXPECTED]
    assert await expire_texts(analytics, DAYS, NOON) == 0
    kept = await find_execution(analytics, "e1")
    assert kept is not None
    assert (kept.total_cost, kept.total_tokens) == (records[1].total_cost, records[1].total_tokens)


async def test_only_partitions_with_old_texts_are_rewritten_once_a_day_and_a_change_that_fails_is_told(
    analytics: Analytics,
) -> None:
    days = TextDays(all=3)
    ages = (timedelta(days=70), timedelta(days=5), timedelta(days=3))
    records = [
        samples.full_execution(f"e{number}").model_copy(update={"completed_at": NOON - age})
        for number, age in enumerate(ages)
    ]

    async def rewritten(count: int) -> list[str] | None:
        """The partitions, after so many changes."""
        sql = "SELECT mutation_id, command, is_done FROM system.mutations WHERE database = currentDatabase()"
        rows = (await analytics.query(sql)).rows
        changes = {(mutation_id, *re.findall(r"PARTITION ID '(\d+)'", command)) for mutation_id, command, _ in rows}
        ended = all(done for *_, done in rows)
        return [partition for _, partition in sorted(changes)] if ended and len(changes) == count else None

    for number, record in enumerate(records):
        await analytics.insert(EXECUTIONS, [execution_row(record, number)])
        changed = min(number + 1, 2)
        assert await expire_texts(analytics, days, NOON) == (number < 2)
        partitions = await until(lambda changed=changed: rewritten(changed), "the change to end", timeout_s=30)
        assert partitions == [f"{NOON - age:%Y%m}" for age in ages[:changed]]
    assert await expire_texts(analytics, days, NOON + timedelta(hours=11)) == 0, "the same day"
    fails = "ALTER TABLE executions UPDATE metadata = toString(throwIf(1, 'no room')) WHERE 1"
    with suppress(QueryError):  # as the embedded engine waits for it
        await analytics.execute(fails)

    async def told() -> bool:
        return any("no room" in change for change in await unfinished_changes(analytics))

    await until(told, "the failed change", timeout_s=30)
    with pytest.raises(UnfinishedChangeError, match="no room"):
        await expire_texts(analytics, days, NOON + timedelta(days=2))


async def test_error_messages_of_calls_go_with_the_texts_of_their_jobs(analytics: Analytics) -> None:
    """A provider's error may quote the prompt."""
    error = {"kind": "client", "class": "Refused", "message": "refused: a prompt", "retryable": False}
    attempts = [
        samples.attempt(
            f"e{number}", agent="brief", outcome="error", error=error, started_at=NOON - timedelta(days=days)
        )
        for number, days in enumerate((1, 3))
    ]
    rows = [attempt_row(attempt, number, NOON) for number, attempt in enumerate(attempts)]
    await analytics.insert(ATTEMPTS, rows)
    assert await expire_texts(analytics, DAYS, NOON) == 1

    async def messages() -> bool:
        stored = await analytics.query("SELECT error_message, error_class FROM attempts FINAL ORDER BY execution_id")
        return stored.rows == (("refused: a prompt", "Refused"), ("erased", "Refused"))

    await until(messages, "the older message to go", timeout_s=30)
    assert await expire_texts(analytics, DAYS, NOON) == 0
