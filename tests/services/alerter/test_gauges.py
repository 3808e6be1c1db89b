"""Which incidents Prometheus is shown."""

from breakwater.services.alerter.app import counted_incidents
from tests.services.alerter.messages import acknowledged, alert, stopped_task


def test_incidents_are_counted_by_event_severity_and_status() -> None:
    found = counted_incidents([alert(), alert(incident_id="another"), acknowledged(alert()), stopped_task()])
    assert {labels: number for labels, number in found.items() if number} == {
        ("breaker_open", "critical", "firing"): 2,
        ("breaker_open", "critical", "acknowledged"): 1,
        ("guard_tripped", "warning", "pending"): 1,
    }


def test_where_there_are_none_that_is_known() -> None:
    found = counted_incidents([])
    assert found["budget_hard_cap", "critical", "firing"] == 0
    assert set(found.values()) == {0}
    assert not any(status == "resolved" for _, _, status in found)


def test_a_channel_that_is_dead_is_as_severe_as_any_incident() -> None:
    dead = alert(
        key="job_dead_lettered//undeliverable/ops", first_event="job_dead_lettered", highest_severity="critical"
    )
    assert counted_incidents([dead])["job_dead_lettered", "critical", "firing"] == 1
