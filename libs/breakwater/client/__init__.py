"""The client of Breakwater's HTTP API: `Client`, and `AsyncClient` for asyncio, for programs that submit jobs.

    with Client("http://127.0.0.1:8080", api_key) as client:
        print(client.run(Job(agent="content-writer", prompt="Write a haiku about harbours.")).output)

Every request that submits a job carries the job's id, so a repeated request is the same job, which is never paid for
twice. Both clients are built on `ApiClient`, which repeats nothing; the command line and the console use it directly.

ApiError                        a request without a usable response
  ApiUnavailableError           no response came
  UnexpectedResponseError       a response that Breakwater does not write: another version of it, or another server
  ApiRefusedError               an error response
    ApiKeyRefusedError          401: the API key is missing, wrong or revoked
JobFailedError                  a job that ended without success; its `result` has the reason and the cost
TimeoutError                    the caller's time limit is over; the job goes on
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterable, Mapping, Sized
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from decimal import Decimal
from functools import partial, wraps
from types import MappingProxyType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeAlias, TypeVar, Union
from urllib.parse import quote

import aiohttp
from pydantic import SecretStr, TypeAdapter, ValidationError
from yarl import URL

from breakwater.dialects.contract.openai import CallOptions
from breakwater.jobs.contract.execution import Execution, ExecutionList, ExecutionQuery, ExecutionSummary, Result
from breakwater.jobs.contract.job import ChatMessage, Job
from breakwater.jobs.contract.submission import AcceptedJob, AcceptedPlan, CancelledJob, PlanRequest, PlanStatus
from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.ids import new_id

__all__ = [
    "AcceptedPlan",
    "ApiClient",
    "ApiError",
    "ApiKeyRefusedError",
    "ApiRefusedError",
    "ApiUnavailableError",
    "AsyncClient",
    "BatchItem",
    "BatchProgress",
    "CancelledJob",
    "ChatMessage",
    "Client",
    "Execution",
    "ExecutionQuery",
    "ExecutionSummary",
    "Job",
    "JobBatch",
    "JobFailedError",
    "JobStream",
    "PlanRequest",
    "PlanStatus",
    "Result",
    "UnexpectedResponseError",
]

P = ParamSpec("P")
T = TypeVar("T")
Query = Mapping[str, str | int | float | None]
"""Query parameters. Those that are None or empty are not sent."""

Form: TypeAlias = type[T] | tuple[type[T], ...]
"""A message class of `contracts`, or several classes, one of which fits the response."""

CONNECT_TIMEOUT_S = 3.0
READ_TIMEOUT_S = 5.0
ACT_TIMEOUT_S = 15.0
"""The time limit of requests that change something, and of a stream's first byte."""

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})

STREAM_SILENCE_S = 60.0
"""The longest silence of a stream, to which the API sends something every 15 s."""

DEFAULT_URL = "http://127.0.0.1:8080"
RETRY_FOR_S = 60.0
IN_FLIGHT = 64

_WAIT_S = 30.0
"""The time that one request waits for a result: proxies close connections that are silent for a minute."""
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_UNAVAILABLE = frozenset({502, 503, 504})
"""Statuses of Breakwater, or of a proxy in front of it, with which a job was not accepted, or may not have been."""


class ApiError(BreakwaterError):
    """A request has no usable response.

    Attributes:
        status: the HTTP status, or the one that fits best if no response came.
        code: a stable code for programs, such as `unknown_breaker` or `unreachable`.
        message: the message for people.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


class ApiUnavailableError(ApiError):
    """No response came.

    Attributes:
        connected: True if a connection was made, so that the request may have been carried out.
    """

    def __init__(self, message: str, *, connected: bool) -> None:
        super().__init__(503, "unreachable", message)
        self.connected = connected


class UnexpectedResponseError(ApiError):
    """The response is not Breakwater's: the URL is wrong, or the versions differ."""

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(status, "http", problem)


