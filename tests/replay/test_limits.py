"""Limits that are set by API hold in a replay from the moment at which they were set."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from breakwater.jobs.contract.execution import Attempt
from breakwater.kernel.types import ms_from_time
from breakwater.limits.contract import BudgetEvent, LimitEvent, LimitRaise, LimitSettings
from breakwater.limits.rules.budget import LimitTable, OverBudget
from breakwater.limits.rules.limit import limit_of
from breakwater.replay.rules.counters import ReplayedCounters
from tests.limits.limit_tables import limit_table
from tests.limits.test_budgets_store import ZONE, caps
from tests.records.test_messages import attempt

AT = datetime(2026, 11, 30, 12, tzinfo=UTC)
USD = 1_000_000_000


def settings(amount: str, **fields: Any) -> LimitSettings:
    terms = {"scope": "key:bot", "usd": amount, "per": "day", "action": "refuse", **fields}
    return LimitSettings.model_validate(terms)


def change(kind: Any, at: datetime = AT, **fields: Any) -> LimitEvent:
    return LimitEvent(
        event_id=f"{kind}-{at}", kind=kind, limit_id="bot", scope="key:bot", by="ann", reason=None, at=at, **fields
    )


def call(number: int, cost: int, key: str = "bot") -> Attempt:
    return attempt(
        attempt_id=f"j{number}:1", agent="writer", tenant=None, submitted_by=key, user=None, team=None, cost_tags={},
        reserved=cost, cost=cost, cost_basis="billed", short_circuited=False,
    )  # fmt: skip


class Calls:
    """Calls in a replay under limits that change."""

    def __init__(self, *events: LimitEvent, table: LimitTable | None = None) -> None:
        self.published: list[BudgetEvent] = []
        limits = table or limit_table(caps(daily=100 * USD), {}, {})
        self.counters = ReplayedCounters(limits, ZONE, self.published.append, changes=events)
        self._number = 0

    def is_admitted(self, usd: int, at: datetime, **fields: Any) -> bool:
        self._number += 1
        made = call(self._number, usd * USD, **fields)
        if isinstance(self.counters.reserve(made, ms_from_time(at)), OverBudget):
            return False
        self.counters.settle(made, ms_from_time(at))
        return True


def test_a_limit_holds_from_its_making_until_its_end_and_counts_what_was_spent_before() -> None:
    created = change("created", after=settings("10"))
    lowered = change("changed", AT + timedelta(hours=1), before=settings("10"), after=settings("5"))
    deleted = change("deleted", AT + timedelta(hours=2), before=settings("5"))
    calls = Calls(created, lowered, deleted)
    assert calls.is_admitted(8, AT - timedelta(hours=1))
    calls.counters.change(created)
    assert not calls.is_admitted(3, AT)
    assert calls.is_admitted(3, AT, key="other")
    assert calls.is_admitted(2, AT)
    assert (calls.published[-1].kind, calls.published[-1].total) == ("hard_cap", 10 * USD)
    calls.counters.change(lowered)
    assert not calls.is_admitted(1, AT + timedelta(hours=1))
    calls.counters.change(deleted)
    assert calls.is_admitted(50, AT + timedelta(hours=2))


def test_limits_and_raises_end_by_themselves() -> None:
    until = AT + timedelta(hours=2)
    raised = LimitRaise(
        amount="20", configured="10", until=AT + timedelta(hours=1), scope="key:bot", by="ann", reason="more", at=AT
    )
    events = change("created", after=settings("10", until=until)), change("raised", raised=raised)
    calls = Calls(*events)
    for event in events:
        calls.counters.change(event)
    assert calls.is_admitted(15, AT)
    assert not calls.is_admitted(1, AT + timedelta(hours=1))
    assert calls.is_admitted(1, until)


def test_a_raise_that_a_person_ends_is_over_and_of_a_limit_of_the_config_too() -> None:
    table = limit_table(caps(daily=10 * USD), {}, {})
    [limit] = table.limits
    raised = LimitRaise(
        amount="20", configured="10", until=AT + timedelta(days=1), scope=None, by="ann", reason="more", at=AT
    )
    made = change("raised", raised=raised).model_copy(update={"limit_id": limit.id})
    ended = change("raise_ended", raised=raised).model_copy(update={"limit_id": limit.id})
    calls = Calls(made, ended, table=table)
    calls.counters.change(made)
    assert calls.is_admitted(15, AT)
    calls.counters.change(ended)
    assert not calls.is_admitted(1, AT)


def test_a_limit_of_the_config_in_the_same_place_counts_instead() -> None:
    table = LimitTable(limits=(limit_of("limits[0]", settings("4")),))
    created = change("created", after=settings("10"))
    calls = Calls(created, table=table)
    calls.counters.change(created)
    assert not calls.is_admitted(5, AT)
