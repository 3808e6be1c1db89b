"""Long waits, on a real server: a job sleeps on PARKED and comes back to its queue when it is due."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from unittest.mock import AsyncMock

import pytest
import pytest_asyncio
from nats.aio.client import Client
from structlog.testing import capture_logs

from breakwater.jobs.contract.job import Job
from breakwater.kernel.nats import delivery, subjects
from breakwater.kernel.nats.broker import Batches, Each, ServiceApp, connection_of, make_broker
from breakwater.kernel.nats.delivery import (
    DELAYED_BATCH,
    DELAYED_LINGER_S,
    DelayedQueue,
    Delivery,
    PutBack,
    name_in,
    park,
    queued_at,
    wake_early,
)
from breakwater.kernel.nats.errors import BusUnavailableError, PublishRefusedError
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import Header, Stream
from breakwater.kernel.nats.topology import ACK_WAIT_S, PARKED_CONSUMER, Plan, worker_consumer
from breakwater.kernel.types import format_time
from breakwater.records.channels import JOBS, PARKED
from tests.helpers import nats_client, until
from tests.servers import RunningServer

SLOW, OTHER = "slow agent", "other"
PLAN = Plan(agents={SLOW: 1, OTHER: 1})
EXECUTION = "an odd id/ünd.so"


def now() -> datetime:
    return datetime.now(UTC)


@pytest.fixture
async def url(own_nats_server: RunningServer) -> str:
    await provision(own_nats_server.url, PLAN)
    return own_nats_server.url


async def no_turn(*_: object) -> None:
    """Takes jobs that wait for a turn; here, none does."""
    raise AssertionError("no job waits for a turn")


@pytest_asyncio.fixture
async def client(url: str) -> AsyncGenerator[Client]:
    async with nats_client(url) as client:
        yield client


@pytest_asyncio.fixture
async def publisher(client: Client) -> Publisher:
    return Publisher(lambda: client, "worker")


@asynccontextmanager
async def worker(url: str, handle: Callable[[Delivery], Awaitable[None]]) -> AsyncGenerator[list[Delivery]]:
    """A process that handles the slow agent's jobs, and wakes parked ones; yields those it has looked at."""
    looked_at: list[Delivery] = []
    broker = make_broker(url, "worker", graceful_timeout_s=1)
    waker = DelayedQueue(Publisher(connection_of(broker), "worker"), PLAN.agents, no_turn)

    @broker.subscriber(PARKED, durable=PARKED_CONSUMER, pull_sub=Batches(DELAYED_BATCH, DELAYED_LINGER_S))
    async def wake(deliveries: list[Delivery[Job]]) -> None:
        await waker.handle_all(deliveries)
        looked_at.extend(deliveries)

    @broker.subscriber(JOBS, durable=worker_consumer(SLOW), pull_sub=Each(lambda: PLAN.agents[SLOW]))
    async def run(delivery: Delivery[Job]) -> None:
        await handle(delivery)

    app = ServiceApp(broker)
    await app.start()
    try:
        yield looked_at
    finally:
        await app.end_subscribers()
        await app.stop()


async def next_of(client: Client, stream: Stream, durable: str, timeout_s: float = 10) -> Delivery:
    subscription = await client.jetstream().pull_subscribe_bind(durable, stream.value)
    [message] = await subscription.fetch(1, timeout=timeout_s)
    await subscription.unsubscribe()
    return Delivery(message)


async def taken(client: Client, agent: str = SLOW) -> Delivery:
    return await next_of(client, Stream.JOBS, worker_consumer(agent))


async def parked(client: Client) -> Delivery:
    return await next_of(client, Stream.PARKED, PARKED_CONSUMER)


async def submitted(client: Client, body: bytes = b"job", headers: dict[str, str] | None = None) -> Delivery:
    """A job that a worker has just taken."""
    await client.jetstream().publish(subjects.job(SLOW), body, headers=headers)
    return await taken(client)


async def count(client: Client, stream: Stream) -> int:
    return (await client.jetstream().stream_info(stream.value)).state.messages


