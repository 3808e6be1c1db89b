"""Breaker state: admission, and saving what the breaker service decided."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from breakwater.contracts.events import BreakerState
from breakwater.contracts.subjects import encode_token
from breakwater.policy.breaker import Breaker, Failure
from breakwater.state.connection import Redis, Script, ScriptCall, translated

KEEP_MS = 7 * 24 * 3_600_000
"""A breaker that hears nothing for a week is forgotten, and with that closed."""

INDEX = "bw:breakers"

_ADMIT = Script.named("breaker_admit")
_RETURN_PROBE = Script.named("breaker_return_probe")
_LOAD = Script.named("breaker_load")
_SAVE = Script.named("breaker_save")


@dataclass(frozen=True, slots=True)
class BreakerKey:
    """Whose breaker."""

    agent: str
    model: str

    @property
    def name(self) -> str:
        """The breaker's name: `<agent>/<model>`, each encoded as a subject token."""
        return f"{encode_token(self.agent)}/{encode_token(self.model)}"

    @property
    def redis_key(self) -> str:
        """Its key in Redis."""
        return f"bw:breaker:{{{self.name}}}"


@dataclass(frozen=True, slots=True)
class Admitted:
    """The call may be made. `opened_probe`: it is a probe, and its admission made the breaker half-open."""

    probe: bool
    version: int
    became_half_open: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """The breaker is open, or another attempt holds the probe, at least until then (ms since the epoch)."""

    until_ms: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """A breaker as it was at `now_ms` of Redis' clock. `revision` guards its saving."""

    breaker: Breaker
    revision: str
    now_ms: int
    unpublished: str | None
    """Transitions that were saved and perhaps not published, as JSON."""


class Breakers:
    """The breakers of the fleet."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    @staticmethod
    def admit_call(key: BreakerKey, attempt_id: str, probe_lease_ms: int) -> ScriptCall:
        """Asks whether an attempt may call; read its answer with `admission`."""
        return ScriptCall(_ADMIT, [key.redis_key], [attempt_id, probe_lease_ms])

    @staticmethod
    def admission(answer: Sequence[object]) -> Admitted | Refused:
        """Reads the answer to `admit_call`."""
        verdict, until_ms, version, changed = answer
        if verdict == "refused":
            return Refused(int(cast(int, until_ms)))
        return Admitted(verdict == "probe", int(cast(int, version)), bool(changed))

    async def return_probe(self, key: BreakerKey, attempt_id: str) -> None:
        """Gives the probe back if this attempt holds it. Raises StateUnavailable."""
        await self._redis.run([ScriptCall(_RETURN_PROBE, [key.redis_key], [attempt_id])])

    async def load(self, keys: Sequence[BreakerKey]) -> list[Loaded]:
        """Reads breakers in one round trip. Raises StateUnavailable."""
        answers = await self._redis.run([ScriptCall(_LOAD, [key.redis_key], []) for key in keys])
        return [_loaded(int(now), dict(zip(flat[::2], flat[1::2], strict=True))) for now, flat in answers]

    async def save(self, key: BreakerKey, before: Loaded, after: Breaker, unpublished: str | None) -> bool:
        """Saves a breaker. False when somebody changed it since it was read: read it again and decide again.

        Raises:
            StateUnavailable: it may or may not be saved; reading it again tells.
        """
        fields = _fields(after) | {"unpublished": unpublished or ""}
        flat = [part for pair in fields.items() for part in pair]
        [saved] = await self._redis.run([ScriptCall(_SAVE, [key.redis_key], [before.revision, KEEP_MS, *flat])])
        if saved:
            async with translated():
                await self._redis.client.sadd(INDEX, f"{encode_token(key.agent)}/{encode_token(key.model)}")
        return bool(saved)

    async def mark_published(self, key: BreakerKey, transition: str) -> None:
        """Notes that a transition has been published, unless another one has taken its place meanwhile."""
        async with translated():
            client = self._redis.client
            # Not atomic with the check, and need not be: a transition published twice has the same message id.
            if await client.hget(key.redis_key, "unpublished") == transition:
                await client.hset(key.redis_key, "unpublished", "")


def _fields(breaker: Breaker) -> dict[str, str | int]:
    return {
        "state": breaker.state,
        "failures": json.dumps([[failure.sequence, failure.at_ms] for failure in breaker.failures]),
        "last_success": breaker.last_success,
        "open_until_ms": breaker.open_until_ms,
        "probe": breaker.probe or "",
        "probe_until_ms": breaker.probe_until_ms,
        "version": breaker.version,
        "closed_at": breaker.closed_at,
    }


def _loaded(now_ms: int, fields: dict[str, str]) -> Loaded:
    breaker = Breaker(
        state=cast(BreakerState, fields.get("state", "closed")),
        failures=tuple(Failure(sequence, at_ms) for sequence, at_ms in json.loads(fields.get("failures", "[]"))),
        last_success=int(fields.get("last_success", 0)),
        open_until_ms=int(fields.get("open_until_ms", 0)),
        probe=fields.get("probe") or None,
        probe_until_ms=int(fields.get("probe_until_ms", 0)),
        version=int(fields.get("version", 0)),
        closed_at=int(fields.get("closed_at", 0)),
    )
    return Loaded(breaker, fields.get("revision", "0"), now_ms, fields.get("unpublished") or None)
