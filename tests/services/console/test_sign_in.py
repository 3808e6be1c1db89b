"""Who gets in, what they may do, and what a page lets in from elsewhere: nothing."""

import asyncio
import re
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
import pytest_asyncio
from starlette.requests import Request
from yarl import URL

from breakwater.identity.pages.operator_actions import FormError, read_form
from breakwater.identity.pages.sessions import Notice, pack
from breakwater.kernel.clickhouse.client import connect
from breakwater.kernel.process.settings import Settings
from breakwater.local.ports import free_port
from tests.api_documents import dead_letter
from tests.cli.api_stub import KEY, Stub, problem
from tests.held_connections import held, received
from tests.services.console.conftest import Console, Page, key_with, running, visiting
from tests.tables import each_row

PAGES = ("/", "/agents", "/executions", "/breakers", "/budgets", "/alerts", "/dead-letters")


LETTERS = {"dead_letters": [dead_letter()], "more": False, "counts": []}


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def served(stub: Stub) -> AsyncGenerator[Console]:
    nowhere = f"http://127.0.0.1:{free_port()}/breakwater"
    async with visiting(stub, nowhere, connect(nowhere)) as console:
        yield console


@pytest.fixture
def visited(served: Console, interface: Stub) -> Console:
    """Without ClickHouse, which has no say in this; the pages say that it is unavailable."""
    served.http.cookie_jar.clear()
    return served


@each_row("path", [*PAGES, "/executions/e1", "/nowhere"])
async def test_without_a_key_there_is_nothing_to_see(visited: Console, path: str):
    page = await visited.get(path, follow=False)
    assert page.status == 303
    assert page.headers["Location"].startswith("/sign-in")
    assert page.text == ""


async def test_a_form_without_a_session_does_nothing_and_says_so(visited: Console):
    fields = {"agent": "writer", "model": "m"}
    page = await visited.post("/breakers/reset", fields, Referer=f"{visited.url}/breakers?window=7d")
    assert "nothing was changed" in page.words
    assert 'name="next" value="/breakers?window=7d"' in page.text
    assert not any(asked.startswith("POST") for asked, _ in visited.interface.asked)


async def test_a_wrong_key_is_refused_and_the_page_says_how_to_get_one(visited: Console):
    page = await visited.sign_in("bw_000000000000_wrong")
    assert page.status == 403
    assert "Set-Cookie" not in page.headers
    assert "This key is unknown" in page.words
    assert "breakwater keys create" in page.words
    assert (await visited.get("/", follow=False)).status == 303


@each_row("key", ["", "   ", "bw_é", "bw_a\r\nX-Evil: 1", "x" * 5_000])
async def test_what_is_no_key_is_refused_in_words(visited: Console, key: str):
    page = await visited.sign_in(key)
    assert page.status in (403, 422)
    assert 'role="alert"' in page.text


async def test_a_key_that_may_not_read_is_refused_with_the_scope_it_lacks(visited: Console):
    visited.interface.answers["GET key"] = key_with("submit")
    page = await visited.sign_in()
    assert page.status == 403
    assert "--scope read" in page.words


async def test_the_interface_that_is_away_is_no_wrong_key(visited: Console):
    visited.interface.answers["GET key"] = (503, problem("unavailable", "Redis is away; ask again"))
    page = await visited.sign_in()
    assert page.status == 503
    assert "Redis is away" in page.words


async def test_after_signing_in_one_is_where_one_wanted_to_go(visited: Console):
    first = await visited.get("/executions?agent=writer", follow=False)
    wanted = re.search(r"next=([^&]+)", first.headers["Location"])
    assert wanted
    page = await visited.get(first.headers["Location"])
    assert 'name="next" value="/executions?agent=writer"' in page.text
    signed_in = await visited.sign_in(wanted="/executions?agent=writer")
    assert (signed_in.status, signed_in.headers["Location"]) == (303, "/executions?agent=writer")


@each_row(
    "elsewhere", ["https://evil.example/", "//evil.example", "/\\evil.example", "javascript:alert(1)", "evil", "/a\nb"]
)
async def test_nobody_is_sent_elsewhere(visited: Console, elsewhere: str):
    signed_in = await visited.sign_in(wanted=elsewhere)
    assert (signed_in.status, signed_in.headers["Location"]) == (303, "/")


@each_row("odd", ["//[", "http://[", "//\u2100", "http://[::1", "\ud800".encode("utf-8", "replace").decode()])
async def test_an_odd_address_to_go_to_is_no_error(visited: Console, odd: str):
    page = await visited.get(f"/sign-in?next={quote(odd)}")
    assert page.status == 200
    assert 'name="next" value="/"' in page.text


