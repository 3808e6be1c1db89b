"""Parsing requests, with errors that say what is wrong with them."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Collection, Container, Iterable
from typing import NoReturn, TypeVar
from urllib.parse import parse_qsl

from pydantic import ValidationError
from starlette.requests import Request

from breakwater.kernel.http.problems import RequestError
from breakwater.kernel.surrogates import read_whole, whole_json
from breakwater.kernel.types import Message
from breakwater.kernel.validation import FieldError, ambiguity, problems

MAX_DETAILS = 20
MAX_EXPLAINED = 1_000
"""The most errors of a body that are explained. A body may have a million, and explaining costs more than finding."""

MAX_WAIT_S = 300.0
InputT = TypeVar("InputT", bound=Message)


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
        mended = whole_json(body) or body
        _explain(error, mended, model, kind)
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
