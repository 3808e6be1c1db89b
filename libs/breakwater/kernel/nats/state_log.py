"""Logs of states, followed and changed by several processes: a stream with one subject for each thing.

The newest message of a thing is its state. Each change names the last sequence of the stream that its writer knew, and
the stream takes it only if there is no later one, so that rules over all things hold and no change is lost. The writer
then sends a notice, upon which the other processes read on; they also look regularly, as notices may be lost.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing
from typing import ClassVar, Generic, TypeVar

import structlog
from pydantic import ValidationError

from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.contract import StateRecord
from breakwater.kernel.nats.core import ClientGetter, core_subscription
from breakwater.kernel.nats.errors import AlreadyDecidedError, BusError, BusUnavailableError
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.process import background
from breakwater.kernel.process.outage import Outage

LOOK_S = 5.0
"""Interval of looks for changes whose notice was lost."""

REREAD_S = 86_400.0
"""Interval at which everything is read again, as the server removes what ended long ago."""

RETRY_S = 0.5
REPLICA_LAG_S = 2.0
REPLICA_PAUSE_S = 0.02

RecordT = TypeVar("RecordT", bound=StateRecord)
StateT = TypeVar("StateT")


class ChangedMeanwhileError(BreakwaterError):
    """Another writer has changed the same thing at this moment."""


class StateLog(ABC, Generic[RecordT, StateT]):
    """The states of things as a process knows them. A subclass says what their records are.

    Args:
        connection: to NATS.
        publisher: of the service; None for one that changes nothing.
    """

    stream: ClassVar[Stream]
    subjects: ClassVar[str]
    """The subjects of the stream, whose last token is the id of the thing."""
    notices: ClassVar[str]
    """The subject on core NATS of notices of changes."""
    log_name: ClassVar[str]
    """The name of its outages in the process's log."""

    def __init__(self, connection: ClientGetter, publisher: Publisher | None = None) -> None:
        self.states: dict[str, StateT] = {}
        """By the ids of the things."""
        self.filled = asyncio.Event()
        """Set once all of the stream was read."""
        self.note_change: Callable[[Iterable[str]], None] = lambda _: None
        """Called with the ids of changed things, after a change."""
        self._connection = connection
        self._publisher = publisher
        self._lookup = Lookup(connection)
        self._lock = asyncio.Lock()
        self._stream: str | None = None
        self._sequence = 0
        self._reread_at = 0.0
        self._notice = asyncio.Event()
        self._outage = Outage(self.log_name)

    @abstractmethod
    def state_of(self, record: RecordT, document: bytes) -> StateT | None:
        """Returns the state that a record, and the same as JSON, gives a thing; None if it is gone.

        Raises ValueError: it means nothing here.
        """

    @abstractmethod
    def read_record(self, document: bytes) -> RecordT:
        """Parses a record. Raises ValidationError."""

    def unreadable_state(self, state_id: str, document: bytes) -> StateT | None:  # noqa: ARG002  for subclasses
        """Returns the state of a thing whose record is not readable, such as that of a later version; None: none."""
        return None

    @property
    def version(self) -> str:
        """The state of the whole log: the stream's identity, and the sequence up to which it is known."""
        return f"{self._stream}/{self._sequence}"

    async def run(self) -> None:
        """Follows the stream until cancelled. While NATS is unavailable, the known states stay valid."""
        while True:
            try:
                async with core_subscription(self._connection, self.notices, self._hear):
                    while True:
                        self._notice.clear()
                        await self.catch_up()
                        self._outage.note_success()
                        self.filled.set()
                        timer = asyncio.get_running_loop().call_later(
                            background.aligned_delay(LOOK_S), self._notice.set
                        )
                        await self._notice.wait()
                        timer.cancel()
            except BusError as error:
                self._outage.note_failure(error)
            await asyncio.sleep(RETRY_S)

    async def catch_up(self, since: str | None = None) -> None:
        """Reads the changes that were made since the last time, by any process.

        Args:
            since: the version that the caller has found to be too old: another caller may have read on since then.

        Raises:
            BusError: nothing was read.
        """
        async with self._lock:
            if since is None or since == self.version:
                await self._read()

    async def last_record(self, state_id: str) -> RecordT | None:
        """Returns the record of the last change of a thing, also if it is gone since; None if there is none to read.

        Raises BusError.
        """
        message = await self._lookup.last(self.stream, self._subject(state_id))
        try:
            return None if message is None else self.read_record(message.data)
        except ValidationError:
            return None

    async def change(self, decide: Callable[[], RecordT], changed_id: str | None = None) -> RecordT:
        """Publishes a change, and decides again if other things were changed meanwhile.

        Args:
            decide: gives the new record, given the states of the log. It may be called repeatedly, and its errors are
                raised.
            changed_id: the thing that is changed; None for a new one.

        Raises:
            ChangedMeanwhileError: somebody else has changed the thing at this moment.
            BusUnavailableError: the change was not made, or may have been if NATS did not answer.
        """
        assert self._publisher is not None
        async with self._lock:
            await self._read()
            before = None if changed_id is None else self.states.get(changed_id)
            while True:
                record = decide()
                try:
                    stored = await self._publisher.event(
                        self._subject(record.state_id),
                        record,
                        id=f"{record.state_id}/{self._sequence}",
                        at=record.at,
                        after=self._sequence,
                        removed_in_s=record.kept_s,
                    )
                except AlreadyDecidedError:
                    await self._read()
                    if changed_id is not None and self.states.get(changed_id) != before:
                        raise ChangedMeanwhileError from None
                    continue
                break
            self._sequence = stored.sequence
            self._take({record.state_id: self.state_of(record, record.json_bytes())})
        try:
            await self._publisher.send(self.notices, str(stored.sequence).encode())
        except BusUnavailableError:
            # The change is made; the other processes will see it when they look.
            structlog.get_logger().info("notice_not_sent", stream=self.stream, id=record.state_id)
        return record

    def _subject(self, state_id: str) -> str:
        return f"{self.subjects[:-1]}{subjects.encode_token(state_id)}"

    def _hear(self, data: bytes) -> None:
        if not data.isdigit() or int(data) > self._sequence:
            self._notice.set()

    async def _read(self) -> None:
        facts = await self._lookup.facts(self.stream)
        now = time.time()
        # Another stream than the one that was read was recreated, or restored from a backup.
        is_other = facts.identity != self._stream or facts.last < self._sequence
        reads_all = is_other or now >= self._reread_at
        if not reads_all and facts.last == self._sequence:
            return
        sequence = 0 if reads_all else self._sequence
        identity = facts.identity
        changes: dict[str, StateT | None] = dict.fromkeys(self.states) if reads_all else {}
        while sequence < facts.last:
            sequence = max(await self._scan(sequence, changes), facts.last)
            # A state that was replaced while this was read has a later message, and would be lacking without it.
            facts = await self._lookup.facts(self.stream)
        self._stream = identity
        self._sequence = sequence
        if reads_all:
            self._reread_at = now + REREAD_S
        self._take(changes)

    async def _scan(self, sequence: int, changes: dict[str, StateT | None]) -> int:
        """Reads the messages behind a sequence into changes, and returns the last one's. Raises BusError."""
        left_s = REPLICA_LAG_S
        while True:
            scan = self._lookup.scan(self.stream, self.subjects, start=sequence + 1, complete=True)
            try:
                async with aclosing(scan) as stored:
                    async for message in stored:
                        sequence = message.sequence
                        state_id = subjects.decode_token(message.subject.rpartition(".")[2])
                        changes[state_id] = self._read_state(state_id, message.data, sequence)
            except BusUnavailableError:
                # The replica that was asked may lag.
                if left_s <= 0 or not self._connection().is_connected:
                    raise
                left_s -= REPLICA_PAUSE_S
                await asyncio.sleep(REPLICA_PAUSE_S)
            else:
                return sequence

    def _read_state(self, state_id: str, document: bytes, sequence: int) -> StateT | None:
        try:
            return self.state_of(self.read_record(document), document)
        except ValueError:  # of the record, or of what it means here
            structlog.get_logger().error("state_unreadable", stream=self.stream, id=state_id, sequence=sequence)
            return self.unreadable_state(state_id, document)

    def _take(self, changes: Mapping[str, StateT | None]) -> None:
        for state_id, state in changes.items():
            if state is None:
                self.states.pop(state_id, None)
            else:
                self.states[state_id] = state
        self.note_change(changes)
