"""Stored responses: the request, the conversation that it continues, and the response as it is now."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson
import structlog
from pydantic import JsonValue

from breakwater.config import Config
from breakwater.dialects.contract.stored_response import StoredResponse
from breakwater.dialects.rules.chat_completions import with_error_as_answer
from breakwater.dialects.rules.responses_answer import (
    EchoedRequest,
    Item,
    item_id,
    job_id_of,
    output_of,
    pending_response,
    response_of,
)
from breakwater.dialects.store.response_log import ResponseLog
from breakwater.dialects.store.response_room import SHARE, NoRoom, ResponseRoom
from breakwater.identity.rules.callers import Caller
from breakwater.jobs.api.results import JobLookup
from breakwater.jobs.api.submission import Submission
from breakwater.jobs.rules.chat_messages import encode_json, fields
from breakwater.jobs.rules.ids import possible_executions
from breakwater.jobs.rules.ownership import may_see, store_share
from breakwater.jobs.store.records import is_result_of
from breakwater.kernel.http.problems import RequestError, not_read, unavailable
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.core import ClientGetter, core_subscription
from breakwater.kernel.nats.errors import BusError
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.nats.topology import LONGEST_JOB_S
from breakwater.kernel.redis.connection import StateUnavailableError
from breakwater.kernel.security.encryption import Cipher, DecryptionError
from breakwater.kernel.types import is_identifier
from breakwater.kernel.validation import FieldError

MAX_TURNS = 1_000
"""The most responses in a conversation of stored responses."""

MAX_ENDED = 50
"""The most responses whose notes one request removes because they have ended without their workers saying so."""

STORED_BYTES = 1_000
"""The bytes that a stored request takes in addition to its body."""

_TEXTS = frozenset({"input", "instructions", "prompt", "tools", "text"})
"""Fields of a request that are not stored if its agent keeps no prompts."""


@dataclass(frozen=True, slots=True)
class EarlierItems:
    """The conversation that a response continues.

    Attributes:
        items: all items, the oldest first.
        executions: the executions that they come from, the oldest first.
    """

    items: list[JsonValue]
    executions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResponseStore:
    """Stored responses of this config's agents."""

    config: Config
    log: ResponseLog
    lookup: JobLookup
    connection: ClientGetter
    cipher: Cipher
    room: ResponseRoom

    async def take_room(self, share: str, size: int) -> None:
        """Reserves room in RESPONSES for a request. While Redis does not answer, there is room for all.

        Args:
            share: the share that the request counts against (`store_share`).
            size: the size of the request, in bytes.

        Raises:
            RequestError: 429, the owner has used its share; 503, the stream would drop a response that is under way.
        """
        max_bytes = self.config.limits.responses_max_bytes
        for _ in range(MAX_ENDED):
            try:
                refused = await self.room.take(share, size + STORED_BYTES, max_bytes)
                if refused is None:
                    return
                if refused.oldest is None or await self._is_under_way(refused.oldest):
                    raise _no_room(refused, max_bytes)
                # The oldest response has ended without its worker saying so.
                await self.room.finish(refused.oldest)
            except StateUnavailableError:
                return

    async def begin(self, sent: Submission) -> None:
        """Notes that a background response is under way."""
        with suppress(StateUnavailableError):
            await self.room.begin(sent.execution_id)

    async def _is_under_way(self, execution_id: str) -> bool:
        if await self.lookup.results.find_decision(execution_id) is not None:
            return False
        return await self.log.find(execution_id) is not None or (await self.log.end(execution_id))[1] > 0

    def check_background(self, agent: str) -> None:
        """Checks that a background answer of an agent can be stored. Raises RequestError: 400."""
        if not self.config.agents[agent].keeps_error_texts and not self.cipher.key_ids:
            message = (
                f"the agent {agent!r} stores no texts in plain (persist_prompts, persist_responses), and there is no "
                "key to encrypt a background answer with; set BREAKWATER_PLANE_KEY"
            )
            raise _wrong("background", message)

    async def keep(self, sent: Submission, echoed: EchoedRequest, previous: tuple[str, ...] = ()) -> StoredResponse:
        """Stores the request of an accepted job. Returns the stored response, which an earlier request may have stored.

        Args:
            sent: the job.
            echoed: its request, whose body has only the input of this response.
            previous: the executions that it continues.

        Raises:
            BusUnavailableError: the request may not be stored; repeating the request stores it.
        """
        agent = self.config.agents[sent.job.agent]
        keeps_prompts = agent.persist_prompts
        response = StoredResponse(
            execution_id=sent.execution_id,
            job_id=sent.job_id,
            agent=sent.job.agent,
            tenant=sent.job.tenant,
            owner=sent.owner,
            model=echoed.model,
            created_at=datetime.fromtimestamp(echoed.created_at, UTC),
            background=echoed.background,
            body={name: value for name, value in echoed.body.items() if keeps_prompts or name not in _TEXTS},
            keeps_input=keeps_prompts,
            previous_response_id=echoed.previous_response_id,
            previous=previous,
        )
        lasts = timedelta(hours=self.config.limits.results_max_age_h, seconds=LONGEST_JOB_S)
        return await self.log.keep(response, private=not agent.keeps_error_texts, lasts=lasts)

    async def keep_if_possible(
        self, sent: Submission, echoed: EchoedRequest, previous: tuple[str, ...], size: int
    ) -> None:
        """Stores the request of a job whose client waits for the answer, and only logs if that fails.

        Args:
            sent: the job.
            echoed: its request.
            previous: the executions that it continues.
            size: the size of the request, in bytes.
        """
        try:
            await self.take_room(store_share(sent.owner, sent.job.tenant), size)
            await self.keep(sent, echoed, previous)
        except (BusError, DecryptionError, RequestError) as error:
            structlog.get_logger().warning("response_not_stored", execution_id=sent.execution_id, error=str(error))

    async def find(self, caller: Caller, response_id: str) -> StoredResponse:
        """Finds a stored response of a caller. Raises RequestError: 404, also for a response of another caller."""
        job_id = job_id_of(response_id)
        for execution_id in possible_executions(caller, job_id) if job_id and is_identifier(job_id) else ():
            stored = await self.log.find(execution_id)
            if stored is not None and may_see(caller, agent=stored.agent, tenant=stored.tenant, owner=stored.owner):
                return stored
        message = f"there is no response {response_id!r}: it was never stored, has expired, or was deleted"
        raise RequestError(404, "response_not_found", message)

    async def conversation(
        self, caller: Caller, response_id: str, request_bytes: int, take_room: Callable[[int], Awaitable[None]]
    ) -> EarlierItems:
        """Reads the conversation up to and including a response.

        Args:
            caller: the sender of the request.
            response_id: the response.
            request_bytes: the size of the request that continues it.
            take_room: takes room in memory for its requests.

        Raises:
            RequestError: 404, there is no such response; 400, it can't be continued; 413, it is too large.
        """
        with outages_as(not_read):
            try:
                stored = await self.find(caller, response_id)
            except RequestError as error:
                raise _wrong("previous_response_id", error.message, 404, "previous_response_not_found") from None
            executions = (*stored.previous, stored.execution_id)
            if len(executions) > MAX_TURNS:
                raise _wrong("previous_response_id", f"the conversation has more than {MAX_TURNS} responses")
            items = await self._read_items(executions, take_room)
        size = len(encode_json(items)) + request_bytes
        limit = self.config.limits.max_body_bytes
        if size > limit:
            message = f"the conversation has {size} bytes with this request, over limits.max_body_bytes ({limit})"
            raise _wrong("previous_response_id", message, 413, "body_too_large")
        return EarlierItems(items, executions)

    async def input_items(self, stored: StoredResponse, take_room: Callable[[int], Awaitable[None]]) -> list[JsonValue]:
        """Reads all items that a response answers. Raises RequestError: 400, some of them are not stored."""
        try:
            executions = (*stored.previous, stored.execution_id)
            return await self._read_items(executions, take_room, last_result=False)
        except RequestError as error:
            raise RequestError(error.status, error.code, error.message.partition(": ")[2]) from None

    async def _read_items(
        self, executions: tuple[str, ...], take_room: Callable[[int], Awaitable[None]], *, last_result: bool = True
    ) -> list[JsonValue]:
        """Reads the items of a conversation.

        Args:
            executions: its executions, the oldest first.
            take_room: takes room in memory for its requests.
            last_result: include the output of the last execution.

        Raises:
            RequestError: 400, some items are missing.
        """
        stored = await self.log.find_all(executions, take_room)
        results = await self._results(executions if last_result else executions[:-1])
        items: list[JsonValue] = []
        for number, execution_id in enumerate(executions, 1):
            response = stored.get(execution_id)
            result = results.get(execution_id)
            response_name = f"resp_{execution_id if response is None else response.job_id}"
            if response is None or response.deleted:
                raise _not_continued(f"{response_name} of the conversation has expired or was deleted")
            if not response.keeps_input or response.encrypted is not None:
                raise _not_continued(
                    f"the agent {response.agent!r} keeps no prompts (persist_prompts: false), so the input of "
                    f"{response_name} is not kept; send all items in `input`"
                )
            items += input_of(response.body)
            if number == len(executions) and not last_result:
                break
            agent = self.config.agents.get(response.agent)
            if agent is not None and not agent.persist_responses:
                raise _not_continued(
                    f"the agent {response.agent!r} keeps no answers (persist_responses: false), so that of "
                    f"{response_name} is not kept; send all items in `input`"
                )
            if result is None:
                raise _not_continued(f"{response_name} has no answer yet, or it has expired (limits.results_max_age_h)")
            if result["status"] != "succeeded":
                raise _not_continued(f"{response_name} has no answer: it is {result['status']}")
            items += output_of(response.job_id, result)  # type: ignore[arg-type]
        return items

    async def _results(self, executions: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Returns the results of those executions that have one, by execution."""
        results: dict[str, dict[str, Any]] = {}
        result_subjects = list(map(subjects.result, executions))
        async with aclosing(Lookup(self.connection).last_on(Stream.RESULTS, result_subjects)) as messages:
            async for message in messages:
                result = with_error_as_answer(orjson.loads(self.cipher.decrypt_document(message.data)))
                results[result["execution_id"]] = result
        return results

    async def result(self, stored: StoredResponse) -> dict[str, Any] | None:
        """Reads the result of a response; None while there is none. Raises RequestError: 404, it has expired."""
        lookup = Lookup(self.connection, self.cipher)
        subject = subjects.result(stored.execution_id)
        message = await lookup.last(Stream.RESULTS, subject)
        if message is None:
            if await self.lookup.results.find_decision(stored.execution_id) is None:
                return None
            # Either the result has come just now, and only the leader has it, or it has expired before the record.
            message = await lookup.newest_on(Stream.RESULTS, subject)
        if message is None or not is_result_of(message.data, stored.execution_id):
            problem = "the answer has expired (limits.results_max_age_h); the execution is still on record"
            raise RequestError(404, "response_not_found", problem)
        return readable(orjson.loads(self.cipher.decrypt_document(message.data)))

    async def response(self, stored: StoredResponse) -> dict[str, Any]:
        """Returns the Response object as it is now. Raises RequestError: 404, it has expired."""
        echoed = echoed_request_of(stored)
        if (result := await self.result(stored)) is not None:
            if not stored.background:
                # The client that waited for the result got it with this time.
                echoed = replace(echoed, created_at=int(datetime.fromisoformat(result["queued_at"]).timestamp()))
            return response_of(echoed, result)
        status = await self.lookup.accepted.status(stored.execution_id, just_now=False)
        return pending_response(echoed, "in_progress" if status is not None and status.taken else "queued")

    @asynccontextmanager
    async def chunk_subscription(self, stored: StoredResponse, hear: Callable[[bytes], None]) -> AsyncGenerator[None]:
        """Passes the chunks of a response to `hear` while the block runs. Raises BusUnavailableError."""
        async with core_subscription(self.connection, subjects.chunks(stored.agent, stored.execution_id), hear):
            yield


@contextmanager
def outages_as(problem: Callable[[Exception], RequestError]) -> Generator[None]:
    """Turns an outage of NATS or Redis in the block into the RequestError that `problem` returns."""
    try:
        yield
    except (BusError, StateUnavailableError) as error:
        raise problem(error) from error


def echoed_request_of(stored: StoredResponse) -> EchoedRequest:
    """Returns the request of a stored response as its Response objects repeat it."""
    return EchoedRequest(
        job_id=stored.job_id,
        created_at=int(stored.created_at.timestamp()),
        model=stored.model,
        body=stored.body,
        background=stored.background,
        previous_response_id=stored.previous_response_id,
    )


def input_of(body: Mapping[str, JsonValue]) -> list[JsonValue]:
    """Returns the input of a request as items."""
    request_input = body.get("input")
    if isinstance(request_input, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": request_input}]}]
    return request_input if isinstance(request_input, list) else []


def listed_items(job_id: str, items: Sequence[JsonValue]) -> list[Item]:
    """Returns items of an input as they are listed: each with an id and a type."""
    listed: list[Item] = []
    for number, input_item in enumerate(items):
        item: Item = {"type": "message", **fields(input_item)}
        content = item.get("content")
        if item["type"] == "message" and isinstance(content, str):
            kind = "output_text" if item.get("role") == "assistant" else "input_text"
            part: Item = {"type": kind, "text": content}
            item["content"] = [part | ({"annotations": []} if kind == "output_text" else {})]
        if item["type"] == "message":
            item.setdefault("status", "completed")
        if not isinstance(item.get("id"), str):
            item["id"] = item_id(f"{job_id}:input", "msg" if item["type"] == "message" else "item", number)
        listed.append(item)
    return listed


def readable(result: dict[str, Any]) -> dict[str, Any]:
    """Returns a result as its client may read it. Raises RequestError: 503, its texts could not be encrypted."""
    result = with_error_as_answer(result)
    if result["status"] == "succeeded" and (why := result.get("encrypted")) is not None:
        raise unavailable("undecryptable", f"the text of the answer was {why}")
    return result


def _no_room(refused: NoRoom, max_bytes: int) -> RequestError:
    if refused.why == "share":
        share = int(max_bytes * SHARE)
        message = (
            f"the responses that this key or its tenant has stored take its share of {share} bytes; try again in ten "
            "minutes, or once the background responses under way have ended; or send `store: false` without "
            "`background`, or raise limits.responses_max_bytes"
        )
        return RequestError(429, "stored_responses_full", message, retry_after_s=60.0)
    message = (
        "RESPONSES is full of what was stored while background responses are under way; try again once they have "
        "ended, or raise limits.responses_max_bytes"
    )
    return RequestError(503, "stored_responses_full", message, retry_after_s=60.0)


def _wrong(param: str, message: str, status: int = 400, code: str = "invalid_request") -> RequestError:
    return RequestError(status, code, f"{param}: {message}", [FieldError(path=param, message=message)])


def _not_continued(message: str) -> RequestError:
    return _wrong("previous_response_id", message)
