"""Ids that programs choose: each program has names of its own, and reads them as it chose them."""

from __future__ import annotations

import json
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg

from breakwater.jobs.rules.ids import key_of
from breakwater.kernel.nats import subjects
from tests.flow.kit import model
from tests.helpers import until
from tests.services.worker.conftest import StartWorker
from tests.services.worker.harness import WorkerPlane

PROGRAMS = {name: {"agents": ["writer"]} for name in ("one", "other")}
GUARDED = {"writer": {"model": "sim/fast", "guard": {"max_iterations": 1}}}


async def ask(plane: WorkerPlane, user: str, headers: dict[str, str] | None = None, **job: Any) -> dict[str, Any]:
    """Publishes a job as the account of a program does, and waits for the answer."""
    client: Client = plane.client
    inbox, heard = client.new_inbox(), list[Msg]()
    if user != "client":
        inbox = f"bw.replies.{user}.{inbox.rpartition('.')[2]}"

    async def hear(message: Msg) -> None:
        heard.append(message)

    subscription = await client.subscribe(inbox, cb=hear)
    body = {"agent": "writer", "prompt": "x", "reply_to": inbox, **job}
    await plane.jetstream.publish(subjects.job_by("writer", user), json.dumps(body).encode(), headers=headers)
    await until(lambda: heard, "the answer")
    await subscription.unsubscribe()
    return json.loads(heard[0].data)


async def test_a_programs_ids_are_names_of_its_own(start_worker: StartWorker) -> None:
    async with start_worker({"sim/fast": model(answer="Done.")}, GUARDED, programs=PROGRAMS) as plane:
        for user in ("program-one", "program-other", "client"):
            done = await ask(plane, user, job_id="j", task_id="t", prompt=user)
            scope = None if user == "client" else user
            assert (done["status"], done["job_id"], done["task_id"]) == ("succeeded", "j", "t")
            assert (done["execution_id"], done["task_key"]) == (key_of(scope, "j"), key_of(scope, "t"))
            assert done["attempts"][0]["attempt_id"] == f"{key_of(scope, 'j')}:1"
            stopped = await ask(plane, user, job_id="again", task_id="t")
            assert (stopped["reason"], stopped["job_id"]) == ("guard_tripped", "again")
            refused = await ask(plane, user, job_id="j", prompt="another")
            assert (refused["error"]["class"], refused["job_id"]) == ("IdConflictError", "j")
            assert "'j'" in refused["error"]["message"]
        for owner in ("program-one", "program-other", None):
            assert (await plane.result(key_of(owner, "j")))["owner"] == owner


async def test_a_job_with_the_trace_of_another_programs_joins_no_run_of_it(start_worker: StartWorker) -> None:
    trace_id = "ab" * 16
    headers = {"traceparent": f"00-{trace_id}-{'cd' * 8}-01"}
    async with start_worker(
        {"sim/fast": model(answer="Done.")}, {"writer": {"model": "sim/fast"}}, programs=PROGRAMS
    ) as plane:
        for user in ("program-one", "program-other", "client"):
            done = await ask(plane, user, job_id="j", headers=headers)
            assert done["run_id"] == key_of(None if user == "client" else user, trace_id)


async def test_a_dry_run_of_a_program_takes_no_id(start_worker: StartWorker) -> None:
    async with start_worker(
        {"sim/fast": model(answer="Done.")}, {"writer": {"model": "sim/fast"}}, programs=PROGRAMS
    ) as plane:
        for user in ("program-one", "client"):
            for _ in range(2):
                planned = await ask(plane, user, job_id="j", dry_run=True)
                assert (planned["dry_run"], planned["job_id"]) == (True, "j")
            assert (await ask(plane, user, job_id="j"))["dry_run"] is False


async def test_an_id_that_looks_like_an_execution_of_another_is_hashed(start_worker: StartWorker) -> None:
    async with start_worker(
        {"sim/fast": model(answer="Done.")}, {"writer": {"model": "sim/fast"}}, programs=PROGRAMS
    ) as plane:
        owned = await ask(plane, "program-one", job_id="j")
        done = await ask(plane, "client", job_id=owned["execution_id"], prompt="mine")
        assert (done["status"], done["job_id"]) == ("succeeded", owned["execution_id"])
        assert done["execution_id"] == key_of(None, owned["execution_id"]) != owned["execution_id"]


async def test_a_running_job_is_referred_to_by_its_execution_id_by_its_program_alone(
    start_worker: StartWorker,
) -> None:
    models = {"sim/slow": model(latency_ms=6000), "sim/fast": model(answer="Done.")}
    agents = {"writer": {"model": "sim/fast"}, "slow": {"model": "sim/slow"}}
    programs = {name: {"agents": ["writer", "slow"]} for name in ("one", "other")}
    parent = key_of("program-one", "p")
    async with start_worker(models, agents, programs=programs) as plane:
        job = {"agent": "slow", "job_id": "p", "prompt": "x"}
        await plane.jetstream.publish(subjects.job_by("slow", "program-one"), json.dumps(job).encode())
        await until(lambda: plane.sim.ledger.calls, "the call of the parent")
        for user, task_key in (("program-one", parent), ("program-other", key_of("program-other", parent))):
            child = await ask(plane, user, job_id="child", parent_execution_id=parent)
            assert (child["status"], child["task_key"]) == ("succeeded", task_key)
        assert await plane.last("RESULTS", subjects.result(parent)) is None, "the parent still runs"
        done = await ask(plane, "program-one", job_id="after", depends_on=[parent], total_timeout_s=40)
        assert done["status"] == "succeeded"
