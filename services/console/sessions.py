"""Who is signed in: in memory, so that a key stands in no cookie, no database and no page.

A restarted console asks for the key again. Behind a balancer, a person must come back to the same console.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from pydantic import SecretStr
from starlette.requests import Request

LASTS_S = 12 * 3600.0
"""A working day."""
MOST = 1_000
MOST_OF_A_KEY = 20
"""Beyond these the oldest sign-ins end: first those with the same key, so that nobody can sign others out."""
MOST_WATCHED = 10
"""How many jobs somebody watches at the same time."""

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
    """Somebody who is signed in."""

    key: SecretStr
    key_id: str
    name: str
    scopes: frozenset[str]
    csrf: str
    """What every form must send back, which other sites can't know."""
    ends_at: float
    """On the monotonic clock."""
    checked_at: float
    """When the key was last seen to be valid, on the same clock."""
    notices: list[Notice] = field(default_factory=list[Notice])
    watched: int = 0
    """How many jobs they watch now."""

    @property
    def may_operate(self) -> bool:
        """Whether the key lets its holder do things, and not only look."""
        return "operate" in self.scopes

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
    """All sign-ins of this process, by the digest of what the browser holds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: OrderedDict[bytes, Session] = OrderedDict()

    def begin(self, key: SecretStr, key_id: str, name: str, scopes: frozenset[str]) -> str:
        """Signs somebody in, and returns what their browser is to hold."""
        same = [digest for digest, one in self._known.items() if one.key_id == key_id]
        for digest in same[: max(len(same) - MOST_OF_A_KEY + 1, 0)]:
            del self._known[digest]
        token, now = secrets.token_urlsafe(32), self._clock()
        self._known[_digest(token)] = Session(
            key, key_id, name, scopes, secrets.token_urlsafe(16), now + LASTS_S, checked_at=now
        )
        while len(self._known) > MOST:
            self._known.popitem(last=False)
        return token

    def find(self, token: str) -> Session | None:
        """Whose it is; None where nobody is signed in with it, or it was too long ago."""
        session = self._known.get(_digest(token))
        if session is not None and self._clock() >= session.ends_at:
            self.end(token)
            return None
        return session

    def end(self, token: str) -> None:
        """Signs them out."""
        self._known.pop(_digest(token), None)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
