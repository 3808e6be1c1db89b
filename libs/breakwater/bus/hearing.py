"""Listening to a subject for a while: core NATS, nothing is stored."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress

import nats.errors
from nats.aio.msg import Msg

from breakwater.bus.errors import BusUnavailable
from breakwater.bus.lookup import Connection

FLUSH_TIMEOUT_S = 5


@asynccontextmanager
async def hearing(connection: Connection, subject: str, hear: Callable[[bytes], None]) -> AsyncGenerator[None]:
    """Hears what is published on a subject while the block runs; the server knows of it when the block begins.

    A connection that is lost meanwhile is made anew, and what was published until then is not heard.

    Args:
        connection: gives the connection, once there is one.
        subject: wildcards allowed.
        hear: is given each message's bytes; must not wait.

    Raises:
        BusUnavailable: NATS is away.
    """
    client = connection()

    async def receive(message: Msg) -> None:
        hear(message.data)

    try:
        subscription = await client.subscribe(subject, cb=receive)
    except (nats.errors.Error, OSError) as error:
        raise BusUnavailable(f"NATS did not take the subscription of {subject}: {error}") from error
    try:
        try:
            # One flush is not enough: nats-py sends its PING past subscriptions that wait in its buffer.
            await client.flush(FLUSH_TIMEOUT_S)
            await client.flush(FLUSH_TIMEOUT_S)
        except (TimeoutError, nats.errors.Error, OSError) as error:
            reason = str(error) or type(error).__name__
            raise BusUnavailable(f"NATS did not confirm the subscription of {subject}: {reason}") from error
        yield
    finally:
        # A connection that is closed has no subscriptions left.
        with suppress(nats.errors.Error, OSError):
            await subscription.unsubscribe()
