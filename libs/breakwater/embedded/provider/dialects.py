"""The HTTP interfaces that the simulated provider has: their paths, their credentials, and who translates for each."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web

from breakwater.embedded.provider import anthropic, wire
from breakwater.embedded.provider.script import ErrorText, ToolCall
from breakwater.embedded.provider.wire import AnswerUsage, ChatRequest


class WriteCompletion(Protocol):
    """Writes a whole answer."""

    def __call__(
        self,
        *,
        completion_id: str,
        model: str,
        created: int,
        content: str | None,
        tool_calls: tuple[ToolCall, ...],
        finish_reason: str,
        usage: AnswerUsage | None,
        with_choices: bool = True,
    ) -> bytes:
        """The body. `with_choices` of False leaves out what the model said."""
        ...


@dataclass(frozen=True, slots=True)
class MissingHeader:
    """What a request must say beside its body, and how its absence is answered."""

    status: int
    error: ErrorText


@dataclass(frozen=True, slots=True)
class Dialect:
    """One interface.

    Attributes:
        read_request: of a body and, where the URL names it, the model. Raises RequestRefusedError.
        missing: what is missing beside the body.
        unknown_model: the error of a model that is not scripted.
        write_completion: the body of an answer.
        write_error: the body of an error.
        error_headers: of a status and the seconds to wait.
        id_header: carries the request's id.
        key_header: carries the API key; a bearer token is taken, too.
    """

    read_request: Callable[[bytes, str | None], ChatRequest]
    missing: Callable[[web.BaseRequest], MissingHeader | None]
    unknown_model: Callable[[str], ErrorText]
    write_completion: WriteCompletion
    write_error: Callable[[int, ErrorText | None], bytes]
    error_headers: Callable[[int, float | None], dict[str, str]]
    id_header: str = "x-request-id"
    key_header: str | None = None

    def key_of(self, headers: Mapping[str, str]) -> str | None:
        """The API key of a request."""
        if self.key_header is not None and self.key_header in headers:
            return headers[self.key_header]
        scheme, _, token = headers.get("Authorization", "").partition(" ")
        return token if scheme == "Bearer" else None


def _needs_nothing(_: web.BaseRequest) -> None:
    return None


def _needs_api_version(request: web.BaseRequest) -> MissingHeader | None:
    return None if request.query.get("api-version") else MissingHeader(404, ErrorText(message="Resource not found"))


def _needs_version_header(request: web.BaseRequest) -> MissingHeader | None:
    if "anthropic-version" in request.headers:
        return None
    return MissingHeader(400, ErrorText(message="anthropic-version: header is required"))


OPENAI = Dialect(
    wire.read_request,
    _needs_nothing,
    wire.unknown_model,
    wire.write_completion,
    wire.write_error,
    wire.error_headers,
)
AZURE = Dialect(
    wire.read_request,
    _needs_api_version,
    wire.unknown_model,
    wire.write_completion,
    wire.write_error,
    wire.error_headers,
    key_header="api-key",
)
ANTHROPIC = Dialect(
    anthropic.read_request,
    _needs_version_header,
    anthropic.unknown_model,
    anthropic.write_completion,
    anthropic.write_error,
    anthropic.error_headers,
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
