"""`breakwater tail`: prints live and stored events, as lines for people or as CloudEvents."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple
from urllib.parse import urlencode

import typer
from nats.aio.client import Client

from breakwater.client import ApiClient, ApiRefusedError, ApiUnavailableError
from breakwater.client.commands import SEE_DOCTOR, TIMEOUT_S, Api, api_command, api_errors
from breakwater.kernel.commands import connect, formats, output
from breakwater.kernel.commands.connect import run
from breakwater.kernel.commands.errors import usage_error
from breakwater.kernel.commands.output import Cell, state
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.http.contract import ALL_SENT
from breakwater.kernel.nats.cloud_events import EventAttributes
from breakwater.kernel.nats.lookup import Lookup, StoredMessage
from breakwater.kernel.nats.subjects import Stream, encode_token
from breakwater.kernel.types import format_time
from breakwater.local.plane import PlaneLocation

if TYPE_CHECKING:
    import aiohttp

KINDS = ("attempts", "executions", "breakers", "budgets", "guards", "limits", "alerts", "progress")

NATS_VARIABLE = "BREAKWATER_NATS_URL"
RECONNECT_S = 0.5

_SINGULAR = {kind: kind.removesuffix("s") if kind != "progress" else kind for kind in KINDS}
_KIND_WIDTH = max(len(name) for name in _SINGULAR.values())
_AGENT_WIDTH = 16
_STATE_WIDTH = 15
_AGENT_IN_SUBJECT = frozenset({"attempts", "executions", "breakers", "guards", "progress"})


@dataclass(frozen=True, slots=True)
class ReceivedEvent:
    """An event as NATS delivered it."""

    subject: str
    data: bytes
    headers: Mapping[str, str]

    @property
    def kind(self) -> str:
        """The second token of the subject, such as `attempts`."""
        return self.subject.split(".", 2)[1]


@api_command
def tail(
    api: Api,
    agent: Annotated[str | None, typer.Option("--agent", help="Filter by agent.")] = None,
    events: Annotated[
        str | None, typer.Option("--events", metavar="KIND,…", help=f"Of {', '.join(KINDS)}. [default: all]")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="AGO", help="Start with events since: 10m, 2h, 1d, or a time."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Continue with new events.")] = True,
) -> None:
    """Show live events: attempts, executions, breaker transitions, budget thresholds, alerts, progress.

    One line for each, until Ctrl-C. With --json each line is a CloudEvent with the event as its data. Past events come
    from the event log (72 hours by default); progress is only shown live.

    Reads NATS; or the HTTP API with --url or --api-key, or if only BREAKWATER_URL is set. The API has no progress, and
    executions without their texts.

    For example:

        breakwater tail

        breakwater tail --agent content-writer --events attempts,breakers

        breakwater tail --since 10m --no-follow --json | jq -c 'select(.data.outcome == "error") | .data.error'
    """
    kinds = _kinds(events)
    if not follow and since is None:
        raise usage_error("--no-follow without --since shows nothing", "Add --since 10m.")
    begin = formats.since(since, datetime.now(UTC)) if since is not None else None
    plane = api.plane
    if api.uses_http(NATS_VARIABLE):
        if kinds == ("progress",):
            plane.require_server(NATS_VARIABLE, "show progress", api.url, api.api_key)
        if events is not None and "progress" in kinds:
            output.note(f"the HTTP API has no progress; {NATS_VARIABLE} shows it", "yellow")
        with api_errors(unanswered=SEE_DOCTOR):
            run(tail_api(api, agent, [kind for kind in kinds if kind != "progress"], begin, follow=follow))
        return
    url = plane.nats_url
    if agent is not None:
        _note_unknown(plane, agent)
    run(_tail(url, agent, kinds, begin, follow=follow, as_json=api.as_json))


def _note_unknown(plane: PlaneLocation, agent: str) -> None:
    """Prints a note if the agent is not configured. Without a config, any agent may exist."""
    try:
        agents = plane.config(None).agents
    except ConfigError:
        return
    if agent not in agents:
        _note_not_configured(agent, str(plane.config_file(None)), agents)


def _note_not_configured(agent: str, config: str, agents: Iterable[str]) -> None:
    output.note(f"agent {agent!r} is not configured; {config} has {', '.join(agents)}", "yellow")


async def tail_api(api: Api, agent: str | None, kinds: Sequence[str], begin: datetime | None, *, follow: bool) -> None:
    """Does what `_tail` does, over the HTTP API. After a broken connection it continues where it was."""
    parameters = {
        "kinds": ",".join(kinds),
        "follow": str(follow).lower(),
        "cloudevents": "true",
        **({} if agent is None else {"agent": agent}),
        **({} if begin is None else {"since": format_time(begin)}),
    }
    async with api.client() as client:
        if agent is not None:
            agents = [listed["agent_id"] for listed in await client.get("agents", timeout_s=TIMEOUT_S)]
            if agent not in agents:
                _note_not_configured(agent, client.url, agents)
        if begin is None and not api.as_json:
            output.note("waiting for events; Ctrl-C ends")
        place: str | None = None
        is_lost = False
        while True:
            try:
                async with _open_events(client, parameters, place) as content:
                    if is_lost:
                        output.note("connected again")
                        is_lost = False
                    async for event in _server_sent(content):
                        place = event.place or place
                        if event.is_last:
                            return
                        _show_sent(event, as_json=api.as_json)
            except (ApiUnavailableError, ApiRefusedError) as error:
                if place is None or error.status != 503:
                    raise
            if not is_lost:
                output.note("connection lost")
                is_lost = True
            await asyncio.sleep(RECONNECT_S)


def _open_events(
    client: ApiClient, parameters: Mapping[str, str], place: str | None
) -> AbstractAsyncContextManager[aiohttp.StreamReader]:
    headers = {} if place is None else {"Last-Event-ID": place}
    return client.open_stream(f"events?{urlencode(parameters)}", headers=headers)


class _SentEvent(NamedTuple):
    """An event of the HTTP API, or a comment without kind and data."""

    place: str
    kind: str
    data: str
    comment: str

    @property
    def is_last(self) -> bool:
        """Returns whether it is the comment that ends a stream that does not follow."""
        return self.comment == ALL_SENT


async def _server_sent(content: aiohttp.StreamReader) -> AsyncGenerator[_SentEvent]:
    fields: dict[str, str] = {}
    incomplete_line = b""
    while data := await content.readany():
        *lines, incomplete_line = (incomplete_line + data).split(b"\n")
        for line in lines:
            name, _, value = line.decode().partition(":")
            if line:
                fields[name or "comment"] = value.removeprefix(" ")
            elif fields:
                names = ("id", "event", "data", "comment")
                yield _SentEvent(*(fields.get(name, "") for name in names))
                fields = {}


def _show_sent(event: _SentEvent, *, as_json: bool) -> None:
    if event.kind == "gap":
        output.note("events in between are no longer stored")
    elif event.data:
        document = json.loads(event.data)
        if as_json:
            output.json_line(document)
        else:
            output.print_styled(*cells(event.kind, document["data"], datetime.now(UTC)))


def subject_of(kind: str, agent: str | None) -> str:
    """The subject filter of a kind; only of one agent, if the kind's subjects name agents."""
    if agent is None or kind not in _AGENT_IN_SUBJECT:
        return f"bw.{kind}.>"
    token = encode_token(agent)
    return f"bw.{kind}.{token}" if kind == "guards" else f"bw.{kind}.{token}.>"


