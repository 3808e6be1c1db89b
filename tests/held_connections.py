"""Connections that are held open by who wants to keep others out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from breakwater.kernel.http.server import MAX_CONNECTIONS
from breakwater.kernel.process.files import raise_file_limit

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def held(port: int, sent: bytes, number: int) -> AsyncGenerator[list[Streams]]:
    """Connections that each send this, and no more."""
    raise_file_limit(4 * MAX_CONNECTIONS)
    connections: list[Streams] = []

    async def connect() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        connections.append((reader, writer))
        writer.write(sent)

    try:
        for _ in range(0, number, 100):
            await asyncio.gather(*(connect() for _ in range(100)))
        await _event_loop_is_idle()
        yield connections
    finally:
        for _, writer in connections:
            writer.transport.abort()


async def _event_loop_is_idle() -> None:
    """Waits until the service, which runs in this event loop, has taken in what all connections have sent."""
    loop = asyncio.get_running_loop()
    idle_rounds = 0
    async with asyncio.timeout(60):
        while idle_rounds < 5:
            begun = loop.time()
            await asyncio.sleep(0.01)
            idle_rounds = idle_rounds + 1 if loop.time() - begun < 0.03 else 0


async def received(connections: list[Streams]) -> dict[bytes, int]:
    """How many connections were answered with which status by now."""
    statuses: dict[bytes, int] = {}
    for reader, _ in connections:
        try:
            line = await asyncio.wait_for(reader.readline(), 0.001)
        except (TimeoutError, OSError):
            continue
        if line:
            status = line.split(b" ")[1]
            statuses[status] = statuses.get(status, 0) + 1
    return statuses
