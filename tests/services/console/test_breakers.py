"""The pages of breakers, and what is done from them."""

from datetime import UTC, datetime, timedelta
from typing import Any

from breakwater.kernel.types import format_time
from breakwater.records import rows, schema
from tests.api_documents import breaker, stopped_task
from tests.records import samples
from tests.services.console.conftest import Console

EVIL = "<script>alert(1)</script>"


def listed(*breakers: dict[str, Any], alive: bool = True) -> tuple[int, Any]:
    return 200, {"breakers": list(breakers), "alive": alive}


def now(seconds: float = 0) -> str:
    return format_time(datetime.now(UTC) + timedelta(seconds=seconds))


OPEN = {"state": "open", "health": "unhealthy", "reason": "3 jobs in a row failed (threshold: 3)", "version": 1}


async def store(console: Console, *changes: Any) -> None:
    stored = [rows.transition_row(change, sequence) for sequence, change in enumerate(changes, 1)]
    await console.analytics.insert(schema.BREAKER_TRANSITIONS, stored)


async def test_what_is_open_comes_first_with_why_and_until_when(console: Console):
    console.interface.answers["GET breakers"] = listed(
        breaker("calm"),
        breaker("busy", **OPEN, since=now(-60), open_until=now(5 * 3600 + 1_500)),
        breaker("gone", **(OPEN | {"state": "isolated"})),
    )
    console.interface.answers["GET guards"] = 200, {"stopped": []}
    page = await console.get("/breakers")
    assert page.status == 200
    assert page.words.index("gone") < page.words.index("busy") < page.words.index("calm")
    assert "3 jobs in a row failed (threshold: 3)" in page.words
    assert "in 5 h" in page.words
    assert "No actions in the last 24h" in page.words


async def test_shadows_are_listed_apart_and_are_not_counted_as_open(console: Console):
    shadow = {"agent": "busy", "model": "m", "state": "open", "reason": "1 job failed", "refused": 1234, "version": 1}
    breakers = {"breakers": [breaker("calm")], "shadows": [shadow], "alive": True}
    console.interface.answers["GET breakers"] = 200, breakers
    console.interface.answers["GET guards"] = 200, {"stopped": []}
    page = await console.get("/breakers")
    assert "Open now 0 of 1" in page.words
    shown = page.words[page.words.index("Shadows") :]
    assert "They refuse nothing" in shown
    assert "busy m open 1 job failed" in shown
    assert "1,234" in shown


async def test_a_half_open_one_waits_for_a_call_or_is_tried_by_one_and_counts_jobs_or_calls(console: Console):
    counts = {"consecutive_failures": 3, "total_failures": 9}
    console.interface.answers["GET breakers"] = listed(
        breaker("waits", **(OPEN | {"state": "half_open"}), **counts),
        breaker("tried", **(OPEN | {"state": "half_open"}), **counts, count="attempts", probe_until=now(60)),
    )
    console.interface.answers["GET guards"] = 200, {"stopped": []}
    page = await console.get("/breakers")
    assert "Open now 0 of 2 Half-open 2 1 being tried now" in page.words
    assert "3 jobs in a row 9 calls in total" in page.words
    assert "3 calls in a row 9 calls in total" in page.words
    assert "waits for a call to try it" in page.words
    assert "waits for a call to try it" in (await console.get("/breakers/one?agent=waits&model=gpt-4.1")).words


async def test_how_long_each_was_open_and_who_did_what(console: Console):
    console.interface.answers["GET breakers"] = listed(breaker())
    console.interface.answers["GET guards"] = 200, {"stopped": []}
    opened = datetime.now(UTC) - timedelta(minutes=30)
    by_hand = {"from_state": "open", "to_state": "closed", "by": "zoë", "reason": f"reset by zoë: {EVIL}"}
    await store(
        console,
        samples.transition(1, at=opened),
        samples.transition(2, at=opened + timedelta(minutes=5), **by_hand),
    )
    page = await console.get("/breakers")
    assert "5 min 00 s 1 time" in page.words
    assert "closed; last opened 30 min ago" in page.words
    assert "never opened" not in page.words
    assert f"zoë reset writer on gpt-4.1 reset by zoë: {EVIL}" in page.words
    assert EVIL not in page.text, "it is shown as text"


