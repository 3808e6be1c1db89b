"""The failures that a provider can give, and what must come of each: the table of docs/reliability.md, row by row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

MAX_ATTEMPTS = 3
"""Of the agents that walk the table."""

CONTEXT_OVERFLOW = {
    "code": "context_length_exceeded",
    "message": "This model's maximum context length is 8192 tokens. However, your messages resulted in 9011 tokens.",
}


@dataclass(frozen=True, slots=True)
class Row:
    """A failure that does not go away.

    Attributes:
        name: as in the table.
        kind: of the recorded error.
        class_name: of the recorded error.
        retried: whether the same model is tried again.
        counted: whether the breaker counts it.
        cost: of each call: `nothing`, `estimated` where it may have been billed, `billed` where the answer reports.
        repair: the cause of the one further call that is made instead of a retry.
        fault: what the simulated provider does; None where it is never reached.
        endpoint: where the call goes instead: `refused`, `unknown_host`, `plain_port` or `no_credential`.
    """

    name: str
    kind: str
    class_name: str
    retried: bool
    counted: bool
    cost: Literal["nothing", "estimated", "billed"] = "nothing"
    fault: Mapping[str, Any] = field(default_factory=dict[str, Any])
    endpoint: str | None = None
    repair: str | None = None

    @property
    def calls(self) -> int:
        """How many attempts are made on the model."""
        return len(self.causes)

    @property
    def causes(self) -> list[str]:
        """Of these attempts."""
        if self.repair is not None:
            return ["first", self.repair]
        return ["first", *["retry"] * (MAX_ATTEMPTS - 1 if self.retried else 0)]

    @property
    def again(self) -> str:
        """Whether the same model is called again, in a word."""
        return "once" if self.repair is not None else "yes" if self.retried else "no"


def error(name: str, kind: str, class_name: str, message: str, repair: str | None = None, **fault: Any) -> Row:
    """An error by what it says, or by its headers; `fault` may have a `code` and a `param` besides."""
    again = kind in {"rate_limit", "transient"}
    text = {"message": message, **{field: fault.pop(field) for field in ("code", "param") if field in fault}}
    given = {"status": int(name[:3]), "error": text} | fault
    return Row(name, kind, class_name, retried=again, counted=kind == "transient", fault=given, repair=repair)


def client(status: int, class_name: str) -> Row:
    return Row(str(status), "client", class_name, retried=False, counted=False, fault={"status": status})


def server(status: int, class_name: str) -> Row:
    return Row(str(status), "server", class_name, retried=True, counted=True, fault={"status": status})


def broken(name: str, kind: str, cost: Literal["nothing", "estimated", "billed"] = "estimated") -> Row:
    return Row(name, "server", "BrokenAnswerError", retried=True, counted=True, cost=cost, fault={"kind": kind})


def silent(name: str, kind: str, class_name: str, reason: str) -> Row:
    again, fault = kind == "server", {"kind": "no_content", "finish_reason": reason}
    return Row(name, kind, class_name, retried=again, counted=again, cost="billed", fault=fault)


def unreachable(name: str, class_name: str, endpoint: str) -> Row:
    return Row(name, "network", class_name, retried=True, counted=True, endpoint=endpoint)


ROWS = (
    client(400, "BadRequestError"),
    Row(
        "400, context overflow",
        "context_overflow",
        "ContextOverflowError",
        retried=False,
        counted=False,
        fault={"status": 400, "error": CONTEXT_OVERFLOW},
    ),
    Row(
        "400, orphaned tool calls",
        "orphan_tool_calls",
        "OrphanToolCallsError",
        retried=False,
        counted=False,
        fault={
            "status": 400,
            "error": {
                "message": "An assistant message with 'tool_calls' must be followed by tool messages responding to "
                "each 'tool_call_id'."
            },
        },
    ),
    error(
        "400, overflow by the output limit",
        "context_overflow",
        "ContextOverflowError",
        "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens (8142 in the messages, "
        "858 in the completion). Please reduce the length of the messages or completion.",
        "output_limit",
    ),
    error(
        "400, `max_tokens` not known",
        "client",
        "UnsupportedParameterError",
        "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.",
        "parameter",
        param="max_tokens",
    ),
    error(
        "400, `tool_use_failed`",
        "logic",
        "InvalidOutputError",
        "Failed to call a function. Please adjust your prompt. See 'failed_generation' for more details.",
        "self_correction",
        code="tool_use_failed",
    ),
    error(
        "400, account without credit",
        "quota",
        "QuotaExceededError",
        "Your credit balance is too low to access the Anthropic API. Please go to Plans & Billing to upgrade.",
    ),
    error("400, throttled", "rate_limit", "RateLimitError", "Too many requests, please wait before trying again."),
    error("400, `x-should-retry: true`", "transient", "BadRequestError", "no", headers={"x-should-retry": "true"}),
    client(401, "UnauthorizedError"),
    error("402", "quota", "QuotaExceededError", "Insufficient Balance"),
    client(403, "ForbiddenError"),
    client(404, "NotFoundError"),
    error("408", "transient", "RequestTimeoutError", "no"),
    error("409", "transient", "ConflictError", "no"),
    client(418, "ClientError"),
    client(422, "UnprocessableEntityError"),
    error("425", "transient", "TooEarlyError", "no"),
    Row(
        "429",
        "rate_limit",
        "RateLimitError",
        retried=True,
        counted=False,
        fault={"status": 429, "retry_after_s": 0.05},
    ),
    error("429, reset in over an hour", "quota", "QuotaExceededError", "no", retry_after_s=86_400),
    error(
        "429, quota by the day, week or month",
        "quota",
        "QuotaExceededError",
        "Rate limit reached on requests per day (RPD): Limit 200, Used 200. Please try again in 36s.",
    ),
    error("429, account without credit", "quota", "QuotaExceededError", "no", code="insufficient_quota"),
    error(
        "429, long context not in the plan",
        "context_overflow",
        "ContextOverflowError",
        "Extra usage is required for long context requests.",
    ),
    error("499", "transient", "ClientClosedRequestError", "no"),
    server(500, "ServerError"),
    Row(
        "500, `x-should-retry: false`",
        "server",
        "ServerError",
        retried=False,
        counted=True,
        fault={"status": 500, "headers": {"x-should-retry": "false"}},
    ),
    server(502, "ServiceUnavailableError"),
    server(503, "ServiceUnavailableError"),
    server(504, "GatewayTimeoutError"),
    server(529, "OverloadedError"),
    unreachable("connection refused", "ConnectionRefusedError", "refused"),
    Row(
        "connection reset",
        "network",
        "ConnectionResetError",
        retried=True,
        counted=True,
        cost="estimated",
        fault={"kind": "reset"},
    ),
    unreachable("unknown host", "DnsError", "unknown_host"),
    unreachable("TLS failure", "TlsError", "plain_port"),
    unreachable("no credential", "CredentialError", "no_credential"),
    Row("read timeout", "timeout", "TimeoutError", retried=True, counted=True, cost="estimated", fault={"hang_s": 60}),
    broken("empty body", "empty_body"),
    broken("malformed JSON", "malformed_json"),
    broken("200 with an error in it", "error_in_200", "nothing"),
    Row(
        "200 with a rate limit in it",
        "rate_limit",
        "RateLimitError",
        retried=True,
        counted=False,
        fault={
            "kind": "error_in_200",
            "error": {"type": "invalid_request_error", "message": "Too many requests, please slow down."},
        },
    ),
    broken("200 without choices", "no_choices", "billed"),
    broken("truncated body", "truncated"),
    Row(
        "body over 4 MB",
        "client",
        "AnswerTooLargeError",
        retried=False,
        counted=False,
        cost="estimated",
        fault={"answer": "x" * 4_300_000},
    ),
    silent("no text, `content_filter`", "client", "ContentFilteredError", "content_filter"),
    silent("no text, `length`", "client", "OutputLimitError", "length"),
    silent("no text, no tool call", "server", "EmptyAnswerError", "stop"),
)
