"""Dead letters, as they are kept; and running their jobs again, each once.

A replay's id is a function of its dead letter, so the worker runs it once as long as its record is kept. What outlasts
that is the record beside the dead letter. It is written once the job is queued: after a crash in
between, a second replay is the same job again.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal

import structlog
from pydantic import ValidationError

from breakwater.bus.errors import AlreadyDecided, BusError
from breakwater.bus.lookup import Connection, Found, last_on
from breakwater.bus.publisher import Publisher
from breakwater.config import Config, validate_job
from breakwater.contracts import subjects
from breakwater.contracts.dead_letters import (
    DeadLetterCount,
    DeadLetterKind,
    ReplayedDeadLetter,
    ReplayStatus,
    SkippedDeadLetter,
)
from breakwater.contracts.events import DeadLetter, ReplayNote
from breakwater.contracts.execution import Status
from breakwater.contracts.job import Job, ScopedJob
from breakwater.contracts.subjects import PROGRAM, Header, Stream, decode_token, encode_token
from breakwater.contracts.types import Event, FullId, format_time
from breakwater.encryption import LEFT_OUT, OFF, Cipher, Undecryptable
from breakwater.policy.ownership import longest_job, scope_in, scoped, within
from breakwater.policy.redact import Redactor
from breakwater.state.accepted import Accepted
from services.request.jobs import Queue
from services.request.parsing import Submission, read_job, suggestion
from services.request.problems import Problem, not_done, unavailable

ALL_DEAD_LETTERS = "bw.dlq.>"

_KINDS: Mapping[str, DeadLetterKind] = {
    Stream.JOBS: "job",
    Stream.PARKED: "job",
    Stream.ALERTS: "alert",
    Stream.ALERTER: "alert",
}

SUCCEEDED = "its job succeeded after all, by another worker: there is nothing to replay"


@dataclass(frozen=True, slots=True)
class Kept:
    """A dead letter as it stands in DLQ."""

    number: int
    dead_letter: DeadLetter
    payload: bytes
    """The original, with all its secrets."""
    ce_id: str
    undecryptable: str | None = None
    """Why the original can't be read; None where it can."""

    @property
    def kind(self) -> DeadLetterKind:
        """What it is of."""
        return _KINDS.get(self.dead_letter.stream, "event")

    @property
    def channel(self) -> str | None:
        """The channel that an alert did not reach; None where it is no such alert."""
        return self.dead_letter.headers.get(Header.CHANNEL.value)

    @property
    def replay_id(self) -> str:
        """The id of its replay: the same each time, and different for dead letters of a stream that was made again."""
        dead_letter = self.dead_letter
        named = "\n".join((self.ce_id, dead_letter.stream, str(dead_letter.sequence), format_time(dead_letter.at)))
        return f"rpl_{hashlib.sha256(named.encode()).hexdigest()[:32]}"


def read_dead_letter(found: Found, cipher: Cipher = OFF) -> Kept | None:
    """A stored message as a dead letter; None, and a line in the log, where it is none."""
    undecryptable: str | None = None
    data = found.data
    try:
        try:
            data = cipher.decrypt_document(data)
        except Undecryptable as error:
            undecryptable = str(error)
        dead_letter = DeadLetter.model_validate_json(data)
        payload = base64.b64decode(dead_letter.payload_base64, validate=True)
    except (ValidationError, ValueError):
        structlog.get_logger().error("dead_letter_unreadable", sequence=found.sequence)
        return None
    if dead_letter.encrypted == LEFT_OUT:
        undecryptable = f"its text was {LEFT_OUT}"
    try:
        payload = cipher.decrypt_document(payload)  # of a job whose key the worker had not
    except Undecryptable as error:
        undecryptable = str(error)
    return Kept(found.sequence, dead_letter, payload, found.headers.get(Header.CE_ID.value, ""), undecryptable)


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
    """The job of a dead letter, where it can run with the current config; else why not, not redacted."""
    if kept.kind != "job":
        return _why_no_job(config, kept)
    if kept.undecryptable is not None:
        return kept.undecryptable
    if (size := kept.dead_letter.omitted_bytes) is not None:
        return f"its {size:,} bytes were too large to be kept in a dead letter: submit the job again, and smaller"
    limit = config.limits.max_body_bytes
    is_scoped = Header.SCOPED_IDS.value in kept.dead_letter.headers
    if len(kept.payload) > longest_job(limit, scoped_ids=is_scoped):
        return f"the job has {len(kept.payload):,} bytes; at most {limit:,} are accepted (limits.max_body_bytes)"
    try:
        job = read_job(kept.payload, ScopedJob if is_scoped else Job)
    except Problem as problem:
        return f"this is not a job: {problem.message}"
    if job.agent not in config.agents:
        return f"agent {job.agent!r} is not configured{suggestion(job.agent, config.agents)}"
    if kept.dead_letter.agent not in (None, job.agent):
        # A caller that may publish for one agent must not run another one through an operator's replay.
        return f"the job is for agent {job.agent!r}, and was published on the subject of {kept.dead_letter.agent!r}"
    problem = validate_job(config, job)
    return job if problem is None else f"{problem.path}: {problem.message}"


