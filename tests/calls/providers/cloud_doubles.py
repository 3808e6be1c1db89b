"""Servers that check what those of Azure and Google check of a caller: the protocols of tokens, and their ends."""

from __future__ import annotations

import secrets
import ssl
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trustme
from aiohttp import web


@dataclass(slots=True)
class TokenIssuer:
    """Issues tokens and remembers when they end.

    Attributes:
        lifetime_s: how long the next ones last.
        problem: the status and the body of its answer instead of a token.
        requests: the fields of each request for a token.
    """

    lifetime_s: float = 3600
    problem: tuple[int, Any] | None = None
    requests: list[Mapping[str, str]] = field(default_factory=list[Mapping[str, str]])
    ends: dict[str, float] = field(default_factory=dict[str, float])

    def issue(self, asked: Mapping[str, str], **more: Any) -> web.Response:
        self.requests.append(dict(asked))
        if self.problem is not None:
            status, body = self.problem
            return web.json_response(body, status=status)
        token = f"tok.{secrets.token_hex(12)}"
        self.ends[token] = time.time() + self.lifetime_s
        whole_s = int(self.lifetime_s)
        return web.json_response({"access_token": token, "token_type": "Bearer", "expires_in": whole_s, **more})

    def refusal(self, request: web.BaseRequest) -> web.Response | None:
        """The answer to a caller whose token is unknown or has ended."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme == "Bearer" and self.ends.get(token, 0.0) > time.time():
            return None
        error = {"code": 401, "message": "Request had invalid authentication credentials.", "status": "UNAUTHENTICATED"}
        return web.json_response({"error": error}, status=401)

    def revoke(self) -> None:
        """Ends all tokens before their time."""
        self.ends.clear()


@asynccontextmanager
async def serving(
    routes: Mapping[str, Any], authority: trustme.CA | None = None, host: str = "localhost"
) -> AsyncGenerator[str]:
    """A server of these handlers by `METHOD path`; gives its origin. With an authority, it speaks TLS."""
    app = web.Application()
    for route, handler in routes.items():
        method, path = route.split(" ")
        app.router.add_route(method, path, handler)
    context = None
    if authority is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert(host).configure_cert(context)
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, 0, ssl_context=context).start()
        yield f"{'http' if context is None else 'https'}://{host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
