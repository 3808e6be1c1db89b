"""What a connection survives, and its end."""

import asyncio
import os
import signal
from contextlib import suppress

import nats
import nats.errors
import psutil
import pytest
from nats.aio.client import Client

from breakwater.kernel.nats.core import close, core_subscription, has_dead_task, listen
from breakwater.kernel.nats.errors import BusUnavailableError
from tests.helpers import until
from tests.servers import RunningServer


async def test_a_lost_connection_ends_even_if_the_cancellation_of_its_reconnecting_is_lost(
    own_nats_server: RunningServer,
) -> None:
    failures: list[Exception] = []

    async def loses_a_cancellation(error: Exception) -> None:
        # As `asyncio.wait_for` does, now and then.
        failures.append(error)
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.2)

    client = await nats.connect(
        own_nats_server.url, max_reconnect_attempts=-1, reconnect_time_wait=0.01, error_cb=loses_a_cancellation
    )
    own_nats_server.kill()
    await until(lambda: len(failures) == 3, "it tries to reconnect", brief=True)
    await close(client)
    await until(lambda: len(asyncio.all_tasks()) == 1, "all that the connection has left behind to end", timeout_s=20)


async def test_an_answer_that_nobody_waits_for_any_more_leaves_the_connection_alive(
    own_nats_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server stands still while one subscription times out and another is cancelled, and answers both later."""
    monkeypatch.setattr("breakwater.kernel.nats.core.ROUND_TRIP_S", 0.2)
    client = await nats.connect(own_nats_server.url)
    heard: list[bytes] = []

    async def subscribe() -> None:
        async with core_subscription(lambda: client, "news", heard.append):
            await asyncio.Event().wait()

    server = psutil.Process(own_nats_server.pid)
    os.killpg(server.pid, signal.SIGSTOP)
    try:
        await until(lambda: server.status() == psutil.STATUS_STOPPED, "the server to stand still")
        with pytest.raises(BusUnavailableError):
            await subscribe()
        reader = asyncio.create_task(subscribe())
        pings = client._pongs
        await until(lambda: len(pings) == 2, "the second subscription's ping")
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
    finally:
        os.killpg(server.pid, signal.SIGCONT)
    monkeypatch.undo()
    async with core_subscription(lambda: client, "news", heard.append):
        await client.publish("news", b"heard")
        await until(lambda: heard == [b"heard"], "the message")
    assert not has_dead_task(client)
    await close(client)


async def test_who_listens_hears_on_after_an_error_and_after_a_lost_connection_and_then_no_more(
    own_nats_server: RunningServer,
) -> None:
    heard: list[bytes] = []

    def hear(data: bytes) -> None:
        heard.append(data)
        if data == b"odd":
            raise ValueError("it is odd")

    client = await nats.connect(own_nats_server.url, reconnect_time_wait=0.01, max_reconnect_attempts=-1)
    stop = listen(lambda: client, "news", hear)
    for data in (b"odd", b"second"):
        await client.publish("news", data)
    await until(lambda: heard == [b"odd", b"second"], "both messages")
    own_nats_server.restart()
    await until(lambda: client.stats["reconnects"] == 1, "the connection")
    await client.publish("news", b"third")
    await until(lambda: heard[2:] == [b"third"], "the message after that")
    stop()
    await client.publish("news", b"fourth")
    await client.flush()
    assert heard[3:] == []
    assert client.stats["in_msgs"] == 3
    await close(client)


async def test_nobody_listens_on_a_subject_that_would_be_another_command() -> None:
    for subject in ("", "news 1\r\nPUB x 0", "news all"):
        with pytest.raises(BusUnavailableError):
            listen(Client, subject, print)
