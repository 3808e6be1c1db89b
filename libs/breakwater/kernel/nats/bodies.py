"""Large bodies of jobs, in a JetStream object store. The job's message refers to its body.

A body has a description and numbered chunks, in the format of NATS' object stores, so that `nats object` reads them,
too. The description comes first and goes last: whatever a crash leaves behind is listed, and `Leftovers` removes it.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from base64 import urlsafe_b64encode
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, Self

import orjson
import structlog

from breakwater.kernel.ids import new_id
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.errors import BusError, BusUnavailableError, NoStreamError, StreamFullError
from breakwater.kernel.nats.lookup import Lookup, StoredMessage
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import Header, Stream
from breakwater.kernel.types import format_time

IN_MESSAGE_BYTES = 4_000_000
"""The most bytes of a body that its job's message contains. Encrypted or in a dead letter, it is a third larger, and
the NATS servers take messages of up to 8 MB."""

CHUNK_BYTES = 512 * 1024
CHUNKS_AT_ONCE = 8
"""The most chunks that are sent before the server has acknowledged them."""

_REPLACED = {Header.ROLLUP.value: "sub"}
"""Headers of a message that replaces all others on its subject."""

_REMOVED = {**_REPLACED, Header.TTL.value: "1s"}
"""Headers of a message that removes all others from its subject, and then itself."""

LEFT_FOR = timedelta(hours=1)
"""The age from which a body without a job is a leftover: far more than the time from storing it to publishing its job,
and from its dead letter's expiry to its own."""


class BodyLostError(BusError):
    """The object store does not have a body, or not the one that was stored."""


@dataclass(frozen=True, slots=True)
class BodyReference:
    """The reference to a stored body."""

    name: str
    size: int
    """In bytes, as stored."""
    sha256: str
    """In hex, of the stored bytes."""
    encrypted: bool
    job_bytes: int
    """The size of the job. Encrypted texts are compressed first, so that little may be stored of a large job."""

    @classmethod
    def of(cls, body: bytes, *, encrypted: bool, job_bytes: int) -> Self:
        """Makes a reference with a name of its own to a job of `job_bytes`, of which `body` is what is stored."""
        return cls(new_id(), len(body), hashlib.sha256(body).hexdigest(), encrypted, job_bytes)

    @classmethod
    def parse(cls, header: str | None) -> Self | None:
        """Reads the reference of a message; None if the message contains its body."""
        match = _REFERENCE.fullmatch(header or "")
        if match is None:
            return None
        return cls(
            match["name"], int(match["size"]), match["sha256"], match["form"] == "encrypted", int(match["job_bytes"])
        )

    def __str__(self) -> str:
        """Writes the reference as a header."""
        return f"{self.name} {self.size} {self.sha256} {'encrypted' if self.encrypted else 'plain'} {self.job_bytes}"


_REFERENCE = re.compile(
    r"(?P<name>[0-9a-z-]{1,64}) (?P<size>[0-9]{1,12}) (?P<sha256>[0-9a-f]{64}) (?P<form>encrypted|plain) "
    r"(?P<job_bytes>[0-9]{1,12})"
)


@dataclass(frozen=True, slots=True)
class StoredBody:
    """The description of a stored body."""

    name: str
    size: int
    agent: str
    execution_id: str | None
    stored_at: datetime
    kept_until: datetime | None = None
    """When it expires with its dead letter; None for the body of a job that is not a dead letter."""

    @classmethod
    def read(cls, message: StoredMessage) -> Self | None:
        """Reads a description; returns None for one that was removed, or was not written here."""
        try:
            described = orjson.loads(message.data)
            facts = described["metadata"]
            until = facts.get("kept_until")
            return cls(
                described["name"],
                described["size"],
                facts["agent"],
                facts.get("execution_id"),
                message.stored_at,
                None if until is None else datetime.fromisoformat(until),
            )
        except (ValueError, KeyError, TypeError):
            return None


