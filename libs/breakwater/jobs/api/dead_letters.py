"""`/api/v1/dlq`: dead letters as people may see them, replays, which run each of their jobs once more, and dismissals.

The id of a replay is derived from its dead letter, so the worker runs it once as long as its record is kept. A note in
DLQ is kept longer. It is written after the job is queued: if the process crashes in between, a second replay has the
same id and does not run again.

A dismissal is a note in DLQ, too. Its subject has the dead letter's reason, agent and number, so that one request for
the subjects tells which dead letters are dismissed. The original stays, so it can still be replayed.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hashlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial

import structlog
from pydantic import JsonValue, ValidationError
from pydantic_core import from_json, to_json

from breakwater.alerts.rules.incidents import IncidentRules, Incidents
from breakwater.alerts.rules.signals import dead_letter_keys, dead_letters_looked_after
from breakwater.alerts.store.incidents import IncidentLog
from breakwater.config import Config
from breakwater.config.job_validation import validate_job
from breakwater.identity.operations import NATS_UNAVAILABLE, ApiRequest, operation, utc_now
from breakwater.identity.rules.callers import Attribution
from breakwater.jobs.api.job_queue import JobQueue
from breakwater.jobs.api.submission import Submission
from breakwater.jobs.contract.dead_letters import (
    MAX_DEAD_LETTERS,
    DeadLetterCount,
    DeadLetterDetails,
    DeadLetterDismissals,
    DeadLetterKind,
    DeadLetterList,
    DeadLetterQuery,
    DeadLetterReplays,
    DeadLetterSelection,
    DismissalNote,
    DismissDeadLettersRequest,
    ListedDeadLetter,
    ReplayDeadLettersRequest,
    ReplayedDeadLetter,
    ReplayNote,
    ReplayStatus,
    SkippedDeadLetter,
)
from breakwater.jobs.contract.execution import Status
from breakwater.jobs.contract.job import Job
from breakwater.jobs.queued_message import tags_in, turn_in
from breakwater.jobs.rules.ownership import longest_job
from breakwater.jobs.rules.turns import CallerTurn
from breakwater.jobs.store.dismissals import LIST_AGE_S, Dismissals
from breakwater.kernel.http.bodies import NO_ROOM, WAIT_TIMEOUT_S
from breakwater.kernel.http.parsing import read_job, suggestion
from breakwater.kernel.http.problems import RequestError, not_done, unavailable, unknown
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.bodies import BodyLostError, BodyReader, BodyReference, BodyWriter
from breakwater.kernel.nats.contract import DeadLetter
from breakwater.kernel.nats.errors import AlreadyDecidedError, BusError
from breakwater.kernel.nats.lookup import Lookup, StoredMessage
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import Header, Stream, decode_token, encode_token
from breakwater.kernel.process.byte_budget import ByteBudget
from breakwater.kernel.security.encryption import LEFT_OUT, OFF, Cipher, DecryptionError
from breakwater.kernel.surrogates import read_whole
from breakwater.kernel.types import Event, Identifier, Message, format_time
from breakwater.limits.rules.budget import LimitTable
from breakwater.redaction.rules.redact import Redactor

ALL_DEAD_LETTERS = "bw.dlq.>"
SHOWN_DAYS = 7
MAX_DIGITS = 19
"""The most digits of a dead letter's number, which is below 2**63."""

AT_ONCE = 64
AT_ONCE_BYTES = 8 * 1024 * 1024
"""The most dead letters that are replayed together, as their jobs are in memory."""

REPLAY_S = 5.0
"""Time after which a request to replay many is answered with the replays so far and the place to continue from."""

MAX_PAYLOAD = 64 * 1024
"""The most bytes of a dead letter's payload that are shown."""

SUCCEEDED_ANYWAY = "its job succeeded after all, by another worker: there is nothing to replay"

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
    subject: str
    """Its subject in DLQ."""
    dead_letter: DeadLetter
    payload: bytes
    """The original, with all its secrets; empty for a large body that is not read yet."""
    ce_id: str
    unreadable: str | None = None
    """The reason why the original can't be read; None if it can."""
    body: BodyReference | None = None
    """The reference to the body of a large job."""

    @property
    def size(self) -> int:
        """The size of the original, in bytes."""
        return self.body.job_bytes if self.body is not None and not self.payload else len(self.payload)

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
        """The id of its replay: always the same, and different if the stream was deleted and created again."""
        dead_letter = self.dead_letter
        identity = "\n".join((self.ce_id, dead_letter.stream, str(dead_letter.sequence), format_time(dead_letter.at)))
        return f"rpl_{hashlib.sha256(identity.encode()).hexdigest()[:32]}"


