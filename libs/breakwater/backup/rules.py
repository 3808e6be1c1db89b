"""Decisions of backups: the order in which streams are copied and restored, and what keeps a restore from beginning."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from breakwater.backup.contract import Manifest
from breakwater.kernel.nats.snapshots import StoredStream
from breakwater.kernel.nats.subjects import Stream

COPY_ORDER = (
    Stream.JOBS,
    Stream.PARKED,
    # A body is removed when its job has a result, so what lacks its body has one in the copy of RESULTS.
    Stream.BODIES,
    Stream.EVENTS,
    Stream.RESULTS,
    Stream.RESPONSES,
    Stream.DLQ,
    Stream.ALERTS,
    Stream.ALERTER,
    Stream.AUDIT,
    Stream.KEYS,
    Stream.LIMITS,
    Stream.ADVISORIES,
)
"""Each stream before those that get what its messages cause, which happens before these are acknowledged: a job that is
gone from JOBS is decided in the copy of EVENTS, and an event that the alerter acknowledged has its alert in ALERTS."""

WORK_QUEUES = (Stream.JOBS, Stream.PARKED)

SINK_CONSUMERS = frozenset({"sink-events", "sink-alerts", "sink-audit"})
"""The consumers whose messages are in ClickHouse when they are acknowledged. They continue from where they were before
the tables were copied: the rest is stored once more, and replaces the same rows."""


def copy_order(names: Iterable[str]) -> list[str]:
    """Sorts the streams of a plane; those of others come last."""
    order = {name.value: place for place, name in enumerate(COPY_ORDER)}
    return sorted(names, key=lambda name: (order.get(name, len(order)), name))


def restore_order(names: Sequence[str], first: str) -> list[str]:
    """Puts one stream first."""
    return [*(name for name in names if name == first), *(name for name in names if name != first)]


def problem_of_streams(manifest: Manifest, restored_from: Mapping[str, str | None]) -> str | None:
    """Says why a backup can't be restored into a NATS; None if it can.

    Args:
        manifest: the backup's.
        restored_from: the streams that NATS has, and the backups that they were restored from.
    """
    ours = {stream.name for stream in manifest.streams}
    if foreign := sorted({backup for backup in restored_from.values() if backup not in (None, manifest.id)}):
        return f"NATS has streams of another backup, {foreign[0]}"
    strangers = sorted(name for name, backup in restored_from.items() if name in ours and backup is None)
    return f"NATS has the stream {strangers[0]} already" if strangers else None


def is_whole(stored: StoredStream, copied: StoredStream) -> bool:
    """Returns True if a stream has all messages of its copy, apart from the oldest ones, which may have expired."""
    expired_at_most = max(stored.first - copied.first, 0)
    return stored.last >= copied.last and stored.messages >= copied.messages - expired_at_most


def problem_of_columns(table: str, saved: Collection[str], existing: Collection[str], version: str) -> str | None:
    """Says that a backup has a column that this version's table lacks; None if it has none."""
    lacking = sorted(set(saved) - set(existing))
    return f"the backup has the column {table}.{lacking[0]}: install version {version}" if lacking else None
