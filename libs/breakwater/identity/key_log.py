"""The API keys that the plane keeps, followed in KEYS and changed there."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from breakwater.identity.rules.callers import Caller, digest_of, holder_of_key
from breakwater.identity.rules.keys import KeyRecord, KeyRefusedError
from breakwater.kernel.nats.contract import ENDED_KEPT
from breakwater.kernel.nats.state_log import ChangedMeanwhileError, StateLog
from breakwater.kernel.nats.subjects import API_KEYS, KEY_CHANGES, Stream


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


class KeyLog(StateLog[KeyRecord, PlaneKey]):
    """The keys of KEYS: follows the stream, and publishes changes."""

    stream = Stream.KEYS
    subjects = API_KEYS
    notices = KEY_CHANGES
    log_name = "api_keys"

    @property
    def keys(self) -> Mapping[str, PlaneKey]:
        """The keys, by their ids."""
        return self.states

    def state_of(self, record: KeyRecord, document: bytes) -> PlaneKey | None:
        """Returns a key; None for one that ended long ago, whose message the server removes."""
        key = PlaneKey.of(record, document)
        return None if key.ended_by((datetime.now(UTC) - ENDED_KEPT).timestamp()) else key

    def read_record(self, document: bytes) -> KeyRecord:
        """Parses a record. Raises ValidationError."""
        return KeyRecord.model_validate_json(document)

    async def change(self, decide: Callable[[], KeyRecord], changed_id: str | None = None) -> KeyRecord:
        """Publishes a change, and decides again if other keys were changed meanwhile.

        Args:
            decide: gives the new record. It may raise KeyRefusedError, and may be called repeatedly.
            changed_id: the key that is changed; None for a new one.

        Raises:
            KeyRefusedError: as `decide`, or somebody else has changed the key at this moment.
            BusUnavailableError: the change was not made, or may have been if NATS did not answer.
        """
        before = None if changed_id is None else self.keys.get(changed_id)
        try:
            return await super().change(decide, changed_id)
        except ChangedMeanwhileError:
            name = changed_id if before is None else before.holder.name
            message = f"another caller changed the key {name!r} at this moment; look at it first"
            raise KeyRefusedError("key_changed", message) from None
