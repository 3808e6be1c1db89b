"""Traces of submissions: requests that become a job or the jobs of a plan."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.requests import ClientDisconnect, Request

from breakwater.kernel.http.problems import RequestError
from breakwater.kernel.telemetry import tracing


@dataclass(slots=True)
class SubmissionTrace:
    """The trace of a submission under way."""

    traceparent: str | None
    """The W3C trace context for the job; None without a trace."""
    attributes: dict[str, tracing.Attribute] = field(default_factory=dict[str, tracing.Attribute])

    def set_job(self, agent: str, job_id: str) -> None:
        """Records the job, once it is known."""
        self.attributes |= {"gen_ai.agent.name": agent, "breakwater.execution_id": job_id}

    def set_status(self, status: int) -> None:
        """Records the status of the response."""
        self.attributes["http.response.status_code"] = status


@contextmanager
def traced_submission(request: Request, route: str) -> Generator[SubmissionTrace]:
    """Traces a submission to a route while the block runs. The span is part of the caller's trace, if there is one."""
    parent = request.headers.get("traceparent", "")
    span = tracing.begin(
        f"POST {route}",
        parent=parent if tracing.is_traceparent(parent) else None,
        kind="server",
        attributes=lambda: {
            "http.request.method": "POST",
            "http.route": route,
            "url.path": request.url.path,
            "url.scheme": request.url.scheme,
        },
    )
    submission = SubmissionTrace(span.traceparent)
    error = None
    try:
        yield submission
    except RequestError as problem:
        submission.set_status(problem.status)
        error = problem.code if problem.status >= 500 else None  # a caller's mistake is not an error of the service
        raise
    except ClientDisconnect:
        submission.set_status(499)
        raise
    except Exception as bug:
        submission.set_status(500)
        error = type(bug).__name__
        raise
    finally:
        span.end(error=error, attributes=submission.attributes)
