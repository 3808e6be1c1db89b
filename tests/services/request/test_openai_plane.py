"""The unmodified `openai` package against a plane: the request service, a worker and the simulated provider."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import OpenAI
from pydantic import BaseModel

from breakwater.config import load_config
from breakwater.identity.api_keys import create_key
from tests.anthropic_client import accumulated
from tests.any_answers import AnyAnswer
from tests.flow.kit import PRICE, model
from tests.helpers import until
from tests.openai_client import openai_client
from tests.server_sources import RunningServer
from tests.services.request.conftest import HttpApi, running, settings_for
from tests.services.worker.harness import WorkerPlane, running_worker
from tests.services.worker.test_outcomes import fill

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Where is the ferry?"}]}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "find_ship",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
}
MODELS = {
    "sim/fast": model(answer="At sea.", tool_calls=[{"name": "find_ship", "arguments": {"name": "ferry"}}]),
    "sim/json": model(answer_json={"name": "ferry", "knots": 12}),
    "sim/limited": model({"status": 429, "retry_after_s": 3000}),
    "sim/down": model({"status": 500}),
    "sim/recovers": model({"status": 500, "requests": [1, 1]}),
    "sim/counted": model(),
    "sim/unauthorized": model({"status": 401}),
    "sim/strict": model({"status": 400, "error": {"message": "temperature is too high", "param": "temperature"}}),
    "claude": model(answer="At sea.", tool_calls=[{"name": "find_ship", "arguments": {"name": "ferry"}}]),
}
SHIPS = """cat > /dev/null; echo '{"status": "success", "code": 0, "result": {"ships": 3}}'"""
NO_WAIT = {"max_attempts": 1}
REFUSE = {"on_exceeded": "fail"}
AGENTS = {
    "writer": {"model": "sim/fast", "allowed_models": ["sim/json"], "retry": NO_WAIT},
    "counting": {"provider": "tool"},
    "cached": {"model": "sim/fast", "cache": {"ttl_s": 60}},
    "failing": {"model": "sim/down", "retry": NO_WAIT, "breaker": "off"},
    "refused": {"model": "sim/strict", "retry": NO_WAIT},
    "delegated": {"model": "sim/unauthorized", "on_error": "message", "breaker": "off"},
    "limited": {"model": "sim/limited", "breaker": "off"},
    "claude": {"model": "anthropic/claude"},
    "metered": {"model": "sim/fast", "rate_limit": {"requests_per_minute": 3, "tokens_per_minute": 20_000, **REFUSE}},
    "metered-strictly": {"model": "sim/fast", "rate_limit": {"requests_per_minute": 1, **REFUSE}},
    "metered-for-all": {"model": "sim/counted"},
    "capped": {"model": "sim/fast", "budget": {"monthly_usd": "0.0025", "enforcement": "hard"}},
    "recovering": {
        "model": "sim/recovers",
        "retry": NO_WAIT,
        "breaker": {"consecutive_failures": 1, "cooldown_s": 1, "cooldown_jitter": 0},
    },
    "backed-up": {"model": "sim/down", "fallback_models": ["anthropic/claude"], "retry": NO_WAIT, "breaker": "off"},
}


class Ship(BaseModel):
    name: str
    knots: int


@dataclass(frozen=True, slots=True)
class OpenAIPlane:
    api: HttpApi
    worker: WorkerPlane
    bodies: dict[str, AnyAnswer] = field(default_factory=dict[str, AnyAnswer])
    """What the odd provider answers, by the prompt."""

    def sdk(self, *agents: str) -> Any:
        """The package's client, whose types know no arguments from a dict."""
        return openai_client(f"{self.api.url}/v1", self.key(*agents), max_retries=3)

    def key(self, *agents: str) -> str:
        return create_key(self.api.settings.api_keys_file, "app", ("submit",), agents=agents)


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def plane(
    module_nats_server: RunningServer, redis_server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[OpenAIPlane]:
    directory = tmp_path_factory.mktemp("openai")
    started = running_worker(
        directory,
        nats_url=module_nats_server.url,
        redis_url=redis_server.url,
        script={"models": MODELS},
        agents=AGENTS,
        more_models={"sim/counted": {"price": PRICE, "rate_limit": {"requests_per_minute": 10}}},
        budgets={"limits": [{"scope": "key:app within model:sim/json", "requests": 1000, "per": "minute"}]},
        more_providers={
            "tool": {"kind": "process", "command": ["sh", "-c", SHIPS]},
            "anthropic": {"kind": "anthropic", "base_url": "http://127.0.0.1:{sim_port}/v1"},
        },
    )
    async with started as worker:
        settings = settings_for(module_nats_server.url, redis_server.url, directory)
        config = load_config(directory / "breakwater.yaml")
        async with running(settings, config, create_key(settings.api_keys_file, "tests")) as api:
            yield OpenAIPlane(api, worker)


async def test_chat(plane: OpenAIPlane) -> None:
    raw = await plane.sdk().chat.completions.with_raw_response.create(model="writer", **ASK)
    answer = raw.parse()
    assert answer.choices[0].message.content == "At sea."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (120, 40)
    assert (raw.headers["x-breakwater-attempts"], raw.headers["x-breakwater-cost-usd"]) == ("1", "0.000042000")


async def test_the_answer_is_the_providers_own_object_with_all_choices(plane: OpenAIPlane) -> None:
    raw = await plane.sdk().chat.completions.with_raw_response.create(model="writer", n=3, **ASK)
    answer = raw.parse()
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.model == "sim/fast"
    assert answer.usage.completion_tokens == 120
    assert answer.id.startswith("chatcmpl-")
    assert raw.headers["x-breakwater-execution-id"] not in answer.id
    assert raw.headers["x-breakwater-cost-usd"] == "0.000090000"


async def test_an_answer_that_was_cut_says_so_in_either_dialect(plane: OpenAIPlane) -> None:
    for name in ("writer", "backed-up"):
        answer = await plane.sdk().chat.completions.create(model=name, max_tokens=30, **ASK)
        assert answer.choices[0].finish_reason == "length"


async def test_a_cached_answer_is_the_same_object_at_no_cost(plane: OpenAIPlane) -> None:
    first = await plane.sdk().chat.completions.create(model="cached", n=2, **ASK)
    raw = await plane.sdk().chat.completions.with_raw_response.create(model="cached", n=2, **ASK)
    assert raw.parse() == first
    assert (raw.headers["x-breakwater-cache"], raw.headers["x-breakwater-attempts"]) == ("hit", "0")


async def test_a_tool_call_that_is_demanded_satisfies_its_schema(plane: OpenAIPlane) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "find_ship"}}):
        asked = await plane.sdk("writer").chat.completions.create(
            model="sim/json", tools=[TOOL], tool_choice=choice, **ASK
        )
        [call] = asked.choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("find_ship", '{"name":"Where is the ferry?"}')