class BodyWriter:
    """Stores and removes bodies, for a user that may publish to `$O.bodies.>`."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    async def put(
        self,
        reference: BodyReference,
        body: bytes,
        agent: str,
        execution_id: str | None,
        *,
        until: datetime | None = None,
    ) -> None:
        """Stores a body, before the message that refers to it. Repeating it replaces what was stored.

        Args:
            reference: the reference to it.
            body: its bytes.
            agent: the agent of its job.
            execution_id: the execution of its job.
            until: when it expires; None for a body that its job still needs.

        Raises:
            BusUnavailableError: not all of it was acknowledged.
            PublishRefusedError: the object store is full.
        """
        await self._describe(reference, agent, execution_id, until)
        subject = subjects.body_chunks(reference.name)
        view = memoryview(body)
        step = CHUNK_BYTES * CHUNKS_AT_ONCE
        sequences = list[int]()
        for start in range(0, len(body), step):
            acks = await asyncio.gather(
                *(
                    self._publish(subject, bytes(view[begin : begin + CHUNK_BYTES]), {} if begin else _REPLACED)
                    for begin in range(start, min(start + step, len(body)), CHUNK_BYTES)
                )
            )
            sequences += acks
        if any(later <= earlier for earlier, later in pairwise(sequences)):
            raise BusUnavailableError(f"{subject}: the chunks were stored in another order")

    async def keep(self, reference: BodyReference, agent: str, execution_id: str | None, *, until: datetime) -> None:
        """Keeps a body for a dead letter that expires at a time. Raises BusUnavailableError, PublishRefusedError."""
        await self._describe(reference, agent, execution_id, until + LEFT_FOR)

    async def remove(self, name: str) -> None:
        """Removes a body. Raises BusUnavailableError, PublishRefusedError."""
        for subject in (subjects.body_chunks(name), subjects.stored_body(name)):
            try:
                await self._publish(subject, b"", _REMOVED)
            except StreamFullError:
                # Even the message that removes others needs room.
                await self._publisher.delete_last(Stream.BODIES, subject)
                await self._publish(subject, b"", _REMOVED)

    async def remove_if_possible(self, name: str) -> None:
        """Removes a body, or leaves it to `Leftovers`."""
        try:
            await self.remove(name)
        except BusError as error:
            structlog.get_logger().info("body_left", body=name, error=str(error))

    async def _describe(
        self, reference: BodyReference, agent: str, execution_id: str | None, until: datetime | None
    ) -> None:
        digest = urlsafe_b64encode(bytes.fromhex(reference.sha256)).decode()
        facts: dict[str, Any] = {"agent": agent}
        if execution_id is not None:
            facts["execution_id"] = execution_id
        if until is not None:
            facts["kept_until"] = format_time(until)
        description = {
            "name": reference.name,
            "bucket": subjects.BODIES.removeprefix("$O."),
            "nuid": reference.name,
            "size": reference.size,
            "chunks": -(-reference.size // CHUNK_BYTES),
            "digest": f"SHA-256={digest}",
            "mtime": format_time(datetime.now(UTC)),
            "metadata": facts,
            "options": {"max_chunk_size": CHUNK_BYTES},
        }
        subject = subjects.stored_body(reference.name)
        await self._publish(subject, orjson.dumps(description), _REPLACED)

    async def _publish(self, subject: str, payload: bytes, headers: dict[str, str]) -> int:
        try:
            return (await self._publisher.raw(subject, payload, headers)).sequence
        except NoStreamError as error:
            # The object store always exists: a cluster is electing its new leader.
            raise BusUnavailableError(str(error)) from error


class BodyReader:
    """Reads stored bodies."""

    def __init__(self, lookup: Lookup) -> None:
        """Takes a reader of the streams, which need not decrypt."""
        self._lookup = lookup

    async def read(self, reference: BodyReference) -> bytes:
        """Reads a body as it was stored.

        Raises:
            BusUnavailableError: NATS does not respond, or a replica that lags does not have it yet.
            BodyLostError: it is gone.
        """
        chunks = list[bytes]()
        size = 0
        digest = hashlib.sha256()
        chunks_subject = subjects.body_chunks(reference.name)
        # Complete: a body that a replica lacks is not lost, and its job must wait for it.
        async with aclosing(self._lookup.scan(Stream.BODIES, chunks_subject, complete=True)) as stored:
            async for message in stored:
                size += len(message.data)
                if size > reference.size:
                    break
                digest.update(message.data)
                chunks.append(message.data)
        if size != reference.size or digest.hexdigest() != reference.sha256:
            difference = f"has {size:,} other bytes in the object store" if size else "is not in the object store"
            raise BodyLostError(f"the job's body of {reference.size:,} bytes {difference}")
        return b"".join(chunks)

    async def is_kept(self, reference: BodyReference) -> bool:
        """Returns True if a dead letter has a body. Raises BusUnavailableError."""
        message = await self._lookup.newest_on(Stream.BODIES, subjects.stored_body(reference.name))
        body = None if message is None else StoredBody.read(message)
        return body is not None and body.kept_until is not None

    async def all(self) -> list[StoredBody]:
        """Returns the descriptions of all bodies. Raises BusUnavailableError."""
        bodies = list[StoredBody]()
        async with aclosing(self._lookup.scan(Stream.BODIES, subjects.STORED_BODIES)) as stored:
            async for message in stored:
                if (body := StoredBody.read(message)) is not None:
                    bodies.append(body)
        return bodies


class Leftovers:
    """Removes bodies that no job and no dead letter has, such as those that a crash has left.

    A job may move between JOBS and PARKED, even there and back, while it is looked for. So each look ends with the
    messages that JOBS has stored since it began, and a body is removed only if two looks in a row have not found its
    job. Nothing is removed while a replica lags: it may have the body and lack its job, or its dead letter.
    """

    def __init__(self, lookup: Lookup, writer: BodyWriter) -> None:
        """Takes a reader of JOBS, PARKED and the object store, and a writer of the latter."""
        self._lookup = lookup
        self._reader = BodyReader(lookup)
        self._writer = writer
        self._suspects = set[str]()

    async def remove(self, now: datetime) -> int:
        """Looks for leftovers, and removes those that the last look found, too. Returns how many were removed.

        Raises:
            BusUnavailableError: NATS does not respond, or a replica lags.
            PublishRefusedError: NATS refuses the removal.
        """
        for stream in (Stream.BODIES, Stream.JOBS, Stream.PARKED):
            await self._lookup.require_current_replicas(stream)
        # Only chunks that the server has got late, over an old connection, have no description.
        stored = await self._lookup.counts(Stream.BODIES, f"{subjects.BODIES}.>")
        chunks = subjects.body_chunks("")
        names = {subject.removeprefix(chunks) for subject in stored if subject.startswith(chunks)}
        undescribed = {name for name in names if subjects.stored_body(name) not in stored}
        bodies = await self._reader.all()
        expired = [body.name for body in bodies if body.kept_until is not None and body.kept_until < now]
        old = {body.name: body for body in bodies if body.kept_until is None and body.stored_at < now - LEFT_FOR}
        if old:
            begun = (await self._lookup.facts(Stream.JOBS)).last
            # The clock of JOBS' leader may be behind that of the object store's.
            oldest = min(body.stored_at for body in old.values()) - LEFT_FOR
            for start in (oldest, begun + 1):
                await self._drop_parked(old)
                await self._drop_queued(old, start)
            await self._drop_parked(old)
        leftovers = [*expired, *(name for name in (*old, *undescribed) if name in self._suspects)]
        for name in leftovers:
            await self._writer.remove(name)
        self._suspects = undescribed.union(old).difference(leftovers)
        if leftovers:
            structlog.get_logger().info("leftover_bodies_removed", bodies=len(leftovers))
        return len(leftovers)

    async def _drop_parked(self, bodies: dict[str, StoredBody]) -> None:
        """Drops the bodies of executions that have a parked job."""
        for body in list(bodies.values()):
            parked = subjects.parked_anywhere(body.execution_id or "unknown")
            if await self._lookup.as_stored().last(Stream.PARKED, parked) is not None:
                del bodies[body.name]

    async def _drop_queued(self, bodies: dict[str, StoredBody], start: datetime | int) -> None:
        """Drops the bodies of jobs in JOBS, which is read from `start` on until there is no other body."""
        if not bodies:
            return
        async with aclosing(self._lookup.scan(Stream.JOBS, "bw.jobs.*", start=start)) as stored:
            async for message in stored:
                if bodies.pop(_name_in(message) or "", None) is not None and not bodies:
                    return


def _name_in(message: StoredMessage) -> str | None:
    reference = BodyReference.parse(message.headers.get(Header.BODY.value))
    return None if reference is None else reference.name
