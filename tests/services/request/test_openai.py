"""OpenAI's API, called by the unmodified `openai` package; jobs are decided by the test instead of a worker."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import openai
import pytest
import pytest_asyncio
from nats.aio.msg import Msg

from breakwater.dialects.api.request_options import SESSION_HEADERS
from breakwater.identity.api_keys import create_key
from breakwater.jobs.contract.execution import Allowance, CallerLimits, ErrorInfo, Result
from breakwater.jobs.contract.job import Job
from breakwater.jobs.rules.ownership import job_digest
from breakwater.kernel.nats.delivery import name_in
from breakwater.kernel.nats.subjects import Header
from breakwater.kernel.redis.connection import Redis
from breakwater.kernel.security.encryption import LEFT_OUT
from breakwater.services.request.openapi import document
from tests.helpers import until
from tests.openai_client import openai_client
from tests.services.request.conftest import HttpApi, StartApi, publish_result, result_of

CONFIG = """
providers:
  openai: {base_url: "http://127.0.0.1:9/v1"}
  anthropic: {kind: anthropic}
  tool: {kind: process, command: [cat]}
defaults: {model: openai/gpt-4o, fallback_models: [anthropic/claude]}
agents:
  writer: {allowed_models: [openai/gpt-4o-mini]}
  writer/long: {allowed_models: ["*"]}
  openai: {}
