"""Reading a stream without a consumer, asked of a real server."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from datetime import UTC, datetime, timedelta

import nats
import nats.errors
import pytest
import pytest_asyncio
from nats.aio.client import Client
from nats.aio.msg import Msg

from breakwater.kernel.nats import lookup as lookup_module
from breakwater.kernel.nats.deletion import delete_messages
from breakwater.kernel.nats.errors import BusUnavailableError
from breakwater.kernel.nats.lookup import BATCH_MESSAGES, Lookup, StoredMessage, everything_in
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.nats.topology import Plan
from tests.servers import RunningServer

FILTER = "bw.attempts.>"
MEGABYTE = 1_000_000


@pytest_asyncio.fixture
async def client(own_nats_server: RunningServer) -> AsyncGenerator[Client]:
    await provision(own_nats_server.url, Plan(agents={"a": 1}))
    client = await nats.connect(own_nats_server.url, allow_reconnect=False)
    yield client
    await client.close()


async def store(client: Client, messages: Iterable[tuple[str, bytes]]) -> None:
    """Publishes in order. The last one is acknowledged, so all are stored."""
    last = None
    for message in messages:
        if last is not None:
            await client.publish(*last)
        last = message
    assert last is not None
    await client.jetstream().publish(*last)


def interleaved(count: int, subjects: int) -> list[tuple[str, bytes]]:
    """`count` attempts, and a breaker's message after each third of them."""
    return [
        message
        for number in range(count)
        for message in (
            (f"bw.attempts.a.j{number % subjects}.1", b"%d" % number),
            *([("bw.breakers.a.m", b"other")] if number % 3 == 0 else []),
        )
    ]


async def read(client: Client, *, start: datetime | int = 1, subject_filter: str = FILTER) -> list[StoredMessage]:
    return [message async for message in Lookup(lambda: client).scan(Stream.EVENTS, subject_filter, start=start)]


async def test_all_that_matches_comes_once_and_in_order(client: Client) -> None:
    before = datetime.now(UTC) - timedelta(seconds=1)
    await store(client, interleaved(3_000, 50))
    messages = await read(client)
    assert [message.data for message in messages] == [b"%d" % number for number in range(3_000)]
    assert [message.sequence for message in messages[:4]] == [1, 3, 4, 5]
    assert {message.subject for message in messages} == {f"bw.attempts.a.j{number}.1" for number in range(50)}
    assert all(before < message.stored_at <= datetime.now(UTC) + timedelta(seconds=1) for message in messages)
    assert [message.stored_at for message in messages] == sorted(message.stored_at for message in messages)


async def test_it_begins_at_a_sequence_or_a_time(client: Client) -> None:
    await store(client, interleaved(1_500, 50))
    await asyncio.sleep(0.002)  # so that the two halves do not share a microsecond
    await store(client, interleaved(1_500, 50))
    everything = await read(client)
    second_half = everything[1_500]
    assert await read(client, start=second_half.sequence) == everything[1_500:]
    assert await read(client, start=second_half.sequence + 1) == everything[1_501:]
    assert await read(client, start=second_half.stored_at) == everything[1_500:]
    assert await read(client, start=second_half.stored_at - timedelta(days=400)) == everything
    assert await read(client, start=second_half.stored_at + timedelta(days=1)) == []
    assert await read(client, start=everything[-1].sequence + 1) == []


async def test_a_time_without_a_zone_is_refused(client: Client) -> None:
    with pytest.raises(ValueError, match="zone"):
        await read(client, start=datetime(2026, 11, 21))


async def test_it_ends_while_somebody_publishes_on(client: Client) -> None:
    count = 2 * BATCH_MESSAGES + 10
    await store(client, [("bw.attempts.a.j.1", b"before")] * count)
    seen: list[bytes] = []
    async with aclosing(Lookup(lambda: client).scan(Stream.EVENTS, FILTER)) as messages:
        async for message in messages:
            if not seen:
                await store(client, [("bw.attempts.a.j.1", b"after")] * 50)
            seen.append(message.data)
    assert seen == [b"before"] * count


@pytest.mark.parametrize("other", [[], [("bw.breakers.a.m", b"other")]], ids=["empty stream", "others only"])
async def test_nothing_that_matches_is_no_error(client: Client, other: list[tuple[str, bytes]]) -> None:
    if other:
        await store(client, other)
    assert await read(client) == []
    assert await read(client, start=datetime(2026, 1, 1, tzinfo=UTC)) == []
    assert await Lookup(lambda: client).last_of_each(Stream.EVENTS, FILTER) == ()


