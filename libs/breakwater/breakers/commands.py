"""`breakwater breakers` and `breakwater guards`: lists breakers and stopped tasks, and resets them."""

from __future__ import annotations

import shlex
from typing import Annotated, Literal

import typer

from breakwater.breakers.contract import BreakerList, BreakerStatus, BreakerTransition, UnchangedBreaker
from breakwater.breakers.views import COLUMNS, SHADOWS
from breakwater.client.commands import Api, DefaultListGroup, ReasonOption, api_command
from breakwater.kernel.commands import output
from breakwater.kernel.formats import money, quantity
from breakwater.limits.contract import GuardEvent, StoppedTask, StoppedTasks
from breakwater.limits.views import TASKS

NO_BREAKER_SERVICE = "no breaker service is running, so no breaker opens or closes; see `breakwater doctor`"

_HELP = """List breakers; force one open, or reset it. Without a command it lists them.

A breaker that agents share (`scope`) has the agent `*`, and a provider's breaker the model `openai/*`; quote them.
"""

app = typer.Typer(cls=DefaultListGroup, help=_HELP)
guards = typer.Typer(
    cls=DefaultListGroup,
    help=("List the tasks that a guard has stopped, and reset them. Without a command it lists them."),
)

AgentArgument = Annotated[str, typer.Argument(metavar="AGENT", help="Agent of the breaker; '*' if agents share it.")]
ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="Model of the breaker; 'openai/*' for a provider's breaker.")
]


@app.command(name="list")
@api_command
def list_(api: Api) -> None:
    """List the breakers, those that are not closed first. The column `fails` counts failed jobs in a row.

    For example:

        breakwater breakers list

        breakwater breakers list --json | jq '.breakers[] | select(.state != "closed")'
    """

    def rows(breaker_list: BreakerList) -> list[BreakerStatus]:
        return sorted(
            breaker_list.breakers, key=lambda breaker: (breaker.state == "closed", breaker.agent, breaker.model)
        )

    all_off = "no agent has a breaker: the config sets `breaker: off` for all"
    breaker_list = api.table(BreakerList, "breakers", COLUMNS, rows, empty=all_off)
    if api.as_json:
        return
    if breaker_list.shadows:
        output.note("shadows, which refuse nothing:")
        output.table(SHADOWS, breaker_list.shadows)
    if not breaker_list.alive:
        output.note(NO_BREAKER_SERVICE, "yellow")


@app.command()
@api_command
def isolate(api: Api, agent: AgentArgument, model: ModelArgument, reason: ReasonOption = None) -> None:
    """Isolate a breaker: it admits no call, not even a probe, until it is reset.

    For example:

        breakwater breakers isolate content-writer openai/gpt-4.1 --reason "garbled answers"

    For all agents on a whole provider, where they share its breaker: `breakwater breakers isolate '*' 'openai/*'`.
    """
    _change(api, "isolate", agent, model, reason)
    if not api.as_json:
        output.note(f"it stays isolated until `breakwater breakers reset {shlex.quote(agent)} {shlex.quote(model)}`")


@app.command()
@api_command
def reset(api: Api, agent: AgentArgument, model: ModelArgument, reason: ReasonOption = None) -> None:
    """Close a breaker, forget what it has counted, and end a hold of its model.

    For example:

        breakwater breakers reset content-writer openai/gpt-4.1 --reason "their outage is over"

    For all agents on a whole provider, where they share its breaker: `breakwater breakers reset '*' 'openai/*'`.
    """
    _change(api, "reset", agent, model, reason)


def _change(api: Api, action: Literal["isolate", "reset"], agent: str, model: str, reason: str | None) -> None:
    def show(result: BreakerTransition | UnchangedBreaker) -> None:
        if isinstance(result, UnchangedBreaker):
            state = result.state
            change = "is already "
        else:
            state = result.to_state
            change = f"was {result.from_state}, is now " if result.from_state != state else "is "
        because = f": {result.reason}" if result.reason else ""
        output.print_styled(f"{result.agent} on {result.model} ", change, output.state(state), because)

    body = {"agent": agent, "model": model, "reason": reason}
    form = (BreakerTransition, UnchangedBreaker)
    api.show_result(api.act(form, f"breakers/{action}", body, see="breakwater breakers"), show)


@guards.command(name="list")
@api_command
def list_tasks(api: Api) -> None:
    """List the stopped tasks, the latest first, each with the rule that stopped it. `--json` begins with the earliest.

    For example:

        breakwater guards list

        breakwater guards list --json | jq -r '.stopped[].task_id'
    """

    def rows(tasks: StoppedTasks) -> list[StoppedTask]:
        return sorted(tasks.stopped, key=lambda task: task.since, reverse=True)

    api.table(StoppedTasks, "guards", TASKS, rows, empty="no task is stopped")


@guards.command("reset")
@api_command
def reset_task(
    api: Api,
    task: Annotated[str, typer.Argument(metavar="TASK", help="Task id, as `breakwater guards` shows it.")],
    tenant: Annotated[
        str | None,
        typer.Option("--tenant", help="Tenant of the task. The same task id of two tenants means two tasks."),
    ] = None,
    reason: ReasonOption = None,
) -> None:
    """Allow a stopped task to continue. Its usage counts from zero again.

    For example:

        breakwater guards reset nightly-review-17 --reason "the loop is fixed"

        breakwater guards reset nightly-review-17 --tenant acme --json
    """

    def show(event: GuardEvent) -> None:
        of_tenant = f" of {event.tenant}" if event.tenant else ""
        output.write(f"{event.task_id}{of_tenant} may continue: {event.reason}")
        used = f"{quantity(event.iterations, 'iteration')}, {quantity(event.tokens, 'token')}"
        output.note(f"it had used {used} and {money(event.cost)}; its usage counts from zero again")

    result = api.act(
        GuardEvent,
        "guards/reset",
        {"task_id": task, "tenant": tenant, "reason": reason},
        see="breakwater guards",
        unknown="`breakwater guards` lists the stopped tasks; a tenant's task needs --tenant.",
    )
    api.show_result(result, show)
