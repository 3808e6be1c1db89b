"""Submitting jobs: what is accepted, what is refused, and what stands on the bus afterwards."""

import asyncio
import json
from collections.abc import AsyncGenerator

import pytest

from breakwater.jobs.contract.job import Job
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.subjects import decode_token
from tests.services.request.conftest import ODD_AGENT, HttpApi, new_id

JOB = {"agent": "writer", "prompt": "x"}


async def test_an_accepted_job_is_on_the_bus_as_any_client_could_have_published_it(api: HttpApi) -> None:
    answer = await api.post(JOB | {"params": {"temperature": 0.5}})
    assert answer.status == 202
    job_id = answer.json["job_id"]
    assert answer.json == {"job_id": job_id, "execution_id": job_id, "status": "accepted", "duplicate": False}
    assert answer.headers["Location"] == f"/api/v1/jobs/{job_id}"
    message = await api.last_job()
    job = Job.model_validate_json(message.data)
    assert (job.agent, job.prompt, job.params, job.job_id) == ("writer", "x", {"temperature": 0.5}, None)
    assert message.headers is not None
    assert message.headers["Nats-Msg-Id"] == f"writer/{job_id}"
    assert message.headers["Breakwater-Execution-Id"] == job_id
    assert message.headers["Breakwater-Unique-Id"] == "1"
    assert "traceparent" not in message.headers


async def test_an_id_of_the_senders_own_is_not_called_unique(api: HttpApi) -> None:
    job_id = new_id()
    assert (await api.post(JOB | {"job_id": job_id})).json["job_id"] == job_id
    message = await api.last_job()
    assert message.headers is not None
    assert "Breakwater-Unique-Id" not in message.headers


async def test_the_id_comes_from_the_idempotency_key_where_the_body_has_none(api: HttpApi) -> None:
    key = f"order {new_id()}"
    answer = await api.post(JOB, **{"Idempotency-Key": key})
    assert answer.json["job_id"] == key
    assert decode_token(((await api.last_job()).headers or {})["Breakwater-Execution-Id"]) == key
    assert answer.headers["Location"] == "/api/v1/jobs/" + key.replace(" ", "%20")


async def test_a_trace_context_is_passed_on_and_nonsense_in_its_place_is_not(api: HttpApi) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await api.post(JOB, traceparent=trace)
    assert ((await api.last_job()).headers or {})["traceparent"] == trace
    await api.post(JOB, traceparent="nonsense")
    assert "traceparent" not in ((await api.last_job()).headers or {})


async def test_a_model_id_of_any_form_is_accepted(api: HttpApi) -> None:
    for model in ("gpt-4.1", "org/model:free", "a b", "*", ">", "模型 4.1"):
        assert (await api.post(JOB | {"model": model, "fallback_models": [model]})).status == 202
        assert json.loads((await api.last_job()).data)["model"] == model


async def test_an_agent_name_of_any_form_is_accepted(api: HttpApi) -> None:
    answer = await api.post({"agent": ODD_AGENT, "prompt": "x", "job_id": f"./* é {new_id()}"})
    assert answer.status == 202
    message = await api.last_job(ODD_AGENT)
    assert subjects.agent_of_job(message.subject) == ODD_AGENT


KEY = "sk-proj-" + "made-up-" * 4


@pytest.mark.parametrize("field", ["job_id", "tenant", "task_id", "parent_execution_id", "plan_id"])
async def test_an_id_with_the_form_of_a_key_is_refused_and_not_repeated(api: HttpApi, field: str) -> None:
    refusal = await api.post(JOB | {field: f"order {KEY}"})
    assert (refusal.status, refusal.json["error"]["code"]) == (422, "invalid_job")
    assert f"{field}: has the form of a known service's key" in refusal.json["error"]["message"]
    assert KEY not in str(refusal.json)


async def test_an_idempotency_key_with_the_form_of_a_key_is_refused(api: HttpApi) -> None:
    refusal = await api.post(JOB, **{"Idempotency-Key": KEY})
    assert (refusal.status, KEY in str(refusal.json)) == (422, False)


NO_JOBS = [
    (b"agent=writer", 400, "not_json", []),
    (b"", 400, "not_json", []),
    (b'{"agent": "writer", "prompt": "\xff"}', 400, "not_utf8", []),
    (b"[]", 422, "invalid_job", [""]),
    (b'{"agent": "writer", "promt": "x", "prompt": "y"}', 422, "invalid_job", ["promt"]),
    (b'{"agent": "writer", "prompt": ""}', 422, "invalid_job", ["prompt"]),
    (b'{"agent": "writer", "prompt": " \\n"}', 422, "invalid_job", ["prompt"]),
    (b'{"agent": "writer", "prompt": "x", "total_timeout_s": 3600}', 422, "invalid_job", ["total_timeout_s"]),
    (b'{"agent": "writer", "messages": [{"role": 1}]}', 422, "invalid_job", ["messages.0.role"]),
    (b'{"agent": "writer", "input": {"a": 1}}', 422, "invalid_job", ["input"]),
    (b'{"agent": "writer", "prompt": "x", "guard": 5}', 422, "invalid_job", ["guard"]),
    (b'{"agent": "writer", "prompt": "x", "guard": {"max_cost": 1}}', 422, "invalid_job", ["guard.max_cost"]),
    (b'{"agent": "writer", "prompt": "x", "guard": {"max_tokens": 1e9}}', 422, "invalid_job", ["guard.max_tokens"]),
    (b'{"agent": "writer", "prompt": "x", "retry": {"on": [404]}}', 422, "invalid_job", ["retry.on"]),
    (
        b'{"agent": "writer", "prompt": "x", "breaker": {"preset": "tdd-red-green"}}',
        422,
        "invalid_job",
        ["breaker.consecutive_failures"],
    ),
    (
        b'{"agent": "writer", "prompt": "x", "fallback_models": [%s]}' % b",".join([b'"other/n"'] * 17),
        422,
        "invalid_job",
        ["fallback_models"],
    ),
    (b'{"agent": "writr", "prompt": "x"}', 404, "unknown_agent", ["agent"]),
]


