"""OpenAI's Responses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, ClassVar

import orjson
from pydantic import JsonValue
from starlette.requests import Request
from starlette.responses import Response

from breakwater.dialects.api.pending_request import ParsedRequest
from breakwater.dialects.api.request_handler import ModelRequestHandler
from breakwater.dialects.api.request_options import OPENAI_ERRORS, REQUEST_HEADERS, options_of
from breakwater.dialects.api.response_store import input_of
from breakwater.dialects.api.stored_responses import StoredResponseRoutes
from breakwater.dialects.contract.openai import ResponseObject, ResponsesRequest
from breakwater.dialects.rules.chat_completions import is_overflow
from breakwater.dialects.rules.responses_answer import EchoedRequest, response_of
from breakwater.dialects.rules.responses_stream import ContradictionError, ResponseEvents, event_bytes
from breakwater.identity.auth import caller_of
from breakwater.identity.operations import operation
from breakwater.jobs.api.submission import Submission
from breakwater.jobs.contract.job import Job, NativeRequest
from breakwater.jobs.rules.chat_messages import encode_json
from breakwater.jobs.rules.ownership import for_own_tenant, owner_of, store_share
from breakwater.kernel.http.bodies import take_room
from breakwater.kernel.http.parsing import read_command
from breakwater.kernel.http.problems import RequestError
from breakwater.kernel.validation import FieldError

PLANE_FIELDS = frozenset(
    {"background", "breakwater", "conversation", "model", "previous_response_id", "stream", "stream_options"}
)
"""Fields that the plane handles itself. All others belong to the provider's request."""


class ResponsesRoutes:
    """The API of Responses."""

    def __init__(self, handler: ModelRequestHandler, stored: StoredResponseRoutes) -> None:
        self._handler = handler
        self._stored = stored

    @operation(
        "POST",
        "/v1/responses",
        tag="openai",
        summary="Create a response, as at OpenAI",
        description="Each call is a job. A provider with `api: responses` gets the body as it is, and the response is "
        "its own object with the plane's id. For all other providers the body is translated to chat completions, and "
        "the answer back; a field that can't be translated is refused by name. With `stream`, the response is the "
        "specification's semantic events, with `sequence_number`. With `background`, the response is returned "
        "immediately, and does not end with its client. Headers as with chat completions.",
        headers=REQUEST_HEADERS,
        body=ResponsesRequest,
        results={200: ("The answer.", ResponseObject)},
        errors={
            **OPENAI_ERRORS,
            400: "The request is invalid; `param` is the field at fault. Or it is too long for the model "
            "(`context_length_exceeded`), can't be translated for a provider of chat completions, or the provider "
            "refuses it (`invalid_request`).",
            404: "There is no such agent or model for this key (`model_not_found`), or no response with the id of "
            "`previous_response_id` (`previous_response_not_found`).",
        },
    )
    async def create_response(self, request: Request) -> Response:
        """Responds once the job has ended, however long that takes, or immediately to a background request."""
        return await self._handler.respond(request, self._parse)

    async def _parse(self, request: Request, body: bytes) -> ParsedRequest:
        parsed = read_command(body, ResponsesRequest)
        if parsed.conversation is not None:
            raise _objection("conversation", "conversations are not kept here; send the items, or previous_response_id")
        background = bool(parsed.background)
        previous_id = parsed.previous_response_id
        agent, model = self._handler.agent_of(request, parsed.model)
        if background:
            if parsed.store is False:
                raise _objection("background", "needs `store`: the answer is read from the store")
            self._stored.store.check_background(agent)
        options = options_of(request.headers, parsed.breakwater).model_dump(exclude_unset=True)
        native = parsed.model_dump(mode="json", exclude_unset=True, exclude=set(PLANE_FIELDS))
        job_fields: dict[str, Any] = {} if model is None else {"model": model}
        if parsed.stream or background:
            job_fields["stream"] = True
        if background:
            job_fields["keep_chunks"] = True
        full_body = native
        previous_executions = ()
        if previous_id is not None:
            earlier = await self._stored.store.conversation(
                caller_of(request), previous_id, len(body), partial(take_room, request)
            )
            full_body = {**native, "input": [*earlier.items, *input_of(native)]}
            previous_executions = earlier.executions
        job = Job(
            agent=agent,
            api_request=NativeRequest(api="responses", body=full_body),
            include_response=True,
            **job_fields,
            **options,
        )
        answer = ResponseAnswer(
            parsed.model,
            native,
            background=background,
            store=parsed.store is not False,
            previous_response_id=previous_id,
        )
        size = len(body) + sum(map(len, previous_executions))
        if background:
            caller = caller_of(request)
            share = store_share(owner_of(caller), for_own_tenant(caller, job).tenant)
            await self._stored.store.take_room(share, size)
        return self._stored.parsed_request(
            job, answer, answer.echoed_request, previous_executions, streams=bool(parsed.stream), size=size
        )


