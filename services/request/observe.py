"""What is seen of this service from outside: its submissions traced, its metrics shown."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from breakwater import metrics, tracing
from services.request.problems import Problem


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
