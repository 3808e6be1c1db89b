"""A response that is server-sent events: its headers, its parts, and how long a client is waited for."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import Response
from starlette.types import Send

KEEP_ALIVE_S = 15.0
"""Proxies close what is silent for a minute."""

SEND_TIMEOUT_S = 60.0
"""For a client to take anything at all."""

_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class EventStream(Response):
    """The headers of an event stream, whose length nobody knows. What it sends is its subclass's."""

    def __init__(self, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(headers={**_HEADERS, **(headers or {})})
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]

    async def begin(self, send: Send) -> None:
        """Sends the status and the headers."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})


async def send_part(send: Send, data: bytes, *, more: bool = True) -> None:
    """Sends a part of the body. Waits for a client that is slow, for as long as the caller's timeout lets it."""
    await send({"type": "http.response.body", "body": data, "more_body": more})
