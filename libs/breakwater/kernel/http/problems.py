"""Error responses. They have one shape, except below `/v1` (OpenAI's) and below `/v1/messages` (Anthropic's)."""

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
"""Details with which Anthropic's SDK goes on without a field."""
_OVERLOADED = 529
"""Anthropic's status for an outage, for which OpenAI uses 503."""

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the current request, below `/v1`."""


def is_messages(path: str) -> bool:
    """Returns True for a path of Anthropic's API, even if its root has `/v1` twice."""
    return path.removeprefix(OPENAI).removeprefix(OPENAI).startswith("/messages") and is_openai(path)


def is_openai(path: str) -> bool:
    """Returns True for a path of OpenAI's API."""
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
        """Returns the response for a path: an `ErrorBody`, an `OpenAIErrorBody` or an `AnthropicErrorBody`."""
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
        message, param = self._message_and_param()
        body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        return Response(orjson.dumps(body), status, self._sdk_headers(), "application/json")

    def _as_anthropic(self) -> Response:
        status = {422: 400, 503: _OVERLOADED}.get(self.status, self.status)
        kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        message, param = self._message_and_param()
        if param is not None and f"{param}: " not in message:
            message = f"{param}: {message}"
        error: dict[str, object] = {"type": kind, "message": message}
        if param in _UNSUPPORTED:
            error["details"] = _UNSUPPORTED[param]
        body = {"type": "error", "error": error, "request_id": REQUEST_ID.get()}
        return Response(orjson.dumps(body), status, self._sdk_headers(), "application/json")

    def _message_and_param(self) -> tuple[str, str | None]:
        """Returns the message, which names the place in the client's request, and that place; None if unknown."""
        param = openai_param(self.details[0].path) if self.details and self.details[0].path else None
        message = self.message if param is None else self.message.replace(f"{self.details[0].path}: ", f"{param}: ", 1)
        return message, param

    def _sdk_headers(self) -> dict[str, str]:
        # The SDKs retry conflicts by default, but this conflict would not go away.
        return {"x-should-retry": "false", **self.headers} if self.status == 409 else self.headers


def openai_param(path: str) -> str:
    """Returns the place in OpenAI's request that a place in a job comes from.

    `api_request.body.messages.0.role` comes from `messages[0].role`, for example.
    """
    if path == "job_id":
        return "Idempotency-Key"
    body_path = path.removeprefix("api_request.body.")
    place = re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", body_path.removeprefix("params."))
    is_option = body_path == path and re.split(r"[.\[]", place)[0] in CallOptions.model_fields
    return f"breakwater.{place}" if is_option else place


def unknown_job(job_id: str | None) -> RequestError:
    """Returns 404 for an unknown job. `job_id` is None for an id that no job can have."""
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
