"""The load: jobs are submitted over HTTP, with the Python client, and over NATS, as programs of any language do."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import nats.errors
from nats.aio.client import Client

from breakwater.cli import connect
from breakwater.cli.demo.progress import DemoRun
from breakwater.client import ApiError, AsyncClient, JobFailed
from breakwater.contracts.job import Job
from breakwater.embedded.datadir import Endpoints

IN_FLIGHT = 32
DEADLINE_S = 120.0


async def submit_all(run: DemoRun, endpoints: Endpoints) -> None:
    """Submits each job when its time has come, and waits for all results."""
    slots = asyncio.Semaphore(IN_FLIGHT)

    async def submit(job: Job) -> None:
        try:
            if job.metadata["way"] == "nats":
                await run_over_nats(bus, job)
            else:
                with suppress(JobFailed):
                    await http.run(job, timeout_s=DEADLINE_S)
            run.results += 1
        except (ApiError, TimeoutError, nats.errors.Error) as error:
            run.failed[str(job.job_id)] = str(error) or type(error).__name__
        finally:
            slots.release()

    api_key = endpoints.api_key_file.read_text(encoding="utf-8").strip()
    async with (
        AsyncClient(endpoints.request_url, api_key) as http,
        connect.bus(endpoints.nats_url, reconnects=True) as bus,
    ):
        begun = time.monotonic()
        try:
            async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as submitting:
                for at_s, job in run.planned:
                    await asyncio.sleep(max(0.0, begun + at_s - time.monotonic()))
                    await slots.acquire()
                    submitting.create_task(submit(job))
        except TimeoutError:
            run.failed["load"] = f"was not done within {DEADLINE_S:g} s"


async def run_over_nats(client: Client, job: Job) -> None:
    """Submits a job, and waits for its result, which comes to the inbox that the job names."""
    inbox = client.new_inbox()
    body = job.model_copy(update={"reply_to": inbox}).model_dump_json(exclude_unset=True)
    headers = {"Nats-Msg-Id": str(job.job_id)}
    results = await client.subscribe(inbox)
    try:
        await client.jetstream(timeout=10).publish(f"bw.jobs.{job.agent}", body.encode(), headers=headers)
        await results.next_msg(timeout=DEADLINE_S)
    finally:
        await results.unsubscribe()  # the server allows a connection only so many
