"""How soon each page of the console is usable in a browser over a million executions: p50 and worst of 9 visits.

    python -m bench.pages [executions] [--clickhouse-url URL] [--pictures FOLDER]

Loads the history of `bench.history` into a new embedded engine, up to now, and opens the pages of a console on it
in Chromium, over each time range. Of the HTTP API, costs are real, and the rest is made up. A page is usable when the
browser has read it, and its scripts have drawn the charts; it is whole when it has the parts that follow, such as the
sums of a long time range, too. The first visit, which fetches scripts and styles, is shown by itself. Given a URL, it
loads nothing. Ends with 1 where a median of usable pages is 300 ms or more.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import get_args
from zoneinfo import ZoneInfo

from aiohttp import web
from playwright.async_api import Page, async_playwright

from bench.history import History, load
from bench.history_fleet import AGENTS
from breakwater.identity.operations import ApiRequest
from breakwater.identity.rules.callers import person
from breakwater.kernel.clickhouse.client import Analytics, connect
from breakwater.kernel.process.settings import Settings
from breakwater.kernel.types import format_time
from breakwater.limits.rules.budget import period
from breakwater.limits.settings import Caps
from breakwater.local.ports import free_port
from breakwater.records.api.costs import CostRoutes
from breakwater.records.contract import CostsListQuery
from breakwater.records.figures import Spender
from breakwater.records.rules.costs import month_before
from tests.api_documents import answer, breaker, budget, health, incident, model, queue, service
from tests.browser.conftest import OPTIONS, PROGRAM
from tests.cli.api_stub import KEY, Stub, serving
from tests.limits.limit_tables import limit_table
from tests.server_sources import embedded_servers
from tests.services.console.conftest import key_with, running

VISITS, LIMIT_MS, DAYS = 9, 300.0, 30
ZONE = ZoneInfo("UTC")
SHORT = ("1h", "24h", "7d", "30d")
RANGES = ("1h", "24h", "yesterday", "7d", "30d", "this month", "last month")
AGENT = "support-triage"
_USABLE = "performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"
_NAMES = {"/": "overview", f"/agents/{AGENT}": "agent", "/breakers/one": "breaker"}


async def pages(analytics: Analytics) -> dict[str, tuple[str, ...]]:
    """All that show data, and the time ranges of each; of costs, the months."""
    one = f"/breakers/one?agent={AGENT}&model=gpt-4o-mini"
    ids = "SELECT execution_id FROM executions WHERE agent = {agent:String} ORDER BY completed_at LIMIT 2 OFFSET 9999"
    (first,), (second,) = (await analytics.query(ids, {"agent": AGENT})).rows
    incident = (await analytics.query("SELECT incident_id FROM incidents ORDER BY opened_at DESC LIMIT 1")).rows[0][0]
    this = period("monthly", datetime.now(UTC), ZONE)
    months = (this.name, month_before(this, ZONE).name)
    executions = ("/executions", "/executions?sort=total_cost", "/executions?text=overloaded")
    return {
        **dict.fromkeys(("/", *(f"/?by={by}" for by in get_args(Spender) if by != "agent")), RANGES),
        **dict.fromkeys(("/agents", f"/agents/{AGENT}", *executions, "/breakers", one, "/alerts"), RANGES),
        **dict.fromkeys((f"/costs?by={by}" for by in ("agent", "tenant", "model", "provider", "key")), months),
        "/costs?by=tag&tag=team": months,
        "/audit": SHORT,
        **dict.fromkeys(("/budgets", "/budgets/global%2Fmonthly", "/dead-letters", f"/alerts/{incident}"), ("",)),
        **dict.fromkeys((f"/executions/{first}", f"/compare?a={first}&b={second}"), ("",)),
    }


def costs_of(analytics: Analytics) -> Callable[[web.Request], Awaitable[web.Response]]:
    """What the HTTP API says of costs, from the database."""
    table = limit_table(Caps(monthly_usd=40))
    routes, who = (
        CostRoutes(analytics, lambda: table, ZONE, ("team",)),
        person("ada", "Ada", ("admin",), datetime.now(UTC)),
    )

    async def show(request: web.Request) -> web.Response:
        found = await routes.show_costs(ApiRequest(CostsListQuery.model_validate(dict(request.query)), {}, who, ""))
        return web.json_response(text=found.model_dump_json())

    return show


def made_up(interface: Stub) -> None:
    """What the HTTP API reports of this fleet."""
    answer(
        interface,
        agents=[health(one.name, "healthy", *(model(it.name) for it in one.chain)) for one in AGENTS],
        breakers=[
            breaker(one.name, it.name, "open" if (one.name, it.name) == (AGENT, "llama") else "closed")
            for one in AGENTS
            for it in one.chain
        ],
        budgets=[
            budget(f"{scope}/{window}", f"{spent}", "40", "soft")
            for scope, spent in (("global", 31), *((f"agent:{one.name}", at) for at, one in enumerate(AGENTS)))
            for window in ("daily", "monthly")
        ],
        alerts=[incident(number) for number in range(3)],
        queues=[queue(one.name, 3, 2) for one in AGENTS],
        services=[service(name) for name in ("breaker-events", "budget-events", "sink-events")],
    )
    interface.answers |= {
        "GET key": key_with("submit", "read", "operate", "audit"),
        "GET guards": (200, {"stopped": []}),
        "GET alerts/undelivered": (200, {"undelivered": [], "more": False}),
        "GET dlq": (200, {"dead_letters": [], "counts": [], "more": False}),
    }
    for each in interface.answers["GET budgets"][1]["budgets"]:
        day = datetime.now(UTC)
        each["period"] = f"{day:%Y-%m-%d}" if each["window"] == "daily" else f"{day:%Y-%m}"
        each["resets_at"] = format_time(day + timedelta(hours=9))


async def visited(page: Page, url: str) -> tuple[float, float]:
    """Opens a page; after how many milliseconds it was usable, and had the sums of a long time range, too."""
    response = await page.goto(url)
    assert response, url
    assert response.status == 200, f"{url}: {response.status}"
    assert await page.locator("main .problem").count() == 0, await page.locator("main .problem").all_inner_texts()
    usable = float(await page.evaluate(_USABLE))
    if not await page.locator("[data-pending]").count():
        return usable, usable
    await page.locator("[data-pending]").first.wait_for(state="detached")
    return usable, float(await page.evaluate("performance.now()"))


async def main(executions: int, url: str | None, pictures: Path | None) -> bool:
    slow = 0
    async with AsyncExitStack() as stack:
        servers, _ = stack.enter_context(embedded_servers())
        database = url or f"{servers.clickhouse().url}/bench"
        analytics = connect(database)
        stack.push_async_callback(analytics.close)
        if url is None:
            await load(analytics, History(executions, DAYS, datetime.now(UTC)))
        interface = await stack.enter_async_context(serving({"/api/v1/costs": costs_of(analytics)}))
        made_up(interface)
        settings = Settings(clickhouse_url=database, request_url=interface.url, console_port=free_port())  # pyright: ignore[reportArgumentType]
        console = await stack.enter_async_context(running(settings))
        playwright = await stack.enter_async_context(async_playwright())
        browser = await playwright.chromium.launch(executable_path=PROGRAM, args=list(OPTIONS))
        context = await browser.new_context(viewport={"width": 1360, "height": 900})
        page = await context.new_page()
        await page.goto(f"{console}/sign-in")
        await page.get_by_label("API key").fill(KEY)
        await page.get_by_role("button", name="Sign in").click()
        await page.get_by_role("heading", name="Overview", level=1).wait_for()
        await page.wait_for_load_state()
        print(f"the first visit, of the overview: {await page.evaluate(_USABLE):.0f} ms\n")
        print(f"{'page':<54}{'range':>12}{'p50 ms':>9}{'worst ms':>10}{'whole ms':>10}")
        for path, ranges in (await pages(analytics)).items():
            named = "month" if path.startswith("/costs") else "window"
            for name in ranges:
                wanted = f"{path}{'&' if '?' in path else '?'}{named}={name}" if name else path
                visits = [await visited(page, console + wanted) for _ in range(VISITS)]
                times, whole = zip(*visits, strict=True)
                slow += median(times) >= LIMIT_MS
                mark = "" if median(times) < LIMIT_MS else "  <- too slow"
                print(
                    f"{path[:52]:<54}{name:>12}{median(times):>9.0f}{max(times):>10.0f}{median(whole):>10.0f}{mark}",
                    flush=True,
                )
            if pictures:
                called = _NAMES.get(path.partition("?")[0], path.strip("/").partition("?")[0].replace("/", "-"))
                await page.screenshot(path=pictures / f"{called}.png", full_page=True)
        await browser.close()
    print(f"\nload average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"every median is below {LIMIT_MS:.0f} ms: {f'no, {slow} are not' if slow else 'yes'}")
    return not slow


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.pages")
    parser.add_argument("executions", type=int, nargs="?", default=1_000_000)
    parser.add_argument("--clickhouse-url", help="of a database that holds a history already")
    parser.add_argument("--pictures", type=Path, help="where to keep a picture of each page")
    given = parser.parse_args()
    sys.exit(0 if asyncio.run(main(given.executions, given.clickhouse_url, given.pictures)) else 1)
