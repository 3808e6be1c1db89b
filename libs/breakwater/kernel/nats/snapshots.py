"""Copies of whole streams by the server's own snapshots, and their restoring, which nats-py does not offer.

A stream that is restored is a new one to the server. Its metadata keeps when the stream was created that it continues,
because ClickHouse's rows belong to that one.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import AsyncGenerator, AsyncIterable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import nats.errors
import orjson
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.core import parse_headers
from breakwater.kernel.nats.errors import BusError, translated_errors, unavailable
from breakwater.kernel.nats.lookup import CONTINUES, StoredMessage, created_at
from breakwater.kernel.nats.subjects import Stream

CHUNK_BYTES = 128 * 1024
"""The size in which the server sends a stream. It sends up to 8 MB before it waits for an acknowledgement."""

ANSWER_S = 30.0
"""Timeout of a request, and the longest silence of a server that sends a stream."""

RESTORE_S = 600.0
"""Timeout of the end of a restore, for which the server reads the whole stream once."""

RESTORED_FROM = "breakwater.backup"
"""Metadata of a stream: the id of the backup that it was restored from."""

UNFINISHED = "breakwater.restoring"
"""Metadata of the first stream that is restored, until all is: the id of the backup."""

_NO_MESSAGE = 10037
"""JetStream's error code for a message that is not stored."""

_NO_STATUS = b"NATS/1.0\r\n"

FIRST_RESTORED = Stream.ADVISORIES
"""Small, and without a consumer that a plane would miss."""


class NotStoredError(BusError):
    """A stream has no message of a sequence, or none after it."""


@dataclass(frozen=True, slots=True)
class StoredStream:
    """A stream and its state; messages and bytes are numbers, `first` and `last` sequences."""

    name: str
    config: Mapping[str, Any]
    created: str
    """When it, or the stream that it continues, was created: RFC 3339."""
    messages: int
    bytes: int
    first: int
    last: int

    @property
    def metadata(self) -> Mapping[str, str]:
        """Its metadata; empty if there is none."""
        return self.config.get("metadata") or {}


@dataclass(frozen=True, slots=True)
class StoredConsumer:
    """A durable consumer, and the sequence up to which everything is acknowledged."""

    name: str
    config: Mapping[str, Any]
    acknowledged: int


async def list_streams(client: Client) -> list[StoredStream]:
    """All streams of the plane. Raises BusError."""
    streams: list[StoredStream] = []
    while True:
        page = await _ask(client, "$JS.API.STREAM.LIST", {"offset": len(streams)})
        streams += [_stream(info) for info in page["streams"] or ()]
        if not page["streams"] or len(streams) >= page["total"]:
            return streams


async def list_consumers(client: Client, stream: str) -> list[StoredConsumer]:
    """The durable consumers of a stream. Raises BusError."""
    consumers: list[StoredConsumer] = []
    count = 0
    while True:
        page = await _ask(client, f"$JS.API.CONSUMER.LIST.{stream}", {"offset": count})
        infos = page["consumers"] or ()
        count += len(infos)
        consumers += [
            StoredConsumer(info["name"], info["config"], info.get("ack_floor", {}).get("stream_seq", 0))
            for info in infos
            if info["config"].get("durable_name")
        ]
        if not infos or count >= page["total"]:
            return consumers


@asynccontextmanager
async def snapshot(client: Client, stream: StoredStream) -> AsyncGenerator[tuple[StoredStream, AsyncGenerator[bytes]]]:
    """Begins a copy of a stream, without its consumers.

    Yields:
        The stream as it was then, and the bytes of the copy, which may have some later messages, too. The server waits
        for a reader that takes its time, but ends the copy when 5 seconds pass between two chunks.

    Raises:
        BusError: the server refuses or stops.
    """
    subject = f"{subjects.SNAPSHOTS[:-1]}{secrets.token_hex(8)}"
    with translated_errors(stream.name):
        subscription = await client.subscribe(subject)
        await client.flush()
        await client.flush()  # nats-py's PING overtakes a subscription in its buffer
    try:
        request = {"deliver_subject": subject, "no_consumers": True, "chunk_size": CHUNK_BYTES, "jsck": False}
        answer = await _ask(client, f"$JS.API.STREAM.SNAPSHOT.{stream.name}", request)
        begun = _stream({**answer, "created": stream.created})
        async with aclosing(_chunks(client, subscription, stream.name)) as chunks:
            yield begun, chunks
    finally:
        await _unsubscribe(subscription)


async def _chunks(client: Client, subscription: Subscription, stream: str) -> AsyncGenerator[bytes]:
    while True:
        message = await _next(subscription, f"the copy of {stream}", ANSWER_S)
        status = (message.headers or {}).get("Status", "204")
        if status != "204":
            description = (message.headers or {}).get("Description", "")
            raise BusError(f"NATS stopped the copy of {stream}: {status} {description}".strip())
        if not message.data:
            return
        yield message.data
        if message.reply:
            with translated_errors(stream):
                await client.publish(message.reply)


