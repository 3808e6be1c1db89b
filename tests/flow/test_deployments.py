"""A model on three deployments, through a whole plane: outages of one and of two, and keys that change under load."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.flow.kit import PRICE, Plane, model, running_plane
from tests.flow.test_reload import WORKERS, Edited
from tests.helpers import until
from tests.servers import RunningServer
from tests.shown import Show

NAMES = ("west", "east", "north")
WRITER = {"model": "m", "concurrency": 20, "retry": {"base_s": 0.2}}
LISTED = {"price": PRICE, "affinity": "none", "deployments": [{"provider": "sim", "name": name} for name in NAMES]}
PER_STEP = 40
RATE = 40.0
SERVICES = (*WORKERS, "breaker", "budget")


class Load:
    """Jobs that are published at an even rate, in steps."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self.sent = 0

    async def step(self, jobs: int = PER_STEP) -> None:
        for _ in range(jobs):
            await self._plane.publish({"agent": "writer", "job_id": f"job-{self.sent}", "prompt": f"x{self.sent}"})
            self.sent += 1
            await asyncio.sleep(1 / RATE)

    async def results(self) -> list[dict[str, Any]]:
        return [await self._plane.result(f"job-{number}") for number in range(self.sent)]


def states(transitions: list[dict[str, Any]]) -> dict[str, set[str]]:
    """The states that the breaker of each deployment has come to."""
    found: dict[str, set[str]] = {}
    for transition in transitions:
        found.setdefault(transition["model"].rpartition("/")[2], set()).add(transition["to_state"])
    return found


@pytest.mark.long(about_s=10)
async def test_an_outage_of_one_deployment_and_then_of_two_fails_no_job_and_opens_no_other_breaker(
    tmp_path: Path, own_nats_server: RunningServer, own_redis_server: RunningServer, show: Show
) -> None:
    urls: dict[str, Any] = {"nats_url": own_nats_server.url, "redis_url": own_redis_server.url}
    script = {"models": {name: model() for name in NAMES}}
    async with running_plane(
        tmp_path, **urls, script=script, agents={"writer": WRITER}, services=(), more_models={"m": LISTED}
    ) as plane:
        for name in SERVICES:
            plane.start(name.partition("-")[0], name)
        for name in SERVICES:
            await plane.ready(name)
        load = Load(plane)
        await load.step()
        for down in (("west",), ("west", "east")):
            plane.sim.use({"models": {name: model({"status": 500}) if name in down else model() for name in NAMES}})
            await load.step()
        results = await load.results()
        transitions = await plane.messages("EVENTS", "bw.breakers.>")
    assert Counter(result["status"] for result in results) == {"succeeded": load.sent}
    opened = states(transitions)
    assert "open" in opened["west"]
    assert "open" in opened["east"]
    assert "north" not in opened
    causes = Counter(attempt["cause"] for result in results for attempt in result["attempts"])
    assert causes["redeployment"] == causes.total() - load.sent, "nothing waited for a retry"
    answered = [
        Counter(result["attempts"][-1]["deployment"] for result in results[start : start + PER_STEP])
        for start in range(0, load.sent, PER_STEP)
    ]
    assert min(answered[0][f"sim/{name}"] for name in NAMES) >= 3
    rows = [[step, *(one[f"sim/{name}"] for name in NAMES)] for step, one in enumerate(answered)]
    show("Answers by deployment", ["deployments down", *NAMES], rows)


@pytest.mark.long(about_s=8)
async def test_keys_are_added_rotated_and_removed_under_load_without_a_lost_call(
    tmp_path: Path, own_nats_server: RunningServer, own_redis_server: RunningServer
) -> None:
    urls: dict[str, Any] = {"nats_url": own_nats_server.url, "redis_url": own_redis_server.url}
    for name in ("a", "b", "c"):
        (tmp_path / f"key-{name}").write_text(f"sk-{name}")

    def listed(*names: str, name: str = "west") -> dict[str, Any]:
        keys = [{"file": str(tmp_path / f"key-{key}")} for key in names]
        return {**LISTED, "deployments": [{"provider": "sim", "name": name, "key": keys}]}

    slow = {name: model(latency_ms=100) for name in ("west", "east")}
    accepted = ["sk-a", "sk-b", "sk-c"]
    async with running_plane(
        tmp_path,
        **urls,
        script={"models": slow, "api_keys": accepted},
        agents={"writer": WRITER},
        services=(),
        more_models={"m": listed("a")},
    ) as plane:
        for name in SERVICES:
            plane.start(name.partition("-")[0], name)
        edited = Edited(plane, own_nats_server.url, SERVICES)
        for name in SERVICES:
            await plane.ready(name)
        load = Load(plane)

        async def beside(change: Any) -> None:
            """A change in the middle of a step."""
            half = load.sent + PER_STEP // 4

            async def is_half_sent() -> bool:
                return load.sent >= half

            loading = asyncio.create_task(load.step(PER_STEP // 2))
            await until(is_half_sent, "half of the jobs to be sent")
            await change()
            await loading

        async def apply(model_settings: dict[str, Any]) -> None:
            edited.document["models"]["m"] = model_settings
            await edited.apply()

        async def rotate() -> None:
            """The provider has a new key in place of `sk-a`, and the file names it a moment later."""
            plane.sim.use({"models": slow, "api_keys": ["sk-a2", *accepted[1:]]})
            await asyncio.sleep(0.1)
            (tmp_path / "key-a").write_text("sk-a2")

        await beside(lambda: apply(listed("a", "b")))  # added
        await beside(rotate)
        await beside(lambda: apply(listed("b", "c")))  # removed, and another one added
        await beside(
            lambda: apply(listed("c", name="east"))
        )  # all deployments are removed, and others take their place
        results = await load.results()
    assert Counter(result["status"] for result in results) == {"succeeded": load.sent}
    used = Counter(result["attempts"][-1]["provider_key"] for result in results)
    assert set(used) == {"key-a", "key-b", "key-c"}
    assert all("sk-" not in str(result) for result in results)
