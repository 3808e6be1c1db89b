"""The end of a connection."""

import asyncio
from contextlib import suppress

import nats

from breakwater.kernel.nats.core import close
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
