"""`breakwater breakers`: which breakers are open; isolating one, and resetting it."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from breakwater.cli import formats, output
from breakwater.cli.api import Api, ListsByItself, api_command
from breakwater.cli.output import Column

if TYPE_CHECKING:
    from breakwater.contracts.breakers import BreakerStatus
    from breakwater.contracts.events import BreakerState

NO_BREAKER_SERVICE = "no breaker service is alive: no breaker opens or closes; see `breakwater doctor`"

_HELP = """See which breakers are open; force one open, or reset it. Without a command it lists them.

For example:

    breakwater breakers

    breakwater breakers isolate content-writer openai/gpt-4.1 --reason "garbled answers"

    breakwater breakers reset content-writer openai/gpt-4.1

A breaker that agents share (`scope`) has the agent `*`, one of a whole provider the model `openai/*`; quote them.
"""

app = typer.Typer(cls=ListsByItself, help=_HELP)

_COLUMNS: list[Column[BreakerStatus]] = [
    Column("agent", lambda one: one.agent),
    Column("model", lambda one: one.model),
    Column("state", lambda one: output.state(one.state)),
    Column("open until", lambda one: open_until(one.state, one.open_until, held=one.held_until), drop=1),
    Column("since", lambda one: one.since, drop=3),
    Column("fails", lambda one: one.consecutive_failures, right=True, drop=2),
    Column("in all", lambda one: one.total_failures, right=True, drop=4),
    Column("reason", lambda one: one.reason, below=True),
]

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

    def show(listed: BreakerList) -> None:
        rows = sorted(listed.breakers, key=lambda one: (one.state == "closed", one.agent, one.model))
        output.table(_COLUMNS, rows, empty="no agent has a breaker: the config has `breaker: off` for all")
        if not listed.alive:
            output.note(NO_BREAKER_SERVICE, "yellow")

    api.answer(api.get(BreakerList, "breakers"), show)


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
    """Close a breaker at once, forget what it has counted, and end a hold of its model.

    For example:

        breakwater breakers reset content-writer openai/gpt-4.1 --reason "their outage is over"

    For all agents on a whole provider, where they share its breaker: `breakwater breakers reset '*' 'openai/*'`.
    """
    _change(api, "reset", agent, model, reason)


def open_until(
    state: BreakerState | None, until: datetime | None, now: datetime | None = None, held: datetime | None = None
) -> str:
    """When a model may be called again by its breaker, or else by its provider; in words, empty where it may be now."""
    now = now or datetime.now(UTC)
    if state in {None, "closed"} and held is not None and held > now:
        return f"held until {_moment(held, now)}"
    if state == "isolated":
        return "until reset"
    if state == "half_open":
        return "a call probes it"
    if state != "open":
        return ""
    if until is None or until <= now:
        return "next call probes it"
    return _moment(until, now)


def _moment(until: datetime, now: datetime) -> str:
    return f"{formats.clock(until, now)}, {formats.duration((until - now).total_seconds() * 1000)}"


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
