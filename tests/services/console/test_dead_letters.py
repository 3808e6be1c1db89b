"""The pages of dead letters, and replaying them."""

import json
import re
from typing import Any

from tests.api_documents import dead_letter, dead_letter_details
from tests.cli.api_stub import problem
from tests.services.console.conftest import Console
from tests.tables import each_row

EVIL = "<script>alert(1)</script>"
AS_JSON = {"Accept": "application/json"}


def listed(*dead_letters: dict[str, Any], more: bool = False) -> tuple[int, Any]:
    counts = [
        {"reason": "error", "agent": "writer", "count": 2_000},
        {"reason": "timeout", "agent": "writer", "count": 30},
        {"reason": "error", "agent": "unknown", "count": 5},
    ]
    return 200, {"dead_letters": dead_letters, "more": more, "counts": counts}


def outcome(*replayed: int, already: int = 0, skipped: int = 0, after: int | None = None) -> tuple[int, Any]:
    done = [{"dead_letter_id": number, "execution_id": f"e/{number}~r"} for number in replayed]
    left = [{"dead_letter_id": 1_000 + number, "why": "its payload is no job"} for number in range(skipped)]
    reported = {"replayed": done, "already": already, "skipped": left}
    return 200, reported | {"continue_after": after, "up_to": None if after is None else 5_000}


def asked(console: Console, action: str = "replay") -> dict[str, Any]:
    """What the interface was asked to replay or dismiss, the last time."""
    return next(body for what, body in reversed(console.interface.asked) if what == f"POST dlq/{action}")


async def test_counts_by_reason_filter_the_list(console: Console):
    other = dead_letter(8, replayable=False, why_not="it was replayed before, as e/8~r", replayed_as="e/8~r")
    console.interface.answers["GET dlq"] = listed(dead_letter(), other | {"replay_status": "succeeded"}, more=True)
    page = await console.get("/dead-letters")
    assert page.status == 200
    assert "all reasons 2,035" in page.words
    assert "error 2,005" in page.words
    assert "timeout 30" in page.words
    assert 'href="/executions/e%2F8~r"' in page.text
    assert "Of the latest 2" in page.words
    assert 'value="8" aria-label="Select dead letter 8">' in page.text, "it can be dismissed"
    filtered = await console.get("/dead-letters?reason=error&agent=unknown&window=24h")
    query = console.interface.queries[-1]
    assert (query["reason"], query["agent"], query["limit"]) == ("error", "unknown", "1000")
    assert "since" in query
    assert "error 5" in filtered.words
    assert "Replay all, up to 4 like these" in filtered.words, "one of them was replayed"


async def test_what_was_replayed_is_not_counted_again(console: Console):
    done = dead_letter(8, replayable=False, why_not="it was replayed before, as e/8~r", replayed_as="e/8~r")
    console.interface.answers["GET dlq"] = listed(dead_letter(), dead_letter(9), done)
    page = await console.get("/dead-letters?reason=error")
    assert "Replay all 2 like these" in page.words
    console.interface.answers["GET dlq"] = listed(done)
    page = await console.get("/dead-letters")
    assert "Replay all" not in page.words, "there is none that could be"
    assert "e/8~r" in page.words


async def test_dead_letters_show_the_error_first_and_shortened_ids(console: Console):
    long = f"client 401 {'x ' * 500}"
    replayed = {"replayed_as": "rpl_0123456789abcdef0123456789abcdef", "replay_status": "succeeded"}
    letter = dead_letter(error=long, execution_id="01a22663-c120-790e-af84-d2633434e675", **replayed)
    console.interface.answers["GET dlq"] = listed(letter)
    page = await console.get("/dead-letters")
    letters = page.text[page.text.index('id="list"') :]
    headings = re.findall(r">(\w[\w ]*)</a></th>", letters)
    assert headings == ["Error", "Dead letter", "Given up", "Reason", "Agent", "Execution", "Replay"]
    assert '<a href="/dead-letters/7"><span class="two-lines" title="client 401 x x' in letters
    assert 'href="/executions/01a22663-c120-790e-af84-d2633434e675"' in letters
    assert ">01a22663…34e675</a>" in letters
    assert ">rpl_0123…abcdef</a>" in letters


