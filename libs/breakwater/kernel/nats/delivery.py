"""A message as handlers see it: acknowledged, parked for long, or kept as a dead letter where it can't be handled.

A job that is returned to JOBS with a delay still counts towards its consumer's `max_ack_pending`, which is its agent's
concurrency. So it is published to PARKED, and the original is acknowledged; when it is due, it is published back to
JOBS. A crash between two of these steps leaves at most a second message of the same execution, which its id
makes harmless.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import AsyncGenerator, Callable, Collection, Container, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Generic

import nats.errors
import structlog
from nats.aio.msg import Msg
from pydantic import BaseModel
from pydantic_core import CoreSchema, core_schema
from typing_extensions import TypeVar

from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.contract import DeadLetter
from breakwater.kernel.nats.errors import BusUnavailableError, MessageTooLargeError, NoStreamError, PublishRefusedError
from breakwater.kernel.nats.lookup import ClientGetter, Lookup
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import OURS, PROGRAM, Header, Stream, decode_token, encode_token
from breakwater.kernel.nats.topology import ACK_WAIT_S
from breakwater.kernel.process import background
from breakwater.kernel.process.outage import Outage
from breakwater.kernel.types import format_time, is_full_id, ms_from_time

ACK_TIMEOUT_S = 5.0


MessageT_co = TypeVar("MessageT_co", bound=BaseModel, default=BaseModel, covariant=True)


class Delivery(Generic[MessageT_co]):
    """One delivery of one stored message, with the bytes of the model that it is of.

    The handler reads them: a message that can't be read is its concern, and no reason to lose the rest of a batch.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        """FastStream checks with pydantic what it hands to a handler: a delivery is one already."""
        return core_schema.is_instance_schema(cls)

    def __init__(self, message: Msg) -> None:
        metadata = message.metadata
        self._message = message
        self.ack_subject: str = message.reply
        self.subject: str = message.subject
        self.data: bytes = message.data
        self.headers: Mapping[str, str] = trusted_headers(message.subject, message.headers or {})
        self.stream: str = metadata.stream
        self.sequence: int = metadata.sequence.stream
        self.deliveries: int = metadata.num_delivered or 1
        """1 for the first delivery."""
        self.is_first: bool = self.deliveries == 1 and Header.EXECUTION_ID.value not in self.headers
        """True if no worker can have begun the job yet: it was neither delivered nor parked before."""
        self.published_at: datetime = metadata.timestamp
        self.queued_at: datetime = self.published_at
        """Time that a job was first accepted: that of the message's storing, unless it was parked since."""
        if Header.QUEUED_AT.value in self.headers:
            self.queued_at = queued_at(self.headers, self.published_at)
        self.waiting: int = metadata.num_pending or 0
        """Undelivered messages for the consumer behind this message when it was sent."""

    async def ack(self) -> None:
        """Acknowledges without waiting for the server: for work that may be done twice."""
        await self._message.ack()

    async def ack_sync(self) -> bool:
        """Acknowledges and waits for the server's confirmation.

        Returns:
            False when none came: the message will be delivered again, and the handler must know what to do then.
        """
        try:
            await self._message.ack_sync(timeout=ACK_TIMEOUT_S)  # pyright: ignore[reportArgumentType]  # takes floats
        except (TimeoutError, nats.errors.Error):
            return False
        return True

    async def retry_in(self, delay_s: float) -> None:
        """Has the message redelivered after `delay_s` (a nak); it holds no slot of this process meanwhile."""
        await self._message.nak(delay=delay_s)

    async def terminate(self) -> None:
        """Ends redelivery of the message, which was not handled."""
        await self._message.term()

    async def in_progress(self) -> None:
        """Reports to the server that the message is still in progress, which restarts its ack wait."""
        await self._message.in_progress()


async def report_in_progress(deliveries: Iterable[Delivery]) -> None:
    """Reports once to the server that messages are in progress. Ignores a lost connection."""
    for delivery in deliveries:
        # A lost report costs at most a redelivery, which handlers expect.
        with suppress(nats.errors.Error):
            await delivery.in_progress()


async def give_back(deliveries: Iterable[Delivery]) -> None:
    """Returns messages that were not handled: the server redelivers them immediately. Ignores a lost connection."""
    for delivery in deliveries:
        # One that does not arrive costs its ack wait.
        with suppress(nats.errors.Error):
            await delivery.retry_in(0)


