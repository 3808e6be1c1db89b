"""What is seen of this service from outside: its requests counted, its submissions traced, its metrics shown."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from breakwater import metrics, tracing
from services.request.problems import Problem
from services.request.routing import as_routed

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class CountRequests:
    """ASGI middleware that counts answers, by the pattern of their route: paths hold the ids of jobs.

    A stream is counted when it begins, with the time until then.
    """

    def __init__(self, app: ASGIApp, counted: metrics.HttpMetrics, routes: Iterable[Route]) -> None:
        self._app = app
        self._counted = counted
        self._patterns = {route.path_regex: route.path_format for route in routes}
        self._plain = frozenset(path for path in self._patterns.values() if "{" not in path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, and counts what becomes of it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.monotonic()
        status: int | None = None
        streams = False

        def count(status: int) -> None:
            method = scope["method"] if scope["method"] in METHODS else metrics.OTHER
            self._counted.request(self._route(as_routed(scope)), method, status, time.monotonic() - begun)

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
        return next((route for regex, route in self._patterns.items() if regex.match(path)), metrics.OTHER)


def show_metrics(request: Request) -> Response:
    """GET /metrics. Not a coroutine, so that gathering them blocks no request."""
    body, content_type = metrics.exposition(request.headers.get("accept", ""))
    return Response(body, headers={"Content-Type": content_type})


@dataclass(slots=True)
class SubmissionTrace:
    """A submission under way."""

    traceparent: str | None
    """To go with the job; None where no trace has begun."""
    attributes: dict[str, tracing.Attribute] = field(default_factory=dict[str, tracing.Attribute])

    def of(self, agent: str, job_id: str) -> None:
        """Records which job it is, once that is known."""
        self.attributes |= {"gen_ai.agent.name": agent, "breakwater.execution_id": job_id}

    def answered(self, status: int) -> None:
        """Notes the answer."""
        self.attributes["http.response.status_code"] = status


@contextmanager
def submitting(request: Request, route: str) -> Generator[SubmissionTrace]:
    """Traces a submission to a route while the block runs, as part of its caller's trace if it came with one."""
    given = request.headers.get("traceparent", "")
    span = tracing.begin(
        f"POST {route}",
        parent=given if tracing.is_traceparent(given) else None,
        kind="server",
        attributes=lambda: {
            "http.request.method": "POST",
            "http.route": route,
            "url.path": request.url.path,
            "url.scheme": request.url.scheme,
        },
    )
    submission, error = SubmissionTrace(span.traceparent), None
    try:
        yield submission
    except Problem as problem:
        submission.answered(problem.status)
        error = problem.code if problem.status >= 500 else None  # what a caller did wrong is no error of ours
        raise
    except ClientDisconnect:
        submission.answered(499)
        raise
    except Exception as bug:
        submission.answered(500)
        error = type(bug).__name__
        raise
    finally:
        span.end(error=error, attributes=submission.attributes)
