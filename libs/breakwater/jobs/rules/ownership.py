"""The owners of jobs, the identities of questions, and the names of ids inside the plane.

Callers choose ids independently of one another, so each caller has its own scope: `order-1` of the key `shop` is the
execution `order-1@shop`, wherever it is stored or published. Its owner reads and writes `order-1`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, Protocol, cast

from pydantic import JsonValue
from pydantic_core import from_json, to_json

from breakwater.identity.rules.callers import Caller
from breakwater.jobs.contract.job import Job
from breakwater.kernel.nats.subjects import PROGRAM, REPLIES, encode_token
from breakwater.kernel.types import MAX_SCOPE

_DIGEST_BYTES = 16
_NOT_THE_QUESTION = {"job_id", "reply_to", "session_id"}
_GENERATED = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}(\.[0-9]+)?")
_IDS = ("job_id", "execution_id", "task_id", "parent_execution_id", "plan_id", "run_id", "cached_from")


def job_digest(job: Job | bytes, owner: str | None) -> str:
    """Return the digest of a job's question and its owner: 32 hex digits that do not depend on how the JSON is written.

    Args:
        job: the job, or the message if it is no valid job.
        owner: the name of the API key that the job belongs to; None if it belongs to none.
    """
    if isinstance(job, Job):
        job = job.model_dump_json(exclude=_NOT_THE_QUESTION, exclude_defaults=True).encode()
    return blake2b(b"%s\0%s" % ((owner or "").encode(), job), digest_size=_DIGEST_BYTES).hexdigest()


def owner_of(caller: Caller) -> str | None:
    """Return the owner of the jobs that a caller sends: the name of its key.

    None if the jobs belong to all keys of the job's tenant, or of operators.
    """
    return None if caller.tenants or caller.may(("operate",)) else caller.name


def store_share(owner: str | None, tenant: str | None) -> str:
    """Return the owner of a share of the stored responses: the key that a job belongs to, or else its tenant."""
    if owner is not None:
        return f"k{owner}"
    return "" if tenant is None else f"t{tenant}"


class Bound(Protocol):
    """A sender of jobs: the holder of a key, a person, or a named program."""

    @property
    def agents(self) -> tuple[str, ...]:
        """Agents it submits for; empty: all."""
        ...

    @property
    def tenants(self) -> tuple[str, ...]:
        """Tenants it submits for; empty: any."""
        ...


def for_own_tenant(sender: Bound, job: Job) -> Job:
    """Return the job with its sender's tenant, if the job names none and the sender is bound to exactly one."""
    if job.tenant is not None or len(sender.tenants) != 1:
        return job
    return job.model_copy(update={"tenant": sender.tenants[0]})


def forbidden_field(sender: Bound, agent: str, tenant: str | None) -> tuple[Literal["agent", "tenant"], str] | None:
    """Return the field that forbids a sender to send a job, and its allowed values; None if it may send the job."""
    if sender.agents and agent not in sender.agents:
        return "agent", f"for agent {' or '.join(map(repr, sender.agents))} alone"
    if sender.tenants and tenant not in sender.tenants:
        return "tenant", f"for tenant {' or '.join(map(repr, sender.tenants))} alone"
    return None


@dataclass(frozen=True, slots=True)
class SenderObjection:
    """The reason why a key may not send a job."""

    field: Literal["agent", "tenant", "reply_to"]
    message: str
    detail: str
    """The mistake in the field."""


def objection_to(sender: Caller, job: Job, *, by_operator: bool) -> SenderObjection | None:
    """Return why a key may not send a job; None if it may. Operators may use the reply subjects of others."""
    if (forbidden := forbidden_field(sender, job.agent, job.tenant)) is not None:
        field, restriction = forbidden
        message = f"the API key {sender.name!r} submits {restriction}"
        return SenderObjection(field, message, "is not one of the key's")
    if job.reply_to is None:
        return None
    own_replies = f"{REPLIES}{encode_token(sender.name)}."
    is_anothers = job.reply_to.startswith(REPLIES) and not job.reply_to.startswith(own_replies)
    if (is_anothers and not by_operator) or not may_be_answered_at(job.reply_to, sender.name):
        detail = f"must be an inbox, not one of a program of the config, or a subject below {own_replies[:-1]}"
        return SenderObjection("reply_to", f"reply_to: {detail}", detail)
    return None


def may_be_answered_at(subject: str, sender: str | None) -> bool:
    """Return True if a sender may have answers sent to a reply subject. A named program's prefixes are its own.

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
    """Return True if a caller may see a job: operators see all, keys of a tenant the tenant's, other keys their own.

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


def scope_of(caller: Caller, tenant: str | None) -> str | None:
    """Scope of the ids of a job; None for those of operators, who have theirs in common.

    Args:
        caller: who sends it.
        tenant: of the job. Keys that are bound to a tenant have their names in common with its other keys.
    """
    if caller.kind == "person" or caller.may(("operate",)) or not caller.may(("submit",)):
        return None
    return scope_in(caller.name, tenant if caller.tenants else None)