class ApiRefusedError(ApiError):
    """The API refused the request, or could not carry it out.

    Attributes:
        details: the single mistakes, as `(path, message)`; the path of a field, or empty for the whole body.
        headers: the response's headers; the case of their names does not matter.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        details: tuple[tuple[str, str], ...] = (),
        headers: Mapping[str, str] = _NO_HEADERS,
    ) -> None:
        super().__init__(status, code, message)
        self.details = details
        self.headers = headers


class ApiKeyRefusedError(ApiRefusedError):
    """The API key is missing, wrong or revoked."""


@dataclass(frozen=True, slots=True)
class ApiResponse:
    """A response below 400: its status, and its body as JSON."""

    status: int
    document: Any


class ApiClient:
    """The HTTP API of one plane, used with one API key.

    Connects at the first request. Paths are below `/api/v1/`, unless they begin with a slash, and already
    percent-encoded. All methods raise ApiError.

    Args:
        url: the URL of the `request` service, such as `http://127.0.0.1:8080`.
        api_key: the key that is sent with each request; None sends none.
        most_requests: the most requests at the same time; further ones wait, within their time limit. 0 for no limit.
            Streams have none.
    """

    def __init__(self, url: str, api_key: SecretStr | str | None = None, *, most_requests: int = 100) -> None:
        self.url = url.rstrip("/")
        self.api_key = api_key
        self._most_requests = most_requests
        self._pools: dict[int, aiohttp.ClientSession] = {}

    def with_key(self, api_key: SecretStr | str) -> Self:
        """Returns the same API over the same connections, used with another key."""
        clone = copy.copy(self)
        clone.api_key = api_key
        return clone

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections, also those of other keys."""
        while self._pools:
            await self._pools.popitem()[1].close()

    async def get(self, path: str, query: Query | None = None, *, timeout_s: float = READ_TIMEOUT_S) -> Any:
        """Reads a resource, as JSON."""
        return (await self.request("GET", path, query=query, timeout_s=timeout_s)).document

    async def read(
        self, form: Form[T], path: str, query: Query | None = None, *, timeout_s: float = READ_TIMEOUT_S
    ) -> T:
        """Reads a resource, as one of the messages of `contracts`."""
        return parse(form, await self.get(path, query, timeout_s=timeout_s))

    async def text(self, path: str, query: Query | None = None, *, timeout_s: float = READ_TIMEOUT_S) -> str:
        """Reads a resource that is no JSON, such as CSV."""
        _, content = await self._send("GET", path, query=query, body=None, timeout_s=timeout_s)
        return content.decode()

    async def post(
        self, path: str, body: Mapping[str, object], *, method: str = "POST", timeout_s: float = ACT_TIMEOUT_S
    ) -> Any:
        """Carries out an action, and returns its result as JSON. Fields of the body that are None are not sent.

        A DELETE has no body, so the fields are sent as its query.
        """
        fields = {name: value for name, value in body.items() if value is not None}
        if method == "DELETE":
            query = {name: str(value) for name, value in fields.items()}
            return (await self.request(method, path, query=query, timeout_s=timeout_s)).document
        return (await self.request(method, path, body=fields, timeout_s=timeout_s)).document

    async def act(
        self,
        form: Form[T],
        path: str,
        body: Mapping[str, object],
        *,
        method: str = "POST",
        timeout_s: float = ACT_TIMEOUT_S,
    ) -> T:
        """Carries out an action, and returns its result as one of the messages of `contracts`."""
        return parse(form, await self.post(path, body, method=method, timeout_s=timeout_s))

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Query | None = None,
        body: Mapping[str, object] | None = None,
        timeout_s: float = READ_TIMEOUT_S,
    ) -> ApiResponse:
        """Sends one request. `body` is sent as JSON, whole; `timeout_s` bounds the request with its response."""
        status, content = await self._send(method, path, query=query, body=body, timeout_s=timeout_s)
        try:
            return ApiResponse(status, json.loads(content))
        except ValueError as error:
            raise UnexpectedResponseError(status, _not_ours(status)) from error

    async def await_decision(
        self, method: str, path: str, body: Mapping[str, object] | None = None, *, wait_s: float
    ) -> ApiResponse:
        """Asks for the result of a job, which `body` may submit: status 202 if it has none within `wait_s`."""
        query = {"wait_s": wait_s or None}
        return await self.request(method, path, query=query, body=body, timeout_s=wait_s + ACT_TIMEOUT_S)

    async def _send(
        self, method: str, path: str, *, query: Query | None, body: Mapping[str, object] | None, timeout_s: float
    ) -> tuple[int, bytes]:
        """Returns the status, below 400, and the body."""
        session = self._pool(self._most_requests)
        request = session.request(method, self._url(path, query), data=_encode(body), headers=self._headers())
        async with self._request(request, timeout_s) as (response, _):
            return response.status, await response.read()

    @asynccontextmanager
    async def open_stream(
        self,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        headers: Mapping[str, str] = _NO_HEADERS,
        begins_within_s: float = ACT_TIMEOUT_S,
    ) -> AsyncGenerator[aiohttp.StreamReader]:
        """Opens a resource that is written line by line, and yields its body. Arguments as for `open_response`."""
        async with self.open_response(path, body, headers=headers, begins_within_s=begins_within_s) as response:
            yield response.content

    @asynccontextmanager
    async def open_response(
        self,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        headers: Mapping[str, str] = _NO_HEADERS,
        begins_within_s: float = ACT_TIMEOUT_S,
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Opens a resource whose body may be long, and yields the response with its headers.

        Args:
            path: the path of the resource.
            body: the body to post as JSON; None to get the resource.
            headers: further headers of the request.
            begins_within_s: the time limit until the response begins.
        """
        silence_s = max(STREAM_SILENCE_S, begins_within_s)
        request = self._pool(0).request(
            "GET" if body is None else "POST",
            self._url(path, None),
            data=_encode(body),
            headers={**self._headers(), **headers},
            timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT_S, sock_read=silence_s),
        )
        async with self._request(request, begins_within_s) as (response, until_it_begins):
            if response.status != 200:
                raise UnexpectedResponseError(response.status, _not_ours(response.status))
            until_it_begins.reschedule(None)
            yield response

    @asynccontextmanager
    async def _request(
        self, request: AbstractAsyncContextManager[aiohttp.ClientResponse], timeout_s: float
    ) -> AsyncGenerator[tuple[aiohttp.ClientResponse, asyncio.Timeout]]:
        """Yields the response, with a status below 400, and the time limit of a request. Raises ApiError."""
        try:
            async with asyncio.timeout(timeout_s) as limit, request as response:
                if response.status >= 400:
                    raise _error_of(response.status, await response.read(), response.headers)
                yield response, limit
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            connected = not isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
            problem = "no response from" if connected else "no server at"
            cause = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
            raise ApiUnavailableError(f"{problem} {self.url}: {cause}", connected=connected) from error

    def _pool(self, limit: int) -> aiohttp.ClientSession:
        """Returns a pool of at most `limit` connections (0: unlimited), opened when first used, shared by all keys."""
        if limit not in self._pools:
            self._pools[limit] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=limit),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            )
        return self._pools[limit]

    def _url(self, path: str, query: Query | None) -> URL:
        parameters = {name: str(value) for name, value in (query or {}).items() if value not in (None, "")}
        # Encoded already: an id may hold slashes, which must arrive as they are.
        return URL(self.url + (path if path[0] == "/" else f"/api/v1/{path}"), encoded=True).update_query(parameters)

    def _headers(self) -> dict[str, str]:
        key = self.api_key.get_secret_value() if isinstance(self.api_key, SecretStr) else self.api_key
        return {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}


class JobFailedError(BreakwaterError):
    """A job ended without success.

    Attributes:
        result: the job's result, with its `status`, `reason`, `error`, attempts and costs.
    """

    def __init__(self, result: Result) -> None:
        cause = result.reason or result.status if result.error is None else result.error.message
        super().__init__(f"job {result.job_id!r} of agent {result.agent!r}: {result.status}: {cause}")
        self.result = result


@dataclass(frozen=True, slots=True)
class BatchItem:
    """A job of a batch that has ended.

    Attributes:
        job: the job as it was submitted, with its id.
        result: its result; None if it was not accepted, or its result could not be read.
        error: its error; None if it succeeded.
    """

    job: Job
    result: Result | None
    error: ApiError | JobFailedError | None


@dataclass(slots=True)
class BatchProgress:
    """Progress of a batch.

    Attributes:
        total: the number of jobs; None for jobs from an iterator.
        succeeded: the number of jobs that have succeeded.
        failed: the number of jobs that have failed.
        cost_usd: the known cost of the jobs that have ended.
    """

    total: int | None
    succeeded: int = 0
    failed: int = 0
    cost_usd: Decimal = Decimal(0)

    @property
    def done(self) -> int:
        """The number of jobs that have ended."""
        return self.succeeded + self.failed

    def count(self, item: BatchItem) -> None:
        """Counts a job that has ended."""
        self.succeeded += item.error is None
        self.failed += item.error is not None
        self.cost_usd += (item.result and item.result.cost_usd) or 0


class AsyncClient(ApiClient):
    """Submits jobs to one plane, with one API key. Connects at the first request, within a running event loop.

    Args:
        url: the URL of the request service. [default: $BREAKWATER_URL, or that of `make up`]
        api_key: a key with the scope `submit`, or `read` for executions. [default: $BREAKWATER_API_KEY]
        retry_for_s: how long a request is repeated that got no response, or was not accepted at the moment.
    """

    iterate: Callable[[AsyncGenerator[Any]], Generator[Any]] | None = None
    """Iterates over an asynchronous generator without asyncio; `Client` sets it."""

    def __init__(self, url: str | None = None, api_key: str | None = None, *, retry_for_s: float = RETRY_FOR_S) -> None:
        key = api_key or os.environ.get("BREAKWATER_API_KEY")
        super().__init__(url or os.environ.get("BREAKWATER_URL") or DEFAULT_URL, key, most_requests=0)
        self._retry_for_s = retry_for_s

    async def submit(self, job: Job) -> str:
        """Submits a job, and returns its id once the plane has stored it. Raises ApiError if it was not accepted."""
        return (await self._ask(AcceptedJob, "POST", "jobs", body=_body(_with_id(job)))).job_id

    async def wait(self, job_id: str, *, timeout_s: float | None = None) -> Result:
        """Waits for the result of a job that was accepted.

        Raises:
            JobFailedError: it ended without success.
            TimeoutError: it has not ended in time, and goes on.
            ApiError: its result can't be read.
        """
        async with _within(timeout_s, job_id):
            while True:
                response = await self._repeating(
                    lambda: self.await_decision("GET", f"jobs/{quote(job_id, safe='')}", wait_s=_WAIT_S)
                )
                if response.status == 200:
                    return _parse_success(response)

    async def run(self, job: Job, *, timeout_s: float | None = None) -> Result:
        """Submits a job, and waits for its result. Raises JobFailedError, TimeoutError, ApiError."""
        job_with_id = _with_id(job)
        job_id = str(job_with_id.job_id)
        async with _within(timeout_s, job_id):
            response = await self._repeating(
                lambda: self.await_decision("POST", "jobs", _body(job_with_id), wait_s=_WAIT_S)
            )
            return _parse_success(response) if response.status == 200 else await self.wait(job_id)

    async def cancel(self, job_id: str, *, reason: str | None = None) -> CancelledJob:
        """Cancels a job: it makes no further call, and a call in flight is aborted.

        All that wait for the job get JobFailedError. A job that has ended already stays as it is. Raises ApiError.
        """
        body = {} if reason is None else {"reason": reason}
        return await self._ask(CancelledJob, "POST", f"jobs/{quote(job_id, safe='')}/cancel", body=body)

    def stream(self, job: Job, *, timeout_s: float = 300.0) -> JobStream:
        """Returns the text of a job while it is produced. The job is submitted when the stream is first read.

        Args:
            job: a job with a prompt or messages.
            timeout_s: the time limit until the text begins.
        """
        return JobStream(self, _with_id(job), self._retry_for_s, timeout_s)

    def batch(self, jobs: Iterable[Job], *, in_flight: int = IN_FLIGHT) -> JobBatch:
        """Returns many jobs, each when it has ended. They are submitted when the batch is read.

        Args:
            jobs: the jobs. Those without an id get one; with your own ids, an interrupted batch can be run again.
            in_flight: the most jobs that are submitted and have not ended.
        """
        return JobBatch(self, jobs, in_flight)

    async def executions(self, query: ExecutionQuery | None = None) -> AsyncGenerator[ExecutionSummary]:
        """Yields the executions that match, the latest first, page by page as they are read.

        Args:
            query: the filter; `limit` is the size of a page, and `after` the beginning. [default: all executions]
        """
        page = query or ExecutionQuery()
        while True:
            parameters = page.model_dump(mode="json", exclude_defaults=True)
            execution_list = await self._ask(ExecutionList, "GET", "executions", query=parameters)
            for execution in execution_list.executions:
                yield execution
            if execution_list.older is None:
                return
            page = page.model_copy(update={"after": execution_list.older})

    async def execution(self, execution_id: str) -> Execution:
        """Returns the record of an execution, with its attempts. Raises ApiError, with status 404 if there is none."""
        return await self._ask(Execution, "GET", f"executions/{quote(execution_id, safe='')}")

    async def submit_plan(self, plan: PlanRequest) -> AcceptedPlan:
        """Submits the jobs of a plan, all or none. Raises ApiError if they were not accepted."""
        plan_with_id = plan.model_copy(update={"plan_id": plan.plan_id or new_id()})
        return await self._ask(AcceptedPlan, "POST", "plans", body=_body(plan_with_id))

    async def plan(self, plan_id: str) -> PlanStatus:
        """Returns the current state of a plan, with its jobs. Raises ApiError."""
        return await self._ask(PlanStatus, "GET", f"plans/{quote(plan_id, safe='')}")

    async def _ask(
        self,
        form: type[T],
        method: str,
        path: str,
        *,
        query: Query | None = None,
        body: Mapping[str, object] | None = None,
    ) -> T:
        timeout_s = _WAIT_S if method == "GET" else ACT_TIMEOUT_S
        send = partial(self.request, method, path, query=query, body=body, timeout_s=timeout_s)
        return parse(form, (await self._repeating(send)).document)

    async def _repeating(self, send: Callable[[], Awaitable[ApiResponse]]) -> ApiResponse:
        retries = _Retries(self._retry_for_s)
        while True:
            try:
                return await send()
            except ApiError as error:
                await retries.pause(error)


class _Items(ABC, Generic[T]):
    """Items that come one by one: by `async for` with an `AsyncClient`, by `for` with a `Client`."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    @abstractmethod
    def __aiter__(self) -> AsyncGenerator[T]: ...

    def __iter__(self) -> Generator[T]:
        if self._client.iterate is None:
            raise TypeError(f"a {type(self).__name__} of an AsyncClient is read with `async for`")
        return self._client.iterate(aiter(self))


class JobStream(_Items[str]):
    """A job's text, piece by piece.

    If the connection breaks, the same job is requested again, and its text continues where it broke off. Reading raises
    JobFailedError, also after some of the text, TimeoutError and ApiError. If the reading ends early, the job goes on.

    Attributes:
        job_id: the job's id.
        text: all pieces so far.
    """

    def __init__(self, client: AsyncClient, job: Job, retry_for_s: float, timeout_s: float) -> None:
        if job.input is not None:
            raise ValueError("a job with `input` can't be streamed; give it a prompt or messages")
        super().__init__(client)
        self.job_id = str(job.job_id)
        self.text = ""
        self._result: Result | None = None
        self._retry_for_s = retry_for_s
        self._job = job
        self._timeout_s = timeout_s

    async def __aiter__(self) -> AsyncGenerator[str]:
        begins_by = time.monotonic() + self._timeout_s
        retries = _Retries(self._retry_for_s)
        while True:
            try:
                async with aclosing(self._response(begins_by)) as pieces:
                    async for piece in pieces:
                        retries = _Retries(self._retry_for_s)
                        self.text += piece
                        yield piece
                break
            except ApiError as error:
                if not self.text and time.monotonic() >= begins_by:
                    raise _too_late(self.job_id, self._timeout_s) from error
                if isinstance(error, ApiRefusedError) and "x-breakwater-attempts" in error.headers:
                    break  # the job has ended without an answer
                await retries.pause(error)
        self._result = await self._client.wait(self.job_id)

    @property
    def result(self) -> Result:
        """The result of the job. Raises ValueError if the text has not been read to its end."""
        if self._result is None:
            raise ValueError("there is no result yet: read the stream to its end first")
        return self._result

    async def _response(self, begins_by: float) -> AsyncGenerator[str]:
        """Yields the new text of one response, which begins with the known text if the job was requested again."""
        repeated = self.text
        begins_within_s = max(begins_by - time.monotonic(), ACT_TIMEOUT_S if repeated else 0.0)
        job = self._job
        headers = {"Idempotency-Key": self.job_id}
        body = {
            **job.params,
            "model": job.agent if job.model is None else f"{job.agent}/{job.model}",
            "messages": job.chat_messages(),
            "stream": True,
            "breakwater": job.model_dump(mode="json", exclude_unset=True, include=set(CallOptions.model_fields)),
        }
        response = self._client.open_stream(
            "/v1/chat/completions", body, headers=headers, begins_within_s=begins_within_s
        )
        async with response as content, aclosing(_events(content)) as chunks:
            async for chunk in chunks:
                if (error := chunk.get("error")) is not None:
                    # Any other error ended the job, and is in its result, too.
                    if error["code"] == "unavailable":
                        raise ApiUnavailableError(error["message"], connected=True)
                    return
                piece = "".join(
                    choice["delta"].get("content") or "" for choice in chunk["choices"] if choice["index"] == 0
                )
                if piece[: len(repeated)] != repeated[: len(piece)]:
                    raise UnexpectedResponseError(
                        200, f"job {self.job_id!r} has a different answer from the one that was being streamed"
                    )
                new_text = piece[len(repeated) :]
                repeated = repeated[len(piece) :]
                if new_text:
                    yield new_text


class JobBatch(_Items[BatchItem]):
    """Jobs in the order in which they end.

    Nothing is raised for a job that fails or is refused: its item has the error. If the reading ends early, no more
    jobs are submitted, and submitted ones go on.

    Attributes:
        progress: the progress of the batch.
    """

    def __init__(self, client: AsyncClient, jobs: Iterable[Job], in_flight: int) -> None:
        if in_flight < 1:
            raise ValueError(f"in_flight must be at least 1 (found {in_flight})")
        super().__init__(client)
        self.progress = BatchProgress(len(jobs) if isinstance(jobs, Sized) else None)
        self._jobs = iter(jobs)
        self._in_flight = in_flight

    async def __aiter__(self) -> AsyncGenerator[BatchItem]:
        running: set[asyncio.Task[BatchItem]] = set()
        ended: asyncio.Queue[asyncio.Task[BatchItem]] = asyncio.Queue()
        try:
            while True:
                while len(running) < self._in_flight and (job := next(self._jobs, None)) is not None:
                    task = asyncio.create_task(self._run(_with_id(job)))
                    task.add_done_callback(ended.put_nowait)
                    running.add(task)
                if not running:
                    return
                task = await ended.get()
                running.discard(task)
                item = task.result()
                self.progress.count(item)
                yield item
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _run(self, job: Job) -> BatchItem:
        try:
            return BatchItem(job, await self._client.run(job), None)
        except JobFailedError as failed:
            return BatchItem(job, failed.result, failed)
        except ApiError as error:
            return BatchItem(job, None, error)


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    """Returns a method of `Client` that waits for one of `AsyncClient`."""

    @wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._call(method(self._client, *args, **kwargs))  # pyright: ignore[reportPrivateUsage]

    return call


class Client:
    """`AsyncClient` for programs without asyncio, and for notebooks. May be used by several threads."""

    def __init__(self, url: str | None = None, api_key: str | None = None, *, retry_for_s: float = RETRY_FOR_S) -> None:
        self._client = AsyncClient(url, api_key, retry_for_s=retry_for_s)
        self._client.iterate = self._each
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="breakwater-client", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections. The client can't be used any more."""
        if not self._loop.is_closed():
            self._call(self._client.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    submit = _blocking(AsyncClient.submit)
    wait = _blocking(AsyncClient.wait)
    run = _blocking(AsyncClient.run)
    cancel = _blocking(AsyncClient.cancel)
    execution = _blocking(AsyncClient.execution)
    submit_plan = _blocking(AsyncClient.submit_plan)
    plan = _blocking(AsyncClient.plan)

    def stream(self, job: Job, *, timeout_s: float = 300.0) -> JobStream:
        """Returns the text of a job while it is produced, as `AsyncClient.stream`."""
        return self._client.stream(job, timeout_s=timeout_s)

    def batch(self, jobs: Iterable[Job], *, in_flight: int = IN_FLIGHT) -> JobBatch:
        """Returns many jobs, each when it has ended, as `AsyncClient.batch`."""
        return self._client.batch(jobs, in_flight=in_flight)

    def executions(self, query: ExecutionQuery | None = None) -> Generator[ExecutionSummary]:
        """Yields the executions that match, the latest first, as `AsyncClient.executions`."""
        return self._each(self._client.executions(query))

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # if the caller was interrupted

    def _each(self, items: AsyncGenerator[T]) -> Generator[T]:
        async def following() -> tuple[T] | None:
            async for item in items:
                return (item,)
            return None

        try:
            while (following_item := self._call(following())) is not None:
                yield following_item[0]
        finally:
            self._call(items.aclose())


class _Retries:
    """The pauses between the tries of a request."""

    def __init__(self, for_s: float) -> None:
        self._for_s = for_s
        self._until: float | None = None
        self._pause_s = _FIRST_PAUSE_S

    async def pause(self, error: ApiError) -> None:
        """Waits before the next try; raises the error if there is none."""
        pause_s = self._pause_s * random.uniform(0.5, 1.0)  # noqa: S311  spreads clients, and is no secret
        may_pass = isinstance(error, ApiUnavailableError) or error.code == "too_many_requests"
        # A breaker that refuses a job (`agent_unavailable`) would refuse it again.
        may_pass = may_pass or (error.status in _UNAVAILABLE and error.code != "agent_unavailable")
        if isinstance(error, ApiRefusedError):
            may_pass = may_pass and error.headers.get("x-should-retry") != "false"
            pause_s += _retry_after_s(error.headers) or 0.0
        self._until = self._until or time.monotonic() + self._for_s
        if not may_pass or time.monotonic() + pause_s > self._until:
            raise error
        await asyncio.sleep(pause_s)
        self._pause_s = min(self._pause_s * 2, _LONGEST_PAUSE_S)


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Returns the wait that a response asks for: to the tenth of a second if it comes from Breakwater."""
    for name, per_second in (("retry-after-ms", 1000), ("Retry-After", 1)):
        if (value := headers.get(name, "")).isdecimal():
            return int(value) / per_second
    return None


def _with_id(job: Job) -> Job:
    """Returns the job with an id, so that it is the same job however often it is sent."""
    return job if job.job_id is not None else job.model_copy(update={"job_id": new_id()})


def _body(form: Job | PlanRequest) -> dict[str, Any]:
    return form.model_dump(mode="json", exclude_unset=True)


def _parse_success(response: ApiResponse) -> Result:
    result = parse(Result, response.document)
    if result.status != "succeeded":
        raise JobFailedError(result)
    return result


@asynccontextmanager
async def _within(timeout_s: float | None, job_id: str) -> AsyncGenerator[None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise _too_late(job_id, timeout_s) from error


def _too_late(job_id: str, timeout_s: float | None) -> TimeoutError:
    return TimeoutError(f"job {job_id!r} has no answer after {timeout_s:g} s and keeps running")


async def _events(content: aiohttp.StreamReader) -> AsyncGenerator[dict[str, Any]]:
    """Yields the data of server-sent events, to the last one. Raises ApiUnavailableError if the stream breaks off."""
    incomplete_line = b""
    while True:
        async with asyncio.timeout(STREAM_SILENCE_S):
            data = await content.readany()
        if not data:
            raise ApiUnavailableError("the stream ended early", connected=True)
        *lines, incomplete_line = (incomplete_line + data).split(b"\n")
        for line in lines:
            if line == b"data: [DONE]":
                return
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))


def parse(form: Form[T], document: Any) -> T:
    """Reads a JSON document as one of the messages of `contracts`. Raises UnexpectedResponseError."""
    model: Any = Union[form] if isinstance(form, tuple) else form  # noqa: UP007  of as many as there are
    try:
        return TypeAdapter[T](model).validate_python(document)
    except ValidationError as error:
        raise UnexpectedResponseError(200, _not_ours(200)) from error


def _encode(body: Mapping[str, object] | None) -> bytes | None:
    # The standard library's json, because jobs may contain integers beyond 64 bits.
    return None if body is None else json.dumps(body, ensure_ascii=False).encode()


def _error_of(status: int, body: bytes, headers: Mapping[str, str]) -> ApiError:
    try:
        error = json.loads(body)["error"]
        code = str(error["code"])
        message = str(error["message"])
        details = tuple((str(detail["path"]), str(detail["message"])) for detail in error.get("details", ()))
    except (ValueError, KeyError, TypeError):
        return UnexpectedResponseError(status, _not_ours(status))
    return (ApiKeyRefusedError if status == 401 else ApiRefusedError)(status, code, message, details, headers)


def _not_ours(status: int) -> str:
    return f"the response ({status}) does not come from Breakwater's HTTP API; check the URL"
