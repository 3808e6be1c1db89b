"""The page of the jobs that have not ended."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api_documents import current_job
from tests.cli.api_stub import problem
from tests.services.console.conftest import SCOPES, Console, key_with

COUNTS = {"running": 1, "waiting": 1, "in_progress": 2, "parked": 0, "queued": 10_000}
RUNNING = current_job("order/1", age_ms=725_000)
WAITING = current_job(
    "order-2",
    state="waiting",
    attempt=None,
    prompt=None,
    wait={
        "kind": "rate_limit",
        "message": "the limit of agent writer has no room",
        "until": None,
        "ahead": 3,
        "frees": "the end of a call in progress",
    },
)


def page(*jobs: dict[str, Any], after: str | None = None, counts: Any = COUNTS) -> dict[str, Any]:
    return {"jobs": list(jobs), "next": after, "counts": counts, "at": "2026-11-29T12:00:00.000Z"}


@pytest.fixture
def console(console: Console) -> Console:
    console.interface.answers["GET jobs"] = (200, page(RUNNING, WAITING, after="queued.writer.7"))
    return console


def asked(console: Console) -> dict[str, str]:
    """The query of the last request for the list."""
    interface = console.interface
    return next(
        query
        for (request, _), query in zip(interface.asked[::-1], interface.queries[::-1], strict=True)
        if request == "GET jobs"
    )


async def test_the_lane_shows_each_state_with_its_count_and_each_job_with_what_it_waits_for(console: Console) -> None:
    now = await console.get("/now")
    assert "all 10,002 shown below running 1 waiting 1 parked 0 queued 10,000" in now.words
    assert (
        "order/1 running writer batch acme 12 min 05 s gpt-4o attempt 2 Cancel… It makes no further call." in now.words
    )
    assert "rate limit : the limit of agent writer has no room; 3 before it in the queue; room comes with" in now.words
    assert 'href="/executions/order%2F1"' in now.text
    assert 'href="/now?after=queued.writer.7">More →' in now.text
    assert '<a href="/now" aria-current="page" data-key="n">Now' in now.text
    assert asked(console) == {"limit": "100", "counts": "true"}
    console.interface.answers["GET jobs"] = (200, page(counts=COUNTS | {"running": None, "waiting": None}))
    now = await console.get("/now?state=running&agent=writer&tenant=acme&key=batch&after=held.writer.3")
    assert "running – shown below" in now.words
    assert "No such jobs" in now.words
    filters = {"state": "running", "agent": "writer", "tenant": "acme", "key": "batch"}
    assert asked(console) == {**filters, "after": "held.writer.3", "limit": "100", "counts": "true"}
    saved = await console.get("/now?csv=list")
    assert saved.headers["Content-Type"].startswith("text/csv")


async def test_one_job_is_cancelled_or_the_selected_ones_with_the_rights_of_who_is_signed_in(console: Console) -> None:
    answers = console.interface.answers
    for job_id in ("order%2F1", "order-2"):
        name = job_id.replace("%2F", "/")
        answers[f"POST jobs/{name}/cancel"] = (202, {"job_id": name, "execution_id": name, "status": "cancelling"})
    only = {"only": "order/1", "execution_id": "order-2", "state": "running", "agent": "writer"}
    now = await console.submit("/now", "/now/cancel", **only)
    assert "1 job is being cancelled, and will make no further call." in now.words
    assert now.url.endswith("/now?state=running&agent=writer")
    sent = [one for one in console.interface.asked if one[0].startswith("POST")]
    assert sent == [("POST jobs/order/1/cancel", {})], "the selection is not touched"
    csrf = (await console.get("/now")).csrf
    selected = [("execution_id", "order/1"), ("execution_id", "order-2"), ("execution_id", "order-2")]
    now = await console.post("/now/cancel", [("csrf", csrf), ("reason", " on\ncall "), *selected])
    assert "2 jobs are being cancelled, and will make no further call." in now.words
    sent = [one for one in console.interface.asked if one[0].startswith("POST")][1:]
    assert sorted(sent) == [(f"POST jobs/{name}/cancel", {"reason": "on call"}) for name in ("order-2", "order/1")]


async def test_what_could_not_be_cancelled_is_said(console: Console) -> None:
    answers = console.interface.answers
    ended = {"job_id": "order-2", "execution_id": "order-2", "status": "succeeded"}
    answers["POST jobs/order-1/cancel"] = (202, ended | {"job_id": "order-1", "status": "cancelling"})
    answers["POST jobs/order-2/cancel"] = (200, ended)
    answers["POST jobs/order-3/cancel"] = (404, problem("unknown_job", "there is no job 'order-3'"))
    csrf = (await console.get("/now")).csrf
    selected = [("execution_id", f"order-{number}") for number in (1, 2, 3)]
    now = await console.post("/now/cancel", [("csrf", csrf), *selected])
    assert (
        "1 job is being cancelled, and will make no further call. 2 could not be cancelled: "
        "order-2: had already ended: succeeded; order-3: there is no job 'order-3'." in now.words
    )
    now = await console.post("/now/cancel", [("csrf", csrf), ("execution_id", "order-2")])
    assert "1 could not be cancelled: order-2: had already ended: succeeded." in now.words
    now = await console.submit("/now", "/now/cancel")
    assert "Nothing is selected: tick the jobs to cancel." in now.words


async def test_who_may_not_cancel_sees_the_jobs_and_no_button(console: Console) -> None:
    console.interface.answers["GET key"] = key_with(*(scope for scope in SCOPES if scope != "operate"))
    await console.sign_in()
    now = await console.get("/now")
    assert "order-2 waiting" in now.words
    assert "Cancel" not in now.words
    assert "with the scope operate you could cancel jobs" in now.words
    refused = await console.post("/now/cancel", {"csrf": now.csrf, "only": "order-2"})
    assert refused.status == 403
    assert not [one for one in console.interface.asked if one[0].startswith("POST jobs")]


async def test_an_outage_is_said_and_an_empty_plane_too(console: Console) -> None:
    console.interface.answers["GET jobs"] = (503, problem("unavailable", "NATS did not respond"))
    now = await console.get("/now")
    assert (now.status, "NATS did not respond" in now.words) == (200, True)
    assert "running –" in now.words
    console.interface.answers["GET jobs"] = (200, page())
    assert "Everything that was submitted has ended." in (await console.get("/now")).words
    console.interface.answers["GET jobs"] = (200, page(after="queued.writer.501"))
    assert "None of the jobs that were read matches; others follow." in (await console.get("/now?key=x")).words


async def test_the_number_of_running_jobs_on_overview_leads_to_them(console: Console) -> None:
    agent = {"agent": "writer", "waiting": 2, "in_progress": 3, "concurrency": 5}
    queues = {"agents": [agent], "parked": 0, "services": [], "at": "2026-11-29T12:00:00.000Z"}
    console.interface.answers["GET queues"] = (200, queues)
    overview = await console.get("/?window=24h&whole=1")
    assert '<a class="tile" href="/now">' in overview.text.replace("tile warn", "tile").replace('tile "', 'tile"')
    assert "3 running" in overview.words
