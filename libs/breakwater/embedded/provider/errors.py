"""OpenAI's errors: the body and the headers that come with a status."""

from __future__ import annotations

import orjson

from breakwater.embedded.provider.script import ErrorText

REQUESTS_PER_MINUTE = 10_000
"""The limit that a rate-limited answer names; nothing is enforced by it, faults decide."""

_STANDARD = {
    400: ErrorText(type="invalid_request_error", message="The request is invalid."),
    401: ErrorText(type="invalid_request_error", code="invalid_api_key", message="Incorrect API key provided."),
    402: ErrorText(type="insufficient_quota", code="insufficient_quota", message="The account has no credit left."),
    403: ErrorText(type="invalid_request_error", code="permission_denied", message="This key may not use this model."),
    404: ErrorText(type="invalid_request_error", code="not_found", message="The resource does not exist."),
    413: ErrorText(type="invalid_request_error", code="request_too_large", message="The request is too large."),
    422: ErrorText(type="invalid_request_error", message="A parameter has a value that can't be processed."),
    429: ErrorText(type="requests", code="rate_limit_exceeded", message="Rate limit reached; please try again later."),
    500: ErrorText(type="server_error", message="The server had an error while processing your request."),
    502: ErrorText(type="server_error", message="Bad gateway."),
    503: ErrorText(type="server_error", code="service_unavailable", message="The service is unavailable."),
    504: ErrorText(type="server_error", message="The gateway timed out."),
    529: ErrorText(type="overloaded_error", code="overloaded", message="The service is overloaded."),
}


def unknown_model(model: str) -> ErrorText:
    """The body of the 404 for a model that the script does not have."""
    return ErrorText(code="model_not_found", message=f"The model `{model}` does not exist or you do not have access.")


def orphan_tool_calls(orphans: tuple[str, ...]) -> ErrorText:
    """The body of the 400 for tool calls without results, worded as clients match it."""
    return ErrorText(
        param="messages",
        message="An assistant message with 'tool_calls' must be followed by tool messages responding to each "
        f"'tool_call_id'. The following tool_call_ids did not have response messages: {', '.join(orphans)}",
    )


def write_error(status: int, custom: ErrorText | None) -> bytes:
    """An error body; what `custom` leaves out is what the status says by default.

    A custom message without a code gets no code: the default one would be about another error.
    """
    standard = _STANDARD.get(status)
    if standard is None:
        standard = ErrorText(
            type="invalid_request_error" if status < 500 else "server_error",
            message=f"The request was answered with status {status}.",
        )
    custom = custom or standard
    code = custom.code if custom.code is not None or custom.message is not None else standard.code
    return orjson.dumps(
        {
            "error": {
                "message": custom.message if custom.message is not None else standard.message,
                "type": custom.type if custom.type is not None else standard.type,
                "param": custom.param,
                "code": code,
            }
        }
    )


def error_headers(status: int, retry_after_s: float | None) -> dict[str, str]:
    """`Retry-After` where the script gives one, and the `x-ratelimit-*` family on 429.

    A wait that is not whole seconds is sent as it is: the standard knows whole seconds only, but gateways do send
    fractions, and clients read them.
    """
    headers: dict[str, str] = {}
    if retry_after_s is not None:
        headers["Retry-After"] = f"{retry_after_s:.10g}"
        headers["retry-after-ms"] = f"{retry_after_s * 1000:.0f}"
    if status == 429:
        headers["x-ratelimit-limit-requests"] = str(REQUESTS_PER_MINUTE)
        headers["x-ratelimit-remaining-requests"] = "0"
        headers["x-ratelimit-reset-requests"] = f"{retry_after_s if retry_after_s is not None else 1:.10g}s"
    return headers
