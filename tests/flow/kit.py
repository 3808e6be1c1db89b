"""A whole plane for tests: real servers, the services as processes, and the simulated provider in this one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import nats
import nats.js.errors
from nats.aio.client import Client

from breakwater.config import load_config
from breakwater.config.servers import bus_plan
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.core import close
from breakwater.kernel.nats.provision import provision
from breakwater.local.provider import SimulatedProvider
from tests.helpers import ServiceProcess, start_service, until

PRICE = {"input_usd_per_mtok": "0.15", "output_usd_per_mtok": "0.60"}
USAGE = {"input_tokens": 120, "output_tokens": 40}
COST_NANO = 120 * 150 + 40 * 600
PLANE_KEY = "a plane's own key, of thirty-two letters"
COST = "0.000042000"
"""What one call of `model()` costs, in USD."""


def model(*faults: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A model of the simulated provider: 1 ms, 160 tokens, and the faults that are given."""
    return {"price": PRICE, "usage": USAGE, "latency_ms": 1, "faults": list(faults), **more}


def config_for(provider_url: str, agents: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """A config with one provider, and a price for every model that the agents name."""
    models = {
        model
        for agent in agents.values()
        for model in (agent.get("model"), *agent.get("fallback_models", ()), *agent.get("allowed_models", ()))
        if model not in {None, "*"}
    }
    return {
        "providers": {"sim": {"base_url": provider_url}, **more.pop("more_providers", {})},
        "models": {model: {"price": PRICE} for model in sorted(models)} | more.pop("more_models", {}),
        "agents": dict(agents),
        **more,
    }


def seconds_between(earlier: str, later: str) -> float:
    """How far two times of the contract are apart."""
    return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()


class Plane:
    """Handles to a running plane."""

    def __init__(self, directory: Path, environment: dict[str, str], client: Client, sim: SimulatedProvider) -> None:
        self.directory = directory
        self.environment = environment
        self.client = client
        self.jetstream = client.jetstream(timeout=30)
        self.sim = sim
        self.processes: dict[str, ServiceProcess] = {}
        self.own_environments: Mapping[str, Mapping[str, str]] = {}
        """Of single services, by their names, beside what all have."""
        self.python: Path | None = None
        """Of another version of Breakwater, whose services are started; None for this one."""

    def start(self, service: str, name: str | None = None) -> None:
        """Starts a service as a process of its own."""
        name = name or service
        environment = {**self.environment, **self.own_environments.get(name, {})}
        self.processes[name] = start_service(service, environment, self.directory / f"{name}.log", self.python)

    def kill(self, name: str) -> None:
        """SIGKILL."""
        self.processes[name].kill()
        self.processes[name].wait()

    async def terminate(self, name: str, timeout_s: float = 60) -> int | None:
        """Sends SIGTERM, and returns the exit code; None if the service still runs after `timeout_s`."""
        os.kill(self.processes[name].pid, signal.SIGTERM)
        # In a thread: what the process ends with may need the provider, which answers from this loop.
        return await asyncio.to_thread(self.processes[name].wait, timeout_s)

    def log(self, name: str) -> str:
        """What a service has logged."""
        return (self.directory / f"{name}.log").read_text()

    async def ready(self, name: str) -> None:
        """Waits until a service says that it is ready to work."""

        async def says_so() -> bool:
            return '"service_ready"' in self.log(name)

        await until(says_so, f"{name} to be ready")

    async def publish(
        self, job: Mapping[str, Any] | bytes, agent: str | None = None, timeout_s: float = 30, **headers: str
    ) -> int:
        """Publishes a job as any NATS client would, and returns its sequence in JOBS."""
        data = job if isinstance(job, bytes) else json.dumps(job).encode()
        name = agent if agent is not None else json.loads(data)["agent"]
        ack = await self.jetstream.publish(subjects.job(name), data, timeout=timeout_s, headers=headers or None)
        return ack.seq

    async def result(self, job_id: str, timeout_s: float = 120.0) -> dict[str, Any]:
        """The result of a job, when it is there."""

        async def find() -> dict[str, Any] | None:
            return await self.last("RESULTS", subjects.result(job_id))

        return await until(find, f"a result of {job_id}", timeout_s=timeout_s)

    async def last(self, stream: str, subject: str) -> dict[str, Any] | None:
        """The last message on a subject, parsed."""
        try:
            message = await self.jetstream.get_last_msg(stream, subject, direct=True)
        except nats.js.errors.NotFoundError:
            return None
        return json.loads(message.data or b"null")

    async def messages(self, stream: str, subject: str, at_least: int = 0) -> list[dict[str, Any]]:
        """All messages on a subject (wildcards allowed), in order, parsed; each with its `_subject`.

        They are read up to the last one that stands there, however long that takes: on a slow machine, silence says
        nothing.

        Args:
            stream: that keeps them.
            subject: theirs.
            at_least: wait for so many. For what is published after that which was waited for before: the record of an
                execution comes after its result.
        """

        # Wrapped, because it may rightly be empty.
        async def enough() -> tuple[list[dict[str, Any]]] | None:
            found = await self._messages(stream, subject)
            return (found,) if len(found) >= at_least else None

        [found] = await until(enough, f"{at_least} messages on {subject}")
        return found

    async def _messages(self, stream: str, subject: str) -> list[dict[str, Any]]:
        try:
            last = await self.jetstream.get_last_msg(stream, subject, direct=True)
        except nats.js.errors.NotFoundError:
            return []
        subscription = await self.jetstream.subscribe(subject, stream=stream, ordered_consumer=True)
        found: list[dict[str, Any]] = []
        try:
            while True:
                message = await subscription.next_msg(timeout=60)
                found.append(json.loads(message.data) | {"_subject": message.subject})
                if message.metadata.sequence.stream >= (last.seq or 0):
                    return found
        finally:
            await subscription.unsubscribe()

    async def attempts(self, agent: str, execution_id: str) -> list[dict[str, Any]]:
        """The attempts of an execution, as they stand in the log."""
        return await self.messages("EVENTS", subjects.attempt(agent, execution_id, "*"))

    async def pending_jobs(self) -> int:
        """Jobs that are not yet acknowledged."""
        return (await self.jetstream.stream_info("JOBS")).state.messages


@asynccontextmanager
async def running_plane(
    directory: Path,
    *,
    nats_url: str,
    redis_url: str,
    script: Mapping[str, Any],
    agents: Mapping[str, Any],
    services: Iterable[str] = ("worker", "breaker", "budget"),
    environment: Mapping[str, str] | None = None,
    replicas: int = 1,
    **config: Any,
) -> AsyncGenerator[Plane]:
    """Starts the provider and the services, and stops what is left of them afterwards."""
    async with SimulatedProvider(dict(script)) as sim:
        path = directory / "breakwater.yaml"
        text = json.dumps(config_for(sim.url, agents, **config), ensure_ascii=False, sort_keys=True)  # which is YAML
        path.write_text(text.replace("{sim_port}", str(sim.port)))
        await provision(nats_url, bus_plan(load_config(path)), replicas=replicas)
        client = await nats.connect(nats_url, max_reconnect_attempts=-1, reconnect_time_wait=0.2)
        variables = {
            "BREAKWATER_CONFIG": str(path),
            "BREAKWATER_NATS_URL": nats_url,
            "BREAKWATER_REDIS_URL": redis_url,
            "BREAKWATER_PLANE_KEY": PLANE_KEY,
            # None, unless a test brings one: nobody listens there, and no other plane of this machine is asked.
            "BREAKWATER_CLICKHOUSE_URL": "http://127.0.0.1:9/none",
            **(environment or {}),
        }
        plane = Plane(directory, variables, client, sim)
        try:
            for service in services:
                plane.start(service)
            yield plane
        finally:
            for process in plane.processes.values():
                process.kill()
            for process in plane.processes.values():
                process.wait()
            await close(client)
