"""The sessions that this process knows: the HTTP API has all sessions, by their tokens.

The token is in a cookie of the browser, and so are notices for the next page, so that a restart of the console signs
no user out, and any of several consoles answers.
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
from breakwater.identity.contract import KeyDetails

MOST = 1_000
"""Known sessions; beyond these, the ones that were added first are asked of the HTTP API again."""
MAX_NOTICE = 1_000
"""Characters of a notice."""
MAX_PACKED = 3_500
"""Bytes of all notices: cookies hold 4 KB."""
MAX_WATCHED = 10
"""Jobs that one session may watch at the same time."""
SESSION = "breakwater.session"
"""The key of the session in the scope of a request."""

NoticeTone = Literal["good", "bad"]


@dataclass(frozen=True, slots=True)
class Notice:
    """The outcome of an action, shown once, on the next page."""

    text: str
    tone: NoticeTone


@dataclass(frozen=True, slots=True)
class Badge:
    """A figure next to a link of the navigation."""

    text: str
    """Empty if there is nothing to show."""
    of: str
    """The things counted, for screen readers."""
    tone: str


@dataclass(slots=True)
class KnownSession:
    """A session as this process knows it."""

    key: KeyDetails
    checked_at: float
    """The time when it was last seen to be valid, on the monotonic clock."""
    watched: int = 0
    """The number of jobs that it is watching."""
    badges: dict[str, Badge] = field(default_factory=dict[str, Badge])
    """By the address of the link, as they were last read."""
    badges_read_at: float = -math.inf
    reading_badges: asyncio.Task[None] | None = None


@dataclass(slots=True)
class Session:
    """The session of a signed-in user, for one request."""

    api: ApiClient
    """The HTTP API, used with the session's token."""
    known: KnownSession
    csrf: str
    """The token that every form sends back, and that other sites can't know."""
    notices: list[Notice] = field(default_factory=list[Notice])
    notices_changed: bool = False

    @property
    def name(self) -> str:
        """The name of the key; actions are recorded under it."""
        return self.known.key.name

    @property
    def may_operate(self) -> bool:
        """True if the user may take all actions, and not only look."""
        return "operate" in self.known.key.scopes

    @property
    def may_approve(self) -> bool:
        """True if the user may decide on incidents, stopped tasks and caps."""
        return self.may_operate or "approve" in self.known.key.scopes

    @property
    def described(self) -> str:
        """The user's roles or rights in a word; empty for a key that may do everything."""
        if self.known.key.roles:
            return ", ".join(self.known.key.roles)
        return "" if self.may_operate else "approver" if self.may_approve else "read-only"

    @property
    def may_audit(self) -> bool:
        """True if the user may see the audit log."""
        return "audit" in self.known.key.scopes

    def notify(self, text: str, tone: NoticeTone = "good") -> None:
        """Adds a notice to the next page."""
        self.notices.append(Notice(text[:MAX_NOTICE], tone))
        self.notices_changed = True

    def take_notices(self) -> tuple[Notice, ...]:
        """The notices of the next page, which are shown once."""
        taken, self.notices = tuple(self.notices), []
        self.notices_changed = self.notices_changed or bool(taken)
        return taken


def session_of(request: Request) -> Session:
    """The session of a request that passed `RequireSignIn`."""
    return request.scope[SESSION]


class KnownSessions:
    """The sessions that this process has asked the HTTP API about, by the digest of their token."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, KnownSession] = OrderedDict()

    def add(self, token: str, key: KeyDetails, now: float) -> KnownSession:
        """Notes what the HTTP API said of a session, also of one that is known already."""
        known = self._known.setdefault(_digest(token), KnownSession(key, now))
        known.key, known.checked_at = key, now
        while len(self._known) > MOST:
            self._known.popitem(last=False)
        return known

    def find(self, token: str) -> KnownSession | None:
        """A session; None if the HTTP API has to be asked."""
        return self._known.get(_digest(token))

    def forget(self, token: str) -> None:
        """Forgets a session that has ended."""
        self._known.pop(_digest(token), None)


def csrf_of(token: str) -> str:
    """The field that every form of a session sends back. It follows from the token, so that all consoles know it."""
    return hmac.new(token.encode(), b"csrf", hashlib.sha256).hexdigest()


def pack(notices: Iterable[Notice], token: str) -> str:
    """Notices as the value of a cookie, signed; the oldest are dropped until they fit."""
    listed = list(notices)
    while True:
        data = base64.urlsafe_b64encode(json.dumps([[one.text, one.tone] for one in listed]).encode()).decode()
        if len(data) <= MAX_PACKED or len(listed) <= 1:
            return f"{data}.{_signature(data, token)}"
        listed = listed[1:]


def unpack(cookie: str, token: str) -> list[Notice]:
    """The notices in a cookie; none if its signature is wrong."""
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
