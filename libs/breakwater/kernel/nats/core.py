"""Connections, and core NATS, where nothing is stored: requests, subscriptions, presence and server health."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, TypedDict, cast

import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.errors import BusUnavailableError, NoRespondersError, translated_errors, unavailable
from breakwater.kernel.nats.permissions import HEALTH
from breakwater.kernel.security.tls import client_context, tls_settings

ROUND_TRIP_S = 5

UNSENT_BYTES = 64 * 1024
"""So much may wait for the kernel before publishers have to wait, too."""


ClientGetter = Callable[[], Client]
"""Returns the connection, once there is one. Services pass it on, and need no types of nats-py."""


class TlsOptions(TypedDict):
    """Keyword arguments of `nats.connect`."""

    tls: ssl.SSLContext | None
    tls_handshake_first: bool


def tls_options(url: str) -> TlsOptions:
    """The options for a server's URL.

    With `tls://`, the TLS handshake comes first (the server needs `handshake_first: true`). With `nats://`, the server
    may ask for TLS, but an attacker in between could claim that it does not, and would get the password.

    Raises:
        ConfigError: a file of `BREAKWATER_TLS_*` can't be used.
    """
    settings = tls_settings()
    encrypted = url.startswith("tls:")
    # Otherwise, nats-py makes a context only if the server asks for TLS.
    context = client_context(settings) if encrypted or settings.model_fields_set else None
    return {"tls": context, "tls_handshake_first": encrypted}


async def close(client: Client) -> None:
    """Closes a connection for good, even while it is lost."""
    give_up(client)
    await client.close()


class _Nobody:
    """Stands for who waits for a flush."""

    def done(self) -> bool:
        return True


_NOBODY = _Nobody()


async def publish(
    client: Client, subject: str, payload: bytes, reply: str = "", headers: Mapping[str, str] | None = None
) -> None:
    """Publishes as the client does, at a third of its cost: it checks and copies each header on its own.

    Raises:
        nats.errors.Error: the client does not accept the message.
    """
    size = len(payload)
    places = f"{subject} {reply}"
    is_plain = subject and places.isprintable() and places.count(" ") == 1
    if headers is None:
        head = f"PUB {places} {size}\r\n".encode()
    else:
        # Names and values are put together without a step of Python's for each.
        lines = "\r\n".join(map(": ".join, headers.items()))
        is_plain = is_plain and lines.count("\n") == len(headers) - 1 == lines.count("\r")
        block = f"NATS/1.0\r\n{lines}\r\n\r\n".encode()
        head = b"HPUB %b %d %d\r\n%b" % (places.encode(), len(block), len(block) + size, block)
    if not is_plain or client._status != Client.CONNECTED or size > client._max_payload:  # pyright: ignore[reportPrivateUsage]
        # It is refused, or waits for a connection.
        await client.publish(subject, payload, reply, None if headers is None else dict(headers))
        return
    client.stats["out_msgs"] += 1
    client.stats["out_bytes"] += size
    _append(client, b"%b%b\r\n" % (head, payload))
    if 0 < client._max_pending_size < client._pending_data_size:  # pyright: ignore[reportPrivateUsage]
        await client._flush_pending(force_flush=True)  # pyright: ignore[reportPrivateUsage]
    _flush_soon(client)


async def publish_empty(client: Client, subjects: Sequence[str]) -> None:
    """Publishes a message without content on each subject, in one command.

    Args:
        client: the connection.
        subjects: as the server has given them, such as those for acknowledgements.

    Raises:
        nats.errors.Error: the client accepts no messages.
    """
    if client.is_connected and not client.is_draining:
        client.stats["out_msgs"] += len(subjects)
        command = "".join([f"PUB {subject} 0\r\n\r\n" for subject in subjects]).encode()
        await client._send_command(command)  # pyright: ignore[reportPrivateUsage]
        _flush_soon(client)
        return
    for subject in subjects:
        await client.publish(subject)


def _flush_soon(client: Client) -> None:
    """Has what is pending written when all that can run now has run."""
    flushes: Any = client._flush_queue  # pyright: ignore[reportPrivateUsage]
    if type(flushes) is not _Flushes:
        flushes = _Flushes.take_over(client)
    if not flushes.is_due:
        flushes.is_due = True
        flushes.call_soon(flushes.flush)


class _Flushes(asyncio.Queue[Any]):
    """Stands for the queue of a client's task that writes, and mostly writes in its place: without waking a task."""

    def __init__(self, client: Client, maxsize: int) -> None:
        super().__init__(maxsize)
        self._client = client
        self.call_soon = asyncio.get_running_loop().call_soon
        self.is_due = False

    @classmethod
    def take_over(cls, client: Client) -> _Flushes:
        """Has a connected client use one from now on."""
        queue: Any = client._flush_queue  # pyright: ignore[reportPrivateUsage]
        flushes = cls(client, queue.maxsize)
        client._flush_queue = flushes  # pyright: ignore[reportPrivateUsage]
        while not queue.empty():
            flushes.put_nowait(queue.get_nowait())
        queue.put_nowait(_NOBODY)  # its task may wait at the other one
        return flushes

    def flush(self) -> None:
        """Writes what is pending, or has the client's task do that if the connection is slow or lost."""
        self.is_due = False
        client = self._client
        transport = client._transport  # pyright: ignore[reportPrivateUsage]
        if client._status == Client.CONNECTED and type(transport) is TcpTransport and _is_fast(transport):  # pyright: ignore[reportPrivateUsage]
            pending = client._pending  # pyright: ignore[reportPrivateUsage]
            client._pending = []  # pyright: ignore[reportPrivateUsage]
            client._pending_data_size = 0  # pyright: ignore[reportPrivateUsage]
            if pending:
                transport.writelines(pending)
        elif self.empty():
            self.put_nowait(_NOBODY)


