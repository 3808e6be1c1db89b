"""Jobs that have not ended: their states, and what they wait for."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from breakwater.jobs.contract.execution import OwnJobId, PageCursor
from breakwater.kernel.types import Count, Event, Identifier, Message, ModelId, Timestamp

JobState = Literal["running", "waiting", "parked", "queued"]

WaitKind = Literal[
    "back_off", "hold", "rate_limit", "budget", "probe", "gate", "dependency", "concurrency", "claim", "worker"
]


class JobWait(Event):
    """The reason why a job does not go on, and for how long."""

    kind: WaitKind = Field(
        description="`back_off`: the pause before a retry; `hold`: the end of the provider's rate limit, which holds "
        "the model; `rate_limit`: a limit of the config; `budget`: money that calls in flight reserve; `probe`: the "
        "result of the one call that an open breaker lets through; `gate`: another condition of the call; "
        "`dependency`: jobs in `depends_on`; `concurrency`: a slot of its agent, which other callers have; `claim`: "
        "the end of the claim of a worker that is silent; `worker`: a worker that takes it again."
    )
    message: str = Field(description="The same in words.")
    since: Timestamp | None = Field(default=None, description="When this wait began; null if unknown.")
    until: Timestamp | None = Field(
        default=None, description="When the job looks again at the latest; null if that is not known."
    )
    ahead: Count | None = Field(
        default=None,
        description="For a rate limit, the number of calls that waited before it when it last asked. Null where the "
        "job has no place in a queue.",
    )
    frees: str | None = Field(default=None, description="For a rate limit, the event that makes room, in words.")


class CurrentJob(Event):
    """A job that has not ended."""

    execution_id: Identifier
    job_id: OwnJobId
    agent: Identifier
    tenant: Identifier | None = None
    submitted_by: Identifier | None = Field(
        default=None,
        description="Name of the API key that the job was submitted with, or NATS user of the program. Null for the "
        "NATS user that all programs share.",
    )
    state: JobState = Field(
        description="`running`: a worker has it. `waiting`: a worker has it, and it waits for less than ten seconds; "
        "or its worker is gone, and the next one waits for its claim to end. `parked`: it waits for longer, and holds "
        "no slot. `queued`: no worker has taken it, or it is due again."
    )
    queued_at: Timestamp = Field(description="When it was accepted.")
    age_ms: Count = Field(description="Milliseconds from `queued_at` to now.")
    attempt: int | None = Field(
        default=None, description="Number of the last attempt that began. Null before the first."
    )
    model: ModelId | None = Field(
        default=None, description="Model of that attempt; before it, the model that is to be called first."
    )
    wait: JobWait | None = Field(default=None, description="For a waiting or parked job, if it is known.")
    cancelling: bool = Field(default=False, description="True if it is to be cancelled, and has not ended yet.")
    prompt: str | None = Field(
        default=None,
        description="The beginning of its prompt, or of the last message of a user: up to 120 characters, redacted. "
        "Null if its agent keeps no prompts (`persist_prompts`), if the text can't be decrypted, or without a text.",
    )


class CurrentJobQuery(Message):
    """A filter of jobs that have not ended, and a page of them."""

    state: JobState | None = Field(default=None, description="Filter by state.")
    agent: Identifier | None = Field(default=None, description="Filter by agent.")
    tenant: Identifier | None = Field(default=None, description="Filter by tenant.")
    key: Identifier | None = Field(default=None, description="Filter by `submitted_by`.")
    counts: bool = Field(default=False, description="True to count the jobs in each state, too.")
    after: PageCursor | None = Field(
        default=None, description="`next` of a page, to get the one after it. Keep the other parameters."
    )
    limit: Annotated[int, Field(ge=1, le=200, description="Maximum number of jobs per page.")] = 50


class CurrentJobCounts(Event):
    """The number of jobs in each state, of the agent in the query or of all, whatever their tenants and keys."""

    running: Count | None = Field(description="Null if more than 200 jobs are running or waiting.")
    waiting: Count | None = Field(description="Null if more than 200 jobs are running or waiting.")
    in_progress: Count = Field(description="Running and waiting jobs together.")
    parked: Count
    queued: Count


class CurrentJobList(Event):
    """A page of the jobs that have not ended."""

    jobs: tuple[CurrentJob, ...]
    next: str | None = Field(
        description="Pass as `after` to get the next page. Null on the last one. A page may be short or empty and "
        "still have a next one: a request reads a limited number of jobs, and leaves out those that don't match."
    )
    counts: CurrentJobCounts | None = Field(
        default=None, description="If `counts` was asked for by a caller who may see all jobs."
    )
    at: Timestamp = Field(description="When the jobs were read.")
