"""Stores jobs on JOBS, and limits each agent to its share of the bytes.

NATS limits only the bytes of the whole stream. The bytes of one agent are estimated from a few of its jobs, and only
while JOBS contains more than half of one agent's share.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress

import orjson
import structlog

from breakwater.jobs.api.submission import Submission
from breakwater.jobs.api.waiting_callers import WaitingCallers
from breakwater.jobs.rules.previews import prompt_in
from breakwater.jobs.store.accepted import AcceptedJobs
from breakwater.kernel.http.problems import unavailable
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.bodies import IN_MESSAGE_BYTES, BodyReader, BodyReference, BodyWriter
from breakwater.kernel.nats.delivery import park_for_turn
from breakwater.kernel.nats.errors import BusError, BusUnavailableError, PublishRefusedError, StreamFullError
from breakwater.kernel.nats.lookup import Facts, Lookup
from breakwater.kernel.nats.publisher import PUBLISH_TIMEOUT_S, PublishAck, Publisher
from breakwater.kernel.nats.subjects import Header, Stream
from breakwater.kernel.nats.topology import PARKED_MAX_BYTES
from breakwater.kernel.process import background
from breakwater.kernel.process.outage import Outage

ACCEPT_TIMEOUT_S = 8.0
"""Time limit for the acknowledgement of a job, including a second try."""

MAX_REMEMBERED = 10_000
"""The most jobs with ids of their senders whose place in JOBS this process remembers."""

CHECK_EVERY_S = 2.0
IDLE_FACTOR = 5
"""Factor by which checks are rarer while JOBS seems empty."""

SAMPLES = 8
OUTLINE_CHARACTERS = 20_000
"""The characters of a large job's prompt in its message: lists show fewer, but redaction looks beyond these."""

MAX_MESSAGE_BYTES = 8 * 1024**2
"""The size limit of a message. An agent with few jobs is within its share, whatever their sizes."""


