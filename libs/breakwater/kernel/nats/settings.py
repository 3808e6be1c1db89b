"""The section `limits` of the config: sizes of jobs and streams, and times."""

from __future__ import annotations

from pydantic import Field

from breakwater.kernel.nats.subjects import DUPLICATE_WINDOW_S
from breakwater.kernel.types import Message

_MIB = 1024**2
_GIB = 1024**3


class Limits(Message):
    """The size and time limits of the plane itself."""

    max_body_bytes: int = Field(
        default=32_000_000,
        ge=1_000,
        le=100_000_000,
        description=(
            "Maximum size of a job in bytes over HTTP. Bodies over 4,000,000 bytes are in an object store of NATS "
            "while the job runs. A job that a program publishes on NATS must fit into a message of the server (8 MB)."
        ),
    )
    bodies_max_bytes: int = Field(
        default=2 * _GIB,
        ge=_MIB,
        description=(
            "Maximum bytes of bodies over 4,000,000 bytes, of jobs that wait or run and of dead letters. Beyond it, "
            "jobs with such bodies are refused."
        ),
    )
    bodies_in_memory_bytes: int = Field(
        default=128_000_000,
        ge=_MIB,
        description=(
            "Maximum bytes of bodies over 4,000,000 bytes that one process of `request` or `worker` has in memory; "
            "the next one waits. They take up to six times as much memory."
        ),
    )
    # Redis remembers for six days which events were applied.
    events_max_age_h: float = Field(
        default=72, gt=0, le=144, description="How long EVENTS keeps events, and a job_id stays idempotent."
    )
    # A job that is repeated within the duplicate window is answered from its stored result.
    results_max_age_h: float = Field(
        default=24, ge=DUPLICATE_WINDOW_S / 3600, description="How long RESULTS keeps results."
    )
    jobs_max_bytes: int = Field(
        default=2 * _GIB, ge=_MIB, description="Maximum bytes of waiting jobs. Beyond it, submissions are refused."
    )
    jobs_max_bytes_per_agent: int | None = Field(
        default=None,
        ge=_MIB,
        description=(
            "Maximum bytes of waiting jobs per agent, as `request` estimates them. It refuses "
            "more over HTTP. Default: a quarter of `jobs_max_bytes`."
        ),
    )
    jobs_max_per_agent: int | None = Field(
        default=None,
        ge=1,
        description=(
            "Maximum number of waiting jobs per agent and sender: the HTTP API, `client`, and "
            "each named program. NATS refuses more. Default: no limit."
        ),
    )
    events_max_bytes: int = Field(
        default=8 * _GIB,
        ge=_MIB,
        description=(
            "Maximum bytes of EVENTS; a job needs about 5 KB. When it is full, workers wait "
            "until the oldest events have expired. Jobs stay in JOBS, and nothing is lost."
        ),
    )
    results_max_bytes: int = Field(
        default=4 * _GIB, ge=_MIB, description="Maximum bytes of RESULTS, which stores each answer once."
    )
    responses_max_bytes: int = Field(
        default=1 * _GIB,
        ge=_MIB,
        description=(
            "Maximum bytes of RESPONSES, which stores requests and chunks of stored responses. When it is full, the "
            "oldest are dropped. A key, or a tenant, may store a quarter of it in ten minutes and while a background "
            "response is under way, and all may store three quarters meanwhile; more background responses are refused."
        ),
    )
    dead_letters_max_bytes: int = Field(
        default=2 * _GIB,
        ge=_MIB,
        description=(
            "Maximum bytes of the stream DLQ. When it is full, jobs to be dead-lettered wait and keep their agents' "
            "slots."
        ),
    )
    alerts_max_bytes: int = Field(
        default=256 * _MIB,
        ge=_MIB,
        description="Maximum bytes of ALERTS. When it is full, the oldest alerts are dropped.",
    )
    drain_s: float = Field(
        default=8.0, ge=0, le=600, description="Time that a stopping worker gives its calls to finish."
    )