async def test_deleted_messages_are_stepped_over(client: Client) -> None:
    await store(client, [(f"bw.attempts.a.j.{number}", b"%d" % number) for number in range(1, 31)])
    gone = {1, 2, 10, 11, 12, 20, 30}
    for sequence in gone:
        await client.jetstream().delete_msg(Stream.EVENTS.value, sequence)
    left = [number for number in range(1, 31) if number not in gone]
    assert [message.sequence for message in await read(client)] == left
    assert [message.sequence for message in await read(client, start=10)] == [n for n in left if n >= 10]


async def test_it_ends_when_its_last_message_is_deleted_on_the_way(client: Client) -> None:
    count = BATCH_MESSAGES + 10
    await store(client, [("bw.attempts.a.j.1", b"")] * count)
    seen: list[int] = []
    async with aclosing(Lookup(lambda: client).scan(Stream.EVENTS, FILTER)) as messages:
        async for message in messages:
            if not seen:
                await client.jetstream().delete_msg(Stream.EVENTS.value, count)
                await store(client, [("bw.attempts.a.j.1", b"after")])
            seen.append(message.sequence)
    assert seen == list(range(1, count))


async def test_large_messages_come_in_batches_that_memory_bears(client: Client) -> None:
    bodies = [bytes([number]) * MEGABYTE for number in range(12)]
    await store(client, [(f"bw.attempts.a.j.{number}", body) for number, body in enumerate(bodies)])
    inbox = lookup_module._Inbox(client, Stream.EVENTS)  # pyright: ignore[reportPrivateUsage]  # how much one batch holds
    async with inbox:
        batch, pending = await inbox.batch({"seq": 1, "next_by_subj": FILTER})
    assert sum(len(message.data) for message in batch) <= lookup_module.BATCH_BYTES + MEGABYTE
    assert len(batch) + pending == len(bodies)
    assert [message.data for message in await read(client)] == bodies
    assert [message.data for message in await Lookup(lambda: client).last_of_each(Stream.EVENTS, FILTER)] == bodies


@pytest.mark.parametrize("subjects", [1, 50, 1_024, 1_500])
async def test_the_newest_of_every_subject(client: Client, subjects: int) -> None:
    await store(client, interleaved(3_000, subjects))
    newest = {message.subject: message for message in await read(client)}
    found = await Lookup(lambda: client).last_of_each(Stream.EVENTS, FILTER)
    assert len(found) == subjects
    assert {message.subject: message for message in found} == newest
    assert [message.data for message in found] == [b"%d" % number for number in range(3_000 - subjects, 3_000)]


async def test_a_missing_stream_is_reported(own_nats_server: RunningServer) -> None:
    async with await nats.connect(own_nats_server.url) as client:
        with pytest.raises(BusUnavailableError, match=r"no server holds the stream EVENTS.*breakwater setup"):
            await read(client)
        with pytest.raises(BusUnavailableError, match="no server holds the stream EVENTS"):
            await Lookup(lambda: client).last_of_each(Stream.EVENTS, FILTER)


async def test_a_stream_that_goes_on_the_way_is_no_end(client: Client) -> None:
    await store(client, [("bw.attempts.a.j.1", b"")] * (BATCH_MESSAGES + 1))
    async with aclosing(Lookup(lambda: client).scan(Stream.EVENTS, FILTER)) as messages:
        await anext(messages)
        await client.jetstream().delete_stream(Stream.EVENTS.value)
        with pytest.raises(BusUnavailableError, match="no server holds the stream EVENTS"):
            _ = [message async for message in messages]


async def test_a_server_that_falls_silent_on_the_way_is_reported(
    client: Client, own_nats_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup_module, "LOOKUP_TIMEOUT_S", 0.5)
    await store(client, [("bw.attempts.a.j.1", b"")] * (BATCH_MESSAGES + 1))
    async with aclosing(Lookup(lambda: client).scan(Stream.EVENTS, FILTER)) as messages:
        await anext(messages)
        own_nats_server.kill()
        with pytest.raises(BusUnavailableError, match="EVENTS"):
            _ = [message async for message in messages]


