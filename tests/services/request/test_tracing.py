"""A submission is part of its caller's trace, and the job carries that on."""

import asyncio

import pytest

from breakwater.kernel.nats.subjects import Header
from tests.otlp import collecting, tracing_to
from tests.services.request.conftest import ODD_AGENT, HttpApi, new_id

JOB = {"agent": "writer", "prompt": "the prompt"}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NAME = "POST /api/v1/jobs"


async def test_the_job_carries_on_the_span_of_its_submission(api: HttpApi, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = new_id()
    async with collecting() as collector:
        async with tracing_to(collector, monkeypatch):
            assert (await api.post(JOB | {"job_id": job_id}, traceparent=PARENT)).status == 202
            carried = ((await api.last_job()).headers or {})[Header.TRACEPARENT.value]
        span = await collector.named(NAME)
    assert carried == span.traceparent
    assert span.parent == PARENT.split("-")[2]
    assert carried.split("-")[1] == PARENT.split("-")[1]
    assert span.attributes == {
        "http.request.method": "POST",
        "http.route": "/api/v1/jobs",
        "http.response.status_code": 202,
        "url.path": "/api/v1/jobs",
        "url.scheme": "http",
        "gen_ai.agent.name": "writer",
        "breakwater.execution_id": job_id,
    }


async def test_what_is_no_trace_context_is_ignored(api: HttpApi, monkeypatch: pytest.MonkeyPatch) -> None:
    async with collecting() as collector:
        async with tracing_to(collector, monkeypatch):
            await api.post(JOB | {"agent": ODD_AGENT}, traceparent=f"00-{'0' * 32}-{'0' * 16}-01")
        assert (await collector.named(NAME)).parent == ""


async def test_a_refusal_is_no_error_of_ours_and_an_outage_is(api: HttpApi, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("sk-secret")

    async with collecting() as collector:
        async with tracing_to(collector, monkeypatch):
            assert (await api.ask("POST", "/api/v1/jobs", json=JOB, headers={"Authorization": ""})).status == 401
            await api.post(JOB | {"agent": "nobody"})
            monkeypatch.setattr("breakwater.jobs.api.jobs.read_job", fail)
            await api.post(JOB)
        async with asyncio.timeout(60):
            while len(collector.spans) < 2:
                await asyncio.sleep(0.01)
        reported = [
            (span.attributes["http.response.status_code"], span.attributes.get("error.type"))
            for span in collector.spans
        ]
        assert sorted(reported, key=str) == [(404, None), (500, "RuntimeError")]
        assert not any("sk-secret" in str(span.wire) or "the prompt" in str(span.wire) for span in collector.spans)
