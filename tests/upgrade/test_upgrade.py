"""An upgrade under load, and back: services of two versions side by side, replaced one by one in any order."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.faults import SERVICES
from tests.chaos.plane import Chaos, chaos_plane, serving
from tests.server_sources import Servers
from tests.upgrade.released import install_released


async def replace(chaos: Chaos, order: list[str], python: Path | None) -> None:
    """Replaces each service by one of the other version, as an orchestrator does, and waits until it works."""
    plane = chaos.plane
    for name in order:
        assert await plane.terminate(name) == 0, plane.log(name)[-2000:]
        logged = len(plane.log(name))
        plane.python = python
        plane.start(name.partition("-")[0], name)
        async with asyncio.timeout(60):
            while '"service_ready"' not in plane.log(name)[logged:]:
                await asyncio.sleep(0.1)
        if name == "request":
            await serving(chaos.http)


async def set_up(chaos: Chaos, killed_after_s: float | None) -> None:
    """Runs `breakwater setup` of this version."""
    command = [Path(sys.executable).with_name("breakwater"), "setup"]
    process = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, **chaos.plane.environment}, stderr=subprocess.PIPE
    )
    if killed_after_s is not None:
        await asyncio.sleep(killed_after_s)
        process.kill()
    _, said = await process.communicate()
    assert killed_after_s is not None or process.returncode == 0, said.decode()


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
async def test_services_are_replaced_under_load_by_the_next_version_and_back(
    seed: int, tmp_path: Path, servers: Servers
) -> None:
    seeded = random.Random(seed)
    released = await asyncio.to_thread(install_released, tmp_path)

    async with chaos_plane(tmp_path, servers, nodes=1, disks={}, clocks={}, python=released) as chaos:
        run = asyncio.create_task(chaos.run((), jobs=100_000, per_s=8))
        await set_up(chaos, killed_after_s=seeded.uniform(0.5, 2))
        await set_up(chaos, killed_after_s=None)
        for python in (None, released):
            order = list(SERVICES)
            seeded.shuffle(order)
            await replace(chaos, order, python)
        chaos.enough.set()
        outcome = await run
        logs = "".join(chaos.plane.log(name) for name in SERVICES)
    print(f"{outcome.jobs} jobs, {outcome.calls} calls, sums {outcome.sums}")
    assert outcome.faults_found(()) == []
    assert outcome.calls == outcome.jobs > 300
    assert '"handler_failed"' not in logs
    assert "job_handling_failed" not in logs
