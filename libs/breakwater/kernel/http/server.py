"""The HTTP server of a service: its socket, its signals, and a graceful shutdown."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import signal
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import structlog
import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.process.files import raise_file_limit

BACKLOG = 2048
_WRITE_S = 2.0
"""Time for the last responses to be sent, once all waiting requests were released."""


class PortTakenError(BreakwaterError):
    """The service can't listen on its port."""


def listen(host: str, port: int, *, variables: str = "BREAKWATER_HTTP_HOST and BREAKWATER_HTTP_PORT") -> socket.socket:
    """Binds the port, before anything else is started. The error names `variables` as those that choose the port.

    Raises:
        PortTakenError: the port is in use, or the address is not of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    raise_file_limit(2 * MAX_CONNECTIONS)
    try:
        listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        reason = "another program already listens there" if in_use else os.strerror(error.errno or 0)
        remedy = f"choose another with {variables}, or stop that program"
        raise PortTakenError(f"can't listen on {host}:{port}: {reason}; {remedy}") from error
    # Connections inherit it. asyncio sets it only where a socket names its protocol, as this one does not.
    # Without it, each response on a connection that is kept waits 40 ms for the client's acknowledgement.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


KEEP_ALIVE_S = 120

HEADERS_S = 10.0
"""Time limit for the headers of a request."""

MAX_HEADER_BYTES = 65_536
"""Of headers, or of what follows a body in chunks."""

OPEN_BODY_S = 5.0
"""Time limit for the body of a request of a client that has shown no key."""

OPEN_BODY_BYTES = 8_192

MAX_CONNECTIONS = 2_000
"""Of one process. Beyond that, a new one takes the place of one whose caller is not known (`vouch`)."""

_OF_FREE = 1.25
"""Ratio of one caller's share to the connections that are free: 1,000 requests, if no other caller asks."""

_CONNECTION = "breakwater.connection"
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%s"
)
_FULL_BODY = (
    b'{"error":{"code":"too_many_connections","message":"all connections of this process are taken by requests that '
    b'are being answered; send it again, or start another process","details":[]}}'
)


def vouch(scope: Scope) -> None:
    """Marks the caller of a request as known: its connection gives way to no other while it is answered."""
    connection: HttpConnection | None = scope.get(_CONNECTION)
    if connection is not None:
        connection.vouched()


class Shares:
    """Fair shares of the connections: each caller may have some for its requests, and never the last ones.

    A caller's share depends on the connections that are free. So one alone may have half of all, and one that comes
    after others have taken their shares finds room, too.
    """

    def __init__(self) -> None:
        self._of: dict[str, int] = {}
        self._total = 0

    def take(self, caller: str) -> bool:
        """Takes a place for one more request, until `release`; returns False where the caller has its share."""
        held = self._of.get(caller, 0)
        if held >= _OF_FREE * (MAX_CONNECTIONS - _for_strangers() - self._total):
            return False
        self._of[caller] = held + 1
        self._total += 1
        return True

    def release(self, caller: str) -> None:
        """Ends a request that has been answered."""
        self._total -= 1
        self._of[caller] -= 1
        if not self._of[caller]:
            del self._of[caller]


