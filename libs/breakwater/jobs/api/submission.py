"""A job before it is published, and its ids."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from breakwater.identity.rules.callers import NOBODY, Attribution
from breakwater.jobs.contract.job import Job
from breakwater.jobs.rules.ids import JobIds, execution_of, ids_of, key_of
from breakwater.jobs.rules.ownership import job_digest
from breakwater.jobs.rules.turns import NOBODYS, CallerTurn
from breakwater.jobs.store.accepted import JobStatus
from breakwater.kernel.http.parsing import invalid_job
from breakwater.kernel.immutable import immutable
from breakwater.kernel.nats.bodies import IN_MESSAGE_BYTES
from breakwater.kernel.validation import FieldError
from breakwater.redaction.rules.redact import id_objection
from breakwater.redaction.settings import DEFAULT_REDACTION, RedactionRules

_ID_IN_HEADER = re.compile(r"[\x20-\x7e]{1,128}\Z")


@immutable(slots=False)
class Submission:
    """A job that may be published."""

    job: Job
    job_id: str
    """The job's own id: its body's, its Idempotency-Key, or a generated one."""
    execution_id: str
    id_generated: bool
    """True if the plane generated the execution id, which no other job has."""
    payload: bytes
    """The job as its sender wrote it."""
    owner: str | None = None
    """The name of the API key that the job belongs to."""
    submitted_by: str | None = None
    """The name of the API key that sent the job. Another key may own it."""
    attribution: Attribution = NOBODY
    """The user and the team whose call it is."""
    tags: Mapping[str, str] = field(default_factory=dict[str, str])
    """The cost tags of the key that sent the job."""
    turn: CallerTurn = NOBODYS
    """The turn that it may wait for."""
    residency: str | None = None
    """The region that the calls of the key that sent it must not leave."""
    by_operator: bool = False
    """True if the sender may operate the plane."""
    scope: str | None = None
    """The scope of the job's ids."""
    private: bool = False
    """True if its agent keeps no texts. A large body, which a dead letter may keep, is then stored encrypted."""
    earlier: JobStatus | None = None
    """The status of an earlier job with this execution id."""
    received_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    """Taken before the job is queued, so that no step of the job has an earlier time."""

    @property
    def ids(self) -> JobIds:
        """The ids of the job and of those that it refers to."""
        return ids_of(self.job, self.scope, job_id=self.job_id, execution_id=self.execution_id)

    def with_hashed_id(self) -> Submission:
        """Returns the job as another execution, for a generated id that another owner's job has."""
        return replace(self, execution_id=key_of(self.scope, self.job_id))

    def drop_texts(self) -> None:
        """Drops the texts of a large job that is stored. Whoever waits for its result needs its other fields alone."""
        if len(self.payload) <= IN_MESSAGE_BYTES:
            return
        if not self.id_generated:
            _ = self.digest  # it is compared with that of the result
        without_texts = {"prompt": None, "messages": None, "input": None}
        # Other frames hold this submission, too, while the answer takes minutes.
        object.__setattr__(self, "job", self.job.model_copy(update=without_texts))
        object.__setattr__(self, "payload", b"")

    @cached_property
    def digest(self) -> str:
        """The digest of the job and its owner."""
        return job_digest(self.job, self.owner)


def submission(
    job: Job,
    body: bytes,
    *,
    idempotency_key: str | None,
    generated_id: str,
    owner: str | None = None,
    scope: str | None = None,
    redaction: RedactionRules = DEFAULT_REDACTION,
    **details: Any,
) -> Submission:
    """Returns a job with its ids: its own, else the Idempotency-Key header, else the generated one.

    A dry run reserves no id: a later job with the same id still runs.

    Args:
        job: the job.
        body: the job as its sender wrote it.
        idempotency_key: the header; None without it.
        generated_id: the id of a job without an id and a header.
        owner: the name of the API key that the job belongs to.
        scope: the scope of the job's ids.
        redaction: the config's rules, which ids must not match.
        **details: further fields of the `Submission`.

    Raises:
        RequestError: 422, the Idempotency-Key can't be an id, looks like an API key, or would be redacted.
    """
    chosen_id = job.job_id
    if chosen_id is None and idempotency_key is not None:
        chosen_id = idempotency_key
        if not _ID_IN_HEADER.match(chosen_id):
            message = "must have 1 to 128 characters, all of them printable ASCII"
            raise invalid_job([FieldError(path="Idempotency-Key", message=message)])
        if (why := id_objection(redaction, chosen_id)) is not None:
            raise invalid_job([FieldError(path="Idempotency-Key", message=why)])
    id_generated = chosen_id is None or job.dry_run
    execution_id = generated_id if id_generated else execution_of(scope, str(chosen_id))
    return Submission(job, chosen_id or generated_id, execution_id, id_generated, body, owner, scope=scope, **details)