def replay_of(kept: Kept, job: Job) -> Submission:
    """The job of a dead letter, to be published again: a new execution, which names the old one."""
    dead_letter = kept.dead_letter
    original = dead_letter.execution_id or job.job_id or f"{dead_letter.stream}/{dead_letter.sequence}"
    tokens = (dead_letter.headers.get(one.value) for one in (Header.OWNER, Header.SUBMITTED_BY))
    owner, sender = (None if token is None else _name(token) for token in tokens)
    if Header.SCOPED_IDS.value not in dead_letter.headers and (sender is None or sender.startswith(PROGRAM)):
        # Of a program, as the worker did.
        scope = scope_in(owner, None) if owner is not None and owner.startswith(PROGRAM) else None
        job = within(job, scope, scoped)
    again = job.model_copy(update={"job_id": kept.replay_id, "metadata": {**job.metadata, "replay_of": original}})
    return Submission(again, kept.replay_id, False, again.model_dump_json(exclude_unset=True).encode(), owner, sender)


def _why_no_job(config: Config, kept: Kept) -> str:
    if kept.channel is not None:
        again = f"`breakwater alerts replay --dead-letter {kept.number}` tries it again"
        return f"it is an alert that did not reach channel {kept.channel!r}; {again}"
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


@dataclass(frozen=True, slots=True)
class By:
    """Who replays, when and why."""

    name: str
    why: str
    at: datetime


@dataclass(slots=True)
class Outcome:
    """What came of replaying dead letters, as far as it has come."""

    replayed: list[ReplayedDeadLetter] = field(default_factory=list[ReplayedDeadLetter])
    already: int = 0
    skipped: list[SkippedDeadLetter] = field(default_factory=list[SkippedDeadLetter])

    def skip(self, dead_letter_id: int, why: str) -> None:
        """Leaves a dead letter alone."""
        self.skipped.append(SkippedDeadLetter(dead_letter_id=dead_letter_id, why=why))


class _Ended(Event):
    """What is read of a result or a record."""

    execution_id: FullId
    status: Status