async def _tail(
    url: str, agent: str | None, kinds: Sequence[str], begin: datetime | None, *, follow: bool, as_json: bool
) -> None:
    received: asyncio.Queue[ReceivedEvent] = asyncio.Queue()
    shown_ids: set[str] = set()

    async def receive(event: Any) -> None:
        received.put_nowait(ReceivedEvent(event.subject, event.data, event.headers or {}))

    def note_error(error: Exception) -> None:
        output.note(f"NATS: {str(error) or type(error).__name__}")

    def note_connection(connected: bool) -> None:
        output.note("connected again; events in between are missing here" if connected else "connection lost")

    async with connect.bus(url, reconnects=True, on_error=note_error, on_connection=note_connection) as client:
        if follow:
            # Subscribes before it reads stored events, so that no event is missed in between.
            for kind in kinds:
                await client.subscribe(subject_of(kind, agent), cb=receive)
            await connect.flush_subscriptions(client)
        if begin is not None:
            async with aclosing(_stored_events(client, kinds, agent, begin)) as stored_events:
                async for message in stored_events:
                    _show(message, agent, as_json=as_json)
                    if follow and (event_id := message.headers.get("ce-id")):
                        shown_ids.add(event_id)
        elif not as_json:
            output.note("waiting for events; Ctrl-C ends")
        while follow:
            message = await received.get()
            if shown_ids and message.headers.get("ce-id") in shown_ids:
                continue
            _show(message, agent, as_json=as_json)


