"""The client of Breakwater's HTTP API, which the command line and the console share.

ApiError                  a request without a usable response
  ApiUnavailable          no response came
  UnexpectedResponse      a response that Breakwater does not write: another version of it, or another server
  ApiRefused              an error response
    ApiKeyRefused         401: the API key is missing, wrong or revoked
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self, TypeAlias, TypeVar, Union

import aiohttp
from pydantic import SecretStr, TypeAdapter, ValidationError
from yarl import URL

T = TypeVar("T")
Query = Mapping[str, str | int | float | None]
"""Query parameters. Those that are None or empty are not sent."""

Form: TypeAlias = type[T] | tuple[type[T], ...]
"""A message of `contracts`, or several of which the response is one."""

CONNECT_TIMEOUT_S = 3.0
READ_TIMEOUT_S = 5.0
ACT_TIMEOUT_S = 15.0
"""For requests that change something, and for the first byte of a stream."""
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})

STREAM_SILENCE_S = 60.0
"""A stream that is silent for longer has ended: the API sends something every 15 s."""


class ApiError(Exception):
    """A request has no usable response.

    Attributes:
        status: HTTP's, or the one that fits best where no response came.
        code: stable, for programs: `unknown_breaker`, `unreachable`, ….
        message: for people.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


class ApiUnavailable(ApiError):  # noqa: N818  named after the state, as BusUnavailable
    """No response came.

    Attributes:
        connected: whether a connection was made, so that the request may have been carried out all the same.
    """

    def __init__(self, message: str, *, connected: bool) -> None:
        super().__init__(503, "unreachable", message)
        self.connected = connected


class UnexpectedResponse(ApiError):  # noqa: N818  named after what it is
    """The response is none of Breakwater's: the URL is wrong, or the versions differ."""

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(status, "http", problem)


