"""A worker whose streams are full: it waits with what it has, and nothing is called or lost meanwhile."""

from __future__ import annotations

import pytest

from tests.flow.kit import COST, model
from tests.helpers import until
from tests.services.worker.conftest import StartWorker
from tests.services.worker.harness import WorkerPlane

MODELS = {"sim/good": model(), "sim/bad": model({"status": 401})}
AGENTS = {"good": {"model": "sim/good", "concurrency": 1}, "bad": {"model": "sim/bad", "concurrency": 1}}


async def limit(plane: WorkerPlane, stream: str, max_bytes: int) -> None:
    config = (await plane.jetstream.stream_info(stream)).config
    await plane.jetstream.update_stream(config.evolve(max_bytes=max_bytes))


@pytest.mark.parametrize(
    ("stream", "agent", "status"),
    [("EVENTS", "good", "succeeded"), ("RESULTS", "good", "succeeded"), ("DLQ", "bad", "dead_lettered")],
)
async def test_jobs_wait_for_room_with_one_call_and_one_record(
    start_worker: StartWorker, stream: str, agent: str, status: str
) -> None:
    async with start_worker(MODELS, AGENTS) as plane:
        await limit(plane, stream, 1)
        for job_id in ("j1", "j2"):
            await plane.publish({"agent": agent, "job_id": job_id, "prompt": "x"})
        await until(lambda: "limits.*_max_bytes is raised" in plane.log("worker"), "the worker to say so")
        assert (plane.sim.ledger.totals.calls, await plane.pending_jobs()) == (1, 2)
        await limit(plane, stream, 1_000_000)
        for job_id in ("j1", "j2"):
            result = await plane.result(job_id)
            assert (result["status"], result["attempts_count"]) == (status, 1)
            assert result["total_cost"] == (COST if status == "succeeded" else "0.000000000")
        assert plane.sim.ledger.totals.calls == 2
        assert len(await plane.messages("EVENTS", f"bw.executions.{agent}.*", at_least=2)) == 2
        assert "available_again" in plane.log("worker")