async def test_no_consumer_is_made_and_an_abandoned_scan_leaves_no_subscription(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store(client, interleaved(100, 10))
    inboxes: list[str] = []
    new_inbox = client.new_inbox

    def noted() -> str:
        inboxes.append(new_inbox())
        return inboxes[-1]

    async def consumers() -> int:
        return (await client.jetstream().stream_info(Stream.EVENTS.value)).state.consumer_count

    before = await consumers()
    monkeypatch.setattr(client, "new_inbox", noted)
    async with aclosing(Lookup(lambda: client).scan(Stream.EVENTS, FILTER)) as messages:
        assert (await anext(messages)).sequence == 1
        assert await consumers() == before
    assert len(await Lookup(lambda: client).last_of_each(Stream.EVENTS, FILTER)) == 10
    assert len(inboxes) == 2
    for inbox in inboxes:
        with pytest.raises(nats.errors.NoRespondersError):
            await client.request(inbox, b"is anybody there?")


async def test_a_scan_may_end_before_the_last_message(client: Client) -> None:
    await store(client, interleaved(30, 3))
    everything = await read(client)
    part = [
        message
        async for message in Lookup(lambda: client).scan(
            Stream.EVENTS, FILTER, start=everything[3].sequence, up_to=everything[9].sequence
        )
    ]
    assert part == everything[3:10]
    assert [one async for one in Lookup(lambda: client).scan(Stream.EVENTS, FILTER, start=9, up_to=8)] == []


async def test_the_last_on_each_of_some_subjects(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_module, "SUBJECTS_AT_ONCE", 3)
    await store(client, interleaved(100, 10))
    subjects = [*(f"bw.attempts.a.j{number}.1" for number in range(8)), "bw.attempts.a.none.1"]
    found = {one.subject: one.data async for one in Lookup(lambda: client).last_on(Stream.EVENTS, subjects)}
    assert found == {f"bw.attempts.a.j{number}.1": b"%d" % (90 + number) for number in range(8)}
    assert [one async for one in Lookup(lambda: client).last_on(Stream.EVENTS, [])] == []
    assert [one async for one in Lookup(lambda: client).last_on(Stream.EVENTS, ["bw.attempts.none"])] == []


async def test_messages_are_counted_by_subject(client: Client) -> None:
    await store(client, interleaved(10, 2))
    lookup = Lookup(lambda: client)
    assert await lookup.counts(Stream.EVENTS, FILTER) == {"bw.attempts.a.j0.1": 5, "bw.attempts.a.j1.1": 5}
    assert await lookup.counts(Stream.EVENTS, "bw.guards.>") == {}


async def test_the_state_of_a_stream_is_as_the_client_reads_it_and_a_missing_stream_is_named(client: Client) -> None:
    await store(client, [("bw.attempts.a.e.1", b"1"), ("bw.attempts.a.e.2", b"22")])
    info = await client.jetstream().stream_info(Stream.EVENTS)
    facts = await Lookup(lambda: client).facts(Stream.EVENTS)
    assert info.created is not None
    # Counters and breakers of earlier versions have this name of their log.
    assert (facts.identity, facts.created) == (f"{info.created.timestamp():.6f}", info.created)
    assert (facts.first, facts.last, facts.bytes) == (1, 2, info.state.bytes)
    await client.jetstream().delete_stream(Stream.EVENTS)
    with pytest.raises(BusUnavailableError, match="no server holds the stream EVENTS"):
        await Lookup(lambda: client).facts(Stream.EVENTS)


async def test_a_whole_scan_up_to_a_message_that_was_deleted_ends_before_it(client: Client) -> None:
    await store(client, interleaved(6, 2))

    async def whole(up_to: int, start: int = 1) -> list[int]:
        scan = Lookup(lambda: client).scan(Stream.EVENTS, FILTER, start=start, up_to=up_to, complete=True)
        return [message.sequence async for message in scan]

    [*earlier, last] = [message.sequence for message in await read(client)]
    assert await whole(last) == [*earlier, last]
    assert await delete_messages(lambda: client, Stream.EVENTS, [last, last]) == 1
    assert await whole(last) == earlier, "it was the last of all"
    everything = Lookup(lambda: client).scan(Stream.EVENTS, everything_in(Stream.EVENTS), complete=True)
    assert [message.sequence async for message in everything][-1] == last - 1
    await store(client, [("bw.breakers.a.m", b"other")])
    assert await whole(last) == earlier, "others follow"
    assert (await whole(last, last), await whole(last, last + 1)) == ([], [])
    assert (await Lookup(lambda: client).facts(Stream.EVENTS)).deleted == 1


async def test_what_was_read_is_freed_without_a_collection(client: Client) -> None:
    await store(client, interleaved(100, 5))
    lookup = Lookup(lambda: client)
    gc.collect()
    gc.disable()
    try:
        assert await lookup.next(Stream.EVENTS, FILTER, 1) is not None
        async with aclosing(lookup.scan(Stream.EVENTS, FILTER)) as messages:
            assert await anext(messages) is not None
        assert len(await read(client)) == 100
        del messages
        left = [thing for thing in gc.get_objects() if isinstance(thing, StoredMessage | Msg)]
        assert len(left) <= 1, left  # nats-py keeps the last answer to a request
    finally:
        gc.enable()
