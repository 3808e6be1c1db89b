"""`/api/v1/alerts`: incidents, operator actions on them, and channels: test messages and undelivered alerts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice

from pydantic import ValidationError

from breakwater.alerts.contract import (
    Alert,
    AlertList,
    AlertQuery,
    AlertReplays,
    AlertRequest,
    ChannelRequest,
    ChannelTest,
    ReplayAlertsRequest,
    UnchangedAlert,
    UndeliveredAlert,
    UndeliveredList,
    UndeliveredQuery,
)
from breakwater.alerts.rules.alert_rules import began_with
from breakwater.alerts.rules.incidents import acknowledge, resolve
from breakwater.alerts.store import IncidentLog, Incidents
from breakwater.jobs.api.dead_letters import StoredDeadLetter, read_dead_letter
from breakwater.kernel.http.operations import NATS_UNAVAILABLE, PERHAPS_DONE, ApiRequest, operation, utc_now
from breakwater.kernel.http.parsing import suggestion
from breakwater.kernel.http.problems import RequestError, unavailable, unknown
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.core import ask
from breakwater.kernel.nats.errors import AlreadyDecidedError, BusError, NoRespondersError
from breakwater.kernel.nats.lookup import ClientGetter, Found, Lookup
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import Header, Stream
from breakwater.kernel.types import Event, Message
from breakwater.kernel.validation import FieldError

LEAST_OF_ID = len("inc_") + 6
"""The shortest prefix that names an incident."""

TEST_TIMEOUT_S = 20.0
MAX_DEAD_LETTERS = 1_000
"""Dead letters that one request to replay looks at: it is answered within seconds, however many there are."""

DEAD_LETTERS = "bw.dlq.undeliverable.>"
EVER = datetime(1970, 1, 1, tzinfo=UTC)

IncidentAction = Callable[[Alert, str, "str | None", datetime], "Alert | None"]
"""An operator action on an incident: by whom, why and when. It returns None if there is nothing to do."""

UNKNOWN_INCIDENT = {
    404: "No such incident is known (`unknown_incident`).",
    409: "More than one incident has this prefix (`ambiguous_incident`).",
}
_CHANGED = "The incident; if there was nothing to do, with `unchanged`."


@dataclass(frozen=True, slots=True)
class IncidentRoutes:
    """The incidents of the fleet, for people."""

    log: IncidentLog
    agents: Collection[str]
    channels: Collection[str]
    now: Callable[[], datetime] = utc_now

    @operation(
        "GET",
        "/api/v1/alerts",
        tag="alerts",
        summary="Incidents",
        description="The current state of each incident, the latest first. Resolved incidents are listed for thirty "
        "days, at most the latest two thousand.",
        result="The incidents that match.",
        errors={404: "The agent is not known (`unknown_agent`).", 503: NATS_UNAVAILABLE},
    )
    async def list_incidents(self, request: ApiRequest[AlertQuery]) -> AlertList:
        """The incidents that match, the latest opened first."""
        wanted = request.input
        known = (await self.log.catch_up()).all()
        if wanted.agent is not None:
            agents = {*self.agents, *(alert.agent for alert in known if alert.agent is not None)}
            if wanted.agent not in agents:
                message = f"no agent {wanted.agent!r} is known{suggestion(wanted.agent, agents)}"
                raise RequestError(404, "unknown_agent", message, [FieldError(path="agent", message=message)])
        newest = sorted(known, key=lambda alert: alert.opened_at, reverse=True)
        found = tuple(islice((alert for alert in newest if _is_wanted(alert, wanted)), wanted.limit + 1))
        return AlertList(alerts=found[: wanted.limit], more=len(found) > wanted.limit, channels=len(self.channels))

    @operation(
        "GET",
        "/api/v1/alerts/{incident_id}",
        tag="alerts",
        summary="One incident",
        description="Its state after the newest alert.",
        result="The incident.",
        errors={**UNKNOWN_INCIDENT, 503: NATS_UNAVAILABLE},
    )
    async def show_incident(self, request: ApiRequest[Message]) -> Alert:
        """The newest alert of an incident."""
        return named(await self.log.catch_up(), request.path["incident_id"])

    @operation(
        "POST",
        "/api/v1/alerts/ack",
        tag="alerts",
        summary="Acknowledge an incident",
        description="Ends its reminders. It is resolved by its opposite event or by an operator. If it is acknowledged "
        "or resolved already, the response is an `UnchangedAlert`.",
        result=_CHANGED,
        errors={**UNKNOWN_INCIDENT, 503: f"{NATS_UNAVAILABLE} {PERHAPS_DONE}"},
    )
    async def acknowledge_incident(self, request: ApiRequest[AlertRequest]) -> UnchangedAlert | Alert:
        """Acknowledges an incident, and publishes that."""
        return await self._act(request, "incident_acknowledged", acknowledge)

    @operation(
        "POST",
        "/api/v1/alerts/resolve",
        tag="alerts",
        summary="Resolve an incident",
        description="If the problem recurs soon, the incident is reopened. If it is resolved already, the response is "
        "an `UnchangedAlert`. This changes only the incident: it closes no breaker and resumes no task.",
        result=_CHANGED,
        errors={**UNKNOWN_INCIDENT, 503: f"{NATS_UNAVAILABLE} {PERHAPS_DONE}"},
    )
    async def resolve_incident(self, request: ApiRequest[AlertRequest]) -> UnchangedAlert | Alert:
        """Resolves an incident, and publishes that."""
        return await self._act(request, "incident_resolved", resolve)

    async def _act(self, request: ApiRequest[AlertRequest], what: str, act: IncidentAction) -> Alert:
        alert, changed = await decided(
            self.log,
            lambda known: named(known, request.input.incident_id),
            lambda alert: act(alert, request.by, request.why or None, self.now()),
        )
        request.log(what, incident_id=alert.incident_id, changed=changed)
        return alert if changed else UnchangedAlert.model_validate({**alert.model_dump(), "unchanged": True})


async def decided(
    log: IncidentLog, which: Callable[[Incidents], Alert], act: Callable[[Alert], Alert | None]
) -> tuple[Alert, bool]:
    """Applies an operator action to an incident.

    Args:
        log: of all incidents.
        which: picks the incident; its errors are raised here.
        act: the action. It may be called repeatedly, if others decide at the same time.

    Returns:
        The incident as it is then, and True if this call changed it.

    Raises:
        BusError: it may be done or not; doing it again does no harm.
    """
    incident_id = which(await log.catch_up()).incident_id
    current: Alert | None = None

    def decide(known: Incidents) -> Alert | None:
        nonlocal current
        current = known.get(incident_id) or which(known)
        return act(current)

    alert = await log.decide(decide)
    if alert is not None:
        return alert, True
    assert current is not None  # `decide` was called at least once
    return current, False


def named(known: Incidents, name: str) -> Alert:
    """The incident of an id or its prefix. Raises RequestError: there is none, or more than one."""
    if (alert := known.get(name)) is not None:
        return alert
    long_enough = len(name) >= LEAST_OF_ID
    begin_so = [alert for alert in known.all() if alert.incident_id.startswith(name)] if long_enough else []
    if len(begin_so) == 1:
        return begin_so[0]
    if begin_so:
        details = [
            FieldError(path="incident_id", message=f"{alert.incident_id} is {alert.title!r}") for alert in begin_so[:20]
        ]
        message = f"{len(begin_so)} incidents begin with {name!r}; use a longer prefix"
        raise RequestError(409, "ambiguous_incident", message, details)
    hint = (
        "incidents resolved long ago are only in ClickHouse; `breakwater alerts list --status all` lists the others"
        if long_enough
        else "use its id, or a unique prefix: `inc_` and at least 6 characters"
    )
    raise unknown("incident", f"no incident {name!r} is known", "incident_id", hint)


def _is_wanted(alert: Alert, wanted: AlertQuery) -> bool:
    unresolved = wanted.status == "unresolved" and alert.status != "resolved"
    return (
        (wanted.status == "all" or unresolved or wanted.status == alert.status)
        and (wanted.event is None or wanted.event in (alert.event, began_with(alert)))
        and (wanted.agent is None or wanted.agent == alert.agent)
    )


@dataclass(frozen=True, slots=True)
class ChannelRoutes:
    """The channels of alerts."""

    channels: Collection[str]
    connection: ClientGetter
    lookup: Lookup
    publisher: Publisher

    @operation(
        "POST",
        "/api/v1/alerts/test",
        tag="alerts",
        summary="Send a test message to a channel",
        description="An alerter sends it like an alert; if it cannot be delivered, the response says why.",
        result="The outcome of the test.",
        errors={
            404: "The config has no such channel (`unknown_channel`).",
            503: "No alerter is running (`no_alerter`). Or it did not respond within 20 s, or NATS is unavailable "
            "(`unavailable`): the message may have been sent all the same.",
        },
    )
    async def test_channel(self, request: ApiRequest[ChannelRequest]) -> ChannelTest:
        """Has an alerter send a test message; the result says if it arrived."""
        channel = request.input.channel
        self._check(channel)
        try:
            answer = await ask(self.connection, subjects.channel_test(channel), b"", TEST_TIMEOUT_S)
        except NoRespondersError as error:
            message = "no alerter is running, so nothing can be sent; `breakwater doctor` shows which services are"
            raise unavailable("no_alerter", message) from error
        except BusError as error:
            raise unavailable("unavailable", f"it is unknown whether it was sent: {error}") from error
        tested = ChannelTest.model_validate_json(answer)
        request.log("channel_tested", channel=channel, delivered=tested.delivered)
        return tested

    @operation(
        "GET",
        "/api/v1/alerts/undelivered",
        tag="alerts",
        summary="Undelivered alerts",
        description="Alerts that were given up within the last thirty days, the latest first.",
        result="The latest ones.",
        errors={503: NATS_UNAVAILABLE},
    )
    async def list_undelivered_alerts(self, request: ApiRequest[UndeliveredQuery]) -> UndeliveredList:
        """The alerts that were given up, the latest first."""
        wanted = request.input

        def shown(found: Found) -> UndeliveredAlert | None:
            kept = read_dead_letter(found)
            if kept is None or kept.channel is None or wanted.channel not in (None, kept.channel):
                return None
            return _shown(kept.channel, kept)

        async def with_replay(one: UndeliveredAlert) -> UndeliveredAlert:
            replay = await self.lookup.last(Stream.ALERTER, subjects.alert_replay(one.channel, one.dead_letter_id))
            return one.model_copy(update={"replayed": replay is not None})

        latest = await self.lookup.newest(Stream.DLQ, DEAD_LETTERS, most=wanted.limit + 1, since=EVER, read=shown)
        undelivered = await asyncio.gather(*map(with_replay, latest[: wanted.limit]))
        more = len(latest) > wanted.limit
        channels = len(self.channels)
        return UndeliveredList(undelivered=tuple(undelivered), more=more, channels=channels)

    @operation(
        "POST",
        "/api/v1/alerts/replay",
        tag="alerts",
        summary="Send undelivered alerts again",
        description="Each is sent again once, unchanged and with the same id; those that were sent again before are "
        "skipped, unless `dead_letter_id` names one. One request covers up to a thousand; if there are more, the "
        "response says where to continue.",
        result="The alerts that will be sent again.",
        errors={
            404: "There is no such channel (`unknown_channel`) or dead letter (`unknown_dead_letter`).",
            503: f"{NATS_UNAVAILABLE} Repeating the request is safe: none is sent twice.",
        },
    )
    async def replay_alerts(self, request: ApiRequest[ReplayAlertsRequest]) -> AlertReplays:
        """Has the channels send undelivered alerts again."""
        form = request.input
        if form.channel is not None:
            self._check(form.channel)
        replays = await (self._replay_all(form) if form.dead_letter_id is None else self._replay_one(form))
        request.log("alerts_replayed", replayed=replays.replayed, channels=replays.channels)
        return replays

    async def _replay_one(self, wanted: ReplayAlertsRequest) -> AlertReplays:
        number = wanted.dead_letter_id or 0
        found = await self.lookup.next(Stream.DLQ, DEAD_LETTERS, number)
        kept = None if found is None or found.sequence != number else read_dead_letter(found)
        if kept is None or kept.channel is None or wanted.channel not in (None, kept.channel):
            hint = "`breakwater alerts undelivered` lists them"
            message = (
                f"there is no dead letter {number} of an alert{f' for {wanted.channel}' if wanted.channel else ''}"
            )
            raise RequestError(
                404, "unknown_dead_letter", f"{message}; {hint}", [FieldError(path="dead_letter_id", message=hint)]
            )
        self._check(kept.channel)
        if kept.dead_letter.omitted_bytes is not None:
            raise RequestError(
                409, "not_kept", f"the alert of dead letter {number} was too large to be kept: see its incident"
            )
        await self._put(kept.channel, kept, again=True)
        return AlertReplays(replayed=1, already=0, skipped=0, channels={kept.channel: 1})

    async def _replay_all(self, wanted: ReplayAlertsRequest) -> AlertReplays:
        looked_at = 0
        already = 0
        skipped = 0
        last = wanted.after
        replayed: Counter[str] = Counter()
        continue_after: int | None = None
        stored = self.lookup.scan(Stream.DLQ, DEAD_LETTERS, start=wanted.after + 1)
        async with aclosing(stored):
            async for found in stored:
                kept = read_dead_letter(found)
                if kept is None or (channel := kept.channel) is None or wanted.channel not in (None, channel):
                    continue
                if looked_at == MAX_DEAD_LETTERS:
                    continue_after = last
                    break
                looked_at += 1
                last = kept.number
                if channel not in self.channels or kept.dead_letter.omitted_bytes is not None:
                    skipped += 1
                elif await self._put(channel, kept, again=False):
                    replayed[channel] += 1
                else:
                    already += 1
        return AlertReplays(
            replayed=replayed.total(),
            already=already,
            skipped=skipped,
            channels=dict(replayed),
            continue_after=continue_after,
        )

    async def _put(self, channel: str, kept: StoredDeadLetter, *, again: bool) -> bool:
        """Has a channel send an alert again; False if that was asked for before, without `again`."""
        headers = {Header.CHANNEL.value: channel}
        if not again:
            # The stream itself refuses a second one, however many requests come together.
            headers[Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value] = "0"
        try:
            await self.publisher.raw(subjects.alert_replay(channel, kept.number), kept.payload, headers)
        except AlreadyDecidedError:
            return False
        return True

    def _check(self, channel: str) -> None:
        if channel not in self.channels:
            if self.channels:
                hint = suggestion(channel, self.channels).removeprefix("; ")
                known = f"known are {', '.join(sorted(self.channels))}"
                hint = hint if hint == known else f"{hint} {known}"
            else:
                hint = "the config has none: alerts.channels"
            raise unknown("channel", f"there is no channel {channel!r}", "channel", hint)


class _UndeliveredContent(Event):
    """The fields of an undelivered alert or digest that are shown."""

    alert_id: str | None = None
    digest_id: str | None = None
    title: str | None = None
    counts: dict[str, int] | None = None


def _shown(channel: str, dead_letter: StoredDeadLetter) -> UndeliveredAlert:
    try:
        kept = _UndeliveredContent.model_validate_json(dead_letter.payload)
    except ValidationError:
        kept = _UndeliveredContent()
    title = kept.title
    if kept.digest_id is not None and kept.counts is not None:
        incidents = sum(kept.counts.values())
        title = f"a digest of {incidents} incident{'' if incidents == 1 else 's'}"
    return UndeliveredAlert(
        dead_letter_id=dead_letter.number,
        channel=channel,
        alert_id=kept.digest_id or kept.alert_id,
        title=title,
        error=dead_letter.dead_letter.error,
        at=dead_letter.dead_letter.at,
        replayed=False,
    )
