"""The asynchronous side of commands: connections to the parts of a plane, with errors that say what to do; progress."""

from __future__ import annotations

import ssl
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from breakwater.cli import interrupts, output
from breakwater.cli.errors import CliError, ExitCode, unreachable

if TYPE_CHECKING:
    from nats.aio.client import Client

    from breakwater.analytics.client import Analytics
    from breakwater.state.connection import Redis

T = TypeVar("T")

CONNECT_TIMEOUT_S = 3.0


def run(work: Coroutine[Any, Any, T], *, waiting: str = "") -> T:
    """Runs the asynchronous part of a command; a terminal shows the text meanwhile."""

    async def shown() -> T:
        async with progress(lambda: waiting, lines_every_s=None):
            return await work

    return interrupts.run(shown() if waiting else work)


@asynccontextmanager
async def progress(words: Callable[[], str], *, lines_every_s: float | None) -> AsyncGenerator[None]:
    """Shows on stderr how far the work in the block is: on a terminal always, elsewhere a line now and then.

    Args:
        words: the state of the work, in a line.
        lines_every_s: how often a line is printed where there is no terminal; None for never.
    """
    import asyncio

    from breakwater.runtime import background

    drawn = output.is_terminal(sys.stderr)

    async def show() -> None:
        before = ""
        with output.console(stderr=True).status("", spinner="line") if drawn else nullcontext() as status:
            while True:
                now = words()
                if status is not None:
                    status.update(output.text(now))
                elif now != before:
                    output.write(now, stderr=True)
                before = now
                await asyncio.sleep(0.125 if drawn else lines_every_s or 0)

    if not drawn and lines_every_s is None:
        yield
        return
    showing = asyncio.create_task(show())
    try:
        yield
    finally:
        await background.stop(showing)


@asynccontextmanager
async def bus(
    url: str,
    *,
    reconnects: bool = False,
    on_error: Callable[[Exception], None] = lambda _: None,
    on_connection: Callable[[bool], None] = lambda _: None,
) -> AsyncGenerator[Client]:
    """A NATS connection.

    Args:
        url: user and password included.
        reconnects: a connection that is lost is made again, as soon as the server is back.
        on_error: gets what no call raises: denied permissions, messages that were dropped.
        on_connection: gets False when the connection is lost, True when it is there again.

    Raises:
        CliError: the server does not answer, or does not let us in.
    """
    import nats
    import nats.errors

    from breakwater.bus.core import close, tls_options
    from breakwater.bus.permissions import USERS, inbox_prefix
    from breakwater.contracts.subjects import PROGRAM

    outages = (OSError, TimeoutError, nats.errors.UnexpectedEOF, nats.errors.StaleConnectionError)
    troubles: list[Exception] = []
    connected = False

    async def failed(error: Exception) -> None:
        if not connected:
            troubles.append(error)
        elif not isinstance(error, outages):  # those are for `on_connection`
            on_error(error)

    async def lost() -> None:
        if not client.is_closed:  # closing it ourselves is no loss
            on_connection(False)

    async def regained() -> None:
        on_connection(True)

    user = unquote(urlsplit(url).username or "")
    try:
        client = await nats.connect(
            url,
            name="breakwater-cli",
            inbox_prefix=inbox_prefix(user if user.startswith(PROGRAM) or user in USERS else "client"),
            allow_reconnect=False,
            # What nats-py counts as reconnecting is also how often it tries the first time: 0 would be for ever.
            max_reconnect_attempts=1,
            reconnect_time_wait=0.1,
            connect_timeout=CONNECT_TIMEOUT_S,
            **tls_options(url),
            error_cb=failed,
            disconnected_cb=lost,
            reconnected_cb=regained,
        )
    except (OSError, TimeoutError, nats.errors.Error) as error:
        why = troubles[-1] if troubles else error
        raise unreachable(
            f"NATS does not answer at {shown(url)}: {why or type(why).__name__}",
            "A tls:// URL needs `handshake_first: true` in the server's tls block; nats:// uses TLS if the server asks."
            if isinstance(why, ssl.SSLError) and url.startswith("tls:")
            else "`breakwater doctor` shows which servers and services respond.",
        ) from error
    connected = True
    client.options.update(allow_reconnect=reconnects, max_reconnect_attempts=-1, reconnect_time_wait=0.5)
    try:
        yield client
    finally:
        await close(client)


@asynccontextmanager
async def analytics(url: str, *, answer_timeout_s: float | None = None) -> AsyncGenerator[Analytics]:
    """ClickHouse. It may be silent for `answer_timeout_s` while it works on a statement."""
    from breakwater.analytics.client import ANSWER_TIMEOUT_S, connect

    try:
        client = connect(url, answer_timeout_s=answer_timeout_s or ANSWER_TIMEOUT_S)
    except ValueError as error:
        raise CliError("clickhouse_url", str(error), exit_code=ExitCode.USAGE) from None
    try:
        yield client
    finally:
        await client.close()


def asked(url: str, question: Callable[[Analytics], Awaitable[T]], *, answer_timeout_s: float | None = None) -> T:
    """The answer of ClickHouse to one question."""

    async def ask() -> T:
        async with analytics(url, answer_timeout_s=answer_timeout_s) as client:
            return await question(client)

    return run(ask())


async def read_only(analytics: Analytics, settings: Mapping[str, object]) -> dict[str, object]:
    """Settings that make a statement read-only and end it with its client; empty where this user may set none."""
    # 1: may set nothing at all. 2: may set anything but this.
    already = int((await analytics.query("SELECT getSetting('readonly')")).rows[0][0])
    if already == 1:
        return {}
    return {**settings, "cancel_http_readonly_queries_on_client_close": 1, **({} if already else {"readonly": 2})}


@asynccontextmanager
async def state(url: str) -> AsyncGenerator[Redis]:
    """Redis."""
    from breakwater.state.connection import Redis

    try:
        redis = Redis(url)
    except ValueError as error:
        raise CliError("redis_url", f"the Redis URL is invalid: {error}", exit_code=ExitCode.USAGE) from None
    try:
        yield redis
    finally:
        await redis.close()


def shown(url: str) -> str:
    """A URL without its password."""
    from breakwater.embedded.datadir import mask_url

    return mask_url(url)


async def subscribed(client: Client) -> None:
    """Returns when the server knows of every subscription that was made. May raise as nats-py's `flush` does."""
    # One flush is not enough: nats-py sends its PING past subscriptions that wait in its buffer.
    await client.flush()
    await client.flush()
