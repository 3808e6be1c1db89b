"""A worker in this process: its own handlers on real NATS and Redis, with a clock that tests may set.

Jobs are published as by any client, fetched by the worker's consumers and given to `JobHandler.handle`, so all that a
job leaves behind is real: attempts, result, record, dead letter, checkpoint. There is no process to start, and none to
kill: what that proves belongs into tests/flow.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import monotonic
from typing import Any
from unittest.mock import AsyncMock, patch

import nats
import nats.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig, StreamConfig, StreamInfo
from pydantic import SecretStr
from structlog.testing import capture_logs
from structlog.typing import EventDict

from breakwater.calls.providers.base import Answer, Call, Provider
from breakwater.config import Config, LiveConfig, cipher_of
from breakwater.config.servers import bus_plan
from breakwater.jobs.rules.workers import LIVENESS, Liveness
from breakwater.jobs.store.executions import ClaimLostError
from breakwater.kernel.nats import topology
from breakwater.kernel.nats.delivery import DelayedQueue, Delivery
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.nats.topology import PARKED_CONSUMER, Plan, worker_consumer
from breakwater.kernel.process import background
from breakwater.kernel.redis.connection import KEPT_SINCE, Redis
from breakwater.limits.limit_log import LimitLog
from breakwater.local.provider import SimulatedProvider
from breakwater.services.worker.context import WorkerContext, context_for
from breakwater.services.worker.handler import JobHandler
from breakwater.services.worker.leases import receive_cancel_requests
from tests.flow.kit import PLANE_KEY, Plane, config_for
from tests.helpers import until

FETCH_S = 0.5
END_S = 0.5


class FakeClock:
    """Real time and what was slept: whoever sleeps goes on at once, and it is later then."""

    def __init__(self) -> None:
        self.slept: list[float] = []
        self.set_ahead_s = 0.0
        """By how much the time of day was set ahead, which the monotonic clock knows nothing of."""

    def now(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=sum(self.slept) + self.set_ahead_s)

    def monotonic(self) -> float:
        return monotonic() + sum(self.slept)

    async def sleep(self, delay_s: float) -> None:
        self.slept.append(delay_s)
        await asyncio.sleep(0)


class ScriptedProvider:
    """A provider whose answers a test gives, one for each call; an exception among them is raised."""

    def __init__(self, *answers: Answer | BaseException | Callable[[Call], Answer]) -> None:
        self.calls: list[Call] = []
        self._answers = list(answers)

    async def perform(self, call: Call) -> Answer:
        self.calls.append(call)
        answer = self._answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer if isinstance(answer, Answer) else answer(call)

    async def refresh_credential(self, used: int | None) -> bool:
        del used
        return False

    async def close(self) -> None:
        pass


class WorkerPlane(Plane):
    """A plane whose only service is a worker in this process."""

    worker: WorkerContext
    clock: FakeClock
    handlers: dict[str, JobHandler]
    _work: list[asyncio.Task[None]]
    _handling: dict[asyncio.Task[None], Msg]
    _left: list[Msg]
    """Deliveries whose handling ended without an answer to NATS, as if its worker had died."""

    limit_log: LimitLog
    """The limits that the plane keeps, which are not followed: a test reads them if it has any."""
    logs: list[EventDict]

    def log(self, name: str) -> str:
        """What has been logged."""
        assert name == "worker"
        return json.dumps(self.logs, default=str)

    def begin(self) -> None:
        """Takes up jobs."""
        self._work = [asyncio.create_task(self._take(name)) for name in self.handlers]
        self._work.append(asyncio.create_task(self._wake()))
        self._work.append(asyncio.create_task(self.worker.leases.run()))
        self._work.append(asyncio.create_task(self.worker.turns.run()))
        self._work.append(asyncio.create_task(receive_cancel_requests(lambda: self.client, self.worker.leases.cancel)))

    async def end(self) -> None:
        """Takes up no more, as a worker that stops; jobs may end if they do so at once, and are given back if not.

        NATS delivers what was left without an answer again at once, and not only after the ack wait.
        """
        await background.stop(*self._work)
        if self._handling:
            await asyncio.wait(self._handling, timeout=END_S)
        # One that has just been acknowledged can't be given back.
        await background.stop(*self._handling)
        for message in self._left:
            await message.nak()
        self._work = []
        self._left = []

    async def run_until(self, step: str, job_id: str) -> None:
        """Publishes a job whose worker dies as it comes to a step: a function, by its module and name."""
        with patch(step, AsyncMock(side_effect=ClaimLostError(job_id))) as reached:
            await self.publish({"agent": "writer", "job_id": job_id, "prompt": "x"})
            await until(lambda: reached.called, "the end of the call")
            await self.end()

    async def run(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Publishes a job, and waits for its result."""
        await self.publish(job)
        return await self.result(job["job_id"])

    async def _take(self, agent: str) -> None:
        handler, slots = self.handlers[agent], asyncio.Semaphore(self.worker.config.agents[agent].concurrency)
        subscription = await self.jetstream.pull_subscribe_bind(worker_consumer(agent), Stream.JOBS.value)

        def ended(task: asyncio.Task[None]) -> None:
            slots.release()
            message = self._handling.pop(task)
            if not message.is_acked:
                self._left.append(message)

        try:
            while True:
                await slots.acquire()
                try:
                    [message] = await subscription.fetch(1, timeout=FETCH_S)
                except (TimeoutError, nats.errors.TimeoutError):
                    slots.release()
                    continue
                task = asyncio.create_task(handler.handle(Delivery(message)))
                self._handling[task] = message
                task.add_done_callback(ended)
        finally:
            # Or NATS would deliver to the last request, which nobody reads any more.
            await subscription.unsubscribe()

    async def _wake(self) -> None:
        waker = DelayedQueue(self.worker.publisher, self.worker.config.agents, self.worker.turns.add)
        subscription = await self.jetstream.pull_subscribe_bind(PARKED_CONSUMER, Stream.PARKED.value)
        while True:
            with suppress(TimeoutError, nats.errors.TimeoutError):
                messages = await subscription.fetch(10, timeout=FETCH_S)
                await waker.handle_all([Delivery(message) for message in messages])


