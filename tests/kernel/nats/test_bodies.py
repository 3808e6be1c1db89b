"""Large bodies on a real server: none is removed or given up that a job or a dead letter still needs."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import AsyncMock, patch

import orjson
import pytest
import pytest_asyncio
from nats.aio.client import Client
from nats.js.api import ClusterInfo, PeerInfo

from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.bodies import BodyReader, BodyReference, BodyWriter, Leftovers
from breakwater.kernel.nats.contract import DeadLetter
from breakwater.kernel.nats.delivery import Delivery, dead_letter
from breakwater.kernel.nats.errors import BusUnavailableError, StreamFullError
from breakwater.kernel.nats.lookup import Lookup, StoredMessage
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import Header, Stream
from breakwater.kernel.nats.topology import Plan, worker_consumer
from breakwater.kernel.security.encryption import Cipher, new_key
from tests.helpers import nats_client, until
from tests.servers import RunningServer

BODY = b"x" * 2_000_000
REFERENCE = BodyReference.of(BODY, encrypted=False, job_bytes=len(BODY))


@pytest_asyncio.fixture
async def client(own_nats_server: RunningServer) -> AsyncGenerator[Client]:
    await provision(own_nats_server.url, Plan(agents={"a": 1}))
    async with nats_client(own_nats_server.url) as client:
        yield client


def writer_of(client: Client) -> BodyWriter:
    return BodyWriter(Publisher(lambda: client, "worker"))


async def queue_job(client: Client) -> None:
    headers = {Header.BODY.value: str(REFERENCE), Header.EXECUTION_ID.value: "j1"}
    await client.jetstream().publish(subjects.job("a"), b"{}", headers=headers)


async def remove_leftovers(client: Client, lookup: Lookup) -> int:
    """What a worker does every half hour, twice, two hours later."""
    leftovers = Leftovers(lookup, writer_of(client))
    later = datetime.now(UTC) + timedelta(hours=2)
    return await leftovers.remove(later) + await leftovers.remove(later)


async def test_a_body_that_a_lagging_replica_lacks_is_not_lost(client: Client) -> None:
    await writer_of(client).put(REFERENCE, BODY, "a", "j1")
    lookup = Lookup(lambda: client)
    no_message = AsyncMock(return_value=None)
    no_batch = AsyncMock(return_value=([], 0))
    with (
        patch("breakwater.kernel.nats.lookup.Lookup._find", no_message),
        patch("breakwater.kernel.nats.lookup._Inbox.batch", no_batch),
        pytest.raises(BusUnavailableError, match="lags"),
    ):
        await BodyReader(lookup).read(REFERENCE)
    assert await BodyReader(lookup).read(REFERENCE) == BODY


async def test_the_body_of_a_queued_job_stays_though_the_clocks_of_the_leaders_differ(client: Client) -> None:
    await queue_job(client)
    # As if the clock of JOBS' leader were behind: the job seems older than its body.
    await writer_of(client).put(REFERENCE, BODY, "a", "j1")
    assert await remove_leftovers(client, Lookup(lambda: client)) == 0
    assert await BodyReader(Lookup(lambda: client)).read(REFERENCE) == BODY


async def test_the_body_of_a_job_that_is_parked_and_woken_during_each_look_stays(client: Client) -> None:
    class BusyLookup(Lookup):
        """While JOBS is read from its beginning, the job is on PARKED; then it is back in its queue."""

        async def scan(self, stream: Stream, *args: Any, **options: Any) -> AsyncGenerator[StoredMessage]:
            is_first_part = stream is Stream.JOBS and isinstance(options["start"], datetime)
            if is_first_part:
                await client.jetstream().purge_stream("JOBS")
            async with aclosing(super().scan(stream, *args, **options)) as stored:
                async for message in stored:
                    yield message
            if is_first_part:
                await queue_job(client)

    await writer_of(client).put(REFERENCE, BODY, "a", "j1")
    await queue_job(client)
    assert await remove_leftovers(client, BusyLookup(lambda: client)) == 0


async def test_no_leftover_is_removed_while_a_replica_lags(client: Client) -> None:
    await writer_of(client).put(REFERENCE, BODY, "a", "j1")
    lookup = Lookup(lambda: client)
    jetstream = type(client.jetstream())
    stream_info = jetstream.stream_info

    async def with_a_late_replica(*args: Any, **options: Any) -> Any:
        info = await stream_info(*args, **options)
        info.cluster = ClusterInfo(leader="n1", replicas=[PeerInfo(name="n2", current=False, lag=7)])
        return info

    with (
        patch.object(jetstream, "stream_info", with_a_late_replica),
        pytest.raises(BusUnavailableError, match=r"replicas of \w+ lag: n2"),
    ):
        await remove_leftovers(client, lookup)
    assert await BodyReader(lookup).read(REFERENCE) == BODY
    assert await remove_leftovers(client, lookup) == 1


async def test_a_dead_letter_that_is_written_again_after_a_crash_still_has_its_body(client: Client) -> None:
    job = orjson.dumps({"agent": "a", "job_id": "j1", "prompt": "x" * 5_000_000})
    await client.jetstream().publish(subjects.job("a"), job)
    subscription = await client.jetstream().pull_subscribe_bind(worker_consumer("a"), "JOBS")
    [message] = await subscription.fetch(1)
    cipher = Cipher([new_key()])
    publisher = Publisher(lambda: client, "worker", cipher)
    for _ in range(2):
        now = datetime.now(UTC)
        await dead_letter(
            publisher, Delivery(message), reason="error", error="no", agent="a", at=now, execution_id="j1"
        )
    lookup = Lookup(lambda: client)
    stored = [message async for message in lookup.scan(Stream.DLQ, "bw.dlq.>")]
    assert len(stored) == 1
    kept = DeadLetter.model_validate_json(cipher.decrypt_document(stored[0].data))
    reference = BodyReference.parse(kept.headers[Header.BODY.value])
    assert reference is not None
    body = await BodyReader(lookup).read(reference)
    assert cipher.decrypt_document(body) == job
    assert await remove_leftovers(client, lookup) == 0


async def test_a_store_that_is_full_to_the_last_byte_can_be_emptied(client: Client) -> None:
    jetstream = client.jetstream()
    await writer_of(client).put(REFERENCE, BODY, "a", "j1")
    info = await jetstream.stream_info("OBJ_bodies")
    info.config.max_bytes = info.state.bytes + 20
    await jetstream.update_stream(info.config)
    with pytest.raises(StreamFullError):
        await writer_of(client).keep(REFERENCE, "a", "j1", until=datetime.now(UTC))
    await writer_of(client).remove(REFERENCE.name)

    async def is_empty() -> bool:
        return (await jetstream.stream_info("OBJ_bodies")).state.messages == 0

    await until(is_empty, "an empty object store")


async def test_chunks_that_come_after_their_removal_are_leftovers(client: Client) -> None:
    await writer_of(client).put(REFERENCE, BODY, "a", "j1")
    await queue_job(client)
    await client.jetstream().publish(subjects.body_chunks("late"), b"chunk")
    lookup = Lookup(lambda: client)
    assert await remove_leftovers(client, lookup) == 1
    assert await BodyReader(lookup).read(REFERENCE) == BODY
    late = await lookup.last(Stream.BODIES, subjects.body_chunks("late"))
    assert late is None or late.data == b""
