"""Operations of the HTTP API: each handler declares its own; routes, parsing and the OpenAPI document come from that.

A handler takes an `ApiRequest` and returns the content of the response. The type argument of its `ApiRequest` is the
model of the body of a POST or PUT, or of the query of a GET or DELETE. A handler that takes a Starlette `Request` makes
its own `Response`. A `RequestError` becomes an error response, as does an outage of NATS, Redis or ClickHouse (503).
Before a handler runs, `identity.rules.callers.scopes_for` has decided from its method and path who may call it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import unquote

import structlog
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from breakwater.identity.audit import AuditLog, actor_of
from breakwater.identity.auth import caller_of, session_of
from breakwater.identity.rules.callers import Caller
from breakwater.kernel.errors import UnavailableError
from breakwater.kernel.http.bodies import A_REQUEST, MAX_BYTES, read_body
from breakwater.kernel.http.contract import ActionRequest
from breakwater.kernel.http.parsing import read_command, read_query
from breakwater.kernel.http.problems import not_done, not_read
from breakwater.kernel.nats.errors import BusError
from breakwater.kernel.types import Message, ms_from_time, time_from_ms
from breakwater.redaction.rules.redact import Redactor

NATS_UNAVAILABLE = "NATS is unavailable (`unavailable`)."
CLICKHOUSE_UNAVAILABLE = "ClickHouse is unavailable (`unavailable`); the message says why."
REDIS_UNAVAILABLE = "Redis is unavailable (`unavailable`)."
TOO_MANY = "The API key has reached its limit of concurrent requests in this process (`too_many_requests`)."
PERHAPS_DONE = "It may still have been done; repeating the request is safe."

PROGRESS = "/progress"

InputT = TypeVar("InputT", bound=Message)
HandlerT = TypeVar("HandlerT", bound=Callable[..., Any])
Endpoint = Callable[[Request], Awaitable[Response] | Response]


@dataclass(frozen=True, slots=True)
class ApiRequest(Generic[InputT]):
    """A request to the API that its caller may send, parsed."""

    input: InputT
    """Its body, or of a GET or DELETE its query."""
    path: Mapping[str, str]
    """The parameters of its path."""
    caller: Caller
    why: str
    """The reason that was given, redacted; empty without one."""
    session: str | None = None
    """The token of its session; None if it came with a key."""

    @property
    def by(self) -> str:
        """The name under which an action is recorded."""
        return self.caller.name

    def reason(self, action: str) -> str:
        """Returns an action with its actor and reason, such as `reset by ops: deployed a fix`."""
        return f"{action} by {self.by}: {self.why}" if self.why else f"{action} by {self.by}"

    def log(self, event: str, **fields: object) -> None:
        """Logs the outcome of an action."""
        structlog.get_logger().info(event, by=self.by, key_id=self.caller.id, why=self.why or None, **fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation: a method on a path."""

    id: str
    method: Literal["GET", "POST", "PUT", "DELETE"]
    path: str
    tag: str
    summary: str
    description: str = ""
    query: type[Message] | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Headers that the request may have, and their meaning."""
    body: type[Message] | None = None
    body_type: str = "application/json"
    results: Mapping[int, tuple[str, Any]]
    """By status below 400: its meaning, and the type of the body."""
    content_type: str = "application/json"
    errors: Mapping[int, str] = field(default_factory=dict[int, str])
    """Meaning by status; errors that every operation of its kind has are added."""
    etag: bool = False
    """A caller that has the body already gets 304 without it."""
    makes_response: bool = False
    """The handler takes a `Request` and returns a `Response`."""


_DECLARED: dict[object, Operation] = {}


def operation(
    method: Literal["GET", "POST", "PUT", "DELETE"],
    path: str,
    *,
    tag: str,
    summary: str,
    result: str = "",
    results: Mapping[int, tuple[str, Any]] | None = None,
    **fields: Any,
) -> Callable[[HandlerT], HandlerT]:
    """Declares the operation of a handler, whose name is the operation's id.

    Args:
        method: the HTTP method.
        path: the path, with its parameters in braces.
        tag: the heading in the documentation.
        summary: the operation in a few words.
        result: the meaning of the status 200, whose body has the type that the handler returns.
        results: by status, the meaning and the type of the body, for a handler that makes its own responses.
        **fields: further fields of the `Operation`.
    """

    def declare(handler: HandlerT) -> HandlerT:
        hints = get_type_hints(handler)
        return_type = hints.pop("return")
        request_type = next(iter(hints.values()))
        input_fields = _input_fields(request_type, method)
        _DECLARED[handler] = Operation(
            id=handler.__name__,
            method=method,
            path=path,
            tag=tag,
            summary=summary,
            results=results or {200: (result, return_type)},
            makes_response=request_type is Request,
            **{**fields, **input_fields},
        )
        return handler

    return declare


def _input_fields(request_type: Any, method: str) -> dict[str, Any]:
    """Returns the operation's `body` or `query`, by the type argument of its `ApiRequest`; neither for `Message`."""
    if get_origin(request_type) is not ApiRequest:
        return {}
    [model] = get_args(request_type)
    if model is Message:
        return {}
    return {"body" if method in ("POST", "PUT") else "query": model}


