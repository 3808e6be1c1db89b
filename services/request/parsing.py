"""From the bytes of a request to a job that may be published, or to an error that says what is wrong with them."""

from __future__ import annotations

import asyncio
import difflib
import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NoReturn, TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from breakwater.contracts.job import Job
from breakwater.contracts.types import Message
from breakwater.contracts.validation import FieldError, ambiguity, problems
from breakwater.http_server import OPEN_BODY_BYTES, OPEN_BODY_S
from breakwater.policy.ownership import job_digest, scoped, scoped_execution, shown, within
from breakwater.policy.redact_scanner import NO_KEY_IN_ID, holds_key
from breakwater.state.accepted import JobStatus
from services.request.problems import Problem

MAX_DETAILS = 20
MAX_EXPLAINED = 1_000
"""Explaining a mistake costs far more than finding it: a body can hold a million of them."""

READ_TIMEOUT_S = 30.0

_A_JOB = (
    "a job may have at most {limit:,} bytes (limits.max_body_bytes in Breakwater's config); "
    "keep large inputs elsewhere and send a reference to them"
)

A_REQUEST = "a request like this may have at most {limit:,} bytes"

Form = TypeVar("Form", bound=Message)

_ID_IN_HEADER = re.compile(r"[\x20-\x7e]{1,128}\Z")


@dataclass(frozen=True)
class Submission:
    """A job that may be published, with its ids as they are called inside the plane."""

    job: Job
    job_id: str
    id_made_here: bool
    """It was made here, so no other job has it."""
    payload: bytes
    """The job as its sender wrote it, with the ids in it."""
    owner: str | None = None
    """The name of the API key that the job belongs to."""
    submitted_by: str | None = None
    """The name of the API key that it was sent with, whomever it belongs to."""
    by_operator: bool = False
    """That key may operate the plane."""
    scope: str | None = None
    """Whose names its ids are."""
    checked: bool = False
    """It is known that its id is not that of another job."""
    known: JobStatus | None = None
    """What was known of it then, where it was sent before."""

    @property
    def shown_id(self) -> str:
        """Its id as its sender chose it."""
        return shown(self.job_id)

    def with_own_name(self) -> Submission:
        """The same under a name of its sender's own: its id, although made, is that of another's job."""
        job_id = scoped(self.job_id, self.scope)
        job = self.job.model_copy(update={"job_id": job_id})
        return replace(self, job=job, job_id=job_id, payload=job.model_dump_json(exclude_unset=True).encode())

    @cached_property
    def digest(self) -> str:
        """Of what the job asks, for whom."""
        return job_digest(self.job, self.owner)


async def read_open_body(request: Request) -> bytes:
    """The whole body of a request that takes no key: small, and in a short time. Raises as `read_body` does."""
    return await read_body(request, OPEN_BODY_BYTES, A_REQUEST, within_s=OPEN_BODY_S)


