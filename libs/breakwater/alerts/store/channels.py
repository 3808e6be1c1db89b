"""The bus as the alerter uses it: the last message of each subject of the stream ALERTER.

All methods raise BusUnavailableError.
"""

from __future__ import annotations

from breakwater.alerts.channels.channel import AlertSender
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.core import ClientGetter
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import Stream


class AlerterBus:
    """The bus as the alerter uses it, with disabled channels.

    A channel is disabled with its fingerprint: its receiver wants no more alerts, but another one that the config names
    later does.
    """

    def __init__(self, connection: ClientGetter, publisher: Publisher) -> None:
        self.connection = connection
        self.publisher = publisher
        self.lookup = Lookup(connection)

    async def recall(self, subject: str) -> bytes:
        """Returns the last message of a subject; empty if there is none."""
        message = await self.lookup.last(Stream.ALERTER, subject)
        return b"" if message is None else message.data

    async def remember(self, subject: str, data: bytes) -> None:
        """Replaces the last message of a subject."""
        await self.publisher.raw(subject, data, {})

    async def is_disabled(self, channel: AlertSender) -> bool:
        """Returns True if the channel's receiver wants no more alerts."""
        return await self.recall(subjects.disabled_channel(channel.name)) == channel.fingerprint.encode()

    async def disable(self, channel: AlertSender) -> None:
        """Records that the channel's receiver wants no more alerts."""
        await self.remember(subjects.disabled_channel(channel.name), channel.fingerprint.encode())

    async def enable(self, channel: AlertSender) -> None:
        """Records that the channel's receiver takes alerts again."""
        await self.remember(subjects.disabled_channel(channel.name), b"")


class SentMessages:
    """The messages of one channel by incident, so that they can be updated."""

    def __init__(self, bus: AlerterBus, channel: str) -> None:
        self._bus = bus
        self._channel = channel

    async def get(self, incident_id: str) -> str | None:
        """Returns the message's name at the receiver; None if the incident has no message."""
        return (await self._bus.recall(subjects.sent_message(self._channel, incident_id))).decode() or None

    async def put(self, incident_id: str, ts: str) -> None:
        """Records the message's name at the receiver."""
        await self._bus.remember(subjects.sent_message(self._channel, incident_id), ts.encode())
