"""`/api/v1/dlq`: dead letters as people may see them, and running their jobs again, each once.

A replay's id is a function of its dead letter, so the worker runs it once as long as its record is kept. A note in DLQ
outlasts that. It is written once the job is queued: after a crash in between, a second replay is the same job again.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial

import structlog
from pydantic import JsonValue, ValidationError
from pydantic_core import from_json, to_json

from breakwater.config import Config, validate_job
from breakwater.jobs.api.job_queue import JobQueue
from breakwater.jobs.api.submission import Submission
from breakwater.jobs.contract.dead_letters import (
    MAX_DEAD_LETTERS,
    DeadLetterCount,
    DeadLetterDetails,
    DeadLetterKind,
    DeadLetterList,
    DeadLetterQuery,
    DeadLetterReplays,
    ListedDeadLetter,
    ReplayDeadLettersRequest,
    ReplayedDeadLetter,
    ReplayStatus,
    SkippedDeadLetter,
)
from breakwater.jobs.contract.events import DeadLetter, ReplayNote
from breakwater.jobs.contract.execution import Status
from breakwater.jobs.contract.job import Job, ScopedJob
from breakwater.jobs.rules.ownership import longest_job, scope_in, scope_references, scoped
from breakwater.kernel.http.operations import NATS_UNAVAILABLE, ApiRequest, operation, utc_now
from breakwater.kernel.http.parsing import read_job, suggestion
from breakwater.kernel.http.problems import RequestError, not_done, unavailable, unknown
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.errors import AlreadyDecidedError, BusError
from breakwater.kernel.nats.lookup import Found, Lookup
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import PROGRAM, Header, Stream, decode_token, encode_token
from breakwater.kernel.security.encryption import LEFT_OUT, OFF, Cipher, DecryptionError
from breakwater.kernel.surrogates import read_whole
from breakwater.kernel.types import Event, FullId, Message, format_time
from breakwater.redaction.rules.redact import Redactor

ALL_DEAD_LETTERS = "bw.dlq.>"
SHOWN_DAYS = 7
MAX_DIGITS = 19
"""Of a dead letter's number, which is below 2**63."""

AT_ONCE = 64
AT_ONCE_BYTES = 8 * 1024 * 1024
"""The most dead letters that are replayed together; memory holds their jobs."""

REPLAY_S = 5.0
"""Time after which a request to replay many is answered with what is done, and where to go on."""

MAX_PAYLOAD = 64 * 1024
"""The most bytes of a dead letter's payload that are shown."""

SUCCEEDED = "its job succeeded after all, by another worker: there is nothing to replay"

_KINDS: Mapping[str, DeadLetterKind] = {
    Stream.JOBS: "job",
    Stream.PARKED: "job",
    Stream.ALERTS: "alert",
    Stream.ALERTER: "alert",
}


@dataclass(frozen=True, slots=True)
class StoredDeadLetter:
    """A dead letter in DLQ."""

    number: int
    dead_letter: DeadLetter
    payload: bytes
    """The original, with all its secrets."""
    ce_id: str
    undecryptable: str | None = None
    """The reason why the original can't be read, if so."""

    @property
    def kind(self) -> DeadLetterKind:
        """The kind of the original."""
        return _KINDS.get(self.dead_letter.stream, "event")

    @property
    def channel(self) -> str | None:
        """The channel that an alert did not reach; None for other dead letters."""
        return self.dead_letter.headers.get(Header.CHANNEL.value)

    @property
    def replay_id(self) -> str:
        """The id of its replay: the same each time, and different for dead letters of a stream that was made again."""
        dead_letter = self.dead_letter
        named = "\n".join((self.ce_id, dead_letter.stream, str(dead_letter.sequence), format_time(dead_letter.at)))
        return f"rpl_{hashlib.sha256(named.encode()).hexdigest()[:32]}"


