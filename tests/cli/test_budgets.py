"""`breakwater budgets`, against a stub of the HTTP interface."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from breakwater.kernel.commands.errors import ExitCode
from breakwater.kernel.commands.formats import clock
from breakwater.kernel.redis.connection import Redis
from breakwater.kernel.types import format_time
from breakwater.limits.commands import NOT_FILLED
from breakwater.limits.contract import BudgetReconciliation
from breakwater.limits.store.budget_counters import BudgetCounters
from breakwater.limits.views import RECONCILIATION
from tests import api_documents as documents
from tests.cli.api_stub import Stub, problem
from tests.cli.conftest import Run, in_thread
from tests.columns import texts
from tests.server_sources import RunningServer

NOW = datetime.now(UTC)
# With room for the time from here to the test, which a full run makes long.
TONIGHT, LATER = NOW + timedelta(hours=9, minutes=59), NOW + timedelta(days=12, hours=23)
LAUNCH = {
    "amount": "50.000000000",
    "configured": "5.000000000",
    "until": format_time(TONIGHT),
    "scope": "agent:writer",
    "by": "ops",
    "reason": "launch day",
    "at": format_time(NOW),
}


def budget(name: str, limit: str | None = None, **more: Any) -> dict[str, Any]:
    return documents.budget(name, limit=limit, **{"resets_at": format_time(TONIGHT)} | more)


def accuracy(percent: float, exceeded: int = 0) -> dict[str, Any]:
    return {"calls": 1_200, "reserved": "1.000000000", "cost": "0.210000000", "percent": percent, "exceeded": exceeded}


BUDGETS = [
    budget("global/daily", limit="1000.000000000", remaining="200.000000000", spent="800.000000000"),
    budget("global/monthly", spent="1234.560000000", calls_of_unknown_cost=2),
    budget(
        "agent:writer/daily",
        enforcement="hard",
        limit="50.000000000",
        spent="8.412300000",
        reserved="0.001234567",
        remaining="41.586465433",
        raised=LAUNCH,
        estimate=accuracy(21.04),
    ),
]
DIFFERENT = documents.reconciled("agent:writer/daily", counted="8.412300001", difference="0.000000001")
EQUAL = documents.reconciled()
RECONCILED = {
    "equal": True,
    "budgets": [EQUAL],
    "reserved": "0.120000000",
    "held": "0.120000000",
    "at": format_time(NOW),
}
RAISED = {
    "event_id": "x",
    "kind": "raised",
    "scope": "agent",
    "agent": "writer",
    "window": "daily",
    "period": "2026-11-21",
    "limit": "50.000000000",
    "total": "8.412300000",
    "previous": "1010.500000000",
    "configured": "10.500000000",
    "enforcement": "hard",
    "by": "ops",
    "reason": "launch day",
    "resets_at": format_time(TONIGHT),
    "at": format_time(NOW),
}
RAISE = ["budgets", "raise", "agent:writer/daily", "50", "--reason", "launch day"]


def listed(*budgets: dict[str, Any], filled: bool = True) -> tuple[int, Any]:
    return 200, {"filled": filled, "budgets": list(budgets)}


@pytest.fixture
def stub(stub: Stub) -> Stub:
    stub.answers["GET budgets"] = listed(*BUDGETS)
    stub.answers["GET budgets/reconciliation"] = (200, RECONCILED)
    stub.answers["POST budgets/raise"] = (200, RAISED)
    return stub


async def test_that_a_cap_is_raised_is_said_below_the_list(run: Run, stub: Stub) -> None:
    ran = await in_thread(run, "budgets")
    assert [row.split()[0] for row in ran.out.splitlines()[1:]] == [budget["budget"] for budget in BUDGETS]
    until = clock(TONIGHT, NOW)
    assert ran.err == f"agent:writer/daily raised to $50.00 until {until}, by ops: launch day\n"


async def test_what_a_call_is_held_against_is_asked_for_by_name(run: Run, stub: Stub) -> None:
    await in_thread(run, "budgets", "--agent", "écrivain & co", "--tenant", "a+b=c")
    assert stub.queries == [{"agent": "écrivain & co", "tenant": "a+b=c"}]
    stub.answers["GET budgets"] = (404, problem("unknown_agent", "no agent 'x' is known; did you mean 'y'?"))
    ran = await in_thread(run, "budgets", "--agent", "x", "--json")
    assert (ran.code, ran.error["message"]) == (ExitCode.FAILED, "no agent 'x' is known; did you mean 'y'?")


async def test_that_calls_cost_more_than_was_held_is_said_once_for_an_agent(run: Run, stub: Stub) -> None:
    names = ("global/monthly", "agent:writer/daily", "agent:writer/monthly", "tenant:acme/monthly")
    stub.answers["GET budgets"] = listed(*(budget(name, estimate=accuracy(104.0, 3)) for name in names))
    ran = await in_thread(run, "budgets")
    [line] = ran.err.splitlines()
    assert line.startswith("agent:writer/monthly: of 1,200 calls 3 cost more than was reserved for them")
    stub.answers["GET budgets"] = listed(*(budget(name, estimate=accuracy(104.0, 3)) for name in names[::3]))
    assert (await in_thread(run, "budgets")).err.startswith("global/monthly: of 1,200 calls 3 cost more")


async def test_counters_that_agree_with_the_record_are_said_to(run: Run, stub: Stub) -> None:
    ran = await in_thread(run, "budgets", "reconcile")
    assert (ran.code, ran.err) == (ExitCode.OK, "")
    titles, row, verdict = ran.out.splitlines()
    shown = {column.title: column for column in RECONCILIATION if column.terminal}
    assert titles.split() == list(shown)
    assert row.split() == list(texts(shown.values(), BudgetReconciliation.model_validate(EQUAL)).values())
    assert verdict == "the counters agree with the record"
    assert (await in_thread(run, "budgets", "reconcile", "--json")).json == RECONCILED


async def test_counters_that_differ_by_a_nano_dollar_end_it_with_an_error(run: Run, stub: Stub) -> None:
    reconciliation = RECONCILED | {"equal": False, "budgets": [EQUAL, DIFFERENT]}
    stub.answers["GET budgets/reconciliation"] = (200, reconciliation)
    ran = await in_thread(run, "budgets", "reconcile")
    assert ran.code == ExitCode.FAILED
    assert ran.out.splitlines()[3] == "the counters differ from the record: agent:writer/daily of 2026-11-21"
    assert "the budget service compares them too, and repairs the counters" in ran.err
    as_json = await in_thread(run, "budgets", "reconcile", "--json")
    assert (as_json.code, as_json.json, as_json.err) == (ExitCode.FAILED, reconciliation, "")


async def test_what_else_can_differ_is_reported(run: Run, stub: Stub) -> None:
    for change, said in [
        ({"reserved": "0.130000000"}, "$0.13 reserved for calls that hold $0.12"),
        ({"budgets": [EQUAL | {"counted_calls": 13}]}, "global/daily of 2026-11-21"),
        ({}, "not in the spend, but in reservations or estimates"),
    ]:
        stub.answers["GET budgets/reconciliation"] = (200, RECONCILED | {"equal": False} | change)
        ran = await in_thread(run, "budgets", "reconcile")
        assert (ran.code, ran.out.splitlines()[-1]) == (ExitCode.FAILED, f"the counters differ from the record: {said}")


async def test_counters_that_can_not_be_compared_now_are_no_counters_that_differ(run: Run, stub: Stub) -> None:
    stub.answers["GET budgets/reconciliation"] = (503, problem("not_filled", "the counters are being rebuilt"))
    ran = await in_thread(run, "budgets", "reconcile")
    assert (ran.code, ran.out) == (ExitCode.UNREACHABLE, "")
    assert "the counters are being rebuilt" in ran.err


async def test_a_cap_is_raised_and_it_is_said_for_how_long(run: Run, stub: Stub) -> None:
    ran = await in_thread(run, *RAISE)
    assert stub.asked == [
        ("POST budgets/raise", {"budget": "agent:writer/daily", "limit_usd": "50", "reason": "launch day"})
    ]
    until = clock(TONIGHT, NOW)
    assert ran.out == (
        f"the limit of agent:writer/daily was $1,010.50, is now $50.00 until {until}, by ops: launch day\n"
    )
    undo = "`breakwater budgets raise agent:writer/daily 10.50 --reason TEXT`"
    assert ran.err == f"$8.41 of it is spent; {undo} restores the config's limit\n"
    assert (await in_thread(run, *RAISE, "--json")).json == RAISED


async def test_where_a_raise_is_taken_back_nothing_is_left_to_undo(run: Run, stub: Stub) -> None:
    ended = RAISED | {"kind": "raise_ended", "limit": "10.500000000"}
    stub.answers["POST budgets/raise"] = (200, ended)
    ran = await in_thread(run, *RAISE)
    said = "the config's limit of agent:writer/daily, $10.50, is effective again; before: $1,010.50\n"
    assert (ran.out, ran.err) == (said, "")


async def test_while_the_counters_are_lost_no_figure_of_theirs_is_shown(run: Run, stub: Stub) -> None:
    stub.answers["GET budgets"] = listed(BUDGETS[0], filled=False)
    ran = await in_thread(run, "budgets")
    assert ran.out.splitlines()[1].split()[:5] == ["global/daily", "$1,000.00", "?", "?", "?"]
    assert (ran.code, ran.err) == (ExitCode.OK, f"{NOT_FILLED}\n")


async def test_what_to_type_to_set_it_back_can_be_pasted_into_a_shell(run: Run, stub: Stub) -> None:
    ran = await in_thread(run, "budgets", "raise", "agent:my writer/daily", "50", "--reason", "x")
    assert "`breakwater budgets raise 'agent:my writer/daily' 10.50 " in ran.err


async def test_where_the_cap_is_that_already_it_is_said_who_raised_it(run: Run, stub: Stub) -> None:
    stub.answers["POST budgets/raise"] = (200, BUDGETS[2] | {"unchanged": True})
    ran = await in_thread(run, *RAISE)
    assert (ran.out, ran.err) == ("the limit of agent:writer/daily is already $50.00, by ops: launch day\n", "")
    stub.answers["POST budgets/raise"] = (200, BUDGETS[0] | {"unchanged": True})
    assert (await in_thread(run, *RAISE)).out == "the limit of global/daily is already $1,000.00\n"


async def test_doctor_finds_that_the_counters_are_lost(
    run: Run, own_redis_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BREAKWATER_REDIS_URL", own_redis_server.url)

    async def found() -> tuple[str, str]:
        findings = (await in_thread(run, "doctor", "--json")).json["findings"]
        [one] = [one for one in findings if one["area"] == "budgets"]
        return one["verdict"], one["text"]

    verdict, text = await found()
    assert (verdict, text.partition(":")[0]) == ("fail", "the counters are lost, or not built yet")
    redis = Redis(own_redis_server.url)
    counters = BudgetCounters(redis, ZoneInfo("UTC"))
    await counters.fill(None, "log", 0, counters.periods(datetime.now(UTC)), {}, {})
    await redis.close()
    assert await found() == ("ok", "the counters are complete")
