"""`breakwater.client` against the request service, a worker and the simulated provider; also over lost connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pytest
import pytest_asyncio

from breakwater.client import ApiRefusedError, ApiUnavailableError, AsyncClient, Client, Job, JobFailedError
from breakwater.config import load_config
from breakwater.identity.api_keys import create_key
from breakwater.jobs.rules.ids import key_of
from breakwater.local.ports import free_port
from tests.cli.api_stub import KEY, problem, serving
from tests.flow.kit import model
from tests.server_sources import RunningServer
from tests.services.request.conftest import HttpApi, new_id, running, settings_for
from tests.services.worker.harness import WorkerPlane, running_worker

ANSWER = "".join(f"{number:03d} " for number in range(60))
ONCE: dict[str, Any] = {"retry": {"max_attempts": 1}, "breaker": "off"}
MODELS = {
    "sim/fast": model(answer=ANSWER),
    "sim/slow": model(answer=ANSWER, stream={"tokens_per_s": 150}),
    "sim/late": model(answer=ANSWER, latency_ms=700),
    "sim/down": model({"status": 500}),
    "sim/cut": model({"stream": "cut", "after_chunks": 40}, answer=ANSWER),
}
AGENTS = {name: {"model": f"sim/{name}", "allowed_models": ["sim/fast"], **ONCE} for name in ("fast", "slow", "late")}
AGENTS |= {name: {"model": f"sim/{name}", **ONCE} for name in ("down", "cut")}
AGENTS["limited"] = {"model": "sim/fast", "rate_limit": {"requests_per_minute": 1, "on_exceeded": "fail"}}


@dataclass(frozen=True, slots=True)
class ClientPlane:
    api: HttpApi
    worker: WorkerPlane

    def client(self, url: str | None = None, **more: Any) -> AsyncClient:
        return AsyncClient(url or self.api.url, self.key(), **more)

    def key(self) -> str:
        return create_key(self.api.settings.api_keys_file, "app", ("submit",))

    def calls(self, *job_ids: str | None) -> int:
        """How many there were for these jobs; others may still be going on."""
        made = [str(call.client_request_id).partition(":")[0] for call in self.worker.sim.ledger.calls]
        return sum(job_id in job_ids for job_id in made)


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def plane(
    module_nats_server: RunningServer, redis_server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[ClientPlane]:
    directory = tmp_path_factory.mktemp("client")
    started = running_worker(
        directory, nats_url=module_nats_server.url, redis_url=redis_server.url, script={"models": MODELS}, agents=AGENTS
    )
    async with started as worker:
        settings = settings_for(module_nats_server.url, redis_server.url, directory)
        config = load_config(directory / "breakwater.yaml")
        async with running(settings, config, create_key(settings.api_keys_file, "tests")) as api:
            yield ClientPlane(api, worker)


def a_job(agent: str = "fast", **more: Any) -> Job:
    return Job.model_validate({"agent": agent, "prompt": "Count.", **more})


@asynccontextmanager
async def cutting(plane: ClientPlane, *after: int) -> AsyncGenerator[str]:
    """A way to the HTTP API on which the first connections break after so many bytes of the response."""
    port, left, host = free_port(), list(after), plane.api.settings.http_port

    async def relay(client: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        most = left.pop(0) if left else 10**9
        answers, server = await asyncio.open_connection("127.0.0.1", host)

        async def there() -> None:
            while data := await client.read(65536):
                server.write(data)

        asking = asyncio.create_task(there())
        while most > 0 and (data := await answers.read(65536)):
            back.write(data[:most])
            most -= len(data)
        asking.cancel()
        server.close()
        back.close()

    listening = await asyncio.start_server(relay, "127.0.0.1", port)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        listening.close()


async def test_a_job_is_run_and_its_result_is_typed(plane: ClientPlane) -> None:
    async with plane.client() as client:
        result = await client.run(a_job(metadata={"order": 4711}, params={"temperature": 0.5}))
    assert (result.status, result.output, result.chosen_model) == ("succeeded", ANSWER, "sim/fast")
    assert (result.metadata, result.attempts_count) == ({"order": 4711}, 1)
    assert result.cost_usd == Decimal("0.000042")


async def test_a_job_is_submitted_and_waited_for_later(plane: ClientPlane) -> None:
    async with plane.client() as client:
        job_id = await client.submit(a_job("late"))
        with pytest.raises(TimeoutError, match=rf"{job_id}.*keeps running"):
            await client.wait(job_id, timeout_s=0.1)
        result = await client.wait(job_id)
        assert (result.job_id, result.output) == (job_id, ANSWER)
        with pytest.raises(ApiRefusedError, match="no job"):
            await client.wait(new_id())


async def test_a_job_that_fails_is_raised_with_what_it_cost(plane: ClientPlane) -> None:
    async with plane.client() as client:
        with pytest.raises(JobFailedError, match=r"down.*dead_lettered") as failed:
            await client.run(a_job("down"))
        assert failed.value.result.attempts[0].error is not None
        with pytest.raises(ApiRefusedError) as refused:
            await client.submit(a_job("unknown"))
        assert refused.value.code == "unknown_agent"


async def test_a_refused_job_says_when_it_may_succeed_and_each_what_is_left_of_its_limits(plane: ClientPlane) -> None:
    async with plane.client() as client:
        answered = await client.run(a_job("limited"))
        with pytest.raises(JobFailedError, match="has no room for this call") as failed:
            await client.run(a_job("limited"))
    refused = failed.value.result
    for result in (answered, refused):
        assert result.limits is not None
        assert result.limits.requests is not None
        assert (result.limits.requests.limit, result.limits.requests.remaining) == (1, 0)
    assert refused.error is not None
    assert refused.error.retry_after_s is not None
    assert 20 < refused.error.retry_after_s < 61


async def test_a_job_is_cancelled_and_who_waits_for_it_hears_that(plane: ClientPlane) -> None:
    async with plane.client() as client:
        job_id = await client.submit(a_job("late"))
        waiting = asyncio.create_task(client.wait(job_id))
        cancelled = await client.cancel(job_id, reason="no longer needed")
        assert (cancelled.job_id, cancelled.status in {"cancelling", "cancelled"}) == (job_id, True)
        with pytest.raises(JobFailedError, match="cancelled") as ended:
            await waiting
        assert ended.value.result.status == "cancelled"
        again = await client.cancel(job_id)
        assert again.cancellation is not None
        assert (again.status, again.cancellation.reason) == ("cancelled", "no longer needed")
        with pytest.raises(ApiRefusedError, match="no job"):
            await client.cancel(new_id())


async def test_a_job_whose_response_is_lost_is_asked_for_again_and_paid_once(plane: ClientPlane) -> None:
    async with cutting(plane, 0, 1, 30) as url, plane.client(url) as client:
        result = await client.run(a_job("late"))
    assert (result.output, plane.calls(result.job_id)) == (ANSWER, 1)


async def test_a_plane_that_is_away_is_tried_for_as_long_as_is_said(plane: ClientPlane) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    for send in (lambda client: client.submit(a_job()), lambda client: anext(aiter(client.stream(a_job())))):
        async with plane.client(nowhere, retry_for_s=0.3) as client:
            begun = asyncio.get_running_loop().time()
            with pytest.raises(ApiUnavailableError):
                await send(client)
            assert asyncio.get_running_loop().time() - begun > 0.04


async def test_a_refusal_for_the_moment_is_repeated_with_the_same_id_and_that_of_a_breaker_is_not() -> None:
    async with serving() as stub, AsyncClient(stub.url, KEY, retry_for_s=0.3) as client:
        for status, code, headers, repeated in (
            (503, "refused", {}, True),
            (503, "unavailable", {"Retry-After": "1", "retry-after-ms": "100"}, True),
            (503, "unavailable", {"Retry-After": "1"}, False),
            (503, "undecryptable", {"x-should-retry": "false"}, False),
            (503, "agent_unavailable", {}, False),
            (429, "too_many_requests", {}, True),
        ):
            stub.asked.clear()
            stub.headers = headers
            stub.answers["POST jobs"] = (status, problem(code, "not now"))
            with pytest.raises(ApiRefusedError, match="not now"):
                await client.submit(a_job())
            assert (len(stub.asked) > 1) == repeated
            assert len({body["job_id"] for _, body in stub.asked}) == 1


async def test_a_stream_is_read_while_it_is_produced(plane: ClientPlane) -> None:
    async with plane.client() as client:
        stream = client.stream(a_job("slow"))
        with pytest.raises(ValueError, match="no result yet"):
            assert stream.result
        pieces = [piece async for piece in stream]
    assert len(pieces) > 10
    assert "".join(pieces) == stream.text == ANSWER
    assert (stream.result.job_id, stream.result.attempts[0].model) == (stream.job_id, "sim/slow")


async def test_the_options_of_a_job_hold_when_it_is_streamed(plane: ClientPlane) -> None:
    async with plane.client() as client:
        more: dict[str, Any] = {"params": {"max_tokens": 30}, "tenant": "acme", "task_id": "t1", "metadata": {"a": 1}}
        more["retry"] = {"max_attempts": 1}
        stream = client.stream(a_job("slow", model="sim/fast", **more))
        async for _ in stream:
            pass
    found = stream.result
    assert (found.chosen_model, found.finish_reason) == ("sim/fast", "length")
    assert (found.tenant, found.task_id, found.metadata) == ("acme", "t1", {"a": 1})
    with pytest.raises(ValueError, match="input"):
        client.stream(Job(agent="fast", input={"a": 1}))


async def test_a_stream_whose_connection_breaks_goes_on_where_it_was_and_is_paid_once(plane: ClientPlane) -> None:
    async with cutting(plane, 0, 3_000, 2_000, 6_000) as url, plane.client(url) as client:
        stream = client.stream(a_job("slow"))
        pieces = [piece async for piece in stream]
    assert "".join(pieces) == ANSWER
    assert len(pieces) > 5
    assert plane.calls(stream.job_id) == 1


async def test_a_stream_that_fails_says_how_the_job_ended(plane: ClientPlane) -> None:
    async with plane.client() as client:
        for name, text in (("cut", ANSWER[:160]), ("down", "")):
            stream = client.stream(a_job(name))
            with pytest.raises(JobFailedError) as failed:
                async for _ in stream:
                    pass
            assert stream.text == text
            assert (failed.value.result.job_id, failed.value.result.output) == (stream.job_id, text or None)
        with pytest.raises(ApiRefusedError) as refused:
            await anext(aiter(client.stream(a_job("unknown"))))
        assert refused.value.code == "model_not_found"
        with pytest.raises(TimeoutError, match="keeps running"):
            await anext(aiter(client.stream(a_job("late"), timeout_s=0.1)))


async def test_a_batch_gives_each_job_back_and_counts(plane: ClientPlane) -> None:
    jobs = [a_job(job_id=new_id()) for _ in range(20)]
    async with plane.client() as client:
        batch = client.batch([*jobs, a_job("down"), a_job("unknown")], in_flight=6)
        done: list[int] = []
        failed: dict[str, Any] = {}
        async for item in batch:
            done.append(batch.progress.done)
            if item.error is not None:
                failed[item.job.agent] = (type(item.error), item.result is not None)
        assert done == list(range(1, 23))
        assert failed == {"down": (JobFailedError, True), "unknown": (ApiRefusedError, False)}
        progress = batch.progress
        assert (progress.total, progress.succeeded, progress.failed) == (22, 20, 2)
        assert progress.cost_usd >= 20 * Decimal("0.000042")
        ids, names = [job.job_id for job in jobs], [key_of("key:app", str(job.job_id)) for job in jobs]
        assert plane.calls(*names) == 20
        again = client.batch(iter(jobs))
        assert {item.job.job_id async for item in again} == set(ids)
        assert (again.progress.total, again.progress.succeeded, plane.calls(*names)) == (None, 20, 20)


async def test_a_batch_that_is_left_submits_no_more(plane: ClientPlane) -> None:
    taken: list[Job] = []

    def jobs() -> Any:
        while True:
            taken.append(a_job("late"))
            yield taken[-1]

    async with plane.client() as client:
        items = aiter(client.batch(jobs(), in_flight=3))
        await anext(items)
        await items.aclose()
    assert len(taken) == 3
    with pytest.raises(ValueError, match="in_flight"):
        client.batch([], in_flight=0)


async def test_the_client_without_asyncio_does_the_same(plane: ClientPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BREAKWATER_URL", plane.api.url)
    monkeypatch.setenv("BREAKWATER_API_KEY", plane.key())

    def program() -> None:
        with Client() as client:
            assert client.run(a_job()).output == ANSWER
            assert client.wait(client.submit(a_job())).output == ANSWER
            stream = client.stream(a_job("slow"))
            assert "".join(stream) == stream.text == ANSWER
            assert stream.result.job_id == stream.job_id
            batch = client.batch([a_job(), a_job("down")])
            assert sorted(item.error is None for item in batch) == [False, True]
            assert batch.progress.done == 2
            for piece in client.stream(a_job("slow")):
                assert piece
                break
            with pytest.raises(JobFailedError):
                client.run(a_job("down"))
            assert client.cancel(client.submit(a_job("late"))).status in {"cancelling", "cancelled"}
            with pytest.raises(TimeoutError):
                client.run(a_job("late"), timeout_s=0.1)
        client.close()

    await asyncio.to_thread(program)
