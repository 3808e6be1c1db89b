"""A FastStream subscriber that reads by our own pull: the only file that builds on FastStream's internals.

`@broker.subscriber(channel, durable=…, pull_sub=…)` declares it. FastStream parses a message, runs the handler within
its middlewares, and describes both in AsyncAPI. `breakwater.kernel.nats.pull` decides when messages are requested, and
the handlers when they are acknowledged (ADR 0006).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

import structlog
from faststream import AckPolicy
from faststream._internal.broker.registrator import Registrator
from faststream._internal.endpoint.subscriber.call_item import CallsCollection
from faststream.exceptions import SetupError
from faststream.message import StreamMessage
from faststream.nats import JStream, NatsBroker, PullSub
from faststream.nats.configs import NatsBrokerConfig
from faststream.nats.subscriber.config import NatsSubscriberConfig, NatsSubscriberSpecificationConfig
from faststream.nats.subscriber.specification import NatsSubscriberSpecification
from faststream.nats.subscriber.usecases.basic import DefaultSubscriber
from faststream.specification.asyncapi.message import get_model_schema
from faststream.specification.schema import Message, Operation, SubscriberSpec
from faststream.specification.schema.bindings import ChannelBinding
from faststream.specification.schema.bindings import nats as nats_bindings
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import ConsumerConfig
from pydantic import BaseModel, create_model

from breakwater.kernel.nats.channel import Channel
from breakwater.kernel.nats.delivery import Delivery
from breakwater.kernel.nats.errors import BusUnavailableError
from breakwater.kernel.nats.pull import RETRY_S, STOP_S, WAIT_S, Pull
from breakwater.kernel.process import background
from breakwater.kernel.process.outage import Outage


class Batches(PullSub):
    """Messages in batches, one batch after the other: a first message, and those that soon follow it."""

    def __init__(self, size: int, linger_s: float | Mapping[float, float]) -> None:
        """Takes the maximum size of a batch.

        `linger_s` is how long a message may wait for its batch to grow; or that by the messages a second, ascending,
        from which on it applies. Both of the last two batches must have come at that rate: a few messages after a rest
        are handled soon.
        """
        super().__init__(batch_size=size, batch=True)
        self._lingers_s = linger_s if isinstance(linger_s, Mapping) else {0.0: linger_s}
        self._linger_s = self._lingers_s[0.0]
        self._per_s = 0.0
        self._fetched_at = 0.0

    def concurrency(self) -> int:
        """One batch at a time."""
        return 1

    async def fetch(self, pull: Pull, wait_s: float, free: int) -> list[Any]:  # noqa: ARG002  as `Each.fetch`
        """Fetches the next batch, if messages come within `wait_s`. Raises BusUnavailableError."""
        batch = await pull.fetch(self.batch_size, wait_s, self._linger_s)
        self.note(len(batch), asyncio.get_running_loop().time())
        return [batch] if batch else []

    def note(self, size: int, fetched_at: float) -> float:
        """Takes the size of a batch, 0 after a rest, and its monotonic time. Returns how long the next one may grow."""
        per_s = size / max(fetched_at - self._fetched_at, 0.001)
        steady_per_s = min(per_s, self._per_s)
        self._linger_s = [linger_s for least, linger_s in self._lingers_s.items() if steady_per_s >= least][-1]
        self._per_s = per_s
        self._fetched_at = fetched_at
        return self._linger_s


class Each(PullSub):
    """Messages one by one, handled in parallel."""

    def __init__(self, concurrency: Callable[[], int]) -> None:
        """Takes a function that returns how many messages may currently be handled in parallel."""
        super().__init__()
        self.concurrency = concurrency

    async def fetch(self, pull: Pull, wait_s: float, free: int) -> list[Any]:
        """Fetches at most `free` messages that come within `wait_s`. Raises BusUnavailableError."""
        # The consumer delivers no more than the concurrency: messages requested beyond the free places come later.
        return list[Any](await pull.fetch(free, wait_s, linger_s=0, batch=self.concurrency()))


@dataclass(frozen=True, slots=True)
class Declaration:
    """The channels of one stream that a subscriber reads by a durable consumer."""

    service: str
    channels: Sequence[Channel]
    durable: str
    filters: Sequence[str]
    """The consumer's subjects."""

    @property
    def stream(self) -> str:
        """The stream's name."""
        [stream] = {channel.stream for channel in self.channels}
        assert stream is not None, "core NATS has no durable consumers"
        return stream.value


