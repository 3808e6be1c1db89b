"""Compares the server's streams and consumers with the topology (`survey`), and brings them to it (`provision`).

The only place that creates or changes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any, Literal, TypeVar

import nats
import nats.errors
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig, ConsumerInfo, DeliverPolicy, RetentionPolicy, StreamConfig, StreamInfo
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from breakwater.kernel.nats import topology
from breakwater.kernel.nats.core import tls_options
from breakwater.kernel.nats.errors import BusError, unavailable
from breakwater.kernel.nats.lookup import ClientGetter
from breakwater.kernel.nats.permissions import inbox_prefix
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.nats.topology import Plan

ANSWER_S = 10.0
"""Timeout of one request; a cluster that has just begun or lost its leader leaves some without an answer."""

TRIES = 4

NO_STORAGE, NO_PEERS = 10047, 10005
PEERS_S = 10.0
"""Time in which too few nodes are no refusal: those of a cluster that has just begun do not know of one another yet."""

LEAST_BYTES = 1024**2
LISTED = 256
"""The most consumers that one answer lists."""

WORK_QUEUES = (Stream.JOBS, Stream.PARKED)


async def provision(url: str, plan: Plan, *, replicas: int = 1, answer_s: float = ANSWER_S) -> tuple[str, ...]:
    """Creates missing streams and consumers and updates those that differ; the others are left alone.

    An agent that is no longer configured loses its subject in JOBS, so that publishing to it then fails; but only when
    none of its jobs wait there or in PARKED, as they would be stranded. Nothing that holds messages is taken away.

    Args:
        url: of the server, with the user that may do this.
        plan: the topology's.
        replicas: of each stream.
        answer_s: timeout of a request, which is made up to four times in all.

    Returns:
        The changes, a line each; empty when everything was right.

    Raises:
        ConfigError: a file of `BREAKWATER_TLS_*` can't be used.
        BusError: the server refuses, or does not answer, as its text explains.
    """
    client = await nats.connect(
        url,
        name="breakwater-setup",
        inbox_prefix=inbox_prefix("setup"),
        allow_reconnect=False,
        max_reconnect_attempts=1,
        connect_timeout=5,
        **tls_options(url),
    )
    try:
        jetstream = client.jetstream(timeout=answer_s)
        done: list[str] = []
        # Those with small limits first: what is left for a large one can be halved, and the other way round not.
        for wanted in sorted(topology.streams(plan, replicas=replicas), key=lambda one: one.max_bytes or 0):
            stream = await _answered(f"stream {wanted.name}", lambda w=wanted: _with_waiting_subjects(jetstream, w))
            done += await _apply(
                f"stream {stream.name}",
                stream,
                lambda name=wanted.name or "": _config_of(jetstream.stream_info(name)),
                lambda config, now: _with_room(jetstream, config, now),
            )
        for stream_name, consumer in topology.consumers(plan):
            done += await _apply(
                f"consumer {consumer.durable_name}",
                consumer,
                lambda s=stream_name.value, c=consumer: _config_of(jetstream.consumer_info(s, c.durable_name or "")),
                lambda config, now, s=stream_name.value: jetstream.add_consumer(s, _begun_as(config, now)),
            )
        return tuple(done)
    finally:
        await client.close()


async def _config_of(info: Awaitable[StreamInfo | ConsumerInfo]) -> Any:
    """The config that the server has; None where there is no such stream or consumer."""
    try:
        return (await info).config
    except NotFoundError:
        return None


async def _apply(what: str, wanted: Any, now: Callable[[], Any], put: Callable[[Any, Any], Any]) -> list[str]:
    existing = await _answered(what, now)
    if existing is None:
        # Creating once more what is there already, as the answer was lost, changes nothing.
        stored = (await _answered(what, lambda: put(wanted, None))).config
        less = ", ".join(differences(wanted, stored))
        return [f"created {what} (with a lower {less}: NATS has no more storage)" if less else f"created {what}"]
    if not differences(wanted, existing):
        return []
    stored = (await _answered(what, lambda: put(wanted, existing))).config
    # A limit that NATS has no storage for is as it was.
    changed = [name for name in differences(wanted, existing) if name in differences(stored, existing)]
    return [f"updated {what} ({', '.join(changed)})"] if changed else []


async def _with_room(jetstream: JetStreamContext, wanted: StreamConfig, now: StreamConfig | None) -> StreamInfo:
    """Creates or changes a stream; where the server has no storage for its limit in bytes, as it was, or with less.

    The server reserves the limits of all streams in full. A machine with little disk is no reason to have none.
    """
    change = jetstream.add_stream if now is None else jetstream.update_stream
    had = max(0, (now and now.max_bytes) or 0)
    asked = bytes_ = wanted.max_bytes or 0
    while True:
        try:
            info: StreamInfo = await change(wanted.evolve(max_bytes=bytes_) if bytes_ else wanted)
        except APIError as error:
            if error.err_code != NO_STORAGE or bytes_ < 2 * LEAST_BYTES or bytes_ == had:
                raise
            bytes_ = had or bytes_ // 2
        else:
            if bytes_ == asked or had:
                return info
            # As much is left for the streams that follow, or the last one would have nothing.
            return await jetstream.update_stream(wanted.evolve(max_bytes=max(bytes_ // 2, 1)))


async def _answered(what: str, request: Callable[[], Awaitable[Any]]) -> Any:
    """Makes a request until it is answered. Each may be made twice: it names the state to reach, not the change."""
    tries, began = 0, monotonic()
    while True:
        try:
            return await request()
        except (nats.errors.TimeoutError, ServiceUnavailableError) as error:
            tries += 1
            if tries == TRIES:
                raise BusError(f"{what}: no response from NATS after {TRIES} requests") from error
            await asyncio.sleep(0.5)
        except APIError as error:
            if error.err_code == NO_PEERS and monotonic() - began < PEERS_S:
                await asyncio.sleep(0.5)
                continue
            raise BusError(f"{what}: refused by NATS: {error.description}") from error


def _begun_as(wanted: ConsumerConfig, existing: ConsumerConfig | None) -> ConsumerConfig:
    """A consumer's config, with the beginning that it was created with, which can't be changed."""
    if existing is None:
        return wanted
    return wanted.evolve(deliver_policy=existing.deliver_policy, opt_start_seq=existing.opt_start_seq)


class ConsumerCheck:
    """Finds consumers of the topology that were deleted, and creates them again where they were.

    Those that it never saw are not its concern: `provision` creates them.
    """

    def __init__(self, connection: ClientGetter) -> None:
        self._connection = connection
        self._acknowledged: dict[tuple[Stream, str], int] = {}
        """By consumer, the sequence up to which everything was acknowledged at the last look."""

    async def deleted(self, plan: Plan) -> list[tuple[Stream, ConsumerConfig]]:
        """Looks at all consumers; returns those that were there once, and are no more. Raises BusUnavailableError."""
        wanted = topology.consumers(plan)
        missing: list[tuple[Stream, ConsumerConfig]] = []
        for stream in dict.fromkeys(stream for stream, _ in wanted):
            there = await self._acknowledged_on(stream)
            for config in [config for of, config in wanted if of == stream]:
                consumer = stream, config.durable_name or ""
                if consumer in there:
                    self._acknowledged[consumer] = there[consumer]
                elif consumer in self._acknowledged:
                    missing.append((stream, config))
        return missing

    async def create(self, stream: Stream, wanted: ConsumerConfig) -> None:
        """Creates a consumer again, to deliver what was not acknowledged. Raises BusUnavailableError."""
        jetstream = self._connection().jetstream(timeout=SURVEY_TIMEOUT_S)
        acknowledged = self._acknowledged[stream, wanted.durable_name or ""]
        try:
            if stream not in WORK_QUEUES and acknowledged <= (await jetstream.stream_info(stream)).state.last_seq:
                # A work queue holds nothing else, and takes no other beginning.
                start = {"deliver_policy": DeliverPolicy.BY_START_SEQUENCE, "opt_start_seq": acknowledged + 1}
                wanted = wanted.evolve(**start)
            await jetstream.add_consumer(stream.value, wanted)
        except (TimeoutError, nats.errors.Error, APIError) as error:
            raise unavailable(f"NATS did not create the consumer {wanted.durable_name} of {stream}", error) from error

    async def _acknowledged_on(self, stream: Stream) -> dict[tuple[Stream, str], int]:
        jetstream, there = self._connection().jetstream(timeout=SURVEY_TIMEOUT_S), dict[tuple[Stream, str], int]()
        while True:
            try:
                page = await jetstream.consumers_info(stream.value, len(there))
            except (TimeoutError, nats.errors.Error, APIError) as error:
                raise unavailable(f"NATS does not list the consumers of {stream}", error) from error
            there |= {(stream, one.name): one.ack_floor.stream_seq if one.ack_floor else 0 for one in page}
            if len(page) < LISTED:
                return there


def differences(wanted: Any, existing: Any) -> list[str]:
    """The fields that were asked for and are otherwise on the server, which fills in many more of its own."""
    if isinstance(wanted, ConsumerConfig):
        wanted = _begun_as(wanted, existing)
    have = asdict(existing)
    asked = {name: (value, have.get(name)) for name, value in asdict(wanted).items() if value is not None}
    if "subjects" in asked:
        subjects, stored = asked["subjects"]
        asked["subjects"] = set(subjects), set(stored or ())
    return [name for name, (value, stored) in asked.items() if value != stored and (value or stored)]


async def _with_waiting_subjects(jetstream: JetStreamContext, wanted: StreamConfig) -> StreamConfig:
    """The stream, with the subjects it has now and shall no longer have, as long as messages wait on them."""
    now: StreamConfig | None = await _config_of(jetstream.stream_info(wanted.name or ""))
    dropped = set((now and now.subjects) or ()) - set(wanted.subjects or ())
    if wanted.retention is not RetentionPolicy.WORK_QUEUE or not dropped:
        return wanted
    # Only now: the answer names every subject that holds a message, and in PARKED each message has its own.
    info = await jetstream.stream_info(wanted.name or "", subjects_filter=">")
    stored, waiting = info.state.subjects or {}, list[str]()
    for subject in sorted(dropped):
        # An agent's subjects go together.
        root = subject.removesuffix(".*")
        if any(one == root or one.startswith(f"{root}.") for one in stored) or await _any_parked(jetstream, root):
            waiting.append(subject)
    return wanted.evolve(subjects=list(dict.fromkeys([*(wanted.subjects or ()), *waiting])))


async def _any_parked(jetstream: JetStreamContext, subject: str) -> bool:
    """True if a job sleeps that goes back to a subject of JOBS."""
    kind, _, agent = subject.rpartition(".")
    if kind != "bw.jobs":
        return False
    try:
        info = await jetstream.stream_info(Stream.PARKED.value, subjects_filter=f"bw.parked.{agent}.>")
    except NotFoundError:
        return False
    return bool(info.state.subjects)


SURVEY_TIMEOUT_S = 3.0

Info = TypeVar("Info", StreamInfo, ConsumerInfo)

TopologyMatch = Literal["right", "missing", "differs", "hidden"]


@dataclass(frozen=True, slots=True)
class StreamFound:
    """A stream of the topology. `hidden`: no answer, as this user may not ask."""

    name: str
    verdict: TopologyMatch
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
    verdict: TopologyMatch
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
    """The streams and consumers, in the topology's order."""

    streams: tuple[StreamFound, ...]
    consumers: tuple[ConsumerFound, ...]


