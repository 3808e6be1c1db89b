"""The HTTP interface as far as a test wants it: answers by path, and what was asked."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from secrets import token_hex
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from breakwater.kernel.types import format_time

KEY = "bw_stub_key"


@dataclass(slots=True)
class Stub:
    """What it answers, `(status, body)` by method and path below `api/v1`; what it was asked, and with which query."""

    url: str = ""
    answers: dict[str, tuple[int, Any]] = field(default_factory=dict[str, "tuple[int, Any]"])
    headers: dict[str, str] = field(default_factory=dict[str, str])
    """Those of all answers in JSON."""
    asked: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])
    queries: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    sessions: set[str] = field(default_factory=set[str])
    links: set[str] = field(default_factory=set[str])
    """Tokens of sign-in links that were not used yet."""
    """The tokens of sessions that were begun and not ended. What is asked of these does not count as asked."""

    def in_turn(self, *answers: tuple[int, Any]) -> None:
        """Gives each request the next answer."""
        asked = self.asked

        class InTurn(dict[str, tuple[int, Any]]):
            def get(self, *_: Any) -> Any:
                return answers[len(asked) - 1]

        self.answers = InTurn()

    async def answer(self, request: web.Request) -> web.Response:
        asked = f"{request.method} {request.path.removeprefix('/api/v1/')}"
        if not asked.startswith("POST sessions"):
            self.asked.append((asked, await request.json() if request.can_read_body else None))
            self.queries.append(dict(request.query))
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if token in self.links:
            self.links.remove(token)
        elif token != KEY and token not in self.sessions:
            return web.json_response(problem("unauthorized", "the API key is missing or wrong"), status=401)
        status, body = self.answers.get(asked) or self._of_sessions(asked, token)
        if body is None:
            assert request.transport is not None
            request.transport.abort()
        return (
            web.Response(text=body, status=status)
            if isinstance(body, str)
            else web.json_response(body, status=status, headers=self.headers)
        )

    def _of_sessions(self, asked: str, token: str) -> tuple[int, Any]:
        match asked:
            case "POST sessions":
                self.sessions.add(begun := f"bws_stub_{token_hex(4)}_session")
                return 200, {"token": begun, "ends_at": format_time(datetime.now(UTC) + timedelta(hours=12))}
            case "POST sessions/end":
                self.sessions.discard(token)
                return 200, {"ended": True}
            case _:
                return 404, "Not Found"


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
