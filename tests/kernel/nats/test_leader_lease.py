"""Turns: one has it, the others wait; it is given back, lapses, and is taken over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress

import pytest
from nats.aio.client import Client

from breakwater.kernel.nats.leader_lease import LeaderLease, LeaseTimes
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import ALERTER_LEADER, Stream
from breakwater.kernel.nats.topology import Plan
from breakwater.kernel.process import background
from tests.helpers import nats_client
from tests.servers import RunningServer

TIMES = LeaseTimes(lease_s=1.5, renew_s=0.2, stop_s=0.4, watch_s=0.05)


@pytest.fixture
async def client(own_nats_server: RunningServer) -> AsyncGenerator[Client]:
    await provision(own_nats_server.url, Plan(agents={"writer": 1}))
    async with nats_client(own_nats_server.url) as connected:
        yield connected


class Work:
    """Who works, as an observer sees it."""

    def __init__(self) -> None:
        self.working: list[str] = []
        self.history: list[str] = []
        self.most = 0

    def of(self, name: str) -> Callable[[], object]:
        async def work() -> None:
            self.working.append(name)
            self.history.append(name)
            self.most = max(self.most, len(self.working))
            try:
                await asyncio.Event().wait()
            finally:
                self.working.remove(name)

        return work

    async def reaches(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.02)


def lease_of(client: Client, name: str) -> LeaderLease:
    publisher = Publisher(lambda: client, "test")
    return LeaderLease(Lookup(lambda: client), publisher, Stream.ALERTER, ALERTER_LEADER, name, times=TIMES)


def start(client: Client, work: Work, name: str) -> asyncio.Task[None]:
    lease = lease_of(client, name)
    return asyncio.create_task(lease.run(work.of(name)))  # pyright: ignore[reportArgumentType]


async def test_one_works_and_when_it_stops_another_one_goes_on(client: Client) -> None:
    work = Work()
    tasks = {name: start(client, work, name) for name in "abc"}
    try:
        await work.reaches(lambda: len(work.working) == 1)
        [first] = work.working
        await asyncio.sleep(TIMES.lease_s * 1.5)
        assert work.history == [first]
        await background.stop(tasks.pop(first))
        await work.reaches(lambda: len(work.working) == 1)
        assert work.working != [first]
        assert work.most == 1
    finally:
        await background.stop(*tasks.values())


async def test_work_that_loses_a_cancellation_is_stopped(client: Client) -> None:
    begun = asyncio.Event()

    async def deaf() -> None:
        begun.set()
        # As `asyncio.wait_for` of Python 3.11 does with one that arrives just as its wait ends.
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    running = asyncio.create_task(lease_of(client, "a").run(deaf))
    await begun.wait()
    running.cancel()
    assert (await asyncio.wait([running], timeout=10))[1] == set()
    assert running.cancelled()


async def test_a_turn_whose_holder_died_lapses(client: Client) -> None:
    dead = Publisher(lambda: client, "test")
    await dead.raw(ALERTER_LEADER, b"one that was killed", {})
    work = Work()
    task = start(client, work, "a")
    try:
        started = asyncio.get_running_loop().time()
        await work.reaches(lambda: work.working == ["a"])
        assert asyncio.get_running_loop().time() - started >= TIMES.lease_s * 0.9
    finally:
        await background.stop(task)


async def test_who_has_lost_the_turn_stops_working(client: Client) -> None:
    work = Work()
    task = start(client, work, "a")
    try:
        await work.reaches(lambda: work.working == ["a"])
        await Publisher(lambda: client, "test").raw(ALERTER_LEADER, b"another one", {})
        await work.reaches(lambda: work.working == [])
        # The other one never renews it.
        await work.reaches(lambda: work.working == ["a"])
    finally:
        await background.stop(task)


async def test_work_that_fails_gives_the_turn_back_and_is_begun_again(client: Client) -> None:
    begun = 0

    async def fails_once() -> None:
        nonlocal begun
        begun += 1
        if begun == 1:
            raise RuntimeError("nobody foresaw this")
        await asyncio.Event().wait()

    task = asyncio.create_task(lease_of(client, "a").run(fails_once))
    try:
        async with asyncio.timeout(60):
            while begun < 2:
                await asyncio.sleep(0.02)
    finally:
        await background.stop(task)


async def test_without_the_bus_nobody_works_for_longer_than_a_lease(
    client: Client, own_nats_server: RunningServer
) -> None:
    work = Work()
    task = start(client, work, "a")
    try:
        await work.reaches(lambda: work.working == ["a"])
        own_nats_server.kill()
        await work.reaches(lambda: work.working == [])
        await own_nats_server.restart_async()
        await work.reaches(lambda: work.working == ["a"])
    finally:
        await background.stop(task)
