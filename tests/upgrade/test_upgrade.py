"""An upgrade under load, and back: services of two versions side by side, replaced in any order, each killed once."""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from breakwater.local.ports import free_port
from tests.chaos.faults import SERVICES, Fault
from tests.chaos.plane import Chaos, chaos_plane, serving
from tests.helpers import until
from tests.server_sources import Servers
from tests.upgrade.released import install_released


class Visitor:
    """Somebody who is signed in to the console, and looks at its pages for as long as the upgrade takes.

    Attributes:
        shown: how many pages were shown.
        refused: the pages that were answered with something else, by status and text; but for those that say that
            `request`, which knows the session, is away: there is one of it, and it is replaced, too.
    """

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self.key = key
        self.shown = 0
        self.refused: list[str] = []

    async def look(self) -> None:
        """Signs in once, and opens five pages a second, until cancelled. A console that is away is asked again."""
        jar = aiohttp.CookieJar(unsafe=True)
        async with aiohttp.ClientSession(self.url, cookie_jar=jar, timeout=aiohttp.ClientTimeout(total=30)) as http:

            async def signed_in() -> bool:
                try:
                    async with http.post("/sign-in", data={"key": self.key}, allow_redirects=False) as answer:
                        return answer.status == 303
                except aiohttp.ClientError:
                    return False

            await until(signed_in, "the console to let its visitor in")
            while True:
                for path in ("/", "/executions", "/agents", "/breakers"):
                    try:
                        async with http.get(path, allow_redirects=False) as answer:
                            text = await answer.text()
                    except aiohttp.ClientError:
                        pass  # It is being replaced.
                    else:
                        self.shown += answer.status == 200
                        if answer.status != 200:
                            main = re.sub(r"<[^>]*>", " ", text.partition("<main")[2])
                            if not (answer.status == 503 and "no server at" in main):
                                self.refused.append(f"{path}: {answer.status} {' '.join(main.split())}")
                    await asyncio.sleep(0.2)


async def replace(chaos: Chaos, order: list[str], python: Path | None, killed: dict[str, float]) -> None:
    """Replaces each service by one of the other version, as an orchestrator does, and waits until it works.

    Args:
        chaos: the plane.
        order: the names of the services.
        python: of the other version; None for this one.
        killed: the services whose successors die once as they start or begin to work, with the seconds that they live.
    """
    plane = chaos.plane
    for name in order:
        assert await plane.terminate(name) == 0, plane.log(name)[-2000:]
        logged = len(plane.log(name))
        plane.python = python
        plane.start(name.partition("-")[0], name)
        if name in killed:
            await asyncio.sleep(killed[name])
            plane.kill(name)
            logged = len(plane.log(name))
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
    services = (*SERVICES, "console")

    async with chaos_plane(tmp_path, servers, nodes=1, disks={}, clocks={}, python=released) as chaos:
        console = f"http://127.0.0.1:{(port := free_port())}"
        chaos.plane.environment |= {"BREAKWATER_CONSOLE_PORT": str(port), "BREAKWATER_REQUEST_URL": chaos.url}
        chaos.plane.start("console")
        visitor = Visitor(console, chaos.headers["Authorization"].removeprefix("Bearer "))
        visit = asyncio.create_task(visitor.look())
        run = asyncio.create_task(chaos.run((), jobs=100_000, per_s=8))
        await set_up(chaos, killed_after_s=seeded.uniform(0.5, 2))
        await set_up(chaos, killed_after_s=None)
        mortal = seeded.sample(services, len(services))
        for python, dying in ((None, mortal[::2]), (released, mortal[1::2])):
            order = seeded.sample(services, len(services))
            await replace(chaos, order, python, {name: seeded.uniform(0.2, 3) for name in dying})
        chaos.enough.set()
        outcome = await run
        visit.cancel()
        await asyncio.wait([visit])
        logs = "".join(chaos.plane.log(name) for name in services)
    print(f"{outcome.jobs} jobs, {outcome.calls} calls, sums {outcome.sums}; {visitor.shown} pages")
    assert outcome.faults_found(tuple(Fault("kill", name, 0) for name in services)) == []
    assert outcome.jobs > 300
    # What a worker was about to call as it was killed counts as lost, too, though no call may have been made.
    assert outcome.attempts - outcome.jobs == outcome.lost
    assert outcome.calls <= outcome.attempts
    assert visit.cancelled()
    assert visitor.refused == []
    assert visitor.shown > 50
    assert '"handler_failed"' not in logs
    assert "job_handling_failed" not in logs