async def _stored_events(
    client: Client, kinds: Sequence[str], agent: str | None, begin: datetime
) -> AsyncGenerator[ReceivedEvent]:
    """Yields the stored events of the kinds, merged from their streams by storage time."""
    logged_kinds = [kind for kind in kinds if kind not in ("alerts", "progress")]
    subjects: list[tuple[Stream, str]] = []
    if logged_kinds:
        subjects.append((Stream.EVENTS, subject_of(logged_kinds[0], agent) if len(logged_kinds) == 1 else "bw.>"))
    if "alerts" in kinds:
        subjects.append((Stream.ALERTS, subject_of("alerts", agent)))
    async with AsyncExitStack() as stack:
        heads: dict[AsyncGenerator[StoredMessage], StoredMessage] = {}
        for stream, subject in subjects:
            source = await stack.enter_async_context(
                aclosing(Lookup(lambda: client).scan(stream, subject, start=begin))
            )
            first = await anext(source, None)
            if first is not None:
                heads[source] = first
        while heads:
            source = min(heads, key=lambda source: heads[source].stored_at)
            stored = heads.pop(source)
            message = ReceivedEvent(stored.subject, stored.data, stored.headers)
            if message.kind in kinds:
                yield message
            next_stored = await anext(source, None)
            if next_stored is not None:
                heads[source] = next_stored


def _show(message: ReceivedEvent, agent: str | None, *, as_json: bool) -> None:
    try:
        event: Any = json.loads(message.data)
    except ValueError:
        output.note(f"{message.subject}: is not JSON; skipped")
        return
    if agent is not None and event.get("agent") != agent:
        return
    if as_json:
        output.json_line(EventAttributes.of(message.subject, message.headers, event).document(event))
    else:
        output.print_styled(*cells(message.kind, event, datetime.now(UTC)))


def _kinds(events: str | None) -> tuple[str, ...]:
    if events is None:
        return KINDS
    kinds = [part.strip() for part in events.split(",") if part.strip()]
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        unknown_kinds = ", ".join(unknown) or "an empty list"
        raise usage_error(f"--events: {unknown_kinds} is not a kind of event", f"Kinds: {', '.join(KINDS)}.")
    return tuple(dict.fromkeys(kinds))


def cells(kind: str, event: Mapping[str, Any], now: datetime) -> tuple[Cell, ...]:
    """Writes an event as the cells of a line."""
    at = event.get("completed_at") or event.get("at")
    time_text = formats.clock(datetime.fromisoformat(at), now) if isinstance(at, str) else ""
    parts = _PARTS_BY_KIND.get(kind, _other)(event)
    agent = str(event.get("agent") or event.get("scope") or "-")
    return (
        (f"{time_text}  ", "dim"),
        f"{_SINGULAR.get(kind, kind):<{_KIND_WIDTH}}  {agent:<{_AGENT_WIDTH}}  ",
        state(parts.state, f"{parts.label or parts.state:<{_STATE_WIDTH}}"),
        "  " + "  ".join(detail for detail in parts.details if detail),
    )


class _Parts(NamedTuple):
    """The parts of an event's line that depend on its kind."""

    state: str
    details: Sequence[str]
    label: str = ""
    """The text in the tone of the state; by default the state."""


def _attempt(event: Mapping[str, Any]) -> _Parts:
    cause = "" if event["cause"] == "first" else f"({event['cause']})"
    duration = formats.duration(event["duration_ms"])
    return _Parts(
        str(event["outcome"]), [event["model"], cause, duration, _cost(event.get("cost"), event), _error(event)]
    )


def _execution(event: Mapping[str, Any]) -> _Parts:
    count = event["attempts_count"]
    error = _error(event)
    return _Parts(
        str(event["status"]),
        [
            event.get("chosen_model") or event.get("requested_model") or "",
            "dry run" if event.get("dry_run") else f"{count} attempt{'' if count == 1 else 's'}",
            formats.duration(event["duration_ms"]),
            _cost(event.get("total_cost"), event),
            str(event["reason"]) if event.get("reason") and not error.startswith(str(event["reason"])) else "",
            error,
            event["job_id"],
        ],
    )


