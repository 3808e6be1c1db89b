"""Incidents as the console lists them, on a real ClickHouse."""

from datetime import timedelta
from typing import Any

from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.time_window import TimeWindow
from breakwater.records import rows, schema
from breakwater.records.events import cursor_of, incident_changes, incidents
from tests.records import samples

WINDOW = TimeWindow(samples.NOON - timedelta(hours=1), samples.NOON + timedelta(hours=1), 60)


def incident(name: str, minutes: float = 0, **fields: Any) -> Any:
    at = samples.NOON + timedelta(minutes=minutes)
    return samples.alert(f"alert_{name}_1", incident_id=f"inc_{name}", opened_at=at, last_at=at, at=at, **fields)


async def store(analytics: Analytics, *alerts: Any) -> None:
    for sequence, one in enumerate(alerts, 1):
        await analytics.insert(schema.ALERTS, [rows.alert_row(one, sequence)])


async def test_incidents_are_found_by_what_they_are_of(analytics: Analytics):
    closed = {"status": "resolved", "event": "breaker_closed", "change": "resolved", "resolved_at": samples.NOON}
    closed |= {"first_event": "breaker_open"}
    await store(
        analytics,
        incident("a", 0),
        incident("b", 1, **closed),
        incident("c", 2, event="budget_hard_cap", key="budget_hard_cap/agent/x/daily", agent="x"),
        incident("d", -61),
    )

    async def found(**by: str) -> list[str]:
        return [one.incident_id for one in await incidents(analytics, WINDOW, **by)]

    assert await found() == ["inc_c", "inc_b", "inc_a"], "the latest first, without those of before"
    assert await found(status="resolved") == ["inc_b"]
    assert await found(event="breaker_open") == ["inc_b", "inc_a"], "what closed was open before"
    assert await found(event="breaker_closed") == ["inc_b"]
    assert await found(agent="x") == ["inc_c"]
    assert await found(event="breaker%") == []


async def test_pages_leave_none_out_and_show_none_twice(analytics: Analytics):
    await store(analytics, *(incident(f"{number:02}", number // 4) for number in range(11)))
    seen: list[str] = []
    before = None
    while page := await incidents(analytics, WINDOW, before=before, limit=3):
        seen += [one.incident_id for one in page]
        before = cursor_of(page[-1])
    assert seen == [f"inc_{number:02}" for number in reversed(range(11))]


async def test_the_changes_of_one_in_their_order(analytics: Analytics):
    opened = incident("a")
    fields = {"alert_id": "alert_a_2", "version": 2, "change": "acknowledged", "status": "acknowledged"}
    acknowledged = opened.model_copy(update={**fields, "acknowledged_by": "ops", "acknowledged_at": samples.NOON})
    await store(analytics, acknowledged, opened, opened, incident("b"))
    found = await incident_changes(analytics, "inc_a")
    assert [(one.version, one.change, one.acknowledged_by) for one in found] == [
        (1, "opened", None),
        (2, "acknowledged", "ops"),
    ]
    assert found[0].payload == {"failures": 3}
    assert await incident_changes(analytics, "inc_nothing") == ()
