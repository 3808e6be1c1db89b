"""Errors as responses, all of one shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import orjson
from starlette.responses import Response

from breakwater.contracts.validation import FieldError


class Problem(Exception):  # noqa: N818  RFC 9457's word for an error that is a response
    """A response with a status of 400 or above, raised from wherever the problem is found."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        details: Iterable[FieldError] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.details = tuple(details)
        self.headers = dict(headers or {})

    def response(self) -> Response:
        """The response, with an `ErrorBody`."""
        body = {
            "error": {
                "code": self.code,
                "message": self.message,
                "details": [{"path": detail.path, "message": detail.message} for detail in self.details],
            }
        }
        return Response(orjson.dumps(body), self.status, self.headers, "application/json")


def unknown_job(job_id: str | None) -> Problem:
    """404: the job is unknown. None for an id that no job can have."""
    if job_id is None:
        return Problem(404, "unknown_job", "this can't be a job's id: 1 to 128 characters, no control characters")
    return Problem(
        404,
        "unknown_job",
        f"no job {job_id!r} is decided or being worked on, and none was accepted over HTTP within a day; "
        "one that was published straight to NATS appears when a worker takes it",
    )


def unavailable(code: str, message: str) -> Problem:
    """503: the same request may be sent again; a job is best sent with the same job id."""
    return Problem(503, code, message, headers={"Retry-After": "1"})


def not_read(error: Exception) -> Problem:
    """503: the state can't be read, as NATS, Redis or ClickHouse does not respond."""
    return unavailable("unavailable", f"the state cannot be read now: {error}")


def not_done(error: Exception) -> Problem:
    """503: an action was not carried out; or perhaps it was, and asking again shows it."""
    return unavailable("unavailable", f"this can't be done now: {error}; ask again")
