"""The view of incidents: the newest change of each, however often and in whatever order changes are stored."""

from datetime import datetime, timedelta
from typing import Any

from breakwater.alerts.contract import Alert
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.records import rows, schema
from tests.records import samples

OPENED = samples.alert()


def after(minutes: float) -> datetime:
    return samples.NOON + timedelta(minutes=minutes)


def then(before: Alert, minutes: float, change: str, **fields: Any) -> Alert:
    """The next change of an incident, so many minutes after noon."""
    version = before.version + 1
    at = after(minutes)
    following = {"alert_id": f"alert_i1_{version}", "version": version, "change": change, "at": at, **fields}
    return Alert.model_validate({**before.model_dump(), **following})


REPEATED = then(OPENED, 1, "repeated", count=2, last_at=after(1))
ACKNOWLEDGED = then(REPEATED, 2, "acknowledged", status="acknowledged", acknowledged_by="ops", acknowledged_at=after(2))
OVER = {"status": "resolved", "resolved_at": after(5), "event": "breaker_closed", "severity": "info"}
RESOLVED = then(ACKNOWLEDGED, 5, "resolved", **OVER)
REOPENED = then(
    RESOLVED,
    6,
    "reopened",
    status="firing",
    event="breaker_open",
    severity="critical",
    count=3,
    last_at=after(6),
    acknowledged_by=None,
    acknowledged_at=None,
    resolved_at=None,
)


async def store(analytics: Analytics, *alerts: Alert, first_sequence: int = 1) -> None:
    for sequence, alert in enumerate(alerts, first_sequence):
        await analytics.insert(schema.ALERTS, [rows.alert_row(alert, sequence)])


async def incidents(analytics: Analytics, **only: str) -> list[dict[str, Any]]:
    where = " AND ".join(f"{name} = {{{name}:String}}" for name in only)
    return list(
        (await analytics.query(f"SELECT * FROM incidents{f' WHERE {where}' if only else ''}", only)).named_rows()
    )


async def test_an_incident_is_its_newest_change_with_every_field(analytics: Analytics) -> None:
    full = samples.full_alert()
    await store(analytics, full)
    fields = full.model_dump(exclude={"alert_id", "source_id", "last_event_id", "at", "remind_at", "payload"})
    (found,) = await incidents(analytics)
    assert found == {
        **fields,
        "payload": '{"cost":"1.000000001","deep":[{"er":null}]}',
        "changed_at": full.at,
        "duration_ms": 180_007,
        "time_to_acknowledge_ms": 120_000,
    }


async def test_changes_that_arrive_twice_and_out_of_order_are_one_incident(analytics: Analytics) -> None:
    await analytics.execute(f"SYSTEM STOP MERGES {analytics.database}.alerts")
    await store(analytics, RESOLVED, OPENED, ACKNOWLEDGED, REPEATED)
    await store(analytics, OPENED, REPEATED, first_sequence=1)
    await store(analytics, samples.full_alert(), first_sequence=9)
    assert (await analytics.query("SELECT count() FROM alerts")).rows == ((7,),)
    assert (await analytics.query("SELECT count() FROM incidents")).rows == ((2,),)
    (found,) = await incidents(analytics, incident_id="inc_i1")
    assert (found["version"], found["status"], found["change"], found["count"]) == (4, "resolved", "resolved", 2)
    assert (found["duration_ms"], found["time_to_acknowledge_ms"]) == (300_000, 120_000)


async def test_an_incident_that_nobody_acknowledged_and_that_goes_on_has_no_times(analytics: Analytics) -> None:
    await store(analytics, OPENED, REPEATED)
    (found,) = await incidents(analytics)
    assert (found["status"], found["count"], found["last_at"]) == ("firing", 2, after(1))
    assert found["duration_ms"] is found["time_to_acknowledge_ms"] is found["resolved_at"] is None


async def test_a_reopened_incident_has_no_end_and_keeps_when_it_was_acknowledged_first(analytics: Analytics) -> None:
    await store(analytics, OPENED, REPEATED, ACKNOWLEDGED, RESOLVED, REOPENED)
    (found,) = await incidents(analytics)
    assert (found["status"], found["resolved_at"], found["acknowledged_by"]) == ("firing", None, None)
    assert (found["duration_ms"], found["time_to_acknowledge_ms"]) == (None, 120_000)


async def test_a_condition_is_about_the_newest_change_and_not_about_earlier_ones(analytics: Analytics) -> None:
    await store(analytics, OPENED, REPEATED, ACKNOWLEDGED, RESOLVED)
    assert await incidents(analytics, status="firing") == []
    assert len(await incidents(analytics, status="resolved")) == 1


async def test_an_incident_that_is_over_is_still_what_it_was(analytics: Analytics) -> None:
    await store(analytics, OPENED, RESOLVED)
    (found,) = await incidents(analytics)
    assert (found["event"], found["severity"]) == ("breaker_closed", "info")
    assert (found["first_event"], found["highest_severity"]) == ("breaker_open", "critical")