def utc_now() -> datetime:
    """The time in whole milliseconds, as times are on the wire."""
    return time_from_ms(ms_from_time(datetime.now(UTC)))


def operations_of(handlers: type) -> Iterator[Operation]:
    """Yields the operations that a class declares."""
    return (_DECLARED[member] for member in vars(handlers).values() if callable(member) and member in _DECLARED)


def routes_of(handlers: Iterable[object], redactor: Redactor, audit: AuditLog) -> list[Route]:
    """Returns the routes of all operations of some handlers, in the order in which they are tried.

    Paths without parameters come first, so that `alerts/undelivered` is not the incident `undelivered`. They keep the
    handlers' order, as each try costs time. Then come paths with parameters, the longest first, so that a job's
    progress comes before the job, whose id may contain slashes.
    """
    bound = [(operation, getattr(room, operation.id)) for room in handlers for operation in operations_of(type(room))]
    bound.sort(key=lambda pair: _routing_order(pair[0].path))
    return [
        _route(operation, handler if operation.makes_response else _endpoint(operation, handler, redactor, audit))
        for operation, handler in bound
    ]


def _routing_order(path: str) -> tuple[bool, int]:
    has_parameters = "{" in path
    return has_parameters, -path.count("/") if has_parameters else 0


def _route(operation: Operation, respond: Endpoint) -> Route:
    # Ids of jobs and names of models may contain slashes.
    may_have_slashes = r"\{(job_id|execution_id|model|plan_id|response_id|run_id|key|limit_id)\}"
    path = re.sub(may_have_slashes, r"{\1:path}", operation.path)
    kind = ProgressRoute if path.endswith(PROGRESS) else Route
    return kind(path, respond, methods=[operation.method])


def _endpoint(
    operation: Operation, handler: Callable[[ApiRequest[Any]], Awaitable[object]], redactor: Redactor, audit: AuditLog
) -> Endpoint:
    """Returns an endpoint that parses a request, runs its handler, and writes the response.

    Each action is recorded in the audit log, except for signing in and out, whose handlers record it themselves.
    """
    acts = operation.method != "GET"
    is_audited = acts and operation.tag != "sessions"

    async def respond(request: Request) -> Response:
        request_input = await _read_input(operation, request)
        reason = request_input.stated_reason if isinstance(request_input, ActionRequest) else None
        why = redactor.text(reason) if reason else ""
        parsed = ApiRequest(request_input, request.path_params, caller_of(request), why, session_of(request))
        try:
            if is_audited:
                fields = request_input.model_dump(mode="json", exclude={"reason", "why"}, exclude_defaults=True)
                details = {**parsed.path, **fields}
                async with audit.action(operation.id, actor_of(parsed.caller), details, why):
                    result = await handler(parsed)
            else:
                result = await handler(parsed)
        except (BusError, UnavailableError) as error:
            raise (not_done if acts else not_read)(error) from error
        body = result.encode() if isinstance(result, str) else to_json(result)
        if operation.etag:
            return _tagged_response(request, body, operation.content_type)
        return Response(body, media_type=operation.content_type)

    return respond


async def _read_input(operation: Operation, request: Request) -> Message:
    """Returns the body or the query of a request, parsed. Raises RequestError: it is invalid."""
    if operation.body is not None:
        return read_command(await read_body(request, MAX_BYTES, A_REQUEST), operation.body)
    if operation.query is not None:
        return read_query(request, operation.query)
    return Message()


def _tagged_response(request: Request, body: bytes, content_type: str) -> Response:
    """Returns a response with an ETag: 304 without the body if the caller has it already."""
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {"ETag": etag, "Cache-Control": "private, no-cache"}
    listed_etags = request.headers.get("if-none-match", "").split(",")
    cached_etags = {listed_etag.strip().removeprefix("W/") for listed_etag in listed_etags}
    if etag in cached_etags or "*" in cached_etags:
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type=content_type)


class ProgressRoute(Route):
    """A route that ends in `/progress` and matches only requests for progress."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Matches a request that is for this route."""
        if scope["type"] == "http" and not as_routed(scope).endswith(PROGRESS):
            return Match.NONE, {}
        return super().matches(scope)


def as_routed(scope: Scope) -> str:
    """Returns the decoded path that routes are matched against.

    `/api/v1/jobs/a/progress` asks for the progress of `a`, and `/api/v1/jobs/a%2Fprogress` for the job `a/progress`,
    but servers pass on the same decoded path for both. So slashes in the last name of a path that ends in `/progress`
    stay encoded.
    """
    path: str = scope["path"]
    raw_path: bytes | None = scope.get("raw_path")
    if raw_path is None or not path.endswith(PROGRESS):
        return path
    name = unquote(raw_path.decode("latin-1").rpartition("/")[2])
    return path if "/" not in name else path.removesuffix(name) + name.replace("/", "%2F")
