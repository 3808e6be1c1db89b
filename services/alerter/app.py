"""Wires the alerter: events in, alerts out, and one consumer for each channel that is set up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from faststream import FastStream

from breakwater.bus.broker import connection_of, make_app, make_broker, on_batch, on_each
from breakwater.bus.publisher import Publisher
from breakwater.config import Alerts, Config
from breakwater.contracts.subjects import Stream
from breakwater.settings import Settings
from services.alerter.channel import Channel
from services.alerter.handlers import ChannelDelivery, Decisions
from services.alerter.slack import SlackSender
from services.alerter.webhook import WebhookSender

CONSUMER_LIMIT = 64
"""As many as a channel's consumer has out at once (its `max_ack_pending`), so that none waits in this process for a
free handler: what waits there has no heartbeat, would be delivered again, and shown to people twice."""


def build(settings: Settings, config: Config) -> FastStream:
    """Wires the service. Connects to nothing yet.

    Raises:
        ConfigError: a channel's secret is missing or unusable.
    """
    channels = tuple(_channels(config.alerts, _now))
    broker = make_broker(settings.nats_url.get_secret_value(), "alerter")
    publisher = Publisher(connection_of(broker), "alerter")
    decisions = Decisions(publisher, config.alerts.on_events, _now)
    on_batch(broker, Stream.EVENTS, "bw.>", "alerter", decisions.handle, size=100, linger_s=0.25)
    for channel in channels:
        delivery = ChannelDelivery(channel, publisher, _now)
        durable = f"alerter-{channel.name}"
        on_each(broker, Stream.ALERTS, "bw.alerts.>", durable, delivery.handle, concurrency=CONSUMER_LIMIT)
    app = make_app(broker)

    @app.on_startup
    async def open_channels() -> None:
        for channel in channels:
            await channel.open()

    @app.after_shutdown
    async def close_channels() -> None:
        for channel in channels:
            await channel.close()

    return app


def _channels(alerts: Alerts, now: Callable[[], datetime]) -> Iterable[Channel]:
    if alerts.slack is not None:
        yield SlackSender.from_config(alerts.slack, now)
    if alerts.webhook is not None:
        yield WebhookSender.from_config(alerts.webhook, now)


def _now() -> datetime:
    return datetime.now(UTC)
