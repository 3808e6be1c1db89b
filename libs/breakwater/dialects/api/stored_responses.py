"""Stored responses over HTTP: read, followed, cancelled and deleted by any client, at any replica."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from typing import Any, Literal

import orjson
from pydantic import Field, JsonValue
from starlette.requests import Request
from starlette.responses import Response

from breakwater.dialects.api.pending_request import ApiAnswer, ParsedRequest
from breakwater.dialects.api.response_store import ResponseStore, echoed_request_of, listed_items, outages_as, readable
from breakwater.dialects.contract.openai import ResponseObject
from breakwater.dialects.contract.stored_response import StoredResponse
from breakwater.dialects.rules.responses_answer import EchoedRequest, pending_response, response_of
from breakwater.dialects.rules.responses_stream import ContradictionError, ResponseEvent, ResponseEvents, event_bytes
from breakwater.dialects.store.response_log import DELETED
from breakwater.identity.audit import AuditLog, actor_of
from breakwater.identity.auth import caller_of
from breakwater.identity.event_stream import Ending, FollowedStream, OpenStreams, Sender, comment
from breakwater.identity.operations import TOO_MANY, operation
from breakwater.identity.rules.callers import Caller
from breakwater.jobs.api.cancels import Cancels
from breakwater.jobs.api.submission import Submission
from breakwater.jobs.contract.execution import Cancellation, PendingCancel
from breakwater.jobs.contract.job import Job
from breakwater.jobs.rules.chat_messages import encode_json
from breakwater.kernel.http.bodies import take_room
from breakwater.kernel.http.parsing import read_query
from breakwater.kernel.http.problems import RequestError, not_done, not_read
from breakwater.kernel.nats.errors import BusUnavailableError
from breakwater.kernel.security.encryption import DecryptionError
from breakwater.kernel.types import Event, Message

CANCEL_WAIT_S = 5.0
"""Time for which a cancel waits for the result. A call under way is aborted within a second."""

LOOK_S = 5.0
"""Interval at which the log is read while no live messages come, as a lost connection loses them."""

RETRY_S = 0.5
"""Interval at which a reader asks NATS again while it does not answer."""

MAX_FOLLOWED = 5_000
"""The most streams of responses in one process."""

MAX_UNREAD = 1_000
"""The most messages that a reader may be behind. Beyond that, it reads them in the log."""

_IGNORED = ("include", "include[]")
"""Parameters that ask for more fields. They have no effect, as everything stored is returned."""

NOT_FOUND = "There is no such response for this key (`response_not_found`)."


class DeletedResponse(Event):
    """The acknowledgement of a deletion."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ResponseQuery(Message):
    """Parameters of reading a response."""

    stream: bool = Field(default=False, description="True to follow a background response as server-sent events.")
    starting_after: int | None = Field(
        default=None, ge=0, description="With `stream`: only events after this `sequence_number`."
    )
    include_obfuscation: bool | None = Field(default=None, description="Ignored: no padding is sent.")


class InputItemsQuery(Message):
    """A page of input items."""

    limit: int = Field(default=20, ge=1, le=100, description="Items on a page.")
    order: Literal["asc", "desc"] = Field(default="desc", description="`asc`: the oldest first.")
    after: str | None = Field(default=None, description="Id of the last item of the page before.")
    before: str | None = Field(default=None, description="Id of the first item of the page after.")


class InputItems(Event):
    """A page of input items."""

    object: Literal["list"] = "list"
    data: list[dict[str, JsonValue]]
    first_id: str | None
    last_id: str | None
    has_more: bool


