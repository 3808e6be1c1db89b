"""The doctor's look at the channels of alerts: who is told late, and whether that is meant."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from breakwater.cli import formats
from breakwater.cli.doctor_findings import LAG_WARN, Finding

if TYPE_CHECKING:
    from nats.aio.client import Client

    from breakwater.bus.survey import ConsumerFound
    from breakwater.config import Alerts
    from breakwater.policy.alert_rules import Route

SENDING = timedelta(minutes=1)
"""How long a message may take that nothing holds back."""


async def channel_findings(client: Client, alerts: Alerts, consumers: Sequence[ConsumerFound]) -> list[Finding]:
    """How far each channel is. What it holds back on purpose is none of the doctor's business.

    Raises:
        BusUnavailable: NATS does not answer.
    """
    from breakwater.bus.topology import alert_consumer

    names = {alert_consumer(name): name for name in alerts.channels}
    return [
        await _channel(client, one, names[one.name], held_back_for(alerts.channels[names[one.name]], alerts.quiet_s))
        for one in consumers
        if one.name in names
    ]


def held_back_for(route: Route, quiet_s: float) -> timedelta:
    """How long a channel may hold an alert back: until a recovery has lasted, a limit has passed, the night is over."""
    limit_s = 0.0 if route.rate_limit is None else route.rate_limit.within_s
    night = timedelta() if route.quiet_hours is None else timedelta(days=1)
    return max(timedelta(seconds=quiet_s + limit_s), night)


async def _channel(client: Client, consumer: ConsumerFound, name: str, allowed: timedelta) -> Finding:
    waiting, held = consumer.waiting or 0, consumer.in_work or 0
    text = f"{consumer.name}: {waiting:,} waiting, {held:,} held back or being sent"
    log = "See in the log of `alerter` what its receiver says"
    if consumer.readers == 0 and not held:
        remedy = "Is the service `alerter` running? See its log."
        return Finding("lag", "warn", f"{text}, and nobody reads", remedy)
    since = await _oldest(client, consumer.name) if held else None
    if since is not None and (age := datetime.now(UTC) - since) > allowed + SENDING:
        text += f", the oldest for {formats.duration(age.total_seconds() * 1000)}"
        return Finding("lag", "warn", text, f"{log}; `breakwater alerts test {name}` sends it a test message.")
    if waiting > LAG_WARN:
        return Finding("lag", "warn", text, f"{log}, or raise the channel's `rate_limit`.")
    return Finding("lag", "ok", text)


async def _oldest(client: Client, durable: str) -> datetime | None:
    """When the oldest alert was stored of those that a channel has not done with."""
    from breakwater.bus.lookup import Lookup
    from breakwater.contracts.subjects import Stream

    lookup = Lookup(lambda: client)
    done = await lookup.acknowledged(Stream.ALERTS, durable)
    found = await lookup.next(Stream.ALERTS, "bw.alerts.>", done + 1)
    return None if found is None else found.stored_at
