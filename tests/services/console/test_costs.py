"""A month's costs: on the page, as its CSV, over HTTP and in SQL they are the same, to the nano-dollar."""

from __future__ import annotations

import asyncio
import csv
import io
import random
import re
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import pytest_asyncio
from pydantic import SecretStr

from breakwater.client import ApiClient, ApiError, Query
from breakwater.config import parse_config
from breakwater.identity.api_keys import create_key
from breakwater.jobs.contract.execution import Attempt
from breakwater.kernel.formats import exact_money, money
from breakwater.kernel.process.settings import Settings
from breakwater.kernel.types import nano_from_usd, time_from_ms
from breakwater.limits.rules.budget import period
from breakwater.limits.rules.ledger import ledger
from breakwater.local.ports import free_port
from breakwater.records import schema
from breakwater.records.contract import Costs
from breakwater.records.rows import budget_row
from breakwater.records.rules.costs import month_before, month_of
from breakwater.records.views.costs import BY
from breakwater.services.request.app import build
from tests.cli.api_stub import Stub
from tests.helpers import until
from tests.records import samples
from tests.records.samples import attempt_row
from tests.server_sources import RunningServer
from tests.services.console.conftest import Console, visiting
from tests.tables import each_row

ZONE = ZoneInfo("Asia/Kolkata")
CONFIG = """
providers: {local: {base_url: "http://127.0.0.1:9/v1"}}
budgets:
  timezone: Asia/Kolkata
  global: {monthly_usd: 300}
  tenants: {acme: {monthly_usd: 50, enforcement: hard}}
agents: {writer: {model: m, budget: {monthly_usd: 10}}, reader: {model: m, budget: {daily_usd: 0.004752}}}
cost_tags: [team, project]
"""
EVIL = '=cmd|"/c calc"!A1, <i>'
MONTH = month_of("2026-10", ZONE)
START, END = time_from_ms(MONTH.start_ms), time_from_ms(MONTH.end_ms)
MS = timedelta(milliseconds=1)


def call(number: int, at: datetime, cost: int | None, **more: Any) -> Attempt:
    given = {"started_at": at, "cost": cost, "cost_basis": "unknown" if cost is None else "billed", **more}
    return samples.attempt(f"e{number}", **given)


ACME = {
    "tenant": "acme",
    "submitted_by": "finance key",
    "user": "ada@example.com",
    "team": "Ads & Co",
    "cost_tags": {"team": "growth", "project": "p/1"},
}
FAILED = {"outcome": "error", "error": samples.RATE_LIMITED}
CALLS = [
    # Of the month before, to the last millisecond; charged in this one, though they began before it.
    call(1, START - MS, 5_000_000_001, **ACME),
    call(2, START - MS, 1, reserved=9, reserved_at=START, **ACME),
    call(3, START, 123_456_789_123, **ACME),
    call(4, START + timedelta(days=9), 7, agent="reader", **ACME, **FAILED, cost_basis="estimated"),
    call(5, END - MS, 40, tenant=EVIL, model="mini", provider="proxy"),
    call(6, START + timedelta(days=3), 2_000_000_000, submitted_by="ops", cost_tags={"team": "ops"}),
    call(7, START + timedelta(days=4), None, agent="reader"),
    call(8, START, 10**9, short_circuited=True, outcome="short_circuited", **ACME),
    call(9, END, 11, **ACME),
]
SPEND = {"acme": 123_456_789_131, EVIL: 40, None: 2_000_000_000}


