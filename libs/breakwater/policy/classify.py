"""What a failed call means: its kind, whether trying again can help, and whether the breaker counts it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Literal

from breakwater.contracts.execution import ErrorInfo, ErrorKind


@dataclass(frozen=True, slots=True)
class HttpFailure:
    """The provider answered with an error. `message`, `code` and `type` come from its body where it has them."""

    status: int
    message: str
    code: str | None = None
    type: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Names in lower case."""


@dataclass(frozen=True, slots=True)
class TransportFailure:
    """No HTTP answer came."""

    kind: Literal["timeout", "network"]
    class_name: str
    message: str


@dataclass(frozen=True, slots=True)
class BrokenAnswer:
    """A 200 that can't be used: no JSON, cut short, no choices, or an error in disguise."""

    message: str


Failure = HttpFailure | TransportFailure | BrokenAnswer


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a failure means for the job and for the breaker."""

    kind: ErrorKind
    class_name: str
    message: str
    status_code: int | None
    retryable: bool
    counts_for_breaker: bool
    retry_after_s: float | None = None

    def error_info(self) -> ErrorInfo:
        """The verdict as it stands in records."""
        return ErrorInfo(
            kind=self.kind,
            class_=self.class_name,
            message=self.message,
            status_code=self.status_code,
            retryable=self.retryable,
            hash=error_hash(self.message),
            user_message=None if self.retryable else user_message(self.class_name, self.status_code),
        )


_CLIENT_CLASSES = {
    400: "BadRequestError",
    401: "UnauthorizedError",
    402: "PaymentRequiredError",
    403: "ForbiddenError",
    404: "NotFoundError",
    422: "UnprocessableEntityError",
}
_SERVER_CLASSES = {
    500: "ServerError",
    502: "ServiceUnavailableError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
    529: "OverloadedError",
}
_ADVICE = {
    "UnauthorizedError": "Please check your API credentials.",
    "PaymentRequiredError": "Please check your account billing status.",
    "ForbiddenError": "You may not have permission to access this resource.",
    "NotFoundError": "The model or resource does not exist or is not available to you.",
    "BadRequestError": "The request format may be invalid.",
    "UnprocessableEntityError": "A parameter's value may be invalid.",
    "ContextOverflowError": "The conversation is too long for this model; please shorten it.",
}
_CONTEXT_OVERFLOW = re.compile(
    r"context[_ ](length|window)|maximum context|prompt is too long|too many (input )?tokens|input token count", re.I
)


def classify(failure: Failure, now: datetime) -> Verdict:
    """Decides what a failure means. The table of design section 5, row by row.

    Args:
        failure: what the provider room reported.
        now: to read a `Retry-After` that is a date.
    """
    match failure:
        case TransportFailure(kind, class_name, message):
            return Verdict(kind, class_name, message, None, retryable=True, counts_for_breaker=True)
        case BrokenAnswer(message):
            return Verdict("server", "BrokenAnswerError", message, 200, retryable=True, counts_for_breaker=True)
        case HttpFailure(status=429):
            wait = retry_after_s(failure.headers, now)
            return Verdict("rate_limit", "RateLimitError", failure.message, 429, True, True, wait)
        case HttpFailure(status=status) if status >= 500:
            wait = retry_after_s(failure.headers, now)
            name = _SERVER_CLASSES.get(status, "ServerError")
            return Verdict("server", name, failure.message, status, True, True, wait)
        case HttpFailure(status=400) if _is_context_overflow(failure):
            return Verdict("context_overflow", "ContextOverflowError", failure.message, 400, False, False)
        case HttpFailure(status=status):
            # An unknown status is handled as the caller's mistake: repeating what nobody understands helps nobody.
            name = _CLIENT_CLASSES.get(status, "ClientError")
            return Verdict("client", name, failure.message, status, False, False)


def _is_context_overflow(failure: HttpFailure) -> bool:
    return failure.code == "context_length_exceeded" or bool(_CONTEXT_OVERFLOW.search(failure.message))


def retry_after_s(headers: Mapping[str, str], now: datetime) -> float | None:
    """Seconds to wait as `Retry-After` says, given in seconds or as an HTTP date; None where absent or unreadable."""
    value = headers.get("retry-after", "").strip()
    if not value:
        return None
    if re.fullmatch(r"\d+(\.\d+)?", value):
        return float(value)
    try:
        moment = parsedate_to_datetime(value)
    except ValueError:
        return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return max(0.0, (moment - now).total_seconds())


def user_message(class_name: str, status_code: int | None) -> str:
    """What a parent agent or an end user may read: type, status and advice; never the provider's own text."""
    status = f"**Status Code:** {status_code}\n" if status_code else ""
    advice = _ADVICE.get(class_name, "Please review the error and try again.")
    return (
        f"I could not complete this request.\n\n**Error Type:** {class_name.removesuffix('Error')}\n{status}\n"
        f"It cannot be recovered automatically. {advice}"
    )


_STACK_FRAME = re.compile(r"\bat\s+[^\s(]+\s*\([^)]*:\d+(:\d+)?\)|\bat\s+\S+:\d+:\d+")
_HEX = re.compile(r"0x[0-9a-f]+", re.I)
_DIGITS = re.compile(r"\d+")


def error_hash(message: str) -> str:
    """The identity of an error: 8 hex digits that stay the same when only numbers, addresses or frames differ.

    Source: seed 002. Frames and hex go before digits, which would otherwise eat parts of them.
    """
    text = _STACK_FRAME.sub("STACK", message)
    text = _HEX.sub("HEX", text)
    text = _DIGITS.sub("N", text)
    normalised = text.lower().strip()[:500]
    return hashlib.md5(normalised.encode(), usedforsecurity=False).hexdigest()[:8]
