"""OpenAI's API: `/v1/chat/completions` and `/v1/models`. A call is a job like any other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime
from typing import Any, cast
from urllib.parse import quote

import orjson
import structlog
from pydantic import ValidationError
from pydantic_core import from_json
from starlette.background import BackgroundTask
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from breakwater.bus.core import hearing
from breakwater.bus.errors import BusUnavailable
from breakwater.bus.lookup import Connection
from breakwater.config import Config
from breakwater.contracts import api, subjects
from breakwater.contracts.api import CallOptions, ChatCompletionRequest
from breakwater.contracts.execution import Cancellation, CancelOrder
from breakwater.contracts.validation import FieldError, problems
from breakwater.policy.cancellation import ends_with_client
from breakwater.policy.chat_completions import completion_of, error_of, job_of
from breakwater.state.connection import StateUnavailable
from breakwater.state.unanswered import Unanswered
from services.request.auth import holder_of
from services.request.cancels import Cancels
from services.request.dialects.model_names import ModelNameTable
from services.request.dialects.openai_stream import ChatStream, ChunkInbox
from services.request.jobs import Jobs, make_job_id
from services.request.observe import SubmissionTrace, submitting
from services.request.parsing import Submission, invalid_job, read_body, read_command
from services.request.problems import Problem, is_openai, unavailable
from services.request.routing import ApiRequest

CHAT_COMPLETIONS = "/v1/chat/completions"

LONGEST_CALL_S = 90_000.0
"""A call waits as long as its client does: longer than the longest `total_timeout_s`, and a wait in the queue."""

_OPTION = "x-breakwater-"
_REQUEST_ID = "breakwater.request_id"
_NO_RETRY = {"x-should-retry": "false"}
"""Breakwater has retried already, as the agent wants it: the client's own retries would come on top."""