@dataclass
class Surfaces:
    """The console, the HTTP API behind it, and the database behind that."""

    console: Console
    api: ApiClient

    async def costs(self, query: Query | None = None) -> Costs:
        """Asks for costs, and waits longer than people do: the tests beside this one may keep ClickHouse busy."""
        return await self.api.read(Costs, "costs", query, timeout_s=60)


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def running(
    served: Console,
    clickhouse_server: RunningServer,
    redis_server: RunningServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncGenerator[Surfaces]:
    """A real HTTP API, which needs no NATS for this, and a console on it, with someone who may read."""
    nowhere = f"127.0.0.1:{free_port()}"
    database = f"{clickhouse_server.url.rstrip('/')}/{served.analytics.database}"
    settings = Settings(
        nats_url=SecretStr(f"nats://{nowhere}"),
        redis_url=SecretStr(redis_server.url),
        clickhouse_url=SecretStr(database),
        http_port=free_port(),
        api_keys_file=tmp_path_factory.mktemp("costs") / "api_keys.json",
    )
    service = build(settings, parse_config(CONFIG))
    serving = asyncio.create_task(service.run())
    key = create_key(settings.api_keys_file, "finance", ("read",))
    try:
        async with ApiClient(f"http://127.0.0.1:{settings.http_port}", key) as api:

            async def answers() -> bool:
                try:
                    return bool(await api.get("key"))
                except ApiError:
                    return False

            await until(answers)
            async with visiting(Stub(url=api.url), database, served.analytics) as console:
                assert (await console.sign_in(key)).status == 303
                yield Surfaces(console, api)
    finally:
        service.stop()
        await serving


@pytest.fixture
def surfaces(running: Surfaces, visited: Console) -> Surfaces:
    """The same, with an empty database."""
    del visited
    return running


async def store(console: Console, *attempts: Attempt) -> None:
    rows = [attempt_row(attempt, number) for number, attempt in enumerate(attempts)]
    await console.analytics.insert(schema.ATTEMPTS, rows)


def on_page(text: str) -> dict[str | None, int]:
    """The spend in the table, by the first cell."""
    rows = re.findall(
        r'<th scope="row" class="name">(?!All)(.*?)</th>\s*<td class="right"><span class="money" title="\$([0-9.,]+)"',
        text,
    )
    names = (unescape(re.sub(r"<[^>]+>", "", name)) for name, _ in rows)
    amounts = (nano_from_usd(amount.replace(",", "")) for _, amount in rows)
    return dict(zip((None if name.startswith("no ") else name for name in names), amounts, strict=True))


def in_csv(text: str) -> dict[str | None, int]:
    rows = csv.DictReader(io.StringIO(text, newline=""))
    return {row["name"].removeprefix("'") or None: nano_from_usd(row["spend"]) for row in rows}


async def test_a_month_by_tenant_is_the_same_on_the_page_as_csv_over_http_and_in_sql(surfaces: Surfaces) -> None:
    console, api = surfaces.console, surfaces.api
    await store(console, *CALLS)
    page = await console.get("/costs?month=2026-10&by=tenant&whole=1")
    downloaded = await console.get("/costs.csv?month=2026-10&by=tenant")
    http = await surfaces.costs({"month": "2026-10", "by": "tenant"})
    exported = await api.text("costs.csv", {"month": "2026-10", "by": "tenant"})
    sql = await console.analytics.query(
        "SELECT SubAccountId AS tenant, sum(BilledCost) AS usd FROM cost_and_usage"
        " WHERE ChargePeriodStart >= toDateTime('2026-10-01 00:00:00', 'Asia/Kolkata')"
        " AND ChargePeriodStart < toDateTime('2026-11-01 00:00:00', 'Asia/Kolkata') GROUP BY tenant"
    )
    by_ledger = {
        key.removeprefix("tenant:"): one.spent
        for (name, key), one in ledger(CALLS, ZONE).items()
        if name == "2026-10" and key.startswith("tenant:")
    }
    assert by_ledger | {None: SPEND[None]} == SPEND, "what budgets count"
    assert on_page(page.text) == SPEND
    drawn = {None if name.startswith("no ") else name: sum(values) for name, values in in_chart(page.text).items()}
    assert list(drawn.items()) == sorted(SPEND.items(), key=lambda name_and_spend: -name_and_spend[1])
    assert "data-zooms" not in page.text
    assert in_csv(downloaded.text) == SPEND
    assert downloaded.text == exported
    assert {line.name: line.spend for line in http.lines} == SPEND
    assert {row["tenant"]: nano_from_usd(row["usd"]) for row in sql.named_rows()} == SPEND
    assert http.total.spend == sum(SPEND.values())
    assert f'title="{exact_money(http.total.spend)}">{money(http.total.spend)}<' in page.text

    # What a spreadsheet or a page would carry out is text.
    assert downloaded.headers["Content-Type"] == "text/csv; charset=utf-8"
    assert downloaded.headers["Content-Disposition"] == 'attachment; filename="costs-2026-10-by-tenant.csv"'
    assert """"'=cmd|""/c calc""!A1, <i>",USD,0.000000040""" in downloaded.text
    assert "<i>" not in page.text


def in_chart(text: str) -> dict[str, list[int]]:
    """The exact amounts of the chart's table, by its headings."""
    table = text[text.index('id="chart-spend"') : text.index("</figure>")]
    names = re.findall(r"<th scope=\"col\" class=\"right\"[^>]*>(.*?)</th>", table)
    rows = [re.findall(r'title="\$([0-9.,]+)"', row) for row in table.split("<tr data-at")[1:]]
    amounts = [[nano_from_usd(cell.replace(",", "")) for cell in row] for row in rows]
    return {unescape(name): list(column) for name, column in zip(names, zip(*amounts, strict=True), strict=True)}


async def test_the_chart_begins_with_the_first_call_and_sums_up_the_smallest(surfaces: Surfaces) -> None:
    calls = [call(n, END - timedelta(minutes=30), 1_000 - n, agent=f"a{n}") for n in range(8)]
    await store(surfaces.console, *calls)
    drawn = in_chart((await surfaces.console.get("/costs?month=2026-10&by=agent&whole=1")).text)
    assert [*drawn] == ["a0", "a1", "a2", "a3", "a4", "3 others"]
    assert sum(drawn["3 others"]) == 995 + 994 + 993
    assert 30 * 60 / 120 <= (END - calls[0].started_at).total_seconds() / len(drawn["a0"]) <= 30


async def test_a_month_without_a_call_has_no_chart(surfaces: Surfaces) -> None:
    assert "<figure" not in (await surfaces.console.get("/costs?month=2026-10&whole=1")).text


async def test_what_stands_beside_the_spend(surfaces: Surfaces) -> None:
    raised = samples.budget_event(
        scope="tenant",
        agent=None,
        tenant="acme",
        window="monthly",
        period="2026-10",
        kind="raised",
        limit=200 * 10**9,
        configured=50 * 10**9,
    )
    await store(surfaces.console, *CALLS)
    await surfaces.console.analytics.insert(schema.BUDGET_EVENTS, [budget_row(raised, 1)])
    costs = await surfaces.costs({"month": "2026-10", "by": "tenant"})
    acme = next(line for line in costs.lines if line.name == "acme")
    assert (acme.wasted, acme.estimated, acme.previous) == (7, 7, 5_000_000_001)
    assert (acme.cap, acme.calls, acme.failed_calls) == (200 * 10**9, 3, 1)
    nobody = next(line for line in costs.lines if line.name is None)
    assert (nobody.calls, nobody.calls_of_unknown_cost, nobody.cap) == (2, 1, None)
    assert (costs.total.cap, costs.previous_month, costs.timezone) == (300 * 10**9, "2026-09", "Asia/Kolkata")
    assert (costs.starts_at, costs.ends_at) == (START, END)
    assert costs.cost_tags == ("team", "project")

    page = await surfaces.console.get("/costs?month=2026-10&by=tenant&whole=1")
    assert "$200.00 raised from $50.00 61.7 % spent" in page.words
    assert 'title="1 call of unknown cost">at least' in page.text
    assert "at least: 1 of 6 calls of unknown cost" in page.words
    assert "+2369.1 %" in page.words

    for by, tag, expected in (
        ("agent", None, {"writer": 125_456_789_164, "reader": 7}),
        ("model", None, {"gpt-4.1": 125_456_789_131, "mini": 40}),
        ("provider", None, {"openai": 125_456_789_131, "proxy": 40}),
        ("key", None, {"finance key": 123_456_789_131, "ops": 2_000_000_000, None: 40}),
        ("user", None, {"ada@example.com": 123_456_789_131, None: 2_000_000_040}),
        ("team", None, {"Ads & Co": 123_456_789_131, None: 2_000_000_040}),
        ("tag", "team", {"growth": 123_456_789_131, "ops": 2_000_000_000, None: 40}),
        ("tag", "project", {"p/1": 123_456_789_131, None: 2_000_000_040}),
        ("tag", "it's unknown", {None: 125_456_789_171}),
    ):
        found = await surfaces.costs({"month": "2026-10", "by": by, "tag": tag})
        assert {line.name: line.spend for line in found.lines} == expected
    shown = await surfaces.console.get("/costs?month=2026-10&by=tag&tag=team&whole=1")
    assert on_page(shown.text) == {"growth": 123_456_789_131, "ops": 2_000_000_000, None: 40}

    by_team = await surfaces.console.get("/costs?month=2026-10&by=team&whole=1")
    assert on_page(by_team.text) == {"Ads & Co": 123_456_789_131, None: 2_000_000_040}
    assert 'href="/executions?team=Ads+%26+Co&amp;' in by_team.text
    csv = await surfaces.console.get("/costs.csv?month=2026-10&by=user")
    assert "user,ada@example.com,USD,123.456789131" in csv.text

    few = await surfaces.costs({"month": "2026-10", "by": "tenant", "limit": 1})
    assert [line.name for line in few.lines] == ["acme"]
    assert few.others is not None
    assert (few.others.spend, few.others.calls, few.total) == (2_000_000_040, 3, costs.total)


SUMMED = ("spend", "wasted", "estimated", "previous", "calls", "input_tokens")
GROUPINGS = (*((by, None) for by in BY), ("tag", "team"))


async def test_the_total_is_the_same_however_costs_are_grouped(surfaces: Surfaces) -> None:
    draw = random.Random(31)

    def drawn(number: int) -> Attempt:
        failed: dict[str, Any] = FAILED if draw.random() < 0.3 else {}
        return call(
            number,
            START + timedelta(days=draw.randint(-20, 30), milliseconds=draw.randint(0, 80_000_000)),
            draw.choice([1, 333, 4_752_000, 10**9 // 3, draw.randint(1, 10**10)]),
            agent=draw.choice(["writer", "reader"]),
            tenant=draw.choice(["acme", EVIL, None]),
            model=draw.choice(["gpt-4.1", "mini"]),
            deployment=draw.choice(["gpt-4.1-eu", None]),
            provider=draw.choice(["openai", "proxy"]),
            submitted_by=draw.choice(["ops", None]),
            user=draw.choice(["ada", None]),
            team=draw.choice(["search", None]),
            cost_tags=draw.choice([{}, {"team": "growth"}, {"team": "ops"}]),
            **failed,
        )

    await store(surfaces.console, *map(drawn, range(300)))
    totals: list[dict[str, Any]] = []
    for by, tag in GROUPINGS:
        costs = await surfaces.costs({"month": "2026-10", "by": by, "tag": tag})
        totals.append(costs.total.model_dump())
        for name in SUMMED:
            assert sum(getattr(line, name) for line in costs.lines) == getattr(costs.total, name), (by, name)
    # The lines are cut after they were summed up, by whatever they are grouped.
    few = await surfaces.costs({"month": "2026-10", "by": "agent", "limit": 1})
    assert few.others is not None
    totals.append(few.total.model_dump())
    for name in SUMMED:
        assert getattr(few.lines[0], name) + getattr(few.others, name) == getattr(few.total, name), name
    assert all(total == totals[0] for total in totals)


async def test_a_line_without_a_monthly_cap_has_its_daily_one(surfaces: Surfaces) -> None:
    await store(surfaces.console, *CALLS)
    costs = await surfaces.costs({"month": "2026-10", "by": "agent"})
    assert {line.name: (line.cap, line.daily_cap) for line in costs.lines} == {
        "writer": (10 * 10**9, None),
        "reader": (None, 4_752_000),
    }
    page = await surfaces.console.get("/costs?month=2026-10&whole=1")
    assert "$0.00475 a day" in page.words
    assert "no limit" not in page.words


async def test_the_costs_of_a_month_agree_with_the_budget_page_on_a_raised_daily_cap(surfaces: Surfaces) -> None:
    today = period("daily", datetime.now(UTC), ZONE)
    raised = samples.budget_event(
        scope="agent",
        agent="reader",
        window="daily",
        period=today.name,
        kind="raised",
        limit=2 * 10**9,
        configured=4_752_000,
    )
    await store(surfaces.console, call(1, time_from_ms(today.start_ms), 5, agent="reader"))
    await surfaces.console.analytics.insert(schema.BUDGET_EVENTS, [budget_row(raised, 1)])
    costs = await surfaces.costs()
    assert [(line.daily_cap, line.raised_from) for line in costs.lines] == [(2 * 10**9, 4_752_000)]
    assert "$2.00 today raised from $0.00475" in (await surfaces.console.get("/costs?whole=1")).words
    # It held for today, which is in no other month.
    before = month_before(period("monthly", datetime.now(UTC), ZONE), ZONE)
    await store(surfaces.console, call(2, time_from_ms(before.start_ms), 5, agent="reader"))
    assert "$0.00475 a day" in (await surfaces.console.get(f"/costs?month={before.name}&whole=1")).words


async def test_this_month_is_forecast_and_an_empty_one_says_so(surfaces: Surfaces) -> None:
    now = datetime.now(UTC)
    this = period("monthly", now, ZONE)
    begun = time_from_ms(this.start_ms)
    await store(surfaces.console, call(1, begun, 10**9), call(2, begun - MS, 3 * 10**9))
    costs = await surfaces.costs()
    [line] = costs.lines
    assert (costs.month, line.spend, line.previous, line.cap) == (this.name, 10**9, 3 * 10**9, 10 * 10**9)
    late = (now - begun) * 24 > time_from_ms(this.end_ms) - begun
    assert (costs.total.forecast is not None) == (costs.total.next_month is not None) == late
    first = await surfaces.console.get("/costs")
    assert "data-pending" in first.text
    assert 'data-refresh-s="30"' in first.text
    page = await surfaces.console.get("/costs?whole=1")
    assert 'href="?by=agent&amp;whole=1"' in first.text, "for those who run no scripts"
    assert "data-pending" not in page.text
    assert f"{this.name}, Asia/Kolkata" in page.words
    if late:
        assert re.search(r"Forecast \$[0-9.]+ next month: \$[0-9.]+; limit: ", page.words)
        assert "At month's end Next month Share" in page.words
    else:
        assert "Forecast unknown too early in the month" in page.words
    last = await surfaces.console.get(f"/costs?month={month_before(this, ZONE).name}&whole=1")
    assert on_page(last.text) == {"writer": 3 * 10**9}
    assert "Forecast" not in last.words
    assert 'data-refresh-s="0"' in (await surfaces.console.get("/costs?month=2020-01")).text, "once, as it is over"
    assert "Nothing was spent in 2020-01" in (await surfaces.console.get("/costs?month=2020-01&whole=1")).words


@each_row(
    ("query", "words"),
    [
        ("month=2026-13", "month: "),
        ("month=1999-01", "month: "),
        ("by=tag", "tag: is missing"),
        ("by=agent&tag=team", "tag: is only allowed with by=tag"),
        ("by=colour", "by: "),
        ("limit=0", "limit: "),
    ],
)
async def test_a_wrong_parameter_is_named(surfaces: Surfaces, query: str, words: str) -> None:
    given = dict(part.split("=") for part in query.split("&"))
    with pytest.raises(ApiError, match=re.escape(words)) as refused:
        await surfaces.api.get("costs", given)
    assert (refused.value.status, refused.value.code) == (422, "invalid_query")


async def test_a_page_says_what_is_wrong_with_its_month(surfaces: Surfaces) -> None:
    assert "month" in (await surfaces.console.get("/costs?month=2026-13&whole=1")).words
    assert (await surfaces.console.get("/costs.csv?month=2026-13")).status == 422
