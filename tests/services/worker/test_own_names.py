"""Ids that programs choose: each program has names of its own, and reads them as it chose them."""

from __future__ import annotations

import json
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg

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
            assert (done["status"], done["execution_id"], done["job_id"], done["task_id"]) == (
                "succeeded",
                "j",
                "j",
                "t",
            )
            assert done["attempts"][0]["attempt_id"] == "j:1"
            stopped = await ask(plane, user, job_id="again", task_id="t")
            assert (stopped["reason"], stopped["execution_id"]) == ("guard_tripped", "again")
            refused = await ask(plane, user, job_id="j", prompt="another")
            assert (refused["error"]["class"], refused["execution_id"]) == ("IdConflictError", "j")
            assert "'j'" in refused["error"]["message"]
        for name, owner in (("j@program-one", "program-one"), ("j@program-other", "program-other"), ("j", None)):
            assert (await plane.result(name))["owner"] == owner


async def test_a_job_with_the_trace_of_another_programs_joins_no_run_of_it(start_worker: StartWorker) -> None:
    trace_id = "ab" * 16
    headers = {"traceparent": f"00-{trace_id}-{'cd' * 8}-01"}
    async with start_worker(
        {"sim/fast": model(answer="Done.")}, {"writer": {"model": "sim/fast"}}, programs=PROGRAMS
    ) as plane:
        for user in ("program-one", "program-other", "client"):
            done = await ask(plane, user, job_id="j", headers=headers)
            assert done["run_id"] == trace_id
        recorded = [(await plane.result(name))["run_id"] for name in ("j@program-one", "j@program-other", "j")]
        assert recorded == [f"{trace_id}@program-one", f"{trace_id}@program-other", trace_id]


async def test_a_dry_run_of_a_program_takes_no_id(start_worker: StartWorker) -> None:
    async with start_worker(
        {"sim/fast": model(answer="Done.")}, {"writer": {"model": "sim/fast"}}, programs=PROGRAMS
    ) as plane:
        for user in ("program-one", "client"):
            for _ in range(2):
                planned = await ask(plane, user, job_id="j", dry_run=True)
                assert (planned["dry_run"], planned["execution_id"]) == (True, "j")
            assert (await ask(plane, user, job_id="j"))["dry_run"] is False


async def test_an_id_with_an_at_sign_is_shown_as_it_was_chosen(start_worker: StartWorker) -> None:
    async with start_worker(
        {"sim/fast": model(answer="Done.")}, {"writer": {"model": "sim/fast"}}, programs=PROGRAMS
    ) as plane:
        done = await ask(plane, "client", job_id="ann@example.com")
        assert (done["execution_id"], (await plane.result("ann@example.com@"))["owner"]) == ("ann@example.com", None)
