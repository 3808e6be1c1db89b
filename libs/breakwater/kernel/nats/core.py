"""Connections, and core NATS, where nothing is stored: requests, subscriptions, presence and server health."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from time import monotonic
from typing import TypedDict

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.errors import BusUnavailableError, NoRespondersError, unavailable
from breakwater.kernel.nats.lookup import ClientGetter, answered
from breakwater.kernel.nats.permissions import HEALTH
from breakwater.kernel.security.tls import client_context, tls_settings

FLUSH_TIMEOUT_S = 5


class TlsOptions(TypedDict):
    """Keyword arguments of `nats.connect`."""

    tls: ssl.SSLContext | None
    tls_handshake_first: bool


def tls_options(url: str) -> TlsOptions:
    """The options for a server's URL.

    With `tls://`, TLS comes before the server's first word (its `handshake_first: true`). With `nats://`, a server that
    asks for TLS gets it; but an attacker in between could say that it doesn't, and would be sent the password.

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
    """Lets a connection that is lost end, also where its cancellation is lost.

    nats-py cancels its reconnecting once. `asyncio.wait_for` of Python 3.11 may lose that; the client would then try
    for ever, and a caller wait for its task as long: with no tries left it ends by itself.
    """
    client.options["max_reconnect_attempts"] = 1


async def ask(connection: ClientGetter, subject: str, data: bytes, timeout_s: float) -> bytes:
    """Returns the first subscriber's answer.

    Raises:
        NoRespondersError: no service is subscribed.
        BusUnavailableError: NATS does not answer, or no answer came in time; the request may still be carried out.
    """
    try:
        answer = await connection().request(subject, data, timeout=timeout_s)
    except nats.errors.NoRespondersError as error:
        raise NoRespondersError(f"no service listens on {subject}") from error
    except (TimeoutError, nats.errors.TimeoutError) as error:
        raise BusUnavailableError(f"no response on {subject} within {timeout_s:g} s") from error
    except (nats.errors.Error, OSError) as error:
        raise unavailable(f"NATS did not accept {subject}", error) from error
    return answer.data


@asynccontextmanager
async def hearing(
    connection: ClientGetter, subject: str, hear: Callable[[bytes], None], *, confirmed: bool = True
) -> AsyncGenerator[None]:
    """Subscribes to a subject while the block runs; the server has confirmed that when the block begins.

    A lost connection is re-established; messages published in between are not received.

    Args:
        connection: to NATS.
        subject: wildcards allowed.
        hear: is given each message's bytes; must not wait.
        confirmed: wait for the server's word. Without it, replies to a message of this connection's own are received.

    Raises:
        BusUnavailableError: NATS does not answer.
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


PRESENCE_TIMEOUT_S = 0.5


class Presence:
    """Presence of workers: whose connections NATS has. Each listens on a subject of its own, which carries no messages.

    A server answers a request immediately where no connection is subscribed (status 503). It closes the connection of a
    process that was killed within a millisecond, as the kernel closes its sockets. It keeps that of one that hangs, or
    whose network loses everything, until it has pinged in vain for minutes or can't write to it for 10 s.
    """

    def __init__(self, connection: ClientGetter, worker_id: str) -> None:
        self._connection, self._subject = connection, subjects.worker(worker_id)
        self._on: tuple[str, int] = "", 0
        self._since = monotonic()
        self._heard = False

    @asynccontextmanager
    async def listening(self) -> AsyncGenerator[None]:
        """Listens while the block runs. Raises BusUnavailableError: NATS does not answer."""
        async with hearing(self._connection, self._subject, self._hear, confirmed=False):
            yield

    async def heard_on(self) -> str:
        """The server that others hear of this worker from; empty while it has no connection, or may not listen.

        A worker that listens hears its own messages: that is tried once for each connection.
        """
        client = self._connection()
        on = _server_info(client).get("server_id", ""), client.stats["reconnects"]
        if on != self._on:
            self._on, self._since, self._heard = on, monotonic(), False
        if not client.is_connected:
            return ""
        if not self._heard:
            try:
                await client.publish(self._subject)
            except (nats.errors.Error, OSError):
                return ""
        return on[0] if self._heard else ""

    async def has(self, worker_id: str) -> bool:
        """True if another worker is connected, as far as is known: also where no answer comes."""
        try:
            await ask(self._connection, subjects.worker(worker_id), b"", PRESENCE_TIMEOUT_S)
        except NoRespondersError:
            return False
        except BusUnavailableError:
            return True
        return True

    def knows_since(self, server: str, seconds: float) -> bool:
        """True if this worker's server knows the fate of the connections that `server` had so many seconds ago.

        A server that is started again has no connections at first. Servers of a cluster know of each other's.
        """
        info = _server_info(self._connection())
        return info.get("server_id") == server or bool(info.get("cluster")) or monotonic() - self._since > seconds

    def _hear(self, _data: bytes) -> None:
        self._heard = True


def _server_info(client: Client) -> Mapping[str, str]:
    """The INFO of a connection's server, whose id is another one each time that it is started."""
    return getattr(client, "_server_info", {})


HEALTH_TIMEOUT_S = 0.5

_WRITE_ERROR = " write error: "

RESTART = "Free disk space, then restart the server: until then it accepts nothing for that stream."


@dataclass(frozen=True, slots=True)
class UnhealthyServer:
    """A server that is not well."""

    server: str
    error: str
    """The server's own words."""

    @property
    def cannot_write(self) -> bool:
        """True if it failed to write a stream, as its disk was full.

        Until it is started again it takes nothing more into that stream, also when its disk has space by then. It does
        not refuse: publishers get no answer.
        """
        return _WRITE_ERROR in self.error

    @property
    def in_short(self) -> str:
        """The error without the path on its disk, which is for its operators alone."""
        what, _, why = self.error.partition(_WRITE_ERROR)
        return f"{what} can't be written to: {why.rpartition(': ')[2]}" if why else what


async def unhealthy_servers(client: Client) -> tuple[UnhealthyServer, ...]:
    """The servers of the cluster that are not well. Empty where no server answers, or this user may not ask."""
    found: list[UnhealthyServer] = []
    with suppress(TimeoutError, nats.errors.Error, OSError, ValueError):
        inbox = client.new_inbox()
        answers = await client.subscribe(inbox)
        try:
            await client.publish(HEALTH, b"", reply=inbox)
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                async for answer in answers.messages:  # the number of servers is not known
                    said = json.loads(answer.data or b"{}")  # empty where no server listens
                    if error := said.get("data", {}).get("error"):
                        found.append(UnhealthyServer(said["server"]["name"], error))
        finally:
            await answers.unsubscribe()
    return tuple(found)
