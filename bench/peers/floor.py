"""The least that a durable call costs on NATS: a job stored, called for and acknowledged, its answer stored.

    python floor.py ask NATS_URL
    python floor.py work NATS_URL UPSTREAM_URL

It retries nothing, checks nothing, limits nothing and records nothing; each half is one process, as in Breakwater.
"""

import asyncio
import itertools
import sys

import aiohttp
import nats
import uvloop
from asking import CHAT, JSON_BODY, answer_lines
from nats.aio.msg import Msg


async def ask_for_jobs(nats_url: str) -> None:
    """Publishes jobs, and hears of their results."""
    client = await nats.connect(nats_url)
    stream = client.jetstream()
    await stream.add_stream(name="JOBS", subjects=["jobs.*"], retention="workqueue")
    await stream.add_stream(name="RESULTS", subjects=["results.*"])
    results: dict[str, asyncio.Future[str]] = {}
    ids = itertools.count()

    async def on_result(message: Msg) -> None:
        results.pop(message.subject).set_result(message.data.decode())

    async def ask() -> str:
        job = next(ids)
        result = results[f"results.{job}"] = asyncio.get_running_loop().create_future()
        await stream.publish(f"jobs.{job}", CHAT.encode())
        return await result

    await client.subscribe("results.*", cb=on_result)
    await answer_lines(ask)


async def work(nats_url: str, upstream: str) -> None:
    """Does the jobs, all at once."""
    client = await nats.connect(nats_url)
    stream = client.jetstream()
    running: set[asyncio.Task[None]] = set()
    async with aiohttp.ClientSession(headers=JSON_BODY, connector=aiohttp.TCPConnector(limit=0)) as http:

        async def do(message: Msg) -> None:
            async with http.post(f"{upstream}/chat/completions", data=message.data) as response:
                answer = await response.read()
            await stream.publish(message.subject.replace("jobs", "results"), answer)
            await message.ack()

        async def on_job(message: Msg) -> None:
            task = asyncio.create_task(do(message))
            running.add(task)
            task.add_done_callback(running.discard)

        await stream.subscribe("jobs.*", durable="worker", cb=on_job, manual_ack=True)
        await asyncio.Event().wait()


ROLES = {"ask": ask_for_jobs, "work": work}
uvloop.run(ROLES[sys.argv[1]](*sys.argv[2:]))
