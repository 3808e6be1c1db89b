"""FastStream's broker and application, by which a service is on the bus, with the reason for each override (ADR 0006).

FastStream connects, begins and ends what is registered with it in order, serves requests, and runs the handlers of what
is read. Jobs and events come by our own subscriber (`breakwater.kernel.nats.subscriber`).
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, cast

import nats.errors
import structlog
from faststream import FastStream
from faststream.exceptions import IncorrectState
from faststream.nats import NatsBroker, NatsMessage, NatsSecurity
from faststream.specification import AsyncAPI

from breakwater.kernel.errors import ConfigError
from breakwater.kernel.nats.channel import Channel
from breakwater.kernel.nats.core import ROUND_TRIP_S, ClientGetter, give_up, has_dead_task, round_trip, tls_options
from breakwater.kernel.nats.permissions import inbox_prefix
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.pull import RETRY_S, STOP_S
from breakwater.kernel.nats.state_log import StateLog
from breakwater.kernel.nats.subscriber import Batches, Declaration, Each, PullSubscriber, receives, register
from breakwater.kernel.process import background
from breakwater.kernel.process.outage import Outage
from breakwater.kernel.security.encryption import OFF, Cipher
from breakwater.kernel.server_urls import server_urls
from breakwater.kernel.telemetry.metrics import GaugeCollector

MAX_PENDING_BYTES = 16 * 1024 * 1024
PING_S = 1.0
WATCH_S = 2.0
"""The time between two looks at the tasks of a connection."""

Hook = Callable[[], Awaitable[Any]]


class Broker(NatsBroker):
    """The broker of one service."""

    def __init__(self, urls: Sequence[str], service: str, **options: Any) -> None:
        """Takes FastStream's options."""
        super().__init__(urls, **options)
        self.service = service
        self.published: list[Channel] = []
        """The channels of the service's own messages."""
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Overridden to end the process once its connection is dead."""
        await super().start()
        if self._watch is None:
            self._watch = asyncio.create_task(background.keep_doing(self._end_with_connection))

    async def _end_with_connection(self) -> None:
        """Ends the process when a task of the connection has died, so that its supervisor restarts it.

        After an error that nats-py does not expect, such as MemoryError, a task ends and is never started again. The
        process would seem healthy, and hear nothing.
        """
        dead_before = False
        while True:
            await asyncio.sleep(background.aligned_delay(WATCH_S))
            dead = has_dead_task(self.connection)
            # A connection that is just being replaced may look dead once.
            if dead and dead_before:
                structlog.get_logger().error("nats_connection_dead", what_happens="the process ends")
                os._exit(os.EX_SOFTWARE)
            dead_before = dead

    def subscriber(  # pyright: ignore[reportIncompatibleMethodOverride]  # it takes channels too
        self, *channels: Channel | str, pull_sub: Batches | Each | None = None, **options: Any
    ) -> Any:
        """Overridden to declare a subscriber of a durable consumer that is read by our own pull.

        Args:
            channels: what is read; of one stream. One, or a subject, for a subscriber of FastStream's own.
            pull_sub: how it is read; None for a subscriber of FastStream's own.
            options: `durable`, the consumer's name, and `filters`, its subjects, if they are not all of the channels';
                otherwise FastStream's.
        """
        if not isinstance(pull_sub, Batches | Each):
            match channels:
                case [Channel() as channel]:
                    channels = (channel.address,)
                    options |= {"title": receives(self.service, channel), "description": channel.summary}
                case _:
                    pass
            return super().subscriber(*channels, pull_sub=pull_sub or False, **options)  # pyright: ignore[reportCallIssue, reportArgumentType]
        return self._pull_subscriber(
            [channel for channel in channels if isinstance(channel, Channel)], pull_sub, **options
        )

    def _pull_subscriber(
        self, channels: Sequence[Channel], source: Batches | Each, *, durable: str, filters: Sequence[str] = ()
    ) -> PullSubscriber:
        wildcards = [re.sub(r"{\w+}", "*", channel.address) for channel in channels]
        declaration = Declaration(self.service, channels, durable, filters or wildcards)
        return register(self, PullSubscriber(cast(Any, self.config), declaration, source))

    @property
    def pull_subscribers(self) -> list[PullSubscriber]:
        """The subscribers of durable consumers."""
        return [subscriber for subscriber in self.subscribers if isinstance(subscriber, PullSubscriber)]

    async def stop(
        self,
        exc_type: type[BaseException] | None = None,
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,
    ) -> None:
        """Overridden, as FastStream's `stop` never returns while the server is away."""
        if self._watch is not None:
            await background.stop(self._watch)
            self._watch = None
        with suppress(IncorrectState):  # it has no connection yet
            give_up(self.connection)
        await super().stop(exc_type, exc_val, exc_tb)