@asynccontextmanager
async def heartbeat(deliveries: Iterable[Delivery], every_s: float = ACK_WAIT_S / 3) -> AsyncGenerator[None]:
    """Keeps messages from being redelivered while the block runs."""
    held = tuple(deliveries)

    async def beat() -> None:
        while True:
            await asyncio.sleep(every_s)
            await report_in_progress(held)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        await background.stop(task)


async def held_deliveries(
    connection: ClientGetter, stream: Stream, durable: str, reads: Iterable[str]
) -> AsyncGenerator[Delivery]:
    """The deliveries that are held, which may be returned in the name of their holder: NATS delivers them again.

    Args:
        connection: to NATS.
        stream: a work queue, which loses acknowledged messages: all that are left up to the last delivered are held.
        durable: the consumer's name.
        reads: the subjects that it reads.

    Raises:
        BusUnavailableError: NATS does not answer, or has no such consumer.
    """
    lookup = Lookup(connection)
    consumer = await lookup.progress(stream, durable)
    begin, end = consumer.acknowledged + 1, consumer.delivered
    for subject in reads if consumer.in_progress else ():
        async with aclosing(lookup.scan(stream, subject, start=begin, up_to=end)) as stored:
            async for found in stored:
                # The server finds the message of an acknowledgement by its place in the stream. How many deliveries ago
                # it was sent, it only compares with how many there were.
                place = f"1.{found.sequence}.{consumer.deliveries}.{int(found.stored_at.timestamp()) * 10**9}.0"
                reply = f"$JS.ACK.{stream}.{durable}.{place}"
                yield Delivery(Msg(connection(), found.subject, reply, found.data, dict(found.headers)))


async def dead_letter(
    publisher: Publisher,
    delivery: Delivery,
    *,
    reason: str,
    error: str,
    agent: str | None,
    at: datetime,
    execution_id: str | None = None,
    consumer: str | None = None,
    withheld: bool = False,
    private: bool = False,
) -> None:
    """Stores a message on DLQ, without its payload where it is too large for that.

    Its id is that of the original, so that a repeated call stores it once.

    `consumer` is for streams on which several give up for reasons of their own: each then has its own dead letter.
    `withheld`: the original must not be shown; only a replay reads it. `private`: it must not be stored in plain.

    The caller may end the message then, also one of which nothing is kept: else it would come for ever.

    Raises:
        BusUnavailableError: not stored for sure; the original must not be acknowledged.
    """
    dead_letter = DeadLetter(
        reason=reason,
        agent=agent,
        error=error,
        stream=delivery.stream,
        subject=delivery.subject,
        sequence=delivery.sequence,
        headers=dict(delivery.headers),
        payload_base64=base64.b64encode(delivery.data).decode(),
        withheld=withheld,
        execution_id=execution_id,
        at=at,
    )
    original = f"dlq/{delivery.stream}/{delivery.sequence}"
    await keep(publisher, dead_letter, id=f"{original}/{consumer}" if consumer else original, private=private)


MAX_ERROR, MAX_HEADER = 10_000, 1_000
"""Characters that are kept of a dead letter's error, and of a header, where all of it is too much."""


async def keep(
    publisher: Publisher,
    dead_letter: DeadLetter,
    *,
    id: str,  # noqa: A002  CloudEvents' own name
    private: bool = False,
) -> None:
    """Stores a dead letter; without its original where it is not taken with it. Raises BusUnavailableError.

    A dead letter that is not taken even so is in the log and the metrics alone.
    """
    log = structlog.get_logger().bind(
        stream=dead_letter.stream, sequence=dead_letter.sequence, reason=dead_letter.reason
    )
    subject = subjects.dead_letter(dead_letter.reason, dead_letter.agent or "unknown")
    try:
        await publisher.event(subject, dead_letter, id=id, at=dead_letter.at, private=private)
    except PublishRefusedError as error:
        log.warning("dead_letter_without_original", error=str(error))
        try:
            await publisher.event(subject, _without_original(dead_letter), id=id, at=dead_letter.at, private=private)
        except PublishRefusedError as refusal:
            from breakwater.kernel.telemetry.metrics import (
                dead_letters_refused,  # not where the command line parks a job
            )

            dead_letters_refused()[(dead_letter.stream,)].inc()
            log.error("dead_letter_refused", error=str(refusal))  # noqa: TRY400  the refusal says all


