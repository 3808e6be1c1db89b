"""A delivered message as a job: parsed, and checked against the config and the rights of its sender."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import JsonValue, ValidationError
from pydantic_core import from_json

from breakwater.config import Agent, Config, validate_job
from breakwater.identity.settings import NatsProgram
from breakwater.jobs.contract.job import Job, ScopedJob
from breakwater.jobs.rules.ownership import (
    for_own_tenant,
    forbidden_field,
    job_digest,
    longest_job,
    may_be_answered_at,
    scope_in,
    scope_references,
    scoped,
    shown,
)
from breakwater.jobs.rules.runs import run_of
from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.delivery import Delivery, parked_execution
from breakwater.kernel.nats.subjects import PROGRAM, Header, decode_token
from breakwater.kernel.security.encryption import Cipher
from breakwater.kernel.surrogates import read_whole
from breakwater.kernel.telemetry import tracing
from breakwater.kernel.types import is_full_id, is_identifier
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
    execution_id: str
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


class _Origin(NamedTuple):
    """The owner and the sender of a job, and the form of its ids, as its headers name them."""

    owner: str | None
    sender: str | None
    chosen_ids: bool
    """True if the ids are not scoped yet, as the job did not come through `request`."""
    scope: str | None
    """The scope of the ids of a job over NATS: the program with its own NATS user."""


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
        job = _parsed(config, agent_name, delivery, origin.sender)
    except _InvalidJobError as error:
        return unread_job(config, agent_name, agent, delivery, str(error), error.job)
    owner = _owner(config, origin)
    inside = scope_references(job, origin.scope, scoped) if origin.chosen_ids else job
    if inside.session_id is not None:
        inside = inside.model_copy(update={"session_id": _storable_session(inside.session_id, redactor, cipher)})
    execution_id = execution_id_of(delivery, inside, origin)
    if (trace_id := tracing.trace_id_of(delivery.headers.get(Header.TRACEPARENT))) is not None:
        # Callers choose trace ids freely. Scoping them keeps a job out of another caller's run.
        trace_id = scoped(trace_id, None if owner is None else scope_in(owner, None))
    return JobDelivery(
        delivery=delivery,
        agent_name=agent_name,
        agent=agent,
        execution_id=execution_id,
        job=inside,
        problem="",
        reply_to=job.reply_to,
        owner=owner,
        submitted_by=origin.sender,
        digest=job_digest(job, owner),
        run_id=run_of(inside, execution_id, trace_id=trace_id),
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
    execution_id = execution_id_of(delivery, None, origin)
    if parked_execution(delivery.headers) is None and id_objection(config.redaction, shown(execution_id)) is not None:
        execution_id = scoped(_generated_id(delivery), origin.scope)
    return JobDelivery(
        delivery=delivery,
        agent_name=agent_name,
        agent=agent,
        execution_id=execution_id,
        job=None,
        problem=problem,
        reply_to=subject if is_answerable else None,
        owner=owner,
        submitted_by=origin.sender,
        digest=job_digest(job or delivery.data, owner),
        run_id=execution_id,
    )


def program_of(config: Config, sender: str | None) -> NatsProgram | None:
    """Returns the configured program that sent a job."""
    if sender is None or not sender.startswith(PROGRAM):
        return None
    return config.programs.get(sender.removeprefix(PROGRAM))


def execution_id_of(delivery: Delivery, job: Job | None, origin: _Origin | None = None) -> str:
    """Returns the id of a job's execution: the job's own, else the message's, else one from the message's sequence.

    Every delivery gives the same id; so does None for `job`, if the job is valid and no dry run.
    """
    if (parked := parked_execution(delivery.headers)) is not None:
        return parked
    origin = origin or _origin_of(delivery)
    message_id = delivery.headers.get(Header.MSG_ID.value, "")
    if job is None:
        own_id = _field(delivery.data, "job_id", is_identifier if origin.chosen_ids else is_full_id)
        if own_id is not None and holds_key(own_id):
            own_id = None
    else:
        own_id = job.job_id
    if own_id is not None and not origin.chosen_ids:
        return own_id
    chosen = own_id or (message_id if is_identifier(message_id) and not holds_key(message_id) else None)
    if job is not None and job.dry_run and chosen is not None and subjects.user_of_job(delivery.subject) is not None:
        # A dry run reserves no id: a later job with the same id still runs.
        return f"{chosen}@{_generated_id(delivery)}"
    return scoped(chosen or _generated_id(delivery), origin.scope)


def _generated_id(delivery: Delivery) -> str:
    return f"job-{delivery.sequence}-{int(delivery.published_at.timestamp())}"


def _storable_session(session_id: str, redactor: Redactor, cipher: Cipher) -> str:
    """Returns a session's id as it may be stored. Its scope, if it has one, is the name of its owner."""
    chosen = shown(session_id)
    session: JsonValue = {"session_id": chosen}
    if redactor.json(session) == session:
        return session_id
    return cipher.pseudonym(session_id) + session_id[len(chosen) :]


