"""Compares the server's streams and consumers with the topology (`survey`), and brings them to it (`provision`).

The only place that creates or changes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from functools import partial
from time import monotonic
from typing import Any, Literal, TypeVar

import nats
import nats.errors
import orjson
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig, ConsumerInfo, DeliverPolicy, RetentionPolicy, StreamConfig, StreamInfo
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from breakwater.kernel.nats import topology
from breakwater.kernel.nats.core import ClientGetter, tls_options
from breakwater.kernel.nats.errors import BusError, unavailable
from breakwater.kernel.nats.permissions import inbox_prefix
from breakwater.kernel.nats.snapshots import FIRST_RESTORED, UNFINISHED
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.nats.topology import Plan
from breakwater.kernel.server_urls import server_urls

ANSWER_S = 10.0
"""Timeout of one request. A cluster that has just started, or has lost its leader, leaves some requests unanswered."""

TRIES = 4

NO_STORAGE = 10047
"""JetStream's error code for too little storage."""

NO_PEERS = 10005
"""JetStream's error code for too few nodes."""

PEERS_S = 25.0
"""The time for retries after NO_PEERS.

The nodes of a cluster that has just started do not know each other's storage yet. A node reports it at its start and
then every 10 s, so a report that was lost is made up for within two of these intervals.
"""

LEAST_BYTES = 1024**2
LISTED = 256
"""The most consumers that one response lists."""

WORK_QUEUES = (Stream.JOBS, Stream.PARKED)


async def provision(url: str, plan: Plan, *, replicas: int = 1, answer_s: float = ANSWER_S) -> tuple[str, ...]:
    """Creates missing streams and consumers and updates those that differ; the others are left alone.

    An agent that is no longer configured loses its subject in JOBS, so that publishing to it fails. Its subject stays
    while any of its jobs wait there or in PARKED: they would be stranded. Nothing that holds messages is removed.

    Args:
        url: of the servers, with the user that may do this.
        plan: the topology's.
        replicas: of each stream.
        answer_s: timeout of a request, which is made up to four times in all.

    Returns:
        The changes, a line each; empty if nothing had to change.

    Raises:
        ConfigError: a file of `BREAKWATER_TLS_*` can't be used.
        BusError: the server refuses or does not answer; the text says which.
    """
    client = await nats.connect(
        server_urls(url),
        name="breakwater-setup",
        inbox_prefix=inbox_prefix("setup"),
        allow_reconnect=False,
        max_reconnect_attempts=1,
        connect_timeout=5,
        **tls_options(url),
    )
    try:
        jetstream = client.jetstream(timeout=answer_s)
        await _refuse_unfinished_restore(jetstream)
        changes: list[str] = []
        # Streams with small limits first: only a large limit can be halved to fit the remaining storage.
        for wanted in sorted(topology.streams(plan, replicas=replicas), key=lambda stream: stream.max_bytes or 0):
            stream = await _request(f"stream {wanted.name}", lambda w=wanted: _with_waiting_subjects(jetstream, w))
            changes += await _apply(
                f"stream {stream.name}",
                stream,
                lambda name=wanted.name or "": _config_of(jetstream.stream_info(name)),
                lambda config, now: _with_room(jetstream, config, now),
            )
        for stream_name, consumer in topology.consumers(plan):
            changes += await _apply(
                f"consumer {consumer.durable_name}",
                consumer,
                lambda s=stream_name.value, c=consumer: _config_of(jetstream.consumer_info(s, c.durable_name or "")),
                lambda config, now, s=stream_name.value: jetstream.add_consumer(s, _with_start_of(config, now)),
            )
        return tuple(changes)
    finally:
        await client.close()


async def _refuse_unfinished_restore(jetstream: JetStreamContext) -> None:
    """Refuses a plane that is half restored: what it lacks would be created without its messages."""
    marked: StreamConfig | None = await _request(
        "the first stream of a restore", lambda: _config_of(jetstream.stream_info(FIRST_RESTORED.value))
    )
    if marked is not None and (backup := (marked.metadata or {}).get(UNFINISHED)):
        raise BusError(
            f"the restore of backup {backup} was interrupted: run `breakwater backup restore` again, or delete all data"
        )


