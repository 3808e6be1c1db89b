"""From the table of operations to routes: requests are parsed, handlers called, and their results written.

A handler takes an `ApiRequest` and returns what the response holds. What it raises becomes an error response: a
`Problem` as it is, an outage of NATS, Redis or ClickHouse as 503.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import unquote

import structlog
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from breakwater.bus.errors import BusError
from breakwater.contracts.access import KeyDetails
from breakwater.contracts.dead_letters import ReplayDeadLettersRequest
from breakwater.contracts.http import OperatorRequest
from breakwater.contracts.types import Event, Message
from breakwater.errors import Unavailable
from breakwater.policy.callers import Caller
from breakwater.policy.redact import Redactor
from services.request.audit import Actor, AuditLog
from services.request.auth import caller_of, session_of
from services.request.operations import Operation
from services.request.parsing import A_REQUEST, read_body, read_command, read_query
from services.request.problems import not_done, not_read

MAX_BYTES = 16_384
"""Of a body that is not a job."""

PROGRESS = "/progress"

Form = TypeVar("Form", bound=Message)


@dataclass(frozen=True, slots=True)
class ApiRequest(Generic[Form]):
    """A request to the API that its caller may send, parsed."""

    form: Form
    """Its body, or of a GET its query."""
    path: Mapping[str, str]
    """The parameters of its path."""
    caller: Caller
    why: str
    """The reason that was given, redacted; empty where none was."""
    session: str | None = None
    """The token of the session that it belongs to; None where it came with a key."""

    @property
    def by(self) -> str:
        """Under which name an action is recorded."""
        return self.caller.name

    def reason(self, what: str) -> str:
        """`reset by ops: deployed a fix`."""
        return f"{what} by {self.by}: {self.why}" if self.why else f"{what} by {self.by}"

    def log(self, event: str, **fields: object) -> None:
        """Logs what came of an action."""
        structlog.get_logger().info(event, by=self.by, key_id=self.caller.id, why=self.why or None, **fields)


Handler = Callable[[ApiRequest[Any]], Awaitable[Event | Sequence[Event] | str]]
"""A text is the body as it is; all else becomes JSON."""
Endpoint = Callable[[Request], Awaitable[Response] | Response]


def endpoint(operation: Operation, handler: Handler, redactor: Redactor, audit: AuditLog) -> Endpoint:
    """Has a handler respond to the requests of an operation. What a POST does is recorded in the audit log.

    Signing in and out records itself.
    """

    async def respond(request: Request) -> Response:
        form = await _form(operation, request)
        why = redactor.text(_reason_of(form) or "")
        asked = ApiRequest(form, request.path_params, caller_of(request), why, session_of(request))
        try:
            if operation.method == "POST" and operation.tag != "keys":
                details = form.model_dump(mode="json", exclude={"reason", "why"}, exclude_defaults=True)
                async with audit.action(operation.id, actor_of(asked.caller), details, why):
                    result = await handler(asked)
            else:
                result = await handler(asked)
        except (BusError, Unavailable) as error:
            raise (not_done if operation.method == "POST" else not_read)(error) from error
        body = result.encode() if isinstance(result, str) else to_json(result)
        headers = {} if not operation.etag else {"ETag": _etag(body), "Cache-Control": "private, no-cache"}
        if operation.etag and _has(request, headers["ETag"]):
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=operation.content_type)

    return respond


def actor_of(caller: Caller) -> Actor:
    """Who acts, in the audit log."""
    return Actor(caller.name, caller.kind, caller.id)


def _etag(body: bytes) -> str:
    return f'"{hashlib.sha256(body).hexdigest()[:32]}"'


def _has(request: Request, etag: str) -> bool:
    """Whether the caller names the body that it has, and it is this one."""
    named = [one.strip().removeprefix("W/") for one in request.headers.get("if-none-match", "").split(",")]
    return etag in named or "*" in named


async def show_key(asked: ApiRequest[Message]) -> KeyDetails:
    """The key that the request was sent with, or the person."""
    return KeyDetails.model_validate(asdict(asked.caller))


def route(operation: Operation, respond: Endpoint) -> Route:
    """The route of an operation."""
    # Ids of jobs and names of models may hold slashes.
    path = re.sub(r"\{(job_id|execution_id|model|plan_id)\}", r"{\1:path}", operation.path)
    kind = ProgressRoute if path.endswith(PROGRESS) else Route
    return kind(path, respond, methods=[operation.method])


class ProgressRoute(Route):
    """A route that ends in `/progress`, and takes only what asks for progress."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Whether a request is for this route."""
        if scope["type"] == "http" and not as_routed(scope).endswith(PROGRESS):
            return Match.NONE, {}
        return super().matches(scope)


def as_routed(scope: Scope) -> str:
    """The path, decoded, but for a slash of the last name where it came encoded and the path seems to end in progress.

    `/api/v1/jobs/a/progress` asks for the progress of `a`, and `/api/v1/jobs/a%2Fprogress` for the job `a/progress`.
    What servers pass on as the path is the same for both.
    """
    path: str = scope["path"]
    if not path.endswith(PROGRESS) or (raw := scope.get("raw_path")) is None:
        return path
    name = unquote(raw.decode("latin-1").rpartition("/")[2])
    return path if "/" not in name else path.removesuffix(name) + name.replace("/", "%2F")


async def _form(operation: Operation, request: Request) -> Message:
    if operation.body is not None:
        body = await read_body(request, MAX_BYTES, A_REQUEST)
        return read_command(body, operation.body)
    return Message() if operation.query is None else read_query(request, operation.query)


def _reason_of(form: Message) -> str | None:
    match form:
        case OperatorRequest():
            return form.reason
        case ReplayDeadLettersRequest():
            return form.why
        case _:
            return None
