"""Error responses of the HTTP API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import orjson
from starlette.responses import Response

from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.validation import FieldError


class RequestError(BreakwaterError):
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
        self.facts: Mapping[str, str | None] = {}
        """Further fields of the error, in an `ErrorBody`."""

    def response(self) -> Response:
        """Returns the response, an `ErrorBody`. The APIs of providers have forms of their own."""
        body = {
            "error": {
                "code": self.code,
                "message": self.message,
                "details": [{"path": detail.path, "message": detail.message} for detail in self.details],
                **self.facts,
            }
        }
        return Response(orjson.dumps(body), self.status, self.headers, "application/json")


def unknown(kind: str, message: str, path: str, hint: str) -> RequestError:
    """Returns 404 with the code `unknown_<kind>`.

    Args:
        kind: the kind of the thing that is unknown.
        message: what is unknown.
        path: the field that names it.
        hint: what the field may be.
    """
    return RequestError(404, f"unknown_{kind}", f"{message}; {hint}", [FieldError(path=path, message=hint)])


def unavailable(code: str, message: str) -> RequestError:
    """Returns 503. The caller may repeat the request; a job is best sent with the same job id."""
    return RequestError(503, code, message, headers={"Retry-After": "1"})


def not_read(error: Exception) -> RequestError:
    """Returns 503 for state that can't be read, because NATS, Redis or ClickHouse does not respond."""
    return unavailable("unavailable", f"the state cannot be read now: {error}")


def not_done(error: Exception) -> RequestError:
    """Returns 503 for an action that may not have been carried out. Repeating the request shows it."""
    return unavailable("unavailable", f"this can't be done now: {error}; retry")
