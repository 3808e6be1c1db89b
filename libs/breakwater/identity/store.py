"""Sign-ins and sessions in Redis, which survive restarts, and which every replica knows.

A session is known by its token, `bws_<holder>_<id>_<secret>`, of which only the secret's digest is stored. Where Redis
lost its data, all holders sign in again.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from dataclasses import asdict, dataclass
from typing import Any, cast

from breakwater.identity.rules.callers import LINK_PREFIX, SESSION_PREFIX
from breakwater.kernel.redis.connection import Redis, Script, ScriptCommand, read_hashes

LASTS_MS = 12 * 3600 * 1000
"""The duration of a session: a working day."""
MAX_OF_A_HOLDER = 20
"""The most sessions of a holder; beyond them, the holder's oldest one ends."""

LINK_S = 600
"""Seconds for which a sign-in link can be used."""

_SIGN_IN_KEY = "bw:openid:key"

_BEGIN = Script.of("""
-- Adds a session to its holder's, ends the oldest where there would be too many, and forgets those that are over.
-- KEYS: the holder's sessions: began_ms, ends_ms and the session itself, by id; at most the number of one holder
-- ARGV: id, session, its duration in ms, the most of one holder
-- Returns when it ends, in ms.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local ends = now + tonumber(ARGV[3])
local living = {}
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local began, until_ms = string.match(all[i + 1], '^(%d+) (%d+) ')
  if tonumber(until_ms) <= now then
    redis.call('HDEL', KEYS[1], all[i])
  else
    living[#living + 1] = { tonumber(began), all[i] }
  end
end
table.sort(living, function(a, b) return a[1] < b[1] end)
for i = 1, #living - tonumber(ARGV[4]) + 1 do
  redis.call('HDEL', KEYS[1], living[i][2])
end
redis.call('HSET', KEYS[1], ARGV[1], string.format('%d %d %s', now, ends, ARGV[2]))
redis.call('PEXPIREAT', KEYS[1], ends)
return ends
""")


@dataclass(frozen=True, slots=True)
class KeySession:
    """The holder of an API key, who is signed in."""

    key_id: str
    digest: str = ""
    """The digest of the secret with which the session was begun, which ends with it."""


@dataclass(frozen=True, slots=True)
class PersonSession:
    """A person who signed in with OpenID Connect."""

    issuer: str
    subject: str
    """The issuer's `sub` of the person."""
    name: str
    """The name under which the person's actions are recorded."""
    values: tuple[str, ...]
    """The values of the claim that roles are read from, as far as the config named them at the sign-in."""
    id_token: str | None = None
    """The ID token that is sent to the provider to end the session there."""
    sid: str | None = None
    """The id of the session at the provider from which this one came."""


StoredSession = KeySession | PersonSession


