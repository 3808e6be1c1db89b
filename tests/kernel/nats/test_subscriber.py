"""What `@broker.subscriber` declares of our own subscriber, and what becomes of a handler that fails."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
from faststream.exceptions import SetupError
from faststream.nats import TestNatsBroker
from nats.aio.client import Client
from nats.errors import ConnectionReconnectingError
from structlog.testing import capture_logs

from breakwater.breakers.contract import BreakerTransition
from breakwater.cli.commands.contract import service_brokers
from breakwater.jobs.contract.execution import Attempt
from breakwater.jobs.contract.job import Job
from breakwater.kernel.nats import core, subjects, topology
from breakwater.kernel.nats.broker import Batches, Broker, Each, ServiceApp, make_broker, publisher_of
from breakwater.kernel.nats.delivery import Delivery
from breakwater.kernel.nats.permissions import GRANTS
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.nats.subjects import Stream, covers
from breakwater.kernel.nats.topology import Plan, worker_consumer
from breakwater.limits.contract import GuardEvent
from breakwater.records.channels import ATTEMPTS, BREAKERS, CHANNELS, GUARDS, JOBS
from tests.helpers import deliver, nats_client, until
from tests.servers import RunningServer
from tests.tables import each_row

NOWHERE = "nats://127.0.0.1:1"
EVERY = Each(lambda: 1)


@pytest.fixture
def broker() -> Broker:
    return make_broker(NOWHERE, "tests")


async def test_a_message_comes_to_the_handlers_of_its_subject_as_a_delivery(broker: Broker) -> None:
    came: list[Any] = []

    @broker.subscriber(BREAKERS, GUARDS, durable="two-channels", pull_sub=Batches(10, linger_s=0))
    async def changes(batch: list[Delivery[BreakerTransition | GuardEvent]]) -> None:
        came.append([(one.stream, one.subject, one.sequence, one.data) for one in batch])

    @broker.subscriber(JOBS, durable="jobs", filters=subjects.jobs_of("a"), pull_sub=EVERY)
    async def run(job: Delivery[Job]) -> None:
        came.append((job.subject, job.data, job.headers["traceparent"]))

    async with TestNatsBroker(broker):
        await deliver(broker, Stream.EVENTS, subjects.guard("a"), b"guard", sequence=7)
        await deliver(broker, Stream.EVENTS, subjects.attempt("a", "e", 1), b"attempt")
        await deliver(broker, Stream.JOBS, subjects.job("b"), b"another's")
        await deliver(broker, Stream.JOBS, subjects.job_by("a", "client"), b"job", headers={"traceparent": "00-a"})
    assert came == [[("EVENTS", "bw.guards.a", 7, b"guard")], ("bw.jobs.a.client", b"job", "00-a")]


def takes_nothing(batch: list[bytes]) -> None: ...


def takes_another(batch: list[Delivery[GuardEvent]]) -> None: ...


def takes_one(message: Delivery[Attempt]) -> None: ...


def takes_either(batch: list[Delivery[Attempt | GuardEvent]]) -> None: ...


@pytest.mark.parametrize("handler", [takes_nothing, takes_another, takes_one, takes_either])
def test_a_handler_of_other_messages_than_its_channels_is_refused(broker: Broker, handler: Callable[..., Any]) -> None:
    declared = broker.subscriber(ATTEMPTS, durable="breaker", pull_sub=Batches(10, linger_s=0))
    with pytest.raises(SetupError, match=r"handler of breaker must take a list\[Delivery\[Attempt\]\]"):
        declared(handler)


async def test_what_a_service_publishes_and_does_not_declare_is_refused(broker: Broker) -> None:
    publisher = publisher_of(broker, GUARDS)
    attempt = Attempt.model_construct(attempt_id="e:1")
    with pytest.raises(TypeError, match="breakwater/tests does not declare that it publishes Attempt"):
        await publisher.event("bw.attempts.a.e.1", attempt, id="1", at=datetime.now(UTC))


def test_the_services_declare_what_their_users_may_publish_and_no_more() -> None:
    granted = {grant.user: (*grant.publish, *grant.sends) for grant in GRANTS}
    for broker in service_brokers():
        declared = {declared_subject(channel.address) for channel in broker.published}
        may = {
            subject
            for channel in CHANNELS
            for subject in [declared_subject(channel.address)]
            if any(covers(grant, subject) for grant in granted[broker.service])
        }
        replies = {"bw.agents"}
        public = {declared_subject(channel.address) for channel in CHANNELS}
        assert (declared & public) - replies == may, broker.service
        assert all(any(covers(grant, subject) for grant in granted[broker.service]) for subject in declared - replies)


def test_the_services_read_consumers_of_the_topology_with_the_subjects_that_these_have() -> None:
    provisioned = {
        (stream.value, one.durable_name): set(one.filter_subjects or [one.filter_subject or ""])
        for stream, one in topology.consumers(Plan(agents={"agent": 1}))
    }
    read = {
        (one.declaration.stream, one.declaration.durable): set(one.filter_subjects)
        for broker in service_brokers()
        for one in broker.pull_subscribers
    }
    by_pull = {"alerter-executions", "alerter-dead-letters", "alerter-replays"}
    assert read.keys() == {consumer for consumer in provisioned if consumer[1] not in by_pull}
    for consumer, filters in read.items():
        for subject in filters:
            assert any(covers(one, subject) for one in provisioned[consumer]), (consumer, subject)


def declared_subject(address: str) -> str:
    return ".".join("*" if token.startswith("{") else token for token in address.split("."))


async def test_a_handler_that_fails_is_logged_and_its_message_comes_again(own_nats_server: RunningServer) -> None:
    await provision(own_nats_server.url, Plan(agents={"a": 10}))
    broker = make_broker(own_nats_server.url, "worker")
    tries, done = 0, asyncio.Event()

    @broker.subscriber(JOBS, durable=worker_consumer("a"), pull_sub=Each(lambda: 10))
    async def run(job: Delivery[Job]) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            await job.retry_in(0)
            raise ValueError("broken")
        await job.ack_sync()
        done.set()

    app = ServiceApp(broker)
    with capture_logs() as logs:
        async with nats_client(own_nats_server.url) as client:
            await app.start()
            await client.jetstream().publish(subjects.job("a"), b"job")
            await asyncio.wait_for(done.wait(), 60)
            await app.stop()
    assert [one["consumer"] for one in logs if one["event"] == "handler_failed"] == [worker_consumer("a")]
    assert tries == 2


async def test_messages_of_one_agent_are_read_while_the_consumer_of_another_is_not_there(
    own_nats_server: RunningServer,
) -> None:
    await provision(own_nats_server.url, Plan(agents={"a": 1}))
    broker, came = make_broker(own_nats_server.url, "worker"), list[str]()

    def serve(agent: str) -> None:
        @broker.subscriber(JOBS, durable=worker_consumer(agent), pull_sub=Each(lambda: 1))
        async def run(job: Delivery[Job]) -> None:
            came.append(agent)
            await job.ack_sync()

    serve("missing")
    serve("a")
    app = ServiceApp(broker)
    await app.start()
    try:
        async with nats_client(own_nats_server.url) as client:
            await client.jetstream().publish(subjects.job("a"), b"job")
            await until(lambda: came == ["a"], "the job")
    finally:
        await app.stop()


async def test_a_reader_outlives_whatever_a_fetch_raises(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[Any] = [MemoryError("no memory is left for now"), ["message"]]
    came = asyncio.Event()

    async def fetch(*_: Any) -> list[Any]:
        if not outcomes:
            await asyncio.sleep(3600)
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    source = Batches(10, linger_s=0)
    monkeypatch.setattr(source, "fetch", fetch)
    monkeypatch.setattr("breakwater.kernel.nats.subscriber.RETRY_S", 0.0)

    @broker.subscriber(ATTEMPTS, durable="breaker", pull_sub=source)
    async def observe(batch: list[Delivery[Attempt]]) -> None: ...

    [subscriber] = broker.subscribers
    subscriber.answered.set()

    async def consume(message: Any) -> None:
        assert message == "message"
        came.set()

    monkeypatch.setattr(subscriber, "consume", consume)
    with capture_logs() as logs:
        reading = asyncio.create_task(subscriber._read())  # pyright: ignore[reportPrivateUsage]
        async with asyncio.timeout(10):
            await came.wait()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    assert [entry["event"] for entry in logs] == ["fetch_failed"]


@each_row(
    "arrivals, lingers_s",
    [
        pytest.param([(1, 60), (1, 120), (1, 180)], [0.1, 0.1, 0.1], id="rests"),
        pytest.param([(50, 60), (1, 120), (50, 121)], [0.1, 0.1, 0.1], id="bursts after rests"),
        pytest.param([(1, 60), (1, 60.1), (1, 60.2), (3, 60.5)], [0.1, 0.1, 0.5, 0.5], id="steadily, one by one"),
        pytest.param([(99, 60), (99, 61), (99, 62), (5, 63)], [0.1, 0.1, 2.0, 0.5], id="constant load, then less"),
    ],
)
def test_messages_gather_for_longer_while_more_of_them_come(
    arrivals: list[tuple[int, float]], lingers_s: list[float]
) -> None:
    batches = Batches(100, {0.0: 0.1, 5.0: 0.5, 50.0: 2.0})
    assert [batches.note(size, at) for size, at in arrivals] == lingers_s


@dataclass
class Watch:
    """What was seen of a connection, and the exit codes with which the process would have ended."""

    dead: list[bool] = field(default_factory=list[bool])
    exit_codes: list[int] = field(default_factory=list[int])


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch = Watch()

    def has_dead_task(client: Client) -> bool:
        watch.dead.append(core.has_dead_task(client))
        return watch.dead[-1]

    monkeypatch.setattr("breakwater.kernel.nats.broker.has_dead_task", has_dead_task)
    monkeypatch.setattr("breakwater.kernel.nats.broker.WATCH_S", 0.01)
    monkeypatch.setattr("breakwater.kernel.nats.broker.os._exit", watch.exit_codes.append)
    return watch


async def test_a_process_ends_once_a_task_of_its_connection_has_died(
    own_nats_server: RunningServer, watch: Watch
) -> None:
    for task in ("_reading_task", "_flusher_task", "_ping_interval_task"):
        broker = make_broker(own_nats_server.url, "tests")
        await broker.start()
        try:
            await until(lambda: len(watch.dead) >= 3, "looks at a connection that is alive")
            assert (any(watch.dead), watch.exit_codes) == (False, [])
            getattr(broker.connection, task).cancel()
            await until(lambda: bool(watch.exit_codes), f"the end of the process without {task}")
        finally:
            await broker.stop()
        assert set(watch.exit_codes) == {os.EX_SOFTWARE}
        watch.exit_codes.clear()
        watch.dead.clear()


async def test_a_process_goes_on_while_its_server_restarts(own_nats_server: RunningServer, watch: Watch) -> None:
    broker = make_broker(own_nats_server.url, "tests")
    await broker.start()
    try:
        own_nats_server.kill()
        await until(lambda: broker.connection.is_reconnecting, "the outage")
        await own_nats_server.restart_async()
        await until(lambda: broker.connection.is_connected, "the connection")
        watch.dead.clear()
        await until(lambda: len(watch.dead) >= 3, "looks at the new connection")
        assert (any(watch.dead), watch.exit_codes) == (False, [])
        broker.connection._reconnection_task = None  # pyright: ignore[reportPrivateUsage]
        own_nats_server.kill()
        await until(lambda: broker.connection.is_reconnecting, "the outage")
        assert broker.connection._reconnection_task is not None  # pyright: ignore[reportPrivateUsage]
        broker.connection._reconnection_task.cancel()  # pyright: ignore[reportPrivateUsage]
        await until(lambda: bool(watch.exit_codes), "the end of a process that reconnects no more")
    finally:
        with suppress(ConnectionReconnectingError):
            await broker.stop()
