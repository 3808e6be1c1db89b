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
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Container,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, Generic

import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from pydantic import BaseModel
from pydantic_core import CoreSchema, core_schema
from typing_extensions import TypeVar

from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.bodies import IN_MESSAGE_BYTES, LEFT_FOR, BodyReference, BodyWriter
from breakwater.kernel.nats.contract import DeadLetter
from breakwater.kernel.nats.core import publish_empty
from breakwater.kernel.nats.errors import BusUnavailableError, MessageTooLargeError, NoStreamError, PublishRefusedError
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.publisher import PublishAck, Publisher
from breakwater.kernel.nats.subjects import OURS, PROGRAM, Header, Stream, decode_token, encode_token
from breakwater.kernel.nats.topology import ACK_WAIT_S, DEAD_LETTERS_S
from breakwater.kernel.process import background
from breakwater.kernel.process.outage import Outage
from breakwater.kernel.types import format_time, is_identifier, ms_from_time

ACK_TIMEOUT_S = 5.0

_BODY = Header.BODY.value
_QUEUED_AT = Header.QUEUED_AT.value
_TURN = Header.TURN.value
_UNIQUE_ID = Header.UNIQUE_ID.value
"""Looked for in every message; `value` is a call."""


MessageT_co = TypeVar("MessageT_co", bound=BaseModel, default=BaseModel, covariant=True)


class Delivery(Generic[MessageT_co]):
    """One delivery of one stored message. Its data are the bytes of a `MessageT_co`.

    The handler parses them: an unreadable message is the handler's concern, and must not cost the rest of a batch.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        """The schema by which FastStream validates a handler's argument: any delivery is valid."""
        return core_schema.is_instance_schema(cls)

    def __init__(self, message: Msg) -> None:
        self._message = message
        self.ack_subject: str = message.reply
        self.subject: str = message.subject
        self.data: bytes = message.data
        self.headers: Mapping[str, str] = trusted_headers(message.subject, message.headers or {})
        body = self.headers.get(_BODY)
        self.body: BodyReference | None = None if body is None else BodyReference.parse(body)
        """The reference to a job's body, where `data` is not the job's own; None once a dead letter has the body."""
        self.body_is_lost: bool = False
        """True once the object store proved not to have the body."""
        # `$JS.ACK.<stream>.<consumer>.…`; with a domain, this and a hash of the account come before the stream.
        place = message.reply.split(".")
        self.stream, _, deliveries, sequence, _, stored_ns, waiting = place[2:9] if len(place) == 9 else place[4:11]
        self.sequence: int = int(sequence)
        self.deliveries: int = int(deliveries)
        """1 for the first delivery."""
        self.published_at: datetime = datetime.fromtimestamp(int(stored_ns) / 10**9, UTC)
        self.waiting: int = int(waiting)
        """The number of messages that the consumer still had to deliver when it sent this one."""

    @property
    def was_parked(self) -> bool:
        """True if the job returns to its queue after a long wait."""
        return _QUEUED_AT in self.headers

    @property
    def is_first(self) -> bool:
        """True if this message was never delivered or parked before."""
        return self.deliveries == 1 and not self.was_parked

    @property
    def turn(self) -> str | None:
        """The turn that the job waits for, or has waited for; None if it has not waited for one."""
        return self.headers.get(_TURN)

    @property
    def is_unstarted(self) -> bool:
        """True if no worker has begun the job by this message, or the one from which it was parked."""
        return self.deliveries == 1 and (_QUEUED_AT not in self.headers or _TURN in self.headers)

    @property
    def is_only_message(self) -> bool:
        """True if its job has no other message, so that no worker can have begun the job if this `is_first`."""
        return _UNIQUE_ID in self.headers

    @cached_property
    def queued_at(self) -> datetime:
        """When the job was first accepted: when this message was stored, unless the job was parked."""
        return queued_at(self.headers, self.published_at) if self.was_parked else self.published_at

    @property
    def stored_data(self) -> bytes:
        """The bytes that another message of the same job contains: a large body is not copied."""
        return self.data if self.body is None else self._message.data

    async def ack(self) -> None:
        """Acknowledges without waiting for confirmation: for work that may be done twice."""
        await acknowledge((self,))

    @property
    def client(self) -> Client:
        """The connection on which it came."""
        return self._message._client  # pyright: ignore[reportPrivateUsage]

    async def ack_sync(self) -> bool:
        """Acknowledges and waits for the server's confirmation.

        Returns:
            False if none came: the message will be delivered again, which the handler must be prepared for.
        """
        try:
            await self._message.ack_sync(timeout=ACK_TIMEOUT_S)  # pyright: ignore[reportArgumentType]  # takes floats
        except (TimeoutError, nats.errors.Error):
            return False
        return True

    async def retry_in(self, delay_s: float) -> None:
        """Has the message redelivered after `delay_s` (a nak). Meanwhile, it takes no slot of this process."""
        await self._message.nak(delay=delay_s)

    async def terminate(self) -> None:
        """Ends redelivery of the message, which was not handled."""
        await self._message.term()

    async def in_progress(self) -> None:
        """Reports that the message is still in progress: the server restarts its ack wait."""
        await self._message.in_progress()


