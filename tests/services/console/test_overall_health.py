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
from tests.api_documents import AT, breaker, budget, health, incident, model, queue, service
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


def of_plane(totals: WindowTotals | None, now: LiveState) -> OverallHealth:
    return overall_health(totals, now, "in the last 24h", "/executions?status=dead_lettered")


def summary(totals: WindowTotals | None, now: LiveState) -> tuple[str, str | list[str]]:
    """Its tone, and its sentence or the titles of all cards, also of those that have no room."""
    health = of_plane(totals, now)
    cards = [f"{card.title}{f' +{card.more}' if card.more else ''}" for card in (*health.cards, *health.overflow)]
    assert bool(cards) != bool(health.text)
    return health.tone, health.text or cards


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
        (QUIET, live(breakers=[breaker("a", "m", "half_open")]), "", ["The breaker of a on m is half-open"]),
        (ended(95, failed=5), FINE, "warn", ["5 % of executions failed in the last 24h"]),
        (ended(79, failed=21), FINE, "bad", ["21 % of executions failed in the last 24h"]),
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
            [
                "The breaker of a on m is open +1",
                "The daily limit of the plane is exhausted",
                "The breaker of c on m is half-open",
            ],
        ),
        (QUIET, live(breakers=[breaker("a", "m", "isolated")]), "bad", ["The breaker of a on m is isolated"]),
        (QUIET, live(alive=False), "bad", ["No breaker service is running"]),
        # While counters are rebuilt, their figures mean nothing.
        (
            QUIET,
            live(filled=False, budgets=[budget("global/daily", "5")]),
            "bad",
            ["The counters of limits are being rebuilt from the records"],
        ),
        (QUIET, live(services=[service("sink-events", 1_001)]), "bad", ["sink is behind by 1,001 messages"]),
        (QUIET, live(services=[service("sink-events", 1_000, 50_000)]), "good", None),
        (
            QUIET,
            live(services=[service("sink-events", None, None)]),
            "bad",
            ["sink-events has no queue"],
        ),
        (QUIET, live(queues=[queue("writer", 3, 0)]), "warn", ["Jobs of writer are waiting and none is running"]),
        (
            QUIET,
            live(queues=[queue("writer", 3, 0), queue("reader", 1, 0), queue("busy", 99, 1), queue("idle")]),
            "warn",
            ["Jobs of writer are waiting and none is running +1"],
        ),
        # Whoever acknowledged one is at it.
        (QUIET, live(alerts=[incident(1, status="acknowledged")]), "good", None),
        (QUIET, live(alerts=[incident(1, "warning", "pending")]), "warn", ["writer is stopped"]),
        # The worst comes first.
        (
            ended(90, failed=10),
            live(
                agents=[health("a", "degraded"), health("b", "unhealthy")],
                alerts=[incident(1, "warning"), incident(2), incident(3)],
            ),
            "bad",
            [
                "writer is stopped +1",
                "b is unhealthy",
                "writer is stopped",
                "a is degraded",
                "10 % of executions failed in the last 24h",
            ],
        ),
        (None, FINE, "warn", "No problems are known, but not everything could be checked."),
    ],
)
def test_what_is_amiss_is_a_card_by_severity_and_calm_is_one_sentence(
    totals: WindowTotals | None, now: LiveState, tone: str, text: str | list[str] | None
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


def test_every_card_leads_to_where_one_acts():
    now = live(
        agents=[health("a", "unhealthy")],
        breakers=[breaker("a", "m", "open")],
        budgets=[budget("global/daily", "5")],
        alerts=[incident(1)],
        queues=[queue("a", 1, 0)],
        services=[service("sink-events", 5_000)],
    )
    overall = of_plane(ended(0, failed=1), now)
    assert {card.problem.href for card in (*overall.cards, *overall.overflow)} == {
        "/agents/a",
        "/alerts/inc_1",
        "/breakers/one?agent=a&model=m",
        "/budgets/global%2Fdaily",
        "/executions?status=dead_lettered",
        "/#services",
    }


def test_there_are_up_to_three_cards_and_the_others_are_counted_with_their_links():
    breakers = [breaker(agent, "m", "open") for agent in "abcd"]
    budgets = [budget("global/daily", "5"), budget("agent:a/daily", "1", "1", "soft")]
    overall = of_plane(ended(0, failed=1), live(breakers=breakers, budgets=budgets, queues=[queue("a", 1, 0)]))
    assert [(card.problem.severity, card.title, card.more) for card in overall.cards] == [
        ("critical", "The breaker of a on m is open", 3),
        ("critical", "The daily limit of the plane is exhausted", 0),
        ("critical", "100 % of executions failed in the last 24h", 0),
    ]
    assert [card.title for card in overall.overflow] == [
        "The daily limit of a is exhausted",
        "Jobs of a are waiting and none is running",
    ]
    assert overall.overflow_count == 2


def test_the_incident_of_an_open_breaker_or_an_exhausted_budget_has_no_second_card():
    cap = {"event": "budget_hard_cap", "first_event": "budget_hard_cap", "key": "budget_hard_cap/agent/a/daily/1/100"}
    payload = {"scope": "agent", "agent": "a", "window": "daily"}
    now = live(
        agents=[health("writer", "unhealthy", model("gpt-4.1", "open", "unhealthy"))],
        breakers=[breaker("writer", "gpt-4.1", "open")],
        budgets=[budget("agent:a/daily", "1", "1")],
        alerts=[
            incident(1, model="gpt-4.1"),
            incident(2, **cap, payload=payload),
            incident(3, **cap, payload={**payload, "agent": "b"}, title="Limit refuses calls: b, daily"),
        ],
    )
    assert summary(QUIET, now)[1] == [
        "The breaker of writer on gpt-4.1 is open",
        "The daily limit of a is exhausted",
        "Limit refuses calls: b, daily",
    ]


def test_what_stops_one_caller_or_tenant_is_a_warning():
    for_one = {**breaker("a", "m", "open"), "open_for": "key app"}
    overall = of_plane(QUIET, live(breakers=[for_one], budgets=[budget("tenant:acme/daily", "5")]))
    assert [card.problem.severity for card in overall.cards] == ["warning", "warning"]
    assert overall.tone == "warn"


def test_the_oldest_problem_of_a_kind_is_on_its_card():
    since = {"a": "2026-11-21T10:00:00.000Z", "b": "2026-11-21T09:00:00.000Z"}
    now = live(breakers=[breaker(agent, "m", "open", since=at) for agent, at in since.items()])
    [card] = of_plane(QUIET, now).cards
    assert (card.title, card.more) == ("The breaker of b on m is open", 1)


FAILED_JOBS = {
    "event": "retries_exhausted",
    "first_event": "retries_exhausted",
    "key": "retries_exhausted/writer/error",
    "payload": {"execution_id": "e1", "reason": "error"},
    "count": 12,
}


@each_row(
    ("fields", "path", "sent"),
    [
        (
            FAILED_JOBS,
            "/dead-letters/replay",
            {
                "all": "1",
                "window": "7d",
                "total": "12",
                "agent": "writer",
                "reason": "error",
                "since": "2026-11-21T09:59:00.000Z",
            },
        ),
        # A dead letter that is no job's can't be run again.
        (
            {**FAILED_JOBS, "payload": {"reason": "undeliverable"}},
            "/alerts/ack",
            {"incident_id": "inc_1"},
        ),
        (
            {
                "event": "guard_tripped",
                "first_event": "guard_tripped",
                "key": "guard_tripped/acme/t1",
                "tenant": "acme",
                "payload": {"task_key": "t1"},
            },
            "/breakers/tasks/reset",
            {"task_id": "t1", "tenant": "acme"},
        ),
        (
            {"event": "quota_exhausted", "first_event": None, "key": "quota_exhausted/openai"},
            "/alerts/ack",
            {"incident_id": "inc_1"},
        ),
    ],
)
def test_the_button_of_an_incident_ends_it_or_acknowledges_it(fields: dict[str, Any], path: str, sent: dict[str, str]):
    [card] = of_plane(QUIET, live(alerts=[incident(1, **fields)])).cards
    assert card.problem.action is not None
    assert (card.problem.action.path, card.problem.action.fields) == (path, sent)


def test_a_budget_that_is_not_exhausted_yet_can_be_raised_on_the_card_of_its_incident():
    soft = {"event": "budget_soft_cap", "key": "budget_soft_cap/global//daily/1/80"}
    alert = incident(
        1, "warning", **soft, first_event="budget_soft_cap", payload={"scope": "global", "window": "daily"}
    )
    [card] = of_plane(QUIET, live(alerts=[alert], budgets=[budget("global/daily", "4")])).cards
    assert card.problem.raised_budget is not None
    assert (card.title, card.problem.raised_budget.budget) == ("writer is stopped", "global/daily")


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