Configs = tuple[list[tuple[StreamConfig, datetime | None]], list[tuple[ConsumerConfig, datetime]]]
"""The streams, and the consumers of jobs, as a server has them, each with the time that it was created."""

_provisioned: dict[str, tuple[Plan, Configs]] = {}
"""By the server's address: the plan it was last provisioned for, and what it had then."""


async def _empty_streams(nats_url: str, jetstream: JetStreamContext, plan: Plan) -> None:
    """Empties the streams; provisions only if the server does not have what the last test was given."""
    plan_before, configs_before = _provisioned.get(nats_url, (None, None))
    streams = await jetstream.streams_info()
    if plan_before is not None and await _configs(jetstream, streams) == configs_before:
        names = [stream.config.name or "" for stream in streams if stream.state.messages]
        await asyncio.gather(*(jetstream.purge_stream(name) for name in names))
        if plan == plan_before:
            return
        await _change(jetstream, plan_before, plan)
    else:
        await provision(nats_url, plan)
        streams = await jetstream.streams_info()
        await asyncio.gather(*(jetstream.purge_stream(stream.config.name or "") for stream in streams))
    _provisioned[nats_url] = plan, await _configs(jetstream, await jetstream.streams_info())


async def _change(jetstream: JetStreamContext, before: Plan, plan: Plan) -> None:
    """Changes what differs between two plans, in empty streams: `provision` asks for all that is there, 25 ms long."""
    streams_before, consumers_before = topology.streams(before), topology.consumers(before)
    consumers = topology.consumers(plan)
    kept_names = {(stream, consumer.durable_name) for stream, consumer in consumers}
    for stream, consumer in consumers_before:
        if (stream, consumer.durable_name) not in kept_names:
            await jetstream.delete_consumer(stream.value, consumer.durable_name or "")
    for stream in topology.streams(plan):
        if stream not in streams_before:
            await jetstream.update_stream(stream)
    for stream, consumer in consumers:
        if (stream, consumer) not in consumers_before:
            await jetstream.add_consumer(stream.value, consumer)


