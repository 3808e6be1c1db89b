"""`breakwater tail`: what happens, while it happens."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from breakwater.cli import connect, formats, output
from breakwater.cli.connect import run
from breakwater.cli.errors import wrong_usage
from breakwater.cli.plane import DataOption, JsonOption, Plane
from breakwater.cli.tail_lines import KINDS, Told, cells, cloud_event

if TYPE_CHECKING:
    from nats.aio.client import Client

_AGENT_IN_SUBJECT = frozenset({"attempts", "executions", "breakers", "guards", "progress"})


def tail(
    agent: Annotated[str | None, typer.Option("--agent", help="Of this agent only.")] = None,
    events: Annotated[
        str | None, typer.Option("--events", metavar="KIND,…", help=f"Of {', '.join(KINDS)}. [default: all]")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="AGO", help="Begin with what was stored since: 10m, 2h, 1d, a time."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Go on with what happens from now on.")] = True,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show live events: attempts, executions, breaker transitions, budget thresholds, alerts, progress.

    One line for each, until Ctrl-C. With --json each line is a CloudEvent with the event as its data. What the past
    holds comes from the event log (72 hours by default); progress is live only.

    For example:

        breakwater tail

        breakwater tail --agent content-writer --events attempts,breakers

        breakwater tail --since 10m --no-follow --json | jq -c 'select(.data.outcome == "error") | .data.error'
    """
    kinds = _kinds(events)
    if not follow and since is None:
        raise wrong_usage("--no-follow without --since shows nothing", "Add --since 10m.")
    begin = formats.since(since, datetime.now(UTC)) if since is not None else None
    url = Plane(data).nats_url
    run(_tail(url, agent, kinds, begin, follow=follow, as_json=as_json))


def subject_of(kind: str, agent: str | None) -> str:
    """The subjects of a kind, of one agent where they name it."""
    from breakwater.contracts.subjects import encode_token

    if agent is None or kind not in _AGENT_IN_SUBJECT:
        return f"bw.{kind}.>"
    token = encode_token(agent)
    return f"bw.{kind}.{token}" if kind == "guards" else f"bw.{kind}.{token}.>"


async def _tail(
    url: str, agent: str | None, kinds: Sequence[str], begin: datetime | None, *, follow: bool, as_json: bool
) -> None:
    import asyncio

    heard: asyncio.Queue[Told] = asyncio.Queue()
    seen: set[str] = set()

    async def hear(message: Any) -> None:
        heard.put_nowait(Told(message.subject, message.data, message.headers or {}))

    def complain(error: Exception) -> None:
        output.note(f"NATS: {str(error) or type(error).__name__}")

    def connection(there: bool) -> None:
        output.note("connected again; what happened meanwhile was not heard" if there else "connection lost")

    async with connect.bus(url, patient=True, on_error=complain, on_connection=connection) as client:
        if follow:
            # Before the past is read, so that nothing falls between the two.
            for kind in kinds:
                await client.subscribe(subject_of(kind, agent), cb=hear)
            await connect.subscribed(client)
        if begin is not None:
            async with aclosing(_past(client, kinds, agent, begin)) as past:
                async for told in past:
                    _show(told, agent, as_json=as_json)
                    if follow and (event_id := told.headers.get("ce-id")):
                        seen.add(event_id)
        elif not as_json:
            output.note("waiting for events; Ctrl-C ends")
        while follow:
            told = await heard.get()
            if seen and told.headers.get("ce-id") in seen:
                continue
            _show(told, agent, as_json=as_json)


async def _past(client: Client, kinds: Sequence[str], agent: str | None, begin: datetime) -> AsyncGenerator[Told]:
    """What the logs hold of the kinds, in the order of the logs' own times."""
    from breakwater.cli.history import stored
    from breakwater.contracts.subjects import Stream

    logged = [kind for kind in kinds if kind not in ("alerts", "progress")]
    wanted: list[tuple[Stream, str]] = []
    if logged:
        wanted.append((Stream.EVENTS, subject_of(logged[0], agent) if len(logged) == 1 else "bw.>"))
    if "alerts" in kinds:
        wanted.append((Stream.ALERTS, subject_of("alerts", agent)))
    async with AsyncExitStack() as stack:
        heads: dict[AsyncGenerator[Told], Told] = {}
        for stream, subject in wanted:
            source = await stack.enter_async_context(aclosing(stored(client, stream, subject, begin)))
            if (told := await anext(source, None)) is not None:
                heads[source] = told
        while heads:
            source = min(heads, key=lambda source: heads[source].headers["Nats-Time-Stamp"].rstrip("Z"))
            told = heads.pop(source)
            if told.kind in kinds:
                yield told
            if (following := await anext(source, None)) is not None:
                heads[source] = following


def _show(told: Told, agent: str | None, *, as_json: bool) -> None:
    try:
        event: Any = json.loads(told.data)
    except ValueError:
        output.note(f"{told.subject}: is not JSON; skipped")
        return
    if agent is not None and event.get("agent") != agent:
        return
    if as_json:
        output.json_line(cloud_event(told, event))
    else:
        output.styled(*cells(told.kind, event, datetime.now(UTC)))


def _kinds(events: str | None) -> tuple[str, ...]:
    if events is None:
        return KINDS
    wanted = [part.strip() for part in events.split(",") if part.strip()]
    unknown = [kind for kind in wanted if kind not in KINDS]
    if unknown or not wanted:
        what = ", ".join(unknown) or "an empty list"
        raise wrong_usage(f"--events: {what} is no kind of event", f"There are {', '.join(KINDS)}.")
    return tuple(dict.fromkeys(wanted))
