"""How budgets stand, as people and programs are told: the config's caps with what Redis has counted."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import get_args

from breakwater.contracts.api import BudgetStatus, EstimateAccuracy
from breakwater.contracts.events import Scope
from breakwater.contracts.types import time_from_ms
from breakwater.policy.budget import CapTable, Counter, in_force
from breakwater.policy.ledger import Figures
from breakwater.policy.periods import Period, periods_at
from breakwater.state.budget_counters import BudgetCounters, PeriodCounters, Snapshot

_SCOPES: tuple[Scope, ...] = get_args(Scope)


async def budget_statuses(caps: CapTable, counters: BudgetCounters, now: datetime) -> tuple[BudgetStatus, ...]:
    """Every budget of the current day and month: those that the config names, and those that anything is counted of.

    Args:
        caps: the config's.
        counters: in Redis.
        now: which day and month it is.

    Returns:
        Global first, then agents, then tenants; the daily budget of each before its monthly one.

    Raises:
        StateUnavailable: Redis does not answer.
    """
    snapshot = await counters.snapshot(current(counters, now))
    return statuses(caps, snapshot, known_keys(caps, snapshot))


def current(counters: BudgetCounters, now: datetime) -> tuple[Period, Period]:
    """The day and the month whose counters budgets are held against."""
    periods = periods_at(now, counters.zone)
    return periods.day, periods.month


def known_keys(caps: CapTable, snapshot: Snapshot) -> tuple[str, ...]:
    """The scopes that the config names or that something stands of in Redis: global, agents, tenants."""
    counted = {
        key
        for period_counters in snapshot.periods
        for key in (*period_counters.figures, *period_counters.reserved, *period_counters.notes.raises)
    }
    # The sort is stable: the config's own come first, in its order.
    return tuple(sorted(caps.keys(counted), key=lambda key: _SCOPES.index(caps.counters_of(key)[0].scope)))


def statuses(caps: CapTable, snapshot: Snapshot, keys: Iterable[str]) -> tuple[BudgetStatus, ...]:
    """The budgets of some scopes in the periods of a snapshot."""
    return tuple(
        budget_status(caps.counter(key, period_counters.period.window), period_counters)
        for key in keys
        for period_counters in snapshot.periods
    )


def budget_status(counter: Counter, period_counters: PeriodCounters) -> BudgetStatus:
    """A budget in the contract's words."""
    figures = period_counters.figures.get(counter.key, Figures())
    held, raised = period_counters.reserved.get(counter.key, 0), period_counters.notes.raises.get(counter.key)
    limit = in_force(counter.limit, None if raised is None else (raised.limit, raised.configured))
    if limit == counter.limit:
        raised = None  # the config's cap has changed since, or there is none any more
    return BudgetStatus(
        budget=counter.name,
        scope=counter.scope,
        agent=counter.agent,
        tenant=counter.tenant,
        window=counter.window,
        period=period_counters.period.name,
        enforcement=counter.caps.enforcement,
        limit=limit,
        raised=raised,
        spent=figures.spent,
        reserved=held,
        remaining=None if limit is None else max(0, limit - figures.spent - held),
        calls=figures.calls,
        calls_of_unknown_cost=figures.unpriced,
        resets_at=time_from_ms(period_counters.period.end_ms),
        estimate=_accuracy(figures),
    )


def _accuracy(figures: Figures) -> EstimateAccuracy | None:
    if not figures.gauged:
        return None
    return EstimateAccuracy(
        calls=figures.gauged,
        reserved=figures.foreseen,
        cost=figures.measured,
        percent=round(100 * figures.measured / figures.foreseen, 1) if figures.foreseen else None,
        exceeded=figures.exceeded,
    )