async def acknowledge(deliveries: Sequence[Delivery]) -> None:
    """Acknowledges deliveries of one consumer together, each as `Delivery.ack` does."""
    if deliveries:
        await publish_empty(deliveries[-1].client, [delivery.ack_subject for delivery in deliveries])


async def report_in_progress(deliveries: Iterable[Delivery]) -> None:
    """Reports once that messages are in progress. Ignores a lost connection."""
    for delivery in deliveries:
        # A lost report costs at most a redelivery, which handlers expect.
        with suppress(nats.errors.Error):
            await delivery.in_progress()


async def give_back(deliveries: Iterable[Delivery]) -> None:
    """Returns messages that were not handled: the server redelivers them immediately. Ignores a lost connection."""
    for delivery in deliveries:
        # A message whose report is lost is redelivered after its ack wait.
        with suppress(nats.errors.Error):
            await delivery.retry_in(0)


@asynccontextmanager
async def heartbeat(deliveries: Iterable[Delivery], every_s: float = ACK_WAIT_S / 3) -> AsyncGenerator[None]:
    """Keeps messages from being redelivered while the block runs."""
    messages = tuple(deliveries)

    async def beat() -> None:
        while True:
            await asyncio.sleep(every_s)
            await report_in_progress(messages)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        await background.stop(task)


async def held_deliveries(
    lookup: Lookup, stream: Stream, durable: str, reads: Iterable[str]
) -> AsyncGenerator[Delivery]:
    """Yields the deliveries that some process holds. Returning them in its name makes NATS deliver them again.

    Args:
        lookup: reads the stream.
        stream: a work queue, which drops acknowledged messages: what it has up to the last delivered message is held.
        durable: the consumer's name.
        reads: the subjects that it reads.

    Raises:
        BusUnavailableError: NATS does not answer, or has no such consumer.
    """
    consumer = await lookup.progress(stream, durable)
    begin = consumer.acknowledged + 1
    end = consumer.delivered
    for subject in reads if consumer.in_progress else ():
        async with aclosing(lookup.scan(stream, subject, start=begin, up_to=end)) as stored:
            async for message in stored:
                # The server finds an acknowledged message by its sequence in the stream. It checks the sequence of the
                # delivery only against the number of deliveries.
                stored_ns = round(message.stored_at.timestamp() * 10**6) * 1000
                place = f"1.{message.sequence}.{consumer.deliveries}.{stored_ns}.0"
                reply = f"$JS.ACK.{stream}.{durable}.{place}"
                yield Delivery(Msg(lookup.connection(), message.subject, reply, message.data, dict(message.headers)))


