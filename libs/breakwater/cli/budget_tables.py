"""How budgets and their reconciliation are shown to people."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from breakwater.cli import formats, output

if TYPE_CHECKING:
    from breakwater.contracts.api import BudgetStatus
    from breakwater.contracts.events import BudgetEvent, BudgetReconciliation, Reconciliation

WARN_PERCENT = 80


def show(budgets: Sequence[BudgetStatus], now: datetime, *, filled: bool = True) -> None:
    """Prints the table of budgets; while the counters are lost, without what they would say."""

    def known(cell: output.Cell) -> output.Cell:
        return cell if filled else "?"

    output.table(
        [
            output.Column("budget"),
            output.Column("limit", right=True),
            output.Column("spent", right=True),
            output.Column("reserved", right=True, drop=4),
            output.Column("left", right=True),
            output.Column("resets", drop=2),
            output.Column("mode", drop=1),
            output.Column("est.", right=True, drop=3),
        ],
        [
            (
                one.budget,
                _money(one.limit),
                known((_money(one.spent) + ("+" if one.calls_of_unknown_cost else ""), _style(one))),
                known(_money(one.reserved)),
                known((_money(one.remaining), _style(one))),
                _until(one.resets_at, now),
                one.enforcement if one.limit is not None else "",
                _estimate(one),
            )
            for one in budgets
        ],
        empty="there are no budgets",
    )


def note_raises(budgets: Sequence[BudgetStatus], now: datetime) -> None:
    """Says which caps are raised, by whom, why, and until when."""
    for one in budgets:
        if one.raised is not None:
            until = formats.clock(one.resets_at, now)
            output.note(
                f"{one.budget} is raised to {_money(one.raised.limit)} until {until}, "
                f"by {one.raised.by}: {one.raised.reason}"
            )


def note_exceeded(budgets: Sequence[BudgetStatus]) -> None:
    """Says which calls cost more than was held for them."""
    # Once for each agent: the same calls count for its day, for its tenant, and for all.
    monthly = [one for one in budgets if one.window == "monthly" and one.estimate is not None and one.estimate.exceeded]
    for one in [one for one in monthly if one.scope == "agent"] or monthly[:1]:
        assert one.estimate is not None
        output.note(
            f"{one.budget}: of {formats.counted(one.estimate.calls, 'call')} {one.estimate.exceeded:,} cost more than "
            "was held for them; a hard cap can be passed by as much",
            "yellow",
        )


def show_reconciliation(reconciliation: Reconciliation) -> None:
    """Prints the counters beside the record, and whether they agree."""
    output.table(
        [
            output.Column("budget"),
            output.Column("period"),
            output.Column("Redis", right=True),
            output.Column("ClickHouse", right=True, drop=1),
            output.Column("EVENTS", right=True, drop=2),
            output.Column("unrecorded", right=True, drop=3),
            output.Column("difference", right=True),
        ],
        [
            (
                budget.budget,
                budget.period,
                # To the nano-dollar, as it is compared.
                formats.money(budget.counted),
                formats.money(budget.stored),
                formats.money(budget.logged),
                formats.money(budget.unrecorded),
                (formats.money(budget.difference), "red" if _differs(budget) else ""),
            )
            for budget in reconciliation.budgets
        ],
        empty="nothing is counted, and nothing on record",
    )
    if reconciliation.equal:
        output.styled(("the counters agree with the record", "green"))
        return
    output.styled(("the counters differ from the record", "red"), f": {_what_differs(reconciliation)}")
    output.note("the budget service compares them by itself and repairs the counters; what is on record stays")


def tell_raised(event: BudgetEvent, budget: str, now: datetime) -> None:
    """Says what a cap was raised to, and how to undo it."""
    if event.kind == "raise_ended":
        output.write(
            f"the config's own cap of {budget}, {_money(event.limit)}, holds again; it was {_money(event.previous)}"
        )
        return
    until = "" if event.resets_at is None else f" until {formats.clock(event.resets_at, now)}"
    change = f"was {_money(event.previous)}, is now {_money(event.limit)}{until}"
    output.write(f"the cap of {budget} {change}, by {event.by}: {event.reason}")
    undo = f"breakwater budgets raise {shlex.quote(budget)} {_plain(event.configured)} --reason TEXT"
    output.note(f"{_money(event.total)} of it is spent; `{undo}` sets it back to the config's")


def tell_unchanged(budget: BudgetStatus) -> None:
    """Says that a cap is what it was to be raised to."""
    by = "" if budget.raised is None else f", by {budget.raised.by}: {budget.raised.reason}"
    output.write(f"the cap of {budget.budget} is {_money(budget.limit)} already{by}")


def _style(budget: BudgetStatus) -> str:
    if budget.limit is None:
        return ""
    if not budget.remaining:
        return "red"
    # Over 80 %, in integers.
    return "yellow" if (budget.limit - budget.remaining) * 100 > budget.limit * WARN_PERCENT else ""


def _until(moment: datetime, now: datetime) -> str:
    hours = max(0.0, (moment - now).total_seconds()) / 3600
    if hours < 1:
        return f"in {int(hours * 60)} min"
    return f"in {int(hours)} h" if hours < 48 else f"in {int(hours / 24)} d"


def _estimate(budget: BudgetStatus) -> output.Cell:
    told = budget.estimate
    if told is None or told.percent is None:
        return ""
    return (f"{told.percent:.0f} %", "red" if told.exceeded else "")


def _differs(budget: BudgetReconciliation) -> bool:
    return budget.difference != 0 or budget.counted_calls != budget.recorded_calls


def _what_differs(reconciliation: Reconciliation) -> str:
    wrong = [f"{budget.budget} of {budget.period}" for budget in reconciliation.budgets if _differs(budget)]
    if reconciliation.reserved != reconciliation.held:
        reserved, held = formats.money(reconciliation.reserved), formats.money(reconciliation.held)
        wrong.append(f"{reserved} reserved for calls that hold {held}")
    return ", ".join(wrong) or "not in what is spent, but in what is held for calls, or was estimated for them"


def _money(nano: int | None) -> str:
    from breakwater.policy.alert_texts import money_text

    return "" if nano is None else money_text(nano)


def _plain(nano: int | None) -> str:
    """An amount as it can be typed."""
    return formats.money(nano).lstrip("$").replace(",", "")
