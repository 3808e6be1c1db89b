"""`breakwater limits`, against a stub of the HTTP interface."""

from __future__ import annotations

import re
import shlex
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from breakwater.cli.main import every_command
from breakwater.kernel.commands.errors import ExitCode
from breakwater.kernel.commands.formats import clock
from breakwater.kernel.types import format_time
from tests import api_documents as documents
from tests.cli.api_stub import Stub, problem
from tests.cli.conftest import Run, Terminal, in_thread

BOT = documents.limit()
EACH_KEY = documents.limit("key:*", used=None, resets_at=None)
OF_AGENT = documents.limit(
    "agent:writer", "day", "8", id="agents.writer.budget.daily_usd", source="config", action="cheaper_model", by=None,
    at=None, reason=None, amount="9.000000000", remaining="0.000000000",
)  # fmt: skip
LISTED = [OF_AGENT, BOT, EACH_KEY, documents.limit("team:research", id="team-1", until="2027-01-01T00:00:00.000Z")]
LATER = datetime.now(UTC) + timedelta(hours=9)
RAISED = {
    "amount": "30.000000000",
    "configured": "20.000000000",
    "until": format_time(LATER),
    "scope": None,
    "by": "zoë",
    "reason": "launch day",
    "at": format_time(datetime.now(UTC)),
}
EXAMPLES = [
    shlex.split(example.partition(" | ")[0])[1:]
    for command in every_command().commands["limits"].commands.values()  # pyright: ignore[reportAttributeAccessIssue]  # it is a group
    for example in re.findall(r"^ {4}(breakwater .+)$", command.help or "", re.MULTILINE)
]


@pytest.fixture
def stub(stub: Stub) -> Stub:
    stub.answers["GET limits"] = (200, {"limits": LISTED, "continue_after": None})
    for limit in LISTED:
        path = f"limits/{limit['id']}"
        stub.answers |= {f"{method} {path}": (200, limit) for method in ("GET", "PUT")}
        stub.answers[f"DELETE {path}"] = (200, documents.limit_event(limit))
        stub.answers[f"POST {path}/raise"] = (200, limit | {"amount": "30.000000000", "raised": RAISED})
    return stub


def sent(stub: Stub) -> tuple[str, Any]:
    """The last request that changes something, with its body."""
    return next((asked, body) for asked, body in reversed(stub.asked) if body is not None)


async def test_every_example_of_the_help_is_sent_as_it_stands(run: Run, stub: Stub, subtests: pytest.Subtests) -> None:
    unknown = (404, problem("unknown_limit", "there is no limit"))
    for example in EXAMPLES:
        with subtests.test(shlex.join(example)):
            stub.answers |= {f"GET limits/{scope}": unknown for scope in ("key:acme-bot", "agent:writer")}
            stub.answers["POST limits/agent:writer.usd.day/raise"] = (200, BOT)
            stub.answers["GET limits"] = (200, {"limits": [BOT, documents.limit("agent:writer", "day")]})
            limit_id = documents.limit(example[2] if example[1] == "set" else "key:acme-bot")["id"]
            for window in ("month", "week", "quarter"):
                stub.answers[f"PUT limits/{limit_id.replace('month', window)}"] = (200, BOT)
            ran = await in_thread(run, *example)
            assert ran.code == ExitCode.OK, ran.err
    assert len(EXAMPLES) >= 10


async def test_limits_of_config_and_api_stand_in_one_table_of_80_columns(
    run: Run, stub: Stub, terminal: Terminal
) -> None:
    terminal(80)
    ran = await in_thread(run, "limits")
    lines = [line.rstrip() for line in ran.out.splitlines()]
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["scope", "limit", "used", "free", "resets", "action"]
    assert re.search(r"^agent:writer +\$9.00/day +\$8.00 \(100 %\) +\$0.00 +in 12 d +cheaper_model", ran.out, re.M)
    assert re.search(r"^ +set by +agents.writer.budget.daily_usd *$", ran.out, re.M)
    assert re.search(r"^key:acme-bot +\$20.00/month +\$5.00 \(30 %\) +\$14.00", ran.out, re.M)
    assert f"set by  ops, {clock(datetime(2026, 11, 21, 10, tzinfo=UTC))}" in ran.out
    assert "reason  pilot customer" in ran.out
    assert re.search(r"^ +id +team-1 *$", ran.out, re.M), "it does not follow from the scope"
    assert "key:acme-bot.usd.month" not in ran.out, "it does"


