"""What a job that succeeds costs the worker, in counts that a busy machine changes by less than a hundredth.

They see a step more, not a slower one: what a job costs in CPU time is measured by `python -m bench.plane`. A
figure that is a tenth over its budget is a regression; one that has become a tenth less lowers the budget:
`pytest tests/services/worker/test_cost_of_a_job.py -rP` prints them.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import nats
import pytest
from nats.aio.msg import Msg

from bench.trace_job import ProviderInAThread, Steps, traces
from breakwater.calls.assignment import Assignment
from breakwater.kernel.redis.connection import KEPT_SINCE
from breakwater.limits.store.budget_counters import BudgetCounters
from tests.flow.kit import model
from tests.helpers import until
from tests.server_sources import RunningServer
from tests.services.worker.conftest import StartWorker

ROOT = Path(__file__).resolve().parents[3]
OURS = (f"{ROOT}/libs/breakwater/", f"{ROOT}/services/")
NOT_THE_WORKERS = f"{ROOT}/libs/breakwater/local/"
"""The simulated provider, which runs in this thread, too."""

JOBS = 20
CAP = {"daily_usd": 1000, "monthly_usd": 10_000, "enforcement": "hard"}
AGENTS = {"writer": {"model": "sim/m", "budget": CAP, "rate_limit": {"requests_per_minute": 100_000}}}

MEASURED = {"instructions of our Python": 26_500, "commands of Redis": 59.5, "messages to NATS": 11}
"""Of a job with a breaker, a guard, caps for a day and a month, a rate limit and a retry budget. Instructions are those
of `libs` and `services`, which also write to NATS and read it, copy messages and write their JSON, read what Redis
answers and send requests to providers, all of which libraries would do with more instructions of their own; commands
are also those that scripts run; messages are those that the server is sent."""

STEPS = {"awaits": 135, "wake-ups": 17.5, "tasks": 4, "futures": 14}
"""Of a job alone, as `python -m bench.trace_job` counts them in the whole process, without the worker's upkeep. It also
counts timers, which have no budget here: a slow job has more of them."""

TOLERANCE = 0.1
LEAST_TOLERANCE = 1
"""A task more or less depends on what else goes to Redis at the same time."""


class Instructions:
    """Counts the bytecode instructions of our files in this thread while it is on."""

    def __init__(self) -> None:
        self.count = 0
        self._ours: dict[CodeType, bool] = {}

    def __enter__(self) -> Instructions:
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        del event, argument
        code = frame.f_code
        if code not in self._ours:
            name = code.co_filename
            self._ours[code] = name.startswith(OURS) and not name.startswith(NOT_THE_WORKERS)
        if not self._ours[code]:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._ran

    def _ran(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        del frame, argument
        self.count += event == "opcode"
        return self._ran


def jobs_in_memory() -> int:
    """Counts also those that earlier tests of this process keep."""
    return sum(type(thing) is Assignment for thing in gc.get_objects())


@pytest.mark.long(about_s=5)
async def test_a_job_costs_what_it_did(start_worker: StartWorker, worker_nats: RunningServer) -> None:
    listener, messages = await nats.connect(worker_nats.url), Counter[str]()

    async def heard(message: Msg) -> None:
        messages["messages to NATS"] += message.subject.startswith(("bw.", "$JS.ACK."))

    await listener.subscribe(">", cb=heard)
    async with start_worker({"sim/m": model()}, AGENTS, budgets={"global": CAP}) as plane:
        # As the data of any plane is that has run for some minutes: no claim can have been lost lately.
        await plane.worker.redis.client.set(KEPT_SINCE, 1)
        # As the budget service does when it starts: a hard cap can't be held by counters that may be lost.
        counters = BudgetCounters(plane.worker.redis, plane.worker.config.budgets.zone)
        await counters.fill(None, "log", 0, counters.periods(datetime.now(UTC)), {}, {})

        async def done_by_servers() -> Counter[str]:
            await listener.flush()
            server = await plane.worker.redis.client.info("stats")
            return messages + Counter({"commands of Redis": server["total_commands_processed"]})

        async def run(name: str) -> None:
            for number in range(JOBS):
                result = await plane.run({"agent": "writer", "job_id": f"{name}-{number}", "prompt": "x"})
                assert result["status"] == "succeeded"
            while await plane.pending_jobs():
                await asyncio.sleep(0.01)

        await run("first")
        before = await done_by_servers()
        gc.collect()
        jobs_before = jobs_in_memory()
        gc.disable()
        try:
            with Instructions() as instructions:
                await run("then")
            used = await done_by_servers()
            # Without a cycle, a job is gone with its last reference: it needs no garbage collector.
            await until(lambda: jobs_in_memory() <= jobs_before, timeout_s=10)
        finally:
            gc.enable()
    await listener.close()
    used.subtract(before)
    used["instructions of our Python"] = instructions.count
    check({name: count / JOBS for name, count in used.items()}, MEASURED)


@pytest.mark.long(about_s=8)
async def test_a_job_takes_the_steps_it_did(
    tmp_path: Path, own_nats_server: RunningServer, own_redis_server: RunningServer
) -> None:
    with ProviderInAThread() as provider:
        made = await traces(Steps, tmp_path, own_nats_server.url, own_redis_server.url, provider.url)
    # Background work of the libraries may come in between, but hardly in each of the jobs.
    check({step: min(trace.steps[step] for trace in made) for step in STEPS}, STEPS)


def check(counts: Mapping[str, float], budgets: Mapping[str, float]) -> None:
    print(counts)
    assert counts.keys() == budgets.keys()
    tolerances = {name: max(budget * TOLERANCE, LEAST_TOLERANCE) for name, budget in budgets.items()}
    assert {name: count for name, count in counts.items() if abs(count - budgets[name]) > tolerances[name]} == {}