def _is_fast(transport: TcpTransport) -> bool:
    """Returns True if the kernel takes what is written; else the client's task waits until it does."""
    stream: Any = transport._io_writer  # pyright: ignore[reportPrivateUsage]
    return not stream.transport.is_closing() and stream.transport.get_write_buffer_size() <= UNSENT_BYTES


_HEADER_LINE = re.compile(r"(?m)^([!#$%&'*+\-.^_`|~0-9A-Za-z]+): ([!-~]+(?: [!-~]+)*)\r\n")
"""A header as all known clients write it: one space before its value, which is of ASCII words."""

_NO_STATUS = b"NATS/1.0\r\n"
_parse_other_headers = Client._parse_header_lines  # pyright: ignore[reportPrivateUsage]


def parse_headers(raw: bytes) -> dict[str, str]:
    """Parses the header lines of a message as the client does, which takes a step for each character of their names."""
    lines = _HEADER_LINE.findall(raw.decode("latin-1"))
    # The block ends with an empty line.
    return dict(lines) if len(lines) == raw.count(b"\n") - 1 else _parse_other_headers(raw)


def _headers_with_status(client: Client, block: bytes) -> dict[str, str] | None:
    """Parses the headers of a message as the client does, by a coroutine that waits for nothing but a log."""
    try:
        client._process_headers(block).send(None)  # pyright: ignore[reportPrivateUsage]
    except StopIteration as parsed:
        return parsed.value
    raise RuntimeError("nats-py waits where it did not")


class _PassesOn:
    """Stands for the queue of a subscription that keeps no messages."""

    __slots__ = ("put_nowait",)

    def __init__(self, take: Callable[[Msg], None]) -> None:
        self.put_nowait = take

    async def join(self) -> None:
        """Returns immediately: nothing waits in it."""


