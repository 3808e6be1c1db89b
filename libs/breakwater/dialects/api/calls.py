"""Calls through the APIs of providers: a request becomes one job, and its result or chunks become the response."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal, Protocol, cast
from urllib.parse import quote

import orjson
import structlog
from pydantic import ValidationError
from pydantic_core import from_json
from starlette.background import BackgroundTask
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiMessage

from breakwater.calls.rules.parameters import own_params
from breakwater.config import Config
from breakwater.dialects.api.errors import REQUEST_ID, error_response, is_messages
from breakwater.dialects.api.models import ModelNameTable
from breakwater.dialects.api.streams import ChunkInbox, EncodedStream, Encoder
from breakwater.dialects.contract.openai import CallOptions
from breakwater.dialects.rules import chat_form, dropped_fields, params_of
from breakwater.dialects.rules.chat_completions import error_of, with_error_as_answer
from breakwater.identity.auth import caller_of
from breakwater.identity.operations import TOO_MANY
from breakwater.identity.rules.callers import is_openai
from breakwater.jobs.api.cancels import Cancels
from breakwater.jobs.api.intake import FollowedJob, JobIntake
from breakwater.jobs.api.submission import Submission
from breakwater.jobs.api.submission_trace import traced_submission
from breakwater.jobs.contract.execution import Cancellation, PendingCancel
from breakwater.jobs.contract.job import Job
from breakwater.jobs.rules.ownership import shown
from breakwater.jobs.rules.record import ends_with_client
from breakwater.jobs.store.in_flight_requests import InFlightRequests
from breakwater.kernel.http.parsing import invalid_job, read_body
from breakwater.kernel.http.problems import RequestError, unavailable
from breakwater.kernel.ids import new_id
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.core import hearing
from breakwater.kernel.nats.errors import BusError, BusUnavailableError
from breakwater.kernel.nats.lookup import ClientGetter
from breakwater.kernel.redis.connection import StateUnavailableError
from breakwater.kernel.surrogates import whole_escapes
from breakwater.kernel.validation import FieldError, problems

LONGEST_CALL_S = 90_000.0
"""Time limit of a call, longer than the longest `total_timeout_s` with a wait in the queue: the client decides."""

CLIENT_LEFT: Literal["client_disconnect"] = "client_disconnect"

CALL_HEADERS: Mapping[str, str] = {
    "Idempotency-Key": "The job's id: 1 to 128 characters of printable ASCII.",
    "x-breakwater-tenant": "As `breakwater.tenant` in the body, which comes first; so for the other options.",
    "x-session-id": "Same as `breakwater.session_id`: calls of a session are shown as one run.",
    "traceparent": "W3C trace context that the job becomes a part of. Calls of one trace are one run, if they "
    "name no task and no session.",
}
"""Headers of requests that are calls of models, for the documentation."""

OPENAI_ERRORS: Mapping[int, str] = {
    403: "The task was stopped (`guard_tripped`), or the key may not do this (`forbidden`).",
    409: "The idempotency key is that of another call (`id_conflict`), or the job was cancelled (`cancelled`).",
    429: "A budget is used up (`insufficient_quota`), or a rate limit (`rate_limit_exceeded`). " + TOO_MANY,
    502: "No model gave a usable answer: `provider_error`, `provider_unreachable`, `invalid_output`, `worker_lost`.",
    503: "The breakers of all models are open (`breaker_open`, `agent_unavailable`), or nothing was accepted "
    "(`unavailable`, `refused`).",
    504: "The job's time was over (`timeout`).",
}
"""Errors of a call below `/v1`, except for Messages, as the API document describes them."""

_OPTION = "x-breakwater-"
SESSION_HEADERS = ("x-session-id", "x-claude-code-session-id", "session-id")
"""Headers in which programs name their session: other gateways and opencode, Claude Code, and Codex."""
_JSON_OPTIONS = frozenset({"fallback_models", "depends_on", "metadata", "breaker", "guard", "retry"})
_REQUEST_ID = "breakwater.request_id"
_NO_RETRY = {"x-should-retry": "false"}
"""Keeps the client from retrying, as Breakwater has already retried as often as the agent allows."""


@dataclass(frozen=True, slots=True)
class NameRequests:
    """ASGI middleware that gives each request to OpenAI's or Anthropic's API an id, in a header of its response."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on."""
        if scope["type"] != "http" or not is_openai(scope["path"]):
            await self.app(scope, receive, send)
            return
        scope[_REQUEST_ID] = new_id()
        REQUEST_ID.set(scope[_REQUEST_ID])
        header = "request-id" if is_messages(scope["path"]) else "x-request-id"

        async def send_with_id(message: AsgiMessage) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[header] = scope[_REQUEST_ID]
            await send(message)

        await self.app(scope, receive, send_with_id)


