"""What the alerter does: decides which events people must know of, and delivers each alert to each channel."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from datetime import datetime

import structlog
from pydantic import ValidationError

from breakwater.bus.deadletter import dead_letter
from breakwater.bus.delivery import Delivery, heartbeat
from breakwater.bus.errors import BusError
from breakwater.bus.publisher import Publisher
from breakwater.contracts import subjects
from breakwater.contracts.events import Alert, AlertEvent, BreakerTransition, BudgetEvent, GuardEvent
from breakwater.policy.alerts import alert_for
from breakwater.telemetry import Outage
from services.alerter.channel import FIVE_MINUTES, Channel, Pace, Schedule, SendError

_MODELS: Mapping[str, type[BreakerTransition | GuardEvent | BudgetEvent]] = {
    "breakers": BreakerTransition,
    "guards": GuardEvent,
    "budgets": BudgetEvent,
}
"""What stands on the subjects that the consumer filters, by their second token."""


class Decisions:
    """Events in, alerts out. Any number of processes: an alert's id makes the stream keep it once."""

    def __init__(
        self,
        publisher: Publisher,
        on_events: Collection[AlertEvent],
        now: Callable[[], datetime],
        schedule: Schedule = FIVE_MINUTES,
    ) -> None:
        self._publisher = publisher
        self._on_events = on_events
        self._now = now
        self._schedule = schedule
        self._outage = Outage("publishing alerts")

    async def handle(self, batch: list[Delivery]) -> None:
        """Publishes what a batch calls for. An event is acknowledged once its alert is stored."""
        async with heartbeat(batch):
            # One after the other, so that of one breaker's alerts `closed` follows `open`.
            for delivery in batch:
                await self._handle_one(delivery)

    async def _handle_one(self, delivery: Delivery) -> None:
        try:
            await self._decide(delivery)
        except BusError as error:
            self._outage.failed(error)
            await delivery.retry_in(self._schedule.backoff_s(delivery.deliveries))
            return
        await delivery.ack()

    async def _decide(self, delivery: Delivery) -> None:
        try:
            event = _event(delivery)
        except ValidationError as error:
            await _set_aside(self._publisher, delivery, error, self._now())
            self._outage.worked()
            return
        alert = alert_for(event, self._on_events)
        if alert is None:
            return
        await self._publisher.event(subjects.alert(alert.event), alert, id=alert.alert_id, at=alert.at)
        self._outage.worked()


def _event(delivery: Delivery) -> BreakerTransition | GuardEvent | BudgetEvent:
    return _MODELS[delivery.subject.split(".")[1]].model_validate_json(delivery.data)


class ChannelDelivery:
    """Takes alerts to one channel, until each has arrived or is in the dead letters."""

    def __init__(
        self,
        channel: Channel,
        publisher: Publisher,
        now: Callable[[], datetime],
        schedule: Schedule = FIVE_MINUTES,
    ) -> None:
        self._channel = channel
        self._publisher = publisher
        self._now = now
        self._schedule = schedule
        self._pace = Pace(channel.interval_s)
        self._outage = Outage(f"alert channel {channel.name}")
        self._letters = Outage("storing dead letters")

    async def handle(self, delivery: Delivery) -> None:
        """Sends one alert, and acknowledges it when it has arrived."""
        async with heartbeat((delivery,)):
            try:
                await self._deliver(delivery)
            except BusError as error:
                self._letters.failed(error)
                await delivery.retry_in(self._schedule.backoff_s(delivery.deliveries))

    async def _deliver(self, delivery: Delivery) -> None:
        try:
            alert = Alert.model_validate_json(delivery.data)
        except ValidationError as error:
            await _set_aside(self._publisher, delivery, error, self._now())
            self._letters.worked()
            await delivery.ack_sync()
            return
        await self._pace.turn()
        try:
            await self._channel.send(alert)
        except SendError as failure:
            await self._after_failure(delivery, alert, failure)
            return
        self._outage.worked()
        await delivery.ack_sync()

    async def _after_failure(self, delivery: Delivery, alert: Alert, failure: SendError) -> None:
        if not failure.permanent:
            # A refusal says something of the alert or the set-up, and is told when it is given up.
            self._outage.failed(failure)
        self._pace.pause(self._schedule.pause_s(failure))
        delay_s = self._schedule.retry_in_s(failure, delivery.deliveries)
        if delay_s is None:
            await self._give_up(delivery, alert, failure)
            return
        await delivery.retry_in(delay_s)

    async def _give_up(self, delivery: Delivery, alert: Alert, failure: SendError) -> None:
        name = self._channel.name
        await dead_letter(
            self._publisher,
            delivery,
            reason="undeliverable",
            error=f"{name}: {failure} (delivery {delivery.deliveries})",
            agent=alert.agent,
            at=self._now(),
            consumer=name,
        )
        self._letters.worked()
        structlog.get_logger().error(
            "alert_undeliverable",
            channel=name,
            alert_id=alert.alert_id,
            alert_event=alert.event,
            deliveries=delivery.deliveries,
            error=str(failure),
        )
        await delivery.ack_sync()


async def _set_aside(publisher: Publisher, delivery: Delivery, error: ValidationError, now: datetime) -> None:
    """Keeps a message that can't be read as a dead letter. Raises BusError, as publishing does."""
    # Without the values that were found: they may be anything, and this text is logged.
    problems = error.errors(include_input=False, include_url=False, include_context=False)
    words = "; ".join(f"{'.'.join(map(str, problem['loc'])) or 'body'}: {problem['msg']}" for problem in problems)
    await dead_letter(publisher, delivery, reason="unreadable", error=words, agent=None, at=now)
    structlog.get_logger().error(
        "unreadable_message", stream=delivery.stream, sequence=delivery.sequence, subject=delivery.subject, error=words
    )
