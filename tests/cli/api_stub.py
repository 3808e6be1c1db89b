"""The HTTP interface as far as a test wants it: answers by path, and what was asked."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

KEY = "bw_stub_key"


@dataclass(slots=True)
class Stub:
    """What it answers, `(status, body)` by method and path below `api/v1`; what it was asked, and with which query."""

    url: str = ""
    answers: dict[str, tuple[int, Any]] = field(default_factory=dict[str, "tuple[int, Any]"])
    asked: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])
    queries: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    def in_turn(self, *answers: tuple[int, Any]) -> None:
        """Gives each request the next answer."""
        asked = self.asked

        class InTurn(dict[str, tuple[int, Any]]):
            def get(self, *_: Any) -> Any:
                return answers[len(asked) - 1]

        self.answers = InTurn()

    async def answer(self, request: web.Request) -> web.Response:
        asked = f"{request.method} {request.path.removeprefix('/api/v1/')}"
        self.asked.append((asked, await request.json() if request.can_read_body else None))
        self.queries.append(dict(request.query))
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.json_response(problem("unauthorized", "the API key is missing or wrong"), status=401)
        status, body = self.answers.get(asked, (404, "Not Found"))
        if body is None:
            assert request.transport is not None
            request.transport.abort()
        return (
            web.Response(text=body, status=status) if isinstance(body, str) else web.json_response(body, status=status)
        )


def problem(code: str, message: str) -> dict[str, Any]:
    """An error as the interface writes it."""
    return {"error": {"code": code, "message": message, "details": [{"path": "", "message": message}]}}


@asynccontextmanager
async def serving(
    special: Mapping[str, Callable[[web.Request], Awaitable[web.StreamResponse]]] | None = None,
) -> AsyncGenerator[Stub]:
    """A stub that listens; `special` handles whole paths of its own."""
    stub = Stub()
    app = web.Application()
    for path, handler in (special or {}).items():
        app.router.add_get(path, handler)
    app.router.add_route("*", "/{path:.*}", stub.answer)
    async with TestServer(app) as server:
        stub.url = str(server.make_url("")).rstrip("/")
        yield stub
