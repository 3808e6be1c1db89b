"""Jobs whose bodies are larger than a message of NATS: accepted over HTTP and run by a worker, on real servers."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import os
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, patch

import pytest
from pydantic import SecretStr

from breakwater.calls.assignment import Assignment
from breakwater.calls.providers.base import Call
from breakwater.config import load_config
from breakwater.identity.api_keys import create_key
from breakwater.jobs.api import dead_letters
from breakwater.jobs.api.job_queue import QueueQuota
from breakwater.jobs.commands.submit_over_nats import send
from breakwater.jobs.rules.workers import LIVENESS
from breakwater.jobs.store.executions import ClaimLostError
from breakwater.kernel.commands.errors import CliError
from breakwater.kernel.http import bodies as http_bodies
from breakwater.kernel.nats import bodies
from breakwater.kernel.nats.bodies import BodyReader, BodyReference, BodyWriter, Leftovers
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import Header, Stream
from breakwater.kernel.process.byte_budget import ByteBudget
from breakwater.kernel.process.pace import at_pace
from breakwater.kernel.security.encryption import new_key
from breakwater.local.plane import PlaneLocation
from breakwater.services.worker import large_jobs
from breakwater.services.worker.handler import JobHandler
from breakwater.services.worker.large_jobs import LargeJobs
from tests.flow.kit import PLANE_KEY, model
from tests.helpers import until
from tests.server_sources import RunningServer
from tests.services.request.conftest import Answer, HttpApi, new_id, running, settings_for
from tests.services.worker.harness import WorkerPlane, running_worker

LARGE = 900_000
"""More than a job's message contains at a tenth of all sizes."""
LIMIT = 1_200_000
SIZES = {
    "breakwater.kernel.http.bodies.BUDGETED_FROM": http_bodies.BUDGETED_FROM // 10,
    "breakwater.kernel.nats.bodies.CHUNK_BYTES": bodies.CHUNK_BYTES // 10,
    **{
        f"breakwater.{module}.IN_MESSAGE_BYTES": bodies.IN_MESSAGE_BYTES // 10
        for module in (
            "dialects.store.response_log",
            "jobs.api.job_queue",
            "jobs.api.submission",
            "kernel.nats.delivery",
        )
    },
}
"""A tenth of the sizes of bodies, in all modules that ask for them."""
TRUE_LARGE = 10 * LARGE
"""More than a message of NATS."""
TRUE_LIMIT = 10 * LIMIT
AGENT = {"model": "sim/m", "retry": {"max_attempts": 2}, "breaker": "off", "guard": "off"}
AGENTS = {
    "writer": AGENT,
    "private": {**AGENT, "persist_prompts": False, "persist_responses": False},
    "embedder": {**AGENT, "model": "sim/e"},
    "cached": {**AGENT, "cache": {"ttl_s": 60}},
    "claude": {**AGENT, "model": "anthropic/c"},
}
SECRET = "the merger is on Friday. "


@dataclass(frozen=True, slots=True)
class LargePlane:
    api: HttpApi
    worker: WorkerPlane

    async def submit(self, job_id: str, *, agent: str = "writer", prompt: str | None = None, query: str = "") -> Answer:
        return await self.api.post({"agent": agent, "job_id": job_id, "prompt": prompt or large_text()}, query=query)

    async def bodies(self) -> list[str]:
        """The names of the stored bodies."""
        return [body.name for body in await BodyReader(Lookup(lambda: self.api.bus)).all()]

    async def stored_bytes(self) -> bytes:
        """All that the object store holds."""
        scan = Lookup(lambda: self.api.bus).scan
        return b"".join([message.data async for message in scan(Stream.BODIES, "$O.bodies.>")])

    async def is_emptied(self) -> bool:
        return (await self.worker.jetstream.stream_info("OBJ_bodies")).state.messages == 0

    async def emptied(self) -> None:
        await until(self.is_emptied, "an empty object store")

    async def remove_leftovers(self, hours: float = 2) -> int:
        """What the worker does every half hour, twice."""
        leftovers = Leftovers(Lookup(lambda: self.api.bus), BodyWriter(Publisher(lambda: self.api.bus, "worker")))
        now = datetime.now(UTC) + timedelta(hours=hours)
        return await leftovers.remove(now) + await leftovers.remove(now)


