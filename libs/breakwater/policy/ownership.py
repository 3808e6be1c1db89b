"""Whose a job is, and which question an id stands for."""

from __future__ import annotations

from hashlib import blake2b

from breakwater.contracts.job import Job
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


def may_submit(caller: Caller, agent: str, tenant: str | None) -> bool:
    """Whether a caller may send a job for an agent in the name of a tenant."""
    return (not caller.agents or agent in caller.agents) and (not caller.tenants or tenant in caller.tenants)


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
    if agent is None or not may_submit(caller, agent, tenant):
        return False
    return bool(caller.tenants) or owner == caller.name
