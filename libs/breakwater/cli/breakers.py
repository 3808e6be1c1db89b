"""`breakwater breakers` and `breakwater guards`: the breakers and the stopped tasks, and resetting them."""

from __future__ import annotations

import shlex
from typing import Annotated, Literal

import typer

from breakwater.cli import output
from breakwater.cli.api import Api, ListsByItself, ReasonOption, api_command
from breakwater.contracts.breakers import BreakerList, BreakerStatus, StoppedTask, StoppedTasks, UnchangedBreaker
from breakwater.contracts.events import BreakerTransition, GuardEvent
from breakwater.policy.formats import counted, money
from breakwater.views.breakers import COLUMNS, TASKS

NO_BREAKER_SERVICE = "no breaker service is alive: no breaker opens or closes; see `breakwater doctor`"

_HELP = """See which breakers are open; force one open, or reset it. Without a command it lists them.

A breaker that agents share (`scope`) has the agent `*`, one of a whole provider the model `openai/*`; quote them.
"""

app = typer.Typer(cls=ListsByItself, help=_HELP)
guards = typer.Typer(
    cls=ListsByItself, help="See the tasks that a guard has stopped, and reset them. Without a command it lists them."
)

AgentArgument = Annotated[str, typer.Argument(metavar="AGENT", help="Whose breaker; '*' for one that agents share.")]
ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="On which model; 'openai/*' for one of a whole provider.")
]


@app.command(name="list")
@api_command
def list_(api: Api) -> None:
    """List the breakers, those that are not closed first. The column `fails` counts failures in a row.

    For example:

        breakwater breakers list

        breakwater breakers list --json | jq '.breakers[] | select(.state != "closed")'
    """

    def rows(listed: BreakerList) -> list[BreakerStatus]:
        return sorted(listed.breakers, key=lambda one: (one.state == "closed", one.agent, one.model))

    nothing = "no agent has a breaker: the config has `breaker: off` for all"
    if not api.table(BreakerList, "breakers", COLUMNS, rows, empty=nothing).alive and not api.as_json:
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
            state, change = result.state, "is already "
        else:
            state = result.to_state
            change = f"was {result.from_state}, is now " if result.from_state != state else "is "
        why = f": {result.reason}" if result.reason else ""
        output.styled(f"{result.agent} on {result.model} ", change, output.state(state), why)

    body = {"agent": agent, "model": model, "reason": reason}
    form = (BreakerTransition, UnchangedBreaker)
    api.answer(api.act(form, f"breakers/{action}", body, see="breakwater breakers"), show)


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
    task: Annotated[str, typer.Argument(metavar="TASK", help="Its task id, as `breakwater guards` shows it.")],
    tenant: Annotated[
        str | None, typer.Option("--tenant", help="Whose task; tenants do not share tasks of one id.")
    ] = None,
    reason: ReasonOption = None,
) -> None:
    """Let a stopped task go on. What it has used is counted from zero again.

    For example:

        breakwater guards reset nightly-review-17 --reason "the loop is mended"

        breakwater guards reset nightly-review-17 --tenant acme --json
    """

    def show(event: GuardEvent) -> None:
        whose = f" of {event.tenant}" if event.tenant else ""
        output.write(f"{event.task_id}{whose} may continue: {event.reason}")
        used = f"{counted(event.iterations, 'iteration')}, {counted(event.tokens, 'token')}"
        output.note(f"it had used {used} and {money(event.cost)}; that is counted from zero again")

    done = api.act(
        GuardEvent,
        "guards/reset",
        {"task_id": task, "tenant": tenant, "reason": reason},
        see="breakwater guards",
        unknown="`breakwater guards` lists the stopped tasks; a tenant's task needs --tenant.",
    )
    api.answer(done, show)
