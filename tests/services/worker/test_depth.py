"""What is nested deeper than all on its way can read is no answer, and is not published."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from breakwater.jobs.contract.job import Job
from breakwater.kernel.json_values import MAX_DEPTH
from tests.any_answers import check_that_all_read_it
from tests.flow.kit import model
from tests.services.worker.conftest import StartWorker
from tests.services.worker.harness import WorkerPlane
from tests.services.worker.nested import nested

COST = {"cost_per_call_usd": "0.5"}
PROGRAMS = {
    "callable": {"kind": "python", "callable": "tests.services.worker.nested:answer", **COST},
    "program": {"kind": "process", "command": [sys.executable, str(Path(__file__).with_name("nested.py"))], **COST},
}
AGENT = {"retry": {"max_attempts": 1}, "breaker": "off", "guard": "off"}
AGENTS = {
    **{name: {"provider": name, **AGENT} for name in PROGRAMS},
    "cached": {"provider": "callable", **AGENT, "cache": {"ttl_s": 60}},
    "private": {"provider": "callable", **AGENT, "persist_responses": False},
}
BOUNDS = [0, 63, 64, 65, MAX_DEPTH, MAX_DEPTH + 1, 190, *range(196, 203), *range(250, 258), 400, 1200]


async def _check(plane: WorkerPlane, job: Mapping[str, Any]) -> None:
    result = await plane.run(job)
    assert result["cache_hit"] or [one["cost"] for one in result["attempts"]] == ["0.500000000"], "it is paid for once"
    if job["input"]["depth"] > MAX_DEPTH:
        assert result["status"] == "dead_lettered"
    elif job["agent"] == "private":
        assert "output" not in result
    else:
        assert result["output"] == nested(**job["input"])
    await check_that_all_read_it(plane, job["agent"], job["job_id"])


async def test_what_is_published_of_an_answer_of_any_depth_can_be_read(start_worker: StartWorker) -> None:
    loop, count = asyncio.get_running_loop(), 0
    async with start_worker({"sim/m": model()}, AGENTS, more_providers=PROGRAMS) as plane:

        @settings(suppress_health_check=list(HealthCheck))
        @given(
            st.sampled_from(sorted(AGENTS)),
            st.sampled_from(["lists", "objects", "both"]),
            st.sampled_from(BOUNDS) | st.integers(0, 300),
        )
        def check(agent: str, shape: str, depth: int) -> None:
            nonlocal count
            count += 1
            job = {"agent": agent, "job_id": f"j{count}", "input": {"shape": shape, "depth": depth}}
            asyncio.run_coroutine_threadsafe(_check(plane, job), loop).result(60)

        await asyncio.to_thread(check)
        assert not [line for line in plane.logs if line["event"] in {"answer_not_read", "job_handling_failed"}]


@pytest.mark.parametrize("depth", [100, 190, 195, 196, 197, 198, 199])
async def test_all_that_is_published_of_a_deep_job_that_is_accepted_can_be_read(
    start_worker: StartWorker, depth: int
) -> None:
    deep = nested("both", depth)
    jobs: list[dict[str, Any]] = [
        {"agent": "program", "input": {"shape": "lists", "depth": 0, "a": deep}},
        {"agent": "program", "input": {"shape": "lists", "depth": 0}, "metadata": {"a": deep}},
        {"agent": "chat", "prompt": "x", "params": {"a": deep}},
        {"agent": "chat", "messages": [{"role": "user", "content": [{"type": "text", "text": "x", "a": deep}]}]},
    ]
    agents = {**AGENTS, "chat": {"model": "sim/m", **AGENT}}
    async with start_worker({"sim/m": model()}, agents, more_providers=PROGRAMS) as plane:
        for number, job in enumerate(jobs):
            job["job_id"] = f"j{number}"
            try:
                Job.model_validate_json(json.dumps(job))
            except ValidationError:
                assert depth > MAX_DEPTH
                continue
            await plane.run(job)
            await check_that_all_read_it(plane, job["agent"], job["job_id"])
        assert not [line for line in plane.logs if line["event"] == "job_handling_failed"]
