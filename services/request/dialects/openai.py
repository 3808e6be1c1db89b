"""OpenAI's API: `/v1/chat/completions` and `/v1/models`. A call is a job like any other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal, cast
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

from breakwater.bus.core import hearing
from breakwater.bus.errors import BusUnavailableError
from breakwater.bus.lookup import ClientGetter
from breakwater.config import Config
from breakwater.contracts import subjects
from breakwater.contracts.execution import Cancellation, PendingCancel
from breakwater.contracts.openai import CallOptions, ChatCompletion, ChatCompletionRequest, ModelName, ModelNames
from breakwater.contracts.types import Message
from breakwater.contracts.validation import FieldError, problems
from breakwater.policy.chat_completions import completion_of, error_of, job_of
from breakwater.policy.ownership import shown
from breakwater.policy.record import ends_with_client
from breakwater.state.connection import StateUnavailableError
from breakwater.state.in_flight_requests import InFlightRequests
from services.request.auth import caller_of
from services.request.cancels import Cancels
from services.request.dialects.model_names import ModelNameTable
from services.request.dialects.openai_stream import ChatStream, ChunkInbox
from services.request.intake import FollowedJob, JobIntake
from services.request.observe import SubmissionTrace, submitting
from services.request.operations import TOO_MANY, ApiRequest, operation
from services.request.parsing import invalid_job, read_body, read_command
from services.request.problems import RequestError, is_openai, unavailable
from services.request.submission import Submission, make_job_id

CHAT_COMPLETIONS = "/v1/chat/completions"

LONGEST_CALL_S = 90_000.0
"""A call waits as long as its client does: longer than the longest `total_timeout_s`, and a wait in the queue."""

CLIENT_LEFT: Literal["client_disconnect"] = "client_disconnect"

_OPTION = "x-breakwater-"
_JSON_OPTIONS = frozenset({"fallback_models", "depends_on", "metadata", "breaker", "guard", "retry"})
_REQUEST_ID = "breakwater.request_id"
_NO_RETRY = {"x-should-retry": "false"}
"""Breakwater has retried already, as the agent wants it: the client's own retries would come on top."""


@dataclass(frozen=True, slots=True)
class NameRequests:
    """ASGI middleware that names each request to OpenAI's API: `x-request-id` of its response."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on."""
        if scope["type"] != "http" or not is_openai(scope["path"]):
            await self.app(scope, receive, send)
            return
        scope[_REQUEST_ID] = make_job_id()

        async def naming(message: AsgiMessage) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = scope[_REQUEST_ID]
            await send(message)

        await self.app(scope, receive, naming)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall:
    """A request for a chat completion.

    Attributes:
        sent: the job.
        request_id: of the request.
        key_id: of the API key.
        question: names the call while it is not answered; None if no other request needs to find it.
        attaches: the request waits for an unanswered call of the same question, if there is one.
        repeats: the client's SDK has sent it before, and got no response.
        cancels: the job ends with the last client that waits for it.
        authorize: makes the same job with another id: one that others may have used, or else one that was made here.
    """

    sent: Submission
    request_id: str
    key_id: str
    question: str | None
    attaches: bool
    repeats: bool
    cancels: bool
    authorize: Callable[[str | None, str], Submission]


