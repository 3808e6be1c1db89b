from __future__ import annotations

from collections.abc import AsyncGenerator
from datetime import UTC, datetime

import pytest
import pytest_asyncio
from nats.aio.client import Client

from breakwater.jobs.contract.execution import Progress
from breakwater.kernel.nats.errors import AlreadyDecidedError, BusUnavailableError, PublishRefusedError
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.nats.topology import Plan
from tests.helpers import nats_client
from tests.servers import RunningServer

NOW = datetime(2026, 11, 21, 10, 0, tzinfo=UTC)
EVENT = Progress(execution_id="j", job_id="j", agent="a", state="queued", at=NOW)


@pytest_asyncio.fixture
async def client(own_nats_server: RunningServer) -> AsyncGenerator[Client]:
    await provision(own_nats_server.url, Plan(agents={"a": 1}))
    async with nats_client(own_nats_server.url) as client:
        yield client


async def test_an_event_carries_its_cloudevents_attributes(client: Client) -> None:
    stored = await Publisher(lambda: client, "worker").event(
        "bw.executions.a.j", EVENT, id="j", at=NOW, traceparent="t"
    )
    assert (stored.stream, stored.duplicate) == ("EVENTS", False)
    found = await Lookup(lambda: client).last(Stream.EVENTS, "bw.executions.a.j")
    assert found is not None
    assert found.data == EVENT.json_bytes()
    assert found.sequence == stored.sequence
    expected = {
        "ce-id": "j",
        "ce-type": "breakwater.Progress",
        "ce-source": "breakwater/worker",
        "ce-time": "2026-11-21T10:00:00.000Z",
        "ce-specversion": "1.0",
        "traceparent": "t",
    }
    assert expected.items() <= dict(found.headers).items()


async def test_a_subject_that_takes_one_message_takes_one(client: Client) -> None:
    publisher = Publisher(lambda: client, "worker")
    await publisher.event("bw.executions.a.j", EVENT, id="j", at=NOW, once=True)
    with pytest.raises(AlreadyDecidedError):
        await publisher.event("bw.executions.a.j", EVENT, id="j", at=NOW, once=True)


async def test_the_same_event_published_again_is_stored_once(client: Client) -> None:
    publisher = Publisher(lambda: client, "breaker")
    first = await publisher.event("bw.breakers.a.m", EVENT, id="t", at=NOW)
    again = await publisher.event("bw.breakers.a.m", EVENT, id="t", at=NOW)
    assert (again.duplicate, again.sequence) == (True, first.sequence)


async def test_a_subject_that_no_stream_takes_is_refused(client: Client) -> None:
    with pytest.raises(PublishRefusedError, match="no stream takes"):
        await Publisher(lambda: client, "request").raw("bw.jobs.nobody", b"{}", {})


async def test_a_message_over_the_servers_limit_is_refused(client: Client) -> None:
    with pytest.raises(PublishRefusedError, match="message limit"):
        await Publisher(lambda: client, "request").raw("bw.jobs.a", b"x" * (client.max_payload + 1), {})


async def test_a_server_that_is_away_is_reported_as_such_and_nothing_is_sent_later(
    client: Client, own_nats_server: RunningServer
) -> None:
    publisher = Publisher(lambda: client, "request")
    own_nats_server.kill()
    with pytest.raises(BusUnavailableError):
        await publisher.raw("bw.jobs.a", b"{}", {}, timeout_s=0.5)
    with pytest.raises(BusUnavailableError):
        await publisher.raw("bw.jobs.a", b"{}", {}, timeout_s=0.5)
    with pytest.raises(BusUnavailableError):
        await Lookup(lambda: client).last(Stream.EVENTS, "bw.executions.a.j")
    await own_nats_server.restart_async()
    assert await Lookup(lambda: client).last(Stream.JOBS, "bw.jobs.a") is None


async def test_nothing_found_is_none(client: Client) -> None:
    assert await Lookup(lambda: client).last(Stream.RESULTS, "bw.results.none") is None