async def dead_letter(
    publisher: Publisher,
    delivery: Delivery,
    *,
    reason: str,
    error: str,
    agent: str | None,
    at: datetime,
    execution_id: str | None = None,
    job_id: str | None = None,
    consumer: str | None = None,
    withheld: bool = False,
    private: bool = False,
) -> None:
    """Stores a message on DLQ. A large body stays in the object store, and the dead letter refers to it.

    The dead letter's id is derived from the original, so that a repeated call stores it once.

    `consumer` is for streams with several consumers that may give up for their own reasons: each of them then has its
    own dead letter. `withheld` means that the original must not be shown, and only a replay reads it. `private` means
    that it must not be stored in plain; a large body that is stored in plain is then left out.

    After that, the caller may end the message, even if DLQ refused it: otherwise it would be redelivered for ever.

    Raises:
        BusUnavailableError: it may not be stored; the original must not be acknowledged.
    """
    headers = {name: value for name, value in delivery.headers.items() if name != Header.BODY.value}
    owner = agent or "", execution_id
    until = at + timedelta(seconds=DEAD_LETTERS_S)
    kept_body = delivery.body
    omitted: BodyReference | None = None
    if kept_body is None and len(delivery.data) > IN_MESSAGE_BYTES and reason != "invalid":
        kept_body = await _store_body(publisher, delivery, *owner, until=until, private=private)
    elif kept_body is not None and (delivery.body_is_lost or (private and not kept_body.encrypted)):
        kept_body, omitted = None, kept_body
    elif kept_body is not None:
        await BodyWriter(publisher).keep(kept_body, *owner, until=until)
    if kept_body is not None:
        headers[Header.BODY.value] = str(kept_body)
    dead_letter = DeadLetter(
        reason=reason,
        agent=agent,
        error=error,
        stream=delivery.stream,
        subject=delivery.subject,
        sequence=delivery.sequence,
        headers=headers,
        payload_base64=base64.b64encode(delivery.data).decode() if kept_body is None and omitted is None else "",
        omitted_bytes=None if omitted is None else omitted.size,
        omitted_sha256=None if omitted is None else omitted.sha256,
        withheld=withheld,
        execution_id=execution_id,
        job_id=job_id,
        at=at,
    )
    original = f"dlq/{delivery.stream}/{delivery.sequence}"
    await keep(publisher, dead_letter, id=f"{original}/{consumer}" if consumer else original, private=private)
    if kept_body is not None:
        delivery.body = None


async def _store_body(
    publisher: Publisher, delivery: Delivery, agent: str, execution_id: str | None, *, until: datetime, private: bool
) -> BodyReference | None:
    """Stores the body of a message that is too large for a dead letter. Returns None if that is not possible."""
    if delivery.stream not in _JOBS or (private and not publisher.has_key):
        return None
    try:
        body, encrypted = await publisher.encrypted_body(delivery.data, private=private)
        reference = BodyReference.of(body, encrypted=encrypted, job_bytes=len(delivery.data))
        # The same name for the same bytes when this is repeated, so that nothing is left behind. Encrypted again, they
        # differ, and must not replace those to which the dead letter refers that is stored already.
        stored_at = int(delivery.published_at.timestamp())
        name = f"{delivery.stream}-{delivery.sequence}-{stored_at}-{reference.sha256[:16]}".lower()
        reference = replace(reference, name=name)
        writer = BodyWriter(publisher)
        try:
            await writer.put(reference, body, agent, execution_id, until=until + LEFT_FOR)
        except BusUnavailableError:
            await writer.remove_if_possible(name)
            raise
    except (ValueError, PublishRefusedError) as error:
        structlog.get_logger().warning("dead_letter_without_body", sequence=delivery.sequence, error=str(error))
        return None
    return reference


_JOBS = frozenset({Stream.JOBS.value, Stream.PARKED.value})


MAX_ERROR = 10_000
"""The most characters of a dead letter's error that are kept if the whole dead letter is too large."""

