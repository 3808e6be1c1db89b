"""The doctor misses accepted jobs that are nowhere any more."""

from collections.abc import AsyncGenerator
from datetime import timedelta

import nats
import pytest
import pytest_asyncio
from nats.aio.client import Client

from breakwater.cli import doctor_nats
from breakwater.cli.doctor_findings import Finding
from breakwater.cli.doctor_nats import job_findings
from breakwater.jobs.store.accepted import AcceptedJobs
from breakwater.jobs.store.executions import Claim, Executions
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.nats.subjects import Header
from breakwater.kernel.nats.topology import Plan
from breakwater.kernel.redis.connection import Redis
from breakwater.local.plane import PlaneLocation
from tests.helpers import FIRST
from tests.servers import RunningServer

JOBS = [f"order/{number}" for number in range(6)]


@pytest_asyncio.fixture
async def client(
    own_nats_server: RunningServer, own_redis_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[Client]:
    monkeypatch.setenv("BREAKWATER_NATS_URL", own_nats_server.url)
    monkeypatch.setenv("BREAKWATER_REDIS_URL", own_redis_server.url)
    monkeypatch.setattr(doctor_nats, "SETTLING_TIME", timedelta(seconds=-1))
    await provision(own_nats_server.url, Plan(agents={"writer": 1}))
    connection = await nats.connect(own_nats_server.url)
    yield connection
    await connection.close()


async def look() -> Finding:
    [finding] = [one async for one in job_findings(PlaneLocation(None))]
    return finding


async def accept(redis: Redis, *job_ids: str) -> None:
    accepted = AcceptedJobs(redis)
    for job_id in job_ids:
        accepted.mark(job_id, "writer")
    await accepted.close()


async def test_a_job_is_somewhere_or_has_vanished(client: Client, own_redis_server: RunningServer) -> None:
    jetstream, redis = client.jetstream(), Redis(own_redis_server.url)
    queued, woken, parked, claimed, recorded, answered = JOBS
    try:
        await accept(redis, *JOBS)
        for job_id, headers in (
            (queued, {Header.MSG_ID.value: subjects.message_id("writer", queued)}),
            (woken, {Header.EXECUTION_ID.value: subjects.encode_token(woken), Header.MSG_ID.value: "x/woken/1/2"}),
        ):
            await jetstream.publish(subjects.job("writer"), job_id.encode(), headers=headers)
        token = {Header.EXECUTION_ID.value: subjects.encode_token(parked)}
        await jetstream.publish(subjects.parked("writer", parked), b"", headers=token)
        await Executions(redis).claim(Claim.new(claimed))
        await jetstream.publish(subjects.execution("writer", recorded), b"{}", headers=FIRST)
        await jetstream.publish(subjects.result(answered), b"{}", headers=FIRST)
        found = await look()
        assert (found.verdict, found.text) == ("ok", "all 6 accepted jobs have ended, are in progress, or are waiting")
        await jetstream.purge_stream("JOBS")
        found = await look()
        assert found.verdict == "fail"
        assert found.text.startswith("2 of 6 accepted jobs are missing")
        assert queued in found.text
        assert woken in found.text
        await jetstream.purge_stream("RESULTS")
        assert (await look()).text.startswith("3 of 6")
    finally:
        await redis.close()


async def test_too_many_waiting_jobs_are_not_read(
    client: Client, own_redis_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_nats, "MAX_WAITING", 2)
    redis = Redis(own_redis_server.url)
    try:
        await accept(redis, "gone")
        for number in range(3):
            headers = {Header.MSG_ID.value: subjects.message_id("writer", f"j{number}")}
            await client.jetstream().publish(subjects.job("writer"), b"", headers=headers)
        assert (await look()).verdict == "warn"
    finally:
        await redis.close()


async def test_jobs_on_their_way_are_not_missed(
    client: Client, own_redis_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_nats, "SETTLING_TIME", timedelta(seconds=30))
    assert client.is_connected
    redis = Redis(own_redis_server.url)
    try:
        await accept(redis, "just accepted")
        assert (await look()).verdict == "ok"
    finally:
        await redis.close()


async def test_of_very_many_jobs_some_are_looked_at(
    client: Client, own_redis_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_nats, "MAX_JOBS", 40)
    jetstream, redis = client.jetstream(), Redis(own_redis_server.url)
    jobs = [f"many-{number}" for number in range(600)]
    try:
        await accept(redis, *jobs)
        await redis.client.config_resetstat()  # another test may have had this server
        assert (await look()).text.startswith("40 of 40 (of 600, chosen at random) accepted jobs are missing")
        for job_id in jobs:
            await jetstream.publish(subjects.result(job_id), b"{}", headers=FIRST)
        assert (await look()).text.startswith("all 40 (of 600, chosen at random) accepted jobs have ended")
        commands = await redis.client.info("commandstats")
        assert "cmdstat_hgetall" not in commands
    finally:
        await redis.close()
