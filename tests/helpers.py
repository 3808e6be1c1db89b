"""What tests of all rooms share: waiting for a condition, and services as processes."""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import datetime
from multiprocessing import forkserver
from multiprocessing.popen_forkserver import Popen
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, patch
from zoneinfo import ZoneInfo

import nats
import psutil
import pytest
import pytest_asyncio
from hypothesis import settings
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

from breakwater.kernel.nats.broker import Broker
from breakwater.kernel.nats.core import close
from breakwater.kernel.nats.subjects import Stream
from breakwater.local import fork_server

TIMEOUT_S = 120.0
"""Long, as a machine may be busy with other things; a condition that holds ends the wait at once."""

_POLL_S = 0.01
_POLL_GROWS = 1.2
POLL_MOST_S = 0.25
"""Asking costs more than waiting: who has waited for seconds is asked four times in each."""

ZONE = next(
    zone for zone in (ZoneInfo("Europe/Berlin"), ZoneInfo("America/Los_Angeles")) if datetime.now(zone).hour < 22
)
"""Of budgets. Where no day ends while the tests run: they look at the figures of one."""

FIRST = {"Nats-Expected-Last-Subject-Sequence": "0"}
"""The header that an attempt, an execution and a result are published with: nothing may be on their subject."""


def more_examples(times: int) -> settings:
    """So many times the examples that the profile of Hypothesis wants: for what few of them reach."""
    return settings(max_examples=times * settings.default.max_examples)


async def deliver(
    broker: Broker,
    stream: Stream,
    subject: str,
    body: bytes,
    *,
    sequence: int = 1,
    headers: Mapping[str, str] = FIRST,
) -> None:
    """Hands a message to the handlers that read its subject; raises what they raise.

    Args:
        broker: within `TestNatsBroker`, where nothing is acknowledged.
        stream: its stream.
        subject: its subject.
        body: its bytes.
        sequence: its place in the stream.
        headers: its headers.
    """
    stored_ns = time.time_ns()
    place = f"$JS.ACK.{stream}.consumer.1.{sequence}.{sequence}.{stored_ns}.0"
    # Its messages have no connection.
    with patch("breakwater.kernel.nats.delivery.publish_empty", AsyncMock()):
        await broker.publish(body, subject, stream=stream.value, headers=dict(headers), reply_to=place)


async def until(
    condition: Callable[[], Any], what: str = "the condition", *, timeout_s: float = TIMEOUT_S, brief: bool = False
) -> Any:
    """Waits until a function, or what it makes to be awaited, gives something true, and returns that.

    Args:
        condition: asked less often the longer it takes.
        what: for the message where it does not come true.
        timeout_s: the wait, at most.
        brief: it holds for a moment only, and is asked as often all the time.
    """
    deadline, poll_s = time.monotonic() + timeout_s, _POLL_S
    while True:
        found = condition()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout_s:g} s"
        await asyncio.sleep(poll_s)
        poll_s = poll_s if brief else min(poll_s * _POLL_GROWS, POLL_MOST_S)


async def accepts(host: str, port: int) -> bool:
    """Whether a server accepts connections there, whatever it speaks."""
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.close()
    return True


async def all_acknowledged(jetstream: JetStreamContext, stream: str, consumer: str) -> bool:
    """Whether a consumer has acknowledged all that is stored for it.

    NATS counts what waits for a consumer a moment after it has acknowledged the storing: no number that waits says
    that nothing does.
    """
    info = await jetstream.consumer_info(stream, consumer)
    if info.num_pending or info.num_ack_pending:
        return False
    last = 0
    for subject in info.config.filter_subjects or [info.config.filter_subject or ">"]:
        with suppress(NotFoundError):
            last = max(last, (await jetstream.get_last_msg(stream, subject, direct=True)).seq or 0)
    return info.delivered is not None and info.delivered.stream_seq >= last


def wait_until(condition: Callable[[], Any], what: str = "the condition", *, timeout_s: float = TIMEOUT_S) -> Any:
    """Does the same where there is no event loop."""
    deadline, poll_s = time.monotonic() + timeout_s, _POLL_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout_s:g} s"
        time.sleep(poll_s)
        poll_s = min(poll_s * _POLL_GROWS, POLL_MOST_S)
    return found


def runs(process: psutil.Process) -> bool:
    """Whether a process has not ended, whoever is to reap it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it was reaped in between
        return False


def share_event_loop(items: list[pytest.Item], folder: Path) -> None:
    """Has all tests of a folder run in one event loop, in which they can share servers. Called when they are collected.

    Their fixtures say so themselves: `pytest_asyncio.fixture(loop_scope="package")`.
    """
    for item in items:
        if pytest_asyncio.is_async_test(item) and item.path.parent == folder:
            item.add_marker(pytest.mark.asyncio(loop_scope="package"), append=False)


@asynccontextmanager
async def nats_client(url: str) -> AsyncGenerator[Client]:
    """A connection that outlasts its server, and is closed for good at the end, also if that is away then."""
    client = await nats.connect(url, max_reconnect_attempts=-1, reconnect_time_wait=0.1)
    try:
        yield client
    finally:
        await close(client)


@contextmanager
def own_fork_server() -> Generator[None]:
    """Has services forked from a server that starts with the first of them, and from no other test's."""
    own = forkserver.ForkServer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forkserver, "_forkserver", own)
        for name in ("ensure_running", "connect_to_new_process", "set_forkserver_preload"):
            patch.setattr(forkserver, name, getattr(own, name))
        try:
            yield
        finally:
            fork_server.stop()


ServiceProcess = subprocess.Popen[bytes] | Popen


def start_service(
    name: str, environment: Mapping[str, str], log_file: Path, python: Path | None = None
) -> ServiceProcess:
    """Starts a service as a process with a pid of its own, which takes signals as any; ready in a fraction of a second.

    Args:
        name: of the service.
        environment: beside this process' own.
        log_file: gets what it logs, after what stands there.
        python: of another version of Breakwater; None for this one.
    """
    everything = {**os.environ, **environment}
    with log_file.open("ab") as log:
        # A fork is loaded already.
        if not fork_server.SUPPORTED or "LD_PRELOAD" in environment or python is not None:
            argv = (str(python or sys.executable), "-m", "breakwater.services", name)
            return subprocess.Popen(argv, env=everything, stdout=log, stderr=log, start_new_session=True)
        fork_server.start()
        return fork_server.fork(name, log.fileno(), everything)
