"""Who is signed in: sessions in Redis, so that they outlive a restart and any replica knows them.

A session is known by its token, `bws_<holder>_<id>_<secret>`, of which only the secret's digest is stored. Where Redis
lost its data, everybody signs in again.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from dataclasses import asdict, dataclass
from typing import Any, cast

from breakwater.policy.api_keys import SESSION_PREFIX
from breakwater.state.connection import Redis, Script, ScriptCall, translated

LASTS_MS = 12 * 3600 * 1000
"""A working day."""
MOST_OF_A_HOLDER = 20
"""Beyond these, the oldest session of the same holder ends."""

_BEGIN = Script.named("session_begin")


@dataclass(frozen=True, slots=True)
class KeySession:
    """The holder of an API key, who is signed in."""

    key_id: str


@dataclass(frozen=True, slots=True)
class PersonSession:
    """Somebody who signed in with OpenID Connect."""

    issuer: str
    subject: str
    """The issuer's `sub` of them."""
    name: str
    """What they do is recorded under it."""
    values: tuple[str, ...]
    """Those of the claim that roles are read from which the config named when they signed in."""
    id_token: str | None
    """Given back to the provider to end the session there."""


StoredSession = KeySession | PersonSession


@dataclass(frozen=True, slots=True)
class Begun:
    """A new session."""

    id: str
    token: str
    """For its holder alone."""
    ends_ms: int


@dataclass(frozen=True, slots=True)
class Known:
    """A session that was found."""

    id: str
    began_ms: int
    ends_ms: int
    session: StoredSession


class Sessions:
    """The sessions of everybody. All methods raise StateUnavailable."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def begin(self, holder: str, session: StoredSession) -> Begun:
        """Begins a session. `holder`: whose it is, such as a key's id; of one holder there are only so many."""
        of, session_id, secret = _digest(holder)[:16], secrets.token_hex(8), secrets.token_urlsafe(32)
        stored = json.dumps({"sha256": _digest(secret), **asdict(session)})
        call = ScriptCall(_BEGIN, [_key(of)], [session_id, stored, LASTS_MS, MOST_OF_A_HOLDER])
        [ends_ms] = await self._redis.run([call])
        return Begun(session_id, f"{SESSION_PREFIX}_{of}_{session_id}_{secret}", int(ends_ms))

    async def find(self, token: str) -> Known | None:
        """The session of a token; None where there is none, or none any more."""
        parts = _parts(token)
        if parts is None:
            return None
        of, session_id, secret = parts
        async with translated(), self._redis.client.pipeline(transaction=False) as pipe:
            pipe.hget(_key(of), session_id)
            pipe.time()
            found, (seconds, micros) = cast("tuple[str | None, tuple[int, int]]", await pipe.execute())
        if found is None:
            return None
        began_ms, ends_ms, stored = found.split(" ", 2)
        fields: dict[str, Any] = json.loads(stored)
        if not hmac.compare_digest(fields.pop("sha256"), _digest(secret)):
            return None
        if int(ends_ms) <= seconds * 1000 + micros // 1000:
            return None
        return Known(session_id, int(began_ms), int(ends_ms), _session(fields))

    async def end(self, token: str) -> Known | None:
        """Ends a session: from now on its token opens nothing. Returns what it was; None where there was none."""
        parts, known = _parts(token), await self.find(token)
        if parts is not None and known is not None:
            async with translated():
                await cast(Any, self._redis.client.hdel(_key(parts[0]), parts[1]))
        return known


def _session(fields: dict[str, Any]) -> StoredSession:
    if "key_id" in fields:
        return KeySession(**fields)
    fields["values"] = tuple(fields["values"])
    return PersonSession(**fields)


def _parts(token: str) -> tuple[str, str, str] | None:
    match token.split("_", 3):
        case [prefix, of, session_id, secret] if prefix == SESSION_PREFIX:
            return of, session_id, secret
        case _:
            return None


def _key(of: str) -> str:
    return f"bw:sessions:{of}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
