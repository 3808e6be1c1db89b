"""What each NATS user may do, asked of a real server."""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime

import nats
import nats.errors
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import StreamConfig

from breakwater.identity.key_log import KeyLog
from breakwater.identity.rules.callers import ENTROPY_BYTES, mint
from breakwater.identity.rules.keys import KeyRecord
from breakwater.jobs.contract.job import Job
from breakwater.kernel.nats import snapshots
from breakwater.kernel.nats.broker import Batches, ServiceApp, connection_of, make_broker, on_request
from breakwater.kernel.nats.core import ask
from breakwater.kernel.nats.delivery import Delivery
from breakwater.kernel.nats.errors import BusError, BusUnavailableError, NoRespondersError, PublishRefusedError
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.permissions import GRANTS, Grant, consumes, inbox_prefix, render
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.state_log import LOOK_S
from breakwater.kernel.nats.subjects import CHANNEL_TESTS, Stream, channel_test, sent_message
from breakwater.kernel.nats.topology import Plan, alert_consumer, consumers, worker_consumer
from breakwater.kernel.process import background
from breakwater.limits.contract import BudgetEvent, LimitSettings
from breakwater.limits.limit_log import LimitLog
from breakwater.limits.rules.limit_changes import Author, set_limit
from breakwater.local.ports import free_port
from breakwater.records.channels import BUDGETS, JOBS
from breakwater.services.__main__ import NAMES
from tests.helpers import until
from tests.nats_node import start_nats

PLAN = Plan(agents={"writer": 2, "gpt-4.1": 1}, alert_channels=("ops", "on-call.2"))
USERS = {grant.user for grant in GRANTS}
ALL_OF_DLQ = {"worker", "alerter", "sink"}

