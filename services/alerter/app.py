"""Wires the alerter: events in, incidents out, and people notified of them.

Any number of alerters decides on incidents. One of them at a time, the leader, notifies people, groups what comes with
every job, and watches the clock; the others wait for its lease to end.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import get_args
from uuid import uuid4

from breakwater import background
from breakwater.bus.broker import ServiceApp, connection_of, make_broker, on_batch, on_request
from breakwater.bus.incidents import IncidentLog
from breakwater.bus.leader_lease import LeaderLease
from breakwater.bus.topology import ALERTER_EVENTS
from breakwater.config import Config
from breakwater.contracts.alerts import Alert, IncidentStatus
from breakwater.contracts.subjects import ALERTER_LEADER, CHANNEL_TESTS, Stream
from breakwater.metrics import INCIDENTS, AlerterMetrics, GaugeCollector, Readings
from breakwater.policy.alert_rules import SEVERITY_OF, began_with, highest_severity
from breakwater.policy.incidents import IncidentRules
from breakwater.policy.redact import Redactor
from breakwater.settings import Settings
from services.alerter.bus import AlerterBus, IncidentRecorder, SentMessages
from services.alerter.channel import AlertSender
from services.alerter.channels import ChannelTester, channels_of
from services.alerter.handlers import Decisions
from services.alerter.leader_tasks import LeaderTasks


@dataclass(frozen=True, slots=True)
class AlerterGeneration:
    """The parts of an alerter that one version of the config has made."""

    config: Config
    channels: Sequence[AlertSender]
    decisions: Decisions
    tester: ChannelTester
    tasks: LeaderTasks

    @classmethod
    def of(cls, config: Config, log: IncidentLog, bus: AlerterBus) -> AlerterGeneration:
        """Wires it. Raises ConfigError: a channel's secret or callable is missing or unusable."""
        alerts = config.alerts
        channels = channels_of(alerts, partial(SentMessages, bus), _now, config.redaction)
        rules = IncidentRules(alerts.on_events, alerts.quiet_s, alerts.escalate, alerts.reminders)
        incidents = IncidentRecorder(log, rules)
        return cls(
            config,
            channels,
            Decisions(incidents, bus.publisher, _now),
            ChannelTester(channels, bus, _now),
            LeaderTasks(alerts, channels, incidents, bus, AlerterMetrics(), _now),
        )

    async def close(self) -> None:
        """Closes its channels."""
        for channel in self.channels:
            await channel.close()


def build(settings: Settings, config: Config) -> ServiceApp:
    """Wires the service. Connects to nothing yet.

    Raises:
        ConfigError: a channel's secret or callable is missing or unusable.
    """
    broker = make_broker(settings.nats_url.get_secret_value(), "alerter")
    connection = connection_of(broker)
    bus = AlerterBus(connection)
    log = IncidentLog(connection, bus.publisher, Redactor.compile(config.redaction))
    now = AlerterGeneration.of(config, log, bus)
    on_request(broker, CHANNEL_TESTS, "alerters", lambda subject: now.tester.answer(subject))

    async def read_gauges() -> Readings:
        return {INCIDENTS: counted_incidents((await log.catch_up()).unresolved())}

    holder = f"{socket.gethostname()}/{os.getpid()}/{uuid4().hex}"
    lease = LeaderLease(bus.lookup, bus.publisher, Stream.ALERTER, ALERTER_LEADER, holder)
    shown = GaugeCollector("alerter", read_gauges)
    app = ServiceApp(broker)
    on_batch(app, broker, Stream.EVENTS, ALERTER_EVENTS, lambda one: now.decisions.handle(one[0]), size=1, linger_s=0)
    running: list[asyncio.Task[None]] = []

    @app.after_startup
    async def start() -> None:
        running.append(asyncio.create_task(lease.run(now.tasks.run)))
        shown.start()

    async def reload(changed: Config) -> None:
        nonlocal now
        same = (changed.alerts, changed.redaction) == (now.config.alerts, now.config.redaction)
        generation = None if same else AlerterGeneration.of(changed, log, bus)
        log.redactor = Redactor.compile(changed.redaction)
        if generation is not None:
            # As at a restart: sending is cancelled, and done again, here or by another alerter.
            await background.stop(*running)
            before, now = now, generation
            running[:] = [asyncio.create_task(lease.run(now.tasks.run))]
            await before.close()

    app.reload = reload

    @app.on_shutdown
    async def stop() -> None:
        shown.stop()
        # While the bus is connected, so that the lease is released, and another alerter goes on immediately.
        await background.stop(*running)

    @app.after_shutdown
    async def close_channels() -> None:
        await now.close()

    return app


def counted_incidents(incidents: Iterable[Alert]) -> dict[tuple[str, ...], float]:
    """The number of incidents of each event, severity and status, also if it is 0."""
    counts = {
        (event, severity, status): 0.0
        for event, severity in SEVERITY_OF.items()
        for status in get_args(IncidentStatus)
        if status != "resolved"
    }
    return counts | Counter((began_with(one), highest_severity(one), one.status) for one in incidents)


def _now() -> datetime:
    return datetime.now(UTC)
