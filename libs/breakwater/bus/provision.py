"""Brings the server's streams and consumers to what the topology says. The only place that creates or changes them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from time import monotonic
from typing import Any

import nats
import nats.errors
from nats.js import JetStreamContext
from nats.js.api import ConsumerInfo, RetentionPolicy, StreamConfig, StreamInfo
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from breakwater.bus import topology
from breakwater.bus.core import tls_options
from breakwater.bus.errors import BusError
from breakwater.bus.permissions import inbox_prefix
from breakwater.bus.topology import Plan
from breakwater.contracts.subjects import Stream

ANSWER_S = 10.0
"""How long one request may take; a cluster that has just begun or lost its leader leaves some without an answer."""

TRIES = 4

NO_STORAGE, NO_PEERS = 10047, 10005
PEERS_S = 10.0
"""For how long too few nodes are no refusal: those of a cluster that has just begun do not know of one another yet."""

LEAST_BYTES = 1024**2


async def provision(url: str, plan: Plan, *, replicas: int = 1, answer_s: float = ANSWER_S) -> tuple[str, ...]:
    """Creates what is missing and updates what differs; what is right is left alone.

    An agent that is no longer configured loses its subject in JOBS, so that publishing to it fails at once; but only
    when none of its jobs wait there or in PARKED, as they would be stranded. Nothing that holds messages is taken away.

    Args:
        url: of the server, with the user that may do this.
        plan: what is to be there.
        replicas: of each stream.
        answer_s: how long a request may take before it is made again, up to four times in all.

    Returns:
        What was done, a line each; empty when everything was right.

    Raises:
        ConfigError: a file of `BREAKWATER_TLS_*` can't be used.
        BusError: the server refuses, or does not answer; which, its text explains.
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
                lambda config, _, s=stream_name.value: jetstream.add_consumer(s, config),
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
        return [f"created {what} (with less {less}: NATS has no more storage)" if less else f"created {what}"]
    if not differences(wanted, existing):
        return []
    stored = (await _answered(what, lambda: put(wanted, existing))).config
    # A limit that NATS has no storage for is as it was.
    changed = [name for name in differences(wanted, existing) if name in differences(stored, existing)]
    return [f"updated {what} ({', '.join(changed)})"] if changed else []


async def _with_room(jetstream: JetStreamContext, wanted: StreamConfig, now: StreamConfig | None) -> StreamInfo:
    """Creates or changes a stream; where the server has no storage for its limit in bytes, as it was, or with less.

    The server sets the limits of all streams aside in full. A machine with little disk is no reason to have none.
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
    """Makes a request until it is answered. Each may be made twice: it says what is to be, not what to change."""
    tries, began = 0, monotonic()
    while True:
        try:
            return await request()
        except (nats.errors.TimeoutError, ServiceUnavailableError) as error:
            tries += 1
            if tries == TRIES:
                raise BusError(f"{what}: NATS does not answer, after {TRIES} requests") from error
            await asyncio.sleep(0.5)
        except APIError as error:
            if error.err_code == NO_PEERS and monotonic() - began < PEERS_S:
                await asyncio.sleep(0.5)
                continue
            raise BusError(f"{what}: NATS refuses it: {error.description}") from error


def differences(wanted: Any, existing: Any) -> list[str]:
    """The fields that were asked for and are otherwise on the server, which fills in many more of its own."""
    have = asdict(existing)
    asked = {name: value for name, value in asdict(wanted).items() if value is not None}
    return [name for name, value in asked.items() if not _same(name, value, have.get(name))]


def _same(name: str, wanted: Any, existing: Any) -> bool:
    if name == "subjects":
        return set(wanted) == set(existing or ())
    return wanted == existing or (not wanted and not existing)


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
    """Whether a job sleeps that goes back to a subject of JOBS."""
    kind, _, agent = subject.rpartition(".")
    if kind != "bw.jobs":
        return False
    try:
        info = await jetstream.stream_info(Stream.PARKED.value, subjects_filter=f"bw.parked.{agent}.>")
    except NotFoundError:
        return False
    return bool(info.state.subjects)
