"""`breakwater plans`: how plans stand, and one with its jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from breakwater.cli import formats, output
from breakwater.cli.api import Api, ListsByItself, api_command
from breakwater.cli.output import Column

if TYPE_CHECKING:
    from breakwater.contracts.submission import PlanJob, PlanStatus

_HELP = """See how plans stand. Without a command it lists them.

For example:

    breakwater plans

    breakwater plans show report-47
"""

app = typer.Typer(cls=ListsByItself, help=_HELP)


@app.command(name="list")
@api_command
def list_(
    api: Api, limit: Annotated[int, typer.Option("--limit", min=1, max=200, help="At most so many.")] = 20
) -> None:
    """List plans, the newest first, each with its state, its jobs, its cost and its waste.

    For example:

        breakwater plans list

        breakwater plans list --json | jq -r '.plans[] | select(.state == "failed").plan_id'
    """
    from breakwater.contracts.submission import PlanList

    api.answer(
        api.get(PlanList, "plans", limit=limit), lambda found: output.table(_COLUMNS, found.plans, empty="no plans")
    )


@app.command()
@api_command
def show(api: Api, plan: Annotated[str, typer.Argument(metavar="PLAN", help="Its id.")]) -> None:
    """Show a plan with its jobs.

    For example:

        breakwater plans show report-47

        breakwater plans show report-47 --json | jq .state
    """
    from breakwater.contracts.submission import PlanStatus

    api.answer(api.get(PlanStatus, f"plans/{quote(plan, safe='')}"), _show)


def _show(found: PlanStatus) -> None:
    basis = "" if found.cost_basis == "billed" else f" ({found.cost_basis})"
    facts: list[tuple[str, output.Value]] = [
        ("state", output.state(found.state)),
        ("refused", found.refusal),
        ("jobs", _jobs(found)),
        ("cost", f"{formats.money(found.total_cost)}{basis}"),
        ("wasted", formats.money(found.wasted_cost)),
        ("queued", found.first_queued_at),
        ("ended", found.last_completed_at),
    ]
    output.facts([(found.plan_id, "bold")], facts)
    if found.jobs:
        output.write("")
        output.table(_JOB_COLUMNS, found.jobs)


def _jobs(plan: PlanStatus) -> str:
    counts = plan.jobs_by_status.items()
    return ", ".join(f"{count:,} {status.replace('_', ' ')}" for status, count in counts) or "none"


_COLUMNS: list[Column[PlanStatus]] = [
    Column("plan", lambda plan: plan.plan_id),
    Column("state", lambda plan: output.state(plan.state)),
    Column("jobs", _jobs, drop=2),
    Column("cost", lambda plan: formats.money(plan.total_cost), right=True),
    Column("wasted", lambda plan: formats.money(plan.wasted_cost), right=True, drop=1),
    Column("queued", lambda plan: plan.first_queued_at, drop=3),
    Column("ended", lambda plan: plan.last_completed_at, drop=4),
]
_JOB_COLUMNS: list[Column[PlanJob]] = [
    Column("job", lambda job: job.job_id),
    Column("agent", lambda job: job.agent),
    Column("status", lambda job: output.state(job.status)),
    Column("reason", lambda job: job.reason, drop=1),
    Column("cost", lambda job: formats.money(job.total_cost) if job.completed_at else None, right=True),
]
