"""Messages that are too large to be kept where they end: each is ended and told of, and none holds a slot."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock, patch

import nats
import pytest
from nats.aio.msg import Msg

from breakwater.calls.providers.base import Answer
from breakwater.kernel.nats.errors import PublishRefusedError
from breakwater.kernel.nats.permissions import GRANTS, STREAMS_ACCOUNT, inbox_prefix, program, render
from breakwater.kernel.security.encryption import new_key
from breakwater.local.ports import free_port
from breakwater.prices.rules.usage import Usage
from breakwater.services.worker import crashes, handler, parsing
from tests.flow.kit import model
from tests.helpers import until
from tests.nats_node import start_nats
from tests.server_sources import RunningServer
from tests.services.worker.conftest import StartWorker
from tests.services.worker.harness import FETCH_S, ScriptedProvider, WorkerPlane, running_worker

SLOTS = 3
AGENTS = {"writer": {"model": "sim/m", "concurrency": SLOTS, "breaker": "off"}}
USERS = (*GRANTS, program("billing", ["writer"]))
MIB = 1024**2
_PRINTABLE = [byte for byte in range(ord("#"), ord("~") + 1) if byte != ord("\\")]
PRINTABLE = bytes(_PRINTABLE[byte % len(_PRINTABLE)] for byte in range(256))
"""Makes text of random bytes that takes no escapes in JSON."""


@asynccontextmanager
async def plane_with_users(folder: Path, redis_url: str, **more: Any) -> AsyncGenerator[tuple[WorkerPlane, str]]:
    """A worker on a server with the plane's users, and the server's address without a user."""
    port = free_port()
    accounts = render(USERS, lambda user: f'"{user}"')
    entry = f'  "{STREAMS_ACCOUNT}": {{\n    "jetstream": "enabled",\n    "users": [\n'
    assert entry in accounts
    accounts = accounts.replace(entry, entry + '      {"user": "root", "password": "root"},\n')
    settings = f'listen: "127.0.0.1:{port}"\nmax_payload: 2MB\njetstream {{ store_dir: "{folder}" }}\n'
    server = start_nats(folder, settings + accounts, port)
    try:
        await asyncio.to_thread(server.wait_until_ready)
        async with running_worker(
            folder,
            nats_url=f"nats://root:root@127.0.0.1:{port}",
            redis_url=redis_url,
            script={"models": {"sim/m": model()}},
            agents=AGENTS,
            **more,
        ) as plane:
            yield plane, f"127.0.0.1:{port}"
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("user", "keys"), [("client", 0), ("program-billing", 0), ("client", 1)], ids=["client", "program", "encrypted"]
)
async def test_no_job_that_is_too_large_for_a_dead_letter_holds_a_slot(
    user: str, keys: int, tmp_path: Path, worker_redis: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY", new_key())
    more: dict[str, Any] = {"encryption": {"keys": [{"env": "KEY"}]}} if keys else {}
    more["limits"] = {"max_body_bytes": 1_000_000}
    async with plane_with_users(tmp_path, worker_redis.url, begin=False, **more) as (plane, server):
        attacker = await nats.connect(f"nats://{user}:{user}@{server}", inbox_prefix=inbox_prefix(user))
        answers: list[dict[str, Any]] = []

        async def answered(message: Msg) -> None:
            answers.append(json.loads(message.data))

        inbox = attacker.new_inbox()
        await attacker.subscribe(inbox, cb=answered)
        # Encrypted, it is compressed, but not enough.
        prompt = os.urandom(2_000_000).translate(PRINTABLE).decode()
        job = json.dumps({"agent": "writer", "prompt": prompt, "reply_to": inbox}).encode()
        large = {f"X-{number}": "y" * 1_000 for number in range(63)}
        stream = attacker.jetstream(timeout=30)
        for _ in range(SLOTS):
            await stream.publish("bw.jobs.writer", job)
        # Small, but with headers that would be too large for JetStream with what is added to them.
        small = json.dumps({"agent": "writer", "prompt": "x", "reply_to": inbox}).encode()
        await stream.publish("bw.jobs.writer", small, headers=large)
        connections = plane.client.stats["reconnects"]
        plane.begin()
        await plane.publish({"agent": "writer", "job_id": "honest", "prompt": "x"})
        assert (await plane.result("honest", 60))["status"] == "succeeded"
        await until(lambda: len(answers) == SLOTS + 1, what="an answer to each")
        assert {(one["status"], one["reason"]) for one in answers} == {("dead_lettered", "invalid")}
        await plane.end()
        await asyncio.sleep(FETCH_S)  # until its last request for a job has expired
        plane.begin()  # another worker has none of them again
        assert (await plane.run({"agent": "writer", "job_id": "later", "prompt": "x"}))["status"] == "succeeded"

        async def drained() -> bool:
            return await plane.pending_jobs() == 0

        await until(drained, what="an empty JOBS")
        kept = await plane.messages("DLQ", "bw.dlq.invalid.writer", at_least=SLOTS + 1)
        assert len(kept) == SLOTS + 1
        by_reference = [one for one in kept if one["omitted_bytes"] == len(job)]
        assert len(by_reference) == SLOTS
        assert {one["omitted_sha256"] for one in by_reference} == {hashlib.sha256(job).hexdigest()}
        assert {one["sequence"] for one in kept} == set(range(1, SLOTS + 2))
        assert not any(one["payload_base64"] for one in by_reference)
        assert "job_handling_failed" not in plane.log("worker")
        assert plane.client.stats["reconnects"] == connections
        await attacker.close()


@pytest.mark.parametrize("keys", [0, 1], ids=["plain", "encrypted"])
async def test_an_answer_that_is_too_large_for_a_result_ends_its_job_at_its_cost(
    keys: int, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch, worker_nats: RunningServer
) -> None:
    monkeypatch.setenv("KEY", new_key())
    more: dict[str, Any] = {"encryption": {"keys": [{"env": "KEY"}]}} if keys else {}
    # Each is small enough by itself; and they compress well, so that on the stream alone they would be together.
    provider = ScriptedProvider(Answer("x" * (4 * MIB - 100), Usage(7, 9)), Answer("short", Usage(7, 9)))
    metadata, limits = {"note": "y" * 4_400_000}, {"max_body_bytes": 5_000_000}
    async with start_worker({"sim/m": model()}, AGENTS, providers={"sim": provider}, limits=limits, **more) as plane:
        answers: list[dict[str, Any]] = []

        async def answered(message: Msg) -> None:
            answers.append(json.loads(message.data))

        await plane.client.subscribe("_INBOX.mine", cb=answered)
        job = {"agent": "writer", "job_id": "large", "prompt": "x", "reply_to": "_INBOX.mine", "metadata": metadata}
        result = await plane.run(job)
        assert (result["status"], result["error"]["class"]) == ("dead_lettered", "ResultTooLargeError")
        assert result["total_cost"] == result["wasted_cost"] != "0.000000000"
        await until(lambda: bool(answers), what="the answer")
        assert answers[0]["error"]["class"] == "ResultTooLargeError"
        assert (await plane.run({"agent": "writer", "job_id": "next", "prompt": "x"}))["status"] == "succeeded"
        [dead_letter] = await plane.messages("DLQ", "bw.dlq.invalid.writer", at_least=1)
        assert dead_letter["execution_id"] == "large"
        [record, _] = await plane.messages("EVENTS", "bw.executions.writer.*", at_least=2)
        assert record["status"] == "dead_lettered"
        assert len(provider.calls) == 2


@pytest.mark.parametrize(
    "what",
    ["breakwater.services.worker.conclude._record", "breakwater.services.worker.conclude._decide"],
    ids=["record", "result"],
)
async def test_a_message_that_nothing_takes_is_ended_and_answered(
    what: str, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crashes, "MAX_CRASHES", 1)
    async with start_worker({"sim/m": model()}, AGENTS) as plane:
        answers: list[dict[str, Any]] = []

        async def answered(message: Msg) -> None:
            answers.append(json.loads(message.data))

        await plane.client.subscribe("_INBOX.mine", cb=answered)
        with patch(what, AsyncMock(side_effect=PublishRefusedError("sealed"))):
            await plane.publish({"agent": "writer", "job_id": "j", "prompt": "x", "reply_to": "_INBOX.mine"})

            async def drained() -> bool:
                return await plane.pending_jobs() == 0

            await until(drained, what="an empty JOBS")
        await until(lambda: bool(answers), what="the answer")
        assert (answers[-1]["execution_id"], answers[-1]["reason"]) == ("j", "error")
        assert await plane.messages("DLQ", "bw.dlq.error.writer", at_least=1)
        assert "job_ended_without_a_record" in plane.log("worker")


async def test_crashes_are_counted_across_workers(start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crashes, "MAX_CRASHES", 2)
    monkeypatch.setattr(parsing, "validate_job", Mock(side_effect=RuntimeError("a bug of ours")))
    async with start_worker({"sim/m": model()}, AGENTS, begin=False) as plane:
        await plane.publish({"agent": "writer", "job_id": "crashes", "prompt": "x"})
        subscription = await plane.jetstream.pull_subscribe_bind("worker-writer", "JOBS")
        for _ in range(2):
            [message] = await subscription.fetch(1, timeout=60)
            agent = plane.worker.config.agents["writer"]
            restarted = handler.JobHandler(plane.worker, "writer", agent)
            await restarted.handle(handler.Delivery(message))
        assert (await plane.result("crashes"))["reason"] == "error"


async def test_a_message_that_ends_its_worker_each_time_is_ended(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crashes, "MAX_CRASHES", 2)
    async with start_worker({"sim/m": model()}, AGENTS, begin=False) as plane:
        await plane.publish({"agent": "writer", "job_id": "kills", "prompt": "x"})
        subscription = await plane.jetstream.pull_subscribe_bind("worker-writer", "JOBS")
        died = Mock(side_effect=SystemExit)
        for _ in range(6):
            [message] = await subscription.fetch(1, timeout=60)
            with patch("breakwater.services.worker.parsing.JobReader.read", died):
                try:
                    await plane.handlers["writer"].handle(handler.Delivery(message))
                except SystemExit:
                    await message.nak()
                else:
                    break
        assert (await plane.result("kills", 5))["reason"] == "error"
        assert died.call_count == 4
