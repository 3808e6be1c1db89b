"""What a durable consumer has delivered and nobody has acknowledged yet, to whomever it was delivered."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

from nats.aio.msg import Msg

from breakwater.bus.delivery import Delivery
from breakwater.bus.lookup import LOOKUP_TIMEOUT_S, Connection, answered, scan
from breakwater.contracts.subjects import Stream


async def held_deliveries(
    connection: Connection, stream: Stream, durable: str, subjects: Iterable[str]
) -> AsyncGenerator[Delivery]:
    """The deliveries that are held, which may be given back in the name of their holder: NATS delivers them again.

    Those of a stream that loses what is acknowledged: what is left below the last delivered sequence is held.

    Args:
        connection: gives the connection, once there is one.
        stream: a work queue.
        durable: the consumer's name.
        subjects: that it reads.

    Raises:
        BusUnavailable: NATS does not answer, or has no such consumer.
    """
    client = connection()
    with answered(durable):
        info = await client.jetstream(timeout=LOOKUP_TIMEOUT_S).consumer_info(stream.value, durable)
    floor, delivered = info.ack_floor, info.delivered
    if not info.num_ack_pending or floor is None or delivered is None:
        return
    begin, end = floor.stream_seq + 1, delivered.stream_seq
    for subject in subjects:
        async with aclosing(scan(connection, stream, subject, start=begin, up_to=end)) as stored:
            async for found in stored:
                # The server finds what is given back by its place in the stream. How many deliveries ago it was sent,
                # it only compares with how many there were.
                place = f"1.{found.sequence}.{delivered.consumer_seq}.{int(found.stored_at.timestamp()) * 10**9}.0"
                reply = f"$JS.ACK.{stream}.{durable}.{place}"
                yield Delivery(Msg(client, found.subject, reply, found.data, dict(found.headers)))
