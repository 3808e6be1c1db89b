"""A worker that dies is missed in seconds; one that lives, however it stands still or is cut off, keeps its jobs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from nats.aio.msg import Msg
from pydantic import SecretStr

from breakwater.config import load_config
from breakwater.jobs.rules.workers import LIVENESS
from breakwater.jobs.store.workers import Workers
from breakwater.kernel.nats.subscriber import PullSubscriber
from breakwater.kernel.process.pace import at_pace
from breakwater.kernel.process.settings import Settings
from breakwater.kernel.redis.connection import Redis
from breakwater.services.worker.app import build
from breakwater.services.worker.held_jobs import EarlierMessages
from tests.flow.fixtures import StartPlane
from tests.flow.kit import Plane, model
from tests.helpers import until
from tests.servers import RunningServer

AGENTS = {"writer": {"model": "sim/m", "timeout_s": 60, "concurrency": 8, "retry": {"base_s": 0}}}
HANGS = {"sim/m": model({"requests": [1, 8], "hang_s": 600})}
"""The first calls hang, so that their worker dies in the middle of them."""

MISSED_IN_S = 6.0

PACE = 4
QUICK = at_pace(LIVENESS, PACE)
"""Heartbeats and leases, of all workers that do not show how soon they are missed in production."""

QUICK_WORKERS = {"environment": {"BREAKWATER_PACE": str(PACE)}}


async def registered(plane: Plane, workers: int) -> bool:
    """Whether so many workers have sent a heartbeat, and NATS shows them to others."""
    redis = Redis(plane.environment["BREAKWATER_REDIS_URL"])
    try:
        running = await Workers(redis).running()
    finally:
        await redis.close()
    return len(running) == workers and all(running.values())


async def calling(plane: Plane, calls: int) -> None:
    await until(lambda: plane.sim.ledger.totals.in_progress >= calls, f"{calls} calls under way")


async def test_a_worker_looks_for_held_jobs_before_it_reads_any(start_plane: StartPlane) -> None:
    steps: list[str] = []

    def noted(method: Callable[..., Awaitable[None]], step: str) -> Callable[..., Awaitable[None]]:
        async def noting(*arguments: Any) -> None:
            await method(*arguments)
            steps.append(step)

        return noting

    async with start_plane(HANGS, AGENTS, services=()) as plane:
        settings = Settings(
            nats_url=SecretStr(plane.environment["BREAKWATER_NATS_URL"]),
            redis_url=SecretStr(plane.environment["BREAKWATER_REDIS_URL"]),
        )
        with (
            patch.object(EarlierMessages, "look", noted(EarlierMessages.look, "look")),
            patch.object(PullSubscriber, "start", noted(PullSubscriber.start, "read")),
        ):
            app = build(settings, load_config(Path(plane.environment["BREAKWATER_CONFIG"])))
            running = asyncio.create_task(app.run())
            await until(app.is_alive, "the worker")
            app.exit()
            await running
    assert steps[0] == "look"
    assert "read" in steps
    assert "look" not in steps[steps.index("read") :]


async def test_the_jobs_of_a_killed_worker_are_answered_by_another_within_six_seconds_with_the_lost_calls_on_record(
    start_plane: StartPlane,
) -> None:
    async with start_plane(HANGS, AGENTS, services=("worker",)) as plane:
        for number in range(8):
            await plane.publish({"agent": "writer", "job_id": f"j{number}", "prompt": "x"})
        await calling(plane, 8)
        plane.start("worker", "second")
        await until(lambda: registered(plane, 2), "their heartbeats")
        plane.kill("worker")
        killed = asyncio.get_running_loop().time()
        results = [await plane.result(f"j{number}") for number in range(8)]
        assert asyncio.get_running_loop().time() - killed < MISSED_IN_S
        for number, result in enumerate(results):
            assert [a["outcome"] for a in result["attempts"]] == ["worker_lost", "success"]
            assert result["attempts"][0]["cost_basis"] == "estimated"
            recorded = await plane.attempts("writer", f"j{number}")
            assert [a["attempt_id"] for a in recorded] == [f"j{number}:1", f"j{number}:2"]
        records = await plane.messages("EVENTS", "bw.executions.>", at_least=8)
        assert Counter(record["execution_id"] for record in records) == {f"j{number}": 1 for number in range(8)}


async def test_a_streamed_answer_goes_on_within_six_seconds(start_plane: StartPlane) -> None:
    models = {"sim/m": model(answer="one two three four " * 20, stream={"tokens_per_s": 10})}
    agents = {"writer": AGENTS["writer"] | {"on_stream_break": "continue"}}
    async with start_plane(models, agents, services=("worker",)) as plane:
        chunks: list[float] = []

        async def hear(_message: Msg) -> None:
            chunks.append(asyncio.get_running_loop().time())

        await plane.client.subscribe("bw.chunks.writer.j1", cb=hear)
        await plane.publish({"agent": "writer", "job_id": "j1", "prompt": "x", "stream": True})
        await until(lambda: len(chunks) > 3, "some of the answer")
        plane.start("worker", "second")
        await until(lambda: registered(plane, 2), "their heartbeats")
        plane.kill("worker")
        killed, heard = asyncio.get_running_loop().time(), len(chunks)
        await until(lambda: len(chunks) > heard, "more of the answer")
        assert chunks[heard] - killed < MISSED_IN_S


async def test_a_worker_that_is_alone_takes_its_own_jobs_over_when_it_is_started_again(start_plane: StartPlane) -> None:
    async with start_plane(
        {"sim/m": model({"requests": [1, 1], "hang_s": 600})}, AGENTS, services=("worker",)
    ) as plane:
        await plane.publish({"agent": "writer", "job_id": "j1", "prompt": "x"})
        await calling(plane, 1)
        await until(lambda: registered(plane, 1), "its heartbeat")
        plane.kill("worker")
        killed = asyncio.get_running_loop().time()
        plane.start("worker", "second")
        result = await plane.result("j1")
        assert asyncio.get_running_loop().time() - killed < MISSED_IN_S
        assert [a["outcome"] for a in result["attempts"]] == ["worker_lost", "success"]


async def test_workers_that_live_keep_their_jobs_while_nats_is_started_again_or_they_stand_still(
    start_plane: StartPlane, own_nats_server: RunningServer
) -> None:
    models = {"sim/m": model({"requests": [1, 8], "hang_s": 6})}
    async with start_plane(models, AGENTS, services=(), **QUICK_WORKERS) as plane:
        for name in ("worker", "second"):
            plane.start("worker", name)
            await plane.ready(name)
        for number in range(8):
            await plane.publish({"agent": "writer", "job_id": f"j{number}", "prompt": "x"})
        await calling(plane, 8)
        await until(lambda: registered(plane, 2), "their heartbeats")
        os.kill(plane.processes["worker"].pid, signal.SIGSTOP)
        own_nats_server.kill()
        await asyncio.sleep(1 / PACE)
        await own_nats_server.restart_async()
        await asyncio.sleep(QUICK.latest_s + 1 / PACE)
        os.kill(plane.processes["worker"].pid, signal.SIGCONT)
        for number in range(8):
            assert [a["outcome"] for a in (await plane.result(f"j{number}"))["attempts"]] == ["success"]
        assert plane.sim.ledger.totals.calls == 8
