"""Streams and crashes: what another worker makes of an answer of which some is out."""

from __future__ import annotations

import json
from typing import Any

from tests.flow.kit import model
from tests.helpers import until
from tests.services.worker.conftest import StartWorker
from tests.services.worker.harness import WorkerPlane

ANSWER = "".join(f"{number:03d} " for number in range(60))
STALLED: dict[str, Any] = {"stream": "stall", "after_chunks": 30, "requests": [1, 1]}
JOB = {"agent": "writer", "job_id": "j1", "prompt": "Count.", "stream": True}


async def interrupted(plane: WorkerPlane, after: int) -> None:
    """Runs the job until its provider has sent so many chunks, and the worker has stopped."""
    seen: list[bytes] = []

    async def note(message: Any) -> None:
        seen.append(message.data)

    await plane.client.subscribe("bw.chunks.>", cb=note)
    await plane.publish(JOB)
    await until(lambda: len(plane.sim.ledger.calls) == 1 and b"".join(seen).count(b'"delta"') > after)
    await plane.end()


async def test_an_answer_that_was_begun_ends_with_its_worker(start_worker: StartWorker) -> None:
    async with start_worker({"sim/m": model(STALLED, answer=ANSWER)}, {"writer": {"model": "sim/m"}}) as plane:
        await interrupted(plane, after=25)
        plane.begin()
        result = await plane.result("j1")
    [attempt] = result["attempts"]
    assert (result["status"], result["reason"]) == ("dead_lettered", "worker_lost")
    assert (attempt["outcome"], attempt["cost_basis"]) == ("worker_lost", "estimated")
    assert attempt["first_token_ms"] is not None
    assert len(plane.sim.ledger.calls) == 1


async def test_another_worker_continues_an_answer_that_was_begun(start_worker: StartWorker) -> None:
    agent = {"model": "sim/m", "on_stream_break": "continue", "retry": {"backoff": "constant", "base_s": 0}}
    async with start_worker({"sim/m": model(STALLED, answer=ANSWER)}, {"writer": agent}) as plane:
        seen: list[dict[str, Any]] = []

        async def note(message: Any) -> None:
            seen.append(json.loads(message.data))

        await plane.client.subscribe("bw.chunks.>", cb=note)
        await interrupted(plane, after=25)
        plane.begin()
        result = await plane.result("j1")
        await until(lambda: seen[-1]["chunks"][-1]["choices"] == [])
    assert (result["status"], result["output"]) == ("succeeded", ANSWER)
    assert [attempt["outcome"] for attempt in result["attempts"]] == ["worker_lost", "success"]
    assert [message["number"] for message in seen] == list(range(1, len(seen) + 1))
    choices = [choice for message in seen for chunk in message["chunks"] for choice in chunk["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == ANSWER
    assert len(plane.sim.ledger.calls) == 2


async def test_an_answer_that_was_not_begun_is_asked_for_again(start_worker: StartWorker) -> None:
    agent = {"model": "sim/m", "retry": {"backoff": "constant", "base_s": 0}}
    faults = model({**STALLED, "after_chunks": 0}, answer=ANSWER)
    async with start_worker({"sim/m": faults}, {"writer": agent}) as plane:
        await plane.publish(JOB)
        await until(lambda: len(plane.sim.ledger.calls) == 1)
        await plane.end()
        plane.begin()
        result = await plane.result("j1")
    assert (result["status"], result["output"]) == ("succeeded", ANSWER)
    assert [attempt["outcome"] for attempt in result["attempts"]] == ["worker_lost", "success"]