class NameRequests:
    """ASGI middleware that names each request to OpenAI's API: `x-request-id` of its response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on."""
        if scope["type"] != "http" or not is_openai(scope["path"]):
            await self._app(scope, receive, send)
            return
        scope[_REQUEST_ID] = make_job_id()

        async def naming(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = scope[_REQUEST_ID]
            await send(message)

        await self._app(scope, receive, naming)


class OpenAIRoutes:
    """`/v1`."""

    def __init__(
        self, config: Config, jobs: Jobs, unanswered: Unanswered, connection: Connection, cancels: Cancels
    ) -> None:
        self._config = config
        self._connection = connection
        self._names = ModelNameTable(config)
        self._jobs = jobs
        self._unanswered = unanswered
        self._cancels = cancels
        self._created = int(time.time())

    async def list_models(self, asked: ApiRequest[Any]) -> api.ModelNames:
        """GET: what `model` may be, for this key."""
        names = dict.fromkeys(self._names.listed(asked.key))
        return api.ModelNames(data=tuple(api.ModelName(id=name, created=self._created) for name in names))

    async def show_model(self, asked: ApiRequest[Any]) -> api.ModelName:
        """GET of one. Raises Problem: 404."""
        name = asked.path["model"]
        self._names.resolve(name, asked.key)
        return api.ModelName(id=name, created=self._created)

    async def complete(self, request: Request) -> Response:
        """POST: the chat completion, once the job has ended, however long that takes."""
        with submitting(request, CHAT_COMPLETIONS) as trace:
            response = await self._complete(request, trace)
            trace.answered(response.status_code)
        return response

    async def _complete(self, request: Request, trace: SubmissionTrace) -> Response:
        body = await read_body(request, self._config.limits.max_body_bytes)
        asked = read_command(body, ChatCompletionRequest)
        sent, question = await self._submission(request, asked)
        trace.of(sent.job.agent, sent.job_id)
        if asked.stream:
            with_usage = asked.stream_options is not None and bool(asked.stream_options.include_usage)
            return await self._stream(request, sent, question, trace.traceparent, with_usage=with_usage)
        _, result = await self._jobs.run(request, sent, trace.traceparent, LONGEST_CALL_S)
        if result is None:
            await self._give_up(question, sent.job_id)
            raise _stopping(sent.job_id)
        response = self._response(sent, orjson.loads(result))
        if question is not None:
            response.background = BackgroundTask(self._forget, question, sent.job_id)
        return response

    async def _stream(
        self, request: Request, sent: Submission, question: str | None, traceparent: str | None, *, with_usage: bool
    ) -> Response:
        """The response once the answer has begun, or the job is decided: until then an error is one by its status."""
        inbox, held, job_id = ChunkInbox(), AsyncExitStack(), sent.job_id

        left: asyncio.Future[None] | None = None

        async def ended(whole: bool, stuck: bool = False) -> None:
            has_left = stuck or (left is not None and left.done())
            await held.aclose()
            if not whole and has_left and await self._cancelled(request, sent):
                # A retry of the client is a call of its own: there is no answer to attach to.
                whole = True
            await (self._forget if whole else self._give_up)(question, job_id)

        def error(result: dict[str, Any] | None) -> bytes:
            response = _stopping(job_id).response(CHAT_COMPLETIONS) if result is None else self._response(sent, result)
            return bytes(response.body)

        subject = subjects.chunks(sent.job.agent, job_id)
        try:
            # The job goes out over the same connection, after the subscription.
            await held.enter_async_context(hearing(self._connection, subject, inbox.put, confirmed=False))
            following = self._jobs.following(request, sent, traceparent, LONGEST_CALL_S)
            _, deciding, left = await held.enter_async_context(following)
            await inbox.stirred(deciding)
            found = deciding.result() if inbox.first is None else None
        except BusUnavailable as unsent:
            await ended(False)
            raise unavailable("unavailable", f"the job was not accepted: {unsent}") from unsent
        except BaseException:
            await ended(False)
            raise
        if inbox.first is None and found is None:
            await ended(False)
            raise _stopping(job_id)
        result: dict[str, Any] | None = None if found is None else orjson.loads(found)
        if result is not None and result["status"] != "succeeded":
            await ended(True)
            return self._response(sent, result)
        headers = self._headers(sent, result) if result is not None else self._first_headers(sent, inbox.first or {})
        return ChatStream(inbox, deciding, headers=headers, with_usage=with_usage, error=error, ended=ended)

    def _first_headers(self, sent: Submission, first: Mapping[str, Any]) -> dict[str, str]:
        """What is known when the answer begins."""
        model = str(first["model"])
        known = {"execution-id": sent.job_id, "model": model, "attempts": str(first["attempt"]), "cache": "miss"}
        return _named(known, self._dropped(sent, model))

    async def _cancelled(self, request: Request, sent: Submission) -> bool:
        """Cancels the job of a client that has left, where the agent wants that and nobody else waits for it here."""
        agent, key = self._config.agents[sent.job.agent], holder_of(request)
        has_key = "idempotency-key" in request.headers
        if not ends_with_client(agent.on_disconnect, has_key=has_key):
            return False
        if self._cancels.waiters.waits_for(subjects.result(sent.job_id)):
            return False
        by = Cancellation(by="client_disconnect", key_id=key.id, at=datetime.now(UTC))
        order = CancelOrder(execution_id=sent.job_id, cancellation=by, agents=(sent.job.agent,))
        try:
            await self._cancels.order(order)
        except StateUnavailable as error:
            structlog.get_logger().info("job_not_cancelled", execution_id=sent.job_id, error=str(error))
            return False
        return True

    async def _give_up(self, question: str | None, job_id: str) -> None:
        if question is not None:
            with suppress(StateUnavailable):
                await self._unanswered.give_up(question, job_id)

    async def _submission(self, request: Request, asked: ChatCompletionRequest) -> tuple[Submission, str | None]:
        """The job to publish; and what its call stands for as long as it is not answered, where a retry may follow."""
        if asked.stream_options is not None and not asked.stream:
            message = "stream_options: is only allowed when `stream` is true"
            raise Problem(
                400, "invalid_request", message, [FieldError(path="stream_options", message="needs `stream`")]
            )
        key, headers = holder_of(request), request.headers
        agent, model = self._names.resolve(asked.model, key)
        try:
            job = job_of(asked, options_of(headers, asked.breakwater), agent, model)
        except ValidationError as error:
            raise invalid_job(FieldError(path=one.path, message=one.message) for one in problems(error)) from None
        payload = job.model_dump_json(exclude_unset=True).encode()
        made_id, idempotency_key = request.scope[_REQUEST_ID], headers.get("idempotency-key")
        sent = self._jobs.prepare(key, job, payload, idempotency_key, made_id)
        retries = headers.get("x-stainless-retry-count")
        if idempotency_key is not None or retries is None:
            return sent, None
        question = f"{key.id}:{sent.digest}"
        # Without Redis a retry is a call of its own; who else needs Redis logs the outage.
        with suppress(StateUnavailable):
            if retries != "0" and (first := await self._unanswered.take(question)) is not None:
                sent = self._jobs.prepare(key, job, payload, first, made_id)
            await self._unanswered.add(question, sent.job_id)
        return sent, question

    async def _forget(self, question: str | None, job_id: str) -> None:
        if question is not None:
            with suppress(StateUnavailable):  # it expires
                await self._unanswered.remove(question, job_id)

    def _response(self, sent: Submission, result: dict[str, Any]) -> Response:
        headers = self._headers(sent, result)
        if result["status"] == "succeeded":
            return Response(orjson.dumps(completion_of(result)), 200, headers, "application/json")
        error = error_of(result)
        if error.retry_after_s is not None:
            headers["Retry-After"] = str(error.retry_after_s)
        details = [] if error.param is None else [FieldError(path=error.param, message=error.message)]
        problem = Problem(error.status, error.code, error.message, details, headers | _NO_RETRY)
        return problem.response(CHAT_COMPLETIONS)

    def _headers(self, sent: Submission, result: dict[str, Any]) -> dict[str, str]:
        """What is known of the execution. Of what is not known, there is no header."""
        model = cast(str | None, result.get("chosen_model"))
        dropped = () if model is None else self._dropped(sent, model)
        known = {
            "execution-id": sent.job_id,
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
    """Headers by their names, without those that are not known."""
    known = {**known, "dropped-params": ", ".join(dropped) or None}
    if (model := known.get("model")) is not None:
        known["model"] = quote(model, safe="/:@+ ")
    return {f"{_OPTION}{name}": value for name, value in known.items() if value is not None}


def _stopping(job_id: str) -> Problem:
    """503. Seen by the client only where the process stops. The same request again, as the SDK sends it, attaches."""
    problem = unavailable("unavailable", "this process stops, and the job goes on; send the same request again")
    problem.headers["x-breakwater-execution-id"] = job_id
    return problem


def options_of(headers: Headers, given: CallOptions | None) -> CallOptions:
    """The options of a call: those of its headers, and over them those of its body.

    Args:
        headers: `x-breakwater-tenant`, `x-breakwater-task-id`, …; those that are no text hold JSON.
        given: `breakwater` of the body.

    Raises:
        Problem: 422, a header is no option, or its value is wrong.
    """
    found: dict[str, Any] = {}
    for header, value in headers.items():
        if header.startswith(_OPTION):
            name = header.removeprefix(_OPTION).replace("-", "_")
            found[name] = _json(header, value) if name in {"fallback_models", "metadata"} else value
    try:
        # Headers are texts.
        options = CallOptions.model_validate(found, strict=False)
    except ValidationError as error:
        wrong = problems(error, CallOptions, found)
        details = [FieldError(path=_header(one.path), message=one.message) for one in wrong]
        raise invalid_job(details) from None
    return options if given is None else options.model_copy(update=given.model_dump(exclude_unset=True))


def _json(header: str, value: str) -> Any:
    try:
        return from_json(value)
    except ValueError as error:
        raise invalid_job([FieldError(path=header, message=f"is not JSON: {error}")]) from None


def _header(path: str) -> str:
    name, dot, rest = path.partition(".")
    return f"{_OPTION}{name.replace('_', '-')}{dot}{rest}"
