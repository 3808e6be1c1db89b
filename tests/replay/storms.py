"""Recorded storms, and their replays."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import nats
from nats.aio.client import Client

from breakwater.config import Config, load_config
from breakwater.kernel.clickhouse.table import Table
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.types import time_from_ms
from breakwater.local.ports import free_port
from breakwater.local.servers import nats_spec
from breakwater.records import rows, schema
from breakwater.replay.log import read_log
from breakwater.replay.rules.engine import Replay, ReplayedJob, ReplayFindings
from breakwater.replay.rules.history import Changes, Policy, RecordedJob
from breakwater.replay.rules.world import World
from tests.finished_demo import FinishedDemo
from tests.server_sources import ProcessRunner

Storm = tuple[list[RecordedJob], Changes]


async def storm_of(demo: FinishedDemo, directory: Path) -> Storm:
    """What the streams of a finished demo hold, read from a copy of its server's files."""
    shutil.copytree(demo.data / "nats", directory / "nats")
    port = free_port()
    spec = nats_spec(directory, port, {})
    config = directory / "nats.conf"
    account = 'accounts: {"plane": {jetstream: enabled, users: [{user: reader, password: reader}]}}\n'
    config.write_text(config.read_text() + account)
    server = ProcessRunner(spec)
    server.start()
    try:
        client = await _connected(f"nats://reader:reader@127.0.0.1:{port}")
        try:
            return await read_log(Lookup(lambda: client))
        finally:
            await client.close()
    finally:
        server.stop()


async def _connected(url: str) -> Client:
    for _ in range(100):
        try:
            return await nats.connect(url, allow_reconnect=False, error_cb=_ignore)
        except OSError:
            await asyncio.sleep(0.05)
    raise AssertionError(f"no server at {url}")


async def _ignore(_: Exception) -> None: ...


def replayed(
    storm: Storm, policy: Policy, before: Policy | None = None
) -> tuple[ReplayFindings, Sequence[ReplayedJob]]:
    """Replays a storm under a policy. Returns what that finds, and the jobs."""
    jobs, changes = storm
    ended: list[ReplayedJob] = []
    world = World(logged.attempt for job in jobs for logged in job.attempts)
    replay = Replay(policy, before or policy, changes, world, on_end=ended.append)
    replay.run(jobs)
    return replay.finish(), ended


def config_of(demo: FinishedDemo) -> Config:
    return load_config(demo.data / "breakwater.yaml")


def rows_of(storm: Storm) -> Iterator[tuple[Table, list[rows.StoredRow]]]:
    """The rows of a storm, as the sink inserts them."""
    jobs, changes = storm
    yield schema.EXECUTIONS, [rows.execution_row(job.record, number) for number, job in enumerate(jobs, 1)]
    logged_attempts = [logged for job in jobs for logged in job.attempts]
    yield (
        schema.ATTEMPTS,
        [rows.attempt_row(logged.attempt, logged.sequence, time_from_ms(logged.at_ms)) for logged in logged_attempts],
    )
    yield schema.BREAKER_TRANSITIONS, [rows.transition_row(event, n) for n, event in enumerate(changes.transitions, 1)]
    yield schema.GUARD_EVENTS, [rows.guard_row(event, n) for n, event in enumerate(changes.guards, 1)]
    yield schema.BUDGET_EVENTS, [rows.budget_row(event, n) for n, event in enumerate(changes.budgets, 1)]
    yield schema.LIMIT_EVENTS, [rows.limit_row(event, n) for n, event in enumerate(changes.limits, 1)]
    yield schema.ALERTS, [rows.alert_row(alert, n) for n, alert in enumerate(changes.alerts, 1)]
