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

from breakwater.kernel.http.server import MAX_CONNECTIONS, HttpServer, Shares, listen, vouch
from breakwater.local.ports import free_port
from tests.helpers import until

KNOWN = b"GET /slow?known HTTP/1.1\r\nHost: x\r\n\r\n"
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
        assert raised >= min(hard, 2 * MAX_CONNECTIONS)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class LocalServer:
    """A server whose `/slow` responds when it is released. It knows who asks with `?known`."""

    def __init__(self) -> None:
        self.port = free_port()
        self.released = asyncio.Event()
        self.waiting = 0

    async def respond(self, request: Request) -> Response:
        if request.url.query == "known":
            vouch(request.scope)
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
async def local(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[LocalServer]:
    monkeypatch.setattr("breakwater.kernel.http.server.HEADERS_S", 0.3)
    monkeypatch.setattr("breakwater.kernel.http.server.MAX_CONNECTIONS", 3)
    local = LocalServer()
    routes = [Route("/{path:path}", local.respond, methods=["GET", "POST"])]
    server = HttpServer(Starlette(routes=routes), drain_s=1.0, release=local.released.set)
    with closing(listen("127.0.0.1", local.port)) as listening:
        serving = asyncio.create_task(server.serve([listening]))
        yield local
        server.stop()
        await serving


async def rest(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(20):
        return await reader.read()


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"GET /", b"GET / HTTP/1.1\r\nHost: x\r\nX-More: "])
async def test_headers_that_do_not_come_end_the_connection(local: LocalServer, sent: bytes) -> None:
    reader, writer = await local.connect(sent)
    assert (await rest(reader)).startswith(b"HTTP/1.1 408 ")
    writer.close()


@pytest.mark.parametrize("sent", [b"\r\n", b"G", b"GET / HTTP/1.1\r\nHost: "])
async def test_so_does_half_a_second_request(local: LocalServer, sent: bytes) -> None:
    reader, writer = await local.connect(GET)
    assert await reader.readuntil(b"hello")
    writer.write(sent)
    assert (await rest(reader)).startswith(b"HTTP/1.1 408 ")
    writer.close()


async def test_headers_that_trickle_have_no_more_time(local: LocalServer) -> None:
    reader, writer = await local.connect(b"GET / HTTP/1.1\r\n")
    answered = asyncio.create_task(reader.readline())
    while not answered.done():
        writer.write(b"X: y\r\n")
        await asyncio.sleep(0.02)
    assert (await answered).startswith(b"HTTP/1.1 408 ")
    with suppress(ConnectionResetError):  # a header that was on its way met a closed connection
        await rest(reader)
    writer.close()


async def test_what_takes_long_with_all_headers_sent_goes_on(local: LocalServer) -> None:
    reader, writer = await local.connect(GET)
    assert await reader.readuntil(b"hello")
    writer.write(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
    await asyncio.sleep(0.6)  # twice as long as headers may take
    local.released.set()
    assert await reader.readuntil(b"hello")
    await asyncio.sleep(0.6)  # idle, and kept
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nab")
    await asyncio.sleep(0.6)  # a body has a time limit of its own
    writer.write(b"cd")
    assert await reader.readuntil(b"\r\n\r\n4")
    writer.close()


async def test_idle_connections_give_way_and_busy_ones_do_not(local: LocalServer) -> None:
    idle = [await local.connect(GET) for _ in range(3)]
    for reader, _ in idle:
        await reader.readuntil(b"hello")
    busy: list[Streams] = []
    for number in range(3):
        busy.append(await local.connect(KNOWN))
        await until(lambda number=number: local.waiting > number)
    for reader, _ in idle:
        assert await rest(reader) == b""
    refused, _ = await local.connect(GET)
    answer = await rest(refused)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"too_many_connections" in answer
    local.released.set()
    for reader, _ in busy:
        assert await reader.readuntil(b"hello")


async def test_the_last_who_gives_way_is_who_is_known(local: LocalServer) -> None:
    known = [await local.connect(KNOWN) for _ in range(2)]
    await until(lambda: local.waiting == 2)
    asking = await local.connect(KNOWN.replace(b"?known", b""))
    await until(lambda: local.waiting == 3)
    for sent in (b"", b"GET / HTTP/1.1\r\nHost: ", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nab"):
        # It takes the place of the one before it, at first of the one that is not known and is being answered.
        reader, _ = asking
        asking = await local.connect(sent)
        assert await rest(reader) == b""
    reader, _ = asking
    newest, _ = await local.connect(GET)
    assert await newest.readuntil(b"hello")
    assert await rest(reader) == b""
    local.released.set()
    for reader, _ in known:
        assert await reader.readuntil(b"hello")


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nX-More: ",
        b"GET / HTTP/1.1\r\nHost: x\r\nX-More: a\r\n",
        b"GET /",
        b"POST /slow HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX-More: ",
    ],
    ids=["a header", "headers", "a path", "trailers"],
)
async def test_headers_without_end_are_not_kept(local: LocalServer, sent: bytes) -> None:
    reader, writer = await local.connect(sent)
    with suppress(ConnectionError):
        for _ in range(100):
            writer.write((b"X" * 65_530 + b"\r\nA: ") if b"a\r\n" in sent[-3:] else b"x" * 65_536)
            async with asyncio.timeout(5):
                await writer.drain()
            if reader.at_eof():
                break
        assert writer.is_closing() or reader.at_eof()
    writer.close()


def test_a_caller_alone_has_half_and_many_leave_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("breakwater.kernel.http.server.MAX_CONNECTIONS", 2000)
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