MAY_PUBLISH = {
    "bw.jobs.writer": {"request", "worker", "breaker", "setup", "client"},
    "bw.jobs.writer.client": {"setup"},
    "bw.parked.writer.e1": {"request", "worker", "setup"},
    "bw.snapshots.1": set[str](),
    "bw.attempts.writer.e1.1": {"worker"},
    "bw.executions.writer.e1": {"worker"},
    "bw.guards.writer": {"request", "worker"},
    "bw.results.e1": {"worker"},
    "bw.responses.e1.request": {"request"},
    "bw.responses.e1.chunks": {"request", "worker"},
    "bw.progress.writer.e1": {"worker"},
    "bw.cancel.e1": {"client"},
    "bw.cancel-by.client.e1": set(),
    "bw.cancel-requests.e1": {"request"},
    "bw.workers.w1": {"worker"},
    "bw.breakers.writer.m": {"request", "worker", "breaker"},
    "bw.budgets.global.daily": {"request", "budget"},
    "bw.audit.raise_cap": {"request", "setup"},
    "bw.keys.3f9c01d2a77b": {"request"},
    "bw.key-changes": {"request"},
    "bw.limit-settings.x": {"request"},
    "bw.limit-changes": {"request"},
    "bw.limits.created": {"request"},
    "bw.new-callers": {"request"},
    "bw.waiting-callers": {"worker"},
    "bw.alerts.breaker_open": {"request", "worker", "alerter", "sink", "setup"},
    "bw.alerter.leader": {"alerter"},
    "bw.alerter.sent.ops.inc_1": {"alerter"},
    "bw.alerter.disabled.ops": {"alerter"},
    "bw.alerter.replays.ops.1": {"request"},
    "bw.alerter.test.ops": {"request"},
    "bw.dlq.invalid.writer": ALL_OF_DLQ,
    "bw.replayed.17": {"request"},
    "bw.dismissed.error.writer.17": {"request"},
    "$O.bodies.C.b1": {"request", "worker"},
    "$O.bodies.M.YjE=": {"request", "worker"},
    "$O.others.C.b1": set[str](),
    "bw.replies.mine": {"worker"},
    "_INBOX.program.1": {"worker"},
    "_INBOX_request.1": set[str](),
    "_INBOX_sink.1": set[str](),
    "_INBOX_setup.1": set[str](),
    "$SYS.REQ.SERVER.PING.HEALTHZ": USERS - {"client"},
    "$SYS.REQ.SERVER.PING.VARZ": set[str](),
    "$SYS.REQ.SERVER.PING.CONNZ": set[str](),
    "$JS.API.STREAM.CREATE.MINE": {"setup"},
    "$JS.API.STREAM.UPDATE.JOBS": {"setup"},
    "$JS.API.STREAM.DELETE.JOBS": set[str](),
    "$JS.API.STREAM.PURGE.EVENTS": set[str](),
    "$JS.API.STREAM.MSG.DELETE.JOBS": {"setup"},
    "bw-filler.JOBS": {"setup"},
    "$JS.API.STREAM.MSG.DELETE.EVENTS": {"setup"},
    "$JS.API.STREAM.MSG.DELETE.AUDIT": set[str](),
    "$JS.API.STREAM.MSG.DELETE.KEYS": set[str](),
    "$JS.API.STREAM.MSG.GET.JOBS": {"setup"},
    "$JS.API.STREAM.MSG.GET.RESPONSES": {"request", "worker", "setup"},
    "$JS.API.STREAM.SNAPSHOT.KEYS": {"setup"},
    "$JS.API.STREAM.RESTORE.KEYS": {"setup"},
    "$JS.SNAPSHOT.ACK.KEYS.1": {"setup"},
    "$JS.SNAPSHOT.RESTORE.KEYS.1": {"setup"},
    "$JS.API.STREAM.PURGE.RESPONSES": set[str](),
    "$JS.API.STREAM.PURGE.OBJ_bodies": set[str](),
    "$JS.API.STREAM.MSG.DELETE.OBJ_bodies": {"request", "worker", "setup"},
    "$JS.API.STREAM.MSG.GET.OBJ_bodies": {"request", "worker", "setup"},
    "$JS.API.DIRECT.GET.OBJ_bodies": {"request", "worker", "setup"},
    "$JS.API.DIRECT.GET.OBJ_bodies.$O.bodies.M.YjE=": {"request", "worker", "setup"},
    "$JS.API.STREAM.INFO.OBJ_bodies": {"request", "worker", "setup"},
    "$JS.API.STREAM.MSG.GET.EVENTS": {"request", "breaker", "budget", "setup"},
    "$JS.API.CONSUMER.CREATE.EVENTS": {"setup"},
    "$JS.API.CONSUMER.CREATE.EVENTS.mine.bw.>": {"setup"},
    "$JS.API.CONSUMER.DURABLE.CREATE.EVENTS.sink-events": {"setup", "worker"},
    "$JS.API.CONSUMER.DURABLE.CREATE.RESULTS.mine": {"setup"},
    "$JS.API.CONSUMER.LIST.JOBS": {"setup", "worker"},
    "$JS.API.CONSUMER.DELETE.JOBS.worker-writer": set[str](),
    "$JS.API.CONSUMER.MSG.NEXT.JOBS.worker-writer": {"worker"},
    "$JS.API.CONSUMER.MSG.NEXT.PARKED.worker-parked": {"worker"},
    "$JS.API.CONSUMER.MSG.NEXT.EVENTS.breaker": {"breaker"},
    "$JS.API.CONSUMER.MSG.NEXT.EVENTS.budget": {"budget"},
    "$JS.API.CONSUMER.MSG.NEXT.EVENTS.alerter": {"alerter"},
    "$JS.API.CONSUMER.MSG.NEXT.EVENTS.alerter-executions": {"alerter"},
    "$JS.API.CONSUMER.MSG.NEXT.DLQ.alerter-dead-letters": {"alerter"},
    "$JS.API.CONSUMER.MSG.NEXT.ALERTER.alerter-replays": {"alerter"},
    "$JS.API.CONSUMER.MSG.NEXT.EVENTS.sink-events": {"sink"},
    # The names of channels are the config's: the alerter may pull from all consumers of this stream.
    "$JS.API.CONSUMER.MSG.NEXT.ALERTS.sink-alerts": {"sink", "alerter"},
    "$JS.API.CONSUMER.MSG.NEXT.AUDIT.sink-audit": {"sink"},
    "$JS.API.CONSUMER.MSG.NEXT.ALERTS.alerter-channel-ops": {"alerter"},
    "$JS.API.CONSUMER.INFO.JOBS.worker-writer": {"request", "worker", "setup"},
    "$JS.API.CONSUMER.INFO.PARKED.worker-parked": {"request", "worker", "setup"},
    "$JS.API.CONSUMER.INFO.EVENTS.alerter": {"request", "alerter", "setup"},
    "$JS.API.CONSUMER.INFO.EVENTS.another": {"setup"},
    "$JS.ACK.JOBS.worker-writer.1.1.1.1.0": {"worker"},
    "$JS.ACK.PARKED.worker-parked.1.1.1.1.0": {"worker"},
    "$JS.ACK.EVENTS.sink-events.1.1.1.1.0": {"sink"},
    "$JS.ACK.domain.account.EVENTS.sink-events.1.1.1.1.0": {"sink"},
    "$JS.API.DIRECT.GET.JOBS.bw.jobs.writer": {"request", "worker", "setup"},
    "$JS.API.DIRECT.GET.PARKED.bw.parked.writer.e1": {"request", "worker", "setup"},
    "$JS.API.DIRECT.GET.PARKED": {"request", "setup"},
    "$JS.API.DIRECT.GET.DLQ.bw.dlq.invalid.writer": {"request", "setup"},
    "$JS.API.DIRECT.GET.RESULTS.bw.results.e1": {"request", "worker", "setup", "client"},
    "$JS.API.DIRECT.GET.RESPONSES": {"request", "worker", "setup"},
    "$JS.API.DIRECT.GET.EVENTS": {"request", "worker", "breaker", "budget", "sink", "setup", "client"},
    "$JS.API.DIRECT.GET.ALERTS": {"request", "worker", "alerter", "sink", "setup", "client"},
    "$JS.API.DIRECT.GET.ALERTER.bw.alerter.sent.ops.inc_1": {"request", "alerter", "setup"},
    "$JS.API.DIRECT.GET.KEYS": {"request"},
    "$JS.API.DIRECT.GET.KEYS.bw.keys.3f9c01d2a77b": {"request"},
    "$JS.API.STREAM.MSG.GET.KEYS": {"request"},
    "$JS.API.DIRECT.GET.LIMITS": {"request", "worker", "budget", "setup"},
    "$JS.API.STREAM.INFO.ALERTS": {"worker", "request", "alerter", "sink", "setup", "client"},
    "$JS.API.STREAM.INFO.DLQ": {"worker", "request", "setup"},
    "$JS.API.STREAM.INFO.JOBS": {"worker", "request", "setup"},
    "$SYS.REQ.SERVER.PING": set[str](),
    "anything.else": set[str](),
}

