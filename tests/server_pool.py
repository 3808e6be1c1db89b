"""Lends the same few servers to one test after the other: an empty server costs a tenth of a new one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import nats
import redis

from tests.server_sources import RunningServer

MOST_IDLE = 2
_CLOSING_S = 0.5
_POLL_S = 0.002


class ServerPool:
    """Servers of one kind that no test uses now.

    A server is used again unless a test killed or restarted it, looked up its process, or left connections to it open.

    Args:
        start: starts a new server.
        empty: deletes all that a server stores.
    """

    def __init__(self, start: Callable[[], RunningServer], empty: Callable[[RunningServer], None]) -> None:
        self._start = start
        self._empty = empty
        self._idle: list[RunningServer] = []

    @contextmanager
    def lend(self) -> Generator[RunningServer]:
        """Lends an empty server, and takes it back at the end."""
        server = self._idle.pop() if self._idle else self._start()
        try:
            yield server
        finally:
            if len(self._idle) < MOST_IDLE and not server.disturbed and _is_left(server):
                self._empty(server)
                self._idle.append(server)
            else:
                server.stop()


def _is_left(server: RunningServer) -> bool:
    """Waits a moment for the last connections to close: a request of one could arrive after the emptying."""
    deadline = time.monotonic() + _CLOSING_S
    while (connections := server.connections) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return connections == 0


def empty_nats(server: RunningServer) -> None:
    """Deletes all streams, and with them the consumers and the key-value buckets."""

    async def delete_all() -> None:
        client = await nats.connect(server.url)
        jetstream = client.jetstream(timeout=60)
        while streams := await jetstream.streams_info():  # at most 256 of them
            await asyncio.gather(*(jetstream.delete_stream(stream.config.name or "") for stream in streams))
        await client.close()

    # A thread, because an event loop that tests share may run in this one.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, delete_all()).result()


def empty_redis(server: RunningServer) -> None:
    """Deletes all keys and scripts."""
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        client.script_flush()
