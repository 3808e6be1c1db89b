"""A job on its way to JOBS, with its ids as they are called inside the plane."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, replace
from functools import cached_property

from breakwater.contracts.job import ID_ENTROPY_BYTES, Job, new_job_id
from breakwater.contracts.validation import FieldError
from breakwater.policy.ownership import job_digest, scope_references, scoped, scoped_execution, shown
from breakwater.policy.redact_scanner import NO_KEY_IN_ID, holds_key
from breakwater.state.accepted import JobStatus
from services.request.parsing import invalid_job, with_field

_ID_IN_HEADER = re.compile(r"[\x20-\x7e]{1,128}\Z")


@dataclass(frozen=True)
class Submission:
    """A job that may be published."""

    job: Job
    job_id: str
    id_generated: bool
    """No other job has the id."""
    payload: bytes
    """The job as its sender wrote it, with the ids in it."""
    owner: str | None = None
    """The name of the API key that the job belongs to."""
    submitted_by: str | None = None
    """The name of the API key that it was sent with, whether or not the job belongs to it."""
    by_operator: bool = False
    """True if that key may operate the plane."""
    scope: str | None = None
    """Scope of its ids."""
    known: JobStatus | None = None
    """Status of the job with this id, if it was sent before."""

    @property
    def shown_id(self) -> str:
        """Its id as its sender chose it."""
        return shown(self.job_id)

    def with_scoped_id(self) -> Submission:
        """The same under a name of its sender's own: its id, although made, is that of another's job."""
        job_id = scoped(self.job_id, self.scope)
        job = self.job.model_copy(update={"job_id": job_id})
        return replace(self, job=job, job_id=job_id, payload=job.model_dump_json(exclude_unset=True).encode())

    @cached_property
    def digest(self) -> str:
        """Digest of the job and its owner."""
        return job_digest(self.job, self.owner)


def make_job_id() -> str:
    """An id that no other job has."""
    return new_job_id(time.time_ns() // 1_000_000, os.urandom(ID_ENTROPY_BYTES))


def submission(
    job: Job,
    body: bytes,
    *,
    idempotency_key: str | None,
    generated_id: str,
    owner: str | None = None,
    scope: str | None = None,
) -> Submission:
    """Settles the job's ids: its own is the one it chose, else the Idempotency-Key header's, else the one made here.

    A dry run takes no id: it decides nothing for a job that comes with the same one.

    Raises:
        RequestError: 422 for an Idempotency-Key that can't be an id, or has the form of a key.
    """
    chosen = job.job_id
    if chosen is None and idempotency_key is not None:
        chosen = idempotency_key
        if not _ID_IN_HEADER.match(chosen):
            message = "must have 1 to 128 characters, all of them printable ASCII"
            raise invalid_job([FieldError(path="Idempotency-Key", message=message)])
        if holds_key(chosen):
            raise invalid_job([FieldError(path="Idempotency-Key", message=NO_KEY_IN_ID)])
    own = f"{chosen}@{generated_id}" if job.dry_run else scoped_execution(chosen or "", scope)
    job_id = generated_id if chosen is None else own
    refers = scope_references(job, scope)
    inside = refers if job_id == job.job_id else refers.model_copy(update={"job_id": job_id})
    if refers is not job or ("job_id" in job.model_fields_set and inside is not job):
        body = inside.model_dump_json(exclude_unset=True).encode()
    elif inside is not job:
        # The sender's own bytes, as they are: no number and no escape changes its form on the way.
        body = with_field(body, "job_id", job_id)
    return Submission(inside, job_id, chosen is None or job.dry_run, body, owner, scope=scope)