MAY_SUBSCRIBE = {
    ">": set[str](),
    "bw.>": set[str](),
    "bw.jobs.>": set[str](),
    "bw.parked.>": set[str](),
    "bw.snapshots.>": {"setup"},
    "$JS.SNAPSHOT.RESTORE.>": set[str](),
    "bw.dlq.>": set[str](),
    "bw.replayed.*": set[str](),
    "bw.dismissed.>": set[str](),
    "bw.results.>": {"request", "client"},
    "bw.progress.>": {"request", "client"},
    "bw.cancel.*": {"request"},
    "bw.cancel-by.*.*": {"request"},
    "bw.cancel-requests.*": {"worker"},
    "bw.workers.*": {"worker"},
    "bw.attempts.>": {"client"},
    "bw.executions.>": {"client"},
    "bw.alerts.>": {"client"},
    "bw.audit.>": {"client"},
    "bw.alerter.test.*": {"alerter"},
    "bw.alerter.>": set[str](),
    "bw.keys.*": set[str](),
    "bw.key-changes": {"request"},
    "bw.new-callers": {"worker"},
    "bw.waiting-callers": {"request"},
    "bw.replies.>": {"client"},
    "_INBOX.>": {"client"},
    "_INBOX.*.*": {"client"},
    "$JS.API.>": set[str](),
    "$JS.EVENT.ADVISORY.>": set[str](),
    **{f"{inbox_prefix(user)}.>": {user} for user in USERS},
}

