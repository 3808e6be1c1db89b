"""What a failed call means: its kind, whether trying again can help, and whether the breaker counts it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from breakwater.contracts.execution import ErrorInfo, ErrorKind
from breakwater.policy.delays import retry_after_s
from breakwater.policy.error_identity import error_identity
from breakwater.policy.user_message import user_message
from breakwater.policy.wordings import has_orphan_tool_calls, is_context_overflow, is_empty_account


@dataclass(frozen=True, slots=True)
class HttpFailure:
    """The provider answered with an error. `message`, `code` and `type` come from its body where it has them."""

    status: int
    message: str
    code: str | None = None
    type: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Names in lower case."""
    retry_delay_s: float | None = None
    """The wait that the body names."""


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


@dataclass(frozen=True, slots=True)
class ProgramFailure:
    """A program or a callable failed, or said that it could not answer. It names what happened itself.

    Attributes:
        class_name: such as BackendFailureError, or the class of the exception that a callable raised.
        message: what it said.
        status: the code that it answered with, where that is like an HTTP status.
        kind: `client` is never tried again and says nothing of the program's health; the others do.
    """

    class_name: str
    message: str
    status: int | None
    kind: Literal["client", "server", "timeout", "network"]


Failure = HttpFailure | TransportFailure | BrokenAnswer | ProgramFailure


@dataclass(frozen=True, slots=True)
class Classification:
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
            retry_after_s=self.retry_after_s,
            hash=error_identity(f"{self.class_name}: {self.message}"),
            user_message=None if self.retryable else user_message(self.kind, self.class_name, self.status_code),
        )


_CLIENT_CLASSES = {
    400: "BadRequestError",
    401: "UnauthorizedError",
    402: "PaymentRequiredError",
    403: "ForbiddenError",
    404: "NotFoundError",
    413: "RequestTooLargeError",
    422: "UnprocessableEntityError",
}
_SERVER_CLASSES = {
    500: "ServerError",
    502: "ServiceUnavailableError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
    529: "OverloadedError",
}
_MAY_BE_OF_THE_CONVERSATION = frozenset({400, 413, 422})


def classify(failure: Failure, now: datetime) -> Classification:
    """Decides what a failure means. The table of design section 5, row by row.

    Args:
        failure: what the provider room reported.
        now: to read delays that are given as a moment.
    """
    match failure:
        case TransportFailure(kind, class_name, message):
            return Classification(kind, class_name, message, None, retryable=True, counts_for_breaker=True)
        case BrokenAnswer(message):
            return Classification("server", "BrokenAnswerError", message, 200, retryable=True, counts_for_breaker=True)
        case ProgramFailure(class_name, message, status, kind):
            again = kind != "client"
            return Classification(kind, class_name, message, status, retryable=again, counts_for_breaker=again)
        case HttpFailure():
            return _classify_status(failure, now)


def _classify_status(failure: HttpFailure, now: datetime) -> Classification:
    status, message = failure.status, failure.message
    if status == 429 and is_empty_account(failure.code, failure.type):
        # No limit that resets: the account has no credit, and repeating the call only delays the next model.
        return Classification("client", "QuotaExceededError", message, status, False, False)
    if status == 429 or 500 <= status <= 599:
        wait = retry_after_s(failure.headers, now, failure.retry_delay_s)
        if status == 429:
            return Classification("rate_limit", "RateLimitError", message, status, True, True, wait)
        return Classification("server", _SERVER_CLASSES.get(status, "ServerError"), message, status, True, True, wait)
    if status in _MAY_BE_OF_THE_CONVERSATION:
        if is_context_overflow(failure.code, failure.type, message):
            return Classification("context_overflow", "ContextOverflowError", message, status, False, False)
        if status == 400 and has_orphan_tool_calls(message):
            return Classification("orphan_tool_calls", "OrphanToolCallsError", message, status, False, False)
    # An unknown status is handled as the caller's mistake: repeating what nobody understands helps nobody.
    return Classification("client", _CLIENT_CLASSES.get(status, "ClientError"), message, status, False, False)
