"""The order of a job's states, as subscribers receive them."""

from __future__ import annotations

import json
from collections import defaultdict
from datetime import timedelta
from typing import Any

from nats.aio.msg import Msg

from tests.flow.kit import model
from tests.helpers import until
from tests.services.worker.conftest import StartWorker

AGENTS: dict[str, Any] = {
    "writer": {
        "model": "sim/m",
        "retry": {"max_attempts": 2, "backoff": "constant", "base_s": 0.01},
        "breaker": "off",
        "concurrency": 1,
    }
}
JOBS: dict[str, dict[str, Any]] = {
    "retried": {"prompt": "x", "tenant": "acme", "task_id": "t1", "plan_id": "p1"},
    "invalid": {"prompt": 3},
    "planned": {"prompt": "x", "dry_run": True},
    "dependent": {"prompt": "x", "tenant": "acme", "depends_on": ["retried"]},
    "refused": {"prompt": "x", "depends_on": ["invalid"]},
}
ENDS = {"succeeded", "dead_lettered", "cancelled"}


async def test_queued_is_the_first_state_of_every_job_and_its_end_the_last(start_worker: StartWorker) -> None:
    steps: dict[str, list[dict[str, Any]]] = defaultdict(list)

    async def listen(message: Msg) -> None:
        step = json.loads(message.data)
        steps[step["execution_id"]].append(step)

    script = {"sim/m": model({"requests": [1, 1], "status": 503})}
    async with start_worker(script, AGENTS, begin=False) as plane:
        await plane.client.subscribe("bw.progress.>", cb=listen)
        for job_id, job in JOBS.items():
            await plane.publish({"agent": "writer", "job_id": job_id, **job}, "writer")
        plane.begin()
        for job_id in JOBS:
            await plane.result(job_id)
        # Further messages of jobs that have ended are answered, and are no step of theirs.
        again = await plane.client.subscribe("bw.replies.again")
        for job_id in ("retried", "invalid"):
            job = {"agent": "writer", "job_id": job_id, "reply_to": "bw.replies.again", **JOBS[job_id]}
            await plane.publish(job, "writer")
            await again.next_msg(timeout=60)
        await until(lambda: all(steps[job_id][-1]["state"] in ENDS for job_id in JOBS), "the last steps")
        changes = await plane.messages("EVENTS", "bw.plans.p1", at_least=2)
    assert [(one["from_state"], one["to_state"], one["reason"]) for one in changes] == [
        (None, "running", "the job 'retried' was dispatched"),
        ("running", "succeeded", "the job 'retried' ended succeeded"),
    ]
    assert {one["execution_id"] for one in changes} == {"retried"}
    for job_id in JOBS:
        states = [step["state"] for step in steps[job_id]]
        times = [step["at"] for step in steps[job_id]]
        assert states[0] == "queued", (job_id, states)
        assert "queued" not in states[1:], (job_id, states)
        assert [state for state in states if state in ENDS] == states[-1:], (job_id, states)
        assert times == sorted(times), (job_id, times)
    assert [step["state"] for step in steps["retried"]].count("retried") == 1
    belongs_to = {"tenant": "acme", "task_id": "t1", "plan_id": "p1", "run_id": "acme/t1", "parent_execution_id": None}
    for step in steps["retried"]:
        assert {name: step[name] for name in belongs_to} == belongs_to, step


async def test_no_step_is_earlier_than_queued_where_the_clock_of_nats_is_ahead(start_worker: StartWorker) -> None:
    steps: list[dict[str, Any]] = []

    async def listen(message: Msg) -> None:
        steps.append(json.loads(message.data))

    async with start_worker({"sim/m": model()}, AGENTS, fake_clock=True) as plane:
        plane.clock.set_ahead_s = -timedelta(minutes=5).total_seconds()
        await plane.client.subscribe("bw.progress.>", cb=listen)
        result = await plane.run({"agent": "writer", "job_id": "j1", "prompt": "x"})
        await until(lambda: steps[-1]["state"] == "succeeded", "the last step")
    times = [step["at"] for step in steps]
    assert times == sorted(times)
    assert result["queued_at"] <= result["dispatched_at"] <= result["completed_at"]
