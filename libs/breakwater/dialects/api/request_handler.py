"""Requests to the APIs of providers: each becomes one job, whose result or chunks become the response."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import orjson
from pydantic import ValidationError
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response

from breakwater.config import Config
from breakwater.dialects.api.models import ModelNameTable
from breakwater.dialects.api.pending_request import LONGEST_REQUEST_S, ParsedRequest, PendingRequest
from breakwater.dialects.api.request_ids import REQUEST_ID
from breakwater.dialects.api.response_writer import ResponseWriter, option_headers, stopping_error
from breakwater.dialects.api.shared_jobs import CLIENT_LEFT, SharedJobs
from breakwater.dialects.api.streamed_request import StreamedRequest
from breakwater.dialects.rules.chat_completions import with_error_as_answer
from breakwater.identity.auth import caller_of
from breakwater.jobs.api.cancels import Cancels
from breakwater.jobs.api.intake import JobIntake
from breakwater.jobs.api.submission import Submission
from breakwater.jobs.api.submission_trace import traced_submission
from breakwater.jobs.rules.record import ends_with_client
from breakwater.jobs.store.in_flight_requests import InFlightRequests
from breakwater.kernel.http.bodies import read_body, release_room
from breakwater.kernel.http.parsing import invalid_job
from breakwater.kernel.http.problems import unavailable
from breakwater.kernel.nats.core import ClientGetter
from breakwater.kernel.nats.errors import BusError
from breakwater.kernel.redis.connection import StateUnavailableError
from breakwater.kernel.validation import problems


class ModelRequestHandler:
    """Handles the requests of all dialects: each becomes a job like any other."""

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
        self._shared_jobs = SharedJobs(config, in_flight, cancels)
        self._writer = ResponseWriter(config)
        self._lookup = cancels.lookup

    def agent_of(self, request: Request, model: str) -> tuple[str, str | None]:
        """Returns the agent that `model` names, and the requested model; None for the agent's own model.

        Raises:
            RequestError: 404, there is no such agent or model for this key.
        """
        return self._names.resolve(model, caller_of(request))

    async def read(self, request: Request) -> bytes:
        """Reads the body of a request. Raises RequestError: 413."""
        return await read_body(request, self._config.limits.max_body_bytes)

    async def respond(self, request: Request, parse: Callable[[Request, bytes], Awaitable[ParsedRequest]]) -> Response:
        """Responds to a request once its job has ended, however long that takes.

        Args:
            request: the request, whose body is not read yet.
            parse: parses the body. It may raise RequestError, or ValidationError if the job is invalid.
        """
        path: str = request.scope["path"]
        with traced_submission(request, path) as trace:
            body = await self.read(request)
            try:
                parsed = await parse(request, body)
            except ValidationError as error:
                raise invalid_job(problems(error)) from None
            del body  # it may have megabytes, and the answer may take minutes
            pending = await self._begin(self._pending_request(request, parsed))
            detached = parsed.detached
            del parsed
            trace.set_job(pending.sent.job.agent, pending.sent.execution_id)
            if detached is not None:
                response = await self._respond_detached(request, pending, trace.traceparent, detached)
            else:
                respond = self._stream if pending.sent.job.stream else self._respond_when_done
                response = await respond(request, pending, trace.traceparent)
            trace.set_status(response.status_code)
        return response

    async def _respond_when_done(self, request: Request, pending: PendingRequest, traceparent: str | None) -> Response:
        sent = pending.sent
        try:
            awaited, _ = await self._intake.follow(request, sent, traceparent, LONGEST_REQUEST_S)
            with awaited:
                if pending.accepted is not None:
                    await pending.accepted(sent)
                if pending.drop_texts():
                    release_room(request)
                result = await awaited.decided
                has_left = awaited.has_left
        except BaseException:
            await self._shared_jobs.leave(pending, cancels=False)
            raise
        if result is None or has_left:
            await self._shared_jobs.leave(pending, cancels=False)
        if result is None:
            raise stopping_error(sent.execution_id)
        result = await self._lookup.explain(caller_of(request), result)
        response = self._writer.response(pending, orjson.loads(result))
        if pending.request_key is not None and not has_left:
            response.background = BackgroundTask(self._shared_jobs.forget, pending)
        return response

    async def _respond_detached(
        self,
        request: Request,
        pending: PendingRequest,
        traceparent: str | None,
        respond: Callable[[Request, Submission, bool], Awaitable[Response]],
    ) -> Response:
        try:
            duplicate = await self._intake.store(pending.sent, traceparent)
            response = await respond(request, pending.sent, duplicate)
        except (BusError, StateUnavailableError) as error:
            await self._shared_jobs.leave(pending, cancels=False)
            raise unavailable("unavailable", f"the job may have been accepted; send it again: {error}") from error
        except BaseException:
            await self._shared_jobs.leave(pending, cancels=False)
            raise
        # Equal requests find this one until its response is sent; that of a stream they find until it expires.
        response.background = BackgroundTask(self._shared_jobs.forget, pending)
        response.headers.update(option_headers({"execution-id": pending.sent.execution_id}, ()))
        return response

    async def _stream(self, request: Request, pending: PendingRequest, traceparent: str | None) -> Response:
        """Responds once the answer has begun or the job is decided. Until then, an error is a response of its own."""
        sent = pending.sent
        streamed = StreamedRequest(pending, self._intake, self._shared_jobs, self._connection)
        keepalive_s = self._config.agents[sent.job.agent].keepalive_before_answer_s
        decided = await streamed.begin(request, traceparent, keepalive_s)
        if decided is None:
            headers = self._writer.begun_headers(pending, streamed.first_message)
            return streamed.response(headers, self._writer)
        result: dict[str, Any] = orjson.loads(await self._lookup.explain(caller_of(request), decided))
        if with_error_as_answer(result)["status"] == "succeeded" or pending.answer.fails_in_stream(result):
            return streamed.response(self._writer.result_headers(pending, result), self._writer, result)
        await streamed.close(all_sent=True)
        if pending.repeats and (result.get("cancellation") or {}).get("by") == CLIENT_LEFT:
            # The client that left is the client of this request, and has come back: it gets a job of its own.
            own_request = replace(pending, sent=pending.authorize(None, pending.request_id), repeats=False)
            return await self._stream(request, await self._begin(own_request), traceparent)
        return self._writer.response(pending, result)

    def _pending_request(self, request: Request, parsed: ParsedRequest) -> PendingRequest:
        caller = caller_of(request)
        headers = request.headers
        job = parsed.job
        authorize = partial(self._intake.authorize, caller, job, job.model_dump_json(exclude_unset=True).encode())
        request_id = REQUEST_ID.get()
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
        return PendingRequest(
            sent=sent,
            answer=parsed.answer,
            accepted=parsed.accepted,
            path=request.scope["path"],
            request_id=request_id,
            key_id=caller.id,
            request_key=":".join((caller.id, sent.digest, idempotency_key or "")) if recorded else None,
            attaches=has_key or retries not in {None, "0"},
            repeats=retries not in {None, "0"},
            cancels=cancels,
            authorize=authorize,
        )

    async def _begin(self, pending: PendingRequest) -> PendingRequest:
        """Returns a request with the job that it waits for, compared and admitted: its own, or that of an equal one."""
        pending = await self._shared_jobs.attach(pending)
        try:
            sent = await self._intake.compare(pending.sent)
            await self._intake.admit(sent)
        except BaseException:
            await self._shared_jobs.leave(pending, cancels=False)
            raise
        return pending if sent is pending.sent else replace(pending, sent=sent)
