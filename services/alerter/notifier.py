"""Delivers alerts to one channel: each until it has arrived, is covered by another message, or is in the dead letters.

What waits is not acknowledged, so that the next leader has it too. A message that was composed once is sent unchanged
at every try, with the same id, until it is delivered or given up.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import structlog
from pydantic import ValidationError

from breakwater import background
from breakwater.bus.delivery import Delivery, keep, still_held
from breakwater.bus.errors import BusError, NoRoom
from breakwater.bus.incidents import IncidentLog
from breakwater.bus.publisher import Publisher
from breakwater.bus.pull import Pull
from breakwater.contracts import subjects
from breakwater.contracts.alerts import Alert, AlertDigest
from breakwater.contracts.events import DeadLetter
from breakwater.contracts.subjects import Header
from breakwater.metrics import ChannelMetrics
from breakwater.outage import Outage
from breakwater.policy.alert_rules import UNDELIVERABLE
from breakwater.policy.incidents import IncidentRules
from breakwater.policy.outbox import ChannelRules, Held, Message, message_id, next_message
from breakwater.policy.signals import channel_works
from services.alerter.channel import AlertSender, SendError
from services.alerter.notes import DisabledChannels, SentMessages

IDLE_S = 2.0
"""About how long one fetch waits where nothing is to be done."""

SOON_S = 0.01
HEARTBEAT_S = 6.0
BUS_RETRY_S = 1.0
DELIVERED_KEPT = 5_000
_LONG_AGO = datetime.fromtimestamp(0, UTC)
LAST_SEND_S = 4.0
"""How long a message may still take when this process is asked to stop."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """When a failed send is repeated."""

    first_s: float = 0.5
    max_s: float = 60.0
    max_retry_after_s: float = 3600.0
    give_up_s: float = 3600.0
    """After the first failure of a message that a later try may mend."""
    tries_if_permanent: int = 4
    """More than one, as a receiver that is being deployed may say 404 for half a minute."""

    def backoff_s(self, failures: int) -> float:
        """The wait after so many failures in a row (from 1): doubling, up to the ceiling."""
        return min(self.first_s * 2.0 ** min(failures - 1, 64), self.max_s)

    def refused_s(self, failures: int) -> float:
        """The wait after so many refusals (from 1): 2, 8, 32 s."""
        return min(self.first_s * 4.0 ** min(failures, 64), self.max_s)

    def pause_s(self, failure: SendError) -> float:
        """How long the receiver asked not to be called at all."""
        return min(failure.retry_after_s or 0.0, self.max_retry_after_s)


DEFAULT_SCHEDULE = Schedule()
"""An hour, and then an alert is a dead letter that can be replayed."""


@dataclass(slots=True, eq=False)
class _Composed:
    """A message on its way, and the deliveries of the alerts that it covers, by their ids."""

    message: Message
    deliveries: dict[str, Delivery]
    counts: bool = True
    """Whether it counts for the channel's rate limit."""
    replay: bool = False
    """Whether it was given up before, and a person has asked to send it once more."""
    failures: int = 0
    first_failed_at: float = 0.0
    not_before: float = 0.0


