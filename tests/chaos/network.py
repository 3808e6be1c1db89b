"""A connection that can be slow, silent or broken: a TCP proxy between one service and one server."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Literal

Mode = Literal["open", "slow", "silent", "reset"]

DELAY_S = 0.3
"""What a slow link adds to each direction."""


class Link:
    """Forwards connections to a server; as long as nothing else is said, as they come."""

    def __init__(self, host: str, port: int) -> None:
        """Takes where the server is."""
        self._target = host, port
        self._mode: Mode = "open"
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def listen(self) -> int:
        """Begins to forward, and returns the port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()[1]

    def become(self, mode: Mode) -> None:
        """Changes what happens to data.

        A silent link keeps connections and what is sent on them, as a network does that loses packets and sends them
        again. One that is reset has none, and takes none.
        """
        self._mode = mode
        if mode == "silent":
            self._flowing.clear()
        else:
            self._flowing.set()
        if mode == "reset":
            for writer in self._writers:
                writer.transport.abort()

    async def close(self) -> None:
        """Ends it, with all connections."""
        self.become("reset")
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            # Only `close` cancels it, and the callback of asyncio's streams logs a traceback for a cancelled one.
            with suppress(asyncio.CancelledError):
                await self._forward(reader, writer)
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._flowing.wait()
        if self._mode == "reset":
            return
        try:
            back, onward = await asyncio.open_connection(*self._target)
        except OSError:
            return
        self._writers |= {writer, onward}
        try:
            await asyncio.gather(self._copy(reader, onward), self._copy(back, writer))
        finally:
            self._writers.discard(onward)
            onward.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                await self._flowing.wait()
                if self._mode == "slow":
                    await asyncio.sleep(DELAY_S)
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
