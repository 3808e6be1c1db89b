"""Consumers that are deleted: created again where they were, and one incident each."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from breakwater.alerts.store.incidents import IncidentLog
from breakwater.config import parse_config
from breakwater.config.servers import bus_plan
from breakwater.jobs.contract.job import Job
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.broker import Each, ServiceApp, make_broker
from breakwater.kernel.nats.delivery import Delivery
from breakwater.kernel.nats.errors import BusUnavailableError
from breakwater.kernel.nats.provision import provision, survey
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.nats.topology import Plan, worker_consumer
from breakwater.records.channels import JOBS
from breakwater.redaction.rules.redact import Redactor
from breakwater.services.worker.consumers import ConsumerWatch
from tests.helpers import nats_client
from tests.servers import RunningServer

CONFIG = parse_config("{providers: {local: {base_url: 'http://127.0.0.1:1/v1'}}, agents: {a: {model: m}}}")


def watch_of(client: Any) -> ConsumerWatch:
    versions: Any = SimpleNamespace(newest=SimpleNamespace(worker=SimpleNamespace(config=CONFIG)))
    return ConsumerWatch(lambda: client, Publisher(lambda: client, "worker"), versions)


async def test_a_deleted_consumer_is_created_again_where_it_was_and_is_an_incident_until_then(
    own_nats_server: RunningServer,
) -> None:
    plan = bus_plan(CONFIG)
    await provision(own_nats_server.url, plan)
    broker, came = make_broker(own_nats_server.url, "worker"), asyncio.Queue[bytes]()

    @broker.subscriber(JOBS, durable=worker_consumer("a"), pull_sub=Each(lambda: 4))
    async def run(job: Delivery[Job]) -> None:
        await job.ack_sync()
        came.put_nowait(job.data)

    app = ServiceApp(broker)
    async with nats_client(own_nats_server.url) as client:
        jetstream, watch = client.jetstream(), watch_of(client)
        await app.start()
        for number in range(3):
            await jetstream.publish(subjects.attempt("a", "e", number), b"%d" % number)
        for message in await (await jetstream.pull_subscribe_bind("breaker", "EVENTS")).fetch(2, timeout=60):
            await message.ack_sync(timeout=60)
        await jetstream.publish(subjects.job("a"), b"before")
        assert await asyncio.wait_for(came.get(), 60) == b"before"
        await watch.look()

        for stream, consumer in ((Stream.JOBS, worker_consumer("a")), (Stream.EVENTS, "breaker")):
            assert await jetstream.delete_consumer(stream.value, consumer)
        await jetstream.publish(subjects.job("a"), b"after")
        await watch.look()
        assert await asyncio.wait_for(came.get(), 60) == b"after"
        again = await (await jetstream.pull_subscribe_bind("breaker", "EVENTS")).fetch(3, timeout=2)
        assert [message.data for message in again] == [b"2"], "what was acknowledged comes again, or something is lost"

        await watch.look()
        log = IncidentLog(lambda: client, Publisher(lambda: client, "tests"), Redactor.compile(CONFIG.redaction))
        incidents = (await log.catch_up()).all()
        assert [(one.title, one.status, one.count) for one in incidents] == [
            ("Consumer restored: worker-a of JOBS", "resolved", 1),
            ("Consumer restored: breaker of EVENTS", "resolved", 1),
        ]
        assert {one.verdict for one in (await survey(client, plan)).consumers} == {"right"}
        assert await provision(own_nats_server.url, plan) == ()
        await app.stop()


async def test_a_consumer_that_was_never_there_is_not_created(own_nats_server: RunningServer) -> None:
    async with nats_client(own_nats_server.url) as client:
        watch = watch_of(client)
        with pytest.raises(BusUnavailableError, match="NATS does not list the consumers of JOBS"):
            await watch.look()
        await provision(own_nats_server.url, Plan({}))
        await client.jetstream().delete_consumer("EVENTS", "budget")
        await watch.look()
        assert "budget" not in [one.name for one in await client.jetstream().consumers_info("EVENTS")]
        assert (await client.jetstream().stream_info("ALERTS")).state.messages == 0
