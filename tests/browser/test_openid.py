"""Signing in to the console with OpenID Connect: at replicas, over restarts, in a browser, and what goes wrong."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from urllib.parse import quote

import aiohttp
import pytest
import pytest_asyncio
import yaml
from aiohttp import web
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page, async_playwright, expect
from yarl import URL

from breakwater.kernel.process.settings import Settings
from breakwater.local.ports import free_port
from tests.browser.conftest import OPTIONS
from tests.browser.pages import CONTRAST, SERIOUS
from tests.openid_provider import CLIENT, SECRET, TOKEN, RunningProvider, running_provider
from tests.server_sources import RunningServer
from tests.services.console.conftest import running
from tests.services.request.conftest import CONFIG, HttpApi, new_api

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True, slots=True)
class SignInPlane:
    """An HTTP API, an OpenID provider, and consoles that are started where a test wants them."""

    api: HttpApi
    provider: RunningProvider
    url: str
    """The console's, as people know it."""
    console: Callable[..., AbstractAsyncContextManager[str]]
    """Starts one at a port; as the second, by which URL it is known, where that is another."""

    @property
    def port(self) -> int:
        return URL(self.url).port or 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plane(
    nats_server: RunningServer, redis_server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[SignInPlane]:
    directory = tmp_path_factory.mktemp("openid")
    (directory / "secret").write_text(SECRET)
    async with running_provider() as provider:
        for sub, groups in (("zoe", ["sre"]), ("nina", ["sre"]), ("mallory", ["guests"])):
            await provider.put_person(sub, email=f"{sub}@example.com", groups=groups)
        url = f"http://localhost:{free_port()}"
        openid = {
            "issuer": provider.issuer,
            "client_id": CLIENT,
            "client_secret": {"file": str(directory / "secret")},
            "label": "Example SSO",
            "roles": {"operator": ["sre"]},
        }
        config = CONFIG + yaml.safe_dump({"console": {"url": url, "openid": openid}})
        async with new_api(nats_server.url, redis_server.url, directory, config) as api:

            def console(port: int, known_as: str = url) -> AbstractAsyncContextManager[str]:
                nowhere = f"http://127.0.0.1:{free_port()}/breakwater"
                settings = Settings(
                    clickhouse_url=nowhere,  # pyright: ignore[reportArgumentType]
                    request_url=api.url,
                    console_port=port,
                )
                return running(settings, config.replace(url, known_as))

            yield SignInPlane(api, provider, url, console)


@dataclass(frozen=True, slots=True)
class Shown:
    status: int
    headers: dict[str, str]
    cookies: list[str]
    text: str

    @property
    def words(self) -> str:
        return " ".join(unescape(re.sub(r"<[^>]*>", " ", self.text)).split())


class Person:
    """Somebody with a browser that keeps cookies, by host and not by port."""

    def __init__(self, http: aiohttp.ClientSession, provider: RunningProvider) -> None:
        self.http = http
        self._provider = provider

    async def get(self, url: str, method: str = "GET") -> Shown:
        async with self.http.request(method, URL(url, encoded=True), allow_redirects=False) as response:
            cookies = response.headers.getall("Set-Cookie", [])
            return Shown(response.status, dict(response.headers), cookies, await response.text())

    async def begin(self, console: str, wanted: str = "/") -> str:
        """Where the provider's page is, after the link on the sign-in page was followed."""
        begun = await self.get(f"{console}/sign-in/openid?next={quote(wanted, safe='')}")
        assert begun.status == 303, begun.words
        assert begun.headers["Location"].startswith(f"{self._provider.issuer}/oauth2/authorize?")
        return begun.headers["Location"]

    async def sign_in(self, console: str, wanted: str = "/", sub: str = "zoe", *, at: str | None = None) -> Shown:
        """Signs in. `at`: the console where the browser comes back to, if it is another replica."""
        back = str(await self._provider.sign_in(await self.begin(console, wanted), sub))
        return await self.get(back if at is None else back.replace(console, at, 1))


@pytest_asyncio.fixture(loop_scope="module")
async def person(plane: SignInPlane) -> AsyncGenerator[Person]:
    plane.provider.reset()
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as http:
        yield Person(http, plane.provider)


async def test_one_signs_in_at_any_console_and_stays_so_when_they_restart_until_signing_out_of_all(
    plane: SignInPlane, person: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("breakwater.identity.pages.sign_in.CHECK_EVERY_S", 0.0)
    async with plane.console(free_port()) as other:
        other = other.replace("127.0.0.1", "localhost")
        async with plane.console(plane.port):
            # Begun at one console, completed at another.
            signed_in = await person.sign_in(plane.url, "/executions?agent=writer", "nina", at=other)
            assert (signed_in.status, signed_in.headers["Location"]) == (303, "/executions?agent=writer")
            session, flow = (next(one for one in signed_in.cookies if one.startswith(name)) for name in _COOKIES)
            assert "HttpOnly" in session
            assert "SameSite=lax" in session
            assert 'breakwater_sign_in=""' in flow, "it is good for once"
            shown = await person.get(f"{plane.url}/executions")
            assert "Signed in as nina@example.com (operator)" in shown.words
        async with plane.console(plane.port):
            assert (await person.get(f"{plane.url}/executions")).status == 200, "after a restart"
            out = await person.get(f"{plane.url}/sign-out", "POST")
            assert out.status == 200
            ends_at = re.search(r'http-equiv="refresh" content="0; url=([^"]+)"', out.text)
            assert ends_at, out.text
            then = URL(unescape(ends_at[1]), encoded=True)
            assert str(then.with_query(None)) == f"{plane.provider.issuer}/oauth2/end_session"
            assert then.query["post_logout_redirect_uri"] == f"{plane.url}/sign-in"
            assert then.query["id_token_hint"].count(".") == 2
            kept = {"Cookie": session.partition(";")[0]}
            for console in (plane.url, other):
                async with aiohttp.ClientSession(headers=kept) as http:
                    again = await Person(http, plane.provider).get(f"{console}/executions")
                    assert (again.status, again.headers["Location"][:14]) == (303, "/sign-in?ended"), console
    recorded = [one for one in await plane.api.audit() if one["by"] == "nina@example.com"]
    assert [(one["action"], one["actor"], one["actor_id"]) for one in recorded] == [
        ("sign_in", "person", "nina"),
        ("sign_out", "person", "nina"),
    ]


_COOKIES = ("breakwater_console=", "breakwater_sign_in=")


async def test_what_goes_wrong_is_said_on_the_sign_in_page_and_no_session_begins(
    plane: SignInPlane, person: Person
) -> None:
    async with plane.console(plane.port):
        back = await plane.provider.sign_in(await person.begin(plane.url, "/agents"), "zoe")
        another = await person.get(str(back.update_query(state="x")))
        late = await person.get(str(back))
        denied = await person.get(
            str(await plane.provider.sign_in(await person.begin(plane.url, "/agents"), "zoe", action="deny"))
        )
        plane.provider.answers[TOKEN] = web.Response(status=302, headers={"Location": "/"})
        broken = await person.sign_in(plane.url)
        plane.provider.reset()
        for shown, status, said in (
            (another, 403, "does not belong to a sign-in of this browser"),
            (late, 403, "over ten minutes, or the browser kept no cookie"),
            (denied, 403, "cancelled or not permitted at the provider"),
            (broken, 503, "Signing in at localhost is not possible now: it answers with a redirect (302)"),
        ):
            assert (shown.status, said in shown.words) == (status, True), shown.words
            assert not any(one.startswith("breakwater_console=bws") for one in shown.cookies)
            assert "Sign in with Example SSO" in shown.words
        assert 'href="/sign-in/openid?next=/agents"' in denied.text
        no_role = await person.sign_in(plane.url, sub="mallory")
        assert (no_role.status, "'mallory@example.com' has no role" in no_role.words) == (403, True)
        assert (await person.get(f"{plane.url}/agents")).status == 303


@pytest.mark.parametrize("elsewhere", ["https://evil.example/", "//evil.example", "/\\evil.example", "x" * 5_000])
async def test_nobody_is_sent_elsewhere_after_signing_in(plane: SignInPlane, person: Person, elsewhere: str) -> None:
    async with plane.console(plane.port):
        signed_in = await person.sign_in(plane.url, elsewhere)
        assert (signed_in.status, signed_in.headers["Location"]) == (303, "/")


async def test_who_fails_over_and_over_keeps_nobody_out_and_has_the_provider_asked_little(
    plane: SignInPlane, person: Person
) -> None:
    async def tries(number: int, came_from: str) -> int:
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as http:
            http.headers["X-Forwarded-For"] = f"192.0.2.{number}, {came_from}"
            browser = Person(http, plane.provider)
            state = URL(await browser.begin(console)).query["state"]
            return (await browser.get(f"{console}/sign-in/openid/callback?state={state}&code=made-up")).status

    async with plane.console(free_port(), "https://console.example") as console:
        before = plane.provider.asked.count(TOKEN)
        # The proxy before the console adds the address that it sees; what is before it, the browser has made up.
        statuses = [await tries(number, "198.51.100.7") for number in range(30)]
        assert 10 <= statuses.count(403) <= 12
        assert statuses.count(429) == 30 - statuses.count(403)
        assert await tries(0, "198.51.100.8") == 403
        assert plane.provider.asked.count(TOKEN) - before <= 13
    async with plane.console(plane.port):
        assert (await person.sign_in(plane.url)).status == 303


async def shoot(page: Page, name: str) -> None:
    """Keeps pictures of a page in both colours, where somebody wants them."""
    if folder := os.environ.get("BREAKWATER_SCREENSHOTS"):
        for colours in ("dark", "light"):
            await page.emulate_media(color_scheme="dark" if colours == "dark" else "light")
            await page.screenshot(path=Path(folder) / f"{name}-{colours}.png", full_page=True)


async def test_a_person_signs_in_and_out_with_a_browser(plane: SignInPlane, program: str) -> None:
    plane.provider.reset()
    async with plane.console(plane.port), async_playwright() as playwright:
        chromium = await playwright.chromium.launch(executable_path=program, args=list(OPTIONS))
        page = await chromium.new_page(reduced_motion="reduce")
        # The provider's page has its style from elsewhere.
        await page.route(re.compile(r"^(?!http://localhost:)"), lambda route: route.abort())
        refused: list[str] = []
        page.on("console", lambda said: refused.append(said.text) if "Content Security" in said.text else None)
        await page.goto(f"{plane.url}/breakers")
        await expect(page.get_by_label("API key")).to_be_visible()
        await shoot(page, "sign-in-openid")
        await page.evaluate(Axe().axe_script)
        assert await page.evaluate(SERIOUS, {"resultTypes": ["violations"]}) == []
        await page.emulate_media(color_scheme="dark")
        assert await page.evaluate(SERIOUS, {"resultTypes": ["violations"], **CONTRAST}) == []
        await page.get_by_role("link", name="Sign in with Example SSO").click()
        await page.get_by_placeholder("sub").fill("zoe")
        await page.get_by_role("button", name="Authorize").click()
        await expect(page.get_by_role("heading", name="Breakers", level=1)).to_be_visible()
        await expect(page.get_by_text("Signed in as zoe@example.com (operator)")).to_be_visible()
        await shoot(page, "signed-in-openid")
        await page.get_by_role("button", name="Sign out").click()
        await page.get_by_role("button", name="End session").click()
        await expect(page).to_have_url(f"{plane.url}/sign-in")
        await page.goto(f"{plane.url}/breakers")
        await expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
        assert refused == []
        await chromium.close()