def _for_strangers() -> int:
    """Returns the number of connections for callers that are not known yet, such as those of health checks."""
    return max(MAX_CONNECTIONS // 10, 1)


class HttpConnection(HttpToolsProtocol):
    """A connection of uvicorn's, with limits for headers, and a limit of connections that no caller can use up."""

    connections: _Connections
    _due: asyncio.TimerHandle | None = None
    _in_headers = False
    _known = False
    _unread = 0
    """Bytes since something of a request was complete."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes a connection, in the place of another one if there are too many."""
        super().connection_made(transport)
        self._start_timer()
        self.connections.strangers[self] = None
        if len(self.connections) > MAX_CONNECTIONS:
            giving_way = self.connections.pop_least()
            if giving_way is self:
                transport.write(_FULL % (len(_FULL_BODY), _FULL_BODY))
                transport.close()
            else:
                giving_way.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the connection."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses the client's bytes. Any but a request's headers and its body have to become headers in time."""
        self._unread += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._unread > MAX_HEADER_BYTES:
            self._end(_TOO_LONG)
        elif self._due is None:
            between = self.timeout_keep_alive_task is None and self.is_idle
            if self._in_headers or between:
                self._start_timer()

    def on_message_begin(self) -> None:
        """Handles the first byte of a request."""
        self._in_headers = True
        self._unread = 0
        super().on_message_begin()
        self.scope[_CONNECTION] = self  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        """Handles the end of a request's headers."""
        self._in_headers = False
        self._unread = 0
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Handles a part of a body."""
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Handles the end of a request."""
        self._unread = 0
        super().on_message_complete()
        if self.connections.strangers.pop(self, self) is None:
            self.connections.asking[self] = None

    def on_response_complete(self) -> None:
        """Handles the end of a response."""
        super().on_response_complete()
        if self in self.connections:
            self.connections.forget(self)
            (self.connections.idle if self._known else self.connections.strangers)[self] = None

    def vouched(self) -> None:
        """Marks the caller of the request that is being answered as known."""
        self._known = True
        self.connections.forget(self)

    @property
    def is_idle(self) -> bool:
        """True if no request is being answered on it."""
        return not self.cycle or self.cycle.response_complete

    def _start_timer(self) -> None:
        self._due = self.loop.call_later(HEADERS_S, self._end, _TOO_SLOW)

    def _stop_timer(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _end(self, why: bytes) -> None:
        self._stop_timer()
        if self.is_idle:
            self.transport.write(why)
        self.transport.close()


class HttpServer(uvicorn.Server):
    """uvicorn, which on SIGTERM or SIGINT stops accepting, lets requests finish, then releases all that wait.

    Args:
        app: the application.
        drain_s: time for requests to finish.
        release: called when that time is over, for requests that still wait.
        stopping: called when it begins, for those that would not finish by themselves.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        drain_s: float,
        release: Callable[[], None],
        stopping: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=HttpConnection,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                # Longer than clients keep an idle connection: the client must close it first, as a job that is
                # just being sent would meet a closed connection.
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=math.ceil(drain_s + _WRITE_S),
            )
        )
        self._drain_s = drain_s
        self._release = release
        self._stopping = stopping
        self.server_state.connections = _Connections()

    def stop(self) -> None:
        """Stops in order, as at SIGTERM."""
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends serving. Requests that still wait after the drain time are answered 202."""
        self._stopping()
        later = asyncio.get_running_loop().call_later
        timers = later(self._drain_s, self._release), later(self._drain_s + _WRITE_S, self._report_cancelled)
        try:
            await super().shutdown(sockets)
        finally:
            for timer in timers:
                timer.cancel()

    def _report_cancelled(self) -> None:
        structlog.get_logger().warning("requests_cancelled", count=len(self.server_state.tasks))

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Replaces uvicorn's own way, which ends the process by the same signal again after an orderly end."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        self.force_exit = self.should_exit
        self.stop()


class _Connections(set[Any]):
    """All connections, and those that give way; each group begins with the one that has been in it for longest."""

    def __init__(self) -> None:
        super().__init__()
        self.strangers: dict[HttpConnection, None] = {}
        """Without a whole request, and without a caller that was ever known."""
        self.asking: dict[HttpConnection, None] = {}
        """With a request that is being answered, of a caller that is not known."""
        self.idle: dict[HttpConnection, None] = {}
        """Between two requests of a caller that is known."""

    def pop_least(self) -> HttpConnection:
        """Takes the connection that gives way first out of its group: the newest one where all others are at work."""
        crowded = len(self.strangers) > _for_strangers()
        group = self.strangers if crowded else self.idle or self.asking or self.strangers
        connection = next(iter(group))
        del group[connection]
        return connection

    def forget(self, connection: HttpConnection) -> None:
        """Takes a connection out of its group, so that it gives way to no other."""
        for group in (self.strangers, self.asking, self.idle):
            group.pop(connection, None)

    def discard(self, element: Any) -> None:
        super().discard(element)
        self.forget(element)