class OpenAIRoutes:
    """OpenAI's API: chat completions, and the names of models."""

    def __init__(
        self,
        config: Config,
        intake: JobIntake,
        unanswered: InFlightRequests,
        connection: ClientGetter,
        cancels: Cancels,
    ) -> None:
        self._config = config
        self._connection = connection
        self._names = ModelNameTable(config)
        self._intake = intake
        self._unanswered = unanswered
        self._cancels = cancels
        self._created = int(time.time())

    @operation(
        "GET",
        "/v1/models",
        tag="openai",
        summary="Values of `model` in a chat completion",
        description="Agents, and each with the models that it lists; for a key that is bound to one agent, the models "
        "alone too. A model that is allowed by `*` only is not listed.",
        result="Those that the key may use.",
    )
    async def list_models(self, request: ApiRequest[Message]) -> ModelNames:
        """The values of `model` for this key."""
        names = dict.fromkeys(self._names.listed(request.caller))
        return ModelNames(data=tuple(ModelName(id=name, created=self._created) for name in names))

    @operation(
        "GET",
        "/v1/models/{model}",
        tag="openai",
        summary="One value of `model` in a chat completion",
        result="It may.",
        errors={404: "There is no such agent or model for this key (`model_not_found`)."},
    )
    async def show_model(self, request: ApiRequest[Message]) -> ModelName:
        """One value of `model`. Raises RequestError: 404."""
        name = request.path["model"]
        self._names.resolve(name, request.caller)
        return ModelName(id=name, created=self._created)

    @operation(
        "POST",
        "/v1/chat/completions",
        tag="openai",
        summary="Create a chat completion, as at OpenAI",
        description="Each call is a job. The response contains the provider's own object, or one in OpenAI's format if "
        "the provider speaks another dialect. The headers `x-breakwater-execution-id`, `-model`, `-attempts`, "
        "`-cost-usd` and `-cache` describe the job, and `-dropped-params` lists params that were not sent because the "
        "provider does not support them. `x-should-retry: false` is set if Breakwater has already retried. With "
        "`stream`, the response is server-sent events: OpenAI's "
        "`chat.completion.chunk` objects and `[DONE]`, or an `error` after some of the answer.",
        headers={
            "Idempotency-Key": "The job's id: 1 to 128 characters of printable ASCII.",
            "x-breakwater-tenant": "As `breakwater.tenant` in the body, which comes first; so for the other options.",
            "x-session-id": "Same as `breakwater.session_id`: calls of a session are shown as one run.",
            "traceparent": "W3C trace context that the job becomes a part of. Calls of one trace are one run, if they "
            "name no task and no session.",
        },
        body=ChatCompletionRequest,
        results={200: ("The answer.", ChatCompletion)},
        errors={
            400: "The request is invalid; `param` is the field at fault. Or it is too long for the model "
            "(`context_length_exceeded`), or the provider refuses it (`invalid_request`).",
            403: "The task was stopped (`guard_tripped`), or the key may not do this (`forbidden`).",
            404: "There is no such agent or model for this key (`model_not_found`).",
            409: "The idempotency key is that of another call (`id_conflict`), or the job was cancelled (`cancelled`).",
            429: "A budget is used up (`insufficient_quota`), or a rate limit (`rate_limit_exceeded`). " + TOO_MANY,
            502: "No model gave a usable answer: `provider_error`, `provider_unreachable`, `invalid_output`, "
            "`worker_lost`.",
            503: "The breakers of all models are open (`breaker_open`, `agent_unavailable`), or nothing was accepted "
            "(`unavailable`, `refused`).",
            504: "The job's time was over (`timeout`).",
        },
    )
    async def create_chat_completion(self, request: Request) -> Response:
        """The chat completion, once the job has ended, however long that takes."""
        with submitting(request, CHAT_COMPLETIONS) as trace:
            response = await self._complete(request, trace)
            trace.answered(response.status_code)
        return response

    async def _complete(self, request: Request, trace: SubmissionTrace) -> Response:
        body = await read_body(request, self._config.limits.max_body_bytes)
        completion = read_command(body, ChatCompletionRequest)
        call = await self._begin(self._call(request, completion))
        trace.of(call.sent.job.agent, call.sent.job_id)
        if completion.stream:
            options = completion.stream_options
            with_usage = options is not None and bool(options.include_usage)
            return await self._stream(request, call, trace.traceparent, with_usage=with_usage)
        sent = call.sent
        try:
            async with self._intake.follow(request, sent, trace.traceparent, LONGEST_CALL_S) as followed:
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
        response = self._response(sent, orjson.loads(result))
        if call.question is not None and not has_left:
            response.background = BackgroundTask(self._answered, call)
        return response

    async def _stream(
        self, request: Request, call: CompletionCall, traceparent: str | None, *, with_usage: bool
    ) -> Response:
        """The response once the answer has begun, or the job is decided: until then an error is one by its status."""
        sent = call.sent
        inbox, held = ChunkInbox(), AsyncExitStack()
        followed: FollowedJob | None = None

        async def ended(whole: bool, stuck: bool = False) -> None:
            has_left = stuck or (followed is not None and followed.disconnection.done())
            deciding = None if followed is None or not followed.deciding.done() else followed.deciding
            has_result = (
                deciding is not None and not (deciding.cancelled() or deciding.exception()) and deciding.result()
            )
            cancels = call.cancels and has_left and not has_result
            await held.aclose()
            await (self._answered(call) if whole else self._leave(call, cancels=cancels))

        def error(result: dict[str, Any] | None) -> bytes:
            stopping = _stopping(sent.shown_id).response(CHAT_COMPLETIONS)
            return bytes((stopping if result is None else self._response(sent, result)).body)

        try:
            # The job goes out over the same connection, after the subscription.
            chunks = hearing(self._connection, subjects.chunks(sent.job.agent, sent.job_id), inbox.put, confirmed=False)
            await held.enter_async_context(chunks)
            following = self._intake.follow(request, sent, traceparent, LONGEST_CALL_S)
            followed = await held.enter_async_context(following)
            await inbox.wait_nonempty(followed.deciding)
            found = followed.deciding.result() if inbox.first is None else None
        except BusUnavailableError as unsent:
            await ended(False)
            raise unavailable("unavailable", f"the job was not accepted: {unsent}") from unsent
        except BaseException:
            await ended(False)
            raise
        if (first := inbox.first) is not None:
            model = str(first["model"])
            known = {"execution-id": sent.shown_id, "model": model, "attempts": str(first["attempt"]), "cache": "miss"}
            headers = _named(known, self._dropped(sent, model))
        elif found is None:
            await ended(False)
            raise _stopping(sent.shown_id)
        else:
            result: dict[str, Any] = orjson.loads(await self._cancels.lookup.explained(caller_of(request), found))
            if result["status"] != "succeeded":
                await ended(True)
                if call.repeats and (result.get("cancellation") or {}).get("by") == CLIENT_LEFT:
                    # It is the client of this one that has left, and has come back: the same as a call of its own.
                    anew = replace(call, sent=call.authorize(None, call.request_id), repeats=False)
                    return await self._stream(request, await self._begin(anew), traceparent, with_usage=with_usage)
                return self._response(sent, result)
            headers = self._headers(sent, result)
        return ChatStream(inbox, followed.deciding, headers=headers, with_usage=with_usage, error=error, ended=ended)

    def _call(self, request: Request, completion: ChatCompletionRequest) -> CompletionCall:
        """The call of a request. Raises RequestError."""
        if completion.stream_options is not None and not completion.stream:
            message = "stream_options: is only allowed when `stream` is true"
            raise RequestError(
                400, "invalid_request", message, [FieldError(path="stream_options", message="needs `stream`")]
            )
        caller, headers = caller_of(request), request.headers
        agent, model = self._names.resolve(completion.model, caller)
        try:
            job = job_of(completion, options_of(headers, completion.breakwater), agent, model)
        except ValidationError as error:
            raise invalid_job(problems(error)) from None
        authorize = partial(self._intake.authorize, caller, job, job.model_dump_json(exclude_unset=True).encode())
        request_id, idempotency_key = request.scope[_REQUEST_ID], headers.get("idempotency-key")
        sent, retries = authorize(idempotency_key, request_id), headers.get("x-stainless-retry-count")
        has_key = idempotency_key is not None
        cancels = job.stream and ends_with_client(self._config.agents[agent].on_disconnect, has_key=has_key)
        # A key attaches by itself. Other clients of its job matter only if the job ends with its clients.
        recorded = cancels if has_key else retries is not None
        return CompletionCall(
            sent=sent,
            request_id=request_id,
            key_id=caller.id,
            question=":".join((caller.id, sent.digest, idempotency_key or "")) if recorded else None,
            attaches=has_key or retries not in {None, "0"},
            repeats=retries not in {None, "0"},
            cancels=cancels,
            authorize=authorize,
        )

    async def _begin(self, call: CompletionCall) -> CompletionCall:
        """The call that a request waits for, its own or the one that it repeats, compared and admitted."""
        call = await self._attached(call)
        try:
            sent = await self._intake.compare(call.sent)
            await self._intake.admit(sent)
        except BaseException:
            await self._leave(call, cancels=False)
            raise
        return replace(call, sent=sent)

    async def _attached(self, call: CompletionCall) -> CompletionCall:
        if call.question is None:
            return call
        job = call.sent.job
        longest_s = job.total_timeout_s or self._config.agents[job.agent].total_timeout_s
        try:
            job_id = await self._unanswered.begin(
                call.question, call.request_id, call.sent.job_id, attaches=call.attaches, longest_s=longest_s
            )
        except StateUnavailableError:
            # Without Redis a retry is a call of its own; other users of Redis log the outage.
            return replace(call, question=None)
        return (
            call if job_id == call.sent.job_id else replace(call, sent=call.authorize(shown(job_id), call.request_id))
        )

    async def _answered(self, call: CompletionCall) -> None:
        """Forgets a call whose response is sent."""
        if call.question is not None:
            with suppress(StateUnavailableError):  # it expires
                await self._unanswered.end(call.question, call.sent.job_id)

    async def _leave(self, call: CompletionCall, *, cancels: bool) -> None:
        """Waits no longer for a call without a response.

        Args:
            call: of the request.
            cancels: it ends, unless another request waits for it. A retry is then a call of its own.
        """
        job_id, agent = call.sent.job_id, call.sent.job.agent
        try:
            if call.question is not None:
                alone = await self._unanswered.leave(call.question, call.request_id, job_id, cancels=cancels)
                cancels = cancels and alone
            # Requests may wait for the job by its id, too.
            if cancels and not self._cancels.lookup.waiters.waits_for(subjects.result(job_id)):
                by = Cancellation(by=CLIENT_LEFT, key_id=call.key_id, at=datetime.now(UTC))
                await self._cancels.request(PendingCancel(execution_id=job_id, cancellation=by, agents=(agent,)))
        except StateUnavailableError as error:
            if cancels:
                structlog.get_logger().info("job_not_cancelled", execution_id=job_id, error=str(error))

    def _response(self, sent: Submission, result: dict[str, Any]) -> Response:
        headers = self._headers(sent, result)
        if result["status"] == "succeeded" and (why := result.get("encrypted")) is not None:
            message = f"the text of the answer was {why}"
            return RequestError(503, "undecryptable", message, headers=headers | _NO_RETRY).response(CHAT_COMPLETIONS)
        if result["status"] == "succeeded":
            return Response(orjson.dumps(completion_of(result)), 200, headers, "application/json")
        error = error_of(result)
        if error.retry_after_s is not None:
            headers["Retry-After"] = str(error.retry_after_s)
        details = [] if error.param is None else [FieldError(path=error.param, message=error.message)]
        headers |= {} if error.may_retry else _NO_RETRY
        problem = RequestError(error.status, error.code, error.message, details, headers)
        return problem.response(CHAT_COMPLETIONS)

    def _headers(self, sent: Submission, result: dict[str, Any]) -> dict[str, str]:
        """Headers of the known figures of the execution."""
        model = cast(str | None, result.get("chosen_model"))
        dropped = () if model is None else self._dropped(sent, model)
        known = {
            "execution-id": sent.shown_id,
            "model": model,
            "attempts": str(result["attempts_count"]),
            "cost-usd": result.get("total_cost"),
            "cache": "hit" if result["cache_hit"] else "miss",
        }
        return _named(known, dropped)

    def _dropped(self, sent: Submission, model: str) -> tuple[str, ...]:
        agent = self._config.agents[sent.job.agent]
        provider = self._config.provider_name(agent, model)
        settings = None if provider is None else self._config.providers.get(provider)
        return () if settings is None else tuple(settings.dropped(sent.job.params))


