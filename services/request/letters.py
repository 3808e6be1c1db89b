"""Dead letters: what each is of, and whether its job can run again."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import structlog
from pydantic import ValidationError

from breakwater.bus.lookup import Found
from breakwater.config import Config, objection
from breakwater.contracts.api import DeadLetterCount, DeadLetterKind
from breakwater.contracts.events import DeadLetter
from breakwater.contracts.job import Job
from breakwater.contracts.subjects import Header, Stream, decode_token, encode_token
from breakwater.contracts.types import format_time
from services.request.parsing import Submission, read_job, suggestion
from services.request.problems import Problem

ALL_DEAD_LETTERS = "bw.dlq.>"

ROOM = 1024
"""What a job may be longer than the limit for jobs, as the worker sees it: ids are put into it on the way."""

_KINDS: Mapping[str, DeadLetterKind] = {
    Stream.JOBS: "job",
    Stream.PARKED: "job",
    Stream.ALERTS: "alert",
    Stream.ALERTER: "alert",
}


@dataclass(frozen=True, slots=True)
class Kept:
    """A dead letter as it stands in DLQ."""

    number: int
    dead_letter: DeadLetter
    payload: bytes
    """The original, with all its secrets."""
    ce_id: str

    @property
    def kind(self) -> DeadLetterKind:
        """What it is of."""
        return _KINDS.get(self.dead_letter.stream, "event")

    @property
    def replay_id(self) -> str:
        """The id of its replay: the same each time, and of no dead letter of a stream that was made anew."""
        dead_letter = self.dead_letter
        named = "\n".join((self.ce_id, dead_letter.stream, str(dead_letter.sequence), format_time(dead_letter.at)))
        return f"rpl_{hashlib.sha256(named.encode()).hexdigest()[:32]}"


def read_dead_letter(found: Found) -> Kept | None:
    """A stored message as a dead letter; None, and a line in the log, where it is none."""
    try:
        dead_letter = DeadLetter.model_validate_json(found.data)
        payload = base64.b64decode(dead_letter.payload_base64, validate=True)
    except (ValidationError, ValueError):
        structlog.get_logger().error("dead_letter_unreadable", sequence=found.sequence)
        return None
    return Kept(found.sequence, dead_letter, payload, found.headers.get(Header.CE_ID.value, ""))


def filter_for(reason: str | None, agent: str | None) -> str:
    """The subjects of the dead letters of a reason and an agent."""
    if reason is None and agent is None:
        return ALL_DEAD_LETTERS
    return ".".join(("bw.dlq", *("*" if name is None else encode_token(name) for name in (reason, agent))))


def counted(subjects: Mapping[str, int]) -> tuple[DeadLetterCount, ...]:
    """How many dead letters there are, the most first, from how many messages their subjects hold."""
    counts: list[DeadLetterCount] = []
    for subject, count in subjects.items():
        match subject.split("."):
            case [_, _, reason, agent]:
                counts.append(DeadLetterCount(reason=_name(reason), agent=_name(agent), count=count))
            case _:
                continue  # not published by us
    return tuple(sorted(counts, key=lambda one: (-one.count, one.reason, one.agent)))


def job_of(config: Config, kept: Kept) -> Job | str:
    """The job of a dead letter, where it can run as the config is now; else in words why it can't, not redacted."""
    if kept.kind != "job":
        return _no_job(config, kept)
    limit = config.limits.max_body_bytes
    if len(kept.payload) > limit + ROOM:
        return f"the job has {len(kept.payload):,} bytes; at most {limit:,} are accepted (limits.max_body_bytes)"
    try:
        job = read_job(kept.payload)
    except Problem as problem:
        return f"this is not a job: {problem.message}"
    if job.agent not in config.agents:
        return f"agent {job.agent!r} is not configured{suggestion(job.agent, config.agents)}"
    if kept.dead_letter.agent not in (None, job.agent):
        # Who may publish for one agent may not run another one by having a person replay it.
        return f"the job is for agent {job.agent!r}, and was published on the subject of {kept.dead_letter.agent!r}"
    problem = objection(config, job)
    return job if problem is None else f"{problem.path}: {problem.message}"


def replay_of(kept: Kept, job: Job) -> Submission:
    """The job of a dead letter, to be published again: a new execution, which names the old one."""
    dead_letter = kept.dead_letter
    original = dead_letter.execution_id or job.job_id or f"{dead_letter.stream}/{dead_letter.sequence}"
    again = job.model_copy(update={"job_id": kept.replay_id, "metadata": {**job.metadata, "replay_of": original}})
    payload = again.model_dump_json(exclude_unset=True).encode()
    return Submission(again, kept.replay_id, id_made_here=False, payload=payload)


def _no_job(config: Config, kept: Kept) -> str:
    channel = kept.dead_letter.headers.get(Header.CHANNEL.value)
    if channel is not None:
        again = f"`breakwater alerts replay --dead-letter {kept.number}` tries it again"
        return f"it is an alert that did not reach channel {channel!r}; {again}"
    days = "here for 30 days"
    if kept.kind == "alert":
        return (
            f"it is an alert that could not be handled, and no job; it stays in {kept.dead_letter.stream}, and {days}"
        )
    age = f"{config.limits.events_max_age_h:g} h" if kept.dead_letter.stream == Stream.EVENTS else "a time"
    stays = f"it stays in {kept.dead_letter.stream} for {age} and {days}"
    return f"it is an event that could not be handled, and no job; {stays}"


def _name(token: str) -> str:
    try:
        return decode_token(token)
    except UnicodeDecodeError:
        return token