UrlOf = Callable[[str], str]


@pytest.fixture(scope="module")
def url_of(tmp_path_factory: pytest.TempPathFactory) -> Generator[UrlOf]:
    folder, port = tmp_path_factory.mktemp("nats"), free_port()
    settings = f'listen: "127.0.0.1:{port}"\njetstream {{ store_dir: "{folder}" }}\n'
    server = start_nats(folder, settings + render(GRANTS, lambda user: f'"secret-of-{user}"'), port)
    server.wait_until_ready()

    def url(user: str) -> str:
        return f"nats://{user}:secret-of-{user}@127.0.0.1:{port}"

    asyncio.run(provision(url("setup"), PLAN))
    yield url
    server.stop()


@asynccontextmanager
async def connected(url_of: UrlOf, user: str) -> AsyncGenerator[tuple[Client, list[str]]]:
    """A connection, and the refusals that the server has sent on it."""
    refusals: list[str] = []

    async def note(error: Exception) -> None:
        refusals.append(str(error).lower())

    client = await nats.connect(
        url_of(user), inbox_prefix=inbox_prefix(user), error_cb=note, allow_reconnect=False, connect_timeout=30
    )
    try:
        yield client, refusals
    finally:
        await client.close()


async def refused(client: Client, refusals: list[str]) -> set[str]:
    """The subjects of all refusals so far. nats-py reports them in tasks; a last one shows that all are in."""
    await client.publish("the.last", b"")
    async with asyncio.timeout(60):
        while not any('"the.last"' in refusal for refusal in refusals):
            await asyncio.sleep(0.005)
    return {refusal.split('"')[1] for refusal in refusals}


@pytest.mark.parametrize("user", sorted(USERS))
async def test_a_user_publishes_to_its_own_subjects_and_no_others(url_of: UrlOf, user: str) -> None:
    async with connected(url_of, user) as (client, refusals):
        for subject in MAY_PUBLISH:
            await client.publish(subject, b"{}")
        no = await refused(client, refusals)
    allowed = {subject for subject in MAY_PUBLISH if subject.lower() not in no}
    assert allowed == {subject for subject, users in MAY_PUBLISH.items() if user in users}


@pytest.mark.parametrize("user", sorted(USERS))
async def test_a_user_hears_its_own_subjects_and_no_others(url_of: UrlOf, user: str) -> None:
    async with connected(url_of, user) as (client, refusals):
        for subject in MAY_SUBSCRIBE:
            await client.subscribe(subject)
        no = await refused(client, refusals)
    allowed = {subject for subject in MAY_SUBSCRIBE if subject.lower() not in no}
    assert allowed == {subject for subject, users in MAY_SUBSCRIBE.items() if user in users}


async def test_the_worker_takes_a_job_answers_it_and_reads_its_record_back(url_of: UrlOf) -> None:
    answered = asyncio.Event()
    broker = make_broker(url_of("worker"), "worker")
    publisher = Publisher(connection_of(broker), "worker")

    @broker.subscriber(JOBS, durable=worker_consumer("gpt-4.1"), pull_sub=Batches(1, linger_s=0))
    async def run(jobs: list[Delivery[Job]]) -> None:
        [job] = jobs
        await publisher.raw("bw.executions.gpt-4%2E1.j1", b"record", {})
        await connection_of(broker)().publish(job.data.decode(), b"answer")
        await job.in_progress()
        if await job.ack_sync():
            answered.set()

    app = ServiceApp(broker)
    async with connected(url_of, "client") as (program, _):
        inbox = program.new_inbox()
        replies = await program.subscribe(inbox)
        await program.jetstream().publish("bw.jobs.gpt-4%2E1", inbox.encode())
        await app.start()
        try:
            async with asyncio.timeout(60):
                await answered.wait()
                assert (await replies.next_msg(timeout=60)).data == b"answer"
            found = await Lookup(connection_of(broker)).last(Stream.EVENTS, "bw.executions.gpt-4%2E1.j1")
        finally:
            await app.stop()
    assert found is not None
    assert found.data == b"record"


