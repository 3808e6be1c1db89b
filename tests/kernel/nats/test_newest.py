"""Reading a stream from its end, asked of a real server."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from nats.aio.client import Client

from breakwater.kernel.nats import lookup as lookup_module
from breakwater.kernel.nats.lookup import Lookup, StoredMessage
from breakwater.kernel.nats.subjects import Stream
from tests.kernel.nats.test_scan import FILTER, client, interleaved, read, store

__all__ = ["client"]


async def newest_of(client: Client, limit: int, since: datetime, subject_filter: str = FILTER) -> list[int]:
    found = await Lookup(lambda: client).newest(
        Stream.EVENTS, subject_filter, limit=limit, since=since, read=lambda one: int(one.data)
    )
    assert len(found) <= limit
    return found


LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("limit", [1, 7, 100, 1_000, 5_000])
async def test_the_newest_come_first_and_no_more_than_asked_for(client: Client, limit: int) -> None:
    await store(client, interleaved(3_000, 50))
    assert await newest_of(client, limit, LONG_AGO) == list(range(2_999, -1, -1))[:limit]


async def test_the_newest_are_found_where_they_are_few_and_far_back(client: Client) -> None:
    await store(client, [*interleaved(2, 2), *[("bw.breakers.a.m", b"0")] * 2_000])
    assert await newest_of(client, 10, LONG_AGO) == [1, 0]
    assert await newest_of(client, 10, LONG_AGO, "bw.attempts.b.>") == []


async def test_the_newest_go_back_to_a_time_and_no_further(client: Client) -> None:
    await store(client, interleaved(300, 3))
    await asyncio.sleep(0.002)  # so that the two halves do not share a microsecond
    await store(client, [("bw.attempts.a.j.1", b"%d" % number) for number in range(300, 600)])
    since = (await read(client))[300].stored_at
    assert await newest_of(client, 1_000, since) == list(range(599, 299, -1))
    assert await newest_of(client, 10, datetime.now(UTC) + timedelta(days=1)) == []
    with pytest.raises(ValueError, match="zone"):
        await newest_of(client, 1, datetime(2026, 11, 21))


async def test_what_is_not_read_is_made_up_for_by_what_is_older(client: Client) -> None:
    await store(client, interleaved(1_000, 5))
    found = await Lookup(lambda: client).newest(
        Stream.EVENTS,
        FILTER,
        limit=3,
        since=LONG_AGO,
        read=lambda one: int(one.data) if int(one.data) % 300 == 0 else None,
    )
    assert found == [900, 600, 300]


async def test_no_more_of_the_stream_is_read_than_the_newest_take(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup_module, "LEAST_SPAN", 16)
    await store(client, [("bw.attempts.a.j.1", b"%d" % number) for number in range(2_000)])
    looked_at = list[int]()

    def note(message: StoredMessage) -> int:
        looked_at.append(message.sequence)
        return message.sequence

    assert len(await Lookup(lambda: client).newest(Stream.EVENTS, FILTER, limit=20, since=LONG_AGO, read=note)) == 20
    assert len(looked_at) == 16 + 32
