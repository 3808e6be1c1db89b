"""What the alerters remember on the bus: messages that they may update, disabled channels, and agents' baselines."""

from __future__ import annotations

from collections.abc import Mapping

from breakwater.bus.lookup import Connection, Lookup, last_of_each
from breakwater.bus.publisher import Publisher
from breakwater.contracts import subjects
from breakwater.contracts.subjects import Stream, decode_token
from services.alerter.channel import AlertSender


class SentMessages:
    """Which message of a channel is an incident's, so that it can be updated. All methods raise BusUnavailable."""

    def __init__(self, lookup: Lookup, publisher: Publisher, channel: str) -> None:
        self._lookup, self._publisher, self._channel = lookup, publisher, channel

    async def get(self, incident_id: str) -> str | None:
        """The message's name at the receiver; None where there is none."""
        found = await self._lookup.last(Stream.ALERTER, subjects.sent_message(self._channel, incident_id))
        return None if found is None or not found.data else found.data.decode()

    async def put(self, incident_id: str, ts: str) -> None:
        """Records the message's name at the receiver."""
        await self._publisher.raw(subjects.sent_message(self._channel, incident_id), ts.encode(), {})


class DisabledChannels:
    """The channels whose receivers have said that they want no more alerts. All methods raise BusUnavailable.

    A channel is recorded with its fingerprint: another receiver that the config names now has not said so.
    """

    def __init__(self, lookup: Lookup, publisher: Publisher) -> None:
        self._lookup, self._publisher = lookup, publisher

    async def contains(self, channel: AlertSender) -> bool:
        """Whether a channel is disabled."""
        found = await self._lookup.last(Stream.ALERTER, subjects.disabled_channel(channel.name))
        return found is not None and found.data == channel.fingerprint.encode()

    async def add(self, channel: AlertSender) -> None:
        """Disables a channel."""
        await self._publisher.raw(subjects.disabled_channel(channel.name), channel.fingerprint.encode(), {})

    async def remove(self, channel: AlertSender) -> None:
        """Enables a channel."""
        await self._publisher.raw(subjects.disabled_channel(channel.name), b"", {})


class SavedBaselines:
    """The baselines of agents, as they were saved last. All methods raise BusUnavailable."""

    def __init__(self, connection: Connection, publisher: Publisher) -> None:
        self._connection, self._publisher = connection, publisher

    async def all(self) -> Mapping[str, bytes]:
        """All of them, by agent."""
        found = await last_of_each(self._connection, Stream.ALERTER, "bw.alerter.baselines.*")
        return {decode_token(one.subject.rpartition(".")[2]): one.data for one in found}

    async def save(self, agent: str, data: bytes) -> None:
        """Saves an agent's."""
        await self._publisher.raw(subjects.baseline(agent), data, {})
