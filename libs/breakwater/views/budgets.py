"""Budgets, and the comparison of their counters with the record."""

from __future__ import annotations

from breakwater.contracts.budgets import BudgetStatus
from breakwater.contracts.events import BudgetReconciliation
from breakwater.policy.formats import money, money_text
from breakwater.views.columns import Cell, Column, ahead

WARN_PERCENT = 80
"""A budget that has used more of its cap is a warning."""


def used(budget: BudgetStatus) -> float | None:
    """The share of the cap that is spent or reserved; None without a cap."""
    if budget.limit is None:
        return None
    return (budget.spent + budget.reserved) / budget.limit if budget.limit else 1.0


def tone(budget: BudgetStatus) -> str:
    """`bad` if the cap is reached, `warn` if it is near; otherwise empty."""
    if budget.limit is None:
        return ""
    taken = budget.spent + budget.reserved
    if budget.reached or taken >= budget.limit:
        return "bad"
    return "warn" if taken * 100 > budget.limit * WARN_PERCENT else ""


def short(nano: int | None) -> str:
    """An amount with the figures that count; empty for None."""
    return "" if nano is None else money_text(nano)


def _spent(budget: BudgetStatus) -> Cell:
    return short(budget.spent) + ("+" if budget.calls_of_unknown_cost else ""), tone(budget)


def _free(budget: BudgetStatus) -> Cell:
    # What is left may be more than nothing, and less than a call.
    return short(budget.remaining) + (", reached" if budget.reached and budget.remaining else ""), tone(budget)


def _estimate(budget: BudgetStatus) -> Cell:
    estimate = budget.estimate
    if estimate is None or estimate.percent is None:
        return ""
    return f"{estimate.percent:.0f} %", "bad" if estimate.exceeded else ""


COLUMNS: tuple[Column[BudgetStatus], ...] = (
    Column("budget", lambda one: one.budget),
    Column("cap", lambda one: one.limit, "usd", lambda one: short(one.limit)),
    Column("spent", lambda one: one.spent, "usd", _spent),
    Column("in flight", lambda one: one.reserved, "usd", lambda one: short(one.reserved), name="reserved", drop=4),
    Column("free", lambda one: one.remaining, "usd", _free, smallest_first=True),
    Column("used", used, "percent", terminal=False),
    Column("resets", lambda one: one.resets_at, "ago", lambda one: ahead(one.resets_at), smallest_first=True, drop=2),
    Column("mode", lambda one: one.enforcement if one.limit is not None else None, name="enforcement", drop=1),
    Column("est.", lambda one: one.estimate and one.estimate.percent, "percent", _estimate, drop=3, page=False),
    Column("calls", lambda one: one.calls, terminal=False, page=False),
    Column("calls_of_unknown_cost", lambda one: one.calls_of_unknown_cost, terminal=False, page=False),
)


def differs(budget: BudgetReconciliation) -> bool:
    """True if the counter of a budget and its record disagree."""
    return budget.difference != 0 or budget.counted_calls != budget.recorded_calls


def _calls(budget: BudgetReconciliation) -> Cell:
    if budget.counted_calls == budget.recorded_calls:
        return f"{budget.counted_calls:,}"
    return f"{budget.counted_calls:,} counted, {budget.recorded_calls:,} recorded", "warn"


# Amounts are shown to the nano-dollar, as they are compared.
RECONCILIATION: tuple[Column[BudgetReconciliation], ...] = (
    Column("budget", lambda one: one.budget),
    Column("period", lambda one: one.period),
    Column("Redis", lambda one: one.counted, "usd"),
    Column("ClickHouse", lambda one: one.stored, "usd", drop=1),
    Column("EVENTS", lambda one: one.logged, "usd", drop=2),
    Column("unrecorded", lambda one: one.unrecorded, "usd", drop=3),
    Column("difference", lambda one: one.difference, "usd", lambda one: (money(one.difference), "bad" * differs(one))),
    Column("calls", lambda one: one.counted_calls, "count", _calls, terminal=False),
)