async def test_what_is_no_job_is_refused_and_not_queued(api: HttpApi) -> None:
    for body, status, code, paths in NO_JOBS:
        answer = await api.post(body)
        assert (answer.status, answer.code, answer.paths) == (status, code, paths), body
    assert await api.queued() == 0


async def test_a_job_may_bring_stricter_breaker_guard_and_retry_settings(api: HttpApi) -> None:
    rules = {
        "breaker": {"preset": "migration-safety", "same_error": 3},
        "guard": {"max_iterations": 5, "max_cost_usd": "0.10"},
        "retry": {"max_attempts": 1},
    }
    assert (await api.post(JOB | rules)).status == 202
    assert json.loads((await api.last_job()).data).items() >= rules.items()


async def test_an_unknown_agent_is_answered_with_the_known_ones(api: HttpApi) -> None:
    answer = await api.post({"agent": "writr", "prompt": "x"})
    assert answer.message == "agent 'writr' is not configured; did you mean 'writer'?"
    assert answer.json["error"]["details"][0]["message"] == f"configured are reader, writer, {ODD_AGENT}"


async def test_a_wrong_query_is_refused_by_name(api: HttpApi) -> None:
    for query in ("wait_s=0", "wait_s=-1", "wait_s=301", "wait_s=nan", "wait_s=soon", "wait_s=", "wait=5"):
        answer = await api.post(JOB, query=f"?{query}")
        assert (answer.status, answer.code, answer.paths) == (422, "invalid_query", [query.partition("=")[0]])
    assert await api.queued() == 0


async def chunks(size: int) -> AsyncGenerator[bytes]:
    for _ in range(size // 100_000):
        yield b" " * 100_000


async def test_a_body_over_the_limit_is_refused_by_its_content_length(api: HttpApi) -> None:
    answer = await api.post(b" " * 10_000_000)
    assert (answer.status, answer.code) == (413, "body_too_large")
    assert "1,000,000 bytes" in answer.message


async def test_a_chunked_body_over_the_limit_is_refused_while_it_comes(api: HttpApi) -> None:
    answer = await api.ask("POST", "/api/v1/jobs", data=chunks(10_000_000))
    assert (answer.status, answer.code) == (413, "body_too_large")
    assert (await api.post(JOB)).status == 202


async def test_a_body_at_the_limit_is_accepted_also_in_chunks(api: HttpApi) -> None:
    body = json.dumps(JOB | {"prompt": ""}).encode()
    body = body.replace(b'""', b'"' + b"x" * (1_000_000 - len(body)) + b'"')

    async def halves() -> AsyncGenerator[bytes]:
        yield body[:500_000]
        yield body[500_000:]

    assert (await api.post(body)).status == 202
    assert (await api.ask("POST", "/api/v1/jobs", data=halves())).status == 202
    assert (await api.post(body + b" ")).status == 413


async def test_a_client_that_asks_before_it_sends_too_much_need_not_send_it(api: HttpApi) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", api.settings.http_port)
    key = api.http.headers["Authorization"]
    head = f"POST /api/v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: {key}\r\n"
    writer.write(f"{head}Content-Length: 99000000\r\nExpect: 100-continue\r\n\r\n".encode())
    assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 413")
    writer.close()


async def test_a_client_that_leaves_in_the_middle_of_its_body_does_no_harm(api: HttpApi) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", api.settings.http_port)
    key = api.http.headers["Authorization"]
    writer.write(
        f"POST /api/v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: {key}\r\nContent-Length: 99\r\n\r\n{{".encode()
    )
    await writer.drain()
    writer.close()
    assert (await api.post(JOB)).status == 202
    assert await api.queued() == 1


async def test_every_error_has_the_one_shape(api: HttpApi) -> None:
    for method, path, status, code in [
        ("GET", "/api/v1/nothing", 404, "not_found"),
        ("GET", "/nothing", 404, "not_found"),
        ("DELETE", "/api/v1/jobs", 405, "method_not_allowed"),
        ("POST", "/healthz", 405, "method_not_allowed"),
    ]:
        answer = await api.ask(method, path)
        assert (answer.status, answer.code) == (status, code)
        assert answer.headers["Content-Type"] == "application/json"
        assert set(answer.json["error"]) == {"code", "message", "details"}
        assert ("Allow" in answer.headers) == (status == 405)


async def test_a_bug_is_answered_in_the_one_shape_and_reports_nothing_of_itself(
    api: HttpApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: bytes) -> Job:
        raise RuntimeError("the secret inside")

    monkeypatch.setattr("breakwater.jobs.api.jobs.read_job", fail)
    answer = await api.post(JOB)
    assert (answer.status, answer.code) == (500, "internal")
    assert b"secret" not in answer.body
