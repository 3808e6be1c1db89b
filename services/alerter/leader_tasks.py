"""The tasks of the alerter that has the leader lease: it notifies, groups, and watches the clock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime

import structlog
from pydantic import ValidationError

from breakwater import background
from breakwater.bus.delivery import Delivery
from breakwater.bus.errors import BusError
from breakwater.bus.pull import Pull
from breakwater.bus.topology import ALERTER_DEAD_LETTERS, ALERTER_EXECUTIONS, ALERTER_REPLAYS
from breakwater.config import Alerts
from breakwater.contracts import subjects
from breakwater.contracts.alerts import Alert, AlertDigest
from breakwater.contracts.subjects import Header, Stream
from breakwater.metrics import AlerterMetrics
from breakwater.outage import Outage
from breakwater.policy.outbox import ChannelRules
from services.alerter.baselines import Baselines
from services.alerter.bus import AlerterBus, IncidentRecorder
from services.alerter.channel import AlertSender
from services.alerter.handlers import Grouping, Sweep, of_dead_letters, of_executions
from services.alerter.notifier import Notifier

SAVE_S = 30.0
REPLAYS_WAIT_S = 2.0
RETRY_S = 5.0
"""The wait before a task that failed unexpectedly is started again."""


class LeaderTasks:
    """Everything that one process at a time does for the whole fleet."""

    def __init__(
        self,
        alerts: Alerts,
        channels: Sequence[AlertSender],
        incidents: IncidentRecorder,
        bus: AlerterBus,
        metrics: AlerterMetrics,
        now: Callable[[], datetime],
    ) -> None:
        self._alerts, self._channels, self._incidents = alerts, channels, incidents
        self._bus, self._metrics, self._now = bus, metrics, now
        self._outage = Outage("saving agents' baselines")

    async def run(self) -> None:
        """Runs all tasks until it is cancelled."""
        baselines = Baselines(self._alerts.anomalies)
        notifiers = {channel.name: self._notifier(channel) for channel in self._channels}
        signals = of_executions(baselines, self._alerts.anomalies, self._now, lambda key: self._incidents.known.of(key))
        # First of all: figures that are unknown here would be overwritten.
        saved = await self._outage.retry_until_available(self._bus.baselines, on=BusError, retry_s=RETRY_S)
        for agent, data in saved.items():
            baselines.restore(agent, data)
        parts: dict[str, Callable[[], Awaitable[None]]] = {
            **{f"channel {name}": notifier.run for name, notifier in notifiers.items()},
            "executions": lambda: self._grouping(Stream.EVENTS, ALERTER_EXECUTIONS).run(signals),
            "dead letters": lambda: self._grouping(Stream.DLQ, ALERTER_DEAD_LETTERS).run(of_dead_letters),
            "sweep": Sweep(self._incidents, baselines, self._now).run,
            "replays": lambda: self._replay(notifiers),
            "baselines": lambda: self._save(baselines),
        }
        await background.run_together(*(_lasting(name, part) for name, part in parts.items()))

    def _notifier(self, channel: AlertSender) -> Notifier:
        rules = ChannelRules(
            self._alerts.channels[channel.name],
            quiet_s=self._alerts.quiet_s,
            on_events=self._alerts.on_events,
            every_change=channel.updates,
        )
        return Notifier(channel, rules, self._bus, self._incidents, self._metrics.of(channel.name), self._now)

    def _grouping(self, stream: Stream, durable: str) -> Grouping:
        return Grouping(self._incidents, Pull(self._bus.connection, stream, durable))

    async def _save(self, baselines: Baselines) -> None:
        unsaved: dict[str, bytes] = {}

        async def save() -> None:
            unsaved.update(baselines.changed(self._now()))
            while unsaved:
                agent, data = next(iter(unsaved.items()))
                await self._bus.remember(subjects.baseline(agent), data)
                del unsaved[agent]

        while True:
            await asyncio.sleep(SAVE_S)
            await self._outage.retry_until_available(save, on=BusError, retry_s=SAVE_S)

    async def _replay(self, notifiers: Mapping[str, Notifier]) -> None:
        pull, outage = Pull(self._bus.connection, Stream.ALERTER, ALERTER_REPLAYS), Outage("alerts to send once more")

        async def hand_over() -> None:
            for delivery in await pull.fetch(100, background.aligned_delay(REPLAYS_WAIT_S)):
                await _hand_over(delivery, notifiers)

        try:
            while True:
                await outage.retry_until_available(hand_over, on=BusError, retry_s=RETRY_S)
        finally:
            await pull.close()


async def _hand_over(delivery: Delivery, notifiers: Mapping[str, Notifier]) -> None:
    name = delivery.headers.get(Header.CHANNEL.value, "")
    try:
        message = (AlertDigest if b'"digest_id"' in delivery.data else Alert).model_validate_json(delivery.data)
    except ValidationError as error:
        structlog.get_logger().error("alert_unreadable", channel=name, subject=delivery.subject, error=error.title)
    else:
        if name in notifiers:
            notifiers[name].replay(delivery, message)
            return
        # Its dead letter is still there.
        structlog.get_logger().error("alert_channel_unknown", channel=name, subject=delivery.subject)
    await delivery.ack_sync()


async def _lasting(name: str, part: Callable[[], Awaitable[None]]) -> None:
    """Runs a task until cancelled: one that fails unexpectedly is started again, and ends no other."""
    while True:
        task = asyncio.ensure_future(part())
        try:
            await asyncio.wait([task])
        finally:
            await background.stop(task)
        error = None if task.cancelled() else task.exception()
        structlog.get_logger().error("alerter_task_failed", task=name, again_in_s=RETRY_S, exc_info=error)
        await asyncio.sleep(RETRY_S)
