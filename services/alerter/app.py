"""Wires the alerter: events in, incidents out, and people notified of them.

Any number of alerters decides on incidents. One of them at a time, the leader, notifies people, groups what comes with
every job, and watches the clock; the others wait for its lease to end.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import get_args
from uuid import uuid4

import structlog
from pydantic import ValidationError

from breakwater.alerts.channels.channel import AlertSender
from breakwater.alerts.channels.configured_channels import ChannelTester, channels_of
from breakwater.alerts.contract import Alert, AlertDigest, IncidentStatus
from breakwater.alerts.metrics import AlerterMetrics
from breakwater.alerts.rules.alert_rules import SEVERITY_OF, began_with
from breakwater.alerts.rules.incidents import IncidentRules
from breakwater.alerts.rules.outbox import ChannelRules
from breakwater.alerts.settings import Alerts
from breakwater.alerts.store.channels import AlerterBus, SentMessages
from breakwater.alerts.store.incidents import IncidentLog
from breakwater.breakers.contract import BreakerTransition
from breakwater.config import Config
from breakwater.kernel.clickhouse.client import Analytics, connect
from breakwater.kernel.nats.broker import Batches, ServiceApp, connection_of, make_broker, on_request, publisher_of
from breakwater.kernel.nats.delivery import Delivery
from breakwater.kernel.nats.errors import BusError
from breakwater.kernel.nats.leader_lease import LEASE_TIMES, LeaderLease
from breakwater.kernel.nats.pull import Pull
from breakwater.kernel.nats.subjects import ALERTER_LEADER, CHANNEL_TESTS, Header, Stream
from breakwater.kernel.nats.topology import ALERTER_DEAD_LETTERS, ALERTER_EVENTS, ALERTER_EXECUTIONS, ALERTER_REPLAYS
from breakwater.kernel.process import background
from breakwater.kernel.process.outage import Outage
from breakwater.kernel.process.pace import at_pace
from breakwater.kernel.process.settings import Settings
from breakwater.kernel.telemetry.metrics import INCIDENTS, GaugeCollector, Readings
from breakwater.limits.contract import BudgetEvent, GuardEvent
from breakwater.records.channels import ALERTS, BREAKERS, BUDGETS, DEAD_LETTERS, GUARDS
from breakwater.redaction.rules.redact import Redactor
from breakwater.services.alerter.anomalies import AnomalyWatch
from breakwater.services.alerter.bus_watch import BusWatch
from breakwater.services.alerter.clock import SYSTEM_CLOCK, Clock
from breakwater.services.alerter.handlers import Decisions, Grouping, Sweep, of_dead_letters, of_executions
from breakwater.services.alerter.incident_recorder import IncidentRecorder
from breakwater.services.alerter.notifier import Notifier

REPLAYS_WAIT_S = 2.0
RETRY_S = 5.0
"""The wait before a task that failed unexpectedly is started again."""


@dataclass(frozen=True, slots=True)
class AlerterGeneration:
    """The parts of an alerter that one version of the config has made."""

    config: Config
    channels: Sequence[AlertSender]
    decisions: Decisions
    tester: ChannelTester
    tasks: LeaderTasks

    @classmethod
    def of(
        cls, config: Config, log: IncidentLog, bus: AlerterBus, analytics: Analytics | None, clock: Clock
    ) -> AlerterGeneration:
        """Wires it. Raises ConfigError: a channel's secret or callable is missing or unusable."""
        alerts = config.alerts
        channels = channels_of(alerts, partial(SentMessages, bus), clock.now, config.redaction, config.console.url)
        rules = IncidentRules.of(alerts)
        incidents = IncidentRecorder(log, rules)
        return cls(
            config,
            channels,
            Decisions(incidents, bus.publisher, clock.now),
            ChannelTester(channels, bus, clock.now),
            LeaderTasks(alerts, channels, incidents, bus, analytics, clock),
        )

    async def close(self) -> None:
        """Closes its channels."""
        for channel in self.channels:
            await channel.close()