limits: {drain_s: 0.1}
"""
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}


class Decider:
    """Decides each job once, with what `end` has."""

    def __init__(self, api: HttpApi) -> None:
        self.api = api
        self.jobs: list[dict[str, Any]] = []
        self.executions: list[str | None] = []
        self.deciding: list[asyncio.Task[None]] = []
        self.end: dict[str, Any] = {}
        self.ends: list[dict[str, Any]] = []
        """Those of the first jobs, before `end`."""
        self.begun_at: list[float] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def work(self, message: Msg) -> None:
        headers = message.headers or {}
        execution_id = name_in(headers, Header.EXECUTION_ID)
        job = json.loads(message.data)
        job["job_id"] = name_in(headers, Header.JOB_ID) or job.get("job_id") or execution_id
        if execution_id in self.executions:
            return
        self.executions.append(execution_id)
        self.jobs.append(job)
        self.begun_at.append(time.monotonic())
        end = self.ends.pop(0) if self.ends else self.end
        self.deciding.append(asyncio.create_task(self._decide(message, job, str(execution_id), end)))

    async def _decide(self, message: Msg, job: dict[str, Any], execution_id: str, end: dict[str, Any]) -> None:
        await self.may_answer.wait()
        name = name_in(message.headers or {}, Header.OWNER)
        digest = job_digest(Job.model_validate(job), name)
        known = {
            "job_id": job["job_id"],
            "tenant": job.get("tenant"),
            "owner": name,
            "job_digest": digest,
            "completed_at": datetime.now(UTC),
        }
        result = result_of(execution_id, job["agent"]).model_copy(update=known | end)
        await publish_result(self.api.bus, Result.model_validate(result.model_dump()))


@asynccontextmanager
async def deciding(api: HttpApi) -> AsyncGenerator[Decider]:
    decider = Decider(api)
    await api.bus.subscribe("bw.jobs.>", cb=decider.work)
    await api.bus.jetstream().account_info()
    yield decider
    decider.may_answer.set()
    await asyncio.gather(*decider.deciding)


@pytest_asyncio.fixture(loop_scope="package")
async def plane(start_api: StartApi, redis: Redis) -> AsyncGenerator[Decider]:
    del redis  # empty
    async with start_api(CONFIG) as api, deciding(api) as decider:
        yield decider


def client(plane: Decider, **more: Any) -> Any:
    """The SDK, with a key for all agents where `more` names none. Its types know no arguments from a dict."""
    return openai_client(f"{plane.api.url}/v1", more.pop("key", None) or key(plane), **more)


def key(plane: Decider, **more: Any) -> str:
    return create_key(plane.api.settings.api_keys_file, "app", ("submit",), **more)


def failing(reason: str, kind: str, **error: Any) -> dict[str, Any]:
    info = ErrorInfo.model_validate({"kind": kind, "class": "SomeError", "message": "it failed", **error})
    return {"status": "dead_lettered", "reason": reason, "error": info, "output": None}


async def test_a_call_is_a_job_and_its_answer_a_chat_completion(plane: Decider) -> None:
    plane.end = {"chosen_model": "openai/gpt-4o", "attempts_count": 2, "total_cost": 42_000}
    raw = await client(plane).chat.completions.with_raw_response.create(model="writer", temperature=0.5, **ASK)
    answer = raw.parse()
    assert (answer.object, answer.choices[0].message.content) == ("chat.completion", "done")
    [job] = plane.jobs
    assert job["agent"] == "writer"
    assert (job["messages"], job["params"]) == (ASK["messages"], {"temperature": 0.5})
    assert raw.headers["x-request-id"] == raw.headers["x-breakwater-execution-id"] == job["job_id"]
    assert raw.headers["x-breakwater-model"] == "openai/gpt-4o"
    assert raw.headers["x-breakwater-attempts"] == "2"
    assert raw.headers["x-breakwater-cost-usd"] == "0.000042000"
    assert raw.headers["x-breakwater-cache"] == "miss"
    assert "x-breakwater-dropped-params" not in raw.headers


def left(requests: int, tokens: int) -> CallerLimits:
    resets_at = datetime.now(UTC) + timedelta(minutes=1)
    return CallerLimits(
        requests=Allowance(limit=60, remaining=requests, resets_at=resets_at),
        tokens=Allowance(limit=1000, remaining=tokens, resets_at=resets_at),
    )


async def test_answers_and_refusals_say_what_is_left_of_the_callers_rate_limits(plane: Decider) -> None:
    create = client(plane, max_retries=0).chat.completions.with_raw_response.create
    plane.ends = [{"limits": left(59, 800)}]
    answered = (await create(model="writer", **ASK)).headers
    refusal = failing("rate_limited", "rate_limit", retry_after_s=7.25)
    refused: list[Any] = []
    for stream in (False, True):
        plane.ends = [refusal | {"limits": left(0, 800)}]
        with pytest.raises(openai.RateLimitError) as told:
            await create(model="writer", stream=stream, **ASK)
        refused.append(told.value.response.headers)
    for headers, remaining in ((answered, "59"), *((each, "0") for each in refused)):
        assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == ("60", remaining)
        assert (headers["x-ratelimit-limit-tokens"], headers["x-ratelimit-remaining-tokens"]) == ("1000", "800")
        assert re.fullmatch(r"1m0s|[2-5]\d(\.\d+)?s", headers["x-ratelimit-reset-requests"])
    assert {headers["retry-after-ms"] for headers in refused} == {"7300"}
    # Without a limit, nothing is made up.
    unlimited = (await create(model="writer", **ASK)).headers
    assert not [name for name in unlimited if "ratelimit" in name]


async def test_unknown_cost_has_no_header(plane: Decider) -> None:
    raw = await client(plane).chat.completions.with_raw_response.create(model="writer", **ASK)
    assert "x-breakwater-cost-usd" not in raw.headers


async def test_params_that_the_answering_provider_has_not_are_named(plane: Decider) -> None:
    plane.end = {"chosen_model": "anthropic/claude"}
    raw = await client(plane).chat.completions.with_raw_response.create(
        model="writer", seed=7, store=True, metadata={"app": "shop"}, temperature=1, **ASK
    )
    assert raw.headers["x-breakwater-dropped-params"] == "metadata, seed, store"


NAMES = [
    ("writer", (), "writer", None),
    ("writer/openai/gpt-4o-mini", (), "writer", "openai/gpt-4o-mini"),
    ("writer/gpt-4o-mini", (), "writer", "openai/gpt-4o-mini"),
    ("writer/claude", (), "writer", "anthropic/claude"),
    ("writer/long", (), "writer/long", None),
    ("writer/long/gpt-4o", (), "writer/long", "openai/gpt-4o"),
    ("writer/long/openai/gpt-9", (), "writer/long", "openai/gpt-9"),
    ("openai/gpt-4o", (), "openai", "openai/gpt-4o"),
    ("gpt-4o", ("writer",), "writer", "openai/gpt-4o"),
    ("openai/gpt-4o", ("writer",), "writer", "openai/gpt-4o"),
    ("writer/gpt-4o", ("writer",), "writer", "openai/gpt-4o"),
    ("openai/gpt-9", ("writer/long",), "writer/long", "openai/gpt-9"),
]
UNKNOWN = [
    ("gpt-4o", ()),
    ("writr", ()),
    ("writer/gpt-9", ()),
    ("writer/long/tool/x", ()),
    ("writer/long/nobody/x", ("writer", "openai")),
    ("openai", ("writer",)),
    ("gpt-9", ("writer",)),
    ("gpt-4o", ("writer", "openai")),
]


async def test_model_names_an_agent_an_agent_with_a_model_or_a_model_of_the_keys_agent(plane: Decider) -> None:
    for name, agents, agent, model in NAMES:
        of_key = client(plane, key=key(plane, agents=agents))
        await of_key.chat.completions.create(model=name, **ASK)
        job = plane.jobs[-1]
        assert (job["agent"], job.get("model")) == (agent, model), name
        assert (await of_key.models.retrieve(name)).id == name


async def test_the_environment_of_the_sdk_is_enough(plane: Decider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", f"{plane.api.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", key(plane, agents=("writer",)))
    async with openai.AsyncOpenAI() as of_environment:
        for model in ("writer", "openai/gpt-4o", "gpt-4o-mini"):
            answer = await of_environment.chat.completions.create(model=model, **ASK)
            assert answer.choices[0].message.content, model
    assert {job["agent"] for job in plane.jobs} == {"writer"}


async def test_a_model_that_the_key_may_not_use_is_not_found(plane: Decider) -> None:
    for name, agents in UNKNOWN:
        of_key = client(plane, key=key(plane, agents=agents))
        for asked in (of_key.chat.completions.create(model=name, **ASK), of_key.models.retrieve(name)):
            with pytest.raises(openai.NotFoundError) as found:
                await asked
            assert (found.value.code, found.value.param) == ("model_not_found", "model"), name
    assert plane.jobs == []


async def test_models_are_listed_as_the_key_may_use_them(plane: Decider) -> None:
    listed = [model.id for model in (await client(plane, key=key(plane, agents=("writer",))).models.list()).data]
    assert listed == [
        "writer",
        *(name for model in ("gpt-4o", "claude", "gpt-4o-mini") for name in of("writer", model)),
    ]
    everything = [model.id async for model in client(plane).models.list()]
    assert {"writer", "writer/long", "openai", "writer/openai/gpt-4o"} <= set(everything)
    assert "openai/gpt-4o-mini" not in everything


async def test_models_have_the_fields_that_anthropics_sdk_reads(plane: Decider) -> None:
    page = (await client(plane).models.list()).model_dump()
    first = page["data"][0]
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, first["id"], page["data"][-1]["id"])
    assert first["display_name"] == first["id"]
    assert datetime.fromisoformat(first["created_at"]).timestamp() == first["created"]


def of(agent: str, model: str) -> tuple[str, str]:
    name = f"{'anthropic' if model == 'claude' else 'openai'}/{model}"
    return f"{agent}/{name}", name


async def test_options_come_by_headers_and_by_the_body_which_comes_first(plane: Decider) -> None:
    headers = {
        "x-breakwater-tenant": "acme",
        "x-breakwater-task-id": "t1",
        "x-breakwater-total-timeout-s": "20",
        "x-breakwater-skip-cache": "true",
        "x-breakwater-metadata": '{"a": 1}',
        "x-breakwater-guard": '{"max_iterations": 2}',
    }
    options = {"task_id": "t2", "parent_execution_id": "e0", "metadata": {"b": 2}}
    options |= {"breaker": {"consecutive_failures": 1}}
    asked = client(plane, default_headers=headers)
    await asked.chat.completions.create(model="writer", extra_body={"breakwater": options}, **ASK)
    [job] = plane.jobs
    expected = {
        "tenant": "acme",
        "task_id": "t2",
        "parent_execution_id": "e0",
        "total_timeout_s": 20,
        "skip_cache": True,
        "breaker": {"consecutive_failures": 1},
        "guard": {"max_iterations": 2},
    }
    assert {name: job[name] for name in expected} == expected
    assert job["metadata"] == {"b": 2}
    assert "breakwater" not in job["params"]


@pytest.mark.parametrize("header", SESSION_HEADERS)
async def test_the_session_of_a_program_is_that_of_the_job(plane: Decider, header: str) -> None:
    asked = client(plane, default_headers={header: "s1"})
    await asked.chat.completions.create(model="writer", **ASK)
    await asked.chat.completions.create(model="writer", extra_body={"breakwater": {"session_id": "s2"}}, **ASK)
    assert [job["session_id"] for job in plane.jobs] == ["s1", "s2"]


INVALID: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": [{"role": "user", "content": "x"}, {"role": "robot"}]}, "messages[1].role", "invalid_request"),
    ({"messages": []}, "messages", "invalid_request"),
    *(({"messages": [{"role": "user", "content": empty}]}, "messages", "invalid_request") for empty in ("", " ", [])),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_request"),
    ({"n": 1000}, "n", "invalid_request"),
    ({"max_tokens": "many"}, "max_tokens", "invalid_request"),
    ({"service_tier": "flex"}, "service_tier", "invalid_request"),
    (
        {"extra_body": {"breakwater": {"guard": {"max_iterations": 11}}}},
        "breakwater.guard.max_iterations",
        "invalid_request",
    ),
    ({"extra_body": {"breakwater": {"tennant": "x"}}}, "breakwater.tennant", "invalid_request"),
    (
        {"extra_body": {"breakwater": {"fallback_models": ["gpt-9"]}}},
        "breakwater.fallback_models[0]",
        "invalid_request",
    ),
    (
        {"extra_body": {"breakwater": {"fallback_models": ["anthropic/claude"] * 17}}},
        "breakwater.fallback_models",
        "invalid_request",
    ),
    *(({"extra_body": {"stream": wrong}}, "stream", "invalid_request") for wrong in ("yes", "false", 1)),
    (
        {"extra_body": {"stream": True, "stream_options": {"include_usage": "no"}}},
        "stream_options.include_usage",
        "invalid_request",
    ),
    ({"extra_body": {"breakwater": {"dry_run": "no"}}}, "breakwater.dry_run", "invalid_request"),
    ({"extra_body": {"breakwater": {"skip_cache": 1}}}, "breakwater.skip_cache", "invalid_request"),
    ({"extra_body": {"breakwater": {"total_timeout_s": "5"}}}, "breakwater.total_timeout_s", "invalid_request"),
    ({"extra_headers": {"x-breakwater-tennant": "x"}}, "x-breakwater-tennant", "invalid_request"),
    ({"extra_headers": {"x-breakwater-dry-run": "perhaps"}}, "x-breakwater-dry-run", "invalid_request"),
    ({"extra_headers": {"x-breakwater-metadata": "{"}}, "x-breakwater-metadata", "invalid_request"),
    ({"extra_headers": {"Idempotency-Key": "x" * 129}}, "Idempotency-Key", "invalid_request"),
]


async def test_an_invalid_request_is_refused_with_the_field_at_fault(plane: Decider) -> None:
    for wrong, param, code in INVALID:
        with pytest.raises(openai.BadRequestError) as found:
            await client(plane).chat.completions.create(**({"model": "writer"} | ASK | wrong))
        assert (found.value.param, found.value.code, found.value.type) == (param, code, "invalid_request_error"), wrong
        assert "params." not in found.value.message
    assert plane.jobs == []


async def test_what_is_not_served_is_refused_in_openais_shape(plane: Decider) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await client(plane).moderations.create(model="writer", input="x")
    assert unknown.value.code == "unknown_url"
    for path in (path for path in document()["paths"] if path.startswith("/v1/")):
        assert path.removesuffix("/cancel").removesuffix("/input_items") in unknown.value.message
    for path, said in (
        ("/v1/v1/messages", "ends before /v1"),
        ("/v1/v1/chat/completions", "ends in /v1"),
        ("/chat/completions", "ends in /v1"),
        ("/responses", "ends in /v1"),
        ("/v1/files", "served are"),
        ("/v1/responses/compact", "compaction"),
        ("/v1/responses/input_tokens", "counting of tokens"),
    ):
        answer = await plane.api.ask("POST", path, data=b"{}")
        assert (answer.status, said in answer.json["error"]["message"]) == (404, True), path
    with pytest.raises(openai.AuthenticationError) as without:
        await client(plane, key="bw_0_0").models.list()
    assert without.value.code == "invalid_api_key"
    assert without.value.request_id
    reader = create_key(plane.api.settings.api_keys_file, "reader", ("read",))
    with pytest.raises(openai.PermissionDeniedError) as forbidden:
        await client(plane, key=reader).chat.completions.create(model="writer", **ASK)
    assert forbidden.value.code == "forbidden"
    answer = await plane.api.ask("POST", "/v1/chat/completions", data=b"{")
    assert (answer.status, answer.code, answer.json["error"]["param"]) == (400, "not_json", None)


async def test_a_failed_job_is_an_error_that_the_sdk_does_not_retry(plane: Decider) -> None:
    for reason, kind, error, expected in (
        ("budget_exceeded", "budget_exceeded", {"retry_after_s": 60.0}, (openai.RateLimitError, "insufficient_quota")),
        ("error", "rate_limit", {"status_code": 429}, (openai.RateLimitError, "rate_limit_exceeded")),
        ("breaker_open", "breaker_open", {"retry_after_s": 90.5}, (openai.InternalServerError, "breaker_open")),
        ("guard_tripped", "guard_tripped", {}, (openai.PermissionDeniedError, "guard_tripped")),
        ("error", "server", {"status_code": 500}, (openai.InternalServerError, "provider_error")),
    ):
        plane.end, before = failing(reason, kind, **error), len(plane.jobs)
        with pytest.raises(expected[0]) as found:
            await client(plane, max_retries=5).chat.completions.create(model="writer", **ASK)
        assert isinstance(found.value, openai.APIStatusError)
        assert found.value.code == expected[1]
        headers = found.value.response.headers
        assert headers["x-should-retry"] == "false"
        assert headers["x-breakwater-execution-id"] == plane.jobs[-1]["job_id"]
        assert headers.get("retry-after") == {"budget_exceeded": "60", "breaker_open": "91"}.get(reason)
        assert len(plane.jobs) == before + 1


async def test_who_cannot_wait_is_told_when_and_the_sdk_retries_then_and_not_by_its_own_backoff(
    plane: Decider,
) -> None:
    wait_s = 0.75  # the SDK's own first pause is at most 0.5 s
    plane.ends = [failing("rate_limited", "rate_limit", retry_after_s=wait_s)]
    raw = await client(plane, max_retries=1).chat.completions.with_raw_response.create(model="writer", **ASK)
    assert raw.parse().choices[0].message.content == "done"
    assert raw.retries_taken == 1
    first, second = plane.begun_at
    assert wait_s <= second - first < wait_s + 0.5
    # Without a retry, its caller reads the same: whole seconds, and tenths in milliseconds.
    plane.ends = [failing("rate_limited", "rate_limit", retry_after_s=wait_s)]
    with pytest.raises(openai.RateLimitError) as told:
        await client(plane, max_retries=0).chat.completions.create(model="writer", **ASK)
    headers = told.value.response.headers
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("1", "800")
    assert "x-should-retry" not in headers


async def test_the_sdk_does_not_repeat_a_refusal_that_its_idempotency_key_would_get_again(plane: Decider) -> None:
    plane.end = failing("rate_limited", "rate_limit", retry_after_s=30.0)
    once = {"Idempotency-Key": "order 1"}
    for later_s in (0, 12):
        plane.end["completed_at"] = datetime.now(UTC) - timedelta(seconds=later_s)
        with pytest.raises(openai.RateLimitError) as told:
            await client(plane, max_retries=5).chat.completions.create(model="writer", extra_headers=once, **ASK)
        headers = told.value.response.headers
        assert headers["x-should-retry"] == "false"
        assert 0 <= 30 - later_s - int(headers["retry-after-ms"]) / 1000 < 5
        once = {"Idempotency-Key": "order 2"}


async def test_an_answer_whose_text_was_left_out_is_an_error_and_not_an_empty_answer(plane: Decider) -> None:
    plane.end = {"output": None, "encrypted": LEFT_OUT}
    with pytest.raises(openai.InternalServerError) as found:
        await client(plane, max_retries=5).chat.completions.create(model="writer", **ASK)
    assert found.value.code == "undecryptable"
    assert "BREAKWATER_PLANE_KEY" in found.value.message
    assert found.value.response.headers["x-should-retry"] == "false"
    assert len(plane.jobs) == 1


async def test_the_idempotency_key_is_the_jobs_id_and_another_body_is_a_conflict(plane: Decider) -> None:
    sdk, once = client(plane, max_retries=5), {"Idempotency-Key": "order 1"}
    first = await sdk.chat.completions.create(model="writer", extra_headers=once, **ASK)
    again = await sdk.chat.completions.create(model="writer", extra_headers=once, **ASK)
    assert first == again
    assert [job["job_id"] for job in plane.jobs] == ["order 1"]
    with pytest.raises(openai.ConflictError) as found:
        await sdk.chat.completions.create(model="writer", temperature=1, extra_headers=once, **ASK)
    assert (found.value.code, found.value.param) == ("id_conflict", "Idempotency-Key")
    assert found.value.response.headers["x-should-retry"] == "false"


async def leave(plane: Decider, sdk: Any) -> None:
    """Calls, and closes the connection once the job is there."""
    before = len(plane.jobs)
    call = asyncio.create_task(sdk.chat.completions.create(model="writer", **ASK))
    await until(lambda: len(plane.jobs) > before)
    call.cancel()
    await asyncio.wait([call])


async def test_a_retry_of_the_sdk_attaches_to_the_call_that_it_gave_up(plane: Decider, redis: Redis) -> None:
    commands: Any = redis.client
    plane.may_answer.clear()
    sdk = client(plane, max_retries=0)
    other = asyncio.create_task(sdk.chat.completions.create(model="writer", **ASK))
    await until(lambda: plane.jobs)
    await leave(plane, sdk)
    ids = [job["job_id"] for job in plane.jobs]
    [waiting] = await commands.keys("bw:unanswered-calls:*")

    async def given_up() -> bool:
        return await commands.zscore(waiting, ids[1]) == 0

    async def all_answered() -> bool:
        return not await commands.exists(waiting)

    await until(given_up)
    again = sdk.chat.completions.with_raw_response.create(
        model="writer", extra_headers={"x-stainless-retry-count": "1"}, **ASK
    )
    retry = asyncio.create_task(again)
    plane.may_answer.set()
    assert (await retry).headers["x-breakwater-execution-id"] == ids[1]
    await other
    assert len(plane.jobs) == 2
    await until(all_answered)
    # All are answered, so one more is a call of its own.
    await sdk.chat.completions.create(model="writer", extra_headers={"x-stainless-retry-count": "1"}, **ASK)
    assert len(plane.jobs) == 3


async def test_without_redis_a_retry_is_a_call_of_its_own(redis_away: HttpApi) -> None:
    async with deciding(redis_away) as plane:
        for retries in ("0", "1"):
            await client(plane).chat.completions.create(
                model="writer", extra_headers={"x-stainless-retry-count": retries}, **ASK
            )
        assert len(plane.jobs) == 2


async def test_a_process_that_stops_says_that_the_job_goes_on(own_nats_server: object, plane: Decider) -> None:
    del own_nats_server  # so this process is the test's own
    plane.may_answer.clear()
    call = asyncio.create_task(client(plane, max_retries=0).chat.completions.create(model="writer", **ASK))
    await until(lambda: plane.jobs)
    stopping = asyncio.create_task(plane.api.stop())
    with pytest.raises(openai.InternalServerError) as stopped:
        await call
    await stopping
    assert (stopped.value.status_code, stopped.value.code) == (503, "unavailable")
    headers = stopped.value.response.headers
    assert headers["x-breakwater-execution-id"] == plane.jobs[0]["job_id"]
    assert (headers["retry-after"], headers.get("x-should-retry")) == ("1", None)


async def test_a_call_is_in_the_name_of_the_keys_tenant(plane: Decider) -> None:
    of_tenant = client(plane, key=key(plane, tenants=("acme",)))
    await of_tenant.chat.completions.create(model="writer", **ASK)
    assert plane.jobs[0]["tenant"] == "acme"
    with pytest.raises(openai.PermissionDeniedError) as refused:
        await of_tenant.chat.completions.create(model="writer", extra_headers={"x-breakwater-tenant": "globex"}, **ASK)
    assert (refused.value.code, refused.value.param) == ("forbidden", "breakwater.tenant")


async def test_a_retry_with_another_key_or_body_is_a_call_of_its_own(plane: Decider) -> None:
    plane.may_answer.clear()
    await leave(plane, client(plane))
    plane.may_answer.set()
    again = {"x-stainless-retry-count": "1"}
    sdk = client(plane, max_retries=0)
    await sdk.chat.completions.create(model="writer", extra_headers=again, **ASK)
    await sdk.chat.completions.create(model="writer", temperature=1, extra_headers=again, **ASK)
    assert len(plane.jobs) == 3
