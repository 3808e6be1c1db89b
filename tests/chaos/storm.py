"""A long storm of failures, caps, holds, stopped tasks and kills, whose record is replayed under its own config."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nats.aio.msg import Msg

from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.lookup import Lookup
from tests.chaos.identity import KeptStreams, ReplayedRecord, replayed_record
from tests.chaos.plane import Chaos, chaos_plane
from tests.flow.kit import model
from tests.server_sources import Servers

KILLED = ("worker", "breaker", "worker-2", "budget", "worker", "alerter", "worker-2", "sink")
"""The services that are killed, one after another."""

KILL_EVERY_S = 20.0
STEPS = 8
"""The jobs of a task."""
AGENTS = ("writer", "capped", "stepper", "held")


def models(seconds: float) -> dict[str, Any]:
    """Returns the models: one that fails for a while each minute, its fallback, and one that is held now and then."""
    outages = [{"from_s": at + 5.0, "to_s": at + 13.0, "rate": 0.8, "status": 503} for at in range(0, int(seconds), 60)]
    busy = [
        {"from_s": at + 30.0, "to_s": at + 34.0, "status": 429, "retry_after_s": 2} for at in range(0, int(seconds), 60)
    ]
    latency = {"p50": 40, "p95": 120}
    return {
        "sim/m": model(*outages, {"rate": 0.05, "status": 500}, {"rate": 0.01, "status": 400}, latency_ms=latency),
        "sim/n": model({"rate": 0.05, "status": 503}, latency_ms=latency),
        "sim/held": model(*busy, {"rate": 0.01, "status": 429, "retry_after_s": 1}, latency_ms=latency),
    }


def agents(jobs: int) -> dict[str, Any]:
    """Returns the agents, whose caps are reached at about two thirds of the jobs."""
    common = {"max_tokens": 60, "concurrency": 40, "timeout_s": 5, "total_timeout_s": 120}
    retry = {"max_attempts": 3, "base_s": 0.1, "max_delay_s": 1}
    cap = f"{jobs / 4 * 0.000042 * 2 / 3:.6f}"
    return {
        "writer": {
            **common,
            "model": "sim/m",
            "fallback_models": ["sim/n"],
            "retry": retry,
            "breaker": {"consecutive_failures": 4, "failure_rate": 0.6, "within_s": 10, "cooldown_s": 2},
            "budget": {"daily_usd": 1000, "enforcement": "soft"},
        },
        "capped": {
            **common,
            "model": "sim/n",
            "retry": retry,
            "budget": {"daily_usd": cap, "enforcement": "hard", "soft_at_percent": [50, 80]},
        },
        "stepper": {
            **common,
            "model": "sim/m",
            "retry": {**retry, "max_attempts": 2},
            "breaker": {"consecutive_failures": 6, "cooldown_s": 3, "cooldown_jitter": 0.5},
            "guard": {"max_iterations": 6, "consecutive_failures": 2, "same_error": 3},
        },
        "held": {**common, "model": "sim/held", "retry": retry, "breaker": "off"},
    }


@dataclass(frozen=True, slots=True)
class StormOutcome:
    """The outcome of a storm.

    Attributes:
        jobs: how many jobs were accepted.
        took_s: from the first job to the last result, in seconds.
        kills: how many services were killed.
        reasons: the ends of jobs, by reason; None for those that were answered.
        replayed: the agreement of the record with its replay.
    """

    jobs: int
    took_s: float
    kills: int
    reasons: Counter[str | None]
    replayed: ReplayedRecord


async def run_storm(
    directory: Path, source: Servers, *, jobs: int, per_s: float, seed: int, at_once: int = 1, keep: Path | None = None
) -> StormOutcome:
    """Runs a storm to its end, and replays its record, which is also copied to `keep`, unless that is None."""
    planned_s = jobs / per_s
    async with chaos_plane(
        directory,
        source,
        nodes=1,
        disks={},
        clocks={},
        models=models(planned_s * 4),
        agents=agents(jobs),
    ) as chaos:
        began = time.monotonic()
        chaos.plane.sim.restart_clock()
        killing = asyncio.create_task(_kill(chaos))
        job_ids = await _submit(chaos, jobs, per_s, at_once, random.Random(seed))
        killing.cancel()
        results = [await chaos.plane.result(job_id, timeout_s=300) for job_id in job_ids]
        took_s = time.monotonic() - began
        await chaos.last(chaos.stuck, lambda consumers: not consumers, 120)
        lookup, config = Lookup(lambda: chaos.plane.client), chaos.plane.directory / "breakwater.yaml"
        if keep is not None:
            await KeptStreams(keep).keep(lookup, config)
        replayed = await replayed_record(lookup, config)
    reasons = Counter[str | None](result["reason"] for result in results)
    return StormOutcome(jobs, took_s, int(took_s / KILL_EVERY_S), reasons, replayed)


async def _kill(chaos: Chaos) -> None:
    for part in itertools.cycle(KILLED):
        await asyncio.sleep(KILL_EVERY_S)
        chaos.plane.kill(part)
        await asyncio.sleep(0.5)
        chaos.plane.start(part.partition("-")[0], part)


class _Tasks:
    """The tasks of the storm: each asks for its next job once it has the result of one before, as agents do.

    Args:
        at_once: how many jobs of a task run at once.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._idle: deque[str] = deque()
        self._steps: Counter[str] = Counter()
        self._task_of: dict[str, str] = {}

    def next_for(self, job_id: str) -> str:
        """Returns the task of a job: one that waits for no result, or a new one."""
        if not self._idle:
            self._idle.extend([f"t{len(self._steps)}"] * self._at_once)
        task = self._idle.popleft()
        self._steps[task] += 1
        self._task_of[subjects.result(job_id)] = task
        return task

    async def on_result(self, message: Msg) -> None:
        """Lets a task go on, unless it has all of its jobs."""
        task = self._task_of.pop(message.subject, None)
        if task is not None and self._steps[task] + self._idle.count(task) < STEPS:
            self._idle.append(task)


async def _submit(chaos: Chaos, jobs: int, per_s: float, at_once: int, chance: random.Random) -> list[str]:
    job_ids: list[str] = []
    tasks = _Tasks(at_once)
    await chaos.plane.client.subscribe("bw.results.*", cb=tasks.on_result)
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with asyncio.TaskGroup() as group:
        for number in range(jobs):
            await asyncio.sleep(began + number / per_s - loop.time())
            job = {"agent": chance.choice(AGENTS), "job_id": f"j{number}", "prompt": "x" * 300}
            if job["agent"] == "stepper":
                job["task_id"] = tasks.next_for(job["job_id"])
            job_ids.append(job["job_id"])
            group.create_task(_publish(chaos, job))
    return job_ids


async def _publish(chaos: Chaos, job: Mapping[str, str]) -> None:
    while not await chaos.publish(job):
        await asyncio.sleep(0.5)
