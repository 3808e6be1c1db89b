"""API keys that the plane keeps: their changes, what a caller may give to one, and when a secret ends."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Literal

from pydantic import Field

from breakwater.identity.contract import PRIORITIES, ApiKeyState, KeyChange, Priority
from breakwater.identity.rules.callers import PREFIX, ApiKey, Caller, StoredApiKey, digest_of, secret_of
from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.nats.contract import StateRecord, kept_s
from breakwater.kernel.nats.subjects import PROGRAM
from breakwater.kernel.types import Event, Timestamp

MAX_KEYS = 10_000
"""The most keys of a plane that are valid. Every process of `request` has them in memory."""

ChangeRefusal = Literal["key_exists", "too_many_keys", "key_revoked", "key_expired", "key_changed", "key_from_file"]


class KeyRefusedError(BreakwaterError):
    """A change of a key is refused. The code is that of the HTTP API."""

    def __init__(self, code: ChangeRefusal, message: str) -> None:
        super().__init__(message)
        self.code: ChangeRefusal = code


class OldSecret(Event):
    """The secret that a key had before its rotation."""

    sha256: str
    valid_until: Timestamp


class KeyRecord(StateRecord):
    """The state of a key since its last change, as KEYS has it, with who made the change and why."""

    key: StoredApiKey
    expires_at: Timestamp | None = Field(default=None, description="Null: it does not expire.")
    revoked_at: Timestamp | None = None
    old_secret: OldSecret | None = None
    change: KeyChange

    @property
    def state_id(self) -> str:
        """Its id."""
        return self.key.id

    @property
    def kept_s(self) -> int | None:
        """The seconds for which KEYS keeps the record; None for as long as there is no later one."""
        return kept_s(self.at, self.ends_at)

    @property
    def ends_at(self) -> datetime | None:
        """The time at which it ends, or has ended; None if it does not end."""
        return self.revoked_at or self.expires_at

    def state(self, now: datetime) -> ApiKeyState:
        """Returns its state at a time."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and self.expires_at <= now else "active"

    def check_active(self, now: datetime) -> None:
        """Raises KeyRefusedError: it has ended, and an ended key stays so."""
        match self.state(now):
            case "revoked":
                raise KeyRefusedError("key_revoked", f"the key {self.key.name!r} was revoked; create a new one")
            case "expired":
                raise KeyRefusedError("key_expired", f"the key {self.key.name!r} has expired; create a new one")
            case "active":
                return

    def rotate(
        self, entropy: bytes, grace: timedelta, *, by: str, reason: str | None, at: datetime
    ) -> tuple[str, KeyRecord]:
        """Returns the key with a new secret, as its holder sends it, and the record of that.

        Args:
            entropy: `SECRET_BYTES` random bytes.
            grace: the time for which the present secret stays valid, too.
            by: the name of the caller.
            reason: the caller's reason.
            at: now.

        Raises:
            KeyRefusedError: the key has ended.
        """
        self.check_active(at)
        secret = secret_of(entropy)
        old = OldSecret(sha256=self.key.sha256, valid_until=at + grace)
        key = self.key.model_copy(update={"sha256": digest_of(secret)})
        return f"{PREFIX}_{key.id}_{secret}", self._changed("rotated", by, reason, at, key=key, old_secret=old)

    def expire(self, expires_at: datetime | None, *, by: str, reason: str | None, at: datetime) -> KeyRecord:
        """Returns the record of the key with another end; None for no end, a time that is over to revoke it.

        Raises KeyRefusedError: the key has ended.
        """
        if expires_at is not None and expires_at <= at:
            return self.revoke(by=by, reason=reason, at=at)
        self.check_active(at)
        return self._changed("expiry_changed", by, reason, at, expires_at=expires_at)

    def revoke(self, *, by: str, reason: str | None, at: datetime) -> KeyRecord:
        """Returns the record of the revoked key. Raises KeyRefusedError: it has ended."""
        self.check_active(at)
        return self._changed("revoked", by, reason, at, revoked_at=at)

    def _changed(self, change: KeyChange, by: str, reason: str | None, at: datetime, **fields: object) -> KeyRecord:
        return self.model_copy(update={"change": change, "by": by, "reason": reason, "at": at, **fields})


def check_creation(name: str, active_names: Collection[str]) -> None:
    """Checks that a plane may get one more key.

    Args:
        name: the new key's.
        active_names: the names of the keys that have not ended.

    Raises:
        KeyRefusedError: another key has the name, or there are too many.
    """
    if name in active_names:
        message = (
            f"another key is named {name!r}; limits, costs and jobs go by the name: choose another, or rotate that key"
        )
        raise KeyRefusedError("key_exists", message)
    if len(active_names) >= MAX_KEYS:
        raise KeyRefusedError("too_many_keys", f"there are {MAX_KEYS:,} keys, which is the most; revoke some")


def _is_higher(priority: Priority | None, bound: Priority) -> bool:
    return priority is None or PRIORITIES.index(priority) < PRIORITIES.index(bound)


def grant_objection(caller: Caller, key: ApiKey, expires_at: datetime | None) -> str | None:
    """Returns why a caller may not give these rights to a key; None if it has all of them itself."""
    if key.name.startswith(PROGRAM):
        return f"names that begin with {PROGRAM!r} are those of NATS users"
    missing = [scope for scope in key.scopes if scope not in caller.scopes]
    if missing:
        return f"{caller.name!r} lacks the scope {' and '.join(missing)}, and can't give it to a key"
    for noun, of_caller, of_key in (
        ("tenant", caller.tenants, key.tenants),
        ("agent", caller.agents, key.agents),
        ("model", caller.models, key.models),
    ):
        if of_caller and not (of_key and set(of_key) <= set(of_caller)):
            return f"{caller.name!r} is bound to the {noun} {' and '.join(of_caller)}, and so must its keys be"
    for noun, bound_to, bound in (("user", caller.user, key.user), ("team", caller.team, key.team)):
        if bound_to is not None and bound != bound_to:
            return f"{caller.name!r} is bound to the {noun} {bound_to!r}, and so must its keys be"
    if caller.residency is not None and not f"{key.residency}-".startswith(f"{caller.residency}-"):
        return f"the calls of {caller.name!r} must not leave {caller.residency!r}, and so must those of its keys"
    if caller.priority is not None and _is_higher(key.priority, caller.priority):
        return f"the jobs of {caller.name!r} have at most {caller.priority!r} priority, and so must those of its keys"
    if caller.kind == "key" and key.weight > caller.weight and not caller.may(("operate", "approve")):
        return f"{caller.name!r} has the weight {caller.weight}, and so those of its keys have at most that"
    for tag, value in caller.tags.items():
        if key.tags.get(tag) != value:
            return f"the jobs of {caller.name!r} have the tag {tag}={value}, and so must those of its keys"
    if caller.expires_at is not None and (expires_at is None or expires_at > caller.expires_at):
        return f"{caller.name!r} expires at {caller.expires_at:%Y-%m-%d %H:%M} UTC, and its keys must not outlive it"
    return None
