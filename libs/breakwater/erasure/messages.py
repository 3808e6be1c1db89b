"""The messages of a data subject in all streams."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

import orjson

from breakwater.erasure.rules import DataSubject, Key, goes, keys_in, mentions, parts_of_event
from breakwater.erasure.tables import ErasableRows
from breakwater.erasure.waiting import comes_true
from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.nats import subjects, topology
from breakwater.kernel.nats.bodies import BodyReader, BodyReference
from breakwater.kernel.nats.contract import DeadLetter
from breakwater.kernel.nats.core import ClientGetter
from breakwater.kernel.nats.deletion import FILLER, begin_new_file, delete_messages, require_filler
from breakwater.kernel.nats.delivery import name_in, queued_at, trusted_headers
from breakwater.kernel.nats.lookup import Lookup, StoredMessage, everything_in
from breakwater.kernel.nats.subjects import Header, Stream, decode_token

READERS: dict[Stream, tuple[str, ...]] = {
    Stream.EVENTS: ("sink-events", "budget", "breaker", topology.ALERTER_EVENTS, topology.ALERTER_EXECUTIONS),
    Stream.ALERTS: ("sink-alerts",),
    Stream.DLQ: (topology.ALERTER_DEAD_LETTERS,),
    Stream.AUDIT: ("sink-audit",),
}
"""The consumers that must have handled a message before it may be deleted, or a row of it be changed."""


class NotHandledError(BreakwaterError):
    """A service has not handled messages that are to be deleted."""

    command_code = "not_handled"


@dataclass(slots=True)
class ErasableMessages:
    """The messages of a data subject."""

    ids: set[str] = field(default_factory=set[str])
    """Their executions."""
    names: set[str] = field(default_factory=set[str])
    """The same, with the ids that callers chose."""
    keys: set[Key] = field(default_factory=set[Key])
    """Their tasks and plans, as the plane knows them."""
    shared: set[Key] = field(default_factory=set[Key])
    """Those of others, which may be theirs, too."""
    unfinished: set[str] = field(default_factory=set[str])
    """Subjects and sequences of jobs that have not ended."""
    later: set[str] = field(default_factory=set[str])
    """The same of jobs that were accepted after the erasure began, and stay."""
    sequences: dict[Stream, list[int]] = field(default_factory=dict[Stream, list[int]])
    """Sequences to delete, in order."""

    def add(self, stream: Stream, *sequences: int) -> None:
        """Adds messages to delete."""
        self.sequences.setdefault(stream, []).extend(sequences)

    def was_awaited_with(self, earlier: ErasableMessages) -> bool:
        """Returns True if who has waited for those found earlier need not wait for these."""
        return self.ids <= earlier.ids and all(
            self.sequences.get(stream, [0])[-1:] <= earlier.sequences.get(stream, [0])[-1:] for stream in READERS
        )


class SubjectMessages:
    """Finds and deletes the messages of a data subject. All methods raise BusUnavailableError."""

    def __init__(self, connection: ClientGetter, subject: DataSubject, until: datetime) -> None:
        """Takes the time of the erasure: jobs that were accepted later are left as they are."""
        self._connection = connection
        self._lookup = Lookup(connection)
        self._subject = subject
        self._until = until
        self._recorded = ErasableMessages()
        """Those of the records in EVENTS, as far as they were read."""
        self._ended = set[str]()
        """The executions of those with a record of their end."""
        self._next: dict[str, int] = {}
        """The sequence from which to go on, by the subjects of the records."""

    async def find(self, rows: ErasableRows) -> ErasableMessages:
        """Returns all their messages, also of jobs that ClickHouse does not know.

        A second time, it reads only the records that EVENTS has got since.
        """
        # The queues first: a job that ends meanwhile is then in EVENTS.
        queued = await self._read_queues()
        queues_read_at = datetime.now(UTC)
        later = ErasableMessages()
        self._ended |= await self._find_records("bw.executions.>", "queued_at", later)
        # An attempt does not tell when its job was accepted.
        await self._find_records("bw.attempts.>", "completed_at", later)
        recorded = self._recorded
        erasable = ErasableMessages(
            rows.ids | recorded.ids,
            rows.ids | rows.job_ids | recorded.names,
            keys=rows.keys | recorded.keys,
            shared=rows.shared | recorded.shared | later.keys,
            sequences={stream: [*sequences] for stream, sequences in recorded.sequences.items()},
        )
        ended = rows.ids | self._ended
        for stream, message in queued:
            if stream is Stream.PARKED and subjects.parts_of_parked(message.subject)[1] in ended:
                # A job that was cancelled leaves its message until it is due. Others have attempts, too.
                erasable.add(Stream.PARKED, message.sequence)
            else:
                jobs = erasable.unfinished if self._is_accepted(message) else erasable.later
                jobs.add(f"{message.subject} {message.sequence}")
        # That of an invalid job is all that tells of it, and does not tell when it was accepted.
        bodies = await self._find_dead_letters(erasable, later.ids, max(self._until, queues_read_at))
        async for message in self._scan(Stream.EVENTS, "bw.budgets.>"):
            if self._subject.has_scope(parts_of_event(_json(message))):
                erasable.add(Stream.EVENTS, message.sequence)
        for prefix in ("bw.guards.>", "bw.plans.>"):
            async for message in self._scan(Stream.EVENTS, prefix):
                event = _json(message)
                of_job = event.get("execution_id") in erasable.ids
                if any(
                    (of_job or key in erasable.keys) and goes(key[0], of_job=of_job, shared=key in erasable.shared)
                    for key in keys_in(event)
                ):
                    erasable.add(Stream.EVENTS, message.sequence)
        async for message in self._scan(Stream.RESULTS, "bw.results.>"):
            if _token(message, 2) in erasable.ids:
                erasable.add(Stream.RESULTS, message.sequence)
        async for message in self._scan(Stream.RESPONSES, "bw.responses.>"):
            if _token(message, 2) in erasable.ids:
                erasable.add(Stream.RESPONSES, message.sequence)
                bodies.add(_body(message) or "")
        async for message in self._scan(Stream.ALERTS, "bw.alerts.>"):
            if mentions(_json(message), erasable.names, self._subject):
                erasable.add(Stream.ALERTS, message.sequence)
        await self._find_bodies(erasable, bodies)
        erasable.sequences = {stream: sorted({*sequences}) for stream, sequences in erasable.sequences.items()}
        return erasable

    async def require_fillers(self) -> None:
        """Raises NoStreamError if `rewrite_files` could not do it, before anything is deleted."""
        for stream in topology.WITH_TEXTS:
            await require_filler(self._connection, stream)

    async def wait_until_handled(self, erasable: ErasableMessages, wait_s: float) -> None:
        """Waits until the services have handled what is to be deleted. Raises NotHandledError after `wait_s`."""
        for stream, durables in READERS.items():
            last = max(erasable.sequences.get(stream, ()), default=0)
            if stream is Stream.AUDIT:
                last = (await self._lookup.facts(stream)).last
            for durable in durables if last else ():
                await self._wait_for(stream, durable, last, wait_s)

    async def delete(self, erasable: ErasableMessages) -> None:
        """Deletes them; the server overwrites their bytes. EVENTS comes last: it names the jobs of the others."""
        for stream in sorted(erasable.sequences, key=lambda stream: stream is Stream.EVENTS):
            await delete_messages(self._connection, stream, erasable.sequences[stream])

    async def rewrite_files(self) -> tuple[Stream, ...]:
        """Has NATS rewrite files soon, without what was acknowledged, or has expired.

        Returns:
            The streams that are too full for that.
        """
        full: list[Stream] = []
        for stream in topology.WITH_TEXTS:
            facts = await self._lookup.facts(stream)
            if not facts.bytes or (facts.first <= 1 and not facts.deleted):
                continue  # nothing has gone, or all has, and its file with it
            if 0 < facts.max_bytes < facts.bytes + 2 * len(FILLER):
                full += [] if stream in topology.DROPS_OLDEST else [stream]  # those end files all the time
            else:
                await begin_new_file(self._connection, stream)
        return tuple(full)

    async def _wait_for(self, stream: Stream, durable: str, last: int, wait_s: float) -> None:
        async def is_handled() -> bool:
            backlog = await self._lookup.backlog(stream, durable)
            return backlog is None or backlog.acknowledged >= last or not backlog.waiting + backlog.in_progress

        if not await comes_true(is_handled, wait_s):
            raise NotHandledError(f"the consumer {durable} has not handled message {last} of {stream} yet")

    async def _read_queues(self) -> list[tuple[Stream, StoredMessage]]:
        """Their jobs in JOBS and PARKED. As jobs move between the two, what JOBS gets meanwhile is read, too."""
        jobs: list[tuple[Stream, StoredMessage]] = []
        following = dict.fromkeys((Stream.JOBS, Stream.PARKED), 1)
        for stream in (Stream.JOBS, Stream.PARKED, Stream.JOBS):
            # The last one may be acknowledged meanwhile.
            last = (await self._lookup.facts(stream)).last
            scan = self._scan(stream, everything_in(stream), start=following[stream], up_to=last)
            jobs += [(stream, message) async for message in scan if self._has_job(message)]
            following[stream] = last + 1
        return jobs

    async def _find_records(self, subject_filter: str, time: str, later: ErasableMessages) -> set[str]:
        """Reads on in the records of EVENTS. Returns the executions of theirs.

        Args:
            subject_filter: of the records.
            time: the field by which a record is later.
            later: gets the later ones of theirs, which stay.
        """
        recorded = self._recorded
        executions: set[str] = set()
        unread: list[int] = []
        following = self._next.get(subject_filter, 1)
        async for message in self._scan(Stream.EVENTS, subject_filter, start=following):
            following = message.sequence + 1
            record = _json(message)
            if not self._subject.has(record):
                recorded.shared |= keys_in(record)
            elif record.get("execution_id") in recorded.ids or _is_by(record.get(time), self._until):
                recorded.add(Stream.EVENTS, message.sequence)
                recorded.ids.add(record["execution_id"])
                executions.add(record["execution_id"])
                recorded.names.update(name for name in (record["execution_id"], record.get("job_id")) if name)
                recorded.keys |= keys_in(record)
            else:
                # Of an attempt, it turns out when the record of its job is there.
                unread.append(message.sequence)
                later.ids.add(record["execution_id"])
                later.keys |= keys_in(record)
        self._next[subject_filter] = min([following, *unread])
        return executions

    async def _find_dead_letters(self, erasable: ErasableMessages, later: Collection[str], until: datetime) -> set[str]:
        """Finds dead letters, also of jobs without a record. Returns the names of their bodies."""
        bodies: set[str] = set()
        async for message in self._scan(Stream.DLQ, "bw.dlq.>"):
            dead_letter = message.read(DeadLetter)
            if dead_letter is None or dead_letter.execution_id in later:
                continue
            if dead_letter.at > until and dead_letter.execution_id not in erasable.ids:
                continue
            headers = trusted_headers(dead_letter.subject, dead_letter.headers)
            is_job = dead_letter.stream in (Stream.JOBS, Stream.PARKED)
            body = _original(dead_letter)
            is_theirs = dead_letter.execution_id in erasable.ids
            if is_job:
                is_theirs = is_theirs or self._subject.has_job(body, name_in(headers, Header.USER))
            elif isinstance(body, dict):
                body = cast(dict[str, Any], body)
                is_theirs = is_theirs or self._subject.has(body) or mentions(body, erasable.names, self._subject)
            if is_theirs:
                erasable.add(Stream.DLQ, message.sequence)
                bodies.add(_name_of_body(dead_letter.headers.get(Header.BODY.value)) or "")
                if is_job and dead_letter.execution_id is not None:
                    erasable.ids.add(dead_letter.execution_id)
                    erasable.names.update(name for name in (dead_letter.execution_id, dead_letter.job_id) if name)
        return bodies

    async def _find_bodies(self, erasable: ErasableMessages, names: set[str]) -> None:
        described = await BodyReader(self._lookup).all()
        names |= {body.name for body in described if body.execution_id in erasable.ids}
        for name in names - {""}:
            for subject in (subjects.body_chunks(name), subjects.stored_body(name)):
                async for message in self._scan(Stream.BODIES, subject):
                    erasable.add(Stream.BODIES, message.sequence)

    def _has_job(self, message: StoredMessage) -> bool:
        headers = trusted_headers(message.subject, message.headers)
        return self._subject.has_job(_json(message), name_in(headers, Header.USER))

    def _is_accepted(self, message: StoredMessage) -> bool:
        headers = trusted_headers(message.subject, message.headers)
        return queued_at(headers, message.stored_at) <= self._until

    async def _scan(
        self, stream: Stream, subject_filter: str, *, start: int = 1, up_to: int | None = None
    ) -> AsyncGenerator[StoredMessage]:
        scan = self._lookup.scan(stream, subject_filter, start=start, up_to=up_to, complete=True)
        async with aclosing(scan) as stored:
            async for message in stored:
                yield message


def _original(dead_letter: DeadLetter) -> object:
    """The JSON of the original message; None if it is not JSON."""
    try:
        return orjson.loads(b64decode(dead_letter.payload_base64))
    except ValueError:
        return None


def _json(message: StoredMessage) -> dict[str, Any]:
    """The message as a JSON object; an empty one if it is not."""
    try:
        document = orjson.loads(message.data)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _token(message: StoredMessage, index: int) -> str:
    tokens = message.subject.split(".")
    return decode_token(tokens[index]) if index < len(tokens) else ""


def _body(message: StoredMessage) -> str | None:
    return _name_of_body(message.headers.get(Header.BODY.value))


def _name_of_body(header: str | None) -> str | None:
    reference = BodyReference.parse(header)
    return None if reference is None else reference.name


def _is_by(moment: object, until: datetime) -> bool:
    if isinstance(moment, str):
        moment = datetime.fromisoformat(moment)
    return isinstance(moment, datetime) and moment <= until
