"""The owners of jobs, and the identities of questions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, Protocol

from pydantic import JsonValue

from breakwater.identity.rules.callers import Caller
from breakwater.jobs.contract.job import Job
from breakwater.jobs.rules.attribution import claim_of_another
from breakwater.kernel.nats.subjects import PROGRAM, REPLIES, encode_token

_DIGEST_BYTES = 16
_NOT_THE_QUESTION = {"job_id", "reply_to", "session_id", "priority"}


def job_digest(job: Job | bytes, owner: str | None) -> str:
    """Returns the digest of a job's question and owner: 32 hex digits that do not depend on how the JSON is written.

    Args:
        job: the job, or the message if it is no valid job.
        owner: the name of the API key that the job belongs to; None if it belongs to none.
    """
    if isinstance(job, Job):
        job = job.model_dump_json(exclude=_NOT_THE_QUESTION, exclude_defaults=True).encode()
    return blake2b(b"%s\0%s" % ((owner or "").encode(), job), digest_size=_DIGEST_BYTES).hexdigest()


def owner_of(caller: Caller) -> str | None:
    """Returns the owner of the jobs that a caller sends: the name of its key.

    None if the jobs belong to all keys of the job's tenant, or of operators.
    """
    return None if caller.tenants or caller.may(("operate",)) else caller.name


def store_share(owner: str | None, tenant: str | None) -> str:
    """Returns the owner of a share of the stored responses: the key that a job belongs to, or else its tenant."""
    if owner is not None:
        return f"k{owner}"
    return "" if tenant is None else f"t{tenant}"


class JobSender(Protocol):
    """A sender of jobs: the holder of a key, a person, or a named program."""

    @property
    def agents(self) -> tuple[str, ...]:
        """Agents it submits for; empty: all."""
        ...

    @property
    def tenants(self) -> tuple[str, ...]:
        """Tenants it submits for; empty: any."""
        ...


def for_own_tenant(sender: JobSender, job: Job) -> Job:
    """Returns the job with its sender's tenant, if the job names none and the sender is bound to exactly one."""
    if job.tenant is not None or len(sender.tenants) != 1:
        return job
    return job.model_copy(update={"tenant": sender.tenants[0]})


def forbidden_field(sender: JobSender, agent: str, tenant: str | None) -> tuple[Literal["agent", "tenant"], str] | None:
    """Returns the field that forbids a sender to send a job, and its allowed values; None if it may send the job."""
    if sender.agents and agent not in sender.agents:
        return "agent", f"for agent {' or '.join(map(repr, sender.agents))} alone"
    if sender.tenants and tenant not in sender.tenants:
        return "tenant", f"for tenant {' or '.join(map(repr, sender.tenants))} alone"
    return None


def forbidden_model(sender: Caller, job: Job, chain: Sequence[str]) -> str | None:
    """Returns a model that a job asks for and that its sender may not; None if there is none.

    A job asks for the models that it names, or for the first of its agent if it names none. The fallback models of the
    agent are the config's choice, so every sender may get their answers.

    Args:
        sender: the sender.
        job: the job.
        chain: the models to try for the job.
    """
    requested_models = (*chain[:1], *(job.fallback_models or ()))
    return next((model for model in requested_models if sender.models and model not in sender.models), None)


@dataclass(frozen=True, slots=True)
class SenderObjection:
    """The reason why a key may not send a job."""

    field: str
    message: str
    detail: str
    """The mistake in the field."""


def objection_to(sender: Caller, job: Job, *, by_operator: bool) -> SenderObjection | None:
    """Returns why a key may not send a job; None if it may. Operators may use the reply subjects of others."""
    if (forbidden := forbidden_field(sender, job.agent, job.tenant)) is not None:
        field, restriction = forbidden
        message = f"the API key {sender.name!r} submits {restriction}"
        return SenderObjection(field, message, "is not one of the key's")
    if (claim := claim_of_another(sender, job)) is not None:
        bound = sender.user if claim.kind == "user" else sender.team
        message = f"{claim.path}: names the {claim.kind} {claim.name!r}, and {sender.name!r} is bound to {bound!r}"
        return SenderObjection(claim.path, message, f"is not {bound!r}; leave it out")
    for name in sender.forbidden_metadata:
        if job.metadata.get(name) is not None:
            path = f"metadata.{name}"
            message = f"{path}: the token of {sender.name!r} names no {name}, and its holder can't choose one"
            return SenderObjection(path, message, "is not in the token; leave it out")
    if job.reply_to is None:
        return None
    own_replies = f"{REPLIES}{encode_token(sender.name)}."
    is_anothers = job.reply_to.startswith(REPLIES) and not job.reply_to.startswith(own_replies)
    if (is_anothers and not by_operator) or not may_be_answered_at(job.reply_to, sender.name):
        detail = f"must be an inbox, not one of a program of the config, or a subject below {own_replies[:-1]}"
        return SenderObjection("reply_to", f"reply_to: {detail}", detail)
    return None


def may_be_answered_at(subject: str, sender: str | None) -> bool:
    """Returns True if a sender may have answers sent to a reply subject. A named program's prefixes are its own.

    Args:
        subject: an inbox, or a subject below `bw.replies`.
        sender: the name of the key, or the NATS user of the named program; None for `client`.
    """
    tokens = subject.split(".")
    inbox_owner, *tokens_below = tokens[1 if tokens[0] == "_INBOX" else 2 :]
    if sender is not None and sender.startswith(PROGRAM):
        return inbox_owner == sender and bool(tokens_below)
    return not inbox_owner.startswith(PROGRAM)


def may_see(caller: Caller, *, agent: str | None, tenant: str | None, owner: str | None) -> bool:
    """Returns True if a caller may see a job: operators see all, keys of a tenant the tenant's, other keys their own.

    Args:
        caller: with the scope `submit`.
        agent: of the job; None where it is not known.
        tenant: of the job.
        owner: the name of the key it belongs to.
    """
    if caller.may(("operate",)):
        return True
    if agent is None or forbidden_field(caller, agent, tenant) is not None:
        return False
    return bool(caller.tenants) or owner == caller.name


def longest_job(limit: int) -> int:
    """Returns the most bytes of a job on JOBS: `request` may have added its tenant to a body of `limit` bytes."""
    return limit + 1024


VERSION = "v1"
"""The version of the keys, raised when the same job leads to another request, or an answer to another result."""


def cache_key(
    *,
    agent: str,
    tenant: str | None,
    requested_model: str,
    messages: Sequence[Mapping[str, JsonValue]],
    input: JsonValue,  # noqa: A002  the job's word
    params: Mapping[str, JsonValue],
    schema: JsonValue,
    owner: str | None = None,
) -> str:
    """Returns the cache key of a question: `v1:` and 64 hex digits.

    Only the order of an object's keys does not matter. Values that are written differently are different, even `1` and
    `1.0`, or null and absent: an unneeded call costs little, the answer to another question a lot.
    """
    parts: dict[str, JsonValue] = {
        "agent": agent,
        "tenant": tenant,
        "requested_model": requested_model,
        "messages": [dict(message) for message in messages],
        "input": input,
        "params": dict(params),
        "schema": schema,
    }
    if owner is not None:
        # A caller who got another caller's cached answer would learn that the other had asked the same.
        parts["owner"] = owner
    # One document, so that adjacent parts can't be confused; escaped, so that lone surrogates can be encoded.
    document = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return f"{VERSION}:{hashlib.sha256(document.encode()).hexdigest()}"
