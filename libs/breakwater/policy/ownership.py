"""Whose a job is, and which question an id stands for."""

from __future__ import annotations

from hashlib import blake2b

from breakwater.contracts.job import Job
from breakwater.policy.api_keys import ApiKey

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


def owner_of(key: ApiKey) -> str | None:
    """To whom belong the jobs that are sent with a key: to all keys of this name.

    None where they belong to more: to all keys of the job's tenant, or of operators.
    """
    return None if key.tenants or key.may(("operate",)) else key.name


def may_submit(key: ApiKey, agent: str, tenant: str | None) -> bool:
    """Whether a key may send a job for an agent in the name of a tenant."""
    return (not key.agents or agent in key.agents) and (not key.tenants or tenant in key.tenants)


def may_see(key: ApiKey, *, agent: str | None, tenant: str | None, owner: str | None) -> bool:
    """Whether a job belongs to a key: operators see all, a tenant's keys the tenant's, any other key its own.

    Args:
        key: with the scope `submit`.
        agent: of the job; None where it is not known.
        tenant: of the job.
        owner: the name of the key it belongs to.
    """
    if key.may(("operate",)):
        return True
    if agent is None or not may_submit(key, agent, tenant):
        return False
    return bool(key.tenants) or owner == key.name
