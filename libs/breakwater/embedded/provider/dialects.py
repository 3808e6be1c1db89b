"""The HTTP interfaces that the simulated provider has: their paths, their credentials, and who translates for each."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from aiohttp import web

from breakwater.embedded.provider import anthropic, wire
from breakwater.embedded.provider.behaviour import refuse
from breakwater.embedded.provider.script import ErrorText, Pace
from breakwater.embedded.provider.wire import ChatRequest, Decision, StreamEvent


@dataclass(frozen=True, slots=True)
class Dialect:
    """One interface; OpenAI's, but for what is given.

    Attributes:
        read_request: of a body and, where the URL names it, the model. Raises RequestRefusedError.
        missing: refuses a request for what it lacks beside its body; None if it lacks nothing.
        unknown_model: the error of a model that is not scripted.
        write_completion: the body of an answer of a model.
        write_stream: the same as the events of a stream.
        write_error: the body of an error.
        write_error_event: makes an event of it.
        error_headers: of a status and the seconds to wait.
        id_header: carries the request's id.
        key_header: carries the API key; a bearer token is taken, too.
    """

    read_request: Callable[[bytes, str | None], ChatRequest] = wire.read_request
    missing: Callable[[web.BaseRequest], Decision | None] = lambda _: None
    unknown_model: Callable[[str], ErrorText] = wire.unknown_model
    write_completion: Callable[[Decision, str], bytes] = wire.write_completion
    write_stream: Callable[[Decision, str, Pace], list[StreamEvent]] = wire.write_stream
    write_error: Callable[[int, ErrorText | None], bytes] = wire.write_error
    write_error_event: Callable[[bytes], bytes] = wire.write_error_event
    error_headers: Callable[[int, float | None], dict[str, str]] = wire.error_headers
    id_header: str = "x-request-id"
    key_header: str | None = None

    def key_of(self, headers: Mapping[str, str]) -> str | None:
        """The API key of a request."""
        if self.key_header is not None and self.key_header in headers:
            return headers[self.key_header]
        scheme, _, token = headers.get("Authorization", "").partition(" ")
        return token if scheme == "Bearer" else None


def _needs_api_version(request: web.BaseRequest) -> Decision | None:
    error = ErrorText(message="Resource not found")
    return None if request.query.get("api-version") else refuse(404, "invalid_request", error)


def _needs_version_header(request: web.BaseRequest) -> Decision | None:
    error = ErrorText(message="anthropic-version: header is required")
    return None if "anthropic-version" in request.headers else refuse(400, "invalid_request", error)


OPENAI = Dialect()
AZURE = Dialect(missing=_needs_api_version, key_header="api-key")
ANTHROPIC = Dialect(
    read_request=anthropic.read_request,
    missing=_needs_version_header,
    unknown_model=anthropic.unknown_model,
    write_completion=anthropic.write_completion,
    write_stream=anthropic.write_stream,
    write_error=anthropic.write_error,
    write_error_event=anthropic.write_error_event,
    error_headers=anthropic.error_headers,
    id_header="request-id",
    key_header="x-api-key",
)
_DEPLOYMENT = re.compile(r"/openai/deployments/(.+)/chat/completions")


def find(path: str) -> tuple[Dialect, str | None] | None:
    """The interface that answers a POST to a path, and the model where the path names it."""
    if path == "/v1/chat/completions":
        return OPENAI, None
    if path == "/v1/messages":
        return ANTHROPIC, None
    deployment = _DEPLOYMENT.fullmatch(path)
    return (AZURE, deployment[1]) if deployment else None
