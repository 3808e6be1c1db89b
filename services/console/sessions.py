"""Who is signed in, kept in memory: an API key is never stored in a cookie, a database or a page.

After a restart of the console people sign in again. Behind a load balancer, sessions must be sticky.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from starlette.requests import Request

from breakwater.api_client import ApiClient
from breakwater.contracts.api import KeyDetails

LASTS_S = 12 * 3600.0
"""A working day."""
MOST = 1_000
MOST_OF_A_KEY = 20
"""Beyond these the oldest sessions end: first those of the same key, so that no key can sign others out."""
MOST_WATCHED = 10
"""How many jobs one session may watch at the same time."""
SESSION = "breakwater.session"
"""Where the session is in the scope of a request."""

Tone = Literal["good", "bad"]


@dataclass(frozen=True, slots=True)
class Notice:
    """The outcome of an action, shown once, on the next page."""

    text: str
    tone: Tone


@dataclass(slots=True)
class Session:
    """The session of a signed-in user."""

    api: ApiClient
    """The HTTP API, used with their key."""
    key: KeyDetails
    csrf: str
    """The token that every form sends back, and that other sites can't know."""
    ends_at: float
    """On the monotonic clock."""
    checked_at: float
    """When the key was last seen to be valid, on the same clock."""
    notices: list[Notice] = field(default_factory=list[Notice])
    watched: int = 0
    """How many jobs they are watching."""

    @property
    def name(self) -> str:
        """Who uses the key; actions are recorded under this name."""
        return self.key.name

    @property
    def may_operate(self) -> bool:
        """Whether the key allows actions, and not only reading."""
        return "operate" in self.key.scopes

    @property
    def may_audit(self) -> bool:
        """Whether the key may see who did what."""
        return "audit" in self.key.scopes

    def notify(self, text: str, tone: Tone = "good") -> None:
        """Adds a notice to the next page."""
        self.notices.append(Notice(text, tone))

    def take_notices(self) -> tuple[Notice, ...]:
        """The notices of the next page, which are shown once."""
        taken, self.notices = tuple(self.notices), []
        return taken


def session_of(request: Request) -> Session:
    """The session of a request that passed `RequireSignIn`."""
    return request.scope[SESSION]


class SignIns:
    """All sessions of this process, by the digest of the browser's token."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._known: OrderedDict[bytes, Session] = OrderedDict()
        self._clock = clock

    def begin(self, api: ApiClient, key: KeyDetails) -> str:
        """Signs a user in, and returns the token for their browser."""
        same = [digest for digest, one in self._known.items() if one.key.id == key.id]
        for digest in same[: max(len(same) - MOST_OF_A_KEY + 1, 0)]:
            del self._known[digest]
        token, now = secrets.token_urlsafe(32), self._clock()
        self._known[_digest(token)] = Session(api, key, secrets.token_urlsafe(16), now + LASTS_S, checked_at=now)
        while len(self._known) > MOST:
            self._known.popitem(last=False)
        return token

    def find(self, token: str) -> Session | None:
        """The session of a token; None if there is none, or if it has expired."""
        session = self._known.get(_digest(token))
        if session is not None and self._clock() >= session.ends_at:
            self.end(token)
            return None
        return session

    def end(self, token: str) -> None:
        """Signs a user out."""
        self._known.pop(_digest(token), None)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
