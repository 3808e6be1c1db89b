"""Whether NATS has the connection of a process: each listens on a subject of its own, and nothing is said there.

A server answers a request at once where nobody listens (status 503). It closes the connection of a process that was
killed within a millisecond, as the kernel closes its sockets. It keeps that of one that stands still, or whose network
loses everything, until it has pinged in vain for minutes or can't write to it for 10 s.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from time import monotonic

import nats.errors
from nats.aio.client import Client

from breakwater.bus.core import ask, hearing
from breakwater.bus.errors import BusUnavailable, NobodyListens
from breakwater.bus.lookup import Connection
from breakwater.contracts import subjects

ASK_S = 0.5


class Presence:
    """The connection of this worker, and what NATS knows of those of others."""

    def __init__(self, connection: Connection, worker_id: str) -> None:
        self._connection, self._subject = connection, subjects.worker(worker_id)
        self._on: tuple[str, int] = "", 0
        self._since = monotonic()
        self._heard = False

    @asynccontextmanager
    async def listening(self) -> AsyncGenerator[None]:
        """Listens while the block runs. Raises BusUnavailable: NATS does not answer."""
        async with hearing(self._connection, self._subject, self._hear, confirmed=False):
            yield

    async def heard_on(self) -> str:
        """The server that others hear of this worker from; empty while it has no connection, or may not listen.

        A worker that listens hears what it says itself: that is tried once for each connection.
        """
        client = self._connection()
        on = _server_info(client).get("server_id", ""), client.stats["reconnects"]
        if on != self._on:
            self._on, self._since, self._heard = on, monotonic(), False
        if not client.is_connected:
            return ""
        if not self._heard:
            try:
                await client.publish(self._subject)
            except (nats.errors.Error, OSError):
                return ""
        return on[0] if self._heard else ""

    async def has(self, worker_id: str) -> bool:
        """Whether another worker is connected, as far as is known: also where no answer comes."""
        try:
            await ask(self._connection, subjects.worker(worker_id), b"", ASK_S)
        except NobodyListens:
            return False
        except BusUnavailable:
            return True
        return True

    def knows_since(self, server: str, seconds: float) -> bool:
        """Whether this worker's server knows what became of the connections that `server` had so many seconds ago.

        One that is started again has nobody's connection at first. Servers of a cluster know of each other's.
        """
        info = _server_info(self._connection())
        return info.get("server_id") == server or bool(info.get("cluster")) or monotonic() - self._since > seconds

    def _hear(self, _data: bytes) -> None:
        self._heard = True


def _server_info(client: Client) -> Mapping[str, str]:
    """What the server of a connection says of itself; its id is another one each time that it is started."""
    return getattr(client, "_server_info", {})
