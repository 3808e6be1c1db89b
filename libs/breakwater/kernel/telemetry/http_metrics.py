"""Counts a service's answers over HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from breakwater.kernel.telemetry.metrics import OTHER, HttpMetrics

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class CountRequests:
    """ASGI middleware that counts answers, by the pattern of their route: paths hold the ids of jobs.

    A stream is counted when it begins, with the time until then.
    """

    def __init__(
        self,
        app: ASGIApp,
        counted: HttpMetrics,
        routes: Iterable[Route | Mount],
        path_of: Callable[[Scope], str] = lambda scope: scope["path"],
    ) -> None:
        """Wraps an application; `path_of` gives the path that a request is routed by."""
        self._app = app
        self._path_of = path_of
        self._counted = counted
        self._patterns = {route.path_regex: route.path_format for route in routes}
        self._plain = frozenset(path for path in self._patterns.values() if "{" not in path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, and counts its answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.monotonic()
        status: int | None = None
        streams = False

        def count(status: int) -> None:
            method = scope["method"] if scope["method"] in METHODS else OTHER
            self._counted.request(self._route(self._path_of(scope)), method, status, time.monotonic() - begun)

        async def noting(message: Message) -> None:
            nonlocal status, streams
            if message["type"] == "http.response.start":
                status = message["status"]
                # Such an answer is out when it begins: how long it is listened to says nothing of this service.
                if (b"content-type", b"text/event-stream") in message["headers"]:
                    streams = True
                    count(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception:
            status = 500  # as the server answers for what is raised here
            raise
        finally:
            if status is not None and not streams:
                count(status)

    def _route(self, path: str) -> str:
        if path in self._plain:
            return path
        return next((route for regex, route in self._patterns.items() if regex.match(path)), OTHER)