MAX_HEADER = 1_000
"""The longest header that is kept then, in characters."""


async def keep(
    publisher: Publisher,
    dead_letter: DeadLetter,
    *,
    id: str,  # noqa: A002  CloudEvents' own name
    private: bool = False,
) -> None:
    """Stores a dead letter, without the original if DLQ refuses it. Raises BusUnavailableError.

    If DLQ refuses that too, only the log and the metrics report it.
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
    ours = {header.value for header in Header} - {Header.MSG_ID.value}
    shorter = dead_letter.model_copy(
        update={
            "error": dead_letter.error[:MAX_ERROR],
            "headers": {
                name: value for name, value in dead_letter.headers.items() if name in ours and len(value) <= MAX_HEADER
            },
            "payload_base64": "",
        }
    )
    if not original:
        return shorter  # the original is in the object store, or omitted already
    digest = hashlib.sha256(original).hexdigest()
    return shorter.model_copy(update={"omitted_bytes": len(original), "omitted_sha256": digest})


LONGEST_WAIT = timedelta(days=30)
"""The longest plausible time since a job was accepted: an absurd time would keep its record out of ClickHouse."""

RETRY_S = 5.0
"""The wait of a job that is due while its queue refuses it."""

DELAYED_BATCH = 256
DELAYED_TOGETHER = 16
DELAYED_LINGER_S = 0.25
"""The time for which messages gather, and by which a job may wake late. One by one, they cost ten times as much."""

_SHORTEST_S = 0.001

# The header names that nats-py sends; other clients allow more.
_SENDABLE = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


async def park(
    publisher: Publisher,
    delivery: Delivery,
    *,
    agent: str,
    execution_id: str,
    job_id: str,
    due: datetime,
    turn: str | None = None,
) -> None:
    """Stores a job on PARKED until it is due, or its turn comes. The caller then acknowledges the delivery.

    Parking the same message twice until the same time stores one message.

    Args:
        publisher: of a user that may publish to `bw.parked.>`.
        delivery: the job, from JOBS.
        agent: the agent to whose queue it returns.
        execution_id: the job's execution.
        job_id: the job's own id.
        due: when it returns.
        turn: whose turn it waits for instead, from `due` on.

    Raises:
        BusUnavailableError: it may not be stored; try again, and do not acknowledge the delivery.
        PublishRefusedError: PARKED is full, or the job too large (`MessageTooLargeError`): it must wait in JOBS.
    """
    token = encode_token(execution_id)
    headers = _carried_headers(delivery.headers) | {
        # With its sequence in JOBS: another message of the same execution is parked separately.
        Header.MSG_ID.value: f"{token}/parked/{delivery.sequence}/{ms_from_time(due)}",
        Header.DUE.value: format_time(due),
        Header.EXECUTION_ID.value: token,
        Header.QUEUED_AT.value: format_time(delivery.queued_at),
    }
    if turn is None:
        headers.pop(Header.TURN.value, None)
    else:
        headers[Header.TURN.value] = turn
    if Header.EXECUTION_ID.value not in delivery.headers:
        headers[Header.JOB_ID.value] = encode_token(job_id)  # it may come from the message, whose id changes
    try:
        await publisher.job(subjects.parked(agent, execution_id), delivery.stored_data, headers)
    except NoStreamError as error:
        # PARKED always exists: a cluster is electing its new leader.
        raise BusUnavailableError(str(error)) from error


async def park_for_turn(
    publisher: Publisher, agent: str, execution_id: str, payload: bytes, headers: Mapping[str, str], turn: str
) -> PublishAck:
    """Stores a job that was never in its queue on PARKED until its turn comes. Raises as `park` does."""
    now = format_time(datetime.now(UTC))
    unique = (Header.MSG_ID.value, Header.UNIQUE_ID.value)
    parked_headers = {name: value for name, value in headers.items() if name not in unique} | {
        Header.DUE.value: now,
        Header.QUEUED_AT.value: now,
        Header.TURN.value: turn,
    }
    return await publisher.job(subjects.parked(agent, execution_id), payload, parked_headers)


PutBack = Callable[[Delivery], Coroutine[Any, Any, None]]
"""Returns a parked job to its queue."""

AwaitTurn = Callable[[str, str, Delivery, PutBack], Awaitable[None]]
"""Takes a job that waits for its turn: its agent, its execution, its message on PARKED, and what returns it."""


class DelayedQueue:
    """Puts parked jobs back into their queues when they are due."""

    def __init__(
        self,
        publisher: Publisher,
        agents: Container[str],
        await_turn: AwaitTurn,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Takes the publisher of a user that may publish to `bw.jobs.>` and `bw.dlq.>`, and the configured agents.

        `await_turn` takes the jobs that wait for their turn.
        """
        self._publisher = publisher
        self._agents = agents
        self._await_turn = await_turn
        self._now = now
        self._outages: dict[str, Outage] = {}

    async def handle_all(self, deliveries: Sequence[Delivery]) -> None:
        """Handles deliveries of parked jobs, each independently."""
        for first in range(0, len(deliveries), DELAYED_TOGETHER):
            await asyncio.gather(*map(self.handle, deliveries[first : first + DELAYED_TOGETHER]))
            await asyncio.sleep(0)  # a flood of parked jobs must not hold up those that run

    async def handle(self, delivery: Delivery) -> None:
        """Returns one parked job to its queue if it is due; otherwise lets it wait on."""
        now = self._now()
        due = due_at(delivery.headers) or now
        if due > now:
            await delivery.retry_in(max((due - now).total_seconds(), _SHORTEST_S))
            return
        agent, execution_id = subjects.parts_of_parked(delivery.subject)
        if delivery.turn is not None and agent in self._agents:
            await self._await_turn(agent, execution_id, delivery, self._put_back)
        else:
            await self._put_back(delivery)

    async def _put_back(self, delivery: Delivery) -> None:
        agent, execution_id = subjects.parts_of_parked(delivery.subject)
        outage = self._outages.setdefault(agent, Outage(subjects.job(agent)))
        try:
            await self._wake(delivery, agent, execution_id, due_at(delivery.headers) or self._now())
        except (BusUnavailableError, PublishRefusedError) as error:
            outage.note_failure(error)
            if delivery.turn is None:
                await delivery.retry_in(RETRY_S)
            else:
                await self._publisher.give_back(delivery.ack_subject, RETRY_S)
            return
        outage.note_success()
        if delivery.turn is not None:
            # It was returned to PARKED when it began to wait, after which nats-py neither acknowledges nor returns it.
            await self._publisher.acknowledge(delivery.ack_subject)
            return
        # Without confirmation, it is redelivered and returned again: a second message of the same execution.
        await delivery.ack_sync()

    async def _wake(self, delivery: Delivery, agent: str, execution_id: str, due: datetime) -> None:
        headers = _requeue_headers(delivery.headers, execution_id, delivery.sequence, due)
        try:
            await self._publisher.job(subjects.job(agent), delivery.stored_data, headers)
        except (NoStreamError, MessageTooLargeError) as error:
            is_removed = isinstance(error, NoStreamError)
            # A cluster that is electing the leader of JOBS responds the same; the config distinguishes the two.
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
                job_id=name_in(delivery.headers, Header.JOB_ID),
                # Whether its agent kept texts is no longer known: encrypt them if possible. `request` has done that
                # for a large body.
                private=self._publisher.has_key and delivery.body is None,
            )