@dataclass(frozen=True, slots=True)
class IssuedSession:
    """A new session."""

    id: str
    token: str
    """The token, which only the holder may see."""
    ends_ms: int


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A stored session."""

    id: str
    began_ms: int
    ends_ms: int
    session: StoredSession


class Sessions:
    """The sessions of all holders. All methods raise StateUnavailableError."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def begin(self, session: StoredSession) -> IssuedSession:
        """Begins a session, and ends the oldest one of a key's holder or a person who has too many."""
        holder = _of(session)
        session_id = secrets.token_hex(8)
        secret = secrets.token_urlsafe(32)
        fields = {name: value for name, value in asdict(session).items() if value is not None}
        stored = json.dumps({"sha256": _digest(secret), **fields})
        if isinstance(session, PersonSession) and session.sid is not None:
            await self._redis.client.set(_of_sid(session.issuer, session.sid), holder, px=LASTS_MS)
        command = ScriptCommand(_BEGIN, [_key(holder)], [session_id, stored, LASTS_MS, MAX_OF_A_HOLDER])
        [ends_ms] = await self._redis.run([command])
        return IssuedSession(session_id, f"{SESSION_PREFIX}_{holder}_{session_id}_{secret}", int(ends_ms))

    async def find(self, token: str) -> SessionRecord | None:
        """The session of a token; None if there is none, or it has ended."""
        parts = _parts(token)
        if parts is None:
            return None
        holder, session_id, secret = parts
        async with self._redis.client.pipeline(transaction=False) as pipe:
            pipe.hget(_key(holder), session_id)
            pipe.time()
            text, (seconds, micros) = cast("tuple[str | None, tuple[int, int]]", await pipe.execute())
        if text is None:
            return None
        session, digest = _read(session_id, text)
        if not hmac.compare_digest(digest, _digest(secret)) or session.ends_ms <= seconds * 1000 + micros // 1000:
            return None
        return session

    async def offer(self, key_id: str, digest: str) -> str:
        """Makes a sign-in link and returns its token, which works once as the key. Only its digest is stored.

        Args:
            key_id: the key.
            digest: the digest of its secret.
        """
        token = f"{LINK_PREFIX}_{secrets.token_urlsafe(16)}"
        await self._redis.client.set(_link(token), f"{key_id} {digest}", ex=LINK_S)
        return token

    async def redeem(self, token: str) -> tuple[str, str] | None:
        """Uses a link and returns what it was made of; None if the link was used before, or is too old."""
        stored = cast("str | None", await self._redis.client.getdel(_link(token)))
        if stored is None:
            return None
        key_id, _, digest = stored.partition(" ")
        return key_id, digest

    async def end(self, token: str) -> SessionRecord | None:
        """Ends a session, so that its token is invalid. Returns the session; None if there was none."""
        parts = _parts(token)
        session = await self.find(token)
        if parts is not None and session is not None:
            await cast(Any, self._redis.client.hdel(_key(parts[0]), parts[1]))
        return session

    async def end_of_person(self, issuer: str, subject: str | None, sid: str | None) -> list[SessionRecord]:
        """Ends all sessions of a person, or only those that came from one session at the provider.

        Args:
            issuer: the provider.
            subject: the person's `sub` there; None if the provider names only its session.
            sid: the session at the provider; None for all.

        Returns:
            The sessions that were ended.
        """
        holder = None if subject is None else _of(PersonSession(issuer, subject, "", ()))
        if holder is None and sid is not None:
            holder = cast("str | None", await self._redis.client.get(_of_sid(issuer, sid)))
        if holder is None:
            return []
        [stored] = await read_hashes(self._redis.client, [_key(holder)])
        ended = [session for session_id, text in stored.items() if _has(session := _read(session_id, text)[0], sid)]
        if ended:
            await cast(Any, self._redis.client.hdel(_key(holder), *(session.id for session in ended)))
        return ended


class SignIns:
    """The sign-ins in progress. All methods raise StateUnavailableError."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def key(self) -> bytes:
        """The key with which this plane signs sign-ins; made when it is first needed."""
        async with self._redis.client.pipeline(transaction=False) as pipe:
            pipe.set(_SIGN_IN_KEY, secrets.token_hex(32), nx=True)
            pipe.get(_SIGN_IN_KEY)
            _, key = cast("tuple[object, str]", await pipe.execute())
        return bytes.fromhex(key)

    async def is_used(self, token: str) -> bool:
        """Returns True if a token was used before."""
        return bool(await self._redis.client.exists(_used_key(token)))

    async def use(self, token: str, lasts_s: int) -> bool:
        """Marks a single-use token as used, for a limited time. False if it was used before."""
        return bool(await self._redis.client.set(_used_key(token), "1", nx=True, ex=lasts_s))


def _link(token: str) -> str:
    return f"bw:sign-in:link:{_digest(token)}"


def _used_key(token: str) -> str:
    return f"bw:openid:used:{_digest(token)}"


def _has(session: SessionRecord, sid: str | None) -> bool:
    """Returns True for a person's session that came from the provider's session `sid`, or may have; None is any."""
    return isinstance(session.session, PersonSession) and (sid is None or session.session.sid in (None, sid))


def _read(session_id: str, text: str) -> tuple[SessionRecord, str]:
    """Parses a stored session. Returns it with the digest of its secret."""
    began_ms, ends_ms, stored = text.split(" ", 2)
    fields: dict[str, Any] = json.loads(stored)
    digest = fields.pop("sha256")
    return SessionRecord(session_id, int(began_ms), int(ends_ms), _session(fields)), digest


def _session(fields: dict[str, Any]) -> StoredSession:
    if "key_id" in fields:
        return KeySession(**fields)
    fields["values"] = tuple(fields["values"])
    return PersonSession(**fields)


def _parts(token: str) -> tuple[str, str, str] | None:
    match token.split("_", 3):
        case [prefix, holder, session_id, secret] if prefix == SESSION_PREFIX:
            return holder, session_id, secret
        case _:
            return None


def _of(session: StoredSession) -> str:
    """The name of a session's holder in tokens and keys."""
    holder = (
        f"key:{session.key_id}" if isinstance(session, KeySession) else f"person:{session.issuer} {session.subject}"
    )
    return _digest(holder)[:16]


def _of_sid(issuer: str, sid: str) -> str:
    return f"bw:openid:sid:{_digest(f'{issuer} {sid}')}"


def _key(holder: str) -> str:
    return f"bw:sessions:{holder}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
