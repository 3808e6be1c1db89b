"""The API keys that the plane keeps, followed in KEYS and changed there.

The newest message of a key is its state. Each change names the last sequence of KEYS that its writer knew, and the
stream takes it only if there is no later one, so that no two keys get one name and no change is lost. The writer then
sends a notice, upon which the other processes read on; they also look regularly, as notices may be lost.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import structlog
from pydantic import ValidationError

from breakwater.identity.rules.callers import Caller, digest_of, holder_of_key
from breakwater.identity.rules.keys import ENDED_KEPT, KeyRecord, KeyRefusedError
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.core import core_subscription
from breakwater.kernel.nats.errors import AlreadyDecidedError, BusError, BusUnavailableError
from breakwater.kernel.nats.lookup import ClientGetter, Lookup, StoredMessage
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.process import background
from breakwater.kernel.process.outage import Outage

LOOK_S = 5.0
"""Interval of looks for changes whose notice was lost."""

RETRY_S = 0.5
_FAR = timedelta(days=36_500)
"""NATS counts nanoseconds in 64 bits: a time that is much longer would overflow."""

REPLICA_LAG_S = 2.0
REPLICA_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class PlaneKey:
    """A key in memory. Its record stays JSON, which takes a quarter of the memory of the parsed one."""

    holder: Caller
    created_at: float
    """In seconds since the epoch, as all times here: comparing times with zones costs a hundred times as much."""
    digest: str
    old_digest: str | None
    old_until: float
    is_revoked: bool
    """A revoked key is refused whatever the clocks of the two processes say."""
    ends_at: float | None
    """When it ends, or has ended; None if it does not end."""
    document: bytes

    @classmethod
    def of(cls, record: KeyRecord, document: bytes) -> PlaneKey:
        """Makes it of a record, and of the same as JSON."""
        old = record.old_secret
        return cls(
            holder=holder_of_key(record.key, record.ends_at),
            created_at=record.key.created_at.timestamp(),
            digest=record.key.sha256,
            old_digest=None if old is None else old.sha256,
            # A secret that was replaced without a grace period is refused by a slow clock, too.
            old_until=0.0 if old is None or old.valid_until <= record.at else old.valid_until.timestamp(),
            is_revoked=record.revoked_at is not None,
            ends_at=None if record.ends_at is None else record.ends_at.timestamp(),
            document=document,
        )

    @property
    def record(self) -> KeyRecord:
        """Its record, parsed anew."""
        return KeyRecord.model_validate_json(self.document)

    def is_active(self, now: float) -> bool:
        """Returns True if it has not ended."""
        return not self.is_revoked and not self.ended_by(now)

    def ended_by(self, moment: float) -> bool:
        """Returns True if it had ended at a moment."""
        return self.ends_at is not None and self.ends_at <= moment

    def holder_by(self, digest: str, now: float) -> Caller | None:
        """Returns the caller that a secret, by its digest, proves to hold the key; None if it is not valid now."""
        if not self.is_active(now):
            return None
        if hmac.compare_digest(self.digest, digest):
            return self.holder
        if self.old_digest is None or now >= self.old_until or not hmac.compare_digest(self.old_digest, digest):
            return None
        old_until = datetime.fromtimestamp(self.old_until, UTC)
        ends_at = self.holder.expires_at
        ends_at = old_until if ends_at is None else min(ends_at, old_until)
        return replace(self.holder, digest=digest, expires_at=ends_at)

    def why_refused(self, secret: str) -> str | None:
        """Returns why a secret that was valid once is refused; None if it never was."""
        digest = digest_of(secret)
        if self.old_digest is not None and hmac.compare_digest(self.old_digest, digest):
            return "the secret of this API key was replaced; use its new one"
        if not hmac.compare_digest(self.digest, digest):
            return None
        record = self.record
        if record.revoked_at is not None:
            return "this API key was revoked"
        return None if record.expires_at is None else f"this API key expired at {record.expires_at:%Y-%m-%d %H:%M} UTC"


KeyDecision = Callable[[], KeyRecord]
"""Gives the record of a changed or new key, given the keys of the log. It may be called repeatedly."""


class KeyLog:
    """The keys of KEYS: follows the stream, and publishes changes.

    Args:
        connection: to NATS.
        publisher: of the service.
        note_change: called with the ids of changed keys, after a change.
    """

    def __init__(self, connection: ClientGetter, publisher: Publisher) -> None:
        self.keys: dict[str, PlaneKey] = {}
        self.filled = asyncio.Event()
        self.note_change: Callable[[Iterable[str]], None] = lambda _: None
        self._connection = connection
        self._publisher = publisher
        self._lookup = Lookup(connection)
        self._lock = asyncio.Lock()
        self._stream: str | None = None
        self._sequence = 0
        self._notice = asyncio.Event()
        self._outage = Outage("api_keys")

    async def run(self) -> None:
        """Follows the stream until cancelled. While NATS is unavailable, the known keys stay valid."""
        while True:
            try:
                async with core_subscription(self._connection, subjects.KEY_CHANGES, self._hear):
                    while True:
                        self._notice.clear()
                        await self.catch_up()
                        self._outage.note_success()
                        self.filled.set()
                        timer = asyncio.get_running_loop().call_later(
                            background.aligned_delay(LOOK_S), self._notice.set
                        )
                        await self._notice.wait()
                        timer.cancel()
            except BusError as error:
                self._outage.note_failure(error)
            await asyncio.sleep(RETRY_S)

    async def catch_up(self) -> None:
        """Reads the changes that were made since the last time, by any process. Raises BusError."""
        async with self._lock:
            await self._read()

    async def change(self, decide: KeyDecision, key_id: str | None = None) -> KeyRecord:
        """Publishes a change, and decides again if other keys were changed meanwhile.

        Args:
            decide: gives the new record. It may raise KeyRefusedError.
            key_id: the key that is changed; None for a new one.

        Raises:
            KeyRefusedError: as `decide`, or somebody else has changed the key at this moment.
            BusUnavailableError: the change was not made, or may have been if NATS did not answer.
        """
        async with self._lock:
            await self._read()
            before = None if key_id is None else self.keys.get(key_id)
            while True:
                record = decide()
                try:
                    stored = await self._publisher.event(
                        subjects.api_key(record.key.id),
                        record,
                        id=f"{record.key.id}/{record.change}/{self._sequence}",
                        at=record.at,
                        after=self._sequence,
                        removed_in_s=kept_s(record),
                    )
                except AlreadyDecidedError:
                    await self._read()
                    if before is not None and self.keys.get(before.holder.id) != before:
                        message = (
                            f"another caller changed the key {before.holder.name!r} at this moment; look at it first"
                        )
                        raise KeyRefusedError("key_changed", message) from None
                    continue
                break
            self._sequence = stored.sequence
            self._take({record.key.id: PlaneKey.of(record, record.json_bytes())})
        try:
            await self._publisher.send(subjects.KEY_CHANGES, str(stored.sequence).encode())
        except BusUnavailableError:
            # The change is made; the other processes will see it when they look.
            structlog.get_logger().info("key_notice_not_sent", key_id=record.key.id)
        return record

    def _hear(self, data: bytes) -> None:
        if not data.isdigit() or int(data) > self._sequence:
            self._notice.set()

    async def _read(self) -> None:
        facts = await self._lookup.facts(Stream.KEYS)
        is_other = facts.identity != self._stream or facts.last < self._sequence
        if not is_other and facts.last == self._sequence:
            return
        # Another stream than the one that was read was recreated, or restored from a backup.
        sequence = 0 if is_other else self._sequence
        changes: dict[str, PlaneKey | None] = dict.fromkeys(self.keys) if is_other else {}
        left_s = REPLICA_LAG_S
        while True:
            scan = self._lookup.scan(Stream.KEYS, subjects.API_KEYS, start=sequence + 1, complete=True)
            try:
                async with aclosing(scan) as stored:
                    async for message in stored:
                        sequence = message.sequence
                        key_id = subjects.decode_token(message.subject.rpartition(".")[2])
                        changes[key_id] = _read_key(message)
                break
            except BusUnavailableError:
                # The replica that was asked may lag.
                if left_s <= 0 or not self._connection().is_connected:
                    raise
                left_s -= REPLICA_PAUSE_S
                await asyncio.sleep(REPLICA_PAUSE_S)
        self._stream = facts.identity
        self._sequence = max(sequence, facts.last)
        self._take(changes)

    def _take(self, changes: dict[str, PlaneKey] | dict[str, PlaneKey | None]) -> None:
        for key_id, key in changes.items():
            if key is None:
                self.keys.pop(key_id, None)
            else:
                self.keys[key_id] = key
        # The server has removed the messages of keys that ended long ago.
        long_ago = (datetime.now(UTC) - ENDED_KEPT).timestamp()
        for key_id in [key_id for key_id, key in self.keys.items() if key.ended_by(long_ago)]:
            del self.keys[key_id]
        self.note_change(changes)


def kept_s(record: KeyRecord) -> int | None:
    """Returns the seconds for which KEYS keeps a record; None for as long as there is no later one."""
    if record.ends_at is None or (remaining := record.ends_at - record.at) > _FAR:
        return None
    return int((remaining + ENDED_KEPT).total_seconds())


def _read_key(message: StoredMessage) -> PlaneKey | None:
    """Returns the key of a message; None if it is not readable, such as that of a later version: it opens nothing."""
    try:
        return PlaneKey.of(KeyRecord.model_validate_json(message.data), message.data)
    except ValidationError:
        structlog.get_logger().error("api_key_unreadable", subject=message.subject, sequence=message.sequence)
        return None
