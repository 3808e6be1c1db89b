"""Breakwater's own HTTP interface, asked with the key of whoever is signed in.

The console has no rights of its own: what somebody may see and do is decided where it is for every other program, and
what is done by hand goes on record under their key's name.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiohttp
import orjson
from pydantic import SecretStr, TypeAdapter, ValidationError
from yarl import URL

T = TypeVar("T")

CONNECT_TIMEOUT_S = 3.0
READ_TIMEOUT_S = 5.0
"""What is only looked at: a page shows the rest without it."""
ANSWER_TIMEOUT_S = 15.0
"""What is done, or begins to be told."""
SILENT_S = 60.0
"""A stream that says nothing for so long has ended: the interface says something every 15 s."""


class DoorError(Exception):
    """The interface refused, or could not do it.

    Attributes:
        status: HTTP's.
        code: such as `unknown_breaker`.
        message: for people, with what to do.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


class SignedOut(DoorError):  # noqa: N818  a state of things
    """The key is not known any more."""


class Unreachable(DoorError):  # noqa: N818  a state of things
    """Nothing answers there, or nothing that can be understood."""

    def __init__(self, message: str) -> None:
        super().__init__(503, "unreachable", message)


class Door:
    """The interface of one plane."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._http: aiohttp.ClientSession | None = None
        self._streams: aiohttp.ClientSession | None = None

    async def get(
        self,
        key: SecretStr,
        path: str,
        parameters: Mapping[str, str | int | None] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Any:
        """What is at a path below `/api/v1/`, as JSON.

        Args:
            key: whose.
            path: such as `breakers`.
            parameters: of the query; those that are None or empty are not sent.
            timeout_s: how long it may take; READ_TIMEOUT_S by default.

        Raises:
            SignedOut: the key is not known.
            Unreachable: no answer.
            DoorError: it was refused.
        """
        given = {name: str(value) for name, value in (parameters or {}).items() if value not in (None, "")}
        return await self._ask("GET", key, path, given, None, READ_TIMEOUT_S if timeout_s is None else timeout_s)

    async def read(
        self, form: type[T], key: SecretStr, path: str, parameters: Mapping[str, str | int | None] | None = None
    ) -> T:
        """The same as one of the contract's messages. Raises as `get` does."""
        document = await self.get(key, path, parameters)
        try:
            return TypeAdapter(form).validate_python(document)
        except ValidationError as error:
            raise Unreachable(f"{self.url} is another version of Breakwater, or something else: {error}") from error

    async def post(self, key: SecretStr, path: str, body: Mapping[str, object]) -> Any:
        """Has something done, and returns the answer as JSON. Fields that are None are not sent. Raises as `get`."""
        given = {name: value for name, value in body.items() if value is not None}
        return await self._ask("POST", key, path, {}, orjson.dumps(given), ANSWER_TIMEOUT_S)

    @asynccontextmanager
    async def stream(self, key: SecretStr, path: str) -> AsyncGenerator[aiohttp.StreamReader]:
        """What comes at a path below `/api/v1/`, line by line, for as long as it comes. Raises as `get` does."""
        if self._streams is None:
            # Connections of their own, and as many as it takes: those who watch keep nobody else from an answer.
            self._streams = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=SILENT_S),
            )
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S) as begins:
                async with self._streams.get(self._at(path), headers=_headers(key)) as response:
                    if response.status != 200:
                        raise _refusal(response.status, await response.read())
                    begins.reschedule(None)
                    yield response.content
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._no_answer(error) from error

    async def close(self) -> None:
        """Ends the connections."""
        sessions = [one for one in (self._http, self._streams) if one is not None]
        self._http = self._streams = None
        for one in sessions:
            await one.close()

    async def _ask(
        self,
        method: str,
        key: SecretStr,
        path: str,
        parameters: Mapping[str, str],
        body: bytes | None,
        timeout_s: float,
    ) -> Any:
        headers = _headers(key) | ({} if body is None else {"Content-Type": "application/json"})
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session().request(
                    method, self._at(path).with_query(parameters), data=body, headers=headers
                ) as response,
            ):
                status, answer = response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._no_answer(error) from error
        if status >= 400:
            raise _refusal(status, answer)
        try:
            return orjson.loads(answer)
        except ValueError as error:
            raise Unreachable(f"{self.url} answers, and not as Breakwater does; is it the right address?") from error

    def _at(self, path: str) -> URL:
        # Encoded already: an id may hold slashes, which must arrive as they are.
        return URL(f"{self.url}/api/v1/{path}", encoded=True)

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT_S))
        return self._http

    def _no_answer(self, error: Exception) -> Unreachable:
        why = str(error) or type(error).__name__
        return Unreachable(
            f"The request service does not answer at {self.url}: {why}. Is it running? `breakwater doctor` tells."
        )


def _headers(key: SecretStr) -> dict[str, str]:
    return {"Authorization": f"Bearer {key.get_secret_value()}"}


def _refusal(status: int, body: bytes) -> DoorError:
    try:
        error = orjson.loads(body)["error"]
        code, message = str(error["code"]), str(error["message"])
    except (ValueError, KeyError, TypeError):
        code, message = "http", f"the HTTP interface answered {status}, and not in Breakwater's words"
    return SignedOut(status, code, message) if status == 401 else DoorError(status, code, message)
