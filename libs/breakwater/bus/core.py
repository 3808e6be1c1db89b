"""Connections, and core NATS, where nothing is stored: requests to a service, and temporary subscriptions."""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypedDict

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from breakwater.bus.errors import BusUnavailable, NobodyListens
from breakwater.bus.lookup import Connection, answered
from breakwater.tls import client_context, tls_settings

FLUSH_TIMEOUT_S = 5


class TlsOptions(TypedDict):
    """Keyword arguments of `nats.connect`."""

    tls: ssl.SSLContext | None
    tls_handshake_first: bool


def tls_options(url: str) -> TlsOptions:
    """For a server's URL.

    With `tls://`, TLS comes before the server's first word (its `handshake_first: true`). With `nats://`, a server that
    asks for TLS gets it; but whoever sits in between could say that it doesn't, and would be sent the password.

    Raises:
        ConfigError: a file of `BREAKWATER_TLS_*` can't be used.
    """
    settings, encrypted = tls_settings(), url.startswith("tls:")
    # With neither, nats-py makes such a context only if the server asks for TLS.
    context = client_context(settings) if encrypted or settings.model_fields_set else None
    return {"tls": context, "tls_handshake_first": encrypted}


async def close(client: Client) -> None:
    """Closes a connection for good, also while it is lost."""
    give_up(client)
    await client.close()


def give_up(client: Client) -> None:
    """Lets a connection that is lost end, whatever becomes of its cancellation.

    nats-py cancels its reconnecting once. `asyncio.wait_for` of Python 3.11 may lose that, and it would then try for
    ever, and whoever waits for its task as well: with no tries left it ends by itself.
    """
    client.options["max_reconnect_attempts"] = 1


async def ask(connection: Connection, subject: str, data: bytes, timeout_s: float) -> bytes:
    """Returns what the first subscriber answers.

    Raises:
        NobodyListens: no service is subscribed.
        BusUnavailable: NATS does not answer, or no answer came in time; what was asked for may be done all the same.
    """
    try:
        answer = await connection().request(subject, data, timeout=timeout_s)
    except nats.errors.NoRespondersError as error:
        raise NobodyListens(f"nobody listens on {subject}") from error
    except (TimeoutError, nats.errors.TimeoutError) as error:
        raise BusUnavailable(f"no answer came on {subject} within {timeout_s:g} s") from error
    except (nats.errors.Error, OSError) as error:
        raise BusUnavailable(f"NATS did not take {subject}: {str(error) or type(error).__name__}") from error
    return answer.data


@asynccontextmanager
async def hearing(
    connection: Connection, subject: str, hear: Callable[[bytes], None], *, confirmed: bool = True
) -> AsyncGenerator[None]:
    """Subscribes to a subject while the block runs; the server has confirmed that when the block begins.

    A lost connection is re-established; messages published in between are not received.

    Args:
        connection: gives the connection, once there is one.
        subject: wildcards allowed.
        hear: is given each message's bytes; must not wait.
        confirmed: wait for the server's word. Without it, what follows a message of this connection's own is received.

    Raises:
        BusUnavailable: NATS does not answer.
    """
    client = connection()

    async def receive(message: Msg) -> None:
        hear(message.data)

    with answered(subject):
        subscription = await client.subscribe(subject, cb=receive)
    try:
        with answered(subject):
            # One flush is not enough: nats-py sends its PING past subscriptions that wait in its buffer.
            for _ in range(2 if confirmed else 0):
                await client.flush(FLUSH_TIMEOUT_S)
        yield
    finally:
        # A connection that is closed has no subscriptions left.
        with suppress(nats.errors.Error, OSError):
            await subscription.unsubscribe()