async def test_one_form_filters_both_tables(console: Console):
    listing = [
        dead_letter(number, error=f"error of kind {chr(97 + number)}", execution_id="e/7") for number in range(8)
    ]
    console.interface.answers["GET dlq"] = listed(*listing)
    page = await console.get("/dead-letters?window=24h&reason=error&error=0badc0de&find=kind+c")
    assert page.text.count(">Filter</button>") == 1
    form = page.text[page.text.index('role="search"') : page.text.index(">Filter</button>")]
    assert re.findall(r'name="([^"]+)"', form) == ["window", "reason", "agent", "find"]
    found = await console.get("/dead-letters?find=kind+c")
    assert re.findall(r'aria-label="Select dead letter (\d)"', found.text) == ["2"]
    assert ("error of kind c" in found.words, "error of kind d" in found.words) == (True, False)
    assert "Replay all" not in found.words, "that would replay others, too"
    assert 'href="/dead-letters?#errors">Clear</a>' in found.text


async def test_one_dead_letter_whole(console: Console):
    whole = {"headers": {"ce-id": EVIL}, "payload": {"prompt": EVIL}, "payload_bytes": 70_000, "payload_cut": True}
    console.interface.answers["GET dlq/7"] = 200, dead_letter_details(**whole)
    page = await console.get("/dead-letters/7")
    assert page.status == 200
    assert f'"prompt": "{EVIL}"' in page.words
    assert EVIL not in page.text
    assert "70,000 bytes" in page.words
    assert "only the beginning" in page.words
    assert "Replay it" in page.words
    alert = dead_letter_details(kind="alert", replayable=False, why_not="it is an alert")
    console.interface.answers["GET dlq/7"] = 200, alert
    page = await console.get("/dead-letters/7")
    assert "Replay it" not in page.words
    assert 'href="/alerts#undelivered"' in page.text
    console.interface.answers["GET dlq/x%2Fy"] = console.interface.answers["GET dlq/99"] = (
        404,
        problem("unknown_dead_letter", "there is no dead letter 99"),
    )
    missing = await console.get("/dead-letters/99")
    assert missing.status == 404
    assert "there is no dead letter 99" in missing.words


async def test_one_is_replayed_and_leads_to_its_new_execution(console: Console):
    console.interface.answers["GET dlq/7"] = 200, dead_letter_details()
    console.interface.answers["POST dlq/replay"] = outcome(7)
    fields = {"dead_letter_id": "7", "from": "one", "why": "deployed a fix"}
    page = await console.submit("/dead-letters/7", "/dead-letters/replay", **fields)
    assert asked(console) == {"dead_letters": [7], "why": "deployed a fix"}
    assert page.url.endswith("/dead-letters/7")
    assert "Replayed as e/7~r." in page.words


async def test_the_chosen_ones_without_a_script(console: Console):
    console.interface.answers["GET dlq"] = listed(dead_letter(7), dead_letter(9))
    console.interface.answers["POST dlq/replay"] = outcome(7, 9, already=1, skipped=1)
    opened = await console.get("/dead-letters?reason=error")
    form = [
        ("csrf", opened.csrf),
        ("dead_letter_id", "7"),
        ("dead_letter_id", "9"),
        ("reason", "error"),
        ("window", "7d"),
        ("why", ""),
    ]
    page = await console.post("/dead-letters/replay", form)
    assert asked(console) == {"dead_letters": [7, 9]}
    assert (
        "2 replayed; 1 had been replayed before; 1 can't be replayed, such as 1000: its payload is no job."
        in page.words
    )
    assert "reason=error" in page.url
    assert "window=7d" in page.url
    page = await console.submit("/dead-letters", "/dead-letters/replay", why="")
    assert "Nothing is selected" in page.words