async def test_all_pages_are_one_document(run: Run, stub: Stub) -> None:
    first = {"limits": LISTED[:2], "continue_after": "key:acme-bot.usd.month"}
    stub.in_turn((200, first), (200, {"limits": LISTED[2:], "continue_after": None}))
    ran = await in_thread(run, "limits", "--scope", "plane", "--kind", "key", "--json")
    assert ran.json == {"limits": LISTED}
    page = {"scope": "plane", "kind": "key", "limit": "1000"}
    assert stub.queries == [page, page | {"after": "key:acme-bot.usd.month"}]


async def test_limits_that_are_only_tried_are_listed_apart(run: Run, stub: Stub) -> None:
    tried = documents.limit("agent:writer", id="shadow.limits.0", source="config", by=None, at=None, reason=None)
    of_each = documents.limit("tenant:*", id="shadow.limits.1", source="config", by=None, at=None, reason=None)
    listed = {"limits": [BOT], "tried": [tried | {"refused": 12}, of_each]}
    stub.answers["GET limits"] = (200, listed)
    ran = await in_thread(run, "limits")
    assert "limits that are only tried, and refuse nothing:" in ran.err
    assert "none; would have refused 12 calls" in ran.out
    assert "none; would have refused" not in ran.out.partition("agent:writer")[0]
    [line] = [line for line in ran.out.splitlines() if line.startswith("tenant:*")]
    assert "refuse" not in line
    assert (await in_thread(run, "limits", "--json")).json == listed


async def test_a_limit_that_is_raised_or_does_not_count_is_noted_below_the_list(run: Run, stub: Stub) -> None:
    raised = BOT | {"amount": "30.000000000", "raised": RAISED}
    shadowed = EACH_KEY | {"shadowed_by": "budgets.limits.0.usd"}
    stub.answers["GET limits"] = (200, {"limits": [raised, shadowed], "continue_after": None})
    ran = await in_thread(run, "limits")
    assert ran.err.splitlines() == [
        f"key:acme-bot raised from $20.00 to $30.00 until {clock(LATER)}, by zoë: launch day",
        "key:*.usd.month does not count: the config has budgets.limits.0.usd in its place",
    ]


async def test_a_limit_is_set_under_an_id_that_says_what_it_is(run: Run, stub: Stub) -> None:
    stub.answers["PUT limits/key:acme-bot.usd.month"] = (200, BOT)
    ran = await in_thread(run, "limits", "set", "key:acme-bot", "--usd", "20", "--per", "month", "--reason", "pilot")
    body = {"scope": "key:acme-bot", "usd": "20", "per": "month", "reason": "pilot"}
    assert sent(stub) == ("PUT limits/key:acme-bot.usd.month", body)
    assert ran.out == "key:acme-bot.usd.month: key:acme-bot may use $20.00/month; beyond it: refuse\n"
    assert ran.err == "$5.00 of it is used\n"
    stub.answers["PUT limits/a/b"] = (200, BOT)
    concurrent = ("key:a", "--concurrent", "5", "--threshold", "90", "--until", "2027-01-01", "--id", "a/b", "--stop")
    await in_thread(run, "limits", "set", *concurrent)
    midnight = format_time(datetime(2027, 1, 1).astimezone(UTC))
    more = {"concurrent": 5, "thresholds": [90], "until": midnight, "stop": True}
    assert sent(stub) == ("PUT limits/a/b", {"scope": "key:a", **more})


async def test_a_limit_that_can_not_be_is_refused_before_it_is_sent(
    run: Run, stub: Stub, subtests: pytest.Subtests
) -> None:
    for arguments, message in (
        ((), "a limit has one amount"),
        (("--usd", "1", "--tokens", "5"), "a limit has one amount"),
        (("--usd", "1", "--per", "year"), "year"),
        (("--usd", "1", "--per", "day", "--until", "soon"), "--until 'soon' is no time ahead"),
    ):
        with subtests.test(" ".join(arguments)):
            ran = await in_thread(run, "limits", "set", "key:a", *arguments)
            assert ran.code == ExitCode.USAGE
            assert message in ran.err
    assert stub.asked == []