class Replays:
    """The replays that there are, and new ones."""

    def __init__(
        self,
        config: Config,
        connection: Connection,
        queue: Queue,
        publisher: Publisher,
        accepted: Accepted,
        redactor: Redactor,
        cipher: Cipher = OFF,
    ) -> None:
        self.cipher = cipher
        self._config = config
        self._connection = connection
        self._queue = queue
        self._publisher = publisher
        self._accepted = accepted
        self._redactor = redactor
        self._remembered = timedelta(hours=config.limits.events_max_age_h)

    def is_withheld(self, kept: Kept) -> bool:
        """Whether nobody may be shown the original: then, or as the config is now, its agent keeps no prompts."""
        if kept.kind != "job" or kept.dead_letter.withheld:
            return kept.dead_letter.withheld
        agent = self._config.agents.get(kept.dead_letter.agent or "")
        return agent is None or not agent.persist_prompts

    def why_not(self, kept: Kept) -> str | None:
        """Why the dead letter holds nothing that can run as the config is now; redacted. None where it does."""
        job = job_of(self._config, kept)
        return self._redactor.text(job) if isinstance(job, str) else None

    async def notes(self, dead_letters: Sequence[int]) -> dict[int, ReplayNote]:
        """The replays of some dead letters. Raises BusError."""
        found: dict[int, ReplayNote] = {}
        async with aclosing(
            last_on(
                self._connection, Stream.DLQ, [subjects.replayed(dead_letter_id) for dead_letter_id in dead_letters]
            )
        ) as stored:
            async for one in stored:
                if (note := one.read(ReplayNote)) is not None:
                    found[note.dead_letter_id] = note
        return found

    async def ended(self, agents: Mapping[str, str]) -> dict[str, Status]:
        """How executions ended, of those that have and are remembered. `agents`: of each. Raises BusError."""
        records = [subjects.execution(agent, execution_id) for execution_id, agent in agents.items()]
        found = await self._ended(Stream.EVENTS, records)
        # The result comes before the record.
        rest = [subjects.result(execution_id) for execution_id in agents if execution_id not in found]
        return found | await self._ended(Stream.RESULTS, rest)

    def status(self, note: ReplayNote, ended: Mapping[str, Status], now: datetime) -> ReplayStatus | None:
        """How a replay stands; None where that is forgotten."""
        forgotten = now - note.at > self._remembered
        return ended.get(note.execution_id, None if forgotten else "accepted")

    async def replay(self, dead_letters: Sequence[Kept], by: By, outcome: Outcome) -> None:
        """Replays dead letters at the same time, and adds what came of it to `outcome`.

        Raises:
            BusError: whether they were replayed before is not known; none was replayed.
            Problem: 503, not all were accepted; `outcome` has those that were.
        """
        notes = await self.notes([kept.number for kept in dead_letters])
        runnable: list[tuple[Kept, Job]] = []
        for kept in dead_letters:
            if kept.number in notes:
                outcome.already += 1
            elif isinstance(job := job_of(self._config, kept), str):
                outcome.skip(kept.number, self._redactor.text(job))
            else:
                runnable.append((kept, job))
        ended = await self.ended(
            {kept.dead_letter.execution_id: job.agent for kept, job in runnable if kept.dead_letter.execution_id}
        )
        # Two workers can have run a job at once: one gave it up, and the other one answered it.
        wanted: list[tuple[Kept, Job]] = []
        for kept, job in runnable:
            if ended.get(kept.dead_letter.execution_id or "") == "succeeded":
                outcome.skip(kept.number, SUCCEEDED)
            else:
                wanted.append((kept, job))
        done = await asyncio.gather(*(self._put(kept, job, by) for kept, job in wanted), return_exceptions=True)
        for (kept, _), result in zip(wanted, done, strict=True):
            if result == "replayed":
                outcome.replayed.append(ReplayedDeadLetter(dead_letter_id=kept.number, execution_id=kept.replay_id))
            elif result == "already":
                outcome.already += 1
        for result in done:
            if isinstance(result, BaseException):
                raise result

    async def _put(self, kept: Kept, job: Job, by: By) -> Literal["replayed", "already"]:
        again = replay_of(kept, job)
        duplicate = await self._queue.put(again, None)
        self._accepted.mark(
            again.job_id,
            job.agent,
            tenant=job.tenant,
            owner=again.owner,
            digest=again.digest,
            plan_id=job.plan_id,
        )
        note = ReplayNote(
            dead_letter_id=kept.number,
            execution_id=kept.replay_id,
            agent=job.agent,
            by=by.name,
            why=by.why or None,
            at=by.at,
        )
        # Another request that replays it at the same moment may be the first to record it.
        try:
            await self._publisher.event(subjects.replayed(kept.number), note, id=kept.replay_id, at=by.at, once=True)
        except AlreadyDecided:
            return "already"
        if duplicate:
            return "already"
        await self._queue.announce_queued(again)
        return "replayed"

    async def _ended(self, stream: Stream, of: Sequence[str]) -> dict[str, Status]:
        found: dict[str, Status] = {}
        async with aclosing(last_on(self._connection, stream, of)) as stored:
            async for one in stored:
                if (ended := one.read(_Ended)) is not None:
                    found[ended.execution_id] = ended.status
        return found


def not_all(error: BusError | Problem, outcome: Outcome) -> Problem:
    """503: what was asked for is not done, or not all of it."""
    problem = error if isinstance(error, Problem) else not_done(error)
    if not outcome.replayed:
        return problem
    done = f"{len(outcome.replayed):,} were replayed before this happened, and asking again replays none of them twice"
    return unavailable(problem.code, f"{problem.message}; {done}")