async def _configs(jetstream: JetStreamContext, streams: list[StreamInfo]) -> Configs:
    consumers = await jetstream.consumers_info(Stream.JOBS.value) if streams else []
    return (
        [(stream.config, stream.created) for stream in streams],
        [(consumer.config, consumer.created) for consumer in consumers],
    )


@asynccontextmanager
async def running_worker(
    directory: Path,
    *,
    nats_url: str,
    redis_url: str,
    script: Mapping[str, Any],
    agents: Mapping[str, Any],
    providers: Mapping[str, Provider] | None = None,
    fake_clock: bool = False,
    begin: bool = True,
    plane_key: str | None = PLANE_KEY,
    liveness: Liveness = LIVENESS,
    **config: Any,
) -> AsyncGenerator[WorkerPlane]:
    """Empties NATS and Redis, and takes up jobs.

    Args:
        directory: for the config.
        nats_url: of a server for such tests alone.
        redis_url: the same.
        script: of the simulated provider.
        agents: of the config.
        providers: instead of those of the config, by name.
        fake_clock: nothing is really slept between attempts. Not for jobs that wait for one another.
        begin: take up jobs at once; else when the test calls `begin`.
        plane_key: the plane's own.
        liveness: of the worker.
        config: more of the config.
    """
    async with SimulatedProvider(dict(script)) as sim:
        path = directory / "breakwater.yaml"
        # JSON is YAML, and the fastest to write. Not `parse_config`, which needs a loader that knows lines, and a tenth
        # of a test's CPU for it.
        text = json.dumps(config_for(sim.url, agents, **config), ensure_ascii=False, sort_keys=True)
        text = text.replace("{sim_port}", str(sim.port))
        path.write_text(text)
        parsed = Config.of(json.loads(text), text)
        client = await nats.connect(nats_url)
        plane = WorkerPlane(directory, {"BREAKWATER_REDIS_URL": redis_url}, client, sim)
        await _empty_streams(nats_url, plane.jetstream, bus_plan(parsed))
        redis = Redis(redis_url)
        await redis.client.flushall()
        # As the first heartbeat does: Redis has lost nothing since before the first job.
        await redis.client.set(KEPT_SINCE, int(time.time() * 1000))
        cipher = cipher_of(parsed, None if plane_key is None else SecretStr(plane_key))
        opened = {name: settings.open() for name, settings in parsed.connections.items()}
        opened |= dict(providers or {})
        live = LiveConfig(parsed)
        plane.limit_log = LimitLog(lambda: client)
        plane.limit_log.feed(live.change_limits)
        context = context_for(
            parsed,
            live.limits,
            redis=redis,
            publisher=Publisher(lambda: client, "worker", cipher),
            lookup=Lookup(lambda: client, cipher),
            providers=opened,
            cipher=cipher,
            liveness=liveness,
            limit_log=plane.limit_log,
        )
        plane.clock = FakeClock()
        plane._work = []
        plane._handling = {}
        plane._left = []
        if fake_clock:
            context = replace(context, now=plane.clock.now, clock=plane.clock.monotonic, sleep=plane.clock.sleep)
        plane.worker = context
        plane.handlers = {name: JobHandler(context, name, agent) for name, agent in parsed.agents.items()}
        try:
            with capture_logs() as plane.logs:
                if begin:
                    plane.begin()
                yield plane
        finally:
            await plane.end()
            for provider in opened.values():
                await provider.close()
            await redis.close()
            await client.close()
