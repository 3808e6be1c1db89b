"""`breakwater alerts`: what people are told of, looking after it, and what did not reach them."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import quote, urlencode

import typer

from breakwater.cli import alert_tables, by_hand, formats, output
from breakwater.cli.connect import run
from breakwater.cli.errors import ExitCode
from breakwater.cli.given import sendable
from breakwater.cli.groups import ListsByItself
from breakwater.cli.plane import ApiKeyOption, DataOption, Door, JsonOption, Plane, UrlOption

if TYPE_CHECKING:
    from breakwater.contracts.api import AlertReplays

TEST_TIMEOUT_S = 30.0
"""The interface waits 20 s for an alerter, which waits for the receiver."""

_HELP = """See what people are told of; acknowledge or resolve it; test a channel. Without a command it lists incidents.

For example:

    breakwater alerts

    breakwater alerts ack inc_3f9a1c07 --reason "looking at it"

    breakwater alerts resolve inc_3f9a1c07

    breakwater alerts test ops

    breakwater alerts replay --channel ops

An incident is named by its id, or by so much of it that no other one begins so.
"""

app = typer.Typer(cls=ListsByItself, help=_HELP)

IncidentArgument = Annotated[
    str, typer.Argument(metavar="INCIDENT", help="Its id as `breakwater alerts` shows it, such as inc_3f9a1c07.")
]
ReasonOption = Annotated[
    str | None, typer.Option("--reason", metavar="TEXT", help="Why; it is kept with the incident.")
]
LimitOption = Annotated[int, typer.Option("--limit", min=1, max=1_000, help="At most so many, the newest.")]


@app.command(name="list")
def list_(
    status: Annotated[
        str,
        typer.Option("--status", help="unresolved, firing, pending, acknowledged, resolved or all."),
    ] = "unresolved",
    event: Annotated[
        str | None, typer.Option("--event", metavar="NAME", help="Only these: breaker_open, guard_tripped, …")
    ] = None,
    agent: Annotated[str | None, typer.Option("--agent", metavar="NAME", help="Only those of this agent.")] = None,
    limit: LimitOption = 100,
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the incidents that are not over, the one that was opened last first.

    One that is `pending` waits for a person: people are reminded of it until somebody acknowledges or resolves it.
    The column `count` tells how often it happened.

    For example:

        breakwater alerts list --status pending

        breakwater alerts list --agent content-writer --event breaker_open --status all

        breakwater alerts list --json | jq -r '.alerts[].incident_id'
    """
    from breakwater.cli import api
    from breakwater.contracts.alerts import Alert

    wanted = {"status": status, "event": event, "agent": agent, "limit": limit}
    document = _got(Plane(data).door(url, api_key), "alerts", wanted)
    answer = api.read(dict[str, Any], document)
    alerts, more = api.read(list[Alert], answer.get("alerts")), api.read(bool, answer.get("more"))
    if as_json:
        output.json_document(document)
        return
    what = "incident is known" if status == "all" else f"incident is {status}"
    alert_tables.show(
        alerts, datetime.now(UTC), empty=f"no {what}{' of those you asked for' if event or agent else ''}"
    )
    if more:
        output.note(f"(there are more than these {limit:,}; see --limit)")


