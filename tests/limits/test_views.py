"""What is shown of budgets, of stopped tasks, and of the comparison of their counters with the record."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from breakwater.kernel.columns import clock
from breakwater.kernel.types import format_time
from breakwater.limits.contract import BudgetReconciliation, BudgetStatus, StoppedTask
from breakwater.limits.views import COLUMNS, RECONCILIATION, TASKS, differs, no_cap_text, tone, used_share
from tests.api_documents import budget, reconciled, stopped_task
from tests.columns import texts, tones
from tests.tables import each_row


def status(name: str = "global/daily", **fields: Any) -> BudgetStatus:
    # With room for the time from here to the assertion.
    resets_at = format_time(datetime.now(UTC) + timedelta(hours=9, minutes=59))
    return BudgetStatus.model_validate(budget(name, **{"resets_at": resets_at} | fields))


def test_a_budget_shows_what_is_spent_in_flight_and_left_of_its_cap() -> None:
    accuracy = {"calls": 1_200, "reserved": "1", "cost": "0.21", "percent": 21.04, "exceeded": 0}
    amounts = {"limit": "50", "spent": "8.4123", "reserved": "0.001234567", "remaining": "41.586465433"}
    writer = status("agent:writer/daily", **amounts, calls=1_200, estimate=accuracy)
    assert texts(COLUMNS, writer) == {
        "budget": "agent:writer/daily",
        "limit": "$50.00",
        "spent": "$8.41",
        "in flight": "$0.00123",
        "free": "$41.59",
        "used": "16.8 %",
        "resets": "in 10 h",
        "mode": "hard",
        "est.": "21 %",
        "calls": "1200",
        "calls_of_unknown_cost": "0",
    }
    assert tones(COLUMNS, writer) == {}


def test_a_budget_without_a_cap_has_nothing_that_a_cap_has() -> None:
    uncapped = status(limit=None, spent="1234.56", calls_of_unknown_cost=2)
    shown = texts(COLUMNS, uncapped)
    assert {"limit", "free", "used", "mode", "est."}.isdisjoint(shown)
    assert shown["spent"] == "$1,234.56+", "calls of unknown cost may have cost more"


def test_a_reached_cap_says_so_where_something_is_left_and_estimates_that_were_exceeded_are_marked() -> None:
    accuracy = {"calls": 9, "reserved": "1", "cost": "1.04", "percent": 104.0, "exceeded": 3}
    refusing = status(limit="10", spent="9.99", remaining="0.01", reached=True, estimate=accuracy)
    assert texts(COLUMNS, refusing)["free"] == "$0.01, reached"
    assert tones(COLUMNS, refusing) == {"spent": "bad", "free": "bad", "est.": "bad"}


@each_row(
    ("fields", "expected_tone", "share"),
    [
        ({"limit": "10", "spent": "8"}, "", 0.8),
        ({"limit": "10", "spent": "8.000000001"}, "warn", 0.8000000001),
        ({"limit": "10", "spent": "7", "reserved": "1.5"}, "warn", 0.85),
        ({"limit": "10", "spent": "10"}, "bad", 1.0),
        ({"limit": "10", "spent": "1", "reached": True}, "bad", 0.1),
        ({"limit": "0", "spent": "0"}, "bad", 1.0),
        ({"limit": None, "spent": "700"}, "", None),
    ],
)
def test_a_budget_is_coloured_by_what_is_used_of_its_cap(
    fields: dict[str, Any], expected_tone: str, share: float | None
) -> None:
    assert (tone(status(**fields)), used_share(status(**fields))) == (expected_tone, share)


def test_a_budget_without_a_cap_names_the_cap_of_its_other_window() -> None:
    month = status("agent:writer/monthly", limit=None)
    day = status("agent:writer/daily", limit="0.004752")
    other = status("agent:reader/monthly", limit=None)
    said = [no_cap_text(uncapped, (month, day, other)) for uncapped in (month, other)]
    assert said == ["no monthly limit, daily limit $0.00475", "no limit"]


def test_a_comparison_shows_every_amount_to_the_nano_dollar_and_marks_a_difference() -> None:
    equal = BudgetReconciliation.model_validate(reconciled())
    assert texts(RECONCILIATION, equal) == {
        "budget": "global/daily",
        "period": "2026-11-21",
        "Redis": "$8.4123",
        "ClickHouse": "$8.00",
        "EVENTS": "$0.4123",
        "unrecorded": "$0.00",
        "difference": "$0.00",
        "calls": "12",
    }
    assert (differs(equal), tones(RECONCILIATION, equal)) == (False, {})
    by_a_nano = BudgetReconciliation.model_validate(reconciled(counted="8.412300001", difference="0.000000001"))
    shown = texts(RECONCILIATION, by_a_nano)
    assert (shown["Redis"], shown["difference"]) == ("$8.412300001", "$0.000000001")
    assert (differs(by_a_nano), tones(RECONCILIATION, by_a_nano)) == (True, {"difference": "bad"})
    by_a_call = BudgetReconciliation.model_validate(reconciled(counted_calls=13))
    assert texts(RECONCILIATION, by_a_call)["calls"] == "13 counted, 12 recorded"
    assert (differs(by_a_call), tones(RECONCILIATION, by_a_call)) == (True, {"difference": "bad", "calls": "warn"})


def test_a_stopped_task_shows_its_rule_and_what_exceeded_it() -> None:
    since = datetime.now(UTC) - timedelta(minutes=3)
    stopped = StoppedTask.model_validate(stopped_task(since=format_time(since)))
    assert texts(TASKS, stopped) == {
        "task": "t1",
        "tenant": "acme",
        "agent": "writer",
        "rule": "max_cost",
        "since": clock(since),
        "execution": "e9",
        "reason": "$10.50 spent (limit: $10.00)",
    }
    assert tones(TASKS, stopped) == {"rule": "bad"}
    of_nobody = StoppedTask.model_validate(stopped_task(tenant=None, execution_id=None))
    assert {"tenant", "execution"}.isdisjoint(texts(TASKS, of_nobody))
