"""The messages of a data subject in all streams."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, cast

import orjson

from breakwater.erasure.rules import DataSubject, mentions, parts_of_event
from breakwater.erasure.tables import ErasableRows
from breakwater.erasure.waiting import comes_true
from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.nats import subjects, topology
from breakwater.kernel.nats.bodies import BodyReader, BodyReference
from breakwater.kernel.nats.contract import DeadLetter
from breakwater.kernel.nats.core import ClientGetter
from breakwater.kernel.nats.deletion import FILLER, begin_new_file, delete_messages
from breakwater.kernel.nats.delivery import name_in, trusted_headers
from breakwater.kernel.nats.lookup import Lookup, StoredMessage
from breakwater.kernel.nats.subjects import Header, Stream, decode_token

READERS: dict[Stream, tuple[str, ...]] = {
    Stream.EVENTS: ("sink-events", "budget", "breaker", topology.ALERTER_EVENTS, topology.ALERTER_EXECUTIONS),
    Stream.ALERTS: ("sink-alerts",),
    Stream.DLQ: (topology.ALERTER_DEAD_LETTERS,),
}
"""The consumers that must have handled a message before it may be deleted."""


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
    keys: set[str] = field(default_factory=set[str])
    """Their tasks and plans, as the plane knows them."""
    shared: set[str] = field(default_factory=set[str])
    """Tasks of others, which may be theirs, too."""
    unfinished: set[str] = field(default_factory=set[str])
    """Subjects and sequences of jobs that have not ended."""
    sequences: dict[Stream, list[int]] = field(default_factory=dict[Stream, list[int]])
    """Sequences to delete, in order."""

    def add(self, stream: Stream, *sequences: int) -> None:
        """Adds messages to delete."""
        self.sequences.setdefault(stream, []).extend(sequences)


class SubjectMessages:
    """Finds and deletes the messages of a data subject. All methods raise BusUnavailableError."""

    def __init__(self, connection: ClientGetter, subject: DataSubject, until: datetime) -> None:
        """Takes the time after which jobs that end are left as they are."""
        self._connection = connection
        self._lookup = Lookup(connection)
        self._subject = subject
        self._until = until

    async def find(self, rows: ErasableRows) -> ErasableMessages:
        """Returns all their messages, also of jobs that ClickHouse does not know."""
        erasable = ErasableMessages(
            set(rows.ids), rows.ids | rows.job_ids, keys=set(rows.keys), shared=set(rows.shared)
        )
        # The queues first: a job that ends meanwhile is then in EVENTS.
        queued = [message async for message in self._scan(Stream.JOBS, "bw.jobs.>") if self._has_job(message)]
        parked = [message async for message in self._scan(Stream.PARKED, "bw.parked.>") if self._has_job(message)]
        for prefix in ("bw.executions.>", "bw.attempts.>"):
            await self._find_records(erasable, prefix)
        erasable.unfinished.update(f"{message.subject} {message.sequence}" for message in queued)
        for message in parked:
            # A job that was cancelled leaves its message until it is due.
            if subjects.parts_of_parked(message.subject)[1] in erasable.ids:
                erasable.add(Stream.PARKED, message.sequence)
            else:
                erasable.unfinished.add(f"{message.subject} {message.sequence}")
        bodies = await self._find_dead_letters(erasable)
        async for message in self._scan(Stream.EVENTS, "bw.budgets.>"):
            if self._subject.has_scope(parts_of_event(_json(message))):
                erasable.add(Stream.EVENTS, message.sequence)
        for prefix in ("bw.guards.>", "bw.plans.>"):
            async for message in self._scan(Stream.EVENTS, prefix):
                event = _json(message)
                is_of_theirs = any(event.get(name) in erasable.keys for name in ("task_key", "plan_key"))
                # By the event of a shared task, which has no texts, Redis learns that the task is stopped.
                is_shared = event.get("task_key") in erasable.shared
                if (event.get("execution_id") in erasable.ids or is_of_theirs) and not is_shared:
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
        for sequences in erasable.sequences.values():
            sequences.sort()
        return erasable

    async def wait_until_handled(self, erasable: ErasableMessages, wait_s: float) -> None:
        """Waits until the services have handled what is to be deleted. Raises NotHandledError after `wait_s`."""
        for stream, durables in READERS.items():
            if sequences := erasable.sequences.get(stream):
                for durable in durables:
                    await self._wait_for(stream, durable, sequences[-1], wait_s)

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

    async def _find_records(self, erasable: ErasableMessages, subject_filter: str) -> None:
        async for message in self._scan(Stream.EVENTS, subject_filter):
            record = _json(message)
            if self._subject.has(record) and _ended_before(record.get("completed_at"), self._until):
                erasable.add(Stream.EVENTS, message.sequence)
                erasable.ids.add(record["execution_id"])
                erasable.names.update(name for name in (record["execution_id"], record.get("job_id")) if name)
                erasable.keys.update(key for key in (record.get("task_key"), record.get("plan_key")) if key)
            elif task_key := record.get("task_key"):
                erasable.shared.add(task_key)

    async def _find_dead_letters(self, erasable: ErasableMessages) -> set[str]:
        """Finds dead letters, also of jobs without a record. Returns the names of their bodies."""
        bodies: set[str] = set()
        async for message in self._scan(Stream.DLQ, "bw.dlq.>"):
            dead_letter = message.read(DeadLetter)
            if dead_letter is None or not _ended_before(dead_letter.at, self._until):
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

    async def _scan(self, stream: Stream, subject_filter: str) -> AsyncGenerator[StoredMessage]:
        async with aclosing(self._lookup.scan(stream, subject_filter, complete=True)) as stored:
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


def _ended_before(moment: object, until: datetime) -> bool:
    if isinstance(moment, str):
        moment = datetime.fromisoformat(moment)
    return isinstance(moment, datetime) and moment <= until
