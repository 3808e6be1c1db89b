"""`breakwater plans`: lists plans, and shows a plan with its jobs."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from breakwater.client.commands import Api, DefaultListGroup, api_command
from breakwater.jobs.contract.submission import PlanList, PlanStatus
from breakwater.jobs.views import plans
from breakwater.kernel.commands import output

app = typer.Typer(cls=DefaultListGroup, help="List plans and their states. Without a command it lists them.")


@app.command(name="list")
@api_command
def list_(
    api: Api, limit: Annotated[int, typer.Option("--limit", min=1, max=200, help="Maximum number of rows.")] = 20
) -> None:
    """List plans, the newest first, each with its state, its jobs, its cost and its waste.

    For example:

        breakwater plans list

        breakwater plans list --json | jq -r '.plans[] | select(.state == "failed").plan_id'
    """
    api.table(PlanList, "plans", plans.COLUMNS, lambda plan_list: plan_list.plans, empty="no plans", limit=limit)


@app.command()
@api_command
def show(api: Api, plan: Annotated[str, typer.Argument(metavar="PLAN", help="Plan id.")]) -> None:
    """Show a plan with its changes and its jobs.

    For example:

        breakwater plans show report-47

        breakwater plans show report-47 --json | jq .state
    """
    api.show_result(api.get(PlanStatus, f"plans/{quote(plan, safe='')}"), _show)


def _show(plan: PlanStatus) -> None:
    output.facts([(plan.plan_id, "bold")], plans.FACTS, plan)
    if plan.changes:
        output.write("")
        output.table(plans.CHANGES, plan.changes)
    if plan.jobs:
        output.write("")
        output.table(plans.JOBS, plan.jobs)
