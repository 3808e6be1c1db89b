"""What the alerters remember on the bus: which messages they may update, who wants none, what is usual of an agent."""

from __future__ import annotations

from collections.abc import Mapping

from breakwater.bus.lookup import Connection, Lookup
from breakwater.bus.publisher import Publisher
from breakwater.bus.scan import last_of_each
from breakwater.contracts import subjects
from breakwater.contracts.subjects import Stream, decode_token


class Posts:
    """Where a channel's message of each incident stands, so that it can be updated."""

    def __init__(self, lookup: Lookup, publisher: Publisher, channel: str) -> None:
        self._lookup, self._publisher, self._channel = lookup, publisher, channel

    async def get(self, incident_id: str) -> str | None:
        """The message's name at the receiver; None where there is none. Raises BusUnavailable."""
        found = await self._lookup.last(Stream.ALERTER, subjects.alert_post(self._channel, incident_id))
        return None if found is None or not found.data else found.data.decode()

    async def put(self, incident_id: str, ts: str) -> None:
        """Remembers it. Raises BusUnavailable."""
        await self._publisher.raw(subjects.alert_post(self._channel, incident_id), ts.encode(), {})


class Gone:
    """Whether a channel's receiver has said that it wants no more alerts."""

    def __init__(self, lookup: Lookup, publisher: Publisher, channel: str, fingerprint: str) -> None:
        self._lookup, self._publisher = lookup, publisher
        self._subject = subjects.channel_gone(channel)
        self._fingerprint = fingerprint.encode()

    async def now(self) -> bool:
        """Whether it is so. Another receiver that the config names now has not said so. Raises BusUnavailable."""
        found = await self._lookup.last(Stream.ALERTER, self._subject)
        return found is not None and found.data == self._fingerprint

    async def note(self, gone: bool) -> None:
        """Remembers it. Raises BusUnavailable."""
        await self._publisher.raw(self._subject, self._fingerprint if gone else b"", {})


class Usual:
    """What is usual of each agent."""

    def __init__(self, connection: Connection, publisher: Publisher) -> None:
        self._connection, self._publisher = connection, publisher

    async def all(self) -> Mapping[str, bytes]:
        """What was saved last, by agent. Raises BusUnavailable."""
        found = await last_of_each(self._connection, Stream.ALERTER, "bw.alerter.usual.*")
        return {decode_token(one.subject.rpartition(".")[2]): one.data for one in found}

    async def save(self, agent: str, data: bytes) -> None:
        """Saves an agent's. Raises BusUnavailable."""
        await self._publisher.raw(subjects.usual(agent), data, {})
