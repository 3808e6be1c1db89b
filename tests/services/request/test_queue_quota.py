"""What one agent's jobs take of JOBS leaves room for those of the others; and how full streams are."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from breakwater.jobs.api import job_queue
from breakwater.jobs.api.job_queue import QueueQuota
from breakwater.kernel.commands.connect import flush_subscriptions
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.delivery import Delivery, park
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.topology import worker_consumer
from breakwater.kernel.telemetry.metrics import StreamMetrics
from breakwater.services.request.observe import StreamFill
from tests.helpers import until
from tests.services.request.conftest import CONFIG, HttpApi, StartApi

SHARE = 2 * 1024**2
LARGE = {"agent": "writer", "prompt": "x" * 200_000}


async def test_an_agent_whose_jobs_take_its_share_is_refused_until_some_are_done_and_others_are_not(
    start_api: StartApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_queue, "CHECK_EVERY_S", 0.05)
    config = CONFIG.replace("limits: {", f"limits: {{jobs_max_bytes_per_agent: {SHARE}, ")
    async with start_api(config) as api:
        accepted = 0
        while (answer := await api.post(LARGE)).status == 202:
            accepted += 1
        assert (answer.status, answer.code) == (503, "refused")
        assert accepted in range(SHARE // 2 // 200_000, SHARE * 3 // 2 // 200_000 + 1)
        assert "whole share" in answer.message
        assert (await api.post({"agent": "reader", "prompt": "x"})).status == 202
        await api.bus.jetstream().purge_stream("JOBS", keep=3)

        async def accepts() -> bool:
            return (await api.post(LARGE)).status == 202

        await until(accepts)


async def test_an_agent_that_programs_have_brought_over_its_share_is_named_once(
    start_api: StartApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_queue, "CHECK_EVERY_S", 0.05)
    config = CONFIG.replace("limits: {", f"limits: {{jobs_max_bytes_per_agent: {SHARE}, ")
    with capture_logs() as logs:
        async with start_api(config) as api:

            async def logged(event: str) -> bool:
                return event in [entry["event"] for entry in logs]

            for _ in range(12):
                await api.bus.jetstream().publish("bw.jobs.writer", bytes(200_000))
            await until(lambda: logged("queue_share_exceeded"))
            assert (await api.post({"agent": "writer", "prompt": "x"})).code == "refused"
            await api.bus.jetstream().purge_stream("JOBS")
            await until(lambda: logged("queue_share_kept_again"))
    assert [(entry["agent"], entry["share"]) for entry in logs if entry["event"] == "queue_share_exceeded"] == [
        ("writer", SHARE)
    ]


async def test_a_job_that_waits_for_its_turn_waits_once_however_often_it_is_sent(api: HttpApi) -> None:
    jetstream = api.bus.jetstream()
    publisher = Publisher(lambda: api.bus, "worker")
    callers = await api.bus.subscribe(subjects.NEW_CALLERS)
    await flush_subscriptions(api.bus)

    async def waiting() -> int:
        return (await jetstream.stream_info("PARKED")).state.messages

    async def sent(job_id: str) -> list[bool]:
        # The caller of no other test: whoever called a moment ago is not announced again.
        job = {"agent": "writer", "job_id": job_id, "prompt": "x", "tenant": "waits-once"}
        answers = await asyncio.gather(*(api.post(job) for _ in range(3)))
        return sorted(answer.json["duplicate"] for answer in answers)

    assert await sent("parked-by-a-worker") == [False, True, True]
    _, turn = caller = json.loads((await callers.next_msg()).data)
    queue = await jetstream.pull_subscribe_bind(worker_consumer("writer"), "JOBS")
    [message] = await queue.fetch(1)
    names = {"agent": "writer", "execution_id": "parked-by-a-worker", "job_id": "parked-by-a-worker"}
    await park(publisher, Delivery(message), **names, due=datetime.now(UTC), turn=turn)
    await message.ack_sync()
    assert await sent("parked-by-a-worker") == [True, True, True]
    assert (await api.queued(), await waiting()) == (0, 1)

    async def another_waits() -> bool:
        await api.bus.publish(subjects.WAITING_CALLERS, json.dumps([caller]).encode())
        await api.post({"agent": "writer", "prompt": "x", "tenant": "waits-once"})
        return await waiting() > 1

    await until(another_waits, "`request` to know that jobs of this caller wait")
    assert await sent("straight-to-parked") == [False, True, True]
    assert await sent("straight-to-parked") == [True, True, True]
    assert await waiting() == 3


async def test_what_others_have_published_counts_by_its_size(api: HttpApi, monkeypatch: pytest.MonkeyPatch) -> None:
    jetstream, shares = api.bus.jetstream(), QueueQuota(SHARE, Lookup(lambda: api.bus))
    monkeypatch.setattr(job_queue, "MAX_MESSAGE_BYTES", 400_000)
    for _ in range(6):
        await jetstream.publish("bw.jobs.writer", bytes(400_000))
        for _ in range(6):
            await jetstream.publish("bw.jobs.reader", bytes(40_000))
    await shares.check()
    assert not shares.has_room("writer", 0)
    assert shares.has_room("reader", 200_000)
    await jetstream.purge_stream("JOBS", subject="bw.jobs.writer")
    await shares.check()
    assert shares.has_room("writer", 1_900_000)
    whole = QueueQuota(None, Lookup(lambda: api.bus))
    await whole.check()
    assert whole.has_room("writer", 512 * 1024**2)
    assert not whole.has_room("writer", 512 * 1024**2 + 1)


async def test_a_stream_that_fills_is_reported_once_before_it_is_full(api: HttpApi) -> None:
    jetstream, registry = api.bus.jetstream(), CollectorRegistry()
    fill = StreamFill(Lookup(lambda: api.bus), StreamMetrics(registry))

    def used(stream: str) -> float | None:
        return registry.get_sample_value("breakwater_stream_used_ratio", {"stream": stream})

    config = (await jetstream.stream_info("DLQ")).config
    await jetstream.update_stream(config.evolve(max_bytes=10_000))
    with capture_logs() as logs:
        await fill.check()
        assert (used("DLQ"), used("RESULTS"), logs) == (0, 0, [])
        await jetstream.publish("bw.dlq.error.writer", bytes(8_500))
        for _ in range(2):
            await fill.check()
        assert 0.85 < (used("DLQ") or 0) < 1
        await jetstream.purge_stream("DLQ")
        await fill.check()
    assert [(log["event"], log["stream"]) for log in logs] == [
        ("stream_nearly_full", "DLQ"),
        ("stream_has_room_again", "DLQ"),
    ]
    assert "dead-lettered wait" in logs[0]["when_full"]
