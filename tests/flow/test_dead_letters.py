"""A job that was given up, and is run again when what was wrong is mended: through the API and a real worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from breakwater.identity.api_keys import create_key
from breakwater.kernel.nats import subjects
from breakwater.local.ports import free_port, http_ready
from tests.flow.fixtures import StartPlane
from tests.flow.kit import COST, Plane, model
from tests.helpers import until

ONE_TRY = {"retry": {"max_attempts": 1}, "breaker": "off"}
ILL = {"models": {"sim/m": model({"status": 500})}}
WELL = {"models": {"sim/m": model(answer="here it is")}}


class HttpApi:
    """The HTTP interface, asked with a key."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http, self._url = http, url

    async def get(self, path: str) -> Any:
        async with self._http.get(f"{self._url}/api/v1/{path}") as response:
            assert response.status in {200, 202}, await response.text()
            return await response.json()

    async def replay(self, **body: Any) -> Any:
        async with self._http.post(f"{self._url}/api/v1/dlq/replay", json=body) as response:
            assert response.status == 200, await response.text()
            return await response.json()


@asynccontextmanager
async def with_api(
    start_plane: StartPlane, directory: Path, script: Mapping[str, Any], agents: Mapping[str, Any]
) -> AsyncGenerator[tuple[Plane, HttpApi]]:
    port, keys = free_port(), directory / "keys.json"
    key = create_key(keys, "ops")
    environment = {"BREAKWATER_HTTP_PORT": str(port), "BREAKWATER_API_KEYS_FILE": str(keys)}
    async with (
        start_plane(script["models"], agents, services=("worker", "request"), environment=environment) as plane,
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as http,
    ):
        api = HttpApi(http, f"http://127.0.0.1:{port}")
        await until(http_ready("127.0.0.1", port, "/readyz"), what="the request service")
        yield plane, api


async def test_a_job_that_was_given_up_is_run_again_once_and_linked_to_the_first(
    start_plane: StartPlane, tmp_path: Path
) -> None:
    agents = {"writer": {"model": "sim/m", **ONE_TRY}}
    job = {"agent": "writer", "job_id": "j1", "prompt": "mail ann@example.com", "tenant": "acme", "task_id": "t1"}
    async with with_api(start_plane, tmp_path, ILL, agents) as (plane, api):
        await plane.publish(job, **{"Nats-Msg-Id": "j1"})
        failed = await plane.result("j1")
        assert (failed["status"], failed["reason"]) == ("dead_lettered", "error")
        [dead_letter] = (await api.get("dlq"))["dead_letters"]
        assert (dead_letter["kind"], dead_letter["execution_id"], dead_letter["replayable"]) == ("job", "j1", True)
        assert (await api.get(f"dlq/{dead_letter['dead_letter_id']}"))["payload"]["prompt"] == "mail [REDACTED]"

        plane.sim.use(WELL)
        answers = await asyncio.gather(
            *(api.replay(dead_letters=[dead_letter["dead_letter_id"]], why="the provider is back") for _ in range(3))
        )
        [replayed] = [one for answer in answers for one in answer["replayed"]]
        assert sum(answer["already"] for answer in answers) == 2
        again = await plane.result(replayed["execution_id"])
        assert (again["status"], again["output"], again["total_cost"]) == ("succeeded", "here it is", COST)
        assert (again["tenant"], again["task_id"]) == ("acme", "t1")
        [record] = await plane.messages("EVENTS", subjects.execution("writer", replayed["execution_id"]), at_least=1)
        assert record["metadata"] == {"replay_of": "j1"}
        # Once, however often it is asked for after that.
        assert (await api.replay(reason="error"))["already"] == 1
        assert plane.sim.ledger.totals.calls == 2
        assert (await plane.result("j1"))["status"] == "dead_lettered"
        [dead_letter] = (await api.get("dlq"))["dead_letters"]
        assert (dead_letter["replayed_as"], dead_letter["replay_status"]) == (replayed["execution_id"], "succeeded")


async def test_a_replay_that_fails_again_is_another_dead_letter_that_can_be_replayed(
    start_plane: StartPlane, tmp_path: Path
) -> None:
    agents = {"writer": {"model": "sim/m", **ONE_TRY}}
    async with with_api(start_plane, tmp_path, ILL, agents) as (plane, api):
        await plane.publish({"agent": "writer", "job_id": "j1", "prompt": "x"})
        await plane.result("j1")
        [first] = (await api.replay(all=True))["replayed"]
        assert (await plane.result(first["execution_id"]))["status"] == "dead_lettered"
        second, old = (await api.get("dlq"))["dead_letters"]
        assert (old["replay_status"], old["replayable"]) == ("dead_lettered", False)
        assert (second["execution_id"], second["replayable"]) == (first["execution_id"], True)
        plane.sim.use(WELL)
        reported = await api.replay(all=True)
        [third] = reported["replayed"]
        assert (third["dead_letter_id"], reported["already"]) == (second["dead_letter_id"], 1)
        again = await plane.result(third["execution_id"])
        assert (again["status"], again["metadata"]) == ("succeeded", {"replay_of": first["execution_id"]})


async def test_what_is_no_job_is_not_replayed_and_said_why(start_plane: StartPlane, tmp_path: Path) -> None:
    agents = {"writer": {"model": "sim/m", **ONE_TRY}}
    async with with_api(start_plane, tmp_path, WELL, agents) as (plane, api):
        # One after the other: a worker may be done with the second first.
        await plane.publish(b'{"agent": "writer"', "writer", **{"Nats-Msg-Id": "broken"})
        assert (await plane.result("broken"))["reason"] == "invalid"
        await plane.publish({"agent": "other", "job_id": "j2", "prompt": "x"}, "writer")
        assert (await plane.result("j2"))["reason"] == "invalid"
        reported = await api.replay(reason="invalid")
        assert reported["replayed"] == []
        assert [one["why"].partition(":")[0] for one in reported["skipped"]] == [
            "this is not a job",
            "agent 'other' is not configured; known are writer",
        ]
        assert plane.sim.ledger.totals.calls == 0
