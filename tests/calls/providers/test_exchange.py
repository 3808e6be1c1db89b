"""Requests on kept connections to a provider."""

from __future__ import annotations

import asyncio
import gc
import ssl
import weakref

import pytest

from breakwater.calls.providers.connection import Proxy
from breakwater.calls.providers.exchange import Connections, Exchange
from breakwater.local.ports import free_port


async def test_a_connection_whose_request_was_not_read_is_not_used_again() -> None:
    connections = 0
    ended = asyncio.Event()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too large\r\nContent-Length: 2\r\n\r\nno")
        await ended.wait()
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    kept = Connections({}, Proxy())
    for data in (b"x" * 30_000_000, b"small"):
        async with asyncio.timeout(10):
            async with Exchange(kept, f"http://127.0.0.1:{port}/v1", {}, data, None) as refused:
                assert (refused.status, await refused.content.read()) == (413, b"no")
    await kept.close()
    ended.set()
    server.close()
    assert connections == 2


async def test_replaced_certificates_are_not_kept() -> None:
    kept = Connections({}, Proxy())
    contexts = [ssl.create_default_context() for _ in range(3)]
    for context in contexts:
        with pytest.raises(OSError, match="Cannot connect"):
            await kept.connect(f"https://127.0.0.1:{free_port()}/v1", context)
    alive = [weakref.ref(context) for context in contexts]
    contexts.clear()
    del context
    gc.collect()
    assert [context() is None for context in alive] == [True, True, False]
    await kept.close()
