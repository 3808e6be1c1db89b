"""Deliveries that somebody else holds are given back in their name."""

from __future__ import annotations

from breakwater.kernel.nats.delivery import held_deliveries
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.nats.subjects import Stream, job
from breakwater.kernel.nats.topology import Plan, worker_consumer
from tests.helpers import nats_client
from tests.servers import RunningServer

AGENT = "writer"
DURABLE = worker_consumer(AGENT)


async def test_what_is_held_is_delivered_again_at_once_and_what_is_acknowledged_or_waits_is_not_held(
    own_nats_server: RunningServer,
) -> None:
    await provision(own_nats_server.url, Plan(agents={AGENT: 10, "other": 10}))
    async with nats_client(own_nats_server.url) as dead, nats_client(own_nats_server.url) as alive:
        jetstream = dead.jetstream()
        for number in range(6):
            await jetstream.publish(job(AGENT), str(number).encode(), headers={"Nats-Msg-Id": f"m{number}"})
            await jetstream.publish(job("other"), b"another agent's")
        theirs = await jetstream.pull_subscribe_bind(DURABLE, Stream.JOBS.value)
        fetched = await theirs.fetch(5, timeout=10)
        await fetched[0].ack_sync()
        await fetched[3].nak(delay=600)
        # By two workers, at the same time.
        found, twice = [
            [one async for one in held_deliveries(Lookup(lambda: alive), Stream.JOBS, DURABLE, [job(AGENT)])]
            for _ in range(2)
        ]
        assert [one.data for one in found] == [b"1", b"2", b"3", b"4"]
        assert found[0].headers["Nats-Msg-Id"] == "m1"
        assert found[0].published_at.replace(microsecond=0) == fetched[1].metadata.timestamp.replace(microsecond=0)
        await dead.close()
        for one in (*found[1:], *twice[1:]):
            await one.retry_in(0)
        ours = await alive.jetstream().pull_subscribe_bind(DURABLE, Stream.JOBS.value)
        again: set[bytes] = set()
        while len(again) < 4:
            again |= {one.data for one in await ours.fetch(10, timeout=10)}
        assert again == {b"2", b"3", b"4", b"5"}
        info = await ours.consumer_info()
        assert (info.num_ack_pending, info.num_redelivered) == (5, 3)
