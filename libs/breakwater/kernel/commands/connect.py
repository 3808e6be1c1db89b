"""Connections of commands to NATS, Redis and ClickHouse, with errors that say what to do; and progress lines."""

from __future__ import annotations

import ssl
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from breakwater.kernel.commands import interrupts, output
from breakwater.kernel.commands.errors import CliError, ExitCode, unreachable
from breakwater.kernel.server_urls import server_urls

if TYPE_CHECKING:
    from nats.aio.client import Client

    from breakwater.kernel.clickhouse.client import Analytics
    from breakwater.kernel.nats.topology import Plan
    from breakwater.kernel.redis.connection import Redis

T = TypeVar("T")

CONNECT_TIMEOUT_S = 3.0


def run(work: Coroutine[Any, Any, T], *, waiting: str = "") -> T:
    """Runs the asynchronous part of a command; a terminal shows `waiting` meanwhile."""

    async def run_with_progress() -> T:
        async with progress(lambda: waiting, lines_every_s=None):
            return await work

    return interrupts.run(run_with_progress() if waiting else work)


@asynccontextmanager
async def progress(describe: Callable[[], str], *, lines_every_s: float | None) -> AsyncGenerator[None]:
    """Shows the progress of the work in the block on stderr: steadily on a terminal, elsewhere line by line.

    Args:
        describe: describes the state of the work in one line.
        lines_every_s: seconds between lines if stderr is no terminal; None for no lines.
    """
    import asyncio

    from breakwater.kernel.process import background

    on_terminal = output.is_terminal(sys.stderr)

    async def show() -> None:
        previous = ""
        with output.console(stderr=True).status("", spinner="line") if on_terminal else nullcontext() as status:
            while True:
                state = describe()
                if status is not None:
                    status.update(output.text(state))
                elif state != previous:
                    output.write(state, stderr=True)
                previous = state
                await asyncio.sleep(0.125 if on_terminal else lines_every_s or 0)

    if not on_terminal and lines_every_s is None:
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
    """Connects to NATS.

    Args:
        url: URL with user and password; of one server, or several.
        reconnects: True to restore a lost connection as soon as the server is back.
        on_error: receives errors that no call raises: denied permissions, dropped messages.
        on_connection: receives False when the connection is lost, and True when it is restored.

    Raises:
        CliError: if the server does not answer, or refuses the user.
    """
    import nats
    import nats.errors

    from breakwater.kernel.nats.core import close, tls_options
    from breakwater.kernel.nats.permissions import USERS, inbox_prefix
    from breakwater.kernel.nats.subjects import PROGRAM

    outages = (OSError, TimeoutError, nats.errors.UnexpectedEOF, nats.errors.StaleConnectionError)
    connect_errors: list[Exception] = []
    connected = False

    async def report_error(error: Exception) -> None:
        if not connected:
            connect_errors.append(error)
        elif not isinstance(error, outages):  # `on_connection` reports outages
            on_error(error)

    async def report_loss() -> None:
        if not client.is_closed:  # this side did not close it
            on_connection(False)

    async def report_reconnection() -> None:
        on_connection(True)

    try:
        servers = server_urls(url)
    except ValueError as error:
        raise CliError("nats_url", f"the NATS URL is invalid: {error}", exit_code=ExitCode.USAGE) from None
    user = unquote(urlsplit(servers[0]).username or "")
    try:
        client = await nats.connect(
            servers,
            name="breakwater-cli",
            inbox_prefix=inbox_prefix(user if user.startswith(PROGRAM) or user in USERS else "client"),
            allow_reconnect=False,
            # nats-py also applies this limit to the first connection, where 0 would mean to try for ever.
            max_reconnect_attempts=1,
            reconnect_time_wait=0.1,
            connect_timeout=CONNECT_TIMEOUT_S,
            **tls_options(url),
            error_cb=report_error,
            disconnected_cb=report_loss,
            reconnected_cb=report_reconnection,
        )
    except (OSError, TimeoutError, nats.errors.Error) as error:
        cause = connect_errors[-1] if connect_errors else error
        raise unreachable(
            f"NATS does not answer at {without_password(url)}: {cause or type(cause).__name__}",
            "A tls:// URL needs `handshake_first: true` in the server's tls block; nats:// uses TLS if the server asks."
            if isinstance(cause, ssl.SSLError) and url.startswith("tls:")
            else "`breakwater doctor` shows which servers and services respond.",
        ) from error
    connected = True
    client.options.update(allow_reconnect=reconnects, max_reconnect_attempts=-1, reconnect_time_wait=0.5)
    try:
        yield client
    finally:
        await close(client)