def read_dead_letter(message: StoredMessage, cipher: Cipher = OFF) -> StoredDeadLetter | None:
    """Parses a stored message; logs and returns None if it is not a dead letter."""
    unreadable: str | None = None
    data = message.data
    try:
        try:
            data = cipher.decrypt_document(data)
        except DecryptionError as error:
            unreadable = str(error)
        dead_letter = DeadLetter.model_validate_json(data)
        payload = base64.b64decode(dead_letter.payload_base64, validate=True)
    except (ValidationError, ValueError):
        structlog.get_logger().error("dead_letter_unreadable", sequence=message.sequence)
        return None
    if dead_letter.encrypted == LEFT_OUT:
        unreadable = f"its text was {LEFT_OUT}"
    try:
        payload = cipher.decrypt_document(payload)  # still encrypted if the worker lacked the key
    except DecryptionError as error:
        unreadable = str(error)
    ce_id = message.headers.get(Header.CE_ID.value, "")
    body = BodyReference.parse(dead_letter.headers.get(Header.BODY.value))
    return StoredDeadLetter(message.sequence, message.subject, dead_letter, payload, ce_id, unreadable, body)


def without_original(stored: StoredDeadLetter) -> StoredDeadLetter:
    """Returns a dead letter without its original, which may have megabytes."""
    dead_letter = stored.dead_letter.model_copy(update={"payload_base64": "", "headers": {}})
    return dataclasses.replace(stored, dead_letter=dead_letter, payload=b"")


def filter_for(reason: str | None, agent: str | None) -> str:
    """Returns the subjects of the dead letters with a reason and an agent; None means any."""
    if reason is None and agent is None:
        return ALL_DEAD_LETTERS
    return ".".join(("bw.dlq", *("*" if name is None else encode_token(name) for name in (reason, agent))))


RECORD_MARGIN = timedelta(minutes=1)
"""The time by which a dead letter may be older than its incident, which begins at the end of its job."""


@dataclass(slots=True)
class ReplayTally:
    """The outcome of replaying dead letters, so far."""

    replayed: list[ReplayedDeadLetter] = field(default_factory=list[ReplayedDeadLetter])
    already: int = 0
    skipped: list[SkippedDeadLetter] = field(default_factory=list[SkippedDeadLetter])

    def skip(self, dead_letter_id: int, why: str) -> None:
        """Counts a dead letter that is left alone."""
        self.skipped.append(SkippedDeadLetter(dead_letter_id=dead_letter_id, why=why))


class _EndFields(Event):
    """The fields of a result or record that are read here."""

    execution_id: Identifier
    status: Status


