"""The HTTP server of a service: its socket, its signals, and a graceful shutdown."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any

import structlog
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

BACKLOG = 2048
_WRITE_S = 2.0
"""Seconds for the last responses to be sent, once all waiting requests were released."""


class PortTakenError(Exception):
    """The service can't listen on its port; the text says why and what to do."""


def listen(host: str, port: int, *, variables: str = "BREAKWATER_HTTP_HOST and BREAKWATER_HTTP_PORT") -> socket.socket:
    """Binds the port, before anything else is started. `variables` are those that choose it, for the error.

    Raises:
        PortTakenError: the port or the address can't be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        reason = (
            "another program listens there already"
            if error.errno == errno.EADDRINUSE
            else os.strerror(error.errno or 0)
        )
        raise PortTakenError(
            f"can't listen on {host}:{port}: {reason}; choose with {variables}, or end that program"
        ) from error
    # Connections inherit it. asyncio sets it only where a socket names its protocol, as this one does not.
    # Without it, each response on a connection that is kept waits 40 ms for the client's acknowledgement.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


KEEP_ALIVE_S = 120

HEADERS_S = 10.0
"""How long a client may take over the headers of a request."""

MOST_CONNECTIONS = 2_000
"""Of one process. Beyond, connections without a request are closed for new ones; without such, new ones get 503."""

_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%s"
)
_FULL_BODY = (
    b'{"error":{"code":"too_many_connections","message":"all connections of this process are taken by requests that '
    b'are being answered; send it again, or start another process","details":[]}}'
)


class Connection(HttpToolsProtocol):
    """A connection of uvicorn's, with a time limit for headers, and a number that idle clients can't use up."""

    _due: asyncio.TimerHandle | None = None
    _in_headers = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes a connection, at the expense of an idle one if there are too many."""
        super().connection_made(transport)
        self._start_timer()
        if len(self.connections) > MOST_CONNECTIONS:
            others = (one for one in self.connections if one is not self and isinstance(one, Connection))
            idle = next((one for one in others if one.is_idle), None)
            if idle is not None:
                idle.transport.abort()
            else:
                transport.write(_FULL % (len(_FULL_BODY), _FULL_BODY))
                transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the connection."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Takes what the client sends. Anything but a request's headers and its body has to become headers in time."""
        super().data_received(data)
        if self._due is None and not self.transport.is_closing():
            between = self.timeout_keep_alive_task is None and self.is_idle
            if self._in_headers or between:
                self._start_timer()

    def on_message_begin(self) -> None:
        """The first byte of a request has come."""
        self._in_headers = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """All headers of a request have come."""
        self._in_headers = False
        self._stop_timer()
        super().on_headers_complete()

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered on it."""
        return not self.cycle or self.cycle.response_complete

    def _start_timer(self) -> None:
        self._due = self.loop.call_later(HEADERS_S, self._end)

    def _stop_timer(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _end(self) -> None:
        self._due = None
        if self.is_idle:
            self.transport.write(_TOO_SLOW)
        self.transport.close()


class Server(uvicorn.Server):
    """uvicorn, which on SIGTERM or SIGINT stops accepting, lets requests finish for a while, then ends all waiting.

    uvicorn looks ten times a second whether it is to stop, and when it stops, whether all is done. This one is woken.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        drain_s: float,
        release: Callable[[], None],
        stopping: Callable[[], None] = lambda: None,
    ) -> None:
        """Wraps an app.

        Args:
            app: what is served.
            drain_s: for how long requests may finish.
            release: called when that time is up, for requests that still wait.
            stopping: called when it begins, for what would not finish by itself.
        """
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                # Longer than clients keep an idle connection: the client must close it first, as a job that is
                # just being sent would meet a closed connection.
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )
        self._drain_s = drain_s
        self._release = release
        self._stopping = stopping
        self._woken = asyncio.Event()
        self.server_state.connections = _Watched(self._woken)
        self.server_state.tasks = _Watched(self._woken)

    def stop(self) -> None:
        """Has it stop in order, as SIGTERM does."""
        self.should_exit = True
        self._woken.set()

    async def main_loop(self) -> None:
        """Serves until it is to stop."""
        # The date in responses is renewed once a second.
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends serving. Requests that still wait after the drain time are answered 202."""
        self._stopping()
        timer = asyncio.get_running_loop().call_later(self._drain_s, self._release)
        try:
            for listening in (*self.servers, *(sockets or ())):
                listening.close()
            for connection in list(self.server_state.connections):
                connection.shutdown()
            async with asyncio.timeout(self._drain_s + _WRITE_S):
                while (self.server_state.connections or self.server_state.tasks) and not self.force_exit:
                    await self._wait()
        except TimeoutError:
            structlog.get_logger().warning("requests_cancelled", count=len(self.server_state.tasks))
            for task in self.server_state.tasks:
                task.cancel()
        finally:
            timer.cancel()
        if not self.force_exit:
            await self.lifespan.shutdown()

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

    async def _wait(self) -> None:
        self._woken.clear()
        await self._woken.wait()


class _Watched(set[Any]):
    """A set that can be awaited to be empty."""

    def __init__(self, woken: asyncio.Event) -> None:
        super().__init__()
        self._emptied = woken

    def discard(self, element: Any) -> None:
        super().discard(element)
        if not self:
            self._emptied.set()
