"""The load: which job is submitted when, by which way; submitting over HTTP, and by another process over NATS."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from breakwater.cli.demo.scenario import LOAD_S, SHARES, jobs_of
from breakwater.cli.errors import CliError
from breakwater.client import ApiClient, ApiError

IN_FLIGHT = 16
"""Jobs that each of the two ways has out at once."""

WAIT_S = 60
TRIES = 5
PAUSE_S = 0.5
START_S = 30.0
"""How long the other process may take to connect."""

_SUBJECTS = ("a folding bicycle", "the new tariff", "a lost parcel", "winter tyres", "a weekend in Ghent", "tea")
_TASKS = (
    "Describe {}.",
    "What should a customer know of {}?",
    "Sum up last week's news about {}.",
    "Compare {} to {}.",
)


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job, and when it is submitted: seconds since the load began, at the earliest."""

    at_s: float
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The whole load: one half for each way."""

    http: tuple[PlannedJob, ...]
    nats: tuple[PlannedJob, ...]

    @property
    def job_ids(self) -> frozenset[str]:
        """Of all jobs."""
        return frozenset(job.body["job_id"] for job in (*self.http, *self.nats))


@dataclass(slots=True)
class Submitted:
    """How many jobs were accepted, and which were not, with the reason."""

    accepted: int = 0
    failed: dict[str, str] = field(default_factory=dict[str, str])


def plan_load(jobs: int, seed: int) -> LoadPlan:
    """Spreads each agent's jobs evenly over the time, and deals all of them out to the two ways in turn."""
    draw = random.Random(seed)  # noqa: S311  the same seed is to give the same load
    planned: list[tuple[float, str]] = []
    for agent in SHARES:
        count = jobs_of(agent, jobs)
        planned += [((index + draw.random()) / count * LOAD_S, agent) for index in range(count)]
    listed = [
        PlannedJob(round(at_s, 3), _body(number, agent, draw)) for number, (at_s, agent) in enumerate(sorted(planned))
    ]
    return LoadPlan(tuple(listed[0::2]), tuple(listed[1::2]))


def _body(number: int, agent: str, draw: random.Random) -> dict[str, Any]:
    subjects = draw.sample(_SUBJECTS, 2)
    return {
        "job_id": f"demo-{number + 1:04d}",
        "agent": agent,
        "prompt": draw.choice(_TASKS).format(*subjects),
        "metadata": {"way": "http" if number % 2 == 0 else "nats"},
    }


def to_lines(jobs: Sequence[PlannedJob]) -> str:
    """Jobs as JSON lines, for another process."""
    return "".join(json.dumps(asdict(job)) + "\n" for job in jobs)


async def submit_over_http(api: ApiClient, jobs: Sequence[PlannedJob], submitted: Submitted) -> None:
    """Submits jobs, each at its time, until all have a response; every other one waits for its result."""
    slots, begun = asyncio.Semaphore(IN_FLIGHT), time.monotonic()

    async def submit(job: PlannedJob, *, wait: bool) -> None:
        try:
            for _ in range(TRIES):
                try:
                    query = {"wait_s": WAIT_S if wait else None}
                    await api.request("POST", "jobs", query=query, body=job.body, timeout_s=WAIT_S + 15)
                except ApiError as error:
                    submitted.failed[job.body["job_id"]] = error.message
                    if error.status < 500:
                        return
                    # The same id again is the same job, so trying again is safe.
                    await asyncio.sleep(PAUSE_S)
                else:
                    submitted.failed.pop(job.body["job_id"], None)
                    submitted.accepted += 1
                    return
        finally:
            slots.release()

    async with asyncio.TaskGroup() as requests:
        for number, job in enumerate(jobs):
            await asyncio.sleep(max(0.0, begun + job.at_s - time.monotonic()))
            await slots.acquire()
            requests.create_task(submit(job, wait=number % 2 == 0))


@asynccontextmanager
async def nats_submitter(
    data_dir: Path, jobs: Sequence[PlannedJob], log_file: Path
) -> AsyncGenerator[Callable[[], Awaitable[Submitted]]]:
    """Runs the other process for as long as the block lasts, connected; yields what has it submit the jobs.

    Raises:
        CliError: it did not come up, or ended early.
    """
    with log_file.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "breakwater.cli.demo.nats_submitter",
            str(data_dir),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the demo, which ends it
        )
    stdout = process.stdout
    assert stdout is not None

    async def submit() -> Submitted:
        said, _ = await process.communicate(to_lines(jobs).encode())
        if not said:
            raise CliError("demo", f"the program that submits jobs over NATS has ended; its log is {log_file}")
        return Submitted(**json.loads(said))

    try:
        async with asyncio.timeout(START_S):
            if not await stdout.readline():
                raise CliError("demo", f"the program that submits jobs over NATS has ended; its log is {log_file}")
        yield submit
    except TimeoutError:
        raise CliError(
            "demo", f"the program that submits jobs over NATS does not connect; its log is {log_file}"
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