def build(settings: Settings, config: Config, clock: Clock = SYSTEM_CLOCK) -> ServiceApp:
    """Wires the service. Connects to nothing yet.

    Raises:
        ConfigError: a channel's secret or callable is missing or unusable.
    """
    broker = make_broker(settings.nats_url.get_secret_value(), "alerter")
    connection = connection_of(broker)
    bus = AlerterBus(connection, publisher_of(broker, ALERTS, DEAD_LETTERS))
    log = IncidentLog(connection, bus.publisher, Redactor.compile(config.redaction))
    # Without a URL, this is an alerter that has no ClickHouse, and not an outage of one.
    analytics = connect(settings.clickhouse_url) if "clickhouse_url" in settings.model_fields_set else None
    now = AlerterGeneration.of(config, log, bus, analytics, clock)
    applied_version = config.version
    on_request(broker, CHANNEL_TESTS, "alerters", lambda subject: now.tester.answer(subject))

    async def read_gauges() -> Readings:
        return {INCIDENTS: counted_incidents((await log.catch_up()).unresolved())}

    holder = f"{socket.gethostname()}/{os.getpid()}/{uuid4().hex}"
    times = at_pace(LEASE_TIMES, settings.pace)
    lease = LeaderLease(bus.lookup, bus.publisher, Stream.ALERTER, ALERTER_LEADER, holder, times=times)
    gauges = GaugeCollector("alerter", read_gauges)
    bus_watch = BusWatch(lease, clock.now)
    app = ServiceApp(broker)

    # NATS delivers one at a time to the whole fleet: a breaker's closing is never handled before its opening.
    @broker.subscriber(BREAKERS, GUARDS, BUDGETS, durable=ALERTER_EVENTS, pull_sub=Batches(1, linger_s=0))
    async def events(batch: list[Delivery[BreakerTransition | GuardEvent | BudgetEvent]]) -> None:
        for delivery in batch:
            await now.decisions.handle(delivery)

    running: list[asyncio.Task[None]] = []

    async def lead() -> None:
        await lease.run(now.tasks.run)

    async def watch_bus() -> None:
        await bus_watch.run(now.config.alerts, now.channels, now.decisions.incidents)

    def start_tasks() -> None:
        running[:] = [asyncio.create_task(background.keep_doing(work)) for work in (lead, watch_bus)]

    @app.after_startup
    async def start() -> None:
        start_tasks()
        gauges.start()

    async def reload(changed: Config) -> None:
        nonlocal now, applied_version
        same = _alerter_part(changed) == _alerter_part(now.config)
        # If the config has not changed at all, its secrets may have.
        same = same and changed.version != applied_version
        generation = None if same else AlerterGeneration.of(changed, log, bus, analytics, clock)
        applied_version = changed.version
        log.redactor = Redactor.compile(changed.redaction)
        if generation is not None:
            # As at a restart: sending is cancelled, and done again, here or by another alerter.
            await background.stop(*running)
            before = now
            now = generation
            start_tasks()
            await before.close()

    app.reload = reload

    @app.on_shutdown
    async def stop() -> None:
        await app.end_subscribers()
        gauges.stop()
        # While the bus is connected, so that the lease is released, and another alerter goes on immediately.
        await background.stop(*running)

    @app.after_shutdown
    async def close_connections() -> None:
        await now.close()
        if analytics is not None:
            await analytics.close()

    return app


class LeaderTasks:
    """The tasks of the alerter that has the leader lease: it notifies, groups, and watches the clock."""

    def __init__(
        self,
        alerts: Alerts,
        channels: Sequence[AlertSender],
        incidents: IncidentRecorder,
        bus: AlerterBus,
        analytics: Analytics | None,
        clock: Clock,
    ) -> None:
        self._alerts = alerts
        self._channels = channels
        self._incidents = incidents
        self._bus = bus
        self._analytics = analytics
        self._clock = clock

    async def run(self) -> None:
        """Runs all tasks until it is cancelled."""
        notifiers = {channel.name: self._notifier(channel) for channel in self._channels}
        signals = of_executions(self._alerts, lambda key: self._incidents.known.of(key))
        executions = self._grouping(Stream.EVENTS, ALERTER_EXECUTIONS)
        dead_letters = self._grouping(Stream.DLQ, ALERTER_DEAD_LETTERS)

        def may_continue(key: str) -> bool:
            return executions.may_continue(key) or dead_letters.may_continue(key)

        parts: dict[str, Callable[[], Awaitable[None]]] = {
            **{f"channel {name}": notifier.run for name, notifier in notifiers.items()},
            "executions": lambda: executions.run(signals),
            "dead letters": lambda: dead_letters.run(of_dead_letters),
            "sweep": Sweep(self._incidents, self._clock.now, may_continue).run,
            "anomalies": AnomalyWatch(
                self._analytics, self._alerts, self._incidents, self._bus.lookup, self._clock.now
            ).run,
            "replays": lambda: self._replay(notifiers),
        }
        await background.run_together(*(_lasting(name, part) for name, part in parts.items()))

    def _notifier(self, channel: AlertSender) -> Notifier:
        rules = ChannelRules(
            self._alerts.channels[channel.name],
            quiet_s=self._alerts.quiet_s,
            on_events=self._alerts.on_events,
            every_change=channel.updates,
            is_chat=channel.is_chat,
        )
        return Notifier(channel, rules, self._bus, self._incidents, AlerterMetrics().of(channel.name), self._clock)

    def _grouping(self, stream: Stream, durable: str) -> Grouping:
        return Grouping(self._incidents, Pull(self._bus.connection, stream, durable), self._bus.lookup, self._clock)

    async def _replay(self, notifiers: Mapping[str, Notifier]) -> None:
        pull = Pull(self._bus.connection, Stream.ALERTER, ALERTER_REPLAYS)
        outage = Outage("alerts to send once more")

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


def _alerter_part(config: Config) -> object:
    return config.alerts, config.redaction, config.console.url


def counted_incidents(incidents: Iterable[Alert]) -> dict[tuple[str, ...], float]:
    """The number of incidents of each event, severity and status, also if it is 0."""
    counts = {
        (event, severity, status): 0.0
        for event, severity in SEVERITY_OF.items()
        for status in get_args(IncidentStatus)
        if status != "resolved"
    }
    return counts | Counter((began_with(incident), incident.severity, incident.status) for incident in incidents)