def large_text(size: int = LARGE) -> str:
    return SECRET * (size // len(SECRET))


def random_base64(size: int = LARGE) -> str:
    return base64.b64encode(os.urandom(size * 3 // 4)).decode()


@asynccontextmanager
async def calls_of(plane: LargePlane) -> AsyncGenerator[list[Call]]:
    """The calls that the provider `sim` gets meanwhile."""
    provider = type(plane.worker.worker.providers["sim"])
    calls: list[Call] = []
    perform = provider.perform

    async def spy(self: Any, call: Call) -> Any:
        calls.append(call)
        return await perform(self, call)

    with patch.object(provider, "perform", spy):
        yield calls


OpenPlane = Callable[..., AbstractAsyncContextManager[LargePlane]]


@asynccontextmanager
async def opened(
    nats_url: str,
    redis_url: str,
    directory: Path,
    *,
    faults: Sequence[dict[str, Any]] = (),
    limits: Mapping[str, int] | None = None,
    encryption: Mapping[str, Any] | None = None,
) -> AsyncGenerator[LargePlane]:
    more: dict[str, Any] = {} if encryption is None else {"encryption": encryption}
    started = running_worker(
        directory,
        nats_url=nats_url,
        redis_url=redis_url,
        script={"models": {"m": model(*faults, answer="A cat."), "c": model(answer="A cat."), "e": model()}},
        agents=AGENTS,
        more_providers={"anthropic": {"kind": "anthropic", "base_url": "http://127.0.0.1:{sim_port}/v1"}},
        liveness=at_pace(LIVENESS, 4),
        limits={"max_body_bytes": LIMIT, **(limits or {})},
        **more,
    )
    async with started as worker:
        settings = settings_for(nats_url, redis_url, directory).model_copy(update={"plane_key": SecretStr(PLANE_KEY)})
        loaded = load_config(directory / "breakwater.yaml")
        async with running(settings, loaded, create_key(settings.api_keys_file, "tests")) as api:
            yield LargePlane(api, worker)


@pytest.fixture
def open_true_plane(module_nats_server: RunningServer, redis_server: RunningServer, tmp_path: Path) -> OpenPlane:
    """A plane of the product's own sizes."""
    return partial(opened, module_nats_server.url, redis_server.url, tmp_path, limits={"max_body_bytes": TRUE_LIMIT})


@pytest.fixture
def scaled_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of all sizes, and of the CPU that they take."""
    for name, size in SIZES.items():
        monkeypatch.setattr(name, size)


@pytest.fixture
def open_plane(
    module_nats_server: RunningServer, redis_server: RunningServer, tmp_path: Path, scaled_sizes: None
) -> OpenPlane:
    return partial(opened, module_nats_server.url, redis_server.url, tmp_path)


def requests_of(size: int) -> list[tuple[str, dict[str, Any], str]]:
    """A request of at least so many bytes on every way in, and what its answer contains."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + random_base64(size)}}
    document = {"type": "base64", "media_type": "application/pdf", "data": random_base64(size)}
    question = {"type": "text", "text": "What is this?"}
    vision = {"model": "writer", "messages": [{"role": "user", "content": [question, image]}]}
    pdf = [{"role": "user", "content": [{"type": "document", "source": document}, question]}]
    message = {"model": "claude", "max_tokens": 100, "messages": pdf}
    picture = {"type": "input_image", "image_url": "data:image/png;base64," + random_base64(size)}
    response = {"model": "writer", "input": [{"role": "user", "content": [picture]}], "store": False}
    return [
        ("/v1/chat/completions", vision, "A cat."),
        ("/v1/messages", {**message, "stream": True}, "message_stop"),
        ("/v1/responses", response, "A cat."),
        ("/v1/embeddings", {"model": "embedder", "input": [large_text(size // 180)] * 180}, "embedding"),
        ("/api/v1/jobs?wait_s=60", {"agent": "writer", "prompt": large_text(size)}, "succeeded"),
    ]


async def are_answered(plane: LargePlane, requests: Sequence[tuple[str, dict[str, Any], str]]) -> None:
    for path, body, expected in requests:
        answer = await plane.api.ask("POST", path, json=body)
        assert answer.status == 200, (path, answer.body[:500])
        assert expected in answer.body.decode(), (path, answer.body[:500])
    await plane.emptied()


async def test_bodies_larger_than_a_message_are_accepted_on_every_way_in_and_leave_nothing(
    open_plane: OpenPlane,
) -> None:
    async with open_plane() as plane:
        await are_answered(plane, requests_of(LARGE))


async def test_bodies_larger_than_nats_takes_are_accepted_and_one_of_todays_size_travels_in_its_message(
    open_true_plane: OpenPlane,
) -> None:
    chat, *_, job = requests_of(TRUE_LARGE)
    async with open_true_plane() as plane:
        await are_answered(plane, (chat, job))
        await plane.worker.end()
        assert (await plane.submit("small", prompt=large_text(3_900_000))).status == 202
        message = await plane.api.last_job()
        assert SECRET.encode() in (message.data or b"")
        assert Header.BODY.value not in (message.headers or {})
        assert await plane.is_emptied()


async def test_over_the_limit_the_413_names_the_limit_and_its_setting(open_plane: OpenPlane) -> None:
    async with open_plane() as plane:
        too_large = json.dumps({"agent": "writer", "prompt": large_text(LIMIT)}).encode()

        async def chunks() -> AsyncGenerator[bytes]:
            for start in range(0, len(too_large), 100_000):
                yield too_large[start : start + 100_000]

        refusals = [
            await plane.api.post(too_large),
            await plane.api.ask("POST", "/api/v1/jobs", data=chunks()),
            await plane.api.post(gzip.compress(too_large, 1), **{"Content-Encoding": "gzip"}),
        ]
        for refusal in refusals:
            assert (refusal.status, refusal.code) == (413, "body_too_large")
            assert "at most 1,200,000 bytes (limits.max_body_bytes in Breakwater's config)" in refusal.message
        chat = await plane.api.ask("POST", "/v1/chat/completions", data=too_large)
        assert chat.status == 413
        assert await plane.api.queued() == 0
        assert await plane.is_emptied()


async def test_a_client_that_sends_its_body_without_asking_first_gets_the_413_and_no_reset(
    open_plane: OpenPlane,
) -> None:
    async with open_plane() as plane:
        key = plane.api.http.headers["Authorization"]
        body = json.dumps({"agent": "writer", "prompt": large_text(2 * LIMIT)}).encode()

        def post(path: str, authorization: str) -> tuple[int, bytes]:
            headers = {"Authorization": authorization, "Content-Type": "application/json"}
            asked = urllib.request.Request(f"{plane.api.url}{path}", body, headers)  # it sends `Connection: close`
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(asked, timeout=60)
            return refused.value.code, refused.value.read()

        for path in ("/api/v1/jobs", "/v1/chat/completions", "/v1/messages"):
            status, text = await asyncio.to_thread(post, path, key)
            assert status == 413
            assert b"limits.max_body_bytes" in text
        assert (await asyncio.to_thread(post, "/api/v1/jobs", "Bearer bw_unknown_key"))[0] == 401


async def test_the_same_id_again_is_the_same_job_and_another_body_a_conflict(open_plane: OpenPlane) -> None:
    async with open_plane() as plane:
        await plane.worker.end()
        prompt = large_text()
        first = await plane.submit("order", prompt=prompt)
        again = await plane.submit("order", prompt=prompt)
        other = await plane.submit("order", prompt=prompt + "!")
        assert (first.status, first.json["duplicate"]) == (202, False)
        assert (again.status, again.json["duplicate"]) == (202, True)
        assert (other.status, other.code) == (409, "id_conflict")
        assert len(await plane.bodies()) == 1
        plane.worker.begin()
        assert (await plane.worker.result("order"))["status"] == "succeeded"
        await plane.emptied()
        late = await plane.submit("order", prompt=prompt)
        assert (late.status, late.json["duplicate"]) == (202, True)
        assert (await plane.submit("order", prompt=prompt + "!")).status == 409
        await plane.emptied()


STEPS = {
    "before its body is read": "breakwater.kernel.nats.bodies.BodyReader.read",
    "once its job is read": "breakwater.services.worker.handler.JobHandler._answer_or_run",
    "with the claim": "breakwater.services.worker.handler.JobHandler._run_claimed",
    "after the call": "breakwater.services.worker.handler.finish",
    "after the result": "breakwater.services.worker.conclude._record",
    "before its body is removed": "breakwater.services.worker.bodies.Bodies.remove",
    "before the delivery is acknowledged": "breakwater.kernel.nats.publisher.Publisher.acknowledge",
}


@pytest.mark.long(about_s=6)
async def test_a_worker_that_dies_at_any_step_loses_no_large_job_and_leaves_no_body(open_plane: OpenPlane) -> None:
    async with open_plane() as plane:
        for number, (when, step) in enumerate(STEPS.items()):
            job_id = f"job-{number}"
            with patch(step, AsyncMock(side_effect=ClaimLostError(job_id))) as reached:
                assert (await plane.submit(job_id)).status == 202, when
                await until(lambda reached=reached: reached.called, when)
                await plane.worker.end()
            plane.worker.begin()
            assert (await plane.worker.result(job_id))["status"] == "succeeded", when

            async def drained() -> bool:
                return await plane.worker.pending_jobs() == 0

            await until(drained, f"the acknowledgement of {when}")
            assert await plane.bodies() == [], when
            attempts = await plane.worker.attempts("writer", job_id)
            assert [attempt["outcome"] for attempt in attempts][-1:] == ["success"], when
        await plane.emptied()
        executions = await plane.worker.messages("EVENTS", "bw.executions.writer.>")
        assert len(executions) == len(STEPS), "each has one record"


async def test_a_request_process_that_dies_between_body_and_job_leaves_what_is_removed_an_hour_later(
    open_plane: OpenPlane,
) -> None:
    async with open_plane() as plane:
        with patch("breakwater.jobs.api.job_queue.JobQueue._publish", AsyncMock(side_effect=RuntimeError("killed"))):
            assert (await plane.submit("orphan")).status == 500
        assert len(await plane.bodies()) == 1
        assert await plane.remove_leftovers(hours=0.5) == 0
        assert await plane.remove_leftovers() == 1
        await plane.emptied()


async def test_what_waits_in_the_queue_or_is_parked_is_no_leftover(open_plane: OpenPlane) -> None:
    async with open_plane() as plane:
        await plane.worker.end()
        assert (await plane.submit("waiting")).status == 202
        assert await plane.remove_leftovers() == 0
        body = {"agent": "writer", "job_id": "parked", "prompt": large_text(), "depends_on": ["waiting-not"]}
        assert (await plane.api.post(body)).status == 202
        plane.worker.begin()

        async def is_parked() -> bool:
            return (await plane.worker.jetstream.stream_info("PARKED")).state.messages > 0

        await until(is_parked, "a parked job")
        await plane.worker.end()
        parked = await plane.worker.last("PARKED", "bw.parked.>")
        assert parked is not None
        assert len(json.dumps(parked)) < 30_000, "no copy of the body"
        [listed] = (await plane.api.ask("GET", "/api/v1/jobs?state=parked")).json["jobs"]
        assert (listed["job_id"], listed["prompt"][: len(SECRET)]) == ("parked", SECRET)
        assert await plane.remove_leftovers() == 0
        assert len(await plane.bodies()) >= 1


async def test_a_refused_job_leaves_no_body_and_a_full_store_is_named(open_plane: OpenPlane) -> None:
    async with open_plane(limits={"bodies_max_bytes": LIMIT}) as plane:
        await plane.worker.end()
        assert (await plane.submit("first")).status == 202
        refused = await plane.submit("second")
        assert (refused.status, refused.code) == (503, "refused")
        assert "limits.bodies_max_bytes" in refused.message
        assert len(await plane.bodies()) == 1
        assert await plane.api.queued() == 1


async def test_a_dead_letter_keeps_its_body_until_it_is_replayed_with_its_original_bytes(
    open_plane: OpenPlane,
) -> None:
    async with open_plane(faults=({"requests": [1, 1], "status": 400},)) as plane, calls_of(plane) as calls:
        assert (await plane.submit("failed")).status == 202
        assert (await plane.worker.result("failed"))["status"] == "dead_lettered"

        async def acknowledged() -> bool:
            return await plane.worker.pending_jobs() == 0

        await until(acknowledged, "the acknowledgement")
        assert len(await plane.bodies()) == 1
        assert await plane.remove_leftovers() == 0
        [listed] = (await plane.api.ask("GET", "/api/v1/dlq")).json["dead_letters"]
        assert listed["replayable"] is True
        shown = (await plane.api.ask("GET", f"/api/v1/dlq/{listed['dead_letter_id']}")).json
        assert shown["payload_bytes"] > LARGE * 0.99
        assert SECRET.strip()[:10] in json.dumps(shown["payload"])
        dismissed = (await plane.api.act("dlq/dismiss", dead_letters=[listed["dead_letter_id"]])).json
        assert dismissed["dismissed"] == [listed["dead_letter_id"]]
        assert len(await plane.bodies()) == 1, "somebody may change their mind"
        replayed = (await plane.api.act("dlq/replay", dead_letters=[listed["dead_letter_id"]])).json
        [replay] = replayed["replayed"]
        assert (await plane.worker.result(replay["execution_id"]))["status"] == "succeeded"
        assert [call.messages[-1]["content"] for call in calls] == [large_text()] * 2
        await plane.emptied()
        [after] = (await plane.api.ask("GET", "/api/v1/dlq?state=all")).json["dead_letters"]
        assert after["replayed_as"] == replay["execution_id"]


async def test_where_texts_are_encrypted_the_stored_body_does_not_contain_the_text(
    open_plane: OpenPlane, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text(new_key())
    keys = {"keys": [{"file": str(tmp_path / "key")}]}
    prompt = SECRET + random_base64()
    fault = {"requests": [1, 1], "status": 400}
    async with open_plane(encryption=keys, faults=(fault,)) as plane, calls_of(plane) as calls:
        await plane.worker.end()
        assert (await plane.submit("sealed", prompt=prompt)).status == 202
        stored = await plane.stored_bytes()
        assert b"bwe1." in stored
        assert SECRET.strip().encode() not in stored
        assert prompt[-200:].encode() not in stored
        plane.worker.begin()
        assert (await plane.worker.result("sealed"))["status"] == "dead_lettered"
        [listed] = (await plane.api.ask("GET", "/api/v1/dlq")).json["dead_letters"]
        shown = (await plane.api.ask("GET", f"/api/v1/dlq/{listed['dead_letter_id']}")).json
        assert SECRET.strip() in json.dumps(shown["payload"])
        [replay] = (await plane.api.act("dlq/replay", all=True)).json["replayed"]
        assert (await plane.worker.result(replay["execution_id"]))["status"] == "succeeded"
        assert [call.messages[-1]["content"] for call in calls] == [prompt, prompt]
        await plane.emptied()


async def test_the_body_of_an_agent_without_prompts_is_encrypted_for_its_dead_letter(open_plane: OpenPlane) -> None:
    async with open_plane(faults=({"requests": [1, 1], "status": 400},)) as plane, calls_of(plane) as calls:
        prompt = large_text()
        assert (await plane.submit("private", agent="private", prompt=prompt)).status == 202
        assert (await plane.worker.result("private"))["status"] == "dead_lettered"
        assert SECRET.strip().encode() not in await plane.stored_bytes()
        [listed] = (await plane.api.ask("GET", "/api/v1/dlq")).json["dead_letters"]
        shown = (await plane.api.ask("GET", f"/api/v1/dlq/{listed['dead_letter_id']}")).json
        assert (shown["payload"], shown["payload_withheld"]) == (None, True)
        [replay] = (await plane.api.act("dlq/replay", all=True)).json["replayed"]
        assert (await plane.worker.result(replay["execution_id"]))["status"] == "succeeded"
        assert [call.messages[-1]["content"] for call in calls] == [prompt, prompt]


async def test_a_body_that_the_store_has_lost_ends_its_job_with_the_reason(open_plane: OpenPlane) -> None:
    async with open_plane() as plane:
        await plane.worker.end()
        assert (await plane.submit("lost")).status == 202
        await plane.worker.jetstream.purge_stream("OBJ_bodies")
        with patch.object(large_jobs, "RETRY_S", 0.01):
            plane.worker.begin()
            result = await plane.worker.result("lost")
        assert (result["status"], result["reason"], result["job_id"]) == ("dead_lettered", "invalid", "lost")
        assert "is not in the object store" in result["error"]["message"]
        [listed] = (await plane.api.ask("GET", "/api/v1/dlq")).json["dead_letters"]
        assert listed["replayable"] is False


async def test_a_job_that_a_program_publishes_is_taken_up_to_the_size_of_a_message_and_can_be_replayed(
    open_true_plane: OpenPlane,
) -> None:
    async with open_true_plane(faults=({"requests": [1, 1], "status": 400},)) as plane, calls_of(plane) as calls:
        prompt = large_text(7_500_000)
        assert (await plane.worker.run({"agent": "writer", "job_id": "nats", "prompt": prompt}))["reason"] == "error"
        [listed] = (await plane.api.ask("GET", "/api/v1/dlq")).json["dead_letters"]
        assert listed["replayable"] is True
        replayed = await plane.api.act("dlq/replay", all=True)
        assert replayed.status == 200, replayed.body
        [replay] = replayed.json["replayed"]
        assert (await plane.worker.result(replay["execution_id"]))["status"] == "succeeded"
        assert [call.messages[-1]["content"] for call in calls] == [prompt, prompt]
        await plane.emptied()


async def test_a_job_that_is_too_large_for_nats_is_sent_to_http(
    module_nats_server: RunningServer, open_true_plane: OpenPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BREAKWATER_NATS_URL", module_nats_server.url)
    async with open_true_plane():
        with pytest.raises(CliError) as refused:
            await send(
                PlaneLocation(None), {"agent": "writer", "job_id": "j", "prompt": large_text(TRUE_LARGE)}, wait_s=0
            )
    assert "exceed the server's message limit" in str(refused.value)
    assert refused.value.remedy == "Submit it over HTTP (--via http), which takes up to limits.max_body_bytes."


async def test_the_size_of_a_waiting_job_includes_its_body(open_true_plane: OpenPlane) -> None:
    async with open_true_plane() as plane:
        await plane.worker.end()
        quota = QueueQuota(2 * TRUE_LARGE, Lookup(lambda: plane.api.bus))
        assert quota.has_room("writer", TRUE_LARGE)
        assert (await plane.submit("waiting", prompt=large_text(TRUE_LARGE))).status == 202
        await quota.check()
        assert quota.has_room("writer", TRUE_LARGE // 2)
        assert not quota.has_room("writer", TRUE_LARGE + 100_000)
        assert quota.has_room("private", TRUE_LARGE)


async def test_large_bodies_wait_for_room_in_memory_and_small_ones_do_not(
    open_plane: OpenPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_bodies, "WAIT_TIMEOUT_S", 2)
    async with open_plane(limits={"bodies_in_memory_bytes": LIMIT}) as plane:
        await plane.worker.end()
        stuck = asyncio.Event()

        async def slowly() -> AsyncGenerator[bytes]:
            yield json.dumps({"agent": "writer", "prompt": large_text()}).encode()
            await stuck.wait()

        async def refusal() -> Answer | None:
            answer = await plane.submit(new_id())
            return answer if answer.status == 503 else None

        slow = asyncio.create_task(plane.api.ask("POST", "/api/v1/jobs", data=slowly()))
        busy: Answer = await until(refusal, "all room to be taken")
        assert (busy.status, busy.code, busy.headers["Retry-After"]) == (503, "busy", "5")
        assert "limits.bodies_in_memory_bytes" in busy.message
        assert (await plane.submit("small", prompt="x")).status == 202
        monkeypatch.setattr(http_bodies, "WAIT_TIMEOUT_S", 60)
        waiting = asyncio.create_task(plane.submit("next"))
        await asyncio.sleep(0)
        stuck.set()
        assert (await slow).status == 202
        assert (await waiting).status == 202


async def test_without_nats_or_redis_meanwhile_nothing_accepted_is_lost(
    own_nats_server: RunningServer, own_redis_server: RunningServer, tmp_path: Path, scaled_sizes: None
) -> None:
    async with opened(own_nats_server.url, own_redis_server.url, tmp_path) as plane:
        await plane.worker.end()
        accepted: list[str] = []

        async def submit(job_id: str) -> None:
            if (await plane.submit(job_id)).status == 202:
                accepted.append(job_id)

        submitting = [asyncio.create_task(submit(f"job-{number}")) for number in range(4)]
        await until(lambda: accepted, "the first acceptance")
        own_nats_server.kill()
        await asyncio.gather(*submitting)
        assert (await plane.submit("refused")).status == 503
        await own_nats_server.restart_async()
        plane.worker.begin()
        own_redis_server.kill()
        await own_redis_server.restart_async()
        for job_id in accepted:
            assert (await plane.worker.result(job_id))["status"] == "succeeded"


async def test_a_stored_response_keeps_a_large_input_until_it_is_deleted(open_plane: OpenPlane) -> None:
    async with open_plane() as plane, calls_of(plane) as calls:
        prompt = large_text()
        first = await plane.api.ask("POST", "/v1/responses", json={"model": "writer", "input": prompt})
        assert first.status == 200, first.body[:500]
        path = f"/v1/responses/{first.json['id']}"
        asked = {"model": "writer", "input": "And a dog?", "previous_response_id": first.json["id"]}
        second = await plane.api.ask("POST", "/v1/responses", json=asked)
        assert second.status == 200, second.body[:500]
        assert [message["content"] for message in calls[-1].messages] == [prompt, "A cat.", "And a dog?"]
        items = (await plane.api.ask("GET", f"{path}/input_items")).json["data"]
        assert prompt in json.dumps(items)
        background = {"model": "writer", "input": prompt, "background": True}
        third = await plane.api.ask("POST", "/v1/responses", json=background)
        assert third.json["status"] in {"queued", "in_progress"}, third.body[:500]
        assert await plane.remove_leftovers() == 0
        for response in (first, third):
            deleted = await plane.api.ask("DELETE", f"/v1/responses/{response.json['id']}")
            assert deleted.status == 200, deleted.body
        gone = await plane.api.ask("POST", "/v1/responses", json=asked)
        assert gone.status in {400, 404}
        await plane.emptied()


async def test_a_program_cannot_refer_to_the_body_of_another_job(open_plane: OpenPlane) -> None:
    async with open_plane() as plane, calls_of(plane) as calls:
        await plane.worker.end()
        assert (await plane.submit("theirs")).status == 202
        reference = ((await plane.api.last_job()).headers or {})[Header.BODY.value]
        job = json.dumps({"agent": "writer", "job_id": "mine", "prompt": "mine"}).encode()
        headers = {Header.BODY.value: reference}
        await plane.worker.jetstream.publish("bw.jobs.writer.client", job, headers=headers)
        plane.worker.begin()
        assert (await plane.worker.result("mine"))["status"] == "succeeded"
        assert (await plane.worker.result("theirs"))["status"] == "succeeded"
        assert sorted(str(call.messages[-1]["content"])[:4] for call in calls) == ["mine", SECRET[:4]]


async def test_plans_dry_runs_and_cached_answers_take_large_bodies(open_plane: OpenPlane) -> None:
    async with open_plane() as plane, calls_of(plane) as calls:
        prompt = large_text()
        dry_run = await plane.api.post({"agent": "cached", "prompt": prompt, "dry_run": True}, query="?wait_s=60")
        assert (dry_run.status, dry_run.json["dry_run"], len(calls)) == (200, True, 0)
        for cache_hit in (False, True):
            answer = await plane.api.post({"agent": "cached", "prompt": prompt}, query="?wait_s=60")
            assert (answer.json["status"], answer.json["cache_hit"]) == ("succeeded", cache_hit)
        jobs = [
            {"agent": "writer", "job_id": "first", "prompt": large_text(500_000)},
            {"agent": "writer", "job_id": "then", "prompt": large_text(500_000), "depends_on": ["first"]},
        ]
        accepted = await plane.api.ask("POST", "/api/v1/plans", json={"plan_id": "two", "jobs": jobs})
        assert accepted.status in {200, 202}, accepted.body
        for job_id in ("first", "then"):
            assert (await plane.worker.result(job_id))["status"] == "succeeded"
        assert [len(str(call.messages[-1]["content"])) > 490_000 for call in calls] == [True] * 3
        await plane.emptied()


async def test_a_body_that_is_compressed_and_encrypted_takes_the_memory_of_its_job(
    open_plane: OpenPlane, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text(new_key())
    async with open_plane(encryption={"keys": [{"file": str(tmp_path / "key")}]}) as plane:
        budget = plane.worker.worker.bodies.budget
        taken: list[int] = []
        answer_or_run = JobHandler._answer_or_run  # pyright: ignore[reportPrivateUsage]

        async def spy(self: JobHandler, job: Assignment) -> None:
            taken.append(budget.taken)
            await answer_or_run(self, job)

        with patch.object(JobHandler, "_answer_or_run", spy):
            assert (await plane.submit("sealed")).status == 202
            assert len(await plane.stored_bytes()) < LARGE // 10, "it is compressed"
            assert (await plane.worker.result("sealed"))["status"] == "succeeded"
        assert taken[0] >= LARGE


async def test_a_repeated_message_of_an_ended_job_is_no_id_conflict_if_its_end_is_seen_late(
    open_plane: OpenPlane,
) -> None:
    async with open_plane() as plane:
        await plane.worker.end()
        assert (await plane.submit("done")).status == 202
        message = await plane.api.last_job()
        plane.worker.begin()
        assert (await plane.worker.result("done"))["status"] == "succeeded"
        await plane.emptied()
        # As if a replica that lags did not have the result yet.
        with (
            patch.object(LargeJobs, "_has_ended", AsyncMock(return_value=False)) as asked,
            patch.object(large_jobs, "RETRY_S", 0.01),
        ):
            await plane.worker.jetstream.publish(message.subject or "", message.data or b"", headers=message.headers)

            async def is_acknowledged() -> bool:
                return asked.await_count > 0 and await plane.worker.pending_jobs() == 0

            await until(is_acknowledged, "the acknowledgement")
        assert (await plane.api.ask("GET", "/api/v1/dlq")).json["dead_letters"] == []


async def test_a_request_that_waits_for_its_answer_holds_no_room_in_memory(open_plane: OpenPlane) -> None:
    async with open_plane(limits={"bodies_in_memory_bytes": LIMIT}) as plane:
        await plane.worker.end()
        chat = {"model": "writer", "messages": [{"role": "user", "content": large_text()}]}
        path = "/v1/chat/completions"
        asking = [
            asyncio.create_task(plane.api.ask("POST", path, json=chat)),
            asyncio.create_task(plane.api.ask("POST", path, json={**chat, "stream": True})),
            asyncio.create_task(plane.submit("job", query="?wait_s=60")),
        ]

        async def all_are_queued() -> bool:
            return await plane.api.queued() == len(asking)

        await until(all_are_queued, "all jobs to be queued, one after the other")
        plane.worker.begin()
        whole, streamed, job = await asyncio.gather(*asking)
        assert whole.json["choices"][0]["message"]["content"] == "A cat."
        assert b"[DONE]" in streamed.body
        assert job.json["status"] == "succeeded"


async def test_a_dead_letter_that_two_operators_replay_at_once_is_replayed_once(open_plane: OpenPlane) -> None:
    async with open_plane(faults=({"requests": [1, 1], "status": 400},)) as plane:
        assert (await plane.submit("failed")).status == 202
        assert (await plane.worker.result("failed"))["status"] == "dead_lettered"
        await plane.worker.end()
        read = BodyReader.read
        firsts: list[Any] = []

        async def overtaken(self: BodyReader, reference: BodyReference) -> bytes:
            if not firsts:
                firsts.append(None)
                firsts.append((await plane.api.act("dlq/replay", all=True)).json)
            return await read(self, reference)

        with patch.object(BodyReader, "read", overtaken):
            second = (await plane.api.act("dlq/replay", all=True)).json
        assert (len(firsts[1]["replayed"]), firsts[1]["already"]) == (1, 0)
        assert (second["replayed"], second["already"], second["skipped"]) == ([], 1, [])
        assert len(await plane.bodies()) == 1, "that of the replay"


async def test_a_dead_letter_is_not_shown_without_room_in_memory(
    open_plane: OpenPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "WAIT_TIMEOUT_S", 0.2)
    async with open_plane(faults=({"requests": [1, 1], "status": 400},)) as plane:
        assert (await plane.submit("failed")).status == 202
        assert (await plane.worker.result("failed"))["status"] == "dead_lettered"
        [listed] = (await plane.api.ask("GET", "/api/v1/dlq")).json["dead_letters"]
        path = f"/api/v1/dlq/{listed['dead_letter_id']}"

        async def wait_forever(_: ByteBudget, size: int) -> int:
            await asyncio.Event().wait()
            return size

        with patch.object(ByteBudget, "take", wait_forever):
            busy = await plane.api.ask("GET", path)
        assert (busy.status, busy.code) == (503, "busy")
        assert (await plane.api.ask("GET", path)).status == 200
