"""Takes ports for the local stack's servers, all on loopback, and probes whether a server works on one.

A probe speaks the server's own protocol, with no client library. It opens one connection, answers within two seconds,
and returns False for anything but the right answer.
"""

import asyncio
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable

from breakwater.kernel.errors import BreakwaterError

Probe = Callable[[], Awaitable[bool]]

LOOPBACK = "127.0.0.1"

_MAX_HELD = 256  # more than a stack needs; the tests take thousands of ports, and the last of them stay held
_port_sockets: deque[socket.socket] = deque()

_TIMEOUT_S = 2.0


class PortInUseError(BreakwaterError, RuntimeError):
    """The requested port is in use."""

    command_code = "port_taken"

    def __init__(self, port: int) -> None:
        super().__init__(
            f"port {port} on {LOOPBACK} is in use: stop the program that uses it (`ss -ltnp` lists it), or "
            "choose another port"
        )


def free_port(port: int = 0) -> int:
    """Takes a port for a server: the port asked for, or one that the kernel chooses.

    On Linux, a socket stays bound to the port, so no other process gets it while this one lives, even while its server
    restarts. Otherwise the kernel could assign it to a client that reconnects to that server, and the client would be
    connected to itself. The server can still bind the port, as both sockets set SO_REUSEADDR and this one does not
    listen. Another stack could do the same, so the port is also reserved by an abstract socket's name.

    Raises:
        PortInUseError: a program listens on it, or another stack has it.
    """
    holder = socket.socket()
    name = socket.socket(socket.AF_UNIX)
    # Without this, connections of an ended server in TIME_WAIT make its port look taken for a minute.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    linux = sys.platform == "linux"
    try:
        holder.bind((LOOPBACK, port))
        if linux and port:
            name.bind(f"\0breakwater-port-{port}")
    except OSError as error:
        holder.close()
        name.close()
        raise PortInUseError(port) from error
    taken_port = holder.getsockname()[1]
    _port_sockets.extend((holder, name))
    while len(_port_sockets) > (_MAX_HELD if linux else 0):  # elsewhere a server can't bind a port that is held
        _port_sockets.popleft().close()
    return taken_port


def standard_port(standard: int) -> int:
    """Takes a server's standard port, or one that the kernel chooses where that is in use."""
    try:
        return free_port(standard)
    except PortInUseError:
        return free_port()


def nats_ready(host: str, port: int) -> Probe:
    """Probes a nats-server: it greets with `INFO {` once it takes clients, which is after JetStream has recovered."""

    async def probe() -> bool:
        return await _ask(host, port, b"", 6) == b"INFO {"

    return probe


def redis_ready(host: str, port: int, password: str | None) -> Probe:
    """Probes a redis-server: PING is answered by +PONG, and by -LOADING while it reads its data."""
    commands = _resp("PING") if password is None else _resp("AUTH", password) + _resp("PING")
    expected = b"+PONG\r\n" if password is None else b"+OK\r\n+PONG\r\n"

    async def probe() -> bool:
        return await _ask(host, port, commands, len(expected)) == expected

    return probe


def http_ready(host: str, port: int, path: str, *, body_prefix: bytes = b"") -> Probe:
    """Probes an HTTP server: GET of the path is answered with 200 and a body that begins with `body_prefix`."""
    request = f"GET {path} HTTP/1.0\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode()

    async def probe() -> bool:
        head, _, body = (await _ask(host, port, request, None)).partition(b"\r\n\r\n")
        return head.split(b" ", 2)[1:2] == [b"200"] and body.startswith(body_prefix)

    return probe


async def _ask(host: str, port: int, request: bytes, size: int | None) -> bytes:
    """Sends a request and reads `size` bytes, or until the server closes; empty if no answer comes in time."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(request)
                return await (reader.read() if size is None else reader.readexactly(size))
            finally:
                writer.transport.abort()
    except (OSError, EOFError):
        return b""


def _resp(*words: str) -> bytes:
    encoded = [word.encode() for word in words]
    return b"*%d\r\n" % len(encoded) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in encoded)