def _breaker(event: Mapping[str, Any]) -> _Parts:
    return _Parts(str(event["to_state"]), [event["model"], f"was {event['from_state']}:", event["reason"]])


def _guard(event: Mapping[str, Any]) -> _Parts:
    task_id = event.get("task_id")
    tenant = event.get("tenant")
    task = f"task {task_id}" + (f" of {tenant}" if tenant else "") if task_id else ""
    return _Parts(str(event.get("kind", "")), [task, str(event.get("reason", ""))])


def _budget(event: Mapping[str, Any]) -> _Parts:
    kind = str(event["kind"])
    limit = event.get("limit")
    scope = str(event["scope"])
    owner = {"agent": f"agent:{event.get('agent')}", "tenant": f"tenant:{event.get('tenant')}"}.get(scope, scope)
    budget = f"{owner}/{event['window']} {event['period']}"
    if kind in {"raised", "raise_ended", "repaired"}:
        before = event.get("previous")
        after = event["total"] if kind == "repaired" else limit
        change = ""
        if before is not None and after is not None:
            change = f"{formats.exact_money(before)} is now {formats.exact_money(after)}"
        return _Parts(kind, [budget, change, str(event.get("reason") or "")])
    spent = formats.money(event["total"]) + (f" of {formats.money(limit)}" if limit is not None else "")
    refuses = kind == "hard_cap" and event["enforcement"] == "hard"
    # A hard cap may refuse calls before the spend has reached it.
    percent = event["threshold_percent"]
    passed = "" if refuses and Decimal(event["total"]) < Decimal(limit or 0) else f"passed {percent} %"
    return _Parts(kind, [budget, spent, passed, "calls that do not fit are refused" if refuses else ""])


def _limit(event: Mapping[str, Any]) -> _Parts:
    raised = event.get("raised")
    until = f"to {raised['amount']} until {raised['until']}" if raised and event["kind"] == "raised" else ""
    return _Parts(str(event["kind"]), [str(event["limit_id"]), until, f"by {event['by']}", str(event["reason"] or "")])


def _alert(event: Mapping[str, Any]) -> _Parts:
    change = str(event.get("change", ""))
    count = event.get("count", 1)
    status = str(event.get("status", ""))
    operator = event.get("resolved_by") if status == "resolved" else event.get("acknowledged_by")
    details = [
        change,
        "" if status == change else status,
        f"by {operator}" if operator and change == status else "",
        f"{count:,} times" if count > 1 else "",
        event["title"],
        event.get("incident_id", ""),
    ]
    return _Parts(event["severity"], details, label=event["event"])


def _progress(event: Mapping[str, Any]) -> _Parts:
    attempt = event.get("attempt")
    details = [
        event.get("model") or "",
        f"attempt {attempt}" if attempt else "",
        event.get("event") or "",
        event.get("detail") or "",
        event["job_id"],
    ]
    return _Parts(str(event["state"]), details)


def _other(event: Mapping[str, Any]) -> _Parts:
    return _Parts("", [str(event.get("reason") or event.get("title") or "")])


_PARTS_BY_KIND: Mapping[str, Callable[[Mapping[str, Any]], _Parts]] = {
    "attempts": _attempt,
    "executions": _execution,
    "breakers": _breaker,
    "guards": _guard,
    "budgets": _budget,
    "limits": _limit,
    "alerts": _alert,
    "progress": _progress,
}


def _cost(cost: str | None, event: Mapping[str, Any]) -> str:
    if cost is None:
        # A call that was never made has no cost, rather than an unknown one.
        return "" if event.get("short_circuited") else "cost unknown"
    return formats.money(cost)


def _error(event: Mapping[str, Any]) -> str:
    error = event.get("error")
    if not error and (kind := event.get("error_kind")):  # a summary, as the HTTP API sends it
        error = {"kind": kind, "status_code": event["error_status_code"], "message": event["error_message"]}
    if not error:
        return ""
    status = f" {error['status_code']}" if error.get("status_code") else ""
    first_line = str(error["message"]).splitlines()[0] if error["message"] else ""
    return f"{error['kind']}{status}: {first_line}"