async def wake_early(
    publisher: Publisher, lookup: Lookup, execution_id: str, agents: Collection[str] = (), owner: str | None = None
) -> int | None:
    """Returns a parked job to its queue before it is due.

    Its message stays on PARKED. When that is due, the job is already decided. One that waits for its turn does not need
    it any more to be claimed, so that a worker sees that it is cancelled.

    Args:
        publisher: to its queue.
        lookup: of PARKED.
        execution_id: the job.
        agents: only wake a job of these agents; empty for any.
        owner: only wake a job of this owner; None for any.

    Returns:
        The sequence of its message on PARKED; None if the job is not parked, or these conditions do not hold.

    Raises:
        BusUnavailableError: NATS does not answer.
        PublishRefusedError: its queue refuses it; it will wake when it is due.
    """
    parked = await lookup.last(Stream.PARKED, subjects.parked_anywhere(execution_id))
    if parked is None:
        return None
    due = due_at(parked.headers) or parked.stored_at
    agent, _ = subjects.parts_of_parked(parked.subject)
    if agents and agent not in agents:
        return None
    if owner is not None and parked.headers.get(Header.OWNER.value) != encode_token(owner):
        return None
    headers = _requeue_headers(parked.headers, execution_id, parked.sequence, due)
    headers.pop(Header.TURN.value, None)
    await publisher.job(subjects.job(agent), parked.data, headers)
    return parked.sequence