class _Parser(Parser):
    """Reads messages of `subscribe` in half of the client's steps, and leaves others to the client's parser.

    It reads them as they come from the kernel, without waking the client's task that reads.
    """

    _reader: Any = None
    """The client's stream of what comes, once it passes by here."""

    async def parse(self, data: bytes = b"") -> None:
        """Overridden to hand over the complete messages at the beginning of the buffer."""
        self._follow()
        if self.state != AWAITING_CONTROL_LINE:
            await super().parse(data)
            return
        self.buf.extend(data)
        place, is_other = self._take(self.buf)
        del self.buf[:place]
        if self.buf and is_other:
            await super().parse()

    def _follow(self) -> None:
        """Reads what comes on the client's connection, which may be a new one."""
        transport = cast(Client, self.nc)._transport  # pyright: ignore[reportPrivateUsage]
        if type(transport) is TcpTransport and transport._io_reader is not self._reader:  # pyright: ignore[reportPrivateUsage]
            self._reader = transport._io_reader  # pyright: ignore[reportPrivateUsage]
            self._reader.feed_data = partial(self._feed, self._reader, self._reader.feed_data)

    def _feed(self, reader: Any, feed: Callable[[bytes], None], data: bytes) -> None:
        """Takes what comes, and feeds the stream with what is left for the client's task.

        What still comes on a connection that was given up goes to its own stream, which nobody reads any more.
        """
        client = cast(Client, self.nc)
        is_current = client._status == Client.CONNECTED and getattr(client._transport, "_io_reader", None) is reader  # pyright: ignore[reportPrivateUsage]
        if is_current and self.state == AWAITING_CONTROL_LINE and not self.buf and not reader._buffer:
            place, _ = self._take(data)
            data = data[place:]
        if data:
            feed(data)

    def _take(self, buffer: bytes | bytearray) -> tuple[int, bool]:
        """Hands over the complete messages at the beginning of a buffer.

        Returns:
            Where the rest begins, and False if that is the beginning of such a message.
        """
        client = cast(Client, self.nc)
        subscriptions = client._subs  # pyright: ignore[reportPrivateUsage]
        place, messages, is_other = 0, 0, True
        while buffer.startswith((b"HMSG ", b"MSG "), place):
            begin = buffer.find(b"\r\n", place) + 2
            if begin < 2:
                break
            # `MSG <subject> <sid> [reply] <bytes>`, or `HMSG <subject> <sid> [reply] <header bytes> <bytes>`
            operation, subject, sid, *others = buffer[place:begin].split()
            subscription = subscriptions.get(int(sid))
            queue: Any = getattr(subscription, "_pending_queue", None)
            if type(queue) is not _PassesOn:
                break
            end = begin + int(others.pop())
            if len(buffer) < end + 2:
                is_other = False
                break
            headers = None
            if operation.startswith(b"H"):
                block = bytes(buffer[begin : begin + int(others.pop())])
                begin += len(block)
                if block.startswith(_NO_STATUS):
                    headers = parse_headers(block[len(_NO_STATUS) :]) or None
                else:
                    headers = _headers_with_status(client, block)
            reply = others[0].decode() if others else ""
            place = end + 2
            messages += 1
            queue.put_nowait(Msg(client, subject.decode(), reply, bytes(buffer[begin:end]), headers))
        client.stats["in_msgs"] += messages
        client.stats["in_bytes"] += place
        return place, is_other


def subscribe(client: Client, subject: str, take: Callable[[Msg], None]) -> Subscription:
    """Subscribes as the client does, without a task and a queue for the messages.

    `take` is called as they are read. It neither waits nor raises.

    Raises:
        nats.errors.Error: the connection is closed, or is being closed; or the subject is invalid.
    """
    if not subject or not subject.isprintable() or " " in subject:
        raise nats.errors.BadSubjectError
    if client.is_closed:
        raise nats.errors.ConnectionClosedError
    if client.is_draining:
        raise nats.errors.ConnectionDrainingError
    parser = client._ps  # pyright: ignore[reportPrivateUsage]
    if type(parser) is not _Parser:
        client._ps = _Parser(client)  # pyright: ignore[reportPrivateUsage]
        client._ps.__dict__ = parser.__dict__  # pyright: ignore[reportPrivateUsage]  # it may have begun a message
    client._sid += 1  # pyright: ignore[reportPrivateUsage]
    sid = client._sid  # pyright: ignore[reportPrivateUsage]
    subscription = Subscription(client, sid, subject, pending_bytes_limit=0)
    subscription._pending_queue = cast(Any, _PassesOn(take))  # pyright: ignore[reportPrivateUsage]
    client._subs[sid] = subscription  # pyright: ignore[reportPrivateUsage]
    _send_soon(client, b"SUB %b  %d\r\n" % (subject.encode(), sid))
    return subscription


