"""A config that is edited under load: nothing is lost, and each job has one version of it from beginning to end."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from breakwater.config import load_config
from breakwater.config.servers import bus_plan
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.types import nano_from_usd
from tests.flow.kit import PRICE, Plane, model, running_plane
from tests.helpers import until
from tests.servers import RunningServer
from tests.shown import Show

JOBS = 60
PER_STEP = JOBS // 5
WORKERS = ("worker-1", "worker-2")
SERVICES = (*WORKERS, "breaker", "budget")
WRITER = {
    "model": "sim/a",
    "retry": {"max_attempts": 10, "base_s": 0.3, "max_delay_s": 0.6},
    "breaker": "off",
    "concurrency": 6,
}
DOUBLE = {name: str(2 * float(usd)) for name, usd in PRICE.items()}


class Edited:
    """The config file of a plane, as a person edits it."""

    def __init__(self, plane: Plane, nats_url: str, services: Sequence[str] = SERVICES) -> None:
        self._plane, self._nats_url, self._services = plane, nats_url, services
        self._path = Path(plane.environment["BREAKWATER_CONFIG"])
        self.document = yaml.safe_load(self._path.read_text())
        self.versions = {load_config(self._path).version: copy.deepcopy(self.document)}

    @property
    def version(self) -> str:
        """Which holds now."""
        return list(self.versions)[-1]

    async def apply(self) -> None:
        """Saves it, creates what it needs on the bus, and has every service read it."""
        self._path.write_text(yaml.safe_dump(self.document))
        config = load_config(self._path)
        await provision(self._nats_url, bus_plan(config))
        self.versions[config.version] = copy.deepcopy(self.document)
        self.signal()
        for name in self._services:
            await until(partial(self._logged, name, f'"version": "{config.version}"'), f"{name} to take it over")

    async def break_it(self) -> None:
        """Saves what can't be read, and has every service read that."""
        good = self._path.read_text()
        self._path.write_text(good + "\nagents: {writer: [\n")
        self.signal()
        for name in self._services:
            await until(partial(self._logged, name, "config_not_taken_over"), f"{name} to refuse it")
        self._path.write_text(good)

    def signal(self) -> None:
        """What `docker compose kill -s HUP` does."""
        for name in self._services:
            os.kill(self._plane.processes[name].pid, signal.SIGHUP)

    async def _logged(self, name: str, what: str) -> bool:
        return what in self._plane.log(name)


