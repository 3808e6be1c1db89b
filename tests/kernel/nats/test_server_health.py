"""A NATS that could not write a stream, and what is said of it until it is started again."""

from __future__ import annotations

import resource
from collections.abc import Generator
from contextlib import AsyncExitStack
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client

from breakwater.cli.doctor_nats import nats_findings
from breakwater.kernel.nats.core import unhealthy_servers
from breakwater.kernel.nats.errors import BusUnavailableError
from breakwater.kernel.nats.permissions import GRANTS, inbox_prefix, render
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.topology import Plan
from breakwater.local.plane import PlaneLocation
from breakwater.local.ports import free_port
from tests.nats_node import start_nats
from tests.server_sources import RunningServer

ASKING = ("request", "worker", "breaker", "budget", "alerter", "sink", "setup")
ROOM = 4_000
"""Bytes that a file may have at most while no more is written: the kernel refuses what a full disk does."""


@pytest.fixture
def server(tmp_path: Path) -> Generator[RunningServer]:
    port = free_port()
    settings = f'listen: "127.0.0.1:{port}"\nserver_name: "breakwater"\njetstream {{ store_dir: "{tmp_path}" }}\n'
    running = start_nats(tmp_path, settings + render(GRANTS, lambda user: f'"secret-of-{user}"'), port)
    running.wait_until_ready()
    yield running
    running.stop()


def url(server: RunningServer, user: str) -> str:
    return server.url.replace("://", f"://{user}:secret-of-{user}@")


async def connected(server: RunningServer, user: str, stack: AsyncExitStack) -> Client:
    client = await nats.connect(url(server, user), inbox_prefix=inbox_prefix(user))
    stack.push_async_callback(client.close)
    return client


@pytest.mark.long(about_s=8)
async def test_a_server_that_could_not_write_is_named_until_it_is_started_again(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await provision(url(server, "setup"), Plan(agents={"writer": 1}, alert_channels=()))
    monkeypatch.setenv("BREAKWATER_NATS_URL", url(server, "setup"))
    plane = PlaneLocation(None)
    async with AsyncExitStack() as stack:
        clients = {user: await connected(server, user, stack) for user in ASKING}
        publisher = Publisher(lambda: clients["worker"], "worker")
        await publisher.raw("bw.attempts.writer.e1.1", b"x" * ROOM, {})
        assert [await unhealthy_servers(client) for client in clients.values()] == [()] * len(clients)
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (ROOM, resource.RLIM_INFINITY))
        with pytest.raises(BusUnavailableError) as caught:
            await publisher.raw("bw.attempts.writer.e1.2", b"x" * ROOM, {}, timeout_s=1)
        said = "in time: breakwater says: JetStream stream 'plane > EVENTS' can't be written to: file too large. Free"
        assert said in str(caught.value)
        assert "/" not in str(caught.value)  # API clients read this, too
        # There is room again, which changes nothing yet.
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        for client in clients.values():
            [found] = await unhealthy_servers(client)
            assert (found.server, found.cannot_write) == ("breakwater", True)
        [failed] = [one async for one in nats_findings(plane, None) if one.verdict == "fail"]
        assert "breakwater can't write: JetStream stream 'plane > EVENTS' write error" in failed.text
        assert failed.remedy.endswith("restart the server: until then it accepts nothing for that stream.")
    await server.restart_async()
    async with AsyncExitStack() as stack:
        client = await connected(server, "worker", stack)
        assert await unhealthy_servers(client) == ()
        await Publisher(lambda: client, "worker").raw("bw.attempts.writer.e1.2", b"x" * ROOM, {})


async def test_who_may_not_ask_learns_nothing_and_fails_at_nothing(server: RunningServer) -> None:
    async with AsyncExitStack() as stack:
        assert await unhealthy_servers(await connected(server, "client", stack)) == ()


async def test_a_server_that_has_no_accounts_is_not_asked_in_vain(nats_server: RunningServer) -> None:
    async with AsyncExitStack() as stack:
        client = await nats.connect(nats_server.url)
        stack.push_async_callback(client.close)
        assert await unhealthy_servers(client) == ()
