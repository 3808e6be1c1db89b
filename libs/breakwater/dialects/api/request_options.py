"""The options of requests to the providers' APIs, in headers or in the body, and the documentation of errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.datastructures import Headers

from breakwater.dialects.contract.openai import CallOptions
from breakwater.identity.operations import TOO_MANY
from breakwater.kernel.http.parsing import invalid_job
from breakwater.kernel.surrogates import whole_escapes
from breakwater.kernel.validation import FieldError, problems

OPTION_PREFIX = "x-breakwater-"
"""The beginning of the headers of options, and of those that describe a job in its response."""

REQUEST_HEADERS: Mapping[str, str] = {
    "Idempotency-Key": "The job's id: 1 to 128 characters of printable ASCII.",
    "x-breakwater-tenant": "As `breakwater.tenant` in the body, which comes first; so for the other options.",
    "x-session-id": "Same as `breakwater.session_id`: calls of a session are shown as one run.",
    "traceparent": "W3C trace context that the job becomes a part of. Calls of one trace are one run, if they "
    "name no task and no session.",
}
"""Headers of requests that call models, for the documentation."""

OPENAI_ERRORS: Mapping[int, str] = {
    403: "The task was stopped (`guard_tripped`), or the key may not do this (`forbidden`).",
    409: "The idempotency key is that of another call (`id_conflict`), or the job was cancelled (`cancelled`).",
    429: "A budget is used up (`insufficient_quota`), or a rate limit (`rate_limit_exceeded`). " + TOO_MANY,
    502: "No model gave a usable answer: `provider_error`, `provider_unreachable`, `invalid_output`, `worker_lost`.",
    503: "The breakers of all models are open (`breaker_open`, `agent_unavailable`), or nothing was accepted "
    "(`unavailable`, `refused`).",
    504: "The job's time was over (`timeout`).",
}
"""Errors of a request below `/v1`, except for Messages, as the API document describes them."""

SESSION_HEADERS = ("x-session-id", "x-claude-code-session-id", "session-id")
"""Headers in which programs name their session: other gateways and opencode, Claude Code, and Codex."""
_JSON_OPTIONS = frozenset({"fallback_models", "depends_on", "metadata", "breaker", "guard", "retry", "rate_limit"})


_NO_OPTIONS = CallOptions()


def options_of(headers: Headers, body_options: CallOptions | None) -> CallOptions:
    """Returns the options of a request. Those of its body take precedence over those of its headers.

    Args:
        headers: `x-breakwater-tenant`, `x-breakwater-task-id`, …, whose values are JSON if the option is not a text;
            and the headers in which programs name their sessions.
        body_options: the field `breakwater` of the body.

    Raises:
        RequestError: 422, a header names no option, or its value is invalid.
    """
    session_id = next((headers[name] for name in SESSION_HEADERS if name in headers), None)
    header_options: dict[str, Any] = {} if session_id is None else {"session_id": session_id}
    for header, value in headers.items():
        if header.startswith(OPTION_PREFIX):
            name = header.removeprefix(OPTION_PREFIX).replace("-", "_")
            header_options[name] = _json(header, value) if name in _JSON_OPTIONS else value
    if not header_options:
        return body_options or _NO_OPTIONS
    try:
        # Headers are texts, so numbers and booleans need to be converted.
        options = CallOptions.model_validate(header_options, strict=False)
    except ValidationError as error:
        field_errors = problems(error, CallOptions, header_options)
        details = list[FieldError]()
        for field_error in field_errors:
            name, dot, subfield = field_error.path.partition(".")
            details.append(
                FieldError(path=f"{OPTION_PREFIX}{name.replace('_', '-')}{dot}{subfield}", message=field_error.message)
            )
        raise invalid_job(details) from None
    return options if body_options is None else options.model_copy(update=body_options.model_dump(exclude_unset=True))


def _json(header: str, value: str) -> Any:
    try:
        return from_json(whole_escapes(value))
    except ValueError as error:
        raise invalid_job([FieldError(path=header, message=f"is not JSON: {error}")]) from None
