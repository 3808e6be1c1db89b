"""Reading and parsing requests, with errors that say what is wrong with them."""

from __future__ import annotations

import asyncio
import difflib
import json
import math
from collections.abc import Collection, Container, Iterable
from typing import NoReturn, TypeVar
from urllib.parse import parse_qsl

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from breakwater.kernel.http.content_coding import codings_of, decoded
from breakwater.kernel.http.problems import RequestError
from breakwater.kernel.http.server import OPEN_BODY_BYTES, OPEN_BODY_S
from breakwater.kernel.surrogates import read_whole, whole_json
from breakwater.kernel.types import Message
from breakwater.kernel.validation import FieldError, ambiguity, problems

MAX_DETAILS = 20
MAX_EXPLAINED = 1_000
"""The most errors of a body that are explained. A body may have a million, and explaining costs more than finding."""

READ_TIMEOUT_S = 30.0
MAX_WAIT_S = 300.0
MAX_BYTES = 16_384
"""The size limit of a body that is not a job."""

_A_JOB = (
    "a job may have at most {limit:,} bytes (limits.max_body_bytes in Breakwater's config); "
    "keep large inputs elsewhere and send a reference to them"
)

A_REQUEST = "the maximum size of this request is {limit:,} bytes"

InputT = TypeVar("InputT", bound=Message)


async def read_open_body(request: Request) -> bytes:
    """Reads the body of a request without a key, with stricter limits of size and time. Raises as `read_body` does."""
    return await read_body(request, OPEN_BODY_BYTES, A_REQUEST, within_s=OPEN_BODY_S)


async def read_body(request: Request, limit: int, too_large: str = _A_JOB, within_s: float = READ_TIMEOUT_S) -> bytes:
    """Reads and decompresses a body of at most `limit` bytes.

    A larger body is not read to its end: the server discards the rest while it sends the error.

    Args:
        request: the request.
        limit: the size limit of the decompressed body, in bytes.
        too_large: the message for a larger body, with `{limit}` for the limit.
        within_s: the time limit, in seconds.

    Raises:
        RequestError: 413, the body is too large, by its Content-Length or while it is read or decompressed; 408, it did
            not arrive in time; 415 or 400, it can't be decompressed.
        ClientDisconnect: the client is gone.
    """
    codings = codings_of(request)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise RequestError(413, "body_too_large", too_large.format(limit=limit))
    try:
        async with asyncio.timeout(within_s):
            body = await _read(request, limit, too_large)
            for coding in codings:
                body = await decoded(body, coding, limit, too_large.format(limit=limit))
            return body
    except TimeoutError:
        raise RequestError(
            408, "body_timeout", f"the body did not arrive within {within_s:g} s", headers={"Connection": "close"}
        ) from None


async def _read(request: Request, limit: int, too_large: str) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise RequestError(413, "body_too_large", too_large.format(limit=limit))
        chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def read_job(body: bytes, model: type[InputT], kind: str) -> InputT:
    """Parses a body as a model.

    Args:
        body: the body.
        model: the model.
        kind: what the body is, for the code and the message of an error.

    Raises:
        RequestError: 400, the body is not JSON in UTF-8; 422 (`invalid_<kind>`), it does not fit the model.
    """
    try:
        parsed = read_whole(model.model_validate_json, body)
    except ValidationError as error:
        _explain(error, whole_json(body) or body, model, kind)
    if (why := ambiguity(body)) is not None:
        raise RequestError(400, "not_json", f"the body is not JSON: {why}")
    return parsed


def read_command(body: bytes, model: type[InputT]) -> InputT:
    """Parses a body that is not a job. Raises as `read_job` does, with the code `invalid_request` for 422."""
    return read_job(body, model, "request")


def read_query(request: Request, model: type[InputT], ignored: Container[str] = ()) -> InputT:
    """Parses the parameters of a URL, except those in `ignored`. Raises RequestError: 422 (`invalid_query`)."""
    parameters = {name: value for name, value in request.query_params.items() if name not in ignored}
    try:
        return model.model_validate(parameters)
    except ValidationError as error:
        raise _invalid("query", problems(error, model, parameters)) from None


def wait_s_of(query: bytes) -> float | None:
    """Parses `wait_s`, the only parameter of a query string; None without it. Raises RequestError: 422."""
    if not query:
        return None
    parameters = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True))
    unknown = next((name for name in parameters if name != "wait_s"), None)
    if unknown is not None:
        raise _invalid("query", [FieldError(unknown, "is not a known parameter; the only one is wait_s")])
    try:
        seconds = float(parameters.get("wait_s", ""))
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_WAIT_S:
        message = f"must be a number of seconds, over 0 and at most {MAX_WAIT_S:g}"
        raise _invalid("query", [FieldError("wait_s", message)])
    return seconds


def with_field(document: bytes, name: str, value: str) -> bytes:
    """Adds a field in front of the other fields of a JSON object, which must have some, but not this one."""
    opening = document.index(b"{") + 1
    return b"%s%s:%s,%s" % (
        document[:opening],
        json.dumps(name).encode(),
        json.dumps(value).encode(),
        document[opening:],
    )


def suggestion(name: str, known_names: Collection[str]) -> str:
    """Returns `; did you mean 'x'?` if a known name is close, else `; known are …`."""
    close = difflib.get_close_matches(name, known_names, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(known_names))}"


def invalid_job(details: Iterable[FieldError]) -> RequestError:
    """Returns 422 (`invalid_job`) with the mistakes, the first of them in the message."""
    return _invalid("job", details)


def _explain(error: ValidationError, body: bytes, model: type[Message], kind: str) -> NoReturn:
    count = error.error_count()
    if count > MAX_EXPLAINED:
        raise RequestError(422, f"invalid_{kind}", f"the {kind} has {count:,} errors, too many to list")
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        _explain_syntax(str(first.get("ctx", {}).get("error", "")), body)
    raise _invalid(kind, problems(error, model, json.loads(body)))


def _invalid(kind: str, details: Iterable[FieldError]) -> RequestError:
    listed = list(details)
    first = f"{listed[0].path}: {listed[0].message}" if listed[0].path else listed[0].message
    message = first if len(listed) == 1 else f"{len(listed)} errors; the first: {first}"
    return RequestError(422, f"invalid_{kind}", message, listed[:MAX_DETAILS])


def _explain_syntax(syntax_error: str, body: bytes) -> NoReturn:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            400, "not_utf8", f"the body is not UTF-8: byte {error.start} is 0x{body[error.start]:02x}"
        ) from None
    hint = "; it is empty" if not body.strip() else "; it begins with a byte order mark" if body[:1] == b"\xef" else ""
    raise RequestError(400, "not_json", f"the body is not JSON: {syntax_error}{hint}")
