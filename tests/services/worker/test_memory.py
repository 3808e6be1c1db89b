"""Jobs are freed when they end: reference cycles would keep them, and their texts, until a collection of garbage."""

from __future__ import annotations

import gc
from types import FrameType
from typing import Any

from tests.flow.kit import model
from tests.helpers import until
from tests.services.worker.conftest import StartWorker

SCHEMA = {"type": "object", "required": ["order"]}
RETRY = {"max_attempts": 3, "backoff": "constant", "base_s": 0}
AGENTS: dict[str, Any] = {
    "writer": {"model": "sim/failing", "fallback_models": ["sim/right"], "retry": RETRY},
    "extractor": {"model": "sim/wrong", "output": {"schema": SCHEMA, "native": False}, "retry": RETRY},
    "brief": {"model": "sim/right", "guard": {"max_iterations": 1}, "cache": {"ttl_s": 60}},
}
JOBS: list[dict[str, Any]] = [
    {"agent": "writer"},
    {"agent": "writer", "stream": True},
    {"agent": "writer", "stream": True, "keep_chunks": True},
    {"agent": "extractor"},
    {"agent": "brief", "task_id": "t"},
    {"agent": "brief", "task_id": "t"},
]


def of_jobs(garbage: list[object]) -> list[str]:
    """Returns the types of what this project has made, and its functions that what is left refers to."""
    frames = [thing.f_code for thing in garbage if isinstance(thing, FrameType)]
    return sorted(
        [
            *(type(thing).__name__ for thing in garbage if type(thing).__module__.startswith("breakwater.")),
            *(code.co_qualname for code in frames if "/breakwater/" in code.co_filename),
        ]
    )


async def test_jobs_leave_no_reference_cycles(start_worker: StartWorker) -> None:
    cut = {"answer": '{"order": '}
    models = {
        "sim/failing": model({"rate": 0.5, "status": 500}, {"rate": 0.5, "status": 429}),
        "sim/right": model(answer='{"order": 17}'),
        "sim/wrong": model({"requests": [1, 1], **cut}, {"requests": [3, 3], **cut}, answer='{"order": 17}'),
    }
    async with start_worker(models, AGENTS) as plane:

        async def run(name: str) -> None:
            for number, job in enumerate(JOBS):
                job_id = f"{name}{number}"
                await plane.publish({**job, "prompt": f"Go {name}.", "job_id": job_id})
                await plane.result(job_id)
            await until(lambda: not plane.worker.leases.claims, "all claims to end")

        await run("first")  # what is made once may stay
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            await run("second")
            gc.collect()
            left = of_jobs(gc.garbage)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert left == []