def scope_in(name: str, tenant: str | None) -> str:
    """The scope of the names of a key or a program, or of the tenant that it is bound to. Long ones are hashed."""
    scope = name if tenant is None else tenant
    for mark in "%@:":
        scope = scope.replace(mark, f"%{ord(mark):X}")
    scope = scope if tenant is None else f"tenant:{scope}"
    if len(scope.encode()) <= MAX_SCOPE:
        return scope
    return blake2b(scope.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def scoped(chosen: str, scope: str | None) -> str:
    """An id as it is called inside the plane: no two pairs of an id and a scope have a name in common."""
    if scope is not None:
        return f"{chosen}@{scope}"
    return f"{chosen}@" if "@" in chosen else chosen


def scoped_execution(chosen: str, scope: str | None) -> str:
    """The same of an execution. An id with the form of those made here, which can't be guessed, stays as it is."""
    return chosen if is_generated_id(chosen) else scoped(chosen, scope)


def is_generated_id(execution_id: str) -> bool:
    """True if an id has the form of those made for jobs without one: of `new_id`, or a plan's job."""
    return _GENERATED.fullmatch(execution_id) is not None


def shown(full: str) -> str:
    """An id as its owner chose it."""
    return full.rpartition("@")[0] or full


def shown_to(caller: Caller, full: str) -> str:
    """An id as a caller writes it: another's has its scope in it."""
    scope = full.rpartition("@")[2]
    own_scopes = {scope_of(caller, tenant) or "" for tenant in caller.tenants or (None,)}
    return shown(full) if scope in own_scopes or is_generated_id(scope) else full


def names_of(caller: Caller, written_id: str, *, generated_first: bool = True) -> tuple[str, ...]:
    """Possible names of an execution or a plan that a caller names by the id it chose, or by the full one."""
    if scope_of(caller, None) is None:
        names = [scoped(written_id, None)]
    else:
        names = [scoped(written_id, scope_of(caller, tenant)) for tenant in caller.tenants or (None,)]
    if generated_first and is_generated_id(written_id):
        return tuple(dict.fromkeys((written_id, *names)))
    return tuple(dict.fromkeys((*names, written_id)))


def longest_job(limit: int, *, scoped_ids: bool) -> int:
    """Bytes that a job may have inside the plane.

    Args:
        limit: of the body that `request` accepts, in bytes. It then puts the job's id in, or all of its ids.
        scoped_ids: whether the ids are those that the plane has for them.
    """
    return limit + (32_768 if scoped_ids else 1024)


def has_scoped_ids(job: Job) -> bool:
    """True if an id of a job is not called as it was chosen."""
    ids = (job.job_id, job.task_id, job.session_id, job.parent_execution_id, job.plan_id, *job.depends_on)
    return any("@" in job_id for job_id in ids if job_id)


def scope_references(job: Job, scope: str | None, named: Callable[[str, str | None], str] = scoped_execution) -> Job:
    """A job with the ids that it refers to as they are called inside the plane; itself where that changes none.

    Args:
        job: the job.
        scope: whose names they are.
        named: what executions are called. Programs hear the made ids of others, so theirs are `scoped` all the same.
    """
    ids = {
        "task_id": job.task_id and scoped(job.task_id, scope),
        "session_id": job.session_id and scoped(job.session_id, scope),
        "plan_id": job.plan_id and scoped(job.plan_id, scope),
        "parent_execution_id": job.parent_execution_id and named(job.parent_execution_id, scope),
        "depends_on": tuple(named(dependency, scope) for dependency in job.depends_on),
    }
    changed = {name: value for name, value in ids.items() if value != getattr(job, name)}
    return job.model_copy(update=changed) if changed else job


def as_chosen(document: Mapping[str, Any], show: Callable[[str], str] = shown) -> dict[str, Any]:
    """A result, a record, an attempt or a step, as JSON, with its ids as they were chosen, or as `show` says."""
    renamed = {**document, **{name: show(document[name]) for name in _IDS if document.get(name)}}
    if "attempt_id" in document:
        renamed["attempt_id"] = f"{renamed['execution_id']}:{document['number']}"
    if attempts := cast("list[Mapping[str, Any]] | None", document.get("attempts")):
        renamed["attempts"] = [as_chosen(attempt, show) for attempt in attempts]
    return renamed


def document_as_chosen(document: bytes, show: Callable[[str], str] = shown) -> bytes:
    """The same of bytes: with each number as it was, however large; themselves where they hold no such id."""
    if b"@" not in document:
        return document
    return to_json(as_chosen(from_json(document), show))


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
    """Return the cache key of a question: `v1:` and 64 hex digits.

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
