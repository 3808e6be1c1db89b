"""Ids are the names of those who choose them: nobody stops, takes or detects another's, here as each would try it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from breakwater.config import load_config
from breakwater.identity.api_keys import create_key
from breakwater.jobs.rules.ids import key_of
from tests.flow.kit import model
from tests.server_sources import RunningServer
from tests.services.request.conftest import Answer, HttpApi, new_id, running, settings_for
from tests.services.request.test_ownership import key
from tests.services.worker.harness import WorkerPlane, running_worker

ONCE = {"max_attempts": 1}
AGENTS = {
    "fast": {"model": "sim/fast"},
    "cached": {"model": "sim/fast", "cache": {"ttl_s": 60}},
    "guarded": {
        "model": "sim/fast",
        "allowed_models": ["*"],
        "guard": {"consecutive_failures": 1},
        "retry": ONCE,
        "breaker": "off",
    },
}
MODELS = {"sim/fast": model(answer="Done."), "sim/down": model({"status": 500})}


@dataclass(frozen=True, slots=True)
class Shared:
    """A plane that several keys share."""

    api: HttpApi
    worker: WorkerPlane

    def key(self, name: str, **bound: tuple[str, ...]) -> dict[str, str]:
        return key(self.api, name, **bound)

    async def run(self, headers: dict[str, str], **job: Any) -> Answer:
        return await self.api.post({"agent": "fast", "prompt": "x", **job}, query="?wait_s=60", **headers)

    async def ask(self, headers: dict[str, str], method: str, path: str, **more: Any) -> Answer:
        return await self.api.ask(method, f"/api/v1/{path}", headers=headers, **more)


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def plane(
    module_nats_server: RunningServer, redis_server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Shared]:
    directory = tmp_path_factory.mktemp("names")
    started = running_worker(
        directory, nats_url=module_nats_server.url, redis_url=redis_server.url, script={"models": MODELS}, agents=AGENTS
    )
    async with started as worker:
        settings = settings_for(module_nats_server.url, redis_server.url, directory)
        config = load_config(directory / "breakwater.yaml")
        async with running(settings, config, create_key(settings.api_keys_file, "tests")) as api:
            yield Shared(api, worker)


async def test_two_keys_may_choose_the_same_id_and_each_sees_its_own(plane: Shared) -> None:
    one, other, job_id = plane.key("one"), plane.key("other"), new_id()
    mine = await plane.run(one, job_id=job_id, prompt="mine", metadata={"of": "one"})
    theirs = await plane.run(other, job_id=job_id, prompt="theirs", metadata={"of": "other"})
    for name, headers, answer in (("one", one, mine), ("other", other, theirs)):
        execution_id = key_of(f"key:{name}", job_id)
        assert (answer.status, answer.json["job_id"], answer.json["execution_id"]) == (200, job_id, execution_id)
        assert answer.json["attempts"][0]["attempt_id"] == f"{execution_id}:1"
        for written_id in (job_id, execution_id):
            found = await plane.ask(headers, "GET", f"jobs/{written_id}")
            assert (found.json["metadata"], found.json["job_id"]) == ({"of": name}, job_id)
        assert (await plane.api.ask("GET", f"/api/v1/jobs/{execution_id}")).json["job_id"] == job_id
    assert (await plane.ask(other, "GET", f"jobs/{mine.json['execution_id']}")).status == 404
    assert (await plane.api.ask("GET", f"/api/v1/jobs/{job_id}")).status == 404


async def test_replicas_of_one_program_share_a_key_and_run_a_job_once(plane: Shared) -> None:
    replicas, job_id = [plane.key("shared"), plane.key("shared")], new_id()
    answers = await asyncio.gather(*(plane.run(one, job_id=job_id) for one in replicas * 2))
    assert len({answer.body for answer in answers}) == 1
    assert (await plane.run(replicas[0], job_id=job_id, prompt="another")).code == "id_conflict"


@pytest.mark.parametrize("way", ["made", "chosen"])
async def test_409_does_not_tell_what_404_hides(plane: Shared, way: str) -> None:
    victim, attacker = plane.key("victim"), plane.key("attacker")
    known = (await plane.run(victim, **({} if way == "made" else {"job_id": new_id()}))).json["job_id"]
    assert (await plane.ask(attacker, "GET", f"jobs/{known}")).status == 404
    taken = await plane.run(attacker, job_id=known, prompt="is it there?")
    assert (taken.status, taken.json["job_id"]) == (200, known)
    assert (await plane.ask(attacker, "GET", f"jobs/{known}")).json["owner"] == "attacker"
    assert (await plane.ask(victim, "GET", f"jobs/{known}")).json["owner"] == "victim"


async def test_another_keys_job_is_unknown_by_all_its_names(plane: Shared) -> None:
    victim, attacker, job_id = plane.key("victim"), plane.key("attacker"), new_id()
    await plane.run(victim, job_id=job_id, plan_id="p")
    for name in (job_id, key_of("key:victim", job_id)):
        assert (await plane.ask(attacker, "GET", f"jobs/{name}")).status == 404
        assert (await plane.ask(attacker, "HEAD", f"jobs/{name}/progress")).status == 404
        assert (await plane.ask(attacker, "POST", f"jobs/{name}/cancel")).status == 404
    assert (await plane.ask(victim, "HEAD", f"jobs/{job_id}/progress")).status == 200
    assert (await plane.ask(victim, "POST", f"jobs/{job_id}/cancel")).json["job_id"] == job_id


async def test_progress_names_a_job_as_its_owner_does(plane: Shared) -> None:
    owner, job_id = plane.key("owner"), new_id()
    await plane.run(owner, job_id=job_id, parent_execution_id="above")
    stream = await plane.ask(owner, "GET", f"jobs/{job_id}/progress")
    steps = [json.loads(line[6:]) for line in stream.body.decode().splitlines() if line.startswith("data: ")]
    assert {step["job_id"] for step in steps} == {job_id}
    assert {step["execution_id"] for step in steps} == {key_of("key:owner", job_id)}
    assert {step["parent_job_id"] for step in steps if "parent_job_id" in step} == {"above"}


async def test_a_dry_run_takes_no_id(plane: Shared) -> None:
    owner, job_id = plane.key("owner"), new_id()
    for _ in range(2):
        planned = await plane.run(owner, job_id=job_id, dry_run=True)
        assert (planned.status, planned.json["dry_run"], planned.json["job_id"]) == (200, True, job_id)
    assert (await plane.ask(owner, "GET", f"jobs/{job_id}")).json["dry_run"] is True
    done = await plane.run(owner, job_id=job_id)
    assert (done.status, done.json["dry_run"]) == (200, False)
    assert (await plane.run(owner, job_id=job_id, prompt="another", dry_run=True)).json["dry_run"] is True
    assert (await plane.ask(owner, "GET", f"jobs/{job_id}")).body == done.body


async def test_a_tenants_keys_share_their_names_and_nobody_elses(plane: Shared) -> None:
    first, second = plane.key("first", tenants=("acme",)), plane.key("second", tenants=("acme",))
    rival, free, job_id = plane.key("rival", tenants=("rival",)), plane.key("first"), new_id()
    done = await plane.run(first, job_id=job_id)
    assert (await plane.run(second, job_id=job_id)).body == done.body
    for headers in (rival, free):
        assert (await plane.run(headers, job_id=job_id, prompt="other")).status == 200
    found = await plane.api.ask("GET", f"/api/v1/jobs/{done.json['execution_id']}")
    assert found.json["tenant"] == "acme"


async def test_a_failing_job_of_another_key_stops_no_task(plane: Shared) -> None:
    victim, attacker, task, parent = plane.key("victim"), plane.key("attacker"), new_id(), new_id()
    await plane.run(victim, agent="guarded", job_id=parent)
    made = (await plane.run(victim, agent="guarded")).json["job_id"]
    ways: list[dict[str, Any]] = [
        {"task_id": task},
        {"parent_execution_id": parent},
        {"parent_execution_id": made},
        {"task_id": made},
    ]
    for way in ways:
        failed = await plane.run(attacker, agent="guarded", model="sim/down", **way)
        assert failed.json["status"] == "dead_lettered"
        stopped = await plane.run(attacker, agent="guarded", prompt="again", **way)
        assert stopped.json["reason"] == "guard_tripped", way
    for way in ways:
        answer = await plane.run(victim, agent="guarded", prompt="mine", **way)
        assert answer.json["status"] == "succeeded", way
        named = {"task_id": answer.json["task_id"], "parent_execution_id": answer.json["parent_job_id"]}
        assert {name: named[name] for name in way} == way


async def test_a_job_may_refer_to_its_callers_jobs_by_their_executions(plane: Shared) -> None:
    owner, other, task = plane.key("owner"), plane.key("other"), new_id()
    parent = (await plane.run(owner, agent="guarded", job_id=new_id(), task_id=task)).json["execution_id"]
    for headers, named, depends_on in ((owner, task, [parent]), (other, parent, [])):
        child = await plane.run(headers, agent="guarded", parent_execution_id=parent, depends_on=depends_on)
        assert (child.json["status"], child.json["task_id"]) == ("succeeded", named)
        assert (child.json["parent_execution_id"] == parent) == (headers is owner)
    refused = await plane.run(other, depends_on=[parent], total_timeout_s=0.5)
    assert refused.json["reason"] == "dependency_failed"


async def test_a_dependency_is_a_job_of_ones_own(plane: Shared) -> None:
    owner, other, job_id = plane.key("owner"), plane.key("other"), new_id()
    made = (await plane.run(owner)).json["job_id"]
    await plane.run(owner, job_id=job_id)
    assert (await plane.run(owner, depends_on=[job_id, made])).json["status"] == "succeeded"
    failed = await plane.run(other, depends_on=[job_id], total_timeout_s=0.5)
    assert failed.json["reason"] == "dependency_failed"
    assert f"{job_id!r}" in failed.json["error"]["message"]


async def test_an_answer_is_cached_for_its_key_or_tenant(plane: Shared) -> None:
    keys = [plane.key("one"), plane.key("other"), plane.key("bound", tenants=("acme",))]
    prompt = new_id()
    for headers in keys:
        hits = [(await plane.run(headers, agent="cached", prompt=prompt)).json["cache_hit"] for _ in range(2)]
        assert hits == [False, True]
    same_tenant = await plane.run(plane.key("another", tenants=("acme",)), agent="cached", prompt=prompt)
    assert same_tenant.json["cache_hit"] is True


async def test_a_plan_is_that_of_its_key(plane: Shared) -> None:
    owner, other, plan = plane.key("owner"), plane.key("other"), new_id()

    async def submit(headers: dict[str, str], *prompts: str) -> Answer:
        jobs = [{"agent": "fast", "prompt": prompt} for prompt in prompts]
        return await plane.ask(headers, "POST", "plans", data=json.dumps({"plan_id": plan, "jobs": jobs}).encode())

    def plan_of(name: str, *job_ids: str) -> dict[str, Any]:
        return {"plan_id": plan, "plan_key": key_of(f"key:{name}", plan), "job_ids": list(job_ids)}

    mine, theirs = await submit(owner, "a", "b"), await submit(other, "c")
    assert (mine.status, mine.json) == (202, plan_of("owner", f"{plan}.1", f"{plan}.2"))
    assert (theirs.status, theirs.json) == (202, plan_of("other", f"{plan}.1"))
    first = await plane.ask(owner, "GET", f"jobs/{plan}.1?wait_s=60")
    assert (first.json["plan_id"], first.json["job_id"]) == (plan, f"{plan}.1")
