"""Budgets, and the comparison of their counters with the record."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from breakwater.contracts.budgets import BudgetStatus
from breakwater.contracts.events import BudgetReconciliation
from breakwater.policy.formats import at_least, exact_money, money, percent
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


def without_cap(budget: BudgetStatus, others: Iterable[BudgetStatus]) -> str:
    """Words for a budget without a cap: `no cap`, or `no monthly cap, daily cap $5.00` if its other window has one."""
    whose = budget.scope, budget.agent, budget.tenant
    other = next((one for one in others if one.limit is not None and (one.scope, one.agent, one.tenant) == whose), None)
    return "no cap" if other is None else f"no {budget.window} cap, {other.window} cap {money(other.limit)}"


def _spent(budget: BudgetStatus) -> Cell:
    return at_least(budget.spent, budget.calls_of_unknown_cost), tone(budget)


def _free(budget: BudgetStatus) -> Cell:
    left = "" if budget.remaining is None else money(budget.remaining)
    # What is left may be more than nothing, and less than a call.
    return left + (", reached" if budget.reached and budget.remaining else ""), tone(budget)


def _estimate(budget: BudgetStatus) -> Cell:
    estimate = budget.estimate
    if estimate is None or estimate.percent is None:
        return ""
    return percent(estimate.percent / 100), "bad" if estimate.exceeded else ""


COLUMNS: tuple[Column[BudgetStatus], ...] = (
    Column("budget", lambda one: one.budget),
    Column("cap", lambda one: "" if one.limit is None else one.limit, "usd"),
    Column("spent", lambda one: one.spent, "usd", _spent),
    Column("in flight", lambda one: one.reserved, "usd", name="reserved", drop=4),
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


def _compared(title: str, get: Callable[[BudgetReconciliation], int], drop: int = 0) -> Column[BudgetReconciliation]:
    return Column(title, get, "usd", lambda one: exact_money(get(one)), drop=drop)


def _difference(budget: BudgetReconciliation) -> Cell:
    return exact_money(budget.difference), "bad" if differs(budget) else ""


RECONCILIATION: tuple[Column[BudgetReconciliation], ...] = (
    Column("budget", lambda one: one.budget),
    Column("period", lambda one: one.period),
    _compared("Redis", lambda one: one.counted),
    _compared("ClickHouse", lambda one: one.stored, 1),
    _compared("EVENTS", lambda one: one.logged, 2),
    _compared("unrecorded", lambda one: one.unrecorded, 3),
    Column("difference", lambda one: one.difference, "usd", _difference),
    Column("calls", lambda one: one.counted_calls, "count", _calls, terminal=False),
)