class ChannelSpecification(NatsSubscriberSpecification):
    """Describes a subscriber in AsyncAPI: each channel with its own message, even if it reads batches of them."""

    __slots__ = ("declaration",)

    def __init__(self, config: NatsBrokerConfig, calls: CallsCollection[Any], declaration: Declaration) -> None:
        self.declaration = declaration
        titles = [receives(declaration.service, channel) for channel in declaration.channels]
        super().__init__(
            _outer_config=config,
            calls=calls,
            specification_config=NatsSubscriberSpecificationConfig(
                subject="",
                queue=None,
                filter_subjects=[channel.address for channel in declaration.channels],
                title_=titles[0] if len(titles) == 1 else None,
                description_=None,
                include_in_schema=all(channel.public for channel in declaration.channels),
            ),
        )

    def get_schema(self) -> dict[str, SubscriberSpec]:
        """Overridden, as FastStream would take the handler's parameter, a list, for the message of every channel."""
        return {
            receives(self.declaration.service, channel): SubscriberSpec(
                address=channel.address,
                description=channel.summary,
                operation=Operation(
                    message=Message(title=f"{channel.message.__name__}:Message", payload=_payload(channel.message)),
                    bindings=None,
                ),
                bindings=ChannelBinding(nats=nats_bindings.ChannelBinding(subject=channel.address, queue=None)),
            )
            for channel in self.declaration.channels
        }


class PullSubscriber(DefaultSubscriber[Any]):
    """Reads a durable consumer, and handles its messages in tasks. Handlers acknowledge; their errors are logged."""

    def __init__(self, config: NatsBrokerConfig, declaration: Declaration, source: Batches | Each) -> None:
        """Reads nothing yet."""
        consumer = ConsumerConfig(durable_name=declaration.durable, filter_subjects=list(declaration.filters))
        subscriber_config = NatsSubscriberConfig(
            subject="", sub_config=consumer, no_reply=True, _outer_config=config, _ack_policy=AckPolicy.MANUAL
        )
        subscriber_config.parser = _parse_batch if source.batch else _parse
        subscriber_config.decoder = _decode
        calls = CallsCollection[Any]()
        super().__init__(subscriber_config, ChannelSpecification(config, calls, declaration), calls)
        self.declaration = declaration
        self.pull_sub = source
        self.stream = JStream(declaration.stream, declare=False)
        self._reading: asyncio.Task[None] | None = None
        self._handling: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self.answered = asyncio.Event()
        """Set when the consumer has answered once."""

    def __call__(self, func: Any = None, **options: Any) -> Any:
        """Registers the handler. Raises SetupError: its parameter is not of the channels' messages."""
        if func is not None:
            _require_types(func, self.declaration, batch=self.pull_sub.batch)
        return super().__call__(func, **options)

    async def start(self) -> None:
        """Starts to read, unless it already does."""
        if self._reading is None:
            await super().start()

    async def stop(self, *, drain_s: float = STOP_S) -> None:
        """Stops reading, and waits for the handlers of what was read; cancels them after `drain_s`."""
        if self._reading is not None:
            await background.stop(self._reading)
            self._reading = None
        if self._handling:
            await asyncio.wait(self._handling, timeout=drain_s)
        await background.stop(*self._handling)
        await super().stop()

    async def consume(self, msg: Any) -> None:
        """Overridden, as FastStream logs with its own logger, and swallows the errors of handlers."""
        try:
            if self._broker_middlewares:
                await self.process_message(msg)
            else:
                # FastStream would only call it, too, but spend 30 µs on each message or batch.
                await self.calls[0].handler(msg)
        except Exception:  # noqa: BLE001  this message is delivered again, and the next one may succeed
            structlog.get_logger().exception("handler_failed", consumer=self.declaration.durable)

    async def get_one(self, *, timeout: float = 5) -> Any:  # noqa: ASYNC109  FastStream's signature
        """Refused: only the handler reads the consumer."""
        raise NotImplementedError

    def __aiter__(self) -> AsyncIterator[Any]:
        """Refused, as `get_one`."""
        raise NotImplementedError

    async def _create_subscription(self) -> None:
        self._reading = asyncio.create_task(self._read())

    def _client(self) -> Client:
        return self.connection

    async def _read(self) -> None:
        pull = Pull(self._client, cast(Any, self.declaration.channels[0].stream), self.declaration.durable)
        outage = Outage(self.declaration.durable)
        source = self.pull_sub
        try:
            while True:
                while len(self._handling) >= source.concurrency():
                    # Not `asyncio.wait`: it would go through all handlers each time that one ends.
                    self._ended.clear()
                    await self._ended.wait()
                try:
                    if not self.answered.is_set():
                        if not await pull.answers():
                            continue
                        outage.note_success()
                        self.answered.set()
                    wait_s = background.aligned_delay(WAIT_S)
                    fetched = await source.fetch(pull, wait_s, source.concurrency() - len(self._handling))
                except BusUnavailableError as error:
                    outage.note_failure(error)
                    await asyncio.sleep(RETRY_S)
                    continue
                except Exception:  # noqa: BLE001  without its reader, the process would go on but get no messages
                    structlog.get_logger().exception("fetch_failed", consumer=self.declaration.durable)
                    await asyncio.sleep(RETRY_S)
                    continue
                outage.note_success()
                for deliveries in fetched:
                    task = asyncio.create_task(self.consume(deliveries))
                    self._handling.add(task)
                    task.add_done_callback(self._after_handling)
        finally:
            await pull.close()

    def _after_handling(self, task: asyncio.Task[None]) -> None:
        self._handling.discard(task)
        self._ended.set()