@dataclass(frozen=True, slots=True)
class StoredResponseRoutes:
    """The API of stored responses."""

    store: ResponseStore
    cancels: Cancels
    streams: OpenStreams
    audit: AuditLog

    def parsed_request(
        self,
        job: Job,
        answer: ApiAnswer,
        echo: Callable[[Submission], EchoedRequest],
        previous: tuple[str, ...],
        *,
        streams: bool,
        size: int,
    ) -> ParsedRequest:
        """Returns a parsed request that stores itself, if the client wants that.

        Args:
            job: the request as a job.
            answer: writes the response to a request that waits for it.
            echo: returns the request itself, whose body has only the input of this response.
            previous: the executions that it continues.
            streams: the client of a background response follows it immediately.
            size: the size of the request, in bytes.
        """

        async def save(sent: Submission) -> None:
            echoed = echo(sent)
            if echoed.store:
                await self.store.keep_if_possible(sent, echoed, previous, size)

        async def respond(request: Request, sent: Submission, duplicate: bool) -> Response:
            if not duplicate:
                await self.store.begin(sent)
            stored = await self.store.keep(sent, echo(sent), previous)
            if stored.deleted:
                raise RequestError(409, "id_conflict", "the response with this id was deleted; choose another id")
            if streams:
                return self.follow(request, stored)
            if duplicate:
                return _json(await self.store.response(stored))
            return _json(pending_response(echoed_request_of(stored), "queued"))

        if job.keep_chunks:
            return ParsedRequest(job, answer, detached=respond)
        return ParsedRequest(job, answer, accepted=save)

    @operation(
        "GET",
        "/v1/responses/{response_id}",
        tag="openai",
        summary="Read a stored response",
        description="The response as it is now, while its result is kept (`limits.results_max_age_h`). With `stream`, "
        "the events of a background response from its first one on, or after `starting_after`: the same events in "
        "every stream, at every replica. A stream that ends without a last event (`response.completed`, "
        "`response.incomplete`, `response.failed`) was interrupted: follow it again.",
        query=ResponseQuery,
        results={200: ("The response; with `stream`, its events.", ResponseObject)},
        errors={
            400: "A parameter is wrong, or the response was not created in the background (`invalid_request`).",
            404: NOT_FOUND,
            429: TOO_MANY,
            503: "It can't be read now (`unavailable`, `undecryptable`).",
        },
    )
    async def get_response(self, request: Request) -> Response:
        """Responds with the response, or with its stream."""
        query = read_query(request, ResponseQuery, _IGNORED)
        with outages_as(not_read):
            stored = await self._find(request)
            if not query.stream:
                if query.starting_after is not None:
                    raise RequestError(400, "invalid_request", "starting_after: is only allowed with `stream`")
                return _json(await self.store.response(stored))
            if not stored.background:
                message = "stream: only a response that was created with `background` can be followed"
                raise RequestError(400, "invalid_request", message)
            await self.store.result(stored)  # raises 404 if it has expired
        return self.follow(request, stored, query.starting_after)

    def follow(self, request: Request, stored: StoredResponse, starting_after: int | None = None) -> Response:
        """Streams the events of a response after a sequence number, or from the first one."""
        return _ResponseFollower(self.streams, self.store, request, stored, starting_after)

    @operation(
        "POST",
        "/v1/responses/{response_id}/cancel",
        tag="openai",
        summary="Cancel a background response",
        description="A call under way is aborted within a second, and recorded with what it may have cost. Repeating "
        "the request, or cancelling a response that has ended, returns the response.",
        results={200: ("The response.", ResponseObject)},
        errors={
            400: "The response was not created in the background (`invalid_request`).",
            404: NOT_FOUND,
            429: TOO_MANY,
            503: "NATS or Redis is unavailable (`unavailable`). Repeating the request is safe.",
        },
    )
    async def cancel_response(self, request: Request) -> Response:
        """Cancels a response, and responds with it."""
        with outages_as(not_done):
            stored = await self._find(request)
            if not stored.background:
                message = "only a response that was created with `background` can be cancelled"
                raise RequestError(400, "invalid_request", message)
            async with self._audit(request, "cancel_job", stored):
                result = await self.store.result(stored)
                if result is None:
                    result = await self._cancel(caller_of(request), stored, wait_s=CANCEL_WAIT_S)
        echoed = echoed_request_of(stored)
        return _json(pending_response(echoed, "in_progress") if result is None else response_of(echoed, result))

    @operation(
        "DELETE",
        "/v1/responses/{response_id}",
        tag="openai",
        summary="Delete a stored response",
        description="Its request and its stored chunks are deleted, it can't be read or continued any more, and one "
        "that is under way is cancelled. The execution stays on record, as does the job's result until it expires.",
        results={200: ("It is deleted.", DeletedResponse)},
        errors={404: NOT_FOUND, 503: "NATS or Redis is unavailable (`unavailable`). Repeating the request is safe."},
    )
    async def delete_response(self, request: Request) -> Response:
        """Responds with 200 once the response is deleted."""
        with outages_as(not_done):
            stored = await self._find(request)
            async with self._audit(request, "delete_response", stored):
                if await self._is_undecided(stored):
                    await self._cancel(caller_of(request), stored, wait_s=0.0)
                await self.store.log.delete(stored)
        return _json({"id": request.path_params["response_id"], "object": "response", "deleted": True})

    @operation(
        "GET",
        "/v1/responses/{response_id}/input_items",
        tag="openai",
        summary="List the input items of a stored response",
        description="With those of the conversation that it continues.",
        query=InputItemsQuery,
        results={200: ("A page.", InputItems)},
        errors={400: "The agent keeps no prompts, or a parameter is wrong (`invalid_request`).", 404: NOT_FOUND},
    )
    async def list_input_items(self, request: Request) -> Response:
        """Lists a page of items."""
        query = read_query(request, InputItemsQuery, _IGNORED)
        with outages_as(not_read):
            stored = await self._find(request)
            input_items = await self.store.input_items(stored, partial(take_room, request))
        items = listed_items(stored.job_id, input_items)
        if query.order == "desc":
            items.reverse()
        for name, item_id in (("after", query.after), ("before", query.before)):
            if item_id is None:
                continue
            place = next((number for number, item in enumerate(items) if item["id"] == item_id), None)
            if place is None:
                raise RequestError(400, "invalid_request", f"{name}: {item_id!r} is not an item of this response")
            items = items[place + 1 :] if name == "after" else items[:place]
        page = items[: query.limit]
        ends = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        more = len(items) > len(page)
        return _json({"object": "list", "data": page, "first_id": ends[0], "last_id": ends[1], "has_more": more})

    async def _find(self, request: Request) -> StoredResponse:
        return await self.store.find(caller_of(request), request.path_params["response_id"])

    async def _is_undecided(self, stored: StoredResponse) -> bool:
        return await self.store.lookup.results.find_decision(stored.execution_id) is None

    @asynccontextmanager
    async def _audit(self, request: Request, action: str, stored: StoredResponse) -> AsyncGenerator[None]:
        """Records an operator's action. If a program cancels its own job, the job's record says so."""
        caller = caller_of(request)
        async with AsyncExitStack() as stack:
            if caller.may(("operate",)):
                # Without the id that the caller chose, which may name a person: nobody may delete from AUDIT.
                details = {"execution_id": stored.execution_id}
                await stack.enter_async_context(self.audit.action(action, actor_of(caller), details, None))
            yield

    async def _cancel(self, caller: Caller, stored: StoredResponse, *, wait_s: float) -> dict[str, Any] | None:
        """Cancels the job of a response. Returns its result if it ends within `wait_s`."""
        is_person = caller.kind == "person"
        job_id = stored.execution_id
        lookup = self.store.lookup
        cancellation = Cancellation(
            by="person" if is_person else "api_key",
            name=caller.name,
            key_id=None if is_person else caller.id,
            at=datetime.now(UTC),
        )
        with lookup.waiters.listen(job_id, wait_s=wait_s, check_first=bool(wait_s)) as awaited:
            await self.cancels.request(
                PendingCancel(execution_id=job_id, cancellation=cancellation, agents=caller.agents or (stored.agent,))
            )
            if not wait_s:
                return None
            decided = await awaited.decided
        return None if decided is None else orjson.loads(decided)