def make_broker(url: str, service: str, *, graceful_timeout_s: float = 10.0) -> Broker:
    """Makes a broker that never gives up on its server, and logs an outage once.

    Raises:
        ConfigError: the URL, or a file of `BREAKWATER_TLS_*`, can't be used.
    """
    try:
        servers = server_urls(url)
    except ValueError as error:
        raise ConfigError(f"BREAKWATER_NATS_URL: {error}") from None
    tls = tls_options(url)
    outage = Outage("nats")
    logged: set[str] = set()

    async def lost() -> None:
        # Also called when we close it ourselves.
        if not (broker.connection.is_draining or broker.connection.is_closed):
            outage.note_failure("connection lost; reconnecting")

    async def regained() -> None:
        outage.note_success()

    async def failed(error: Exception) -> None:
        # While the connection is lost, every attempt to regain it ends here. Other errors (before the first connection,
        # or of denied permissions) are logged once per text.
        if not outage.lasting and str(error) not in logged:
            logged.add(str(error))
            structlog.get_logger().warning("nats_error", error=str(error) or repr(error))

    async def closed() -> None:
        # After some protocol errors, the client gives up for good, whatever its settings. Without a bus, nothing can be
        # finished or acknowledged: end immediately, and let the supervisor restart this process.
        if broker.running:
            structlog.get_logger().error("nats_connection_closed", what_happens="the process ends")
            os._exit(os.EX_SOFTWARE)

    broker = Broker(
        servers,
        service,
        specification_url="nats://127.0.0.1:4222",
        description="NATS with JetStream; `.breakwater/endpoints.json` has the address and the password.",
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

    def __init__(self, broker: Broker) -> None:
        super().__init__(broker, logger=None)
        self._broker = broker
        self._ready = False
        self._ended = asyncio.Event()
        self.reload: Callable[[Any], Awaitable[None]] = nothing_to_reload
        """Applies another config. Raises ConfigError if that is impossible; nothing has changed then."""

    # Overridden, as FastStream builds a model of the arguments of each hook, in a millisecond. Ours take none.
    def on_startup(self, func: Hook) -> Hook:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Calls a hook before the broker connects."""
        self._on_startup_calling.append(func)
        return func

    def after_startup(self, func: Hook) -> Hook:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Calls a hook once the broker is connected."""
        self._after_startup_calling.append(func)
        return func

    def on_shutdown(self, func: Hook) -> Hook:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Calls a hook before the broker disconnects."""
        self._on_shutdown_calling.append(func)
        return func

    def after_shutdown(self, func: Hook) -> Hook:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Calls a hook once the broker is disconnected."""
        self._after_shutdown_calling.append(func)
        return func

    async def start(self, **run_extra_options: Any) -> None:
        """Overridden to become ready only when NATS has all subscriptions: FastStream does not wait for them.

        Of the durable consumers, it waits only for those of batches: a worker that lacks one agent's queue serves the
        others.
        """
        await super().start(**run_extra_options)
        await subscribed(self._broker)
        for subscriber in self._broker.pull_subscribers:
            if subscriber.pull_sub.batch:
                await subscriber.answered.wait()
        self._ready = True
        structlog.get_logger().info("service_ready")

    async def run(self, *_: object, **__: object) -> None:
        """Overridden, as FastStream's `run` polls ten times a second for its end, and can't end during startup.

        A signal or `exit` wakes this one.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.exit)
        startup = asyncio.create_task(self.start())
        end = asyncio.create_task(self._ended.wait())
        try:
            await asyncio.wait((startup, end), return_when=asyncio.FIRST_COMPLETED)
            if startup.done():
                await startup
                await end
            await self.stop()
        finally:
            await background.stop(startup, end)

    def before_reading(self, work: Callable[[], Awaitable[object]]) -> None:
        """Does work on a connected broker before the application reads any message."""

        @self.on_startup
        async def connect_and_work() -> None:
            await self._broker.connect()
            await work()

    def follow(self, log: StateLog[Any, Any]) -> None:
        """Follows a log from before the application reads any message until its end."""
        following: list[asyncio.Task[None]] = []

        async def begin() -> None:
            following.append(asyncio.create_task(background.keep_doing(log.run)))
            await log.filled.wait()

        self.before_reading(begin)

        @self.after_shutdown
        async def stop() -> None:
            await background.stop(*following)

    async def start_subscribers(self) -> None:
        """Starts the subscribers that were declared after the application started."""
        for subscriber in self._broker.pull_subscribers:
            await subscriber.start()

    async def end_subscribers(self, *, drain_s: float = STOP_S) -> None:
        """Stops reading the consumers, and waits for the handlers of what was read; cancels them after `drain_s`.

        FastStream's broker does so too, but only after the shutdown hooks, which end what handlers may still need.
        """
        await asyncio.gather(*(subscriber.stop(drain_s=drain_s) for subscriber in self._broker.pull_subscribers))

    def run_alongside(
        self, work: Callable[[], Coroutine[Any, Any, None]], gauges: GaugeCollector | None = None
    ) -> None:
        """Does work and exports gauges while the application runs, until its last batches are handled."""
        running: list[asyncio.Task[None]] = []

        @self.after_startup
        async def start() -> None:
            running.append(asyncio.create_task(background.keep_doing(work)))
            if gauges is not None:
                gauges.start()

        @self.on_shutdown
        async def stop() -> None:
            await self.end_subscribers()
            if gauges is not None:
                gauges.stop()
            await background.stop(*running)

    def exit(self) -> None:
        """Overridden to wake `run`."""
        self._ended.set()

    async def is_alive(self) -> bool:
        """Returns True if it is ready and currently connected."""
        return self._ready and await self._broker.ping(timeout=PING_S)


async def nothing_to_reload(_config: object) -> None:
    """The reload of a service that does not depend on the config."""


async def subscribed(broker: NatsBroker) -> None:
    """Returns when NATS has all subscriptions: it handles commands in order, and so answers a ping after them."""
    while True:
        try:
            await round_trip(broker.connection, ROUND_TRIP_S)
        except nats.errors.Error:
            await asyncio.sleep(RETRY_S)  # the lost connection will be regained with its subscriptions
        else:
            return


def connection_of(broker: NatsBroker) -> ClientGetter:
    """The broker's connection, once it has one."""
    # Not `broker.connection`, which looks for its config in all that it may be part of, for each message again.
    return partial(getattr, broker.config.broker_config.connection_state, "connection")


def on_request(broker: NatsBroker, subject: str, queue: str, answer: Callable[[str], Awaitable[bytes]]) -> None:
    """Answers requests on core NATS, each by one member of the queue group. `answer` takes the request's subject."""

    @broker.subscriber(subject, queue=queue, max_workers=4, include_in_schema=False)
    async def receive(message: NatsMessage) -> bytes:
        try:
            return await answer(message.raw_message.subject)
        except Exception:
            # FastStream has no logger here, and would drop the error.
            structlog.get_logger().exception("handler_failed")
            raise


def specification(*brokers: Broker, **about: Any) -> dict[str, Any]:
    """The AsyncAPI document, made by FastStream, of what services read and publish.

    What they publish is declared to FastStream only here: it takes half a millisecond for each channel.
    """
    for broker in brokers:
        for channel in broker.published:
            broker.publisher(
                channel.address,
                schema=channel.message,
                title=f"{broker.service}.send.{channel.name}",
                description=channel.summary,
                include_in_schema=channel.public,
            )
    return AsyncAPI(*brokers, **about).to_specification().to_jsonable()


def publisher_of(
    broker: Broker, *channels: Channel, cipher: Cipher = OFF, connection: ClientGetter | None = None
) -> Publisher:
    """Makes a service's publisher of events of these channels; it refuses others.

    It is our own: FastStream's waits for no acknowledgement with a sequence, and takes no headers by which the first
    writer wins.
    """
    broker.published += channels
    messages = [channel.message for channel in channels]
    return Publisher(connection or connection_of(broker), broker.service, cipher, publishes=messages)
