"""Delivers alerts to one channel: each until it has arrived, is covered by another message, or is in the dead letters.

Alerts that wait are not acknowledged, so that the next leader has them too. `ChannelQueue` decides what is sent when.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import structlog
from pydantic import ValidationError

from breakwater.alerts.channels.channel import AlertSender, SendError
from breakwater.alerts.contract import Alert
from breakwater.alerts.metrics import ChannelMetrics
from breakwater.alerts.rules.outbox import ChannelMessage, ChannelRules, message_id
from breakwater.alerts.rules.signals import channel_works
from breakwater.alerts.store.channels import AlerterBus, SentMessages
from breakwater.kernel.nats.delivery import Delivery, give_back, keep, report_in_progress
from breakwater.kernel.nats.errors import BusError, EventStreamFullError
from breakwater.kernel.nats.pull import Pull
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.nats.topology import ALERTS_HELD, alert_consumer
from breakwater.kernel.process import background
from breakwater.kernel.process.outage import Outage
from breakwater.services.alerter.channel_queue import DEFAULT_SCHEDULE, IDLE_S, ChannelQueue, ComposedMessage, Schedule
from breakwater.services.alerter.clock import Clock
from breakwater.services.alerter.incident_recorder import IncidentRecorder

SOON_S = 0.01
HEARTBEAT_S = 6.0
BUS_RETRY_S = 1.0
LAST_SEND_S = 4.0
"""The time that a message may still take when this process is asked to stop."""


class Notifier:
    """Sends one channel's messages. Runs while this process has the leader lease."""

    def __init__(
        self,
        channel: AlertSender,
        rules: ChannelRules,
        bus: AlerterBus,
        incidents: IncidentRecorder,
        metrics: ChannelMetrics,
        clock: Clock,
        *,
        max_waiting: int = ALERTS_HELD,
        schedule: Schedule = DEFAULT_SCHEDULE,
    ) -> None:
        self._channel = channel
        self._bus = bus
        self._incidents = incidents
        self._metrics = metrics
        self._clock = clock
        self._max_waiting = max_waiting
        self._queue = ChannelQueue(channel, rules, schedule)
        self._pull = Pull(bus.connection, Stream.ALERTS, alert_consumer(channel.name))
        self._sent_messages = SentMessages(bus, channel.name)
        self._is_disabled = True  # until that is looked up
        self._outage = Outage(f"alert channel {channel.name}")
        self._bus_outage = Outage(f"bus, for alert channel {channel.name}")

    @property
    def held(self) -> int:
        """The number of alerts that wait."""
        return self._queue.held

    def replay(self, delivery: Delivery, message: ChannelMessage) -> None:
        """Takes a message that was given up, to send it again."""
        self._queue.replay(delivery, message)

    async def run(self) -> None:
        """Fetches alerts and sends messages until it is cancelled."""
        beating = asyncio.create_task(self._beat())
        wait_s = IDLE_S

        async def step() -> float:
            await self._fetch(wait_s)
            next_s = await self._step()
            self._metrics.set_waiting(self._queue.held)
            return next_s

        try:
            while True:
                wait_s = await self._bus_outage.retry_until_available(step, on=BusError, retry_s=BUS_RETRY_S)
        finally:
            await background.stop(beating)
            # First, as an open request would bring back what is given back.
            await self._pull.close()
            await give_back(self._queue.deliveries())

    async def _beat(self) -> None:
        # Without it, the server would deliver held alerts again.
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await report_in_progress(self._queue.deliveries())

    async def _fetch(self, wait_s: float) -> None:
        room = self._max_waiting - self._queue.held
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
            # No service writes such a message. It stays in ALERTS for thirty days.
            structlog.get_logger().error(
                "alert_unreadable", channel=self._channel.name, sequence=delivery.sequence, error=error.title
            )
            await delivery.ack_sync()
            return
        if self._queue.may_have_message(alert) and await self._sent_messages.get(alert.incident_id):
            self._queue.has_message(alert.incident_id)
        if not self._queue.add(alert, delivery):
            await delivery.ack_sync()

    async def _step(self) -> float:
        """Sends one message, if one is due; and returns the time to wait before the next one."""
        # Only its leader disables a channel; but any alerter enables one, and an alert may come right after that.
        if self._is_disabled:
            self._is_disabled = await self._bus.is_disabled(self._channel)
        disabled = self._is_disabled
        if disabled and (left_s := await self._give_all_up()) is not None:
            return left_s
        if (pause_s := self._queue.pause_s(self._clock.monotonic())) > 0:
            return pause_s
        composed = None if disabled else self._queue.due(self._clock.monotonic()) or await self._compose()
        # Replays come last.
        composed = composed or self._queue.due_replay(self._clock.now(), self._clock.monotonic())
        if composed is None:
            return self._queue.idle_s(self._clock.monotonic())
        await _to_its_end(self._send(composed))
        return self._queue.pause_s(self._clock.monotonic())

    async def _compose(self) -> ComposedMessage | None:
        composed, skipped = self._queue.compose(self._clock.now())
        for delivery in skipped:
            await delivery.ack_sync()
        return composed

    async def _send(self, composed: ComposedMessage) -> None:
        message = composed.message
        if composed.replay and isinstance(message, Alert):
            # A replayed alert may be long out of date: people are notified of the incident as it is.
            message = self._incidents.known.get(message.incident_id) or message
        try:
            await self._send_once(message)
        except SendError as failure:
            self._metrics.count_failure()
            await self._after_failure(composed, failure)
            return
        self._metrics.count_delivery()
        self._outage.note_success()
        self._queue.note_delivery(composed, message, self._clock.now(), self._clock.monotonic())
        await _acknowledge(composed)
        works = channel_works(self._channel.name, message_id(message), self._clock.now())
        if self._is_disabled:
            await self._bus.enable(self._channel)
            self._is_disabled = False
        dead = self._incidents.known.of(works.key)
        if dead is not None and dead.status != "resolved":
            await self._incidents.apply(works)

    async def _send_once(self, message: ChannelMessage) -> None:
        try:
            await self._channel.send(message)
        except (SendError, BusError):
            raise
        except Exception as error:
            # An unexpected error with one message must not block all others.
            structlog.get_logger().exception("alert_not_sent", channel=self._channel.name, alert_id=message_id(message))
            raise SendError(f"it can't be sent ({type(error).__name__})", permanent=True) from error

    async def _after_failure(self, composed: ComposedMessage, failure: SendError) -> None:
        decided = self._queue.note_failure(composed, failure, self._clock.monotonic())
        if not (failure.disables or failure.permanent):
            self._outage.note_failure(failure)
        if decided == "disable":
            await self._disable(failure)
        if decided == "give up" or (decided == "disable" and composed.replay):
            await self._give_up(composed, str(failure))

    async def _disable(self, failure: SendError) -> None:
        if not self._is_disabled:
            structlog.get_logger().error(
                "alert_channel_disabled",
                channel=self._channel.name,
                error=str(failure),
                what_to_do=f"fix it in the config; or `breakwater alerts test {self._channel.name}` once it is back",
            )
        # Before it is recorded: if recording fails, the next step looks it up.
        self._is_disabled = True
        await self._bus.disable(self._channel)

    async def _give_all_up(self) -> float | None:
        """Every alert becomes a dead letter: a disabled receiver is not called again, and nothing is lost.

        Returns:
            The time to wait; None if an operator has asked to try once more.
        """
        while (composed := self._queue.unsent() or await self._compose()) is not None:
            if not await self._give_up(composed, "the receiver responded 410 Gone: the channel is disabled"):
                return self._queue.schedule.max_s
        return None if self._queue.has_replays else self._queue.idle_s(self._clock.monotonic())

    async def _give_up(self, composed: ComposedMessage, error: str) -> bool:
        """Keeps a message as a dead letter; False if that is refused."""
        name = self._channel.name
        alert_id = message_id(composed.message)
        dead_letter = composed.dead_letter(name, error, self._clock.now())
        # A replay that is given up again is another dead letter.
        again = f"/{next(iter(composed.deliveries.values())).sequence}" if composed.replay else ""
        try:
            await keep(self._bus.publisher, dead_letter, id=f"dlq/{name}/{alert_id}{again}")
        except EventStreamFullError as refusal:
            # It is tried on: a dead letter that can't be kept must not be the end of an alert.
            composed.not_before = self._clock.monotonic() + self._queue.schedule.max_s
            structlog.get_logger().error("dead_letter_refused", channel=name, alert_id=alert_id, error=str(refusal))
            return False
        self._metrics.count_dead_letter()
        structlog.get_logger().error(
            "alert_undeliverable", channel=name, alert_id=alert_id, failures=composed.failures, error=error
        )
        self._queue.end(composed)
        await _acknowledge(composed)
        return True


async def _acknowledge(composed: ComposedMessage) -> None:
    for delivery in composed.deliveries.values():
        await delivery.ack_sync()


async def _to_its_end(sending: Coroutine[Any, Any, None]) -> None:
    """Lets a message arrive, and be acknowledged, before this process stops: otherwise it would be sent twice."""
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