async def _config_of(info: Awaitable[StreamInfo | ConsumerInfo]) -> Any:
    """The config that the server has; None where there is no such stream or consumer."""
    try:
        return (await info).config
    except NotFoundError:
        return None


async def _apply(name: str, wanted: Any, now: Callable[[], Any], change: Callable[[Any, Any], Any]) -> list[str]:
    existing = await _request(name, now)
    if existing is None:
        # If the response was lost, the request is repeated: creating what exists already changes nothing.
        stored = (await _request(name, lambda: change(wanted, None))).config
        lowered = ", ".join(differences(wanted, stored))
        return [f"created {name} (with a lower {lowered}: NATS has no more storage)" if lowered else f"created {name}"]
    if not differences(wanted, existing):
        return []
    stored = (await _request(name, lambda: change(wanted, existing))).config
    # A limit for which NATS has no storage was left as it was.
    changed = [setting for setting in differences(wanted, existing) if setting in differences(stored, existing)]
    return [f"updated {name} ({', '.join(changed)})"] if changed else []


async def _with_room(jetstream: JetStreamContext, wanted: StreamConfig, now: StreamConfig | None) -> StreamInfo:
    """Creates or updates a stream. If NATS lacks storage for its limit, keeps the old limit or lowers the new one.

    The server reserves the limits of all streams in full. A machine with a small disk still gets all streams.
    """
    change = jetstream.add_stream if now is None else jetstream.update_stream
    if now is not None:
        wanted = wanted.evolve(metadata=now.metadata)  # of a restore
    former_bytes = max(0, (now and now.max_bytes) or 0)
    wanted_bytes = reserved_bytes = wanted.max_bytes or 0
    while True:
        try:
            info: StreamInfo = await change(wanted.evolve(max_bytes=reserved_bytes) if reserved_bytes else wanted)
        except APIError as error:
            if error.err_code != NO_STORAGE or reserved_bytes < 2 * LEAST_BYTES or reserved_bytes == former_bytes:
                raise
            reserved_bytes = former_bytes or reserved_bytes // 2
        else:
            if reserved_bytes == wanted_bytes or former_bytes:
                return info
            # Leave as much for the streams that follow: the last one would get nothing.
            return await jetstream.update_stream(wanted.evolve(max_bytes=max(reserved_bytes // 2, 1)))


async def _request(name: str, request: Callable[[], Awaitable[Any]]) -> Any:
    """Repeats a request until NATS responds. Repeating is safe: a request states the wanted state, not a change."""
    tries = 0
    began = monotonic()
    while True:
        try:
            return await request()
        except (nats.errors.TimeoutError, ServiceUnavailableError) as error:
            tries += 1
            if tries == TRIES:
                raise BusError(f"{name}: no response from NATS after {TRIES} requests") from error
            await asyncio.sleep(0.5)
        except APIError as error:
            if error.err_code == NO_PEERS and monotonic() - began < PEERS_S:
                await asyncio.sleep(0.5)
                continue
            raise BusError(f"{name}: refused by NATS: {error.description}") from error


def _with_start_of(wanted: ConsumerConfig, existing: ConsumerConfig | None) -> ConsumerConfig:
    """A consumer's config with the start position that it was created with, which can't be changed."""
    if existing is None:
        return wanted
    return wanted.evolve(deliver_policy=existing.deliver_policy, opt_start_seq=existing.opt_start_seq)


class ConsumerCheck:
    """Finds consumers of the topology that were deleted, and recreates them at the position that they had reached.

    It ignores consumers that it has never seen: `provision` creates them.
    """

    def __init__(self, connection: ClientGetter) -> None:
        self._connection = connection
        self._acknowledged: dict[tuple[Stream, str], int] = {}
        """By consumer, the sequence up to which everything was acknowledged at the last check."""

    async def deleted_consumers(self, plan: Plan) -> list[tuple[Stream, ConsumerConfig]]:
        """Returns the consumers that existed at an earlier check and do not now. Raises BusUnavailableError."""
        wanted = topology.consumers(plan)
        missing: list[tuple[Stream, ConsumerConfig]] = []
        for stream in dict.fromkeys(stream for stream, _ in wanted):
            acknowledged = await self._acknowledged_on(stream)
            for config in [config for consumer_stream, config in wanted if consumer_stream == stream]:
                consumer = stream, config.durable_name or ""
                if consumer in acknowledged:
                    self._acknowledged[consumer] = acknowledged[consumer]
                elif consumer in self._acknowledged:
                    missing.append((stream, config))
        return missing

    async def create(self, stream: Stream, wanted: ConsumerConfig) -> None:
        """Recreates a consumer, to deliver what was not acknowledged. Raises BusUnavailableError."""
        jetstream = self._connection().jetstream(timeout=SURVEY_TIMEOUT_S)
        acknowledged = self._acknowledged[stream, wanted.durable_name or ""]
        try:
            if stream not in WORK_QUEUES and acknowledged <= (await jetstream.stream_info(stream)).state.last_seq:
                # A work queue holds only messages that were not acknowledged, and accepts no other start position.
                start = {"deliver_policy": DeliverPolicy.BY_START_SEQUENCE, "opt_start_seq": acknowledged + 1}
                wanted = wanted.evolve(**start)
            await jetstream.add_consumer(stream.value, wanted)
        except (TimeoutError, nats.errors.Error, APIError) as error:
            raise unavailable(f"NATS did not create the consumer {wanted.durable_name} of {stream}", error) from error

    async def _acknowledged_on(self, stream: Stream) -> dict[tuple[Stream, str], int]:
        acknowledged = dict[tuple[Stream, str], int]()
        request = partial(self._connection().request, f"$JS.API.CONSUMER.LIST.{stream}", timeout=SURVEY_TIMEOUT_S)
        while True:
            try:
                # nats-py would make objects of all that the consumers are configured for.
                response = orjson.loads((await request(orjson.dumps({"offset": len(acknowledged)}))).data)
                if "error" in response:
                    APIError.from_error(response["error"])
            except (TimeoutError, nats.errors.Error, APIError) as error:
                raise unavailable(f"NATS does not list the consumers of {stream}", error) from error
            page = response["consumers"] or ()
            acknowledged |= {
                (stream, consumer["name"]): consumer.get("ack_floor", {}).get("stream_seq", 0) for consumer in page
            }
            if len(page) < LISTED:
                return acknowledged


def differences(wanted: Any, existing: Any) -> list[str]:
    """The wanted fields whose values differ on the server. Fields that only the server sets are ignored."""
    if isinstance(wanted, ConsumerConfig):
        wanted = _with_start_of(wanted, existing)
    have = asdict(existing)
    fields = {name: (value, have.get(name)) for name, value in asdict(wanted).items() if value is not None}
    if "subjects" in fields:
        subjects, stored = fields["subjects"]
        fields["subjects"] = set(subjects), set(stored or ())
    return [name for name, (value, stored) in fields.items() if value != stored and (value or stored)]


async def _with_waiting_subjects(jetstream: JetStreamContext, wanted: StreamConfig) -> StreamConfig:
    """The wanted stream, with those of its former subjects on which messages still wait."""
    if wanted.retention is not RetentionPolicy.WORK_QUEUE:
        return wanted
    now: StreamConfig | None = await _config_of(jetstream.stream_info(wanted.name or ""))
    dropped = set((now and now.subjects) or ()) - set(wanted.subjects or ())
    if not dropped:
        return wanted
    # Ask only now: the response names every subject that holds a message, and in PARKED each message has its own.
    info = await jetstream.stream_info(wanted.name or "", subjects_filter=">")
    stored = info.state.subjects or {}
    waiting = list[str]()
    for subject in sorted(dropped):
        # An agent's subjects are dropped together.
        root = subject.removesuffix(".*")
        if any(
            stored_subject == root or stored_subject.startswith(f"{root}.") for stored_subject in stored
        ) or await _any_parked(jetstream, root):
            waiting.append(subject)
    return wanted.evolve(subjects=list(dict.fromkeys([*(wanted.subjects or ()), *waiting])))


async def _any_parked(jetstream: JetStreamContext, subject: str) -> bool:
    """Returns True if a parked job would return to this subject of JOBS."""
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
class StreamStatus:
    """A stream of the topology. `hidden` means that this user may not ask about it."""

    name: str
    verdict: TopologyMatch
    different: tuple[str, ...] = ()
    """The settings that differ from the topology."""
    messages: int | None = None
    bytes: int = 0
    max_bytes: int | None = None
    """None for a stream without a limit."""
    copies: int = 1
    late_copies: tuple[str, ...] = ()
    """The servers whose copy is behind, or that are away."""


@dataclass(frozen=True, slots=True)
class ConsumerStatus:
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
    """The number of those that were delivered more than once."""
    readers: int | None = None
    """Requests for messages that are open now."""
    acknowledged: int | None = None
    """The sequence in the stream up to which everything is acknowledged."""


@dataclass(frozen=True, slots=True)
class Survey:
    """The streams and consumers, in the topology's order."""

    streams: tuple[StreamStatus, ...]
    consumers: tuple[ConsumerStatus, ...]


async def survey(client: Client, plan: Plan, *, replicas: int | None = None) -> Survey:
    """Checks every stream and consumer that should exist.

    Args:
        client: a connection. What its user may not ask about is `hidden`.
        plan: the topology's.
        replicas: the copies of each stream; None for any number.
    """
    jetstream = client.jetstream(timeout=SURVEY_TIMEOUT_S)
    streams, consumers = await asyncio.gather(
        asyncio.gather(*(_stream(jetstream, wanted, replicas) for wanted in topology.streams(plan))),
        asyncio.gather(*(_consumer(jetstream, stream, wanted) for stream, wanted in topology.consumers(plan))),
    )
    return Survey(tuple(streams), tuple(consumers))


async def _stream(jetstream: JetStreamContext, wanted: StreamConfig, replicas: int | None) -> StreamStatus:
    name = wanted.name or ""
    info = await _info(jetstream.stream_info(name))
    if not isinstance(info, StreamInfo):
        return StreamStatus(name, info)
    wanted = wanted.evolve(num_replicas=info.config.num_replicas if replicas is None else replicas)
    different = tuple(differences(wanted, info.config))
    limit = info.config.max_bytes
    peers = [] if info.cluster is None else info.cluster.replicas or []
    return StreamStatus(
        name,
        "differs" if different else "right",
        different,
        messages=info.state.messages,
        bytes=info.state.bytes,
        max_bytes=limit if limit and limit > 0 else None,
        copies=1 + len(peers),
        late_copies=tuple(peer.name or "unknown" for peer in peers if peer.offline or not peer.current),
    )


async def _consumer(jetstream: JetStreamContext, stream: Stream, wanted: ConsumerConfig) -> ConsumerStatus:
    name = wanted.durable_name or ""
    info = await _info(jetstream.consumer_info(stream.value, name))
    if not isinstance(info, ConsumerInfo):
        return ConsumerStatus(stream.value, name, info)
    different = tuple(differences(wanted, info.config))
    return ConsumerStatus(
        stream.value,
        name,
        "differs" if different else "right",
        different,
        waiting=info.num_pending,
        in_progress=info.num_ack_pending,
        again=info.num_redelivered,
        readers=info.num_waiting,
        acknowledged=None if info.ack_floor is None else info.ack_floor.stream_seq,
    )


async def _info(request: Awaitable[Info]) -> Info | Literal["missing", "hidden"]:
    try:
        return await request
    except NotFoundError:
        return "missing"
    except (TimeoutError, APIError, nats.errors.Error):
        return "hidden"
