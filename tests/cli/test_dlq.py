"""`breakwater dlq`, against a stub of the HTTP interface."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from breakwater.jobs.contract.dead_letters import DeadLetterDetails
from breakwater.jobs.views.dead_letters import FACTS
from breakwater.kernel.commands.errors import ExitCode
from tests.api_documents import dead_letter, dead_letter_details
from tests.cli.api_stub import Stub, problem
from tests.cli.conftest import Run, in_thread
from tests.columns import texts

NOW = datetime.now(UTC)
BEFORE = NOW - timedelta(days=2)


COUNTS = [
    {"reason": reason, "agent": "researcher", "count": 1200 - number}
    for number, reason in enumerate(["error", "timeout", "invalid", "a", "b", "c", "d"])
]
LISTED = {"dead_letters": [dead_letter(17)], "more": False, "counts": COUNTS}
SHOWN = dead_letter_details(17, payload={"agent": "writer", "prompt": "mail [REDACTED] \u001b[31m"})


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


async def test_below_the_list_is_what_is_kept_in_all(run: Run, stub: Stub) -> None:
    assert (await in_thread(run, "dlq")).err == (
        "(kept for 30 days: 1,200 error of researcher, 1,199 timeout of researcher, 1,198 invalid of researcher, "
        "1,197 a of researcher, 1,196 b of researcher, 2,389 others)\n"
    )


async def test_which_ones_are_meant_is_asked_for(run: Run, stub: Stub) -> None:
    stub.answers["GET dlq"] = (200, {"dead_letters": [dead_letter(17)], "more": True, "counts": []})
    arguments = ["--reason", "error", "--agent", "a b&c", "--since", "2026-11-21T10:00Z", "--limit", "1"]
    ran = await in_thread(run, "dlq", "list", *arguments)
    assert stub.queries == [{"reason": "error", "agent": "a b&c", "since": "2026-11-21T10:00:00.000Z", "limit": "1"}]
    assert ran.err == "(more than these 1; see --limit)\n"
    stub.answers["GET dlq"] = (200, {"dead_letters": [], "more": False, "counts": []})
    for given, said in (
        (["--since", "2h"], "nothing was given up since 2h"),
        (["--agent", "x"], "nothing of those you asked for was given up within 7 days"),
    ):
        ran = await in_thread(run, "dlq", *given)
        assert (ran.code, ran.out, ran.err) == (ExitCode.OK, "", f"{said}\n")
    begin = datetime.fromisoformat(stub.queries[1]["since"])
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


async def test_one_dead_letter_is_shown(run: Run, stub: Stub) -> None:
    ran = await in_thread(run, "dlq", "show", "17")
    assert (ran.code, ran.err) == (ExitCode.OK, "")
    head, *lines = ran.out.splitlines()
    assert head == "dead letter 17  error"
    facts, payload = lines[: lines.index("")], lines[lines.index("") + 1 :]
    shown = {line[2:16].strip(): line[16:].strip() for line in facts}
    assert shown == texts(FACTS, DeadLetterDetails.model_validate(SHOWN)) | {"header": "Nats-Msg-Id: order-17"}
    assert payload == ["{", '  "agent": "writer",', '  "prompt": "mail [REDACTED] \\u001b[31m"', "}"]
    assert (await in_thread(run, "dlq", "show", "17", "--json")).json == SHOWN


async def test_a_payload_that_is_a_text_does_nothing_to_the_terminal(run: Run, stub: Stub) -> None:
    text = {**SHOWN, "payload": "é\x1b[31m\tx\nbeginning", "payload_cut": True}
    stub.answers["GET dlq/17"] = (200, text)
    ran = await in_thread(run, "dlq", "show", "17")
    assert ran.out.endswith("\né\\u001b[31m\tx\nbeginning\n")
    assert ran.err == "(only the beginning: the original has 80,000 bytes)\n"


async def test_a_dead_letter_that_is_not_there_is_an_error(run: Run, stub: Stub) -> None:
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


async def test_dead_letters_are_dismissed_by_their_numbers_or_by_a_reason(run: Run, stub: Stub) -> None:
    missing = [{"dead_letter_id": 99, "why": "there is no such dead letter"}]
    answer = {"dismissed": [17], "already": 1, "skipped": missing, "continue_after": None, "up_to": None}
    stub.answers["POST dlq/dismiss"] = (200, answer)
    ran = await in_thread(run, "dlq", "dismiss", "17", "18", "99", "17", "--why", "sent again")
    assert stub.asked == [("POST dlq/dismiss", {"dead_letters": [17, 18, 99], "why": "sent again"})]
    assert (ran.code, ran.out) == (ExitCode.OK, "1 dead letter dismissed\n")
    assert ran.err.splitlines() == [
        "1 dead letter had been dismissed before",
        "skipped dead letter 99: there is no such dead letter",
    ]
    assert set((await in_thread(run, "dlq", "dismiss", "17", "--json")).json) == {"dismissed", "already", "skipped"}
    await in_thread(run, "dlq", "dismiss", "--reason", "invalid", "--agent", "writer")
    assert stub.asked[-1] == ("POST dlq/dismiss", {"reason": "invalid", "agent": "writer"})
    stub.answers["POST dlq/dismiss"] = (200, {**answer, "dismissed": [], "already": 0})
    assert (await in_thread(run, "dlq", "dismiss", "99")).code == ExitCode.FAILED
    requests = len(stub.asked)
    ran = await in_thread(run, "dlq", "dismiss", "17", "--reason", "sent again")
    assert ran.code == ExitCode.USAGE
    assert "To record why you do it, use --why." in ran.err
    assert (await in_thread(run, "dlq", "dismiss")).code == ExitCode.USAGE
    assert len(stub.asked) == requests


async def test_dismissed_ones_are_listed_on_request_and_shown_with_the_reason(run: Run, stub: Stub) -> None:
    ran = await in_thread(run, "dlq", "list", "--dismissed")
    assert stub.queries[-1]["state"] == "dismissed"
    assert ran.err.startswith("(dismissed: 1,200 error of researcher")
    stub.answers["GET dlq"] = (200, {"dead_letters": [], "more": False, "counts": []})
    ran = await in_thread(run, "dlq", "list", "--dismissed")
    assert ran.err == "nothing was dismissed within 7 days\n"
    noted = {"dismissed_by": "ops", "dismissed_at": "2026-11-21T10:00:00.000Z", "dismissed_why": "sent again"}
    stub.answers["GET dlq/17"] = (200, SHOWN | noted)
    shown = await in_thread(run, "dlq", "show", "17")
    assert "dismissed by" in shown.out
    assert ": sent again" in shown.out