async def test_all_of_a_filter_without_a_script_goes_on_where_it_stopped(console: Console):
    console.interface.answers["GET dlq"] = listed(dead_letter(7), more=True)
    console.interface.answers["POST dlq/replay"] = outcome(*range(100), after=400)
    since = "2026-11-01T00:00:00.000Z"
    fields = {"all": "1", "agent": "writer", "reason": "error", "since": since, "total": "2000", "why": "", "after": ""}
    page = await console.submit("/dead-letters", "/dead-letters/replay", **fields)
    assert asked(console) == {"reason": "error", "agent": "writer", "since": since}
    assert "100 replayed. About 1,900 are left: continue below." in page.words
    assert 'name="after" value="400-5000"' in page.text
    assert "Continue: replay up to 1,900 more" in page.words
    console.interface.answers["POST dlq/replay"] = outcome(*range(3))
    page = await console.submit("/dead-letters", "/dead-letters/replay", **fields | {"after": "400-5000", "reason": ""})
    assert asked(console) == {"agent": "writer", "since": since, "after": 400, "up_to": 5_000}
    assert "3 replayed." in page.words
    assert "Go on" not in page.words


def dismissals(*dismissed: int, already: int = 0, skipped: int = 0, after: int | None = None) -> tuple[int, Any]:
    missing = [{"dead_letter_id": 1_000 + number, "why": "there is no such dead letter"} for number in range(skipped)]
    position = {"continue_after": after, "up_to": None if after is None else 5_000}
    return 200, {"dismissed": dismissed, "already": already, "skipped": missing, **position}


async def test_one_is_dismissed_next_to_its_replay_and_says_by_whom(console: Console):
    console.interface.answers["GET dlq/7"] = 200, dead_letter_details()
    console.interface.answers["POST dlq/dismiss"] = dismissals(7)
    opened = await console.get("/dead-letters/7")
    assert ("Replay it" in opened.words, "Dismiss it" in opened.words) == (True, True)
    fields = {"dead_letter_id": "7", "from": "one", "why": "sent again"}
    page = await console.submit("/dead-letters/7", "/dead-letters/dismiss", **fields)
    assert asked(console, "dismiss") == {"dead_letters": [7], "why": "sent again"}
    assert page.url.endswith("/dead-letters/7")
    assert "1 dead letter dismissed." in page.words
    noted = {"dismissed_by": "ops", "dismissed_at": "2026-11-21T10:00:00.000Z", "dismissed_why": EVIL}
    console.interface.answers["GET dlq/7"] = 200, dead_letter_details(**noted)
    page = await console.get("/dead-letters/7")
    assert f"by ops: {EVIL}" in page.words
    assert EVIL not in page.text
    assert ("Replay it" in page.words, "Dismiss it" in page.words) == (True, False)


async def test_the_chosen_ones_or_all_that_match_are_dismissed(console: Console):
    console.interface.answers["GET dlq"] = listed(dead_letter(7), dead_letter(9))
    opened = await console.get("/dead-letters?reason=error")
    assert "Dismiss selected" in opened.words
    assert "Dismiss all like these" in opened.words
    form = [("csrf", opened.csrf), ("reason", "error"), ("window", "24h"), ("after", "400-5000"), ("why", "")]
    console.interface.answers["POST dlq/dismiss"] = dismissals(7, 9, already=1, skipped=1)
    page = await console.post("/dead-letters/dismiss", [*form, ("dead_letter_id", "7"), ("dead_letter_id", "9")])
    assert asked(console, "dismiss") == {"dead_letters": [7, 9]}
    assert "2 dead letters dismissed; 1 had been dismissed before; 1 no longer exist." in page.words
    assert ("reason=error" in page.url, "window=24h" in page.url) == (True, True)
    console.interface.answers["POST dlq/dismiss"] = dismissals(*range(1, 1_001), after=1_000)
    page = await console.post("/dead-letters/dismiss", [*form, ("all", "1"), ("since", "2026-11-01T00:00:00.000Z")])
    body = {"reason": "error", "since": "2026-11-01T00:00:00.000Z"}
    assert asked(console, "dismiss") == body, "from the beginning, as these left the list"
    assert "1,000 dead letters dismissed. There are more: dismiss those, too." in page.words
    del console.interface.answers["POST dlq/dismiss"]
    page = await console.post("/dead-letters/dismiss", form)
    assert "Nothing is selected: tick the dead letters to dismiss." in page.words


