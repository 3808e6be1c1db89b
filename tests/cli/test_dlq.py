"""`breakwater dlq`, against a stub of the HTTP interface."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from breakwater.kernel.commands.errors import ExitCode
from breakwater.kernel.commands.formats import clock
from breakwater.kernel.types import format_time
from tests.cli.api_stub import Stub, problem
from tests.cli.conftest import Run, Terminal, in_thread

NOW = datetime.now(UTC)
BEFORE = NOW - timedelta(days=2)


def dead_letter(number: int, **more: Any) -> dict[str, Any]:
    return {
        "dead_letter_id": number,
        "kind": "job",
        "reason": "error",
        "agent": "researcher",
        "execution_id": f"order-{number}",
        "error": "the provider answered 500",
        "at": format_time(BEFORE),
        "replayable": True,
        "why_not": None,
        "replayed_as": None,
        "replay_status": None,
        **more,
    }


REPLAYED = dead_letter(
    12, replayable=False, why_not="it was replayed before, as rpl_1", replayed_as="rpl_1", replay_status="succeeded"
)
FORGOTTEN = {**REPLAYED, "dead_letter_id": 11, "replay_status": None}
EVENT = dead_letter(
    9,
    kind="event",
    reason="unstorable",
    agent=None,
    execution_id=None,
    error="is not an Attempt",
    replayable=False,
    why_not="it is an event",
)
COUNTS = [
    {"reason": reason, "agent": "researcher", "count": 1200 - number}
    for number, reason in enumerate(["error", "timeout", "invalid", "a", "b", "c", "d"])
]
LISTED = {"dead_letters": [dead_letter(17), REPLAYED, FORGOTTEN, EVENT], "more": False, "counts": COUNTS}
SHOWN = {
    **dead_letter(17),
    "stream": "JOBS",
    "subject": "bw.jobs.researcher",
    "sequence": 4711,
    "headers": {"Nats-Msg-Id": "order-17"},
    "payload": {"agent": "researcher", "prompt": "mail [REDACTED] \u001b[31m"},
    "payload_bytes": 80_000,
    "payload_cut": False,
    "replayed_by": None,
    "replayed_at": None,
}


def replayed(*dead_letters: int, already: int = 0, skipped: Any = (), after: int | None = None) -> dict[str, Any]:
    return {
        "replayed": [{"dead_letter_id": number, "execution_id": f"rpl_{number}"} for number in dead_letters],
        "already": already,
        "skipped": [{"dead_letter_id": number, "why": why} for number, why in skipped],
        "continue_after": after,
        "up_to": None if after is None else 5_000,
    }


@pytest.fixture
def stub(stub: Stub) -> Stub:
    stub.answers["GET dlq"] = (200, LISTED)
    stub.answers["GET dlq/17"] = (200, SHOWN)
    return stub


@pytest.mark.parametrize("command", [["dlq"], ["dlq", "list"]], ids=" ".join)
async def test_dead_letters_are_listed_with_what_a_replay_would_do(run: Run, stub: Stub, command: list[str]) -> None:
    ran = await in_thread(run, *command)
    assert ran.code == ExitCode.OK
    rows = [line.split() for line in ran.out.splitlines()]
    assert rows[0] == ["dead", "letter", "given", "up", "of", "reason", "agent", "execution", "replay", "error"]
    when = clock(BEFORE, NOW).split()
    assert rows[1] == [
        "17",
        *when,
        "job",
        "error",
        "researcher",
        "order-17",
        "possible",
        *["the", "provider", "answered", "500"],
    ]
    assert [row[0] for row in rows[1:]] == ["17", "12", "11", "9"]
    assert ["succeeded" in rows[2], "done" in rows[3], "no" in rows[4]] == [True, True, True]
    assert ran.err == (
        "(kept for 30 days: 1,200 error of researcher, 1,199 timeout of researcher, 1,198 invalid of researcher, "
        "1,197 a of researcher, 1,196 b of researcher, 2,389 others)\n"
    )
    assert stub.queries == [{"limit": "100"}]
    assert (await in_thread(run, *command, "--json")).json == LISTED


async def test_which_ones_are_meant_is_asked_for(run: Run, stub: Stub) -> None:
    stub.answers["GET dlq"] = (200, {"dead_letters": [dead_letter(17)], "more": True, "counts": []})
    arguments = ["--reason", "error", "--agent", "a b&c", "--since", "2026-11-21T10:00Z", "--limit", "1"]
    ran = await in_thread(run, "dlq", "list", *arguments)
    assert stub.queries == [{"reason": "error", "agent": "a b&c", "since": "2026-11-21T10:00:00.000Z", "limit": "1"}]
    assert ran.err == "(more than these 1; see --limit)\n"
    stub.answers["GET dlq"] = (200, {"dead_letters": [], "more": False, "counts": []})
    for given, said in (
        ([], "nothing was given up within 7 days"),
        (["--since", "2h"], "nothing was given up since 2h"),
        (["--agent", "x"], "nothing of those you asked for was given up within 7 days"),
    ):
        ran = await in_thread(run, "dlq", *given)
        assert (ran.code, ran.out, ran.err) == (ExitCode.OK, "", f"{said}\n")
    begin = datetime.fromisoformat(stub.queries[2]["since"])
    assert timedelta(hours=2) <= datetime.now(UTC) - begin < timedelta(hours=3)


@pytest.mark.parametrize(
    ("options", "added"),
    [
        (["--reason", "nope"], "; no dead letter has the reason 'nope', only error, timeout"),
        (["--agent", "nope"], "; no dead letter is of agent 'nope', only unknown, writer"),
        (
            ["--reason", "x", "--agent", "y"],
            "; no dead letter has the reason 'x', only error, timeout; "
            "no dead letter is of agent 'y', only unknown, writer",
        ),
        (["--reason", "timeout", "--agent", "writer"], ""),
    ],
)
async def test_a_reason_or_an_agent_that_no_dead_letter_has_is_reported(
    run: Run, stub: Stub, options: list[str], added: str
) -> None:
    kept = [("error", "unknown", 3), ("error", "writer", 2), ("timeout", "unknown", 1)]
    counts = [{"reason": reason, "agent": agent, "count": count} for reason, agent, count in kept]
    stub.answers["GET dlq"] = (200, {"dead_letters": [], "more": False, "counts": counts})
    ran = await in_thread(run, "dlq", "list", *options)
    assert (ran.code, ran.out) == (ExitCode.OK, "")
    assert ran.err.splitlines()[0] == f"nothing of those you asked for was given up within 7 days{added}"


@pytest.mark.parametrize("width", [60, 80, 140])
async def test_dead_letters_fit_the_terminal_with_their_errors(
    run: Run, stub: Stub, terminal: Terminal, width: int
) -> None:
    terminal(width)
    ran = await in_thread(run, "dlq")
    assert max(len(line.rstrip()) for line in ran.out.splitlines()) <= width
    for words in ("17", "possible", "the provider answered 500", "is not an Attempt"):
        assert words in ran.out


async def test_one_dead_letter_is_shown(run: Run, stub: Stub) -> None:
    ran = await in_thread(run, "dlq", "show", "17")
    assert (ran.code, ran.err) == (ExitCode.OK, "")
    head, *lines = ran.out.splitlines()
    assert head == "dead letter 17  error"
    facts, payload = lines[: lines.index("")], lines[lines.index("") + 1 :]
    assert {line[2:16].strip(): line[16:].strip() for line in facts} == {
        "of": "job: bw.jobs.researcher, 4,711 of JOBS",
        "agent": "researcher",
        "execution": "order-17",
        "given up": clock(BEFORE, NOW),
        "error": "the provider answered 500",
        "replay": "possible",
        "header": "Nats-Msg-Id: order-17",
    }
    assert payload == ["{", '  "agent": "researcher",', '  "prompt": "mail [REDACTED] \\u001b[31m"', "}"]
    assert (await in_thread(run, "dlq", "show", "17", "--json")).json == SHOWN


async def test_a_payload_that_is_a_text_does_nothing_to_the_terminal(run: Run, stub: Stub) -> None:
    text = {**SHOWN, "payload": "é\x1b[31m\tx\nbeginning", "payload_cut": True}
    stub.answers["GET dlq/17"] = (200, text)
    ran = await in_thread(run, "dlq", "show", "17")
    assert ran.out.endswith("\né\\u001b[31m\tx\nbeginning\n")
    assert ran.err == "(only the beginning: the original has 80,000 bytes)\n"


async def test_who_replayed_a_dead_letter_is_shown_or_why_none_can(run: Run, stub: Stub) -> None:
    done = {**SHOWN, **REPLAYED, "replayed_by": "ops", "replayed_at": format_time(NOW)}
    stub.answers["GET dlq/12"] = (200, done)
    out = (await in_thread(run, "dlq", "show", "12")).out
    assert f"replayed by   ops at {clock(NOW, NOW)}\n" in out
    assert "replayed as   rpl_1\n" in out
    assert "why not" not in out
    stub.answers["GET dlq/9"] = (200, {**SHOWN, **EVENT})
    assert "why not       it is an event\n" in (await in_thread(run, "dlq", "show", "9")).out
    stub.answers["GET dlq/8"] = (404, problem("unknown_dead_letter", "there is no dead letter '8'"))
    ran = await in_thread(run, "dlq", "show", "8")
    assert (ran.code, ran.err.splitlines()[0]) == (ExitCode.FAILED, "error: there is no dead letter '8'")


async def test_dead_letters_are_replayed_by_their_numbers(run: Run, stub: Stub) -> None:
    again = "`breakwater alerts replay --dead-letter {}` tries it again"
    skipped = [(5, "no job"), *((number, again.format(number)) for number in (6, 7)), (8, "no job")]
    stub.answers["POST dlq/replay"] = (200, replayed(17, 18, already=1, skipped=skipped))
    numbers = ["17", "18", "17", "12", "5", "6", "7", "8"]
    ran = await in_thread(run, "dlq", "replay", *numbers, "--why", "the provider is back")
    asked = {"dead_letters": [17, 18, 12, 5, 6, 7, 8], "why": "the provider is back"}
    assert stub.asked == [("POST dlq/replay", asked)]
    assert (ran.code, ran.out) == (
        ExitCode.OK,
        "2 jobs queued again\n  dead letter 17 as rpl_17\n  dead letter 18 as rpl_18\n",
    )
    assert ran.err.splitlines() == [
        "1 dead letter had been replayed before",
        "skipped dead letters 5, 8: no job",
        "skipped dead letters 6, 7: `breakwater alerts replay` tries it again",
    ]
    reported = (await in_thread(run, "dlq", "replay", "17", "--json")).json
    assert reported["replayed"][0] == {"dead_letter_id": 17, "execution_id": "rpl_17"}
    assert set(reported) == {"replayed", "already", "skipped"}


async def test_where_none_could_run_the_exit_code_says_so(run: Run, stub: Stub) -> None:
    stub.answers["POST dlq/replay"] = (200, replayed(skipped=[(5, "agent 'x' is not configured")]))
    ran = await in_thread(run, "dlq", "replay", "5")
    assert (ran.code, ran.out) == (ExitCode.FAILED, "0 jobs queued again\n")
    assert ran.err == "skipped dead letter 5: agent 'x' is not configured\n"
    stub.answers["POST dlq/replay"] = (200, replayed(already=1))
    assert (await in_thread(run, "dlq", "replay", "5")).code == ExitCode.OK


async def test_many_that_are_chosen_go_on_until_there_are_no_more(run: Run, stub: Stub) -> None:
    stub.in_turn((200, replayed(*range(1, 901), already=100, after=1_400)), (200, replayed(1_500)))
    ran = await in_thread(run, "dlq", "replay", "--reason", "error", "--agent", "x", "--since", "2026-11-01T00:00Z")
    choice = {"reason": "error", "agent": "x", "since": "2026-11-01T00:00:00.000Z"}
    assert stub.asked == [
        ("POST dlq/replay", choice),
        ("POST dlq/replay", {**choice, "after": 1_400, "up_to": 5_000}),
    ]
    assert ran.code == ExitCode.OK
    head, *named, rest = ran.out.splitlines()
    assert (head, len(named), rest) == ("901 jobs queued again", 10, "  and 891 more; --json lists all of them")
    assert ran.err.splitlines() == [
        "900 replayed, 100 before, 0 skipped; going on",
        "100 dead letters had been replayed before",
    ]


async def test_json_of_many_is_one_document_and_nothing_else(run: Run, stub: Stub) -> None:
    stub.in_turn((200, replayed(1, after=1)), (200, replayed(2)))
    ran = await in_thread(run, "dlq", "replay", "--all", "--json")
    assert [body for _, body in stub.asked] == [{"all": True}, {"all": True, "after": 1, "up_to": 5_000}]
    assert ([one["dead_letter_id"] for one in ran.json["replayed"]], ran.err) == ([1, 2], "")


async def test_what_was_replayed_before_an_outage_is_said(run: Run, stub: Stub) -> None:
    stub.in_turn((200, replayed(1, 2, after=2)), (503, problem("refused", "the job was not accepted: JOBS is full")))
    ran = await in_thread(run, "dlq", "replay", "--all")
    assert ran.code == ExitCode.UNREACHABLE
    assert "error: the job was not accepted: JOBS is full\n" in ran.err
    assert "Until then: 2 replayed, 0 before, 0 skipped. None of them is replayed twice." in ran.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["replay"], "no dead letters were selected"),
        (["replay", "17", "--all"], "name dead letters, or select them by --reason, --agent, --all and --since"),
        (["replay", "17", "--since", "2h"], "name dead letters, or select them"),
        (["replay", "--since", "2h"], "no dead letters were selected"),
        (["replay", "0"], "should be greater than or equal to 1"),
        (["replay", "--all", "--since", "soon"], "--since 'soon' is neither a duration nor a time"),
        (["list", "--since", "soon"], "--since 'soon' is neither a duration nor a time"),
        (["show", "x"], "should be a valid integer"),
        (["list", "--limit", "1001"], "should be less than or equal to 1000"),
    ],
    ids=" ".join,
)
async def test_a_wrong_call_says_what_is_wrong(run: Run, stub: Stub, arguments: list[str], said: str) -> None:
    ran = await in_thread(run, "dlq", *arguments)
    assert (ran.code, ran.out) == (ExitCode.USAGE, "")
    assert said in ran.err
    assert stub.asked == []
