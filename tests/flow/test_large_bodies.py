"""Many large bodies at once, with services as processes of their own: their memory, and what a kill costs.

`BODIES=24 BODY_MB=31 BUDGET_MB=256 pytest tests/flow/test_large_bodies.py -rP` prints the peaks for another load.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from breakwater.identity.api_keys import create_key
from breakwater.local.ports import free_port, http_ready
from tests.flow.fixtures import StartPlane
from tests.flow.kit import model
from tests.helpers import ServiceProcess, until

BODIES = int(os.environ.get("BODIES", "8"))
BODY_BYTES = int(os.environ.get("BODY_MB", "6")) * 1_000_000
BUDGET_BYTES = int(os.environ.get("BUDGET_MB", "12")) * 1_000_000
TIMES = 6
"""The most memory that a body takes, in bodies."""
MARGIN_MB = 60


def peak_mb(process: ServiceProcess) -> int:
    [line] = [line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) // 1024


@pytest.mark.chaos
async def test_parallel_large_bodies_take_the_memory_of_the_budget_and_a_killed_worker_loses_none(
    start_plane: StartPlane, tmp_path: Path
) -> None:
    port, keys = free_port(), tmp_path / "keys.json"
    key = create_key(keys, "tests")
    environment = {"BREAKWATER_HTTP_PORT": str(port), "BREAKWATER_API_KEYS_FILE": str(keys), "BREAKWATER_PACE": "4"}
    agents = {"writer": {"model": "sim/m", "concurrency": 32, "breaker": "off", "guard": "off"}}
    limits: dict[str, Any] = {
        "max_body_bytes": BODY_BYTES + 1_000_000,
        "bodies_in_memory_bytes": BUDGET_BYTES,
        "jobs_max_bytes_per_agent": 2 * 1024**3,
    }
    image = base64.b64encode(os.urandom(BODY_BYTES * 3 // 4)).decode()
    content = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}]
    chat = {"model": "writer", "messages": [{"role": "user", "content": content}]}
    body = json.dumps(chat).encode()
    running = start_plane(
        {"sim/m": model(answer="A cat.", latency_ms=500)},
        agents,
        services=("request", "worker"),
        environment=environment,
        limits=limits,
    )
    async with running as plane, aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as http:
        await until(http_ready("127.0.0.1", port, "/readyz"), "request to be ready")
        await plane.ready("worker")
        begun_mb = {name: peak_mb(process) for name, process in plane.processes.items()}

        async def ask() -> str:
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            while True:
                async with http.post(url, data=body, headers={"Content-Type": "application/json"}) as answer:
                    found = await answer.json()
                if (answer.status, answer.headers.get("Retry-After")) != (503, "5"):
                    assert answer.status == 200, found
                    return found["choices"][0]["message"]["content"]

        # All are accepted at once, though the worker has room for a part of them: `request` keeps no texts of a chat.
        asking = [asyncio.create_task(ask()) for _ in range(BODIES)]
        await until(lambda: plane.sim.ledger.totals.in_progress, "the first call")
        worker_mb = peak_mb(plane.processes["worker"])
        plane.kill("worker")
        plane.start("worker")
        assert await asyncio.gather(*asking) == ["A cat."] * BODIES
        peaks_mb = {name: peak_mb(process) for name, process in plane.processes.items()}
        peaks_mb["worker"] = max(worker_mb, peaks_mb["worker"])
        print(f"{BODIES} bodies of {BODY_BYTES:,} bytes, budget {BUDGET_BYTES:,}: {begun_mb} -> {peaks_mb} MB")
        for name, before_mb in begun_mb.items():
            assert peaks_mb[name] < before_mb + MARGIN_MB + TIMES * BUDGET_BYTES // 2**20, peaks_mb

        async def is_emptied() -> bool:
            return (await plane.jetstream.stream_info("OBJ_bodies")).state.messages == 0

        await until(is_emptied, "an empty object store")