async def test_a_limit_is_raised_by_its_scope_if_that_has_no_other(run: Run, stub: Stub) -> None:
    raising = ("--to", "30", "--reason", "launch day")
    unknown = (404, problem("unknown_limit", "there is no limit"))
    stub.answers["GET limits/key:acme-bot"] = unknown
    stub.answers["GET limits"] = (200, {"limits": [BOT]})
    ran = await in_thread(run, "limits", "raise", "key:acme-bot", *raising, "--until", "2h")
    asked, body = sent(stub)
    assert (asked, body["amount"], body["reason"]) == ("POST limits/key:acme-bot.usd.month/raise", "30", "launch day")
    assert datetime.now(UTC) < datetime.fromisoformat(body["until"]) < datetime.now(UTC) + timedelta(hours=3)
    assert ran.err.splitlines() == [
        f"key:acme-bot raised from $20.00 to $30.00 until {clock(LATER)}, by zoë: launch day",
        "`breakwater limits raise key:acme-bot.usd.month --to 20 --reason TEXT` ends the raise",
    ]
    # The only limit is on each key by itself.
    stub.answers["GET limits"] = (200, {"limits": [EACH_KEY]})
    await in_thread(run, "limits", "raise", "key:acme-bot", *raising)
    body = {"amount": "30", "scope": "key:acme-bot", "reason": "launch day"}
    assert sent(stub) == ("POST limits/key:*.usd.month/raise", body)
    daily = documents.limit("key:acme-bot", "day")
    stub.answers["GET limits"] = (200, {"limits": [BOT, daily]})
    ran = await in_thread(run, "limits", "raise", "key:acme-bot", *raising)
    assert "key:acme-bot has 2 limits" in ran.err
    assert "Name one: key:acme-bot.usd.month, key:acme-bot.usd.day." in ran.err
    stub.answers[f"POST limits/{daily['id']}/raise"] = (200, daily)
    await in_thread(run, "limits", "raise", "key:acme-bot", "--per", "day", *raising)
    assert sent(stub)[0] == "POST limits/key:acme-bot.usd.day/raise"
    stub.answers |= {"GET limits": (200, {"limits": []}), "GET limits/nonsense": unknown}
    for name in ("key:acme-bot", "nonsense"):
        ran = await in_thread(run, "limits", "delete", name, "--json")
        assert (ran.code, ran.error["code"]) == (ExitCode.FAILED, "unknown_limit")


async def test_a_raise_that_is_ended_is_not_in_effect(run: Run, stub: Stub) -> None:
    stub.answers["POST limits/key:acme-bot.usd.month/raise"] = (200, BOT)
    ran = await in_thread(run, "limits", "raise", BOT["id"], "--to", "20", "--reason", "over")
    assert ran.out == "key:acme-bot.usd.month is not raised: $20.00/month\n"


async def test_a_limit_of_the_config_is_not_deleted(run: Run, stub: Stub) -> None:
    path = f"limits/{OF_AGENT['id']}"
    stub.answers[f"DELETE {path}"] = (409, problem("limit_in_config", "it is in the config; it can only be raised"))
    ran = await in_thread(run, "limits", "delete", OF_AGENT["id"])
    assert (ran.code, ran.err.splitlines()[0]) == (ExitCode.FAILED, "error: it is in the config; it can only be raised")
    assert (await in_thread(run, "limits", "delete", BOT["id"])).out == (
        "deleted key:acme-bot.usd.month, a limit of key:acme-bot\n"
    )
    await in_thread(run, "limits", "delete", BOT["id"], "--reason", "over")
    assert (stub.asked[-1], stub.queries[-1]) == (("DELETE limits/key:acme-bot.usd.month", None), {"reason": "over"})


async def test_one_limit_is_shown_with_whose_use_is_asked_for(run: Run, stub: Stub) -> None:
    ran = await in_thread(run, "limits", "show", EACH_KEY["id"], "--scope", "key:acme-bot")
    assert stub.queries[-1] == {"scope": "key:acme-bot"}
    assert ran.out.splitlines()[0] == "key:*.usd.month"
    assert "$20.00/month" in ran.out
    calls = [{"key": "bot", "tenant": None, "since": format_time(datetime.now(UTC))}]
    waited_for = BOT | {"waiting": 3, "waiting_calls": calls}
    stub.answers["GET limits/key:acme-bot.usd.month"] = (200, waited_for)
    ran = await in_thread(run, "limits", "show", BOT["id"])
    assert "3 calls waiting; the first, which are admitted as room becomes free:" in ran.out
    assert ran.out.splitlines()[-1].startswith("bot ")