async def test_without_a_breaker_service_it_says_so(console: Console):
    console.interface.answers["GET breakers"] = listed(alive=False)
    page = await console.get("/breakers")
    assert "No breaker service is running" in page.words


async def test_the_history_of_one_whose_names_hold_slashes(console: Console):
    agent, model = "team/a b?&", "anthropic/claude"
    console.interface.answers["GET breakers"] = listed(breaker(agent, model, **OPEN, since=now(-60)))
    console.interface.answers["GET guards"] = 200, {"stopped": []}
    opened = datetime.now(UTC) - timedelta(minutes=3)
    await store(console, samples.transition(1, agent=agent, model=model, at=opened))
    listing = await console.get("/breakers")
    address = listing.text.split('<th scope="row" class="name"><a href="')[1].split('"')[0].replace("&amp;", "&")
    page = await console.get(address)
    assert page.status == 200
    assert f"{agent} on {model}" in page.words
    assert "consecutive failures 3 jobs in a row failed (threshold: 3)" in page.words
    assert "not yet" in page.words, "its opening goes on"


async def test_a_breaker_that_nobody_knows(console: Console):
    console.interface.answers["GET breakers"] = listed(breaker())
    for query in ("", "?agent=writer", "?agent=writer&model=nope"):
        page = await console.get(f"/breakers/one{query}")
        assert page.status == 404
        assert "Breaker not found" in page.words


async def test_a_reset_is_done_with_the_reason_and_reported(console: Console):
    console.interface.answers["GET breakers"] = listed(breaker(**OPEN))
    console.interface.answers["POST breakers/reset"] = 200, {}
    fields = {"agent": "writer", "model": "gpt-4.1", "reason": " deployed\ta fix "}
    page = await console.submit("/breakers", "/breakers/reset", **fields)
    assert ("POST breakers/reset", {"agent": "writer", "model": "gpt-4.1", "reason": "deployed a fix"}) in (
        console.interface.asked
    )
    assert page.url.endswith("/breakers")
    assert "The breaker of writer on gpt-4.1 was reset." in page.words
    assert "was reset, as asked" not in (await console.get("/breakers")).words, "shown once"


async def test_how_long_it_was_open_is_exact(console: Console):
    console.interface.answers["GET breakers"] = listed(breaker())
    start = (datetime.now(UTC) - timedelta(days=2)).replace(hour=1, minute=0, second=0, microsecond=0)
    closed = {"from_state": "open", "to_state": "closed", "by": "zoë", "reason": "reset"}
    await store(
        console,
        samples.transition(1, at=start),
        samples.transition(2, at=start + timedelta(seconds=280), **closed),
    )
    page = await console.get("/breakers/one?agent=writer&model=gpt-4.1")
    assert page.text.count('data-value="280000"') == 1
    assert 'href="/executions?model=gpt-4.1&amp;agent=writer&amp;from=' in page.text
    assert "4 min 40 s" in page.words
    assert "closed; last opened" in page.words


async def test_an_isolation_goes_back_to_the_page_of_the_breaker(console: Console):
    console.interface.answers["GET breakers"] = listed(breaker("*", "openai/*"))
    console.interface.answers["POST breakers/isolate"] = 200, {"unchanged": True}
    here = "/breakers/one?agent=*&model=openai/*"
    fields = {"agent": "*", "model": "openai/*", "from": "one", "reason": ""}
    page = await console.submit(here, "/breakers/isolate", **fields)
    assert ("POST breakers/isolate", {"agent": "*", "model": "openai/*"}) in console.interface.asked
    assert "/breakers/one" in page.url
    assert "already." in page.words


async def test_a_stopped_task_is_let_go_on(console: Console):
    console.interface.answers["GET guards"] = 200, {"stopped": [stopped_task("research/42")]}
    console.interface.answers["POST guards/reset"] = 200, {}
    page = await console.submit("/breakers", "/breakers/tasks/reset", task_id="research/42", tenant="acme", reason="ok")
    asked = {"task_id": "research/42", "tenant": "acme", "reason": "ok"}
    assert ("POST guards/reset", asked) in console.interface.asked
    assert "The task research/42 may continue" in page.words
