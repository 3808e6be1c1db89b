"""Operator actions on incidents, over HTTP: which are reported, who looks after them, and what is on record."""

import asyncio
import json
from datetime import UTC, datetime, timedelta

import structlog.testing

from breakwater.alerts.contract import Alert
from breakwater.alerts.rules.incidents import resolve
from breakwater.identity.api_keys import create_key
from tests.services.request.conftest import HttpApi, publish_alert, publish_change

T0 = datetime(2026, 11, 21, 10, 0, tzinfo=UTC)


async def listed(api: HttpApi, query: str = "") -> list[str]:
    answer = await api.ask("GET", f"/api/v1/alerts{query}")
    assert answer.status == 200, answer.body
    return [alert["key"] for alert in answer.json["alerts"]]


async def some(api: HttpApi) -> dict[str, Alert]:
    """Four incidents: one pending, one firing, one acknowledged, one over."""
    tripped = await publish_alert(api, "guard_tripped/-/t", agent="reader", at=T0)
    failed = await publish_alert(api, "retries_exhausted/writer/error", agent="writer", at=T0 + timedelta(minutes=1))
    cap = await publish_alert(api, "budget_hard_cap/global/daily", at=T0 + timedelta(minutes=2))
    await api.act("alerts/ack", incident_id=cap.incident_id)
    opened = await publish_alert(api, "breaker_open/writer/m", agent="writer", model="m", at=T0 + timedelta(minutes=3))
    closed = resolve(opened, "ops", None, T0 + timedelta(minutes=4))
    assert closed is not None
    closed = await publish_change(api, closed, event="breaker_closed")
    return {"tripped": tripped, "failed": failed, "cap": cap, "closed": closed}


async def test_incidents_are_listed_by_severity_then_age_and_those_that_are_over_only_when_asked_for(
    alerting: HttpApi,
) -> None:
    answer = await alerting.ask("GET", "/api/v1/alerts")
    assert (answer.status, answer.headers["Content-Type"], answer.json) == (
        200,
        "application/json",
        {"alerts": [], "more": False, "channels": 2},
    )
    shown = await some(alerting)
    tripped, failed, cap, closed = (shown[name].key for name in ("tripped", "failed", "cap", "closed"))
    for query, keys in {
        "": [cap, tripped, failed],
        "?status=unresolved": [cap, tripped, failed],
        "?status=all": [cap, tripped, failed, closed],
        "?status=firing": [failed],
        "?status=pending": [tripped],
        "?status=acknowledged": [cap],
        "?status=resolved": [closed],
        "?agent=writer": [failed],
        "?agent=writer&status=all": [failed, closed],
        "?event=guard_tripped": [tripped],
        "?event=breaker_open&status=all": [closed],
        "?event=breaker_closed&status=all": [closed],
        "?event=agent_anomaly": [],
    }.items():
        assert await listed(alerting, query) == keys, query


async def test_there_is_more_than_the_limit_where_that_is_so(alerting: HttpApi) -> None:
    await some(alerting)
    for limit, more in ((2, True), (3, False), (1000, False)):
        answer = await alerting.ask("GET", f"/api/v1/alerts?limit={limit}")
        assert (len(answer.json["alerts"]), answer.json["more"]) == (min(limit, 3), more)


async def test_a_parameter_that_is_wrong_is_named(alerting: HttpApi) -> None:
    await publish_alert(alerting, agent="gone")
    for query, path, words in [
        ("?status=solved", "status", "'pending'"),
        ("?limit=0", "limit", "greater than or equal to 1"),
        ("?limit=1001", "limit", "1000"),
        ("?limit=few", "limit", "integer"),
        ("?event=breaker", "event", "breaker_open"),
        ("?stauts=firing", "stauts", "did you mean 'status'?"),
    ]:
        answer = await alerting.ask("GET", f"/api/v1/alerts{query}")
        assert (answer.status, answer.code, answer.paths) == (422, "invalid_query", [path]), query
        assert words in answer.message, answer.message
    await publish_alert(alerting, "deployment_failing/openai/m", agent="*", payload={"agents": ["reader", "gone"]})
    answer = await alerting.ask("GET", "/api/v1/alerts?agent=writr")
    assert (answer.status, answer.code) == (404, "unknown_agent")
    assert answer.message == "no agent 'writr' is known; did you mean 'writer'?"
    assert len(await listed(alerting, "?agent=reader")) == 1  # that of a deployment which it calls
    assert len(await listed(alerting, "?agent=gone")) == 2  # which the config does not know any more


async def test_one_is_acknowledged_and_everybody_is_notified(alerting: HttpApi) -> None:
    alert = await publish_alert(alerting)
    assert alert.status == "pending"
    with structlog.testing.capture_logs() as logs:
        answer = await alerting.act("alerts/ack", incident_id=alert.incident_id, reason=" looking at it ")
    assert answer.status == 200
    shown = Alert.model_validate_json(answer.body)
    assert (shown.change, shown.status, shown.version) == ("acknowledged", "acknowledged", 2)
    assert (shown.acknowledged_by, shown.reason, shown.remind_at) == ("tests", "looking at it", None)
    assert shown.acknowledged_at == shown.at
    assert abs(datetime.now(UTC) - shown.at) < timedelta(minutes=5)
    assert (await alerting.alerts())[-1] == answer.json
    assert (await alerting.ask("GET", f"/api/v1/alerts/{alert.incident_id}")).json == answer.json
    [noted] = [log for log in logs if log["event"] == "incident_acknowledged"]
    assert (noted["by"], noted["why"], noted["changed"]) == ("tests", "looking at it", True)
    assert noted["incident_id"] == alert.incident_id


