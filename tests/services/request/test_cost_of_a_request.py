"""What a chat completion costs `request`, in counts that a busy machine changes by less than a hundredth.

As `test_cost_of_a_job.py` does for the worker: a figure that is a tenth over its budget is a regression; one that has
become a tenth less lowers the budget.
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from starlette.requests import Request

from bench.trace_job import Steps
from breakwater.jobs.store.accepted import AcceptedJobs
from breakwater.kernel.commands.connect import flush_subscriptions
from breakwater.kernel.nats import subjects
from tests.services.request.conftest import HttpApi, result_of
from tests.services.worker.test_cost_of_a_job import check

TRACED = 5
REPEATED = 8

STEPS = {"awaits": 43, "wake-ups": 3.5, "tasks": 1, "futures": 3}
"""Of each of some requests that follow one another, in the whole process, without the service's upkeep, as
`python -m bench.trace_job` counts them. On a busy machine, more of NATS' messages come in reads of their own."""


@asynccontextmanager
async def worker(url: str) -> AsyncGenerator[Client]:
    """Decides each job some time after it is published, so that its acknowledgement and its result come one by one."""
    client = await nats.connect(url)

    async def decide(job: Msg) -> None:
        assert job.headers is not None
        await asyncio.sleep(0.02)
        execution_id = job.headers["Breakwater-Execution-Id"]
        await client.publish(subjects.result(execution_id), result_of(execution_id, "writer", "x").json_bytes())

    await client.subscribe("bw.jobs.>", cb=decide)
    await flush_subscriptions(client)
    yield client
    await client.close()


async def ask(url: str, bus: str, key: str, requests: int) -> None:
    """Asks for chat completions one after the other, on one connection."""
    address = urlsplit(url)
    body = json.dumps({"model": "writer", "messages": [{"role": "user", "content": "x"}]}).encode()
    async with worker(bus):
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        for _ in range(requests):
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: plane\r\nAuthorization: {key}\r\n"
            writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200"), answer
            [length] = [line[16:] for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length: ")]
            await reader.readexactly(int(length))
        writer.close()


def _is_of_connection(task: asyncio.Task[Any]) -> bool:
    return getattr(task.get_coro(), "__qualname__", "").startswith("Client.")


def requests_in_memory() -> int:
    return sum(type(thing) is Request for thing in gc.get_objects())


@pytest.mark.long(about_s=7)
async def test_a_request_costs_what_it_did(api: HttpApi, monkeypatch: pytest.MonkeyPatch) -> None:
    # One task saves the notes of all jobs that were accepted meanwhile, so its steps are those of no request.
    monkeypatch.setattr(AcceptedJobs, "mark", lambda *_, **__: None)
    assert api.bus.connected_url is not None
    arguments = api.url, api.bus.connected_url.geturl(), api.http.headers["Authorization"]

    async def run(requests: int) -> None:
        # In a thread with a loop of its own, so that nothing of client and worker is counted.
        await asyncio.to_thread(asyncio.run, ask(*arguments, requests))

    await run(2)
    gc.collect()
    of_other_tests = requests_in_memory()
    gc.disable()
    try:
        await run(TRACED)
        # Without a cycle, a request is gone with its last reference: it needs no garbage collector.
        assert requests_in_memory() <= of_other_tests
    finally:
        gc.enable()

    # The difference leaves out what the connection costs, and the smallest counts what looks after the service.
    least = {requests: Counter[str]() for requests in (1, 1 + TRACED)}
    for _ in range(REPEATED):
        for requests, counts in least.items():
            steps = await steps_of(run, requests)
            least[requests] = steps if not counts else steps & counts
    check({step: (least[1 + TRACED][step] - least[1][step]) / TRACED for step in STEPS}, STEPS)


async def steps_of(run: Callable[[int], Awaitable[None]], requests: int) -> Counter[str]:
    """The steps of the event loop for some requests."""
    trace = Steps()
    # Those of the connection to NATS work for the requests; the others look after the service.
    trace.background = {task for task in asyncio.all_tasks() if not _is_of_connection(task)}
    with trace:
        await run(requests)
    return trace.steps
