"""Errors as responses, all of one shape; below `/v1` of OpenAI's, and below `/v1/messages` of Anthropic's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextvars import ContextVar

import orjson
from starlette.responses import Response

from breakwater.dialects.contract.openai import CallOptions
from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.validation import FieldError

OPENAI = "/v1"
"""The root of OpenAI's API, whose errors have its form."""

_OPENAI_CODES = {
    "unauthorized": "invalid_api_key",
    "not_found": "unknown_url",
    "invalid_job": "invalid_request",
    "unknown_agent": "model_not_found",
}


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_UNSUPPORTED = {"thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}
"""Details at which Anthropic's SDK goes on without a field."""
_OVERLOADED = 529
"""Anthropic's status where OpenAI has 503."""

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Id of the request that is answered, below `/v1`."""


def is_messages(path: str) -> bool:
    """True if a path is one of Anthropic's API, also below a root that has `/v1` twice."""
    return path.removeprefix(OPENAI).removeprefix(OPENAI).startswith("/messages") and is_openai(path)


def is_openai(path: str) -> bool:
    """True if a path is one of OpenAI's API."""
    return path == OPENAI or path.startswith(f"{OPENAI}/")


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
        """Further fields of the error, below `/api`."""

    def response(self, path: str) -> Response:
        """The response to a request for a path: an `ErrorBody`, an `OpenAIErrorBody` or an `AnthropicErrorBody`."""
        if is_messages(path):
            return self._as_anthropic()
        if is_openai(path):
            return self._as_openai()
        body = {
            "error": {
                "code": self.code,
                "message": self.message,
                "details": [{"path": detail.path, "message": detail.message} for detail in self.details],
                **self.facts,
            }
        }
        return Response(orjson.dumps(body), self.status, self.headers, "application/json")

    def _as_openai(self) -> Response:
        status = 400 if self.status == 422 else self.status
        code = _OPENAI_CODES.get(self.code, self.code)
        kind = "server_error" if status >= 500 else "invalid_request_error"
        if status == 429:
            kind = code if code == "insufficient_quota" else "rate_limit_error"
        message, param = self._placed()
        body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        return Response(orjson.dumps(body), status, self._sdk_headers(), "application/json")

    def _as_anthropic(self) -> Response:
        status = {422: 400, 503: _OVERLOADED}.get(self.status, self.status)
        kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        message, param = self._placed()
        if param is not None and f"{param}: " not in message:
            message = f"{param}: {message}"
        error: dict[str, object] = {"type": kind, "message": message}
        if param in _UNSUPPORTED:
            error["details"] = _UNSUPPORTED[param]
        body = {"type": "error", "error": error, "request_id": REQUEST_ID.get()}
        return Response(orjson.dumps(body), status, self._sdk_headers(), "application/json")

    def _placed(self) -> tuple[str, str | None]:
        """The message, with the place in the client's request, and that place."""
        param = openai_param(self.details[0].path) if self.details and self.details[0].path else None
        message = self.message if param is None else self.message.replace(f"{self.details[0].path}: ", f"{param}: ", 1)
        return message, param

    def _sdk_headers(self) -> dict[str, str]:
        # The SDKs try a conflict again, and this one stays.
        return {"x-should-retry": "false", **self.headers} if self.status == 409 else self.headers


def openai_param(path: str) -> str:
    """The place in OpenAI's request that a place in a job comes from: `messages.0.role` is `messages[0].role`."""
    if path == "job_id":
        return "Idempotency-Key"
    own = path.removeprefix("api_request.body.")
    given = re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", own.removeprefix("params."))
    is_option = own == path and re.split(r"[.\[]", given)[0] in CallOptions.model_fields
    return f"breakwater.{given}" if is_option else given


def unknown_job(job_id: str | None) -> RequestError:
    """404: the job is unknown. None for an id that no job can have."""
    if job_id is None:
        return RequestError(
            404, "unknown_job", "this is not a valid job id: 1 to 128 characters, no control characters"
        )
    return RequestError(
        404,
        "unknown_job",
        (
            f"there is no job {job_id!r}: none has ended or is in progress, and none was accepted over "
            "HTTP within a day. A job published on NATS appears when a worker takes it"
        ),
    )


def unknown(what: str, message: str, path: str, hint: str) -> RequestError:
    """404 (`unknown_<what>`): the field at `path` names nothing known; `hint` says what it may be."""
    return RequestError(404, f"unknown_{what}", f"{message}; {hint}", [FieldError(path=path, message=hint)])


def unavailable(code: str, message: str) -> RequestError:
    """503: the same request may be sent again; a job is best sent with the same job id."""
    return RequestError(503, code, message, headers={"Retry-After": "1"})


def not_read(error: Exception) -> RequestError:
    """503: the state can't be read; NATS, Redis or ClickHouse does not respond."""
    return unavailable("unavailable", f"the state cannot be read now: {error}")


def not_done(error: Exception) -> RequestError:
    """503: an action was perhaps not carried out; asking again shows it."""
    return unavailable("unavailable", f"this can't be done now: {error}; retry")
