"""`breakwater breakers`: which breakers are open, and forcing them open or closed by hand."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from breakwater.cli import by_hand, formats, output
from breakwater.cli.agents import open_until
from breakwater.cli.connect import run
from breakwater.cli.groups import ListsByItself
from breakwater.cli.plane import ApiKeyOption, DataOption, Door, JsonOption, Plane, UrlOption

if TYPE_CHECKING:
    from breakwater.contracts.api import BreakerStatus

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
def list_(
    url: UrlOption = None, api_key: ApiKeyOption = None, data: DataOption = None, as_json: JsonOption = False
) -> None:
    """List the breakers, those that are not closed first. The column `fails` counts failures in a row.

    For example:

        breakwater breakers list

        breakwater breakers list --json | jq '.breakers[] | select(.state != "closed")'
    """
    from breakwater.cli import api
    from breakwater.contracts.api import BreakerStatus

    document = run(api.get(Plane(data).door(url, api_key), "breakers"))
    answer = api.read(dict[str, Any], document)
    breakers = api.read(list[BreakerStatus], answer.get("breakers"))
    alive = api.read(bool, answer.get("alive"))
    if as_json:
        output.json_document(document)
        return
    _show(breakers, datetime.now(UTC))
    if not alive:
        output.note(NO_BREAKER_SERVICE, "yellow")


@app.command()
def isolate(
    agent: AgentArgument,
    model: ModelArgument,
    reason: ReasonOption = None,
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Force a breaker open: no call is made, not even a probe, until somebody resets it.

    For example:

        breakwater breakers isolate content-writer openai/gpt-4.1 --reason "garbled answers"

    For all agents on a whole provider, where they share its breaker: `breakwater breakers isolate '*' 'openai/*'`.
    """
    _change("isolate", agent, model, reason, Plane(data).door(url, api_key), as_json=as_json)
    if not as_json:
        output.note(f"it stays so until `breakwater breakers reset {shlex.quote(agent)} {shlex.quote(model)}`")


@app.command()
def reset(
    agent: AgentArgument,
    model: ModelArgument,
    reason: ReasonOption = None,
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Close a breaker at once, and forget what it has counted.

    For example:

        breakwater breakers reset content-writer openai/gpt-4.1 --reason "their outage is over"

    For all agents on a whole provider, where they share its breaker: `breakwater breakers reset '*' 'openai/*'`.
    """
    _change("reset", agent, model, reason, Plane(data).door(url, api_key), as_json=as_json)


def _change(
    action: Literal["isolate", "reset"], agent: str, model: str, reason: str | None, door: Door, *, as_json: bool
) -> None:
    from breakwater.contracts.api import BreakerStatus
    from breakwater.contracts.events import BreakerTransition

    document = by_hand.act(
        door,
        f"breakers/{action}",
        {"agent": agent, "model": model, "reason": reason},
        see="breakwater breakers",
        unknown="`breakwater breakers` lists those that are known.",
    )
    # Where there was nothing to do, it tells how the breaker is, and no transition.
    told = by_hand.told(document, BreakerTransition, BreakerStatus)
    if as_json:
        output.json_document(document)
        return
    if isinstance(told, BreakerStatus):
        state, change = told.state, "is already "
    else:
        state = told.to_state
        change = f"was {told.from_state}, is now " if told.from_state != state else "is "
    why = f": {told.reason}" if told.reason else ""
    output.styled(f"{told.agent} on {told.model} ", change, output.state(state), why)


def _show(breakers: list[BreakerStatus], now: datetime) -> None:
    output.table(
        [
            output.Column("agent"),
            output.Column("model"),
            output.Column("state"),
            output.Column("open until", drop=1),
            output.Column("since", drop=3),
            output.Column("fails", right=True, drop=2),
            output.Column("in all", right=True, drop=4),
            output.Column("reason", below=True),
        ],
        [
            (
                one.agent,
                one.model,
                output.state(one.state),
                open_until(one.state, one.open_until, now),
                "" if one.since is None else formats.clock(one.since, now),
                str(one.consecutive_failures),
                str(one.total_failures),
                one.reason or "",
            )
            for one in sorted(breakers, key=lambda one: (one.state == "closed", one.agent, one.model))
        ],
        empty="no agent has a breaker: the config has `breaker: off` for all",
    )
