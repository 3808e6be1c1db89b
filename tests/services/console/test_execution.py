"""One execution: its attempts, its family, what was redacted, its replay; and a job followed while it is not over."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from html import unescape
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from yarl import URL

from breakwater.client import ApiClient, Query
from breakwater.identity.pages.sessions import MAX_WATCHED
from breakwater.jobs.contract.execution import Cancellation, Execution, FailureStatistics
from breakwater.jobs.rules.record import error_of
from breakwater.kernel.security.encryption import Cipher, new_key
from breakwater.records import rows, schema
from tests.api_documents import dead_letter
from tests.cli.api_stub import KEY, Stub, problem
from tests.records.samples import NOON, RATE_LIMITED, attempt, execution
from tests.services.console.conftest import ENCRYPTION_KEY, Console, key_with
from tests.services.console.inert import check_page
from tests.services.console.test_markdown import ATTACKS

EVIL = '<script>alert("1")</script>'
ONE_DEAD_LETTER = {"dead_letters": [dead_letter(execution_id="e1")], "more": False, "counts": []}


def encrypted(record: Execution, key: str) -> Execution:
    return Execution.model_validate_json(Cipher([key]).encrypt_document(record.json_bytes()))


async def store(console: Console, *records: Execution) -> None:
    await console.analytics.insert(schema.EXECUTIONS, [rows.execution_row(one, 1) for one in records])
    if attempts := [rows.attempt_row(one, 1, NOON) for record in records for one in record.attempts]:
        await console.analytics.insert(schema.ATTEMPTS, attempts)


def refused(execution_id: str = "e1", **fields: Any) -> Execution:
    first = attempt(execution_id, 1, outcome="error", error=RATE_LIMITED, cost=1_500_000, cost_basis="estimated")
    second = attempt(
        execution_id,
        2,
        cause="retry",
        backoff_ms=2_000,
        outcome="error",
        error=RATE_LIMITED,
        started_at=NOON + timedelta(seconds=3),
    )
    return execution(
        execution_id,
        status="dead_lettered",
        reason="error",
        error=RATE_LIMITED,
        attempts=(first, second),
        attempts_count=2,
        queued_at=NOON - timedelta(milliseconds=250),
        **fields,
    )


async def test_what_stopped_a_job_is_said_with_its_statistics(console: Console):
    statistics = FailureStatistics(
        consecutive_failures=3, total_failures=5, unique_errors=2, reason="3 consecutive failures"
    )
    await store(console, execution("e1", status="dead_lettered", reason="guard_tripped", statistics=statistics))
    page = await console.get("/executions/e1")
    assert "3 consecutive failures (5 failures in all, 2 different errors)" in page.text


async def test_every_attempt_is_reported_with_its_wait_its_cost_and_its_error(console: Console):
    await store(console, refused())
    page = await console.get("/executions/e1")
    assert page.status == 200
    assert page.text.count("<tr>") >= 2
    for reported in (
        "rate limit 429",
        "zu viele Anfragen",
        "2.0 s",
        "estimated",
        "dead lettered",
        "The model is busy.",
    ):
        assert reported in page.words, reported
    assert "$0.0015" in page.words
    # Waits and calls stand in the drawing, each attempt on a line of its own.
    assert page.text.count('class="wait"') >= 2
    assert page.text.count('<rect class="bad"') == 2
    assert 'href="/agents/writer"' in page.text


async def test_what_was_redacted_is_reported_by_place(console: Console):
    await store(
        console,
        execution(
            "e1",
            messages=[
                {"role": "user", "content": "my key is [REDACTED], and [REDACTED]"},
                {"role": "tool", "content": "x"},
            ],
            output={"answer": ["[REDACTED]"]},
            metadata={"who": "me"},
        ),
    )
    page = await console.get("/executions/e1")
    assert "2 in message 1, 1 in response" in page.words


async def test_its_family_is_a_tree_with_what_it_cost(console: Console):
    await store(
        console,
        execution("root", total_cost=1_000_000_000),
        execution("child", parent_execution_id="root", total_cost=2_000_000_000),
        execution("grandchild/1", parent_execution_id="child", total_cost=4_000_000_000),
    )
    page = await console.get("/executions/child")
    assert 'href="/executions/root"' in page.text
    assert 'href="/executions/grandchild%2F1"' in page.text
    assert "$7.00" in page.words
    assert (await console.get("/executions/grandchild%2F1")).status == 200


async def test_what_models_and_people_wrote_is_only_text(console: Console):
    await store(
        console,
        execution(
            EVIL,
            agent=EVIL,
            task_id=EVIL,
            output=EVIL,
            messages=[{"role": EVIL, "content": EVIL}],
            metadata={EVIL: EVIL},
        ),
    )
    page = await console.get("/executions/%3Cscript%3Ealert(%221%22)%3C%2Fscript%3E")
    assert page.status == 200
    assert "<script>alert" not in page.text


async def test_messages_and_answers_can_do_nothing_on_any_page_that_shows_them(console: Console):
    said = "\n\n".join((EVIL, *ATTACKS))
    call = {"id": EVIL, "type": "function", "function": {"name": EVIL, "arguments": f'{{"{said[:9]}": "{EVIL[:8]}"}}'}}
    deep: Any = EVIL
    for _ in range(90):
        deep = {"<b>": [deep]}
    messages = [
        {"role": EVIL, "content": said},
        {"role": "user", "content": [{"type": "text", "text": one} for one in ATTACKS]},
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": one}} for one in ("javascript:x", EVIL)],
        },
        {"role": "assistant", "content": None, "tool_calls": [call], EVIL: deep},
        {"role": "tool", "tool_call_id": EVIL, "content": said},
        {"role": "assistant", "content": "> " * 500 + EVIL},
    ]
    broken = refused("e1", messages=messages, output={"role": "assistant", "content": said, "tool_calls": [call]})
    broken = broken.model_copy(update={"params": {EVIL: said}, "metadata": {EVIL: deep}, "finish_reason": EVIL})
    await store(console, broken, execution("e0", output=said, messages=[{"role": "user", "content": EVIL}]))
    for path in ("/executions/e1", "/executions/e1?raw=1", "/compare?a=e0&b=e1"):
        page = await console.get(path)
        assert page.status == 200, path
        seen = check_page(page.text)
        assert [tag for tag, _ in seen.tags].count("script") == 1, "the console's own"
        assert "alert(" in seen.text


async def test_what_answered_and_why_it_ended_is_said_in_words(console: Console):
    streamed = attempt("e1", 2, cause="fallback", model="gpt-4.1-mini", first_token_ms=300, chunks=9, output_tokens=51)
    failed = attempt("e1", 1, outcome="error", error=RATE_LIMITED, started_at=NOON - timedelta(seconds=2))
    answered = execution(
        "e1",
        attempts=(failed, streamed),
        queued_at=NOON - timedelta(seconds=2),
        requested_model="gpt-4.1",
        chosen_model="gpt-4.1-mini",
        finish_reason="length",
        cost_basis="estimated",
        params={"temperature": 0.25},
        trace_id="0af7651916cd43dd8448eb211c80319c",
    )
    await store(console, answered, execution("e2", cache_hit=True, cached_from="e1"), execution("e3", cache_hit=True))
    page = await console.get("/executions/e1")
    for said in (
        "gpt-4.1-mini answered; gpt-4.1 was requested",
        "length: truncated by the output limit",
        "estimated: at least one call reported no usage, or usage that is implausible or has no price",
        "First token 2.3 s 300 ms into its call, 100 tokens/s",
        "temperature",
        "0.25",
    ):
        assert said in page.words, said
    assert 'href="https://traces.example/0af7651916cd43dd8448eb211c80319c"' in page.text
    cached = await console.get("/executions/e2")
    assert "traces.example" not in cached.text
    assert 'as <a class="mono" href="/executions/e1">' in cached.text
    assert "by which execution is not recorded" in (await console.get("/executions/e3")).words


async def test_the_record_is_shown_as_json_on_request(console: Console):
    await store(console, execution("e1", output="a **b** \x1b", metadata={"big": 10**30}))
    shown, raw = [await console.get(f"/executions/e1{query}") for query in ("", "?raw=1")]
    assert "<strong>b</strong>" in shown.text
    assert "/executions/e1?raw=1#conversation" in shown.text
    assert "<strong>" not in raw.text
    record = unescape(raw.text.partition('<pre class="raw" tabindex="0">')[2].partition("</pre>")[0])
    assert Execution.model_validate_json(record) == execution("e1", output="a **b** \x1b", metadata={"big": 10**30})


async def test_two_executions_are_compared_from_the_page_of_one(console: Console):
    ago = timedelta(minutes=5)
    await store(
        console,
        execution("e0", completed_at=NOON - ago, output="no", params={"temperature": 0.2}),
        execution("other", agent="reader", completed_at=NOON - ago / 2),
        execution("e1", output="yes", params={"temperature": 0.7}),
        encrypted(execution("lost", output="x"), new_key()),
    )
    assert "/compare?b=e1" in (await console.get("/executions/e1")).text
    # The one before is of the same agent.
    before, chosen = [await console.get(f"/compare?{query}") for query in ("b=e1", "a=other&b=e1")]
    assert "Took" in before.words
    assert "temperature 0.2 0.7 ≠ differs" in before.words
    assert "− no + yes" in before.words
    assert 'value="e0"' in before.text
    assert "Agent reader writer ≠ differs" in chosen.words
    unknown = await console.get("/compare?a=nope&b=e1")
    assert (unknown.status, "No execution nope is recorded" in unknown.words) == (404, True)
    first = await console.get("/compare?b=e0")
    assert (first.status, "No execution of writer that ended before" in first.words) == (404, True)
    assert "Enter their ids" in (await console.get("/compare")).words
    assert "Not stored: in A." in (await console.get("/compare?a=lost&b=e1")).words


async def test_what_is_nowhere_is_said_to_be_nowhere(console: Console):
    console.interface.answers["GET jobs/nope/progress"] = (404, problem("unknown_job", "there is no job nope"))
    page = await console.get("/executions/nope")
    assert page.status == 404
    assert "No execution 'nope' is recorded" in page.words


async def test_an_interface_that_is_away_is_no_missing_job(console: Console):
    console.interface.answers["GET jobs/nope/progress"] = (503, problem("unavailable", "NATS is away; ask again"))
    page = await console.get("/executions/nope")
    assert page.status == 503
    assert "NATS is away" in page.words


async def test_a_replay_leads_to_the_new_execution(console: Console):
    await store(console, refused())
    [own_letter] = ONE_DEAD_LETTER["dead_letters"]
    later_letter_of_a_key = {**own_letter, "dead_letter_id": 8, "execution_id": f"x-{'0' * 32}", "job_id": "e1"}
    listed = {**ONE_DEAD_LETTER, "dead_letters": [later_letter_of_a_key, own_letter]}
    console.interface.answers["GET dlq"] = (200, listed)
    answer = {
        "replayed": [{"dead_letter_id": 7, "execution_id": "rpl_1"}],
        "already": 0,
        "skipped": [],
        "continue_after": None,
    }
    console.interface.answers["POST dlq/replay"] = (200, answer)
    page = await console.submit("/executions/e1", "/replay/e1", why="the provider is back", follow=False)
    assert (page.status, page.headers["Location"]) == (303, "/executions/rpl_1")
    asked = dict(console.interface.asked)["POST dlq/replay"]
    assert asked == {"dead_letters": [7], "why": "the provider is back"}
    query = console.interface.queries[[path for path, _ in console.interface.asked].index("GET dlq")]
    assert query["execution_id"] == "e1"


async def test_why_a_replay_was_not_done_is_reported_on_the_page(console: Console):
    await store(console, refused())
    console.interface.answers["GET dlq"] = (200, {"dead_letters": [], "more": False, "counts": []})
    assert "this job no longer has a dead letter" in (await console.submit("/executions/e1", "/replay/e1")).words
    console.interface.answers["GET dlq"] = (200, ONE_DEAD_LETTER)
    skipped = {
        "replayed": [],
        "already": 0,
        "skipped": [{"dead_letter_id": 7, "why": "agent 'writer' is not configured"}],
    }
    console.interface.answers["POST dlq/replay"] = (200, skipped | {"continue_after": None})
    assert "agent 'writer' is not configured" in (await console.submit("/executions/e1", "/replay/e1")).words
    console.interface.answers["POST dlq/replay"] = (503, problem("unavailable", "JOBS is full"))
    page = await console.submit("/executions/e1", "/replay/e1")
    assert "The action failed: JOBS is full" in page.words
    assert "JOBS is full" not in (await console.get("/executions/e1")).words, "it is shown once"


async def test_who_may_only_look_is_refused_with_what_is_missing(visited: Console):
    visited.interface.answers["GET key"] = key_with("read")
    await visited.sign_in()
    await store(visited, refused())
    page = await visited.get("/executions/e1")
    assert "with the scope operate you could" in page.words
    assert (await visited.post("/replay/e1", {"csrf": "guessed"})).status == 403
    assert not any(asked.startswith("POST") for asked, _ in visited.interface.asked)


async def test_a_replay_without_clickhouse_is_reported_on_the_page(console: Console):
    await store(console, refused())
    form = await console.get("/executions/e1")
    await console.analytics.execute("RENAME TABLE executions TO hidden")
    page = await console.post("/replay/e1", {"csrf": form.csrf}, follow=False)
    await console.analytics.execute("RENAME TABLE hidden TO executions")
    assert page.status == 303
    assert "The job was not replayed: ClickHouse refused" in (await console.get("/executions/e1")).words


async def hanging(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


@asynccontextmanager
async def progress_from(answer: Callable[[web.Request], Awaitable[web.StreamResponse]], monkeypatch: Any):
    """Another server for the progress of jobs."""
    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    server = TestServer(app)
    await server.start_server(shutdown_timeout=0)  # who never answers is not waited for
    try:
        url = ApiClient._url

        def of(self: ApiClient, path: str, query: Query | None) -> URL:
            return server.make_url(f"/{path}") if path.startswith("jobs") else url(self, path, query)

        monkeypatch.setattr(ApiClient, "_url", of)
        yield
    finally:
        await server.close()


@pytest.mark.long(about_s=12)
async def test_an_api_that_hangs_does_not_hang_the_page(console: Console, monkeypatch: Any):
    monkeypatch.setattr("breakwater.client.ACT_TIMEOUT_S", 0.3)
    async with progress_from(hanging, monkeypatch), asyncio.timeout(60):
        page = await console.get("/executions/none")
    assert page.status == 503
    assert "no response from" in page.words


async def test_those_who_watch_keep_nobody_from_an_answer(interface: Stub, monkeypatch: Any):
    """Of connections to one place there are usually a hundred at most."""

    async def silent(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.Event().wait()
        return response

    api = ApiClient(interface.url, KEY)
    async with api, progress_from(silent, monkeypatch), AsyncExitStack() as watched:
        for number in range(120):
            await watched.enter_async_context(api.open_stream(f"jobs/{number}/progress"))
        assert (await api.get("key"))["name"] == "ops"


async def test_somebody_watches_ten_jobs_at_once_at_most(console: Console, monkeypatch: Any):
    async def silent(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.Event().wait()
        return response

    async with progress_from(silent, monkeypatch), AsyncExitStack() as watched:

        async def watch(number: int) -> aiohttp.ClientResponse:
            return await watched.enter_async_context(console.http.get(f"{console.url}/watch/job-{number}"))

        for number in range(MAX_WATCHED):
            assert await (await watch(number)).content.readline() == b"event: restart\n"
        reported = (await (await watch(99)).content.read()).decode()
        assert "event: stopped" in reported
        assert "close one" in reported


def sse(*events: "tuple[str, str]") -> bytes:
    return b": hello\n\n" + b"".join(f"id: 1\nevent: {name}\ndata: {data}\n\n".encode() for name, data in events)


STEP = (
    '{{"execution_id": "e1", "job_id": "e1", "agent": "writer", "state": "{state}", "event": "{event}", "attempt": 1, '
    '"model": "gpt-4.1", "at": "2026-11-21T12:00:00.000Z", "error_message": "<b>busy</b>"}}'
)


async def test_a_job_that_has_not_ended_is_cancelled_from_its_page(console: Console, monkeypatch: Any):
    async def running(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        return response

    known = {"job_id": "a/b", "execution_id": "a/b"}
    app = web.Application()
    app.router.add_get("/{path:.*}", running)
    async with TestServer(app) as live:
        url = ApiClient._url

        def of(self: ApiClient, path: str, query: Query | None) -> URL:
            return live.make_url("/progress") if path.endswith("/progress") else url(self, path, query)

        monkeypatch.setattr(ApiClient, "_url", of)
        for status, shown in (
            ("cancelling", "The job is being cancelled."),
            ("succeeded", "The job had already ended: succeeded."),
        ):
            console.interface.answers["POST jobs/a/b/cancel"] = (200, known | {"status": status})
            page = await console.submit("/executions/a%2Fb", "/cancel/a%2Fb", reason="a wrong prompt")
            assert shown in page.words
            assert console.interface.asked[-1] == ("POST jobs/a/b/cancel", {"reason": "a wrong prompt"})
        console.interface.answers["POST jobs/a/b/cancel"] = (503, problem("unavailable", "Redis is away"))
        page = await console.submit("/executions/a%2Fb", "/cancel/a%2Fb")
        assert "The action failed: Redis is away" in page.words
        console.interface.answers["GET key"] = key_with("read")
        await console.sign_in()
        page = await console.get("/executions/a%2Fb")
        assert "/cancel/" not in page.text
        assert "you could cancel it" in page.words


async def test_a_cancelled_job_says_who_and_why_and_what_its_call_may_have_cost(console: Console):
    error = error_of(Cancellation(by="api_key", name="ops", reason="a wrong prompt", at=NOON))
    aborted = attempt("e1", 1, outcome="cancelled", error=error, cost=42_000, cost_basis="estimated")
    ended = {"status": "cancelled", "reason": "cancelled", "error": error, "attempts_count": 1}
    await store(console, execution("e1", attempts=(aborted,), **ended))
    page = await console.get("/executions/e1")
    assert "cancelled by the API key 'ops': a wrong prompt" in page.words
    assert "/replay/" not in page.text
    assert '<rect class="warn"' in page.text
    assert "estimated" in page.words


async def test_a_job_that_is_not_over_is_followed_to_its_record(console: Console, monkeypatch: Any):
    decide = asyncio.Event()

    async def progress(_: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(_)
        await response.write(sse(("progress", STEP.format(state="in_progress", event="agent.attempt.start"))))
        await decide.wait()
        last = sse(("progress", STEP.format(state="retried", event="llm_retry_attempt")), ("decided", "{}"))
        await response.write(last)
        return response

    app = web.Application()
    app.router.add_get("/api/v1/jobs/e1/progress", progress)
    async with TestServer(app) as live:
        monkeypatch.setattr(ApiClient, "_url", lambda _self, path, _query: live.make_url(f"/api/v1/{path}"))
        page = await console.get("/executions/e1")
        assert page.status == 200
        assert 'data-watch="/watch/e1"' in page.text
        async with console.http.get(f"{console.url}/watch/e1") as watched:
            assert watched.headers["Content-Type"].startswith("text/event-stream")
            lines: list[str] = []

            async def read_until(what: str) -> str:
                async with asyncio.timeout(60):
                    while not (lines and what in lines[-1]):
                        line = await watched.content.readline()
                        assert line, f"it ended before {what}"
                        lines.append(line.decode())
                return lines[-1]

            await read_until("event: restart")
            first = await read_until("is called")
            assert "&lt;b&gt;busy" in first
            assert "<b>busy" not in first
            await store(console, execution("e1"))
            decide.set()
            await read_until("is retried")
            await read_until("event: recorded")
    monkeypatch.undo()
    assert (await console.get("/executions/e1")).status == 200


async def test_texts_that_are_encrypted_are_shown_where_the_console_has_their_key(console: Console) -> None:
    texts = {"output": "the answer", "messages": [{"role": "user", "content": "the question"}]}
    records = [execution(name, **texts) for name in ("ours", "lost")]
    await store(console, *map(encrypted, records, (ENCRYPTION_KEY, new_key())))
    ours, lost = [(await console.get(f"/executions/{name}")).words for name in ("ours", "lost")]
    assert "the question" in ours
    assert "the answer" in ours
    assert "The texts are encrypted with a key that the console does not have" in lost
    assert "the question" not in lost
    assert "not stored" not in lost