@pytest.mark.parametrize(
    ("headers", "let_in"),
    [
        ({"Origin": "http://["}, False),
        ({"Origin": "null"}, False),
        ({"Origin": "https://evil.example"}, False),
        # A proxy that passes another host than the browser asked for.
        ({"Origin": "https://console.example", "Sec-Fetch-Site": "same-origin"}, True),
        ({"Origin": "https://console.example", "Sec-Fetch-Site": "same-site"}, False),
    ],
)
async def test_a_sign_in_comes_from_our_page(visited: Console, headers: "dict[str, str]", let_in: bool):
    page = await visited.post("/sign-in", {"key": KEY}, follow=False, **headers)
    assert page.status == (303 if let_in else 403)


async def test_of_several_proxies_the_first_reports_how_the_browser_came(visited: Console):
    for reported, secure in (("https, http", True), ("http, https", False)):
        page = await visited.post("/sign-in", {"key": KEY}, follow=False, **{"X-Forwarded-Proto": reported})
        assert ("Secure" in page.headers["Set-Cookie"]) is secure


async def test_the_cookie_is_hidden_from_scripts_and_holds_no_key(visited: Console):
    signed_in = await visited.sign_in()
    cookie = signed_in.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    assert KEY not in cookie
    assert "Secure" not in cookie
    assert cookie.startswith("breakwater_console=")
    by_tls = await visited.post("/sign-in", {"key": KEY}, follow=False, **{"X-Forwarded-Proto": "https"})
    cookie = by_tls.headers["Set-Cookie"]
    assert cookie.startswith("__Host-breakwater_console=")
    assert "Secure" in cookie
    assert "Path=/;" in f"{cookie};"
    assert "domain" not in cookie.lower()


async def test_by_tls_a_cookie_that_another_host_may_have_set_is_not_looked_at(visited: Console):
    token = (await visited.sign_in()).headers["Set-Cookie"].partition(";")[0].partition("=")[2]
    visited.http.cookie_jar.clear()
    for name, proto, let_in in (
        ("__Host-breakwater_console", "https", True),
        ("breakwater_console", "https", False),
        ("__Host-breakwater_console", "http", False),
        ("breakwater_console", "http", True),
    ):
        sent = {"Cookie": f"{name}={token}", "X-Forwarded-Proto": proto}
        page = await visited.get("/breakers", follow=False, **sent)
        assert (page.status == 200) is let_in, (name, proto)
    by_tls = {"Cookie": f"__Host-breakwater_console={token}", "X-Forwarded-Proto": "https"}
    out = await visited.post("/sign-out", {}, follow=False, **by_tls)
    assert out.headers["Set-Cookie"].startswith('__Host-breakwater_console=""')
    assert "Secure" in out.headers["Set-Cookie"], "without it, browsers keep the cookie"


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /sign-in HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\nkey=",
        b"POST /breakers/reset HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\nkey=",
    ],
    ids=["nothing", "sign-in", "action"],
)
async def test_who_sends_half_a_form_without_end_keeps_nobody_out(
    visited: Console, sent: bytes, monkeypatch: pytest.MonkeyPatch
):
    # A tenth of the usual number of connections.
    monkeypatch.setattr("breakwater.kernel.http.server.MAX_CONNECTIONS", 200)
    monkeypatch.setattr("breakwater.kernel.http.server._FOR_STRANGERS", 20)
    await visited.sign_in()
    async with held(URL(visited.url).port or 0, sent, 300):
        for _ in range(3):
            begun = time.monotonic()
            assert (await visited.get("/healthz", Connection="close")).status == 200
            assert time.monotonic() - begun < 5.0
            assert (await visited.sign_in()).status == 303
            assert (await visited.get("/breakers", Connection="close")).status == 200


