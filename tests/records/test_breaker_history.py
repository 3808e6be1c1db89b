"""What breakers did, on a real ClickHouse."""

from datetime import datetime, timedelta
from typing import Any

from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.time_window import TimeWindow
from breakwater.records import rows, schema
from breakwater.records.events import openings, operator_actions, transitions
from tests.records import samples

NOON = samples.NOON


def after(minutes: float) -> datetime:
    return NOON + timedelta(minutes=minutes)


WINDOW = TimeWindow(after(-60), after(60), 60)


def change(version: int, minutes: float, to: str, **fields: Any) -> Any:
    agent, model = fields.get("agent", "writer"), fields.get("model", "gpt-4.1")
    before = {"open": "closed", "closed": "half_open", "half_open": "open", "isolated": "closed"}[to]
    rule = "consecutive_failures" if to == "open" else None
    given: dict[str, Any] = {"from_state": before, "to_state": to, "rule": rule, "at": after(minutes), **fields}
    return samples.transition(version, transition_id=f"{agent}/{model}#{version}", **given)


async def store(analytics: Analytics, *changes: Any) -> None:
    for sequence, one in enumerate(changes, 1):
        await analytics.insert(schema.BREAKER_TRANSITIONS, [rows.transition_row(one, sequence)])


async def test_changes_of_one_breaker_in_the_window_the_last_one_first(analytics: Analytics):
    opened, probed, closed = change(1, 0, "open"), change(2, 1, "half_open"), change(3, 2, "closed", by="ops")
    before, elsewhere = change(9, -61, "open"), change(1, 0, "open", model="gpt-4o")
    await store(analytics, probed, opened, closed, opened, before, elsewhere)
    found = await transitions(analytics, WINDOW, "writer", "gpt-4.1")
    assert [(one.version, one.from_state, one.to_state) for one in found] == [
        (3, "half_open", "closed"),
        (2, "open", "half_open"),
        (1, "closed", "open"),
    ]
    assert (found[0].by, found[2].rule, found[2].at) == ("ops", "consecutive_failures", NOON)
    assert found[2].open_until == after(1)
    assert len(await transitions(analytics, WINDOW, "writer", "gpt-4.1", limit=2)) == 2


async def test_an_opening_lasts_until_it_is_closed_and_only_its_part_in_the_window_counts(analytics: Analytics):
    await store(
        analytics,
        change(1, -90, "open"),
        change(2, -50, "half_open"),
        change(3, -49, "open", from_state="half_open", rule="probe_failed"),
        change(4, -30, "closed"),
        change(5, 0, "open", rule="same_error"),
        change(1, -200, "open", agent="*", model="openai/*"),
        change(2, -100, "closed", agent="*", model="openai/*"),
        change(1, -5, "isolated", agent="*", model="azure/*"),
    )
    found = await openings(analytics, WINDOW, after(10))
    assert [(one.agent, one.opened_at, one.closed_at) for one in found] == [
        ("writer", NOON, None),
        ("*", after(-5), None),
        ("writer", after(-90), after(-30)),
    ], "one that ended before the window is no part of it; a probe that failed is part of its opening"
    assert [(one.open_ms, one.in_window_ms) for one in found] == [
        (600_000, 600_000),
        (900_000,) * 2,
        (3_600_000, 1_800_000),
    ]
    assert [one.rule for one in found] == ["same_error", None, "consecutive_failures"]
    only = await openings(analytics, WINDOW, after(10), "*", "azure/*")
    assert [one.model for one in only] == ["azure/*"]


async def test_what_people_did_with_breakers_and_tasks(analytics: Analytics):
    await store(
        analytics,
        change(1, 0, "open"),
        change(2, 1, "closed", by="ops", reason="reset by ops: mended"),
        change(1, 2, "isolated", model="gpt-4o", by="zoë", reason="isolated by zoë"),
        change(9, -61, "closed", model="o3", by="too early"),
    )
    reset = samples.full_guard_event().model_copy(update={"at": after(3)})
    for sequence, event in enumerate((samples.guard_event(), reset, reset)):
        await analytics.insert(schema.GUARD_EVENTS, [rows.guard_row(event, sequence)])
    found = await operator_actions(analytics, WINDOW)
    assert [(one.by, one.action, one.model, one.task_id, one.tenant) for one in found] == [
        ("ops", "reset", None, "task-7", "acme"),
        ("zoë", "isolated", "gpt-4o", None, None),
        ("ops", "reset", "gpt-4.1", None, None),
    ]
    assert found[2].reason == "reset by ops: mended"
    assert [one.by for one in await operator_actions(analytics, WINDOW, limit=1)] == ["ops"]