@pytest.mark.long(about_s=8)
async def test_jobs_across_five_reloads_are_all_recorded_once_each_under_one_config(
    tmp_path: Path, own_nats_server: RunningServer, own_redis_server: RunningServer, show: Show
) -> None:
    agents = {"writer": WRITER}
    fails = {"status": 503, "rate": 0.2}
    models = {name: model(fails, latency_ms={"p50": 30, "p95": 150}) for name in ("sim/a", "sim/b")}
    urls: dict[str, Any] = {"nats_url": own_nats_server.url, "redis_url": own_redis_server.url}
    async with running_plane(
        tmp_path, **urls, script={"models": models}, agents=agents, services=(), retry_budget="off"
    ) as plane:
        for name in SERVICES:
            plane.start(name.partition("-")[0], name)
        edited = Edited(plane, own_nats_server.url)
        for name in SERVICES:
            await plane.ready(name)
        sent = 0

        async def load(*names: str) -> None:
            nonlocal sent
            for _ in range(PER_STEP):
                agent = names[sent % len(names)]
                await plane.publish({"agent": agent, "job_id": f"job-{sent}", "prompt": "x"})
                sent += 1
                await asyncio.sleep(0.015)

        async def beside(change: Any, *names: str) -> None:
            """A change in the middle of a fifth of the load."""
            half = sent + PER_STEP // 2
            loading = asyncio.create_task(load(*names))
            await until(lambda: _at_least(lambda: sent, half), "half of the jobs to be sent")
            await change()
            await loading

        document = edited.document

        document["agents"]["editor"] = {**WRITER, "model": "sim/b"}
        document["models"]["sim/b"] = {"price": PRICE}
        await beside(edited.apply, "writer")  # an agent is added
        document["agents"]["writer"] = {**WRITER, "model": "sim/b"}
        await beside(edited.apply, "writer", "editor")  # the model is changed
        document["models"]["sim/b"] = {"price": DOUBLE}
        await beside(edited.apply, "writer", "editor")  # the price is changed
        await load("writer", "editor")
        del document["agents"]["editor"]
        await edited.apply()  # the agent is removed, while jobs of it wait
        await beside(edited.break_it, "writer")  # the file is broken

        records = await plane.messages("EVENTS", "bw.executions.>", at_least=JOBS)
        assert len(records) == JOBS
        assert {record["execution_id"] for record in records} == {f"job-{number}" for number in range(JOBS)}
        for record in records:
            under = edited.versions[record["config_version"]]
            name = under["agents"][record["agent"]]["model"]
            price = under["models"][name]["price"]
            called = [attempt for attempt in record["attempts"] if not attempt["short_circuited"]]
            assert {attempt["model"] for attempt in called} == {name}, record
            factor = 2 if price == DOUBLE else 1
            expected = 120 * 150 * factor + 40 * 600 * factor
            assert record["status"] == "succeeded", record["error"]
            assert nano_from_usd(called[-1]["cost"]) == expected, record
        attempts = await plane.messages("EVENTS", "bw.attempts.>")
        assert len(plane.sim.ledger.calls) == len(attempts) == sum(record["attempts_count"] for record in records)
        assert await plane.pending_jobs() == 0
        of_version = Counter(record["config_version"] for record in records)
        assert set(of_version) == set(edited.versions)
        assert all(process.poll() is None for process in plane.processes.values())
        # The queue of an agent that is gone takes nothing any more, once it is empty.
        await provision(own_nats_server.url, bus_plan(load_config(tmp_path / "breakwater.yaml")))
        assert subjects.job("editor") not in ((await plane.jetstream.stream_info("JOBS")).config.subjects or ())
        show("Jobs by config version", ["version", "jobs"], [[v, of_version[v]] for v in edited.versions])


@pytest.mark.long(about_s=22)  # of sleep, which three workers take turns at
async def test_jobs_keep_their_config_on_a_worker_that_is_started_later(
    tmp_path: Path, own_nats_server: RunningServer, own_redis_server: RunningServer
) -> None:
    # The first call says to come back in 20 s, which a job sleeps through in PARKED. Until then, its agent has a queue.
    later = {"requests": [1, 1], "status": 503, "retry_after_s": 20}
    models = {"sim/a": model(later), "sim/b": model(later)}
    agents = {"writer": {"model": "sim/a"}, "editor": {"model": "sim/b", "concurrency": 1}}
    urls: dict[str, Any] = {"nats_url": own_nats_server.url, "redis_url": own_redis_server.url}
    async with running_plane(
        tmp_path, **urls, script={"models": models}, agents=agents, services=(), retry_budget="off"
    ) as plane:
        plane.start("worker", "worker-1")
        await plane.ready("worker-1")
        edited = Edited(plane, own_nats_server.url, ("worker-2",))
        before = edited.version
        await plane.publish({"agent": "writer", "job_id": "sleeper", "prompt": "x"})
        await plane.publish({"agent": "editor", "job_id": "other", "prompt": "x"})
        await until(lambda: _parked(plane, 2), "the jobs to sleep")
        plane.kill("worker-1")
        await plane.publish({"agent": "editor", "job_id": "early", "prompt": "x"})
        plane.start("worker", "worker-2")
        await plane.ready("worker-2")
        edited.document["agents"] = {"writer": {"model": "sim/b"}}
        await edited.apply()
        plane.kill("worker-2")
        await plane.publish({"agent": "editor", "job_id": "late", "prompt": "x"})
        plane.start("worker", "worker-3")
        for job_id, name in (("early", "sim/b"), ("late", "sim/b"), ("sleeper", "sim/a"), ("other", "sim/b")):
            result = await plane.result(job_id)
            assert (result["status"], result["config_version"], result["chosen_model"]) == ("succeeded", before, name)
        await plane.publish({"agent": "writer", "job_id": "new", "prompt": "x"})
        assert (await plane.result("new"))["config_version"] == edited.version


async def _parked(plane: Plane, jobs: int) -> bool:
    return (await plane.jetstream.stream_info("PARKED")).state.messages == jobs


async def _at_least(value: Any, least: int) -> bool:
    return value() >= least