async def test_the_client_that_is_not_async(plane: OpenAIPlane) -> None:
    sdk: Any = OpenAI(base_url=f"{plane.api.url}/v1", api_key=plane.key())
    answer = await asyncio.to_thread(lambda: sdk.chat.completions.create(model="writer", **ASK))
    assert answer.choices[0].message.content == "At sea."


async def test_tools_and_their_results(plane: OpenAIPlane) -> None:
    for name in ("writer", "backed-up"):
        asked = await plane.sdk().chat.completions.create(model=name, tools=[TOOL], **ASK)
        [choice] = asked.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls
        [call] = choice.message.tool_calls
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == ("find_ship", '{"name":"ferry"}')
        messages: Any = [*ASK["messages"], choice.message, {"role": "tool", "tool_call_id": call.id, "content": "sea"}]
        answer = await plane.sdk().chat.completions.create(model=name, tools=[TOOL], messages=messages)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("At sea.", "stop")


async def test_parsed_outputs_of_a_model_that_the_keys_agent_allows(plane: OpenAIPlane) -> None:
    parsed = await plane.sdk("writer").chat.completions.parse(model="sim/json", response_format=Ship, **ASK)
    assert parsed.choices[0].message.parsed == Ship(name="ferry", knots=12)


async def test_a_fallback_of_another_dialect_answers_as_openai_does(plane: OpenAIPlane) -> None:
    raw = await plane.sdk().chat.completions.with_raw_response.create(model="backed-up", seed=1, **ASK)
    answer = raw.parse()
    assert (answer.object, answer.choices[0].message.content) == ("chat.completion", "At sea.")
    assert answer.usage is not None
    assert answer.usage.total_tokens == 160
    assert raw.headers["x-breakwater-model"] == "anthropic/claude"
    assert (raw.headers["x-breakwater-attempts"], raw.headers["x-breakwater-dropped-params"]) == ("2", "seed")


async def test_the_json_of_a_program_is_the_text_of_the_message(plane: OpenAIPlane) -> None:
    answer = await plane.sdk().chat.completions.create(model="counting", **ASK)
    assert answer.choices[0].message.content == '{"ships": 3}'
    assert answer.usage is None


