"""What happens when a stream has reached its limit in bytes: nothing that was accepted goes, but for old alerts."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from datetime import UTC, datetime

import nats
import pytest
import pytest_asyncio
from nats.aio.client import Client

from breakwater.cli.doctor_nats import full_finding
from breakwater.jobs.contract.execution import Progress
from breakwater.kernel.nats.errors import AlreadyDecidedError, EventStreamFullError, StreamFullError
from breakwater.kernel.nats.provision import provision, survey
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.nats.topology import Plan
from tests.helpers import FIRST
from tests.servers import RunningServer

NOW = datetime(2026, 11, 21, 10, 0, tzinfo=UTC)
EVENT = Progress(execution_id="j", job_id="j", agent="a", state="queued", at=NOW)
KEEPING = {Stream.JOBS: "bw.jobs.a", Stream.EVENTS: "bw.executions.a.{}", Stream.RESULTS: "bw.results.{}"} | {
    Stream.DLQ: "bw.dlq.error.{}"
}


def plan(max_bytes: int) -> Plan:
    return Plan(agents={"a": 1}, max_bytes=dict.fromkeys([*KEEPING, Stream.ALERTS], max_bytes))


@pytest_asyncio.fixture
async def client(own_nats_server: RunningServer) -> AsyncGenerator[Client]:
    await provision(own_nats_server.url, plan(100_000))
    client = await nats.connect(own_nats_server.url)
    yield client
    await client.close()


async def fill(client: Client, stream: Stream) -> int:
    """Publishes until the stream takes no more; how many it holds then."""
    publisher, number = Publisher(lambda: client, "tests"), 0
    first = {} if stream is Stream.JOBS else FIRST
    for size in (10_000, 10):
        try:
            while True:
                await publisher.raw(KEEPING[stream].format(number), bytes(size), first)
                number += 1
        except StreamFullError:
            continue
    return number


async def test_what_was_accepted_stays_and_what_has_to_be_recorded_waits(
    client: Client, own_nats_server: RunningServer
) -> None:
    publisher, jetstream = Publisher(lambda: client, "worker"), client.jetstream()
    for stream, subject in KEEPING.items():
        held = await fill(client, stream)
        with pytest.raises(EventStreamFullError, match=r"limits\.\*_max_bytes"):
            await publisher.event(subject.format("more"), EVENT, id="j", at=NOW)
        if stream is not Stream.JOBS:
            # A writer that comes second learns that it does.
            with pytest.raises(AlreadyDecidedError):
                await publisher.event(subject.format(0), EVENT, id="j", at=NOW, once=True)
        # A smaller limit removes nothing.
        await provision(own_nats_server.url, replace(plan(100_000), max_bytes={stream: 1_000}))
        assert (await jetstream.stream_info(stream.value)).state.messages == held > 10
    found = {one.name: full_finding(one) for one in (await survey(client, plan(1_000))).streams}
    said = {name: (finding.verdict, finding.text) for name, finding in found.items() if finding is not None}
    assert set(said) == {stream.value for stream in KEEPING}
    assert said["EVENTS"][0] == "fail"
    assert "100% full" in said["EVENTS"][1]
    assert "until the oldest events have expired" in said["EVENTS"][1]
    await provision(own_nats_server.url, plan(1_000_000))
    for subject in KEEPING.values():
        await publisher.event(subject.format("more"), EVENT, id="j", at=NOW)


async def test_the_oldest_alerts_go_so_that_a_flood_does_not_silence_the_next(client: Client) -> None:
    jetstream = client.jetstream()
    for number in range(20):
        await jetstream.publish("bw.alerts.breaker_open", b"%d" % number + bytes(10_000))
    state = (await jetstream.stream_info("ALERTS")).state
    assert (state.first_seq > 1, state.last_seq) == (True, 20)


async def test_limits_that_nats_has_no_storage_for_are_smaller_and_leave_some_to_all_streams(
    client: Client, own_nats_server: RunningServer
) -> None:
    endless = plan(1 << 50)
    assert await provision(own_nats_server.url, endless) == (), "all are as they were"
    for stream in Stream:
        await client.jetstream().delete_stream(stream.value)
    did = await provision(own_nats_server.url, endless)
    assert "created stream EVENTS (with a lower max_bytes: NATS has no more storage)" in did
    assert await provision(own_nats_server.url, endless) == ()
    found = [one for one in (await survey(client, endless)).streams if one.name in plan(1).max_bytes]
    assert {one.different for one in found} == {("max_bytes",)}
    assert all(1 << 20 <= (one.max_bytes or 0) < 1 << 50 for one in found)