class ApiRefused(ApiError):  # noqa: N818  named after what happened
    """The API refused the request, or could not carry it out.

    Attributes:
        details: single mistakes, as `(path, message)`: a field path, empty for the whole body.
        headers: of the response; their names in any case.
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


class ApiKeyRefused(ApiRefused):
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
        url: where the `request` service listens, such as `http://127.0.0.1:8080`.
        api_key: sent with each request; None sends none.
        most_requests: at the same time; further ones wait, within their time. 0 for no limit. Streams have none.
    """

    def __init__(self, url: str, api_key: SecretStr | str | None = None, *, most_requests: int = 100) -> None:
        self.url = url.rstrip("/")
        self.api_key = api_key
        self._connections = _Connections(most_requests)

    def with_key(self, api_key: SecretStr | str) -> Self:
        """The same API over the same connections, used with another key."""
        other = copy.copy(self)
        other.api_key = api_key
        return other

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections, also those of other keys."""
        await self._connections.close()

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

    async def post(self, path: str, body: Mapping[str, object], *, timeout_s: float = ACT_TIMEOUT_S) -> Any:
        """Has an action carried out, and returns its result as JSON. Fields of the body that are None are not sent."""
        given = {name: value for name, value in body.items() if value is not None}
        return (await self.request("POST", path, body=given, timeout_s=timeout_s)).document

    async def act(self, form: Form[T], path: str, body: Mapping[str, object], *, timeout_s: float = ACT_TIMEOUT_S) -> T:
        """The same, with the result as one of the messages of `contracts`."""
        return parse(form, await self.post(path, body, timeout_s=timeout_s))

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
            raise UnexpectedResponse(status, _not_ours(status)) from error

    async def _send(
        self, method: str, path: str, *, query: Query | None, body: Mapping[str, object] | None, timeout_s: float
    ) -> tuple[int, bytes]:
        """The status, below 400, and the body."""
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._connections.requests().request(
                    method, self._url(path, query), data=_written(body), headers=self._headers()
                ) as response,
            ):
                status, content = response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unavailable(error) from error
        if status >= 400:
            raise _error_of(status, content, response.headers)
        return status, content

    @asynccontextmanager
    async def stream(
        self,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        headers: Mapping[str, str] = _NO_HEADERS,
        begins_within_s: float = ACT_TIMEOUT_S,
    ) -> AsyncGenerator[aiohttp.StreamReader]:
        """The body of a resource that is written line by line, for as long as it lasts.

        Args:
            path: of the resource.
            body: posted, as JSON, where the stream is the response to that.
            headers: of the request, too.
            begins_within_s: bounds the time until the response begins.
        """
        silence = aiohttp.ClientTimeout(
            sock_connect=CONNECT_TIMEOUT_S, sock_read=max(STREAM_SILENCE_S, begins_within_s)
        )
        try:
            async with (
                asyncio.timeout(begins_within_s) as until_it_begins,
                self._connections.streams().request(
                    "GET" if body is None else "POST",
                    self._url(path, None),
                    data=_written(body),
                    headers={**self._headers(), **headers},
                    timeout=silence,
                ) as response,
            ):
                if response.status != 200:
                    raise _error_of(response.status, await response.read(), response.headers)
                until_it_begins.reschedule(None)
                yield response.content
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unavailable(error) from error

    def _url(self, path: str, query: Query | None) -> URL:
        given = {name: str(value) for name, value in (query or {}).items() if value not in (None, "")}
        # Encoded already: an id may hold slashes, which must arrive as they are.
        return URL(self.url + (path if path[0] == "/" else f"/api/v1/{path}"), encoded=True).update_query(given)

    def _headers(self) -> dict[str, str]:
        key = self.api_key.get_secret_value() if isinstance(self.api_key, SecretStr) else self.api_key
        return {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}

    def _unavailable(self, error: Exception) -> ApiUnavailable:
        connected = not isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
        what = "no response came from" if connected else "nothing answers at"
        why = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
        return ApiUnavailable(f"{what} {self.url}: {why}", connected=connected)


class _Connections:
    """Two pools, opened when first used: one for requests, and one without bounds for streams, which stay open long."""

    def __init__(self, most_requests: int) -> None:
        self._most = most_requests
        self._requests: aiohttp.ClientSession | None = None
        self._streams: aiohttp.ClientSession | None = None

    def requests(self) -> aiohttp.ClientSession:
        if self._requests is None:
            self._requests = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._most),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            )
        return self._requests

    def streams(self) -> aiohttp.ClientSession:
        if self._streams is None:
            self._streams = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._streams

    async def close(self) -> None:
        sessions = (self._requests, self._streams)
        self._requests = self._streams = None
        for session in sessions:
            if session is not None:
                await session.close()


def parse(form: Form[T], document: Any) -> T:
    """A JSON document as one of the messages of `contracts`. Raises UnexpectedResponse."""
    whole: Any = Union[form] if isinstance(form, tuple) else form  # noqa: UP007  of as many as there are
    try:
        return TypeAdapter[T](whole).validate_python(document)
    except ValidationError as error:
        raise UnexpectedResponse(200, _not_ours(200)) from error


def _written(body: Mapping[str, object] | None) -> bytes | None:
    # The standard library's json, as what people submit may hold integers of more than 64 bits.
    return None if body is None else json.dumps(body, ensure_ascii=False).encode()


def _error_of(status: int, body: bytes, headers: Mapping[str, str]) -> ApiError:
    try:
        error = json.loads(body)["error"]
        code, message = str(error["code"]), str(error["message"])
        details = tuple((str(one["path"]), str(one["message"])) for one in error.get("details", ()))
    except (ValueError, KeyError, TypeError):
        return UnexpectedResponse(status, _not_ours(status))
    return (ApiKeyRefused if status == 401 else ApiRefused)(status, code, message, details, headers)


def _not_ours(status: int) -> str:
    return f"the HTTP API's response ({status}) is none of Breakwater's; is it the right URL?"