async def test_what_another_dialect_can_not_take_is_refused(plane: OpenAIPlane) -> None:
    with pytest.raises(openai.BadRequestError, match="'logit_bias' is not supported by Anthropic") as refused:
        await plane.sdk().chat.completions.create(model="claude", logit_bias={"1": 1}, **ASK)
    assert refused.value.param == "logit_bias"


async def test_a_fallback_of_another_dialect_hides_no_failure(plane: OpenAIPlane) -> None:
    with pytest.raises(openai.InternalServerError) as failed:
        await plane.sdk().chat.completions.create(model="backed-up", logit_bias={"1": 1}, **ASK)
    result = await plane.worker.result(failed.value.response.headers["x-breakwater-execution-id"])
    of_attempts = [one["error"]["class"] for one in result["attempts"]]
    assert of_attempts == [result["error"]["class"], "UnsupportedRequestError"]


async def test_a_failure_costs_the_configured_attempts_and_no_retries_of_the_sdk(plane: OpenAIPlane) -> None:
    before = len(plane.worker.sim.ledger.calls)
    with pytest.raises(openai.InternalServerError) as failed:
        await plane.sdk().chat.completions.create(model="failing", **ASK)
    assert (failed.value.status_code, failed.value.code) == (502, "provider_error")
    assert len(plane.worker.sim.ledger.calls) == before + 1
    with pytest.raises(openai.BadRequestError, match="temperature is too high") as refused:
        await plane.sdk().chat.completions.create(model="refused", temperature=9, **ASK)
    assert refused.value.param == "temperature"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_rate_limit_that_lasts_longer_than_the_job_may_is_passed_on_and_calls_no_more(
    plane: OpenAIPlane, stream: bool
) -> None:
    with pytest.raises(openai.RateLimitError) as limited:
        await plane.sdk().chat.completions.create(model="limited", stream=stream, **ASK)
    assert (limited.value.code, limited.value.type) == ("rate_limit_exceeded", "rate_limit_error")
    headers = limited.value.response.headers
    assert 2900 < int(headers["retry-after"]) <= 3000
    assert headers["x-should-retry"] == "false"
    assert plane.worker.sim.ledger.by_model["sim/limited"].calls == 1, "the model is held after the first"


async def test_the_sdk_reads_what_is_left_of_its_own_limits_whole_streamed_and_refused(plane: OpenAIPlane) -> None:
    create = openai_client(f"{plane.api.url}/v1", plane.key(), max_retries=0).chat.completions.with_raw_response.create
    for remaining, stream in (("2", False), ("1", True), ("0", True)):
        headers = (await create(model="metered", stream=stream, **ASK)).headers
        assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == ("3", remaining)
        assert re.fullmatch(r"1m0(\.\d+)?s|[2-5]\d(\.\d+)?s", headers["x-ratelimit-reset-requests"])
        assert headers["x-ratelimit-limit-tokens"] == "20000"
        assert 0 < int(headers["x-ratelimit-remaining-tokens"]) < 20_000
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError) as refused:
            await create(model="metered", stream=stream, **ASK)
        headers = refused.value.response.headers
        assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == ("3", "0")
        wait_ms = int(headers["retry-after-ms"])
        assert 20_000 < wait_ms <= 60_600
        assert int(headers["retry-after"]) == math.ceil(wait_ms / 1000)
        assert headers.get("x-should-retry") == (None if wait_ms < 60_000 else "false")
        result = await plane.worker.result(headers["x-breakwater-execution-id"])
        assert result["limits"]["requests"]["remaining"] == 0
        assert 0 <= wait_ms - result["error"]["retry_after_s"] * 1000 < 100


async def test_a_caller_sees_its_own_limit_on_a_model_and_none_that_it_shares_with_strangers(
    plane: OpenAIPlane,
) -> None:
    create = plane.sdk().chat.completions.with_raw_response.create
    for name, limits in (("metered-for-all", []), ("writer", []), ("writer/sim/json", ["1000"])):
        headers = (await create(model=name, **ASK)).headers
        assert headers.get_list("x-ratelimit-limit-requests") == limits, name
        assert len([header for header in headers if "ratelimit" in header]) == 3 * len(limits), name


async def test_a_call_that_the_sdk_repeats_at_the_time_that_it_is_told_is_admitted(
    plane: OpenAIPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vars(plane.worker.worker.budgets)["_slice_ms"], "minute", 25)  # it has 2.5 seconds then
    create = openai_client(f"{plane.api.url}/v1", plane.key(), max_retries=1).chat.completions.with_raw_response.create
    assert (await create(model="metered-strictly", **ASK)).retries_taken == 0
    raw = await create(model="metered-strictly", **ASK)
    # After its own pause of half a second at most, it would be refused, and not try again.
    assert raw.retries_taken == 1
    assert raw.headers["x-ratelimit-remaining-requests"] == "0"