async def test_dismissed_ones_are_a_list_of_their_own_from_which_they_can_be_replayed(console: Console):
    noted = {"dismissed_by": "ops", "dismissed_at": "2026-11-21T10:00:00.000Z"}
    console.interface.answers["GET dlq"] = listed(dead_letter(7, **noted))
    page = await console.get("/dead-letters")
    assert "state" not in console.interface.queries[-1]
    assert 'href="/dead-letters?state=dismissed&amp;window=7d"' in page.text
    page = await console.get("/dead-letters?state=dismissed")
    assert console.interface.queries[-1]["state"] == "dismissed"
    assert "Replay selected" in page.words
    assert not any(words in page.words for words in ("Dismiss selected", "Dismiss all", "Replay all"))
    tile = re.search(r'<a class="tile" href="([^"]*reason=timeout[^"]*)"', page.text)
    assert tile is not None
    assert "state=dismissed" in tile[1]


async def test_a_script_is_answered_in_figures_until_there_are_no_more(console: Console):
    console.interface.answers["GET dlq"] = listed(dead_letter(7))
    csrf = (await console.get("/dead-letters")).csrf
    fields = {"csrf": csrf, "all": "1", "reason": "", "agent": "", "after": "0", "since": "", "why": ""}
    console.interface.answers["POST dlq/replay"] = outcome(1, 2, already=3, skipped=1, after=400)
    first = await console.post("/dead-letters/replay", fields, **AS_JSON)
    reported = json.loads(first.text)
    assert reported == {"replayed": 2, "already": 3, "skipped": 1, "continue_after": "400-5000"}
    assert asked(console) == {"all": True}
    console.interface.answers["POST dlq/replay"] = outcome(3)
    last = await console.post("/dead-letters/replay", fields | {"after": reported["continue_after"]}, **AS_JSON)
    assert json.loads(last.text)["continue_after"] is None
    assert asked(console) == {"all": True, "after": 400, "up_to": 5_000}


@each_row(
    "wrong",
    [
        {"after": f"1-{'9' * 30}"},
        {"after": f"1-{'9' * 5_000}"},
        {"after": f"{'9' * 5_000}-1"},
        {"since": "0001-01-01T00:00:00+14:00"},
        {"since": "9999-12-31T23:59:59-14:00"},
    ],
)
async def test_what_can_be_no_place_and_no_time_is_left_out(console: Console, wrong: dict[str, str]):
    console.interface.answers["GET dlq"] = listed(dead_letter(7))
    console.interface.answers["POST dlq/replay"] = outcome(1)
    page = await console.submit("/dead-letters", "/dead-letters/replay", all="1", why="", **wrong)
    assert page.status == 200
    assert asked(console) == {"all": True}


@each_row(
    ("answer", "status", "words"),
    [
        ((503, problem("unavailable", "NATS does not answer")), 503, "NATS does not answer"),
        ((401, problem("unauthorized", "the API key is missing or wrong")), 401, "the API key is missing or wrong"),
    ],
)
async def test_a_script_gets_the_reason_in_words(console: Console, answer: tuple[int, Any], status: int, words: str):
    console.interface.answers["GET dlq"] = listed(dead_letter(7))
    csrf = (await console.get("/dead-letters")).csrf
    console.interface.answers["POST dlq/replay"] = answer
    page = await console.post("/dead-letters/replay", {"csrf": csrf, "dead_letter_id": "7"}, **AS_JSON)
    assert page.status == status
    assert json.loads(page.text) == {"message": words}
    forged = await console.post("/dead-letters/replay", {"csrf": "no", "dead_letter_id": "7"}, **AS_JSON)
    assert forged.status == 403
    assert "too old" in json.loads(forged.text)["message"]
