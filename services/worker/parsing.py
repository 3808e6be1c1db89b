"""A delivered message as a job: parsed, and checked against the config and the rights of its sender."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from pydantic import JsonValue, ValidationError
from pydantic_core import from_json

from breakwater.config import Agent, Config, validate_job
from breakwater.identity.settings import NatsProgram
from breakwater.jobs.contract.job import Job
from breakwater.jobs.rules.ids import JobIds, ids_of, key_of
from breakwater.jobs.rules.ownership import (
    for_own_tenant,
    forbidden_field,
    job_digest,
    longest_job,
    may_be_answered_at,
)
from breakwater.jobs.rules.runs import run_of
from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.delivery import Delivery, name_in
from breakwater.kernel.nats.subjects import PROGRAM, Header
from breakwater.kernel.security.encryption import Cipher
from breakwater.kernel.surrogates import read_whole
from breakwater.kernel.telemetry import tracing
from breakwater.kernel.types import is_identifier
from breakwater.kernel.validation import ambiguity, explain
from breakwater.redaction.rules.redact import Redactor, id_objection
from breakwater.redaction.rules.scanner import holds_key

MAX_HEADERS = 32 * 1024
"""The most characters of a job's headers, which count towards the size limit of each message about the job."""


@dataclass(frozen=True, slots=True)
class JobDelivery:
    """A delivered job as far as it could be read."""

    delivery: Delivery
    agent_name: str
    agent: Agent
    ids: JobIds
    scope: str | None
    """The scope of its ids."""
    job: Job | None
    """None if the job must not run."""
    problem: str
    """The reason why it must not run."""
    reply_to: str | None
    owner: str | None
    """The API key, or the NATS user of the program, that owns the job."""
    submitted_by: str | None
    """The API key, or the NATS user of the program, that sent the job."""
    digest: str
    """The digest of the job's content."""
    run_id: str
    """The run of its execution."""

    @property
    def execution_id(self) -> str:
        """The id of its execution."""
        return self.ids.execution_id


class _Origin(NamedTuple):
    """The facts about a job in the headers that only the plane sets."""

    owner: str | None
    sender: str | None
    scope: str | None
    execution_id: str | None
    """None if the job did not come through `request` and was not parked."""
    job_id: str | None
    """The job's own id; None if it is in its body or comes from its message."""


class _InvalidJobError(BreakwaterError):
    """A job can't be run. `job` is set if only the config rejects it."""

    def __init__(self, problem: str, job: Job | None = None) -> None:
        super().__init__(problem)
        self.job = job


def read_job(
    config: Config, agent_name: str, agent: Agent, delivery: Delivery, redactor: Redactor, cipher: Cipher
) -> JobDelivery:
    """Parses and checks a delivered job of an agent.

    Its session is redacted here, as it is stored in the id of its run. The same session has the same substitute.
    """
    origin = _origin_of(delivery)
    try:
        job = _parsed(config, agent_name, delivery, origin)
    except _InvalidJobError as error:
        return unread_job(config, agent_name, agent, delivery, str(error), error.job)
    owner = _owner(config, origin)
    ids = _ids_of(delivery, job, origin)
    if job.session_id is not None:
        session_id = _storable_session(job.session_id, redactor, cipher)
        ids = replace(ids, session_key=key_of(origin.scope, session_id))
    if (trace_id := tracing.trace_id_of(delivery.headers.get(Header.TRACEPARENT))) is not None and owner is not None:
        # Callers choose trace ids freely. The scope keeps a job out of another caller's run.
        trace_id = key_of(origin.scope, trace_id)
    return JobDelivery(
        delivery=delivery,
        agent_name=agent_name,
        agent=agent,
        ids=ids,
        scope=origin.scope,
        job=job,
        problem="",
        reply_to=job.reply_to,
        owner=owner,
        submitted_by=origin.sender,
        digest=job_digest(job, owner),
        run_id=run_of(ids, job.tenant, trace_id=trace_id),
    )


def unread_job(
    config: Config, agent_name: str, agent: Agent, delivery: Delivery, problem: str, job: Job | None = None
) -> JobDelivery:
    """Describes a job that must not run because of `problem`. The job is answered if its `reply_to` can be read."""
    origin = _origin_of(delivery)
    subject = _field(delivery.data, "reply_to")
    is_answerable = (
        subject is not None and subjects.is_reply_subject(subject) and may_be_answered_at(subject, origin.sender)
    )
    owner = _owner(config, origin)
    ids = _ids_of(delivery, None, origin)
    if origin.execution_id is None and id_objection(config.redaction, ids.job_id) is not None:
        generated_id = _generated_id(delivery)
        ids = JobIds(generated_id, key_of(origin.scope, generated_id))
    return JobDelivery(
        delivery=delivery,
        agent_name=agent_name,
        agent=agent,
        ids=ids,
        scope=origin.scope,
        job=None,
        problem=problem,
        reply_to=subject if is_answerable else None,
        owner=owner,
        submitted_by=origin.sender,
        digest=job_digest(job or delivery.data, owner),
        run_id=ids.execution_id,
    )


def program_of(config: Config, sender: str | None) -> NatsProgram | None:
    """Returns the configured program that sent a job."""
    if sender is None or not sender.startswith(PROGRAM):
        return None
    return config.programs.get(sender.removeprefix(PROGRAM))