class _ChunkQueue:
    """Messages of chunks that were received live and are not read yet. Putting one never waits."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self._messages: deque[dict[str, Any]] = deque(maxlen=MAX_UNREAD)

    def put(self, data: bytes) -> None:
        """Adds a received message."""
        self._messages.append(orjson.loads(data))
        self.changed.set()

    def after(self, number: int) -> list[dict[str, Any]] | None:
        """Returns the messages after the one with a number; None if some were missed."""
        while self._messages and self._messages[0]["number"] <= number:
            self._messages.popleft()
        messages = list(self._messages)
        if any(message["number"] != expected for expected, message in enumerate(messages, number + 1)):
            return None
        self._messages.clear()
        return messages


class _ResponseFollower(FollowedStream):
    """The stream of a background response: first from the log, then live, with missed messages from the log."""

    def __init__(
        self,
        streams: OpenStreams,
        store: ResponseStore,
        request: Request,
        stored: StoredResponse,
        starting_after: int | None,
    ) -> None:
        super().__init__(streams, request)
        self._store = store
        self._stored = stored
        self._after = -1 if starting_after is None else starting_after
        self._queue = _ChunkQueue()
        self._encoder = ResponseEvents(echoed_request_of(stored))
        self._number = self._sequence = 0
        """The number of the last message that was read, and its sequence in the log, as far as that is known."""

    @asynccontextmanager
    async def open_source(self, ending: Ending) -> AsyncGenerator[Callable[[Sender], Coroutine[Any, Any, None]]]:
        """Subscribes to the chunks and the result."""
        del ending
        async with self._store.chunk_subscription(self._stored, self._queue.put):
            with self._store.lookup.waiters.listen(self._stored.execution_id, check_first=True) as awaited:
                yield partial(self._write, awaited.decided)

    async def _write(self, deciding: asyncio.Future[bytes | None], sender: Sender) -> None:
        deciding.add_done_callback(lambda _: self._queue.changed.set())
        try:
            await self._emit(sender, self._encoder.begin())
            # The log is read first: the result may be stored, and live messages continue what is stored.
            look_at = 0.0
            while True:
                self._queue.changed.clear()
                decided = deciding.done()
                reads_log = decided or time.monotonic() >= look_at
                live = None if reads_log else self._queue.after(self._number)
                try:
                    messages = await self._from_log(whole=decided) if live is None else live
                except BusUnavailableError:
                    await asyncio.sleep(RETRY_S)
                    await sender.send_due_comment()
                    continue
                if messages or reads_log:
                    look_at = time.monotonic() + LOOK_S
                await self._emit(sender, chain.from_iterable(self._read(messages)))
                if decided:
                    break
                await self._wait(sender, look_at)
            result = deciding.result()
            if result is None:
                await sender.send(comment("the service stops; follow the response again"), more=False)
                return
            await self._emit(sender, self._encoder.end(readable(orjson.loads(result))), more=False)
        except (_ExpiredError, ContradictionError, DecryptionError, RequestError) as error:
            code = "undecryptable" if isinstance(error, DecryptionError | RequestError) else "unavailable"
            message = str(error) or "the stored chunks are those of another answer; read the response"
            await self._emit(sender, self._encoder.error(code, message), more=False)

    async def _from_log(self, *, whole: bool) -> list[dict[str, Any]]:
        log = self._store.log
        execution_id = self._stored.execution_id
        number, sequence = await log.end(execution_id)
        if number == self._number:
            self._sequence = sequence
            return []
        messages, self._sequence = await log.messages(execution_id, after=self._sequence, whole=whole)
        if messages and messages[-1]["type"] == DELETED:
            raise _ExpiredError("the response was deleted")
        return [message for message in messages if message["number"] > self._number]

    def _read(self, messages: Iterable[dict[str, Any]]) -> Iterable[list[ResponseEvent]]:
        for message in messages:
            if message["number"] != self._number + 1:
                raise _ExpiredError("some of the stored chunks have expired; read the response")
            self._number = message["number"]
            yield from map(self._encoder.add, message["chunks"])

    async def _wait(self, sender: Sender, look_at: float) -> None:
        """Waits until there is something to read, or it is time to read the log for missed messages."""
        due_s = min(max(look_at - time.monotonic(), 0.0), sender.silence.comment_due_s())
        timer = asyncio.get_running_loop().call_later(due_s, self._queue.changed.set)
        try:
            await self._queue.changed.wait()
        finally:
            timer.cancel()
        await sender.send_due_comment()

    async def _emit(self, sender: Sender, events: Iterable[ResponseEvent], *, more: bool = True) -> None:
        data = b"".join(event_bytes(event) for event in events if event["sequence_number"] > self._after)
        if data or not more:
            await sender.send(data, more=more)


class _ExpiredError(RequestError):
    """The stored chunks can't be read any more."""

    def __init__(self, message: str) -> None:
        super().__init__(404, "response_not_found", message)


def _json(content: object) -> Response:
    return Response(encode_json(content), media_type="application/json")
