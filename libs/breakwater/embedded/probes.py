"""Does a server do its work yet? Asked in the server's own protocol, with no client library.

Every probe opens one connection, answers within two seconds, and says False for anything but the right answer.
"""

import asyncio
from collections.abc import Awaitable, Callable

Probe = Callable[[], Awaitable[bool]]

_TIMEOUT_S = 2.0


def nats_ready(host: str, port: int) -> Probe:
    """Probe a nats-server: it greets with `INFO {` once it takes clients, which is after JetStream has recovered."""

    async def probe() -> bool:
        return await _ask(host, port, b"", 6) == b"INFO {"

    return probe


def redis_ready(host: str, port: int, password: str | None) -> Probe:
    """Probe a redis-server: PING is answered by +PONG, and by -LOADING while it reads its data."""
    commands = _resp("PING") if password is None else _resp("AUTH", password) + _resp("PING")
    expected = b"+PONG\r\n" if password is None else b"+OK\r\n+PONG\r\n"

    async def probe() -> bool:
        return await _ask(host, port, commands, len(expected)) == expected

    return probe


def http_ready(host: str, port: int, path: str, *, body_prefix: bytes = b"") -> Probe:
    """Probe an HTTP server: GET of the path is answered with 200 and a body that begins as named."""
    request = f"GET {path} HTTP/1.0\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode()

    async def probe() -> bool:
        head, _, body = (await _ask(host, port, request, None)).partition(b"\r\n\r\n")
        return head.split(b" ", 2)[1:2] == [b"200"] and body.startswith(body_prefix)

    return probe


async def _ask(host: str, port: int, request: bytes, size: int | None) -> bytes:
    """Send a request and read so many bytes, or until the server closes; empty if no answer comes in time."""
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