def _without_original(dead_letter: DeadLetter) -> DeadLetter:
    original = base64.b64decode(dead_letter.payload_base64)
    ours = {one.value for one in Header} - {Header.MSG_ID.value}
    return dead_letter.model_copy(
        update={
            "error": dead_letter.error[:MAX_ERROR],
            "headers": {
                name: value for name, value in dead_letter.headers.items() if name in ours and len(value) <= MAX_HEADER
            },
            "payload_base64": "",
            "omitted_bytes": len(original),
            "omitted_sha256": hashlib.sha256(original).hexdigest(),
        }
    )


LONGEST_WAIT = timedelta(days=30)
"""Longest time since a job was accepted: an impossible time would keep its record out of ClickHouse."""

RETRY_S = 5.0
"""Wait of a job that is due while its queue does not take it."""

DELAYED_BATCH = 256
DELAYED_LINGER_S = 0.25
"""Time that messages gather, by which a job may wake late. One by one, each costs the worker ten times as much."""

_SHORTEST_S = 0.001

# What the client library agrees to send; other libraries agree to more.
_SENDABLE = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


async def park(publisher: Publisher, delivery: Delivery, *, agent: str, execution_id: str, due: datetime) -> None:
    """Stores a job on PARKED until it is due; after that, the delivery is to be acknowledged.

    Doing it twice for the same message and time stores one message.

    Args:
        publisher: of a user that may publish to `bw.parked.>`.
        delivery: the job, from JOBS.
        agent: whose queue it goes back to.
        execution_id: which execution it is.
        due: when.

    Raises:
        BusUnavailableError: not stored for sure; try again, and do not acknowledge the delivery.
        PublishRefusedError: PARKED is full, or the job too large (`MessageTooLargeError`): it must wait in JOBS.
    """
    token = encode_token(execution_id)
    headers = _carried(delivery.headers) | {
        # With its place in JOBS: another message of the same execution waits for an answer of its own.
        Header.MSG_ID.value: f"{token}/parked/{delivery.sequence}/{ms_from_time(due)}",
        Header.DUE.value: format_time(due),
        Header.EXECUTION_ID.value: token,
        Header.QUEUED_AT.value: format_time(delivery.queued_at),
    }
    try:
        await publisher.job(subjects.parked(agent, execution_id), delivery.data, headers)
    except NoStreamError as error:
        # PARKED is always there: a cluster is choosing its new leader.
        raise BusUnavailableError(str(error)) from error


