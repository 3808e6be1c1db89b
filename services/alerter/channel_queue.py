"""The alerts that wait for one channel and the messages on their way to it: decides, and does no I/O.

A message that was composed once is sent unchanged at every try, with the same id, until it is delivered or given up.
Times called `clock` are monotonic seconds.
"""

from __future__ import annotations

import base64
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from breakwater.alerts.channels.channel import AlertSender, SendError
from breakwater.alerts.contract import Alert, AlertDigest
from breakwater.alerts.rules.alert_rules import UNDELIVERABLE
from breakwater.alerts.rules.outbox import ChannelMessage, ChannelRules, WaitingAlert, message_id, next_message
from breakwater.kernel.nats.contract import DeadLetter
from breakwater.kernel.nats.delivery import Delivery
from breakwater.kernel.nats.subjects import Header

IDLE_S = 2.0
"""Approximate duration of a fetch while the queue is idle."""
DELIVERED_KEPT = 5_000
_LONG_AGO = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The times at which a failed send is repeated."""

    first_s: float = 0.5
    max_s: float = 60.0
    max_retry_after_s: float = 3600.0
    give_up_s: float = 3600.0
    """After the first failure of a message that a later try may mend."""
    tries_if_permanent: int = 4
    """More than one, as a receiver that is being deployed may say 404 for half a minute."""

    def backoff_s(self, failures: int) -> float:
        """The wait after a number of failures in a row (from 1): doubling, up to the ceiling."""
        return min(self.first_s * 2.0 ** min(failures - 1, 64), self.max_s)

    def refused_s(self, failures: int) -> float:
        """The wait after a number of refusals (from 1): 2, 8, 32 s."""
        return min(self.first_s * 4.0 ** min(failures, 64), self.max_s)

    def pause_s(self, failure: SendError) -> float:
        """The time for which the receiver asked not to be called at all."""
        return min(failure.retry_after_s or 0.0, self.max_retry_after_s)


DEFAULT_SCHEDULE = Schedule()
"""An hour, and then an alert is a dead letter that can be replayed."""


@dataclass(slots=True, eq=False)
class ComposedMessage:
    """A message on its way, and the deliveries of the alerts that it covers, by their ids."""

    message: ChannelMessage
    deliveries: dict[str, Delivery]
    counts: bool = True
    """It counts for the channel's rate limit."""
    replay: bool = False
    """It was given up before, and an operator has asked to send it again."""
    failures: int = 0
    first_failed_at: float = 0.0
    not_before: float = 0.0

    @property
    def incidents(self) -> tuple[str, ...]:
        """The ids of the incidents that it is about."""
        if isinstance(self.message, AlertDigest):
            return tuple(alert.incident_id for alert in self.message.alerts)
        return (self.message.incident_id,)

    def dead_letter(self, channel: str, error: str, at: datetime) -> DeadLetter:
        """The message as it is kept if it is given up."""
        deliveries = tuple(self.deliveries.values())
        message = self.message
        if self.replay:
            about = UNDELIVERABLE  # an operator replayed it, and knows
        elif isinstance(message, Alert):
            about = message.key
        else:
            # A digest is about undelivered alerts only if all of it is.
            about = UNDELIVERABLE if all(alert.key.startswith(UNDELIVERABLE) for alert in message.alerts) else ""
        return DeadLetter(
            reason="undeliverable",
            agent=message.agent if isinstance(message, Alert) else None,
            error=f"{channel}: {error} (tried {self.failures} time{'' if self.failures == 1 else 's'})",
            stream=deliveries[0].stream,
            subject=deliveries[0].subject,
            sequence=max(delivery.sequence for delivery in deliveries),
            headers={
                Header.CHANNEL.value: channel,
                Header.CE_ID.value: message_id(message),
                Header.INCIDENT.value: about,
            },
            payload_base64=base64.b64encode(message.json_bytes()).decode(),
            at=at,
        )


