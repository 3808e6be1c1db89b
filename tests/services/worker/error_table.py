"""The failures that a provider can give, and what must come of each: the table of docs/failures.md, row by row."""

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
        fault: what the simulated provider does; None where it is never reached.
        endpoint: where the call goes instead: `refused`, `unknown_host` or `plain_port`.
    """

    name: str
    kind: str
    class_name: str
    retried: bool
    counted: bool
    cost: Literal["nothing", "estimated", "billed"] = "nothing"
    fault: Mapping[str, Any] = field(default_factory=dict[str, Any])
    endpoint: str | None = None

    @property
    def calls(self) -> int:
        """How many attempts are made on the model."""
        return MAX_ATTEMPTS if self.retried else 1


def client(status: int, class_name: str) -> Row:
    return Row(str(status), "client", class_name, retried=False, counted=False, fault={"status": status})


def server(status: int, class_name: str) -> Row:
    return Row(str(status), "server", class_name, retried=True, counted=True, fault={"status": status})


def broken(name: str, kind: str, cost: Literal["estimated", "billed"] = "estimated") -> Row:
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
    client(401, "UnauthorizedError"),
    client(402, "PaymentRequiredError"),
    client(403, "ForbiddenError"),
    client(404, "NotFoundError"),
    client(418, "ClientError"),
    client(422, "UnprocessableEntityError"),
    Row(
        "429",
        "rate_limit",
        "RateLimitError",
        retried=True,
        counted=True,
        fault={"status": 429, "retry_after_s": 0.05},
    ),
    server(500, "ServerError"),
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
    Row("read timeout", "timeout", "TimeoutError", retried=True, counted=True, cost="estimated", fault={"hang_s": 60}),
    broken("empty body", "empty_body"),
    broken("malformed JSON", "malformed_json"),
    broken("200 with an error in it", "error_in_200"),
    broken("200 without choices", "no_choices", "billed"),
    broken("truncated body", "truncated"),
    silent("no text, `content_filter`", "client", "ContentFilteredError", "content_filter"),
    silent("no text, `length`", "client", "OutputLimitError", "length"),
    silent("no text, no tool call", "server", "EmptyAnswerError", "stop"),
)
