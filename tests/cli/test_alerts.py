"""`breakwater alerts`, against a stub of the HTTP interface."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from breakwater.alerts.commands import short_ids
from breakwater.alerts.contract import Alert
from breakwater.alerts.views import FACTS
from breakwater.kernel.commands.errors import ExitCode
from breakwater.kernel.commands.formats import clock
from breakwater.kernel.types import format_time
from tests import api_documents as documents
from tests.cli.api_stub import Stub, problem
from tests.cli.conftest import Run, in_thread
from tests.columns import texts

NOW = datetime.now(UTC)
SINCE = NOW - timedelta(days=2)
ID = "inc_3f9a1c07d2e84b56a1c0d375"


def incident(incident_id: str = ID, **more: Any) -> dict[str, Any]:
    """One that waits for somebody."""
    opened = {"opened_at": format_time(SINCE), "last_at": format_time(SINCE), "status": "pending"}
    return documents.incident(
        **{"incident_id": incident_id, "title": "Task stopped: t1 (max_iterations)"} | opened | more
    )


PENDING = incident()
CAP = incident(
    "inc_77aa00112233445566778899",
    status="acknowledged",
    key="budget_hard_cap/global/daily/2026-11-22",
    event="budget_hard_cap",
    agent=None,
    title="Limit refuses calls: the plane, daily",
    count=1200,
    acknowledged_by="ops",
    acknowledged_at=format_time(NOW),
    last_at=format_time(NOW),
    reason="looking at it",
)
NOT_SENT = "Alerts are not sent to anyone: the config has no channel. Add one under `alerts.channels`"
LISTED = {"alerts": [CAP, PENDING], "more": False, "channels": 1}


def replayed(number: int, *, already: int = 0, skipped: int = 0, after: int | None = None) -> dict[str, Any]:
    channels = {"ops": number} if number else {}
    counts = {"replayed": number, "already": already, "skipped": skipped}
    return {**counts, "channels": channels, "continue_after": after}


@pytest.fixture
def stub(stub: Stub) -> Stub:
    stub.answers["GET alerts"] = (200, LISTED)
    return stub


async def test_incidents_are_listed_with_ids_as_short_as_ack_takes(run: Run, stub: Stub) -> None:
    rows = (await in_thread(run, "alerts")).out.splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["inc_77aa0011", "inc_3f9a1c07"]


async def test_which_ones_are_meant_is_asked_for(run: Run, stub: Stub) -> None:
    arguments = ["--status", "all", "--event", "breaker_open", "--agent", "a b&c", "--limit", "2"]
    stub.answers["GET alerts"] = (200, {"alerts": [CAP, PENDING], "more": True, "channels": 1})
    ran = await in_thread(run, "alerts", *arguments)
    assert stub.queries == [{"status": "all", "event": "breaker_open", "agent": "a b&c", "limit": "2"}]
    assert ran.err == "(more than these 2; see --limit)\n"
    stub.answers["GET alerts"] = (200, {"alerts": [], "more": False, "channels": 1})
    for given, said in (
        (["--status", "pending"], "no incident is pending"),
        (["--status", "all"], "no incident is known"),
        (["--agent", "x"], "no incident is unresolved of those you asked for"),
    ):
        ran = await in_thread(run, "alerts", *given)
        assert (ran.code, ran.out, ran.err) == (ExitCode.OK, "", f"{said}\n")


async def test_a_status_that_is_none_is_wrong_usage(run: Run, stub: Stub) -> None:
    answer = problem("invalid_query", "status: should be 'firing', 'pending' or 'all'")
    stub.answers["GET alerts"] = (422, answer)
    ran = await in_thread(run, "alerts", "--status", "solved")
    assert (ran.code, ran.out) == (ExitCode.USAGE, "")
    assert ran.err.startswith("error: status: should be 'firing', 'pending' or 'all'\n")


def test_ids_are_as_long_as_distinguishes_them() -> None:
    assert short_ids([ID, ID]) == {ID: "inc_3f9a1c07"}
    alike = ["inc_aaaaaaaaaa11", "inc_aaaaaaaaaa22", "inc_b"]
    assert list(short_ids(alike).values()) == ["inc_aaaaaaaaaa1", "inc_aaaaaaaaaa2", "inc_b"]


async def test_all_of_one_is_shown(run: Run, stub: Stub) -> None:
    stub.answers["GET alerts/inc_77aa"] = (200, CAP)
    ran = await in_thread(run, "alerts", "show", "inc_77aa")
    assert (ran.code, ran.err) == (ExitCode.OK, "")
    head, *facts = ran.out.splitlines()
    assert head == f"{CAP['incident_id']}  {CAP['title']}"
    assert {line[2:16].strip(): line[16:].strip() for line in facts} == texts(FACTS, Alert.model_validate(CAP))
    assert (await in_thread(run, "alerts", "show", "inc_77aa", "--json")).json == CAP


async def test_what_an_id_holds_is_no_path(run: Run, stub: Stub) -> None:
    stub.answers["GET alerts/a/../?b"] = (404, problem("unknown_incident", "no incident is known"))
    ran = await in_thread(run, "alerts", "show", "a/../?b")
    assert (ran.code, ran.err.splitlines()[0]) == (ExitCode.FAILED, "error: no incident is known")


async def test_one_is_acknowledged_or_resolved_and_that_is_said(run: Run, stub: Stub) -> None:
    done = incident(status="acknowledged", acknowledged_by="ops", acknowledged_at=format_time(NOW), reason="mine")
    stub.answers["POST alerts/ack"] = (200, done)
    ran = await in_thread(run, "alerts", "ack", "inc_3f9a1c07", "--reason", "mine")
    assert stub.asked == [("POST alerts/ack", {"incident_id": "inc_3f9a1c07", "reason": "mine"})]
    assert (ran.code, ran.out) == (ExitCode.OK, "inc_3f9a1c07 is acknowledged by ops: mine\n")
    assert ran.err == f"{PENDING['title']}\n"
    assert (await in_thread(run, "alerts", "ack", ID, "--json")).json == done
    ended = incident(status="resolved", resolved_by="bo", resolved_at=format_time(NOW))
    stub.answers["POST alerts/resolve"] = (200, ended)
    ran = await in_thread(run, "alerts", "resolve", ID)
    assert stub.asked[-1] == ("POST alerts/resolve", {"incident_id": ID})
    assert ran.out == "inc_3f9a1c07 is resolved by bo\n"


async def test_where_there_was_nothing_to_do_that_is_said_with_who_did_it(run: Run, stub: Stub) -> None:
    mine = incident(status="acknowledged", acknowledged_by="bo", acknowledged_at=format_time(NOW), unchanged=True)
    stub.answers["POST alerts/ack"] = (200, mine)
    ran = await in_thread(run, "alerts", "ack", ID)
    assert (ran.code, ran.out) == (
        ExitCode.OK,
        f"inc_3f9a1c07 is already acknowledged by bo at {clock(NOW, NOW)}\n",
    )
    over = incident(status="resolved", resolved_at=format_time(NOW), reason="the period has ended", unchanged=True)
    stub.answers["POST alerts/resolve"] = (200, over)
    ran = await in_thread(run, "alerts", "resolve", ID)
    assert ran.out == f"inc_3f9a1c07 is already resolved by itself at {clock(NOW, NOW)}: the period has ended\n"


async def test_an_incident_that_is_not_clear_is_refused_with_what_to_do(run: Run, stub: Stub) -> None:
    two = problem("ambiguous_incident", "2 incidents begin with 'inc_3f9a1c'")
    two["error"]["details"] = [{"path": "incident_id", "message": f"{ID} is 'a title'"}]
    stub.answers["POST alerts/ack"] = (409, two)
    ran = await in_thread(run, "alerts", "ack", "inc_3f9a1c", "--json")
    assert ran.error == {
        "code": "ambiguous_incident",
        "message": "2 incidents begin with 'inc_3f9a1c'",
        "remedy": f"incident_id: {ID} is 'a title'",
    }


async def test_a_channel_is_tested_and_the_exit_code_says_whether_it_works(run: Run, stub: Stub) -> None:
    arrived = {"channel": "ops", "delivered": True, "error": None}
    stub.answers["POST alerts/test"] = (200, arrived)
    ran = await in_thread(run, "alerts", "test", "ops")
    assert stub.asked == [("POST alerts/test", {"channel": "ops"})]
    assert (ran.code, ran.out) == (ExitCode.OK, "ops: the test message has arrived\n")
    refused = {"channel": "ops", "delivered": False, "error": "the receiver answered 404"}
    stub.answers["POST alerts/test"] = (200, refused)
    ran = await in_thread(run, "alerts", "test", "ops")
    assert (ran.code, ran.out) == (
        ExitCode.FAILED,
        "ops: the test message did not arrive: the receiver answered 404\n",
    )
    ran = await in_thread(run, "alerts", "test", "ops", "--json")
    assert (ran.code, ran.json) == (ExitCode.FAILED, refused)


async def test_without_an_alerter_no_channel_is_blamed(run: Run, stub: Stub) -> None:
    stub.answers["POST alerts/test"] = (503, problem("no_alerter", "no alerter is at work"))
    ran = await in_thread(run, "alerts", "test", "ops")
    assert (ran.code, ran.out) == (ExitCode.UNREACHABLE, "")
    assert ran.err.startswith("error: no alerter is at work\n")


async def test_what_did_not_arrive_is_listed_for_a_channel(run: Run, stub: Stub) -> None:
    lost = [documents.undelivered(17), documents.undelivered(9)]
    stub.answers["GET alerts/undelivered"] = (200, {"undelivered": lost, "more": True, "channels": 1})
    ran = await in_thread(run, "alerts", "undelivered", "--channel", "ops", "--limit", "2")
    assert stub.queries == [{"channel": "ops", "limit": "2"}]
    assert (len(ran.out.splitlines()), ran.err) == (3, "(more than these 2; see --limit)\n")
    stub.answers["GET alerts/undelivered"] = (200, {"undelivered": [], "more": False, "channels": 1})
    ran = await in_thread(run, "alerts", "undelivered", "--channel", "ops")
    assert (ran.code, ran.err) == (ExitCode.OK, "every alert for ops has arrived, or is on its way\n")


async def test_replaying_goes_on_until_there_are_no_more(run: Run, stub: Stub) -> None:
    stub.in_turn((200, replayed(1000, already=3, after=1700)), (200, replayed(7, skipped=1)))
    ran = await in_thread(run, "alerts", "replay", "--channel", "ops")
    assert stub.asked == [
        ("POST alerts/replay", {"channel": "ops"}),
        ("POST alerts/replay", {"channel": "ops", "after": 1700}),
    ]
    assert (ran.code, ran.out) == (ExitCode.OK, "1,007 alerts will be sent again: 1,007 on ops\n")
    assert "3 alerts had been sent again before" in ran.err
    assert "1 alert of channels that are no longer in the config" in ran.err


async def test_one_dead_letter_is_replayed_by_its_number(run: Run, stub: Stub) -> None:
    stub.answers["POST alerts/replay"] = (200, replayed(1))
    ran = await in_thread(run, "alerts", "replay", "--dead-letter", "17")
    assert stub.asked == [("POST alerts/replay", {"dead_letter_id": 17})]
    assert (ran.out, ran.err) == ("1 alert will be sent again: 1 on ops\n", "")
    reported = (await in_thread(run, "alerts", "replay", "--dead-letter", "17", "--json")).json
    assert reported == {"replayed": 1, "already": 0, "skipped": 0, "channels": {"ops": 1}}


async def test_without_a_channel_it_is_said_that_alerts_are_not_sent(run: Run, stub: Stub) -> None:
    stub.answers["GET alerts"] = (200, {"alerts": [], "more": False, "channels": 0})
    stub.answers["GET alerts/undelivered"] = (200, {"undelivered": [], "more": False, "channels": 0})
    listed = await in_thread(run, "alerts")
    assert ("no incident is unresolved" in listed.err, NOT_SENT in listed.err) == (True, True)
    assert NOT_SENT in (await in_thread(run, "alerts", "undelivered")).err