def _objection(param: str, why: str) -> RequestError:
    return RequestError(400, "invalid_request", f"{param}: {why}", [FieldError(path=param, message=why)])


@dataclass(frozen=True, slots=True)
class ResponseAnswer:
    """The response to a request: a Response object, or its events.

    Attributes:
        model: the requested model, as the client named it.
        native: the body of the request.
        background: the response does not end with its client.
        store: the response can be read later.
        previous_response_id: the response that it continues.
        created_at: the time in seconds since the epoch.
    """

    model: str
    native: Mapping[str, JsonValue]
    background: bool = False
    store: bool = True
    previous_response_id: str | None = None
    created_at: int = field(default_factory=lambda: int(time.time()))

    def echoed_request(self, sent: Submission, created_at: int | None = None) -> EchoedRequest:
        """Returns the request as the response repeats it."""
        return EchoedRequest(
            job_id=sent.job_id,
            created_at=created_at or self.created_at,
            model=self.model,
            body=self.native,
            background=self.background,
            store=self.store,
            previous_response_id=self.previous_response_id,
        )

    def body(self, sent: Submission, result: dict[str, Any]) -> bytes:
        """Writes a `response`. All requests for the same job get the same one."""
        created_at = int(datetime.fromisoformat(result["queued_at"]).timestamp())
        return encode_json(response_of(self.echoed_request(sent, created_at), result))

    def encoder(self, sent: Submission) -> ResponseEncoder:
        """Returns an encoder of chunks."""
        return ResponseEncoder(self.echoed_request(sent))

    def fails_in_stream(self, result: dict[str, Any]) -> bool:
        """Returns True for a request that is too long.

        Codex shortens its conversation only after the event `response.failed`.
        """
        return is_overflow(result)


class ResponseEncoder:
    """The events of one response."""

    keep_alive: ClassVar[bytes] = b": still here\n\n"

    def __init__(self, echoed_request: EchoedRequest) -> None:
        self._events = ResponseEvents(echoed_request)
        self._begun = False

    def events(self, chunks: Iterable[dict[str, Any]]) -> bytes:
        """Writes the events of chunks, after those that begin the response."""
        events = self._begin()
        for chunk in chunks:
            events += self._events.add(chunk)
        return b"".join(map(event_bytes, events))

    def end(
        self, result: dict[str, Any] | None, *, complete: bool, error: Callable[[dict[str, Any] | None], bytes]
    ) -> bytes:
        """Writes the rest of the answer, and its last event, which is `error` if the process stops."""
        events = self._begin()
        try:
            events += self._error_events(error) if result is None else self._events.end(result, complete=complete)
        except ContradictionError:
            # The job was decided by another answer than the one that was begun here.
            events += self._error_events(error)
        return b"".join(map(event_bytes, events))

    def _begin(self) -> list[dict[str, Any]]:
        if self._begun:
            return []
        self._begun = True
        return self._events.begin()

    def _error_events(self, error: Callable[[dict[str, Any] | None], bytes]) -> list[dict[str, Any]]:
        problem = orjson.loads(error(None))["error"]
        return self._events.error(problem["code"], problem["message"])
