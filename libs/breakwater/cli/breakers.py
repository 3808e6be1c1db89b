"""`breakwater breakers`: the breakers, isolating one, and resetting it."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from breakwater.cli import output
from breakwater.cli.api import Api, ListsByItself, api_command
from breakwater.views.breakers import COLUMNS

if TYPE_CHECKING:
    from breakwater.contracts.breakers import BreakerStatus

NO_BREAKER_SERVICE = "no breaker service is alive: no breaker opens or closes; see `breakwater doctor`"

_HELP = """See which breakers are open; force one open, or reset it. Without a command it lists them.

For example:

    breakwater breakers

    breakwater breakers isolate content-writer openai/gpt-4.1 --reason "garbled answers"

    breakwater breakers reset content-writer openai/gpt-4.1

A breaker that agents share (`scope`) has the agent `*`, one of a whole provider the model `openai/*`; quote them.
"""

app = typer.Typer(cls=ListsByItself, help=_HELP)

AgentArgument = Annotated[str, typer.Argument(metavar="AGENT", help="Whose breaker; '*' for one that agents share.")]
ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="On which model; 'openai/*' for one of a whole provider.")
]
ReasonOption = Annotated[
    str | None, typer.Option("--reason", metavar="TEXT", help="Why; it is kept with the breaker and its event.")
]


@app.command(name="list")
@api_command
def list_(api: Api) -> None:
    """List the breakers, those that are not closed first. The column `fails` counts failures in a row.

    For example:

        breakwater breakers list

        breakwater breakers list --json | jq '.breakers[] | select(.state != "closed")'
    """
    from breakwater.contracts.breakers import BreakerList

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
    from breakwater.contracts.breakers import UnchangedBreaker
    from breakwater.contracts.events import BreakerTransition

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