async def prepare_streams(url: str, plan: Plan, *, replicas: int) -> tuple[str, ...]:
    """Creates and updates streams and consumers. Returns a line for each change.

    Raises:
        CliError: if NATS or JetStream does not answer, or the URL is invalid.
        BusError: if NATS refuses a change.
    """
    import nats.errors

    from breakwater.kernel.nats.provision import provision

    async with bus(url):
        pass  # reports a wrong address or password immediately; `provision` would retry for two minutes
    try:
        return await provision(url, plan, replicas=replicas)
    except (OSError, TimeoutError, nats.errors.Error) as error:
        raise unreachable(
            f"JetStream does not answer at {without_password(url)}: {str(error) or type(error).__name__}",
            "Is JetStream enabled, and may this user create streams?",
        ) from error


@asynccontextmanager
async def analytics(url: str, *, answer_timeout_s: float | None = None) -> AsyncGenerator[Analytics]:
    """Opens a client of ClickHouse, which may be silent for `answer_timeout_s` while it works on a statement."""
    from breakwater.kernel.clickhouse.client import ANSWER_TIMEOUT_S, connect

    try:
        client = connect(url, answer_timeout_s=answer_timeout_s or ANSWER_TIMEOUT_S)
    except ValueError as error:
        raise CliError("clickhouse_url", str(error), exit_code=ExitCode.USAGE) from None
    try:
        yield client
    finally:
        await client.close()


def ask_clickhouse(url: str, query: Callable[[Analytics], Awaitable[T]], *, answer_timeout_s: float | None = None) -> T:
    """Connects to ClickHouse for one query, and returns its result."""

    async def connect_and_query() -> T:
        async with analytics(url, answer_timeout_s=answer_timeout_s) as client:
            return await query(client)

    return run(connect_and_query())


async def read_only_settings(analytics: Analytics, settings: Mapping[str, object]) -> dict[str, object]:
    """Adds settings that make a statement read-only and end it with its client.

    Returns:
        All settings; none if the user may not change any.
    """
    # At level 1 the user may change no setting; at level 2, any but `readonly`.
    readonly_level = int((await analytics.query("SELECT getSetting('readonly')")).rows[0][0])
    if readonly_level == 1:
        return {}
    readonly = {} if readonly_level else {"readonly": 2}
    return {**settings, "cancel_http_readonly_queries_on_client_close": 1, **readonly}


@asynccontextmanager
async def state(url: str) -> AsyncGenerator[Redis]:
    """Opens a connection to Redis."""
    from breakwater.kernel.redis.connection import Redis

    try:
        redis = Redis(url)
    except ValueError as error:
        raise CliError("redis_url", f"the Redis URL is invalid: {error}", exit_code=ExitCode.USAGE) from None
    try:
        yield redis
    finally:
        await redis.close()


def without_password(url: str) -> str:
    """Masks the password in a URL."""
    from breakwater.kernel.security.secret_refs import mask_url

    return mask_url(url)


async def flush_subscriptions(client: Client) -> None:
    """Waits until the server has every subscription of the client. Raises what nats-py's `flush` raises."""
    # One flush is not enough: nats-py's PING overtakes subscriptions that wait in its buffer.
    await client.flush()
    await client.flush()
