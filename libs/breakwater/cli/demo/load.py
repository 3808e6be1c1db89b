"""The load: which job is handed in when and by which way, and handing in over HTTP."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp

from breakwater.cli.demo.scenario import LOAD_S, SHARES, jobs_of

IN_FLIGHT = 16
"""Jobs that each of the two ways has out at once."""

WAIT_S = 60
TRIES = 5
PAUSE_S = 0.5

_SUBJECTS = ("a folding bicycle", "the new tariff", "a lost parcel", "winter tyres", "a weekend in Ghent", "tea")
_TASKS = (
    "Describe {}.",
    "What should a customer know of {}?",
    "Sum up last week's news about {}.",
    "Compare {} to {}.",
)


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job, and when it is handed in: seconds since the load began, at the earliest."""

    at_s: float
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole load: one half for each way."""

    http: tuple[PlannedJob, ...]
    nats: tuple[PlannedJob, ...]

    @property
    def job_ids(self) -> frozenset[str]:
        """Of all jobs."""
        return frozenset(job.body["job_id"] for job in (*self.http, *self.nats))


@dataclass(slots=True)
class Handed:
    """What became of handing jobs in: how many were accepted, and which were not, with the reason."""

    accepted: int = 0
    failed: dict[str, str] = field(default_factory=dict[str, str])


def plan_load(jobs: int, seed: int) -> Plan:
    """Spreads each agent's jobs evenly over the time, and deals all of them out to the two ways in turn."""
    draw = random.Random(seed)  # noqa: S311  the same seed is to give the same load
    planned: list[tuple[float, str]] = []
    for agent in SHARES:
        count = jobs_of(agent, jobs)
        planned += [((index + draw.random()) / count * LOAD_S, agent) for index in range(count)]
    listed = [
        PlannedJob(round(at_s, 3), _body(number, agent, draw)) for number, (at_s, agent) in enumerate(sorted(planned))
    ]
    return Plan(tuple(listed[0::2]), tuple(listed[1::2]))


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


class HttpSubmitter:
    """Hands jobs in over HTTP; every other one waits for its result in the same request."""

    def __init__(self, url: str, api_key: str) -> None:
        self._url = f"{url}/api/v1/jobs"
        self._headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        self._slots = asyncio.Semaphore(IN_FLIGHT)
        self.handed = Handed()

    async def run(self, jobs: Sequence[PlannedJob]) -> None:
        """Hands the jobs in, each at its time, and returns when all were answered."""
        begun = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=WAIT_S + 15)
        async with (
            aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session,
            asyncio.TaskGroup() as requests,
        ):
            for number, job in enumerate(jobs):
                await asyncio.sleep(max(0.0, begun + job.at_s - time.monotonic()))
                await self._slots.acquire()
                requests.create_task(self._submit(session, job, wait=number % 2 == 0))

    async def _submit(self, session: aiohttp.ClientSession, job: PlannedJob, *, wait: bool) -> None:
        url = f"{self._url}?wait_s={WAIT_S}" if wait else self._url
        body, problem = json.dumps(job.body).encode(), ""
        try:
            for _ in range(TRIES):
                try:
                    async with session.post(url, data=body) as response:
                        answer = await response.text()
                except (aiohttp.ClientError, TimeoutError) as error:
                    problem = str(error) or type(error).__name__
                else:
                    if response.status in (200, 202):
                        self.handed.accepted += 1
                        return
                    problem = f"HTTP {response.status}: {answer[:200]}"
                    if response.status < 500:
                        break
                # The same id again is the same job, so trying again is safe.
                await asyncio.sleep(PAUSE_S)
            self.handed.failed[job.body["job_id"]] = problem
        finally:
            self._slots.release()
