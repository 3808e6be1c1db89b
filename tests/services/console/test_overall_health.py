"""Whether all is well, in words."""

from dataclasses import replace
from typing import Any

from breakwater.alerts.contract import AlertList
from breakwater.breakers.contract import AgentHealth, BreakerList
from breakwater.health.pages.overall_health import LiveState, OverallHealth, is_spent, overall_health, shares
from breakwater.identity.pages.rendering import PagePart
from breakwater.kernel.http.contract import Queues
from breakwater.limits.contract import BudgetList, BudgetStatus
from breakwater.records.figures import WindowTotals
from tests.api_documents import AT, breaker, budget, health, incident, queue, service
from tests.tables import each_row

QUIET = WindowTotals(
    executions=0,
    succeeded=0,
    dead_lettered=0,
    calls=0,
    failed_calls=0,
    retries=0,
    fallbacks=0,
    short_circuits=0,
    cache_hits=0,
    p50_ms=None,
    p95_ms=None,
    spend=0,
    wasted=0,
    unknown_costs=0,
    unknown_waste=0,
)


def ended(succeeded: int, failed: int = 0, cancelled: int = 0) -> WindowTotals:
    return replace(QUIET, executions=succeeded + failed + cancelled, succeeded=succeeded, dead_lettered=failed)


def live(
    *,
    agents: Any = (),
    breakers: Any = (),
    alive: bool = True,
    budgets: Any = (),
    filled: bool = True,
    alerts: Any = (),
    queues: Any = (),
    services: Any = (),
) -> LiveState:
    return LiveState(
        PagePart([AgentHealth.model_validate(one) for one in agents]),
        PagePart(BreakerList.model_validate({"breakers": breakers, "alive": alive})),
        PagePart(BudgetList.model_validate({"filled": filled, "budgets": budgets})),
        PagePart(AlertList.model_validate({"alerts": alerts, "more": False, "channels": 1})),
        PagePart(Queues.model_validate({"agents": queues, "parked": 0, "services": services, "at": AT})),
    )


def summary(totals: WindowTotals | None, now: LiveState) -> tuple[str, str]:
    found: OverallHealth = overall_health(totals, now, "in the last 24h", "/executions?status=dead_lettered")
    *others, last = [one.text for one in found.remarks] or [""]
    return found.tone, found.text or f"{' and '.join([*([', '.join(others)] if others else []), last])}."


FINE = live(agents=[health("writer")], breakers=[breaker("writer", "m")], budgets=[budget("global/daily", "4.99")])


@each_row(
    ("totals", "now", "tone", "text"),
    [
        (QUIET, FINE, "good", "All is well: nothing ran in the last 24h, and there are no problems."),
        (ended(1), FINE, "good", "All is well: one execution succeeded in the last 24h, and no breaker is open."),
        (
            ended(1_200),
            FINE,
            "good",
            "All is well: all 1,200 executions succeeded in the last 24h, and no breaker is open.",
        ),
        (
            ended(992, failed=8),
            FINE,
            "good",
            "All is well: only 8 of 1,000 executions failed in the last 24h, and no breaker is open.",
        ),
        # One in a hundred is no alarm, and not all is well either.
        (ended(99, failed=1), FINE, "", "No problems now; 1 of 100 executions failed in the last 24h."),
        (
            ended(18_958, failed=829),
            FINE,
            "",
            "No problems now; 829 of 19,787 executions failed in the last 24h.",
        ),
        (
            replace(ended(99, failed=1), spend=200, wasted=54),
            FINE,
            "warn",
            "No problems now; 1 of 100 executions failed and 27 % of spend was wasted in the last 24h.",
        ),
        (
            replace(ended(9), spend=100, wasted=20),
            FINE,
            "warn",
            "No problems now; 20 % of spend was wasted in the last 24h.",
        ),
        (QUIET, live(breakers=[breaker("a", "m", "half_open")]), "warn", "1 breaker is half-open."),
        (ended(95, failed=5), FINE, "warn", "5 % of executions failed in the last 24h."),
        (ended(79, failed=21), FINE, "bad", "21 % of executions failed in the last 24h."),
        # Who cancels has not failed.
        (
            ended(50, cancelled=50),
            FINE,
            "good",
            "All is well: none of 100 executions failed in the last 24h, and no breaker is open.",
        ),
        (
            QUIET,
            live(
                breakers=[breaker("a", "m", "open"), breaker("b", "m", "open"), breaker("c", "m", "half_open")],
                budgets=[budget("global/daily", "5"), budget("agent:a/daily", "1", None)],
            ),
            "bad",
            "2 breakers are open, 1 budget is exhausted and 1 breaker is half-open.",
        ),
        (QUIET, live(breakers=[breaker("a", "m", "isolated")]), "bad", "1 breaker is isolated."),
        (QUIET, live(alive=False), "bad", "no breaker service is running, so failures open no breaker."),
        # While counters are rebuilt, their figures mean nothing.
        (
            QUIET,
            live(filled=False, budgets=[budget("global/daily", "5")]),
            "bad",
            "the budgets' counters are being rebuilt from the records.",
        ),
        (QUIET, live(services=[service("sink-events", 1_001)]), "bad", "sink is behind by 1,001 messages."),
        (QUIET, live(services=[service("sink-events", 1_000, 50_000)]), "good", None),
        (
            QUIET,
            live(services=[service("sink-events", None, None)]),
            "bad",
            "sink-events has no queue; run `breakwater setup`.",
        ),
        (QUIET, live(queues=[queue("writer", 3, 0)]), "warn", "jobs of writer are waiting and none is running."),
        (
            QUIET,
            live(queues=[queue("writer", 3, 0), queue("reader", 1, 0), queue("busy", 99, 1), queue("idle")]),
            "warn",
            "jobs of 2 agents are waiting and none is running.",
        ),
        # Whoever acknowledged one is at it.
        (QUIET, live(alerts=[incident(1, status="acknowledged")]), "good", None),
        (QUIET, live(alerts=[incident(1, "warning", "pending")]), "warn", "1 incident is unacknowledged."),
        # The worst comes first.
        (
            ended(90, failed=10),
            live(
                agents=[health("a", "degraded"), health("b", "unhealthy")],
                alerts=[incident(1, "warning"), incident(2), incident(3)],
            ),
            "bad",
            "2 critical incidents are unacknowledged, 1 agent is unhealthy, 1 other incident is unacknowledged, "
            "1 agent is degraded and 10 % of executions failed in the last 24h.",
        ),
        (None, FINE, "warn", "No problems are known, but not everything could be checked."),
    ],
)
def test_what_is_amiss_is_reported_in_one_line(
    totals: WindowTotals | None, now: LiveState, tone: str, text: str | None
):
    found = summary(totals, now)
    assert found[0] == tone
    if text is not None:
        assert found[1] == text


