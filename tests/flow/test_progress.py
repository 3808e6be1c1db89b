"""Jobs followed live over HTTP, with a real worker."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from breakwater.identity.api_keys import create_key
from breakwater.local.ports import free_port, http_ready
from tests.docs.markdown import ROOT, blocks
from tests.flow.fixtures import StartPlane
from tests.flow.kit import Plane, model
from tests.helpers import until

AGENT = {"model": "sim/m", "retry": {"max_attempts": 3, "backoff": "constant", "base_s": 0.01}, "breaker": "off"}


class HttpApi:
    """The HTTP interface of a plane."""

    def __init__(self, plane: Plane, http: aiohttp.ClientSession, url: str, key: str) -> None:
        self.plane = plane
        self.http = http
        self.url = url
        self.key = key

    async def submit(self, job: dict[str, Any]) -> None:
        async with self.http.post(f"{self.url}/api/v1/jobs", json=job) as response:
            assert response.status == 202

    async def follow(self, job_id: str) -> AsyncGenerator[tuple[str, Any]]:
        """The events of a stream, by their names."""
        async with self.http.get(f"{self.url}/api/v1/jobs/{job_id}/progress") as response:
            assert response.status == 200
            event = ""
            async for line in response.content:
                name, _, value = line.decode().strip().partition(": ")
                if name == "event":
                    event = value
                elif name == "data":
                    yield event, json.loads(value)


@asynccontextmanager
async def api_of(
    start_plane: StartPlane, tmp_path: Path, models: dict[str, Any], *services: str
) -> AsyncGenerator[HttpApi]:
    port, keys = free_port(), tmp_path / "keys.json"
    key = create_key(keys, "test")
    environment = {"BREAKWATER_HTTP_PORT": str(port), "BREAKWATER_API_KEYS_FILE": str(keys)}
    agents = {"content-writer": AGENT}
    timeout = aiohttp.ClientTimeout(total=None, sock_read=120)
    async with (
        start_plane(models, agents, services=("request", *services), environment=environment) as plane,
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}, timeout=timeout) as http,
    ):
        await until(http_ready("127.0.0.1", port, "/readyz"), what="the request service")
        yield HttpApi(plane, http, f"http://127.0.0.1:{port}", key)


async def test_a_job_is_followed_from_queued_over_a_retry_to_its_success(
    start_plane: StartPlane, tmp_path: Path
) -> None:
    async with api_of(start_plane, tmp_path, {"sim/m": model({"requests": [1, 1], "status": 503})}) as api:
        await api.submit({"agent": "content-writer", "job_id": "j1", "prompt": "hello"})
        received: list[tuple[str, Any]] = []
        async with aclosing(api.follow("j1")) as events:
            async for event in events:
                received.append(event)
                if len(received) == 1:
                    api.plane.start("worker")
        steps = [(data["state"], data["event"], data["attempt"]) for name, data in received if name == "progress"]
        assert steps == [
            ("queued", None, None),
            ("dispatched", None, None),
            ("in_progress", "agent.attempt.start", 1),
            ("in_progress", "agent.attempt.error", 1),
            ("retried", "llm_retry_attempt", 1),
            ("in_progress", "agent.attempt.start", 2),
            ("in_progress", "agent.attempt.finish", 2),
            ("succeeded", None, None),
        ]
        assert received[-1] == (
            "decided",
            {"execution_id": "j1", "job_id": "j1", "status": "succeeded", "reason": None},
        )
        assert {data["execution_id"] for _, data in received} == {"j1"}
        # And again, when it is over: the same attempts, as they are recorded.
        async with aclosing(api.follow("j1")) as events:
            again = [event async for event in events]
        heard = [
            data for name, data in received if data.get("event") in {"agent.attempt.error", "agent.attempt.finish"}
        ]
        assert again[0][1]["state"] == "queued"
        assert again[0][1]["at"] <= again[1][1]["at"]
        assert [data | {"at": None} for _, data in again[1:-1]] == [data | {"at": None} for data in heard]
        assert again[-1] == received[-1]


async def test_who_joins_while_a_call_is_under_way_receives_which(start_plane: StartPlane, tmp_path: Path) -> None:
    async with api_of(start_plane, tmp_path, {"sim/m": model({"hang_s": 600})}, "worker") as api:
        await api.submit({"agent": "content-writer", "job_id": "j1", "prompt": "hello"})

        async def called() -> bool:
            return api.plane.sim.ledger.totals.in_progress == 1

        await until(called, what="a call")
        async with asyncio.timeout(120), aclosing(api.follow("j1")) as events:
            queued, first, second = [(await anext(events))[1] for _ in range(3)]
        assert (queued["state"], first["state"]) == ("queued", "dispatched")
        assert queued["at"] <= first["at"]
        assert (second["event"], second["attempt"], second["model"]) == ("agent.attempt.start", 1, "sim/m")
        assert first["at"] <= second["at"]


async def test_the_documented_commands_follow_a_job_to_its_end(start_plane: StartPlane, tmp_path: Path) -> None:
    [shown] = [block.text for block in blocks(ROOT / "docs" / "observability.md") if "/progress" in block.text]
    async with api_of(start_plane, tmp_path, {"sim/m": model()}, "worker") as api:
        secret = tmp_path / ".breakwater" / "secrets" / "api-key"
        secret.parent.mkdir(parents=True)
        secret.write_text(f"{api.key}\n")
        command = ["sh", "-eu", "-c", shown.replace("http://127.0.0.1:8080", api.url)]
        ran = await asyncio.to_thread(
            subprocess.run, command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
        )
        assert ran.returncode == 0, ran.stderr
        assert "event: progress\n" in ran.stdout
        assert ran.stdout.count("event: decided\n") == 1
        assert '"status":"succeeded"' in ran.stdout.splitlines()[-3]
