"""Restores a backup into servers without a plane's data.

The first stream that is restored carries a mark until everything is there, with which `setup` creates nothing. An
interrupted restore continues: streams that are there are not restored again, and rows replace the same rows. If NATS
itself ended in the middle of a stream, it has a part of that, and the restore has to begin with empty servers.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import aclosing
from dataclasses import dataclass

import orjson

from breakwater.backup import rules, tables
from breakwater.backup.archive import ArchiveReader
from breakwater.backup.contract import Manifest
from breakwater.backup.errors import BackupError
from breakwater.backup.progress import BackupProgress
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.clickhouse.table import Layout
from breakwater.kernel.nats import snapshots
from breakwater.kernel.nats.core import ClientGetter
from breakwater.kernel.nats.snapshots import CHUNK_BYTES, FIRST_RESTORED, StoredConsumer, StoredStream
from breakwater.records.migrations import migrate

EMPTY_IT = (
    "restore into servers without a plane's data. Stop the plane; with `breakwater up`, name an empty data directory; "
    "with containers, `docker compose down --volumes` deletes their data"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """The servers of a plane that is not running.

    Attributes:
        connection: to NATS, as the user `setup`.
        analytics: ClickHouse, as the user that may create tables.
        layout: of the tables.
        replicas: copies of each stream.
    """

    connection: ClientGetter
    analytics: Analytics
    layout: Layout
    replicas: int


async def restore(
    destination: Destination, archive: ArchiveReader, manifest: Manifest, progress: BackupProgress
) -> bool:
    """Restores streams and tables from a backup that was checked.

    Returns:
        True if it has continued a restore that was interrupted.

    Raises:
        BackupError: the servers are not empty, or the backup is not readable any more.
        BusError, AnalyticsError: a server does not answer, or refuses.
    """
    client = destination.connection()
    existing = {stream.name: stream for stream in await snapshots.list_streams(client)}
    restored_from = {name: stream.metadata.get(snapshots.RESTORED_FROM) for name, stream in existing.items()}
    if problem := rules.problem_of_streams(manifest, restored_from):
        raise BackupError(f"{problem}: {EMPTY_IT}")
    marked = existing.get(FIRST_RESTORED.value)
    continues = marked is not None
    if marked is not None and snapshots.UNFINISHED not in marked.metadata:
        raise BackupError(f"this backup is restored here already: {EMPTY_IT}")
    _require_columns(manifest)
    if not continues:
        await _require_empty_tables(destination.analytics)
    document = orjson.loads(await _whole(archive, manifest.consumers))
    streams = {fields["name"]: StoredStream(**fields) for fields in document["streams"]}
    consumers = {
        name: [StoredConsumer(**fields) for fields in listed] for name, listed in document["consumers"].items()
    }
    files = {stream.name: stream.file for stream in manifest.streams}
    names = rules.restore_order(list(files), FIRST_RESTORED.value)
    for name in names:
        progress.begin(f"stream {name}")
        if name in existing:
            if not rules.is_whole(existing[name], streams[name]):
                raise BackupError(f"stream {name} is restored in part, as NATS ended meanwhile: {EMPTY_IT}")
        else:
            async with aclosing(_in_chunks(archive.read(files[name]))) as chunks:
                await snapshots.restore(
                    client,
                    streams[name],
                    chunks,
                    backup=manifest.id,
                    replicas=destination.replicas,
                    unfinished=name == FIRST_RESTORED,
                )
        for consumer in consumers[name]:
            redelivers_all = streams[name].config.get("retention") == "workqueue"
            await snapshots.create_consumer(client, name, consumer, redelivers_all=redelivers_all)
        if name == FIRST_RESTORED:
            await _restore_tables(destination, archive, manifest, progress)
    await _publish_late_jobs(destination, archive, manifest)
    now = {stream.name: stream for stream in await snapshots.list_streams(client)}
    await snapshots.finish(client, now[FIRST_RESTORED.value])
    return continues


def _require_columns(manifest: Manifest) -> None:
    existing = {table.name: tuple(table.columns) for table in tables.COPIED}
    for saved in manifest.tables:
        columns = existing.get(saved.name, ())
        if problem := rules.problem_of_columns(saved.name, saved.columns, columns, manifest.plane_version):
            raise BackupError(problem)


async def _require_empty_tables(analytics: Analytics) -> None:
    if not await analytics.has_database():
        return
    for table in tables.COPIED:
        if await tables.count_rows(analytics, table):
            raise BackupError(f"table {table.name} of ClickHouse has rows: {EMPTY_IT}")


async def _restore_tables(
    destination: Destination, archive: ArchiveReader, manifest: Manifest, progress: BackupProgress
) -> None:
    analytics = destination.analytics
    await migrate(analytics, destination.layout)
    for saved in manifest.tables:
        progress.begin(f"table {saved.name}")
        for file in saved.files:
            async with aclosing(archive.read(file)) as blocks:
                await analytics.insert_blocks(saved.name, saved.columns, blocks)


async def _publish_late_jobs(destination: Destination, archive: ArchiveReader, manifest: Manifest) -> None:
    for line in (await _whole(archive, manifest.late_jobs)).splitlines():
        message = orjson.loads(line)
        data = base64.b64decode(message["data"])
        await snapshots.put_back(destination.connection(), message["subject"], data, message["headers"])


async def _whole(archive: ArchiveReader, file: str) -> bytes:
    return b"".join([chunk async for chunk in archive.read(file)])


async def _in_chunks(content: AsyncIterable[bytes]) -> AsyncGenerator[bytes]:
    unsent = bytearray()
    async for piece in content:
        unsent += piece
        while len(unsent) >= CHUNK_BYTES:
            yield bytes(unsent[:CHUNK_BYTES])
            del unsent[:CHUNK_BYTES]
    if unsent:
        yield bytes(unsent)