class DelayedQueue:
    """Puts parked jobs back into their queues when they are due."""

    def __init__(
        self, publisher: Publisher, agents: Container[str], *, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        """`publisher` is of a user that may publish to `bw.jobs.>` and `bw.dlq.>`; `agents` are the configured ones."""
        self._publisher = publisher
        self._agents = agents
        self._now = now
        self._outages: dict[str, Outage] = {}

    async def handle_all(self, deliveries: Sequence[Delivery]) -> None:
        """Handles deliveries of parked jobs, each by itself."""
        await asyncio.gather(*(self.handle(delivery) for delivery in deliveries))

    async def handle(self, delivery: Delivery) -> None:
        """Handles one delivery of a parked job: back to sleep, or back to its queue."""
        now = self._now()
        due = _time(delivery.headers.get(Header.DUE.value)) or now
        if due > now:
            await delivery.retry_in(max((due - now).total_seconds(), _SHORTEST_S))
            return
        agent, execution_id = subjects.names_of_parked(delivery.subject)
        outage = self._outages.setdefault(agent, Outage(subjects.job(agent)))
        try:
            await self._wake(delivery, agent, execution_id, due)
        except (BusUnavailableError, PublishRefusedError) as error:
            outage.failed(error)
            await delivery.retry_in(RETRY_S)
            return
        outage.worked()
        # Unconfirmed, it comes again, and goes back again: a second message of the same execution.
        await delivery.ack_sync()

    async def _wake(self, delivery: Delivery, agent: str, execution_id: str, due: datetime) -> None:
        headers = _requeued(delivery.headers, execution_id, delivery.sequence, due)
        try:
            await self._publisher.job(subjects.job(agent), delivery.data, headers)
        except (NoStreamError, MessageTooLargeError) as error:
            is_removed = isinstance(error, NoStreamError)
            # A cluster that is choosing the leader of JOBS answers the same; the config distinguishes the two.
            if is_removed and agent in self._agents:
                raise
            removed = f"the agent {agent!r} was removed from the config while its job waited: {error}"
            await dead_letter(
                self._publisher,
                delivery,
                reason="unknown_agent" if is_removed else "invalid",
                error=removed if is_removed else str(error),
                agent=agent,
                at=self._now(),
                execution_id=execution_id,
                # Its agent may have kept texts or not, which is not known any more; a job that might is not to be lost.
                private=self._publisher.has_key,
            )


async def wake_early(
    publisher: Publisher, lookup: Lookup, execution_id: str, agents: Collection[str] = (), owner: str | None = None
) -> bool:
    """Puts a job that sleeps back into its queue before it is due.

    Its message stays on PARKED. When that is due, the job is decided.

    Args:
        publisher: to its queue.
        lookup: of PARKED.
        execution_id: the job.
        agents: only a job of one of these; empty: of any.
        owner: only a job of this one; None: of anyone.

    Returns:
        True if it was put back: it sleeps, and is one of these.

    Raises:
        BusUnavailableError: NATS does not answer.
        PublishRefusedError: its queue does not take it; it wakes when it is due.
    """
    found = await lookup.last(Stream.PARKED, subjects.parked_anywhere(execution_id))
    if found is None:
        return False
    due = _time(found.headers.get(Header.DUE.value)) or found.stored_at
    agent, _ = subjects.names_of_parked(found.subject)
    if agents and agent not in agents:
        return False
    if owner is not None and found.headers.get(Header.OWNER.value) != encode_token(owner):
        return False
    await publisher.job(subjects.job(agent), found.data, _requeued(found.headers, execution_id, found.sequence, due))
    return True


def _requeued(headers: Mapping[str, str], execution_id: str, sequence: int, due: datetime) -> dict[str, str]:
    """The headers of a job that was parked, under that sequence and until that time, and goes back to its queue."""
    token = encode_token(execution_id)
    return _carried(headers) | {
        Header.MSG_ID.value: f"{token}/woken/{sequence}/{ms_from_time(due)}",
        Header.EXECUTION_ID.value: token,
    }


def trusted_headers(subject: str, headers: Mapping[str, str]) -> Mapping[str, str]:
    """Returns the headers of a message that can be trusted.

    From a program's job, it removes the headers that only the plane may set, and sets the owner if the program has its
    own NATS user.
    """
    user = subjects.user_of_job(subject)
    if user is None:
        return headers
    own = {name: value for name, value in headers.items() if not name.lower().startswith(OURS)}
    if user.startswith(PROGRAM):
        own[Header.OWNER.value] = own[Header.SUBMITTED_BY.value] = encode_token(user)
    return own


def parked_execution(headers: Mapping[str, str]) -> str | None:
    """Returns the execution of a job that was parked; None for any other message."""
    token = headers.get(Header.EXECUTION_ID.value)
    if token is None:
        return None
    try:
        execution_id = decode_token(token)
    except UnicodeDecodeError:
        return None
    return execution_id if is_full_id(execution_id) else None


CLOCKS_DIFFER = timedelta(minutes=1)
"""The next leader's clock may be behind that of the one that stored it first."""


def queued_at(headers: Mapping[str, str], default: datetime) -> datetime:
    """Time that a job was first accepted; `default`, that of its message's storing, for one that was never parked."""
    queued_at = _time(headers.get(Header.QUEUED_AT.value))
    if queued_at is None:
        return default
    if default - LONGEST_WAIT <= queued_at <= default + CLOCKS_DIFFER:
        return min(queued_at, default)
    structlog.get_logger().warning("queued_at_impossible", queued_at=queued_at.isoformat(), stored_at=default)
    return default


def _time(text: str | None) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else None


def _carried(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of a job that go with it to the other stream.

    Not those for the server, whose expectations are of one stream only. And not the promise that there is no earlier
    message of this execution: from now on there is one.
    """
    return {
        name: value
        for name, value in headers.items()
        if not name.lower().startswith("nats-")
        and name not in (Header.UNIQUE_ID.value, Header.DUE.value)
        and _SENDABLE.fullmatch(name)
    }
