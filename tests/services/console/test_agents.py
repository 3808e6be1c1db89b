"""All agents, and one: what it did, what it wasted and on what, whether trying again helped."""

import re
from datetime import UTC, datetime, timedelta
from html import unescape
from zoneinfo import ZoneInfo

from breakwater.breakers.contract import AgentHealth
from breakwater.health.pages.agent import retry_benefit
from breakwater.health.pages.agents import COLUMNS, AgentRow
from breakwater.kernel.clickhouse.client import connect
from breakwater.kernel.http.contract import AgentQueue
from breakwater.kernel.pages.tables import PageTable, TableUrl
from breakwater.kernel.pages.time_range import yesterday
from breakwater.kernel.pages.words import refused_by
from breakwater.local.ports import free_port
from breakwater.records.figures import History, RetryFigures
from tests.api_documents import answer, breaker, budget, health, incident, model, queue
from tests.cli.api_stub import Stub, problem
from tests.services.console.conftest import Console, visiting
from tests.services.console.recorded import broken, ended, store, tried
from tests.services.console.test_overall_health import ended as counted
from tests.tables import each_row

EVIL = '<script>alert("1")</script>'
ODD = "écrivain.v2 > all/*?#%2F"


def listed(html: str) -> "list[str]":
    """The agents of the list, in its order."""
    return [
        unescape(name) for name in re.findall(r'<th scope="row" class="name"><a href="/agents/[^"]*">([^<]*)</a>', html)
    ]


async def test_the_hold_of_a_model_without_a_breaker_can_be_ended(console: Console):
    held = {"held_until": "2099-01-01T00:00:00.000Z"}
    models = [model("free", None) | held, model("m") | held, model("fine", None)]
    answer(console.interface, agents=[health("writer", "healthy", *models)])
    console.interface.answers["GET breakers"] = 200, {"breakers": [breaker("writer", "m")], "alive": True}
    page = await console.get("/agents/writer")
    assert page.text.count('action="/breakers/end-hold"') == 1, "one with a breaker is reset"
    console.interface.answers["POST breakers/reset"] = 200, {"unchanged": True}
    page = await console.submit("/agents/writer", "/breakers/end-hold", agent="writer", model="free", reason="paid")
    assert ("POST breakers/reset", {"agent": "writer", "model": "free", "reason": "paid"}) in console.interface.asked
    assert page.url.endswith("/agents/writer")
    assert "The hold of free has ended" in page.words


async def test_every_agent_of_the_config_is_listed_and_each_that_ran(console: Console):
    answer(
        console.interface,
        agents=[
            health("writer", "unhealthy", model("gpt-4.1", "open"), model("mini", "isolated"), model("free", None)),
            health("idle"),
        ],
        queues=[queue("writer", 7, 2), queue("idle")],
    )
    limit = broken("slow down", "rate_limit")
    await store(
        console,
        ended(
            "w1",
            10,
            tried("w1", 1, 10, cost=1_000_000_000, outcome="error", error=limit),
            tried("w1", 2, 10, cost=2_000_000_000, cause="retry"),
            wasted_cost=1_000_000_000,
            duration_ms=3_000,
        ),
        ended("w2", 20, status="dead_lettered", duration_ms=3_000),
        ended("g1", 30, tried("g1", 1, 30, agent="gone", cost=None), agent="gone"),
    )
    page = await console.get("/agents")
    assert page.status == 200
    # The worst first; of one that is not configured, nobody knows its health.
    assert listed(page.text) == ["writer", "idle", "gone"]
    assert "writer unhealthy it is unhealthy 2 open breakers 50 % 2 3.0 s 1 $3.00 $1.00 7 / 2 1" in page.words
    assert "idle healthy it is healthy did not run – – – – – – 0 / 0 –" in page.words
    assert "gone not configured 100 % 1 1.0 s 0 unknown $0.00 – / – 0" in page.words
    assert 'aria-label="2 executions over time, 1 of them failed"' in page.text


async def test_a_long_name_is_broken_where_it_must(console: Console):
    long = "a" * 120
    answer(console.interface, agents=[health(long)])
    page = await console.get("/agents")
    assert f'<th scope="row" class="name"><a href="/agents/{long}?window=24h">' in page.text
    style = (await console.get(unescape(re.findall(r'href="(/static/console.css[^"]*)"', page.text)[0]))).text
    rule = re.search(r"^\.name \{([^}]*)\}", style, re.MULTILINE)
    assert rule
    assert "overflow-wrap: anywhere" in rule[1]


