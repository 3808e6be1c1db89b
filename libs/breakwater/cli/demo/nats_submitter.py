"""`python -m breakwater.cli.demo.nats_submitter DATA_DIR`: a program that submits jobs over NATS.

It does what a client in any language would, and uses nothing of Breakwater: it reads the address from the stack's
`endpoints.json`, publishes each job to `bw.jobs.<agent>`, awaits the acknowledgement, and gets the result on an inbox.

It writes `ready` to stdout when it is connected, reads the jobs from stdin, a line of JSON each, and ends with one line
of JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import nats
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.errors import Error as JetStreamError

IN_FLIGHT = 16
RESULT_S = 60.0
TRIES = 5


async def submit(client: Client, jobs: list[dict[str, Any]]) -> tuple[int, dict[str, str]]:
    """Publishes jobs, each at its time, and waits for their results.

    Returns:
        How many were accepted; and why the others were not, by job id.
    """
    inbox, stream, slots = client.new_inbox(), client.jetstream(timeout=5), asyncio.Semaphore(IN_FLIGHT)
    results = {f"{inbox}.{job['body']['job_id']}": asyncio.Event() for job in jobs}
    failed: dict[str, str] = {}

    async def receive(message: Msg) -> None:
        results[message.subject].set()

    async def publish(body: dict[str, Any]) -> None:
        reply_to = f"{inbox}.{body['job_id']}"
        payload = json.dumps({**body, "reply_to": reply_to}).encode()
        try:
            for _ in range(TRIES):
                try:
                    # Published again under the same id it is the same job, so trying again is safe.
                    await stream.publish(f"bw.jobs.{body['agent']}", payload, headers={"Nats-Msg-Id": body["job_id"]})
                except (TimeoutError, nats.errors.Error, JetStreamError) as error:
                    failed[body["job_id"]] = str(error) or type(error).__name__
                else:
                    failed.pop(body["job_id"], None)
                    # What is accepted will be decided; whether it was, the demo reads from the records.
                    await asyncio.wait([asyncio.create_task(results[reply_to].wait())], timeout=RESULT_S)
                    return
        finally:
            slots.release()

    await client.subscribe(f"{inbox}.*", cb=receive)
    begun = time.monotonic()
    async with asyncio.TaskGroup() as publishing:
        for job in jobs:
            await asyncio.sleep(max(0.0, begun + job["at_s"] - time.monotonic()))
            await slots.acquire()
            publishing.create_task(publish(job["body"]))
    return len(jobs) - len(failed), failed


async def main(url: str) -> None:
    """Runs the program."""
    client = await nats.connect(url, name="demo-client")
    try:
        _write("ready")
        lines = await asyncio.to_thread(sys.stdin.readlines)
        accepted, failed = await submit(client, [json.loads(line) for line in lines])
    finally:
        await client.close()
    _write(json.dumps({"accepted": accepted, "failed": failed}))


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    endpoints = json.loads((Path(sys.argv[1]) / "endpoints.json").read_text())
    asyncio.run(main(endpoints["nats_url"]))
