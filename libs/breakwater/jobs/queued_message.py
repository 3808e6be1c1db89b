"""The origin and the ids of a job in a message on JOBS or PARKED, before it is known whether the job is valid."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple, Protocol

from pydantic import JsonValue, TypeAdapter
from pydantic_core import from_json

from breakwater.identity.contract import PRIORITIES, Priority
from breakwater.identity.rules.callers import Attribution
from breakwater.identity.settings import NatsProgram
from breakwater.jobs.contract.job import Job
from breakwater.jobs.rules.ids import JobIds, ids_of, key_of
from breakwater.jobs.rules.ownership import may_be_answered_at
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.delivery import name_in
from breakwater.kernel.nats.subjects import PROGRAM, Header
from breakwater.kernel.surrogates import read_whole
from breakwater.kernel.types import is_identifier
from breakwater.redaction.rules.scanner import holds_key

_TAGS = TypeAdapter(dict[str, str])


class JobMessage(Protocol):
    """A delivered or stored message with a job, whose headers can be trusted."""

    @property
    def subject(self) -> str:
        """The subject that it was published to."""
        ...

    @property
    def data(self) -> bytes:
        """Its body, decrypted."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """Its headers, without those that its sender may not set."""
        ...

    @property
    def sequence(self) -> int:
        """Its place in the stream."""
        ...

    @property
    def published_at(self) -> datetime:
        """When it was stored."""
        ...


class JobOrigin(NamedTuple):
    """The facts about a job in the headers that only the plane sets."""

    sender: str | None
    program: NatsProgram | None
    """The configured program that sent it."""
    owner: str | None
    attribution: Attribution
    tags: Mapping[str, str]
    """The cost tags of the API key that it was submitted with."""
    turn: tuple[Priority, int] | None
    """The priority that `request` has decided on, and the weight of the key; None if the job came over NATS."""
    residency: tuple[str, ...]
    """The regions that the calls of the job must not leave: that of its key or token, and that of its program."""
    scope: str | None
    execution_id: str | None
    """None if the job did not come through `request` and was not parked."""
    job_id: str | None
    """The job's own id; None if it is in its body or comes from its message."""


def origin_of(message: JobMessage, programs: Mapping[str, NatsProgram]) -> JobOrigin:
    """Returns the facts in a message's headers."""
    headers = message.headers
    sender = name_in(headers, Header.SUBMITTED_BY)
    program = None
    if sender is not None and sender.startswith(PROGRAM):
        program = programs.get(sender.removeprefix(PROGRAM))
    is_over_http = sender is not None and program is None
    return JobOrigin(
        sender=sender,
        program=program,
        # The jobs of a program with tenants belong to the tenant.
        owner=None if program is not None and program.tenants else name_in(headers, Header.OWNER),
        attribution=Attribution(name_in(headers, Header.USER), name_in(headers, Header.TEAM)),
        tags=tags_in(headers),
        turn=turn_in(headers) if is_over_http or Header.PRIORITY in headers else None,
        residency=tuple(
            region
            for region in (headers.get(Header.RESIDENCY), None if program is None else program.residency)
            if region is not None
        ),
        scope=headers.get(Header.SCOPE),
        execution_id=name_in(headers, Header.EXECUTION_ID),
        job_id=name_in(headers, Header.JOB_ID),
    )


def tags_in(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Returns the cost tags of an API key in a job's headers."""
    token = headers.get(Header.TAGS)
    return {} if token is None else _TAGS.validate_json(subjects.decode_token(token))


def turn_in(headers: Mapping[str, str]) -> tuple[Priority, int]:
    """Returns the priority of a job and the weight of its API key in its headers."""
    priority, _, weight = headers.get(Header.PRIORITY, "normal 1").partition(" ")
    is_readable = priority in PRIORITIES and weight.isascii() and weight.isdigit()
    return (priority, int(weight)) if is_readable else ("normal", 1)  # pyright: ignore[reportReturnType]  # as checked


def document_of(data: bytes) -> JsonValue:
    """Parses the body of a job that may be invalid; returns None if it is not JSON."""
    try:
        return read_whole(from_json, data)
    except ValueError:
        return None


def legible_part(document: JsonValue, origin: JobOrigin, agent_name: str) -> Job:
    """Returns a job with what is usable of an invalid one: its id, and the subject for its answer."""
    job_id = _identifier(document, "job_id")
    if job_id is not None and holds_key(job_id):
        job_id = None
    subject = _identifier(document, "reply_to")
    is_answerable = (
        subject is not None and subjects.is_reply_subject(subject) and may_be_answered_at(subject, origin.sender)
    )
    return Job.model_construct(
        agent=agent_name,
        prompt="",
        job_id=job_id,
        reply_to=subject if is_answerable else None,
    )


def ids_in(message: JobMessage, job: Job, origin: JobOrigin, session_id: str | None = None) -> JobIds:
    """Returns the ids of a job, which are the same for every delivery. Its session is as it may be stored.

    Its own id is the one in its body, else the message's, else one from the message's sequence. `request` has chosen
    both ids of the jobs that it has published.
    """
    job_id = job.job_id
    if origin.execution_id is not None:
        execution_id = origin.execution_id
        job_id = origin.job_id or job_id or execution_id
    else:
        generated = generated_id(message)
        if job_id is None:
            message_id = message.headers.get(Header.MSG_ID, "")
            is_usable = is_identifier(message_id) and not holds_key(message_id)
            job_id = message_id if is_usable else generated
        # A program's dry run reserves no id: a later job with the same id still runs.
        reserves = not job.dry_run or subjects.user_of_job(message.subject) is None
        execution_id = key_of(origin.scope, job_id if reserves else generated)
    return ids_of(job, origin.scope, job_id=job_id, execution_id=execution_id, session_id=session_id)


def ids_of_unread(message: JobMessage, document: JsonValue = None) -> JobIds:
    """Returns the ids of a job that can't be read yet. If it is valid, they stay the same.

    They depend on no config: a job has them under any.

    Args:
        message: the job's.
        document: its body, if that is parsed already.
    """
    origin = origin_of(message, {})
    if document is None:
        document = document_of(message.data)
    job = legible_part(document, origin, "")
    if isinstance(document, Mapping) and document.get("dry_run") is True:
        job = job.model_copy(update={"dry_run": True})
    return ids_in(message, job, origin)


def generated_id(message: JobMessage) -> str:
    """Returns the id of a job whose sender gave it none: it comes from its message's place and time."""
    return f"job-{message.sequence}-{int(message.published_at.timestamp())}"


def _identifier(document: JsonValue, name: str) -> str | None:
    value = document.get(name) if isinstance(document, Mapping) else None
    return value if isinstance(value, str) and is_identifier(value) else None