@dataclass(frozen=True, slots=True)
class Replays:
    """Runs the jobs of dead letters again, and knows which were run again before."""

    config: Config
    limits: Callable[[], LimitTable]
    lookup: Lookup
    queue: JobQueue
    publisher: Publisher
    redactor: Redactor
    budget: ByteBudget
    """Of the memory for large bodies."""
    cipher: Cipher = OFF

    def job_of(self, stored: StoredDeadLetter) -> Job | str | None:
        """Returns the job of a dead letter, or the redacted reason why it can't run with the current config.

        None for a large job whose body is not read yet, and that can run as far as is known without it.
        """
        try:
            return self._job_of(stored)
        except ValueError as why_not:
            return self.redactor.text(str(why_not))

    @asynccontextmanager
    async def with_body(self, stored: StoredDeadLetter) -> AsyncGenerator[StoredDeadLetter]:
        """Has the large body of a dead letter in memory while the block runs.

        Raises:
            BusUnavailableError: it can't be read now.
            RequestError: 503, no room in memory became free.
        """
        if stored.body is None or stored.payload:
            yield stored
            return
        try:
            async with asyncio.timeout(WAIT_TIMEOUT_S):
                taken = await self.budget.take(stored.body.job_bytes)
        except TimeoutError:
            raise unavailable("busy", NO_ROOM) from None
        try:
            try:
                payload = await BodyReader(self.lookup).read(stored.body)
                if stored.body.encrypted:
                    payload = await asyncio.to_thread(self.cipher.decrypt_document, payload)
            except (BodyLostError, DecryptionError) as error:
                yield dataclasses.replace(stored, unreadable=str(error))
            else:
                yield dataclasses.replace(stored, payload=payload)
        finally:
            self.budget.give_back(taken)

    def _job_of(self, stored: StoredDeadLetter) -> Job | None:
        if stored.kind != "job":
            raise ValueError(_why_no_job(self.config, stored))
        if stored.unreadable is not None:
            raise ValueError(stored.unreadable)
        if (size := stored.dead_letter.omitted_bytes) is not None:
            raise ValueError(
                f"its {size:,} bytes were too large to be kept in a dead letter: submit the job again, and smaller"
            )
        limit = self.config.limits.max_body_bytes
        if stored.body is None and stored.size > longest_job(limit):
            raise ValueError(
                f"the job has {stored.size:,} bytes; at most {limit:,} are accepted (limits.max_body_bytes)"
            )
        if stored.body is not None and not stored.payload:
            agent = stored.dead_letter.agent or ""
            if agent not in self.config.agents:
                raise ValueError(f"agent {agent!r} is not configured{suggestion(agent, self.config.agents)}")
            return None
        try:
            job = read_job(stored.payload, Job, "job")
        except RequestError as problem:
            raise ValueError(f"this is not a job: {problem.message}") from None
        if job.agent not in self.config.agents:
            raise ValueError(f"agent {job.agent!r} is not configured{suggestion(job.agent, self.config.agents)}")
        if stored.dead_letter.agent not in (None, job.agent):
            # A caller that may publish for one agent must not run another one through an operator's replay.
            raise ValueError(
                f"the job is for agent {job.agent!r}, and was published on the subject of {stored.dead_letter.agent!r}"
            )
        if (problem := validate_job(self.config, self.limits(), job, with_figures=True)) is not None:
            raise ValueError(f"{problem.path}: {problem.message}")
        return job

    async def notes(self, dead_letters: Sequence[int]) -> dict[int, ReplayNote]:
        """Reads the notes of those dead letters that were replayed. Raises BusError."""
        notes: dict[int, ReplayNote] = {}
        async with aclosing(
            self.lookup.last_on(Stream.DLQ, [subjects.replay(number) for number in dead_letters])
        ) as messages:
            async for message in messages:
                if (note := message.read(ReplayNote)) is not None:
                    notes[note.dead_letter_id] = note
        return notes

    async def statuses_of(self, agents: Mapping[str, str]) -> dict[str, Status]:
        """Looks up the status of executions; those that are undecided or forgotten are missing.

        Args:
            agents: the agent of each execution, by the execution's id.

        Raises:
            BusError: NATS can't be read.
        """
        statuses: dict[str, Status] = {}
        # A record is kept longer than a result, but is written after it.
        for stream in (Stream.EVENTS, Stream.RESULTS):
            undecided = {execution_id: agent for execution_id, agent in agents.items() if execution_id not in statuses}
            subjects_of_stream = [
                subjects.execution(agent, execution_id) if stream is Stream.EVENTS else subjects.result(execution_id)
                for execution_id, agent in undecided.items()
            ]
            async with aclosing(self.lookup.last_on(stream, subjects_of_stream)) as messages:
                async for message in messages:
                    if (ended := message.read(_EndFields)) is not None:
                        statuses[ended.execution_id] = ended.status
        return statuses

    async def replay(
        self, dead_letters: Sequence[StoredDeadLetter], by: str, why: str, at: datetime, tally: ReplayTally
    ) -> None:
        """Replays dead letters concurrently, and counts them in `tally`.

        Args:
            dead_letters: the dead letters.
            by: the name of the actor.
            why: the actor's reason, redacted.
            at: the time of the replay.
            tally: counts the outcome of each.

        Raises:
            BusError: it is unknown whether they were replayed before; none was replayed.
            RequestError: 503, not all were accepted; `tally` has those that were.
        """
        notes = await self.notes([stored.number for stored in dead_letters])
        runnable: list[tuple[StoredDeadLetter, Job | None]] = []
        for stored in dead_letters:
            if stored.number in notes:
                tally.already += 1
            elif isinstance(job := self.job_of(stored), str):
                tally.skip(stored.number, job)
            else:
                runnable.append((stored, job))
        ended = await self.statuses_of(
            {
                stored.dead_letter.execution_id: job.agent if job is not None else stored.dead_letter.agent or ""
                for stored, job in runnable
                if stored.dead_letter.execution_id
            }
        )

        async def put(stored: StoredDeadLetter, job: Job | None) -> None:
            # Two workers may have run the job: one gave up, and the other succeeded.
            if ended.get(stored.dead_letter.execution_id or "") == "succeeded":
                tally.skip(stored.number, SUCCEEDED_ANYWAY)
            elif job is None:
                async with self.with_body(stored) as with_body:
                    read_job = self.job_of(with_body)
                    if isinstance(read_job, Job):
                        await put(with_body, read_job)
                    elif await self.notes([stored.number]):
                        tally.already += 1  # by another request meanwhile, which has removed the body
                    else:
                        tally.skip(stored.number, read_job or "its body could not be read")
            elif await self._put(stored, job, by, why, at):
                tally.replayed.append(ReplayedDeadLetter(dead_letter_id=stored.number, execution_id=stored.replay_id))
            else:
                tally.already += 1

        outcomes = await asyncio.gather(*(put(stored, job) for stored, job in runnable), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _put(self, stored: StoredDeadLetter, job: Job, by: str, why: str, at: datetime) -> bool:
        """Queues a job again. Returns False if another request has done so."""
        private = not self.config.agents[job.agent].keeps_error_texts
        replay = dataclasses.replace(replay_of(stored, job), private=private)
        duplicate = await self.queue.put(replay, None)
        self.queue.mark(replay)
        note = ReplayNote(
            dead_letter_id=stored.number, execution_id=stored.replay_id, agent=job.agent, by=by, why=why or None, at=at
        )
        # If another request replays it at the same moment, the first to write the note has replayed it.
        try:
            await self.publisher.event(subjects.replay(stored.number), note, id=stored.replay_id, at=at, once=True)
        except AlreadyDecidedError:
            return False
        if stored.body is not None:
            # The replay has a body of its own.
            await BodyWriter(self.publisher).remove_if_possible(stored.body.name)
        return not duplicate


def replay_of(stored: StoredDeadLetter, job: Job) -> Submission:
    """Returns the job of a dead letter as a new submission, whose metadata name the original execution."""
    dead_letter = stored.dead_letter
    original = dead_letter.execution_id or job.job_id or f"{dead_letter.stream}/{dead_letter.sequence}"
    headers = dead_letter.headers
    tokens = (headers.get(header.value) for header in (Header.OWNER, Header.SUBMITTED_BY, Header.USER, Header.TEAM))
    owner, sender, user, team = (None if token is None else _name(token) for token in tokens)
    # The scope stays: the replay refers to the jobs, the task and the plan of the original.
    scope = headers.get(Header.SCOPE.value)
    replay = job.model_copy(update={"job_id": stored.replay_id, "metadata": {**job.metadata, "replay_of": original}})
    payload = replay.model_dump_json(exclude_unset=True).encode()
    execution_id = stored.replay_id
    return Submission(
        replay,
        execution_id,
        execution_id,
        False,
        payload,
        owner,
        sender,
        attribution=Attribution(user, team),
        tags=tags_in(headers),
        turn=CallerTurn(sender or owner or "", job.tenant or "", *turn_in(headers)),
        residency=headers.get(Header.RESIDENCY.value),
        scope=scope,
    )


def _why_no_job(config: Config, stored: StoredDeadLetter) -> str:
    if stored.channel is not None:
        again = f"`breakwater alerts replay --dead-letter {stored.number}` tries it again"
        return f"it is an alert that did not reach channel {stored.channel!r}; {again}"
    days = "here for 30 days"
    if stored.kind == "alert":
        return (
            f"it is an alert that could not be handled, and no job; it stays in {stored.dead_letter.stream}, and {days}"
        )
    age = f"{config.limits.events_max_age_h:g} h" if stored.dead_letter.stream == Stream.EVENTS else "a time"
    stays = f"it stays in {stored.dead_letter.stream} for {age} and {days}"
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
    incidents: IncidentLog
    dismissals: Dismissals
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
        """Lists the latest dead letters that match."""
        query = request.input

        def without_payload(message: StoredMessage) -> tuple[StoredDeadLetter, str | None] | None:
            """Parses a dead letter, drops its payload, which may have megabytes, and checks whether its job can run."""
            if query.state != "all" and (message.sequence in dismissed) is not (query.state == "dismissed"):
                return None
            stored = read_dead_letter(message, self.replays.cipher)
            if stored is None or query.execution_id not in (
                None,
                stored.dead_letter.execution_id,
                stored.dead_letter.job_id,
            ):
                return None
            job = self.replays.job_of(stored)
            return without_original(stored), job if isinstance(job, str) else None

        stored_by_subject, dismissed = await asyncio.gather(
            self.lookup.counts(Stream.DLQ, ALL_DEAD_LETTERS), self.dismissals.by_number(max_age_s=LIST_AGE_S)
        )
        dismissed_by_subject = Counter(dismissed.values())
        counted: Counter[str]
        if query.state == "open":
            counted = Counter(stored_by_subject) - dismissed_by_subject
        else:
            counted = dismissed_by_subject if query.state == "dismissed" else Counter(stored_by_subject)
        counts = list[DeadLetterCount]()
        for subject, count in counted.items():
            match subject.split("."):
                case [_, _, reason, agent]:
                    counts.append(DeadLetterCount(reason=_name(reason), agent=_name(agent), count=count))
                case _:
                    continue  # not published by us
        # Reads one more than the limit, to know whether there are more.
        latest = await self.lookup.newest(
            Stream.DLQ,
            filter_for(query.reason, query.agent),
            limit=query.limit + 1,
            since=self._since(query.since),
            read=without_payload,
        )
        dead_letters, *_ = await self._list(
            latest[: query.limit], [stored for stored, _ in latest[: query.limit] if stored.number in dismissed]
        )
        return DeadLetterList(
            dead_letters=dead_letters,
            more=len(latest) > query.limit,
            counts=tuple(sorted(counts, key=lambda line: (-line.count, line.reason, line.agent))),
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
        """Shows one dead letter, with the visible part of the original."""
        number = request.path["dead_letter_id"]
        is_number = number.isascii() and number.isdecimal() and len(number) <= MAX_DIGITS
        stored = await self._dead_letter(int(number)) if is_number else None
        if stored is None:
            hint = "`breakwater dlq list` lists them; each is kept for 30 days"
            raise unknown("dead_letter", f"there is no dead letter {number[:40]!r}", "dead_letter_id", hint)
        async with self.replays.with_body(stored) as with_body:
            return await self._details(with_body)

    async def _details(self, stored: StoredDeadLetter) -> DeadLetterDetails:
        # In threads, as a large body takes seconds to redact.
        job = await asyncio.to_thread(self.replays.job_of, stored)
        [listed], notes, dismissals = await self._list([(stored, job if isinstance(job, str) else None)], [stored])
        note = notes.get(stored.number)
        dismissal = dismissals.get(stored.number)
        dead_letter = stored.dead_letter
        withheld = dead_letter.withheld
        if stored.kind == "job" and not withheld:
            # The agent kept no prompts then, or keeps none by the current config.
            agent = self.config.agents.get(dead_letter.agent or "")
            withheld = agent is None or not agent.persist_prompts
        hidden = withheld or stored.unreadable is not None
        omitted = dead_letter.omitted_bytes
        visible = None if hidden or omitted is not None else await asyncio.to_thread(self._visible, stored.payload)
        payload, cut = visible or (None, False)
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
                "payload_bytes": stored.size if omitted is None else omitted,
                "payload_cut": cut,
                "replayed_by": None if note is None else note.by,
                "replayed_at": None if note is None else note.at,
                "dismissed_why": None if dismissal is None else dismissal.why,
            }
        )

    @operation(
        "POST",
        "/api/v1/dlq/replay",
        tag="dead letters",
        summary="Replay dead letters",
        description="Each once: its job is queued unchanged, under an id derived from the dead letter, with the "
        "original execution as `metadata.replay_of`. A dead letter that was replayed before is skipped; a replay that "
        "fails becomes a dead letter of its own. Without ids, dismissed ones are left out. "
        f"One request covers up to {MAX_DEAD_LETTERS:,} dead letters; if there are more, the response says where to "
        "continue.",
        result="The jobs that were queued.",
        errors={
            503: "NATS is unavailable (`unavailable`), or JOBS is full (`refused`). Nothing is lost, and "
            "nothing is replayed twice: ask again."
        },
    )
    async def replay_dead_letters(self, request: ApiRequest[ReplayDeadLettersRequest]) -> DeadLetterReplays:
        """Queues the jobs of dead letters again."""
        selection = request.input
        tally = ReplayTally()
        continue_after: int | None = None
        up_to = selection.up_to
        try:
            if up_to is None and selection.dead_letters is None:
                # A replay that fails becomes a dead letter behind this one, and is not replayed by this request.
                last = await self.lookup.last(Stream.DLQ, filter_for(selection.reason, selection.agent))
                up_to = 0 if last is None else last.sequence
            continue_after = await self._replay(request, up_to, tally)
        except (BusError, RequestError) as error:
            problem = error if isinstance(error, RequestError) else not_done(error)
            if tally.replayed:
                replayed = f"{len(tally.replayed):,} were replayed before this happened"
                message = f"{problem.message}; {replayed}, and asking again replays none of them twice"
                problem = unavailable(problem.code, message)
            raise problem from error
        finally:
            counts = {"already": tally.already, "skipped": len(tally.skipped)}
            request.log("dead_letters_replayed", replayed=len(tally.replayed), **counts)
        return DeadLetterReplays(
            replayed=tuple(sorted(tally.replayed, key=lambda replay: replay.dead_letter_id)),
            already=tally.already,
            skipped=tuple(sorted(tally.skipped, key=lambda skipped: skipped.dead_letter_id)),
            continue_after=continue_after,
            up_to=None if continue_after is None else up_to,
        )

    async def _replay(
        self, request: ApiRequest[ReplayDeadLettersRequest], up_to: int | None, tally: ReplayTally
    ) -> int | None:
        """Replays in batches. Returns the dead letter after which to continue; None if all were replayed."""
        selection = request.input
        begun = time.monotonic()
        at = self.now()
        dismissed = set[int]() if selection.dead_letters is not None else set(await self.dismissals.by_number())
        chosen = dict[str, DeadLetter]()
        batch = list[StoredDeadLetter]()
        size = 0
        looked_at = 0
        last = selection.after
        continue_after: int | None = None
        missing = "this dead letter can't be read" if selection.dead_letters is None else "there is no such dead letter"
        async with aclosing(self._select(selection, up_to)) as selected:
            async for number, stored in selected:
                late = looked_at == MAX_DEAD_LETTERS or (looked_at and time.monotonic() - begun > REPLAY_S)
                if late and selection.dead_letters is None:
                    continue_after = last
                    break
                last = number
                if number in dismissed:
                    continue
                looked_at += 1
                if stored is None:
                    tally.skip(number, missing)
                    continue
                chosen.setdefault(stored.subject, without_original(stored).dead_letter)
                batch.append(stored)
                size += len(stored.payload)
                if len(batch) >= AT_ONCE or size >= AT_ONCE_BYTES:
                    await self.replays.replay(batch, request.by, request.why, at, tally)
                    batch = []
                    size = 0
        await self.replays.replay(batch, request.by, request.why, at, tally)
        if continue_after is None:
            replayed = {replay.dead_letter_id for replay in tally.replayed}
            await self._end_incidents(chosen, replayed, request.by, request.why, at)
        return continue_after

    @operation(
        "POST",
        "/api/v1/dlq/dismiss",
        tag="dead letters",
        summary="Dismiss dead letters",
        description="A dismissed dead letter is left out of lists, counts and replays of many. It is found by "
        "`state=dismissed` until it expires, 30 days after it was given up, and can still be replayed by its id. "
        f"Dismissing it again changes nothing. One request covers up to {MAX_DEAD_LETTERS:,} dead letters; if there "
        "are more, the response says where to continue.",
        result="The dead letters that were dismissed.",
        errors={503: f"{NATS_UNAVAILABLE} Repeating the request is safe."},
    )
    async def dismiss_dead_letters(self, request: ApiRequest[DismissDeadLettersRequest]) -> DeadLetterDismissals:
        """Hides dead letters that need no replay."""
        selection = request.input
        dismissed_before = await self.dismissals.by_number()
        up_to = selection.up_to
        if up_to is None and selection.dead_letters is None:
            last = await self.lookup.last(Stream.DLQ, filter_for(selection.reason, selection.agent))
            up_to = 0 if last is None else last.sequence
        at = self.now()
        missing = "this dead letter can't be read" if selection.dead_letters is None else "there is no such dead letter"
        chosen = list[StoredDeadLetter]()
        skipped = list[SkippedDeadLetter]()
        already = 0
        continue_after: int | None = None
        async with aclosing(self._select(selection, up_to)) as selected:
            async for number, stored in selected:
                if number in dismissed_before:
                    already += selection.dead_letters is not None
                elif stored is None:
                    skipped.append(SkippedDeadLetter(dead_letter_id=number, why=missing))
                elif len(chosen) == MAX_DEAD_LETTERS:
                    continue_after = chosen[-1].number
                    break
                else:
                    chosen.append(without_original(stored))
        dismissed = list[int]()
        try:
            for start in range(0, len(chosen), AT_ONCE):
                batch = chosen[start : start + AT_ONCE]
                outcomes = await asyncio.gather(
                    *(self._dismiss(stored, request.by, request.why, at) for stored in batch), return_exceptions=True
                )
                for stored, outcome in zip(batch, outcomes, strict=True):
                    if outcome is True:
                        dismissed.append(stored.number)
                    already += outcome is False
                for outcome in outcomes:
                    if isinstance(outcome, BaseException):
                        raise outcome
        except BusError as error:
            raise not_done(error) from error
        finally:
            request.log("dead_letters_dismissed", dismissed=len(dismissed), already=already, skipped=len(skipped))
        if continue_after is None:
            by_subject = {stored.subject: stored.dead_letter for stored in chosen}
            await self._end_incidents(by_subject, set(dismissed), request.by, request.why, at)
        return DeadLetterDismissals(
            dismissed=tuple(sorted(dismissed)),
            already=already,
            skipped=tuple(skipped),
            continue_after=continue_after,
            up_to=None if continue_after is None else up_to,
        )

    async def _end_incidents(
        self, by_subject: Mapping[str, DeadLetter], handled: Collection[int], by: str, why: str, at: datetime
    ) -> None:
        """Ends the incidents of dead letters if a person has looked after all of them.

        If that fails, they end by themselves once it has not happened again for a while.

        Args:
            by_subject: one of those that a person has chosen, for each reason and agent, by their subject in DLQ.
            handled: those that were replayed or dismissed just now.
            by: the name of the actor.
            why: the actor's reason, redacted.
            at: the time of the action.
        """
        try:
            incidents = await self.incidents.catch_up() if by_subject else Incidents()
            for subject, dead_letter in by_subject.items():
                for current in map(incidents.of, dead_letter_keys(dead_letter)):
                    if current is None or current.status == "resolved":
                        continue
                    if not await self._is_any_open(subject, current.opened_at - RECORD_MARGIN, handled):
                        signal = dead_letters_looked_after(current, by, why or None, at)
                        await self.incidents.apply(signal, IncidentRules.of(self.config.alerts))
        except BusError as error:
            structlog.get_logger().warning("incidents_not_ended", error=str(error))

    async def _is_any_open(self, subject: str, since: datetime, handled: Collection[int]) -> bool:
        """Returns True if DLQ has a dead letter on a subject, later than `since`, that nobody has looked after."""
        looked_at = 0
        batch: dict[int, str] = {}
        async with aclosing(self.lookup.scan(Stream.DLQ, subject, start=since)) as messages:
            async for message in messages:
                looked_at += 1
                if looked_at > MAX_DEAD_LETTERS:
                    return True
                if message.sequence not in handled:
                    batch[message.sequence] = message.subject
                if len(batch) == AT_ONCE:
                    if await self._has_open(batch):
                        return True
                    batch = {}
        return await self._has_open(batch)

    async def _has_open(self, dead_letters: Mapping[int, str]) -> bool:
        if not dead_letters:
            return False
        notes = await self.replays.notes(list(dead_letters))
        not_replayed = {number: subject for number, subject in dead_letters.items() if number not in notes}
        return len(await self._dismissal_notes(not_replayed)) < len(not_replayed)

    async def _dismiss(self, stored: StoredDeadLetter, by: str, why: str, at: datetime) -> bool:
        """Notes a dismissal. Returns False if another request has done so."""
        note = DismissalNote(dead_letter_id=stored.number, by=by, why=why or None, at=at)
        subject = subjects.dismissal(stored.subject, stored.number)
        try:
            await self.replays.publisher.event(subject, note, id=f"dismissed/{stored.replay_id}", at=at, once=True)
        except AlreadyDecidedError:
            is_first = False
        else:
            is_first = True
        await self.dismissals.add(stored.number, stored.subject)
        return is_first

    async def _dismissal_notes(self, dead_letters: Mapping[int, str]) -> dict[int, DismissalNote]:
        """Reads the notes of those dead letters, numbers with subjects, that were dismissed. Raises BusError."""
        notes: dict[int, DismissalNote] = {}
        wanted = [subjects.dismissal(subject, number) for number, subject in dead_letters.items()]
        async with aclosing(self.lookup.last_on(Stream.DLQ, wanted)) as messages:
            async for message in messages:
                if (note := message.read(DismissalNote)) is not None:
                    notes[note.dead_letter_id] = note
        return notes

    async def _select(
        self, selection: DeadLetterSelection, up_to: int | None
    ) -> AsyncGenerator[tuple[int, StoredDeadLetter | None]]:
        """Yields the number of each dead letter that a request selects, with None if it is missing or unreadable."""
        if selection.dead_letters is not None:
            for number in dict.fromkeys(selection.dead_letters):
                yield number, await self._dead_letter(number)
            return
        subject_filter = filter_for(selection.reason, selection.agent)
        start = selection.after + 1 if selection.after else self._since(selection.since)
        async with aclosing(self.lookup.scan(Stream.DLQ, subject_filter, start=start, up_to=up_to)) as messages:
            async for message in messages:
                yield message.sequence, read_dead_letter(message, self.replays.cipher)

    async def _dead_letter(self, number: int) -> StoredDeadLetter | None:
        if not 0 < number < 2**63:
            return None
        message = await self.lookup.next(Stream.DLQ, ALL_DEAD_LETTERS, number)
        return None if message is None or message.sequence != number else read_dead_letter(message, self.replays.cipher)

    def _since(self, since: datetime | None) -> datetime:
        return since or self.now() - timedelta(days=SHOWN_DAYS)

    async def _list(
        self, dead_letters: Sequence[tuple[StoredDeadLetter, str | None]], maybe_dismissed: Sequence[StoredDeadLetter]
    ) -> tuple[tuple[ListedDeadLetter, ...], dict[int, ReplayNote], dict[int, DismissalNote]]:
        """Returns dead letters with the state of their jobs, and the notes of their replays and dismissals.

        Args:
            dead_letters: each with the reason why its job can't run; None if it can.
            maybe_dismissed: those of them that may have been dismissed.

        Raises:
            BusError: NATS can't be read.
        """
        jobs = [stored for stored, _ in dead_letters if stored.kind == "job"]
        notes = await self.replays.notes([stored.number for stored in jobs])
        dismissals = await self._dismissal_notes({stored.number: stored.subject for stored in maybe_dismissed})
        executions = {note.execution_id: note.agent for note in notes.values()}
        for stored in jobs:
            if stored.dead_letter.execution_id and stored.dead_letter.agent and stored.number not in notes:
                executions[stored.dead_letter.execution_id] = stored.dead_letter.agent
        ended = await self.replays.statuses_of(executions)
        remembered_since = self.now() - timedelta(hours=self.config.limits.events_max_age_h)
        listed: list[ListedDeadLetter] = []
        for stored, why_not in dead_letters:
            note = notes.get(stored.number)
            dismissal = dismissals.get(stored.number)
            replay_status: ReplayStatus | None = None
            if note is not None:
                why_not = f"it was replayed before, as {note.execution_id}"
                replay_status = ended.get(note.execution_id)
                if replay_status is None and note.at >= remembered_since:
                    replay_status = "accepted"
            elif why_not is None and ended.get(stored.dead_letter.execution_id or "") == "succeeded":
                why_not = SUCCEEDED_ANYWAY
            listed.append(
                ListedDeadLetter(
                    dead_letter_id=stored.number,
                    kind=stored.kind,
                    reason=stored.dead_letter.reason,
                    agent=stored.dead_letter.agent,
                    execution_id=stored.dead_letter.execution_id,
                    job_id=stored.dead_letter.job_id,
                    error=self.redactor.text(stored.dead_letter.error),
                    at=stored.dead_letter.at,
                    replayable=why_not is None,
                    why_not=why_not,
                    replayed_as=None if note is None else note.execution_id,
                    replay_status=replay_status,
                    dismissed_by=None if dismissal is None else dismissal.by,
                    dismissed_at=None if dismissal is None else dismissal.at,
                )
            )
        return tuple(listed), notes, dismissals

    def _visible(self, payload: bytes) -> tuple[JsonValue, bool]:
        """Returns the redacted payload as it may be shown, and True if it is cut."""
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