class JobQueue:
    """Stores jobs on JOBS. A job is accepted once JetStream has acknowledged it."""

    def __init__(
        self, publisher: Publisher, quota: QueueQuota, accepted: AcceptedJobs, waiting: WaitingCallers
    ) -> None:
        self._publisher = publisher
        self._waiting = waiting
        self._bodies = BodyWriter(publisher)
        self._quota = quota
        self._accepted = accepted
        self._outage = Outage("accepting jobs")
        self._stored: dict[str, tuple[str, int]] = {}
        """By execution id, the subject and sequence in JOBS; 0 for a job that went straight to PARKED."""
        self._under_way: dict[str, tuple[asyncio.Lock, int]] = {}
        """By execution id, the lock of the requests that are accepting it, and their number."""

    async def put(self, sent: Submission, traceparent: str | None) -> bool:
        """Publishes a job, unless it is queued already.

        JOBS accepts the same job again from another process, and the worker then runs it once.

        Args:
            sent: the job.
            traceparent: its W3C trace context; None without a trace.

        Returns:
            True if a job with this id was stored before, and is still in its queue or waits for its turn.

        Raises:
            RequestError: 503, the job was not accepted.
        """
        if sent.id_generated:
            await self._store(sent, traceparent)
            return False
        async with self._one_at_a_time(sent.execution_id):
            if await self._waits(sent):
                return True
            stored = await self._store(sent, traceparent)
            sequence = stored.sequence if stored.stream == Stream.JOBS else 0
            self._stored[sent.execution_id] = subjects.job(sent.job.agent), sequence
            if len(self._stored) > MAX_REMEMBERED:
                del self._stored[next(iter(self._stored))]
            return False

    def mark(self, sent: Submission) -> None:
        """Records that a job was accepted. Never waits and never fails."""
        job = sent.job
        self._accepted.mark(
            sent.execution_id,
            job.agent,
            job_id=sent.job_id,
            at=sent.received_at,
            tenant=job.tenant,
            owner=sent.owner,
            digest=None if sent.id_generated else sent.digest,
        )

    async def _waits(self, sent: Submission) -> bool:
        """Returns True if a job that was sent before is queued, and False if that is unknown."""
        execution_id = sent.execution_id
        subject, sequence = self._stored.get(execution_id, ("", 0))
        if not subject and sent.earlier is None:
            return False
        lookup = self._quota.lookup.as_stored()
        with suppress(BusError):
            if sequence:
                message = await lookup.next(Stream.JOBS, subject, sequence)
                message_id = "" if message is None else message.headers.get(Header.MSG_ID.value, "")
                if message_id.rpartition("/")[2] == subjects.encode_token(execution_id):
                    return True
            parked = await lookup.last(Stream.PARKED, subjects.parked(sent.job.agent, execution_id))
            return parked is not None and Header.TURN.value in parked.headers
        return False

    @asynccontextmanager
    async def _one_at_a_time(self, execution_id: str) -> AsyncGenerator[None]:
        """Serializes requests for one execution, so that each sees what the one before has stored."""
        lock, users = self._under_way.get(execution_id, (asyncio.Lock(), 0))
        self._under_way[execution_id] = lock, users + 1
        try:
            async with lock:
                yield
        finally:
            _, users = self._under_way.pop(execution_id)
            if users > 1:
                self._under_way[execution_id] = lock, users - 1

    async def _store(self, sent: Submission, traceparent: str | None) -> PublishAck:
        if not self._quota.has_room(sent.job.agent, len(sent.payload)):
            reason = f"the jobs of agent {sent.job.agent!r} that wait take its whole share of the queue"
            raise unavailable("refused", f"the job was not accepted: {reason}; send it again when some are done")
        headers = {
            Header.MSG_ID.value: subjects.message_id(sent.job.agent, sent.execution_id),
            Header.EXECUTION_ID.value: subjects.encode_token(sent.execution_id),
        }
        if sent.job_id not in (sent.execution_id, sent.job.job_id):
            headers[Header.JOB_ID.value] = subjects.encode_token(sent.job_id)
        if sent.scope is not None:
            headers[Header.SCOPE.value] = sent.scope
        if traceparent is not None:
            headers[Header.TRACEPARENT.value] = traceparent
        if sent.id_generated:
            headers[Header.UNIQUE_ID.value] = "1"
        if sent.owner is not None:
            headers[Header.OWNER.value] = subjects.encode_token(sent.owner)
        if sent.submitted_by is not None:
            headers[Header.SUBMITTED_BY.value] = subjects.encode_token(sent.submitted_by)
        if sent.attribution.user is not None:
            headers[Header.USER.value] = subjects.encode_token(sent.attribution.user)
        if sent.attribution.team is not None:
            headers[Header.TEAM.value] = subjects.encode_token(sent.attribution.team)
        if sent.tags:
            headers[Header.TAGS.value] = subjects.encode_token(orjson.dumps(sent.tags).decode())
        if (kind := sent.turn[2:]) != ("normal", 1):
            headers[Header.PRIORITY.value] = "{} {}".format(*kind)
        if sent.residency is not None:
            headers[Header.RESIDENCY.value] = sent.residency
        if sent.by_operator and sent.job.dry_run:
            headers[Header.OPERATOR.value] = "1"
        payload = sent.payload
        body: BodyReference | None = None
        try:
            if len(payload) > IN_MESSAGE_BYTES:
                body = await self._store_body(sent)
                headers[Header.BODY.value] = str(body)
                # The worker must know both ids even if it can't read the body.
                headers[Header.JOB_ID.value] = subjects.encode_token(sent.job_id)
                payload = _outline(sent)
            stored = await self._publish(sent, payload, headers)
        except BusUnavailableError as error:
            # The job may be stored nevertheless, so its body stays; the workers remove it if no job has it.
            self._outage.note_failure(error)
            raise unavailable("unavailable", f"the job was not accepted: {error}") from error
        except PublishRefusedError as error:
            if body is not None:
                await self._bodies.remove_if_possible(body.name)
            raise unavailable("refused", f"the job was not accepted: {error}") from error
        self._outage.note_success()
        self._quota.add(sent.job.agent, len(sent.payload))
        return stored

    async def _store_body(self, sent: Submission) -> BodyReference:
        """Stores a large body, encrypted as jobs are. Raises BusUnavailableError, PublishRefusedError."""
        stored, encrypted = await self._publisher.encrypted_body(sent.payload, private=sent.private)
        reference = BodyReference.of(stored, encrypted=encrypted, job_bytes=len(sent.payload))
        try:
            await self._bodies.put(reference, stored, sent.job.agent, sent.execution_id)
        except BusError as error:
            await self._bodies.remove_if_possible(reference.name)
            if isinstance(error, StreamFullError):
                reason = (
                    "the store for large bodies is full (limits.bodies_max_bytes); send it again when some are done"
                )
                raise StreamFullError(reason) from error
            raise
        return reference

    async def _publish(self, sent: Submission, payload: bytes, headers: dict[str, str]) -> PublishAck:
        """Publishes a job to its agent's queue, or to where its caller's jobs wait for their turn already."""
        agent = sent.job.agent
        if self._waiting.has(agent, sent.turn) and self._quota.may_park:
            with suppress(PublishRefusedError):  # it is full
                return await park_for_turn(self._publisher, agent, sent.execution_id, payload, headers, sent.turn.text)
        await self._waiting.announce(agent, sent.turn)
        return await self._publish_twice(subjects.job(agent), payload, headers)

    async def _publish_twice(self, subject: str, payload: bytes, headers: dict[str, str]) -> PublishAck:
        begun = time.monotonic()
        try:
            return await self._publisher.job(subject, payload, headers, timeout_s=PUBLISH_TIMEOUT_S)
        except BusUnavailableError:
            # If only the acknowledgement was lost, the first message is stored, so the second must not claim that its
            # id is unique.
            second_headers = {name: value for name, value in headers.items() if name != Header.UNIQUE_ID.value}
            left_s = begun + ACCEPT_TIMEOUT_S - time.monotonic()
            return await self._publisher.job(subject, payload, second_headers, timeout_s=max(left_s, 0.1))