def unsubscribe(client: Client, subscription: Subscription) -> None:
    """Ends a subscription of `subscribe`. The server hears of it with the next message."""
    sid: int = subscription._id  # pyright: ignore[reportPrivateUsage]
    client._remove_sub(sid)  # pyright: ignore[reportPrivateUsage]
    # Who takes the messages mostly keeps the subscription: both would wait for the collection of reference cycles.
    subscription._pending_queue = cast(Any, None)  # pyright: ignore[reportPrivateUsage]
    if not client.is_closed:
        _append(client, b"UNSUB %d\r\n" % sid)


def _send_soon(client: Client, command: bytes) -> None:
    _append(client, command)
    if client.is_connected:
        _flush_soon(client)


def _append(client: Client, command: bytes) -> None:
    client._pending.append(command)  # pyright: ignore[reportPrivateUsage]
    client._pending_data_size += len(command)  # pyright: ignore[reportPrivateUsage]


def has_dead_task(client: Client) -> bool:
    """Returns True if a connection that is neither closed nor being closed lacks a task that it needs."""
    if client.is_reconnecting:
        tasks = [client._reconnection_task]  # pyright: ignore[reportPrivateUsage]
    elif client.is_connected and not client.is_draining:
        tasks = [client._reading_task, client._flusher_task, client._ping_interval_task]  # pyright: ignore[reportPrivateUsage]
    else:
        return False
    return any(task is None or task.done() for task in tasks)


def give_up(client: Client) -> None:
    """Makes a lost connection stop reconnecting, even if the cancellation of that task gets lost.

    nats-py cancels its reconnecting task once, and `asyncio.wait_for` of Python 3.11 may swallow that. The client would
    then reconnect for ever, and its caller wait for ever. Without attempts left, the task ends by itself.
    """
    client.options["max_reconnect_attempts"] = 1


async def round_trip(client: Client, timeout_s: float) -> None:
    """Waits until the server has handled all that it was sent before.

    nats-py's own `flush` cancels the future of its answer when nobody waits for it any more. An answer that comes all
    the same then ends the task that reads, and with it the process.

    Raises:
        nats.errors.Error: the connection is closed, or the server did not answer in time.
    """
    if client.is_closed:
        raise nats.errors.ConnectionClosedError
    answer = asyncio.get_running_loop().create_future()
    await client._send_ping(answer)  # pyright: ignore[reportPrivateUsage]
    await asyncio.wait((answer,), timeout=timeout_s)
    if not answer.done():
        raise nats.errors.FlushTimeoutError