async def survey(client: Client, plan: Plan, *, replicas: int | None = None) -> Survey:
    """Looks at every stream and consumer that should be there.

    Args:
        client: a connection; a user that may not ask for something finds it `hidden`.
        plan: the topology's.
        replicas: the copies of each stream; None for any number.
    """
    jetstream = client.jetstream(timeout=SURVEY_TIMEOUT_S)
    streams, consumers = await asyncio.gather(
        asyncio.gather(*(_stream(jetstream, wanted, replicas) for wanted in topology.streams(plan))),
        asyncio.gather(*(_consumer(jetstream, stream, wanted) for stream, wanted in topology.consumers(plan))),
    )
    return Survey(tuple(streams), tuple(consumers))


async def _stream(jetstream: JetStreamContext, wanted: StreamConfig, replicas: int | None) -> StreamFound:
    name = wanted.name or ""
    found = await _info(jetstream.stream_info(name))
    if not isinstance(found, StreamInfo):
        return StreamFound(name, found)
    wanted = wanted.evolve(num_replicas=found.config.num_replicas if replicas is None else replicas)
    different, limit = tuple(differences(wanted, found.config)), found.config.max_bytes
    return StreamFound(
        name,
        "differs" if different else "right",
        different,
        messages=found.state.messages,
        bytes=found.state.bytes,
        max_bytes=limit if limit and limit > 0 else None,
    )


async def _consumer(jetstream: JetStreamContext, stream: Stream, wanted: ConsumerConfig) -> ConsumerFound:
    name = wanted.durable_name or ""
    found = await _info(jetstream.consumer_info(stream.value, name))
    if not isinstance(found, ConsumerInfo):
        return ConsumerFound(stream.value, name, found)
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


async def _info(asked: Awaitable[Info]) -> Info | Literal["missing", "hidden"]:
    try:
        return await asked
    except NotFoundError:
        return "missing"
    except (TimeoutError, APIError, nats.errors.Error):
        return "hidden"
