"""Columns of limits, of budgets, of the comparison of their counters with the record, and of stopped tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from decimal import Decimal

from breakwater.kernel.columns import Cell, Column, clock, time_until
from breakwater.kernel.formats import at_least, exact_money, money, percent, quantity
from breakwater.kernel.types import usd_from_nano
from breakwater.limits.contract import (
    BudgetReconciliation,
    BudgetStatus,
    LimitUnit,
    LimitWindow,
    ListedLimit,
    StoppedTask,
    WaitingCall,
)
from breakwater.limits.rules.limit import Limit, default_id
from breakwater.limits.rules.scopes import EACH, WITHIN, key_from_text, scope_in_words

WARN_PERCENT = 80
"""A budget that has used a larger share of its limit is a warning."""


def owner_of(budget: BudgetStatus) -> str:
    """The owner of a budget: `the plane`, `content-writer`, `tenant acme`, `user ann within team research`."""
    if budget.scope == "agent" and budget.within is None and budget.agent is not None:
        return budget.agent
    return scope_in_words(key_from_text(budget.budget.rpartition("/")[0]))


def used_share(budget: BudgetStatus) -> float | None:
    """The share of the limit that is spent or reserved: 1.0 is all of it; None without a limit."""
    if budget.limit is None:
        return None
    return (budget.spent + budget.reserved) / budget.limit if budget.limit else 1.0


def tone(budget: BudgetStatus) -> str:
    """The tone of a budget: `bad` if the limit is reached, `warn` if it is near; otherwise empty."""
    if budget.limit is None:
        return ""
    used = budget.spent + budget.reserved
    if budget.reached or used >= budget.limit:
        return "bad"
    return "warn" if used * 100 > budget.limit * WARN_PERCENT else ""


def no_cap_text(budget: BudgetStatus, budgets: Iterable[BudgetStatus]) -> str:
    """Describes a budget without a limit: `no limit`, or `no monthly limit, daily limit $5.00` if it has that."""
    owner = budget.budget.rpartition("/")[0]
    for candidate in budgets:
        if candidate.limit is not None and candidate.budget.rpartition("/")[0] == owner:
            return f"no {budget.window} limit, {candidate.window} limit {money(candidate.limit)}"
    return "no limit"


def _spend_cell(budget: BudgetStatus) -> Cell:
    return at_least(budget.spent, budget.calls_of_unknown_cost), tone(budget)


def _free(budget: BudgetStatus) -> Cell:
    remaining = "" if budget.remaining is None else money(budget.remaining)
    # A reached cap may still have room, but not for another call.
    return remaining + (", reached" if budget.reached and budget.remaining else ""), tone(budget)


def _estimate(budget: BudgetStatus) -> Cell:
    estimate = budget.estimate
    if estimate is None or estimate.percent is None:
        return ""
    return percent(estimate.percent / 100), "bad" if estimate.exceeded else ""


COLUMNS: tuple[Column[BudgetStatus], ...] = (
    Column("budget", lambda budget: budget.budget),
    Column("limit", lambda budget: "" if budget.limit is None else budget.limit, "usd"),
    Column("spent", lambda budget: budget.spent, "usd", _spend_cell),
    Column("in flight", lambda budget: budget.reserved, "usd", name="reserved", drop=4),
    Column("free", lambda budget: budget.remaining, "usd", _free, smallest_first=True),
    Column("used", used_share, "percent", terminal=False),
    Column(
        "resets",
        lambda budget: budget.resets_at,
        "ago",
        lambda budget: "never" if budget.resets_at is None else time_until(budget.resets_at),
        smallest_first=True,
        drop=2,
    ),
    Column("mode", lambda budget: budget.enforcement if budget.limit is not None else None, name="enforcement", drop=1),
    Column(
        "est.", lambda budget: budget.estimate and budget.estimate.percent, "percent", _estimate, drop=3, page=False
    ),
    Column("calls", lambda budget: budget.calls, terminal=False, page=False),
    Column("calls_of_unknown_cost", lambda budget: budget.calls_of_unknown_cost, terminal=False, page=False),
)


def amount_in_words(unit: LimitUnit, amount: str | int) -> str:
    """Writes an amount of a unit: `$20.00`, `400,000 tokens`, `5 at a time`.

    Args:
        unit: the unit.
        amount: USD or another amount as the contract writes it; or nano-dollars, or another amount, as a number.
    """
    if unit == "usd":
        return money(amount)
    number = f"{int(amount):,}"
    return f"{number} at a time" if unit == "concurrent" else f"{number} {unit if number != '1' else unit[:-1]}"


def allowance_in_words(unit: LimitUnit, amount: str | int, window: LimitWindow | None) -> str:
    """Writes what a limit allows: `$20.00/month`, `400,000 tokens/minute`, `5 at a time`, `$0.50 in total`."""
    per = "" if window is None else " in total" if window == "total" else f"/{window}"
    return f"{amount_in_words(unit, amount)}{per}"


def _of_task(scope: str, words: str) -> str:
    """Names what is counted in a task: its jobs, not their calls."""
    return words.replace(" request", " job") if scope.startswith("task:") else words


def allowance(limit: ListedLimit) -> str:
    """Writes what a limit allows now: `$20.00/month`."""
    words = allowance_in_words(limit.unit, limit.amount, limit.per)
    return _of_task(limit.scope, words)


def _thresholds(thresholds: Iterable[int]) -> str | None:
    return ", ".join(f"{percent} %" for percent in thresholds) or None


LIMITS: tuple[Column[Limit], ...] = (
    Column("scope", lambda limit: limit.scope),
    Column(
        "limit",
        lambda limit: limit.amount,
        "count",
        lambda limit: _of_task(limit.scope, allowance_in_words(limit.unit, limit.amount, limit.window)),
        name="amount",
    ),
    Column("action", lambda limit: limit.action),
    Column("alerts at", lambda limit: _thresholds(limit.thresholds), name="thresholds", drop=1),
    Column("id", lambda limit: limit.id, below=True),
)
"""The table of `breakwater config check --expand`."""


def is_of_each(limit: ListedLimit) -> bool:
    """Returns True if a limit is on each name by itself, so that it has no use of its own."""
    return any(part.endswith((f":{EACH}", f"={EACH}")) for part in limit.scope.split(WITHIN))


def used_share_of(limit: ListedLimit) -> float | None:
    """The share of a limit that is used or reserved: 1.0 is all of it; None if it is not known."""
    if limit.used is None:
        return None
    used = Decimal(limit.used) + Decimal(limit.reserved or 0)
    return float(used / Decimal(limit.amount)) if Decimal(limit.amount) else 1.0


def tone_of_limit(limit: ListedLimit) -> str:
    """The tone of a limit: `bad` if nothing is left, `warn` if little is; otherwise empty."""
    share = used_share_of(limit)
    if share is None or limit.shadowed_by is not None:
        return ""
    return "bad" if share >= 1 else "warn" if share * 100 > WARN_PERCENT else ""


def _use_text(limit: ListedLimit) -> Cell:
    share = used_share_of(limit)
    if limit.used is None or share is None:
        return "", "faint"
    return f"{amount_in_words(limit.unit, limit.used)} ({percent(share)})", tone_of_limit(limit)


def _reservation_text(limit: ListedLimit) -> str:
    return "" if limit.reserved is None else amount_in_words(limit.unit, limit.reserved)


def _remaining(limit: ListedLimit) -> Cell:
    if limit.remaining is None:
        return ""
    return amount_in_words(limit.unit, limit.remaining), tone_of_limit(limit)


def _resets(limit: ListedLimit) -> str:
    return "" if limit.resets_at is None else time_until(limit.resets_at)


def set_by(limit: ListedLimit) -> str:
    """The setting of a limit in the config; of another, the person or key that set it, and when."""
    if limit.source == "config":
        return limit.id
    return f"{limit.by}, {clock(limit.at)}"


def _own_id(limit: ListedLimit) -> str:
    """Returns the id of a limit if it does not follow from what the limit is."""
    return "" if limit.id in (set_by(limit), default_id(limit.scope, limit.unit, limit.per)) else limit.id


WAITING: tuple[Column[WaitingCall], ...] = (
    Column("key", lambda call: call.key),
    Column("tenant", lambda call: call.tenant),
    Column("since", lambda call: call.since, "ago"),
)
"""Calls that wait for a limit."""


def _action(limit: ListedLimit) -> str:
    if limit.refused is not None:
        return f"none; would have refused {quantity(limit.refused, 'call')}"
    return "none" if limit.id.startswith("shadow.") else limit.action  # of one for each name, nothing is counted here


LISTED_LIMITS: tuple[Column[ListedLimit], ...] = (
    Column("scope", lambda limit: limit.scope),
    Column(
        "limit",
        lambda limit: limit.amount,
        display=allowance,
        name="amount",
        order=lambda limit: (limit.unit, Decimal(limit.amount)),
    ),
    Column("used", lambda limit: limit.used, display=_use_text, order=lambda limit: used_share_of(limit) or 0.0),
    Column("free", lambda limit: limit.remaining, display=_remaining, name="remaining", drop=2),
    Column("reserved", lambda limit: limit.reserved, display=_reservation_text, terminal=False, page=False),
    Column(
        "resets",
        lambda limit: limit.resets_at,
        "ago",
        _resets,
        name="resets_at",
        smallest_first=True,
        drop=3,
    ),
    Column("action", lambda limit: limit.action, display=_action),
    Column("waiting", lambda limit: limit.waiting or None, "count", name="waiting", drop=5, page=False),
    Column("ends", lambda limit: limit.until, "time", name="until", drop=4, page=False),
    Column("unit", lambda limit: limit.unit, terminal=False, page=False),
    Column("per", lambda limit: limit.per, terminal=False, page=False),
    Column("id", lambda limit: limit.id, display=_own_id, below=True, page=False),
    Column("set by", lambda limit: limit.by, display=set_by, name="by", below=True),
    Column("reason", lambda limit: limit.reason, below=True, page=False),
)
"""The limits of config and API, with what is used of them."""


def limit_document(limit: Limit) -> dict[str, object]:
    """A limit as JSON: an amount in USD is a decimal string."""
    return {
        "id": limit.id,
        "scope": limit.scope,
        "unit": limit.unit,
        "window": limit.window,
        "amount": usd_from_nano(limit.amount) if limit.unit == "usd" else limit.amount,
        "action": limit.action,
        "thresholds": limit.thresholds,
    }


def differs(budget: BudgetReconciliation) -> bool:
    """Returns whether the counter of a budget and its record disagree."""
    return budget.difference != 0 or budget.counted_calls != budget.recorded_calls


def _calls(budget: BudgetReconciliation) -> Cell:
    if budget.counted_calls == budget.recorded_calls:
        return f"{budget.counted_calls:,}"
    return f"{budget.counted_calls:,} counted, {budget.recorded_calls:,} recorded", "warn"


def _usd_column(title: str, get: Callable[[BudgetReconciliation], int], drop: int = 0) -> Column[BudgetReconciliation]:
    return Column(title, get, "usd", lambda budget: exact_money(get(budget)), drop=drop)


def _difference(budget: BudgetReconciliation) -> Cell:
    return exact_money(budget.difference), "bad" if differs(budget) else ""


RECONCILIATION: tuple[Column[BudgetReconciliation], ...] = (
    Column("budget", lambda row: row.budget),
    Column("period", lambda row: row.period),
    _usd_column("Redis", lambda row: row.counted),
    _usd_column("ClickHouse", lambda row: row.stored, 1),
    _usd_column("EVENTS", lambda row: row.logged, 2),
    _usd_column("unrecorded", lambda row: row.unrecorded, 3),
    Column("difference", lambda row: row.difference, "usd", _difference),
    Column("calls", lambda row: row.counted_calls, "count", _calls, terminal=False),
)

TASKS: tuple[Column[StoppedTask], ...] = (
    Column("task", lambda task: task.task_id, "id"),
    Column("tenant", lambda task: task.tenant, drop=1),
    Column("agent", lambda task: task.agent, "agent"),
    Column("rule", lambda task: task.rule, "words", lambda task: (task.rule, "bad")),
    Column("since", lambda task: task.since, "ago", drop=2),
    Column("execution", lambda task: task.execution_id, "execution", drop=3),
    Column("reason", lambda task: task.reason, below=True),
)