async def test_the_sink_takes_batches_with_its_own_user(url_of: UrlOf) -> None:
    seen: asyncio.Queue[int] = asyncio.Queue()
    broker = make_broker(url_of("sink"), "sink")

    @broker.subscriber(BUDGETS, durable="sink-events", pull_sub=Batches(100, linger_s=0.2))
    async def store(batch: list[Delivery[BudgetEvent]]) -> None:
        for delivery in batch:
            await delivery.ack()
            seen.put_nowait(delivery.sequence)

    app = ServiceApp(broker)
    async with connected(url_of, "budget") as (budget, _):
        stored = await budget.jetstream().publish("bw.budgets.global.monthly", b"{}")
    await app.start()
    try:
        async with asyncio.timeout(60):
            while await seen.get() != stored.seq:
                pass
    finally:
        await app.stop()


async def test_each_process_of_request_learns_at_once_of_a_key_that_another_has_changed(url_of: UrlOf) -> None:
    async with connected(url_of, "request") as (first, refusals), connected(url_of, "request") as (second, refused):
        logs = [_key_log(client) for client in (first, second)]
        following = [asyncio.create_task(log.run()) for log in logs]
        try:
            for log in logs:
                await log.filled.wait()
            made = mint("acme-bot", entropy=bytes(ENTROPY_BYTES), at=datetime.now(UTC))[1]
            record = KeyRecord(key=made, change="created", by="ops", reason=None, at=made.created_at)
            began = time.monotonic()
            await logs[0].change(lambda: record)
            await until(lambda: made.id in logs[1].keys, "the key")
            assert time.monotonic() - began < LOOK_S / 2, "it was heard of, and not only looked for"
        finally:
            await background.stop(*following)
    assert [*refusals, *refused] == []


async def test_workers_and_the_budget_service_learn_at_once_of_a_limit_that_is_set(url_of: UrlOf) -> None:
    async with (
        connected(url_of, "request") as (request, refusals),
        connected(url_of, "worker") as (worker, refusals_of_worker),
        connected(url_of, "budget") as (budget, refusals_of_budget),
    ):
        written = LimitLog(lambda: request, Publisher(lambda: request, "tests"))
        logs = [LimitLog(lambda: worker), LimitLog(lambda: budget)]
        following = [asyncio.create_task(log.run()) for log in logs]
        try:
            for log in logs:
                await log.filled.wait()
            limit = LimitSettings(scope="plane", requests=1, per="minute")
            record = set_limit("heard", limit, None, Author("c", "ops", None, datetime.now(UTC)))
            began = time.monotonic()
            await written.change(lambda: record)
            await until(lambda: all("heard" in log.states for log in logs), "the limit")
            assert time.monotonic() - began < LOOK_S / 2, "it was heard of, and not only looked for"
            assert {log.version for log in logs} == {written.version}
        finally:
            await background.stop(*following)
    assert [*refusals, *refusals_of_worker, *refusals_of_budget] == []


def _key_log(client: Client) -> KeyLog:
    return KeyLog(lambda: client, Publisher(lambda: client, "tests"))