async def test_the_list_is_sorted_by_links_that_turn_round(console: Console):
    answer(console.interface, agents=[health("b"), health("a"), health("c")])
    await store(
        console,
        tried("a1", 1, 5, agent="a", cost=2_000_000_000),
        tried("b1", 1, 5, agent="b", cost=3_000_000_000),
    )
    page = await console.get("/agents?window=1h&sort=spend")
    assert listed(page.text) == ["b", "a", "c"]
    assert page.text.count("aria-sort=") == 1
    assert 'aria-sort="descending"><a href="/agents?window=1h&amp;sort=-spend#agents"' in page.text
    turned = await console.get("/agents?window=1h&sort=-spend")
    assert listed(turned.text) == ["a", "b", "c"]
    assert 'aria-sort="ascending"><a href="/agents?window=1h&amp;sort=spend#agents"' in turned.text


@each_row(
    ("order", "expected"),
    [
        ("name", "abc"),
        ("health", "cab"),
        ("success", "bac"),
        ("executions", "bac"),
        ("retries", "abc"),
        ("waiting", "cba"),
        ("limited", "abc"),
    ],
)
def test_what_one_looks_for_comes_first_and_what_is_not_known_last(order: str, expected: str):
    def row(name: str, **known: object) -> AgentRow:
        return AgentRow(**({"name": name, "health": None, "history": None, "queue": None, "limited": None} | known))  # type: ignore[arg-type]

    def jobs(waiting: int) -> AgentQueue:
        return AgentQueue(agent="x", waiting=waiting, in_progress=0, concurrency=1)

    rows = [
        row(
            "a",
            health=AgentHealth.model_validate(health("a")),
            history=History(counted(2, failed=1), ()),
            limited=3,
        ),
        row("b", history=History(counted(2, failed=2), ()), limited=0, queue=jobs(0)),
        row("c", health=AgentHealth.model_validate(health("c", "unhealthy")), queue=jobs(9)),
    ]
    table = PageTable(TableUrl("/agents", {"sort": order}), "agents", "Agents", COLUMNS, rows, sort="health", prefix="")
    assert "".join(one.name for one in table.rows) == expected


async def test_what_an_agent_wasted_yesterday_and_on_what_is_three_clicks_away(console: Console):
    answer(console.interface, agents=[health("writer")])
    noon = yesterday(datetime.now(UTC), ZoneInfo("UTC")).start + timedelta(hours=12)
    fields = {"completed_at": noon, "status": "dead_lettered", "wasted_cost": 3_000_000_000}
    causes = {"worker_lost": 2_000_000_000, "retry": 1_000_000_000}
    await store(
        console,
        ended("y1", 0, tried("y1", 1, 0, started_at=noon, cost=3_000_000_000), wasted_by_cause=causes, **fields),
        # The day before: no part of the answer.
        ended("y2", 0, wasted_by_cause=causes, **(fields | {"completed_at": noon - timedelta(days=1)})),
    )

    def link(html: str, pattern: str) -> str:
        found = re.search(pattern, html)
        assert found, pattern
        return unescape(found[1])

    start = await console.get("/")
    agents = await console.get(link(start.text, r'<a href="([^"]*)"[^>]*>Agents</a>'))
    one = await console.get(link(agents.text, r'<a href="([^"]*)">writer</a>'))
    assert "Wasted $" in one.words
    page = await console.get(link(one.text, r'<a href="([^"]*)">yesterday</a>'))
    assert "Waste: $3.00" in page.words
    assert "the worker died during the call $2.00 1 failed, then retried $1.00 1" in page.words
    assert "Wasted $3.00 100 % of spend" in page.words


@each_row(
    ("now", "zone", "start", "end"),
    [
        ("2026-11-22T00:00:00Z", "UTC", "2026-11-21T00:00:00Z", "2026-11-22T00:00:00Z"),
        ("2026-11-22T23:59:59Z", "UTC", "2026-11-21T00:00:00Z", "2026-11-22T00:00:00Z"),
        ("2026-11-22T23:59:59Z", "Asia/Kolkata", "2026-11-21T18:30:00Z", "2026-11-22T18:30:00Z"),
        # Of 25 hours, and of 23.
        ("2026-10-26T12:00:00Z", "Europe/Berlin", "2026-10-24T22:00:00Z", "2026-10-25T23:00:00Z"),
        ("2026-03-30T12:00:00Z", "Europe/Berlin", "2026-03-28T23:00:00Z", "2026-03-29T22:00:00Z"),
    ],
)
def test_yesterday_is_the_last_whole_day_as_budgets_count_days(now: str, zone: str, start: str, end: str):
    window = yesterday(datetime.fromisoformat(now), ZoneInfo(zone))
    assert (window.start, window.end) == (datetime.fromisoformat(start), datetime.fromisoformat(end))
    assert window.at(window.buckets) == window.end