def register(broker: NatsBroker, subscriber: PullSubscriber) -> PullSubscriber:
    """Adds a subscriber to a broker, which starts and stops it."""
    Registrator.subscriber(broker, subscriber)
    return subscriber


def receives(service: str, channel: Channel) -> str:
    """The name, in AsyncAPI, of a service's operation that reads a channel."""
    return f"{service}.receive.{channel.name}"


def _require_types(handler: Callable[..., Any], declaration: Declaration, *, batch: bool) -> None:
    """Raises SetupError unless the handler's parameter has the type of the channels' messages."""
    messages = {channel.message for channel in declaration.channels}
    [parameter, *_] = [hint for name, hint in get_type_hints(handler).items() if name != "return"]
    if batch and get_origin(parameter) is list:
        [parameter] = get_args(parameter)
    elif batch:
        parameter = None
    [declared] = get_args(parameter) if get_origin(parameter) is Delivery else (None,)
    union = get_origin(declared) in (Union, UnionType)
    if set(get_args(declared) if union else (declared,)) != messages:
        expected = " | ".join(sorted(message.__name__ for message in messages))
        form = f"list[Delivery[{expected}]]" if batch else f"Delivery[{expected}]"
        raise SetupError(f"{declaration.service}: the handler of {declaration.durable} must take a {form}")


def _payload(message: type[BaseModel]) -> dict[str, Any]:
    return get_model_schema(create_model("", message=(message, ...)))


def _delivery(message: Msg | Delivery) -> Delivery:
    # `TestNatsBroker` passes raw messages, which were not fetched.
    return message if isinstance(message, Delivery) else Delivery(message)


async def _parse(message: Msg | Delivery) -> StreamMessage[Any]:
    delivery = _delivery(message)
    # Without an id, FastStream would make a random one.
    return StreamMessage(delivery, delivery.data, correlation_id=delivery.subject)


async def _parse_batch(messages: Sequence[Msg | Delivery]) -> StreamMessage[Any]:
    batch = [_delivery(message) for message in messages]
    return StreamMessage(batch, b"", correlation_id=batch[0].subject)


async def _decode(message: StreamMessage[Any]) -> Any:
    return message.raw_message