class ApiAnswer(Protocol):
    """Writes the answer to one request as its API has it."""

    def body(self, sent: Submission, result: dict[str, Any]) -> bytes:
        """Returns the JSON of the answer. `result` is that of a job that succeeded."""
        ...

    def encoder(self, sent: Submission) -> Encoder:
        """Returns an encoder of the events of a streamed answer."""
        ...

    def fails_in_stream(self, result: dict[str, Any]) -> bool:
        """Returns True if the API begins a stream to report this failure. `result` is that of a job that failed."""
        ...


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A request as a job, and how to answer it.

    Attributes:
        job: the request as a job.
        answer: writes the answer as the API has it.
        accepted: awaited once the job is accepted, and before its answer.
        detached: responds to a request that does not wait for its job, once the job is accepted. It takes the request,
            the job, and True if the job was sent before.
    """

    job: Job
    answer: ApiAnswer
    accepted: Callable[[Submission], Awaitable[object]] | None = None
    detached: Callable[[Request, Submission, bool], Awaitable[Response]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCall:
    """A request that waits for its job.

    Attributes:
        sent: the job.
        answer: writes the answer as the API has it.
        accepted: awaited once the job is accepted, and before its answer.
        path: the path of the request.
        request_id: the id of the request.
        key_id: the id of the API key.
        request_key: identifies equal requests while they are in flight; None if no other request needs to find it.
        attaches: the request waits for an equal request in flight, if there is one.
        repeats: the client's SDK has sent the request before and got no response.
        cancels: the job ends with the last client that waits for it.
        authorize: returns the same job with another id: a chosen one, or else a generated one.
    """

    sent: Submission
    answer: ApiAnswer
    accepted: Callable[[Submission], Awaitable[object]] | None
    path: str
    request_id: str
    key_id: str
    request_key: str | None
    attaches: bool
    repeats: bool
    cancels: bool
    authorize: Callable[[str | None, str], Submission]


class Calls:
    """The common part of all dialects: each request becomes a job like any other."""

    def __init__(
        self,
        config: Config,
        intake: JobIntake,
        in_flight: InFlightRequests,
        connection: ClientGetter,
        cancels: Cancels,
    ) -> None:
        self._config = config
        self._connection = connection
        self._names = ModelNameTable(config)
        self._intake = intake
        self._in_flight = in_flight
        self._cancels = cancels

    def agent_of(self, request: Request, model: str) -> tuple[str, str | None]:
        """Returns the agent that `model` names, and the requested model; None for the agent's own model.

        Raises:
            RequestError: 404, there is no such agent or model for this key.
        """
        return self._names.resolve(model, caller_of(request))

    async def read(self, request: Request) -> bytes:
        """Reads the body of a request. Raises RequestError: 413."""
        return await read_body(request, self._config.limits.max_body_bytes)

    async def respond(self, request: Request, parse: Callable[[Request, bytes], Awaitable[ParsedCall]]) -> Response:
        """Responds to a request once its job has ended, however long that takes.

        Args:
            request: the request, whose body is not read yet.
            parse: parses the body. It may raise RequestError, or ValidationError if the job is invalid.
        """
        path = request.url.path
        with traced_submission(request, path) as trace:
            body = await self.read(request)
            try:
                parsed = await parse(request, body)
            except ValidationError as error:
                raise invalid_job(problems(error)) from None
            call = await self.begin(request, parsed)
            trace.set_job(call.sent.job.agent, call.sent.job_id)
            if parsed.detached is not None:
                response = await self._detached(request, call, trace.traceparent, parsed.detached)
            else:
                respond = self._stream if parsed.job.stream else self._respond_when_done
                response = await respond(request, call, trace.traceparent)
            trace.set_status(response.status_code)
        return response

    async def _respond_when_done(self, request: Request, call: PendingCall, traceparent: str | None) -> Response:
        sent = call.sent
        try:
            async with self._intake.follow(request, sent, traceparent, LONGEST_CALL_S) as followed:
                if call.accepted is not None:
                    await call.accepted(sent)
                result = await followed.deciding
                has_left = followed.disconnection.done()
        except BaseException:
            await self._leave(call, cancels=False)
            raise
        if result is None or has_left:
            await self._leave(call, cancels=False)
        if result is None:
            raise _stopping(sent.shown_id)
        result = await self._cancels.lookup.explained(caller_of(request), result)
        response = self._response(call, orjson.loads(result))
        if call.request_key is not None and not has_left:
            response.background = BackgroundTask(self._forget, call)
        return response

    async def _detached(
        self,
        request: Request,
        call: PendingCall,
        traceparent: str | None,
        respond: Callable[[Request, Submission, bool], Awaitable[Response]],
    ) -> Response:
        try:
            duplicate = await self._intake.store(call.sent, traceparent)
            response = await respond(request, call.sent, duplicate)
        except (BusError, StateUnavailableError) as error:
            await self._leave(call, cancels=False)
            raise unavailable("unavailable", f"the job may have been accepted; send it again: {error}") from error
        except BaseException:
            await self._leave(call, cancels=False)
            raise
        # Equal requests find this call until its response is sent; the call of a stream they find until it expires.
        response.background = BackgroundTask(self._forget, call)
        response.headers.update(_option_headers({"execution-id": call.sent.shown_id}, ()))
        return response

    async def _stream(self, request: Request, call: PendingCall, traceparent: str | None) -> Response:
        """Responds once the answer has begun or the job is decided. Until then, an error is a response of its own."""
        sent = call.sent
        inbox = ChunkInbox()
        resources = AsyncExitStack()
        followed: FollowedJob | None = None

        async def close(all_sent: bool, stuck: bool = False) -> None:
            has_left = stuck or (followed is not None and followed.disconnection.done())
            deciding = None if followed is None or not followed.deciding.done() else followed.deciding
            has_result = (
                deciding is not None and not (deciding.cancelled() or deciding.exception()) and deciding.result()
            )
            cancels = call.cancels and has_left and not has_result
            await resources.aclose()
            await (self._forget(call) if all_sent else self._leave(call, cancels=cancels))

        def error(result: dict[str, Any] | None) -> bytes:
            stopping = error_response(_stopping(sent.shown_id), call.path)
            return bytes((stopping if result is None else self._response(call, result)).body)

        try:
            # The subscription comes first, on the same connection, so that no chunk of the job is missed.
            chunks = hearing(self._connection, subjects.chunks(sent.job.agent, sent.job_id), inbox.put, confirmed=False)
            await resources.enter_async_context(chunks)
            following = self._intake.follow(request, sent, traceparent, LONGEST_CALL_S)
            followed = await resources.enter_async_context(following)
            if call.accepted is not None:
                await call.accepted(sent)
            await inbox.wait_nonempty(followed.deciding, self._config.agents[sent.job.agent].keepalive_before_answer_s)
            begins_early = inbox.first is None and not followed.deciding.done()
            decided = followed.deciding.result() if inbox.first is None and not begins_early else None
        except BusUnavailableError as outage:
            await close(False)
            raise unavailable("unavailable", f"the job was not accepted: {outage}") from outage
        except BaseException:
            await close(False)
            raise
        if (first := inbox.first) is not None:
            model = str(first["model"])
            values = {"execution-id": sent.shown_id, "model": model, "attempts": str(first["attempt"]), "cache": "miss"}
            headers = _option_headers(values, self._dropped(sent, model, first.get("dropped_params") or ()))
        elif begins_early:
            headers = _option_headers({"execution-id": sent.shown_id}, ())
        elif decided is None:
            await close(False)
            raise _stopping(sent.shown_id)
        else:
            result: dict[str, Any] = orjson.loads(await self._cancels.lookup.explained(caller_of(request), decided))
            answered_result = with_error_as_answer(result)
            if answered_result["status"] != "succeeded" and not call.answer.fails_in_stream(result):
                await close(True)
                if call.repeats and (result.get("cancellation") or {}).get("by") == CLIENT_LEFT:
                    # The client that left is the client of this request, and has come back: it gets a call of its own.
                    own_call = replace(call, sent=call.authorize(None, call.request_id), repeats=False)
                    return await self._stream(request, await self._begin(own_call), traceparent)
                return self._response(call, result)
            headers = self._headers(sent, result)
        encoder = call.answer.encoder(sent)
        return EncodedStream(inbox, followed.deciding, headers=headers, encoder=encoder, error=error, close=close)

    async def begin(self, request: Request, parsed: ParsedCall) -> PendingCall:
        """Returns the call that a request waits for, compared and admitted: its own, or an equal one in flight.

        Raises:
            RequestError: the job is not accepted.
        """
        return await self._begin(self._call(request, parsed))

    def _call(self, request: Request, parsed: ParsedCall) -> PendingCall:
        caller = caller_of(request)
        headers = request.headers
        job = parsed.job
        authorize = partial(self._intake.authorize, caller, job, job.model_dump_json(exclude_unset=True).encode())
        request_id = request.scope[_REQUEST_ID]
        idempotency_key = headers.get("idempotency-key")
        sent = authorize(idempotency_key, request_id)
        retries = headers.get("x-stainless-retry-count")
        has_key = idempotency_key is not None
        cancels = (
            job.stream
            and parsed.detached is None
            and ends_with_client(self._config.agents[job.agent].on_disconnect, has_key=has_key)
        )
        # Requests with an idempotency key share a job by its id. They must find each other only if the job is to end
        # with the last of them.
        recorded = cancels if has_key else retries is not None
        return PendingCall(
            sent=sent,
            answer=parsed.answer,
            accepted=parsed.accepted,
            path=request.url.path,
            request_id=request_id,
            key_id=caller.id,
            request_key=":".join((caller.id, sent.digest, idempotency_key or "")) if recorded else None,
            attaches=has_key or retries not in {None, "0"},
            repeats=retries not in {None, "0"},
            cancels=cancels,
            authorize=authorize,
        )

    async def _begin(self, call: PendingCall) -> PendingCall:
        call = await self._attach(call)
        try:
            sent = await self._intake.compare(call.sent)
            await self._intake.admit(sent)
        except BaseException:
            await self._leave(call, cancels=False)
            raise
        return replace(call, sent=sent)

    async def _attach(self, call: PendingCall) -> PendingCall:
        if call.request_key is None:
            return call
        job = call.sent.job
        longest_s = job.total_timeout_s or self._config.agents[job.agent].total_timeout_s
        try:
            job_id = await self._in_flight.begin(
                call.request_key, call.request_id, call.sent.job_id, attaches=call.attaches, longest_s=longest_s
            )
        except StateUnavailableError:
            # Without Redis, a retry is a call of its own. Other users of Redis log the outage.
            return replace(call, request_key=None)
        return (
            call if job_id == call.sent.job_id else replace(call, sent=call.authorize(shown(job_id), call.request_id))
        )

    async def _forget(self, call: PendingCall) -> None:
        """Forgets a call in flight once its response is sent."""
        if call.request_key is not None:
            with suppress(StateUnavailableError):  # it expires
                await self._in_flight.end(call.request_key, call.sent.job_id)

    async def _leave(self, call: PendingCall, *, cancels: bool) -> None:
        """Stops waiting for a call that has no response.

        Args:
            call: the call.
            cancels: cancel its job, unless another request waits for it. A retry is then a call of its own.
        """
        job_id = call.sent.job_id
        agent = call.sent.job.agent
        try:
            if call.request_key is not None:
                alone = await self._in_flight.leave(call.request_key, call.request_id, job_id, cancels=cancels)
                cancels = cancels and alone
            # Other requests may wait for the job by its id.
            if cancels and not self._cancels.lookup.waiters.waits_for(subjects.result(job_id)):
                by = Cancellation(by=CLIENT_LEFT, key_id=call.key_id, at=datetime.now(UTC))
                await self._cancels.request(PendingCancel(execution_id=job_id, cancellation=by, agents=(agent,)))
        except StateUnavailableError as error:
            if cancels:
                structlog.get_logger().info("job_not_cancelled", execution_id=job_id, error=str(error))

    def _response(self, call: PendingCall, result: dict[str, Any]) -> Response:
        headers = self._headers(call.sent, result)
        result = with_error_as_answer(result)
        if result["status"] == "succeeded" and (why := result.get("encrypted")) is not None:
            message = f"the text of the answer was {why}"
            problem = RequestError(503, "undecryptable", message, headers=headers | _NO_RETRY)
            return error_response(problem, call.path)
        if result["status"] == "succeeded":
            return Response(call.answer.body(call.sent, result), 200, headers, "application/json")
        error = error_of(result)
        if error.retry_after_s is not None:
            headers["Retry-After"] = str(error.retry_after_s)
        param = error.param
        request = call.sent.job.api_request
        if param is not None and request is not None:
            param = chat_form(request).in_body(param)
        details = [] if param is None else [FieldError(path=param, message=error.message)]
        headers |= {} if error.may_retry else _NO_RETRY
        problem = RequestError(error.status, error.code, error.message, details, headers)
        return error_response(problem, call.path)

    def _headers(self, sent: Submission, result: dict[str, Any]) -> dict[str, str]:
        """Returns the headers with the known figures of the execution."""
        model = cast(str | None, result.get("chosen_model"))
        error = cast(dict[str, Any] | None, result.get("error"))
        refused_params = next((attempt.get("dropped_params") or () for attempt in reversed(result["attempts"])), ())
        dropped = () if model is None else self._dropped(sent, model, refused_params)
        values = {
            "execution-id": sent.shown_id,
            "model": model,
            "attempts": str(result["attempts_count"]),
            "cost-usd": result.get("total_cost"),
            "cache": "hit" if result["cache_hit"] else "miss",
            "error": None if error is None else error["class"],
        }
        return _option_headers(values, dropped)

    def _dropped(self, sent: Submission, model: str, refused_params: Iterable[str]) -> tuple[str, ...]:
        """Returns the fields of a request that a model was not sent: it refuses them, or has no counterpart."""
        agent = self._config.agents[sent.job.agent]
        provider = self._config.provider_name(agent, model)
        settings = None if provider is None else self._config.providers.get(provider)
        request = sent.job.api_request
        form = None if request is None else chat_form(request)
        refused_names = own_params(params_of(sent.job), () if request is None else request.body).intersection(
            refused_params
        )
        left_out = refused_names if form is None else {form.names.get(name, name) for name in refused_names}
        if settings is None or (request is not None and self._config.speaks(provider, request.api)):
            return tuple(sorted(left_out))
        left_out = left_out.union(settings.dropped(params_of(sent.job)))
        return tuple(sorted(left_out if request is None else left_out | dropped_fields(request)))


def _option_headers(values: Mapping[str, str | None], dropped: Iterable[str]) -> dict[str, str]:
    """Returns values as `x-breakwater-…` headers, without those that are None."""
    values = {**values, "dropped-params": ", ".join(dropped) or None}
    if (model := values.get("model")) is not None:
        values["model"] = quote(model, safe="/:@+ ")
    return {f"{_OPTION}{name}": value for name, value in values.items() if value is not None}


def _stopping(job_id: str) -> RequestError:
    """Returns 503 for a client whose process stops. If its SDK repeats the request, it attaches to the job."""
    problem = unavailable("unavailable", "this process stops, and the job goes on; send the same request again")
    problem.headers["x-breakwater-execution-id"] = job_id
    return problem


def options_of(headers: Headers, body_options: CallOptions | None) -> CallOptions:
    """Returns the options of a call. Those of its body take precedence over those of its headers.

    Args:
        headers: `x-breakwater-tenant`, `x-breakwater-task-id`, …, whose values are JSON if the option is not a text;
            and the headers in which programs name their sessions.
        body_options: the field `breakwater` of the body.

    Raises:
        RequestError: 422, a header names no option, or its value is invalid.
    """
    session_id = next((headers[name] for name in SESSION_HEADERS if name in headers), None)
    header_options: dict[str, Any] = {} if session_id is None else {"session_id": session_id}
    for header, value in headers.items():
        if header.startswith(_OPTION):
            name = header.removeprefix(_OPTION).replace("-", "_")
            header_options[name] = _json(header, value) if name in _JSON_OPTIONS else value
    try:
        # Headers are texts, so numbers and booleans need to be converted.
        options = CallOptions.model_validate(header_options, strict=False)
    except ValidationError as error:
        field_errors = problems(error, CallOptions, header_options)
        details = list[FieldError]()
        for field_error in field_errors:
            name, dot, subfield = field_error.path.partition(".")
            details.append(
                FieldError(path=f"{_OPTION}{name.replace('_', '-')}{dot}{subfield}", message=field_error.message)
            )
        raise invalid_job(details) from None
    return options if body_options is None else options.model_copy(update=body_options.model_dump(exclude_unset=True))


def _json(header: str, value: str) -> Any:
    try:
        return from_json(whole_escapes(value))
    except ValueError as error:
        raise invalid_job([FieldError(path=header, message=f"is not JSON: {error}")]) from None
