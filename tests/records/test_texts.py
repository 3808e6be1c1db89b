"""The texts of old executions are emptied, by agent and tenant, and the rows stay."""

from __future__ import annotations

from datetime import timedelta

from breakwater.kernel.clickhouse.client import Analytics
from breakwater.records.rows import attempt_row, execution_row
from breakwater.records.schema import ATTEMPTS, EXECUTIONS
from breakwater.records.search import find_execution
from breakwater.records.settings import TextDays
from breakwater.records.texts import expire_texts
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