async def test_a_parked_job_comes_back_when_it_is_due_and_as_it_was(url: str, client: Client) -> None:
    came: asyncio.Queue[tuple[datetime, Delivery]] = asyncio.Queue()
    publisher = Publisher(lambda: client, "worker")
    original = await submitted(client, b"\x00bytes", {"traceparent": "00-a-b-01", "own": "wörth keeping"})
    due = now() + timedelta(seconds=1.2)
    await park(publisher, original, agent=SLOW, execution_id=EXECUTION, job_id="j", due=due)
    assert await original.ack_sync()

    async def handle(job: Delivery) -> None:
        assert await job.ack_sync()
        came.put_nowait((now(), job))

    async with worker(url, handle), asyncio.timeout(60):
        at, job = await came.get()
        await until(lambda: empty(client))
    # Long before its ack wait is over, which would bring it back as well.
    assert timedelta(0) <= at - due.replace(microsecond=due.microsecond // 1000 * 1000) < timedelta(seconds=ACK_WAIT_S)
    assert job.data == b"\x00bytes"
    assert name_in(job.headers, Header.EXECUTION_ID) == EXECUTION
    reported = queued_at(job.headers, job.published_at)
    assert abs(reported - original.published_at) < timedelta(milliseconds=1)
    assert {"traceparent": "00-a-b-01", "own": "wörth keeping"}.items() <= dict(job.headers).items()
    assert Header.DUE.value not in job.headers


async def empty(client: Client) -> bool:
    return await count(client, Stream.JOBS) == await count(client, Stream.PARKED) == 0


async def test_jobs_that_sleep_take_no_place_in_their_agents_queue(url: str, client: Client) -> None:
    """The agent may work on one job at a time; with a delayed nak, the first of these would block all others."""
    done: list[bytes] = []
    publisher = Publisher(lambda: client, "worker")

    async def handle(job: Delivery) -> None:
        if job.data.startswith(b"sleeper"):
            due = now() + timedelta(hours=1)
            await park(publisher, job, agent=SLOW, execution_id=job.data.decode(), job_id="j", due=due)
        else:
            done.append(job.data)
        assert await job.ack_sync()

    async def all_parked() -> bool:
        return await count(client, Stream.PARKED) == 200

    async with worker(url, handle) as looked_at:

        async def all_looked_at() -> bool:
            return len(looked_at) == 200

        for number in range(200):
            await client.jetstream().publish(subjects.job(SLOW), b"sleeper %d" % number)
        await until(all_parked)
        await until(all_looked_at)
        await client.jetstream().publish(subjects.job(SLOW), b"awake")

        async def awake_done() -> bool:
            return done == [b"awake"]

        await until(awake_done)
    assert await count(client, Stream.JOBS) == 0


@pytest.mark.parametrize("crash", [True, False], ids=["a crash", "a restart"])
async def test_neither_a_crash_nor_a_restart_of_nats_loses_a_parked_job_or_wakes_it_early(
    url: str, client: Client, own_nats_server: RunningServer, crash: bool
) -> None:
    came: list[tuple[bytes, datetime]] = []
    publisher = Publisher(lambda: client, "worker")
    dues = {b"soon": now() + timedelta(seconds=1.5), b"later": now() + timedelta(seconds=2.5)}
    for name, due in dues.items():
        job = await submitted(client, name)
        await park(publisher, job, agent=SLOW, execution_id=name.decode(), job_id="j", due=due)
        assert await job.ack_sync()

    async def handle(job: Delivery) -> None:
        came.append((job.data, now()))
        assert await job.ack_sync()

    async def all_back() -> bool:
        return len(came) == 2

    if crash:
        own_nats_server.kill()
    else:
        # A server that crashes may forget how long a job is to sleep that was given back just before. It is then looked
        # at again when its ack wait is over, which is too long to wait for here.
        async with worker(url, handle) as looked_at:

            async def both_looked_at() -> bool:
                return len(looked_at) == 2

            await until(both_looked_at)
    await own_nats_server.restart_async()
    async with worker(url, handle):
        await until(all_back)
        await until(lambda: empty(client))
    assert [name for name, _ in came] == [b"soon", b"later"]
    for name, at in came:
        assert at - dues[name] >= timedelta(milliseconds=-1)


async def test_parking_twice_for_the_same_time_is_one_message(client: Client, publisher: Publisher) -> None:
    job = await submitted(client)
    due = now() + timedelta(hours=1)
    for _ in range(2):
        await park(publisher, job, agent=SLOW, execution_id="e", job_id="j", due=due)
    assert await count(client, Stream.PARKED) == 1
    await park(publisher, job, agent=SLOW, execution_id="e", job_id="j", due=due + timedelta(seconds=1))
    assert await count(client, Stream.PARKED) == 2


async def test_who_may_not_wake_jobs_of_the_agent_wakes_none(client: Client, publisher: Publisher) -> None:
    job, lookup = await submitted(client), Lookup(lambda: client)
    await park(publisher, job, agent=SLOW, execution_id="e", job_id="j", due=now() + timedelta(hours=1))
    await job.ack_sync()
    assert not await wake_early(publisher, lookup, "e", ["another"])
    assert await count(client, Stream.JOBS) == 0
    assert await wake_early(publisher, lookup, "e", ["another", SLOW])
    assert await count(client, Stream.JOBS) == 1


async def test_a_crash_between_waking_and_acknowledging_wakes_the_same_execution_again(
    client: Client, publisher: Publisher
) -> None:
    job = await submitted(client)
    await park(publisher, job, agent=SLOW, execution_id="e", job_id="j", due=now())
    await job.ack_sync()
    waker = DelayedQueue(publisher, PLAN.agents, no_turn)

    class Unacknowledged(Delivery):
        async def ack_sync(self) -> bool:
            await self.retry_in(0)
            return False

    sleeper = await parked(client)
    await waker.handle(Unacknowledged(sleeper._message))  # pyright: ignore[reportPrivateUsage]  # stands for a crash
    again = await parked(client)
    assert again.deliveries == 2
    await waker.handle(again)
    assert await count(client, Stream.PARKED) == 0
    for _ in range(2):
        woken = await taken(client)
        assert woken.headers[Header.EXECUTION_ID.value] == "e"
        await woken.ack_sync()


async def test_a_job_of_a_program_stays_its_own_when_it_has_slept_and_what_it_says_itself_is_not_believed(
    client: Client, publisher: Publisher
) -> None:
    forged = {
        "Breakwater-Owner": "acme",
        "Breakwater-Submitted-By": "acme",
        "Breakwater-Scope": "key:acme",
        "Breakwater-Job-Id": "anothers",
        "Breakwater-Unique-Id": "1",
        "Breakwater-Execution-Id": "of-another",
        "breakwater-owner": "acme",
        "Breakwater-Due": "2001-01-01T00:00:00.000Z",
        "Breakwater-Queued-At": "2001-01-01T00:00:00.000Z",
        "traceparent": "kept",
    }
    for user, owner in (("program-billing", "program-billing"), ("client", None)):
        await client.jetstream().publish(subjects.job_by(SLOW, user), b"job", headers=forged)
        job = await taken(client)
        names = ("Breakwater-Owner", "Breakwater-Submitted-By", "Breakwater-Scope")
        whose = {} if owner is None else dict.fromkeys(names, owner)
        assert job.headers == {"traceparent": "kept", **whose}
        assert (job.is_first, job.queued_at) == (True, job.published_at)
        await park(publisher, job, agent=SLOW, execution_id=f"of-{user}", job_id="j", due=now())
        await job.ack_sync()
        await DelayedQueue(publisher, PLAN.agents, no_turn).handle(await parked(client))
        woken = await taken(client)
        await woken.ack_sync()
        assert woken.subject == subjects.job(SLOW)
        assert woken.queued_at.timestamp() == pytest.approx(job.published_at.timestamp(), abs=0.002)
        assert {name: woken.headers.get(name) for name in names} == dict.fromkeys(names, owner)
        assert name_in(woken.headers, Header.JOB_ID) == "j"


async def test_a_crash_before_the_original_is_acknowledged_leaves_a_second_message_of_the_same_execution(
    client: Client, publisher: Publisher
) -> None:
    job = await submitted(client)
    await park(publisher, job, agent=SLOW, execution_id="e", job_id="j", due=now())
    await job.retry_in(0)
    await DelayedQueue(publisher, PLAN.agents, no_turn).handle(await parked(client))
    assert await count(client, Stream.JOBS) == 2
    first = await taken(client)
    await first.ack_sync()
    second = await taken(client)
    assert [name_in(one.headers, Header.EXECUTION_ID) for one in (first, second)] == [None, "e"]


async def test_the_promise_of_an_unused_id_is_not_kept_by_a_job_that_was_parked(
    client: Client, publisher: Publisher
) -> None:
    job = await submitted(client, headers={Header.UNIQUE_ID.value: "1", Header.MSG_ID.value: "slow/e"})
    await park(publisher, job, agent=SLOW, execution_id="e", job_id="j", due=now())
    await job.ack_sync()
    await DelayedQueue(publisher, PLAN.agents, no_turn).handle(await parked(client))
    woken = await taken(client)
    assert Header.UNIQUE_ID.value not in woken.headers
    assert woken.headers[Header.MSG_ID.value].startswith("e/woken/")


async def test_a_probe_that_was_parked_is_still_a_probe(client: Client, publisher: Publisher) -> None:
    for early in (False, True):
        job = await submitted(client, headers={Header.PROBE.value: "1", Header.EXECUTION_ID.value: f"e{early}"})
        await park(publisher, job, agent=SLOW, execution_id=f"e{early}", job_id="j", due=now())
        await job.ack_sync()
        if early:
            assert await wake_early(publisher, Lookup(lambda: client), f"e{early}") is not None
        else:
            await DelayedQueue(publisher, PLAN.agents, no_turn).handle(await parked(client))
        woken = await taken(client)
        await woken.ack_sync()
        assert woken.headers[Header.PROBE.value] == "1"


async def test_what_was_expected_of_the_queue_is_not_expected_of_the_other_stream(
    client: Client, publisher: Publisher
) -> None:
    await client.jetstream().publish(subjects.job(SLOW), b"job", stream="JOBS")
    job = await taken(client)
    assert job.headers["Nats-Expected-Stream"] == "JOBS"
    await park(publisher, job, agent=SLOW, execution_id="e", job_id="j", due=now())
    await job.ack_sync()
    await DelayedQueue(publisher, PLAN.agents, no_turn).handle(await parked(client))
    assert (await taken(client)).data == b"job"


async def test_a_job_that_is_parked_again_keeps_when_it_was_accepted(client: Client, publisher: Publisher) -> None:
    job = await submitted(client)
    accepted = format_time(job.published_at)
    for _ in range(2):
        await park(publisher, job, agent=SLOW, execution_id="e", job_id="j", due=now())
        await job.ack_sync()
        await DelayedQueue(publisher, PLAN.agents, no_turn).handle(await parked(client))
        job = await taken(client)
        assert job.headers[Header.QUEUED_AT.value] == accepted


async def test_a_full_queue_keeps_the_job_parked_until_there_is_room_and_says_so_once(
    client: Client, publisher: Publisher
) -> None:
    jetstream = client.jetstream()
    job = await submitted(client)
    await park(publisher, job, agent=SLOW, execution_id="e", job_id="j", due=now())
    await job.ack_sync()
    config = (await jetstream.stream_info("JOBS")).config
    await jetstream.update_stream(config.evolve(max_msgs=1))
    await jetstream.publish(subjects.job(OTHER), b"fills it")
    waker, sleeper = DelayedQueue(publisher, PLAN.agents, no_turn), await parked(client)
    given_back: list[float] = []

    class Watched(Delivery):
        async def retry_in(self, delay_s: float) -> None:
            given_back.append(delay_s)
            await super().retry_in(0)

    with capture_logs() as logs:
        for _ in range(3):
            await waker.handle(Watched(sleeper._message))  # pyright: ignore[reportPrivateUsage]
            sleeper = await parked(client)
        await (await taken(client, OTHER)).ack_sync()
        await waker.handle(sleeper)
    assert given_back == [5.0] * 3
    assert [entry["event"] for entry in logs] == ["unavailable", "available_again"]
    assert (await taken(client)).data == b"job"
    assert await count(client, Stream.PARKED) == 0


async def test_a_job_whose_agent_is_gone_is_dead_lettered_with_its_bytes(client: Client, publisher: Publisher) -> None:
    jetstream = client.jetstream()
    job = await submitted(client, b"\xffkept")
    await park(publisher, job, agent=SLOW, execution_id=EXECUTION, job_id="j", due=now(), turn="normal 1 bot ")
    await job.ack_sync()
    config = (await jetstream.stream_info("JOBS")).config
    await jetstream.update_stream(config.evolve(subjects=[subjects.job(OTHER)]))
    await DelayedQueue(publisher, {OTHER}, no_turn).handle(await parked(client))
    stored = await jetstream.get_last_msg("DLQ", subjects.dead_letter("unknown_agent", SLOW))
    dead_letter = json.loads(stored.data or b"")
    assert base64.b64decode(dead_letter["payload_base64"]) == b"\xffkept"
    assert (dead_letter["agent"], dead_letter["execution_id"]) == (SLOW, EXECUTION)
    assert await count(client, Stream.PARKED) == 0


async def test_a_job_whose_turn_it_is_while_its_queue_refuses_it_comes_again(
    client: Client, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "RETRY_S", 0.1)
    job = await submitted(client)
    await park(publisher, job, agent=SLOW, execution_id="e", job_id="j", due=now(), turn="normal 1 bot ")
    await job.ack_sync()

    async def let_wait(_agent: str, _execution_id: str, waiting: Delivery, put_back: PutBack) -> None:
        await waiting.retry_in(60)
        with monkeypatch.context() as refusing:
            refusing.setattr(publisher, "job", AsyncMock(side_effect=PublishRefusedError("full")))
            await put_back(waiting)

    await DelayedQueue(publisher, PLAN.agents, let_wait).handle(await parked(client))
    assert (await parked(client)).deliveries == 2


async def test_a_job_whose_agent_is_configured_waits_for_its_queue_to_be_there_again(
    client: Client, publisher: Publisher
) -> None:
    """A cluster that is choosing a leader answers as if there were no stream."""
    jetstream = client.jetstream()
    job = await submitted(client)
    await park(publisher, job, agent=SLOW, execution_id="e", job_id="j", due=now())
    await job.ack_sync()
    config = (await jetstream.stream_info("JOBS")).config
    await jetstream.update_stream(config.evolve(subjects=[subjects.job(OTHER)]))
    await DelayedQueue(publisher, PLAN.agents, no_turn).handle(await parked(client))
    assert await count(client, Stream.PARKED) == 1
    assert await count(client, Stream.DLQ) == 0


async def test_a_job_that_can_not_be_parked_is_reported_to_whoever_tries(
    client: Client, publisher: Publisher, own_nats_server: RunningServer
) -> None:
    jetstream = client.jetstream()
    job = await submitted(client)
    config = (await jetstream.stream_info("PARKED")).config
    await jetstream.update_stream(config.evolve(max_bytes=1))
    with pytest.raises(PublishRefusedError):
        await park(publisher, job, agent=SLOW, execution_id="e", job_id="j", due=now())
    await jetstream.update_stream(config.evolve(subjects=["elsewhere"]))
    with pytest.raises(BusUnavailableError, match="no stream takes"):
        await park(publisher, job, agent=SLOW, execution_id="e", job_id="j", due=now())
    own_nats_server.kill()

    async def noticed() -> bool:
        return not client.is_connected

    await until(noticed)
    with pytest.raises(BusUnavailableError):
        await park(publisher, job, agent=SLOW, execution_id="e", job_id="j", due=now())


def test_what_programs_write_into_the_headers_harms_nobody() -> None:
    default = now()
    ahead = format_time(default + timedelta(days=1))
    for text in ("", "yesterday", "2026-01-01T00:00:00", ahead):
        assert queued_at({Header.QUEUED_AT.value: text}, default) == default
    assert queued_at({}, default) == default
    for token in ("%FF", "", "%0A", "x" * 129):
        assert name_in({Header.EXECUTION_ID.value: token}, Header.EXECUTION_ID) is None
    assert name_in({}, Header.EXECUTION_ID) is None
