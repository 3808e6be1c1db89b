"""The first page: each of its questions answered from what is stored and from what the HTTP API returns."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from breakwater.identity.pages import visits
from breakwater.kernel.clickhouse.client import connect
from breakwater.local.ports import free_port
from breakwater.records import rows, schema
from tests.api_documents import answer, breaker, budget, health, incident, queue, service
from tests.cli.api_stub import Stub, problem
from tests.records import samples
from tests.records.samples import empty
from tests.services.console.conftest import Console, key_with, visiting
from tests.services.console.recorded import broken, ended, store, tried
from tests.services.console.test_overall_health import FAILED_JOBS
from tests.tables import each_row

EVIL = '<script>alert("1")</script>'


async def test_a_plane_where_nothing_ran_says_so_and_what_would_appear(console: Console):
    answer(console.interface, agents=[health("writer")], queues=[queue("writer")])
    page = await console.get("/")
    assert page.status == 200
    assert "All is well: nothing ran in the last 24h, and there are no problems." in page.words
    for reported in (
        "Nothing ran",
        "No call failed",
        "No call was blocked",
        "Nothing was wasted",
        "Nothing was spent",
        "No model was called",
    ):
        assert f"{reported} in the last 24h" in page.words
    assert "Success rate – 0 executions, 0 failed" in page.words


async def test_views_of_a_moment_share_the_reads_that_are_not_of_the_sums(
    console: Console, monkeypatch: pytest.MonkeyPatch
):
    answer(console.interface)
    reads: list[str] = []

    def counting(name: str) -> Any:
        read = getattr(visits, name)

        async def count(*arguments: Any, **options: Any) -> Any:
            reads.append(name)
            return await read(*arguments, **options)

        return count

    for name in ("first_begun", "config_changes"):
        monkeypatch.setattr(visits, name, counting(name))
    for _ in range(2):
        await console.get("/")
    assert sorted(reads) == ["config_changes"] * 2 + ["first_begun"] * 2
    monkeypatch.setattr(visits, "FIRST_RUN_AGE_S", 60.0)
    monkeypatch.setattr(visits, "CHANGES_AGE_S", 60.0)
    for path in ("/", "/", "/agents/writer"):
        await console.get(path)
    assert len(reads) == 4, "they read nothing more"


async def test_the_five_questions_are_answered(console: Console):
    answer(
        console.interface,
        agents=[health("writer")],
        breakers=[breaker("writer", "gpt-4.1", "open"), breaker("reader", "gpt-4.1")],
        budgets=[budget("global/daily", "5"), budget("agent:writer/daily", "1")],
        alerts=[incident(1), incident(2, "warning", "acknowledged")],
        queues=[queue("writer", 7, 2), queue("reader", 0, 1)],
        parked=4,
        services=[service("sink-events", 12_000, 30), service("alerter-channel-ops"), service("alerter-dead-letters")],
    )
    down = broken("the cable is cut")
    await store(
        console,
        ended("a1", 10, tried("a1", 1, 10, cost=3_000_000_000), duration_ms=4_000),
        ended(
            "a2",
            20,
            tried("a2", 1, 21, cost=1_000_000_000, outcome="error", error=down, tenant="acme"),
            tried("a2", 2, 20, cost=0, outcome="error", error=down, cause="retry", tenant="acme"),
            status="dead_lettered",
            reason="error",
            error=down,
            tenant="acme",
            wasted_cost=1_000_000_000,
            wasted_by_cause={"retry": 1_000_000_000},
            duration_ms=4_000,
        ),
        tried(
            "a3",
            1,
            5,
            outcome="short_circuited",
            short_circuited=True,
            cost=None,
            refused_by="agent:writer/daily",
            error=broken("no room", "budget_exceeded"),
        ),
        # Before the window.
        ended("old", 60 * 25, tried("old", 1, 60 * 25, cost=9_000_000_000), wasted_cost=9_000_000_000),
    )
    page = await console.get("/")
    assert re.search(r"since \w{3} \d\d \d\d:\d\d UTC, without dry runs", page.words)
    assert "Success rate 50 % 2 executions, 1 failed" in page.words
    assert "Spend $4.00 3 calls" in page.words
    assert "Wasted $1.00 25 % of spend" in page.words
    assert "p95 latency 4.0 s" in page.words
    assert "Jobs waiting now 7 3 running, 4 parked" in page.words
    assert "Open breakers 1 of 2" in page.words
    assert "Exhausted limits 1 of 2" in page.words
    assert "Open incidents 2 1 critical" in page.words
    ago = r"\d+ (s|min|h|d) ago"
    for card in (
        rf"The breaker of writer on gpt-4.1 is open critical {ago} Reset: let its calls through…",
        r"The daily limit of the plane is exhausted critical \$5\.00 of \$5\.00 is spent: calls that might exceed "
        r"it are refused\. Raise: let more calls through…",
        "sink is behind by 12,000 messages critical and 2 more: writer is stopped , 50 % of executions failed in the "
        r"last 1h \.",
    ):
        assert re.search(card, page.words), card
    assert "server the cable is cut 2 $1.00 writer " in page.words
    assert "/executions?agent=writer&amp;error_kind=server&amp;window=1h" in page.text
    assert "writer the limit agent:writer/daily 1" in page.words
    assert "no room" not in page.words
    assert "writer failed, then retried $1.00 1" in page.words
    assert "gpt-4.1 openai healthy it is healthy 33.3 % 3 1 0 2 0 0" in page.words
    assert "sink stores events behind 12,000 30" in page.words
    assert "alerter delivers alerts to the channel ops up to date 0 0" in page.words
    assert "alerter raises alerts on dead letters up to date 0 0" in page.words


async def test_a_card_has_one_button_that_does_what_it_says_for_those_who_may_press_it(visited: Console):
    answer(
        visited.interface,
        breakers=[breaker("writer", "gpt-4.1", "open")],
        budgets=[budget("global/daily", "5")],
        alerts=[incident(1, "warning", **FAILED_JOBS)],
    )
    buttons = ("Reset: let its calls through…", "Raise: let more calls through…", "Replay: run its failed jobs again…")
    for scopes, seen in {
        ("read", "operate"): buttons,
        ("read", "approve"): buttons[1:2],
        ("read",): (),
    }.items():
        visited.interface.answers["GET key"] = key_with(*scopes)
        await visited.sign_in()
        page = await visited.get("/")
        assert "The breaker of writer on gpt-4.1 is open critical" in page.words
        assert tuple(button for button in buttons if button in page.words) == seen, scopes
    visited.interface.answers["GET key"] = key_with("read", "operate")
    await visited.sign_in()
    visited.interface.answers["POST breakers/reset"] = 200, {}
    visited.interface.answers["POST dlq/replay"] = 200, {"replayed": [], "already": 0, "skipped": []}
    fields = {"agent": "writer", "reason": "error", "since": "2026-11-21T09:59:00.000Z", "all": "1"}
    csrf = (await visited.get("/")).csrf
    reset = {"agent": "writer", "model": "gpt-4.1", "reason": "it is back"}
    await visited.post("/breakers/reset", {"csrf": csrf, **reset}, follow=False)
    await visited.post("/dead-letters/replay", {"csrf": csrf, **fields, "why": "it is back"}, follow=False)
    posted = [(what, body) for what, body in visited.interface.asked if what.startswith("POST")]
    assert posted == [
        ("POST breakers/reset", reset),
        (
            "POST dlq/replay",
            {
                "why": "it is back",
                "reason": "error",
                "agent": "writer",
                "since": "2026-11-21T09:59:00.000Z",
            },
        ),
    ]


async def test_a_provider_is_not_blamed_for_our_mistakes_and_its_columns_add_up(console: Console):
    answer(console.interface)
    kinds = ("logic", "context_overflow", "client", "rate_limit")
    failed = [
        tried("a1", number, 5, outcome="error", error=broken("no use", kind)) for number, kind in enumerate(kinds, 1)
    ]
    lost = tried("a2", 1, 5, model="down", outcome="error", error=broken("cut", "network"))
    await store(console, *failed, tried("a1", 5, 5), lost)
    page = await console.get("/")
    assert "gpt-4.1 openai – 100 % 5 1 1 0 0 3" in page.words
    assert "down openai – 0 % 1 0 0 0 1 0" in page.words
    # Only the one that is down is red.
    assert page.text.count("bad-text") == 2, "in the table, and above it"


async def test_what_was_lost_is_reported_though_nothing_is_open(console: Console):
    answer(console.interface)
    lost = ended("w0", 5, status="dead_lettered")
    await store(console, lost, *(ended(f"w{number}", 5) for number in range(1, 50)))
    page = await console.get("/")
    assert "No problems now; 1 of 50 executions failed in the last 15m." in page.words
    assert "All is well" not in page.words


async def test_who_spends_is_reported_by_agent_tenant_and_model(console: Console):
    answer(console.interface)
    await store(
        console,
        tried("a1", 1, 5, cost=2_000_000_000, tenant="acme", model="big"),
        tried("a2", 1, 5, cost=1_000_000_000, agent="reader", model="small", outcome="error"),
        tried("a3", 1, 5, cost=None, cost_basis="unknown", agent="reader", model="small"),
    )
    by_agent = await console.get("/?window=1h")
    assert "writer 1 $2.00 $0.00 reader 2 $1.00 at least $1.00" in by_agent.words
    assert 'href="/?window=1h&amp;by=tenant#spend"' in by_agent.text
    by_tenant = await console.get("/?window=1h&by=tenant")
    assert "acme 1 $2.00 $0.00 no tenant 2 $1.00 at least $1.00" in by_tenant.words
    assert 'href="/executions?tenant=acme&amp;window=1h"' in by_tenant.text
    # The choice is kept when another window is chosen.
    assert 'href="/?by=tenant&amp;window=7d"' in by_tenant.text
    by_model = await console.get("/?by=model")
    assert "big 1 $2.00 $0.00 small 2 $1.00 at least $1.00" in by_model.words


async def test_what_is_not_known_is_reported_neither_as_nothing_nor_as_all(console: Console):
    answer(console.interface)
    unknown = {"cost": None, "cost_basis": "unknown", "outcome": "error", "error": broken("it is down")}
    lost = {"status": "dead_lettered", "total_cost": None, "wasted_cost": None, "cost_basis": "unknown"}
    await store(console, ended("w1", 5, tried("w1", 1, 5, **unknown), **lost))
    page = await console.get("/")
    assert "Spend unknown" in page.words
    assert "Waste in the last 15m is unknown" in page.words
    assert "writer 1 unknown unknown" in page.words
    for reported in ("nothing was spent", "Nothing was wasted", "at least"):
        assert reported not in page.words, reported
    await store(
        console,
        ended(
            "w2",
            6,
            tried("w2", 1, 6, cost=5_000_000_000, outcome="error", error=broken("it is down")),
            status="dead_lettered",
            total_cost=5_000_000_000,
            wasted_cost=5_000_000_000,
            wasted_by_cause={"failed": 5_000_000_000},
        ),
    )
    page = await console.get("/")
    assert "Spend $5.00 at least" in page.words
    assert "server it is down 2 $5.00 at least writer " in page.words
    assert "the job failed $5.00 1 At least this much: 1 execution wasted an unknown amount." in page.words
    assert "writer 2 $5.00 at least $5.00 at least" in page.words
    assert "– / – $5.00 at least" in page.words
    of_agents = (await console.get("/agents")).words
    assert "writer not configured 0 % 2 1.0 s 0 $5.00 at least $5.00 at least" in of_agents


async def test_what_agents_and_providers_write_stays_text(console: Console):
    answer(
        console.interface,
        queues=[queue(EVIL, 1, 0)],
        services=[service("alerter-channel-%3Cscript%3E")],
    )
    bad = broken(EVIL)
    await store(
        console,
        ended(
            "a1",
            5,
            tried("a1", 1, 5, agent=EVIL, model=EVIL, provider=EVIL, tenant=EVIL, outcome="error", error=bad),
            agent=EVIL,
            status="dead_lettered",
            wasted_cost=1,
            wasted_by_cause={"failed": 1},
        ),
    )
    for by in ("tenant", "model", EVIL):  # what is no grouping is by agent
        page = await console.get(f"/?by={by}&window={EVIL}")
        assert page.status == 200
        assert "<script>" not in page.text.replace("<script src", "")
        assert EVIL in page.words
    assert "/agents/%3Cscript%3Ealert%28%221%22%29%3C%2Fscript%3E" in page.text


async def test_without_clickhouse_what_is_live_is_still_shown(interface: Stub):
    answer(interface, breakers=[breaker("writer", "m", "open")], queues=[queue("writer", 7, 2)])
    nowhere = f"http://127.0.0.1:{free_port()}/breakwater"
    async with visiting(interface, nowhere, connect(nowhere)) as visitor:
        await visitor.sign_in()
        page = await visitor.get("/")
    assert page.status == 200
    assert "The breaker of writer on m is open" in page.words
    assert "Jobs waiting now 7" in page.words
    assert "ClickHouse does not respond" in page.words
    assert "All is well" not in page.words


async def test_without_the_interface_what_is_recorded_is_still_shown(console: Console):
    for path in ("agents", "breakers", "budgets", "alerts", "queues"):
        console.interface.answers[f"GET {path}"] = (503, problem("unavailable", "Redis is away"))
    await store(console, ended("a1", 5, tried("a1", 1, 5)))
    page = await console.get("/")
    assert page.status == 200
    assert "Success rate 100 % 1 execution, 0 failed" in page.words
    assert page.words.count("Redis is away") == 2  # on top, and where the services would stand
    assert "No problems are known, but not everything could be checked." in page.words
    assert "Open breakers – unknown now" in page.words


async def test_sums_of_a_long_time_range_follow_and_are_asked_for_by_the_script(console: Console):
    answer(console.interface, breakers=[breaker("writer", "m", "open")], agents=[health("writer")])
    await store(console, ended("w1", 5, tried("w1", 1, 5, cost=2_000_000_000)))
    for path, known in (
        ("/", "The breaker of writer on m is open"),
        ("/agents/writer", "gpt-4.1"),
        ("/agents", "writer healthy it is healthy"),
    ):
        first = await console.get(f"{path}?window=30d")
        assert "data-pending" in first.text, path
        assert 'data-refresh-s="30"' in first.text, path
        assert known in first.words, path
        assert "$2.00" not in first.words, path
        assert 'href="?window=30d&amp;whole=1"' in first.text, "for those who run no scripts"
        whole = await console.get(f"{path}?window=30d", **{"X-Refresh": "1"})
        assert ("$2.00" in whole.words, "data-pending" in whole.text) == (True, False), path
    whole = await console.get("/agents?window=30d&whole=1")
    assert ("$2.00" in whole.words, "data-pending" in whole.text) == (True, False)


@each_row(
    ("minutes_ago", "picked"), [((2, 14), "15m"), ((2, 16), "1h"), ((59,), "1h"), ((2, 70), "24h"), ((1_500,), "24h")]
)
async def test_a_page_picks_the_shortest_range_that_holds_the_data(
    console: Console, minutes_ago: tuple[float, ...], picked: str
):
    await empty(console.analytics)
    await store(console, *(ended(f"a{ago}", ago, duration_ms=1_000) for ago in minutes_ago))
    page = await console.get("/breakers")  # which asks ClickHouse for least
    assert f'window={picked}" aria-current="true">{picked}</a>' in page.text


async def test_every_page_of_a_range_picks_it_by_the_data_unless_the_url_says_one(console: Console):
    answer(console.interface)
    await store(console, ended("a1", 16, duration_ms=1_000))
    for path in ("/", "/agents", "/agents/writer", "/executions"):
        assert 'window=1h" aria-current="true">1h</a>' in (await console.get(path)).text, path
    assert 'window=7d" aria-current="true">7d</a>' in (await console.get("/breakers?window=7d")).text


async def test_a_call_that_began_before_the_range_makes_it_longer(console: Console):
    answer(console.interface)
    await store(console, ended("a1", 10, duration_ms=600_000))
    assert "in the last 1h" in (await console.get("/")).words


async def test_the_charts_show_the_previous_period_and_the_configs_that_were_applied(console: Console):
    answer(console.interface, agents=[health("writer")])
    await store(
        console,
        ended("now", 10, tried("now", 1, 10, cost=3_000_000_000)),
        ended("before", 60 * 30, tried("before", 1, 60 * 30, cost=2_000_000_000)),
    )
    at = datetime.now(UTC) - timedelta(hours=2)
    fields = {"opened_at": at, "last_at": at, "at": at, "model": None, "agent": None}
    applied = {
        "event": "config_applied",
        "first_event": "config_applied",
        "payload": {"version": "3f9a1c", "by": "zoë"},
    }
    alerts = [samples.alert(f"a{version}", version=version, **fields, **applied) for version in (1, 2)]
    await console.analytics.insert(
        schema.ALERTS, [rows.alert_row(alert, number) for number, alert in enumerate(alerts)]
    )
    for path in ("/", "/agents/writer"):
        page = await console.get(f"{path}?window=24h")
        assert page.text.count("data-mark=") == 3, "one on each chart, though its incident changed"
        assert f"{at:%b %d %H:%M}: config version 3f9a1c was applied by zoë" in page.words
        assert re.search(r'data-style="thin"[^>]*>spent before', page.text)
        assert 'title="$2.00"' in page.text
