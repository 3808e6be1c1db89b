"""The pages of alerts, and looking after incidents."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any

from breakwater.alerts.contract import Alert
from breakwater.records import rows, schema
from tests.api_documents import undelivered
from tests.cli.api_stub import problem
from tests.records import samples
from tests.services.console.conftest import Console
from tests.tables import each_row

EVIL = "<script>alert(1)</script>"
A_CAP: dict[str, Any] = {"event": "budget_hard_cap", "key": "budget_hard_cap/agent/other"}
NOTHING_LOST = (200, {"undelivered": [], "more": False, "channels": 1})


def incident(name: str = "i1", minutes_ago: float = 5, **fields: Any) -> Alert:
    at = datetime.now(UTC) - timedelta(minutes=minutes_ago)
    given: dict[str, Any] = {"incident_id": f"inc_{name}", "opened_at": at, "last_at": at, "at": at, **fields}
    return samples.alert(f"alert_{name}_{fields.get('version', 1)}", **given)


def listed(*alerts: Alert) -> tuple[int, Any]:
    return 200, {"alerts": [alert.model_dump(mode="json") for alert in alerts], "more": False, "channels": 1}


async def store(console: Console, *alerts: Alert) -> None:
    stored = [rows.alert_row(alert, sequence) for sequence, alert in enumerate(alerts, 1)]
    await console.analytics.insert(schema.ALERTS, stored)


async def test_what_is_not_over_stands_above_the_history(console: Console):
    open_one = incident("open", title=f"writer is stopped {EVIL}")
    over = {"status": "resolved", "change": "resolved", "version": 2, "resolved_by": "zoë"}
    over |= {"event": "breaker_closed", "severity": "info", "first_event": "breaker_open"}
    resolved = incident("over", 60, **over, resolved_at=datetime.now(UTC) - timedelta(minutes=50), title="It was bad")
    await store(console, open_one, resolved)
    console.interface.answers["GET alerts"] = listed(open_one)
    console.interface.answers["GET alerts/undelivered"] = NOTHING_LOST
    page = await console.get("/alerts")
    assert page.status == 200
    assert page.words.index(f"writer is stopped {EVIL}") < page.words.index("It was bad")
    assert EVIL not in page.text
    assert "resolved by zoë" in page.words
    assert "It was bad resolved by zoë critical breaker open" in page.words, "what it was, not how it ended"
    assert "ongoing" in page.words
    assert "Undelivered alerts Every alert was delivered" in page.words


async def test_a_failure_that_one_agent_has_names_that_agent_and_not_all(console: Console):
    failing = {"event": "deployment_failing", "first_event": "deployment_failing", "agent": "*", "model": "openai/x"}
    one = incident("one", **failing, key="deployment_failing/openai/x", payload={"agents": ["reader"]})
    two = incident("two", **failing, key="deployment_failing/openai/y", payload={"agents": ["a", "b"]})
    await store(console, one, two)
    console.interface.answers["GET alerts"] = listed(one, two)
    console.interface.answers["GET alerts/undelivered"] = NOTHING_LOST
    alerts = await console.get("/alerts")
    assert "all agents" not in alerts.words
    for link in (">reader</a></span>", '>a</a></span>, <span class="nowrap"><a href="/agents/b">b</a></span>'):
        assert alerts.text.count(link) == 2, "now, and in the history"
    assert "reader" in (await console.get("/alerts?agent=reader")).words.partition("History")[2]
    for found, agents in ((one, "<dt>Agent</dt>"), (two, "<dt>Agents</dt>")):
        console.interface.answers[f"GET alerts/{found.incident_id}"] = (200, found.model_dump(mode="json"))
        shown = await console.get(f"/alerts/{found.incident_id}")
        assert agents in shown.text
        assert "all agents" not in shown.words


async def test_open_incidents_keep_their_order_by_severity_and_show_it_in_the_first_line_on_a_phone(console: Console):
    console.interface.answers["GET alerts"] = listed(
        incident("a", title="It is down"), incident("b", severity="info", title="It may be up")
    )
    console.interface.answers["GET alerts/undelivered"] = NOTHING_LOST
    page = await console.get("/alerts")
    assert page.words.index("It is down") < page.words.index("It may be up")
    assert re.search(r"It may be up.*?firing.*?info", page.words), "what it is now, not what it was"
    assert re.search(r'<th scope="col" data-brief="2"[^>]*><a [^>]*>Severity', page.text)


async def test_the_navigation_counts_incidents_and_dead_letters_once_for_many_pages(console: Console):
    console.interface.answers["GET alerts"] = listed(incident("a"), incident("b", severity="warning"))
    console.interface.answers["GET dlq"] = (
        200,
        {
            "dead_letters": [],
            "more": False,
            "counts": [{"reason": "error", "agent": "writer", "count": 1_200}],
        },
    )
    for path in ("/executions", "/plans", "/costs"):
        page = await console.get(path)
        assert "Alerts 2 open incidents Dead letters 1,200 dead letters" in page.words, path
    asked = [what for what, _ in console.interface.asked]
    assert (asked.count("GET alerts"), asked.count("GET dlq")) == (1, 1)


async def test_without_figures_the_navigation_has_no_badges(console: Console):
    console.interface.answers["GET alerts"] = listed()
    console.interface.answers["GET dlq"] = 503, problem("unavailable", "NATS does not answer")
    assert "Costs Alerts Dead letters Config Audit log" in (await console.get("/executions")).words


async def test_what_waits_for_somebody_says_so(console: Console):
    waiting = incident("waiting", status="pending")
    console.interface.answers["GET alerts"] = listed(waiting)
    console.interface.answers["GET alerts/undelivered"] = NOTHING_LOST
    assert "pending awaits acknowledgement" in (await console.get("/alerts")).words
    console.interface.answers["GET alerts/inc_waiting"] = 200, waiting.model_dump(mode="json")
    assert "pending awaits acknowledgement" in (await console.get("/alerts/inc_waiting")).words


async def test_the_history_is_filtered_and_turned_over(console: Console):
    await store(console, *(incident(f"{number:03}", number + 1, title=f"No. {number}.") for number in range(60)))
    await store(console, incident("other", 1, agent="other/agent", title="A limit", **A_CAP))
    console.interface.answers["GET alerts"] = listed()
    console.interface.answers["GET alerts/undelivered"] = NOTHING_LOST
    first = await console.get("/alerts?event=breaker_open")
    assert "No. 0." in first.words
    assert "A limit" not in first.words
    assert "No. 55." not in first.words
    older = first.text.split('<a class="button" href="/alerts?')[-1].split('"')[0].replace("&amp;", "&")
    second = await console.get(f"/alerts?{older}")
    assert "No. 55." in second.words
    assert "No. 0." not in second.words
    assert "A limit" not in second.words
    assert "Older" not in second.words
    of_agent = await console.get("/alerts?agent=other%2Fagent&status=firing")
    assert "A limit" in of_agent.words
    assert "No. 0." not in of_agent.words
    for wrong in (
        "status=%27%3B--",
        "event=x",
        "before=x-y",
        "before=99999999999999999999-a",
        "before=999999999999999-a",
        "window=9y",
    ):
        assert (await console.get(f"/alerts?{wrong}")).status == 200


async def test_one_incident_reports_all_that_became_of_it(console: Console):
    budget = {"scope": "agent", "agent": "wri/ter", "window": "daily", "execution_id": "e/1"}
    given: dict[str, Any] = {"event": "budget_hard_cap", "payload": budget, "agent": "wri/ter"}
    opened = incident(**given, text=f"Spent {EVIL}. To do: `breakwater budgets`.")
    ack = {"status": "acknowledged", "acknowledged_by": "zoë", "acknowledged_at": datetime.now(UTC), "reason": "on it"}
    newest = Alert.model_validate(
        {**opened.model_dump(), "alert_id": "a2", "version": 2, "change": "acknowledged", **ack}
    )
    await store(console, opened, newest)
    console.interface.answers["GET alerts/inc_i1"] = 200, newest.model_dump(mode="json")
    page = await console.get("/alerts/inc_i1")
    assert page.words.index("opened Spent") < page.words.index("acknowledged by zoë: on it")
    assert "<code>breakwater budgets</code>" in page.text
    assert EVIL not in page.text
    assert 'href="/budgets/agent%3Awri%2Fter%2Fdaily"' in page.text
    assert 'href="/executions/e%2F1"' in page.text
    assert "Acknowledge…" not in page.words, "somebody does already"
    assert "Resolve…" in page.words


async def test_one_that_only_clickhouse_knows_and_one_that_nobody_knows(console: Console):
    await store(console, incident("old", status="resolved", resolved_at=datetime.now(UTC)))
    console.interface.answers["GET alerts/inc_old"] = 404, problem("unknown_incident", "no incident is known")
    page = await console.get("/alerts/inc_old")
    assert page.status == 200
    assert "Resolve…" not in page.words
    console.interface.answers["GET alerts/inc_no"] = 404, problem("unknown_incident", "no incident 'inc_no' is known")
    missing = await console.get("/alerts/inc_no")
    assert missing.status == 404
    assert "no incident 'inc_no' is known" in missing.words


async def test_somebody_acknowledges_and_resolves(console: Console):
    console.interface.answers["GET alerts"] = listed(incident())
    console.interface.answers["GET alerts/undelivered"] = NOTHING_LOST
    console.interface.answers["POST alerts/ack"] = 200, {}
    page = await console.submit("/alerts", "/alerts/ack", incident_id="inc_i1", reason="on it")
    assert ("POST alerts/ack", {"incident_id": "inc_i1", "reason": "on it"}) in console.interface.asked
    assert "The incident is acknowledged" in page.words
    console.interface.answers["POST alerts/resolve"] = 200, {"unchanged": True}
    console.interface.answers["GET alerts/inc_i1"] = 200, incident().model_dump(mode="json")
    fields = {"incident_id": "inc_i1", "from": "one", "reason": ""}
    page = await console.submit("/alerts/inc_i1", "/alerts/resolve", **fields)
    assert ("POST alerts/resolve", {"incident_id": "inc_i1"}) in console.interface.asked
    assert page.url.endswith("/alerts/inc_i1")
    assert "Another operator was faster" in page.words


async def test_without_a_channel_it_is_said_that_alerts_are_not_sent(console: Console):
    console.interface.answers["GET alerts"] = 200, {"alerts": [], "more": False, "channels": 0}
    console.interface.answers["GET alerts/undelivered"] = 200, {"undelivered": [], "more": False, "channels": 0}
    page = await console.get("/alerts")
    assert "Alerts are not sent to anyone: the config has no channel. Add one under alerts.channels" in page.words
    assert "Every alert was delivered" not in page.words
    assert "Open incidents 0 none; not sent to anyone" in (await console.get("/")).words


async def test_what_did_not_arrive_is_tried_again(console: Console):
    console.interface.answers["GET alerts"] = listed()
    console.interface.answers["GET alerts/undelivered"] = (
        200,
        {"undelivered": [undelivered(7), undelivered(4, replayed=True)], "more": False, "channels": 1},
    )
    reported = {"replayed": 1, "already": 0, "skipped": 0, "channels": {"ops": 1}, "continue_after": None}
    console.interface.answers["POST alerts/replay"] = 200, reported
    page = await console.submit("/alerts", "/alerts/replay", dead_letter_id="7", reason="")
    assert ("POST alerts/replay", {"dead_letter_id": 7}) in console.interface.asked
    assert "1 will be retried (1 by ops)." in page.words
    more = {"replayed": 990, "already": 5, "skipped": 5, "channels": {"ops": 990}, "continue_after": 1_200}
    console.interface.answers["POST alerts/replay"] = 200, more
    page = await console.submit("/alerts", "/alerts/replay", after="", reason="the hook is back")
    assert ("POST alerts/replay", {"reason": "the hook is back"}) in console.interface.asked
    assert "There are more: continue below." in page.words
    assert 'name="after" value="1200"' in page.text
    console.interface.answers["POST alerts/replay"] = 503, problem("unavailable", "NATS does not answer")
    page = await console.submit("/alerts", "/alerts/replay", after="1200", reason="")
    assert ("POST alerts/replay", {"after": 1_200}) in console.interface.asked
    assert "The action failed: NATS does not answer" in page.words


@each_row("number", ["9" * 30, "9" * 5_000, "x", "٣"])
@each_row("name", ["dead_letter_id", "after"])
async def test_what_can_name_no_dead_letter_does_not_stand_for_all(console: Console, name: str, number: str):
    console.interface.answers["GET alerts"] = listed()
    console.interface.answers["GET alerts/undelivered"] = (
        200,
        {"undelivered": [undelivered(7)], "more": False, "channels": 1},
    )
    page = await console.submit("/alerts", "/alerts/replay", **{name: number, "reason": ""})
    assert page.status == 200
    assert "The action failed: a dead letter is identified by its number" in page.words
    assert not any(what == "POST alerts/replay" for what, _ in console.interface.asked)
