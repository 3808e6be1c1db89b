"""Whose a job is, and which question an id stands for."""

from __future__ import annotations

from hashlib import blake2b
from typing import Literal, Protocol

from breakwater.contracts.job import Job
from breakwater.contracts.subjects import PROGRAM
from breakwater.policy.callers import Caller

_DIGEST_BYTES = 16
_NOT_THE_QUESTION = {"job_id", "reply_to"}


def job_digest(job: Job | bytes, owner: str | None) -> str:
    """Which question a job asks and for whom: 32 hex digits, the same however the same job is written as JSON.

    Args:
        job: the job; or the message, where it is no valid job.
        owner: the name of the API key it belongs to; None for a job that belongs to no key.
    """
    if isinstance(job, Job):
        job = job.model_dump_json(exclude=_NOT_THE_QUESTION, exclude_defaults=True).encode()
    return blake2b(b"%s\0%s" % ((owner or "").encode(), job), digest_size=_DIGEST_BYTES).hexdigest()


def owner_of(caller: Caller) -> str | None:
    """To whom belong the jobs that a caller sends: to all keys of this name.

    None where they belong to more: to all keys of the job's tenant, or of operators.
    """
    return None if caller.tenants or caller.may(("operate",)) else caller.name


class Bound(Protocol):
    """Who sends jobs: the holder of a key, a person, or a named program."""

    @property
    def agents(self) -> tuple[str, ...]:
        """For which agents; empty: for all."""
        ...

    @property
    def tenants(self) -> tuple[str, ...]:
        """In whose name; empty: in anyone's."""
        ...


def for_own_tenant(sender: Bound, job: Job) -> Job:
    """The job in the name of the one tenant that its sender is bound to, where it names none."""
    if job.tenant is not None or len(sender.tenants) != 1:
        return job
    return job.model_copy(update={"tenant": sender.tenants[0]})


def outside(sender: Bound, agent: str, tenant: str | None) -> tuple[Literal["agent", "tenant"], str] | None:
    """What of a job its sender may not name, and which ones alone it may; None where it may send the job."""
    if sender.agents and agent not in sender.agents:
        return "agent", f"for agent {' or '.join(map(repr, sender.agents))} alone"
    if sender.tenants and tenant not in sender.tenants:
        return "tenant", f"for tenant {' or '.join(map(repr, sender.tenants))} alone"
    return None


def may_be_answered_at(subject: str, sender: str | None) -> bool:
    """Whether the answer to a job may go to a reply subject: none but a named program has answers below its prefixes.

    Args:
        subject: an inbox, or below `bw.replies`.
        sender: the name of the key, or the NATS user of the named program; None for `client`.
    """
    tokens = subject.split(".")
    whose, *rest = tokens[1 if tokens[0] == "_INBOX" else 2 :]
    if sender is not None and sender.startswith(PROGRAM):
        return whose == sender and bool(rest)
    return not whose.startswith(PROGRAM)


def may_see(caller: Caller, *, agent: str | None, tenant: str | None, owner: str | None) -> bool:
    """Whether a job belongs to a caller: operators see all, a tenant's keys the tenant's, any other key its own.

    Args:
        caller: with the scope `submit`.
        agent: of the job; None where it is not known.
        tenant: of the job.
        owner: the name of the key it belongs to.
    """
    if caller.may(("operate",)):
        return True
    if agent is None or outside(caller, agent, tenant) is not None:
        return False
    return bool(caller.tenants) or owner == caller.name