@each_row("part", ["agents", "breakers", "budgets", "incidents", "queues"])
def test_where_something_can_not_be_asked_nobody_says_that_all_is_well(part: str):
    away = replace(FINE, **{part: PagePart(None, "it is away")})
    assert away.problems == ("it is away",)
    assert summary(ended(10), away) == ("warn", "No problems are known, but not everything could be checked.")


def test_every_remark_leads_to_where_one_acts():
    now = live(
        agents=[health("a", "unhealthy")],
        breakers=[breaker("a", "m", "open")],
        budgets=[budget("global/daily", "5")],
        alerts=[incident(1)],
        queues=[queue("a", 1, 0)],
        services=[service("sink-events", 5_000)],
    )
    remarks = overall_health(ended(0, failed=1), now, "now", "/executions?status=dead_lettered").remarks
    assert {one.href for one in remarks} == {
        "/agents?sort=health",
        "/agents?sort=waiting",
        "/alerts",
        "/breakers",
        "/budgets",
        "/executions?status=dead_lettered",
        "/#services",
    }


@each_row(
    ("totals", "expected"),
    [
        (None, (None, None)),
        (QUIET, (None, None)),
        (replace(ended(3, failed=1), spend=200, wasted=50), (0.25, 0.25)),
        (replace(ended(1), spend=200, wasted=0), (0.0, 0.0)),
        # Who cancels has neither failed nor succeeded.
        (ended(3, failed=1, cancelled=4), (0.25, None)),
        (ended(0, cancelled=4), (None, None)),
        (replace(ended(1), spend=None, wasted=10), (0.0, None)),
        (replace(ended(1), spend=10, wasted=None), (0.0, None)),
        # What was spent before the window was wasted in it: no share of this.
        (replace(ended(1), spend=10, wasted=11), (0.0, None)),
    ],
)
def test_shares_are_reported_where_they_mean_something(
    totals: WindowTotals | None, expected: tuple[float | None, float | None]
):
    assert shares(totals) == expected


@each_row(
    ("limit", "amount", "held", "expected"),
    [
        ("5", "5", "0", True),
        ("5", "4.9", "0.1", True),
        ("5", "4.9", "0", False),
        (None, "9", "0", False),
        # A cap of nothing is meant so.
        ("0", "0", "0", False),
    ],
)
def test_a_budget_is_spent_when_nothing_is_left_of_its_cap(limit: str | None, amount: str, held: str, expected: bool):
    status = BudgetStatus.model_validate(budget("global/daily", amount, limit) | {"reserved": held})
    assert is_spent(status) is expected
