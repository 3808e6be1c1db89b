"""What one alerter of the fleet does, while it has the turn: it delivers, gathers, and watches the clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import structlog
from pydantic import ValidationError

from breakwater import background
from breakwater.bus.delivery import Delivery
from breakwater.bus.errors import BusError
from breakwater.bus.incidents import IncidentLog
from breakwater.bus.lookup import Connection, Lookup
from breakwater.bus.publisher import Publisher
from breakwater.bus.pull import Pull
from breakwater.bus.topology import ALERTER_AGAIN, ALERTER_DEAD_LETTERS, ALERTER_EXECUTIONS, ALERTS_HELD, alert_consumer
from breakwater.config import Alerts
from breakwater.contracts.alerts import Alert, AlertDigest
from breakwater.contracts.subjects import Header, Stream
from breakwater.metrics import AlerterMetrics
from breakwater.outage import Outage
from breakwater.policy.incidents import IncidentRules
from breakwater.policy.outbox import ChannelRules
from services.alerter.baselines import Baselines
from services.alerter.channel import Channel
from services.alerter.courier import PATIENT, Courier, Schedule
from services.alerter.handlers import Gathering, Sweep, of_dead_letters, of_executions
from services.alerter.notes import Gone, Posts, Usual

SAVE_S = 30.0
AGAIN_S = 5.0
"""How soon a part that failed unexpectedly is started again."""


@dataclass(frozen=True, slots=True)
class Bus:
    """The bus, as the alerter uses it."""

    connection: Connection
    publisher: Publisher
    lookup: Lookup


class Duty:
    """Everything that one process at a time does for the whole fleet."""

    def __init__(
        self,
        alerts: Alerts,
        rules: IncidentRules,
        channels: Sequence[Channel],
        log: IncidentLog,
        bus: Bus,
        metrics: AlerterMetrics,
        now: Callable[[], datetime],
        schedule: Schedule = PATIENT,
    ) -> None:
        self._alerts, self._rules, self._channels = alerts, rules, channels
        self._log, self._bus, self._metrics, self._now, self._schedule = log, bus, metrics, now, schedule
        self._outage = Outage("keeping what is usual of agents")

    async def run(self) -> None:
        """Until it is cancelled."""
        baselines = Baselines(self._alerts.anomalies)
        usual = Usual(self._bus.connection, self._bus.publisher)
        couriers = {channel.name: self._courier(channel) for channel in self._channels}
        heard = of_executions(baselines, self._alerts.anomalies, self._now)
        await self._restore(baselines, usual)
        parts: dict[str, Callable[[], Awaitable[None]]] = {
            **{f"channel {name}": courier.run for name, courier in couriers.items()},
            "executions": lambda: self._gathering(Stream.EVENTS, ALERTER_EXECUTIONS).run(heard),
            "dead letters": lambda: self._gathering(Stream.DLQ, ALERTER_DEAD_LETTERS).run(of_dead_letters),
            "sweep": Sweep(self._log, self._rules, baselines, self._now).run,
            "again": lambda: self._again(couriers),
            "usual": lambda: self._save(baselines, usual),
        }
        tasks = [asyncio.create_task(_lasting(name, part)) for name, part in parts.items()]
        try:
            await asyncio.gather(*tasks)
        finally:
            await background.stop(*tasks)

    def _courier(self, channel: Channel) -> Courier:
        bus = self._bus
        return Courier(
            channel,
            ChannelRules(
                self._alerts.channels[channel.name],
                quiet_s=self._alerts.quiet_s,
                on_events=self._alerts.on_events,
                every_change=channel.updates,
            ),
            Pull(bus.connection, Stream.ALERTS, alert_consumer(channel.name)),
            Posts(bus.lookup, bus.publisher, channel.name),
            Gone(bus.lookup, bus.publisher, channel.name, channel.fingerprint),
            bus.publisher,
            self._log,
            self._rules,
            self._metrics.of(channel.name),
            self._now,
            most=ALERTS_HELD,
            schedule=self._schedule,
        )

    def _gathering(self, stream: Stream, durable: str) -> Gathering:
        return Gathering(self._log, self._rules, Pull(self._bus.connection, stream, durable), time.monotonic)

    async def _restore(self, baselines: Baselines, usual: Usual) -> None:
        # Nothing is done before that: what is not known here would be saved over what is.
        while True:
            try:
                found = await usual.all()
                break
            except BusError as error:
                self._outage.failed(error)
                await asyncio.sleep(AGAIN_S)
        self._outage.worked()
        for agent, saved in found.items():
            baselines.restore(agent, saved)

    async def _save(self, baselines: Baselines, usual: Usual) -> None:
        unsaved: dict[str, bytes] = {}
        while True:
            await asyncio.sleep(SAVE_S)
            unsaved |= baselines.changed(self._now())
            try:
                while unsaved:
                    agent, data = next(iter(unsaved.items()))
                    await usual.save(agent, data)
                    del unsaved[agent]
            except BusError as error:
                self._outage.failed(error)
            else:
                self._outage.worked()

    async def _again(self, couriers: Mapping[str, Courier]) -> None:
        pull, outage = Pull(self._bus.connection, Stream.ALERTER, ALERTER_AGAIN), Outage("alerts to try again")
        try:
            while True:
                try:
                    for delivery in await pull.fetch(100, 2.0):
                        await _hand_over(delivery, couriers)
                    outage.worked()
                except BusError as error:
                    outage.failed(error)
                    await asyncio.sleep(AGAIN_S)
        finally:
            await pull.close()


async def _hand_over(delivery: Delivery, couriers: Mapping[str, Courier]) -> None:
    name = delivery.headers.get(Header.CHANNEL.value, "")
    try:
        message = (AlertDigest if b'"digest_id"' in delivery.data else Alert).model_validate_json(delivery.data)
    except ValidationError as error:
        structlog.get_logger().error("alert_unreadable", channel=name, subject=delivery.subject, error=error.title)
    else:
        if name in couriers:
            couriers[name].take_again(delivery, message)
            return
        # Its dead letter is still there.
        structlog.get_logger().error("alert_channel_unknown", channel=name, subject=delivery.subject)
    await delivery.ack_sync()


async def _lasting(name: str, part: Callable[[], Awaitable[None]]) -> None:
    """Runs a part for ever: one that fails in a way that nobody foresaw does not end the others."""
    while True:
        task = asyncio.ensure_future(part())
        try:
            await asyncio.wait([task])
        finally:
            await background.stop(task)
        error = None if task.cancelled() else task.exception()
        structlog.get_logger().error("alerter_part_failed", part=name, again_in_s=AGAIN_S, exc_info=error)
        await asyncio.sleep(AGAIN_S)