@app.command()
def show(
    incident: IncidentArgument,
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show all of one incident: what it means, what to do, who looks after it.

    For example:

        breakwater alerts show inc_3f9a1c07

        breakwater alerts show inc_3f9a1c07 --json | jq .payload
    """
    from breakwater.cli import api
    from breakwater.contracts.alerts import Alert

    sendable("incident", incident)
    document = run(api.get(Plane(data).door(url, api_key), f"alerts/{quote(incident, safe='')}"))
    alert = api.read(Alert, document)
    if as_json:
        output.json_document(document)
        return
    alert_tables.show_one(alert, datetime.now(UTC))


@app.command()
def ack(
    incident: IncidentArgument,
    reason: ReasonOption = None,
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Acknowledge an incident: somebody looks after it, and people are reminded no more.

    For example:

        breakwater alerts ack inc_3f9a1c07 --reason "looking at it"
    """
    _change("ack", incident, reason, Plane(data).door(url, api_key), as_json=as_json)


@app.command()
def resolve(
    incident: IncidentArgument,
    reason: ReasonOption = None,
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Resolve an incident: it is over. Nothing else changes, no breaker closes and no task goes on.

    For example:

        breakwater alerts resolve inc_3f9a1c07 --reason "the loop is mended"
    """
    _change("resolve", incident, reason, Plane(data).door(url, api_key), as_json=as_json)


@app.command(name="test")
def send_test(
    channel: Annotated[str, typer.Argument(metavar="CHANNEL", help="Its name in the config's alerts.channels.")],
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send a test message to a channel, and say whether it arrived. It ends with code 1 where it did not.

    For example:

        breakwater alerts test ops
    """
    from breakwater.cli import api
    from breakwater.contracts.alerts import ChannelTest

    sendable("channel", channel)
    document = run(
        api.post(
            Plane(data).door(url, api_key),
            "alerts/test",
            {"channel": channel},
            unanswered="Perhaps it was sent all the same: look there. `breakwater doctor` tells what is at work.",
            unknown="The config names channels in alerts.channels.",
            answer_timeout_s=TEST_TIMEOUT_S,
        )
    )
    tested = api.read(ChannelTest, document)
    if as_json:
        output.json_document(document)
    elif tested.delivered:
        output.styled(f"{tested.channel}: the test message has ", ("arrived", "green"))
    else:
        output.styled(f"{tested.channel}: the test message did ", ("not arrive", "red"), f": {tested.error}")
    if not tested.delivered:
        raise typer.Exit(ExitCode.FAILED)


@app.command()
def undelivered(
    channel: Annotated[str | None, typer.Option("--channel", metavar="NAME", help="Only those for this one.")] = None,
    limit: LimitOption = 100,
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the alerts that a channel did not take, and that were given up, the latest first.

    For example:

        breakwater alerts undelivered

        breakwater alerts undelivered --channel ops --json | jq '.undelivered[] | select(.replayed | not)'
    """
    from breakwater.cli import api
    from breakwater.contracts.api import UndeliveredAlert

    document = _got(Plane(data).door(url, api_key), "alerts/undelivered", {"channel": channel, "limit": limit})
    answer = api.read(dict[str, Any], document)
    listed = api.read(list[UndeliveredAlert], answer.get("undelivered"))
    more = api.read(bool, answer.get("more"))
    if as_json:
        output.json_document(document)
        return
    where = f" for {channel}" if channel else ""
    alert_tables.show_undelivered(listed, datetime.now(UTC), empty=f"every alert{where} has arrived, or is on its way")
    if more:
        output.note(f"(there are more than these {limit:,}; see --limit)")


@app.command()
def replay(
    channel: Annotated[str | None, typer.Option("--channel", metavar="NAME", help="Only those for this one.")] = None,
    dead_letter_id: Annotated[
        int | None,
        typer.Option("--dead-letter", metavar="N", min=1, help="Only this one, even where it was tried again before."),
    ] = None,
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have alerts tried again that did not arrive, each once.

    `breakwater alerts undelivered` lists them with their numbers. What fails again appears there again.

    For example:

        breakwater alerts replay

        breakwater alerts replay --channel ops

        breakwater alerts replay --dead-letter 17
    """
    told = _replayed(Plane(data).door(url, api_key), channel, dead_letter_id)
    if as_json:
        output.json_document(told.model_dump(exclude={"continue_after"}))
        return
    channels = ", ".join(f"{number:,} on {name}" for name, number in sorted(told.channels.items()))
    what = formats.counted(told.replayed, "alert")
    output.write(f"{what} will be tried again{f': {channels}' if channels else ''}")
    if told.already:
        output.note(
            f"{formats.counted(told.already, 'alert')} had been tried again before; --dead-letter tries one once more"
        )
    if told.skipped:
        output.note(f"{formats.counted(told.skipped, 'alert')} of channels that the config has no more", "yellow")


def _change(action: Literal["ack", "resolve"], incident: str, reason: str | None, door: Door, *, as_json: bool) -> None:
    from breakwater.cli import api
    from breakwater.contracts.alerts import Alert

    document = by_hand.act(
        door,
        f"alerts/{action}",
        {"incident_id": incident, "reason": reason},
        see="breakwater alerts list --status all",
        unknown="`breakwater alerts list --status all` lists those that are known.",
    )
    alert = api.read(Alert, document)
    if as_json:
        output.json_document(document)
        return
    alert_tables.tell(alert, datetime.now(UTC), unchanged=by_hand.is_unchanged(document))


def _got(door: Door, path: str, wanted: dict[str, Any]) -> Any:
    """What the interface has at a path, asked with those parameters that are given."""
    from breakwater.cli import api

    given = {name: value for name, value in wanted.items() if value is not None}
    for name, value in given.items():
        sendable(f"--{name}", value)
    return run(api.get(door, f"{path}?{urlencode(given)}"))


def _replayed(door: Door, channel: str | None, dead_letter_id: int | None) -> AlertReplays:
    """Asks until there are no more: one request replays a part of them."""
    from breakwater.cli import api
    from breakwater.contracts.api import AlertReplays

    after: int | None = None
    replayed, already, skipped = 0, 0, 0
    channels: Counter[str] = Counter()
    while True:
        document = by_hand.act(
            door,
            "alerts/replay",
            {"channel": channel, "dead_letter_id": dead_letter_id, "after": after},
            see="breakwater alerts undelivered",
            unknown="`breakwater alerts undelivered` lists them.",
        )
        part = api.read(AlertReplays, document)
        replayed, already, skipped = replayed + part.replayed, already + part.already, skipped + part.skipped
        channels.update(part.channels)
        after = part.continue_after
        if after is None:
            return AlertReplays(replayed=replayed, already=already, skipped=skipped, channels=dict(channels))