async def test_one_agent_is_reported_whole(console: Console):
    answer(
        console.interface,
        agents=[health("writer", "unhealthy", model("gpt-4.1", "open", "unhealthy"), model("free", None)), health("x")],
        breakers=[
            breaker("writer", "gpt-4.1", "open", "3 jobs in a row failed (threshold: 3)"),
            breaker("x", "free", "open", "of another agent"),
        ],
        budgets=[
            budget("global/daily", "1"),
            budget("agent:writer/daily", "5"),
            budget("agent:writer/monthly", "9", None, "none"),
        ],
        alerts=[incident(1)],
        queues=[queue("writer", 7, 2), queue("x", 99, 99)],
    )
    down, held = broken("the cable is cut"), {"outcome": "short_circuited", "short_circuited": True, "cost": None}
    await store(
        console,
        ended(
            "w/1",
            10,
            tried("w/1", 1, 10, cost=1_000_000_000, outcome="error", error=down),
            tried("w/1", 2, 10, cost=2_000_000_000, cause="retry", first_token_ms=300, chunks=20),
            wasted_cost=1_000_000_000,
            wasted_by_cause={"retry": 1_000_000_000},
        ),
        tried("w2", 1, 5, error=broken("no", "budget_exceeded"), refused_by="agent:writer/daily", **held),
        # Of another one: no part of this page.
        ended(
            "x1",
            5,
            tried("x1", 1, 5, agent="x", cost=8_000_000_000, outcome="error", error=broken("x is down")),
            tried("x1", 2, 5, agent="x", cost=7_000_000_000, cause="retry"),
            agent="x",
            wasted_cost=8_000_000_000,
            wasted_by_cause={"retry": 8_000_000_000},
        ),
    )
    page = await console.get("/agents/writer")
    assert page.status == 200
    for reported in (
        "writer unhealthy",
        "Success rate 100 % 1 execution, 0 failed",
        "Spend $3.00 2 calls",
        "Wasted $1.00 33.3 % of spend",
        "Jobs waiting now 7 2 running, of 8 in parallel",
        "Exhausted limits 1 of 1",
        "Retries 1 0 fallbacks",
        "gpt-4.1 first choice unhealthy it is unhealthy open 3 jobs in a row failed (threshold: 3) 0",
        "free healthy it is healthy off – 0",
        "Retrying helped: the one execution that was retried succeeded. The retries cost $2.00.",
        "gpt-4.1 1 0 300 ms 300 ms 38",
        "server the cable is cut 1 $1.00 gpt-4.1",
        "the limit agent:writer/daily 1",
        "daily hard limit $5.00 $5.00",
        "monthly $9.00 no monthly limit",
        "w/1 succeeded gpt-4.1 2 $0.00100 1.0 s",
    ):
        assert reported in page.words, reported
    for others in ("of another agent", "x is down", "x1", "$8.00", "$7.00", "$15.00"):
        assert others not in page.words
    for address in (
        "/executions/w%2F1",
        "/executions?agent=writer&amp;window=15m",
        "/executions?agent=writer&amp;error_kind=server&amp;window=15m",
        "/breakers/one?agent=writer&amp;model=gpt-4.1",
        "/budgets/agent%3Awriter%2Fdaily",
    ):
        assert f'href="{address}"' in page.text, address
    assert '<a href="/executions?agent=writer&amp;window=15m">failed, then retried</a>' in page.text
    [asked] = [query for (path, _), query in zip(console.interface.asked, console.interface.queries, strict=True)
               if path == "GET budgets"]  # fmt: skip
    assert asked == {"agent": "writer"}


async def test_an_agent_of_any_name_has_its_page(console: Console):
    for name in (ODD, EVIL):
        answer(console.interface, agents=[health(name)], queues=[queue(name, 3, 1)])
        await store(
            console,
            ended(name, 5, tried(name, 1, 5, agent=name, outcome="error", error=broken(EVIL), model=EVIL), agent=name),
        )
        agents = await console.get("/agents")
        found = re.search(r'<th scope="row" class="name"><a href="(/agents/[^"]*)">', agents.text)
        assert found
        page = await console.get(unescape(found[1]))
        assert page.status == 200
        assert f"<h1>{name}" not in page.text or name == ODD
        assert "Jobs waiting now 3 1 running" in page.words
        assert "1 execution, 0 failed" in page.words
        for one in (agents, page):
            assert "<script>" not in one.text.replace("<script src", "")
            assert name in one.words


