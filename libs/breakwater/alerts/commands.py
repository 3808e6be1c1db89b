"""`breakwater alerts`: lists, acknowledges and resolves incidents, and replays undelivered alerts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Literal
from urllib.parse import quote

import typer

from breakwater.alerts.contract import Alert, AlertList, AlertReplays, ChannelTest, UnchangedAlert, UndeliveredList
from breakwater.alerts.views import FACTS, INCIDENTS, NO_CHANNEL, UNDELIVERED, changed_by
from breakwater.client.commands import SEE_DOCTOR, Api, DefaultListGroup, ReasonOption, api_command
from breakwater.kernel.columns import with_display
from breakwater.kernel.commands import output
from breakwater.kernel.commands.errors import ExitCode
from breakwater.kernel.commands.text_input import check_sendable
from breakwater.kernel.formats import quantity

TEST_TIMEOUT_S = 30.0
"""Seconds to wait for a test message. The API waits 20 s for an alerter, which waits for the receiver."""

_SHORT_ID_LENGTH = len("inc_") + 8

_HELP = """List incidents; acknowledge or resolve them; test a channel. Without a command it lists them.

Name an incident by its id, or by a unique prefix.
"""

app = typer.Typer(cls=DefaultListGroup, help=_HELP)

IncidentArgument = Annotated[
    str, typer.Argument(metavar="INCIDENT", help="Incident id, or a unique prefix, such as inc_3f9a1c07.")
]
LimitOption = Annotated[int, typer.Option("--limit", min=1, max=1_000, help="Maximum number of rows.")]


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
    """List the unresolved incidents by severity, then by age: the oldest of the most severe first.

    One that is `pending` needs an operator: reminders are sent until an operator acknowledges or resolves it. The
    column `count` shows the number of occurrences.

    For example:

        breakwater alerts list --status pending

        breakwater alerts list --agent content-writer --event breaker_open --status all

        breakwater alerts list --json | jq -r '.alerts[].incident_id'
    """

    def show(alert_list: AlertList) -> None:
        short = short_ids(alert.incident_id for alert in alert_list.alerts)
        columns = with_display(INCIDENTS, ["incident_id"], lambda alert: short[alert.incident_id])
        no_incident = "no incident is known" if status == "all" else f"no incident is {status}"
        filtered = " of those you asked for" if event or agent else ""
        output.table(columns, alert_list.alerts, empty=f"{no_incident}{filtered}")
        api.note_more(alert_list, limit)
        if not alert_list.channels:
            output.note(NO_CHANNEL, "yellow")

    api.show_result(api.get(AlertList, "alerts", status=status, event=event, agent=agent, limit=limit), show)


@app.command()
@api_command
def show(api: Api, incident: IncidentArgument) -> None:
    """Show all of one incident: its meaning, what to do, and the operator who is working on it.

    For example:

        breakwater alerts show inc_3f9a1c07

        breakwater alerts show inc_3f9a1c07 --json | jq .payload
    """
    check_sendable("incident", incident)
    result = api.get(Alert, f"alerts/{quote(incident, safe='')}")
    api.show_result(result, lambda alert: output.facts([(alert.incident_id, "bold"), f"  {alert.title}"], FACTS, alert))


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
        if tested.delivered:
            output.print_styled(f"{tested.channel}: the test message has ", ("arrived", "green"))
        else:
            output.print_styled(f"{tested.channel}: the test message did ", ("not arrive", "red"), f": {tested.error}")

    result = api.act(
        ChannelTest,
        "alerts/test",
        {"channel": channel},
        see="",
        unanswered=f"The message may still have been sent: check the channel. {SEE_DOCTOR}",
        unknown="The config names channels in alerts.channels.",
        timeout_s=TEST_TIMEOUT_S,
    )
    if not api.show_result(result, show).delivered:
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
    for_channel = f" for {channel}" if channel else ""
    none_undelivered = f"every alert{for_channel} has arrived, or is on its way"

    def show(undelivered_list: UndeliveredList) -> None:
        output.table(
            UNDELIVERED,
            undelivered_list.undelivered,
            empty=none_undelivered if undelivered_list.channels else NO_CHANNEL,
        )
        api.note_more(undelivered_list, limit)

    api.show_result(api.get(UndeliveredList, "alerts/undelivered", channel=channel, limit=limit), show)


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
    api.show_result((result.model_dump(exclude={"continue_after"}), result), _show_replays)


def _show_replays(result: AlertReplays) -> None:
    channels = ", ".join(f"{number:,} on {name}" for name, number in sorted(result.channels.items()))
    replayed = quantity(result.replayed, "alert")
    output.write(f"{replayed} will be sent again{f': {channels}' if channels else ''}")
    if result.already:
        already = quantity(result.already, "alert")
        output.note(f"{already} had been sent again before; --dead-letter sends one once more")
    if result.skipped:
        skipped = quantity(result.skipped, "alert")
        output.note(f"{skipped} of channels that are no longer in the config", "yellow")


def short_ids(incident_ids: Iterable[str]) -> dict[str, str]:
    """Shortens each id to a prefix that distinguishes it from the others."""
    unique_ids = sorted(set(incident_ids))
    length = _SHORT_ID_LENGTH
    while len({incident_id[:length] for incident_id in unique_ids}) < len(unique_ids):
        length += 1
    return {incident_id: incident_id[:length] for incident_id in unique_ids}


def _change(api: Api, action: Literal["ack", "resolve"], incident: str, reason: str | None) -> None:
    def show(alert: Alert) -> None:
        if alert.status == "resolved":
            operator = alert.resolved_by or "itself"
            at = alert.resolved_at
        else:
            operator = alert.acknowledged_by
            at = alert.acknowledged_at
        unchanged = isinstance(alert, UnchangedAlert)
        by_operator = f" {changed_by(operator, at)}" if unchanged else f" by {operator}"
        because = f": {alert.reason}" if alert.reason else ""
        [short_id] = short_ids([alert.incident_id]).values()
        is_now = f"{short_id} is {'already ' if unchanged else ''}"
        output.print_styled(is_now, output.state(alert.status), by_operator, because)
        output.note(alert.title)

    result = api.act(
        (UnchangedAlert, Alert),
        f"alerts/{action}",
        {"incident_id": incident, "reason": reason},
        see="breakwater alerts list --status all",
    )
    api.show_result(result, show)


def _replay(api: Api, channel: str | None, dead_letter_id: int | None) -> AlertReplays:
    """Replays undelivered alerts part by part; returns the sum of all parts."""
    body = {"channel": channel, "dead_letter_id": dead_letter_id}
    parts = list(api.act_in_parts(AlertReplays, "alerts/replay", body, see="breakwater alerts undelivered"))
    channels: Counter[str] = Counter()
    for part in parts:
        channels.update(part.channels)
    return AlertReplays(
        replayed=sum(part.replayed for part in parts),
        already=sum(part.already for part in parts),
        skipped=sum(part.skipped for part in parts),
        channels=dict(channels),
    )
