"""The one shape of every error that this service answers with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import orjson
from starlette.responses import Response

from breakwater.contracts.validation import FieldError


class Problem(Exception):  # noqa: N818  RFC 9457's word for an error that is an answer
    """An answer of 400 or above, raised from wherever it is found."""

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
        """The answer."""
        body = {
            "error": {
                "code": self.code,
                "message": self.message,
                "details": [{"path": detail.path, "message": detail.message} for detail in self.details],
            }
        }
        return Response(orjson.dumps(body), self.status, self.headers, "application/json")


def unknown_job(job_id: str | None) -> Problem:
    """404: nobody knows the job. None for an id that no job can have."""
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