def _requeue_headers(headers: Mapping[str, str], execution_id: str, sequence: int, due: datetime) -> dict[str, str]:
    """The headers with which a job that was parked at `sequence` until `due` returns to its queue."""
    token = encode_token(execution_id)
    return _carried_headers(headers) | {
        Header.MSG_ID.value: f"{token}/woken/{sequence}/{ms_from_time(due)}",
        Header.EXECUTION_ID.value: token,
    }


def trusted_headers(subject: str, headers: Mapping[str, str]) -> Mapping[str, str]:
    """Returns the headers of a message that can be trusted.

    From a program's job, it removes the headers that only the plane may set. It sets the owner and the scope of the ids
    if the program has its own NATS user.
    """
    user = subjects.user_of_job(subject) if subject.startswith("bw.jobs.") else None
    if user is None:
        return headers
    trusted = {name: value for name, value in headers.items() if not name.lower().startswith(OURS)}
    if user.startswith(PROGRAM):
        token = encode_token(user)
        trusted |= {Header.OWNER.value: token, Header.SUBMITTED_BY.value: token, Header.SCOPE.value: token}
    return trusted


def name_in(headers: Mapping[str, str], header: Header) -> str | None:
    """Returns the id or the name that a header holds as a token; None if it is missing or invalid."""
    token = headers.get(header)
    if token is None:
        return None
    try:
        name = decode_token(token)
    except UnicodeDecodeError:
        return None
    return name if is_identifier(name) else None


CLOCKS_DIFFER = timedelta(minutes=1)
"""The time by which the clock of a stream's next leader may be behind that of the leader that stored the job first."""


def queued_at(headers: Mapping[str, str], default: datetime) -> datetime:
    """When a job was first accepted. `default` is when its message was stored, for a job that was never parked."""
    queued_at = _time(headers.get(Header.QUEUED_AT.value))
    if queued_at is None:
        return default
    if default - LONGEST_WAIT <= queued_at <= default + CLOCKS_DIFFER:
        return min(queued_at, default)
    structlog.get_logger().warning("queued_at_impossible", queued_at=queued_at.isoformat(), stored_at=default)
    return default


def due_at(headers: Mapping[str, str]) -> datetime | None:
    """When a parked job returns to its queue; None if that can't be read."""
    return _time(headers.get(Header.DUE.value))


def _time(text: str | None) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else None


def _carried_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers that a job takes along to the other stream.

    Headers for the server stay behind, as they apply to one stream only. So does the promise that no earlier message of
    this execution exists: from now on, one does.
    """
    return {
        name: value
        for name, value in headers.items()
        if not name.lower().startswith("nats-")
        and name not in (Header.UNIQUE_ID.value, Header.DUE.value)
        and _SENDABLE.fullmatch(name)
    }
