"""Crashes and outages: nothing accepted is lost, and nothing is recorded twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import nats.errors
import nats.js.errors
import pytest

from breakwater.kernel.nats.topology import ACK_WAIT_S
from breakwater.kernel.process.background import stop
from breakwater.kernel.types import format_time
from tests.flow.fixtures import StartPlane
from tests.flow.kit import model, seconds_between
from tests.helpers import until
from tests.servers import RunningServer

OUTAGE_S = 1.5
"""Several retries long."""


async def test_a_stopping_worker_gives_its_jobs_back_at_once(start_plane: StartPlane) -> None:
    models = {"sim/m": model({"requests": [1, 1], "hang_s": 600})}
    agents = {"writer": {"model": "sim/m", "timeout_s": 300}}
    limits = {"drain_s": 0.5}
    async with start_plane(models, agents, services=("worker",), limits=limits) as plane:
        await plane.publish({"agent": "writer", "job_id": "j1", "prompt": "x"})

        async def calling() -> bool:
            return plane.sim.ledger.totals.in_progress >= 1

        await until(calling, what="a call under way")
        assert await plane.terminate("worker") == 0
        stopped = format_time(datetime.now(UTC))
        plane.start("worker", "second")
        result = await plane.result("j1")
        assert [a["outcome"] for a in result["attempts"]] == ["worker_lost", "success"]
        assert seconds_between(stopped, result["completed_at"]) < ACK_WAIT_S


@pytest.mark.chaos
async def test_outages_of_redis_and_nats_lose_nothing_and_are_reported_once(
    start_plane: StartPlane, own_nats_server: RunningServer, own_redis_server: RunningServer
) -> None:
    agents = {"writer": {"model": "sim/m", "concurrency": 8, "breaker": "off"}}
    async with start_plane({"sim/m": model(latency_ms=30)}, agents) as plane:
        accepted: list[str] = []
        load = asyncio.create_task(_load(plane, accepted))
        await plane.result("j1")  # the worker is up
        for server in (own_redis_server, own_nats_server):
            before = len(accepted)
            await until(lambda before=before: _more_than(accepted, before + 10), what="load")
            server.kill()
            await asyncio.sleep(OUTAGE_S)
            await server.restart_async()
        before = len(accepted)
        await until(lambda: _more_than(accepted, before + 10), what="load after the outages")
        await stop(load)
        results = [await plane.result(job_id) for job_id in accepted]
        assert {result["status"] for result in results} == {"succeeded"}

        async def recorded() -> Counter[str] | None:
            records = await plane.messages("EVENTS", "bw.executions.>")
            executions = Counter(record["execution_id"] for record in records)
            return executions if executions.keys() >= set(accepted) else None

        # A result may be there before its record. As the load was stopped, one more job may have been stored than its
        # submitter was told of: the number of records says nothing.
        executions = await until(recorded, what="a record of each accepted job")
        assert executions == dict.fromkeys(executions, 1)
        lines = plane.log("worker").splitlines()
        assert 1 <= sum('"unavailable"' in line for line in lines) <= 6, plane.log("worker")
        assert sum('"available_again"' in line for line in lines) >= 1


async def _more_than(items: list[str], number: int) -> bool:
    return len(items) > number


async def _load(plane: Any, accepted: list[str]) -> None:
    """Publishes jobs without end; what was acknowledged is accepted, the rest is tried again under its id."""
    number = 0
    while True:
        number += 1
        job = {"agent": "writer", "job_id": f"j{number}", "prompt": "x"}
        while True:
            try:
                # What a killed NATS had not answered is never answered.
                await plane.publish(job, timeout_s=2, **{"Nats-Msg-Id": f"j{number}"})
            except (TimeoutError, nats.errors.Error, nats.js.errors.Error):
                await asyncio.sleep(0.2)
            else:
                break
        accepted.append(f"j{number}")
        await asyncio.sleep(0.05)
