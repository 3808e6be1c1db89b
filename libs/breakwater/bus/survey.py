"""Compares what is on the server with the topology, and reads how far every consumer is. Changes nothing."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Literal

import nats.errors
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig, ConsumerInfo, StreamConfig
from nats.js.errors import APIError, NotFoundError

from breakwater.bus import topology
from breakwater.bus.provision import differences
from breakwater.bus.topology import Plan
from breakwater.contracts.subjects import Stream

ANSWER_TIMEOUT_S = 3.0

Verdict = Literal["right", "missing", "differs", "hidden"]


@dataclass(frozen=True, slots=True)
class StreamFound:
    """A stream of the topology. `hidden`: no answer, as this user may not ask."""

    name: str
    verdict: Verdict
    different: tuple[str, ...] = ()
    """The settings that differ from the topology."""
    messages: int | None = None
    bytes: int = 0
    max_bytes: int | None = None
    """None for a stream without a limit."""


@dataclass(frozen=True, slots=True)
class ConsumerFound:
    """A durable consumer of the topology. Its counts are None where it was not found."""

    stream: str
    name: str
    verdict: Verdict
    different: tuple[str, ...] = ()
    waiting: int | None = None
    """Messages that were not delivered yet."""
    in_progress: int | None = None
    """Messages that were delivered and not acknowledged yet."""
    again: int | None = None
    """Of those, the ones that were delivered before."""
    readers: int | None = None
    """Requests for messages that are open now."""
    done: int | None = None
    """The sequence in the stream up to which everything is acknowledged."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What was found, in the topology's order."""

    streams: tuple[StreamFound, ...]
    consumers: tuple[ConsumerFound, ...]


async def survey(client: Client, plan: Plan, *, replicas: int | None = None) -> Survey:
    """Looks at every stream and consumer that should be there.

    Args:
        client: a connection; a user that may not ask for something finds it `hidden`.
        plan: what should be there.
        replicas: how many copies there should be; None for any number.
    """
    jetstream = client.jetstream(timeout=ANSWER_TIMEOUT_S)
    streams, consumers = await asyncio.gather(
        asyncio.gather(*(_stream(jetstream, wanted, replicas) for wanted in topology.streams(plan))),
        asyncio.gather(*(_consumer(jetstream, stream, wanted) for stream, wanted in topology.consumers(plan))),
    )
    return Survey(tuple(streams), tuple(consumers))


async def _stream(jetstream: JetStreamContext, wanted: StreamConfig, replicas: int | None) -> StreamFound:
    name = wanted.name or ""
    try:
        found = await jetstream.stream_info(name)
    except NotFoundError:
        return StreamFound(name, "missing")
    except (TimeoutError, APIError, nats.errors.Error):
        return StreamFound(name, "hidden")
    asked = wanted.evolve(num_replicas=found.config.num_replicas if replicas is None else replicas)
    different = tuple(differences(asked, found.config))
    limit = found.config.max_bytes
    return StreamFound(
        name,
        "differs" if different else "right",
        different,
        found.state.messages,
        found.state.bytes,
        limit if limit and limit > 0 else None,
    )


async def _consumer(jetstream: JetStreamContext, stream: Stream, wanted: ConsumerConfig) -> ConsumerFound:
    name = wanted.durable_name or ""
    try:
        found: ConsumerInfo = await jetstream.consumer_info(stream.value, name)
    except NotFoundError:
        return ConsumerFound(stream.value, name, "missing")
    except (TimeoutError, APIError, nats.errors.Error):
        return ConsumerFound(stream.value, name, "hidden")
    different = tuple(differences(wanted, found.config))
    return ConsumerFound(
        stream.value,
        name,
        "differs" if different else "right",
        different,
        waiting=found.num_pending,
        in_progress=found.num_ack_pending,
        again=found.num_redelivered,
        readers=found.num_waiting,
        done=None if found.ack_floor is None else found.ack_floor.stream_seq,
    )