def _outline(sent: Submission) -> bytes:
    """Returns the payload of a job's message whose body is in the object store: what lists show of the job."""
    job = sent.job
    outline: dict[str, object] = {
        "body_is_stored": True,  # no field of a job, so that nobody runs the outline in place of the job
        "agent": job.agent,
        "job_id": job.job_id,
        "tenant": job.tenant,
        "model": job.model,
        "reply_to": job.reply_to,
    }
    if not sent.private and (prompt := prompt_in(job.model_dump(mode="json", exclude_unset=True))) is not None:
        outline["prompt"] = prompt[:OUTLINE_CHARACTERS]
    return orjson.dumps({name: value for name, value in outline.items() if value is not None})


class QueueQuota:
    """The bytes of each agent in JOBS, as of the last check, plus the jobs that this process has added since."""

    def __init__(self, share: int | None, lookup: Lookup) -> None:
        """Sets the most bytes that one agent may have; None means a quarter of the limit of JOBS."""
        self.set_share(share)
        self.lookup = lookup
        self._sizes: Mapping[str, float] = {}
        self._added: Counter[str] = Counter()
        self._over: set[str] = set()
        self.may_park = True
        """False while PARKED is half full: it must have room for the jobs of all that wait for other reasons."""
        self._outage = Outage("the queue's shares")

    def set_share(self, share: int | None) -> None:
        """Uses another share; None takes effect at the next check."""
        self._configured = share
        self._share = float("inf") if share is None else share

    def has_room(self, agent: str, size: int) -> bool:
        """Returns True if a job of `size` bytes is within its agent's share."""
        return self._sizes.get(agent, 0.0) + self._added[agent] + size <= self._share

    def add(self, agent: str, size: int) -> None:
        """Counts a job that JOBS has stored."""
        self._added[agent] += size

    async def run(self) -> None:
        """Checks regularly until cancelled, more rarely while JOBS seems empty."""
        checks = 0
        while True:
            await asyncio.sleep(background.aligned_delay(CHECK_EVERY_S))
            checks += 1
            # The rarer checks find the jobs that programs publish on NATS.
            if self._added or self._sizes or checks % IDLE_FACTOR == 0:
                await self._outage.run_logged(self.check, expected=BusError)
                self._report()

    async def check(self) -> None:
        """Estimates the bytes of each agent. Raises BusError."""
        # A job that is added meanwhile may count twice until the next check, but none is missed.
        counted = self._added.copy()
        self._sizes = await self._estimate_sizes()
        self.may_park = (await self.lookup.facts(Stream.PARKED)).bytes < PARKED_MAX_BYTES / 2
        self._added -= counted

    def _report(self) -> None:
        """Logs which agents are over their share now, or within it again: only HTTP refuses their jobs."""
        over = {agent for agent, size in self._sizes.items() if size > self._share}
        for agent in over - self._over:
            effect = "refused over HTTP; programs on NATS can go on until JOBS is full"
            size = round(self._sizes[agent])
            structlog.get_logger().warning(
                "queue_share_exceeded", agent=agent, bytes=size, share=self._share, effect=effect
            )
        for agent in self._over - over:
            structlog.get_logger().info("queue_share_kept_again", agent=agent)
        self._over = over

    async def _estimate_sizes(self) -> dict[str, float]:
        """Returns the estimated bytes by agent; none while all jobs have at most half of one agent's share."""
        facts = await self.lookup.facts(Stream.JOBS)
        if self._configured is None and facts.max_bytes > 0:
            self._share = facts.max_bytes / 4
        bodies = await self.lookup.facts(Stream.BODIES)
        if facts.bytes + bodies.bytes <= self._share / 2:
            return {}
        counts = await self.lookup.counts(Stream.JOBS, "bw.jobs.>")
        mean = facts.bytes / max(sum(counts.values()), 1)
        estimates = {
            subject: count
            * (mean if count * MAX_MESSAGE_BYTES <= self._share else await self._mean_size(subject, facts, mean))
            for subject, count in counts.items()
        }
        # The total is known exactly, so the estimate of an agent that has nearly all of it becomes exact, too.
        scale = facts.bytes / max(sum(estimates.values()), 1)
        sizes: dict[str, float] = {}
        for subject, estimate in estimates.items():
            agent = subjects.agent_of_job(subject)
            sizes[agent] = sizes.get(agent, 0.0) + estimate * scale
        for body in await BodyReader(self.lookup).all() if bodies.bytes else ():
            if body.kept_until is None:  # else its job has ended
                sizes[body.agent] = sizes.get(body.agent, 0.0) + body.size
        return sizes

    async def _mean_size(self, subject: str, facts: Facts, default: float) -> float:
        step = max((facts.last - facts.first) // SAMPLES, 1)
        places = range(facts.first, facts.last + 1, step)
        samples = await asyncio.gather(*(self.lookup.next(Stream.JOBS, subject, place) for place in places))
        sizes = [len(sample.data) for sample in samples if sample is not None]
        return sum(sizes) / len(sizes) if sizes else default
