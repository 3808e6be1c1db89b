"""`breakwater budgets`: what is left of every budget, whether its counters agree with the record, and raising a cap."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from breakwater.cli import budget_tables, by_hand, output
from breakwater.cli.connect import run
from breakwater.cli.errors import ExitCode
from breakwater.cli.given import sendable
from breakwater.cli.groups import ListsByItself
from breakwater.cli.plane import ApiKeyOption, DataOption, JsonOption, Plane, UrlOption

NOT_FILLED = "the counters are being rebuilt: the figures tell nothing, and hard caps refuse calls until it is done"

_HELP = """See what is left of every budget, compare it with the record, raise a cap. Without a command it lists them.

For example:

    breakwater budgets

    breakwater budgets reconcile

    breakwater budgets raise agent:content-writer/daily 50 --reason "launch day"
"""

app = typer.Typer(cls=ListsByItself, help=_HELP)


@app.command(name="list")
def list_(
    agent: Annotated[
        str | None, typer.Option("--agent", metavar="NAME", help="Only what a call of this agent is held against.")
    ] = None,
    tenant: Annotated[
        str | None, typer.Option("--tenant", metavar="NAME", help="Only what a call for this tenant is held against.")
    ] = None,
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the budgets of this day and month. `mode` is how a cap is enforced: hard, soft or none.

    `reserved` is held for calls under way. `est.` is what calls cost in percent of what was held for them. A `+` behind
    the spend stands for calls of unknown cost.

    For example:

        breakwater budgets list

        breakwater budgets list --agent content-writer --tenant acme

        breakwater budgets list --json | jq '.budgets[] | select(.remaining == "0.000000000")'
    """
    from breakwater.cli import api
    from breakwater.contracts.api import BudgetStatus

    wanted = {name: value for name, value in (("agent", agent), ("tenant", tenant)) if value is not None}
    for name, value in wanted.items():
        sendable(f"--{name}", value)
    path = f"budgets?{urlencode(wanted)}" if wanted else "budgets"
    document = run(api.get(Plane(data).door(url, api_key), path))
    answer = api.read(dict[str, Any], document)
    budgets = api.read(list[BudgetStatus], answer.get("budgets"))
    filled = api.read(bool, answer.get("filled"))
    if as_json:
        output.json_document(document)
        return
    now = datetime.now(UTC)
    budget_tables.show(budgets, now, filled=filled)
    if not filled:
        output.note(NOT_FILLED, "yellow")
    budget_tables.note_raises(budgets, now)
    budget_tables.note_exceeded(budgets)


@app.command()
def reconcile(
    url: UrlOption = None, api_key: ApiKeyOption = None, data: DataOption = None, as_json: JsonOption = False
) -> None:
    """Set what Redis has counted beside what is on record, in ClickHouse and in EVENTS. It changes nothing.

    It ends with code 1 where they differ. `unrecorded` is counted for calls whose worker died, at their estimate.

    For example:

        breakwater budgets reconcile

        breakwater budgets reconcile --json | jq '.budgets[] | select(.difference != "0.000000000")'
    """
    from breakwater.cli import api
    from breakwater.contracts.events import Reconciliation

    document = run(api.get(Plane(data).door(url, api_key), "budgets/reconciliation"))
    reconciliation = api.read(Reconciliation, document)
    if as_json:
        output.json_document(document)
    else:
        budget_tables.show_reconciliation(reconciliation)
    if not reconciliation.equal:
        raise typer.Exit(ExitCode.FAILED)


@app.command(name="raise")
def raise_(
    budget: Annotated[
        str, typer.Argument(metavar="BUDGET", help="Its name as `breakwater budgets` shows it, such as global/daily.")
    ],
    limit: Annotated[str, typer.Argument(metavar="LIMIT", help="The new cap in USD.")],
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; it is kept on record.")],
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Raise a cap until its day or month ends. The cap of the config takes a raise back.

    For example:

        breakwater budgets raise agent:content-writer/daily 50 --reason "launch day"
    """
    from breakwater.contracts.api import BudgetStatus
    from breakwater.contracts.events import BudgetEvent

    document = by_hand.act(
        Plane(data).door(url, api_key),
        "budgets/raise",
        {"budget": budget, "limit_usd": limit, "reason": reason},
        see="breakwater budgets",
        unknown="`breakwater budgets` lists them.",
    )
    told = by_hand.told(document, BudgetEvent, BudgetStatus)
    if as_json:
        output.json_document(document)
        return
    if isinstance(told, BudgetStatus):
        budget_tables.tell_unchanged(told)
    else:
        budget_tables.tell_raised(told, budget, datetime.now(UTC))
