"""Connections that are held open by who wants to keep others out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from breakwater.kernel.http.server import MAX_CONNECTIONS
from breakwater.kernel.process.files import raise_file_limit

ATTACKERS = MAX_CONNECTIONS + 100

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def held(port: int, sent: bytes, number: int = ATTACKERS) -> AsyncGenerator[list[Streams]]:
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
        await asyncio.sleep(0.2)
        yield connections
    finally:
        for _, writer in connections:
            writer.transport.abort()


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
