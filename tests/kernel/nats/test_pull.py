"""The open request of a consumer, on a real server."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator

import psutil
import pytest
import pytest_asyncio
from nats.aio.client import Client

from breakwater.jobs.contract.job import Job
from breakwater.kernel.nats import pull, subjects
from breakwater.kernel.nats.broker import Batches, Each, ServiceApp, make_broker
from breakwater.kernel.nats.delivery import Delivery
from breakwater.kernel.nats.errors import BusUnavailableError
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.nats.pull import Pull
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.nats.topology import ACK_WAIT_S, Plan, worker_consumer
from breakwater.kernel.process import background
from breakwater.records.channels import JOBS
from tests.helpers import nats_client, until
from tests.servers import RunningServer

PLAN = Plan(agents={"a": 100})


@pytest_asyncio.fixture
async def client(own_nats_server: RunningServer) -> AsyncGenerator[Client]:
    await provision(own_nats_server.url, PLAN)
    async with nats_client(own_nats_server.url) as client:
        yield client


def pull_of(client: Client) -> Pull:
    return Pull(lambda: client, Stream.JOBS, worker_consumer("a"))


async def publish(client: Client, *bodies: bytes) -> None:
    for body in bodies:
        await client.jetstream().publish(subjects.job("a"), body)


async def bodies_of(pulled: Pull, most: int = 100, wait_s: float = 10.0) -> list[bytes]:
    found = await pulled.fetch(most, wait_s, linger_s=0.2)
    for delivery in found:
        await delivery.ack_sync()
    return [delivery.data for delivery in found]


async def test_a_request_stays_open_over_many_fetches(client: Client) -> None:
    pulled = pull_of(client)
    assert await pulled.fetch(100, 0.05) == []
    asked = client.stats["out_msgs"]
    assert await pulled.fetch(100, 0.05) == []
    assert client.stats["out_msgs"] == asked, "the server was asked again, while it had not answered"
    await publish(client, b"1")
    assert [one.data for one in await pulled.fetch(100, 10, linger_s=0)] == [b"1"]
    assert client.stats["out_msgs"] == asked + 1, "besides the message"


async def test_silence_is_no_answer_and_a_message_that_waits_is_one(
    client: Client, own_nats_server: RunningServer
) -> None:
    there, missing = pull_of(client), Pull(lambda: client, Stream.JOBS, "no-such-consumer")
    server = psutil.Process(own_nats_server.pid)
    os.killpg(server.pid, signal.SIGSTOP)
    try:
        await until(lambda: server.status() == psutil.STATUS_STOPPED, "the server to stand still")
        assert await asyncio.gather(there.answers(), missing.answers()) == [False, False]
    finally:
        os.killpg(server.pid, signal.SIGCONT)
    assert await there.answers()
    with pytest.raises(BusUnavailableError):
        await missing.answers()
    await publish(client, b"waits")
    assert await there.answers()
    assert await bodies_of(there) == [b"waits"]


async def test_messages_gather_at_the_server_and_come_together(client: Client) -> None:
    pulled = pull_of(client)
    assert await pulled.fetch(100, 0.05) == []
    fetching, came = asyncio.create_task(pulled.fetch(100, 10, linger_s=2.0)), client.stats["in_msgs"] + 2
    await publish(client, b"0")
    await until(lambda: client.stats["in_msgs"] == came, "the first message has come, and the proof that it is stored")
    await publish(client, *(b"%d" % number for number in range(1, 20)))
    assert client.stats["in_msgs"] == came + 19, "besides the proofs that they are stored, a message came by itself"
    assert len(await fetching) == 20


async def test_while_messages_come_all_the_time_each_fetch_asks_once(client: Client) -> None:
    pulled = pull_of(client)
    await publish(client, *(b"%d" % number for number in range(pull.BUSY)))
    assert len(await bodies_of(pulled)) == pull.BUSY
    await publish(client, *(b"%d" % number for number in range(pull.BUSY)))
    asked = client.stats["out_msgs"]
    assert len(await pulled.fetch(100, 10, linger_s=0.2)) == pull.BUSY
    assert client.stats["out_msgs"] == asked + 1
    # When they have ceased to come, the next one is waited for as ever.
    fetching = asyncio.create_task(pulled.fetch(100, 60, linger_s=0.05))
    await until(lambda: client.stats["out_msgs"] == asked + 3, "it has asked in vain, and again")
    await publish(client, b"after a while")
    assert [one.data for one in await fetching] == [b"after a while"]


async def test_what_comes_after_a_rest_is_fetched_soon_although_much_came_before(client: Client) -> None:
    batches = Batches(100, {0.0: 0.0, 1.0: 5.0})
    assert [batches.note(99, at) for at in (1.0, 2.0)] == [0.0, 5.0]
    pulled = pull_of(client)
    assert await batches.fetch(pulled, 0.05, 1) == []
    await publish(client, b"1")
    begun = time.monotonic()
    [[delivery]] = await batches.fetch(pulled, 10, 1)
    assert delivery.data == b"1"
    assert time.monotonic() - begun < 4


async def test_messages_are_fetched_in_order_and_at_most_as_many_as_wanted(client: Client) -> None:
    pulled = pull_of(client)
    await publish(client, b"1", b"2", b"3", b"4", b"5")
    assert await bodies_of(pulled) == [b"1", b"2", b"3", b"4", b"5"]
    await publish(client, b"6", b"7", b"8")
    assert await bodies_of(pulled, 2) == [b"6", b"7"]
    assert await bodies_of(pulled, 2) == [b"8"]


async def test_a_fetch_ends_when_it_has_all_that_is_wanted(client: Client) -> None:
    pulled = pull_of(client)
    await publish(client, b"1", b"2")
    while (await client.jetstream().consumer_info(Stream.JOBS, pulled.durable)).num_pending < 2:
        await asyncio.sleep(0.01)  # a consumer hears of messages a moment after they are stored
    begun = time.monotonic()
    assert len(await pulled.fetch(2, 60.0, linger_s=60.0)) == 2
    assert time.monotonic() - begun < 30


async def test_a_consumer_that_is_not_there_is_reported(client: Client) -> None:
    with pytest.raises(BusUnavailableError, match=r"nobody: .*503"):
        await Pull(lambda: client, Stream.JOBS, "nobody").fetch(1, 10)


async def test_after_a_restart_of_nats_it_is_asked_again(client: Client, own_nats_server: RunningServer) -> None:
    pulled = pull_of(client)
    assert await pulled.fetch(100, 0.05) == []
    await own_nats_server.restart_async()
    await publish(client, b"1")
    begun = time.monotonic()
    while not (found := await bodies_of(pulled, wait_s=0.1)):
        assert time.monotonic() - begun < pull.OPEN_S, "it was asked when the lost request would have ended"
    assert found == [b"1"]


async def test_a_request_that_no_server_knows_of_is_made_again(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull, "GRACE_S", 0.1 - pull.OPEN_S)
    monkeypatch.setattr(background, "aligned_delay", lambda every_s: every_s)
    pulled = pull_of(client)
    assert await pulled.fetch(1, 0.05) == []
    asked = client.stats["out_msgs"]
    assert await pulled.fetch(1, 0.2) == []
    assert client.stats["out_msgs"] > asked


async def test_what_nobody_has_fetched_is_given_back_at_the_end(client: Client) -> None:
    pulled = pull_of(client)
    assert await pulled.fetch(100, 0.05) == []
    await publish(client, b"1", b"2", b"3")
    assert await bodies_of(pulled, 1) == [b"1"]
    await pulled.close()
    begun = time.monotonic()
    assert sorted(await bodies_of(pull_of(client))) == [b"2", b"3"]
    assert time.monotonic() - begun < ACK_WAIT_S / 2


async def test_what_the_server_delivers_again_soon_is_not_handled(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled = pull_of(client)
    assert await pulled.fetch(2, 0.05) == []
    await publish(client, b"1", b"2")
    assert [delivery.data for delivery in await pulled.fetch(1, 10)] == [b"1"]
    monkeypatch.setattr(pull, "KEPT_S", 0.0)
    await asyncio.sleep(0.01)
    assert await pulled.fetch(1, 0.05) == []


async def test_no_more_are_handled_at_once_than_the_concurrency_although_more_are_delivered(
    client: Client, own_nats_server: RunningServer
) -> None:
    at_once, most, done, go = 0, 0, 0, asyncio.Event()

    broker = make_broker(own_nats_server.url, "worker")

    @broker.subscriber(JOBS, durable=worker_consumer("a"), pull_sub=Each(lambda: concurrency))
    async def handle(delivery: Delivery[Job]) -> None:
        nonlocal at_once, most, done
        at_once += 1
        most = max(most, at_once)
        await go.wait()
        await delivery.ack_sync()
        at_once -= 1
        done += 1

    concurrency = 10
    app = ServiceApp(broker)
    await app.start()
    await publish(client, *(b"%d" % number for number in range(7)))
    await until(lambda: at_once == 7, "seven are handled")
    concurrency = 8  # the consumer still delivers a hundred
    # One, for the fetch that waits since three were free; two that came in one packet would both be its.
    await publish(client, b"7")
    await until(lambda: at_once == 8, "eight are handled")
    await publish(client, *(b"%d" % number for number in range(8, 14)))
    go.set()
    await until(lambda: done == 14, "all are handled")
    await app.stop()
    assert most == 8


async def test_what_comes_while_it_asks_wakes_it(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    pulled = pull_of(client)
    request = pulled._request

    async def slowly(count: int, open_s: float | None) -> None:
        await request(count, open_s)
        await until(lambda: pulled._waiting, "the message")

    monkeypatch.setattr(pulled, "_request", slowly)
    await publish(client, b"1")
    begun = time.monotonic()
    assert [one.data for one in await pulled.fetch(100, 5.0, linger_s=0)] == [b"1"]
    assert time.monotonic() - begun < 2.5, "the message was there, and the fetch slept"


async def test_an_error_that_comes_while_it_asks_is_raised_at_once(client: Client) -> None:
    pulled = pull_of(client)
    assert await pulled.fetch(100, 0.05) == []
    pulled._error = "409 gone"
    pulled._changed.set()
    begun = time.monotonic()
    with pytest.raises(BusUnavailableError, match="409 gone"):
        await pulled.fetch(100, 5.0)
    assert time.monotonic() - begun < 2.5
