"""Wires the alerter: events in, incidents out, and people told of them.

Any number of alerters decides on incidents. One of them at a time delivers, gathers what comes with every job, and
watches the clock; the others wait for its turn to end.
"""

from __future__ import annotations

import asyncio
import os
import socket
from datetime import UTC, datetime
from uuid import uuid4

from faststream import FastStream

from breakwater import background
from breakwater.bus.broker import connection_of, make_app, make_broker, on_each, on_request
from breakwater.bus.incidents import IncidentLog
from breakwater.bus.lookup import Lookup
from breakwater.bus.publisher import Publisher
from breakwater.bus.topology import ALERTER_EVENTS
from breakwater.bus.turn import Turn
from breakwater.config import Config
from breakwater.contracts.subjects import CHANNEL_TESTS, TURN, Stream
from breakwater.metrics import AlerterMetrics
from breakwater.policy.incidents import IncidentRules
from breakwater.policy.redact import Redactor
from breakwater.settings import Settings
from services.alerter.channels import channels_of
from services.alerter.duty import Bus, Duty
from services.alerter.handlers import Decisions
from services.alerter.notes import Gone, Posts
from services.alerter.trial import Trial


def build(settings: Settings, config: Config) -> FastStream:
    """Wires the service. Connects to nothing yet.

    Raises:
        ConfigError: a channel's secret or callable is missing or unusable.
    """
    alerts = config.alerts
    broker = make_broker(settings.nats_url.get_secret_value(), "alerter")
    connection = connection_of(broker)
    bus = Bus(connection, Publisher(connection, "alerter"), Lookup(connection))
    channels = channels_of(alerts, lambda name: Posts(bus.lookup, bus.publisher, name), _now)
    rules = IncidentRules(alerts.on_events, alerts.quiet_s, alerts.escalate, alerts.reminders)
    log = IncidentLog(connection, bus.publisher, Redactor.compile(config.redaction))
    decisions = Decisions(log, rules, bus.publisher, _now)
    on_each(broker, Stream.EVENTS, "bw.>", ALERTER_EVENTS, decisions.handle, concurrency=1)
    gone = {one.name: Gone(bus.lookup, bus.publisher, one.name, one.fingerprint) for one in channels}
    on_request(broker, CHANNEL_TESTS, "alerters", Trial({one.name: one for one in channels}, gone, _now).answer)
    duty = Duty(alerts, rules, channels, log, bus, AlerterMetrics(), _now)
    turn = Turn(bus.lookup, bus.publisher, Stream.ALERTER, TURN, f"{socket.gethostname()}/{os.getpid()}/{uuid4().hex}")
    app = make_app(broker)
    beside: list[asyncio.Task[None]] = []

    @app.on_startup
    async def open_channels() -> None:
        for channel in channels:
            await channel.open()

    @app.after_startup
    async def start() -> None:
        beside.append(asyncio.create_task(turn.run(duty.run)))

    @app.on_shutdown
    async def stop() -> None:
        # While the bus is there, so that the turn is given back, and another one goes on at once.
        await background.stop(*beside)

    @app.after_shutdown
    async def close_channels() -> None:
        for channel in channels:
            await channel.close()

    return app


def _now() -> datetime:
    return datetime.now(UTC)
