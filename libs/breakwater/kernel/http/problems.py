"""Error responses of the HTTP API."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress

import orjson
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.validation import FieldError

LONGEST_RETRY_S = 60.0
"""The wait from which on no SDK is to retry by itself: some would not wait, and others block their program for days."""

_RETRIED_STATUSES = frozenset({409, 429, 503})
"""Statuses that SDKs retry after a pause of their own, unless they are told otherwise."""


def retry_headers(status: int, wait_s: float | None, *, may_retry: bool = True) -> dict[str, str]:
    """Returns the headers that tell a client when to repeat a request, or that its SDK must not do so by itself.

    `Retry-After` has whole seconds, as clients fail at a fraction; `retry-after-ms`, which SDKs prefer, has the wait to
    the tenth of a second. Both are rounded up, as a request that comes too early is refused again.

    Args:
        status: the status of the response.
        wait_s: the seconds until the request may succeed; None if unknown, or if waiting does not help.
        may_retry: False if repeating the request does not help, or is up to whoever reads the error.
    """
    headers: dict[str, str] = {}
    is_soon = False
    if wait_s is not None:
        tenths = max(1, math.ceil(round(wait_s * 10, 3)))
        headers = {"Retry-After": str(math.ceil(tenths / 10)), "retry-after-ms": str(tenths * 100)}
        is_soon = tenths < LONGEST_RETRY_S * 10
    if not may_retry or (status in _RETRIED_STATUSES and not is_soon):
        headers["x-should-retry"] = "false"
    return headers


class RequestError(BreakwaterError):
    """A response with a status of 400 or above, raised from wherever the problem is found."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        details: Iterable[FieldError] = (),
        headers: Mapping[str, str] | None = None,
        *,
        retry_after_s: float | None = None,
        may_retry: bool = True,
    ) -> None:
        """Builds the response.

        Args:
            status: its status.
            code: a stable code for programs.
            message: the message for people.
            details: the fields at fault.
            headers: further headers.
            retry_after_s: the seconds until the same request may succeed; None if unknown, or if waiting does not help.
            may_retry: False if repeating the request does not help, or is up to whoever reads the error.
        """
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.details = tuple(details)
        self.headers = {**(headers or {}), **retry_headers(status, retry_after_s, may_retry=may_retry)}
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
        return ErrorResponse(orjson.dumps(body), self.status, self.headers, "application/json")


BODY_IS_READ = "breakwater.body_is_read"
"""The entry of a request's scope that says that nothing more of its body is awaited."""

DROPPED_BYTES = 64_000_000
DROPPED_S = 5.0
"""The limits of what is read and dropped of a body after the response."""


class ErrorResponse(Response):
    """A response that may precede the body of its request, such as one that is too large.

    A client that did not ask first (`Expect`) reads no response before it has sent its body. If the server closed the
    connection meanwhile, the client would get a reset instead of the response. So the rest of the body is read and
    dropped, within limits, before the connection closes. uvicorn does that itself where the connection stays open.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response."""
        if not self._precedes_body(scope):
            await super().__call__(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(DROPPED_S):
                await _drop_body(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _precedes_body(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        closes = scope["http_version"] == "1.0" or "close" in (
            headers.get("connection", "").lower(),
            self.headers.get("connection", "").lower(),
        )
        has_body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
        return closes and has_body and "expect" not in headers and not scope.get(BODY_IS_READ)


async def _drop_body(receive: Receive) -> None:
    dropped = 0
    while dropped <= DROPPED_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return
        dropped += len(message.get("body", b""))


def unauthorized_error(message: str, *, error: str | None = None) -> RequestError:
    """Returns 401. `error` is the code of RFC 6750 for a token that was sent."""
    code = "" if error is None else f', error="{error}"'
    return RequestError(401, "unauthorized", message, headers={"WWW-Authenticate": f'Bearer realm="breakwater"{code}'})


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
    return RequestError(503, code, message, retry_after_s=1.0)


def not_read(error: Exception) -> RequestError:
    """Returns 503 for state that can't be read, because NATS, Redis or ClickHouse does not respond."""
    return unavailable("unavailable", f"the state cannot be read now: {error}")


def not_done(error: Exception) -> RequestError:
    """Returns 503 for an action that may not have been carried out. Repeating the request shows it."""
    return unavailable("unavailable", f"this can't be done now: {error}; retry")
