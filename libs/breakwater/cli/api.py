"""Asking the HTTP interface: a request and its answer, with errors that say what to do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, TypeVar

import aiohttp
from pydantic import TypeAdapter, ValidationError

from breakwater.cli.errors import CliError, ExitCode, unreachable
from breakwater.cli.plane import Door

T = TypeVar("T")

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 15.0
"""Beyond the wait that was asked for, where nothing else is said."""


def session(door: Door) -> aiohttp.ClientSession:
    """A connection to the interface, to be closed; paths are relative to its URL."""
    headers = {"Authorization": f"Bearer {door.api_key}"} if door.api_key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    return aiohttp.ClientSession(door.url + "/", headers=headers, timeout=timeout)


async def request(
    http: aiohttp.ClientSession,
    method: str,
    path: str,
    *,
    body: Mapping[str, Any] | None = None,
    wait_s: float = 0.0,
    answer_timeout_s: float = ANSWER_TIMEOUT_S,
    unanswered: str,
) -> tuple[int, bytes]:
    """Sends one request, and returns the status and the body of its answer.

    Args:
        http: the connection.
        method: HTTP's.
        path: without a slash in front.
        body: sent as JSON.
        wait_s: how long the interface is asked to wait for the outcome.
        answer_timeout_s: how long it may take beyond that.
        unanswered: what to do where no answer comes, and perhaps all is done.

    Raises:
        CliError: nothing answers.
    """
    parameters = {"wait_s": f"{wait_s:g}"} if wait_s else {}
    data = None if body is None else json.dumps(body, ensure_ascii=False).encode()
    headers = {"Content-Type": "application/json"} if data else {}
    try:
        async with (
            asyncio.timeout(wait_s + answer_timeout_s),
            http.request(method, path, params=parameters, data=data, headers=headers) as response,
        ):
            return response.status, await response.read()
    except aiohttp.ClientConnectorError as error:
        raise unreachable(
            f"nothing answers at {error.host}:{error.port}: {error.strerror or error}",
            "Is the request service running? `breakwater doctor` tells what answers and what does not.",
        ) from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise unreachable(f"no answer came: {str(error) or type(error).__name__}", unanswered) from error


async def get(door: Door, path: str) -> Any:
    """What the interface has at a path below `api/v1`, as JSON. Raises CliError."""
    async with session(door) as http:
        status, answer = await request(
            http, "GET", f"api/v1/{path}", unanswered="`breakwater doctor` tells what answers and what does not."
        )
    return _document(status, answer)


async def post(
    door: Door,
    path: str,
    body: Mapping[str, Any],
    *,
    unanswered: str,
    unknown: str,
    answer_timeout_s: float = ANSWER_TIMEOUT_S,
) -> Any:
    """Has the interface do something, and returns its answer as JSON.

    Args:
        door: the interface.
        path: below `api/v1`.
        body: its fields; those that are None are not sent.
        unanswered: what to do where no answer comes, and perhaps all is done.
        unknown: what to do where the body names something that is not there.
        answer_timeout_s: how long it may take.

    Raises:
        CliError: it is not done, or whether it is can't be told.
    """
    given = {name: value for name, value in body.items() if value is not None}
    async with session(door) as http:
        status, answer = await request(
            http, "POST", f"api/v1/{path}", body=given, answer_timeout_s=answer_timeout_s, unanswered=unanswered
        )
    try:
        return _document(status, answer)
    except CliError as error:
        if status == 404 and error.code != "http":
            error.remedy = error.remedy or unknown
        raise


def read(form: type[T], document: Any) -> T:
    """A document as one of the contract's messages. Raises CliError: it is none."""
    try:
        return TypeAdapter(form).validate_python(document)
    except ValidationError as error:
        raise _no_words_of_ours(200) from error


def refused(status: int, body: bytes, *, again: str = "Try again.") -> CliError:
    """What the interface said instead of an answer; `again`: how to try again where it can't do it now."""
    try:
        error = json.loads(body)["error"]
        code, message = str(error["code"]), str(error["message"])
        details = [f"{one['path']}: {one['message']}" for one in error.get("details", ()) if one["path"]]
    except (ValueError, KeyError, TypeError):
        return _no_words_of_ours(status)
    # Where no name was close, the message lists all agents, as the detail does.
    details = [one for one in details if one.partition(": ")[2].removeprefix("configured are ") not in message]
    if status == 401:
        return CliError(code, message, "Name one with --api-key or BREAKWATER_API_KEY.")
    if status == 403:
        return CliError(code, message, "Name another one with --api-key or BREAKWATER_API_KEY.")
    remedy = "; ".join(details)
    if status == 503:
        # An agent whose breakers are all open is no outage of the plane.
        exit_code = ExitCode.FAILED if code == "agent_unavailable" else ExitCode.UNREACHABLE
        return CliError(code, message, remedy or again, exit_code)
    # What is no job is a wrong call, as it is where the job goes straight to NATS.
    return CliError(code, message, remedy, ExitCode.USAGE if status in (400, 413, 422) else ExitCode.FAILED)


def _document(status: int, answer: bytes) -> Any:
    if status != 200:
        raise refused(status, answer)
    try:
        return json.loads(answer)
    except ValueError as error:
        raise _no_words_of_ours(status) from error


def _no_words_of_ours(status: int) -> CliError:
    return CliError(
        "http", f"the HTTP interface answered {status}, and not in Breakwater's words; is it the right URL?"
    )
