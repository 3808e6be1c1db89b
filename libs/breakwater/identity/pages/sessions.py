"""The sessions of signed-in users, and this process's cache of them; the HTTP API has all sessions.

The browser keeps the session's token and the notices for the next page in cookies. So a restart of the console signs no
user out, and any of several consoles can answer.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import json
import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from starlette.requests import Request

from breakwater.client import ApiClient
from breakwater.identity.contract import KeyDetails, KeyScope

MAX_CACHED = 1_000
"""Maximum number of cached sessions; the oldest are dropped, and read from the HTTP API again when needed."""
MAX_NOTICE = 1_000
"""Maximum length of a notice in characters."""
MAX_PACKED = 3_500
"""Maximum size of all notices in bytes, because cookies hold 4 KB."""
MAX_WATCHED = 10
"""Maximum number of jobs that a session may watch at the same time."""
SESSION = "breakwater.session"
"""The key of the session in the scope of a request."""

NoticeTone = Literal["good", "bad"]


@dataclass(frozen=True, slots=True)
class Notice:
    """The outcome of an action, which the next page shows once."""

    text: str
    tone: NoticeTone


@dataclass(frozen=True, slots=True)
class Badge:
    """A figure next to a link of the navigation."""

    text: str
    """The figure; empty if there is nothing to show."""
    noun: str
    """The counted things, for screen readers."""
    tone: str


@dataclass(slots=True)
class CachedSession:
    """A session in this process's cache."""

    key: KeyDetails
    checked_at: float
    """The time of the last check that found the session valid, on the monotonic clock."""
    watched: int = 0
    """The number of jobs that the session is watching."""
    badges: dict[str, Badge] = field(default_factory=dict[str, Badge])
    """The badges as they were last read, by the path of their link."""
    badges_read_at: float = -math.inf
    reading_badges: asyncio.Task[None] | None = None


@dataclass(slots=True)
class Session:
    """The session of a signed-in user, for one request."""

    api: ApiClient
    """A client of the HTTP API with the session's token."""
    cached: CachedSession
    csrf: str
    """The token that every form sends back, which other sites can't know."""
    notices: list[Notice] = field(default_factory=list[Notice])
    notices_changed: bool = False

    @property
    def name(self) -> str:
        """The name of the key, under which actions are recorded."""
        return self.cached.key.name

    def may(self, *scopes: KeyScope) -> bool:
        """Returns True if the user has one of some scopes."""
        return not set(scopes).isdisjoint(self.cached.key.scopes)

    @property
    def may_operate(self) -> bool:
        """Returns True if the user may take all actions."""
        return "operate" in self.cached.key.scopes

    @property
    def may_approve(self) -> bool:
        """Returns True if the user may decide on incidents, stopped tasks and limits."""
        return self.may_operate or "approve" in self.cached.key.scopes

    @property
    def rights_text(self) -> str:
        """The user's roles, or a word for the user's rights; empty for a key that may do everything."""
        if self.cached.key.roles:
            return ", ".join(self.cached.key.roles)
        return "" if self.may_operate else "approver" if self.may_approve else "read-only"

    @property
    def may_audit(self) -> bool:
        """Returns True if the user may see the audit log."""
        return "audit" in self.cached.key.scopes

    def notify(self, text: str, tone: NoticeTone = "good") -> None:
        """Adds a notice to the next page."""
        self.notices.append(Notice(text[:MAX_NOTICE], tone))
        self.notices_changed = True

    def take_notices(self) -> tuple[Notice, ...]:
        """Removes and returns the notices, for the page that shows them."""
        notices = tuple(self.notices)
        self.notices = []
        self.notices_changed = self.notices_changed or bool(notices)
        return notices


def session_of(request: Request) -> Session:
    """The session of a request that passed `RequireSignIn`."""
    return request.scope[SESSION]


class SessionCache:
    """The sessions that this process has read from the HTTP API, by the digests of their tokens."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[bytes, CachedSession] = OrderedDict()

    def add(self, token: str, key: KeyDetails, now: float) -> CachedSession:
        """Adds a session that the HTTP API has found valid, or updates it."""
        session = self._sessions.setdefault(_digest(token), CachedSession(key, now))
        session.key = key
        session.checked_at = now
        while len(self._sessions) > MAX_CACHED:
            self._sessions.popitem(last=False)
        return session

    def find(self, token: str) -> CachedSession | None:
        """The cached session; None if it must be read from the HTTP API."""
        return self._sessions.get(_digest(token))

    def forget(self, token: str) -> None:
        """Removes a session that has ended."""
        self._sessions.pop(_digest(token), None)


def csrf_of(token: str) -> str:
    """The CSRF token of a session, which is derived from the session's token, so that all consoles know it."""
    return hmac.new(token.encode(), b"csrf", hashlib.sha256).hexdigest()


def pack(notices: Iterable[Notice], token: str) -> str:
    """Packs notices into the signed value of a cookie. Drops the oldest until the others fit."""
    kept_notices = list(notices)
    while True:
        data = base64.urlsafe_b64encode(
            json.dumps([[notice.text, notice.tone] for notice in kept_notices]).encode()
        ).decode()
        if len(data) <= MAX_PACKED or len(kept_notices) <= 1:
            return f"{data}.{_signature(data, token)}"
        kept_notices = kept_notices[1:]


def unpack(cookie: str, token: str) -> list[Notice]:
    """Unpacks the notices in a cookie; none if its signature is wrong."""
    data, _, signature = cookie.partition(".")
    if not hmac.compare_digest(signature.encode(), _signature(data, token).encode()):
        return []
    try:
        return [Notice(text, tone) for text, tone in json.loads(base64.urlsafe_b64decode(data))]
    except (ValueError, binascii.Error):
        return []


def _signature(data: str, token: str) -> str:
    return hmac.new(token.encode(), b"notices " + data.encode(), hashlib.sha256).hexdigest()


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
