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
from breakwater.alerts.rules.alert_rules import agents_of, began_with, urgency
from breakwater.alerts.rules.incidents import Incidents, acknowledge, resolve
from breakwater.alerts.store.incidents import IncidentLog
from breakwater.identity.operations import NATS_UNAVAILABLE, PERHAPS_DONE, ApiRequest, operation, utc_now
from breakwater.jobs.api.dead_letters import StoredDeadLetter, read_dead_letter
from breakwater.jobs.store.dismissals import LIST_AGE_S, Dismissals
from breakwater.kernel.http.parsing import suggestion
from breakwater.kernel.http.problems import RequestError, unavailable, unknown
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.core import ClientGetter, ask
from breakwater.kernel.nats.errors import AlreadyDecidedError, BusError, NoRespondersError
from breakwater.kernel.nats.lookup import Lookup, StoredMessage
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import Header, Stream
from breakwater.kernel.types import Event, Message
from breakwater.kernel.validation import FieldError

MIN_ID_PREFIX = len("inc_") + 6
"""The length of the shortest prefix that names an incident."""

TEST_TIMEOUT_S = 20.0
MAX_DEAD_LETTERS = 1_000
"""The most dead letters that one replay request looks at, so that it is answered within seconds."""

DEAD_LETTERS = "bw.dlq.undeliverable.>"
EVER = datetime(1970, 1, 1, tzinfo=UTC)

IncidentAction = Callable[[Alert, str, "str | None", datetime], "Alert | None"]
"""An operator action. It takes the incident, the actor, the reason and the time; None means there is nothing to do."""

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
        description="The current state of each incident: unresolved ones by severity and then by age, the oldest "
        "first; then resolved ones, the latest first. Resolved incidents are listed for thirty days, at most the "
        "latest two thousand.",
        result="The incidents that match.",
        errors={404: "The agent is not known (`unknown_agent`).", 503: NATS_UNAVAILABLE},
    )
    async def list_incidents(self, request: ApiRequest[AlertQuery]) -> AlertList:
        """Lists the incidents that match, the most urgent first."""
        query = request.input
        alerts = (await self.log.catch_up()).all()
        if query.agent is not None:
            agents = {*self.agents, *(alert.agent for alert in alerts if alert.agent is not None)}
            if query.agent not in agents:
                message = f"no agent {query.agent!r} is known{suggestion(query.agent, agents)}"
                raise RequestError(404, "unknown_agent", message, [FieldError(path="agent", message=message)])
        by_urgency = sorted(alerts, key=urgency)
        matching = tuple(islice((alert for alert in by_urgency if _matches(alert, query)), query.limit + 1))
        return AlertList(alerts=matching[: query.limit], more=len(matching) > query.limit, channels=len(self.channels))

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
        """Shows the newest alert of an incident."""
        return incident_named(await self.log.catch_up(), request.path["incident_id"])

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
        """Acknowledges an incident and publishes the change."""
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
        """Resolves an incident and publishes the change."""
        return await self._act(request, "incident_resolved", resolve)

    async def _act(self, request: ApiRequest[AlertRequest], log_event: str, act: IncidentAction) -> Alert:
        alert, changed = await apply_to_incident(
            self.log,
            lambda incidents: incident_named(incidents, request.input.incident_id),
            lambda alert: act(alert, request.by, request.why or None, self.now()),
        )
        request.log(log_event, incident_id=alert.incident_id, changed=changed)
        return alert if changed else UnchangedAlert.model_validate({**alert.model_dump(), "unchanged": True})


async def apply_to_incident(
    log: IncidentLog, pick: Callable[[Incidents], Alert], act: Callable[[Alert], Alert | None]
) -> tuple[Alert, bool]:
    """Applies an operator action to an incident.

    Args:
        log: the log of all incidents.
        pick: picks the incident; its errors are raised here.
        act: the action. It is called again if the incident is changed at the same time.

    Returns:
        The incident after the action, and True if this call changed it.

    Raises:
        BusError: the action may be done or not; repeating it is safe.
    """
    incident_id = pick(await log.catch_up()).incident_id
    current: Alert | None = None

    def decide(incidents: Incidents) -> Alert | None:
        nonlocal current
        current = incidents.get(incident_id) or pick(incidents)
        return act(current)

    alert = await log.decide(decide)
    if alert is not None:
        return alert, True
    assert current is not None  # `decide` was called at least once
    return current, False


def incident_named(incidents: Incidents, name: str) -> Alert:
    """Returns the incident with an id or a prefix of it. Raises RequestError: there is none, or more than one."""
    if (alert := incidents.get(name)) is not None:
        return alert
    long_enough = len(name) >= MIN_ID_PREFIX
    matches = [alert for alert in incidents.all() if alert.incident_id.startswith(name)] if long_enough else []
    if len(matches) == 1:
        return matches[0]
    if matches:
        details = [
            FieldError(path="incident_id", message=f"{alert.incident_id} is {alert.title!r}") for alert in matches[:20]
        ]
        message = f"{len(matches)} incidents begin with {name!r}; use a longer prefix"
        raise RequestError(409, "ambiguous_incident", message, details)
    hint = (
        "incidents resolved long ago are only in ClickHouse; `breakwater alerts list --status all` lists the others"
        if long_enough
        else "use its id, or a unique prefix: `inc_` and at least 6 characters"
    )
    raise unknown("incident", f"no incident {name!r} is known", "incident_id", hint)


def _matches(alert: Alert, query: AlertQuery) -> bool:
    unresolved = query.status == "unresolved" and alert.status != "resolved"
    return (
        (query.status == "all" or unresolved or query.status == alert.status)
        and (query.event is None or query.event in (alert.event, began_with(alert)))
        and (query.agent is None or query.agent == alert.agent or query.agent in agents_of(alert))
    )


