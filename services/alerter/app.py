"""Wires the alerter: events in, incidents out, and people notified of them.

Any number of alerters decides on incidents. One of them at a time, the leader, notifies people, groups what comes with
every job, and watches the clock; the others wait for its lease to end.
"""

from __future__ import annotations

import asyncio
import os
import socket
from datetime import UTC, datetime
from uuid import uuid4

from breakwater import background
from breakwater.bus.broker import ServiceApp, connection_of, make_broker, on_each, on_request
from breakwater.bus.incidents import IncidentLog
from breakwater.bus.leader_lease import LeaderLease
from breakwater.bus.lookup import Lookup
from breakwater.bus.publisher import Publisher
from breakwater.bus.topology import ALERTER_EVENTS
from breakwater.config import Config
from breakwater.contracts.subjects import ALERTER_LEADER, CHANNEL_TESTS, Stream
from breakwater.metrics import AlerterMetrics
from breakwater.policy.incidents import IncidentRules
from breakwater.policy.redact import Redactor
from breakwater.settings import Settings
from services.alerter.channels import ChannelTester, channels_of
from services.alerter.handlers import Decisions
from services.alerter.leader_tasks import AlerterBus, LeaderTasks
from services.alerter.notes import DisabledChannels, SentMessages


def build(settings: Settings, config: Config) -> ServiceApp:
    """Wires the service. Connects to nothing yet.

    Raises:
        ConfigError: a channel's secret or callable is missing or unusable.
    """
    alerts = config.alerts
    broker = make_broker(settings.nats_url.get_secret_value(), "alerter")
    connection = connection_of(broker)
    bus = AlerterBus(connection, Publisher(connection, "alerter"), Lookup(connection))
    channels = channels_of(alerts, lambda name: SentMessages(bus.lookup, bus.publisher, name), _now)
    rules = IncidentRules(alerts.on_events, alerts.quiet_s, alerts.escalate, alerts.reminders)
    log = IncidentLog(connection, bus.publisher, Redactor.compile(config.redaction))
    decisions = Decisions(log, rules, bus.publisher, _now)
    on_each(broker, Stream.EVENTS, "bw.>", ALERTER_EVENTS, decisions.handle, concurrency=1)
    tester = ChannelTester(channels, DisabledChannels(bus.lookup, bus.publisher), _now)
    on_request(broker, CHANNEL_TESTS, "alerters", tester.answer)
    tasks = LeaderTasks(alerts, rules, channels, log, bus, AlerterMetrics(), _now)
    holder = f"{socket.gethostname()}/{os.getpid()}/{uuid4().hex}"
    lease = LeaderLease(bus.lookup, bus.publisher, Stream.ALERTER, ALERTER_LEADER, holder)
    app = ServiceApp(broker)
    running: list[asyncio.Task[None]] = []

    @app.on_startup
    async def open_channels() -> None:
        for channel in channels:
            await channel.open()

    @app.after_startup
    async def start() -> None:
        running.append(asyncio.create_task(lease.run(tasks.run)))

    @app.on_shutdown
    async def stop() -> None:
        # While the bus is there, so that the lease is released, and another alerter goes on at once.
        await background.stop(*running)

    @app.after_shutdown
    async def close_channels() -> None:
        for channel in channels:
            await channel.close()

    return app


def _now() -> datetime:
    return datetime.now(UTC)