async def test_a_form_of_who_is_not_signed_in_is_small_and_has_little_time(
    visited: Console, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("breakwater.identity.pages.sign_in.OPEN_BODY_S", 0.2)
    assert (await visited.sign_in("x" * 9_000)).status == 422
    stalled = b"POST /sign-in HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\nkey="
    async with held(URL(visited.url).port or 0, stalled, 100) as connections:
        await asyncio.sleep(0.5)
        assert await received(connections) == {b"422": 100}


@each_row("path", PAGES)
async def test_no_page_holds_the_key_or_lets_anything_foreign_in(console: Console, path: str):
    page = await console.get(path)
    assert page.status == 200
    assert KEY not in page.text
    policy = page.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert page.headers["Cache-Control"] == "no-store"
    assert page.headers["X-Frame-Options"] == "DENY"
    # What the policy would refuse does not stand there.
    assert not re.search(r"<script(?![^>]*src=)|\son\w+=|\sstyle=|javascript:", page.text)
    assert not re.search(r"""(?:src|href|action)=["']?(?:https?:)?//""", page.text)


async def test_signing_out_ends_it_for_whoever_kept_the_cookie(console: Console):
    kept = {"Cookie": "; ".join(f"{cookie.key}={cookie.value}" for cookie in console.http.cookie_jar)}
    assert (await console.get("/", follow=False)).status == 200
    assert (await console.post("/sign-out", {}, follow=False)).status == 303
    assert (await console.get("/", follow=False, **kept)).status == 303


async def test_a_revoked_key_is_out(console: Console, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("breakwater.identity.pages.sign_in.CHECK_EVERY_S", 0.0)
    console.interface.answers["GET key"] = (401, problem("unauthorized", "this API key is not known"))
    page = await console.get("/")
    assert page.url.endswith("/sign-in?ended=")
    assert "its key was revoked" in page.words
    console.interface.answers["GET key"] = key_with("read")
    assert (await console.get("/", follow=False)).status == 303, "the session has ended, and stays so"


async def test_while_the_interface_is_away_what_is_recorded_can_be_read_for_a_while(
    console: Console, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("breakwater.identity.pages.sign_in.CHECK_EVERY_S", 0.0)
    console.interface.answers["GET key"] = (503, problem("unavailable", "NATS is away"))
    assert (await console.get("/executions", follow=False)).status == 200
    monkeypatch.setattr("breakwater.identity.pages.sign_in.MAX_UNCHECKED_S", 0.0)
    page = await console.get("/executions", follow=False)
    assert page.status == 503
    assert "NATS is away" in page.words


async def test_a_form_of_another_site_does_nothing(console: Console):
    fields = {"agent": "writer", "model": "m"}
    for headers in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        assert (await console.post("/breakers/reset", fields, follow=False, **headers)).status == 403
    refused = await console.post("/breakers/reset", fields, follow=False)
    assert refused.status == 403
    assert "sent by another site" in refused.words
    assert not any(asked.startswith("POST") for asked, _ in console.interface.asked)


@each_row("csrf", ["", "guessed", "é", "\x00"])
async def test_a_form_without_our_mark_does_nothing(console: Console, csrf: str):
    page = await console.post("/breakers/reset", {"csrf": csrf, "agent": "writer", "model": "m"}, follow=False)
    assert page.status == 403
    assert not any(asked.startswith("POST") for asked, _ in console.interface.asked)


async def test_a_form_that_never_ends_is_given_up():
    async def receive() -> Any:
        await asyncio.Event().wait()

    request = Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)
    with pytest.raises(FormError, match=r"did not arrive within 0\.05 s") as refused:
        await read_form(request, within_s=0.05)
    assert refused.value.status == 422


async def test_a_notice_waits_for_a_page_that_somebody_reads(console: Console):
    console.interface.answers["POST breakers/reset"] = (503, problem("unavailable", "Redis is away"))
    form = await form_of(console)
    fields = {"csrf": form.csrf, "agent": "writer", "model": "gpt-4.1"}
    assert (await console.post("/breakers/reset", fields, follow=False)).status == 303
    # Another tab renews itself before.
    assert "Redis is away" not in (await console.get("/executions", **{"X-Refresh": "1"})).words
    assert "Redis is away" in (await console.get("/executions")).words


async def test_a_form_that_is_too_long_is_refused(console: Console):
    page = await console.post("/breakers/reset", {"reason": "x" * 100_000}, follow=False)
    assert page.status in (403, 422)
    assert "65,536" in page.words


async def test_an_address_that_is_none_says_so_within_the_frame(console: Console):
    page = await console.get("/nowhere")
    assert page.status == 404
    assert "There is no page at /nowhere" in page.words
    assert 'href="/executions"' in page.text


async def test_files_are_served_and_nothing_above_them(visited: Console):
    sheet = await visited.get("/static/console.css?v=1")
    assert sheet.status == 200
    assert "max-age" in sheet.headers["Cache-Control"]
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static/"):
        assert (await visited.get(path, follow=False)).status in (303, 404)


@asynccontextmanager
async def another_console(console: Console) -> AsyncGenerator[Console]:
    """The same browser, at a replica."""
    kept = {"Cookie": "; ".join(f"{cookie.key}={cookie.value}" for cookie in console.http.cookie_jar)}
    settings = Settings(
        clickhouse_url=f"http://127.0.0.1:{free_port()}/breakwater",  # pyright: ignore[reportArgumentType]
        request_url=console.interface.url,
        console_port=free_port(),
    )
    async with running(settings) as url, aiohttp.ClientSession(headers=kept) as http:
        yield Console(url, http, console.interface, console.analytics)


async def test_a_restart_signs_nobody_out_and_any_console_takes_the_forms_of_another(console: Console):
    form = await form_of(console)
    console.interface.answers["POST breakers/reset"] = 200, {}
    async with another_console(console) as replica:
        assert (await replica.get("/executions", follow=False)).status == 200
        fields = {"csrf": form.csrf, "agent": "writer", "model": "m"}
        assert (await replica.post("/breakers/reset", fields, follow=False)).status == 303
        assert (await form_of(replica)).csrf == form.csrf


async def test_a_notice_of_one_console_is_shown_by_another_once(console: Console):
    console.interface.answers["POST breakers/reset"] = (503, problem("unavailable", "Redis is away"))
    fields = {"csrf": (await form_of(console)).csrf, "agent": "writer", "model": "m"}
    assert (await console.post("/breakers/reset", fields, follow=False)).status == 303
    async with another_console(console) as replica:
        shown = await replica.get("/executions")
        assert "Redis is away" in shown.words
        assert 'breakwater_notices=""' in shown.headers["Set-Cookie"]


async def test_a_notice_that_nobody_of_ours_wrote_is_not_shown(console: Console):
    token = next(one.value for one in console.http.cookie_jar if one.key == "breakwater_console")
    forged, ours = (pack([Notice("Call this number", "good")], of) for of in ("another", token))
    for value, is_shown in ((forged, False), (ours.replace(".", "=."), False), ("x", False), (ours, True)):
        console.http.cookie_jar.update_cookies({"breakwater_notices": value}, URL(console.url))
        assert ("Call this number" in (await console.get("/executions")).words) is is_shown, value


async def test_a_sign_out_at_one_console_ends_the_session_at_all(console: Console, monkeypatch: pytest.MonkeyPatch):
    async with another_console(console) as replica:
        assert (await replica.get("/executions", follow=False)).status == 200
        assert (await console.post("/sign-out", {}, follow=False)).status == 303
        monkeypatch.setattr("breakwater.identity.pages.sign_in.CHECK_EVERY_S", 0.0)
        assert (await replica.get("/executions", follow=False)).headers["Location"].startswith("/sign-in?ended=")


async def test_a_session_that_can_not_be_ended_now_is_not_said_to_have_ended(console: Console):
    console.interface.answers["POST sessions/end"] = (503, problem("unavailable", "Redis is away"))
    page = await console.post("/sign-out", {}, follow=False)
    assert page.status == 503
    assert "You are still signed in" in page.words
    assert "Set-Cookie" not in page.headers
    assert (await console.get("/executions", follow=False)).status == 200


@pytest.mark.parametrize("cookie", [KEY, "", "bws_", "bws_a_b_c", "bws_é", "bws_stub_1_other"])
async def test_what_is_no_session_opens_nothing(visited: Console, cookie: str):
    headers = {"Cookie": f"breakwater_console={cookie}"}
    assert (await visited.get("/executions", follow=False, **headers)).status == 303


async def test_a_sign_in_link_leads_to_its_page_and_a_used_one_says_so(visited: Console):
    link = "/sign-in/link?token=bwl_x&next=/agents?from=2026-11-21T12:00:00Z%26to=2026-11-21T12:01:00Z"
    visited.interface.links.add("bwl_x")
    async with visited.http.head(URL(visited.url + link, encoded=True)) as head:
        assert ("Set-Cookie" in head.headers, visited.interface.links) == (False, {"bwl_x"})
    page = await visited.get(link, follow=False)
    assert page.status == 303
    assert page.headers["Location"] == "/agents?from=2026-11-21T12:00:00Z&to=2026-11-21T12:01:00Z"
    assert (await visited.get("/executions", follow=False)).status == 200
    visited.http.cookie_jar.clear()
    again = await visited.get(link, follow=False)
    assert again.status == 401
    assert "The API key is missing or wrong" in again.words
    assert (await visited.get("/executions", follow=False)).status == 303


@pytest.mark.parametrize("token", ["", KEY, "bws_stub_1_session", "bwl_é"])
async def test_a_sign_in_link_takes_no_key(visited: Console, token: str):
    page = await visited.get(f"/sign-in/link?token={quote(token)}", follow=False)
    assert (page.status, "Set-Cookie" in page.headers) == (200, False)
    assert visited.interface.asked == []


async def test_a_sign_in_link_leads_to_no_other_site(visited: Console):
    visited.interface.links.add("bwl_x")
    page = await visited.get("/sign-in/link?token=bwl_x&next=//evil.example", follow=False)
    assert page.headers["Location"] == "/"


async def form_of(console: Console) -> Page:
    console.interface.answers["GET dlq"] = (200, LETTERS)
    return await console.get("/dead-letters")


async def test_who_signs_in_again_in_the_same_browser_is_one(visited: Console):
    await visited.sign_in()
    kept = {"Cookie": "; ".join(f"{cookie.key}={cookie.value}" for cookie in visited.http.cookie_jar)}
    await visited.sign_in()
    async with aiohttp.ClientSession(headers=kept) as http, http.get(visited.url, allow_redirects=False) as answer:
        assert answer.status == 303
