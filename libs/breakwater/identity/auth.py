"""Authorization: requests below /api and /v1, and for metrics, need an API key with one of the scopes they require.

The token of a session has the rights of the key that began it, or those of a person with roles.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import datetime

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from breakwater.identity.api_keys import KeyRing
from breakwater.identity.contract import KeyScope
from breakwater.identity.rules.callers import (
    OPEN_TO_ALL,
    OPENAI,
    Caller,
    holder_of_key,
    is_link,
    is_openai,
    is_session,
    person,
    roles_of,
    roles_that_may,
    scopes_for,
)
from breakwater.identity.settings import OpenId
from breakwater.identity.store import KeySession, PersonSession, Sessions
from breakwater.kernel.http.problems import RequestError, not_read
from breakwater.kernel.http.server import Shares
from breakwater.kernel.redis.connection import StateUnavailableError
from breakwater.kernel.types import time_from_ms

GUARDED = ("/api", "/metrics", OPENAI)

_BELOW = tuple(f"{path}/" for path in GUARDED)
_CALLER = "breakwater.caller"
_SESSION = "breakwater.session"
_CHECK_AGAIN = "breakwater.caller.check_again"


def caller_of(request: Request) -> Caller:
    """Returns the holder of the key or session of a request to a guarded path."""
    return request.scope[_CALLER]


def session_of(request: Request) -> str | None:
    """Returns the token of the request's session; None if it came with a key."""
    return request.scope[_SESSION]


async def wait_until_refused(request: Request, every_s: float) -> str:
    """Waits until the key of a long request has lost its access, and returns the reason.

    Args:
        request: a request to a guarded path.
        every_s: the interval of the checks, in seconds.
    """
    check_again: Callable[[], Awaitable[str | None]] = request.scope[_CHECK_AGAIN]
    why: str | None = None
    while why is None:
        await asyncio.sleep(every_s)
        why = await check_again()
    return why


@dataclass(frozen=True, slots=True)
class RequireApiKey:
    """ASGI middleware that lets requests to guarded paths pass only with a valid `Authorization: Bearer bw_…`.

    Below `/v1`, the key may be in `x-api-key` instead. It must have one of the scopes that `scopes_for` returns. The
    token of a session has the current rights of the key that began it, or of the roles that the config gives its
    person.

    Args:
        app: the application behind the middleware.
        keys: the known keys.
        sessions: the known sessions.
        openid: the config's OpenID settings; without them, sessions of persons have ended.
        shares: the limit of concurrent requests by key.
        error_response: returns the response of a refusal, for the path of the request.
    """

    app: ASGIApp
    keys: KeyRing
    sessions: Sessions
    openid: OpenId | None
    shares: Shares
    error_response: Callable[[RequestError, str], Response]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or answers it with 401, 403 or 429."""
        if scope["type"] != "http" or not is_guarded(scope["path"]):
            await self.app(scope, receive, send)
            return
        try:
            key = _key_of(scope)
            caller = scope[_CALLER] = await self._caller(key)
            scope[_SESSION] = key if is_session(key) else None
            raw_path = (scope.get("raw_path") or b"").decode("latin-1")
            needed = scopes_for(scope["method"], scope["path"], raw_path)
            if not caller.may(needed):
                raise _forbidden_error(caller, needed)
            scope[_CHECK_AGAIN] = lambda: self._why_no_longer(key, needed)
            if not self.shares.take(caller.id):
                raise _too_many()
        except RequestError as problem:
            await self.error_response(problem, scope["path"])(scope, receive, send)
            return
        try:
            await self.app(scope, receive, send)
        finally:
            self.shares.release(caller.id)

    async def _caller(self, key: str) -> Caller:
        try:
            caller = await self._find(key)
        except StateUnavailableError as error:
            raise not_read(error) from error
        if caller is None and is_link(key):
            message = (
                "this sign-in link was used before, is over ten minutes old, or its key was revoked; "
                "`breakwater console` prints a new one"
            )
            raise _unauthorized_error(message)
        if caller is None and is_session(key):
            raise _unauthorized_error("this session has ended; sign in again")
        if caller is None:
            raise _unauthorized_error("this API key is unknown; `breakwater keys create NAME` creates one")
        return caller

    async def _find(self, token: str) -> Caller | None:
        if not is_session(token):
            key_id = await self.sessions.redeem(token) if is_link(token) else None
            key = self.keys.of(key_id) if key_id else self.keys.holder(token)
            return None if key is None else holder_of_key(key)
        stored = await self.sessions.find(token)
        if stored is None:
            return None
        match stored.session:
            case KeySession(key_id):
                key = self.keys.of(key_id)
                return None if key is None else holder_of_key(key)
            case PersonSession() as session:
                return self._person(session, time_from_ms(stored.began_ms))

    def _person(self, session: PersonSession, signed_in_at: datetime) -> Caller | None:
        """Returns the person of a session, with their current roles; None if the config gives them no role any more."""
        openid = self.openid
        if openid is None or openid.issuer != session.issuer:
            return None
        roles = roles_of(session.values, openid.roles, openid.default_role)
        return person(session.subject, session.name, roles, signed_in_at) if roles else None

    async def _why_no_longer(self, key: str, needed: tuple[KeyScope, ...]) -> str | None:
        try:
            caller = await self._find(key)
        except StateUnavailableError:
            return None
        if caller is None:
            return "this API key was revoked"
        return None if caller.may(needed) else "this API key no longer has access to this"


def is_guarded(path: str) -> bool:
    """Returns True if a path needs a key."""
    return path not in OPEN_TO_ALL and (path.startswith(_BELOW) or path in GUARDED)


def _key_of(scope: Scope) -> str:
    """Returns the key that a request was sent with, in `Authorization: Bearer` or, as Anthropic's SDKs do, `x-api-key`.

    Empty if `Authorization` has another scheme. Raises RequestError: 401, there is no key.
    """
    header = next((value for name, value in scope["headers"] if name == b"authorization"), None)
    if header is None:
        sdk_header = next((value for name, value in scope["headers"] if name == b"x-api-key"), None)
        if sdk_header is not None and is_openai(scope["path"]):
            return sdk_header.decode("latin-1").strip()
        raise _unauthorized_error("an API key is needed: send the header `Authorization: Bearer bw_…`")
    scheme, _, key = header.decode("latin-1").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _forbidden_error(caller: Caller, needed: tuple[KeyScope, ...]) -> RequestError:
    if caller.kind == "person":
        message = (
            f"this needs the role {' or '.join(roles_that_may(needed))}; {caller.name!r} is {_in_words(caller.roles)}"
        )
    else:
        message = (
            f"this needs an API key with the scope {' or '.join(needed)}; the key {caller.name!r} "
            f"has the scope {_in_words(caller.scopes)}; "
            f"`breakwater keys create NAME --scope {needed[0]}` creates one"
        )
    challenge = f'Bearer realm="breakwater", error="insufficient_scope", scope="{needed[0]}"'
    return RequestError(403, "forbidden", message, headers={"WWW-Authenticate": challenge})


def _too_many() -> RequestError:
    message = (
        "this API key has reached its limit of concurrent requests; most of them wait for "
        "results. Retry when some have ended, or wait for fewer results at a time"
    )
    return RequestError(429, "too_many_requests", message, headers={"Retry-After": "1"})


def _in_words(names: Iterable[str]) -> str:
    return ", ".join(names)


def _unauthorized_error(message: str) -> RequestError:
    return RequestError(401, "unauthorized", message, headers={"WWW-Authenticate": 'Bearer realm="breakwater"'})