class Notifier:
    """One channel's messages. Runs while this process has the leader lease."""

    def __init__(
        self,
        channel: AlertSender,
        rules: ChannelRules,
        pull: Pull,
        sent_messages: SentMessages,
        disabled: DisabledChannels,
        publisher: Publisher,
        incidents: IncidentLog,
        incident_rules: IncidentRules,
        metrics: ChannelMetrics,
        now: Callable[[], datetime],
        *,
        most: int,
        schedule: Schedule = DEFAULT_SCHEDULE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel, self._rules, self._pull = channel, rules, pull
        self._sent_messages, self._disabled, self._publisher = sent_messages, disabled, publisher
        self._incidents, self._incident_rules = incidents, incident_rules
        self._metrics, self._now, self._clock = metrics, now, clock
        self._most, self._schedule = most, schedule
        self._held: dict[str, tuple[Delivery, Alert]] = {}
        self._updatable: dict[str, datetime] = {}
        self._on_the_way: list[_Composed] = []
        self._sent: deque[datetime] = deque()
        self._not_before = 0.0
        self._failures = 0
        self._is_disabled = True  # until that is looked up
        self._idle_s = IDLE_S
        self._delivered: dict[str, None] = {}
        self._outage = Outage(f"alert channel {channel.name}")
        self._bus = Outage(f"bus, for alert channel {channel.name}")

    @property
    def held(self) -> int:
        """How many alerts wait."""
        return len(self._held) + sum(len(one.deliveries) for one in self._on_the_way if not one.replay)

    def replay(self, delivery: Delivery, message: Message) -> None:
        """Takes a message that was given up and is to be sent again."""
        for composed in self._on_the_way:
            if composed.replay and message_id(composed.message) == message_id(message):
                composed.deliveries = {message_id(message): delivery}  # delivered again, while it waits here
                return
        self._on_the_way.append(_Composed(message, {message_id(message): delivery}, replay=True))

    async def run(self) -> None:
        """Fetches alerts and sends messages until it is cancelled."""
        beating = asyncio.create_task(self._beat())
        wait_s = IDLE_S

        async def step() -> float:
            await self._fetch(wait_s)
            next_s = await self._step()
            self._metrics.held(self.held)
            return next_s

        try:
            while True:
                wait_s = await self._bus.retry_until_available(step, on=BusError, retry_s=BUS_RETRY_S)
        finally:
            await background.stop(beating)
            await self._pull.close()

    async def _beat(self) -> None:
        # What is held back must say so, or the server would deliver it again.
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            held = [delivery for delivery, _ in self._held.values()]
            await still_held(held + [one for composed in self._on_the_way for one in composed.deliveries.values()])

    async def _fetch(self, wait_s: float) -> None:
        room = self._most - self.held
        if room <= 0:
            await asyncio.sleep(min(wait_s, IDLE_S))
            return
        wait_s = max(wait_s, SOON_S) if wait_s < IDLE_S else background.aligned_delay(IDLE_S)
        for delivery in await self._pull.fetch(room, wait_s):
            await self._take(delivery)

    async def _take(self, delivery: Delivery) -> None:
        try:
            alert = Alert.model_validate_json(delivery.data)
        except ValidationError as error:
            # Nothing of ours writes such a thing. It stays in ALERTS for thirty days.
            structlog.get_logger().error(
                "alert_unreadable", channel=self._channel.name, sequence=delivery.sequence, error=error.title
            )
            await delivery.ack_sync()
            return
        if alert.alert_id in self._delivered:
            # Its acknowledgement did not reach the server.
            await delivery.ack_sync()
            return
        for composed in self._on_the_way:
            if not composed.replay and alert.alert_id in composed.deliveries:
                composed.deliveries[alert.alert_id] = delivery
                return
        unknown = self._channel.updates and alert.change != "opened" and alert.incident_id not in self._updatable
        if unknown and await self._sent_messages.get(alert.incident_id):
            self._updatable[alert.incident_id] = _LONG_AGO
        self._held[alert.alert_id] = (delivery, alert)

    async def _step(self) -> float:
        """Sends one message, if one is due; and returns how long to wait before the next one."""
        disabled = await self._looked_whether_disabled()
        if disabled and (left_s := await self._give_all_up()) is not None:
            return left_s
        pause_s = self._not_before - self._clock()
        if pause_s > 0:
            return pause_s
        # Replays come after what was not sent yet, and within the channel's rate limit.
        composed = (None if disabled else self._due() or await self._compose()) or self._due(replay=True)
        if composed is None:
            waits = [one.not_before - self._clock() for one in self._on_the_way if not one.replay]
            return max(0.0, min([self._idle_s, *waits]))
        await _to_its_end(self._send(composed))
        return max(0.0, self._not_before - self._clock())

    def _due(self, *, replay: bool = False) -> _Composed | None:
        if replay and not self._room_for_one():
            return None
        due = [one for one in self._on_the_way if one.replay == replay and one.not_before <= self._clock()]
        return min(due, key=lambda one: one.not_before, default=None)

    def _room_for_one(self) -> bool:
        limit = self._rules.route.rate_limit
        if limit is None:
            return True
        since = self._now() - timedelta(seconds=limit.within_s)
        return sum(at > since for at in self._sent) < limit.messages

    async def _compose(self) -> _Composed | None:
        # An incident of which a message is on its way waits for that: people read of it in order.
        busy = {incident for one in self._on_the_way if not one.replay for incident in _incidents(one.message)}
        ordered = sorted(self._held.values(), key=lambda one: (one[0].published_at, one[0].sequence))
        ids = [alert.alert_id for _, alert in ordered]
        held = [
            Held(place, alert, delivery.published_at)
            for place, (delivery, alert) in enumerate(ordered)
            if alert.incident_id not in busy
        ]
        limit = self._rules.route.rate_limit
        now = self._now()
        while limit is not None and self._sent and self._sent[0] <= now - timedelta(seconds=limit.within_s):
            self._sent.popleft()
        decided = next_message(held, self._rules, now, sent=tuple(self._sent), updatable=self._updatable)
        for place in decided.skip:
            delivery, _ = self._held.pop(ids[place])
            await delivery.ack_sync()
        self._idle_s = IDLE_S if decided.at is None else max(0.0, (decided.at - now).total_seconds())
        if decided.message is None:
            return None
        deliveries = {ids[place]: self._held.pop(ids[place])[0] for place in decided.covers}
        composed = _Composed(decided.message, deliveries, counts=decided.counts)
        self._on_the_way.append(composed)
        return composed

    async def _send(self, composed: _Composed) -> None:
        message = self._as_it_is_now(composed.message) if composed.replay else composed.message
        try:
            await self._sent_once(message)
        except SendError as failure:
            self._metrics.failed()
            self._not_before = self._clock() + self._channel.interval_s
            await self._after_failure(composed, failure)
            return
        self._metrics.sent()
        self._not_before = self._clock() + self._channel.interval_s
        self._failures = 0
        self._outage.worked()
        if composed.counts:
            self._sent.append(self._now())
        if self._channel.updates and isinstance(message, Alert):
            self._remember(message)
        await self._done(composed)
        await self._channel_works(message_id(message))

    async def _sent_once(self, message: Message) -> None:
        try:
            await self._channel.send(message)
        except (SendError, BusError):
            raise
        except Exception as error:
            # An unexpected error with one message must not block all others.
            structlog.get_logger().exception("alert_not_sent", channel=self._channel.name, alert_id=message_id(message))
            raise SendError(f"it can't be sent ({type(error).__name__})", permanent=True) from error

    def _as_it_is_now(self, message: Message) -> Message:
        """A replayed alert may be long out of date: people are notified of the incident as it is."""
        newest = self._incidents.incidents.get(message.incident_id) if isinstance(message, Alert) else None
        return message if newest is None else newest

    def _remember(self, alert: Alert) -> None:
        self._updatable[alert.incident_id] = self._now()
        if alert.status == "resolved":
            # Should it come back, the record on the bus says which message it had.
            del self._updatable[alert.incident_id]

    async def _channel_works(self, source_id: str) -> None:
        works = channel_works(self._channel.name, source_id, self._now())
        if self._is_disabled:
            await self._disabled.remove(self._channel)
            self._is_disabled = False
        dead = self._incidents.incidents.of(works.key)
        if dead is not None and dead.status != "resolved":
            await self._incidents.apply(works, self._incident_rules)

    async def _after_failure(self, composed: _Composed, failure: SendError) -> None:
        clock = self._clock()
        composed.failures += 1
        composed.first_failed_at = composed.first_failed_at or clock
        if failure.disables:
            await self._disable(failure)
            if composed.replay:
                await self._give_up(composed, str(failure))
            return
        if failure.permanent:
            composed.not_before = clock + self._schedule.refused_s(composed.failures)
            if composed.failures >= self._schedule.tries_if_permanent:
                await self._give_up(composed, str(failure))
            return
        # A refusal says something of the message; anything else of the receiver, which is left alone for a while.
        self._outage.failed(failure)
        self._failures += 1
        pause_s = max(self._schedule.pause_s(failure), min(self._schedule.backoff_s(self._failures), 30.0))
        self._not_before = max(self._not_before, clock + pause_s)
        composed.not_before = max(clock + self._schedule.backoff_s(composed.failures), self._not_before)
        if clock - composed.first_failed_at >= self._schedule.give_up_s:
            await self._give_up(composed, str(failure))

    async def _disable(self, failure: SendError) -> None:
        if not self._is_disabled:
            structlog.get_logger().error(
                "alert_channel_disabled",
                channel=self._channel.name,
                error=str(failure),
                what_to_do=f"fix it in the config; or `breakwater alerts test {self._channel.name}` once it is back",
            )
        # Before it is recorded: where that is not known to have come true, the next step looks it up.
        self._is_disabled = True
        await self._disabled.add(self._channel)

    async def _looked_whether_disabled(self) -> bool:
        # Only its leader disables a channel; but any alerter enables one, and an alert may come right after that.
        if self._is_disabled:
            self._is_disabled = await self._disabled.contains(self._channel)
        return self._is_disabled

    async def _give_all_up(self) -> float | None:
        """Every alert becomes a dead letter: a disabled receiver is not called again, and nothing is lost.

        Returns:
            How long to wait; None where an operator has asked to try once more.
        """
        error = "the receiver responded 410 Gone: the channel is disabled"
        while True:
            composed = next((one for one in self._on_the_way if not one.replay), None) or await self._compose()
            if composed is None:
                return None if any(one.replay for one in self._on_the_way) else self._idle_s
            await self._give_up(composed, error)
            if composed in self._on_the_way:
                return self._schedule.max_s  # the dead letter was refused

    async def _give_up(self, composed: _Composed, error: str) -> None:
        name, identity = self._channel.name, message_id(composed.message)
        deliveries = tuple(composed.deliveries.values())
        tried = f"tried {composed.failures} time{'' if composed.failures == 1 else 's'}"
        dead_letter = DeadLetter(
            reason="undeliverable",
            agent=composed.message.agent if isinstance(composed.message, Alert) else None,
            error=f"{name}: {error} ({tried})",
            stream=deliveries[0].stream,
            subject=deliveries[0].subject,
            sequence=max(delivery.sequence for delivery in deliveries),
            headers={
                Header.CHANNEL.value: name,
                Header.CE_ID.value: identity,
                Header.INCIDENT.value: _about(composed),
            },
            payload_base64=base64.b64encode(composed.message.json_bytes()).decode(),
            at=self._now(),
        )
        # A replay that is given up again is another dead letter.
        another = f"/{deliveries[0].sequence}" if composed.replay else ""
        subject = subjects.dead_letter(dead_letter.reason, dead_letter.agent or "unknown")
        try:
            await keep(self._publisher, subject, dead_letter, id=f"dlq/{name}/{identity}{another}")
        except NoRoom as refusal:
            # It is tried on: a dead letter that can't be kept must not be the end of an alert.
            composed.not_before = self._clock() + self._schedule.max_s
            structlog.get_logger().error("dead_letter_refused", channel=name, alert_id=identity, error=str(refusal))
            return
        self._metrics.given_up()
        structlog.get_logger().error(
            "alert_undeliverable", channel=name, alert_id=identity, failures=composed.failures, error=error
        )
        await self._done(composed)

    async def _done(self, composed: _Composed) -> None:
        self._on_the_way.remove(composed)
        for alert_id, delivery in composed.deliveries.items():
            if not composed.replay:
                self._delivered[alert_id] = None
            await delivery.ack_sync()
        while len(self._delivered) > DELIVERED_KEPT:
            del self._delivered[next(iter(self._delivered))]


def _incidents(message: Message) -> tuple[str, ...]:
    if isinstance(message, AlertDigest):
        return tuple(one.incident_id for one in message.alerts)
    return (message.incident_id,)


def _about(composed: _Composed) -> str:
    """The key of the incident that was not delivered; of a digest, only if all of it is of dead channels."""
    if composed.replay:
        return UNDELIVERABLE  # an operator replayed it, and knows
    if isinstance(composed.message, Alert):
        return composed.message.key
    return UNDELIVERABLE if all(one.key.startswith(UNDELIVERABLE) for one in composed.message.alerts) else ""


async def _to_its_end(sending: Coroutine[Any, Any, None]) -> None:
    """Lets what is being sent arrive, and be acknowledged, before this process stops: else it is sent twice."""
    task = asyncio.create_task(sending)
    deadline: float | None = None
    while not task.done():
        left_s = None if deadline is None else deadline - time.monotonic()
        if left_s is not None and left_s <= 0:
            task.cancel()
        try:
            await asyncio.wait([task], timeout=None if left_s is None else max(left_s, SOON_S))
        except asyncio.CancelledError:
            # We may be cancelled repeatedly; the time that is left runs from the first time.
            deadline = deadline or time.monotonic() + LAST_SEND_S
    if deadline is not None:
        raise asyncio.CancelledError
    await task