async def test_the_alerter_takes_a_channels_alerts_and_reads_what_it_remembered(url_of: UrlOf) -> None:
    async with connected(url_of, "request") as (request, _):
        stored = await request.jetstream().publish("bw.alerts.guard_tripped", b"acknowledged")
    async with connected(url_of, "alerter") as (alerter, refusals):
        for channel in PLAN.alert_channels:
            bound = await alerter.jetstream().pull_subscribe_bind(alert_consumer(channel), "ALERTS")
            sequence = 0
            while sequence < stored.seq:  # other tests reported some before
                [reported] = await bound.fetch(1, timeout=60)
                sequence = reported.metadata.sequence.stream
                await reported.ack_sync(timeout=60)
            assert reported.data == b"acknowledged"
        for note in (b"old", b"new"):
            await alerter.jetstream().publish(sent_message("ops", "inc_1"), note)
        found = await Lookup(lambda: alerter).last(Stream.ALERTER, sent_message("ops", "inc_1"))
    assert found is not None
    assert found.data == b"new"
    assert refusals == []


async def test_an_alerter_answers_whoever_tests_a_channel(url_of: UrlOf) -> None:
    broker = make_broker(url_of("alerter"), "alerter")
    app = ServiceApp(broker)

    async def answer(subject: str) -> bytes:
        return f'{{"tested": "{subject}"}}'.encode()

    on_request(broker, CHANNEL_TESTS, "alerters", answer)
    await app.start()
    try:
        async with connected(url_of, "request") as (request, refusals):
            for body in (b"", b"{no JSON"):
                said: list[bytes] = []

                async def delivered(said: list[bytes] = said, body: bytes = body) -> bool:
                    try:
                        said.append(await ask(lambda: request, channel_test("ops"), body, 60))
                    except NoRespondersError:
                        return False  # seldom said by a busy server that has just confirmed the subscription
                    return True

                await until(delivered)
                assert said == [b'{"tested": "bw.alerter.test.ops"}']
            assert refusals == []
    finally:
        await app.stop()


async def test_a_service_that_publishes_what_is_not_its_own_is_reported_by_its_publisher(url_of: UrlOf) -> None:
    async with connected(url_of, "sink") as (client, refusals):
        publisher = Publisher(lambda: client, "sink")
        with pytest.raises(BusUnavailableError):
            await publisher.raw("bw.jobs.writer", b"{}", {}, timeout_s=0.3)
        assert "bw.jobs.writer" in await refused(client, refusals)


async def test_a_job_for_an_agent_that_is_not_configured_is_refused_at_once(url_of: UrlOf) -> None:
    async with connected(url_of, "client") as (client, _):
        with pytest.raises(PublishRefusedError):
            await Publisher(lambda: client, "program").raw("bw.jobs.nobody", b"{}", {})


async def test_a_program_reads_stored_results_but_no_jobs(url_of: UrlOf) -> None:
    async with connected(url_of, "worker") as (worker, _):
        await worker.jetstream().publish("bw.results.stored", b"42")
    async with connected(url_of, "client") as (client, _):
        result = await Lookup(lambda: client).last(Stream.RESULTS, "bw.results.stored")
        with pytest.raises(TimeoutError):
            await client.jetstream(timeout=0.3).get_msg(Stream.JOBS.value, seq=1, direct=True)
    assert result is not None
    assert result.data == b"42"


async def test_the_breaker_reads_stored_events_to_rebuild_its_state(url_of: UrlOf) -> None:
    async with connected(url_of, "worker") as (worker, _):
        for number in range(1, 4):
            await worker.jetstream().publish(f"bw.attempts.writer.rebuilt.{number}", b"attempt")
        await worker.jetstream().publish("bw.breakers.writer.rebuilt", b"open")
    async with connected(url_of, "breaker") as (breaker, refusals):
        found = Lookup(lambda: breaker).scan(Stream.EVENTS, "bw.attempts.writer.rebuilt.*")
        attempts = [message.subject.rpartition(".")[2] async for message in found]
        transitions = await Lookup(lambda: breaker).last_of_each(Stream.EVENTS, "bw.breakers.writer.rebuilt")
        assert (await Lookup(lambda: breaker).facts(Stream.EVENTS)).identity
    assert attempts == ["1", "2", "3"]
    assert [message.data for message in transitions] == [b"open"]
    assert refusals == []