def read_dead_letter(found: Found, cipher: Cipher = OFF) -> StoredDeadLetter | None:
    """A stored message as a dead letter; None, and a line in the log, if it is none."""
    undecryptable: str | None = None
    data = found.data
    try:
        try:
            data = cipher.decrypt_document(data)
        except DecryptionError as error:
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
    except DecryptionError as error:
        undecryptable = str(error)
    ce_id = found.headers.get(Header.CE_ID.value, "")
    return StoredDeadLetter(found.sequence, dead_letter, payload, ce_id, undecryptable)


def filter_for(reason: str | None, agent: str | None) -> str:
    """The subjects of the dead letters of a reason and an agent."""
    if reason is None and agent is None:
        return ALL_DEAD_LETTERS
    return ".".join(("bw.dlq", *("*" if name is None else encode_token(name) for name in (reason, agent))))


@dataclass(slots=True)
class ReplayTally:
    """The outcome of replaying dead letters, so far."""

    replayed: list[ReplayedDeadLetter] = field(default_factory=list[ReplayedDeadLetter])
    already: int = 0
    skipped: list[SkippedDeadLetter] = field(default_factory=list[SkippedDeadLetter])

    def skip(self, dead_letter_id: int, why: str) -> None:
        """Counts a dead letter that is left alone."""
        self.skipped.append(SkippedDeadLetter(dead_letter_id=dead_letter_id, why=why))


class _Ended(Event):
    """The fields that are read of a result or a record."""

    execution_id: FullId
    status: Status


