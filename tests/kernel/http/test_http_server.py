"""The socket that services listen on, and what clients may do with it."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import AsyncGenerator
from contextlib import closing, suppress

import pytest
import pytest_asyncio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from breakwater.kernel.http.server import CLIENT, MAX_CONNECTIONS, ClientPresence, HttpServer, Shares, listen
from breakwater.local.ports import free_port
from tests.helpers import until

SLOW = b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n"
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def test_a_connection_sends_what_is_written_at_once() -> None:
    port = free_port()
    with listen("127.0.0.1", port) as listening, socket.create_connection(("127.0.0.1", port)):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_process_may_open_as_many_sockets_as_it_has_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        listen("127.0.0.1", free_port()).close()
        raised, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert raised >= min(hard, 3 * MAX_CONNECTIONS)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class LocalServer:
    """A server whose `/slow` responds when it is released."""

    def __init__(self) -> None:
        self.port = free_port()
        self.released = asyncio.Event()
        self.waiting = 0
        self.clients: list[ClientPresence] = []

    async def respond(self, request: Request) -> Response:
        self.clients.append(request.scope[CLIENT])
        if request.url.path == "/slow":
            self.waiting += 1
            await self.released.wait()
        elif request.method == "POST":
            return PlainTextResponse(str(len(await request.body())))
        return PlainTextResponse("hello")

    async def connect(self, *sent: bytes) -> Streams:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"".join(sent))
        await writer.drain()
        return reader, writer


@pytest_asyncio.fixture
async def local(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[LocalServer]:
    monkeypatch.setattr("breakwater.kernel.http.server.HEADERS_S", 1)
    monkeypatch.setattr("breakwater.kernel.http.server.MAX_CONNECTIONS", getattr(request, "param", 100))
    local = LocalServer()
    routes = [Route("/{path:path}", local.respond, methods=["GET", "POST"])]
    server = HttpServer(Starlette(routes=routes), drain_s=1.0, release=local.released.set)
    with closing(listen("127.0.0.1", local.port)) as listening:
        serving = asyncio.create_task(server.serve(listening))
        yield local
        server.stop()
        await serving


async def rest(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(20):
        return await reader.read()


async def test_headers_that_do_not_come_in_time_end_the_connection(local: LocalServer) -> None:
    first = [await local.connect(sent) for sent in (b"", b"\r\n", b"GET /", b"GET / HTTP/1.1\r\nHost: x\r\nX-More: ")]
    second = [await local.connect(GET) for _ in range(3)]
    for (reader, writer), sent in zip(second, (b"\r\n", b"G", b"GET / HTTP/1.1\r\nHost: "), strict=True):
        assert await reader.readuntil(b"hello")
        writer.write(sent)
    trickling, writer = await local.connect(b"GET / HTTP/1.1\r\n")
    ended = asyncio.create_task(rest(trickling))
    while not ended.done():
        writer.write(b"X: y\r\n")
        await asyncio.sleep(0.02)
    with suppress(ConnectionResetError):  # a header that was on its way met a closed connection
        assert await ended == b""
    for reader, _ in [*first, *second]:
        assert await rest(reader) == b""


@pytest.mark.long(about_s=7)
async def test_what_takes_long_with_all_headers_sent_goes_on(local: LocalServer) -> None:
    reader, writer = await local.connect(GET)
    assert await reader.readuntil(b"hello")
    writer.write(SLOW)
    await asyncio.sleep(2.5)  # longer than headers may take
    local.released.set()
    assert await reader.readuntil(b"hello")
    await asyncio.sleep(2.5)  # idle, and kept
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nab")
    await asyncio.sleep(2.5)  # a body has a time limit of its own
    writer.write(b"cd")
    assert await reader.readuntil(b"\r\n\r\n4")
    writer.close()


async def test_a_request_hears_when_its_client_leaves_and_that_it_has_left(local: LocalServer) -> None:
    first, second = [await local.connect(SLOW) for _ in range(2)]
    await until(lambda: local.waiting == 2)
    left = [asyncio.Event() for _ in range(4)]
    presences = dict(zip(left, [*local.clients, *local.clients], strict=True))
    for event, presence in presences.items():
        presence.watch(event.set)
    presences[left[3]].unwatch(left[3].set)
    first[1].close()
    async with asyncio.timeout(20):
        await asyncio.gather(left[0].wait(), left[2].wait())
    assert not left[1].is_set()
    late = asyncio.Event()
    local.clients[0].watch(late.set)
    assert late.is_set()
    second[1].close()
    async with asyncio.timeout(20):
        await left[1].wait()
    assert not left[3].is_set()


@pytest.mark.parametrize("local", [3], indirect=True)
async def test_beyond_a_number_idle_connections_end_and_busy_ones_do_not(local: LocalServer) -> None:
    idle = [await local.connect(sent) for sent in (GET, b"GET /")]
    busy = [await local.connect(SLOW) for _ in range(2)]
    assert (await rest(idle[0][0])).endswith(b"hello")
    assert await rest(idle[1][0]) == b""
    busy += [await local.connect(SLOW) for _ in range(3)]
    await until(lambda: local.waiting == 5)
    refused, _ = await local.connect(GET)
    assert (await refused.readline()).startswith(b"HTTP/1.1 503 ")
    local.released.set()
    for reader, _ in busy:
        assert await reader.readuntil(b"hello")


def test_a_caller_alone_has_half_and_many_leave_room_for_another() -> None:
    shares = Shares()

    def take_all(caller: str) -> int:
        held = 0
        while shares.take(caller):
            held += 1
        return held

    assert take_all("a") == 1000
    assert [take_all(caller) for caller in "bcd"] == [445, 198, 88]
    assert take_all("e") > 30
    for _ in range(1000):
        shares.release("a")
    assert take_all("e") > 300
