"""The door: nothing under /api without a key, and no metrics."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from breakwater.api_keys import KeyRing
from services.request.problems import Problem

GUARDED = ("/api", "/metrics")

_BELOW = tuple(f"{path}/" for path in GUARDED)


class RequireApiKey:
    """ASGI middleware that lets requests to what is guarded pass with a valid `Authorization: Bearer bw_…` only."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or answers it with 401."""
        if scope["type"] == "http" and _is_guarded(scope["path"]):
            problem = self._problem(scope)
            if problem is not None:
                await problem.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _problem(self, scope: Scope) -> Problem | None:
        header = next((value for name, value in scope["headers"] if name == b"authorization"), None)
        if header is None:
            return _unauthorized("an API key is needed: send the header `Authorization: Bearer bw_…`")
        scheme, _, key = header.decode("latin-1").partition(" ")
        if scheme.lower() != "bearer" or self._keys.holder(key.strip()) is None:
            return _unauthorized("this API key is not known; `breakwater keys create NAME` makes one")
        return None


def _is_guarded(path: str) -> bool:
    return path.startswith(_BELOW) or path in GUARDED


def _unauthorized(message: str) -> Problem:
    return Problem(401, "unauthorized", message, headers={"WWW-Authenticate": 'Bearer realm="breakwater"'})
