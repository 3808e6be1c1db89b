"""The HTTP server of a service: its socket, its signals, and a graceful shutdown."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp, Receive
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
    raise_file_limit(3 * MAX_CONNECTIONS)
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

TICK_S = 1.0
"""Interval of the server's upkeep."""

HEADERS_S = 10.0
"""Time limit for the headers of a request."""

OPEN_BODY_S = 5.0
"""Time limit for the body of a request of a client that has shown no key."""

OPEN_BODY_BYTES = 8_192

MAX_CONNECTIONS = 2_000
"""Of one process. Beyond that, those without a request are closed; beyond twice as many, requests get 503."""

_FOR_STRANGERS = MAX_CONNECTIONS // 10
"""Number of connections for callers that are not known yet, such as those of health checks."""

_OF_FREE = 1.25
"""Ratio of one caller's share to the connections that are free: 1,000 requests, if no other caller asks."""


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
        in_progress = self._of.get(caller, 0)
        if in_progress >= _OF_FREE * (MAX_CONNECTIONS - _FOR_STRANGERS - self._total):
            return False
        self._of[caller] = in_progress + 1
        self._total += 1
        return True

    def release(self, caller: str) -> None:
        """Ends a request that has been answered."""
        self._total -= 1
        self._of[caller] -= 1
        if not self._of[caller]:
            del self._of[caller]


CLIENT = "breakwater.client"
"""The entry of a request's scope with the presence of its client."""


class ClientPresence:
    """Tells the requests of one connection when their client has left, without a task for each."""

    __slots__ = ("_has_left", "_leaving", "_read_on")

    def __init__(self, read_on: Callable[[], None]) -> None:
        """Takes the function that reads on, as the client's leaving is read as well."""
        self._read_on = read_on
        self._has_left = False
        self._leaving: set[Callable[[], None]] = set()

    def watch(self, leave: Callable[[], None]) -> None:
        """Calls `leave` when the client has left, until `unwatch`."""
        self._leaving.add(leave)
        if self._has_left:
            leave()
        else:
            self._read_on()

    def unwatch(self, leave: Callable[[], None]) -> None:
        """Undoes `watch`."""
        self._leaving.discard(leave)

    def leave(self) -> None:
        """Tells all that watch that the client has left."""
        self._has_left = True
        for leave in tuple(self._leaving):
            leave()


class _Protocol(HttpToolsProtocol):
    """uvicorn's connection, whose requests know the presence of their client."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        # A large body that comes at once pauses reading, and is received without a further message.
        self._presence = ClientPresence(self.flow.resume_reading)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast(dict[str, Any], self.scope)[CLIENT] = self._presence

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._presence.leave()


class _Server(uvicorn.Server):
    """uvicorn's server, which wakes once a second, not ten times, and immediately when it is to end."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ending = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def main_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._ending.wait()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._ending.set)

    def end(self) -> None:
        """Ends serving."""
        self.should_exit = True
        self._ending.set()


class HttpServer:
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
        self._server = _Server(
            uvicorn.Config(
                app,
                http=_Protocol,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=2 * MAX_CONNECTIONS,
                # Longer than clients keep an idle connection: the client must close it first, as a job that is
                # just being sent would meet a closed connection.
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=math.ceil(drain_s + _WRITE_S),
                callback_notify=self._close_idle,
                timeout_notify=0,  # at each tick
            )
        )
        self._drain_s = drain_s
        self._release = release
        self._stopping = stopping
        self._draining: asyncio.TimerHandle | None = None
        self._idle: dict[Any, int] = {}
        """Connections that bring no request, and the seconds since."""

    async def serve(self, listening: socket.socket) -> None:
        """Serves until `stop`, SIGTERM or SIGINT. A second SIGINT ends it without waiting for requests."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop)
        try:
            # It handles the signals as well. At its end it raises them again, and they find the handlers from here.
            await self._server.serve([listening])
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
            if self._draining is not None:
                self._draining.cancel()

    def stop(self) -> None:
        """Stops in order, as at SIGTERM."""
        if self._draining is None:
            self._draining = asyncio.get_running_loop().call_later(self._drain_s, self._release)
            self._stopping()
        self._server.end()

    async def _close_idle(self) -> None:
        """Closes connections that have brought no whole headers in time; all that are idle, where there are too many.

        uvicorn has a time limit for what comes after a response only, and none once a first byte has come.
        """
        connections: set[Any] = self._server.server_state.connections
        too_many = len(connections) > MAX_CONNECTIONS
        limit_s = 1 if too_many else HEADERS_S
        self._idle = {
            connection: self._idle.get(connection, 0) + 1
            for connection in connections
            if (connection.cycle is None or connection.cycle.response_complete)
            and (too_many or connection.timeout_keep_alive_task is None)
        }
        for connection, seconds in self._idle.items():
            if seconds > limit_s:
                connection.transport.close()


async def wait_for_disconnect(receive: Receive) -> None:
    """Waits until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
