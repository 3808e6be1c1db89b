"""Operations of the HTTP API: each handler declares its own; routes, parsing and the OpenAPI document come from that.

A handler takes an `ApiRequest`, with the body of a POST or the query of a GET as its annotation says, and returns the
content of the response. One that takes a `Request` makes its own `Response`. A `RequestError` that it raises becomes an
error response, as does an outage of NATS, Redis or ClickHouse (503). Who may call it is decided before, by
`identity.rules.callers.scopes_for`, from its method and path.
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
from breakwater.jobs.contract.dead_letters import ReplayDeadLettersRequest
from breakwater.kernel.errors import UnavailableError
from breakwater.kernel.http.contract import OperatorRequest
from breakwater.kernel.http.parsing import A_REQUEST, MAX_BYTES, read_body, read_command, read_query
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
    """Its body, or of a GET its query."""
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

    def reason(self, what: str) -> str:
        """`reset by ops: deployed a fix`."""
        return f"{what} by {self.by}: {self.why}" if self.why else f"{what} by {self.by}"

    def log(self, event: str, **fields: object) -> None:
        """Logs the outcome of an action."""
        structlog.get_logger().info(event, by=self.by, key_id=self.caller.id, why=self.why or None, **fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation: a method on a path."""

    id: str
    method: Literal["GET", "POST", "DELETE"]
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
    method: Literal["GET", "POST", "DELETE"],
    path: str,
    *,
    tag: str,
    summary: str,
    result: str = "",
    results: Mapping[int, tuple[str, Any]] | None = None,
    **more: Any,
) -> Callable[[HandlerT], HandlerT]:
    """Declares the operation of a handler, whose name is the operation's id.

    Args:
        method: of HTTP.
        path: with its parameters in braces.
        tag: the heading in the documentation.
        summary: in a few words.
        result: meaning of the status 200, whose body has the type that the handler returns.
        results: by status, for a handler that makes its own responses.
        **more: further fields of the `Operation`.
    """

    def declare(handler: HandlerT) -> HandlerT:
        hints = get_type_hints(handler)
        returned = hints.pop("return")
        takes = next(iter(hints.values()))
        [form] = get_args(takes) if get_origin(takes) is ApiRequest else [Message]
        if form is not Message:
            more["body" if method == "POST" else "query"] = form
        _DECLARED[handler] = Operation(
            id=handler.__name__,
            method=method,
            path=path,
            tag=tag,
            summary=summary,
            results=results or {200: (result, returned)},
            makes_response=takes is Request,
            **more,
        )
        return handler

    return declare


def utc_now() -> datetime:
    """The time in whole milliseconds, as times are on the wire."""
    return time_from_ms(ms_from_time(datetime.now(UTC)))


def operations_of(handlers: type) -> Iterator[Operation]:
    """The operations that a class declares."""
    return (_DECLARED[one] for one in vars(handlers).values() if callable(one) and one in _DECLARED)


def routes_of(handlers: Iterable[object], redactor: Redactor, audit: AuditLog) -> list[Route]:
    """The routes of all operations of some handlers, in the order in which they are tried.

    Paths without parameters come first, in the handlers' order, as each try costs time: `alerts/undelivered` is not the
    incident `undelivered`. Of the others the longest do: a job's progress before the job, whose id may hold slashes.
    """
    found = [(one, getattr(room, one.id)) for room in handlers for one in operations_of(type(room))]
    found.sort(key=lambda one: ("{" in one[0].path, -one[0].path.count("/") if "{" in one[0].path else 0))
    return [
        _route(operation, handler if operation.makes_response else _endpoint(operation, handler, redactor, audit))
        for operation, handler in found
    ]


def _route(operation: Operation, respond: Endpoint) -> Route:
    # Ids of jobs and names of models may hold slashes.
    path = re.sub(r"\{(job_id|execution_id|model|plan_id|response_id)\}", r"{\1:path}", operation.path)
    kind = ProgressRoute if path.endswith(PROGRESS) else Route
    return kind(path, respond, methods=[operation.method])


def _endpoint(
    operation: Operation, handler: Callable[[ApiRequest[Any]], Awaitable[object]], redactor: Redactor, audit: AuditLog
) -> Endpoint:
    """Has a handler respond to requests. A POST is recorded in the audit log; signing in and out records itself."""
    acts = operation.method == "POST"

    async def respond(request: Request) -> Response:
        given = Message()
        if operation.body is not None:
            given = read_command(await read_body(request, MAX_BYTES, A_REQUEST), operation.body)
        elif operation.query is not None:
            given = read_query(request, operation.query)
        match given:
            case OperatorRequest(reason=reason) | ReplayDeadLettersRequest(why=reason):
                why = redactor.text(reason or "")
            case _:
                why = ""
        parsed = ApiRequest(given, request.path_params, caller_of(request), why, session_of(request))
        try:
            if acts and operation.tag != "keys":
                details = given.model_dump(mode="json", exclude={"reason", "why"}, exclude_defaults=True)
                async with audit.action(operation.id, actor_of(parsed.caller), details, why):
                    result = await handler(parsed)
            else:
                result = await handler(parsed)
        except (BusError, UnavailableError) as error:
            raise (not_done if acts else not_read)(error) from error
        body = result.encode() if isinstance(result, str) else to_json(result)
        if not operation.etag:
            return Response(body, media_type=operation.content_type)
        etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        headers = {"ETag": etag, "Cache-Control": "private, no-cache"}
        known = [one.strip().removeprefix("W/") for one in request.headers.get("if-none-match", "").split(",")]
        if etag in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=operation.content_type)

    return respond


class ProgressRoute(Route):
    """A route that ends in `/progress`, and takes only requests for progress."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Matches a request that is for this route."""
        if scope["type"] == "http" and not as_routed(scope).endswith(PROGRESS):
            return Match.NONE, {}
        return super().matches(scope)


def as_routed(scope: Scope) -> str:
    """The path, decoded, except for encoded slashes of the last name if the path seems to end in progress.

    `/api/v1/jobs/a/progress` asks for the progress of `a`, and `/api/v1/jobs/a%2Fprogress` for the job `a/progress`.
    Servers pass on the same path for both.
    """
    path: str = scope["path"]
    if not path.endswith(PROGRESS) or (raw := scope.get("raw_path")) is None:
        return path
    name = unquote(raw.decode("latin-1").rpartition("/")[2])
    return path if "/" not in name else path.removesuffix(name) + name.replace("/", "%2F")