@dataclass(frozen=True, slots=True)
class ChannelRoutes:
    """The channels of alerts."""

    channels: Collection[str]
    connection: ClientGetter
    lookup: Lookup
    publisher: Publisher
    dismissals: Dismissals

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
        """Has an alerter send a test message. The result says whether it arrived."""
        channel = request.input.channel
        self._check_channel(channel)
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
        """Lists the alerts that no channel could deliver, the latest first."""
        query = request.input
        dismissed = await self.dismissals.by_number(max_age_s=LIST_AGE_S)

        def undelivered_alert(message: StoredMessage) -> UndeliveredAlert | None:
            stored = None if message.sequence in dismissed else read_dead_letter(message)
            if stored is None or stored.channel is None or query.channel not in (None, stored.channel):
                return None
            return _read_undelivered(stored.channel, stored)

        async def with_replay(alert: UndeliveredAlert) -> UndeliveredAlert:
            replay = await self.lookup.last(Stream.ALERTER, subjects.alert_replay(alert.channel, alert.dead_letter_id))
            return alert.model_copy(update={"replayed": replay is not None})

        latest = await self.lookup.newest(
            Stream.DLQ, DEAD_LETTERS, limit=query.limit + 1, since=EVER, read=undelivered_alert
        )
        undelivered = await asyncio.gather(*map(with_replay, latest[: query.limit]))
        more = len(latest) > query.limit
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
        request_body = request.input
        if request_body.channel is not None:
            self._check_channel(request_body.channel)
        replay = self._replay_all if request_body.dead_letter_id is None else self._replay_one
        replays = await replay(request_body)
        request.log("alerts_replayed", replayed=replays.replayed, channels=replays.channels)
        return replays

    async def _replay_one(self, request: ReplayAlertsRequest) -> AlertReplays:
        number = request.dead_letter_id or 0
        message = await self.lookup.next(Stream.DLQ, DEAD_LETTERS, number)
        stored = None if message is None or message.sequence != number else read_dead_letter(message)
        if stored is None or stored.channel is None or request.channel not in (None, stored.channel):
            hint = "`breakwater alerts undelivered` lists them"
            for_channel = f" for {request.channel}" if request.channel else ""
            problem = f"there is no dead letter {number} of an alert{for_channel}"
            raise RequestError(
                404, "unknown_dead_letter", f"{problem}; {hint}", [FieldError(path="dead_letter_id", message=hint)]
            )
        self._check_channel(stored.channel)
        if stored.dead_letter.omitted_bytes is not None:
            raise RequestError(
                409, "not_kept", f"the alert of dead letter {number} was too large to be kept: see its incident"
            )
        await self._put(stored.channel, stored, again=True)
        return AlertReplays(replayed=1, already=0, skipped=0, channels={stored.channel: 1})

    async def _replay_all(self, request: ReplayAlertsRequest) -> AlertReplays:
        looked_at = 0
        already = 0
        skipped = 0
        last = request.after
        replayed: Counter[str] = Counter()
        continue_after: int | None = None
        dismissed = await self.dismissals.by_number()
        messages = self.lookup.scan(Stream.DLQ, DEAD_LETTERS, start=request.after + 1)
        async with aclosing(messages):
            async for message in messages:
                stored = None if message.sequence in dismissed else read_dead_letter(message)
                if stored is None or (channel := stored.channel) is None or request.channel not in (None, channel):
                    continue
                if looked_at == MAX_DEAD_LETTERS:
                    continue_after = last
                    break
                looked_at += 1
                last = stored.number
                if channel not in self.channels or stored.dead_letter.omitted_bytes is not None:
                    skipped += 1
                elif await self._put(channel, stored, again=False):
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

    async def _put(self, channel: str, stored: StoredDeadLetter, *, again: bool) -> bool:
        """Has a channel send an alert again. Returns False if it was replayed before, which `again` permits."""
        headers = {Header.CHANNEL.value: channel}
        if not again:
            # The stream itself refuses a second replay, however many requests arrive together.
            headers[Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value] = "0"
        try:
            await self.publisher.raw(subjects.alert_replay(channel, stored.number), stored.payload, headers)
        except AlreadyDecidedError:
            return False
        return True

    def _check_channel(self, channel: str) -> None:
        if channel not in self.channels:
            if self.channels:
                hint = suggestion(channel, self.channels).removeprefix("; ")
                all_channels = f"known are {', '.join(sorted(self.channels))}"
                hint = hint if hint == all_channels else f"{hint} {all_channels}"
            else:
                hint = "the config has none: alerts.channels"
            raise unknown("channel", f"there is no channel {channel!r}", "channel", hint)


class _UndeliveredContent(Event):
    """The fields of an undelivered alert or digest that are shown."""

    alert_id: str | None = None
    digest_id: str | None = None
    title: str | None = None
    counts: dict[str, int] | None = None


def _read_undelivered(channel: str, dead_letter: StoredDeadLetter) -> UndeliveredAlert:
    try:
        content = _UndeliveredContent.model_validate_json(dead_letter.payload)
    except ValidationError:
        content = _UndeliveredContent()
    title = content.title
    if content.digest_id is not None and content.counts is not None:
        incidents = sum(content.counts.values())
        title = f"a digest of {incidents} incident{'' if incidents == 1 else 's'}"
    return UndeliveredAlert(
        dead_letter_id=dead_letter.number,
        channel=channel,
        alert_id=content.digest_id or content.alert_id,
        title=title,
        error=dead_letter.dead_letter.error,
        at=dead_letter.dead_letter.at,
        replayed=False,
    )
