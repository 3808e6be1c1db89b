"""Error responses in the form of the API that a path belongs to: OpenAI's, Anthropic's, or the plane's own."""

from __future__ import annotations

import re

import orjson
from starlette.responses import Response

from breakwater.dialects.api import is_messages
from breakwater.dialects.api.request_ids import REQUEST_ID
from breakwater.dialects.contract.openai import CallOptions
from breakwater.identity.rules.callers import is_openai
from breakwater.kernel.http.problems import ErrorResponse, RequestError

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


def error_response(problem: RequestError, path: str) -> Response:
    """Returns the response for a path: an `ErrorBody`, an `OpenAIErrorBody` or an `AnthropicErrorBody`."""
    if is_messages(path):
        return _anthropic_response(problem)
    return _openai_response(problem) if is_openai(path) else problem.response()


def _openai_response(problem: RequestError) -> Response:
    status = 400 if problem.status == 422 else problem.status
    code = _OPENAI_CODES.get(problem.code, problem.code)
    kind = "server_error" if status >= 500 else "invalid_request_error"
    if status == 429:
        kind = code if code == "insufficient_quota" else "rate_limit_error"
    message, param = _message_and_param(problem)
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return ErrorResponse(orjson.dumps(body), status, problem.headers, "application/json")


def _anthropic_response(problem: RequestError) -> Response:
    status = {422: 400, 503: _OVERLOADED}.get(problem.status, problem.status)
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    message, param = _message_and_param(problem)
    if param is not None and f"{param}: " not in message:
        message = f"{param}: {message}"
    error: dict[str, object] = {"type": kind, "message": message}
    if param in _UNSUPPORTED:
        error["details"] = _UNSUPPORTED[param]
    body = {"type": "error", "error": error, "request_id": REQUEST_ID.get(None)}
    return ErrorResponse(orjson.dumps(body), status, problem.headers, "application/json")


def _message_and_param(problem: RequestError) -> tuple[str, str | None]:
    """Returns the message, which names the place in the client's request, and that place; None if unknown."""
    if not problem.details or not problem.details[0].path:
        return problem.message, None
    path = problem.details[0].path
    param = openai_param(path)
    return problem.message.replace(f"{path}: ", f"{param}: ", 1), param


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
