"""Three nodes, of which some stand still or are cut off: what is not agreed upon, and what a replica does not have."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from unittest.mock import AsyncMock, patch

import nats
import psutil
import pytest
import pytest_asyncio
from nats.aio.client import Client

from breakwater.kernel.nats.errors import AlreadyDecidedError, BusUnavailableError
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import Header, Stream
from breakwater.kernel.nats.topology import Plan
from tests.chaos.network import Link
from tests.chaos.plane import start_cluster
from tests.helpers import until, wait_until
from tests.server_sources import RunningServer

pytestmark = pytest.mark.long

ATTEMPTS = "bw.attempts.a.*.1"
ONCE = {Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: "0"}
WITH_ID = {Header.MSG_ID.value: "t"}


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes, the links between them, and a client of the leader of EVENTS, which reaches no other node."""

    nodes: Mapping[str, RunningServer]
    links: Mapping[tuple[str, str], Link]
    leader: str
    client: Client

    @property
    def others(self) -> list[str]:
        return [name for name in self.nodes if name != self.leader]

    def signal_others(self, number: signal.Signals) -> None:
        for name in self.others:
            os.kill(self.nodes[name].pid, number)
        if number == signal.SIGSTOP:  # what runs on another core goes on for a moment
            for name in self.others:
                node = psutil.Process(self.nodes[name].pid)
                wait_until(lambda node=node: node.status() == psutil.STATUS_STOPPED, f"the stop of {name}")

    async def publish(self, subject: str, headers: dict[str, str], timeout_s: float = 5.0) -> bool:
        """Whether it was stored by an earlier try."""
        try:
            publisher = Publisher(lambda: self.client, "worker")
            return (await publisher.raw(subject, b"{}", headers, timeout_s=timeout_s)).duplicate
        except AlreadyDecidedError:
            return True


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncGenerator[Cluster]:
    links: dict[tuple[str, str], Link] = {}
    nodes = await start_cluster(tmp_path, 3, links)
    await provision(nodes["nats-1"].url, Plan(agents={"a": 1}), replicas=3)
    first = await nats.connect(nodes["nats-1"].url)
    found = (await first.jetstream().stream_info(Stream.EVENTS.value)).cluster
    await first.close()
    assert found is not None
    assert found.leader is not None
    client = await nats.connect(nodes[found.leader].url)
    yield Cluster(nodes, links, found.leader, client)
    await client.close()
    for node in nodes.values():
        node.stop()
    for link in links.values():
        await link.close()


async def test_what_is_not_agreed_upon_is_neither_refused_nor_decided(cluster: Cluster) -> None:
    tries = ("bw.attempts.a.j.1", ONCE), ("bw.breakers.a.m", WITH_ID)
    cluster.signal_others(signal.SIGSTOP)
    try:
        for subject, headers in tries:
            with pytest.raises(BusUnavailableError, match="did not acknowledge"):
                await cluster.publish(subject, headers, 0.5)
            # The leader knows of the first try, and not what will become of it.
            with pytest.raises(BusUnavailableError, match="not decided yet"):
                await cluster.publish(subject, headers)
    finally:
        cluster.signal_others(signal.SIGCONT)

    async def stored(subject: str, headers: dict[str, str]) -> bool:
        try:
            return await cluster.publish(subject, headers)
        except BusUnavailableError:
            return False

    for one in tries:
        await until(partial(stored, *one), "the first try to be stored")


async def test_a_replica_that_was_cut_off_is_not_taken_for_the_whole(cluster: Cluster) -> None:
    subjects = ["bw.attempts.a.1.1", "bw.executions.a.1", "bw.attempts.a.2.1", "bw.attempts.a.2.2", "bw.executions.a.2"]
    cut_off = cluster.others[0]
    async with await nats.connect(cluster.nodes[cut_off].url) as client:

        async def read(*, complete: bool, up_to: int | None = 5) -> list[str]:
            found = Lookup(lambda: client).scan(Stream.EVENTS, ATTEMPTS, up_to=up_to, complete=complete)
            return [message.subject async for message in found]

        for subject in subjects[:2]:
            await cluster.publish(subject, ONCE)

        async def answers_alone() -> bool:
            for ends, link in cluster.links.items():
                if cut_off in ends:
                    link.become("reset")
            try:
                return await read(complete=False) == subjects[:1]
            except BusUnavailableError:
                # It answers for the stream only a while after it has all of it.
                for link in cluster.links.values():
                    link.become("open")
                return False

        await until(answers_alone, "the replica to answer, cut off")
        for subject in subjects[2:]:
            await cluster.publish(subject, ONCE)
        assert await read(complete=False) == subjects[:1]
        # Only the first message is known to have reached it.
        with pytest.raises(BusUnavailableError, match=r"lags: it has [12] of 5 messages"):
            await read(complete=True)
        # Where nobody has asked the leader yet, it can't be asked.
        with pytest.raises(BusUnavailableError, match="did not respond"):
            await read(complete=True, up_to=None)
        with pytest.raises(BusUnavailableError, match="did not respond"):
            await Lookup(lambda: client).last_of_each(Stream.EVENTS, ATTEMPTS, complete=True)
        with patch.object(Lookup, "_end", AsyncMock(return_value=(3, datetime.now(UTC)))):
            with pytest.raises(BusUnavailableError, match="lags: it has 1 of 3 messages"):
                await read(complete=True, up_to=None)
            with pytest.raises(BusUnavailableError, match="lags: it has 0 of 3 messages"):
                await Lookup(lambda: client).last_of_each(Stream.EVENTS, ATTEMPTS, complete=True)
        for link in cluster.links.values():
            link.become("open")

        attempts = [subjects[0], subjects[2]]

        async def is_whole() -> bool:
            try:
                found = await Lookup(lambda: client).last_of_each(Stream.EVENTS, ATTEMPTS, complete=True)
                asked = await read(complete=True, up_to=None)
                return await read(complete=True) == asked == [message.subject for message in found] == attempts
            except BusUnavailableError:
                return False

        await until(is_whole, "the replica to have the rest")