async def read_body(request: Request, limit: int, too_large: str = _A_JOB, within_s: float = READ_TIMEOUT_S) -> bytes:
    """The whole body, at most `limit` bytes.

    What is left of a body that is too large is not kept: the server discards it while the answer goes out.

    Args:
        request: whose.
        limit: in bytes.
        too_large: what to say of a larger one; `{limit}` stands for the limit.
        within_s: how long it may take.

    Raises:
        Problem: 413 for a larger body, by its Content-Length or found while reading; 408 for one that stalls.
        ClientDisconnect: the client is gone.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise Problem(413, "body_too_large", too_large.format(limit=limit))
    try:
        async with asyncio.timeout(within_s):
            return await _read(request, limit, too_large)
    except TimeoutError:
        raise Problem(
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
            raise Problem(413, "body_too_large", too_large.format(limit=limit))
        chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def read_job(body: bytes, form: type[Job] = Job) -> Job:
    """Parses a body, once.

    Raises:
        Problem: 400 for what is not JSON in UTF-8, 422 for what is not a job.
    """
    try:
        job = form.model_validate_json(body)
    except ValidationError as error:
        _explain(error, body, Job, "job")
    _refuse_ambiguous(body)
    return job


def read_command(body: bytes, form: type[Form]) -> Form:
    """Parses the body of a request that is not a job.

    Raises:
        Problem: 400 for what is not JSON in UTF-8, 422 (`invalid_request`) for what does not have the form.
    """
    try:
        command = form.model_validate_json(body)
    except ValidationError as error:
        _explain(error, body, form, "request")
    _refuse_ambiguous(body)
    return command


def read_query(request: Request, form: type[Form]) -> Form:
    """Parses the parameters of a URL. Raises Problem: 422 (`invalid_query`) for what does not have the form."""
    given = dict(request.query_params)
    try:
        return form.model_validate(given)
    except ValidationError as error:
        found = problems(error, form, given)
        raise _invalid("query", (FieldError(path=problem.path, message=problem.message) for problem in found)) from None


def submission(
    job: Job,
    body: bytes,
    *,
    idempotency_key: str | None,
    made_id: str,
    owner: str | None = None,
    scope: str | None = None,
) -> Submission:
    """Settles the job's ids: its own is the one it chose, else the Idempotency-Key header's, else the one made here.

    A dry run takes no id: it decides nothing for a job that comes with the same one.

    Raises:
        Problem: 422 for an Idempotency-Key that can't be an id, or has the form of a key.
    """
    chosen = job.job_id if job.job_id is not None else _checked(idempotency_key)
    own = f"{chosen}@{made_id}" if job.dry_run else scoped_execution(chosen or "", scope)
    job_id = made_id if chosen is None else own
    refers = within(job, scope)
    inside = refers if job_id == job.job_id else refers.model_copy(update={"job_id": job_id})
    if refers is not job or ("job_id" in job.model_fields_set and inside is not job):
        body = inside.model_dump_json(exclude_unset=True).encode()
    elif inside is not job:
        # The sender's own bytes, as they are: no number and no escape changes its form on the way.
        body = with_field(body, "job_id", job_id)
    return Submission(inside, job_id, chosen is None or job.dry_run, body, owner, scope=scope)


def _checked(idempotency_key: str | None) -> str | None:
    if idempotency_key is None:
        return None
    if not _ID_IN_HEADER.match(idempotency_key):
        message = "must have 1 to 128 characters, all of them printable ASCII"
        raise invalid_job([FieldError(path="Idempotency-Key", message=message)])
    if holds_key(idempotency_key):
        raise invalid_job([FieldError(path="Idempotency-Key", message=NO_KEY_IN_ID)])
    return idempotency_key


def with_field(document: bytes, name: str, value: str) -> bytes:
    """Puts a field in front of the fields of a JSON object that has at least one, and not this one."""
    opening = document.index(b"{") + 1
    return b"%s%s:%s,%s" % (
        document[:opening],
        json.dumps(name).encode(),
        json.dumps(value).encode(),
        document[opening:],
    )


def suggestion(wrong: str, known: Collection[str]) -> str:
    """`; did you mean 'x'?` where something is close, else all that is known."""
    close = difflib.get_close_matches(wrong, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(known))}"


def _explain(error: ValidationError, body: bytes, form: type[Message], what: str) -> NoReturn:
    count = error.error_count()
    if count > MAX_EXPLAINED:
        raise Problem(422, f"invalid_{what}", f"the {what} has {count:,} mistakes, too many to list")
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        _explain_syntax(str(first.get("ctx", {}).get("error", "")), body)
    found = problems(error, form, json.loads(body))
    raise _invalid(what, (FieldError(path=problem.path, message=problem.message) for problem in found))


def invalid_job(details: Iterable[FieldError]) -> Problem:
    """422 with the mistakes, the first of them in the message."""
    return _invalid("job", details)


def _invalid(what: str, details: Iterable[FieldError]) -> Problem:
    listed = list(details)
    first = f"{listed[0].path}: {listed[0].message}" if listed[0].path else listed[0].message
    message = first if len(listed) == 1 else f"{len(listed)} mistakes; the first: {first}"
    return Problem(422, f"invalid_{what}", message, listed[:MAX_DETAILS])


def _explain_syntax(what: str, body: bytes) -> NoReturn:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise Problem(
            400, "not_utf8", f"the body is not UTF-8: byte {error.start} is 0x{body[error.start]:02x}"
        ) from None
    hint = "; it is empty" if not body.strip() else "; it begins with a byte order mark" if body[:1] == b"\xef" else ""
    raise Problem(400, "not_json", f"the body is not JSON: {what}{hint}")


def _refuse_ambiguous(body: bytes) -> None:
    if (why := ambiguity(body)) is not None:
        raise Problem(400, "not_json", f"the body is not JSON: {why}")