async def restore(
    client: Client, stream: StoredStream, chunks: AsyncIterable[bytes], *, backup: str, replicas: int, unfinished: bool
) -> None:
    """Creates a stream from a copy.

    Args:
        client: a connection of a user that may.
        stream: as `snapshot` gave it.
        chunks: the bytes of the copy, each at most `CHUNK_BYTES` long.
        backup: the id of the backup.
        replicas: copies of the stream in a cluster.
        unfinished: marks the stream as part of a plane that is not complete yet.

    Raises:
        BusError: the server refuses, such as a stream that exists.
    """
    marks = {CONTINUES: stream.created, RESTORED_FROM: backup, **({UNFINISHED: backup} if unfinished else {})}
    metadata = {name: text for name, text in stream.metadata.items() if not name.startswith("_nats.")}
    config = {**stream.config, "num_replicas": replicas, "metadata": metadata | marks}
    state = {"messages": stream.messages, "bytes": stream.bytes, "first_seq": stream.first, "last_seq": stream.last}
    answer = await _ask(client, f"$JS.API.STREAM.RESTORE.{stream.name}", {"config": config, "state": state})
    # A request would get a header on its way between two accounts, and the server would take that for a part.
    reply = f"{subjects.SNAPSHOTS[:-1]}{secrets.token_hex(8)}"
    with translated_errors(stream.name):
        subscription = await client.subscribe(reply)
        await client.flush()
        await client.flush()
    try:
        async for chunk in chunks:
            await _send(client, subscription, answer["deliver_subject"], chunk, reply, ANSWER_S)
        restored = await _send(client, subscription, answer["deliver_subject"], b"", reply, RESTORE_S)
        _raise_error(orjson.loads(restored), f"the copy of {stream.name}")
    finally:
        await _unsubscribe(subscription)


async def _send(
    client: Client, subscription: Subscription, subject: str, chunk: bytes, reply: str, timeout_s: float
) -> bytes:
    with translated_errors(subject):
        await client.publish(subject, chunk, reply=reply)
    answer = await _next(subscription, "a part of a stream", timeout_s)
    if chunk and answer.data:
        _raise_error(orjson.loads(answer.data), "a part of a stream")
    return answer.data


async def create_consumer(client: Client, stream: str, consumer: StoredConsumer, *, redelivers_all: bool) -> None:
    """Creates a consumer that continues behind what was acknowledged. Raises BusError.

    Args:
        client: a connection of a user that may.
        stream: its stream.
        consumer: with its position.
        redelivers_all: True for a work queue, whose messages are all unacknowledged.
    """
    config = {name: value for name, value in consumer.config.items() if name not in ("opt_start_seq", "opt_start_time")}
    metadata = {name: text for name, text in config.get("metadata", {}).items() if not name.startswith("_nats.")}
    start = {"deliver_policy": "by_start_sequence", "opt_start_seq": consumer.acknowledged + 1}
    config |= {"num_replicas": 0, "metadata": metadata, **({"deliver_policy": "all"} if redelivers_all else start)}
    subject = f"$JS.API.CONSUMER.DURABLE.CREATE.{stream}.{consumer.name}"
    await _ask(client, subject, {"stream_name": stream, "config": config})


async def messages_after(client: Client, stream: str, sequence: int) -> AsyncGenerator[StoredMessage]:
    """Yields the messages of a stream behind a sequence that it has now, as its leader knows them. Raises BusError."""
    last = (await _ask(client, f"$JS.API.STREAM.INFO.{stream}", {}))["state"]["last_seq"]
    while sequence < last:
        try:
            request = {"seq": sequence + 1, "next_by_subj": ">"}
            message = (await _ask(client, f"$JS.API.STREAM.MSG.GET.{stream}", request))["message"]
        except NotStoredError:
            return
        sequence = message["seq"]
        if sequence > last:
            return
        raw_headers = base64.b64decode(message.get("hdrs") or "")
        yield StoredMessage(
            subject=message["subject"],
            data=base64.b64decode(message.get("data") or ""),
            sequence=sequence,
            headers=parse_headers(raw_headers[len(_NO_STATUS) :]) if raw_headers.startswith(_NO_STATUS) else {},
            stored_at=datetime.fromisoformat(message["time"]),
        )


async def put_back(client: Client, subject: str, data: bytes, headers: Mapping[str, str]) -> None:
    """Publishes a message again that a copy lacks, apart from what held when it was published first.

    Raises BusUnavailableError.
    """
    valid_headers = {name: text for name, text in headers.items() if not name.startswith("Nats-Expected-")}
    with translated_errors(subject):
        await client.jetstream(timeout=ANSWER_S).publish(subject, data, headers=valid_headers)


async def finish(client: Client, stream: StoredStream) -> None:
    """Removes the mark of an unfinished restore. Raises BusError."""
    metadata = {name: text for name, text in stream.metadata.items() if name != UNFINISHED}
    await _ask(client, f"$JS.API.STREAM.UPDATE.{stream.name}", {**stream.config, "metadata": metadata})


def _stream(info: Mapping[str, Any]) -> StoredStream:
    config = info["config"]
    state = info["state"]
    counts = state["messages"], state["bytes"], state["first_seq"], state["last_seq"]
    return StoredStream(config["name"], config, created_at(info), *counts)


async def _ask(client: Client, subject: str, request: Mapping[str, Any]) -> Any:
    try:
        answer = orjson.loads((await client.request(subject, orjson.dumps(request), timeout=ANSWER_S)).data)
    except (TimeoutError, nats.errors.Error, OSError) as error:
        raise unavailable(f"NATS does not answer {subject}, or this user may not ask", error) from error
    _raise_error(answer, subject)
    return answer


def _raise_error(answer: Mapping[str, Any], request: str) -> None:
    if error := answer.get("error"):
        if error.get("err_code") == _NO_MESSAGE:
            raise NotStoredError(f"NATS has no message for {request}")
        raise BusError(f"NATS refuses {request}: {error.get('description') or error.get('code')}")


async def _next(subscription: Subscription, expected: str, timeout_s: float) -> Msg:
    try:
        return await subscription.next_msg(timeout=timeout_s)
    except (TimeoutError, nats.errors.Error, OSError) as error:
        raise unavailable(f"NATS sends no answer to {expected}", error) from error


async def _unsubscribe(subscription: Subscription) -> None:
    with translated_errors(subscription.subject):
        await subscription.unsubscribe()
