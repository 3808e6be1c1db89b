"""Notifies people that NATS can't store. No incident can be recorded then, so it is sent to the channels directly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime

import structlog

from breakwater.alerts.channels.channel import AlertSender, SendError
from breakwater.alerts.contract import Alert
from breakwater.alerts.rules.alert_rules import route_matches
from breakwater.alerts.rules.incidents import decide
from breakwater.alerts.rules.signals import Firing, storage_recovered
from breakwater.alerts.settings import Alerts
from breakwater.alerts.storage_watch import LOOK_EVERY_S, PATIENCE_S, lasting_failure
from breakwater.kernel.nats.errors import BusError
from breakwater.kernel.nats.leader_lease import LeaderLease
from breakwater.kernel.process import background
from breakwater.kernel.process.outage import Outage
from breakwater.services.alerter.incident_recorder import IncidentRecorder

MAX_TRIES = 5
"""The most tries to send the message to a channel. Slack's bot counts one that it can't record as failed."""


class BusWatch:
    """Follows whether NATS stores, by the leader lease. The alerter that led last notifies people, once.

    Once NATS stores again, the incident is recorded with its end, of which people are notified as of any other. So it
    is in the record, and its messages have the same ids.
    """

    def __init__(self, lease: LeaderLease, now: Callable[[], datetime], *, patience_s: float = PATIENCE_S) -> None:
        self._lease = lease
        self._now = now
        self._patience_s = patience_s
        self._failure: Firing | None = None
        self._message: Alert | None = None
        self._tries: dict[str, int] = {}

    async def run(self, alerts: Alerts, channels: Sequence[AlertSender], incidents: IncidentRecorder) -> None:
        """Looks every few seconds until it is cancelled."""
        outage = Outage("recording that NATS could not store")
        while True:
            await outage.run_logged(lambda: self.look(alerts, channels, incidents), expected=BusError)
            await asyncio.sleep(background.aligned_delay(LOOK_EVERY_S))

    async def look(self, alerts: Alerts, channels: Sequence[AlertSender], incidents: IncidentRecorder) -> None:
        """Sends or records what has changed. Raises BusError: look again."""
        now = self._now()
        failure = lasting_failure("nats", self._lease.storing, now, self._patience_s)
        if failure is not None and self._lease.led_last:
            if self._failure is None:
                self._failure = failure
                message = decide(failure, incidents.known.of(failure.key), incidents.rules)
                self._message = None if message is None else incidents.log.redact(message)
            await self._notify(alerts, channels)
        elif self._failure is not None and not self._lease.storing.lasting:
            await incidents.record(self._failure)
            await incidents.record(storage_recovered("nats", now))
            self._failure = self._message = None
            self._tries.clear()

    async def _notify(self, alerts: Alerts, channels: Sequence[AlertSender]) -> None:
        message = self._message
        if message is None:
            return
        for channel in channels:
            tries = self._tries.get(channel.name, 0)
            if tries >= MAX_TRIES or not route_matches(alerts.channels[channel.name], message):
                continue
            try:
                await channel.send(message)
            except (SendError, BusError) as error:
                self._tries[channel.name] = tries + 1
                structlog.get_logger().warning("alert_not_sent", channel=channel.name, error=str(error))
            else:
                self._tries[channel.name] = MAX_TRIES