async def test_one_is_resolved_and_stays_so(alerting: HttpApi) -> None:
    alert = await publish_alert(alerting)
    await alerting.act("alerts/ack", incident_id=alert.incident_id)
    answer = await alerting.act("alerts/resolve", incident_id=alert.incident_id, reason="mended")
    shown = Alert.model_validate_json(answer.body)
    assert (shown.change, shown.status, shown.resolved_by, shown.reason) == ("resolved", "resolved", "tests", "mended")
    assert (shown.acknowledged_by, shown.version) == ("tests", 3)
    for action in ("ack", "resolve"):
        again = await alerting.act(f"alerts/{action}", incident_id=alert.incident_id, reason="once more")
        assert (again.status, again.json) == (200, answer.json | {"unchanged": True})
    assert len(await alerting.alerts()) == 3


async def test_of_many_who_acknowledge_it_at_once_one_does_and_the_others_see_who(alerting: HttpApi) -> None:
    alert = await publish_alert(alerting)
    other = {"Authorization": f"Bearer {create_key(alerting.settings.api_keys_file, 'other')}"}
    body = json.dumps({"incident_id": alert.incident_id}).encode()
    answers = await asyncio.gather(
        *(
            alerting.ask("POST", "/api/v1/alerts/ack", data=body, headers=other if number % 2 else {})
            for number in range(10)
        )
    )
    assert {answer.status for answer in answers} == {200}
    [won] = [answer.json for answer in answers if "unchanged" not in answer.json]
    assert [answer.json for answer in answers if answer.json != won] == [won | {"unchanged": True}] * 9
    assert (await alerting.alerts())[1:] == [won]


async def test_who_decides_on_what_somebody_else_has_just_changed_gets_the_current_state(alerting: HttpApi) -> None:
    alert = await publish_alert(alerting)
    await listed(alerting)  # this process knows it as pending
    ended = resolve(alert, "another API", None, T0)
    assert ended is not None
    await publish_change(alerting, ended)
    answer = await alerting.act("alerts/ack", incident_id=alert.incident_id)
    assert (answer.json["unchanged"], answer.json["resolved_by"]) == (True, "another API")


async def test_no_secret_of_a_reason_is_kept(alerting: HttpApi) -> None:
    alert = await publish_alert(alerting)
    reason = "the key sk-proj-" + "a1B2" * 12 + " is revoked, password=hunter2"
    with structlog.testing.capture_logs() as logs:
        answer = await alerting.act("alerts/ack", incident_id=alert.incident_id, reason=reason)
    everything = json.dumps([answer.json, await alerting.alerts(), [log.get("why") for log in logs]])
    assert "hunter2" not in everything
    assert "a1B2" not in everything
    assert "[REDACTED]" in answer.json["reason"]


async def test_the_beginning_of_an_id_is_enough_where_no_other_one_begins_so(alerting: HttpApi) -> None:
    one = await publish_alert(alerting, "guard_tripped/-/a", incident_id="inc_aaaaaa111111")
    other = await publish_alert(alerting, "guard_tripped/-/b", incident_id="inc_aaaaaa222222", title="The other")
    assert (await alerting.ask("GET", "/api/v1/alerts/inc_aaaaaa1")).json["key"] == one.key
    assert (await alerting.act("alerts/ack", incident_id="inc_aaaaaa2")).json["incident_id"] == other.incident_id
    for answer in (
        await alerting.ask("GET", "/api/v1/alerts/inc_aaaaaa"),
        await alerting.act("alerts/resolve", incident_id="inc_aaaaaa"),
    ):
        assert (answer.status, answer.code) == (409, "ambiguous_incident")
        assert answer.message == "2 incidents begin with 'inc_aaaaaa'; use a longer prefix"
        messages = [detail["message"] for detail in answer.json["error"]["details"]]
        assert "inc_aaaaaa222222 is 'The other'" in messages
        assert len(messages) == 2


async def test_what_nobody_knows_is_answered_with_how_incidents_are_named(alerting: HttpApi) -> None:
    await publish_alert(alerting, "guard_tripped/-/a", incident_id="inc_aaaaaa111111")
    for name, words in {
        "inc_bbbbbb": "alerts list --status all",
        "inc_aaaaa": "at least 6 characters",  # too short, although there is only one
        "aaaaaa1111": "alerts list --status all",
        "inc_": "at least 6 characters",
    }.items():
        for answer in (
            await alerting.ask("GET", f"/api/v1/alerts/{name}"),
            await alerting.act("alerts/ack", incident_id=name),
            await alerting.act("alerts/resolve", incident_id=name),
        ):
            assert (answer.status, answer.code, answer.paths) == (404, "unknown_incident", ["incident_id"])
            assert answer.message.startswith(f"no incident {name!r} is known; ")
            assert words in answer.message
    assert len(await alerting.alerts()) == 1
