"""Messages become rows and come back the same, through the real engine."""

import json
import random
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from pydantic_core import to_json

from breakwater.alerts.contract import Alert
from breakwater.breakers.contract import BreakerTransition
from breakwater.jobs.contract.execution import Attempt, Execution
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.clickhouse.errors import UnstorableError
from breakwater.limits.contract import BudgetEvent, GuardEvent
from breakwater.records import rows, schema
from breakwater.records.search import find_execution
from tests.records import samples
from tests.tables import each_row


async def stored_and_read(analytics: Analytics, record: Execution) -> Execution | None:
    await analytics.insert(schema.EXECUTIONS, [rows.execution_row(record, 1)])
    await analytics.insert(schema.ATTEMPTS, [samples.attempt_row(attempt, 2) for attempt in record.attempts])
    return await find_execution(analytics, record.execution_id)


@pytest.mark.parametrize(
    "record",
    [
        samples.full_execution(),
        samples.bare_execution(),
        samples.execution(attempts=(samples.attempt("e1", 1), samples.attempt("e1", 2, cost=None, input_tokens=None))),
        samples.execution(output=[], metadata={}, messages=[]),
        samples.execution(output=False, total_cost=0),
    ],
    ids=["everything filled", "nothing filled", "two attempts", "empty values", "false and zero"],
)
async def test_an_execution_comes_back_as_it_went_in(analytics: Analytics, record: Execution) -> None:
    assert await stored_and_read(analytics, record) == record


async def test_an_execution_that_is_not_there_is_none(analytics: Analytics) -> None:
    assert await find_execution(analytics, "nobody") is None


async def test_money_is_exact_to_the_nano_dollar(analytics: Analytics) -> None:
    picked = random.Random(7)
    edges = [0, 1, 999_999_999, 1_000_000_000, 10**18 - 1, -1, -(10**18) + 1]
    costs = edges + [picked.randrange(10 ** picked.randint(1, 18)) for _ in range(500)]
    attempts = [samples.attempt(f"e{index}", cost=cost) for index, cost in enumerate(costs)]
    await analytics.insert(schema.ATTEMPTS, [samples.attempt_row(attempt, 1) for attempt in attempts])
    stored = await analytics.read(dict, "SELECT execution_id, cost FROM attempts FINAL")
    assert {row["execution_id"]: row["cost"] for row in stored} == {
        f"e{index}": cost for index, cost in enumerate(costs)
    }
    total = await analytics.query("SELECT sum(cost) FROM attempts FINAL")
    assert total.rows[0][0] * 10**9 == sum(costs)


async def test_waste_by_cause_is_exact_to_the_nano_dollar(analytics: Analytics) -> None:
    picked = random.Random(8)
    edges = [0, 1, 999_999_999, 10**18 - 1]
    records = [
        samples.execution(f"e{index}", wasted_by_cause={"retry": cost, "fallback": picked.randrange(10**18)})
        for index, cost in enumerate(edges + [picked.randrange(10 ** picked.randint(1, 18)) for _ in range(200)])
    ]
    await analytics.insert(schema.EXECUTIONS, [rows.execution_row(record, 1) for record in records])
    stored = await analytics.read(rows.execution_of, "SELECT * EXCEPT (event_sequence) FROM executions FINAL")
    found = {record.execution_id: record for record in stored}
    assert found == {record.execution_id: record for record in records}


async def test_an_attempt_keeps_when_its_message_was_stored(analytics: Analytics) -> None:
    stored_at = samples.NOON + timedelta(hours=3, milliseconds=7)
    await analytics.insert(schema.ATTEMPTS, [rows.attempt_row(samples.attempt(), 1, stored_at)])
    assert (await analytics.query("SELECT stored_at FROM attempts")).rows == ((stored_at,),)


async def test_an_unknown_cost_is_null_and_a_cost_of_zero_is_zero(analytics: Analytics) -> None:
    attempts = [samples.attempt("unknown", cost=None, cost_basis="unknown"), samples.attempt("free", cost=0)]
    await analytics.insert(schema.ATTEMPTS, [samples.attempt_row(attempt, 1) for attempt in attempts])
    stored = await analytics.query("SELECT execution_id, cost FROM attempts FINAL ORDER BY execution_id")
    assert stored.rows == (("free", Decimal(0)), ("unknown", None))


@pytest.mark.parametrize("transition", [samples.transition(), samples.full_transition()], ids=["plain", "full"])
async def test_a_transition_stands_in_the_right_columns(analytics: Analytics, transition: BreakerTransition) -> None:
    await analytics.insert(schema.BREAKER_TRANSITIONS, [rows.transition_row(transition, 3)])
    found = await analytics.query("SELECT * FROM breaker_transitions FINAL")
    kept = transition.model_dump(exclude={"alone", "open_for", "waits"})
    assert list(found.named_rows()) == [{**kept, "event_sequence": 3}]


