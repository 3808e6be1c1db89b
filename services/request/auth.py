"""Authorization: nothing under /api and /v1, and no metrics, without an API key whose scopes let the request pass."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from breakwater.api_keys import KeyRing
from breakwater.contracts.api import KeyScope
from breakwater.policy.api_keys import ApiKey, is_session, scopes_for
from breakwater.state.connection import StateUnavailable
from breakwater.state.sessions import Sessions
from services.request.problems import OPENAI, Problem, not_read

GUARDED = ("/api", "/metrics", OPENAI)

_BELOW = tuple(f"{path}/" for path in GUARDED)
_HOLDER = "breakwater.api_key"
_SESSION = "breakwater.session"
_LOOK_AGAIN = "breakwater.api_key.look_again"


def holder_of(request: Request) -> ApiKey:
    """Whose key let this request in; only of what is guarded."""
    return request.scope[_HOLDER]


def session_of(request: Request) -> str | None:
    """The token of the session that this request belongs to; None where it came with a key."""
    return request.scope[_SESSION]


async def refusal(request: Request, every_s: float) -> str:
    """Waits until the key that let this request in would not do so any more, and says why.

    Args:
        request: one of what is guarded, which takes long.
        every_s: how often the key is looked at, in seconds.
    """
    look_again: Callable[[], Awaitable[str | None]] = request.scope[_LOOK_AGAIN]
    why: str | None = None
    while why is None:
        await asyncio.sleep(every_s)
        why = await look_again()
    return why


class RequireApiKey:
    """ASGI middleware that lets requests to what is guarded pass with a valid `Authorization: Bearer bw_…` only.

    The key must have one of the scopes that `scopes_for` wants. The token of a session stands for the key that it was
    begun with.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, sessions: Sessions) -> None:
        self._app = app
        self._keys = keys
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or answers it with 401 or 403."""
        if scope["type"] == "http" and is_guarded(scope["path"]):
            try:
                key = _key_of(scope)
                holder = scope[_HOLDER] = await self._holder(key)
                scope[_SESSION] = key if is_session(key) else None
                sent = (scope.get("raw_path") or b"").decode("latin-1")
                needed = scopes_for(scope["method"], scope["path"], sent)
                if not holder.may(needed):
                    raise _forbidden(holder, needed)
                scope[_LOOK_AGAIN] = lambda: self._why_not_now(key, needed)
            except Problem as problem:
                await problem.response(scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _holder(self, key: str) -> ApiKey:
        try:
            holder = await self._find(key)
        except StateUnavailable as error:
            raise not_read(error) from error
        if holder is None and is_session(key):
            raise _unauthorized("this session has ended; sign in again")
        if holder is None:
            raise _unauthorized("this API key is not known; `breakwater keys create NAME` makes one")
        return holder

    async def _find(self, key: str) -> ApiKey | None:
        if not is_session(key):
            return self._keys.holder(key)
        known = await self._sessions.find(key)
        return None if known is None else self._keys.of(known.session.key_id)

    async def _why_not_now(self, key: str, needed: tuple[KeyScope, ...]) -> str | None:
        try:
            holder = await self._find(key)
        except StateUnavailable:
            return None
        if holder is None:
            return "this API key is not known any more"
        return None if holder.may(needed) else "this API key may not see this any more"


def is_guarded(path: str) -> bool:
    """Whether a path takes a key."""
    return path.startswith(_BELOW) or path in GUARDED


def _key_of(scope: Scope) -> str:
    """The key as it was sent; empty where it was not sent as a bearer's."""
    header = next((value for name, value in scope["headers"] if name == b"authorization"), None)
    if header is None:
        raise _unauthorized("an API key is needed: send the header `Authorization: Bearer bw_…`")
    scheme, _, key = header.decode("latin-1").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _forbidden(key: ApiKey, needed: tuple[KeyScope, ...]) -> Problem:
    message = (
        f"this takes an API key with the scope {' or '.join(needed)}; the key {key.name!r} has the scope "
        f"{', '.join(key.scopes)}; `breakwater keys create NAME --scope {needed[0]}` makes one that may"
    )
    challenge = f'Bearer realm="breakwater", error="insufficient_scope", scope="{needed[0]}"'
    return Problem(403, "forbidden", message, headers={"WWW-Authenticate": challenge})


def _unauthorized(message: str) -> Problem:
    return Problem(401, "unauthorized", message, headers={"WWW-Authenticate": 'Bearer realm="breakwater"'})
