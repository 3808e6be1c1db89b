"""A way to ClickHouse on which the answer to an insert can be kept back."""

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

_WRITTEN = re.compile(rb'X-ClickHouse-Summary: [^\r]*"written_rows":"[1-9]', re.IGNORECASE)
"""By this header the server says that the rows of an insert are in the table."""


class Gate:
    """What is between the sink and ClickHouse."""

    def __init__(self) -> None:
        self._closed = False
        self.stored = asyncio.Event()
        """An insert is done since `close`, and who sent it will not hear of it."""

    def close(self) -> None:
        """Answers to inserts are kept back from now on."""
        self.stored.clear()
        self._closed = True

    def open(self) -> None:
        """Answers pass. Those that were kept back never do."""
        self._closed = False

    async def _pass(self, answers: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        try:
            while chunk := await answers.read(1 << 16):
                if self._closed and _WRITTEN.search(chunk):
                    self.stored.set()
                    await asyncio.Event().wait()
                to.write(chunk)
                await to.drain()
        except ConnectionError:
            pass  # who asked was killed
        finally:
            to.close()


@asynccontextmanager
async def gate(clickhouse_url: str) -> AsyncGenerator[tuple[Gate, str]]:
    """A gate, and the URL by which it is passed."""
    at = urlsplit(clickhouse_url)
    passing = Gate()
    ways: set[asyncio.Task[None]] = set()

    async def serve(questions: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        ways.add(task)
        answers, onward = await asyncio.open_connection(at.hostname, at.port)
        passed = asyncio.create_task(passing._pass(answers, back))
        try:
            with suppress(ConnectionError):
                while chunk := await questions.read(1 << 16):
                    onward.write(chunk)
                    await onward.drain()
        finally:
            onward.close()
            passed.cancel()
            ways.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        port = server.sockets[0].getsockname()[1]
        yield passing, clickhouse_url.replace(f"{at.hostname}:{at.port}", f"127.0.0.1:{port}")
    finally:
        server.close()
        for way in list(ways):
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
