"""`breakwater budgets`: lists budgets, compares their counters with the record, and raises caps."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Annotated

import typer

from breakwater.client.commands import Api, DefaultListGroup, api_command
from breakwater.kernel.columns import clock, with_display
from breakwater.kernel.commands import output
from breakwater.kernel.commands.errors import ExitCode
from breakwater.kernel.formats import exact_money, money, moneys, quantity, typed_money
from breakwater.limits.contract import BudgetEvent, BudgetList, BudgetStatus, Reconciliation, UnchangedBudget
from breakwater.limits.views import COLUMNS, RECONCILIATION, differs

NOT_FILLED = "the counters are being rebuilt: the figures are meaningless, and hard caps refuse calls until then"

_HELP = """List budgets and what is left of them, compare them with the record, raise a cap. Without a command it lists
them.
"""

app = typer.Typer(cls=DefaultListGroup, help=_HELP)


@app.command(name="list")
@api_command
def list_(
    api: Api,
    agent: Annotated[
        str | None,
        typer.Option("--agent", metavar="NAME", help="Filter by agent: budgets that its calls count against."),
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option("--tenant", metavar="NAME", help="Filter by tenant: budgets that calls for it count against."),
    ] = None,
) -> None:
    """List the budgets of the current periods. `mode` is how a cap is enforced: hard, soft or none.

    `in flight` is reserved by running calls, and `free` is left for others. `est.` is the cost of calls as a
    percentage of their reservations. A `+` after the spend marks calls of unknown cost.

    For example:

        breakwater budgets list

        breakwater budgets list --agent content-writer --tenant acme

        breakwater budgets list --json | jq '.budgets[] | select(.reached)'
    """
    api.show_result(api.get(BudgetList, "budgets", agent=agent, tenant=tenant), _show)


@app.command()
@api_command
def reconcile(api: Api) -> None:
    """Compare the counters in Redis with the record in ClickHouse and EVENTS. Changes nothing.

    Exits with code 1 if they differ. `unrecorded` is the estimated cost of calls whose worker died.

    For example:

        breakwater budgets reconcile

        breakwater budgets reconcile --json | jq '.budgets[] | select(.difference != "0.000000000")'
    """
    if not api.show_result(api.get(Reconciliation, "budgets/reconciliation"), _show_reconciliation).equal:
        raise typer.Exit(ExitCode.FAILED)


@app.command(name="raise")
@api_command
def raise_(
    api: Api,
    budget: Annotated[
        str, typer.Argument(metavar="BUDGET", help="Budget as `breakwater budgets` lists it, such as global/daily.")
    ],
    limit: Annotated[str, typer.Argument(metavar="LIMIT", help="New cap in USD.")],
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Reason; it is recorded.")],
) -> None:
    """Raise a cap until its period ends. To revoke a raise, set the config's cap.

    For example:

        breakwater budgets raise agent:content-writer/daily 50 --reason "launch day"
    """

    def show(result: BudgetEvent | UnchangedBudget) -> None:
        if isinstance(result, BudgetEvent):
            _show_raised(result, budget)
            return
        by = "" if result.raised is None else f", by {result.raised.by}: {result.raised.reason}"
        output.write(f"the cap of {result.budget} is already {money(result.limit)}{by}")

    body = {"budget": budget, "limit_usd": limit, "reason": reason}
    api.show_result(api.act((BudgetEvent, UnchangedBudget), "budgets/raise", body, see="breakwater budgets"), show)


def _show(budget_list: BudgetList) -> None:
    """Prints the budgets, and notes on raised caps and on caps that can be exceeded.

    While the counters are being rebuilt, `?` replaces their figures.
    """
    columns = COLUMNS if budget_list.filled else with_display(COLUMNS, ["spent", "reserved", "free"], lambda _: "?")
    output.table(columns, budget_list.budgets, empty="there are no budgets")
    if not budget_list.filled:
        output.note(NOT_FILLED, "yellow")
    for budget in budget_list.budgets:
        if (raised := budget.raised) is not None:
            until = clock(budget.resets_at)
            output.note(
                f"{budget.budget} raised to {money(raised.limit)} until {until}, by {raised.by}: {raised.reason}"
            )
    _note_exceeded(budget_list.budgets)


def _note_exceeded(budgets: Sequence[BudgetStatus]) -> None:
    """Notes budgets with calls that cost more than was reserved for them."""
    # One note per agent: the same calls also count for its day, for its tenant, and for all agents.
    monthly = [
        budget
        for budget in budgets
        if budget.window == "monthly" and budget.estimate is not None and budget.estimate.exceeded
    ]
    for budget in [budget for budget in monthly if budget.scope == "agent"] or monthly[:1]:
        assert budget.estimate is not None
        output.note(
            (
                f"{budget.budget}: of {quantity(budget.estimate.calls, 'call')} {budget.estimate.exceeded:,} cost "
                "more than was reserved for them; a hard cap can be exceeded by that amount"
            ),
            "yellow",
        )


def _show_reconciliation(reconciliation: Reconciliation) -> None:
    """Prints the counters, the record, and whether they agree."""
    output.table(RECONCILIATION, reconciliation.budgets, empty="nothing is counted or recorded")
    if reconciliation.equal:
        output.print_styled(("the counters agree with the record", "green"))
        return
    output.print_styled(("the counters differ from the record", "red"), f": {_differences(reconciliation)}")
    output.note("the budget service compares them too, and repairs the counters; the record is not changed")


def _show_raised(event: BudgetEvent, budget: str) -> None:
    """Prints what a cap was raised to, and how to undo it."""
    if event.kind == "raise_ended":
        output.write(
            f"the config's cap of {budget}, {money(event.limit)}, is effective again; before: {money(event.previous)}"
        )
        return
    until = "" if event.resets_at is None else f" until {clock(event.resets_at)}"
    was, now = moneys(event.previous or 0, event.limit or 0)
    change = f"was {was}, is now {now}{until}"
    output.write(f"the cap of {budget} {change}, by {event.by}: {event.reason}")
    undo = f"breakwater budgets raise {shlex.quote(budget)} {typed_money(event.configured or 0)} --reason TEXT"
    output.note(f"{money(event.total)} of it is spent; `{undo}` restores the config's cap")


def _differences(reconciliation: Reconciliation) -> str:
    differences = [f"{budget.budget} of {budget.period}" for budget in reconciliation.budgets if differs(budget)]
    if reconciliation.reserved != reconciliation.held:
        reserved = exact_money(reconciliation.reserved)
        held_by_calls = exact_money(reconciliation.held)
        differences.append(f"{reserved} reserved for calls that hold {held_by_calls}")
    return ", ".join(differences) or "not in the spend, but in reservations or estimates"
