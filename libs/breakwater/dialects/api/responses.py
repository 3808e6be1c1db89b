"""OpenAI's Responses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar

import orjson
from pydantic import JsonValue
from starlette.requests import Request
from starlette.responses import Response

from breakwater.dialects.api.calls import OPENAI_ERRORS, Calls, ParsedCall, options_of
from breakwater.dialects.api.response_store import input_of
from breakwater.dialects.api.stored_responses import StoredResponseRoutes
from breakwater.dialects.contract.openai import ResponseObject, ResponsesRequest
from breakwater.dialects.rules.chat_completions import is_overflow
from breakwater.dialects.rules.responses_answer import Asked, response_of
from breakwater.dialects.rules.responses_stream import ContradictionError, ResponseEvents, event_bytes
from breakwater.identity.auth import caller_of
from breakwater.jobs.api.submission import Submission
from breakwater.jobs.contract.job import Job, NativeRequest
from breakwater.jobs.rules.chat_messages import encoded
from breakwater.jobs.rules.ownership import for_own_tenant, owner_of, store_share
from breakwater.kernel.http.operations import operation
from breakwater.kernel.http.parsing import read_command
from breakwater.kernel.http.problems import RequestError
from breakwater.kernel.validation import FieldError

OF_PLANE = frozenset(
    {"background", "breakwater", "conversation", "model", "previous_response_id", "stream", "stream_options"}
)
"""Fields that the plane answers for; all others are of the provider's request."""


class ResponsesRoutes:
    """Responses."""

    def __init__(self, calls: Calls, stored: StoredResponseRoutes) -> None:
        self._calls = calls
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
        headers={
            "Idempotency-Key": "The job's id: 1 to 128 characters of printable ASCII.",
            "x-breakwater-tenant": "As `breakwater.tenant` in the body, which comes first; so for the other options.",
            "x-session-id": "Same as `breakwater.session_id`: calls of a session are shown as one run.",
            "traceparent": "W3C trace context that the job becomes a part of. Calls of one trace are one run, if they "
            "name no task and no session.",
        },
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
        """The response, once the job has ended, however long that takes."""
        return await self._calls.respond(request, self._parsed)

    async def _parsed(self, request: Request, body: bytes) -> ParsedCall:
        asked = read_command(body, ResponsesRequest)
        if asked.conversation is not None:
            raise _refused("conversation", "conversations are not kept here; send the items, or previous_response_id")
        background = bool(asked.background)
        previous_id = asked.previous_response_id
        agent, model = self._calls.agent_of(request, asked.model)
        if background:
            if asked.store is False:
                raise _refused("background", "needs `store`: the answer is read from the store")
            self._stored.store.check_background(agent)
        options = options_of(request.headers, asked.breakwater).model_dump(exclude_unset=True)
        native = asked.model_dump(mode="json", exclude_unset=True, exclude=set(OF_PLANE))
        named: dict[str, Any] = {} if model is None else {"model": model}
        if asked.stream or background:
            named["stream"] = True
        if background:
            named["keep_chunks"] = True
        whole = native
        previous = ()
        if previous_id is not None:
            earlier = await self._stored.store.conversation(caller_of(request), previous_id, len(body))
            whole = {**native, "input": [*earlier.items, *input_of(native)]}
            previous = earlier.executions
        job = Job(
            agent=agent,
            api_request=NativeRequest(api="responses", body=whole),
            include_response=True,
            **named,
            **options,
        )
        answer = ResponseAnswer(
            asked.model,
            native,
            background=background,
            store=asked.store is not False,
            previous_response_id=previous_id,
        )
        size = len(body) + sum(map(len, previous))
        if background:
            caller = caller_of(request)
            share = store_share(owner_of(caller), for_own_tenant(caller, job).tenant)
            await self._stored.store.take_room(share, size)
        return self._stored.call(job, answer, answer.asked, previous, streams=bool(asked.stream), size=size)


def _refused(param: str, why: str) -> RequestError:
    return RequestError(400, "invalid_request", f"{param}: {why}", [FieldError(path=param, message=why)])


@dataclass(frozen=True, slots=True)
class ResponseAnswer:
    """A Response object, or its events.

    Attributes:
        model: that was asked for, in the client's words.
        native: the body of the request.
        background: it does not end with its client.
        store: it can be read later.
        previous_response_id: the response that it continues.
        created_at: seconds since the epoch.
    """

    model: str
    native: Mapping[str, JsonValue]
    background: bool = False
    store: bool = True
    previous_response_id: str | None = None
    created_at: int = field(default_factory=lambda: int(time.time()))

    def asked(self, sent: Submission, created_at: int | None = None) -> Asked:
        """The request, as the response repeats it."""
        return Asked(
            job_id=sent.shown_id,
            created_at=created_at or self.created_at,
            model=self.model,
            body=self.native,
            background=self.background,
            store=self.store,
            previous_response_id=self.previous_response_id,
        )

    def body(self, sent: Submission, result: dict[str, Any]) -> bytes:
        """A `response`. The same job has the same one for every request."""
        created_at = int(datetime.fromisoformat(result["queued_at"]).timestamp())
        return encoded(response_of(self.asked(sent, created_at), result))

    def encoder(self, sent: Submission) -> ResponseEncoder:
        """Encodes chunks."""
        return ResponseEncoder(self.asked(sent))

    def fails_in_stream(self, result: dict[str, Any]) -> bool:
        """True for a request that is too long: Codex shortens its conversation only at the event `response.failed`."""
        return is_overflow(result)


class ResponseEncoder:
    """The events of one response."""

    keep_alive: ClassVar[bytes] = b": still here\n\n"

    def __init__(self, asked: Asked) -> None:
        self._events = ResponseEvents(asked)
        self._begun = False

    def events(self, chunks: Iterable[dict[str, Any]]) -> bytes:
        """The events that chunks mean, after those of the beginning."""
        found = self._begin()
        for chunk in chunks:
            found += self._events.add(chunk)
        return b"".join(map(event_bytes, found))

    def end(
        self, result: dict[str, Any] | None, *, whole: bool, error: Callable[[dict[str, Any] | None], bytes]
    ) -> bytes:
        """The rest of the answer, and its last event: `error` where the process stops."""
        found = self._begin()
        try:
            found += self._stopped(error) if result is None else self._events.end(result, whole=whole)
        except ContradictionError:
            # Another answer decided the job than the one that was begun here.
            found += self._stopped(error)
        return b"".join(map(event_bytes, found))

    def _begin(self) -> list[dict[str, Any]]:
        if self._begun:
            return []
        self._begun = True
        return self._events.begin()

    def _stopped(self, error: Callable[[dict[str, Any] | None], bytes]) -> list[dict[str, Any]]:
        said = orjson.loads(error(None))["error"]
        return self._events.error(said["code"], said["message"])