async def test_a_spent_budget_says_when_its_period_ends_and_no_sdk_waits_for_that(plane: OpenAIPlane) -> None:
    await fill(plane.worker)
    create = plane.sdk().chat.completions.with_raw_response.create
    # Nothing is made up where no window limits the caller.
    assert not [header for header in (await create(model="capped", **ASK)).headers if "ratelimit" in header]
    with pytest.raises(openai.RateLimitError) as refused:
        await create(model="capped", **ASK)
    headers = refused.value.response.headers
    assert (refused.value.code, headers["x-should-retry"]) == ("insufficient_quota", "false")
    now = datetime.now(UTC)
    next_month = (now.replace(day=1) + timedelta(days=32)).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    assert 0 <= int(headers["retry-after"]) - (next_month - now).total_seconds() < 60
    assert not [header for header in headers if "ratelimit" in header]


async def test_the_sdk_retries_when_the_breaker_admits_a_call_and_not_by_its_own_backoff(plane: OpenAIPlane) -> None:
    await plane.worker.worker.breakers.mark_filled("log")
    sdk = plane.sdk()
    with pytest.raises(openai.InternalServerError) as failed:
        await sdk.chat.completions.create(model="recovering", **ASK)
    assert failed.value.response.headers["x-should-retry"] == "false", "the plane has made all tries of this call"
    raw = await sdk.chat.completions.with_raw_response.create(model="recovering", **ASK)
    # By itself, the SDK would have paused for half a second, and been refused again.
    assert raw.retries_taken == 1
    assert plane.worker.sim.ledger.by_model["sim/recovers"].calls == 2


async def test_a_dry_run_calls_nothing_and_answers_with_the_plan(plane: OpenAIPlane) -> None:
    before = len(plane.worker.sim.ledger.calls)
    options = {"breakwater": {"dry_run": True}}
    answer = await plane.sdk().chat.completions.create(model="writer", extra_body=options, **ASK)
    assert "sim/fast" in str(answer.choices[0].message.content)
    assert len(plane.worker.sim.ledger.calls) == before


async def test_with_on_error_message_a_parent_agent_reads_the_failure_through_every_api(plane: OpenAIPlane) -> None:
    sdk = plane.sdk()
    said: dict[str, str] = {}

    raw = await sdk.chat.completions.with_raw_response.create(model="delegated", **ASK)
    choice = raw.parse().choices[0]
    assert (choice.message.role, choice.finish_reason) == ("assistant", "stop")
    assert raw.headers["x-breakwater-error"] == "UnauthorizedError"
    said["chat"] = choice.message.content
    stream = await sdk.chat.completions.create(model="delegated", stream=True, **ASK)
    said["chat stream"] = "".join([one.choices[0].delta.content or "" async for one in stream if one.choices])

    response = await sdk.responses.create(model="delegated", input="Where is the ferry?")
    assert response.status == "completed"
    said["response"] = response.output_text
    said["stored response"] = (await sdk.responses.retrieve(response.id)).output_text
    events = [event async for event in await sdk.responses.create(model="delegated", input="x", stream=True)]
    assert events[-1].type == "response.completed"
    said["response stream"] = "".join(one.delta for one in events if one.type == "response.output_text.delta")
    background = await sdk.responses.create(model="delegated", input="x", background=True)

    async def ended() -> Any:
        found = await sdk.responses.retrieve(background.id)
        return None if found.status in {"queued", "in_progress"} else found

    said["background response"] = (await until(ended, "the background response")).output_text
    follow = await sdk.responses.create(model="writer", input="And now?", previous_response_id=response.id)
    assert follow.status == "completed"

    asked: Any = {"model": "delegated", "max_tokens": 100, "messages": ASK["messages"]}
    headers = {"x-api-key": plane.key()}
    for stream in (False, True):
        body = asked | {"stream": stream}
        async with plane.api.http.post(f"{plane.api.url}/v1/messages", json=body, headers=headers) as answer:
            assert answer.status == 200
            text = await answer.text()
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        message = accumulated(map(json.loads, lines)) if stream else json.loads(text)
        assert (message["role"], message["stop_reason"]) == ("assistant", "end_turn")
        said[f"message, stream: {stream}"] = message["content"][0]["text"]

    assert len(set(said.values())) == 1, said
    assert "Unauthorized" in said["chat"]
    assert "401" in said["chat"]
    with pytest.raises(openai.APIStatusError):
        await sdk.embeddings.create(model="delegated", input="x")