@pytest.mark.parametrize("event", [samples.guard_event(), samples.full_guard_event()], ids=["plain", "full"])
async def test_a_guard_event_stands_in_the_right_columns(analytics: Analytics, event: GuardEvent) -> None:
    await analytics.insert(schema.GUARD_EVENTS, [rows.guard_row(event, 4)])
    found = await analytics.query("SELECT * FROM guard_events FINAL")
    assert list(found.named_rows()) == [{**event.model_dump(), "cost": Decimal("1.000000001"), "event_sequence": 4}]


async def test_a_guard_event_that_arrives_twice_is_one_row(analytics: Analytics) -> None:
    for sequence in (4, 9):
        await analytics.insert(schema.GUARD_EVENTS, [rows.guard_row(samples.guard_event(), sequence)])
    # As people write it: `by` is a word of SQL and a column here.
    found = await analytics.query("SELECT task_id, by, sum(cost) FROM guard_events FINAL GROUP BY task_id, by")
    assert found.rows == (("task-7", None, Decimal("1.000000001")),)


async def test_an_action_stands_in_the_right_columns_and_its_outcome_replaces_its_beginning(
    analytics: Analytics,
) -> None:
    begun, done = samples.audit_event(outcome="begun"), samples.audit_event()
    for sequence, event in ((1, begun), (2, done), (1, begun)):
        await analytics.insert(schema.AUDIT, [rows.audit_row(event, sequence)])
    [found] = (await analytics.query("SELECT * FROM audit FINAL")).named_rows()
    details = json.loads(found.pop("details"))
    assert {**found, "details": details} == {**done.model_dump(), "event_sequence": 2}


async def test_an_attempt_keeps_its_breakers_version_and_its_errors_identity(analytics: Analytics) -> None:
    attempts = [samples.full_attempt(), samples.attempt()]
    await analytics.insert(schema.ATTEMPTS, [samples.attempt_row(attempt, 1) for attempt in attempts])
    found = await analytics.query("SELECT breaker_version, error_hash FROM attempts FINAL ORDER BY execution_id")
    assert found.rows == ((2**40, "1a2b3c4d"), (None, None))


@pytest.mark.parametrize(
    "event",
    [samples.budget_event(), samples.full_budget_event(), samples.repair()],
    ids=["a crossing", "a raise", "a repair"],
)
async def test_what_happened_to_a_budget_comes_back_as_it_went_in(analytics: Analytics, event: BudgetEvent) -> None:
    await analytics.insert(schema.BUDGET_EVENTS, [rows.budget_row(event, 4)])
    (row,) = (await analytics.query("SELECT * FROM budget_events FINAL")).named_rows()
    assert rows.budget_of(**row) == event
    assert row["event_sequence"] == 4


async def test_the_amounts_of_a_budget_stand_in_the_right_columns(analytics: Analytics) -> None:
    await analytics.insert(schema.BUDGET_EVENTS, [rows.budget_row(samples.full_budget_event(), 4)])
    found = await analytics.query("SELECT limit_cost, total_cost, previous_cost, by, reason FROM budget_events")
    amounts = (Decimal("999999999.999999999"), Decimal("8.000000001"), Decimal("10.000000001"))
    assert found.rows == ((*amounts, "ops: Zoë", "the launch"),)


@pytest.mark.parametrize("alert", [samples.alert(), samples.full_alert()], ids=["plain", "full"])
async def test_a_change_of_an_incident_stands_in_the_right_columns(analytics: Analytics, alert: Alert) -> None:
    await analytics.insert(schema.ALERTS, [rows.alert_row(alert, 5)])
    found = await analytics.query("SELECT * FROM alerts FINAL")
    fields = alert.model_dump(exclude={"remind_at", "last_event_id"})
    assert list(found.named_rows()) == [
        {**fields, "payload": to_json(alert.payload).decode(), "event_sequence": 5},
    ]


def test_more_waste_than_a_column_holds_is_refused() -> None:
    with pytest.raises(UnstorableError, match="1000000000000000000 nano-dollars"):
        rows.execution_row(samples.execution(wasted_by_cause={"retry": 10**18}), 1)


@each_row(
    "attempt",
    [
        samples.attempt(cost=10**18),
        samples.attempt(cost=-(10**18)),
        samples.attempt(started_at=datetime(2300, 1, 1, tzinfo=UTC)),
        samples.attempt(started_at=datetime(1969, 12, 31, tzinfo=UTC)),
        samples.attempt(started_at=datetime(2026, 11, 21)),
        samples.attempt(reserved=10**18),
        samples.attempt(reserved_at=datetime(2300, 1, 1, tzinfo=UTC)),
    ],
    ids=[
        *("too much money", "too much negative money", "after the calendar", "before the calendar", "no time zone"),
        *("too much held", "held after the calendar"),
    ],
)
def test_what_a_column_would_store_as_something_else_is_refused(attempt: Attempt) -> None:
    with pytest.raises(UnstorableError):
        samples.attempt_row(attempt, 1)
