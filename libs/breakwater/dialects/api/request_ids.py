"""Ids of requests to the providers' APIs, which their responses name."""

from __future__ import annotations

from contextvars import ContextVar

from breakwater.dialects.api import is_messages
from breakwater.kernel.ids import new_id

REQUEST_ID: ContextVar[str] = ContextVar("request_id")
"""The id of the current request, below `/v1`."""


def name_request(path: str) -> tuple[bytes, bytes]:
    """Gives the current request to OpenAI's or Anthropic's API an id. Returns the header of its response."""
    request_id = new_id()
    REQUEST_ID.set(request_id)
    return b"request-id" if is_messages(path) else b"x-request-id", request_id.encode()