@dataclass(frozen=True, slots=True)
class Replays:
    """Runs the jobs of dead letters again, and knows which were."""

    config: Config
    lookup: Lookup
    queue: JobQueue
    publisher: Publisher
    redactor: Redactor
    cipher: Cipher = OFF

    def job_of(self, kept: StoredDeadLetter) -> Job | str:
        """The job of a dead letter, if it can run with the current config; else why not, redacted."""
        try:
            return self._job_of(kept)
        except ValueError as why_not:
            return self.redactor.text(str(why_not))

    def _job_of(self, kept: StoredDeadLetter) -> Job:
        if kept.kind != "job":
            raise ValueError(_why_no_job(self.config, kept))
        if kept.undecryptable is not None:
            raise ValueError(kept.undecryptable)
        if (size := kept.dead_letter.omitted_bytes) is not None:
            raise ValueError(
                f"its {size:,} bytes were too large to be kept in a dead letter: submit the job again, and smaller"
            )
        limit = self.config.limits.max_body_bytes
        is_scoped = Header.SCOPED_IDS.value in kept.dead_letter.headers
        if len(kept.payload) > longest_job(limit, scoped_ids=is_scoped):
            raise ValueError(
                f"the job has {len(kept.payload):,} bytes; at most {limit:,} are accepted (limits.max_body_bytes)"
            )
        try:
            job = read_job(kept.payload, ScopedJob if is_scoped else Job)
        except RequestError as problem:
            raise ValueError(f"this is not a job: {problem.message}") from None
        if job.agent not in self.config.agents:
            raise ValueError(f"agent {job.agent!r} is not configured{suggestion(job.agent, self.config.agents)}")
        if kept.dead_letter.agent not in (None, job.agent):
            # A caller that may publish for one agent must not run another one through an operator's replay.
            raise ValueError(
                f"the job is for agent {job.agent!r}, and was published on the subject of {kept.dead_letter.agent!r}"
            )
        if (problem := validate_job(self.config, job, with_figures=True, scoped_ids=is_scoped)) is not None:
            raise ValueError(f"{problem.path}: {problem.message}")
        return job

    async def notes(self, dead_letters: Sequence[int]) -> dict[int, ReplayNote]:
        """The notes of dead letters that were replayed. Raises BusError."""
        found: dict[int, ReplayNote] = {}
        async with aclosing(
            self.lookup.last_on(Stream.DLQ, [subjects.replayed(number) for number in dead_letters])
        ) as stored:
            async for one in stored:
                if (note := one.read(ReplayNote)) is not None:
                    found[note.dead_letter_id] = note
        return found

    async def ended(self, agents: Mapping[str, str]) -> dict[str, Status]:
        """The status of executions that have ended and are remembered. `agents`: of each. Raises BusError."""
        found: dict[str, Status] = {}
        # The result comes before the record.
        for stream in (Stream.EVENTS, Stream.RESULTS):
            rest = {execution_id: agent for execution_id, agent in agents.items() if execution_id not in found}
            of = [
                subjects.execution(agent, execution_id) if stream is Stream.EVENTS else subjects.result(execution_id)
                for execution_id, agent in rest.items()
            ]
            async with aclosing(self.lookup.last_on(stream, of)) as stored:
                async for one in stored:
                    if (ended := one.read(_Ended)) is not None:
                        found[ended.execution_id] = ended.status
        return found

    async def replay(
        self, dead_letters: Sequence[StoredDeadLetter], by: str, why: str, at: datetime, tally: ReplayTally
    ) -> None:
        """Replays dead letters at the same time, and counts them.

        Raises:
            BusError: whether they were replayed before is not known; none was replayed.
            RequestError: 503, not all were accepted; `tally` has those that were.
        """
        notes = await self.notes([kept.number for kept in dead_letters])
        runnable: list[tuple[StoredDeadLetter, Job]] = []
        for kept in dead_letters:
            if kept.number in notes:
                tally.already += 1
            elif isinstance(job := self.job_of(kept), str):
                tally.skip(kept.number, job)
            else:
                runnable.append((kept, job))
        ended = await self.ended(
            {kept.dead_letter.execution_id: job.agent for kept, job in runnable if kept.dead_letter.execution_id}
        )

        async def put(kept: StoredDeadLetter, job: Job) -> None:
            # Two workers may have run a job: one gave it up, and the other one answered it.
            if ended.get(kept.dead_letter.execution_id or "") == "succeeded":
                tally.skip(kept.number, SUCCEEDED)
            elif await self._put(kept, job, by, why, at):
                tally.replayed.append(ReplayedDeadLetter(dead_letter_id=kept.number, execution_id=kept.replay_id))
            else:
                tally.already += 1

        done = await asyncio.gather(*(put(kept, job) for kept, job in runnable), return_exceptions=True)
        for result in done:
            if isinstance(result, BaseException):
                raise result

    async def _put(self, kept: StoredDeadLetter, job: Job, by: str, why: str, at: datetime) -> bool:
        """Queues a job again; False if another request has done so."""
        again = replay_of(kept, job)
        duplicate = await self.queue.put(again, None)
        self.queue.mark(again)
        note = ReplayNote(
            dead_letter_id=kept.number, execution_id=kept.replay_id, agent=job.agent, by=by, why=why or None, at=at
        )
        # Another request that replays it at the same moment may be the first to record it.
        try:
            await self.publisher.event(subjects.replayed(kept.number), note, id=kept.replay_id, at=at, once=True)
        except AlreadyDecidedError:
            return False
        return not duplicate


def replay_of(kept: StoredDeadLetter, job: Job) -> Submission:
    """The job of a dead letter, to be published again: a new execution, which names the old one."""
    dead_letter = kept.dead_letter
    original = dead_letter.execution_id or job.job_id or f"{dead_letter.stream}/{dead_letter.sequence}"
    tokens = (dead_letter.headers.get(one.value) for one in (Header.OWNER, Header.SUBMITTED_BY))
    owner, sender = (None if token is None else _name(token) for token in tokens)
    if Header.SCOPED_IDS.value not in dead_letter.headers and (sender is None or sender.startswith(PROGRAM)):
        # Of a program, as the worker did.
        scope = scope_in(owner, None) if owner is not None and owner.startswith(PROGRAM) else None
        job = scope_references(job, scope, scoped)
    again = job.model_copy(update={"job_id": kept.replay_id, "metadata": {**job.metadata, "replay_of": original}})
    return Submission(again, kept.replay_id, False, again.model_dump_json(exclude_unset=True).encode(), owner, sender)


