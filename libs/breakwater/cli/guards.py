"""`breakwater guards`: the tasks that a guard has stopped, and letting one go on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from breakwater.cli import formats, output
from breakwater.cli.api import Api, ListsByItself, api_command
from breakwater.views.breakers import TASKS

if TYPE_CHECKING:
    from breakwater.contracts.breakers import StoppedTask

_HELP = """See which tasks a guard has stopped, and reset them. Without a command it lists them.

For example:

    breakwater guards

    breakwater guards reset nightly-review-17 --reason "the loop is mended"
"""

app = typer.Typer(cls=ListsByItself, help=_HELP)


@app.command(name="list")
@api_command
def list_(api: Api) -> None:
    """List the stopped tasks, the latest first, each with the rule that stopped it. `--json` begins with the earliest.

    For example:

        breakwater guards list

        breakwater guards list --json | jq -r '.stopped[].task_id'
    """
    from breakwater.contracts.breakers import StoppedTasks

    def rows(tasks: StoppedTasks) -> list[StoppedTask]:
        return sorted(tasks.stopped, key=lambda task: task.since, reverse=True)

    api.table(StoppedTasks, "guards", TASKS, rows, empty="no task is stopped")


@app.command()
@api_command
def reset(
    api: Api,
    task: Annotated[str, typer.Argument(metavar="TASK", help="Its task id, as `breakwater guards` shows it.")],
    tenant: Annotated[
        str | None, typer.Option("--tenant", help="Whose task; tenants do not share tasks of one id.")
    ] = None,
    reason: Annotated[
        str | None, typer.Option("--reason", metavar="TEXT", help="Why; it is kept with the event.")
    ] = None,
) -> None:
    """Let a stopped task go on. What it has used is counted from zero again.

    For example:

        breakwater guards reset nightly-review-17 --reason "the loop is mended"

        breakwater guards reset nightly-review-17 --tenant acme --json
    """
    from breakwater.contracts.events import GuardEvent

    def show(event: GuardEvent) -> None:
        whose = f" of {event.tenant}" if event.tenant else ""
        output.write(f"{event.task_id}{whose} may continue: {event.reason}")
        used = f"{formats.counted(event.iterations, 'iteration')}, {formats.counted(event.tokens, 'token')}"
        output.note(f"it had used {used} and {formats.money(event.cost)}; that is counted from zero again")

    done = api.act(
        GuardEvent,
        "guards/reset",
        {"task_id": task, "tenant": tenant, "reason": reason},
        see="breakwater guards",
        unknown="`breakwater guards` lists the stopped tasks; a tenant's task needs --tenant.",
    )
    api.answer(done, show)