async def ask(connection: ClientGetter, subject: str, data: bytes, timeout_s: float) -> bytes:
    """Returns the first response to a request.

    Raises:
        NoRespondersError: no service is subscribed.
        BusUnavailableError: NATS does not respond, or no response came in time; the request may still be carried out.
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


def listen(connection: ClientGetter, subject: str, hear: Callable[[bytes], None]) -> Callable[[], None]:
    """Subscribes to a subject until the returned function is called.

    A lost connection is re-established; messages that are published in between are not received. Replies to this
    connection's own later messages are.

    Args:
        connection: to NATS.
        subject: wildcards allowed.
        hear: called with each message's bytes; must not block.

    Raises:
        BusUnavailableError: the connection is closed.
    """
    client = connection()

    def receive(message: Msg) -> None:
        try:
            hear(message.data)
        except Exception:  # noqa: BLE001  the connection must go on
            structlog.get_logger().exception("message_not_handled", subject=subject)

    with translated_errors(subject):
        subscription = subscribe(client, subject, receive)
    return partial(unsubscribe, client, subscription)


@asynccontextmanager
async def core_subscription(
    connection: ClientGetter, subject: str, hear: Callable[[bytes], None]
) -> AsyncGenerator[None]:
    """Listens to a subject while the block runs, which begins when the server has confirmed the subscription.

    Takes what `listen` takes. Raises BusUnavailableError: NATS does not answer.
    """
    stop = listen(connection, subject, hear)
    try:
        client = connection()
        with translated_errors(subject):
            # One is not enough: nats-py's PING overtakes the subscriptions in its buffer.
            for _ in range(2):
                await round_trip(client, ROUND_TRIP_S)
        yield
    finally:
        stop()


PRESENCE_TIMEOUT_S = 0.5


class Presence:
    """Knows which workers are connected to NATS. Each subscribes to a subject of its own, which carries no messages.

    If no connection is subscribed, a server answers a request immediately, with status 503. When a process is killed,
    the kernel closes its sockets, and the server its connection, within a millisecond. The server keeps the connection
    of a process that hangs or has lost its network until its pings stay unanswered for minutes, or it can't write for
    10 s.
    """

    def __init__(self, connection: ClientGetter, worker_id: str) -> None:
        self._connection = connection
        self._subject = subjects.worker(worker_id)
        self._on: tuple[str, int] = "", 0
        self._since = monotonic()
        self._heard = False

    @contextmanager
    def listening(self) -> Generator[None]:
        """Subscribes while the block runs. Raises BusUnavailableError: the connection is closed."""
        stop = listen(self._connection, self._subject, self._hear)
        try:
            yield
        finally:
            stop()

    async def heard_on(self) -> str:
        """The server on which others find this worker; empty if it is not connected or may not subscribe.

        A subscribed worker gets its own messages. This tries it once for each connection.
        """
        client = self._connection()
        on = _server_info(client).get("server_id", ""), client.stats["reconnects"]
        if on != self._on:
            self._on = on
            self._since = monotonic()
            self._heard = False
        if not client.is_connected:
            return ""
        if not self._heard:
            try:
                await client.publish(self._subject)
            except (nats.errors.Error, OSError):
                return ""
        return on[0] if self._heard else ""

    async def has(self, worker_id: str) -> bool:
        """Returns True if another worker is connected, or that is unknown because no response comes."""
        try:
            await ask(self._connection, subjects.worker(worker_id), b"", PRESENCE_TIMEOUT_S)
        except NoRespondersError:
            return False
        except BusUnavailableError:
            return True
        return True

    def knows_since(self, server: str, seconds: float) -> bool:
        """Returns True if this worker's server knows which connections that `server` had `seconds` ago still exist.

        A restarted server has no connections at first. Servers of a cluster know each other's connections.
        """
        info = _server_info(self._connection())
        return info.get("server_id") == server or bool(info.get("cluster")) or monotonic() - self._since > seconds

    def _hear(self, _data: bytes) -> None:
        self._heard = True


def _server_info(client: Client) -> Mapping[str, str]:
    """The INFO of a connection's server. A server has a new id after every restart."""
    return getattr(client, "_server_info", {})


HEALTH_TIMEOUT_S = 0.5

_WRITE_ERROR = " write error: "

RESTART = "Free disk space, then restart the server: until then it accepts nothing for that stream."


@dataclass(frozen=True, slots=True)
class UnhealthyServer:
    """A server that reports an error of its own."""

    server: str
    error: str
    """The error in the server's words."""

    @property
    def cannot_write(self) -> bool:
        """Returns True if it failed to write to a stream, as its disk was full.

        Until its restart, it stores nothing more in that stream, even once its disk has space. It does not refuse
        messages: publishers get no response.
        """
        return _WRITE_ERROR in self.error

    @property
    def in_short(self) -> str:
        """The error without the path on the server's disk, which only its operators should see."""
        problem, _, cause = self.error.partition(_WRITE_ERROR)
        return f"{problem} can't be written to: {cause.rpartition(': ')[2]}" if cause else problem


async def unhealthy_servers(client: Client) -> tuple[UnhealthyServer, ...]:
    """The servers of the cluster that report errors. Empty if no server responds, or this user may not ask."""
    unhealthy: list[UnhealthyServer] = []
    with suppress(TimeoutError, nats.errors.Error, OSError, ValueError):
        inbox = client.new_inbox()
        answers = await client.subscribe(inbox)
        try:
            await client.publish(HEALTH, b"", reply=inbox)
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                async for answer in answers.messages:  # the number of servers is not known
                    health = json.loads(answer.data or b"{}")  # empty where no server listens
                    if error := health.get("data", {}).get("error"):
                        unhealthy.append(UnhealthyServer(health["server"]["name"], error))
        finally:
            await answers.unsubscribe()
    return tuple(unhealthy)