def _why_no_job(config: Config, kept: StoredDeadLetter) -> str:
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
class DeadLetterRoutes:
    """Dead letters, for people."""

    config: Config
    lookup: Lookup
    replays: Replays
    redactor: Redactor
    now: Callable[[], datetime] = utc_now

    @operation(
        "GET",
        "/api/v1/dlq",
        tag="dead letters",
        summary="Dead letters",
        description="The latest first: jobs that failed for good or are not valid jobs, alerts that could not be "
        "delivered, events that could not be stored. They are kept for 30 days.",
        result="The dead letters that match.",
        errors={503: NATS_UNAVAILABLE},
    )
    async def list_dead_letters(self, request: ApiRequest[DeadLetterQuery]) -> DeadLetterList:
        """The latest dead letters that match."""
        wanted = request.input

        def light(found: Found) -> tuple[StoredDeadLetter, str | None] | None:
            """The dead letter without its payload, of which there may be megabytes, and why its job can't run."""
            kept = read_dead_letter(found, self.replays.cipher)
            if kept is None or wanted.execution_id not in (None, kept.dead_letter.execution_id):
                return None
            job = self.replays.job_of(kept)
            dead_letter = kept.dead_letter.model_copy(update={"payload_base64": "", "headers": {}})
            why_not = job if isinstance(job, str) else None
            return dataclasses.replace(kept, dead_letter=dead_letter, payload=b""), why_not

        counts = list[DeadLetterCount]()
        for subject, count in (await self.lookup.counts(Stream.DLQ, ALL_DEAD_LETTERS)).items():
            match subject.split("."):
                case [_, _, reason, agent]:
                    counts.append(DeadLetterCount(reason=_name(reason), agent=_name(agent), count=count))
                case _:
                    continue  # not published by us
        # One more than is shown, to know whether there are more.
        latest = await self.lookup.newest(
            Stream.DLQ,
            filter_for(wanted.reason, wanted.agent),
            most=wanted.limit + 1,
            since=self._since(wanted.since),
            read=light,
        )
        dead_letters, _ = await self._listed(latest[: wanted.limit])
        return DeadLetterList(
            dead_letters=dead_letters,
            more=len(latest) > wanted.limit,
            counts=tuple(sorted(counts, key=lambda one: (-one.count, one.reason, one.agent))),
        )

    @operation(
        "GET",
        "/api/v1/dlq/{dead_letter_id}",
        tag="dead letters",
        summary="One dead letter",
        description="With the original message, redacted by the rules of the config, and truncated at 64 KiB.",
        result="The dead letter.",
        errors={404: "There is no such dead letter (`unknown_dead_letter`).", 503: NATS_UNAVAILABLE},
    )
    async def show_dead_letter(self, request: ApiRequest[Message]) -> DeadLetterDetails:
        """One dead letter, with the visible part of the original."""
        number = request.path["dead_letter_id"]
        is_number = number.isascii() and number.isdecimal() and len(number) <= MAX_DIGITS
        kept = await self._dead_letter(int(number)) if is_number else None
        if kept is None:
            hint = "`breakwater dlq list` lists them; each is kept for 30 days"
            raise unknown("dead_letter", f"there is no dead letter {number[:40]!r}", "dead_letter_id", hint)
        job = self.replays.job_of(kept)
        [listed], notes = await self._listed([(kept, job if isinstance(job, str) else None)])
        note = notes.get(kept.number)
        dead_letter = kept.dead_letter
        withheld = dead_letter.withheld
        if kept.kind == "job" and not withheld:
            # Then or as the config is now, its agent keeps no prompts.
            agent = self.config.agents.get(dead_letter.agent or "")
            withheld = agent is None or not agent.persist_prompts
        hidden = withheld or kept.undecryptable is not None
        omitted = dead_letter.omitted_bytes
        payload, cut = (None, False) if hidden or omitted is not None else self._visible(kept.payload)
        return DeadLetterDetails.model_validate(
            {
                **listed.model_dump(),
                "stream": dead_letter.stream,
                "subject": dead_letter.subject,
                "sequence": dead_letter.sequence,
                "headers": self.redactor.json(dict(dead_letter.headers)),
                "payload": payload,
                "payload_withheld": withheld,
                "payload_omitted": omitted is not None,
                "payload_sha256": dead_letter.omitted_sha256,
                "payload_bytes": len(kept.payload) if omitted is None else omitted,
                "payload_cut": cut,
                "replayed_by": None if note is None else note.by,
                "replayed_at": None if note is None else note.at,
            }
        )

    @operation(
        "POST",
        "/api/v1/dlq/replay",
        tag="dead letters",
        summary="Replay dead letters",
        description="Each once: its job is queued unchanged, under an id derived from the dead letter, with the "
        "original execution as `metadata.replay_of`. A dead letter that was replayed before is skipped; a replay that "
        f"fails becomes a dead letter of its own. One request covers up to {MAX_DEAD_LETTERS:,} dead letters; if "
        "there are more, the response says where to continue.",
        result="The jobs that were queued.",
        errors={
            503: "NATS is unavailable (`unavailable`), or JOBS is full (`refused`). Nothing is lost, and "
            "nothing is replayed twice: ask again."
        },
    )
    async def replay_dead_letters(self, request: ApiRequest[ReplayDeadLettersRequest]) -> DeadLetterReplays:
        """Queues the jobs again."""
        wanted = request.input
        tally = ReplayTally()
        continue_after: int | None = None
        up_to = wanted.up_to
        try:
            if up_to is None and wanted.dead_letters is None:
                # Replays that fail again are behind it.
                last = await self.lookup.last(Stream.DLQ, filter_for(wanted.reason, wanted.agent))
                up_to = 0 if last is None else last.sequence
            continue_after = await self._replay(request, up_to, tally)
        except (BusError, RequestError) as error:
            problem = error if isinstance(error, RequestError) else not_done(error)
            if tally.replayed:
                done = f"{len(tally.replayed):,} were replayed before this happened"
                message = f"{problem.message}; {done}, and asking again replays none of them twice"
                problem = unavailable(problem.code, message)
            raise problem from error
        finally:
            counts = {"already": tally.already, "skipped": len(tally.skipped)}
            request.log("dead_letters_replayed", replayed=len(tally.replayed), **counts)
        return DeadLetterReplays(
            replayed=tuple(tally.replayed),
            already=tally.already,
            skipped=tuple(sorted(tally.skipped, key=lambda one: one.dead_letter_id)),
            continue_after=continue_after,
            up_to=None if continue_after is None else up_to,
        )

    async def _replay(
        self, request: ApiRequest[ReplayDeadLettersRequest], up_to: int | None, tally: ReplayTally
    ) -> int | None:
        """Replays in batches, and returns the dead letter behind which to go on; None if that was all."""
        wanted = request.input
        begun = time.monotonic()
        at = self.now()
        batch = list[StoredDeadLetter]()
        size = 0
        looked_at = 0
        last = wanted.after
        continue_after: int | None = None
        missing = "this dead letter can't be read" if wanted.dead_letters is None else "there is no such dead letter"
        async with aclosing(self._wanted(wanted, up_to)) as found:
            async for number, kept in found:
                late = looked_at == MAX_DEAD_LETTERS or (looked_at and time.monotonic() - begun > REPLAY_S)
                if late and wanted.dead_letters is None:
                    continue_after = last
                    break
                looked_at += 1
                last = number
                if kept is None:
                    tally.skip(number, missing)
                    continue
                batch.append(kept)
                size += len(kept.payload)
                if len(batch) >= AT_ONCE or size >= AT_ONCE_BYTES:
                    await self.replays.replay(batch, request.by, request.why, at, tally)
                    batch = []
                    size = 0
        await self.replays.replay(batch, request.by, request.why, at, tally)
        return continue_after

    async def _wanted(
        self, wanted: ReplayDeadLettersRequest, up_to: int | None
    ) -> AsyncGenerator[tuple[int, StoredDeadLetter | None]]:
        """The dead letters that a request names, by their numbers; None for one that is not there, or is unreadable."""
        if wanted.dead_letters is not None:
            for number in dict.fromkeys(wanted.dead_letters):
                yield number, await self._dead_letter(number)
            return
        subject_filter = filter_for(wanted.reason, wanted.agent)
        start = wanted.after + 1 if wanted.after else self._since(wanted.since)
        async with aclosing(self.lookup.scan(Stream.DLQ, subject_filter, start=start, up_to=up_to)) as stored:
            async for found in stored:
                yield found.sequence, read_dead_letter(found, self.replays.cipher)

    async def _dead_letter(self, number: int) -> StoredDeadLetter | None:
        if not 0 < number < 2**63:
            return None
        found = await self.lookup.next(Stream.DLQ, ALL_DEAD_LETTERS, number)
        return None if found is None or found.sequence != number else read_dead_letter(found, self.replays.cipher)

    def _since(self, given: datetime | None) -> datetime:
        return given or self.now() - timedelta(days=SHOWN_DAYS)

    async def _listed(
        self, found: Sequence[tuple[StoredDeadLetter, str | None]]
    ) -> tuple[tuple[ListedDeadLetter, ...], dict[int, ReplayNote]]:
        """Dead letters with the state of their jobs and replays, and the notes of the replays. Raises BusError."""
        jobs = [kept for kept, _ in found if kept.kind == "job"]
        notes = await self.replays.notes([kept.number for kept in jobs])
        executions = {note.execution_id: note.agent for note in notes.values()}
        for kept in jobs:
            if kept.dead_letter.execution_id and kept.dead_letter.agent and kept.number not in notes:
                executions[kept.dead_letter.execution_id] = kept.dead_letter.agent
        ended = await self.replays.ended(executions)
        remembered_since = self.now() - timedelta(hours=self.config.limits.events_max_age_h)
        listed: list[ListedDeadLetter] = []
        for kept, why_not in found:
            note = notes.get(kept.number)
            replay_status: ReplayStatus | None = None
            if note is not None:
                why_not = f"it was replayed before, as {note.execution_id}"
                replay_status = ended.get(note.execution_id)
                if replay_status is None and note.at >= remembered_since:
                    replay_status = "accepted"
            elif why_not is None and ended.get(kept.dead_letter.execution_id or "") == "succeeded":
                why_not = SUCCEEDED
            listed.append(
                ListedDeadLetter(
                    dead_letter_id=kept.number,
                    kind=kept.kind,
                    reason=kept.dead_letter.reason,
                    agent=kept.dead_letter.agent,
                    execution_id=kept.dead_letter.execution_id,
                    error=self.redactor.text(kept.dead_letter.error),
                    at=kept.dead_letter.at,
                    replayable=why_not is None,
                    why_not=why_not,
                    replayed_as=None if note is None else note.execution_id,
                    replay_status=replay_status,
                )
            )
        return tuple(listed), notes

    def _visible(self, payload: bytes) -> tuple[JsonValue, bool]:
        """The visible part of a payload, and True if that is only its beginning."""
        try:
            document: JsonValue = self.redactor.json(read_whole(partial(from_json, allow_inf_nan=False), payload))
            text = to_json(document)
            cut = False
            if len(text) <= MAX_PAYLOAD:
                return document, False
        except ValueError:
            decoded = payload.decode("utf-8", "replace")
            text = self.redactor.text(decoded).encode()
            cut = len(decoded) > self.redactor.max_length
        return text[:MAX_PAYLOAD].decode("utf-8", "ignore"), cut or len(text) > MAX_PAYLOAD
