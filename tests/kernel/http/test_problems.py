"""Error responses that precede the body of their request, and those that say when to repeat it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from breakwater.kernel.http import problems
from breakwater.kernel.http.problems import BODY_IS_READ, DROPPED_BYTES, RequestError, retry_headers
from tests.tables import each_row

PIECE = 1_000_000
Receive = Callable[[], Awaitable[dict[str, Any]]]


class Client:
    """A client that sends pieces of a body without end, or nothing."""

    def __init__(self, *, is_silent: bool = False) -> None:
        self.sent = 0
        self.got: list[dict[str, Any]] = []
        self._is_silent = is_silent

    async def receive(self) -> dict[str, Any]:
        if self._is_silent:
            await asyncio.Event().wait()
        self.sent += PIECE
        return {"type": "http.request", "body": bytes(PIECE), "more_body": True}

    async def send(self, message: Any) -> None:
        self.got.append(message)


async def respond(client: Client, headers: dict[str, str], *, http_version: str = "1.1", is_read: bool = False) -> None:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope: dict[str, Any] = {"type": "http", "method": "POST", "http_version": http_version, "headers": raw}
    scope[BODY_IS_READ] = is_read
    await RequestError(413, "body_too_large", "too large").response()(scope, client.receive, client.send)
    assert [message["type"] for message in client.got][:2] == ["http.response.start", "http.response.body"]
    assert b"too large" in client.got[1]["body"]
    assert not client.got[-1].get("more_body", False)


async def test_the_rest_of_a_body_is_dropped_within_a_limit_of_bytes() -> None:
    client = Client()
    await respond(client, {"connection": "close", "content-length": "99000000000"})
    assert DROPPED_BYTES < client.sent <= DROPPED_BYTES + PIECE


async def test_the_rest_of_a_body_is_dropped_within_a_limit_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems, "DROPPED_S", 0.05)
    await asyncio.wait_for(respond(Client(is_silent=True), {"connection": "close", "content-length": "9"}), 30)


@each_row(
    ("headers", "http_version", "is_read", "dropped"),
    [
        ({"connection": "close", "transfer-encoding": "chunked"}, "1.1", False, True),
        ({"content-length": "9"}, "1.0", False, True),
        ({"content-length": "9"}, "1.1", False, False),  # the connection stays open, and uvicorn drops it
        ({"connection": "close"}, "1.1", False, False),
        ({"connection": "close", "content-length": "0"}, "1.1", False, False),
        ({"connection": "close", "content-length": "9"}, "1.1", True, False),
        ({"connection": "close", "content-length": "9", "expect": "100-continue"}, "1.1", False, False),
    ],
)
async def test_nothing_is_awaited_that_does_not_come(
    headers: dict[str, str], http_version: str, is_read: bool, dropped: bool
) -> None:
    client = Client()
    await respond(client, headers, http_version=http_version, is_read=is_read)
    assert (client.sent > 0) is dropped


NEVER = {"x-should-retry": "false"}


@each_row(
    ("status", "wait_s", "may_retry", "headers"),
    [
        # Whole seconds for all clients, tenths for SDKs, and never too early.
        (429, 2.31, True, {"Retry-After": "3", "retry-after-ms": "2400"}),
        (429, 0.3, True, {"Retry-After": "1", "retry-after-ms": "300"}),
        (429, 0.0, True, {"Retry-After": "1", "retry-after-ms": "100"}),
        (503, 59.85, True, {"Retry-After": "60", "retry-after-ms": "59900"}),
        # Anthropic's SDK would block its program until then, and others would retry soon.
        (429, 59.95, True, {"Retry-After": "60", "retry-after-ms": "60000", **NEVER}),
        (429, 60.0, True, {"Retry-After": "60", "retry-after-ms": "60000", **NEVER}),
        (429, 86_400.0, True, {"Retry-After": "86400", "retry-after-ms": "86400000", **NEVER}),
        # Waiting does not help.
        (429, None, True, NEVER),
        (503, None, True, NEVER),
        (409, None, True, NEVER),
        (429, 5.0, False, {"Retry-After": "5", "retry-after-ms": "5000", **NEVER}),
        (502, None, False, NEVER),
        # These are up to the SDK.
        (400, None, True, {}),
        (408, None, True, {}),
    ],
)
def test_a_client_is_told_when_to_repeat_a_request_or_that_it_must_not(
    status: int,
    wait_s: float | None,
    may_retry: bool,
    headers: dict[str, str],
) -> None:
    assert retry_headers(status, wait_s, may_retry=may_retry) == headers
    assert RequestError(status, "c", "m", retry_after_s=wait_s, may_retry=may_retry).headers == headers