def _parsed(config: Config, agent_name: str, delivery: Delivery, sender: str | None) -> Job:
    limit = config.limits.max_body_bytes
    is_scoped = Header.SCOPED_IDS.value in delivery.headers
    if len(delivery.data) > longest_job(limit, scoped_ids=is_scoped):
        raise _InvalidJobError(f"the job has {len(delivery.data)} bytes; at most {limit} are accepted")
    if sum(map(len, delivery.headers.values())) + sum(map(len, delivery.headers)) > MAX_HEADERS:
        raise _InvalidJobError(f"the job's headers have more than {MAX_HEADERS} characters")
    try:
        job = read_whole((ScopedJob if is_scoped else Job).model_validate_json, delivery.data)
    except ValidationError as error:
        raise _InvalidJobError(explain(error, Job, _parsed_json(delivery.data))) from None
    if (why := ambiguity(delivery.data)) is not None:
        raise _InvalidJobError(f"the job is not JSON: {why}")
    if job.agent != agent_name:
        raise _InvalidJobError(f"agent: {job.agent!r} was published on the subject of {agent_name!r}")
    header = delivery.headers.get(Header.MSG_ID.value) if job.job_id is None else None
    if header is not None and (why := id_objection(config.redaction, header)) is not None:
        raise _InvalidJobError(f"{Header.MSG_ID.value}: {why}")
    if (problem := validate_job(config, job, scoped_ids=is_scoped)) is not None:
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
    owner = _name_in(delivery, Header.OWNER)
    sender = _name_in(delivery, Header.SUBMITTED_BY)
    chosen = Header.SCOPED_IDS.value not in delivery.headers and (sender is None or sender.startswith(PROGRAM))
    scope = scope_in(owner, None) if owner is not None and owner.startswith(PROGRAM) else None
    return _Origin(owner, sender, chosen, scope)


def _name_in(delivery: Delivery, header: Header) -> str | None:
    """Returns the API key or NATS user that a header of a job names, or None."""
    token = delivery.headers.get(header.value)
    if token is None:
        return None
    try:
        name = decode_token(token)
    except UnicodeDecodeError:
        return None
    return name if is_identifier(name) else None


def _owner(config: Config, origin: _Origin) -> str | None:
    """Returns the owner of a job; None for a program with tenants, whose jobs belong to the tenant."""
    program = program_of(config, origin.sender)
    return None if program is not None and program.tenants else origin.owner


def _field(data: bytes, name: str, fits: Callable[[str], bool] = is_identifier) -> str | None:
    """Returns a text field of a job that failed its validation."""
    body = _parsed_json(data)
    value = body.get(name) if isinstance(body, Mapping) else None
    return value if isinstance(value, str) and fits(value) else None


def _parsed_json(data: bytes) -> JsonValue:
    """Parses a body as JSON; returns None if it is not JSON."""
    try:
        return read_whole(from_json, data)
    except ValueError:
        return None