async def test_one_that_is_unknown_is_reported_so(console: Console):
    answer(console.interface, agents=[health("writer")])
    for path in ("budgets", "alerts"):
        console.interface.answers[f"GET {path}"] = (404, problem("unknown_agent", "no agent 'ghost' is known"))
    page = await console.get("/agents/ghost?window=1h")
    assert page.status == 404
    assert "Nothing is known about ghost in the last 1h" in page.words
    assert (await console.get("/agents/")).status == 404
    # One that ran, and was taken out of the config since.
    await store(console, ended("g1", 5, agent="ghost"))
    page = await console.get("/agents/ghost?window=1h")
    assert page.status == 200
    assert "This agent is not configured now; this page shows what it did before." in page.words


async def test_one_that_never_ran_says_what_would_appear(console: Console):
    answer(console.interface, agents=[health("new")])
    page = await console.get("/agents/new")
    assert page.status == 200
    for reported in ("Nothing ran", "Nothing was wasted", "Nothing was retried", "No call failed", "Nothing ended"):
        assert f"{reported} in the last 24h" in page.words
    assert "breakwater submit --agent new" in page.words
    assert "agents.new.budget" in page.words


async def test_what_can_not_be_had_is_reported_once_and_the_rest_is_shown(interface: Stub):
    answer(interface, agents=[health("writer", "degraded")], queues=[queue("writer", 7, 2)])
    nowhere = f"http://127.0.0.1:{free_port()}/breakwater"
    async with visiting(interface, nowhere, connect(nowhere)) as visitor:
        await visitor.sign_in()
        agents, page = await visitor.get("/agents"), await visitor.get("/agents/writer")
        interface.answers["GET queues"] = (503, problem("unavailable", "NATS is away"))
        without_both = await visitor.get("/agents/writer")
    assert "writer degraded it is degraded – – – – – – – 7 / 2" in agents.words
    assert "Jobs waiting now 7" in page.words
    for one in (agents, page):
        assert one.status == 200
        assert one.words.count("ClickHouse does not respond") == 1
        assert one.text.count('role="alert"') == one.text.count('data-away="ClickHouse"') == 1
    assert without_both.words.count("NATS is away") == 1
    assert "Jobs waiting now – unknown now" in without_both.words


NOTHING = RetryFigures(retried=0, saved=0, cost=0, fell_back=0, saved_by_fallback=0)


@each_row(
    ("figures", "said"),
    [
        (NOTHING, ["Nothing was retried in the last 24h."]),
        (
            RetryFigures(52, 41, 30_000_000, 0, 0),
            ["Retrying helped: 41 of 52 executions that were retried succeeded (78.8 %). The retries cost $0.03."],
        ),
        (
            RetryFigures(1_000, 3, 2_500_000_000, 0, 0),
            [
                "Retrying sometimes helped: 3 of 1,000 executions that were retried succeeded (0.3 %). "
                "The retries cost $2.50."
            ],
        ),
        (
            RetryFigures(4, 0, 0, 2, 1),
            [
                "Retrying did not help: 0 of 4 executions that were retried succeeded (0 %). The retries cost $0.00.",
                "Falling back to another model helped: 1 of 2 executions that fell back succeeded (50 %).",
            ],
        ),
        (
            RetryFigures(0, 0, 0, 1, 0),
            ["Falling back to another model did not help: the one execution that fell back failed."],
        ),
    ],
)
def test_whether_trying_again_helped_is_reported_in_words(figures: RetryFigures, said: "list[str]"):
    assert list(retry_benefit(figures, "in the last 24h")) == said


@each_row(
    ("kind", "by", "called", "expected"),
    [
        ("rate_limit", None, True, "the provider's rate limit"),
        ("rate_limit", "provider:openai", False, "the rate limit of provider openai"),
        ("budget_exceeded", "global/daily", False, "the limit global/daily"),
        ("budget_exceeded", None, False, "a limit"),
        ("breaker_open", None, False, "an open breaker"),
        ("retry_budget", None, False, "the retry budget"),
        ("guard_tripped", None, False, "a task's guard"),
        ("context_overflow", None, False, "context overflow"),
        ("", None, False, "the plane"),
    ],
)
def test_what_held_a_call_back_is_reported_in_words(kind: str, by: str | None, called: bool, expected: str):
    assert refused_by(kind, by, called=called) == expected
