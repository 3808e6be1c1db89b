"""A worker of another machine: of its end, this one knows what NATS and Redis know."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import AsyncMock
from urllib.parse import urlsplit

import pytest

from breakwater.cli.doctor_checks import redis_findings
from breakwater.jobs.rules.workers import LIVENESS
from breakwater.jobs.store.executions import Claim
from breakwater.jobs.store.workers import Workers
from breakwater.kernel.nats.topology import ACK_WAIT_S
from breakwater.kernel.process import background
from breakwater.kernel.process.pace import at_pace
from breakwater.local.plane import PlaneLocation
from breakwater.local.ports import free_port
from breakwater.services.worker.dead_workers import DeadWorkers
from tests.chaos.network import Link
from tests.flow.kit import model
from tests.helpers import until
from tests.nats_node import start_nats
from tests.server_sources import RunningServer
from tests.services.worker.conftest import StartWorker
from tests.services.worker.harness import WorkerPlane, running_worker

AGENTS = {"writer": {"model": "sim/m", "timeout_s": 60, "concurrency": 8, "retry": {"base_s": 0}}}
PACE = 4.0
QUICK = at_pace(LIVENESS, PACE)
"""Heartbeats and leases, where it does not matter that a slow machine misses the moment to take a worker for dead."""
HANGS = {"sim/m": model({"requests": [1, 4], "hang_s": 600})}
"""The first four calls end with their worker."""
SLOW = {"sim/m": model({"requests": [1, 4], "hang_s": 5})}
"""The first four calls take longer than all that is done to their worker."""
JOBS = [f"j{number}" for number in range(4)]


@asynccontextmanager
async def two_machines(
    here: AbstractAsyncContextManager[WorkerPlane], nats_url: str, pace: float = PACE
) -> AsyncGenerator[WorkerPlane]:
    """The calls of `first`, a process, are under way; the worker of this process takes no jobs until `begin`.

    Args:
        here: the worker of this process.
        nats_url: what the first one connects to.
        pace: of both.
    """
    async with here as plane:
        config = str(plane.directory / "breakwater.yaml")
        plane.environment |= {
            "BREAKWATER_CONFIG": config,
            "BREAKWATER_NATS_URL": nats_url,
            "BREAKWATER_PACE": str(pace),
        }
        plane.start("worker", "first")
        own = replace(plane.worker, id="here-1-1")
        others = DeadWorkers(own, lambda: plane.client, lambda: ["writer"], runs=lambda _: None)
        watching = asyncio.create_task(others.run())
        try:
            for job in JOBS:
                await plane.publish({"agent": "writer", "job_id": job, "prompt": "x"})
            await until(lambda: plane.sim.ledger.totals.in_progress >= len(JOBS), "all calls under way")
            yield plane
        finally:
            plane.processes["first"].kill()
            plane.processes["first"].wait()
            await background.stop(watching)


async def heard(plane: WorkerPlane) -> bool:
    """Whether both have sent heartbeats, and NATS shows them to others."""
    running = await Workers(plane.worker.redis).running()
    return len(running) == 2 and all(running.values())


async def all_called_once(plane: WorkerPlane) -> None:
    """Waits for the results, which are those of the first calls."""
    for job in JOBS:
        assert [one["outcome"] for one in (await plane.result(job))["attempts"]] == ["success"]
    assert plane.sim.ledger.totals.calls == len(JOBS)
    assert "worker_died" not in plane.log("worker")


async def test_jobs_of_a_worker_that_is_gone_and_has_not_come_back_within_3_s_are_taken_over(
    start_worker: StartWorker, worker_nats: RunningServer
) -> None:
    async with two_machines(start_worker(HANGS, AGENTS, begin=False), worker_nats.url, pace=1) as plane:
        await until(lambda: heard(plane), "heartbeats")
        plane.kill("first")
        killed = asyncio.get_running_loop().time()
        plane.begin()
        for job in JOBS:
            lost, answered = (await plane.result(job))["attempts"]
            assert (lost["outcome"], answered["outcome"]) == ("worker_lost", "success")
            # Nobody knows what it used, so limits count the worst case.
            assert lost["reserved_tokens"] == answered["reserved_tokens"] > lost["input_tokens"] > 0
        assert asyncio.get_running_loop().time() - killed < 6
        assert "worker_died" in plane.log("worker")
        assert set(await Workers(plane.worker.redis).running()) == {"here-1-1"}


async def test_a_worker_that_stalls_keeps_its_jobs(start_worker: StartWorker, worker_nats: RunningServer) -> None:
    async with two_machines(start_worker(SLOW, AGENTS, begin=False, liveness=QUICK), worker_nats.url) as plane:
        await until(lambda: heard(plane), "heartbeats")
        os.kill(plane.processes["first"].pid, signal.SIGSTOP)
        await asyncio.sleep(QUICK.latest_s + 2 / PACE)
        os.kill(plane.processes["first"].pid, signal.SIGCONT)
        await all_called_once(plane)


async def test_a_worker_whose_connection_to_nats_is_cut_keeps_its_jobs(
    start_worker: StartWorker, worker_nats: RunningServer
) -> None:
    link = Link("127.0.0.1", urlsplit(worker_nats.url).port or 0)
    url = f"nats://127.0.0.1:{await link.listen()}"
    try:
        async with two_machines(start_worker(SLOW, AGENTS, begin=False, liveness=QUICK), url) as plane:
            await until(lambda: heard(plane), "heartbeats")
            link.become("reset")
            await asyncio.sleep(QUICK.latest_s)
            link.become("open")
            await all_called_once(plane)
    finally:
        await link.close()


async def test_where_nats_shows_workers_to_nobody_todays_rule_holds_and_doctor_says_so(
    tmp_path: Path, worker_redis: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, denied = free_port(), '{ deny: "bw.workers.>" }'
    permissions = f"permissions: {{ publish: {denied}, subscribe: {denied} }}"
    users = f"authorization {{ users: [{{ user: worker, password: secret, {permissions} }}] }}"
    store = f'jetstream {{ store_dir: "{tmp_path / "streams"}", max_file_store: 64GB }}'
    server = start_nats(tmp_path, f'listen: "127.0.0.1:{port}"\n{store}\n{users}\n', port)
    url = f"nats://worker:secret@127.0.0.1:{port}"
    monkeypatch.setenv("BREAKWATER_REDIS_URL", worker_redis.url)
    here = running_worker(
        tmp_path,
        nats_url=url,
        redis_url=worker_redis.url,
        script={"models": HANGS},
        agents=AGENTS,
        begin=False,
        liveness=QUICK,
    )
    try:
        await asyncio.to_thread(server.wait_until_ready)
        async with two_machines(here, url) as plane:
            workers = Workers(plane.worker.redis)
            [found] = [one async for one in redis_findings(PlaneLocation(None)) if one.area == "workers"]
            assert (found.verdict, await heard(plane)) == ("warn", False)
            assert "20 to 25 s" in found.text
            assert "bw.workers.*" in found.remedy
            plane.kill("first")
            await asyncio.sleep(QUICK.latest_s + 2 / PACE)
            assert set(await workers.running()) == {"here-1-1"}
            assert "worker_died" not in plane.log("worker")
    finally:
        server.stop()


async def test_a_job_whose_claim_redis_has_lost_is_not_taken_from_a_worker_that_lives(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Workers, "kept_for_s", AsyncMock(return_value=0.5))
    async with start_worker({"sim/m": model({"requests": [1, 1], "hang_s": 4})}, AGENTS, liveness=QUICK) as plane:
        workers = Workers(plane.worker.redis)
        await workers.beat("dead-1-1", "")
        await plane.publish({"agent": "writer", "job_id": "j1", "prompt": "x"})
        await until(lambda: plane.sim.ledger.totals.in_progress == 1, "the call")
        await plane.worker.redis.client.delete(Claim("j1", "").key)
        others = DeadWorkers(plane.worker, lambda: plane.client, lambda: ["writer"], runs=lambda _: False)
        watching = asyncio.create_task(others.run())
        try:
            await until(lambda: "worker_died" in plane.log("worker"), "that it has looked")
            assert [one["outcome"] for one in (await plane.result("j1"))["attempts"]] == ["success"]
            assert plane.sim.ledger.totals.calls == 1
        finally:
            await background.stop(watching)


async def test_a_job_that_was_delivered_to_a_dead_worker_and_never_claimed_is_delivered_again(
    start_worker: StartWorker,
) -> None:
    async with start_worker({"sim/m": model()}, AGENTS, begin=False) as plane:
        await Workers(plane.worker.redis).beat("dead-1-1", "")
        await plane.publish({"agent": "writer", "job_id": "j1", "prompt": "x"})
        await (await plane.jetstream.pull_subscribe_bind("worker-writer", "JOBS")).fetch(1, timeout=10)
        others = DeadWorkers(plane.worker, lambda: plane.client, lambda: ["writer"], runs=lambda _: False)
        watching = asyncio.create_task(others.run())
        began = asyncio.get_running_loop().time()
        plane.begin()
        try:
            await plane.result("j1")
            assert asyncio.get_running_loop().time() - began < ACK_WAIT_S / 2
        finally:
            await background.stop(watching)