class ChannelQueue:
    """Everything that one channel is still to be sent, and when."""

    def __init__(self, channel: AlertSender, rules: ChannelRules, schedule: Schedule) -> None:
        self.schedule = schedule
        self._channel = channel
        self._rules = rules
        self._waiting: dict[str, tuple[Delivery, Alert]] = {}
        self._on_the_way: list[ComposedMessage] = []
        self._updatable: dict[str, datetime] = {}
        """The incidents with a message that can be updated, and when it was updated last."""
        self._sent: deque[datetime] = deque()
        self._delivered: dict[str, None] = {}
        self._failures = 0
        self._not_before = 0.0
        self._idle_s = IDLE_S

    @property
    def held(self) -> int:
        """The number of alerts that wait; replays are not counted."""
        return len(self._waiting) + sum(
            len(composed.deliveries) for composed in self._on_the_way if not composed.replay
        )

    @property
    def has_replays(self) -> bool:
        """Returns True while an operator's replay waits."""
        return any(composed.replay for composed in self._on_the_way)

    def deliveries(self) -> list[Delivery]:
        """All deliveries that are held."""
        on_the_way = [delivery for composed in self._on_the_way for delivery in composed.deliveries.values()]
        return [delivery for delivery, _ in self._waiting.values()] + on_the_way

    def may_have_message(self, alert: Alert) -> bool:
        """Returns True if an earlier leader may have sent a message that this alert updates."""
        return self._channel.updates and alert.change != "opened" and alert.incident_id not in self._updatable

    def has_message(self, incident_id: str) -> None:
        """Notes that an incident has a message that can be updated."""
        self._updatable[incident_id] = _LONG_AGO

    def add(self, alert: Alert, delivery: Delivery) -> bool:
        """Takes an alert; False if it was delivered already, and its acknowledgement did not reach the server."""
        if alert.alert_id in self._delivered:
            return False
        for composed in self._on_the_way:
            if not composed.replay and alert.alert_id in composed.deliveries:
                composed.deliveries[alert.alert_id] = delivery
                return True
        self._waiting[alert.alert_id] = (delivery, alert)
        return True

    def replay(self, delivery: Delivery, message: ChannelMessage) -> None:
        """Takes a message that was given up, to send it again."""
        identity = message_id(message)
        for composed in self._on_the_way:
            if composed.replay and message_id(composed.message) == identity:
                composed.deliveries = {identity: delivery}  # delivered again, while it waits here
                return
        self._on_the_way.append(ComposedMessage(message, {identity: delivery}, replay=True))

    def due(self, clock: float, *, replay: bool = False) -> ComposedMessage | None:
        """The message on its way, or the replay, whose next try is due."""
        due = [composed for composed in self._on_the_way if composed.replay == replay and composed.not_before <= clock]
        return min(due, key=lambda composed: composed.not_before, default=None)

    def due_replay(self, now: datetime, clock: float) -> ComposedMessage | None:
        """The replay whose next try is due, if the channel's rate limit has room for it."""
        limit = self._rules.route.rate_limit
        full = limit is not None and len(self._recently_sent(now)) >= limit.messages
        return None if full else self.due(clock, replay=True)

    def unsent(self) -> ComposedMessage | None:
        """The first message on its way that is no replay, due or not."""
        return next((composed for composed in self._on_the_way if not composed.replay), None)

    def compose(self, now: datetime) -> tuple[ComposedMessage | None, list[Delivery]]:
        """The next message of the alerts that wait, if one is due; and the deliveries that need no message."""
        # The next message of an incident waits for the one on its way: people read of it in order.
        busy = {incident for composed in self._on_the_way if not composed.replay for incident in composed.incidents}
        ordered = sorted(
            self._waiting.values(), key=lambda delivered: (delivered[0].published_at, delivered[0].sequence)
        )
        ids = [alert.alert_id for _, alert in ordered]
        waiting = [
            WaitingAlert(place, alert, delivery.published_at)
            for place, (delivery, alert) in enumerate(ordered)
            if alert.incident_id not in busy
        ]
        decided = next_message(waiting, self._rules, now, sent=self._recently_sent(now), updatable=self._updatable)
        skipped = [self._waiting.pop(ids[place])[0] for place in decided.skip]
        self._idle_s = IDLE_S if decided.at is None else max(0.0, (decided.at - now).total_seconds())
        if decided.message is None:
            return None, skipped
        deliveries = {ids[place]: self._waiting.pop(ids[place])[0] for place in decided.covers}
        composed = ComposedMessage(decided.message, deliveries, counts=decided.counts)
        self._on_the_way.append(composed)
        return composed, skipped

    def pause_s(self, clock: float) -> float:
        """The time until the receiver may be called again; 0 if it may be called now."""
        return max(0.0, self._not_before - clock)

    def idle_s(self, clock: float) -> float:
        """The time until something is due if no alert comes before. Call it after `compose`."""
        return max(
            0.0,
            min([self._idle_s, *(composed.not_before - clock for composed in self._on_the_way if not composed.replay)]),
        )

    def note_delivery(self, composed: ComposedMessage, message: ChannelMessage, now: datetime, clock: float) -> None:
        """Notes that a message has arrived. `message`: as it was sent."""
        self._not_before = clock + self._channel.interval_s
        self._failures = 0
        if composed.counts:
            self._sent.append(now)
        if self._channel.updates and isinstance(message, Alert):
            self._updatable[message.incident_id] = now
            if message.status == "resolved":
                # If it comes back, the record on the bus says which message it had.
                del self._updatable[message.incident_id]
        self.end(composed)

    def note_failure(
        self, composed: ComposedMessage, failure: SendError, clock: float
    ) -> Literal["give up", "retry", "disable"]:
        """Decides what becomes of a message that did not arrive."""
        schedule = self.schedule
        self._not_before = clock + self._channel.interval_s
        composed.failures += 1
        composed.first_failed_at = composed.first_failed_at or clock
        if failure.disables:
            return "disable"
        if failure.permanent:
            composed.not_before = clock + schedule.refused_s(composed.failures)
            return "give up" if composed.failures >= schedule.tries_if_permanent else "retry"
        # A refusal is about the message; any other failure is about the receiver, which then gets a pause.
        self._failures += 1
        pause_s = max(schedule.pause_s(failure), min(schedule.backoff_s(self._failures), 30.0))
        self._not_before = max(self._not_before, clock + pause_s)
        composed.not_before = max(clock + schedule.backoff_s(composed.failures), self._not_before)
        return "give up" if clock - composed.first_failed_at >= schedule.give_up_s else "retry"

    def end(self, composed: ComposedMessage) -> None:
        """Forgets a message that was delivered or given up, but for the ids of its alerts."""
        self._on_the_way.remove(composed)
        if not composed.replay:
            self._delivered |= dict.fromkeys(composed.deliveries)
        while len(self._delivered) > DELIVERED_KEPT:
            del self._delivered[next(iter(self._delivered))]

    def _recently_sent(self, now: datetime) -> tuple[datetime, ...]:
        limit = self._rules.route.rate_limit
        while limit is not None and self._sent and self._sent[0] <= now - timedelta(seconds=limit.within_s):
            self._sent.popleft()
        return tuple(self._sent)
