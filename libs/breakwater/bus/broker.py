"""FastStream's broker and application, by which a service is on the bus, with the reason for each override (ADR 0006).

FastStream connects, begins and ends what is registered with it in order, and serves requests. Jobs and events are read
by our own pull (`breakwater.bus.pull`).
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any

import nats.errors
import structlog
from faststream import FastStream
from faststream.exceptions import IncorrectState
from faststream.nats import NatsBroker, NatsMessage, NatsSecurity

from breakwater.bus.core import give_up, tls_options
from breakwater.bus.delivery import Delivery
from breakwater.bus.lookup import ClientGetter
from breakwater.bus.permissions import inbox_prefix
from breakwater.bus.pull import RETRY_S, HandlerCoroutine, Pull, batches
from breakwater.contracts.subjects import Stream
from breakwater.runtime import background
from breakwater.runtime.outage import Outage
from breakwater.telemetry.metrics import GaugeCollector

MAX_PENDING_BYTES = 16 * 1024 * 1024
PING_S = 1.0


class _Broker(NatsBroker):
    async def stop(
        self,
        exc_type: type[BaseException] | None = None,
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,
    ) -> None:
        """Overridden, as FastStream's never ends while the server is away."""
        with suppress(IncorrectState):  # it has no connection yet
            give_up(self.connection)
        await super().stop(exc_type, exc_val, exc_tb)


def make_broker(url: str, service: str, *, graceful_timeout_s: float = 10.0) -> NatsBroker:
    """A broker that never gives up on its server, and logs an outage once.

    Raises:
        ConfigError: a file of `BREAKWATER_TLS_*` can't be used.
    """
    tls = tls_options(url)
    outage = Outage("nats")
    logged: set[str] = set()

    async def lost() -> None:
        # Also called when we close it ourselves.
        if not (broker.connection.is_draining or broker.connection.is_closed):
            outage.failed("connection lost; reconnecting")

    async def regained() -> None:
        outage.worked()

    async def failed(error: Exception) -> None:
        # While the connection is lost every try to regain it fails here. Before the first one, and for what the server
        # denies, each text is logged once.
        if not outage.lasting and str(error) not in logged:
            logged.add(str(error))
            structlog.get_logger().warning("nats_error", error=str(error) or repr(error))

    async def closed() -> None:
        # On some errors of protocol the client gives up for good, whatever its settings. Without a bus nothing can be
        # finished or acknowledged, so nothing is stopped gracefully: the supervisor restarts this process.
        if broker.running:
            structlog.get_logger().error("nats_connection_closed", what_happens="the process ends")
            os._exit(os.EX_SOFTWARE)

    broker = _Broker(
        url,
        name=f"breakwater-{service}",
        inbox_prefix=inbox_prefix(service),
        max_reconnect_attempts=-1,
        reconnect_time_wait=1,
        connect_timeout=5,
        ping_interval=10,
        max_outstanding_pings=2,
        pending_size=MAX_PENDING_BYTES,
        allow_reconnect=True,
        graceful_timeout=graceful_timeout_s,
        disconnected_cb=lost,
        reconnected_cb=regained,
        error_cb=failed,
        closed_cb=closed,
        security=NatsSecurity(ssl_context=tls["tls"], tls_handshake_first=tls["tls_handshake_first"]),
        logger=None,
    )
    return broker


class ServiceApp(FastStream):
    """The application around a broker: runs until SIGTERM or SIGINT, and reports when it is ready."""

    def __init__(self, broker: NatsBroker) -> None:
        super().__init__(broker, logger=None)
        self._broker = broker
        self._ready = False
        self._ended = asyncio.Event()
        self.reload: Callable[[Any], Awaitable[None]] = nothing_to_reload
        """Takes over another config; raises ConfigError where that can't be, and has changed nothing then."""

    async def start(self, **run_extra_options: Any) -> None:
        """Overridden, as it is ready only when NATS has all subscriptions, which FastStream does not wait for."""
        await super().start(**run_extra_options)
        await subscribed(self._broker)
        self._ready = True
        structlog.get_logger().info("service_ready")

    async def run(self, *_: object, **__: object) -> None:
        """Overridden, as FastStream's polls ten times a second whether it is to end, and ends only once it has started.

        This `run` is woken by a signal or by `exit`.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.exit)
        starting, ending = asyncio.create_task(self.start()), asyncio.create_task(self._ended.wait())
        try:
            await asyncio.wait((starting, ending), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                await starting
                await ending
            await self.stop()
        finally:
            await background.stop(starting, ending)

    def run_alongside(
        self, work: Callable[[], Coroutine[Any, Any, None]], gauges: GaugeCollector | None = None
    ) -> None:
        """Does work, and shows gauges, for as long as the application runs."""
        running: list[asyncio.Task[None]] = []

        @self.after_startup
        async def start() -> None:
            running.append(asyncio.create_task(work()))
            if gauges is not None:
                gauges.start()

        @self.on_shutdown
        async def stop() -> None:
            if gauges is not None:
                gauges.stop()
            await background.stop(*running)

    def exit(self) -> None:
        """Overridden to wake `run`."""
        self._ended.set()

    async def is_alive(self) -> bool:
        """True if it is ready, and connected now."""
        return self._ready and await self._broker.ping(timeout=PING_S)


async def nothing_to_reload(_config: object) -> None:
    """The reload of a service that does not depend on the config."""


async def subscribed(broker: NatsBroker) -> None:
    """Returns when NATS has all subscriptions: it handles what a connection sends in its order, and answers a ping."""
    while True:
        try:
            await broker.connection.flush()
        except (TimeoutError, nats.errors.Error):
            await asyncio.sleep(RETRY_S)  # lost meanwhile; it is regained with its subscriptions
        else:
            return


def connection_of(broker: NatsBroker) -> ClientGetter:
    """The broker's connection, once it has one."""
    return partial(getattr, broker, "connection")


def on_request(broker: NatsBroker, subject: str, queue: str, answer: Callable[[str], Awaitable[bytes]]) -> None:
    """Answers requests on core NATS, each by one member of the queue group. `answer` is given the request's subject."""

    @broker.subscriber(subject, queue=queue, max_workers=4)
    async def receive(message: NatsMessage) -> bytes:
        try:
            return await answer(message.raw_message.subject)
        except Exception:
            # FastStream has no logger here, and would drop it.
            structlog.get_logger().exception("handler_failed")
            raise


def on_batch(
    app: FastStream,
    broker: NatsBroker,
    stream: Stream,
    durable: str,
    handle: Callable[[list[Delivery]], HandlerCoroutine],
    *,
    size: int,
    linger_s: float | Callable[[int], float],
) -> None:
    """Handles a consumer's messages in batches (`batches`) while the application runs. Its end waits for the last one.

    FastStream's own subscriber of batches asks NATS again after every `linger_s`, whether anything happens or not.
    """
    consumer = batches(Pull(connection_of(broker), stream, durable), handle, size=size, linger_s=linger_s)

    @app.after_startup
    async def start() -> None:
        consumer.start()
        await consumer.answered.wait()

    @app.on_shutdown
    async def stop() -> None:
        await consumer.stop()