async def test_setup_copies_and_restores_streams_of_the_account_that_it_is_not_in(url_of: UrlOf) -> None:
    keys = Stream.KEYS.value
    async with connected(url_of, "request") as (request, _):
        await request.jetstream().publish("bw.keys.copied", os.urandom(200_000))
    async with connected(url_of, "setup") as (setup, refusals):
        stored = {stream.name: stream for stream in await snapshots.list_streams(setup)}
        async with snapshots.snapshot(setup, stored[keys]) as (begun, chunks):
            copied = [chunk async for chunk in chunks]
        # It restores in the same account, too, but not over a stream that is there.
        with pytest.raises(BusError, match="already in use"):
            await snapshots.restore(setup, begun, pieces(copied), backup="b", replicas=1, unfinished=False)
        elsewhere = begun.config | {"name": "COPIED", "subjects": ["bw.copied"]}
        mirror = replace(begun, name="COPIED", config=elsewhere)
        await snapshots.restore(setup, mirror, pieces(copied), backup="b", replicas=1, unfinished=True)
        assert not refusals
        restored = {stream.name: stream for stream in await snapshots.list_streams(setup)}["COPIED"]
        assert (restored.messages, restored.last) == (begun.messages, begun.last)
        assert restored.metadata[snapshots.UNFINISHED] == "b"
        await snapshots.finish(setup, restored)


async def pieces(chunks: list[bytes]) -> AsyncGenerator[bytes]:
    for chunk in chunks:
        yield chunk


async def test_a_worker_creates_no_stream(url_of: UrlOf) -> None:
    async with connected(url_of, "worker") as (client, refusals):
        with pytest.raises(TimeoutError):
            await client.jetstream(timeout=0.3).add_stream(StreamConfig(name="MINE", subjects=["mine.>"]))
        assert "$js.api.stream.create.mine" in await refused(client, refusals)


async def test_provisioning_twice_changes_nothing(url_of: UrlOf) -> None:
    assert await provision(url_of("setup"), PLAN) == ()


async def test_nobody_connects_without_a_password(url_of: UrlOf) -> None:
    address = url_of("sink").rpartition("@")[2]
    with pytest.raises(nats.errors.Error, match=r"(?i)authorization"):
        await nats.connect(f"nats://{address}", allow_reconnect=False, error_cb=_silent)
    with pytest.raises(nats.errors.Error, match=r"(?i)authorization"):
        await nats.connect(f"nats://sink:wrong@{address}", allow_reconnect=False, error_cb=_silent)


async def _silent(_: Exception) -> None: ...


async def test_replies_of_one_user_are_not_heard_by_another(url_of: UrlOf) -> None:
    heard: list[Msg] = []

    async def hear(message: Msg) -> None:
        heard.append(message)

    async with connected(url_of, "sink") as (sink, _), connected(url_of, "worker") as (worker, _):
        for subject in ("_INBOX_worker.>", "_INBOX.>", ">"):
            await sink.subscribe(subject, cb=hear)
        await sink.flush()
        await worker.jetstream().publish("bw.results.private", b"{}")
        await sink.flush()
    assert heard == []


def test_every_durable_consumer_is_pulled_by_exactly_one_user() -> None:
    for stream, consumer in consumers(PLAN):
        name = consumer.durable_name or ""
        pulling = {subject for subject in _pulling(stream, name) if ".INFO." not in subject}
        owners = [grant.user for grant in GRANTS if pulling & set(grant.publish)]
        assert len(owners) == 1, f"{stream} {name}: {owners}"


def _pulling(stream: Stream, durable: str) -> tuple[str, ...]:
    named_by_the_config = durable.startswith(("worker-", "alerter-channel-"))
    return (*consumes(stream, durable), *(consumes(stream, "*") if named_by_the_config else ()))


def test_every_service_has_its_grant() -> None:
    # The console is on no bus: it asks the HTTP interface.
    assert {*NAMES, "setup", "client"} - {"console"} == USERS


def test_an_empty_list_is_rendered_as_a_refusal_of_all() -> None:
    assert '"publish": {"deny": ">"}' in render([Grant("mute")], lambda _: "x")