def ids_of_unread(delivery: Delivery) -> JobIds:
    """Returns the ids of a job that can't be read yet. If it is valid and no dry run, they stay the same."""
    return _ids_of(delivery, None, _origin_of(delivery))


def _ids_of(delivery: Delivery, job: Job | None, origin: _Origin) -> JobIds:
    """Returns the ids of a job, which are the same for every delivery.

    Its own id is the one in its body, else the message's, else one from the message's sequence. `request` has chosen
    both ids of the jobs that it has published.
    """
    if job is None:
        body_id = _field(delivery.data, "job_id")
        if body_id is not None and holds_key(body_id):
            body_id = None
    else:
        body_id = job.job_id
    if origin.execution_id is not None:
        job_id = origin.job_id or body_id or origin.execution_id
        execution_id = origin.execution_id
    else:
        message_id = delivery.headers.get(Header.MSG_ID.value, "")
        own_id = body_id or (message_id if is_identifier(message_id) and not holds_key(message_id) else None)
        generated_id = _generated_id(delivery)
        job_id = own_id or generated_id
        # A program's dry run reserves no id: a later job with the same id still runs.
        reserves = job is None or not job.dry_run or subjects.user_of_job(delivery.subject) is None
        execution_id = key_of(origin.scope, job_id if reserves else generated_id)
    if job is None:
        return JobIds(job_id, execution_id)
    return ids_of(job, origin.scope, job_id=job_id, execution_id=execution_id)


def _generated_id(delivery: Delivery) -> str:
    return f"job-{delivery.sequence}-{int(delivery.published_at.timestamp())}"


def _storable_session(session_id: str, redactor: Redactor, cipher: Cipher) -> str:
    """Returns a session's id as it may be stored."""
    session: JsonValue = {"session_id": session_id}
    return session_id if redactor.json(session) == session else cipher.pseudonym(session_id)


def _parsed(config: Config, agent_name: str, delivery: Delivery, origin: _Origin) -> Job:
    limit = config.limits.max_body_bytes
    sender = origin.sender
    if len(delivery.data) > longest_job(limit):
        raise _InvalidJobError(f"the job has {len(delivery.data)} bytes; at most {limit} are accepted")
    if sum(map(len, delivery.headers.values())) + sum(map(len, delivery.headers)) > MAX_HEADERS:
        raise _InvalidJobError(f"the job's headers have more than {MAX_HEADERS} characters")
    try:
        job = read_whole(Job.model_validate_json, delivery.data)
    except ValidationError as error:
        raise _InvalidJobError(explain(error, Job, _parsed_json(delivery.data))) from None
    if (why := ambiguity(delivery.data)) is not None:
        raise _InvalidJobError(f"the job is not JSON: {why}")
    if job.agent != agent_name:
        raise _InvalidJobError(f"agent: {job.agent!r} was published on the subject of {agent_name!r}")
    takes_message_id = job.job_id is None and origin.execution_id is None
    header = delivery.headers.get(Header.MSG_ID.value) if takes_message_id else None
    if header is not None and (why := id_objection(config.redaction, header)) is not None:
        raise _InvalidJobError(f"{Header.MSG_ID.value}: {why}")
    if (problem := validate_job(config, job)) is not None:
        raise _InvalidJobError(f"{problem.path}: {problem.message}", job)
    # Check the rights of the sender. Those of an HTTP sender were checked at the API.
    if job.reply_to is not None and not may_be_answered_at(job.reply_to, sender):
        raise _InvalidJobError(f"reply_to: {job.reply_to!r} is not below the sender's own prefix")
    program = program_of(config, sender)
    if program is not None:
        job = for_own_tenant(program, job)
        if (forbidden := forbidden_field(program, job.agent, job.tenant)) is not None:
            raise _InvalidJobError(f"{forbidden[0]}: the NATS user {sender!r} may only submit {forbidden[1]}", job)
    elif sender is not None and sender.startswith(PROGRAM) and subjects.user_of_job(delivery.subject) is not None:
        # Only checked over NATS: an HTTP sender is an API key, whose name may begin with the same prefix.
        raise _InvalidJobError(f"the config has no program {sender.removeprefix(PROGRAM)!r}")
    return job


def _origin_of(delivery: Delivery) -> _Origin:
    headers = delivery.headers
    return _Origin(
        owner=name_in(headers, Header.OWNER),
        sender=name_in(headers, Header.SUBMITTED_BY),
        scope=headers.get(Header.SCOPE.value),
        execution_id=name_in(headers, Header.EXECUTION_ID),
        job_id=name_in(headers, Header.JOB_ID),
    )


def _owner(config: Config, origin: _Origin) -> str | None:
    """Returns the owner of a job; None for a program with tenants, whose jobs belong to the tenant."""
    program = program_of(config, origin.sender)
    return None if program is not None and program.tenants else origin.owner


def _field(data: bytes, name: str) -> str | None:
    """Returns a text field of a job that failed its validation."""
    body = _parsed_json(data)
    value = body.get(name) if isinstance(body, Mapping) else None
    return value if isinstance(value, str) and is_identifier(value) else None


def _parsed_json(data: bytes) -> JsonValue:
    """Parses a body as JSON; returns None if it is not JSON."""
    try:
        return read_whole(from_json, data)
    except ValueError:
        return None
