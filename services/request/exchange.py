"""Requests to the HTTP API and their responses: what every one of them passes, in one layer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from inspect import iscoroutinefunction
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from breakwater.dialects.api.errors import error_response
from breakwater.dialects.api.request_ids import name_request
from breakwater.identity.auth import CallerWatch, KeyGuard, is_guarded
from breakwater.identity.rules.callers import is_openai
from breakwater.kernel.http.bodies import HOLD, BodyHold
from breakwater.kernel.http.problems import RequestError, unauthorized_error
from breakwater.kernel.process.byte_budget import ByteBudget
from breakwater.kernel.telemetry.http_metrics import CountedAnswer, RequestCounter

ErrorResponses = Mapping[type[Exception], Callable[[Request, Exception], Awaitable[Response]]]
"""By the class of an error, the function that returns its response."""


class Exchanges:
    """The ASGI application of one config.

    It counts answers, gives requests to the providers' APIs an id, admits callers, and holds the room of large bodies
    until their requests have been answered. Paths without parameters are looked up in a table; Starlette routes the
    others, which takes several times as long.
    """

    def __init__(
        self,
        app: ASGIApp,
        routes: Iterable[Route],
        *,
        counter: RequestCounter,
        guard: KeyGuard,
        budget: ByteBudget,
        error_responses: ErrorResponses,
    ) -> None:
        """Puts the layer around an application.

        Args:
            app: serves all routes.
            routes: those that may be served without it.
            counter: counts the answers.
            guard: admits callers.
            budget: of large bodies.
            error_responses: for errors of the routes, as `app` has them.
        """
        self._app = app
        self._counter = counter
        self._guard = guard
        self._budget = budget
        self._error_responses = error_responses
        self._endpoints: dict[tuple[str, str], Callable[[Request], Awaitable[Response]]] = {}
        for route in routes:
            if "{" not in route.path and iscoroutinefunction(route.endpoint):
                for method in route.methods or ():
                    self._endpoints.setdefault((method, route.path), route.endpoint)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Responds to a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        answer = _Answer(send, self._counter, scope)
        if is_openai(path):
            answer.header = name_request(path)
        hold = scope[HOLD] = BodyHold(self._budget)
        watch: CallerWatch | None = None
        try:
            if is_guarded(path):
                try:
                    watch = answer.watch = await self._guard.admit(scope)
                except RequestError as problem:
                    await error_response(problem, path)(scope, receive, answer.send)
                    return
                caller_receive = watch.receive_from(receive)
            else:
                caller_receive = receive
            await self._respond(scope, caller_receive, answer)
            if watch is not None and watch.ended_wait and answer.counted.status is None:
                answer.watch = None
                await error_response(unauthorized_error(watch.why or ""), path)(scope, receive, answer.send)
        except Exception:
            answer.counted.status = 500  # as the server answers for what is raised here
            raise
        finally:
            hold.release()
            if watch is not None:
                self._guard.release(watch)
            answer.counted.end()

    async def _respond(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        endpoint = self._endpoints.get((scope["method"], scope["path"]))
        if endpoint is None:
            await self._app(scope, receive, answer.send)
            return
        request = Request(scope, receive, answer.send)
        try:
            response = await endpoint(request)
            await response(scope, receive, answer.send)
        except Exception as error:
            if answer.counted.status is not None:
                raise
            kind = next(kind for kind in type(error).__mro__ if kind in self._error_responses)
            response = await self._error_responses[kind](request, error)
            await response(scope, receive, answer.send)
            if kind is Exception:
                raise  # the server logs it


class _Answer:
    """The answer to one request, of which nothing is sent if its caller loses its access before it begins."""

    __slots__ = ("_send", "_withheld", "counted", "header", "watch")

    def __init__(self, send: Send, counter: RequestCounter, scope: Scope) -> None:
        self._send = send
        self._withheld = False
        self.counted = CountedAnswer(counter, scope)
        self.header: tuple[bytes, bytes] | None = None
        """The header of the request's id."""
        self.watch: CallerWatch | None = None

    def send(self, message: Message) -> Awaitable[Any]:
        """Sends a message."""
        if message["type"] == "http.response.start":
            if self.watch is not None and self.watch.ended_wait:
                self._withheld = True
            else:
                if self.header is not None:
                    message["headers"] = [*message["headers"], self.header]
                self._withheld = False
                self.counted.begin(message)
        return _nothing() if self._withheld else self._send(message)


async def _nothing() -> None:
    """Sends nothing."""
