"""Makes a backup of a running plane.

ClickHouse is copied first, and the streams after it: what ClickHouse lacks of them is stored once more after a restore,
as the consumers of the sink continue from where they were before. Redis is rebuilt from both.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson

from breakwater.backup import rules, tables
from breakwater.backup.archive import ArchiveWriter
from breakwater.backup.contract import FORMAT, LocalFile, Manifest, StreamInBackup, TableInBackup
from breakwater.backup.encryption import BackupKey
from breakwater.backup.errors import BackupError
from breakwater.backup.progress import BackupProgress
from breakwater.backup.storage import Storage
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.nats import snapshots
from breakwater.kernel.nats.core import ClientGetter
from breakwater.kernel.nats.snapshots import StoredConsumer, StoredStream
from breakwater.kernel.nats.subjects import Stream

CONSUMERS = "streams/consumers.json.zst"
LATE_JOBS = "jobs/late.jsonl.zst"

_LATE = (Stream.JOBS, Stream.PARKED, Stream.JOBS)
"""A parked job may return to JOBS after that was copied, and before PARKED is; some even park again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A plane.

    Attributes:
        connection: to NATS, as the user `setup`.
        analytics: ClickHouse, as a user that may read all tables.
        files: files of this machine by their names: the config, keys.
        secret_files: those that are copied only if there is a key.
    """

    connection: ClientGetter
    analytics: Analytics
    files: Mapping[str, Path] = field(default_factory=dict[str, Path])
    secret_files: Mapping[str, Path] = field(default_factory=dict[str, Path])


async def create(
    source: Source,
    storage: Storage,
    *,
    key: BackupKey | None,
    version: str,
    now: Callable[[], datetime],
    progress: BackupProgress,
) -> Manifest:
    """Makes a backup, and returns its manifest, which is written last.

    Args:
        source: the plane.
        storage: an empty place, or one with what an interrupted run has left, which is removed.
        key: encrypts it; None to leave it plain, without secrets.
        version: the plane's.
        now: the clock.
        progress: is told how far it is.

    Raises:
        BackupError: the place can't be used.
        BusError, AnalyticsError: a server does not answer, or refuses.
    """
    begun_at = now()
    client = source.connection()
    archive = ArchiveWriter(storage, key, progress.add_bytes)
    streams = {stream.name: stream for stream in await snapshots.list_streams(client)}
    if missing := [stream.value for stream in rules.COPY_ORDER if stream.value not in streams]:
        raise BackupError(f"NATS has no stream {missing[0]}: run `breakwater setup`")
    await archive.begin()
    stored = [consumer for stream in _SINK_STREAMS for consumer in await snapshots.list_consumers(client, stream.value)]
    positions = {consumer.name: consumer for consumer in stored if consumer.name in rules.SINK_CONSUMERS}
    copied_tables = await _copy_tables(source.analytics, archive, progress)
    moment = now()
    copied_streams: list[StreamInBackup] = []
    consumers: dict[str, list[StoredConsumer]] = {}
    streams_in_order = [streams[name] for name in rules.copy_order(streams) if _is_on_disk(streams[name])]
    progress.expect(sum(stream.messages for stream in streams_in_order))
    definitions: dict[str, StoredStream] = {}
    for stream in streams_in_order:
        progress.begin(f"stream {stream.name}")
        # Before the copy: what is acknowledged up to there has had its effects in the streams that are copied later.
        consumers[stream.name] = [
            positions.get(consumer.name, consumer) for consumer in await snapshots.list_consumers(client, stream.name)
        ]
        file = f"streams/{stream.name if stream.name.isidentifier() else len(copied_streams)}"
        async with snapshots.snapshot(client, stream) as (begun, chunks):
            await archive.write(file, chunks)
        definitions[stream.name] = begun
        copied_streams.append(
            StreamInBackup(name=stream.name, file=file, messages=begun.messages, first=begun.first, last=begun.last)
        )
        progress.finish(stream.messages)
        if stream.name == Stream.PARKED:
            since = {name: definitions[name.value].last for name in rules.WORK_QUEUES}
            await archive.write(LATE_JOBS, _late_jobs(source.connection, since))
    await archive.write(CONSUMERS, _single(_definitions_json(definitions, consumers)))
    local_files, left_out = await _copy_files(source, archive, encrypted=key is not None)
    manifest = Manifest(
        format=FORMAT,
        id=f"{moment:%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}",
        plane_version=version,
        begun_at=begun_at,
        moment=moment,
        completed_at=now(),
        key=None if key is None else key.id,
        files=tuple(archive.files),
        streams=tuple(copied_streams),
        consumers=CONSUMERS,
        late_jobs=LATE_JOBS,
        tables=copied_tables,
        local_files=local_files,
        left_out=left_out,
    )
    await archive.write_manifest(manifest)
    return manifest


_SINK_STREAMS = (Stream.EVENTS, Stream.ALERTS, Stream.AUDIT)


def _is_on_disk(stream: StoredStream) -> bool:
    """NATS makes no snapshots of streams in memory, which a restart empties anyway. The plane has none."""
    return stream.config.get("storage") != "memory"


async def _copy_tables(
    analytics: Analytics, archive: ArchiveWriter, progress: BackupProgress
) -> tuple[TableInBackup, ...]:
    analytics = await analytics.caught_up(*tables.COPIED)
    counts = {table.name: await tables.count_rows(analytics, table) for table in tables.COPIED}
    progress.expect(sum(counts.values()))
    copied: list[TableInBackup] = []
    for table in tables.COPIED:
        columns = await tables.stored_columns(analytics, table)
        files: list[str] = []
        for number, part in enumerate(await tables.plan_parts(analytics, table), 1):
            progress.begin(f"table {table.name}")
            file = f"tables/{table.name}/{number:05}.native.zst"
            async with aclosing(tables.copy_part(analytics, table, columns, part)) as chunks:
                await archive.write(file, chunks)
            files.append(file)
            progress.finish(part.rows)
        copied.append(TableInBackup(name=table.name, columns=columns, rows=counts[table.name], files=tuple(files)))
    return tuple(copied)


async def _late_jobs(connection: ClientGetter, since: Mapping[Stream, int]) -> AsyncGenerator[bytes]:
    """Yields the jobs, a line each, that came to the work queues after these were copied."""
    last = dict(since)
    for stream in _LATE:
        async with aclosing(snapshots.messages_after(connection(), stream.value, last[stream])) as messages:
            async for message in messages:
                last[stream] = message.sequence
                data = base64.b64encode(message.data).decode()
                yield orjson.dumps({"subject": message.subject, "headers": message.headers, "data": data}) + b"\n"


def _definitions_json(streams: Mapping[str, StoredStream], consumers: Mapping[str, Sequence[StoredConsumer]]) -> bytes:
    return orjson.dumps({"streams": list(streams.values()), "consumers": dict(consumers)})


async def _copy_files(
    source: Source, archive: ArchiveWriter, *, encrypted: bool
) -> tuple[tuple[LocalFile, ...], tuple[str, ...]]:
    """Returns the files that were copied, and the names of those that were left out."""
    paths = {**source.files, **(source.secret_files if encrypted else {})}
    copied: list[LocalFile] = []
    for number, (name, path) in enumerate(paths.items(), 1):
        file = f"files/{number:03}"
        await archive.write(file, _single(_content_of(path)))
        copied.append(LocalFile(name=name, file=file))
    return tuple(copied), () if encrypted else tuple(source.secret_files)


def _content_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BackupError(f"{path} can't be read: {error.strerror or error}") from error


async def _single(content: bytes) -> AsyncIterable[Any]:
    yield content
