"""Messages that we read from NATS ourselves are those that its client would read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise, zip_longest
from typing import Any

import nats
import nats.errors
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.protocol.parser import Parser

from breakwater.kernel.nats import core
from breakwater.kernel.nats.core import parse_headers, subscribe
from tests.helpers import until
from tests.servers import RunningServer

OURS, THEIRS, NOBODYS = 1, 2, 3


def as_sent(sid: int, reply: str, headers: bytes | None, payload: bytes) -> bytes:
    """A message as the server writes it."""
    place = f"a.{sid} {sid}{reply}".encode()
    if headers is None:
        return b"MSG %b %d\r\n%b\r\n" % (place, len(payload), payload)
    block = b"NATS/1.0" + headers + b"\r\n\r\n"
    return b"HMSG %b %d %d\r\n%b%b\r\n" % (place, len(block), len(block) + len(payload), block, payload)


commands = st.just(b"+OK\r\n") | st.builds(
    as_sent,
    st.sampled_from([OURS, OURS, OURS, THEIRS, NOBODYS]),
    st.sampled_from(["", " back.to", " 7"]),
    st.sampled_from([None, b"", b"\r\nce-id: 1", b"\r\na:x\r\nb:  y ", b" 404 No Messages", b" 100\r\na: b"]),
    st.sampled_from([b"", b"{}", b"\r\nMSG a 1 1\r\nx\r\n", b"x" * 1_000]),
)


async def messages_in(
    pieces: Sequence[bytes], parser: type[Parser], *, reads: Sequence[bool] = ()
) -> dict[int, list[tuple[object, ...]]]:
    """The messages of each subscription, read from a connection that delivers bytes in these pieces.

    With `reads`, they come by its stream, and the client's task reads that after those pieces.
    """
    client = Client()
    client._status = Client.CONNECTED
    came: dict[int, list[Msg]] = {OURS: [], THEIRS: []}
    for sid, messages in came.items():
        client._subs[sid] = Subscription(client, sid)
        if sid == OURS:
            client._subs[sid]._pending_queue = core._PassesOn(messages.append)
    client._ps = reader = parser(client)
    client._transport = transport = TcpTransport()
    transport._io_reader = stream = asyncio.StreamReader()
    await reader.parse(b"")
    for piece, is_read in zip_longest(pieces, reads[: len(pieces)], fillvalue=True) if reads else ():
        stream.feed_data(piece)
        while is_read and stream._buffer:
            await reader.parse(await stream.read(2_000))
    while stream._buffer:
        await reader.parse(await stream.read(2_000))
    for piece in () if reads else pieces:
        await reader.parse(piece)
    assert not reader.buf
    queue = client._subs[THEIRS]._pending_queue
    came[THEIRS] += [queue.get_nowait() for _ in range(queue.qsize())]
    return {sid: [(one.subject, one.reply, one.data, one.headers) for one in came[sid]] for sid in came}


@given(
    sent=st.lists(commands, max_size=8),
    cuts=st.lists(st.integers(0, 5_000), max_size=6),
    reads=st.lists(st.booleans(), max_size=6),
)
def test_messages_are_read_as_the_client_reads_them_however_they_come_in_pieces(
    sent: list[bytes], cuts: list[int], reads: list[bool]
) -> None:
    stream = b"".join(sent)
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[begin:end] for begin, end in pairwise(places)]
    theirs = asyncio.run(messages_in(pieces, Parser))
    assert asyncio.run(messages_in(pieces, core._Parser)) == theirs
    assert asyncio.run(messages_in(pieces, core._Parser, reads=[True, *reads])) == theirs


async def test_a_connection_that_is_in_use_goes_on_with_the_message_that_it_has_begun(
    nats_server: RunningServer,
) -> None:
    client, came = await nats.connect(nats_server.url), list[bytes]()
    await client.subscribe("slow")
    await client._ps.parse(b"MSG slow 1 4\r\nab")
    subscribe(client, "ours", lambda message: came.append(message.data))
    await client._ps.parse(b"cd\r\nMSG ours 2 2\r\nef\r\nMS")
    await client._ps.parse(b"G ours 2 2\r\ngh\r\n")
    assert client._subs[1]._pending_queue.get_nowait().data == b"abcd"
    await client.publish("ours", b"ij")
    await until(lambda: came == [b"ef", b"gh", b"ij"])
    assert client.stats["in_msgs"] == 4
    await client.close()


async def test_what_comes_is_read_without_waking_the_clients_task_also_after_a_reconnect(
    nats_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, came = await nats.connect(nats_server.url, reconnect_time_wait=0.01), asyncio.Queue[bytes]()
    subscribe(client, "ours", lambda message: came.put_nowait(message.data))

    async def hears_without_it() -> bool:
        await client.flush()  # the task reads the answer to this
        with monkeypatch.context() as patched:
            patched.setattr(core._Parser, "parse", None)
            await client.publish("ours", b"news")
            return await asyncio.wait_for(came.get(), 30) == b"news"

    assert await hears_without_it()
    given_up: Any = client._transport
    await client._process_op_err(nats.errors.StaleConnectionError())
    given_up._io_reader.feed_data(b"MSG ours 1 4\r\nlate\r\n")
    await until(lambda: client.stats["reconnects"] == 1)
    assert await hears_without_it()
    await client.close()


@pytest.mark.parametrize(
    "lines",
    [
        b"ce-id: e1:1\r\nce-source: breakwater/worker\r\n\r\n",
        b"a: 1\r\na: 2\r\n\r\n",
        b"tight:1\r\n\r\n",
        b"empty: \r\nother: x\r\n\r\n",
        b"a:  spaced  words \r\n\r\n",
        b"a: \xc3\xa9\r\nb: \xff\r\n\r\n",
        b"\xc3\xa9: 1\r\nb: 2\r\n\r\n",
        b"two words: 1\r\nb: 2\r\n\r\n",
        b"no colon\r\nb: 2\r\n\r\n",
        b"a: 1\nb: 2\r\n\r\n",
        b"a: 1\r\n",
        b"\r\n",
        b"",
    ],
)
def test_headers_are_read_as_the_client_reads_them(lines: bytes) -> None:
    assert parse_headers(lines) == Client._parse_header_lines(lines)
