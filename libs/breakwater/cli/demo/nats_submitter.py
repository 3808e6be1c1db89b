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
from nats.js import JetStreamContext
from nats.js.errors import Error as JetStreamError

IN_FLIGHT = 16
ANSWER_S = 60.0
TRIES = 5


class Submitter:
    """Publishes jobs, each at its time, with so many out at once."""

    def __init__(self, client: Client) -> None:
        self._jetstream: JetStreamContext = client.jetstream(timeout=5)
        self._inbox: str = client.new_inbox()
        self._client = client
        self._waiting: dict[str, asyncio.Event] = {}
        self._slots = asyncio.Semaphore(IN_FLIGHT)
        self.accepted = 0
        self.failed: dict[str, str] = {}

    async def run(self, jobs: list[dict[str, Any]]) -> None:
        """Returns when all jobs were answered, or given up."""
        await self._client.subscribe(f"{self._inbox}.*", cb=self._receive)
        begun = time.monotonic()
        async with asyncio.TaskGroup() as publishing:
            for job in jobs:
                await asyncio.sleep(max(0.0, begun + job["at_s"] - time.monotonic()))
                await self._slots.acquire()
                publishing.create_task(self._submit(job["body"]))

    async def _receive(self, message: Msg) -> None:
        if (answered := self._waiting.get(message.subject)) is not None:
            answered.set()

    async def _submit(self, body: dict[str, Any]) -> None:
        job_id: str = body["job_id"]
        reply_to = f"{self._inbox}.{job_id}"
        answered = self._waiting[reply_to] = asyncio.Event()
        try:
            if await self._publish({**body, "reply_to": reply_to}):
                self.accepted += 1
                # What is accepted is decided some time; whether it was, the demo reads from the records.
                await asyncio.wait([asyncio.ensure_future(answered.wait())], timeout=ANSWER_S)
        finally:
            del self._waiting[reply_to]
            self._slots.release()

    async def _publish(self, body: dict[str, Any]) -> bool:
        for _ in range(TRIES):
            try:
                # Published again under the same id it is the same job, so trying again is safe.
                await self._jetstream.publish(
                    f"bw.jobs.{body['agent']}", json.dumps(body).encode(), headers={"Nats-Msg-Id": body["job_id"]}
                )
            except (TimeoutError, nats.errors.Error, JetStreamError) as error:
                self.failed[body["job_id"]] = str(error) or type(error).__name__
            else:
                self.failed.pop(body["job_id"], None)
                return True
        return False


async def main(url: str) -> None:
    """Runs the program."""
    client = await nats.connect(url, name="demo-client")
    try:
        _write("ready")
        lines = await asyncio.to_thread(sys.stdin.readlines)
        submitter = Submitter(client)
        await submitter.run([json.loads(line) for line in lines])
    finally:
        await client.close()
    _write(json.dumps({"accepted": submitter.accepted, "failed": submitter.failed}))


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    endpoints = json.loads((Path(sys.argv[1]) / "endpoints.json").read_text())
    asyncio.run(main(endpoints["nats_url"]))
