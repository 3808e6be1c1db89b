"""Ids of requests to the providers' APIs, which their responses name."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from breakwater.dialects.api import is_messages
from breakwater.identity.rules.callers import is_openai
from breakwater.kernel.ids import new_id

REQUEST_ID: ContextVar[str] = ContextVar("request_id")
"""The id of the current request, below `/v1`."""


@dataclass(frozen=True, slots=True)
class NameRequests:
    """ASGI middleware that gives each request to OpenAI's or Anthropic's API an id, in a header of its response."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on."""
        if scope["type"] != "http" or not is_openai(scope["path"]):
            await self.app(scope, receive, send)
            return
        request_id = new_id()
        REQUEST_ID.set(request_id)
        header = "request-id" if is_messages(scope["path"]) else "x-request-id"

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[header] = request_id
            await send(message)

        await self.app(scope, receive, send_with_id)
