"""Two planes for tests of backups: one that is copied, and servers into which it is restored."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from nats.aio.client import Client

from breakwater.backup.archive import ArchiveReader, read_manifest
from breakwater.backup.contract import Manifest
from breakwater.backup.create import Source, create
from breakwater.backup.encryption import BackupKey
from breakwater.backup.progress import BackupProgress
from breakwater.backup.restore import Destination, restore
from breakwater.backup.storage import Folder, Storage, Writer
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.clickhouse.table import PLAIN
from breakwater.kernel.security.encryption import new_key
from breakwater.limits.rules.budget import periods_at
from breakwater.records.reconciliation import RecordedSpend
from tests.records import samples
from tests.services.sink.plane import Plane, of_attempt, of_execution

BEGAN = datetime.now(UTC) - timedelta(minutes=5)
KEY = BackupKey(new_key())


def records(first: int, last: int) -> Iterator[tuple[str, bytes]]:
    """The events of jobs: an attempt and the end of each."""
    for number in range(first, last + 1):
        tried = samples.attempt(f"j{number}", 1, started_at=BEGAN + timedelta(seconds=number), duration_ms=100)
        yield of_attempt(tried)
        yield of_execution(samples.execution(f"j{number}", completed_at=tried.completed_at, attempts=(tried,)))


class WatchedFolder(Folder):
    """A folder that calls a function before a file is written or read."""

    def __init__(self, path: Path, before: Callable[[str], Awaitable[None]]) -> None:
        super().__init__(path)
        self._before = before

    @asynccontextmanager
    async def write(self, name: str) -> AsyncGenerator[Writer]:
        await self._before(name)
        async with super().write(name) as file:
            yield file

    async def read(self, name: str) -> AsyncGenerator[bytes]:
        await self._before(name)
        async for chunk in super().read(name):
            yield chunk


async def make(plane: Plane, storage: Storage, key: BackupKey | None = KEY, **source: Any) -> Manifest:
    """A backup of a plane."""
    return await create(
        Source(connection=lambda: plane.client, analytics=plane.analytics, **source),
        storage,
        key=key,
        version="0.1.0",
        now=lambda: datetime.now(UTC),
        progress=BackupProgress("copied"),
    )


async def bring_back(client: Client, analytics: Analytics, storage: Storage, key: BackupKey | None = KEY) -> bool:
    """Checks and restores a backup, as the command does."""
    manifest = await read_manifest(storage, key)
    archive = ArchiveReader(storage, manifest, key, lambda _: None)
    await archive.check_all()
    destination = Destination(connection=lambda: client, analytics=analytics, layout=PLAIN, replicas=1)
    return await restore(destination, archive, manifest, BackupProgress("restored"))


async def acknowledge_all(plane: Plane, consumer: str) -> None:
    """Acknowledges all that a consumer of EVENTS has, as a service does that has handled it."""
    subscription = await plane.jetstream.pull_subscribe_bind(consumer, "EVENTS")
    waiting = (await plane.consumer(consumer)).num_pending
    for message in await subscription.fetch(waiting, timeout=10) if waiting else ():
        await message.ack_sync()
    await subscription.unsubscribe()


async def messages_of(client: Client, stream: str) -> dict[int, tuple[str, bytes]]:
    """All messages of a stream."""
    jetstream = client.jetstream(timeout=10)
    state = (await jetstream.stream_info(stream)).state
    stored: dict[int, tuple[str, bytes]] = {}
    sequence = state.first_seq
    while state.messages and sequence <= state.last_seq:
        message = await jetstream.get_msg(stream, sequence, next=True)
        assert message.seq is not None
        stored[message.seq] = (message.subject or "", message.data or b"")
        sequence = message.seq + 1
        if len(stored) == state.messages:
            break
    return stored


async def ledgers(analytics: Analytics) -> list[tuple[Any, ...]]:
    """Costs and counts of the record in ClickHouse."""
    sums = "SELECT count(), sum(cost), uniqExact(event_sequence) FROM attempts FINAL"
    ends = "SELECT count(), sum(total_cost), uniqExact(execution_id) FROM executions FINAL"
    return [*(await analytics.query(sums)).rows, *(await analytics.query(ends)).rows]


async def recorded(client: Client, analytics: Analytics) -> dict[Any, Any]:
    """What the budget service fills its counters with: ClickHouse up to what is stored, and EVENTS behind it."""
    periods = periods_at(BEGAN, ZoneInfo("UTC")).all
    record = RecordedSpend(lambda: client, analytics, ZoneInfo("UTC"))
    stored = await record.stored_spend(periods)
    logged = await record.logged_spend(stored, periods)
    spent = {place: figures.spent for place, figures in stored.figures.items()}
    for place, figures in logged.figures.items():
        spent[place] = spent.get(place, 0) + figures.spent
    return spent
