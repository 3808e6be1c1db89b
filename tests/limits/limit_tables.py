"""Tables of limits for tests, by the caps of a config's sections."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from breakwater.kernel.types import ms_from_time, usd_from_nano
from breakwater.limits.contract import LimitRaise, Window
from breakwater.limits.rules.budget import LimitTable
from breakwater.limits.rules.limit import Limit, LimitAction, LimitedAgent, LimitUnit, LimitWindow, limits_of
from breakwater.limits.rules.limit_changes import Author, raise_limit
from breakwater.limits.rules.limit_index import PlaneLimit, PlaneLimits
from breakwater.limits.rules.scopes import parts_of
from breakwater.limits.settings import OTHERS, Caps, GuardRules, RateLimit

WINDOWS: Mapping[Window, LimitWindow] = {
    "daily": "day", "weekly": "week", "monthly": "month", "quarterly": "quarter", "total": "total"
}  # fmt: skip


MADE = datetime(2026, 11, 21, tzinfo=UTC)


def with_raise(table: LimitTable, limit: Limit, amount: int, now: datetime | None = None, **fields: Any) -> LimitTable:
    """Returns a table in which a limit on spend is raised for all time, of the amount that it has."""
    raised: dict[str, Any] = {"scope": limit.scope, "configured": usd_from_nano(limit.amount), "by": "ops"}
    raised |= {"reason": "a sale", "at": MADE, "until": datetime(2100, 1, 1, tzinfo=UTC)} | fields
    limit_raise = LimitRaise(amount=usd_from_nano(amount), **raised)
    author = Author("c1", "ops", None, limit_raise.at)
    record = raise_limit(limit.id, limit_raise, limit_raise.configured, None, author, ends=False)
    plane_limits = PlaneLimits()
    plane_limits.change({limit.id: PlaneLimit.of(record, b"")}, ms_from_time(now or datetime.now(UTC)))
    return replace(table, plane_limits=plane_limits)


class _Agent:
    """An agent whose only setting is its budget."""

    rate_limit: RateLimit | None = None
    guard: GuardRules | None = None
    max_cost_usd: int | None = None

    def __init__(self, budget: Caps) -> None:
        self.budget = budget


def limit_table(
    total: Caps | None = None,
    agents: Mapping[str, Caps] | None = None,
    tenants: Mapping[str, Caps] | None = None,
    further: Iterable[Limit] = (),
) -> LimitTable:
    """Returns the table of a config with these caps, and further limits."""
    of_agents: Mapping[str, LimitedAgent] = {name: _Agent(caps) for name, caps in (agents or {}).items()}
    tenants = tenants or {}
    limits = limits_of(total or Caps(), tenants, of_agents, {}, ())
    return LimitTable((*limits, *further), tuple(of_agents), tuple(name for name in tenants if name != OTHERS))


def limit(
    key: str,
    window: Window,
    amount: int,
    action: LimitAction = "cheaper_model",
    thresholds: tuple[int, ...] = (),
    unit: LimitUnit = "usd",
) -> Limit:
    """Returns a limit of a scope, by its key, on its spend or on another unit."""
    return Limit(f"test.{key}", parts_of(key), unit, WINDOWS[window], amount, action, thresholds)
