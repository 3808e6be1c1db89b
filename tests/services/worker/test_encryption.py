"""Texts that are encrypted where they are stored: what a worker reads and leaves, and what it does without a key."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from breakwater.calls.providers.base import Answer, Usage
from breakwater.jobs.store.executions import Claim
from breakwater.jobs.store.task_keys import TaskKey
from breakwater.kernel.security.encryption import LEFT_OUT, Cipher, new_key
from breakwater.services.worker import attempts, crashes
from tests.flow.kit import model
from tests.helpers import until
from tests.services.worker.conftest import StartWorker
from tests.services.worker.harness import ScriptedProvider, WorkerPlane

PROMPT, SAID = "the merger is on Friday", "I would sell on Thursday"
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def keys(directory: Path, *given: str) -> dict[str, Any]:
    files = [directory / f"key-{number}" for number in range(len(given))]
    for file, key in zip(files, given, strict=True):
        file.write_text(key)
    return {"keys": [{"file": str(file)} for file in files]}


async def test_a_repaired_and_a_broken_conversation_leave_no_text_in_redis(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    usage = Usage(10, 10)
    provider = ScriptedProvider(Answer(SAID, usage), Answer('{"n": 1}', usage))
    agents = {"writer": {"model": "sim/m", "output": {"schema": SCHEMA}, "cache": {"ttl_s": 60}, "concurrency": 1}}
    cipher = keys(tmp_path, new_key())
    async with start_worker({"sim/m": model()}, agents, providers={"sim": provider}, encryption=cipher) as plane:
        redis = plane.worker.redis.client
        seen: list[str] = []

        async def perform(call: Any) -> Answer:
            seen.append(str(await redis.hgetall("bw:execution:j1")))
            return await ScriptedProvider.perform(provider, call)

        provider.perform = perform  # type: ignore[method-assign]
        result = await plane.run({"agent": "writer", "job_id": "j1", "prompt": PROMPT})
        again = await plane.run({"agent": "writer", "job_id": "j2", "prompt": PROMPT})
        cached = [await redis.get(key) async for key in redis.scan_iter("bw:cache:*")]
    assert SAID in json.dumps(provider.calls[1].messages), "the model is shown what it said"
    assert "bwe1." in seen[1], "the checkpoint has the repair"
    assert [text for text in (PROMPT, SAID) if text in str(seen)] == []
    assert len(cached) == 1
    assert cached[0].startswith("bwe1.")
    assert opened(plane, result)["output"] == opened(plane, again)["output"] == {"n": 1}
    assert again["cache_hit"] is True


async def test_what_is_out_of_a_stream_is_encrypted_and_continued(start_worker: StartWorker, tmp_path: Path) -> None:
    agents = {"writer": {"model": "sim/m", "on_stream_break": "continue"}}
    async with start_worker({"sim/m": model()}, agents, encryption=keys(tmp_path, new_key())) as plane:
        claim = Claim.new("j9")
        await plane.worker.executions.claim(claim)
        for number, piece in enumerate(("I would ", "sell\n", "bwe1 on Thursday"), 1):
            assert await plane.worker.executions.append_partial(claim, piece, number)
        stored = await plane.worker.redis.client.hget("bw:execution:j9", "partial")
        assert await plane.worker.executions.partial_output(claim) == ("I would sell\nbwe1 on Thursday", 3)
    assert stored is not None
    assert stored.count("bwe1.") == 3
    assert "sell" not in stored


async def test_a_job_waits_for_a_missing_key_without_a_slot_and_is_answered_when_it_is_back(
    start_worker: StartWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crashes, "KEY_POLL", crashes.timedelta(seconds=1))
    first, second = new_key(), new_key()
    agents = {"writer": {"model": "sim/m", "concurrency": 1}}
    async with start_worker({"sim/m": model(answer=SAID)}, agents, encryption=keys(tmp_path, second)) as plane:
        job = json.dumps({"agent": "writer", "job_id": "j1", "prompt": PROMPT}).encode()
        await plane.publish(Cipher([first]).encrypt_document(job))
        await until(lambda: parked(plane), "the job to be parked")
        other = await plane.run({"agent": "writer", "job_id": "j2", "prompt": PROMPT})
        assert "put that key back" in plane.log("worker")
        # As a worker that is started again, with both.
        vars(plane.worker.cipher).update(vars(Cipher([second, first])))
        result = await plane.result("j1")
        assert opened(plane, other)["output"] == opened(plane, result)["output"] == SAID
        assert (result["status"], "output" in result) == ("succeeded", False)
        assert await plane.messages("DLQ", "bw.dlq.>") == []


async def test_a_job_whose_key_stays_away_is_dead_lettered_as_it_came(
    start_worker: StartWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crashes, "KEY_WAIT", crashes.timedelta(0))
    first, second = new_key(), new_key()
    async with start_worker(
        {"sim/m": model()}, {"writer": {"model": "sim/m"}}, encryption=keys(tmp_path, second)
    ) as plane:
        job = json.dumps({"agent": "writer", "job_id": "j1", "prompt": PROMPT, "reply_to": "_INBOX.me"}).encode()
        answers = await plane.client.subscribe("_INBOX.me")
        await plane.publish(stored := Cipher([first]).encrypt_document(job))
        answer = json.loads((await answers.next_msg(timeout=20)).data)
        [dead_letter] = await plane.messages("DLQ", "bw.dlq.>", at_least=1)
    assert (answer["status"], answer["reason"], answer["error"]["class"]) == (
        "dead_lettered",
        "invalid",
        "UndecryptableJobError",
    )
    assert "payload_base64" not in dead_letter
    payload = base64.b64decode(opened(plane, dead_letter)["payload_base64"])
    assert payload == stored
    assert json.loads(Cipher([first]).decrypt_document(payload))["prompt"] == PROMPT


async def test_a_job_that_sleeps_and_one_that_fails_are_encrypted_though_they_were_published_plainly(
    start_worker: StartWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "LONG_WAIT_S", 0.5)
    faults = {"status": 500, "error": {"message": f"no: {PROMPT}"}}
    agents: dict[str, Any] = {"writer": {"model": "sim/m", "retry": {"base_s": 60, "max_delay_s": 60}}}
    agents["fails"] = {"model": "sim/m", "retry": {"max_attempts": 1}}
    async with start_worker({"sim/m": model(faults)}, agents, encryption=keys(tmp_path, new_key())) as plane:
        await plane.publish({"agent": "writer", "job_id": "j1", "prompt": PROMPT})
        await until(lambda: parked(plane), "the job to be parked")
        failed = await plane.run({"agent": "fails", "job_id": "j2", "prompt": PROMPT})
        sleeping = await plane.last("PARKED", "bw.parked.writer.j1")
        kept = [await plane.messages(stream, "bw.>") for stream in ("DLQ", "EVENTS", "RESULTS")]
    assert [len(one) for one in kept[::2]] == [1, 1]
    assert PROMPT not in json.dumps([sleeping, *kept])
    assert failed["error"]["message"].startswith("ServerError, HTTP 500; what the provider said")
    assert sleeping is not None
    assert opened(plane, sleeping)["prompt"] == PROMPT


async def parked(plane: WorkerPlane) -> bool:
    return (await plane.jetstream.stream_info("PARKED")).state.messages == 1


PRIVATE = [{"persist_prompts": False}, {"persist_responses": False}]


@pytest.mark.parametrize("private", PRIVATE)
async def test_dead_letters_and_results_of_agents_that_keep_no_texts_hold_them_only_encrypted(
    start_worker: StartWorker, private: dict[str, bool]
) -> None:
    models = {"sim/m": model(answer=SAID), "sim/no": model({"status": 400})}
    agents = {
        "writer": {"model": "sim/m", **private},
        "fails": {"model": "sim/no", **private},
        "open": {"model": "sim/m"},
    }
    async with start_worker(models, agents) as plane:
        assert not plane.worker.cipher.on
        answers = await plane.client.subscribe("_INBOX.me")
        results: dict[str, Any] = {}
        for agent in agents:
            job = {"agent": agent, "job_id": agent, "prompt": PROMPT, "reply_to": "_INBOX.me"}
            results[agent] = await plane.run(job)
        told = [json.loads((await answers.next_msg(timeout=20)).data) for _ in agents]
        [dead_letter] = await plane.messages("DLQ", "bw.dlq.>", at_least=1)
        # What was decided is answered again from what stands there.
        await plane.publish({"agent": "writer", "job_id": "writer", "prompt": PROMPT, "reply_to": "_INBOX.me"})
        again = json.loads((await answers.next_msg(timeout=20)).data)
    assert [one["output"] for one in (*told, again)] == [SAID, None, SAID, SAID]
    assert results["open"]["output"] == SAID
    assert SAID not in json.dumps(results["writer"])
    assert opened(plane, results["writer"])["output"] == SAID
    assert "payload_base64" not in dead_letter
    payload = json.loads(base64.b64decode(opened(plane, dead_letter)["payload_base64"]))
    assert (payload["prompt"], dead_letter["withheld"]) == (PROMPT, "persist_prompts" in private)


async def test_where_no_key_can_be_had_the_text_is_left_out_and_the_answer_says_so(start_worker: StartWorker) -> None:
    models = {"sim/m": model(answer=SAID), "sim/no": model({"status": 400})}
    agents = {name: {"model": f"sim/{of}", **PRIVATE[0]} for name, of in (("writer", "m"), ("fails", "no"))}
    async with start_worker(models, agents, plane_key=None) as plane:
        answers = await plane.client.subscribe("_INBOX.me")
        for agent in agents:
            await plane.run({"agent": agent, "job_id": agent, "prompt": PROMPT, "reply_to": "_INBOX.me"})
        assert json.loads((await answers.next_msg(timeout=20)).data)["output"] == SAID
        kept = [await plane.messages(stream, "bw.>", at_least=1) for stream in ("DLQ", "RESULTS")]
        # As a worker that comes back after it had decided: there is nothing to wait for.
        await plane.publish({"agent": "writer", "job_id": "writer", "prompt": PROMPT})
        await until(lambda: none_pending(plane), "the job to be answered from its record")
        assert await plane.messages("PARKED", "bw.>") == []
        [record] = await plane.messages("EVENTS", "bw.executions.writer.*")
    marks = {(one["_subject"], one["encrypted"]) for stream in kept for one in stream}
    assert marks == {
        ("bw.dlq.error.fails", LEFT_OUT),
        ("bw.results.writer", LEFT_OUT),
        ("bw.results.fails", None),  # it has no text
    }
    assert [text for text in (PROMPT, SAID) if text in json.dumps(kept)] == []
    assert record["encrypted"] is None


async def none_pending(plane: WorkerPlane) -> bool:
    return await plane.pending_jobs() == 0


def opened(plane: WorkerPlane, document: dict[str, Any]) -> dict[str, Any]:
    return json.loads(plane.worker.cipher.decrypt_document(json.dumps(document).encode()))


async def test_the_task_of_a_parent_is_found_though_its_texts_are_encrypted(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    agents = {"writer": {"model": "sim/m", "concurrency": 2}}
    slow = model({"requests": [1, 1], "hang_s": 1})
    async with start_worker({"sim/m": slow}, agents, encryption=keys(tmp_path, new_key())) as plane:
        await plane.publish({"agent": "writer", "job_id": "first", "prompt": PROMPT})

        async def calling() -> bool:
            return plane.sim.ledger.totals.in_progress == 1

        await until(calling, what="its call")
        job = {"agent": "writer", "prompt": PROMPT, "parent_execution_id": "first"}
        while_it_runs = await plane.run({**job, "job_id": "second"})
        await plane.result("first")
        afterwards = await plane.run({**job, "job_id": "third"})
        task, _ = await plane.worker.guards.tasks.load(TaskKey(None, "first"))
    assert [while_it_runs["task_id"], afterwards["task_id"]] == ["first", "first"]
    assert (task.iterations, task.tokens) == (3, 480)
