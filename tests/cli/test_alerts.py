"""`breakwater alerts`, against a stub of the HTTP interface."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from breakwater.alerts.commands import short_ids
from breakwater.kernel.commands.errors import ExitCode
from breakwater.kernel.commands.formats import clock
from breakwater.kernel.types import format_time
from tests.cli.api_stub import Stub, problem
from tests.cli.conftest import Run, Terminal, in_thread

NOW = datetime.now(UTC)
SINCE = NOW - timedelta(days=2)
ID = "inc_3f9a1c07d2e84b56a1c0d375"


def incident(incident_id: str = ID, **more: Any) -> dict[str, Any]:
    return {
        "alert_id": "alert_1",
        "incident_id": incident_id,
        "key": "guard_tripped/-/t1",
        "change": "opened",
        "status": "pending",
        "event": "guard_tripped",
        "severity": "critical",
        "agent": "researcher",
        "title": "Task stopped: t1 (max_iterations)",
        "text": "10 iterations (limit: 10). To do: find out why.",
        "payload": {"task_id": "t1"},
        "count": 1,
        "version": 1,
        "opened_at": format_time(SINCE),
        "last_at": format_time(SINCE),
        "source_id": "x",
        "at": format_time(NOW),
        **more,
    }


PENDING = incident()
CAP = incident(
    "inc_77aa00112233445566778899",
    status="acknowledged",
    key="budget_hard_cap/global/daily/2026-11-22",
    event="budget_hard_cap",
    agent=None,
    title="Budget refuses calls: all agents, daily",
    count=1200,
    acknowledged_by="ops",
    acknowledged_at=format_time(NOW),
    last_at=format_time(NOW),
    reason="looking at it",
)
NOT_SENT = "Alerts are not sent to anyone: the config has no channel. Add one under `alerts.channels`"
LISTED = {"alerts": [CAP, PENDING], "more": False, "channels": 1}
UNDELIVERED = [
    {
        "dead_letter_id": 17,
        "channel": "ops",
        "alert_id": "alert_1",
        "title": PENDING["title"],
        "error": "ops: the receiver answered 500 (tried 12 times)",
        "at": format_time(NOW),
        "replayed": False,
    },
    {
        "dead_letter_id": 9,
        "channel": "second.line",
        "alert_id": None,
        "title": None,
        "error": "second.line: gone",
        "at": format_time(SINCE),
        "replayed": True,
    },
]


def replayed(number: int, *, already: int = 0, skipped: int = 0, after: int | None = None) -> dict[str, Any]:
    channels = {"ops": number} if number else {}
    counts = {"replayed": number, "already": already, "skipped": skipped}
    return {**counts, "channels": channels, "continue_after": after}


@pytest.fixture
def stub(stub: Stub) -> Stub:
    stub.answers["GET alerts"] = (200, LISTED)
    return stub


@pytest.mark.parametrize("command", [["alerts"], ["alerts", "list"]], ids=" ".join)
async def test_incidents_are_listed_with_what_ack_takes(run: Run, stub: Stub, command: list[str]) -> None:
    ran = await in_thread(run, *command)
    assert (ran.code, ran.err) == (ExitCode.OK, "")
    _, cap, pending = ran.out.splitlines()
    assert cap.split()[:5] == ["inc_77aa0011", "acknowledged", "critical", "budget_hard_cap", "1,200"]
    assert cap.endswith("Budget refuses calls: all agents, daily")
    assert pending.split()[:6] == ["inc_3f9a1c07", "pending", "warning", "guard_tripped", "researcher", "1"]
    assert clock(SINCE, NOW) in pending
    assert stub.queries == [{"status": "unresolved", "limit": "100"}]
    assert (await in_thread(run, *command, "--json")).json == LISTED


async def test_which_ones_are_meant_is_asked_for(run: Run, stub: Stub) -> None:
    arguments = ["--status", "all", "--event", "breaker_open", "--agent", "a b&c", "--limit", "2"]
    stub.answers["GET alerts"] = (200, {"alerts": [CAP, PENDING], "more": True, "channels": 1})
    ran = await in_thread(run, "alerts", *arguments)
    assert stub.queries == [{"status": "all", "event": "breaker_open", "agent": "a b&c", "limit": "2"}]
    assert ran.err == "(more than these 2; see --limit)\n"
    stub.answers["GET alerts"] = (200, {"alerts": [], "more": False, "channels": 1})
    for given, said in (
        ([], "no incident is unresolved"),
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


@pytest.mark.parametrize(
    ("width", "first", "left_out"),
    [
        (60, "inc_77aa0011  acknowledged  budget_hard_cap", "(severity, agent, count, since: omitted"),
        (80, "inc_77aa0011  acknowledged  budget_hard_cap  1,200", "(severity, agent: omitted"),
        (100, "inc_77aa0011  acknowledged  critical  budget_hard_cap", ""),
        (140, "inc_77aa0011  acknowledged  critical  budget_hard_cap", ""),
    ],
)
async def test_a_table_fits_the_terminal_and_has_every_title(
    run: Run, stub: Stub, terminal: Terminal, width: int, first: str, left_out: str
) -> None:
    terminal(width)
    ran = await in_thread(run, "alerts")
    lines = [line.rstrip() for line in ran.out.splitlines()]
    assert max(len(line) for line in lines) <= width
    [row] = [line for line in lines if line.startswith("inc_77")]
    assert row.startswith(first)
    assert ran.err.startswith(left_out)
    assert sum(title in ran.out for title in (CAP["title"], PENDING["title"])) == 2


async def test_undelivered_alerts_fit_the_terminal_with_title_and_error(
    run: Run, stub: Stub, terminal: Terminal
) -> None:
    stub.answers["GET alerts/undelivered"] = (200, {"undelivered": UNDELIVERED, "more": False, "channels": 1})
    for width in (80, 140):
        terminal(width)
        ran = await in_thread(run, "alerts", "undelivered")
        assert max(len(line.rstrip()) for line in ran.out.splitlines()) <= width
        for words in (PENDING["title"], "answered 500 (tried 12 times)", "second.line: gone"):
            assert words in ran.out


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
    reported = {line[2:16].strip(): line[16:].strip() for line in facts}
    assert reported == {
        "status": "acknowledged",
        "severity": "critical",
        "event": "budget_hard_cap",
        "since": clock(SINCE, NOW),
        "count": f"1,200 occurrences, the last at {clock(NOW, NOW)}",
        "acknowledged": f"by ops at {clock(NOW, NOW)}",
        "reason": "looking at it",
        "text": CAP["text"],
    }
    assert (await in_thread(run, "alerts", "show", "inc_77aa", "--json")).json == CAP


@pytest.mark.parametrize("known", [{"first_event": "breaker_open", "highest_severity": "critical"}, {}])
async def test_one_that_is_over_is_shown_as_what_it_was(run: Run, stub: Stub, known: dict[str, str]) -> None:
    """Also one that an earlier version opened, which said neither."""
    closed = incident(key="breaker_open/researcher/m", event="breaker_closed", severity="info", **known)
    stub.answers["GET alerts/inc_3f9a"] = (200, closed)
    ran = await in_thread(run, "alerts", "show", "inc_3f9a")
    reported = {line[2:16].strip(): line[16:].strip() for line in ran.out.splitlines()[1:]}
    assert (reported["severity"], reported["event"], reported["ended with"]) == (
        "critical",
        "breaker_open",
        "breaker_closed",
    )
    stub.answers["GET alerts"] = (200, {"alerts": [closed], "more": False, "channels": 1})
    listed = (await in_thread(run, "alerts", "--status", "all")).out
    assert "critical" in listed
    assert "breaker_closed" not in listed


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


async def test_what_did_not_arrive_is_listed(run: Run, stub: Stub) -> None:
    document = {"undelivered": UNDELIVERED, "more": True, "channels": 1}
    stub.answers["GET alerts/undelivered"] = (200, document)
    ran = await in_thread(run, "alerts", "undelivered", "--channel", "second.line", "--limit", "2")
    assert stub.queries == [{"channel": "second.line", "limit": "2"}]
    _, first, second = ran.out.splitlines()
    assert first.split()[:5] == ["17", "ops", clock(NOW, NOW), "no", "alert_1"]
    assert first.endswith("ops: the receiver answered 500 (tried 12 times)")
    assert second.split()[-2:] == ["second.line:", "gone"]
    assert ran.err == "(more than these 2; see --limit)\n"
    assert (await in_thread(run, "alerts", "undelivered", "--json")).json == document
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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["acknowledge"], "No such command 'acknowledge'"),
        (["ack"], "Missing argument 'INCIDENT'"),
        (["test"], "Missing argument 'CHANNEL'"),
        (["ack", "\udcff", "--url", "http://127.0.0.1:9"], "incident_id is not UTF-8 text"),
        (["--agent", "\udcff", "--url", "http://127.0.0.1:9"], "--agent is not UTF-8 text"),
        (["--limit", "0"], "--limit"),
        (["replay", "--dead-letter", "0"], "--dead-letter"),
    ],
)
def test_wrong_usage_is_reported_before_anything_is_asked(run: Run, arguments: list[str], said: str) -> None:
    ran = run("alerts", *arguments)
    assert ran.code == ExitCode.USAGE
    assert said in ran.err


async def test_without_a_channel_it_is_said_that_alerts_are_not_sent(run: Run, stub: Stub) -> None:
    stub.answers["GET alerts"] = (200, {"alerts": [], "more": False, "channels": 0})
    stub.answers["GET alerts/undelivered"] = (200, {"undelivered": [], "more": False, "channels": 0})
    listed = await in_thread(run, "alerts")
    assert ("no incident is unresolved" in listed.err, NOT_SENT in listed.err) == (True, True)
    assert NOT_SENT in (await in_thread(run, "alerts", "undelivered")).err