def _named(known: Mapping[str, str | None], dropped: Iterable[str]) -> dict[str, str]:
    """Headers by their names, without unknown ones."""
    known = {**known, "dropped-params": ", ".join(dropped) or None}
    if (model := known.get("model")) is not None:
        known["model"] = quote(model, safe="/:@+ ")
    return {f"{_OPTION}{name}": value for name, value in known.items() if value is not None}


def _stopping(job_id: str) -> RequestError:
    """503. Seen by the client only where the process stops. The same request again, as the SDK sends it, attaches."""
    problem = unavailable("unavailable", "this process stops, and the job goes on; send the same request again")
    problem.headers["x-breakwater-execution-id"] = job_id
    return problem


def options_of(headers: Headers, given: CallOptions | None) -> CallOptions:
    """The options of a call: those of its headers, and over them those of its body.

    Args:
        headers: `x-breakwater-tenant`, `x-breakwater-task-id`, …; JSON for an option that is no text. Also
            `x-session-id`, which other gateways know.
        given: `breakwater` of the body.

    Raises:
        RequestError: 422, a header is no option, or its value is wrong.
    """
    session_id = headers.get("x-session-id")
    found: dict[str, Any] = {} if session_id is None else {"session_id": session_id}
    for header, value in headers.items():
        if header.startswith(_OPTION):
            name = header.removeprefix(_OPTION).replace("-", "_")
            found[name] = _json(header, value) if name in _JSON_OPTIONS else value
    try:
        # Headers are texts.
        options = CallOptions.model_validate(found, strict=False)
    except ValidationError as error:
        wrong = problems(error, CallOptions, found)
        details = list[FieldError]()
        for one in wrong:
            name, dot, rest = one.path.partition(".")
            details.append(FieldError(path=f"{_OPTION}{name.replace('_', '-')}{dot}{rest}", message=one.message))
        raise invalid_job(details) from None
    return options if given is None else options.model_copy(update=given.model_dump(exclude_unset=True))


def _json(header: str, value: str) -> Any:
    try:
        return from_json(value)
    except ValueError as error:
        raise invalid_job([FieldError(path=header, message=f"is not JSON: {error}")]) from None
