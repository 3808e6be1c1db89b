"""Programs on NATS and keys over HTTP share one plane: nobody's id takes, hides or answers another's job."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio
from nats.aio.msg import Msg

from breakwater.config import load_config
from breakwater.identity.api_keys import create_key
from breakwater.jobs.rules.ids import key_of
from breakwater.kernel.ids import id_at
from breakwater.kernel.nats import subjects
from tests.flow.kit import model
from tests.helpers import until
from tests.server_sources import RunningServer
from tests.services.request.conftest import new_id, running, settings_for
from tests.services.request.test_own_names import Shared
from tests.services.worker.harness import running_worker

ONCE = {"max_attempts": 1}
AGENTS = {
    "writer": {"model": "sim/fast"},
    "single": {"model": "sim/fast"},
    "slow": {"model": "sim/slow"},
    "guarded": {
        "model": "sim/fast",
        "allowed_models": ["*"],
        "guard": {"consecutive_failures": 1},
        "retry": ONCE,
        "breaker": "off",
    },
}
MODELS = {"sim/fast": model(answer="Done."), "sim/down": model({"status": 500}), "sim/slow": model(latency_ms=3000)}
PROGRAMS: dict[str, Any] = {
    "one": {"agents": ["single", "guarded", "slow"]},
    "acme": {"agents": ["single"], "tenants": ["acme"]},
}


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def plane(
    module_nats_server: RunningServer, redis_server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Shared]:
    directory = tmp_path_factory.mktemp("bus")
    started = running_worker(
        directory,
        nats_url=module_nats_server.url,
        redis_url=redis_server.url,
        script={"models": MODELS},
        agents=AGENTS,
        programs=PROGRAMS,
    )
    async with started as worker:
        settings = settings_for(module_nats_server.url, redis_server.url, directory)
        config = load_config(directory / "breakwater.yaml")
        async with running(settings, config, create_key(settings.api_keys_file, "tests")) as api:
            yield Shared(api, worker)


async def ask(plane: Shared, user: str, message_id: str | None = None, **job: Any) -> dict[str, Any]:
    """Publishes a job as the account of a program does, and waits for the answer."""
    client, heard = plane.worker.client, list[Msg]()
    inbox = client.new_inbox().replace("_INBOX.", f"_INBOX.{user}.") if user != "client" else client.new_inbox()

    async def hear(message: Msg) -> None:
        heard.append(message)

    subscription = await client.subscribe(inbox, cb=hear)
    body = {"agent": "single", "prompt": "x", "reply_to": inbox, **job}
    headers = None if message_id is None else {"Nats-Msg-Id": message_id}
    subject = subjects.job_by(str(body["agent"]), user)
    await plane.worker.jetstream.publish(subject, json.dumps(body).encode(), headers=headers)
    await until(lambda: heard, "the answer")
    await subscription.unsubscribe()
    return json.loads(heard[0].data)


def calls(plane: Shared) -> int:
    return plane.worker.sim.ledger.totals.calls


async def test_a_program_that_takes_a_message_id_keeps_no_job_from_http(plane: Shared) -> None:
    before = calls(plane)
    await ask(plane, "program-one", "writer/order-777")
    for headers in (plane.key("shop"), {}):
        done = await plane.run(headers, agent="writer", job_id="order-777")
        assert (done.status, done.json["status"], done.json["job_id"]) == (200, "succeeded", "order-777")
    assert calls(plane) == before + 3


async def test_two_programs_with_one_message_id_both_get_answers(plane: Shared) -> None:
    answers = await asyncio.gather(
        ask(plane, "client", "order-1", agent="single"), ask(plane, "program-one", "order-1", agent="guarded")
    )
    assert [answer["status"] for answer in answers] == ["succeeded"] * 2
    assert [answer["job_id"] for answer in answers] == ["order-1"] * 2
    assert [answer["execution_id"] for answer in answers] == ["order-1", key_of("program-one", "order-1")]


async def test_a_program_can_not_take_an_id_that_was_made_for_another(plane: Shared) -> None:
    victim, made = plane.key("victim"), id_at(1, bytes(10))
    # The queue of one agent stands still, and who may hear the progress of its jobs learns their ids.
    await plane.worker.end()
    writer = plane.worker.handlers.pop("writer")
    plane.worker.begin()
    accepted = await plane.api.post({"agent": "writer", "prompt": "mine", "job_id": made}, **victim)
    assert accepted.status == 202
    for user in ("program-one", "program-acme"):
        squatted = await ask(plane, user, job_id=made, prompt="squat")
        assert (squatted["status"], squatted["job_id"]) == ("succeeded", made)
        assert squatted["execution_id"] != made
    await plane.worker.end()
    plane.worker.handlers["writer"] = writer
    plane.worker.begin()
    mine = await plane.ask(victim, "GET", f"jobs/{made}?wait_s=30")
    assert (mine.status, mine.json.get("owner"), mine.json["status"]) == (200, "victim", "succeeded")
    again = await ask(plane, "program-one", job_id=made, prompt="is it there?")
    assert again["error"]["class"] == "IdConflictError"  # its own


async def test_a_program_refers_to_its_own_jobs_by_ids_that_look_made(plane: Shared) -> None:
    for user in ("program-one", "program-acme"):
        first = id_at(2, bytes(10))
        await ask(plane, user, job_id=first, prompt=user)
        done = await ask(plane, user, depends_on=[first], parent_execution_id=first)
        assert (done["status"], done["parent_job_id"]) == ("succeeded", first)
        assert done["parent_execution_id"] == key_of(user, first)


async def test_a_program_of_a_tenant_refers_to_the_tenants_jobs(plane: Shared) -> None:
    made = (await plane.run(plane.key("acme", tenants=("acme",)), agent="single")).json["job_id"]
    assert (await ask(plane, "program-acme", depends_on=[made]))["status"] == "succeeded"


async def test_a_dependency_of_a_program_is_known_while_it_runs(plane: Shared) -> None:
    first = new_id()
    running_first = asyncio.create_task(ask(plane, "program-one", agent="slow", job_id=first))
    await asyncio.sleep(0.5)
    done = await ask(plane, "program-one", depends_on=[first], total_timeout_s=1)
    assert done["status"] == "succeeded", done["error"]
    await running_first


async def test_an_answer_names_the_task_as_the_parent_did(plane: Shared) -> None:
    shop, task = plane.key("shop"), new_id()
    parent = (await plane.run(shop, agent="guarded", task_id=task)).json["job_id"]
    child = await plane.run(shop, agent="guarded", parent_execution_id=parent)
    assert child.json["task_id"] == task
    assert child.json["task_key"] == key_of("key:shop", task)


async def test_the_ids_of_others_change_no_number_of_an_operators_answer(plane: Shared) -> None:
    metadata = {"mail": "ann@example.com", "number": 123456789012345678901234567890}
    for headers in ({}, plane.key("shop")):
        job_id = new_id()
        done = await plane.run(headers, agent="writer", job_id=job_id, metadata=metadata)
        shown = await plane.ask(headers, "GET", f"jobs/{job_id}")
        assert (done.json["metadata"], shown.json["metadata"]) == (metadata, metadata)
    answer = await ask(plane, "client", metadata=metadata)
    assert answer["metadata"] == metadata


@pytest.mark.parametrize("user", ["client", "program-one"])
async def test_an_id_that_is_too_long_is_refused_at_once(plane: Shared, user: str) -> None:
    refused = await ask(plane, user, job_id="a@" + "b" * 180)
    assert (refused["reason"], refused["error"]["class"]) == ("invalid", "InvalidJobError")


async def test_a_replayed_job_of_a_program_stays_out_of_anothers_task(plane: Shared) -> None:
    victim, task = plane.key("victim"), new_id()
    for user in ("program-one", "client"):
        failed = await ask(plane, user, agent="guarded", model="sim/down", task_id=key_of("key:victim", task))
        assert failed["status"] == "dead_lettered"
    answer = await plane.api.act("dlq/replay", all=True, why="test")
    replayed = [one["execution_id"] for one in answer.json["replayed"]]
    assert len(replayed) >= 2
    for execution_id in replayed:
        ended = await plane.ask({}, "GET", f"jobs/{execution_id}?wait_s=60")
        assert (ended.status, ended.json["job_id"]) == (200, execution_id)
    mine = await plane.run(victim, agent="guarded", task_id=task, prompt="mine")
    assert mine.json["status"] == "succeeded", mine.json["error"]
