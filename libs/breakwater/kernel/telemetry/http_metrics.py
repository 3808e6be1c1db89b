"""Counts a service's answers over HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from breakwater.kernel.telemetry.metrics import OTHER, HttpMetrics

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class RequestCounter:
    """Counts answers by the pattern of their route: paths hold the ids of jobs."""

    def __init__(
        self,
        counted: HttpMetrics,
        routes: Iterable[Route | Mount],
        path_of: Callable[[Scope], str] = lambda scope: scope["path"],
    ) -> None:
        """Counts requests to `routes`; `path_of` gives the path that a request is routed by."""
        self._path_of = path_of
        self._counted = counted
        self._patterns = {route.path_regex: route.path_format for route in routes}
        self._plain = frozenset(path for path in self._patterns.values() if "{" not in path)

    def count(self, scope: Scope, status: int, seconds: float) -> None:
        """Counts an answer that took `seconds`."""
        method = scope["method"] if scope["method"] in METHODS else OTHER
        self._counted.request(self._route(self._path_of(scope)), method, status, seconds)

    def _route(self, path: str) -> str:
        if path in self._plain:
            return path
        return next((route for regex, route in self._patterns.items() if regex.match(path)), OTHER)


class CountRequests:
    """ASGI middleware that counts answers. A stream is counted when it begins, with the time until then."""

    def __init__(self, app: ASGIApp, counter: RequestCounter) -> None:
        self._app = app
        self._counter = counter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, and counts its answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = CountedAnswer(self._counter, scope)

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer.begin(message)
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception:
            answer.status = 500  # as the server answers for what is raised here
            raise
        finally:
            answer.end()


class CountedAnswer:
    """The answer to one request, which is counted once."""

    __slots__ = ("_begun", "_counter", "_is_counted", "_scope", "status")

    def __init__(self, counter: RequestCounter, scope: Scope) -> None:
        self._counter = counter
        self._scope = scope
        self._begun = time.monotonic()
        self._is_counted = False
        self.status: int | None = None

    def begin(self, start: Message) -> None:
        """Notes the beginning of the answer."""
        self.status = start["status"]
        # Such an answer is out when it begins: how long it is listened to says nothing of this service.
        if (b"content-type", b"text/event-stream") in start["headers"]:
            self.end()

    def end(self) -> None:
        """Counts the answer, if there was one."""
        if self.status is not None and not self._is_counted:
            self._is_counted = True
            self._counter.count(self._scope, self.status, time.monotonic() - self._begun)
