"""The console on a real ClickHouse, with a stub of the HTTP API, and somebody with a browser.

All tests of this folder run in one event loop, with one console, one stub and one database that is emptied in between:
starting and stopping a server for each of them took two thirds of their time.
"""

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from yarl import URL

from breakwater.config import parse_config
from breakwater.identity.pages import visits
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.process.settings import Settings
from breakwater.kernel.security.encryption import new_key
from breakwater.local.ports import free_port
from breakwater.records.migrations import migrate
from breakwater.services.console.app import ConsoleService
from tests.cli.api_stub import KEY, Stub, serving
from tests.helpers import share_event_loop
from tests.records.made import connected
from tests.records.samples import empty, new_database_url
from tests.server_sources import RunningServer

ENCRYPTION_KEY = new_key()
CONFIG = f"""
encryption: {{keys: [{{command: [echo, "{ENCRYPTION_KEY}"]}}]}}
providers: {{local: {{base_url: "http://127.0.0.1:9/v1"}}}}
agents: {{writer: {{model: gpt-4.1}}}}
tracing: {{url_template: "https://traces.example/{{trace_id}}"}}
"""
SCOPES = ("submit", "read", "operate", "audit", "limits")


@dataclass(frozen=True)
class Page:
    """What a browser was given."""

    status: int
    headers: "dict[str, str]"
    text: str
    url: str
    """Where it was, after all redirects."""

    @property
    def words(self) -> str:
        """What can be read on it: without markup, and in one line."""
        body = re.sub(r"<(script|style).*?</\1>", "", self.text, flags=re.DOTALL)
        return " ".join(unescape(re.sub(r"<[^>]*>", " ", body)).split())

    @property
    def csrf(self) -> str:
        found = re.search(r'name="csrf" value="([^"]+)"', self.text)
        assert found, "there is no form on this page"
        return found[1]


@dataclass(frozen=True)
class Console:
    """A running console. `interface.answers` says what the HTTP API returns."""

    url: str
    http: aiohttp.ClientSession
    interface: Stub
    analytics: Analytics
    """Of the database that it reads."""

    async def get(self, path: str, *, follow: bool = True, **headers: str) -> Page:
        return await self._ask("GET", path, follow=follow, headers=headers)

    async def post(
        self, path: str, fields: "dict[str, Any] | list[tuple[str, str]]", *, follow: bool = True, **headers: str
    ) -> Page:
        """Sends a form as it stands; `submit` sends one as a page of ours does."""
        return await self._ask("POST", path, follow=follow, headers=headers, data=fields)

    async def submit(self, page: str, address: str, /, *, follow: bool = True, **fields: Any) -> Page:
        """Opens a page and sends its form with these fields."""
        opened = await self.get(page)
        return await self.post(address, {"csrf": opened.csrf, **fields}, follow=follow)

    async def sign_in(self, key: str = KEY, wanted: str = "/", *, follow: bool = False) -> Page:
        return await self.post("/sign-in", {"key": key, "next": wanted}, follow=follow)

    async def _ask(self, method: str, path: str, *, follow: bool, **more: Any) -> Page:
        address = URL(self.url + path, encoded=True)
        async with self.http.request(method, address, allow_redirects=follow, **more) as answer:
            return Page(answer.status, dict(answer.headers), await answer.text(), str(answer.url))


def key_with(*scopes: str, name: str = "ops") -> "tuple[int, dict[str, Any]]":
    """What the HTTP API returns about the key that asks."""
    created = "2026-11-21T10:00:00.000Z"
    return 200, {"id": "0123456789ab", "name": name, "scopes": list(scopes), "created_at": created}


def pytest_collection_modifyitems(items: "list[pytest.Item]") -> None:
    share_event_loop(items, Path(__file__).parent)


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def stub() -> AsyncGenerator[Stub]:
    async with serving() as listening:
        yield listening


@pytest.fixture
def interface(stub: Stub) -> Stub:
    """The HTTP API, which so far knows the key only."""
    stub.answers.clear()
    stub.asked.clear()
    stub.queries.clear()
    stub.sessions.clear()
    stub.links.clear()
    stub.answers["GET key"] = key_with(*SCOPES)
    return stub


@asynccontextmanager
async def running(settings: Settings, config: str = CONFIG) -> AsyncGenerator[str]:
    """A console, at a URL."""
    service = ConsoleService(settings, parse_config(config))
    serving_pages = asyncio.create_task(service.run())
    url = f"http://127.0.0.1:{settings.console_port}"
    try:
        async with aiohttp.ClientSession() as http, asyncio.timeout(30):
            while True:
                try:
                    async with http.get(f"{url}/healthz"):
                        break
                except aiohttp.ClientError:
                    assert not serving_pages.done(), "the console has ended"
                    await asyncio.sleep(0.05)
        yield url
    finally:
        service.stop()
        await serving_pages


@asynccontextmanager
async def visiting(interface: Stub, clickhouse_url: str, analytics: Analytics) -> AsyncGenerator[Console]:
    settings = Settings(
        clickhouse_url=clickhouse_url,  # pyright: ignore[reportArgumentType]
        request_url=interface.url,
        console_port=free_port(),
    )
    async with running(settings) as url, aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as http:
        yield Console(url, http, interface, analytics)


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def served(stub: Stub, clickhouse_server: RunningServer) -> AsyncGenerator[Console]:
    database = new_database_url(clickhouse_server.url)
    async with connected(database) as analytics, visiting(stub, database, analytics) as console:
        await migrate(analytics)
        yield console


@pytest_asyncio.fixture(loop_scope="package")
async def visited(served: Console, interface: Stub, monkeypatch: pytest.MonkeyPatch) -> Console:
    """A console where nobody is signed in yet."""
    # The tests of a process share one console, and what they store.
    monkeypatch.setattr(visits, "FIRST_RUN_AGE_S", 0.0)
    monkeypatch.setattr(visits, "CHANGES_AGE_S", 0.0)
    served.http.cookie_jar.clear()
    await empty(served.analytics)
    return served


@pytest_asyncio.fixture(loop_scope="package")
async def console(visited: Console) -> Console:
    """A console, and somebody who is signed in with a key that may do everything."""
    assert (await visited.sign_in()).status == 303
    return visited
