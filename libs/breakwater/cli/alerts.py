"""`breakwater alerts`: incidents, acknowledging and resolving them, and undelivered alerts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Literal
from urllib.parse import quote

import typer

from breakwater.cli import output
from breakwater.cli.api import SEE_DOCTOR, Api, ListsByItself, ReasonOption, api_command
from breakwater.cli.errors import ExitCode
from breakwater.cli.given import sendable
from breakwater.contracts.alerts import Alert, AlertList, AlertReplays, ChannelTest, UnchangedAlert, UndeliveredList
from breakwater.policy.formats import counted
from breakwater.views.alerts import FACTS, INCIDENTS, NO_CHANNEL, UNDELIVERED, done
from breakwater.views.columns import with_words

TEST_TIMEOUT_S = 30.0
"""The API waits 20 s for an alerter, which waits for the receiver."""

_SHORT = len("inc_") + 8

_HELP = """List incidents; acknowledge or resolve them; test a channel. Without a command it lists them.

Name an incident by its id, or by a unique prefix.
"""

app = typer.Typer(cls=ListsByItself, help=_HELP)

IncidentArgument = Annotated[
    str, typer.Argument(metavar="INCIDENT", help="Incident id, or a unique prefix, such as inc_3f9a1c07.")
]
LimitOption = Annotated[int, typer.Option("--limit", min=1, max=1_000, help="Maximum number of rows, newest first.")]


@app.command(name="list")
@api_command
def list_(
    api: Api,
    status: Annotated[
        str,
        typer.Option("--status", help="Filter by status: unresolved, firing, pending, acknowledged, resolved or all."),
    ] = "unresolved",
    event: Annotated[
        str | None, typer.Option("--event", metavar="NAME", help="Filter by event: breaker_open, guard_tripped, …")
    ] = None,
    agent: Annotated[str | None, typer.Option("--agent", metavar="NAME", help="Filter by agent.")] = None,
    limit: LimitOption = 100,
) -> None:
    """List the unresolved incidents, the newest first.

    One that is `pending` needs an operator: reminders are sent until an operator acknowledges or resolves it. The
    column `count` shows the number of occurrences.

    For example:

        breakwater alerts list --status pending

        breakwater alerts list --agent content-writer --event breaker_open --status all

        breakwater alerts list --json | jq -r '.alerts[].incident_id'
    """

    def show(listed: AlertList) -> None:
        short = short_ids(alert.incident_id for alert in listed.alerts)
        columns = with_words(INCIDENTS, ["incident_id"], lambda alert: short[alert.incident_id])
        what = "incident is known" if status == "all" else f"incident is {status}"
        chosen = " of those you asked for" if event or agent else ""
        output.table(columns, listed.alerts, empty=f"no {what}{chosen}")
        api.note_more(listed, limit)
        if not listed.channels:
            output.note(NO_CHANNEL, "yellow")

    api.answer(api.get(AlertList, "alerts", status=status, event=event, agent=agent, limit=limit), show)


@app.command()
@api_command
def show(api: Api, incident: IncidentArgument) -> None:
    """Show all of one incident: its meaning, what to do, and the operator who is working on it.

    For example:

        breakwater alerts show inc_3f9a1c07

        breakwater alerts show inc_3f9a1c07 --json | jq .payload
    """
    sendable("incident", incident)
    found = api.get(Alert, f"alerts/{quote(incident, safe='')}")
    api.answer(found, lambda one: output.facts([(one.incident_id, "bold"), f"  {one.title}"], FACTS, one))


@app.command()
@api_command
def ack(api: Api, incident: IncidentArgument, reason: ReasonOption = None) -> None:
    """Acknowledge an incident: an operator is working on it, and reminders stop.

    For example:

        breakwater alerts ack inc_3f9a1c07 --reason "looking at it"
    """
    _change(api, "ack", incident, reason)


@app.command()
@api_command
def resolve(api: Api, incident: IncidentArgument, reason: ReasonOption = None) -> None:
    """Resolve an incident. Nothing else changes: no breaker closes and no task resumes.

    For example:

        breakwater alerts resolve inc_3f9a1c07 --reason "the loop is fixed"
    """
    _change(api, "resolve", incident, reason)


@app.command(name="test")
@api_command
def send_test(
    api: Api,
    channel: Annotated[
        str, typer.Argument(metavar="CHANNEL", help="Name of the channel in the config's alerts.channels.")
    ],
) -> None:
    """Send a test message to a channel, and print whether it was delivered. Exits with code 1 if it was not.

    For example:

        breakwater alerts test ops
    """

    def show(tested: ChannelTest) -> None:
        arrived = ("arrived", "green") if tested.delivered else ("not arrive", "red")
        why = "" if tested.delivered else f": {tested.error}"
        output.styled(f"{tested.channel}: the test message {'has' if tested.delivered else 'did'} ", arrived, why)

    done = api.act(
        ChannelTest,
        "alerts/test",
        {"channel": channel},
        see="",
        unanswered=f"The message may still have been sent: check the channel. {SEE_DOCTOR}",
        unknown="The config names channels in alerts.channels.",
        timeout_s=TEST_TIMEOUT_S,
    )
    if not api.answer(done, show).delivered:
        raise typer.Exit(ExitCode.FAILED)


@app.command()
@api_command
def undelivered(
    api: Api,
    channel: Annotated[str | None, typer.Option("--channel", metavar="NAME", help="Filter by channel.")] = None,
    limit: LimitOption = 100,
) -> None:
    """List the alerts that could not be delivered to a channel, latest first.

    For example:

        breakwater alerts undelivered

        breakwater alerts undelivered --channel ops --json | jq '.undelivered[] | select(.replayed | not)'
    """
    where = f" for {channel}" if channel else ""
    nothing = f"every alert{where} has arrived, or is on its way"

    def show(found: UndeliveredList) -> None:
        output.table(UNDELIVERED, found.undelivered, empty=nothing if found.channels else NO_CHANNEL)
        api.note_more(found, limit)

    api.answer(api.get(UndeliveredList, "alerts/undelivered", channel=channel, limit=limit), show)


@app.command()
@api_command
def replay(
    api: Api,
    channel: Annotated[str | None, typer.Option("--channel", metavar="NAME", help="Filter by channel.")] = None,
    dead_letter_id: Annotated[
        int | None,
        typer.Option("--dead-letter", metavar="N", min=1, help="Send only this one, even if it was sent again before."),
    ] = None,
) -> None:
    """Send undelivered alerts again, each once.

    `breakwater alerts undelivered` lists them with their numbers, including those that fail again.

    For example:

        breakwater alerts replay

        breakwater alerts replay --channel ops

        breakwater alerts replay --dead-letter 17
    """
    result = _replay(api, channel, dead_letter_id)
    api.answer((result.model_dump(exclude={"continue_after"}), result), _show_replays)


def _show_replays(result: AlertReplays) -> None:
    channels = ", ".join(f"{number:,} on {name}" for name, number in sorted(result.channels.items()))
    what = counted(result.replayed, "alert")
    output.write(f"{what} will be sent again{f': {channels}' if channels else ''}")
    if result.already:
        already = counted(result.already, "alert")
        output.note(f"{already} had been sent again before; --dead-letter sends one once more")
    if result.skipped:
        skipped = counted(result.skipped, "alert")
        output.note(f"{skipped} of channels that are no longer in the config", "yellow")


def short_ids(incident_ids: Iterable[str]) -> dict[str, str]:
    """The beginning of each id, as long as distinguishes it from the others."""
    listed = sorted(set(incident_ids))
    length = _SHORT
    while len({one[:length] for one in listed}) < len(listed):
        length += 1
    return {one: one[:length] for one in listed}


def _change(api: Api, action: Literal["ack", "resolve"], incident: str, reason: str | None) -> None:
    def show(alert: Alert) -> None:
        by, at = alert.acknowledged_by, alert.acknowledged_at
        if alert.status == "resolved":
            by, at = alert.resolved_by or "itself", alert.resolved_at
        unchanged = isinstance(alert, UnchangedAlert)
        by_whom = f" {done(by, at)}" if unchanged else f" by {by}"
        why = f": {alert.reason}" if alert.reason else ""
        [short] = short_ids([alert.incident_id]).values()
        output.styled(f"{short} is {'already ' if unchanged else ''}", output.state(alert.status), by_whom, why)
        output.note(alert.title)

    body, see = {"incident_id": incident, "reason": reason}, "breakwater alerts list --status all"
    api.answer(api.act((UnchangedAlert, Alert), f"alerts/{action}", body, see=see), show)


def _replay(api: Api, channel: str | None, dead_letter_id: int | None) -> AlertReplays:
    """Replays part by part; returns the results of all parts together."""
    replayed, already, skipped = 0, 0, 0
    channels: Counter[str] = Counter()
    body = {"channel": channel, "dead_letter_id": dead_letter_id}
    for part in api.act_in_parts(AlertReplays, "alerts/replay", body, see="breakwater alerts undelivered"):
        replayed, already, skipped = replayed + part.replayed, already + part.already, skipped + part.skipped
        channels.update(part.channels)
    return AlertReplays(replayed=replayed, already=already, skipped=skipped, channels=dict(channels))
