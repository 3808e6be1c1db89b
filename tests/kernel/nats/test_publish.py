"""Messages that we write to NATS ourselves are those that its client would write."""

from __future__ import annotations

import asyncio

import nats
import nats.errors
import psutil
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from breakwater.kernel.nats.core import publish, publish_empty
from tests.helpers import until
from tests.servers import RunningServer

MANY = 400
HEADERS = {"ce-id": "é 1", "Nats-Expected-Last-Subject-Sequence": "0", "spaced": " a  b "}


@pytest.mark.parametrize(
    ("subject", "payload", "reply", "headers"),
    [
        ("a.b", b"text\r\nPUB a 0", "", None),
        ("a.b", b"", "back.to", None),
        ("a.é", "ü".encode(), "", HEADERS),
        ("a.b", b"x" * 100_000, "back.to", HEADERS),
        ("a.b", b"x", "", {}),
        ("a.b", b"x", "", {"with": "a break\r\nof: lines"}),
    ],
)
async def test_a_message_arrives_as_the_client_sends_it(
    nats_server: RunningServer, subject: str, payload: bytes, reply: str, headers: dict[str, str] | None
) -> None:
    client = await nats.connect(nats_server.url)
    subscription = await client.subscribe("a.*")
    await client.publish(subject, payload, reply, headers)
    await publish(client, subject, payload, reply, headers)
    expected, received = [await subscription.next_msg(timeout=30) for _ in range(2)]
    assert _parts(received) == _parts(expected)
    await client.close()


def _parts(message: Msg) -> tuple[object, ...]:
    return message.subject, message.reply, message.data, message.headers


@pytest.mark.parametrize("subject", ["", "a b", "a\r\nPUB c 0\r\n\r\n", "a\tb"])
async def test_a_subject_that_would_break_the_protocol_is_refused(nats_server: RunningServer, subject: str) -> None:
    client = await nats.connect(nats_server.url)
    for place in ((subject, b"x"), ("a", b"x", subject or " ")):
        with pytest.raises(nats.errors.BadSubjectError):
            await publish(client, *place)
    with pytest.raises(nats.errors.MaxPayloadError):
        await publish(client, "a", b"x" * (client.max_payload + 1))
    await client.close()


async def test_a_closed_connection_takes_none(nats_server: RunningServer) -> None:
    client: Client = await nats.connect(nats_server.url)
    await asyncio.wait_for(client.close(), 30)
    with pytest.raises(nats.errors.ConnectionClosedError):
        await publish(client, "a", b"x")
    with pytest.raises(nats.errors.ConnectionClosedError):
        await publish_empty(client, ["a"])


async def test_publishers_wait_for_a_server_that_takes_nothing(own_nats_server: RunningServer) -> None:
    client = await nats.connect(own_nats_server.url, pending_size=1_000_000, flush_timeout=30)
    came = list[int]()

    async def count(message: Msg) -> None:
        came.append(int(message.data[:4]))

    async def publish_all() -> None:
        for number in range(MANY):
            await publish(client, "a", b"%04d" % number + b"x" * 50_000)

    await client.subscribe("a", cb=count)
    await client.flush()
    server = psutil.Process(own_nats_server.pid)
    server.suspend()
    try:
        publishing = asyncio.create_task(publish_all())
        await asyncio.wait({publishing}, timeout=1)
        assert not publishing.done()
        assert client.pending_data_size < 2_000_000
    finally:
        server.resume()
    await publishing
    await until(lambda: len(came) == MANY)
    assert came == list(range(MANY))
    await client.close()


async def test_messages_without_content_arrive_together(nats_server: RunningServer) -> None:
    client = await nats.connect(nats_server.url)
    subscription = await client.subscribe("a.*")
    await publish_empty(client, ["a.1", "a.2"])
    received = [await subscription.next_msg(timeout=30) for _ in range(2)]
    assert [_parts(message) for message in received] == [("a.1", "", b"", None), ("a.2", "", b"", None)]
    await client.close()
